//! Words without quotes that YAML 1.1 reads as true or false, and YAML 1.2 as text. `kubectl` reads
//! YAML 1.1. So `values: {yes: 1, no: 0}` has the words `yes` and `no` here, and `true` and `false`
//! in a cluster.

use serde_json::Value;

use crate::locate::locate;
use crate::{FieldPath, Segment};

/// The most words that are looked for in the text of a manifest.
const MOST: usize = 64;

/// The value of a word in YAML 1.1. `None` for words that are text in both versions.
fn meaning(word: &str) -> Option<bool> {
    match word {
        "y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Some(true),
        "n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => Some(false),
        _ => None,
    }
}

/// A warning for each word without quotes in `text`, whose content is `document`.
pub(crate) fn warnings(document: &Value, text: &str, file: &str) -> Vec<String> {
    let mut words = Vec::new();
    collect(document, &FieldPath::root(), &mut words);
    words.truncate(MOST);
    words.iter().filter_map(|word| word.warning(text, file)).collect()
}

/// The text of a manifest with quotes around such words. `text` is as the YAML writer makes it: a
/// field or an entry a line.
pub(crate) fn quoted(text: &str) -> String {
    text.lines().map(|line| quoted_line(line) + "\n").collect()
}

/// A word of the list in a document.
struct Word<'a> {
    path: FieldPath,
    text: &'a str,
    /// Whether the word is the name of a field.
    is_name: bool,
}

impl Word<'_> {
    fn warning(&self, text: &str, file: &str) -> Option<String> {
        let (line, column) = self.plain_at(text)?;
        let Self { path, text: word, .. } = self;
        let read = meaning(word)?;
        Some(format!(
            "{file}:{line}:{column}: {path}: `kubectl` reads the word `{word}` without quotes as {read}: write '{word}'"
        ))
    }

    /// Line and column of the field or entry, if the word has no quotes.
    fn plain_at(&self, text: &str) -> Option<(usize, usize)> {
        let (line, column) = locate(text, &self.path)?;
        let rest: String = text.lines().nth(line.checked_sub(1)?)?.chars().skip(column.checked_sub(1)?).collect();
        let rest = match self.path.0.last()? {
            Segment::Key(name) if !self.is_name => value_of(&rest, name)?,
            _ => rest.as_str(),
        };
        rest.starts_with(self.text).then_some((line, column))
    }
}

/// The text after the name of a field.
fn value_of<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let names = [name.to_owned(), format!("'{name}'"), format!("\"{name}\"")];
    let rest = names.iter().find_map(|name| line.strip_prefix(name.as_str()))?;
    rest.trim_start().strip_prefix(':').map(str::trim_start)
}

fn collect<'a>(value: &'a Value, path: &FieldPath, words: &mut Vec<Word<'a>>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = path.key(name);
                if meaning(name).is_some() {
                    words.push(Word { path: path.clone(), text: name, is_name: true });
                }
                collect(value, &path, words);
            }
        }
        Value::Array(entries) => {
            entries.iter().enumerate().for_each(|(index, entry)| collect(entry, &path.index(index), words));
        }
        Value::String(text) if meaning(text).is_some() => {
            words.push(Word { path: path.clone(), text, is_name: false });
        }
        _ => {}
    }
}

fn quoted_line(line: &str) -> String {
    let mut content = line;
    while let Some(rest) = content.strip_prefix(' ').or_else(|| content.strip_prefix("- ")) {
        content = rest;
    }
    let start = line.strip_suffix(content).unwrap_or_default();
    let quoted = |part: &str| if meaning(part).is_some() { format!("'{part}'") } else { part.to_owned() };
    match (content.split_once(": "), content.strip_suffix(':')) {
        (Some((name, value)), _) => format!("{start}{}: {}", quoted(name), quoted(value)),
        (None, Some(name)) => format!("{start}{}:", quoted(name)),
        (None, None) => format!("{start}{}", quoted(content)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warned(text: &str) -> Vec<String> {
        let document: Value = serde_yaml::from_str(text).unwrap();
        warnings(&document, text, "a.yaml")
    }

    #[test]
    fn a_word_without_quotes_is_warned_of_as_name_value_and_entry() {
        let text = "label:\n  values: {yes: 1, No: 0}\n  name: off\nlist:\n- on\n- [y, a]\n\"n\": 'N'\n";
        let places =
            ["2:12: label.values.yes", "2:20: label.values.No", "3:3: label.name", "5:3: list[0]", "6:4: list[1][0]"];
        let mut found = warned(text);
        found.sort();
        assert_eq!(found.len(), places.len(), "{found:?}");
        for (found, place) in found.iter().zip(places) {
            assert!(found.starts_with(&format!("a.yaml:{place}: ")), "{place}: {found}");
        }
        assert!(found[1].ends_with("`kubectl` reads the word `No` without quotes as false: write 'No'"), "{found:?}");
    }

    #[test]
    fn quotes_and_other_words_need_no_warning() {
        assert_eq!(
            warned("a: {'yes': 1, \"no\": 'off', \"b\": \"on\"}\nc: [true, none, yesterday, 'y']\n"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn the_words_of_a_written_manifest_get_quotes() {
        let text = "a:\n  yes: 1\n  b: no\n  c:\n  - on\n  - n: off\n    d: 'no'\n  - yesterday\n";
        let expected = "a:\n  'yes': 1\n  b: 'no'\n  c:\n  - 'on'\n  - 'n': 'off'\n    d: 'no'\n  - yesterday\n";
        assert_eq!(quoted(text), expected);
        let read = |text: &str| serde_yaml::from_str::<Value>(text).unwrap();
        assert_eq!(read(text), read(expected));
    }
}
