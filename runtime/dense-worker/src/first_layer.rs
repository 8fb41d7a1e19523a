//! In `des`, the first layer of a model with a tower. Parameter servers multiply its weight by
//! their pooled embeddings, and dense workers hold it with its optimizer's state. Before a step,
//! rank 0 sends each server a copy. After it, rank 0 gets each server's part of the gradient, which
//! includes the pieces of all dense workers. The gradient then takes part in the all-reduce, where
//! the other workers have zeros. (The crosses of `dcn` have a part on every worker.)

use futures::future::try_join_all;
use rectrain_dense::FirstLayer;
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::long_wait::reporting_wait;
use rectrain_protocol::message;
use rectrain_wire::Tensor;

use super::trainer::{Divided, Trainer};

impl Trainer {
    /// Rank 0 in `des`: sends every parameter server the first layer for `step`. The first one
    /// starts its sums from the bias.
    pub(crate) fn put_first_layer(&mut self, step: u64) -> Result<(), RoleError> {
        let Some(first_layer) = self.own_first_layer() else { return Ok(()) };
        let parameters = self.tower.parameters()?;
        let weights = Tensor::from(first_layer.weights(parameters));
        let biases = first_layer.biases(parameters);
        let servers = self.peers.placement.servers.clone();
        let calls =
            servers.into_iter().enumerate().map(move |(server, channel)| {
                let biases = if server == 0 { biases.clone() } else { Vec::new() };
                let tensors = vec![weights.clone(), Tensor::from(biases)];
                async move {
                    message::call_server(&channel, v1::PutFirstLayer { step }, || Ok(tensors.clone())).await.map(drop)
                }
            });
        let sent = self.spawn(try_join_all(calls));
        self.join("put_first_layer", sent).map(drop)
    }

    /// Rank 0 in `des`: the gradient of the first layer's weight in `step`, summed over the servers
    /// in their order. Waits for the pieces of all dense workers. `None` for other workers.
    pub(crate) fn first_layer_gradient(&mut self, step: u64) -> Result<Option<Vec<f32>>, RoleError> {
        let Some(first_layer) = self.own_first_layer() else { return Ok(None) };
        let (servers, patience) = (self.peers.placement.servers.clone(), self.plan.patience());
        let calls = servers.into_iter().map(move |channel| async move {
            let request = v1::FirstLayerGradientRequest { step };
            let (_, tensors) = message::call_server_within(&channel, request, || Ok(Vec::new()), patience).await?;
            let [gradient] = message::take("first_layer_gradient", tensors)?;
            Ok::<_, RoleError>(gradient.expect_f32("gradient")?)
        });
        let (coordinator, waiting) = (self.peers.coordinator.clone(), self.waiting_for_pieces());
        let parts = self.spawn(async move { reporting_wait(try_join_all(calls), &coordinator, waiting).await });
        let parts = self.join("first_layer_gradient", parts)?;
        let sum = sum_of_servers(parts, first_layer.values())?;
        self.check_first_layer(step, &sum)?;
        Ok(Some(sum))
    }

    /// Adds the gradient of the first layer's weight to this worker's gradients. They are 0 there,
    /// but for the crosses of `dcn`: their biases meet the weights in the dense workers.
    pub(crate) fn add_first_layer_gradient(&mut self, gradient: Option<&[f32]>) -> Result<(), RoleError> {
        if let (Some(gradient), Some(first_layer)) = (gradient, self.own_first_layer()) {
            first_layer.add_gradient(gradient, self.tower.gradients_mut()?);
        }
        Ok(())
    }

    /// The first layer, if this worker exchanges it with the parameter servers.
    fn own_first_layer(&self) -> Option<FirstLayer> {
        let divided = self.divided.as_ref().filter(|_| self.rank.0 == 0);
        divided.and_then(|Divided { first_layer, .. }| first_layer.clone())
    }

    /// The report of a wait for the pieces of all dense workers. As in the all-reduce, it names the
    /// worker before. Workers that are not late name the one before them.
    fn waiting_for_pieces(&self) -> v1::Waiting {
        match self.barrier_workers {
            0 | 1 => self.waiting_for(v1::Role::Ps, 0),
            workers => self.waiting_for(v1::Role::DenseWorker, workers - 1),
        }
    }
}

/// The sum of the servers' parts, in their order. Each has `length` values.
fn sum_of_servers(parts: Vec<Vec<f32>>, length: usize) -> Result<Vec<f32>, RoleError> {
    if let Some(part) = parts.iter().find(|part| part.len() != length) {
        let reason = format!("expected {length} gradients of the first layer, found {}", part.len());
        return Err(RoleError::Inconsistent { message: "first_layer_gradient", reason });
    }
    let add = |mut sum: Vec<f32>, part: Vec<f32>| {
        sum.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
        sum
    };
    Ok(parts.into_iter().reduce(add).unwrap_or_else(|| vec![0.0; length]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_servers_are_added_in_their_order() {
        // In another order the small part is lost.
        let parts = vec![vec![1e8, 1.0], vec![-1e8, 2.0], vec![0.5, 4.0]];
        assert_eq!(sum_of_servers(parts, 2).unwrap(), [0.5, 7.0]);
        assert_eq!(sum_of_servers(Vec::new(), 2).unwrap(), [0.0, 0.0]);
        let error = sum_of_servers(vec![vec![1.0, 2.0], vec![1.0]], 2).unwrap_err().to_string();
        assert!(error.contains("expected 2 gradients of the first layer, found 1"), "{error}");
    }
}
