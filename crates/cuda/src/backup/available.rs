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

    /// Notes that so much has been taken: the system knows of it.
    pub(super) fn keep(&self, bytes: Bytes) {
        let mut left = lock(&self.0);
        let kept = bytes.min(*left);
        if !kept.is_zero() {
            *left -= kept;
            *lock(&PROMISED) -= kept;
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.keep(Bytes(u64::MAX));
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
/// groups is met (version 2), as far as the system says. Others may take it in the meantime.
fn host_memory() -> Option<Bytes> {
    let system = read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| available_in(&text));
    let group = read_to_string("/proc/self/cgroup")
        .ok()
        .and_then(|text| group_in(&text).map(str::to_owned))
        .and_then(|group| left_in_groups(Path::new("/sys/fs/cgroup"), &group));
    system.into_iter().chain(group).min()
}

/// Returns what `/proc/meminfo` says is available.
fn available_in(meminfo: &str) -> Option<Bytes> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes::kib(kib))
}

/// Returns the process's group of version 2 by what `/proc/self/cgroup` says.
fn group_in(groups: &str) -> Option<&str> {
    groups.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// Returns the least that a group, or one that it is part of, has left.
fn left_in_groups(root: &Path, group: &str) -> Option<Bytes> {
    let own = root.join(group);
    let groups = own.ancestors().take_while(|path| path.starts_with(root));
    groups.filter_map(left_in_group).min()
}

/// Returns what is left of a group's limit, if it has one. What it uses for files it would give back.
fn left_in_group(group: &Path) -> Option<Bytes> {
    let number = |file| -> Option<u64> {
        let text = read_to_string(group.join(file)).ok()?;
        text.trim().parse().ok()
    };
    let (limit, used) = (number("memory.max")?, number("memory.current")?);
    let details = read_to_string(group.join("memory.stat")).unwrap_or_default();
    let files = details.lines().filter_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        matches!(name, "inactive_file" | "active_file").then_some(bytes)
    });
    let files: u64 = files.filter_map(|bytes| bytes.parse::<u64>().ok()).sum();
    Some(Bytes(limit.saturating_sub(used.saturating_sub(files))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, remove_dir_all, write};

    #[test]
    fn the_system_says_what_is_available() {
        let text = "MemTotal:  100 kB\nMemFree:  1 kB\nMemAvailable:   24 kB\nCached: 9 kB\n";
        assert_eq!(available_in(text), Some(Bytes::kib(24)));
        assert_eq!(available_in("MemTotal: 100 kB\n"), None);
        let here = host_memory().unwrap();
        assert!(here > Bytes::mib(1) && here < Bytes::gib(1 << 20), "{here}");
    }

    #[test]
    fn the_tightest_group_counts_and_its_files_do_not() {
        let name = format!("lowtide-groups-{}", std::process::id());
        let root = std::env::temp_dir().join(name);
        let inner = root.join("a/b");
        create_dir_all(&inner).unwrap();
        let make = |path: &Path, max: &str, current: &str, stat: &str| {
            write(path.join("memory.max"), max).unwrap();
            write(path.join("memory.current"), current).unwrap();
            write(path.join("memory.stat"), stat).unwrap();
        };
        make(&root, "900\n", "850\n", "anon 700\n");
        make(
            &root.join("a"),
            "800\n",
            "790\n",
            "anon 9\nactive_file 11\ninactive_file 9\n",
        );
        make(&inner, "max\n", "700\n", "");
        assert_eq!(left_in_groups(&root, "a/b"), Some(Bytes(30)));
        assert_eq!(left_in_groups(&root, ""), Some(Bytes(50)));
        remove_dir_all(&root).unwrap();
        assert_eq!(left_in_groups(&root, "a/b"), None);
    }

    #[test]
    fn only_groups_of_version_two_are_looked_at() {
        assert_eq!(group_in("4:memory:/x\n0::/job/one\n"), Some("job/one"));
        assert_eq!(group_in("4:memory:/x\n"), None);
    }
}
