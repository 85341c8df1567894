//! The calls that decide which bytes an address shows, and what comes after what.

use lowtide_core::{Bytes, DeviceAddress, EventHandle, Handle, Stream};

/// A call that succeeded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// The host's time at the call, in nanoseconds since the start.
    pub now_ns: u64,
    /// What was done.
    pub kind: StepKind,
}

/// What a call did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepKind {
    /// A handle was mapped.
    Map {
        /// Where.
        address: DeviceAddress,
        /// The size of the handle.
        size: Bytes,
        /// The handle.
        handle: Handle,
    },
    /// A range was unmapped.
    Unmap {
        /// Where it began.
        address: DeviceAddress,
        /// Its size.
        size: Bytes,
    },
    /// An event was recorded in a stream.
    Record {
        /// The event.
        event: EventHandle,
        /// The stream.
        stream: Stream,
    },
    /// A stream was made to wait for an event.
    Wait {
        /// The stream.
        stream: Stream,
        /// The event.
        event: EventHandle,
    },
}
