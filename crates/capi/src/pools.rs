//! Memory pools: what graph captures and `torch.cuda.MemPool` need, and captures themselves.

use std::ffi::{c_int, c_void};

use lowtide_core::{
    AllocError, Bytes, DeviceAddress, MempoolId, PoolSetting, SegmentSource, Stream,
};

use crate::boundary::{Mempool, run, write_to_c};
use crate::devices::{self, Lane};
use crate::error::{Error, Status};
use crate::pointers::{address_of, host_size, pointer_to};
use crate::regions;
use crate::start;

/// Says whether requests for a stream go to a memory pool. Called with the `context` that was given
/// with it, from the thread that asks for memory, under the device's lock: it must not call lowtide,
/// throw or unwind.
pub type StreamFilter =
    Option<unsafe extern "C" fn(context: *mut c_void, stream: *mut c_void) -> bool>;

/// Ends the `context` that functions of the caller's are called with. Called once, under their rules.
pub type ContextEnd = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// Serves from now on the requests of those streams of `device` that `accepts` names from a memory pool,
/// which is made if need be and held once more; of all streams if `accepts` is null. Where pools nest,
/// the latest counts.
///
/// In a process that is in a region as a whole (`TMS_INIT_ENABLE` of torch_memory_saver) the pool's memory is that
/// region's, as by `lowtide_region_pool`, where this thread is in that region and the pool has neither segments nor a
/// source yet; it has no other source from then on. Requests in it fail while the region is being paused or resumed, as
/// while it is paused.
///
/// What PyTorch's hook `set_begin_allocate_to_pool` does, which takes a C++ `std::function` that C
/// cannot: a shim passes a pointer to one as `context`. lowtide calls `accepts` until
/// `lowtide_end_allocate_to_pool`, and then `end`, which may be null. After a failure `end` has been
/// called too.
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

/// Serves requests as before `lowtide_begin_allocate_to_pool`. The pool stays held.
///
/// PyTorch's hook `set_end_allocate_to_pool_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_end_allocate_to_pool(device: c_int, pool: Mempool) -> Status {
    run(|| with_pool(device, pool, Lane::end_allocate_to_pool))
}

/// Lets go of a memory pool. When nothing holds it any more, `lowtide_empty_cache` gives back what is
/// free in it, and so does the next pause or resume of its region.
///
/// PyTorch's hook `set_release_pool`.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_release_pool(device: c_int, pool: Mempool) -> Status {
    run(|| with_pool(device, pool, Lane::release_pool))
}

/// Makes a memory pool, held once, or holds it once more; `lowtide_release_pool` lets go of it.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_retain_pool(device: c_int, pool: Mempool) -> Status {
    run(|| {
        let allocator = start::device(device)?;
        Ok(allocator.with_pools(|pools| pools.create_or_retain_pool(pool.id()))?)
    })
}

/// Writes how often a memory pool is held: 0 for one that does not exist.
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
            Some(allocator) => allocator.with_pools(|pools| pools.pool_use_count(pool.id()))?,
            None => Ok(0),
        };
        let held = c_int::try_from(held.unwrap_or(0)).unwrap_or(c_int::MAX);
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("count", count, held) }
    })
}

/// Lets requests of the default pool be served from this one before they fail, or not.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_set_use_on_oom(device: c_int, pool: Mempool, use_on_oom: bool) -> Status {
    run(|| {
        with_pool(device, pool, |pools, pool| {
            pools.set_pool(pool, PoolSetting::UseOnOom(use_on_oom))
        })
    })
}

/// Hands the blocks of a memory pool out whole from now on.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_set_no_split(device: c_int, pool: Mempool) -> Status {
    run(|| {
        with_pool(device, pool, |lane, pool| {
            lane.set_pool(pool, PoolSetting::NoSplit)
        })
    })
}

/// Gives what a memory pool holds free back, if nothing holds the pool any more, and leaves the others
/// alone. With its last segment the pool ends. `LOWTIDE_STATUS_POOL` for a pool that the device does not have;
/// a device that nothing was asked of has none, and is left alone.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_empty_pool(device: c_int, pool: Mempool) -> Status {
    run(|| match devices::get_checked(device)? {
        Some(allocator) => {
            Ok(allocator.with_all(|device| device.lane_mut().empty_pool(pool.id()))??)
        }
        None => Err(AllocError::NoSuchPool { pool: pool.id() }.into()),
    })
}

/// Returns `size` bytes of `device` for work in `stream`, or null where there are none. Called with the
/// `context` that was given with it, by the thread whose request needs them, under the lock of the pool:
/// it must not ask lowtide for memory of this device, throw or unwind.
pub type SegmentAllocate = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        size: usize,
        device: c_int,
        stream: *mut c_void,
    ) -> *mut c_void,
>;

/// Takes back what a `lowtide_segment_allocate` returned for `size` bytes. Called under the same rules.
pub type SegmentRelease = Option<
    unsafe extern "C" fn(context: *mut c_void, memory: *mut c_void, size: usize, device: c_int),
>;

/// Lets the segments of a memory pool come from `allocate` and go back to `release`, in place of the
/// driver. The pool is there, and has had no segment yet. It has no expandable ones.
///
/// `end`, which may be null, is called once, under the rules of the two, when the pool ends: after the
/// last `release`. After a failure it has been called too. When a process ends, it is not.
///
/// `LOWTIDE_STATUS_POOL` if the pool is not there, or has segments or a source already.
///
/// # Safety
///
/// `allocate` and `release` may be called with `context` from any thread until `end`, and that once.
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
        with_pool(device, pool, |pools, pool| {
            pools.set_pool(pool, PoolSetting::Source(Box::new(source)))
        })
    })
}

/// Says that a stream of a device is being captured into a graph: until `lowtide_capture_end`, no event
/// is queried, and memory that several streams used is handed out again only where the option
/// `graph_capture_record_stream_reuse` allows that and the graph's order says that their work comes before.
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

/// Says that a capture has ended. After the last one and with `graph_capture_record_stream_reuse`, memory
/// that was freed in it is free at once, but for what work outside of it uses.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_capture_end(device: c_int) -> Status {
    run(|| match devices::get_checked(device)? {
        Some(allocator) => Ok(allocator.for_each_lane(Lane::capture_end)?),
        None => Ok(()),
    })
}

/// What a caller's functions are called with; it ends when this is dropped.
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

/// Returns what `act` does with a pool that is to be there, and the lane that it is in. A device that nothing
/// was asked of has no pools but the default one, and is not started to say so.
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

/// Returns what `act` does with the lane that a device's pools are in.
pub(crate) fn with_pools<R>(
    device: c_int,
    act: impl FnOnce(&mut Lane) -> Result<R, AllocError>,
) -> Result<R, Error> {
    Ok(start::device(device)?.with_pools(act)??)
}

/// A caller's filter.
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

/// A caller's source of segments.
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
