//! Virtual time: ordered events, random numbers, and the speed of workers, servers and links.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rectrain_random::SplitMix64;

use super::{Cause, ClusterSpec, LinkSpec, ServerSpec, Slowness, StepTime, WorkerSpec};

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

/// A server that serves one request after the other.
pub(super) struct ServerQueue {
    service: Time,
    free_at: Time,
}

impl ServerQueue {
    /// One queue per server, for requests of `bytes`.
    pub(super) fn all(servers: &[ServerSpec], bytes: f64) -> Vec<Self> {
        let service = |s: &ServerSpec| nanoseconds(s.seconds_per_request + bytes / s.bytes_per_second);
        servers.iter().map(|s| Self { service: service(s), free_at: 0 }).collect()
    }

    /// The time at which the server has served a request that arrives at `now`.
    pub(super) fn serve(&mut self, now: Time) -> Time {
        self.free_at = self.free_at.max(now) + self.service;
        self.free_at
    }
}
