//! A simulated recording.

#![allow(dead_code, reason = "each test uses a part of this")]

pub(crate) mod changes;

use std::sync::Arc;

use lowtide_core::{Action, Bytes, DeviceAddress, Event, MempoolId, Stream};
use lowtide_trace::{
    Annotation, AnnotationStage, Frame, Note, NoteId, RecordedStr, StackId, StackTable, Trace,
    TraceEvent,
};

pub(crate) const MIB: u64 = 1 << 20;

/// Returns an event of the default pool and stream, as in a recording.
pub(crate) fn recorded(action: Action, address: u64, size: u64, stack: StackId) -> TraceEvent {
    let event = Event {
        action,
        pool: MempoolId::DEFAULT,
        address: DeviceAddress(address),
        size: Bytes(size),
        stream: Stream::DEFAULT,
    };
    TraceEvent {
        event,
        time_us: 0,
        stack,
        pool_known: true,
        note: NoteId::NONE,
    }
}

/// A job that is recorded as it runs.
pub(crate) struct Job {
    trace: Trace,
    stacks: StackTable,
    has_stacks: bool,
    next_address: u64,
    random: u64,
    /// What the program says of the events that follow.
    said: NoteId,
}

/// A block of a [`Job`].
#[derive(Clone, Copy)]
pub(crate) struct Held {
    address: u64,
    pub(crate) size: u64,
}

impl Job {
    pub(crate) fn new(has_stacks: bool) -> Job {
        let mut job = Job {
            trace: Trace::default(),
            stacks: StackTable::new(),
            has_stacks,
            next_address: 1 << 21,
            random: 1,
            said: NoteId::NONE,
        };
        job.push(Action::SegmentAlloc, 1 << 21, 1 << 45, StackId::NONE);
        job
    }

    fn push(&mut self, action: Action, address: u64, size: u64, stack: StackId) {
        let event = recorded(action, address, size, stack);
        let time_us = self.now() + 1;
        let note = self.said;
        self.trace.events.push(TraceEvent {
            time_us,
            note,
            ..event
        });
    }

    /// Sets the user metadata of the events that follow.
    pub(crate) fn say(&mut self, text: &str) {
        self.said = self.stacks.intern_note(Note {
            compile_context: None,
            user_metadata: Some(text.into()),
        });
    }

    /// Attaches a text to a block.
    pub(crate) fn annotate(&mut self, block: Held, text: &str) {
        let said = self.said;
        self.say(text);
        self.push(Action::Annotate, block.address, block.size, StackId::NONE);
        self.said = said;
    }

    /// Returns the time of the last event. Each event takes a microsecond.
    fn now(&self) -> i64 {
        i64::try_from(self.trace.events.len()).unwrap_or(i64::MAX)
    }

    /// Marks the start or end of a range.
    pub(crate) fn mark(&mut self, name: &str, stage: AnnotationStage) {
        let time_us = self.now();
        self.trace.annotations.push(Annotation {
            name: name.into(),
            stage,
            time_us,
        });
    }

    pub(crate) fn alloc(&mut self, size: u64, function: &str, line: u32) -> Held {
        let frames = [(function, "train.py", line), ("main", "train.py", 1)];
        self.alloc_in(size, &frames)
    }

    /// Allocates with a stack of functions, files and lines, innermost first.
    pub(crate) fn alloc_in(&mut self, size: u64, frames: &[(&str, &str, u32)]) -> Held {
        let frame = |&(name, filename, line)| Frame {
            name: RecordedStr::from(name),
            filename: RecordedStr::from(filename),
            line,
        };
        let stack = if self.has_stacks {
            self.stacks.intern(frames.iter().map(frame))
        } else {
            StackId::NONE
        };
        let address = self.next_address;
        self.next_address += size.next_multiple_of(512);
        self.push(Action::Alloc, address, size, stack);
        Held { address, size }
    }

    pub(crate) fn free(&mut self, block: Held) {
        self.push(
            Action::FreeRequested,
            block.address,
            block.size,
            StackId::NONE,
        );
        self.push(
            Action::FreeCompleted,
            block.address,
            block.size,
            StackId::NONE,
        );
    }

    /// Returns a pseudo-random number below `limit`, the same in each run.
    pub(crate) fn random(&mut self, limit: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 33) % limit
    }

    pub(crate) fn into_trace(mut self) -> Trace {
        self.trace.stacks = Arc::new(self.stacks);
        self.trace
    }
}
