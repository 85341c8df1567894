//! C programs that know nothing of lowtide, run with it in `LD_PRELOAD`. A stand-in for CUDA's runtime is linked
//! as a library, or is part of the program itself.
//!
//! NVIDIA's own runtime and driver are not tested here. The stand-in looks the driver up in the way that was
//! observed of NVIDIA's.
#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

#[path = "../../../fakecuda/src/located.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "of another crate, and not all of it used"
)]
mod located;

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lowtide_core::{Action, StrategyName};

/// The two forms of the program.
const FORMS: [Form; 2] = [Form::Shared, Form::Static];

#[derive(Clone, Copy, Debug)]
enum Form {
    /// Linked with the runtime's library.
    Shared,
    /// Contains the runtime and debugging information.
    Static,
}

/// A directory with the program, the runtime, and the driver under the name by which programs open it.
struct Machine(PathBuf);

impl Machine {
    fn new(test: &str, form: Form) -> Machine {
        let name = format!("preload-{test}-{form:?}-{}", std::process::id());
        let directory = libraries().join(name);
        fs::create_dir_all(&directory).unwrap();
        let driver = fs::canonicalize(located::library_path()).unwrap();
        symlink(driver, directory.join("libcuda.so.1")).unwrap();
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
        let [program, runtime] = ["preload.c", "cudart.c"].map(|name| sources.join(name));
        let built = directory.join("program");
        match form {
            Form::Static => compile(&[&program, &runtime], &built, &["-rdynamic", "-g"]),
            Form::Shared => {
                let library = directory.join("libcudart.so.12");
                compile(&[&runtime], &library, &["-shared", "-fPIC"]);
                compile(&[&program, &library], &built, &["-rdynamic"]);
            }
        }
        Machine(directory)
    }

    /// Puts another driver in front of the stand-in, and links it with the stand-in.
    fn put_in_front(&self, source: &str) {
        let [thin, behind] = ["libcuda.so.1", "libcuda.so.1.1"].map(|name| self.0.join(name));
        let driver = fs::read_link(&thin).unwrap();
        fs::remove_file(&thin).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/c")
            .join(source);
        // The library that it is linked with needs the name of the driver behind it, which the driver's own file
        // does not have.
        let options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1.1"];
        compile(&[&source], &behind, &options);
        let options = ["-shared", "-fPIC", "-Wl,--no-as-needed"];
        compile(&[&source, &behind], &thin, &options);
        fs::remove_file(&behind).unwrap();
        symlink(driver, &behind).unwrap();
    }

    /// Returns a command that runs a check of the program, with or without lowtide preloaded.
    fn command(&self, check: &str, preload: bool) -> Command {
        let mut command = Command::new(self.0.join("program"));
        command.arg(check);
        self.prepare(&mut command, preload);
        command
    }

    fn prepare(&self, command: &mut Command, preload: bool) {
        for (name, _) in env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            let mut ours = ["LOWTIDE_", "PYTORCH_", "FAKECUDA_"].iter();
            if ours.any(|ours| name.starts_with(ours)) {
                command.env_remove(name);
            }
        }
        command.env("LD_LIBRARY_PATH", &self.0);
        if preload {
            command.env("LD_PRELOAD", lowtide());
            command.env("LOWTIDE_PRELOAD", "1");
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// Returns the directory in which cargo puts the shared objects.
fn libraries() -> PathBuf {
    let program = env::current_exe().unwrap();
    program.parent().unwrap().to_owned()
}

fn lowtide() -> PathBuf {
    libraries().join("liblowtide.so")
}

fn compile(inputs: &[&Path], output: &Path, options: &[&str]) {
    let compiled = Command::new("cc")
        .args([
            "-std=gnu11",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pthread",
        ])
        .args(options)
        .args(inputs)
        .arg("-ldl")
        .arg("-o")
        .arg(output)
        .output()
        .expect("cc starts");
    let text = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{text}");
}

/// Runs a check that must pass. Returns its standard output and standard error.
fn run(mut command: Command) -> (String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let [printed, reported] = [stdout, stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(
        status.success(),
        "{command:?}: {status}\n{printed}{reported}"
    );
    (printed, reported)
}

/// Runs a check with each strategy that shares memory between streams in another way.
fn check_strategies(name: &str) {
    for strategy in ["caching", "tide"] {
        check(name, &[("LOWTIDE_STRATEGY", strategy)]);
    }
}

/// Runs a check in both forms, with these environment variables. Returns the standard error of each.
fn check(name: &str, variables: &[(&str, &str)]) -> [String; 2] {
    FORMS.map(|form| {
        let machine = Machine::new(name, form);
        let mut command = machine.command(name, true);
        command.envs(variables.iter().copied());
        run(command).1
    })
}

/// A program that knows nothing of lowtide is recorded because of its environment.
#[test]
fn a_program_is_recorded() {
    for form in FORMS {
        let machine = Machine::new("recorded", form);
        let path = machine.0.join("job.lowtide");
        let mut command = machine.command("loop", true);
        let (_, reported) = run({
            command.env("LOWTIDE_RECORD", &path);
            command
        });
        assert!(
            reported.contains("lowtide: recorded 30,001 events to "),
            "{reported}"
        );
        let snapshot = lowtide_trace::read(&path).unwrap();
        assert!(!snapshot.is_cut_off);
        assert_eq!(snapshot.traces[0].allocs(), 10_000);
    }
}

/// Without Python, the stack of a request has the program's own functions. They have line numbers if the program
/// has debugging information; otherwise only names from its symbols.
#[test]
fn a_program_is_recorded_with_stacks() {
    for (form, has_lines) in [(Form::Shared, false), (Form::Static, true)] {
        let machine = Machine::new("stacks", form);
        let path = machine.0.join("job.lowtide");
        let mut command = machine.command("stacks", true);
        command.env("LOWTIDE_RECORD", &path);
        command.env("LOWTIDE_RECORD_STACKS", "1");
        run(command);
        let recording = lowtide_trace::read(&path).unwrap();
        let trace = &recording.traces[0];
        let allocations =
            { trace.events.iter() }.filter(|event| event.event.action == Action::Alloc);
        let stacks: Vec<Vec<(&str, bool)>> = allocations
            .map(|event| {
                let frames = trace.stacks.frames(event.stack);
                frames.map(|frame| place(&frame)).collect()
            })
            .collect();
        let [first, second, third, other] = &stacks[..] else {
            panic!("{stacks:?}");
        };
        let names = |stack: &[(&str, bool)]| {
            stack
                .iter()
                .take(3)
                .map(|(name, _)| (*name).to_owned())
                .collect::<Vec<_>>()
        };
        let ours = |stack: &[(&str, bool)]| stack.iter().any(|(name, _)| name.contains("lowtide"));
        assert!(!stacks.iter().any(|stack| ours(stack)), "{stacks:?}");
        let inner = first
            .iter()
            .position(|(name, _)| *name == "weights")
            .unwrap();
        assert_eq!(
            names(&first[inner..]),
            ["weights", "stacks", "main"],
            "{first:?}"
        );
        assert_eq!((first, second), (second, third));
        assert_eq!(
            names(&other[inner..])[..2],
            ["weights", "in_thread"],
            "{other:?}"
        );
        assert!(
            first[inner..inner + 3]
                .iter()
                .all(|(_, line)| *line == has_lines),
            "{first:?}"
        );
    }
}

/// Returns a function's name, and whether its line in the program's source is known.
fn place<'t>(frame: &lowtide_trace::Frame<'t>) -> (&'t str, bool) {
    let is_source = frame.filename.raw().ends_with("preload.c") && frame.line > 0;
    (frame.name.raw(), is_source)
}

#[test]
fn a_loop_calls_the_driver_once() {
    for form in FORMS {
        let machine = Machine::new("loop", form);
        let (printed, reported) = run(machine.command("loop", true));
        assert_eq!(printed, "1\n", "{form:?}");
        assert_eq!(
            reported,
            "lowtide: 20000 calls for memory, 1 made to the driver\n\
             lowtide: device 0: peak 2.00 MiB reserved, peak 1.00 MiB live\n"
        );
        let (printed, reported) = run(machine.command("loop", false));
        assert_eq!((printed.as_str(), reported.as_str()), ("10000\n", ""));
    }
}

#[test]
fn contents_stay_whatever_the_strategy_and_the_thread() {
    let machine = Machine::new("threads", Form::Static);
    for strategy in StrategyName::ALL.map(StrategyName::as_str) {
        let mut command = machine.command("threads", true);
        command.env("LOWTIDE_STRATEGY", strategy);
        let (_, reported) = run(command);
        assert!(reported.starts_with("lowtide: 48"), "{reported}");
    }
}

#[test]
fn odd_arguments_have_cudas_answers() {
    check("odd_arguments", &[]);
    // The program expects the same results without lowtide.
    let machine = Machine::new("odd", Form::Shared);
    run(machine.command("odd_arguments", false));
}

#[test]
fn memory_of_others_is_left_to_them() {
    for reported in check("foreign", &[]) {
        let lines: Vec<&str> = reported.lines().collect();
        assert_eq!(
            lines[0],
            "lowtide: 4 calls for memory, 3 made to the driver; 1 for managed memory, left to the driver"
        );
    }
}

/// Memory that the driver serves counts a call for its allocation and one for its free.
#[test]
fn what_the_driver_serves_is_counted_with_its_frees() {
    for form in FORMS {
        let machine = Machine::new("left", form);
        machine.put_in_front("short_driver.c");
        let (_, reported) = run(machine.command("left_to_driver", true));
        assert_eq!(
            reported.lines().next(),
            Some(
                "lowtide: 82 calls for memory, 81 made to the driver; 10 for managed memory, left to the driver"
            )
        );
    }
}

#[test]
fn a_free_waits_for_the_devices_work() {
    check_strategies("free_waits");
}

#[test]
fn memory_is_reused_in_the_order_of_its_stream() {
    check_strategies("stream_order");
}

#[test]
fn threads_default_streams_are_apart() {
    check_strategies("threads_own_streams");
}

#[test]
fn a_streams_work_ends_before_its_handle_is_anothers() {
    check_strategies("destroyed_stream");
}

#[test]
fn a_stream_stays_where_nobody_can_tell_that_its_work_is_done() {
    check_strategies("stream_that_stays");
}

#[test]
fn captures_are_spoiled_by_what_spoils_them_without_lowtide() {
    check_strategies("captures");
}

#[test]
fn work_that_failed_is_reported_by_its_code() {
    // The second query is the one in the free.
    check(
        "failed_work",
        &[("FAKECUDA_FAIL", "cuStreamIsCapturing:2:700")],
    );
}

#[test]
fn running_out_is_reported_by_cudas_codes_and_ends() {
    check("out_of_memory", &[("FAKECUDA_CAPACITY", "67108864")]);
}

#[test]
fn what_is_kept_counts_as_free() {
    check("free_memory", &[]);
}

#[test]
fn what_a_paused_region_keeps_counts_once() {
    check("free_memory_of_regions", &[]);
}

#[test]
fn an_inner_allocation_is_not_shared_with_processes() {
    check("other_processes", &[]);
}

#[test]
fn a_reset_device_is_the_drivers_alone() {
    check("reset", &[]);
}

#[test]
fn each_device_has_its_memory() {
    for reported in check("devices", &[("FAKECUDA_DEVICES", "2")]) {
        assert_eq!(reported.lines().count(), 3, "{reported}");
    }
}

#[test]
fn names_lead_where_they_led() {
    check("looks_up", &[]);
}

#[test]
fn a_driver_that_looks_into_another_finds_that() {
    for form in FORMS {
        let machine = Machine::new("thin", form);
        machine.put_in_front("thin_driver.c");
        assert_eq!(run(machine.command("loop", true)).0, "1\n");
    }
}

#[test]
fn who_names_no_library_finds_what_there_is_without_lowtide() {
    check("looks_up_nowhere", &[]);
    let machine = Machine::new("nowhere", Form::Shared);
    run(machine.command("looks_up_nowhere", false));
}

#[test]
fn what_is_kept_goes_back_for_code_and_graphs() {
    for form in FORMS {
        let machine = Machine::new("needs", form);
        machine.put_in_front("short_driver.c");
        let mut command = machine.command("other_needs", true);
        command.env("FAKECUDA_CAPACITY", "67108864");
        run(command);
    }
}

#[test]
fn a_free_in_a_capture_waits_though_the_device_is_full() {
    check("captures_when_full", &[("FAKECUDA_CAPACITY", "67108864")]);
}

#[test]
fn children_are_served_and_report_for_themselves() {
    for reported in check("children", &[]) {
        let lines: Vec<&str> = reported.lines().collect();
        assert_eq!(lines.len(), 4, "{reported}");
        assert!(lines[0].starts_with("lowtide: 20000 calls"), "{reported}");
        assert!(lines[2].starts_with("lowtide: 4 calls"), "{reported}");
    }
}

#[test]
fn calls_before_and_after_main_are_served() {
    for reported in check("at_the_ends", &[("TEST_EARLY", "1")]) {
        assert!(reported.starts_with("lowtide: "), "{reported}");
    }
}

#[test]
fn the_summary_is_for_standard_error_alone() {
    let name = format!("standard-error-{}", std::process::id());
    let file = env::temp_dir().join(name);
    for reported in check(
        "closes_standard_error",
        &[("TEST_FILE", file.to_str().unwrap())],
    ) {
        assert_eq!(reported, "");
        assert_eq!(fs::read_to_string(&file).unwrap(), "");
    }
    fs::remove_file(&file).unwrap();
}

#[test]
fn without_preloading_everything_is_passed_on() {
    let machine = Machine::new("passed", Form::Shared);
    let mut command = machine.command("passes_on", false);
    // Only the variable is set, as in a child that inherits it.
    command
        .env("TEST_LIBRARY", lowtide())
        .env("LOWTIDE_PRELOAD", "1");
    assert_eq!(run(command).1, "");
    let mut unmarked = machine.command("loop", true);
    unmarked.env_remove("LOWTIDE_PRELOAD");
    assert_eq!(run(unmarked), ("10000\n".to_owned(), String::new()));
    let mut quiet = machine.command("loop", true);
    quiet.env("LOWTIDE_PRELOAD", "quiet");
    assert_eq!(run(quiet), ("1\n".to_owned(), String::new()));
}

#[test]
fn a_refused_configuration_is_reported_and_the_program_runs() {
    let machine = Machine::new("refused", Form::Shared);
    for (name, value, said) in [
        ("LOWTIDE_STRATEGY", "best", "'best'"),
        (
            "LOWTIDE_CONF",
            "expandable_segments:True",
            "expandable_segments",
        ),
    ] {
        let mut command = machine.command("loop", true);
        command.env(name, value);
        let (printed, reported) = run(command);
        assert_eq!(printed, "10000\n");
        let line = reported.strip_suffix("; the program runs without lowtide\n");
        let line = line.unwrap_or_else(|| panic!("{reported}"));
        assert!(
            line.starts_with("lowtide: ") && line.contains(said),
            "{reported}"
        );
        assert!(!line.contains('\n'), "{reported}");
    }
    // PyTorch's own variable is for PyTorch's allocator.
    let mut command = machine.command("loop", true);
    command.env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True");
    assert_eq!(run(command).0, "1\n");
}

#[test]
fn a_program_without_cuda_is_untouched() {
    let machine = Machine::new("without", Form::Static);
    for (script, code) in [("echo said; echo told >&2", 0), ("exit 7", 7)] {
        let run = |preload| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            machine.prepare(&mut command, preload);
            command.output().unwrap()
        };
        let output = run(true);
        assert_eq!(output.status.code(), Some(code));
        assert_eq!(output, run(false));
    }
}
