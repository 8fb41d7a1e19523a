//! The replicas of a shard: the versions that they hold, and the order in which they are asked.
//! Pure: callers pass the time.

use std::time::{Duration, Instant};

use rectrain_serving::GroupContent;
use rectrain_serving::publication::Base;

/// The time for which a replica that was slow or failed is asked after the others.
const SUSPECT: Duration = Duration::from_secs(1);
/// A hedge costs this many look-ups, so that at most a tenth of the look-ups is sent twice when all
/// replicas are slow.
const HEDGE_COST: u32 = 10;
/// The most hedges that may follow each other at once.
const MOST_HEDGES: u32 = 10;

/// A version that a replica holds, and the content of its rows.
#[derive(Debug, Clone)]
pub(crate) struct HeldVersion {
    pub(crate) base: Base,
    pub(crate) content: Vec<GroupContent>,
}

/// A replica, as its watch shows it.
#[derive(Debug, Default)]
struct Replica {
    /// Oldest first. Empty if it is not connected.
    held: Vec<HeldVersion>,
    ending: bool,
    suspect_until: Option<Instant>,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Shard {
    replicas: Vec<Replica>,
    /// The replica that is asked first next time.
    turn: usize,
    /// Look-ups that hedges may be paid with.
    saved: u32,
    /// Since when no replica is connected.
    down_since: Option<Instant>,
}

impl Shard {
    pub(crate) fn new(replicas: usize, now: Instant) -> Self {
        Self {
            replicas: (0..replicas).map(|_| Replica::default()).collect(),
            turn: 0,
            saved: HEDGE_COST * MOST_HEDGES,
            down_since: Some(now),
        }
    }

    /// A replica holds these versions.
    pub(crate) fn set(&mut self, replica: usize, held: Vec<HeldVersion>, ending: bool, now: Instant) {
        let suspect_until = self.replicas[replica].suspect_until;
        self.replicas[replica] = Replica { held, ending, suspect_until };
        self.down_since = if self.connected() > 0 { None } else { self.down_since.or(Some(now)) };
    }

    /// Replicas that hold a version.
    pub(crate) fn connected(&self) -> usize {
        self.replicas.iter().filter(|replica| !replica.held.is_empty()).count()
    }

    /// Since when no replica is connected. `None` if one is.
    pub(crate) fn down_since(&self) -> Option<Instant> {
        self.down_since
    }

    /// The content of a version. `None` if no replica holds it.
    pub(crate) fn content(&self, base: &Base) -> Option<&[GroupContent]> {
        let held = self.replicas.iter().flat_map(|replica| replica.held.iter().rev());
        held.filter(|held| held.base == *base).map(|held| &held.content[..]).next()
    }

    /// The greatest sequence number that a replica holds; 0 without one.
    pub(crate) fn newest(&self) -> u64 {
        self.held().map(|held| held.base.sequence).max().unwrap_or(0)
    }

    /// The least sequence number that a replica holds; 0 without one.
    pub(crate) fn oldest(&self) -> u64 {
        self.held().map(|held| held.base.sequence).min().unwrap_or(0)
    }

    fn held(&self) -> impl Iterator<Item = &HeldVersion> {
        self.replicas.iter().flat_map(|replica| &replica.held)
    }

    /// The replicas that hold a version, in the order in which to ask them. They take turns. The
    /// ones that end or were slow come last.
    pub(crate) fn candidates(&mut self, base: &Base, now: Instant) -> Vec<usize> {
        let count = self.replicas.len();
        self.turn = (self.turn + 1) % count.max(1);
        let in_turn = (0..count).map(|place| (self.turn + place) % count);
        let mut found: Vec<usize> =
            in_turn.filter(|replica| self.replicas[*replica].held.iter().any(|held| held.base == *base)).collect();
        found.sort_by_key(|replica| {
            let Replica { ending, suspect_until, .. } = &self.replicas[*replica];
            (suspect_until.is_some_and(|until| now < until), *ending)
        });
        self.saved = (self.saved + 1).min(HEDGE_COST * MOST_HEDGES);
        found
    }

    /// A replica was slow or failed.
    pub(crate) fn suspect(&mut self, replica: usize, now: Instant) {
        self.replicas[replica].suspect_until = Some(now + SUSPECT);
    }

    /// Whether a look-up may be sent to another replica early. If so, it is paid.
    pub(crate) fn may_hedge(&mut self) -> bool {
        let rest = self.saved.checked_sub(HEDGE_COST);
        self.saved = rest.unwrap_or(self.saved);
        rest.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base(sequence: u64) -> Base {
        Base { sequence, digest: format!("{sequence}") }
    }

    fn held(sequences: std::ops::RangeInclusive<u64>) -> Vec<HeldVersion> {
        sequences
            .map(|sequence| HeldVersion {
                base: base(sequence),
                content: vec![GroupContent { rows: sequence, ..GroupContent::default() }],
            })
            .collect()
    }

    #[test]
    fn only_replicas_that_hold_the_version_are_asked_in_turns() {
        let now = Instant::now();
        let mut shard = Shard::new(3, now);
        assert_eq!((shard.candidates(&base(5), now), shard.down_since()), (vec![], Some(now)));
        shard.set(0, held(3..=5), false, now);
        shard.set(1, held(5..=7), false, now);
        shard.set(2, held(1..=4), false, now);
        let firsts: Vec<usize> = (0..6).map(|_| shard.candidates(&base(5), now)[0]).collect();
        assert!(firsts.contains(&0) && firsts.contains(&1) && !firsts.contains(&2), "{firsts:?}");
        assert_eq!(shard.candidates(&base(7), now), [1]);
        // The same number in another path.
        let other = Base { sequence: 5, digest: "other".to_owned() };
        assert_eq!(shard.candidates(&other, now), [0; 0]);
        assert_eq!((shard.newest(), shard.oldest(), shard.connected()), (7, 1, 3));
        assert_eq!(shard.content(&base(6)).map(|content| content[0].rows), Some(6));
        assert!(shard.content(&base(8)).is_none() && shard.down_since().is_none());
    }

    #[test]
    fn slow_and_ending_replicas_are_asked_last() {
        let now = Instant::now();
        let mut shard = Shard::new(3, now);
        (0..3).for_each(|replica| shard.set(replica, held(1..=1), replica == 1, now));
        shard.suspect(0, now);
        for _ in 0..6 {
            assert_eq!(shard.candidates(&base(1), now), [2, 1, 0]);
        }
        let later = now + SUSPECT;
        assert!((0..6).any(|_| shard.candidates(&base(1), later)[0] == 0));
    }

    #[test]
    fn a_shard_is_down_from_its_last_replica_on() {
        let start = Instant::now();
        let [first, second] = [1, 2].map(|seconds| start + Duration::from_secs(seconds));
        let mut shard = Shard::new(2, start);
        shard.set(0, held(1..=1), false, start);
        shard.set(0, Vec::new(), false, first);
        assert_eq!(shard.down_since(), Some(first));
        shard.set(1, Vec::new(), false, second);
        assert_eq!(shard.down_since(), Some(first));
        shard.set(1, held(2..=2), false, second);
        assert_eq!(shard.down_since(), None);
    }

    #[test]
    fn a_tenth_of_the_look_ups_is_hedged_in_the_long_run() {
        let now = Instant::now();
        let mut shard = Shard::new(1, now);
        let hedged = (0..1000).filter(|_| {
            shard.candidates(&base(1), now);
            shard.may_hedge()
        });
        // The first look-up finds everything saved.
        assert_eq!(hedged.count(), 999 / HEDGE_COST as usize + MOST_HEDGES as usize);
    }
}
