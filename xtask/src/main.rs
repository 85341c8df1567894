//! cargo xtask
fn main() {}
