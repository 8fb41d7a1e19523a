//! The devices that a tower can compute on, and the GPUs of this machine. The feature `cuda`
//! decides whether this build can use GPUs. A program with that feature also runs on machines
//! without a driver: it looks for the driver only when GPUs are requested.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod cuda;
mod failure;

use burn::tensor::{Device, Tensor};

pub(crate) use self::failure::guarded;
use crate::DenseError;
use crate::Precision;

/// The device that a tower computes on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ComputeDevice {
    /// The CPU.
    #[default]
    Cpu,
    /// The NVIDIA GPU with this index, as CUDA counts those that the process may see
    /// (`CUDA_VISIBLE_DEVICES`).
    Cuda(usize),
}

/// A GPU that this build can compute on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its index.
    pub index: usize,
    /// The driver's name for it.
    pub name: String,
}

/// Memory of a GPU that a process has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes taken from the driver: bytes in use, and bytes kept for the next step.
    pub reserved_bytes: u64,
}

/// Whether this build can compute on GPUs.
pub const GPU_SUPPORT: bool = cfg!(feature = "cuda");

impl std::fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// Number of GPUs that this process may use; 0 where this build cannot use any or the machine has
/// no driver. It opens no GPU.
///
/// # Errors
/// [`DenseError::Device`] if there is a driver that fails to answer.
pub fn gpu_count() -> Result<usize, DenseError> {
    guarded("the GPU driver", "looking for GPUs", || Ok(cuda::count()))
}

/// The GPUs that this process may use. It opens none.
///
/// # Errors
/// As [`gpu_count`].
pub fn gpus() -> Result<Vec<Gpu>, DenseError> {
    let named = |index| {
        let device = ComputeDevice::Cuda(index).to_string();
        guarded(&device, "asking for its name", || cuda::name(index)).map(|name| Gpu { index, name })
    };
    (0..gpu_count()?).map(named).collect()
}

/// Opens a GPU and runs a small computation on it. This reveals a driver that is too old, a missing
/// compiler, and memory that other processes hold, before training begins. CubeCL only logs the
/// first two, and then computes wrong results.
///
/// # Errors
/// [`DenseError::NoGpu`], [`DenseError::NoBf16`] and [`DenseError::Device`].
pub(crate) fn open_cuda(index: usize, precision: Precision) -> Result<Device, DenseError> {
    if !GPU_SUPPORT {
        return Err(DenseError::NoGpu { reason: "this build computes on the CPU only".into() });
    }
    let found = gpu_count()?;
    if index >= found {
        let reason = match found {
            0 => "no NVIDIA GPU or no driver for one was found".to_owned(),
            found => format!("the job asks for GPU {index}, but the process sees {found} GPUs, counted from 0"),
        };
        return Err(DenseError::NoGpu { reason });
    }
    let name = ComputeDevice::Cuda(index).to_string();
    guarded(&name, "trying the compiler of its kernels", cuda::try_compiler)?;
    let opened = guarded(&name, "opening it", || cuda::open(index))?;
    let capability = guarded(&name, "asking for its compute capability", || opened.capability())?;
    check_precision(&name, precision, capability)?;
    guarded(&name, "a first computation", || first_computation(opened.device()))
}

/// Returns the device if it computes a product of two matrices of ones correctly.
fn first_computation(device: Device) -> Result<Device, String> {
    let ones = Tensor::<2>::ones([32, 32], &device);
    let product = ones.clone().matmul(ones).try_into_data().map_err(|error| error.to_string())?;
    // A failure on the device may show only here.
    let values = product.try_into_vec::<f32>().map_err(|error| error.to_string())?;
    let right = values.iter().all(|&value| value == 32.0);
    if right { Ok(device) } else { Err("a product of two matrices of ones came out wrong".into()) }
}

/// Refuses bf16 on a GPU that cannot multiply bf16 matrices.
fn check_precision(device: &str, precision: Precision, capability: (i32, i32)) -> Result<(), DenseError> {
    if precision == Precision::Bf16 && capability < (8, 0) {
        return Err(DenseError::NoBf16 { device: device.to_owned(), capability });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_gpu_is_refused_in_a_sentence() {
        if !gpus().unwrap().is_empty() {
            println!("skipped: this machine has a GPU");
            return;
        }
        let message = open_cuda(0, Precision::Fp32).unwrap_err().to_string();
        let expected = if GPU_SUPPORT { "no NVIDIA GPU or no driver" } else { "this build computes on the CPU only" };
        assert!(message.contains(expected), "{message}");
    }

    #[test]
    fn bf16_is_refused_on_a_gpu_without_its_products() {
        let message = check_precision("cuda:1", Precision::Bf16, (7, 5)).unwrap_err().to_string();
        assert!(message.starts_with("cannot compute in bf16 on cuda:1: its compute capability is 7.5"), "{message}");
        assert!(check_precision("cuda:1", Precision::Bf16, (8, 0)).is_ok());
        assert!(check_precision("cuda:1", Precision::Fp32, (7, 5)).is_ok());
    }

    /// `cargo xtask test gpu` provides the compiler and its headers, also on a machine without a
    /// GPU.
    #[cfg(feature = "cuda")]
    #[test]
    fn the_compiler_of_kernels_finds_its_headers() {
        if std::env::var_os("CUDA_PATH").is_none() {
            println!("skipped: CUDA_PATH is not set");
            return;
        }
        guarded("cuda:0", "trying the compiler of its kernels", cuda::try_compiler).unwrap();
    }
}
