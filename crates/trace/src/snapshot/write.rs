//! Writes PyTorch's snapshot format like `_dump_snapshot`, for PyTorch's viewer.

use std::io::{self, BufWriter, Write};

use hashbrown::HashMap;
use lowtide_core::{
    Action, BlockSnapshot, Bytes, DeviceAddress, MempoolId, SegmentSnapshot, Stream,
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
/// - events that reading skipped (`annotate`),
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
    let mut writer = SnapshotWriter {
        pickle: PickleWriter::new(BufWriter::new(out))?,
        pools: HashMap::new(),
    };
    writer.snapshot(snapshot)?;
    writer.pickle.finish()?.flush()?;
    Ok(())
}

pub(super) struct SnapshotWriter<W> {
    pickle: PickleWriter<W>,
    pools: HashMap<MempoolId, Memo>,
}

/// The parts of one table of stacks that were written.
struct StackWriter<'t> {
    table: &'t StackTable,
    stacks: HashMap<StackId, Memo>,
    frames: HashMap<FrameId, Memo>,
}

impl<'t> StackWriter<'t> {
    fn new(table: &'t StackTable) -> StackWriter<'t> {
        StackWriter {
            table,
            stacks: HashMap::new(),
            frames: HashMap::new(),
        }
    }
}

impl<W: Write> SnapshotWriter<W> {
    fn snapshot(&mut self, snapshot: &Snapshot) -> io::Result<()> {
        let tables = snapshot.traces.iter().map(|trace| &*trace.stacks);
        let mut stacks: Vec<StackWriter<'_>> = tables.map(StackWriter::new).collect();
        self.pickle.begin_dict()?;
        self.pickle.string("segments")?;
        self.pickle.list()?;
        for (trace, stacks) in snapshot.traces.iter().zip(&mut stacks) {
            self.segments(i64::from(trace.device), trace, stacks)?;
        }
        self.pickle.string("device_traces")?;
        self.pickle.list()?;
        self.pickle.begin_items()?;
        let mut device = 0;
        for (trace, stacks) in snapshot.traces.iter().zip(&mut stacks) {
            // A trace's position in the list is its device number.
            while device < trace.device {
                self.pickle.list()?;
                device += 1;
            }
            self.pickle.list()?;
            self.events(trace, stacks)?;
            device += 1;
        }
        self.pickle.end_items()?;
        if let Some(trace) = snapshot.traces.first() {
            self.pickle.string("allocator_settings")?;
            self.settings(&trace.settings)?;
        }
        self.pickle.string("external_annotations")?;
        self.pickle.list()?;
        for trace in &snapshot.traces {
            self.append(&trace.annotations, |writer, annotation| {
                writer.annotation(trace.device, annotation)
            })?;
        }
        for trace in &snapshot.host {
            let mut stacks = StackWriter::new(&trace.stacks);
            self.pickle.string("host_segments")?;
            self.pickle.list()?;
            self.segments(HOST, trace, &mut stacks)?;
            self.pickle.string("host_traces")?;
            self.pickle.list()?;
            self.events(trace, &mut stacks)?;
        }
        self.regions(&regions_of(snapshot))?;
        let pauses: Vec<Vec<Pause>> = snapshot.traces.iter().map(pauses_of).collect();
        if pauses.iter().any(|pauses| !pauses.is_empty()) {
            self.pickle.string("pauses")?;
            self.pickle.list()?;
            for ((trace, pauses), stacks) in snapshot.traces.iter().zip(&pauses).zip(&mut stacks) {
                self.append(pauses, |writer, pause| {
                    writer.pause(trace.device, pause, stacks)
                })?;
            }
        }
        self.pickle.end_dict()
    }

    /// Appends the segments of `trace`, which are on `device`, to the list written last.
    fn segments(
        &mut self,
        device: i64,
        trace: &Trace,
        stacks: &mut StackWriter<'_>,
    ) -> io::Result<()> {
        let segment_stacks = segment_stacks(trace);
        let block_stacks = final_block_stacks(trace);
        self.append(&trace.segments, |writer, segment| {
            let stack = segment_stacks.get(&segment.address).copied();
            let stack = stack.unwrap_or_default();
            writer.segment(device, segment, stack, &block_stacks, stacks)
        })
    }

    /// Appends the events of `trace` to the list written last.
    fn events(&mut self, trace: &Trace, stacks: &mut StackWriter<'_>) -> io::Result<()> {
        self.append(&trace.events, |writer, event| {
            // The viewer does not know pauses. They are in a list of their own.
            if event.event.action.is_pause() {
                Ok(())
            } else {
                writer.event(event, stacks)
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
        let mut writer = SnapshotWriter {
            pickle: PickleWriter::continued(out),
            pools: HashMap::new(),
        };
        let mut stacks = StackWriter::new(table);
        writer.pickle.begin_items()?;
        writer.regions(regions)?;
        if !pauses.is_empty() {
            writer.pickle.string("pauses")?;
            writer.pickle.list()?;
            writer.append(pauses, |writer, (device, pause)| {
                writer.pause(*device, pause, &mut stacks)
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
        self.pickle.string("region_pools")?;
        self.pickle.list()?;
        self.append(regions, |writer, region| {
            writer.pickle.begin_dict()?;
            writer.natural("device", u64::from(region.device))?;
            writer.pickle.string("pool_id")?;
            writer.pool(region.pool)?;
            writer.pickle.string("tag")?;
            writer.pickle.string(region.tag.raw())?;
            writer.pickle.end_dict()
        })
    }

    fn pause(
        &mut self,
        device: u32,
        pause: &Pause,
        stacks: &mut StackWriter<'_>,
    ) -> io::Result<()> {
        self.pickle.begin_dict()?;
        self.natural("device", u64::from(device))?;
        if !matches!(pause.place, Place::ByTime) {
            self.pickle.string("entries_before")?;
        }
        match pause.place {
            Place::BeforeFirst => self.pickle.integer(-1)?,
            Place::After(count) => self.pickle.natural(count as u64)?,
            Place::ByTime => {}
        }
        self.pickle.string("event")?;
        self.event(&pause.event, stacks)?;
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
        stack: StackId,
        block_stacks: &BlockStacks,
        stacks: &mut StackWriter<'_>,
    ) -> io::Result<()> {
        self.pickle.begin_dict()?;
        self.pickle.string("device")?;
        self.pickle.integer(device)?;
        self.natural("address", segment.address.get())?;
        self.bytes("total_size", segment.size)?;
        self.bytes("allocated_size", segment.allocated_bytes())?;
        self.bytes("active_size", segment.active_bytes())?;
        self.bytes("requested_size", segment.requested_bytes())?;
        self.stream(segment.stream)?;
        self.pickle.string("segment_type")?;
        self.pickle
            .string(if segment.is_large { "large" } else { "small" })?;
        self.pickle.string("segment_pool_id")?;
        self.pool(segment.pool)?;
        self.pickle.string("is_expandable")?;
        self.pickle.boolean(segment.is_expandable)?;
        self.pickle.string("frames")?;
        self.stack(stack, stacks)?;
        self.pickle.string("blocks")?;
        self.pickle.list()?;
        self.append(&segment.blocks, |writer, block| {
            writer.block(block, block_stacks.stack(block), stacks)
        })?;
        self.pickle.end_dict()
    }

    fn block(
        &mut self,
        block: &BlockSnapshot,
        stack: StackId,
        stacks: &mut StackWriter<'_>,
    ) -> io::Result<()> {
        self.pickle.begin_dict()?;
        self.natural("address", block.address.get())?;
        self.bytes("size", block.size)?;
        self.bytes("requested_size", block.requested)?;
        self.pickle.string("state")?;
        self.pickle.string(block.status.name())?;
        self.pickle.string("frames")?;
        self.stack(stack, stacks)?;
        self.pickle.end_dict()
    }

    fn event(&mut self, event: &TraceEvent, stacks: &mut StackWriter<'_>) -> io::Result<()> {
        self.pickle.begin_dict()?;
        self.pickle.string("action")?;
        self.pickle.string(event.event.action.name())?;
        let address = match event.event.action {
            Action::OutOfMemory => "device_free",
            _ => "addr",
        };
        self.natural(address, event.event.address.get())?;
        self.bytes("size", event.event.size)?;
        self.stream(event.event.stream)?;
        self.pickle.string("time_us")?;
        self.pickle.integer(event.time_us)?;
        if let Some(pool) = event.pool() {
            self.pickle.string("pool_id")?;
            self.pool(pool)?;
        }
        if event.stack != StackId::NONE {
            self.pickle.string("frames")?;
            self.stack(event.stack, stacks)?;
        }
        let note = stacks.table.note(event.note);
        let texts = [
            ("compile_context", note.compile_context),
            ("user_metadata", note.user_metadata),
        ];
        for (key, text) in texts {
            if let Some(text) = text {
                self.pickle.string(key)?;
                self.pickle.string(text.raw())?;
            }
        }
        self.pickle.end_dict()
    }

    fn settings(&mut self, settings: &AllocatorSettings) -> io::Result<()> {
        self.pickle.begin_dict()?;
        self.pickle.string("PYTORCH_CUDA_ALLOC_CONF")?;
        self.pickle.string(settings.conf.raw())?;
        if let Some(size) = settings.max_split_size {
            self.pickle.string("max_split_size")?;
            match size {
                Some(size) => self.pickle.natural(size.get())?,
                None => self.pickle.integer(-1)?,
            }
        }
        if let Some(threshold) = settings.garbage_collection_threshold {
            self.pickle.string("garbage_collection_threshold")?;
            self.pickle.float(threshold)?;
        }
        if let Some(is_on) = settings.expandable_segments {
            self.pickle.string("expandable_segments")?;
            self.pickle.boolean(is_on)?;
        }
        // lowtide's own key: without it, the file would not show PyTorch's release.
        if let Some(order) = settings.free_block_order {
            self.pickle.string("free_block_order")?;
            self.pickle.string(order.name())?;
        }
        self.pickle.string("roundup_power2_divisions")?;
        self.pickle.begin_dict()?;
        for &(mebibytes, steps) in &settings.roundup_power2_divisions {
            self.natural(&mebibytes.to_string(), steps)?;
        }
        self.pickle.end_dict()?;
        self.pickle.end_dict()
    }

    fn annotation(&mut self, device: u32, annotation: &Annotation) -> io::Result<()> {
        self.pickle.begin_dict()?;
        self.pickle.string("stage")?;
        self.pickle.string(match annotation.stage {
            AnnotationStage::Start => "START",
            AnnotationStage::End => "END",
        })?;
        self.pickle.string("name")?;
        self.pickle.string(annotation.name.raw())?;
        self.natural("device", u64::from(device))?;
        self.pickle.string("time_us")?;
        self.pickle.integer(annotation.time_us)?;
        self.pickle.end_dict()
    }

    /// Writes a list of frames. From the second time on, writes a reference to the first.
    fn stack(&mut self, stack: StackId, stacks: &mut StackWriter<'_>) -> io::Result<()> {
        if let Some(&memo) = stacks.stacks.get(&stack) {
            return self.pickle.again(memo);
        }
        self.pickle.list()?;
        let table = stacks.table;
        self.append(table.frame_ids(stack), |writer, &frame| {
            writer.frame(frame, stacks)
        })?;
        stacks.stacks.insert(stack, self.pickle.memoize()?);
        Ok(())
    }

    fn frame(&mut self, id: FrameId, stacks: &mut StackWriter<'_>) -> io::Result<()> {
        if let Some(&memo) = stacks.frames.get(&id) {
            return self.pickle.again(memo);
        }
        let frame = stacks.table.frame(id);
        self.pickle.begin_dict()?;
        self.pickle.string("name")?;
        self.pickle.string(frame.name.raw())?;
        self.pickle.string("filename")?;
        self.pickle.string(frame.filename.raw())?;
        self.natural("line", u64::from(frame.line))?;
        self.pickle.end_dict()?;
        stacks.frames.insert(id, self.pickle.memoize()?);
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

    fn natural(&mut self, key: &str, value: u64) -> io::Result<()> {
        self.pickle.string(key)?;
        self.pickle.natural(value)
    }

    /// A stream is a pointer. PyTorch writes it as a signed number.
    fn stream(&mut self, stream: Stream) -> io::Result<()> {
        self.pickle.string("stream")?;
        self.pickle.integer(stream.0.cast_signed())
    }

    fn bytes(&mut self, key: &str, value: Bytes) -> io::Result<()> {
        self.natural(key, value.get())
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
