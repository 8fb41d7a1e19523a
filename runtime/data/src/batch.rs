//! A batch: rows in the shape that training reads, one array a feature. Sources fill batches. The
//! loader cuts and sends them.

use std::ops::Range;

use rectrain_kinds::{Schema, SparseField};

/// The ids of one sparse feature.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SparseColumn {
    /// Keys of all samples, one sample after the other (see [`crate::key`]).
    pub keys: Vec<u64>,
    /// `None`: every sample has exactly one key. `Some`: sample `i` has the keys
    /// `offsets[i]..offsets[i + 1]`, possibly none. There are `samples + 1` offsets, the first is
    /// 0.
    pub offsets: Option<Vec<u32>>,
}

impl SparseColumn {
    fn empty(variable: bool) -> Self {
        Self { keys: Vec::new(), offsets: variable.then(|| vec![0]) }
    }

    /// The range of the keys of sample `row` in `keys`.
    pub fn span(&self, row: usize) -> Range<usize> {
        match &self.offsets {
            None => row..row + 1,
            Some(offsets) => offsets[row] as usize..offsets[row + 1] as usize,
        }
    }

    /// The keys of sample `row`.
    pub fn row(&self, row: usize) -> &[u64] {
        &self.keys[self.span(row)]
    }

    fn slice(&self, rows: Range<usize>) -> Self {
        match &self.offsets {
            None => Self { keys: self.keys[rows].to_vec(), offsets: None },
            Some(offsets) => {
                let (from, to) = (offsets[rows.start], offsets[rows.end]);
                Self {
                    keys: self.keys[from as usize..to as usize].to_vec(),
                    offsets: Some(offsets[rows.start..=rows.end].iter().map(|offset| offset - from).collect()),
                }
            }
        }
    }

    fn append(&mut self, other: &Self, rows: Range<usize>) {
        match (&mut self.offsets, &other.offsets) {
            (None, None) => self.keys.extend_from_slice(&other.keys[rows]),
            (Some(mine), Some(theirs)) => {
                let (from, to) = (theirs[rows.start], theirs[rows.end]);
                let base = self.keys.len();
                assert!(
                    base + (to - from) as usize <= u32::MAX as usize,
                    "more than 2^32 keys of one feature in one batch"
                );
                let base = base as u32;
                self.keys.extend_from_slice(&other.keys[from as usize..to as usize]);
                mine.extend(theirs[rows.start + 1..=rows.end].iter().map(|offset| base + (offset - from)));
            }
            _ => panic!("batches of different schemas cannot be joined"),
        }
    }

    fn permute(&self, order: &[u32]) -> Self {
        let Some(offsets) = &self.offsets else {
            return Self { keys: order.iter().map(|&row| self.keys[row as usize]).collect(), offsets: None };
        };
        let mut keys = Vec::with_capacity(self.keys.len());
        let mut permuted = Vec::with_capacity(offsets.len());
        permuted.push(0);
        for &row in order {
            keys.extend_from_slice(self.row(row as usize));
            permuted.push(keys.len() as u32);
        }
        Self { keys, offsets: Some(permuted) }
    }

    fn truncate(&mut self, samples: usize) {
        match &mut self.offsets {
            None => self.keys.truncate(samples),
            Some(offsets) => {
                offsets.truncate(samples + 1);
                self.keys.truncate(offsets[samples] as usize);
            }
        }
    }
}

/// The texts of one column that travel with the rows, unchanged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TextColumn {
    bytes: Vec<u8>,
    /// Where the text of each row ends in `bytes`.
    ends: Vec<usize>,
    /// Whether the cell of each row is null.
    nulls: Vec<bool>,
}

impl TextColumn {
    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.ends.len()
    }

    /// The text of row `row`, which need not be UTF-8. `None` for a null of Parquet.
    pub fn text(&self, row: usize) -> Option<&[u8]> {
        (!self.nulls[row]).then(|| &self.bytes[self.start(row)..self.ends[row]])
    }

    pub(crate) fn push(&mut self, text: Option<&[u8]>) {
        self.bytes.extend_from_slice(text.unwrap_or_default());
        self.ends.push(self.bytes.len());
        self.nulls.push(text.is_none());
    }

    fn start(&self, row: usize) -> usize {
        row.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    fn append(&mut self, other: &Self, rows: impl IntoIterator<Item = usize>) {
        rows.into_iter().for_each(|row| self.push(other.text(row)));
    }

    fn pick(&self, rows: impl IntoIterator<Item = usize>) -> Self {
        let mut picked = Self::default();
        picked.append(self, rows);
        picked
    }

    fn truncate(&mut self, rows: usize) {
        self.ends.truncate(rows);
        self.nulls.truncate(rows);
        self.bytes.truncate(self.ends.last().copied().unwrap_or(0));
    }
}

/// Rows of a data set. Sparse and dense columns are in the order of the schema's fields.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Number of rows.
    pub samples: usize,
    /// One column for each sparse field.
    pub sparse: Vec<SparseColumn>,
    /// Number of dense fields.
    pub dense_width: usize,
    /// Transformed dense features, row-major `[samples, dense_width]`.
    pub dense: Vec<f32>,
    /// Labels in [0, 1], `[samples]`. NaN in a file without a label column, which only
    /// [`SourceConfig::label_is_optional`](crate::SourceConfig::label_is_optional) allows.
    pub labels: Vec<f32>,
    /// The hashed group of each row, for grouped AUC, or [`NO_GROUP`](rectrain_kinds::NO_GROUP).
    /// `None` if the schema names no group.
    pub groups: Option<Vec<u64>>,
    /// The event time of each row, in whole seconds since 1970. `None` if the schema names no
    /// column of times.
    pub times: Option<Vec<u64>>,
    /// One column for each of [`SourceConfig::carried`](crate::SourceConfig::carried).
    pub carried: Vec<TextColumn>,
}

impl Batch {
    /// A batch of no rows of this schema.
    pub fn of_schema(schema: &Schema) -> Self {
        let variable: Vec<bool> = schema.sparse.iter().map(SparseField::is_variable).collect();
        let times = schema.time.is_some().then(Vec::new);
        Self { times, ..Self::empty(&variable, schema.dense.len(), schema.group.is_some()) }
    }

    /// A batch of no rows and without times. `variable` says for each sparse field whether the
    /// number of keys varies between samples.
    pub fn empty(variable: &[bool], dense_width: usize, grouped: bool) -> Self {
        Self {
            samples: 0,
            sparse: variable.iter().map(|&v| SparseColumn::empty(v)).collect(),
            dense_width,
            dense: Vec::new(),
            labels: Vec::new(),
            groups: grouped.then(Vec::new),
            times: None,
            carried: Vec::new(),
        }
    }

    /// A copy of the rows `rows`. Panics if the batch does not have all of them, as a slice does.
    pub fn slice(&self, rows: Range<usize>) -> Self {
        let width = self.dense_width;
        Self {
            samples: rows.len(),
            sparse: self.sparse.iter().map(|c| c.slice(rows.clone())).collect(),
            dense_width: width,
            dense: self.dense[rows.start * width..rows.end * width].to_vec(),
            labels: self.labels[rows.clone()].to_vec(),
            groups: self.groups.as_ref().map(|g| g[rows.clone()].to_vec()),
            times: self.times.as_ref().map(|times| times[rows.clone()].to_vec()),
            carried: self.carried.iter().map(|c| c.pick(rows.clone())).collect(),
        }
    }

    /// Appends the rows `rows` of `other`. Panics if the two have different schemas.
    pub fn append(&mut self, other: &Self, rows: Range<usize>) {
        assert!(
            self.sparse.len() == other.sparse.len()
                && self.dense_width == other.dense_width
                && self.carried.len() == other.carried.len(),
            "batches of different schemas cannot be joined"
        );
        let width = self.dense_width;
        for (mine, theirs) in self.sparse.iter_mut().zip(&other.sparse) {
            mine.append(theirs, rows.clone());
        }
        self.dense.extend_from_slice(&other.dense[rows.start * width..rows.end * width]);
        self.labels.extend_from_slice(&other.labels[rows.clone()]);
        self.samples += rows.len();
        for (mine, theirs) in self.carried.iter_mut().zip(&other.carried) {
            mine.append(theirs, rows.clone());
        }
        append_words(&mut self.groups, other.groups.as_deref(), rows.clone());
        append_words(&mut self.times, other.times.as_deref(), rows);
    }

    /// All rows of all batches, in order. An empty list gives an empty batch without columns.
    /// Panics if the batches have different schemas.
    pub fn concat(batches: &[Self]) -> Self {
        let Some((first, rest)) = batches.split_first() else {
            return Self::default();
        };
        let mut all = first.clone();
        for batch in rest {
            all.append(batch, 0..batch.samples);
        }
        all
    }

    /// Row `i` of the result is row `order[i]` of this one. `order` is usually a permutation, but
    /// may also leave rows out or repeat them.
    pub fn permute(&self, order: &[u32]) -> Self {
        let width = self.dense_width;
        let mut dense = Vec::with_capacity(order.len() * width);
        for &row in order {
            let at = row as usize * width;
            dense.extend_from_slice(&self.dense[at..at + width]);
        }
        let pick = |values: &[u64]| order.iter().map(|&row| values[row as usize]).collect();
        Self {
            samples: order.len(),
            sparse: self.sparse.iter().map(|c| c.permute(order)).collect(),
            dense_width: width,
            dense,
            labels: order.iter().map(|&r| self.labels[r as usize]).collect(),
            groups: self.groups.as_deref().map(pick),
            times: self.times.as_deref().map(pick),
            carried: self.carried.iter().map(|c| c.pick(order.iter().map(|&row| row as usize))).collect(),
        }
    }

    /// The latest event time of the rows, in seconds since 1970. 0 without times or rows.
    pub fn latest(&self) -> u64 {
        self.times.iter().flatten().copied().max().unwrap_or(0)
    }

    /// Sum of the labels. If it is 0 or the number of samples over a whole epoch, all labels are
    /// equal and nothing can be learned.
    pub fn label_sum(&self) -> f64 {
        self.labels.iter().map(|&label| f64::from(label)).sum()
    }

    /// Number of ids over all sparse features.
    pub fn ids(&self) -> usize {
        self.sparse.iter().map(|column| column.keys.len()).sum()
    }

    /// Bytes of the arrays.
    pub fn size_bytes(&self) -> usize {
        let offsets = |c: &SparseColumn| c.offsets.as_ref().map_or(0, Vec::len);
        let sparse = self.sparse.iter().map(|c| c.keys.len() * 8 + offsets(c) * 4);
        sparse.sum::<usize>()
            + (self.dense.len() + self.labels.len()) * 4
            + (self.groups.as_ref().map_or(0, Vec::len) + self.times.as_ref().map_or(0, Vec::len)) * 8
    }

    /// Makes room for `rows` more rows of one key a feature.
    pub(crate) fn reserve(&mut self, rows: usize) {
        for column in &mut self.sparse {
            column.keys.reserve(rows);
            if let Some(offsets) = &mut column.offsets {
                offsets.reserve(rows);
            }
        }
        self.dense.reserve(rows * self.dense_width);
        self.labels.reserve(rows);
        for words in [&mut self.groups, &mut self.times].into_iter().flatten() {
            words.reserve(rows);
        }
    }

    /// Removes everything beyond the first `samples` rows, including a row that is only partly
    /// written.
    pub(crate) fn truncate(&mut self, samples: usize) {
        for column in &mut self.sparse {
            column.truncate(samples);
        }
        self.dense.truncate(samples * self.dense_width);
        self.labels.truncate(samples);
        for words in [&mut self.groups, &mut self.times].into_iter().flatten() {
            words.truncate(samples);
        }
        self.carried.iter_mut().for_each(|column| column.truncate(samples));
        self.samples = samples;
    }
}

/// Appends words of rows that both batches have or both lack. Panics otherwise.
fn append_words(mine: &mut Option<Vec<u64>>, theirs: Option<&[u64]>, rows: Range<usize>) {
    match (mine, theirs) {
        (None, None) => {}
        (Some(mine), Some(theirs)) => mine.extend_from_slice(&theirs[rows]),
        _ => panic!("batches of different schemas cannot be joined"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A row as plain values.
    type Row = (u64, Vec<u64>, Vec<f32>, f32, u64);

    fn batch_of(rows: &[Row]) -> Batch {
        let mut batch = Batch { times: Some(Vec::new()), ..Batch::empty(&[false, true], 2, true) };
        for (one, many, dense, label, group) in rows {
            batch.sparse[0].keys.push(*one);
            batch.sparse[1].keys.extend(many);
            let end = batch.sparse[1].keys.len() as u32;
            batch.sparse[1].offsets.as_mut().unwrap().push(end);
            batch.dense.extend(dense);
            batch.labels.push(*label);
            batch.groups.as_mut().unwrap().push(*group);
            batch.times.as_mut().unwrap().push(group / 2);
            batch.samples += 1;
        }
        batch
    }

    fn rows() -> impl Strategy<Value = Vec<Row>> {
        let row = (
            any::<u64>(),
            prop::collection::vec(any::<u64>(), 0..4),
            prop::collection::vec(-9.0_f32..9.0, 2),
            0.0_f32..1.0,
            any::<u64>(),
        );
        prop::collection::vec(row, 0..20)
    }

    proptest! {
        #[test]
        fn slice_concat_and_permute_agree_with_lists_of_rows(
            rows in rows(), cut in 0_usize..20, seed in any::<u64>()
        ) {
            let batch = batch_of(&rows);
            let cut = cut.min(rows.len());
            prop_assert_eq!(batch.slice(0..cut), batch_of(&rows[..cut]));
            prop_assert_eq!(batch.slice(cut..rows.len()), batch_of(&rows[cut..]));
            let halves = [batch.slice(0..cut), batch.slice(cut..rows.len())];
            prop_assert_eq!(&Batch::concat(&halves), &batch);
            let order = crate::chunk_permutation(seed, 0, 0, rows.len() as u32);
            let permuted: Vec<Row> = order.iter().map(|&i| rows[i as usize].clone()).collect();
            prop_assert_eq!(batch.permute(&order), batch_of(&permuted));
            let mut cut_off = batch.clone();
            cut_off.sparse[0].keys.push(1);
            cut_off.sparse[1].keys.push(1);
            cut_off.dense.push(1.0);
            cut_off.truncate(cut);
            prop_assert_eq!(cut_off, batch_of(&rows[..cut]));
        }
    }

    #[test]
    fn carried_texts_stay_with_their_rows() {
        let texts = |column: &TextColumn| -> Vec<Option<Vec<u8>>> {
            (0..column.rows()).map(|row| column.text(row).map(<[u8]>::to_vec)).collect()
        };
        let mut column = TextColumn::default();
        for text in [Some(&b"a"[..]), None, Some(b""), Some(b"bcd")] {
            column.push(text);
        }
        let all = texts(&column);
        assert_eq!(all, [Some(b"a".to_vec()), None, Some(vec![]), Some(b"bcd".to_vec())]);
        assert_eq!(texts(&column.pick([3, 1])), [all[3].clone(), all[1].clone()]);
        column.truncate(2);
        column.append(&column.clone(), 0..1);
        assert_eq!(texts(&column), [all[0].clone(), None, all[0].clone()]);
    }

    #[test]
    fn the_label_sum_shows_a_training_set_of_one_label() {
        let row = |label| (1, vec![], vec![0.0, 0.0], label, 1);
        assert_eq!(batch_of(&[row(0.0), row(0.0)]).label_sum(), 0.0);
        assert_eq!(batch_of(&[row(1.0), row(0.0)]).label_sum(), 1.0);
    }

    #[test]
    fn the_latest_row_times_a_batch() {
        let rows = [9, 41, 20].map(|group| (1, vec![], vec![0.0, 0.0], 1.0, group));
        assert_eq!((batch_of(&rows).latest(), Batch::empty(&[], 0, false).latest()), (20, 0));
    }

    #[test]
    #[should_panic(expected = "different schemas")]
    fn batches_of_different_schemas_are_not_joined() {
        Batch::concat(&[Batch::empty(&[false], 1, false), Batch::empty(&[true], 1, false)]);
    }
}
