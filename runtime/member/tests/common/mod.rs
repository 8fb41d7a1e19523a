//! Jobs for the tests.

pub(crate) mod manifest;

use rectrain_protocol::plan::JobPlan;

use manifest::plan_of;

/// A small job on synthetic clicks. `changes` are overrides as on the command line.
pub(crate) fn plan(changes: &[&str]) -> JobPlan {
    let manifest = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [16, 8]}
  features:
    sparse: [{name: 'C{1..26}'}]
    dense: [{name: 'I{1..13}'}]
  data:
    synthetic: {rows: 2000, testRows: 500, vocabulary: 1000}
  training: {globalBatchSize: 96, epochs: 2}
";
    plan_of(manifest, changes)
}
