//! The settings that a recording was made with.

use lowtide_core::CachingConfig;
use lowtide_trace::Trace;

/// Returns the options that the recording was made with, as far as they are understood.
pub(crate) fn config_of(trace: &Trace) -> CachingConfig {
    let (mut config, _) = trace.config_as_understood();
    config.free_block_order = trace.settings.free_block_order;
    config
}

/// Returns whether requests may release some memory, with these options, and keep other free memory.
pub(crate) fn gives_back_some(config: &CachingConfig) -> bool {
    config.max_split_size.is_some() || config.garbage_collection_threshold > 0.0
}
