//! The names of CubeCL's LLVM back end that `cubecl-cuda` uses, without that back end.
//!
//! `cubecl-cuda` has two ways from a kernel to the driver: CUDA C++ through NVRTC, and PTX through
//! LLVM. It always links both. The build script of the LLVM back end fetches a build of LLVM from
//! outside the registries. Rectrain uses CUDA C++ (feature `cuda-cpp` of `cubecl`). This crate
//! replaces the LLVM back end and has only the types that the CUDA C++ code mentions. Compiling a
//! kernel with it always fails.

use std::fmt;

use cubecl_core::ir::{amd::GfxArch, nvidia::SmArch};
use cubecl_core::prelude::KernelDefinition;
use cubecl_runtime::compiler::CompilationError;
use cubecl_runtime::kernel::BufferIOAttr;

/// The target of a compilation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LlvmTarget {
    /// NVIDIA's PTX.
    #[default]
    Nvptx,
}

/// A stand-in for the compiler, which this crate does not have.
#[derive(Clone, Debug, Default)]
pub struct PlironCompiler {
    /// The target.
    pub target: LlvmTarget,
}

impl PlironCompiler {
    /// Compiles nothing.
    ///
    /// # Errors
    /// Always: this build compiles kernels through NVRTC.
    pub fn compile(&mut self, _: KernelDefinition, _: &PlironOptions) -> Result<PlironArtifact, CompilationError> {
        Err(CompilationError::Generic {
            reason: "this build has no LLVM back end: kernels are compiled through NVRTC (feature `cuda-cpp`)".into(),
            backtrace: Default::default(),
        })
    }

    /// The language of the compiler's output.
    pub fn lang_tag(&self) -> &'static str {
        "llvm"
    }
}

/// Settings of a compilation.
#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    /// An AMD architecture.
    pub arch: Option<GfxArch>,
    /// An NVIDIA architecture.
    pub sm_arch: Option<SmArch>,
    /// The version of PTX.
    pub ptx_version: Option<nvptx::ptx_version::PtxVersion>,
    /// How scalars are passed.
    pub grid_constants: bool,
}

/// A kernel as PTX.
#[derive(Clone, Debug)]
pub struct NvptxModule {
    /// The PTX, ending with a NUL.
    pub ptx: Vec<std::ffi::c_char>,
    /// The kernel's symbol.
    pub entrypoint: String,
    /// The intermediate representation, for logs.
    pub ir: String,
    /// Bytes of shared memory.
    pub shared_memory_size: usize,
    /// How buffers are used.
    pub io: Vec<BufferIOAttr>,
}

/// The output of a compilation.
#[derive(Clone, Debug)]
pub enum PlironArtifact {
    /// Code for the CPU.
    Jit,
    /// Code for an NVIDIA GPU.
    NvptxCode(NvptxModule),
}

/// PTX.
pub mod nvptx {
    /// Its versions.
    pub mod ptx_version {
        use super::super::fmt;

        /// A version of PTX. This build has no values of it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct PtxVersion(std::convert::Infallible);

        impl PtxVersion {
            /// The newest version that a driver takes.
            pub fn for_driver(_driver: i32) -> Option<Self> {
                None
            }
        }

        impl fmt::Display for PtxVersion {
            fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 {}
            }
        }
    }
}

/// Names that all targets share.
pub mod shared {
    /// The features of a target.
    pub mod lowered_features {
        use cubecl_core::ir::DeviceProperties;

        /// A GPU.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            /// NVIDIA's.
            Nvptx,
        }

        /// Removes the features that the back end does not have. The CUDA runtime calls it only
        /// where it compiles through LLVM.
        pub fn restrict_features(_: &mut DeviceProperties, _: GpuTarget) {}
    }
}
