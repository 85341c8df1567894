//! Bytes as a program of operations, checked against the model after each: the first byte chooses the
//! configuration, every six that follow are an operation.
//!
//! Not covered: what the model does not know (`lowtide_sim::program` lists it), and large devices:
//! memory here is 128 MiB, so that little is needed to run out of it.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use lowtide_sim::program::{CAPACITY, Op, Runner, configs};

static CONFIGS: LazyLock<Vec<lowtide_core::Config>> = LazyLock::new(configs);

fuzz_target!(|data: &[u8]| {
    let Some((&choice, program)) = data.split_first() else {
        return;
    };
    let config = &CONFIGS[usize::from(choice) % CONFIGS.len()];
    let program = Op::decode_all(program);
    if let Err(error) = Runner::run(config, CAPACITY, &program) {
        panic!("{error}\n{program:?}");
    }
});
