//! The arithmetic of blockwise model-update filtering over flat slices (§3.3, algorithm 4).

/// The outer optimizer of algorithm 4: how w_global follows the mean of the replicas.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockUpdate {
    /// η, above 0 and at most 2. Beyond 2, the values would grow without bound.
    pub eta: f32,
    /// m, the block momentum, from 0 and below 1. With 0, the update is exactly algorithm 4.
    pub momentum: f32,
    /// Whether the step looks ahead by one momentum (Nesterov). It needs a momentum above 0.
    pub nesterov: bool,
}

impl BlockUpdate {
    /// Moves `global` towards the mean of the replicas. The lines of algorithm 4, and the momentum
    /// that it names without a formula:
    ///
    /// 1. w_desc ← w_copy − w_global, where w_copy is `mean`;
    /// 2. v ← m v + w_desc;
    /// 3. w_global ← w_global + η v, or with Nesterov w_global + η (w_desc + m v).
    ///
    /// For m = 0, line 3 is w_global + η w_desc. With Nesterov, this is the outer optimizer of
    /// DiLoCo (arXiv 2311.08105 and 2501.18512), with −w_desc as its outer gradient.
    ///
    /// All slices have the same length. `velocity` is v, and 0 before the first update.
    pub fn apply(&self, global: &mut [f32], velocity: &mut [f32], mean: &[f32]) {
        for ((global, velocity), mean) in global.iter_mut().zip(velocity.iter_mut()).zip(mean) {
            let descent = *mean - *global;
            *velocity = self.momentum * *velocity + descent;
            let step = if self.nesterov { descent + self.momentum * *velocity } else { *velocity };
            *global += self.eta * step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(update: BlockUpdate, means: &[f32]) -> f32 {
        let (mut global, mut velocity) = ([0.0_f32], [0.0_f32]);
        means.iter().for_each(|mean| update.apply(&mut global, &mut velocity, &[*mean]));
        global[0]
    }

    /// By hand: v is 1, then .5 + (1 − global).
    #[test]
    fn two_steps_are_those_by_hand() {
        let update = BlockUpdate { eta: 0.5, momentum: 0.5, nesterov: false };
        assert_eq!(after(update, &[1.0]), 0.5);
        assert_eq!(after(update, &[1.0, 1.0]), 0.5 + 0.5 * (0.5 + 0.5));
        let update = BlockUpdate { nesterov: true, ..update };
        assert_eq!(after(update, &[1.0]), 0.5 * 1.5);
        assert_eq!(after(update, &[1.0, 1.0]), 0.75 + 0.5 * (0.25 + 0.5 * (0.5 + 0.25)));
    }

    #[test]
    fn a_full_step_without_momentum_is_the_mean() {
        let update = BlockUpdate { eta: 1.0, momentum: 0.0, nesterov: false };
        assert_eq!(after(update, &[4.0, -3.0]), -3.0);
    }

    #[test]
    fn updates_reach_a_mean_that_stays() {
        for (eta, momentum, nesterov) in [(0.3, 0.0, false), (1.0, 0.9, false), (0.7, 0.9, true), (1.9, 0.0, false)] {
            let found = after(BlockUpdate { eta, momentum, nesterov }, &[3.0; 600]);
            assert!((found - 3.0).abs() < 1e-3, "η {eta}, m {momentum}, Nesterov {nesterov}: {found}");
        }
    }
}
