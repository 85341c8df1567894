//! `lowtide run`: runs a script on lowtide, or any CUDA program with lowtide in front of the driver.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail};
use lowtide_core::Config;

use crate::args::RunArgs;
use crate::program::not_run;
use crate::{output, python};

/// The library that is preloaded.
const LIBRARY: &str = "liblowtide.so";

/// Replaces this process by the program. Returns only if that fails, with the exit code that shells use for it.
///
/// # Errors
///
/// If no Python has lowtide's package; with `--preload`, if the library is not found, or if the loader cannot take its path.
pub(crate) fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    if args.preload {
        return run_preloaded(args);
    }
    let option = |name: &str, value: &Option<String>| {
        let value = value.as_ref().map(|value| format!("{name}={value}"));
        value.map(OsString::from)
    };
    let options = [
        option("--strategy", &args.strategy),
        option("--config", &args.config),
        args.categories.then(|| "--categories".into()),
    ];
    let words = [OsString::from("run")].into_iter();
    let words = words.chain(options.into_iter().flatten());
    let words = words
        .chain(["--".into()])
        .chain(args.program.iter().cloned());
    python::become_package(&words.collect::<Vec<OsString>>())
}

/// Like [`run`], with the library in front of the driver.
fn run_preloaded(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let [program, arguments @ ..] = &*args.program else {
        bail!("no program given");
    };
    if program.is_empty() {
        bail!("no program given");
    }
    if program.to_string_lossy().starts_with('-') {
        bail!(
            "unknown option `{}`; options of the program come after its name",
            program.display()
        );
    }
    check_choice(args)?;
    let program_path = env::current_exe().context("where this command lies is not known")?;
    let library = find_library(&program_path)?;
    if env::var_os("LOWTIDE_COMPAT").is_some_and(|names| !names.is_empty()) {
        // Only a Python knows where its package is.
        output::note(
            "LOWTIDE_COMPAT changes no import here: `python -m lowtide run --preload` has Python heed it",
        );
    }
    let mut command = Command::new(program);
    command.args(arguments);
    let preloaded = preload_list(&library, env::var_os("LD_PRELOAD"))?;
    command.env("LD_PRELOAD", preloaded);
    command.env("LOWTIDE_PRELOAD", "1");
    if let Some(strategy) = &args.strategy {
        let (name, conf) = match strategy.split_once(':') {
            Some((name, conf)) => (name, Some(conf)),
            None => (&**strategy, None),
        };
        command.env("LOWTIDE_STRATEGY", name);
        // Options in the environment belong to the strategy named there.
        match conf {
            Some(conf) => command.env("LOWTIDE_CONF", conf),
            None => command.env_remove("LOWTIDE_CONF"),
        };
    }
    if let Some(config) = &args.config {
        command.env("LOWTIDE_CONF", config);
    }
    Ok(not_run(program, &command.exec()))
}

/// Checks the strategy together with its options.
///
/// # Errors
///
/// If the options are given twice, or are not the strategy's.
fn check_choice(args: &RunArgs) -> anyhow::Result<()> {
    let Some(config) = &args.config else {
        return Ok(());
    };
    let strategy = args.strategy.as_deref().unwrap_or("caching");
    if strategy.contains(':') {
        bail!("the options are given twice: in the strategy '{strategy}' and as '{config}'");
    }
    format!("{strategy}:{config}").parse::<Config>()?;
    Ok(())
}

/// Returns the path of the library. It lies in one of these places:
///
/// - beside the command;
/// - in a `lib` beside the command's directory;
/// - in the Python package that was installed with the command, in an environment or, after `pip install --target`,
///   in a directory of its own.
fn find_library(command: &Path) -> anyhow::Result<PathBuf> {
    let directory = command.parent().unwrap_or(Path::new("/"));
    let root = directory.parent().unwrap_or(directory);
    let mut places = vec![
        directory.join(LIBRARY),
        root.join("lib").join(LIBRARY),
        root.join("lowtide").join(LIBRARY),
    ];
    for libraries in ["lib", "lib64"] {
        let pythons = fs::read_dir(root.join(libraries)).into_iter().flatten();
        let mut pythons: Vec<PathBuf> = pythons.flatten().map(|entry| entry.path()).collect();
        pythons.sort();
        places.extend(pythons.into_iter().flat_map(|python| {
            let packages = ["site-packages", "dist-packages"].map(|name| python.join(name));
            packages.map(|packages| packages.join("lowtide").join(LIBRARY))
        }));
    }
    let found = places.into_iter().find(|place| place.is_file());
    found.with_context(|| {
        format!(
            "no {LIBRARY} beside {}, nor in a Python of {}: install lowtide anew, or use \
             `python -m lowtide run --preload`",
            command.display(),
            root.display()
        )
    })
}

/// Returns the value of `LD_PRELOAD`: the library, followed by the user's own libraries.
///
/// # Errors
///
/// If the loader would split the library's path.
fn preload_list(library: &Path, present: Option<OsString>) -> anyhow::Result<OsString> {
    let mut list = library.as_os_str().to_owned();
    if list.to_string_lossy().contains([' ', ':']) {
        bail!(
            "{}: LD_PRELOAD takes no path with a space or a colon in it; install lowtide elsewhere",
            library.display()
        );
    }
    if let Some(present) = present.filter(|present| !present.is_empty()) {
        list.push(":");
        list.push(present);
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(library: &str, present: Option<&str>) -> Result<String, String> {
        let list = preload_list(Path::new(library), present.map(OsString::from));
        let list = list.map_err(|error| error.to_string())?;
        Ok(list.into_string().unwrap())
    }

    #[test]
    fn the_users_own_libraries_stay() {
        let library = "/opt/liblowtide.so";
        assert_eq!(list(library, None), Ok(library.to_owned()));
        assert_eq!(list(library, Some("")), Ok(library.to_owned()));
        let expected = "/opt/liblowtide.so:/a.so /b.so";
        assert_eq!(list(library, Some("/a.so /b.so")), Ok(expected.to_owned()));
    }

    #[test]
    fn a_path_that_the_loader_would_cut_is_refused() {
        for library in ["/opt/my lib/liblowtide.so", "/opt/a:b/liblowtide.so"] {
            assert!(list(library, None).unwrap_err().contains("LD_PRELOAD"));
        }
    }
}
