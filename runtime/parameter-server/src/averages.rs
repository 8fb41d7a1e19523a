//! A partition's memory of the rounds in which the mean of the replicas is formed (`shadow` with
//! `ma` or `bmuf`; ShadowSync §3.3, algorithms 3 and 4). Also the replicas that rest at the end of
//! an order. The output model is made of them.

use std::collections::BTreeMap;
use std::ops::Range;

use rectrain_kinds::OutputModel;
use rectrain_modes::shadow::{Average, output_model};

/// See the module documentation. Its size is bounded by the replicas of the job's workers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Averages {
    /// The order of the last round.
    order: u64,
    /// The fragment of the round after it.
    turn: u32,
    /// v of block momentum, for each parameter. Empty before the first round.
    velocity: Vec<f32>,
    /// By rank: the replicas of workers that have ended the order. They no longer change, and stay
    /// in the mean until the next order.
    rested: BTreeMap<u32, Vec<f32>>,
}

/// A replica in a round.
pub(crate) struct RoundMember {
    pub(crate) rank: u32,
    /// The fragment of the round, or all parameters of the partition if it is the last one.
    pub(crate) parameters: Vec<f32>,
    /// Its worker has ended the order.
    pub(crate) last: bool,
}

/// The fragments of a round and of the next one.
#[derive(Clone, Debug)]
pub(crate) struct RoundFragment {
    /// The parameters of the round's fragment, in the partition.
    pub(crate) range: Range<usize>,
    /// The fragment of the next round.
    pub(crate) next: u32,
}

impl Averages {
    /// The memory of the predecessor.
    pub(crate) fn found(order: u64, turn: u32, velocity: Vec<f32>, rested: BTreeMap<u32, Vec<f32>>) -> Self {
        Self { order, turn, velocity, rested }
    }

    pub(crate) fn order(&self) -> u64 {
        self.order
    }

    /// The fragment of the round after the last one.
    pub(crate) fn turn(&self) -> u32 {
        self.turn
    }

    pub(crate) fn velocity(&self) -> &[f32] {
        &self.velocity
    }

    pub(crate) fn rested(&self) -> &BTreeMap<u32, Vec<f32>> {
        &self.rested
    }

    /// Moves the copy by a round of this order. The mean is over the members, and over the replicas
    /// that rest. The round moves its fragment only, and the whole copy if no member trains.
    pub(crate) fn apply(
        &mut self,
        copy: &mut [f32],
        order: u64,
        members: Vec<RoundMember>,
        fragment: RoundFragment,
        average: &Average,
    ) {
        self.begin(order);
        self.turn = fragment.next;
        self.velocity.resize(copy.len(), 0.0);
        let (last, training): (Vec<_>, Vec<_>) = members.into_iter().partition(|member| member.last);
        self.rested.extend(last.into_iter().map(|member| (member.rank, member.parameters)));
        for member in &training {
            // A replacement of this rank trains again.
            self.rested.remove(&member.rank);
        }
        let range = if training.is_empty() { 0..copy.len() } else { fragment.range };
        let training = training.iter().map(|member| (member.rank, &*member.parameters));
        let rested = self.rested.iter().map(|(rank, parameters)| (*rank, &parameters[range.clone()]));
        let replicas: BTreeMap<u32, &[f32]> = training.chain(rested).collect();
        average.apply(&mut copy[range.clone()], &mut self.velocity[range.clone()], replicas.into_values());
    }
}

impl Averages {
    /// Forgets the replicas that rested in an earlier order.
    fn begin(&mut self, order: u64) {
        if self.order != order {
            self.order = order;
            self.rested.clear();
        }
    }

    /// Notes an exchange of a mode without rounds (`easgd`). A replica rests from the last exchange
    /// of its worker on, unless a replacement trains again. `replica` has all parameters of the
    /// partition in a `last` exchange.
    pub(crate) fn note_elastic(&mut self, order: u64, rank: u32, replica: &[f32], last: bool) {
        self.begin(order);
        if last {
            self.rested.insert(rank, replica.to_vec());
        } else {
            self.rested.remove(&rank);
        }
    }

    /// Makes the copy the output model, once the replicas of all `workers` of the order rest.
    pub(crate) fn output(&self, rule: OutputModel, copy: &mut [f32], workers: u32) {
        if self.rested.len() == workers as usize {
            output_model(rule, copy, &self.rested);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The only fragment of a partition with one parameter.
    const WHOLE: RoundFragment = RoundFragment { range: 0..1, next: 0 };

    fn member(rank: u32, value: f32, last: bool) -> RoundMember {
        RoundMember { rank, parameters: vec![value], last }
    }

    /// Workers end the order one after another. Each stays in the mean until the next order.
    #[test]
    fn replicas_that_rest_stay_in_the_mean() {
        let (mut averages, mut copy) = (Averages::default(), [0.0_f32]);
        let mut after = |order, members| {
            averages.apply(&mut copy, order, members, WHOLE, &Average::Mean);
            copy[0]
        };
        assert_eq!(after(1, vec![member(0, 1.0, false), member(1, 3.0, false), member(2, 5.0, false)]), 3.0);
        assert_eq!(after(1, vec![member(0, 3.0, false), member(1, 6.0, true), member(2, 9.0, false)]), 6.0);
        assert_eq!(after(1, vec![member(0, 0.0, true)]), 3.0, "ranks 0 and 1");
        assert_eq!(after(1, vec![member(2, 12.0, true)]), 6.0, "all three, each in its own time");
        assert_eq!(after(1, vec![member(1, 0.0, false)]), 4.0, "a replacement of rank 1 trains again");
        assert_eq!(after(2, vec![member(0, 8.0, false)]), 8.0, "the next order begins");
    }

    /// The steps equal the ones of a mean that is computed apart.
    #[test]
    fn block_momentum_outlives_the_rounds() {
        let update = rectrain_modes::shadow::BlockUpdate { eta: 0.5, momentum: 0.5, nesterov: true };
        let (mut averages, mut copy) = (Averages::default(), [0.0_f32]);
        let (mut naive, mut velocity) = (0.0_f32, 0.0_f32);
        for (order, [one, other]) in [(1, [2.0, 4.0]), (1, [1.0, 5.0]), (2, [-3.0, 3.0])] {
            let members = vec![member(0, one, false), member(1, other, false)];
            averages.apply(&mut copy, order, members, WHOLE, &Average::Block(update));
            let descent = f32::midpoint(one, other) - naive;
            velocity = 0.5 * velocity + descent;
            naive += 0.5 * (descent + 0.5 * velocity);
            assert!((copy[0] - naive).abs() < 1e-6, "{copy:?}, not {naive}");
        }
    }

    /// Two fragments of two parameters. Rank 1 ends the order in the round of the second fragment.
    #[test]
    fn a_round_moves_its_fragment_and_the_last_one_moves_all() {
        let update = rectrain_modes::shadow::BlockUpdate { eta: 1.0, momentum: 0.5, nesterov: false };
        let (mut averages, mut copy) = (Averages::default(), [0.0_f32; 4]);
        let member = |rank, own: &[f32], last| RoundMember { rank, parameters: own.to_vec(), last };
        let mut after = |members, range: Range<usize>| {
            let fragment = RoundFragment { next: u32::from(range.start == 0), range };
            averages.apply(&mut copy, 1, members, fragment, &Average::Block(update));
            copy
        };
        let both = vec![member(0, &[2.0, 4.0], false), member(1, &[4.0, 4.0], false)];
        assert_eq!(after(both, 0..2), [3.0, 4.0, 0.0, 0.0]);
        // The momentum of the first fragment does not reach the second.
        let one_rests = vec![member(0, &[2.0, 2.0], false), member(1, &[9.0, 9.0, 8.0, 6.0], true)];
        assert_eq!(after(one_rests, 2..4), [3.0, 4.0, 5.0, 4.0]);
        // By hand for the first parameter: v = .5 · 3 + (8 − 3).
        assert_eq!(after(vec![member(0, &[7.0, 7.0, 2.0, 2.0], true)], 0..2), [9.5, 10.0, 7.5, 6.0]);
    }
}
