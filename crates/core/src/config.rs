//! Which strategy allocates, and its options, as plain data; and the text form of both. Each strategy's options lie
//! beside it.
//!
//! Every strategy's options are written as PyTorch writes `PYTORCH_CUDA_ALLOC_CONF`: `key:value` pairs
//! between commas, lists in brackets, white space without meaning, booleans exactly `True` or
//! `False`. A value that is refused is refused in PyTorch's words.
//!
//! **Invariant:** nothing here reads the environment. Whoever does passes the text in.

pub(crate) mod error;
pub(crate) mod options;
pub(crate) mod tokens;

use std::fmt;
use std::str::FromStr;

use crate::strategy::options::CachingConfig;
use crate::strategy::{FreeBlockOrder, strategies};
pub use error::ConfigError;
use options::Options;
use tokens::Reader;

/// Generates what has a variant or a name for each strategy.
macro_rules! define_config {
    ($($(#[$doc:meta])* $module:ident: $variant:ident($options:ident, $strategy:ident);)*) => {
        /// A strategy and its options. The default is [`Config::Caching`] with PyTorch's own defaults.
        ///
        /// Its text form is the command line's: `NAME` or `NAME:CONF`, where `CONF` is everything after the
        /// first colon.
        ///
        /// ```
        /// # use lowtide_core::{Bytes, Config};
        /// let config: Config = "caching:max_split_size_mb:64,expandable_segments:True".parse()?;
        /// let Config::Caching(caching) = &config else { unreachable!() };
        /// assert_eq!(caching.max_split_size, Some(Bytes::mib(64)));
        /// assert_eq!(config.to_string(), "caching:max_split_size_mb:64,expandable_segments:True");
        /// # Ok::<(), lowtide_core::ConfigError>(())
        /// ```
        #[derive(Clone, PartialEq, Debug)]
        pub enum Config {
            $($(#[$doc])* $variant(crate::strategy::options::$options),)*
        }

        impl Config {
            fn read(name: StrategyName, reader: &mut Reader<'_>) -> Result<Config, ConfigError> {
                Ok(match name {
                    $(StrategyName::$variant => Config::$variant(Options::read(reader)?),)*
                })
            }

            fn pairs(&self) -> Vec<String> {
                match self {
                    $(Config::$variant(options) => options.pairs(),)*
                }
            }

            /// Returns the strategy's name.
            pub const fn name(&self) -> StrategyName {
                match self {
                    $(Config::$variant(_) => StrategyName::$variant,)*
                }
            }
        }

        /// A strategy, without its options.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum StrategyName {
            $(#[doc = concat!("See [`Config::", stringify!($variant), "`].")] $variant,)*
        }

        impl StrategyName {
            /// Every strategy, the simplest first.
            pub const ALL: [StrategyName; [$(stringify!($variant)),*].len()] =
                [$(StrategyName::$variant),*];

            /// Returns the name that the command line uses.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(StrategyName::$variant => stringify!($module),)*
                }
            }
        }
    };
}
strategies!(define_config);

impl Config {
    /// Returns the strategy called `strategy` with the options in `conf`; the empty `conf` is every
    /// default.
    ///
    /// # Errors
    ///
    /// The first thing wrong: an unknown strategy, an unknown key, or a value that is refused.
    pub fn parse(strategy: &str, conf: &str) -> Result<Config, ConfigError> {
        let name: StrategyName = strategy.parse()?;
        let tokens = tokens::split(conf);
        Config::read(name, &mut Reader::new(&tokens))
    }

    /// Returns what a text that is given while the strategy runs makes of these options, as PyTorch reads
    /// one then: `max_split_size_mb`, `roundup_power2_divisions` and `garbage_collection_threshold` go back
    /// to their defaults first, the others keep what they were. `order` is that of free blocks where no option says.
    ///
    /// # Errors
    ///
    /// The first thing wrong, as [`Config::parse`]; that the strategy is not `caching`, the only one whose options
    /// can be changed; or another `free_block_order`.
    pub fn reconfigured(
        &self,
        conf: &str,
        order: Option<FreeBlockOrder>,
    ) -> Result<Config, ConfigError> {
        let Config::Caching(options) = self else {
            let text = format!(
                "the options of {} cannot be changed while it runs",
                self.name()
            );
            return Err(ConfigError::new(text));
        };
        let tokens = tokens::split(conf);
        let changed = options.reread(&mut Reader::new(&tokens))?;
        let in_force =
            |options: &CachingConfig| options.free_block_order.or(order).unwrap_or_default();
        if in_force(&changed) != in_force(options) {
            let text = "free_block_order cannot be changed while memory is allocated in another";
            return Err(ConfigError::new(text));
        }
        Ok(Config::Caching(changed))
    }

    /// Returns this with an order of free blocks where it is `caching` and says none.
    #[must_use]
    pub fn in_order(mut self, order: Option<FreeBlockOrder>) -> Config {
        if let Config::Caching(options) = &mut self {
            options.free_block_order = options.free_block_order.or(order);
        }
        self
    }

    /// Returns this as it is in a job that lowtide serves: a fault of PyTorch's is not repeated there, unless the
    /// options say so.
    #[must_use]
    pub fn in_job(mut self) -> Config {
        if let Config::Caching(options) = &mut self {
            options.search_after_wait.get_or_insert(true);
        }
        self
    }

    /// Returns whether freed memory stays with the allocator.
    pub const fn keeps_free_memory(&self) -> bool {
        !matches!(self, Config::Direct(_))
    }

    /// Returns the share of the device's memory that may be reserved, where the options limit it.
    pub fn memory_fraction(&self) -> Option<f64> {
        match self {
            Config::Caching(options) => Some(options.per_process_memory_fraction),
            _ => None,
        }
        .filter(|&fraction| fraction < 1.0)
    }

    /// Returns whether one stream's requests never decide where another stream's go, so that a device can have several
    /// [lanes](crate::Lanes). These need a single lane:
    ///
    /// - BFC: a request may wait for memory that any stream frees.
    /// - Garbage collection weighs the free segments of all streams.
    /// - `throw_on_cudamalloc_oom` rejects a request for what all streams reserve.
    /// - `direct`: freed memory goes to the driver, and serves the next request of any stream.
    pub fn keeps_streams_apart(&self) -> bool {
        match self {
            Config::Bfc(_) | Config::Direct(_) => false,
            Config::Caching(options) => {
                options.garbage_collection_threshold == 0.0 && !options.throw_on_cudamalloc_oom
            }
            _ => true,
        }
    }

    /// Returns the part of the device's memory above which a request for new memory fails at once, if there is one.
    pub(crate) fn rejects_above(&self) -> Option<f64> {
        match self {
            Config::Caching(options) if options.throw_on_cudamalloc_oom => {
                Some(self.memory_fraction().unwrap_or(1.0))
            }
            _ => None,
        }
    }

    /// Returns whether memory that is freed in a graph capture may be used again in it, where the graph's
    /// order allows that.
    pub(crate) fn reuses_in_capture(&self) -> bool {
        matches!(self, Config::Caching(options) if options.graph_capture_record_stream_reuse)
    }

    /// Returns how long a request that finds no memory is tried again before it fails, in milliseconds; `None` where it
    /// fails at once.
    pub fn retry_wait_ms(&self) -> Option<u64> {
        match self {
            Config::Bfc(options) if options.allow_retry_on_failure => Some(options.retry_ms),
            _ => None,
        }
    }

    /// Returns whether new segments grow by mapping memory.
    pub(crate) fn has_expandable_segments(&self) -> bool {
        matches!(self, Config::Caching(options) if options.expandable_segments)
    }

    /// Returns where a request looks for memory once everything that could go back did.
    pub(crate) fn last_try(&self) -> LastTry {
        match self {
            Config::Caching(options) if options.search_after_wait == Some(true) => {
                LastTry::NewFirst
            }
            Config::Caching(_) => LastTry::NewOnly,
            _ => LastTry::FreeFirst,
        }
    }

    /// Returns the options that differ from their defaults, in the syntax of [`Config::parse`]; empty
    /// where none does.
    ///
    /// Sizes are written in whole MiB, the syntax's only unit: bytes below that are dropped.
    pub fn to_conf(&self) -> String {
        self.pairs().join(",")
    }
}

impl Default for Config {
    fn default() -> Config {
        Config::Caching(CachingConfig::default())
    }
}

impl FromStr for Config {
    type Err = ConfigError;
    fn from_str(text: &str) -> Result<Config, ConfigError> {
        let (strategy, conf) = text.split_once(':').unwrap_or((text, ""));
        Config::parse(strategy, conf)
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let conf = self.to_conf();
        let colon = if conf.is_empty() { "" } else { ":" };
        write!(f, "{}{colon}{conf}", self.name())
    }
}

/// Where a request looks for memory once everything that could go back did, because a wait may have made blocks free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LastTry {
    /// Among the free blocks, then at the driver.
    FreeFirst,
    /// At the driver, then among the free blocks.
    NewFirst,
    /// At the driver alone, as PyTorch does (pytorch#189504).
    NewOnly,
}

impl FromStr for StrategyName {
    type Err = ConfigError;
    fn from_str(name: &str) -> Result<StrategyName, ConfigError> {
        StrategyName::ALL
            .into_iter()
            .find(|known| known.as_str() == name)
            .ok_or_else(|| {
                let known = StrategyName::ALL.map(StrategyName::as_str).join(", ");
                ConfigError::new(format!("Unknown strategy '{name}', options are {known}"))
            })
    }
}

impl fmt::Display for StrategyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests;
