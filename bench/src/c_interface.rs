//! A pair through `lowtide_malloc` and `lowtide_free`, on the stand-in driver: what a program pays, with the boundary
//! and the locks. The other benchmarks call the core alone.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::child::finish;
use crate::output;

/// The strategies that are counted: PyTorch's own, and the default.
pub(crate) const STRATEGIES: [&str; 2] = ["caching", "tide"];

/// How the names of variables begin that change what the library or the stand-in driver does.
const SETTINGS: [&str; 3] = ["LOWTIDE_", "PYTORCH_", "FAKECUDA_"];

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
        ensure!(
            !cfg!(debug_assertions),
            "run this with --release: the library is built so"
        );
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let program = env::current_exe()?;
        let release = program.parent().context("a program has a directory")?;
        let target = release.parent().context("release builds have one, too")?;
        let mut build = Command::new(cargo);
        build.args(["build", "--release", "-p", "lowtide-capi"]);
        build.args(["-p", "lowtide-fakecuda", "--manifest-path"]);
        build.arg(output::project("Cargo.toml"));
        build.arg("--target-dir").arg(target);
        finish(&mut build)?;
        let directory = release.join("c-interface");
        // One from an earlier run may lead to a library that is gone. The loader would then open the real driver.
        let _ = fs::remove_dir_all(&directory);
        let driver = directory.join("libcuda.so.1");
        fs::create_dir_all(&directory)
            .and_then(|()| symlink("../libfakecuda.so", driver))
            .with_context(|| directory.display().to_string())?;
        let path = directory.join("pair");
        let include = output::project("../crates/capi/include");
        let mut compiler = Command::new("cc");
        compiler.arg("-O2").arg(output::project("src/pair.c"));
        compiler.arg("-I").arg(include).arg("-L").arg(release);
        compiler.args(["-llowtide", "-o"]).arg(&path);
        finish(&mut compiler).context("a C compiler builds bench/src/pair.c")?;
        let libraries = format!("{}:{}", directory.display(), release.display());
        Ok(CProgram { path, libraries })
    }

    /// Adds the program to a command that runs it: `pairs` pairs with a strategy. The caller's settings do not apply.
    pub(crate) fn add_to(&self, command: &mut Command, strategy: &str, pairs: usize) {
        let is_setting = |name: &OsString| {
            let name = name.to_string_lossy();
            SETTINGS.iter().any(|start| name.starts_with(start))
        };
        for name in env::vars_os().map(|(name, _)| name).filter(is_setting) {
            command.env_remove(name);
        }
        command
            .env("LD_LIBRARY_PATH", &self.libraries)
            .env("LOWTIDE_STRATEGY", strategy)
            .arg(&self.path)
            .arg(pairs.to_string());
    }
}
