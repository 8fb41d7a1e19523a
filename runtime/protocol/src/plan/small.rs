//! A small job for unit tests.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use super::JobPlan;

/// A small job on synthetic clicks, with global batches of 24 rows. `changes` are overrides as on
/// the command line.
pub fn small_plan(changes: &[&str]) -> JobPlan {
    let manifest = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  features: {sparse: [{name: C1}, {name: C2}], dense: [{name: I1}]}
  data: {synthetic: {rows: 2000, testRows: 500, vocabulary: 1000}}
  training: {globalBatchSize: 24}
";
    let overrides: Vec<_> = changes
        .iter()
        .map(|change| rectrain_crds::Override { kind: rectrain_crds::SetKind::Infer, expression: (*change).to_owned() })
        .collect();
    JobPlan::new(&rectrain_crds::load(manifest, "test.yaml", &overrides).unwrap().resolved).unwrap()
}
