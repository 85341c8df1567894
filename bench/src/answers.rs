//! The expected result of each benchmark, from `answers.toml`.

use std::collections::BTreeMap;
use std::fmt::Debug;

use anyhow::{Context, Result, ensure};
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
}

/// Checks a benchmark's answer against the expected ones of its kind.
///
/// # Errors
///
/// If another answer was expected, or none is known.
pub fn check_answer<T: PartialEq + Debug>(
    answers: &BTreeMap<String, BTreeMap<String, T>>,
    case: &str,
    config: &Config,
    answer: &T,
) -> Result<()> {
    let strategy = config.to_string();
    let strategies = answers.get(case);
    let expected = strategies.and_then(|strategies| strategies.get(&strategy));
    ensure!(
        expected == Some(answer),
        "{case}, {strategy}: the answer is wrong\n  expected {}\n  found    {answer:?}\nIf the strategy was \
         changed on purpose: cargo run --release -p lowtide-bench -- answers --update",
        expected.map_or("none".to_owned(), |expected| format!("{expected:?}"))
    );
    Ok(())
}

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
        let check =
            |case: &str, address| check_answer(&answers.pairs, case, &config, &answer(&[address]));
        check("few", 512).unwrap();
        let wrong = check("few", 1024);
        let wrong = wrong.unwrap_err().to_string();
        assert!(
            wrong.starts_with("few, caching:expandable_segments:True"),
            "{wrong}"
        );
        let missing = check("many", 512);
        assert!(missing.unwrap_err().to_string().contains("expected none"));

        let text = answers.to_toml().unwrap();
        assert_eq!(toml::from_str::<Answers>(&text).unwrap(), answers);
    }
}
