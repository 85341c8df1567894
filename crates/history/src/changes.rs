//! How the gap changes from event to event, each distinct change once.

use hashbrown::HashMap;
use lowtide_core::Cause;

/// What a gap consists of: live, and the causes.
pub(crate) const GAP_PARTS: usize = 1 + Cause::ALL.len();

/// Changes of a gap's parts by instant. A job does the same few things again and again.
#[derive(Debug, Default)]
pub(crate) struct GapChanges {
    /// The instants at which something changes, in order.
    pub(crate) instants: Vec<u32>,
    /// The number of the change at each.
    pub(crate) numbers: Vec<u32>,
    /// The distinct changes: by how much each part is more than before.
    pub(crate) distinct: Vec<[i64; GAP_PARTS]>,
    known: HashMap<[i64; GAP_PARTS], u32>,
}

impl GapChanges {
    /// Adds what changes at an instant, if anything does. To be called in the order of the instants.
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

    /// Lets go of what it takes to add more, which may be several times what there is.
    pub(crate) fn finished(self) -> GapChanges {
        GapChanges {
            known: HashMap::new(),
            ..self
        }
    }
}
