//! The mode `des`: asks the parameter servers for partial results of a piece, sums them, and sends
//! them the gradient of the sum. No rows and no gradients of rows travel.

use futures::future::try_join_all;
use rectrain_embedding::Examples;
use rectrain_modes::des::SubOperators;
use rectrain_modes::des::cells::Cell;
use rectrain_pooling::{PreparedIds, ServerIds, TowerResults};
use rectrain_proto::v1;
use rectrain_protocol::batch::BatchKey;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::examples;
use rectrain_protocol::layout::Pooled;
use rectrain_protocol::message;
use rectrain_protocol::placement::Placement;
use rectrain_wire::{Channel, Tensor};

use crate::parts::Answer;
use crate::pooled::send_gradients;
use crate::rows::{Found, LookUp, LookedUp, Rows, applied_already, gather, runs, server_number};
use crate::sums::{KeptCells, Sums, WholeCells};

/// The gradient of a piece's sums.
pub(crate) struct SumGradients {
    /// In the form in which dense workers send them.
    pub(crate) pooled: Pooled,
    /// By row group: the examples of each key. Empty for a group whose policy needs none.
    pub(crate) examples: Vec<Vec<Examples>>,
    /// The latest event time of the piece's rows, in seconds since 1970. 0 without a clock.
    pub(crate) moment: u64,
}

impl Rows {
    /// Sends the ids of each server to it, and sums the partial results. Each server delays its
    /// reply until the step may be read.
    ///
    /// # Errors
    /// As for a look-up of rows.
    pub(crate) async fn sums_at(&self, placement: &Placement, look_up: &LookUp<'_>) -> Result<LookedUp, RoleError> {
        let &LookUp { key, step, prepared, .. } = look_up;
        let (operators, map_epoch) = (self.operators()?, placement.epoch().0);
        let parts = ServerIds::divide(prepared, &placement.map, &self.layout, operators.sums);
        let partial_samples = Some(prepared.samples() as u32);
        let request =
            v1::Lookup { step, train: true, map_epoch, piece: Some(key.piece), partial_samples, pooled: None };
        let calls = placement.servers.iter().zip(&parts).enumerate().map(|(server, (channel, ids))| {
            self.timed(self.ask(channel, request, ids, operators), server_number(placement, server), true)
        });
        let (answers, servers): (Vec<Answer<TowerResults>>, Vec<_>) = try_join_all(calls).await?.into_iter().unzip();
        let applied = answers.iter().filter(|answer| answer.is_applied).count();
        let (steps, count) = (answers.iter().map(|answer| answer.step).collect(), answers.len());
        let Some(results) = answers.into_iter().map(|answer| answer.rows).collect::<Option<Vec<_>>>() else {
            return applied_already(applied, count, servers);
        };
        let cells: Vec<&[Cell]> = parts.iter().map(ServerIds::cells).collect();
        let (pooled, of_servers) = TowerResults::sum(results, &cells, operators.sums).into_pooled(operators);
        let found = Some(Found::Sums(Sums { pooled, cells: WholeCells { map_epoch, of_servers } }));
        let is_applied = applied > 0 && applied == count;
        Ok(LookedUp { found, steps, is_applied, missing: Vec::new(), servers })
    }

    /// Asks one server for its partial results.
    async fn ask(
        &self,
        channel: &Channel,
        request: v1::Lookup,
        ids: &ServerIds,
        operators: SubOperators,
    ) -> Result<Answer<TowerResults>, RoleError> {
        let sizes = (request.partial_samples.unwrap_or_default() as usize, ids.cells().len());
        let (reply, tensors) = message::call(channel, request, ids.to_tensors(), self.patience).await?;
        let v1::LookupReply { step, is_applied, gate_seconds, .. } = reply;
        let rows = if is_applied && tensors.is_empty() {
            None
        } else {
            Some(TowerResults::from_tensors("lookup", &mut tensors.into_iter(), operators, sizes)?)
        };
        Ok(Answer { rows, step, is_applied, missing: Vec::new(), early_seconds: 0.0, gate_seconds })
    }

    /// Sends the gradient of the sums to all servers. `kept` has the whole cells of the look-up. A
    /// worker that did not do the look-up looks them up again.
    pub(crate) async fn update_sums(
        &self,
        key: BatchKey,
        step: u64,
        (prepared, kept): (&PreparedIds, &KeptCells),
        gradients: SumGradients,
    ) -> Result<v1::BackwardReply, RoleError> {
        let placement = self.placement().await?;
        let (operators, map_epoch) = (self.operators()?, placement.epoch().0);
        let parts = ServerIds::divide(prepared, &placement.map, &self.layout, operators.sums);
        let has_cells = parts.iter().any(|part| !part.cells().is_empty());
        let mut cells = kept.of_map(map_epoch);
        if has_cells && cells.is_none() {
            let look_up = LookUp { key, step: Some(step), prepared, partial: true };
            match Box::pin(self.look_up(&look_up)).await?.found {
                Some(Found::Sums(sums)) if sums.cells.map_epoch == map_epoch => cells = Some(sums.cells),
                Some(_) => {
                    let reason = "the slot map changed within a step".to_owned();
                    return Err(RoleError::Inconsistent { message: "backward", reason });
                }
                // Every server has applied the step, and so had these gradients.
                None => return Ok(v1::BackwardReply::default()),
            }
        }
        let mut cells = cells.map(|cells| cells.of_servers).unwrap_or_default().into_iter();
        let SumGradients { pooled, examples, moment } = gradients;
        let of_sums = TowerResults::from_pooled(pooled, operators);
        let runs = runs(&placement.map, prepared);
        let mut calls = Vec::with_capacity(parts.len());
        for (server, (channel, ids)) in placement.servers.iter().zip(&parts).enumerate() {
            let mut results = of_sums.clone();
            results.beside.vectors = cells.next().unwrap_or_default();
            let mut tensors = results.into_tensors(operators);
            for (group, examples) in examples.iter().enumerate().filter(|(group, _)| self.counted[*group]) {
                tensors.push(Tensor::from(examples::encode(&gather(examples, &runs[group][server], 1))));
            }
            let partial_samples = Some(prepared.samples() as u32);
            let update =
                v1::Update { step, piece: key.piece, map_epoch, moment, partial_samples, ..v1::Update::default() };
            calls.push(send_gradients(channel, update, move || Ok(tensors.clone()), || ids.to_tensors()));
        }
        let mut all = v1::BackwardReply::default();
        for reply in try_join_all(calls).await? {
            self.metrics.missing_rows.inc_by(reply.missing_rows);
            all.outcome = all.outcome.max(reply.outcome);
            all.steps.push(reply.step);
        }
        Ok(all)
    }

    /// What parameter servers compute of the job's model.
    ///
    /// # Errors
    /// The model has no substitution. No correct dense worker then asks for sums.
    pub(crate) fn operators(&self) -> Result<SubOperators, RoleError> {
        let none =
            || RoleError::Inconsistent { message: "forward", reason: "the model has no substitution".to_owned() };
        self.operators.ok_or_else(none)
    }
}
