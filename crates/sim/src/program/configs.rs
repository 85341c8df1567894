//! The configurations that every suite runs with.

use lowtide_core::{Bytes, Config, StrategyName};

/// The device memory for [`configs`]: small enough that programs run out of it.
pub const CAPACITY: Bytes = Bytes::mib(128);

/// Returns every strategy with its defaults, then variants that reach other branches. A new strategy is included
/// through [`StrategyName::ALL`].
///
/// # Panics
///
/// If a variant is not accepted any more.
pub fn configs() -> Vec<Config> {
    let defaults = StrategyName::ALL.iter().map(|name| name.as_str());
    let texts = defaults.chain(VARIANTS.iter().copied());
    let parse = |text: &str| {
        text.parse()
            .unwrap_or_else(|error| panic!("{text}: {error}"))
    };
    texts.map(parse).collect()
}

/// Options that select branches, alone and in combination. The sizes fit [`CAPACITY`].
const VARIANTS: [&str; 22] = [
    "pool:slab_size_mb:2",
    "pool:slab_size_mb:32",
    "buddy:arena_size_mb:8",
    "slab:arena_size_mb:8",
    "bfc:allow_growth:False",
    "bfc:garbage_collection:False,initial_region_mb:1",
    "bfc:fragmentation_fraction:0.1,initial_region_mb:16",
    "bfc:safe_frontier_lag:7",
    "bfc:allow_retry_on_failure:False",
    "caching:expandable_segments:True",
    "caching:large_segment_size_mb:11,max_split_size_mb:12",
    "caching:max_split_size_mb:20,max_non_split_rounding_mb:30",
    "caching:max_split_size_mb:20,expandable_segments:True",
    "caching:garbage_collection_threshold:0.5",
    "caching:roundup_power2_divisions:4",
    "caching:roundup_power2_divisions:[1:8,4:2,>:1],expandable_segments:True",
    "caching:graph_capture_record_stream_reuse:True",
    "caching:free_block_order:block_age,expandable_segments:True",
    "caching:free_block_order:segment_age,max_split_size_mb:20",
    "caching:search_after_wait:True",
    "caching:search_after_wait:True,expandable_segments:True",
    "caching:per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True",
];
