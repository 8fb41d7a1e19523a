//! In `des`: the first layer of the model's tower. Each step has a weight of its own, which a dense
//! worker sends before it. Look-ups of the step wait for it. The server returns its part of the
//! weight's gradient once it has the gradients of all pieces.
//!
//! The layers and gradients of two steps stay, because the replacement of a dense worker may send
//! or request them again.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use rectrain_pooling::{FirstLayer, LayerShape, kernel_of};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::plan::JobPlan;
use tokio::sync::Notify;

use crate::kept::LeftLayers;

/// The layers and the gradients of the last steps.
#[derive(Default)]
pub(crate) struct FirstLayers {
    layers: Mutex<LastSteps<FirstLayer>>,
    gradients: Mutex<LastSteps<Vec<f32>>>,
    /// Notified when a layer or a gradient arrives.
    changed: Notify,
}

/// Values of the newest step and of the step before it.
struct LastSteps<T>(BTreeMap<u64, Arc<T>>);

impl<T> Default for LastSteps<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> LastSteps<T> {
    /// Stores the value of a step, or replaces it. Drops the values of older steps.
    fn put(&mut self, step: u64, value: T) {
        self.0.insert(step, Arc::new(value));
        if let Some(newest) = self.0.keys().next_back().copied() {
            self.0 = self.0.split_off(&newest.saturating_sub(1));
        }
    }

    /// The value of a step. `None` if it may still come.
    ///
    /// # Errors
    /// The value is dropped: there are later ones.
    fn get(&self, step: u64, what: &'static str) -> Result<Option<Arc<T>>, RoleError> {
        match self.0.get(&step) {
            None if self.0.keys().next_back().is_some_and(|newest| *newest > step) => {
                let reason = format!("the first layer of step {step} is no longer here");
                Err(RoleError::Inconsistent { message: what, reason })
            }
            value => Ok(value.cloned()),
        }
    }
}

impl FirstLayers {
    pub(crate) fn put(&self, step: u64, layer: FirstLayer) {
        self.layers.lock().put(step, layer);
        self.changed.notify_waiters();
    }

    /// The server has the gradient of a step.
    pub(crate) fn finish(&self, step: u64, gradient: Vec<f32>) {
        self.gradients.lock().put(step, gradient);
        self.changed.notify_waiters();
    }

    /// The layer of a step. `None` if the server does not have it.
    pub(crate) fn get(&self, step: u64) -> Option<Arc<FirstLayer>> {
        self.layers.lock().0.get(&step).cloned()
    }

    /// Waits for the layer of a step.
    ///
    /// # Errors
    /// [`RoleError::Inconsistent`] if it is dropped.
    pub(crate) async fn layer(&self, step: u64) -> Result<Arc<FirstLayer>, RoleError> {
        self.wait(|| self.layers.lock().get(step, "lookup")).await
    }

    /// Waits for the gradient of a step.
    ///
    /// # Errors
    /// [`RoleError::Inconsistent`] if it is dropped.
    pub(crate) async fn gradient(&self, step: u64) -> Result<Arc<Vec<f32>>, RoleError> {
        self.wait(|| self.gradients.lock().get(step, "first_layer_gradient")).await
    }

    async fn wait<T>(&self, get: impl Fn() -> Result<Option<Arc<T>>, RoleError>) -> Result<Arc<T>, RoleError> {
        loop {
            let changed = self.changed.notified();
            if let Some(value) = get()? {
                return Ok(value);
            }
            changed.await;
        }
    }

    /// Drops everything, because another mode begins.
    pub(crate) fn clear(&self) {
        self.layers.lock().0.clear();
        self.gradients.lock().0.clear();
    }

    /// Restores the state of the predecessor.
    ///
    /// # Errors
    /// [`RoleError::Inconsistent`] if a layer has another shape than the plan's.
    pub(crate) fn recover(&self, plan: &JobPlan, left: LeftLayers) -> Result<(), RoleError> {
        for (step, weights, biases) in left.layers {
            self.put(step, layer_of(plan, &weights, &biases)?);
        }
        left.gradients.into_iter().for_each(|(step, gradient)| self.finish(step, gradient));
        Ok(())
    }
}

/// The shape of the first layer. `None` for a model without a tower.
fn shape_of(plan: &JobPlan) -> Option<LayerShape> {
    let units = plan.sub_operators().map_or(0, |operators| operators.units);
    (units > 0).then_some(LayerShape { width: plan.layout.embedding_width, units })
}

/// The first layer of a step, from its parameters. Servers but the first have no biases.
///
/// # Errors
/// [`RoleError::Inconsistent`] if they do not fit the plan.
pub(crate) fn layer_of(plan: &JobPlan, weights: &[f32], biases: &[f32]) -> Result<FirstLayer, RoleError> {
    let none = || RoleError::Inconsistent { message: "put_first_layer", reason: "the model has no tower".to_owned() };
    let shape = shape_of(plan).ok_or_else(none)?;
    FirstLayer::new(kernel_of(plan.precision), shape, weights, (!biases.is_empty()).then_some(biases))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_of_two_steps_stay() {
        let mut steps = LastSteps::default();
        for step in 4..7 {
            steps.put(step, step);
        }
        let get = |step| steps.get(step, "lookup").map(|value| value.map(|value| *value));
        assert_eq!((get(5).unwrap(), get(6).unwrap(), get(7).unwrap()), (Some(5), Some(6), None));
        let error = get(4).unwrap_err().to_string();
        assert!(error.contains("step 4 is no longer here"), "{error}");
    }

    #[test]
    fn a_value_sent_again_replaces_the_first() {
        let mut steps = LastSteps::default();
        steps.put(4, 1);
        steps.put(5, 2);
        steps.put(4, 3);
        assert_eq!(steps.get(4, "lookup").unwrap().as_deref(), Some(&3));
        assert_eq!(steps.get(5, "lookup").unwrap().as_deref(), Some(&2));
    }

    #[tokio::test]
    async fn a_request_waits_for_its_step() {
        let layers = FirstLayers::default();
        let waiting = layers.gradient(3);
        tokio::pin!(waiting);
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        layers.finish(2, vec![2.0]);
        assert!(futures::poll!(waiting.as_mut()).is_pending(), "the gradient of another step");
        layers.finish(3, vec![3.0]);
        assert_eq!(*waiting.await.unwrap(), [3.0]);
        layers.clear();
        assert!(layers.get(3).is_none());
    }
}
