//! lowtide replay.
#![forbid(unsafe_code)]
