//! The trait that a strategy's options implement.

use super::error::ConfigError;
use super::tokens::Reader;
use crate::units::Bytes;

/// The options of a strategy, and what they decide beside it. Options that a text does not set have their defaults.
pub(crate) trait Options {
    /// Returns the options that the text sets.
    ///
    /// # Errors
    ///
    /// The first mistake: an unknown key or a rejected value.
    fn read(reader: &mut Reader<'_>) -> Result<Self, ConfigError>
    where
        Self: Sized;

    /// Returns the options that differ from their defaults, each as `key:value`.
    fn pairs(&self) -> Vec<String>;

    /// See [`Config::keeps_free_memory`](crate::Config::keeps_free_memory).
    fn keeps_free_memory(&self) -> bool {
        true
    }

    /// See [`Config::keeps_streams_apart`](crate::Config::keeps_streams_apart).
    fn keeps_streams_apart(&self) -> bool {
        true
    }

    /// See [`Config::memory_fraction`](crate::Config::memory_fraction).
    fn memory_fraction(&self) -> Option<f64> {
        None
    }

    /// See [`Config::large_page`](crate::Config::large_page).
    fn large_page(&self) -> Bytes {
        Bytes::mib(20)
    }

    /// See [`Config::retry_wait_ms`](crate::Config::retry_wait_ms).
    fn retry_wait_ms(&self) -> Option<u64> {
        None
    }

    /// Returns the fraction of the device's memory above which a request for new memory fails at once, if there
    /// is one.
    fn rejects_above(&self) -> Option<f64> {
        None
    }

    /// Returns whether memory that is freed in a graph capture may be reused in the same capture, if the graph's
    /// order allows it.
    fn reuses_in_capture(&self) -> bool {
        false
    }

    /// Returns whether new segments grow by mapping memory, if PyTorch's setting `expandable_segments` decides that.
    fn expandable_segments(&self) -> Option<bool> {
        None
    }

    /// Returns the last attempt of a request, after all cached memory was released.
    fn last_try(&self) -> LastTry {
        LastTry::FreeFirst
    }
}

/// The last attempt of a request, after all cached memory was released. The waits before it may have freed
/// blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LastTry {
    /// Search the free blocks, then call the driver.
    FreeFirst,
    /// Call the driver, then search the free blocks.
    NewFirst,
    /// Call the driver only, as PyTorch does (pytorch#189504).
    NewOnly,
}
