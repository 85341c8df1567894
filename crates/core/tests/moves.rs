//! Which idle memory `tide` moves.

use lowtide_core::{AllocError, Bytes, DeviceAllocator, Stream};
use lowtide_sim::{SimConfig, SimDriver};

type Outcome = Result<(), AllocError>;

const SIZE: Bytes = Bytes::mib(8);
const KEPT: Stream = Stream(1);
const OTHER: Stream = Stream(2);

/// Returns an allocator on a device where one stream exists for ever.
fn tide() -> DeviceAllocator<SimDriver> {
    let mut driver = SimDriver::new(SimConfig::default());
    driver.keep_stream(KEPT);
    DeviceAllocator::new(driver, 0, &"tide".parse().expect("the strategy exists"))
}

fn reserved(allocator: &DeviceAllocator<SimDriver>) -> Bytes {
    allocator.stats().reserved()
}

/// Returns how much new memory a request gets after a block of a stream was freed, with work of `ns` queued there.
fn grown_after(freed: Stream, ns: u64) -> Result<Bytes, AllocError> {
    let mut allocator = tide();
    let block = allocator.allocate(SIZE, freed)?;
    allocator.driver().launch(freed, ns);
    allocator.free(block)?;
    let before = reserved(&allocator);
    allocator.allocate(SIZE, Stream::DEFAULT)?;
    Ok(reserved(&allocator) - before)
}

#[test]
fn a_stream_that_exists_for_ever_is_asked_what_is_done() -> Outcome {
    assert_eq!(grown_after(KEPT, 0)?, Bytes::ZERO);
    assert_eq!(grown_after(KEPT, 1_000_000_000)?, SIZE, "its work runs");
    assert_eq!(grown_after(OTHER, 0)?, SIZE, "it may be gone");
    Ok(())
}

/// A library may capture a stream without telling the allocator. Questions about events, and a wait, would break it.
#[test]
fn a_captured_stream_that_exists_for_ever_keeps_its_memory() -> Outcome {
    let mut allocator = tide();
    let block = allocator.allocate(SIZE, KEPT)?;
    // The allocator knows since then that the stream exists for ever.
    allocator.allocate(SIZE, Stream::DEFAULT)?;
    assert!(allocator.driver().begin_capture(KEPT));
    allocator.free(block)?;
    let before = reserved(&allocator);
    allocator.allocate(SIZE, OTHER)?;
    assert_eq!(reserved(&allocator) - before, SIZE);
    assert_eq!(allocator.driver().violations(), [""; 0]);
    assert!(allocator.driver().end_capture(KEPT));
    allocator.allocate(SIZE, OTHER)?;
    assert_eq!(reserved(&allocator) - before, SIZE);
    Ok(())
}
