//! Partial pooling: the server pools the rows that it holds of some row groups of a piece. It
//! computes the gradients of these rows from the gradient of the sum over all servers. The
//! embedding worker chooses the groups. Everything else is as for rows.
//!
//! The server retains the ids of a piece between its look-up and its gradients, so that they travel
//! once. If it does not have them, it requests them with the gradients. So which ids it retains has
//! no influence on the result.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rectrain_embedding::FeatureKey;
use rectrain_modes::GlobalStep;
use rectrain_modes::barrier::SparseGradients;
use rectrain_modes::migration::NotServed;
use rectrain_pooling::{PooledGroups, PreparedServerIds, ServerIds};
use rectrain_proto::v1;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::compression::TensorCodec;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::layout::{decode_pooled, encode_pooled};
use rectrain_protocol::message;
use rectrain_protocol::plan::JobPlan;
use rectrain_wire::{Frame, Tensor};

use crate::contribution::Contribution;
use crate::shared::as_keys;
use crate::{LookedUp, ParameterServer, look_up_groups, read_examples};

/// The ids on this server of the groups of a piece that it pools.
#[derive(Debug)]
struct PooledIds {
    /// The slot map that divided the ids.
    map_epoch: u64,
    groups: PooledGroups,
    ids: PreparedServerIds,
}

/// The ids of the pieces whose gradients have not arrived, by batch and piece. Beyond a bound, the
/// ids of the oldest batches are dropped. Their gradients may never come, because a dense worker
/// died.
#[derive(Debug)]
pub(crate) struct PooledPieces {
    most: usize,
    pieces: Mutex<BTreeMap<(u64, u32), PooledIds>>,
}

impl PooledPieces {
    /// Retains as many pieces as embedding workers hold at once.
    pub(crate) fn of(plan: &JobPlan) -> Self {
        Self::keeping((plan.batches_ahead as usize + 1) * plan.pieces() as usize)
    }

    const fn keeping(most: usize) -> Self {
        Self { most, pieces: Mutex::new(BTreeMap::new()) }
    }

    fn keep(&self, piece: v1::PooledPiece, ids: PooledIds) {
        let mut pieces = self.pieces.lock();
        let old = pieces.insert((piece.batch, piece.piece), ids);
        let beyond = if pieces.len() > self.most { pieces.pop_first() } else { None };
        drop(pieces);
        drop((old, beyond));
    }

    /// Takes the ids of a piece, if the server has them as this slot map divides them.
    fn take(&self, piece: v1::PooledPiece, map_epoch: u64, groups: &PooledGroups) -> Option<PooledIds> {
        let ids = self.pieces.lock().remove(&(piece.batch, piece.piece))?;
        (ids.map_epoch == map_epoch && ids.groups == *groups).then_some(ids)
    }

    /// Whether the gradients of all pieces have arrived.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.lock().is_empty()
    }

    /// Drops all ids, because another mode begins.
    pub(crate) fn clear(&self) {
        self.pieces.lock().clear();
    }
}

impl ParameterServer {
    /// Answers a look-up with the rows of some groups and the sums of the others.
    pub(crate) async fn look_up_pooled(
        &self,
        request: v1::Lookup,
        piece: v1::PooledPiece,
        tensors: Vec<Tensor>,
    ) -> Result<Frame, RoleError> {
        let v1::Lookup { step, train, map_epoch, piece: ahead, .. } = request;
        if !train || ahead.is_some() {
            let reason = "a server pools in training only, and replies in one part".to_owned();
            return Err(RoleError::Inconsistent { message: "lookup", reason });
        }
        let half = self.half.get().ok_or(NotServed::Unregistered)?;
        self.shared.slots.admit_epoch(map_epoch)?;
        let mut tensors = tensors.into_iter();
        let groups = self.groups_of("lookup", &mut tensors)?;
        let keys = self.keys_of("lookup", tensors.by_ref().take(self.shared.group_dims().len()).collect())?;
        refuse_keys("lookup", &groups, keys.iter().map(Vec::len))?;
        let kept = self.pooled_ids("lookup", (piece, map_epoch), groups, tensors.collect()).await?;
        let arrived = Instant::now();
        half.admit_look_up(step.map(GlobalStep)).await?;
        let gate_seconds = arrived.elapsed().as_secs_f64();
        self.shared.metrics.gate_wait.observe(gate_seconds);
        let step = half.row_step();
        let started = Instant::now();
        let shared = Arc::clone(&self.shared);
        let read = move || {
            let keys = with_pooled(keys, &kept);
            shared.slots.check_look_up(map_epoch, &keys)?;
            let looked_up = look_up_groups(&shared.tracked_store(), &keys, shared.group_dims())?;
            let LookedUp { mut rows, counts, .. } = looked_up;
            let sums = kept.ids.pool(&rows, kept.groups.layout());
            let groups = rows.iter_mut().enumerate().filter(|(group, _)| kept.groups.contains(*group));
            groups.for_each(|(_, rows)| rows.clear());
            Ok::<_, RoleError>((rows, sums, counts, kept))
        };
        let (rows, sums, counts, kept) = blocking("look-up", read).await??;
        self.shared.metrics.lookup.observe(started.elapsed().as_secs_f64());
        self.shared.metrics.count_look_up(counts);
        let mut tensors = self.encode_rows(rows)?;
        let encode = |values, dim| self.compression.encode(values, dim);
        tensors.extend(encode_pooled(sums, kept.groups.layout().pooled_widths(), encode)?);
        self.pooled.keep(piece, kept);
        let reply = v1::LookupReply { step, gate_seconds, ..v1::LookupReply::default() };
        Ok(message::reply::<v1::Lookup>(&reply, tensors))
    }

    /// The gradients of the piece's rows: those that came, and those from the gradients of sums.
    /// `None` if the server does not have the ids of the piece.
    pub(crate) async fn pooled_gradients(
        &self,
        request: &v1::Update,
        piece: v1::PooledPiece,
        tensors: Vec<Tensor>,
    ) -> Result<Option<Contribution>, RoleError> {
        let mut tensors = tensors.into_iter();
        let groups = self.groups_of("update", &mut tensors)?;
        let mut contribution = self.gradients_of(&mut tensors, request.moment, Some(&groups))?;
        refuse_keys("update", &groups, contribution.groups.iter().map(|group| group.keys.len()))?;
        let (samples, widths) = (piece.samples as usize, groups.layout().pooled_widths());
        let gradients = decode_pooled("update", &mut tensors, samples, widths, self.compression)?;
        let counted = self.counted.iter().enumerate().filter(|(group, is)| **is && groups.contains(*group));
        let counted: Vec<usize> = counted.map(|(group, _)| group).collect();
        let examples: Vec<Tensor> = tensors.by_ref().take(counted.len()).collect();
        let known = if request.has_ids {
            Some(self.pooled_ids("update", (piece, request.map_epoch), groups, tensors.collect()).await?)
        } else {
            self.pooled.take(piece, request.map_epoch, &groups)
        };
        let Some(PooledIds { groups, ids, .. }) = known else { return Ok(None) };
        if ids.samples() != samples {
            let reason = format!("a piece of {} samples came with {samples}", ids.samples());
            return Err(RoleError::Inconsistent { message: "update", reason });
        }
        let mut examples = examples.into_iter();
        for group in counted {
            contribution.examples[group] = read_examples(&mut examples, ids.keys()[group].len())?;
        }
        let scatter = move || {
            let values = ids.scatter(&gradients, groups.layout());
            for (group, values) in values.into_iter().enumerate().filter(|(group, _)| groups.contains(*group)) {
                contribution.groups[group] = SparseGradients { keys: ids.keys()[group].clone(), values };
            }
            contribution
        };
        Ok(Some(blocking("gradients of rows", scatter).await?))
    }

    /// Reads the groups that this server pools, from the first tensor.
    fn groups_of(
        &self,
        name: &'static str,
        tensors: &mut impl Iterator<Item = Tensor>,
    ) -> Result<PooledGroups, RoleError> {
        let numbers = message::next(name, tensors)?.expect_u32("pooled groups")?;
        PooledGroups::read(name, &numbers, &self.shared.plan.layout)
    }

    /// Reads the ids of a piece as a slot map divides them.
    async fn pooled_ids(
        &self,
        name: &'static str,
        (piece, map_epoch): (v1::PooledPiece, u64),
        groups: PooledGroups,
        tensors: Vec<Tensor>,
    ) -> Result<PooledIds, RoleError> {
        let prepare = move || {
            let layout = groups.layout();
            let ids = ServerIds::from_tensors(name, tensors, piece.samples, layout)?.prepare(piece.samples, layout);
            Ok(PooledIds { map_epoch, groups, ids })
        };
        blocking("preparation of ids", prepare).await?
    }
}

/// The keys to look up by row group: the keys that came, and the keys of the groups that the server
/// pools.
fn with_pooled(mut keys: Vec<Vec<FeatureKey>>, PooledIds { groups, ids, .. }: &PooledIds) -> Vec<Vec<FeatureKey>> {
    for (group, own) in ids.keys().iter().enumerate().filter(|(group, _)| groups.contains(*group)) {
        keys[group] = as_keys(own.clone());
    }
    keys
}

/// Refuses keys of a group that the server pools. `keys` has the number of keys by group.
fn refuse_keys(name: &'static str, groups: &PooledGroups, keys: impl Iterator<Item = usize>) -> Result<(), RoleError> {
    match keys.enumerate().find(|(group, keys)| groups.contains(*group) && *keys > 0) {
        None => Ok(()),
        Some((group, keys)) => {
            let reason = format!("{keys} keys of group {group} came, and the server pools this group by its ids");
            Err(RoleError::Inconsistent { message: name, reason })
        }
    }
}

#[cfg(test)]
mod tests {
    use rectrain_protocol::plan::small_plan;

    use super::*;

    #[test]
    fn the_ids_of_the_oldest_batches_are_dropped_first() {
        let plan = small_plan(&[]);
        let groups = PooledGroups::read("update", &[0], &plan.layout).unwrap();
        let layout = groups.layout();
        let ids = |map_epoch| {
            let empty = [Tensor::from(Vec::<u64>::new()), Tensor::from(vec![0u32]), Tensor::from(Vec::<u16>::new())];
            let of_feature = || [&empty[..], &[Tensor::from(Vec::<f32>::new())]].concat();
            let mut tensors: Vec<Tensor> = layout.features.iter().flat_map(|_| of_feature()).collect();
            tensors.push(Tensor::from(Vec::<u32>::new()));
            let ids = ServerIds::from_tensors("update", tensors, 4, layout).unwrap().prepare(4, layout);
            PooledIds { map_epoch, groups: groups.clone(), ids }
        };
        let piece = |batch, piece| v1::PooledPiece { batch, piece, samples: 4 };
        let pieces = PooledPieces::keeping(2);
        for (batch, number) in [(7, 1), (7, 0), (9, 0), (7, 1)] {
            pieces.keep(piece(batch, number), ids(3));
        }
        let has = |batch, number, epoch| pieces.take(piece(batch, number), epoch, &groups).is_some();
        assert_eq!([has(7, 0, 3), has(7, 1, 3), has(9, 0, 2)], [false, true, false], "dropped, kept, another map");
        assert!(!has(7, 1, 3), "taken");
        pieces.keep(piece(9, 0), ids(3));
        pieces.clear();
        assert!(!has(9, 0, 3));
    }
}
