//! Runs the command, and creates files for its tests.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::{env, fs};

/// Returns the path of one of the project's sample recordings.
pub(crate) fn sample(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../traces")
        .join(name)
}

/// Returns the path of one of the small files that Python and PyTorch wrote, as an argument for the command.
pub(crate) fn small(name: &str) -> String {
    format!("../crates/trace/tests/data/{name}")
}

/// The name of the sample that the tests of output use. It is relative to the directory of the samples, so that no
/// output contains a path of this machine.
pub(crate) const GPT2: &str = "gpt2_train.pickle.zst";

/// Returns the command, in the directory of the samples.
pub(crate) fn lowtide() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lowtide"));
    command
        .current_dir(sample(""))
        .stdin(Stdio::null())
        // The table shows how many replays ran at once.
        .env("RAYON_NUM_THREADS", "2");
    command
}

/// Returns the standard output of a successful run. Standard error has to be empty.
pub(crate) fn run<S: AsRef<OsStr>>(arguments: &[S]) -> String {
    let output = lowtide().args(arguments).output().unwrap();
    assert_eq!(stderr(&output), "");
    assert_eq!(output.status.code(), Some(0));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the JSON that a successful run prints.
pub(crate) fn run_json<S: AsRef<OsStr>>(arguments: &[S]) -> serde_json::Value {
    serde_json::from_str(&run(arguments)).unwrap()
}

/// Characters that may harm a terminal, a shell or a page.
pub(crate) const HOSTILE: &str = "x\u{1b}[1A\u{1b}[2K\r\u{8}\u{7}\n\u{9b}31m\u{202e}\u{2066}\u{2028}$(touch ran)`touch ran`'\"\\</script><!--";

/// Runs the command and returns everything that it prints. Asserts that it exits with `status` and prints no
/// control characters except line feeds.
pub(crate) fn printed(command: &mut Command, status: i32) -> String {
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert_eq!(output.status.code(), Some(status), "{command:?}: {text:?}");
    let is_harmful = |letter: char| {
        (letter.is_control() && letter != '\n') || "\u{202e}\u{2066}\u{2028}".contains(letter)
    };
    for text in &text {
        assert!(!text.contains(is_harmful), "{command:?}: {text:?}");
        // The hostile text contains a line feed, and this text behind it.
        let begins = |line: &str| line.starts_with(r"\u{9b}31m") || line.starts_with(r"\u009b31m");
        assert!(!text.lines().any(begins), "{command:?}: {text:?}");
    }
    text.concat()
}

/// Returns the one line that a failing run prints, without the command's name.
pub(crate) fn fail<S: AsRef<OsStr>>(arguments: &[S]) -> String {
    failure(&lowtide().args(arguments).output().unwrap())
}

/// Returns the one line in `output`, which is that of a failed run.
pub(crate) fn failure(output: &Output) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(output.stdout.is_empty(), "{text}");
    let line = text.strip_suffix('\n').unwrap();
    assert!(!line.contains('\n'), "one line: {text}");
    let line = line.strip_prefix("lowtide: ");
    line.unwrap_or_else(|| panic!("in the command's name: {text}"))
        .to_owned()
}

/// Returns the standard error in `output`.
pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Runs the command with `input` on its standard input.
pub(crate) fn run_with_stdin(arguments: &[&str], input: &[u8]) -> Output {
    let mut child = lowtide()
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The command may stop reading at the first error.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

/// A directory that is removed with its contents.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Returns a new directory. `name` is the name of the test.
    pub(crate) fn new(name: &str) -> Scratch {
        let directory = env::temp_dir().join(format!("lowtide-{name}-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        Scratch(directory)
    }

    /// Returns the path of a file in the directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file in the directory and returns its path.
    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, contents).unwrap();
        path
    }

    /// Writes `snapshot` to a file in the directory and returns its path.
    pub(crate) fn write_snapshot(&self, name: &str, snapshot: &lowtide_trace::Snapshot) -> PathBuf {
        let mut contents = Vec::new();
        lowtide_trace::write_compact(snapshot, &mut contents).unwrap();
        self.write(name, contents)
    }

    /// Returns the names of the files in the directory.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Reads a sample.
pub(crate) fn read_sample(name: &str) -> lowtide_trace::Snapshot {
    lowtide_trace::read(&sample(name)).unwrap()
}

/// Returns a sample of one device without its first `events` events. The state after them takes their place.
pub(crate) fn without_beginning(name: &str, events: usize) -> lowtide_trace::Snapshot {
    let mut snapshot = read_sample(name);
    let trace = &mut snapshot.traces[0];
    let rest = trace.events[events..].iter().map(|event| event.event);
    let recovered = lowtide_trace::Trace::recovered(trace.device, rest, trace.segments.clone());
    *trace = recovered.unwrap();
    snapshot
}

/// Returns `table` with the figures under `titles` masked, because they vary from run to run or with the simulated
/// device's costs. These columns are aligned to the right.
pub(crate) fn mask_columns(table: &str, titles: &[&str]) -> String {
    let Some(header) = table.lines().find(|line| line.contains(titles[0])) else {
        return table.to_owned();
    };
    let ends: Vec<usize> = titles
        .iter()
        .map(|title| {
            let start = header.find(title).unwrap();
            header[..start + title.len()].chars().count()
        })
        .collect();
    let mut masked = Vec::new();
    let mut inside = false;
    for line in table.lines() {
        inside = (inside || line == header) && !line.is_empty() && !line.starts_with('…');
        let is_row = inside && line != header && !line.starts_with('─');
        let mut line: Vec<char> = line.chars().collect();
        if is_row {
            for (&end, title) in ends.iter().zip(titles) {
                let start = end - title.len();
                line[start..end].fill(' ');
                line[end - 1] = '#';
            }
        }
        masked.push(line.into_iter().collect::<String>());
    }
    masked.join("\n")
}
