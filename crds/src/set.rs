//! `--set path=value`, with Helm's grammar. Commas separate assignments, dots lead to fields,
//! `a[0].b` is an entry, `{x,y}` is a list, and `null` removes a field. A `\` makes the next
//! character literal. Values that look like true, false, an integer or a number become one. With
//! `--set-string` all values are text.

use serde_json::{Map, Value};

use crate::{FieldPath, Segment};

/// The interpretation of an expression's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SetKind {
    /// `--set`: true, false, null, integers and numbers are recognised.
    Infer,
    /// `--set-string`: every value is text.
    Text,
}

impl SetKind {
    /// The flag of the command line.
    pub fn flag(self) -> &'static str {
        match self {
            SetKind::Infer => "--set",
            SetKind::Text => "--set-string",
        }
    }
}

/// An error in a `--set` expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{flag} {expression}: {problem}")]
pub struct SetError {
    /// The flag of the expression.
    pub flag: &'static str,
    /// The whole expression.
    pub expression: String,
    /// The problem, and the expectation.
    pub problem: String,
}

/// The deepest path, like Helm's limit.
const MAX_DEPTH: usize = 30;
/// The largest index. No list of a manifest is longer.
const MAX_INDEX: usize = 4_096;

/// Applies one expression to a manifest, and returns the paths it changed.
///
/// # Errors
/// An expression without value or path, or a path that does not match the manifest (a field of a
/// text, for example). The manifest may then have some of the expression's assignments.
pub fn apply_set(manifest: &mut Value, expression: &str, kind: SetKind) -> Result<Vec<FieldPath>, SetError> {
    let fail = |problem| SetError { flag: kind.flag(), expression: expression.to_string(), problem };
    let assignments = parse(expression, kind).map_err(fail)?;
    let mut changed = Vec::new();
    for (path, value) in assignments {
        assign(manifest, &path.0, value, &FieldPath::root()).map_err(fail)?;
        changed.push(path);
    }
    Ok(changed)
}

type Assignment = (FieldPath, Option<Value>);

fn parse(expression: &str, kind: SetKind) -> Result<Vec<Assignment>, String> {
    let mut rest = Scanner { chars: expression.chars().peekable() };
    let mut assignments = Vec::new();
    loop {
        let path = rest.path()?;
        let value = rest.value(kind)?;
        assignments.push((path, value));
        match rest.chars.next() {
            None => return Ok(assignments),
            Some(',') => {}
            Some(other) => return Err(format!("expected a comma or the end after `}}`, found `{other}`")),
        }
    }
}

struct Scanner<'a> {
    chars: std::iter::Peekable<std::str::Chars<'a>>,
}

impl Scanner<'_> {
    /// Reads up to an unescaped character of `stops`, which it does not consume, or to the end.
    fn until(&mut self, stops: &str) -> Result<String, String> {
        let mut text = String::new();
        while let Some(&next) = self.chars.peek() {
            if stops.contains(next) {
                break;
            }
            self.chars.next();
            if next == '\\' {
                text.push(self.chars.next().ok_or("nothing follows the last `\\`: write `\\\\` for a backslash")?);
            } else {
                text.push(next);
            }
        }
        Ok(text)
    }

    /// Reads `a.b[0].c=`.
    fn path(&mut self) -> Result<FieldPath, String> {
        let mut path = FieldPath::root();
        loop {
            let name = self.until(".[=,")?;
            let after_index = matches!(path.0.last(), Some(Segment::Index(_)));
            match (name.is_empty(), after_index) {
                (false, _) => path.0.push(Segment::Key(name)),
                // `a[0][1]`, `a[0]=` and `a[0].b`
                (true, true) => {}
                (true, false) => {
                    return Err("expected the name of a field, such as spec.training.mode=hybrid".to_string());
                }
            }
            if path.0.len() > MAX_DEPTH {
                return Err(format!("a path goes at most {MAX_DEPTH} fields deep"));
            }
            match self.chars.next() {
                Some('=') => return Ok(path),
                Some('[') => path.0.push(Segment::Index(self.index()?)),
                Some('.') if self.chars.peek().is_none_or(|next| "=.[,".contains(*next)) => {
                    return Err("expected the name of a field after the dot".to_string());
                }
                Some('.') => {}
                _ => return Err(format!("expected `{path}=VALUE`, found no `=`")),
            }
        }
    }

    fn index(&mut self) -> Result<usize, String> {
        let digits = self.until("]")?;
        self.chars.next().ok_or("expected `]` after `[`")?;
        match digits.parse() {
            Ok(index) if index < MAX_INDEX => Ok(index),
            Ok(index) => Err(format!("no list has an entry [{index}]: expected an index below {MAX_INDEX}")),
            Err(_) => Err(format!("`[{digits}]` is not an index: expected a number from 0, such as [0]")),
        }
    }

    /// Reads the value after `=`. `None` removes the field.
    fn value(&mut self, kind: SetKind) -> Result<Option<Value>, String> {
        if self.chars.peek() != Some(&'{') {
            return Ok(infer(self.until(",")?, kind));
        }
        self.chars.next();
        let mut entries = Vec::new();
        loop {
            let text = self.until(",{}")?;
            match self.chars.next() {
                Some('}') if entries.is_empty() && text.is_empty() => return Ok(Some(entries.into())),
                Some(end @ (',' | '}')) => {
                    entries.push(infer(text, kind).unwrap_or(Value::Null));
                    if end == '}' {
                        return Ok(Some(entries.into()));
                    }
                }
                Some(_) => return Err("a list cannot be written inside a list: set its entries one by one".to_string()),
                None => return Err("expected `}` at the end of the list".to_string()),
            }
        }
    }
}

/// The value of a text. `None` is null.
fn infer(text: String, kind: SetKind) -> Option<Value> {
    if kind == SetKind::Text {
        return Some(text.into());
    }
    let digits = text.strip_prefix('-').unwrap_or(&text);
    let leading_zero =
        digits.len() > 1 && digits.starts_with('0') && !digits.starts_with("0.") && !digits.starts_with("0e");
    match text.as_str() {
        "null" => return None,
        "true" => return Some(true.into()),
        "false" => return Some(false.into()),
        _ if leading_zero || !digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') => return Some(text.into()),
        _ => {}
    }
    if let Ok(integer) = text.parse::<i64>() {
        return Some(integer.into());
    }
    if let Ok(integer) = text.parse::<u64>() {
        return Some(integer.into());
    }
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() => Some(number.into()),
        _ => Some(text.into()),
    }
}

fn assign(node: &mut Value, rest: &[Segment], value: Option<Value>, at: &FieldPath) -> Result<(), String> {
    match rest {
        [] => {
            *node = value.unwrap_or(Value::Null);
            Ok(())
        }
        [Segment::Key(name), rest @ ..] => {
            if node.is_null() {
                *node = Value::Object(Map::new());
            }
            let found = crate::check::found(node);
            let fields =
                node.as_object_mut().ok_or_else(|| format!("`{at}` is {found}, which has no field `{name}`"))?;
            if rest.is_empty() && value.is_none() {
                fields.remove(name);
                return Ok(());
            }
            assign(fields.entry(name).or_insert(Value::Null), rest, value, &at.key(name))
        }
        [Segment::Index(index), rest @ ..] => {
            if node.is_null() {
                *node = Value::Array(Vec::new());
            }
            let found = crate::check::found(node);
            let entries =
                node.as_array_mut().ok_or_else(|| format!("`{at}` is {found}, which has no entry [{index}]"))?;
            if rest.is_empty() && value.is_none() {
                if *index < entries.len() {
                    entries.remove(*index);
                }
                return Ok(());
            }
            if *index >= entries.len() {
                entries.resize(index + 1, Value::Null);
            }
            assign(&mut entries[*index], rest, value, &at.index(*index))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn set(manifest: Value, expression: &str) -> Value {
        let mut manifest = manifest;
        apply_set(&mut manifest, expression, SetKind::Infer).unwrap_or_else(|error| panic!("{error}"));
        manifest
    }

    /// The table in Helm's documentation of `helm install --set` ("The Format and Limitations of
    /// --set").
    #[test]
    fn expressions_mean_the_same_as_in_helm() {
        for (expression, expected) in [
            ("name=value", json!({"name": "value"})),
            ("a=b,c=d", json!({"a": "b", "c": "d"})),
            ("outer.inner=value", json!({"outer": {"inner": "value"}})),
            ("name={a,b,c}", json!({"name": ["a", "b", "c"]})),
            ("name={}", json!({"name": []})),
            ("servers[0].port=80", json!({"servers": [{"port": 80}]})),
            ("servers[0].port=80,servers[0].host=example", json!({"servers": [{"port": 80, "host": "example"}]})),
            (r"name=value1\,value2", json!({"name": "value1,value2"})),
            (r"nodeSelector.kubernetes\.io/role=master", json!({"nodeSelector": {"kubernetes.io/role": "master"}})),
            ("a=", json!({"a": ""})),
            ("a=b=c", json!({"a": "b=c"})),
            (r"a={x\,y,z}", json!({"a": ["x,y", "z"]})),
            (r"a=\\", json!({"a": "\\"})),
            ("a[1]=x", json!({"a": [null, "x"]})),
            ("a[0][1]=x", json!({"a": [[null, "x"]]})),
        ] {
            assert_eq!(set(json!({}), expression), expected, "{expression}");
        }
    }

    #[test]
    fn values_get_the_type_they_look_like() {
        for (text, expected) in [
            ("true", json!(true)),
            ("false", json!(false)),
            ("0", json!(0)),
            ("4096", json!(4096)),
            ("-3", json!(-3)),
            ("0.001", json!(0.001)),
            ("1e-3", json!(0.001)),
            ("-.5", json!(-0.5)),
            ("18446744073709551615", json!(18446744073709551615u64)),
            ("007", json!("007")),
            ("1.2.3", json!("1.2.3")),
            ("inf", json!("inf")),
            ("nan", json!("nan")),
            ("1e999", json!("1e999")),
            ("True", json!("True")),
            ("16Gi", json!("16Gi")),
            ("-", json!("-")),
        ] {
            assert_eq!(set(json!({}), &format!("a={text}"))["a"], expected, "{text}");
        }
    }

    #[test]
    fn set_string_takes_every_value_as_text() {
        let mut manifest = json!({});
        apply_set(&mut manifest, "a=true,b=12,c=null,d={1,2}", SetKind::Text).unwrap();
        assert_eq!(manifest, json!({"a": "true", "b": "12", "c": "null", "d": ["1", "2"]}));
    }

    #[test]
    fn null_removes_a_field_or_an_entry() {
        assert_eq!(set(json!({"a": {"b": 1, "c": 2}}), "a.b=null"), json!({"a": {"c": 2}}));
        assert_eq!(set(json!({"a": [1, 2, 3]}), "a[1]=null"), json!({"a": [1, 3]}));
        assert_eq!(set(json!({"a": 1}), "b=null"), json!({"a": 1}));
    }

    #[test]
    fn fields_that_are_not_set_are_kept() {
        let manifest = json!({"spec": {"training": {"mode": "sync", "seed": 1}}});
        assert_eq!(
            set(manifest, "spec.training.mode=hybrid"),
            json!({"spec": {"training": {"mode": "hybrid", "seed": 1}}})
        );
    }

    #[test]
    fn an_invalid_expression_is_named_with_its_problem() {
        for (expression, problem) in [
            ("spec.training.mode", "found no `=`"),
            ("a,b=1", "found no `=`"),
            ("=x", "expected the name of a field"),
            ("", "expected the name of a field"),
            ("a.=x", "after the dot"),
            ("a..b=x", "after the dot"),
            ("[0]=x", "expected the name of a field"),
            ("a[x]=1", "`[x]` is not an index"),
            ("a[-1]=1", "`[-1]` is not an index"),
            ("a[99999]=1", "below 4096"),
            ("a[0=1", "expected `]`"),
            ("a={b,c", "expected `}`"),
            ("a={{b},c}", "inside a list"),
            ("a={b}c", "expected a comma"),
            ("a=b,", "expected the name of a field"),
            ("a=b\\", "nothing follows the last"),
            ("text.x=1", "`text` is the text `t`, which has no field `x`"),
            ("text[0]=1", "`text` is the text `t`, which has no entry [0]"),
            ("list.x=1", "`list` is a list of 1, which has no field `x`"),
        ] {
            let mut manifest = json!({"text": "t", "list": [1]});
            let error = apply_set(&mut manifest, expression, SetKind::Infer).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--set {expression}: ")), "{error}");
            assert!(error.contains(problem), "{expression}: {error}");
        }
        let deep = format!("{}=1", vec!["a"; 40].join("."));
        assert!(apply_set(&mut json!({}), &deep, SetKind::Infer).unwrap_err().problem.contains("at most 30"));
    }
}
