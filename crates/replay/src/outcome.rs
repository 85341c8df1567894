//! The result of a replay, or the error that ended it.

use std::fmt;

use lowtide_core::{AllocError, Bytes, Event, Stats, StrategyName};
use serde::{Serialize, Serializer};

/// The result of replaying a job with one strategy. The names of the fields are those of `lowtide replay --json`.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The strategy.
    #[serde(serialize_with = "serialize_strategy")]
    pub strategy: StrategyName,
    /// Its options, as they are written in a configuration; empty for the defaults.
    pub config: String,
    /// Whether every request was served.
    pub completed: bool,
    /// The recorded event at which the first request was refused, counted from 0.
    pub oom_at_event: Option<usize>,
    /// The message of the out-of-memory error that the program would have received then.
    #[serde(skip)]
    pub oom_message: Option<String>,
    /// Peak reserved bytes.
    #[serde(serialize_with = "serialize_bytes")]
    pub peak_reserved_bytes: Bytes,
    /// Peak allocated bytes, rounding included.
    #[serde(serialize_with = "serialize_bytes")]
    pub peak_allocated_bytes: Bytes,
    /// Peak reserved bytes over peak live bytes: 1.00 is perfect.
    pub reserved_ratio: f64,
    /// The number of segments that the driver allocated.
    pub device_allocs: u64,
    /// The number of segments that were released to the driver.
    pub device_frees: u64,
    /// The number of times memory was mapped into expandable segments.
    pub maps: u64,
    /// The number of times memory was unmapped from them.
    pub unmaps: u64,
    /// Bytes that were unmapped, to be mapped elsewhere or released.
    #[serde(serialize_with = "serialize_bytes")]
    pub remapped_bytes: Bytes,
    /// The number of requests for which cached memory had to be released first.
    pub retries: u64,
    /// The time that the driver's calls from the first event on would have taken on the card, in microseconds.
    pub driver_time_us: f64,
    /// The measured time on this machine's processor for an allocation or a free, with driver calls simulated, in
    /// nanoseconds.
    pub ns_per_op: f64,
    /// The allocator's statistics at the end, as `torch.cuda.memory_stats` has them.
    #[serde(skip)]
    pub stats: Stats,
    /// The comparison with the recorded events, if the replay verified them.
    pub verified: Option<Verified>,
    /// Bytes over time, if a timeline was requested.
    #[serde(skip)]
    pub timeline: Vec<Point>,
}

/// The comparison of a replay's events with the recorded ones.
#[derive(Clone, PartialEq, Default, Debug, Serialize)]
pub struct Verified {
    /// The number of allocations compared.
    pub compared: u64,
    /// The number of them at the recorded address.
    pub same_address: u64,
    /// The first event, of any kind, that differs.
    pub first_difference: Option<Difference>,
    /// The limit under which garbage is collected as recorded for the most events, if it had to be searched for.
    #[serde(
        skip_serializing_if = "Option::is_none",
        serialize_with = "serialize_limit"
    )]
    pub limit_bytes: Option<Bytes>,
    /// The number of pools inferred from addresses, if the recording does not name the pools. Each pool more than
    /// the job had weakens the verification: memory that PyTorch did not take is explained as another pool's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inferred_pools: Option<usize>,
}

fn serialize_strategy<S: Serializer>(name: &StrategyName, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(name.as_str())
}

fn serialize_bytes<S: Serializer>(bytes: &Bytes, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_u64(bytes.get())
}

fn serialize_limit<S: Serializer>(limit: &Option<Bytes>, out: S) -> Result<S::Ok, S::Error> {
    limit.map(Bytes::get).serialize(out)
}

/// An event that differs from the recorded one. Serialises as the sentence that [`fmt::Display`] writes.
#[derive(Clone, PartialEq, Debug)]
pub struct Difference {
    /// The recorded event's number, counted from 0. If nothing was recorded, the number of the next event.
    pub event: usize,
    /// The recorded event.
    pub recorded: Option<Event>,
    /// The replay's event.
    pub replayed: Option<Event>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let describe = |event: Event| {
            let Event {
                address, stream, ..
            } = event;
            let (what, bytes) = (event.action.name(), event.size.get());
            format!(
                "{what} of {bytes} bytes at {address} on stream {}",
                stream.0
            )
        };
        let describe = |event: Option<Event>| event.map_or_else(|| "nothing".to_owned(), describe);
        let (recorded, replayed) = (describe(self.recorded), describe(self.replayed));
        let event = self.event;
        write!(f, "event {event}: recorded {recorded}, replayed {replayed}")
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
    /// The time of that event, in microseconds since 1970; 0 if the recording does not say it.
    pub time_us: i64,
    /// The most live bytes in the part.
    pub live_bytes: Bytes,
    /// The most reserved bytes in the part.
    pub reserved_bytes: Bytes,
}

/// The reason why a replay could not continue. A job that runs out of memory is not an error.
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

    /// Returns the error with the replay's first difference, because an error after a difference may follow from
    /// it.
    pub(crate) fn after(self, difference: Option<Difference>) -> ReplayError {
        ReplayError {
            difference: difference.map(Box::new),
            ..self
        }
    }
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReplayError { event, error, .. } = self;
        write!(f, "the replay broke off at event {event}: {error}")?;
        match &self.difference {
            Some(difference) => write!(f, "; first difference: {difference}"),
            None => Ok(()),
        }
    }
}

/// No source: the message contains the allocator's error.
impl std::error::Error for ReplayError {}
