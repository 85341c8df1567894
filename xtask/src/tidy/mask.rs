//! Rust source with all that is not code blanked out.

/// Returns `source` with its comments and the insides of its string and character literals
/// replaced by spaces. Every other byte, and every line break, stays where it was.
///
/// One pass, in time linear in the source. It reads no macro and no attribute, so a documentation
/// comment is a comment.
pub(super) fn mask(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut masked = Vec::with_capacity(bytes.len());
    while masked.len() < bytes.len() {
        let start = masked.len();
        let follows_name = start > 0 && is_name_byte(bytes[start - 1]);
        match opaque_length(&bytes[start..], follows_name) {
            None => masked.push(bytes[start]),
            Some(length) => {
                let end = bytes.len().min(start + length);
                let blank = |&byte: &u8| if byte == b'\n' { b'\n' } else { b' ' };
                masked.extend(bytes[start..end].iter().map(blank));
            }
        }
    }
    String::from_utf8(masked).expect("characters are blanked whole")
}

/// Returns the byte offset at which each occurrence of `word` as a whole name starts.
pub(super) fn find_word(text: &str, word: &str) -> Vec<usize> {
    let bytes = text.as_bytes();
    let is_whole = |start: usize| {
        let before = start.checked_sub(1).map(|index| bytes[index]);
        let after = bytes.get(start + word.len()).copied();
        ![before, after].into_iter().flatten().any(is_name_byte)
    };
    text.match_indices(word)
        .map(|(start, _)| start)
        .filter(|&start| is_whole(start))
        .collect()
}

/// Returns the line, from 1, in which a byte offset lies.
pub(super) fn line_at(text: &str, offset: usize) -> usize {
    1 + text.as_bytes()[..offset]
        .iter()
        .filter(|&&byte| byte == b'\n')
        .count()
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

/// Returns the length of the comment or literal that `rest` starts with, if it does. A literal
/// that is not closed reaches past the end.
fn opaque_length(rest: &[u8], follows_name: bool) -> Option<usize> {
    match rest {
        [b'/', b'/', ..] => rest
            .iter()
            .position(|&byte| byte == b'\n')
            .or(Some(rest.len())),
        [b'/', b'*', ..] => Some(block_comment_length(rest)),
        [b'"', ..] => Some(quoted_length(rest, b'"')),
        [b'\'', b'\\', ..] => Some(quoted_length(rest, b'\'')),
        [b'\'', ..] => character_length(rest),
        [b'r', ..] if !follows_name => raw_string_length(rest, 1),
        [b'b' | b'c', b'r', ..] if !follows_name => raw_string_length(rest, 2),
        _ => None,
    }
}

/// Block comments nest.
fn block_comment_length(rest: &[u8]) -> usize {
    let mut depth = 0_usize;
    let mut index = 0;
    while index < rest.len() {
        let (change, width) = match &rest[index..] {
            [b'/', b'*', ..] => (1, 2),
            [b'*', b'/', ..] => (-1, 2),
            _ => (0, 1),
        };
        depth = depth.saturating_add_signed(change);
        index += width;
        if depth == 0 {
            break;
        }
    }
    index
}

fn quoted_length(rest: &[u8], quote: u8) -> usize {
    let mut index = 1;
    while index < rest.len() && rest[index] != quote {
        index += if rest[index] == b'\\' { 2 } else { 1 };
    }
    index + 1
}

/// A quote that is not closed right after one character starts a lifetime.
fn character_length(rest: &[u8]) -> Option<usize> {
    let is_continuation = |byte: &u8| byte & 0b1100_0000 == 0b1000_0000;
    let width = 1 + rest
        .iter()
        .skip(2)
        .take_while(|byte| is_continuation(byte))
        .count();
    (rest.get(1 + width) == Some(&b'\'')).then_some(width + 2)
}

/// A raw name such as `r#type` is not a string.
fn raw_string_length(rest: &[u8], prefix: usize) -> Option<usize> {
    let hashes = rest[prefix..]
        .iter()
        .take_while(|&&byte| byte == b'#')
        .count();
    let open = prefix + hashes;
    if rest.get(open) != Some(&b'"') {
        return None;
    }
    let is_close = |tail: &[u8]| tail[0] == b'"' && tail[1..].iter().all(|&byte| byte == b'#');
    let close = rest[open + 1..].windows(hashes + 1).position(is_close);
    Some(close.map_or(rest.len(), |index| open + 1 + index + hashes + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts that exactly the word `code` of `source` is left, and nothing has moved.
    #[track_caller]
    fn check(source: &str) {
        let masked = mask(source);
        assert_eq!(masked.len(), source.len());
        assert_eq!(
            find_word(&masked, "code"),
            find_word(source, "code"),
            "{masked}"
        );
        assert_eq!(find_word(&masked, "hidden"), [0; 0], "{masked}");
    }

    #[test]
    fn comments_are_blanked() {
        check("code // hidden \" hidden\ncode /* hidden /* hidden */ hidden */ code");
        check("/// hidden's\ncode\n//! hidden");
        check("code / code /* hidden");
    }

    #[test]
    fn literals_are_blanked() {
        check(r#"code("hidden \" hidden // hidden") code"#);
        check(r###"code(r#"hidden " hidden"#, br"hidden\", c"hidden", b"hidden") code"###);
        check(r"code('\'', '\u{1F600}', b'\\', '€', 'x') code // hidden");
        check(r#"code('"', "hidden", '/') code "é hidden" code"#);
        check("code \"hidden");
    }

    #[test]
    fn lifetimes_and_raw_names_are_code() {
        check("fn code<'code>(r#code: &'code str, other: &'static str) -> &'code str");
        check(r#"for code in r#code { "hidden" }"#);
        check(r#"matches!(code, 'a' | 'b') code"#);
    }

    #[test]
    fn lines_stay_where_they_were() {
        let source = "one /* two\nthree */ four \"five\nsix\" // seven\neight";
        assert_eq!(mask(source).lines().count(), 4);
        assert_eq!(line_at(source, source.find("eight").expect("there")), 4);
        assert_eq!(line_at(source, 0), 1);
    }

    #[test]
    fn only_whole_words_are_found() {
        assert_eq!(
            find_word("unsafe_code unsafe (unsafe) an_unsafe", "unsafe"),
            [12, 20]
        );
    }
}
