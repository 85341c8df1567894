//! The project's files, as text.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

/// The files of a project, by path from its root, with `/` as the separator.
///
/// The files are read from the disk and not from git. So a file is checked before it is committed, and an unpacked
/// archive can be checked on a machine without git.
#[derive(Debug, Default)]
pub(super) struct Tree {
    /// `None` for a file that is not text.
    files: BTreeMap<String, Option<String>>,
}

impl Tree {
    /// Reads every file under `root` that is not generated. It skips directories that a tool has marked as a cache
    /// (cargo marks `target`), npm's packages, hidden files that are not ours, and the output of fuzzing.
    pub(super) fn read(root: &Path) -> io::Result<Self> {
        let mut tree = Self::default();
        tree.read_directory(root, "")?;
        Ok(tree)
    }

    /// Returns a tree of these paths and texts.
    #[cfg(test)]
    pub(super) fn of(files: &[(&str, &str)]) -> Self {
        let files = files
            .iter()
            .map(|&(path, text)| (path.into(), Some(text.into())))
            .collect();
        Self { files }
    }

    /// Returns the path and text of every text file, sorted by path.
    pub(super) fn texts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files
            .iter()
            .filter_map(|(path, text)| Some((path.as_str(), text.as_deref()?)))
    }

    /// Returns the path and text of every Rust file, sorted by path.
    pub(super) fn rust_files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.texts().filter(|(path, _)| extension(path) == "rs")
    }

    /// Returns the text at a path, or `None` if there is no such text file.
    pub(super) fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path)?.as_deref()
    }

    /// Returns every path, sorted.
    pub(super) fn paths(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// Returns whether there is a file at the path or below it.
    pub(super) fn contains(&self, path: &str) -> bool {
        let directory = format!("{path}/");
        self.files.contains_key(path) || self.paths().any(|file| file.starts_with(&directory))
    }

    fn read_directory(&mut self, directory: &Path, prefix: &str) -> io::Result<()> {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                return Err(io::Error::other(format!("{:?} is not UTF-8", entry.path())));
            };
            let path = format!("{prefix}{name}");
            let kind = entry.file_type()?;
            if is_generated(&entry.path(), &path) {
                continue;
            }
            if kind.is_dir() {
                self.read_directory(&entry.path(), &format!("{path}/"))?;
            } else if kind.is_file() {
                let bytes = fs::read(entry.path())?;
                let text = String::from_utf8(bytes)
                    .ok()
                    .filter(|text| !text.contains('\0'));
                self.files.insert(path, text);
            }
        }
        Ok(())
    }
}

/// Returns the extension of a path, or an empty string.
pub(super) fn extension(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    match name.rsplit_once('.') {
        Some((stem, extension)) if !stem.is_empty() => extension,
        _ => "",
    }
}

fn is_generated(location: &Path, path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let is_ours = [".cargo", ".ci", ".config", ".github", ".gitignore"].contains(&name);
    (name.starts_with('.') && !is_ours)
        || name == "node_modules"
        || ["fuzz/artifacts", "fuzz/corpus", "fuzz/coverage"].contains(&path)
        || location.join("CACHEDIR.TAG").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_read_and_caches_are_not() {
        let tree = Tree::read(&crate::root().expect("cargo runs the tests")).expect("readable");
        assert!(
            tree.text("xtask/src/tidy/tree.rs")
                .expect("text")
                .contains("fn is_generated")
        );
        assert!(tree.contains("crates/core"));
        assert!(!tree.contains("crates/cor"));
        assert!(
            tree.paths()
                .all(|path| !path.starts_with(".git/") && !path.contains("/debug/"))
        );
        let traces: Vec<&str> = tree.paths().filter(|path| path.ends_with(".zst")).collect();
        assert!(!traces.is_empty());
        assert!(traces.iter().all(|path| tree.text(path).is_none()));
    }

    #[test]
    fn extensions() {
        assert_eq!(extension("crates/core/src/lib.rs"), "rs");
        assert_eq!(extension("traces/mlp.pickle.zst"), "zst");
        assert_eq!(extension(".gitignore"), "");
        assert_eq!(extension(".ci/run"), "");
        assert_eq!(extension("crate.d/LICENSE"), "");
    }
}
