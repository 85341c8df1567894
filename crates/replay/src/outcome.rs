//! What a replay found, or why it broke off.

use std::fmt;

use lowtide_core::{AllocError, Bytes, Event, Stats, StrategyName};
use serde::{Serialize, Serializer};

/// What became of a job under one strategy.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The strategy.
    pub strategy: StrategyName,
    /// Its options, as they are written; empty for the defaults.
    pub config: String,
    /// Whether every request was served.
    pub completed: bool,
    /// The recorded event at which the first request was refused, counted from 0.
    pub oom_at_event: Option<usize>,
    /// What the program would have been told then.
    pub oom_message: Option<String>,
    /// The most bytes held from the driver at once.
    pub peak_reserved_bytes: Bytes,
    /// The most bytes in blocks that the program held at once, rounding included.
    pub peak_allocated_bytes: Bytes,
    /// Peak reserved bytes over peak live bytes: 1.00 is perfect.
    pub reserved_ratio: f64,
    /// Segments that the driver allocated.
    pub device_allocs: u64,
    /// Segments that went back to the driver.
    pub device_frees: u64,
    /// How often memory was mapped into expandable segments.
    pub maps: u64,
    /// How often memory was unmapped from them.
    pub unmaps: u64,
    /// Bytes that were unmapped, to be mapped elsewhere or given back.
    pub remapped_bytes: Bytes,
    /// Requests for which cached memory had to go back first.
    pub retries: u64,
    /// What the driver's calls would have taken on the card, in microseconds.
    pub driver_time_us: f64,
    /// Measured time on this machine's processor for an allocation or a free, driver calls simulated,
    /// in nanoseconds.
    pub ns_per_op: f64,
    /// The allocator's figures at the end, those of `torch.cuda.memory_stats`.
    pub stats: Stats,
    /// How the events compare with the recorded ones, where that was asked for.
    pub verified: Option<Verified>,
    /// Bytes over time, where that was asked for.
    pub timeline: Vec<Point>,
}

/// How a replay's events compare with the recorded ones.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Verified {
    /// Allocations compared.
    pub compared: u64,
    /// How many of them were at the recorded address.
    pub same_address: u64,
    /// The first event, of any kind, that differs.
    pub first_difference: Option<Difference>,
    /// The limit under which garbage is collected as recorded, or for longest, where it had to be searched for.
    #[serde(
        skip_serializing_if = "Option::is_none",
        serialize_with = "serialize_bytes"
    )]
    pub limit_bytes: Option<Bytes>,
    /// How many pools the recorded addresses tell apart, where the recording does not say them. Each more than the job
    /// had makes a verification weaker: memory that PyTorch passed over is taken for another pool's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inferred_pools: Option<usize>,
}

fn serialize_bytes<S: Serializer>(bytes: &Option<Bytes>, serializer: S) -> Result<S::Ok, S::Error> {
    bytes.map(Bytes::get).serialize(serializer)
}

/// An event that is not the recorded one. Serialises as the sentence that [`fmt::Display`] writes.
#[derive(Clone, PartialEq, Debug)]
pub struct Difference {
    /// The recorded event's number, counted from 0; where one side has none, of the next.
    pub event: usize,
    /// What was recorded.
    pub recorded: Option<Event>,
    /// What happened here.
    pub replayed: Option<Event>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let describe = |event: Option<Event>| match event {
            Some(Event {
                action,
                address,
                size,
                stream,
                ..
            }) => {
                format!(
                    "{} of {} bytes at {address} on stream {}",
                    action.name(),
                    size.get(),
                    stream.0
                )
            }
            None => "nothing".to_owned(),
        };
        let (recorded, replayed) = (describe(self.recorded), describe(self.replayed));
        write!(
            f,
            "event {}: recorded {recorded}, replayed {replayed}",
            self.event
        )
    }
}

impl Serialize for Difference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The most bytes during a part of a replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Point {
    /// The recorded event that ends the part, counted from 0.
    pub event: usize,
    /// When it was recorded, in microseconds since 1970; 0 where the recording does not say.
    pub time_us: i64,
    /// The most live bytes in the part.
    pub live_bytes: Bytes,
    /// The most bytes held from the driver in it.
    pub reserved_bytes: Bytes,
}

/// Why a replay could not go on. A job that does not fit is no error.
#[derive(Clone, PartialEq, Debug)]
pub struct ReplayError {
    event: usize,
    error: AllocError,
    /// The first difference to the recording before that event, if there is one.
    difference: Option<Box<Difference>>,
}

impl ReplayError {
    pub(crate) fn at(event: usize, error: AllocError) -> ReplayError {
        ReplayError {
            event,
            error,
            difference: None,
        }
    }

    /// Returns the error with the replay's first difference: what follows a difference is of the replay's own making.
    pub(crate) fn after(self, difference: Option<Difference>) -> ReplayError {
        ReplayError {
            difference: difference.map(Box::new),
            ..self
        }
    }
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the replay broke off at event {}: {}",
            self.event, self.error
        )?;
        match &self.difference {
            Some(difference) => write!(f, "; first difference: {difference}"),
            None => Ok(()),
        }
    }
}

/// Without a source: the sentence says what the allocator said.
impl std::error::Error for ReplayError {}
