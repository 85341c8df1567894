//! Memory pools, for graph captures and `torch.cuda.MemPool`, and the captures themselves.

use std::ffi::{c_int, c_void};

use lowtide_core::{
    AllocError, Bytes, DeviceAddress, MempoolId, PoolSetting, SegmentSource, Stream,
};
use lowtide_shared::LaneOf;

use crate::boundary::{run, write_to_c};
use crate::devices::{self, Lane};
use crate::error::{Error, Status};
use crate::pointers::{Mempool, address_of, host_size, pointer_to};
use crate::regions;
use crate::start;

/// Returns whether requests for a stream go to a memory pool. Called with the `context` that was registered with
/// it, from the thread that requests memory, under the device's lock. It must not call lowtide, throw or unwind.
pub type StreamFilter =
    Option<unsafe extern "C" fn(context: *mut c_void, stream: *mut c_void) -> bool>;

/// Frees the `context` of the caller's functions. Called once, under the same rules.
pub type ContextEnd = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// Routes requests to a memory pool from now on: those of the streams of `device` that `accepts` returns true
/// for, or of all streams if `accepts` is null. The pool is created if necessary and held once more. If pools
/// nest, the latest one is used.
///
/// A process can be in a region as a whole (`TMS_INIT_ENABLE` of torch_memory_saver). If this thread is in that
/// region, and the pool has neither segments nor a source yet, the pool's memory comes from the region, as with
/// `lowtide_region_pool`. It gets no other source later. Requests in it fail while the region is paused, being
/// paused or being resumed.
///
/// This is PyTorch's hook `set_begin_allocate_to_pool`. The hook takes a C++ `std::function`, which C cannot, so
/// a shim passes a pointer to one as `context`. lowtide calls `accepts` until `lowtide_end_allocate_to_pool`, and
/// then `end`, which may be null. After a failure `end` has been called too.
///
/// # Safety
///
/// `accepts` may be called with `context` from any thread until then, and `end` once after that.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_begin_allocate_to_pool(
    device: c_int,
    pool: Mempool,
    accepts: StreamFilter,
    context: *mut c_void,
    end: ContextEnd,
) -> Status {
    let context = Context { context, end };
    let filter = Filter { accepts, context };
    run(move || {
        let allocator = start::device(device)?;
        let accepts = move |stream| filter.accepts(stream);
        regions::begin_allocate_to_pool(device, allocator, pool.id(), accepts)
    })
}

/// Ends the routing that the last `lowtide_begin_allocate_to_pool` began. The pool stays held.
///
/// This is PyTorch's hook `set_end_allocate_to_pool_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_end_allocate_to_pool(device: c_int, pool: Mempool) -> Status {
    run(|| with_pool(device, pool, Lane::end_allocate_to_pool))
}

/// Releases one hold on a memory pool. Once nothing holds it, its free memory is released by
/// `lowtide_empty_cache`, and by the next pause or resume of its region.
///
/// This is PyTorch's hook `set_release_pool`.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_release_pool(device: c_int, pool: Mempool) -> Status {
    run(|| with_pool(device, pool, Lane::release_pool))
}

/// Creates a memory pool that is held once, or holds an existing one once more. `lowtide_release_pool` undoes it.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_retain_pool(device: c_int, pool: Mempool) -> Status {
    run(|| {
        let allocator = start::device(device)?;
        Ok(allocator.with_lane(LaneOf::Pools, |pools| {
            pools.create_or_retain_pool(pool.id());
            Ok(())
        })?)
    })
}

/// Writes how many times a memory pool is held: 0 if it does not exist.
///
/// # Safety
///
/// `count` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_pool_use_count(
    device: c_int,
    pool: Mempool,
    count: *mut c_int,
) -> Status {
    run(|| {
        let held = match devices::get_checked(device)? {
            Some(allocator) => allocator.with_lane(LaneOf::Pools, |pools| {
                Ok(pools.pool(pool.id()).map_or(0, |pool| pool.use_count))
            })?,
            None => 0,
        };
        let held = c_int::try_from(held).unwrap_or(c_int::MAX);
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("count", count, held) }
    })
}

/// Lets requests of the default pool use this pool's free memory before they fail, or not.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_set_use_on_oom(device: c_int, pool: Mempool, use_on_oom: bool) -> Status {
    run(|| set(device, pool, PoolSetting::UseOnOom(use_on_oom)))
}

/// From now on, blocks of this memory pool are not split.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_set_no_split(device: c_int, pool: Mempool) -> Status {
    run(|| set(device, pool, PoolSetting::NoSplit))
}

/// Releases the free memory of one memory pool, if nothing holds the pool. Other pools do not change. The pool
/// ends with its last segment. Returns `LOWTIDE_STATUS_POOL` for a pool that the device does not have. A device
/// that is not in use has none, and is not started.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_empty_pool(device: c_int, pool: Mempool) -> Status {
    run(|| match devices::get_checked(device)? {
        Some(allocator) => Ok(allocator.with_all(|device| device.empty_cache(Some(pool.id())))??),
        None => Err(AllocError::NoSuchPool { pool: pool.id() }.into()),
    })
}

/// Returns `size` bytes of `device` for work in `stream`, or null if there is no memory. Called with the
/// `context` that was registered with it, by the thread whose request needs the memory, under the pool's lock. It
/// must not request memory of this device from lowtide, throw or unwind.
pub type SegmentAllocate = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        size: usize,
        device: c_int,
        stream: *mut c_void,
    ) -> *mut c_void,
>;

/// Frees memory of `size` bytes that a `lowtide_segment_allocate` returned. Called under the same rules.
pub type SegmentRelease = Option<
    unsafe extern "C" fn(context: *mut c_void, memory: *mut c_void, size: usize, device: c_int),
>;

/// Gets the segments of a memory pool from `allocate` and frees them with `release`, in place of the driver. The
/// pool must exist and must not have had a segment yet. It has no expandable segments.
///
/// `end`, which may be null, is called once when the pool ends, after the last `release` and under the same
/// rules. After a failure it has been called too. It is not called when the process ends.
///
/// Returns `LOWTIDE_STATUS_POOL` if the pool does not exist, or has segments or a source already.
///
/// # Safety
///
/// `allocate` and `release` may be called with `context` from any thread until `end`, and `end` once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_set_pool_source(
    device: c_int,
    pool: Mempool,
    allocate: SegmentAllocate,
    release: SegmentRelease,
    context: *mut c_void,
    end: ContextEnd,
) -> Status {
    let context = Context { context, end };
    run(move || {
        let (Some(allocate), Some(release)) = (allocate, release) else {
            return Err(Error::null("allocate` and `release"));
        };
        let source = Source {
            device,
            allocate,
            release,
            context,
        };
        set(device, pool, PoolSetting::Source(Box::new(source)))
    })
}

/// Reports that the capture of a device's stream into a graph begins. Until `lowtide_capture_end` no event is
/// queried. Memory that several streams used is reused only with the option `graph_capture_record_stream_reuse`,
/// and only if the graph orders their work before the reuse.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_capture_begin(device: c_int) -> Status {
    run(|| {
        let allocator = start::device(device)?;
        Ok(allocator.for_each_lane(|lane| {
            lane.capture_begin();
            Ok(())
        })?)
    })
}

/// Reports that a capture has ended. After the last capture, with `graph_capture_record_stream_reuse`, memory
/// that was freed during it is free at once, except memory that work outside the capture uses.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_capture_end(device: c_int) -> Status {
    run(|| match devices::get_checked(device)? {
        Some(allocator) => Ok(allocator.for_each_lane(Lane::capture_end)?),
        None => Ok(()),
    })
}

/// The `context` of the caller's functions. Dropping it calls `end`.
struct Context {
    context: *mut c_void,
    end: ContextEnd,
}

// SAFETY: it is given to functions that may be called with it from any thread, by the contracts of
// `lowtide_begin_allocate_to_pool` and `lowtide_set_pool_source`.
unsafe impl Send for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(end) = self.end {
            // SAFETY: this is the one call, and the context is not used after it, as `self` is gone.
            unsafe { end(self.context) };
        }
    }
}

/// Returns the result of `act` with an existing pool and its lane. A device that is not in use has only the
/// default pool, and is not started for this.
pub(crate) fn with_pool<R>(
    device: c_int,
    pool: Mempool,
    act: impl FnOnce(&mut Lane, MempoolId) -> Result<R, AllocError>,
) -> Result<R, Error> {
    let pool = pool.id();
    if !pool.is_default() && devices::get_checked(device)?.is_none() {
        return Err(AllocError::NoSuchPool { pool }.into());
    }
    with_pools(device, |pools| act(pools, pool))
}

fn set(device: c_int, pool: Mempool, setting: PoolSetting) -> Result<(), Error> {
    with_pool(device, pool, |pools, pool| pools.set_pool(pool, setting))
}

/// Returns the result of `act` with the lane that holds the device's private pools.
pub(crate) fn with_pools<R>(
    device: c_int,
    act: impl FnOnce(&mut Lane) -> Result<R, AllocError>,
) -> Result<R, Error> {
    Ok(start::device(device)?.with_lane(LaneOf::Pools, act)?)
}

/// A stream filter that the caller registered.
struct Filter {
    accepts: StreamFilter,
    context: Context,
}

impl Filter {
    fn accepts(&self, stream: Stream) -> bool {
        self.accepts.is_none_or(|accepts| {
            let stream = pointer_to(DeviceAddress(stream.0));
            // SAFETY: the context has not ended, as `self` lives.
            unsafe { accepts(self.context.context, stream) }
        })
    }
}

/// A source of segments that the caller registered.
struct Source {
    device: c_int,
    allocate: unsafe extern "C" fn(*mut c_void, usize, c_int, *mut c_void) -> *mut c_void,
    release: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int),
    context: Context,
}

impl SegmentSource for Source {
    fn allocate(
        &mut self,
        size: Bytes,
        stream: Stream,
        _is_limited: bool,
    ) -> Option<DeviceAddress> {
        let stream = pointer_to(DeviceAddress(stream.0));
        // SAFETY: the context has not ended, as `self` lives.
        let memory =
            unsafe { (self.allocate)(self.context.context, host_size(size), self.device, stream) };
        (!memory.is_null()).then(|| address_of(memory))
    }

    fn release(&mut self, address: DeviceAddress, size: Bytes) {
        let memory = pointer_to(address);
        // SAFETY: 1. the context has not ended, as `self` lives. 2. The memory is from `allocate`, of
        // this size, and goes back once.
        unsafe { (self.release)(self.context.context, memory, host_size(size), self.device) };
    }
}
