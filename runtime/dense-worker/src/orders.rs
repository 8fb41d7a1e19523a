//! The loop of the training half: requests orders from the coordinator and carries them out.

use std::time::Instant;

use rectrain_proto::v1;
use rectrain_proto::v1::order::Order as Kind;
use sha2::{Digest, Sha256};

use super::half::half_of;
use super::ring_repair::RingWatch;
use super::trainer::Trainer;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;

impl Trainer {
    /// Carries out orders until training has ended.
    ///
    /// # Errors
    /// A peer cannot be reached or breaks the protocol; the worker cannot compute; the worker is
    /// stopped.
    pub fn run(mut self) -> Result<(), RoleError> {
        let mut done = 0;
        loop {
            let order = self.next_order(done)?;
            let Some(kind) = &order.order else { continue };
            self.update_placement(&order)?;
            self.update_ring(&order)?;
            if order.joins || order.mends {
                self.repair_ring()?;
            }
            if !matches!(kind, Kind::Wait(_)) {
                // The worker has the parameters, or this order tells it where they are.
                self.peers.readiness.set_ready();
            }
            if !keeps_replica(kind) {
                self.replica = None;
                self.threads = None;
            }
            if let Some(half) = half_of(kind) {
                let started = Instant::now();
                half.train(&mut self, &order)?;
                self.training += started.elapsed();
                self.report_progress()?;
                done = order.number;
                continue;
            }
            match kind {
                Kind::Wait(_) | Kind::Barrier(_) | Kind::Pulled(_) | Kind::Tokens(_) | Kind::Shadow(_) => continue,
                Kind::Restore(restore) => {
                    self.restore(restore)?;
                    self.applied = Some(order.step);
                }
                Kind::Save(save) => self.save(&order, save.ticket.clone())?,
                Kind::Publish(_) => self.publish()?,
                Kind::ReadBack(_) => {
                    self.read_back()?;
                    self.applied = Some(order.step);
                }
                Kind::Evaluate(evaluate) => self.evaluate(&order, evaluate.read)?,
                Kind::End(end) => return self.end(&order, end.read),
            }
            done = order.number;
        }
    }

    fn next_order(&mut self, done: u64) -> Result<v1::Order, RoleError> {
        let (coordinator, body) = (self.peers.coordinator.clone(), v1::OrderRequest { rank: self.rank.0, done });
        let request = async move { Ok(coordinator.call(body, Vec::new(), CALL_DEADLINE).await?.0) };
        let request = self.spawn(request);
        self.join("order", request)
    }

    /// Fetches the slot map that an order needs, if it is newer than the known one.
    fn update_placement(&mut self, order: &v1::Order) -> Result<(), RoleError> {
        if order.map_epoch > self.peers.placement.epoch().0 {
            let directory = self.peers.directory.clone();
            self.peers.placement = self.wait(async move { directory.fetch().await })?;
        }
        Ok(())
    }

    /// Joins the ring of an order. The order has the number of dense workers that sum a step's
    /// gradients. In a mode without a barrier, workers may have been replaced meanwhile.
    fn update_ring(&mut self, order: &v1::Order) -> Result<(), RoleError> {
        let sums = matches!(order.order, Some(Kind::Barrier(_)));
        let is_same = order.barrier_workers == self.barrier_workers;
        let waits = matches!(order.order, Some(Kind::Wait(_))) && !order.joins;
        if waits || (is_same && !sums) {
            return Ok(());
        }
        self.barrier_workers = order.barrier_workers;
        // The addresses fetched below include replacements up to this ring.
        self.ring_number = self.ring_number.max(order.ring);
        self.ring.begin(self.ring_number);
        let directory = self.peers.directory.clone();
        let workers = self.wait(async { directory.fetch_addresses().await })?.dense_workers;
        self.connect_to_next(&workers)?;
        self.ring_watch = self.peers.next.as_ref().map(|_| {
            let (runtime, coordinator) = (&self.waits.runtime, self.peers.coordinator.clone());
            RingWatch::start(runtime, coordinator, self.rank.0, self.ring_number)
        });
        Ok(())
    }

    fn end(&mut self, order: &v1::Order, read: bool) -> Result<(), RoleError> {
        if read {
            self.pull_parameters()?;
        }
        let parameters_sha256 = digest(self.tower.parameters()?).to_vec();
        let done = v1::TrainingDone { rank: self.rank.0, steps: order.step, parameters_sha256 };
        self.call_coordinator(done, Vec::new()).map(drop)
    }
}

/// Whether the worker's replica in `shadow` outlives an order. Others give the worker parameters
/// that all workers have, or take the servers' copy elsewhere.
fn keeps_replica(order: &Kind) -> bool {
    matches!(order, Kind::Shadow(_) | Kind::Evaluate(_) | Kind::Save(_) | Kind::Wait(_))
}

/// SHA-256 of the parameters' little-endian bytes.
fn digest(parameters: &[f32]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for value in parameters {
        hash.update(value.to_le_bytes());
    }
    hash.finalize().into()
}
