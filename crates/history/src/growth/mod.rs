//! What grew: over the steps of one recording, and from one recording to another.

mod difference;
mod leaks;
mod line;
mod matching;
mod period;
mod sites;
mod steps;
mod trend;

pub use difference::{Difference, SiteDifference};
pub use leaks::{Growth, Leaks};
pub use sites::Site;
pub use steps::{StepSource, Steps};
pub use trend::Trend;
