//! What has to be known of a whole recording before any of its steps can be told.

use std::collections::HashMap;

use lowtide_core::{Action, Bytes, CachingConfig, DeviceAddress};
use lowtide_trace::Trace;

/// What one look at every event tells.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    /// The events at which blocks became free that did not at once: by the event that freed them, or,
    /// where that was before the first event, by address.
    pub(crate) completions: HashMap<usize, usize>,
    pub(crate) initial_completions: HashMap<DeviceAddress, usize>,
    /// The options it was made with.
    pub(crate) config: CachingConfig,
    /// The most bytes that were ever held from the driver.
    pub(crate) reserved_max: Bytes,
    /// Whether memory went back somewhere although no request can have asked for that.
    pub(crate) empties_cache: bool,
}

/// What passed between allocator and driver since the last request or free.
#[derive(Default)]
pub(crate) struct Traffic {
    /// How much was held when the first memory went back, if any did.
    pub(crate) reserved_before: Option<Bytes>,
    /// Bytes that came after that.
    pub(crate) came: Bytes,
    /// The events by which memory went back.
    pub(crate) releases: Vec<usize>,
    /// Whether a block became free meanwhile that was not when its program let go of it.
    pub(crate) finished: bool,
}

impl Traffic {
    /// Notes memory that came from the driver.
    pub(crate) fn add(&mut self, size: Bytes) {
        self.came += size;
    }

    /// Notes that memory went back by the event at `index`, of `reserved` bytes held.
    pub(crate) fn release(&mut self, reserved: Bytes, index: usize) {
        self.releases.push(index);
        // What came before that went to a request that had it, and still failed.
        if self.reserved_before.is_none() {
            self.reserved_before = Some(reserved);
            self.came = Bytes::ZERO;
        }
    }

    /// Returns whether something went back that the request at event `index` would have been served
    /// from: then it had not asked yet. Blocks that other streams had just finished with do not count,
    /// since PyTorch waits for those only after it has looked.
    pub(crate) fn would_have_served(
        &self,
        trace: &Trace,
        config: &CachingConfig,
        index: usize,
    ) -> bool {
        let request = trace.events.get(index).map(|recorded| recorded.event);
        let request = request.filter(|event| event.action == Action::Alloc && !self.finished);
        let splits = config.max_split_size.is_none();
        // Rounding to steps between powers of two at most doubles a size.
        let rounds = config
            .roundup_power2_divisions
            .iter()
            .any(|&steps| steps > 1);
        let factor = if rounds { 2 } else { 1 };
        request.is_some_and(|request| {
            splits
                && self.releases.iter().any(|&release| {
                    let released = trace.events[release].event;
                    let is_large = match released.action {
                        Action::SegmentUnmap => (released.size % Bytes::mib(20)).is_zero(),
                        _ => released.size > Bytes::mib(2),
                    };
                    released.stream == request.stream
                        && released.pool == request.pool
                        && is_large == (request.size > Bytes::mib(1))
                        && released.size.get() >= factor * request.size.round_up(Bytes(512)).get()
                })
        })
    }

    /// Returns what would have been held, had nothing gone back, if memory went back and came.
    pub(crate) fn needed(&self) -> Option<Bytes> {
        self.reserved_before
            .filter(|_| !self.came.is_zero())
            .map(|before| before + self.came)
    }
}

impl Survey {
    /// Looks at every event of a recording once.
    pub(crate) fn new(trace: &Trace) -> Survey {
        let segments = trace.initial.segments.iter();
        let mut reserved = segments.map(|segment| segment.size).sum();
        let mut survey = Survey {
            config: config_of(trace),
            reserved_max: reserved,
            ..Survey::default()
        };
        let mut waiting: HashMap<DeviceAddress, usize> = HashMap::new();
        let mut traffic = Traffic::default();
        let mut needed_min: Option<Bytes> = None;
        let mut index = 0;
        while let Some(recorded) = trace.events.get(index) {
            let event = recorded.event;
            match event.action {
                Action::Alloc | Action::OutOfMemory | Action::FreeRequested => {
                    let asked = event.action == Action::Alloc
                        && !traffic.would_have_served(trace, &survey.config, index);
                    let grew = traffic.needed().filter(|_| asked);
                    match grew {
                        Some(needed) => {
                            needed_min = Some(needed_min.map_or(needed, |min| min.min(needed)));
                        }
                        None => {
                            survey.empties_cache |= traffic.reserved_before.is_some()
                                && event.action != Action::OutOfMemory;
                        }
                    }
                    traffic = Traffic::default();
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    reserved += event.size;
                    survey.reserved_max = survey.reserved_max.max(reserved);
                    traffic.add(event.size);
                }
                Action::SegmentFree | Action::SegmentUnmap => {
                    traffic.release(reserved, index);
                    reserved = reserved.saturating_sub(event.size);
                }
                Action::FreeCompleted => {
                    traffic.finished = true;
                    match waiting.remove(&event.address) {
                        Some(freed) => drop(survey.completions.insert(freed, index)),
                        None => drop(survey.initial_completions.insert(event.address, index)),
                    }
                }
                Action::Snapshot | Action::SegmentPaused | Action::SegmentResumed => {}
            }
            if event.action == Action::FreeRequested {
                if is_free_at_once(trace, index) {
                    index += 1;
                } else {
                    waiting.insert(event.address, index);
                }
            }
            index += 1;
        }
        survey.empties_cache |= needed_min.is_some_and(|needed| needed <= survey.reserved_max);
        survey
    }
}

/// Returns the options that the recording was made with; where its text is none that is understood, as
/// if it had none.
pub(crate) fn config_of(trace: &Trace) -> CachingConfig {
    let config = trace.config_in_force();
    config.unwrap_or_else(|_| trace.config_without_text())
}

/// Returns whether the block that an event frees is free with the next event: then no other stream
/// used it. PyTorch writes both down under one lock.
pub(crate) fn is_free_at_once(trace: &Trace, index: usize) -> bool {
    let freed = trace.events[index].event.address;
    let next = trace.events.get(index + 1).map(|next| next.event);
    next.is_some_and(|next| next.action == Action::FreeCompleted && next.address == freed)
}
