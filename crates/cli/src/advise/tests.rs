use lowtide_core::Bytes;
use lowtide_replay::Outcome;

use super::advice::{Advice, Attempt, Tried};
use super::settings::{Candidate, Kept, Setting};
use super::{choose, report};
use crate::ranking::Ranking;
use crate::replays::Failure;
use crate::samples;

fn tried(settings: &[Setting], peak_mib: u64) -> Tried {
    let candidate = Candidate::new(settings.to_vec(), &Kept::default()).unwrap();
    let config = format!("caching:{}", candidate.conf);
    Tried {
        candidate,
        outcome: samples::outcome(&config, Bytes::mib(peak_mib)),
    }
}

fn attempt(Tried { candidate, outcome }: Tried) -> Attempt {
    let result = Ok(outcome);
    Attempt { candidate, result }
}

/// Returns the result with `tide`: 1 GiB, and 2 s of the job's 100 s in the driver.
fn tide() -> Result<Outcome, Box<Failure>> {
    Ok(Outcome {
        driver_time_us: 2e6,
        ..samples::outcome("tide", Bytes::gib(1))
    })
}

/// Asserts which configuration is chosen; `None` for none.
fn check(now: &Tried, others: &[Tried], expected: Option<&str>) {
    let ranking = Ranking::new(&samples::job(), Some(&now.outcome));
    let chosen = choose(ranking, Some(now), others);
    assert_eq!(chosen.map(|tried| tried.candidate.conf.raw()), expected);
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
    check(&now, &others, Some(now.candidate.conf.raw()));
}

#[test]
fn of_equals_the_quicker_is_chosen() {
    let mut slower = tried(&[ROUNDUP], 1000);
    slower.outcome.driver_time_us = 2000.0;
    let others = [slower, tried(&[LARGE], 1000)];
    check(&tried(&[], 2000), &others, Some("large_segment_size_mb:64"));
}

fn refused(tried: Tried) -> Tried {
    Tried {
        outcome: Outcome {
            completed: false,
            oom_at_event: Some(5),
            ..tried.outcome
        },
        ..tried
    }
}

/// Returns `tried` with this many seconds in the driver, of the job's 100 s.
fn in_driver(seconds: f64, tried: Tried) -> Tried {
    Tried {
        outcome: Outcome {
            driver_time_us: seconds * 1e6,
            ..tried.outcome
        },
        ..tried
    }
}

#[test]
fn what_fails_is_not_chosen_and_what_crawls_only_where_nothing_else_completes() {
    let slow = in_driver(50.0, tried(&[ROUNDUP], 500));
    let now = refused(tried(&[], 400));
    let others = [slow.clone(), tried(&[EXPANDABLE], 1000)];
    check(&now, &others, Some("expandable_segments:True"));
    let failing = refused(tried(&[LARGE], 300));
    check(
        &now,
        &[slow, failing.clone()],
        Some("roundup_power2_divisions:8"),
    );
    check(&now, &[failing], None);
}

#[test]
fn nothing_that_takes_more_is_chosen_however_long_it_takes_now() {
    let now = in_driver(50.0, tried(&[], 1000));
    check(&now, &[tried(&[LARGE], 1110)], Some(""));
    let others = [
        tried(&[LARGE], 1110),
        in_driver(60.0, tried(&[ROUNDUP], 900)),
    ];
    check(&now, &others, Some("roundup_power2_divisions:8"));
    let slower = in_driver(80.0, tried(&[ROUNDUP], 900));
    check(&now, &[tried(&[LARGE], 1110), slower], Some(""));
}

#[test]
fn defaults_are_advised_where_they_do_as_well() {
    let now = tried(&[ROUNDUP], 2000);
    check(&now, &[tried(&[], 1000), tried(&[LARGE], 1000)], Some(""));
}

#[test]
fn what_takes_less_and_is_passed_over_is_said_to_be_slow() {
    let job = samples::job();
    let check = |others: Vec<Tried>, expected: &str| {
        let now = tried(&[], 1000);
        let advice = Advice {
            job: &job,
            capacity: None,
            limit: None,
            best: Some(now.clone()),
            now: attempt(now),
            others,
            tide: tide(),
        };
        let text = report::text(&advice);
        assert!(text.contains(expected), "{text}");
    };
    let best = "That is about the best that PyTorch's allocator can do: keep it.";
    check(
        vec![refused(tried(&[LARGE], 500)), tried(&[ROUNDUP], 995)],
        best,
    );
    let slow = in_driver(50.0, tried(&[ROUNDUP], 500));
    check(
        vec![slow],
        "What takes less would slow the job down: keep it.",
    );
}

#[test]
fn what_is_slow_and_advised_says_so() {
    let job = samples::job();
    let slow = in_driver(50.0, tried(&[ROUNDUP], 500));
    let advice = Advice {
        job: &job,
        capacity: None,
        limit: None,
        now: attempt(refused(tried(&[], 400))),
        best: Some(slow),
        others: Vec::new(),
        tide: tide(),
    };
    let text = report::text(&advice);
    assert!(
        text.contains("\n  driver calls would take 50 % of the job's time\n"),
        "{text}"
    );
}

#[test]
fn what_cannot_be_replayed_now_is_said_and_the_others_are_compared() {
    let job = samples::job();
    let candidate = tried(&[], 1000).candidate;
    let failure = samples::failure("caching");
    let reason = failure.error.to_string();
    let best = tried(&[EXPANDABLE], 1100);
    let ranking = Ranking::new(&job, None);
    let others = [best.clone(), tried(&[ROUNDUP], 1500)];
    let chosen = choose(ranking, None, &others).map(|tried| &tried.candidate.conf);
    assert_eq!(chosen, Some(&best.candidate.conf));
    let advice = Advice {
        job: &job,
        capacity: None,
        limit: None,
        now: Attempt {
            candidate,
            result: Err(Box::new(failure)),
        },
        best: Some(best),
        others: vec![tried(&[ROUNDUP], 1500)],
        tide: tide(),
    };
    let text = report::text(&advice);
    let now = format!("With PyTorch's default settings this job cannot be replayed: {reason}.");
    assert!(text.contains(&now), "{text}");
    assert!(text.contains("lets it complete, in 1.07 GiB"), "{text}");
    let json = serde_json::to_value(report::Json::new(&advice)).unwrap();
    assert_eq!(json["now"]["error"], reason);
    assert_eq!(json["now"]["completed"], false);
    assert_eq!(json["saved_bytes"], serde_json::Value::Null);
}

#[test]
fn what_tide_takes_is_said_beside_the_advice() {
    let job = samples::job();
    let check = |tide, expected: &str| {
        let advice = Advice {
            job: &job,
            capacity: None,
            limit: None,
            now: attempt(tried(&[], 2000)),
            best: Some(tried(&[EXPANDABLE], 1100)),
            others: Vec::new(),
            tide,
        };
        let text = report::text(&advice);
        assert!(text.contains(expected), "{text}");
        serde_json::to_value(report::Json::new(&advice)).unwrap()["tide"].clone()
    };
    let json = check(
        tide(),
        "\nWith lowtide's `tide` this job takes 1.00 GiB, 1.000 times its peak of live bytes; driver calls take 2.0 % of \
         the job's time:\n\n    lowtide run SCRIPT\n",
    );
    assert_eq!(json["peak_reserved_bytes"], 1u64 << 30);
    let json = check(
        Ok(samples::refused("tide", 1234)),
        "\nWith lowtide's `tide` this job runs out of memory at event 1,234.\n",
    );
    assert_eq!(json["completed"], false);
    let failure = samples::failure("tide");
    let reason = failure.error.to_string();
    let json = check(
        Err(Box::new(failure)),
        &format!("\nWith lowtide's `tide` this job cannot be replayed: {reason}.\n"),
    );
    assert_eq!(json["error"], reason);
}
