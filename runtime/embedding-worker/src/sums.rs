//! The sums of a piece in the mode `des`, and what an embedding worker keeps of them.

use parking_lot::Mutex;
use rectrain_protocol::layout::Pooled;

/// The sums of a piece's partial results over all servers.
pub(crate) struct Sums {
    /// As dense workers get them.
    pub(crate) pooled: Pooled,
    pub(crate) cells: WholeCells,
}

/// The embeddings of the cells that several servers hold.
#[derive(Clone)]
pub(crate) struct WholeCells {
    /// The slot map that divides the cells.
    pub(crate) map_epoch: u64,
    /// By server: the whole embeddings of its shared cells, `[cells, d]`.
    pub(crate) of_servers: Vec<Vec<f32>>,
}

/// The whole cells of a piece, between its look-up and its gradients.
#[derive(Default)]
pub(crate) struct KeptCells(Mutex<Option<WholeCells>>);

impl KeptCells {
    pub(crate) fn keep(&self, cells: WholeCells) {
        *self.0.lock() = Some(cells);
    }

    /// The cells, if this slot map divides them.
    pub(crate) fn of_map(&self, map_epoch: u64) -> Option<WholeCells> {
        self.0.lock().clone().filter(|cells| cells.map_epoch == map_epoch)
    }
}
