//! `lowtide doctor` on a machine with a driver, without one, and with one that fails.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Output;

use common::{Scratch, lowtide};
use serde_json::Value;

/// Returns the output of the command with the fake driver and these variables.
fn examine(test: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let scratch = Scratch::new(test);
    let driver = scratch.path("libcuda.so.1");
    symlink(fs::canonicalize(fakecuda::library_path()).unwrap(), &driver).unwrap();
    lowtide()
        .args(["doctor", "--without-python"])
        .args(arguments)
        .env("LD_LIBRARY_PATH", driver.parent().unwrap())
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn every_card_is_listed() {
    let output = examine("cards", &["--json"], &[("FAKECUDA_DEVICES", "2")]);
    assert_eq!(output.status.code(), Some(0));
    let report = report(&output);
    assert_eq!(report["works"], true);
    let checks = report["checks"].as_array().unwrap();
    let names: Vec<_> = checks
        .iter()
        .map(|check| check["name"].as_str().unwrap())
        .collect();
    let expected = [
        "driver",
        "card 0",
        "card 1",
        "card 0 virtual memory",
        "card 0 sharing",
        "card 0 GPUDirect RDMA",
        "card 1 virtual memory",
        "card 1 sharing",
        "card 1 GPUDirect RDMA",
        "peers",
    ];
    assert_eq!(names, expected);
    assert!(
        checks.iter().all(|check| check["state"] == "ok"),
        "{checks:?}"
    );
    assert!(
        checks[1]["found"].as_str().unwrap().contains("8.00 GiB"),
        "{checks:?}"
    );

    let text = examine("text", &[], &[]).stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("ok       driver"), "{text}");
}

#[test]
fn a_driver_that_does_not_start_is_missing() {
    let output = examine("start", &["--json"], &[("FAKECUDA_FAIL", "cuInit:1:999")]);
    assert_eq!(output.status.code(), Some(1));
    let report = report(&output);
    assert_eq!(report["works"], false);
    assert_eq!(report["checks"][0]["state"], "missing");
}

#[test]
fn what_was_found_before_a_failure_is_reported() {
    let output = examine(
        "failure",
        &["--json"],
        &[("FAKECUDA_FAIL", "cuDeviceGetAttribute:3:999")],
    );
    assert_eq!(output.status.code(), Some(1));
    let checks = report(&output)["checks"].as_array().unwrap().clone();
    let states: Vec<_> = checks
        .iter()
        .map(|check| (&check["name"], &check["state"]))
        .collect();
    assert_eq!(states[1], (&"card 0".into(), &"ok".into()));
    assert_eq!(states.last(), Some(&(&"cards".into(), &"missing".into())));
}
