//! Moves the dense parameters between this worker's flat buffers and the parameter servers'
//! partitions. A switch of the mode moves only these and the optimizer's state.

use std::time::Instant;

use futures::future::try_join_all;
use rectrain_proto::v1;
use rectrain_wire::Tensor;

use super::Trainer;
use rectrain_protocol::Role;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message;
use rectrain_protocol::plan::dense_partition;

impl Trainer {
    /// Sends every parameter server its partition. Only rank 0 does, as all ranks have the same
    /// parameters.
    pub(crate) fn publish(&mut self) -> Result<(), RoleError> {
        if self.rank.0 != 0 {
            return Ok(());
        }
        let total = self.tower.layout().total();
        let optimizer = self.tower.optimizer().kind().name();
        let (parameters, state) = self.tower.state()?;
        let servers = &self.peers.placement.servers;
        let calls = servers.iter().enumerate().map(|(server, channel)| {
            let own = dense_partition(total, server, servers.len());
            let slots = state.chunks_exact(total.max(1));
            let state: Vec<f32> = slots.flat_map(|slot| slot[own.clone()].iter().copied()).collect();
            let tensors = vec![Tensor::from(parameters[own].to_vec()), Tensor::from(state)];
            let put = v1::PutPartition { optimizer: optimizer.to_owned() };
            message::call_server(channel, put, move || Ok(tensors.clone()))
        });
        self.waits.wait(try_join_all(calls)).map(drop)
    }

    /// Replaces parameters and optimizer state by those on the parameter servers.
    pub(crate) fn read_back(&mut self) -> Result<(), RoleError> {
        let partitions: Vec<_> = self.get_partitions(true)?.into_iter().map(|(_, partition)| partition).collect();
        let total = self.tower.layout().total();
        let mut parameters = Vec::with_capacity(total);
        let mut slots = vec![Vec::with_capacity(total); self.tower.optimizer().slots().len()];
        let mut kind = self.tower.optimizer().kind().name().to_owned();
        let servers = partitions.len();
        for (server, (reply, tensors)) in partitions.into_iter().enumerate() {
            let expected = dense_partition(total, server, servers).len();
            let [own, state] = message::take("get_partition", tensors)?;
            let (own, state) = (own.expect_f32("parameters")?, state.expect_f32("state")?);
            if own.len() != expected || state.len() != expected * slots.len() {
                return Err(wrong_size(server, expected, own.len()));
            }
            parameters.extend(own);
            for (slot, own) in slots.iter_mut().zip(state.chunks_exact(expected.max(1))) {
                slot.extend_from_slice(own);
            }
            kind = reply.optimizer;
        }
        Ok(self.tower.restore(&parameters, &kind, &slots.concat())?)
    }

    /// Replaces the parameters by those on the parameter servers. Returns each server's step.
    pub(crate) fn pull_parameters(&mut self) -> Result<Vec<u64>, RoleError> {
        let started = Instant::now();
        let partitions = self.get_partitions(false)?;
        self.spend_on_last(started, &partitions);
        let partitions: Vec<_> = partitions.into_iter().map(|(_, partition)| partition).collect();
        let total = self.tower.layout().total();
        let mut steps = Vec::with_capacity(partitions.len());
        let servers = partitions.len();
        for (server, (reply, tensors)) in partitions.into_iter().enumerate() {
            let range = dense_partition(total, server, servers);
            let [own] = message::take("get_partition", tensors)?;
            let own = own.expect_f32("parameters")?;
            if own.len() != range.len() {
                return Err(wrong_size(server, range.len(), own.len()));
            }
            self.tower.parameters_mut()?[range].copy_from_slice(&own);
            steps.push(reply.step);
        }
        Ok(steps)
    }

    /// The partitions, each with the time at which it arrived.
    fn get_partitions(&self, state: bool) -> Result<Vec<Arrived>, RoleError> {
        let calls = self.peers.placement.servers.iter().map(|server| async move {
            let partition =
                message::call_server(server, v1::GetPartition { state, before: None }, || Ok(Vec::new())).await?;
            Ok((Instant::now(), partition))
        });
        self.wait(try_join_all(calls))
    }

    /// The wait since `started` was spent on the server that replied last.
    fn spend_on_last(&mut self, started: Instant, partitions: &[Arrived]) {
        let arrivals = partitions.iter().map(|(at, _)| *at).enumerate();
        let Some((position, at)) = arrivals.max_by_key(|(_, at)| *at) else { return };
        let number = self.peers.placement.map.servers().get(position).copied().unwrap_or_default();
        self.pace.times.spend(Role::Ps, u32::from(number), at.duration_since(started).as_secs_f64());
    }
}

/// A partition and its tensors, with the time at which it arrived.
type Arrived = (Instant, (v1::Partition, Vec<Tensor>));

pub(crate) fn wrong_size(server: usize, expected: usize, found: usize) -> RoleError {
    let reason = format!("parameter server {server} has {found} dense parameters, but its partition has {expected}");
    RoleError::Inconsistent { message: "get_partition", reason }
}
