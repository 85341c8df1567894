//! Garbage collection by the ages of free segments.

use lowtide_core::{AllocError, Bytes, DeviceAllocator, Stream};
use lowtide_sim::{SimConfig, SimDriver};

/// A free block ages with each search for a large block.
#[test]
fn a_segment_that_was_used_a_moment_ago_is_kept() -> Result<(), AllocError> {
    let options = "caching:garbage_collection_threshold:0.3";
    let config = options.parse().expect("options");
    let mut allocator = DeviceAllocator::new(SimDriver::new(SimConfig::default()), 0, &config);
    allocator.set_limit(Some(Bytes::mib(100)));
    let mut take = |mib| allocator.allocate(Bytes::mib(mib), Stream::DEFAULT);
    let (old, mut young) = (take(20)?, take(30)?);
    allocator.free(old)?;
    for _ in 0..5 {
        allocator.free(young)?;
        young = allocator.allocate(Bytes::mib(30), Stream::DEFAULT)?;
    }
    allocator.free(young)?;
    // 50 MiB are reserved. The old segment of 20 MiB is to be released.
    allocator.allocate(Bytes::mib(40), Stream::DEFAULT)?;
    assert_eq!(allocator.stats().reserved(), Bytes::mib(30 + 40));
    let again = allocator.allocate(Bytes::mib(30), Stream::DEFAULT)?;
    assert_eq!(again, young);
    Ok(())
}
