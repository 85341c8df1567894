//! `lowtide leaks` and `lowtide diff`.

mod common;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use common::{GPT2, Scratch, fail, lowtide, read_sample, run, run_json, stderr, without_beginning};
use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, SegmentSnapshot,
    Stream,
};
use lowtide_trace::{Frame, NoteId, RecordedStr, Snapshot, StackId, StackTable, Trace, TraceEvent};

const MIB: u64 = 1 << 20;

/// Writes a recording of 20 steps of 100 requests. Each step keeps `leak_bytes`, if that is not zero.
fn job(scratch: &Scratch, name: &str, leak_bytes: u64) -> PathBuf {
    edited_job(scratch, name, leak_bytes, 0)
}

/// Writes such a recording of a program with `lines_added` at its top.
fn edited_job(scratch: &Scratch, name: &str, leak_bytes: u64, lines_added: u32) -> PathBuf {
    job_of_requests(scratch, name, 100, leak_bytes, lines_added)
}

/// Writes such a recording with this many `requests` in each step, which come from 100 call sites.
fn job_of_requests(
    scratch: &Scratch,
    name: &str,
    requests: u64,
    leak_bytes: u64,
    lines_added: u32,
) -> PathBuf {
    let mut stacks = StackTable::new();
    let frame = |name, line: u32| Frame {
        name: RecordedStr::from(name),
        filename: "train.py".into(),
        line: line + lines_added,
    };
    let leak = stacks.intern([frame("keep_history", 77), frame("main", 1)]);
    let work: Vec<StackId> = (0..100)
        .map(|line| stacks.intern([frame("forward", line)]))
        .collect();
    let mut trace = Trace::default();
    let mut push = |action, address: u64, size: u64, stack| {
        trace.events.push(recorded(action, address, size, stack));
    };
    push(Action::SegmentAlloc, 1 << 30, 1 << 40, StackId::NONE);
    for step in 0..20 {
        let address = |request: u64| (1 << 30) + request * MIB;
        for (request, &stack) in (0..requests).zip(work.iter().cycle()) {
            push(Action::Alloc, address(request), MIB, stack);
        }
        if leak_bytes > 0 {
            let place = 10 * requests * (step + 1);
            push(Action::Alloc, address(place), leak_bytes, leak);
        }
        for request in 0..requests {
            push(Action::FreeRequested, address(request), MIB, StackId::NONE);
            push(Action::FreeCompleted, address(request), MIB, StackId::NONE);
        }
    }
    trace.stacks = std::sync::Arc::new(stacks);
    let snapshot = Snapshot {
        traces: vec![trace],
        ..Snapshot::default()
    };
    scratch.write_snapshot(name, &snapshot)
}

/// Without arguments, PyTorch records C++ and Python functions mixed.
#[test]
fn pytorchs_default_stacks_name_the_programs_line() {
    let recordings = [
        "leak.debian",
        "leak.pyenv",
        "leak.torch2.1.2",
        "leak.torch2.3.1",
        "leak.torch2.15.0",
    ];
    for name in recordings {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        let path = directory.join(format!("{name}.pickle.gz"));
        let text = run(&["leaks".as_ref(), path.as_os_str()]);
        let expected = "\n    remember  /app/train.py:33 › clone\n    \
                        train  /app/train.py:43\n    \
                        main  /app/train.py:54\n    \
                        <module>  /app/train.py:58\n    … ";
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_leak_is_named_with_its_stack() {
    let scratch = Scratch::new("leaks");
    let path = job(&scratch, "leaks.lowtide", MIB);
    let text = run(&["leaks".as_ref(), path.as_os_str()]);
    let expected = " are left out\n\n\
                    1 call site grows from step to step, by 1.00 MiB a step, with confidence 1.00\n\n\
                    1.00 MiB a step: 14.00 MiB in all, grew in 14 of 14 steps, confidence 1.00; \
                    20.00 MiB in 20 blocks at the end\n    keep_history  train.py:77\n    main  train.py:1\n";
    assert!(text.contains(expected), "{text}");
    let json = run_json(&["leaks".as_ref(), path.as_os_str(), "--json".as_ref()]);
    let leaks = json["leaks"].as_array().unwrap();
    assert_eq!(leaks.len(), 1);
    assert_eq!(leaks[0]["bytes_per_step"], 1_048_576.0);
    assert_eq!(leaks[0]["stack"][0]["function"], "keep_history");
    assert_eq!(json["total"]["sites"], 1);
    assert_eq!(json["total"]["common"], serde_json::Value::Null);
    assert_eq!(json["steps"]["found_by"], "period");
    assert_eq!(json["others"], serde_json::json!([]));
}

/// A step of a large model makes thousands of requests, each as large as the memory that the step leaks.
#[test]
fn a_leak_among_thousands_of_requests_a_step_is_named() {
    let scratch = Scratch::new("leaks-thousands");
    let path = job_of_requests(&scratch, "leaks.lowtide", 5000, MIB, 0);
    let text = run(&["leaks".as_ref(), path.as_os_str()]);
    let expected = "\n\n1 call site grows from step to step, by 1.00 MiB a step, with confidence 1.00\n\n\
                    1.00 MiB a step: 14.00 MiB in all, grew in 14 of 14 steps, confidence 1.00; \
                    20.00 MiB in 20 blocks at the end\n    keep_history  train.py:77\n    main  train.py:1\n";
    assert!(text.contains(expected), "{text}");
    let json = run_json(&["leaks".as_ref(), path.as_os_str(), "--json".as_ref()]);
    assert_eq!(json["leaks"].as_array().unwrap().len(), 1);
    assert_eq!(json["leaks"][0]["stack"][0]["function"], "keep_history");
    assert_eq!(json["steps"]["found_by"], "period");
    assert_eq!(json["others"], serde_json::json!([]));
    require_leak_in_page(&path);
}

/// Writes a recording of 20 steps. Each step keeps a block for each of `keeps`, which are stacks with sizes, and
/// makes 100 requests that it frees.
fn keeping_job(scratch: &Scratch, name: &str, keeps: &[(&[Frame<'_>], u64)]) -> PathBuf {
    let mut stacks = StackTable::new();
    let kept: Vec<(StackId, u64)> = keeps
        .iter()
        .map(|&(stack, size)| match stack {
            [] => (StackId::NONE, size),
            _ => (stacks.intern(stack.iter().copied()), size),
        })
        .collect();
    let work: Vec<StackId> = (0..100)
        .map(|line| stacks.intern([frame("forward", "train.py", line)]))
        .collect();
    let mut trace = Trace::default();
    let mut push = |action, address: u64, size: u64, stack| {
        trace.events.push(recorded(action, address, size, stack));
    };
    push(Action::SegmentAlloc, 1 << 40, 1 << 42, StackId::NONE);
    for step in 0..20 {
        for (request, &stack) in (0..).zip(&work) {
            push(Action::Alloc, (1 << 40) + request * MIB, MIB, stack);
        }
        for (place, &(stack, size)) in (0..).zip(&kept) {
            let number = 1 + step * kept.len() as u64 + place;
            push(Action::Alloc, (1 << 40) + number * 1024 * MIB, size, stack);
        }
        for request in 0..100 {
            let address = (1 << 40) + request * MIB;
            push(Action::FreeRequested, address, MIB, StackId::NONE);
            push(Action::FreeCompleted, address, MIB, StackId::NONE);
        }
    }
    trace.stacks = std::sync::Arc::new(stacks);
    let snapshot = Snapshot {
        traces: vec![trace],
        ..Snapshot::default()
    };
    scratch.write_snapshot(name, &snapshot)
}

fn frame<'a>(name: &'a str, filename: &'a str, line: u32) -> Frame<'a> {
    Frame {
        name: name.into(),
        filename: filename.into(),
        line,
    }
}

/// A program that leaks at several lines of one function, below many frames of PyTorch's modules. The frames that
/// differ and the frames that the leaks share are the program's own.
#[test]
fn leaks_of_one_function_are_summed_and_their_own_code_is_seen() {
    let scratch = Scratch::new("leaks-function");
    let module = "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py";
    let stacks: Vec<Vec<Frame<'_>>> = (0..16)
        .map(|line| {
            let library = (0..12).map(|line| frame("_call_impl", module, line));
            let own = [
                frame("keep", "/app/model.py", 30 + line),
                frame("main", "/app/train.py", 120),
            ];
            library.chain(own).collect()
        })
        .collect();
    let keeps: Vec<(&[Frame<'_>], u64)> = stacks.iter().map(|stack| (&**stack, MIB)).collect();
    let path = keeping_job(&scratch, "function.lowtide", &keeps);
    let text = run(&["leaks".as_ref(), path.as_os_str()]);
    let expected = "\n\n16 call sites grow from step to step, by 16.00 MiB a step, with confidence 1.00\n\
                    all in keep  /app/model.py\n\n1.00 MiB a step: ";
    assert!(text.contains(expected), "{text}");
    let expected = "    keep  /app/model.py:37 › _call_impl (modules/module.py:0)\n    \
                    main  /app/train.py:120\n    … 11 frames left out\n";
    assert!(text.contains(expected), "{text}");
    let json = run_json(&["leaks".as_ref(), path.as_os_str(), "--json".as_ref()]);
    assert_eq!(json["total"]["sites"], 16);
    assert_eq!(json["total"]["bytes_per_step"], 16.0 * 1_048_576.0);
    let common = serde_json::json!({"function": "keep", "file": "/app/model.py", "line": null});
    assert_eq!(json["total"]["common"], common);
    assert_eq!(json["leaks"][0]["stack"].as_array().unwrap().len(), 14);
    let nothing = keeping_job(&scratch, "nothing.lowtide", &[]);
    let text = run(&["diff".as_ref(), nothing.as_os_str(), path.as_os_str()]);
    for line in 30..46 {
        let own = format!("    keep  /app/model.py:{line} › ");
        assert_eq!(text.matches(&own).count(), 1, "{text}");
    }
}

/// Without stacks, the size is the only name of a call site.
#[test]
fn sizes_are_shown_as_they_were_asked_for() {
    let scratch = Scratch::new("leaks-sizes");
    let one = keeping_job(&scratch, "one.lowtide", &[(&[], 130 * MIB)]);
    let text = run(&["leaks".as_ref(), one.as_os_str()]);
    let expected = "\n    requests of 130.00 MiB in stream 0 (no stack is recorded)\n";
    assert!(text.contains(expected), "{text}");
    let json = run_json(&["leaks".as_ref(), one.as_os_str(), "--json".as_ref()]);
    assert_eq!(json["leaks"][0]["size_min_bytes"], 130 * MIB);
    assert_eq!(json["leaks"][0]["size_max_bytes"], 130 * MIB);
    let keeps: [(&[Frame<'_>], u64); 2] = [(&[], 130 * MIB), (&[], 140 * MIB)];
    let two = keeping_job(&scratch, "two.lowtide", &keeps);
    let text = run(&["leaks".as_ref(), two.as_os_str()]);
    let expected =
        "\n    requests of 130.00 MiB to 140.00 MiB in stream 0 (no stack is recorded)\n";
    assert!(text.contains(expected), "{text}");
    // Two classes whose sizes differ by less than the short text shows.
    let keeps: [(&[Frame<'_>], u64); 2] = [(&[], 128 * MIB), (&[], 128 * MIB + 4)];
    let alike = keeping_job(&scratch, "alike.lowtide", &keeps);
    let text = run(&["leaks".as_ref(), alike.as_os_str()]);
    for bytes in ["134,217,728", "134,217,732"] {
        let expected =
            format!("    requests of {bytes} bytes in stream 0 (no stack is recorded)\n");
        assert!(text.contains(&expected), "{text}");
    }
}

/// Writes a recording in which each part makes other requests. One request in ten is kept, if `keeps`.
fn job_without_steps(scratch: &Scratch, keeps: bool) -> PathBuf {
    let mut trace = Trace::default();
    trace
        .events
        .push(recorded(Action::SegmentAlloc, MIB, 1 << 40, StackId::NONE));
    for request in 0..400 {
        let address = (1 + 1000 * request) * MIB;
        let size = if keeps && request % 10 == 0 {
            MIB
        } else {
            2 * MIB + 512 * request
        };
        let work = |action| recorded(action, address, size, StackId::NONE);
        trace.events.push(work(Action::Alloc));
        if !keeps || request % 10 != 0 {
            trace.events.push(work(Action::FreeRequested));
            trace.events.push(work(Action::FreeCompleted));
        }
    }
    let snapshot = Snapshot {
        traces: vec![trace],
        ..Snapshot::default()
    };
    scratch.write_snapshot(&format!("parts-{keeps}.lowtide"), &snapshot)
}

/// A part is not called a step, and the absence of growth from part to part is no proof.
#[test]
fn growth_where_no_steps_are_found_is_reported_for_a_part() {
    let scratch = Scratch::new("leaks-parts");
    let path = job_without_steps(&scratch, false);
    let text = run(&["leaks".as_ref(), path.as_os_str()]);
    let expected =
        "nothing grows steadily from part to part; record more steps, or mark them, to be sure";
    assert!(
        text.contains(expected) && !text.contains("no leak"),
        "{text}"
    );
    let path = job_without_steps(&scratch, true);
    let text = run(&["leaks".as_ref(), path.as_os_str()]);
    assert!(text.contains("steps were not found"), "{text}");
    let expected = "1.00 MiB in 1/40 of the recording: 29.00 MiB in all, grew in 29 of 29 parts";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn the_page_names_the_leak_too() {
    let scratch = Scratch::new("leaks-page");
    require_leak_in_page(&job(&scratch, "leaks.lowtide", MIB));
}

/// Asserts that the page's first leak is the recording's leak of 1 MiB a step.
fn require_leak_in_page(path: &Path) {
    let page = run(&[
        "report".as_ref(),
        path.as_os_str(),
        "-o".as_ref(),
        "-".as_ref(),
    ]);
    let (_, leaks) = page
        .split_once(r#""leaks":["#)
        .expect("the page has a list of leaks");
    let leak = r#"{"bytes":14680064,"bytes_per_step":1048576.0,"grown_steps":14,"steps":14,"times_given_back":0,"#;
    assert!(leaks.starts_with(leak), "{}", &leaks[..200]);
}

#[test]
fn a_job_without_a_leak_is_not_accused() {
    let text = run(&["leaks", GPT2]);
    assert!(text.contains("Optimizer.step#AdamW.step"), "{text}");
    assert!(text.contains("no leak: nothing grows steadily"), "{text}");
    assert_eq!(
        run_json(&["leaks", GPT2, "--json"])["leaks"],
        serde_json::json!([])
    );
}

#[test]
fn a_lost_beginning_is_said_beside_what_grew() {
    let scratch = Scratch::new("leaks-lost");
    let path = scratch.write_snapshot("cut.lowtide", &without_beginning(GPT2, 20_000));
    let path = path.to_str().unwrap();
    let whole = job(&scratch, "whole.lowtide", 0);
    let note = " blocks were there before its first event, for longer than is known, and what was there before that \
                is in no peak\n";
    for (arguments, notes) in [
        (vec!["leaks", path], 1),
        (vec!["diff", path, whole.to_str().unwrap()], 1),
        (vec!["diff", path, path], 2),
    ] {
        let output = lowtide().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        let text = stderr(&output);
        assert!(text.starts_with(&format!(
            "lowtide: {path}: the recording's beginning is missing: "
        )));
        assert_eq!(text.matches(note).count(), notes, "{text}");
    }
}

/// A program that reads the JSON does not see standard error.
#[test]
fn a_missing_end_is_in_the_json() {
    let scratch = Scratch::new("leaks-missing-end");
    let whole = job(&scratch, "whole.lowtide", MIB);
    let mut contents = fs::read(&whole).unwrap();
    contents.truncate(contents.len() - 100);
    let cut_off = scratch.write("cut-off.lowtide", contents);
    let mut snapshot = read_sample("mnist_mlp.pickle.zst");
    let events = &mut snapshot.traces[0].events;
    let is_alloc = |event: &TraceEvent| event.event.action == Action::Alloc;
    // The segments are newer than the events, as if other threads had gone on while PyTorch copied one after the
    // other.
    events.truncate(events.iter().rposition(is_alloc).unwrap());
    let missed = scratch.write_snapshot("missed.lowtide", &snapshot);

    let json = |arguments: &[&OsStr]| -> serde_json::Value {
        // The command reports it on standard error, too.
        let output = lowtide().args(arguments).arg("--json").output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let ends = |recording: &serde_json::Value| {
        let is_cut_off = recording["is_cut_off"].as_bool().unwrap();
        (is_cut_off, recording["missed_events"].as_u64().unwrap() > 0)
    };
    let [whole, cut_off, missed] = [&whole, &cut_off, &missed].map(|path| path.as_os_str());
    let expected = [
        (whole, (false, false)),
        (cut_off, (true, false)),
        (missed, (false, true)),
    ];
    for (path, expected) in expected {
        let leaks = json(&["leaks".as_ref(), path]);
        assert_eq!(ends(&leaks["trace"]), expected);
        let traces = &json(&["diff".as_ref(), whole, path])["traces"];
        let both = [ends(&traces[0]), ends(&traces[1])];
        assert_eq!(both, [(false, false), expected]);
    }
}

#[test]
fn a_few_events_are_reported_as_too_few() {
    let scratch = Scratch::new("leaks-few");
    let trace = Trace {
        events: vec![
            recorded(Action::SegmentAlloc, 1 << 30, 2 * MIB, StackId::NONE),
            recorded(Action::Alloc, 1 << 30, MIB, StackId::NONE),
        ],
        // The blocks left at the end: without them, frees might be missing.
        segments: vec![SegmentSnapshot {
            address: DeviceAddress(1 << 30),
            size: Bytes(2 * MIB),
            stream: Stream::DEFAULT,
            pool: MempoolId::DEFAULT,
            is_large: false,
            is_expandable: false,
            blocks: [BlockStatus::Allocated, BlockStatus::Inactive]
                .into_iter()
                .zip(0..)
                .map(|(status, place)| BlockSnapshot {
                    address: DeviceAddress((1 << 30) + place * MIB),
                    size: Bytes(MIB),
                    requested: Bytes(MIB),
                    status,
                })
                .collect(),
        }],
        ..Trace::default()
    };
    let snapshot = Snapshot {
        traces: vec![trace],
        ..Snapshot::default()
    };
    let path = scratch.write_snapshot("few.lowtide", &snapshot);
    let path = path.to_str().unwrap();
    let text = run(&["leaks", path]);
    assert!(
        text.contains("it is not known what grows: 2 events are too few"),
        "{text}"
    );
    assert!(!text.contains("no leak"), "{text}");
    assert_eq!(run_json(&["leaks", path, "--json"])["are_too_few"], true);
    assert_eq!(run_json(&["leaks", GPT2, "--json"])["are_too_few"], false);
}

/// Each step keeps memory at another call site.
#[test]
fn growth_in_many_places_is_reported_with_those_that_grew_most() {
    let scratch = Scratch::new("spread");
    let path = job(&scratch, "leaks.lowtide", MIB);
    let mut snapshot = lowtide_trace::read(&path).unwrap();
    let trace = &mut snapshot.traces[0];
    let keeps = |event: &&mut TraceEvent| event.event.address.0 >= (1 << 30) + 1000 * MIB;
    let places: Vec<StackId> = trace.events.iter().map(|event| event.stack).collect();
    let allocs = trace.events.iter_mut().filter(keeps);
    for (event, &place) in allocs.zip(places.iter().filter(|place| **place != StackId::NONE)) {
        event.stack = place;
    }
    let path = scratch.write_snapshot("spread.lowtide", &snapshot);
    let text = run(&["leaks".as_ref(), path.as_os_str()]);
    let expected = "no call site grows steadily, but all that is live does, from step 5 to step 19:\n\
                    1.00 MiB a step: 14.00 MiB in all, grew in 14 of 14 steps, confidence 1.00; \
                    20.00 MiB in 20 blocks at the end\n\
                    spread over 14 call sites, of which grew most:\n\n";
    assert!(text.contains(expected), "{text}");
    assert!(!text.contains("no leak"), "{text}");
    assert_eq!(text.matches("    forward  train.py:").count(), 3, "{text}");
    let json = run_json(&["leaks".as_ref(), path.as_os_str(), "--json".as_ref()]);
    assert_eq!(json["leaks"], serde_json::json!([]));
    assert_eq!(json["spread"]["bytes"], 14 * MIB);
    assert_eq!(json["others"].as_array().unwrap().len(), 14);
    let paths = ["report".as_ref(), path.as_os_str(), "-o".as_ref()];
    let page = run(&[&paths[..], &["-".as_ref()]].concat());
    let (_, spread) = page.split_once(r#""leaks":[],"spread":"#).unwrap();
    assert!(
        spread.starts_with(r#"{"bytes":14680064,"#),
        "{}",
        &spread[..200]
    );
    assert!(spread.contains(r#""is_steady":true,"sites":14,"most":[{"bytes":1048576,"#));
}

#[test]
fn a_difference_is_named_with_its_stack() {
    let scratch = Scratch::new("diff");
    let before = job(&scratch, "before.lowtide", 0);
    let after = job(&scratch, "after.lowtide", MIB);
    let text = run(&["diff".as_ref(), before.as_os_str(), after.as_os_str()]);
    let expected = "+20.00 MiB: 0 bytes → 20.00 MiB in 0 → 20 blocks; asks for 0 bytes → \
                    1.00 MiB a step; confidence 1.00\n    keep_history  train.py:77\n";
    assert!(text.contains(expected), "{text}");
    assert!(text.ends_with("+20.00 MiB in all\n"), "{text}");
    let json = difference(&before, &after);
    assert_eq!(json["sites"][0]["growth_bytes"], 20 << 20);
    assert_eq!(json["sites"][0]["stack"][0]["line"], 77);
    let requested = serde_json::json!([0.0, 1_048_576.0]);
    assert_eq!(json["sites"][0]["requested_bytes_per_step"], requested);
    assert_eq!(json["sites"].as_array().unwrap().len(), 1, "what changed");
    let expected = serde_json::json!({
        "growth_bytes": 20 * MIB,
        "peak_bytes": [100 * MIB, 120 * MIB],
        "peak_blocks": [100, 120],
        "changed_sites": 1,
        "unchanged_sites": 100,
    });
    assert_eq!(json["total"], expected);
    assert!(!text.contains("lines"), "{text}");
    let same = run(&["diff", GPT2, GPT2]);
    assert!(same.ends_with("+0 bytes in all\n"), "{same}");
}

#[test]
fn a_difference_is_named_though_the_code_moved() {
    let scratch = Scratch::new("moved");
    let before = job(&scratch, "before.lowtide", MIB);
    for lines_added in [1, 3, 200] {
        let after = edited_job(&scratch, "after.lowtide", 3 * MIB, lines_added);
        let paths = [before.as_os_str(), after.as_os_str()];
        let text = run(&["diff".as_ref(), paths[0], paths[1]]);
        let expected = format!(
            "+40.00 MiB: 20.00 MiB → 60.00 MiB in 20 → 20 blocks; asks for 1.00 MiB → 3.00 MiB a step; \
             confidence 0.70; at other lines in the first\n    keep_history  train.py:{}\n",
            77 + lines_added
        );
        assert!(text.contains(&expected), "{text}");
        let expected = "\n101 call sites matched by file and function: the code is at other lines in the second \
                        recording\n+40.00 MiB in all\n";
        assert!(text.ends_with(expected), "{text}");
        let json = difference(&before, &after);
        let sites = json["sites"].as_array().unwrap();
        assert_eq!(sites.len(), 1);
        assert_eq!(sites[0]["lines_differ"], true);
        assert_eq!(json["total"]["unchanged_sites"], 100);
    }
}

/// Two recordings of one job, one with stacks and one without.
#[test]
fn stacks_in_one_recording_only_are_no_difference() {
    let scratch = Scratch::new("diff-stacks");
    let with = job(&scratch, "with.lowtide", MIB);
    let mut snapshot = lowtide_trace::read(&with).unwrap();
    for event in &mut snapshot.traces[0].events {
        event.stack = StackId::NONE;
    }
    let without = scratch.write_snapshot("without.lowtide", &snapshot);
    for (before, after, only) in [
        (&with, &without, Some("first")),
        (&without, &with, Some("second")),
        (&without, &without, None),
        (&with, &with, None),
    ] {
        let text = run(&["diff".as_ref(), before.as_os_str(), after.as_os_str()]);
        assert!(text.ends_with("\n+0 bytes in all\n"), "{text}");
        let expected = only.map_or_else(String::new, |only| {
            format!("\nonly the {only} recording has stacks, so both are compared by size\n")
        });
        assert!(text.contains(&expected), "{text}");
        assert_eq!(text.contains("compared by size"), only.is_some(), "{text}");
        let json = difference(before, after);
        let has_stacks = [before, after].map(|path| path == &with);
        assert_eq!(json["has_stacks"], serde_json::json!(has_stacks));
        assert_eq!(json["sites"], serde_json::json!([]));
        assert_eq!(json["total"]["growth_bytes"], 0);
    }
}

#[test]
fn what_is_paused_counts_in_no_peak() {
    let scratch = Scratch::new("paused-peak");
    let mut trace = Trace::default();
    let events = [
        (Action::SegmentAlloc, 100, 30),
        (Action::SegmentAlloc, 200, 50),
        (Action::Alloc, 100, 30),
        (Action::SegmentPaused, 100, 30),
        (Action::Alloc, 200, 40),
        (Action::FreeRequested, 200, 40),
        (Action::FreeCompleted, 200, 40),
        (Action::SegmentResumed, 100, 30),
    ];
    let in_mib =
        |(action, address, size)| recorded(action, address * MIB, size * MIB, StackId::NONE);
    trace.events = events.map(in_mib).to_vec();
    let snapshot = Snapshot {
        traces: vec![trace],
        ..Snapshot::default()
    };
    let path = scratch.write_snapshot("paused.lowtide", &snapshot);
    let text = run(&["leaks".as_ref(), path.as_os_str()]);
    assert!(
        text.contains("\npeak live 40.00 MiB, peak reserved 80.00 MiB (2.00 times that)"),
        "{text}"
    );
    let json = difference(&path, &path);
    for recording in json["traces"].as_array().unwrap() {
        assert_eq!(recording["peak_live_bytes"], 40 * MIB);
        assert_eq!(recording["peak_requested_bytes"], 40 * MIB);
    }
    assert_eq!(
        json["total"]["peak_bytes"],
        serde_json::json!([40 * MIB, 40 * MIB])
    );
    assert_eq!(json["total"]["unchanged_sites"], 1);
}

#[test]
fn the_reason_for_other_reserved_memory_has_its_direction() {
    let scratch = Scratch::new("diff-reason");
    let write = |name: &str, segment: u64, block: u64, conf: &str| {
        let mut trace = Trace::default();
        trace.settings.conf = conf.into();
        let events = [
            (Action::SegmentAlloc, segment),
            (Action::Alloc, block),
            (Action::FreeRequested, block),
            (Action::FreeCompleted, block),
        ];
        let in_mib = |(action, size)| recorded(action, 100 * MIB, size * MIB, StackId::NONE);
        trace.events = events.map(in_mib).to_vec();
        let traces = vec![trace];
        let snapshot = Snapshot {
            traces,
            ..Snapshot::default()
        };
        scratch.write_snapshot(&format!("{name}.lowtide"), &snapshot)
    };
    let base = write("base", 100, 90, "");
    let collects = "garbage_collection_threshold:0.9";
    for (name, segment, block, conf, reason) in [
        ("same", 100, 90, "", "no change"),
        (
            "live",
            200,
            190,
            "",
            "100.00 MiB more is live at that moment",
        ),
        ("less", 50, 45, "", "45.00 MiB less is live at that moment"),
        (
            "waste",
            200,
            80,
            "",
            "split remainders 10.00 MiB → 120.00 MiB",
        ),
        (
            "settings",
            200,
            90,
            collects,
            "garbage_collection_threshold:0.9 instead of PyTorch's default settings",
        ),
        (
            "both",
            200,
            190,
            collects,
            "100.00 MiB more is live at that moment",
        ),
    ] {
        let other = write(name, segment, block, conf);
        assert_eq!(difference(&base, &other)["reason"], reason, "{name}");
    }
}

/// Every field has a line in the documentation.
#[test]
fn the_fields_are_documented() {
    let scratch = Scratch::new("fields");
    let path = keeping_job(&scratch, "job.lowtide", &[(&[], 130 * MIB)]);
    let nothing = keeping_job(&scratch, "nothing.lowtide", &[]);
    let docs = include_str!("../../../docs/json.md");
    let leaks = run_json(&["leaks".as_ref(), path.as_os_str(), "--json".as_ref()]);
    for mut values in [vec![leaks], vec![difference(&nothing, &path)]] {
        while let Some(value) = values.pop() {
            for (field, value) in value.as_object().into_iter().flatten() {
                let is_named = docs.contains(&format!("`{field}`"))
                    || docs.contains(&format!(".{field}`"))
                    || docs.contains(&format!("`sites[].{field}`"));
                assert!(is_named, "{field}");
                values.push(value.clone());
            }
            values.extend(value.as_array().into_iter().flatten().cloned());
        }
    }
}

/// Returns the JSON of `lowtide diff` about two recordings.
fn difference(before: &Path, after: &Path) -> serde_json::Value {
    let [before, after] = [before, after].map(Path::as_os_str);
    run_json(&["diff".as_ref(), before, after, "--json".as_ref()])
}

/// Returns a recorded event of the default pool and stream.
fn recorded(action: Action, address: u64, size: u64, stack: StackId) -> TraceEvent {
    let event = Event {
        action,
        pool: MempoolId::DEFAULT,
        address: DeviceAddress(address),
        size: Bytes(size),
        stream: Stream::DEFAULT,
    };
    TraceEvent {
        event,
        time_us: 0,
        stack,
        pool_known: true,
        note: NoteId::NONE,
    }
}

#[test]
fn what_is_missing_is_said_in_one_line() {
    let check = |arguments: &[&str], expected: &str| assert_eq!(fail(arguments), expected);
    check(
        &["leaks"],
        "the following required arguments were not provided: <TRACE>",
    );
    check(
        &["diff", "-", "-"],
        "- is standard input, which can be read once",
    );
    check(
        &["diff", GPT2],
        "the following required arguments were not provided: <AFTER>",
    );
    check(
        &["diff", GPT2, "none.pickle"],
        "none.pickle: No such file or directory (os error 2)",
    );
    check(
        &["leaks", GPT2, "--device", "3"],
        "gpt2_train.pickle.zst: has no device 3, only 0",
    );
}
