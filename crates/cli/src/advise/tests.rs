use lowtide_core::Bytes;
use lowtide_replay::Outcome;

use super::settings::{Candidate, Setting};
use super::{Tried, choose};
use crate::samples;

fn tried(settings: &[Setting], peak_mib: u64) -> Tried {
    let candidate = Candidate::new(settings.to_vec(), &[]).unwrap();
    let config = format!("caching:{}", candidate.conf);
    Tried {
        candidate,
        outcome: samples::outcome(&config, Bytes::mib(peak_mib)),
    }
}

/// Asserts which configuration is chosen; `None` for no one.
fn check(now: &Tried, others: &[Tried], expected: Option<&str>) {
    let chosen = choose(&samples::job(), now, others);
    assert_eq!(chosen.map(|tried| tried.candidate.conf.as_str()), expected);
}

const EXPANDABLE: Setting = Setting::ExpandableSegments;
const ROUNDUP: Setting = Setting::RoundupPower2Divisions(8);
const LARGE: Setting = Setting::LargeSegmentSizeMib(64);

#[test]
fn the_least_is_chosen() {
    let others = [tried(&[ROUNDUP], 1500), tried(&[EXPANDABLE], 1100)];
    check(&tried(&[], 2000), &others, Some("expandable_segments:True"));
}

#[test]
fn a_simpler_setting_within_a_percent_is_preferred() {
    let others = [tried(&[EXPANDABLE, LARGE], 1000), tried(&[ROUNDUP], 1010)];
    check(
        &tried(&[], 2000),
        &others,
        Some("roundup_power2_divisions:8"),
    );
    let others = [tried(&[EXPANDABLE, LARGE], 1000), tried(&[ROUNDUP], 1011)];
    check(
        &tried(&[], 2000),
        &others,
        Some("expandable_segments:True,large_segment_size_mb:64"),
    );
}

#[test]
fn what_is_in_use_is_kept_where_nothing_saves_much() {
    let now = tried(&[EXPANDABLE, ROUNDUP], 1005);
    let others = [tried(&[LARGE], 1000)];
    check(&now, &others, Some(&now.candidate.conf));
}

#[test]
fn of_equals_the_quicker_is_chosen() {
    let mut slower = tried(&[ROUNDUP], 1000);
    slower.outcome.driver_time_us = 2000.0;
    let others = [slower, tried(&[LARGE], 1000)];
    check(&tried(&[], 2000), &others, Some("large_segment_size_mb:64"));
}

#[test]
fn what_fails_or_crawls_is_not_chosen() {
    let mut slow = tried(&[ROUNDUP], 500);
    slow.outcome.driver_time_us = 50e6;
    let refused = |tried: Tried| Tried {
        outcome: Outcome {
            completed: false,
            oom_at_event: Some(5),
            ..tried.outcome
        },
        ..tried
    };
    let now = refused(tried(&[], 400));
    let others = [slow.clone(), tried(&[EXPANDABLE], 1000)];
    check(&now, &others, Some("expandable_segments:True"));
    check(&now, &[slow, refused(tried(&[LARGE], 300))], None);
}

#[test]
fn defaults_are_advised_where_they_do_as_well() {
    let now = tried(&[ROUNDUP], 2000);
    check(&now, &[tried(&[], 1000), tried(&[LARGE], 1000)], Some(""));
}
