//! `rectrain devices`: shows the devices that dense workers on this machine can use.

use std::num::NonZeroUsize;

use rectrain_dense::{GPU_SUPPORT, gpus};
use serde_json::json;

use crate::failure::Failure;
use crate::output;

pub(crate) fn show(as_json: bool) -> Result<(), Failure> {
    let gpus = gpus().map_err(|error| Failure::Failed(error.to_string()))?;
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    if as_json {
        let gpus: Vec<_> = gpus.iter().map(|gpu| json!({"index": gpu.index, "name": gpu.name})).collect();
        output::line(json!({"cpuThreads": threads, "gpuSupport": GPU_SUPPORT, "gpus": gpus}))?;
        return Ok(());
    }
    output::line(format_args!("cpu     {threads} threads"))?;
    for gpu in &gpus {
        output::line(format_args!("cuda:{}  {}", gpu.index, gpu.name))?;
    }
    match (GPU_SUPPORT, gpus.is_empty()) {
        (false, _) => output::line(
            "This build computes on the CPU only; the feature `cuda` adds NVIDIA GPUs (docs/guide/gpu.md).",
        )?,
        (true, true) => output::line("This build can use NVIDIA GPUs, but found no GPU or no driver for one.")?,
        (true, false) => {}
    }
    Ok(())
}
