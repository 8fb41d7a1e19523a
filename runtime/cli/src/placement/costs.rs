//! The cost of look-ups by feature and by slot. Pure.

use rectrain_data::Batch;
use rectrain_embedding::{FeatureKey, slot_of};
use rectrain_protocol::layout::FeatureLayout;

/// Bytes of a key in a message.
pub(super) const KEY_BYTES: u64 = 8;
/// Bytes of a value in a message.
pub(super) const VALUE_BYTES: u64 = 4;

/// The look-ups of some pieces. An id is looked up once a piece, and costs the bytes of its key and
/// of its row in messages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Costs {
    /// Pieces.
    pub(super) pieces: u64,
    /// By feature: ids looked up.
    pub(super) look_ups: Vec<u64>,
    /// By feature: bytes.
    pub(super) features: Vec<u64>,
    /// By slot: bytes. An id that several features of a piece share counts once.
    pub(super) slots: Vec<u64>,
}

impl Costs {
    /// No pieces of so many features and slots.
    pub(super) fn new(features: usize, slots: u32) -> Self {
        let (look_ups, features) = (vec![0; features], vec![0; features]);
        Self { pieces: 0, look_ups, features, slots: vec![0; slots as usize] }
    }

    /// Counts the look-ups of a piece.
    pub(super) fn push(&mut self, piece: &Batch, layout: &FeatureLayout) {
        let mut groups: Vec<Vec<u64>> = vec![Vec::new(); layout.group_dims.len()];
        for (feature, (column, place)) in piece.sparse.iter().zip(&layout.features).enumerate() {
            let keys = distinct(column.keys.clone());
            self.look_ups[feature] += keys.len() as u64;
            self.features[feature] += keys.len() as u64 * bytes(layout.group_dims[place.group]);
            groups[place.group].extend(keys);
        }
        let slots = self.slots.len() as u32;
        for (keys, dim) in groups.into_iter().zip(&layout.group_dims) {
            for key in distinct(keys) {
                self.slots[slot_of(FeatureKey(key), slots).0 as usize] += bytes(*dim);
            }
        }
        self.pieces += 1;
    }
}

/// The bytes of a look-up of a row of `dim` values.
fn bytes(dim: usize) -> u64 {
    KEY_BYTES + VALUE_BYTES * dim as u64
}

fn distinct(mut keys: Vec<u64>) -> Vec<u64> {
    keys.sort_unstable();
    keys.dedup();
    keys
}

#[cfg(test)]
mod tests {
    use rectrain_data::SparseColumn;
    use rectrain_kinds::Pooling;
    use rectrain_protocol::layout::FeaturePlace;

    use super::*;

    /// Two features of one table with 3 columns, and one feature with 1 column.
    fn layout() -> FeatureLayout {
        let place = |group, dim| FeaturePlace { group, dim, offset: 0, pooling: Pooling::Sum };
        FeatureLayout {
            features: vec![place(0, 3), place(0, 3), place(1, 1)],
            group_dims: vec![3, 1],
            linear: false,
            embedding_width: 7,
        }
    }

    fn piece(columns: [&[u64]; 3]) -> Batch {
        let sparse = columns.map(|keys| SparseColumn { keys: keys.to_vec(), offsets: None }).to_vec();
        Batch { samples: columns[0].len(), sparse, ..Batch::default() }
    }

    #[test]
    fn an_id_costs_its_key_and_row_once_a_piece() {
        // Of two slots, the upper half of the keys is in the second one.
        let high = 1 << 63;
        let mut costs = Costs::new(3, 2);
        costs.push(&piece([&[1, 1, 2], &[2, high, high], &[7, 7, 7]]), &layout());
        costs.push(&piece([&[1], &[1], &[high]]), &layout());
        assert_eq!((costs.pieces, &*costs.look_ups), (2, &[3, 3, 2][..]));
        assert_eq!(costs.features, [3 * 20, 3 * 20, 2 * 12]);
        // The features share 2 and 1. The other slot has an id of each group.
        assert_eq!(costs.slots, [20 + 20 + 12 + 20, 20 + 12]);
    }
}
