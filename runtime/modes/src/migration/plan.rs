//! Plans which slots move where. The plan depends on the measured cost of each slot (look-ups and
//! bytes) and on the planned number of servers. The same plan grows, shrinks and rebalances a job,
//! and drains a server that is about to stop. Moving the fewest bytes that balance two costs at
//! once is bin packing. This greedy algorithm approximates it, and returns the same plan for the
//! same measurements.

use std::cmp::Reverse;

use rectrain_embedding::Slot;

use super::SlotMap;

/// The mean cost of a server, in the units of [`Load`].
const MEAN: u64 = 1 << 32;
/// A server with at most this much of each cost, 1.05 times the mean, keeps its slots. This is
/// below the promised limit of 1.1, because costs measured while slots move differ from later
/// costs.
const SETTLED: u64 = MEAN + MEAN / 20;

/// The cost of a slot for its server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotCost {
    /// Keys looked up since the last change of the map.
    pub look_ups: u64,
    /// Bytes of its rows.
    pub bytes: u64,
}

/// The move of one slot from one server to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Move {
    /// The slot that moves.
    pub slot: Slot,
    /// The number of its present owner.
    pub from: u16,
    /// The number of its next owner.
    pub to: u16,
}

/// Plans the moves after which only `servers` hold slots (their numbers, ascending). No server then
/// has many more look-ups or bytes than the mean, as far as whole slots allow. `costs` is indexed
/// by slot. The moves are in the order of slots. There are none if `servers` is empty.
#[must_use]
pub fn plan_moves(map: &SlotMap, costs: &[SlotCost], servers: &[u16]) -> Vec<Move> {
    plan_weighted_moves(map, costs, servers, &vec![1; servers.len()])
}

/// As [`plan_moves`], for servers that are to have look-ups and bytes in proportion to `weights`
/// instead of equal ones. `weights` is indexed like `servers`. A missing weight or 0 counts as 1.
#[must_use]
pub fn plan_weighted_moves(map: &SlotMap, costs: &[SlotCost], servers: &[u16], weights: &[u64]) -> Vec<Move> {
    if servers.is_empty() {
        return Vec::new();
    }
    let mut balance = Balance::new(map, costs, servers, weights);
    balance.place_homeless();
    while balance.relieve_the_fullest() {}
    let to = balance.owners.iter().flatten().map(|place| servers[*place]);
    let moves = (0..).zip(map.owners()).zip(to).filter(|((_, from), to)| *from != to);
    moves.map(|((slot, from), to)| Move { slot: Slot(slot), from: *from, to }).collect()
}

/// The largest sum of a cost on one server, divided by the mean. 1 is even. 1 if every cost is 0.
#[must_use]
pub fn imbalance(map: &SlotMap, costs: &[u64]) -> f64 {
    let mut sums = vec![0u64; map.servers().len()];
    for (slot, cost) in (0..map.slots()).zip(costs) {
        sums[map.owner(Slot(slot))] += cost;
    }
    let total: u64 = sums.iter().sum();
    let most = sums.iter().max().copied().unwrap_or(0);
    if total == 0 { 1.0 } else { most as f64 * sums.len() as f64 / total as f64 }
}

/// Both costs of a slot or a server, as parts of a server's mean ([`MEAN`]). Whole numbers have the
/// same sum in any order, so a balanced map stays unchanged.
type Load = [u64; 2];

struct Balance {
    /// Indexed by slot.
    loads: Vec<Load>,
    bytes: Vec<u64>,
    /// Indexed by slot: the index of the owner among the planned servers. `None` while the owner is
    /// not one of them.
    owners: Vec<Option<usize>>,
    /// Indexed by server.
    sums: Vec<Load>,
    /// Indexed by server.
    weights: Vec<u64>,
    total_weight: u64,
}

impl Balance {
    fn new(map: &SlotMap, costs: &[SlotCost], servers: &[u16], weights: &[u64]) -> Self {
        let slots = map.owners().len();
        let costs: Vec<SlotCost> = (0..slots).map(|slot| costs.get(slot).copied().unwrap_or_default()).collect();
        let look_ups = parts(costs.iter().map(|cost| cost.look_ups), servers.len());
        let bytes = parts(costs.iter().map(|cost| cost.bytes), servers.len());
        let loads: Vec<Load> = look_ups.into_iter().zip(bytes).map(|(look_ups, bytes)| [look_ups, bytes]).collect();
        let owners: Vec<_> = map.owners().iter().map(|owner| servers.binary_search(owner).ok()).collect();
        let mut sums = vec![[0; 2]; servers.len()];
        for (owner, load) in owners.iter().zip(&loads) {
            if let Some(owner) = owner {
                sums[*owner] = with(sums[*owner], *load);
            }
        }
        let bytes = costs.iter().map(|cost| cost.bytes).collect();
        let weight = |server: usize| weights.get(server).copied().unwrap_or(1).max(1);
        let weights: Vec<u64> = (0..servers.len()).map(weight).collect();
        let total_weight = weights.iter().sum();
        Self { loads, bytes, owners, sums, weights, total_weight }
    }

    /// A load on a server, in relation to what the server is to have: [`MEAN`] if it has exactly
    /// that. With equal weights it is the load itself.
    fn relative(&self, server: usize, load: Load) -> Load {
        let whole = u128::from(self.total_weight);
        let own = u128::from(self.weights[server]) * self.weights.len() as u128;
        load.map(|cost| u64::try_from(u128::from(cost) * whole / own).unwrap_or(u64::MAX))
    }

    /// The larger of the two costs on a server, in relation to what the server is to have.
    fn fullness(&self, server: usize, load: Load) -> u64 {
        most(self.relative(server, load))
    }

    /// Assigns the slots of leaving servers, the costliest first. Each goes to the server with the
    /// least load once it has the slot.
    fn place_homeless(&mut self) {
        let mut slots: Vec<usize> = (0..self.owners.len()).filter(|slot| self.owners[*slot].is_none()).collect();
        slots.sort_by_key(|slot| (Reverse(most(self.loads[*slot])), *slot));
        for slot in slots {
            let (to, _) = self.best_place(slot, None);
            self.sums[to] = with(self.sums[to], self.loads[slot]);
            self.owners[slot] = Some(to);
        }
    }

    /// Moves one slot off the fullest server. Returns false if that server is within the limit, or
    /// no move helps.
    fn relieve_the_fullest(&mut self) -> bool {
        let fullest = |server: &usize| (self.fullness(*server, self.sums[*server]), Reverse(*server));
        let Some(full) = (0..self.sums.len()).max_by_key(fullest) else { return false };
        let before = self.relative(full, self.sums[full]);
        if self.sums.len() < 2 || most(before) <= SETTLED {
            return false;
        }
        let mut best: Option<(bool, f64, usize, usize)> = None;
        for slot in (0..self.owners.len()).filter(|slot| self.owners[*slot] == Some(full)) {
            let (to, there) = self.best_place(slot, Some(full));
            let here = self.relative(full, without(self.sums[full], self.loads[slot]));
            let relief: u64 = (0..2).map(|cost| excess(before[cost]) - excess(here[cost])).sum();
            if most(here).max(there) >= most(before) || relief == 0 {
                continue;
            }
            let settles = there <= SETTLED;
            // If a target has room: the most relief per byte. Otherwise: the lowest load of the
            // fuller of the two servers.
            let worth =
                if settles { relief as f64 / (self.bytes[slot] as f64 + 1.0) } else { -(most(here).max(there) as f64) };
            if best.is_none_or(|(other, more, ..)| (settles, worth) > (other, more)) {
                best = Some((settles, worth, slot, to));
            }
        }
        let Some((_, _, slot, to)) = best else { return false };
        self.sums[full] = without(self.sums[full], self.loads[slot]);
        self.sums[to] = with(self.sums[to], self.loads[slot]);
        self.owners[slot] = Some(to);
        true
    }

    /// The server with the least load once it has the slot, and that load.
    fn best_place(&self, slot: usize, not: Option<usize>) -> (usize, u64) {
        let full = |server: usize| (server, self.fullness(server, with(self.sums[server], self.loads[slot])));
        let places = (0..self.sums.len()).filter(|server| Some(*server) != not).map(full);
        places.min_by_key(|(server, full)| (*full, *server)).unwrap_or((0, u64::MAX))
    }
}

/// Each cost as a part of a server's mean. If all costs are 0, all slots count the same.
fn parts(costs: impl ExactSizeIterator<Item = u64> + Clone, servers: usize) -> Vec<u64> {
    let total: u128 = costs.clone().map(u128::from).sum();
    let whole = u128::from(MEAN) * servers as u128;
    let even = whole / (costs.len().max(1) as u128);
    costs.map(|cost| (u128::from(cost) * whole).checked_div(total).unwrap_or(even) as u64).collect()
}

fn with(sum: Load, load: Load) -> Load {
    [sum[0] + load[0], sum[1] + load[1]]
}

fn without(sum: Load, load: Load) -> Load {
    [sum[0] - load[0], sum[1] - load[1]]
}

fn most(load: Load) -> u64 {
    load[0].max(load[1])
}

fn excess(load: u64) -> u64 {
    load.saturating_sub(SETTLED)
}
