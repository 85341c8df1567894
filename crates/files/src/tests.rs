use std::fs::{self, Permissions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::fs::mkfifoat;
use rustix::process::geteuid;

use super::*;
use crate::unguessable::unguessable_name;

/// The user `nobody`.
const NOBODY: u32 = 65534;

/// A directory that is removed with its contents.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, mode: u32) -> Scratch {
        let name = format!("lowtide-files-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir_all(&directory).unwrap();
        fs::set_permissions(&directory, Permissions::from_mode(mode)).unwrap();
        Scratch(directory)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name();
        let mut names: Vec<String> = entries
            .map(|entry| name(entry).into_string().unwrap())
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

/// Fails if `act` blocks.
fn without_waiting<R: Send + 'static>(act: impl FnOnce() -> R + Send + 'static) -> R {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || send.send(act()));
    let answer = receive.recv_timeout(Duration::from_secs(60));
    answer.expect("nothing is waited for")
}

fn mode(file: &File) -> u32 {
    file.metadata().unwrap().mode() & 0o7777
}

/// Returns the mode of a new file under the user's umask.
fn umask_mode(scratch: &Scratch) -> u32 {
    let path = scratch.path("umask");
    let found = mode(&File::create(&path).unwrap());
    fs::remove_file(path).unwrap();
    found
}

fn write(path: &Path, readers: Readers) -> io::Result<File> {
    let new = NewFile::create(path, readers)?;
    new.file().write_all(b"new")?;
    new.rename()
}

/// Creates one of each kind that is not a regular file of this user.
fn plant(scratch: &Scratch) -> Vec<(PathBuf, &'static str)> {
    symlink(scratch.path("victim"), scratch.path("link")).unwrap();
    symlink("nothing", scratch.path("dangling")).unwrap();
    mkfifoat(CWD, scratch.path("fifo"), Mode::from_raw_mode(0o666)).unwrap();
    drop(UnixListener::bind(scratch.path("socket")).unwrap());
    let planted = ["link", "dangling", "fifo", "socket"].map(|name| scratch.path(name));
    let what = [
        "is a symbolic link",
        "is a symbolic link",
        "is a FIFO",
        "is a socket",
    ];
    let mut planted: Vec<_> = planted.into_iter().zip(what).collect();
    planted.push(("/dev/null".into(), "is a device"));
    planted.push((scratch.0.clone(), "is a directory"));
    planted.push((others_file(scratch), "belongs to another user (uid "));
    planted
}

/// Returns a regular file that everybody may write, or one of root's.
fn others_file(scratch: &Scratch) -> PathBuf {
    if !geteuid().is_root() {
        return "/etc/passwd".into();
    }
    let path = scratch.path("others");
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    chown(&path, Some(NOBODY), None).unwrap();
    path
}

#[test]
fn only_a_file_of_the_users_own_is_replaced_or_opened() {
    for shared in [0o777, 0o1777] {
        let scratch = Scratch::new(&format!("planted-{shared:o}"), shared);
        fs::write(scratch.path("victim"), "as it was").unwrap();
        let planted = plant(&scratch);
        let names = scratch.names();
        for (path, what) in planted {
            for act in [
                |path: &Path| write(path, Readers::User).map(drop),
                |path: &Path| write(path, Readers::Umask).map(drop),
                |path: &Path| open_own(path).map(drop),
            ] {
                let named = path.clone();
                let error = without_waiting(move || act(&named)).unwrap_err();
                let text = error.to_string();
                assert!(text.starts_with(what), "{}: {text}", path.display());
                let is_others = error.kind() == ErrorKind::PermissionDenied;
                assert_eq!(is_others, what.starts_with("belongs"), "{text}");
            }
            let named = path.clone();
            let created = without_waiting(move || create_new(&named, Readers::User));
            assert_eq!(created.unwrap_err().kind(), ErrorKind::AlreadyExists);
        }
        assert_eq!(scratch.names(), names);
        let victim = fs::read_to_string(scratch.path("victim")).unwrap();
        assert_eq!(victim, "as it was");
    }
}

#[test]
fn a_new_file_has_the_permissions_that_its_contents_want() {
    let scratch = Scratch::new("modes", 0o700);
    let path = scratch.path("a");
    let umask = umask_mode(&scratch);
    assert_eq!(mode(&write(&path, Readers::Umask).unwrap()), umask);
    assert_eq!(mode(&write(&path, Readers::User).unwrap()), 0o600);
    for kept in [0o640, 0o755, 0o600, 0o666] {
        fs::set_permissions(&path, Permissions::from_mode(kept)).unwrap();
        assert_eq!(mode(&write(&path, Readers::Umask).unwrap()), kept);
        assert_eq!(mode(&write(&path, Readers::User).unwrap()), 0o600);
    }
    // Another user may have hard-linked a file that everyone may write to this name.
    fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    fs::hard_link(&path, scratch.path("first name")).unwrap();
    assert_eq!(mode(&write(&path, Readers::Umask).unwrap()), umask);
    let created = |name: &str, readers| create_new(&scratch.path(name), readers).unwrap();
    assert_eq!(mode(&created("b", Readers::User)), 0o600);
    assert_eq!(mode(&created("c", Readers::Umask)), umask);
    create_directory(&scratch.path("d/e")).unwrap();
    create_directory(&scratch.path("d/e")).unwrap();
    for directory in ["d", "d/e"] {
        let found = fs::metadata(scratch.path(directory)).unwrap().mode();
        assert_eq!(found & 0o777, 0o700);
    }
}

/// A file that is replaced keeps its contents under its other names and in open descriptors.
#[test]
fn a_file_that_is_replaced_is_not_written_to() {
    let scratch = Scratch::new("replaced", 0o700);
    let (path, other) = (scratch.path("a"), scratch.path("b"));
    fs::write(&path, "as it was").unwrap();
    fs::hard_link(&path, &other).unwrap();
    let dropped = NewFile::create(&path, Readers::User).unwrap();
    assert_eq!(scratch.names().len(), 3);
    drop(dropped);
    assert_eq!(scratch.names(), ["a", "b"]);
    write(&path, Readers::User).unwrap();
    assert_eq!(scratch.names(), ["a", "b"]);
    assert_eq!(fs::read_to_string(path).unwrap(), "new");
    assert_eq!(fs::read_to_string(other).unwrap(), "as it was");
}

#[test]
fn temporary_names_cannot_be_guessed() {
    let names: Vec<_> = (0..100).map(|_| unguessable_name().unwrap()).collect();
    let mut different = names.clone();
    different.sort();
    different.dedup();
    assert_eq!(different.len(), names.len());
}

#[test]
fn what_has_no_name_is_given_one_where_nothing_is() {
    let scratch = Scratch::new("unnamed", 0o777);
    let mut file = create_unnamed(&scratch.0).unwrap();
    assert_eq!(mode(&file), 0o600);
    assert_eq!(scratch.names(), [""; 0]);
    file.write_all(b"new").unwrap();
    for (path, _) in plant(&scratch) {
        let error = link(&file, &path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{}", path.display());
    }
    link(&file, &scratch.path("name")).unwrap();
    let text = fs::read_to_string(scratch.path("name")).unwrap();
    assert_eq!(text, "new");
}

/// The kernel's `protected_symlinks` rule, extended to directories that a group may write.
#[test]
fn the_way_leads_through_no_link_of_another_user() {
    let scratch = Scratch::new("way", 0o700);
    fs::create_dir(scratch.path("private")).unwrap();
    symlink("private", scratch.path("own")).unwrap();
    symlink("round", scratch.path("round")).unwrap();
    fs::write(scratch.path("file"), "").unwrap();
    write(&scratch.path("own/../own/./a"), Readers::User).unwrap();
    assert!(scratch.path("private/a").exists());
    let error = |way: &str| write(&scratch.path(way), Readers::User).unwrap_err();
    assert_eq!(
        error("round/a").raw_os_error(),
        Some(Errno::LOOP.raw_os_error())
    );
    assert_eq!(error("file/a").kind(), ErrorKind::NotADirectory);
    assert_eq!(error("nothing/a").kind(), ErrorKind::NotFound);
    assert_eq!(error("..").to_string(), "is not the name of a file");
    if !geteuid().is_root() {
        return;
    }
    for (shared, owner, is_followed) in [
        (0o777, 0, false),
        (0o1777, 0, false),
        (0o775, 0, false),
        (0o755, 0, true),
        // The directory's owner may write there.
        (0o755, NOBODY, false),
    ] {
        let directory = scratch.path(&format!("{shared:o}-{owner}"));
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, Permissions::from_mode(shared)).unwrap();
        chown(&directory, Some(owner), None).unwrap();
        let way = directory.join("way");
        symlink(scratch.path("private"), &way).unwrap();
        write(&way.join("b"), Readers::User).unwrap();
        create_unnamed(&way).unwrap();
        create_directory(&way.join("c")).unwrap();
        fs::remove_file(scratch.path("private/b")).unwrap();
        fs::remove_dir(scratch.path("private/c")).unwrap();
        fs::write(scratch.path("private/f"), "").unwrap();
        remove(&way.join("f")).unwrap();
        assert!(!scratch.path("private/f").exists());
        fs::write(scratch.path("private/f"), "").unwrap();
        lchown(&way, Some(NOBODY), None).unwrap();
        let outcomes = [
            write(&way.join("b"), Readers::User).map(drop),
            create_new(&way.join("c"), Readers::User).map(drop),
            create_unnamed(&way).map(drop),
            create_directory(&way.join("d")),
            create_new(&way.join("e"), Readers::User).map(drop),
            remove(&way.join("f")),
        ];
        for (index, outcome) in outcomes.into_iter().enumerate() {
            let text = outcome.map_or_else(|error| error.to_string(), |()| String::new());
            let expected = "leads through `way`, a symbolic link of another user (uid 65534)";
            assert_eq!(text.starts_with(expected), !is_followed, "{index}: {text}");
        }
        let there = fs::read_dir(scratch.path("private")).unwrap().count();
        assert_eq!(there, if is_followed { 5 } else { 2 }, "{directory:?}");
        for name in ["b", "c", "e", "f"] {
            let _ = fs::remove_file(scratch.path("private").join(name));
        }
        let _ = fs::remove_dir(scratch.path("private/d"));
    }
}

/// The text of a link in `/proc` may be the path of a different file.
#[test]
fn a_link_of_a_process_leads_where_it_says_to_the_kernel() {
    let scratch = Scratch::new("magic", 0o700);
    for name in ["gone", "gone (deleted)", "there"] {
        fs::create_dir(scratch.path(name)).unwrap();
    }
    let open = |name: &str| File::open(scratch.path(name)).unwrap();
    let (gone, there) = (open("gone"), open("there"));
    fs::remove_dir(scratch.path("gone")).unwrap();
    for fds in ["/dev/fd", "/proc/self/fd", "/proc/thread-self/fd"] {
        let path = |file: &File, name: &str| {
            let number = file.as_raw_fd();
            PathBuf::from(format!("{fds}/{number}/{name}"))
        };
        let error = write(&path(&gone, "a"), Readers::User).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{fds}");
        assert!(create_directory(&path(&gone, "b")).is_err(), "{fds}");
        write(&path(&there, "c"), Readers::User).unwrap();
        fs::remove_file(scratch.path("there/c")).unwrap();
    }
    let decoy = fs::read_dir(scratch.path("gone (deleted)")).unwrap();
    assert_eq!(decoy.count(), 0);
}

#[test]
fn a_command_writes_into_what_cannot_be_replaced() {
    let scratch = Scratch::new("streams", 0o777);
    assert!(open_stream(Path::new("/dev/null")).unwrap().is_some());
    let planted = plant(&scratch);
    for (path, what) in &planted {
        if what.starts_with("is a symbolic link") || what.starts_with("belongs") {
            assert!(open_stream(path).unwrap().is_none(), "{}", path.display());
        }
    }
    let fifo = scratch.path("fifo");
    let path = fifo.clone();
    let reader = thread::spawn(move || fs::read_to_string(path).unwrap());
    open_stream(&fifo)
        .unwrap()
        .unwrap()
        .write_all(b"read")
        .unwrap();
    assert_eq!(reader.join().unwrap(), "read");
    let mut file = File::options()
        .read(true)
        .append(true)
        .create(true)
        .open(scratch.path("open"))
        .unwrap();
    file.write_all(b"before ").unwrap();
    let name = format!("/dev/fd/{}", file.as_raw_fd());
    let mut stream = open_stream(name.as_ref()).unwrap().unwrap();
    stream.write_all(b"after").unwrap();
    let mut text = String::new();
    File::open(scratch.path("open"))
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text, "before after");
    // A symbolic link to a descriptor counts as a link, not as a descriptor.
    symlink(&name, scratch.path("descriptor")).unwrap();
    assert!(open_stream(&scratch.path("descriptor")).unwrap().is_none());
    if geteuid().is_root() {
        chown(&fifo, Some(NOBODY), None).unwrap();
        let error = without_waiting(move || open_stream(&fifo)).unwrap_err();
        assert!(error.to_string().starts_with("belongs to another user"));
    }
}
