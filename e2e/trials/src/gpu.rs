//! `cargo xtask test gpu`: builds the runtime with the feature `cuda` and tries it.
//!
//! Without a GPU it has to say so, refuse a job that insists on a GPU, and train a job that does
//! not. With a GPU it has to train as the CPU does, and to continue the CPU's checkpoints and the
//! other way round.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rectrain_harness::cargo::{cargo_command, run as run_cargo};
use rectrain_harness::command::{command, visible};
use rectrain_harness::events::summary;
use rectrain_harness::files::{remove_folder, temporary_folder};
use rectrain_harness::workspace::{cache, target_folder, workspace};
use rectrain_harness::{HarnessError, say, skips};
use serde_json::{Value, json};

use crate::TrialError;
use crate::error::unmet;

const JOB: &str = "docs/examples/synthetic.yaml";
/// Makes the job short, but long enough for an AUC and for checkpoints on the way.
const SHORT: [&str; 4] = [
    "spec.data.synthetic.rows=200000",
    "spec.data.synthetic.testRows=50000",
    "spec.training.mode=sync",
    "spec.roles.ps.replicas=1",
];
/// The largest difference of the AUC that another arithmetic may cause.
const SAME_AUC: f64 = 0.001;
/// The same where steps have no barrier, so that the order of gradients varies too.
const LIKE_AUC: f64 = 0.004;
const NO_GPU: &str = "spec.roles.denseWorker.gpus=0";
const ONE_GPU: &str = "spec.roles.denseWorker.gpus=1";
const HYBRID: [&str; 1] = ["spec.training.mode=hybrid"];
const BF16: [&str; 1] = ["spec.training.precision=bf16"];
const GBA: [&str; 2] = ["spec.training.mode=gba", "spec.roles.denseWorker.replicas=2"];

/// Builds the runtime with the feature `cuda`, and tries it on the present hardware.
///
/// # Errors
/// The build or a run fails; an AUC differs too much.
pub fn test() -> Result<(), TrialError> {
    // Another set of features would rebuild everything each time, so it gets a target folder of its
    // own.
    let folder = target_folder()?.with_file_name("target-cuda");
    let target = format!("--target-dir={}", folder.display());
    // Building and testing share one selection of packages, so every dependency is built once.
    let cuda =
        ["--release", "--locked", &target, "-p", "rectrain", "-p", "rectrain-dense", "--features", "rectrain/cuda"];
    let with_cuda = |command: &'static str, more: &[&'static str]| [&[command], cuda.as_slice(), more].concat();
    let program = Program { path: folder.join("release/rectrain"), toolkit: toolkit()? };
    program.cargo(&with_cuda("build", &[]), "the runtime cannot be built with the feature `cuda`")?;
    let devices = program.devices()?;
    println!("{devices}");
    // The tower's tests compare the device in use, a GPU if there is one, with independent
    // definitions.
    program.cargo(&with_cuda("test", &["--lib"]), "the tower's tests failed: their output is above")?;
    let gpus = devices["gpus"].as_array().map_or(0, Vec::len);
    if gpus == 0 { program.does_without_a_gpu() } else { program.trains_as_the_cpu_does() }
}

/// The compiler of GPU kernels and its headers: an installed CUDA, or NVIDIA's packages from PyPI.
fn toolkit() -> Result<PathBuf, HarnessError> {
    let installed = std::env::var_os("CUDA_PATH").map_or_else(|| PathBuf::from("/usr/local/cuda"), PathBuf::from);
    if installed.join("include/cuda_fp16.h").exists() {
        return Ok(installed);
    }
    let folder = cache()?.join("cuda-12.8");
    if !folder.join("lib64").exists() {
        say("downloading CUDA's runtime compiler, which needs python3 with pip, and PyPI");
        visible(command("sh", [workspace().join("e2e/images/cuda.sh")]).arg(&folder))?;
    }
    Ok(folder)
}

/// The runtime with the feature `cuda`.
struct Program {
    path: PathBuf,
    toolkit: PathBuf,
}

impl Program {
    /// Builds and runs share this environment. Build scripts read it, and would run again after a
    /// change.
    fn with_toolkit(&self, mut command: Command) -> Command {
        let lib = self.toolkit.join("lib64");
        let path = std::env::var("LD_LIBRARY_PATH")
            .map_or_else(|_| lib.display().to_string(), |path| format!("{}:{path}", lib.display()));
        command.env("CUDA_PATH", &self.toolkit).env("LD_LIBRARY_PATH", path).current_dir(workspace());
        command
    }

    fn rectrain(&self, arguments: &[&str]) -> Result<Output, HarnessError> {
        let mut command = self.with_toolkit(Command::new(&self.path));
        command.args(arguments).output().map_err(HarnessError::io("run", self.path.display()))
    }

    fn cargo(&self, arguments: &[&str], hint: &str) -> Result<(), HarnessError> {
        run_cargo(self.with_toolkit(cargo_command()), arguments, hint)
    }

    fn devices(&self) -> Result<Value, HarnessError> {
        summary(&self.rectrain(&["devices", "--json"])?)
    }

    /// Trains the short job with these overrides; returns the summary.
    fn train(&self, sets: &[&str]) -> Result<Value, HarnessError> {
        summary(&self.attempt(sets)?)
    }

    /// Runs the short job with these overrides, whether or not it succeeds.
    fn attempt(&self, sets: &[&str]) -> Result<Output, HarnessError> {
        let mut arguments = vec!["run", JOB, "--json", "--no-history"];
        for set in SHORT.iter().chain(sets) {
            arguments.extend(["--set", set]);
        }
        self.rectrain(&arguments)
    }

    fn does_without_a_gpu(&self) -> Result<(), TrialError> {
        for insisting in ["spec.roles.denseWorker.device=cuda", "spec.roles.denseWorker.gpus=1"] {
            let output = self.attempt(&[insisting])?;
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            let last = message.lines().last().unwrap_or_default();
            if output.status.code() != Some(1)
                || !last.contains("no NVIDIA GPU or no driver")
                || message.contains("panicked")
            {
                let found = format!("exit code {:?}: {message}", output.status.code());
                return Err(unmet(format!("a job with {insisting} to say that there is no GPU"), found));
            }
            say(format!("{insisting}: {last}"));
        }
        let auto = self.train(&["spec.roles.denseWorker.device=auto"])?;
        let cpu = self.train(&["spec.roles.denseWorker.device=cpu"])?;
        if auto["parametersSha256"] != cpu["parametersSha256"] || auto["parametersSha256"].is_null() {
            return Err(unmet("`device: auto` to train as `device: cpu` does", format!("{auto} and {cpu}")));
        }
        println!(
            "{}",
            json!({"gpus": 0, "parametersSha256": auto["parametersSha256"], "testAuc": auto["test"]["auc"]})
        );
        Ok(skips::skip("training on a GPU", "this machine has no NVIDIA GPU, or no driver for it")?)
    }

    fn trains_as_the_cpu_does(&self) -> Result<(), TrialError> {
        let on = |gpus: &'static str, mode: &[&'static str]| self.train(&[&[gpus], mode].concat());
        let both = |mode: &[&'static str]| Ok::<_, HarnessError>((on(NO_GPU, mode)?, on(ONE_GPU, mode)?));
        let (cpu, gpu) = both(&[])?;
        let again = on(ONE_GPU, &[])?;
        let ((hybrid_cpu, hybrid), (gba_cpu, gba)) = (both(&HYBRID)?, both(&GBA)?);
        let bf16 = on(ONE_GPU, &BF16)?;
        let handed_over = self.through_checkpoints()?;
        let auc = |summary: &Value| summary["test"]["auc"].as_f64().unwrap_or(f64::NAN);
        let report = json!({
            "cpuAuc": auc(&cpu), "gpuAuc": auc(&gpu), "cpuGpuCpuAuc": auc(&handed_over),
            "hybridCpuAuc": auc(&hybrid_cpu), "hybridAuc": auc(&hybrid), "gbaCpuAuc": auc(&gba_cpu), "gbaAuc": auc(&gba), "bf16Auc": auc(&bf16),
            // These include the compilation of kernels and the choice among them.
            "cpuSamplesPerSecond": cpu["samplesPerSecond"], "gpuSamplesPerSecond": gpu["samplesPerSecond"],
            "bf16SamplesPerSecond": bf16["samplesPerSecond"],
            "syncRepeatsToTheBit": gpu["parametersSha256"] == again["parametersSha256"],
        });
        println!("{report}");
        for (name, on_cpu, other, within) in [
            ("sync on the GPU", &cpu, &gpu, SAME_AUC),
            ("sync on the GPU in bf16", &cpu, &bf16, SAME_AUC),
            ("from CPU to GPU to CPU", &cpu, &handed_over, SAME_AUC),
            ("hybrid on the GPU", &hybrid_cpu, &hybrid, LIKE_AUC),
            ("gba on the GPU", &gba_cpu, &gba, LIKE_AUC),
        ] {
            if (auc(on_cpu) - auc(other)).abs().partial_cmp(&within) != Some(std::cmp::Ordering::Less) {
                let expected = format!("{name} within {within} of the CPU's AUC {}", auc(on_cpu));
                return Err(unmet(expected, format!("an AUC of {}", auc(other))));
            }
        }
        Ok(())
    }

    /// Trains a third of the rows each on the CPU, on the GPU and on the CPU again. Each part
    /// continues from the previous checkpoint. Returns the last summary.
    fn through_checkpoints(&self) -> Result<Value, HarnessError> {
        let folder = temporary_folder("gpu");
        let trained = self.parts(&folder);
        remove_folder(&folder)?;
        trained
    }

    fn parts(&self, checkpoints: &Path) -> Result<Value, HarnessError> {
        let path = format!("spec.checkpoint.path={}", checkpoints.display());
        let mut last = Value::Null;
        for (device, steps) in [(NO_GPU, 65), (ONE_GPU, 130), (NO_GPU, 195)] {
            let steps = format!("spec.training.steps={steps}");
            last = self.train(&[device, path.as_str(), "spec.checkpoint.resume=latest", steps.as_str()])?;
        }
        Ok(last)
    }
}
