//! Follows Su et al., *GBA: A Tuning-free Approach to Switch between Synchronous and Asynchronous
//! Training for Recommendation Models*, in the order of the paper:
//!
//! - the definitions of §4.1;
//! - the algorithms of appendix B;
//! - the baselines of §5.1;
//! - the claim of §5.2 about training without staleness;
//! - random schedules with delays, crashes, false suspicions, and messages reordered between
//!   workers. All invariants must hold in them, and must catch planted bugs;
//! - the switch between modes.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rectrain_modes::barrier::SparseGradients;
use rectrain_modes::gba::*;
use rectrain_modes::switch::*;
use rectrain_modes::*;
use rectrain_random::SplitMix64;

fn size(m: u32) -> BufferSize {
    BufferSize::new(m).unwrap()
}

fn gba(m: u32, tolerance: u64) -> TokenMode {
    TokenMode::Gba { buffer: size(m), decay: Decay::Threshold { tolerance }, lost_tokens: LostTokens::Vanish }
}

fn dispatcher(mode: TokenMode, workers: u32, batches: u64) -> Dispatcher {
    let setup = DispatcherSetup { mode, workers, servers: 1, first_step: GlobalStep(0), in_flight_limit: 4 };
    let mut dispatcher = Dispatcher::new(setup, DataList::new(1, 0), RowLedger::default()).unwrap();
    dispatcher.extend_data(batches);
    dispatcher.close_data();
    (0..workers).for_each(|rank| assert_eq!(dispatcher.join(Rank(rank)), []));
    dispatcher
}

fn work(answers: &Answers) -> Assignment {
    match answers.as_slice() {
        [(_, Reply::Work(assignment))] => *assignment,
        other => panic!("expected one batch, not {other:?}"),
    }
}

fn push<G>(rank: u32, first_row: u64, token: u64, pulled_at: u64, gradient: G) -> Push<G> {
    Push {
        rank: Rank(rank),
        batch: Batch { first_row, rows: 1 },
        token: Token(token),
        pulled_at: GlobalStep(pulled_at),
        gradient,
    }
}

fn full<G: std::fmt::Debug>(pushed: Result<Pushed<G>, PushError>) -> Update<G> {
    match pushed.unwrap() {
        Pushed::Full(update) => update,
        other => panic!("expected a full buffer, not {other:?}"),
    }
}

// ---- §4.1: data list, token list --------------------------------------------------------------

#[test]
fn s4_1_the_data_list_splits_the_data_into_ordered_batches() {
    let mut list = DataList::new(4, 0);
    list.extend(18);
    list.close();
    let mut batches = Vec::new();
    while let Next::Fresh(batch) = list.take(true) {
        batches.push((batch.first_row, batch.rows));
    }
    assert_eq!(batches, [(0, 4), (4, 4), (8, 4), (12, 4), (16, 2)]);
}

#[test]
fn s4_1_token_values_start_at_zero_ascend_and_repeat_m_times_each() {
    for m in 1..7u32 {
        let mut list = TokenList::new(size(m), LostTokens::Vanish, GlobalStep(0));
        let tokens: Vec<u64> = (0..100).map(|_| list.take(5).0).collect();
        let expected: Vec<u64> = (0..100).map(|i| i / u64::from(m)).collect();
        assert_eq!(tokens, expected, "M = {m}");
    }
}

#[test]
fn s4_1_q_batches_make_the_ceiling_of_q_over_m_updates() {
    for (q, m) in [(12u64, 4u32), (13, 4), (1, 4), (7, 1)] {
        let mut server = GradientServer::new(gba(m, 3), m, GlobalStep(0), 0);
        let full = (0..q).filter(|row| matches!(server.push(push(0, *row, 0, 0, ())), Ok(Pushed::Full(_)))).count();
        let updates = full as u64 + u64::from(server.flush().is_some());
        assert_eq!(updates, q.div_ceil(u64::from(m)));
        assert_eq!(server.step(), GlobalStep(updates));
    }
}

#[test]
fn s4_1_a_worker_gets_a_token_with_each_batch_and_never_waits() {
    let mut dispatcher = dispatcher(gba(2, 3), 3, 100);
    let slow = work(&dispatcher.pull(Rank(0)).unwrap());
    assert_eq!(slow, Assignment { batch: Batch { first_row: 0, rows: 1 }, token: Token(0) });
    for i in 1..40u64 {
        let assignment = work(&dispatcher.pull(Rank(1)).unwrap());
        assert_eq!(assignment.batch.first_row, i, "the fast worker never waits for the slow one");
        assert_eq!(assignment.token, Token(i / 2));
        dispatcher.report(Rank(1), assignment.batch, Outcome::Trained).unwrap();
    }
}

// ---- §4.1: the size of the buffer -------------------------------------------------------------

#[test]
fn s4_1_m_keeps_the_global_batch_of_synchronous_training() {
    // Table 5.1: Criteo 40K × 32, Alimama 3K × 32, Private 6.4K × 64; GBA's local batches 12.8K,
    // 0.75K, 1K.
    for (sync_batch, sync_workers, local, m) in
        [(40_000, 32, 12_800, 100), (3_000, 32, 750, 128), (6_400, 64, 1_024, 400), (512, 8, 512, 8)]
    {
        let size = BufferSize::of_global_batch(sync_batch, sync_workers, local).unwrap();
        assert_eq!(size.get(), m);
        assert_eq!(u64::from(size.get()) * local, sync_batch * u64::from(sync_workers));
    }
}

#[test]
fn s4_1_an_m_that_is_not_whole_is_explained_and_never_rounded() {
    let error = BufferSize::of_global_batch(40_000, 32, 12_801).unwrap_err();
    let BufferSizeError::NotWhole { global, local, remainder, below, above } = error else { panic!("{error}") };
    assert_eq!((global, local, remainder), (1_280_000, 12_801, 1_280_000 % 12_801));
    assert!(global % below == 0 && global % above == 0 && below < local && local < above);
    assert!(error.to_string().contains("12800"), "{error}");
    let too_large = size(400).within(40 << 20, 1 << 30).unwrap_err().to_string();
    assert!(too_large.contains("larger local batches"), "{too_large}");
}

// ---- §4.1: the gradient buffer ----------------------------------------------------------------

#[test]
fn s4_1_m_pairs_make_one_global_step_and_empty_the_buffer() {
    let mut server = GradientServer::new(gba(3, 3), 3, GlobalStep(0), 0);
    for step in 0..20u64 {
        for i in 0..2 {
            assert_eq!(server.push(push(i, step * 3 + u64::from(i), step, step, ())), Ok(Pushed::Buffered));
            assert_eq!(server.fill(), i as usize + 1);
        }
        let update = full(server.push(push(2, step * 3 + 2, step, step, ())));
        assert_eq!((update.step, update.pairs.len(), update.divisor), (GlobalStep(step), 3, 3));
        assert_eq!((server.fill(), server.step()), (0, GlobalStep(step + 1)));
    }
}

#[test]
fn s4_1_each_server_has_a_separate_buffer() {
    let mut servers = [0, 1].map(|_| GradientServer::new(gba(2, 3), 2, GlobalStep(0), 0));
    servers[0].push(push(0, 0, 0, 0, ())).unwrap();
    let first = full(servers[0].push(push(1, 1, 0, 0, ())));
    assert_eq!((first.step, servers[1].step(), servers[1].fill()), (GlobalStep(0), GlobalStep(0), 0));
    servers[1].push(push(1, 1, 0, 0, ())).unwrap();
    assert_eq!(full(servers[1].push(push(0, 0, 0, 0, ()))).pairs, first.pairs, "arrival order leaves no trace");
}

#[test]
fn s4_1_equation_1_weighs_0_beyond_the_tolerance_and_1_up_to_it() {
    for tolerance in 0..6u64 {
        let decay = Decay::Threshold { tolerance };
        for (token, step) in (0..12u64).flat_map(|t| (0..12u64).map(move |k| (t, k))) {
            let expected = if step as i64 - token as i64 > tolerance as i64 { 0.0 } else { 1.0 };
            assert_eq!(decay.weight(Token(token), GlobalStep(step)), expected, "τ={token} k={step} ι={tolerance}");
            assert_eq!(staleness(Token(token), GlobalStep(step)), step as i64 - token as i64);
        }
    }
}

#[test]
fn s4_1_data_staleness_is_the_step_of_application_less_the_token() {
    let mut server = GradientServer::new(gba(2, 1), 2, GlobalStep(5), 0);
    server.push(push(0, 0, 3, 4, ())).unwrap();
    let update = full(server.push(push(1, 1, 7, 5, ())));
    let weights: Vec<f32> = update.pairs.iter().map(|p| p.weight).collect();
    assert_eq!(weights, [0.0, 1.0], "5 − 3 > ι = 1; a token ahead of its step is not stale");
    let counts = server.counts();
    assert_eq!((counts.data_staleness.sum, counts.data_staleness.max, counts.excluded), (2, 2, 1));
    assert_eq!((counts.gradient_staleness.sum, counts.gradient_staleness.max), (1, 1));
}

// ---- Appendix B, algorithm 1: workers ---------------------------------------------------------

#[test]
fn b_a_worker_pushes_without_blocking_and_a_restart_drops_its_batch() {
    let assignment = Assignment { batch: Batch { first_row: 0, rows: 1 }, token: Token(7) };
    let mut worker = PushPullWorker::new(3, 4);
    worker.start();
    worker.answered(Reply::Work(assignment)).unwrap();
    assert_eq!(worker.computed().unwrap(), [WorkerAction::Push(assignment), WorkerAction::Pull]);
    assert_eq!(worker.start(), [WorkerAction::Pull], "after a failure it proceeds with a new batch");
    assert!(worker.acknowledged(Server(0), assignment.batch, Outcome::Trained).is_err());
}

#[test]
fn b_a_lost_token_neither_shifts_the_others_nor_blocks_a_worker() {
    let mut dispatcher = dispatcher(gba(4, 3), 4, 12);
    let lost = work(&dispatcher.pull(Rank(3)).unwrap());
    assert_eq!(dispatcher.lose(Rank(3)), []);
    let mut tokens = vec![lost.token.0];
    let mut rows = BTreeSet::new();
    for turn in 0..12 {
        let assignment = work(&dispatcher.pull(Rank(turn % 3)).unwrap());
        tokens.push(assignment.token.0);
        assert!(rows.insert(assignment.batch.first_row));
        dispatcher.report(Rank(turn % 3), assignment.batch, Outcome::Trained).unwrap();
    }
    assert_eq!(
        tokens,
        (0..13).map(|i| i / 4).collect::<Vec<u64>>(),
        "the lost token does not change the tokens of the other workers"
    );
    assert_eq!(rows, (0..12).collect(), "the lost token's batch went out again");
    assert_eq!((dispatcher.tokens().lost(), dispatcher.finished()), (1, true));
}

#[test]
fn b_a_batch_trained_by_a_suspected_worker_is_not_trained_again() {
    let mut dispatcher = dispatcher(gba(1, 3), 2, 2);
    let slow = work(&dispatcher.pull(Rank(0)).unwrap());
    dispatcher.lose(Rank(0));
    dispatcher.report(Rank(0), slow.batch, Outcome::Trained).unwrap();
    let next = work(&dispatcher.pull(Rank(1)).unwrap());
    assert_eq!(next.batch.first_row, 1);
    dispatcher.report(Rank(1), next.batch, Outcome::Trained).unwrap();
    assert!(dispatcher.finished());
}

// ---- Appendix B, algorithm 2: parameter servers -----------------------------------------------

#[test]
fn b_the_token_list_refills_below_one_token_per_worker() {
    let (m, workers) = (4, 10);
    let mut list = TokenList::new(size(m), LostTokens::Vanish, GlobalStep(0));
    for _ in 0..1000 {
        list.take(workers);
        assert!(list.ready() >= workers && list.ready() < workers + m as usize);
    }
}

#[test]
fn b_the_dense_gradient_is_the_weighted_sum_over_m() {
    let gradients = [[4.0f32, 8.0], [2.0, -2.0], [100.0, 100.0], [2.0, 2.0]];
    let pairs = |weights: [f32; 4]| weights.into_iter().zip(gradients.iter().map(|g| g.as_slice())).collect::<Vec<_>>();
    assert_eq!(aggregate_dense(pairs([1.0; 4]), 4), Some(vec![27.0, 27.0]));
    assert_eq!(
        aggregate_dense(pairs([1.0, 1.0, 0.0, 1.0]), 4),
        Some(vec![2.0, 2.0]),
        "an excluded gradient still counts in M"
    );
    assert_eq!(aggregate_dense(pairs([0.5, 0.0, 0.0, 0.0]), 4), Some(vec![0.5, 1.0]));
    assert_eq!(aggregate_dense(pairs([0.0; 4]), 4), None, "nothing to apply");
}

#[test]
fn b_an_embedding_gradient_averages_the_workers_that_met_the_key() {
    let sparse = |keys: &[u64], value: f32| SparseGradients { keys: keys.to_vec(), values: vec![value; keys.len()] };
    let gradients = [sparse(&[1, 2], 6.0), sparse(&[2, 3], 2.0), sparse(&[2], 4.0), sparse(&[2], 8.0)];
    let pairs: Vec<EmbeddingPair<'_>> = (0..4)
        .map(|i| EmbeddingPair { rank: Rank(i.min(2)), token: Token(0), gradients: &gradients[i as usize] })
        .collect();
    let rule =
        EmbeddingRule { dim: 1, decay: Decay::Threshold { tolerance: 0 }, divisor: KeyDivisor::Workers, buffer: 4 };
    let sum = |rule| aggregate_embeddings(&pairs, rule, GlobalStep(0), &mut LastUpdates::default());
    assert_eq!(sum(rule).keys, [1, 2, 3]);
    assert_eq!(sum(rule).values, [6.0, 20.0 / 3.0, 2.0], "worker 2 has two batches and is one worker");
    assert_eq!(sum(EmbeddingRule { divisor: KeyDivisor::Batches, ..rule }).values, [6.0, 5.0, 2.0]);
    assert_eq!(sum(EmbeddingRule { divisor: KeyDivisor::Buffer, ..rule }).values, [1.5, 5.0, 0.5]);
}

#[test]
fn b_the_staleness_of_a_key_counts_from_its_last_update() {
    let rule =
        EmbeddingRule { dim: 1, decay: Decay::Threshold { tolerance: 1 }, divisor: KeyDivisor::Workers, buffer: 1 };
    let mut steps = LastUpdates::default();
    let mut update = |token: u64, keys: &[u64], step: u64| {
        let gradients = SparseGradients { keys: keys.to_vec(), values: vec![1.0; keys.len()] };
        let pair = EmbeddingPair { rank: Rank(0), token: Token(token), gradients: &gradients };
        aggregate_embeddings(&[pair], rule, GlobalStep(step), &mut steps).keys
    };
    assert_eq!(update(0, &[7, 8], 0), [7, 8]);
    for step in 1..9 {
        assert_eq!(update(step, &[8], step), [8]);
    }
    // Computed under token 0 and applied at step 9, the dense part is 9 steps stale. Key 7 last
    // changed at step 0, key 8 at step 8, and key 9 never.
    assert_eq!(update(0, &[7, 8, 9], 9), [7, 9]);
    assert_eq!(update(8, &[8], 10), [8], "excluded at step 9, key 8 still has its value of step 8");
}

#[test]
fn b_a_key_in_every_batch_is_exactly_as_stale_as_the_dense_parameters() {
    for (tolerance, delay) in (0..5u64).flat_map(|t| (0..7u64).map(move |d| (t, d))) {
        let decay = Decay::Threshold { tolerance };
        let rule = EmbeddingRule { dim: 1, decay, divisor: KeyDivisor::Workers, buffer: 1 };
        let mut steps = LastUpdates::default();
        let gradients = SparseGradients { keys: vec![1], values: vec![1.0] };
        for step in 0..30u64 {
            // Every step also has a fresh gradient, so that the key changes in each.
            let token = Token(step.saturating_sub(delay));
            let pairs = [token, Token(step)].map(|token| EmbeddingPair { rank: Rank(0), token, gradients: &gradients });
            let sum = aggregate_embeddings(&pairs, rule, GlobalStep(step), &mut steps).values[0];
            assert_eq!(sum, 1.0 + decay.weight(token, GlobalStep(step)));
        }
    }
}

// ---- §5.1: the baselines ----------------------------------------------------------------------

#[test]
fn s5_1_async_applies_each_gradient_alone_however_stale() {
    let mut server = GradientServer::new(TokenMode::Async, 8, GlobalStep(0), 0);
    for step in 0..50 {
        let update = full(server.push(push(0, step, 0, 0, ())));
        assert_eq!((update.step.0, update.divisor, update.pairs[0].weight), (step, 1, 1.0));
    }
}

#[test]
fn s5_1_bsp_aggregates_b2_gradients_whatever_their_version() {
    let mut server = GradientServer::new(TokenMode::Bsp { aggregate: size(5) }, 8, GlobalStep(90), 0);
    (0..4).for_each(|row| assert_eq!(server.push(push(0, row, row * 20, 0, ())), Ok(Pushed::Buffered)));
    let update = full(server.push(push(1, 4, 90, 90, ())));
    assert!(update.pairs.iter().all(|pair| pair.weight == 1.0));
    assert_eq!(update.divisor, 5);
}

#[test]
fn s5_1_hop_bs_bounds_the_spread_of_versions() {
    for bound in 0..4u64 {
        let mut dispatcher = dispatcher(TokenMode::HopBs { bound }, 3, 1000);
        let slow = work(&dispatcher.pull(Rank(0)).unwrap());
        for rank in [1, 2] {
            for _ in 0..bound + 1 {
                let assignment = work(&dispatcher.pull(Rank(rank)).unwrap());
                assert!(dispatcher.version_spread() <= bound);
                dispatcher.report(Rank(rank), assignment.batch, Outcome::Trained).unwrap();
            }
            assert_eq!(dispatcher.pull(Rank(rank)).unwrap(), [], "worker {rank} is {bound} ahead of worker 0");
        }
        let released = dispatcher.report(Rank(0), slow.batch, Outcome::Trained).unwrap();
        assert_eq!(released.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [Rank(1), Rank(2)]);
    }
}

#[test]
fn s5_1_hop_bs_does_not_wait_for_a_dead_worker() {
    let mut dispatcher = dispatcher(TokenMode::HopBs { bound: 0 }, 2, 1000);
    let dead = work(&dispatcher.pull(Rank(0)).unwrap());
    let own = work(&dispatcher.pull(Rank(1)).unwrap());
    dispatcher.report(Rank(1), own.batch, Outcome::Trained).unwrap();
    assert_eq!(dispatcher.pull(Rank(1)).unwrap(), []);
    assert_eq!(work(&dispatcher.lose(Rank(0))).batch, dead.batch);
}

#[test]
fn s5_1_hop_bw_ignores_the_b3_slowest_gradients_of_each_step() {
    let (workers, backups) = (5u32, 2u32);
    let mode = TokenMode::HopBw { backups };
    let mut dispatcher = dispatcher(mode, workers, 1000);
    let mut server = GradientServer::new(mode, workers, GlobalStep(0), 0);
    let taken: Vec<Assignment> = (0..workers).map(|rank| work(&dispatcher.pull(Rank(rank)).unwrap())).collect();
    let send = |server: &mut GradientServer<()>, rank: u32, a: Assignment| {
        server.push(push(rank, a.batch.first_row, a.token.0, a.token.0, ())).unwrap()
    };
    assert_eq!(send(&mut server, 4, taken[4]), Pushed::Buffered);
    dispatcher.report(Rank(4), taken[4].batch, Outcome::Trained).unwrap();
    assert_eq!(dispatcher.pull(Rank(4)).unwrap(), [], "one gradient a worker and step");
    assert_eq!(send(&mut server, 2, taken[2]), Pushed::Buffered);
    assert!(matches!(send(&mut server, 0, taken[0]), Pushed::Full(_)), "N − b3 are a step");
    let next = work(&dispatcher.server_at(Server(0), GlobalStep(1)).unwrap());
    assert_eq!(next.token, Token(1));
    assert_eq!(send(&mut server, 1, taken[1]), Pushed::Late);
    assert_eq!(send(&mut server, 3, taken[3]), Pushed::Late);
    dispatcher.report(Rank(1), taken[1].batch, Outcome::Dropped).unwrap();
    assert_eq!((server.counts().late, dispatcher.ledger().dropped_rows()), (2, 1));
    assert_eq!(server.counts().gradient_staleness.max, 0, "no applied gradient is stale");
    assert!(matches!(TokenMode::HopBw { backups: 5 }.validate(5), Err(DispatchError::NoQuorum { .. })));
}

// ---- §4.1, §5.2: GBA without staleness is synchronous training --------------------------------

/// Logistic regression on dense features plus one embedding, under AdaGrad.
#[derive(Clone, PartialEq, Debug)]
struct Model {
    dense: Vec<f32>,
    dense_state: Vec<f32>,
    rows: BTreeMap<u64, (f32, f32)>,
}

struct Sample {
    x: [f32; 3],
    keys: [u64; 2],
    y: f32,
}

impl Model {
    fn new() -> Self {
        Self { dense: vec![0.1, -0.2, 0.3], dense_state: vec![0.1; 3], rows: BTreeMap::new() }
    }

    fn row(&self, key: u64) -> (f32, f32) {
        self.rows.get(&key).copied().unwrap_or(((key as f32 * 0.7).sin() * 0.1, 0.1))
    }

    /// Gradients of the mean loss over `samples`.
    fn gradients(&self, samples: &[Sample]) -> (Vec<f32>, SparseGradients) {
        let mut dense = vec![0.0f32; 3];
        let mut rows: BTreeMap<u64, f32> = BTreeMap::new();
        for sample in samples {
            let mut logit: f32 = sample.x.iter().zip(&self.dense).map(|(x, w)| x * w).sum();
            logit += sample.keys.iter().map(|key| self.row(*key).0).sum::<f32>();
            let error = (1.0 / (1.0 + (-logit).exp()) - sample.y) / samples.len() as f32;
            dense.iter_mut().zip(&sample.x).for_each(|(g, x)| *g += error * x);
            sample.keys.iter().for_each(|key| *rows.entry(*key).or_default() += error);
        }
        (dense, SparseGradients { keys: rows.keys().copied().collect(), values: rows.into_values().collect() })
    }

    fn apply(&mut self, dense: &[f32], rows: &SparseGradients) {
        let step = |w: &mut f32, state: &mut f32, g: f32| {
            *state += g * g;
            *w -= 0.3 * g / state.sqrt();
        };
        for ((w, state), g) in self.dense.iter_mut().zip(&mut self.dense_state).zip(dense) {
            step(w, state, *g);
        }
        for (key, g) in rows.keys.iter().zip(&rows.values) {
            let (mut w, mut state) = self.row(*key);
            step(&mut w, &mut state, *g);
            self.rows.insert(*key, (w, state));
        }
    }
}

fn sample(row: u64) -> Sample {
    let r = row as f32;
    Sample {
        x: [(r * 0.3).sin(), (r * 1.7).cos(), 1.0],
        keys: [row * 7 % 11, 11 + row * 5 % 13],
        y: f32::from(u8::from(row * 31 % 10 < 4)),
    }
}

fn samples(batch: Batch) -> Vec<Sample> {
    (batch.first_row..batch.end()).map(sample).collect()
}

/// Trains `rows` rows with `workers` workers in lockstep, with M = workers and no delay.
fn train_gba(rows: u64, workers: u32, local_rows: u32, divisor: KeyDivisor) -> Model {
    let mode = gba(workers, 0);
    let setup = DispatcherSetup { mode, workers, servers: 1, first_step: GlobalStep(0), in_flight_limit: 1 };
    let mut dispatcher = Dispatcher::new(setup, DataList::new(local_rows, 0), RowLedger::default()).unwrap();
    let mut server = GradientServer::new(mode, workers, GlobalStep(0), 0);
    let mut steps = LastUpdates::default();
    let mut model = Model::new();
    dispatcher.extend_data(rows);
    dispatcher.close_data();
    (0..workers).for_each(|rank| assert_eq!(dispatcher.join(Rank(rank)), []));
    'training: loop {
        let mut pushes = Vec::new();
        for rank in 0..workers {
            let answers = dispatcher.pull(Rank(rank)).unwrap();
            let [(_, Reply::Work(Assignment { batch, token }))] = answers[..] else { break 'training };
            let gradient = model.gradients(&samples(batch));
            pushes.push(Push { rank: Rank(rank), batch, token, pulled_at: server.step(), gradient });
        }
        for push in pushes.into_iter().rev() {
            let (rank, batch) = (push.rank, push.batch);
            if let Pushed::Full(update) = server.push(push).unwrap() {
                let dense = aggregate_dense(
                    update.pairs.iter().map(|p| (p.weight, p.push.gradient.0.as_slice())),
                    update.divisor,
                )
                .unwrap();
                let pairs: Vec<EmbeddingPair<'_>> = update
                    .pairs
                    .iter()
                    .map(|p| EmbeddingPair { rank: p.push.rank, token: p.push.token, gradients: &p.push.gradient.1 })
                    .collect();
                let rule = EmbeddingRule { dim: 1, decay: mode.decay(), divisor, buffer: update.divisor };
                let rows = aggregate_embeddings(&pairs, rule, update.step, &mut steps);
                model.apply(&dense, &rows);
            }
            dispatcher.report(rank, batch, Outcome::Trained).unwrap();
        }
    }
    model
}

#[test]
fn gba_with_one_worker_and_m_1_equals_sequential_training_to_the_bit() {
    for divisor in [KeyDivisor::Workers, KeyDivisor::Batches, KeyDivisor::Buffer] {
        let trained = train_gba(4 * 500, 1, 4, divisor);
        let mut sequential = Model::new();
        for step in 0..500 {
            let (dense, rows) = sequential.gradients(&samples(Batch { first_row: step * 4, rows: 4 }));
            sequential.apply(&dense, &rows);
        }
        let bits = |m: &Model| m.dense.iter().chain(&m.dense_state).map(|v| v.to_bits()).collect::<Vec<_>>();
        let row_bits = |m: &Model| m.rows.iter().map(|(k, r)| (*k, r.0.to_bits(), r.1.to_bits())).collect::<Vec<_>>();
        assert_eq!(bits(&trained), bits(&sequential));
        assert_eq!(row_bits(&trained), row_bits(&sequential));
        assert_ne!(bits(&trained), bits(&Model::new()));
    }
}

#[test]
fn gba_with_n_equal_workers_matches_sync_up_to_rounding() {
    let (workers, local) = (4u32, 4u32);
    let trained = train_gba(16 * 200, workers, local, KeyDivisor::Buffer);
    let mut sync = Model::new();
    for step in 0..200 {
        let (dense, rows) = sync.gradients(&samples(Batch { first_row: step * 16, rows: 16 }));
        sync.apply(&dense, &rows);
    }
    for (a, b) in trained.dense.iter().zip(&sync.dense) {
        assert!((a - b).abs() < 2e-5, "{a} is not {b}");
    }
    for (key, (value, _)) in &trained.rows {
        assert!((value - sync.rows[key].0).abs() < 2e-5);
    }
}

// ---- Random schedules -------------------------------------------------------------------------

/// Draws of a schedule.
struct Random(SplitMix64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
}

/// A parameter server's buffer in the schedules: the real one, or one with a bug.
trait Buffer {
    fn step(&self) -> GlobalStep;
    fn fill(&self) -> usize;
    fn push(&mut self, push: Push<()>) -> Pushed<()>;
    fn flush(&mut self) -> Option<Update<()>>;
    fn counts(&self) -> Option<&ServerCounts>;
}

impl Buffer for GradientServer<()> {
    fn step(&self) -> GlobalStep {
        self.step()
    }
    fn fill(&self) -> usize {
        self.fill()
    }
    fn push(&mut self, push: Push<()>) -> Pushed<()> {
        self.push(push).unwrap()
    }
    fn flush(&mut self) -> Option<Update<()>> {
        self.flush()
    }
    fn counts(&self) -> Option<&ServerCounts> {
        Some(self.counts())
    }
}

/// Bugs of a gradient buffer, of the decay and of the token list.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bug {
    BufferHoldsOneMore,
    BufferHoldsOneLess,
    BufferIsNotCleared,
    BufferForgetsWhatItTook,
    BufferLosesAPair,
    StepIsCountedTwice,
    ToleranceIsExclusive,
    DecayIsReversed,
    DecayIgnoresStaleness,
    DecayByThePullInsteadOfTheToken,
    TokensRepeatOnceMore,
    TokensStartAtOne,
    TokensDescendWithinAStep,
    TokensAreBatchNumbers,
}

const BUGS: [Bug; 14] = [
    Bug::BufferHoldsOneMore,
    Bug::BufferHoldsOneLess,
    Bug::BufferIsNotCleared,
    Bug::BufferForgetsWhatItTook,
    Bug::BufferLosesAPair,
    Bug::StepIsCountedTwice,
    Bug::ToleranceIsExclusive,
    Bug::DecayIsReversed,
    Bug::DecayIgnoresStaleness,
    Bug::DecayByThePullInsteadOfTheToken,
    Bug::TokensRepeatOnceMore,
    Bug::TokensStartAtOne,
    Bug::TokensDescendWithinAStep,
    Bug::TokensAreBatchNumbers,
];

/// A second, plain implementation of the buffer, with at most one bug.
struct PlainBuffer {
    m: usize,
    tolerance: u64,
    bug: Option<Bug>,
    step: u64,
    pairs: Vec<Pair<()>>,
    seen: BTreeSet<Batch>,
}

impl PlainBuffer {
    fn weight(&self, push: &Push<()>) -> f32 {
        let (k, token) = (self.step as i64, push.token.0 as i64);
        let fresh = match self.bug {
            Some(Bug::ToleranceIsExclusive) => k - token < self.tolerance as i64,
            Some(Bug::DecayIsReversed) => token - k <= self.tolerance as i64,
            Some(Bug::DecayIgnoresStaleness) => true,
            Some(Bug::DecayByThePullInsteadOfTheToken) => k - push.pulled_at.0 as i64 <= self.tolerance as i64,
            _ => k - token <= self.tolerance as i64,
        };
        f32::from(u8::from(fresh))
    }

    fn finish(&mut self) -> Update<()> {
        let mut pairs = self.pairs.clone();
        pairs.sort_by_key(|pair| pair.push.batch);
        let step = GlobalStep(self.step);
        self.step += if self.bug == Some(Bug::StepIsCountedTwice) { 2 } else { 1 };
        let kept = usize::from(self.bug == Some(Bug::BufferIsNotCleared));
        self.pairs.truncate(kept);
        let divisor = pairs.len() as u32;
        Update { step, pairs, divisor }
    }
}

impl Buffer for PlainBuffer {
    fn step(&self) -> GlobalStep {
        GlobalStep(self.step)
    }
    fn fill(&self) -> usize {
        self.pairs.len()
    }
    fn push(&mut self, push: Push<()>) -> Pushed<()> {
        if !self.seen.insert(push.batch) && self.bug != Some(Bug::BufferForgetsWhatItTook) {
            return Pushed::Repeated;
        }
        if self.bug == Some(Bug::BufferLosesAPair) && push.batch.first_row % 7 == 3 {
            return Pushed::Buffered;
        }
        let weight = self.weight(&push);
        self.pairs.push(Pair { weight, push });
        let size = match self.bug {
            Some(Bug::BufferHoldsOneMore) => self.m + 1,
            Some(Bug::BufferHoldsOneLess) => (self.m - 1).max(1),
            _ => self.m,
        };
        if self.pairs.len() < size { Pushed::Buffered } else { Pushed::Full(self.finish()) }
    }
    fn flush(&mut self) -> Option<Update<()>> {
        (!self.pairs.is_empty()).then(|| self.finish())
    }
    fn counts(&self) -> Option<&ServerCounts> {
        None
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Implementation {
    Real,
    Plain(Option<Bug>),
}

#[derive(Clone, Debug)]
struct Setting {
    mode: TokenMode,
    workers: u32,
    servers: u32,
    batches: u64,
    crashes: bool,
    unacknowledged: usize,
}

impl Setting {
    fn draw(random: &mut Random, mode: Option<TokenMode>) -> Self {
        let workers = 1 + random.below(6) as u32;
        let m = 1 + random.below(5) as u32;
        let tolerance = random.below(4);
        let lost_tokens = if random.below(4) == 0 { LostTokens::Replace } else { LostTokens::Vanish };
        let mode = mode.unwrap_or(match random.below(8) {
            0 => TokenMode::Async,
            1 => TokenMode::Bsp { aggregate: size(m) },
            2 => TokenMode::HopBs { bound: tolerance },
            3 => TokenMode::HopBw { backups: random.below(u64::from(workers)) as u32 },
            _ => TokenMode::Gba { buffer: size(m), decay: Decay::Threshold { tolerance }, lost_tokens },
        });
        Self {
            mode,
            workers,
            servers: 1 + random.below(3) as u32,
            batches: 5 + random.below(40),
            crashes: random.below(3) > 0,
            unacknowledged: 1 + random.below(3) as usize,
        }
    }
}

#[derive(Clone, Debug)]
enum Message {
    Join,
    Pull,
    Report(Batch, Outcome),
    Suspect(Rank),
    ServerAt(GlobalStep),
    Answer(Reply),
    Computed(Vec<GlobalStep>),
    Push(Push<()>),
    Acknowledge(Batch, Outcome),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Node {
    Coordinator,
    /// A rank and its incarnation. Messages to an earlier incarnation are lost.
    Worker(u32, u32),
    Server(u32),
    /// The failure detector.
    Detector,
}

type Checked<T = ()> = Result<T, String>;

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(what()) }
}

/// The whole job under a simulated network. Each connection delivers in order; different
/// connections deliver in any order.
struct World {
    setting: Setting,
    random: Random,
    tokens_bug: Option<Bug>,
    dispatcher: Dispatcher,
    servers: Vec<Box<dyn Buffer>>,
    workers: Vec<PushPullWorker>,
    incarnations: Vec<u32>,
    /// For each rank, the incarnation that gets the coordinator's answers.
    asked_by: BTreeMap<Rank, u32>,
    /// The higher the number, the less often a message of the worker is delivered.
    slowness: Vec<u64>,
    assigned: BTreeMap<(u32, u32, Batch), Assignment>,
    links: BTreeMap<(Node, Node), VecDeque<Message>>,
    stopped: BTreeSet<u32>,
    check: Check,
}

/// The expected state, tracked independently of the state machines.
#[derive(Default)]
struct Check {
    tokens: u64,
    last_token: u64,
    applied: Vec<BTreeSet<Batch>>,
    late: Vec<BTreeSet<Batch>>,
    steps: Vec<u64>,
    staleness: Vec<(u64, u64, u64)>,
    excluded: Vec<u64>,
    flushed: Vec<bool>,
}

impl World {
    fn new(seed: u64, mode: Option<TokenMode>, implementation: Implementation) -> Self {
        let mut random = Random(SplitMix64::new(seed));
        let setting = Setting::draw(&mut random, mode);
        let (mode, workers, servers) = (setting.mode, setting.workers, setting.servers);
        let setup = DispatcherSetup {
            mode,
            workers,
            servers,
            first_step: GlobalStep(0),
            in_flight_limit: 1 + setting.unacknowledged,
        };
        let mut dispatcher = Dispatcher::new(setup, DataList::new(2, 0), RowLedger::default()).unwrap();
        dispatcher.extend_data(setting.batches * 2);
        dispatcher.close_data();
        let buffer = |_| -> Box<dyn Buffer> {
            match implementation {
                Implementation::Real => Box::new(GradientServer::<()>::new(mode, workers, GlobalStep(0), 0)),
                Implementation::Plain(bug) => Box::new(PlainBuffer {
                    m: mode.capacity(workers).get() as usize,
                    tolerance: tolerance(mode),
                    bug,
                    step: 0,
                    pairs: Vec::new(),
                    seen: BTreeSet::new(),
                }),
            }
        };
        let n = servers as usize;
        let check = Check {
            applied: vec![BTreeSet::new(); n],
            late: vec![BTreeSet::new(); n],
            steps: vec![0; n],
            staleness: vec![(0, 0, 0); n],
            excluded: vec![0; n],
            flushed: vec![false; n],
            ..Check::default()
        };
        let mut world = Self {
            tokens_bug: if let Implementation::Plain(bug) = implementation { bug } else { None },
            dispatcher,
            servers: (0..servers).map(buffer).collect(),
            workers: (0..workers).map(|_| PushPullWorker::new(servers, setting.unacknowledged)).collect(),
            incarnations: vec![0; workers as usize],
            asked_by: BTreeMap::new(),
            slowness: (0..workers).map(|_| 1 + random.below(6)).collect(),
            assigned: BTreeMap::new(),
            links: BTreeMap::new(),
            stopped: BTreeSet::new(),
            check,
            setting,
            random,
        };
        (0..workers).for_each(|rank| world.start(rank));
        world
    }

    fn m(&self) -> usize {
        self.setting.mode.capacity(self.setting.workers).get() as usize
    }

    fn send(&mut self, from: Node, to: Node, message: Message) {
        self.links.entry((from, to)).or_default().push_back(message);
    }

    fn node(&self, rank: u32) -> Node {
        Node::Worker(rank, self.incarnations[rank as usize])
    }

    fn start(&mut self, rank: u32) {
        let node = self.node(rank);
        self.stopped.remove(&rank);
        self.send(node, Node::Coordinator, Message::Join);
        let actions = self.workers[rank as usize].start();
        self.carry_out(rank, actions);
    }

    fn carry_out(&mut self, rank: u32, actions: Vec<WorkerAction>) {
        let node = self.node(rank);
        let Node::Worker(_, incarnation) = node else { return };
        for action in actions {
            match action {
                WorkerAction::Pull => self.send(node, Node::Coordinator, Message::Pull),
                WorkerAction::Report(batch, outcome) => {
                    self.send(node, Node::Coordinator, Message::Report(batch, outcome));
                }
                WorkerAction::Compute(assignment) => {
                    self.assigned.insert((rank, incarnation, assignment.batch), assignment);
                    let pulled = self.servers.iter().map(|server| server.step()).collect();
                    self.send(node, node, Message::Computed(pulled));
                }
                WorkerAction::Push(_) => {}
                WorkerAction::Stop => {
                    self.stopped.insert(rank);
                }
            }
        }
    }

    /// Delivers one random message. Sometimes it also crashes or falsely suspects a worker. Returns
    /// `false` if no message is left.
    fn step(&mut self) -> Checked<bool> {
        self.links.retain(|_, queue| !queue.is_empty());
        if self.setting.crashes && self.random.below(40) == 0 {
            let rank = self.random.below(u64::from(self.setting.workers)) as u32;
            if !self.stopped.contains(&rank) {
                if self.random.below(2) == 0 { self.crash(rank) } else { self.suspect(rank) }
            }
        }
        let links: Vec<(Node, Node)> = self.links.iter().filter(|(_, q)| !q.is_empty()).map(|(l, _)| *l).collect();
        if links.is_empty() {
            return Ok(false);
        }
        let mut link = links[self.random.below(links.len() as u64) as usize];
        if let Node::Worker(rank, _) = link.0
            && self.random.below(self.slowness[rank as usize]) > 0
        {
            link = links[self.random.below(links.len() as u64) as usize];
        }
        let message = self.links.get_mut(&link).and_then(VecDeque::pop_front);
        if let Some(message) = message {
            self.deliver(link.0, link.1, message)?;
        }
        Ok(true)
    }

    fn crash(&mut self, rank: u32) {
        let node = self.node(rank);
        self.links.retain(|(_, to), _| *to != node);
        let out: Vec<(Node, Node)> = self.links.keys().filter(|(from, _)| *from == node).copied().collect();
        for link in out {
            let kept = self.random.below(self.links[&link].len() as u64 + 1) as usize;
            self.links.get_mut(&link).unwrap().truncate(kept);
        }
        self.incarnations[rank as usize] += 1;
        if self.random.below(2) == 0 {
            self.suspect(rank);
        }
        self.start(rank);
    }

    fn suspect(&mut self, rank: u32) {
        self.send(Node::Detector, Node::Coordinator, Message::Suspect(Rank(rank)));
    }

    fn deliver(&mut self, from: Node, to: Node, message: Message) -> Checked {
        match (from, to, message) {
            (Node::Worker(rank, incarnation), Node::Coordinator, message) => {
                self.coordinate(Rank(rank), incarnation, message)
            }
            (_, Node::Coordinator, Message::Suspect(rank)) => {
                let answers = self.dispatcher.lose(rank);
                self.answer(answers)
            }
            (Node::Server(server), Node::Coordinator, Message::ServerAt(step)) => {
                let answers = self.dispatcher.server_at(Server(server), step).map_err(|e| e.to_string())?;
                self.answer(answers)
            }
            (from, Node::Server(server), Message::Push(push)) => self.serve(from, server as usize, push),
            (from, Node::Worker(rank, incarnation), message) => {
                if self.incarnations[rank as usize] == incarnation {
                    self.work(from, rank, incarnation, message)
                } else {
                    Ok(())
                }
            }
            _ => Ok(()),
        }
    }

    fn coordinate(&mut self, rank: Rank, incarnation: u32, message: Message) -> Checked {
        let answers = match message {
            Message::Join => {
                self.asked_by.insert(rank, incarnation);
                self.dispatcher.join(rank)
            }
            Message::Pull => {
                // Once the new incarnation has joined, requests over the old connection are not
                // read.
                if self.asked_by.get(&rank) != Some(&incarnation) {
                    return Ok(());
                }
                match self.dispatcher.pull(rank) {
                    Err(DispatchError::UnknownRank { .. }) => {
                        let mut answers = self.dispatcher.join(rank);
                        answers.extend(self.dispatcher.pull(rank).map_err(|e| e.to_string())?);
                        answers
                    }
                    answers => answers.map_err(|e| e.to_string())?,
                }
            }
            Message::Report(batch, outcome) => {
                self.dispatcher.report(rank, batch, outcome).map_err(|e| e.to_string())?
            }
            _ => Vec::new(),
        };
        // A worker that waits while it is suspected finds its connection closed, and pulls again.
        self.answer(answers)
    }

    fn answer(&mut self, answers: Answers) -> Checked {
        if let TokenMode::HopBs { bound } = self.setting.mode {
            let spread = self.dispatcher.version_spread();
            ensure(spread <= bound, || format!("versions are {spread} apart, b1 is {bound}"))?;
        }
        for (rank, mut reply) in answers {
            if let Reply::Work(assignment) = &mut reply {
                self.check_token(assignment)?;
            }
            let incarnation = self.asked_by[&rank];
            self.send(Node::Coordinator, Node::Worker(rank.0, incarnation), Message::Answer(reply));
        }
        Ok(())
    }

    /// Checks tᵢ = ⌊i/M⌋. If lost tokens are replaced, tokens must ascend and not exceed that.
    fn check_token(&mut self, assignment: &mut Assignment) -> Checked {
        let TokenMode::Gba { buffer, lost_tokens, .. } = self.setting.mode else { return Ok(()) };
        let (i, m) = (self.check.tokens, u64::from(buffer.get()));
        assignment.token = match self.tokens_bug {
            Some(Bug::TokensRepeatOnceMore) => Token(i / (m + 1)),
            Some(Bug::TokensStartAtOne) => Token(assignment.token.0 + 1),
            Some(Bug::TokensDescendWithinAStep) => Token(assignment.token.0 + (m - 1 - i % m)),
            Some(Bug::TokensAreBatchNumbers) => Token(i),
            _ => assignment.token,
        };
        let token = assignment.token.0;
        self.check.tokens += 1;
        ensure(token >= self.check.last_token, || format!("token {token} after {}", self.check.last_token))?;
        self.check.last_token = token;
        let exact = token == i / m;
        let allowed = exact || (lost_tokens == LostTokens::Replace && token <= i / m);
        ensure(allowed, || format!("token {i} is {token}, M is {m}"))
    }

    fn serve(&mut self, from: Node, server: usize, push: Push<()>) -> Checked {
        let (batch, m) = (push.batch, self.m());
        let Node::Worker(rank, incarnation) = from else { return Ok(()) };
        let step = self.servers[server].step().0;
        let pushed = self.servers[server].push(push.clone());
        let fill = self.servers[server].fill();
        ensure(fill < m, || format!("{fill} gradients in a buffer of {m}"))?;
        let outcome = match pushed {
            Pushed::Buffered => Outcome::Trained,
            Pushed::Repeated => {
                let known = self.check.applied[server].contains(&batch) || self.check.late[server].contains(&batch);
                ensure(known || fill > 0, || format!("{batch} were refused as repeated, but never applied"))?;
                Outcome::Repeated
            }
            Pushed::Late => {
                let allowed = matches!(self.setting.mode, TokenMode::HopBw { .. }) && push.token.0 < step;
                ensure(allowed, || format!("{batch} of token {} were dropped at step {step}", push.token))?;
                ensure(self.check.late[server].insert(batch), || format!("{batch} were dropped twice"))?;
                Outcome::Dropped
            }
            Pushed::Full(update) => {
                ensure(update.pairs.len() == m, || format!("a step of {} gradients, M is {m}", update.pairs.len()))?;
                self.check_update(server, &update)?;
                Outcome::Trained
            }
        };
        let now = self.servers[server].step();
        if now.0 > step {
            self.send(Node::Server(server as u32), Node::Coordinator, Message::ServerAt(now));
        }
        let node = Node::Worker(rank, incarnation);
        self.send(Node::Server(server as u32), node, Message::Acknowledge(batch, outcome));
        Ok(())
    }

    fn check_update(&mut self, server: usize, update: &Update<()>) -> Checked {
        let (mode, check) = (self.setting.mode, &mut self.check);
        let k = update.step.0;
        ensure(k == check.steps[server], || format!("step {k} is applied where {} is next", check.steps[server]))?;
        ensure(!check.flushed[server], || format!("step {k} is applied after the last"))?;
        check.steps[server] += 1;
        ensure(update.divisor as usize == update.pairs.len(), || "the divisor is not the number of pairs".to_owned())?;
        for Pair { push, weight } in &update.pairs {
            ensure(check.applied[server].insert(push.batch), || format!("{} were applied twice", push.batch))?;
            let stale = k.saturating_sub(push.token.0);
            let excluded = matches!(mode, TokenMode::Gba { .. }) && stale > tolerance(mode);
            let expected = if excluded { 0.0 } else { 1.0 };
            ensure(*weight == expected, || format!("token {} weighs {weight} at step {k} of {mode:?}", push.token))?;
            if let TokenMode::HopBw { .. } = mode {
                ensure(push.token.0 == k, || format!("a gradient of step {} in step {k}", push.token))?;
            }
            let record = &mut check.staleness[server];
            *record = (record.0 + 1, record.1 + stale, record.2.max(stale));
            check.excluded[server] += u64::from(excluded);
        }
        Ok(())
    }

    fn work(&mut self, from: Node, rank: u32, incarnation: u32, message: Message) -> Checked {
        let node = Node::Worker(rank, incarnation);
        let worker = &mut self.workers[rank as usize];
        let actions = match message {
            Message::Answer(reply) => worker.answered(reply),
            Message::Acknowledge(batch, outcome) => {
                let Node::Server(server) = from else { return Ok(()) };
                worker.acknowledged(Server(server), batch, outcome)
            }
            Message::Computed(pulled) => {
                let actions = worker.computed();
                let pushed = actions.as_ref().ok().and_then(|a| a.first().cloned());
                if let Some(WorkerAction::Push(Assignment { batch, token })) = pushed {
                    let known = self.assigned.remove(&(rank, incarnation, batch)).map(|a| a.token);
                    ensure(known == Some(token), || format!("{batch} came back with another token"))?;
                    for (server, pulled_at) in pulled.into_iter().enumerate() {
                        let push = Push { rank: Rank(rank), batch, token, pulled_at, gradient: () };
                        self.send(node, Node::Server(server as u32), Message::Push(push));
                    }
                }
                actions
            }
            _ => return Ok(()),
        };
        let actions = actions.map_err(|e| format!("worker {rank}: {e}"))?;
        self.carry_out(rank, actions);
        Ok(())
    }

    /// Runs until all data is trained. Then flushes the buffers and checks that every batch is
    /// accounted for.
    fn run(mut self) -> Checked {
        for _ in 0..400_000 {
            if self.dispatcher.finished() && self.stopped.len() == self.workers.len() {
                return self.finish();
            }
            if !self.step()? {
                // No message is in flight. A worker may have pulled before it was suspected, so all
                // workers restart.
                if self.dispatcher.waiting() + self.stopped.len() >= self.workers.len() {
                    return Err(format!("training is stuck in {:?}", self.setting));
                }
                (0..self.setting.workers)
                    .filter(|r| !self.stopped.contains(r))
                    .collect::<Vec<_>>()
                    .into_iter()
                    .for_each(|rank| {
                        self.incarnations[rank as usize] += 1;
                        self.start(rank);
                    });
            }
        }
        Err(format!("training does not end in {:?}", self.setting))
    }

    fn finish(mut self) -> Checked {
        while self.step()? {}
        let rows = self.setting.batches * 2;
        ensure(self.dispatcher.needs_flush(), || "nothing to flush at the end".to_owned())?;
        self.dispatcher.start_draining();
        for server in 0..self.servers.len() {
            if let Some(update) = self.servers[server].flush() {
                let (pairs, m) = (update.pairs.len(), self.m());
                ensure(pairs < m, || format!("{pairs} gradients were left in a buffer of {m}"))?;
                self.check_update(server, &update)?;
            }
            self.check.flushed[server] = true;
            let at = self.servers[server].step();
            self.dispatcher.flushed(Server(server as u32), at).map_err(|e| e.to_string())?;
        }
        ensure(self.dispatcher.paused_at().is_some(), || "not paused after the end".to_owned())?;
        self.dispatcher.ledger().prove_boundary(rows).map_err(|e| e.to_string())?;
        for server in 0..self.servers.len() {
            self.check_account(server)?;
        }
        let tokens = self.dispatcher.tokens();
        let gba = matches!(self.setting.mode, TokenMode::Gba { .. });
        ensure(!gba || tokens.issued() == self.check.tokens, || "tokens were miscounted".to_owned())
    }

    fn check_account(&self, server: usize) -> Checked {
        let check = &self.check;
        let (applied, late) = (&check.applied[server], &check.late[server]);
        ensure(applied.is_disjoint(late), || "a dropped batch was applied".to_owned())?;
        let all: BTreeSet<Batch> = (0..self.setting.batches).map(|i| Batch { first_row: i * 2, rows: 2 }).collect();
        let missing = all.difference(&applied.union(late).copied().collect()).count();
        ensure(missing == 0, || format!("server {server} never saw {missing} batches"))?;
        let steps = (applied.len() as u64).div_ceil(self.m() as u64);
        let whole = matches!(self.setting.mode, TokenMode::HopBw { .. }) || check.steps[server] == steps;
        ensure(whole, || format!("{} steps of {} batches", check.steps[server], applied.len()))?;
        if let Some(counts) = self.servers[server].counts() {
            let record = &counts.data_staleness;
            let exact = (record.count, record.sum, record.max) == check.staleness[server];
            ensure(exact, || format!("staleness {record:?} is {:?}", check.staleness[server]))?;
            ensure(counts.excluded == check.excluded[server], || "exclusions were miscounted".to_owned())?;
            ensure(counts.applied == applied.len() as u64, || "applications were miscounted".to_owned())?;
            ensure(counts.late == late.len() as u64, || "drops were miscounted".to_owned())?;
            ensure(record.histogram.iter().sum::<u64>() == record.count, || "the histogram leaks".to_owned())?;
        }
        Ok(())
    }
}

fn tolerance(mode: TokenMode) -> u64 {
    if let Decay::Threshold { tolerance } = mode.decay() { tolerance } else { u64::MAX }
}

#[test]
fn ten_thousand_random_schedules_violate_no_invariant() {
    for seed in 0..10_000 {
        if let Err(violation) = World::new(seed, None, Implementation::Real).run() {
            panic!("seed {seed}: {violation}");
        }
    }
}

#[test]
fn the_plain_buffer_without_a_bug_violates_no_invariant() {
    for seed in 0..500 {
        let mode = gba(1 + (seed % 5) as u32, seed % 4);
        if let Err(violation) = World::new(seed, Some(mode), Implementation::Plain(None)).run() {
            panic!("seed {seed}: {violation}");
        }
    }
}

#[test]
fn the_invariants_catch_every_planted_bug() {
    for bug in BUGS {
        let caught = (0..200u64).filter_map(|seed| {
            let mode = gba(2 + (seed % 4) as u32, seed % 4);
            World::new(seed, Some(mode), Implementation::Plain(Some(bug))).run().err()
        });
        let violations: Vec<String> = caught.collect();
        assert!(violations.len() >= 20, "{bug:?} was caught in {} of 200 schedules", violations.len());
    }
}

// ---- The switch -------------------------------------------------------------------------------

const G: u32 = 8;

/// The `sync` mode. The test simulates no dense workers for it.
const SYNC: RunMode = RunMode { mode: TrainingMode::Sync, workers: 0, local_rows: 1 };

/// A job that switches modes. The test counts the rows that `sync` and each server train,
/// independently of the state machines.
struct Switching {
    run: TrainingRun,
    random: Random,
    servers: Vec<GradientServer<()>>,
    held: BTreeMap<Rank, Assignment>,
    waiting: BTreeSet<Rank>,
    open_steps: Vec<(GlobalStep, Batch)>,
    /// For each server: the number of times that each row was trained.
    trained: Vec<BTreeMap<u64, u32>>,
    last_step: GlobalStep,
}

impl Switching {
    fn new(seed: u64, servers: u32) -> Self {
        let plan = RunPlan { global_rows: G, servers, in_flight_limit: 2 };
        let at = Boundary { step: GlobalStep(0), next_row: 0 };
        let mut run = TrainingRun::new(plan, SYNC, at).unwrap();
        run.extend_data(u64::from(G) * 1200);
        Self {
            run,
            random: Random(SplitMix64::new(seed)),
            servers: (0..servers).map(|_| GradientServer::new(gba(1, 0), 1, GlobalStep(0), 0)).collect(),
            held: BTreeMap::new(),
            waiting: BTreeSet::new(),
            open_steps: Vec::new(),
            trained: vec![BTreeMap::new(); servers as usize],
            last_step: GlobalStep(0),
        }
    }

    fn workers(&self) -> u32 {
        self.run.mode().workers
    }

    fn applied(&self) -> GlobalStep {
        match self.run.mode().mode.dense_home() {
            DenseHome::Workers => self.last_step,
            DenseHome::Servers => self.servers.iter().map(|s| s.step()).min().unwrap(),
        }
    }

    fn train(&mut self, server: usize, batch: Batch) {
        (batch.first_row..batch.end()).for_each(|row| *self.trained[server].entry(row).or_default() += 1);
    }

    fn take(&mut self, answers: Answers) {
        for (rank, reply) in answers {
            self.waiting.remove(&rank);
            if let Reply::Work(assignment) = reply {
                assert_eq!(self.held.insert(rank, assignment), None);
            }
        }
    }

    fn act(&mut self) {
        match self.run.mode().mode.dense_home() {
            DenseHome::Workers => self.act_sync(),
            DenseHome::Servers => self.act_tokens(),
        }
        if self.random.below(50) == 0 {
            self.run = self.run.clone(); // The coordinator restarts from its journal.
        }
        let mut orders = self.run.advance().unwrap();
        if self.random.below(4) == 0 {
            orders = self.run.pending_orders();
        }
        for order in orders {
            self.obey(order);
        }
    }

    fn act_sync(&mut self) {
        if self.random.below(2) == 0
            && self.open_steps.len() < 3
            && let Some((step, batch)) = self.run.next_sync_step().unwrap()
        {
            self.open_steps.push((step, batch));
        } else if self.random.below(5) > 0 && !self.open_steps.is_empty() {
            // With probability 1/5, the step's workers die, and it is trained again.
            let (step, batch) = self.open_steps.remove(0);
            (0..self.servers.len()).for_each(|server| self.train(server, batch));
            self.run.sync_step_applied(step).unwrap();
            self.run.sync_step_applied(step).unwrap();
            self.last_step = step.next();
        }
    }

    fn act_tokens(&mut self) {
        let rank = Rank(self.random.below(u64::from(self.workers())) as u32);
        if matches!(self.run.phase(), SwitchPhase::Moving { .. }) {
            return;
        }
        if let Some(Assignment { batch, token }) = self.held.get(&rank).copied() {
            let dies_before = (self.random.below(8) == 0).then(|| self.random.below(self.servers.len() as u64 + 1));
            let mut outcome = Outcome::Dropped;
            for server in 0..self.servers.len() {
                if dies_before == Some(server as u64) {
                    break;
                }
                outcome = outcome.max(self.push(rank, server, batch, token));
            }
            self.held.remove(&rank);
            let dispatcher = self.run.dispatcher().unwrap();
            let answers = match dies_before {
                Some(_) => dispatcher.join(rank),
                None => dispatcher.report(rank, batch, outcome).unwrap(),
            };
            self.take(answers);
        } else if self.waiting.insert(rank) {
            let answers = self.run.dispatcher().unwrap().pull(rank).unwrap();
            self.take(answers);
        } else if self.random.below(20) == 0 {
            self.waiting.remove(&rank);
            let answers = self.run.dispatcher().unwrap().join(rank);
            self.take(answers);
        }
    }

    fn push(&mut self, rank: Rank, server: usize, batch: Batch, token: Token) -> Outcome {
        let pulled_at = self.servers[server].step();
        let pushed = self.servers[server].push(Push { rank, batch, token, pulled_at, gradient: () }).unwrap();
        let mut answers = Vec::new();
        let outcome = match pushed {
            Pushed::Buffered => Outcome::Trained,
            Pushed::Repeated => Outcome::Repeated,
            Pushed::Late => {
                self.train(server, batch);
                Outcome::Dropped
            }
            Pushed::Full(update) => {
                update.pairs.iter().for_each(|pair| self.train(server, pair.push.batch));
                let step = self.servers[server].step();
                answers = self.run.dispatcher().unwrap().server_at(Server(server as u32), step).unwrap();
                Outcome::Trained
            }
        };
        self.take(answers);
        outcome
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Flush { .. } => panic!("the data does not end here"),
            Order::Publish { server, at, mode } => {
                let workers = mode.workers;
                let mode = mode.mode.tokens().unwrap();
                self.arrive(server, at);
                self.servers[server.0 as usize] = GradientServer::new(mode, workers, at.step, at.next_row);
            }
            Order::ReadBack { server, at } => self.arrive(server, at),
            Order::Start { mode, at } => {
                assert_eq!(self.run.mode(), mode);
                self.last_step = at.step;
                self.held.clear();
                self.waiting.clear();
                for rank in 0..self.workers() {
                    assert_eq!(self.run.dispatcher().unwrap().join(Rank(rank)), []);
                }
            }
        }
        if let Order::Publish { server, .. } | Order::ReadBack { server, .. } = order
            && self.random.below(3) > 0
        {
            // With probability 1/3, the answer is lost, and the order is sent again.
            let orders = self.run.moved(server).unwrap();
            orders.into_iter().for_each(|order| self.obey(order));
        }
    }

    /// Checks a boundary on `server`: every row before it is trained once, no row from it on is
    /// trained, and the buffer is empty.
    fn arrive(&mut self, server: Server, at: Boundary) {
        let server = server.0 as usize;
        assert!(self.held.is_empty() && self.open_steps.is_empty());
        assert!(self.trained[server].values().all(|times| *times == 1));
        assert_eq!(self.trained[server].len() as u64, at.next_row);
        assert!(self.trained[server].keys().next_back().is_none_or(|row| *row < at.next_row));
        assert_eq!(self.servers[server].fill(), 0);
    }
}

fn random_mode(random: &mut Random) -> RunMode {
    let local_rows = [1u32, 2, 4, 8][random.below(4) as usize];
    let workers = 2 + random.below(5) as u32;
    let mode = match random.below(8) {
        0 => TokenMode::Async,
        1 => TokenMode::Bsp { aggregate: size(1 + random.below(5) as u32) },
        2 => TokenMode::HopBs { bound: random.below(3) },
        3 => TokenMode::HopBw { backups: random.below(u64::from(workers)) as u32 },
        4 => return RunMode { mode: TrainingMode::Shadow(shadow::Shadow::default()), workers, local_rows },
        _ => {
            let buffer = BufferSize::of_global_batch(u64::from(G), 1, u64::from(local_rows)).unwrap();
            TokenMode::Gba { buffer, decay: Decay::Threshold { tolerance: 3 }, lost_tokens: LostTokens::Vanish }
        }
    };
    RunMode { mode: TrainingMode::Tokens(mode), workers, local_rows }
}

#[test]
fn twenty_switches_with_random_crashes_leave_the_ledger_exact() {
    for seed in 0..60 {
        let mut job = Switching::new(seed, 1 + (seed % 3) as u32);
        let (mut switches, mut next_switch) = (0, 50u64);
        for action in 0.. {
            assert!(action < 2_000_000, "seed {seed}: stuck in {:?}, {:?}", job.run.mode(), job.run.phase());
            job.act();
            let training = *job.run.phase() == SwitchPhase::Training;
            if training && switches == 20 {
                break;
            }
            if training && (job.applied().0 >= next_switch || job.run.ledger().trained_rows() > 8 * next_switch) {
                let to = if job.run.mode() == SYNC { random_mode(&mut job.random) } else { SYNC };
                job.run.switch_to(to).unwrap();
                assert_eq!(job.run.switch_to(SYNC), Err(SwitchError::UnderWay));
                switches += 1;
                next_switch += 50;
            }
        }
        assert_eq!(job.run.mode(), SYNC);
        let ledger = job.run.ledger();
        assert_eq!(ledger.trained_rows() + ledger.dropped_rows(), job.trained[0].len() as u64, "seed {seed}");
    }
}

#[test]
fn gba_and_sync_count_the_same_steps_over_the_same_rows() {
    for seed in 0..20 {
        let mut job = Switching::new(seed, 2);
        let mut boundaries = 0;
        for turn in 0..200_000u64 {
            job.act();
            if *job.run.phase() != SwitchPhase::Training {
                continue;
            }
            if job.run.ledger().open() == 0 && job.run.mode() == SYNC {
                assert_eq!(job.run.ledger().trained_rows(), job.last_step.0 * u64::from(G));
            }
            if turn % 500 == 499 {
                let buffer = size(G / 2);
                let decay = Decay::Threshold { tolerance: 3 };
                let mode = TokenMode::Gba { buffer, decay, lost_tokens: LostTokens::Replace };
                let gba = RunMode { mode: TrainingMode::Tokens(mode), workers: 3, local_rows: 2 };
                job.run.switch_to(if job.run.mode() == SYNC { gba } else { SYNC }).unwrap();
                boundaries += 1;
            }
            if boundaries == 10 {
                break;
            }
        }
        assert_eq!(boundaries, 10);
    }
}

#[test]
fn a_switch_that_would_change_the_global_batch_is_refused() {
    let plan = RunPlan { global_rows: 100, servers: 1, in_flight_limit: 1 };
    let at = Boundary { step: GlobalStep(0), next_row: 0 };
    let mut run = TrainingRun::new(plan, SYNC, at).unwrap();
    let to = RunMode { mode: TrainingMode::Tokens(gba(3, 3)), workers: 3, local_rows: 33 };
    assert_eq!(
        run.switch_to(to),
        Err(SwitchError::GlobalBatch { gradients: 3, local_rows: 33, global_rows: 100 }),
        "99 rows a step are not 100"
    );
    assert_eq!(*run.phase(), SwitchPhase::Training);
}

#[test]
fn a_switch_at_the_end_of_the_data_flushes_the_last_smaller_step() {
    let plan = RunPlan { global_rows: 4, servers: 2, in_flight_limit: 4 };
    let at = Boundary { step: GlobalStep(10), next_row: 40 };
    let to = RunMode { mode: TrainingMode::Tokens(gba(4, 3)), workers: 1, local_rows: 1 };
    let mut run = TrainingRun::new(plan, to, at).unwrap();
    run.extend_data(6);
    run.close_data();
    assert_eq!(run.pending_orders().len(), 2);
    assert_eq!(run.moved(Server(0)).unwrap(), []);
    assert_eq!(run.moved(Server(1)).unwrap(), [Order::Start { mode: to, at }]);
    let dispatcher = run.dispatcher().unwrap();
    dispatcher.join(Rank(0));
    for _ in 0..6 {
        let assignment = work(&dispatcher.pull(Rank(0)).unwrap());
        dispatcher.report(Rank(0), assignment.batch, Outcome::Trained).unwrap();
    }
    (0..2).for_each(|server| assert_eq!(dispatcher.server_at(Server(server), GlobalStep(11)).unwrap(), []));
    run.switch_to(SYNC).unwrap();
    let flush = [0, 1].map(|server| Order::Flush { server: Server(server) });
    assert_eq!(run.advance().unwrap(), flush);
    for server in 0..2 {
        run.dispatcher().unwrap().flushed(Server(server), GlobalStep(12)).unwrap();
    }
    let end = Boundary { step: GlobalStep(12), next_row: 46 };
    assert_eq!(run.advance().unwrap(), [0, 1].map(|server| Order::ReadBack { server: Server(server), at: end }));
    run.ledger().prove_boundary(46).unwrap();
}
