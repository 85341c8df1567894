//! The part of a job that made a request, as far as the program's labels and the stack show it.

use hashbrown::HashMap;
use lowtide_core::Action;
use lowtide_trace::{Frame, NoteId, StackId, Trace, TraceEvent};

use crate::callers::{Callers, is_of_optimizer};
use crate::history::Block;
use crate::labels::{Label, Labels};
use crate::owner::{Owner, operator_of, without_class};

/// The part of a job that made a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Maker {
    /// Neither shows it.
    Unknown,
    /// The program, outside of the model and the optimizer.
    Program,
    /// The code that makes a module, loads it, or moves it to the device.
    Setup,
    /// A module that runs.
    Forward,
    /// The backward pass.
    Backward,
    /// A module that runs again in the backward pass, as checkpointing does.
    Recomputation,
    /// An optimizer's step.
    Optimizer,
    /// A cache of keys and values.
    KvCache,
    /// A library that works in memory of its own, such as cuBLAS.
    Library,
}

/// Functions that run the backward pass, in compiled code.
const BACKWARD_FUNCTIONS: [&str; 2] = ["torch::autograd::Engine::", "torch::autograd::generated::"];

/// Files whose code makes modules, loads them, or moves them.
const SETUP_FILES: [&str; 2] = ["torch/serialization.py", "safetensors/torch.py"];

/// Functions that make modules, load them, or move them. `_apply` is what `Module.to` and `Module.cuda` call.
const SETUP_FUNCTIONS: [&str; 6] = [
    "__init__",
    "_apply",
    "from_pretrained",
    "load_state_dict",
    "reset_parameters",
    "register_buffer",
];

/// Functions that work in memory of their own, in compiled code. Some allocate tensors, too.
const LIBRARY_FUNCTIONS: [&str; 6] = [
    "getNewWorkspace",
    "getCUDABlasLtWorkspace",
    "getCurrentCUDABlasHandle",
    "cudnn",
    "cusolver",
    "cusparse",
];

/// The makers of a recording's requests, and when each of them made one.
#[derive(Debug)]
pub(super) struct Makers<'a> {
    trace: &'a Trace,
    labels: &'a Labels,
    by_stack: HashMap<StackId, Maker>,
    /// For each maker, the instants of its requests, ascending.
    instants: [Vec<u32>; Maker::ALL.len()],
    /// The instants at which a backward pass begins, ascending.
    passes: Vec<u32>,
    /// Whether what freed blocks is known. The stacks of lowtide's own recordings do not show it.
    pub(super) frees_are_known: bool,
}

impl Maker {
    pub(super) const ALL: [Maker; 9] = [
        Maker::Unknown,
        Maker::Program,
        Maker::Setup,
        Maker::Forward,
        Maker::Backward,
        Maker::Recomputation,
        Maker::Optimizer,
        Maker::KvCache,
        Maker::Library,
    ];

    /// Returns whether its requests show what part of the job runs. A library works for whatever runs.
    pub(super) fn runs(self) -> bool {
        !matches!(self, Maker::Library | Maker::KvCache | Maker::Unknown)
    }

    /// Returns whether it runs in the backward pass.
    pub(super) fn is_of_backward(self) -> bool {
        matches!(self, Maker::Backward | Maker::Recomputation)
    }
}

impl<'a> Makers<'a> {
    /// Returns the makers of the requests of `trace`. Linear time.
    pub(super) fn of(trace: &'a Trace, callers: &Callers, labels: &'a Labels) -> Makers<'a> {
        let mut makers = Makers {
            trace,
            labels,
            by_stack: HashMap::new(),
            instants: Default::default(),
            passes: Vec::new(),
            frees_are_known: false,
        };
        let mut was_backward = false;
        for (instant, event) in (1..).zip(&trace.events) {
            makers.by_stack.entry(event.stack).or_insert_with(|| {
                let frames: Vec<Frame<'_>> = trace.stacks.frames(event.stack).collect();
                maker(&frames, callers.is_backward(event.stack))
            });
            if event.event.action != Action::Alloc {
                makers.frees_are_known |=
                    event.event.action == Action::FreeRequested && makers.of_free(event).is_some();
                continue;
            }
            let maker = makers.of_request(event.stack, event.note);
            makers.instants[maker as usize].push(instant);
            if !maker.runs() {
                continue;
            }
            if maker.is_of_backward() && !was_backward {
                makers.passes.push(instant);
            }
            was_backward = maker.is_of_backward();
        }
        makers
    }

    /// Returns the maker of a block.
    pub(super) fn of_block(&self, block: &Block) -> Maker {
        self.of_request(block.stack, self.note_of(block))
    }

    /// Returns the number of the module that made a block; 0 if the program said none.
    pub(super) fn module_of(&self, block: &Block) -> u32 {
        let label = self.labels.of_event(self.note_of(block));
        label.map_or(0, |label| label.module)
    }

    /// Returns the note of the event that made a block. A block from before the first event has none.
    fn note_of(&self, block: &Block) -> NoteId {
        let event = block.start.checked_sub(1);
        let note = event.map(|index| self.trace.events[index as usize].note);
        note.unwrap_or_default()
    }

    /// Returns what freed a block; `None` if that is not known.
    pub(super) fn of_free(&self, free: &TraceEvent) -> Option<Maker> {
        let is_known = free.stack != StackId::NONE || self.labels.of_event(free.note).is_some();
        is_known.then(|| self.of_request(free.stack, free.note))
    }

    /// Returns what ran at an event. A stack shows libraries and caches better than a label does.
    fn of_request(&self, stack: StackId, note: NoteId) -> Maker {
        let by_stack = self.by_stack.get(&stack).copied().unwrap_or(Maker::Unknown);
        match (self.labels.of_event(note).map(labelled), by_stack) {
            (None, _) | (_, Maker::Library | Maker::KvCache) => by_stack,
            // Code that `torch.compile` compiled says nothing of its modules.
            (Some(Maker::Program), known) if known != Maker::Unknown => known,
            (Some(said), _) => said,
        }
    }

    /// Returns whether one of these makers made a request.
    pub(super) fn has(&self, maker: Maker) -> bool {
        !self.instants[maker as usize].is_empty()
    }

    /// Returns the first instant after `instant` at which a maker that `is_one` accepts made a request; `u32::MAX` if
    /// there is none. O(log n) for n requests.
    pub(super) fn next(&self, instant: u32, is_one: impl Fn(Maker) -> bool) -> u32 {
        let chosen = Maker::ALL.into_iter().filter(|&maker| is_one(maker));
        let next = |maker: Maker| {
            let instants = &self.instants[maker as usize];
            let later = instants.partition_point(|&at| at <= instant);
            instants.get(later).copied()
        };
        chosen.filter_map(next).min().unwrap_or(u32::MAX)
    }

    /// Returns the last request before `instant` by a maker that `is_one` accepts: its instant, and the maker. O(log n) for n
    /// requests.
    pub(super) fn last(
        &self,
        instant: u32,
        is_one: impl Fn(Maker) -> bool,
    ) -> Option<(u32, Maker)> {
        let chosen = Maker::ALL.into_iter().filter(|&maker| is_one(maker));
        let last = |maker: Maker| {
            let instants = &self.instants[maker as usize];
            let earlier = instants.partition_point(|&at| at < instant);
            Some((*instants.get(earlier.checked_sub(1)?)?, maker))
        };
        chosen.filter_map(last).max_by_key(|&(at, _)| at)
    }

    /// Returns the instant of the last request of the backward pass at `instant`. O(log n) for n requests.
    pub(super) fn end_of_pass(&self, instant: u32) -> u32 {
        let next = self.passes_before(instant + 1);
        let limit = self.passes.get(next).copied().unwrap_or(u32::MAX);
        let last = self.last(limit, Maker::is_of_backward);
        last.map_or(instant, |(at, _)| at)
    }

    /// Returns the number of backward passes that began before `instant`.
    pub(super) fn passes_before(&self, instant: u32) -> usize {
        self.passes.partition_point(|&pass| pass < instant)
    }
}

/// Returns what ran, by the program's own label.
fn labelled(label: &Label) -> Maker {
    match (label.phase.as_deref(), label.module > 0) {
        (Some("optimizer"), _) => Maker::Optimizer,
        (Some("backward"), false) => Maker::Backward,
        (Some("backward"), true) => Maker::Recomputation,
        (_, true) => Maker::Forward,
        (_, false) => Maker::Program,
    }
}

/// Returns the maker of the requests with these frames, innermost first.
fn maker(frames: &[Frame<'_>], is_backward: bool) -> Maker {
    if frames.is_empty() && !is_backward {
        return Maker::Unknown;
    }
    if is_of_library(frames) {
        return Maker::Library;
    }
    let any = |is_one: fn(Frame<'_>) -> bool| frames.iter().copied().any(is_one);
    let inner = frames
        .iter()
        .position(|frame| is_of_optimizer(frame) || is_forward(*frame));
    let is_in_forward = inner.is_some_and(|inner| is_forward(frames[inner]));
    match (is_backward || any(is_of_engine), is_in_forward) {
        (_, false) if inner.is_some() => Maker::Optimizer,
        (true, true) => Maker::Recomputation,
        (true, false) => Maker::Backward,
        (false, _) if is_of_kv_cache(frames) => Maker::KvCache,
        (false, true) => Maker::Forward,
        (false, false) if any(is_of_setup) => Maker::Setup,
        (false, false) => Maker::Program,
    }
}

/// Returns whether a library's function allocated memory itself. If an operator made a tensor for it, that has its own use.
fn is_of_library(frames: &[Frame<'_>]) -> bool {
    let is_one = |frame: &Frame<'_>| {
        let name = frame.name.raw();
        LIBRARY_FUNCTIONS.iter().any(|part| name.contains(part))
    };
    let makes_tensor = |frame: &Frame<'_>| {
        let name = frame.name.raw();
        let operator = operator_of(name).unwrap_or_default();
        name.starts_with("at::detail::empty") || operator.starts_with("empty")
    };
    let library = frames.iter().position(is_one);
    library.is_some_and(|library| !frames[..library].iter().any(makes_tensor))
}

fn is_of_engine(frame: Frame<'_>) -> bool {
    let name = frame.name.raw();
    BACKWARD_FUNCTIONS
        .iter()
        .any(|begin| name.starts_with(begin))
}

/// Returns whether a cache of keys and values made the request: the innermost function of the program or of a package is
/// named after one, or is in a package's file that is.
fn is_of_kv_cache(frames: &[Frame<'_>]) -> bool {
    let owners = frames.iter().map(|&frame| (frame, Owner::of(frame)));
    let mut own = owners.filter(|(_, owner)| matches!(owner, Owner::Program | Owner::Package));
    own.next().is_some_and(|(frame, owner)| {
        let file = frame.filename.raw();
        let file = file.rsplit('/').next().unwrap_or(file);
        let is_of_package = owner == Owner::Package && file.contains("cache");
        is_of_package || frame.name.raw().contains("kv_cache")
    })
}

/// Returns whether a module runs in this function: its own `forward`, or what calls a whole module.
fn is_forward(frame: Frame<'_>) -> bool {
    let (name, file) = (without_class(frame.name.raw()), frame.filename.raw());
    name == "forward" || name == "_call_impl" && file.ends_with("torch/nn/modules/module.py")
}

fn is_of_setup(frame: Frame<'_>) -> bool {
    let (name, file) = (without_class(frame.name.raw()), frame.filename.raw());
    SETUP_FUNCTIONS.contains(&name) || SETUP_FILES.iter().any(|end| file.ends_with(end))
}
