//! Columns of numbers, stored such that gzip compresses them well.

use std::io::{self, Write};
use std::mem;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;

/// Columns of numbers by name. Each number is stored as its difference to the number before. The lowest bytes of
/// all differences come first, then the next bytes, and so on, because most of those are zero.
#[derive(PartialEq, Eq, Debug, Default)]
pub(super) struct Columns {
    /// Begins the name of each column that is added.
    prefix: String,
    directory: Vec<Entry>,
    bytes: Vec<u8>,
}

#[derive(PartialEq, Eq, Debug, Serialize)]
struct Entry {
    name: String,
    kind: &'static str,
    count: usize,
    offset: usize,
    length: usize,
}

#[derive(Serialize)]
struct Directory<'a> {
    columns: &'a [Entry],
}

impl Columns {
    /// Returns no columns, for those of the trace with this number.
    pub(super) fn of_trace(number: usize) -> Columns {
        Columns {
            prefix: format!("{number}/"),
            ..Columns::default()
        }
    }

    /// Adds a column of numbers of 32 bits.
    pub(super) fn add_u32(&mut self, name: &str, numbers: impl Iterator<Item = u32>) {
        let mut last = 0;
        let differences =
            numbers.map(|number| number.wrapping_sub(mem::replace(&mut last, number)));
        self.add(name, "u32", differences.map(u32::to_le_bytes).collect());
    }

    /// Adds a column of numbers of 64 bits, each below 2^53.
    pub(super) fn add_u64(&mut self, name: &str, numbers: impl Iterator<Item = u64>) {
        let mut last = 0;
        let differences =
            numbers.map(|number| number.wrapping_sub(mem::replace(&mut last, number)));
        self.add(name, "u64", differences.map(u64::to_le_bytes).collect());
    }

    fn add<const WIDTH: usize>(
        &mut self,
        name: &str,
        kind: &'static str,
        differences: Vec<[u8; WIDTH]>,
    ) {
        self.directory.push(Entry {
            name: format!("{}{name}", self.prefix),
            kind,
            count: differences.len(),
            offset: self.bytes.len(),
            length: WIDTH * differences.len(),
        });
        for plane in 0..WIDTH {
            let bytes = differences.iter().map(|difference| difference[plane]);
            self.bytes.extend(bytes);
        }
    }

    /// Adds the columns of `other` behind these.
    pub(super) fn append(&mut self, mut other: Columns) {
        for entry in &mut other.directory {
            entry.offset += self.bytes.len();
        }
        self.directory.append(&mut other.directory);
        self.bytes.append(&mut other.bytes);
    }

    /// Returns how many bytes of a page the columns take, compressed and in base64. Compresses them to find out.
    pub(super) fn page_bytes(&self) -> usize {
        let mut gzip = GzEncoder::new(Count(0), Compression::default());
        let packed = gzip.write_all(&self.bytes).and_then(|()| gzip.finish());
        packed.expect("counting does not fail").0.div_ceil(3) * 4
    }

    /// Writes the length of the directory in four bytes, the directory as JSON, and the columns. Offsets count from
    /// the end of the directory.
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let directory = Directory {
            columns: &self.directory,
        };
        let directory = serde_json::to_vec(&directory)?;
        let length = u32::try_from(directory.len()).map_err(io::Error::other)?;
        out.write_all(&length.to_le_bytes())?;
        out.write_all(&directory)?;
        out.write_all(&self.bytes)
    }
}

/// A writer that only counts bytes.
struct Count(usize);

impl Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appended_columns_are_as_if_added_one_by_one() {
        let [mut one, mut first, mut second] = [(); 3].map(|()| Columns::default());
        for columns in [&mut one, &mut first] {
            columns.add_u32("a", [1, 7, 3].into_iter());
        }
        for columns in [&mut one, &mut second] {
            columns.add_u64("b", [9, 1 << 40].into_iter());
        }
        first.append(second);
        let written = |columns: &Columns| {
            let mut written = Vec::new();
            columns.write(&mut written).unwrap();
            written
        };
        assert_eq!(written(&first), written(&one));
    }

    #[test]
    fn the_container_is_what_the_page_reads() {
        let mut columns = Columns::default();
        columns.add_u32("a", [1, 0x0102, 0x0101].into_iter());
        columns.add_u64("b", [1 << 40].into_iter());
        let mut written = Vec::new();
        columns.write(&mut written).unwrap();
        let (length, rest) = written.split_at(4);
        let length = u32::from_le_bytes(length.try_into().unwrap()) as usize;
        let (directory, bytes) = rest.split_at(length);
        let expected = concat!(
            r#"{"columns":[{"name":"a","kind":"u32","count":3,"offset":0,"length":12},"#,
            r#"{"name":"b","kind":"u64","count":1,"offset":12,"length":8}]}"#
        );
        assert_eq!(std::str::from_utf8(directory), Ok(expected));
        // 1, then 257 more, then 1 less.
        let planes = [1, 1, 255, 0, 1, 255, 0, 0, 255, 0, 0, 255];
        assert_eq!(bytes[..12], planes);
        assert_eq!(bytes[12..], [0, 0, 0, 0, 0, 1, 0, 0]);
    }
}
