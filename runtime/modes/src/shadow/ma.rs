//! The arithmetic of model averaging over flat slices (§3.3, algorithm 3).

use super::add_to_mean;

/// w_global ← AllReduce(w) / n, the second line of algorithm 3: `global` becomes the mean of the
/// replicas. Without a replica it stays.
///
/// The third line, w⁽ⁱ⁾ ← (1 − α) w⁽ⁱ⁾ + α w_global, is [`interpolate`](super::interpolate) on each
/// dense worker, with the replica of that moment.
///
/// All slices have the same length. Equal replicas give the same values to the bit. The rounding
/// depends on the order of the replicas.
pub fn average<'a>(global: &mut [f32], replicas: impl IntoIterator<Item = &'a [f32]>) {
    for (before, replica) in replicas.into_iter().enumerate() {
        add_to_mean(global, replica, before + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_replaces_the_values_before() {
        let mut global = [99.0_f32, -7.0];
        average(&mut global, [&[1.0_f32, 8.0][..], &[2.0, -2.0], &[6.0, 0.0]]);
        assert!((global[0] - 3.0).abs() < 1e-6 && (global[1] - 2.0).abs() < 1e-6, "{global:?}");
        let before = global;
        average(&mut global, []);
        assert_eq!(global, before, "no replica");
    }

    #[test]
    fn equal_replicas_are_their_mean_to_the_bit() {
        let replica = [0.1_f32, -3.3, 1e-30, 7e12];
        let mut global = [0.0_f32; 4];
        average(&mut global, [&replica[..]; 7]);
        assert_eq!(global.map(f32::to_bits), replica.map(f32::to_bits));
    }
}
