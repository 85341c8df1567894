//! `lowtide record` around programs that print what they see: their arguments, environment and files. Recording
//! itself is tested in lowtide's other crates; here a recording of each strategy is read.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

mod common;

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, SystemTime};

use common::{GPT2, Scratch, fail, failure, lowtide, run, sample, stderr};
use lowtide_core::{Action, Bytes, DeviceAddress, Event, MempoolId, Stream};
use lowtide_trace::{
    AllocatorSettings, JobStart, NoteId, StackId, StackTable, StreamWriter, TraceEvent,
};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

fn record(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = lowtide();
    command.current_dir(directory).env_remove("LOWTIDE_RECORD");
    command.env_remove("RANK").arg("record").args(arguments);
    command.output().unwrap()
}

/// Returns the line printed at the end of a `program` that never used lowtide.
fn nothing_recorded(file: &str, program: &str) -> String {
    format!(
        "lowtide: {file}: nothing was recorded: `{program}` used no GPU, or does not run on lowtide, as \
         `lowtide run SCRIPT` and `lowtide run --preload PROGRAM` do\n"
    )
}

/// Returns a command that records `script`, run by `sh`, to `a.lowtide` in `directory`.
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
    for name in ["a.lowtide", "a.rank3.lowtide"] {
        fs::remove_file(scratch.path(name)).unwrap();
    }
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

#[test]
fn the_exit_code_is_the_commands() {
    let scratch = Scratch::new("record_code");
    for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137)] {
        let mut command = recorded_shell(&scratch.path(""), script);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{script}");
        assert_eq!(stderr(&output), nothing_recorded("a.lowtide", "sh"));
    }
}

/// The terminal sends its signals to the process group. A request to end may go to `lowtide record` alone.
#[test]
fn a_signal_ends_the_command_and_what_was_not_recorded_is_said() {
    let scratch = Scratch::new("record_signals");
    for (signal, to_group) in [
        (Signal::TERM, false),
        (Signal::HUP, false),
        (Signal::TERM, true),
        (Signal::INT, true),
        (Signal::QUIT, true),
        (Signal::HUP, true),
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
        wait_until_handled(process, signal);
        if to_group {
            kill_process_group(process, signal).unwrap()
        } else {
            kill_process(process, signal).unwrap()
        }
        let output = started.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(128 + signal.as_raw()));
        assert_eq!(stderr(&output), nothing_recorded("a.lowtide", "sh"));
    }
}

/// Waits until a process has a handler for `signal`.
fn wait_until_handled(process: Pid, signal: Signal) {
    let status = format!("/proc/{}/status", process.as_raw_nonzero());
    loop {
        let status = fs::read_to_string(&status).unwrap();
        let mut lines = status.lines();
        let handled = lines.find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        let handled = u64::from_str_radix(handled.trim(), 16).unwrap();
        if handled & 1 << (signal.as_raw() - 1) != 0 {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// The signal is ignored as by `nohup`, so the command ignores it, too.
#[test]
fn a_signal_that_is_ignored_is_ignored_by_the_command() {
    let scratch = Scratch::new("record_nohup");
    let script = "trap '' HUP; exec \"$0\" record -o a.lowtide sh -c 'kill -HUP $$; exit 3'";
    let mut command = Command::new("sh");
    command.current_dir(scratch.path("")).env_remove("RANK");
    command.args(["-c", script, env!("CARGO_BIN_EXE_lowtide")]);
    assert_eq!(command.output().unwrap().status.code(), Some(3));
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

/// The earlier recording is replaced when a process of the command begins to record, which is tested in other
/// crates.
#[test]
fn an_earlier_recording_stays_where_nothing_is_recorded() {
    let scratch = Scratch::new("record_earlier");
    recording(&scratch.path("a.lowtide"), "caching");
    let written = SystemTime::now() - Duration::from_secs(60);
    let file = File::options().write(true).open(scratch.path("a.lowtide"));
    file.unwrap().set_modified(written).unwrap();
    let plain = fs::read(scratch.path("a.lowtide")).unwrap();
    let script = format!("test -s a.lowtide && echo \"${}\"", JobStart::VARIABLE);
    let output = recorded_shell(&scratch.path(""), &script).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(stderr(&output), nothing_recorded("a.lowtide", "sh"));
    assert_eq!(scratch.names(), ["a.lowtide"]);
    assert_eq!(fs::read(scratch.path("a.lowtide")).unwrap(), plain);
    let start = String::from_utf8(output.stdout).unwrap();
    let start = JobStart::parse(start.trim_end()).unwrap();
    let earlier = fs::metadata(scratch.path("a.lowtide")).unwrap();
    assert!(start.is_after(&earlier));
}

#[test]
fn what_is_no_recording_is_left_alone() {
    let scratch = Scratch::new("record_others");
    let directory = scratch.path("");
    // A text file may begin as a recording does.
    scratch.write("a.rank0.lowtide", "lowtide\nnumpy\n");
    fs::copy(sample(GPT2), scratch.path("a.rank1.lowtide")).unwrap();
    fs::create_dir(scratch.path("a.rank2.lowtide")).unwrap();
    symlink("/dev/null", scratch.path("a.rank3.lowtide")).unwrap();
    let others = [0, 1, 2, 3].map(|rank| format!("a.rank{rank}.lowtide"));
    // Each is refused, and so is a device, because the job would wait for it.
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
    assert_eq!(scratch.names(), others);
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

/// Writes a recording of one request, made by a strategy.
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
        writer
            .push(2, &event, &StackTable::new(), &StackTable::new())
            .unwrap();
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
