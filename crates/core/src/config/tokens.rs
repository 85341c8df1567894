//! PyTorch's configuration syntax: splits a text into words and separators, and reads them in order.

use super::error::ConfigError;
use crate::units::Bytes;

/// Returns the tokens of `conf`: its words and the separators `,` `:` `[` `]`.
///
/// White space is removed, also inside words: PyTorch reads `3 0` as `30`.
pub(crate) fn split(conf: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut word = String::new();
    for character in conf.chars() {
        if matches!(character, ',' | ':' | '[' | ']') {
            if !word.is_empty() {
                tokens.push(std::mem::take(&mut word));
            }
            tokens.push(character.to_string());
        } else if !matches!(character, ' ' | '\t'..='\r') {
            word.push(character);
        }
    }
    if !word.is_empty() {
        tokens.push(word);
    }
    tokens
}

/// Reads tokens from the first to the last.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    tokens: &'a [String],
    /// The token to read next.
    next: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(tokens: &'a [String]) -> Reader<'a> {
        Reader { tokens, next: 0 }
    }

    /// Calls `set` with every key. `set` reads the value and returns whether it knows the key.
    ///
    /// A comma may follow the last pair, as PyTorch allows. The error about an unknown key names `owner`, and that of `keys`
    /// which is most like it.
    pub(crate) fn pairs(
        &mut self,
        owner: &str,
        keys: &[&str],
        mut set: impl FnMut(&str, &mut Reader<'a>) -> Result<bool, ConfigError>,
    ) -> Result<(), ConfigError> {
        while let Some(key) = self.word() {
            if !set(key, self)? {
                return Err(ConfigError::new(format!(
                    "Unrecognized key '{key}' in {owner} allocator config.{}",
                    suggestion(key, keys)
                )));
            }
            if self.peek().is_some() {
                self.separator(",")?;
            }
        }
        Ok(())
    }

    /// Returns the next token and moves past it; `None` at the end.
    pub(crate) fn word(&mut self) -> Option<&'a str> {
        let token = self.peek()?;
        self.next += 1;
        Some(token)
    }

    /// Returns the next token and stays before it; `None` at the end.
    pub(crate) fn peek(&self) -> Option<&'a str> {
        self.tokens.get(self.next).map(String::as_str)
    }

    /// Moves past `separator`.
    ///
    /// Any other token is an error, as in PyTorch up to 2.8. Later releases accept any token in a separator's
    /// place, which only hides typing errors.
    pub(crate) fn separator(&mut self, separator: &str) -> Result<(), ConfigError> {
        if self.required()? == separator {
            Ok(())
        } else {
            Err(ConfigError::new(format!(
                "Error parsing CachingAllocator settings, expected {separator}"
            )))
        }
    }

    /// Returns the next token, or an error at the end.
    pub(crate) fn required(&mut self) -> Result<&'a str, ConfigError> {
        self.word().ok_or_else(|| {
            let last = self.tokens.last().map_or("", String::as_str);
            ConfigError::new(format!(
                "Index out of bounds in ConfigTokenizer: nothing follows '{last}'"
            ))
        })
    }

    /// Returns the value after a key's colon.
    pub(crate) fn value(&mut self) -> Result<&'a str, ConfigError> {
        self.separator(":")?;
        self.required()
    }

    /// Returns the whole number after a key's colon.
    pub(crate) fn number(&mut self) -> Result<u64, ConfigError> {
        whole_number(self.value()?)
    }

    /// Returns the number of MiB after a key's colon.
    pub(crate) fn mib(&mut self) -> Result<u64, ConfigError> {
        Ok(self.number()?.min(MIB_MAX))
    }

    /// Returns the number after a key's colon.
    pub(crate) fn decimal(&mut self) -> Result<f64, ConfigError> {
        decimal(self.value()?)
    }

    /// Returns the boolean after a key's colon.
    pub(crate) fn boolean(&mut self) -> Result<bool, ConfigError> {
        match self.value()? {
            "True" => Ok(true),
            "False" => Ok(false),
            other => Err(ConfigError::new(format!(
                "Expected 'True' or 'False' at index {} in ConfigTokenizer but got '{other}'",
                self.next - 1
            ))),
        }
    }
}

/// The likeness of two keys, from 0 to 1, from which one is taken for the other mistyped.
const ALIKE: f64 = 0.8;

/// Returns a question about the key that was probably meant; empty if none is like it.
fn suggestion(key: &str, keys: &[&str]) -> String {
    let likeness = |known: &&str| strsim::normalized_damerau_levenshtein(key, known);
    let meant = keys
        .iter()
        .max_by(|left, right| likeness(left).total_cmp(&likeness(right)));
    let meant = meant.filter(|known| likeness(known) >= ALIKE);
    meant.map_or(String::new(), |known| format!(" Did you mean '{known}'?"))
}

/// The largest size of an option, in MiB; larger values are reduced to it. PyTorch's limit is 16 EiB. No request
/// exceeds [`Bytes::REQUEST_MAX`], so both limits behave alike, and sums of sizes stay in range.
const MIB_MAX: u64 = Bytes::REQUEST_MAX.get() >> 20;

/// Returns the number at the start of `token`, as C's `strtoull` reads it. Characters after the digits are
/// ignored, and a minus sign wraps around.
pub(crate) fn whole_number(token: &str) -> Result<u64, ConfigError> {
    let digits = token.strip_prefix(['+', '-']).unwrap_or(token);
    let end = digits
        .find(|character: char| !character.is_ascii_digit())
        .unwrap_or(digits.len());
    let value: u64 = digits[..end].parse().map_err(|_| {
        ConfigError::new(format!("stoull: '{token}' is not a whole number in range"))
    })?;
    Ok(if token.starts_with('-') {
        value.wrapping_neg()
    } else {
        value
    })
}

/// Returns the number at the start of `token`, as C's `strtod` reads it, but without the hexadecimal form.
/// Characters after the number are ignored.
fn decimal(token: &str) -> Result<f64, ConfigError> {
    token[..decimal_length(token.as_bytes())]
        .parse()
        .map_err(|_| ConfigError::new(format!("stod: '{token}' is not a number")))
}

/// Returns how many bytes at the start of `token` are a number: sign, digits, point and exponent, or `inf` or
/// `nan`.
fn decimal_length(token: &[u8]) -> usize {
    let digits = |from: usize| {
        let rest = token.get(from..).unwrap_or_default();
        rest.iter().take_while(|byte| byte.is_ascii_digit()).count()
    };
    let sign = |at: usize| usize::from(matches!(token.get(at), Some(b'+' | b'-')));

    let start = sign(0);
    let name = token.get(start..start + 3).unwrap_or_default();
    if name.eq_ignore_ascii_case(b"inf") || name.eq_ignore_ascii_case(b"nan") {
        return start + 3;
    }
    let mut length = start + digits(start);
    if token.get(length) == Some(&b'.') {
        length += 1 + digits(length + 1);
    }
    if matches!(token.get(length), Some(b'e' | b'E')) {
        let exponent = length + 1 + sign(length + 1);
        // An `e` without digits is not part of the number.
        if digits(exponent) > 0 {
            length = exponent + digits(exponent);
        }
    }
    length
}

/// Reads a size of one or more MiB: the value of option `key` of strategy `owner`.
pub(crate) fn positive_size(
    owner: &str,
    key: &str,
    reader: &mut Reader<'_>,
) -> Result<Bytes, ConfigError> {
    match reader.mib()? {
        0 => Err(ConfigError::new(format!(
            "{owner} option {key} too small, must be >= 1"
        ))),
        mib => Ok(Bytes::mib(mib)),
    }
}

/// Returns the `key:value` pair of a size in MiB; none if the size is the default.
pub(crate) fn size_pair(key: &str, size: Bytes, default: Bytes) -> Vec<String> {
    if size == default {
        Vec::new()
    } else {
        vec![format!("{key}:{}", size.get() >> 20)]
    }
}
