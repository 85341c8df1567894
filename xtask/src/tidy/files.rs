//! Rules for how lowtide writes files. Others may write to the same directory and place files or links there.

use super::finding::Finding;
use super::mask::{find_word, line_at, mask};
use super::tree::Tree;

/// The crates that create files, and sockets with their directories.
const RUST_HOMES: [&str; 2] = ["crates/files/src/", "crates/sockets/src/"];
/// The Python module that creates files.
const PYTHON_HOME: &str = "python/lowtide/_files.py";

/// Names that create or remove a file or a directory, or open a file for writing.
const RUST_WORDS: [&str; 5] = [
    "File::create",
    "File::create_new",
    "File::options",
    "OpenOptions",
    "DirBuilder",
];
/// Functions of the modules `fs` of std and of rustix, and of libc.
const RUST_FUNCTIONS: &str = "
    copy creat creat64 create_dir create_dir_all fopen fopen64 hard_link link linkat mkdir mkdirat
    mkfifo mkfifoat mknod mknodat mkostemp mkstemp open open64 openat openat2 remove_dir remove_dir_all
    remove_file rename renameat renameat2 symlink symlinkat truncate unlink unlinkat write
";
/// `open` is not listed, because without a mode it only reads.
const PYTHON_WORDS: &str = "
    NamedTemporaryFile SpooledTemporaryFile TemporaryFile hardlink_to makedirs mkdir mkfifo mknod
    mkstemp os.link os.open os.remove os.rename os.replace os.symlink os.truncate rmdir rmtree
    shutil.copy shutil.copy2 shutil.copyfile shutil.copyfileobj shutil.copytree shutil.move symlink_to
    touch unlink write_bytes write_text
";

/// Rust must create files with `lowtide-files` only. The driver's stand-in is not part of lowtide.
pub(super) fn rust_writes_files_in_one_place(tree: &Tree) -> Vec<Finding> {
    let is_checked = |path: &str| {
        path.starts_with("crates/")
            && path.contains("/src/")
            && !RUST_HOMES.iter().any(|home| path.starts_with(home))
            && !path.starts_with("crates/fakecuda/")
            && !path.ends_with("/tests.rs")
            && !path.contains("/tests/")
    };
    let mut findings = Vec::new();
    for (path, text) in tree.rust_files().filter(|(path, _)| is_checked(path)) {
        let code = mask(text);
        let code = &code[..code.find("#[cfg(test)]\nmod tests").unwrap_or(code.len())];
        let words = RUST_WORDS.iter().flat_map(|word| {
            let found = find_word(code, word).into_iter();
            found.map(|offset| (offset, (*word).to_owned()))
        });
        for (offset, what) in words.chain(functions(code)) {
            let message =
                format!("`{what}`: create and remove files with the crate `lowtide-files`");
            findings.push(Finding::at_line(path, line_at(code, offset), message));
        }
    }
    findings
}

/// Python must write files with `_files` only.
pub(super) fn python_writes_files_in_one_place(tree: &Tree) -> Vec<Finding> {
    let is_checked = |path: &str| {
        path.starts_with("python/lowtide/") && path.ends_with(".py") && path != PYTHON_HOME
    };
    let mut findings = Vec::new();
    for (path, text) in tree.texts().filter(|(path, _)| is_checked(path)) {
        let words = PYTHON_WORDS.split_whitespace().flat_map(|word| {
            let calls = calls(text, word).into_iter();
            calls.map(move |offset| (offset, word))
        });
        let opened = calls(text, "open").into_iter();
        let opened = opened.filter(|offset| opens_for_writing(&text[*offset..]));
        for (offset, what) in words.chain(opened.map(|offset| (offset, "open"))) {
            let message = format!("`{what}`: write files with `lowtide._files`");
            findings.push(Finding::at_line(path, line_at(text, offset), message));
        }
    }
    findings
}

/// Returns the listed functions that the code uses or imports from a module of files.
fn functions(code: &str) -> impl Iterator<Item = (usize, String)> {
    ["fs", "libc"].into_iter().flat_map(move |module| {
        let is_path = |start: &usize| code[start + module.len()..].starts_with("::");
        let starts = find_word(code, module).into_iter().filter(is_path);
        starts.flat_map(move |start| {
            let rest = &code[start + module.len() + 2..];
            let is_name = |character: char| character.is_ascii_alphanumeric() || character == '_';
            let names = match rest.strip_prefix('{') {
                Some(list) => &list[..list.find('}').unwrap_or(list.len())],
                None => &rest[..rest.find(|next| !is_name(next)).unwrap_or(rest.len())],
            };
            let names = names.split(',').map(str::trim);
            // libc's `write` writes to an open descriptor.
            let is_other = move |name: &str| module == "libc" && name == "write";
            let found = names.filter(move |name| {
                RUST_FUNCTIONS
                    .split_whitespace()
                    .any(|known| known == *name)
                    && !is_other(name)
            });
            found.map(move |name| (start, format!("{module}::{name}")))
        })
    })
}

/// Returns the offsets of calls of a function.
fn calls(text: &str, word: &str) -> Vec<usize> {
    let mut starts = find_word(text, word);
    starts.retain(|start| text[start + word.len()..].starts_with('('));
    starts
}

/// Returns whether a call at the start of `text` opens a file with a mode that writes.
fn opens_for_writing(text: &str) -> bool {
    let mut depth = 0;
    let end = text.find(|character| {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => return false,
        }
        depth == 0
    });
    let call = &text[..end.unwrap_or(text.len())];
    call.split(['"', '\'']).any(|text| {
        !text.is_empty()
            && text.chars().all(|letter| "rwaxbt+".contains(letter))
            && text.contains(['w', 'a', 'x', '+'])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(rule: fn(&Tree) -> Vec<Finding>, path: &str, text: &str) -> Vec<Option<usize>> {
        let findings = rule(&Tree::of(&[(path, text)]));
        findings.iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn rust_files() {
        let lines = |path: &str, text: &str| lines(rust_writes_files_in_one_place, path, text);
        let bad = [
            "let file = File::create(path)?;",
            "let file = std::fs::File::create_new(path)?;",
            "let file = OpenOptions::new();",
            "File::options().append(true);",
            "fs::write(path, text)?;",
            "use std::fs::{self, File, rename};",
            "use std::fs::{\n    write,\n};",
            "std::fs::create_dir_all(path)?;",
            "let file = unsafe { libc::open(path, flags) };",
            "rustix::fs::openat(here, name, flags, mode)?;",
            "let file = unsafe { libc::fopen(path, mode) };",
            "fs::remove_file(path)?;",
            "use std::fs::remove_file;",
            "unsafe { libc::unlink(path) };",
        ];
        for text in bad {
            assert_eq!(lines("crates/cli/src/a.rs", text), [Some(1)], "{text}");
            assert_eq!(lines("crates/files/src/a.rs", text), [], "{text}");
            assert_eq!(lines("crates/cli/tests/a.rs", text), [], "{text}");
            assert_eq!(lines("crates/cli/src/a/tests.rs", text), [], "{text}");
            let test = format!("#[cfg(test)]\nmod tests {{\n{text}\n}}\n");
            assert_eq!(lines("crates/cli/src/a.rs", &test), [], "{text}");
        }
        let good = [
            "use std::fs::{self, File};",
            "let file = File::open(path)?;",
            "// File::create\nlet text = \"fs::write\";",
            "fs::read(path)?; offs::write(a);",
            "output.write(bytes)?; names.rename(a);",
            "unsafe { libc::write(2, text, length) };",
        ];
        for text in good {
            assert_eq!(lines("crates/cli/src/a.rs", text), [], "{text}");
        }
    }

    #[test]
    fn python_files() {
        let lines = |path: &str, text: &str| lines(python_writes_files_in_one_place, path, text);
        let bad = [
            "with open(path, \"w\") as file:",
            "with open(path, mode='rb+') as file:",
            "with path.open(\"ab\") as file:",
            "path.write_text(text)",
            "directory.mkdir(parents=True)",
            "os.makedirs(path)",
            "os.replace(a, b)",
            "file = tempfile.NamedTemporaryFile()",
            "number = os.open(path, flags)",
            "with open(\n    path(name),\n    \"w\",\n) as file:",
            "file = tempfile.TemporaryFile()",
            "shutil.copy2(a, b)",
            "shutil.copyfileobj(a, b)",
            "os.mknod(path)",
            "os.truncate(path, 0)",
            "path.unlink()",
        ];
        for text in bad {
            assert_eq!(lines("python/lowtide/a.py", text), [Some(1)], "{text}");
            assert_eq!(lines("python/lowtide/_files.py", text), [], "{text}");
            assert_eq!(lines("python/tests/a.py", text), [], "{text}");
        }
        let good = [
            "with open(path) as file:",
            "with open(path, \"rb\") as file:",
            "with open(path, encoding=\"utf-8\") as file:",
            "with open(path) as file:\n    kind = \"a\"",
            "text = text.replace(a, b)",
            "directory = tempfile.TemporaryDirectory()",
            "_files.write(path, content)",
        ];
        for text in good {
            assert_eq!(lines("python/lowtide/a.py", text), [], "{text}");
        }
    }
}
