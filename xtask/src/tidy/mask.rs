//! Rust source with everything but code blanked out.

use proc_macro2::{TokenStream, TokenTree};

/// Returns `source` with its comments and literals replaced by spaces. All other bytes and all line breaks stay in
/// place. Source that does not consist of Rust tokens is returned unchanged.
pub(super) fn mask(source: &str) -> String {
    let Ok(tokens) = source.parse::<TokenStream>() else {
        return source.into();
    };
    let blank = |byte: &u8| if *byte == b'\n' { b'\n' } else { b' ' };
    let mut masked: Vec<u8> = source.as_bytes().iter().map(blank).collect();
    copy_code(tokens, source.as_bytes(), &mut masked);
    String::from_utf8(masked).expect("characters are blanked or copied whole")
}

/// Copies all tokens except literals and doc comments. The tokens of a doc comment have the comment's span.
fn copy_code(tokens: TokenStream, source: &[u8], masked: &mut [u8]) {
    for token in tokens {
        let range = token.span().byte_range();
        let is_comment =
            source[range.clone()].starts_with(b"//") || source[range.clone()].starts_with(b"/*");
        match token {
            _ if is_comment => {}
            TokenTree::Literal(_) => {}
            TokenTree::Ident(_) | TokenTree::Punct(_) => {
                masked[range.clone()].copy_from_slice(&source[range]);
            }
            TokenTree::Group(group) => {
                for sign in [group.span_open(), group.span_close()] {
                    let sign = sign.byte_range();
                    masked[sign.clone()].copy_from_slice(&source[sign]);
                }
                copy_code(group.stream(), source, masked);
            }
        }
    }
}

/// Returns the byte offsets at which `word` occurs as a whole name.
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

/// Returns the line of a byte offset, counted from 1.
pub(super) fn line_at(text: &str, offset: usize) -> usize {
    1 + text.as_bytes()[..offset]
        .iter()
        .filter(|&&byte| byte == b'\n')
        .count()
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that exactly the words `code` of `source` are left, at their offsets.
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
        check("code / code");
        check("/** hidden */ code /*! hidden */");
    }

    #[test]
    fn literals_are_blanked() {
        check(r#"code("hidden \" hidden // hidden") code"#);
        check(r###"code(r#"hidden " hidden"#, br"hidden\", c"hidden", b"hidden") code"###);
        check(r"code('\'', '\u{1F600}', b'\\', '€', 'x') code // hidden");
        check(r#"code('"', "hidden", '/') code "é hidden" code"#);
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
