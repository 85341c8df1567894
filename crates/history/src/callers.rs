//! Identifies which of a program's calls made a request, as far as stacks show it.
//!
//! A forward pass runs its layers one after the other, often from the same line. Backward and an optimizer's step
//! visit the parameters in the same way. So the memory that each layer keeps looks like the memory that each step
//! keeps. But steps return to the code that called the module or the optimizer, and layers do not.

use hashbrown::HashMap;
use lowtide_trace::{Frame, StackId, Trace};

use crate::numbering::Numbering;
use crate::owner::{Owner, without_class};

/// The outermost functions of a program, a notebook's cell and a thread.
const ROOTS: [&str; 2] = ["<module>", "_bootstrap"];

/// The files of PyTorch whose functions call a whole module, move it, or run an optimizer's step.
const MODULE: &str = "torch/nn/modules/module.py";
const OPTIMIZERS: &str = "torch/optim/";
/// Parts of the paths of optimizers in other packages.
const OPTIMIZERS_OF_PACKAGES: [&str; 3] = ["/optim/", "/optimizers/", "/optimizer.py"];
/// Files in the directory of the optimizers that have none.
const NO_OPTIMIZERS: [&str; 2] = ["/lr_scheduler.py", "/swa_utils.py"];
/// The method of a module that those functions call. Stacks of `stacks="all"` may have it without them.
const FORWARD: &str = "forward";

/// The caller of an allocation or a free.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Caller {
    /// A thread without a program: the thread in which autograd runs backward. Also the caller of an event without
    /// a stack.
    Backward,
    /// The program itself.
    Program,
    /// The program's outermost call of a module or of an optimizer, by its number.
    Call(u32),
}

/// The callers of a recording's events.
#[derive(Debug)]
pub(crate) struct Callers {
    by_stack: HashMap<StackId, Caller>,
    /// The stacks in an optimizer, each with the number of its Python frames.
    optimizers: HashMap<StackId, u32>,
    /// The caller of each event.
    events: Vec<Caller>,
    /// For each event, the number of earlier events with a caller other than backward.
    others_before: Vec<u32>,
    /// The indices of each call's events, ascending.
    by_call: HashMap<u32, Vec<u32>>,
    /// Whether stacks distinguish the program from backward.
    are_known: bool,
}

impl Callers {
    /// Returns the callers of `trace`. Linear time.
    pub(crate) fn of(trace: &Trace) -> Callers {
        let mut callers = Callers {
            by_stack: HashMap::new(),
            optimizers: HashMap::new(),
            events: Vec::with_capacity(trace.events.len()),
            others_before: Vec::with_capacity(trace.events.len() + 1),
            by_call: HashMap::new(),
            are_known: false,
        };
        let mut others = 0;
        let (mut calls, mut places) = (Numbering::default(), Numbering::default());
        for (index, event) in (0..).zip(&trace.events) {
            let caller = callers.by_stack.entry(event.stack).or_insert_with(|| {
                let mut frames: Vec<Frame<'_>> = trace.stacks.frames(event.stack).collect();
                frames.retain(is_python);
                frames.reverse();
                if frames.iter().any(is_of_optimizer) {
                    let place = places.number(frames.clone());
                    callers.optimizers.insert(event.stack, place);
                }
                callers.are_known |= frames.iter().any(begins);
                caller(frames, &mut calls)
            });
            let caller = *caller;
            callers.others_before.push(others);
            others += u32::from(caller != Caller::Backward);
            if let Caller::Call(number) = caller {
                let own = callers.by_call.entry(number).or_default();
                own.push(index);
            }
            callers.events.push(caller);
        }
        callers.others_before.push(others);
        callers
    }

    /// Returns whether backward made a request: other stacks of the recording begin in the program, and this one
    /// does not.
    pub(crate) fn is_backward(&self, stack: StackId) -> bool {
        self.are_known && self.by_stack.get(&stack) == Some(&Caller::Backward)
    }

    /// Returns the number of the call site in an optimizer that made a request. Stacks that differ only in compiled
    /// code have the same number.
    pub(crate) fn optimizer(&self, stack: StackId) -> Option<u32> {
        self.optimizers.get(&stack).copied()
    }

    /// Returns the least number of calls that made the requests with this stack at `instants`, which ascend. The
    /// calls are those of the stack's outermost module or optimizer, or of backward. Calls without another caller's
    /// event in between count as one. Returns `None` if the stack does not show it. O(log m) for each instant and m
    /// events.
    pub(crate) fn calls(&self, stack: StackId, instants: &[u32]) -> Option<usize> {
        let caller = *self.by_stack.get(&stack)?;
        if !self.are_known || caller == Caller::Program {
            return None;
        }
        let own: &[u32] = match caller {
            Caller::Call(number) => &self.by_call[&number],
            Caller::Backward | Caller::Program => &[],
        };
        // The event at index `i` leads to instant `i + 1`.
        let others_before = |&instant: &u32| {
            let index = instant.saturating_sub(1);
            let own = own.partition_point(|&own| own < index);
            self.others_before[index as usize] as usize - own
        };
        let mut calls: Vec<usize> = instants.iter().map(others_before).collect();
        calls.dedup();
        Some(calls.len())
    }

    /// Returns whether the program makes another call, or runs itself, in most of the spans between `boundaries`.
    /// Also returns `true` if stacks do not show it. Linear time.
    pub(crate) fn go_on_between(&self, boundaries: &[u32]) -> bool {
        let goes_on = |span: &&[u32]| {
            let events = &self.events[span[0] as usize..span[1] as usize];
            let mut callers = events.iter().filter(|&&caller| caller != Caller::Backward);
            let first = callers.next();
            first == Some(&Caller::Program) || callers.any(|caller| Some(caller) != first)
        };
        let spans = boundaries.windows(2);
        !self.are_known || 2 * spans.clone().filter(goes_on).count() > spans.len()
    }
}

/// Returns the caller for the Python frames of a stack, outermost first. `calls` numbers the calls.
fn caller<'t>(mut frames: Vec<Frame<'t>>, calls: &mut Numbering<Vec<Frame<'t>>>) -> Caller {
    // Hooks run optimizers within backward.
    let is_called = |frame: &Frame<'_>| begins(frame) || is_of_optimizer(frame);
    if !frames.iter().any(is_called) {
        return Caller::Backward;
    }
    let is_call = |frame: &Frame<'_>| {
        frame.filename.raw().ends_with(MODULE)
            || is_of_optimizer(frame)
            || without_class(frame.name.raw()) == FORWARD
    };
    let Some(outermost) = frames.iter().position(is_call) else {
        return Caller::Program;
    };
    // Lines within one call of `forward` differ. The lines of its callers do not.
    let is_forward = without_class(frames[outermost].name.raw()) == FORWARD;
    frames.truncate(outermost + usize::from(!is_forward));
    Caller::Call(calls.number(frames))
}

/// Returns whether it is a Python function. The offsets of compiled code differ from call to call.
fn is_python(frame: &Frame<'_>) -> bool {
    let file = frame.filename.raw();
    file.starts_with('<') || file.ends_with(".py")
}

/// Returns whether a program begins in this function.
fn begins(frame: &Frame<'_>) -> bool {
    ROOTS.contains(&without_class(frame.name.raw()))
}

/// Returns whether a function is an optimizer's: PyTorch's, or a package's by its path.
pub(crate) fn is_of_optimizer(frame: &Frame<'_>) -> bool {
    let file = frame.filename.raw();
    let is_one = file.contains(OPTIMIZERS)
        || OPTIMIZERS_OF_PACKAGES
            .iter()
            .any(|part| file.contains(part))
            && Owner::of(*frame) == Owner::Package;
    is_one && !NO_OPTIMIZERS.iter().any(|name| file.ends_with(name))
}
