//! A device with contents, an allocator on it, backups that can fail, and a region on these.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use lowtide_core::{
    AllocError, Bytes, Config, DeviceAddress, DeviceAllocator, Driver, DriverError, EventHandle,
    Handle, HeldPool, MemoryInfo, MempoolId, PoolSetting, SegmentSnapshot, Stream,
};
use lowtide_region::{
    BackupError, BackupKind, Backups, Device, MemoryRange, Pools, PoolsError, RegionMemory,
    RegionSource,
};
use lowtide_sim::{Call, FaultPlan, SimConfig, SimDriver};

/// What is written and read at once.
pub(crate) const UNIT: Bytes = Bytes(512);

pub(crate) fn failed() -> DriverError {
    DriverError::Failed {
        call: "a call",
        code: 999,
        message: "it was to fail".to_owned(),
    }
}

/// The simulated driver, which everybody shares, and what is in its memory.
#[derive(Clone, Debug)]
pub(crate) struct TestDriver(Arc<Mutex<Card>>);

#[derive(Debug)]
struct Card {
    sim: SimDriver,
    /// Where handles are mapped, and how long they are.
    mapped: BTreeMap<DeviceAddress, (Bytes, Handle)>,
    /// What was written, by handle and place in it. What was not is undefined.
    contents: BTreeMap<(Handle, Bytes), u64>,
    /// Work under way.
    kernels: Vec<(MemoryRange, Stream)>,
    /// What was told of pauses: by pool, the segments whose memory is about to leave, or has.
    told: BTreeMap<MempoolId, BTreeSet<DeviceAddress>>,
    /// What fails once an unmap has failed.
    then: Option<FaultPlan>,
    /// What must not happen, and did.
    wrongs: Vec<String>,
}

impl TestDriver {
    pub(crate) fn new(capacity: Bytes) -> TestDriver {
        TestDriver(Arc::new(Mutex::new(Card {
            sim: SimDriver::new(SimConfig {
                capacity: Some(capacity),
                ..SimConfig::default()
            }),
            mapped: BTreeMap::new(),
            contents: BTreeMap::new(),
            kernels: Vec::new(),
            told: BTreeMap::new(),
            then: None,
            wrongs: Vec::new(),
        })))
    }

    fn card(&self) -> MutexGuard<'_, Card> {
        self.0.lock().expect("no test panics in a call")
    }

    pub(crate) fn set_faults(&self, faults: FaultPlan) {
        self.card().sim.set_faults(faults);
    }

    /// Has the n-th unmap from now fail, and then the first call of another kind.
    pub(crate) fn fail_unmap_then(&self, nth: u64, call: Call) {
        let mut card = self.card();
        card.sim
            .set_faults(FaultPlan::nth(Call::Unmap, nth, failed()));
        card.then = Some(FaultPlan::nth(call, 1, failed()));
    }

    pub(crate) fn calls(&self, call: Call) -> u64 {
        self.card().sim.stats(call).count
    }

    pub(crate) fn failures(&self) -> u64 {
        self.failures_of(Call::ALL)
    }

    pub(crate) fn failures_of(&self, calls: impl AsRef<[Call]>) -> u64 {
        let card = self.card();
        let calls = calls.as_ref().iter();
        calls.map(|&call| card.sim.stats(call).failures).sum()
    }

    pub(crate) fn physical_bytes(&self) -> Bytes {
        self.card().sim.physical_bytes()
    }

    pub(crate) fn leaks(&self) -> Vec<String> {
        self.card().sim.leaks()
    }

    /// Returns what no caller may do, and one did.
    pub(crate) fn wrongs(&self) -> Vec<String> {
        let card = self.card();
        card.sim
            .violations()
            .iter()
            .chain(&card.wrongs)
            .cloned()
            .collect()
    }

    /// Starts work in a stream that uses a range.
    pub(crate) fn launch(&self, range: MemoryRange, stream: Stream) {
        self.card().kernels.push((range, stream));
    }

    /// Notes as wrong that a stream is given memory which work of another may still use.
    pub(crate) fn give(&self, range: MemoryRange, stream: Stream) {
        let mut card = self.card();
        let used = |&&(used, by): &&(MemoryRange, Stream)| by != stream && overlap(used, range);
        if let Some(kernel) = card.kernels.iter().find(used) {
            let wrong = format!("{range:?} is given to {stream:?}: {kernel:?}");
            card.wrongs.push(wrong);
        }
    }

    /// Notes as wrong what is told of a pool's segments and not so: each leaves once before it is back, and its
    /// memory is there both times.
    fn tell(&self, pool: MempoolId, is_leaving: bool, segments: &[SegmentSnapshot]) {
        let mut card = self.card();
        let addresses = segments.iter().map(|segment| segment.address);
        let addresses: BTreeSet<_> = addresses.collect();
        let is_paired = match is_leaving {
            true => card.told.insert(pool, addresses).is_none(),
            false => card
                .told
                .remove(&pool)
                .is_some_and(|left| left.is_superset(&addresses)),
        };
        let mut segments = segments.iter();
        let is_there =
            segments.all(|segment| card.sim.access(segment.address, segment.size).is_ok());
        if !is_paired || !is_there {
            let wrong = format!("told of {pool:?}: {is_leaving} {is_paired} {is_there}");
            card.wrongs.push(wrong);
        }
    }

    /// Writes at the beginning and at the end of a range.
    pub(crate) fn write(&self, range: MemoryRange, value: u64) {
        for unit in ends(range) {
            self.card().put(unit, Some(value));
        }
    }

    /// Returns whether all of a range can be used, and holds what was written to it.
    pub(crate) fn check(&self, range: MemoryRange, value: u64) -> bool {
        let mut card = self.card();
        let whole = card.sim.access(range.address, range.size).is_ok();
        whole
            && ends(range)
                .into_iter()
                .all(|unit| card.get(unit) == Some(value))
    }

    /// Returns how much is mapped in pieces that touch one of some ranges.
    pub(crate) fn mapped_around(&self, ranges: &[MemoryRange]) -> Bytes {
        let card = self.card();
        let pieces = card.mapped.iter();
        let pieces = pieces.map(|(&address, &(size, _))| MemoryRange { address, size });
        let touched = pieces.filter(|&piece| ranges.iter().any(|&range| overlap(piece, range)));
        touched.map(|piece| piece.size).sum()
    }

    /// Returns whether all of a range can be used.
    pub(crate) fn is_usable(&self, range: MemoryRange) -> bool {
        self.card().sim.access(range.address, range.size).is_ok()
    }
}

fn ends(range: MemoryRange) -> [DeviceAddress; 2] {
    [
        range.address,
        range.address + (range.size - Bytes(1)).round_down(UNIT),
    ]
}

fn overlap(one: MemoryRange, other: MemoryRange) -> bool {
    one.address < other.end() && other.address < one.end()
}

impl Card {
    /// Returns the handle at an address and the place in it.
    fn place(&self, address: DeviceAddress) -> Option<(Handle, Bytes)> {
        let (&start, &(size, handle)) = self.mapped.range(..=address).next_back()?;
        (address < start + size).then(|| (handle, address.offset_from(start)))
    }

    fn get(&self, address: DeviceAddress) -> Option<u64> {
        self.contents.get(&self.place(address)?).copied()
    }

    fn put(&mut self, address: DeviceAddress, value: Option<u64>) {
        let place = self.place(address).expect("only what is mapped is written");
        match value {
            Some(value) => self.contents.insert(place, value),
            None => self.contents.remove(&place),
        };
    }

    /// Returns everything written in a range, by place.
    fn read(&self, range: MemoryRange) -> BTreeMap<DeviceAddress, u64> {
        let mut found = BTreeMap::new();
        for (&start, &(size, handle)) in self.mapped.range(..range.end()) {
            for (&(_, offset), &value) in self.contents.range((handle, Bytes(0))..(handle, size)) {
                if start + offset >= range.address && start + offset < range.end() {
                    found.insert(start + offset, value);
                }
            }
        }
        found
    }
}

impl Driver for TestDriver {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        self.card().sim.allocate(size)
    }
    fn free(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.card().sim.free(address, size)
    }
    fn supports_virtual_memory(&self) -> bool {
        true
    }
    fn granularity(&self) -> Bytes {
        self.card().sim.granularity()
    }
    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        self.card().sim.reserve(size)
    }
    fn unreserve(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.card().sim.unreserve(address, size)
    }
    fn create(&mut self, size: Bytes) -> Result<Handle, DriverError> {
        self.card().sim.create(size)
    }
    fn release(&mut self, handle: Handle) -> Result<(), DriverError> {
        let mut card = self.card();
        card.sim.release(handle)?;
        card.contents
            .retain(|&(in_handle, _), _| in_handle != handle);
        Ok(())
    }
    fn map(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
        handle: Handle,
    ) -> Result<(), DriverError> {
        let mut card = self.card();
        card.sim.map(address, size, handle)?;
        card.mapped.insert(address, (size, handle));
        Ok(())
    }
    fn set_access(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.card().sim.set_access(address, size)
    }
    fn unmap(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        let mut card = self.card();
        if let Err(error) = card.sim.unmap(address, size) {
            if let Some(then) = card.then.take() {
                card.sim.set_faults(then);
            }
            return Err(error);
        }
        let range = MemoryRange { address, size };
        card.mapped
            .retain(|&start, _| start < address || start >= range.end());
        if let Some(kernel) = card.kernels.iter().find(|kernel| overlap(kernel.0, range)) {
            let wrong = format!("{range:?} is unmapped: {kernel:?}");
            card.wrongs.push(wrong);
        }
        Ok(())
    }
    fn record_event(&mut self, stream: Stream) -> Result<EventHandle, DriverError> {
        self.card().sim.record_event(stream)
    }
    fn query_event(&mut self, event: EventHandle) -> Result<bool, DriverError> {
        self.card().sim.query_event(event)
    }
    fn synchronize_event(&mut self, event: EventHandle) -> Result<(), DriverError> {
        self.card().sim.synchronize_event(event)
    }
    fn wait_event(&mut self, stream: Stream, event: EventHandle) -> Result<(), DriverError> {
        self.card().sim.wait_event(stream, event)
    }
    fn release_event(&mut self, event: EventHandle) {
        self.card().sim.release_event(event);
    }
    fn synchronize_stream(&mut self, stream: Stream) -> Result<(), DriverError> {
        let mut card = self.card();
        card.sim.synchronize_stream(stream)?;
        card.kernels.retain(|&(_, by)| by != stream);
        Ok(())
    }
    fn memory_info(&mut self) -> Result<MemoryInfo, DriverError> {
        self.card().sim.memory_info()
    }
}

impl Device for TestDriver {
    type Driver = TestDriver;

    fn with_driver<R>(&self, act: impl FnOnce(&mut TestDriver) -> R) -> R {
        act(&mut self.clone())
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        // One call, as on a card.
        self.clone().synchronize_stream(Stream::DEFAULT)?;
        self.card().kernels.clear();
        Ok(())
    }
}

/// How many ranges are saved at once.
const STEP: usize = 2;

/// The stream of copies between the device and backups.
const COPIES: Stream = Stream(u64::MAX);

/// Backups in the test's memory.
#[derive(Debug)]
pub(crate) struct TestBackups {
    driver: TestDriver,
    /// Each backup has one, too.
    there: Arc<()>,
    /// Whether backups in the host's memory stay after a resume.
    pub(crate) retains: bool,
    /// How many of the next calls work before one fails.
    pub(crate) fails_in: Option<u64>,
    /// Whether that one panics.
    pub(crate) panics: bool,
    /// How many after that one fail, too.
    pub(crate) more_failures: u64,
    /// How many waits for the copies of calls that failed will fail.
    pub(crate) failing_waits: u64,
    pub(crate) failures: u64,
    /// How much memory the device had in use at each step of saving.
    pub(crate) in_use: Vec<Bytes>,
    /// How many came back.
    pub(crate) discards: usize,
}

#[derive(Debug)]
pub(crate) struct TestBackup {
    ranges: Vec<MemoryRange>,
    /// How many of them are saved.
    saved: usize,
    contents: BTreeMap<DeviceAddress, u64>,
    kind: BackupKind,
    _there: Arc<()>,
}

impl TestBackup {
    fn has(&self, range: MemoryRange) -> bool {
        let mut saved = self.ranges[..self.saved].iter();
        saved.any(|saved| saved.contains(range))
    }
}

impl TestBackups {
    pub(crate) fn new(driver: &TestDriver) -> TestBackups {
        TestBackups {
            driver: driver.clone(),
            there: Arc::default(),
            retains: false,
            fails_in: None,
            panics: false,
            more_failures: 0,
            failing_waits: 0,
            failures: 0,
            in_use: Vec::new(),
            discards: 0,
        }
    }

    /// Returns how many backups there are.
    pub(crate) fn count(&self) -> usize {
        Arc::strong_count(&self.there) - 1
    }

    fn call(&mut self) -> Result<(), BackupError> {
        match &mut self.fails_in {
            Some(0) => {
                let more = self.more_failures.checked_sub(1);
                self.fails_in = more.map(|_| 0);
                self.more_failures = more.unwrap_or(0);
                self.failures += 1;
                assert!(!self.panics, "it was to panic");
                let message = "it was to fail".to_owned();
                Err(BackupError::NoThread { message })
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Leaves the copies of a call that failed under way.
    fn leave_under_way(&self, called: &Result<(), BackupError>, ranges: &[MemoryRange]) {
        if called.is_err() {
            let kernels = ranges.iter().map(|&range| (range, COPIES));
            self.driver.card().kernels.extend(kernels);
        }
    }

    fn require_usable(&self, ranges: &[MemoryRange]) {
        let is_copied = |&&(_, by): &&(MemoryRange, Stream)| by == COPIES;
        let copied = self.driver.card().kernels.iter().find(is_copied).copied();
        assert_eq!(
            copied, None,
            "{ranges:?} are copied beside copies that failed"
        );
        for &range in ranges {
            assert!(self.driver.is_usable(range), "{range:?} is copied");
        }
    }
}

impl Backups for TestBackups {
    type Backup = TestBackup;

    fn begin(
        &mut self,
        ranges: &[MemoryRange],
        kind: BackupKind,
    ) -> Result<TestBackup, BackupError> {
        self.call()?;
        assert!(ranges.iter().all(|range| !range.size.is_zero()));
        let is_behind = |pair: &[MemoryRange]| pair[0].end() <= pair[1].address;
        assert!(ranges.windows(2).all(is_behind), "{ranges:?}");
        Ok(TestBackup {
            ranges: ranges.to_vec(),
            saved: 0,
            contents: BTreeMap::new(),
            kind,
            _there: Arc::clone(&self.there),
        })
    }

    fn save_next(&mut self, backup: &mut TestBackup) -> Result<usize, BackupError> {
        let left = &backup.ranges[backup.saved..];
        self.require_usable(left);
        assert!(!left.is_empty(), "nothing is left to be saved");
        self.in_use.push(self.driver.physical_bytes());
        let left = left.to_vec();
        let called = self.call();
        self.leave_under_way(&called, &left);
        called?;
        for &range in left.iter().take(STEP) {
            backup.contents.extend(self.driver.card().read(range));
            backup.saved += 1;
        }
        Ok(backup.saved)
    }

    fn restore(
        &mut self,
        backup: &mut TestBackup,
        ranges: &[MemoryRange],
    ) -> Result<(), BackupError> {
        self.require_usable(ranges);
        let fails = self.call();
        self.leave_under_way(&fails, ranges);
        for &range in ranges {
            assert!(backup.has(range), "{range:?} was saved");
            for (&address, &value) in backup.contents.range(range.address..range.end()) {
                let value = fails.is_ok().then_some(value);
                self.driver.card().put(address, value);
            }
        }
        fails
    }

    fn finish(&mut self) -> Result<(), BackupError> {
        if let Some(left) = self.failing_waits.checked_sub(1) {
            self.failing_waits = left;
            return Err(failed().into());
        }
        self.driver.card().kernels.retain(|&(_, by)| by != COPIES);
        Ok(())
    }

    fn discard(&mut self, _backup: TestBackup) {
        self.discards += 1;
    }

    fn retains(&mut self, backup: &TestBackup) -> bool {
        self.retains && backup.kind == BackupKind::Host
    }

    fn host_copy(backup: &TestBackup, range: MemoryRange) -> Option<usize> {
        assert!(backup.has(range), "{range:?} was saved");
        (backup.kind == BackupKind::Host).then_some(1)
    }

    fn bytes(backup: &TestBackup) -> (Bytes, Bytes) {
        let saved = backup.ranges[..backup.saved].iter();
        let sum = saved.map(|range| range.size).sum();
        match backup.kind {
            BackupKind::Host => (sum, Bytes::ZERO),
            BackupKind::Disk => (Bytes::ZERO, sum),
        }
    }
}

/// The allocator, which regions share.
pub(crate) type Allocator = Arc<Mutex<DeviceAllocator<TestDriver>>>;

pub(crate) fn allocator(driver: &TestDriver, config: &Config) -> Allocator {
    Arc::new(Mutex::new(DeviceAllocator::new(driver.clone(), 0, config)))
}

/// A region with one pool.
pub(crate) struct TestRegion {
    pub(crate) memory: Arc<RegionMemory<TestDriver, TestBackups>>,
    pub(crate) kind: Option<BackupKind>,
    pub(crate) pool: MempoolId,
    pub(crate) allocator: Allocator,
    /// How many of the next calls to its pool work before one fails.
    pub(crate) fails_in: Cell<Option<u64>>,
    driver: TestDriver,
}

impl TestRegion {
    pub(crate) fn new(
        number: u64,
        kind: Option<BackupKind>,
        driver: &TestDriver,
        allocator: &Allocator,
    ) -> TestRegion {
        let memory = Arc::new(RegionMemory::new(driver.clone(), kind));
        let pool = MempoolId(number, number);
        let mut lane = allocator.lock().expect("no call panics");
        lane.lane_mut().create_or_retain_pool(pool);
        let source = Box::new(RegionSource::new(Arc::clone(&memory), "kv".into()));
        lane.lane_mut()
            .set_pool(pool, PoolSetting::Source(source))
            .expect("it is new");
        lane.lane_mut()
            .set_pool(pool, PoolSetting::GivesBack)
            .expect("it is there");
        drop(lane);
        TestRegion {
            memory,
            kind,
            pool,
            allocator: Arc::clone(allocator),
            fails_in: Cell::new(None),
            driver: driver.clone(),
        }
    }

    pub(crate) fn lane(&self) -> MutexGuard<'_, DeviceAllocator<TestDriver>> {
        self.allocator.lock().expect("no call panics")
    }

    pub(crate) fn allocate(&self, size: Bytes, stream: Stream) -> Result<MemoryRange, AllocError> {
        let address = self.lane().allocate_in(self.pool, size, stream)?;
        Ok(MemoryRange { address, size })
    }

    /// Returns the segments of its pool.
    pub(crate) fn segments(&self) -> Vec<SegmentSnapshot> {
        let mut segments = self.lane().segments();
        segments.retain(|segment| segment.pool == self.pool);
        segments
    }

    /// Returns what a resume is to take of the device.
    pub(crate) fn needed_to_resume(&self) -> Bytes {
        let mut lane = self.lane();
        // As whoever asks does.
        let _ = lane.lane_mut().process_events();
        let kept = lane
            .lane()
            .segments_after_trim(self.pool, HeldPool::IsTrimmed)
            .expect("it is there");
        drop(lane);
        let mut kept: Vec<_> = kept
            .into_iter()
            .map(|(address, size)| MemoryRange { address, size })
            .collect();
        kept.sort_unstable();
        let needed = self.memory.needed_to_resume(&kept);
        needed.expect("no call panics")
    }

    pub(crate) fn pools(&self) -> impl Pools {
        OnePool(self)
    }

    pub(crate) fn pause(
        &self,
        backups: &mut TestBackups,
    ) -> Result<(), lowtide_region::RegionError> {
        self.memory.pause(&mut OnePool(self), backups)
    }

    pub(crate) fn resume(
        &self,
        backups: &mut TestBackups,
    ) -> Result<(), lowtide_region::RegionError> {
        self.memory.resume(&mut OnePool(self), backups)
    }
}

struct OnePool<'a>(&'a TestRegion);

impl OnePool<'_> {
    fn call(&self) -> Result<(), PoolsError> {
        let left = self.0.fails_in.get();
        self.0
            .fails_in
            .set(left.and_then(|left| left.checked_sub(1)));
        match left {
            Some(0) => Err("it was to fail".into()),
            _ => Ok(()),
        }
    }
}

impl Pools for OnePool<'_> {
    fn set_paused(&mut self, is_paused: bool) -> Result<(), PoolsError> {
        self.call()?;
        let name = is_paused.then(|| "kv".into());
        Ok(self
            .0
            .lane()
            .lane_mut()
            .set_pool(self.0.pool, PoolSetting::Paused(name))?)
    }

    fn trim_and_list(&mut self) -> Result<Vec<MemoryRange>, PoolsError> {
        self.call()?;
        let mut lane = self.0.lane();
        lane.lane_mut().process_events()?;
        lane.lane_mut()
            .trim_pool(self.0.pool, HeldPool::IsTrimmed)?;
        let held = lane.lane().held_blocks(self.0.pool)?;
        let range = |block: &lowtide_core::Allocation| MemoryRange {
            address: block.address,
            size: block.requested,
        };
        Ok(held.iter().map(range).collect())
    }

    fn watch(&mut self, ranges: &[MemoryRange], is_watched: bool) {
        let addresses = ranges.iter().map(|range| range.address);
        self.0.lane().lane_mut().watch(addresses, is_watched);
    }

    fn notify(&mut self, is_leaving: bool) {
        let segments = self.0.segments();
        self.0.driver.tell(self.0.pool, is_leaving, &segments);
    }
}
