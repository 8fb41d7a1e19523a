//! Predicting the test part: this worker's pieces of every test batch, sent to the coordinator as one share, in parts.

use std::collections::VecDeque;
use std::ops::Range;

use rectrain_modes::GlobalStep;
use rectrain_proto::v1;
use rectrain_wire::Tensor;

use super::Trainer;
use super::horizon::Horizon;
use super::local_batch::Fetching;
use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::coordinator_channel::CoordinatorChannel;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::limits::LOOK_AHEAD;

/// Rows of a part of a share: with their groups 64 MiB.
const PART_ROWS: u64 = 4 << 20;

/// A share of an evaluation.
#[derive(Default)]
struct Share {
    predictions: Vec<f32>,
    labels: Vec<f32>,
    /// None, or one a row.
    groups: Vec<u64>,
}

impl Share {
    fn rows(&self) -> u64 {
        self.predictions.len() as u64
    }

    fn part(&self, rows: Range<u64>) -> Vec<Tensor> {
        let rows = rows.start as usize..rows.end as usize;
        let predictions = self.predictions.get(rows.clone()).unwrap_or_default().to_vec();
        let labels = self.labels.get(rows.clone()).unwrap_or_default().to_vec();
        let groups = self.groups.get(rows).unwrap_or_default().to_vec();
        vec![Tensor::from(predictions), Tensor::from(labels), Tensor::from(groups)]
    }
}

impl Trainer {
    /// Predicts with the parameters as they are, or with the parameter servers' if they must be read first.
    pub(crate) fn evaluate(&mut self, order: &v1::Order, read: bool) -> Result<(), RoleError> {
        if read {
            self.pull_parameters()?;
        }
        let mut share = Share::default();
        let mut horizon = Horizon::new(order.number, 0).telling();
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
                // Once the share is told the order is over, and nothing may be asked of it any more.
                horizon.take(self)?;
                if horizon.ends_at(fetched) {
                    break;
                }
                continue;
            };
            let batch = self.fetched(next)?;
            share.predictions.extend(self.tower.predict(batch.features())?);
            share.labels.extend(batch.labels);
            share.groups.extend(batch.groups);
        }
        let all = v1::EvaluationShare { rank: self.rank.0, at_step: order.step, rows: share.rows() };
        self.wait(tell_share(&self.peers.coordinator, all, &share, PART_ROWS))
    }
}

/// Sends a share in parts of so many rows, and then tells that it is all. A coordinator that is started again meanwhile has none of a share
/// that it had not all of, and is sent it again.
async fn tell_share(
    coordinator: &CoordinatorChannel,
    all: v1::EvaluationShare,
    share: &Share,
    part_rows: u64,
) -> Result<(), RoleError> {
    let mut told = 0;
    loop {
        while told < all.rows {
            let part = v1::EvaluationPart { rank: all.rank, at_step: all.at_step, first: told };
            let rows = told..all.rows.min(told + part_rows);
            told = coordinator.call(part, share.part(rows), CALL_DEADLINE).await?.0.rows;
        }
        told = coordinator.call(all, Vec::new(), CALL_DEADLINE).await?.0.rows;
        if told == all.rows {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use rectrain_wire::{
        BoxFuture, Frame, InProcess, InProcessConfig, Peer, Refusal, Service, Transport, WireCounters,
    };

    use super::*;
    use rectrain_protocol::message::{self, Request};

    /// Takes a share in as the coordinator does, and loses what it has of it when it has been asked so often.
    struct Coordinator {
        loses_at: usize,
        had: Mutex<Had>,
    }

    #[derive(Default)]
    struct Had {
        asked: usize,
        rows: Vec<f32>,
        largest: usize,
    }

    impl Service for Coordinator {
        fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
            Box::pin(async move {
                let mut had = self.had.lock();
                had.asked += 1;
                if had.asked == self.loses_at {
                    had.rows.clear();
                }
                had.largest = had.largest.max(frame.byte_len());
                let rows = |had: &Had| v1::EvaluationRows { rows: had.rows.len() as u64 };
                if frame.kind == v1::EvaluationShare::KIND {
                    return Ok(message::reply::<v1::EvaluationShare>(&rows(&had), Vec::new()));
                }
                let (part, tensors) = message::read::<v1::EvaluationPart>(frame)?;
                let [predictions, labels, groups] = message::take("evaluation_part", tensors)?;
                let predictions = predictions.expect_f32("predictions").unwrap();
                assert_eq!(labels.expect_f32("labels").unwrap(), predictions);
                assert_eq!(groups.expect_u64("groups").unwrap().len(), predictions.len());
                if part.first == had.rows.len() as u64 {
                    had.rows.extend(predictions);
                }
                Ok(message::reply::<v1::EvaluationPart>(&rows(&had), Vec::new()))
            })
        }
    }

    #[tokio::test]
    async fn a_share_of_any_size_is_sent_in_small_parts_and_again_to_a_coordinator_that_has_lost_them() {
        let transport = InProcess::new(InProcessConfig::default(), WireCounters::unregistered(|_| "test").unwrap());
        let address = "local://coordinator".parse().unwrap();
        let numbers: Vec<f32> = (0..100).map(|number| number as f32).collect();
        for rows in [0, 1, 7, 8, 100] {
            let of = numbers[..rows].to_vec();
            let share = Share { predictions: of.clone(), labels: of.clone(), groups: vec![3; rows] };
            let all = v1::EvaluationShare { rank: 1, at_step: 9, rows: rows as u64 };
            for loses_at in 0..20 {
                let coordinator = Arc::new(Coordinator { loses_at, had: Mutex::default() });
                let _serving = transport.serve(coordinator.clone(), &address).unwrap();
                let channel = CoordinatorChannel::new(transport.connect(&address).unwrap());
                tell_share(&channel, all, &share, 7).await.unwrap();
                let had = coordinator.had.lock();
                assert_eq!(had.rows, of, "{rows} rows, lost at question {loses_at}");
                assert!(had.largest < 7 * 16 + 64, "{}", had.largest);
            }
        }
    }
}
