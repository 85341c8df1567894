//! Formats figures and paths as text and for JSON.

use std::path::Path;

use lowtide_core::{Bytes, Count};
use lowtide_trace::{OneLine, RecordedStr};
use serde::Serializer;

/// The unit of one column of sizes, so that they can be compared at a glance.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SizeUnit {
    /// 2^20 bytes.
    Mib,
    /// 2^30 bytes.
    Gib,
}

impl SizeUnit {
    /// Returns the unit for a column whose largest value is `largest`: MiB below 1 GiB, else GiB.
    pub(crate) fn for_sizes_up_to(largest: Bytes) -> SizeUnit {
        if largest < Bytes::gib(1) {
            SizeUnit::Mib
        } else {
            SizeUnit::Gib
        }
    }

    /// Returns the unit's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            SizeUnit::Mib => "MiB",
            SizeUnit::Gib => "GiB",
        }
    }

    /// Returns `size` in this unit, without the unit's name.
    pub(crate) fn number(self, size: Bytes) -> String {
        match self {
            SizeUnit::Mib => format!("{:.1}", ratio(size, Bytes::mib(1))),
            SizeUnit::Gib => format!("{:.3}", ratio(size, Bytes::gib(1))),
        }
    }
}

/// Returns the name of the file at `path` for messages, on one line. `-` is standard input.
pub(crate) fn path(path: &Path) -> String {
    if path == Path::new("-") {
        "standard input".into()
    } else {
        OneLine(&path.to_string_lossy()).to_string()
    }
}

/// Returns `part / whole`.
#[expect(clippy::cast_precision_loss, reason = "shown with a few digits")]
pub(crate) fn ratio(part: Bytes, whole: Bytes) -> f64 {
    part.get() as f64 / whole.get() as f64
}

/// Returns the pairs of a recording's settings as one text, as in `PYTORCH_CUDA_ALLOC_CONF`.
pub(crate) fn list(pairs: &[RecordedStr<'_>]) -> String {
    let pairs: Vec<String> = pairs.iter().map(ToString::to_string).collect();
    pairs.join(",")
}

/// Returns `share` in percent.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Returns how far `size` is above or below `base`, in percent with a sign; empty if `base` is 0.
pub(crate) fn percent_change(size: Bytes, base: Bytes) -> String {
    if base.is_zero() {
        return String::new();
    }
    let percent = 100.0 * (ratio(size, base) - 1.0);
    match format!("{percent:+.1} %").as_str() {
        "+0.0 %" | "-0.0 %" => "0.0 %".into(),
        change => change.into(),
    }
}

/// Returns how far `size` is above or below `base`, for example `20.00 MiB less`.
pub(crate) fn difference(size: Bytes, base: Bytes) -> String {
    if size > base {
        format!("{} more", size - base)
    } else {
        format!("{} less", base - size)
    }
}

/// Returns `count` with commas between the thousands.
pub(crate) fn count(count: u64) -> String {
    Count(count).to_string()
}

/// Returns `count` and `noun`, with an s unless the count is 1.
pub(crate) fn counted(number: u64, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", count(number))
}

/// Serialises a number of bytes as a number.
pub(crate) fn bytes<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(bytes.get())
}

/// Formats a duration of `us` microseconds.
pub(crate) fn duration(us: f64) -> String {
    if us < 1e3 {
        format!("{us:.0} µs")
    } else if us < 1e6 {
        format!("{:.1} ms", us / 1e3)
    } else {
        format!("{:.2} s", us / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_a_kind_has_no_s() {
        assert_eq!(counted(1, "stream"), "1 stream");
        assert_eq!(counted(1200, "stream"), "1,200 streams");
    }

    #[test]
    fn durations_choose_their_unit() {
        assert_eq!(duration(31.4), "31 µs");
        assert_eq!(duration(7404.0), "7.4 ms");
        assert_eq!(duration(1_234_000.0), "1.23 s");
    }

    #[test]
    fn changes_have_a_sign_and_no_negative_zero() {
        assert_eq!(percent_change(Bytes(150), Bytes(100)), "+50.0 %");
        assert_eq!(percent_change(Bytes(50), Bytes(100)), "-50.0 %");
        assert_eq!(percent_change(Bytes(100_000), Bytes(100_001)), "0.0 %");
        assert_eq!(percent_change(Bytes(1), Bytes(0)), "");
        assert_eq!(difference(Bytes(150), Bytes(100)), "50 bytes more");
        assert_eq!(difference(Bytes(100), Bytes(150)), "50 bytes less");
    }

    #[test]
    fn small_jobs_are_in_mib() {
        assert_eq!(
            SizeUnit::for_sizes_up_to(Bytes::mib(1023)).number(Bytes::mib(600)),
            "600.0"
        );
        assert_eq!(
            SizeUnit::for_sizes_up_to(Bytes::gib(1)).number(Bytes::mib(512)),
            "0.500"
        );
    }
}
