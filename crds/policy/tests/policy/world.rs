//! A job that behaves as the models say, with noise in all measurements and with slow changes. A
//! slow batch is slow for the barrier too.

use rectrain_policy::{
    Action, AutoMode, Decision, DenseWorkerPolicy, EmbeddingWorkerLoad, EmbeddingWorkerPolicy, History, ModePolicy,
    Observations, Policy, PsLoad, PsPolicy, ReplicaBounds, ReplicaCount, Replicas, Subject, Worker,
};
use rectrain_random::SplitMix64;

pub const GLOBAL_ROWS: u32 = 65_536;
/// Seconds between two observations.
pub const INTERVAL: u64 = 5;
/// Batches of each worker that an observation holds.
const BATCHES: usize = 4;
/// Seconds that new replicas take to be ready.
const START: u64 = 40;

/// Decides about every subject, with every default.
pub fn policy(min: u32, max: u32) -> Policy {
    let bounds = ReplicaBounds { min, max };
    Policy {
        mode: Some(ModePolicy::default()),
        ps: Some(PsPolicy::new(bounds)),
        embedding_worker: Some(EmbeddingWorkerPolicy { bounds, queue_wait_seconds: None }),
        dense_worker: Some(DenseWorkerPolicy::new(bounds)),
        ..Policy::default()
    }
}

#[derive(Clone, Debug)]
pub struct World {
    pub now: u64,
    pub mode: AutoMode,
    pub table_bytes: f64,
    pub bytes_a_second: f64,
    pub limit_bytes: u64,
    /// Parameter servers' worth of work.
    pub look_up_load: f64,
    /// The share of it that several servers report: their waits for each other are no work.
    pub seen_of_several: f64,
    /// The load of the first of several parameter servers over the mean. A rebalance evens it out.
    pub unevenness: f64,
    /// Whether single slots are so large that a rebalance does not help.
    pub is_stuck: bool,
    /// Embedding workers' worth of work.
    pub embedding_load: f64,
    /// Worker-seconds of computation in a step.
    pub work: f64,
    /// Seconds of a step that more workers do not shorten.
    pub overhead: f64,
    /// Samples per second that the data allows, whatever the workers.
    pub most_samples: f64,
    /// Factor by which the first dense worker is slower.
    pub slowdown: f64,
    /// Largest relative error of a measurement.
    pub noise: f64,
    pub random: SplitMix64,
    pub ps: u32,
    pub embedding_worker: u32,
    pub dense_worker: u32,
    pub changes: Vec<(u64, Subject, u32)>,
    pub log: Vec<Decision>,
}

impl World {
    pub fn new(seed: u64) -> Self {
        Self {
            now: 1_000_000,
            mode: AutoMode::Sync,
            table_bytes: 12e9,
            bytes_a_second: 0.0,
            limit_bytes: 8_000_000_000,
            look_up_load: 1.0,
            seen_of_several: 1.0,
            unevenness: 1.0,
            is_stuck: false,
            embedding_load: 1.5,
            work: 4.0,
            overhead: 0.25,
            most_samples: f64::INFINITY,
            slowdown: 1.0,
            noise: 0.0,
            random: SplitMix64::new(seed),
            ps: 2,
            embedding_worker: 3,
            dense_worker: 8,
            changes: Vec::new(),
            log: Vec::new(),
        }
    }

    fn noisy(&mut self, value: f64) -> f64 {
        let factor = 1.0 + self.noise * (2.0 * self.random.unit() - 1.0);
        value * factor
    }

    fn count(&self, subject: Subject) -> u32 {
        match subject {
            Subject::Ps => self.ps,
            Subject::EmbeddingWorker => self.embedding_worker,
            _ => self.dense_worker,
        }
    }

    fn replicas(&self, subject: Subject) -> Option<ReplicaCount> {
        let ready = self.count(subject);
        let wanted = self.changes.iter().rev().find(|(_, of, _)| *of == subject).map_or(ready, |(_, _, to)| *to);
        Some(ReplicaCount { wanted, ready })
    }

    pub fn fill(&self) -> f64 {
        self.table_bytes / f64::from(self.ps) / self.limit_bytes as f64
    }

    pub fn observe(&mut self) -> Observations {
        // The order of the draws is fixed, so that a seed gives the same measurements.
        let ps = self.observe_servers();
        let embedding_workers = self.observe_embedding_workers();
        let workers = self.observe_workers();
        let samples = self.samples_per_second(&workers);
        let (mode, n) = (self.mode, self.dense_worker);
        Observations {
            at_seconds: self.now,
            mode: Some(mode),
            global_batch_rows: GLOBAL_ROWS,
            local_batch_rows: GLOBAL_ROWS / n,
            staleness_tolerance: 4,
            workers,
            all_reduce_seconds: (mode == AutoMode::Sync).then_some(self.overhead),
            exchange_seconds: (mode == AutoMode::Gba).then_some(self.overhead),
            samples_per_second: Some(self.noisy(samples).min(self.most_samples)),
            ps,
            embedding_workers: Some(embedding_workers),
            replicas: Replicas {
                ps: self.replicas(Subject::Ps),
                embedding_worker: self.replicas(Subject::EmbeddingWorker),
                dense_worker: self.replicas(Subject::DenseWorker),
                loader: None,
            },
            ..Observations::default()
        }
    }

    fn observe_servers(&mut self) -> Vec<PsLoad> {
        let seen = if self.ps > 1 { self.seen_of_several } else { 1.0 };
        let mean = seen * self.look_up_load / f64::from(self.ps);
        let ps = (0..self.ps).map(|index| {
            let load = match (index, self.ps) {
                (_, 1) => mean,
                (0, _) => mean * self.unevenness,
                (_, ps) => mean * (f64::from(ps) - self.unevenness) / f64::from(ps - 1),
            };
            PsLoad {
                bytes: (self.table_bytes / f64::from(self.ps)) as u64,
                limit_bytes: Some(self.limit_bytes),
                busy: Some(load.clamp(0.0, 1.0)),
                look_ups_per_second: Some(1e6 * load.max(0.0)),
                oom_kills: 0,
            }
        });
        let mut ps: Vec<_> = ps.collect();
        ps.iter_mut().for_each(|ps| ps.busy = ps.busy.map(|busy| self.noisy(busy).min(1.0)));
        ps
    }

    fn observe_embedding_workers(&mut self) -> EmbeddingWorkerLoad {
        let busy = (self.embedding_load / f64::from(self.embedding_worker)).min(0.98);
        let service_seconds = 0.004;
        let queue_wait_seconds = self.noisy(service_seconds * busy / (1.0 - busy));
        EmbeddingWorkerLoad { queue_wait_seconds, service_seconds }
    }

    fn observe_workers(&mut self) -> Vec<Worker> {
        let (slowdown, n) = (self.slowdown, self.dense_worker);
        let share = self.work / f64::from(n);
        let workers = (0..n).map(|rank| {
            let seconds = share * if rank == 0 { slowdown } else { 1.0 };
            Worker { batch_rows: GLOBAL_ROWS / n, compute_seconds: (0..BATCHES).map(|_| self.noisy(seconds)).collect() }
        });
        workers.collect()
    }

    fn samples_per_second(&self, workers: &[Worker]) -> f64 {
        match self.mode {
            AutoMode::Sync => {
                let slowest = |batch| workers.iter().map(|worker| worker.compute_seconds[batch]).fold(0.0, f64::max);
                f64::from(GLOBAL_ROWS) / ((0..BATCHES).map(slowest).sum::<f64>() / BATCHES as f64 + self.overhead)
            }
            AutoMode::Gba => {
                let seconds = |worker: &Worker| worker.compute_seconds.iter().sum::<f64>() / BATCHES as f64;
                let rows = f64::from(GLOBAL_ROWS / self.dense_worker);
                workers.iter().map(|worker| rows / (seconds(worker) + self.overhead)).sum()
            }
        }
    }

    /// Lets `seconds` pass and carries decisions out.
    pub fn run(&mut self, policy: &Policy, history: &mut History, seconds: u64) {
        let end = self.now + seconds;
        while self.now < end {
            self.now += INTERVAL;
            self.table_bytes += self.bytes_a_second * INTERVAL as f64;
            let due = self.changes.iter().filter(|(at, ..)| *at <= self.now).copied().collect::<Vec<_>>();
            self.changes.retain(|(at, ..)| *at > self.now);
            for (_, subject, to) in due {
                match subject {
                    Subject::Ps => {
                        self.ps = to;
                        self.unevenness = if self.is_stuck { self.unevenness } else { 1.0 };
                    }
                    Subject::EmbeddingWorker => self.embedding_worker = to,
                    _ => self.dense_worker = to,
                }
            }
            let observations = self.observe();
            for decision in history.advance(policy, &observations).into_iter().filter(Decision::acts) {
                match decision.action {
                    Action::SwitchMode { to, .. } => self.mode = to,
                    Action::Scale { to, .. } => self.changes.push((self.now + START, decision.subject, to)),
                    Action::Rebalance { replicas } => {
                        self.changes.push((self.now + INTERVAL, decision.subject, replicas));
                    }
                    Action::RaiseMemory { .. } | Action::Keep => {}
                }
                self.log.push(decision);
            }
        }
    }
}
