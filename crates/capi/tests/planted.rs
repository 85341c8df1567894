//! Attacks on a job that writes its files to a directory in which other users may plant files.
//!
//! If the test runs as root, the attacker is the user `nobody`. Otherwise the test's own user plants only files
//! that are refused from every owner.
#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

use std::env;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::rc::Rc;

#[path = "../../fakecuda/src/located.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "of another crate, and not all of it used"
)]
mod located;

const NOBODY: u32 = 65534;

/// The planted files: each line creates `$1`.
const LINK: &str = "ln -s ../home/victim \"$1\"";
const DANGLING_LINK: &str = "ln -s ../home/new \"$1\"";
const FIFO: &str = "mkfifo -m 666 \"$1\"";
const OTHERS: &str = ": > \"$1\"; chmod 666 \"$1\"";

/// A directory that others may write to, and beside it one of the victim's own.
struct Shared {
    job: Rc<Job>,
    place: PathBuf,
    mode: u32,
}

impl Shared {
    fn new(test: &str, mode: u32, job: &Rc<Job>) -> Shared {
        let name = format!("lowtide-planted-{test}-{mode:o}-{}", std::process::id());
        let place = env::temp_dir().join(name);
        let [home, shared] = ["home", "shared"].map(|name| place.join(name));
        fs::create_dir_all(&home).unwrap();
        fs::create_dir(&shared).unwrap();
        fs::write(home.join("victim"), "as it was").unwrap();
        fs::set_permissions(&home, Permissions::from_mode(0o700)).unwrap();
        fs::set_permissions(&shared, Permissions::from_mode(mode)).unwrap();
        if is_root() {
            chown(&shared, None, Some(NOBODY)).unwrap();
        }
        Shared {
            job: Rc::clone(job),
            place,
            mode,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.join("shared").join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.place.join("shared")).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Runs a job after the attacker planted a file: `line` creates it as `name`, in which `$$` is the job's
    /// process number. A job that hangs is killed.
    fn attack(&self, line: &str, name: &str, acts: &[&str], variables: &[(&str, &str)]) -> Output {
        let attacker = if is_root() {
            "setpriv --reuid=65534 --regid=65534 --clear-groups "
        } else {
            ""
        };
        let script =
            format!("{attacker}sh -c '{line}' sh \"{name}\" || exit 99; exec \"$0\" \"$@\"");
        let mut command = Command::new("timeout");
        command.args(["--signal=KILL", "60", "sh", "-c", &script]);
        command
            .arg(self.job.0.join("job"))
            .args(acts)
            .current_dir(self.path(""));
        for (name, _) in env::vars_os() {
            let text = name.to_string_lossy();
            let mut ours = ["LOWTIDE_", "PYTORCH_", "FAKECUDA_"].iter();
            if ours.any(|ours| text.starts_with(ours)) {
                command.env_remove(name);
            }
        }
        command.env("LD_LIBRARY_PATH", &self.job.0);
        command.env("FAKECUDA_CAPACITY", "104857600");
        command.envs(variables.iter().copied()).output().unwrap()
    }

    /// Checks that a job succeeded and wrote to no file of others. Returns its output.
    #[track_caller]
    fn check(&self, output: &Output) -> String {
        let text =
            String::from_utf8_lossy(&[&*output.stdout, &*output.stderr].concat()).into_owned();
        assert_eq!(output.status.code(), Some(0), "{:o}: {text}", self.mode);
        let home = self.place.join("home");
        let victim = fs::read_to_string(home.join("victim")).unwrap();
        assert_eq!(victim, "as it was", "{:o}: {text}", self.mode);
        assert_eq!(fs::read_dir(home).unwrap().count(), 1, "{text}");
        text
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.place);
    }
}

fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

/// Returns the planted files and the reasons in the refusals. A file of another user needs root.
fn plants() -> Vec<(&'static str, &'static str)> {
    let mut plants = vec![
        (LINK, "is a symbolic link"),
        (DANGLING_LINK, "is a symbolic link"),
        (FIFO, "is a FIFO"),
    ];
    if is_root() {
        plants.push((OTHERS, "belongs to another user (uid 65534)"));
    }
    plants
}

/// Returns directories that everybody may write to, with and without the sticky bit, and one that a group may
/// write to.
fn shared(test: &str) -> Vec<Shared> {
    let mut modes = vec![0o777, 0o1777];
    if is_root() {
        modes.push(0o775);
    }
    let job = Rc::new(Job::new(test));
    let modes = modes.into_iter();
    modes.map(|mode| Shared::new(test, mode, &job)).collect()
}

/// The job, in a directory with the libraries that it needs. The directory is removed on drop.
struct Job(PathBuf);

impl Job {
    fn new(test: &str) -> Job {
        let built = env::current_exe().unwrap();
        let libraries = built.parent().unwrap();
        let root = env!("CARGO_MANIFEST_DIR");
        let name = format!("planted-{test}-{}", std::process::id());
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&directory).unwrap();
        symlink(
            libraries.join("liblowtide.so"),
            directory.join("liblowtide.so"),
        )
        .unwrap();
        symlink(located::library_path(), directory.join("libcuda.so.1")).unwrap();
        let compiled = Command::new("cc")
            .args([
                "-std=c99",
                "-Wall",
                "-Wextra",
                "-Wpedantic",
                "-Werror",
                "-I",
            ])
            .arg(format!("{root}/include"))
            .arg(format!("{root}/tests/c/job.c"))
            .arg("-L")
            .arg(&directory)
            .args(["-llowtide", "-o"])
            .arg(directory.join("job"))
            .output()
            .expect("cc starts");
        let text = String::from_utf8_lossy(&compiled.stderr);
        assert!(compiled.status.success(), "{text}");
        Job(directory)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_recording_is_written_to_no_planted_file() {
    for (line, what) in plants() {
        for shared in shared("record") {
            let path = shared.path("job.lowtide");
            let shown = path.to_str().unwrap();
            let expected = format!("nothing is recorded: {shown}: {what}");
            let called = shared.attack(line, "job.lowtide", &["record", shown], &[]);
            let text = shared.check(&called);
            assert!(text.starts_with(&expected), "{text}");
            let variables = [("LOWTIDE_RECORD", shown)];
            fs::remove_file(&path).unwrap();
            let asked = shared.attack(line, "job.lowtide", &["memory"], &variables);
            let text = shared.check(&asked);
            assert!(text.starts_with(&format!("lowtide: {expected}")), "{text}");
            assert_eq!(text.lines().count(), 1, "{text}");
            assert_eq!(shared.names(), ["job.lowtide"]);
            let there = path.symlink_metadata().unwrap();
            assert!(!there.is_file() || there.len() == 0);
        }
    }
}

/// An earlier recording may be readable for everybody, and may have a second name (a hard link).
#[test]
fn a_recording_is_a_new_file_for_its_user_alone() {
    for shared in shared("earlier") {
        let path = shared.path("job.lowtide");
        let earlier = b"lowtide\n\x01\0";
        fs::write(&path, earlier).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        fs::hard_link(&path, shared.path("other")).unwrap();
        let job = ["record", path.to_str().unwrap()];
        assert_eq!(shared.check(&shared.attack("true", "", &job, &[])), "");
        let mode = fs::metadata(&path).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(lowtide_trace::read(&path).unwrap().traces[0].is_used());
        assert_eq!(fs::read(shared.path("other")).unwrap(), earlier);
        assert_eq!(shared.names(), ["job.lowtide", "other"]);
    }
}

#[test]
fn metrics_are_written_to_no_planted_file() {
    for (line, what) in plants() {
        for shared in shared("metrics") {
            let path = shared.path("job.prom");
            let shown = path.to_str().unwrap();
            let variables = [("LOWTIDE_METRICS", shown)];
            let run = |name: &str| shared.attack(line, name, &["memory"], &variables);
            let text = shared.check(&run("job.prom"));
            let expected = format!("lowtide: no metrics: LOWTIDE_METRICS={shown}: {what}");
            assert!(text.starts_with(&expected), "{text}");
            assert_eq!(text.lines().count(), 1, "{text}");
            fs::remove_file(&path).unwrap();
            // A file that is planted under a name with the job's process number has no effect.
            assert_eq!(shared.check(&run("job.prom.$$")), "");
            assert_eq!(shared.names().len(), 1, "{:?}", shared.names());
        }
    }
}

/// A file whose name is taken gets the process number in its name.
#[test]
fn a_dump_is_written_beside_what_is_planted() {
    for (line, _) in plants() {
        for shared in shared("dump") {
            let shown = shared.path("");
            let variables = [("LOWTIDE_OOM_DUMP", shown.to_str().unwrap())];
            let output = shared.attack(line, "oom.pickle", &["exhaust"], &variables);
            let text = shared.check(&output);
            assert!(text.contains("\nWritten: "), "{text}");
            let names = shared.names();
            let [planted, page, dump] = &names[..] else {
                panic!("{names:?}")
            };
            assert!(
                page.ends_with(".html") && page.starts_with("oom.pid"),
                "{names:?}"
            );
            assert!(
                dump.ends_with(".pickle") && dump.starts_with("oom.pid"),
                "{names:?}"
            );
            assert_eq!(planted, "oom.pickle");
            for name in [page, dump] {
                let found = fs::metadata(shared.path(name)).unwrap();
                assert_eq!(found.mode() & 0o777, 0o600, "{name}");
            }
        }
    }
}

/// The disk has less space than a report needs, or than a snapshot needs.
#[test]
fn a_dump_that_does_not_fit_leaves_no_part_of_a_file() {
    let job = Rc::new(Job::new("full"));
    for (bytes, names) in [("10", &[][..]), ("40000", &["oom.pickle"])] {
        let shared = Shared::new("full", 0o755, &job);
        let directory = shared.path("");
        let dump = ("LOWTIDE_OOM_DUMP", directory.to_str().unwrap());
        let output = shared.attack("true", "", &["exhaust"], &[dump, ("JOB_FILE_BYTES", bytes)]);
        let text = shared.check(&output);
        assert!(text.contains("File too large"), "{text}");
        assert_eq!(shared.names(), names, "{text}");
    }
}

/// NFS usually changes the owner of root's files to `nobody`.
#[test]
fn a_job_replaces_its_own_file_where_the_file_system_gives_it_to_another() {
    if !is_root() {
        return;
    }
    let job = Rc::new(Job::new("given"));
    let shared = Shared::new("given", 0o777, &job);
    let path = shared.path("job.lowtide");
    let acts = ["record", path.to_str().unwrap()];
    for _ in 0..2 {
        let output = shared.attack("true", "", &acts, &[("JOB_FILES_UID", "65534")]);
        assert_eq!(shared.check(&output), "");
        assert_eq!(fs::metadata(&path).unwrap().uid(), NOBODY);
        assert_eq!(shared.names(), ["job.lowtide"]);
    }
    let output = shared.attack("true", "", &acts, &[]);
    let text = shared.check(&output);
    assert!(
        text.contains("belongs to another user (uid 65534)"),
        "{text}"
    );
    assert_eq!(shared.names(), ["job.lowtide"]);
}

/// If another user's symbolic link is part of the path, the directory is not the one that the job's user meant.
#[test]
fn a_job_goes_through_no_link_of_another_user() {
    if !is_root() {
        return;
    }
    for shared in shared("way") {
        let plant = "ln -s ../home \"$1\"";
        let [recording, metrics, dump] = ["way/job.lowtide", "way/job.prom", "way/dumps"]
            .map(|name| shared.path(name).to_str().unwrap().to_owned());
        let why = "leads through `way`, a symbolic link of another user (uid 65534)";
        for (job, variable, value) in [
            (&["record", &recording][..], "LOWTIDE_PUBLISH", "0"),
            (&["memory"], "LOWTIDE_RECORD", &recording),
            (&["memory"], "LOWTIDE_METRICS", &metrics),
            (&["exhaust"], "LOWTIDE_OOM_DUMP", &dump),
        ] {
            let output = shared.attack(plant, "way", job, &[(variable, value)]);
            let text = shared.check(&output);
            assert!(text.contains(why), "{text}");
            fs::remove_file(shared.path("way")).unwrap();
        }
    }
}
