//! A simulated role whose members become slow, recover and flap.

use rectrain_random::SplitMix64;

use super::*;

/// Units of work in a second, and seconds for each of them at the usual speed.
const UNITS: f64 = 300.0;
const TIME: f64 = 0.002;

/// A role with a clock.
struct Role {
    shares: Shares,
    members: Vec<u32>,
    begun: Instant,
    seconds: u64,
    pace: Pace,
}

impl Role {
    fn new(members: u32, pace: Pace) -> Self {
        let (shares, members) = (Shares::default(), (0..members).collect());
        Self { shares, members, begun: Instant::now(), seconds: 0, pace }
    }

    fn weights(&self) -> Vec<u32> {
        self.members.iter().map(|member| self.shares.weight(*member)).collect()
    }

    /// One second, in which each member takes so many times the usual time for a unit.
    fn second(&mut self, factors: &[f64]) -> Option<ShareChange> {
        self.seconds += 1;
        let now = self.begun + Duration::from_secs(self.seconds);
        let total: u32 = self.weights().iter().sum();
        for (member, weight) in self.members.clone().into_iter().zip(self.weights()) {
            let units = UNITS * f64::from(weight) / f64::from(total);
            self.shares.record(member, units, units * TIME * factors[member as usize], now);
        }
        self.shares.passed(1.0, now);
        self.shares.decide(&self.members, self.pace, now)
    }

    /// The changes of so many seconds, each with its second.
    fn run(&mut self, seconds: u64, factors: &[f64]) -> Vec<(u64, ShareChange)> {
        let begun = self.seconds;
        (0..seconds).filter_map(|_| self.second(factors).map(|change| (self.seconds - begun, change))).collect()
    }
}

/// Units a second if each unit goes to the member that will have it done first: the naive model.
fn greedy(factors: &[f64]) -> f64 {
    let mut busy_until = vec![0.0; factors.len()];
    let units = 20_000;
    for _ in 0..units {
        let done = |member: &usize| busy_until[*member] + TIME * factors[*member];
        let first = (0..factors.len()).min_by(|a, b| done(a).total_cmp(&done(b))).unwrap();
        let until = done(&first);
        busy_until[first] = until;
    }
    f64::from(units) / busy_until.into_iter().fold(0.0, f64::max)
}

/// Units a second if each member gets its share of the units.
fn shared(weights: &[u32], factors: &[f64]) -> f64 {
    let total: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
    let longest = weights.iter().zip(factors).map(|(weight, factor)| f64::from(*weight) * TIME * factor);
    total / longest.fold(0.0, f64::max)
}

#[test]
fn a_slow_member_gets_less_and_then_as_much_as_before() {
    let (slow, well) = ([1.0, 33.0, 1.0], [1.0; 3]);
    let mut role = Role::new(3, PIECES);
    assert_eq!(role.run(60, &well), []);
    let falls = role.run(120, &slow);
    let [(fell, ShareChange { member: 1, weight, .. })] = falls[..] else { panic!("{falls:?}") };
    assert!(fell <= 15, "after {fell} s");
    assert_eq!(role.weights(), [EVEN, weight, EVEN]);
    assert!(matches!(role.shares.slowest(), Some((1, Some(_)))), "{:?}", role.shares.slowest());
    assert!(weight <= EVEN / 32, "{weight}");
    let rises = role.run(120, &well);
    let [(rose, ShareChange { member: 1, weight: EVEN, .. })] = rises[..] else { panic!("{rises:?}") };
    assert!((15..=30).contains(&rose), "after {rose} s");
    assert!(!role.shares.is_uneven() && role.shares.slowest().is_none());
}

/// The window still has slow units when the member has recovered.
#[test]
fn a_member_that_is_slow_for_less_than_the_pace_keeps_its_share() {
    for pace in [PIECES, CHUNKS, SLOTS] {
        let mut role = Role::new(3, pace);
        role.run(60, &[1.0; 3]);
        assert_eq!(role.run(8, &[1.0, 33.0, 1.0]), []);
        assert_eq!(role.run(60, &[1.0; 3]), []);
    }
}

#[test]
fn work_is_done_about_as_fast_as_if_the_first_free_took_each_unit() {
    for factors in [&[1.0, 4.0][..], &[1.0, 33.0], &[1.0, 1.0, 1.0, 10.0], &[1.0, 2.9, 1.1, 0.9]] {
        let mut role = Role::new(factors.len() as u32, SLOTS);
        role.run(120, factors);
        let (by_weight, best) = (shared(&role.weights(), factors), greedy(factors));
        assert!(by_weight >= 0.85 * best, "{factors:?}: {by_weight} of {best} with {:?}", role.weights());
        let even = vec![EVEN; factors.len()];
        assert!(by_weight > 1.5 * shared(&even, factors), "{factors:?}: no better than even shares");
    }
}

#[test]
fn noise_and_cheap_members_change_nothing() {
    let mut random = SplitMix64::new(7);
    let mut role = Role::new(4, PIECES);
    for _ in 0..600 {
        let factors: Vec<f64> = (0..4).map(|_| 0.6 + random.unit()).collect();
        assert_eq!(role.second(&factors), None);
    }
    // A slow member costs nothing if there is hardly any work.
    let mut idle = Role::new(2, PIECES);
    for second in 0..120 {
        let now = idle.begun + Duration::from_secs(second);
        idle.shares.record(0, 5.0, 5.0 * 1e-4, now);
        idle.shares.record(1, 5.0, 5.0 * 5e-3, now);
        idle.shares.passed(1.0, now);
        assert_eq!(idle.shares.decide(&[0, 1], PIECES, now), None);
    }
}

#[test]
fn the_median_leaves_the_member_out() {
    let times = [(1.0, 7), (2.0, 3), (5.0, 0), (9.0, 4)];
    for count in 1..=4 {
        for rank in 0..count {
            let mut others: Vec<f64> = times[..count].iter().map(|(time, _)| *time).collect();
            others.remove(rank);
            let expected = (count > 1).then(|| others[(others.len().max(1) - 1) / 2]);
            assert_eq!(median_without(rank, &times[..count]), expected, "{rank} of {count}");
        }
    }
}

/// Two members of equal speed are both of usual speed, however slow. A member without work in the
/// window has no time.
#[test]
fn only_members_with_measured_peers_are_judged() {
    assert_eq!(Role::new(1, PIECES).run(60, &[33.0]), []);
    assert_eq!(Role::new(2, PIECES).run(60, &[33.0, 33.0]), []);
    let mut role = Role::new(2, PIECES);
    for second in 0..60 {
        let now = role.begun + Duration::from_secs(second);
        role.shares.record(0, 100.0, 0.2, now);
        role.shares.passed(1.0, now);
        assert_eq!(role.shares.decide(&[0, 1], PIECES, now), None);
    }
}

/// Training in steps of `PIECES` pieces. Each piece is one unit. A step lasts as long as its
/// slowest piece.
struct Steps {
    role: Role,
    pieces: u64,
    seconds: f64,
}

impl Steps {
    const PIECES: u64 = 4;
    const SHORTEST: f64 = 0.02;

    /// The steps of so many seconds. Returns the pieces in a second.
    fn run(&mut self, seconds: f64, factors: &[f64]) -> f64 {
        let (begun, before) = (self.seconds, self.pieces);
        while self.seconds < begun + seconds {
            let shares = crate::turns::of_weights(&self.role.weights());
            let mut longest: f64 = Self::SHORTEST;
            let mut times = vec![(0.0, 0.0); factors.len()];
            for piece in 0..Self::PIECES {
                let member = crate::turns::member_at(&shares, factors.len() as u32, self.pieces + piece);
                let time = 0.25 * Self::SHORTEST * factors[member];
                times[member] = (times[member].0 + 1.0, times[member].1 + time);
                longest = longest.max(times[member].1);
            }
            self.pieces += Self::PIECES;
            self.seconds += longest;
            let now = self.role.begun + Duration::from_secs_f64(self.seconds);
            for (member, (units, time)) in times.into_iter().enumerate() {
                self.role.shares.record(member as u32, units, time, now);
            }
            self.role.shares.passed(longest, now);
            self.role.shares.decide(&self.role.members, self.role.pace, now);
        }
        (self.pieces - before) as f64 / (self.seconds - begun)
    }
}

/// In proportion, a member of 3 % gets every 33rd piece. Each of them takes 33 times as long.
#[test]
fn steps_that_wait_for_each_piece_go_on_beside_a_very_slow_member() {
    for members in [2, 3, 8] {
        let mut steps = Steps { role: Role::new(members, PIECES), pieces: 0, seconds: 0.0 };
        let well = vec![1.0; members as usize];
        let healthy = steps.run(60.0, &well);
        let slow: Vec<f64> = (0..members).map(|member| if member == 0 { 33.0 } else { 1.0 }).collect();
        steps.run(15.0, &slow);
        let beside_a_slow_one = steps.run(60.0, &slow);
        assert!(beside_a_slow_one > 0.9 * healthy, "{members}: {beside_a_slow_one} of {healthy}");
        assert!(steps.role.shares.weight(0) >= 1 && steps.role.shares.is_uneven());
        steps.run(90.0, &well);
        assert_eq!(steps.role.weights(), vec![EVEN; members as usize], "its few pieces show that it has recovered");
    }
}

/// With few pieces a slow member looks less slow. It keeps them until it is no longer slow.
#[test]
fn a_trickle_does_not_grow_while_the_member_is_slow() {
    let mut role = Role::new(2, PIECES);
    role.run(60, &[1.0, 33.0]);
    let weight = role.weights()[1];
    assert_eq!(role.run(300, &[1.0, 5.0]), []);
    assert_eq!(role.weights(), [EVEN, weight]);
    let rises = role.run(60, &[1.0, 1.2]);
    assert!(matches!(rises[..], [(_, ShareChange { member: 1, weight: EVEN, .. })]), "{rises:?}");
}

/// The most changes of a member that flaps for so many seconds. A rise needs twice as long after
/// each fall, and a fall follows each rise.
fn most_changes(seconds: u64, pace: Pace) -> usize {
    let (mut wait, mut left, mut changes) = (pace.well_for, Duration::from_secs(seconds), 1);
    while let Some(rest) = left.checked_sub(wait) {
        (left, changes) = (rest, changes + 2);
        wait = (wait * 2).min(LONGEST_WAIT);
    }
    changes
}

#[test]
fn a_member_that_flaps_changes_seldom() {
    assert_eq!((most_changes(240, PIECES), most_changes(240, SLOTS)), (9, 7));
    for (seed, pace) in (0..40).zip([PIECES, SLOTS].into_iter().cycle()) {
        let mut random = SplitMix64::new(seed);
        let mut role = Role::new(3, pace);
        let (mut changes, mut is_slow) = (0, false);
        while role.seconds < 240 {
            is_slow = !is_slow;
            let stay = (5.0 + 35.0 * random.unit()) as u64;
            let factors = [1.0, if is_slow { 33.0 } else { 1.0 }, 1.0];
            changes += role.run(stay.min(240 - role.seconds), &factors).len();
        }
        let most = most_changes(240, pace);
        assert!(changes <= most, "seed {seed}: {changes} changes, at most {most}");
        // Once it stays well, it gets its share again.
        role.run(300, &[1.0; 3]);
        assert_eq!(role.weights(), [EVEN; 3], "seed {seed}");
    }
}

#[test]
fn members_that_leave_are_forgotten_and_a_journal_keeps_the_weights() {
    let mut role = Role::new(3, SLOTS);
    role.run(60, &[1.0, 1.0, 8.0]);
    assert_eq!(role.weights(), [EVEN, EVEN, EVEN / 8]);
    let image = serde_json::to_vec(&role.shares).unwrap();
    let read: Shares = serde_json::from_slice(&image).unwrap();
    assert_eq!((read.weight(2), read.slowest()), (EVEN / 8, Some((2, None))));
    role.members = vec![0, 1];
    role.run(1, &[1.0; 3]);
    assert!(!role.shares.is_uneven());
}

#[test]
fn a_member_between_slow_and_well_gets_more_until_it_is_either() {
    let mut role = Role::new(2, PIECES);
    role.run(60, &[1.0, 33.0]);
    assert!(role.weights()[1] <= TRICKLE);
    let weights = role.run(150, &[1.0, 2.0]).into_iter().map(|(_, change)| change.weight);
    assert_eq!(weights.collect::<Vec<_>>(), [EVEN / 8, EVEN / 4, EVEN / 2, EVEN]);
    // At an even share it keeps that.
    assert_eq!(role.run(300, &[1.0, 2.0]), []);
}

/// Measurements from before a change say nothing about the time after it.
#[test]
fn a_change_in_force_is_measured_afresh() {
    let mut role = Role::new(2, PIECES);
    let changes = role.run(200, &[1.0, 4.0]);
    assert_eq!(changes.len(), 1, "{changes:?}");
    for _ in 0..100 {
        role.second(&[1.0, 1.0]);
        role.shares.forget();
    }
    assert_eq!(role.weights(), [EVEN, EVEN / 4], "nothing was measured");
}
