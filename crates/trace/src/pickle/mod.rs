//! Reads and writes pickles as plain data, and never executes their code.
//!
//! A pickle is a program for a stack machine. Most of its opcodes push, memoize and combine plain data; a few call
//! into Python. [`Machine`] executes the former. It refuses the latter with an error that names the opcode, except
//! for a few constructors whose results are plain data.
//!
//! The result is flat: values refer to lists, dicts, tuples and strings by number. So shared and even recursive
//! objects cost nothing, deep nesting exhausts no stack, and dropping the result does not recurse.
//!
//! A recording holds millions of dicts of the same few kinds. A [`Recogniser`] sees each dict when it is complete
//! and may replace it by a small record, so a file is never in memory as a tree.

mod callables;
mod calls;
mod heap;
mod machine;
mod opcodes;
mod strings;
mod writer;

pub(crate) use heap::{Dict, Heap, Value};
pub(crate) use machine::{Machine, Recogniser, set_items};
pub(crate) use opcodes::data as opcode;
pub(crate) use strings::{StringId, Strings};
pub(crate) use writer::{Memo, PickleWriter};
