//! Which slots move where: from what each slot costs its server (look-ups and bytes, as measured) and from how many servers there
//! are to be. The same plan grows, shrinks and rebalances a job. Finding the fewest bytes that balance two costs at once is
//! bin packing; this is a greedy answer, the same for the same measurements.

use rectrain_embedding::Slot;

use super::SlotMap;

/// A server is left alone that has at most so many times the mean of each cost. Below what is promised (1.1), because what is
/// measured while slots move differs from what comes after.
const SETTLED: f64 = 1.05;

/// What a slot costs its server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotCost {
    /// Keys looked up since the last change of the map.
    pub look_ups: u64,
    /// Bytes of its rows.
    pub bytes: u64,
}

/// One slot from one server to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Move {
    /// What moves.
    pub slot: Slot,
    /// Its owner now.
    pub from: u16,
    /// Its owner to be.
    pub to: u16,
}

/// The slots that move so that just the servers 0 .. `servers` hold slots and none has many more look-ups or bytes than the mean, as
/// far as whole slots allow. `costs` is by slot. In the order of slots.
#[must_use]
pub fn plan_moves(map: &SlotMap, costs: &[SlotCost], servers: u16) -> Vec<Move> {
    let mut balance = Balance::new(map, costs, servers.max(1));
    balance.place_homeless(map);
    while balance.relieve_the_fullest() {}
    let to = balance.owners.iter();
    let moves = (0..).zip(map.owners()).zip(to).filter(|((_, from), to)| from != to);
    moves.map(|((slot, from), to)| Move { slot: Slot(slot), from: *from, to: *to }).collect()
}

/// The largest sum of a cost on one server, over the mean: 1 is even. 1 if nothing costs anything.
#[must_use]
pub fn imbalance(map: &SlotMap, costs: &[u64]) -> f64 {
    let mut sums = vec![0u64; map.servers()];
    for (owner, cost) in map.owners().iter().zip(costs) {
        sums[*owner as usize] += cost;
    }
    let total: u64 = sums.iter().sum();
    let most = sums.iter().max().copied().unwrap_or(0);
    if total == 0 { 1.0 } else { most as f64 * sums.len() as f64 / total as f64 }
}

/// Both costs of a slot or a server as parts of a server's mean.
type Load = [f64; 2];

struct Balance {
    /// By slot.
    loads: Vec<Load>,
    bytes: Vec<f64>,
    owners: Vec<u16>,
    /// By server.
    sums: Vec<Load>,
}

impl Balance {
    fn new(map: &SlotMap, costs: &[SlotCost], servers: u16) -> Self {
        let cost = |slot: usize| costs.get(slot).copied().unwrap_or_default();
        let slots = map.owners().len();
        let total = |of: fn(&SlotCost) -> u64| (0..slots).map(|slot| of(&cost(slot)) as f64).sum::<f64>();
        let means = [total(|cost| cost.look_ups), total(|cost| cost.bytes)].map(|total| total / f64::from(servers));
        let mean_slots = slots as f64 / f64::from(servers);
        let loads: Vec<Load> = (0..slots)
            .map(|slot| {
                let cost = cost(slot);
                let part = |cost: u64, mean: f64| if mean > 0.0 { cost as f64 / mean } else { 1.0 / mean_slots };
                [part(cost.look_ups, means[0]), part(cost.bytes, means[1])]
            })
            .collect();
        let mut sums = vec![[0.0; 2]; servers as usize];
        for (owner, load) in map.owners().iter().zip(&loads) {
            if let Some(sum) = sums.get_mut(*owner as usize) {
                add(sum, *load, 1.0);
            }
        }
        let bytes = (0..slots).map(|slot| cost(slot).bytes as f64).collect();
        Self { loads, bytes, owners: map.owners().to_vec(), sums }
    }

    /// Slots of servers that leave, the costliest first, each to the server that is least full with it.
    fn place_homeless(&mut self, map: &SlotMap) {
        let homeless = |slot: &usize| usize::from(map.owners()[*slot]) >= self.sums.len();
        let mut slots: Vec<usize> = (0..self.owners.len()).filter(homeless).collect();
        slots.sort_by(|a, b| most(self.loads[*b]).total_cmp(&most(self.loads[*a])).then(a.cmp(b)));
        for slot in slots {
            let (to, _) = self.best_place(slot, None);
            add(&mut self.sums[to], self.loads[slot], 1.0);
            self.owners[slot] = to as u16;
        }
    }

    /// Moves one slot off the fullest server; false if that is full enough, or no move helps.
    fn relieve_the_fullest(&mut self) -> bool {
        let fullest = |a: &usize, b: &usize| most(self.sums[*a]).total_cmp(&most(self.sums[*b])).then(b.cmp(a));
        let Some(full) = (0..self.sums.len()).max_by(fullest) else { return false };
        let before = self.sums[full];
        if self.sums.len() < 2 || most(before) <= SETTLED {
            return false;
        }
        let mut best: Option<(bool, f64, usize, usize)> = None;
        for slot in (0..self.owners.len()).filter(|slot| usize::from(self.owners[*slot]) == full) {
            let (to, there) = self.best_place(slot, Some(full));
            let mut here = before;
            add(&mut here, self.loads[slot], -1.0);
            let relief: f64 = (0..2).map(|cost| excess(before[cost]) - excess(here[cost])).sum();
            if most(here).max(there) >= most(before) || relief <= 0.0 {
                continue;
            }
            let settles = there <= SETTLED;
            // What helps most a byte; where no server has room, what leaves the fuller of the two least full.
            let worth = if settles { relief / (self.bytes[slot] + 1.0) } else { -most(here).max(there) };
            if best.is_none_or(|(other, more, ..)| (settles, worth) > (other, more)) {
                best = Some((settles, worth, slot, to));
            }
        }
        let Some((_, _, slot, to)) = best else { return false };
        add(&mut self.sums[full], self.loads[slot], -1.0);
        add(&mut self.sums[to], self.loads[slot], 1.0);
        self.owners[slot] = to as u16;
        true
    }

    /// The server that is least full once it has the slot, and how full it is then.
    fn best_place(&self, slot: usize, not: Option<usize>) -> (usize, f64) {
        let with = |server: usize| {
            let mut sum = self.sums[server];
            add(&mut sum, self.loads[slot], 1.0);
            (server, most(sum))
        };
        let places = (0..self.sums.len()).filter(|server| Some(*server) != not).map(with);
        places.min_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0))).unwrap_or((0, f64::INFINITY))
    }
}

fn add(sum: &mut Load, load: Load, times: f64) {
    sum.iter_mut().zip(load).for_each(|(sum, load)| *sum += times * load);
}

fn most(load: Load) -> f64 {
    load[0].max(load[1])
}

fn excess(load: f64) -> f64 {
    (load - SETTLED).max(0.0)
}
