//! Syntax errors of YAML in the words of the mistake: a tab, a field that is there twice, or a text
//! that needs quotes. The parser reports them as positions in its grammar.

/// A line and a column, both from 1.
type Place = (usize, usize);

/// A syntax error as a user needs it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Explained {
    pub(crate) place: Option<Place>,
    pub(crate) reason: String,
}

/// Explains the parser's `reason` for refusing `text` at `place`.
pub(crate) fn explain_syntax(text: &str, place: Option<Place>, reason: &str) -> Explained {
    tab(text, place)
        .or_else(|| duplicate(text, place, reason))
        .or_else(|| unquoted(text, place, reason))
        .unwrap_or_else(|| Explained { place, reason: reason.to_string() })
}

/// A tab that indents the line of the error, or the line before it.
fn tab(text: &str, place: Option<Place>) -> Option<Explained> {
    let (line, _) = place?;
    let mut numbers = [line, line.saturating_sub(1)].into_iter().filter(|number| *number > 0);
    numbers.find_map(|number| {
        let content = text.lines().nth(number - 1)?;
        let column = content.find(|c: char| c != ' ').filter(|&column| content[column..].starts_with('\t'))?;
        Some(Explained {
            place: Some((number, column + 1)),
            reason: "a tab indents this line, and YAML takes only spaces there: replace the tab with spaces"
                .to_string(),
        })
    })
}

/// A field that an object has twice. The parser reports the place of the object.
fn duplicate(text: &str, place: Option<Place>, reason: &str) -> Option<Explained> {
    let (_, name) = reason.split_once("duplicate entry with key \"")?;
    let name = name.strip_suffix('"')?;
    let lines = place.map(|place| lines_of(text, place, name)).unwrap_or_default();
    let [first, second, ..] = lines[..] else {
        return Some(Explained { place, reason: format!("the field `{name}` is there twice: remove one of them") });
    };
    Some(Explained {
        place: Some(second),
        reason: format!("the field `{name}` is there twice, first in line {}: remove one of them", first.0),
    })
}

/// The parser's reasons for a text that begins with a character of YAML, and these characters.
const UNQUOTED: [(&str, &str); 3] = [
    ("did not find expected alphabetic or numeric character", "*&"),
    ("unknown anchor", "*"),
    ("found character that cannot start any token", "|>%@`"),
];

/// A text without quotes that begins with a character of YAML, as `*.csv` does. The parser reports
/// the character, or a place after it.
fn unquoted(text: &str, place: Option<Place>, reason: &str) -> Option<Explained> {
    let (_, marks) = UNQUOTED.iter().find(|(known, _)| reason.contains(known))?;
    let (line, column) = place?;
    let before: Vec<char> = text.lines().nth(line.checked_sub(1)?)?.chars().take(column).collect();
    let (index, first) = before.iter().enumerate().rev().find(|(_, c)| marks.contains(**c))?;
    Some(Explained {
        place: Some((line, index + 1)),
        reason: format!("a text cannot begin with `{first}` without quotes: put it in quotes ('…')"),
    })
}

/// The places of a field's name in a block of YAML: the lines from `start` on with the same
/// indentation, up to the end of the block.
fn lines_of(text: &str, start: Place, name: &str) -> Vec<Place> {
    let (line, column) = start;
    let mut places = Vec::new();
    for (index, content) in text.lines().enumerate().skip(line.saturating_sub(1)) {
        let field = content.trim_start_matches(' ');
        let indentation = content.len() - field.len();
        // The first field of a list's entry stands after a dash.
        let is_first = index + 1 == line;
        if !is_first && indentation + 1 < column && !field.is_empty() && !field.starts_with('#') {
            break;
        }
        let at = if is_first { column } else { indentation + 1 };
        let field = content.get(at - 1..).unwrap_or_default();
        let quoted = [name.to_string(), format!("\"{name}\""), format!("'{name}'")];
        let is_named =
            |name: &String| field.strip_prefix(name.as_str()).is_some_and(|rest| rest.trim_start().starts_with(':'));
        if at == column && quoted.iter().any(is_named) {
            places.push((index + 1, at));
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tab_is_named() {
        let found = explain_syntax("spec:\n\tmodel: {}\n", Some((2, 1)), "found character that cannot start any token");
        assert_eq!(found.place, Some((2, 1)));
        assert!(found.reason.starts_with("a tab indents this line"), "{found:?}");
        let reason = "did not find expected key";
        assert_eq!(explain_syntax("a:\n  b: 1\tc\n", Some((2, 3)), reason).reason, reason);
    }

    #[test]
    fn a_duplicate_field_is_found_at_its_second_place() {
        let text = "spec:\n  model: {}\n  data:\n    model: 1\n  # model:\n  model: {}\nother:\n  model: {}\n";
        let found = explain_syntax(text, Some((2, 3)), "spec: duplicate entry with key \"model\"");
        assert_eq!(found.place, Some((6, 3)));
        assert_eq!(found.reason, "the field `model` is there twice, first in line 2: remove one of them");
    }

    #[test]
    fn a_text_that_needs_quotes_is_named() {
        let [alias, anchor, token] = UNQUOTED.map(|(reason, _)| reason);
        for (text, place, reason, first, column) in [
            ("paths: [*.parquet]", (1, 10), alias, '*', 9),
            ("paths: [*day.csv]", (1, 13), alias, '*', 9),
            ("paths: [*day]", (1, 9), anchor, '*', 9),
            ("a: {separator: |}", (1, 16), token, '|', 16),
            ("delimiter: %", (1, 12), token, '%', 12),
        ] {
            let found = explain_syntax(text, Some(place), reason);
            assert_eq!(found.place, Some((1, column)), "{text}");
            assert!(found.reason.starts_with(&format!("a text cannot begin with `{first}`")), "{text}: {found:?}");
        }
        assert_eq!(explain_syntax("a: b", Some((1, 3)), token).reason, token);
    }

    #[test]
    fn a_duplicate_field_on_one_line_keeps_its_place() {
        let found = explain_syntax("spec: {a: 1, a: 2}\n", Some((1, 7)), "spec: duplicate entry with key \"a\"");
        assert_eq!(found.place, Some((1, 7)));
        assert_eq!(found.reason, "the field `a` is there twice: remove one of them");
    }
}
