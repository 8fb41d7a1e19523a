//! The arithmetic of elastic averaging over flat slices (§3.3, algorithm 2).

/// own ← (1 − α) own + α other, for each value.
///
/// Algorithm 2 consists of two such lines, in this order:
///
/// 1. on a parameter server, w̃ ← (1 − α) w̃ + α w⁽ⁱ⁾;
/// 2. on dense worker i, w⁽ⁱ⁾ ← (1 − α) w⁽ⁱ⁾ + α w̃, with the result of the first line.
///
/// The second line takes the replica of that moment. It moved since the snapshot of the first line,
/// and a copy of w̃ would lose these updates (§3.3). The lines are asymmetric: afterwards w̃ and
/// the replica are not equal, unless α is 1.
///
/// `alpha` is above 0 and at most 1. Both slices have the same length; further values of the longer
/// one are left alone. Equal values stay as they are.
pub fn interpolate(own: &mut [f32], other: &[f32], alpha: f32) {
    for (own, other) in own.iter_mut().zip(other) {
        *own += alpha * (*other - *own);
    }
}

/// Adds the `count`-th value to the mean of the `count` − 1 values before it, for each position.
/// The first value replaces `mean`.
///
/// The optimizer states of the replicas have no line in the paper. When training pauses, the state
/// of w̃ becomes the mean of the replicas' states. A mean keeps what the optimizers require: an
/// average of squares stays an average of squares, and never becomes negative.
pub fn add_to_mean(mean: &mut [f32], value: &[f32], count: usize) {
    let share = 1.0 / count.max(1) as f32;
    for (mean, value) in mean.iter_mut().zip(value) {
        *mean = if count <= 1 { *value } else { *mean + share * (*value - *mean) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_stay_to_the_bit() {
        let values = [0.1_f32, -3.3, 1e-30, 7e12];
        for alpha in [0.1, 0.3, 0.5, 0.9, 1.0] {
            let mut own = values;
            interpolate(&mut own, &values, alpha);
            assert_eq!(own.map(f32::to_bits), values.map(f32::to_bits), "alpha {alpha}");
        }
    }

    #[test]
    fn a_mean_of_states_is_their_mean_in_any_order() {
        let states = [[1.0_f32, 0.0], [4.0, 0.5], [7.0, 1.0]];
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            let mut mean = [99.0, 99.0];
            for (place, state) in order.into_iter().enumerate() {
                add_to_mean(&mut mean, &states[state], place + 1);
            }
            assert!((mean[0] - 4.0).abs() < 1e-6 && (mean[1] - 0.5).abs() < 1e-6, "{order:?}: {mean:?}");
        }
    }
}
