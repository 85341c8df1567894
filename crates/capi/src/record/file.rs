//! Which file a process records to: one of its own.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Returns a new file for what this process records, and where it is: at `path`; with `.rank3` before the
/// extension in a process of several ranks, as `torchrun` starts them; and with `.pid1234` there where another
/// process of the job has that already, unless it `replaces` what is there.
///
/// # Errors
///
/// If the file cannot be created.
pub(crate) fn create(
    path: &Path,
    replaces: bool,
    variable: impl Fn(&str) -> Option<String>,
) -> io::Result<(File, PathBuf)> {
    let rank = rank(variable).map(|rank| with_mark(path, &format!("rank{rank}")));
    let path = rank.unwrap_or_else(|| path.to_owned());
    if replaces {
        return Ok((File::create(&path)?, path));
    }
    match OpenOptions::new().write(true).create_new(true).open(&path) {
        Ok(file) => Ok((file, path)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            // Only an earlier process can have had the same number.
            let path = with_mark(&path, &format!("pid{}", std::process::id()));
            Ok((File::create(&path)?, path))
        }
        Err(error) => Err(error),
    }
}

/// Returns this process's rank where there are several.
fn rank(variable: impl Fn(&str) -> Option<String>) -> Option<u32> {
    let number = |name| variable(name)?.trim().parse().ok();
    let pairs = [
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ];
    let known = pairs.map(|(rank, size)| Some((number(rank)?, number(size)?)));
    let (rank, size): (u32, u32) = known.into_iter().flatten().next()?;
    (size > 1).then_some(rank)
}

/// Returns `a/b.rank3.lowtide` for `a/b.lowtide` and `rank3`.
fn with_mark(path: &Path, mark: &str) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(".");
    name.push(mark);
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(set: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + use<'a> {
        let set: Vec<_> = set
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        move |name| {
            let found = set.iter().find(|(known, _)| known == name);
            found.map(|(_, value)| value.clone())
        }
    }

    #[test]
    fn ranks_count_where_there_are_several() {
        assert_eq!(rank(of(&[])), None);
        assert_eq!(rank(of(&[("RANK", "0"), ("WORLD_SIZE", "1")])), None);
        assert_eq!(rank(of(&[("RANK", "3"), ("WORLD_SIZE", "8")])), Some(3));
        assert_eq!(rank(of(&[("RANK", "x"), ("WORLD_SIZE", "8")])), None);
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")];
        assert_eq!(rank(of(&slurm)), Some(0));
    }

    #[test]
    fn each_process_has_a_file_of_its_own() {
        let name = format!("lowtide-record-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("a job.lowtide");
        let ours = format!("a job.pid{}.lowtide", std::process::id());
        let names = [
            ("a job.lowtide", false),
            (&*ours, false),
            ("a job.lowtide", true),
        ];
        for (expected, replaces) in names {
            let (_, found) = create(&path, replaces, of(&[])).unwrap();
            assert_eq!(found, directory.join(expected));
        }
        let ranks = [("RANK", "5"), ("WORLD_SIZE", "6")];
        let (_, found) = create(&directory.join("x"), false, of(&ranks)).unwrap();
        assert_eq!(found, directory.join("x.rank5"));
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
