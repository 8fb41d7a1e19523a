//! Whole jobs in one process, on synthetic data. The tests check the promises of the modes against
//! each other and against a trainer that is a plain loop.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;
#[path = "common/metrics.rs"]
mod metrics;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Write as _;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use rectrain_coordinator::Coordinator;
use rectrain_data::{Dataset, ReadPlan};
use rectrain_dense::{ComputeDevice, Features, Tasks, Tower, TowerOptions};
use rectrain_embedding::{FeatureKey, GroupId, Missing, Store};
use rectrain_member::local::{run_in_process, run_with};
use rectrain_policy::ModePolicy;
use rectrain_protocol::RoleError;
use rectrain_protocol::events::{EventLog, JobEvent, Summary};
use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
use rectrain_protocol::plan::JobPlan;
use rectrain_random::mix;
use sha2::{Digest, Sha256};

use crate::common::manifest::plan_of;
use crate::common::plan;
use crate::metrics::values;

fn train(plan: JobPlan) -> Result<(Summary, Vec<JobEvent>), RoleError> {
    train_measured(plan, &RoleMetrics::new(Registry::new()).unwrap())
}

fn train_measured(plan: JobPlan, metrics: &RoleMetrics) -> Result<(Summary, Vec<JobEvent>), RoleError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    runtime.block_on(async {
        let events = EventLog::default();
        let mut follower = events.follow();
        let summary = run_in_process(Arc::new(plan), "test", &BTreeMap::new(), events, metrics.clone()).await?;
        let mut seen = Vec::new();
        while let Some(event) = follower.next().await {
            seen.push(event);
        }
        Ok((summary, seen))
    })
}

fn digest_of(changes: &[&str]) -> String {
    train(plan(changes)).unwrap().0.parameters_sha256
}

#[test]
fn sync_repeats_to_the_bit_with_any_replicas_and_threads() {
    let first = digest_of(&[]);
    assert_eq!(first, digest_of(&[]), "the same job twice");
    for replicas in [
        &["spec.roles.ps.replicas=3"][..],
        &["spec.roles.embeddingWorker.replicas=2"],
        &["spec.roles.loader.replicas=3"],
        &["spec.roles.denseWorker.threads=1"],
        &["spec.roles.ps.replicas=2", "spec.roles.embeddingWorker.replicas=3", "spec.roles.loader.replicas=2"],
    ] {
        assert_eq!(first, digest_of(replicas), "{replicas:?}");
    }
    assert_ne!(first, digest_of(&["spec.training.seed=7"]), "another seed is another model");
}

#[test]
fn sync_with_several_dense_workers_repeats_to_the_bit() {
    let workers = "spec.roles.denseWorker.replicas=3";
    let first = digest_of(&[workers]);
    assert_eq!(first, digest_of(&[workers, "spec.roles.ps.replicas=2", "spec.roles.embeddingWorker.replicas=2"]));
}

/// Batches of a plain loop that train in `shadow`, with an exchange after each of them. There is
/// one more exchange whenever training pauses, and at the end.
struct Shadowed {
    batches: Range<u64>,
    alpha: f32,
    /// η, the block momentum, and its state. `None`: elastic averaging.
    block: Option<(f32, f32, RefCell<Vec<f32>>)>,
    /// The batches before which training pauses for an evaluation.
    pauses: &'static [u64],
    /// Parameter servers, and the fragments of each server's partition.
    division: (usize, usize),
    /// The fragment of the next exchange. Each pause begins with the first one again.
    turn: Cell<usize>,
    /// At a pause the copy becomes the replica, which is the mean of all replicas, too.
    output_is_replica: bool,
    /// With bf16: the base of each parameter since the last pause, if it has one.
    bases: Option<RefCell<BTreeMap<usize, f32>>>,
}

/// The upper half of the bits, rounded to the nearest, ties to even.
fn bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

impl Shadowed {
    /// Exchanges of all parameters at once.
    fn new(batches: Range<u64>, pauses: &'static [u64]) -> Self {
        let (division, turn) = ((1, 1), Cell::new(0));
        Self { batches, alpha: 0.3, block: None, pauses, division, turn, output_is_replica: false, bases: None }
    }

    /// Algorithm 2 of ShadowSync, or algorithm 4 with Nesterov's momentum and one replica. The
    /// exchange moves one fragment, or all of them.
    fn exchange(&self, copy: &mut [f32], replica: &mut [f32], moves_all: bool) {
        let total = copy.len();
        for (place, (copy, own)) in copy.iter_mut().zip(replica).enumerate() {
            if !moves_all && self.fragment_of(place, total) != self.turn.get() {
                continue;
            }
            let mut bases = self.bases.as_ref().filter(|_| !moves_all).map(RefCell::borrow_mut);
            let base = bases.as_mut().map(|bases| match bases.entry(place) {
                Entry::Vacant(first) => first.insert(*own),
                Entry::Occupied(base) => {
                    let base = base.into_mut();
                    *base += bf16(*own - *base);
                    base
                }
            });
            let sent = base.as_ref().map_or(*own, |base| **base);
            if let Some((eta, momentum, velocity)) = &self.block {
                let mut velocity = velocity.borrow_mut();
                velocity.resize(total, 0.0);
                let descent = sent - *copy;
                velocity[place] = momentum * velocity[place] + descent;
                *copy += eta * (descent + momentum * velocity[place]);
            } else {
                *copy += self.alpha * (sent - *copy);
            }
            let received = base.map_or(*copy, |base| {
                *base += bf16(*copy - *base);
                *base
            });
            *own += self.alpha * (received - *own);
        }
        if let Some(bases) = self.bases.as_ref().filter(|_| moves_all) {
            bases.borrow_mut().clear();
        }
        self.turn.set(if moves_all { 0 } else { (self.turn.get() + 1) % self.division.1 });
    }

    /// The fragment of a parameter, out of `total`.
    fn fragment_of(&self, parameter: usize, total: usize) -> usize {
        let (servers, fragments) = self.division;
        let of_server = |server: usize| total * server / servers;
        let server = (0..servers).rfind(|server| of_server(*server) <= parameter).unwrap();
        let (first, size) = (of_server(server), of_server(server + 1) - of_server(server));
        (0..fragments).rfind(|fragment| first + size * fragment / fragments <= parameter).unwrap()
    }

    /// Carries out the exchanges that are due before batch `next`.
    fn before(&self, next: u64, copy: &mut Vec<f32>, replica: &mut [f32]) {
        if next == self.batches.start {
            *copy = replica.to_vec();
        } else if next == self.batches.end {
            self.leave(copy, replica);
        } else if self.batches.contains(&next) && self.pauses.contains(&next) {
            self.pause(copy, replica);
        }
    }

    /// The last exchange before a pause.
    fn pause(&self, copy: &mut [f32], replica: &mut [f32]) {
        if self.output_is_replica {
            copy.copy_from_slice(replica);
        } else {
            self.exchange(copy, replica, true);
        }
    }

    /// The copy is the model.
    fn leave(&self, copy: &mut [f32], replica: &mut [f32]) {
        self.pause(copy, replica);
        replica.copy_from_slice(copy);
    }
}

/// The vocabulary decides how many keys the batches have in common: nearly all, some, or few.
#[test]
fn sync_trains_the_same_model_however_far_it_looks_ahead() {
    for (vocabulary, workers) in [(10, 1), (300, 2), (20_000, 3)] {
        let vocabulary = format!("spec.data.synthetic.vocabulary={vocabulary}");
        let workers = format!("spec.roles.denseWorker.replicas={workers}");
        let digest = |ahead: u32, servers: u32, embedding_workers: u32| {
            let ahead = format!("spec.training.sync.lookAhead={ahead}");
            let servers = format!("spec.roles.ps.replicas={servers}");
            let embedding_workers = format!("spec.roles.embeddingWorker.replicas={embedding_workers}");
            digest_of(&[&vocabulary, &workers, &ahead, &servers, &embedding_workers])
        };
        let waiting = digest(0, 1, 1);
        for (ahead, servers, embedding_workers) in [(1, 1, 1), (1, 3, 2), (2, 2, 3), (3, 1, 2), (4, 3, 3)] {
            let found = digest(ahead, servers, embedding_workers);
            assert_eq!(found, waiting, "{vocabulary}, {workers}: {ahead}, {servers}, {embedding_workers}");
        }
    }
}

/// Evaluations, and switches to another mode and back, end the steps that were looked up ahead.
#[test]
fn looking_ahead_ends_at_each_pause() {
    let pauses = ["spec.training.evaluation.every=steps", "spec.training.evaluation.steps=7"];
    let switches = switches(&[(9, "gba"), (17, "sync"), (26, "gba"), (30, "sync")]);
    let digest = |ahead: &str| digest_of(&[pauses[0], pauses[1], &switches, "spec.roles.ps.replicas=2", ahead]);
    let waiting = digest("spec.training.sync.lookAhead=0");
    for ahead in [1, 3, 16] {
        assert_eq!(digest(&format!("spec.training.sync.lookAhead={ahead}")), waiting, "{ahead}");
    }
}

/// The definition of `sync` as one loop: no roles, no messages, one sample's embedding at a time.
/// The `shadowed` batches train in `shadow`.
fn plain_loop(plan: &JobPlan, shadowed: Option<&Shadowed>) -> String {
    let store = Store::new(plan.store.clone()).unwrap();
    let options =
        TowerOptions { seed: plan.seed, rank: 0, threads: 1, device: ComputeDevice::Cpu, precision: plan.precision };
    let mut tower =
        Tower::new(plan.model.build().unwrap(), Tasks::declared(&plan.tasks).unwrap(), plan.dense_optimizer, options)
            .unwrap();
    let dataset = Dataset::open(plan.train.clone(), plan.schema.clone()).unwrap();
    let (dim, first) = (plan.store.groups[0].dim, plan.store.groups[0].zero_columns);
    let count = plan.schema.sparse.len();
    let (mut step, mut copy) = (0, Vec::new());
    for epoch in 0..2 {
        let read = ReadPlan { chunk_rows: plan.global_batch_rows, shuffle: None, epoch, read_ahead_chunks: 1 };
        let mut reader = dataset.reader(read).unwrap();
        let mut chunk = 0;
        while let Some(batch) = reader.read(chunk).unwrap() {
            if let Some(shadowed) = shadowed {
                shadowed.before(step, &mut copy, tower.parameters_mut().unwrap());
            }
            let (mut embeddings, mut linear) = (Vec::new(), Vec::new());
            for sample in 0..batch.samples {
                for column in &batch.sparse {
                    let mut row = vec![0.0; dim];
                    store.lookup(GroupId(0), &[FeatureKey(column.row(sample)[0])], Missing::Insert, &mut row).unwrap();
                    linear.extend_from_slice(&row[..first]);
                    embeddings.extend_from_slice(&row[first..]);
                }
            }
            let features =
                Features { samples: batch.samples, dense: &batch.dense, embeddings: &embeddings, linear: &linear };
            let scale = 1.0 / batch.samples as f32;
            let output = tower.forward_backward(features, &batch.labels, scale, step).unwrap();
            let mut gradients: BTreeMap<u64, Vec<f32>> = BTreeMap::new();
            for (index, column) in batch.sparse.iter().enumerate() {
                for sample in 0..batch.samples {
                    let sum = gradients.entry(column.row(sample)[0]).or_insert_with(|| vec![0.0; dim]);
                    if first == 1 {
                        sum[0] += output.linear_gradients[sample * count + index];
                    }
                    let width = dim - first;
                    let own = &output.embedding_gradients[(sample * count + index) * width..][..width];
                    sum[first..].iter_mut().zip(own).for_each(|(sum, g)| *sum += g);
                }
            }
            step += 1;
            for (key, gradient) in gradients {
                store.update(GroupId(0), &[FeatureKey(key)], &gradient, step).unwrap();
            }
            tower.apply(step).unwrap();
            if let Some(shadowed) = shadowed.filter(|shadowed| shadowed.batches.contains(&(step - 1))) {
                shadowed.exchange(&mut copy, tower.parameters_mut().unwrap(), false);
            }
            chunk += 1;
        }
    }
    if let Some(shadowed) = shadowed.filter(|shadowed| shadowed.batches.contains(&step)) {
        shadowed.leave(&mut copy, tower.parameters_mut().unwrap());
    }
    let mut dense = Sha256::new();
    tower.parameters().unwrap().iter().for_each(|value| dense.update(value.to_le_bytes()));
    let mut all = Sha256::new();
    all.update(dense.finalize());
    store.digests(0..plan.store.slots).unwrap().iter().for_each(|digest| all.update(digest));
    all.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn sync_equals_a_plain_loop_to_the_bit() {
    for kind in ["deepfm", "dlrm"] {
        let kind = format!("spec.model.kind={kind}");
        assert_eq!(digest_of(&[&kind]), plain_loop(&plan(&[&kind]), None), "{kind}");
    }
}

/// FTRL for the first-order weights, and another optimizer for the embeddings.
#[test]
fn first_order_weights_with_an_optimizer_of_their_own_equal_a_plain_loop() {
    let first = "spec.training.optimizer.firstOrder.kind=ftrl,spec.training.optimizer.firstOrder.l1=0.001";
    let kind = "spec.model.kind=deepfm";
    let expected = plain_loop(&plan(&[kind, first]), None);
    assert_ne!(expected, digest_of(&[kind]), "the optimizer has no effect");
    for servers in ["spec.roles.ps.replicas=1", "spec.roles.ps.replicas=3"] {
        assert_eq!(digest_of(&[kind, first, servers]), expected, "{servers}");
    }
    // A row of lr is a first-order weight alone, so that its optimizer may be given in two ways.
    let lr = substitutable("lr");
    let ways = ["firstOrder", "sparse"].map(|part| format!("spec.training.optimizer.{part}.kind=ftrl"));
    assert_eq!(digest_of(&[&lr, &ways[0]]), digest_of(&[&lr, &ways[1]]));
}

/// A model with a substitution, in place of the job's.
fn substitutable(kind: &str) -> String {
    let dim = if kind == "lr" { "null" } else { "4" };
    let hidden = if ["lr", "fm"].contains(&kind) { ",spec.model.hidden=null" } else { "" };
    format!("spec.model.kind={kind},spec.model.embeddingDim={dim}{hidden}")
}

/// Models whose towers parameter servers compute in part.
const TOWERS: [&str; 4] = ["dnn", "wideDeep", "deepfm", "dcn"];

#[test]
fn des_with_one_server_equals_sync_to_the_bit() {
    for kind in ["lr", "fm"] {
        let model = substitutable(kind);
        for workers in ["spec.roles.denseWorker.replicas=1", "spec.roles.denseWorker.replicas=3"] {
            let sync = digest_of(&[&model, workers]);
            assert_eq!(digest_of(&[&model, workers, "spec.training.mode=des"]), sync, "{kind}, {workers}");
        }
    }
}

/// The embeddings of `deepfm` and of `dcn` have two gradients, which the server adds in another
/// order.
#[test]
fn des_with_one_server_equals_sync_to_the_bit_for_towers() {
    for kind in ["dnn", "wideDeep"] {
        let model = substitutable(kind);
        for change in ["spec.model.dropout=0", "spec.model.dropout=0.2", "spec.model.hidden={1}"] {
            let sync = digest_of(&[&model, change]);
            assert_eq!(digest_of(&[&model, change, "spec.training.mode=des"]), sync, "{kind}, {change}");
        }
        let dense = "spec.features.dense=null";
        let sync = digest_of(&[&model, dense]);
        assert_eq!(digest_of(&[&model, dense, "spec.training.mode=des"]), sync, "{kind} without dense features");
    }
}

/// The mean losses of the training and test rows at each of many evaluations.
fn losses(changes: &[&str]) -> Vec<f64> {
    let evaluations = ["spec.training.evaluation.every=steps", "spec.training.evaluation.steps=3"];
    let (summary, events) = train(plan(&[changes, &evaluations].concat())).unwrap();
    let tested = events.iter().filter_map(|event| match event {
        JobEvent::Evaluation { test, .. } => test.log_loss,
        _ => None,
    });
    tested.chain([summary.test.as_ref().unwrap().log_loss.unwrap()]).collect()
}

#[test]
fn des_has_the_losses_of_sync_in_many_steps() {
    for kind in ["lr", "fm", "dnn", "wideDeep", "deepfm", "dcn"] {
        let model = substitutable(kind);
        for replicas in [
            &["spec.roles.ps.replicas=1"][..],
            &["spec.roles.ps.replicas=3"],
            &["spec.roles.ps.replicas=3", "spec.roles.denseWorker.replicas=2", "spec.training.localBatchSize=32"],
        ] {
            let job = [&[model.as_str()][..], replicas].concat();
            let sync = losses(&job);
            let des = losses(&[&job[..], &["spec.training.mode=des"]].concat());
            assert!(sync.len() > 10 && des.len() == sync.len(), "{kind}: {sync:?}");
            for (found, expected) in des.iter().zip(&sync) {
                assert!((found - expected).abs() <= 1e-5 * expected, "{kind}, {replicas:?}: {found}, not {expected}");
            }
        }
    }
}

#[test]
fn des_with_several_servers_repeats_and_equals_sync_within_rounding() {
    for kind in ["lr", "fm", "dnn", "wideDeep", "deepfm", "dcn"] {
        let model = substitutable(kind);
        let job = [model.as_str(), "spec.roles.ps.replicas=3", "spec.roles.denseWorker.replicas=2"];
        let des = [&job[..], &["spec.training.mode=des"]].concat();
        let (summary, _) = train(plan(&des)).unwrap();
        let (sync, _) = train(plan(&job)).unwrap();
        let other = [&des[..], &["spec.roles.embeddingWorker.replicas=2", "spec.roles.loader.replicas=2"]].concat();
        assert_eq!(digest_of(&other), summary.parameters_sha256, "{kind}: repeated");
        assert_eq!((summary.trained_rows, summary.rows), (sync.trained_rows, sync.rows), "{kind}");
        let loss = |summary: &Summary| summary.test.as_ref().unwrap().log_loss.unwrap();
        let (found, expected) = (loss(&summary), loss(&sync));
        assert!((found - expected).abs() <= 1e-4 * expected, "{kind}: {found}, in sync {expected}");
        let auc = |summary: &Summary| summary.test.as_ref().unwrap().auc.unwrap();
        assert!((auc(&summary) - auc(&sync)).abs() < 5e-4, "{kind}: {} and {}", auc(&summary), auc(&sync));
    }
}

/// A file of clicks on one to four items.
fn clicks_on_items(file: &Path, rows: Range<u64>) {
    let mut text = String::from("label,user,items\n");
    for row in rows {
        let item = |place: u64| (mix(4 * row + place) % 300).to_string();
        let items: Vec<String> = (0..=row % 4).map(item).collect();
        writeln!(text, "{},{},{}", u64::from(mix(!row).is_multiple_of(4)), mix(row) % 50, items.join("|")).unwrap();
    }
    std::fs::write(file, text).unwrap();
}

/// A job whose samples have several ids of a feature.
fn plan_with_items(folder: &Path, changes: &[&str]) -> JobPlan {
    let (train, test) = (folder.join("train.csv"), folder.join("test.csv"));
    clicks_on_items(&train, 0..2_000);
    clicks_on_items(&test, 2_000..2_500);
    let manifest = format!(
        "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {{name: test}}
spec:
  model: {{kind: fm, embeddingDim: 4}}
  features:
    sparse: [{{name: user}}, {{name: items, multiValue: {{separator: '|'}}}}]
  data:
    train: {{paths: ['{}']}}
    test: {{paths: ['{}']}}
  training: {{globalBatchSize: 96, epochs: 2}}
",
        train.display(),
        test.display()
    );
    plan_of(&manifest, changes)
}

/// Several servers hold ids of one cell. They exchange its whole embedding.
#[test]
fn des_trains_cells_that_several_servers_hold() {
    let folder = tempfile::tempdir().unwrap();
    let run = |changes: &[&str]| train(plan_with_items(folder.path(), changes)).unwrap().0;
    let (sync, one) = (run(&[]), run(&["spec.training.mode=des"]));
    assert_eq!(one.parameters_sha256, sync.parameters_sha256, "one server");
    let job = ["spec.training.mode=des", "spec.roles.ps.replicas=3"];
    let several = run(&job);
    let others = ["spec.roles.embeddingWorker.replicas=2", "spec.roles.loader.replicas=2"];
    assert_eq!(run(&[&job[..], &others].concat()).parameters_sha256, several.parameters_sha256, "repeated");
    assert_eq!((several.trained_rows, several.rows), (sync.trained_rows, sync.rows));
    let loss = |summary: &Summary| summary.test.as_ref().unwrap().log_loss.unwrap();
    let (found, expected) = (loss(&several), loss(&sync));
    assert!((found - expected).abs() <= 1e-4 * expected, "{found}, in sync {expected}");
}

/// Several servers hold ids of one cell. The output of the first layer is their sum, whatever the
/// division.
#[test]
fn des_trains_towers_over_cells_that_several_servers_hold() {
    let folder = tempfile::tempdir().unwrap();
    for kind in TOWERS {
        let model = format!("spec.model.kind={kind},spec.model.hidden={{8}}");
        let run = |changes: &[&str]| train(plan_with_items(folder.path(), &[&[&*model], changes].concat())).unwrap().0;
        let sync = run(&[]);
        for servers in ["spec.roles.ps.replicas=1", "spec.roles.ps.replicas=3"] {
            let des = run(&["spec.training.mode=des", servers]);
            assert_eq!((des.trained_rows, des.rows), (sync.trained_rows, sync.rows), "{kind}");
            let is_exact = servers.ends_with('1') && !["deepfm", "dcn"].contains(&kind);
            assert!(!is_exact || des.parameters_sha256 == sync.parameters_sha256, "{kind}");
            let loss = |summary: &Summary| summary.test.as_ref().unwrap().log_loss.unwrap();
            let (found, expected) = (loss(&des), loss(&sync));
            assert!((found - expected).abs() <= 1e-5 * expected, "{kind}: {found}, in sync {expected}");
        }
    }
}

#[test]
fn a_switch_to_des_and_back_equals_sync_to_the_bit() {
    let switches = switches(&[(5, "des"), (17, "sync"), (20, "gba"), (25, "des")]);
    let without = self::switches(&[(20, "gba"), (25, "sync")]);
    for kind in ["fm", "dnn", "wideDeep"] {
        let model = substitutable(kind);
        let there = train(plan(&[&model, &switches])).unwrap().0;
        assert_eq!(there.parameters_sha256, train(plan(&[&model, &without])).unwrap().0.parameters_sha256, "{kind}");
        assert_eq!((there.mode_switches, there.trained_rows), (4, 4000), "{kind}");
    }
}

/// `shadow` in the foreground, with one dense worker: an exchange after each batch.
const FOREGROUND: [&str; 2] = ["spec.training.shadow.everySteps=1", "spec.training.shadow.alpha=0.3"];

#[test]
fn shadow_with_one_worker_equals_a_plain_loop_to_the_bit() {
    let job = [&FOREGROUND[..], &["spec.training.mode=shadow"]].concat();
    let shadowed = |pauses| Shadowed::new(0..u64::MAX, pauses);
    let whole = plain_loop(&plan(&job), Some(&shadowed(&[])));
    assert_ne!(whole, digest_of(&[]), "the copy lags behind the replica");
    for replicas in ["spec.roles.ps.replicas=1", "spec.roles.ps.replicas=3"] {
        assert_eq!(digest_of(&[&job[..], &[replicas]].concat()), whole, "{replicas}");
    }
    // An evaluation overwrites the worker's parameters with the copy. The replica outlives it.
    let evaluation = "spec.training.evaluation.every=steps,spec.training.evaluation.steps=10";
    let paused = plain_loop(&plan(&job), Some(&shadowed(&[10, 20, 30, 40])));
    assert_ne!(paused, whole);
    assert_eq!(digest_of(&[&job[..], &[evaluation]].concat()), paused);
}

/// The momentum's state outlives the pause.
#[test]
fn bmuf_with_one_worker_equals_a_plain_loop_to_the_bit() {
    let settings = ["algorithm=bmuf", "eta=0.6", "momentum=0.4", "nesterov=true"];
    let settings = settings.map(|setting| format!("spec.training.shadow.{setting}")).join(",");
    let evaluation = "spec.training.evaluation.every=steps,spec.training.evaluation.steps=10";
    let job = [&FOREGROUND[..], &["spec.training.mode=shadow", settings.as_str(), evaluation]].concat();
    let block = Some((0.6, 0.4, RefCell::default()));
    let shadowed = Shadowed { block, ..Shadowed::new(0..u64::MAX, &[10, 20, 30, 40]) };
    let expected = plain_loop(&plan(&job), Some(&shadowed));
    for replicas in ["spec.roles.ps.replicas=1", "spec.roles.ps.replicas=3"] {
        assert_eq!(digest_of(&[&job[..], &[replicas]].concat()), expected, "{replicas}");
    }
}

/// Fragments divide the partition of each server. A pause moves all of them, and begins with the
/// first one again.
#[test]
fn with_fragments_one_worker_equals_a_plain_loop_to_the_bit() {
    let evaluation = "spec.training.evaluation.every=steps,spec.training.evaluation.steps=10";
    let outer = ["algorithm=bmuf", "eta=0.6", "momentum=0.4", "nesterov=true"];
    let outer = outer.map(|setting| format!("spec.training.shadow.{setting}")).join(",");
    let block = || Some((0.6, 0.4, RefCell::default()));
    for (settings, block) in [("spec.training.shadow.algorithm=easgd", None), (outer.as_str(), block())] {
        let job = [&FOREGROUND[..], &["spec.training.mode=shadow", settings, evaluation]].concat();
        let all = Shadowed { block, ..Shadowed::new(0..u64::MAX, &[10, 20, 30, 40]) };
        let whole = plain_loop(&plan(&job), Some(&all));
        for division in [(1, 3), (3, 4)] {
            let block = all.block.as_ref().map(|(eta, momentum, _)| (*eta, *momentum, RefCell::default()));
            let shadowed = Shadowed { division, block, ..Shadowed::new(0..u64::MAX, &[10, 20, 30, 40]) };
            let expected = plain_loop(&plan(&job), Some(&shadowed));
            assert_ne!(expected, whole, "{division:?}: a fragment waits for its turn");
            let (servers, fragments) = division;
            let changes = format!("spec.roles.ps.replicas={servers},spec.training.shadow.fragments={fragments}");
            assert_eq!(digest_of(&[&job[..], &[changes.as_str()]].concat()), expected, "{settings}, {division:?}");
        }
    }
}

/// The first exchange of a fragment after each pause is whole.
#[test]
fn with_bf16_one_worker_equals_a_plain_loop_to_the_bit() {
    let evaluation = "spec.training.evaluation.every=steps,spec.training.evaluation.steps=10";
    let settings = "spec.training.mode=shadow,spec.training.shadow.fragments=2,spec.roles.ps.replicas=3";
    let job = [&FOREGROUND[..], &[settings, evaluation]].concat();
    let shadowed = |bases| Shadowed { division: (3, 2), bases, ..Shadowed::new(0..u64::MAX, &[10, 20, 30, 40]) };
    let expected = plain_loop(&plan(&job), Some(&shadowed(Some(RefCell::default()))));
    assert_ne!(expected, plain_loop(&plan(&job), Some(&shadowed(None))), "bf16 rounds");
    assert_eq!(digest_of(&[&job[..], &["spec.training.shadow.wirePrecision=bf16"]].concat()), expected);
}

/// The first replica and the mean of all are the only replica. A pause makes it the copy, and
/// leaves the replica as it is.
#[test]
fn the_output_model_of_one_worker_is_its_replica_to_the_bit() {
    let evaluation = "spec.training.evaluation.every=steps,spec.training.evaluation.steps=10";
    let job = [&FOREGROUND[..], &["spec.training.mode=shadow", evaluation]].concat();
    let shadowed = Shadowed { output_is_replica: true, ..Shadowed::new(0..u64::MAX, &[10, 20, 30, 40]) };
    let expected = plain_loop(&plan(&job), Some(&shadowed));
    assert_ne!(digest_of(&job), expected, "by default the output is the copy, which lags behind");
    for rule in ["mean", "first"] {
        let output = format!("spec.training.shadow.outputModel={rule}");
        assert_eq!(digest_of(&[&job[..], &[output.as_str(), "spec.roles.ps.replicas=3"]].concat()), expected, "{rule}");
    }
}

/// The mean of one replica is this replica, so that an exchange changes nothing.
#[test]
fn ma_with_one_worker_in_the_foreground_equals_sync_to_the_bit() {
    let sync = digest_of(&[]);
    for every in [1, 8] {
        let every = format!("spec.training.shadow.everySteps={every}");
        let ma = [
            "spec.training.mode=shadow",
            "spec.training.shadow.algorithm=ma",
            every.as_str(),
            "spec.roles.ps.replicas=2",
        ];
        assert_eq!(digest_of(&ma), sync, "{every}");
    }
}

#[test]
fn a_switch_to_shadow_and_back_equals_a_plain_loop_to_the_bit() {
    let switches = switches(&[(5, "shadow"), (17, "sync")]);
    let job = [&FOREGROUND[..], &[switches.as_str()]].concat();
    let expected = plain_loop(&plan(&job), Some(&Shadowed::new(5..17, &[])));
    let (summary, _) = train(plan(&[&job[..], &["spec.roles.ps.replicas=2"]].concat())).unwrap();
    assert_eq!(summary.parameters_sha256, expected);
    assert_eq!((summary.trained_rows, summary.samples, summary.mode_switches), (4000, 4000, 2));
}

/// The sum of a metric over all replicas of its role.
fn total(metrics: &RoleMetrics, name: &str) -> f64 {
    values(metrics, name).iter().sum()
}

/// A job on which modes are compared by what they learn.
const LEARNING: [&str; 5] = [
    "spec.roles.denseWorker.replicas=2",
    "spec.data.synthetic.rows=12000",
    "spec.training.epochs=1",
    "spec.training.optimizer.sparse.learningRate=0.01",
    "spec.training.optimizer.dense.learningRate=0.003",
];

/// Threads update one replica without locks. Pauses stop all threads, and each batch is in an
/// exchange of its worker.
#[test]
fn several_threads_of_a_replica_learn_nearly_as_well_as_sync() {
    let sync = train(plan(&[&LEARNING[..], &["spec.training.mode=sync"]].concat())).unwrap().0;
    let sync = sync.test.unwrap().auc.unwrap();
    for (threads, settings) in [
        (2, "algorithm=easgd"),
        (3, "algorithm=ma,spec.training.evaluation.every=steps,spec.training.evaluation.steps=50"),
        (3, "everySteps=4"),
        (5, "fragments=3,spec.training.shadow.wirePrecision=bf16,spec.training.shadow.outputModel=mean"),
    ] {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let mode =
            format!("spec.training.mode=shadow,spec.training.shadow.threads={threads},spec.training.shadow.{settings}");
        let (summary, _) = train_measured(plan(&[&LEARNING[..], &[&mode]].concat()), &metrics).unwrap();
        assert_eq!((summary.trained_rows, summary.lost_replica_batches), (12_000, 0), "{settings}");
        assert_eq!(summary.window.map(|window| window.rows), Some(12_000), "{settings}");
        let auc = summary.test.unwrap().auc.unwrap();
        assert!(sync > 0.6 && auc > sync - 0.05, "sync {sync}, {settings} {auc}");
        let batches = total(&metrics, "rectrain_dense_worker_sync_gap_steps_sum");
        assert!(batches >= 250.0, "{settings}: {batches} of 250 batches");
    }
}

#[test]
fn shadow_learns_nearly_as_well_as_sync_and_every_batch_reaches_the_copy() {
    let job = LEARNING;
    let learned = |mode: &str, metrics: &RoleMetrics| {
        let (summary, _) = train_measured(plan(&[&job[..], &[mode]].concat()), metrics).unwrap();
        assert_eq!((summary.trained_rows, summary.lost_replica_batches), (12_000, 0), "{mode}");
        // The last reports of all workers are in it, which no event of progress has to be.
        assert_eq!(summary.window.map(|window| window.rows), Some(12_000), "{mode}");
        summary.test.unwrap().auc.unwrap()
    };
    let sync = learned("spec.training.mode=sync", &RoleMetrics::new(Registry::new()).unwrap());
    for (algorithm, fragments) in [("easgd", 1), ("ma", 1), ("bmuf", 1), ("easgd", 3), ("bmuf", 3)] {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let mode = format!(
            "spec.training.mode=shadow,spec.training.shadow.algorithm={algorithm},\
             spec.training.shadow.fragments={fragments}"
        );
        let shadow = learned(&mode, &metrics);
        assert!(sync > 0.6 && shadow > sync - 0.05, "sync {sync}, {algorithm} {shadow}");
        // 250 local batches of 48 rows. Each is in one gap of each fragment of its replica. The
        // gaps at the end of the order overlap.
        let (gaps, batches) = (
            total(&metrics, "rectrain_dense_worker_sync_gap_steps_count"),
            total(&metrics, "rectrain_dense_worker_sync_gap_steps_sum"),
        );
        if fragments == 1 {
            assert_eq!(batches, 250.0, "{algorithm}");
        } else {
            assert!(batches >= 250.0, "{algorithm}, {fragments} fragments: {batches}");
        }
        // Each worker makes a last exchange, which no batch has to precede.
        assert!((1.0..=252.0).contains(&gaps), "{algorithm}: {gaps}");
        assert!(total(&metrics, "rectrain_ps_exchanges_total") >= gaps, "{algorithm}");
    }
}

#[test]
fn in_the_foreground_the_sync_gap_is_every_steps() {
    for algorithm in ["easgd", "ma", "bmuf"] {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let algorithm = format!("spec.training.shadow.algorithm={algorithm}");
        let foreground = ["spec.training.mode=shadow", "spec.training.shadow.everySteps=8"];
        let job = [&foreground[..], &["spec.roles.ps.replicas=2", algorithm.as_str()]].concat();
        let (summary, _) = train_measured(plan(&job), &metrics).unwrap();
        // A pause requires the last exchange, so the summary leaves it out.
        assert_eq!(summary.average_sync_gap, Some(8.0), "{algorithm}");
        // 42 batches: five gaps of 8, and the last exchange with 2. Each server has seen all of
        // them.
        assert_eq!(total(&metrics, "rectrain_dense_worker_sync_gap_steps_count"), 6.0, "{algorithm}");
        assert_eq!(total(&metrics, "rectrain_dense_worker_sync_gap_steps_sum"), 42.0, "{algorithm}");
        assert_eq!(total(&metrics, "rectrain_ps_exchanges_total"), 12.0, "{algorithm}");
    }
}

/// `spec.training.switchAt` as an override.
fn switches(switches: &[(u32, &str)]) -> String {
    let field = |(index, (step, mode)): (usize, &(u32, &str))| {
        format!("spec.training.switchAt[{index}].step={step},spec.training.switchAt[{index}].mode={mode}")
    };
    switches.iter().enumerate().map(field).collect::<Vec<_>>().join(",")
}

const TOKEN_MODES: [&str; 5] = ["async", "gba", "hopBs", "hopBw", "bsp"];

#[test]
fn gba_alone_with_a_buffer_of_one_equals_sync_to_the_bit() {
    let sync = digest_of(&[]);
    assert_eq!(sync, digest_of(&["spec.training.mode=gba"]));
    assert_eq!(sync, digest_of(&["spec.training.mode=gba", "spec.roles.ps.replicas=3"]));
    assert_eq!(sync, digest_of(&["spec.training.mode=async", "spec.roles.embeddingWorker.replicas=2"]));
    // The dropout mask depends on the batch, also after the last batch of an epoch, which is
    // smaller.
    let dropout = "spec.model.dropout=0.3";
    assert_ne!(digest_of(&[dropout]), sync);
    assert_eq!(digest_of(&[dropout]), digest_of(&[dropout, "spec.training.mode=gba"]));
}

#[test]
fn a_switch_there_and_back_changes_no_bit_and_loses_no_row() {
    let sync = digest_of(&[]);
    for mode in ["gba", "async", "bsp"] {
        let switches = switches(&[(5, mode), (17, "sync"), (30, mode)]);
        let (summary, events) = train(plan(&[&switches, "spec.roles.ps.replicas=2"])).unwrap();
        assert_eq!(summary.parameters_sha256, sync, "{mode}");
        assert_eq!((summary.trained_rows, summary.samples, summary.mode_switches), (4000, 4000, 3), "{mode}");
        let switched: Vec<_> = events
            .iter()
            .filter_map(|event| match event {
                JobEvent::ModeSwitched { step, from, to } => Some((*step, from.as_str(), to.as_str())),
                _ => None,
            })
            .collect();
        assert_eq!(switched, [(5, "sync", mode), (17, mode, "sync"), (30, "sync", mode)]);
    }
}

#[test]
fn gba_learns_nearly_as_well_as_sync() {
    let auc = |mode: &str| {
        let changes = [
            mode,
            "spec.training.globalBatchSize=96",
            "spec.roles.denseWorker.replicas=3",
            "spec.data.synthetic.rows=9600",
            "spec.training.epochs=1",
            "spec.training.optimizer.sparse.learningRate=0.01",
            "spec.training.optimizer.dense.learningRate=0.003",
        ];
        let (summary, _) = train(plan(&changes)).unwrap();
        assert_eq!(summary.trained_rows, 9600, "{mode}");
        summary.test.unwrap().auc.unwrap()
    };
    let (sync, gba) = (auc("spec.training.mode=sync"), auc("spec.training.mode=gba"));
    assert!(sync > 0.6 && gba > 0.57, "both learn: sync {sync}, gba {gba}");
}

#[test]
fn every_mode_trains_every_row_once() {
    for mode in TOKEN_MODES.into_iter().chain(["shadow"]) {
        let mode_set = format!("spec.training.mode={mode}");
        let changes = [
            mode_set.as_str(),
            "spec.roles.denseWorker.replicas=3",
            "spec.roles.ps.replicas=2",
            "spec.roles.embeddingWorker.replicas=2",
            "spec.roles.loader.replicas=2",
            "spec.training.evaluation.every=epoch",
        ];
        let (summary, events) = train(plan(&changes)).unwrap();
        let dropped_rows = summary.dropped_batches * 32;
        assert!(summary.trained_rows + dropped_rows >= 4000 && summary.trained_rows <= 4000, "{mode}: {summary:?}");
        assert!(mode == "hopBw" || summary.trained_rows == 4000, "{mode}: {summary:?}");
        assert_eq!(summary.tokens_lost, 0, "{mode}");
        if mode != "hopBw" {
            let applied = [summary.fewest_applied_gradients, summary.most_applied_gradients];
            // In `shadow` no dense gradient travels.
            let expected = if mode == "shadow" { 0 } else { summary.tokens_issued };
            assert_eq!(applied, [expected; 2], "{mode}: every server has applied all tokens");
        }
        let evaluations = events.iter().filter(|event| matches!(event, JobEvent::Evaluation { .. })).count();
        assert_eq!(evaluations, 2, "{mode}");
        assert_eq!(summary.mode, mode);
    }
}

#[test]
fn a_schedule_through_all_modes_loses_no_row() {
    let modes = ["gba", "sync", "async", "hybrid", "hopBs", "shadow", "gba", "bsp", "shadow", "sync"];
    let steps: Vec<_> = modes.iter().enumerate().map(|(i, mode)| (4 * i as u32 + 3, *mode)).collect();
    let switches = switches(&steps);
    let (summary, _) = train(plan(&[
        &switches,
        "spec.roles.denseWorker.replicas=3",
        "spec.roles.ps.replicas=2",
        "spec.training.evaluation.every=steps",
        "spec.training.evaluation.steps=10",
    ]))
    .unwrap();
    assert_eq!((summary.trained_rows, summary.samples, summary.mode_switches), (4000, 4000, 10));
}

#[test]
fn only_some_workers_may_train_with_a_barrier() {
    let few =
        ["spec.roles.denseWorker.replicas=3", "spec.training.barrierWorkers=1", "spec.training.localBatchSize=96"];
    let sync = digest_of(&[]);
    assert_eq!(sync, digest_of(&few), "one of three trains");
    let switches = switches(&[(10, "gba"), (30, "sync")]);
    let (summary, _) = train(plan(&[&few[..2], &["spec.training.localBatchSize=32", &switches]].concat())).unwrap();
    assert_eq!((summary.trained_rows, summary.samples, summary.mode_switches), (4000, 4000, 2));
}

#[test]
fn small_local_batches_change_sync_by_rounding_only() {
    let small = ["spec.training.localBatchSize=16", "spec.roles.denseWorker.replicas=2"];
    let auc = |mode: &str| {
        let summary = train(plan(&[&small[..], &[mode]].concat())).unwrap().0;
        assert_eq!(summary.trained_rows, 4000);
        summary.test.unwrap().auc.unwrap()
    };
    let whole = train(plan(&["spec.roles.denseWorker.replicas=2"])).unwrap().0.test.unwrap().auc.unwrap();
    assert!((auc("spec.training.mode=sync") - whole).abs() < 1e-4);
    assert!((auc("spec.training.mode=gba") - whole).abs() < 0.06);
}

#[test]
fn slices_are_tested_on_before_they_are_trained_on() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rows.csv");
    let rows: String = (0..1000).map(|i| format!("{},{}\n", u8::from(i % 7 < 3), i % 7)).collect();
    std::fs::write(&file, format!("label,user\n{rows}")).unwrap();
    let manifest = format!(
        "{{apiVersion: rectrain.dev/v1alpha1, kind: RecTrainingJob, metadata: {{name: t}}, spec: {{model: {{kind: lr}},
         features: {{sparse: [{{name: user}}]}}, training: {{globalBatchSize: 50, optimizer: {{sparse: {{learningRate: 0.1}}}}}},
         data: {{source: {{paths: [{}]}}, split: {{slices: {{rows: 200}}}}}}}}}}",
        file.display()
    );
    for mode in ["sync", "gba"] {
        let set = rectrain_crds::Override {
            kind: rectrain_crds::SetKind::Infer,
            expression: format!("spec.training.mode={mode}"),
        };
        let manifest = rectrain_crds::load(&manifest, "t.yaml", &[set]).unwrap();
        let (summary, events) = train(JobPlan::new(&manifest.resolved).unwrap()).unwrap();
        let tests: Vec<_> = events
            .iter()
            .filter_map(|event| match event {
                JobEvent::Evaluation { step, test } => Some((*step, test.samples, test.auc.unwrap())),
                _ => None,
            })
            .collect();
        assert_eq!(
            tests.iter().map(|(step, samples, _)| (*step, *samples)).collect::<Vec<_>>(),
            [(4, 200), (8, 200), (12, 200), (16, 200)]
        );
        assert!(tests[3].2 > 0.95, "the rule is learned: {tests:?}");
        assert_eq!(summary.trained_rows, 1000);
    }
}

#[test]
fn hybrid_learns_as_well_as_sync() {
    let learned = |changes: &[&str]| {
        let job = [
            "spec.data.synthetic.rows=12000",
            "spec.training.epochs=1",
            "spec.training.optimizer.sparse.learningRate=0.01",
            "spec.training.optimizer.dense.learningRate=0.003",
        ];
        let changes = [&job[..], changes].concat();
        let (summary, _) = train(plan(&changes)).unwrap();
        summary.test.unwrap().auc.unwrap()
    };
    let sync = learned(&[]);
    let hybrid = learned(&["spec.training.mode=hybrid"]);
    assert!(sync > 0.6, "sync learns: AUC {sync}");
    assert!((sync - hybrid).abs() < 0.02, "sync {sync}, hybrid {hybrid}");
}

#[test]
fn every_model_trains_and_evaluates() {
    for kind in ["dlrm", "deepfm", "dnn", "wideDeep", "dcn", "dcnV2", "fm", "lr"] {
        let kind_set = format!("spec.model.kind={kind}");
        let shape: &[&str] = match kind {
            "lr" => &["spec.model.hidden=null", "spec.model.embeddingDim=null"],
            "fm" => &["spec.model.hidden=null"],
            _ => &[],
        };
        let (summary, events) = train(plan(&[&[kind_set.as_str()], shape].concat())).unwrap();
        assert_eq!(summary.steps, 2 * 2000u64.div_ceil(96), "{kind}");
        assert_eq!(summary.samples, 4000, "{kind}");
        assert_eq!(summary.test.unwrap().samples, 500, "{kind}");
        assert!(matches!(events.first(), Some(JobEvent::Started { .. })), "{kind}");
        assert!(matches!(events.last(), Some(JobEvent::Summary(_))), "{kind}");
    }
}

#[test]
fn evaluation_changes_nothing_and_falls_where_the_manifest_says() {
    let (summary, events) =
        train(plan(&["spec.training.evaluation.every=steps", "spec.training.evaluation.steps=10"])).unwrap();
    let at: Vec<u64> = events
        .iter()
        .filter_map(|event| match event {
            JobEvent::Evaluation { step, .. } => Some(*step),
            _ => None,
        })
        .collect();
    assert_eq!(at, [10, 20, 30, 40, 42]);
    assert_eq!(summary.parameters_sha256, digest_of(&[]));
}

#[test]
fn a_limit_on_steps_ends_training_there_and_spans_epochs() {
    let (summary, _) = train(plan(&["spec.training.epochs=null", "spec.training.steps=50"])).unwrap();
    assert_eq!((summary.steps, summary.samples), (50, 2 * 2000 + 8 * 96));
}

#[test]
fn a_batch_above_65535_samples_trains_every_sample() {
    let changes = ["spec.training.globalBatchSize=70000", "spec.data.synthetic.rows=70000", "spec.training.epochs=1"];
    let (summary, _) = train(plan(&changes)).unwrap();
    assert_eq!((summary.steps, summary.samples), (1, 70_000));
}

#[test]
fn fp16_compression_costs_little_accuracy() {
    let auc = |changes: &[&str]| train(plan(changes)).unwrap().0.test.unwrap().auc.unwrap();
    let (plain, compressed) = (auc(&[]), auc(&["spec.training.compression=fp16"]));
    assert!((plain - compressed).abs() < 0.01, "{plain} {compressed}");
}

#[test]
fn sync_in_bf16_repeats_to_the_bit_and_learns_like_fp32() {
    let bf16 = "spec.training.precision=bf16";
    let first = digest_of(&[bf16]);
    assert_eq!(first, digest_of(&[bf16, "spec.roles.denseWorker.threads=1", "spec.roles.ps.replicas=2"]));
    assert_eq!(first, plain_loop(&plan(&[bf16]), None));
    assert_ne!(first, digest_of(&[]), "bf16 has no effect");
    let auc = |changes: &[&str]| train(plan(changes)).unwrap().0.test.unwrap().auc.unwrap();
    for model in ["spec.model.kind=dnn", "spec.model.kind=deepfm", "spec.model.kind=dlrm"] {
        let (fp32, bf16) = (auc(&[model]), auc(&[model, bf16]));
        assert!((fp32 - bf16).abs() < 0.001, "{model}: AUC {fp32} in 32 bits, {bf16} in bf16");
    }
}

#[test]
fn a_label_that_never_varies_is_the_users_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("zeros.csv");
    std::fs::write(&file, format!("label,user\n{}", "0,1\n".repeat(100))).unwrap();
    let manifest = format!(
        "{{apiVersion: rectrain.dev/v1alpha1, kind: RecTrainingJob, metadata: {{name: t}}, spec: {{model: {{kind: lr}},
         features: {{sparse: [{{name: user}}]}}, data: {{train: {{paths: [{}]}}}}}}}}",
        file.display()
    );
    let manifest = rectrain_crds::load(&manifest, "t.yaml", &[]).unwrap();
    let error = train(JobPlan::new(&manifest.resolved).unwrap()).unwrap_err();
    assert!(error.is_user_error(), "{error}");
    assert!(error.to_string().contains("`label` is 0 in all 100 rows"), "{error}");
}

/// The choice between modes depends on these times. A worker that is four times slower must be seen
/// as slow, and the wait for it must not count as all-reduce.
#[test]
fn the_coordinator_knows_how_fast_each_dense_worker_computes() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    runtime.block_on(async {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let plan = Arc::new(plan(&["spec.roles.denseWorker.replicas=2"]));
        let own = CoordinatorMetrics::of(&metrics, 0);
        let coordinator = Coordinator::start(Arc::clone(&plan), "test", None, EventLog::default(), own).await.unwrap();
        let coordinator = Arc::new(coordinator);
        assert!(coordinator.status().workers.is_empty(), "no worker has computed yet");
        run_with(plan, &BTreeMap::from([(1, 4.0)]), Arc::clone(&coordinator), metrics).await.unwrap();
        let status = coordinator.status();
        let mean = |rank: usize| {
            let seconds = &status.workers[rank].compute_seconds;
            seconds.iter().sum::<f32>() / seconds.len() as f32
        };
        assert_eq!(status.workers.iter().map(|worker| worker.rank).collect::<Vec<_>>(), [0, 1]);
        assert!(mean(1) > 1.5 * mean(0), "{} and {} s", mean(0), mean(1));
        assert!(status.workers.iter().all(|worker| worker.batch_rows > 0.0));
        assert!(status.all_reduce_seconds > 0.0);
    });
}

/// Without a barrier, workers count no steps, and batches are the progress.
#[test]
fn a_job_without_a_barrier_is_not_idle_while_it_trains() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    runtime.block_on(async {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let plan = Arc::new(plan(&[
            "spec.training.mode=gba",
            "spec.roles.denseWorker.replicas=2",
            "spec.data.synthetic.rows=100000000",
        ]));
        let own = CoordinatorMetrics::of(&metrics, 0);
        let coordinator = Coordinator::start(Arc::clone(&plan), "test", None, EventLog::default(), own).await.unwrap();
        let coordinator = Arc::new(coordinator);
        let slow = BTreeMap::from([(1, 2.0)]);
        let training = run_with(plan, &slow, Arc::clone(&coordinator), metrics);
        let watching = async {
            while coordinator.status().samples == 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            tokio::time::sleep(Duration::from_secs(3)).await;
            coordinator.status().idle_seconds.unwrap()
        };
        let idle = tokio::select! {
            ended = training => panic!("training has ended: {:?}", ended.map(|summary| summary.steps)),
            idle = tokio::time::timeout(Duration::from_secs(120), watching) => idle.expect("training starts in time"),
        };
        assert!(idle < 1.5, "idle for {idle} s");
    });
}

/// A local batch that fits into no message is refused before training starts.
#[test]
fn a_local_batch_too_large_for_a_message_is_refused() {
    let plan = plan(&[]);
    plan.check_message_size(1 << 30).unwrap();
    let error = plan.check_message_size(2 << 10).unwrap_err();
    assert!(error.is_user_error() && error.to_string().contains("spec.training.localBatchSize: 96 rows"), "{error}");
}

/// 26 features of 4 columns and the bias, by 16 units.
#[test]
fn a_first_layer_too_large_for_a_message_is_refused_in_des() {
    for (mode, is_refused) in [("spec.training.mode=des", true), (&*switches(&[(5, "des")]), true), (".", false)] {
        let small = "spec.training.localBatchSize=1,spec.training.globalBatchSize=8";
        let changes: Vec<&str> = [small, mode].into_iter().filter(|change| *change != ".").collect();
        let checked = plan(&changes).check_message_size((1 << 10) + 105 * 16 * 4 - 1);
        let error = checked.err().map(|error| error.to_string());
        assert_eq!(error.is_some(), is_refused, "{mode}: {error:?}");
        assert!(error.is_none_or(|error| error.contains("spec.model.hidden: in the mode des")), "{mode}");
    }
    let plan = plan(&["spec.training.mode=des", "spec.training.localBatchSize=1", "spec.training.globalBatchSize=8"]);
    plan.check_message_size((1 << 10) + 105 * 16 * 4).unwrap();
}

/// Each bad row counts once an epoch, for any number of loaders.
#[test]
fn bad_rows_that_are_skipped_count_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rows.csv");
    // Every 50th row and the last one are bad.
    let row = |row: u64| if row.is_multiple_of(50) { "?,1\n".to_owned() } else { format!("{},{}\n", row % 2, row % 7) };
    std::fs::write(&file, format!("label,user\n{}", (0..=1000).map(row).collect::<String>())).unwrap();
    for (loaders, epochs) in [(1, 1), (3, 1), (2, 3)] {
        let manifest = format!(
            "{{apiVersion: rectrain.dev/v1alpha1, kind: RecTrainingJob, metadata: {{name: t}}, spec: {{model: {{kind: lr}},
             features: {{sparse: [{{name: user}}]}}, data: {{train: {{paths: [{}]}}, badRows: {{action: skip, limit: 30}}}},
             roles: {{loader: {{replicas: {loaders}}}}}, training: {{globalBatchSize: 20, epochs: {epochs}}}}}}}",
            file.display()
        );
        let manifest = rectrain_crds::load(&manifest, "t.yaml", &[]).unwrap();
        let (summary, _) = train(JobPlan::new(&manifest.resolved).unwrap()).unwrap();
        let counts = (summary.samples, summary.skipped_rows);
        assert_eq!(counts, (980 * epochs, 21 * epochs), "{loaders} loaders, {epochs} epochs");
    }
}

/// The rows of a slice are read twice, to evaluate and to train on them. A bad row among them
/// counts once.
#[test]
fn bad_rows_of_slices_count_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rows.csv");
    let row = |row: u64| if row.is_multiple_of(50) { "?,1\n".to_owned() } else { format!("{},{}\n", row % 2, row % 7) };
    std::fs::write(&file, format!("label,user\n{}", (1..=1000).map(row).collect::<String>())).unwrap();
    let manifest = format!(
        "{{apiVersion: rectrain.dev/v1alpha1, kind: RecTrainingJob, metadata: {{name: t}}, spec: {{model: {{kind: lr}},
         features: {{sparse: [{{name: user}}]}}, training: {{globalBatchSize: 49}},
         data: {{source: {{paths: [{}]}}, split: {{slices: {{rows: 196}}}}, badRows: {{action: skip, limit: 30}}}}}}}}",
        file.display()
    );
    let manifest = rectrain_crds::load(&manifest, "t.yaml", &[]).unwrap();
    let (summary, _) = train(JobPlan::new(&manifest.resolved).unwrap()).unwrap();
    assert_eq!((summary.trained_rows, summary.skipped_rows), (980, 20));
}

/// `mode: auto` with one slow worker: the job leaves `sync`, so that no worker waits for the slow
/// one.
#[test]
fn auto_leaves_sync_when_one_worker_is_slow_and_says_why() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut plan = plan(&["spec.roles.denseWorker.replicas=2", "spec.training.epochs=100000"]);
        plan.auto =
            Some(ModePolicy { window_seconds: 3, dwell_seconds: 60, switch_seconds: 0.5, ..ModePolicy::default() });
        let plan = Arc::new(plan);
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let events = EventLog::default();
        let mut follower = events.follow();
        let own = CoordinatorMetrics::of(&metrics, 0);
        let coordinator = Arc::new(Coordinator::start(Arc::clone(&plan), "test", None, events, own).await.unwrap());
        let slow = BTreeMap::from([(1, 20.0)]);
        let training = run_with(plan, &slow, coordinator, metrics);
        let switched = async {
            let mut chosen = None;
            while let Some(event) = follower.next().await {
                match event {
                    JobEvent::ModeChosen { mode, reason } => chosen = Some((mode, reason)),
                    JobEvent::ModeSwitched { from, to, .. } => return (chosen, from, to),
                    _ => {}
                }
            }
            panic!("training ended in sync");
        };
        let (chosen, from, to) = tokio::select! {
            ended = training => panic!("training ended in sync: {:?}", ended.map(|summary| summary.steps)),
            switched = tokio::time::timeout(Duration::from_secs(120), switched) => switched.expect("a switch in time"),
        };
        let (mode, reason) = chosen.expect("a switch is chosen before it is made");
        assert_eq!((mode.as_str(), from.as_str(), to.as_str()), ("gba", "sync", "gba"));
        assert!(reason.contains("worker 1"), "{reason}");
    });
}
