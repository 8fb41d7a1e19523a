//! Rows of the synthetic source. Nothing is read: a row is computed where it is wanted.

use super::{RowSource, Selection, offset};
use crate::batch::Batch;
use crate::error::DataError;
use crate::schema::{Encoder, Layout};
use crate::synthetic::{Drawn, Teacher};
use std::sync::Arc;

/// Cursor over the rows of a teacher.
pub(crate) struct SyntheticRows {
    teacher: Arc<Teacher>,
    layout: Layout,
    encoder: Arc<Encoder>,
    row: u64,
    end: u64,
    drawn: Drawn,
}

impl SyntheticRows {
    pub(crate) fn new(teacher: &Arc<Teacher>, layout: &Layout, encoder: &Arc<Encoder>, selection: &Selection) -> Self {
        let (from, rows) = selection.rows();
        let all = teacher.config().rows;
        Self {
            teacher: Arc::clone(teacher),
            layout: layout.clone(),
            encoder: Arc::clone(encoder),
            row: from.min(all),
            end: from.saturating_add(rows.unwrap_or(all)).min(all),
            drawn: Drawn::default(),
        }
    }

    fn append(&self, batch: &mut Batch) -> Result<(), DataError> {
        let cell = |column: usize| self.drawn.cells[column];
        let (layout, schema) = (&self.layout, &self.encoder.schema);
        let label = cell(layout.label).and_then(|value| schema.label.label_of(value as f32));
        batch.labels.push(label.ok_or_else(|| {
            DataError::config(
                &format!("label `{}`", schema.label.name),
                "this column of the synthetic source is no label; use `label`",
            )
        })?);
        for (field, &column) in schema.dense.iter().zip(&layout.dense) {
            let value = cell(column).map(|value| field.transform.apply(value as f32));
            batch.dense.push(value.unwrap_or(field.missing));
        }
        let columns = batch.sparse.iter_mut().zip(&layout.sparse);
        for ((into, &column), sparse) in columns.zip(&self.encoder.sparse) {
            let key = cell(column).map(|value| sparse.seed.integer(value));
            into.keys.extend(key.or(sparse.missing));
            if let Some(offsets) = &mut into.offsets {
                offsets.push(offset(into.keys.len(), &layout.names[column])?);
            }
        }
        if let (Some(groups), Some(column), Some(seed)) = (&mut batch.groups, layout.group, self.encoder.group) {
            groups.push(cell(column).map_or(seed.missing(), |value| seed.integer(value)));
        }
        batch.samples += 1;
        Ok(())
    }
}

impl RowSource for SyntheticRows {
    fn advance(&mut self, rows: u64, into: Option<&mut Batch>) -> Result<u64, DataError> {
        let passed = rows.min(self.end - self.row);
        if let Some(batch) = into {
            for row in self.row..self.row + passed {
                let mut drawn = std::mem::take(&mut self.drawn);
                self.teacher.draw(row, &mut drawn);
                self.drawn = drawn;
                self.append(batch)?;
            }
            crate::pace::pass(passed);
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
}
