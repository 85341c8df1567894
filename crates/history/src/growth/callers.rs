//! Which of a program's calls requests come from, as far as stacks tell.
//!
//! A forward pass runs its layers one after the other, often from the same line; backward and an optimizer's step go
//! through the parameters in the same way. What each layer keeps then looks like what each step keeps. But steps
//! return to the code that called the module or the optimizer, and layers do not.

use hashbrown::HashMap;
use lowtide_trace::{Frame, StackId, Trace};

/// The functions in which a program, a notebook's cell or a thread begins.
const ROOTS: [&str; 2] = ["<module>", "_bootstrap"];

/// The files of PyTorch whose functions call a whole module, move it, or make an optimizer's step.
const MODULE: &str = "torch/nn/modules/module.py";
const OPTIMIZERS: &str = "torch/optim/";
/// Files beside the optimizers that have none.
const NO_OPTIMIZERS: [&str; 2] = ["/lr_scheduler.py", "/swa_utils.py"];
/// The method of a module that they call. Stacks of `stacks="all"` may have it without them.
const FORWARD: &str = "forward";

/// Who asked for memory, or freed it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Caller {
    /// A thread without a program: the one in which autograd runs backward. Or nobody, where there is no stack.
    Backward,
    /// The program itself.
    Program,
    /// The program's outermost call of a module or of an optimizer, by its number.
    Call(usize),
}

/// The callers of a recording's events.
#[derive(Debug)]
pub(super) struct Callers {
    by_stack: HashMap<StackId, Caller>,
    /// The stacks in an optimizer, each with the number of its Python frames.
    optimizers: HashMap<StackId, usize>,
    /// The caller of each event.
    events: Vec<Caller>,
    /// How many of the events before each come from another than backward.
    others_before: Vec<u32>,
    /// The indices of each call's events, ascending.
    by_call: HashMap<usize, Vec<u32>>,
    /// Whether stacks tell the program from backward.
    are_known: bool,
}

impl Callers {
    /// Returns the callers of `trace`. Linear time.
    pub(super) fn of(trace: &Trace) -> Callers {
        let mut callers = Callers {
            by_stack: HashMap::new(),
            optimizers: HashMap::new(),
            events: Vec::with_capacity(trace.events.len()),
            others_before: Vec::with_capacity(trace.events.len() + 1),
            by_call: HashMap::new(),
            are_known: false,
        };
        let mut others = 0;
        let (mut calls, mut places) = (HashMap::new(), HashMap::new());
        for (index, event) in (0..).zip(&trace.events) {
            let caller = callers.by_stack.entry(event.stack).or_insert_with(|| {
                let mut frames: Vec<Frame<'_>> = trace.stacks.frames(event.stack).collect();
                frames.retain(is_python);
                frames.reverse();
                if frames.iter().any(is_of_optimizer) {
                    let next = places.len();
                    let place = *places.entry(frames.clone()).or_insert(next);
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

    /// Returns whether backward asked for it: other stacks of the recording begin in the program, and this one does not.
    pub(super) fn is_backward(&self, stack: StackId) -> bool {
        self.are_known && self.by_stack.get(&stack) == Some(&Caller::Backward)
    }

    /// Returns the number of the place in an optimizer that asked for it. Stacks that differ in compiled code alone have
    /// the same.
    pub(super) fn optimizer(&self, stack: StackId) -> Option<usize> {
        self.optimizers.get(&stack).copied()
    }

    /// Returns the least number of calls that made the requests at ascending `instants` which have this stack: calls of
    /// the outermost module or optimizer on it, or of backward. Calls with no event of another between them count as
    /// one. `None` where the stack does not tell. O(n log m) for n instants and m events.
    pub(super) fn calls(&self, stack: StackId, instants: &[u32]) -> Option<usize> {
        let caller = *self.by_stack.get(&stack)?;
        if !self.are_known || caller == Caller::Program {
            return None;
        }
        let own: &[u32] = match caller {
            Caller::Call(number) => &self.by_call[&number],
            Caller::Backward | Caller::Program => &[],
        };
        // The event at an index is the instant after it.
        let others_before = |&instant: &u32| {
            let index = instant.saturating_sub(1);
            let own = own.partition_point(|&own| own < index);
            self.others_before[index as usize] as usize - own
        };
        let mut calls: Vec<usize> = instants.iter().map(others_before).collect();
        calls.dedup();
        Some(calls.len())
    }

    /// Returns whether the program goes on to another call, or runs itself, in most of the spans between `boundaries`, or
    /// stacks do not tell. Linear time.
    pub(super) fn go_on_between(&self, boundaries: &[u32]) -> bool {
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

/// Returns who called by the Python frames of a stack, outermost first. `calls` numbers the calls.
fn caller<'t>(mut frames: Vec<Frame<'t>>, calls: &mut HashMap<Vec<Frame<'t>>, usize>) -> Caller {
    // Hooks run optimizers within backward.
    let is_called = |frame: &Frame<'_>| begins(frame) || is_of_optimizer(frame);
    if !frames.iter().any(is_called) {
        return Caller::Backward;
    }
    let is_call = |frame: &Frame<'_>| {
        frame.filename.raw().ends_with(MODULE)
            || is_of_optimizer(frame)
            || frame.name.raw() == FORWARD
    };
    let Some(outermost) = frames.iter().position(is_call) else {
        return Caller::Program;
    };
    // The lines of one call of `forward` differ, and those behind it do not.
    let is_forward = frames[outermost].name.raw() == FORWARD;
    frames.truncate(outermost + usize::from(!is_forward));
    let next = calls.len();
    Caller::Call(*calls.entry(frames).or_insert(next))
}

/// Returns whether it is a function of Python's: of compiled code, offsets differ from call to call.
fn is_python(frame: &Frame<'_>) -> bool {
    let file = frame.filename.raw();
    file.starts_with('<')
        || file
            .rsplit_once('.')
            .is_some_and(|(_, extension)| extension == "py")
}

/// Returns whether a program begins in a function.
fn begins(frame: &Frame<'_>) -> bool {
    ROOTS.contains(&frame.name.raw())
}

fn is_of_optimizer(frame: &Frame<'_>) -> bool {
    let file = frame.filename.raw();
    file.contains(OPTIMIZERS) && !NO_OPTIMIZERS.iter().any(|name| file.ends_with(name))
}
