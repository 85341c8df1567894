//! Bytes as text that a page can hold.

use std::io::{self, Write};

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Writes base64 (RFC 4648, with padding) of what is written to it.
pub(crate) struct Base64Writer<W> {
    out: W,
    /// Bytes that do not make three yet.
    rest: Vec<u8>,
}

impl<W: Write> Base64Writer<W> {
    pub(crate) fn new(out: W) -> Base64Writer<W> {
        Base64Writer {
            out,
            rest: Vec::new(),
        }
    }

    /// Writes the last bytes.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        let mut last = encode(&self.rest);
        last.resize(last.len().next_multiple_of(4), b'=');
        self.out.write_all(&last)
    }
}

impl<W: Write> Write for Base64Writer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.rest.extend_from_slice(bytes);
        let whole = self.rest.len() / 3 * 3;
        self.out.write_all(&encode(&self.rest[..whole]))?;
        self.rest.drain(..whole);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Returns base64 without padding.
fn encode(bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |index: usize| u32::from(three.get(index).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        let digits = [bits >> 18, bits >> 12, bits >> 6, bits];
        let used = &digits[..=three.len()];
        text.extend(used.iter().map(|digit| ALPHABET[(digit & 63) as usize]));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the base64 of `parts`, written one by one.
    fn check(parts: &[&str], expected: &str) {
        let mut text = Vec::new();
        let mut writer = Base64Writer::new(&mut text);
        for part in parts {
            writer.write_all(part.as_bytes()).unwrap();
        }
        writer.finish().unwrap();
        assert_eq!(std::str::from_utf8(&text), Ok(expected), "{parts:?}");
    }

    #[test]
    fn the_standards_own_examples() {
        for (text, expected) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            check(&[text], expected);
        }
    }

    #[test]
    fn it_does_not_matter_how_the_bytes_come() {
        check(&["f", "", "oo", "b", "ar"], "Zm9vYmFy");
        check(&["fooba", "r"], "Zm9vYmFy");
        check(&["~\u{7f}?>"], "fn8/Pg==");
    }
}
