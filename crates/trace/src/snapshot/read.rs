//! Picks up what a snapshot says from the dicts above its records.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hashbrown::HashMap;
use lowtide_core::{BlockSnapshot, BlockStatus, Bytes, DeviceAddress, MempoolId, SegmentSnapshot};

use super::records::{Record, Records, known_strings, natural, pool_id, stream};
use crate::error::{ErrorKind, TraceError};
use crate::model::{AllocatorSettings, Annotation, AnnotationStage, Snapshot, Trace, TraceEvent};
use crate::pickle::{Heap, Machine, Value, opcode};
use crate::recover;
use crate::source::{Input, too_much_memory};
use crate::stacks::StackId;

/// Returns the snapshot whose pickle is in `input`.
pub(crate) fn read(input: &mut Input<'_>) -> Result<Snapshot, TraceError> {
    let first = input.peek()?.first().copied();
    match first {
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
    Reader { heap, records }.snapshot(root)
}

/// The parts of a snapshot that belong to one device.
#[derive(Default)]
struct DeviceParts {
    segments: Vec<SegmentSnapshot>,
    /// The stacks of the blocks in use, by the address of the block.
    block_stacks: HashMap<DeviceAddress, StackId>,
    events: Vec<TraceEvent>,
    skipped_events: u64,
    annotations: Vec<Annotation>,
}

struct Reader {
    heap: Heap<Record>,
    records: Records,
}

impl Reader {
    fn snapshot(mut self, root: Value) -> Result<Snapshot, TraceError> {
        let (segments, traces) = match root {
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
        let settings = self.settings(self.get(root, "allocator_settings"));
        let mut devices: BTreeMap<u32, DeviceParts> = BTreeMap::new();
        self.read_segments(segments, &mut devices)?;
        self.read_traces(traces, &mut devices)?;
        self.read_annotations(self.get(root, "external_annotations"), &mut devices);
        let Reader { heap, mut records } = self;
        records.stacks.strings = heap.strings;
        let stacks = Arc::new(records.stacks);
        let mut snapshot = Snapshot::default();
        for (device, mut parts) in devices {
            parts.segments.sort_by_key(|segment| segment.address);
            let recovered =
                recover::recover(device, parts.events, &parts.segments, &parts.block_stacks)?;
            snapshot.traces.push(Trace {
                device,
                events: recovered.events,
                initial: recovered.initial,
                segments: parts.segments,
                settings: settings.clone(),
                stacks: Arc::clone(&stacks),
                annotations: parts.annotations,
                skipped_events: parts.skipped_events,
            });
        }
        Ok(snapshot)
    }

    fn read_segments(
        &mut self,
        segments: Value,
        devices: &mut BTreeMap<u32, DeviceParts>,
    ) -> Result<(), TraceError> {
        let segments = self.heap.items(segments).unwrap_or_default().to_vec();
        for (number, segment) in segments.into_iter().enumerate() {
            let in_segment = |what: &str| {
                TraceError::malformed(format!("segment {number} of the snapshot: {what}"))
            };
            let device = natural(self.get(segment, "device"))
                .and_then(|device| u32::try_from(device).ok())
                .ok_or_else(|| in_segment("`device` is not a device's number"))?;
            let parts = devices.entry(device).or_default();
            let address = natural(self.get(segment, "address"))
                .ok_or_else(|| in_segment("`address` is not a number"))?;
            let size = natural(self.get(segment, "total_size"))
                .filter(|size| address.checked_add(*size).is_some())
                .ok_or_else(|| in_segment("`total_size` is not a number of bytes"))?;
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
                is_large: kind
                    .map_or_else(|| recover::is_large(Bytes(size)), |kind| kind == "large"),
                is_expandable: self.get(segment, "is_expandable") == Value::Bool(true),
                blocks: Vec::new(),
            };
            self.read_blocks(self.get(segment, "blocks"), &mut segment_snapshot, parts)
                .map_err(|error| in_segment(&error.to_string()))?;
            parts.segments.push(segment_snapshot);
        }
        Ok(())
    }

    /// Fills in the blocks of `segment`, which must tile it.
    fn read_blocks(
        &mut self,
        blocks: Value,
        segment: &mut SegmentSnapshot,
        parts: &mut DeviceParts,
    ) -> Result<(), TraceError> {
        let mut address = segment.address;
        let mut left = segment.size;
        for block in self.heap.items(blocks).unwrap_or_default().to_vec() {
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
            if block.status != BlockStatus::Inactive && block.stack != StackId::NONE {
                parts.block_stacks.insert(address, block.stack);
            }
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

    fn read_traces(
        &mut self,
        traces: Value,
        devices: &mut BTreeMap<u32, DeviceParts>,
    ) -> Result<(), TraceError> {
        let traces = self.heap.items(traces).unwrap_or_default().to_vec();
        // From the last device to the first, so that each takes its events off the end of the list.
        for (device, trace) in traces.into_iter().enumerate().rev() {
            let device = u32::try_from(device).map_err(|_| too_much_memory())?;
            let entries = self.heap.items(trace).ok_or_else(|| {
                TraceError::malformed(format!("the trace of device {device} is not a list"))
            })?;
            if entries.is_empty() {
                continue;
            }
            let entries = entries.to_vec();
            let parts = devices.entry(device).or_default();
            let mut numbers = Vec::with_capacity(entries.len());
            for (index, entry) in entries.into_iter().enumerate() {
                match self.records.resolve(&mut self.heap, entry)? {
                    Some(Record::Event(number)) => numbers.push(number),
                    Some(Record::SkippedEvent) => parts.skipped_events += 1,
                    _ if self.get(entry, "action") != Value::None => parts.skipped_events += 1,
                    _ => {
                        let error =
                            TraceError::malformed("the entry is not a dict with an `action`");
                        return Err(error.at_event(device, index));
                    }
                }
            }
            parts.events = take_events(&mut self.records.events, &numbers);
        }
        Ok(())
    }

    fn read_annotations(&self, annotations: Value, devices: &mut BTreeMap<u32, DeviceParts>) {
        let mut names: BTreeSet<Arc<str>> = BTreeSet::new();
        for &annotation in self.heap.items(annotations).unwrap_or_default() {
            let stage = match self.heap.text(self.get(annotation, "stage")) {
                Some("START") => AnnotationStage::Start,
                Some("END") => AnnotationStage::End,
                _ => continue,
            };
            let device = natural(self.get(annotation, "device"))
                .and_then(|device| u32::try_from(device).ok());
            let (Some(device), Some(name), Value::Int(time_us)) = (
                device,
                self.heap.text(self.get(annotation, "name")),
                self.get(annotation, "time_us"),
            ) else {
                continue;
            };
            // A mark alone is no reason to list a device.
            let Some(parts) = devices.get_mut(&device) else {
                continue;
            };
            let name = match names.get(name) {
                Some(name) => Arc::clone(name),
                None => {
                    let name: Arc<str> = name.into();
                    names.insert(Arc::clone(&name));
                    name
                }
            };
            parts.annotations.push(Annotation {
                name,
                stage,
                time_us,
            });
        }
    }

    fn settings(&self, settings: Value) -> AllocatorSettings {
        let conf = self
            .heap
            .text(self.get(settings, "PYTORCH_CUDA_ALLOC_CONF"));
        let threshold = match self.get(settings, "garbage_collection_threshold") {
            Value::Float(threshold) => threshold,
            _ => 0.0,
        };
        let divisions = self
            .heap
            .pairs(self.get(settings, "roundup_power2_divisions"));
        let mut roundup_power2_divisions: Vec<(u64, u64)> = divisions
            .chunks_exact(2)
            .filter_map(|pair| Some((self.heap.text(pair[0])?.parse().ok()?, natural(pair[1])?)))
            .collect();
        roundup_power2_divisions.sort_unstable();
        AllocatorSettings {
            conf: conf.unwrap_or_default().to_owned(),
            // -1 is no limit.
            max_split_size: natural(self.get(settings, "max_split_size")).map(Bytes),
            garbage_collection_threshold: threshold,
            expandable_segments: self.get(settings, "expandable_segments") == Value::Bool(true),
            roundup_power2_divisions,
        }
    }

    /// Returns what the dict `value` has under `key`, the last if several; [`Value::None`] if
    /// nothing.
    fn get(&self, value: Value, key: &str) -> Value {
        let mut pairs = self.heap.pairs(value).chunks_exact(2).rev();
        let pair = pairs.find(|pair| self.heap.text(pair[0]) == Some(key));
        pair.map_or(Value::None, |pair| pair[1])
    }
}

/// Returns the events of these numbers. Does not copy where they are all that is left of `events`
/// and in order, as they are for one device, and copies only a tail for the last of several.
fn take_events(events: &mut Vec<TraceEvent>, numbers: &[u32]) -> Vec<TraceEvent> {
    let start = numbers.first().map_or(0, |&number| number as usize);
    let is_tail = start + numbers.len() == events.len()
        && numbers
            .iter()
            .zip(start..)
            .all(|(&number, expected)| number as usize == expected);
    match (is_tail, start) {
        (true, 0) => std::mem::take(events),
        (true, _) => events.split_off(start),
        (false, _) => numbers
            .iter()
            .map(|&number| events[number as usize])
            .collect(),
    }
}
