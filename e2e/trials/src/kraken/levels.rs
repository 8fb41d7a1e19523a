//! Frequency levels of the rows in a checkpoint, as in Kraken's Fig. 9b: level i has the rows that
//! 2^i to 2^(i+1) − 1 examples have updated. docs/reference/checkpoint-format.md describes the
//! bytes. Under LFU, the lower half of a row's word counts its examples.

/// The bytes of a group's record without, and with, settings of the row life.
const RECORD_BYTES: [usize; 2] = [68, 108];
const HEADER_BYTES: usize = 48;
/// The bytes of a row before its values: key and word.
const ROW_HEADER_BYTES: usize = 12;
const INDEX_ENTRY_BYTES: usize = 40;
const FOOTER_BYTES: usize = 32;

/// Adds the rows of a rows file with f32 values to `levels`. `None` if its bytes have another form.
pub(super) fn count(file: &[u8], levels: &mut Vec<u64>) -> Option<()> {
    let footer = file.len().checked_sub(FOOTER_BYTES)?;
    let index = long(file, footer)?;
    for entry in 0..word(file, footer + 8)? {
        let entry = file.get(index..)?.get(entry * INDEX_ENTRY_BYTES..)?;
        let (start, length) = (long(entry, 8)?, long(entry, 16)?);
        count_slot(file.get(start..)?.get(..length)?, levels)?;
    }
    Some(())
}

fn count_slot(snapshot: &[u8], levels: &mut Vec<u64>) -> Option<()> {
    let mut rest = snapshot.get(HEADER_BYTES..)?;
    let mut groups = Vec::new();
    let mut removed = 0_usize;
    for _ in 0..word(snapshot, 20)? {
        groups.push((long(rest, 52)?, row_bytes(rest)?));
        removed = removed.checked_add(long(rest, 60)?)?;
        rest = rest.get(RECORD_BYTES[usize::from(*rest.get(11)? != 0)]..)?;
    }
    rest = rest.get(removed.checked_mul(size_of::<u64>())?..)?;
    for (rows, row_bytes) in groups {
        let (own, others) = rest.split_at_checked(rows.checked_mul(row_bytes)?)?;
        for row in own.chunks_exact(row_bytes) {
            add(word(row, 8)?, levels);
        }
        rest = others;
    }
    Some(())
}

/// The bytes of a row of this group.
fn row_bytes(record: &[u8]) -> Option<usize> {
    let width = word(record, 0)?;
    let state = match record.get(10)? {
        0 => 0,
        1 => width,
        2 => 1,
        3 | 4 => 2 * width,
        _ => return None,
    };
    Some(ROW_HEADER_BYTES + (width + state) * size_of::<f32>())
}

fn add(row_word: usize, levels: &mut Vec<u64>) {
    let level = examples(row_word as u16).ilog2() as usize;
    if levels.len() <= level {
        levels.resize(level + 1, 0);
    }
    levels[level] += 1;
}

/// The examples that a row's 16-bit score counts, at least 1: a number without sign with 5 bits of
/// exponent and 11 of fraction, in units of 1/256.
fn examples(code: u16) -> u64 {
    let exponent = code >> 11;
    let scaled = match exponent {
        0 | 1 => u64::from(code),
        _ => u64::from(code & 0x7ff | 0x800) << (exponent - 1),
    };
    (scaled / 256).max(1)
}

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?) as usize)
}

fn long(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group's record: width, optimizer, row life, rows.
    fn record(width: u32, optimizer: u8, life: u8, rows: u64) -> Vec<u8> {
        let mut record = vec![0; RECORD_BYTES[usize::from(life != 0)]];
        record[..4].copy_from_slice(&width.to_le_bytes());
        record[10..12].copy_from_slice(&[optimizer, life]);
        record[52..60].copy_from_slice(&rows.to_le_bytes());
        record
    }

    fn row(row_bytes: usize, row_word: u32) -> Vec<u8> {
        // Values of ones would be counted if the rows were misread.
        let mut row = vec![0xff; row_bytes];
        row[8..12].copy_from_slice(&row_word.to_le_bytes());
        row
    }

    /// A rows file with one slot of two groups.
    fn file() -> Vec<u8> {
        let mut slot = vec![0; HEADER_BYTES];
        slot[20..24].copy_from_slice(&2_u32.to_le_bytes());
        slot.extend(record(5, 3, 2, 3));
        slot.extend(record(2, 0, 0, 1));
        // The time in the upper half does not count.
        for code in [1 << 8, 0x9999_0000 | 3 << 8, 4_096] {
            slot.extend(row(12 + 4 * 15, code));
        }
        slot.extend(row(12 + 4 * 2, 0));
        slot.extend([0xff; 8]);
        let mut file = vec![0; 64];
        let length = slot.len() as u64;
        file.extend(slot);
        let index = file.len() as u64;
        let mut entry = vec![0; INDEX_ENTRY_BYTES];
        entry[8..16].copy_from_slice(&64_u64.to_le_bytes());
        entry[16..24].copy_from_slice(&length.to_le_bytes());
        file.extend(entry);
        file.extend(index.to_le_bytes());
        file.extend(1_u32.to_le_bytes());
        file.extend([0; 20]);
        file
    }

    #[test]
    fn rows_of_every_group_are_counted_by_their_examples() {
        let mut levels = Vec::new();
        count(&file(), &mut levels).unwrap();
        // Two rows with 1 example (one of them not updated yet), one with 3, one with 16.
        assert_eq!(levels, [2, 1, 0, 0, 1]);
    }

    #[test]
    fn a_file_that_is_cut_short_is_refused() {
        let whole = file();
        let mut missing_rows = whole[..whole.len() - 100].to_vec();
        assert!(count(&missing_rows, &mut Vec::new()).is_none());
        missing_rows.truncate(10);
        assert!(count(&missing_rows, &mut Vec::new()).is_none());
    }

    #[test]
    fn scores_are_read_as_the_store_writes_them() {
        // 4,096 / 256; then (2,048 + m) · 2^(e − 1) / 256 for e = 10.
        assert_eq!((examples(0), examples(256), examples(4_095), examples(4_096)), (1, 1, 15, 16));
        assert_eq!(examples(10 << 11 | 1_024), 3_072 * 2);
    }
}
