//! The options of `pool`.

use crate::config::error::ConfigError;
use crate::config::options::Options;
use crate::config::tokens::{self, Reader};
use crate::units::Bytes;

/// The options of `pool`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolConfig {
    /// The size of one slab (`slab_size_mb`). Default: 5 GiB. Slabs are smaller on a device that has less memory.
    pub slab_size: Bytes,
}

impl Default for PoolConfig {
    fn default() -> PoolConfig {
        PoolConfig {
            slab_size: Bytes::gib(5),
        }
    }
}

impl Options for PoolConfig {
    fn read(reader: &mut Reader<'_>) -> Result<PoolConfig, ConfigError> {
        let mut config = PoolConfig::default();
        reader.pairs("pool", &["slab_size_mb"], |key, reader| {
            match key {
                "slab_size_mb" => config.slab_size = tokens::positive_size("pool", key, reader)?,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        Ok(config)
    }

    fn pairs(&self) -> Vec<String> {
        tokens::size_pair(
            "slab_size_mb",
            self.slab_size,
            PoolConfig::default().slab_size,
        )
    }
}
