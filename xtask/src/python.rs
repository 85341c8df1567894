//! The Python package: its checks and its wheel.

use std::env;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::{Stop, step};

/// The tools, each pinned to one version.
const REQUIREMENTS: &str = "python/requirements.txt";

/// The tools that build for other systems than this one: a hundred megabytes, which tests do without.
const RELEASE_REQUIREMENTS: &str = "python/requirements-release.txt";

/// The shims that the last wheel was built with.
const SHIMS: &str = "python/lowtide/torch/prebuilt";

/// The libraries that come with the user's PyTorch. The shims are linked against them.
const PYTORCH: [&str; 3] = ["libc10.so", "libc10_cuda.so", "libtorch_cuda.so"];

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
    let wheel = tools.build_wheel(&wheels, &[])?;
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

/// Builds a wheel for this system into `dist`, or one for every Linux with each of some processors. Checks what an index
/// would refuse and which systems the wheels are for, and prints what was built.
pub(crate) fn wheel(root: &Path, machines: &[String]) -> Result<(), Stop> {
    let tools = Tools::prepare(root)?;
    let dist = root.join("dist");
    if machines.is_empty() {
        let wheel = tools.build_wheel(&dist, &[])?;
        let mut show = tools.command("auditwheel");
        step("auditwheel", show.arg("show").arg(&wheel))?;
        return tools.check_wheel(&wheel);
    }
    tools.prepare_release()?;
    remove(&dist)?;
    for machine in machines {
        tools.check_wheel(&tools.build_manylinux(&dist, machine)?)?;
    }
    Ok(())
}

/// Builds the shims that the next wheels for some processors have.
pub(crate) fn shims(root: &Path, machines: &[String]) -> Result<(), Stop> {
    let tools = Tools::prepare(root)?;
    tools.prepare_release()?;
    let mut build = tools.command("python");
    step("shims", build.arg("python/prebuild.py").args(machines))
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

    /// Installs what builds for other systems.
    fn prepare_release(&self) -> Result<(), Stop> {
        let mut install = self.command("pip");
        install.args(["install", "--quiet", "--requirement", RELEASE_REQUIREMENTS]);
        step("Python's tools for a release", &mut install)
    }

    /// Builds the wheel into an empty directory and returns its path.
    fn build_wheel(&self, directory: &Path, settings: &[&str]) -> Result<PathBuf, Stop> {
        remove(directory)?;
        let mut build = self.command("pip");
        build.args(["wheel", ".", "--quiet", "--no-deps", "--no-build-isolation"]);
        build.args(settings).arg("--wheel-dir").arg(directory);
        step("the wheel", &mut build)?;
        find(directory, ".whl")
    }

    /// Builds the wheel for every Linux with a processor and glibc 2.28 or newer, and returns its path.
    ///
    /// auditwheel reads which versions of the system's libraries are needed, and adds a tag if they are newer. It knows
    /// the tags of other processors only by itself (`auto`).
    fn build_manylinux(&self, directory: &Path, machine: &str) -> Result<PathBuf, Stop> {
        let setting = format!("manylinux={machine}");
        let wheel = self.build_wheel(
            &self.directory.join("wheel"),
            &["--config-settings", &setting],
        )?;
        let mut tag = self.command("auditwheel");
        tag.args(["repair", "--only-plat", "--plat", "auto"]);
        tag.args(PYTORCH.iter().flat_map(|library| ["--exclude", library]));
        step(
            "auditwheel",
            tag.arg("--wheel-dir").arg(directory).arg(&wheel),
        )?;
        find(directory, &format!("-manylinux_2_28_{machine}.whl")).map_err(|_| {
            let line =
                "the wheel needs newer libraries than manylinux_2_28 has: see auditwheel's tags";
            Stop::new(1, line)
        })
    }

    /// Checks what an index would refuse, and prints what was built.
    fn check_wheel(&self, wheel: &Path) -> Result<(), Stop> {
        let mut check = self.command("twine");
        step("twine", check.args(["check", "--strict"]).arg(wheel))?;
        let releases = shim_releases(&self.root.join(SHIMS));
        let shims = match releases.as_slice() {
            [] => "without prebuilt shims".into(),
            releases => format!("with shims for PyTorch {}", releases.join(", ")),
        };
        eprintln!("xtask: {}, {shims}", wheel.display());
        Ok(())
    }
}

/// Returns the releases of PyTorch that a directory has shims for.
fn shim_releases(directory: &Path) -> Vec<String> {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut releases: Vec<String> = files
        .filter_map(|file| Some(file.file_name().to_str()?.split('-').nth(1)?.into()))
        .collect();
    releases.sort_by_key(|release| {
        let numbers = release.split('.').map(|number| number.parse().ok());
        numbers.collect::<Vec<Option<u32>>>()
    });
    releases
}

/// Returns the file of a directory whose name ends with this.
fn find(directory: &Path, end: &str) -> Result<PathBuf, Stop> {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths = files.map(|file| file.path());
    paths
        .find(|path| path.to_string_lossy().ends_with(end))
        .ok_or_else(|| Stop::new(1, format!("{}: no file *{end}", directory.display())))
}

/// Removes a directory, if it is there.
fn remove(directory: &Path) -> Result<(), Stop> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Stop::new(1, format!("{}: {error}", directory.display())))
        }
        _ => Ok(()),
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{remove, shim_releases};

    #[test]
    fn releases_are_those_of_the_shims_in_order() {
        let directory = std::env::temp_dir().join(format!("xtask-shims-{}", std::process::id()));
        remove(&directory).unwrap();
        assert!(shim_releases(&directory).is_empty());
        fs::create_dir(&directory).unwrap();
        for release in ["2.10.0", "2.9.1", "2.8.0", "2.9.0"] {
            fs::write(directory.join(format!("torch-{release}-0123.so")), "").unwrap();
        }
        assert_eq!(
            shim_releases(&directory),
            ["2.8.0", "2.9.0", "2.9.1", "2.10.0"]
        );
        remove(&directory).unwrap();
        assert!(!directory.exists());
    }
}
