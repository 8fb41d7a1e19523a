//! Schemas in use: which values are refused, how ids become keys, and where a file has each column.

use rectrain_kinds::{DenseField, LabelField, NO_GROUP, Schema, SparseField, Transform};

use crate::batch::{Batch, TextColumn};
use crate::error::{DataError, shown};
use crate::key::TableKeys;
use crate::null::{NullValues, may_be_marker};
use crate::number::parse_f32;
use crate::remarks::Remarks;
use crate::spelling::{Id, IdValue, Spelling, trim};

/// The values that a label column may have, for an error message about a cell with another one.
pub(crate) fn expected_label(label: &LabelField, found: &str) -> String {
    let found = found.trim();
    if !label.values.is_empty() {
        return expected_word(label, found);
    }
    let is_word = !found.is_empty() && found.parse::<f64>().is_err();
    let expected = match (label.positive_from, is_word) {
        (None, false) => "0 or 1 (or a number between; for other values set spec.features.label.positiveFrom)",
        (None, true) => "0 or 1 (for words set spec.features.label.values, such as {'yes': 1, 'no': 0})",
        (Some(_), false) => "a number that 64-bit floats can hold",
        (Some(_), true) => "a number (for words set spec.features.label.values instead of positiveFrom)",
    };
    expected.to_owned()
}

/// The most words of a label that an error lists.
const LISTED_WORDS: usize = 8;

/// The words of a label, for an error message about another text.
fn expected_word(label: &LabelField, found: &str) -> String {
    let words = label.values.keys().take(LISTED_WORDS).map(|word| format!("`{}`", shown(word.as_bytes())));
    let listed = words.collect::<Vec<_>>().join(", ");
    let more = match label.values.len().saturating_sub(LISTED_WORDS) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let is_alike = label.values.keys().any(|word| word.to_lowercase() == found.to_lowercase());
    let case = if is_alike { "; upper and lower case differ" } else { "" };
    format!("one of the words {listed}{more} (spec.features.label.values{case})")
}

/// Dense values, for an error message about a number that is too large.
const HELD_NUMBER: &str = "a number within ±3.4e38, the range of 32-bit floats";

/// Dense values, for an error message about a number with a transform that is too large.
const HELD_TRANSFORM: &str = "a number with a transform within ±3.4e38, the range of 32-bit floats";

/// Cells with several values, for an error message about a list in brackets.
pub(crate) const NO_BRACKETS: &str = "values with the separator between them, and not a list in brackets such as \
                                      [1, 2]; write the values without brackets and quotes";

/// Floats as ids, for an error message.
pub(crate) const FLOAT_IDS: &str = "ids that are integers, which 64-bit floats hold below 2^53, 32-bit floats below \
                                    2^24 and 16-bit floats below 2^11; write integers or text";

/// Whether a cell is a list in brackets, as JSON, Python and SQL write it. If the reader cut it at
/// the separator, its brackets and quotes would become parts of ids.
///
/// The brackets must belong together: `(a) b (c)` is no list. One phrase in parentheses is a value,
/// as in MovieLens: `(no genres listed)`.
pub(crate) fn is_bracketed_list(cell: &[u8], separator: &[u8]) -> bool {
    let cell = trim(cell);
    let [open @ (b'[' | b'(' | b'{'), inner @ .., last] = cell else { return false };
    let close = match open {
        b'[' => b']',
        b'(' => b')',
        _ => b'}',
    };
    if *last != close || !closes_at_end(inner, *open, close) {
        return false;
    }
    let begins_a_value = matches!(inner.trim_ascii().first(), None | Some(b'"' | b'\'' | b'-' | b'0'..=b'9'));
    let has_several = inner.contains(&b',') || memchr::memmem::find(inner, separator).is_some();
    *open != b'(' || begins_a_value || has_several
}

/// Whether no bracket between an opening and a closing one closes the opening one.
fn closes_at_end(inner: &[u8], open: u8, close: u8) -> bool {
    let mut depth = 0_usize;
    for &byte in inner {
        if byte == open {
            depth += 1;
        } else if byte == close {
            match depth.checked_sub(1) {
                Some(less) => depth = less,
                None => return false,
            }
        }
    }
    true
}

/// Dense values, for an error message about a number beyond the limit of its feature.
const WITHIN_LIMIT: &str = "a number within the `limit` of the feature, because larger ones freeze optimizers; correct \
                            it, or choose a transform such as log1p, or set the limit";

/// The model's input for a number, which is not NaN, or the expected number.
#[inline]
fn dense_input(field: &DenseField, value: f32) -> Result<f32, &'static str> {
    let input = field.transform.apply(value);
    if input.abs() <= field.limit {
        return Ok(input);
    }
    Err(match (value.is_finite(), input.is_finite()) {
        (false, _) => HELD_NUMBER,
        (true, false) => HELD_TRANSFORM,
        (true, true) => WITHIN_LIMIT,
    })
}

/// The model's input for a number, or the expected one. NaN is a missing value.
#[inline]
pub(crate) fn dense_number(field: &DenseField, value: f32) -> Result<f32, &'static str> {
    if value.is_nan() { Ok(field.missing) } else { dense_input(field, value) }
}

/// The model's input for a text cell, or the expected number.
#[inline]
pub(crate) fn dense_text(field: &DenseField, cell: &[u8], nulls: &NullValues) -> Result<f32, &'static str> {
    if cell.is_empty() {
        return Ok(field.missing);
    }
    match parse_f32(cell) {
        None if nulls.contains(trim(cell)) => Ok(field.missing),
        None => Err("a number"),
        Some(value) => dense_number(field, value),
    }
}

/// Refuses settings that no data can satisfy.
pub(crate) fn check(schema: &Schema) -> Result<(), DataError> {
    for field in &schema.dense {
        let setting = format!("dense feature `{}`", field.name);
        let fail = |problem: &str| Err(DataError::config(&setting, problem));
        match field.transform {
            Transform::Standardize { mean, std } if !(std > 0.0 && std.is_finite() && mean.is_finite()) => {
                return fail("standardize needs a finite mean and a finite std above 0");
            }
            Transform::MinMax { min, max } if !(max > min && min.is_finite() && max.is_finite()) => {
                return fail("minMax needs a finite min below a finite max");
            }
            _ if !field.missing.is_finite() => {
                return fail("the value for missing cells must be finite");
            }
            _ if field.limit.is_nan() || field.limit <= 0.0 => {
                return fail("the limit must be above 0");
            }
            _ => {}
        }
    }
    match schema.label.positive_from {
        Some(threshold) if threshold.is_nan() => {
            Err(DataError::config(&format!("label `{}`", schema.label.name), "the threshold must be a number"))
        }
        _ => Ok(()),
    }
}

/// Cells of the column of event times, for an error message.
pub(crate) const EVENT_TIMES: &str = "a time: a number in the `unit` of spec.data.timeColumn, or a date such as \
                                      2026-11-03T10:00:00Z (with `order` if its year comes last)";

/// The schema, prepared for the row loop: seeds hashed, separators encoded.
#[derive(Debug)]
pub(crate) struct Encoder {
    pub(crate) schema: Schema,
    pub(crate) sparse: Vec<SparseEncoder>,
    pub(crate) group: Option<SparseEncoder>,
    pub(crate) nulls: NullValues,
    /// Columns whose texts travel with the rows.
    pub(crate) carried: Vec<String>,
    /// Whether every file must have the label column.
    pub(crate) needs_label: bool,
}

/// The encoder of a column of ids.
#[derive(Debug)]
pub(crate) struct SparseEncoder {
    pub(crate) table: TableKeys,
    nulls: NullValues,
    /// The separator's bytes; `None` for a single-valued feature.
    pub(crate) separator: Option<Vec<u8>>,
    /// The key of a missing value. `None` if a missing value has no key.
    pub(crate) missing: Option<u64>,
    /// The warnings about ids of this column.
    pub(crate) remarks: Remarks,
}

impl Encoder {
    pub(crate) fn new(schema: Schema, null_values: &[String]) -> Self {
        let nulls = NullValues::new(null_values);
        let sparse = schema.sparse.iter().map(|field| SparseEncoder::new(field, &nulls)).collect();
        let group = schema.group.as_deref().map(|column| SparseEncoder::of_group(column, &nulls));
        Self { schema, sparse, group, nulls, carried: Vec::new(), needs_label: true }
    }

    /// A batch of no rows.
    pub(crate) fn empty_batch(&self) -> Batch {
        let carried = vec![TextColumn::default(); self.carried.len()];
        Batch { carried, ..Batch::of_schema(&self.schema) }
    }
}

impl SparseEncoder {
    fn new(field: &SparseField, nulls: &NullValues) -> Self {
        let table = TableKeys::of(field);
        let has_token = !field.is_variable();
        Self {
            table,
            nulls: nulls.clone(),
            separator: field.multi_value.as_ref().map(|separator| separator.as_bytes().to_vec()),
            missing: has_token.then(|| table.missing()),
            remarks: Remarks::new(&field.name),
        }
    }

    /// The encoder of the column that groups rows. A missing value is no group.
    fn of_group(column: &str, nulls: &NullValues) -> Self {
        Self {
            table: TableKeys::new(column, None),
            nulls: nulls.clone(),
            separator: None,
            missing: Some(NO_GROUP),
            remarks: Remarks::new(column),
        }
    }

    /// Appends the keys of one text cell. `false` if the row is a bad one, because a value is a
    /// float that may have lost digits.
    #[inline]
    pub(crate) fn push_text(&self, cell: &[u8], keys: &mut Vec<u64>) -> bool {
        match &self.separator {
            None => self.push_value(cell, self.missing, keys),
            Some(separator) => {
                let mut are_ids = true;
                for piece in pieces(cell, separator) {
                    are_ids &= self.push_value(piece, None, keys);
                }
                are_ids
            }
        }
    }

    /// Appends the key of the text of one item of a list, as [`SparseEncoder::push_text`]. An empty
    /// text is not an item.
    pub(crate) fn push_item(&self, item: &[u8], keys: &mut Vec<u64>) -> bool {
        self.push_value(item, None, keys)
    }

    /// The expected values, if a text cell makes its row a bad one.
    pub(crate) fn fault(&self, cell: &[u8]) -> Option<&'static str> {
        let has_rounded = match &self.separator {
            None => Id::read(cell).is_rounded(),
            Some(separator) if is_bracketed_list(cell, separator) => return Some(NO_BRACKETS),
            Some(separator) => pieces(cell, separator).any(|piece| Id::read(piece).is_rounded()),
        };
        has_rounded.then_some(FLOAT_IDS)
    }

    #[inline]
    fn push_value(&self, text: &[u8], missing: Option<u64>, keys: &mut Vec<u64>) -> bool {
        let id = Id::read(text);
        match id.spelling {
            Spelling::Plain => {}
            Spelling::ZeroPadded => self.remarks.note_leading_zeros(),
            Spelling::Float | Spelling::RoundedFloat => self.remarks.note_floats(),
        }
        keys.extend(self.key(id.value).or(missing));
        !id.is_rounded()
    }

    /// The key of an id, or `None` if it is missing.
    #[inline]
    fn key(&self, id: IdValue<'_>) -> Option<u64> {
        if let IdValue::Text(text) = id {
            if self.nulls.contains(text) {
                return None;
            }
            if may_be_marker(text) {
                self.remarks.note_marker(text);
            }
        }
        Some(self.table.id(id))
    }
}

/// The texts between the separators of a cell.
fn pieces<'a>(cell: &'a [u8], separator: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let mut from = 0;
    let ends = memchr::memmem::find_iter(cell, separator).chain(std::iter::once(cell.len()));
    ends.map(move |end| {
        let piece = &cell[from..end];
        from = end + separator.len();
        piece
    })
}

/// The columns of a file, by the fields of the schema.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) names: Vec<String>,
    pub(crate) sparse: Vec<usize>,
    pub(crate) dense: Vec<usize>,
    /// `None` if the file lacks the column and need not have it.
    pub(crate) label: Option<usize>,
    pub(crate) group: Option<usize>,
    pub(crate) time: Option<usize>,
    /// The column of event times.
    pub(crate) clock: Option<usize>,
    pub(crate) carried: Vec<usize>,
}

impl Layout {
    /// Finds every column of the schema, the carried ones, and the column of a split by time, among
    /// `names`.
    pub(crate) fn bind(
        file: &str,
        names: Vec<String>,
        encoder: &Encoder,
        time: Option<&str>,
    ) -> Result<Self, DataError> {
        let schema = &encoder.schema;
        // A prediction takes its columns from a model, and not from a manifest.
        let has_manifest = encoder.needs_label;
        let find = |wanted: &str, setting: &str| {
            let found = find_column(file, &names, wanted);
            if has_manifest { found.map_err(|error| name_the_setting(error, setting)) } else { found }
        };
        let has_label = encoder.needs_label || names.contains(&schema.label.name);
        let sparse = schema.sparse.iter().map(|field| find(&field.name, "spec.features.sparse"));
        let dense = schema.dense.iter().map(|field| find(&field.name, "spec.features.dense"));
        let carried = encoder.carried.iter().map(|column| find_column(file, &names, column));
        Ok(Self {
            sparse: sparse.collect::<Result<_, _>>()?,
            dense: dense.collect::<Result<_, _>>()?,
            label: has_label.then(|| find(&schema.label.name, LABEL)).transpose()?,
            group: schema.group.as_deref().map(|column| find(column, "spec.features.group")).transpose()?,
            time: time.map(|column| find(column, "spec.data.split.time.column")).transpose()?,
            clock: schema.time.as_ref().map(|time| find(&time.name, "spec.data.timeColumn.name")).transpose()?,
            carried: carried.collect::<Result<_, _>>()?,
            names,
        })
    }
}

/// The setting of the label's column.
const LABEL: &str = "spec.features.label.name";

/// Adds the field of the manifest that names the column to an error about a missing column.
fn name_the_setting(error: DataError, setting: &str) -> DataError {
    match error {
        DataError::MissingColumn { file, column, hint, available } => {
            let hint = match (hint.as_str(), setting) {
                ("", LABEL) => format!(": set {LABEL} to the column to predict"),
                // Another delimiter, and not the name, is at fault.
                (hint, _) if hint.starts_with(':') => hint.to_owned(),
                (hint, _) => format!(" ({setting}){hint}"),
            };
            DataError::MissingColumn { file, column, hint, available }
        }
        other => other,
    }
}

/// The place of a column among `names`. A column that is missing or there twice is an error.
pub(crate) fn find_column(file: &str, names: &[String], wanted: &str) -> Result<usize, DataError> {
    let mut found = names.iter().enumerate().filter(|(_, name)| *name == wanted);
    match (found.next(), found.next()) {
        (Some((column, _)), None) => Ok(column),
        (Some(_), Some(_)) => Err(DataError::Header {
            file: file.to_owned(),
            problem: format!("the column `{wanted}` is there twice; rename one of them"),
        }),
        (None, _) => Err(DataError::MissingColumn {
            file: file.to_owned(),
            column: wanted.to_owned(),
            hint: hint(names, wanted),
            available: listed(names),
        }),
    }
}

fn hint(names: &[String], wanted: &str) -> String {
    if let Some(delimiter) = other_delimiter(names, wanted) {
        return format!(
            ": `{delimiter}` seems to separate its cells: set spec.data.csv.delimiter to it (a tab is written \\t)"
        );
    }
    if let Some(close) = closest(names, wanted) {
        return format!(", did you mean `{close}`?");
    }
    let looks_like_data = |name: &String| name.is_empty() || name.parse::<f64>().is_ok();
    if names.iter().any(looks_like_data) {
        return ", and its first line looks like data: if the file has no header, say so and name the columns"
            .to_owned();
    }
    String::new()
}

/// The text that separates the columns of a file that was cut at another text, so that it seems to
/// have a single column.
fn other_delimiter(names: &[String], wanted: &str) -> Option<&'static str> {
    let [header] = names else { return None };
    let is_it = |delimiter: &&str| header.split(*delimiter).any(|name| name.trim().trim_matches('"') == wanted);
    let delimiter = [";", "\t", "|", ","].into_iter().find(is_it).filter(|_| header != wanted)?;
    Some(if delimiter == "\t" { "\\t" } else { delimiter })
}

pub(crate) fn listed(names: &[String]) -> String {
    const SHOWN: usize = 60;
    let mut text = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}

/// The name that `wanted` most likely misspells. At most a third of its letters (and at least one)
/// may differ, where two letters that changed places are one difference. Upper and lower case are
/// equal.
pub(crate) fn closest<'a>(names: &'a [String], wanted: &str) -> Option<&'a str> {
    let allowed = (wanted.chars().count() / 3).max(1);
    names
        .iter()
        .map(|name| (strsim::osa_distance(&name.to_lowercase(), &wanted.to_lowercase()), name))
        .filter(|(distance, name)| *distance <= allowed && *distance < name.chars().count())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name.as_str())
}

#[cfg(test)]
mod tests {
    use rectrain_kinds::MissingValue;

    use super::*;

    #[test]
    fn transforms_are_their_formulas() {
        let cases = [
            (Transform::Identity, -2.5, -2.5),
            (Transform::Log1p, 9.0, 10.0_f32.ln()),
            (Transform::Log1p, -3.0, 0.0),
            (Transform::SignedLog1p, -9.0, -(10.0_f32.ln())),
            (Transform::SignedLog1p, 0.0, 0.0),
            (Transform::Standardize { mean: 2.0, std: 4.0 }, 10.0, 2.0),
            (Transform::MinMax { min: -1.0, max: 3.0 }, 1.0, 0.5),
        ];
        for (transform, x, expected) in cases {
            assert!((transform.apply(x) - expected).abs() < 1e-6, "{transform:?}({x})");
        }
    }

    #[test]
    fn a_label_of_another_value_names_the_setting_for_it() {
        let numbers = LabelField::of_numbers("y", None);
        assert!(expected_label(&numbers, "5").contains("label.positiveFrom"));
        assert!(expected_label(&numbers, " no ").contains("label.values, such as {'yes': 1, 'no': 0}"));
        assert!(!expected_label(&numbers, "").contains("label.values"));
        let threshold = LabelField::of_numbers("y", Some(4.0));
        assert!(expected_label(&threshold, "good").contains("label.values instead of positiveFrom"));
        assert_eq!(expected_label(&threshold, "1e999"), "a number that 64-bit floats can hold");
        let of_words = |words: &[&str]| LabelField {
            values: words.iter().map(|word| ((*word).to_owned(), 1.0)).collect(),
            ..LabelField::of_numbers("y", None)
        };
        let two = of_words(&["No", "Yes"]);
        assert_eq!(expected_label(&two, "maybe"), "one of the words `No`, `Yes` (spec.features.label.values)");
        assert!(expected_label(&two, "no").ends_with("(spec.features.label.values; upper and lower case differ)"));
        let many = of_words(&["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]);
        assert!(expected_label(&many, "z").contains("`h` and 2 more (spec"), "{}", expected_label(&many, "z"));
    }

    #[test]
    fn transforms_that_would_divide_by_zero_are_refused() {
        for transform in [
            Transform::Standardize { mean: 0.0, std: 0.0 },
            Transform::Standardize { mean: 0.0, std: f32::NAN },
            Transform::MinMax { min: 1.0, max: 1.0 },
        ] {
            let schema = Schema {
                sparse: vec![],
                dense: vec![DenseField { name: "x".into(), transform, missing: 0.0, limit: 1e15 }],
                label: LabelField::of_numbers("y", None),
                group: None,
                time: None,
            };
            let message = check(&schema).unwrap_err().to_string();
            assert!(message.starts_with("dense feature `x`"), "{message}");
        }
    }

    #[test]
    fn lists_in_brackets_are_recognized() {
        let lists = [
            "[1, 2]",
            " [] ",
            "[\"a\", \"b\"]",
            "['a']",
            "[-1]",
            "[ 7 ]",
            "[a, b]",
            "[a|b]",
            "[a]",
            "(1, 2)",
            "(1)",
            "()",
            "('a',)",
            "(a|b)",
            "{1,2}",
            "{a}",
            "{}",
            "[[1], [2]]",
            "((1, 2), (3, 4))",
        ];
        for cell in lists {
            assert!(is_bracketed_list(cell.as_bytes(), b"|"), "{cell}");
        }
        let others = [
            "",
            "[",
            "]",
            "[1",
            "1]",
            "[0, 5)",
            "[a] b",
            "a|[1]",
            "[a]|[b]",
            "(500) Days|Up (2009)",
            "(no genres listed)",
        ];
        for cell in others {
            assert!(!is_bracketed_list(cell.as_bytes(), b"|"), "{cell}");
        }
    }

    #[test]
    fn each_warning_about_ids_is_given_once_a_column() {
        let noted = |cells: &[&str]| {
            let field = SparseField {
                name: "g".into(),
                table: "g".into(),
                multi_value: None,
                missing: MissingValue::Token,
                hash_buckets: None,
            };
            let encoder = SparseEncoder::new(&field, &NullValues::new(&["None".into()]));
            let mut keys = vec![];
            assert!(cells.iter().all(|cell| encoder.push_text(cell.as_bytes(), &mut keys)));
            encoder.remarks.noted()
        };
        assert_eq!(noted(&["5", "abc", "None", "", "+5", "Namibia"]), [false; 3]);
        assert_eq!(noted(&["5.0", "6.0e+00"]), [true, false, false]);
        assert_eq!(noted(&["0005", "05"]), [false, true, false]);
        assert_eq!(noted(&["NA", "<NA>"]), [false, false, true]);
    }

    #[test]
    fn another_delimiter_is_named() {
        for (header, delimiter) in [("label;user", ";"), ("label\tuser", "\\t"), ("\"label\"|\"user\"", "|")] {
            let hint = hint(&[header.to_owned()], "user");
            assert!(hint.starts_with(&format!(": `{delimiter}` seems to separate its cells")), "{hint}");
        }
        assert_eq!(other_delimiter(&["label;user".to_owned()], "item"), None);
        assert_eq!(other_delimiter(&["label;user".to_owned(), "b".to_owned()], "user"), None);
    }

    #[test]
    fn a_misspelt_column_gets_a_suggestion() {
        let names: Vec<String> = ["user_id", "item_id", "Label", "x"].map(String::from).into();
        assert_eq!(closest(&names, "userid"), Some("user_id"));
        assert_eq!(closest(&names, "label"), Some("Label"));
        assert_eq!(closest(&names, "price"), None);
        assert_eq!(closest(&names, "q"), None);
    }

    #[test]
    fn empty_pieces_of_a_cell_are_not_values() {
        let field = |separator: Option<&str>, missing| {
            let multi_value = separator.map(str::to_owned);
            SparseField { name: "g".into(), table: "g".into(), multi_value, missing, hash_buckets: None }
        };
        let keys = |field: &SparseField, cell: &str| {
            let mut keys = vec![];
            let nulls = NullValues::new(&["NULL".into()]);
            assert!(SparseEncoder::new(field, &nulls).push_text(cell.as_bytes(), &mut keys));
            keys
        };
        let seed = crate::key::TableSeed::of("g");
        let multi = field(Some("|"), MissingValue::Token);
        assert_eq!(keys(&multi, "a|7||b|"), [seed.text(b"a"), seed.integer(7), seed.text(b"b")]);
        assert!(keys(&multi, "").is_empty() && keys(&multi, "null| NULL ").is_empty());
        let wide = field(Some("→"), MissingValue::Skip);
        assert_eq!(keys(&wide, "a→b"), [seed.text(b"a"), seed.text(b"b")]);
        let several = field(Some("::"), MissingValue::Skip);
        assert_eq!(keys(&several, "a:b::::7"), [seed.text(b"a:b"), seed.integer(7)]);
        assert_eq!(keys(&field(None, MissingValue::Token), ""), [seed.missing()]);
        assert_eq!(keys(&field(None, MissingValue::Token), " null"), [seed.missing()]);
        assert!(keys(&field(None, MissingValue::Skip), "").is_empty());
        assert_eq!(keys(&field(None, MissingValue::Skip), "a|b"), [seed.text(b"a|b")]);
    }
}
