//! Reads and writes pickles as plain data, and never runs what is in them.
//!
//! A pickle is a program for a stack machine; most of its opcodes push, memoize and combine plain
//! data, a few call into Python. [`Machine`] carries out the first kind and refuses the second by
//! name, but for few constructors whose results are plain data. What it builds is flat: values refer to lists, dicts, tuples and strings by number, so
//! shared and even recursive objects cost nothing, nesting cannot exhaust anything, and dropping it
//! all does not recurse.
//!
//! A recording holds millions of dicts of the same few shapes. A [`Recogniser`] sees each dict when
//! it is completed and may replace it by a small record, so a file is never in memory as a tree.

mod callables;
mod calls;
mod heap;
mod machine;
mod opcodes;
mod strings;
mod writer;

pub(crate) use heap::{Dict, Heap, Value};
pub(crate) use machine::{Machine, Recogniser};
pub(crate) use opcodes::data as opcode;
pub(crate) use strings::{StringId, Strings};
pub(crate) use writer::{Memo, PickleWriter};
