//! Texts from outside, and how to print them safely.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use serde::{Serialize, Serializer};

/// A text from outside, such as one in a recording. It displays escaped, like [`OneLine`]. For the text itself, as
/// a parser or a file needs it, call [`raw`](RecordedText::raw) or serialize it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct RecordedText(Arc<str>);

impl RecordedText {
    /// Returns the text as it was recorded. It may have any characters, so do not print it.
    pub fn raw(&self) -> &str {
        &self.0
    }

    /// Returns the text, borrowed.
    fn as_recorded(&self) -> RecordedStr<'_> {
        RecordedStr(&self.0)
    }

    /// Returns whether the text is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<T: Into<Arc<str>>> From<T> for RecordedText {
    fn from(text: T) -> RecordedText {
        RecordedText(text.into())
    }
}

impl Serialize for RecordedText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.as_recorded().serialize(serializer)
    }
}

impl fmt::Display for RecordedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_recorded().fmt(f)
    }
}

/// A borrowed [`RecordedText`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct RecordedStr<'t>(&'t str);

impl<'t> RecordedStr<'t> {
    /// Returns the text as it was recorded. It may have any characters, so do not print it.
    pub fn raw(self) -> &'t str {
        self.0
    }
}

impl<'t> From<&'t str> for RecordedStr<'t> {
    fn from(text: &'t str) -> RecordedStr<'t> {
        RecordedStr(text)
    }
}

impl Serialize for RecordedStr<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0)
    }
}

impl fmt::Display for RecordedStr<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        OneLine(self.0).fmt(f)
    }
}

/// Displays a text from outside, such as a file's name or contents, on one line and in the order in which it is
/// written. Control characters, line separators, marks that change the direction of writing and invisible letters
/// are shown as escapes.
#[derive(Clone, Copy, Debug)]
pub struct OneLine<'t>(pub &'t str);

impl OneLine<'_> {
    /// Returns whether a character is shown as an escape.
    fn escapes(letter: char) -> bool {
        let is_separator = matches!(letter, '\u{2028}' | '\u{2029}');
        // Unicode's Bidi_Control.
        let turns = matches!(
            letter,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        );
        // Other format characters, and letters that are drawn as nothing.
        let is_unseen = matches!(
            letter,
            '\u{ad}'
                | '\u{115f}'..='\u{1160}'
                | '\u{17b4}'..='\u{17b5}'
                | '\u{180b}'..='\u{180f}'
                | '\u{200b}'..='\u{200d}'
                | '\u{2060}'..='\u{2065}'
                | '\u{206a}'..='\u{206f}'
                | '\u{3164}'
                | '\u{feff}'
                | '\u{ffa0}'
                | '\u{fff0}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e0fff}'
        );
        letter.is_control() || is_separator || turns || is_unseen
    }
}

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|letter| {
            if OneLine::escapes(letter) {
                write!(f, "{}", letter.escape_default())
            } else {
                f.write_char(letter)
            }
        })
    }
}

/// Returns `json` with JSON's escapes for the characters that [`OneLine`] escapes. Line feeds are kept: they stand
/// between JSON's strings and never in them. JSON and serde's output allow all other characters but controls below
/// 0x20 unescaped.
pub fn escape_in_json(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for letter in json.chars() {
        if letter != '\n' && OneLine::escapes(letter) {
            for unit in letter.encode_utf16(&mut [0; 2]) {
                let _ = write!(text, "\\u{unit:04x}");
            }
        } else {
            text.push(letter);
        }
    }
    text
}

/// Displays a text as one word of a shell. A text that has more than letters, digits and signs without a meaning to
/// shells is quoted. It stays on one line if the text is on one line.
#[derive(Clone, Copy, Debug)]
pub struct ShellWord<'t>(pub &'t str);

impl fmt::Display for ShellWord<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain =
            |letter: char| letter.is_ascii_alphanumeric() || "_-+./:,@%".contains(letter);
        if !self.0.is_empty() && self.0.chars().all(is_plain) {
            return f.write_str(self.0);
        }
        write!(f, "'{}'", self.0.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_breaks_a_line_or_its_order_is_shown() {
        let check = |text: &str, expected: &str| {
            assert_eq!(OneLine(text).to_string(), expected);
            assert_eq!(RecordedText::from(text).to_string(), expected);
            assert_eq!(RecordedStr::from(text).to_string(), expected);
            assert_eq!(RecordedText::from(text).raw(), text);
            assert_eq!(RecordedStr::from(text).raw(), text);
        };
        check("a\n\u{1b}[31mb\\ü", "a\\n\\u{1b}[31mb\\ü");
        check(
            "a\u{85}b\u{2028}c\u{2029}d",
            "a\\u{85}b\\u{2028}c\\u{2029}d",
        );
        check("a\u{202e}elkcip.exe", "a\\u{202e}elkcip.exe");
        check(
            "\u{61c}\u{200f}\u{2066}\u{2069}",
            "\\u{61c}\\u{200f}\\u{2066}\\u{2069}",
        );
        check(
            "a\u{200b}b\u{3164}c\u{e0041}d\u{ad}",
            "a\\u{200b}b\\u{3164}c\\u{e0041}d\\u{ad}",
        );
        check("שלום", "שלום");
    }

    #[test]
    fn json_has_the_same_text_and_nothing_that_a_terminal_carries_out() {
        let text = "a\n\u{1b}[31m\u{7f}\u{85}\u{9b}\u{61c}\u{2028}\u{202e}\u{2069}\u{e0041}\"\\ü";
        let json = serde_json::to_string_pretty(&[RecordedText::from(text)]).unwrap();
        let escaped = escape_in_json(&json);
        assert!(
            json.contains('\u{9b}') && !escaped.contains(|letter| letter > '\u{fc}'),
            "{escaped}"
        );
        assert!(
            !escaped.contains(|letter: char| letter != '\n' && letter.is_control()),
            "{escaped:?}"
        );
        assert_eq!(
            serde_json::from_str::<[String; 1]>(&escaped).unwrap(),
            [text]
        );
    }

    #[test]
    fn a_shell_reads_a_word_as_it_is() {
        for text in [
            "expandable_segments:True,max_split_size_mb:64",
            "roundup_power2_divisions:[256:1,>:8]",
            "",
            "$(touch ran)`x` \"a\" 'b' \\ ~ * ; & | #",
            "two\nlines\u{1b}[2K",
        ] {
            let script = format!("printf %s {}", ShellWord(text));
            let output = std::process::Command::new("sh")
                .arg("-c")
                .arg(&script)
                .output();
            let output = output.expect("there is a shell");
            assert_eq!(
                String::from_utf8(output.stdout).as_deref(),
                Ok(text),
                "{script}"
            );
        }
        assert_eq!(ShellWord("a:b,c").to_string(), "a:b,c");
    }
}
