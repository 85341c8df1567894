//! Recorded jobs, read and replayed.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use lowtide_core::Config;
use lowtide_replay::{Job, Options};
use lowtide_trace::Snapshot;

use crate::answers::ReplayAnswer;
use crate::definitions::{Definitions, ReplayCase};

/// A recording whose file exists.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The case, as definitions and answers name it.
    pub case: ReplayCase,
    /// The path of the file.
    pub path: PathBuf,
}

impl Recording {
    /// Returns the recordings that the definitions name and `traces/` contains, then those in `others`. A recording
    /// in `others` replaces one in `traces/` with the same name.
    ///
    /// # Errors
    ///
    /// If a path in `others` has no file name.
    pub fn find(definitions: &Definitions, others: &[PathBuf]) -> Result<Vec<Recording>> {
        let mut recordings = Vec::new();
        for path in others {
            let name = name_of(path).with_context(|| format!("{} has no name", path.display()))?;
            let defined = definitions.replays.iter().find(|case| case.name == name);
            let case = defined.cloned().unwrap_or(ReplayCase { name, limit: None });
            let path = path.clone();
            recordings.push(Recording { case, path });
        }
        let samples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../traces");
        let committed = definitions.replays.iter().filter_map(|case| {
            let path = samples.join(format!("{}.pickle.zst", case.name));
            let is_given = recordings.iter().any(|other| other.case.name == case.name);
            (!is_given && path.is_file()).then(|| Recording {
                case: case.clone(),
                path,
            })
        });
        Ok(committed
            .collect::<Vec<_>>()
            .into_iter()
            .chain(recordings)
            .collect())
    }

    /// Returns the file's name without directories, which differ between machines.
    pub fn file_name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }
}

/// Returns a file's name up to `.pickle`, or up to its last extension.
fn name_of(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let (name, _) = file.split_once(".pickle").or(file.rsplit_once('.'))?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// A recording in memory, ready for replay.
#[derive(Debug)]
pub struct ReplayBench {
    snapshot: Snapshot,
}

impl ReplayBench {
    /// Reads the recording at `path`.
    ///
    /// # Errors
    ///
    /// If it cannot be read.
    pub fn read(path: &Path) -> Result<ReplayBench> {
        let snapshot = lowtide_trace::read(path)?;
        Ok(ReplayBench { snapshot })
    }

    /// Returns the number of recorded events.
    pub fn events(&self) -> u64 {
        let traces = self.snapshot.traces.iter();
        traces.map(|trace| trace.events.len() as u64).sum()
    }

    /// Replays every device's job and returns the sum of their results.
    ///
    /// # Errors
    ///
    /// If a replay fails.
    pub fn run(&self, config: &Config) -> Result<ReplayAnswer> {
        let mut answer = ReplayAnswer {
            completed: true,
            allocations: 0,
            peak_reserved_bytes: 0,
            device_allocs: 0,
            maps: 0,
        };
        for trace in &self.snapshot.traces {
            let outcome = Job::new(trace).replay(config, &Options::default(), &())?;
            answer.completed &= outcome.completed;
            answer.allocations += trace.allocs() as u64;
            answer.peak_reserved_bytes += outcome.peak_reserved_bytes.get();
            answer.device_allocs += outcome.device_allocs;
            answer.maps += outcome.maps;
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Answers, check_answer};

    #[test]
    fn names() {
        let name = |path: &str| name_of(path.as_ref());
        assert_eq!(
            name("there/llama.cap1.02.pickle.zst").as_deref(),
            Some("llama.cap1.02")
        );
        assert_eq!(name("job.pickle").as_deref(), Some("job"));
        assert_eq!(name("job.lowtide").as_deref(), Some("job"));
        assert_eq!(name(".pickle"), None);
        assert_eq!(name("there/.."), None);
    }

    #[test]
    fn a_given_recording_takes_the_place_of_a_sample() {
        let definitions = Definitions::load().unwrap();
        let samples = Recording::find(&definitions, &[]).unwrap();
        let given = ["else/mnist_mlp.pickle".into(), "mine.pickle".into()];
        let found = Recording::find(&definitions, &given).unwrap();
        assert_eq!(found.len(), samples.len() + 1);
        let files: Vec<String> = found.iter().map(Recording::file_name).collect();
        assert!(files.ends_with(&["mnist_mlp.pickle".into(), "mine.pickle".into()]));
    }

    /// The other samples take seconds. `cargo bench` checks them before it times them.
    #[test]
    fn the_smallest_samples_answers_are_the_expected_ones() {
        let definitions = Definitions::load().unwrap();
        let answers = Answers::load().unwrap();
        let samples = Recording::find(&definitions, &[]).unwrap();
        let smallest = samples
            .iter()
            .find(|sample| sample.case.name == "mnist_mlp");
        let smallest = smallest.expect("the sample is in `traces/`");
        let bench = ReplayBench::read(&smallest.path).unwrap();
        for config in &definitions.strategies {
            let answer = bench.run(config).unwrap();
            check_answer(&answers.replays, &smallest.case.name, config, &answer).unwrap();
        }
    }
}
