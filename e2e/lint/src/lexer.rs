//! A lexer for Rust source.
//!
//! It separates comments, literals and code, and nothing more: every punctuation character is a
//! token of its own. The lexer accepts any input. An unterminated literal or comment ends at the
//! end of the file.

/// The kind of a [`Token`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An identifier or keyword. The text of a raw identifier contains its `r#`.
    Ident,
    /// A lifetime or label, with its quote.
    Lifetime,
    /// A character or byte literal.
    Char,
    /// A string literal of any form, with prefix, hashes and quotes.
    Str,
    /// A number, with its suffix.
    Number,
    /// A single punctuation character.
    Punct,
    /// `// …` without the line break.
    LineComment,
    /// `/* … */`, nested comments included.
    BlockComment,
}

/// A piece of source text that is not white space.
#[derive(Clone, Copy, Debug)]
pub struct Token<'a> {
    pub kind: Kind,
    pub text: &'a str,
    /// The line of the first character, from 1.
    pub line: usize,
}

impl Token<'_> {
    /// Whether this is the punctuation character or identifier `text`.
    pub fn is(&self, text: &str) -> bool {
        matches!(self.kind, Kind::Ident | Kind::Punct) && self.text == text
    }

    pub fn is_comment(&self) -> bool {
        matches!(self.kind, Kind::LineComment | Kind::BlockComment)
    }

    /// The line of the last character, from 1.
    pub fn last_line(&self) -> usize {
        self.line + line_breaks(self.text)
    }
}

/// Splits `source` into tokens, comments included.
pub fn tokens(source: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut rest = source;
    let mut line = 1;
    loop {
        let trimmed = rest.trim_start();
        line += line_breaks(&rest[..rest.len() - trimmed.len()]);
        let Some(first) = trimmed.chars().next() else { return tokens };
        let (kind, length) = next(trimmed, first);
        let (text, after) = trimmed.split_at(length);
        tokens.push(Token { kind, text, line });
        line += line_breaks(text);
        rest = after;
    }
}

fn line_breaks(text: &str) -> usize {
    text.bytes().filter(|&byte| byte == b'\n').count()
}

/// Kind and length in bytes of the token at the start of `text`, whose first character is `first`.
fn next(text: &str, first: char) -> (Kind, usize) {
    if text.starts_with("//") {
        return (Kind::LineComment, text.find('\n').unwrap_or(text.len()));
    }
    if text.starts_with("/*") {
        return (Kind::BlockComment, block_comment(text));
    }
    match first {
        '"' => (Kind::Str, quoted(text, 0, '"')),
        '\'' => quote(text),
        '0'..='9' => (Kind::Number, number(text)),
        _ if starts_identifier(first) => identifier(text),
        _ => (Kind::Punct, first.len_utf8()),
    }
}

fn starts_identifier(character: char) -> bool {
    character == '_' || character.is_alphabetic()
}

fn continues_identifier(character: char) -> bool {
    character == '_' || character.is_alphanumeric()
}

/// Length of the identifier characters at the start of `text`.
fn identifier_length(text: &str) -> usize {
    text.find(|character| !continues_identifier(character)).unwrap_or(text.len())
}

/// Length of a block comment, which may contain others.
fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// Length of a literal with escapes, whose opening quote is at byte `start`.
fn quoted(text: &str, start: usize, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, character) in text.char_indices().skip_while(|(at, _)| *at <= start) {
        if is_escaped {
            is_escaped = false;
        } else if character == '\\' {
            is_escaped = true;
        } else if character == quote {
            return at + character.len_utf8();
        }
    }
    text.len()
}

/// A token that starts with a single quote: a character literal or a lifetime.
fn quote(text: &str) -> (Kind, usize) {
    let mut characters = text.chars().skip(1);
    match (characters.next(), characters.next()) {
        (Some('\\'), _) | (Some(_), Some('\'')) => (Kind::Char, quoted(text, 0, '\'')),
        (Some(first), _) if starts_identifier(first) => (Kind::Lifetime, 1 + identifier_length(&text[1..])),
        _ => (Kind::Punct, 1),
    }
}

/// Length of a number. The dot of `1..2` and of `1.max(2)` is not part of it.
fn number(text: &str) -> usize {
    let whole = identifier_length(text);
    let fraction = &text[whole..];
    let has_fraction = fraction.starts_with('.') && fraction[1..].starts_with(|next: char| next.is_ascii_digit());
    if has_fraction { whole + 1 + identifier_length(&fraction[1..]) } else { whole }
}

/// An identifier, or a literal with a prefix such as `r"…"`, `br#"…"#` and `b'…'`.
fn identifier(text: &str) -> (Kind, usize) {
    let length = identifier_length(text);
    let (prefix, rest) = text.split_at(length);
    match prefix {
        "r" | "br" | "cr" if rest.starts_with(['"', '#']) => raw(text, length),
        "b" | "c" if rest.starts_with('"') => (Kind::Str, quoted(text, length, '"')),
        "b" if rest.starts_with('\'') => (Kind::Char, quoted(text, length, '\'')),
        _ => (Kind::Ident, length),
    }
}

/// A raw string whose hashes or quote start at byte `start`, or a raw identifier.
fn raw(text: &str, start: usize) -> (Kind, usize) {
    let hashes = text[start..].bytes().take_while(|&byte| byte == b'#').count();
    let open = start + hashes;
    if !text[open..].starts_with('"') {
        return (Kind::Ident, open + identifier_length(&text[open..]));
    }
    let close = format!("\"{}", "#".repeat(hashes));
    let body = open + 1;
    let length = text[body..].find(&close).map_or(text.len(), |at| body + at + close.len());
    (Kind::Str, length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lexed(source: &str) -> Vec<(Kind, &str)> {
        tokens(source).iter().map(|token| (token.kind, token.text)).collect()
    }

    #[test]
    fn a_comment_marker_in_a_string_is_no_comment() {
        let source = r##"f("// a", r"/* b", r#"" // c"#, b"// d", '"', "\" // e") // f"##;
        let comments: Vec<_> = tokens(source).into_iter().filter(Token::is_comment).map(|token| token.text).collect();
        assert_eq!(comments, ["// f"]);
    }

    #[test]
    fn block_comments_nest() {
        assert_eq!(lexed("/* a /* b */ c */ d"), [(Kind::BlockComment, "/* a /* b */ c */"), (Kind::Ident, "d")]);
    }

    #[test]
    fn lifetimes_and_characters_differ() {
        let expected = [
            (Kind::Lifetime, "'a"),
            (Kind::Char, "'a'"),
            (Kind::Char, "'\\''"),
            (Kind::Char, "'é'"),
            (Kind::Char, "b'x'"),
            (Kind::Lifetime, "'static"),
        ];
        assert_eq!(lexed(r"'a 'a' '\'' 'é' b'x' 'static"), expected);
    }

    #[test]
    fn raw_identifiers_are_identifiers() {
        assert_eq!(lexed("r#type r"), [(Kind::Ident, "r#type"), (Kind::Ident, "r")]);
    }

    #[test]
    fn ranges_and_methods_end_a_number() {
        let texts: Vec<_> = lexed("0..1.5e3 2.max(3)").into_iter().map(|(_, text)| text).collect();
        assert_eq!(texts, ["0", ".", ".", "1.5e3", "2", ".", "max", "(", "3", ")"]);
    }

    #[test]
    fn lines_count_from_one_across_literals() {
        let lines: Vec<_> =
            tokens("a\n\"b\nc\"\n/* d\n*/ e").iter().map(|token| (token.line, token.last_line())).collect();
        assert_eq!(lines, [(1, 1), (2, 3), (4, 5), (5, 5)]);
    }

    #[test]
    fn unterminated_input_ends_with_the_file() {
        for source in ["\"a", "r#\"a\"", "/* a", "'", "b'", "'\\"] {
            assert!(!tokens(source).is_empty(), "{source}");
        }
    }
}
