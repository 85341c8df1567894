//! Reads a snapshot's contents from the dicts above its records.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};
use lowtide_core::{
    Action, BlockSnapshot, Bytes, DeviceAddress, FreeBlockOrder, MempoolId, SegmentSnapshot,
    StrategyName,
};

use super::json;
use super::pauses::{self, Pause, Place};
use super::records::{Record, Records, action, known_strings, natural, pool_id, small, stream};
use crate::budget::{Budget, Density};
use crate::error::{Result, TraceError};
use crate::in_force::conf_pairs;
use crate::model::{AllocatorSettings, Annotation, Snapshot, TraceEvent, strategy_named};
use crate::parts::{DEVICES_MAX, Parts};
use crate::pickle::{Heap, Machine, Recogniser as _, StringId, Value};
use crate::recover;
use crate::source::Input;
use crate::stacks::StackTable;
use crate::text::RecordedText;

/// The longest text of settings: Linux limits environment variables to this size.
const CONF_BYTES_MAX: usize = 128 << 10;

/// The error for a list of anything else.
const NO_SNAPSHOTS: &str = "a list of something other than snapshots or segments; of what ranks gathered write a list or a \
     dict, each item of which is what torch.cuda.memory._snapshot() returns";

/// A list with at least this many items may belong to one snapshot only.
const MANY_ITEMS: usize = 16;

/// Returns the snapshot in the pickle of `input`.
pub(crate) fn read(input: &mut Input<'_>) -> Result<Snapshot> {
    let mut records = Records::default();
    let (root, heap) = Machine::run(input, &mut records, known_strings())?;
    Reader::new(input, heap, records)?.snapshot(root)
}

/// Returns the snapshot in the JSON of `input`.
pub(crate) fn read_json(input: &mut Input<'_>) -> Result<Snapshot> {
    let mut records = Records::default();
    let (root, heap) = json::read(input, &mut records)?;
    Reader::new(input, heap, records)?.snapshot(root)
}

struct Reader {
    heap: Heap<Record>,
    records: Records,
    budget: Budget,
    /// The numbers of the long lists that a snapshot has taken. No other snapshot may have them.
    taken: HashSet<u32>,
    /// The texts that traces keep. Each is stored once, even if many snapshots share it.
    texts: HashMap<StringId, RecordedText>,
}

/// The contents of one snapshot, before its events are taken.
#[derive(Default)]
struct Member {
    /// The file's name for it, if the file has several.
    name: Option<RecordedText>,
    devices: BTreeMap<u32, Parts>,
    host: Parts,
    settings: AllocatorSettings,
    pauses: BTreeMap<u32, Vec<Pause>>,
    /// The owners of the events, in the order of the records.
    events: Vec<(Owner, Runs)>,
}

/// The owner of a list's events.
#[derive(Clone, Copy)]
enum Owner {
    Device(u32),
    Host,
    /// No owner: these events have been copied already.
    Pauses,
}

impl Reader {
    fn new(input: &Input<'_>, heap: Heap<Record>, records: Records) -> Result<Reader> {
        let mut budget = Budget::new(input.retained_bytes_max(Density::Pickle));
        budget.take(1, heap.retained_bytes() + records.retained_bytes())?;
        Ok(Reader {
            heap,
            records,
            budget,
            taken: HashSet::new(),
            texts: HashMap::new(),
        })
    }

    fn snapshot(mut self, root: Value) -> Result<Snapshot> {
        let mut members = Vec::new();
        let mut left_out = Vec::new();
        let roots = self.roots(root, &mut left_out)?;
        for (name, root) in roots {
            self.budget.take(1, size_of::<Member>() as u64)?;
            let member = self.member(root);
            members.push(match name {
                None => member?,
                Some(name) => Member {
                    name: Some(name.clone()),
                    ..member.map_err(|error| error.in_part(&format!("snapshot {name}")))?
                },
            });
        }
        let (heap, mut records, mut budget) = (self.heap, self.records, self.budget);
        budget.release(heap.retained_bytes());
        records.stacks.strings = heap.into_strings();
        budget.take(1, records.stacks.strings.retained_bytes())?;
        // From the last to the first, so that each member takes its events off the end.
        for member in members.iter_mut().rev() {
            member.take_events(&mut records.events, &mut budget)?;
        }
        let stacks = Arc::new(records.stacks);
        let mut snapshot = Snapshot {
            left_out,
            ..Snapshot::default()
        };
        for member in members {
            member.finish(&stacks, &mut budget, &mut snapshot)?;
        }
        Ok(snapshot)
    }

    /// Returns the snapshots of the file, with their names if there are several.
    fn roots(
        &self,
        root: Value,
        left_out: &mut Vec<String>,
    ) -> Result<Vec<(Option<RecordedText>, Value)>> {
        let is_snapshot = |value: Value| {
            let has = |key| self.get(value, key) != Value::None;
            has("segments") || has("device_traces")
        };
        let named: Vec<(RecordedText, Value)> = match root {
            Value::Dict(_) if !is_snapshot(root) => {
                let pairs = self.heap.all_pairs(root).chunks_exact(2);
                let name = |key: Value| match (self.heap.text(key), natural(key)) {
                    (Some(text), _) => text.into(),
                    (None, Some(rank)) => rank.to_string().into(),
                    (None, None) => "without a name".into(),
                };
                pairs.map(|pair| (name(pair[0]), pair[1])).collect()
            }
            Value::List(_) | Value::Tuple(_) => {
                let items = self.heap.items(root).unwrap_or_default();
                let name = |rank: usize| rank.to_string().into();
                (0..).map(name).zip(items.iter().copied()).collect()
            }
            _ => Vec::new(),
        };
        let count = named.len();
        let (mut seen, mut repeated) = (HashSet::new(), 0);
        let mut roots = Vec::new();
        for (name, value) in named {
            let Value::Dict(dict) = value else {
                continue;
            };
            if !is_snapshot(self.heap.kept(value)?) {
                continue;
            }
            if seen.insert(dict) {
                roots.push((Some(name), value));
            } else {
                repeated += 1;
            }
        }
        let others = count - repeated - roots.len();
        if roots.is_empty() {
            // `torch.cuda.memory_snapshot()` returns a list of segments.
            let items = self.heap.items(self.heap.kept(root)?).unwrap_or_default();
            let is_segment = |&segment: &Value| self.get(segment, "total_size") != Value::None;
            return if items.first().is_none_or(is_segment) {
                Ok(vec![(None, root)])
            } else {
                Err(TraceError::foreign(NO_SNAPSHOTS))
            };
        }
        let repeats = ["repeats an earlier snapshot", "repeat earlier snapshots"];
        let are_none = ["is no snapshot", "are no snapshots"];
        for (left, [singular, plural]) in [(repeated, repeats), (others, are_none)] {
            let what = if left == 1 { singular } else { plural };
            if left > 0 {
                left_out.push(format!("{left} of {count} items {what}"));
            }
        }
        if let [(name, _)] = &mut roots[..] {
            *name = None;
        }
        Ok(roots)
    }

    /// Returns the contents of the snapshot `root`.
    fn member(&mut self, root: Value) -> Result<Member> {
        let (segments, traces) = match root {
            Value::List(_) => (root, Value::None),
            Value::Dict(_) => (self.get(root, "segments"), self.get(root, "device_traces")),
            _ => (Value::None, Value::None),
        };
        if self.heap.items(segments).is_none() && self.heap.items(traces).is_none() {
            return Err(TraceError::foreign(
                "something other than a memory snapshot: it has neither `segments` nor `device_traces`",
            ));
        }
        let [host_segments, host_trace, annotations, pauses, regions] = [
            "host_segments",
            "host_traces",
            "external_annotations",
            "pauses",
            "region_pools",
        ]
        .map(|key| self.get(root, key));
        for (key, list) in [
            ("segments", segments),
            ("device_traces", traces),
            ("host_segments", host_segments),
            ("host_traces", host_trace),
        ] {
            if list != Value::None && self.heap.items(list).is_none() {
                return Err(TraceError::malformed(format!("`{key}` is not a list")));
            }
        }
        let of_memory = [segments, traces, host_segments, host_trace];
        for list in of_memory.into_iter().chain([annotations, pauses, regions]) {
            self.take_list(list)?;
        }
        let mut member = Member::default();
        self.read_segments(segments, &mut member)?;
        self.read_traces(traces, &mut member)?;
        self.read_host(host_segments, host_trace, &mut member)
            .map_err(|error| error.in_part("the host's pinned memory"))?;
        member.settings = self.settings(self.get(root, "allocator_settings"))?;
        self.read_pauses(pauses, &mut member)?;
        self.read_regions(regions, &mut member)?;
        self.read_annotations(annotations, &mut member)?;
        Ok(member)
    }

    /// Takes `list` for one snapshot.
    ///
    /// # Errors
    ///
    /// If another snapshot has it, too: a file might list it any number of times.
    fn take_list(&mut self, list: Value) -> Result<()> {
        match list {
            Value::List(number) if self.count(list) >= MANY_ITEMS && !self.taken.insert(number) => {
                Err(TraceError::malformed("two snapshots share a list"))
            }
            _ => Ok(()),
        }
    }

    fn read_segments(&mut self, segments: Value, member: &mut Member) -> Result<()> {
        for number in 0..self.count(segments) {
            let segment = self.item(segments, number);
            self.read_segment(segment, member)
                .map_err(|error| error.in_part(&format!("segment {number} of the snapshot")))?;
        }
        Ok(())
    }

    fn read_segment(&mut self, segment: Value, member: &mut Member) -> Result<()> {
        self.heap.kept(segment)?;
        let device = small(self.get(segment, "device")).filter(|&device| device < DEVICES_MAX);
        let device =
            device.ok_or_else(|| TraceError::malformed("`device` is not a device's number"))?;
        self.read_memory(segment, member.devices.entry(device).or_default())
    }

    /// Reads a segment of a device or of the host.
    fn read_memory(&mut self, segment: Value, parts: &mut Parts) -> Result<()> {
        self.budget.take(1, size_of::<SegmentSnapshot>() as u64)?;
        self.heap.kept(segment)?;
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

    /// Reads pinned host memory, which has no device number.
    fn read_host(&mut self, segments: Value, trace: Value, member: &mut Member) -> Result<()> {
        for number in 0..self.count(segments) {
            let segment = self.item(segments, number);
            self.read_memory(segment, &mut member.host)
                .map_err(|error| error.in_part(&format!("segment {number}")))?;
        }
        let in_event = |error: TraceError, index| error.in_part(&format!("event {index}"));
        let events = self.read_trace(trace, &mut member.host, in_event)?;
        member.events.push((Owner::Host, events));
        Ok(())
    }

    /// Reads the blocks of `segment`, which must tile it.
    fn read_blocks(
        &mut self,
        blocks: Value,
        segment: &mut SegmentSnapshot,
        parts: &mut Parts,
    ) -> Result<()> {
        let mut address = segment.address;
        let mut left = segment.size;
        // A stack takes some 20 bytes.
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
                return Err(does_not_tile(address));
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
            return Err(does_not_tile(address));
        }
        Ok(())
    }

    /// Finds the events of each device.
    fn read_traces(&mut self, traces: Value, member: &mut Member) -> Result<()> {
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
            let parts = member.devices.entry(device).or_default();
            let in_event = |error: TraceError, index| error.at_event(device, index);
            let events = self.read_trace(trace, parts, in_event)?;
            member.events.push((Owner::Device(device), events));
        }
        Ok(())
    }

    /// Returns the events in a list, and counts the entries that are no events. `in_event` adds an event's position
    /// to an error.
    fn read_trace(
        &mut self,
        trace: Value,
        parts: &mut Parts,
        in_event: impl Fn(TraceError, usize) -> TraceError,
    ) -> Result<Runs> {
        let mut events = Runs::default();
        for index in 0..self.count(trace) {
            let entry = self.item(trace, index);
            let record = self.records.resolve(&mut self.heap, entry);
            match record.map_err(|error| in_event(error, index))? {
                Some(Record::Event(number)) => events.push(number as usize, &mut self.budget)?,
                Some(Record::SkippedEvent) => parts.skipped_events += 1,
                _ => match lacks(self.get(entry, "action")) {
                    None => parts.skipped_events += 1,
                    Some(what) => return Err(in_event(TraceError::malformed(what), index)),
                },
            }
        }
        Ok(events)
    }

    /// Reads the pauses of each device.
    fn read_pauses(&mut self, list: Value, member: &mut Member) -> Result<()> {
        let mut events = Runs::default();
        for index in 0..self.count(list) {
            self.budget.take(1, size_of::<(Pause, u32)>() as u64)?;
            let entry = self.item(list, index);
            let device = small(self.get(entry, "device"));
            let place = match self.get(entry, "entries_before") {
                Value::None => Place::ByTime,
                Value::Int(-1) => Place::BeforeFirst,
                count => {
                    let count = natural(count).and_then(|count| usize::try_from(count).ok());
                    Place::After(count.unwrap_or(usize::MAX))
                }
            };
            let event = self.get(entry, "event");
            let record = self.records.resolve(&mut self.heap, event)?;
            let (Some(device), Some(Record::Event(number))) = (device, record) else {
                let what = format!("entry {index} of `pauses` has no `device` and `event`");
                return Err(TraceError::malformed(what));
            };
            let event = self.records.events[number as usize];
            if event.event.action.is_pause() {
                let of_device = member.pauses.entry(device).or_default();
                of_device.push(Pause { place, event });
            }
            events.push(number as usize, &mut self.budget)?;
        }
        member.events.push((Owner::Pauses, events));
        Ok(())
    }

    fn read_regions(&mut self, regions: Value, member: &mut Member) -> Result<()> {
        for index in 0..self.count(regions) {
            let entry = self.heap.kept(self.item(regions, index))?;
            let device = small(self.get(entry, "device"));
            let pool = pool_id(&self.heap, self.get(entry, "pool_id"))
                .map_err(|error| error.in_part(&format!("entry {index} of `region_pools`")))?;
            // A region alone does not add a device.
            let Some(parts) = device.and_then(|device| member.devices.get_mut(&device)) else {
                continue;
            };
            if let Some(tag) = self.recorded_text(self.get(entry, "tag"))? {
                self.budget
                    .take(1, size_of::<(MempoolId, RecordedText)>() as u64)?;
                parts.regions.insert(pool, tag);
            }
        }
        Ok(())
    }

    fn read_annotations(&mut self, list: Value, member: &mut Member) -> Result<()> {
        for index in 0..self.count(list) {
            let entry = self.item(list, index);
            let record = self.records.resolve(&mut self.heap, entry)?;
            let Some(Record::Annotation(number)) = record else {
                continue;
            };
            let annotation = self.records.annotations[number as usize];
            // A mark alone does not add a device.
            let Some(parts) = member.devices.get_mut(&annotation.device) else {
                continue;
            };
            self.budget.take(1, size_of::<Annotation>() as u64)?;
            let name = self.recorded_text(Value::String(annotation.name))?;
            parts.annotations.push(Annotation {
                name: name.unwrap_or_default(),
                stage: annotation.stage,
                time_us: annotation.time_us,
            });
        }
        Ok(())
    }

    /// Returns a text, if `value` is one.
    fn recorded_text(&mut self, value: Value) -> Result<Option<RecordedText>> {
        let Value::String(id) = value else {
            return Ok(None);
        };
        if let Some(text) = self.texts.get(&id) {
            return Ok(Some(text.clone()));
        }
        let text = self.heap.strings.get(id);
        let bytes = size_of::<(StringId, RecordedText)>() + text.len();
        self.budget.take(1, bytes as u64)?;
        let text = RecordedText::from(text);
        self.texts.insert(id, text.clone());
        Ok(Some(text))
    }

    fn settings(&mut self, settings: Value) -> Result<AllocatorSettings> {
        let settings = self.heap.kept(settings)?;
        let conf = self.recorded_text(self.get(settings, "PYTORCH_CUDA_ALLOC_CONF"))?;
        let conf = conf.unwrap_or_default();
        if conf.raw().len() > CONF_BYTES_MAX {
            let length = Bytes(conf.raw().len() as u64);
            let what =
                format!("`PYTORCH_CUDA_ALLOC_CONF` has {length}; no environment variable has");
            return Err(TraceError::malformed(what));
        }
        // Under lowtide, a strategy without PyTorch's settings is named there.
        let (conf, strategy) = match strategy_named(conf.raw()) {
            None | Some(StrategyName::Caching) => (conf, RecordedText::default()),
            Some(_) => (RecordedText::default(), conf),
        };
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
            conf,
            max_split_size,
            garbage_collection_threshold,
            expandable_segments,
            roundup_power2_divisions,
            free_block_order: self.free_block_order(settings),
            strategy,
        })
    }

    /// Returns the order of the PyTorch release that wrote the settings. Its events must have been read.
    ///
    /// Settings have `max_round_threshold` since 2.13, and events have `pool_id` since 2.12. Snapshots by lowtide
    /// have the order itself, in the settings or in the options.
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

    /// Returns the number of items of a list; 0 if `list` is not a list.
    fn count(&self, list: Value) -> usize {
        self.heap.items(list).map_or(0, <[Value]>::len)
    }

    /// Returns an item of a list. Returns [`Value::None`] if the list lost its items meanwhile: an event before
    /// this item named the list as its own call stack, and it was read as a stack.
    fn item(&self, list: Value, index: usize) -> Value {
        let items = self.heap.items(list).unwrap_or_default();
        items.get(index).copied().unwrap_or(Value::None)
    }

    /// Returns the value of `key` in the dict `value`, the last one if there are several; [`Value::None`] if there
    /// is none.
    fn get(&self, value: Value, key: &str) -> Value {
        let mut pairs = self.heap.pairs(value).chunks_exact(2).rev();
        let pair = pairs.find(|pair| self.heap.text(pair[0]) == Some(key));
        pair.map_or(Value::None, |pair| pair[1])
    }
}

impl Member {
    /// Takes the events of the snapshot off the end of `all`, from the last list to the first.
    fn take_events(&mut self, all: &mut Vec<TraceEvent>, budget: &mut Budget) -> Result<()> {
        for (owner, runs) in std::mem::take(&mut self.events).into_iter().rev() {
            let events = runs.take(all, budget)?;
            match owner {
                Owner::Device(device) => self.devices.entry(device).or_default().events = events,
                Owner::Host => self.host.events = events,
                Owner::Pauses => {}
            }
        }
        for (device, pauses) in std::mem::take(&mut self.pauses) {
            // A pause alone does not add a device.
            if let Some(parts) = self.devices.get_mut(&device) {
                budget.take(pauses.len(), size_of::<TraceEvent>() as u64)?;
                pauses::put(pauses, parts);
            }
        }
        Ok(())
    }

    /// Adds the traces of the snapshot to `all`.
    fn finish(
        self,
        stacks: &Arc<StackTable>,
        budget: &mut Budget,
        all: &mut Snapshot,
    ) -> Result<()> {
        let (name, settings) = (self.name, self.settings);
        let named = |error: TraceError| match &name {
            Some(name) => error.in_part(&format!("snapshot {name}")),
            None => error,
        };
        let devices = self.devices.into_iter();
        for (device, mut parts) in devices.filter(|(_, parts)| !parts.are_marks()) {
            parts.settings = settings.clone();
            parts.member = name.clone();
            let trace = parts.into_trace(device, Arc::clone(stacks), budget);
            all.traces.push(trace.map_err(named)?);
        }
        let mut host = self.host;
        host.member = name.clone();
        host.into_host(stacks, budget, all).map_err(named)
    }
}

/// The numbers of a device's events, as runs of consecutive numbers: usually one run.
#[derive(Default)]
struct Runs(Vec<Range<usize>>);

impl Runs {
    fn push(&mut self, number: usize, budget: &mut Budget) -> Result<()> {
        match self.0.last_mut() {
            Some(run) if run.end == number => run.end += 1,
            _ => {
                budget.take(1, size_of::<Range<usize>>() as u64)?;
                self.0.push(number..number + 1);
            }
        }
        Ok(())
    }

    /// Returns the events with these numbers. Moves them if they are all of `events`, as for a single device, or
    /// its tail. Copies them otherwise.
    fn take(self, events: &mut Vec<TraceEvent>, budget: &mut Budget) -> Result<Vec<TraceEvent>> {
        Ok(match &self.0[..] {
            [run] if run.end == events.len() && run.start == 0 => std::mem::take(events),
            [run] if run.end == events.len() => {
                let tail = events.split_off(run.start);
                events.shrink_to_fit();
                tail
            }
            [] => Vec::new(),
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

fn does_not_tile(address: DeviceAddress) -> TraceError {
    TraceError::malformed(format!("the blocks do not tile it at {address}"))
}

/// Returns what an entry with this `action` lacks to be an event; `None` if the action is unknown, which newer
/// versions may have.
fn lacks(name: Value) -> Option<&'static str> {
    match (name, action(name)) {
        (Value::None, _) => Some("the entry is not a dict with an `action`"),
        (_, Some(Action::OutOfMemory)) => Some("`device_free` is missing"),
        (_, Some(_)) => Some("`addr` is missing"),
        (_, None) => None,
    }
}
