//! `lowtide convert`.

mod common;

use std::fs;

use common::{GPT2, Scratch, fail, lowtide, read_sample, run, stderr};
use lowtide_core::Action;
use lowtide_trace::TraceEvent;

#[test]
fn each_format_reads_back_as_the_same_recording() {
    let scratch = Scratch::new("formats");
    let original = read_sample(GPT2);
    for name in [
        "a.pickle",
        "a.pickle.zst",
        "a.pickle.gz",
        "a.lowtide",
        "a.lowtide.zst",
        "a.lowtide.gz",
    ] {
        let path = scratch.path(name);
        let text = run(&["convert", GPT2, path.to_str().unwrap()]);
        assert_eq!(
            text,
            format!("{}: 116,097 events of 1 device\n", path.display())
        );
        let converted = lowtide_trace::read(&path).unwrap();
        assert_eq!(converted.traces.len(), 1);
        assert!(
            converted.traces[0].events == original.traces[0].events,
            "{name}"
        );
        assert_eq!(converted.traces[0].segments, original.traces[0].segments);
    }
    let size = |name| fs::metadata(scratch.path(name)).unwrap().len();
    assert!(size("a.pickle.zst") < size("a.pickle") / 2);
    assert!(size("a.pickle.gz") < size("a.pickle") / 2);
    assert!(size("a.lowtide") < size("a.pickle") / 2);
}

#[test]
fn what_becomes_of_pauses_is_said() {
    let scratch = Scratch::new("pauses");
    let mut snapshot = read_sample("mnist_mlp.pickle.zst");
    let trace = &mut snapshot.traces[0];
    let came = |event: &TraceEvent| event.event.action == Action::SegmentAlloc;
    let first = trace.events.iter().position(came).unwrap();
    for (place, action) in [(1, Action::SegmentPaused), (2, Action::SegmentResumed)] {
        let mut event = trace.events[first];
        event.event.action = action;
        trace.events.insert(first + place, event);
    }
    let input = scratch.write_snapshot("in.lowtide", &snapshot);
    let messages = |command: &str, output: &str| {
        let mut lowtide = lowtide();
        lowtide.arg(command).arg(&input);
        match command {
            "convert" => lowtide.arg(scratch.path(output)),
            _ => lowtide.args(["--strategy", "bfc", "--json"]),
        };
        stderr(&lowtide.output().unwrap())
    };
    assert_eq!(messages("convert", "out.lowtide"), "");
    let kept = lowtide_trace::read(&scratch.path("out.lowtide")).unwrap();
    assert!(kept.traces[0].events == snapshot.traces[0].events);
    let text = messages("convert", "out.pickle");
    assert!(text.contains("PyTorch's viewer knows no pauses"), "{text}");
    let kept = lowtide_trace::read(&scratch.path("out.pickle")).unwrap();
    assert!(kept.traces[0].events == snapshot.traces[0].events);
    let text = messages("replay", "");
    assert!(text.contains("in.lowtide: regions were paused"), "{text}");
}

#[test]
fn one_device_can_be_cut_out() {
    let scratch = Scratch::new("cut-out");
    let mut snapshot = read_sample(GPT2);
    let mut other = read_sample("mnist_mlp.pickle.zst").traces.remove(0);
    other.device = 3;
    snapshot.traces.push(other);
    let path = scratch.write_snapshot("two.lowtide", &snapshot);
    let path = path.to_str().unwrap();
    let output = scratch.path("one.lowtide");

    run(&["convert", path, output.to_str().unwrap()]);
    assert_eq!(lowtide_trace::read(&output).unwrap().traces.len(), 2);
    run(&["convert", path, output.to_str().unwrap(), "--device", "3"]);
    let traces = lowtide_trace::read(&output).unwrap().traces;
    assert_eq!(traces.len(), 1);
    assert_eq!(traces[0].device, 3);
}

#[test]
fn a_failure_leaves_what_was_there() {
    let scratch = Scratch::new("failure");
    let output = scratch.write("old.pickle", "as it was");
    let message = fail(&["convert", "no-such-file", output.to_str().unwrap()]);
    assert_eq!(
        message,
        "no-such-file: No such file or directory (os error 2)"
    );
    assert_eq!(fs::read_to_string(&output).unwrap(), "as it was");
    assert_eq!(scratch.names(), ["old.pickle"]);

    // A file cannot replace a directory, which shows only at the very end.
    let output = scratch.path("directory.pickle");
    fs::create_dir(&output).unwrap();
    let message = fail(&["convert", GPT2, output.to_str().unwrap()]);
    assert!(
        message.starts_with(&format!("{}: ", output.display())),
        "{message}"
    );
    assert_eq!(scratch.names(), ["directory.pickle", "old.pickle"]);
}
