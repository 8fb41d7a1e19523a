//! `sync` and `hybrid` under the virtual clock: every step has a barrier for the dense gradients.
//! If a worker dies, all others stop at the step until it has restarted, because all of them train
//! the step again.

use super::supply::{Supply, SupplyEvent};
use super::timeline::{Servers, Time, Timeline, WorkerSpeed, nanoseconds};
use super::{Report, Simulation, SimulationError, Tally};
use crate::barrier::StepGate;
use crate::{GlobalStep, Rank};

enum Event {
    /// Events between a request and its look-ups.
    Supply(SupplyEvent<LookUp>),
    /// Events at a server.
    LookUpArrives(u32, usize, u64),
    LookUpServed(u32, usize, u64),
    PushArrives(u32, usize, u64),
    PushServed(u32, usize, u64),
    /// Events at a worker.
    Rows(u32, u64),
    Computed(u32, Time),
    AllReduced(u64),
}

impl From<SupplyEvent<LookUp>> for Event {
    fn from(event: SupplyEvent<LookUp>) -> Self {
        Self::Supply(event)
    }
}

/// A look-up that waits for the loaders, an embedding worker, or a gate.
struct LookUp {
    rank: u32,
    step: u64,
}

struct Worker {
    speed: WorkerSpeed,
    /// The next step to look up.
    looked_up: u64,
    /// The number of servers that have not answered, for each step that is looked up, from `next`
    /// on.
    missing: std::collections::VecDeque<usize>,
    /// The step to compute next, or being computed.
    next: u64,
    computing_since: Option<Time>,
    fails_at: Option<(Time, Time)>,
}

struct World<'a> {
    simulation: &'a Simulation,
    staleness: u64,
    timeline: Timeline<Event>,
    workers: Vec<Worker>,
    gates: Vec<StepGate<LookUp, ()>>,
    servers: Servers,
    supply: Supply<LookUp>,
    /// Bytes of a batch's embeddings. Their gradients have as many. Messages to and from all
    /// servers at the same time share the worker's link.
    bytes: f64,
    /// Steps before this one are all-reduced.
    reduced: u64,
    computed: usize,
    all_reduce: Time,
    tally: Tally,
}

pub(super) fn run(simulation: &Simulation, staleness: u64) -> Result<Report, SimulationError> {
    let cluster = &simulation.cluster;
    let (n, servers) = (cluster.workers.len(), cluster.servers.len());
    let worker = |mut speed: WorkerSpeed| Worker {
        fails_at: speed.next_failure(),
        speed,
        looked_up: 0,
        missing: std::collections::VecDeque::new(),
        next: 0,
        computing_since: None,
    };
    let bytes = cluster.link.embedding_bytes_per_row * f64::from(simulation.local_rows);
    let mut world = World {
        simulation,
        staleness,
        timeline: Timeline::new(simulation.seconds),
        workers: WorkerSpeed::all(cluster, simulation.seed).into_iter().map(worker).collect(),
        gates: (0..servers).map(|_| StepGate::new(n as u32, staleness, GlobalStep(0))).collect(),
        servers: Servers::new(cluster),
        supply: Supply::new(cluster, simulation.local_rows),
        bytes,
        reduced: 0,
        computed: 0,
        all_reduce: all_reduce_time(simulation),
        tally: Tally::new(simulation),
    };
    world.supply.start(&mut world.timeline);
    (0..n as u32).for_each(|rank| world.look_ahead(rank));
    while let Some(event) = world.timeline.next() {
        world.handle(event)?;
    }
    Ok(world.report())
}

/// Each of n ranks sends 2·(n − 1)/n of the gradient over the slowest link. Latencies add up along
/// a tree, up and down.
fn all_reduce_time(simulation: &Simulation) -> Time {
    let cluster = &simulation.cluster;
    let n = cluster.workers.len() as f64;
    let slowest = cluster.workers.iter().map(|w| w.link_slowness).fold(0.0, f64::max);
    let bytes = 2.0 * (n - 1.0) / n * cluster.link.dense_bytes;
    let latencies = 2.0 * n.log2().ceil();
    let seconds = latencies * cluster.link.latency_seconds + bytes / cluster.link.bytes_per_second;
    nanoseconds(seconds * slowest)
}

impl World<'_> {
    fn handle(&mut self, event: Event) -> Result<(), SimulationError> {
        let now = self.timeline.now;
        match event {
            Event::Supply(event) => {
                for (batch, at) in self.supply.handle(event, now) {
                    self.look_up(batch.rank, batch.step, at);
                }
                self.supply.load(&mut self.timeline);
            }
            Event::LookUpArrives(rank, server, step) => {
                let served = self.servers.serve(server, self.bytes, now);
                self.timeline.plan(served, Event::LookUpServed(rank, server, step));
            }
            Event::LookUpServed(rank, server, step) => {
                if let Some(look_up) = self.gates[server].look_up(GlobalStep(step), LookUp { rank, step }) {
                    self.reply(look_up);
                }
            }
            Event::PushArrives(rank, server, step) => {
                let served = self.servers.serve(server, self.bytes, now);
                self.timeline.plan(served, Event::PushServed(rank, server, step));
            }
            Event::PushServed(rank, server, step) => {
                self.gates[server].push(GlobalStep(step), Rank(rank), ())?;
                while self.gates[server].next_update().is_some() {
                    for look_up in self.gates[server].finish_update() {
                        self.reply(look_up);
                    }
                }
            }
            Event::Rows(rank, step) => {
                let worker = &mut self.workers[rank as usize];
                worker.missing[(step - worker.next) as usize] -= 1;
                self.compute_if_ready(rank);
            }
            Event::Computed(rank, since) => {
                self.workers[rank as usize].computing_since = None;
                self.tally.busy += now - since;
                self.computed += 1;
                if self.computed == self.workers.len() {
                    self.computed = 0;
                    self.timeline.plan(now + self.all_reduce, Event::AllReduced(self.reduced));
                }
            }
            Event::AllReduced(step) => self.finish_step(step),
        }
        Ok(())
    }

    fn reply(&mut self, look_up: LookUp) {
        let at = self.timeline.now + self.link(look_up.rank, self.bytes);
        self.timeline.plan(at, Event::Rows(look_up.rank, look_up.step));
    }

    /// Looks up the next step, and in `hybrid` also the τ steps after it.
    fn look_ahead(&mut self, rank: u32) {
        let worker = &mut self.workers[rank as usize];
        let from = worker.looked_up;
        let to = worker.next + self.staleness;
        worker.looked_up = to + 1;
        for step in from..=to {
            self.workers[rank as usize].missing.push_back(self.gates.len());
            let at = self.timeline.now + self.link(rank, 0.0);
            if self.supply.takes_time() {
                let position = Some(self.position(rank, step));
                let event = SupplyEvent::Requested { batch: LookUp { rank, step }, position };
                self.timeline.plan(at, event.into());
            } else {
                self.look_up(rank, step, at);
            }
        }
    }

    /// The number of a batch among all batches.
    fn position(&self, rank: u32, step: u64) -> u64 {
        step * self.workers.len() as u64 + u64::from(rank)
    }

    /// The look-ups of a batch arrive at the servers at `at`.
    fn look_up(&mut self, rank: u32, step: u64, at: Time) {
        for server in 0..self.gates.len() {
            self.timeline.plan(at, Event::LookUpArrives(rank, server, step));
        }
    }

    fn compute_if_ready(&mut self, rank: u32) {
        let now = self.timeline.now;
        let worker = &mut self.workers[rank as usize];
        let ready = worker.next == self.reduced && worker.missing.front() == Some(&0);
        if !ready || worker.computing_since.is_some() {
            return;
        }
        // Marks the look-up as used, so that it cannot make the step ready a second time.
        worker.missing[0] = usize::MAX;
        let mut begun = now;
        let mut done = begun + worker.speed.batch(begun, self.simulation.local_rows);
        while let Some((failure, recovery)) = worker.fails_at.filter(|(failure, _)| *failure < done)
            && !self.timeline.is_over(begun)
        {
            // The worker dies before it is done, or died while it waited. It restarts and computes
            // the batch again.
            self.tally.busy += self.timeline.within(begun, failure);
            let back = failure + recovery;
            if back > begun {
                begun = back;
                done = begun + worker.speed.batch(begun, self.simulation.local_rows);
            }
            worker.fails_at = worker.speed.next_failure().map(|(after, recovery)| (back + after, recovery));
        }
        worker.computing_since = Some(begun);
        self.timeline.plan(done, Event::Computed(rank, begun));
    }

    fn finish_step(&mut self, step: u64) {
        self.reduced = step + 1;
        for rank in 0..self.workers.len() as u32 {
            self.tally.finished(rank, self.simulation.local_rows, self.timeline.now);
            let at = self.timeline.now + self.link(rank, self.bytes);
            for server in 0..self.gates.len() {
                self.timeline.plan(at, Event::PushArrives(rank, server, step));
            }
            let worker = &mut self.workers[rank as usize];
            worker.missing.pop_front();
            worker.next = step + 1;
            self.look_ahead(rank);
            self.compute_if_ready(rank);
        }
    }

    fn link(&self, rank: u32, bytes: f64) -> Time {
        self.workers[rank as usize].speed.link(self.simulation.cluster.link, bytes)
    }

    fn report(mut self) -> Report {
        for worker in &self.workers {
            if let Some(since) = worker.computing_since {
                self.tally.busy += self.timeline.within(since, Time::MAX);
            }
        }
        let mut report = self.tally.report(self.simulation);
        report.steps = self.reduced;
        report
    }
}
