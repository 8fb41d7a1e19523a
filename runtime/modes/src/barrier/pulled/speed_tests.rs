//! The speed of pulled pieces in simulated clusters: the real queue and the real workers, with
//! messages that take no time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::*;

/// The time of a piece on a healthy worker, in milliseconds.
const PIECE: u64 = 100;

/// By rank and time in milliseconds: the time of a piece that begins then.
type Speeds = fn(u32, u64) -> u64;

struct Worker {
    machine: PieceWorker,
    has_pulled: bool,
    reading: BTreeSet<GlobalStep>,
}

struct Cluster {
    begin: Instant,
    now: u64,
    queue: PieceQueue,
    workers: Vec<Worker>,
    speeds: Speeds,
    actions: VecDeque<(u32, PieceAction)>,
    /// Computations by their end.
    computing: BTreeSet<(u64, u32, StepPiece)>,
    /// By step: the time in milliseconds at which it was complete.
    complete: BTreeMap<u64, u64>,
    computed: usize,
}

impl Cluster {
    fn new(workers: u32, pieces: u32, speeds: Speeds) -> Self {
        let begin = Instant::now();
        let worker = |_| Worker { machine: PieceWorker::new(), has_pulled: false, reading: BTreeSet::new() };
        let mut cluster = Self {
            begin,
            now: 0,
            queue: PieceQueue::new(pieces, 1, GlobalStep(0), begin),
            workers: (0..workers).map(worker).collect(),
            speeds,
            actions: VecDeque::new(),
            computing: BTreeSet::new(),
            complete: BTreeMap::new(),
            computed: 0,
        };
        for rank in 0..workers {
            let actions = cluster.workers[rank as usize].machine.start();
            cluster.enqueue(rank, actions);
        }
        cluster
    }

    /// Simulates until this time.
    fn run(mut self, until: u64) -> Self {
        loop {
            while self.answer() || self.act() {}
            let ended = self.computing.first().map_or(until, |(end, ..)| *end);
            let late = self.queue.next_late(self.instant()).map_or(until, |late| self.milliseconds(late));
            self.now = ended.min(late);
            if self.now >= until {
                return self;
            }
            if ended == self.now
                && let Some((_, rank, piece)) = self.computing.pop_first()
            {
                self.computed += 1;
                let actions = self.workers[rank as usize].machine.computed(piece).unwrap();
                self.enqueue(rank, actions);
            }
        }
    }

    fn instant(&self) -> Instant {
        self.begin + Duration::from_millis(self.now)
    }

    fn milliseconds(&self, at: Instant) -> u64 {
        at.duration_since(self.begin).as_millis() as u64
    }

    fn enqueue(&mut self, rank: u32, actions: Vec<PieceAction>) {
        self.actions.extend(actions.into_iter().map(|action| (rank, action)));
    }

    /// Carries out an action. Returns false if there is none.
    fn act(&mut self) -> bool {
        let Some((rank, action)) = self.actions.pop_front() else { return false };
        let worker = &mut self.workers[rank as usize];
        let actions = match action {
            PieceAction::Pull => {
                worker.has_pulled = true;
                Vec::new()
            }
            PieceAction::Fetch(piece) => worker.machine.fetched(piece, true),
            PieceAction::Read(step) => {
                worker.reading.insert(step);
                Vec::new()
            }
            PieceAction::Compute(piece) => {
                let end = self.now + (self.speeds)(rank, self.now);
                self.computing.insert((end, rank, piece));
                Vec::new()
            }
            PieceAction::Send(piece) => worker.machine.acknowledged(piece).unwrap(),
            PieceAction::Report(piece, outcome) => {
                let reported = self.queue.report(Rank(rank), piece, outcome, 0.0, self.instant()).unwrap();
                self.complete.extend(reported.complete.into_iter().map(|step| (step.step.0, self.now)));
                Vec::new()
            }
            PieceAction::Stop => panic!("the order has not ended"),
        };
        self.enqueue(rank, actions);
        true
    }

    /// Answers a read or a pull. Returns false if none can be answered.
    fn answer(&mut self) -> bool {
        while self.queue.granted().0 < self.queue.open().0 + 3 {
            self.queue.grant(0).unwrap();
        }
        let (open, now) = (self.queue.open(), self.instant());
        for (rank, worker) in (0..).zip(&mut self.workers) {
            let step = worker.reading.first().copied().filter(|step| *step <= open);
            let actions = if let Some(step) = step {
                worker.reading.remove(&step);
                worker.machine.parameters_read(step, open.0 - step.0 < 2).unwrap()
            } else if worker.has_pulled
                && let Some(pulled) = self.queue.pull(Rank(rank), now)
            {
                worker.has_pulled = false;
                worker.machine.pulled(Some(pulled.piece))
            } else {
                continue;
            };
            self.enqueue(rank, actions);
            return true;
        }
        false
    }

    /// Steps a second between two times in milliseconds.
    fn rate(&self, from: u64, until: u64) -> f64 {
        let steps = self.complete.values().filter(|at| (from..until).contains(*at)).count();
        1000.0 * steps as f64 / (until - from) as f64
    }

    fn slow(&self) -> Vec<u32> {
        self.queue.slow().into_iter().map(|rank| rank.0).collect()
    }
}

/// The rate of four healthy workers with twelve pieces: three pieces one after the other.
const HEALTHY: f64 = 1000.0 / (3 * PIECE) as f64;

fn healthy(rank: u32, now: u64) -> u64 {
    // Some milliseconds more or less.
    PIECE - 4 + (u64::from(rank) * 7 + now) % 9
}

#[test]
fn in_a_calm_cluster_no_piece_is_computed_twice() {
    let cluster = Cluster::new(4, 12, healthy).run(60_000);
    let rate = cluster.rate(0, 60_000);
    assert!(rate >= 0.95 * HEALTHY, "{rate}");
    assert!(cluster.slow().is_empty());
    // Of the open steps, some pieces are computed.
    assert!(cluster.computed <= 12 * (cluster.complete.len() + 2), "{}", cluster.computed);
}

#[test]
fn one_slow_worker_of_four_leaves_three_quarters_of_the_speed() {
    let speeds: [Speeds; 3] = [
        |rank, now| if rank == 3 { healthy(3, now) * 33 } else { healthy(rank, now) },
        // It computes nothing any more.
        |rank, now| if rank == 3 { 10_000_000 } else { healthy(rank, now) },
        |rank, now| if rank == 0 { healthy(0, now) * 6 } else { healthy(rank, now) },
    ];
    for speeds in speeds {
        let cluster = Cluster::new(4, 12, speeds).run(120_000);
        let rate = cluster.rate(2_000, 120_000);
        assert!(rate >= 0.72 * HEALTHY, "{rate}");
        assert_eq!(cluster.slow().len(), 1);
    }
}

#[test]
fn a_worker_at_half_its_speed_still_helps() {
    let cluster = Cluster::new(4, 24, |rank, now| healthy(rank, now) * if rank == 2 { 2 } else { 1 }).run(60_000);
    // Three and a half workers, at most one piece of a healthy worker longer.
    let (rate, expected) = (cluster.rate(0, 60_000), 1000.0 / (24.0 / 3.5 * PIECE as f64 + 1.5 * PIECE as f64));
    assert!(rate >= expected, "{rate}, expected {expected}");
    assert!(cluster.slow().is_empty());
}

#[test]
fn a_worker_that_recovers_gets_its_share_again() {
    let speeds: Speeds = |rank, now| if rank == 1 && now < 20_000 { healthy(1, now) * 33 } else { healthy(rank, now) };
    let cluster = Cluster::new(4, 12, speeds).run(60_000);
    // Its last slow piece takes 3.3 seconds.
    let rate = cluster.rate(25_000, 60_000);
    assert!(rate >= 0.94 * HEALTHY, "{rate}");
    assert!(cluster.slow().is_empty());
}

#[test]
fn workers_that_are_slow_all_at_once_are_not_told_apart() {
    let speeds: Speeds = |rank, now| if now > 10_000 { healthy(rank, now) * 8 } else { healthy(rank, now) };
    let cluster = Cluster::new(4, 12, speeds).run(120_000);
    let rate = cluster.rate(40_000, 120_000);
    assert!(rate >= 0.9 * HEALTHY / 8.0, "{rate}");
    assert!(cluster.slow().is_empty());
}
