//! The shares of a role's work that its members get by their measured speed. Pure: every time is an
//! argument.
//!
//! A member's *time* is the seconds that it works on a unit: on a piece, or on a row. Its *weight*
//! says how much of the work it gets compared with a member of usual speed, which has [`EVEN`]. A
//! slow member gets a weight in proportion to its speed, and at least [`Pace::least`], so that its
//! recovery can be measured.
//!
//! **A trickle.** With [`Pace::is_awaited`], training waits for every unit, and a unit is not
//! divided. A member that takes [`TRICKLE_FACTOR`] times the usual time would then cost more than
//! it gains, even with a share in proportion. So it gets few units: training waits for them for
//! [`TRICKLE_COST`] of its time, or it gets one in [`TRICKLE_EVERY`]. Its last units measure its
//! recovery.
//!
//! **Hysteresis.** A member is slow from [`SLOW_FACTOR`] times the median time of the others on. At
//! an even share of work, that must also cost a noticeable share of training. It is well up to
//! [`WELL_FACTOR`] times, or if it would cost next to nothing. In between, a member with [`EVEN`]
//! keeps it, and the weight of any other doubles, from an eighth on. A member with little work is
//! measured less well: with more work it shows whether it is slow.
//!
//! **Bound.** A weight falls once the member has been slow for [`Pace::slow_for`]. It rises once
//! the member has been well for a while: at first for [`Pace::well_for`], and twice as long after
//! each fall within [`FORGIVEN_AFTER`]. So within any [`FORGIVEN_AFTER`], the number of changes of
//! a member that flaps grows only with the logarithm of the time.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The weight of a member of usual speed.
pub const EVEN: u32 = 4096;
/// A member is slow from this many times the usual time on.
const SLOW_FACTOR: f64 = 2.5;
/// A slow member costs at least this share of the time of training, at an even share of work.
const SLOW_COST: f64 = 0.1;
/// A member is well up to this many times the usual time, or up to this cost.
const WELL_FACTOR: f64 = 1.5;
const WELL_COST: f64 = 0.02;
/// From this many times the usual time on, a member gets a trickle of awaited units.
const TRICKLE_FACTOR: f64 = 8.0;
/// The most that a trickle costs, as a share of the time of training.
const TRICKLE_COST: f64 = 0.05;
/// The longest time between two units of a trickle. They measure whether the member has recovered.
const TRICKLE_EVERY: Duration = Duration::from_secs(20);
/// Up to this weight a member has a trickle, or little more.
const TRICKLE: u32 = EVEN / TRICKLE_FACTOR as u32;
/// A weight changes by at least this factor.
const LEAST_CHANGE: f64 = 1.5;
/// The window over which times are measured, in parts.
const PARTS: usize = 4;
const PART: Duration = Duration::from_secs(2);
/// The last parts of the window, in which a member must be slow as well.
const LATE_PARTS: usize = 2;
/// Units of a member in the window, below which its time is not known.
const LEAST_UNITS: f64 = 2.0;
/// The part of a higher rate of training that is kept from one decision to the next.
const RATE_KEPT: f64 = 0.998;
/// Time after a fall, after which the next fall counts as the first.
const FORGIVEN_AFTER: Duration = Duration::from_mins(10);
/// The least time between two decisions.
const DECIDE_EVERY: Duration = Duration::from_secs(1);
/// The longest time that a member must be well before its weight rises.
const LONGEST_WAIT: Duration = Duration::from_mins(4);

/// How fast the weights of a role follow the measurements.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Time for which a member must be slow before its weight falls. Longer than the window, so
    /// that the window has no measurement from before.
    pub slow_for: Duration,
    /// Time for which it must be well before its weight rises again, after its first fall.
    pub well_for: Duration,
    /// The least weight.
    pub least: u32,
    /// Whether training waits for each unit, however few a member has.
    pub is_awaited: bool,
}

impl Pace {
    const fn new(slow_seconds: u64, well_seconds: u64, least: u32) -> Self {
        let (slow_for, well_for) = (Duration::from_secs(slow_seconds), Duration::from_secs(well_seconds));
        Self { slow_for, well_for, least, is_awaited: false }
    }
}

/// Pieces are assigned to embedding workers at no cost.
pub const PIECES: Pace = Pace { is_awaited: true, ..Pace::new(10, 15, 1) };
/// Loaders lease chunks. A second loader reads the chunks of a slow one, so nothing waits for it.
pub const CHUNKS: Pace = Pace::new(10, 15, EVEN / 16);
/// Moving slots sends their rows.
pub const SLOTS: Pace = Pace::new(10, 20, EVEN / 32);

/// The weights of a role's members, by number. A member without an entry has [`EVEN`].
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Shares {
    weights: BTreeMap<u32, u32>,
    #[serde(skip)]
    window: VecDeque<Part>,
    #[serde(skip)]
    trends: BTreeMap<u32, Trend>,
    /// By member with a trickle: the work that was recorded last.
    #[serde(skip)]
    last: BTreeMap<u32, (f64, f64)>,
    /// Units in a second of training, at the best of the last minutes.
    #[serde(skip)]
    rate: f64,
    #[serde(skip)]
    decided: Option<Instant>,
}

/// Measurements of a part of the window.
#[derive(Debug)]
struct Part {
    begun: Instant,
    /// Seconds of training.
    seconds: f64,
    /// By member: units of work, and seconds of work on them.
    work: BTreeMap<u32, (f64, f64)>,
}

/// How long a member's weight should have been another one.
#[derive(Debug, Default)]
struct Trend {
    falls_since: Option<Instant>,
    rises_since: Option<Instant>,
    /// The last fall, and the time that the member must be well before the next rise.
    fell: Option<(Instant, Duration)>,
}

/// A change of a member's weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShareChange {
    pub member: u32,
    pub weight: u32,
    /// The member's time over the median time of the others.
    pub factor: f64,
}

impl ShareChange {
    /// The member's work over the work of a member of usual speed.
    pub fn share(&self) -> f64 {
        f64::from(self.weight) / f64::from(EVEN)
    }
}

impl Shares {
    /// Records work of a member: units, and seconds of work on them.
    pub fn record(&mut self, member: u32, units: f64, seconds: f64, now: Instant) {
        let (all_units, all_seconds) = self.part(now).work.entry(member).or_default();
        *all_units += units;
        *all_seconds += seconds;
        if units > 0.0 && self.weight(member) <= TRICKLE {
            self.last.insert(member, (units, seconds));
        }
    }

    /// Records that training has gone on for `seconds`. Members' times are compared with them.
    pub fn passed(&mut self, seconds: f64, now: Instant) {
        self.part(now).seconds += seconds;
    }

    /// Forgets the measurements. Call it while an earlier change is not in force yet.
    pub fn forget(&mut self) {
        self.window.clear();
        self.last.clear();
        for trend in self.trends.values_mut() {
            (trend.falls_since, trend.rises_since) = (None, None);
        }
    }

    /// The weight of a member.
    pub fn weight(&self, member: u32) -> u32 {
        self.weights.get(&member).copied().unwrap_or(EVEN)
    }

    /// The member with the least weight below [`EVEN`], and when its weight fell. The time is
    /// unknown after the shares were read from a journal.
    pub fn slowest(&self) -> Option<(u32, Option<Instant>)> {
        let (member, _) = self.weights.iter().min_by_key(|(_, weight)| **weight)?;
        let fell = self.trends.get(member).and_then(|trend| trend.fell);
        Some((*member, fell.map(|(fell, _)| fell)))
    }

    /// Whether a member has another weight than the rest.
    pub fn is_uneven(&self) -> bool {
        !self.weights.is_empty()
    }

    /// Decides at `now` about the present members. Call it at least every few seconds; more often
    /// than once a second changes nothing. At most one weight changes; the caller brings it into
    /// force.
    pub fn decide(&mut self, members: &[u32], pace: Pace, now: Instant) -> Option<ShareChange> {
        if self.decided.is_some_and(|before| now.saturating_duration_since(before) < DECIDE_EVERY) {
            return None;
        }
        self.decided = Some(now);
        self.weights.retain(|member, _| members.contains(member));
        self.trends.retain(|member, _| members.contains(member));
        self.last.retain(|member, _| members.contains(member));
        let oldest = now.checked_sub(PART * PARTS as u32);
        self.window.retain(|part| oldest.is_none_or(|oldest| part.begun >= oldest));
        if self.window.len() + 1 < PARTS {
            return None;
        }
        let (times, units) = self.times(members);
        let seconds: f64 = self.window.iter().map(|part| part.seconds).sum();
        let rate = units / seconds.max(f64::MIN_POSITIVE);
        // It falls slowly, because a slow member slows all.
        self.rate = rate.max(self.rate * RATE_KEPT);
        let wanted = self.wanted(&times, rate, members.len(), pace);
        let changes = wanted.into_iter().filter_map(|wanted| self.follow(wanted, pace, now));
        // Collected, so that the trend of each member is followed.
        let changes: Vec<ShareChange> = changes.collect();
        let change = changes.into_iter().max_by(|a, b| a.factor.total_cmp(&b.factor))?;
        self.apply(change, pace, now);
        Some(change)
    }

    /// The weight that each measured member should have. `times` ascend, and `rate` are the units
    /// in a second of training.
    fn wanted(&self, times: &[(f64, u32)], rate: f64, members: usize, pace: Pace) -> Vec<ShareChange> {
        let wanted = |(rank, &(time, member)): (usize, &(f64, u32))| {
            let usual = median_without(rank, times)?;
            let factor = time / usual;
            let cost = (time - usual) * rate / members.max(1) as f64;
            let weight = if factor <= WELL_FACTOR || cost <= WELL_COST {
                EVEN
            } else if factor < SLOW_FACTOR || cost < SLOW_COST {
                (2 * self.weight(member)).clamp(TRICKLE, EVEN)
            } else if self.is_slow_lately(member, usual) {
                // Without the slow member, training will be as fast as it was.
                let rate = self.rate / (members.max(2) - 1) as f64;
                self.slow_weight((time - usual, member), factor, rate, pace)
            } else {
                self.weight(member)
            };
            Some(ShareChange { member, weight, factor })
        };
        times.iter().enumerate().filter_map(wanted).collect()
    }

    /// Whether the member was slow in the last parts of the window, too. The whole window still has
    /// the slow units of a member that has just recovered. A member without units may be stuck.
    fn is_slow_lately(&self, member: u32, usual: f64) -> bool {
        let lately = self.window.iter().rev().take(LATE_PARTS).filter_map(|part| part.work.get(&member));
        let (units, seconds) = lately.fold((0.0, 0.0), |sum, work| (sum.0 + work.0, sum.1 + work.1));
        units <= 0.0 || seconds / units >= SLOW_FACTOR * usual
    }

    /// The weight of a slow member, which takes `seconds` more for a unit than the others do. Each
    /// of them has `rate` units a second if they have all of the work.
    fn slow_weight(&self, (seconds, member): (f64, u32), factor: f64, rate: f64, pace: Pace) -> u32 {
        let in_proportion = ((f64::from(EVEN) / factor).round() as u32).clamp(pace.least, EVEN);
        if !pace.is_awaited {
            return in_proportion;
        }
        let units_per_second = (TRICKLE_COST / seconds).max(1.0 / TRICKLE_EVERY.as_secs_f64());
        let trickle = (f64::from(EVEN) * units_per_second / rate).ceil() as u32;
        let weight = if factor < TRICKLE_FACTOR { in_proportion } else { in_proportion.min(trickle).max(pace.least) };
        // A unit alone takes a throttled member less time than one of several. So a member that is
        // still slow does not get more.
        weight.min(self.weight(member))
    }

    /// The times of the measured members, ascending, and the units of all of them.
    fn times(&self, members: &[u32]) -> (Vec<(f64, u32)>, f64) {
        let mut sums: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
        for (member, (units, seconds)) in self.window.iter().flat_map(|part| &part.work) {
            let sum = sums.entry(*member).or_default();
            *sum = (sum.0 + units, sum.1 + seconds);
        }
        sums.retain(|_, (units, _)| *units >= LEAST_UNITS);
        for (member, last) in &self.last {
            sums.entry(*member).or_insert(*last);
        }
        sums.retain(|member, (_, seconds)| members.contains(member) && *seconds > 0.0);
        let units = sums.values().map(|(units, _)| units).sum();
        let mut times: Vec<(f64, u32)> =
            sums.into_iter().map(|(member, (units, seconds))| (seconds / units, member)).collect();
        times.sort_by(|a, b| a.0.total_cmp(&b.0));
        (times, units)
    }

    /// Follows the trend of a member. Returns the change if it is due.
    fn follow(&mut self, wanted: ShareChange, pace: Pace, now: Instant) -> Option<ShareChange> {
        let present = f64::from(self.weight(wanted.member));
        let trend = self.trends.entry(wanted.member).or_default();
        let (falls, rises) =
            (f64::from(wanted.weight) * LEAST_CHANGE <= present, f64::from(wanted.weight) >= present * LEAST_CHANGE);
        let falls_since = falls.then(|| trend.falls_since.unwrap_or(now));
        let rises_since = rises.then(|| trend.rises_since.unwrap_or(now));
        (trend.falls_since, trend.rises_since) = (falls_since, rises_since);
        let wait = trend.fell.map_or(pace.well_for, |(_, wait)| wait);
        let has_lasted =
            |since: Option<Instant>, time| since.is_some_and(|since| now.saturating_duration_since(since) >= time);
        (has_lasted(falls_since, pace.slow_for) || has_lasted(rises_since, wait)).then_some(wanted)
    }

    fn apply(&mut self, change: ShareChange, pace: Pace, now: Instant) {
        let falls = change.weight < self.weight(change.member);
        let trend = self.trends.entry(change.member).or_default();
        if falls {
            let recent = trend.fell.filter(|(fell, _)| now.saturating_duration_since(*fell) < FORGIVEN_AFTER);
            let wait = recent.map_or(pace.well_for, |(_, wait)| (wait * 2).min(LONGEST_WAIT));
            trend.fell = Some((now, wait));
        }
        self.set(change.member, change.weight);
        self.forget();
    }

    /// Sets the weight of a member.
    pub fn set(&mut self, member: u32, weight: u32) {
        match weight.clamp(1, EVEN) {
            EVEN => self.weights.remove(&member),
            weight => self.weights.insert(member, weight),
        };
    }

    /// The part of the window at `now`.
    fn part(&mut self, now: Instant) -> &mut Part {
        let is_new = self.window.back().is_none_or(|part| now.saturating_duration_since(part.begun) >= PART);
        if is_new {
            self.window.push_back(Part { begun: now, seconds: 0.0, work: BTreeMap::new() });
        }
        if self.window.len() > PARTS + 1 {
            self.window.pop_front();
        }
        let last = self.window.len() - 1;
        &mut self.window[last]
    }
}

/// The lower median of ascending times without the one at `rank`. `None` without another one.
fn median_without(rank: usize, times: &[(f64, u32)]) -> Option<f64> {
    let middle = times.len().checked_sub(2)? / 2;
    let (time, _) = times.get(if rank > middle { middle } else { middle + 1 })?;
    Some(*time)
}

#[cfg(test)]
#[path = "shares_tests.rs"]
mod tests;
