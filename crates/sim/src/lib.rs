//! lowtide sim.
#![forbid(unsafe_code)]
