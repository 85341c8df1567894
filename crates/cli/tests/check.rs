//! `lowtide check`.

mod common;

use std::fs;

use common::{GPT2, HOSTILE, Scratch, fail, lowtide, printed, read_sample};

/// A small training with a leak.
const LEAK: &str = "../crates/cli/tests/data/leak.debian.pickle.gz";

/// Runs a check and returns what it prints.
fn check(arguments: &[&str], status: i32) -> String {
    printed(lowtide().arg("check").args(arguments), status)
}

#[test]
fn each_limit_has_a_line_and_a_verdict() {
    let kept = [
        (
            &["--max-allocated", "12.67GiB"][..],
            "peak live 12.66 GiB, at most 12.67 GiB allowed",
        ),
        (
            &["--max-reserved", "15GiB"],
            "peak reserved 14.21 GiB, at most 15.00 GiB allowed",
        ),
        (
            &["--max-fragmentation", "11%"],
            "10.9 % of the peak of reserved memory is above",
        ),
        (&["--no-leak"], "no leak: nothing grows steadily"),
        (&["--no-oom"], "0 requests ran out of memory"),
    ];
    for (limit, what) in kept {
        let text = check(&[limit, &[GPT2]].concat(), 0);
        assert!(
            text.starts_with(&format!("ok      {}  {GPT2}, device 0: {what}", limit[0])),
            "{text}"
        );
    }
    for limit in [
        &["--max-allocated", "12.66GB"][..],
        &["--max-reserved", "14.2GiB"],
        &["--max-fragmentation", "10.8 %"],
    ] {
        let text = check(&[limit, &[GPT2]].concat(), 1);
        assert!(
            text.starts_with(&format!("FAILED  {}  ", limit[0])),
            "{text}"
        );
    }
    let both = check(&["--no-leak", "--no-oom", LEAK], 1);
    assert!(
        both.contains("FAILED  --no-leak  ") && both.contains("\nok      --no-oom  "),
        "{both}"
    );
}

#[test]
fn what_is_not_known_to_leak_does_not_pass() {
    let scratch = Scratch::new("check-unknown");
    let mut snapshot = read_sample("mnist_mlp.pickle.zst");
    snapshot.traces[0].events.truncate(20);
    snapshot.traces[0].segments.clear();
    let path = scratch.write_snapshot("short.lowtide", &snapshot);
    let text = check(&["--no-leak", path.to_str().unwrap()], 1);
    assert!(
        text.starts_with("FAILED  --no-leak  ") && text.contains("too few to tell"),
        "{text}"
    );
}

#[test]
fn a_baseline_is_compared_within_the_tolerance() {
    let same = check(&["--against", GPT2, "--tolerance", "0%", GPT2], 0);
    assert_eq!(same.matches("ok      --against  ").count(), 2, "{same}");
    let pyenv = LEAK.replace("debian", "pyenv");
    let larger = check(&["--against", &pyenv, LEAK], 1);
    assert!(
        larger.contains("peak live 220.05 MiB, 188.05 MiB in the baseline, at most 2.0 % more"),
        "{larger}"
    );
    check(&["--against", &pyenv, "--tolerance", "20%", LEAK], 0);
    check(&["--against", LEAK, &pyenv], 0);
    let scratch = Scratch::new("check-devices");
    let mut snapshot = read_sample("mnist_mlp.pickle.zst");
    snapshot.traces[0].device = 3;
    let path = scratch.write_snapshot("third.lowtide", &snapshot);
    let path = path.to_str().unwrap();
    let error = fail(&["check", "--against", path, "mnist_mlp.pickle.zst"]);
    assert_eq!(
        error,
        "the baseline has no device 0, which mnist_mlp.pickle.zst has"
    );
}

#[test]
fn junit_has_each_check_and_escapes_names() {
    let scratch = Scratch::new("check-junit");
    let name = HOSTILE.replace('/', "");
    let recording = scratch.path(&name);
    fs::copy(common::sample("mnist_mlp.pickle.zst"), &recording).unwrap();
    let file = scratch.path("memory.xml");
    let [recording, file] = [&recording, &file].map(|path| path.to_str().unwrap());
    check(
        &[
            "--max-reserved",
            "1MiB",
            "--no-oom",
            "--junit",
            file,
            recording,
        ],
        1,
    );
    let xml = fs::read_to_string(file).unwrap();
    assert!(xml.starts_with("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"lowtide check\" tests=\"2\" failures=\"1\""), "{xml}");
    assert_eq!(xml.matches("<testcase ").count(), 2, "{xml}");
    assert!(
        xml.contains("<failure message=\"peak reserved 600.00 MiB, at most 1.00 MiB allowed\"/>"),
        "{xml}"
    );
    let is_control = |letter: char| letter.is_control() && letter != '\n';
    assert!(!xml.contains(is_control), "{xml}");
    assert!(
        !xml.contains("<script>") && xml.contains("&lt;script&gt;"),
        "{xml}"
    );
}

#[test]
fn each_mistake_has_its_line() {
    assert!(fail(&["check", GPT2]).starts_with("nothing to check: name a limit"));
    for (option, value) in [
        ("--max-reserved", "1.1x"),
        ("--max-fragmentation", "0.1"),
        ("--tolerance", "-1%"),
    ] {
        let option = format!("{option}={value}");
        assert!(
            fail(&["check", &option, GPT2]).starts_with("invalid value"),
            "{option}"
        );
    }
    assert!(fail(&["check", "--no-oom", "none.pickle"]).starts_with("none.pickle: "));
    let scratch = Scratch::new("check-mistakes");
    let recording = scratch.write(
        "job.pickle",
        fs::read(common::sample("mnist_mlp.pickle.zst")).unwrap(),
    );
    let path = recording.to_str().unwrap();
    let error = fail(&["check", "--no-oom", "--junit", path, path]);
    assert!(error.contains("is the recording itself"), "{error}");
}
