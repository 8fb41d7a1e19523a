//! Access to a tower's flat buffers, for all-reduce, checkpoints and parameter servers.

use super::{Compute, Tower};
use crate::DenseError;
use crate::finite::{first_not_finite, l2_norm};

/// Names this work in the errors of a device: the host reads or writes the device's buffers.
const EXCHANGE: &str = "an exchange with the host";

impl Tower {
    /// The flat parameters.
    ///
    /// # Errors
    /// [`DenseError::Device`], like every method that copies a device's buffers.
    pub fn parameters(&mut self) -> Result<&[f32], DenseError> {
        match &mut self.compute {
            Compute::Host(host) => Ok(host.parameters()),
            Compute::Accelerator(device) => device.parameters.host(EXCHANGE),
        }
    }

    /// The flat parameters, for overwriting in place.
    ///
    /// # Errors
    /// [`DenseError::Device`].
    pub fn parameters_mut(&mut self) -> Result<&mut [f32], DenseError> {
        match &mut self.compute {
            Compute::Host(host) => Ok(host.parameters_mut()),
            Compute::Accelerator(device) => device.parameters.host_mut(EXCHANGE),
        }
    }

    /// The flat gradients of the last `forward_backward`, zero before the first.
    ///
    /// # Errors
    /// [`DenseError::Device`].
    pub fn gradients(&mut self) -> Result<&[f32], DenseError> {
        match &mut self.compute {
            Compute::Host(host) => Ok(&host.gradients),
            Compute::Accelerator(device) => device.gradients.host(EXCHANGE),
        }
    }

    /// The flat gradients, for reduction in place.
    ///
    /// # Errors
    /// [`DenseError::Device`].
    pub fn gradients_mut(&mut self) -> Result<&mut [f32], DenseError> {
        match &mut self.compute {
            Compute::Host(host) => Ok(&mut host.gradients),
            Compute::Accelerator(device) => device.gradients.host_mut(EXCHANGE),
        }
    }

    /// The L2 norm of [`Tower::gradients`], over all dense parameters. It is not finite if a
    /// gradient is not.
    ///
    /// # Errors
    /// [`DenseError::Device`].
    pub fn gradient_norm(&mut self) -> Result<f64, DenseError> {
        self.gradients().map(l2_norm)
    }

    /// The flat parameters and the flat optimizer state: one vector of the parameters' layout for
    /// each of [`crate::DenseOptimizer::slots`], one after another.
    ///
    /// # Errors
    /// [`DenseError::Device`].
    pub fn state(&mut self) -> Result<(&[f32], &[f32]), DenseError> {
        match &mut self.compute {
            Compute::Host(host) => Ok((host.parameters(), &host.optimizer_state)),
            Compute::Accelerator(device) => {
                Ok((device.parameters.host(EXCHANGE)?, device.optimizer_state.host(EXCHANGE)?))
            }
        }
    }

    /// Refuses parameters that are infinite or not a number after `updates` updates.
    ///
    /// # Errors
    /// [`DenseError::NonFinite`] and [`DenseError::Device`].
    pub fn check_parameters(&mut self, updates: u64) -> Result<(), DenseError> {
        let (parameters, _) = self.state()?;
        let Some(position) = first_not_finite(parameters) else { return Ok(()) };
        let what = format!("dense parameter {position} ({})", parameters[position]);
        Err(DenseError::NonFinite { what, during: format!("the model of step {updates}") })
    }

    /// Restores parameters and optimizer state from a checkpoint. `saved_kind` is the kind of the
    /// optimizer that wrote them ([`crate::DenseOptimizer::kind`]). The checkpoint's update count
    /// must be passed to [`Tower::apply`].
    ///
    /// # Errors
    /// [`DenseError::OptimizerChanged`] and [`DenseError::RestoreLength`], which leave the tower
    /// unchanged; [`DenseError::Device`].
    pub fn restore(&mut self, parameters: &[f32], saved_kind: &str, optimizer_state: &[f32]) -> Result<(), DenseError> {
        let configured = self.optimizer.kind().name();
        if saved_kind != configured {
            return Err(DenseError::OptimizerChanged { saved: saved_kind.into(), configured });
        }
        let total = self.layout().total();
        for (what, expected, got) in [
            ("parameters", total, parameters.len()),
            ("optimizer state", total * self.optimizer.slots().len(), optimizer_state.len()),
        ] {
            if expected != got {
                return Err(DenseError::RestoreLength { what, expected, got });
            }
        }
        match &mut self.compute {
            Compute::Host(host) => {
                host.parameters_mut().copy_from_slice(parameters);
                host.optimizer_state.copy_from_slice(optimizer_state);
            }
            Compute::Accelerator(device) => {
                device.parameters.host_mut(EXCHANGE)?.copy_from_slice(parameters);
                device.optimizer_state.host_mut(EXCHANGE)?.copy_from_slice(optimizer_state);
            }
        }
        Ok(())
    }
}
