//! `lowtide record` around programs that say what they see: the command, its environment, its files. What is
//! recorded is tested with lowtide; here a recording of each strategy is read.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

mod common;

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::symlink;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::{GPT2, Scratch, fail, failure, lowtide, run, sample, stderr};
use flate2::Compression;
use flate2::write::GzEncoder;
use lowtide_core::{Action, Bytes, DeviceAddress, Event, MempoolId, Stream};
use lowtide_trace::{
    AllocatorSettings, EarlierFiles, NoteId, StackId, StackTable, StreamWriter, TraceEvent,
};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

fn record(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = lowtide();
    command.current_dir(directory).env_remove("LOWTIDE_RECORD");
    command.env_remove("RANK").arg("record").args(arguments);
    command.output().unwrap()
}

/// Returns what is said at the end of a `program` that never came to use lowtide.
fn nothing_recorded(file: &str, program: &str) -> String {
    format!(
        "lowtide: {file}: nothing was recorded: `{program}` used no GPU, or does not run on lowtide, as \
         `python -m lowtide run SCRIPT` and `lowtide run --preload PROGRAM` do\n"
    )
}

/// Returns a command that is recorded to `a.lowtide` in `directory`, and told to `sh`.
fn recorded_shell(directory: &Path, script: &str) -> Command {
    let mut command = lowtide();
    command.current_dir(directory).env_remove("LOWTIDE_RECORD");
    command.env_remove("RANK");
    command.args(["record", "-o", "a.lowtide", "sh", "-c", script]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command.stderr(Stdio::piped());
    command
}

#[test]
fn what_is_recorded_or_empty_is_said_at_the_end() {
    let scratch = Scratch::new("record_said");
    recording(&scratch.path("full.lowtide"), "caching");
    let mut writer =
        StreamWriter::new(File::create(scratch.path("empty.lowtide")).unwrap()).unwrap();
    let settings = AllocatorSettings::default();
    writer
        .begin_device(0, &settings, &[], &[], &StackTable::new())
        .unwrap();
    writer.finish().unwrap();
    let copy = |name: &str, to: &str| {
        let script = format!("cp {name}.lowtide {to}");
        let output = recorded_shell(&scratch.path(""), &script).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        stderr(&output)
    };
    assert_eq!(copy("full", "$LOWTIDE_RECORD"), "");
    assert_eq!(copy("full", "a.rank3.lowtide"), "");
    let expected = "lowtide: a.lowtide: nothing was recorded: `sh` asked for no GPU memory\n";
    assert_eq!(copy("empty", "a.lowtide"), expected);
    let empty = scratch.path("empty.lowtide");
    for command in ["leaks", "report", "replay"] {
        let expected = format!(
            "{}: no allocation is recorded: the job asked for no GPU memory while it was recorded",
            empty.display()
        );
        assert_eq!(fail(&[command, empty.to_str().unwrap()]), expected);
    }
}

/// The command is the process that was started, with no child that is not its own.
#[test]
fn the_command_is_the_process_that_was_started() {
    let scratch = Scratch::new("record_process");
    let script = "read -r children < /proc/$$/task/$$/children; echo $$ \"[$children]\"";
    let started = recorded_shell(&scratch.path(""), script).spawn().unwrap();
    let expected = format!("{} []\n", started.id());
    let output = started.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}

#[test]
fn a_signal_ends_the_command_and_what_was_not_recorded_is_said() {
    let scratch = Scratch::new("record_signals");
    for (signal, to_group) in [
        (Signal::TERM, false),
        (Signal::TERM, true),
        (Signal::INT, true),
        (Signal::HUP, true),
        (Signal::KILL, false),
    ] {
        let mut command = recorded_shell(&scratch.path(""), "echo; exec sleep 600");
        let mut started = command.process_group(0).spawn().unwrap();
        started
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut [0])
            .unwrap();
        let process = Pid::from_child(&started);
        match to_group {
            true => kill_process_group(process, signal).unwrap(),
            false => kill_process(process, signal).unwrap(),
        }
        let output = started.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(signal.as_raw()));
        assert_eq!(stderr(&output), nothing_recorded("a.lowtide", "sh"));
    }
}

/// Who reads what a command prints is told by its end, though the command goes on.
#[test]
fn nothing_but_standard_error_is_held() {
    let scratch = Scratch::new("record_pipes");
    let mut command = recorded_shell(&scratch.path(""), "exec >&-; read -r line");
    let mut started = command.spawn().unwrap();
    let mut printed = String::new();
    started
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut printed)
        .unwrap();
    assert_eq!(printed, "");
    assert_eq!(started.try_wait().unwrap(), None);
    drop(started.stdin.take());
    assert_eq!(started.wait_with_output().unwrap().status.code(), Some(1));
}

#[test]
fn the_command_finds_the_file_in_its_environment() {
    let scratch = Scratch::new("record_environment");
    let directory = scratch.path("");
    let script = "cd /; echo \"$LOWTIDE_RECORD\" \"$@\"; exit 7";
    let output = record(
        &directory,
        &["-o", "a.lowtide", "sh", "-c", script, "-", "-o", "x"],
    );
    assert_eq!(stderr(&output), nothing_recorded("a.lowtide", "sh"));
    assert_eq!(output.status.code(), Some(7));
    let expected = format!("{} -o x\n", directory.join("a.lowtide").display());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    assert_eq!(scratch.names(), [""; 0], "nothing was recorded");
    let stacks = "echo $LOWTIDE_RECORD_STACKS";
    for (arguments, expected) in [(&["--stacks"][..], "1\n"), (&[], "0\n")] {
        let output = record(&directory, &[arguments, &["sh", "-c", stacks]].concat());
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    }
    let output = record(&directory, &["sh", "-c", script]);
    let default = directory.join("recording.lowtide");
    assert_eq!(
        String::from_utf8(output.stdout).unwrap().trim_end(),
        default.to_str().unwrap()
    );
}

/// They go when a process of the command begins to record, which is tested with lowtide.
#[test]
fn earlier_recordings_stay_where_nothing_is_recorded() {
    let scratch = Scratch::new("record_earlier");
    recording(&scratch.path("a.lowtide"), "caching");
    let plain = fs::read(scratch.path("a.lowtide")).unwrap();
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(&plain).unwrap();
    scratch.write("a.rank1.lowtide", gzip.finish().unwrap());
    let zstd = zstd::encode_all(&*plain, 1).unwrap();
    scratch.write("a.pid77.lowtide", zstd);
    scratch.write("a.pid78.lowtide", "");
    scratch.write("a.rank1.txt", &plain);
    let names = scratch.names();
    let script = "test -s a.lowtide && echo \"$LOWTIDE_RECORD_EARLIER\"";
    let output = recorded_shell(&scratch.path(""), script).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(scratch.names(), names);
    assert_eq!(fs::read(scratch.path("a.lowtide")).unwrap(), plain);
    let expected = nothing_recorded("a.lowtide", "sh");
    let stays = "; what was recorded there before is as it was\n";
    assert_eq!(stderr(&output), expected.trim_end().to_owned() + stays);
    let earlier = String::from_utf8(output.stdout).unwrap();
    let earlier = EarlierFiles::parse(earlier.trim_end());
    for name in names {
        let is_recording = name.ends_with(".lowtide");
        assert_eq!(
            earlier.contain(&scratch.path(&name)),
            is_recording,
            "{name}"
        );
    }
}

#[test]
fn what_is_no_recording_is_left_alone() {
    let scratch = Scratch::new("record_others");
    let directory = scratch.path("");
    recording(&scratch.path("a.lowtide"), "caching");
    // A text may begin as a recording does.
    scratch.write("a.rank0.lowtide", "lowtide\nnumpy\n");
    fs::copy(sample(GPT2), scratch.path("a.rank1.lowtide")).unwrap();
    fs::create_dir(scratch.path("a.rank2.lowtide")).unwrap();
    symlink("/dev/null", scratch.path("a.rank3.lowtide")).unwrap();
    let script = "echo \"$LOWTIDE_RECORD_EARLIER\"";
    let output = record(&directory, &["-o", "a.lowtide", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let earlier = String::from_utf8(output.stdout).unwrap();
    let earlier = EarlierFiles::parse(earlier.trim_end());
    assert!(earlier.contain(&scratch.path("a.lowtide")));
    let others = [0, 1, 2, 3].map(|rank| format!("a.rank{rank}.lowtide"));
    assert!(
        !others
            .iter()
            .any(|name| earlier.contain(&scratch.path(name)))
    );
    // Named itself, each is refused, and so is a device: the job would wait for it.
    let is_no_recording = "exists and is no recording of lowtide's: choose another name";
    let is_no_file =
        |what| format!("is {what}, and only a regular file is written: choose another name");
    for (name, why) in [
        (&*others[0], is_no_recording.to_owned()),
        (&others[1], is_no_recording.to_owned()),
        (&others[2], "is a directory".to_owned()),
        (&others[3], is_no_file("a symbolic link")),
        ("/dev/null", is_no_file("a device")),
    ] {
        let output = record(&directory, &["-o", name, "touch", "ran"]);
        assert_eq!(failure(&output), format!("{name}: {why}"));
    }
    assert_eq!(scratch.names().len(), 5, "{:?}", scratch.names());
}

/// As a sweep leaves them, each process of which uses a device.
#[test]
fn more_earlier_recordings_than_can_be_told_are_refused() {
    let scratch = Scratch::new("record_many");
    for process in 1..=2_049 {
        scratch.write(&format!("a.pid{process}.lowtide"), "");
    }
    let directory = scratch.path("");
    let output = record(&directory, &["-o", "a.lowtide", "touch", "ran"]);
    let expected = "a.lowtide: has 2049 recordings of earlier processes, more than the 2048 that are replaced: remove \
                    them, or choose another name";
    assert_eq!(failure(&output), expected);
    fs::remove_file(scratch.path("a.pid7.lowtide")).unwrap();
    let output = record(&directory, &["-o", "a.lowtide", "touch", "ran"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(scratch.path("ran").exists());
}

#[test]
fn nothing_is_touched_where_there_is_no_command_to_run() {
    let scratch = Scratch::new("record_no_command");
    recording(&scratch.path("recording.lowtide"), "caching");
    let plain = scratch.write("plain", "true");
    for (command, code) in [
        ("no-such-program", 127),
        ("./none", 127),
        (plain.to_str().unwrap(), 126),
        ("/", 126),
    ] {
        let output = record(&scratch.path(""), &[command]);
        assert_eq!(output.status.code(), Some(code), "{command}");
        let text = stderr(&output);
        assert!(text.starts_with(&format!("lowtide: {command}: ")), "{text}");
        assert_eq!(scratch.names(), ["plain", "recording.lowtide"]);
    }
}

/// Each rank with a command of its own, of which one comes when another is at work.
#[test]
fn a_rank_leaves_the_others_files_alone() {
    let scratch = Scratch::new("record_ranks");
    let names = [
        "a.lowtide",
        "a.rank0.lowtide",
        "a.rank1.lowtide",
        "a.rank1.pid7-2.lowtide",
    ];
    for name in names {
        recording(&scratch.path(name), "caching");
    }
    let mut command = lowtide();
    command
        .current_dir(scratch.path(""))
        .env_remove("LOWTIDE_RECORD");
    command.env("RANK", "1").env("WORLD_SIZE", "2");
    let script = "echo \"$LOWTIDE_RECORD\"; echo \"$LOWTIDE_RECORD_EARLIER\"";
    let output = command
        .args(["record", "-o", "a.lowtide", "sh", "-c", script])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let printed = String::from_utf8(output.stdout).unwrap();
    let (file, earlier) = printed.trim_end().split_once('\n').unwrap();
    assert_eq!(file, scratch.path("a.lowtide").to_str().unwrap());
    let earlier = EarlierFiles::parse(earlier);
    let are_replaced = names.map(|name| earlier.contain(&scratch.path(name)));
    assert_eq!(are_replaced, [false, false, true, true]);
}

#[test]
fn what_cannot_be_recorded_is_said_before_the_command_runs() {
    let scratch = Scratch::new("record_errors");
    let directory = scratch.path("");
    let output = record(&directory, &["-o", "no/such/a.lowtide", "touch", "ran"]);
    let expected = "no/such/a.lowtide: No such file or directory (os error 2)";
    assert_eq!(failure(&output), expected);
    fs::create_dir(scratch.path("b.lowtide")).unwrap();
    let output = record(&directory, &["-o", "b.lowtide", "touch", "ran"]);
    assert_eq!(failure(&output), "b.lowtide: is a directory");
    assert_eq!(scratch.names(), ["b.lowtide"]);
    let output = record(&directory, &["--fast", "x"]);
    assert!(failure(&output).contains("unknown option `--fast`"));
    let output = record(&directory, &["no-such-program"]);
    assert_eq!(output.status.code(), Some(127));
    assert!(stderr(&output).starts_with("lowtide: no-such-program: "));
}

/// A recording of one request, by a strategy.
fn recording(path: &Path, strategy: &str) {
    let mut writer = StreamWriter::new(File::create(path).unwrap()).unwrap();
    let settings = AllocatorSettings {
        strategy: strategy.into(),
        ..AllocatorSettings::default()
    };
    writer
        .begin_device(2, &settings, &[], &[], &StackTable::new())
        .unwrap();
    for (action, size) in [
        (Action::SegmentAlloc, Bytes::mib(2)),
        (Action::Alloc, Bytes(700)),
    ] {
        let event = Event {
            action,
            pool: MempoolId::DEFAULT,
            address: DeviceAddress(0x7f00_0000_0000),
            size,
            stream: Stream::DEFAULT,
        };
        let event = TraceEvent {
            event,
            time_us: 1,
            stack: StackId::NONE,
            pool_known: true,
            note: NoteId::NONE,
        };
        writer.push(2, &event, &StackTable::new()).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn recordings_are_read_and_only_those_of_caching_verified() {
    let scratch = Scratch::new("record_read");
    let [caching, bfc] = ["caching", "bfc:retry_ms:5"].map(|strategy| {
        let path = scratch.path(&format!("{}.lowtide", &strategy[..3]));
        recording(&path, strategy);
        path.to_str().unwrap().to_owned()
    });
    let table = run(&["replay", "--verify", &caching]);
    assert!(
        table.contains("device 2: 2 events, 1 allocation"),
        "{table}"
    );
    assert!(run(&["replay", &bfc]).contains("bfc"));
    let expected = format!(
        "{bfc}: lowtide's strategy `bfc:retry_ms:5` was recorded, and only `caching` can be verified"
    );
    assert_eq!(fail(&["replay", "--verify", &bfc]), expected);
    let pickle = scratch.path("out.pickle");
    run(&["convert", &caching, pickle.to_str().unwrap()]);
    assert!(run(&["replay", "--verify", pickle.to_str().unwrap()]).contains("device 2"));
}
