//! lowtide's benchmarks: what is measured, on what workload, and the answers that must come out.
//!
//! `definitions.toml` lists pair benchmarks (a free and an allocation with many blocks live) and
//! replays of recorded jobs. Each has an expected answer in `answers.toml`, checked before anything
//! is timed, so that a broken allocator is not measured. `cargo bench` times them with criterion; the
//! program beside this library keeps the gate on instruction counts and writes records.
#![forbid(unsafe_code)]

mod answers;
mod definitions;
mod pairs;
mod replays;
mod workload;

pub use answers::{Answers, PairAnswer, ReplayAnswer, WrongAnswer};
pub use definitions::{Definitions, PairCase, ReplayCase, ReplayLimit};
pub use pairs::PairBench;
pub use replays::{Recording, ReplayBench};
