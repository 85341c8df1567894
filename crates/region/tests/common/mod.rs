//! A device with contents, an allocator on it, backups that can fail, and a region on these.
#![allow(dead_code, reason = "each test uses a part of it")]

mod driver;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard};

use lowtide_core::{
    AllocError, Allocation, Bytes, Config, DeviceAddress, DriverError, MempoolId, Physical,
    RouteOrder, SegmentSnapshot, Stream,
};
use lowtide_region::{
    BackupError, BackupKind, Backups, Copies, Device, MemoryRange, RegionError, RegionMemory,
};
use lowtide_shared::{LaneOf, OwnerTable, SharedAllocator};

pub(crate) use driver::{TestDriver, UNIT, failed};

/// How many ranges are saved at once.
const STEP: usize = 2;

/// The stream of copies between the device and backups.
const COPIES: Stream = Stream(u64::MAX);

/// Backups in the test's memory.
#[derive(Debug)]
pub(crate) struct TestBackups {
    driver: TestDriver,
    /// Counts backups: each has a reference.
    there: Arc<()>,
    /// Whether backups in host memory are retained after a resume.
    pub(crate) retains: bool,
    /// How many of the next calls succeed before one fails.
    pub(crate) fails_in: Option<u64>,
    /// Whether that one panics.
    pub(crate) panics: bool,
    /// Whether failures are for lack of host memory.
    pub(crate) is_out_of_host_memory: bool,
    /// How many calls after that one fail, too.
    pub(crate) more_failures: u64,
    /// How many waits for the copies of calls that failed will fail.
    pub(crate) failing_waits: u64,
    pub(crate) failures: u64,
    /// The device memory in use at each step of saving.
    pub(crate) in_use: Vec<Bytes>,
    pub(crate) released_backups: usize,
    /// How often kept memory was released.
    pub(crate) releases: usize,
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
            is_out_of_host_memory: false,
            more_failures: 0,
            failing_waits: 0,
            failures: 0,
            in_use: Vec::new(),
            released_backups: 0,
            releases: 0,
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
                Err(if self.is_out_of_host_memory {
                    BackupError::NoHostMemory {
                        needed: UNIT,
                        message,
                        directory: None,
                    }
                } else {
                    BackupError::NoThread { message }
                })
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Leaves the copies of a failed call in progress.
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

    fn release(&mut self, _backup: TestBackup) {
        self.released_backups += 1;
    }

    fn release_retained(&mut self) {
        self.releases += 1;
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

/// A device's allocator and backups, which its regions share.
#[derive(Clone, Debug)]
pub(crate) struct Allocator {
    /// The device's number.
    number: u8,
    shared: Arc<SharedAllocator<TestDriver>>,
    backups: Arc<Mutex<TestBackups>>,
}

impl Deref for Allocator {
    type Target = SharedAllocator<TestDriver>;

    fn deref(&self) -> &SharedAllocator<TestDriver> {
        &self.shared
    }
}

pub(crate) fn allocator(driver: &TestDriver, config: &Config) -> Allocator {
    allocator_of(0, driver, config)
}

pub(crate) fn allocator_of(number: u8, driver: &TestDriver, config: &Config) -> Allocator {
    let config = match config.retry_wait_ms() {
        // One thread waits for memory in vain.
        Some(_) => format!("{config},allow_retry_on_failure:False").replacen("bfc,", "bfc:", 1),
        None => config.to_string(),
    };
    let config = config.parse().expect("it is valid");
    let owners = Arc::new(OwnerTable::default());
    let shared = SharedAllocator::new(driver.clone(), number, &config, owners, None);
    Allocator {
        number,
        shared: Arc::new(shared),
        backups: Arc::new(Mutex::new(TestBackups::new(driver))),
    }
}

impl Allocator {
    pub(crate) fn backups(&self) -> MutexGuard<'_, TestBackups> {
        self.backups.lock().expect("no test panics in a call")
    }

    /// Allocates in no region.
    pub(crate) fn allocate(
        &self,
        size: Bytes,
        stream: Stream,
    ) -> Result<DeviceAddress, AllocError> {
        self.shared.allocate(size, stream, || Ok(false))
    }

    pub(crate) fn free(&self, address: DeviceAddress) -> Result<(), AllocError> {
        self.with_block(address, |lane| lane.free(address))
    }

    /// Allocates as a graph capture or a `torch.cuda.MemPool` does.
    pub(crate) fn allocate_in(
        &self,
        pool: MempoolId,
        size: Bytes,
        stream: Stream,
    ) -> Result<MemoryRange, AllocError> {
        let order = RouteOrder::BeforeOthers;
        self.with_lane(LaneOf::Pools, |lane| {
            lane.begin_allocate_to_pool(pool, order, |_| true)
        })?;
        let allocated = self.allocate(size, stream);
        self.with_lane(LaneOf::Pools, |lane| lane.end_allocate_to_pool(pool))?;
        self.release_pool(pool)?;
        allocated.map(|address| MemoryRange { address, size })
    }

    pub(crate) fn release_pool(&self, pool: MempoolId) -> Result<(), AllocError> {
        self.with_lane(LaneOf::Pools, |lane| lane.release_pool(pool))
    }

    pub(crate) fn empty_cache(&self) -> Result<(), AllocError> {
        self.with_all(|device| device.empty_cache(None))?
    }

    pub(crate) fn is_watched(&self, address: DeviceAddress) -> bool {
        let block = self.with_lane(LaneOf::Pools, |lane| lane.allocation(address));
        block.is_ok_and(|block| block.is_watched)
    }
}

/// What a test does at some moment of a call.
type Act = Box<dyn FnOnce() + Send>;

/// The device of one region. Calls to its pools can fail, and a test can act before them.
pub(crate) struct TestDevice {
    driver: TestDriver,
    allocator: Allocator,
    /// An allocator on the same driver without the pools, so that calls for them fail.
    without_pools: SharedAllocator<TestDriver>,
    /// The bytes that regions leave free when they grow.
    pub(crate) margin: Bytes,
    seam: Mutex<Seam>,
}

#[derive(Default)]
struct Seam {
    /// Which of the next uses of the allocator find no pools: the first if the lowest bit is set, and so on.
    refused: u64,
    /// How many did.
    refusals: u64,
    /// What is done before a later use, and after how many others.
    act: Option<(u64, Act)>,
    /// What is done when memory is about to leave (`true`), or is back.
    on_notify: Option<(bool, Act)>,
    /// The bytes that left the device or came back, in all changes.
    moved: Bytes,
}

impl TestDevice {
    pub(crate) fn new(driver: &TestDriver, allocator: &Allocator) -> TestDevice {
        let config = "direct".parse().expect("there is such a strategy");
        let owners = Arc::new(OwnerTable::default());
        TestDevice {
            driver: driver.clone(),
            allocator: allocator.clone(),
            without_pools: SharedAllocator::new(driver.clone(), 0, &config, owners, None),
            margin: Bytes::ZERO,
            seam: Mutex::default(),
        }
    }

    fn seam(&self) -> MutexGuard<'_, Seam> {
        self.seam.lock().expect("no test panics in a call")
    }

    /// Makes some of the next uses of the allocator find no pools. Uses of the driver still succeed.
    pub(crate) fn refuse(&self, refused: u64) {
        self.seam().refused = refused;
    }

    /// Returns how many uses of the allocator found no pools.
    pub(crate) fn refusals(&self) -> u64 {
        self.seam().refusals
    }

    /// Returns the bytes that left the device or came back, in all changes.
    pub(crate) fn moved(&self) -> Bytes {
        self.seam().moved
    }

    /// Does something before a later use of the allocator, after so many others.
    pub(crate) fn before_use(&self, after: u64, act: impl FnOnce() + Send + 'static) {
        self.seam().act = Some((after, Box::new(act)));
    }

    /// Does something when memory is about to leave, or is back.
    pub(crate) fn when_notified(&self, is_leaving: bool, act: impl FnOnce() + Send + 'static) {
        self.seam().on_notify = Some((is_leaving, Box::new(act)));
    }
}

impl Device for TestDevice {
    type Driver = TestDriver;
    type Backups = TestBackups;

    fn number(&self) -> u32 {
        self.allocator.number.into()
    }

    fn lock_backups(&self) -> Result<MutexGuard<'_, TestBackups>, RegionError> {
        Ok(self.allocator.backups.lock()?)
    }

    fn allocator(&self) -> &SharedAllocator<TestDriver> {
        let mut seam = self.seam();
        let is_refused = seam.refused & 1 == 1;
        seam.refused >>= 1;
        seam.refusals += u64::from(is_refused);
        let due = seam.act.take_if(|(left, _)| *left == 0);
        if let Some((left, _)) = &mut seam.act {
            *left -= 1;
        }
        drop(seam);
        if let Some((_, act)) = due {
            act();
        }
        if is_refused {
            &self.without_pools
        } else {
            &self.allocator
        }
    }

    fn with_physical<R>(&self, act: impl FnOnce(&mut Physical<TestDriver>) -> R) -> R {
        // Counted as a use of the allocator, which finds the memory even where it finds no pools.
        let _ = self.allocator();
        act(&mut self.allocator.physical())
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        self.driver.synchronize()
    }

    fn margin(&self) -> Bytes {
        self.margin
    }

    fn finish_change(&self, moved: Bytes) {
        self.seam().moved += moved;
    }

    fn notify(&self, tag: &Arc<str>, is_leaving: bool, has_pool: impl Fn(MempoolId) -> bool) {
        assert_eq!(&**tag, "kv");
        let segments = self
            .allocator
            .with_lane(LaneOf::Pools, |lane| Ok(lane.segments()));
        let mut segments = segments.expect("no call panics");
        segments.retain(|segment| has_pool(segment.pool));
        let own = (1..=9).map(|number| MempoolId(number, number));
        let own = { own }.find(|&pool| has_pool(pool));
        self.driver
            .notify(own.expect("it is there"), is_leaving, &segments);
        let due = self
            .seam()
            .on_notify
            .take_if(|(when, _)| *when == is_leaving);
        if let Some((_, act)) = due {
            act();
        }
    }
}

/// A region with a pool of its own, and one that joined it.
pub(crate) struct TestRegion {
    pub(crate) memory: Arc<RegionMemory<TestDevice>>,
    pub(crate) kind: Option<BackupKind>,
    pub(crate) pool: MempoolId,
    /// Held by the program, like a graph's pool.
    pub(crate) joined: MempoolId,
    pub(crate) allocator: Allocator,
}

impl TestRegion {
    pub(crate) fn new(
        number: u64,
        kind: Option<BackupKind>,
        driver: &TestDriver,
        allocator: &Allocator,
    ) -> TestRegion {
        TestRegion::on(TestDevice::new(driver, allocator), number, kind)
    }

    pub(crate) fn on(device: TestDevice, number: u64, kind: Option<BackupKind>) -> TestRegion {
        let pool = MempoolId(number, number);
        let allocator = device.allocator.clone();
        let memory = Arc::new(RegionMemory::new(device, "kv".into(), kind, pool));
        let created = allocator.with_lane(LaneOf::Pools, |lane| memory.create_pool(lane));
        created.expect("it is new");
        let joined = MempoolId(0, number);
        memory.add_pool(joined).expect("it is new");
        TestRegion {
            memory,
            kind,
            pool,
            joined,
            allocator,
        }
    }

    pub(crate) fn device(&self) -> &TestDevice {
        self.memory.device()
    }

    pub(crate) fn allocate(&self, size: Bytes, stream: Stream) -> Result<MemoryRange, AllocError> {
        self.allocator.allocate_in(self.pool, size, stream)
    }

    /// Returns the segments of its own pool.
    pub(crate) fn segments(&self) -> Vec<SegmentSnapshot> {
        self.segments_of(self.pool)
    }

    /// Returns the segments of the pool that joined it.
    pub(crate) fn joined_segments(&self) -> Vec<SegmentSnapshot> {
        self.segments_of(self.joined)
    }

    fn segments_of(&self, pool: MempoolId) -> Vec<SegmentSnapshot> {
        let segments = self
            .allocator
            .with_lane(LaneOf::Pools, |lane| Ok(lane.segments()));
        let mut segments = segments.expect("no call panics");
        segments.retain(|segment| segment.pool == pool);
        segments
    }

    /// Returns the blocks that the program holds in it.
    pub(crate) fn held_blocks(&self) -> Vec<Allocation> {
        let pools = self.memory.pools().into_iter();
        let held = pools.map(|pool| {
            let held = self
                .allocator
                .with_lane(LaneOf::Pools, |lane| lane.held_blocks(pool));
            held.expect("it is there")
        });
        held.flatten().collect()
    }

    /// Returns the address of the host's copy of a block that the program holds.
    pub(crate) fn host_copy(&self, range: MemoryRange) -> Option<usize> {
        let block = self
            .allocator
            .with_lane(LaneOf::Pools, |lane| lane.allocation(range.address));
        let block = block.expect("it is held");
        self.memory.host_copy(&block).expect("no call panics")
    }

    pub(crate) fn backups(&self) -> MutexGuard<'_, TestBackups> {
        self.allocator.backups()
    }

    pub(crate) fn pause(&self) -> Result<(), RegionError> {
        self.pause_keeping(self.memory.kind())
    }

    /// Pauses the region without a backup.
    pub(crate) fn pause_and_drop(&self) -> Result<(), RegionError> {
        self.pause_keeping(None)
    }

    fn pause_keeping(&self, kind: Option<BackupKind>) -> Result<(), RegionError> {
        self.memory
            .pause(kind, &mut *self.memory.device().lock_backups()?)
    }

    pub(crate) fn resume(&self) -> Result<(), RegionError> {
        self.memory
            .resume(&mut *self.memory.device().lock_backups()?)
    }

    pub(crate) fn release_copy(&self, copies: Copies) -> Result<(), RegionError> {
        let mut backups = self.memory.device().lock_backups()?;
        self.memory.release_copy(copies, &mut backups)
    }

    /// Releases its pools, which end with their last segment.
    pub(crate) fn release_pools(&self) {
        for pool in [self.pool, self.joined] {
            assert_eq!(self.allocator.release_pool(pool), Ok(()));
        }
    }
}
