//! Changes of the fragmentation from event to event, each distinct change stored once.

use hashbrown::HashMap;
use lowtide_core::Cause;

/// The parts of a [`Gap`](lowtide_core::Gap): live, and the causes.
pub(crate) const GAP_PARTS: usize = 1 + Cause::ALL.len();

/// Changes of a gap's parts by instant. A job repeats the same few changes.
#[derive(Debug, Default)]
pub(crate) struct GapChanges {
    /// The instants with a change, in order.
    pub(crate) instants: Vec<u32>,
    /// The number of the change at each instant.
    pub(crate) numbers: Vec<u32>,
    /// The distinct changes: how much each part grows.
    pub(crate) distinct: Vec<[i64; GAP_PARTS]>,
    known: HashMap<[i64; GAP_PARTS], u32>,
}

impl GapChanges {
    /// Adds the change at an instant, unless it is zero. Call it in the order of the instants.
    pub(crate) fn add(&mut self, instant: u32, change: [i64; GAP_PARTS]) {
        if change == [0; GAP_PARTS] {
            return;
        }
        let next = u32::try_from(self.distinct.len()).expect("fewer changes than events");
        let number = *self.known.entry(change).or_insert(next);
        if number == next {
            self.distinct.push(change);
        }
        self.instants.push(instant);
        self.numbers.push(number);
    }

    /// Drops the look-up table for further changes, which may be several times as large as the changes.
    pub(crate) fn finished(self) -> GapChanges {
        GapChanges {
            known: HashMap::new(),
            ..self
        }
    }
}
