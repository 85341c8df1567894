//! The Python package: its checks and its wheel.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::{Stop, step};

/// The tools, each pinned to one version.
const REQUIREMENTS: &str = "python/requirements.txt";

/// Checks the Python sources, builds the wheel, and tests it in an environment without other packages.
pub(crate) fn test(root: &Path) -> Result<(), Stop> {
    let tools = Tools::prepare(root)?;
    let tool = |name: &str, arguments: &[&str]| {
        let mut command = tools.command(name);
        command.args(arguments);
        step(&format!("{name} of Python"), &mut command)
    };
    tool(
        "ruff",
        &["format", "--check", "python", "bench", "fakeruntime"],
    )?;
    tool("ruff", &["check", "python", "bench", "fakeruntime"])?;
    tool("mypy", &[])?;

    let wheels = tools.directory.join("wheel");
    let wheel = tools.build_wheel(&wheels)?;
    let fresh = tools.directory.join("fresh");
    // The package as a user has it: no file of this project and no tool except the test runner.
    let mut create = Command::new("python3");
    create
        .args(["-m", "venv", "--clear", "--without-pip"])
        .arg(&fresh);
    step("an environment for the wheel", &mut create)?;
    let python = fresh.join("bin/python");
    let mut install = tools.command("pip");
    install
        .arg("--python")
        .arg(&python)
        .args(["install", "--quiet"]);
    install
        .arg(wheel)
        .args(["pytest", "--constraint", REQUIREMENTS]);
    step("the wheel's installation", &mut install)?;
    let mut tests = Command::new(&python);
    step(
        "tests of Python",
        tests.args(["-m", "pytest", "--quiet"]).current_dir(root),
    )
}

/// Builds the wheel into `dist`, and checks what an index would refuse and which systems it is for.
pub(crate) fn wheel(root: &Path) -> Result<(), Stop> {
    let tools = Tools::prepare(root)?;
    let wheel = tools.build_wheel(&root.join("dist"))?;
    let mut check = tools.command("twine");
    step("twine", check.args(["check", "--strict"]).arg(&wheel))?;
    let mut show = tools.command("auditwheel");
    step("auditwheel", show.arg("show").arg(&wheel))?;
    eprintln!("xtask: {}", wheel.display());
    Ok(())
}

/// Runs everything that needs a GPU, with the user's Python, whose PyTorch is tested.
pub(crate) fn gpu(root: &Path, arguments: &[String]) -> Result<(), Stop> {
    stage(root)?;
    let mut run = Command::new("python3");
    run.arg("bench/gpu/run.py")
        .args(arguments)
        .current_dir(root);
    // The script has reported the failure.
    step("the GPU", &mut run).map_err(|stop| Stop { line: None, ..stop })
}

/// Runs the GPU tests with a release of PyTorch on the stand-in driver. The first argument is PyTorch's version,
/// the others are pytest's.
pub(crate) fn torch(root: &Path, arguments: &[String]) -> Result<(), Stop> {
    stage(root)?;
    let (version, for_pytest) = arguments.split_at(1);
    let mut run = Command::new("python3");
    run.arg("fakeruntime/run.py").args(version);
    run.args(["-m", "pytest", "--quiet", "python/tests/gpu"]);
    step("PyTorch", run.args(for_pytest).current_dir(root))
        .map_err(|stop| Stop { line: None, ..stop })
}

/// Builds the Rust parts of the package into the package in this checkout.
fn stage(root: &Path) -> Result<(), Stop> {
    let mut stage = Command::new("python3");
    step(
        "the package",
        stage.arg("python/stage.py").current_dir(root),
    )
}

/// The directory of the tools: a virtual environment in cargo's build directory.
struct Tools {
    root: PathBuf,
    directory: PathBuf,
}

impl Tools {
    /// Installs the tools unless they are installed for the current requirements.
    fn prepare(root: &Path) -> Result<Self, Stop> {
        let tools = Self {
            root: root.into(),
            directory: target()?.join("python"),
        };
        let needed = fs::read(root.join(REQUIREMENTS));
        let needed = needed.map_err(|error| Stop::new(1, format!("{REQUIREMENTS}: {error}")))?;
        let installed = tools.directory.join("requirements.txt");
        if fs::read(&installed).is_ok_and(|installed| installed == needed) {
            return Ok(tools);
        }
        let mut create = Command::new("python3");
        create
            .args(["-m", "venv", "--clear"])
            .arg(tools.directory.join("tools"));
        step("an environment for Python's tools", &mut create).map_err(|_| {
            let line = "the Python package needs Python 3.10 or newer with its module venv \
                        (on Debian and Ubuntu: apt-get install python3-venv)";
            Stop::new(1, line)
        })?;
        let mut install = tools.command("pip");
        install.args(["install", "--quiet", "--requirement", REQUIREMENTS]);
        step("Python's tools", &mut install)?;
        fs::write(&installed, needed)
            .map_err(|error| Stop::new(1, format!("{}: {error}", installed.display())))?;
        Ok(tools)
    }

    /// Returns a command of the tools, to be run in the project's directory with the tools in its PATH.
    fn command(&self, name: &str) -> Command {
        let programs = self.directory.join("tools/bin");
        let mut command = Command::new(programs.join(name));
        command.current_dir(&self.root).stdin(Stdio::null());
        if let Ok(path) = env::join_paths(
            [programs]
                .into_iter()
                .chain(env::split_paths(&env::var_os("PATH").unwrap_or_default())),
        ) {
            command.env("PATH", path);
        }
        command
    }

    /// Builds the wheel into an empty directory and returns its path.
    fn build_wheel(&self, directory: &Path) -> Result<PathBuf, Stop> {
        let failed = |error| Stop::new(1, format!("{}: {error}", directory.display()));
        if directory.exists() {
            fs::remove_dir_all(directory).map_err(failed)?;
        }
        let mut build = self.command("pip");
        build.args([
            "wheel",
            ".",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
        ]);
        step("the wheel", build.arg(directory))?;
        let mut files = fs::read_dir(directory).map_err(failed)?;
        let wheel = files
            .next()
            .ok_or_else(|| Stop::new(1, "pip built no wheel"))?;
        Ok(wheel.map_err(failed)?.path())
    }
}

/// Returns cargo's build directory, which contains this program.
pub(crate) fn target() -> Result<PathBuf, Stop> {
    let program = env::current_exe().ok();
    let target = program
        .as_deref()
        .and_then(|program| program.ancestors().nth(2));
    target
        .map(Path::to_path_buf)
        .ok_or_else(|| Stop::new(1, "start this by `cargo xtask`"))
}
