//! Makes every driver call once: one function per group of calls, which returns what it found.

use std::error::Error;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;

use lowtide_core::{
    Bytes, Config, DeviceAddress, DeviceAllocator, Driver, DriverError, EventHandle, Handle, Stream,
};
use lowtide_cuda::{Attribute, CaptureStatus, CudaDriver, Device, Library};

use super::load::Load;
use super::program::Program;

/// The description of what a step found, or its error.
pub(crate) type Outcome = Result<String, Box<dyn Error>>;

pub(crate) fn describe(library: &Arc<Library>, device: &Device) -> Outcome {
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

pub(crate) fn plain_memory(driver: &mut CudaDriver) -> Outcome {
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

pub(crate) fn virtual_memory(driver: &mut CudaDriver) -> Outcome {
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

pub(crate) fn export_and_import(driver: &mut CudaDriver) -> Outcome {
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

/// Maps two handles at consecutive addresses, and shares a block that lies in both as another process would receive
/// it.
pub(crate) fn import_range(driver: &mut CudaDriver) -> Outcome {
    if !driver.supports_export() {
        return Ok("not supported".to_owned());
    }
    let size = driver.granularity();
    let all = size + size;
    let start = driver.reserve(all)?;
    let mut handles = Vec::new();
    for address in [start, start + size] {
        let handle = driver.create(size)?;
        driver.map(address, size, handle)?;
        handles.push(handle);
    }
    driver.set_access(start, all)?;
    let block = start + (size - Bytes(6));
    driver.write(block, b"on the edge")?;

    let mut held = driver.begin_import(all)?;
    for &handle in &handles {
        let descriptor = driver.export(handle)?;
        driver.import_part(&mut held, &descriptor, size)?;
    }
    driver.finish_import(&held)?;
    let imported = held.address().ok_or("no address")?;
    let mut copy = [0; 11];
    driver.read(imported + block.offset_from(start), &mut copy)?;
    driver.write(imported, b"back")?;
    expect(&copy == b"on the edge", "the imported memory is another")?;
    driver.unmap(start, all)?;
    driver.unreserve(start, all)?;
    for handle in handles {
        driver.release(handle)?;
    }
    driver.read(imported, &mut copy)?;
    driver.end_import(&mut held)?;
    expect(
        copy.starts_with(b"back"),
        "the memory went with the exporter's mapping",
    )
}

/// Maps one page of `handle` while `use_it` runs.
fn with_mapped(
    driver: &mut CudaDriver,
    handle: Handle,
    use_it: impl FnOnce(&mut CudaDriver, DeviceAddress) -> Result<(), Box<dyn Error>>,
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

pub(crate) fn events(driver: &mut CudaDriver, [first, second]: [Stream; 2]) -> Outcome {
    let size = Bytes::mib(64);
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

pub(crate) fn capture(driver: &mut CudaDriver, program: &Program, stream: Stream) -> Outcome {
    expect(
        driver.capture_status(stream)? == CaptureStatus::None,
        "captures already",
    )?;
    let event = driver.record_event(Stream::DEFAULT)?;
    program.begin_capture(stream)?;
    let status = driver.capture_status(stream)?;
    let id = driver.capture_of(stream);
    expect(id.is_some(), "does not say which capture")?;
    // From this thread, which captures, and from another thread, for which the capture's mode forbids the calls as
    // well.
    calls_in_capture(driver, event)?;
    thread::scope(|scope| {
        let calls =
            scope.spawn(|| calls_in_capture(driver, event).map_err(|error| error.to_string()));
        calls.join().map_err(|_| "the thread panicked".to_owned())?
    })?;
    let status_after = driver.capture_status(stream)?;
    program.end_capture(stream)?;
    driver.release_event(event);
    expect(status == CaptureStatus::Active, "does not capture")?;
    expect(status_after == status, "the capture is spoiled")?;
    Ok(format!("number {id:?} survives calls for memory"))
}

fn calls_in_capture(driver: &mut CudaDriver, event: EventHandle) -> Result<(), Box<dyn Error>> {
    driver.query_event(event)?;
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

pub(crate) fn errors(driver: &mut CudaDriver) -> Outcome {
    let Err(too_much) = driver.allocate(Bytes::gib(1 << 20)) else {
        return Err("the device has a PiB".into());
    };
    expect(too_much == DriverError::OutOfMemory, "not out of memory")?;
    let Err(beyond) = driver.device().library().device(1000) else {
        return Err("there are a thousand devices".into());
    };
    Ok(format!("{too_much}; {beyond}"))
}

pub(crate) fn peers(library: &Arc<Library>, driver: &mut CudaDriver) -> Outcome {
    if library.device_count()? < 2 {
        return Ok("one device only".to_owned());
    }
    let peer = library.device(1)?;
    if !peer.can_access(driver.device())? {
        return Ok("no access".to_owned());
    }
    // SAFETY: it is given only what came from it.
    let mut other = unsafe { CudaDriver::new(peer.clone()) }?;
    let size = driver.granularity();
    let handle = driver.create(size)?;
    // Memory mapped before peer access was enabled, memory mapped after that, and an allocation.
    with_mapped(driver, handle, |driver, address| {
        let mapped = [(address, size)];
        driver.allow_peer(&peer, &mapped)?;
        driver.allow_peer(&peer, &mapped)?;
        other.fill(address, size, 4, Stream::DEFAULT)?;
        Ok(other.synchronize_stream(Stream::DEFAULT)?)
    })?;
    let mut copy = [0; 16];
    with_mapped(driver, handle, |driver, address| {
        driver.read(address, &mut copy)?;
        other.fill(address, size, 5, Stream::DEFAULT)?;
        Ok(other.synchronize_stream(Stream::DEFAULT)?)
    })?;
    driver.release(handle)?;
    expect(copy == [4; 16], "the peer wrote elsewhere")?;

    let address = driver.allocate(size)?;
    other.fill(address, size, 3, Stream::DEFAULT)?;
    other.synchronize_stream(Stream::DEFAULT)?;
    driver.read(address, &mut copy)?;
    driver.free(address, size)?;
    expect(copy == [3; 16], "the peer wrote elsewhere")
}

/// Records an event in a stream of another device: its work may use this device's memory.
pub(crate) fn foreign_stream(driver: &mut CudaDriver, program: &Program) -> Outcome {
    if driver.device().library().device_count()? < 2 {
        return Ok("one device only".to_owned());
    }
    program.use_device(1)?;
    let stream = program.create_stream()?;
    program.use_device(0)?;
    for _ in 0..2 {
        let event = driver.record_event(stream)?;
        driver.synchronize_event(event)?;
        expect(driver.query_event(event)?, "it was waited for")?;
        driver.release_event(event);
    }
    let own = driver.record_event(Stream::DEFAULT)?;
    driver.synchronize_event(own)?;
    driver.release_event(own);
    expect(
        program.current_context()? != 0,
        "the current context is gone",
    )
}

/// Runs a [`Load`] on an allocator with this configuration.
pub(crate) fn strategy(
    driver: CudaDriver,
    config: &Config,
    streams: [Stream; 2],
    steps: usize,
    size_max: Bytes,
) -> Outcome {
    let mut allocator = DeviceAllocator::new(driver, 0, config);
    let mut load = Load {
        allocator: &mut allocator,
        streams,
        steps,
        size_max,
        failures_allowed: 0,
    };
    load.run()?;
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

pub(crate) fn expect(condition: bool, otherwise: &str) -> Outcome {
    if condition {
        Ok("as it should be".to_owned())
    } else {
        Err(otherwise.into())
    }
}

/// Checks that the graph knows the order of work in two streams that fork and join.
pub(crate) fn captured_order(
    driver: &mut CudaDriver,
    program: &Program,
    [first, second]: [Stream; 2],
) -> Outcome {
    let size = Bytes::mib(2);
    let address = driver.allocate(size)?;
    program.begin_capture(first)?;
    let start = driver.capture_point(first).unwrap_or_default();
    let id = driver.capture_of(first);
    driver.fill(address, size, 1, first)?;
    let fork = driver.record_event(first)?;
    driver.wait_event(second, fork)?;
    let forked = driver.capture_point(second).unwrap_or_default();
    driver.fill(address, size, 2, second)?;
    let beside = driver.capture_point(second).unwrap_or_default();
    driver.fill(address, size, 3, first)?;
    let before = driver.capture_point(first).unwrap_or_default();
    let join = driver.record_event(second)?;
    driver.wait_event(first, join)?;
    driver.fill(address, size, 4, first)?;
    let after = driver.capture_point(first).unwrap_or_default();
    let dependencies: Vec<_> = { after.after.iter() }
        .flat_map(|&node| driver.dependencies(node))
        .collect();
    program.end_capture(first)?;
    driver.release_event(fork);
    driver.release_event(join);
    driver.free(address, size)?;
    expect(
        start.after.is_empty() && start.capture == beside.capture && id == Some(start.capture),
        "the streams are in two captures",
    )?;
    let [[fork], [beside], [before]] =
        [&forked.after, &beside.after, &before.after].map(|nodes| &nodes[..])
    else {
        return Err(format!("{forked:?}, {beside:?} or {before:?} is not one node").into());
    };
    expect(
        fork != before && fork != beside,
        "work has no node of its own",
    )?;
    expect(
        dependencies.contains(beside) && dependencies.contains(before) && dependencies.len() == 2,
        "the last comes after others than both",
    )?;
    expect(driver.capture_point(first).is_none(), "captures still")?;
    Ok(format!("{dependencies:?} come before {:?}", after.after))
}
