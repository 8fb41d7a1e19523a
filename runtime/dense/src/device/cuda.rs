//! NVIDIA's driver and compiler of kernels.

use std::sync::Arc;

use burn::tensor::{Device, DeviceType};
use cudarc::driver::{CudaContext, DriverError, result, sys};
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};

/// The oldest driver version that has everything CubeCL asks for: CUDA 12.8.
const DRIVER: i32 = 12_080;
/// A kernel with the includes of CubeCL's kernels.
const KERNEL: &str = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <mma.h>\n
    extern \"C\" __global__ void probe(float *x) { x[0] += __half2float(__float2half(x[1])); }";

/// A GPU on which this process has a context.
pub(super) struct Opened {
    index: usize,
    context: Arc<CudaContext>,
}

impl Opened {
    pub(super) fn device(&self) -> Device {
        Device::cuda(self.index)
    }

    pub(super) fn capability(&self) -> Result<(i32, i32), String> {
        self.context.compute_capability().map_err(|error| described(&error))
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
    ask().map_err(|error| described(&error))
}

pub(super) fn open(index: usize) -> Result<Opened, String> {
    let found = driver_version().map_err(|error| described(&error))?;
    if found < DRIVER {
        let [found, needed] = [found, DRIVER].map(|version| format!("{}.{}", version / 1000, version % 1000 / 10));
        return Err(format!(
            "its driver supports CUDA {found}, expected {needed} or newer: install driver 570 or newer"
        ));
    }
    let context = CudaContext::new(index).map_err(|error| described(&error))?;
    Ok(Opened { index, context })
}

fn driver_version() -> Result<i32, DriverError> {
    let mut version = 0;
    #[allow(unsafe_code, reason = "cudarc has no safe form of this call; the driver writes one number")]
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    asked.result().map(|()| version)
}

/// Compiles a kernel as CubeCL will. It needs no GPU.
pub(super) fn try_compiler() -> Result<(), String> {
    let toolkit = cubecl::cuda::install::cuda_path();
    let toolkit = toolkit.ok_or("no CUDA toolkit was found: set CUDA_PATH to a folder with NVRTC and its headers")?;
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

/// The driver's name and text for an error.
fn described(error: &DriverError) -> String {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
    match (name, text) {
        (Ok(name), Ok(text)) => format!("{name}: {text}"),
        _ => error.to_string(),
    }
}
