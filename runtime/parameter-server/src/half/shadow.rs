//! The half of a parameter server in `shadow`. Rows are updated as in `async`: each gradient alone,
//! as it arrives. The server's partition of the dense parameters is the copy with which dense
//! workers exchange their replicas. No gradient of a dense parameter arrives here.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use rectrain_kinds::{OutputModel, WirePrecision};
use rectrain_modes::GlobalStep;
use rectrain_modes::gba::TokenMode;
use rectrain_modes::shadow::{Fragments, Rounds, Shadow, receive_difference, send_difference};
use rectrain_modes::switch::Boundary;
use rectrain_proto::v1;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message;
use rectrain_protocol::plan::JobPlan;
use rectrain_wire::{BoxFuture, Tensor};

use super::averaging::Averaging;
use super::bases::Bases;
use super::{BufferStanding, Exchanged, ModeHalf, RowGradients, Snapshot, TokenHalf, not_this_mode};
use crate::kept::LeftTokens;
use crate::partition::Replica;
use crate::shared::Shared;

/// The rules of the rows (ShadowSync §3.2: Hogwild).
const ROWS: TokenMode = TokenMode::Async;

/// See the module documentation.
pub(crate) struct ShadowHalf {
    rows: TokenHalf,
    rule: CopyRule,
    fragments: Fragments,
    /// If values travel as differences in bf16.
    bases: Option<Bases>,
}

/// How the copy follows the replicas.
enum CopyRule {
    /// By one replica at a time (`easgd`).
    Elastic {
        /// α.
        alpha: f32,
        output: OutputModel,
        /// Held from the change of the copy until the change is durable. So an older copy never
        /// replaces a newer one.
        exchanging: Arc<Mutex<()>>,
    },
    /// By the mean of all replicas (`ma`, `bmuf`).
    Average(Arc<Averaging>),
}

impl ShadowHalf {
    /// The half of a mode that begins at this boundary.
    pub(crate) fn new(plan: &JobPlan, mode: Shadow, at: Boundary) -> Self {
        Self::with_rows(TokenHalf::new(plan, ROWS, at), mode, Rounds::new(mode.fragments))
    }

    /// Resumes from the durable state of the server that this one replaces.
    pub(crate) fn recover(mode: Shadow, at: Boundary, left: LeftTokens, shared: &Shared) -> Result<Self, RoleError> {
        let rows = TokenHalf::recover(&shared.plan, ROWS, at, left, shared)?;
        let partition = shared.read_partition();
        let averages = partition.averages();
        let rested = averages.rested().keys().copied();
        let rounds = Rounds::resume(mode.fragments, averages.order(), averages.turn(), rested);
        Ok(Self::with_rows(rows, mode, rounds))
    }

    fn with_rows(rows: TokenHalf, mode: Shadow, rounds: Rounds) -> Self {
        let rule = match mode.average() {
            None => CopyRule::Elastic { alpha: mode.alpha, output: mode.output_model, exchanging: Arc::default() },
            Some(average) => {
                CopyRule::Average(Arc::new(Averaging::new(average, mode.output_model, mode.fragments, rounds)))
            }
        };
        let bases = (mode.wire_precision == WirePrecision::Bf16).then(Bases::new);
        Self { rows, rule, fragments: mode.fragments, bases }
    }

    /// The replica of an exchange. `None` if it is a difference from a base that is not known.
    fn read_replica(
        &self,
        shared: &Shared,
        exchange: &v1::Exchange,
        tensors: Vec<Tensor>,
    ) -> Result<Option<Replica>, RoleError> {
        let len = shared.read_partition().len();
        let range = if exchange.last { 0..len } else { self.range(exchange.fragment, len)? };
        let mut tensors = tensors.into_iter();
        let sent = message::next("exchange", &mut tensors)?;
        if exchange.base != 0 {
            let found =
                self.bases.as_ref().and_then(|known| known.find(exchange.rank, exchange.fragment, exchange.base));
            let Some(mut parameters) = found else { return Ok(None) };
            let difference = sent.expect_u16("difference")?;
            if difference.len() != parameters.len() {
                let (expected, found) = (parameters.len(), difference.len());
                let reason = format!("a difference of {expected} parameters was expected, and one of {found} came");
                return Err(RoleError::Inconsistent { message: "exchange", reason });
            }
            receive_difference(&mut parameters, &difference);
            return Ok(Some(Replica { range, parameters, state: None }));
        }
        let parameters = sent.expect_f32("parameters")?;
        let state = match exchange.last {
            true => Some(message::next("exchange", &mut tensors)?.expect_f32("state")?),
            false => None,
        };
        Ok(Some(Replica { range, parameters, state }))
    }

    /// The reply with a part of the copy. `base`: the values that the worker sent, if the reply is
    /// a difference from them.
    fn write_copy(&self, exchange: &v1::Exchange, copy: &[f32], base: Option<Vec<f32>>) -> (v1::Exchanged, Tensor) {
        if let Some(known) = &self.bases
            && let Some(mut base) = base
        {
            let difference = send_difference(&mut base, copy);
            let base = known.put(exchange.rank, exchange.fragment, base);
            return (v1::Exchanged { base, ..v1::Exchanged::default() }, Tensor::from(difference));
        }
        (v1::Exchanged::default(), Tensor::from(copy.to_vec()))
    }

    /// The parameters of a fragment, in a partition of this size.
    fn range(&self, fragment: u32, len: usize) -> Result<Range<usize>, RoleError> {
        let count = self.fragments.count();
        if fragment < count {
            return Ok(self.fragments.range(fragment, len));
        }
        let reason = format!("one of {count} fragments, counted from 0, was expected, and fragment {fragment} came");
        Err(RoleError::Inconsistent { message: "exchange", reason })
    }
}

impl ShadowHalf {
    /// Moves the copy towards a replica.
    async fn move_towards(
        &self,
        shared: &Arc<Shared>,
        exchange: v1::Exchange,
        replica: Replica,
    ) -> Result<Exchanged, RoleError> {
        let buffer = self.rows.dense_standing();
        match &self.rule {
            CopyRule::Average(averaging) => averaging.exchange(shared, exchange, replica, buffer).await,
            CopyRule::Elastic { alpha, output, exchanging } => {
                let (server, rule, exchanging) = (Arc::clone(shared), (*alpha, *output), Arc::clone(exchanging));
                let work = move || {
                    let _held = exchanging.lock();
                    move_copy(&server, &exchange, &replica, rule, buffer.as_ref())
                };
                blocking("exchange", work).await?.map(Exchanged::Copy)
            }
        }
    }
}

impl ModeHalf for ShadowHalf {
    fn admit_look_up(&self, step: Option<GlobalStep>) -> BoxFuture<'_, Result<(), RoleError>> {
        self.rows.admit_look_up(step)
    }

    fn row_step(&self) -> u64 {
        self.rows.row_step()
    }

    fn update<'a>(
        &'a self,
        shared: &'a Arc<Shared>,
        gradients: RowGradients,
    ) -> BoxFuture<'a, Result<v1::UpdateReply, RoleError>> {
        self.rows.update(shared, gradients)
    }

    fn push_dense<'a>(
        &'a self,
        _shared: &'a Arc<Shared>,
        _push: v1::TokenPush,
        _gradient: Vec<f32>,
    ) -> BoxFuture<'a, Result<v1::PushReply, RoleError>> {
        Box::pin(async { Err(not_this_mode("push_dense", "trains replicas")) })
    }

    fn exchange<'a>(
        &'a self,
        shared: &'a Arc<Shared>,
        exchange: v1::Exchange,
        tensors: Vec<Tensor>,
    ) -> BoxFuture<'a, Result<(v1::Exchanged, Vec<Tensor>), RoleError>> {
        Box::pin(async move {
            shared.give_up_where_memory_is_full();
            let Some(replica) = self.read_replica(shared, &exchange, tensors)? else {
                return Ok((v1::Exchanged { lacks_base: true, ..v1::Exchanged::default() }, Vec::new()));
            };
            let range = replica.range.clone();
            let has_base = self.bases.is_some() && !exchange.last;
            let base = has_base.then(|| replica.parameters.clone());
            Ok(match self.move_towards(shared, exchange, replica).await? {
                Exchanged::OtherFragment(other) => {
                    (v1::Exchanged { other_fragment: Some(other), ..v1::Exchanged::default() }, Vec::new())
                }
                Exchanged::Copy(copy) => {
                    let (reply, copy) = self.write_copy(&exchange, &copy[range], base);
                    (reply, vec![copy])
                }
            })
        })
    }

    // No dense gradient is buffered, so the dense partition is always as far as the rows.
    fn flush<'a>(&'a self, shared: &'a Arc<Shared>) -> BoxFuture<'a, Result<v1::Flushed, RoleError>> {
        Box::pin(async move {
            let v1::Flushed { embedding_step, .. } = self.rows.flush(shared).await?;
            Ok(v1::Flushed { dense_step: embedding_step, embedding_step })
        })
    }

    fn finish_recovery<'a>(&'a self, shared: &'a Arc<Shared>) -> BoxFuture<'a, Result<(), RoleError>> {
        self.rows.finish_recovery(shared)
    }

    fn dense_standing(&self) -> Option<BufferStanding> {
        self.rows.dense_standing()
    }

    fn dense_step_of(&self, parameters: &Snapshot) -> u64 {
        self.rows.dense_step_of(parameters)
    }
}

/// Moves the copy towards the replica, and makes it durable. Returns the copy.
fn move_copy(
    shared: &Shared,
    exchange: &v1::Exchange,
    replica: &Replica,
    rule: (f32, OutputModel),
    buffer: Option<&BufferStanding>,
) -> Result<Arc<Vec<f32>>, RoleError> {
    let mut partition = shared.write_partition();
    let slots = shared.plan.dense_optimizer.slots().len();
    let is_new = partition.exchange(exchange, replica, rule, slots)?;
    let copy = partition.parameters().values;
    drop(partition);
    if is_new {
        shared.metrics.exchanges.inc();
        if let Some(kept) = shared.kept.as_deref() {
            kept.keep_partition(&shared.read_partition(), buffer);
        }
    }
    Ok(copy)
}
