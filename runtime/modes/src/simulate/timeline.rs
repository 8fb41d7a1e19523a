//! Virtual time: ordered events, random numbers, and the speed of workers, servers and links.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use rectrain_random::SplitMix64;

use super::{Cause, ClusterSpec, EmbeddingSpec, LinkSpec, MemberSlowness, ServerSpec, Slowness, StepTime, WorkerSpec};
use crate::shares::{PIECES, Pace, SLOTS, Shares};
use crate::turns;

/// Nanoseconds between two decisions about the shares of a role, at least.
pub(super) const DECIDE_EVERY: Time = 1_000_000_000;

/// Virtual time in nanoseconds from the start. It is a whole number, so the order of events never
/// depends on rounding.
pub(super) type Time = u64;

pub(super) fn nanoseconds(seconds: f64) -> Time {
    (seconds.max(0.0) * 1e9).round() as Time
}

/// Events in order of time. Events of the same time keep the order in which they were planned.
pub(super) struct Timeline<E> {
    pub(super) now: Time,
    end: Time,
    planned: u64,
    /// The time, the order of planning, and the index in `events`. These entries are small because
    /// the heap moves them.
    queue: BinaryHeap<Reverse<(Time, u64, usize)>>,
    events: Vec<Option<E>>,
    free: Vec<usize>,
}

impl<E> Timeline<E> {
    pub(super) fn new(seconds: f64) -> Self {
        Self {
            now: 0,
            end: nanoseconds(seconds),
            planned: 0,
            queue: BinaryHeap::new(),
            events: Vec::new(),
            free: Vec::new(),
        }
    }

    pub(super) fn plan(&mut self, at: Time, event: E) {
        self.planned += 1;
        let place = self.free.pop().unwrap_or(self.events.len());
        if place == self.events.len() {
            self.events.push(None);
        }
        self.events[place] = Some(event);
        self.queue.push(Reverse((at.max(self.now), self.planned, place)));
    }

    /// The next event before the end. The clock advances to its time.
    pub(super) fn next(&mut self) -> Option<E> {
        let Reverse((at, _, place)) = self.queue.pop()?;
        self.now = at.min(self.end);
        self.free.push(place);
        self.events[place].take().filter(|_| at <= self.end)
    }

    /// Whether `at` is after the end.
    pub(super) fn is_over(&self, at: Time) -> bool {
        at > self.end
    }

    /// The part of `from`..`to` before the end.
    pub(super) fn within(&self, from: Time, to: Time) -> Time {
        to.min(self.end).saturating_sub(from)
    }
}

/// The generator of one stream of a simulation. Streams of one seed are independent.
pub(super) fn random_stream(seed: u64, stream: u64) -> SplitMix64 {
    let mut random = SplitMix64::new(seed ^ stream.wrapping_mul(0xD134_2543_DE82_EF95));
    random.next_u64();
    random
}

/// One incarnation of a worker. A failure starts the next one. Messages to an earlier incarnation
/// are lost.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Life {
    pub(super) rank: u32,
    pub(super) incarnation: u32,
}

/// A worker's speed from batch to batch.
pub(super) struct WorkerSpeed {
    spec: WorkerSpec,
    random: SplitMix64,
    failures: SplitMix64,
    batches: usize,
}

impl WorkerSpeed {
    pub(super) fn all(cluster: &ClusterSpec, seed: u64) -> Vec<Self> {
        let speed = |(rank, spec): (usize, &WorkerSpec)| Self {
            spec: spec.clone(),
            random: random_stream(seed, 2 * rank as u64),
            failures: random_stream(seed, 2 * rank as u64 + 1),
            batches: 0,
        };
        cluster.workers.iter().enumerate().map(speed).collect()
    }

    /// The time of the next batch, which has `rows` rows and begins at `now`.
    pub(super) fn batch(&mut self, now: Time, rows: u32) -> Time {
        let now = now as f64 * 1e-9;
        let base = match &self.spec.step {
            StepTime::Constant { seconds_per_batch, seconds_per_row } => {
                seconds_per_batch + seconds_per_row * f64::from(rows)
            }
            StepTime::Trace { batch_seconds, first } => batch_seconds[(first + self.batches) % batch_seconds.len()],
        };
        self.batches += 1;
        let random = &mut self.random;
        let slower = self.spec.slowness.iter().fold(1.0, |slower, slowness| slower * factor(slowness, now, random));
        nanoseconds(base * slower)
    }

    /// The time to the next failure, and the recovery time after it.
    pub(super) fn next_failure(&mut self) -> Option<(Time, Time)> {
        let crashes = self.spec.crashes?;
        let after = self.failures.exponential(crashes.mean_seconds_between);
        Some((nanoseconds(after), nanoseconds(crashes.recovery_seconds)))
    }

    /// The time of a message of `bytes` over this worker's link, one way.
    pub(super) fn link(&self, link: LinkSpec, bytes: f64) -> Time {
        nanoseconds((link.latency_seconds + bytes / link.bytes_per_second) * self.spec.link_slowness)
    }
}

/// The factor by which a batch that begins at `now` (seconds) takes longer. Every batch draws
/// random numbers. A batch's slowness therefore does not depend on the start times of this and
/// earlier batches.
fn factor(slowness: &Slowness, now: f64, random: &mut SplitMix64) -> f64 {
    let factor = match slowness.cause {
        Cause::Constant { factor } => factor,
        Cause::Periodic { factor, period_seconds, slow_seconds, offset_seconds } => {
            let phase = (now - offset_seconds).rem_euclid(period_seconds);
            if phase < slow_seconds { factor } else { 1.0 }
        }
        Cause::HeavyTailed { probability, shape, limit } => {
            let (hit, multiple) = (random.positive_unit() <= probability, random.pareto(shape));
            if hit { multiple.min(limit) } else { 1.0 }
        }
    };
    if (slowness.from_seconds..slowness.until_seconds).contains(&now) { factor } else { 1.0 }
}

/// The shares of work of a role's members by their measured speed, as the coordinator decides.
pub(super) struct Moving {
    shares: Shares,
    pace: Pace,
    members: Vec<u32>,
    /// The virtual time 0.
    origin: Instant,
    decided: Time,
}

impl Moving {
    pub(super) fn new(members: usize, pace: Pace) -> Self {
        let members = (0..members as u32).collect();
        Self { shares: Shares::default(), pace, members, origin: Instant::now(), decided: 0 }
    }

    /// The weights of all members.
    pub(super) fn weights(&self) -> Vec<u32> {
        self.members.iter().map(|member| self.shares.weight(*member)).collect()
    }

    /// Measures work of a member, and decides once a second. Returns whether a share has changed.
    pub(super) fn follow(&mut self, member: usize, units: f64, seconds: f64, now: Time) -> bool {
        let at = self.origin + Duration::from_nanos(now);
        self.shares.record(member as u32, units, seconds, at);
        if now < self.decided + DECIDE_EVERY {
            return false;
        }
        self.shares.passed((now - self.decided) as f64 * 1e-9, at);
        self.decided = now;
        self.shares.decide(&self.members, self.pace, at).is_some()
    }
}

/// The parameter servers. Each serves one request after the other.
pub(super) struct Servers {
    specs: Vec<ServerSpec>,
    free_at: Vec<Time>,
    moving: Option<Moving>,
}

impl Servers {
    pub(super) fn new(cluster: &ClusterSpec) -> Self {
        let (specs, free_at) = (cluster.servers.clone(), vec![0; cluster.servers.len()]);
        let moving = cluster.slots_move.then(|| Moving::new(specs.len(), SLOTS));
        Self { specs, free_at, moving }
    }

    /// The time at which a server has served a request that arrives at `now`. A request to all
    /// servers together has `bytes`.
    pub(super) fn serve(&mut self, server: usize, bytes: f64, now: Time) -> Time {
        let begins = self.free_at[server].max(now);
        let spec = &self.specs[server];
        let usual = spec.seconds_per_request + self.part(server, bytes) / spec.bytes_per_second;
        let seconds = usual * slower_at(spec.slowness, begins);
        self.free_at[server] = begins + nanoseconds(seconds);
        if let Some(moving) = &mut self.moving {
            // A unit of work takes a server of the usual speed a microsecond. New shares hold from
            // the next request on.
            moving.follow(server, usual * 1e6, seconds, now);
        }
        self.free_at[server]
    }

    /// A server's part of the bytes of a request.
    fn part(&self, server: usize, bytes: f64) -> f64 {
        let Some(moving) = &self.moving else { return bytes / self.specs.len() as f64 };
        let weights = moving.weights();
        bytes * f64::from(weights[server]) / f64::from(weights.iter().sum::<u32>())
    }
}

/// The embedding workers. Each looks up one batch after the other.
pub(super) struct EmbeddingWorkers {
    workers: Vec<Option<MemberSlowness>>,
    seconds_per_batch: f64,
    free_at: Vec<Time>,
    moving: Option<Moving>,
    /// Their shares of the batches, as in [`turns`].
    shares: Vec<u32>,
}

impl EmbeddingWorkers {
    /// `rows` are the rows of a batch.
    pub(super) fn new(spec: &EmbeddingSpec, rows: u32) -> Self {
        Self {
            workers: spec.workers.clone(),
            seconds_per_batch: spec.seconds_per_row * f64::from(rows),
            free_at: vec![0; spec.workers.len()],
            moving: spec.pieces_move.then(|| Moving::new(spec.workers.len(), PIECES)),
            shares: Vec::new(),
        }
    }

    /// The time at which a batch has its look-ups and they leave for the servers. The batch arrives
    /// at `now`, and `position` is its number among all batches.
    pub(super) fn serve(&mut self, position: u64, now: Time) -> Time {
        let worker = turns::member_at(&self.shares, self.workers.len() as u32, position);
        let begins = self.free_at[worker].max(now);
        let seconds = self.seconds_per_batch * slower_at(self.workers[worker], begins);
        self.free_at[worker] = begins + nanoseconds(seconds);
        if let Some(moving) = &mut self.moving
            && moving.follow(worker, 1.0, seconds, now)
        {
            self.shares = turns::of_weights(&moving.weights());
        }
        self.free_at[worker]
    }
}

/// The factor on the time of work that begins at `now`.
pub(super) fn slower_at(slowness: Option<MemberSlowness>, now: Time) -> f64 {
    let now = now as f64 * 1e-9;
    slowness.filter(|slow| slow.contains(now)).map_or(1.0, |slow| slow.factor)
}
