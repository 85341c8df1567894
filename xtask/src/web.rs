//! The page of `lowtide report`, built from `web` into one file. The file is committed, so that building lowtide
//! needs no Node.js.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::process::{Stop, answers, cargo, step};
use crate::python::target;

/// The lock file, which lists the packages to install.
const LOCK: &str = "web/package-lock.json";
/// A copy of the lock file, written after everything was installed.
const INSTALLED: &str = "web/node_modules/lowtide-package-lock.json";

/// The sample reports in the documents: the file's name and its recordings.
const REPORTS: [(&str, &[&str]); 3] = [
    ("llama_varlen", &["traces/llama_varlen.pickle.zst"]),
    ("gpt2_train", &["traces/gpt2_train.stacks.pickle.zst"]),
    (
        "two_jobs",
        &[
            "traces/mnist_mlp.pickle.zst",
            "traces/gpt2_train.pickle.zst",
        ],
    ),
];

/// Checks the sources and builds the page from them.
pub(crate) fn write(root: &Path) -> Result<(), Stop> {
    install(root)?;
    check_sources(root)?;
    npm(root, "the page", &["run", "build"])
}

/// Checks the sources, that the page is current, and, if there is a browser, the page in it.
pub(crate) fn test(root: &Path) -> Result<(), Stop> {
    install(root)?;
    check_sources(root)?;
    npm(root, "the page is current", &["run", "current"])?;
    if !answers(&mut Command::new("chromium")) {
        eprintln!("xtask: the page in a browser: no chromium here, so that is not tested");
        return Ok(());
    }
    let program = target()?.join("debug/lowtide");
    let mut build = cargo(root, &["build", "--quiet", "-p", "lowtide"]);
    build.arg("--target-dir").arg(target()?);
    step("the program that the page is compared with", &mut build)?;
    let mut browser = npm_command(root, &["run", "browser"]);
    step("the page in a browser", browser.env("LOWTIDE", program))
}

/// Makes reports of the project's own recordings, and of a generated one with a leak, which no recording has. Takes
/// screenshots of their views into `docs/report`.
pub(crate) fn screenshots(root: &Path) -> Result<(), Stop> {
    install(root)?;
    let pages = target()?.join("report");
    fs::create_dir_all(&pages)
        .map_err(|error| Stop::new(1, format!("{}: {error}", pages.display())))?;
    for (name, traces) in REPORTS {
        report(root, &pages, name, traces)?;
    }
    let leaking = pages.join("leaking.pickle").display().to_string();
    npm(
        root,
        "a job that leaks",
        &["run", "leaking", "--", &leaking],
    )?;
    report(root, &pages, "leaking", &[&leaking])?;
    let pages = pages.display().to_string();
    npm(root, "pictures", &["run", "screenshots", "--", &pages])
}

/// Makes a report of recordings with `lowtide`.
fn report(root: &Path, pages: &Path, name: &str, traces: &[&str]) -> Result<(), Stop> {
    let mut report = cargo(root, &["run", "--release", "--quiet", "-p", "lowtide"]);
    report.args(["--", "report"]).args(traces);
    report.arg("-o").arg(pages.join(format!("{name}.html")));
    step(&format!("the report {name}"), &mut report)
}

fn check_sources(root: &Path) -> Result<(), Stop> {
    npm(root, "the page's sources", &["run", "check"])?;
    npm(root, "the page's unit tests", &["run", "unit"])
}

/// Installs the packages of the lock file unless they are installed for its current content.
fn install(root: &Path) -> Result<(), Stop> {
    let needed = fs::read(root.join(LOCK));
    let needed = needed.map_err(|error| Stop::new(1, format!("{LOCK}: {error}")))?;
    if fs::read(root.join(INSTALLED)).is_ok_and(|installed| installed == needed) {
        return Ok(());
    }
    let is_there = |program| answers(&mut Command::new(program));
    if !is_there("node") || !is_there("npm") {
        let line = "the report's page needs Node.js 18 or newer with npm \
                    (on Debian and Ubuntu: apt-get install nodejs npm)";
        return Err(Stop::new(1, line));
    }
    npm(root, "the page's tools", &["ci", "--ignore-scripts"])?;
    fs::write(root.join(INSTALLED), needed)
        .map_err(|error| Stop::new(1, format!("{INSTALLED}: {error}")))
}

fn npm(root: &Path, name: &str, arguments: &[&str]) -> Result<(), Stop> {
    step(name, &mut npm_command(root, arguments))
}

fn npm_command(root: &Path, arguments: &[&str]) -> Command {
    let mut npm = Command::new("npm");
    npm.args(["--silent", "--prefix", "web"])
        .args(arguments)
        .current_dir(root)
        .stdin(Stdio::null());
    npm
}
