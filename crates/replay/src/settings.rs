//! The settings that a recording was made with.

use lowtide_core::CachingConfig;
use lowtide_trace::Trace;

/// Returns the recording's options of PyTorch's allocator, as far as they are understood.
pub(crate) fn config_of(trace: &Trace) -> CachingConfig {
    let (mut config, _) = trace.config_as_understood();
    config.free_block_order = trace.settings.free_block_order;
    config
}

/// Returns whether, with these options, a request may release some free memory to the driver and keep the rest.
pub(crate) fn releases_some(config: &CachingConfig) -> bool {
    config.max_split_size.is_some() || config.garbage_collection_threshold > 0.0
}
