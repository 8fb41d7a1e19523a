//! Batches that loaders have sent and the training loop has not taken. Bounded: a loader's call waits while its batch is more
//! than a window ahead of what the loop takes next, which in turn stops the loader's reading.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rectrain_modes::GlobalStep;
use tokio::sync::Notify;

use crate::error::RoleError;
use crate::plan::CALL_DEADLINE;

/// The dense half of one piece of a batch; its ids are at an embedding worker.
#[derive(Debug, Clone)]
pub(crate) struct DenseBatch {
    pub(crate) samples: usize,
    pub(crate) global_samples: usize,
    pub(crate) epoch: u32,
    pub(crate) dense: Vec<f32>,
    pub(crate) labels: Vec<f32>,
    pub(crate) groups: Option<Vec<u64>>,
}

#[derive(Debug, Default)]
struct State {
    next_step: u64,
    steps: BTreeMap<u64, DenseBatch>,
    total_steps: Option<u64>,
    evaluation: u64,
    next_in_evaluation: u64,
    evaluations: BTreeMap<(u64, u64), DenseBatch>,
    evaluation_batches: Option<u64>,
    /// Why nothing will come any more.
    closed: Option<String>,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Inbox {
    window: u64,
    state: Mutex<State>,
    changed: Notify,
}

impl Inbox {
    pub(crate) fn new(window: u64) -> Self {
        Self { window: window.max(1), state: Mutex::new(State::default()), changed: Notify::new() }
    }

    /// Takes the batch of `step` in once it is within the window.
    pub(crate) async fn put_step(&self, step: GlobalStep, batch: DenseBatch) -> Result<(), RoleError> {
        self.until("a place for a training batch", |state| (step.0 < state.next_step + self.window).then_some(()))
            .await?;
        let twice = {
            let mut state = self.lock();
            step.0 < state.next_step || state.steps.insert(step.0, batch).is_some()
        };
        self.changed.notify_waiters();
        if twice { Err(sent_twice(format!("the batch of step {step}"))) } else { Ok(()) }
    }

    /// Takes batch `number` of the evaluation before `at_step` in once it is within the window.
    pub(crate) async fn put_evaluation(
        &self,
        at_step: GlobalStep,
        number: u64,
        batch: DenseBatch,
    ) -> Result<(), RoleError> {
        self.until("a place for an evaluation batch", |state| {
            let next = if state.evaluation == at_step.0 { state.next_in_evaluation } else { 0 };
            (number < next + self.window).then_some(())
        })
        .await?;
        let twice = self.lock().evaluations.insert((at_step.0, number), batch).is_some();
        self.changed.notify_waiters();
        if twice { Err(sent_twice(format!("batch {number} of the evaluation at step {at_step}"))) } else { Ok(()) }
    }

    /// The batch of the next step; `None` if training ends before it.
    pub(crate) async fn take_step(&self) -> Result<Option<DenseBatch>, RoleError> {
        let taken = self
            .until("the next training batch", |state| match state.take_step() {
                Some(batch) => Some(Some(batch)),
                None => (state.total_steps == Some(state.next_step)).then_some(None),
            })
            .await?;
        self.changed.notify_waiters();
        Ok(taken)
    }

    /// The batch of the next step if it is here already.
    pub(crate) fn try_take_step(&self) -> Option<DenseBatch> {
        let taken = self.lock().take_step();
        if taken.is_some() {
            self.changed.notify_waiters();
        }
        taken
    }

    /// Training ends before this step.
    pub(crate) fn end_training(&self, total_steps: GlobalStep) {
        self.lock().total_steps = Some(total_steps.0);
        self.changed.notify_waiters();
    }

    /// The evaluation before `at_step` begins.
    pub(crate) fn begin_evaluation(&self, at_step: GlobalStep) {
        {
            let mut state = self.lock();
            state.evaluation = at_step.0;
            state.next_in_evaluation = 0;
            state.evaluation_batches = None;
        }
        self.changed.notify_waiters();
    }

    /// The evaluation in progress has this many batches.
    pub(crate) fn end_evaluation(&self, batches: u64) {
        self.lock().evaluation_batches = Some(batches);
        self.changed.notify_waiters();
    }

    /// The next batch of the evaluation in progress; `None` after its last.
    pub(crate) async fn take_evaluation(&self) -> Result<Option<DenseBatch>, RoleError> {
        let taken = self
            .until("the next evaluation batch", |state| {
                let key = (state.evaluation, state.next_in_evaluation);
                match state.evaluations.remove(&key) {
                    Some(batch) => {
                        state.next_in_evaluation += 1;
                        Some(Some(batch))
                    }
                    None => (state.evaluation_batches == Some(key.1)).then_some(None),
                }
            })
            .await?;
        self.changed.notify_waiters();
        Ok(taken)
    }

    /// Everybody who waits here, now or later, fails with this reason.
    pub(crate) fn close(&self, reason: &RoleError) {
        self.lock().closed = Some(reason.to_string());
        self.changed.notify_waiters();
    }

    /// Waits until `ready` gives something; asked again at every change.
    async fn until<T>(
        &self,
        what: &'static str,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, RoleError> {
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                {
                    let mut state = self.lock();
                    if let Some(reason) = &state.closed {
                        return Err(RoleError::Task { what: "a dense worker's wait", reason: reason.clone() });
                    }
                    if let Some(value) = ready(&mut state) {
                        return Ok(value);
                    }
                }
                changed.await;
            }
        };
        tokio::time::timeout(CALL_DEADLINE, waiting).await.map_err(|_| RoleError::Task {
            what: "a dense worker's wait",
            reason: format!("{what} did not come within {CALL_DEADLINE:?}"),
        })?
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn take_step(&mut self) -> Option<DenseBatch> {
        if self.total_steps.is_some_and(|total| self.next_step >= total) {
            return None;
        }
        let batch = self.steps.remove(&self.next_step)?;
        self.next_step += 1;
        Some(batch)
    }
}

fn sent_twice(what: String) -> RoleError {
    RoleError::Inconsistent { message: "put_dense", reason: format!("{what} was sent twice") }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    fn batch(samples: usize) -> DenseBatch {
        DenseBatch {
            samples,
            global_samples: samples,
            epoch: 0,
            dense: vec![],
            labels: vec![0.0; samples],
            groups: None,
        }
    }

    #[tokio::test]
    async fn batches_come_out_in_step_order_and_a_far_one_waits() {
        let inbox = Arc::new(Inbox::new(2));
        inbox.put_step(GlobalStep(1), batch(1)).await.unwrap();
        let far = Arc::clone(&inbox);
        let far = tokio::spawn(async move { far.put_step(GlobalStep(2), batch(2)).await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!far.is_finished(), "step 2 is outside a window of 2 before step 0 is taken");
        assert!(inbox.try_take_step().is_none(), "step 0 is not here");
        inbox.put_step(GlobalStep(0), batch(7)).await.unwrap();
        assert_eq!(inbox.take_step().await.unwrap().unwrap().samples, 7);
        far.await.unwrap().unwrap();
        assert_eq!(inbox.take_step().await.unwrap().unwrap().samples, 1);
        inbox.end_training(GlobalStep(3));
        assert_eq!(inbox.take_step().await.unwrap().unwrap().samples, 2);
        assert!(inbox.take_step().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_batch_sent_twice_is_refused() {
        let inbox = Inbox::new(4);
        inbox.put_step(GlobalStep(0), batch(1)).await.unwrap();
        assert!(inbox.put_step(GlobalStep(0), batch(1)).await.is_err());
        inbox.take_step().await.unwrap();
        assert!(inbox.put_step(GlobalStep(0), batch(1)).await.is_err());
    }

    #[tokio::test]
    async fn an_evaluation_may_be_sent_before_it_begins_here() {
        let inbox = Inbox::new(2);
        inbox.put_evaluation(GlobalStep(5), 0, batch(3)).await.unwrap();
        inbox.begin_evaluation(GlobalStep(5));
        assert_eq!(inbox.take_evaluation().await.unwrap().unwrap().samples, 3);
        inbox.end_evaluation(1);
        assert!(inbox.take_evaluation().await.unwrap().is_none());
    }
}
