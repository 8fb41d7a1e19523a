//! `sync` with pulled pieces under the virtual clock: the coordinator's [`PieceQueue`], the
//! [`PieceWorker`] of each dense worker, and the [`StepGate`] and [`PieceGate`] of each server.
//!
//! With P bytes of dense parameters, a worker sends P with each piece and receives P in each step.
//! The queue, the workers and the servers use the links and the requests for that as they do in a
//! job. The update of a step takes no time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::supply::{Supply, SupplyEvent};
use super::timeline::{Life, Servers, Time, Timeline, WorkerSpeed, nanoseconds};
use super::{Report, Simulation, SimulationError, Tally};
use crate::barrier::pulled::{
    PieceAction, PieceGate, PieceOutcome, PieceQueue, PieceWorker, PulledPiece, Reading, ReportedPiece, StepPiece,
    Summand,
};
use crate::barrier::{GateError, StepGate};
use crate::{GlobalStep, Rank};

/// The steps after the oldest open one whose pieces are handed out, as in a job with the default
/// `lookAhead`.
const STEPS_AHEAD: u64 = 1;

/// A piece that a worker has.
#[derive(Clone, Copy)]
struct Held {
    life: Life,
    piece: StepPiece,
}

/// A worker that reads the parameters before a step.
#[derive(Clone, Copy)]
struct Reader {
    life: Life,
    step: GlobalStep,
}

/// The gradients of a piece have no values in a simulation.
struct Gradients;

impl Summand for Gradients {
    fn add(&mut self, _right: Self) {}
}

/// A request to all servers that a worker waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Request {
    Rows(StepPiece),
    Parameters(GlobalStep),
    Push(StepPiece),
}

/// The replies to a request.
struct Replies {
    /// Servers that have not replied.
    missing: usize,
    /// Whether all servers so far had the rows or the parameters.
    are_found: bool,
    /// The time at which all replies so far have arrived.
    at: Time,
}

enum Event {
    /// Events at the coordinator.
    Join(Life),
    Pull(Life),
    Report(Held, PieceOutcome),
    Dead(u32),
    /// A piece may be late now.
    Late,
    /// Events at a worker.
    Pulled(Held),
    /// All servers have replied. Whether all of them had the rows or the parameters.
    Replied(Life, Request, bool),
    Computed(Held, Time),
    Fails(Life, Time),
    Recovers(u32),
    /// Events between a request of rows and its look-ups.
    Supply(SupplyEvent<Held>),
    /// Events at a server.
    LookUpArrives(Held, usize),
    LookUpServed(Held, usize),
    ReadArrives(Reader, usize),
    ReadServed(Reader, bool),
    PushArrives(Held, usize),
    PushServed(Held, usize),
}

impl From<SupplyEvent<Held>> for Event {
    fn from(event: SupplyEvent<Held>) -> Self {
        Self::Supply(event)
    }
}

struct Worker {
    machine: PieceWorker,
    speed: WorkerSpeed,
    incarnation: u32,
    requests: BTreeMap<Request, Replies>,
    computing_since: Option<Time>,
}

/// A server's gates.
struct Gates {
    rows: StepGate<Held, ()>,
    dense: PieceGate<Reader, Gradients>,
}

struct World<'a> {
    simulation: &'a Simulation,
    timeline: Timeline<Event>,
    queue: PieceQueue,
    /// The virtual time 0.
    origin: Instant,
    /// For each rank, the incarnation that the coordinator answers.
    known: Vec<u32>,
    /// Pulls without an answer, at most one for each worker.
    pulls: Vec<Life>,
    /// The time of the next planned [`Event::Late`].
    late_at: Option<Time>,
    /// By open step: the pieces whose rows are counted.
    counted: BTreeMap<GlobalStep, u32>,
    workers: Vec<Worker>,
    gates: Vec<Gates>,
    servers: Servers,
    supply: Supply<Held>,
    /// Bytes of a piece's embeddings, and of the dense parameters. Their gradients have as many.
    row_bytes: f64,
    dense_bytes: f64,
    tally: Tally,
}

/// Runs `sync` with pulled pieces.
pub(super) fn run(simulation: &Simulation) -> Result<Report, SimulationError> {
    let cluster = &simulation.cluster;
    let origin = Instant::now();
    let worker = |speed| Worker {
        machine: PieceWorker::new(),
        speed,
        incarnation: 0,
        requests: BTreeMap::new(),
        computing_since: None,
    };
    let gates = || Gates {
        rows: StepGate::new(simulation.pieces, 0, GlobalStep(0)),
        dense: PieceGate::new(simulation.pieces, GlobalStep(0), false),
    };
    let mut world = World {
        simulation,
        timeline: Timeline::new(simulation.seconds),
        queue: PieceQueue::new(simulation.pieces, STEPS_AHEAD as usize, GlobalStep(0), origin),
        origin,
        known: vec![0; cluster.workers.len()],
        pulls: Vec::new(),
        late_at: None,
        counted: BTreeMap::new(),
        workers: WorkerSpeed::all(cluster, simulation.seed).into_iter().map(worker).collect(),
        gates: cluster.servers.iter().map(|_| gates()).collect(),
        servers: Servers::new(cluster),
        supply: Supply::new(cluster, simulation.local_rows),
        row_bytes: cluster.link.embedding_bytes_per_row * f64::from(simulation.local_rows),
        dense_bytes: cluster.link.dense_bytes,
        tally: Tally::new(simulation),
    };
    world.supply.start(&mut world.timeline);
    (0..cluster.workers.len() as u32).for_each(|rank| world.start(rank));
    while let Some(event) = world.timeline.next() {
        world.handle(event)?;
    }
    Ok(world.report())
}

impl World<'_> {
    fn handle(&mut self, event: Event) -> Result<(), SimulationError> {
        let now = self.timeline.now;
        match event {
            Event::Join(life) => {
                self.known[life.rank as usize] = life.incarnation;
                self.queue.lost(Rank(life.rank));
                self.answer_pulls()?;
            }
            Event::Pull(life) => self.pull(life)?,
            Event::Report(held, outcome) => self.take_report(held, outcome)?,
            Event::Dead(rank) => {
                // Skipped if the worker has already rejoined.
                if self.known[rank as usize] < self.workers[rank as usize].incarnation {
                    self.queue.lost(Rank(rank));
                    self.pulls.retain(|pull| pull.rank != rank);
                    self.answer_pulls()?;
                }
            }
            Event::Late => {
                self.late_at = self.late_at.filter(|at| *at > now);
                self.answer_pulls()?;
            }
            Event::Supply(event) => {
                for (held, at) in self.supply.handle(event, now) {
                    self.send_to_all(at, |server| Event::LookUpArrives(held, server));
                }
                self.supply.load(&mut self.timeline);
            }
            Event::LookUpArrives(held, server) => {
                let served = self.servers.serve(server, self.row_bytes, now);
                self.timeline.plan(served, Event::LookUpServed(held, server));
            }
            Event::LookUpServed(held, server) => {
                if let Some(held) = self.gates[server].rows.look_up(held.piece.step, held) {
                    self.send_rows(held, server);
                }
            }
            Event::ReadArrives(reader, server) => match self.gates[server].dense.read(reader.step, reader) {
                Reading::Present(reader) | Reading::Previous(reader) => self.serve_read(reader, server, true),
                Reading::Passed(reader) => self.serve_read(reader, server, false),
                Reading::Waits => {}
            },
            Event::ReadServed(Reader { life, step }, is_found) => {
                let bytes = if is_found { self.dense_bytes } else { 0.0 };
                self.reply(life, Request::Parameters(step), is_found, bytes);
            }
            Event::PushArrives(held, server) => {
                let served = self.servers.serve(server, self.row_bytes + self.dense_bytes, now);
                self.timeline.plan(served, Event::PushServed(held, server));
            }
            Event::PushServed(held, server) => self.take_gradients(held, server)?,
            Event::Recovers(rank) => self.start(rank),
            Event::Pulled(Held { life, .. })
            | Event::Replied(life, ..)
            | Event::Computed(Held { life, .. }, _)
            | Event::Fails(life, _) => {
                if self.workers[life.rank as usize].incarnation == life.incarnation {
                    self.work(life, event)?;
                }
            }
        }
        Ok(())
    }

    /// A pull arrives at the coordinator.
    fn pull(&mut self, life: Life) -> Result<(), SimulationError> {
        self.grant()?;
        if self.known[life.rank as usize] == life.incarnation && !self.answer(life) {
            self.pulls.push(life);
        }
        self.plan_late();
        Ok(())
    }

    /// Answers the pulls that wait, in their order, as far as there are pieces.
    fn answer_pulls(&mut self) -> Result<(), SimulationError> {
        self.grant()?;
        for life in std::mem::take(&mut self.pulls) {
            if self.known[life.rank as usize] == life.incarnation && !self.answer(life) {
                self.pulls.push(life);
            }
        }
        self.plan_late();
        Ok(())
    }

    /// Answers a pull. Returns whether there was a piece for it.
    fn answer(&mut self, life: Life) -> bool {
        let pulled = self.queue.pull(Rank(life.rank), self.instant());
        if let Some(PulledPiece { piece, .. }) = pulled {
            let at = self.timeline.now + self.link(life.rank, 0.0);
            self.timeline.plan(at, Event::Pulled(Held { life, piece }));
        }
        pulled.is_some()
    }

    /// Grants the oldest open step and the ones ahead.
    fn grant(&mut self) -> Result<(), SimulationError> {
        while self.queue.granted().0 <= self.queue.open().0 + STEPS_AHEAD {
            self.queue.grant(0)?;
        }
        Ok(())
    }

    /// Plans to answer the pulls again when the next piece becomes late.
    fn plan_late(&mut self) {
        let Some(late) = self.queue.next_late(self.instant()).filter(|_| !self.pulls.is_empty()) else { return };
        let late = late.duration_since(self.origin).as_nanos() as Time;
        if self.late_at.is_none_or(|planned| late < planned) {
            self.late_at = Some(late);
            self.timeline.plan(late, Event::Late);
        }
    }

    fn instant(&self) -> Instant {
        self.origin + Duration::from_nanos(self.timeline.now)
    }

    /// A report arrives at the coordinator. The rows of a piece count once.
    fn take_report(&mut self, held: Held, outcome: PieceOutcome) -> Result<(), SimulationError> {
        let Held { life, piece } = held;
        let (rows, now) = (self.simulation.local_rows, self.timeline.now);
        let ReportedPiece { counts, complete } =
            self.queue.report(Rank(life.rank), piece, outcome, 0.0, self.instant())?;
        if counts {
            *self.counted.entry(piece.step).or_default() += 1;
            self.tally.finished(life.rank, rows, now);
        }
        for step in &complete {
            // The other pieces were passed: their workers died before they reported them.
            let counted = self.counted.remove(&step.step).unwrap_or(0);
            (counted..self.simulation.pieces).for_each(|_| self.tally.finished(life.rank, rows, now));
        }
        if complete.is_empty() {
            // Nothing has changed for the pulls of other workers.
            let own = self.pulls.iter().position(|pull| pull.rank == life.rank);
            let own = own.map(|place| self.pulls.remove(place));
            return own.map_or(Ok(()), |own| self.pull(own));
        }
        self.answer_pulls()
    }

    fn send_rows(&mut self, held: Held, server: usize) {
        // Servers keep the replies of the last applied step.
        let are_found = held.piece.step.0 + 1 >= self.gates[server].rows.applied().0;
        let bytes = if are_found { self.row_bytes } else { 0.0 };
        self.reply(held.life, Request::Rows(held.piece), are_found, bytes);
    }

    fn serve_read(&mut self, reader: Reader, server: usize, is_found: bool) {
        let bytes = if is_found { self.dense_bytes } else { 0.0 };
        let served = self.servers.serve(server, bytes, self.timeline.now);
        self.timeline.plan(served, Event::ReadServed(reader, is_found));
    }

    /// A server takes the gradients of a piece, of rows and of dense parameters. It ignores those
    /// that it has.
    fn take_gradients(&mut self, held: Held, server: usize) -> Result<(), SimulationError> {
        let piece = held.piece;
        let gates = &mut self.gates[server];
        match gates.rows.push(piece.step, piece.piece, ()) {
            Ok(()) | Err(GateError::Repeated { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        gates.dense.push(piece, Some(Gradients))?;
        let (mut look_ups, mut readers) = (Vec::new(), Vec::new());
        while gates.rows.next_update().is_some() {
            look_ups.extend(gates.rows.finish_update());
        }
        while gates.dense.next_update().is_some() {
            readers.extend(gates.dense.finish_update());
        }
        look_ups.into_iter().for_each(|held| self.send_rows(held, server));
        readers.into_iter().for_each(|reader| self.serve_read(reader, server, true));
        self.reply(held.life, Request::Push(piece), true, 0.0);
        Ok(())
    }

    /// A server replies to a worker with so many bytes over the worker's link.
    fn reply(&mut self, life: Life, request: Request, is_found: bool, bytes: f64) {
        let at = self.timeline.now + self.link(life.rank, bytes);
        let worker = &mut self.workers[life.rank as usize];
        if worker.incarnation != life.incarnation {
            return;
        }
        let Some(replies) = worker.requests.get_mut(&request) else { return };
        replies.missing -= 1;
        replies.are_found &= is_found;
        replies.at = replies.at.max(at);
        if replies.missing == 0
            && let Some(replies) = worker.requests.remove(&request)
        {
            self.timeline.plan(replies.at, Event::Replied(life, request, replies.are_found));
        }
    }

    fn work(&mut self, life: Life, event: Event) -> Result<(), SimulationError> {
        let now = self.timeline.now;
        let worker = &mut self.workers[life.rank as usize];
        let actions = match event {
            Event::Pulled(held) => worker.machine.pulled(Some(held.piece)),
            Event::Replied(_, Request::Rows(piece), are_found) => worker.machine.fetched(piece, are_found),
            Event::Replied(_, Request::Parameters(step), are_found) => {
                worker.machine.parameters_read(step, are_found)?
            }
            Event::Replied(_, Request::Push(piece), _) => worker.machine.acknowledged(piece)?,
            Event::Computed(held, since) => {
                worker.computing_since = None;
                self.tally.busy += now - since;
                worker.machine.computed(held.piece)?
            }
            Event::Fails(_, recovery) => {
                if let Some(since) = worker.computing_since.take() {
                    self.tally.busy += now - since;
                }
                worker.incarnation += 1;
                worker.machine = PieceWorker::new();
                worker.requests.clear();
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

    fn carry_out(&mut self, life: Life, actions: Vec<PieceAction>) {
        let now = self.timeline.now;
        let arrives = now + self.link(life.rank, 0.0);
        for action in actions {
            match action {
                PieceAction::Pull => self.timeline.plan(arrives, Event::Pull(life)),
                PieceAction::Fetch(piece) => {
                    self.request(life, Request::Rows(piece));
                    let held = Held { life, piece };
                    if self.supply.takes_time() {
                        let pieces = u64::from(self.simulation.pieces);
                        let position = Some(piece.step.0 * pieces + u64::from(piece.piece.0));
                        self.timeline.plan(arrives, SupplyEvent::Requested { batch: held, position }.into());
                    } else {
                        self.send_to_all(arrives, |server| Event::LookUpArrives(held, server));
                    }
                }
                PieceAction::Read(step) => {
                    self.request(life, Request::Parameters(step));
                    self.send_to_all(arrives, |server| Event::ReadArrives(Reader { life, step }, server));
                }
                PieceAction::Compute(piece) => {
                    let worker = &mut self.workers[life.rank as usize];
                    worker.computing_since = Some(now);
                    let done = now + worker.speed.batch(now, self.simulation.local_rows);
                    self.timeline.plan(done, Event::Computed(Held { life, piece }, now));
                }
                PieceAction::Send(piece) => {
                    self.request(life, Request::Push(piece));
                    let at = now + self.link(life.rank, self.row_bytes + self.dense_bytes);
                    self.send_to_all(at, |server| Event::PushArrives(Held { life, piece }, server));
                }
                PieceAction::Report(piece, outcome) => {
                    self.timeline.plan(arrives, Event::Report(Held { life, piece }, outcome));
                }
                PieceAction::Stop => {}
            }
        }
    }

    /// A worker waits for the replies of all servers.
    fn request(&mut self, life: Life, request: Request) {
        let replies = Replies { missing: self.gates.len(), are_found: true, at: 0 };
        self.workers[life.rank as usize].requests.insert(request, replies);
    }

    /// A message arrives at each server at `at`.
    fn send_to_all(&mut self, at: Time, event: impl Fn(usize) -> Event) {
        for server in 0..self.gates.len() {
            self.timeline.plan(at, event(server));
        }
    }

    fn link(&self, rank: u32, bytes: f64) -> Time {
        self.workers[rank as usize].speed.link(self.simulation.cluster.link, bytes)
    }

    fn report(mut self) -> Report {
        // Pieces in progress at the end were computed in part.
        for worker in &self.workers {
            if let Some(since) = worker.computing_since {
                self.tally.busy += self.timeline.within(since, Time::MAX);
            }
        }
        let mut report = self.tally.report(self.simulation);
        report.steps = self.queue.open().0;
        report
    }
}
