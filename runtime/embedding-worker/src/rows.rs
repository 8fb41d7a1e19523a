//! The rows of a piece: reads and updates them on the parameter servers that own them.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use parking_lot::{Mutex, MutexGuard};
use rectrain_embedding::Examples;
use rectrain_kinds::{Compression, PartialPooling};
use rectrain_modes::des::SubOperators;
use rectrain_modes::migration::SlotMap;
use rectrain_pooling::{PreparedIds, ServerIds};
use rectrain_proto::v1;
use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::error::{RoleError, is_gone};
use rectrain_protocol::key_set::KeySet;
use rectrain_protocol::layout::FeatureLayout;
use rectrain_protocol::long_wait::reporting_wait;
use rectrain_protocol::metrics::EmbeddingWorkerMetrics;
use rectrain_protocol::placement::{Directory, Placement, is_stale};
use rectrain_protocol::plan::JobPlan;
use rectrain_wire::WireError;
use tokio::sync::{Notify, OnceCell};

use crate::parts::{Answer, Asking};
use crate::pooled::{GroupSums, pooled_piece, send_gradients};
use crate::sums::Sums;
use crate::times::ServerTime;

/// How often a look-up retries after a change of the slot map, and the pause before a retry.
const MAP_ATTEMPTS: usize = 100;
const MAP_PAUSE: Duration = Duration::from_millis(20);

/// A look-up of a piece.
pub(crate) struct LookUp<'p> {
    pub(crate) key: BatchKey,
    /// In a mode with a barrier: the step that trains the piece.
    pub(crate) step: Option<u64>,
    pub(crate) prepared: &'p PreparedIds,
    /// In `des`: asks for partial results instead of rows.
    pub(crate) partial: bool,
}

/// What the parameter servers returned for a piece.
pub(crate) enum Found {
    /// By row group: `[keys, row dim]`. The groups that servers pooled have sums instead.
    Rows(Vec<Vec<f32>>, Option<GroupSums>),
    /// In `des`: the sums of the partial results.
    Sums(Sums),
}

/// A piece as the parameter servers returned it.
pub(crate) struct LookedUp {
    /// `None` if a server has applied the step and no longer has the rows from before it.
    pub(crate) found: Option<Found>,
    /// In modes without a barrier: the step of each server.
    pub(crate) steps: Vec<u64>,
    /// In `sync`: whether every server has already applied the step.
    pub(crate) is_applied: bool,
    /// In an evaluation, by row group: whether each key has no row. Empty in training.
    pub(crate) missing: Vec<Vec<bool>>,
    /// The time of each server's reply.
    pub(crate) servers: Vec<ServerTime>,
}

/// The gradients of a piece's rows.
pub(crate) struct RowGradients {
    /// By row group: `[keys, row dim]`. Empty for a group that servers pool.
    pub(crate) rows: Vec<Vec<f32>>,
    /// The gradients of the sums of the groups that servers pool.
    pub(crate) sums: Option<GroupSums>,
    /// By row group: the examples of each key. Empty for a group whose policy needs none.
    pub(crate) examples: Vec<Vec<Examples>>,
    /// The latest event time of the piece's rows, in seconds since 1970. 0 without a clock.
    pub(crate) moment: u64,
}

/// The parameter servers, with the slot map that this embedding worker knows.
pub(crate) struct Rows {
    /// The index of this embedding worker.
    index: u32,
    pub(crate) layout: Arc<FeatureLayout>,
    /// By row group: whether gradients carry the examples of each key.
    pub(crate) counted: Vec<bool>,
    pub(crate) compression: Compression,
    pub(crate) partial_pooling: PartialPooling,
    pub(crate) patience: Duration,
    /// For the mode `des`.
    pub(crate) operators: Option<SubOperators>,
    /// Whether servers may answer look-ups of `sync` in two parts.
    looks_ahead: bool,
    directory: OnceCell<Directory>,
    placement: Mutex<Option<Arc<Placement>>>,
    connected: Notify,
    pub(crate) metrics: EmbeddingWorkerMetrics,
}

impl Rows {
    pub(crate) fn new(plan: &JobPlan, index: u32, layout: Arc<FeatureLayout>, metrics: EmbeddingWorkerMetrics) -> Self {
        Self {
            index,
            layout,
            counted: plan.counts_examples(),
            compression: plan.compression,
            partial_pooling: plan.partial_pooling,
            patience: plan.patience(),
            operators: plan.sub_operators(),
            looks_ahead: plan.look_ahead() > 0,
            directory: OnceCell::new(),
            placement: Mutex::default(),
            connected: Notify::new(),
            metrics,
        }
    }

    /// Sets the parameter servers, and the directory that returns newer placements. Look-ups wait
    /// until then.
    pub(crate) fn connect(&self, placement: Placement, directory: Directory) {
        // A repeated roster of the same job is equal to the first.
        if self.directory.set(directory).is_ok() {
            *self.lock_placement() = Some(Arc::new(placement));
        }
        self.connected.notify_waiters();
    }

    /// Looks up a piece. Fetches the slot map again while servers refuse it as stale.
    pub(crate) async fn look_up(&self, look_up: &LookUp<'_>) -> Result<LookedUp, RoleError> {
        let started = Instant::now();
        for _attempt in 0..MAP_ATTEMPTS {
            let placement = self.placement().await?;
            match self.look_up_at(&placement, look_up).await {
                Err(error) if is_stale(&error) => self.fetch_placement(&placement).await?,
                // A server exits once it has handed over its slots, perhaps before this worker gets
                // the new map.
                Err(RoleError::Wire(error)) if is_gone(&error) && self.is_superseded(&placement).await => {}
                // The server was killed and may restart with its rows. The next call waits for it.
                Err(RoleError::Wire(WireError::Closed { .. })) if started.elapsed() < self.patience => {
                    tokio::time::sleep(MAP_PAUSE).await;
                }
                looked_up => return looked_up,
            }
        }
        let placement = self.placement().await?;
        self.look_up_at(&placement, look_up).await
    }

    async fn look_up_at(&self, placement: &Placement, look_up: &LookUp<'_>) -> Result<LookedUp, RoleError> {
        if look_up.partial {
            return self.sums_at(placement, look_up).await;
        }
        match self.pooled_groups(look_up.key, look_up.prepared, placement) {
            Some(decision) => self.rows_and_sums_at(placement, look_up, decision).await,
            None => self.rows_at(placement, look_up).await,
        }
    }

    /// Sends the look-up to every parameter server, even if it has none of the keys. In a mode with
    /// a barrier, each server delays the reply until this step may be read. A server that has
    /// applied the step repeats its earlier reply.
    ///
    /// # Errors
    /// Some servers have applied the step and others have not. One that has applied it no longer
    /// has its earlier reply. The gradients that the other servers still need can then no longer be
    /// computed.
    async fn rows_at(&self, placement: &Placement, look_up: &LookUp<'_>) -> Result<LookedUp, RoleError> {
        let &LookUp { key, step, prepared, .. } = look_up;
        let runs = runs(&placement.map, prepared);
        let train = matches!(key.position, BatchPosition::Train(_));
        let piece = (train && self.looks_ahead && step.is_some()).then_some(key.piece);
        let map_epoch = placement.epoch().0;
        let request = v1::Lookup { step, train, map_epoch, piece, partial_samples: None, pooled: None };
        let calls = placement.servers.iter().enumerate().map(|(server, channel)| {
            let keys = prepared.keys().iter().zip(&runs).map(|(keys, runs)| gather(keys, &runs[server], 1));
            let keys: Vec<Vec<u64>> = keys.collect();
            let (compression, dims) = (self.compression, &*self.layout.group_dims);
            let asking = Asking { channel, request, compression, dims, patience: self.patience };
            let call = async move { asking.look_up(keys).await };
            self.timed(call, server_number(placement, server), train)
        });
        let (answers, servers): (Vec<Answer>, Vec<_>) = try_join_all(calls).await?.into_iter().unzip();
        let applied = answers.iter().filter(|answer| answer.is_applied).count();
        let is_applied = applied > 0 && applied == answers.len();
        let steps = answers.iter().map(|answer| answer.step).collect();
        let (rows, missing): (Vec<_>, Vec<_>) = answers.into_iter().map(|answer| (answer.rows, answer.missing)).unzip();
        let count = rows.len();
        let Some(of_servers) = rows.into_iter().collect::<Option<Vec<_>>>() else {
            return applied_already(applied, count, servers);
        };
        let rows = self.merged(of_servers, &runs, prepared, |_group| true)?;
        let missing = if train { Vec::new() } else { missing_keys(missing, &runs, prepared)? };
        Ok(LookedUp { found: Some(Found::Rows(rows, None)), steps, is_applied, missing, servers })
    }

    /// Merges the rows of all servers, by row group of the piece. The groups that are not
    /// `chosen` have none.
    pub(crate) fn merged(
        &self,
        of_servers: Vec<Vec<Vec<f32>>>,
        runs: &[Vec<Vec<Range<usize>>>],
        prepared: &PreparedIds,
        chosen: impl Fn(usize) -> bool,
    ) -> Result<Vec<Vec<f32>>, RoleError> {
        let mut of_servers: Vec<_> = of_servers.into_iter().map(Vec::into_iter).collect();
        let mut rows = Vec::with_capacity(runs.len());
        for (group, dim) in self.layout.group_dims.iter().enumerate() {
            let parts = of_servers.iter_mut().map(|groups| groups.next().unwrap_or_default()).collect();
            rows.push(match chosen(group) {
                true => merge(parts, &runs[group], prepared.keys()[group].len(), *dim)?,
                false => Vec::new(),
            });
        }
        Ok(rows)
    }

    /// Measures a look-up on one server. A long wait in training is reported to the coordinator.
    pub(crate) async fn timed<T>(
        &self,
        call: impl Future<Output = Result<Answer<T>, RoleError>>,
        server: u32,
        train: bool,
    ) -> Result<(Answer<T>, ServerTime), RoleError> {
        let started = Instant::now();
        let answer = match self.directory.get().filter(|_| train) {
            Some(directory) => {
                let waiting = v1::Waiting {
                    role: v1::Role::EmbeddingWorker.into(),
                    index: self.index,
                    for_role: v1::Role::Ps.into(),
                    for_index: server,
                };
                reporting_wait(call, &directory.coordinator, waiting).await?
            }
            None => call.await?,
        };
        let waited = Duration::try_from_secs_f64(answer.early_seconds).unwrap_or_default();
        let call = started.elapsed().saturating_sub(waited);
        let time = ServerTime { server, call, gate_seconds: answer.gate_seconds };
        Ok((answer, time))
    }

    /// Sends the gradients of the rows to the servers of this placement, which the rows came from.
    ///
    /// # Errors
    /// A server refuses the slot map. Another server may already have accepted its share, so the
    /// job restarts from its last checkpoint. The map changes only at a step boundary, so this
    /// indicates a bug.
    pub(crate) async fn update(
        &self,
        key: BatchKey,
        request: &v1::Backward,
        (prepared, placement): (&PreparedIds, &Placement),
        gradients: RowGradients,
    ) -> Result<v1::BackwardReply, RoleError> {
        let (runs, map_epoch) = (runs(&placement.map, prepared), placement.epoch().0);
        let pooled = gradients.sums.as_ref().map(|_sums| pooled_piece(key, prepared));
        let mut calls = Vec::with_capacity(placement.servers.len());
        for (server, channel) in placement.servers.iter().enumerate() {
            let push = request.push.as_ref().map(|push| token_push_to(push, server)).transpose()?;
            let (step, moment) = (request.step.unwrap_or_default(), gradients.moment);
            let update =
                v1::Update { step, piece: key.piece, push, map_epoch, moment, pooled, ..v1::Update::default() };
            let (gradients, runs) = (&gradients, &runs);
            let tensors = move || self.gradient_tensors(prepared, gradients, runs, server);
            let ids = move || match &gradients.sums {
                Some(GroupSums { groups, .. }) => {
                    ServerIds::divide_groups(prepared, &placement.map, &self.layout, groups)[server].to_tensors()
                }
                None => Vec::new(),
            };
            calls.push(send_gradients(channel, update, tensors, ids));
        }
        let mut all = v1::BackwardReply::default();
        for reply in try_join_all(calls).await? {
            self.metrics.missing_rows.inc_by(reply.missing_rows);
            all.outcome = all.outcome.max(reply.outcome);
            all.steps.push(reply.step);
        }
        Ok(all)
    }

    pub(crate) async fn placement(&self) -> Result<Arc<Placement>, RoleError> {
        let known = async {
            loop {
                let connected = self.connected.notified();
                if let Some(placement) = self.lock_placement().clone() {
                    return placement;
                }
                connected.await;
            }
        };
        tokio::time::timeout(self.patience, known).await.map_err(|_| RoleError::Task {
            what: "an embedding worker's wait",
            reason: format!("the parameter servers did not come within {:?}", self.patience),
        })
    }

    /// Fetches a placement newer than `old`, which a server has refused. Pauses if there is none
    /// yet.
    async fn fetch_placement(&self, old: &Placement) -> Result<(), RoleError> {
        let Some(directory) = self.directory.get() else { return Err(RoleError::Stopped) };
        if self.placement().await?.epoch() > old.epoch() {
            return Ok(());
        }
        let fetched = directory.fetch().await?;
        if self.adopt(fetched) {
            return Ok(());
        }
        tokio::time::sleep(MAP_PAUSE).await;
        Ok(())
    }

    /// Fetches and adopts the current placement. Returns whether it is newer than `old`.
    async fn is_superseded(&self, old: &Placement) -> bool {
        let Some(directory) = self.directory.get() else { return false };
        directory.fetch().await.is_ok_and(|fetched| {
            self.adopt(fetched);
            self.lock_placement().as_ref().is_some_and(|known| known.epoch() > old.epoch())
        })
    }

    /// Adopts a placement if it is newer than the known one, and returns whether it is.
    fn adopt(&self, fetched: Placement) -> bool {
        let mut placement = self.lock_placement();
        let is_newer = placement.as_ref().is_none_or(|known| known.epoch() < fetched.epoch());
        if is_newer {
            *placement = Some(Arc::new(fetched));
        }
        is_newer
    }

    fn lock_placement(&self) -> MutexGuard<'_, Option<Arc<Placement>>> {
        self.placement.lock()
    }
}

/// The look-up of a step that `applied` of `servers` parameter servers have applied, without rows.
///
/// # Errors
/// Not all servers have applied it.
pub(crate) fn applied_already(applied: usize, servers: usize, times: Vec<ServerTime>) -> Result<LookedUp, RoleError> {
    if applied < servers {
        return Err(applied_by_some(applied, servers));
    }
    Ok(LookedUp { found: None, steps: Vec::new(), is_applied: true, missing: Vec::new(), servers: times })
}

/// The error of [`Rows::look_up`]. It occurs in `sync` after three processes died together: an
/// embedding worker, a dense worker, and a parameter server that had answered their look-up.
fn applied_by_some(some: usize, servers: usize) -> RoleError {
    let reason = format!(
        "{some} of {servers} parameter servers have applied the step and the others lack gradients that cannot be computed again"
    );
    RoleError::Inconsistent { message: "lookup", reason }
}

/// The number of the server at a position of the slot map.
pub(crate) fn server_number(placement: &Placement, position: usize) -> u32 {
    placement.map.servers().get(position).copied().map_or(position as u32, u32::from)
}

/// The runs of each group's keys by server: `[group][server]`.
pub(crate) fn runs(map: &SlotMap, prepared: &PreparedIds) -> Vec<Vec<Vec<Range<usize>>>> {
    prepared.keys().iter().map(|keys| map.split(keys)).collect()
}

/// By group: whether each key has no row, from the replies of all servers to an evaluation.
fn missing_keys(
    of_servers: Vec<Vec<u8>>,
    runs: &[Vec<Vec<Range<usize>>>],
    prepared: &PreparedIds,
) -> Result<Vec<Vec<bool>>, RoleError> {
    let mut missing: Vec<Vec<bool>> = prepared.keys().iter().map(|keys| vec![false; keys.len()]).collect();
    for (server, of_server) in of_servers.into_iter().enumerate() {
        let keys = runs.iter().flat_map(|group| &group[server]).map(Range::len).sum();
        let of_server = KeySet::read(keys, of_server)?;
        let mut has_no_row = of_server.iter();
        for (missing, runs) in missing.iter_mut().zip(runs) {
            for key in runs[server].iter().cloned().flatten() {
                missing[key] = has_no_row.next().unwrap_or_default();
            }
        }
    }
    Ok(missing)
}

/// A token push for one server: it has only this server's step.
fn token_push_to(push: &v1::TokenPush, server: usize) -> Result<v1::TokenPush, RoleError> {
    let pulled_at = push.pulled_at.get(server).copied().ok_or_else(|| RoleError::Inconsistent {
        message: "backward",
        reason: format!("the step of parameter server {server} is missing"),
    })?;
    Ok(v1::TokenPush { pulled_at: vec![pulled_at], ..push.clone() })
}

/// Concatenates the runs of `values` (`[n, dim]`).
pub(crate) fn gather<T: Copy>(values: &[T], runs: &[Range<usize>], dim: usize) -> Vec<T> {
    let mut gathered = Vec::with_capacity(runs.iter().map(Range::len).sum::<usize>() * dim);
    for run in runs {
        gathered.extend_from_slice(&values[run.start * dim..run.end * dim]);
    }
    gathered
}

/// Reverses [`gather`] over all servers.
fn merge(mut parts: Vec<Vec<f32>>, runs: &[Vec<Range<usize>>], keys: usize, dim: usize) -> Result<Vec<f32>, RoleError> {
    for (part, runs) in parts.iter().zip(runs) {
        let expected = runs.iter().map(Range::len).sum::<usize>() * dim;
        if part.len() != expected {
            let reason = format!("{expected} values were asked for, {} came", part.len());
            return Err(RoleError::Inconsistent { message: "lookup", reason });
        }
    }
    if parts.len() == 1 {
        return Ok(parts.pop().unwrap_or_default());
    }
    let mut merged = vec![0.0; keys * dim];
    for (part, runs) in parts.iter().zip(runs) {
        let mut next = 0;
        for run in runs {
            let length = run.len() * dim;
            merged[run.start * dim..run.end * dim].copy_from_slice(&part[next..next + length]);
            next += length;
        }
    }
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use rectrain_kinds::Pooling;
    use rectrain_protocol::layout::FeaturePlace;
    use rectrain_wire::ids::{Scratch, UniqueIds};

    use super::*;

    #[test]
    fn merge_undoes_gather_for_any_slot_map() {
        let keys: Vec<u64> = (0..500u64).map(|i| i * (u64::MAX / 500)).collect();
        let values: Vec<f32> = (0..1000u16).map(f32::from).collect();
        for servers in [1u16, 2, 5] {
            let runs = SlotMap::even(64, servers).split(&keys);
            let parts = runs.iter().map(|runs| gather(&values, runs, 2)).collect();
            assert_eq!(merge(parts, &runs, keys.len(), 2).unwrap(), values);
        }
    }

    #[test]
    fn a_reply_of_another_size_is_refused() {
        let runs = vec![vec![0..2], vec![2..3]];
        assert!(merge(vec![vec![0.0; 4], vec![0.0; 1]], &runs, 3, 2).is_err());
    }

    #[test]
    fn missing_keys_return_to_their_places_for_any_slot_map() {
        let keys: Vec<u64> = (0..300u64).map(|i| i * (u64::MAX / 300)).collect();
        let unique = vec![UniqueIds::from_column(&keys, None, keys.len(), &mut Scratch::default()).unwrap()];
        let layout = FeatureLayout {
            features: vec![FeaturePlace { group: 0, dim: 1, offset: 0, pooling: Pooling::Sum }],
            group_dims: vec![1],
            linear: false,
            embedding_width: 1,
        };
        let prepared = PreparedIds::new(keys.len(), unique, &layout);
        let has_no_row = |key: u64| key.is_multiple_of(3);
        for servers in [1u16, 2, 5] {
            let runs = runs(&SlotMap::even(64, servers), &prepared);
            let reply = |server: usize| {
                let own = gather(&prepared.keys()[0], &runs[0][server], 1);
                let mut missing = KeySet::none_of(own.len());
                own.iter().enumerate().filter(|(_, key)| has_no_row(**key)).for_each(|(at, _)| missing.insert(at));
                missing.write()
            };
            let missing = missing_keys((0..usize::from(servers)).map(reply).collect(), &runs, &prepared).unwrap();
            let expected: Vec<bool> = prepared.keys()[0].iter().map(|key| has_no_row(*key)).collect();
            assert_eq!(missing, [expected]);
        }
    }
}
