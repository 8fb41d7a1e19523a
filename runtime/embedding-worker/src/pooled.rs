//! Partial pooling: asks the parameter servers for the rows of some row groups, and for the pooled
//! sums of the others. The gradients take the same two ways back.

use futures::future::try_join_all;
use rectrain_kinds::PartialPooling;
use rectrain_pooling::{BySize, PooledGroups, PreparedIds, ServerIds};
use rectrain_proto::v1;
use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::compression::TensorCodec;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::examples;
use rectrain_protocol::layout::{Pooled, decode_pooled, encode_pooled};
use rectrain_protocol::message;
use rectrain_protocol::placement::Placement;
use rectrain_wire::{Channel, Tensor};

use crate::parts::Answer;
use crate::rows::{Found, LookUp, LookedUp, RowGradients, Rows, applied_already, gather, runs, server_number};

/// The sums of a piece's row groups that parameter servers pool, or the gradients of these sums.
pub(crate) struct GroupSums {
    pub(crate) groups: PooledGroups,
    /// As the groups' layout has it.
    pub(crate) pooled: Pooled,
}

/// What one server returned: rows by row group, and its sums of the groups that it pools.
type RowsAndSums = (Vec<Vec<f32>>, Pooled);

impl Rows {
    /// The row groups of a piece that the servers of this placement pool. An evaluation has none,
    /// because its reply names the keys without a row.
    pub(crate) fn pooled_groups(&self, key: BatchKey, prepared: &PreparedIds, placement: &Placement) -> Option<BySize> {
        match (self.partial_pooling, key.position) {
            (PartialPooling::Never, _) | (_, BatchPosition::Evaluation { .. }) => None,
            (PartialPooling::BySize, BatchPosition::Train(_)) => {
                PooledGroups::by_size(prepared, &self.layout, placement.map.servers().len(), self.compression)
            }
        }
    }

    /// Looks up a piece with groups that the servers pool. Each server delays its reply until the
    /// step may be read. It does not reply in two parts: the sums need all steps before.
    ///
    /// # Errors
    /// As for a look-up of rows.
    pub(crate) async fn rows_and_sums_at(
        &self,
        placement: &Placement,
        look_up: &LookUp<'_>,
        BySize { groups, saved_bytes }: BySize,
    ) -> Result<LookedUp, RoleError> {
        let &LookUp { key, step, prepared, .. } = look_up;
        let (runs, pooled) = (runs(&placement.map, prepared), Some(pooled_piece(key, prepared)));
        let map_epoch = placement.epoch().0;
        let request = v1::Lookup { step, train: true, map_epoch, piece: None, partial_samples: None, pooled };
        let parts = ServerIds::divide_groups(prepared, &placement.map, &self.layout, &groups);
        let calls = placement.servers.iter().zip(&parts).enumerate().map(|(server, (channel, ids))| {
            let mut tensors = vec![Tensor::from(groups.numbers())];
            for (group, (keys, runs)) in prepared.keys().iter().zip(&runs).enumerate() {
                let is_pooled = groups.contains(group);
                tensors.push(Tensor::from(if is_pooled { Vec::new() } else { gather(keys, &runs[server], 1) }));
            }
            tensors.extend(ids.to_tensors());
            self.timed(self.ask_for_both(channel, request, tensors, &groups), server_number(placement, server), true)
        });
        let (answers, servers): (Vec<Answer<RowsAndSums>>, Vec<_>) = try_join_all(calls).await?.into_iter().unzip();
        let (applied, count) = (answers.iter().filter(|answer| answer.is_applied).count(), answers.len());
        let steps = answers.iter().map(|answer| answer.step).collect();
        let Some(found) = answers.into_iter().map(|answer| answer.rows).collect::<Option<Vec<_>>>() else {
            return applied_already(applied, count, servers);
        };
        self.metrics.pooled_groups.inc_by(groups.numbers().len() as u64);
        self.metrics.saved_bytes.inc_by(saved_bytes);
        let (rows, sums): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        let rows = self.merged(rows, &runs, prepared, |group| !groups.contains(group))?;
        let sums = GroupSums { groups, pooled: PooledGroups::sum(sums) };
        let is_applied = applied > 0 && applied == count;
        Ok(LookedUp { found: Some(Found::Rows(rows, Some(sums))), steps, is_applied, missing: Vec::new(), servers })
    }

    /// Asks one server for its rows and its sums.
    async fn ask_for_both(
        &self,
        channel: &Channel,
        request: v1::Lookup,
        tensors: Vec<Tensor>,
        groups: &PooledGroups,
    ) -> Result<Answer<RowsAndSums>, RoleError> {
        let samples = request.pooled.unwrap_or_default().samples as usize;
        let (reply, tensors) = message::call(channel, request, tensors, self.patience).await?;
        let v1::LookupReply { step, is_applied, gate_seconds, .. } = reply;
        let mut tensors = tensors.into_iter();
        let rows = if is_applied && tensors.len() == 0 {
            None
        } else {
            let rows = self.layout.group_dims.iter().map(|dim| self.compression.decode("lookup", &mut tensors, *dim));
            let rows = rows.collect::<Result<Vec<_>, _>>()?;
            let widths = groups.layout().pooled_widths();
            Some((rows, decode_pooled("lookup", &mut tensors, samples, widths, self.compression)?))
        };
        Ok(Answer { rows, step, is_applied, missing: Vec::new(), early_seconds: 0.0, gate_seconds })
    }

    /// The tensors of a piece's gradients for the server at a position of the slot map, whose keys
    /// have these `runs`: `[group][server]`. The ids of groups that it pools are not among them.
    pub(crate) fn gradient_tensors(
        &self,
        prepared: &PreparedIds,
        gradients: &RowGradients,
        runs: &[Vec<Vec<std::ops::Range<usize>>>],
        server: usize,
    ) -> Result<Vec<Tensor>, RoleError> {
        let RowGradients { rows, sums, examples, .. } = gradients;
        let is_pooled = |group| sums.as_ref().is_some_and(|sums| sums.groups.contains(group));
        let examples_of =
            |group: usize| Tensor::from(examples::encode(&gather(&examples[group], &runs[group][server], 1)));
        let mut tensors = Vec::with_capacity(4 * rows.len());
        tensors.extend(sums.as_ref().map(|sums| Tensor::from(sums.groups.numbers())));
        for (group, dim) in self.layout.group_dims.iter().enumerate() {
            let own: &[_] = if is_pooled(group) { &[] } else { &runs[group][server] };
            tensors.push(Tensor::from(gather(&prepared.keys()[group], own, 1)));
            tensors.extend(self.compression.encode_gradients(gather(&rows[group], own, *dim), *dim)?);
            if self.counted[group] && !is_pooled(group) {
                tensors.push(examples_of(group));
            }
        }
        let Some(GroupSums { groups, pooled }) = sums else { return Ok(tensors) };
        let encode = |values, dim| self.compression.encode_gradients(values, dim);
        tensors.extend(encode_pooled(pooled.clone(), groups.layout().pooled_widths(), encode)?);
        let counted = (0..rows.len()).filter(|group| self.counted[*group] && is_pooled(*group));
        tensors.extend(counted.map(examples_of));
        Ok(tensors)
    }
}

/// Sends a server its gradients. If it pools ids and has not retained them, it also gets these.
///
/// A server identifies gradients by step and piece, or by batch and token. So a retry changes
/// nothing.
pub(crate) async fn send_gradients(
    channel: &Channel,
    update: v1::Update,
    tensors: impl Fn() -> Result<Vec<Tensor>, RoleError>,
    ids: impl Fn() -> Vec<Tensor>,
) -> Result<v1::UpdateReply, RoleError> {
    let (reply, _) = message::call_server(channel, update.clone(), &tensors).await?;
    if !reply.needs_ids {
        return Ok(reply);
    }
    let with_ids = || Ok(tensors()?.into_iter().chain(ids()).collect());
    let (reply, _) = message::call_server(channel, v1::Update { has_ids: true, ..update }, with_ids).await?;
    Ok(reply)
}

/// Names a piece with groups that servers pool.
pub(crate) fn pooled_piece(key: BatchKey, prepared: &PreparedIds) -> v1::PooledPiece {
    v1::PooledPiece { batch: key.position.number(), piece: key.piece, samples: prepared.samples() as u32 }
}
