//! An event: a point in a stream, or in a capture.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::capture::Position;
use super::stream::Marker;

/// One event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: usize,
    pub(crate) has_time: bool,
    pub(crate) record: Record,
}

/// Where an event was recorded last.
#[derive(Clone, Debug)]
pub(crate) enum Record {
    Never,
    InStream {
        marker: Marker,
        time: Arc<OnceLock<Instant>>,
    },
    /// In a stream that was captured: no point in time.
    InCapture(Position),
}
