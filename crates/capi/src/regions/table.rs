//! Every region of the process, and the regions that each thread has entered.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use lowtide_core::{AllocError, Driver, DriverError, MempoolId, RouteOrder};
use lowtide_region::{BackupKind, RegionMemory};
use lowtide_shared::LaneOf;

use super::backups::{self, stopped};
use super::card::Card;
use crate::devices::{self, Allocator};
use crate::error::{Error, Status};
use crate::fork;

/// A region's memory on one device.
pub(super) type Memory = RegionMemory<Card>;

/// Every region that was ever entered, in order of first use. Locked before any allocator.
static TABLE: Mutex<Vec<Region>> = Mutex::new(Vec::new());

thread_local! {
    /// The regions that this thread has entered and not left.
    static ENTERED: RefCell<Entered> = const { RefCell::new(Entered(Vec::new())) };
    /// The number of this thread's innermost region; [`UNSET`] if the thread has entered nothing, not even [`NONE`].
    /// Separate from `ENTERED` because every request reads it, even one that is made while the thread ends.
    static INNERMOST: Cell<u64> = const { Cell::new(UNSET) };
}

/// The number of the region of threads that have entered nothing.
static OF_PROCESS: AtomicU64 = AtomicU64::new(NONE);

/// The number for a thread that has entered nothing.
const UNSET: u64 = 0;

/// The number for a thread that has entered "no region".
const NONE: u64 = u64::MAX;

/// Numbers of regions, the innermost last.
struct Entered(Vec<u64>);

impl Drop for Entered {
    fn drop(&mut self) {
        INNERMOST.set(UNSET);
        if fork::is_forked() {
            // A thread that does not exist in the child may hold the lock.
            return;
        }
        for number in self.0.drain(..) {
            // A thread that ends has no caller to return an error to.
            let _ = end_visit(number);
        }
    }
}

struct Region {
    tag: Arc<str>,
    kind: Option<BackupKind>,
    /// Its position in the table, from 1.
    number: u64,
    /// How many times threads have entered it and not left. Unless that is zero, requests are routed to its pool on every
    /// device in use.
    visits: u64,
    /// By device.
    memories: BTreeMap<c_int, Arc<Memory>>,
}

/// Serves this thread's requests from a region.
pub(super) fn enter(tag: &str, kind: Option<BackupKind>) -> Result<(), Error> {
    let mut table = table()?;
    let region = find_or_insert(&mut table, tag, kind)?;
    if region.visits == 0
        && let Err(error) = region.route_everywhere()
    {
        region.end_routes()?;
        return Err(error);
    }
    region.visits += 1;
    let number = region.number;
    drop(table);
    push(number)
}

/// Serves the requests of all threads that have entered nothing from a region, permanently.
pub(crate) fn enter_process(tag: &str, kind: Option<BackupKind>) -> Result<(), Error> {
    enter(tag, kind)?;
    // The process has entered it from now on, not this thread.
    let number = pop().unwrap_or(NONE);
    end_visit(OF_PROCESS.swap(number, Ordering::Relaxed))
}

/// Serves this thread's requests outside of any region.
pub(super) fn enter_none() -> Result<(), Error> {
    push(NONE)
}

/// Leaves what this thread entered last.
pub(super) fn leave() -> Result<(), Error> {
    let text = "this thread is in no region";
    end_visit(pop().ok_or_else(|| Error::new(Status::InvalidArgument, text))?)
}

/// Returns how many regions this thread has entered and not left.
pub(crate) fn depth() -> usize {
    let depth = ENTERED.try_with(|entered| entered.borrow().0.len());
    // A thread that is ending has left all.
    depth.unwrap_or(0)
}

/// Removes the region that this thread entered last from its list. A thread that is ending has no list.
fn pop() -> Option<u64> {
    let popped = ENTERED.try_with(|entered| {
        let entered = &mut entered.borrow_mut().0;
        let number = entered.pop();
        INNERMOST.set(entered.last().copied().unwrap_or(UNSET));
        number
    });
    popped.ok().flatten()
}

/// Returns whether there is a region of the process and this thread is in it.
pub(super) fn is_in_process_region() -> bool {
    let of_process = OF_PROCESS.load(Ordering::Relaxed);
    of_process != NONE && is_in(of_process)
}

/// Returns whether this thread's requests are served from a region.
fn is_in(number: u64) -> bool {
    match INNERMOST.get() {
        UNSET => OF_PROCESS.load(Ordering::Relaxed) == number,
        innermost => innermost == number,
    }
}

fn push(number: u64) -> Result<(), Error> {
    let entered = ENTERED.try_with(|entered| entered.borrow_mut().0.push(number));
    if entered.is_err() {
        end_visit(number)?;
        let text = "this thread is ending";
        return Err(Error::new(Status::InvalidArgument, text));
    }
    INNERMOST.set(number);
    Ok(())
}

/// Counts that a thread has left a region.
fn end_visit(number: u64) -> Result<(), Error> {
    if number == NONE {
        return Ok(());
    }
    let mut table = table()?;
    let region = table.iter_mut().find(|region| region.number == number);
    let region = region.expect("regions stay");
    region.visits -= 1;
    if region.visits == 0 {
        region.end_routes()?;
    }
    Ok(())
}

/// Prepares a new device for the threads that are in regions. The caller puts the device into use before it drops the
/// returned lock, so that no region is entered in between.
pub(crate) fn attach(device: c_int, allocator: &Allocator) -> Result<impl Drop + use<>, Error> {
    let mut table = table()?;
    for region in table.iter_mut().filter(|region| region.visits > 0) {
        region.begin_route(device, allocator)?;
    }
    Ok(table)
}

/// Returns a region on a device in use. Creates it there if necessary.
pub(super) fn on_device(
    device: c_int,
    allocator: &Allocator,
    tag: &str,
    kind: Option<BackupKind>,
) -> Result<Arc<Memory>, Error> {
    let mut table = table()?;
    find_or_insert(&mut table, tag, kind)?.prepare(device, allocator)
}

/// Returns the region of the process on a device in use. Creates it there if necessary.
///
/// # Panics
///
/// If there is no region of the process. Once [`is_in_process_region`] has returned true, there always is.
pub(super) fn of_process(device: c_int, allocator: &Allocator) -> Result<Arc<Memory>, Error> {
    let number = OF_PROCESS.load(Ordering::Relaxed);
    let mut table = table()?;
    let region = table.iter_mut().find(|region| region.number == number);
    region.expect("regions stay").prepare(device, allocator)
}

/// Returns every region on every device on which it has been.
pub(super) fn memories() -> Result<Vec<Arc<Memory>>, Error> {
    Ok(all_of(&table()?[..]))
}

/// Returns every region on a device.
pub(super) fn memories_on(device: c_int) -> Result<Vec<Arc<Memory>>, Error> {
    let mut memories = memories()?;
    memories.retain(|region| region.device().ordinal == device);
    Ok(memories)
}

fn all_of(table: &[Region]) -> Vec<Arc<Memory>> {
    let all = table.iter().flat_map(|region| region.memories.values());
    all.cloned().collect()
}

/// A pool that has a region's memory.
#[derive(Clone, Debug)]
pub(crate) struct RegionPool {
    pub(crate) tag: Arc<str>,
    /// Since when the region is paused for observers, in microseconds since 1970; `None` if it is not.
    pub(crate) paused_since_us: Option<i64>,
}

/// Returns the pools of regions on a device. `paused_since_us` may change when observers are notified.
pub(crate) fn pools_on(device: c_int) -> Result<BTreeMap<MempoolId, RegionPool>, Error> {
    Ok(pools_among(&memories_on(device)?))
}

/// Like [`pools_on`], but returns `None` instead of waiting while regions are entered or left.
pub(crate) fn pools_unless_busy(
    device: c_int,
) -> Result<Option<BTreeMap<MempoolId, RegionPool>>, Error> {
    let on_device: Vec<_> = match TABLE.try_lock() {
        Ok(table) => table
            .iter()
            .filter_map(|region| region.memories.get(&device).cloned())
            .collect(),
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Poisoned(_)) => return Err(stopped()),
    };
    Ok(Some(pools_among(&on_device)))
}

fn pools_among(memories: &[Arc<Memory>]) -> BTreeMap<MempoolId, RegionPool> {
    let mut pools = BTreeMap::new();
    for region in memories {
        let of_region = RegionPool {
            tag: Arc::clone(region.tag()),
            paused_since_us: region.device().paused_since_us(),
        };
        let all = region.pools().into_iter();
        pools.extend(all.map(|pool| (pool, of_region.clone())));
    }
    pools
}

/// Returns whether a tag was ever entered.
pub(crate) fn is_known(tag: &str) -> Result<bool, Error> {
    Ok(table()?.iter().any(|region| &*region.tag == tag))
}

/// Returns an error for a tag that was never entered. The error lists the tags that were.
pub(super) fn refuse_unknown(tag: &str) -> Result<(), Error> {
    if is_known(tag)? {
        return Ok(());
    }
    let table = table()?;
    let mut known: Vec<_> = table
        .iter()
        .map(|region| format!("{:?}", region.tag))
        .collect();
    known.sort();
    known.dedup();
    let known = match &*known {
        [] => "there are none".to_owned(),
        known => format!("there are {}", known.join(", ")),
    };
    let text = format_args!("there is no region {tag:?}: {known}");
    Err(Error::new(Status::InvalidArgument, text))
}

/// Returns the region of a device's pool.
pub(super) fn memory_of(device: c_int, pool: MempoolId) -> Result<Option<Arc<Memory>>, Error> {
    let mut memories = memories_on(device)?.into_iter();
    Ok(memories.find(|region| region.has_pool(pool)))
}

fn find_or_insert<'a>(
    table: &'a mut Vec<Region>,
    tag: &str,
    kind: Option<BackupKind>,
) -> Result<&'a mut Region, Error> {
    let is_it = |region: &Region| &*region.tag == tag && region.kind == kind;
    let index = match table.iter().position(is_it) {
        Some(index) => index,
        None => {
            // As early as possible, before the program changes its working directory.
            backups::look_at_directory();
            table.push(Region {
                tag: tag.into(),
                kind,
                number: table.len() as u64 + 1,
                visits: 0,
                memories: BTreeMap::new(),
            });
            table.len() - 1
        }
    };
    Ok(&mut table[index])
}

impl Region {
    /// Both numbers are above zero. PyTorch's pools have one that is zero.
    fn pool(&self) -> MempoolId {
        MempoolId(self.number, self.number)
    }

    fn route_everywhere(&mut self) -> Result<(), Error> {
        for (device, allocator) in devices::all() {
            self.begin_route(device, allocator)?;
        }
        Ok(())
    }

    /// Serves requests of the threads that are in the region from its pool.
    fn begin_route(&mut self, device: c_int, allocator: &Allocator) -> Result<(), Error> {
        self.prepare(device, allocator)?;
        let (pool, number) = (self.pool(), self.number);
        let accepts = move |_| is_in(number);
        allocator.with_lane(LaneOf::Pools, |pools| {
            pools.begin_allocate_to_pool(pool, RouteOrder::AfterOthers, accepts)
        })?;
        Ok(())
    }

    /// Ends the routes of [`Region::begin_route`] on every device that has one.
    fn end_routes(&self) -> Result<(), Error> {
        let pool = self.pool();
        for (device, allocator) in devices::all() {
            if self.memories.contains_key(&device) {
                allocator.with_lane(LaneOf::Pools, |pools| {
                    match pools.end_allocate_to_pool(pool) {
                        Ok(()) => pools.release_pool(pool),
                        Err(AllocError::NoSuchPool { .. } | AllocError::PoolNotRouted { .. }) => {
                            Ok(())
                        }
                        Err(error) => Err(error),
                    }
                })?;
            }
        }
        Ok(())
    }

    /// Returns the region on a device. Creates it and its pool if necessary.
    fn prepare(&mut self, device: c_int, allocator: &Allocator) -> Result<Arc<Memory>, Error> {
        if let Some(known) = self.memories.get(&device) {
            return Ok(Arc::clone(known));
        }
        if !allocator.physical().driver().supports_virtual_memory() {
            let call = "a region, which takes virtual memory,";
            return Err(DriverError::Unsupported { call }.into());
        }
        let card = Card::new(device, allocator.physical().driver().device().clone());
        let tag = Arc::clone(&self.tag);
        let memory = Arc::new(Memory::new(card, tag, self.kind, self.pool()));
        allocator.with_lane(LaneOf::Pools, |pools| memory.create_pool(pools))?;
        self.memories.insert(device, Arc::clone(&memory));
        Ok(memory)
    }
}

fn table() -> Result<MutexGuard<'static, Vec<Region>>, Error> {
    TABLE.lock().map_err(|_| stopped())
}
