//! Reads the members of a JSON object (RFC 8259) where they stand. Numbers keep their text, so that
//! a value has the same meaning in JSON and in CSV. Pure functions over byte slices.

use std::borrow::Cow;

/// The deepest nesting of lists and objects.
const MOST_NESTED: usize = 64;

/// A value where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Json<'a> {
    Null,
    Bool(bool),
    /// The text of a number.
    Number(&'a [u8]),
    /// The content of a string.
    Text(Cow<'a, [u8]>),
    /// The text of a list.
    List(&'a [u8]),
    /// The text of an object.
    Object,
}

/// A text that is no JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadJson {
    /// Bytes before the place.
    pub(crate) at: usize,
    /// The expectation there.
    pub(crate) expected: &'static str,
}

type Read<T> = Result<T, BadJson>;

/// Calls `member` with each member of the object that is the whole text.
pub(crate) fn read_object<'a>(text: &'a [u8], mut member: impl FnMut(Cow<'a, [u8]>, Json<'a>)) -> Read<()> {
    let mut reader = Reader { text, at: 0, depth: 0 };
    reader.object(&mut member)?;
    reader.end()
}

/// Calls `item` with each item of the list that is the whole text.
pub(crate) fn read_list<'a>(text: &'a [u8], mut item: impl FnMut(Json<'a>)) -> Read<()> {
    let mut reader = Reader { text, at: 0, depth: 0 };
    reader.list(&mut item)?;
    reader.end()
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
    depth: usize,
}

impl<'a> Reader<'a> {
    fn expected<T>(&self, expected: &'static str) -> Read<T> {
        Err(BadJson { at: self.at, expected })
    }

    fn pass_blanks(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.text.get(self.at) {
            self.at += 1;
        }
    }

    /// The next byte that is no blank.
    fn peek(&mut self) -> Option<u8> {
        self.pass_blanks();
        self.text.get(self.at).copied()
    }

    /// Passes over a byte, if it is the next one that is no blank.
    fn pass(&mut self, byte: u8) -> bool {
        let is_next = self.peek() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    fn end(&mut self) -> Read<()> {
        match self.peek() {
            None => Ok(()),
            Some(_) => self.expected("nothing behind the value"),
        }
    }

    fn enter(&mut self) -> Read<()> {
        self.depth += 1;
        if self.depth > MOST_NESTED { self.expected("less nesting") } else { Ok(()) }
    }

    fn object(&mut self, member: &mut dyn FnMut(Cow<'a, [u8]>, Json<'a>)) -> Read<()> {
        if !self.pass(b'{') {
            return self.expected("a JSON object");
        }
        self.enter()?;
        let mut is_first = true;
        while !self.pass(b'}') {
            if !is_first && !self.pass(b',') {
                return self.expected("`,` or `}`");
            }
            is_first = false;
            if self.peek() != Some(b'"') {
                return self.expected("the name of a member in quotes");
            }
            let name = self.string()?;
            if !self.pass(b':') {
                return self.expected("`:`");
            }
            let value = self.value()?;
            member(name, value);
        }
        self.depth -= 1;
        Ok(())
    }

    fn list(&mut self, item: &mut dyn FnMut(Json<'a>)) -> Read<()> {
        if !self.pass(b'[') {
            return self.expected("a list");
        }
        self.enter()?;
        let mut is_first = true;
        while !self.pass(b']') {
            if !is_first && !self.pass(b',') {
                return self.expected("`,` or `]`");
            }
            is_first = false;
            let value = self.value()?;
            item(value);
        }
        self.depth -= 1;
        Ok(())
    }

    fn value(&mut self) -> Read<Json<'a>> {
        let next = self.peek();
        let from = self.at;
        match next {
            Some(b'"') => Ok(Json::Text(self.string()?)),
            Some(b'{') => self.object(&mut |_, _| {}).map(|()| Json::Object),
            Some(b'[') => {
                self.list(&mut |_| {})?;
                Ok(Json::List(&self.text[from..self.at]))
            }
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => self.word(),
        }
    }

    fn word(&mut self) -> Read<Json<'a>> {
        for (word, value) in [(&b"null"[..], Json::Null), (b"true", Json::Bool(true)), (b"false", Json::Bool(false))] {
            if self.text[self.at..].starts_with(word) {
                self.at += word.len();
                return Ok(value);
            }
        }
        self.expected("a value")
    }

    fn digits(&mut self) -> usize {
        let from = self.at;
        while self.text.get(self.at).is_some_and(u8::is_ascii_digit) {
            self.at += 1;
        }
        self.at - from
    }

    fn pass_one_of(&mut self, bytes: &[u8]) -> bool {
        let is_next = self.text.get(self.at).is_some_and(|byte| bytes.contains(byte));
        self.at += usize::from(is_next);
        is_next
    }

    fn number(&mut self) -> Read<Json<'a>> {
        let from = self.at;
        self.pass_one_of(b"-");
        if self.digits() == 0 || self.pass_one_of(b".") && self.digits() == 0 {
            return self.expected("a digit");
        }
        if self.pass_one_of(b"eE") {
            self.pass_one_of(b"+-");
            if self.digits() == 0 {
                return self.expected("a digit");
            }
        }
        Ok(Json::Number(&self.text[from..self.at]))
    }

    /// The content of the string that begins at the quote at `self.at`.
    fn string(&mut self) -> Read<Cow<'a, [u8]>> {
        self.at += 1;
        let from = self.at;
        let mut unescaped: Option<Vec<u8>> = None;
        loop {
            let rest = &self.text[self.at..];
            let Some(next) = memchr::memchr2(b'"', b'\\', rest) else { return self.expected("a closing quote") };
            let plain = &rest[..next];
            if let Some(text) = &mut unescaped {
                text.extend_from_slice(plain);
            }
            self.at += next + 1;
            if rest[next] == b'"' {
                let all = &self.text[from..self.at - 1];
                return Ok(unescaped.map_or(Cow::Borrowed(all), Cow::Owned));
            }
            let text = unescaped.get_or_insert_with(|| self.text[from..self.at - 1].to_vec());
            let mut escaped = std::mem::take(text);
            self.escape(&mut escaped)?;
            unescaped = Some(escaped);
        }
    }

    /// Appends the character behind a backslash.
    fn escape(&mut self, into: &mut Vec<u8>) -> Read<()> {
        let Some(&byte) = self.text.get(self.at) else { return self.expected("a character") };
        self.at += 1;
        into.push(match byte {
            b'"' | b'\\' | b'/' => byte,
            b'n' => b'\n',
            b't' => b'\t',
            b'r' => b'\r',
            b'b' => 8,
            b'f' => 12,
            b'u' => {
                let character = self.unicode()?;
                into.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                return Ok(());
            }
            _ => return self.expected("an escape such as \\n"),
        });
        Ok(())
    }

    /// The character of an escape such as `\u00e9`. Half of a pair is a replacement character.
    fn unicode(&mut self) -> Read<char> {
        let high = self.four_digits()?;
        if !(0xd800..0xdc00).contains(&high) || !self.text[self.at..].starts_with(b"\\u") {
            return Ok(char::from_u32(high).unwrap_or(char::REPLACEMENT_CHARACTER));
        }
        self.at += 2;
        let low = self.four_digits()?;
        let code = 0x1_0000 + ((high - 0xd800) << 10) + low.wrapping_sub(0xdc00);
        let is_pair = (0xdc00..0xe000).contains(&low);
        Ok(char::from_u32(code).filter(|_| is_pair).unwrap_or(char::REPLACEMENT_CHARACTER))
    }

    fn four_digits(&mut self) -> Read<u32> {
        let digits = self.text.get(self.at..self.at + 4).and_then(|digits| std::str::from_utf8(digits).ok());
        let digits = digits.filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        match digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()) {
            Some(code) => {
                self.at += 4;
                Ok(code)
            }
            None => self.expected("four hexadecimal digits"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn members(text: &str) -> Read<Vec<(String, Json<'_>)>> {
        let mut found = Vec::new();
        let name = |name: Cow<'_, [u8]>| String::from_utf8(name.into_owned()).unwrap();
        read_object(text.as_bytes(), |key, value| found.push((name(key), value)))?;
        Ok(found)
    }

    fn text(text: &str) -> Json<'_> {
        Json::Text(Cow::Borrowed(text.as_bytes()))
    }

    #[test]
    fn values_keep_their_text() {
        let found =
            members(r#" {"a": 1.50, "b":-0e+7 ,"c":null,"d":true,"e":"x", "f":[1, "y",[]],"g":{"h":[{}]},"":""} "#);
        let expected = [
            ("a", Json::Number(b"1.50")),
            ("b", Json::Number(b"-0e+7")),
            ("c", Json::Null),
            ("d", Json::Bool(true)),
            ("e", text("x")),
            ("f", Json::List(br#"[1, "y",[]]"#)),
            ("g", Json::Object),
            ("", text("")),
        ];
        assert_eq!(found.unwrap(), expected.map(|(name, value)| (name.to_owned(), value)));
        let mut items = Vec::new();
        read_list(br#"[1, "y",[]]"#, |item| items.push(item)).unwrap();
        assert_eq!(items, [Json::Number(b"1"), text("y"), Json::List(b"[]")]);
    }

    #[test]
    fn escapes_are_undone() {
        let found = members(r#"{"a\n\"b":"\u00e9\/\ud83d\ude00\ud83d!\\"}"#).unwrap();
        assert_eq!(found, [("a\n\"b".to_owned(), text("é/😀\u{fffd}!\\"))]);
    }

    #[test]
    fn a_text_that_is_no_json_is_refused_with_the_place() {
        for (bad, at, expected) in [
            ("", 0, "a JSON object"),
            ("[1]", 0, "a JSON object"),
            ("{", 1, "the name of a member in quotes"),
            (r#"{"a" 1}"#, 5, "`:`"),
            (r#"{"a":1,}"#, 7, "the name of a member in quotes"),
            (r#"{"a":1 "b":2}"#, 7, "`,` or `}`"),
            (r#"{"a":nan}"#, 5, "a value"),
            (r#"{"a":1.}"#, 7, "a digit"),
            (r#"{"a":"x}"#, 6, "a closing quote"),
            (r#"{"a":"\x"}"#, 8, "an escape such as \\n"),
            (r#"{"a":1}}"#, 7, "nothing behind the value"),
        ] {
            assert_eq!(members(bad).unwrap_err(), BadJson { at, expected }, "{bad}");
        }
        let deep = format!("{{\"a\":{}", "[".repeat(100_000));
        assert_eq!(members(&deep).unwrap_err().expected, "less nesting");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in r#"[{}\[\]",:\\u0-9a-f \-.e]{0,40}"#) {
            let _read = members(&bytes);
        }
    }
}
