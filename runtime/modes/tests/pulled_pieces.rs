//! Pulled pieces under a simulated network. Messages arrive late, in any order, and some twice.
//! Workers differ in speed. They and the embedding worker die at any time, and are replaced. The
//! coordinator forgets its queue.
//!
//! In every run, the dense parameters, the rows and the losses have the bits of a sequential
//! computation. Planted bugs show that the runs would find mistakes.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rectrain_modes::barrier::StepGate;
use rectrain_modes::barrier::pulled::{
    PieceAction, PieceGate, PieceOutcome, PiecePushed, PieceQueue, PieceWorker, Reading, StepPiece, Summand,
};
use rectrain_modes::{GlobalStep, Rank};
use rectrain_random::SplitMix64;

/// Dense parameters of a server. Each server has one row, besides.
const DENSE: usize = 2;
const RATE: f32 = 0.1;
/// More events than any run needs.
const MOST_EVENTS: u64 = 200_000;

/// A mistake in the code around the state machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    KeepsNoCopyOfParameters,
    KeepsNoCopyOfRows,
    ReadsPresentParameters,
    AcknowledgesBeforeApplying,
    CountsAPieceTwice,
    AddsPiecesAsTheyCome,
}

/// The size of a cluster, and its delays in milliseconds.
struct Settings {
    servers: usize,
    pieces: u32,
    steps: u64,
    /// By worker: the usual time of a piece.
    times: Vec<u64>,
    steps_ahead: usize,
    latency: u64,
    /// Of ten messages to servers, this many come twice.
    repeated: u64,
    deaths: u64,
    embedding_worker_deaths: u64,
    restarts: bool,
}

impl Settings {
    fn draw(random: &mut SplitMix64) -> Self {
        let workers = 1 + random.below(4);
        Self {
            servers: 1 + random.below(3) as usize,
            pieces: 1 + random.below(6) as u32,
            steps: 1 + random.below(12),
            times: (0..workers).map(|_| [10, 10, 10, 20, 100, 600][random.below(6) as usize]).collect(),
            steps_ahead: 1 + random.below(3) as usize,
            latency: [1, 5, 40][random.below(3) as usize],
            repeated: random.below(4),
            deaths: random.below(5),
            embedding_worker_deaths: random.below(4),
            restarts: random.below(3) == 0,
        }
    }
}

/// The gradients of a piece, by server, and its loss.
#[derive(Clone, Debug)]
struct Gradients {
    dense: Vec<Vec<f32>>,
    rows: Vec<f32>,
    loss: f64,
}

/// Gradients that depend on every bit of the parameters and rows.
fn gradients(at: StepPiece, parameters: &[f32], rows: &[f32]) -> Gradients {
    let weighted = |values: &[f32], weight: f32| -> f32 {
        values.iter().zip(1u8..).map(|(value, number)| value * (weight + 0.07 * f32::from(number))).sum()
    };
    let place = 0.013 * at.piece.0 as f32 + 0.0031 * at.step.0 as f32;
    let all = weighted(parameters, 0.3) + weighted(rows, 0.2) + place;
    let gradient = |number: usize| (all * 1.37 * (number + 1) as f32).fract() - 0.5;
    let of_server = |server: usize| (0..DENSE).map(|number| gradient(server * DENSE + number)).collect();
    Gradients {
        dense: (0..rows.len()).map(of_server).collect(),
        rows: (0..rows.len()).map(|server| gradient(7 + server)).collect(),
        loss: f64::from(all) * 0.1,
    }
}

fn first_dense(server: usize) -> Vec<f32> {
    (0..DENSE).map(|number| 0.1 * (server + number) as f32).collect()
}

fn first_row(server: usize) -> f32 {
    0.2 * server as f32
}

fn apply_dense(dense: &mut [f32], sum: &[f32]) {
    dense.iter_mut().zip(sum).for_each(|(value, gradient)| *value -= RATE * gradient);
}

/// Gradients of rows are summed in the order of the pieces.
fn apply_row(row: &mut f32, pieces: &[f32]) {
    *row -= RATE * pieces.iter().copied().reduce(|sum, gradient| sum + gradient).unwrap();
}

/// The sum over the nodes of a tree, by recursion.
fn tree<T: Summand + Clone>(values: &[T]) -> T {
    if let [value] = values {
        return value.clone();
    }
    let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
    let mut sum = tree(left);
    sum.add(tree(right));
    sum
}

fn added(mut left: Vec<f32>, right: Vec<f32>) -> Vec<f32> {
    left.add(right);
    left
}

/// The result of a job. Numbers are compared by their bits.
#[derive(Debug, PartialEq, Eq)]
struct Trained {
    dense: Vec<Vec<u32>>,
    rows: Vec<u32>,
}

impl Trained {
    fn new<'a>(servers: impl Iterator<Item = (&'a [f32], f32)>) -> Self {
        let mut all = Self { dense: Vec::new(), rows: Vec::new() };
        for (dense, row) in servers {
            all.dense.push(dense.iter().map(|value| value.to_bits()).collect());
            all.rows.push(row.to_bits());
        }
        all
    }
}

/// Trains one piece after the other. Returns the loss of each step, too.
fn sequential(settings: &Settings) -> (Trained, Vec<f64>) {
    let mut dense: Vec<Vec<f32>> = (0..settings.servers).map(first_dense).collect();
    let mut rows: Vec<f32> = (0..settings.servers).map(first_row).collect();
    let mut losses = Vec::new();
    for step in (0..settings.steps).map(GlobalStep) {
        let parameters = dense.concat();
        let of_piece = |piece| gradients(StepPiece { step, piece }, &parameters, &rows);
        let all: Vec<Gradients> = (0..settings.pieces).map(Rank).map(of_piece).collect();
        for (server, (dense, row)) in dense.iter_mut().zip(&mut rows).enumerate() {
            let of_server: Vec<Vec<f32>> = all.iter().map(|piece| piece.dense[server].clone()).collect();
            apply_dense(dense, &tree(&of_server));
            let of_server: Vec<f32> = all.iter().map(|piece| piece.rows[server]).collect();
            apply_row(row, &of_server);
        }
        losses.push(tree(&all.iter().map(|piece| piece.loss).collect::<Vec<_>>()));
    }
    (Trained::new(dense.iter().map(Vec::as_slice).zip(rows)), losses)
}

/// A worker's rank and incarnation.
type Caller = (u32, u32);

/// A message that arrives, or work that ends.
#[derive(Clone, Debug)]
enum Event {
    Pull(Caller),
    Pulled(Caller, Option<StepPiece>),
    Report(Caller, StepPiece, PieceOutcome, f64),
    /// A piece may be late.
    AskAgain,
    Fetch(Caller, StepPiece),
    Fetched(Caller, StepPiece, Option<Vec<f32>>),
    Read(Caller, GlobalStep, usize),
    ParametersRead(Caller, GlobalStep, usize, Option<Vec<f32>>),
    Computed(Caller, StepPiece),
    PushDense(Caller, StepPiece, usize, Vec<f32>),
    PushRows(Caller, StepPiece, Vec<f32>),
    Update(StepPiece, usize, f32),
    Updated(StepPiece, usize),
    /// By a server, or by the embedding worker, whose number is the number of servers.
    Acknowledged(Caller, StepPiece, usize),
    FinishDense(usize),
    FinishRow(usize),
    Death(u32),
    EmbeddingWorkerDeath,
    Restart,
}

/// Waits for a server's dense parameters.
enum Reader {
    Read(Caller, GlobalStep),
    Push(Caller, StepPiece),
}

/// Waits for a server's row.
enum Waiter {
    LookUp(StepPiece),
    Update(StepPiece),
}

struct Server {
    gate: PieceGate<Reader, Vec<f32>>,
    dense: Vec<f32>,
    previous_dense: Vec<f32>,
    dense_update: Option<Vec<f32>>,
    /// The gradients of the open step as they came, and those that came again.
    arrived: (Vec<Vec<f32>>, Vec<Vec<f32>>),
    rows: StepGate<Waiter, f32>,
    row: f32,
    previous_row: f32,
    row_update: Option<Vec<f32>>,
}

struct Worker {
    incarnation: u32,
    machine: PieceWorker,
    parameters: Option<(GlobalStep, Vec<f32>)>,
    /// Pieces whose rows have not come.
    fetching: BTreeSet<StepPiece>,
    rows: BTreeMap<StepPiece, Vec<f32>>,
    /// The partitions that have come, by step and server.
    reads: BTreeMap<GlobalStep, BTreeMap<usize, Option<Vec<f32>>>>,
    gradients: BTreeMap<StepPiece, Gradients>,
    /// The acknowledgements that are missing.
    missing: BTreeMap<StepPiece, BTreeSet<usize>>,
    has_stopped: bool,
}

impl Worker {
    fn new(incarnation: u32) -> Self {
        Self {
            incarnation,
            machine: PieceWorker::new(),
            parameters: None,
            fetching: BTreeSet::new(),
            rows: BTreeMap::new(),
            reads: BTreeMap::new(),
            gradients: BTreeMap::new(),
            missing: BTreeMap::new(),
            has_stopped: false,
        }
    }
}

type RowsByPlace = BTreeMap<usize, Option<f32>>;

/// The embedding worker.
#[derive(Default)]
struct Rows {
    delivered: BTreeMap<StepPiece, Vec<f32>>,
    /// By piece: the rows that have come, and the workers that wait. A row is `None` if it is gone.
    asked: BTreeMap<StepPiece, (RowsByPlace, Vec<Caller>)>,
    acknowledged: BTreeSet<StepPiece>,
    /// By piece: the servers that have not acknowledged, and the workers that wait.
    sent: BTreeMap<StepPiece, (BTreeSet<usize>, Vec<Caller>)>,
    newest: u64,
}

/// What the runs had to survive.
#[derive(Debug, Default)]
struct Counts {
    second: u64,
    passed: u64,
    deaths: u64,
    embedding_worker_deaths: u64,
    restarts: u64,
}

struct Cluster {
    bug: Bug,
    settings: Settings,
    random: SplitMix64,
    begin: Instant,
    now: u64,
    events: BTreeMap<(u64, u64), Event>,
    posted: u64,
    queue: PieceQueue,
    pulls: BTreeSet<Caller>,
    asks_at: BTreeSet<u64>,
    workers: Vec<Worker>,
    rows: Rows,
    servers: Vec<Server>,
    losses: BTreeMap<u64, f64>,
    counts: Counts,
}

type Run = Result<(), String>;

fn text(error: impl ToString) -> String {
    error.to_string()
}

impl Cluster {
    fn new(seed: u64, bug: Bug) -> Self {
        let mut random = SplitMix64::new(seed);
        let settings = Settings::draw(&mut random);
        let begin = Instant::now();
        let server = |server| Server {
            gate: PieceGate::new(settings.pieces, GlobalStep(0), false),
            dense: first_dense(server),
            previous_dense: Vec::new(),
            dense_update: None,
            arrived: (Vec::new(), Vec::new()),
            rows: StepGate::new(settings.pieces, 0, GlobalStep(0)),
            row: first_row(server),
            previous_row: 0.0,
            row_update: None,
        };
        let servers = (0..settings.servers).map(server).collect();
        let workers = settings.times.iter().map(|_| Worker::new(0)).collect();
        let queue = PieceQueue::new(settings.pieces, settings.steps_ahead, GlobalStep(0), begin);
        let mut cluster = Self {
            bug,
            settings,
            random,
            begin,
            now: 0,
            events: BTreeMap::new(),
            posted: 0,
            queue,
            pulls: BTreeSet::new(),
            asks_at: BTreeSet::new(),
            workers,
            rows: Rows::default(),
            servers,
            losses: BTreeMap::new(),
            counts: Counts::default(),
        };
        cluster.grant_all();
        cluster.plan_failures();
        cluster
    }

    fn plan_failures(&mut self) {
        for _ in 0..self.settings.deaths {
            let rank = self.random.below(self.settings.times.len() as u64) as u32;
            let after = 1 + self.random.below(600);
            self.post(after, Event::Death(rank));
        }
        for _ in 0..self.settings.embedding_worker_deaths {
            let after = 1 + self.random.below(600);
            self.post(after, Event::EmbeddingWorkerDeath);
        }
        if self.settings.restarts {
            let after = 1 + self.random.below(400);
            self.post(after, Event::Restart);
        }
    }

    fn grant_all(&mut self) {
        while self.queue.granted().0 < self.settings.steps {
            self.queue.grant(0).unwrap();
        }
    }

    fn post(&mut self, after: u64, event: Event) {
        self.posted += 1;
        self.events.insert((self.now + after, self.posted), event);
    }

    /// Sends a message. The network may delay it.
    fn send(&mut self, event: Event) {
        let delay = self.random.below(self.settings.latency + 1);
        self.post(delay, event);
    }

    /// Sends a message to a server or the embedding worker. The sender may repeat it.
    fn send_again(&mut self, event: Event) {
        if self.random.below(10) < self.settings.repeated {
            let delay = self.random.below(3 * self.settings.latency + 1);
            self.post(delay, event.clone());
        }
        self.send(event);
    }

    /// Work that may take longer than several messages.
    fn take_long(&mut self, event: Event) {
        let time = self.random.below(10 * self.settings.latency + 1);
        self.post(time, event);
    }

    fn instant(&self) -> Instant {
        self.begin + Duration::from_millis(self.now)
    }

    fn run(mut self) -> Result<Counts, String> {
        for rank in 0..self.workers.len() as u32 {
            let actions = self.workers[rank as usize].machine.start();
            self.act(rank, actions);
        }
        while !self.workers.iter().all(|worker| worker.has_stopped) {
            let Some(((now, _), event)) = self.events.pop_first() else {
                return Err(format!("nothing happens any more in step {}", self.queue.open()));
            };
            self.now = now;
            self.handle(event)?;
            if self.posted > MOST_EVENTS {
                return Err(format!("there is no end of step {}", self.queue.open()));
            }
        }
        self.check()
    }

    /// Compares the result with the sequential computation.
    fn check(self) -> Result<Counts, String> {
        let last = GlobalStep(self.settings.steps);
        if self.servers.iter().any(|server| server.gate.open() != last || server.rows.applied() != last) {
            return Err("the order ended before a server had applied its last step".to_owned());
        }
        let (expected, losses) = sequential(&self.settings);
        let trained = Trained::new(self.servers.iter().map(|server| (server.dense.as_slice(), server.row)));
        if trained != expected {
            return Err(format!("trained {trained:?}, expected {expected:?}"));
        }
        match self.losses.iter().find(|(step, loss)| loss.to_bits() != losses[**step as usize].to_bits()) {
            Some((step, loss)) => Err(format!("step {step} has loss {loss}")),
            None => Ok(self.counts),
        }
    }

    fn is_current(&self, (rank, incarnation): Caller) -> bool {
        self.workers[rank as usize].incarnation == incarnation
    }

    /// Whether a message of this worker is lost because it is dead.
    fn is_lost(&mut self, caller: Caller) -> bool {
        !self.is_current(caller) && self.random.below(10) < 7
    }

    fn handle(&mut self, event: Event) -> Run {
        match event {
            Event::Pull(caller) | Event::Report(caller, ..) | Event::Pulled(caller, ..) if !self.is_current(caller) => {
            }
            Event::Fetched(caller, ..) | Event::ParametersRead(caller, ..) if !self.is_current(caller) => {}
            Event::Computed(caller, ..) | Event::Acknowledged(caller, ..) if !self.is_current(caller) => {}
            // Many of the messages that a dead worker has begun to send do not arrive.
            Event::PushDense(caller, ..) | Event::PushRows(caller, ..) if self.is_lost(caller) => {}
            Event::Pull(caller) => {
                self.pulls.insert(caller);
                self.answer_pulls();
            }
            Event::AskAgain => self.answer_pulls(),
            Event::Report(caller, piece, outcome, loss) => self.report(caller, piece, outcome, loss)?,
            Event::Pulled((rank, _), piece) => {
                let actions = self.workers[rank as usize].machine.pulled(piece);
                self.act(rank, actions);
            }
            Event::Fetch(caller, piece) => self.fetch(caller, piece)?,
            Event::Fetched((rank, _), piece, rows) => {
                let worker = &mut self.workers[rank as usize];
                worker.fetching.remove(&piece);
                let actions = worker.machine.fetched(piece, rows.is_some());
                worker.rows.extend(rows.map(|rows| (piece, rows)));
                self.act(rank, actions);
            }
            Event::Read(caller, step, server) => self.read(caller, step, server),
            Event::ParametersRead((rank, _), step, server, values) => {
                self.parameters_read(rank, step, server, values)?
            }
            Event::Computed((rank, _), piece) => {
                let actions = self.workers[rank as usize].machine.computed(piece).map_err(text)?;
                self.act(rank, actions);
            }
            Event::PushDense(caller, piece, server, values) => self.push_dense(caller, piece, server, values)?,
            Event::PushRows(caller, piece, values) => self.push_rows(caller, piece, &values),
            Event::Update(piece, server, gradient) => self.update(piece, server, gradient)?,
            Event::Updated(piece, server) => self.updated(piece, server),
            Event::Acknowledged((rank, _), piece, by) => self.acknowledged(rank, piece, by)?,
            Event::FinishDense(server) => self.finish_dense(server),
            Event::FinishRow(server) => self.finish_row(server)?,
            Event::Death(rank) => self.die(rank),
            Event::EmbeddingWorkerDeath => self.replace_embedding_worker(),
            Event::Restart => self.restart(),
        }
        Ok(())
    }

    /// Carries out the actions of a worker.
    fn act(&mut self, rank: u32, actions: Vec<PieceAction>) {
        for action in actions {
            let caller = (rank, self.workers[rank as usize].incarnation);
            match action {
                PieceAction::Pull => self.send(Event::Pull(caller)),
                PieceAction::Fetch(piece) => {
                    self.workers[rank as usize].fetching.insert(piece);
                    self.send_again(Event::Fetch(caller, piece));
                }
                PieceAction::Read(step) => {
                    for server in 0..self.servers.len() {
                        self.send(Event::Read(caller, step, server));
                    }
                }
                PieceAction::Compute(piece) => self.compute(caller, piece),
                PieceAction::Send(piece) => self.send_gradients(caller, piece),
                PieceAction::Report(piece, outcome) => {
                    let worker = &mut self.workers[rank as usize];
                    worker.rows.remove(&piece);
                    let loss = worker.gradients.remove(&piece).map_or(0.0, |gradients| gradients.loss);
                    self.send(Event::Report(caller, piece, outcome, loss));
                }
                PieceAction::Stop => self.workers[rank as usize].has_stopped = true,
            }
        }
    }

    fn compute(&mut self, caller: Caller, piece: StepPiece) {
        let worker = &mut self.workers[caller.0 as usize];
        let (step, parameters) = worker.parameters.as_ref().unwrap();
        assert_eq!(*step, piece.step);
        let computed = gradients(piece, parameters, &worker.rows[&piece]);
        worker.gradients.insert(piece, computed);
        let time = self.settings.times[caller.0 as usize] * (8 + self.random.below(5)) / 10;
        self.post(time, Event::Computed(caller, piece));
    }

    fn send_gradients(&mut self, caller: Caller, piece: StepPiece) {
        let worker = &mut self.workers[caller.0 as usize];
        let Gradients { dense, rows, .. } = worker.gradients[&piece].clone();
        worker.missing.insert(piece, (0..=dense.len()).collect());
        for (server, values) in dense.into_iter().enumerate() {
            self.send_again(Event::PushDense(caller, piece, server, values));
        }
        self.send_again(Event::PushRows(caller, piece, rows));
        if self.settings.deaths > 0 && self.random.below(20) == 0 {
            self.send(Event::Death(caller.0));
        }
    }

    // The coordinator.

    fn answer_pulls(&mut self) {
        for caller in self.pulls.clone() {
            let has_ended = self.queue.open().0 >= self.settings.steps;
            let pulled = if has_ended { None } else { self.queue.pull(Rank(caller.0), self.instant()) };
            if pulled.is_some() || has_ended {
                self.pulls.remove(&caller);
                self.counts.second += u64::from(pulled.is_some_and(|pulled| pulled.is_second));
                self.send(Event::Pulled(caller, pulled.map(|pulled| pulled.piece)));
            }
        }
        let late = self.queue.next_late(self.instant()).filter(|_| !self.pulls.is_empty());
        if let Some(at) = late.map(|late| late.duration_since(self.begin).as_millis() as u64)
            && self.asks_at.insert(at)
        {
            self.post(at - self.now, Event::AskAgain);
        }
    }

    fn report(&mut self, (rank, _): Caller, piece: StepPiece, outcome: PieceOutcome, loss: f64) -> Run {
        self.counts.passed += u64::from(outcome == PieceOutcome::Passed);
        let reported = self.queue.report(Rank(rank), piece, outcome, loss, self.instant()).map_err(text)?;
        let losses = reported.complete.into_iter().filter_map(|step| Some((step.step.0, step.loss_sum?)));
        self.losses.extend(losses);
        self.answer_pulls();
        Ok(())
    }

    fn die(&mut self, rank: u32) {
        let worker = &mut self.workers[rank as usize];
        if worker.has_stopped {
            return;
        }
        *worker = Worker::new(worker.incarnation + 1);
        let actions = worker.machine.start();
        self.counts.deaths += 1;
        self.queue.lost(Rank(rank));
        self.pulls.retain(|(pulled, _)| *pulled != rank);
        self.act(rank, actions);
        self.answer_pulls();
    }

    /// The coordinator forgets all pieces, and the last steps.
    fn restart(&mut self) {
        self.counts.restarts += 1;
        let first = GlobalStep(self.random.below(self.queue.open().0 + 1));
        self.queue = PieceQueue::new(self.settings.pieces, self.settings.steps_ahead, first, self.instant());
        self.grant_all();
        self.answer_pulls();
    }

    // The embedding worker.

    fn fetch(&mut self, caller: Caller, piece: StepPiece) -> Run {
        let ahead = self.settings.steps_ahead as u64;
        self.rows.newest = self.rows.newest.max(piece.step.0);
        let newest = self.rows.newest;
        self.rows.delivered.retain(|delivered, _| delivered.step.0 + ahead + 3 >= newest);
        if let Some(rows) = self.rows.delivered.get(&piece).cloned() {
            self.send(Event::Fetched(caller, piece, Some(rows)));
        } else if piece.step.0 + ahead + 2 < newest {
            self.send(Event::Fetched(caller, piece, None));
        } else if let Some((_, callers)) = self.rows.asked.get_mut(&piece) {
            callers.push(caller);
        } else {
            self.rows.asked.insert(piece, (BTreeMap::new(), vec![caller]));
            for server in 0..self.servers.len() {
                self.look_up(piece, server)?;
            }
        }
        Ok(())
    }

    /// Dense workers repeat the requests that have no answer to its replacement.
    fn replace_embedding_worker(&mut self) {
        self.rows = Rows::default();
        self.counts.embedding_worker_deaths += 1;
        for rank in 0..self.workers.len() {
            let worker = &self.workers[rank];
            let caller = (rank as u32, worker.incarnation);
            let sent = worker.missing.iter().filter(|(_, missing)| missing.contains(&self.servers.len()));
            let sent = sent.map(|(piece, _)| Event::PushRows(caller, *piece, worker.gradients[piece].rows.clone()));
            let fetched = worker.fetching.iter().map(|piece| Event::Fetch(caller, *piece));
            for event in sent.chain(fetched).collect::<Vec<_>>() {
                self.send(event);
            }
        }
    }

    fn look_up(&mut self, piece: StepPiece, server: usize) -> Run {
        let (bug, Server { rows, row, previous_row, .. }) = (self.bug, &mut self.servers[server]);
        let copied = rows.applied().0.checked_sub(u64::from(!rows.has_passed(rows.applied())));
        let found = if !rows.has_passed(piece.step) {
            rows.look_up(piece.step, Waiter::LookUp(piece)).map(|_| Some(*row))
        } else if copied == Some(piece.step.0) && bug != Bug::KeepsNoCopyOfRows {
            Some(Some(*previous_row))
        } else {
            Some(None)
        };
        found.map_or(Ok(()), |found| self.looked_up(piece, server, found))
    }

    fn looked_up(&mut self, piece: StepPiece, server: usize, row: Option<f32>) -> Run {
        let Some((found, _)) = self.rows.asked.get_mut(&piece) else { return Ok(()) };
        found.insert(server, row);
        if found.len() < self.servers.len() {
            return Ok(());
        }
        let Some((found, callers)) = self.rows.asked.remove(&piece) else { return Ok(()) };
        let rows: Option<Vec<f32>> = found.into_values().collect();
        if rows.is_none() && self.servers.iter().any(|server| !server.rows.has_passed(piece.step)) {
            return Err(format!("a server has applied {piece}, another one has not, and the row is gone"));
        }
        self.rows.delivered.extend(rows.clone().map(|rows| (piece, rows)));
        for caller in callers {
            self.send(Event::Fetched(caller, piece, rows.clone()));
        }
        Ok(())
    }

    fn push_rows(&mut self, caller: Caller, piece: StepPiece, values: &[f32]) {
        if self.rows.acknowledged.contains(&piece) {
            self.send(Event::Acknowledged(caller, piece, self.servers.len()));
        } else if let Some((_, callers)) = self.rows.sent.get_mut(&piece) {
            callers.push(caller);
        } else {
            self.rows.sent.insert(piece, ((0..values.len()).collect(), vec![caller]));
            for (server, gradient) in values.iter().enumerate() {
                self.send_again(Event::Update(piece, server, *gradient));
            }
        }
    }

    fn updated(&mut self, piece: StepPiece, server: usize) {
        let Some((missing, _)) = self.rows.sent.get_mut(&piece) else { return };
        missing.remove(&server);
        if !missing.is_empty() {
            return;
        }
        self.rows.acknowledged.insert(piece);
        for caller in self.rows.sent.remove(&piece).map(|(_, callers)| callers).unwrap_or_default() {
            self.send(Event::Acknowledged(caller, piece, self.servers.len()));
        }
    }

    // The servers.

    fn read(&mut self, caller: Caller, step: GlobalStep, server: usize) {
        let Server { gate, dense, previous_dense, .. } = &mut self.servers[server];
        let values = match gate.read(step, Reader::Read(caller, step)) {
            Reading::Waits => return,
            Reading::Present(_) => Some(dense.clone()),
            Reading::Previous(_) if self.bug == Bug::KeepsNoCopyOfParameters => None,
            Reading::Previous(_) if self.bug == Bug::ReadsPresentParameters => Some(dense.clone()),
            Reading::Previous(_) => Some(previous_dense.clone()),
            Reading::Passed(_) => None,
        };
        self.send(Event::ParametersRead(caller, step, server, values));
    }

    fn parameters_read(&mut self, rank: u32, step: GlobalStep, server: usize, values: Option<Vec<f32>>) -> Run {
        let servers = self.servers.len();
        let worker = &mut self.workers[rank as usize];
        let read = worker.reads.entry(step).or_default();
        read.insert(server, values);
        if read.len() < servers {
            return Ok(());
        }
        let partitions = worker.reads.remove(&step).unwrap_or_default().into_values();
        let parameters = partitions.collect::<Option<Vec<_>>>().map(|partitions| partitions.concat());
        let are_found = parameters.is_some();
        if let Some(parameters) = parameters {
            worker.parameters = Some((step, parameters));
        } else if self.servers.iter().any(|server| server.gate.open() <= step || server.rows.applied() <= step) {
            return Err(format!("step {step} is passed, and a server has not applied it"));
        }
        let actions = worker.machine.parameters_read(step, are_found).map_err(text)?;
        self.act(rank, actions);
        Ok(())
    }

    fn push_dense(&mut self, caller: Caller, piece: StepPiece, server: usize, values: Vec<f32>) -> Run {
        let Server { gate, dense, previous_dense, dense_update, arrived, .. } = &mut self.servers[server];
        let is_open = piece.step == gate.open();
        let pushed = gate.push(piece, Some(values.clone())).map_err(text)?;
        match pushed {
            PiecePushed::Taken => arrived.0.push(values),
            PiecePushed::Known if is_open => arrived.1.push(values),
            PiecePushed::Known | PiecePushed::Applying => {}
        }
        let update = gate.next_update();
        let is_applying = pushed == PiecePushed::Applying || update.is_some();
        let waits = is_applying && self.bug != Bug::AcknowledgesBeforeApplying;
        if waits {
            let reading = gate.read(piece.step.next(), Reader::Push(caller, piece));
            assert!(matches!(reading, Reading::Waits));
        }
        if let Some((_, sum)) = update {
            previous_dense.clone_from(dense);
            let (first, again) = std::mem::take(arrived);
            *dense_update = match self.bug {
                Bug::CountsAPieceTwice => sum.into_iter().chain(again).reduce(added),
                Bug::AddsPiecesAsTheyCome => first.into_iter().reduce(added),
                _ => sum,
            };
            self.take_long(Event::FinishDense(server));
        }
        if !waits {
            self.send(Event::Acknowledged(caller, piece, server));
        }
        Ok(())
    }

    fn finish_dense(&mut self, server: usize) {
        let Server { gate, dense, dense_update, .. } = &mut self.servers[server];
        apply_dense(dense, &dense_update.take().unwrap());
        for waiting in gate.finish_update() {
            match waiting {
                Reader::Read(caller, step) => self.post(0, Event::Read(caller, step, server)),
                Reader::Push(caller, piece) => self.send(Event::Acknowledged(caller, piece, server)),
            }
        }
    }

    fn update(&mut self, piece: StepPiece, server: usize, gradient: f32) -> Run {
        let Server { rows, row, previous_row, row_update, .. } = &mut self.servers[server];
        let is_known = rows.push(piece.step, piece.piece, gradient).is_err();
        if piece.step > rows.applied() {
            return Err(format!("gradients of {piece} came to a server before its step"));
        }
        let waits = rows.pushed_again(piece.step, Waiter::Update(piece)).is_none();
        if let Some((_, gradients)) = rows.next_update() {
            *previous_row = *row;
            *row_update = Some(gradients);
            self.take_long(Event::FinishRow(server));
        }
        assert!(is_known || !waits || self.servers[server].row_update.is_some());
        if !waits {
            self.send(Event::Updated(piece, server));
        }
        Ok(())
    }

    fn finish_row(&mut self, server: usize) -> Run {
        let Server { rows, row, row_update, .. } = &mut self.servers[server];
        apply_row(row, &row_update.take().unwrap());
        for waiting in rows.finish_update() {
            match waiting {
                Waiter::LookUp(piece) => self.look_up(piece, server)?,
                Waiter::Update(piece) => self.send(Event::Updated(piece, server)),
            }
        }
        Ok(())
    }

    fn acknowledged(&mut self, rank: u32, piece: StepPiece, by: usize) -> Run {
        let worker = &mut self.workers[rank as usize];
        let Some(missing) = worker.missing.get_mut(&piece) else { return Ok(()) };
        missing.remove(&by);
        if !missing.is_empty() {
            return Ok(());
        }
        worker.missing.remove(&piece);
        let actions = worker.machine.acknowledged(piece).map_err(text)?;
        self.act(rank, actions);
        Ok(())
    }
}

#[test]
fn every_run_has_the_bits_of_a_sequential_computation() {
    let mut all = [0; 5];
    for seed in 0..1000 {
        let counts = Cluster::new(seed, Bug::None).run().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let Counts { second, passed, deaths, embedding_worker_deaths, restarts } = counts;
        let counts = [second, passed, deaths, embedding_worker_deaths, restarts];
        all.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
    }
    assert!(all.iter().all(|count| *count > 100), "{all:?}");
}

#[test]
fn planted_bugs_are_found() {
    for bug in [
        Bug::KeepsNoCopyOfParameters,
        Bug::KeepsNoCopyOfRows,
        Bug::ReadsPresentParameters,
        Bug::AcknowledgesBeforeApplying,
        Bug::CountsAPieceTwice,
        Bug::AddsPiecesAsTheyCome,
    ] {
        assert!((0..1000).any(|seed| Cluster::new(seed, bug).run().is_err()), "{bug:?}");
    }
}
