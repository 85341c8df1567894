//! The page itself: the output of `cargo xtask web` from `web`, with the data inserted.

use std::io::{self, Write};

use base64::engine::general_purpose::STANDARD;
use base64::write::EncoderWriter;
use flate2::Compression;
use flate2::write::GzEncoder;

use super::columns::Columns;

/// The page, its style and its script.
pub(super) const PAGE: &str = include_str!("page.html");

/// The summary is inserted after this, and the columns after [`COLUMNS_MARK`].
const SUMMARY_MARK: &str = "<script type=\"application/json\" id=\"lowtide-summary\">";
const COLUMNS_MARK: &str = "<script type=\"application/octet-stream\" id=\"lowtide-data\">";

/// Writes the page with its data: the summary, as JSON that is safe in a script, and the columns.
pub(super) fn write(out: &mut dyn Write, summary: &str, columns: &Columns) -> io::Result<()> {
    let (before, rest) = split_after(PAGE, SUMMARY_MARK);
    let (between, after) = split_after(rest, COLUMNS_MARK);
    out.write_all(before.as_bytes())?;
    out.write_all(summary.as_bytes())?;
    out.write_all(between.as_bytes())?;
    let base64 = EncoderWriter::new(&mut *out, &STANDARD);
    let mut gzip = GzEncoder::new(base64, Compression::default());
    columns.write(&mut gzip)?;
    gzip.finish()?.finish()?;
    out.write_all(after.as_bytes())
}

/// Returns `text` up to the end of `mark`, and the rest.
fn split_after<'t>(text: &'t str, mark: &str) -> (&'t str, &'t str) {
    let at = text.find(mark).expect("a test finds each mark in the page");
    text.split_at(at + mark.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_one_place_for_each_part_of_the_data() {
        for mark in [SUMMARY_MARK, COLUMNS_MARK] {
            assert_eq!(PAGE.matches(mark).count(), 1, "{mark}");
            let (_, rest) = split_after(PAGE, mark);
            assert!(rest.starts_with("</script>"), "{mark}");
        }
    }
}
