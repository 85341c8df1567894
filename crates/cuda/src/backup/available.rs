//! How much memory the host has left, and what of it is promised. The system gives out addresses for more than
//! that, and ends a process when it writes to them; so a backup that does not fit must be refused before its first
//! byte.

use std::fs::read_to_string;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lowtide_core::Bytes;

/// What all promises come to: what backups of this process are about to take, and the system still says is
/// available.
static PROMISED: Mutex<Bytes> = Mutex::new(Bytes::ZERO);

/// Memory of the host that a backup is about to take: that of other devices' backups, which are made at the same
/// time, may not count on it.
#[derive(Debug)]
pub(super) struct Promise(Mutex<Bytes>);

impl Promise {
    /// Promises so much, or returns what there is where that is less.
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

    /// Notes that so much as `count` returns has been taken: the system knows of it. Nobody else counts meanwhile.
    pub(super) fn keep(&self, count: impl FnOnce() -> Bytes) {
        let mut left = lock(&self.0);
        let kept = count().min(*left);
        if !kept.is_zero() {
            *left -= kept;
            *lock(&PROMISED) -= kept;
        }
    }

    /// Takes it back that so much has been [taken](Promise::keep) as `forget` returns, as it will be noted once more.
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

/// Returns how much can be promised now, as far as the system says.
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
    // Each change under the lock is one step.
    bytes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns how much memory this process could take before the system runs short or a limit of its control
/// groups is met, as far as the system says. Others may take it in the meantime.
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

/// Returns what `/proc/meminfo` says is available.
fn available_in(meminfo: &str) -> Option<Bytes> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes::kib(kib))
}

/// Where a version of control groups says what of a group and those in it.
struct Version {
    /// Where the groups of memory are.
    root: &'static str,
    /// What names them in `/proc/self/cgroup`.
    controller: &'static str,
    limit: &'static str,
    used: &'static str,
    /// The lines of `memory.stat` with what is used for files.
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

/// Returns the process's group that a controller names by what `/proc/self/cgroup` says.
fn group_in<'a>(groups: &'a str, controller: &str) -> Option<&'a str> {
    groups.lines().find_map(|line| {
        let (controllers, group) = line.split_once(':')?.1.split_once(":/")?;
        let mut controllers = controllers.split(',');
        controllers.any(|name| name == controller).then_some(group)
    })
}

/// Returns the least that a group, or one that it is part of, has left.
fn left_in_groups(version: &Version, root: &Path, group: &str) -> Option<Bytes> {
    let own = root.join(group);
    let groups = own.ancestors().take_while(|path| path.starts_with(root));
    groups.filter_map(|path| left_in_group(version, path)).min()
}

/// Returns what is left of a group's limit, if it has one. What it uses for files it would give back.
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

    /// Makes a group as a version has it.
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

    /// It has no word for a group without a limit, and counts the files of a group without those in it, too.
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
        // As in a container that sees its own group alone, at the root.
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
