//! Virtual time: ordered events, random numbers, and the speed of workers, servers and links.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use rectrain_random::SplitMix64;

use super::{Cause, ClusterSpec, LinkSpec, ServerSpec, Slowness, StepTime, WorkerSpec};
use crate::shares::{SLOTS, Shares};

/// Nanoseconds between two decisions about the servers' shares, at least.
const DECIDE_EVERY: Time = 1_000_000_000;

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

/// The parameter servers. Each serves one request after the other.
pub(super) struct Servers {
    specs: Vec<ServerSpec>,
    free_at: Vec<Time>,
    /// Bytes of a request to all servers together.
    bytes: f64,
    moving: Option<MovingSlots>,
}

/// The parts of the rows that servers have by their measured speed, as the coordinator decides.
struct MovingSlots {
    shares: Shares,
    /// The virtual time 0.
    origin: Instant,
    decided: Time,
}

impl Servers {
    /// The servers of a cluster. A request to all of them has `bytes`.
    pub(super) fn new(cluster: &ClusterSpec, bytes: f64) -> Self {
        let (specs, free_at) = (cluster.servers.clone(), vec![0; cluster.servers.len()]);
        let moving = || MovingSlots { shares: Shares::default(), origin: Instant::now(), decided: 0 };
        Self { specs, free_at, bytes, moving: cluster.slots_move.then(moving) }
    }

    /// The time at which a server has served a request that arrives at `now`.
    pub(super) fn serve(&mut self, server: usize, now: Time) -> Time {
        let begins = self.free_at[server].max(now);
        let spec = &self.specs[server];
        let usual = spec.seconds_per_request + self.bytes_of(server) / spec.bytes_per_second;
        let seconds = usual * spec.slower_at(begins as f64 * 1e-9);
        self.free_at[server] = begins + nanoseconds(seconds);
        self.follow(server, usual, seconds, now);
        self.free_at[server]
    }

    /// A server's part of the bytes of a request.
    fn bytes_of(&self, server: usize) -> f64 {
        let servers = self.specs.len() as u32;
        let Some(MovingSlots { shares, .. }) = &self.moving else { return self.bytes / f64::from(servers) };
        let all: u32 = (0..servers).map(|server| shares.weight(server)).sum();
        self.bytes * f64::from(shares.weight(server as u32)) / f64::from(all)
    }

    /// Measures a request, and decides about the shares once a second.
    fn follow(&mut self, server: usize, usual: f64, seconds: f64, now: Time) {
        let servers = self.specs.len() as u32;
        let Some(MovingSlots { shares, origin, decided }) = &mut self.moving else { return };
        let at = *origin + Duration::from_nanos(now);
        // A unit of work takes a server of the usual speed a microsecond.
        shares.record(server as u32, usual * 1e6, seconds, at);
        if now >= *decided + DECIDE_EVERY {
            shares.passed((now - *decided) as f64 * 1e-9, at);
            *decided = now;
            let members: Vec<u32> = (0..servers).collect();
            // The new shares hold from the next request on.
            let _change = shares.decide(&members, SLOTS, at);
        }
    }
}
