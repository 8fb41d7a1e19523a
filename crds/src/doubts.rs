//! Settings that are legal and most likely wrong. The job runs with them, and its user is warned.

use crate::{DenseOptimizer, ResolvedJob, SparseOptimizer};

/// Sentences about settings of a job that most likely keep it from learning.
#[must_use]
pub fn doubts(job: &ResolvedJob) -> Vec<String> {
    let dense = match job.training.dense_optimizer {
        DenseOptimizer::Sgd { learning_rate, .. } => (learning_rate, 1e-5, 10.0),
        DenseOptimizer::AdaGrad { learning_rate, .. } => (learning_rate, 1e-5, 1.0),
        DenseOptimizer::Adam { learning_rate, .. } | DenseOptimizer::AdamW { learning_rate, .. } => {
            (learning_rate, 1e-6, 0.1)
        }
    };
    let sparse = usual_of_rows(job.training.sparse_optimizer);
    let first_order = job.training.first_order_optimizer.map(|optimizer| ("firstOrder", usual_of_rows(optimizer)));
    let all = [("dense", dense), ("sparse", sparse)].into_iter().chain(first_order);
    all.filter_map(|(name, (rate, least, most))| doubt(name, rate, least, most)).collect()
}

/// The learning rate of an optimizer of rows, with the least and the most of the usual ones.
fn usual_of_rows(optimizer: SparseOptimizer) -> (f64, f64, f64) {
    match optimizer {
        // A row has a share of the batch in its gradient, so its steps are small.
        SparseOptimizer::Sgd { learning_rate } => (learning_rate, 1e-5, 1000.0),
        SparseOptimizer::AdaGrad { learning_rate, .. } | SparseOptimizer::RowWiseAdaGrad { learning_rate, .. } => {
            (learning_rate, 1e-5, 2.0)
        }
        SparseOptimizer::Adam { learning_rate, .. } => (learning_rate, 1e-6, 0.5),
        SparseOptimizer::Ftrl { learning_rate, .. } => (learning_rate, 1e-5, 10.0),
    }
}

fn doubt(name: &str, rate: f64, least: f64, most: f64) -> Option<String> {
    let problem = match rate {
        rate if rate > most => "far above",
        rate if rate < least => "far below",
        _ => return None,
    };
    Some(format!(
        "spec.training.optimizer.{name}.learningRate is {rate}, {problem} the usual {least} to {most} of this \
         optimizer: remove it to get the default"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_learning_rate_far_off_is_doubted() {
        assert_eq!(doubt("dense", 0.001, 1e-6, 0.1), None);
        let high = doubt("dense", 1000.0, 1e-6, 0.1).unwrap();
        assert!(high.starts_with("spec.training.optimizer.dense.learningRate is 1000, far above"), "{high}");
        assert!(doubt("sparse", 1e-9, 1e-6, 0.1).unwrap().contains("far below"));
    }
}
