//! The commands' messages about recordings in other formats, of several devices or of none.

#![expect(clippy::unwrap_used, reason = "a run that fails fails its test")]

mod common;

use common::{Scratch, fail, lowtide, run, small, stderr};

/// The commands that use one device of a recording.
const OF_A_DEVICE: [&str; 4] = ["replay", "advise", "leaks", "diff"];

/// Returns what a command prints on standard error about the small file `name`.
fn notes(command: &str, name: &str) -> String {
    let path = small(name);
    let mut lowtide = lowtide();
    lowtide.args([command, &path]);
    if command == "diff" {
        lowtide.arg(&path);
    }
    let output = lowtide.output().unwrap();
    assert_eq!(
        output.status.code(),
        Some(0),
        "{command}: {}",
        stderr(&output)
    );
    stderr(&output)
}

#[test]
fn each_command_says_what_becomes_of_pinned_host_memory() {
    let name = small("torch2.15.pickle");
    let is_recorded = format!(
        "lowtide: {name}: pinned host memory is recorded, too (3 allocations, at most 1.00 MiB reserved); "
    );
    for command in OF_A_DEVICE {
        let notes = notes(command, "torch2.15.pickle");
        let expected =
            format!("{is_recorded}this is about the device, and `lowtide report` shows both\n");
        assert!(notes.contains(&expected), "{command}: {notes}");
    }
    let scratch = Scratch::new("host");
    for format in ["out.lowtide", "out.pickle"] {
        let output = scratch.path(format);
        let text = run(&["convert", &name, output.to_str().unwrap()]);
        let expected = ": 13 events of 1 device, 9 events of pinned host memory\n";
        assert!(text.ends_with(expected), "{text}");
        assert_eq!(lowtide_trace::read(&output).unwrap().host[0].allocs(), 3);
    }
    let mut convert = lowtide();
    convert
        .args(["convert", &name, "--device", "0"])
        .arg(scratch.path("one.lowtide"));
    let text = stderr(&convert.output().unwrap());
    assert_eq!(text, format!("{is_recorded}--device leaves it out\n"));
    assert!(
        lowtide_trace::read(&scratch.path("one.lowtide"))
            .unwrap()
            .host
            .is_empty()
    );
}

#[test]
fn a_recording_of_the_host_alone_is_shown_by_the_report() {
    let scratch = Scratch::new("host-alone");
    let mut snapshot =
        lowtide_trace::read(&common::sample("").join(small("torch2.15.pickle"))).unwrap();
    snapshot.traces.clear();
    let path = scratch.write_snapshot("host.lowtide", &snapshot);
    let path = path.to_str().unwrap();
    for command in ["replay", "advise", "leaks", "summary"] {
        let expected = format!(
            "{path}: only pinned host memory is recorded, which `lowtide report` shows (record_cuda=False leaves out the \
             devices')"
        );
        assert_eq!(fail(&[command, path]), expected);
    }
    run(&[
        "report",
        path,
        "-o",
        scratch.path("host.html").to_str().unwrap(),
    ]);
}

#[test]
fn which_of_several_snapshots_is_looked_at_is_said() {
    let path = small("gathered_list.pickle");
    for command in OF_A_DEVICE {
        let expected = format!(
            "lowtide: {path} has several snapshots: 0 (device 0), 2 (device 0); this is 0 (device 0), which has the most \
             events (to see another, write it to a file of its own)\n"
        );
        let notes = notes(command, "gathered_list.pickle");
        assert!(notes.contains(&expected), "{command}: {notes}");
    }
    let scratch = Scratch::new("gathered");
    let page = scratch.path("page.html");
    let mut report = lowtide();
    report.args(["report", &path, "-o"]).arg(&page);
    assert_eq!(report.output().unwrap().status.code(), Some(0));
    let page = std::fs::read_to_string(page).unwrap();
    for name in ["snapshot 0, device 0", "snapshot 2, device 0"] {
        assert!(page.contains(&format!("{path}, {name}")), "{name}");
    }
    let output = scratch.path("out.lowtide");
    let output = output.to_str().unwrap();
    let expected = "several snapshots have device 0, and a file of this format has one; write each to a file of its own, \
                    in Python by pickle.dump";
    let line = fail_with_notes(&["convert", &path, output]);
    assert!(line.ends_with(expected), "{line}");
    let twice = notes("replay", "gathered_twice.pickle");
    assert!(
        twice.contains("gathered_twice.pickle: 1 of 2 items repeats an earlier snapshot\n"),
        "{twice}"
    );
}

/// Returns the last line of a run that prints notes and then fails.
fn fail_with_notes(arguments: &[&str]) -> String {
    let output = lowtide().args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    stderr(&output).lines().last().unwrap().to_owned()
}

#[test]
fn devices_of_marks_alone_are_not_listed() {
    for command in OF_A_DEVICE {
        let notes = notes(command, "marks.pickle");
        assert!(!notes.contains("has devices"), "{command}: {notes}");
    }
    let path = small("marks.pickle");
    let line = fail(&["leaks", &path, "--device", "1"]);
    assert_eq!(line, format!("{path}: has no device 1, only 0"));
}

#[test]
fn a_recording_without_frees_is_refused_by_every_command() {
    let scratch = Scratch::new("no-frees");
    for name in ["torch2.11.no_frees.pickle", "torch2.15.no_frees.pickle"] {
        let path = small(name);
        let expected = format!(
            "{path}: device 0, event 5: no frees are recorded, so record without skip_actions=[\"free_requested\", \
             \"free_completed\"]: allocates 300.00 KiB at "
        );
        let output = scratch.path("out.lowtide");
        for arguments in [
            &["replay", &path][..],
            &["advise", &path],
            &["leaks", &path],
            &["summary", &path],
            &["check", "--no-oom", &path],
            &["diff", &path, &path],
            &["report", &path],
            &["convert", &path, output.to_str().unwrap()],
        ] {
            let line = fail(arguments);
            assert!(line.starts_with(&expected), "{arguments:?}: {line}");
        }
    }
}

#[test]
fn every_form_is_read_by_its_contents() {
    let scratch = Scratch::new("forms");
    let converted = |name: &str| {
        let output = scratch.path("out.lowtide");
        run(&["convert", &small(name), output.to_str().unwrap()]);
        std::fs::read(output).unwrap()
    };
    let plain = converted("torch2.11.pickle");
    for form in ["json", "page.html", "pt", "added.pickle"] {
        assert_eq!(converted(&format!("torch2.11.{form}")), plain, "{form}");
    }
    let plain = converted("protocol4.pickle");
    for packed in ["xz", "bz2"] {
        assert_eq!(
            converted(&format!("protocol4.pickle.{packed}")),
            plain,
            "{packed}"
        );
    }
}

#[test]
fn other_files_have_a_line_that_says_what_to_do() {
    let scratch = Scratch::new("other-files");
    let mut twice = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut twice, b"\xfd7zXZ\0 and so on").unwrap();
    let twice = twice.finish().unwrap();
    let record = "torch.profiler wrote it, which records sums and no allocations; record with \
                  torch.cuda.memory._record_memory_history() and write with torch.cuda.memory._dump_snapshot()";
    let lists = "a list of lists, as torch.profiler writes its timelines, which have no allocations; record with \
                 torch.cuda.memory._record_memory_history(), and of what ranks gathered write a list or a dict of \
                 snapshots";
    let code = "byte 2: this pickle wants to run code (`os.system`); lowtide reads data only: if you trust it, load it in \
                Python and dump it again as dicts, lists, texts and numbers";
    for (name, contents, expected) in [
        (
            "timeline.json",
            &b"[[1, 2], [[0, 512], [0, 1024]]]"[..],
            lists,
        ),
        ("trace.json", b"{\"schemaVersion\": 1}", record),
        ("code.pickle", b"\x80\x02cos\nsystem\n.", code),
        ("twice.gz", &twice, "compressed twice; undo one by `xz -d`"),
        (
            "other.zip",
            b"PK\x03\x04 a zip archive with other things",
            "an archive; unpack it (unzip) and name the recording in it",
        ),
        (
            "page.html",
            b"<title>lowtide report</title>",
            "a page that lowtide wrote; name the recording that it was made from",
        ),
    ] {
        let path = scratch.write(name, contents);
        let path = path.to_str().unwrap();
        for command in ["replay", "report"] {
            assert_eq!(fail(&[command, path]), format!("{path}: {expected}"));
        }
    }
    let old = small("torch2.8.old.pt");
    assert_eq!(
        fail(&["replay", &old]),
        format!(
            "{old}: written by torch.save in its old form; load it in Python and write it by pickle.dump"
        )
    );
}
