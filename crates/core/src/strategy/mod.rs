//! The strategies: policies that decide which bytes serve a request, and the traits that they implement.
//!
//! A strategy decides, but does not count or retry. [`Heap`](crate::segment::Heap) has the blocks, segments,
//! statistics and events. The order of attempts is the same for all
//! ([`Device::serve_miss`](crate::Device::serve_miss)).
#![expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]

mod active;
mod bfc;
mod bit_set;
mod buddy;
mod caching;
mod contract;
mod direct;
mod free_blocks;
mod pool;
mod recent_blocks;
mod shared_segment;
mod slab;
mod tide;

#[cfg(test)]
pub(crate) mod test_driver;

pub(crate) use active::ActiveStrategy;
pub use caching::FreeBlockOrder;
pub use contract::Request;
pub(crate) use contract::{
    CheckpointBlock, Configured, Placement, PyTorchPlacement, Release, Strategy,
};

/// Passes the list of strategies, the simplest first, to the macro `$generate`, after `$arguments`.
///
/// A line has the strategy's module, which is also its name on the command line; its variant in
/// [`Config`](crate::Config); the type of its options; and the type that implements [`Configured`]. The comment
/// above it documents the variant.
macro_rules! strategies {
    ($generate:ident $($arguments:tt)*) => {
        $generate! {
            $($arguments)*
            /// One driver allocation per request.
            direct: Direct(DirectConfig, Direct);
            /// Free lists by exact size.
            pool: Pool(PoolConfig, PoolStrategy);
            /// Powers of two, split and merged.
            buddy: Buddy(BuddyConfig, Buddy);
            /// Size classes on top of buddy.
            slab: Slab(SlabConfig, Slabs);
            /// TensorFlow's best fit with coalescing.
            bfc: Bfc(BfcConfig, Bfc);
            /// PyTorch's caching allocator.
            caching: Caching(CachingConfig, Caching);
            /// Frames that follow the blocks: what the job holds and no more.
            tide: Tide(TideConfig, Tide);
        }
    };
}
pub(crate) use strategies;

/// Re-exports the options of every strategy.
macro_rules! export_options {
    ($($(#[$doc:meta])* $module:ident: $variant:ident($options:ident, $strategy:ident);)*) => {
        pub(crate) mod options {
            $(pub use $crate::strategy::$module::$options;)*
        }
    };
}
strategies!(export_options);
