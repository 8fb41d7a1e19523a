//! Synthetic rows. The source reads nothing: it computes each row where a cursor visits it.

use std::sync::Arc;

use rectrain_kinds::{Position, SyntheticConfig};

use super::Opening;
use crate::batch::Batch;
use crate::blocking::Stop;
use crate::error::DataError;
use crate::identity::Identity;
use crate::pace;
use crate::schema::{Encoder, Layout};
use crate::source::{Rows, Source, View, offset};
use crate::synthetic::{Drawn, Teacher};

/// The rows of a teacher, in one part.
#[derive(Debug)]
pub(crate) struct SyntheticSource {
    teacher: Arc<Teacher>,
    layout: Layout,
    encoder: Arc<Encoder>,
}

impl SyntheticSource {
    /// Prepares the distribution.
    ///
    /// # Errors
    /// Settings out of range, paths, a split by time, a column that Criteo's layout does not have.
    pub(crate) fn open(opening: &Opening<'_>, config: &SyntheticConfig) -> Result<Self, DataError> {
        if opening.time.is_some() {
            return Err(DataError::config("split", "the synthetic source has no column of time"));
        }
        if !opening.config.paths.is_empty() {
            return Err(DataError::config("paths", "the synthetic source reads no files"));
        }
        let teacher = Arc::new(Teacher::new(config.clone())?);
        let encoder = Arc::clone(opening.encoder);
        let layout = Layout::bind("the synthetic source", teacher.columns(), &encoder, None)?;
        Ok(Self { teacher, layout, encoder })
    }
}

impl Source for SyntheticSource {
    fn open(&self, view: View) -> Result<Box<dyn Rows>, DataError> {
        let all = self.estimated_rows();
        let from = if view.from.part.0 == 0 { view.from.offset.0.min(all) } else { all };
        Ok(Box::new(SyntheticRows {
            teacher: Arc::clone(&self.teacher),
            layout: self.layout.clone(),
            encoder: Arc::clone(&self.encoder),
            row: from,
            end: from.saturating_add(view.limit.unwrap_or(all)).min(all),
            drawn: Drawn::default(),
        }))
    }

    fn identity(&self) -> Identity {
        Identity::default()
    }

    fn known_rows(&self) -> Vec<u64> {
        vec![self.estimated_rows()]
    }

    fn count_rows(&self, _stop: &Stop) -> Result<u64, DataError> {
        Ok(self.estimated_rows())
    }

    fn estimated_rows(&self) -> u64 {
        self.teacher.config().all_rows()
    }

    fn teacher(&self) -> Option<&Teacher> {
        Some(&self.teacher)
    }
}

/// Cursor over the rows of a teacher.
struct SyntheticRows {
    teacher: Arc<Teacher>,
    layout: Layout,
    encoder: Arc<Encoder>,
    row: u64,
    end: u64,
    drawn: Drawn,
}

impl SyntheticRows {
    fn append(&self, batch: &mut Batch) -> Result<(), DataError> {
        let cell = |column: usize| self.drawn.cells[column];
        let (layout, schema) = (&self.layout, &self.encoder.schema);
        let label = layout.label.and_then(cell).and_then(|value| schema.label.label_of(value as f64));
        batch.labels.push(label.ok_or_else(|| {
            DataError::config(
                &format!("label `{}`", schema.label.name),
                "this column of the synthetic source is not a label; use `label`",
            )
        })?);
        for (field, &column) in schema.dense.iter().zip(&layout.dense) {
            let value = cell(column).map(|value| field.transform.apply(value as f32));
            batch.dense.push(value.unwrap_or(field.missing));
        }
        let columns = batch.sparse.iter_mut().zip(&layout.sparse);
        for ((into, &column), sparse) in columns.zip(&self.encoder.sparse) {
            let key = cell(column).map(|value| sparse.table.integer(value));
            into.keys.extend(key.or(sparse.missing));
            if let Some(offsets) = &mut into.offsets {
                offsets.push(offset(into.keys.len(), &layout.names[column])?);
            }
        }
        if let (Some(groups), Some(column), Some(group)) = (&mut batch.groups, layout.group, &self.encoder.group) {
            groups.extend(cell(column).map(|value| group.table.integer(value)).or(group.missing));
        }
        for (into, &column) in batch.carried.iter_mut().zip(&layout.carried) {
            into.push(cell(column).map(|value| value.to_string()).as_deref().map(str::as_bytes));
        }
        batch.samples += 1;
        Ok(())
    }
}

impl Rows for SyntheticRows {
    fn advance(&mut self, rows: u64, into: Option<&mut Batch>) -> Result<u64, DataError> {
        let passed = rows.min(self.end - self.row);
        if let Some(batch) = into {
            for row in self.row..self.row + passed {
                let mut drawn = std::mem::take(&mut self.drawn);
                self.teacher.draw(row, &mut drawn);
                self.drawn = drawn;
                self.append(batch)?;
            }
            pace::pass(passed);
        }
        self.row += passed;
        Ok(passed)
    }

    fn pass_over_bad(&mut self) -> Result<(), DataError> {
        Ok(())
    }

    fn skipped(&self) -> u64 {
        0
    }

    fn position(&self) -> Position {
        Position::new(0, self.row)
    }
}
