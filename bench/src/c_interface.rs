//! A pair through `lowtide_malloc` and `lowtide_free`, on the stand-in driver: what a program pays, with the boundary
//! and the locks. The other benchmarks call the core alone.

use std::env;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::child::finish;
use crate::output;

/// The benchmark's name in the baseline.
pub(crate) const NAME: &str = "c-interface";

/// The strategies that are counted: the default, and PyTorch's own.
pub(crate) const STRATEGIES: [&str; 2] = ["caching", "tide"];

/// The program, and the directories of the libraries that it needs.
#[derive(Debug)]
pub(crate) struct CProgram {
    path: PathBuf,
    libraries: String,
}

impl CProgram {
    /// Builds lowtide's library, the stand-in driver and the program.
    ///
    /// # Errors
    ///
    /// If one cannot be built.
    pub(crate) fn build() -> Result<CProgram> {
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let packages = ["-p", "lowtide-capi", "-p", "lowtide-fakecuda"];
        finish(
            Command::new(cargo)
                .args(["build", "--release"])
                .args(packages),
        )?;
        let program = env::current_exe()?;
        let release = program.parent().context("a program has a directory")?;
        let directory = release.join(NAME);
        fs::create_dir_all(&directory)?;
        let driver = symlink(
            release.join("libfakecuda.so"),
            directory.join("libcuda.so.1"),
        );
        driver.or_else(|error| match error.kind() {
            ErrorKind::AlreadyExists => Ok(()),
            _ => Err(error),
        })?;
        let path = directory.join("pair");
        let include = output::project("../crates/capi/include");
        let mut compiler = Command::new("cc");
        compiler.arg("-O2").arg(output::project("src/pair.c"));
        compiler.arg("-I").arg(include).arg("-L").arg(release);
        compiler.args(["-llowtide", "-o"]).arg(&path);
        finish(&mut compiler).context("install a C compiler to count at the C interface")?;
        let libraries = format!("{}:{}", directory.display(), release.display());
        Ok(CProgram { path, libraries })
    }

    /// Adds the program to a command that runs it: `pairs` pairs with a strategy.
    pub(crate) fn add_to(&self, command: &mut Command, strategy: &str, pairs: usize) {
        command
            .env("LD_LIBRARY_PATH", &self.libraries)
            .env("LOWTIDE_STRATEGY", strategy)
            .arg(&self.path)
            .arg(pairs.to_string());
    }
}
