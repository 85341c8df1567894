//! Shared by the tests on the stand-in driver and the run on a card.

pub(crate) mod load;
pub(crate) mod program;
pub(crate) mod steps;
