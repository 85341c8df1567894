//! How much host memory is available, and how much of it is promised to backups.
//!
//! The system gives out addresses for more memory than it has, and kills a process that writes to them. So a backup
//! that does not fit must be refused before its first byte is written.

use std::fs::read_to_string;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lowtide_core::Bytes;

/// The sum of all promises: memory that backups of this process are about to use and the system still counts as
/// available.
static PROMISED: Mutex<Bytes> = Mutex::new(Bytes::ZERO);

/// Host memory that a backup is about to use. Backups of other devices, made at the same time, must not count on
/// it.
#[derive(Debug)]
pub(super) struct Promise(Mutex<Bytes>);

impl Promise {
    /// Promises `needed` bytes. Returns the available bytes as an error if they are fewer.
    pub(super) fn new(needed: Bytes) -> Result<Promise, Bytes> {
        let mut promised = lock(&PROMISED);
        if let Some(left) = left_beside(*promised)
            && needed > left
        {
            return Err(left);
        }
        *promised += needed;
        Ok(Promise(Mutex::new(needed)))
    }

    /// Subtracts from the promise the bytes that `count` returns, because they are in use now and the system knows
    /// it. Calls for one promise run one after another.
    pub(super) fn keep(&self, count: impl FnOnce() -> Bytes) {
        let mut left = lock(&self.0);
        let kept = count().min(*left);
        if !kept.is_zero() {
            *left -= kept;
            *lock(&PROMISED) -= kept;
        }
    }

    /// Adds to the promise the bytes that `forget` returns: they were [kept](Promise::keep) and will be kept again.
    pub(super) fn renew(&self, forget: impl FnOnce() -> Bytes) {
        let mut left = lock(&self.0);
        let forgotten = forget();
        *left += forgotten;
        *lock(&PROMISED) += forgotten;
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.keep(|| Bytes(u64::MAX));
    }
}

/// Returns how many bytes can be promised now, or `None` if the system does not say.
pub(super) fn unpromised() -> Option<Bytes> {
    left_beside(*lock(&PROMISED))
}

#[cfg(test)]
pub(super) fn promised() -> Bytes {
    *lock(&PROMISED)
}

fn left_beside(promised: Bytes) -> Option<Bytes> {
    host_memory().map(|available| available.saturating_sub(promised))
}

fn lock(bytes: &Mutex<Bytes>) -> MutexGuard<'_, Bytes> {
    // A panic cannot leave the number half changed: each change under the lock is one step.
    bytes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns how many bytes this process could use before the system runs short or a limit of its control groups is
/// reached. Returns `None` if the system does not say. Other processes may take them in the meantime.
fn host_memory() -> Option<Bytes> {
    let system = read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| available_in(&text));
    let groups = read_to_string("/proc/self/cgroup").unwrap_or_default();
    let left = [&VERSION_1, &VERSION_2].into_iter().filter_map(|version| {
        let group = group_in(&groups, version.controller)?;
        left_in_groups(version, Path::new(version.root), group)
    });
    system.into_iter().chain(left).min()
}

/// Returns the available memory according to the contents of `/proc/meminfo`.
fn available_in(meminfo: &str) -> Option<Bytes> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes::kib(kib))
}

/// The file names of one version of control groups (cgroups).
struct Version {
    /// The directory of the memory controller's groups.
    root: &'static str,
    /// The controller's name in `/proc/self/cgroup`.
    controller: &'static str,
    limit: &'static str,
    used: &'static str,
    /// The lines of `memory.stat` that count the page cache.
    files: [&'static str; 2],
}

static VERSION_1: Version = Version {
    root: "/sys/fs/cgroup/memory",
    controller: "memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    files: ["total_inactive_file", "total_active_file"],
};

static VERSION_2: Version = Version {
    root: "/sys/fs/cgroup",
    controller: "",
    limit: "memory.max",
    used: "memory.current",
    files: ["inactive_file", "active_file"],
};

/// Returns the process's group for a controller, according to the contents of `/proc/self/cgroup`.
fn group_in<'a>(groups: &'a str, controller: &str) -> Option<&'a str> {
    groups.lines().find_map(|line| {
        let (controllers, group) = line.split_once(':')?.1.split_once(":/")?;
        let mut controllers = controllers.split(',');
        controllers.any(|name| name == controller).then_some(group)
    })
}

/// Returns the smallest rest of the limits of a group and its ancestors.
fn left_in_groups(version: &Version, root: &Path, group: &str) -> Option<Bytes> {
    let own = root.join(group);
    let groups = own.ancestors().take_while(|path| path.starts_with(root));
    groups.filter_map(|path| left_in_group(version, path)).min()
}

/// Returns the unused part of a group's limit, if it has one. The page cache counts as unused, because the system
/// would reclaim it.
fn left_in_group(version: &Version, group: &Path) -> Option<Bytes> {
    let number = |file| -> Option<u64> {
        let text = read_to_string(group.join(file)).ok()?;
        text.trim().parse().ok()
    };
    let (limit, used) = (number(version.limit)?, number(version.used)?);
    let details = read_to_string(group.join("memory.stat")).unwrap_or_default();
    let files = details.lines().filter_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        version.files.contains(&name).then_some(bytes)
    });
    let files: u64 = files.filter_map(|bytes| bytes.parse::<u64>().ok()).sum();
    Some(Bytes(limit.saturating_sub(used.saturating_sub(files))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, remove_dir_all, write};
    use std::path::PathBuf;

    #[test]
    fn the_system_says_what_is_available() {
        let text = "MemTotal:  100 kB\nMemFree:  1 kB\nMemAvailable:   24 kB\nCached: 9 kB\n";
        assert_eq!(available_in(text), Some(Bytes::kib(24)));
        assert_eq!(available_in("MemTotal: 100 kB\n"), None);
        let here = host_memory().unwrap();
        assert!(here > Bytes::mib(1) && here < Bytes::gib(1 << 20), "{here}");
    }

    /// Creates a group with the files of a version.
    fn make(version: &Version, path: &Path, limit: &str, used: &str, details: &str) {
        create_dir_all(path).unwrap();
        write(path.join(version.limit), limit).unwrap();
        write(path.join(version.used), used).unwrap();
        write(path.join("memory.stat"), details).unwrap();
    }

    fn directory(name: &str) -> PathBuf {
        let name = format!("lowtide-{name}-{}", std::process::id());
        std::env::temp_dir().join(name)
    }

    #[test]
    fn the_tightest_group_counts_and_its_files_do_not() {
        let root = directory("groups-2");
        let made = |path: &Path, limit, used, details| make(&VERSION_2, path, limit, used, details);
        made(&root, "900\n", "850\n", "anon 700\n");
        let details = "anon 9\nactive_file 11\ninactive_file 9\n";
        made(&root.join("a"), "800\n", "790\n", details);
        made(&root.join("a/b"), "max\n", "700\n", "");
        let left = |group| left_in_groups(&VERSION_2, &root, group);
        assert_eq!(left("a/b"), Some(Bytes(30)));
        assert_eq!(left(""), Some(Bytes(50)));
        remove_dir_all(&root).unwrap();
        assert_eq!(left_in_groups(&VERSION_2, &root, "a/b"), None);
    }

    /// Version 1 has no word for "no limit". Its plain counters of files leave out child groups.
    #[test]
    fn groups_of_version_one_count_as_well() {
        let root = directory("groups-1");
        let made = |path: &Path, limit, used, details| make(&VERSION_1, path, limit, used, details);
        made(&root, "9223372036854771712\n", "990\n", "");
        let details = "cache 40\ninactive_file 1\nactive_file 2\ntotal_inactive_file 9\ntotal_active_file 11\n";
        made(&root.join("a"), "800\n", "790\n", details);
        made(&root.join("a/b"), "9223372036854771712\n", "700\n", "");
        let left = |group| left_in_groups(&VERSION_1, &root, group);
        assert_eq!(left("a/b"), Some(Bytes(30)));
        // A container may see only its own group, at the root.
        assert_eq!(left("not/there"), left(""));
        assert!(left("") > Some(Bytes::gib(1 << 20)));
        remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_process_has_a_group_of_each_version() {
        let groups = "5:name=systemd:/y\n4:cpu,memory:/x:1\n0::/job/one\n";
        let found = [&VERSION_1, &VERSION_2].map(|version| group_in(groups, version.controller));
        assert_eq!(found, [Some("x:1"), Some("job/one")]);
        assert_eq!(group_in("4:memory:/x\n", VERSION_2.controller), None);
        assert_eq!(group_in("0::/\n", VERSION_1.controller), None);
    }
}
