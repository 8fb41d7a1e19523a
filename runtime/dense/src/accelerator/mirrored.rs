//! A flat buffer that lives on a device and is copied to the host on request.

use burn::tensor::{Device, Tensor, TensorData};

use crate::device::guarded;
use crate::{DenseError, ParameterLayout};

/// Which of a buffer's two copies is newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Newer {
    Neither,
    Device,
    Host,
    /// Neither is valid: a failure of the device destroyed both.
    Lost,
}

/// A flat buffer of a layout, or several one after another, on a device.
#[derive(Debug, Clone)]
pub(crate) struct Mirrored {
    device: Device,
    name: String,
    /// Shape of each tensor, in the buffer's order.
    shapes: Vec<[usize; 2]>,
    tensors: Vec<Tensor<2>>,
    host: Vec<f32>,
    newer: Newer,
}

impl Mirrored {
    pub(super) fn new(layout: &ParameterLayout, device: &Device, name: &str, host: Vec<f32>) -> Self {
        let copies = host.len() / layout.total().max(1);
        let shapes = (0..copies).flat_map(|_| layout.entries().iter().map(|entry| entry.shape)).collect();
        Self { device: device.clone(), name: name.to_owned(), shapes, tensors: Vec::new(), host, newer: Newer::Host }
    }

    /// The present values.
    pub(crate) fn host(&mut self, during: &str) -> Result<&[f32], DenseError> {
        self.check(during)?;
        if self.newer == Newer::Device && !self.tensors.is_empty() {
            let data = guarded(&self.name, during, || {
                let flat =
                    self.tensors.iter().map(|tensor| tensor.clone().reshape([tensor.dims().iter().product::<usize>()]));
                Tensor::<1>::cat(flat.collect(), 0).try_into_data().map_err(|error| error.to_string())
            })?;
            self.host = floats(data, &self.name, during)?;
            self.newer = Newer::Neither;
        }
        Ok(&self.host)
    }

    /// The present values, to be changed in place.
    pub(crate) fn host_mut(&mut self, during: &str) -> Result<&mut [f32], DenseError> {
        self.host(during)?;
        self.newer = Newer::Host;
        Ok(&mut self.host)
    }

    /// The present values as tensors, in the buffer's order.
    pub(super) fn on_device(&mut self, during: &str) -> Result<&[Tensor<2>], DenseError> {
        self.check(during)?;
        if self.newer == Newer::Host && !self.shapes.is_empty() {
            self.tensors = guarded(&self.name, during, || {
                let values = TensorData::new(self.host.clone(), [self.host.len()]);
                let flat = Tensor::<1>::from_data(values, &self.device);
                let mut start = 0;
                let tensors = self.shapes.iter().map(|&shape| {
                    let end = start + shape[0] * shape[1];
                    let tensor = flat.clone().narrow(0, start, end - start).reshape(shape);
                    start = end;
                    tensor
                });
                Ok(tensors.collect())
            })?;
            self.newer = Newer::Neither;
        }
        Ok(&self.tensors)
    }

    /// The tensors as the last [`Mirrored::on_device`] or [`Mirrored::set`] left them.
    pub(super) fn tensors(&self) -> &[Tensor<2>] {
        &self.tensors
    }

    /// Takes the tensors out, so that an operation on one may reuse its memory. The caller must
    /// call [`Mirrored::set`] afterwards, or the buffer is lost.
    pub(super) fn take(&mut self) -> Vec<Tensor<2>> {
        self.newer = Newer::Lost;
        std::mem::take(&mut self.tensors)
    }

    /// Loses the buffer, as a failure of the device would.
    #[cfg(test)]
    pub(crate) fn lose(&mut self) {
        drop(self.take());
    }

    /// Replaces the values.
    pub(super) fn set(&mut self, tensors: Vec<Tensor<2>>) {
        self.tensors = tensors;
        self.newer = Newer::Device;
    }

    fn check(&self, during: &str) -> Result<(), DenseError> {
        guarded(&self.name, during, || match self.newer {
            Newer::Lost => Err("its memory was lost in an earlier failure; start again from a checkpoint".to_owned()),
            Newer::Neither | Newer::Device | Newer::Host => Ok(()),
        })
    }
}

/// The values of a tensor that was read from a device.
pub(super) fn floats(data: TensorData, device: &str, during: &str) -> Result<Vec<f32>, DenseError> {
    guarded(device, during, || data.try_into_vec().map_err(|error| format!("it gave no 32-bit floats: {error:?}")))
}
