//! lowtide's benchmarks: their definitions, workloads and expected answers.
//!
//! `definitions.toml` lists pair benchmarks (a free and an allocation with many live blocks) and replays of
//! recorded jobs. Each has an expected answer in `answers.toml`. It is checked before timing, so that a broken
//! allocator is not measured. `cargo bench` times the benchmarks with criterion. The program beside this library
//! keeps the gate on instruction counts and writes records.
#![forbid(unsafe_code)]

mod answers;
mod definitions;
mod pairs;
mod replays;
mod workload;

pub use answers::{Answers, PairAnswer, ReplayAnswer, check_answer};
pub use definitions::{Definitions, PairCase, ReplayCase, ReplayLimit};
pub use pairs::PairBench;
pub use replays::{Recording, ReplayBench};
