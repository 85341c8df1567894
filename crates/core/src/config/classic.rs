//! The options of the strategies that come from elsewhere than PyTorch.

use super::error::ConfigError;
use super::tokens::Reader;
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

impl PoolConfig {
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<PoolConfig, ConfigError> {
        let mut config = PoolConfig::default();
        reader.pairs("pool", |key, reader| {
            match key {
                "slab_size_mb" => config.slab_size = positive_size("pool", key, reader)?,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        Ok(config)
    }

    pub(super) fn pairs(&self) -> Vec<String> {
        size_pair(
            "slab_size_mb",
            self.slab_size,
            PoolConfig::default().slab_size,
        )
    }
}

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

impl BuddyConfig {
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<BuddyConfig, ConfigError> {
        let arena_size = read_arena_size("buddy", reader)?;
        Ok(BuddyConfig { arena_size })
    }

    pub(super) fn pairs(&self) -> Vec<String> {
        arena_size_pair(self.arena_size)
    }
}

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

impl SlabConfig {
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<SlabConfig, ConfigError> {
        let arena_size = read_arena_size("slab", reader)?;
        Ok(SlabConfig { arena_size })
    }

    pub(super) fn pairs(&self) -> Vec<String> {
        arena_size_pair(self.arena_size)
    }
}

/// The options of `bfc`, named and set as TensorFlow's GPU allocator has them, but for
/// [`BfcConfig::allow_growth`].
#[derive(Clone, PartialEq, Debug)]
pub struct BfcConfig {
    /// Whether regions are asked of the driver as they are needed, each twice the one before, instead
    /// of all memory at the start. True unless set: TensorFlow's own default takes the whole card.
    pub allow_growth: bool,
    /// The first region's size when regions grow, `initial_region_mb`: 2 MiB unless set.
    pub initial_region_size: Bytes,
    /// Whether a request that does not fit waits for memory to be freed before it fails.
    pub allow_retry_on_failure: bool,
    /// How long it waits, in milliseconds: 10,000 unless set.
    pub retry_ms: u64,
    /// Whether regions without a live block go back to the driver before a request fails.
    pub garbage_collection: bool,
    /// How much of the memory limit may be lost to chunks larger than their request, in [0.0, 1.0];
    /// 0.0: 128 MiB in each chunk, TensorFlow's fixed bound.
    pub fragmentation_fraction: f64,
    /// How many frees the device is behind the program, `safe_frontier_lag`: a chunk is merged with its neighbours once
    /// so many more were freed, or before a request fails. None unless set: chunks are merged at once. TensorFlow's
    /// safe frontier, by the count of frees in place of the device's own.
    pub safe_frontier_lag: Option<u64>,
}

impl Default for BfcConfig {
    fn default() -> BfcConfig {
        BfcConfig {
            allow_growth: true,
            initial_region_size: Bytes::mib(2),
            allow_retry_on_failure: true,
            retry_ms: 10_000,
            garbage_collection: true,
            fragmentation_fraction: 0.0,
            safe_frontier_lag: None,
        }
    }
}

impl BfcConfig {
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<BfcConfig, ConfigError> {
        let mut config = BfcConfig::default();
        reader.pairs("bfc", |key, reader| {
            match key {
                "allow_growth" => config.allow_growth = reader.boolean()?,
                "initial_region_mb" => {
                    config.initial_region_size = positive_size("bfc", key, reader)?;
                }
                "allow_retry_on_failure" => config.allow_retry_on_failure = reader.boolean()?,
                "retry_ms" => config.retry_ms = reader.number()?,
                "garbage_collection" => config.garbage_collection = reader.boolean()?,
                "fragmentation_fraction" => {
                    config.fragmentation_fraction = reader.decimal()?;
                    if !(0.0..=1.0).contains(&config.fragmentation_fraction) {
                        return Err(ConfigError::new(
                            "bfc option fragmentation_fraction is invalid, set it in [0.0, 1.0]",
                        ));
                    }
                }
                "safe_frontier_lag" => config.safe_frontier_lag = Some(reader.number()?),
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        Ok(config)
    }

    pub(super) fn pairs(&self) -> Vec<String> {
        let default = BfcConfig::default();
        let mut pairs = Vec::new();
        if self.allow_growth != default.allow_growth {
            pairs.push("allow_growth:False".into());
        }
        pairs.extend(size_pair(
            "initial_region_mb",
            self.initial_region_size,
            default.initial_region_size,
        ));
        if self.allow_retry_on_failure != default.allow_retry_on_failure {
            pairs.push("allow_retry_on_failure:False".into());
        }
        if self.retry_ms != default.retry_ms {
            pairs.push(format!("retry_ms:{}", self.retry_ms));
        }
        if self.garbage_collection != default.garbage_collection {
            pairs.push("garbage_collection:False".into());
        }
        if self.fragmentation_fraction != default.fragmentation_fraction {
            pairs.push(format!(
                "fragmentation_fraction:{}",
                self.fragmentation_fraction
            ));
        }
        pairs.extend(
            self.safe_frontier_lag
                .map(|lag| format!("safe_frontier_lag:{lag}")),
        );
        pairs
    }
}

fn read_arena_size(owner: &str, reader: &mut Reader<'_>) -> Result<Bytes, ConfigError> {
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

fn arena_size_pair(arena_size: Bytes) -> Vec<String> {
    size_pair(
        "arena_size_mb",
        arena_size,
        BuddyConfig::default().arena_size,
    )
}

fn positive_size(owner: &str, key: &str, reader: &mut Reader<'_>) -> Result<Bytes, ConfigError> {
    match reader.mib()? {
        0 => Err(ConfigError::new(format!(
            "{owner} option {key} too small, must be >= 1"
        ))),
        mib => Ok(Bytes::mib(mib)),
    }
}

fn size_pair(key: &str, size: Bytes, default: Bytes) -> Vec<String> {
    if size == default {
        Vec::new()
    } else {
        vec![format!("{key}:{}", size.get() >> 20)]
    }
}
