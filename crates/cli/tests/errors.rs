//! The command's messages about bad arguments and bad files: one line, and exit code 2.

mod common;

use std::fs;

use common::{GPT2, Scratch, fail, lowtide, read_sample, run, sample, stderr};
use lowtide_core::Action;
use lowtide_trace::TraceEvent;

#[test]
fn each_bad_argument_has_its_line() {
    let check = |arguments: &str, expected: &str| {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        assert_eq!(fail(&arguments), expected, "{arguments:?}");
    };
    check(
        "replai",
        "unrecognized subcommand 'replai'; tip: a similar subcommand exists: 'replay'",
    );
    check(
        "replay",
        "the following required arguments were not provided: <TRACE>",
    );
    check(
        "convert in",
        "the following required arguments were not provided: <OUT>",
    );
    check("replay a b", "unexpected argument 'b' found");
    check(
        "replay a --verfy",
        "unexpected argument '--verfy' found; tip: a similar argument exists: '--verify'",
    );
    check("advise a --html b", "unexpected argument '--html' found");
    check(
        "replay a --strategy",
        "a value is required for '--strategy <NAME[:CONF]>' but none was supplied",
    );
    check(
        "replay a --strategy best",
        "invalid value 'best' for '--strategy <NAME[:CONF]>': Unknown strategy 'best', options are \
         direct, pool, buddy, slab, bfc, caching, tide",
    );
    check(
        "replay a --strategy caching:expandable_segments:true",
        "invalid value 'caching:expandable_segments:true' for '--strategy <NAME[:CONF]>': Expected \
         'True' or 'False' at index 2 in ConfigTokenizer but got 'true'",
    );
    check(
        "replay a --capacity 12GBit",
        "invalid value '12GBit' for '--capacity <SIZE>': unknown unit 'gbit', units are KiB, MiB, GiB, TiB, \
         KB, MB, GB, TB, and x for times the peak of live bytes",
    );
    check(
        "replay a --device first",
        "invalid value 'first' for '--device <N>': expected the number of a device, 0 for the first",
    );
    check(
        "replay a --device -1",
        "invalid value '-1' for '--device <N>': expected the number of a device, 0 for the first",
    );
    for capacity in ["-1", "-1GiB", "-0.5x"] {
        check(
            &format!("replay a --capacity {capacity}"),
            &format!(
                "invalid value '{capacity}' for '--capacity <SIZE>': expected bytes, a size such as \
                 12GiB, or a factor such as 1.02x"
            ),
        );
    }
    check(
        &format!("replay {GPT2} --verify --strategy bfc"),
        "--strategy bfc cannot be verified: a recording has the addresses of PyTorch's own allocator, \
         `caching`",
    );
    check(
        "convert a b.json",
        "b.json: the name says no format; it has to end in .pickle, .lowtide or .perfetto.json, with .zst or \
         .gz after that to compress it",
    );
}

#[test]
fn a_name_never_makes_a_second_line() {
    let scratch = Scratch::new("names");
    let missing = scratch.path("a\nb\u{1b}[31m.pickle");
    let shown =
        format!("{}/a\\nb\\u{{1b}}[31m.pickle", scratch.path("").display()).replace("//", "/");
    for command in ["replay", "advise"] {
        assert_eq!(
            fail(&[command, missing.to_str().unwrap()]),
            format!("{shown}: No such file or directory (os error 2)")
        );
    }
    let message = fail(&["convert", GPT2, missing.join("in.pickle").to_str().unwrap()]);
    assert!(
        message.starts_with(&format!("{shown}/in.pickle: ")),
        "{message}"
    );
    let text = run(&["convert", GPT2, missing.to_str().unwrap()]);
    assert_eq!(text, format!("{shown}: 116,097 events of 1 device\n"));
    let text = run(&["replay", missing.to_str().unwrap(), "--strategy", "caching"]);
    assert!(text.starts_with(&format!("{shown}, device 0: ")), "{text}");

    // A file's contents never make a second line either.
    let path = scratch.write("number.pickle", b"\x80\x00I1\r\x1b[2J\n.");
    let message = fail(&["replay", path.to_str().unwrap()]);
    assert!(
        message.ends_with("`1\\r\\u{1b}[2J` is not a number"),
        "{message}"
    );
}

#[test]
fn without_arguments_there_is_help() {
    let output = lowtide().output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("Usage: lowtide <COMMAND>"));
    let output = lowtide().arg("--help").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_window_of_frees_says_that_its_beginning_is_lost() {
    let scratch = Scratch::new("only-frees");
    let mut snapshot = read_sample(GPT2);
    let events = &mut snapshot.traces[0].events;
    let is_free = |event: &TraceEvent| {
        matches!(
            event.event.action,
            Action::FreeRequested | Action::FreeCompleted
        )
    };
    let last_request = events.iter().rposition(|event| !is_free(event)).unwrap();
    events.drain(..=last_request);
    assert!(!events.is_empty());
    let path = scratch.write_snapshot("frees.lowtide", &snapshot);
    let path = path.to_str().unwrap();
    for command in ["replay", "advise", "leaks"] {
        let expected = format!(
            "{path}: only frees are recorded, the allocations before them are lost (record with a larger max_entries)"
        );
        assert_eq!(fail(&[command, path]), expected);
    }
}

/// A snapshot of a job whose history was not recorded: `{"segments": [], "device_traces": [[]]}`.
const NO_HISTORY: &[u8] =
    b"\x80\x02}(X\x08\x00\x00\x00segments]X\x0d\x00\x00\x00device_traces](]eu.";

/// The same snapshot with a text in place of the list of segments.
const TEXT_FOR_LIST: &[u8] =
    b"\x80\x02}(X\x08\x00\x00\x00segmentsX\x01\x00\x00\x00xX\x0d\x00\x00\x00device_traces](]eu.";

#[test]
fn each_bad_file_has_its_line() {
    let scratch = Scratch::new("bad-files");
    let recording = fs::read(sample(GPT2)).unwrap();
    let half = &recording[..recording.len() / 2];
    for (path, expected) in [
        (scratch.path("missing.pickle"), "No such file or directory"),
        (scratch.path(""), "Is a directory"),
        (scratch.write("empty.pickle", ""), "empty"),
        (
            scratch.write("text.pickle", "not a recording"),
            "neither a pickle nor a recording",
        ),
        (
            scratch.write("half.pickle.zst", half),
            "the file ends in the middle",
        ),
        // The header of protocol 2, and then the end.
        (
            scratch.write("short.pickle", b"\x80\x02"),
            "the file ends in the middle",
        ),
        (
            scratch.write("number.pickle", b"\x80\x02K\x01."),
            "other than a memory snapshot",
        ),
        (
            scratch.write("text_for_list.pickle", TEXT_FOR_LIST),
            "`segments` is not a list",
        ),
        // A reference to os.system, which no snapshot contains.
        (
            scratch.write("code.pickle", b"\x80\x02cos\nsystem\n."),
            "wants to run code",
        ),
        (
            scratch.write("still.pickle", NO_HISTORY),
            "_record_memory_history",
        ),
    ] {
        let path = path.to_str().unwrap();
        for command in ["replay", "advise"] {
            let message = fail(&[command, path]);
            assert!(message.starts_with(&format!("{path}: ")), "{message}");
            assert!(message.contains(expected), "{message}");
        }
    }
    let still = scratch.path("still.pickle");
    let still = still.to_str().unwrap();
    let message = fail(&["replay", still, "--device", "0"]);
    assert_eq!(message, format!("{still}: has no device 0, nor any other"));
}
