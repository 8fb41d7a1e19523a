//! The interface of `cuda.rs` in a build without GPUs. [`super::open_cuda`] refuses before it calls
//! any of these but [`count`].

use burn::tensor::Device;

pub(super) struct Opened;

impl Opened {
    #[allow(clippy::unused_self, reason = "the signature with the feature `cuda`")]
    pub(super) fn device(&self) -> Device {
        Device::flex()
    }

    #[allow(clippy::unused_self, reason = "the signature with the feature `cuda`")]
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
