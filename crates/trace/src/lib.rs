//! lowtide trace.
#![forbid(unsafe_code)]
