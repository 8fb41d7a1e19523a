//! Schemas in use: which values are refused, how ids become keys, and where a file has each column.

use rectrain_kinds::{LabelField, Schema, SparseField, Transform};

use crate::error::DataError;
use crate::key::TableSeed;

/// The values that a label column may have, for an error message.
pub(crate) fn expected_label(label: &LabelField) -> &'static str {
    match label.positive_from {
        Some(_) => "a number",
        None => "0 or 1 (or a number between; or set a threshold for other values)",
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

/// The schema, prepared for the row loop: seeds hashed, separators encoded.
#[derive(Debug)]
pub(crate) struct Encoder {
    pub(crate) schema: Schema,
    pub(crate) sparse: Vec<SparseEncoder>,
    pub(crate) group: Option<TableSeed>,
}

#[derive(Debug)]
pub(crate) struct SparseEncoder {
    pub(crate) seed: TableSeed,
    /// The separator's bytes; `None` for a single-valued feature.
    pub(crate) separator: Option<Vec<u8>>,
    /// The key of a missing value. `None` if a missing value has no key.
    pub(crate) missing: Option<u64>,
}

impl Encoder {
    pub(crate) fn new(schema: Schema) -> Self {
        let sparse = schema.sparse.iter().map(SparseEncoder::new).collect();
        let group = schema.group.as_deref().map(TableSeed::of);
        Self { schema, sparse, group }
    }
}

impl SparseEncoder {
    fn new(field: &SparseField) -> Self {
        let seed = TableSeed::of(&field.table);
        let has_token = !field.is_variable();
        Self {
            seed,
            separator: field.multi_value.map(|c| c.encode_utf8(&mut [0; 4]).as_bytes().to_vec()),
            missing: has_token.then(|| seed.missing()),
        }
    }

    /// Appends the keys of one text cell.
    #[inline]
    pub(crate) fn push_text(&self, cell: &[u8], keys: &mut Vec<u64>) {
        match (&self.separator, cell.is_empty()) {
            (_, true) => keys.extend(self.missing),
            (None, false) => keys.push(self.seed.text(cell)),
            (Some(separator), false) => self.push_pieces(cell, separator, keys),
        }
    }

    fn push_pieces(&self, cell: &[u8], separator: &[u8], keys: &mut Vec<u64>) {
        let mut from = 0;
        let mut push = |piece: &[u8]| {
            if !piece.is_empty() {
                keys.push(self.seed.text(piece));
            }
        };
        for at in memchr::memmem::find_iter(cell, separator) {
            push(&cell[from..at]);
            from = at + separator.len();
        }
        push(&cell[from..]);
    }
}

/// The columns of a file, by the fields of the schema.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) names: Vec<String>,
    pub(crate) sparse: Vec<usize>,
    pub(crate) dense: Vec<usize>,
    pub(crate) label: usize,
    pub(crate) group: Option<usize>,
    pub(crate) time: Option<usize>,
}

impl Layout {
    /// Finds every column of `schema`, and the column of a split by time, among `names`.
    pub(crate) fn bind(file: &str, names: Vec<String>, schema: &Schema, time: Option<&str>) -> Result<Self, DataError> {
        let find = |wanted: &str| find_column(file, &names, wanted);
        Ok(Self {
            sparse: schema.sparse.iter().map(|field| find(&field.name)).collect::<Result<_, _>>()?,
            dense: schema.dense.iter().map(|field| find(&field.name)).collect::<Result<_, _>>()?,
            label: find(&schema.label.name)?,
            group: schema.group.as_deref().map(find).transpose()?,
            time: time.map(find).transpose()?,
            names,
        })
    }
}

fn find_column(file: &str, names: &[String], wanted: &str) -> Result<usize, DataError> {
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

fn listed(names: &[String]) -> String {
    const SHOWN: usize = 60;
    let mut text = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}

/// The name that `wanted` most likely misspells. At most a third of its letters (and at least one)
/// may differ. Upper and lower case are equal.
pub(crate) fn closest<'a>(names: &'a [String], wanted: &str) -> Option<&'a str> {
    let allowed = (wanted.chars().count() / 3).max(1);
    names
        .iter()
        .map(|name| (distance(&name.to_lowercase(), &wanted.to_lowercase()), name))
        .filter(|(distance, name)| *distance <= allowed && *distance < name.chars().count())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name.as_str())
}

/// Levenshtein's edit distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use rectrain_kinds::{DenseField, MissingValue};

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
    fn transforms_that_would_divide_by_zero_are_refused() {
        for transform in [
            Transform::Standardize { mean: 0.0, std: 0.0 },
            Transform::Standardize { mean: 0.0, std: f32::NAN },
            Transform::MinMax { min: 1.0, max: 1.0 },
        ] {
            let schema = Schema {
                sparse: vec![],
                dense: vec![DenseField { name: "x".into(), transform, missing: 0.0 }],
                label: LabelField { name: "y".into(), positive_from: None },
                group: None,
            };
            let message = check(&schema).unwrap_err().to_string();
            assert!(message.starts_with("dense feature `x`"), "{message}");
        }
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
        let field = |multi_value, missing| SparseField { name: "g".into(), table: "g".into(), multi_value, missing };
        let keys = |field: &SparseField, cell: &str| {
            let mut keys = vec![];
            SparseEncoder::new(field).push_text(cell.as_bytes(), &mut keys);
            keys
        };
        let seed = TableSeed::of("g");
        let multi = field(Some('|'), MissingValue::Token);
        assert_eq!(keys(&multi, "a|7||b|"), [seed.text(b"a"), seed.integer(7), seed.text(b"b")]);
        assert!(keys(&multi, "").is_empty());
        let wide = field(Some('→'), MissingValue::Skip);
        assert_eq!(keys(&wide, "a→b"), [seed.text(b"a"), seed.text(b"b")]);
        assert_eq!(keys(&field(None, MissingValue::Token), ""), [seed.missing()]);
        assert!(keys(&field(None, MissingValue::Skip), "").is_empty());
        assert_eq!(keys(&field(None, MissingValue::Skip), "a|b"), [seed.text(b"a|b")]);
    }
}
