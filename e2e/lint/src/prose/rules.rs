//! The rules for English: forbidden phrases, the length of sentences, and names of tests.

use super::markdown::Word;

/// Lines of comments and Markdown end here, indentation included.
pub const COLUMNS: usize = 100;

/// Sentences longer than this are findings. Writers aim at 25.
pub const SENTENCE_WORDS: usize = 30;

/// Names of test functions longer than this are findings.
pub const TEST_NAME_LETTERS: usize = 70;

/// Phrases of relative clauses without a noun.
pub const WHAT: &[&str] =
    &["what is", "what was", "what has", "what had", "what comes", "what came", "what goes", "what went"];

/// Phrases that hide the actor of a sentence.
pub const ACTORS: &[&str] = &["who is", "who has", "who had", "who was", "who asks", "whoever", "nobody", "somebody"];

/// Phrases that drop a noun.
pub const DROPPED_NOUNS: &[&str] = &["that of", "those of", "of which"];

const TEST_NAME_PARTS: &[&str] = &["_who_", "whoever", "nobody", "what_is", "what_was"];

/// Words after which a full stop does not end a sentence.
const ABBREVIATIONS: &[&str] =
    &["e.g.", "i.e.", "etc.", "cf.", "vs.", "al.", "resp.", "approx.", "fig.", "sec.", "eq.", "p."];

/// A place in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occurrence<'a> {
    pub line: usize,
    pub phrase: &'a str,
}

/// The forbidden phrases of a unit.
pub fn forbidden(unit: &[Word]) -> Vec<Occurrence<'static>> {
    let mut found = Vec::new();
    for phrases in [WHAT, ACTORS, DROPPED_NOUNS] {
        found.extend(occurrences(unit, phrases));
    }
    found
}

/// Occurrences of `phrases` in a unit, in any letter case, across line breaks, and as whole words.
pub fn occurrences<'a>(unit: &[Word], phrases: &[&'a str]) -> Vec<Occurrence<'a>> {
    let mut text = String::new();
    let mut starts = Vec::new();
    for word in unit {
        starts.push((text.len(), word.line));
        text.push_str(&word.text.to_lowercase());
        text.push(' ');
    }
    let mut found = Vec::new();
    for phrase in phrases {
        for (at, _) in text.match_indices(phrase) {
            let is_whole = !text[..at].ends_with(is_letter) && !text[at + phrase.len()..].starts_with(is_letter);
            if is_whole {
                let line = starts.iter().take_while(|(start, _)| *start <= at).last().map_or(0, |(_, line)| *line);
                found.push(Occurrence { line, phrase });
            }
        }
    }
    found
}

fn is_letter(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// A sentence by its first line, its number of words, and the first few of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sentence {
    pub line: usize,
    pub words: usize,
    pub start: String,
}

/// This many words of a sentence identify it in a report.
const START_WORDS: usize = 5;

/// Splits a unit into sentences.
pub fn sentences(unit: &[Word]) -> Vec<Sentence> {
    let mut sentences = Vec::new();
    for words in unit.split_inclusive(|word| ends_sentence(&word.text)) {
        let count = words.iter().filter(|word| word.is_counted()).count();
        if let Some(first) = words.first().filter(|_| count > 0) {
            let start: Vec<&str> = words.iter().take(START_WORDS).map(|word| word.text.as_str()).collect();
            sentences.push(Sentence { line: first.line, words: count, start: start.join(" ") });
        }
    }
    sentences
}

fn ends_sentence(word: &str) -> bool {
    let word = word.trim_end_matches([')', ']', '"', '\'', '*', '_', '”', '’', '»']);
    let is_abbreviation = || {
        let plain = word.trim_start_matches(['(', '[', '"', '*', '_']).to_lowercase();
        ABBREVIATIONS.contains(&plain.as_str())
    };
    word.ends_with(['.', '!', '?']) && !word.ends_with("..") && !is_abbreviation()
}

/// Why the name of a test function is a finding.
pub fn test_name_problem(name: &str) -> Option<String> {
    for part in TEST_NAME_PARTS {
        if name.contains(part) {
            return Some(format!("`{name}` contains `{part}`"));
        }
    }
    let letters = name.chars().count();
    (letters > TEST_NAME_LETTERS).then(|| format!("`{name}` has {letters} letters"))
}

#[cfg(test)]
mod tests {
    use super::super::markdown::{Line, prose};
    use super::*;

    fn unit(text: &str) -> Vec<Word> {
        let lines: Vec<_> = text.lines().enumerate().map(|(at, text)| Line { number: at + 1, text }).collect();
        prose(&lines).units.concat()
    }

    fn phrases(text: &str) -> Vec<&'static str> {
        forbidden(&unit(text)).iter().map(|found| found.phrase).collect()
    }

    fn lengths(text: &str) -> Vec<usize> {
        sentences(&unit(text)).iter().map(|sentence| sentence.words).collect()
    }

    #[test]
    fn every_forbidden_phrase_fires() {
        for phrase in [WHAT, ACTORS, DROPPED_NOUNS].concat() {
            assert_eq!(phrases(&format!("It, {phrase}, here.")), [phrase]);
        }
    }

    #[test]
    fn letter_case_does_not_hide_a_phrase() {
        assert_eq!(phrases("Whoever asks. WHAT is it? Nobody's."), ["what is", "whoever", "nobody"]);
    }

    #[test]
    fn parts_of_words_are_no_phrase() {
        assert_eq!(phrases("somewhat is; what isn; whats; what island; that offer; nobodyx"), Vec::<&str>::new());
    }

    #[test]
    fn punctuation_separates_the_words_of_a_phrase() {
        assert_eq!(phrases("what, is; that. Of"), Vec::<&str>::new());
    }

    #[test]
    fn a_phrase_in_a_code_span_does_not_count() {
        assert_eq!(phrases("`what is` and `whoever`"), Vec::<&str>::new());
    }

    #[test]
    fn a_phrase_across_lines_is_on_its_first_line() {
        assert_eq!(forbidden(&unit("a\nb what\nis c")), [Occurrence { line: 2, phrase: "what is" }]);
    }

    #[test]
    fn sentences_end_at_full_stops_and_question_marks() {
        assert_eq!(lengths("One two. Three (four five.) Six? Seven: eight; nine"), [2, 3, 1, 3]);
    }

    #[test]
    fn abbreviations_and_versions_do_not_end_a_sentence() {
        assert_eq!(lengths("A mode (e.g. sync, i.e. one) of 1.5 and v0.2 ... on"), [11]);
    }

    #[test]
    fn code_spans_count_as_one_word_and_dashes_as_none() {
        assert_eq!(lengths("Runs `a b c` - or `d e`."), [4]);
    }

    #[test]
    fn long_names_of_tests_are_findings() {
        assert_eq!(test_name_problem(&"a".repeat(TEST_NAME_LETTERS)), None);
        assert!(test_name_problem(&"a".repeat(TEST_NAME_LETTERS + 1)).is_some());
    }

    #[test]
    fn names_of_tests_do_not_contain_who() {
        for name in ["those_who_wait", "whoever_waits", "nobody_waits", "what_is_read", "what_was_read"] {
            assert!(test_name_problem(name).is_some(), "{name}");
        }
        for name in ["whole_rows", "a_what_if", "who"] {
            assert_eq!(test_name_problem(name), None);
        }
    }
}
