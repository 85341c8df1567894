//! The devices in use. Each has an allocator, which `start.rs` makes and nothing ends.
//!
//! Allocators are statics that are never dropped. When a process ends, its threads and other libraries may still
//! free memory. The driver may be gone by that time and has freed everything itself.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock};

use lowtide_core::{AllocError, Allocation, DeviceAddress, SearchHint, SegmentSnapshot};
use lowtide_cuda::CudaDriver;
use lowtide_shared::{FoundLane, LaneOf, OwnerTable, SharedAllocator, SharedMemory};

use crate::cuda;
use crate::error::{Error, Status};

/// One device's allocator.
pub(crate) type Allocator = SharedAllocator<CudaDriver>;

/// The part of a device's allocator that serves some of the device's streams.
pub(crate) type Lane = lowtide_core::Lane<SharedMemory<CudaDriver>>;

/// More devices than a process can have; PyTorch's own limit is 120.
pub(crate) const DEVICES_MAX: usize = 128;

static DEVICES: [OnceLock<Allocator>; DEVICES_MAX] = [const { OnceLock::new() }; DEVICES_MAX];

/// The device and lane of each address, for all devices.
static OWNERS: LazyLock<Arc<OwnerTable>> = LazyLock::new(Arc::default);

/// The device that was used first, or [`NO_DEVICE`]. In most jobs the lane of its default stream has most blocks,
/// and [`SEARCH_HINT`] says where the search for one of those begins.
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

/// Returns the allocator of a device that exists; `None` if the device is not in use. Does not start the device:
/// its context takes hundreds of MiB, and on a machine with several devices every process would pay that for
/// each. Does not start the driver either, because children that are forked later could not use it. Until the
/// driver is started, every number below [`DEVICES_MAX`] is accepted.
///
/// # Errors
///
/// If the device does not exist, or if there is no driver to ask about a number that no device can have.
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

/// Returns the allocators of the devices in use, by device number.
pub(crate) fn all() -> impl Iterator<Item = (c_int, &'static Allocator)> {
    let devices = (0..).zip(&DEVICES);
    devices.filter_map(|(ordinal, slot)| Some((ordinal, slot.get()?)))
}

/// Calls `act` with the allocator of every device in use. If one fails, the others are still called, and the
/// first error is returned.
///
/// # Errors
///
/// The first error of `act`.
pub(crate) fn for_each(act: impl Fn(c_int, &Allocator) -> Result<(), Error>) -> Result<(), Error> {
    let mut outcome = Ok(());
    for (ordinal, allocator) in all() {
        outcome = outcome.and(act(ordinal, allocator));
    }
    outcome
}

/// Returns the device that holds the block at `address`, and the result of `act` for the lane that holds it. If
/// several lanes have memory close to each other, `act` is also called for lanes that do not hold the block, and
/// must return an error for those.
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
    if let FoundLane::One(owner) = OWNERS.find(address)
        && let Some(allocator) = DEVICES[usize::from(owner.device)].get()
    {
        // Prefetches what is read first, because taking the lock delays all loads after it. The branch lets the
        // processor predict the block's lane without waiting for the look-up.
        if owner.lane == 0 && owner.device == FIRST_DEVICE.load(Ordering::Relaxed) {
            prefetch(SEARCH_HINT.place_of(address));
        }
        return Ok((
            owner.device.into(),
            allocator.with_lane(LaneOf::Number(owner.lane), act)?,
        ));
    }
    with_block_of_any(address, act)
}

/// Prefetches memory that is about to be read, on processors that have an instruction for that.
#[inline]
fn prefetch(place: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every such processor has the instruction. It does nothing but fetch, and ignores a place where
    // there is no memory.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(place));
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
/// As for [`with_block`].
pub(crate) fn find_allocation(address: DeviceAddress) -> Result<(c_int, Allocation), Error> {
    with_block(address, |lane| lane.allocation(address))
}

/// Returns the segment that contains an address, and its device. Takes time linear in the number of blocks.
///
/// # Errors
///
/// As for [`with_block`].
pub(crate) fn find_segment(address: DeviceAddress) -> Result<(c_int, SegmentSnapshot), Error> {
    with_block(address, |lane| {
        let contains = |segment: &SegmentSnapshot| {
            (segment.address..segment.address + segment.size).contains(&address)
        };
        let found = lane.segments().into_iter().find(contains);
        found.ok_or(AllocError::NotAllocated { address })
    })
}

/// Returns the table of each address's device and lane, which all devices' allocators share.
pub(crate) fn owners() -> Arc<OwnerTable> {
    Arc::clone(&OWNERS)
}

/// Returns where the next device publishes its search hint: only the first device does.
pub(crate) fn search_hint() -> Option<&'static SearchHint> {
    (FIRST_DEVICE.load(Ordering::Relaxed) == NO_DEVICE).then_some(&SEARCH_HINT)
}

/// Puts a device into use. Called for one device at a time.
pub(crate) fn insert(number: u8, allocator: Allocator) -> &'static Allocator {
    if search_hint().is_some() {
        FIRST_DEVICE.store(number, Ordering::Relaxed);
    }
    DEVICES[usize::from(number)].get_or_init(|| allocator)
}

/// Returns the lock for a change that affects the devices in use and future ones, so that all devices see changes
/// in the same order. It is taken before any other lock of lowtide's.
///
/// # Errors
///
/// If lowtide panicked before while the lock was held.
pub(crate) fn begin_change() -> Result<MutexGuard<'static, ()>, Error> {
    lock(&CHANGES)
}

/// Locks state that a device is started with. The holder must not take the lock of an allocator in use: a thread
/// that holds one may be starting another device.
///
/// # Errors
///
/// If lowtide panicked while the lock was held.
pub(crate) fn lock<T>(mutex: &'static Mutex<T>) -> Result<MutexGuard<'static, T>, Error> {
    let locked = mutex.lock();
    locked.map_err(|_| Error::stopped("when a device was first used, or changed"))
}

/// Returns the number of a device in use.
pub(crate) fn number(ordinal: c_int) -> u8 {
    u8::try_from(ordinal).expect("devices in use have a place, of which there are fewer")
}

/// Returns the number of a device, if it is below the driver's `count` of devices.
///
/// # Errors
///
/// If the device does not exist.
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
