//! The memory of the simulated device, as given on the command line.

use std::str::FromStr;

use lowtide_core::Bytes;

/// The memory of the simulated device.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Capacity {
    /// This many bytes.
    Absolute(Bytes),
    /// This multiple of the job's peak live bytes.
    TimesPeakLive(f64),
}

impl Capacity {
    /// Returns the capacity in bytes for a job with this peak of live bytes.
    pub(crate) fn resolve(self, peak_live: Bytes) -> Bytes {
        match self {
            Capacity::Absolute(bytes) => bytes,
            Capacity::TimesPeakLive(factor) => peak_live.scale(factor),
        }
    }
}

/// Reads `13077572773`, `12GiB`, `1.5 TiB`, `80GB` or `1.02x`. `G` is `GiB`, and `GB` is 10^9 bytes, as in Unix commands.
/// The case does not matter.
impl FromStr for Capacity {
    type Err = String;

    fn from_str(text: &str) -> Result<Capacity, String> {
        let text = text.trim();
        let unit_at = text
            .find(|letter: char| letter != '.' && !letter.is_ascii_digit())
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(unit_at);
        let unit = unit.trim().to_ascii_lowercase();
        if number.is_empty() {
            return Err("expected bytes, a size such as 12GiB, or a factor such as 1.02x".into());
        }

        let capacity = match unit.as_str() {
            "" => Capacity::Absolute(Bytes(number.parse().map_err(|_| bad_number(number))?)),
            "x" => Capacity::TimesPeakLive(decimal(number)?),
            _ => Capacity::Absolute(unit_bytes(&unit)?.scale(decimal(number)?)),
        };
        match capacity {
            Capacity::Absolute(bytes) if bytes.is_zero() => Err(no_memory()),
            Capacity::Absolute(bytes) if bytes > Bytes::REQUEST_MAX => {
                Err("more than 1 EiB is no device's memory".into())
            }
            Capacity::TimesPeakLive(0.0) => Err(no_memory()),
            capacity => Ok(capacity),
        }
    }
}

fn unit_bytes(unit: &str) -> Result<Bytes, String> {
    match unit {
        "b" => Ok(Bytes(1)),
        "k" | "kib" => Ok(Bytes::kib(1)),
        "m" | "mib" => Ok(Bytes::mib(1)),
        "g" | "gib" => Ok(Bytes::gib(1)),
        "t" | "tib" => Ok(Bytes::gib(1024)),
        "kb" => Ok(Bytes(1_000)),
        "mb" => Ok(Bytes(1_000_000)),
        "gb" => Ok(Bytes(1_000_000_000)),
        "tb" => Ok(Bytes(1_000_000_000_000)),
        _ => Err(format!(
            "unknown unit '{unit}', units are KiB, MiB, GiB, TiB, KB, MB, GB, TB, and x for times the peak of live bytes"
        )),
    }
}

fn decimal(number: &str) -> Result<f64, String> {
    number.parse().map_err(|_| bad_number(number))
}

fn bad_number(number: &str) -> String {
    format!("'{number}' is not a number of bytes")
}

fn no_memory() -> String {
    "a device without memory cannot run anything".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_factors_are_read() {
        for (text, bytes) in [
            ("13077572773", Bytes(13_077_572_773)),
            ("12GiB", Bytes::gib(12)),
            ("12 gib", Bytes::gib(12)),
            ("1.5MiB", Bytes::kib(1536)),
            ("2TiB", Bytes::gib(2048)),
            ("512KiB", Bytes::kib(512)),
            ("7B", Bytes(7)),
            ("80GB", Bytes(80_000_000_000)),
            ("1.5 tb", Bytes(1_500_000_000_000)),
            ("12 G", Bytes::gib(12)),
            ("512k", Bytes::kib(512)),
        ] {
            assert_eq!(text.parse(), Ok(Capacity::Absolute(bytes)), "{text}");
        }
        assert_eq!("1.02x".parse(), Ok(Capacity::TimesPeakLive(1.02)));
        assert_eq!("2X".parse(), Ok(Capacity::TimesPeakLive(2.0)));
    }

    #[test]
    fn a_factor_is_of_the_peak() {
        let resolve = |capacity: Capacity| capacity.resolve(Bytes(1000));
        assert_eq!(resolve(Capacity::TimesPeakLive(1.5)), Bytes(1500));
        assert_eq!(resolve(Capacity::Absolute(Bytes(7))), Bytes(7));
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for (text, message) in [
            ("", "expected bytes"),
            ("GiB", "expected bytes"),
            ("-1", "expected bytes"),
            ("12GBit", "unknown unit 'gbit'"),
            ("12 Go", "unknown unit 'go'"),
            ("1.5", "'1.5' is not a number of bytes"),
            ("1.2.3GiB", "'1.2.3' is not a number of bytes"),
            ("99999999999999999999", "is not a number of bytes"),
            ("0", "without memory"),
            ("0x", "without memory"),
            ("0.0GiB", "without memory"),
            ("9999999TiB", "more than 1 EiB"),
        ] {
            let error = text.parse::<Capacity>().unwrap_err();
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}
