//! The settings that are tried for a failed request.

use lowtide_core::{BfcConfig, Bytes, CachingConfig, Config, PoolConfig, SlabConfig, TideConfig};
use lowtide_trace::ShellWord;

/// Where a program sets its strategy and options, and so where its user changes them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Configured {
    /// The environment variable that holds the options, set or not; `None` if the program passes them to
    /// `lowtide.install`.
    pub options_variable: Option<&'static str>,
    /// Whether the program passes a strategy or options to `lowtide.install`, which overrides the environment's
    /// strategy.
    pub is_by_program: bool,
}

/// Returns the settings that differ from `running` and may reserve less, each with the text that its user would
/// set. The settings that are easiest to choose come first.
pub(crate) fn of(running: &Config, configured: Configured) -> Vec<(String, Config)> {
    let base = match running {
        Config::Caching(options) => CachingConfig {
            // The limit is passed to the replay as its capacity.
            per_process_memory_fraction: 1.0,
            ..options.clone()
        },
        _ => CachingConfig::default(),
    };
    let of_pytorch = matches!(running, Config::Caching(_));
    let caching = variants_of(&base).map(Config::Caching);
    let caching = caching.into_iter().filter(|variant| variant != running);
    let caching = caching.map(|variant| {
        if of_pytorch {
            (with_options(&variant.to_conf(), configured), variant)
        } else {
            (with_strategy(&variant, configured), variant)
        }
    });
    let others = [
        Config::Tide(TideConfig),
        Config::Bfc(BfcConfig::default()),
        Config::Slab(SlabConfig::default()),
        Config::Pool(PoolConfig::default()),
    ];
    let others = { others.into_iter() }.filter(|other| other.name() != running.name());
    caching
        .chain(others.map(|other| (with_strategy(&other, configured), other)))
        .collect()
}

/// Returns `config` without the options that have no effect in a job with or without a limit: without a limit, no
/// garbage is collected.
pub(crate) fn in_effect(config: &Config, is_limited: bool) -> Config {
    match config {
        Config::Caching(options) if !is_limited => Config::Caching(CachingConfig {
            garbage_collection_threshold: 0.0,
            ..options.clone()
        }),
        config => config.clone(),
    }
}

/// Returns whether `config` maps and unmaps memory by the page.
pub(crate) fn maps_pages(config: &Config) -> bool {
    match config {
        Config::Caching(options) => options.expandable_segments,
        Config::Tide(_) => true,
        _ => false,
    }
}

/// Returns the text that sets other options for the strategy in use.
fn with_options(conf: &str, configured: Configured) -> String {
    match configured.options_variable {
        Some(variable) => format!("{variable}={}", ShellWord(conf)),
        None => format!("lowtide.install(config=\"{conf}\")"),
    }
}

/// Returns the text that sets another strategy, with its options.
fn with_strategy(config: &Config, configured: Configured) -> String {
    if configured.is_by_program {
        format!("lowtide.install(strategy=\"{config}\")")
    } else {
        format!("--strategy {}", ShellWord(&config.to_string()))
    }
}

/// Returns `base` with each of the options of PyTorch's allocator that are worth trying, one option at a time.
fn variants_of(base: &CachingConfig) -> [CachingConfig; 4] {
    [
        CachingConfig {
            expandable_segments: true,
            ..base.clone()
        },
        CachingConfig {
            max_split_size: Some(Bytes::mib(128).max(base.large_segment_size)),
            ..base.clone()
        },
        CachingConfig {
            garbage_collection_threshold: 0.8,
            ..base.clone()
        },
        CachingConfig {
            roundup_power2_divisions: [8; 16],
            ..base.clone()
        },
    ]
}
