//! Writes PyTorch's snapshot format like `_dump_snapshot`, for PyTorch's viewer.

use std::io::{self, BufWriter, Write};

use hashbrown::HashMap;
use lowtide_core::{
    Action, Bytes, DeviceAddress, MempoolId, SegmentSnapshot, StrategyName, Stream,
};

use super::pauses::{Pause, Place, RegionPool, pauses_of};
use crate::block_stacks::{BlockStacks, final_block_stacks};
use crate::error::TraceError;
use crate::model::{AllocatorSettings, Annotation, AnnotationStage, Snapshot, Trace, TraceEvent};
use crate::pickle::{Memo, PickleWriter};
use crate::stacks::{FrameId, StackId, StackTable};
use crate::writable::check_writable;

/// The most items that are appended to a list at once, as in Python's own pickler.
///
/// The viewer passes them as the arguments of one call. Above some 120,000, the browser's stack overflows and
/// nothing is shown.
const ITEMS_AT_ONCE_MAX: usize = 1000;

/// PyTorch's device number for pinned host memory.
const HOST: i64 = -1;

/// Writes `snapshot` as a PyTorch memory snapshot, for `torch.cuda._memory_viz` and the viewer at
/// pytorch.org/memory_viz.
///
/// The file reads back as the same traces, except that [`Trace::missed_events`] is 0: the written segments are
/// those at the last event.
///
/// Contents that reading leaves out are not written:
/// - events whose action reading did not know,
/// - `internal_metadata`, `forward_frames`, and the keys that FX adds to frames,
/// - fields of an annotation other than its name and stage,
/// - settings that do not decide where blocks go, and `category`.
///
/// PyTorch's format has no regions and pauses. They have keys of their own, `region_pools` and `pauses`, and the
/// viewer shows a paused segment like any other. A segment gets the call stack of the event that allocated it.
/// PyTorch writes the stack with the segment's first block instead, and none once that block was split.
///
/// # Errors
///
/// If `out` cannot be written, if `snapshot` has contents that could not be read back, or if the traces differ in
/// their settings: a PyTorch process has one set of settings for all devices, and so has a snapshot.
pub fn write_pickle(snapshot: &Snapshot, out: impl Write) -> Result<(), TraceError> {
    check_writable(snapshot)?;
    if let [first, others @ ..] = &snapshot.traces[..]
        && let Some(other) = others.iter().find(|trace| trace.settings != first.settings)
    {
        let what = format!(
            "devices {} and {} have different settings, and a snapshot has one set for all; write \
             them to one file each",
            first.device, other.device
        );
        return Err(TraceError::contradiction(what));
    }
    let mut writer = SnapshotWriter::new(PickleWriter::new(BufWriter::new(out))?);
    writer.snapshot(snapshot)?;
    writer.pickle.finish()?.flush()?;
    Ok(())
}

pub(super) struct SnapshotWriter<W> {
    pickle: PickleWriter<W>,
    pools: HashMap<MempoolId, Memo>,
    /// The stacks and frames that were written, by the number of the trace whose table has them.
    stacks: HashMap<(usize, StackId), Memo>,
    frames: HashMap<(usize, FrameId), Memo>,
}

/// A table of stacks, and the number of its trace.
type Table<'t> = (usize, &'t StackTable);

impl<W: Write> SnapshotWriter<W> {
    fn new(pickle: PickleWriter<W>) -> SnapshotWriter<W> {
        SnapshotWriter {
            pickle,
            pools: HashMap::new(),
            stacks: HashMap::new(),
            frames: HashMap::new(),
        }
    }

    fn snapshot(&mut self, snapshot: &Snapshot) -> io::Result<()> {
        let traces = || snapshot.traces.iter().enumerate();
        self.pickle.begin_dict()?;
        self.key("segments")?.list()?;
        for (number, trace) in traces() {
            let table = (number, &*trace.stacks);
            self.segments(i64::from(trace.device), trace, table)?;
        }
        self.key("device_traces")?.list()?;
        self.pickle.begin_items()?;
        let mut device = 0;
        for (number, trace) in traces() {
            // A trace's position in the list is its device number.
            while device < trace.device {
                self.pickle.list()?;
                device += 1;
            }
            self.pickle.list()?;
            self.events(trace, (number, &trace.stacks))?;
            device += 1;
        }
        self.pickle.end_items()?;
        if let Some(trace) = snapshot.traces.first() {
            self.pickle.string("allocator_settings")?;
            self.settings(&trace.settings)?;
        }
        self.key("external_annotations")?.list()?;
        for trace in &snapshot.traces {
            self.append(&trace.annotations, |writer, annotation| {
                writer.annotation(trace.device, annotation)
            })?;
        }
        for (number, trace) in (snapshot.traces.len()..).zip(&snapshot.host) {
            let table = (number, &*trace.stacks);
            self.key("host_segments")?.list()?;
            self.segments(HOST, trace, table)?;
            self.key("host_traces")?.list()?;
            self.events(trace, table)?;
        }
        self.regions(&regions_of(snapshot))?;
        if snapshot.traces.iter().any(Trace::has_pauses) {
            self.key("pauses")?.list()?;
            for (number, trace) in traces() {
                let table = (number, &*trace.stacks);
                self.append(&pauses_of(trace), |writer, pause| {
                    writer.pause(trace.device, pause, table)
                })?;
            }
        }
        self.pickle.end_dict()
    }

    /// Writes the key of an entry of a dict, and returns the pickle to write its value to.
    fn key(&mut self, key: &str) -> io::Result<&mut PickleWriter<W>> {
        self.pickle.string(key)?;
        Ok(&mut self.pickle)
    }

    /// Appends the segments of `trace`, which are on `device`, to the list written last.
    fn segments(&mut self, device: i64, trace: &Trace, table: Table<'_>) -> io::Result<()> {
        let segment_stacks = segment_stacks(trace);
        let block_stacks = final_block_stacks(trace);
        self.append(&trace.segments, |writer, segment| {
            let stack = segment_stacks.get(&segment.address).copied();
            let stack = stack.unwrap_or_default();
            writer.segment(device, segment, (stack, &block_stacks), table)
        })
    }

    /// Appends the events of `trace` to the list written last.
    fn events(&mut self, trace: &Trace, table: Table<'_>) -> io::Result<()> {
        self.append(&trace.events, |writer, event| {
            // The viewer does not know pauses. They are in a list of their own.
            if event.event.action.is_pause() {
                Ok(())
            } else {
                writer.event(event, table)
            }
        })
    }

    /// Appends regions and pauses to the items of a snapshot's dict, and ends the dict. Each pause has its device;
    /// its note is in `table`.
    pub(super) fn add_regions(
        out: W,
        regions: &[RegionPool],
        pauses: &[(u32, Pause)],
        table: &StackTable,
    ) -> io::Result<()> {
        let mut writer = SnapshotWriter::new(PickleWriter::continued(out));
        writer.pickle.begin_items()?;
        writer.regions(regions)?;
        if !pauses.is_empty() {
            writer.key("pauses")?.list()?;
            writer.append(pauses, |writer, (device, pause)| {
                writer.pause(*device, pause, (0, table))
            })?;
        }
        writer.pickle.end_dict()?;
        writer.pickle.finish().map(drop)
    }

    /// Writes the pools that hold the memory of regions; nothing if there are none.
    fn regions(&mut self, regions: &[RegionPool]) -> io::Result<()> {
        if regions.is_empty() {
            return Ok(());
        }
        self.key("region_pools")?.list()?;
        self.append(regions, |writer, region| {
            writer.pickle.begin_dict()?;
            writer.key("device")?.natural(u64::from(region.device))?;
            writer.pickle.string("pool_id")?;
            writer.pool(region.pool)?;
            writer.key("tag")?.string(region.tag.raw())?;
            writer.pickle.end_dict()
        })
    }

    fn pause(&mut self, device: u32, pause: &Pause, table: Table<'_>) -> io::Result<()> {
        self.pickle.begin_dict()?;
        self.key("device")?.natural(u64::from(device))?;
        match pause.place {
            Place::BeforeFirst => self.key("entries_before")?.integer(-1)?,
            Place::After(count) => self.key("entries_before")?.natural(count as u64)?,
            Place::ByTime => {}
        }
        self.pickle.string("event")?;
        self.event(&pause.event, table)?;
        self.pickle.end_dict()
    }

    /// Appends `items` to the list written last. `write` writes each item.
    fn append<T>(
        &mut self,
        items: &[T],
        mut write: impl FnMut(&mut Self, &T) -> io::Result<()>,
    ) -> io::Result<()> {
        for items in items.chunks(ITEMS_AT_ONCE_MAX) {
            self.pickle.begin_items()?;
            for item in items {
                write(self, item)?;
            }
            self.pickle.end_items()?;
        }
        Ok(())
    }

    fn segment(
        &mut self,
        device: i64,
        segment: &SegmentSnapshot,
        (stack, block_stacks): (StackId, &BlockStacks),
        table: Table<'_>,
    ) -> io::Result<()> {
        self.pickle.begin_dict()?;
        self.key("device")?.integer(device)?;
        self.key("address")?.natural(segment.address.get())?;
        self.bytes("total_size", segment.size)?;
        self.bytes("allocated_size", segment.allocated_bytes())?;
        self.bytes("active_size", segment.active_bytes())?;
        self.bytes("requested_size", segment.requested_bytes())?;
        self.stream(segment.stream)?;
        let kind = if segment.is_large { "large" } else { "small" };
        self.key("segment_type")?.string(kind)?;
        self.pickle.string("segment_pool_id")?;
        self.pool(segment.pool)?;
        self.key("is_expandable")?.boolean(segment.is_expandable)?;
        self.stack(stack, table)?;
        self.key("blocks")?.list()?;
        self.append(&segment.blocks, |writer, block| {
            writer.pickle.begin_dict()?;
            writer.key("address")?.natural(block.address.get())?;
            writer.bytes("size", block.size)?;
            writer.bytes("requested_size", block.requested)?;
            writer.key("state")?.string(block.status.name())?;
            writer.stack(block_stacks.stack(block), table)?;
            writer.pickle.end_dict()
        })?;
        self.pickle.end_dict()
    }

    fn event(&mut self, event: &TraceEvent, table: Table<'_>) -> io::Result<()> {
        self.pickle.begin_dict()?;
        self.key("action")?.string(event.event.action.name())?;
        let address = match event.event.action {
            Action::OutOfMemory => "device_free",
            _ => "addr",
        };
        self.key(address)?.natural(event.event.address.get())?;
        self.bytes("size", event.event.size)?;
        self.stream(event.event.stream)?;
        self.key("time_us")?.integer(event.time_us)?;
        if let Some(pool) = event.pool() {
            self.pickle.string("pool_id")?;
            self.pool(pool)?;
        }
        if event.stack != StackId::NONE {
            self.stack(event.stack, table)?;
        }
        let note = table.1.note(event.note);
        let texts = [
            ("compile_context", note.compile_context),
            ("user_metadata", note.user_metadata),
        ];
        for (key, text) in texts {
            if let Some(text) = text {
                self.key(key)?.string(text.raw())?;
            }
        }
        self.pickle.end_dict()
    }

    fn settings(&mut self, settings: &AllocatorSettings) -> io::Result<()> {
        self.pickle.begin_dict()?;
        // As PyTorch's snapshots under lowtide have it.
        let conf = match settings.strategy_name() {
            None | Some(StrategyName::Caching) => &settings.conf,
            Some(_) => &settings.strategy,
        };
        self.key("PYTORCH_CUDA_ALLOC_CONF")?.string(conf.raw())?;
        match settings.max_split_size {
            Some(Some(size)) => self.bytes("max_split_size", size)?,
            Some(None) => self.key("max_split_size")?.integer(-1)?,
            None => {}
        }
        if let Some(threshold) = settings.garbage_collection_threshold {
            self.key("garbage_collection_threshold")?.float(threshold)?;
        }
        if let Some(is_on) = settings.expandable_segments {
            self.key("expandable_segments")?.boolean(is_on)?;
        }
        // lowtide's own key: without it, the file would not show PyTorch's release.
        if let Some(order) = settings.free_block_order {
            self.key("free_block_order")?.string(order.name())?;
        }
        self.pickle.string("roundup_power2_divisions")?;
        self.pickle.begin_dict()?;
        for &(mebibytes, steps) in &settings.roundup_power2_divisions {
            self.key(&mebibytes.to_string())?.natural(steps)?;
        }
        self.pickle.end_dict()?;
        self.pickle.end_dict()
    }

    fn annotation(&mut self, device: u32, annotation: &Annotation) -> io::Result<()> {
        self.pickle.begin_dict()?;
        self.key("stage")?.string(match annotation.stage {
            AnnotationStage::Start => "START",
            AnnotationStage::End => "END",
        })?;
        self.key("name")?.string(annotation.name.raw())?;
        self.key("device")?.natural(u64::from(device))?;
        self.key("time_us")?.integer(annotation.time_us)?;
        self.pickle.end_dict()
    }

    /// Writes the entry for a list of frames. From the second time on, writes a reference to the first list.
    fn stack(&mut self, stack: StackId, table: Table<'_>) -> io::Result<()> {
        self.pickle.string("frames")?;
        let (number, stacks) = table;
        if let Some(&memo) = self.stacks.get(&(number, stack)) {
            return self.pickle.again(memo);
        }
        self.pickle.list()?;
        self.append(stacks.frame_ids(stack), |writer, &frame| {
            writer.frame(frame, table)
        })?;
        let memo = self.pickle.memoize()?;
        self.stacks.insert((number, stack), memo);
        Ok(())
    }

    fn frame(&mut self, id: FrameId, (number, stacks): Table<'_>) -> io::Result<()> {
        if let Some(&memo) = self.frames.get(&(number, id)) {
            return self.pickle.again(memo);
        }
        let frame = stacks.frame(id);
        self.pickle.begin_dict()?;
        self.key("name")?.string(frame.name.raw())?;
        self.key("filename")?.string(frame.filename.raw())?;
        self.key("line")?.natural(u64::from(frame.line))?;
        self.pickle.end_dict()?;
        let memo = self.pickle.memoize()?;
        self.frames.insert((number, id), memo);
        Ok(())
    }

    fn pool(&mut self, pool: MempoolId) -> io::Result<()> {
        if let Some(&memo) = self.pools.get(&pool) {
            return self.pickle.again(memo);
        }
        self.pickle.natural(pool.0)?;
        self.pickle.natural(pool.1)?;
        self.pickle.pair()?;
        self.pools.insert(pool, self.pickle.memoize()?);
        Ok(())
    }

    /// A stream is a pointer. PyTorch writes it as a signed number.
    fn stream(&mut self, stream: Stream) -> io::Result<()> {
        self.key("stream")?.integer(stream.0.cast_signed())
    }

    fn bytes(&mut self, key: &str, value: Bytes) -> io::Result<()> {
        self.key(key)?.natural(value.get())
    }
}

/// Returns the pools that hold the memory of regions.
fn regions_of(snapshot: &Snapshot) -> Vec<RegionPool> {
    let traces = snapshot.traces.iter();
    let regions = traces.flat_map(|trace| {
        let regions = trace.regions.iter();
        regions.map(|(&pool, tag)| RegionPool {
            device: trace.device,
            pool,
            tag: tag.clone(),
        })
    });
    regions.collect()
}

/// Returns the call stacks that allocated the segments of `trace`, by address, also of segments freed since. As in
/// PyTorch, a range of an expandable segment has no stack, because several calls mapped it. Linear in the events.
fn segment_stacks(trace: &Trace) -> HashMap<DeviceAddress, StackId> {
    let events = trace.events.iter();
    events
        .filter(|event| event.event.action == Action::SegmentAlloc)
        .map(|event| (event.event.address, event.stack))
        .collect()
}
