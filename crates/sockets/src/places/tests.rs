use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{PermissionsExt as _, chown, lchown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::fs::CWD;

use super::*;
use crate::{name_for_figures, process_of};

/// Long enough for any machine, and a limit for a call that blocks.
const DEADLINE: Duration = Duration::from_secs(60);

const BOOT: &str = "boot-1";

/// The directories of one test's machine: a runtime directory and a temporary one.
struct Machine {
    root: PathBuf,
    places: Places,
}

impl Machine {
    fn new(test: &str) -> Machine {
        let name = format!("lowtide-sockets-{test}-{}", std::process::id());
        let root = std::env::temp_dir().join(name);
        let places = Places {
            runtime: vec![root.join("runtime")],
            temporary: root.join("tmp"),
            boot: BOOT.to_owned(),
        };
        for path in [&places.runtime[0], &places.temporary] {
            fs::create_dir_all(path).unwrap();
        }
        allow(&places.runtime[0], 0o700);
        allow(&places.temporary, 0o1777);
        Machine { root, places }
    }

    /// Returns the path of the process's own directory, relative to the root.
    fn own(&self) -> String {
        let own = self.places.own().unwrap().identity().unwrap();
        for parent in ["runtime", "tmp"] {
            for entry in fs::read_dir(self.root.join(parent)).into_iter().flatten() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                let path = self.root.join(parent).join(&name);
                let found = Directory::open(CWD, path.join(BOOT));
                if found.is_ok_and(|found| found.identity().unwrap() == own) {
                    return format!("{parent}/{name}");
                }
            }
        }
        panic!("the directory is somewhere else");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn allow(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Returns the result of `act`, and fails if it blocks.
fn in_time<R: Send + 'static>(act: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(act()));
    receiver.recv_timeout(DEADLINE).unwrap()
}

#[test]
fn a_runtime_directory_comes_first() {
    let machine = Machine::new("first");
    assert_eq!(machine.places.all().len(), 0);
    assert_eq!(machine.own(), "runtime/lowtide");
    let made = fs::metadata(machine.root.join("runtime/lowtide")).unwrap();
    assert_eq!(made.permissions().mode() & 0o7777, 0o700);
    assert_eq!(machine.places.all().len(), 1);
    // A directory that two paths lead to is returned once.
    let twice = Places {
        runtime: vec![
            machine.root.join("runtime"),
            machine.root.join("tmp/../runtime"),
        ],
        temporary: machine.root.join("tmp"),
        boot: BOOT.to_owned(),
    };
    assert_eq!(twice.all().len(), 1);
    assert_eq!(Places::new(Some("relative".into())).runtime.len(), 1);
    assert_eq!(
        Places::new(Some("/absolute".into())).runtime[0],
        Path::new("/absolute")
    );
}

#[test]
fn a_directory_that_others_may_enter_is_refused() {
    for path in ["runtime", "runtime/lowtide"] {
        for mode in [0o777, 0o755, 0o710, 0o701] {
            let machine = Machine::new("mode");
            assert_eq!(machine.own(), "runtime/lowtide");
            allow(&machine.root.join(path), mode);
            assert_eq!(machine.places.all().len(), 0, "{path} {mode:o}");
            assert_eq!(
                machine.own(),
                format!("tmp/{}", usual_name()),
                "{path} {mode:o}"
            );
        }
    }
}

#[test]
fn a_link_or_another_file_is_no_directory() {
    for path in ["runtime", "runtime/lowtide"] {
        let machine = Machine::new("link");
        let (place, elsewhere) = (machine.root.join(path), machine.root.join("elsewhere"));
        for path in ["", "lowtide", "lowtide/boot-1", "boot-1"] {
            let directory = elsewhere.join(path);
            fs::create_dir_all(&directory).unwrap();
            allow(&directory, 0o700);
        }
        let _ = fs::remove_dir(&place);
        symlink(&elsewhere, &place).unwrap();
        assert_eq!(machine.places.all().len(), 0, "{path}");
        assert!(machine.own().starts_with("tmp/"), "{path}");
        fs::remove_file(&place).unwrap();
        rustix::fs::mknodat(CWD, &place, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        let Machine { root, places } = &machine;
        let places = Places {
            runtime: places.runtime.clone(),
            temporary: root.join("tmp"),
            boot: BOOT.to_owned(),
        };
        assert_eq!(in_time(move || places.all().len()), 1, "{path}");
    }
}

/// Needs the right to change a file's owner, as tests in a container often have.
#[test]
fn another_users_directory_is_refused() {
    let machine = Machine::new("owner");
    let lowtide = machine.root.join("runtime/lowtide");
    fs::create_dir(&lowtide).unwrap();
    allow(&lowtide, 0o700);
    assert_eq!(machine.own(), "runtime/lowtide");
    if chown(&lowtide, Some(65_534), None).is_ok() {
        assert_eq!(machine.places.all().len(), 0);
        assert!(machine.own().starts_with("tmp/"));
    }
}

/// Needs the right to change a file's owner, like the test above.
#[test]
fn the_way_leads_through_no_link_of_another_user() {
    let mut machine = Machine::new("way");
    let way = machine.root.join("tmp/way");
    symlink("..", &way).unwrap();
    machine.places.runtime = vec![way.join("runtime")];
    assert_eq!(machine.own(), "runtime/lowtide");
    if lchown(&way, Some(65_534), None).is_ok() {
        assert_eq!(machine.places.all().len(), 0);
        assert!(machine.own().starts_with("tmp/"));
    }
}

/// A socket of another machine refuses connections here.
#[test]
fn machines_with_one_file_system_leave_each_others_sockets() {
    for has_runtime in [true, false] {
        let machine = Machine::new("boots");
        if !has_runtime {
            fs::remove_dir(machine.root.join("runtime")).unwrap();
        }
        let other = Places {
            runtime: machine.places.runtime.clone(),
            temporary: machine.places.temporary.clone(),
            boot: "boot-2".to_owned(),
        };
        let (listener, _entry) = other.own().unwrap().listen("top-1-0").unwrap();
        drop(listener);
        machine.places.own().unwrap().remove_dead("");
        let names: Vec<_> = machine.places.all().iter().map(Directory::names).collect();
        assert_eq!(names.len(), 1);
        assert_eq!(names[0].as_ref().unwrap().len(), 0);
        let all = other.all();
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].names().unwrap(), ["top-1-0"]);
    }
    assert_ne!(Places::new(None).boot, "boot-");
}

#[test]
fn names_that_others_took_hide_nobody() {
    let machine = Machine::new("taken");
    fs::remove_dir(machine.root.join("runtime")).unwrap();
    let taken = machine.root.join("tmp").join(usual_name());
    fs::create_dir(&taken).unwrap();
    allow(&taken, 0o777);
    for index in 0..100 {
        let name = format!("{}-{index:016x}", usual_name());
        symlink(&taken, machine.root.join("tmp").join(name)).unwrap();
    }
    assert_eq!(machine.places.all().len(), 0);
    let own = machine.own();
    assert!(own.starts_with(&format!("tmp/{}-", usual_name())), "{own}");
    assert_eq!(machine.own(), own, "the next process has the same");
    assert_eq!(machine.places.all().len(), 1);
    // A user id that begins with this one's digits is another user.
    let other = machine.root.join("tmp").join(format!("{}0", usual_name()));
    for directory in [&other, &other.join(BOOT)] {
        fs::create_dir(directory).unwrap();
        allow(directory, 0o700);
    }
    assert_eq!(machine.places.all().len(), 1);
}

#[test]
fn a_socket_is_found_and_answers() {
    let mut machine = Machine::new("answers");
    // Longer than a socket's path may be.
    let long = machine.root.join("long".repeat(40));
    fs::create_dir_all(&long).unwrap();
    allow(&long, 0o700);
    machine.places.runtime = vec![long];
    let name = name_for_figures().unwrap();
    assert_eq!(process_of(name.as_ref()), Some(std::process::id()));
    let (listener, entry) = machine.places.own().unwrap().listen(&name).unwrap();
    let directory = machine.places.all().pop().unwrap();
    assert_eq!(directory.names().unwrap(), [name.as_str()]);
    let mut stream = directory.connect(name.as_ref()).unwrap();
    let (mut accepted, _) = listener.accept().unwrap();
    accepted.write_all(b"figures").unwrap();
    let mut bytes = [0; 7];
    stream.set_nonblocking(false).unwrap();
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"figures");
    entry.remove();
    assert_eq!(directory.names().unwrap().len(), 0);
}

#[test]
fn a_full_queue_is_not_waited_for() {
    let machine = Machine::new("full");
    let (_listener, _entry) = machine.places.own().unwrap().listen("full").unwrap();
    let directory = machine.places.all().pop().unwrap();
    let error = in_time(move || {
        let mut held: Vec<UnixStream> = Vec::new();
        loop {
            match directory.connect("full".as_ref()) {
                Ok(stream) => held.push(stream),
                Err(error) => break (held.len(), error.kind()),
            }
        }
    });
    assert_eq!(error, (17, ErrorKind::WouldBlock));
}

#[test]
fn a_socket_of_a_process_that_ended_refuses() {
    let machine = Machine::new("ended");
    let (listener, _entry) = machine.places.own().unwrap().listen("ended").unwrap();
    drop(listener);
    let directory = machine.places.all().pop().unwrap();
    let refused = |name: &str| directory.connect(name.as_ref()).unwrap_err().kind();
    assert_eq!(refused("ended"), ErrorKind::ConnectionRefused);
    let (_listener, _other) = machine.places.own().unwrap().listen("end").unwrap();
    directory.remove_dead("other");
    assert_eq!(directory.names().unwrap(), ["end", "ended"]);
    directory.remove_dead("end");
    assert_eq!(directory.names().unwrap(), ["end"], "what lives stays");
    assert_eq!(refused("ended"), ErrorKind::NotFound);
}

#[test]
fn names_may_be_any_bytes() {
    let machine = Machine::new("bytes");
    let directory = machine.places.own().unwrap();
    let name = OsStr::from_bytes(b"top-\xff-1");
    let _planted = UnixListener::bind(directory.path_of(name)).unwrap();
    assert_eq!(directory.names().unwrap(), [name]);
    assert_eq!(process_of(name), None);
    directory.connect(name).unwrap();
    for other in ["top-1", "top-x-1", "share-1-2", "top--1", ""] {
        assert_eq!(process_of(other.as_ref()), None, "{other}");
    }
}
