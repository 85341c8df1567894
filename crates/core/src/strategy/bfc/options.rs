//! The options of `bfc`.

use crate::config::error::ConfigError;
use crate::config::options::Options;
use crate::config::tokens::{self, Reader};
use crate::units::Bytes;

/// The options of `bfc`. Names and defaults are those of TensorFlow's GPU allocator, except for the default of
/// [`BfcConfig::allow_growth`].
#[derive(Clone, PartialEq, Debug)]
pub struct BfcConfig {
    /// Whether regions are allocated as needed, each twice as large as the one before. Otherwise the first region
    /// takes all memory. Default: true. TensorFlow's default is to take the whole card.
    pub allow_growth: bool,
    /// The size of the first region if regions grow (`initial_region_mb`). Default: 2 MiB.
    pub initial_region_size: Bytes,
    /// Whether a request that does not fit waits for other threads to free memory before it fails.
    pub allow_retry_on_failure: bool,
    /// How long such a request waits, in milliseconds. Default: 10,000.
    pub retry_ms: u64,
    /// Whether regions without an active block are released before a request fails.
    pub garbage_collection: bool,
    /// The fraction of the memory limit by which a chunk may be larger than its request, in [0.0, 1.0]. 0.0, the
    /// default, means 128 MiB, TensorFlow's fixed bound.
    pub fragmentation_fraction: f64,
    /// How many frees the device is behind the program (`safe_frontier_lag`). A chunk is merged with its
    /// neighbours after so many more frees, or before a request fails. Default: `None`, chunks are merged at
    /// once. This is TensorFlow's safe frontier, with a count of frees instead of the device's own progress.
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

/// The options, for a suggestion if one is mistyped.
const KEYS: [&str; 7] = [
    "allow_growth",
    "initial_region_mb",
    "allow_retry_on_failure",
    "retry_ms",
    "garbage_collection",
    "fragmentation_fraction",
    "safe_frontier_lag",
];

impl Options for BfcConfig {
    fn read(reader: &mut Reader<'_>) -> Result<BfcConfig, ConfigError> {
        let mut config = BfcConfig::default();
        reader.pairs("bfc", &KEYS, |key, reader| {
            match key {
                "allow_growth" => config.allow_growth = reader.boolean()?,
                "initial_region_mb" => {
                    config.initial_region_size = tokens::positive_size("bfc", key, reader)?;
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

    fn pairs(&self) -> Vec<String> {
        let default = BfcConfig::default();
        let mut pairs = Vec::new();
        if self.allow_growth != default.allow_growth {
            pairs.push("allow_growth:False".into());
        }
        pairs.extend(tokens::size_pair(
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

    /// No: a request may wait for memory that any stream frees.
    fn keeps_streams_apart(&self) -> bool {
        false
    }

    fn retry_wait_ms(&self) -> Option<u64> {
        self.allow_retry_on_failure.then_some(self.retry_ms)
    }
}
