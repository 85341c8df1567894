//! The options of `buddy`.

use crate::config::error::ConfigError;
use crate::config::options::Options;
use crate::config::tokens::{self, Reader};
use crate::units::Bytes;

/// The options of `buddy`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BuddyConfig {
    /// The size of one arena (`arena_size_mb`), a power of two. A larger request gets a segment of its own.
    ///
    /// Default: 1 GiB. Few tensors are larger, and a last arena with one small block costs at most 1 GiB.
    pub arena_size: Bytes,
}

impl Default for BuddyConfig {
    fn default() -> BuddyConfig {
        BuddyConfig {
            arena_size: Bytes::gib(1),
        }
    }
}

impl Options for BuddyConfig {
    fn read(reader: &mut Reader<'_>) -> Result<BuddyConfig, ConfigError> {
        let arena_size = read_arena_size("buddy", reader)?;
        Ok(BuddyConfig { arena_size })
    }

    fn pairs(&self) -> Vec<String> {
        arena_size_pair(self.arena_size)
    }
}

/// Reads `arena_size_mb`, the only option of strategy `owner`.
pub(crate) fn read_arena_size(owner: &str, reader: &mut Reader<'_>) -> Result<Bytes, ConfigError> {
    let mut arena_size = BuddyConfig::default().arena_size;
    reader.pairs(owner, &["arena_size_mb"], |key, reader| {
        if key != "arena_size_mb" {
            return Ok(false);
        }
        arena_size = Bytes::mib(reader.mib()?);
        if arena_size.get().is_power_of_two() {
            Ok(true)
        } else {
            Err(ConfigError::new(format!(
                "{owner} option {key} has to be power of 2"
            )))
        }
    })?;
    Ok(arena_size)
}

/// Returns the `key:value` pair of `arena_size_mb`; none if it is the default.
pub(crate) fn arena_size_pair(arena_size: Bytes) -> Vec<String> {
    tokens::size_pair(
        "arena_size_mb",
        arena_size,
        BuddyConfig::default().arena_size,
    )
}
