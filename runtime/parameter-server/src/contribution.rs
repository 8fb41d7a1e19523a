//! A worker's contribution to a step.

use rectrain_embedding::{Examples, FeatureKey};
use rectrain_modes::barrier::SparseGradients;
use rectrain_protocol::error::RoleError;

/// The gradients of one piece of a batch, with the examples that they come from.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Contribution {
    /// By row group.
    pub(crate) groups: Vec<SparseGradients>,
    /// By row group: the examples of each key. Empty for a group whose policy needs none.
    pub(crate) examples: Vec<Vec<Examples>>,
    /// The latest event time of the piece's rows, in seconds since 1970. 0 without a clock.
    pub(crate) moment: u64,
    /// In `des`: this server's part of the gradient of the first layer's weight, `[columns,
    /// units]`. Empty for a model without a tower.
    pub(crate) of_layer: Vec<f32>,
}

impl Contribution {
    /// No gradients of any of `groups` row groups.
    pub(crate) fn nothing(groups: usize) -> Self {
        let (gradients, examples) = (vec![SparseGradients::default(); groups], vec![Vec::new(); groups]);
        Self { groups: gradients, examples, ..Self::default() }
    }
}

/// The moment of a step: the latest of its pieces.
pub(crate) fn latest<'c>(pieces: impl Iterator<Item = &'c Contribution>) -> u64 {
    pieces.map(|piece| piece.moment).max().unwrap_or(0)
}

/// The gradient of the first layer's weight, summed over the pieces of a step in their order.
/// `None` if no piece has one.
///
/// # Errors
/// [`RoleError::Inconsistent`] if the pieces' gradients have different sizes.
pub(crate) fn sum_of_layer<'c>(pieces: impl Iterator<Item = &'c Contribution>) -> Result<Option<Vec<f32>>, RoleError> {
    let mut parts = pieces.map(|piece| &piece.of_layer).filter(|part| !part.is_empty());
    let Some(mut sum) = parts.next().cloned() else { return Ok(None) };
    for part in parts {
        if part.len() != sum.len() {
            let reason = format!("a piece has {} gradients of the first layer, another {}", sum.len(), part.len());
            return Err(RoleError::Inconsistent { message: "update", reason });
        }
        sum.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
    }
    Ok(Some(sum))
}

/// The keys of a piece in a row group, ascending, with the examples of each.
pub(crate) struct KeyExamples {
    keys: Vec<u64>,
    examples: Vec<Examples>,
}

impl KeyExamples {
    /// The examples in the pieces of a step. Nothing for a group that needs none.
    pub(crate) fn of<'c>(pieces: impl Iterator<Item = &'c Contribution>, group: usize) -> Vec<Self> {
        let counted = pieces.filter(|piece| !piece.examples[group].is_empty());
        counted
            .map(|piece| Self { keys: piece.groups[group].keys.clone(), examples: piece.examples[group].clone() })
            .collect()
    }
}

/// The examples of `keys`, ascending, over all pieces of a step. Empty if no piece has examples.
pub(crate) fn sum_examples(pieces: &[KeyExamples], keys: &[FeatureKey]) -> Vec<Examples> {
    if pieces.is_empty() {
        return Vec::new();
    }
    let mut sums = vec![Examples::default(); keys.len()];
    for piece in pieces {
        let mut rest = keys.iter().zip(&mut sums).peekable();
        for (key, of_key) in piece.keys.iter().zip(&piece.examples) {
            while rest.next_if(|(other, _)| other.0 < *key).is_some() {}
            // A step leaves out keys whose gradients are all too stale.
            let Some((_, sum)) = rest.next_if(|(other, _)| other.0 == *key) else { continue };
            sum.positive = sum.positive.saturating_add(of_key.positive);
            sum.negative = sum.negative.saturating_add(of_key.negative);
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(keys: &[u64], counts: &[(u32, u32)], moment: u64) -> Contribution {
        let examples = counts.iter().map(|&(positive, negative)| Examples { positive, negative }).collect();
        let gradients = SparseGradients { keys: keys.to_vec(), values: vec![0.0; keys.len()] };
        Contribution { groups: vec![gradients], examples: vec![examples], moment, ..Contribution::default() }
    }

    #[test]
    fn examples_are_summed_by_key_over_the_pieces() {
        let pieces = [piece(&[2, 5, 9], &[(1, 0), (0, 2), (3, 3)], 7), piece(&[1, 5], &[(1, 1), (4, 0)], 9)];
        let sums = sum_examples(&KeyExamples::of(pieces.iter(), 0), &[1, 2, 5].map(FeatureKey));
        let sums: Vec<(u32, u32)> = sums.iter().map(|sum| (sum.positive, sum.negative)).collect();
        assert_eq!(sums, [(1, 1), (1, 0), (4, 2)]);
        assert_eq!((latest(pieces.iter()), latest([].iter())), (9, 0));
    }

    #[test]
    fn gradients_of_the_first_layer_are_summed_over_the_pieces_that_have_some() {
        let piece = |of_layer: &[f32]| Contribution { of_layer: of_layer.to_vec(), ..Contribution::nothing(1) };
        let sum = |pieces: &[Contribution]| sum_of_layer(pieces.iter());
        let pieces = [Contribution::nothing(1), piece(&[1.0, 2.0]), piece(&[0.5, -4.0])];
        assert_eq!(sum(&pieces).unwrap(), Some(vec![1.5, -2.0]));
        assert_eq!(sum(&pieces[..1]).unwrap(), None);
        let error = sum(&[piece(&[1.0]), piece(&[1.0, 2.0])]).unwrap_err().to_string();
        assert!(error.contains("a piece has 1 gradients of the first layer, another 2"), "{error}");
    }

    #[test]
    fn a_group_without_examples_stays_without() {
        let pieces = [piece(&[2, 5], &[], 0), Contribution::nothing(1)];
        assert!(sum_examples(&KeyExamples::of(pieces.iter(), 0), &[FeatureKey(2)]).is_empty());
    }
}
