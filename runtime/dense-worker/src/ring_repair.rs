//! Repairs the ring after a dense worker that trains with a barrier was replaced.
//!
//! The other workers wait for the replacement. Every wait of theirs also watches for a new ring.
//! Each worker reports to the coordinator the next step of its parameters. The most advanced worker
//! becomes the donor: the replacement, and each worker that is behind, fetches the donor's
//! parameters. Two workers differ by at most one step, because each step sums the gradients of all
//! workers.
//!
//! The replacement then resends gradients that may not have reached the parameter servers before
//! its predecessor died. Embedding workers return the same pooled embeddings again. In `sync` it
//! computes with the parameters of that step, so the gradients are the same to the bit. A receiver
//! that already has them ignores them.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rectrain_dense::StepOutput;
use rectrain_proto::v1;
use rectrain_wire::Tensor;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::Trainer;
use super::all_reduce::call_peer;
use super::horizon::Horizon;
use super::local_batch::Pushes;
use rectrain_modes::barrier::StepWindow;
use rectrain_protocol::connect;
use rectrain_protocol::coordinator_channel::CoordinatorChannel;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::layout::Pooled;
use rectrain_protocol::message;

/// The pause before another request to a coordinator that did not reply.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The parameters that a donor offers to the other workers until the next step.
#[derive(Default)]
pub(crate) struct Offer {
    offered: Mutex<Option<Offered>>,
    changed: Notify,
}

#[derive(Clone)]
struct Offered {
    ring: u64,
    state: v1::DenseState,
    tensors: Vec<Tensor>,
}

impl Offer {
    fn put(&self, offered: Option<Offered>) {
        *self.lock() = offered;
        self.changed.notify_waiters();
    }

    /// Withdraws the offer. After a further step, all workers have their parameters.
    pub(crate) fn withdraw(&self) {
        *self.lock() = None;
    }

    /// Waits for the offer to the members of this ring.
    pub(crate) async fn of_ring(&self, ring: u64) -> Result<(v1::DenseState, Vec<Tensor>), RoleError> {
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                if let Some(offered) = self.lock().as_ref().filter(|offered| offered.ring == ring) {
                    return (offered.state.clone(), offered.tensors.clone());
                }
                changed.await;
            }
        };
        timeout(CALL_DEADLINE, waiting).await.map_err(|_| RoleError::Task {
            what: "a wait for dense parameters",
            reason: format!("this worker offered none to ring {ring} within {CALL_DEADLINE:?}"),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Offered>> {
        self.offered.lock()
    }
}

/// Watches for new rings until it is dropped.
pub(crate) struct RingWatch {
    newest: watch::Receiver<u64>,
    /// The task that requests the newest ring from the coordinator.
    requests: JoinHandle<()>,
}

impl RingWatch {
    pub(crate) fn start(runtime: &Handle, coordinator: CoordinatorChannel, rank: u32, known: u64) -> Self {
        let (sender, newest) = watch::channel(known);
        let requests = runtime.spawn(async move {
            while !sender.is_closed() {
                let request = v1::RingRequest { rank, ring: *sender.borrow() };
                match coordinator.call(request, Vec::new(), CALL_DEADLINE).await {
                    Ok((reply, _)) => {
                        sender.send_if_modified(|ring| std::mem::replace(ring, reply.ring.max(*ring)) < reply.ring);
                    }
                    // Other calls fail if the worker cannot continue without the coordinator.
                    Err(error) => {
                        tracing::debug!(%error, "the request for the newest ring failed");
                        tokio::time::sleep(RETRY_PAUSE).await;
                    }
                }
            }
        });
        Self { newest, requests }
    }
}

impl Drop for RingWatch {
    fn drop(&mut self) {
        self.requests.abort();
    }
}

impl Trainer {
    /// Resolves when a ring after the present one is in force. Never resolves for a single worker.
    pub(crate) fn newer_ring(&self) -> impl Future<Output = ()> + Send + use<> {
        let (newest, known) = (self.ring_watch.as_ref().map(|watch| watch.newest.clone()), self.ring_number);
        async move {
            let Some(mut newest) = newest else { return std::future::pending().await };
            if newest.wait_for(|ring| *ring > known).await.is_err() {
                std::future::pending().await
            }
        }
    }

    /// Waits for a task. Meanwhile repairs the ring each time a dense worker is replaced.
    pub(crate) fn join<T>(
        &mut self,
        what: &'static str,
        mut task: JoinHandle<Result<T, RoleError>>,
    ) -> Result<T, RoleError> {
        loop {
            let newer_ring = self.newer_ring();
            let joined = self.wait(async {
                tokio::select! {
                    biased;
                    joined = &mut task => Ok(Some(joined)),
                    () = newer_ring => Ok(None),
                }
            })?;
            match joined {
                Some(joined) => {
                    return joined.map_err(|error| RoleError::Task { what, reason: error.to_string() })?;
                }
                None => self.repair_ring()?,
            }
        }
    }

    /// Agrees with all workers of the newest ring on the next step. Then offers the parameters, or
    /// fetches the donor's.
    pub(crate) fn repair_ring(&mut self) -> Result<(), RoleError> {
        let newest = self.ring_watch.as_ref().map_or(0, |watch| *watch.newest.borrow());
        let mut ring = newest.max(self.ring_number);
        loop {
            let request = v1::MendRequest { rank: self.rank.0, ring, step: self.applied };
            let mended = self.call_coordinator(request, Vec::new())?;
            if mended.waits {
                continue;
            }
            if mended.ring != ring {
                ring = mended.ring;
                continue;
            }
            tracing::info!(ring, step = mended.step, donor = mended.donor, had = ?self.applied, "repairing the ring: a dense worker was replaced");
            self.ring_number = ring;
            self.ring.begin(ring);
            self.connect_to_next(&mended.dense_workers)?;
            let is_up_to_date = self.applied == Some(mended.step);
            if mended.donor == self.rank.0 {
                return if is_up_to_date { self.offer_parameters() } else { Err(donor_mismatch(&mended)) };
            }
            if is_up_to_date || self.fetch_parameters(&mended)? {
                return Ok(());
            }
            // The donor has died as well.
            ring = self.ring_watch.as_ref().map_or(ring, |watch| *watch.newest.borrow());
        }
    }

    fn offer_parameters(&mut self) -> Result<(), RoleError> {
        let optimizer = self.tower.optimizer().kind().name().to_owned();
        let (parameters, state) = self.tower.state()?;
        let tensors = [parameters, state, &self.previous].map(|values| Tensor::from(values.to_vec())).into();
        let state = v1::DenseState { step: self.applied.unwrap_or_default(), optimizer };
        self.offer.put(Some(Offered { ring: self.ring_number, state, tensors }));
        Ok(())
    }

    /// Fetches the donor's parameters. Returns false if a newer ring came into force first.
    fn fetch_parameters(&mut self, mended: &v1::Mended) -> Result<bool, RoleError> {
        let address = mended.dense_workers.get(mended.donor as usize).ok_or_else(|| RoleError::Inconsistent {
            message: "mend",
            reason: format!("dense worker {} is missing", mended.donor),
        })?;
        let donor = connect(&*self.peers.directory.transport, address)?;
        let ring = self.ring_number;
        let newer_ring = self.newer_ring();
        let fetched = self.wait(async {
            tokio::select! {
                biased;
                () = newer_ring => Ok(None),
                reply = call_peer(&donor, v1::DenseStateRequest { ring }, Vec::new, self.plan.patience()) => reply.map(Some),
            }
        })?;
        let Some((state, tensors)) = fetched else { return Ok(false) };
        let [parameters, optimizer_state, previous] = message::take("dense_state", tensors)?;
        if state.step != mended.step {
            let reason =
                format!("expected the parameters for step {}, received those for step {}", mended.step, state.step);
            return Err(RoleError::Inconsistent { message: "dense_state", reason });
        }
        let (parameters, optimizer_state) =
            (parameters.expect_f32("parameters")?, optimizer_state.expect_f32("state")?);
        self.tower.restore(&parameters, &state.optimizer, &optimizer_state)?;
        self.previous = previous.expect_f32("previous")?;
        self.applied = Some(mended.step);
        Ok(true)
    }

    /// Resends row gradients that this worker's predecessor may not have delivered. In `sync` these
    /// are the gradients of the last step, computed with the parameters of that step. With
    /// staleness τ they are the gradients of the last τ + 2 steps, computed with the present
    /// parameters.
    pub(crate) fn resend_gradients(
        &mut self,
        order: &v1::Order,
        window: StepWindow,
        horizon: &mut Horizon,
        pushes: &mut Pushes,
    ) -> Result<(), RoleError> {
        let step = self.next_step(order);
        let unsettled = window.unsettled_steps();
        let first = order.step.max(step.saturating_sub(unsettled));
        let batch_of = |step: u64| order.batch + (step - order.step);
        while horizon.until() < batch_of(step) {
            horizon.keep_ahead(self, batch_of(step))?;
            horizon.take(self)?;
        }
        let fetching: VecDeque<_> =
            (first..step).map(|step| (step, self.fetch_share(order, batch_of(step), horizon))).collect();
        for (step, fetching) in fetching {
            let own = self.fetched(fetching)?;
            if own.is_applied || own.answered == own.all_pieces() {
                continue;
            }
            if window.is_exact() && (own.missing > 0 || self.previous.is_empty()) {
                return Err(RoleError::Restarted { member: format!("dense worker {}", self.rank) });
            }
            let samples = self.samples_to_train(order, batch_of(step), &own);
            let scale = 1.0 / samples.max(1) as f32;
            self.swap_parameters(window)?;
            let computed = self.tower.forward_backward(own.features(), &own.labels, scale, step);
            self.swap_parameters(window)?;
            let StepOutput { embedding_gradients, linear_gradients, .. } = computed?;
            let gradients = Pooled { embeddings: embedding_gradients, linear: linear_gradients };
            for (piece, gradients) in own.by_piece(gradients) {
                pushes.push_back(self.send_gradients(piece, gradients, Some(step), None));
            }
        }
        Ok(())
    }

    /// In `sync`: swaps the parameters from after the last step with those from before it.
    fn swap_parameters(&mut self, window: StepWindow) -> Result<(), RoleError> {
        if window.is_exact() {
            self.tower.parameters_mut()?.swap_with_slice(&mut self.previous);
        }
        Ok(())
    }
}

fn donor_mismatch(mended: &v1::Mended) -> RoleError {
    let reason = format!(
        "the coordinator chose dense worker {} as donor for step {}, but it is at another step",
        mended.donor, mended.step
    );
    RoleError::Inconsistent { message: "mend", reason }
}
