//! Makes every driver call once on device 0 of this machine. Then runs some thousand requests with every strategy
//! and checks the contents. Prints one line per step. Exits with code 1 at the first step that fails.
//!
//! ```text
//! cargo run --release --package lowtide-cuda --example smoke [LIBRARY]
//! ```
#![allow(unsafe_code, reason = "see crates/cuda/src/lib.rs")]
#![expect(clippy::print_stdout, reason = "what it prints is what it is for")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::error::Error;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Instant;

use common::program::Program;
use common::steps::{self, Outcome, expect};
use lowtide_core::{Bytes, Driver};
use lowtide_cuda::{CudaDriver, Library};

const STEPS: usize = 8000;
const REQUEST_MAX: Bytes = Bytes::mib(32);

const CONFIGS: [&str; 8] = [
    "direct",
    "pool:slab_size_mb:512",
    "buddy",
    "slab",
    "bfc",
    "caching",
    "caching:expandable_segments:True",
    "tide",
];

fn main() -> ExitCode {
    let path = std::env::args_os().nth(1);
    let mut log = Log::default();
    match run(&mut log, path.unwrap_or_else(|| "libcuda.so.1".into())) {
        Ok(()) => {
            println!("all {} steps passed", log.passed);
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("FAILED after {} steps: {error}", log.passed);
            ExitCode::FAILURE
        }
    }
}

/// Prints and counts the steps.
#[derive(Default)]
struct Log {
    passed: usize,
}

impl Log {
    fn take(&mut self, name: &str, step: impl FnOnce() -> Outcome) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        let outcome = step().map_err(|error| format!("{name}: {error}"))?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        println!("ok {ms:9.2} ms  {name}: {outcome}");
        self.passed += 1;
        Ok(())
    }
}

fn run(log: &mut Log, path: OsString) -> Result<(), Box<dyn Error>> {
    // SAFETY: the caller names a driver.
    let library = unsafe { Library::open(&path) }?;
    let device = library.device(0)?;
    log.take("device", || steps::describe(&library, &device))?;

    let program = Program::new(&path)?;
    // SAFETY: streams come from `program` in the device's primary context, which nothing resets; everything else
    // comes from the driver itself.
    let mut driver = unsafe { CudaDriver::new(device.clone()) }?;
    log.take("a thread without a context has none after a call", || {
        driver.memory_info()?;
        expect(program.current_context()? == 0, "a context was left behind")
    })?;
    program.use_device(0)?;
    let streams = [program.create_stream()?, program.create_stream()?];
    log.take("memory", || steps::plain_memory(&mut driver))?;
    log.take("virtual memory", || steps::virtual_memory(&mut driver))?;
    log.take("export, import", || steps::export_and_import(&mut driver))?;
    log.take("a range for others", || steps::import_range(&mut driver))?;
    log.take("events, streams", || steps::events(&mut driver, streams))?;
    log.take("capture", || {
        steps::capture(&mut driver, &program, streams[0])
    })?;
    log.take("captured order", || {
        steps::captured_order(&mut driver, &program, streams)
    })?;
    log.take("errors", || steps::errors(&mut driver))?;
    log.take("peers", || steps::peers(&library, &mut driver))?;
    log.take("a peer's stream", || {
        steps::foreign_stream(&mut driver, &program)
    })?;
    drop(driver);
    for config in CONFIGS {
        log.take(config, || {
            // SAFETY: as for the first driver.
            let driver = unsafe { CudaDriver::new(device.clone()) }?;
            steps::strategy(driver, &config.parse()?, streams, STEPS, REQUEST_MAX)
        })?;
    }
    Ok(())
}
