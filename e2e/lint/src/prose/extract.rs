//! Finds the prose of a file: comments, error texts and names of tests.

use super::markdown::Line;
use crate::lexer::{Kind, Token};

/// Consecutive lines of comments or text.
pub type Block<'a> = Vec<Line<'a>>;

/// The comments among `tokens`. Consecutive comment lines with the same marker are one block.
pub fn comments<'a>(tokens: &[Token<'a>]) -> Vec<Block<'a>> {
    let mut blocks: Vec<Block<'a>> = Vec::new();
    let mut open: Option<OpenBlock<'a>> = None;
    let mut code_line = 0;
    for token in tokens {
        if !token.is_comment() {
            code_line = token.last_line();
            continue;
        }
        if token.kind == Kind::BlockComment {
            blocks.push(block_comment(token));
            open = None;
            continue;
        }
        let (marker, text) = split_marker(token.text);
        let line = Line { number: token.line, text };
        let is_alone = code_line != token.line;
        let continues = open == Some(OpenBlock { marker, next_line: token.line }) && is_alone;
        match blocks.last_mut() {
            Some(block) if continues => block.push(line),
            _ => blocks.push(vec![line]),
        }
        open = is_alone.then_some(OpenBlock { marker, next_line: token.line + 1 });
    }
    blocks
}

/// A block that a comment on the next line with the same marker continues.
#[derive(PartialEq, Eq)]
struct OpenBlock<'a> {
    marker: &'a str,
    next_line: usize,
}

/// The marker of a line comment and the text after it.
fn split_marker(comment: &str) -> (&str, &str) {
    let is_doc = comment.starts_with("//!") || (comment.starts_with("///") && !comment.starts_with("////"));
    let (marker, text) = comment.split_at(if is_doc { 3 } else { 2 });
    (marker, text.strip_prefix(' ').unwrap_or(text))
}

fn block_comment<'a>(token: &Token<'a>) -> Block<'a> {
    let text = token.text.trim_start_matches('/').trim_start_matches(['*', '!']);
    let text = text.strip_suffix("*/").unwrap_or(text);
    let mut block = Block::new();
    for (at, line) in text.split('\n').enumerate() {
        let line = line.trim();
        let line = line.strip_prefix('*').unwrap_or(line);
        block.push(Line { number: token.line + at, text: line.strip_prefix(' ').unwrap_or(line) });
    }
    block
}

/// The comments of YAML and TOML. Consecutive comment lines are one block.
pub fn hash_comments(source: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    let mut is_open = false;
    for (at, line) in source.lines().enumerate() {
        let Some(hash) = comment_start(line) else {
            is_open = false;
            continue;
        };
        let text = &line[hash + 1..];
        let comment = Line { number: at + 1, text: text.strip_prefix(' ').unwrap_or(text) };
        let is_alone = line[..hash].trim().is_empty();
        match blocks.last_mut() {
            Some(block) if is_open && is_alone => block.push(comment),
            _ => blocks.push(vec![comment]),
        }
        is_open = is_alone;
    }
    blocks
}

/// Byte of the `#` that starts a comment: outside quotes, and first or after white space.
fn comment_start(line: &str) -> Option<usize> {
    let mut quote = None;
    let mut before = ' ';
    for (at, character) in line.char_indices() {
        match quote {
            Some(open) if character == open && before != '\\' => quote = None,
            Some(_) => {}
            None if character == '#' && before.is_whitespace() => return Some(at),
            // A quote inside a word is an apostrophe.
            None if matches!(character, '"' | '\'') && (before.is_whitespace() || "[{(,=".contains(before)) => {
                quote = Some(character);
            }
            None => {}
        }
        before = character;
    }
    None
}

/// The text of `#[error("…")]` attributes with the line of each literal.
pub fn error_texts(tokens: &[Token<'_>]) -> Vec<(usize, String)> {
    let code: Vec<_> = tokens.iter().filter(|token| !token.is_comment()).collect();
    let mut texts = Vec::new();
    for window in code.windows(5) {
        let [hash, bracket, name, parenthesis, literal] = window else { continue };
        let is_error = hash.is("#") && bracket.is("[") && name.is("error") && parenthesis.is("(");
        if is_error && literal.kind == Kind::Str {
            texts.push((literal.line, literal_text(literal.text)));
        }
    }
    texts
}

/// The value of a string literal, as far as prose needs it.
fn literal_text(literal: &str) -> String {
    let is_raw = literal.starts_with('r');
    let text = literal.trim_start_matches('r').trim_matches('#');
    let text = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
    if is_raw {
        return text.to_owned();
    }
    let mut value = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        value.push_str(before);
        let escaped = after.chars().next().unwrap_or('\\');
        rest = &after[escaped.len_utf8().min(after.len())..];
        match escaped {
            '\n' => rest = rest.trim_start(),
            'n' => value.push('\n'),
            't' => value.push(' '),
            other => value.push(other),
        }
    }
    value.push_str(rest);
    value
}

/// Names and lines of the functions with an attribute such as `#[test]` or `#[tokio::test]`.
pub fn test_names<'a>(tokens: &[Token<'a>]) -> Vec<(usize, &'a str)> {
    let code: Vec<_> = tokens.iter().filter(|token| !token.is_comment()).collect();
    let mut names = Vec::new();
    let mut is_test = false;
    for (at, token) in code.iter().enumerate() {
        let is_attribute = token.is("#") && code.get(at + 1).is_some_and(|next| next.is("["));
        if is_attribute {
            is_test |= is_test_attribute(&code[at + 2..]);
        } else if token.is("fn") {
            let name = code.get(at + 1).filter(|_| is_test);
            names.extend(name.map(|name| (name.line, name.text)));
            is_test = false;
        }
    }
    names
}

/// Whether the path of an attribute, whose tokens start `tokens`, ends with `test`.
fn is_test_attribute(tokens: &[&Token<'_>]) -> bool {
    let is_path = |token: &&&Token<'_>| token.kind == Kind::Ident || token.is(":");
    tokens.iter().take_while(is_path).last().is_some_and(|last| last.is("test"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lexer::tokens;

    fn texts(blocks: &[Block<'_>]) -> Vec<Vec<(usize, String)>> {
        let lines = |block: &Block<'_>| block.iter().map(|line| (line.number, line.text.to_owned())).collect();
        blocks.iter().map(lines).collect()
    }

    fn line(number: usize, text: &str) -> (usize, String) {
        (number, text.to_owned())
    }

    #[test]
    fn consecutive_comment_lines_are_one_block() {
        let source = "//! a\n//! b\n\n/// c\n/// d\n// e\nfn f() {} // g\n// h\n";
        let expected = [
            vec![line(1, "a"), line(2, "b")],
            vec![line(4, "c"), line(5, "d")],
            vec![line(6, "e")],
            vec![line(7, "g")],
            vec![line(8, "h")],
        ];
        assert_eq!(texts(&comments(&tokens(source))), expected);
    }

    #[test]
    fn block_comments_lose_their_stars() {
        let source = "/** a\n * b\n */\n/* c */";
        let expected = [vec![line(1, "a"), line(2, "b"), line(3, "")], vec![line(4, "c")]];
        assert_eq!(texts(&comments(&tokens(source))), expected);
    }

    #[test]
    fn comments_of_yaml_stand_outside_quotes() {
        let source = "# a\n  # b\nc: d # e\nf: \"g # h\" # i\nj: k's # l\nm: n#o\n";
        let expected = [vec![line(1, "a"), line(2, "b")], vec![line(3, "e")], vec![line(4, "i")], vec![line(5, "l")]];
        assert_eq!(texts(&hash_comments(source)), expected);
    }

    #[test]
    fn comments_of_toml_stand_outside_quotes() {
        assert_eq!(texts(&hash_comments("a = \"b # c\"\nd = ['#'] # e")), [vec![line(2, "e")]]);
    }

    #[test]
    fn error_texts_are_found_and_unescaped() {
        let source =
            "#[error(\"a {b}\")]\n#[error(\n\"c \\\n   d \\\"e\\\"\", f = \"g\")]\n#[error(transparent)]\nerror(\"h\")";
        assert_eq!(error_texts(&tokens(source)), [(1, "a {b}".to_owned()), (3, "c d \"e\"".to_owned())]);
    }

    #[test]
    fn only_functions_with_a_test_attribute_are_tests() {
        let source = "#[test] #[should_panic(expected = \"x\")] fn a() {} fn b() {}
            #[tokio::test(flavor = \"c\")] async fn d() {} #[cfg(test)] fn e() {} // #[test] fn f() {}";
        let names: Vec<_> = test_names(&tokens(source)).into_iter().map(|(_, name)| name).collect();
        assert_eq!(names, ["a", "d"]);
    }
}
