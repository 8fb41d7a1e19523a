//! A server whose rows are on shards: it follows the dense part of published models, and goes to a
//! model once a replica of every shard holds its rows.

use std::time::{Duration, Instant};

use prometheus::Registry;
use rectrain_inference::{NextModel, RowClient, RowOptions, ShardedPredictor, Updates};
use rectrain_serving::GroupContent;
use rectrain_serving::publication::{DenseFollower, DenseUpdate, DenseVersion, RowChanges, Trouble};
use tokio::runtime::Runtime;

use super::args::ServeArgs;
use super::follow::{open_directory, start_thread};
use super::gate::Gate;
use crate::failure::Failure;

/// The longest time until the shards have the first model. They load it meanwhile.
const FIRST: Duration = Duration::from_secs(600);
/// The time between two messages about a shard that has no model yet.
const MESSAGE: Duration = Duration::from_secs(10);

/// The dense part of published models, and the shards with their rows.
pub(super) struct Sharded {
    runtime: Runtime,
    follower: DenseFollower,
    pub(super) client: RowClient,
    /// The content of the rows of the served model.
    pub(super) content: Vec<GroupContent>,
}

impl Sharded {
    /// Loads the dense part of the newest model of a path, and waits until every shard has the
    /// rows of a model.
    pub(super) fn open(args: &ServeArgs, registry: &Registry) -> Result<Self, Failure> {
        let Some((runtime, directory)) = open_directory(&args.model, &args.options)? else {
            return Err(Failure::User(format!(
                "no models are published in {}, and --rows-from needs a path of spec.serving.publish",
                args.model
            )));
        };
        let addresses = args.rows_from.iter().map(|replicas| replicas.0.clone()).collect();
        let options = RowOptions { hedge: args.hedge, limit: args.timeout };
        let client = RowClient::start(addresses, options, registry)?;
        let (mut follower, stopped) = runtime.block_on(DenseFollower::open(directory))?;
        if let Some(error) = stopped {
            tracing::warn!(%error, "the newest model cannot be taken yet, so an earlier one is served");
        }
        let content = runtime.block_on(until_held(&mut follower, &client, args.poll()))?;
        Ok(Self { runtime, follower, client, content })
    }

    /// The model that is served.
    pub(super) fn version(&self) -> &DenseVersion {
        self.follower.version()
    }

    /// Follows until the process ends.
    pub(super) fn start(
        self,
        every: Duration,
        gate: Option<Gate<ShardedPredictor>>,
        updates: Updates,
    ) -> Result<(), Failure> {
        let Self { runtime, follower, client, .. } = self;
        start_thread(move || runtime.block_on(follow(follower, &client, every, gate, &updates)))
    }
}

/// Goes to the newest model that all shards hold, and waits for one. Returns the content of its
/// rows.
async fn until_held(
    follower: &mut DenseFollower,
    client: &RowClient,
    every: Duration,
) -> Result<Vec<GroupContent>, Failure> {
    let (started, mut told) = (Instant::now(), Instant::now());
    let mut changes = client.changes();
    loop {
        follower.advance(|base| client.content(base).is_some());
        let base = &follower.version().base;
        if let Some(content) = client.content(base) {
            return Ok(content);
        }
        let problem = client.shard_without(base).unwrap_or_default();
        if started.elapsed() > FIRST {
            return Err(Failure::Failed(format!("the rows of the model cannot be read: {problem}")));
        }
        if told.elapsed() > MESSAGE {
            tracing::warn!(problem, "the server waits for the rows of its first model");
            told = Instant::now();
        }
        wait(&mut changes, Instant::now() + every).await;
        if let Err(error) = follower.look().await {
            tracing::debug!(%error, "the newest model cannot be read");
        }
    }
}

/// Waits until a replica holds other versions, or until a moment.
async fn wait(changes: &mut tokio::sync::watch::Receiver<u64>, until: Instant) {
    tokio::select! {
        changed = changes.changed() => {
            if changed.is_err() {
                tokio::time::sleep_until(until.into()).await;
            }
        }
        () = tokio::time::sleep_until(until.into()) => {}
    }
}

async fn follow(
    mut follower: DenseFollower,
    client: &RowClient,
    every: Duration,
    mut gate: Option<Gate<ShardedPredictor>>,
    updates: &Updates,
) {
    let mut trouble = Trouble::default();
    let mut changes = client.changes();
    let mut next_look = Instant::now() + every;
    // The changes of models that the gate did not let through.
    let mut refused = RowChanges::Known(Vec::new());
    loop {
        wait(&mut changes, next_look).await;
        let now = Instant::now();
        // A shard may have seen a newer model before its next look.
        let has_looked = now >= next_look || client.newest() > follower.newest();
        let mut problem = if has_looked { follower.look().await.err().map(|error| error.to_string()) } else { None };
        let mut content = None;
        let update = follower.advance(|base| {
            content = client.content(base);
            content.is_some()
        });
        let has_advanced = update.is_some();
        if let Some((update, content)) = update.zip(content) {
            let version = follower.version();
            let gated = gate.as_mut().map_or(Ok(()), |gate| gate.check(next_model(version, &update)));
            let changes = std::mem::replace(&mut refused, RowChanges::Known(Vec::new())).then(update.changes);
            match gated {
                Ok(()) => {
                    tracing::info!(sequence = version.base.sequence, step = version.model.step, "took a newer model");
                    updates.offer_dense(version, DenseUpdate { changes, ..update }, &content);
                }
                Err(reason) => {
                    refused = changes;
                    problem = Some(reason);
                }
            }
        }
        if has_looked || has_advanced {
            trouble.note(problem, || updates.failed());
        }
        if has_looked {
            next_look = Instant::now() + trouble.wait(every);
        }
    }
}

fn next_model(version: &DenseVersion, update: &DenseUpdate) -> NextModel {
    NextModel { model: version.model.clone(), base: version.base.clone(), changes: update.changes.clone() }
}
