//! Predicting the test part: this worker's pieces of every test batch, sent to the coordinator as one share.

use std::collections::VecDeque;

use rectrain_modes::GlobalStep;
use rectrain_proto::v1;
use rectrain_wire::Tensor;

use super::Trainer;
use super::horizon::Horizon;
use super::local_batch::Fetching;
use crate::batch::{BatchKey, BatchPosition};
use crate::error::RoleError;

/// Batches whose embeddings are fetched ahead.
const LOOK_AHEAD: usize = 4;

impl Trainer {
    /// Predicts with the parameters as they are, or with the parameter servers' if they must be read first.
    pub(super) fn evaluate(&mut self, order: &v1::Order, read: bool) -> Result<(), RoleError> {
        if read {
            self.pull_parameters()?;
        }
        let (mut predictions, mut labels, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        let mut horizon = Horizon::new(order.number, 0);
        let mut ahead: VecDeque<Fetching> = VecDeque::new();
        let mut fetched = 0;
        loop {
            horizon.keep_ahead(self, fetched)?;
            while ahead.len() < LOOK_AHEAD && fetched < horizon.until() {
                let position = BatchPosition::Evaluation { at_step: GlobalStep(order.step), number: fetched };
                let keys = self.share().map(|piece| BatchKey { position, piece });
                ahead.push_back(self.fetch(horizon.place(keys, self.plan.pieces()), None));
                fetched += 1;
            }
            let Some(next) = ahead.pop_front() else {
                if horizon.ends_at(fetched) {
                    break;
                }
                horizon.take(self)?;
                continue;
            };
            let batch = self.fetched(next)?;
            predictions.extend(self.tower.predict(batch.features())?);
            labels.extend(batch.labels);
            groups.extend(batch.groups);
        }
        let share = v1::EvaluationShare { rank: self.rank.0, at_step: order.step };
        self.tell(share, vec![Tensor::from(predictions), Tensor::from(labels), Tensor::from(groups)]).map(drop)
    }
}
