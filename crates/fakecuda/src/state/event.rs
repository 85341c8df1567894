//! An event: a point in a stream or in a capture.

use super::capture::Position;
use super::stream::Marker;

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: usize,
    pub(crate) record: Record,
}

/// The last record of an event.
#[derive(Clone, Debug)]
pub(crate) enum Record {
    Never,
    InStream(Marker),
    /// Recorded in a captured stream, so there is no point in time.
    InCapture(Position),
}
