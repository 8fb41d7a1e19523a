//! Tests of recovery. In modes without a barrier, a server is killed between calls and receives
//! each answered request again. It ends in the same state as a server that lives. In `sync`, a
//! server repeats its lookup replies for the last step after it has applied that step.

mod pooled;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use rectrain_embedding::{Examples, FeatureKey, GroupId, Missing, Slot};
use rectrain_modes::TrainingMode;
use rectrain_modes::des::Partial;
use rectrain_pooling::{PreparedIds, ServerIds, ServerResults, TowerResults};
use rectrain_proto::v1;
use rectrain_wire::ids::{Scratch, UniqueIds};
use rectrain_wire::{Address, Frame, InProcess, InProcessConfig, Peer, Service, Tensor, Transport, WireCounters};
use sha2::{Digest, Sha256};

use super::{ParameterServer, Rows, Shared};
use rectrain_protocol::blocking::{await_task, blocking};
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::examples;
use rectrain_protocol::key_set::KeySet;
use rectrain_protocol::message::{self, Request};
use rectrain_protocol::metrics::{PsMetrics, RoleMetrics};
use rectrain_protocol::plan::{JobPlan, small_plan};

const PARAMETERS: usize = 40;
const BATCHES: u64 = 70;
const ROWS: u32 = 8;

/// One row in each slot, with scores.
const BUDGET: &[&str] = &["spec.features.memory.maxRows=1024"];
/// One feature counts sightings, and the other one draws.
const ADMISSIONS: &[&str] =
    &["spec.features.sparse[0].admission.count=2", "spec.features.sparse[1].admission.probability=0.5"];

fn plan(mode: &str, changes: &[&str]) -> Arc<JobPlan> {
    let mode = format!("spec.training.mode={mode}");
    let usual = [&*mode, "spec.training.localBatchSize=8", "spec.roles.denseWorker.replicas=3"];
    Arc::new(small_plan(&[&usual[..], changes].concat()))
}

/// A server under test, and the steps that its callers know from its replies.
struct Tried {
    plan: Arc<JobPlan>,
    server: Arc<ParameterServer>,
    row_step: u64,
    dense_step: u64,
}

impl Tried {
    fn open(plan: &Arc<JobPlan>, directory: &Path, attempt: Option<u64>) -> Arc<ParameterServer> {
        let rows = Rows::of_attempt(directory, plan, attempt).unwrap();
        assert_eq!(rows.place().is_some(), attempt.is_some(), "it goes on if it may");
        let transport = InProcess::new(InProcessConfig::default(), WireCounters::unregistered(|_| "test").unwrap());
        let metrics = PsMetrics::of(&RoleMetrics::new(Registry::new()).unwrap(), 0);
        Arc::new(ParameterServer::new(plan, 0, rows, Arc::new(transport), metrics).unwrap())
    }

    async fn begin(mode: &str, directory: &Path) -> Self {
        Self::begin_with(mode, &[], directory).await
    }

    async fn begin_with(mode: &str, changes: &[&str], directory: &Path) -> Self {
        let plan = plan(mode, changes);
        let server = Self::open(&plan, directory, None);
        server.serves_at("local://ps-0");
        let optimizer = plan.dense_optimizer;
        let parameters: Vec<f32> = (0..PARAMETERS).map(|value| value as f32 / 8.0).collect();
        let state = vec![0.0; PARAMETERS * optimizer.slots().len()];
        let put = v1::PutPartition { optimizer: optimizer.kind().name().to_owned() };
        server.put_partition(&put, vec![Tensor::from(parameters), Tensor::from(state)]).unwrap();
        server.begin_mode(&v1::BeginMode { mode: mode.to_owned(), attempt: 5, ..v1::BeginMode::default() }).unwrap();
        Self { plan, server, row_step: 0, dense_step: 0 }
    }

    fn is_killed(&mut self, directory: &Path) {
        // The old server is dropped first, so that its files are not open twice.
        let transport = InProcess::new(InProcessConfig::default(), WireCounters::unregistered(|_| "test").unwrap());
        let metrics = PsMetrics::of(&RoleMetrics::new(Registry::new()).unwrap(), 0);
        let rows = Rows::none(&self.plan).unwrap();
        self.server = Arc::new(ParameterServer::new(&self.plan, 0, rows, Arc::new(transport), metrics).unwrap());
        self.server = Self::open(&self.plan, directory, Some(5));
    }

    async fn look_up(&self, keys: &[u64]) {
        let map_epoch = self.server.shared.slots.map().epoch().0;
        let request = v1::Lookup { train: true, map_epoch, ..v1::Lookup::default() };
        let groups = self.server.shared.group_dims().len();
        self.server.look_up(request, vec![Tensor::from(keys.to_vec()); groups]).await.unwrap();
    }

    /// In a mode with a barrier: looks up these keys for `step`. Returns whether the reply says
    /// that the step is applied, and the rows.
    async fn look_up_for(&self, step: u64, keys: &[u64]) -> (bool, Vec<Tensor>) {
        let map_epoch = self.server.shared.slots.map().epoch().0;
        let request = v1::Lookup { step: Some(step), train: true, map_epoch, ..v1::Lookup::default() };
        let groups = self.server.shared.group_dims().len();
        let tensors = vec![Tensor::from(keys.to_vec()); groups];
        let frame = Frame { kind: v1::Lookup::KIND, meta: prost::Message::encode_to_vec(&request).into(), tensors };
        let reply = self.server.service().call(&Peer::new("test", 0), frame).await.unwrap();
        let told: v1::LookupReply = prost::Message::decode(reply.meta).unwrap();
        (told.is_applied, reply.tensors)
    }

    /// In `sync`: looks up the keys of a piece, so that the reply may leave keys out. `None` asks
    /// for keys that were left out.
    async fn look_up_part(&self, step: u64, piece: Option<u32>, keys: &[u64]) -> (v1::LookupReply, Vec<Tensor>) {
        let map_epoch = self.server.shared.slots.map().epoch().0;
        let request = v1::Lookup { step: Some(step), train: true, map_epoch, piece, ..v1::Lookup::default() };
        let groups = self.server.shared.group_dims().len();
        let tensors = vec![Tensor::from(keys.to_vec()); groups];
        let frame = Frame { kind: v1::Lookup::KIND, meta: prost::Message::encode_to_vec(&request).into(), tensors };
        let reply = self.server.service().call(&Peer::new("test", 0), frame).await.unwrap();
        (prost::Message::decode(reply.meta).unwrap(), reply.tensors)
    }

    /// In a mode with a barrier: pushes the gradients of a piece of `step`.
    async fn push_piece(&self, step: u64, piece: u32, keys: &[u64]) {
        let tensors = self.gradients(keys, |_| step + u64::from(piece));
        let map_epoch = self.server.shared.slots.map().epoch().0;
        let update = v1::Update { step, piece, map_epoch, moment: 86_400 * (step + 1), ..v1::Update::default() };
        self.server.update(update, tensors).await.unwrap();
    }

    async fn push_rows(&mut self, push: &v1::TokenPush, keys: &[u64]) -> i32 {
        let push = v1::TokenPush { pulled_at: vec![self.row_step.min(push.pulled_at[0])], ..push.clone() };
        let tensors = self.gradients(keys, |dim| push.first_row + dim as u64);
        let map_epoch = self.server.shared.slots.map().epoch().0;
        let moment = 86_400 * (push.token + 1);
        let update = v1::Update { push: Some(push), map_epoch, moment, ..v1::Update::default() };
        let reply = self.server.update(update, tensors).await.unwrap();
        let reply: v1::UpdateReply = prost::Message::decode(reply.meta).unwrap();
        self.row_step = reply.step;
        reply.outcome
    }

    /// The tensors of an update of these keys in every group, with gradients from these seeds. Each
    /// key has one example. It is positive for every third key.
    fn gradients(&self, keys: &[u64], seed: impl Fn(usize) -> u64) -> Vec<Tensor> {
        let mut tensors = Vec::new();
        for (dim, counted) in self.plan.layout.group_dims.iter().zip(self.plan.counts_examples()) {
            tensors.push(Tensor::from(keys.to_vec()));
            tensors.push(Tensor::from(numbers(seed(*dim), keys.len() * dim)));
            if counted {
                let example = |key: &u64| match (key >> 52).is_multiple_of(3) {
                    true => Examples { positive: 1, negative: 0 },
                    false => Examples { positive: 0, negative: 1 },
                };
                tensors.push(Tensor::from(examples::encode(&keys.iter().map(example).collect::<Vec<_>>())));
            }
        }
        tensors
    }

    async fn push_dense(&mut self, push: &v1::TokenPush) -> i32 {
        let push = v1::TokenPush { pulled_at: vec![self.dense_step.min(push.pulled_at[0])], ..push.clone() };
        let gradient = Tensor::from(numbers(push.first_row, PARAMETERS));
        let reply =
            self.server.push_dense(v1::PushDense { push: Some(push), piece: None }, vec![gradient]).await.unwrap();
        let reply: v1::PushReply = prost::Message::decode(reply.meta).unwrap();
        self.dense_step = reply.step;
        reply.outcome
    }

    /// In `shadow`: exchanges a fragment of a replica, or in a last exchange all of it and its
    /// optimizer state, of pseudo-random numbers. Returns the copy of the reply.
    async fn exchange(&self, exchange: v1::Exchange) -> Vec<f32> {
        self.try_exchange(exchange).await.unwrap()
    }

    /// As [`Self::exchange`]. The error is the fragment that the server waits for.
    async fn try_exchange(&self, exchange: v1::Exchange) -> Result<Vec<f32>, u32> {
        let own = self.part(&exchange);
        let mut tensors = vec![Tensor::from(numbers(exchange.number, PARAMETERS)[own].to_vec())];
        if exchange.last {
            tensors.push(Tensor::from(self.replica_state(exchange.number)));
        }
        let reply = self.server.exchange(exchange, tensors).await.unwrap();
        let exchanged: v1::Exchanged = prost::Message::decode(reply.meta).unwrap();
        if let Some(other) = exchanged.other_fragment {
            assert!(reply.tensors.is_empty());
            return Err(other);
        }
        let [copy] = message::take("exchange", reply.tensors).unwrap();
        Ok(copy.expect_f32("copy").unwrap())
    }

    /// The parameters that an exchange moves.
    fn part(&self, exchange: &v1::Exchange) -> std::ops::Range<usize> {
        let Some(TrainingMode::Shadow(shadow)) = self.plan.mode_named("shadow") else { panic!("there is no shadow") };
        let (fragment, count) = (exchange.fragment as usize, shadow.fragments.count() as usize);
        if exchange.last { 0..PARAMETERS } else { PARAMETERS * fragment / count..PARAMETERS * (fragment + 1) / count }
    }

    /// The dense parameters of the server.
    async fn parameters(&self) -> Vec<f32> {
        let partition = self.server.get_partition(v1::GetPartition { state: false, before: None }).await.unwrap();
        let [parameters] = message::take("get_partition", partition.tensors).unwrap();
        parameters.expect_f32("parameters").unwrap()
    }

    fn replica_state(&self, number: u64) -> Vec<f32> {
        numbers(number + 1000, PARAMETERS * self.plan.dense_optimizer.slots().len())
    }

    /// The observable state except for memory use. It has a digest of the slots, a digest of the
    /// parameters and optimizer state, the number of rows, and the applied counts.
    async fn standing(&self) -> (Vec<u8>, Vec<u8>, u64, v1::Applied) {
        let digest = self.server.digest().await.unwrap();
        let partition = self.server.get_partition(v1::GetPartition { state: true, before: None }).await.unwrap();
        let [parameters, state] = message::take("get_partition", partition.tensors).unwrap();
        let [slots] = message::take("digest", digest.tensors).unwrap();
        let digests: v1::StoreDigests = prost::Message::decode(digest.meta).unwrap();
        let dense = [parameters, state].map(|numbers| numbers.expect_f32("numbers").unwrap()).concat();
        let slots = Sha256::digest(slots.expect_u8("digests").unwrap());
        let dense = Sha256::digest(bytemuck::cast_slice(&dense));
        (slots.to_vec(), dense.to_vec(), digests.rows, digests.applied.unwrap())
    }
}

/// The parts of a server in this mode that its half works on.
pub(crate) async fn shared_of(mode: &str, directory: &Path) -> Arc<Shared> {
    Arc::clone(&Tried::begin(mode, directory).await.server.shared)
}

/// Pseudo-random numbers in [-0.5, 0.5), determined by the seed.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_add(7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// The push and the keys of a batch. Some workers are late by several steps.
fn batch(number: u64) -> (v1::TokenPush, Vec<u64>) {
    let draws = numbers(number, 14);
    let mut keys: Vec<u64> = draws.iter().map(|draw| FeatureKey((draw.abs() * 60.0) as u64 + 1).0 << 52).collect();
    keys.sort_unstable();
    keys.dedup();
    let late = if draws[0] > 0.3 { 6 } else { 0 };
    let token = (number / 3).saturating_sub(late);
    let push = v1::TokenPush {
        rank: (number % 3) as u32,
        first_row: number * u64::from(ROWS),
        rows: ROWS,
        token,
        oldest_token: (number / 3).saturating_sub(6),
        pulled_at: vec![token],
    };
    (push, keys)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_killed_between_calls_ends_like_one_that_lives() {
    for mode in ["gba", "hopBw", "async", "bsp", "hopBs"] {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let mut lives = Tried::begin(mode, folders[0].path()).await;
        let mut dies = Tried::begin(mode, folders[1].path()).await;
        let directory = folders[1].path();
        let dice = numbers(3, 4 * BATCHES as usize);
        for number in 0..BATCHES {
            let dies_before = |call: usize| dice[4 * number as usize + call] > 0.2;
            let (push, keys) = batch(number);
            for server in [&lives, &dies] {
                server.look_up(&keys).await;
            }
            if dies_before(0) {
                dies.is_killed(directory);
            }
            let outcome = lives.push_rows(&push, &keys).await;
            assert_eq!(dies.push_rows(&push, &keys).await, outcome, "{mode} {number}");
            if dies_before(1) {
                dies.is_killed(directory);
                // The caller did not receive the reply, so it retries.
                assert_eq!(dies.push_rows(&push, &keys).await, outcome, "{mode} {number}");
            }
            if dies_before(2) {
                dies.is_killed(directory);
            }
            let outcome = lives.push_dense(&push).await;
            assert_eq!(dies.push_dense(&push).await, outcome, "{mode} {number}");
            if dies_before(3) {
                dies.is_killed(directory);
                assert_eq!(dies.push_dense(&push).await, outcome, "{mode} {number}");
            }
            assert_eq!((lives.row_step, lives.dense_step), (dies.row_step, dies.dense_step));
        }
        assert_eq!(lives.standing().await, dies.standing().await, "{mode}");
        dies.is_killed(directory);
        for server in [&lives, &dies, &dies] {
            server.server.flush().await.unwrap();
        }
        assert_eq!(lives.standing().await, dies.standing().await, "{mode}");
        dies.is_killed(directory);
        let (last, known) = (dies.standing().await, lives.standing().await);
        assert_eq!(last, known, "{mode}");
        let applied = last.3;
        assert_eq!(applied.gradients + applied.late, BATCHES, "{mode}");
        assert!(applied.staleness_max > 0 || mode == "hopBw" && applied.late > 0, "{mode}: {applied:?}");
        // Applied pushes have no files.
        for folder in ["row-pushes", "dense-pushes"] {
            assert_eq!(std::fs::read_dir(directory.join(folder)).unwrap().count(), 0, "{mode}");
        }
        assert!(std::fs::read_dir(directory.join("row-steps")).unwrap().count() < 12, "{mode}");
    }
}

/// With pulled pieces: three pieces of 8 rows a step.
const PULLED: &[&str] = &["spec.training.sync.pieces=pulled", "spec.training.globalBatchSize=24"];

impl Tried {
    /// With pulled pieces: pushes the dense gradient of a piece.
    async fn push_dense_piece(&self, step: u64, piece: u32) {
        let gradient = Tensor::from(numbers(7 * step + u64::from(piece), PARAMETERS));
        let push = v1::PushDense { push: None, piece: Some(v1::StepPiece { step, piece }) };
        self.server.push_dense(push, vec![gradient]).await.unwrap();
    }

    /// With pulled pieces: the parameters before a step, if the server has them.
    async fn read_before(&self, step: u64) -> Option<Vec<f32>> {
        let read = v1::GetPartition { state: false, before: Some(step) };
        let reply = self.server.get_partition(read).await.unwrap();
        let told: v1::Partition = prost::Message::decode(reply.meta).unwrap();
        let values = reply.tensors.into_iter().next().map(|own| own.expect_f32("parameters").unwrap());
        assert_eq!(told.is_applied, values.is_none());
        values
    }
}

/// The pieces come in another order, and twice. The server is killed between any two calls.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_of_pulled_pieces_ends_like_one_that_lives() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let lives = Tried::begin_with("sync", PULLED, folders[0].path()).await;
    let mut dies = Tried::begin_with("sync", PULLED, folders[1].path()).await;
    assert_eq!(lives.plan.pieces(), 3);
    let dice = numbers(5, 600);
    let mut before = Vec::new();
    for step in 0..12 {
        before.push(lives.read_before(step).await.unwrap());
        let keys = batch(step).1;
        for server in [&lives, &dies] {
            server.look_up_for(step, &keys).await;
        }
        for piece in 0..3 {
            lives.push_piece(step, piece, &keys).await;
            lives.push_dense_piece(step, piece).await;
        }
        let die = |call: u32| dice[(step * 40) as usize + call as usize];
        let first = (die(20).abs() * 6.0) as u32 % 3;
        for (call, piece) in
            [first, first + 1, first, first + 2, first + 1].map(|piece| piece % 3).into_iter().enumerate()
        {
            dies.push_piece(step, piece, &keys).await;
            if die(2 * call as u32) > 0.0 {
                dies.is_killed(folders[1].path());
                dies.server.finish_recovery().await.unwrap();
            }
            dies.push_dense_piece(step, piece).await;
            if die(2 * call as u32 + 1) > 0.0 {
                dies.is_killed(folders[1].path());
                dies.server.finish_recovery().await.unwrap();
            }
        }
        for server in [&lives, &dies] {
            assert_eq!(server.read_before(step).await.as_ref(), before.last(), "step {step}: the copy");
            let earlier = step.checked_sub(1);
            if let Some(earlier) = earlier {
                assert_eq!(server.read_before(earlier).await, None, "step {step}");
            }
        }
    }
    assert!(before.windows(2).all(|pair| pair[0] != pair[1]), "each step changes the parameters");
    assert_eq!(lives.standing().await, dies.standing().await);
    for folder in ["gradients", "dense-pieces"] {
        // A repetition after its step stays until the next step.
        assert!(std::fs::read_dir(folders[1].path().join(folder)).unwrap().count() <= 2, "{folder}");
    }
}

/// The optimizer gets the sum in the tree over the numbers of the pieces, each once.
#[tokio::test(flavor = "multi_thread")]
async fn pulled_pieces_are_applied_as_the_sum_of_their_tree() {
    let folder = tempfile::tempdir().unwrap();
    let sgd = ["spec.training.optimizer.dense.kind=sgd", "spec.training.optimizer.dense.learningRate=1"];
    let tried = Tried::begin_with("sync", &[PULLED, &sgd[..]].concat(), folder.path()).await;
    let first = tried.read_before(0).await.unwrap();
    for piece in [2, 0, 0, 1] {
        tried.push_dense_piece(0, piece).await;
    }
    let [left, right, last] = [0, 1, 2].map(|piece| numbers(piece, PARAMETERS));
    let expected = (0..PARAMETERS).map(|at| first[at] - ((left[at] + right[at]) + last[at]));
    assert_eq!(tried.read_before(1).await.unwrap(), expected.collect::<Vec<_>>());
    // A reader before a later step waits.
    let waits = tokio::time::timeout(Duration::from_millis(50), tried.read_before(2)).await;
    assert!(waits.is_err());
    let early = v1::PushDense { push: None, piece: Some(v1::StepPiece { step: 2, piece: 0 }) };
    let gradient = || vec![Tensor::from(numbers(0, PARAMETERS))];
    let error = tried.server.push_dense(early.clone(), gradient()).await.err().unwrap().to_string();
    assert!(error.contains("expected no piece of a later step"), "{error}");
    let other = tempfile::tempdir().unwrap();
    let fixed = Tried::begin("sync", other.path()).await;
    let error = fixed.server.push_dense(early, gradient()).await.err().unwrap().to_string();
    assert!(error.contains("no pulled pieces"), "{error}");
}

/// A replacement of the server also knows the exchanges before: a repeated one moves nothing.
#[tokio::test(flavor = "multi_thread")]
async fn in_shadow_a_server_killed_between_calls_ends_like_one_that_lives() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let mut lives = Tried::begin("shadow", folders[0].path()).await;
    let mut dies = Tried::begin("shadow", folders[1].path()).await;
    for number in 0..BATCHES {
        let (push, keys) = batch(number);
        for server in [&lives, &dies] {
            server.look_up(&keys).await;
        }
        let outcome = lives.push_rows(&push, &keys).await;
        assert_eq!(dies.push_rows(&push, &keys).await, outcome, "{number}");
        // Each order ends with the last exchanges of all three ranks.
        let exchange = v1::Exchange {
            rank: push.rank,
            order: number / 10,
            number,
            last: number % 10 >= 7,
            caller: 7,
            workers: 3,
            ..v1::Exchange::default()
        };
        let copy = lives.exchange(exchange).await;
        assert_eq!(dies.exchange(exchange).await, copy, "{number}");
        if number % 3 == 0 {
            dies.is_killed(folders[1].path());
            assert_eq!(dies.push_rows(&push, &keys).await, outcome, "{number}");
            assert_eq!(dies.exchange(exchange).await, copy, "{number}: it did not receive the reply");
        }
    }
    assert_eq!(lives.standing().await, dies.standing().await);
    dies.is_killed(folders[1].path());
    for server in [&lives, &dies] {
        server.server.flush().await.unwrap();
    }
    let (last, known) = (dies.standing().await, lives.standing().await);
    assert_eq!(last, known);
    assert_eq!(last.3.gradients, 0, "no dense gradient travels");
}

/// ShadowSync §3.3, algorithm 2, first line. The state of the copy is the mean of the states that
/// the workers hand over at the end of an order.
#[tokio::test(flavor = "multi_thread")]
async fn in_shadow_the_copy_moves_towards_each_replica() {
    let folder = tempfile::tempdir().unwrap();
    let tried = Tried::begin_with("shadow", &["spec.training.shadow.alpha=0.3"], folder.path()).await;
    let mut copy: Vec<f64> = (0..PARAMETERS).map(|value| value as f64 / 8.0).collect();
    let mut sum = vec![0.0; tried.replica_state(0).len()];
    let is_close = |found: &[f32], expected: &[f64]| {
        found.len() == expected.len()
            && found.iter().zip(expected).all(|(found, expected)| (f64::from(*found) - expected).abs() < 1e-5)
    };
    for number in 0..6_u64 {
        let exchange = v1::Exchange {
            rank: number as u32 % 3,
            order: 1,
            number,
            last: number >= 3,
            caller: 7,
            workers: 3,
            ..v1::Exchange::default()
        };
        for (copy, own) in copy.iter_mut().zip(numbers(number, PARAMETERS)) {
            *copy = 0.7 * *copy + 0.3 * f64::from(own);
        }
        let found = tried.exchange(exchange).await;
        assert!(is_close(&found, &copy), "{number}: {found:?}, not {copy:?}");
        assert_eq!(tried.exchange(exchange).await, found, "a repeated exchange moves nothing");
        if exchange.last {
            sum.iter_mut().zip(tried.replica_state(number)).for_each(|(sum, own)| *sum += f64::from(own));
        }
    }
    let partition = tried.server.get_partition(v1::GetPartition { state: true, before: None }).await.unwrap();
    let [parameters, state] = message::take("get_partition", partition.tensors).unwrap();
    let mean: Vec<f64> = sum.iter().map(|sum| sum / 3.0).collect();
    assert!(is_close(&parameters.expect_f32("parameters").unwrap(), &copy), "evaluations read the copy");
    assert!(is_close(&state.expect_f32("state").unwrap(), &mean));
    // The replacement of rank 2 counts its exchanges anew.
    let last =
        v1::Exchange { rank: 2, order: 1, number: 5, last: true, caller: 7, workers: 3, ..v1::Exchange::default() };
    let before = tried.exchange(last).await;
    assert!(is_close(&before, &copy), "it was the last exchange of rank 2");
    assert_ne!(tried.exchange(v1::Exchange { caller: 8, ..last }).await, before);
}

/// The replies to a round of ranks 0 to 2 in an order. `first` is the number of rank 0's exchange.
async fn round(tried: &Tried, order: u64, first: u64, last: [bool; 3]) -> Vec<Vec<f32>> {
    round_of(tried, order, 0, first, last).await
}

/// As [`round`], of this fragment.
async fn round_of(tried: &Tried, order: u64, fragment: u32, first: u64, last: [bool; 3]) -> Vec<Vec<f32>> {
    let exchanges = (0..3_u32).map(|rank| v1::Exchange {
        rank,
        order,
        number: first + u64::from(rank),
        last: last[rank as usize],
        caller: 7,
        workers: 3,
        fragment,
        base: 0,
    });
    futures::future::join_all(exchanges.map(|exchange| tried.exchange(exchange))).await
}

/// ShadowSync §3.3, algorithm 3, second line.
#[tokio::test(flavor = "multi_thread")]
async fn in_shadow_ma_the_copy_is_the_mean_of_each_round() {
    let folder = tempfile::tempdir().unwrap();
    let tried = Tried::begin_with("shadow", &["spec.training.shadow.algorithm=ma"], folder.path()).await;
    for number in 0..6_u64 {
        let replies = round(&tried, 1, 3 * number, [number == 5; 3]).await;
        for (place, found) in replies[0].iter().enumerate() {
            let sum: f64 = (0..3).map(|rank| f64::from(numbers(3 * number + rank, PARAMETERS)[place])).sum();
            assert!((f64::from(*found) - sum / 3.0).abs() < 1e-6, "{number}, {place}: {found}, not {}", sum / 3.0);
        }
        assert!(replies.iter().all(|reply| *reply == replies[0]), "{number}: one mean for all");
        let again = v1::Exchange {
            rank: 1,
            order: 1,
            number: 3 * number + 1,
            last: false,
            caller: 7,
            workers: 3,
            ..v1::Exchange::default()
        };
        assert_eq!(tried.exchange(again).await, replies[1], "a repeated exchange joins no round");
    }
    let partition = tried.server.get_partition(v1::GetPartition { state: true, before: None }).await.unwrap();
    let [_, state] = message::take("get_partition", partition.tensors).unwrap();
    let states = [15, 16, 17].map(|number| tried.replica_state(number));
    for (place, found) in state.expect_f32("state").unwrap().iter().enumerate() {
        let mean = states.iter().map(|state| f64::from(state[place])).sum::<f64>() / 3.0;
        assert!((f64::from(*found) - mean).abs() < 1e-6, "{found}, not {mean}");
    }
}

/// A replacement knows the block momentum, and the replicas of workers that have ended the order.
#[tokio::test(flavor = "multi_thread")]
async fn in_shadow_bmuf_a_server_killed_between_rounds_ends_like_one_that_lives() {
    for fragments in [1, 2] {
        ends_alike_between_rounds(fragments).await;
    }
}

async fn ends_alike_between_rounds(fragments: u64) {
    let changes = [
        "algorithm=bmuf".to_owned(),
        "momentum=0.9".to_owned(),
        "nesterov=true".to_owned(),
        format!("fragments={fragments}"),
    ];
    let changes = changes.map(|set| format!("spec.training.shadow.{set}"));
    let changes: Vec<&str> = changes.iter().map(String::as_str).collect();
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let lives = Tried::begin_with("shadow", &changes, folders[0].path()).await;
    let mut dies = Tried::begin_with("shadow", &changes, folders[1].path()).await;
    for number in 0..12_u64 {
        // Rank 2 ends each order one round before the others.
        let (order, place) = (1 + number / 4, number % 4);
        if place < 3 {
            let (last, fragment) = ([false, false, place == 2], (place % fragments) as u32);
            let before = lives.parameters().await;
            let copies = round_of(&lives, order, fragment, 3 * number, last).await;
            assert_eq!(round_of(&dies, order, fragment, 3 * number, last).await, copies, "{number}");
            dies.is_killed(folders[1].path());
            let again = round_of(&dies, order, fragment, 3 * number, last).await;
            assert_eq!(again, copies, "{number}: no reply was received");
            let other = (fragment + 1) % fragments as u32;
            if other != fragment {
                let own = lives.part(&v1::Exchange { fragment: other, ..v1::Exchange::default() });
                assert_eq!(lives.parameters().await[own.clone()], before[own], "{number}: the other fragment stays");
            }
        } else {
            let ends = |rank: u32| {
                let number = 3 * number + u64::from(rank);
                v1::Exchange { rank, order, number, last: true, caller: 7, workers: 3, ..v1::Exchange::default() }
            };
            let copies = tokio::join!(lives.exchange(ends(0)), lives.exchange(ends(1)));
            assert_eq!(tokio::join!(dies.exchange(ends(0)), dies.exchange(ends(1))), copies, "{number}");
            dies.is_killed(folders[1].path());
        }
    }
    assert_eq!(lives.standing().await, dies.standing().await);
}

/// A pause keeps the block momentum. Another mode between ends it.
#[tokio::test(flavor = "multi_thread")]
async fn block_momentum_outlives_a_pause_and_no_other_mode() {
    let changes = ["algorithm=bmuf", "momentum=0.9", "eta=0.5"].map(|set| format!("spec.training.shadow.{set}"));
    let changes: Vec<&str> = changes.iter().map(String::as_str).collect();
    let mean = |first: u64, place: usize| {
        (first..first + 3).map(|number| f64::from(numbers(number, PARAMETERS)[place])).sum::<f64>() / 3.0
    };
    for (modes, momentum) in [(&["shadow"][..], 0.9), (&["gba", "shadow"][..], 0.0)] {
        let folder = tempfile::tempdir().unwrap();
        let mut tried = Tried::begin_with("shadow", &changes, folder.path()).await;
        round(&tried, 1, 0, [true; 3]).await;
        for mode in modes {
            let (mode, step, first_row) = ((*mode).to_owned(), 3, 72);
            let begin = v1::BeginMode { mode, step, first_row, attempt: 5, ..v1::BeginMode::default() };
            tried.server.begin_mode(&begin).unwrap();
        }
        tried.is_killed(folder.path());
        let copies = round(&tried, 2, 3, [false; 3]).await;
        for (place, found) in copies[0].iter().enumerate() {
            let first = place as f64 / 8.0;
            let velocity = mean(0, place) - first;
            let copy = first + 0.5 * velocity;
            let expected = copy + 0.5 * (momentum * velocity + mean(3, place) - copy);
            assert!((f64::from(*found) - expected).abs() < 1e-5, "{modes:?}, {place}: {found}, not {expected}");
        }
    }
}

/// Elastic averaging of fragments: an exchange moves its own, and replies with it.
#[tokio::test(flavor = "multi_thread")]
async fn in_shadow_an_exchange_moves_its_fragment_only() {
    let folder = tempfile::tempdir().unwrap();
    let changes = ["spec.training.shadow.alpha=0.3", "spec.training.shadow.fragments=3"];
    let tried = Tried::begin_with("shadow", &changes, folder.path()).await;
    let mut copy: Vec<f64> = (0..PARAMETERS).map(|value| value as f64 / 8.0).collect();
    let parts = [0..13, 13..26, 26..40];
    for number in 0..7_u64 {
        let (fragment, last) = ((number % 3) as u32, number == 6);
        let exchange = v1::Exchange { rank: 0, order: 1, number, last, caller: 7, workers: 1, fragment, base: 0 };
        let own = if last { 0..PARAMETERS } else { parts[fragment as usize].clone() };
        for place in own.clone() {
            copy[place] = 0.7 * copy[place] + 0.3 * f64::from(numbers(number, PARAMETERS)[place]);
        }
        let found = tried.exchange(exchange).await;
        assert_eq!(found, tried.parameters().await[own], "{number}: the reply has the same part");
        for (found, expected) in tried.parameters().await.iter().zip(&copy) {
            assert!((f64::from(*found) - expected).abs() < 1e-5, "{number}: {found}, not {expected}");
        }
    }
}

/// Two workers end an order. In `easgd` the server is killed after the first of them.
#[tokio::test(flavor = "multi_thread")]
async fn in_shadow_the_last_exchange_of_all_workers_makes_the_output_model() {
    let (own, other) = (numbers(1, PARAMETERS), numbers(2, PARAMETERS));
    let mean: Vec<f32> = own.iter().zip(&other).map(|(own, other)| f32::midpoint(*own, *other)).collect();
    for (algorithm, rule, expected) in
        [("easgd", "mean", &mean), ("easgd", "first", &own), ("ma", "mean", &mean), ("ma", "first", &own)]
    {
        let folder = tempfile::tempdir().unwrap();
        let algorithm_is = format!("spec.training.shadow.algorithm={algorithm}");
        let rule_is = format!("spec.training.shadow.outputModel={rule}");
        let mut tried = Tried::begin_with("shadow", &[&algorithm_is, &rule_is], folder.path()).await;
        let last = |rank, number| v1::Exchange {
            rank,
            order: 1,
            number,
            last: true,
            caller: 7,
            workers: 2,
            ..v1::Exchange::default()
        };
        if algorithm == "easgd" {
            tried.exchange(last(1, 2)).await;
            assert_ne!(&tried.parameters().await, expected, "rank 0 still trains");
            tried.is_killed(folder.path());
            tried.exchange(last(0, 1)).await;
        } else {
            tokio::join!(tried.exchange(last(1, 2)), tried.exchange(last(0, 1)));
        }
        for (place, (found, expected)) in tried.parameters().await.iter().zip(expected).enumerate() {
            assert!((found - expected).abs() < 1e-6, "{algorithm}, {rule}, {place}: {found}, not {expected}");
        }
    }
}

/// Rank 1 missed the round of fragment 0. The next round waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn in_shadow_ma_a_late_worker_is_told_the_fragment() {
    let folder = tempfile::tempdir().unwrap();
    let changes = ["spec.training.shadow.algorithm=ma", "spec.training.shadow.fragments=2"];
    let mut tried = Tried::begin_with("shadow", &changes, folder.path()).await;
    let exchange = |rank, number, fragment| v1::Exchange {
        rank,
        order: 1,
        number,
        caller: 7,
        workers: 1,
        fragment,
        ..v1::Exchange::default()
    };
    assert_eq!(tried.exchange(exchange(0, 1, 0)).await, numbers(1, PARAMETERS)[..20]);
    let before = tried.parameters().await;
    assert_eq!(tried.try_exchange(exchange(1, 1, 0)).await, Err(1));
    assert_eq!(tried.parameters().await, before, "the copy has not moved");
    // A replacement of the server goes on with the same fragment.
    tried.is_killed(folder.path());
    assert_eq!(tried.try_exchange(exchange(1, 2, 0)).await, Err(1));
    let (one, other) = tokio::join!(tried.exchange(exchange(0, 2, 1)), tried.exchange(exchange(1, 3, 1)));
    assert_eq!(one, other);
    let (first, second) = (numbers(2, PARAMETERS), numbers(3, PARAMETERS));
    for (place, found) in one.iter().enumerate() {
        let mean = f32::midpoint(first[20 + place], second[20 + place]);
        assert!((found - mean).abs() < 1e-6, "{place}: {found}, not {mean}");
    }
    let wrong = exchange(0, 4, 2);
    let tensors = vec![Tensor::from(vec![0.0_f32; 20])];
    let error = tried.server.exchange(wrong, tensors).await.err().unwrap().to_string();
    assert!(error.contains("one of 2 fragments") && error.contains("fragment 2 came"), "{error}");
}

/// Numbers rounded to bf16: the upper half of their bits, to the nearest, ties to even.
fn bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// The base is the last one of the worker's fragment. A replacement of the server knows none.
#[tokio::test(flavor = "multi_thread")]
async fn in_shadow_differences_travel_as_bf16_from_a_base_of_both() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["alpha=0.3", "fragments=2", "wirePrecision=bf16"];
    let settings = settings.map(|setting| format!("spec.training.shadow.{setting}"));
    let mut tried = Tried::begin_with("shadow", &settings.each_ref().map(String::as_str), folder.path()).await;
    let (mut base, mut base_number) = (Vec::new(), 0);
    for number in 1..6_u64 {
        if number == 4 {
            tried.is_killed(folder.path());
        }
        let exchange = |base| v1::Exchange {
            order: 1,
            number,
            caller: 7,
            workers: 1,
            fragment: 1,
            base,
            ..v1::Exchange::default()
        };
        let replica = numbers(number, PARAMETERS)[20..].to_vec();
        let copy = tried.parameters().await;
        let mut sent = Tensor::from(replica.clone());
        if base_number == 0 {
            base = replica;
        } else {
            let difference: Vec<f32> = replica.iter().zip(&base).map(|(own, base)| bf16(own - base)).collect();
            base.iter_mut().zip(&difference).for_each(|(base, difference)| *base += difference);
            sent = Tensor::from(difference.iter().map(|value| (value.to_bits() >> 16) as u16).collect::<Vec<_>>());
            assert_eq!(sent.byte_len(), 2 * 20);
        }
        let reply = tried.server.exchange(exchange(base_number), vec![sent]).await.unwrap();
        let exchanged: v1::Exchanged = prost::Message::decode(reply.meta).unwrap();
        if exchanged.lacks_base {
            assert!(number == 4 && reply.tensors.is_empty());
            assert_eq!(tried.parameters().await, copy, "the copy has not moved");
            base_number = 0;
            continue;
        }
        assert_ne!(number, 4, "the replacement knows no base");
        let [answer] = message::take("exchange", reply.tensors).unwrap();
        let answer = answer.expect_u16("difference").unwrap();
        let after = tried.parameters().await;
        assert_eq!(after[..20], copy[..20], "{number}: the other fragment stays");
        for place in 0..20 {
            let expected = copy[20 + place] + 0.3 * (base[place] - copy[20 + place]);
            assert_eq!(after[20 + place], expected, "{number}, {place}: the copy moves towards the estimate");
            let difference = bf16(expected - base[place]);
            assert_eq!(u32::from(answer[place]) << 16, difference.to_bits(), "{number}, {place}");
            base[place] += difference;
        }
        base_number = exchanged.base;
        assert_ne!(base_number, 0);
    }
    let wrong = v1::Exchange {
        order: 1,
        number: 9,
        caller: 7,
        workers: 1,
        fragment: 1,
        base: base_number,
        ..v1::Exchange::default()
    };
    let error = tried.server.exchange(wrong, vec![Tensor::from(vec![0_u16; 3])]).await.err().unwrap().to_string();
    assert!(error.contains("a difference of 20 parameters") && error.contains("one of 3"), "{error}");
    // A last exchange has all parameters, exactly.
    let last = v1::Exchange { order: 1, number: 10, last: true, caller: 7, workers: 1, ..v1::Exchange::default() };
    assert_eq!(tried.exchange(last).await, tried.parameters().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_exchange_is_explained() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let shadow = Tried::begin("shadow", folders[0].path()).await;
    let exchange =
        |last| v1::Exchange { rank: 0, order: 1, number: 1, last, caller: 7, workers: 3, ..v1::Exchange::default() };
    let refused = async |tried: &Tried, last: bool, tensors: &[usize]| {
        let tensors = tensors.iter().map(|values| Tensor::from(vec![0.0_f32; *values])).collect();
        tried.server.exchange(exchange(last), tensors).await.err().unwrap().to_string()
    };
    let error = refused(&shadow, false, &[3]).await;
    assert!(error.contains("a replica of 40 parameters") && error.contains("one of 3"), "{error}");
    let error = refused(&shadow, true, &[PARAMETERS, 1]).await;
    assert!(error.contains("values of optimizer state"), "{error}");
    let error = refused(&shadow, true, &[PARAMETERS]).await;
    assert!(error.contains("a tensor is missing"), "{error}");
    let mut gba = Tried::begin("gba", folders[1].path()).await;
    let error = refused(&gba, false, &[PARAMETERS]).await;
    assert!(error.contains("trains no replicas"), "{error}");
    let (push, _) = batch(0);
    assert_eq!(gba.push_dense(&push).await, v1::Outcome::Trained as i32);
    let push = v1::PushDense { push: Some(push), piece: None };
    let error = shadow.server.push_dense(push, vec![Tensor::from(vec![0.0_f32; PARAMETERS])]).await.err().unwrap();
    assert!(error.to_string().contains("trains replicas"), "{error}");
}

/// Rows are evicted as a part of each step.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_within_a_budget_ends_alike_when_it_is_killed() {
    for mode in ["sync", "gba"] {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let mut lives = Tried::begin_with(mode, BUDGET, folders[0].path()).await;
        let mut dies = Tried::begin_with(mode, BUDGET, folders[1].path()).await;
        for number in 0..BATCHES {
            let (push, keys) = batch(number);
            let (step, piece) = (number / 3, (number % 3) as u32);
            for server in [&mut lives, &mut dies] {
                if mode == "gba" {
                    server.look_up(&keys).await;
                    server.push_rows(&push, &keys).await;
                } else {
                    server.look_up_for(step, &keys).await;
                    server.push_piece(step, piece, &keys).await;
                }
            }
            if number % 4 == 0 {
                dies.is_killed(folders[1].path());
            }
        }
        assert_eq!(lives.standing().await, dies.standing().await, "{mode}");
        let counts = |server: &Tried| super::table_life::TableLife::since_taken(&server.server.shared.store);
        assert_eq!(counts(&lives), counts(&dies), "{mode}: counts outlive the process");
        let store = &lives.server.shared.store;
        assert!(
            super::table_life::totals(&store.life_counts()).evicted > 0 && store.rows() <= 1024,
            "{mode}: {} rows",
            store.rows()
        );
    }
}

/// Each sighting counts once, and each draw is the same, although pushes are repeated.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_admits_the_ids_that_one_that_lives_admits() {
    let changes = [BUDGET, ADMISSIONS].concat();
    for mode in ["sync", "gba"] {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let mut lives = Tried::begin_with(mode, &changes, folders[0].path()).await;
        let mut dies = Tried::begin_with(mode, &changes, folders[1].path()).await;
        for number in 0..BATCHES {
            let (push, keys) = batch(number);
            let (step, piece) = (number / 3, (number % 3) as u32);
            // Look-ups of a replaced worker come twice.
            for (server, times) in [(&mut lives, 1), (&mut dies, 2)] {
                for _ in 0..times {
                    if mode == "gba" {
                        server.look_up(&keys).await;
                    } else {
                        server.look_up_for(step, &keys).await;
                    }
                }
                if mode == "gba" {
                    server.push_rows(&push, &keys).await;
                } else {
                    server.push_piece(step, piece, &keys).await;
                }
            }
            if number % 2 == 0 {
                dies.is_killed(folders[1].path());
                // A repeated piece is answered once its step is applied, so here only the last.
                if mode == "gba" {
                    dies.push_rows(&push, &keys).await;
                } else if piece == 2 {
                    dies.push_piece(step, piece, &keys).await;
                }
            }
        }
        assert_eq!(lives.standing().await, dies.standing().await, "{mode}");
        let counts = |server: &Tried| super::table_life::TableLife::since_taken(&server.server.shared.store);
        assert_eq!(counts(&lives), counts(&dies), "{mode}");
        let counts = counts(&lives);
        assert!(counts.admitted > 20 && counts.turned_away > 20 && counts.evicted > 0, "{mode}: {counts:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_and_counts_survive_a_switch_to_a_barrier_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Tried::begin("gba", folder.path()).await;
    for number in 0..9 {
        let (push, keys) = batch(number);
        server.look_up(&keys).await;
        server.push_rows(&push, &keys).await;
        server.push_dense(&push).await;
    }
    server.server.flush().await.unwrap();
    let before = server.standing().await;
    for mode in ["sync", "gba"] {
        let begin =
            v1::BeginMode { mode: mode.to_owned(), step: 3, attempt: 5, first_row: 72, ..v1::BeginMode::default() };
        server.server.begin_mode(&begin).unwrap();
        server.is_killed(folder.path());
        assert_eq!(server.standing().await, before, "{mode}");
    }
    let (push, _) = batch(9);
    assert_eq!(server.push_dense(&push).await, v1::Outcome::Trained as i32);
}

/// The replacement of an embedding worker requests the rows of a step that its predecessor's
/// gradients completed here.
#[tokio::test(flavor = "multi_thread")]
async fn in_sync_a_server_repeats_the_rows_of_the_last_step() {
    let folder = tempfile::tempdir().unwrap();
    let tried = Tried::begin("sync", folder.path()).await;
    let (_, keys) = batch(1);
    let look_up = async |step: u64, keys: &[u64]| tried.look_up_for(step, keys).await;
    let update = async |step: u64| {
        for piece in 0..tried.plan.pieces() {
            tried.push_piece(step, piece, &keys).await;
        }
    };
    let (is_applied, first) = look_up(0, &keys).await;
    assert!(!is_applied);
    update(0).await;
    assert_eq!(look_up(0, &keys).await, (true, first.clone()));
    let (is_applied, second) = look_up(1, &keys).await;
    assert!(!is_applied && second != first, "the rows were updated");
    assert_eq!(look_up(0, &keys).await, (true, first), "the next step is asked for ahead");
    assert_eq!(look_up(0, &keys[1..]).await, (true, Vec::new()), "nobody was answered that");
    update(1).await;
    look_up(2, &keys).await;
    assert_eq!((look_up(1, &keys).await, look_up(0, &keys).await), ((true, second), (true, Vec::new())));
}

/// The ids of a piece of four samples in `des`, with keys of every feature.
fn piece_of(plan: &JobPlan, keys: [u64; 4]) -> ServerIds {
    let of_feature = |_| UniqueIds::from_column(&keys, None, 4, &mut Scratch::default()).unwrap();
    let unique = plan.layout.features.iter().map(of_feature).collect();
    let piece = PreparedIds::new(4, unique, &plan.layout);
    ServerIds::divide(&piece, &plan.slot_map(), &plan.layout, plan.sub_operators().unwrap().sums).remove(0)
}

/// The ids of piece `number`, which differ from piece to piece.
fn numbered_piece(plan: &JobPlan, number: u32) -> ServerIds {
    piece_of(plan, [1, 1 << 60, u64::from(number) << 50, 1])
}

/// The gradient of the sums of piece `number`, and the update of step 0 that sends it.
fn update_of_sums(plan: &JobPlan, number: u32, map_epoch: u64) -> (v1::Update, Vec<Tensor>) {
    let substitution = plan.sub_operators().unwrap().sums.unwrap();
    let second = numbers(9, 4 * substitution.second_columns());
    let partial = Partial { first: numbers(u64::from(number), 4), second };
    let tensors = ServerResults { partial, vectors: Vec::new() }.into_tensors(substitution);
    let partial_samples = Some(4);
    (v1::Update { step: 0, piece: number, map_epoch, partial_samples, ..v1::Update::default() }, tensors)
}

/// The replacement of an embedding worker looks its piece up again, also beside a single dense
/// worker. Its predecessor's gradients completed the step here, and not on another server.
#[tokio::test(flavor = "multi_thread")]
async fn in_des_a_server_repeats_the_partial_results_of_the_last_step() {
    let folder = tempfile::tempdir().unwrap();
    let changes = [
        "spec.model.kind=fm",
        "spec.model.hidden=null",
        "spec.roles.ps.replicas=1",
        "spec.roles.denseWorker.replicas=1",
    ];
    let tried = Tried::begin_with("des", &changes, folder.path()).await;
    let map_epoch = tried.server.shared.slots.map().epoch().0;
    let look_up = async |piece: u32| {
        let (step, partial_samples) = (Some(0), Some(4));
        let request = v1::Lookup { step, train: true, map_epoch, piece: Some(piece), partial_samples, pooled: None };
        let tensors = numbered_piece(&tried.plan, piece).to_tensors();
        let frame = Frame { kind: v1::Lookup::KIND, meta: prost::Message::encode_to_vec(&request).into(), tensors };
        let reply = tried.server.service().call(&Peer::new("test", 0), frame).await.unwrap();
        let told: v1::LookupReply = prost::Message::decode(reply.meta).unwrap();
        (told.is_applied, reply.tensors)
    };
    let mut before = Vec::new();
    for piece in 0..tried.plan.pieces() {
        before.push(look_up(piece).await);
    }
    for piece in 0..tried.plan.pieces() {
        let (update, tensors) = update_of_sums(&tried.plan, piece, map_epoch);
        tried.server.update(update, tensors).await.unwrap();
    }
    for (piece, (was_applied, sums)) in (0..).zip(before) {
        assert!(!was_applied && !sums.is_empty());
        assert_eq!(look_up(piece).await, (true, sums), "piece {piece}");
    }
}

/// A killed server has no ids. It then takes them with the gradients, and updates the rows as a
/// server that lives.
#[tokio::test(flavor = "multi_thread")]
async fn in_des_a_replacement_takes_the_ids_with_the_gradients() {
    let mut digests = Vec::new();
    for is_killed in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let changes = ["spec.model.kind=fm", "spec.model.hidden=null", "spec.roles.ps.replicas=1"];
        let mut tried = Tried::begin_with("des", &changes, folder.path()).await;
        let map_epoch = tried.server.shared.slots.map().epoch().0;
        for piece in 0..tried.plan.pieces() {
            let ids = numbered_piece(&tried.plan, piece);
            let (piece, partial_samples) = (Some(piece), Some(4));
            let request = v1::Lookup { step: Some(0), train: true, map_epoch, piece, partial_samples, pooled: None };
            let reply = tried.server.look_up(request, ids.to_tensors()).await.unwrap();
            assert_eq!(reply.tensors.len(), 3, "sums of both orders, and the vectors of no cells");
        }
        if is_killed {
            tried.is_killed(folder.path());
        }
        for piece in 0..tried.plan.pieces() {
            let ids = numbered_piece(&tried.plan, piece);
            let (update, tensors) = update_of_sums(&tried.plan, piece, map_epoch);
            let reply = tried.server.update(update.clone(), tensors.clone()).await.unwrap();
            let reply: v1::UpdateReply = prost::Message::decode(reply.meta).unwrap();
            assert_eq!(reply.needs_ids, is_killed);
            if is_killed {
                let update = v1::Update { has_ids: true, ..update };
                tried.server.update(update, [tensors, ids.to_tensors()].concat()).await.unwrap();
            }
        }
        let slots = tried.plan.store.slots;
        let digest = |slot| tried.server.shared.store.slot_digest(Slot(slot)).unwrap();
        digests.push((0..slots).map(digest).collect::<Vec<_>>());
    }
    assert_eq!(digests[0], digests[1]);
}

/// Changes of the small plan to a `deepfm` in `des` with one server.
const TOWER: [&str; 2] = ["spec.model.kind=deepfm", "spec.roles.ps.replicas=1"];

impl Tried {
    /// Sends the first layer of a step.
    async fn put_first_layer(&self, step: u64) -> Result<Frame, RoleError> {
        let units = self.plan.sub_operators().unwrap().units;
        let weights = numbers(11 + step, self.plan.layout.embedding_width * units);
        let tensors = vec![Tensor::from(weights), Tensor::from(numbers(13, units))];
        self.server.put_first_layer(v1::PutFirstLayer { step }, tensors).await
    }

    /// Looks up a piece of a step for its partial results.
    async fn look_up_sums(&self, step: u64, piece: u32) -> Result<Vec<Tensor>, RoleError> {
        let map_epoch = self.server.shared.slots.map().epoch().0;
        let (step, partial_samples) = (Some(step), Some(4));
        let request = v1::Lookup { step, train: true, map_epoch, piece: Some(piece), partial_samples, pooled: None };
        let ids = numbered_piece(&self.plan, piece).to_tensors();
        Ok(self.server.look_up(request, ids).await?.tensors)
    }

    /// Sends the gradient of a piece's sums, and the ids if the server requests them.
    async fn push_sums(&self, step: u64, piece: u32) -> Result<v1::UpdateReply, RoleError> {
        let operators = self.plan.sub_operators().unwrap();
        let map_epoch = self.server.shared.slots.map().epoch().0;
        let second = numbers(9, 4 * operators.sums.unwrap().second_columns());
        let partial = Partial { first: numbers(u64::from(piece), 4), second };
        let beside = ServerResults { partial, vectors: Vec::new() };
        let results = TowerResults { beside, outputs: numbers(u64::from(piece) + 17, 4 * operators.units) };
        let tensors = results.into_tensors(operators);
        let partial_samples = Some(4);
        let update = v1::Update { step, piece, map_epoch, partial_samples, ..v1::Update::default() };
        let reply = self.server.update(update.clone(), tensors.clone()).await?;
        let told: v1::UpdateReply = prost::Message::decode(reply.meta).unwrap();
        if !told.needs_ids {
            return Ok(told);
        }
        let ids = numbered_piece(&self.plan, piece).to_tensors();
        let reply = self.server.update(v1::Update { has_ids: true, ..update }, [tensors, ids].concat()).await?;
        Ok(prost::Message::decode(reply.meta).unwrap())
    }

    async fn first_layer_gradient(&self, step: u64) -> Vec<f32> {
        let reply = self.server.first_layer_gradient(v1::FirstLayerGradientRequest { step }).await.unwrap();
        reply.tensors[0].clone().expect_f32("gradient").unwrap()
    }
}

/// The server is killed before a step's look-ups, before its gradients, between them, and after its
/// update. Its rows and its part of the gradient are the same as of a server that lives.
#[tokio::test(flavor = "multi_thread")]
async fn in_des_a_replacement_has_the_first_layer_and_its_gradient() {
    let mut found = Vec::new();
    for kills in [&[][..], &[0], &[1], &[2], &[3], &[0, 1, 2, 3]] {
        let folder = tempfile::tempdir().unwrap();
        let mut tried = Tried::begin_with("des", &TOWER, folder.path()).await;
        let pieces = tried.plan.pieces();
        assert!(pieces > 1);
        let mut gradients = Vec::new();
        for step in 0..3 {
            let kill = |tried: &mut Tried, point: i32| {
                if kills.contains(&point) {
                    tried.is_killed(folder.path());
                }
            };
            tried.put_first_layer(step).await.unwrap();
            kill(&mut tried, 0);
            for piece in 0..pieces {
                assert_eq!(tried.look_up_sums(step, piece).await.unwrap().len(), 4, "the outputs come first");
            }
            kill(&mut tried, 1);
            tried.push_sums(step, 0).await.unwrap();
            kill(&mut tried, 2);
            for piece in 1..pieces {
                tried.push_sums(step, piece).await.unwrap();
            }
            kill(&mut tried, 3);
            gradients.push(tried.first_layer_gradient(step).await);
            // A retry after the update changes nothing.
            tried.push_sums(step, 0).await.unwrap();
        }
        let slots = tried.plan.store.slots;
        let digest = |slot| tried.server.shared.store.slot_digest(Slot(slot)).unwrap();
        found.push((gradients, (0..slots).map(digest).collect::<Vec<_>>()));
        if !kills.is_empty() {
            assert_eq!(found.last(), found.first(), "killed at {kills:?}");
        }
    }
    let (gradients, _) = &found[0];
    assert!(gradients.iter().all(|of_step| of_step.iter().any(|value| *value != 0.0)));
    assert_ne!(gradients[0], gradients[1], "the rows have moved");
}

#[tokio::test(flavor = "multi_thread")]
async fn in_des_look_ups_wait_for_the_first_layer_of_their_step() {
    let folder = tempfile::tempdir().unwrap();
    let tried = Tried::begin_with("des", &TOWER, folder.path()).await;
    let pushed = async |step: u64| {
        for piece in 0..tried.plan.pieces() {
            tried.look_up_sums(step, piece).await.unwrap();
            tried.push_sums(step, piece).await.unwrap();
        }
    };
    {
        let waiting = tried.look_up_sums(0, 0);
        tokio::pin!(waiting);
        let early = tokio::time::timeout(Duration::from_millis(50), waiting.as_mut()).await;
        assert!(early.is_err(), "there is no layer yet");
        tried.put_first_layer(0).await.unwrap();
        waiting.await.unwrap();
    }
    pushed(0).await;
    for step in 1..3 {
        tried.put_first_layer(step).await.unwrap();
        pushed(step).await;
    }
    // The server has the layers of the last two steps.
    assert!(tried.server.shared.first_layers.get(0).is_none() && tried.server.shared.first_layers.get(1).is_some());
    let error = tried.look_up_sums(0, 0).await.unwrap_err().to_string();
    assert!(error.contains("step 0 is no longer here"), "{error}");
    let error = tried.push_sums(4, 0).await.unwrap_err().to_string();
    assert!(error.contains("the first layer of step 4 is not here"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_layer_is_refused_in_another_mode_and_in_another_shape() {
    let folder = tempfile::tempdir().unwrap();
    let tried = Tried::begin_with("sync", &TOWER, folder.path()).await;
    let error = tried.put_first_layer(0).await.unwrap_err().to_string();
    assert!(error.contains("is not `des`"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let tried = Tried::begin_with("des", &TOWER, folder.path()).await;
    let put = v1::PutFirstLayer { step: 0 };
    let tensors = vec![Tensor::from(vec![0.0f32; 7]), Tensor::from(Vec::<f32>::new())];
    let error = tried.server.put_first_layer(put, tensors).await.unwrap_err().to_string();
    assert!(error.contains("expected 64 weights, found 7"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let fm = ["spec.model.kind=fm", "spec.model.hidden=null", "spec.roles.ps.replicas=1"];
    let tried = Tried::begin_with("des", &fm, folder.path()).await;
    let tensors = vec![Tensor::from(Vec::<f32>::new()), Tensor::from(Vec::<f32>::new())];
    let error = tried.server.put_first_layer(put, tensors).await.unwrap_err().to_string();
    assert!(error.contains("the model has no tower"), "{error}");
}

/// Steps 1 and 2 are looked up while step 0 is open. Keys of a step between are left out, and read
/// after its update.
#[tokio::test(flavor = "multi_thread")]
async fn in_sync_rows_that_no_step_between_changes_are_read_early() {
    let folder = tempfile::tempdir().unwrap();
    let changes = ["spec.training.sync.lookAhead=2", "spec.roles.ps.replicas=1"];
    let tried = Tried::begin_with("sync", &changes, folder.path()).await;
    let (pieces, groups) = (tried.plan.pieces(), tried.server.shared.group_dims().len());
    let key = |number: u64| number << 48;
    // Step 1 has a key of step 0, and step 2 has keys of both.
    let keys = [vec![key(1), key(100)], vec![key(1), key(2), key(101)], vec![key(1), key(3), key(101), key(102)]];
    let deferred = [vec![false; 2], vec![true, false, false], vec![true, false, true, false]];
    for (step, (keys, deferred)) in (0..).zip(keys.iter().zip(&deferred)) {
        for piece in 0..pieces {
            let (reply, rows) = tried.look_up_part(step, Some(piece), keys).await;
            let expected = deferred.iter().copied().cycle().take(groups * keys.len());
            assert_eq!(reply.is_early, step > 0);
            if step == 0 {
                continue;
            }
            let found = KeySet::read(groups * keys.len(), reply.deferred).unwrap();
            assert!(found.iter().eq(expected), "step {step}: {found:?}");
            let now = deferred.iter().filter(|is| !**is).count();
            assert_eq!(rows[0].data().len(), now * tried.server.shared.group_dims()[0]);
        }
    }
    let (early, waited) = (&tried.server.shared.metrics.early_rows, &tried.server.shared.metrics.deferred_rows);
    let times = u64::from(pieces) * groups as u64;
    assert_eq!((early.get(), waited.get()), (4 * times, 3 * times));
    let left_out = [key(1)];
    let rest = tried.look_up_part(1, None, &left_out);
    let update = async {
        for piece in 0..pieces {
            tried.push_piece(0, piece, &keys[0]).await;
        }
    };
    let ((reply, rows), ()) = tokio::join!(rest, update);
    let mut expected = vec![0.0; tried.server.shared.group_dims()[0]];
    tried.server.shared.store.lookup(GroupId(0), &[FeatureKey(key(1))], Missing::Insert, &mut expected).unwrap();
    assert!(!reply.is_applied && !reply.is_early);
    assert_eq!(rows[0].clone().expect_f32("rows").unwrap(), expected, "the row has the update of step 0");
    // The replacement of a worker that died gets both parts again.
    for piece in 0..pieces {
        tried.push_piece(1, piece, &keys[1]).await;
    }
    let (again, _) = tried.look_up_part(1, Some(0), &keys[1]).await;
    assert!(again.is_applied && again.is_early);
    assert_eq!(tried.look_up_part(1, None, &left_out).await.1, rows);
}

/// A piece without deferred keys gets an early reply, too. Its second look-up has no keys, and
/// waits for the update.
#[tokio::test(flavor = "multi_thread")]
async fn in_sync_a_look_up_without_keys_waits_for_the_update() {
    let folder = tempfile::tempdir().unwrap();
    let tried = Tried::begin_with("sync", &["spec.training.sync.lookAhead=1"], folder.path()).await;
    let (open, next) = ([1 << 48], [2 << 48]);
    for piece in 0..tried.plan.pieces() {
        tried.look_up_part(0, Some(piece), &open).await;
    }
    for keys in [&next[..], &[]] {
        let (reply, _) = tried.look_up_part(1, Some(0), keys).await;
        assert!(reply.is_early && reply.deferred.iter().all(|bits| *bits == 0), "{reply:?}");
    }
    let mut second = std::pin::pin!(tried.look_up_part(1, None, &[]));
    let waits = tokio::time::timeout(Duration::from_millis(50), &mut second).await;
    assert!(waits.is_err(), "step 0 is open");
    for piece in 0..tried.plan.pieces() {
        tried.push_piece(0, piece, &open).await;
    }
    let (reply, rows) = second.await;
    assert!(!reply.is_early && rows.iter().all(|rows| rows.data().is_empty()));
}

/// A replacement does not know which keys the open step changes. It answers later steps after the
/// update only, and then in full.
#[tokio::test(flavor = "multi_thread")]
async fn in_sync_a_killed_server_reads_no_row_too_early() {
    let folder = tempfile::tempdir().unwrap();
    let mut tried = Tried::begin_with("sync", &["spec.training.sync.lookAhead=2"], folder.path()).await;
    let (_, keys) = batch(1);
    for piece in 0..tried.plan.pieces() {
        tried.look_up_part(0, Some(piece), &keys).await;
    }
    tried.push_piece(0, 0, &keys).await;
    tried.is_killed(folder.path());
    let ahead = tried.look_up_part(1, Some(0), &keys);
    let update = async {
        for piece in 1..tried.plan.pieces() {
            tokio::task::yield_now().await;
            tried.push_piece(0, piece, &keys).await;
        }
    };
    let ((reply, rows), ()) = tokio::join!(ahead, update);
    assert!(!reply.is_early, "{reply:?}");
    let mut expected = vec![0.0; keys.len() * tried.server.shared.group_dims()[0]];
    let keys: Vec<FeatureKey> = keys.into_iter().map(FeatureKey).collect();
    tried.server.shared.store.lookup(GroupId(0), &keys, Missing::Insert, &mut expected).unwrap();
    assert_eq!(rows[0].clone().expect_f32("rows").unwrap(), expected);
}

/// The last gradients of a step may arrive during a lookup by the replacement of an embedding
/// worker.
#[tokio::test(flavor = "multi_thread")]
async fn in_sync_no_reply_has_rows_that_its_step_has_changed() {
    let folder = tempfile::tempdir().unwrap();
    let tried = Tried::begin("sync", folder.path()).await;
    let keys: Vec<u64> = (1..20_000).map(|number| number << 49).collect();
    let look_up = async |step: u64| tried.look_up_for(step, &keys).await;
    let update = async |step: u64, piece: u32| tried.push_piece(step, piece, &keys).await;
    for step in 0..30 {
        let (_, first) = look_up(step).await;
        for piece in 1..tried.plan.pieces() {
            update(step, piece).await;
        }
        let asks = async {
            let mut answers = Vec::new();
            for _ in 0..8 {
                // As in a server that restarted meanwhile: it has no replies.
                tried.server.replies.clear();
                answers.push(look_up(step).await);
            }
            answers
        };
        let ((), answers) = tokio::join!(update(step, 0), asks);
        for (is_applied, again) in answers {
            assert!(if is_applied { again.is_empty() } else { again == first }, "step {step}: is_applied {is_applied}");
        }
    }
}

/// A recovery uses the files of a killed server only if they are complete.
#[tokio::test(flavor = "multi_thread")]
async fn a_truncated_file_prevents_recovery() {
    let folder = tempfile::tempdir().unwrap();
    let (directory, plan) = (folder.path(), plan("gba", &[]));
    let begin = async || {
        let mut server = Tried::begin("gba", directory).await;
        for number in 0..4 {
            let (push, keys) = batch(number);
            server.look_up(&keys).await;
            server.push_rows(&push, &keys).await;
            server.push_dense(&push).await;
        }
    };
    let goes_on = || Rows::of_attempt(directory, &plan, Some(5)).unwrap().place().is_some();
    begin().await;
    assert!(goes_on());
    std::fs::write(directory.join("row-pushes/push.7.part"), "being written").unwrap();
    assert!(goes_on());
    assert!(!directory.join("row-pushes/push.7.part").exists());
    for damaged in ["partition", "row-pushes/3", "dense-pushes/3", "row-steps/0"] {
        let bytes = std::fs::read(directory.join(damaged)).unwrap();
        std::fs::write(directory.join(damaged), &bytes[..bytes.len() - 1]).unwrap();
        assert!(!goes_on(), "{damaged}");
        assert!(!goes_on(), "{damaged}: begun anew, and not begun");
        begin().await;
    }
    assert!(Rows::of_attempt(directory, &plan, Some(6)).unwrap().place().is_none(), "of another attempt");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_evaluation_learns_which_keys_have_no_row() {
    let folder = tempfile::tempdir().unwrap();
    let tried = Tried::begin("gba", folder.path()).await;
    let trained = [3_u64, 5, 1 << 60];
    tried.look_up(&trained).await;
    let rows = tried.server.shared.store.rows();
    let keys = [1_u64, 3, 4, 5, 9, 11, 12, 13, 1 << 59, 1 << 60];
    let map_epoch = tried.server.shared.slots.map().epoch().0;
    let request = v1::Lookup { train: false, map_epoch, ..v1::Lookup::default() };
    let groups = tried.server.shared.group_dims().len();
    let tensors = vec![Tensor::from(keys.to_vec()); groups];
    let reply = tried.server.look_up(request, tensors).await.unwrap();
    let reply: v1::LookupReply = prost::Message::decode(reply.meta).unwrap();
    let missing = KeySet::read(groups * keys.len(), reply.missing).unwrap();
    let expected = keys.iter().map(|key| !trained.contains(key)).cycle().take(groups * keys.len());
    assert!(missing.iter().eq(expected), "{missing:?}");
    assert_eq!(tried.server.shared.store.rows(), rows, "an evaluation makes no rows");
}

/// During a digest, or any other pass over all slots, the server reports its progress.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_reports_its_progress() {
    let folder = tempfile::tempdir().unwrap();
    let Tried { plan, server, .. } = Tried::begin("sync", folder.path()).await;
    let slots = plan.store.slots;
    let transport = InProcess::new(InProcessConfig::default(), WireCounters::unregistered(|_| "test").unwrap());
    let address = Address::local("ps-0");
    let _serving = transport.serve(Arc::clone(&server) as Arc<dyn Service>, &address).unwrap();
    let channel = transport.connect(&address).unwrap();
    let work = async || message::call(&channel, v1::WorkRequest {}, Vec::new(), CALL_DEADLINE).await.unwrap().0;
    let done = async || work().await.done;
    let before = done().await;
    let digest = message::call(&channel, v1::StoreDigestRequest {}, Vec::new(), CALL_DEADLINE).await.unwrap();
    assert_eq!(done().await - before, u64::from(slots));
    let [digests] = message::take("store_digest", digest.1).unwrap();
    let expected = server.shared.store.digests(0..slots).unwrap().concat();
    assert_eq!(digests.expect_u8("digests").unwrap(), expected, "in the order of the slots");
    assert_eq!(work().await.tables.unwrap().rows, 0);
    let (keys, mut rows) = ([FeatureKey(7), FeatureKey(9)], vec![0.0; 2 * plan.store.groups[0].dim]);
    server.shared.store.lookup(GroupId(0), &keys, Missing::Insert, &mut rows).unwrap();
    server.shared.count_store();
    let tables = work().await.tables.unwrap();
    assert_eq!((tables.rows, tables.bytes), (2, server.shared.bytes()));
}

/// A process that ends in order cancels its blocking work. A reply with an error would fail the
/// job.
#[test]
fn work_cancelled_at_shutdown_is_never_answered() {
    let runtime = tokio::runtime::Builder::new_multi_thread().max_blocking_threads(1).enable_time().build().unwrap();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let _busy = runtime.spawn_blocking(move || held.recv());
    let waits = runtime.spawn_blocking(|| ());
    waits.abort();
    runtime.block_on(async {
        let answer = tokio::time::timeout(Duration::from_millis(200), await_task("preparation of ids", waits)).await;
        assert!(answer.is_err(), "{answer:?}");
    });
    drop(release);
    let panicked = runtime.block_on(blocking::<u8>("preparation of ids", || panic!("on purpose")));
    assert!(panicked.unwrap_err().to_string().starts_with("preparation of ids ended unexpectedly"));
}
