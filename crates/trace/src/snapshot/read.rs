//! Picks up what a snapshot says from the dicts above its records.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use lowtide_core::{
    Action, BlockSnapshot, Bytes, DeviceAddress, FreeBlockOrder, MempoolId, SegmentSnapshot,
};

use super::pauses::{self, Pause, Place};
use super::records::{Record, Records, action, known_strings, natural, pool_id, stream};
use crate::budget::{Budget, Density};
use crate::error::{ErrorKind, TraceError};
use crate::in_force::conf_pairs;
use crate::model::{AllocatorSettings, Annotation, Snapshot, TraceEvent};
use crate::parts::{DEVICES_MAX, Parts};
use crate::pickle::{Heap, Machine, Recogniser as _, StringId, Value, opcode};
use crate::recover;
use crate::source::Input;

/// Returns the snapshot whose pickle is in `input`.
pub(crate) fn read(input: &mut Input<'_>) -> Result<Snapshot, TraceError> {
    match input.peek(1)?.first().copied() {
        None => return Err(TraceError::new(ErrorKind::Truncated, "the file is empty")),
        Some(opcode::PROTO | opcode::MARK | opcode::EMPTY_DICT | opcode::EMPTY_LIST) => {}
        Some(_) => {
            let what = "neither a pickle nor a recording of lowtide's; \
                        expected what torch.cuda.memory._dump_snapshot writes";
            return Err(TraceError::new(ErrorKind::Foreign, what));
        }
    }
    let mut records = Records::default();
    let (root, heap) = Machine::run(input, &mut records, known_strings())?;
    let mut budget = Budget::new(input.retained_bytes_max(Density::Pickle));
    budget.take(1, heap.retained_bytes() + records.retained_bytes())?;
    let reader = Reader {
        heap,
        records,
        budget,
    };
    reader.snapshot(root)
}

struct Reader {
    heap: Heap<Record>,
    records: Records,
    budget: Budget,
}

/// What a list says of one device, before its events are taken.
struct DeviceTrace {
    device: u32,
    events: Runs,
}

impl Reader {
    fn snapshot(mut self, root: Value) -> Result<Snapshot, TraceError> {
        let (segments, traces) = match self.heap.kept(root)? {
            // What `torch.cuda.memory_snapshot()` returns: segments only.
            Value::List(_) => (root, Value::None),
            Value::Dict(_) => (self.get(root, "segments"), self.get(root, "device_traces")),
            _ => (Value::None, Value::None),
        };
        if self.heap.items(segments).is_none() && self.heap.items(traces).is_none() {
            let what = "a pickle of something other than a memory snapshot: \
                        it has neither `segments` nor `device_traces`";
            return Err(TraceError::new(ErrorKind::Foreign, what));
        }
        for (key, list) in [("segments", segments), ("device_traces", traces)] {
            if list != Value::None && self.heap.items(list).is_none() {
                return Err(TraceError::malformed(format!("`{key}` is not a list")));
            }
        }
        let settings = self.get(root, "allocator_settings");
        let mut devices: BTreeMap<u32, Parts> = BTreeMap::new();
        self.read_segments(segments, &mut devices)?;
        let device_traces = self.read_traces(traces, &mut devices)?;
        let settings = self.settings(settings)?;
        let pauses = self.read_pauses(self.get(root, "pauses"))?;
        self.read_regions(self.get(root, "region_pools"), &mut devices)?;
        self.read_annotations(self.get(root, "external_annotations"), &mut devices)?;
        let Reader {
            heap,
            mut records,
            mut budget,
        } = self;
        budget.give_back(heap.retained_bytes());
        records.stacks.strings = heap.into_strings();
        budget.take(1, records.stacks.strings.retained_bytes())?;
        // From the last device to the first, so that each takes its events off the end.
        for DeviceTrace { device, events } in device_traces.into_iter().rev() {
            let parts = devices.entry(device).or_default();
            parts.events = events.take(&mut records.events, &mut budget)?;
        }
        for (device, pauses) in pauses {
            // What is paused alone is no reason to list a device.
            if let Some(parts) = devices.get_mut(&device) {
                budget.take(pauses.len(), size_of::<TraceEvent>() as u64)?;
                pauses::put(pauses, parts);
            }
        }
        let stacks = Arc::new(records.stacks);
        let trace = |(device, mut parts): (u32, Parts)| {
            parts.settings = settings.clone();
            parts.into_trace(device, Arc::clone(&stacks), &mut budget)
        };
        let traces = devices.into_iter().map(trace).collect::<Result<_, _>>()?;
        Ok(Snapshot {
            traces,
            is_cut_off: false,
        })
    }

    fn read_segments(
        &mut self,
        segments: Value,
        devices: &mut BTreeMap<u32, Parts>,
    ) -> Result<(), TraceError> {
        for number in 0..self.count(segments) {
            let segment = self.item(segments, number);
            self.read_segment(segment, devices)
                .map_err(|error| error.in_part(&format!("segment {number} of the snapshot")))?;
        }
        Ok(())
    }

    fn read_segment(
        &mut self,
        segment: Value,
        devices: &mut BTreeMap<u32, Parts>,
    ) -> Result<(), TraceError> {
        self.budget.take(1, size_of::<SegmentSnapshot>() as u64)?;
        self.heap.kept(segment)?;
        let device = natural(self.get(segment, "device"))
            .and_then(|device| u32::try_from(device).ok())
            .filter(|&device| device < DEVICES_MAX)
            .ok_or_else(|| TraceError::malformed("`device` is not a device's number"))?;
        let parts = devices.entry(device).or_default();
        let address = natural(self.get(segment, "address"))
            .ok_or_else(|| TraceError::malformed("`address` is not a number"))?;
        let size = natural(self.get(segment, "total_size"))
            .filter(|size| address.checked_add(*size).is_some())
            .ok_or_else(|| TraceError::malformed("`total_size` is not a number of bytes"))?;
        let segment_pool = match self.get(segment, "segment_pool_id") {
            Value::None => MempoolId::DEFAULT,
            pool => pool_id(&self.heap, pool)?,
        };
        let kind = self.heap.text(self.get(segment, "segment_type"));
        let mut segment_snapshot = SegmentSnapshot {
            address: DeviceAddress(address),
            size: Bytes(size),
            stream: stream(self.get(segment, "stream"))?,
            pool: segment_pool,
            is_large: kind.map_or_else(|| recover::is_large(Bytes(size)), |kind| kind == "large"),
            is_expandable: self.get(segment, "is_expandable") == Value::Bool(true),
            blocks: Vec::new(),
        };
        self.read_blocks(self.get(segment, "blocks"), &mut segment_snapshot, parts)?;
        parts.push_segment(segment_snapshot);
        Ok(())
    }

    /// Fills in the blocks of `segment`, which must tile it.
    fn read_blocks(
        &mut self,
        blocks: Value,
        segment: &mut SegmentSnapshot,
        parts: &mut Parts,
    ) -> Result<(), TraceError> {
        let mut address = segment.address;
        let mut left = segment.size;
        // Some 20 bytes for a stack.
        let block_bytes = size_of::<BlockSnapshot>() as u64 + 20;
        self.budget.take(self.count(blocks), block_bytes)?;
        for index in 0..self.count(blocks) {
            let block = self.item(blocks, index);
            let Some(Record::Block(number)) = self.records.resolve(&mut self.heap, block)? else {
                return Err(TraceError::malformed(
                    "a block is not a dict with `size` and `state`",
                ));
            };
            let block = self.records.blocks[number as usize];
            let is_next = block.address.is_none_or(|start| start == address);
            if !is_next || block.size > left || block.size.is_zero() {
                return Err(TraceError::malformed(format!(
                    "the blocks do not tile it at {address}"
                )));
            }
            segment.blocks.push(BlockSnapshot {
                address,
                size: block.size,
                requested: block.requested,
                status: block.status,
            });
            parts.block_stacks.insert(address, block.stack);
            address = address + block.size;
            left -= block.size;
        }
        if !left.is_zero() {
            return Err(TraceError::malformed(format!(
                "the blocks do not tile it at {address}"
            )));
        }
        Ok(())
    }

    /// Returns which events are whose, and counts those that are none.
    fn read_traces(
        &mut self,
        traces: Value,
        devices: &mut BTreeMap<u32, Parts>,
    ) -> Result<Vec<DeviceTrace>, TraceError> {
        let mut device_traces = Vec::new();
        for device in 0..self.count(traces) {
            let trace = self.item(traces, device);
            let device = u32::try_from(device)
                .ok()
                .filter(|&device| device < DEVICES_MAX)
                .ok_or_else(|| TraceError::malformed("`device_traces` has too many devices"))?;
            let count = self.heap.items(trace).map(<[Value]>::len).ok_or_else(|| {
                TraceError::malformed(format!("the trace of device {device} is not a list"))
            })?;
            if count == 0 {
                continue;
            }
            let parts = devices.entry(device).or_default();
            let mut events = Runs::default();
            for index in 0..count {
                let entry = self.item(trace, index);
                let record = self.records.resolve(&mut self.heap, entry);
                match record.map_err(|error| error.at_event(device, index))? {
                    Some(Record::Event(number)) => {
                        events.push(number as usize, &mut self.budget)?
                    }
                    Some(Record::SkippedEvent) => parts.skipped_events += 1,
                    _ => match lacks(self.get(entry, "action")) {
                        None => parts.skipped_events += 1,
                        Some(what) => {
                            return Err(TraceError::malformed(what).at_event(device, index));
                        }
                    },
                }
            }
            device_traces.push(DeviceTrace { device, events });
        }
        Ok(device_traces)
    }

    /// Returns the pauses of each device, and takes them away from among the events.
    fn read_pauses(&mut self, list: Value) -> Result<BTreeMap<u32, Vec<Pause>>, TraceError> {
        let mut pauses: BTreeMap<u32, Vec<Pause>> = BTreeMap::new();
        let mut numbers = Vec::new();
        for index in 0..self.count(list) {
            self.budget.take(1, size_of::<(Pause, u32)>() as u64)?;
            let entry = self.item(list, index);
            let device = natural(self.get(entry, "device"));
            let device = device.and_then(|device| u32::try_from(device).ok());
            let place = match self.get(entry, "entries_before") {
                Value::None => Place::ByTime,
                Value::Int(-1) => Place::BeforeFirst,
                count => Place::After(
                    natural(count)
                        .and_then(|count| usize::try_from(count).ok())
                        .unwrap_or(usize::MAX),
                ),
            };
            let event = self.get(entry, "event");
            let record = self.records.resolve(&mut self.heap, event)?;
            let (Some(device), Some(Record::Event(number))) = (device, record) else {
                let what = format!("entry {index} of `pauses` has no `device` and `event`");
                return Err(TraceError::malformed(what));
            };
            let event = self.records.events[number as usize];
            if event.event.action.is_pause() {
                pauses
                    .entry(device)
                    .or_default()
                    .push(Pause { place, event });
            }
            numbers.push(number as usize);
        }
        // They came last, and devices take theirs off the end.
        let end = self.records.events.len();
        let first = end.saturating_sub(numbers.len());
        if numbers.into_iter().eq(first..end) {
            self.records.events.truncate(first);
        }
        Ok(pauses)
    }

    fn read_regions(
        &mut self,
        regions: Value,
        devices: &mut BTreeMap<u32, Parts>,
    ) -> Result<(), TraceError> {
        for index in 0..self.count(regions) {
            let entry = self.heap.kept(self.item(regions, index))?;
            let device = natural(self.get(entry, "device"));
            let device = device.and_then(|device| u32::try_from(device).ok());
            let pool = pool_id(&self.heap, self.get(entry, "pool_id"))
                .map_err(|error| error.in_part(&format!("entry {index} of `region_pools`")))?;
            // A region alone is no reason to list a device.
            let Some(parts) = device.and_then(|device| devices.get_mut(&device)) else {
                continue;
            };
            if let Some(tag) = self.heap.text(self.get(entry, "tag")) {
                let bytes = size_of::<(MempoolId, Arc<str>)>() + tag.len();
                self.budget.take(1, bytes as u64)?;
                parts.regions.insert(pool, tag.into());
            }
        }
        Ok(())
    }

    fn read_annotations(
        &mut self,
        annotations: Value,
        devices: &mut BTreeMap<u32, Parts>,
    ) -> Result<(), TraceError> {
        let mut names: BTreeMap<StringId, Arc<str>> = BTreeMap::new();
        for index in 0..self.count(annotations) {
            let entry = self.item(annotations, index);
            let record = self.records.resolve(&mut self.heap, entry)?;
            let Some(Record::Annotation(number)) = record else {
                continue;
            };
            let annotation = self.records.annotations[number as usize];
            // A mark alone is no reason to list a device.
            let Some(parts) = devices.get_mut(&annotation.device) else {
                continue;
            };
            self.budget.take(1, size_of::<Annotation>() as u64)?;
            let strings = &self.heap.strings;
            let name = names
                .entry(annotation.name)
                .or_insert_with(|| strings.get(annotation.name).into());
            parts.annotations.push(Annotation {
                name: Arc::clone(name),
                stage: annotation.stage,
                time_us: annotation.time_us,
            });
        }
        Ok(())
    }

    fn settings(&self, settings: Value) -> Result<AllocatorSettings, TraceError> {
        let settings = self.heap.kept(settings)?;
        let conf = self
            .heap
            .text(self.get(settings, "PYTORCH_CUDA_ALLOC_CONF"));
        let max_split_size = match self.get(settings, "max_split_size") {
            Value::Int(..0) => Some(None),
            size => natural(size).map(|size| Some(Bytes(size))),
        };
        let garbage_collection_threshold = match self.get(settings, "garbage_collection_threshold")
        {
            Value::Float(threshold) => Some(threshold),
            _ => None,
        };
        let expandable_segments = match self.get(settings, "expandable_segments") {
            Value::Bool(is_on) => Some(is_on),
            _ => None,
        };
        let divisions = self.get(settings, "roundup_power2_divisions");
        let divisions = self.heap.kept(divisions)?;
        let mut roundup_power2_divisions: Vec<(u64, u64)> = self
            .heap
            .pairs(divisions)
            .chunks_exact(2)
            .filter_map(|pair| Some((self.heap.text(pair[0])?.parse().ok()?, natural(pair[1])?)))
            .collect();
        roundup_power2_divisions.sort_unstable();
        Ok(AllocatorSettings {
            conf: conf.unwrap_or_default().to_owned(),
            max_split_size,
            garbage_collection_threshold,
            expandable_segments,
            roundup_power2_divisions,
            free_block_order: self.free_block_order(settings),
            strategy: String::new(),
        })
    }

    /// Returns the order of the release of PyTorch that wrote the settings, after its events were read.
    ///
    /// 2.13 is the first whose settings have `max_round_threshold`, and 2.12 the first whose events have `pool_id`.
    /// What lowtide writes has the order itself, or its options do.
    fn free_block_order(&self, settings: Value) -> Option<FreeBlockOrder> {
        let has = |key| self.get(settings, key) != Value::None;
        let conf = self.get(settings, "PYTORCH_CUDA_ALLOC_CONF");
        let in_conf = || {
            conf_pairs(self.heap.text(conf)?)
                .find_map(|pair| pair.strip_prefix("free_block_order:"))
        };
        let named = self.heap.text(self.get(settings, "free_block_order"));
        match named.or_else(in_conf) {
            Some(name) => FreeBlockOrder::named(name),
            None if has("max_round_threshold") => Some(FreeBlockOrder::SegmentAge),
            None if !has("graph_capture_record_stream_reuse") => None,
            None if self.records.events.iter().any(|event| event.pool_known) => {
                Some(FreeBlockOrder::BlockAge)
            }
            None => Some(FreeBlockOrder::Address),
        }
    }

    /// Returns how many items a list has; none where `list` is no list.
    fn count(&self, list: Value) -> usize {
        self.heap.items(list).map_or(0, <[Value]>::len)
    }

    /// Returns an item of a list; [`Value::None`] where there is none any more, because an item before it
    /// named the list as its own stack, and it was read as that.
    fn item(&self, list: Value, index: usize) -> Value {
        let items = self.heap.items(list).unwrap_or_default();
        items.get(index).copied().unwrap_or(Value::None)
    }

    /// Returns what the dict `value` has under `key`, the last if several; [`Value::None`] if
    /// nothing.
    fn get(&self, value: Value, key: &str) -> Value {
        let mut pairs = self.heap.pairs(value).chunks_exact(2).rev();
        let pair = pairs.find(|pair| self.heap.text(pair[0]) == Some(key));
        pair.map_or(Value::None, |pair| pair[1])
    }
}

/// The numbers of a device's events, as runs of consecutive numbers: mostly a single one.
#[derive(Default)]
struct Runs(Vec<Range<usize>>);

impl Runs {
    fn push(&mut self, number: usize, budget: &mut Budget) -> Result<(), TraceError> {
        match self.0.last_mut() {
            Some(run) if run.end == number => run.end += 1,
            _ => {
                budget.take(1, size_of::<Range<usize>>() as u64)?;
                self.0.push(number..number + 1);
            }
        }
        Ok(())
    }

    /// Returns the events of these numbers. Moves them where they are all that is left of `events`,
    /// as they are for one device, or its tail.
    fn take(
        self,
        events: &mut Vec<TraceEvent>,
        budget: &mut Budget,
    ) -> Result<Vec<TraceEvent>, TraceError> {
        Ok(match &self.0[..] {
            [run] if run.end == events.len() && run.start == 0 => std::mem::take(events),
            [run] if run.end == events.len() => {
                let tail = events.split_off(run.start);
                events.shrink_to_fit();
                tail
            }
            runs => {
                // A file may list an event many times.
                let count = runs.iter().map(ExactSizeIterator::len).sum();
                budget.take(count, size_of::<TraceEvent>() as u64)?;
                let mut taken = Vec::with_capacity(count);
                for run in runs {
                    let twice = || TraceError::malformed("two devices list the same events");
                    taken.extend_from_slice(events.get(run.clone()).ok_or_else(twice)?);
                }
                taken
            }
        })
    }
}

/// Returns what is wrong with an entry of this `action` that is no record of an event; `None` of an action that is none of
/// the known ones, which newer versions may have.
fn lacks(name: Value) -> Option<&'static str> {
    match (name, action(name)) {
        (Value::None, _) => Some("the entry is not a dict with an `action`"),
        (_, Some(Action::OutOfMemory)) => Some("`device_free` is missing"),
        (_, Some(_)) => Some("`addr` is missing"),
        (_, None) => None,
    }
}
