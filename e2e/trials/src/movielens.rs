//! The README's first command must reach a fixed quality, and so must the shortest manifest.

use rectrain_harness::events::{missing, test_auc};
use rectrain_harness::rectrain::{job, movielens_data, train};
use rectrain_harness::{say, skips};

use crate::TrialError;
use crate::error::unmet;

/// The README's example.
const MANIFEST: &str = "docs/examples/movielens-100k.yaml";
/// The least test AUC that the example has to reach.
const LEAST_AUC: f64 = 0.785;
/// The shortest manifest, with which users begin.
const MINIMAL: &str = "docs/examples/minimal.yaml";
/// The test's normalized entropy that the shortest manifest has to stay below. A model that knows
/// only the mean of the labels has 1.
const MOST_ENTROPY: f64 = 0.9;

/// Trains both examples. Skipped where the data set cannot be downloaded.
///
/// # Errors
/// A run fails, or does not reach the required quality.
pub fn run() -> Result<(), TrialError> {
    say(format!("rectrain run {MANIFEST}"));
    if let Err(reason) = movielens_data() {
        return Ok(skips::skip("the MovieLens run", reason)?);
    }
    let auc = test_auc(&train(job(MANIFEST, [])?)?)?;
    if auc < LEAST_AUC || auc.is_nan() {
        return Err(unmet(format!("a test AUC of at least {LEAST_AUC} in the MovieLens run"), auc));
    }
    say(format!("test AUC {auc:.4}, at least {LEAST_AUC} is required"));
    minimal()
}

/// Trains the shortest manifest.
fn minimal() -> Result<(), TrialError> {
    say(format!("rectrain run {MINIMAL}"));
    let summary = train(job(MINIMAL, [])?)?;
    let entropy = summary["test"]["normalizedEntropy"].as_f64();
    let entropy = entropy.ok_or_else(|| missing("the summary", &summary, "test.normalizedEntropy"))?;
    if entropy >= MOST_ENTROPY || entropy.is_nan() {
        return Err(unmet(format!("a normalized entropy below {MOST_ENTROPY} with {MINIMAL}"), entropy));
    }
    say(format!("normalized entropy {entropy:.4}, below {MOST_ENTROPY} is required"));
    Ok(())
}
