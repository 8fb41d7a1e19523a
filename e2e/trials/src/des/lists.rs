//! Synthetic rows whose cells have many ids.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use rectrain_harness::HarnessError;
use rectrain_random::SplitMix64;

/// Features of a row.
pub(super) const FEATURES: u32 = 25;
/// Ids of a cell. A row has 25 · 38 = 950 ids.
pub(super) const VALUES: u32 = 38;
/// Between two ids of a cell.
pub(super) const SEPARATOR: char = '|';
/// The shape of the Pareto distribution of the ids. A batch of 512 rows then has about 137,000
/// distinct ids.
const SHAPE: f64 = 0.2;
const LARGEST_ID: f64 = 1e15;

/// Writes so many rows as CSV with a header: `label`, `C1`, `C2` and so on.
///
/// # Errors
/// [`HarnessError::Io`].
pub(super) fn write(file: &Path, rows: u32) -> Result<(), HarnessError> {
    let written = File::create(file).and_then(|to| write_rows(BufWriter::new(to), rows));
    written.map_err(HarnessError::io("write", file.display()))
}

fn write_rows(mut to: impl Write, rows: u32) -> std::io::Result<()> {
    let mut random = SplitMix64::new(1);
    write!(to, "label")?;
    for feature in 1..=FEATURES {
        write!(to, ",C{feature}")?;
    }
    writeln!(to)?;
    for _row in 0..rows {
        write!(to, "{}", random.below(2))?;
        for _feature in 0..FEATURES {
            write_cell(&mut to, &mut random)?;
        }
        writeln!(to)?;
    }
    to.flush()
}

fn write_cell(to: &mut impl Write, random: &mut SplitMix64) -> std::io::Result<()> {
    for value in 0..VALUES {
        let id = random.pareto(SHAPE).min(LARGEST_ID) as u64;
        let before = if value == 0 { ',' } else { SEPARATOR };
        write!(to, "{before}{id}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_has_950_ids_and_few_rows_repeat_many() {
        let mut text = Vec::new();
        write_rows(&mut text, 512).expect("memory has room");
        let text = String::from_utf8(text).expect("text");
        let mut lines = text.lines();
        assert!(lines.next().is_some_and(|header| header.starts_with("label,C1,") && header.ends_with(",C25")));
        let mut distinct = std::collections::BTreeSet::new();
        for line in lines {
            let cells: Vec<&str> = line.split(',').collect();
            assert_eq!(cells.len(), 26);
            for (feature, cell) in cells.iter().skip(1).enumerate() {
                assert_eq!(cell.split(SEPARATOR).count(), 38);
                distinct.extend(cell.split(SEPARATOR).map(|id| (feature, id.to_owned())));
            }
        }
        assert!((120_000..155_000).contains(&distinct.len()), "{}", distinct.len());
    }
}
