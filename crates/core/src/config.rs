//! The choice of a strategy and its options, as plain data and as text. Each strategy's options are defined
//! beside the strategy.
//!
//! Every strategy's options use the syntax of `PYTORCH_CUDA_ALLOC_CONF`:
//!
//! - `key:value` pairs are separated by commas.
//! - Lists are in brackets.
//! - White space has no meaning.
//! - Booleans are exactly `True` or `False`.
//!
//! A rejected value gives PyTorch's error message.
//!
//! **Invariant:** nothing here reads the environment. Callers pass the text in.

pub(crate) mod error;
pub(crate) mod options;
pub(crate) mod tokens;

use std::fmt;
use std::str::FromStr;

use crate::strategy::options::CachingConfig;
use crate::strategy::{FreeBlockOrder, strategies};
use crate::units::Bytes;
pub use error::ConfigError;
pub(crate) use options::LastTry;
use options::Options;
use tokens::Reader;

/// Generates the types that have a variant for each strategy.
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

            /// Returns what the options decide beside the strategy.
            pub(crate) fn options(&self) -> &dyn Options {
                match self {
                    $(Config::$variant(options) => options,)*
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
    /// Returns the strategy called `strategy` with the options in `conf`. If `conf` is empty, every option has
    /// its default.
    ///
    /// # Errors
    ///
    /// The first mistake: an unknown strategy, an unknown key, or a rejected value.
    pub fn parse(strategy: &str, conf: &str) -> Result<Config, ConfigError> {
        let name: StrategyName = strategy.parse()?;
        let tokens = tokens::split(conf);
        Config::read(name, &mut Reader::new(&tokens))
    }

    /// Returns these options with `conf` applied while the strategy runs. As in PyTorch, `max_split_size_mb`,
    /// `roundup_power2_divisions` and `garbage_collection_threshold` are first reset to their defaults; all other
    /// options keep their values. `order` is the order of free blocks if no option sets one.
    ///
    /// # Errors
    ///
    /// As for [`Config::parse`]. Also if the strategy is not `caching`, the only one whose options can change, or
    /// if `conf` changes `free_block_order`.
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

    /// Returns this configuration. If it is `caching` without an order of free blocks, it gets `order`.
    #[must_use]
    pub fn in_order(mut self, order: Option<FreeBlockOrder>) -> Config {
        if let Config::Caching(options) = &mut self {
            options.free_block_order = options.free_block_order.or(order);
        }
        self
    }

    /// Returns this configuration for a job that lowtide serves. There `caching` does not repeat a fault of
    /// PyTorch's (pytorch#189504) unless the options say so ([`CachingConfig::search_after_wait`]).
    #[must_use]
    pub fn in_job(mut self) -> Config {
        if let Config::Caching(options) = &mut self {
            options.search_after_wait.get_or_insert(true);
        }
        self
    }

    /// Returns whether the allocator caches freed memory.
    pub fn keeps_free_memory(&self) -> bool {
        self.options().keeps_free_memory()
    }

    /// Returns the fraction of the device's memory that may be reserved, if the options limit it.
    pub fn memory_fraction(&self) -> Option<f64> {
        self.options().memory_fraction()
    }

    /// Returns the page size of expandable segments for large requests, which
    /// [`Fragmentation::of`](crate::Fragmentation::of) needs.
    pub fn large_page(&self) -> Bytes {
        self.options().large_page()
    }

    /// Returns whether one stream's requests never decide where another stream's go, so that a device can have several
    /// [lanes](crate::Lanes).
    pub fn keeps_streams_apart(&self) -> bool {
        self.options().keeps_streams_apart()
    }

    /// Returns how long a request that finds no memory is retried before it fails, in milliseconds. `None` if it
    /// fails at once.
    pub fn retry_wait_ms(&self) -> Option<u64> {
        self.options().retry_wait_ms()
    }

    /// Returns the options that differ from their defaults, in the syntax of [`Config::parse`]. Empty if none
    /// differs.
    ///
    /// Sizes are written in whole MiB, the syntax's only unit, rounded down.
    pub fn to_conf(&self) -> String {
        self.options().pairs().join(",")
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
