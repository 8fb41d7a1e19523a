//! Cuts text into records, and records into cells. Pure functions over byte slices: no files, no
//! schema. The text source calls them for every line.
//!
//! Nearly every record has no quote. One search for `\n` finds its end, one pass over its bytes
//! cuts it, and its cells are slices of the input. A record with quotes is first unquoted into a
//! scratch buffer.
//!
//! The dialect is RFC 4180 with the usual leniency. A quote opens a quoted cell only as the first
//! byte of the cell. Bytes after the closing quote belong to the cell, unless the cell spans lines.
//! In that case the quote counts as one that opens another cell, and the first cell as one that is
//! never closed.

use rectrain_kinds::CsvFormat;

/// The longest accepted record.
pub(crate) const MAX_RECORD_BYTES: usize = 16 << 20;

/// The place of a record in a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    /// The end of its content, without the line end.
    pub(crate) end: usize,
    /// The beginning of the next record.
    pub(crate) next: usize,
    /// Line ends from its beginning to `next`.
    pub(crate) lines: u64,
    /// Whether it must be unquoted.
    pub(crate) quoted: bool,
    /// Whether a quote of it is not closed before the end of the buffer, or before the quote of
    /// another cell.
    pub(crate) unclosed: bool,
}

/// The record that begins at `from`. `None` if `buffer` does not contain its end and more bytes may
/// follow (`last` is false), or if no byte is left.
#[inline]
pub(crate) fn find_record(buffer: &[u8], from: usize, format: &CsvFormat, last: bool) -> Option<Span> {
    let rest = &buffer[from..];
    let newline = memchr::memchr(b'\n', rest);
    let line = &rest[..newline.unwrap_or(rest.len())];
    if format.quoting && memchr::memchr(b'"', line).is_some() {
        return find_quoted(buffer, from, first_byte(format), last);
    }
    match newline {
        Some(at) => Some(span(buffer, from, from + at, 1, false)),
        None if last && !rest.is_empty() => {
            Some(Span { next: buffer.len(), ..span(buffer, from, buffer.len(), 0, false) })
        }
        None => None,
    }
}

/// The delimiter where cells may be quoted: it is one byte then.
fn first_byte(format: &CsvFormat) -> u8 {
    format.delimiter.as_bytes().first().copied().unwrap_or(b',')
}

fn span(buffer: &[u8], from: usize, newline: usize, lines: u64, quoted: bool) -> Span {
    let carriage_return = newline > from && buffer[newline - 1] == b'\r';
    Span { end: newline - usize::from(carriage_return), next: newline + 1, lines, quoted, unclosed: false }
}

fn find_quoted(buffer: &[u8], from: usize, delimiter: u8, last: bool) -> Option<Span> {
    let (mut at, mut lines) = (from, 0);
    loop {
        if buffer.get(at) == Some(&b'"') {
            let before = lines;
            at = match quoted_end(buffer, at + 1, &mut lines) {
                // The cell would continue behind a quote on a later line. That quote opens another
                // cell, so the quote of this one was never closed.
                Some(after) if lines > before && !ends_cell(buffer, after, delimiter) => {
                    return Some(Span { unclosed: true, ..span(buffer, from, after, lines, true) });
                }
                Some(after) => after,
                None if last => {
                    let rest = span(buffer, from, buffer.len(), lines, true);
                    return Some(Span { next: buffer.len(), unclosed: true, ..rest });
                }
                None => return None,
            };
        }
        match memchr::memchr2(delimiter, b'\n', &buffer[at..]) {
            Some(found) if buffer[at + found] == delimiter => at += found + 1,
            Some(found) => return Some(span(buffer, from, at + found, lines + 1, true)),
            None if last => {
                return Some(Span { next: buffer.len(), ..span(buffer, from, buffer.len(), lines, true) });
            }
            None => return None,
        }
    }
}

/// Whether a cell ends at `at`, as far as the buffer shows.
fn ends_cell(buffer: &[u8], at: usize, delimiter: u8) -> bool {
    match &buffer[at..] {
        [] | [b'\r'] | [b'\n', ..] | [b'\r', b'\n', ..] => true,
        [byte, ..] => *byte == delimiter,
    }
}

/// The place after the quote that closes the cell with content from `at` on. `None` without such a
/// quote.
fn quoted_end(buffer: &[u8], mut at: usize, lines: &mut u64) -> Option<usize> {
    loop {
        let found = memchr::memchr2(b'"', b'\n', &buffer[at..])?;
        at += found + 1;
        if buffer[at - 1] == b'\n' {
            *lines += 1;
        } else if buffer.get(at) == Some(&b'"') {
            at += 1;
        } else {
            return Some(at);
        }
    }
}

/// The cells of a record. Its memory is reused from record to record.
#[derive(Debug, Default)]
pub(crate) struct Cells {
    /// The end of each cell. The next cell begins one byte later.
    ends: Vec<u32>,
    /// The unquoted record, with one byte between two cells.
    unquoted: Vec<u8>,
}

impl Cells {
    /// Cuts a record. Returns the bytes and the ends of the cells, for [`cell`]. A quoted record
    /// has a delimiter of one byte.
    #[inline]
    pub(crate) fn cut<'a>(&'a mut self, record: &'a [u8], quoted: bool, delimiter: &[u8]) -> (&'a [u8], &'a [u32]) {
        self.ends.clear();
        let &[delimiter] = delimiter else {
            self.cut_wide(record, delimiter);
            return (&self.unquoted, &self.ends);
        };
        if quoted {
            self.cut_quoted(record, delimiter);
            return (&self.unquoted, &self.ends);
        }
        for (at, &byte) in record.iter().enumerate() {
            if byte == delimiter {
                self.ends.push(at as u32);
            }
        }
        self.ends.push(record.len() as u32);
        (record, &self.ends)
    }

    /// Cuts at a delimiter of several bytes, and leaves one byte of it between two cells.
    fn cut_wide(&mut self, record: &[u8], delimiter: &[u8]) {
        self.unquoted.clear();
        let mut from = 0;
        for at in memchr::memmem::find_iter(record, delimiter) {
            self.unquoted.extend_from_slice(&record[from..at]);
            self.ends.push(self.unquoted.len() as u32);
            self.unquoted.push(b' ');
            from = at + delimiter.len();
        }
        self.unquoted.extend_from_slice(&record[from..]);
        self.ends.push(self.unquoted.len() as u32);
    }

    fn cut_quoted(&mut self, record: &[u8], delimiter: u8) {
        self.unquoted.clear();
        let mut at = 0;
        loop {
            if record.get(at) == Some(&b'"') {
                at = self.unquote(record, at + 1);
            }
            let end = memchr::memchr(delimiter, &record[at..]).map_or(record.len(), |n| at + n);
            self.unquoted.extend_from_slice(&record[at..end]);
            self.ends.push(self.unquoted.len() as u32);
            if end == record.len() {
                return;
            }
            self.unquoted.push(delimiter);
            at = end + 1;
        }
    }

    /// Copies the content of a quoted cell. Returns the place after the closing quote, or the end
    /// of the record if the cell is not closed.
    fn unquote(&mut self, record: &[u8], mut at: usize) -> usize {
        while let Some(found) = memchr::memchr(b'"', &record[at..]) {
            self.unquoted.extend_from_slice(&record[at..at + found]);
            at += found + 1;
            if record.get(at) != Some(&b'"') {
                return at;
            }
            self.unquoted.push(b'"');
            at += 1;
        }
        self.unquoted.extend_from_slice(&record[at..]);
        record.len()
    }
}

/// Cell `index` of the result of [`Cells::cut`].
#[inline]
pub(crate) fn cell<'a>(bytes: &'a [u8], ends: &[u32], index: usize) -> &'a [u8] {
    let from = match index {
        0 => 0,
        _ => ends[index - 1] as usize + 1,
    };
    &bytes[from..ends[index] as usize]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn records(text: &[u8], format: &CsvFormat) -> Vec<Vec<Vec<u8>>> {
        let (mut at, mut cells, mut all) = (0, Cells::default(), vec![]);
        while let Some(span) = find_record(text, at, format, true) {
            if span.end > at {
                let (bytes, ends) = cells.cut(&text[at..span.end], span.quoted, format.delimiter.as_bytes());
                all.push((0..ends.len()).map(|i| cell(bytes, ends, i).to_vec()).collect());
            }
            at = span.next;
        }
        all
    }

    /// Whether every quote that opens a cell is closed.
    fn is_closed(text: &[u8], format: &CsvFormat) -> bool {
        let mut at = 0;
        while let Some(span) = find_record(text, at, format, true) {
            if span.unclosed {
                return false;
            }
            at = span.next;
        }
        true
    }

    fn records_by_csv_core(text: &[u8], format: &CsvFormat) -> Vec<Vec<Vec<u8>>> {
        let mut reader = csv_core::ReaderBuilder::new().delimiter(first_byte(format)).quoting(format.quoting).build();
        let (mut input, mut all) = (text, vec![]);
        let (mut output, mut ends) = (vec![0; 4096], vec![0; 256]);
        loop {
            let (mut wrote, mut cells) = (0, 0);
            let result = loop {
                let (result, read, out, ended) = reader.read_record(input, &mut output[wrote..], &mut ends[cells..]);
                input = &input[read..];
                wrote += out;
                cells += ended;
                if !matches!(result, csv_core::ReadRecordResult::InputEmpty) {
                    break result;
                }
            };
            if matches!(result, csv_core::ReadRecordResult::End) {
                return all;
            }
            assert!(matches!(result, csv_core::ReadRecordResult::Record));
            let mut from = 0;
            all.push(
                ends[..cells].iter().map(|&end| output[std::mem::replace(&mut from, end)..end].to_vec()).collect(),
            );
        }
    }

    #[test]
    fn quotes_line_ends_and_missing_last_newlines_are_understood() {
        let format = CsvFormat::default();
        let text = b"a,\"b\"\"c\",\r\n\n\"x\ny\",,\"z,\"w\nlast";
        let expected: Vec<Vec<&[u8]>> = vec![vec![b"a", b"b\"c", b""], vec![b"x\ny", b"", b"z,w"], vec![b"last"]];
        assert_eq!(records(text, &format), expected);
        let span = find_record(text, 12, &format, true).unwrap();
        assert_eq!((span.lines, span.quoted), (2, true));
    }

    #[test]
    fn a_delimiter_may_be_several_bytes() {
        let format = CsvFormat { delimiter: "::".into(), quoting: false, ..CsvFormat::default() };
        let expected: Vec<Vec<&[u8]>> = vec![vec![b"1", b"a:b", b"", b":\"c"], vec![b"", b""], vec![b"2"]];
        assert_eq!(records(b"1::a:b:::::\"c\r\n::\n2", &format), expected);
    }

    #[test]
    fn a_record_is_not_cut_before_its_end_is_known() {
        let format = CsvFormat::default();
        for text in [&b"a,b"[..], b"a,\"b\n", b"\"a\"", b"\"a\"\"", b"\"a\",b"] {
            assert_eq!(find_record(text, 0, &format, false), None, "{text:?}");
            assert!(find_record(text, 0, &format, true).is_some());
        }
        assert_eq!(find_record(b"", 0, &format, true), None);
    }

    #[test]
    fn an_unclosed_quote_is_found_at_the_end_of_the_text() {
        let format = CsvFormat::default();
        for text in [&b"a,\"b\nc,d\n"[..], b"\"a\"\"", b"a,\"", b"\"a\",\"b\r\n"] {
            assert_eq!(find_record(text, 0, &format, false), None, "{text:?}");
            let span = find_record(text, 0, &format, true).unwrap();
            assert_eq!((span.unclosed, span.next), (true, text.len()), "{text:?}");
        }
        // There are rows between two quotes that open cells.
        let swallowed = b"1,\"Love,5\n0,b,3\n0,\"New York\",3\n";
        assert!(find_record(swallowed, 0, &format, false).unwrap().unclosed);
        for text in [&b"\"a\""[..], b"a,\"b\"", b"a\"b", b"\"a\"b\n", b"\"a\"\"\"", b"\"a\nb\",c\r\n", b"\"a\nb\"\r\n"]
        {
            assert!(is_closed(text, &format), "{text:?}");
        }
        assert!(is_closed(b"\"a", &CsvFormat { quoting: false, ..format }));
    }

    proptest! {
        /// Lines end in `\n` or `\r\n` here, because a `\r` alone ends a line in csv-core and not
        /// in this module. An unclosed quote is an error in this module and not in csv-core.
        #[test]
        fn records_equal_those_of_an_independent_parser(
            lines in prop::collection::vec("[ab,\"|\n]{0,8}", 0..8), crlf in any::<bool>(), quoting in any::<bool>()
        ) {
            let format = CsvFormat { quoting, ..CsvFormat::default() };
            let text = lines.join(if crlf { "\r\n" } else { "\n" });
            prop_assume!(is_closed(text.as_bytes(), &format));
            prop_assert_eq!(
                records(text.as_bytes(), &format),
                records_by_csv_core(text.as_bytes(), &format)
            );
        }

        #[test]
        fn a_larger_buffer_does_not_move_the_end_of_a_record(
            text in "[a,\"\n]{0,40}", cut in 0_usize..40
        ) {
            let format = CsvFormat::default();
            let text = text.as_bytes();
            if let Some(early) = find_record(&text[..cut.min(text.len())], 0, &format, false) {
                prop_assert_eq!(Some(early), find_record(text, 0, &format, true));
            }
        }
    }
}
