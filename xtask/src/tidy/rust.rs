//! Rules for Rust files.

use super::finding::Finding;
use super::mask::{find_word, line_at, mask};
use super::tree::Tree;

/// The crates with a C interface. All others forbid `unsafe`.
const UNSAFE_CRATES: [&str; 3] = ["crates/capi/", "crates/cuda/", "crates/fakecuda/"];

/// The largest number of lines of a file without its tests.
const FILE_LINES_MAX: usize = 1000;
/// From this length on, a file should be split soon.
const FILE_LINES_LONG: usize = 800;

/// Words that other allocators use for a segment or a block.
const FOREIGN_WORDS: [&str; 4] = ["arena", "arenas", "chunk", "chunks"];
/// The files where those words are allowed, by the start of the path: strategies whose literature uses them, and
/// the options that are named after it.
const FOREIGN_HOMES: [&str; 4] = [
    "crates/core/src/config",
    "crates/core/src/strategy/bfc",
    "crates/core/src/strategy/buddy",
    "crates/core/src/strategy/slab",
];

/// `unsafe` must be used in three crates only, and the roots of all others must forbid it.
pub(super) fn unsafe_is_confined(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.rust_files() {
        if UNSAFE_CRATES
            .iter()
            .any(|directory| path.starts_with(directory))
        {
            continue;
        }
        let code = mask(text);
        for offset in find_word(&code, "unsafe") {
            let message = "`unsafe` belongs in crates/cuda, crates/fakecuda or crates/capi";
            findings.push(Finding::at_line(path, line_at(&code, offset), message));
        }
        if is_crate_root(path) && !code.contains("#![forbid(unsafe_code)]") {
            findings.push(Finding::in_file(path, "must say `#![forbid(unsafe_code)]`"));
        }
    }
    findings
}

/// No file may be too long.
pub(super) fn files_can_be_held(tree: &Tree) -> Vec<Finding> {
    files_above(tree, FILE_LINES_MAX)
        .map(|(path, lines)| {
            let message =
                format!("{lines} lines without tests, above {FILE_LINES_MAX}; take it apart");
            Finding::in_file(path, message)
        })
        .collect()
}

/// Returns the files that may soon be too long. They are warnings, not findings.
pub(super) fn files_grow_long(tree: &Tree) -> Vec<Finding> {
    files_above(tree, FILE_LINES_LONG)
        .map(|(path, lines)| Finding::in_file(path, format!("{lines} lines without tests")))
        .collect()
}

/// Committed code must be finished, and every test must run.
pub(super) fn nothing_is_unfinished(tree: &Tree) -> Vec<Finding> {
    let patterns = ["todo!", "unimplemented!", "dbg!", "#[ignore"];
    let mut findings = Vec::new();
    for (path, text) in tree.rust_files() {
        for (index, line) in mask(text).lines().enumerate() {
            for pattern in patterns {
                if !find_word(line, pattern).is_empty() {
                    findings.push(Finding::at_line(path, index + 1, format!("`{pattern}`")));
                }
            }
        }
    }
    findings
}

/// Switching off a lint needs a reason. Clippy checks this in the workspace. This rule covers `fuzz` and code that
/// is not compiled on this machine as well.
pub(super) fn lints_are_switched_off_with_a_reason(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.rust_files() {
        let code = mask(text);
        for attribute in ["allow", "expect"] {
            for offset in find_word(&code, attribute) {
                let Some(arguments) = attribute_arguments(&code, offset, attribute) else {
                    continue;
                };
                if find_word(arguments, "reason").is_empty() {
                    let message = format!("`{attribute}` of a lint without a `reason`");
                    findings.push(Finding::at_line(path, line_at(&code, offset), message));
                }
            }
        }
    }
    findings
}

/// The core must call segments and blocks by these words, in code and in comments.
pub(super) fn words_are_the_vocabulary(tree: &Tree) -> Vec<Finding> {
    let is_ours = |path: &str| {
        path.starts_with("crates/core/src/")
            && !FOREIGN_HOMES.iter().any(|home| path.starts_with(home))
    };
    let mut findings = Vec::new();
    for (path, text) in tree.rust_files().filter(|(path, _)| is_ours(path)) {
        for (index, line) in text.lines().enumerate() {
            if let Some(word) = foreign_word(line) {
                let message = format!(
                    "`{word}`: say segment or block; if a strategy's own literature says {word}, \
                     list the file in xtask/src/tidy/rust.rs"
                );
                findings.push(Finding::at_line(path, index + 1, message));
            }
        }
    }
    findings
}

/// Returns whether the file is the root of a library or a program. Benchmarks, examples and fuzz targets do not
/// count: their harnesses' macros may expand to `unsafe`.
fn is_crate_root(path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').collect();
    matches!(
        parts.as_slice(),
        [.., "src", "lib.rs" | "main.rs"]
            | [.., "src", "bin", _]
            | [.., "src", "bin", _, "main.rs"]
    )
}

fn files_above(tree: &Tree, lines_max: usize) -> impl Iterator<Item = (&str, usize)> {
    tree.rust_files()
        .filter(|(path, _)| !path.contains("/tests/") && !path.ends_with("/tests.rs"))
        .map(|(path, text)| (path, lines_without_tests(text)))
        .filter(move |&(_, lines)| lines > lines_max)
}

/// Returns the number of lines before the tests, which are the file's last module.
fn lines_without_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let is_tests = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ");
    lines.windows(2).position(is_tests).unwrap_or(lines.len())
}

/// Returns the text between the parentheses of an attribute, also of one inside `cfg_attr`. Returns `None` if the
/// name at `offset` is not an attribute, for instance the method `expect`.
fn attribute_arguments<'code>(code: &'code str, offset: usize, name: &str) -> Option<&'code str> {
    let before = code[..offset].trim_end();
    let is_attribute = before.ends_with("#[") || before.ends_with("#![");
    let is_conditional = || {
        let condition = code[..offset].rfind("cfg_attr");
        before.ends_with(',') && condition.is_some_and(|start| !code[start..offset].contains(']'))
    };
    if !is_attribute && !is_conditional() {
        return None;
    }
    let arguments = code[offset + name.len()..].trim_start().strip_prefix('(')?;
    let mut depth = 1;
    let end = arguments.find(|character| {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        depth == 0
    });
    Some(&arguments[..end.unwrap_or(arguments.len())])
}

/// Returns the first foreign word in a line, in lower case. The words of a name are checked separately:
/// `chunk_count` and `ChunkCount` both contain "chunk". The methods of slices do not count.
fn foreign_word(line: &str) -> Option<String> {
    let is_name = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let mut rest = line;
    while let Some(start) = rest.find(is_name) {
        let name = &rest[start..];
        let name = &name[..name
            .find(|character| !is_name(character))
            .unwrap_or(name.len())];
        let is_method = rest[..start].ends_with('.')
            && ["chunk_by", "chunks", "chunks_exact", "chunks_mut"].contains(&name);
        let mut words = words_of(name).into_iter().filter(|_| !is_method);
        if let Some(word) = words.find(|word| FOREIGN_WORDS.contains(&word.as_str())) {
            return Some(word);
        }
        rest = &rest[start + name.len()..];
    }
    None
}

/// Returns the words of a name, in lower case. A capital after a small letter starts a word.
fn words_of(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut follows_small = false;
    for character in name.chars() {
        if character == '_' || (character.is_ascii_uppercase() && follows_small) {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| character != '_') {
            word.push(character.to_ascii_lowercase());
        }
        follows_small = character.is_ascii_lowercase();
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines of one file in which the rule finds something.
    fn lines(rule: fn(&Tree) -> Vec<Finding>, path: &str, text: &str) -> Vec<Option<usize>> {
        rule(&Tree::of(&[(path, text)]))
            .iter()
            .map(|finding| finding.line)
            .collect()
    }

    #[test]
    fn unsafe_code() {
        let lines = |path, text| lines(unsafe_is_confined, path, text);
        let good = "#![forbid(unsafe_code)]\n// unsafe\nconst A: &str = \"unsafe\";\n";
        let bad = "fn read() {\n    unsafe { read_raw() }\n}\n";
        assert_eq!(lines("crates/core/src/lib.rs", good), []);
        assert_eq!(
            lines("crates/core/src/lib.rs", "// #![forbid(unsafe_code)]\n"),
            [None]
        );
        assert_eq!(lines("crates/cli/src/main.rs", "fn main() {}\n"), [None]);
        assert_eq!(lines("bench/src/bin/record.rs", "fn main() {}\n"), [None]);
        assert_eq!(lines("crates/core/src/units.rs", bad), [Some(2)]);
        assert_eq!(lines("crates/core/tests/all.rs", bad), [Some(2)]);
        assert_eq!(lines("crates/cuda/src/lib.rs", bad), []);
        assert_eq!(lines("crates/cuda2/src/driver.rs", bad), [Some(2)]);
    }

    #[test]
    fn file_lengths() {
        let code = "fn a() {}\n".repeat(FILE_LINES_MAX);
        let tests = "#[cfg(test)]\nmod tests {\n    fn b() {}\n}\n";
        let lines = |path, text: &str| lines(files_can_be_held, path, text);
        assert_eq!(lines("crates/core/src/a.rs", &code), []);
        assert_eq!(lines("crates/core/src/a.rs", &format!("{code}{tests}")), []);
        assert_eq!(
            lines(
                "crates/core/src/a.rs",
                &format!("{code}fn c() {{}}\n{tests}")
            ),
            [None]
        );
        assert_eq!(
            lines("crates/core/src/a/tests.rs", &format!("{code}{code}")),
            []
        );
        assert_eq!(
            lines("crates/core/tests/a.rs", &format!("{code}{code}")),
            []
        );
        let tree = Tree::of(&[("a.rs", code.as_str()), ("b.rs", tests)]);
        assert_eq!(
            files_grow_long(&tree),
            [Finding::in_file("a.rs", "1000 lines without tests")]
        );
    }

    #[test]
    fn unfinished_code() {
        let lines = |text| lines(nothing_is_unfinished, "a.rs", text);
        assert_eq!(
            lines("// todo!()\nlet a = \"dbg!\"; my_dbg!(a); #[test]\n"),
            []
        );
        assert_eq!(
            lines("todo!()\n\nunimplemented!(\"\")\ndbg!(a)\n"),
            [Some(1), Some(3), Some(4)]
        );
        assert_eq!(
            lines("#[ignore]\n#[ignore = \"slow\"]\n"),
            [Some(1), Some(2)]
        );
    }

    #[test]
    fn reasons() {
        let lines = |text| lines(lints_are_switched_off_with_a_reason, "a.rs", text);
        assert_eq!(lines("a.expect(\"reason\"); allow(b); #[test]\n"), []);
        assert_eq!(lines("#[allow(dead_code, reason = \"used by (C)\")]\n"), []);
        assert_eq!(
            lines("#![expect(\n    clippy::print_stdout,\n    reason = \"a command\"\n)]\n"),
            []
        );
        assert_eq!(lines("#[cfg_attr(miri, expect(a, reason = \"b\"))]\n"), []);
        assert_eq!(
            lines("\n#[allow(dead_code)]\n#![expect(a)] // reason\n"),
            [Some(2), Some(3)]
        );
        assert_eq!(lines("#[cfg_attr(miri, allow(a))]\n"), [Some(1)]);
        assert_eq!(lines("#[cfg_attr(miri, b)]\nf(a, expect(b))\n"), []);
        assert_eq!(
            lines("#[allow(a)]\nconst REASON: u8 = 1; // (reason\n"),
            [Some(1)]
        );
    }

    #[test]
    fn vocabulary() {
        let lines = |path, text| lines(words_are_the_vocabulary, path, text);
        let bad = "/// A chunk.\nstruct Segment;\nlet chunk_size = 1;\nstruct FreeArenas(Chunk);\n";
        let places = [Some(1), Some(3), Some(4)];
        assert_eq!(lines("crates/core/src/segment.rs", bad), places);
        assert_eq!(lines("crates/core/src/strategy/pool.rs", bad), places);
        assert_eq!(lines("crates/core/src/strategy/bfc/bin.rs", bad), []);
        assert_eq!(lines("crates/core/src/config/tests.rs", bad), []);
        assert_eq!(lines("crates/sim/src/lib.rs", bad), []);
        let good = "// Chunky code.\nbytes.chunks(2); a.b.chunks_exact(4).chunk_by(same);\n";
        assert_eq!(lines("crates/core/src/segment.rs", good), []);
        let bad = "let chunks = 1;\na.chunk();\n";
        assert_eq!(lines("crates/core/src/segment.rs", bad), [Some(1), Some(2)]);
    }
}
