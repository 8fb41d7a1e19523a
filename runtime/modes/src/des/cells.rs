//! Cells whose ids several servers hold.
//!
//! The sub-operator Σ⟨vx, vx⟩ sums over embeddings. If a sample has several values of a feature,
//! its embedding e of that feature is pooled over them. Then ⟨e, e⟩ is not a sum over servers. With
//! parts e₁ and e₂ on two servers it is ⟨e₁, e₁⟩ + ⟨e₂, e₂⟩ + 2⟨e₁, e₂⟩. The paper avoids the last
//! term by holding each field on one server (section 4.3). Here slots are ranges of hashed keys. So
//! the servers also send the parts of such cells, and [`CellSums`] adds the terms.

use std::collections::HashMap;

use super::{Partial, Substitution};

/// A sample's values of a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cell {
    /// The feature's number in the manifest's order.
    pub feature: u32,
    /// The sample's number in the piece.
    pub sample: u32,
}

impl Substitution {
    /// The embeddings of these cells, `[cells, d]`, out of pooled embeddings `[samples, features ·
    /// d]`. A cell outside them has zeros.
    #[must_use]
    pub fn vectors_of(self, cells: &[Cell], embeddings: &[f32]) -> Vec<f32> {
        let mut vectors = vec![0.0; cells.len() * self.dim];
        for (vector, cell) in vectors.chunks_exact_mut(self.dim.max(1)).zip(cells) {
            let start = self.start_of(*cell);
            if let Some(values) = embeddings.get(start..start + self.dim) {
                vector.copy_from_slice(values);
            }
        }
        vectors
    }

    /// Writes `vectors`, `[cells, d]`, over the embeddings of these cells.
    pub fn put_vectors(self, cells: &[Cell], vectors: &[f32], embeddings: &mut [f32]) {
        for (vector, cell) in vectors.chunks_exact(self.dim.max(1)).zip(cells) {
            let start = self.start_of(*cell);
            if let Some(values) = embeddings.get_mut(start..start + self.dim) {
                values.copy_from_slice(vector);
            }
        }
    }

    /// The first column of a cell in pooled embeddings.
    const fn start_of(self, cell: Cell) -> usize {
        (cell.sample as usize * self.features + cell.feature as usize) * self.dim
    }
}

/// The embeddings of cells, summed over the servers that hold their ids.
#[derive(Debug)]
pub struct CellSums {
    substitution: Substitution,
    /// Each cell's sum over the servers so far.
    sums: HashMap<Cell, Vec<f32>>,
}

impl CellSums {
    /// No cells.
    #[must_use]
    pub fn new(substitution: Substitution) -> Self {
        Self { substitution, sums: HashMap::new() }
    }

    /// Adds the parts `vectors`, `[cells, d]`, of the next server. Adds the terms 2⟨e₁, e₂⟩ with
    /// the servers before to Σ⟨vx, vx⟩ in `total`.
    pub fn add(&mut self, cells: &[Cell], vectors: &[f32], total: &mut Partial) {
        let columns = self.substitution.second_columns();
        for (cell, vector) in cells.iter().zip(vectors.chunks_exact(self.substitution.dim.max(1))) {
            let Some(sum) = self.sums.get_mut(cell) else {
                self.sums.insert(*cell, vector.to_vec());
                continue;
            };
            let product: f32 = sum.iter().zip(vector).map(|(before, value)| before * value).sum();
            if let Some(squares) = total.second.get_mut(cell.sample as usize * columns + self.substitution.dim) {
                *squares += product + product;
            }
            sum.iter_mut().zip(vector).for_each(|(sum, value)| *sum += value);
        }
    }

    /// The whole embeddings of these cells, `[cells, d]`.
    #[must_use]
    pub fn vectors_of(&self, cells: &[Cell]) -> Vec<f32> {
        let none = vec![0.0; self.substitution.dim];
        cells.iter().flat_map(|cell| self.sums.get(cell).unwrap_or(&none).iter().copied()).collect()
    }
}
