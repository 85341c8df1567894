//! Rules for the crates' `Cargo.toml` files.

use toml::{Table, Value};

use super::finding::Finding;
use super::tree::Tree;

/// The crates that each crate may use, by directory name. A crate that is not listed has no place in the
/// architecture yet.
const MAY_USE: [(&str, &[&str]); 17] = [
    ("core", &[]),
    ("files", &[]),
    ("shared", &["core"]),
    ("sim", &["core"]),
    ("sockets", &["files"]),
    ("region", &["core", "shared"]),
    ("cuda", &["core", "shared", "region", "files"]),
    ("fakecuda", &[]),
    ("trace", &["core", "files"]),
    ("replay", &["core", "shared", "sim", "cuda", "trace"]),
    ("explain", &["core", "shared", "trace", "replay"]),
    ("history", &["core", "trace", "replay"]),
    (
        "cli",
        &[
            "core", "shared", "sim", "sockets", "cuda", "trace", "replay", "history", "files",
        ],
    ),
    (
        "capi",
        &[
            "core", "region", "shared", "sim", "sockets", "cuda", "trace", "replay", "history",
            "explain", "files",
        ],
    ),
    (
        "bench",
        &["core", "shared", "sim", "cuda", "trace", "replay"],
    ),
    (
        "fuzz",
        &["core", "shared", "sim", "trace", "replay", "history"],
    ),
    ("xtask", &[]),
];

/// Crates that the tests of any crate may use, even of one below: the stand-ins for a device, and traces.
const TESTS_MAY_USE: [&str; 3] = ["sim", "fakecuda", "trace"];

/// A crate's manifest.
struct Manifest<'tree> {
    path: &'tree str,
    /// The name of the crate's directory.
    directory: &'tree str,
    table: Table,
}

/// Dependencies between crates must point down only.
pub(super) fn dependencies_point_down(tree: &Tree) -> Vec<Finding> {
    let (manifests, mut findings) = manifests(tree);
    let directory_of = |package: &str| {
        let mut all = manifests.iter();
        all.find(|manifest| manifest.package("name") == Some(package))
            .map(|found| found.directory)
    };
    for manifest in &manifests {
        let Some((_, may_use)) = MAY_USE.iter().find(|(name, _)| *name == manifest.directory)
        else {
            let message = "a new crate: say what it may use in xtask/src/tidy/manifests.rs";
            findings.push(Finding::in_file(manifest.path, message));
            continue;
        };
        for (package, is_for_tests) in manifest.dependencies() {
            let Some(used) = directory_of(package) else {
                continue;
            };
            let is_support = is_for_tests && TESTS_MAY_USE.contains(&used);
            if !is_support && !may_use.contains(&used) {
                let message = format!("`{}` must not depend on `{used}`", manifest.directory);
                findings.push(Finding::in_file(manifest.path, message));
            }
        }
    }
    findings
}

/// A published crate must have a description and a licence.
pub(super) fn crates_are_described(tree: &Tree) -> Vec<Finding> {
    let (manifests, mut findings) = manifests(tree);
    for manifest in &manifests {
        if !manifest.is_published() {
            continue;
        }
        let package = &manifest.table["package"];
        for key in ["description", "license"] {
            if package.get(key).is_none() {
                findings.push(Finding::in_file(manifest.path, format!("no `{key}`")));
            }
        }
    }
    findings
}

/// Every crate must inherit the lints. Without this line, no lint applies to it, and nothing says so.
pub(super) fn lints_are_inherited(tree: &Tree) -> Vec<Finding> {
    let (manifests, mut findings) = manifests(tree);
    // The fuzz targets are their own workspace.
    for manifest in manifests
        .iter()
        .filter(|manifest| manifest.directory != "fuzz")
    {
        let inherits = manifest
            .table
            .get("lints")
            .and_then(|lints| lints.get("workspace"));
        if inherits.and_then(Value::as_bool) != Some(true) {
            let message = "must say `[lints]` and `workspace = true`";
            findings.push(Finding::in_file(manifest.path, message));
        }
    }
    findings
}

/// A release has one version: the workspace's. Each crate inherits it, the crates ask for each other in it, and the
/// Python package takes that of the command.
pub(super) fn version_is_the_workspaces(tree: &Tree) -> Vec<Finding> {
    let table = |path| tree.text(path)?.parse::<Table>().ok();
    let workspace = table("Cargo.toml").unwrap_or_default();
    let version = at(&workspace, &["workspace", "package", "version"]);
    let mut findings = Vec::new();
    let ours = at(&workspace, &["workspace", "dependencies"]).and_then(Value::as_table);
    for (name, dependency) in ours.into_iter().flatten() {
        if dependency.get("path").is_some() && dependency.get("version") != version {
            let message = format!("`{name}` must have the version of the workspace");
            findings.push(Finding::in_file("Cargo.toml", message));
        }
    }
    for manifest in manifests(tree).0 {
        let inherited = at(&manifest.table, &["package", "version", "workspace"]);
        if manifest.is_published() && inherited.and_then(Value::as_bool) != Some(true) {
            let message = "must say `version.workspace = true`";
            findings.push(Finding::in_file(manifest.path, message));
        }
    }
    let python = table("pyproject.toml").unwrap_or_default();
    if at(&python, &["project", "version"]).is_some() {
        findings.push(Finding::in_file(
            "pyproject.toml",
            "must not state a version",
        ));
    }
    findings
}

/// Returns the value in nested tables.
fn at<'table>(table: &'table Table, keys: &[&str]) -> Option<&'table Value> {
    let (first, rest) = keys.split_first()?;
    let start = table.get(*first)?;
    rest.iter().try_fold(start, |value, key| value.get(*key))
}

/// Returns every crate's manifest, and findings for those that cannot be read.
fn manifests(tree: &Tree) -> (Vec<Manifest<'_>>, Vec<Finding>) {
    let mut manifests = Vec::new();
    let mut findings = Vec::new();
    for (path, text) in tree.texts() {
        let Some(parent) = path.strip_suffix("/Cargo.toml") else {
            continue;
        };
        let directory = parent.rsplit('/').next().unwrap_or(parent);
        match text.parse::<Table>() {
            Ok(table) if table.contains_key("package") => {
                manifests.push(Manifest {
                    path,
                    directory,
                    table,
                });
            }
            Ok(_) => findings.push(Finding::in_file(path, "no `[package]`")),
            Err(error) => findings.push(Finding::in_file(path, error.message())),
        }
    }
    (manifests, findings)
}

impl Manifest<'_> {
    /// Returns a string of the `[package]` section.
    fn package(&self, key: &str) -> Option<&str> {
        self.table.get("package")?.get(key)?.as_str()
    }

    fn is_published(&self) -> bool {
        let publish = at(&self.table, &["package", "publish"]);
        publish.and_then(Value::as_bool) != Some(false)
    }

    /// Returns the name of each package that the crate uses, and whether only its tests use it.
    fn dependencies(&self) -> Vec<(&str, bool)> {
        let targets = self.table.get("target").and_then(Value::as_table);
        let targets = targets
            .into_iter()
            .flat_map(Table::values)
            .filter_map(Value::as_table);
        let mut packages = Vec::new();
        for table in targets.chain([&self.table]) {
            for section in ["dependencies", "build-dependencies", "dev-dependencies"] {
                let entries = table.get(section).and_then(Value::as_table);
                for (key, value) in entries.into_iter().flatten() {
                    // A dependency may be renamed: `name = { package = "…" }`.
                    let package = value.get("package").and_then(Value::as_str).unwrap_or(key);
                    packages.push((package, section == "dev-dependencies"));
                }
            }
        }
        packages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CORE: (&str, &str) = (
        "crates/core/Cargo.toml",
        "[package]\nname = \"lowtide-core\"\n",
    );
    const REPLAY: (&str, &str) = (
        "crates/replay/Cargo.toml",
        "[package]\nname = \"lowtide-replay\"\n",
    );
    const SIM: (&str, &str) = (
        "crates/sim/Cargo.toml",
        "[package]\nname = \"lowtide-sim\"\n",
    );

    fn messages(findings: &[Finding]) -> Vec<String> {
        findings.iter().map(Finding::to_string).collect()
    }

    /// Returns the findings for a workspace in which one crate's manifest continues with `rest`.
    fn check_use((path, start): (&str, &str), rest: &str) -> Vec<String> {
        let text = format!("{start}{rest}");
        messages(&dependencies_point_down(&Tree::of(&[
            CORE,
            REPLAY,
            SIM,
            (path, &text),
        ])))
    }

    #[test]
    fn dependencies_down_are_fine() {
        let rest = "[dependencies]\nserde = \"1\"\nlowtide-core.workspace = true\nlowtide-sim.workspace = true\n";
        assert_eq!(check_use(REPLAY, rest), [""; 0]);
        assert_eq!(
            check_use(CORE, "[dev-dependencies]\nlowtide-sim.workspace = true\n"),
            [""; 0]
        );
    }

    #[test]
    fn dependencies_up_are_found() {
        let up = ["crates/core/Cargo.toml: `core` must not depend on `sim`"];
        assert_eq!(
            check_use(CORE, "[dependencies]\nlowtide-sim.workspace = true\n"),
            up
        );
        assert_eq!(
            check_use(
                CORE,
                "[build-dependencies.lowtide-sim]\npath = \"../sim\"\n"
            ),
            up
        );
        assert_eq!(
            check_use(
                CORE,
                "[dependencies]\nsea = { package = \"lowtide-sim\" }\n"
            ),
            up
        );
        assert_eq!(
            check_use(
                CORE,
                "[target.'cfg(unix)'.dependencies]\nlowtide-sim = \"1\"\n"
            ),
            up
        );
        assert_eq!(
            check_use(
                CORE,
                "[dev-dependencies]\nlowtide-replay.workspace = true\n"
            ),
            ["crates/core/Cargo.toml: `core` must not depend on `replay`"]
        );
    }

    #[test]
    fn a_crate_needs_a_place() {
        let path = "crates/extra/Cargo.toml";
        let findings = check_use((path, "[package]\nname = \"lowtide-extra\"\n"), "");
        assert_eq!(findings.len(), 1);
        assert!(findings[0].starts_with("crates/extra/Cargo.toml: a new crate"));
    }

    #[test]
    fn a_manifest_that_cannot_be_read_is_found() {
        let tree = Tree::of(&[
            ("a/Cargo.toml", "[package\n"),
            ("b/Cargo.toml", "[workspace]\n"),
        ]);
        let findings = messages(&dependencies_point_down(&tree));
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert!(findings[0].starts_with("a/Cargo.toml: "));
        assert_eq!(findings[1], "b/Cargo.toml: no `[package]`");
    }

    #[test]
    fn descriptions() {
        let findings = |rest: &str| {
            let text = format!("{}{rest}", CORE.1);
            messages(&crates_are_described(&Tree::of(&[(CORE.0, &text)])))
        };
        assert_eq!(
            findings("description = \"a\"\nlicense.workspace = true\n"),
            [""; 0]
        );
        assert_eq!(findings("publish = false\n"), [""; 0]);
        assert_eq!(
            findings("license = \"MIT\"\n"),
            ["crates/core/Cargo.toml: no `description`"]
        );
        assert_eq!(
            findings("description = \"a\"\n"),
            ["crates/core/Cargo.toml: no `license`"]
        );
    }

    #[test]
    fn versions() {
        let findings = |workspace: &str, package: &str, python: &str| {
            let package = format!("{}{package}", CORE.1);
            messages(&version_is_the_workspaces(&Tree::of(&[
                ("Cargo.toml", workspace),
                (CORE.0, &package),
                ("pyproject.toml", python),
            ])))
        };
        let root = |version| {
            format!(
                "[workspace.package]\nversion = \"0.2.0\"\n[workspace.dependencies]\nserde = \"1\"\n\
                 lowtide-core = {{ path = \"crates/core\", version = \"{version}\" }}\n"
            )
        };
        let inherited = "version.workspace = true\n";
        let dynamic = "[project]\ndynamic = [\"version\"]\n";
        assert_eq!(findings(&root("0.2.0"), inherited, dynamic), [""; 0]);
        assert_eq!(
            findings(&root("0.1.0"), inherited, dynamic),
            ["Cargo.toml: `lowtide-core` must have the version of the workspace"]
        );
        assert_eq!(
            findings(&root("0.2.0"), "version = \"0.2.0\"\n", dynamic),
            ["crates/core/Cargo.toml: must say `version.workspace = true`"]
        );
        let own = "version = \"0.2.0\"\npublish = false\n";
        assert_eq!(findings(&root("0.2.0"), own, dynamic), [""; 0]);
        assert_eq!(
            findings(
                &root("0.2.0"),
                inherited,
                "[project]\nversion = \"0.2.0\"\n"
            ),
            ["pyproject.toml: must not state a version"]
        );
    }

    #[test]
    fn lints() {
        let findings = |path, rest: &str| {
            let text = format!("{}{rest}", CORE.1);
            lints_are_inherited(&Tree::of(&[(path, &text)])).len()
        };
        assert_eq!(findings(CORE.0, "[lints]\nworkspace = true\n"), 0);
        assert_eq!(findings(CORE.0, ""), 1);
        assert_eq!(
            findings(CORE.0, "[lints.rust]\nmissing_docs = \"warn\"\n"),
            1
        );
        assert_eq!(findings("fuzz/Cargo.toml", ""), 0);
    }
}
