//! Inspects one file.

use std::path::{Path, PathBuf};

use super::extract::{Block, comments, error_texts, hash_comments, test_names};
use super::markdown::{Line, Prose, Word, prose};
use super::rules::{self, COLUMNS, SENTENCE_WORDS, Sentence};
use crate::lexer::tokens;

/// The languages whose prose is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    Rust,
    Proto,
    Markdown,
    /// YAML and TOML.
    Hash,
}

impl Language {
    /// The language of a file by its extension. `None` if the lint does not read it.
    pub fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "rs" => Some(Self::Rust),
            "proto" => Some(Self::Proto),
            "md" => Some(Self::Markdown),
            "yaml" | "yml" | "toml" => Some(Self::Hash),
            _ => None,
        }
    }
}

/// The kinds of findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Phrase,
    WideLine,
    LongSentence,
    TestName,
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::Phrase, Self::WideLine, Self::LongSentence, Self::TestName];

    /// The name in reports and in the baseline.
    pub fn name(self) -> &'static str {
        match self {
            Self::Phrase => "phrases",
            Self::WideLine => "wide-lines",
            Self::LongSentence => "long-sentences",
            Self::TestName => "test-names",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub line: usize,
    pub kind: Kind,
    pub text: String,
}

/// How often words that make prose hard to read occur in the Rust comments of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frequencies {
    pub words: usize,
    /// `what is` and the other phrases with `what`.
    pub what: usize,
    pub who: usize,
    pub whoever: usize,
    /// `nobody` and `somebody`.
    pub nobody: usize,
}

impl Frequencies {
    pub fn add(&mut self, other: Self) {
        self.words += other.words;
        self.what += other.what;
        self.who += other.who;
        self.whoever += other.whoever;
        self.nobody += other.nobody;
    }

    /// Occurrences of all of them.
    pub fn total(&self) -> usize {
        self.what + self.who + self.whoever + self.nobody
    }

    fn count(unit: &[Word]) -> Self {
        Self {
            words: unit.iter().filter(|word| word.is_counted()).count(),
            what: rules::occurrences(unit, rules::WHAT).len(),
            who: rules::occurrences(unit, &["who"]).len(),
            whoever: rules::occurrences(unit, &["whoever"]).len(),
            nobody: rules::occurrences(unit, &["nobody", "somebody"]).len(),
        }
    }
}

/// The findings of a file.
#[derive(Debug)]
pub struct File {
    pub path: PathBuf,
    /// The crate or folder that counts the findings.
    pub group: String,
    /// By line.
    pub findings: Vec<Finding>,
    pub frequencies: Frequencies,
}

impl File {
    /// Inspects `source`. `None` if the lint does not read files of this kind.
    pub fn inspect(path: PathBuf, group: String, source: &str) -> Option<Self> {
        let language = Language::of(&path)?;
        let mut file = Self { path, group, findings: Vec::new(), frequencies: Frequencies::default() };
        match language {
            Language::Rust => file.rust(source),
            Language::Proto => file.blocks(source, &comments(&tokens(source))),
            Language::Hash => file.blocks(source, &hash_comments(source)),
            Language::Markdown => {
                let lines = source.lines().enumerate().map(|(at, text)| Line { number: at + 1, text });
                file.blocks(source, &[lines.collect()]);
            }
        }
        file.findings.sort_by_key(|finding| finding.line);
        Some(file)
    }

    fn rust(&mut self, source: &str) {
        let tokens = tokens(source);
        let blocks = comments(&tokens);
        self.blocks(source, &blocks);
        for block in &blocks {
            for unit in prose(block).units {
                self.frequencies.add(Frequencies::count(&unit));
            }
        }
        for (number, text) in error_texts(&tokens) {
            let lines: Block<'_> = text.lines().map(|text| Line { number, text }).collect();
            self.prose(&prose(&lines));
        }
        for (line, name) in test_names(&tokens) {
            if let Some(problem) = rules::test_name_problem(name) {
                self.find(line, Kind::TestName, problem);
            }
        }
    }

    /// Checks blocks of whole lines.
    fn blocks(&mut self, source: &str, blocks: &[Block<'_>]) {
        let source: Vec<&str> = source.lines().collect();
        for block in blocks {
            let prose = prose(block);
            self.prose(&prose);
            for line in block {
                let text = source.get(line.number - 1).copied().unwrap_or_default();
                let width = text.chars().count();
                let is_free = text.contains("://") || prose.free_width.contains(&line.number);
                if width > COLUMNS && !is_free {
                    self.find(line.number, Kind::WideLine, format!("{width} columns, at most {COLUMNS} are allowed"));
                }
            }
        }
    }

    fn prose(&mut self, prose: &Prose) {
        for unit in &prose.units {
            for found in rules::forbidden(unit) {
                self.find(found.line, Kind::Phrase, format!("`{}`", found.phrase));
            }
            for sentence in rules::sentences(unit).iter().filter(|sentence| sentence.words > SENTENCE_WORDS) {
                let Sentence { line, words, start } = sentence;
                let text = format!("{words} words, at most {SENTENCE_WORDS} are allowed: {start} …");
                self.find(*line, Kind::LongSentence, text);
            }
        }
    }

    fn find(&mut self, line: usize, kind: Kind, text: String) {
        self.findings.push(Finding { line, kind, text });
    }

    /// The number of findings of a kind.
    pub fn count(&self, kind: Kind) -> usize {
        self.findings.iter().filter(|finding| finding.kind == kind).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, source: &str) -> Vec<(usize, Kind)> {
        let file = File::inspect(path.into(), String::new(), source).unwrap();
        file.findings.iter().map(|finding| (finding.line, finding.kind)).collect()
    }

    fn wide(prefix: &str) -> String {
        format!("{prefix}{}", "a".repeat(COLUMNS + 1 - prefix.len()))
    }

    fn long_sentence() -> String {
        "a ".repeat(SENTENCE_WORDS + 1)
    }

    #[test]
    fn each_language_is_read() {
        for (path, source) in [
            ("a.rs", "fn f() {} // nobody"),
            ("a.rs", "/* nobody */"),
            ("a.rs", "#[error(\"nobody\")] struct E;"),
            ("a.proto", "message A {} // nobody"),
            ("a.yaml", "b: c # nobody"),
            ("a.toml", "b = 1 # nobody"),
            ("a.md", "nobody"),
        ] {
            assert_eq!(found(path, source), [(1, Kind::Phrase)], "{path}: {source}");
        }
    }

    #[test]
    fn code_and_values_are_not_read() {
        for (path, source) in [
            ("a.rs", "fn nobody() { f(\"nobody\") }"),
            ("a.proto", "message nobody {}"),
            ("a.yaml", "nobody: nobody"),
            ("a.md", "```\nnobody\n```\n> nobody\n\n`nobody`"),
        ] {
            assert_eq!(found(path, source), [], "{path}: {source}");
        }
    }

    #[test]
    fn wide_lines_are_findings_in_every_language() {
        let prefixes = [("a.rs", "// "), ("a.rs", "    /// "), ("a.yaml", "# "), ("a.proto", "// "), ("a.md", "")];
        for (path, prefix) in prefixes {
            assert_eq!(found(path, &wide(prefix)), [(1, Kind::WideLine)], "{prefix}");
            assert_eq!(found(path, &wide(prefix)[..COLUMNS]), [], "{prefix}");
        }
    }

    #[test]
    fn urls_tables_and_fences_may_be_wide() {
        let fence = format!("/// ```\n{}\n/// ```", wide("/// "));
        for source in [wide("// https://"), wide("/// | "), fence] {
            assert_eq!(found("a.rs", &source), [], "{source}");
        }
        let fence = format!("```\n{}\n```", wide("a"));
        for source in [wide("https://"), wide("| "), fence, wide("    ")] {
            assert_eq!(found("a.md", &source), [], "{source}");
        }
    }

    #[test]
    fn code_may_be_wide() {
        assert_eq!(found("a.rs", &wide("let a = ")), []);
    }

    #[test]
    fn long_sentences_are_findings() {
        assert_eq!(found("a.md", &format!("One.\nTwo.\n{}", long_sentence())), [(3, Kind::LongSentence)]);
        let half = "a ".repeat(SENTENCE_WORDS / 2 + 1);
        assert_eq!(found("a.md", &format!("{half}\n\n{half}\n- {half}\n\n| {half} | {half} |")), []);
    }

    #[test]
    fn a_long_sentence_may_span_comment_lines() {
        let source = format!("// {}\n", "a ".repeat(10)).repeat(4);
        assert_eq!(found("a.rs", &source), [(1, Kind::LongSentence)]);
    }

    #[test]
    fn names_of_tests_are_checked_in_rust() {
        assert_eq!(found("a.rs", "#[test]\nfn nobody_waits() {}\nfn whoever() {}"), [(2, Kind::TestName)]);
    }

    #[test]
    fn frequencies_count_rust_comments_only() {
        let source = "// Those who wait for what is read. Whoever, nobody, somebody.\n#[error(\"who\")]";
        let file = File::inspect("a.rs".into(), String::new(), source).unwrap();
        let expected = Frequencies { words: 10, what: 1, who: 1, whoever: 1, nobody: 2 };
        assert_eq!((file.frequencies, file.frequencies.total()), (expected, 5));
        let document = File::inspect("a.md".into(), String::new(), "who").unwrap();
        assert_eq!(document.frequencies, Frequencies::default());
    }
}
