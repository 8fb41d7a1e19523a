//! When a dense worker that trains with a barrier dies, another takes its place and the others wait for it: wherever they wait for
//! anybody, they also hear of the new ring. All tell the coordinator before which step their parameters stand, and whoever has less
//! than the furthest takes that one's over, as the newcomer does. A step's gradients are summed over all, so that nobody is further
//! than a step ahead.
//!
//! The newcomer then sends again what its predecessor may not have brought to the parameter servers: embedding workers give the same
//! pooled embeddings for it, and in `sync` it is computed with the parameters of that step, so that the gradients are the same to the
//! bit. Who has them already takes in nothing twice.

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
use super::half::Pushes;
use super::horizon::Horizon;
use rectrain_modes::barrier::StepWindow;
use rectrain_protocol::connect;
use rectrain_protocol::coordinator_channel::CoordinatorChannel;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::layout::Pooled;
use rectrain_protocol::message;

/// Before the coordinator is asked again that could not be.
const PAUSE: Duration = Duration::from_millis(100);

/// The parameters that a dense worker has for others, until the next step is made.
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

    /// Made a step since, all have what they need.
    pub(crate) fn withdraw(&self) {
        *self.lock() = None;
    }

    /// What is offered to the members of this ring; waits for it.
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
            reason: format!("there were none of ring {ring} within {CALL_DEADLINE:?}"),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Offered>> {
        self.offered.lock()
    }
}

/// Hears of new rings for as long as it is there.
pub(crate) struct RingWatch {
    newest: watch::Receiver<u64>,
    asking: JoinHandle<()>,
}

impl RingWatch {
    pub(crate) fn start(runtime: &Handle, coordinator: CoordinatorChannel, rank: u32, known: u64) -> Self {
        let (tell, newest) = watch::channel(known);
        let asking = runtime.spawn(async move {
            while !tell.is_closed() {
                let request = v1::RingRequest { rank, ring: *tell.borrow() };
                match coordinator.call(request, Vec::new(), CALL_DEADLINE).await {
                    Ok((reply, _)) => {
                        tell.send_if_modified(|ring| std::mem::replace(ring, reply.ring.max(*ring)) < reply.ring);
                    }
                    // Whoever cannot do without the coordinator finds that out elsewhere.
                    Err(error) => {
                        tracing::debug!(%error, "the coordinator could not be asked for the ring");
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            }
        });
        Self { newest, asking }
    }
}

impl Drop for RingWatch {
    fn drop(&mut self) {
        self.asking.abort();
    }
}

impl Trainer {
    /// Is there as soon as a ring after the present one is in force; never, where there is none.
    pub(crate) fn replaced(&self) -> impl Future<Output = ()> + Send + use<> {
        let (newest, known) = (self.ring_watch.as_ref().map(|watch| watch.newest.clone()), self.ring_number);
        async move {
            let Some(mut newest) = newest else { return std::future::pending().await };
            if newest.wait_for(|ring| *ring > known).await.is_err() {
                std::future::pending().await
            }
        }
    }

    /// Waits for a task, and mends the ring meanwhile as often as a dense worker is replaced.
    pub(crate) fn join<T>(
        &mut self,
        what: &'static str,
        mut task: JoinHandle<Result<T, RoleError>>,
    ) -> Result<T, RoleError> {
        loop {
            let replaced = self.replaced();
            let joined = self.wait(async {
                tokio::select! {
                    biased;
                    joined = &mut task => Ok(Some(joined)),
                    () = replaced => Ok(None),
                }
            })?;
            match joined {
                Some(joined) => {
                    return joined.map_err(|error| RoleError::Task { what, reason: error.to_string() })?;
                }
                None => self.mend()?,
            }
        }
    }

    /// Agrees with all others of the newest ring on the step before which they go on, and takes over or offers parameters.
    pub(crate) fn mend(&mut self) -> Result<(), RoleError> {
        let newest = self.ring_watch.as_ref().map_or(0, |watch| *watch.newest.borrow());
        let mut ring = newest.max(self.ring_number);
        loop {
            let request = v1::MendRequest { rank: self.rank.0, ring, step: self.applied };
            let mended = self.tell(request, Vec::new())?;
            if mended.waits {
                continue;
            }
            if mended.ring != ring {
                ring = mended.ring;
                continue;
            }
            tracing::info!(ring, step = mended.step, donor = mended.donor, had = ?self.applied, "a dense worker was replaced");
            self.ring_number = ring;
            self.ring.begin(ring);
            self.connect_to_next(&mended.dense_workers)?;
            let has_them = self.applied == Some(mended.step);
            if mended.donor == self.rank.0 {
                return if has_them { self.offer_parameters() } else { Err(not_its_own(&mended)) };
            }
            if has_them || self.take_parameters(&mended)? {
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

    /// Says whether there were any before another ring was in force.
    fn take_parameters(&mut self, mended: &v1::Mended) -> Result<bool, RoleError> {
        let address = mended.dense_workers.get(mended.donor as usize).ok_or_else(|| RoleError::Inconsistent {
            message: "mend",
            reason: format!("dense worker {} is missing", mended.donor),
        })?;
        let donor = connect(&*self.peers.directory.transport, address)?;
        let ring = self.ring_number;
        let replaced = self.replaced();
        let taken = self.wait(async {
            tokio::select! {
                biased;
                () = replaced => Ok(None),
                taken = call_peer(&donor, v1::DenseStateRequest { ring }, Vec::new, self.plan.patience()) => taken.map(Some),
            }
        })?;
        let Some((state, tensors)) = taken else { return Ok(false) };
        let [parameters, optimizer_state, previous] = message::take("dense_state", tensors)?;
        if state.step != mended.step {
            let reason =
                format!("parameters before step {} came, those before {} were expected", state.step, mended.step);
            return Err(RoleError::Inconsistent { message: "dense_state", reason });
        }
        let (parameters, optimizer_state) =
            (parameters.expect_f32("parameters")?, optimizer_state.expect_f32("state")?);
        self.tower.restore(&parameters, &state.optimizer, &optimizer_state)?;
        self.previous = previous.expect_f32("previous")?;
        self.applied = Some(mended.step);
        Ok(true)
    }

    /// Sends the gradients of rows that the one before may not have brought to the parameter servers: in `sync` those of the last step, with
    /// staleness τ of the last τ + 2, then with the parameters as they are now.
    pub(crate) fn push_again(
        &mut self,
        order: &v1::Order,
        window: StepWindow,
        horizon: &mut Horizon,
        pushes: &mut Pushes,
    ) -> Result<(), RoleError> {
        let step = self.stands_before(order);
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
            self.exchange_parameters(window)?;
            let computed = self.tower.forward_backward(own.features(), &own.labels, scale, step);
            self.exchange_parameters(window)?;
            let StepOutput { embedding_gradients, linear_gradients, .. } = computed?;
            let gradients = Pooled { embeddings: embedding_gradients, linear: linear_gradients };
            for (piece, gradients) in own.by_piece(gradients) {
                pushes.push_back(self.send_gradients(piece, gradients, Some(step), None));
            }
        }
        Ok(())
    }

    /// In `sync`: puts the parameters before the last step in the place of those after it, or back.
    fn exchange_parameters(&mut self, window: StepWindow) -> Result<(), RoleError> {
        if window.is_exact() {
            self.tower.parameters_mut()?.swap_with_slice(&mut self.previous);
        }
        Ok(())
    }
}

fn not_its_own(mended: &v1::Mended) -> RoleError {
    let reason = format!(
        "dense worker {} is to give parameters before step {}, which it does not have",
        mended.donor, mended.step
    );
    RoleError::Inconsistent { message: "mend", reason }
}
