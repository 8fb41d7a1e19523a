//! Names the member that slows training the most. Pure: every time is an argument.
//!
//! Dense workers report how they spend the time of their steps: on their own computation, and on
//! waits for other members. A member's *load* is the time spent on it, over the time of all steps.
//! If dense workers train steps together, the report with the largest load counts: the other
//! workers wait for that one. The load of a dense worker is the time of its computation per row.
//! The load of an embedding worker counts per piece, because shares of the pieces differ. A member
//! is slow if its load is far above the median load of its peers. A member without peers is
//! compared with its own smallest load since the last change of the mode or of the members.
//!
//! The *share* of a slow member is the part of the steps' time that it would save as fast as its
//! peers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use rectrain_proto::{member_role, v1};
use rectrain_protocol::Role;

/// The window over which loads are measured, in parts.
const PARTS: usize = 5;
const PART: Duration = Duration::from_secs(2);
/// Least seconds of steps in the window, below which nothing is known.
const LEAST_SECONDS: f64 = 1.0;
/// Least pieces of an embedding worker in the window, below which its wait for loaders is unknown.
const LEAST_PIECES: f64 = 2.0;
/// A member with this share and this many times the usual load is slow.
const SLOW_SHARE: f64 = 0.3;
const SLOW_FACTOR: f64 = 2.0;
/// The share below which a named member has recovered.
const RECOVERED_SHARE: f64 = 0.15;
/// Time for which a member must be slow before it is named, and recovered before it is not.
const NAMED_AFTER: Duration = Duration::from_secs(6);
const RECOVERED_AFTER: Duration = Duration::from_secs(8);
/// How much larger the share of another member must be to be named instead.
const WORSE: f64 = 1.5;
/// Time for which a report of a wait counts. Members repeat it every two seconds.
const WAIT_COUNTS: Duration = Duration::from_secs(6);

/// A member of the job.
pub(super) type MemberId = (Role, u32);

/// The circumstances under which loads are comparable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) mode: &'static str,
    /// Whether dense workers train steps together. A wait of one of them then delays all.
    pub(super) together: bool,
    pub(super) members: BTreeMap<Role, u32>,
}

/// The named member.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Named {
    pub(super) member: MemberId,
    pub(super) share: f64,
    /// When it became slow, in seconds since 1970.
    pub(super) since_seconds: u64,
}

/// A change of the named member.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Change {
    Slow(Named),
    Recovered(MemberId),
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Slowest {
    setting: Option<Setting>,
    window: VecDeque<Part>,
    /// The smallest load of each member, in this setting.
    calm: BTreeMap<MemberId, f64>,
    /// By waiting member: the member that it waits for, and the time of its last report.
    waits: BTreeMap<MemberId, (MemberId, Instant)>,
    rising: Option<Rising>,
    recovering: Option<Instant>,
    named: Option<Named>,
}

/// Reports of a part of the window.
#[derive(Debug)]
struct Part {
    begun: Instant,
    sums: Sums,
}

#[derive(Debug, Default)]
struct Sums {
    /// By rank: seconds of steps, and rows.
    steps: BTreeMap<u32, (f64, f64)>,
    /// By member and rank.
    spent: BTreeMap<(MemberId, u32), f64>,
    /// By embedding worker and rank: its pieces, and the seconds spent on their loaders.
    pieces: BTreeMap<(u32, u32), (f64, f64)>,
}

/// A member that is slow and not named yet.
#[derive(Debug, Clone, Copy)]
struct Rising {
    member: MemberId,
    since: Instant,
    since_seconds: u64,
}

/// A slow member, with its share.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Slow {
    member: MemberId,
    share: f64,
}

impl Slowest {
    /// Records the report of a dense worker. Time spent on members of the role `ignored` does not
    /// count: loaders of a stream wait for records.
    pub(super) fn record(&mut self, report: &v1::Progress, ignored: Option<Role>, now: Instant) {
        if report.step_seconds <= 0.0 {
            return;
        }
        if self.window.back().is_none_or(|part| now.saturating_duration_since(part.begun) >= PART) {
            self.window.push_back(Part { begun: now, sums: Sums::default() });
        }
        let Some(part) = self.window.back_mut() else { return };
        let (seconds, rows) = part.sums.steps.entry(report.rank).or_default();
        *seconds += report.step_seconds;
        *rows += report.samples as f64;
        for spent in &report.spent {
            let role = member_role(spent.role()).filter(|role| spent.seconds > 0.0 && Some(*role) != ignored);
            if let Some(role) = role {
                *part.sums.spent.entry(((role, spent.index), report.rank)).or_default() += spent.seconds;
            }
        }
        let waits_for_records = ignored == Some(Role::Loader);
        for time in &report.pieces {
            let sum = part.sums.pieces.entry((time.embedding_worker, report.rank)).or_default();
            let loader_seconds = if waits_for_records { 0.0 } else { time.loader_seconds };
            *sum = (sum.0 + f64::from(time.pieces), sum.1 + loader_seconds);
        }
    }

    /// Records that a member still waits for another one.
    pub(super) fn wait(&mut self, waiting: &v1::Waiting, now: Instant) {
        if let (Some(role), Some(for_role)) = (member_role(waiting.role()), member_role(waiting.for_role())) {
            self.waits.insert((role, waiting.index), ((for_role, waiting.for_index), now));
        }
    }

    /// The member that training waits for. Follows the waits from a dense worker on: it waits for
    /// an embedding worker, which waits for a parameter server.
    pub(super) fn waits_for(&self, now: Instant) -> Option<MemberId> {
        let holds = |at: &Instant| now.saturating_duration_since(*at) < WAIT_COUNTS;
        let waits: BTreeMap<_, _> = self.waits.iter().filter(|(_, (_, at))| holds(at)).collect();
        let mut counts: BTreeMap<MemberId, usize> = BTreeMap::new();
        for first in waits.keys() {
            let mut member = **first;
            // A cycle is possible among dense workers: each waits for the one before it.
            for _ in 0..waits.len() {
                let Some((next, _)) = waits.get(&member) else { break };
                member = *next;
            }
            if !waits.contains_key(&member) {
                *counts.entry(member).or_default() += 1;
            }
        }
        counts.into_iter().max_by_key(|(_, count)| *count).map(|(member, _)| member)
    }

    /// Forgets loads of another setting.
    fn enter(&mut self, setting: &Setting) {
        if self.setting.as_ref() != Some(setting) {
            self.setting = Some(setting.clone());
            self.window.clear();
            self.calm.clear();
            self.rising = None;
        }
    }

    /// Decides at `now`, which is `now_seconds` since 1970. Call it at least every few seconds.
    pub(super) fn decide(&mut self, setting: &Setting, now: Instant, now_seconds: u64) -> Option<Change> {
        self.enter(setting);
        self.drop_old_parts(now);
        let has_gone = |(role, index): MemberId| {
            // The numbers of parameter servers have gaps.
            role != Role::Ps && setting.members.get(&role).is_some_and(|count| index >= *count)
        };
        if let Some(gone) = self.named.map(|named| named.member).filter(|member| has_gone(*member)) {
            self.named = None;
            return Some(Change::Recovered(gone));
        }
        let blocked = self.waits_for(now).filter(|_| self.window.len() <= 1);
        let blocked = blocked.map(|member| Slow { member, share: 1.0 });
        let slow = blocked.map(|slow| vec![slow]).or_else(|| self.slow_members())?;
        match self.named {
            Some(named) => self.follow(named, &slow, now, now_seconds),
            None => self.name_after_a_while(slow.first().copied(), now, now_seconds),
        }
    }

    /// Training waits for rows, which is the fault of no member. Once no step was measured for a
    /// whole window, no member is named.
    pub(super) fn rest(&mut self, now: Instant) -> Option<Change> {
        self.drop_old_parts(now);
        if !self.window.is_empty() {
            return None;
        }
        (self.rising, self.recovering) = (None, None);
        self.named.take().map(|named| Change::Recovered(named.member))
    }

    fn drop_old_parts(&mut self, now: Instant) {
        let oldest = now.checked_sub(PART * PARTS as u32);
        self.window.retain(|part| oldest.is_none_or(|oldest| part.begun >= oldest));
    }

    /// The named member.
    pub(super) fn named(&self) -> Option<Named> {
        self.named
    }

    fn name_after_a_while(&mut self, worst: Option<Slow>, now: Instant, now_seconds: u64) -> Option<Change> {
        let Some(worst) = worst.filter(|slow| slow.share >= SLOW_SHARE) else {
            self.rising = None;
            return None;
        };
        let rising = self.rising.filter(|rising| rising.member == worst.member);
        let rising = *self.rising.insert(rising.unwrap_or(Rising {
            member: worst.member,
            since: now,
            since_seconds: now_seconds,
        }));
        if now.saturating_duration_since(rising.since) < NAMED_AFTER {
            return None;
        }
        self.rising = None;
        self.recovering = None;
        let named = Named { member: worst.member, share: worst.share, since_seconds: rising.since_seconds };
        self.named = Some(named);
        Some(Change::Slow(named))
    }

    /// Follows the named member until it has recovered, or another one is much slower.
    fn follow(&mut self, named: Named, slow: &[Slow], now: Instant, now_seconds: u64) -> Option<Change> {
        let share = slow.iter().find(|slow| slow.member == named.member).map_or(0.0, |slow| slow.share);
        self.named = Some(Named { share, ..named });
        let worse = slow.first().copied().filter(|worst| worst.member != named.member && worst.share > WORSE * share);
        if let Some(change) = self.name_after_a_while(worse, now, now_seconds) {
            return Some(change);
        }
        if share >= RECOVERED_SHARE {
            self.recovering = None;
            return None;
        }
        let since = *self.recovering.get_or_insert(now);
        if now.saturating_duration_since(since) < RECOVERED_AFTER {
            return None;
        }
        self.recovering = None;
        self.named = None;
        Some(Change::Recovered(named.member))
    }

    /// The slow members, the slowest first. `None` if too little was measured.
    fn slow_members(&mut self) -> Option<Vec<Slow>> {
        let sums = self.sums();
        let seconds: f64 = sums.steps.values().map(|(seconds, _)| seconds).sum();
        if seconds < LEAST_SECONDS {
            return None;
        }
        let together = self.setting.as_ref().is_some_and(|setting| setting.together);
        let loads = loads(&sums, together);
        let is_full = self.window.len() >= PARTS;
        let mut slow = Vec::new();
        for (&member, &load) in &loads {
            let count = sums.judged(member.0).unwrap_or_else(|| self.members_of(member.0));
            let usual = usual(member, &loads, count).or_else(|| self.calm.get(&member).copied());
            if is_full {
                self.calm.entry(member).and_modify(|calm| *calm = calm.min(load)).or_insert(load);
            }
            let Some(usual) = usual.filter(|usual| load >= SLOW_FACTOR * usual) else { continue };
            let share = (load - usual) * sums.units_per_second(member);
            slow.push(Slow { member, share: share.clamp(0.0, 1.0) });
        }
        // A member that nothing waited for before has no load. Its calm load is zero.
        if is_full {
            for role in [Role::Ps, Role::EmbeddingWorker, Role::Loader] {
                if self.members_of(role) == 1 && !loads.keys().any(|(of, _)| *of == role) {
                    self.calm.insert((role, 0), 0.0);
                }
            }
        }
        slow.sort_by(|a, b| b.share.total_cmp(&a.share));
        Some(slow)
    }

    fn members_of(&self, role: Role) -> u32 {
        self.setting.as_ref().and_then(|setting| setting.members.get(&role)).copied().unwrap_or(1)
    }

    fn sums(&self) -> Sums {
        let mut all = Sums::default();
        for part in &self.window {
            for (rank, (seconds, rows)) in &part.sums.steps {
                let sum = all.steps.entry(*rank).or_default();
                *sum = (sum.0 + seconds, sum.1 + rows);
            }
            for (by_rank, seconds) in &part.sums.spent {
                *all.spent.entry(*by_rank).or_default() += seconds;
            }
            for (by_rank, (pieces, seconds)) in &part.sums.pieces {
                let sum = all.pieces.entry(*by_rank).or_default();
                *sum = (sum.0 + pieces, sum.1 + seconds);
            }
        }
        all.move_late_reads();
        all
    }
}

impl Sums {
    /// An embedding worker without a processor reads pieces late that have come long before. Dense
    /// workers take that for a wait for the loader. But a late loader delays the pieces of every
    /// embedding worker. So the time beyond the shortest mean wait is the embedding worker's.
    fn move_late_reads(&mut self) {
        let mut of_workers: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
        for ((worker, _), (pieces, seconds)) in &self.pieces {
            let sum = of_workers.entry(*worker).or_default();
            *sum = (sum.0 + pieces, sum.1 + seconds);
        }
        let of_loaders: f64 = of_workers.values().map(|(_, seconds)| seconds).sum();
        of_workers.retain(|_, (pieces, _)| *pieces >= LEAST_PIECES);
        if of_workers.len() < 2 || of_loaders <= 0.0 {
            return;
        }
        let common = of_workers.values().map(|(pieces, seconds)| seconds / pieces).fold(f64::INFINITY, f64::min);
        let mut moved = 0.0;
        for ((worker, rank), (pieces, seconds)) in &self.pieces {
            let late = (seconds - common * pieces).max(0.0);
            if of_workers.contains_key(worker) {
                *self.spent.entry(((Role::EmbeddingWorker, *worker), *rank)).or_default() += late;
                moved += late;
            }
        }
        let stays = (1.0 - moved / of_loaders).max(0.0);
        let of_loader = |((member, _), _): &(&(MemberId, u32), &mut f64)| member.0 == Role::Loader;
        self.spent.iter_mut().filter(of_loader).for_each(|(_, spent)| *spent *= stays);
    }

    /// The part of the steps' time that was spent on a member. A wait of one dense worker delays
    /// all that train `together`.
    fn share_of(&self, member: MemberId, together: bool) -> f64 {
        if let (Role::DenseWorker, rank) = member {
            let seconds = self.steps.get(&rank).map_or(0.0, |(seconds, _)| *seconds);
            let own = self.spent.get(&(member, rank)).copied().unwrap_or_default();
            return own / seconds.max(f64::MIN_POSITIVE);
        }
        let spent = self.spent.range((member, 0)..=(member, u32::MAX));
        let of_ranks = spent.filter_map(|((_, rank), spent)| Some((spent, self.steps.get(rank)?.0)));
        if together {
            return of_ranks.map(|(spent, seconds)| spent / seconds.max(f64::MIN_POSITIVE)).fold(0.0, f64::max);
        }
        let seconds: f64 = self.steps.values().map(|(seconds, _)| seconds).sum();
        of_ranks.map(|(spent, _)| spent).sum::<f64>() / seconds.max(f64::MIN_POSITIVE)
    }

    /// The units of work of a member in a second of steps: rows of a dense worker, and pieces of an
    /// embedding worker. Other members, and members whose units are unknown, have 1.
    fn units_per_second(&self, (role, index): MemberId) -> f64 {
        match role {
            Role::DenseWorker => {
                self.steps.get(&index).map_or(1.0, |(seconds, rows)| rows.max(1.0) / seconds.max(f64::MIN_POSITIVE))
            }
            Role::EmbeddingWorker if !self.pieces.is_empty() => {
                let seconds: f64 = self.steps.values().map(|(seconds, _)| seconds).sum();
                self.pieces_of(index) / seconds.max(f64::MIN_POSITIVE)
            }
            _ => 1.0,
        }
    }

    fn pieces_of(&self, worker: u32) -> f64 {
        self.pieces.range((worker, 0)..=(worker, u32::MAX)).map(|(_, (pieces, _))| pieces).sum()
    }

    /// The number of members of a role that can be compared: embedding workers with pieces. `None`
    /// if all can.
    fn judged(&self, role: Role) -> Option<u32> {
        let workers: BTreeSet<u32> = self.pieces.keys().map(|(worker, _)| *worker).collect();
        (role == Role::EmbeddingWorker && !workers.is_empty()).then_some(workers.len() as u32)
    }
}

/// The load of each member on which time was spent.
fn loads(sums: &Sums, together: bool) -> BTreeMap<MemberId, f64> {
    let members: BTreeSet<MemberId> = sums.spent.keys().map(|(member, _)| *member).collect();
    let load = |member: MemberId| {
        let units = sums.units_per_second(member);
        (units > 0.0).then(|| (member, sums.share_of(member, together) / units))
    };
    members.into_iter().filter_map(load).collect()
}

/// The median load of the member's peers. Peers on which no time was spent have none. `None`
/// without peers.
fn usual(member: MemberId, loads: &BTreeMap<MemberId, f64>, count: u32) -> Option<f64> {
    let peers = (count.max(1) - 1) as usize;
    let of_role = loads.iter().filter(|(other, _)| other.0 == member.0 && **other != member);
    let mut known: Vec<f64> = of_role.map(|(_, load)| *load).collect();
    if peers == 0 {
        return None;
    }
    known.resize(peers.max(known.len()), 0.0);
    known.sort_by(f64::total_cmp);
    Some(known[(known.len() - 1) / 2])
}

#[cfg(test)]
#[path = "slowest_tests.rs"]
mod tests;
