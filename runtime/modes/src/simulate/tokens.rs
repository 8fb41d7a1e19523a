//! The modes without a barrier under the virtual clock.

use super::supply::{Supply, SupplyEvent};
use super::timeline::{Life, Servers, Time, Timeline, WorkerSpeed, nanoseconds};
use super::{Report, Simulation, SimulationError, Tally};
use crate::CoordinatorHalf;
use crate::gba::{
    DispatchError, Dispatcher, DispatcherSetup, GradientServer, Push, PushPullWorker, Pushed, TokenMode, WorkerAction,
};
use crate::{Answers, Assignment, Batch, DataList, Outcome, Reply, RowLedger, Server};
use crate::{GlobalStep, Rank};

/// Pushes of one worker that may wait for acknowledgements.
const UNACKNOWLEDGED: usize = 2;
/// More rows than any run trains.
const ROWS: u64 = 1 << 60;

enum Event {
    /// Events at the coordinator.
    Join(Life),
    Pull(Life),
    Report(Life, Batch, Outcome),
    Dead(u32),
    ServerAt(Server, GlobalStep),
    /// Events at a worker.
    Answer(Life, Reply),
    /// The parameters of the last server have arrived.
    Parameters(Life),
    Computed(Life, Time),
    Acknowledged(Life, Server, Batch, Outcome),
    Fails(Life, Time),
    Recovers(u32),
    /// Events between a request and its look-ups.
    Supply(SupplyEvent<Life>),
    /// Events at a server.
    PullArrives(Life, Server),
    PullServed(Life, Server),
    PushArrives(Life, Server, Push<()>),
    PushServed(Life, Server, Push<()>),
}

impl From<SupplyEvent<Life>> for Event {
    fn from(event: SupplyEvent<Life>) -> Self {
        Self::Supply(event)
    }
}

struct Worker {
    machine: PushPullWorker,
    speed: WorkerSpeed,
    incarnation: u32,
    /// The batch that the worker pulls parameters for or computes.
    assignment: Option<Assignment>,
    pulled: Vec<GlobalStep>,
    missing: usize,
    /// The time at which all parameters served so far have arrived.
    pulled_at: Time,
    computing_since: Option<Time>,
}

struct World<'a> {
    simulation: &'a Simulation,
    timeline: Timeline<Event>,
    dispatcher: Dispatcher,
    /// For each rank, the incarnation that the coordinator answers.
    known: Vec<u32>,
    workers: Vec<Worker>,
    servers: Vec<GradientServer<()>>,
    requests: Servers,
    supply: Supply<Life>,
    /// Bytes of a batch's parameters. Its gradients have as many. Messages to and from all servers
    /// at the same time share the worker's link.
    bytes: f64,
    tally: Tally,
}

pub(super) fn run(simulation: &Simulation, mode: TokenMode) -> Result<Report, SimulationError> {
    let mut world = begin(simulation, mode)?;
    while let Some(event) = world.timeline.next() {
        world.handle(event)?;
    }
    Ok(world.report(mode))
}

fn begin(simulation: &Simulation, mode: TokenMode) -> Result<World<'_>, SimulationError> {
    let cluster = &simulation.cluster;
    let (n, servers) = (cluster.workers.len(), cluster.servers.len());
    let setup = DispatcherSetup {
        mode,
        workers: n as u32,
        servers: servers as u32,
        first_step: GlobalStep(0),
        in_flight_limit: UNACKNOWLEDGED + 1,
    };
    let mut dispatcher = Dispatcher::new(setup, DataList::new(simulation.local_rows, 0), RowLedger::default())?;
    dispatcher.extend_data(ROWS);
    let link = cluster.link;
    let bytes = link.dense_bytes + link.embedding_bytes_per_row * f64::from(simulation.local_rows);
    let worker = |speed| Worker {
        machine: PushPullWorker::new(servers as u32, UNACKNOWLEDGED),
        speed,
        incarnation: 0,
        assignment: None,
        pulled: vec![GlobalStep(0); servers],
        missing: 0,
        pulled_at: 0,
        computing_since: None,
    };
    let mut world = World {
        simulation,
        timeline: Timeline::new(simulation.seconds),
        dispatcher,
        known: vec![0; n],
        workers: WorkerSpeed::all(cluster, simulation.seed).into_iter().map(worker).collect(),
        servers: (0..servers).map(|_| GradientServer::new(mode, n as u32, GlobalStep(0), 0)).collect(),
        requests: Servers::new(cluster),
        supply: Supply::new(cluster, simulation.local_rows),
        bytes,
        tally: Tally::new(simulation),
    };
    world.supply.start(&mut world.timeline);
    (0..n as u32).for_each(|rank| world.start(rank));
    Ok(world)
}

impl World<'_> {
    fn handle(&mut self, event: Event) -> Result<(), SimulationError> {
        match event {
            Event::Join(life) => {
                self.known[life.rank as usize] = life.incarnation;
                let answers = self.dispatcher.join(Rank(life.rank));
                self.answer(answers);
            }
            Event::Pull(life) => self.pull(life)?,
            Event::Report(life, batch, outcome) => {
                self.tally.finished(life.rank, batch.rows, self.timeline.now);
                let answers = self.dispatcher.report(Rank(life.rank), batch, outcome)?;
                self.answer(answers);
            }
            Event::Dead(rank) => {
                // Skipped if the worker has already rejoined.
                if self.known[rank as usize] < self.workers[rank as usize].incarnation {
                    let answers = self.dispatcher.lose(Rank(rank));
                    self.answer(answers);
                }
            }
            Event::ServerAt(server, step) => {
                let answers = self.dispatcher.server_at(server, step)?;
                self.answer(answers);
            }
            Event::Supply(event) => {
                for (life, at) in self.supply.handle(event, self.timeline.now) {
                    self.look_up(life, at);
                }
                self.supply.load(&mut self.timeline);
            }
            Event::PullArrives(life, server) => {
                let served = self.requests.serve(server.0 as usize, self.bytes, self.timeline.now);
                self.timeline.plan(served, Event::PullServed(life, server));
            }
            Event::PullServed(life, server) => self.send_parameters(life, server),
            Event::PushArrives(life, server, push) => {
                let served = self.requests.serve(server.0 as usize, self.bytes, self.timeline.now);
                self.timeline.plan(served, Event::PushServed(life, server, push));
            }
            Event::PushServed(life, server, push) => self.take(life, server, push)?,
            Event::Recovers(rank) => self.start(rank),
            Event::Answer(life, _)
            | Event::Parameters(life)
            | Event::Computed(life, _)
            | Event::Acknowledged(life, ..)
            | Event::Fails(life, _) => {
                if self.workers[life.rank as usize].incarnation == life.incarnation {
                    self.work(life, event)?;
                }
            }
        }
        Ok(())
    }

    fn pull(&mut self, life: Life) -> Result<(), SimulationError> {
        if self.known[life.rank as usize] != life.incarnation {
            return Ok(());
        }
        match self.dispatcher.pull(Rank(life.rank)) {
            // The worker was declared dead, and its request arrives late.
            Err(DispatchError::UnknownRank { .. }) => Ok(()),
            answers => {
                self.answer(answers?);
                Ok(())
            }
        }
    }

    fn answer(&mut self, answers: Answers) {
        for (rank, reply) in answers {
            let life = Life { rank: rank.0, incarnation: self.known[rank.0 as usize] };
            let at = self.timeline.now + self.link(rank.0, 0.0);
            self.timeline.plan(at, Event::Answer(life, reply));
        }
    }

    fn send_parameters(&mut self, life: Life, server: Server) {
        let at = self.timeline.now + self.link(life.rank, self.bytes);
        let worker = &mut self.workers[life.rank as usize];
        if worker.incarnation != life.incarnation {
            return;
        }
        worker.pulled[server.0 as usize] = self.servers[server.0 as usize].step();
        worker.pulled_at = worker.pulled_at.max(at);
        worker.missing -= 1;
        if worker.missing == 0 {
            self.timeline.plan(worker.pulled_at, Event::Parameters(life));
        }
    }

    fn take(&mut self, life: Life, server: Server, push: Push<()>) -> Result<(), SimulationError> {
        let batch = push.batch;
        let place = server.0 as usize;
        let outcome = match self.servers[place].push(push)? {
            Pushed::Buffered => Outcome::Trained,
            Pushed::Late => Outcome::Dropped,
            Pushed::Repeated => Outcome::Repeated,
            Pushed::Full(_) => {
                let at = self.timeline.now + nanoseconds(self.simulation.cluster.link.latency_seconds);
                self.timeline.plan(at, Event::ServerAt(server, self.servers[place].step()));
                Outcome::Trained
            }
        };
        let at = self.timeline.now + self.link(life.rank, 0.0);
        self.timeline.plan(at, Event::Acknowledged(life, server, batch, outcome));
        Ok(())
    }

    fn work(&mut self, life: Life, event: Event) -> Result<(), SimulationError> {
        let now = self.timeline.now;
        let worker = &mut self.workers[life.rank as usize];
        let actions = match event {
            Event::Answer(_, reply) => worker.machine.answered(reply)?,
            Event::Acknowledged(_, server, batch, outcome) => worker.machine.acknowledged(server, batch, outcome)?,
            Event::Parameters(_) => {
                worker.computing_since = Some(now);
                let done = now + worker.speed.batch(now, self.simulation.local_rows);
                self.timeline.plan(done, Event::Computed(life, now));
                return Ok(());
            }
            Event::Computed(_, since) => {
                worker.computing_since = None;
                self.tally.busy += now - since;
                worker.machine.computed()?
            }
            Event::Fails(_, recovery) => {
                if let Some(since) = worker.computing_since.take() {
                    self.tally.busy += now - since;
                }
                worker.incarnation += 1;
                self.timeline.plan(now + recovery, Event::Recovers(life.rank));
                let detected = now + nanoseconds(self.simulation.cluster.detection_seconds);
                self.timeline.plan(detected, Event::Dead(life.rank));
                return Ok(());
            }
            _ => return Ok(()),
        };
        self.carry_out(life, actions);
        Ok(())
    }

    fn start(&mut self, rank: u32) {
        let now = self.timeline.now;
        let worker = &mut self.workers[rank as usize];
        let life = Life { rank, incarnation: worker.incarnation };
        if let Some((after, recovery)) = worker.speed.next_failure() {
            self.timeline.plan(now + after, Event::Fails(life, recovery));
        }
        let actions = worker.machine.start();
        self.timeline.plan(now + self.link(rank, 0.0), Event::Join(life));
        self.carry_out(life, actions);
    }

    fn carry_out(&mut self, life: Life, actions: Vec<WorkerAction>) {
        let (now, rank) = (self.timeline.now, life.rank);
        for action in actions {
            match action {
                WorkerAction::Pull => self.timeline.plan(now + self.link(rank, 0.0), Event::Pull(life)),
                WorkerAction::Report(batch, outcome) => {
                    self.timeline.plan(now + self.link(rank, 0.0), Event::Report(life, batch, outcome));
                }
                WorkerAction::Compute(assignment) => {
                    let worker = &mut self.workers[rank as usize];
                    worker.assignment = Some(assignment);
                    worker.missing = self.servers.len();
                    let at = now + self.link(rank, 0.0);
                    if self.supply.takes_time() {
                        let event = SupplyEvent::Requested { batch: life, position: None };
                        self.timeline.plan(at, event.into());
                    } else {
                        self.look_up(life, at);
                    }
                }
                WorkerAction::Push(Assignment { batch, token }) => {
                    for server in 0..self.servers.len() {
                        let pulled_at = self.workers[rank as usize].pulled[server];
                        let push = Push { rank: Rank(rank), batch, token, pulled_at, gradient: () };
                        let at = now + self.link(rank, self.bytes);
                        self.timeline.plan(at, Event::PushArrives(life, Server(server as u32), push));
                    }
                }
                WorkerAction::Stop => {}
            }
        }
    }

    /// The pulls of a batch arrive at the servers at `at`.
    fn look_up(&mut self, life: Life, at: Time) {
        for server in 0..self.servers.len() as u32 {
            self.timeline.plan(at, Event::PullArrives(life, Server(server)));
        }
    }

    fn link(&self, rank: u32, bytes: f64) -> Time {
        self.workers[rank as usize].speed.link(self.simulation.cluster.link, bytes)
    }

    fn report(mut self, mode: TokenMode) -> Report {
        // Batches in progress at the end were computed in part.
        for worker in &self.workers {
            if let Some(since) = worker.computing_since {
                self.tally.busy += self.timeline.within(since, Time::MAX);
            }
        }
        let mut report = self.tally.report(self.simulation);
        let records = self.servers.iter().map(|s| &s.counts().gradient_staleness);
        let (count, sum) = records.clone().fold((0, 0), |(count, sum), r| (count + r.count, sum + r.sum));
        let counts = self.servers[0].counts();
        let rows = f64::from(self.simulation.local_rows);
        report.steps = self.servers[0].step().0;
        report.mean_staleness = if count == 0 { 0.0 } else { sum as f64 / count as f64 };
        report.max_staleness = records.map(|r| r.max).max().unwrap_or(0);
        report.mean_staleness_rows =
            report.mean_staleness * rows * f64::from(mode.capacity(report.workers as u32).get());
        report.dropped_batches = counts.excluded + counts.late;
        // Servers may have some of the last batches that workers have not reported yet.
        let trained = (counts.buffered - counts.excluded) as f64 * rows / self.simulation.seconds.max(1e-9);
        report.trained_samples_per_second = trained.min(report.global_samples_per_second);
        report.lost_tokens = self.dispatcher.tokens().lost();
        report
    }
}

#[cfg(test)]
mod tests;
