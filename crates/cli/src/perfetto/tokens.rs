//! Splits JSON into tokens, without a tree.
//!
//! Only strings and brackets are understood. So a profile is read that is not quite JSON: PyTorch writes names as they
//! are.

use std::io::{self, BufRead};

/// The bytes of a word that are kept: enough for a key that is looked for, and for a number.
const KEPT_MAX: usize = 32;

/// A string without its quotes, a number, or a name. Only the first bytes of a longer one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Word {
    kept: [u8; KEPT_MAX],
    length: usize,
}

/// A token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Token {
    /// `{`.
    OpenObject,
    /// `[`.
    OpenArray,
    /// `}` or `]`.
    Close,
    /// `:`, after a key.
    Colon,
    /// `,`.
    Comma,
    /// Anything else.
    Word(Word),
}

/// The tokens of a file.
pub(super) struct Tokens<R> {
    reader: R,
    /// The number of bytes that were read.
    position: u64,
}

impl Word {
    const EMPTY: Word = Word {
        kept: [0; KEPT_MAX],
        length: 0,
    };

    fn push(&mut self, byte: u8) {
        if let Some(place) = self.kept.get_mut(self.length) {
            *place = byte;
            self.length += 1;
        }
    }

    /// Returns the text; empty if it is not UTF-8.
    pub(super) fn text(&self) -> &str {
        str::from_utf8(&self.kept[..self.length]).unwrap_or("")
    }
}

impl<R: BufRead> Tokens<R> {
    pub(super) fn new(reader: R) -> Tokens<R> {
        Tokens {
            reader,
            position: 0,
        }
    }

    /// Returns the number of bytes up to the end of the last token.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Returns the next token; `None` at the end of the file.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or ends within a string.
    pub(super) fn next(&mut self) -> io::Result<Option<Token>> {
        while let Some(byte) = self.peek()? {
            match byte {
                b'"' => return self.string().map(|word| Some(Token::Word(word))),
                b'{' => return self.one(Token::OpenObject),
                b'[' => return self.one(Token::OpenArray),
                b'}' | b']' => return self.one(Token::Close),
                b':' => return self.one(Token::Colon),
                b',' => return self.one(Token::Comma),
                _ if byte.is_ascii_whitespace() => self.skip(1),
                _ => return self.bare().map(|word| Some(Token::Word(word))),
            }
        }
        Ok(None)
    }

    fn one(&mut self, token: Token) -> io::Result<Option<Token>> {
        self.skip(1);
        Ok(Some(token))
    }

    /// Reads a string.
    fn string(&mut self) -> io::Result<Word> {
        self.skip(1);
        let mut word = Word::EMPTY;
        let mut is_escaped = false;
        while let Some(byte) = self.peek()? {
            self.skip(1);
            match byte {
                b'"' if !is_escaped => return Ok(word),
                _ => word.push(byte),
            }
            is_escaped = byte == b'\\' && !is_escaped;
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }

    /// Reads a number or a name.
    fn bare(&mut self) -> io::Result<Word> {
        let mut word = Word::EMPTY;
        while let Some(byte) = self.peek()? {
            if byte.is_ascii_whitespace() || b"\"{}[]:,".contains(&byte) {
                break;
            }
            self.skip(1);
            word.push(byte);
        }
        Ok(word)
    }

    #[inline]
    fn peek(&mut self) -> io::Result<Option<u8>> {
        Ok(self.reader.fill_buf()?.first().copied())
    }

    #[inline]
    fn skip(&mut self, bytes: usize) {
        self.reader.consume(bytes);
        self.position += bytes as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str, expected: &str) {
        let mut tokens = Tokens::new(json.as_bytes());
        let mut text = Vec::new();
        while let Some(token) = tokens.next().unwrap() {
            text.push(match token {
                Token::OpenObject => "{".to_owned(),
                Token::OpenArray => "[".to_owned(),
                Token::Close => ")".to_owned(),
                Token::Colon => ":".to_owned(),
                Token::Comma => ",".to_owned(),
                Token::Word(word) => word.text().to_owned(),
            });
        }
        assert_eq!(text.join(" "), expected);
        assert_eq!(tokens.position(), json.len() as u64);
    }

    #[test]
    fn strings_hide_brackets_and_quotes() {
        check(
            r#"{"a": [1, -2.5e3, null]}"#,
            "{ a : [ 1 , -2.5e3 , null ) )",
        );
        check(
            r#"["]", "\"]", "\\", "\\\"["]"#,
            r#"[ ] , \"] , \\ , \\\"[ )"#,
        );
        check(" \n ", "");
        check(r#"{"a":NaN}"#, "{ a : NaN )");
    }

    #[test]
    fn long_words_are_cut() {
        let long = "x".repeat(1000);
        check(&format!("[\"{long}\"]"), &format!("[ {} )", &long[..32]));
        check(&format!("[{long}]"), &format!("[ {} )", &long[..32]));
    }

    #[test]
    fn a_string_that_does_not_end_is_an_error() {
        let mut tokens = Tokens::new(&b"[\"a\\\""[..]);
        assert_eq!(tokens.next().unwrap(), Some(Token::OpenArray));
        assert_eq!(
            tokens.next().unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }
}
