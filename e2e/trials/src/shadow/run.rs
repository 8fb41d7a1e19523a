//! One run of `rectrain run`: its overrides, its processes, and its name in the file of results.

use serde_json::{Value, json};

use super::dataset::DataSet;
use super::way::Way;

/// Rows of a worker's batch on synthetic rows.
pub(super) const SYNTHETIC_LOCAL: u64 = 512;
/// The end of synthetic rows without an end.
const MANY: u64 = 1_000_000_000;

/// The rows that a run trains on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rows {
    /// So many batches for each worker.
    Synthetic {
        batches: u64,
    },
    /// Synthetic rows without an end. The trial ends the run.
    Endless,
    Public(&'static DataSet),
}

/// The figures that a run is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Figures {
    Speed,
    Quality,
    /// The times of a step.
    Times,
}

/// A run.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) figures: Figures,
    pub(super) rows: Rows,
    pub(super) way: Way,
    /// Dense workers.
    pub(super) workers: u64,
    /// The cores of each dense worker, which is then a process. Empty if all workers are threads of
    /// one process without limits.
    pub(super) cores: Vec<f64>,
    pub(super) seed: u64,
    /// The last overrides.
    pub(super) sets: Vec<String>,
}

impl Run {
    /// A run whose dense workers are processes with these cores.
    pub(super) fn limited(figures: Figures, rows: Rows, way: Way, cores: Vec<f64>) -> Self {
        Self { figures, rows, way, workers: cores.len() as u64, cores, seed: 1, sets: Vec::new() }
    }

    /// All overrides. Each worker's batch has the same size, so the global batch grows with the
    /// workers.
    pub(super) fn sets(&self) -> Vec<String> {
        let local = match self.rows {
            Rows::Public(set) => set.local_batch,
            Rows::Synthetic { .. } | Rows::Endless => SYNTHETIC_LOCAL,
        };
        let mut sets = self.way.sets();
        sets.extend([
            format!("spec.training.seed={}", self.seed),
            format!("spec.training.localBatchSize={local}"),
            format!("spec.training.globalBatchSize={}", local * self.workers),
            format!("spec.roles.denseWorker.replicas={}", self.workers),
            "spec.roles.denseWorker.threads=1".to_owned(),
        ]);
        match self.rows {
            Rows::Synthetic { batches } => {
                sets.push(format!("spec.data.synthetic.rows={}", batches * local * self.workers));
            }
            Rows::Endless => sets.push(format!("spec.data.synthetic.rows={MANY}")),
            Rows::Public(_) => {}
        }
        sets.extend(self.sets.iter().cloned());
        sets
    }

    /// Its name in the file of results: everything that may change its figures. Cores are texts,
    /// because a number may lose its last digit in a file.
    pub(super) fn name(&self) -> Value {
        let figures = match self.figures {
            Figures::Speed => "speed",
            Figures::Quality => "quality",
            Figures::Times => "times",
        };
        let cores: Vec<String> = self.cores.iter().map(f64::to_string).collect();
        let mut name = json!({
            "figures": figures, "way": self.way.name(), "workers": self.workers, "cores": cores, "seed": self.seed,
            "sets": self.sets(),
        });
        if let Rows::Public(set) = self.rows {
            name["data"] = json!(set.name);
            name["firstRows"] = json!(set.first_rows);
        }
        name
    }

    /// Its name for errors.
    pub(super) fn title(&self) -> String {
        let data = if let Rows::Public(set) = self.rows { set.name } else { "synthetic rows" };
        let cores = if self.cores.is_empty() { String::new() } else { format!(" of {:?} cores", self.cores) };
        format!("{} on {data} with {} dense workers{cores}, seed {}", self.way.name(), self.workers, self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shadow::dataset::DATA_SETS;
    use crate::shadow::way::Algorithm;

    fn speed(cores: &[f64]) -> Run {
        let rows = Rows::Synthetic { batches: 10 };
        Run::limited(Figures::Speed, rows, Way::Background(Algorithm::Easgd), cores.to_vec())
    }

    #[test]
    fn rows_and_global_batch_grow_with_the_workers() {
        let sets = speed(&[0.125; 4]).sets();
        for expected in [
            "spec.training.mode=shadow",
            "spec.training.localBatchSize=512",
            "spec.training.globalBatchSize=2048",
            "spec.roles.denseWorker.replicas=4",
            "spec.data.synthetic.rows=20480",
        ] {
            assert!(sets.iter().any(|set| set == expected), "{expected} is not in {sets:?}");
        }
    }

    #[test]
    fn the_last_overrides_are_the_callers() {
        let run = Run { sets: vec!["spec.training.localBatchSize=64".to_owned()], ..speed(&[0.5]) };
        assert_eq!(run.sets().last().map(String::as_str), Some("spec.training.localBatchSize=64"));
    }

    #[test]
    fn whatever_may_change_the_figures_changes_the_name() {
        let one = speed(&[0.5, 0.5]);
        let quality = Run { figures: Figures::Quality, rows: Rows::Public(&DATA_SETS[0]), ..one.clone() };
        let others = [
            Run { cores: vec![0.5, 0.125], ..one.clone() },
            Run { seed: 2, ..one.clone() },
            Run { way: Way::Sync, ..one.clone() },
            Run { rows: Rows::Synthetic { batches: 11 }, ..one.clone() },
            Run { sets: vec!["a=1".to_owned()], ..one.clone() },
            Run { rows: Rows::Public(&DATA_SETS[1]), ..quality.clone() },
            quality,
        ];
        let mut names: Vec<String> = others.iter().chain([&one]).map(|run| run.name().to_string()).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), others.len() + 1);
    }
}
