//! The reasons why leaks cannot be told from other growth.

use std::fmt;

use crate::growth::period::STEPS_MIN;

/// The reason why leaks cannot be told from other growth, and how to find out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Doubt {
    /// The recording has only this many events, which are too few.
    FewEvents(u32),
    /// The program marked only this many steps, which are too few.
    FewSteps(usize),
    /// The steps found are short and few, and show neither backward nor an optimizer. They may be layers of one
    /// pass.
    Layers,
    /// No steps were found, and memory is kept for longer than the parts that replace them.
    KeptForLong,
    /// The growing memory is copied to larger blocks, and no block accumulates.
    Copied,
    /// The growth is within a module, an optimizer or backward, and stacks do not distinguish its calls.
    Calls,
    /// So few optimizer steps made the growing memory that each may be the first of another optimizer.
    States,
}

/// How a program marks its steps.
const MARK: &str = "torch.profiler.record_function(\"ProfilerStep#1\")";

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Doubt::FewEvents(0) => f.write_str(
                "it is not known what grows: the recording has no events, but only what was held when it was made",
            ),
            Doubt::FewEvents(1) => f.write_str("it is not known what grows: 1 event is too few"),
            Doubt::FewEvents(events) => {
                write!(f, "it is not known what grows: {events} events are too few")
            }
            Doubt::FewSteps(steps) => write!(
                f,
                "{steps} {} recorded: too few to tell; record at least {STEPS_MIN}",
                if *steps == 1 { "step is" } else { "steps are" }
            ),
            Doubt::Layers => write!(
                f,
                "it is not known what leaks: what repeats may be steps, or layers of one pass; record more steps, or mark \
                 each with {MARK}"
            ),
            Doubt::KeptForLong => write!(
                f,
                "it is not known what leaks: no steps were found, and memory is kept for long, as within one step; \
                 record at least {STEPS_MIN} steps, and mark each with {MARK}"
            ),
            Doubt::Copied => write!(
                f,
                "it is not known what leaks: memory grows by being copied to larger blocks, as a key-value cache \
                 does; record until it is freed, or mark steps with {MARK}"
            ),
            Doubt::Calls => write!(
                f,
                "it is not known what leaks: memory grows within a module, an optimizer or backward, as from layer to \
                 layer, and how many calls these are is not known; record more steps, and mark each with {MARK}"
            ),
            Doubt::States => write!(
                f,
                "it is not known what leaks: what grows may be the state of several optimizers, as so few of their steps \
                 made it; record more than {STEPS_MIN} steps of each"
            ),
        }
    }
}
