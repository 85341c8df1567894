//! `lowtide convert`: writes a recording in another format.

use std::io::Write;
use std::path::Path;
use std::slice;

use anyhow::{Context, Result, bail};
use flate2::write::GzEncoder;
use lowtide_trace::{Snapshot, Trace};

use crate::args::ConvertArgs;
use crate::perfetto::Export;
use crate::recording::RecordedFile;
use crate::{format, output};

/// The format and compression of a file, by the end of its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Target {
    format: Format,
    compression: Compression,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    Pickle,
    Compact,
    Perfetto,
}

/// What is written.
enum Contents<'a> {
    Pickle(&'a Snapshot),
    Compact(&'a Snapshot),
    Perfetto(Export<'a>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Compression {
    None,
    Zstd,
    Gzip,
}

/// Runs `lowtide convert`.
///
/// # Errors
///
/// If a name, the device or the recording is bad, or the file cannot be written.
pub(crate) fn run(args: &ConvertArgs) -> Result<()> {
    let target = Target::of_name(&args.output)?;
    let output_name = format::path(&args.output);
    if target.format != Format::Perfetto && args.profile.is_some() {
        bail!(
            "{output_name}: --profile is for a file that Perfetto opens, whose name ends in .perfetto.json"
        );
    }
    output::refuse_recordings(&args.output, slice::from_ref(&args.input), "the new one")?;
    output::refuse_recordings(&args.output, args.profile.as_slice(), "the new file")?;
    let mut file = RecordedFile::read(&args.input)?;
    output::notes(&file.missing_notes());
    if let Some(device) = args.device {
        file.keep_device(device)?;
        output::notes(file.host_note("--device leaves it out").as_slice());
        file.snapshot.host.clear();
    }
    let snapshot = &file.snapshot;
    output::notes(&target.format.losses(snapshot, &output_name));
    let contents = match target.format {
        Format::Pickle => Contents::Pickle(snapshot),
        Format::Compact => Contents::Compact(snapshot),
        Format::Perfetto => Contents::Perfetto(Export::new(&file, args.profile.as_deref())?),
    };
    output::write_file(&args.output, |file| target.write(&contents, file))?;
    let events: usize = snapshot.traces.iter().map(|trace| trace.events.len()).sum();
    let host = snapshot.host.iter().map(|trace| {
        let events = format::counted(trace.events.len() as u64, "event");
        format!(", {events} of pinned host memory")
    });
    output::print(&format!(
        "{output_name}: {} of {}{}\n",
        format::counted(events as u64, "event"),
        format::counted(snapshot.traces.len() as u64, "device"),
        host.collect::<String>(),
    ))
}

impl Target {
    fn of_name(path: &Path) -> Result<Target> {
        if path == Path::new("-") {
            bail!("-: standard output has no name to say a format; name a file or a pipe");
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let (stem, compression) = if let Some(stem) = name.strip_suffix(".zst") {
            (stem, Compression::Zstd)
        } else if let Some(stem) = name.strip_suffix(".gz") {
            (stem, Compression::Gzip)
        } else {
            (&*name, Compression::None)
        };
        let format = match stem.rsplit_once('.').map(|(_, extension)| extension) {
            Some("pickle") => Format::Pickle,
            Some("lowtide") => Format::Compact,
            Some("json") if stem.ends_with(".perfetto.json") => Format::Perfetto,
            _ => bail!(
                "{}: the name says no format; it has to end in .pickle, .lowtide or .perfetto.json, with .zst or \
                 .gz after that to compress it",
                path.display()
            ),
        };
        if format == Format::Perfetto && compression == Compression::Zstd {
            bail!(
                "{}: Perfetto opens no zstd; let the name end in .perfetto.json or .perfetto.json.gz",
                path.display()
            );
        }
        Ok(Target {
            format,
            compression,
        })
    }

    fn write(self, contents: &Contents<'_>, file: &mut dyn Write) -> Result<()> {
        match self.compression {
            Compression::None => contents.write(file)?,
            Compression::Zstd => {
                // 0 is the library's default level.
                let mut encoder = zstd::Encoder::new(file, 0)?;
                contents.write(&mut encoder)?;
                encoder.finish().context("zstd")?;
            }
            Compression::Gzip => {
                let mut encoder = GzEncoder::new(file, flate2::Compression::default());
                contents.write(&mut encoder)?;
                encoder.finish().context("gzip")?;
            }
        }
        Ok(())
    }
}

impl Format {
    /// Returns a note for each part of a recording that a file of this format lacks.
    fn losses(self, snapshot: &Snapshot, output_name: &str) -> Vec<String> {
        let mut notes = Vec::new();
        if self == Format::Pickle && snapshot.traces.iter().any(Trace::has_pauses) {
            notes.push(format!(
                "{output_name}: PyTorch's viewer knows no pauses, so memory that was away is reserved there all the time"
            ));
        }
        let has_names = snapshot.traces.iter().any(|trace| trace.member.is_some());
        if self != Format::Perfetto && has_names {
            notes.push(format!(
                "{output_name}: the names of the snapshots are left out, as a file of this format has one"
            ));
        }
        notes
    }
}

impl Contents<'_> {
    fn write(&self, out: &mut dyn Write) -> Result<()> {
        match self {
            Contents::Pickle(snapshot) => lowtide_trace::write_pickle(snapshot, out)?,
            Contents::Compact(snapshot) => lowtide_trace::write_compact(snapshot, out)?,
            Contents::Perfetto(export) => export.write(out)?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_formats() {
        let target = |name: &str| Target::of_name(Path::new(name)).unwrap();
        for (name, format, compression) in [
            ("a.pickle", Format::Pickle, Compression::None),
            ("a.b.pickle.zst", Format::Pickle, Compression::Zstd),
            ("dir.zst/a.lowtide", Format::Compact, Compression::None),
            ("a.lowtide.gz", Format::Compact, Compression::Gzip),
            ("a.perfetto.json", Format::Perfetto, Compression::None),
            ("a.perfetto.json.gz", Format::Perfetto, Compression::Gzip),
        ] {
            let expected = Target {
                format,
                compression,
            };
            assert_eq!(target(name), expected, "{name}");
        }
    }

    #[test]
    fn other_names_are_refused() {
        for name in ["a", "a.zst", "a.json", "pickle", "a.pickle.xz", "..", ""] {
            let error = Target::of_name(Path::new(name)).unwrap_err().to_string();
            assert!(error.contains("says no format"), "{name}: {error}");
        }
    }
}
