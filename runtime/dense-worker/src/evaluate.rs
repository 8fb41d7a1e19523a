//! Predicts this worker's pieces of every test batch. It sends them to the coordinator as one
//! share, in several parts.

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
use rectrain_protocol::unseen::{self, LookUps};

/// Rows of a part of a share. With their groups they are 64 MiB.
const PART_ROWS: u64 = 4 << 20;

/// A worker's share of an evaluation.
#[derive(Default)]
struct Share {
    predictions: Vec<f32>,
    labels: Vec<f32>,
    /// One per row, or empty.
    groups: Vec<u64>,
    /// The look-ups of these rows, by feature.
    look_ups: Vec<LookUps>,
}

impl Share {
    fn rows(&self) -> u64 {
        self.predictions.len() as u64
    }

    /// The message that the share is complete.
    fn complete(&self, rank: u32, at_step: u64) -> v1::EvaluationShare {
        let look_ups = self.look_ups.iter().copied().map(LookUps::write).collect();
        v1::EvaluationShare { rank, at_step, rows: self.rows(), look_ups }
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
    /// Predicts the test part. With `read` it reads the parameters from the parameter servers
    /// first.
    pub(crate) fn evaluate(&mut self, order: &v1::Order, read: bool) -> Result<(), RoleError> {
        if read {
            self.pull_parameters()?;
        }
        let mut share = Share::default();
        let mut horizon = Horizon::new(order.number, 0).with_reports();
        let mut ahead: VecDeque<Fetching> = VecDeque::new();
        let mut fetched = 0;
        loop {
            horizon.keep_ahead(self, fetched)?;
            while ahead.len() < LOOK_AHEAD && fetched < horizon.until() {
                let position = BatchPosition::Evaluation { at_step: GlobalStep(order.step), number: fetched };
                let keys = self.share().map(|piece| BatchKey { position, piece });
                ahead.push_back(self.fetch(horizon.assign(keys, self.plan.pieces()), None));
                fetched += 1;
            }
            let Some(next) = ahead.pop_front() else {
                // Process the reply first: the order is over once the share is sent, and no request
                // about it may follow.
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
            unseen::add(&mut share.look_ups, &batch.look_ups);
        }
        let all = share.complete(self.rank.0, order.step);
        self.wait(send_share(&self.peers.coordinator, all, &share, PART_ROWS))
    }
}

/// Sends a share in parts of `part_rows` rows, then the message that it is complete. A coordinator
/// that restarts meanwhile loses an incomplete share. It then replies with fewer rows, and this
/// function sends the share again.
async fn send_share(
    coordinator: &CoordinatorChannel,
    all: v1::EvaluationShare,
    share: &Share,
    part_rows: u64,
) -> Result<(), RoleError> {
    let mut sent = 0;
    loop {
        while sent < all.rows {
            let part = v1::EvaluationPart { rank: all.rank, at_step: all.at_step, first: sent };
            let rows = sent..all.rows.min(sent + part_rows);
            sent = coordinator.call(part, share.part(rows), CALL_DEADLINE).await?.0.rows;
        }
        sent = coordinator.call(all.clone(), Vec::new(), CALL_DEADLINE).await?.0.rows;
        if sent == all.rows {
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

    /// Receives a share as the coordinator does, and loses its rows at request number `loses_at`.
    struct Coordinator {
        loses_at: usize,
        received: Mutex<Received>,
    }

    #[derive(Default)]
    struct Received {
        requests: usize,
        rows: Vec<f32>,
        largest: usize,
    }

    impl Service for Coordinator {
        fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
            Box::pin(async move {
                let mut received = self.received.lock();
                received.requests += 1;
                if received.requests == self.loses_at {
                    received.rows.clear();
                }
                received.largest = received.largest.max(frame.byte_len());
                let rows = |received: &Received| v1::EvaluationRows { rows: received.rows.len() as u64 };
                if frame.kind == v1::EvaluationShare::KIND {
                    return Ok(message::reply::<v1::EvaluationShare>(&rows(&received), Vec::new()));
                }
                let (part, tensors) = message::read::<v1::EvaluationPart>(frame)?;
                let [predictions, labels, groups] = message::take("evaluation_part", tensors)?;
                let predictions = predictions.expect_f32("predictions").unwrap();
                assert_eq!(labels.expect_f32("labels").unwrap(), predictions);
                assert_eq!(groups.expect_u64("groups").unwrap().len(), predictions.len());
                if part.first == received.rows.len() as u64 {
                    received.rows.extend(predictions);
                }
                Ok(message::reply::<v1::EvaluationPart>(&rows(&received), Vec::new()))
            })
        }
    }

    #[tokio::test]
    async fn a_share_is_sent_in_small_parts_and_again_if_it_was_lost() {
        let transport = InProcess::new(InProcessConfig::default(), WireCounters::unregistered(|_| "test").unwrap());
        let address = "local://coordinator".parse().unwrap();
        let numbers: Vec<f32> = (0..100).map(|number| number as f32).collect();
        for rows in [0, 1, 7, 8, 100] {
            let of = numbers[..rows].to_vec();
            let look_ups = vec![LookUps { ids: rows as u64, unseen: 0 }];
            let share = Share { predictions: of.clone(), labels: of.clone(), groups: vec![3; rows], look_ups };
            let all = share.complete(1, 9);
            for loses_at in 0..20 {
                let coordinator = Arc::new(Coordinator { loses_at, received: Mutex::default() });
                let _serving = transport.serve(coordinator.clone(), &address).unwrap();
                let channel = CoordinatorChannel::new(transport.connect(&address).unwrap());
                send_share(&channel, all.clone(), &share, 7).await.unwrap();
                let received = coordinator.received.lock();
                assert_eq!(received.rows, of, "{rows} rows, lost at request {loses_at}");
                assert!(received.largest < 7 * 16 + 64, "{}", received.largest);
            }
        }
    }
}
