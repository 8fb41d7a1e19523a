//! Follows Zheng et al., *ShadowSync: Performing Synchronization in the Background for Highly
//! Scalable Distributed Training*, in the order of the paper:
//!
//! - §3.1: one copy of the rows, and a copy of the other parameters on several servers. Look-ups
//!   are even after bin packing by a profile;
//! - §3.2: rows are updated without locks or order, threads train one replica without locks, and
//!   synchronisation never stalls training;
//! - §3.3: algorithms 1 to 4, against naive computations in 64 bits that repeat the lines of the
//!   paper value by value. Planted bugs in each line must deviate from them;
//! - §4.1: the average sync gap, and the foreground form;
//! - §4.2: the step of BMUF towards the mean;
//! - fragments, which Streaming DiLoCo adds to the algorithms (Douillard et al. 2025), and
//!   differences in bf16;
//! - the switch between modes, which the paper does not have.
//!
//! One part of §3 is not in the mode: servers hold slots, which the coordinator balances while a
//! job trains. A profile places nothing (§3.1), and `rectrain data placement` shows its effect.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::ops::Range;

use rectrain_embedding::{FeatureKey, slot_of};
use rectrain_modes::gba::{Dispatcher, DispatcherSetup, GradientServer, Push, Pushed, TokenMode};
use rectrain_modes::packing::{Packing, pack};
use rectrain_modes::shadow::{
    Average, Block, BlockUpdate, Cell, Fragments, Joined, Part, ReplicaSync, Rounds, Shadow, SharedReplica, average,
    interpolate, receive_difference, send_difference,
};
use rectrain_modes::switch::{Boundary, Order, RunMode, RunPlan, TrainingRun};
use rectrain_modes::{
    Answers, Assignment, Batch, CoordinatorHalf, DataList, DenseHome, GlobalStep, Outcome, Rank, Reply, RowLedger,
    Server, Token, TrainingMode, share_of_batch,
};
use rectrain_random::{SplitMix64, mix};

/// α of these tests. With 0.5, a swap of α and 1 − α would change nothing.
const ALPHA: f64 = 0.3;

fn shadow() -> TrainingMode {
    TrainingMode::Shadow(Shadow::default())
}

fn row_rules() -> TokenMode {
    shadow().tokens().unwrap()
}

fn work(answers: &Answers) -> Assignment {
    match answers.as_slice() {
        [(_, Reply::Work(assignment))] => *assignment,
        other => panic!("expected one batch, not {other:?}"),
    }
}

// ---- §3.1 Framework overview ------------------------------------------------------------------

/// The sync PS of the paper: several servers, each with a partition of the parameters.
#[test]
fn s3_1_a_partitioned_copy_is_the_whole_copy() {
    assert_eq!(shadow().dense_home(), DenseHome::Servers);
    let replica: Vec<f32> = (0..101).map(|value| value as f32 / 7.0).collect();
    let mut whole: Vec<f32> = (0..101).map(|value| 3.0 - value as f32 / 11.0).collect();
    let mut parts = whole.clone();
    interpolate(&mut whole, &replica, ALPHA as f32);
    for server in 0..3 {
        let own = share_of_batch(replica.len(), Rank(server), 3);
        interpolate(&mut parts[own.clone()], &replica[own], ALPHA as f32);
    }
    assert_eq!(parts, whole);
}

const SLOTS: u32 = 1024;

/// An id of a field, by Zipf's law with the exponent 1.2. A field has 10 to 100,000 ids.
fn id(field: usize, random: &mut SplitMix64) -> u64 {
    let ids = 10_f64.powi(1 + field as i32 % 5);
    loop {
        let rank = random.pareto(0.2);
        if rank < ids + 1.0 {
            return rank as u64;
        }
    }
}

/// The look-ups of five batches of 1,024 rows with 26 fields, by field and by slot. A batch looks
/// up each of its ids once.
fn look_ups(random: &mut SplitMix64) -> [Vec<u64>; 2] {
    let (mut fields, mut slots) = (vec![0; 26], vec![0; SLOTS as usize]);
    for _batch in 0..5 {
        for (field, cost) in fields.iter_mut().enumerate() {
            let ids: BTreeSet<u64> = (0..1024).map(|_row| id(field, random)).collect();
            *cost += ids.len() as u64;
            for id in ids {
                slots[slot_of(FeatureKey(mix(mix(field as u64) ^ id)), SLOTS).0 as usize] += 1;
            }
        }
    }
    [fields, slots]
}

/// "We profile the cost of embedding lookup and then solve a bin packing problem." The rows of the
/// profile are others than the rows that measure the placement.
#[test]
fn s3_1_look_ups_are_even_after_bin_packing_by_a_profile() {
    let mut random = SplitMix64::new(31);
    let [[profiled_fields, profiled_slots], [fields, slots]] = [look_ups(&mut random), look_ups(&mut random)];
    for servers in [2, 3, 5, 8] {
        let placed = |profile: &[u64], costs: &[u64]| {
            Packing::new(costs, pack(profile, servers).bins().to_vec(), servers).imbalance()
        };
        let modulo = Packing::modulo(&fields, servers).imbalance();
        let [by_field, by_slot] = [placed(&profiled_fields, &fields), placed(&profiled_slots, &slots)];
        assert!(by_field < modulo, "{servers} servers: {by_field}, by f mod N {modulo}");
        assert!(by_slot < modulo && by_slot <= 1.1, "{servers} servers: {by_slot}, by f mod N {modulo}");
    }
}

// ---- §3.2 Optimization strategies -------------------------------------------------------------

/// Hogwild: a server applies each gradient of its rows as it arrives, however old it is.
#[test]
fn s3_2_every_gradient_of_rows_is_applied_alone() {
    let mut server = GradientServer::new(row_rules(), 3, GlobalStep(0), 0);
    for number in 0..30_u64 {
        let batch = Batch { first_row: number, rows: 1 };
        let rank = Rank(number as u32 % 3);
        let push = Push { rank, batch, token: Token(0), pulled_at: GlobalStep(0), gradient: number };
        let Pushed::Full(update) = server.push(push).unwrap() else { panic!("gradient {number} waits") };
        let [pair] = &update.pairs[..] else { panic!("{update:?}") };
        assert_eq!((update.step, pair.push.gradient, pair.weight), (GlobalStep(number), number, 1.0));
    }
}

/// The shadow thread loops without regard to training. Training goes on in the meantime.
#[test]
fn s3_2_training_is_never_stalled_by_an_exchange() {
    let mut sync = ReplicaSync::new(None, Fragments::default());
    sync.trained();
    sync.begin();
    for batches in 1..=1000 {
        sync.trained();
        assert!(sync.is_under_way() && !sync.is_due() && !sync.is_foreground());
        assert_eq!(sync.unseen(), 1 + batches);
    }
    assert_eq!(sync.end(), Some(1));
    assert!(sync.is_due(), "the next exchange follows at once");
}

/// Parameters of the least-squares problem below: several blocks of an update.
const HOGWILD_PARAMETERS: usize = 700;

/// The parameters that the threads below look for.
fn sought(parameter: usize) -> f32 {
    (parameter as f32).sin()
}

/// Trains `batches` batches of Σ (w − sought)² / 2. Each batch has a tenth of the parameters.
fn train_one_thread<C: Cell>(replica: &SharedReplica<C>, seed: u64, batches: usize) {
    let mut random = SplitMix64::new(seed);
    let (mut own, mut gradients) = (vec![0.0; HOGWILD_PARAMETERS], vec![0.0; HOGWILD_PARAMETERS]);
    for _ in 0..batches {
        replica.read(&mut own);
        for (parameter, (own, gradient)) in own.iter().zip(&mut gradients).enumerate() {
            *gradient = if random.unit() < 0.1 { own - sought(parameter) } else { 0.0 };
        }
        let descend = |Block { parameters, gradients, .. }: Block<'_>| {
            parameters.iter_mut().zip(gradients).for_each(|(value, gradient)| *value -= 0.3 * gradient);
            Ok::<(), ()>(())
        };
        replica.update(&gradients, descend).unwrap();
    }
}

/// Hogwild: threads train one replica, and an exchange moves it, at the same time and without
/// locks. `cargo xtask race` runs this under ThreadSanitizer.
#[test]
fn s3_2_threads_train_one_replica_without_locks() {
    const THREADS: u64 = 4;
    const BATCHES: usize = 300;
    let start = vec![5.0; HOGWILD_PARAMETERS];
    let replica: SharedReplica = SharedReplica::new(&start, &[], 0);
    let mut copy = start;
    std::thread::scope(|scope| {
        for seed in 0..THREADS {
            let replica = &replica;
            scope.spawn(move || train_one_thread(replica, seed, BATCHES));
        }
        let mut snapshot = vec![0.0; HOGWILD_PARAMETERS];
        while replica.updates() < THREADS * BATCHES as u64 {
            replica.read(&mut snapshot);
            interpolate(&mut copy, &snapshot, ALPHA as f32);
            replica.interpolate(0..HOGWILD_PARAMETERS, &copy, ALPHA as f32);
        }
    });
    // Updates may be lost at any time. What the threads left is a replica that trains on.
    let mut trained = vec![0.0; HOGWILD_PARAMETERS];
    replica.read(&mut trained);
    assert_eq!(replica.updates(), THREADS * BATCHES as u64);
    assert!(trained.iter().chain(&copy).all(|value| value.abs() < 10.0), "{trained:?}, {copy:?}");
    train_one_thread(&replica, THREADS, BATCHES);
    replica.read(&mut trained);
    for (parameter, trained) in trained.iter().enumerate() {
        assert!((trained - sought(parameter)).abs() < 0.3, "{parameter}: {trained}");
    }
}

/// A value without atomics: a planted data race.
#[allow(unsafe_code, reason = "safe Rust has no data races")]
mod racy {
    use std::cell::UnsafeCell;

    use rectrain_modes::shadow::Cell;

    pub(super) struct Racy(UnsafeCell<u32>);

    // SAFETY: not sound. ThreadSanitizer has to find it.
    unsafe impl Sync for Racy {}

    impl Cell for Racy {
        fn new(bits: u32) -> Self {
            Self(UnsafeCell::new(bits))
        }

        fn load(&self) -> u32 {
            // SAFETY: not sound, see above.
            unsafe { *self.0.get() }
        }

        fn store(&self, bits: u32) {
            // SAFETY: not sound, see above.
            unsafe { *self.0.get() = bits }
        }
    }
}

#[test]
#[ignore = "`cargo xtask race` runs it, and ThreadSanitizer must report a data race"]
fn s3_2_a_planted_data_race() {
    let replica: SharedReplica<racy::Racy> = SharedReplica::new(&vec![5.0; HOGWILD_PARAMETERS], &[], 0);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let replica = &replica;
            scope.spawn(move || train_one_thread(replica, seed, 20));
        }
    });
}

// ---- §3.3 ShadowSync algorithms ---------------------------------------------------------------

/// Trainer 0 never ends its batch. Trainer 1 trains all others.
#[test]
fn algorithm_1_no_worker_waits_for_another() {
    let setup =
        DispatcherSetup { mode: row_rules(), workers: 2, servers: 1, first_step: GlobalStep(0), in_flight_limit: 1 };
    let mut dispatcher = Dispatcher::new(setup, DataList::new(1, 0), RowLedger::default()).unwrap();
    dispatcher.extend_data(101);
    dispatcher.close_data();
    (0..2).for_each(|rank| assert_eq!(dispatcher.join(Rank(rank)), []));
    let held = work(&dispatcher.pull(Rank(0)).unwrap());
    for _ in 0..100 {
        let Assignment { batch, .. } = work(&dispatcher.pull(Rank(1)).unwrap());
        assert_ne!(batch, held.batch);
        dispatcher.report(Rank(1), batch, Outcome::Trained).unwrap();
    }
    assert_eq!(dispatcher.in_flight(), 1);
    assert!(!dispatcher.finished());
}

/// Parameters of the toy model.
const DIM: usize = 3;
type Parameters = [f32; DIM];
type Exact = [f64; DIM];

/// w0, the same on all trainers and servers (algorithm 1).
const W0: Exact = [0.25, -1.5, 4.0];

/// An event of algorithm 1, in the order of time.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A worker thread updates the local parameters.
    Train(usize, Exact),
    /// The shadow thread takes a snapshot and sends it.
    Send(usize),
    /// The snapshot reaches the sync PS.
    Serve(usize),
    /// The reply reaches the trainer.
    Answer(usize),
}

/// The place of a trainer's exchange.
#[derive(Clone, Copy, PartialEq)]
enum OnWay {
    Nowhere,
    ToServer,
    ToTrainer,
}

/// A random order of events. [`ReplicaSync`] decides when an exchange begins. Trainers have
/// different speeds, and messages take any time.
fn random_events(seed: u64, trainers: usize) -> Vec<Event> {
    let mut random = SplitMix64::new(seed);
    let mut syncs = vec![ReplicaSync::new(None, Fragments::default()); trainers];
    let mut on_way = vec![OnWay::Nowhere; trainers];
    let mut events = Vec::new();
    while events.len() < 400 {
        let trainer = random.below(trainers as u64) as usize;
        let advances = random.below(1 + trainer as u64) == 0;
        match (on_way[trainer], random.below(2)) {
            (OnWay::ToServer, 0) => {
                events.push(Event::Serve(trainer));
                on_way[trainer] = OnWay::ToTrainer;
            }
            (OnWay::ToTrainer, 0) => {
                events.push(Event::Answer(trainer));
                on_way[trainer] = OnWay::Nowhere;
                syncs[trainer].end().unwrap();
            }
            _ if advances => {
                events.push(Event::Train(trainer, std::array::from_fn(|_| random.unit() - 0.5)));
                syncs[trainer].trained();
            }
            _ => {}
        }
        if syncs[trainer].is_due() {
            syncs[trainer].begin();
            events.push(Event::Send(trainer));
            on_way[trainer] = OnWay::ToServer;
        }
    }
    events
}

/// The copy w_PS, then the replicas, by the lines of algorithm 2. With as many fragments as
/// parameters, the exchanges of a trainer move one parameter after another.
fn naive(events: &[Event], trainers: usize, fragments: u32) -> Vec<Exact> {
    let (mut w_ps, mut w, mut message) = (W0, vec![W0; trainers], vec![W0; trainers]);
    let mut exchanges = vec![0; trainers];
    for event in events {
        match *event {
            Event::Train(i, update) => (0..DIM).for_each(|d| w[i][d] += update[d]),
            Event::Send(i) => {
                message[i] = w[i];
                exchanges[i] += 1;
            }
            Event::Serve(i) => {
                for d in (0..DIM).filter(|d| fragments == 1 || (exchanges[i] - 1) % DIM == *d) {
                    w_ps[d] = (1.0 - ALPHA) * w_ps[d] + ALPHA * message[i][d];
                }
                message[i] = w_ps;
            }
            Event::Answer(i) => {
                for d in (0..DIM).filter(|d| fragments == 1 || (exchanges[i] - 1) % DIM == *d) {
                    w[i][d] = (1.0 - ALPHA) * w[i][d] + ALPHA * message[i][d];
                }
            }
        }
    }
    std::iter::once(w_ps).chain(w).collect()
}

/// A line of algorithm 2: changes the first parameters by the second ones and α.
type Line = fn(&mut [f32], &[f32], f32);

/// The exchange as the roles carry it out, or with a planted bug.
#[derive(Clone, Copy)]
struct Exchange {
    server: Line,
    trainer: Line,
    /// The server replies before it moves its copy (the original EASGD).
    replies_first: bool,
    /// The trainer goes back to its snapshot before it applies the reply.
    forgets_updates: bool,
    next: Turn,
}

/// The fragment after another one.
type Turn = fn(Fragments, u32) -> u32;

const CORRECT: Exchange = Exchange {
    server: interpolate,
    trainer: interpolate,
    replies_first: false,
    forgets_updates: false,
    next: Fragments::after,
};

fn swapped(own: &mut [f32], other: &[f32], alpha: f32) {
    interpolate(own, other, 1.0 - alpha);
}

fn copied(own: &mut [f32], other: &[f32], _alpha: f32) {
    own.copy_from_slice(other);
}

fn run(exchange: Exchange, events: &[Event], trainers: usize, fragments: Fragments) -> Vec<Parameters> {
    let w0 = W0.map(|value| value as f32);
    let (mut copy, mut replicas) = (w0, vec![w0; trainers]);
    let mut turns = vec![0; trainers];
    let (mut snapshots, mut replies) = (vec![w0; trainers], vec![w0; trainers]);
    for event in events {
        match *event {
            Event::Train(i, update) => {
                replicas[i].iter_mut().zip(update).for_each(|(value, update)| *value += update as f32);
            }
            Event::Send(i) => snapshots[i] = replicas[i],
            Event::Serve(i) => {
                let (before, own) = (copy, fragments.range(turns[i], DIM));
                (exchange.server)(&mut copy[own.clone()], &snapshots[i][own], ALPHA as f32);
                replies[i] = if exchange.replies_first { before } else { copy };
            }
            Event::Answer(i) => {
                if exchange.forgets_updates {
                    replicas[i] = snapshots[i];
                }
                let own = fragments.range(turns[i], DIM);
                (exchange.trainer)(&mut replicas[i][own.clone()], &replies[i][own], ALPHA as f32);
                turns[i] = (exchange.next)(fragments, turns[i]);
            }
        }
    }
    std::iter::once(copy).chain(replicas).collect()
}

/// The largest deviation from the naive computation, over all parameters and replicas. There are 1
/// or 3 fragments.
fn deviation(exchange: Exchange, seed: u64, fragments: u32) -> f64 {
    let trainers = 1 + (seed % 4) as usize;
    let events = random_events(seed, trainers);
    let found = run(exchange, &events, trainers, Fragments::new(fragments));
    let expected = naive(&events, trainers, fragments);
    let pairs = found.as_flattened().iter().zip(expected.as_flattened());
    pairs.map(|(found, expected)| (f64::from(*found) - expected).abs()).fold(0.0, f64::max)
}

#[test]
fn algorithm_2_equals_a_naive_computation_of_the_paper() {
    for (seed, fragments) in (0..300).flat_map(|seed| [(seed, 1), (seed, 3)]) {
        let deviation = deviation(CORRECT, seed, fragments);
        assert!(deviation < 1e-4, "seed {seed}, {fragments} fragments: {deviation}");
    }
}

/// Each bug is a plausible mistake in a line of algorithm 2, or in the order of the two lines.
#[test]
fn algorithm_2_finds_every_planted_bug() {
    let bugs = [
        ("α and 1 − α are swapped on the server", Exchange { server: swapped, ..CORRECT }),
        ("α and 1 − α are swapped on the trainer", Exchange { trainer: swapped, ..CORRECT }),
        ("the server takes the replica instead of interpolating", Exchange { server: copied, ..CORRECT }),
        ("the trainer takes the copy instead of interpolating", Exchange { trainer: copied, ..CORRECT }),
        ("the reply has the copy from before its line", Exchange { replies_first: true, ..CORRECT }),
        ("updates during the exchange are lost", Exchange { forgets_updates: true, ..CORRECT }),
    ];
    for (bug, exchange, fragments) in bugs.into_iter().flat_map(|(bug, exchange)| [1, 3].map(|f| (bug, exchange, f))) {
        let found = (0..50).filter(|seed| deviation(exchange, *seed, fragments) > 1e-2).count();
        assert!(found >= 45, "{bug}, {fragments} fragments: found in {found} of 50 orders of events");
    }
    let turns: [(&str, Turn); 3] = [
        ("a fragment is skipped", |fragments, turn| if turn == 0 { 2 } else { fragments.after(turn) }),
        ("the turn stays", |_, turn| turn),
        ("the turn is reversed", |fragments, turn| fragments.after(fragments.after(turn))),
    ];
    for (bug, next) in turns {
        let found = (0..50).filter(|seed| deviation(Exchange { next, ..CORRECT }, *seed, 3) > 1e-2).count();
        assert!(found >= 45, "{bug}: found in {found} of 50 orders of events");
    }
}

// ---- §3.3, algorithms 3 and 4 -----------------------------------------------------------------

/// The settings of algorithm 4 in these tests: as printed, and with both momenta that it names.
const BLOCKS: [BlockUpdate; 3] = [
    BlockUpdate { eta: 0.6, momentum: 0.0, nesterov: false },
    BlockUpdate { eta: 0.6, momentum: 0.4, nesterov: false },
    BlockUpdate { eta: 0.6, momentum: 0.4, nesterov: true },
];

/// A random order of events in which all trainers take part in each AllReduce. It ends when the
/// last of them has sent its replica. Trainers have different speeds.
fn events_of_rounds(seed: u64, trainers: usize) -> Vec<Event> {
    let mut random = SplitMix64::new(seed);
    let mut syncs = vec![ReplicaSync::new(None, Fragments::default()); trainers];
    let mut on_way = vec![OnWay::Nowhere; trainers];
    let mut events = Vec::new();
    while events.len() < 400 {
        let trainer = random.below(trainers as u64) as usize;
        if on_way[trainer] == OnWay::ToTrainer && random.below(2) == 0 {
            events.push(Event::Answer(trainer));
            on_way[trainer] = OnWay::Nowhere;
            syncs[trainer].end().unwrap();
        } else if random.below(1 + trainer as u64) == 0 {
            events.push(Event::Train(trainer, std::array::from_fn(|_| random.unit() - 0.5)));
            syncs[trainer].trained();
        }
        if syncs[trainer].is_due() {
            syncs[trainer].begin();
            events.push(Event::Send(trainer));
            on_way[trainer] = OnWay::ToServer;
        }
        if on_way.iter().all(|place| *place == OnWay::ToServer) {
            on_way.fill(OnWay::ToTrainer);
        }
    }
    events
}

/// The lines of algorithm 4 between the AllReduce and the trainer. The momentum is the common one:
/// a step repeats a share of the step before. Nesterov's adds the share of the new one.
fn naive_block(w_global: &mut Exact, v: &mut Exact, w_copy: Exact, block: BlockUpdate) {
    let (eta, momentum) = (f64::from(block.eta), f64::from(block.momentum));
    (0..DIM).for_each(|d| {
        let w_desc = w_copy[d] - w_global[d];
        v[d] = momentum * v[d] + w_desc;
        w_global[d] += eta * if block.nesterov { w_desc + momentum * v[d] } else { v[d] };
    });
}

/// w_global, then the replicas, by the lines of algorithm 3, or with a block update of algorithm 4.
fn naive_of_rounds(events: &[Event], trainers: usize, block: Option<BlockUpdate>) -> Vec<Exact> {
    let (mut w_global, mut v, mut w) = (W0, [0.0; DIM], vec![W0; trainers]);
    let mut sent: Vec<Option<Exact>> = vec![None; trainers];
    for event in events {
        match *event {
            Event::Train(i, update) => (0..DIM).for_each(|d| w[i][d] += update[d]),
            Event::Send(i) => {
                sent[i] = Some(w[i]);
                if sent.iter().any(Option::is_none) {
                    continue;
                }
                let all: Vec<Exact> = sent.iter_mut().map(|replica| replica.take().unwrap()).collect();
                let w_copy: Exact =
                    std::array::from_fn(|d| all.iter().map(|replica| replica[d]).sum::<f64>() / trainers as f64);
                match block {
                    None => w_global = w_copy,
                    Some(block) => naive_block(&mut w_global, &mut v, w_copy, block),
                }
            }
            Event::Answer(i) => (0..DIM).for_each(|d| w[i][d] = (1.0 - ALPHA) * w[i][d] + ALPHA * w_global[d]),
            Event::Serve(_) => panic!("a round has no event of its own"),
        }
    }
    std::iter::once(w_global).chain(w).collect()
}

/// The lines of w_global: changes the first parameters, with the momentum's state, by the replicas.
type Global = fn(&mut Parameters, &mut Parameters, &[Parameters], Average);

/// A round as the roles carry it out, or with a planted bug.
#[derive(Clone, Copy)]
struct Round {
    global: Global,
    trainer: Line,
    /// The trainer goes back to the replica that it sent.
    forgets_updates: bool,
}

const CORRECT_ROUND: Round = Round { global: move_global, trainer: interpolate, forgets_updates: false };

fn move_global(global: &mut Parameters, velocity: &mut Parameters, replicas: &[Parameters], average: Average) {
    average.apply(global, velocity, replicas.iter().map(|replica| &replica[..]));
}

fn run_rounds(round: Round, events: &[Event], trainers: usize, average: Average) -> Vec<Parameters> {
    let w0 = W0.map(|value| value as f32);
    let (mut global, mut velocity, mut replicas) = (w0, [0.0; DIM], vec![w0; trainers]);
    let (mut rounds, mut sent) = (Rounds::default(), vec![w0; trainers]);
    for event in events {
        match *event {
            Event::Train(i, update) => {
                replicas[i].iter_mut().zip(update).for_each(|(value, update)| *value += update as f32);
            }
            Event::Send(i) => {
                sent[i] = replicas[i];
                if rounds.join(1, trainers as u32, i as u32, Part::Fragment(0)) == Joined::Complete {
                    (round.global)(&mut global, &mut velocity, &sent, average);
                    rounds.close();
                }
            }
            Event::Answer(i) => {
                if round.forgets_updates {
                    replicas[i] = sent[i];
                }
                (round.trainer)(&mut replicas[i], &global, ALPHA as f32);
            }
            Event::Serve(_) => panic!("a round has no event of its own"),
        }
    }
    std::iter::once(global).chain(replicas).collect()
}

/// As [`deviation`], for rounds.
fn deviation_of_rounds(round: Round, seed: u64, block: Option<BlockUpdate>) -> f64 {
    let trainers = 2 + (seed % 3) as usize;
    let events = events_of_rounds(seed, trainers);
    let found = run_rounds(round, &events, trainers, block.map_or(Average::Mean, Average::Block));
    let expected = naive_of_rounds(&events, trainers, block);
    let pairs = found.as_flattened().iter().zip(expected.as_flattened());
    pairs.map(|(found, expected)| (f64::from(*found) - expected).abs()).fold(0.0, f64::max)
}

/// Fails unless at least 45 of 50 orders of events show the bug.
fn assert_found(bug: &str, round: Round, block: Option<BlockUpdate>) {
    let found = (0..50).filter(|seed| deviation_of_rounds(round, *seed, block) > 1e-2).count();
    assert!(found >= 45, "{bug}: found in {found} of 50 orders of events");
}

/// Bugs of the last line, which algorithms 3 and 4 share.
const BUGS_OF_TRAINERS: [(&str, Round); 3] = [
    ("α and 1 − α are swapped", Round { trainer: swapped, ..CORRECT_ROUND }),
    ("the trainer takes w_global instead of interpolating", Round { trainer: copied, ..CORRECT_ROUND }),
    ("updates during the AllReduce are lost", Round { forgets_updates: true, ..CORRECT_ROUND }),
];

#[test]
fn algorithm_3_equals_a_naive_computation_of_the_paper() {
    for seed in 0..300 {
        let deviation = deviation_of_rounds(CORRECT_ROUND, seed, None);
        assert!(deviation < 1e-4, "seed {seed}: {deviation}");
    }
}

#[test]
fn algorithm_3_finds_every_planted_bug() {
    let sum: Global = |global, _, replicas, _| {
        *global = std::array::from_fn(|d| replicas.iter().map(|replica| replica[d]).sum());
    };
    let without_the_last: Global = |global, velocity, replicas, average| {
        move_global(global, velocity, &replicas[..replicas.len() - 1], average);
    };
    let with_itself: Global = |global, _, replicas, _| {
        let before = *global;
        average(global, std::iter::once(&before[..]).chain(replicas.iter().map(|replica| &replica[..])));
    };
    let elastic: Global = |global, _, replicas, _| {
        replicas.iter().for_each(|replica| interpolate(global, replica, ALPHA as f32));
    };
    let bugs = [
        ("the sum is not divided by n", sum),
        ("the replica of one trainer is missed", without_the_last),
        ("w_global is in its own mean", with_itself),
        ("w_global moves elastically", elastic),
    ];
    for (bug, round) in
        bugs.map(|(bug, global)| (bug, Round { global, ..CORRECT_ROUND })).into_iter().chain(BUGS_OF_TRAINERS)
    {
        assert_found(bug, round, None);
    }
}

#[test]
fn algorithm_4_equals_a_naive_computation_of_the_paper() {
    for block in BLOCKS {
        for seed in 0..300 {
            let deviation = deviation_of_rounds(CORRECT_ROUND, seed, Some(block));
            assert!(deviation < 1e-4, "{block:?}, seed {seed}: {deviation}");
        }
    }
}

/// The block update of a rule, changed by `change`.
fn changed(average: Average, change: fn(&mut BlockUpdate)) -> Average {
    let Average::Block(mut block) = average else { panic!("algorithm 4 has a block update") };
    change(&mut block);
    Average::Block(block)
}

#[test]
fn algorithm_4_finds_every_planted_bug() {
    let mean: Global = |global, velocity, replicas, _| move_global(global, velocity, replicas, Average::Mean);
    let swapped_eta: Global = |global, velocity, replicas, average| {
        move_global(global, velocity, replicas, changed(average, |block| block.eta = 1.0 - block.eta));
    };
    let from_a_replica: Global = |global, velocity, replicas, average| {
        *global = replicas[0];
        move_global(global, velocity, replicas, average);
    };
    let bugs = [
        ("w_global takes the mean instead of a step", mean),
        ("η and 1 − η are swapped", swapped_eta),
        ("the descent direction begins at a replica", from_a_replica),
    ];
    for block in BLOCKS {
        for (bug, global) in bugs {
            assert_found(bug, Round { global, ..CORRECT_ROUND }, Some(block));
        }
        for (bug, round) in BUGS_OF_TRAINERS {
            assert_found(bug, round, Some(block));
        }
    }
    let forgetful: Global = |global, velocity, replicas, average| {
        *velocity = [0.0; DIM];
        move_global(global, velocity, replicas, average);
    };
    let other_momentum: Global = |global, velocity, replicas, average| {
        move_global(global, velocity, replicas, changed(average, |block| block.nesterov = !block.nesterov));
    };
    for block in &BLOCKS[1..] {
        for (bug, global) in [("the momentum is forgotten", forgetful), ("the other momentum", other_momentum)] {
            assert_found(bug, Round { global, ..CORRECT_ROUND }, Some(*block));
        }
    }
}

/// The regularizer R of model averaging is the indicator of equal replicas (equation 1). Without
/// training, rounds lead all replicas to the mean that they began with. Elastic averaging and block
/// updates lead to some other point.
#[test]
fn s3_3_rounds_alone_lead_to_the_mean() {
    let (mut global, mut replicas) = ([5.0_f32; DIM], [[-1.0_f32; DIM], [2.0; DIM], [11.0; DIM]]);
    for _ in 0..100 {
        move_global(&mut global, &mut [0.0; DIM], &replicas, Average::Mean);
        replicas.iter_mut().for_each(|replica| interpolate(replica, &global, ALPHA as f32));
    }
    for value in replicas.as_flattened().iter().chain(&global) {
        assert!((value - 4.0).abs() < 1e-4, "{replicas:?} and {global:?}");
    }
}

/// The paper's AllReduce waits for all trainers. Here trainer 2 dies, and delays only one round.
#[test]
fn s3_3_a_dead_trainer_delays_one_round() {
    let (mut rounds, mut overdue, mut complete) = (Rounds::default(), 0, 0);
    for number in 0..100 {
        let trainers = if number < 10 { 3 } else { 2 };
        let joined: Vec<Joined> = (0..trainers).map(|rank| rounds.join(1, 3, rank, Part::Fragment(0))).collect();
        match joined.last() {
            Some(Joined::Complete) => complete += 1,
            Some(Joined::Open(round)) if rounds.is_overdue(*round) => overdue += 1,
            other => panic!("round {number}: {other:?}"),
        }
        rounds.close();
    }
    assert_eq!((overdue, complete), (1, 99));
}

/// "w(i) and w_PS are not equal after this update."
#[test]
fn s3_3_the_interpolation_is_asymmetric() {
    let (mut copy, mut replica) = ([0.0_f32], [1.0_f32]);
    interpolate(&mut copy, &replica, 0.25);
    interpolate(&mut replica, &copy, 0.25);
    assert_eq!((copy, replica), ([0.25], [0.8125]));
}

/// "If we directly copy the averaged weight back, we will lose the updates to the local parameter
/// replicas."
#[test]
fn s3_3_updates_during_an_exchange_keep_their_share() {
    let after = |updates_meanwhile: f32, line: Line| {
        let mut replica = [2.0 + updates_meanwhile];
        line(&mut replica, &[3.0], 0.25);
        replica[0]
    };
    assert_eq!(after(8.0, interpolate) - after(0.0, interpolate), 0.75 * 8.0);
    assert_eq!(after(8.0, copied) - after(0.0, copied), 0.0, "a copy loses all of them");
}

/// The regularizer R of EASGD promotes consistency (equation 1). Without training, exchanges lead
/// all replicas and the copy to one point, within the values that they began with.
#[test]
fn s3_3_exchanges_alone_lead_to_a_consensus() {
    let (mut copy, mut replicas) = ([5.0_f32], [[-1.0_f32], [2.0], [11.0]]);
    for _ in 0..200 {
        for replica in &mut replicas {
            interpolate(&mut copy, replica, ALPHA as f32);
            interpolate(replica, &copy, ALPHA as f32);
        }
    }
    assert!((-1.0..=11.0).contains(&copy[0]));
    for replica in replicas {
        assert!((replica[0] - copy[0]).abs() < 1e-5, "{replica:?} and {copy:?}");
    }
}

/// Equation 1 with f(w) = ½ (w − t)² on noisy data: the copy and all replicas reach t, although
/// trainers have different speeds and exchanges take some batches.
#[test]
fn s3_3_replicas_and_copy_reach_the_optimum() {
    const TARGET: f32 = 3.0;
    let mut noise = SplitMix64::new(5);
    let mut copy = [0.0_f32];
    let mut trainers = [1_u64, 2, 5]
        .map(|period| (period, [0.0_f32], ReplicaSync::new(None, Fragments::default()), None::<([f32; 1], u64)>));
    for tick in 0..4000_u64 {
        for (period, replica, sync, under_way) in &mut trainers {
            if !tick.is_multiple_of(*period) {
                continue;
            }
            replica[0] -= 0.05 * (replica[0] - TARGET + 0.1 * noise.normal() as f32);
            sync.trained();
            if let Some((reply, arrives)) = *under_way
                && arrives <= tick
            {
                interpolate(replica, &reply, ALPHA as f32);
                sync.end().unwrap();
                *under_way = None;
            }
            if sync.is_due() {
                sync.begin();
                interpolate(&mut copy, replica, ALPHA as f32);
                *under_way = Some((copy, tick + 7));
            }
        }
    }
    let all = trainers.map(|(_, replica, ..)| replica[0]).into_iter().chain(copy);
    for value in all {
        assert!((value - TARGET).abs() < 0.1, "{value}");
    }
}

// ---- §4.1 Shadow vs foreground ----------------------------------------------------------------

/// The gaps of a trainer whose batches take a second each, and whose exchanges take
/// `exchange_seconds`.
fn gaps(every_steps: Option<u32>, fragments: u32, exchange_seconds: u64, batches: u64) -> Vec<u64> {
    let mut sync = ReplicaSync::new(every_steps.and_then(NonZeroU32::new), Fragments::new(fragments));
    let (mut gaps, mut ends_at) = (Vec::new(), None);
    for second in 0..batches {
        sync.trained();
        if ends_at.is_some_and(|at| at <= second) {
            gaps.extend(sync.end());
            ends_at = None;
        }
        if sync.is_due() {
            sync.begin();
            if sync.is_foreground() {
                gaps.extend(sync.end());
            } else {
                ends_at = Some(second + exchange_seconds);
            }
        }
    }
    gaps
}

/// avg sync gap = (EPS / batch size) / (network usage of the sync PS a second / size of w).
#[test]
fn s4_1_1_the_mean_of_the_gaps_is_the_papers_average_sync_gap() {
    const BATCHES: u64 = 10_000;
    const BATCH_SIZE: f64 = 200.0;
    const PARAMETER_BYTES: f64 = 50e6;
    for (exchange_seconds, fragments) in [(1, 1), (2, 1), (5, 1), (13, 1), (1, 3), (5, 4)] {
        let gaps = gaps(None, fragments, exchange_seconds, BATCHES);
        let seconds = BATCHES as f64;
        let examples_a_second = BATCHES as f64 * BATCH_SIZE / seconds;
        // An exchange moves one fragment.
        let bytes_a_second = gaps.len() as f64 * PARAMETER_BYTES / f64::from(fragments) / seconds;
        let of_the_paper = (examples_a_second / BATCH_SIZE) / (bytes_a_second / PARAMETER_BYTES);
        let mean = gaps.iter().sum::<u64>() as f64 / gaps.len() as f64;
        assert!((mean / of_the_paper - 1.0).abs() < 0.01, "{mean} and {of_the_paper}");
        let turn = (exchange_seconds * u64::from(fragments)) as f64;
        assert!((mean / turn - 1.0).abs() < 0.01, "a turn of {turn} batches: {mean}");
    }
}

/// FR-EASGD-k: the gap is k, whatever an exchange takes.
#[test]
fn s4_1_1_in_the_foreground_the_gap_is_every_steps() {
    for k in [5, 10, 30, 100] {
        let found = gaps(Some(k), 1, 13, 1000);
        assert_eq!(found, vec![u64::from(k); 1000 / k as usize]);
        // The first exchanges of fragments 1 and 2 have the batches since the beginning.
        let found = gaps(Some(k), 3, 13, 1000);
        assert_eq!(found[..3], [1, 2, 3].map(|turn| turn * u64::from(k)));
        assert_eq!(found[3..], vec![u64::from(3 * k); 1000 / k as usize - 3]);
    }
}

// ---- §4.2 Centralized vs decentralized --------------------------------------------------------

/// "S-BMUF tends to update the model more conservatively than S-MA: it would make a step towards to
/// average model rather than taking it directly."
#[test]
fn s4_2_bmuf_makes_a_step_towards_the_mean() {
    let replicas = [[1.0_f32; DIM], [5.0; DIM]];
    let after = |average| {
        let mut global = [0.0_f32; DIM];
        move_global(&mut global, &mut [0.0; DIM], &replicas, average);
        global
    };
    let block = |eta| Average::Block(BlockUpdate { eta, momentum: 0.0, nesterov: false });
    assert_eq!(after(Average::Mean), [3.0; DIM]);
    assert_eq!(after(block(1.0)), [3.0; DIM], "the whole step is the mean");
    assert_eq!(after(block(0.5)), [1.5; DIM]);
}

// ---- Fragments: Streaming DiLoCo --------------------------------------------------------------

/// Parameters of the toy model of this section.
const WIDE: usize = 7;
/// The fragment of each parameter.
const FRAGMENT_OF: [usize; WIDE] = [0, 0, 1, 1, 2, 2, 2];
/// DiLoCo's outer optimizer: η, and Nesterov's momentum.
const OUTER: BlockUpdate = BlockUpdate { eta: 0.7, momentum: 0.9, nesterov: true };

/// The inner updates of each worker, by step. All workers take as long for a step.
fn inner_updates(seed: u64, workers: usize, steps: usize) -> Vec<Vec<[f64; WIDE]>> {
    let mut random = SplitMix64::new(seed);
    let mut update = || std::array::from_fn(|_| random.unit() - 0.5);
    (0..workers).map(|_| (0..steps).map(|_| update()).collect()).collect()
}

/// DiLoCo's outer optimizer: gradient descent of θ with Nesterov's momentum, for one fragment.
fn outer_step(theta: &mut [f64; WIDE], momentum: &mut [f64; WIDE], outer_gradient: [f64; WIDE], fragment: usize) {
    let (eta, m) = (f64::from(OUTER.eta), f64::from(OUTER.momentum));
    for d in (0..WIDE).filter(|d| FRAGMENT_OF[*d] == fragment) {
        momentum[d] = m * momentum[d] + outer_gradient[d];
        theta[d] -= eta * (outer_gradient[d] + m * momentum[d]);
    }
}

/// Streaming DiLoCo with θ, then the replicas, by the definition in its paper. Each fragment p is
/// sent at the steps t_p + j H, and merged τ steps later. H = 3 τ here, so that one fragment is
/// under way at a time. The paper's share of the replica in a merge is 1 − α here.
fn naive_streaming(updates: &[Vec<[f64; WIDE]>], tau: usize) -> Vec<[f64; WIDE]> {
    let (period, workers) = (3 * tau, updates.len());
    let (mut theta, mut momentum, mut replicas) = ([0.0; WIDE], [0.0; WIDE], vec![[0.0; WIDE]; workers]);
    let mut under_way = [None::<[f64; WIDE]>; 3];
    for step in 1..=updates[0].len() {
        for (replica, updates) in replicas.iter_mut().zip(updates) {
            (0..WIDE).for_each(|d| replica[d] += updates[step - 1][d]);
        }
        for (p, under_way) in under_way.iter_mut().enumerate() {
            let first = 1 + p * tau;
            let parameters = || (0..WIDE).filter(move |d| FRAGMENT_OF[*d] == p);
            if step >= first + tau && (step - first - tau).is_multiple_of(period) {
                outer_step(&mut theta, &mut momentum, under_way.take().unwrap(), p);
                for replica in &mut replicas {
                    parameters().for_each(|d| replica[d] = (1.0 - ALPHA) * replica[d] + ALPHA * theta[d]);
                }
            }
            if step >= first && (step - first).is_multiple_of(period) {
                let mut outer_gradient = [0.0; WIDE];
                for d in parameters() {
                    let sum: f64 = replicas.iter().map(|replica| theta[d] - replica[d]).sum();
                    outer_gradient[d] = sum / workers as f64;
                }
                *under_way = Some(outer_gradient);
            }
        }
    }
    // The servers make the step as soon as they have all replicas. So θ is ahead of the merges.
    for (p, outer_gradient) in under_way.into_iter().enumerate() {
        outer_gradient.into_iter().for_each(|gradient| outer_step(&mut theta, &mut momentum, gradient, p));
    }
    std::iter::once(theta).chain(replicas).collect()
}

/// The parts of a run with fragments, or a planted bug in one of them.
#[derive(Clone, Copy)]
struct Streaming {
    range: fn(u32) -> Range<usize>,
    /// The range of the momentum's state.
    momentum: fn(Range<usize>) -> Range<usize>,
    /// The fragment that the trainer applies a reply to.
    merged: fn(u32) -> u32,
    trainer: Line,
    outer: BlockUpdate,
    forgets_updates: bool,
}

const STREAMING: Streaming = Streaming {
    range: |fragment| Fragments::new(3).range(fragment, WIDE),
    momentum: |own| own,
    merged: |fragment| fragment,
    trainer: interpolate,
    outer: OUTER,
    forgets_updates: false,
};

/// A worker of a run with fragments.
struct Worker {
    replica: [f32; WIDE],
    sync: ReplicaSync,
    turn: u32,
    sent: [f32; WIDE],
    /// The step at which the reply arrives.
    arrives: usize,
}

/// A run as the roles carry it out: each exchange takes `tau` steps, and the next one follows.
fn run_streaming(bugs: Streaming, updates: &[Vec<[f64; WIDE]>], tau: usize) -> Vec<[f32; WIDE]> {
    let fragments = Fragments::new(3);
    let (mut copy, mut velocity, mut rounds) = ([0.0; WIDE], [0.0; WIDE], Rounds::new(fragments));
    let begin = || Worker {
        replica: [0.0; WIDE],
        sync: ReplicaSync::new(None, fragments),
        turn: 0,
        sent: [0.0; WIDE],
        arrives: 0,
    };
    let mut workers: Vec<Worker> = updates.iter().map(|_| begin()).collect();
    for step in 1..=updates[0].len() {
        for (worker, updates) in workers.iter_mut().zip(updates) {
            worker.replica.iter_mut().zip(updates[step - 1]).for_each(|(own, update)| *own += update as f32);
            worker.sync.trained();
            if worker.sync.is_under_way() && worker.arrives == step {
                if bugs.forgets_updates {
                    worker.replica = worker.sent;
                }
                let own = (bugs.range)((bugs.merged)(worker.turn));
                // No round closes while an exchange is under way. So the copy is still the reply.
                (bugs.trainer)(&mut worker.replica[own.clone()], &copy[own], ALPHA as f32);
                worker.sync.end().unwrap();
                worker.turn = fragments.after(worker.turn);
            }
        }
        for rank in 0..workers.len() {
            let worker = &mut workers[rank];
            if !worker.sync.is_due() {
                continue;
            }
            worker.sync.begin();
            (worker.sent, worker.arrives) = (worker.replica, step + tau);
            let part = Part::Fragment(worker.turn);
            if rounds.join(1, updates.len() as u32, rank as u32, part) == Joined::Complete {
                let own = (bugs.range)(rounds.turn());
                let momentum = (bugs.momentum)(own.clone());
                let replicas = workers.iter().map(|worker| &worker.sent[own.clone()]);
                Average::Block(bugs.outer).apply(&mut copy[own.clone()], &mut velocity[momentum], replicas);
                rounds.close();
            }
        }
    }
    std::iter::once(copy).chain(workers.into_iter().map(|worker| worker.replica)).collect()
}

fn streaming_deviation(bugs: Streaming, seed: u64) -> f64 {
    let (workers, tau) = (1 + seed as usize % 3, 1 + seed as usize % 4);
    let updates = inner_updates(seed, workers, 100);
    let (found, expected) = (run_streaming(bugs, &updates, tau), naive_streaming(&updates, tau));
    let pairs = found.as_flattened().iter().zip(expected.as_flattened());
    pairs.map(|(found, expected)| (f64::from(*found) - expected).abs()).fold(0.0, f64::max)
}

/// Replicas that are equally fast, and fragments whose exchanges take the same number of steps.
#[test]
fn fragments_with_nesterov_are_streaming_diloco() {
    for seed in 0..300 {
        let deviation = streaming_deviation(STREAMING, seed);
        assert!(deviation < 1e-3, "seed {seed}: {deviation}");
    }
}

#[test]
fn every_planted_bug_of_fragments_is_found() {
    let bugs = [
        (
            "a fragment is skipped",
            Streaming { range: |f| Fragments::new(3).range(if f == 1 { 0 } else { f }, WIDE), ..STREAMING },
        ),
        (
            "a parameter between two fragments is missed",
            Streaming {
                range: |f| {
                    let own = Fragments::new(3).range(f, WIDE);
                    own.start..own.end - 1
                },
                ..STREAMING
            },
        ),
        ("each exchange moves all fragments", Streaming { range: |_| 0..WIDE, ..STREAMING }),
        ("all fragments share one momentum", Streaming { momentum: |own| 0..own.len(), ..STREAMING }),
        ("a reply is merged into the next fragment", Streaming { merged: |f| (f + 1) % 3, ..STREAMING }),
        ("α and 1 − α are swapped", Streaming { trainer: swapped, ..STREAMING }),
        ("the trainer takes the fragment instead of merging it", Streaming { trainer: copied, ..STREAMING }),
        ("updates during the exchange are lost", Streaming { forgets_updates: true, ..STREAMING }),
        ("the momentum is not Nesterov's", Streaming { outer: BlockUpdate { nesterov: false, ..OUTER }, ..STREAMING }),
        ("the outer step is whole", Streaming { outer: BlockUpdate { eta: 1.0, ..OUTER }, ..STREAMING }),
    ];
    for (bug, streaming) in bugs {
        let found = (0..50).filter(|seed| streaming_deviation(streaming, *seed) > 1e-2).count();
        assert!(found >= 45, "{bug}: found in {found} of 50 runs");
    }
}

/// Each fragment is exchanged as often as the others, so a turn leaves none behind.
#[test]
fn a_fragment_that_was_exchanged_waits_for_all_others() {
    for count in [1, 2, 5] {
        let (fragments, mut turn) = (Fragments::new(count), 0);
        let mut exchanges = vec![0; 11];
        for _ in 0..3 * count {
            fragments.range(turn, 11).for_each(|parameter| exchanges[parameter] += 1);
            turn = fragments.after(turn);
        }
        assert_eq!(exchanges, [3; 11], "{count} fragments");
    }
}

// ---- Differences as bf16 ----------------------------------------------------------------------

/// The nearest number with 8 binary digits, ties to even.
fn nearest_with_8_digits(value: f32) -> f32 {
    if value == 0.0 {
        return value;
    }
    let exact = f64::from(value);
    let unit = 2_f64.powi(exact.abs().log2().floor() as i32 - 7);
    ((exact / unit).round_ties_even() * unit) as f32
}

/// Algorithm 2 with the copy, then the replicas. Both ends of a trainer's exchanges have one base.
fn naive_of_differences(events: &[Event], trainers: usize) -> Vec<Parameters> {
    let w0 = W0.map(|value| value as f32);
    let alpha = ALPHA as f32;
    let (mut w_ps, mut w, mut bases) = (w0, vec![w0; trainers], vec![None::<Parameters>; trainers]);
    for event in events {
        match *event {
            Event::Train(i, update) => (0..DIM).for_each(|d| w[i][d] += update[d] as f32),
            Event::Send(i) => {
                bases[i] =
                    Some(bases[i].map_or(w[i], |base| {
                        std::array::from_fn(|d| base[d] + nearest_with_8_digits(w[i][d] - base[d]))
                    }));
            }
            Event::Serve(i) => {
                let base = bases[i].as_mut().unwrap();
                for d in 0..DIM {
                    w_ps[d] += alpha * (base[d] - w_ps[d]);
                    base[d] += nearest_with_8_digits(w_ps[d] - base[d]);
                }
            }
            Event::Answer(i) => (0..DIM).for_each(|d| w[i][d] += alpha * (bases[i].unwrap()[d] - w[i][d])),
        }
    }
    std::iter::once(w_ps).chain(w).collect()
}

/// The two ends of a difference, or a planted bug in one of them.
#[derive(Clone, Copy)]
struct Ends {
    send: fn(&mut [f32], &[f32]) -> Vec<u16>,
    receive: fn(&mut [f32], &[u16]),
}

const ENDS: Ends = Ends { send: send_difference, receive: receive_difference };

/// A run as the roles carry it out: each end has its own base.
fn run_of_differences(ends: Ends, events: &[Event], trainers: usize) -> Vec<Parameters> {
    let w0 = W0.map(|value| value as f32);
    let (mut copy, mut replicas) = (w0, vec![w0; trainers]);
    let (mut of_trainers, mut of_server) = (vec![w0; trainers], vec![w0; trainers]);
    let (mut sent, mut replies) = (vec![None; trainers], vec![Vec::new(); trainers]);
    let mut exchanges = vec![0; trainers];
    for event in events {
        match *event {
            Event::Train(i, update) => {
                replicas[i].iter_mut().zip(update).for_each(|(value, update)| *value += update as f32);
            }
            Event::Send(i) => {
                exchanges[i] += 1;
                if exchanges[i] == 1 {
                    // The first exchange sends whole values.
                    of_trainers[i] = replicas[i];
                } else {
                    sent[i] = Some((ends.send)(&mut of_trainers[i], &replicas[i]));
                }
            }
            Event::Serve(i) => {
                match sent[i].take() {
                    Some(difference) => (ends.receive)(&mut of_server[i], &difference),
                    None => of_server[i] = of_trainers[i],
                }
                interpolate(&mut copy, &of_server[i], ALPHA as f32);
                replies[i] = (ends.send)(&mut of_server[i], &copy);
            }
            Event::Answer(i) => {
                (ends.receive)(&mut of_trainers[i], &replies[i]);
                interpolate(&mut replicas[i], &of_trainers[i], ALPHA as f32);
            }
        }
    }
    std::iter::once(copy).chain(replicas).collect()
}

#[test]
fn differences_as_bf16_equal_a_naive_computation_to_the_bit() {
    for seed in 0..300 {
        let trainers = 1 + (seed % 4) as usize;
        let events = random_events(seed, trainers);
        let found = run_of_differences(ENDS, &events, trainers);
        assert_eq!(found, naive_of_differences(&events, trainers), "seed {seed}");
        // Errors do not add up over some hundred exchanges of values near 4.
        let exact = naive(&events, trainers, 1);
        for (found, exact) in found.as_flattened().iter().zip(exact.as_flattened()) {
            assert!((f64::from(*found) - exact).abs() < 0.05, "seed {seed}: {found}, exactly {exact}");
        }
    }
}

#[test]
fn every_planted_bug_of_differences_is_found() {
    let bugs: [(&str, Ends); 4] = [
        (
            "the sender forgets its rounding error",
            Ends {
                send: |base, values| {
                    let difference = send_difference(base, values);
                    base.copy_from_slice(values);
                    difference
                },
                ..ENDS
            },
        ),
        (
            "the sender cuts digits off instead of rounding",
            Ends {
                send: |base, values| {
                    let cut = |(base, value): (&mut f32, &f32)| {
                        let bits = (value - *base).to_bits() >> 16;
                        *base += f32::from_bits(bits << 16);
                        bits as u16
                    };
                    base.iter_mut().zip(values).map(cut).collect()
                },
                ..ENDS
            },
        ),
        ("the receiver's base stays", Ends { receive: |_, _| {}, ..ENDS }),
        (
            "the difference has the wrong sign",
            Ends {
                receive: |base, difference| {
                    let negative: Vec<u16> = difference.iter().map(|bits| bits ^ 0x8000).collect();
                    receive_difference(base, &negative);
                },
                ..ENDS
            },
        ),
    ];
    for (bug, ends) in bugs {
        let found = (0..50).filter(|seed| {
            let trainers = 1 + (seed % 4) as usize;
            let events = random_events(*seed, trainers);
            run_of_differences(ends, &events, trainers) != naive_of_differences(&events, trainers)
        });
        assert!(found.count() >= 45, "{bug}");
    }
}

// ---- The switch -------------------------------------------------------------------------------

/// No dense gradient fills a buffer in `shadow`. So a worker reports the step of the rows for the
/// dense partitions, too: servers 0 and 1 stand for the dense and the row part of one server.
#[test]
fn a_switch_there_and_back_is_at_proven_boundaries() {
    let plan = RunPlan { global_rows: 4, servers: 2, in_flight_limit: 2 };
    let sync = RunMode { mode: TrainingMode::Sync, workers: 2, local_rows: 2 };
    let shadow = RunMode { mode: shadow(), ..sync };
    let mut run = TrainingRun::new(plan, sync, Boundary { step: GlobalStep(0), next_row: 0 }).unwrap();
    run.extend_data(40);
    let (step, _) = run.next_sync_step().unwrap().unwrap();
    run.sync_step_applied(step).unwrap();
    run.switch_to(shadow).unwrap();
    let at = Boundary { step: GlobalStep(1), next_row: 4 };
    let publish = |server| Order::Publish { server: Server(server), at, mode: shadow };
    assert_eq!(run.advance().unwrap(), [0, 1].map(publish));
    run.moved(Server(0)).unwrap();
    assert_eq!(run.moved(Server(1)).unwrap(), [Order::Start { mode: shadow, at }]);

    let dispatcher = run.dispatcher().unwrap();
    dispatcher.join(Rank(0));
    for step in 2..5 {
        let Assignment { batch, .. } = work(&dispatcher.pull(Rank(0)).unwrap());
        assert_eq!(batch.rows, 2);
        dispatcher.report(Rank(0), batch, Outcome::Trained).unwrap();
        for server in 0..2 {
            dispatcher.server_at(Server(server), GlobalStep(step)).unwrap();
        }
    }
    run.switch_to(sync).unwrap();
    let at = Boundary { step: GlobalStep(4), next_row: 10 };
    let read_back = |server| Order::ReadBack { server: Server(server), at };
    assert_eq!(run.advance().unwrap(), [0, 1].map(read_back));
    assert_eq!((run.ledger().trained_rows(), run.ledger().open()), (10, 0));
}
