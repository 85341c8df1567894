//! Writes PyTorch's snapshot format, as `_dump_snapshot` would: its viewer takes the file.

use std::io::{self, BufWriter, Write};

use hashbrown::HashMap;
use lowtide_core::{Action, Bytes, MempoolId, SegmentSnapshot};

use crate::error::{ErrorKind, TraceError};
use crate::model::{AllocatorSettings, AnnotationStage, Snapshot, Trace, TraceEvent};
use crate::parts::{BlockStacks, final_block_stacks};
use crate::pickle::{Memo, PickleWriter};
use crate::stacks::{FrameId, StackId, StackTable};

/// Writes `snapshot` as a PyTorch memory snapshot, which `torch.cuda._memory_viz` and the viewer at
/// pytorch.org/memory_viz show.
///
/// What is written reads back as the same traces. What reading leaves out is not there to be written:
/// events that it skipped (`annotate`), `internal_metadata`, `forward_frames` and the keys that FX adds
/// to frames, the call stacks of segments, what an annotation has beside its name and stage, the
/// settings that do not decide where blocks go, and host memory.
///
/// # Errors
///
/// If `out` cannot be written to, or the traces differ in their settings: a PyTorch process has one set
/// for all its devices, and so has a snapshot.
pub fn write_pickle(snapshot: &Snapshot, out: impl Write) -> Result<(), TraceError> {
    if let [first, others @ ..] = &snapshot.traces[..]
        && let Some(other) = others.iter().find(|trace| trace.settings != first.settings)
    {
        let what = format!(
            "devices {} and {} have different settings, and a snapshot has one set for all; write \
             them to one file each",
            first.device, other.device
        );
        return Err(TraceError::new(ErrorKind::Contradiction, what));
    }
    let mut writer = SnapshotWriter {
        pickle: PickleWriter::new(BufWriter::new(out))?,
        pools: HashMap::new(),
    };
    writer.snapshot(snapshot)?;
    writer.pickle.finish()?.flush()?;
    Ok(())
}

struct SnapshotWriter<W> {
    pickle: PickleWriter<W>,
    pools: HashMap<MempoolId, Memo>,
}

/// What has been written of one table of stacks.
struct StackWriter<'t> {
    table: &'t StackTable,
    stacks: HashMap<StackId, Memo>,
    frames: HashMap<FrameId, Memo>,
}

impl<'t> StackWriter<'t> {
    fn new(trace: &'t Trace) -> StackWriter<'t> {
        StackWriter {
            table: &trace.stacks,
            stacks: HashMap::new(),
            frames: HashMap::new(),
        }
    }
}

impl<W: Write> SnapshotWriter<W> {
    fn snapshot(&mut self, snapshot: &Snapshot) -> io::Result<()> {
        let mut stacks: Vec<StackWriter<'_>> =
            snapshot.traces.iter().map(StackWriter::new).collect();
        self.pickle.begin_dict()?;
        self.pickle.string("segments")?;
        self.pickle.begin_list()?;
        for (trace, stacks) in snapshot.traces.iter().zip(&mut stacks) {
            let block_stacks = final_block_stacks(trace);
            for segment in &trace.segments {
                self.segment(trace.device, segment, &block_stacks, stacks)?;
            }
        }
        self.pickle.end_list()?;
        self.pickle.string("device_traces")?;
        self.pickle.begin_list()?;
        let mut device = 0;
        for (trace, stacks) in snapshot.traces.iter().zip(&mut stacks) {
            // The position in the list is the device's number.
            while device < trace.device {
                self.pickle.begin_list()?;
                self.pickle.end_list()?;
                device += 1;
            }
            self.pickle.begin_list()?;
            for event in &trace.events {
                self.event(event, stacks)?;
            }
            self.pickle.end_list()?;
            device += 1;
        }
        self.pickle.end_list()?;
        if let Some(trace) = snapshot.traces.first() {
            self.pickle.string("allocator_settings")?;
            self.settings(&trace.settings)?;
        }
        self.pickle.string("external_annotations")?;
        self.pickle.begin_list()?;
        for trace in &snapshot.traces {
            self.annotations(trace)?;
        }
        self.pickle.end_list()?;
        self.pickle.end_dict()
    }

    fn segment(
        &mut self,
        device: u32,
        segment: &SegmentSnapshot,
        block_stacks: &BlockStacks,
        stacks: &mut StackWriter<'_>,
    ) -> io::Result<()> {
        self.pickle.begin_dict()?;
        self.natural("device", u64::from(device))?;
        self.natural("address", segment.address.get())?;
        self.bytes("total_size", segment.size)?;
        self.bytes("allocated_size", segment.allocated_bytes())?;
        self.bytes("active_size", segment.active_bytes())?;
        self.bytes("requested_size", segment.requested_bytes())?;
        self.natural("stream", segment.stream.0)?;
        self.pickle.string("segment_type")?;
        self.pickle
            .string(if segment.is_large { "large" } else { "small" })?;
        self.pickle.string("segment_pool_id")?;
        self.pool(segment.pool)?;
        self.pickle.string("is_expandable")?;
        self.pickle.boolean(segment.is_expandable)?;
        self.pickle.string("frames")?;
        self.stack(StackId::NONE, stacks)?;
        self.pickle.string("blocks")?;
        self.pickle.begin_list()?;
        for block in &segment.blocks {
            self.pickle.begin_dict()?;
            self.natural("address", block.address.get())?;
            self.bytes("size", block.size)?;
            self.bytes("requested_size", block.requested)?;
            self.pickle.string("state")?;
            self.pickle.string(block.status.name())?;
            self.pickle.string("frames")?;
            self.stack(block_stacks.stack(block), stacks)?;
            self.pickle.end_dict()?;
        }
        self.pickle.end_list()?;
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
        self.natural("stream", event.event.stream.0)?;
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
                self.pickle.string(text)?;
            }
        }
        self.pickle.end_dict()
    }

    fn settings(&mut self, settings: &AllocatorSettings) -> io::Result<()> {
        self.pickle.begin_dict()?;
        self.pickle.string("PYTORCH_CUDA_ALLOC_CONF")?;
        self.pickle.string(&settings.conf)?;
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
        self.pickle.string("roundup_power2_divisions")?;
        self.pickle.begin_dict()?;
        for &(mebibytes, steps) in &settings.roundup_power2_divisions {
            self.natural(&mebibytes.to_string(), steps)?;
        }
        self.pickle.end_dict()?;
        self.pickle.end_dict()
    }

    fn annotations(&mut self, trace: &Trace) -> io::Result<()> {
        for annotation in &trace.annotations {
            self.pickle.begin_dict()?;
            self.pickle.string("stage")?;
            self.pickle.string(match annotation.stage {
                AnnotationStage::Start => "START",
                AnnotationStage::End => "END",
            })?;
            self.pickle.string("name")?;
            self.pickle.string(&annotation.name)?;
            self.natural("device", u64::from(trace.device))?;
            self.pickle.string("time_us")?;
            self.pickle.integer(annotation.time_us)?;
            self.pickle.end_dict()?;
        }
        Ok(())
    }

    /// Writes a list of frames, from the second time on as a reference to the first.
    fn stack(&mut self, stack: StackId, stacks: &mut StackWriter<'_>) -> io::Result<()> {
        if let Some(&memo) = stacks.stacks.get(&stack) {
            return self.pickle.again(memo);
        }
        self.pickle.begin_list()?;
        for &id in stacks.table.frame_ids(stack) {
            if let Some(&memo) = stacks.frames.get(&id) {
                self.pickle.again(memo)?;
                continue;
            }
            let frame = stacks.table.frame(id);
            self.pickle.begin_dict()?;
            self.pickle.string("name")?;
            self.pickle.string(frame.name)?;
            self.pickle.string("filename")?;
            self.pickle.string(frame.filename)?;
            self.natural("line", u64::from(frame.line))?;
            self.pickle.end_dict()?;
            stacks.frames.insert(id, self.pickle.memoize()?);
        }
        self.pickle.end_list()?;
        stacks.stacks.insert(stack, self.pickle.memoize()?);
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

    fn bytes(&mut self, key: &str, value: Bytes) -> io::Result<()> {
        self.natural(key, value.get())
    }
}
