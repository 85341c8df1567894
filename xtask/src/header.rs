//! The C header of `liblowtide.so`, generated from the source of its crate.

use std::fs;
use std::path::Path;

use crate::process::Stop;

const CRATE: &str = "crates/capi";
const HEADER: &str = "crates/capi/include/lowtide.h";
/// The files with items for C, in the order in which a reader wants them.
const SOURCES: [&str; 16] = [
    "error",
    "boundary",
    "pointers",
    "pluggable",
    "pools",
    "checkpoint",
    "regions",
    "events",
    "held",
    "shortage",
    "dump",
    "control",
    "record",
    "peers",
    "share",
    "tms",
];

/// Generates the header in the project at `root`.
pub(crate) fn write(root: &Path) -> Result<(), Stop> {
    let header = generate(root).map_err(|message| Stop::new(1, message))?;
    fs::write(root.join(HEADER), header).map_err(|error| Stop::new(1, format!("{HEADER}: {error}")))
}

/// Returns the generated header.
fn generate(root: &Path) -> Result<String, String> {
    let directory = root.join(CRATE);
    let config = cbindgen::Config::from_file(directory.join("cbindgen.toml"))?;
    let builder = cbindgen::Builder::new().with_config(config);
    let builder = SOURCES.iter().fold(builder, |builder, name| {
        builder.with_src(directory.join(format!("src/{name}.rs")))
    });
    let bindings = builder.generate().map_err(|error| error.to_string())?;
    let mut header = Vec::new();
    bindings.write(&mut header);
    let header = String::from_utf8(header).map_err(|error| error.to_string())?;
    // What Rust calls safety is the caller's side of the contract in C.
    Ok(header.replace("* # Safety\n", "* The caller promises:\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_current() {
        let root = crate::root().expect("cargo runs the tests");
        let committed = fs::read_to_string(root.join(HEADER)).expect("the header is there");
        let generated = generate(&root).expect("the source can be read");
        assert!(
            committed == generated,
            "{HEADER} is not what the source says: `cargo xtask header` writes it anew"
        );
    }
}
