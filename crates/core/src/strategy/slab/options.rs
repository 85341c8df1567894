//! The options of `slab`.

use crate::config::error::ConfigError;
use crate::config::options::Options;
use crate::config::tokens::Reader;
use crate::strategy::buddy::options::{BuddyConfig, arena_size_pair, read_arena_size};
use crate::units::Bytes;

/// The options of `slab`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlabConfig {
    /// The size of one arena of the buddy system underneath; see [`BuddyConfig::arena_size`].
    pub arena_size: Bytes,
}

impl Default for SlabConfig {
    fn default() -> SlabConfig {
        SlabConfig {
            arena_size: BuddyConfig::default().arena_size,
        }
    }
}

impl Options for SlabConfig {
    fn read(reader: &mut Reader<'_>) -> Result<SlabConfig, ConfigError> {
        let arena_size = read_arena_size("slab", reader)?;
        Ok(SlabConfig { arena_size })
    }

    fn pairs(&self) -> Vec<String> {
        arena_size_pair(self.arena_size)
    }
}
