//! The manifests of tests: one job, `clicks`, with different settings.

/// A job named `clicks` on synthetic data, with these further lines of its spec.
macro_rules! clicks {
    ($more:literal) => {
        concat!(
            "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks}
spec:
  model: {kind: deepfm}
  features: {sparse: [{name: \"C{1..4}\"}]}
  data: {synthetic: {rows: 1000}}
",
            $more
        )
    };
}

/// Two parameter servers and two dense workers.
#[allow(dead_code, reason = "unit tests do not use it")]
pub const CLICKS: &str = clicks!("  roles: {ps: {replicas: 2}, denseWorker: {replicas: 2}}\n");

/// All decisions are automatic, with every default, and only recommended.
#[allow(dead_code, reason = "integration tests do not use it")]
pub const AUTOMATIC: &str = clicks!(
    "  training: {mode: auto}
  autoscaling: {}
  roles: {ps: {replicas: 1, template: {resources: {limits: {memory: 2Gi}}}}, denseWorker: {replicas: 2}}
"
);

/// Decisions about the mode and about parameter servers are automatic.
#[allow(dead_code, reason = "unit tests do not use it")]
pub const AUTOMATIC_SERVERS: &str = clicks!(
    "  training: {mode: auto}
  autoscaling: {embeddingWorker: {scaler: external}, denseWorker: {scaler: external}}
  roles: {ps: {replicas: 2, template: {resources: {limits: {memory: 1Gi}}}}, denseWorker: {replicas: 2}}
"
);

/// A small model that writes checkpoints.
#[allow(dead_code, reason = "unit tests do not use it")]
pub const CHECKPOINTS: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks, namespace: ads}
spec:
  model: {kind: lr}
  features: {sparse: [{name: C1}]}
  data: {synthetic: {rows: 1000}}
  checkpoint: {path: gs://ads/clicks}
  faultTolerance: {maxRestarts: 3, backoffSeconds: 10, stallSeconds: 60}
";

/// Reads and resolves a manifest.
#[allow(dead_code, reason = "integration tests do not use it")]
pub fn load(manifest: &str) -> rectrain_crds::Manifest {
    rectrain_crds::load(manifest, "job.yaml", &[]).expect("a valid manifest")
}
