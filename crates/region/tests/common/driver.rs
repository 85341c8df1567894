//! A simulated driver with contents, which records violations.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lowtide_core::{
    Bytes, DeviceAddress, Driver, DriverError, EventHandle, Handle, MemoryInfo, MempoolId,
    SegmentSnapshot, Stream,
};
use lowtide_region::MemoryRange;
use lowtide_sim::{Call, FaultPlan, SimConfig, SimDriver};

/// The unit of reads and writes.
pub(crate) const UNIT: Bytes = Bytes(512);

pub(crate) fn failed() -> DriverError {
    DriverError::Failed {
        call: "a call",
        code: 999,
        message: "it was to fail".to_owned(),
    }
}

/// The simulated driver, which everybody shares, and the contents of its memory.
#[derive(Clone, Debug)]
pub(crate) struct TestDriver(Arc<Mutex<Card>>);

#[derive(Debug)]
pub(super) struct Card {
    sim: SimDriver,
    /// The size and the handle of each mapping.
    mapped: BTreeMap<DeviceAddress, (Bytes, Handle)>,
    /// What was written, by handle and offset. Other contents are undefined.
    contents: BTreeMap<(Handle, Bytes), u64>,
    /// Work in progress.
    pub(super) kernels: Vec<(MemoryRange, Stream)>,
    /// By the region's own pool, the segments that observers were notified of as paused.
    notified: BTreeMap<MempoolId, BTreeSet<DeviceAddress>>,
    /// The faults to set once an unmap has failed.
    then: Option<FaultPlan>,
    /// Violations of rules that the simulator does not check.
    violations: Vec<String>,
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
            notified: BTreeMap::new(),
            then: None,
            violations: Vec::new(),
        })))
    }

    pub(super) fn card(&self) -> MutexGuard<'_, Card> {
        self.0.lock().expect("no test panics in a call")
    }

    pub(crate) fn set_faults(&self, faults: FaultPlan) {
        self.card().sim.set_faults(faults);
    }

    /// Makes the n-th unmap from now fail, and then the first call of another kind.
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

    /// Returns all violations.
    pub(crate) fn violations(&self) -> Vec<String> {
        let card = self.card();
        card.sim
            .violations()
            .iter()
            .chain(&card.violations)
            .cloned()
            .collect()
    }

    /// Starts work in a stream that uses a range.
    pub(crate) fn launch(&self, range: MemoryRange, stream: Stream) {
        self.card().kernels.push((range, stream));
    }

    /// Records a violation if a stream is given memory that work of another stream may still use.
    pub(crate) fn give(&self, range: MemoryRange, stream: Stream) {
        let mut card = self.card();
        let used = |&&(used, by): &&(MemoryRange, Stream)| by != stream && overlap(used, range);
        if let Some(kernel) = card.kernels.iter().find(used) {
            let violation = format!("{range:?} is given to {stream:?}: {kernel:?}");
            card.violations.push(violation);
        }
    }

    /// Records a violation if a notification is wrong: pause and resume of a segment alternate, and its memory is mapped
    /// at both.
    pub(super) fn notify(&self, pool: MempoolId, is_leaving: bool, segments: &[SegmentSnapshot]) {
        let mut card = self.card();
        let addresses = segments.iter().map(|segment| segment.address);
        let addresses: BTreeSet<_> = addresses.collect();
        let is_paired = if is_leaving {
            card.notified.insert(pool, addresses).is_none()
        } else {
            card.notified
                .remove(&pool)
                .is_some_and(|left| left.is_superset(&addresses))
        };
        let mut segments = segments.iter();
        let is_there =
            segments.all(|segment| card.sim.access(segment.address, segment.size).is_ok());
        if !is_paired || !is_there {
            let violation = format!("notified of {pool:?}: {is_leaving} {is_paired} {is_there}");
            card.violations.push(violation);
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

    /// Returns the bytes of mapped pieces that overlap any of some ranges.
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
    /// Returns the handle at an address and the offset in it.
    fn place(&self, address: DeviceAddress) -> Option<(Handle, Bytes)> {
        let (&start, &(size, handle)) = self.mapped.range(..=address).next_back()?;
        (address < start + size).then(|| (handle, address.offset_from(start)))
    }

    fn get(&self, address: DeviceAddress) -> Option<u64> {
        self.contents.get(&self.place(address)?).copied()
    }

    pub(super) fn put(&mut self, address: DeviceAddress, value: Option<u64>) {
        let place = self.place(address).expect("only what is mapped is written");
        match value {
            Some(value) => self.contents.insert(place, value),
            None => self.contents.remove(&place),
        };
    }

    /// Returns everything written in a range, by address.
    pub(super) fn read(&self, range: MemoryRange) -> BTreeMap<DeviceAddress, u64> {
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
            let violation = format!("{range:?} is unmapped: {kernel:?}");
            card.violations.push(violation);
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
    fn synchronize_device(&mut self) -> Result<(), DriverError> {
        let mut card = self.card();
        card.sim.synchronize_device()?;
        card.kernels.clear();
        Ok(())
    }
    fn now(&self) -> Duration {
        self.card().sim.now()
    }
    fn memory_info(&mut self) -> Result<MemoryInfo, DriverError> {
        self.card().sim.memory_info()
    }
}

impl TestDriver {
    /// Waits for all work.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        self.clone().synchronize_device()
    }
}
