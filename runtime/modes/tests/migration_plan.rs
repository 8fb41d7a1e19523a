//! Checks the promises of a migration's plan, for skewed and for arbitrary costs.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use proptest::prelude::*;
use rectrain_modes::migration::{Epoch, Move, SlotCost, SlotMap, imbalance, plan_moves, plan_weighted_moves};

/// The first `servers` numbers of servers.
fn first(servers: u16) -> Vec<u16> {
    (0..servers).collect()
}

fn after(map: &SlotMap, moves: &[Move], servers: &[u16]) -> SlotMap {
    let mut owners = map.owners().to_vec();
    for step in moves {
        assert_eq!(owners[step.slot.0 as usize], step.from);
        owners[step.slot.0 as usize] = step.to;
    }
    SlotMap::new(map.epoch().next(), owners, servers.iter().copied()).unwrap()
}

fn of(costs: &[SlotCost], cost: fn(&SlotCost) -> u64) -> Vec<u64> {
    costs.iter().map(cost).collect()
}

/// Look-ups of keys whose frequency falls as 1/rank^`exponent`, with many keys per slot. Every key
/// has a row of the same size.
fn zipf(slots: u32, exponent: f64) -> Vec<SlotCost> {
    let keys = 50 * u64::from(slots);
    let mut costs = vec![SlotCost::default(); slots as usize];
    for rank in 1..=keys {
        // Fibonacci hashing: the slot of a key does not depend on its rank.
        let slot = (u128::from(rank.wrapping_mul(0x9e37_79b9_7f4a_7c15)) * u128::from(slots)) >> 64;
        let cost = &mut costs[slot as usize];
        // A batch looks a key up once, however often the key occurs in it.
        cost.look_ups += (1e6 * (rank as f64).powf(-exponent)).min(2e3) as u64;
        cost.bytes += 100;
    }
    costs
}

#[test]
fn skewed_look_ups_and_bytes_are_balanced_to_a_tenth_of_the_mean() {
    for exponent in [0.8, 1.05, 1.2] {
        let costs = zipf(1024, exponent);
        for servers in [2, 3, 8, 16] {
            let map = SlotMap::even(1024, servers);
            let settled = after(&map, &plan_moves(&map, &costs, &first(servers)), &first(servers));
            for cost in [of(&costs, |cost| cost.look_ups), of(&costs, |cost| cost.bytes)] {
                let imbalance = imbalance(&settled, &cost);
                assert!(imbalance <= 1.1, "{servers} servers, s = {exponent}: {imbalance}");
            }
        }
    }
}

#[test]
fn growing_moves_little_more_than_the_new_servers_share() {
    let costs = zipf(1024, 0.8);
    let total: u64 = costs.iter().map(|cost| cost.bytes).sum();
    for (from, to) in [(1, 2), (1, 3), (2, 3), (4, 5)] {
        let map = SlotMap::even(1024, from);
        let moves = plan_moves(&map, &costs, &first(to));
        let moved: u64 = moves.iter().map(|step| costs[step.slot.0 as usize].bytes).sum();
        let share = total as f64 * f64::from(to - from) / f64::from(to);
        assert!((moved as f64) < 1.1 * share, "{from} -> {to}: {moved} of {total}");
    }
}

#[test]
fn without_measurements_slots_are_spread_by_number() {
    let map = SlotMap::even(1024, 1);
    let settled = after(&map, &plan_moves(&map, &[], &first(4)), &first(4));
    let counts: Vec<_> = (0..4).map(|server| settled.slots_of(server).count()).collect();
    assert!(counts.iter().all(|count| (220..=270).contains(count)), "{counts:?}");
}

/// The share of the look-ups on each server.
fn shares(map: &SlotMap, costs: &[SlotCost]) -> Vec<f64> {
    let total: u64 = of(costs, |cost| cost.look_ups).iter().sum();
    let sum = |server: &u16| map.slots_of(*server).map(|slot| costs[slot.0 as usize].look_ups).sum::<u64>();
    map.servers().iter().map(|server| sum(server) as f64 / total as f64).collect()
}

#[test]
fn a_server_of_less_weight_has_fewer_slots_and_gets_them_back() {
    let costs = zipf(1024, 0.8);
    for (weights, servers) in [(&[64, 2, 64][..], 3), (&[64, 16], 2), (&[64, 64, 64, 64, 8], 5)] {
        let map = SlotMap::even(1024, servers);
        let less = after(&map, &plan_weighted_moves(&map, &costs, &first(servers), weights), &first(servers));
        let total: u64 = weights.iter().sum();
        for (share, weight) in shares(&less, &costs).into_iter().zip(weights) {
            let expected = *weight as f64 / total as f64;
            assert!(share <= 1.1 * expected + 0.01, "{weights:?}: {share} instead of {expected}");
        }
        let again = plan_weighted_moves(&less, &costs, &first(servers), weights);
        assert!(again.is_empty(), "{} slots move twice", again.len());
        let even = after(&less, &plan_moves(&less, &costs, &first(servers)), &first(servers));
        assert!(imbalance(&even, &of(&costs, |cost| cost.look_ups)) <= 1.1, "{weights:?}");
    }
}

/// Moves of a slow server's slots are little more than the slots that it is not to have.
#[test]
fn only_the_slots_of_the_slow_server_move() {
    let costs = zipf(1024, 0.8);
    let map = SlotMap::even(1024, 3);
    let moves = plan_weighted_moves(&map, &costs, &first(3), &[64, 2, 64]);
    let of_others = moves.iter().filter(|step| step.from != 1).count();
    assert!(of_others * 10 <= moves.len(), "{of_others} of {} moves", moves.len());
    assert!(moves.len() <= 1024 / 3 + 35, "{} moves", moves.len());
}

proptest! {
    #[test]
    fn equal_weights_change_nothing(
        raw in prop::collection::vec((0_u64..1000, 0_u64..1000, 0_u16..6), 1..100),
        weight in 1_u64..1000,
    ) {
        let costs: Vec<_> = raw.iter().map(|(look_ups, bytes, _)| SlotCost { look_ups: *look_ups, bytes: *bytes }).collect();
        let map = SlotMap::new(Epoch(4), raw.iter().map(|(.., owner)| *owner).collect(), 0..6).unwrap();
        let weighted = plan_weighted_moves(&map, &costs, &first(6), &[weight; 6]);
        prop_assert_eq!(plan_moves(&map, &costs, &first(6)), weighted);
    }

    #[test]
    fn a_plan_uses_exactly_the_given_servers_and_is_stable(
        raw in prop::collection::vec((0_u64..1000, 0_u64..1000, 0_u16..6), 1..200),
        servers in prop::collection::btree_set(0_u16..7, 1..7),
    ) {
        let costs: Vec<_> = raw.iter().map(|(look_ups, bytes, _)| SlotCost { look_ups: *look_ups, bytes: *bytes }).collect();
        let servers: Vec<u16> = servers.into_iter().collect();
        let map = SlotMap::new(Epoch(4), raw.iter().map(|(.., owner)| *owner).collect(), 0..6).unwrap();
        let moves = plan_moves(&map, &costs, &servers);
        prop_assert_eq!(&moves, &plan_moves(&map, &costs, &servers));
        let settled = after(&map, &moves, &servers);
        prop_assert_eq!(settled.servers(), &servers);
        prop_assert!(settled.owners().iter().all(|owner| servers.contains(owner)));
        prop_assert!(plan_moves(&settled, &costs, &servers).is_empty(), "a balanced map stays unchanged");
    }
}
