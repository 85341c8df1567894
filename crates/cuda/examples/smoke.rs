//! Makes every call of the driver once on device 0 of this machine, then takes every strategy through
//! some thousand requests, contents checked. A line for each step; exit code 1 at the first that fails.
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
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use common::Program;
use lowtide_core::{Bytes, Config, DeviceAllocator, Driver, Handle, Stream};
use lowtide_cuda::{Attribute, CaptureStatus, CudaDriver, Device, Library};

type Outcome = Result<String, Box<dyn Error>>;

const REQUESTS: usize = 4000;
const REQUEST_MAX: Bytes = Bytes::mib(32);

const CONFIGS: [&str; 7] = [
    "direct",
    "pool:slab_size_mb:512",
    "buddy",
    "slab",
    "bfc",
    "caching",
    "caching:expandable_segments:True",
];

fn main() -> ExitCode {
    let path = std::env::args_os().nth(1);
    let mut steps = Steps::default();
    match run(&mut steps, path.unwrap_or_else(|| "libcuda.so.1".into())) {
        Ok(()) => {
            println!("all {} steps passed", steps.passed);
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("FAILED after {} steps: {error}", steps.passed);
            ExitCode::FAILURE
        }
    }
}

/// Prints and counts.
#[derive(Default)]
struct Steps {
    passed: usize,
}

impl Steps {
    fn take(&mut self, name: &str, step: impl FnOnce() -> Outcome) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        let outcome = step().map_err(|error| format!("{name}: {error}"))?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        println!("ok {ms:9.2} ms  {name}: {outcome}");
        self.passed += 1;
        Ok(())
    }
}

fn run(steps: &mut Steps, path: OsString) -> Result<(), Box<dyn Error>> {
    // SAFETY: whoever runs this names a driver.
    let library = unsafe { Library::open(&path) }?;
    let device = library.device(0)?;
    steps.take("device", || describe(&library, &device))?;

    let program = Program::new(&path)?;
    // SAFETY: streams come from `program` in the device's primary context, which nothing resets; the
    // rest comes from the driver itself.
    let mut driver = unsafe { CudaDriver::new(device.clone()) }?;
    steps.take("a thread without a context has none after calls", || {
        driver.memory_info()?;
        expect(program.current_context()? == 0, "a context was left behind")
    })?;
    program.use_device(0)?;
    let streams = [program.create_stream()?, program.create_stream()?];
    steps.take("the context that is current stays", || {
        let before = program.current_context()?;
        driver.memory_info()?;
        expect(
            before != 0 && before == program.current_context()?,
            "it changed",
        )
    })?;
    steps.take("memory", || plain_memory(&mut driver))?;
    steps.take("virtual memory", || virtual_memory(&mut driver))?;
    steps.take("export and import", || export_and_import(&mut driver))?;
    steps.take("events and streams", || events(&mut driver, streams))?;
    steps.take("capture", || capture(&mut driver, &program, streams[0]))?;
    steps.take("errors", || errors(&mut driver))?;
    steps.take("peers", || peers(&library, &mut driver))?;
    drop(driver);
    for text in CONFIGS {
        steps.take(text, || strategy(&device, text, streams))?;
    }
    Ok(())
}

fn describe(library: &Arc<Library>, device: &Device) -> Outcome {
    let [
        major,
        minor,
        domain,
        bus,
        slot,
        virtual_memory,
        exportable,
        rdma,
    ] = [
        Attribute::ComputeCapabilityMajor,
        Attribute::ComputeCapabilityMinor,
        Attribute::PciDomain,
        Attribute::PciBus,
        Attribute::PciDevice,
        Attribute::VirtualMemory,
        Attribute::PosixFileDescriptors,
        Attribute::GpuDirectRdma,
    ]
    .map(|attribute| device.attribute(attribute));
    Ok(format!(
        "{} of {}, GPU-{}, {}, compute capability {}.{}, PCI {:04x}:{:02x}:{:02x}, virtual memory {}, \
         file descriptors {}, RDMA {}",
        device.name()?,
        library.device_count()?,
        device.uuid()?,
        device.total_memory()?,
        major?,
        minor?,
        domain?,
        bus?,
        slot?,
        virtual_memory?,
        exportable?,
        rdma?
    ))
}

fn plain_memory(driver: &mut CudaDriver) -> Outcome {
    let before = driver.memory_info()?;
    let size = Bytes::mib(64);
    let address = driver.allocate(size)?;
    let during = driver.memory_info()?;
    driver.write(address, b"first")?;
    driver.fill(address + Bytes(5), Bytes(3), b'!', Stream::DEFAULT)?;
    let mut copy = [0; 8];
    driver.read(address, &mut copy)?;
    driver.free(address, size)?;
    expect(&copy == b"first!!!", "wrong contents")?;
    expect(during.free < before.free, "it came from nowhere")?;
    Ok(format!("{} of {} were free", before.free, before.total))
}

fn virtual_memory(driver: &mut CudaDriver) -> Outcome {
    if !driver.supports_virtual_memory() {
        return Ok("not supported".to_owned());
    }
    let size = driver.granularity();
    let address = driver.reserve(size + size)?;
    let handle = driver.create(size)?;
    driver.map(address, size, handle)?;
    driver.map(address + size, size, handle)?;
    driver.set_access(address, size + size)?;
    driver.fill(address, size, 7, Stream::DEFAULT)?;
    let mut copy = [0; 4096];
    driver.read(address + size, &mut copy)?;
    driver.unmap(address, size)?;
    driver.unmap(address + size, size)?;
    driver.release(handle)?;
    driver.unreserve(address, size + size)?;
    expect(
        copy == [7; 4096],
        "one handle at two addresses has two contents",
    )?;
    Ok(format!(
        "pages of {size}, exportable: {}",
        driver.supports_export()
    ))
}

fn export_and_import(driver: &mut CudaDriver) -> Outcome {
    if !driver.supports_export() {
        return Ok("not supported".to_owned());
    }
    let size = driver.granularity();
    let handle = driver.create(size)?;
    let descriptor = driver.export(handle)?;
    let imported = driver.import(descriptor.as_fd())?;
    let written = with_mapped(driver, handle, |driver, address| {
        Ok(driver.write(address, b"shared")?)
    });
    let mut copy = [0; 6];
    let read = with_mapped(driver, imported, |driver, address| {
        Ok(driver.read(address, &mut copy)?)
    });
    driver.release(handle)?;
    driver.release(imported)?;
    written.and(read)?;
    expect(&copy == b"shared", "the imported memory is another")
}

/// Maps one page of `handle` for the time of `use_it`.
fn with_mapped(
    driver: &mut CudaDriver,
    handle: Handle,
    use_it: impl FnOnce(&mut CudaDriver, lowtide_core::DeviceAddress) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let size = driver.granularity();
    let address = driver.reserve(size)?;
    driver.map(address, size, handle)?;
    driver.set_access(address, size)?;
    let used = use_it(driver, address);
    driver.unmap(address, size)?;
    driver.unreserve(address, size)?;
    used
}

fn events(driver: &mut CudaDriver, [first, second]: [Stream; 2]) -> Outcome {
    let size = Bytes::gib(1);
    let address = driver.allocate(size)?;
    driver.fill(address, size, 1, first)?;
    let filled = driver.record_event(first)?;
    let passed_at_once = driver.query_event(filled)?;
    driver.wait_event(second, filled)?;
    driver.fill(address, size, 2, second)?;
    let refilled = driver.record_event(second)?;
    driver.synchronize_event(refilled)?;
    expect(
        driver.query_event(filled)?,
        "what was waited for has not passed",
    )?;
    driver.release_event(filled);
    driver.release_event(refilled);
    let again = driver.record_event(first)?;
    driver.synchronize_stream(first)?;
    expect(
        driver.query_event(again)?,
        "the stream is done and the event is not",
    )?;
    driver.release_event(again);
    let mut copy = [0; 4096];
    driver.read(address + (size - Bytes(4096)), &mut copy)?;
    driver.free(address, size)?;
    expect(copy == [2; 4096], "the second stream did not wait")?;
    expect(again == refilled, "events are not used again")?;
    Ok(format!("had passed at once: {passed_at_once}"))
}

fn capture(driver: &mut CudaDriver, program: &Program, stream: Stream) -> Outcome {
    expect(
        driver.capture_status(stream)? == CaptureStatus::None,
        "captures already",
    )?;
    program.begin_capture(stream)?;
    let status = driver.capture_status(stream)?;
    let id = driver.capture_id(stream)?;
    // From this thread, which captures, and from another, which the mode forbids as much.
    memory_calls(driver)?;
    thread::scope(|scope| {
        let calls = scope.spawn(|| memory_calls(driver).map_err(|error| error.to_string()));
        calls.join().map_err(|_| "the thread panicked".to_owned())?
    })?;
    let status_after = driver.capture_status(stream)?;
    program.end_capture(stream)?;
    expect(
        status == CaptureStatus::Active && id.is_some(),
        "does not capture",
    )?;
    expect(status_after == status, "the capture is spoiled")?;
    Ok(format!("number {id:?} survives calls for memory"))
}

fn memory_calls(driver: &mut CudaDriver) -> Result<(), Box<dyn Error>> {
    let size = Bytes::mib(2);
    let address = driver.allocate(size)?;
    driver.free(address, size)?;
    if driver.supports_virtual_memory() {
        let handle = driver.create(driver.granularity())?;
        let mapped = with_mapped(driver, handle, |_, _| Ok(()));
        driver.release(handle)?;
        mapped?;
    }
    Ok(())
}

fn errors(driver: &mut CudaDriver) -> Outcome {
    let Err(too_much) = driver.allocate(Bytes::gib(1 << 20)) else {
        return Err("the device has a PiB".into());
    };
    expect(
        too_much == lowtide_core::DriverError::OutOfMemory,
        "not out of memory",
    )?;
    let Err(beyond) = driver.device().library().device(1000) else {
        return Err("there are a thousand devices".into());
    };
    Ok(format!("{too_much}; {beyond}"))
}

fn peers(library: &Arc<Library>, driver: &mut CudaDriver) -> Outcome {
    if library.device_count()? < 2 {
        return Ok("one device only".to_owned());
    }
    let peer = library.device(1)?;
    if !peer.can_access(driver.device())? {
        return Ok("no access".to_owned());
    }
    // SAFETY: it is given only what is its own.
    let mut other = unsafe { CudaDriver::new(peer.clone()) }?;
    other.enable_peer(driver)?;
    other.enable_peer(driver)?;
    let size = driver.granularity();
    let address = driver.allocate(size)?;
    other.fill(address, size, 3, Stream::DEFAULT)?;
    other.synchronize_stream(Stream::DEFAULT)?;
    let mut copy = [0; 16];
    driver.read(address, &mut copy)?;
    driver.free(address, size)?;
    expect(copy == [3; 16], "the peer wrote elsewhere")?;

    let handle = driver.create(size)?;
    with_mapped(driver, handle, |driver, address| {
        driver.grant_to_peer(address, size, &peer)?;
        other.fill(address, size, 4, Stream::DEFAULT)?;
        Ok(other.synchronize_stream(Stream::DEFAULT)?)
    })?;
    driver.add_peer(&peer);
    with_mapped(driver, handle, |driver, address| {
        driver.read(address, &mut copy)?;
        other.fill(address, size, 5, Stream::DEFAULT)?;
        Ok(other.synchronize_stream(Stream::DEFAULT)?)
    })?;
    driver.release(handle)?;
    expect(copy == [4; 16], "the peer wrote elsewhere")
}

fn strategy(device: &Device, text: &str, streams: [Stream; 2]) -> Outcome {
    let config: Config = text.parse()?;
    // SAFETY: as for the first driver.
    let driver = unsafe { CudaDriver::new(device.clone()) }?;
    let mut allocator = DeviceAllocator::new(driver, 0, &config);
    common::exercise(&mut allocator, streams, REQUESTS, REQUEST_MAX)?;
    let stats = allocator.stats();
    expect(stats.allocated_bytes.all.current == 0, "blocks are left")?;
    Ok(format!(
        "{} requests, peak {} allocated, {} reserved",
        stats.allocation.all.allocated,
        bytes(stats.allocated_bytes.all.peak)?,
        bytes(stats.reserved_bytes.all.peak)?
    ))
}

fn bytes(figure: i64) -> Result<Bytes, Box<dyn Error>> {
    Ok(Bytes(u64::try_from(figure)?))
}

fn expect(condition: bool, otherwise: &str) -> Outcome {
    if condition {
        Ok("as it should be".to_owned())
    } else {
        Err(otherwise.into())
    }
}
