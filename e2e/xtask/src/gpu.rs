//! `cargo xtask test gpu`: the runtime with the feature `cuda`. Without a GPU it has to build, to say that there is none, to refuse a
//! job that insists on one, and to train a job that does not. With one it has to train as the CPU does, and to take over from it and
//! hand back through checkpoints.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::{cache, cargo_command, last_event, run_cargo, workspace};

const JOB: &str = "docs/examples/synthetic.yaml";
/// Enough for an AUC, and for checkpoints on the way.
const SHORT: [&str; 4] = [
    "spec.data.synthetic.rows=200000",
    "spec.data.synthetic.testRows=50000",
    "spec.training.mode=sync",
    "spec.roles.ps.replicas=1",
];
/// What arithmetic may change of an AUC.
const SAME_AUC: f64 = 0.001;
/// What it may change, and the order in which gradients come, where there is no barrier to each step.
const LIKE_AUC: f64 = 0.004;
const NO_GPU: &str = "spec.roles.denseWorker.gpus=0";
const ONE_GPU: &str = "spec.roles.denseWorker.gpus=1";
const HYBRID: [&str; 1] = ["spec.training.mode=hybrid"];
const BF16: [&str; 1] = ["spec.training.precision=bf16"];
const GBA: [&str; 2] = ["spec.training.mode=gba", "spec.roles.denseWorker.replicas=2"];

pub(crate) fn test() -> Result<(), String> {
    let folder = target()?;
    let target = format!("--target-dir={}", folder.display());
    // One selection of packages for building and testing, so that every dependency is built once.
    let cuda =
        ["--release", "--locked", &target, "-p", "rectrain", "-p", "rectrain-dense", "--features", "rectrain/cuda"];
    let with_cuda = |command: &'static str, more: &[&'static str]| [&[command], cuda.as_slice(), more].concat();
    let program = Program { path: folder.join("release/rectrain"), toolkit: toolkit()? };
    // With one environment for both, since crates look at it and would be built anew for the tests.
    program.cargo(&with_cuda("build", &[]), "the runtime cannot be built with the feature `cuda`")?;
    let devices = program.devices()?;
    println!("{devices}");
    // The tower's tests take the GPU, where there is one, for the device that they compare with independent definitions.
    program.cargo(&with_cuda("test", &["--lib"]), "the tower's tests failed: their output is above")?;
    let gpus = devices["gpus"].as_array().map_or(0, Vec::len);
    if gpus == 0 { program.tell_that_there_is_none() } else { program.train_as_the_cpu_does() }
}

/// A folder of its own: with another set of features everything would be built anew each time.
fn target() -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    let target = own.ancestors().nth(2).ok_or("this program is not in a target folder")?;
    Ok(target.with_file_name("target-cuda"))
}

/// The compiler of kernels and their headers: those of an installed CUDA, or those of the registry.
fn toolkit() -> Result<PathBuf, String> {
    let installed = std::env::var_os("CUDA_PATH").map_or_else(|| PathBuf::from("/usr/local/cuda"), PathBuf::from);
    if installed.join("include/cuda_fp16.h").exists() {
        return Ok(installed);
    }
    let folder = cache()?.join("cuda-12.8");
    if !folder.join("lib64").exists() {
        let script = workspace().join("e2e/images/cuda.sh");
        let status = Command::new("sh").arg(&script).arg(&folder).status();
        let status = status.map_err(|error| format!("cannot run {}: {error}", script.display()))?;
        if !status.success() {
            return Err(format!("{} failed: it needs python3 with pip, and PyPI", script.display()));
        }
    }
    Ok(folder)
}

/// The runtime with the feature `cuda`.
struct Program {
    path: PathBuf,
    toolkit: PathBuf,
}

impl Program {
    fn with_toolkit(&self, mut command: Command) -> Command {
        let lib = self.toolkit.join("lib64");
        let path = std::env::var("LD_LIBRARY_PATH")
            .map_or_else(|_| lib.display().to_string(), |path| format!("{}:{path}", lib.display()));
        command.env("CUDA_PATH", &self.toolkit).env("LD_LIBRARY_PATH", path).current_dir(workspace());
        command
    }

    fn rectrain(&self, arguments: &[&str]) -> Result<Output, String> {
        let mut command = self.with_toolkit(Command::new(&self.path));
        command.args(arguments).output().map_err(|error| format!("cannot run {}: {error}", self.path.display()))
    }

    fn cargo(&self, arguments: &[&str], hint: &str) -> Result<(), String> {
        run_cargo(self.with_toolkit(cargo_command()), arguments, hint)
    }

    fn devices(&self) -> Result<Value, String> {
        last_event(&self.rectrain(&["devices", "--json"])?)
    }

    /// Trains the short job; the summary.
    fn train(&self, sets: &[&str]) -> Result<Value, String> {
        last_event(&self.attempt(sets)?)
    }

    fn attempt(&self, sets: &[&str]) -> Result<Output, String> {
        let mut arguments = vec!["run", JOB, "--json"];
        for set in SHORT.iter().chain(sets) {
            arguments.extend(["--set", set]);
        }
        self.rectrain(&arguments)
    }

    fn tell_that_there_is_none(&self) -> Result<(), String> {
        for insisting in ["spec.roles.denseWorker.device=cuda", "spec.roles.denseWorker.gpus=1"] {
            let output = self.attempt(&[insisting])?;
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            let last = message.lines().last().unwrap_or_default();
            if output.status.code() != Some(1)
                || !last.contains("no NVIDIA GPU or no driver")
                || message.contains("panicked")
            {
                return Err(format!("a job that insists on a GPU ended with {:?}: {message}", output.status.code()));
            }
            eprintln!("xtask: {insisting}: {last}");
        }
        let auto = self.train(&["spec.roles.denseWorker.device=auto"])?;
        let cpu = self.train(&["spec.roles.denseWorker.device=cpu"])?;
        if auto["parametersSha256"] != cpu["parametersSha256"] || auto["parametersSha256"].is_null() {
            return Err(format!("`device: auto` did not train on the CPU as `cpu` does: {auto} and {cpu}"));
        }
        println!(
            "{}",
            json!({"gpus": 0, "parametersSha256": auto["parametersSha256"], "testAuc": auto["test"]["auc"]})
        );
        eprintln!("xtask: SKIPPED all that needs a GPU: this machine has none, or no driver for one");
        Ok(())
    }

    fn train_as_the_cpu_does(&self) -> Result<(), String> {
        let on = |gpus: &'static str, mode: &[&'static str]| self.train(&[&[gpus], mode].concat());
        let both = |mode: &[&'static str]| Ok::<_, String>((on(NO_GPU, mode)?, on(ONE_GPU, mode)?));
        let (cpu, gpu) = both(&[])?;
        let again = on(ONE_GPU, &[])?;
        let ((hybrid_cpu, hybrid), (gba_cpu, gba)) = (both(&HYBRID)?, both(&GBA)?);
        let bf16 = on(ONE_GPU, &BF16)?;
        let handed_over = self.through_checkpoints()?;
        let auc = |summary: &Value| summary["test"]["auc"].as_f64().unwrap_or(f64::NAN);
        let report = json!({
            "cpuAuc": auc(&cpu), "gpuAuc": auc(&gpu), "cpuGpuCpuAuc": auc(&handed_over),
            "hybridCpuAuc": auc(&hybrid_cpu), "hybridAuc": auc(&hybrid), "gbaCpuAuc": auc(&gba_cpu), "gbaAuc": auc(&gba), "bf16Auc": auc(&bf16),
            // The compilation of kernels, and the choice among them, included.
            "cpuSamplesPerSecond": cpu["samplesPerSecond"], "gpuSamplesPerSecond": gpu["samplesPerSecond"],
            "bf16SamplesPerSecond": bf16["samplesPerSecond"],
            "syncRepeatsToTheBit": gpu["parametersSha256"] == again["parametersSha256"],
        });
        println!("{report}");
        for (what, on_cpu, other, within) in [
            ("sync on the GPU", &cpu, &gpu, SAME_AUC),
            ("sync on the GPU in bf16", &cpu, &bf16, SAME_AUC),
            ("from CPU to GPU to CPU", &cpu, &handed_over, SAME_AUC),
            ("hybrid on the GPU", &hybrid_cpu, &hybrid, LIKE_AUC),
            ("gba on the GPU", &gba_cpu, &gba, LIKE_AUC),
        ] {
            if (auc(on_cpu) - auc(other)).abs().partial_cmp(&within) != Some(std::cmp::Ordering::Less) {
                return Err(format!("{what} reached an AUC of {}, the CPU {}", auc(other), auc(on_cpu)));
            }
        }
        Ok(())
    }

    /// A third of the rows each on the CPU, on the GPU and on the CPU, each from the checkpoint of the one before.
    fn through_checkpoints(&self) -> Result<Value, String> {
        let folder = std::env::temp_dir().join(format!("rectrain-gpu-{}", std::process::id()));
        let path = format!("spec.checkpoint.path={}", folder.display());
        let steps = [65, 130, 195].map(|steps| format!("spec.training.steps={steps}"));
        let parts = [NO_GPU, ONE_GPU, NO_GPU].iter().zip(&steps);
        let trained = parts.map(|(device, steps)| {
            self.train(&[device, path.as_str(), "spec.checkpoint.resume=latest", steps.as_str()])
        });
        let last = trained.collect::<Result<Vec<_>, _>>();
        remove(&folder)?;
        last?.pop().ok_or_else(|| "nothing was trained".to_owned())
    }
}

/// It is not there where nothing was saved.
fn remove(folder: &Path) -> Result<(), String> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {error}", folder.display()))
        }
        _ => Ok(()),
    }
}
