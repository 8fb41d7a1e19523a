//! The README's first command must reach a fixed quality.

use rectrain_harness::events::test_auc;
use rectrain_harness::rectrain::{job, movielens_data, train};
use rectrain_harness::{say, skips};

use crate::TrialError;
use crate::error::unmet;

/// The README's example.
const MANIFEST: &str = "docs/examples/movielens-100k.yaml";
/// The least test AUC that the example has to reach.
const LEAST_AUC: f64 = 0.785;

/// Trains the example. Skipped where the data set cannot be downloaded.
///
/// # Errors
/// The run fails, or does not reach the required AUC.
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
    Ok(())
}
