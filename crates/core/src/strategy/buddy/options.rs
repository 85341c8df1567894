//! The options of `buddy`.

use crate::config::error::ConfigError;
use crate::config::options::Options;
use crate::config::tokens::{self, Reader};
use crate::units::Bytes;

/// The options of `buddy`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BuddyConfig {
    /// The size of one arena, `arena_size_mb`, a power of two; requests above it go to the driver on
    /// their own.
    ///
    /// 1 GiB unless set: few tensors are larger, and the last arena, which may hold one small block,
    /// then costs at most that.
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

/// Reads `arena_size_mb`, the one option of a strategy that is called `owner`.
pub(crate) fn read_arena_size(owner: &str, reader: &mut Reader<'_>) -> Result<Bytes, ConfigError> {
    let mut arena_size = BuddyConfig::default().arena_size;
    reader.pairs(owner, |key, reader| {
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

/// Returns `arena_size_mb` in the options' syntax, unless it is the default.
pub(crate) fn arena_size_pair(arena_size: Bytes) -> Vec<String> {
    tokens::size_pair(
        "arena_size_mb",
        arena_size,
        BuddyConfig::default().arena_size,
    )
}
