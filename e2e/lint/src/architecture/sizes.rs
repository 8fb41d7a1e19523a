//! Counts the lines of a crate.

use std::collections::BTreeSet;
use std::iter::Sum;
use std::ops::{Add, RangeInclusive};
use std::path::Path;

use super::items;
use crate::lexer::{Token, tokens};

/// Lines without blank ones. A line with code and a comment counts as code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    pub code: usize,
    /// Code under `#[cfg(test)]`, in `tests`, `examples`, `benches` and files of test modules.
    pub tests: usize,
    pub comments: usize,
}

impl Add for Lines {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { code: self.code + other.code, tests: self.tests + other.tests, comments: self.comments + other.comments }
    }
}

impl Sum for Lines {
    fn sum<I: Iterator<Item = Self>>(lines: I) -> Self {
        lines.fold(Self::default(), Self::add)
    }
}

/// Whether a file of a crate is compiled for tests, examples or benchmarks only. `path` is relative
/// to the folder of the crate.
pub fn is_test_path(path: &Path) -> bool {
    let first = path.iter().next().and_then(|first| first.to_str());
    matches!(first, Some("tests" | "examples" | "benches"))
}

/// Counts the lines of a file. All code of a test file counts as tests.
pub fn lines(source: &str, is_test_file: bool) -> Lines {
    let tokens = tokens(source);
    let (_, test_lines) = items::read(&tokens);
    let code = covered(tokens.iter().filter(|token| !token.is_comment()));
    let comments = covered(tokens.iter().filter(|token| token.is_comment()));
    let is_test = |line: &&usize| is_test_file || contains(&test_lines, **line);
    let tests = code.iter().filter(is_test).count();
    Lines { code: code.len() - tests, tests, comments: comments.difference(&code).count() }
}

fn covered<'a>(tokens: impl Iterator<Item = &'a Token<'a>>) -> BTreeSet<usize> {
    tokens.flat_map(|token| token.line..=token.last_line()).collect()
}

fn contains(ranges: &[RangeInclusive<usize>], line: usize) -> bool {
    ranges.iter().any(|range| range.contains(&line))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "//! a\n\nfn b() {} // c\n/* d\ne */\n#[cfg(test)]\nmod f {\n// g\nfn h() {}\n}\n";

    #[test]
    fn lines_are_code_tests_or_comments() {
        assert_eq!(lines(SOURCE, false), Lines { code: 1, tests: 4, comments: 4 });
    }

    #[test]
    fn all_code_of_a_test_file_is_tests() {
        assert_eq!(lines(SOURCE, true), Lines { code: 0, tests: 5, comments: 4 });
    }

    #[test]
    fn tests_and_examples_have_folders() {
        assert!(is_test_path(Path::new("tests/a.rs")) && is_test_path(Path::new("examples/b/main.rs")));
        assert!(!is_test_path(Path::new("src/tests.rs")));
    }
}
