//! `lowtide top` among the sockets of other programs: full queues, odd names, ended processes.
#![expect(clippy::unwrap_used, reason = "in what the tests share")]

mod common;

use std::ffi::OsStr;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use serde_json::Value;

/// Long enough for any machine, and finite.
const DEADLINE: Duration = Duration::from_secs(60);

/// The answer of a job.
const FIGURES: &str = "lowtide_info{command=\"job\",config=\"caching\",version=\"1\"} 1\n\
                       lowtide_reserved_bytes{device=\"0\"} 4096\n";

/// A user's runtime directory, removed at the end of the test.
struct Runtime(PathBuf);

impl Runtime {
    fn new(test: &str) -> Runtime {
        let name = format!("lowtide-top-{test}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        let runtime = Runtime(path);
        let mut builder = fs::DirBuilder::new();
        builder.mode(0o700).recursive(true);
        builder.create(runtime.sockets()).unwrap();
        runtime
    }

    fn sockets(&self) -> PathBuf {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        self.0.join(format!("lowtide/boot-{}", boot.trim()))
    }

    /// Creates a socket that listens.
    fn plant(&self, name: impl AsRef<OsStr>) -> UnixListener {
        UnixListener::bind(self.sockets().join(name.as_ref())).unwrap()
    }

    /// Starts a job that answers every connection.
    fn job(&self, name: &str) {
        self.job_that_says(name, FIGURES.to_owned());
    }

    fn job_that_says(&self, name: &str, figures: String) {
        let listener = self.plant(name);
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let _ = stream.write_all(figures.as_bytes());
            }
        });
    }

    /// Returns the process ids of this directory's processes that `top` shows. Asserts that `top` ends.
    fn top(&self) -> Vec<u64> {
        let mut command = common::lowtide();
        command
            .args(["top", "--json", "--interval", "0.05"])
            .env("XDG_RUNTIME_DIR", &self.0)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let start = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > DEADLINE {
                child.kill().unwrap();
                panic!("it hangs");
            }
            thread::sleep(Duration::from_millis(20));
        };
        let (mut shown, mut errors) = (String::new(), String::new());
        child.stdout.unwrap().read_to_string(&mut shown).unwrap();
        child.stderr.unwrap().read_to_string(&mut errors).unwrap();
        assert!(status.success(), "{errors}");
        let shown: Vec<Value> = serde_json::from_str(&shown).unwrap();
        // Jobs of the user who runs the tests may be listed, too.
        let planted = shown.iter().filter(|process| process["command"] == "job");
        planted
            .map(|process| process["pid"].as_u64().unwrap())
            .collect()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Connects to a socket until its queue is full, and returns the connections.
fn fill(address: &SocketAddrUnix, listener: &UnixListener) -> Vec<OwnedFd> {
    rustix::net::listen(listener, 1).unwrap();
    let connect = || {
        let flags = SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, address).map(|()| socket)
    };
    let held: Vec<OwnedFd> = std::iter::from_fn(|| connect().ok()).take(100).collect();
    assert_eq!(connect().unwrap_err(), rustix::io::Errno::AGAIN);
    held
}

#[test]
fn a_process_that_accepts_nothing_hides_no_other() {
    let runtime = Runtime::new("full");
    let stopped = runtime.plant("top-2-0");
    runtime.job("top-1-0");
    assert_eq!(runtime.top(), [1], "it accepts none, and says nothing");
    let address = SocketAddrUnix::new(runtime.sockets().join("top-2-0")).unwrap();
    let _held = fill(&address, &stopped);
    for _ in 0..3 {
        assert_eq!(runtime.top(), [1]);
    }
}

#[test]
fn abstract_names_of_others_are_nobodys() {
    let runtime = Runtime::new("abstract");
    runtime.job("top-1-0");
    let bind = |name: &[u8]| {
        let address = SocketAddr::from_abstract_name(name).unwrap();
        UnixListener::bind_addr(&address).unwrap()
    };
    let name = format!("lowtide-top-{}", std::process::id());
    let full = bind(name.as_bytes());
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let _held = fill(&address, &full);
    let _odd = bind(b"lowtide-top-\xff\xfe");
    assert_eq!(runtime.top(), [1]);
}

#[test]
fn names_that_are_no_text_are_passed_over() {
    let runtime = Runtime::new("bytes");
    runtime.job("top-1-0");
    let _planted = runtime.plant(OsStr::from_bytes(b"top-\xff-0"));
    fs::write(runtime.sockets().join("top-3-0"), FIGURES).unwrap();
    assert_eq!(runtime.top(), [1]);
}

#[test]
fn processes_with_the_same_number_are_both_shown() {
    let runtime = Runtime::new("same");
    runtime.job("top-7-a");
    runtime.job("top-7-b");
    assert_eq!(runtime.top(), [7, 7]);
}

#[test]
fn answers_that_never_end_are_left_out() {
    let runtime = Runtime::new("endless");
    runtime.job("top-1-0");
    let listener = runtime.plant("top-2-0");
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                while stream.write_all(FIGURES.as_bytes()).is_ok() {
                    thread::sleep(Duration::from_millis(1));
                }
            });
        }
    });
    assert_eq!(runtime.top(), [1]);
}

#[test]
fn what_an_ended_process_left_goes() {
    let runtime = Runtime::new("ended");
    runtime.job("top-1-0");
    drop(runtime.plant("top-2-0"));
    drop(runtime.plant("another"));
    assert_eq!(runtime.top(), [1]);
    let left = |name: &str| runtime.sockets().join(name).exists();
    assert_eq!(
        ["top-1-0", "top-2-0", "another"].map(left),
        [true, false, true]
    );
}

#[test]
fn directories_that_others_may_enter_are_not_looked_at() {
    for spoil in [
        |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap(),
        |path: &Path| {
            let elsewhere = path.with_extension("elsewhere");
            fs::rename(path, &elsewhere).unwrap();
            symlink(&elsewhere, path).unwrap();
        },
        // Changing the owner needs a privilege that tests in a container often have.
        |path: &Path| {
            if std::os::unix::fs::chown(path, Some(65_534), None).is_err() {
                fs::set_permissions(path, fs::Permissions::from_mode(0o750)).unwrap();
            }
        },
    ] {
        let runtime = Runtime::new("open");
        runtime.job("top-1-0");
        assert_eq!(runtime.top(), [1]);
        spoil(&runtime.sockets());
        assert_eq!(runtime.top(), [0; 0]);
    }
}

/// Other processes choose their commands, tags and streams, and their answers may contain anything.
#[test]
fn what_processes_say_is_printed_on_one_line() {
    let runtime = Runtime::new("hostile");
    let text = common::HOSTILE
        .replace('\\', r"\\")
        .replace('"', "\\\"")
        .replace('\n', r"\n");
    let figures = format!(
        "lowtide_info{{command=\"{text}\",config=\"{text}\",version=\"{text}\"}} 1\n\
         lowtide_stream_allocated_bytes{{device=\"0\",stream=\"{text}\"}} 1\n\
         lowtide_stream_allocated_bytes{{device=\"0\",stream=\"1\"}} 1\n\
         lowtide_region_live_bytes{{device=\"0\",region=\"{text}\",backup=\"{text}\"}} 1\n"
    );
    runtime.job_that_says("top-1-0", figures);
    for format in ["--once", "--json"] {
        let mut command = common::lowtide();
        command.args(["top", format, "--interval", "0.05"]);
        let said = common::printed(command.env("XDG_RUNTIME_DIR", &runtime.0), 0);
        let shown = if format == "--once" {
            r"(x\u{1b}[1A"
        } else {
            r#""backup": "x\u001b[1A"#
        };
        assert!(said.contains(shown), "{said}");
    }
}
