//! Splits Markdown into units of prose: paragraphs, headings, list items and table cells.
//!
//! Comments of source files are read as Markdown too. Code fences, indented code, quotations and
//! link targets are no prose. A code span counts as one word.

/// A line of text without its comment marker.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// The line of the file, from 1.
    pub number: usize,
    pub text: &'a str,
}

/// A word as it stands in the text, punctuation included. A code span is [`CODE_SPAN`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    pub line: usize,
    pub text: String,
}

/// Stands for the content of a code span.
pub const CODE_SPAN: char = '`';

impl Word {
    /// Whether the limits on length count this word. A dash or an arrow is not counted.
    pub fn is_counted(&self) -> bool {
        self.text.chars().any(|character| character.is_alphanumeric() || character == CODE_SPAN)
    }
}

/// The prose of a block of lines.
#[derive(Debug, Default)]
pub struct Prose {
    /// Paragraphs, headings, list items and table cells. A sentence never spans two of them.
    pub units: Vec<Vec<Word>>,
    /// Lines of code and tables, which may be of any width.
    pub free_width: Vec<usize>,
}

/// Splits consecutive lines of Markdown into units.
pub fn prose(lines: &[Line<'_>]) -> Prose {
    let mut splitter = Splitter { after_blank: true, ..Splitter::default() };
    for line in lines {
        splitter.line(*line);
    }
    splitter.end_unit();
    splitter.prose
}

#[derive(Default)]
struct Splitter<'a> {
    prose: Prose,
    /// The lines of the unit that is open.
    unit: Vec<Line<'a>>,
    /// The marker of the open code fence.
    fence: Option<&'a str>,
    in_list: bool,
    after_blank: bool,
}

impl<'a> Splitter<'a> {
    fn line(&mut self, line: Line<'a>) {
        let text = line.text.trim();
        let indent = line.text.len() - line.text.trim_start().len();
        if self.is_in_fence(text) {
            self.prose.free_width.push(line.number);
            return;
        }
        if text.is_empty() {
            self.end_unit();
            self.after_blank = true;
            return;
        }
        let follows_blank = std::mem::take(&mut self.after_blank);
        if indent == 0 && follows_blank {
            self.in_list = false;
        }
        if indent >= 4 && follows_blank && !self.in_list {
            self.prose.free_width.push(line.number);
            // The rest of a block of indented code follows code.
            self.after_blank = true;
            return;
        }
        self.prose_line(Line { number: line.number, text });
    }

    /// Opens or closes a fence. True for its first and last line and for all between.
    fn is_in_fence(&mut self, text: &'a str) -> bool {
        if let Some(fence) = self.fence {
            if text.starts_with(fence) && text.trim_matches(['`', '~']).is_empty() {
                self.fence = None;
            }
            return true;
        }
        let opens = text.starts_with("```") || text.starts_with("~~~");
        if opens {
            self.end_unit();
            self.fence = text.get(..3);
        }
        opens
    }

    /// A line that is neither blank nor code, trimmed.
    fn prose_line(&mut self, line: Line<'a>) {
        let text = line.text;
        if text.starts_with('|') {
            self.table_row(line);
        } else if text.starts_with('>') || is_link_definition(text) || is_rule(text) {
            self.end_unit();
        } else if text.starts_with('#') {
            self.end_unit();
            self.unit.push(Line { text: text.trim_start_matches('#'), ..line });
            self.end_unit();
        } else if let Some(item) = list_item(text) {
            self.end_unit();
            self.in_list = true;
            self.unit.push(Line { text: item, ..line });
        } else {
            self.unit.push(line);
        }
    }

    fn table_row(&mut self, line: Line<'a>) {
        self.end_unit();
        self.prose.free_width.push(line.number);
        for cell in cells(line.text) {
            self.unit.push(Line { text: cell, ..line });
            self.end_unit();
        }
    }

    fn end_unit(&mut self) {
        let words = words(&self.unit);
        self.unit.clear();
        if words.iter().any(Word::is_counted) {
            self.prose.units.push(words);
        }
    }
}

/// `[name]: target`
fn is_link_definition(text: &str) -> bool {
    text.starts_with('[') && text.split_once("]:").is_some_and(|(name, _)| !name.contains(' '))
}

/// A line without letters and digits, such as `---`.
fn is_rule(text: &str) -> bool {
    !text.contains(|character: char| character.is_alphanumeric() || character == '`')
}

/// The text of a list item without its marker.
fn list_item(text: &str) -> Option<&str> {
    if let Some(item) = text.strip_prefix(['-', '*', '+']) {
        return item.strip_prefix(' ');
    }
    let after_number = text.trim_start_matches(|character: char| character.is_ascii_digit());
    let has_number = (1..=3).contains(&(text.len() - after_number.len()));
    after_number.strip_prefix(['.', ')'])?.strip_prefix(' ').filter(|_| has_number)
}

/// The cells of a table row. An escaped `\|` does not separate cells.
fn cells(row: &str) -> Vec<&str> {
    let mut cells = Vec::new();
    let mut start = 0;
    for (at, _) in row.match_indices('|') {
        if !row[..at].ends_with('\\') {
            cells.push(&row[start..at]);
            start = at + 1;
        }
    }
    cells.push(&row[start..]);
    cells
}

/// The words of a unit, without link targets, HTML tags and the content of code spans.
fn words(lines: &[Line<'_>]) -> Vec<Word> {
    let text = lines.iter().map(|line| line.text).collect::<Vec<_>>().join("\n");
    let mut words = WordBuilder { lines, ..WordBuilder::default() };
    let mut rest = text.as_str();
    while let Some(first) = rest.chars().next() {
        let skipped = code_span(rest).map(|length| (CODE_SPAN, length));
        let skipped = skipped.or_else(|| link_target(rest).map(|length| (']', length)));
        let skipped = skipped.or_else(|| words.html_tag(rest).map(|length| (' ', length)));
        let (character, length) = skipped.unwrap_or((first, first.len_utf8()));
        words.push(character);
        words.skip_lines(&rest[..length]);
        rest = &rest[length..];
    }
    words.end_word();
    words.words
}

#[derive(Default)]
struct WordBuilder<'a> {
    lines: &'a [Line<'a>],
    /// Index in `lines`.
    at: usize,
    words: Vec<Word>,
    word: String,
}

impl WordBuilder<'_> {
    fn push(&mut self, character: char) {
        if character.is_whitespace() {
            self.end_word();
        } else {
            self.word.push(character);
        }
    }

    fn skip_lines(&mut self, text: &str) {
        self.at += text.matches('\n').count();
    }

    fn end_word(&mut self) {
        if !self.word.is_empty() {
            let line = self.lines.get(self.at).map_or(0, |line| line.number);
            self.words.push(Word { line, text: std::mem::take(&mut self.word) });
        }
    }

    /// Length of an HTML tag or comment marker where a word starts.
    fn html_tag(&self, text: &str) -> Option<usize> {
        if !self.word.is_empty() {
            return None;
        }
        for marker in ["<!--", "-->"] {
            if text.starts_with(marker) {
                return Some(marker.len());
            }
        }
        let is_tag = text.strip_prefix('<')?.starts_with(|next: char| next.is_ascii_alphabetic() || next == '/');
        let end = text.find('>').filter(|_| is_tag)?;
        Some(end + 1)
    }
}

/// Length of the code span at the start of `text`. A backtick without a partner opens none.
fn code_span(text: &str) -> Option<usize> {
    let ticks = text.bytes().take_while(|&byte| byte == b'`').count();
    if ticks == 0 {
        return None;
    }
    let mut at = ticks;
    while let Some(found) = text[at..].find('`') {
        let run = text[at + found..].bytes().take_while(|&byte| byte == b'`').count();
        at += found + run;
        if run == ticks {
            return Some(at);
        }
    }
    None
}

/// Length of `](target)` at the start of `text`.
fn link_target(text: &str) -> Option<usize> {
    let target = text.strip_prefix("](")?;
    let mut depth = 1;
    for (at, character) in target.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some("](".len() + at + 1);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Prose {
        let lines: Vec<_> = text.lines().enumerate().map(|(at, text)| Line { number: at + 1, text }).collect();
        prose(&lines)
    }

    fn units(text: &str) -> Vec<String> {
        let joined = |unit: &Vec<Word>| unit.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join(" ");
        parsed(text).units.iter().map(joined).collect()
    }

    #[test]
    fn paragraphs_headings_and_items_are_units() {
        let text = "# A b\nc d\ne\n\n- f\n  g\n2. h\n* i";
        assert_eq!(units(text), ["A b", "c d e", "f g", "h", "i"]);
    }

    #[test]
    fn table_cells_are_units_of_any_width() {
        let prose = parsed("| a b | c \\| d |\n|---|---|\n| e | f |");
        assert_eq!(prose.free_width, [1, 2, 3]);
        assert_eq!(units("| a b | c \\| d |\n|---|---|\n| e | f |"), ["a b", "c \\| d", "e", "f"]);
    }

    #[test]
    fn fenced_and_indented_code_is_no_prose() {
        let text = "a\n```rust\nlet b = c;\n```\nd\n\n    e f\n    g h\n\ni";
        assert_eq!(units(text), ["a", "d", "i"]);
        assert_eq!(parsed(text).free_width, [2, 3, 4, 7, 8]);
    }

    #[test]
    fn an_indented_paragraph_of_a_list_is_prose() {
        assert_eq!(units("- a\n\n    b\n\nc"), ["a", "b", "c"]);
    }

    #[test]
    fn a_longer_fence_holds_a_shorter_one() {
        assert_eq!(units("~~~\n```\na\n~~~\nb"), ["b"]);
    }

    #[test]
    fn quotations_are_no_prose() {
        assert_eq!(units("a\n> b c\nd"), ["a", "d"]);
    }

    #[test]
    fn a_code_span_is_one_word() {
        assert_eq!(units("a `b c\nd`, ``e ` f`` and ` g"), ["a `, ` and ` g"]);
    }

    #[test]
    fn a_link_is_its_text() {
        assert_eq!(units("see [a b](c/d_(e).md).\n[f]: https://g"), ["see [a b]."]);
    }

    #[test]
    fn html_is_no_prose() {
        assert_eq!(units("<!-- a --> <img src=\"b c\"> d<e f>"), ["a d<e f>"]);
    }

    #[test]
    fn words_know_their_line() {
        let lines: Vec<_> = parsed("a `b\nc` d\ne").units.concat().iter().map(|word| word.line).collect();
        assert_eq!(lines, [1, 2, 2, 3]);
    }
}
