//! Rows of text, written as an aligned table for people and as comma-separated values for programs.

use std::fmt::Write;

/// Rows below a heading.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Returns a table with a heading and no rows.
    pub(crate) fn new(heading: &[&str]) -> Table {
        Table {
            rows: vec![heading.iter().map(|&name| name.to_owned()).collect()],
        }
    }

    /// Adds a row with as many cells as the heading.
    pub(crate) fn push(&mut self, row: Vec<String>) {
        debug_assert_eq!(row.len(), self.rows[0].len());
        self.rows.push(row);
    }

    /// Returns the rows as comma-separated values. No cell may contain a comma, a quote or a line break.
    pub(crate) fn to_csv(&self) -> String {
        let mut text = String::new();
        for row in &self.rows {
            debug_assert!(row.iter().all(|cell| !cell.contains([',', '"', '\n'])));
            text += &row.join(",");
            text.push('\n');
        }
        text
    }

    /// Returns the rows in aligned columns: text to the left, numbers to the right.
    pub(crate) fn to_text(&self) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        };
        let is_number = |column: usize| {
            let mut cells = self.rows[1..].iter().map(|row| &row[column]);
            cells.all(|cell| cell.is_empty() || cell.parse::<f64>().is_ok())
        };
        let columns: Vec<_> = (0..self.rows[0].len())
            .map(|column| (width(column), is_number(column)))
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, &(width, is_number)) in row.iter().zip(&columns) {
                let written = if is_number {
                    write!(line, "{cell:>width$}  ")
                } else {
                    write!(line, "{cell:<width$}  ")
                };
                written.expect("text can always grow");
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_values() {
        let mut table = Table::new(&["name", "ns", "met"]);
        table.push(["long name", "7", "yes"].map(String::from).into());
        table.push(["b", "12.5", ""].map(String::from).into());
        assert_eq!(table.to_csv(), "name,ns,met\nlong name,7,yes\nb,12.5,\n");
        assert_eq!(
            table.to_text(),
            "name         ns  met\nlong name     7  yes\nb          12.5\n"
        );
    }
}
