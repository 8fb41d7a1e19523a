//! What a tower computes on, and which GPUs there are. Whether this build can use any is decided by the feature `cuda`; the program
//! is one and the same on machines with and without a driver, which is looked for when it is asked for.

use burn::tensor::Device;

use crate::DenseError;
use crate::Precision;

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

/// How many GPUs this process may use, none of which is opened for that; 0 where this build has no support for them or the machine has no driver.
///
/// # Errors
/// [`DenseError::Device`] where there is a driver that does not answer as it should.
pub fn gpu_count() -> Result<usize, DenseError> {
    guarded("the GPU driver", "looking for GPUs", || Ok(cuda::count()))
}

/// The GPUs that this process may use, none of which is opened for that.
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

/// Opens a GPU and has it compute something small, so that what keeps it from working (a driver that is too old, a compiler that
/// is missing, memory that others hold) is told before training begins. CubeCL tells of the first two in its logs only, and computes nonsense.
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
            found => format!("GPU {index} was asked for, but {found} can be seen, counted from 0"),
        };
        return Err(DenseError::NoGpu { reason });
    }
    let name = ComputeDevice::Cuda(index).to_string();
    guarded(&name, "trying the compiler of its kernels", cuda::try_compiler)?;
    let opened = guarded(&name, "opening it", || cuda::open(index))?;
    let capability = guarded(&name, "asking what it can compute", || opened.capability())?;
    check_precision(&name, precision, capability)?;
    guarded(&name, "a first computation", || {
        let device = opened.device();
        let ones = burn::tensor::Tensor::<2>::ones([32, 32], &device);
        let product = ones.clone().matmul(ones).try_into_data().map_err(|error| error.to_string())?;
        // What failed on the device may show only here.
        let values = product.try_into_vec::<f32>().map_err(|error| error.to_string())?;
        let right = values.iter().all(|&value| value == 32.0);
        if right { Ok(device) } else { Err("a product of two matrices of ones came out wrong".into()) }
    })
}

/// Whether products of this precision are to be had on a GPU of this compute capability.
fn check_precision(device: &str, precision: Precision, capability: (i32, i32)) -> Result<(), DenseError> {
    if precision == Precision::Bf16 && capability < (8, 0) {
        return Err(DenseError::NoBf16 { device: device.to_owned(), capability });
    }
    Ok(())
}

const NO_REASON: &str = "it gave no reason";

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
        reason: Some(first_lines(&reason)).filter(|root| !root.is_empty()).unwrap_or_else(|| NO_REASON.to_owned()),
    };
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(failed),
        Err(panic) => {
            let reason = panic.downcast_ref::<String>().cloned();
            let reason = reason.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Err(failed(reason.unwrap_or_default()))
        }
    }
}

/// What follows a failure's sentence: where it was, and the kernel's source.
const BESIDES: [&str; 4] = ["Backtrace", "No backtrace", "Asked at:", "[Source]"];

/// A failure's root: the last of the causes that say something, in at most four lines.
fn first_lines(reason: &str) -> String {
    let lines: Vec<&str> = reason.lines().map(str::trim).collect();
    let said = |cause: &[&str]| -> Vec<String> {
        let lines = cause.iter().take_while(|line| !BESIDES.iter().any(|besides| line.starts_with(besides)));
        lines.filter(|line| !line.is_empty()).take(4).map(|line| (*line).to_owned()).collect()
    };
    let mut causes = lines.split(|line| line.starts_with("Caused by:")).map(said);
    let root = causes.rfind(|cause| !cause.is_empty()).unwrap_or_default();
    root.join(": ").replace("::", ":")
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::sync::Arc;

    use burn::tensor::{Device, DeviceType};
    use cudarc::driver::{CudaContext, DriverError, result, sys};
    use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};

    /// The oldest that knows what CubeCL asks for: CUDA 12.8.
    const DRIVER: i32 = 12_080;
    /// Includes what kernels include.
    const KERNEL: &str = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <mma.h>\n
        extern \"C\" __global__ void probe(float *x) { x[0] += __half2float(__float2half(x[1])); }";

    /// A GPU of which this process has a context.
    pub(super) struct Opened {
        index: usize,
        context: Arc<CudaContext>,
    }

    impl Opened {
        pub(super) fn device(&self) -> Device {
            Device::cuda(self.index)
        }

        pub(super) fn capability(&self) -> Result<(i32, i32), String> {
            self.context.compute_capability().map_err(|error| told(&error))
        }
    }

    pub(super) fn count() -> usize {
        Device::enumerate(DeviceType::Cuda).len()
    }

    pub(super) fn name(index: usize) -> Result<String, String> {
        let ask = || {
            result::init()?;
            result::device::get_name(result::device::get(index as i32)?)
        };
        ask().map_err(|error| told(&error))
    }

    pub(super) fn open(index: usize) -> Result<Opened, String> {
        let knows = driver_version().map_err(|error| told(&error))?;
        if knows < DRIVER {
            let [found, needed] = [knows, DRIVER].map(|version| format!("{}.{}", version / 1000, version % 1000 / 10));
            return Err(format!("its driver knows CUDA {found}, and {needed} is needed: install driver 570 or newer"));
        }
        let context = CudaContext::new(index).map_err(|error| told(&error))?;
        Ok(Opened { index, context })
    }

    fn driver_version() -> Result<i32, DriverError> {
        let mut version = 0;
        #[allow(unsafe_code, reason = "cudarc has no other way to ask; the driver writes one number")]
        let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) };
        asked.result().map(|()| version)
    }

    /// Compiles a kernel as CubeCL will. It needs no GPU.
    pub(super) fn try_compiler() -> Result<(), String> {
        let toolkit = cubecl::cuda::install::cuda_path();
        let toolkit =
            toolkit.ok_or("no CUDA toolkit was found: set CUDA_PATH to a folder with NVRTC and its headers")?;
        let include = toolkit.join("include");
        let paths = [include.join("cccl"), include];
        let options = CompileOptions {
            include_paths: paths.iter().map(|path| path.display().to_string()).collect(),
            arch: Some("compute_80"),
            ..CompileOptions::default()
        };
        let compiled = compile_ptx_with_opts(KERNEL, options).map(drop);
        compiled.map_err(|error| match error {
            CompileError::CompileError { log, .. } => {
                format!("NVRTC with the headers of {} says: {}", toolkit.display(), log.to_string_lossy())
            }
            other => other.to_string(),
        })
    }

    /// As the driver's documentation names it.
    fn told(error: &DriverError) -> String {
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
        match (name, text) {
            (Ok(name), Ok(text)) => format!("{name}: {text}"),
            _ => error.to_string(),
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod cuda {
    use burn::tensor::Device;

    pub(super) struct Opened;

    impl Opened {
        #[allow(clippy::unused_self, reason = "as with the feature")]
        pub(super) fn device(&self) -> Device {
            Device::flex()
        }

        #[allow(clippy::unused_self, reason = "as with the feature")]
        pub(super) fn capability(&self) -> Result<(i32, i32), String> {
            Err(String::new())
        }
    }

    pub(super) fn count() -> usize {
        0
    }

    pub(super) fn name(_: usize) -> Result<String, String> {
        Err(String::new())
    }

    pub(super) fn open(_: usize) -> Result<Opened, String> {
        Err(String::new())
    }

    pub(super) fn try_compiler() -> Result<(), String> {
        Err(String::new())
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
        let message = open_cuda(0, Precision::Fp32).unwrap_err().to_string();
        let expected = if GPU_SUPPORT { "no NVIDIA GPU or no driver" } else { "this build computes on the CPU only" };
        assert!(message.contains(expected), "{message}");
    }

    #[test]
    fn bf16_is_refused_in_a_sentence_on_a_gpu_that_has_no_products_of_it() {
        let message = check_precision("cuda:1", Precision::Bf16, (7, 5)).unwrap_err().to_string();
        assert!(message.starts_with("cannot compute in bf16 on cuda:1: its compute capability is 7.5"), "{message}");
        assert!(check_precision("cuda:1", Precision::Bf16, (8, 0)).is_ok());
        assert!(check_precision("cuda:1", Precision::Fp32, (7, 5)).is_ok());
    }

    /// `cargo xtask test gpu` brings both, also where there is no GPU.
    #[cfg(feature = "cuda")]
    #[test]
    fn the_compiler_of_kernels_finds_its_headers() {
        if std::env::var_os("CUDA_PATH").is_none() {
            println!("skipped: CUDA_PATH is not set");
            return;
        }
        guarded("cuda:0", "trying the compiler of its kernels", cuda::try_compiler).unwrap();
    }

    /// As CubeCL tells it.
    #[test]
    fn the_root_of_a_failure_is_told_and_what_follows_it_is_not() {
        let memory = "An error happened during execution\nCaused by:\n  Several failures at once\nCaused by:\n  The bytes were never written \
            (failure #3)\n  Asked at: x.rs:1\n  skipped\n\nCaused by:\n  An IO error happened\nCaused by:\n  out of device memory allocating \
            4096 bytes\n  No backtrace available";
        assert_eq!(first_lines(memory), "out of device memory allocating 4096 bytes");
        let poisoned = "The device is poisoned\nCaused by:\n  The device is poisoned\nCaused by:\n";
        assert_eq!(first_lines(poisoned), "The device is poisoned");
        let kernel = "Caused by:\n  error: identifier \"x\" is undefined\n  1 error\n[Source]\n__global__ void k() {}";
        assert_eq!(first_lines(kernel), "error: identifier \"x\" is undefined: 1 error");
        assert_eq!(first_lines("Backtrace:\n 0: x"), "");
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
