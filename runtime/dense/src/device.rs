//! What a tower computes on, and which GPUs there are. Whether this build can use any is decided by the feature `cuda`; the program
//! is one and the same on machines with and without a driver, which is looked for when it is asked for.

use burn::tensor::Device;

use crate::DenseError;

/// What a tower computes on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ComputeDevice {
    /// The CPU.
    #[default]
    Cpu,
    /// The NVIDIA GPU of this index, as CUDA counts those that the process may see (`CUDA_VISIBLE_DEVICES`).
    Cuda(usize),
}

/// A GPU that this build can compute on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its index.
    pub index: usize,
    /// Its name, as the driver tells it.
    pub name: String,
}

/// Memory of a GPU that a process has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes taken from the driver: those in use, and those kept for the next step.
    pub reserved_bytes: u64,
}

/// Whether this build can compute on a GPU where there is one.
pub const GPU_SUPPORT: bool = cfg!(feature = "cuda");

impl std::fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// The GPUs that this process may use; none where this build has no support for them or the machine has no driver.
///
/// # Errors
/// [`DenseError::Device`] where there is a driver that does not answer as it should.
pub fn gpus() -> Result<Vec<Gpu>, DenseError> {
    let found = guarded("the GPU driver", "looking for GPUs", || Ok(cuda::count()))?;
    (0..found)
        .map(|index| {
            let name = guarded(&ComputeDevice::Cuda(index).to_string(), "opening it", || Ok(cuda::name(index)))?;
            Ok(Gpu { index, name })
        })
        .collect()
}

/// Opens a GPU and has it compute something small, so that what keeps it from working (a driver that is too old, a compiler that
/// is missing, memory that others hold) is told before training begins.
///
/// # Errors
/// [`DenseError::NoGpu`] and [`DenseError::Device`].
pub(crate) fn open_cuda(index: usize) -> Result<Device, DenseError> {
    if !GPU_SUPPORT {
        return Err(DenseError::NoGpu { reason: "this build computes on the CPU only".into() });
    }
    let found = gpus()?.len();
    if index >= found {
        let reason = match found {
            0 => "no NVIDIA GPU or no driver for one was found".to_owned(),
            found => format!("GPU {index} was asked for, but {found} can be seen, counted from 0"),
        };
        return Err(DenseError::NoGpu { reason });
    }
    let name = ComputeDevice::Cuda(index).to_string();
    guarded(&name, "a first computation", || {
        let device = cuda::device(index);
        let ones = burn::tensor::Tensor::<2>::ones([32, 32], &device);
        let product = ones.clone().matmul(ones).try_into_data().map_err(|error| error.to_string())?;
        let right = product.as_slice::<f32>().is_ok_and(|values| values.iter().all(|&value| value == 32.0));
        if right { Ok(device) } else { Err("a product of two matrices of ones came out wrong".into()) }
    })
}

/// Does work that a device is part of. Drivers and the kernels' compiler tell some of their failures by a panic; it becomes the
/// error that it is.
pub(crate) fn guarded<T>(
    device: &str,
    during: &str,
    work: impl FnOnce() -> Result<T, String>,
) -> Result<T, DenseError> {
    let failed = |reason: String| DenseError::Device {
        device: device.to_owned(),
        during: during.to_owned(),
        reason: first_lines(&reason),
    };
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(failed),
        Err(panic) => {
            let reason = panic.downcast_ref::<String>().cloned();
            let reason = reason.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Err(failed(reason.unwrap_or_else(|| "it gave no reason".into())))
        }
    }
}

/// A failure's sentence without the backtrace that follows it.
fn first_lines(reason: &str) -> String {
    let lines = reason.lines().map(str::trim).take_while(|line| !line.starts_with("Backtrace"));
    lines.filter(|line| !line.is_empty()).take(4).collect::<Vec<_>>().join(": ").replace("::", ":")
}

#[cfg(feature = "cuda")]
mod cuda {
    use burn::tensor::{Device, DeviceType};

    pub(super) fn count() -> usize {
        Device::enumerate(DeviceType::Cuda).len()
    }

    pub(super) fn name(index: usize) -> String {
        device(index).identity().map_or_else(|| "an NVIDIA GPU".to_owned(), |identity| identity.name)
    }

    pub(super) fn device(index: usize) -> Device {
        Device::cuda(index)
    }
}

#[cfg(not(feature = "cuda"))]
mod cuda {
    use burn::tensor::Device;

    pub(super) fn count() -> usize {
        0
    }

    pub(super) fn name(_: usize) -> String {
        String::new()
    }

    pub(super) fn device(_: usize) -> Device {
        Device::flex()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_is_not_there_is_refused_in_a_sentence() {
        if !gpus().unwrap().is_empty() {
            println!("skipped: this machine has a GPU");
            return;
        }
        let message = open_cuda(0).unwrap_err().to_string();
        let expected = if GPU_SUPPORT { "no NVIDIA GPU or no driver" } else { "this build computes on the CPU only" };
        assert!(message.contains(expected), "{message}");
    }

    #[test]
    fn what_a_device_panics_with_is_an_error_that_names_it() {
        let error =
            guarded::<()>("cuda:1", "training step 7", || panic!("CUDA_ERROR_OUT_OF_MEMORY\nBacktrace:\n  0: x"));
        let message = error.unwrap_err().to_string();
        assert!(message.contains("cuda:1") && message.contains("training step 7"), "{message}");
        assert!(message.contains("CUDA_ERROR_OUT_OF_MEMORY") && !message.contains("Backtrace"), "{message}");
    }
}
