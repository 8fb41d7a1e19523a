//! The results of one parameter server for a piece, and their gradients on the way back.

use rectrain_modes::des::cells::{Cell, CellSums};
use rectrain_modes::des::{Partial, Substitution};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message;
use rectrain_wire::Tensor;

/// Partial results of a server with its parts of shared cells. On the way back: the gradient of the
/// sum ⊕, with the whole embeddings of these cells.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerResults {
    /// The partial results, or the gradient of their sum.
    pub partial: Partial,
    /// Embeddings of the shared cells, `[cells, d]`.
    pub vectors: Vec<f32>,
}

impl ServerResults {
    /// The tensors of a message, all f32: first-order results `[samples]`, and for a model with
    /// embeddings the second-order results `[samples, d + 1]` and the shared cells' embeddings
    /// `[cells, d]`. They are never compressed: ½(‖Σ v·x‖² − Σ⟨vx, vx⟩) is a difference of large
    /// numbers.
    #[must_use]
    pub fn into_tensors(self, substitution: Substitution) -> Vec<Tensor> {
        let mut tensors = vec![Tensor::from(self.partial.first)];
        if substitution.dim > 0 {
            tensors.push(Tensor::from(self.partial.second));
            tensors.push(Tensor::from(self.vectors));
        }
        tensors
    }

    /// Reads the tensors of [`Self::into_tensors`] for a piece of `samples` samples with `cells`
    /// shared cells.
    ///
    /// # Errors
    /// [`RoleError::Wire`] or [`RoleError::Inconsistent`] if a tensor is missing or has another
    /// length.
    pub fn from_tensors(
        name: &'static str,
        tensors: &mut impl Iterator<Item = Tensor>,
        substitution: Substitution,
        (samples, cells): (usize, usize),
    ) -> Result<Self, RoleError> {
        let mut values = |length: usize| {
            let values = message::next(name, tensors)?.expect_f32("partial results")?;
            if values.len() == length {
                return Ok(values);
            }
            let reason = format!("expected {length} values of {samples} samples, found {}", values.len());
            Err(RoleError::Inconsistent { message: name, reason })
        };
        let first = values(samples)?;
        if substitution.dim == 0 {
            let partial = Partial { first, second: Vec::new() };
            return Ok(Self { partial, vectors: Vec::new() });
        }
        let second = values(samples * substitution.second_columns())?;
        Ok(Self { partial: Partial { first, second }, vectors: values(cells * substitution.dim)? })
    }

    /// The sum ⊕ over all servers, in their order. `cells` has the shared cells of each server.
    /// Also returns the whole embeddings of each server's shared cells, `[cells, d]`.
    #[must_use]
    pub fn sum(of_servers: Vec<Self>, cells: &[&[Cell]], substitution: Substitution) -> (Partial, Vec<Vec<f32>>) {
        let mut total: Option<Partial> = None;
        let mut of_cells = CellSums::new(substitution);
        for (Self { partial, vectors }, cells) in of_servers.into_iter().zip(cells) {
            match &mut total {
                Some(total) => total.add(&partial),
                None => total = Some(partial),
            }
            if let Some(total) = &mut total {
                of_cells.add(cells, &vectors, total);
            }
        }
        let whole = cells.iter().map(|cells| of_cells.vectors_of(cells)).collect();
        (total.unwrap_or_default(), whole)
    }
}
