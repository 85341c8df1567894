//! The trait that a strategy's options implement.

use super::error::ConfigError;
use super::tokens::Reader;

/// The options of a strategy. Options that a text does not set have their defaults.
pub(crate) trait Options: Default {
    /// Returns the options that the text sets.
    ///
    /// # Errors
    ///
    /// The first mistake: an unknown key or a rejected value.
    fn read(reader: &mut Reader<'_>) -> Result<Self, ConfigError>;

    /// Returns the options that differ from their defaults, each as `key:value`.
    fn pairs(&self) -> Vec<String>;
}
