//! Texts from recordings, file names, processes and drivers are printed on one line, without characters that a
//! terminal or a shell interprets.
#![expect(clippy::unwrap_used, reason = "in what the tests share")]

mod common;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use common::{HOSTILE, Scratch, lowtide, printed};
use lowtide_core::{Action, Bytes, DeviceAddress, Event, MempoolId, Stream};
use lowtide_trace::{
    AllocatorSettings, Annotation, AnnotationStage, Frame, Note, NoteId, Snapshot, StackId,
    StackTable, Trace, TraceEvent,
};
use serde_json::json;

/// The first address of the memory in the recordings.
const BASE: u64 = 1 << 40;
const MIB: u64 = 1 << 20;
/// The number of requests in a step.
const REQUESTS: u64 = 100;

/// Returns the events of a job of 20 steps, each of which leaks: the action, the address and the line.
fn steps() -> impl Iterator<Item = (Action, u64, u32)> {
    (0..20).flat_map(|step| {
        let requests = move || (0..REQUESTS).map(|request| BASE + request * MIB);
        let lines = 1..;
        let allocs = requests()
            .zip(lines)
            .map(|(address, line)| (Action::Alloc, address, line));
        let leak = (Action::Alloc, BASE + (200 + step) * MIB, 1000);
        let frees = requests().flat_map(|address| {
            [Action::FreeRequested, Action::FreeCompleted].map(|action| (action, address, 0))
        });
        allocs.chain([leak]).chain(frees)
    })
}

/// Returns a recording in which every text is hostile.
fn hostile_trace(conf: &str) -> Trace {
    let mut stacks = StackTable::new();
    let note = stacks.intern_note(Note {
        compile_context: Some(HOSTILE.into()),
        user_metadata: Some(HOSTILE.into()),
    });
    let mut trace = Trace::default();
    let mut push = |action, address, size, stack, note| {
        let event = Event {
            action,
            pool: MempoolId::DEFAULT,
            address: DeviceAddress(address),
            size: Bytes(size),
            stream: Stream::DEFAULT,
        };
        trace.events.push(TraceEvent {
            event,
            time_us: i64::try_from(trace.events.len()).unwrap(),
            stack,
            pool_known: true,
            note,
        });
    };
    push(
        Action::SegmentAlloc,
        BASE,
        1 << 36,
        StackId::NONE,
        NoteId::NONE,
    );
    for (action, address, line) in steps() {
        let stack = stacks.intern([Frame {
            name: HOSTILE.into(),
            filename: HOSTILE.into(),
            line,
        }]);
        push(action, address, MIB, stack, note);
    }
    let events_a_step = i64::try_from(3 * REQUESTS + 1).unwrap();
    let marks = (0..20).map(|step| Annotation {
        name: format!("Optimizer.step#{HOSTILE}").into(),
        stage: AnnotationStage::Start,
        time_us: step * events_a_step,
    });
    trace.annotations = marks.collect();
    trace.regions.insert(MempoolId(1, 1), HOSTILE.into());
    trace.settings.conf = conf.into();
    trace.stacks = Arc::new(stacks);
    trace
}

fn write(scratch: &Scratch, name: &str, trace: Trace) -> PathBuf {
    let snapshot = Snapshot {
        traces: vec![trace],
        ..Snapshot::default()
    };
    scratch.write_snapshot(name, &snapshot)
}

/// Returns the command with these arguments, in the directory of the test.
fn command<S: AsRef<OsStr>>(scratch: &Scratch, arguments: &[S]) -> Command {
    let mut command = lowtide();
    command.args(arguments).current_dir(scratch.path(""));
    command
}

#[test]
fn no_command_prints_what_a_terminal_carries_out() {
    let scratch = Scratch::new("hostile");
    let conf = format!("max_split_size_mb:200,unknown:{HOSTILE}");
    let path = write(&scratch, &HOSTILE.replace('/', ""), hostile_trace(&conf));
    let path = path.as_os_str();
    for arguments in [
        "summary",
        "summary --json",
        "check --no-oom --max-fragmentation 1000% --junit memory.xml",
        "leaks",
        "leaks --json",
        "advise",
        "advise --json",
        "replay",
        "replay --json",
        "replay --verify",
        "replay --html replay.html",
        "replay --html -",
        "report -o page.html",
        "report -o -",
        "report",
        "convert copy.pickle",
        "convert copy.perfetto.json",
    ] {
        let (name, others) = arguments.split_once(' ').unwrap_or((arguments, ""));
        let mut arguments = vec![OsStr::new(name), path];
        arguments.extend(others.split_whitespace().map(OsStr::new));
        printed(&mut command(&scratch, &arguments), 0);
    }
    for format in [&[][..], &["--json".as_ref()]] {
        let compared = [&["diff".as_ref(), path, path], format].concat();
        printed(&mut command(&scratch, &compared), 0);
    }
    for page in ["page.html", "replay.html"] {
        let page = std::fs::read_to_string(scratch.path(page)).unwrap();
        assert!(page.contains("$(touch ran)"));
        assert!(
            !page.contains("</script><!--"),
            "a text ends the page's script"
        );
    }
    // Perfetto refuses these letters, escaped or not in keys.
    let events = std::fs::read_to_string(scratch.path("copy.perfetto.json")).unwrap();
    let is_control = |letter: char| letter.is_control() && letter != '\n';
    assert!(events.contains("$(touch ran)") && !events.contains(is_control));
    serde_json::from_str::<serde_json::Value>(&events).unwrap();
    assert!(!scratch.path("ran").exists());
}

#[test]
fn what_is_refused_is_named_on_one_line() {
    let scratch = Scratch::new("hostile-refused");
    let mut trace = hostile_trace("");
    trace.settings = AllocatorSettings {
        strategy: HOSTILE.into(),
        ..AllocatorSettings::default()
    };
    let path = write(&scratch, "recorded.lowtide", trace);
    let path = path.to_str().unwrap();
    let option = format!("--{HOSTILE}");
    let text = u8::try_from(HOSTILE.len()).unwrap();
    let text = [&[0x8c, text], HOSTILE.as_bytes()].concat();
    // A pickle that calls a function of that name.
    let call = [b"\x80\x04", &text[..], &text, b"\x93)R."].concat();
    let call = scratch.write("call.pickle", call);
    let broken = scratch.write(
        "broken.json",
        format!("{{\"segments\": 1, {HOSTILE:?}: ]}}"),
    );
    for arguments in [
        &["replay", path, "--verify"][..],
        &["replay", call.to_str().unwrap()],
        &["replay", broken.to_str().unwrap()],
        &["replay", HOSTILE],
        &["replay", path, &option],
        &["replay", path, "--strategy", HOSTILE],
        &["convert", path, HOSTILE],
        &[HOSTILE],
    ] {
        let said = printed(&mut command(&scratch, arguments), 2);
        assert_eq!(said.lines().count(), 1, "{said}");
        let is_named = said.contains("$(touch ran)") || said.contains("broken.json");
        assert!(is_named, "{arguments:?}: {said}");
    }
    assert!(!scratch.path("ran").exists());
}

#[test]
fn names_of_snapshots_in_one_file_are_printed_escaped() {
    let scratch = Scratch::new("hostile-members");
    let event = |(time_us, (action, address, line)): (u64, (Action, u64, u32))| {
        let frame = json!({"name": HOSTILE, "filename": HOSTILE, "line": line});
        json!({
            "action": action.name(), "addr": address, "size": MIB, "stream": 0, "time_us": time_us,
            "frames": [frame], "user_metadata": HOSTILE, "compile_context": HOSTILE,
        })
    };
    let events: Vec<_> = (1..).zip(steps()).map(event).collect();
    let member = || json!({"segments": [], "device_traces": [&events], HOSTILE: HOSTILE});
    let file = json!({format!("{HOSTILE}0"): member(), format!("{HOSTILE}1"): member()});
    let path = scratch.write("gathered.json", file.to_string());
    let path = path.to_str().unwrap();
    let said = printed(&mut command(&scratch, &["leaks", path]), 0);
    assert!(
        said.contains(r"has several snapshots: x\u{1b}[1A"),
        "{said}"
    );
    printed(
        &mut command(&scratch, &["report", path, "-o", "page.html"]),
        0,
    );
    printed(&mut command(&scratch, &["advise", path]), 0);
    printed(
        &mut command(&scratch, &["convert", path, "copy.lowtide"]),
        2,
    );
}

#[test]
fn programs_that_record_are_named_on_one_line() {
    let scratch = Scratch::new("hostile-record");
    let name = HOSTILE.replace('/', "");
    let said = printed(
        &mut command(&scratch, &["record", "-o", "a.lowtide", &name]),
        127,
    );
    assert!(said.contains(r"\u{1b}[1A"), "{said}");
    let output = format!("{name}.lowtide");
    let said = printed(
        &mut command(&scratch, &["record", "-o", &output, "true"]),
        0,
    );
    assert!(
        said.contains("nothing was recorded") && said.contains(r"\u{1b}[1A"),
        "{said}"
    );
}

#[test]
fn a_driver_is_named_on_one_line() {
    let scratch = Scratch::new("hostile-driver");
    // The loader takes a colon as the end of a directory's name.
    let directory = scratch.path(&HOSTILE.replace('/', ""));
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("libcuda.so.1"), "no library").unwrap();
    for arguments in [
        &["doctor", "--without-python"][..],
        &["doctor", "--without-python", "--json"],
    ] {
        let mut command = command(&scratch, arguments);
        let said = printed(command.env("LD_LIBRARY_PATH", &directory), 1);
        assert!(said.contains("libcuda.so.1"), "{said}");
    }
}
