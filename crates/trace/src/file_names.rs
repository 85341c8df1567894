//! The names of a recording's files when several processes write it, and the files that a recording may replace.
//! Code that writes recordings and code that removes them both use this module.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::compact;
use crate::source::Input;

/// Returns this process's rank in a job of several processes, from the environment variables of `torchrun`, MPI and
/// SLURM; `None` if there is one process.
pub fn rank(variable: impl Fn(&str) -> Option<String>) -> Option<u32> {
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

/// Returns the file of this process's rank: `a/b.rank3.lowtide` for `a/b.lowtide`. Returns `file` itself if there
/// is one rank, or if its name has this rank already.
pub fn of_rank(file: &Path, variable: impl Fn(&str) -> Option<String>) -> PathBuf {
    let mark = rank(variable).map(|rank| format!("rank{rank}"));
    match mark {
        Some(mark) if !has_mark(file, &mark) => with_mark(file, &mark),
        _ => file.to_owned(),
    }
}

/// Returns the file of a process: `a/b.pid1234.lowtide`. If `earlier` processes had the same process id, as in
/// containers that share a directory, it is `a/b.pid1234-1.lowtide`.
pub fn of_process(file: &Path, process: u32, earlier: u32) -> PathBuf {
    match earlier {
        0 => with_mark(file, &format!("pid{process}")),
        _ => with_mark(file, &format!("pid{process}-{earlier}")),
    }
}

/// Returns whether `path` is `file`, or the file of one of its ranks or processes.
fn is_of(file: &Path, path: &Path) -> bool {
    let is_mark = |mark: &str| mark.split('.').all(is_mark);
    path == file || path.parent() == file.parent() && mark(file, path).is_some_and(is_mark)
}

/// Returns the existing recordings of this name: the file itself, and those of its ranks and processes.
///
/// # Errors
///
/// If the directory cannot be read.
pub fn files_of(file: &Path) -> io::Result<Vec<PathBuf>> {
    // A name without a directory is in the working directory.
    let directory = file.parent().filter(|it| !it.as_os_str().is_empty());
    let entries = fs::read_dir(directory.unwrap_or(Path::new(".")))?;
    let paths = entries.map(|entry| Ok(file.with_file_name(entry?.file_name())));
    let mut files = paths.collect::<io::Result<Vec<PathBuf>>>()?;
    files.retain(|path| is_of(file, path) && check_replaceable(path).is_ok());
    Ok(files)
}

/// Returns `Ok` if a recording may be written to `path`: nothing exists there, or a file of this user that is empty
/// or a recording in lowtide's own format, plain or compressed.
///
/// # Errors
///
/// If something else exists there, or the file cannot be read. Only a file of this user is opened.
pub fn check_replaceable(path: &Path) -> io::Result<()> {
    let Some(file) = lowtide_files::open_own(path)? else {
        return Ok(());
    };
    if file.metadata()?.len() > 0 && !is_recording(file) {
        let what = "exists and is no recording of lowtide's: choose another name";
        return Err(io::Error::new(ErrorKind::AlreadyExists, what));
    }
    Ok(())
}

/// Returns whether a file begins like lowtide's own format.
fn is_recording(file: File) -> bool {
    let begins = Input::open(file).and_then(|mut input| compact::is_compact(&mut input));
    begins.unwrap_or(false)
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

/// Returns whether `path` is what `with_mark` returns for some path.
fn has_mark(path: &Path, mark: &str) -> bool {
    let stem = path.file_stem().unwrap_or_default();
    stem.as_encoded_bytes()
        .ends_with(format!(".{mark}").as_bytes())
}

/// Returns `rank3` for `job.lowtide` and `job.rank3.lowtide`.
fn mark<'a>(file: &Path, path: &'a Path) -> Option<&'a str> {
    // The rest of the name may be other than UTF-8.
    let name = path.file_name()?.as_encoded_bytes();
    let rest = name.strip_prefix(file.file_stem()?.as_encoded_bytes())?;
    let rest = rest.strip_prefix(b".")?;
    let mark = match file.extension() {
        Some(extension) => rest
            .strip_suffix(extension.as_encoded_bytes())?
            .strip_suffix(b".")?,
        None => rest,
    };
    str::from_utf8(mark).ok()
}

fn is_mark(text: &str) -> bool {
    let is_number =
        |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    match (text.strip_prefix("rank"), text.strip_prefix("pid")) {
        (Some(rank), _) => is_number(rank),
        (_, Some(process)) => {
            let (process, earlier) = process.split_once('-').unwrap_or((process, "0"));
            is_number(process) && is_number(earlier)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(set: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + use<'a> {
        move |name| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
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
    fn a_rank_is_added_once() {
        let third = || of(&[("RANK", "3"), ("WORLD_SIZE", "8")]);
        let named = |name| {
            of_rank(Path::new(name), third())
                .into_os_string()
                .into_string()
        };
        assert_eq!(
            named("/data/job.lowtide").unwrap(),
            "/data/job.rank3.lowtide"
        );
        assert_eq!(
            named("/data/job.rank3.lowtide").unwrap(),
            "/data/job.rank3.lowtide"
        );
        assert_eq!(
            named("job.rank13.lowtide").unwrap(),
            "job.rank13.rank3.lowtide"
        );
        assert_eq!(named("rank3.lowtide").unwrap(), "rank3.rank3.lowtide");
    }

    #[test]
    fn only_what_a_recording_made_is_of_it() {
        let file = Path::new("/data/a.job.lowtide");
        let of_rank = of_rank(file, of(&[("RANK", "3"), ("WORLD_SIZE", "8")]));
        assert_eq!(of_rank, Path::new("/data/a.job.rank3.lowtide"));
        let of_process = of_process(&of_rank, 12, 2);
        assert_eq!(of_process, Path::new("/data/a.job.rank3.pid12-2.lowtide"));
        assert!(is_of(&of_rank, &of_process));
        assert!(!is_of(&of_rank, file));
        let are = [
            "a.job.lowtide",
            "a.job.rank0.lowtide",
            "a.job.pid1234.lowtide",
            "a.job.pid1234-1.lowtide",
            "a.job.rank3.pid12-2.lowtide",
        ];
        for name in are {
            assert!(is_of(file, &Path::new("/data").join(name)), "{name}");
            assert_eq!(
                is_of(&of_rank, &Path::new("/data").join(name)),
                name.contains("rank3"),
                "{name}"
            );
        }
        let are_not = [
            "b.job.lowtide",
            "a.job.rank.lowtide",
            "a.job.rank1b.lowtide",
            "a.job.rank1.pickle",
            "a.job.pid1-.lowtide",
            "a.job.2.lowtide",
            "a.job.old.lowtide",
            "a.rank1.lowtide",
            "rank1.lowtide",
        ];
        for name in are_not {
            assert!(!is_of(file, &Path::new("/data").join(name)), "{name}");
        }
        assert!(!is_of(file, Path::new("/other/a.job.rank0.lowtide")));
        assert!(is_of(Path::new("/x/job"), Path::new("/x/job.rank3")));
    }
}
