//! Memory growth: over the steps of one recording, and from one recording to another.

mod difference;
mod doubt;
mod leaks;
mod line;
mod matching;
mod period;
mod review;
mod sites;
mod steps;
mod training;
mod trend;
mod turnover;

pub use difference::{Difference, SiteDifference};
pub use doubt::Doubt;
pub use leaks::{Growth, Leaks};
pub use sites::Site;
pub(crate) use steps::instant_of;
pub use steps::{StepSource, Steps};
pub use training::TrainingState;
pub use trend::Trend;
