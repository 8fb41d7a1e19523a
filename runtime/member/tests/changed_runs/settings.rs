//! The manifest of an attempt.

use std::path::Path;

use rectrain_crds::{Override, SetKind};
use rectrain_protocol::plan::JobPlan;
use rectrain_random::SplitMix64;

use crate::files::{Files, Format};
use crate::oracle::Saved;

/// Rows of a global batch.
pub const BATCH_ROWS: u64 = 4;
/// Each time a row is trained, its weight moves by this much: Adam without memory divides the
/// gradient by its size. The label of a row never changes, so its weight always moves in the same
/// direction.
pub const WEIGHT_STEP: f32 = 1.0 / 1024.0;
/// The feature whose ids are the rows.
pub const ROW_FEATURE: &str = "row";

/// Steps of an attempt that crashes, unless it crashes earlier. In many more steps, predictions
/// would become exact, and rows would no longer move.
const UNTIL_CRASH: u64 = 200;

const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: changed}
spec:
  model: {kind: lr}
  features:
    sparse: [{name: row}, {name: tags, multiValue: {separator: '|'}}]
    dense: [{name: age}]
  data: {train: {paths: [PATH]}}
  training:
    globalBatchSize: 4
    optimizer:
      sparse: {kind: adam, beta1: 0, beta2: 0, epsilon: 1.0e-12, learningRate: 0.0009765625}
      dense: {learningRate: 0.00001}
";

/// Changes that the guide forbids between two runs.
const FORBIDDEN: &[&str] = &[
    "spec.model.kind=fm",
    "spec.features.label.name=other",
    "spec.features.label.positiveFrom=0.5",
    "spec.features.sparse[0].name=other",
    "spec.features.sparse[0].table=tags",
    "spec.features.sparse[0].missing=skip",
    "spec.features.sparse[1].multiValue.separator=;",
    "spec.features.sparse[1].pooling=sum",
    "spec.features.dense[0].transform=log1p",
    "spec.features.dense[0].missing=-1",
    "spec.features.group=row",
    "spec.training.globalBatchSize=8",
    "spec.training.seed=5",
    "spec.training.embeddingValueType=bf16",
    "spec.training.optimizer.dense.kind=sgd",
    "spec.training.optimizer.dense.beta1=0.5",
    "spec.training.optimizer.sparse.beta2=0.5",
    "spec.training.optimizer.sparse.epsilon=0.001",
    "spec.data.shuffle.windowRows=12",
];

/// The same for files of one format only. Fields of TSV are not quoted unless the manifest says so.
fn forbidden_for(format: Format) -> &'static [&'static str] {
    match format {
        Format::Csv | Format::Gzip | Format::Zstandard => &["spec.data.csv.quoting=false", "spec.data.csv.delimiter=;"],
        Format::Tsv => &["spec.data.csv.quoting=true", "spec.data.csv.delimiter=;"],
        Format::Parquet => &[],
    }
}

/// Changes that the guide allows between two runs.
const ALLOWED: &[&str] = &[
    "spec.roles.ps.replicas=2",
    "spec.roles.loader.replicas=2",
    "spec.roles.embeddingWorker.replicas=2",
    "spec.roles.denseWorker.replicas=2",
    "spec.training.mode=hybrid",
    "spec.training.mode=async",
    "spec.training.optimizer.dense.learningRate=0.00002",
    "spec.training.localBatchSize=2",
    "spec.checkpoint.keep=1",
    "spec.checkpoint.fullEvery=1",
    "spec.checkpoint.fullEvery=2",
];

/// The length of training.
#[derive(Clone, Copy, Debug)]
pub enum Length {
    Steps(u64),
    Epochs(u64),
}

/// The end of an attempt that does not end by itself.
#[derive(Clone, Copy, Debug)]
pub enum Crash {
    AfterCheckpoints(u64),
    AfterMilliseconds(u64),
}

/// The settings of an attempt.
#[derive(Clone, Debug)]
pub struct Settings {
    pub run: u64,
    pub resumes_latest: bool,
    pub skips_bad_rows: bool,
    pub length: Length,
    pub forbidden: Option<&'static str>,
    pub crash: Option<Crash>,
    window: u64,
    every_steps: u64,
    allowed: Vec<&'static str>,
}

impl Settings {
    /// An attempt that trains until the epoch that has begun ends, and at least two epochs.
    pub fn of_the_last(run: u64, window: u64, saved: Option<&Saved>) -> Self {
        let epochs = saved.map_or(0, Saved::epochs).max(2);
        Self {
            run,
            resumes_latest: true,
            skips_bad_rows: saved.is_some_and(Saved::skips_bad_rows),
            length: Length::Epochs(epochs),
            forbidden: None,
            crash: None,
            window,
            every_steps: 50,
            allowed: Vec::new(),
        }
    }

    /// A random attempt. `run` is the number of a run that has not saved a checkpoint.
    pub fn draw(random: &mut SplitMix64, run: u64, window: u64, format: Format, saved: Option<&Saved>) -> Self {
        let mut settings = Self::of_the_last(run, window, saved);
        settings.every_steps = 1 + random.remainder(6);
        settings.length = Length::Steps(saved.map_or(0, Saved::steps) + 1 + random.remainder(12));
        settings.skips_bad_rows |= random.remainder(8) == 0;
        for _ in 0..random.remainder(4) {
            settings.allowed.push(ALLOWED[random.remainder(ALLOWED.len() as u64) as usize]);
        }
        settings.draw_crash(random, saved);
        if let Some(saved) = saved {
            settings.draw_start(random, saved);
            settings.draw_forbidden(random, format);
            settings.draw_end(random, saved);
        }
        settings
    }

    fn draw_crash(&mut self, random: &mut SplitMix64, saved: Option<&Saved>) {
        self.crash = match random.remainder(6) {
            0 | 1 => Some(Crash::AfterCheckpoints(1 + random.remainder(3))),
            2 => Some(Crash::AfterMilliseconds(random.remainder(40))),
            _ => None,
        };
        if self.crash.is_some() {
            self.length = Length::Steps(saved.map_or(0, Saved::steps) + UNTIL_CRASH);
        }
    }

    /// A restart of the same run after a crash, another run, or one that may not have the path.
    fn draw_start(&mut self, random: &mut SplitMix64, saved: &Saved) {
        let only = saved.runs.first().copied().filter(|_| saved.runs.len() == 1);
        match (only, random.remainder(16)) {
            (_, 0) => self.resumes_latest = false,
            (Some(run), 1..=5) => {
                self.run = run;
                self.resumes_latest = false;
            }
            _ => {}
        }
    }

    /// Rarely a number of epochs, or no more steps than are trained.
    fn draw_end(&mut self, random: &mut SplitMix64, saved: &Saved) {
        let length = match random.remainder(8) {
            0 => Length::Epochs(1 + random.remainder(saved.epochs() + 1)),
            1 => Length::Steps(1 + random.remainder(saved.steps())),
            _ => return,
        };
        self.length = length;
        self.crash = None;
        if saved.is_all_trained(length) {
            // It may save a checkpoint, or keep the one that it resumed from.
            self.skips_bad_rows = saved.skips_bad_rows();
        }
    }

    fn draw_forbidden(&mut self, random: &mut SplitMix64, format: Format) {
        if random.remainder(5) > 0 {
            return;
        }
        let all: Vec<&'static str> = FORBIDDEN.iter().chain(forbidden_for(format)).copied().collect();
        self.forbidden = Some(all[random.remainder(all.len() as u64) as usize]);
        if random.remainder(8) == 0 {
            self.forbidden = None;
            self.skips_bad_rows = false;
        }
    }

    /// The plan of a job with these settings on `files`, with checkpoints below `root`.
    pub fn plan(&self, root: &Path, files: &Files) -> JobPlan {
        let resume = if self.resumes_latest { "latest" } else { "none" };
        let mut sets = vec![
            format!("spec.data.train.paths={}", files.paths(root)),
            format!("spec.data.shuffle.windowRows={}", self.window),
            format!("spec.checkpoint.path={}", checkpoints(root).display()),
            format!("spec.checkpoint.everySteps={}", self.every_steps),
            format!("spec.checkpoint.resume={resume}"),
            match self.length {
                Length::Steps(steps) => format!("spec.training.steps={steps}"),
                Length::Epochs(epochs) => format!("spec.training.epochs={epochs}"),
            },
        ];
        if self.skips_bad_rows {
            sets.push("spec.data.badRows.action=skip".to_owned());
        }
        sets.extend(self.allowed.iter().chain(&self.forbidden).map(|change| (*change).to_owned()));
        let over = |expression: &String| Override { kind: SetKind::Infer, expression: expression.clone() };
        let overrides: Vec<Override> = sets.iter().map(over).collect();
        let manifest = rectrain_crds::load(JOB, "job.yaml", &overrides);
        let manifest = manifest.unwrap_or_else(|error| panic!("{sets:?}: {error}"));
        JobPlan::new(&manifest.resolved).unwrap()
    }
}

/// The folder of the checkpoints.
pub fn checkpoints(root: &Path) -> std::path::PathBuf {
    root.join("checkpoints")
}
