//! What the columns of a data set mean: ids, numbers, the label, the group. Plain values; which column
//! stands where in which file is found out by [`Layout::bind`] when a file is opened.

use rectrain_kinds::{MissingValue, Transform};

use crate::error::DataError;
use crate::key::TableSeed;

/// The columns that are read and what is made of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Schema {
    /// Features that are ids, in the order of [`crate::Batch::sparse`].
    pub sparse: Vec<SparseField>,
    /// Features that are numbers, in the order of the columns of [`crate::Batch::dense`].
    pub dense: Vec<DenseField>,
    /// What is to be predicted.
    pub label: LabelField,
    /// A column whose values group the rows for grouped AUC (a user id, say). Hashed as an id of a
    /// table of the column's name.
    pub group: Option<String>,
}

/// A feature whose values are ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SparseField {
    /// The column.
    pub name: String,
    /// The table its keys belong to; features of one table share the keys of equal values.
    pub table: String,
    /// `Some(separator)`: a cell holds any number of values, with this character between them; in
    /// Parquet a list column or a text column with separators. Empty pieces and nulls are no values.
    pub multi_value: Option<char>,
    /// What a missing value is where `multi_value` is `None`.
    pub missing: MissingValue,
}

impl SparseField {
    /// Whether samples have a varying number of keys (`SparseColumn::offsets` is `Some`).
    pub fn is_variable(&self) -> bool {
        self.multi_value.is_some() || self.missing == MissingValue::Skip
    }
}

/// A feature that is a number.
#[derive(Debug, Clone, PartialEq)]
pub struct DenseField {
    /// The column.
    pub name: String,
    /// What is done to the value.
    pub transform: Transform,
    /// The value of the feature (after the transform) where the cell is empty, null or NaN.
    pub missing: f32,
}

/// The column to be predicted.
#[derive(Debug, Clone, PartialEq)]
pub struct LabelField {
    /// The column.
    pub name: String,
    /// `Some(threshold)`: the label is 1 where the value is at least the threshold, else 0. `None`: the
    /// value must lie within [0, 1] already.
    pub positive_from: Option<f32>,
}

impl LabelField {
    pub(crate) fn expected(&self) -> &'static str {
        match self.positive_from {
            Some(_) => "a number",
            None => "0 or 1 (or a number between; or set a threshold for other values)",
        }
    }

    /// The label of a value, or `None` if it is not one.
    #[inline]
    pub(crate) fn label_of(&self, value: f32) -> Option<f32> {
        match self.positive_from {
            Some(threshold) if !value.is_nan() => Some(f32::from(u8::from(value >= threshold))),
            None if (0.0..=1.0).contains(&value) => Some(value),
            _ => None,
        }
    }
}

impl Schema {
    /// Refuses what can be refused without looking at data.
    pub(crate) fn check(&self) -> Result<(), DataError> {
        for field in &self.dense {
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
        match self.label.positive_from {
            Some(threshold) if threshold.is_nan() => {
                Err(DataError::config(&format!("label `{}`", self.label.name), "the threshold must be a number"))
            }
            _ => Ok(()),
        }
    }

    /// An empty batch of this schema.
    pub fn empty_batch(&self) -> crate::Batch {
        let variable: Vec<bool> = self.sparse.iter().map(SparseField::is_variable).collect();
        crate::Batch::empty(&variable, self.dense.len(), self.group.is_some())
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
    /// The key of a missing value; `None` where it has none.
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
        let token = !field.is_variable();
        Self {
            seed,
            separator: field.multi_value.map(|c| c.encode_utf8(&mut [0; 4]).as_bytes().to_vec()),
            missing: token.then(|| seed.missing()),
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

/// Which column of a file each field of the schema is.
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
    /// Finds every column of `schema`, and the column of a time split, among `names`.
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
            problem: format!("the column `{wanted}` is there twice; rename one"),
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
        return ", and its first line looks like data: if the file has no header, say so and name \
                the columns"
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

/// The name that `wanted` is most likely a misspelling of: at most a third of its letters (and at
/// least one) may differ, upper and lower case are equal.
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
            let message = schema.check().unwrap_err().to_string();
            assert!(message.starts_with("dense feature `x`"), "{message}");
        }
    }

    #[test]
    fn a_misspelt_column_gets_its_right_name_and_an_unrelated_one_does_not() {
        let names: Vec<String> = ["user_id", "item_id", "Label", "x"].map(String::from).into();
        assert_eq!(closest(&names, "userid"), Some("user_id"));
        assert_eq!(closest(&names, "label"), Some("Label"));
        assert_eq!(closest(&names, "price"), None);
        assert_eq!(closest(&names, "q"), None);
    }

    #[test]
    fn multi_valued_cells_are_split_and_empty_pieces_are_no_values() {
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
