//! A day's training under that load. The simulator that runs the modes' own state machines gives
//! the speed of each mode in every interval. In each interval the policy sees the measurements of a
//! job in its present mode, and chooses the mode of the next interval. A switch costs its seconds
//! of training.

use rectrain_modes::TrainingMode as SimulatedMode;
use rectrain_modes::gba::{BufferSize, BufferSizeError, Decay, LostTokens, TokenMode};
use rectrain_modes::simulate::{
    Cause, ClusterSpec, LinkSpec, Report, ServerSpec, Simulation, SimulationError, Slowness, StepTime, WorkerSpec,
    simulate,
};
use rectrain_policy::{Action, AutoMode, ClusterLoad, Decision, History, Observations, Policy, Worker};
use rectrain_random::SplitMix64;

use super::load::{DAY_SECONDS, Node, nodes};

pub const WORKERS: usize = 24;
/// Seconds between two observations.
pub const INTERVAL: f64 = 15.0;
/// Price of a worker's hour.
pub const PRICE: f64 = 1.0;
const ROWS: u32 = 4096;
const STEP_SECONDS: f64 = 1.0;
const TOLERANCE: u32 = 4;
/// So few that their links limit `gba` while all workers are fast, as in practice.
const SERVERS: usize = 2;
/// Batches of a worker that an observation holds.
const MEASURED: usize = 8;
/// One batch in a thousand takes longer, all day.
const TAIL_SHARE: f64 = 1e-3;
const TAIL_SHAPE: f64 = 1.5;
const TAIL_LIMIT: f64 = 20.0;
const LINK: LinkSpec =
    LinkSpec { latency_seconds: 2e-4, bytes_per_second: 1.25e9, dense_bytes: 8e7, embedding_bytes_per_row: 512.0 };
const SERVER: ServerSpec = ServerSpec { seconds_per_request: 1e-4, bytes_per_second: 1.25e9, slowness: None };

/// Why a day cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum DayError {
    #[error(transparent)]
    Simulation(#[from] SimulationError),
    #[error(transparent)]
    Buffer(#[from] BufferSizeError),
}

/// A day: its load, and the samples per second of both modes in each interval.
pub struct Day {
    nodes: Vec<Node>,
    sync: Vec<f64>,
    gba: Vec<f64>,
    seed: u64,
}

/// The training of a day.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub samples: f64,
    pub switches: usize,
    /// The share of the day in `gba`.
    pub in_gba: f64,
}

impl Outcome {
    /// The cost of a million samples.
    pub fn cost_per_million(&self) -> f64 {
        WORKERS as f64 * DAY_SECONDS / 3600.0 * PRICE / self.samples * 1e6
    }
}

impl Day {
    pub fn new(seed: u64) -> Result<Self, DayError> {
        let nodes = nodes(WORKERS, seed);
        let buffer = BufferSize::new(WORKERS as u32)?;
        let decay = Decay::Threshold { tolerance: u64::from(TOLERANCE) };
        let gba = SimulatedMode::Tokens(TokenMode::Gba { buffer, decay, lost_tokens: LostTokens::Vanish });
        let sync = train(&nodes, SimulatedMode::Sync, seed)?;
        let gba = train(&nodes, gba, seed)?;
        // Excluded gradients do not count as trained; the simulator counts them over the whole run.
        let counted = gba.trained_samples_per_second / gba.global_samples_per_second;
        let gba = gba.interval_samples_per_second.iter().map(|samples| samples * counted).collect();
        Ok(Self { nodes, sync: sync.interval_samples_per_second, gba, seed })
    }

    fn speed(&self, mode: AutoMode, interval: usize) -> f64 {
        match mode {
            AutoMode::Sync => self.sync[interval],
            AutoMode::Gba => self.gba[interval],
        }
    }

    /// One mode all day.
    pub fn fixed(&self, mode: AutoMode) -> Outcome {
        let samples = (0..self.sync.len()).map(|interval| self.speed(mode, interval) * INTERVAL).sum();
        Outcome { samples, switches: 0, in_gba: f64::from(u8::from(mode == AutoMode::Gba)) }
    }

    /// The best result with knowledge of the whole day: dynamic programming over intervals and
    /// modes. A switch costs `switch_seconds` of training and is otherwise free.
    pub fn oracle(&self, switch_seconds: f64) -> Outcome {
        use AutoMode::{Gba, Sync};
        let mut best = [Sync, Gba].map(|mode| (0.0, 0usize, 0usize, mode));
        for interval in 0..self.sync.len() {
            let arrive = |to: AutoMode| {
                let stay = best[to as usize];
                let switch = best[to.other() as usize];
                let speed = self.speed(to, interval);
                let stayed = (stay.0 + speed * INTERVAL, stay.1, stay.2);
                let switched = (switch.0 + speed * (INTERVAL - switch_seconds), switch.1 + 1, switch.2);
                let (samples, switches, in_gba) = if interval > 0 && switched.0 > stayed.0 { switched } else { stayed };
                (samples, switches, in_gba + usize::from(to == Gba), to)
            };
            best = [arrive(Sync), arrive(Gba)];
        }
        let (samples, switches, in_gba, _) = if best[0].0 >= best[1].0 { best[0] } else { best[1] };
        Outcome { samples, switches, in_gba: in_gba as f64 / self.sync.len() as f64 }
    }

    /// The policy decides. `see` receives every observation with the decisions on it.
    pub fn automatic(&self, policy: &Policy, mut see: impl FnMut(&Observations, &[Decision])) -> Outcome {
        let switch_seconds = policy.mode.as_ref().map_or(0.0, |mode| mode.switch_seconds);
        let (mut history, mut mode) = (History::default(), AutoMode::Sync);
        let mut random = SplitMix64::new(self.seed ^ 0x5EED);
        let mut outcome = Outcome { samples: 0.0, switches: 0, in_gba: 0.0 };
        let mut lost = 0.0;
        for interval in 0..self.sync.len() {
            outcome.samples += self.speed(mode, interval) * (INTERVAL - lost);
            outcome.in_gba += f64::from(u8::from(mode == AutoMode::Gba)) / self.sync.len() as f64;
            let observations = self.observe(interval, mode, lost, &mut random);
            lost = 0.0;
            let decisions = history.advance(policy, &observations);
            see(&observations, &decisions);
            for decision in decisions {
                if let Action::SwitchMode { to, .. } = decision.action {
                    (mode, lost) = (to, switch_seconds);
                    outcome.switches += 1;
                }
            }
        }
        outcome
    }

    /// The measurements of a job in `mode` in an interval.
    fn observe(&self, interval: usize, mode: AutoMode, lost: f64, random: &mut SplitMix64) -> Observations {
        let begin = interval as f64 * INTERVAL;
        let batch = |node: &Node, index: usize, random: &mut SplitMix64| {
            let at = begin + INTERVAL * (index as f64 + 0.5) / MEASURED as f64;
            let is_long = random.positive_unit() <= TAIL_SHARE;
            STEP_SECONDS * node.factor(at) * if is_long { random.pareto(TAIL_SHAPE).min(TAIL_LIMIT) } else { 1.0 }
        };
        let workers: Vec<_> = self
            .nodes
            .iter()
            .map(|node| Worker {
                batch_rows: ROWS,
                compute_seconds: (0..MEASURED).map(|index| batch(node, index, random)).collect(),
            })
            .collect();
        let middle = begin + INTERVAL / 2.0;
        let speed = self.speed(mode, interval);
        let exchange = (mode == AutoMode::Gba).then(|| exchange_seconds(&workers, speed)).flatten();
        let pending = self.nodes.iter().filter(|node| node.factor(middle) >= 4.0).count();
        Observations {
            at_seconds: (begin + INTERVAL) as u64,
            mode: Some(mode),
            global_batch_rows: ROWS * WORKERS as u32,
            local_batch_rows: ROWS,
            staleness_tolerance: TOLERANCE,
            workers,
            all_reduce_seconds: (mode == AutoMode::Sync).then(all_reduce_seconds),
            exchange_seconds: exchange,
            wait_seconds: wait_seconds(),
            samples_per_second: (lost == 0.0).then_some(speed),
            cluster: ClusterLoad {
                node_cpu: Some(self.nodes.iter().map(|node| node.cpu(middle)).sum::<f64>() / WORKERS as f64),
                pending_pods: pending as u32,
                ..ClusterLoad::default()
            },
            ..Observations::default()
        }
    }
}

fn train(nodes: &[Node], mode: SimulatedMode, seed: u64) -> Result<Report, SimulationError> {
    let tail = Cause::HeavyTailed { probability: TAIL_SHARE, shape: TAIL_SHAPE, limit: TAIL_LIMIT };
    let worker = |node: &Node| {
        let slow = node.slow.iter().map(|slow| Slowness {
            cause: Cause::Constant { factor: slow.factor },
            from_seconds: slow.from_seconds,
            until_seconds: slow.until_seconds,
        });
        WorkerSpec {
            step: StepTime::Constant { seconds_per_batch: 0.0, seconds_per_row: STEP_SECONDS / f64::from(ROWS) },
            slowness: slow.chain([Slowness::always(tail)]).collect(),
            link_slowness: 1.0,
            crashes: None,
        }
    };
    simulate(&Simulation {
        cluster: ClusterSpec {
            workers: nodes.iter().map(worker).collect(),
            servers: vec![SERVER; SERVERS],
            slots_move: false,
            embedding: None,
            loaders: None,
            link: LINK,
            detection_seconds: 1.0,
        },
        mode,
        local_rows: ROWS,
        pieces: nodes.len() as u32,
        seconds: DAY_SECONDS,
        intervals: (DAY_SECONDS / INTERVAL) as usize,
        seed,
    })
}

/// Seconds of an all-reduce over the simulator's ring.
fn all_reduce_seconds() -> f64 {
    let n = WORKERS as f64;
    2.0 * n.log2().ceil() * LINK.latency_seconds + 2.0 * (n - 1.0) / n * LINK.dense_bytes / LINK.bytes_per_second
}

/// Seconds of its look-ups: gradients of rows to the servers, which answer one request after the
/// other, and rows back.
fn wait_seconds() -> f64 {
    let rows = LINK.embedding_bytes_per_row * f64::from(ROWS);
    let served = WORKERS as f64 * (SERVER.seconds_per_request + rows / SERVERS as f64 / SERVER.bytes_per_second);
    2.0 * (LINK.latency_seconds + rows / LINK.bytes_per_second) + served
}

/// Seconds per batch that the workers must have waited for token and parameters to reach `speed`;
/// by bisection.
fn exchange_seconds(workers: &[Worker], speed: f64) -> Option<f64> {
    let mean = |worker: &Worker| worker.compute_seconds.iter().sum::<f64>() / MEASURED as f64 + wait_seconds();
    let with = |wait: f64| workers.iter().map(|worker| f64::from(ROWS) / (mean(worker) + wait)).sum::<f64>();
    if speed <= 0.0 {
        return None;
    }
    let (mut low, mut high) = (0.0, 60.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if with(middle) > speed { low = middle } else { high = middle }
    }
    Some(low)
}
