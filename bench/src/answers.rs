//! The expected result of each benchmark, from `answers.toml`.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};

use anyhow::{Context, Result};
use lowtide_core::{Bytes, Config, DeviceAddress};
use serde::{Deserialize, Serialize};

const HEADER: &str = "\
# The answers that benchmarks must give before they are timed, by benchmark and strategy. Written by
#     cargo run --release -p lowtide-bench -- answers --update
# A change here says that a strategy places blocks differently: the commit says why.

";

/// The expected answers, by benchmark and strategy.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answers {
    /// The answers of pair benchmarks.
    pub pairs: BTreeMap<String, BTreeMap<String, PairAnswer>>,
    /// The answers of replays.
    pub replays: BTreeMap<String, BTreeMap<String, ReplayAnswer>>,
}

/// The result of a pair benchmark after one round.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairAnswer {
    /// Reserved bytes.
    reserved_bytes: u64,
    /// A checksum of the live blocks' addresses, in the order of the blocks.
    addresses: String,
}

/// The result of a replay.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplayAnswer {
    /// Whether every request succeeded.
    pub completed: bool,
    /// The number of requests in the recording.
    pub allocations: u64,
    /// Peak reserved bytes.
    pub peak_reserved_bytes: u64,
    /// The number of segments that the driver allocated.
    pub device_allocs: u64,
    /// How often memory was mapped into expandable segments.
    pub maps: u64,
}

impl PairAnswer {
    /// Returns the answer of an allocator with `reserved` bytes and live blocks at the addresses `live`.
    pub(crate) fn new(reserved: Bytes, live: &[DeviceAddress]) -> PairAnswer {
        // FNV-1a over whole addresses.
        let sum = live.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, address| {
            (sum ^ address.get()).wrapping_mul(0x0000_0100_0000_01b3)
        });
        PairAnswer {
            reserved_bytes: reserved.get(),
            addresses: format!("{sum:016x}"),
        }
    }
}

impl Answers {
    /// Returns the project's answers.
    ///
    /// # Errors
    ///
    /// The error in `answers.toml`.
    pub fn load() -> Result<Answers> {
        toml::from_str(include_str!("../answers.toml")).context("answers.toml")
    }

    /// Returns the text of `answers.toml`.
    ///
    /// # Errors
    ///
    /// If a number is out of TOML's range.
    pub fn to_toml(&self) -> Result<String> {
        Ok(format!("{HEADER}{}", toml::to_string(self)?))
    }

    /// Checks the answer of a pair benchmark.
    ///
    /// # Errors
    ///
    /// If another answer was expected, or none is known.
    pub fn check_pair(
        &self,
        case: &str,
        config: &Config,
        answer: &PairAnswer,
    ) -> Result<(), WrongAnswer> {
        check(&self.pairs, case, config, answer)
    }

    /// Checks the answer of a replay.
    ///
    /// # Errors
    ///
    /// If another answer was expected, or none is known.
    pub fn check_replay(
        &self,
        case: &str,
        config: &Config,
        answer: &ReplayAnswer,
    ) -> Result<(), WrongAnswer> {
        check(&self.replays, case, config, answer)
    }
}

fn check<T: PartialEq + Debug>(
    answers: &BTreeMap<String, BTreeMap<String, T>>,
    case: &str,
    config: &Config,
    answer: &T,
) -> Result<(), WrongAnswer> {
    let strategy = config.to_string();
    let expected = answers
        .get(case)
        .and_then(|strategies| strategies.get(&strategy));
    if expected == Some(answer) {
        return Ok(());
    }
    Err(WrongAnswer {
        benchmark: format!("{case}, {strategy}"),
        expected: expected.map_or("none".to_owned(), |expected| format!("{expected:?}")),
        found: format!("{answer:?}"),
    })
}

/// A benchmark whose result is not the expected one, so that timing it is pointless.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WrongAnswer {
    benchmark: String,
    expected: String,
    found: String,
}

impl fmt::Display for WrongAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: the answer is wrong\n  expected {}\n  found    {}\nIf the strategy was changed on \
             purpose: cargo run --release -p lowtide-bench -- answers --update",
            self.benchmark, self.expected, self.found
        )
    }
}

impl std::error::Error for WrongAnswer {}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(addresses: &[u64]) -> PairAnswer {
        let live: Vec<_> = addresses
            .iter()
            .map(|&address| DeviceAddress(address))
            .collect();
        PairAnswer::new(Bytes::mib(2), &live)
    }

    #[test]
    fn a_checksum_tells_addresses_and_their_order_apart() {
        assert_eq!(answer(&[512, 1024]), answer(&[512, 1024]));
        assert_ne!(answer(&[512, 1024]), answer(&[1024, 512]));
        assert_ne!(answer(&[512, 1024]), answer(&[512, 1536]));
        assert_ne!(answer(&[512]), answer(&[512, 0]));
    }

    #[test]
    fn a_wrong_answer_and_a_missing_one_are_named() {
        let config: Config = "caching:expandable_segments:True".parse().unwrap();
        let known = BTreeMap::from([(config.to_string(), answer(&[512]))]);
        let answers = Answers {
            pairs: BTreeMap::from([("few".to_owned(), known)]),
            ..Answers::default()
        };
        assert_eq!(answers.check_pair("few", &config, &answer(&[512])), Ok(()));
        let wrong = answers.check_pair("few", &config, &answer(&[1024]));
        let wrong = wrong.unwrap_err().to_string();
        assert!(
            wrong.starts_with("few, caching:expandable_segments:True"),
            "{wrong}"
        );
        let missing = answers.check_pair("many", &config, &answer(&[512]));
        assert!(missing.unwrap_err().to_string().contains("expected none"));

        let text = answers.to_toml().unwrap();
        assert_eq!(toml::from_str::<Answers>(&text).unwrap(), answers);
    }
}
