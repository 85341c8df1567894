use proptest::prelude::*;

use super::*;
use crate::strategy::options::*;
use crate::units::Bytes;

fn caching(conf: &str) -> CachingConfig {
    match Config::parse("caching", conf) {
        Ok(Config::Caching(config)) => config,
        other => panic!("{conf:?} gave {other:?}"),
    }
}

fn refusal(strategy: &str, conf: &str) -> String {
    match Config::parse(strategy, conf) {
        Ok(config) => panic!("{strategy}:{conf} was accepted: {config:?}"),
        Err(error) => error.to_string(),
    }
}

/// Compares each line of the table with PyTorch: the same texts are accepted, with the same values. A rejected
/// text gives an error that begins with PyTorch's.
#[test]
fn agrees_with_torch() {
    let lines = include_str!("torch_2_15_0.tsv").lines();
    for line in lines.filter(|line| !line.starts_with('#')) {
        let (conf, answer) = line
            .split_once('\t')
            .expect("a table line has three columns");
        let (verdict, detail) = answer
            .split_once('\t')
            .expect("a table line has three columns");
        match verdict {
            "ok" => assert_eq!(
                torch_values(&caching(conf)),
                detail_values(detail),
                "{conf}"
            ),
            "error" => {
                let ours = refusal("caching", conf);
                assert!(
                    ours.starts_with(detail),
                    "{conf}: {ours:?}, torch: {detail:?}"
                );
            }
            other => panic!("verdict {other}"),
        }
    }
}

fn torch_values(config: &CachingConfig) -> Vec<f64> {
    let mut values = vec![
        config.max_split_size.unwrap_or(Bytes::REQUEST_MAX).get() as f64,
        config.max_non_split_rounding.get() as f64,
        config.large_segment_size.get() as f64,
        config.garbage_collection_threshold,
        f64::from(u8::from(config.expandable_segments)),
    ];
    values.extend(config.roundup_power2_divisions.map(|steps| steps as f64));
    values
}

/// Returns the values of a line. Sizes above the largest request count as equal.
fn detail_values(detail: &str) -> Vec<f64> {
    let limit = Bytes::REQUEST_MAX.get() as f64;
    detail
        .split(' ')
        .map(|value| {
            value
                .parse::<f64>()
                .expect("the table holds numbers")
                .min(limit)
        })
        .collect()
}

#[test]
fn white_space_means_nothing() {
    assert_eq!(
        caching("\tmax_split_size_mb :\n3 0\r\x0b\x0c"),
        caching("max_split_size_mb:30")
    );
}

#[test]
fn reads_what_torch_does_not_show() {
    let config = caching(
        "per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True,\
         graph_capture_record_stream_reuse:True",
    );
    assert_eq!(config.per_process_memory_fraction, 0.5);
    assert!(config.throw_on_cudamalloc_oom);
    assert!(config.graph_capture_record_stream_reuse);
}

/// PyTorch accepts any token as a separator, which only hides typing errors. So it is rejected here, as in
/// PyTorch 2.8.
#[test]
fn refuses_a_wrong_separator() {
    let cases = [
        ("max_split_size_mb,30", ":"),
        ("max_split_size_mb:30:", ","),
        ("max_split_size_mb:30]", ","),
        ("roundup_power2_divisions:[,]", ":"),
        ("roundup_power2_divisions:[256:1:512:2]", ","),
        ("roundup_power2_divisions:[256,1]", ":"),
        ("expandable_segments_reserve_by_class:5", "["),
        ("expandable_segments_reserve_by_class:[a:1:2]", ","),
    ];
    for (conf, expected) in cases {
        assert_eq!(
            refusal("caching", conf),
            format!("Error parsing CachingAllocator settings, expected {expected}")
        );
    }
}

#[test]
fn refuses_the_drivers_own_pool() {
    let message = refusal("caching", "backend:cudaMallocAsync");
    assert!(
        message.contains("only backend:native is supported"),
        "{message}"
    );
}

#[test]
fn says_which_number_was_wrong() {
    assert_eq!(
        refusal("caching", "max_split_size_mb:lots"),
        "stoull: 'lots' is not a whole number in range"
    );
    assert_eq!(
        refusal("caching", "garbage_collection_threshold:e5"),
        "stod: 'e5' is not a number"
    );
    assert_eq!(
        refusal("caching", "max_split_size_mb"),
        "Index out of bounds in ConfigTokenizer: nothing follows 'max_split_size_mb'"
    );
}

#[test]
fn divisions_go_by_the_power_of_two_below_a_size() {
    let config = caching("roundup_power2_divisions:[1:1,2:2,4:4,256:8,>:16]");
    let cases = [
        (Bytes::ZERO, 1),
        (Bytes(512), 1),
        (Bytes::mib(1), 1),
        (Bytes(Bytes::mib(2).get() - 1), 1),
        (Bytes::mib(2), 2),
        (Bytes::mib(3), 2),
        (Bytes::mib(4), 4),
        (Bytes::mib(8), 0),
        (Bytes::mib(256), 8),
        (Bytes::mib(512), 16),
        (Bytes::gib(64), 16),
        (Bytes::REQUEST_MAX, 16),
    ];
    for (size, divisions) in cases {
        assert_eq!(config.divisions_for(size), divisions, "{size:?}");
    }
}

#[test]
fn the_other_strategies_have_options_too() {
    let cases = [
        (
            "pool:slab_size_mb:64",
            Config::Pool(PoolConfig {
                slab_size: Bytes::mib(64),
            }),
        ),
        (
            "pool",
            Config::Pool(PoolConfig {
                slab_size: Bytes::gib(5),
            }),
        ),
        (
            "buddy:arena_size_mb:64",
            Config::Buddy(BuddyConfig {
                arena_size: Bytes::mib(64),
            }),
        ),
        (
            "buddy:",
            Config::Buddy(BuddyConfig {
                arena_size: Bytes::gib(1),
            }),
        ),
        (
            "slab:arena_size_mb:64",
            Config::Slab(SlabConfig {
                arena_size: Bytes::mib(64),
            }),
        ),
        (
            "bfc: allow_growth:False, initial_region_mb:1, allow_retry_on_failure:False, \
             retry_ms:5, garbage_collection:False, fragmentation_fraction:0.1, safe_frontier_lag:9",
            Config::Bfc(BfcConfig {
                allow_growth: false,
                initial_region_size: Bytes::mib(1),
                allow_retry_on_failure: false,
                retry_ms: 5,
                garbage_collection: false,
                fragmentation_fraction: 0.1,
                safe_frontier_lag: Some(9),
            }),
        ),
        ("bfc", Config::Bfc(BfcConfig::default())),
        ("direct", Config::Direct(DirectConfig)),
    ];
    for (text, config) in cases {
        assert_eq!(text.parse(), Ok(config), "{text}");
    }
}

#[test]
fn a_mistyped_option_gets_a_suggestion() {
    let options = [
        ("caching", "expandable_segments"),
        ("caching", "max_split_size_mb"),
        ("caching", "max_non_split_rounding_mb"),
        ("caching", "garbage_collection_threshold"),
        ("caching", "large_segment_size_mb"),
        ("caching", "roundup_power2_divisions"),
        ("caching", "per_process_memory_fraction"),
        ("bfc", "allow_growth"),
        ("bfc", "fragmentation_fraction"),
        ("buddy", "arena_size_mb"),
        ("pool", "slab_size_mb"),
    ];
    for (strategy, option) in options {
        let refused = refusal(strategy, &format!("{}{}:1", &option[..1], &option[2..]));
        let question = format!(" allocator config. Did you mean '{option}'?");
        assert!(refused.ends_with(&question), "{refused}");
        assert!(
            !refusal(strategy, option).contains("Unrecognized"),
            "{option}"
        );
    }
    let far = refusal("caching", "expandable:True");
    assert!(far.ends_with("config."), "{far}");
    assert!(refusal("tide", "a:1").ends_with("config."));
}

#[test]
fn the_other_strategies_refuse_in_the_same_style() {
    let cases = [
        (
            "direct",
            "a:1",
            "Unrecognized key 'a' in direct allocator config.",
        ),
        (
            "pool",
            "slab_size:1",
            "Unrecognized key 'slab_size' in pool allocator config.",
        ),
        (
            "pool",
            "slab_size_mb:0",
            "pool option slab_size_mb too small, must be >= 1",
        ),
        (
            "buddy",
            "arena_size_mb:3",
            "buddy option arena_size_mb has to be power of 2",
        ),
        (
            "slab",
            "arena_size_mb:0",
            "slab option arena_size_mb has to be power of 2",
        ),
        (
            "bfc",
            "initial_region_mb:0",
            "bfc option initial_region_mb too small, must be >= 1",
        ),
        (
            "bfc",
            "fragmentation_fraction:2",
            "bfc option fragmentation_fraction is invalid, set it in [0.0, 1.0]",
        ),
        (
            "bfc",
            "allow_growth:yes",
            "Expected 'True' or 'False' at index 2 in ConfigTokenizer but got 'yes'",
        ),
        (
            "quick",
            "",
            "Unknown strategy 'quick', options are direct, pool, buddy, slab, bfc, caching, tide",
        ),
    ];
    for (strategy, conf, message) in cases {
        assert_eq!(refusal(strategy, conf), message);
    }
}

#[test]
fn text_shows_only_what_is_not_the_default() {
    let cases = [
        ("caching:", "caching"),
        (
            "caching:expandable_segments:False,backend:native",
            "caching",
        ),
        (
            "caching:large_segment_size_mb:40",
            "caching:large_segment_size_mb:40",
        ),
        (
            "caching:large_segment_size_mb:40,max_non_split_rounding_mb:40",
            "caching:large_segment_size_mb:40",
        ),
        (
            "caching:roundup_power2_divisions:[1:4,2:4,4:4,8:4,>:4]",
            "caching:roundup_power2_divisions:4",
        ),
        (
            "caching:roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            "caching:roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        ),
        (
            "bfc:retry_ms:10000,allow_growth:False",
            "bfc:allow_growth:False",
        ),
    ];
    for (text, shown) in cases {
        let config: Config = text.parse().expect("the text is valid");
        assert_eq!(config.to_string(), shown);
    }
}

#[test]
fn names_are_read_as_they_are_written() {
    for name in StrategyName::ALL {
        assert_eq!(name.to_string().parse(), Ok(name));
        let config: Config = name.as_str().parse().expect("every name has defaults");
        assert_eq!(config.name(), name);
        assert_eq!(config.to_conf(), "");
    }
}

fn fraction() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), 0.0001..0.9999f64]
}

fn size(least_mib: u64) -> impl Strategy<Value = Bytes> {
    prop_oneof![least_mib..200, Just(1 << 40)].prop_map(Bytes::mib)
}

fn divisions() -> impl Strategy<Value = [u64; 16]> {
    let any = proptest::array::uniform16(prop_oneof![
        Just(0u64),
        Just(4),
        (0..64u32).prop_map(|exponent| 1 << exponent)
    ]);
    // Long runs of one value, which the text form shortens.
    let steps = proptest::array::uniform3(proptest::sample::select(vec![0u64, 1, 2, 8]));
    let runs = (0..17usize, 0..17usize, steps).prop_map(|(head, tail, [low, middle, high])| {
        std::array::from_fn(|index| match index {
            _ if index < head => low,
            _ if index < tail => middle,
            _ => high,
        })
    });
    prop_oneof![any, runs]
}

fn caching_config() -> impl Strategy<Value = Config> {
    (
        size(11),
        (proptest::option::of(size(0)), size(0)),
        (fraction(), prop_oneof![Just(1.0), fraction()]),
        divisions(),
        any::<[bool; 3]>(),
        (
            proptest::option::of(proptest::sample::select(&FreeBlockOrder::ALL[..])),
            any::<Option<bool>>(),
        ),
    )
        .prop_map(
            |(large, (split, rounding), (threshold, share), divisions, flags, ours)| {
                Config::Caching(CachingConfig {
                    max_split_size: split.map(|size| size.max(large)),
                    max_non_split_rounding: rounding.max(large),
                    large_segment_size: large,
                    garbage_collection_threshold: threshold,
                    roundup_power2_divisions: divisions,
                    expandable_segments: flags[0],
                    per_process_memory_fraction: share,
                    throw_on_cudamalloc_oom: flags[1],
                    graph_capture_record_stream_reuse: flags[2],
                    free_block_order: ours.0,
                    search_after_wait: ours.1,
                })
            },
        )
}

fn config() -> impl Strategy<Value = Config> {
    let arena = (0..41u32)
        .prop_map(|exponent| Bytes::mib(1 << exponent))
        .boxed();
    let lag = any::<Option<u64>>();
    let bfc = (any::<[bool; 3]>(), size(1), any::<u64>(), fraction(), lag).prop_map(
        |(flags, initial_region_size, retry_ms, fragmentation_fraction, safe_frontier_lag)| {
            Config::Bfc(BfcConfig {
                allow_growth: flags[0],
                initial_region_size,
                allow_retry_on_failure: flags[1],
                retry_ms,
                garbage_collection: flags[2],
                fragmentation_fraction,
                safe_frontier_lag,
            })
        },
    );
    prop_oneof![
        4 => caching_config(),
        2 => bfc,
        1 => size(1).prop_map(|slab_size| Config::Pool(PoolConfig { slab_size })),
        1 => arena.clone().prop_map(|arena_size| Config::Buddy(BuddyConfig { arena_size })),
        1 => arena.prop_map(|arena_size| Config::Slab(SlabConfig { arena_size })),
    ]
}

/// Generates texts that get past the first token more often than random text.
fn conf_text() -> impl Strategy<Value = String> {
    let words = proptest::sample::select(vec![
        "max_split_size_mb",
        "large_segment_size_mb",
        "roundup_power2_divisions",
        "slab_size_mb",
        "arena_size_mb",
        "garbage_collection_threshold",
        "expandable_segments",
        "backend",
        "expandable_segments_reserve_by_class",
        "fragmentation_fraction",
        ":",
        ",",
        "[",
        "]",
        ">",
        "0",
        "64",
        "-1",
        "18446744073709551616",
        "0.5",
        "1e",
        "-",
        ".",
        "inf",
        "True",
        "é",
        " ",
    ]);
    proptest::collection::vec(words, 0..12).prop_map(|words| words.concat())
}

#[test]
fn a_blocks_size_follows_from_its_request_and_its_place() {
    let size = |config: &str, requested: u64, free: Bytes, segment: Bytes| {
        let config: Config = config.parse().unwrap();
        let size = config.block_size(Bytes(requested), free, segment);
        size.map(|size| size.get())
    };
    let (mib, gib) = (Bytes::mib(1), Bytes::gib(1));
    assert_eq!(size("direct", 1, mib, mib), Some(512));
    assert_eq!(size("pool", 1025, mib, gib), Some(2048));
    assert_eq!(size("buddy", 66 << 10, mib, gib), Some(128 << 10));
    assert_eq!(size("slab", 66 << 10, mib, gib), Some(72 << 10));
    // An arena may be smaller than its option. A request's own segment is not a power of two, or is larger than
    // an arena.
    assert_eq!(size("buddy", 5, mib, Bytes::mib(512)), Some(1024));
    let (kept, larger) = (Bytes::mib(1030), Bytes::gib(2));
    for strategy in ["buddy", "slab"] {
        assert_eq!(size(strategy, 1025 << 20, kept, kept), Some(kept.get()));
        assert_eq!(
            size(strategy, 2047 << 20, larger, larger),
            Some(larger.get())
        );
    }
    // The rest of a chunk is not split off if it is smaller than both the request and 128 MiB.
    assert_eq!(size("bfc", 600, Bytes(1500), gib), Some(1500));
    assert_eq!(size("bfc", 600, Bytes(1536), gib), Some(768));
    assert_eq!(
        size("bfc", 600, Bytes(600), gib),
        None,
        "no chunk is so small"
    );
    let most = Bytes::mib(300).get();
    let with_rest = |rest: u64| Bytes::mib(300 + rest);
    assert_eq!(
        size("bfc", most, with_rest(127), gib),
        Some(with_rest(127).get())
    );
    assert_eq!(size("bfc", most, with_rest(128), gib), Some(most));
    assert_eq!(size("bfc:fragmentation_fraction:0.5", 600, mib, gib), None);
    assert_eq!(size("caching", 600, mib, gib), None);
    assert_eq!(
        size("pool", 1025, Bytes(1025), gib),
        None,
        "it does not fit"
    );
}

proptest! {
    #[test]
    fn text_reads_back(config in config()) {
        let text = config.to_string();
        prop_assert_eq!(text.parse::<Config>(), Ok(config), "{}", text);
    }

    #[test]
    fn no_text_panics(name in 0..StrategyName::ALL.len(), conf in conf_text(), noise in ".*") {
        let name = StrategyName::ALL[name].as_str();
        let _ = Config::parse(name, &noise);
        if let Ok(config) = Config::parse(name, &conf) {
            prop_assert_eq!(Config::parse(name, &config.to_conf()), Ok(config));
        }
    }
}

#[test]
fn three_options_go_back_to_their_defaults_while_it_runs() {
    let start = "caching:max_split_size_mb:64,roundup_power2_divisions:4,\
                 garbage_collection_threshold:0.5,max_non_split_rounding_mb:30,\
                 expandable_segments:True,per_process_memory_fraction:0.5";
    let config: Config = start.parse().unwrap();
    let after = |conf: &str| config.reconfigured(conf, None).unwrap().to_string();
    let kept = "max_non_split_rounding_mb:30,expandable_segments:True,\
                per_process_memory_fraction:0.5";
    assert_eq!(after(""), format!("caching:{kept}"));
    assert_eq!(
        after("max_split_size_mb:20"),
        format!("caching:max_split_size_mb:20,{kept}")
    );
    assert_eq!(
        after("expandable_segments:False,per_process_memory_fraction:1.0"),
        "caching:max_non_split_rounding_mb:30"
    );
    // A default that depends on another option depends on it here, too.
    assert_eq!(
        after("large_segment_size_mb:40,expandable_segments:False,per_process_memory_fraction:1.0"),
        "caching:large_segment_size_mb:40"
    );
}

#[test]
fn a_refusal_while_it_runs_has_the_same_words() {
    let config = Config::default();
    let refused = config
        .reconfigured("max_split_size_mb:1", None)
        .unwrap_err();
    assert_eq!(
        refused.to_string(),
        refusal("caching", "max_split_size_mb:1")
    );
    let bfc: Config = "bfc".parse().unwrap();
    let refused = bfc
        .reconfigured("retry_ms:5", None)
        .unwrap_err()
        .to_string();
    assert!(refused.contains("bfc"), "{refused}");
}
