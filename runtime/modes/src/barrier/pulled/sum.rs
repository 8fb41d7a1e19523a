//! The sum over the pieces of a step. Pieces are added in a binary tree over their numbers: pieces
//! 0 and 1, 2 and 3, then these sums, and so on. So the sum has the same bits in whichever order
//! the pieces come.
//!
//! A node is added as soon as both of its halves are there. After the last piece, at most
//! ⌈log₂ pieces⌉ additions are left.

use std::collections::BTreeMap;

use super::PieceError;
use crate::Rank;

/// A value that is summed over pieces.
pub trait Summand {
    /// Adds `right` to this value. In the tree, `right` has the higher pieces.
    fn add(&mut self, right: Self);
}

/// A sum of losses.
impl Summand for f64 {
    fn add(&mut self, right: Self) {
        *self += right;
    }
}

/// Gradients of dense parameters. All pieces have gradients of the same length.
impl Summand for Vec<f32> {
    fn add(&mut self, right: Self) {
        self.iter_mut().zip(right).for_each(|(sum, value)| *sum += value);
    }
}

/// The level and the index of a node of the tree. Node i of level l has the pieces from i · 2^l
/// until (i + 1) · 2^l.
type Node = (u32, u32);

/// See the module documentation.
#[derive(Debug, Clone)]
pub struct PieceSum<T> {
    pieces: u32,
    /// By piece: whether the sum has it.
    added: Vec<bool>,
    missing: u32,
    /// Complete nodes whose other half is not complete. `None`: none of its pieces has a value.
    nodes: BTreeMap<Node, Option<T>>,
}

impl<T: Summand> PieceSum<T> {
    /// A sum of `pieces` pieces, before the first one.
    #[must_use]
    pub fn new(pieces: u32) -> Self {
        Self { pieces, added: vec![false; pieces as usize], missing: pieces, nodes: BTreeMap::new() }
    }

    /// Adds a piece; `None` if it has no value. Returns false, and changes nothing, if the sum
    /// already has the piece.
    ///
    /// # Errors
    /// [`PieceError::UnknownPiece`].
    pub fn add(&mut self, piece: Rank, value: Option<T>) -> Result<bool, PieceError> {
        let unknown = PieceError::UnknownPiece { piece, pieces: self.pieces };
        let is_added = self.added.get_mut(piece.0 as usize).ok_or(unknown)?;
        if std::mem::replace(is_added, true) {
            return Ok(false);
        }
        self.missing -= 1;
        self.insert((0, piece.0), value);
        Ok(true)
    }

    /// Inserts a complete node, and completes the nodes above it as far as possible.
    fn insert(&mut self, (mut level, mut index): Node, mut sum: Option<T>) {
        while self.nodes_of(level) > 1 {
            let sibling = index ^ 1;
            if u64::from(sibling) < self.nodes_of(level) {
                let Some(other) = self.nodes.remove(&(level, sibling)) else { break };
                sum = if sibling < index { both(other, sum) } else { both(sum, other) };
            }
            (level, index) = (level + 1, index / 2);
        }
        self.nodes.insert((level, index), sum);
    }

    /// The number of nodes of a level.
    fn nodes_of(&self, level: u32) -> u64 {
        u64::from(self.pieces).div_ceil(1 << level)
    }

    /// Whether the sum has all pieces.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// The number of sums in memory, at most half of the pieces, rounded up.
    #[must_use]
    pub fn sums(&self) -> usize {
        self.nodes.len()
    }

    /// The sum of all pieces. `None` if none of them has a value, or if some are missing.
    #[must_use]
    pub fn into_total(mut self) -> Option<T> {
        if self.is_complete() { self.nodes.pop_first().and_then(|(_node, sum)| sum) } else { None }
    }
}

/// The sum of two halves of a node.
fn both<T: Summand>(left: Option<T>, right: Option<T>) -> Option<T> {
    match (left, right) {
        (Some(mut sum), Some(right)) => {
            sum.add(right);
            Some(sum)
        }
        (left, right) => left.or(right),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The sum of the pieces from `first` on that a node of this size has, by recursion.
    fn tree(values: &[Option<f64>], first: usize, size: usize) -> Option<f64> {
        if first >= values.len() {
            return None;
        }
        if size == 1 {
            return values[first];
        }
        let half = size / 2;
        match (tree(values, first, half), tree(values, first + half, half)) {
            (Some(left), Some(right)) => Some(left + right),
            (left, right) => left.or(right),
        }
    }

    fn total(values: &[Option<f64>], order: impl Iterator<Item = usize>) -> Option<f64> {
        let mut sum = PieceSum::new(values.len() as u32);
        for piece in order {
            sum.add(Rank(piece as u32), values[piece]).unwrap();
            assert!(sum.sums() <= values.len().div_ceil(2));
        }
        sum.into_total()
    }

    proptest! {
        #[test]
        fn any_order_of_pieces_gives_the_sum_of_the_tree(
            values in proptest::collection::vec(proptest::option::weighted(0.9, -1e9f64..1e9), 1..40),
            keys in proptest::collection::vec(any::<u32>(), 40),
        ) {
            let mut order: Vec<usize> = (0..values.len()).collect();
            order.sort_by_key(|piece| keys[*piece]);
            let expected = tree(&values, 0, values.len().next_power_of_two());
            prop_assert_eq!(total(&values, order.into_iter()).map(f64::to_bits), expected.map(f64::to_bits));
        }
    }

    #[test]
    fn the_tree_adds_neighbours_first() {
        // One value is lost beside a large one, and two together are not.
        let values = [2f64.powi(53), 1.0, 1.0, 1.0].map(Some);
        assert_eq!(total(&values, 0..4), Some(2f64.powi(53) + 2.0));
        assert_eq!(total(&values, (0..4).rev()), Some(2f64.powi(53) + 2.0));
    }

    #[test]
    fn gradients_are_added_value_by_value() {
        let mut sum = PieceSum::new(3);
        assert!(sum.add(Rank(2), Some(vec![1.0f32, 2.0])).unwrap());
        assert!(sum.add(Rank(0), None).unwrap());
        assert!(!sum.is_complete());
        assert!(sum.add(Rank(1), Some(vec![0.5, 0.25])).unwrap());
        assert!(sum.is_complete());
        assert_eq!(sum.into_total(), Some(vec![1.5, 2.25]));
    }

    #[test]
    fn a_piece_counts_once_and_must_exist() {
        let mut sum = PieceSum::new(2);
        assert!(sum.add(Rank(1), Some(1.0)).unwrap());
        assert!(!sum.add(Rank(1), Some(5.0)).unwrap());
        assert_eq!(sum.add(Rank(2), Some(1.0)), Err(PieceError::UnknownPiece { piece: Rank(2), pieces: 2 }));
        assert_eq!(sum.clone().into_total(), None, "piece 0 is missing");
        assert!(sum.add(Rank(0), Some(3.0)).unwrap());
        assert_eq!(sum.into_total(), Some(4.0));
        assert_eq!(PieceSum::<f64>::new(0).into_total(), None);
    }
}
