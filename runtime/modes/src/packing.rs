//! Bin packing: places items of known cost on servers so that the fullest server has as little as
//! possible. ShadowSync places the work of its parameter servers so, by the profiled cost of
//! look-ups (Zheng et al. 2020, section 3.1). Pure.
//!
//! [`pack`] places the costliest items first, each in the emptiest bin. Moves and swaps of single
//! items then relieve the fullest bin. If the result is more than 1 % above the lower bound, it is
//! compared with MULTIFIT (Coffman, Garey and Johnson 1978). There, first-fit decreasing fills bins
//! of one capacity, and a binary search finds the least capacity that suffices.
//!
//! **Bound.** The fullest bin has at most 13/11 of the optimum, plus 1. First-fit decreasing always
//! succeeds with a capacity of 13/11 of the optimum (Yue 1990), and the search ends one above a
//! capacity that fails. Moves and swaps never make the fullest bin fuller.
//!
//! **Why not first-fit decreasing alone.** It puts few costly items into the first bin, and many
//! cheap ones into the last. Costs are measured on a sample: the costliest items are those whose
//! cost the sample overstates most. On other rows, the last bin then has too much.
//!
//! The migration of slots has another goal, with two costs and few moves: see
//! [`plan_moves`](crate::migration::plan_moves).

use std::cmp::Reverse;

/// The most moves and swaps. With few items they end earlier, because none helps.
const MOST_CHANGES: usize = 256;

/// Items in bins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// By item: its bin, from 0.
    bins: Vec<usize>,
    /// By bin: the sum of the costs of its items.
    loads: Vec<u64>,
}

/// An item leaves the fullest bin for the bin `to`.
#[derive(Clone, Copy, Debug)]
struct Change {
    item: usize,
    to: usize,
    /// The item that it changes places with.
    other: Option<usize>,
    /// The load of the fuller one of both bins after it.
    fuller: u64,
}

/// Places items of these costs into `bins` bins. The sum of the costs must fit into 64 bits. 0 bins
/// count as one. The same costs have the same packing.
#[must_use]
pub fn pack(costs: &[u64], bins: usize) -> Packing {
    let bins = bins.max(1);
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|item| (Reverse(costs[*item]), *item));
    let improved = |places| {
        let mut packing = Packing::new(costs, places, bins);
        packing.improve(costs);
        packing
    };
    let packing = improved(costliest_first(costs, &order, bins));
    let least = least_load(costs, bins);
    if packing.fullest() <= least + least / 100 {
        return packing;
    }
    let fitted = improved(multifit(costs, &order, bins));
    if fitted.fullest() < packing.fullest() { fitted } else { packing }
}

/// A load that the fullest of `bins` bins has in every packing: the mean, or the largest cost.
#[must_use]
pub fn least_load(costs: &[u64], bins: usize) -> u64 {
    let mean = costs.iter().sum::<u64>().div_ceil(bins.max(1) as u64);
    costs.iter().copied().max().unwrap_or(0).max(mean)
}

/// Puts each item, in this order, into the emptiest bin. Of equally full ones, it takes the bin
/// with the fewest items.
fn costliest_first(costs: &[u64], order: &[usize], bins: usize) -> Vec<usize> {
    let mut filled = vec![(0, 0_usize); bins];
    let mut places = vec![0; costs.len()];
    for item in order {
        let bin = (0..bins).min_by_key(|bin| filled[*bin]).unwrap_or(0);
        filled[bin] = (filled[bin].0 + costs[*item], filled[bin].1 + 1);
        places[*item] = bin;
    }
    places
}

/// First-fit decreasing with the least capacity that the search finds.
fn multifit(costs: &[u64], order: &[usize], bins: usize) -> Vec<usize> {
    // No packing is below `low`. With the capacity `high`, one bin has all items.
    let (mut low, mut high) = (least_load(costs, bins), costs.iter().sum::<u64>());
    let mut places = vec![0; costs.len()];
    while low < high {
        let middle = low + (high - low) / 2;
        match first_fit(costs, order, bins, middle) {
            Some(found) => (places, high) = (found, middle),
            None => low = middle + 1,
        }
    }
    places
}

/// Puts each item, in this order, into the first bin with room. `None` if an item finds none.
fn first_fit(costs: &[u64], order: &[usize], bins: usize, capacity: u64) -> Option<Vec<usize>> {
    let mut room = vec![capacity; bins];
    let mut places = vec![0; costs.len()];
    for item in order {
        let bin = room.iter().position(|room| *room >= costs[*item])?;
        room[bin] -= costs[*item];
        places[*item] = bin;
    }
    Some(places)
}

impl Packing {
    /// Items of these costs in the given bins, out of `bins`. An item without a bin, or in one that
    /// does not exist, is in bin 0.
    #[must_use]
    pub fn new(costs: &[u64], mut places: Vec<usize>, bins: usize) -> Self {
        let mut loads = vec![0; bins.max(1)];
        places.resize(costs.len(), 0);
        for (place, cost) in places.iter_mut().zip(costs) {
            if *place >= loads.len() {
                *place = 0;
            }
            loads[*place] += cost;
        }
        Self { bins: places, loads }
    }

    /// Item i in bin i mod `bins`, as DES places fields (Rong et al. 2020, section 5).
    #[must_use]
    pub fn modulo(costs: &[u64], bins: usize) -> Self {
        Self::new(costs, (0..costs.len()).map(|item| item % bins.max(1)).collect(), bins)
    }

    /// By item: its bin, from 0.
    #[must_use]
    pub fn bins(&self) -> &[usize] {
        &self.bins
    }

    /// By bin: the sum of the costs of its items.
    #[must_use]
    pub fn loads(&self) -> &[u64] {
        &self.loads
    }

    /// The largest load.
    #[must_use]
    pub fn fullest(&self) -> u64 {
        self.loads.iter().copied().max().unwrap_or(0)
    }

    /// The load of the fullest bin over the mean. 1 is even. 1 if every cost is 0.
    #[must_use]
    pub fn imbalance(&self) -> f64 {
        let total: u64 = self.loads.iter().sum();
        if total == 0 { 1.0 } else { self.fullest() as f64 * self.loads.len() as f64 / total as f64 }
    }

    /// Makes moves and swaps that relieve the fullest bin, until none does.
    fn improve(&mut self, costs: &[u64]) {
        for _change in 0..MOST_CHANGES {
            let Some(Change { item, to, other, .. }) = self.best_change(costs) else { return };
            let full = self.bins[item];
            self.put(item, to, costs);
            if let Some(other) = other {
                self.put(other, full, costs);
            }
        }
    }

    fn put(&mut self, item: usize, bin: usize, costs: &[u64]) {
        self.loads[self.bins[item]] -= costs[item];
        self.loads[bin] += costs[item];
        self.bins[item] = bin;
    }

    /// The change that leaves the least load in the fullest bin and its partner, if that is less
    /// than the fullest bin has.
    fn best_change(&self, costs: &[u64]) -> Option<Change> {
        let (full, load) = (0..).zip(&self.loads).max_by_key(|(bin, load)| (**load, Reverse(*bin)))?;
        let items = (0..costs.len()).filter(|item| self.bins[*item] == full && costs[*item] > 0);
        let changes = items.flat_map(|item| self.moves_of(item, costs).chain(self.swaps_of(item, costs)));
        changes.filter(|change| change.fuller < *load).min_by_key(|change| change.fuller)
    }

    fn moves_of(&self, item: usize, costs: &[u64]) -> impl Iterator<Item = Change> {
        let targets = (0..self.loads.len()).filter(move |to| *to != self.bins[item]);
        targets.map(move |to| self.change(item, to, None, costs))
    }

    fn swaps_of(&self, item: usize, costs: &[u64]) -> impl Iterator<Item = Change> {
        let is_smaller = move |other: &usize| self.bins[*other] != self.bins[item] && costs[*other] < costs[item];
        let others = (0..costs.len()).filter(is_smaller);
        others.map(move |other| self.change(item, self.bins[other], Some(other), costs))
    }

    fn change(&self, item: usize, to: usize, other: Option<usize>, costs: &[u64]) -> Change {
        // The other item costs less.
        let moved = costs[item] - other.map_or(0, |other| costs[other]);
        let fuller = (self.loads[self.bins[item]] - moved).max(self.loads[to] + moved);
        Change { item, to, other, fuller }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The least load of the fullest bin, by all packings.
    fn optimum(costs: &[u64], bins: usize) -> u64 {
        fn rest(costs: &[u64], loads: &mut [u64]) -> u64 {
            let Some((first, others)) = costs.split_first() else { return loads.iter().copied().max().unwrap_or(0) };
            let mut least = u64::MAX;
            for bin in 0..loads.len() {
                loads[bin] += first;
                least = least.min(rest(others, loads));
                loads[bin] -= first;
            }
            least
        }
        rest(costs, &mut vec![0; bins])
    }

    proptest! {
        #[test]
        fn the_fullest_bin_is_within_the_bound_of_the_optimum(
            costs in proptest::collection::vec(0_u64..60, 0..8),
            bins in 1_usize..4,
        ) {
            let packing = pack(&costs, bins);
            let (found, optimum) = (packing.fullest(), optimum(&costs, bins));
            prop_assert!(found >= optimum && optimum >= least_load(&costs, bins));
            prop_assert!(11 * found <= 13 * optimum + 11, "{found}, at best {optimum}");
        }

        #[test]
        fn every_item_is_in_one_bin_and_counts_there_once(
            costs in proptest::collection::vec(0_u64..1_000_000, 0..60),
            bins in 1_usize..9,
        ) {
            let packing = pack(&costs, bins);
            prop_assert_eq!(packing.bins().len(), costs.len());
            let mut loads = vec![0; bins];
            packing.bins().iter().zip(&costs).for_each(|(bin, cost)| loads[*bin] += cost);
            prop_assert_eq!(packing.loads(), loads);
        }

        #[test]
        fn no_move_and_no_swap_relieves_the_fullest_bin(
            costs in proptest::collection::vec(0_u64..1_000, 1..20),
            bins in 2_usize..5,
        ) {
            let packing = pack(&costs, bins);
            let full = packing.loads().iter().position(|load| *load == packing.fullest()).unwrap_or(0);
            let load = |bin: usize| packing.loads()[bin];
            let in_full = |item: usize, bin: usize| bin == full && costs[item] > 0;
            for (item, own) in packing.bins().iter().enumerate().filter(|(item, bin)| in_full(*item, **bin)) {
                for (other, to) in packing.bins().iter().enumerate().filter(|(_, bin)| **bin != full) {
                    let swapped = (load(*own) - costs[item] + costs[other]).max(load(*to) + costs[item] - costs[other]);
                    prop_assert!(swapped >= load(full), "a swap of {item} and {other}");
                }
                for to in (0..bins).filter(|to| *to != full) {
                    prop_assert!(load(to) + costs[item] >= load(full), "a move of {item} to {to}");
                }
            }
        }
    }

    #[test]
    fn a_swap_helps_where_no_move_does() {
        let costs = [6, 5, 4, 4];
        let mut packing = Packing::new(&costs, vec![0, 0, 1, 1], 2);
        assert_eq!(packing.loads(), [11, 8]);
        packing.improve(&costs);
        assert_eq!(packing.fullest(), 10);
    }

    /// A sample may not have the ids of a slot. Other rows have them.
    #[test]
    fn items_without_cost_are_divided_by_number() {
        let packing = pack(&[0; 12], 3);
        let count = |bin: usize| packing.bins().iter().filter(|of| **of == bin).count();
        assert_eq!([0, 1, 2].map(count), [4; 3]);
    }

    /// Large costs at equal distances in the order of the items are the worst case of i mod N.
    #[test]
    fn packing_is_even_where_modulo_is_not() {
        let costs: Vec<u64> =
            (0..26).map(|item| if u64::is_multiple_of(item, 4) { 1_000 } else { 10 + item }).collect();
        for bins in [2, 4, 8] {
            let (modulo, packed) = (Packing::modulo(&costs, bins).imbalance(), pack(&costs, bins).imbalance());
            let least = least_load(&costs, bins) as f64 * bins as f64 / costs.iter().sum::<u64>() as f64;
            assert!(packed < modulo && packed >= least - 1e-9, "{bins}: {packed}, {modulo}, {least}");
        }
    }

    #[test]
    fn no_items_no_bins_and_no_costs_are_even() {
        assert!((pack(&[], 3).imbalance() - 1.0).abs() < 1e-12 && pack(&[], 0).loads() == [0]);
        assert!((pack(&[0, 0], 2).imbalance() - 1.0).abs() < 1e-12);
        assert_eq!(Packing::new(&[5, 7], vec![1, 9], 2).loads(), [7, 5], "an unknown bin is bin 0");
    }
}
