//! What is asked of a strategy's options.

use super::error::ConfigError;
use super::tokens::Reader;

/// The options of a strategy. Whatever a text does not set has its default.
pub(crate) trait Options: Default {
    /// Returns the options that the text sets.
    ///
    /// # Errors
    ///
    /// The first thing wrong: an unknown key, or a value that is refused.
    fn read(reader: &mut Reader<'_>) -> Result<Self, ConfigError>;

    /// Returns the options that differ from their defaults, each as `key:value`.
    fn pairs(&self) -> Vec<String>;
}
