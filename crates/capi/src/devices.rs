//! The devices in use: an allocator for each, made by `start.rs` and never ended.
//!
//! They are statics that nothing drops. When a process ends, its threads and other libraries may still
//! give memory back, while the driver may be gone already and has taken everything back itself.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock};

use lowtide_core::{AllocError, Allocation, DeviceAddress, SearchHint, SegmentSnapshot};
use lowtide_cuda::CudaDriver;
use lowtide_shared::{Holder, OwnerTable, SharedAllocator, SharedDriver};

use crate::cuda;
use crate::error::{Error, Status};

/// One device's allocator.
pub(crate) type Allocator = SharedAllocator<CudaDriver>;

/// The part of a device's allocator that serves some of its streams.
pub(crate) type Lane = lowtide_core::Lane<SharedDriver<CudaDriver>>;

/// More devices than a process can have; PyTorch's own limit is 120.
pub(crate) const DEVICES_MAX: usize = 128;

static DEVICES: [OnceLock<Allocator>; DEVICES_MAX] = [const { OnceLock::new() }; DEVICES_MAX];

/// Who holds which address, on every device.
static OWNERS: LazyLock<Arc<OwnerTable>> = LazyLock::new(Arc::default);

/// The device that was used first, or [`NO_DEVICE`]. The lane of its default stream has most blocks of most
/// jobs, and [`SEARCH_HINT`] knows where the search for one of those begins.
static FIRST_DEVICE: AtomicU8 = AtomicU8::new(NO_DEVICE);
const NO_DEVICE: u8 = u8::MAX;
static SEARCH_HINT: SearchHint = SearchHint::new();

/// See [`begin_change`].
static CHANGES: Mutex<()> = Mutex::new(());

/// Returns the allocator of a device in use.
#[inline]
pub(crate) fn get(ordinal: c_int) -> Option<&'static Allocator> {
    slot(ordinal)?.get()
}

/// As [`get`], for a device that there is, in use or not. One that is not must not be started by a question about it: its
/// context takes hundreds of MiB, and on a machine with several devices every process would take that of each. Nor the
/// driver, which children that are forked after that cannot use: until it is started, any number may be a device's.
///
/// # Errors
///
/// If there is no such device, or no driver for a number that none can have.
pub(crate) fn get_checked(ordinal: c_int) -> Result<Option<&'static Allocator>, Error> {
    if let Some(allocator) = get(ordinal) {
        return Ok(Some(allocator));
    }
    let library = match cuda::started()? {
        Some(library) => library,
        None if slot(ordinal).is_some() => return Ok(None),
        None => cuda::library()?,
    };
    number_among(ordinal, library.device_count()?)?;
    Ok(None)
}

/// Returns the allocators of the devices in use, by number.
pub(crate) fn all() -> impl Iterator<Item = (c_int, &'static Allocator)> {
    let devices = (0..).zip(&DEVICES);
    devices.filter_map(|(ordinal, slot)| Some((ordinal, slot.get()?)))
}

/// Does something with the allocator of every device in use. One that fails does not keep the others from
/// it; the first error is the answer.
///
/// # Errors
///
/// What `act` returned.
pub(crate) fn for_each(act: impl Fn(c_int, &Allocator) -> Result<(), Error>) -> Result<(), Error> {
    let mut outcome = Ok(());
    for (ordinal, allocator) in all() {
        outcome = outcome.and(act(ordinal, allocator));
    }
    outcome
}

/// Returns the device that holds the block at `address`, and what `act` does with the part of its
/// allocator that does. Of a part that does not hold the block, which is asked only where several hold
/// memory close to each other, `act` is to say so.
///
/// # Errors
///
/// If no device holds such a block, or `act` fails.
#[expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]
#[inline(always)]
pub(crate) fn with_block<R>(
    address: DeviceAddress,
    act: impl FnMut(&mut Lane) -> Result<R, AllocError>,
) -> Result<(c_int, R), Error> {
    if let Holder::One(owner) = OWNERS.find(address)
        && let Some(allocator) = DEVICES[usize::from(owner.device)].get()
    {
        // A lock keeps all that comes after it waiting; what is looked at first can be on its way. By the
        // branch the processor guesses whose the block is, and need not wait for the answer either.
        if owner.lane == 0 && owner.device == FIRST_DEVICE.load(Ordering::Relaxed) {
            prefetch(SEARCH_HINT.place_of(address));
        }
        return Ok((owner.device.into(), allocator.with_lane(owner.lane, act)?));
    }
    with_block_of_any(address, act)
}

/// Has the processor fetch memory that is about to be looked at, where it has an instruction for that.
#[inline]
fn prefetch(place: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every such processor has the instruction. It does nothing but fetch, and ignores a place where
    // there is no memory.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(ptr::without_provenance(place));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

#[cold]
fn with_block_of_any<R>(
    address: DeviceAddress,
    mut act: impl FnMut(&mut Lane) -> Result<R, AllocError>,
) -> Result<(c_int, R), Error> {
    for (ordinal, allocator) in all() {
        match allocator.with_block(address, &mut act) {
            Err(AllocError::NotAllocated { .. }) => {}
            outcome => return Ok((ordinal, outcome?)),
        }
    }
    Err(AllocError::NotAllocated { address }.into())
}

/// Returns the block that starts at `address`, and the device that holds it.
///
/// # Errors
///
/// As [`with_block`].
pub(crate) fn find_allocation(address: DeviceAddress) -> Result<(c_int, Allocation), Error> {
    with_block(address, |lane| lane.allocation(address))
}

/// Returns the segment that an address lies in, and the device that has it. Linear in the blocks.
///
/// # Errors
///
/// As [`with_block`].
pub(crate) fn find_segment(address: DeviceAddress) -> Result<(c_int, SegmentSnapshot), Error> {
    with_block(address, |lane| {
        let contains = |segment: &SegmentSnapshot| {
            (segment.address..segment.address + segment.size).contains(&address)
        };
        let found = lane.segments().into_iter().find(contains);
        found.ok_or(AllocError::NotAllocated { address })
    })
}

/// Returns the table that says who holds which address, which every device's allocator keeps.
pub(crate) fn owners() -> Arc<OwnerTable> {
    Arc::clone(&OWNERS)
}

/// Puts a device into use, one at a time.
///
/// # Errors
///
/// If lowtide panicked in its allocator.
pub(crate) fn insert(number: u8, allocator: Allocator) -> Result<&'static Allocator, Error> {
    if FIRST_DEVICE.load(Ordering::Relaxed) == NO_DEVICE {
        allocator.with_lane(0, |lane| {
            lane.keep_search_hint(&SEARCH_HINT);
            Ok(())
        })?;
        FIRST_DEVICE.store(number, Ordering::Relaxed);
    }
    Ok(DEVICES[usize::from(number)].get_or_init(|| allocator))
}

/// Returns what is held while something changes for the devices in use and those to come, so that all of them see the
/// changes in the same order. Taken before any other lock of lowtide's.
///
/// # Errors
///
/// If lowtide panicked meanwhile before.
pub(crate) fn begin_change() -> Result<MutexGuard<'static, ()>, Error> {
    lock(&CHANGES)
}

/// Locks what a device is started with. Whoever holds it takes no lock of an allocator in use: a thread that has one may
/// be starting another device.
///
/// # Errors
///
/// If lowtide panicked while it was held.
pub(crate) fn lock<T>(mutex: &'static Mutex<T>) -> Result<MutexGuard<'static, T>, Error> {
    let locked = mutex.lock();
    locked.map_err(|_| Error::stopped("when a device was first used, or changed"))
}

/// Returns the number of a device in use.
pub(crate) fn number(ordinal: c_int) -> u8 {
    u8::try_from(ordinal).expect("devices in use have a place, of which there are fewer")
}

/// Returns the number of a device, of which the driver shows `count`.
///
/// # Errors
///
/// If there is no such device.
pub(crate) fn number_among(ordinal: c_int, count: u32) -> Result<u8, Error> {
    let number = u8::try_from(ordinal).ok();
    let is_there = |&number: &u8| u32::from(number) < count && usize::from(number) < DEVICES_MAX;
    number.filter(is_there).ok_or_else(|| {
        let text = format_args!("there is no device {ordinal}: the driver shows {count}");
        Error::new(Status::InvalidArgument, text)
    })
}

fn slot(ordinal: c_int) -> Option<&'static OnceLock<Allocator>> {
    DEVICES.get(usize::try_from(ordinal).ok()?)
}
