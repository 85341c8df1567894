//! The benchmarks, from `definitions.toml`.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use lowtide_core::Config;
use serde::{Deserialize, Deserializer, de};

/// All benchmarks.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Definitions {
    /// The strategies that each benchmark is run with.
    #[serde(deserialize_with = "configs")]
    pub strategies: Vec<Config>,
    /// Pair benchmarks: a free and an allocation with many live blocks.
    pub pairs: Vec<PairCase>,
    /// Replays of recorded jobs.
    pub replays: Vec<ReplayCase>,
}

/// A free and an allocation, with `live` blocks allocated between two pairs.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairCase {
    /// The name in records and answers.
    pub name: String,
    /// The number of allocated blocks between two pairs.
    pub live: u32,
    /// The smallest request, in bytes.
    pub size_min_bytes: u32,
    /// The largest request, in bytes.
    pub size_max_bytes: u32,
    /// The number of different request sizes.
    pub kinds: u32,
    /// The strategies that are left out.
    #[serde(default)]
    pub leave_out: Vec<String>,
    /// The time limit of a pair on the machine of a record, in nanoseconds, by strategy.
    #[serde(default)]
    pub limit_ns: BTreeMap<String, f64>,
}

/// A recorded job.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplayCase {
    /// The recording's file name up to `.pickle`.
    pub name: String,
    /// The limits on its time and memory.
    pub limit: Option<ReplayLimit>,
}

/// The limits of a replay on the machine of a record.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplayLimit {
    /// The strategy that the limit is for.
    pub strategy: String,
    /// The limit of the replay alone, in seconds.
    pub replay_s: f64,
    /// The limit of reading and replaying the recording, in seconds.
    pub read_and_replay_s: f64,
    /// The limit of the process's peak memory, in bytes per byte of the plain pickle.
    pub memory_per_pickle_byte: f64,
}

impl Definitions {
    /// Returns the project's definitions.
    ///
    /// # Errors
    ///
    /// The error in `definitions.toml`.
    pub fn load() -> Result<Definitions> {
        Definitions::parse(include_str!("../definitions.toml")).context("definitions.toml")
    }

    /// Returns the pair benchmark with this name.
    ///
    /// # Errors
    ///
    /// If there is no such benchmark.
    pub fn pair(&self, name: &str) -> Result<&PairCase> {
        let mut pairs = self.pairs.iter();
        let found = pairs.find(|case| case.name == name);
        found.with_context(|| format!("no pair benchmark is called `{name}`"))
    }

    /// Returns the strategies of a pair benchmark.
    pub fn strategies_of(&self, case: &PairCase) -> impl Iterator<Item = &Config> {
        let is_left_out = |config: &Config| case.leave_out.contains(&config.to_string());
        self.strategies
            .iter()
            .filter(move |config| !is_left_out(config))
    }

    fn parse(text: &str) -> Result<Definitions> {
        let definitions: Definitions = toml::from_str(text)?;
        for case in &definitions.pairs {
            definitions.check(case).context(case.name.clone())?;
        }
        for case in &definitions.replays {
            let limited = case.limit.iter().map(|limit| limit.strategy.as_str());
            definitions
                .check_strategies(limited)
                .context(case.name.clone())?;
        }
        Ok(definitions)
    }

    fn check(&self, case: &PairCase) -> Result<()> {
        ensure!(case.live > 0, "`live` must be above 0");
        ensure!(case.kinds > 0, "`kinds` must be above 0");
        ensure!(
            0 < case.size_min_bytes && case.size_min_bytes <= case.size_max_bytes,
            "`size_min_bytes` must be above 0 and at most `size_max_bytes`"
        );
        self.check_strategies(case.leave_out.iter().map(String::as_str))?;
        self.check_strategies(case.limit_ns.keys().map(String::as_str))
    }

    /// Checks that names are in the list of strategies. An unknown name, perhaps misspelt, would be ignored
    /// otherwise.
    fn check_strategies<'a>(&self, names: impl Iterator<Item = &'a str>) -> Result<()> {
        for name in names {
            let is_measured = self
                .strategies
                .iter()
                .any(|config| config.to_string() == name);
            ensure!(is_measured, "`{name}` is not in `strategies`");
        }
        Ok(())
    }
}

fn configs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Config>, D::Error> {
    let names = Vec::<String>::deserialize(deserializer)?;
    let parse = |name: &String| name.parse().map_err(de::Error::custom);
    names.iter().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        strategies = ["caching", "bfc"]
        [[pairs]]
        name = "few"
        live = 3
        size_min_bytes = 512
        size_max_bytes = 1024
        kinds = 2
        limit_ns = { bfc = 100 }
        [[replays]]
        name = "job"
        limit = { strategy = "caching", replay_s = 1, read_and_replay_s = 2, memory_per_pickle_byte = 4 }
    "#;

    #[test]
    fn a_definition_is_read() {
        let definitions = Definitions::parse(GOOD).unwrap();
        assert_eq!(
            definitions.strategies,
            ["caching", "bfc"].map(|name| name.parse().unwrap())
        );
        let case = definitions.pair("few").unwrap();
        assert_eq!((case.live, case.size_max_bytes), (3, 1024));
        assert_eq!(case.limit_ns, BTreeMap::from([("bfc".to_owned(), 100.0)]));
        assert!(definitions.pair("many").is_err());
        let limit = definitions.replays[0].limit.as_ref().unwrap();
        assert_eq!(limit.read_and_replay_s, 2.0);
    }

    #[test]
    fn a_strategy_may_be_left_out() {
        let text = GOOD.replace("kinds", "leave_out = [\"bfc\"]\nkinds");
        let definitions = Definitions::parse(&text).unwrap();
        let strategies = definitions.strategies_of(&definitions.pairs[0]);
        let names: Vec<String> = strategies.map(Config::to_string).collect();
        assert_eq!(names, ["caching"]);
    }

    #[test]
    fn a_wrong_definition_is_refused() {
        let wrong = |from: &str, to: &str, named: &str| {
            let message = format!(
                "{:#}",
                Definitions::parse(&GOOD.replace(from, to)).unwrap_err()
            );
            assert!(message.contains(named), "{message}");
        };
        wrong("live = 3", "live = 0", "`live`");
        wrong("kinds = 2", "kinds = 0", "`kinds`");
        wrong("= 512", "= 2048", "`size_min_bytes`");
        wrong("bfc = 100", "slab = 100", "few: `slab` is not");
        wrong(
            r#"strategy = "caching""#,
            r#"strategy = "pool""#,
            "job: `pool` is not",
        );
        wrong(r#""bfc""#, r#""bcf""#, "bcf");
        wrong("kinds", "sorts", "sorts");
        wrong(
            "kinds",
            "leave_out = [\"slap\"]\nkinds",
            "few: `slap` is not",
        );
    }

    #[test]
    fn the_projects_definitions_are_right() {
        let definitions = Definitions::load().unwrap();
        assert!(!definitions.pairs.is_empty() && !definitions.replays.is_empty());
    }
}
