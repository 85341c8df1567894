//! The options of `pool`.

use crate::config::error::ConfigError;
use crate::config::options::Options;
use crate::config::tokens::{self, Reader};
use crate::units::Bytes;

/// The options of `pool`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolConfig {
    /// How much is asked of the driver at once, `slab_size_mb`: 5 GiB unless set, and less on a device
    /// that has less.
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
        reader.pairs("pool", |key, reader| {
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
