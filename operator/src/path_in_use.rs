//! Jobs of one namespace with the same checkpoint path: one uses it, and the others wait before
//! they begin. Pure.
//!
//! The coordinators also hold a lease on the path. It protects the path from runs that this
//! operator does not see.

use rectrain_crds::{Phase, RecTrainingJob, Role};
use serde_json::{Value, json};

use crate::failure::{Cause, Problem};

/// Whether the job is about to begin, so that it can still wait for its path.
#[must_use]
pub fn is_about_to_begin(job: &RecTrainingJob) -> bool {
    let status = job.status.as_ref();
    let phase = status.and_then(|status| status.phase);
    let has_ended = matches!(phase, Some(Phase::Complete | Phase::Failed));
    let has_begun = has_ended || status.is_some_and(|status| status.attempt.is_some());
    place(job).is_some() && job.spec.suspend != Some(true) && (!has_begun || phase == Some(Phase::Suspended))
}

/// Why `job`, which is about to begin, has to wait. `others` are the jobs of its namespace.
#[must_use]
pub fn path_in_use<'a>(job: &RecTrainingJob, others: impl IntoIterator<Item = &'a RecTrainingJob>) -> Option<Problem> {
    let wanted = place(job)?;
    let is_other = |other: &&RecTrainingJob| other.metadata.uid != job.metadata.uid;
    let comes_first =
        |other: &&RecTrainingJob| uses_its_path(other) || is_about_to_begin(other) && age(other) < age(job);
    let holders = others.into_iter().filter(is_other).filter(|other| place(other).as_ref() == Some(&wanted));
    let holder = holders.filter(comes_first).min_by_key(|other| age(other))?;
    let name = holder.metadata.name.as_deref().unwrap_or_default();
    let message = format!(
        "job {name} uses the checkpoint path {}: this job begins when that one has ended or is suspended. Set another spec.checkpoint.path to begin now",
        path(job).unwrap_or_default()
    );
    Some(Problem { may_pass: true, ..Problem::new(Cause::CheckpointPathInUse, message) })
}

/// Whether the job has begun and not ended.
fn uses_its_path(job: &RecTrainingJob) -> bool {
    let Some(status) = &job.status else { return false };
    status.attempt.is_some() && status.phase.is_some_and(Phase::is_under_way)
}

/// The older of two jobs comes first. Names decide between jobs of the same second.
fn age(job: &RecTrainingJob) -> (i64, Option<&str>) {
    let created = job.metadata.creation_timestamp.as_ref();
    (created.map_or(i64::MAX, |created| created.0.as_second()), job.metadata.name.as_deref())
}

fn path(job: &RecTrainingJob) -> Option<&str> {
    job.spec.checkpoint.as_ref()?.path.as_deref().map(|path| path.trim_end_matches('/'))
}

/// The place of the checkpoints: equal for two jobs only if they write to the same one. A bucket
/// depends on the options of its store, and a local path on the volume that is mounted there.
/// `None`: no checkpoints, or a path that only the job's own pods see.
fn place(job: &RecTrainingJob) -> Option<Value> {
    let path = path(job)?;
    if path.contains("://") {
        let storage = job.spec.data.storage.as_ref();
        return Some(json!([path, storage.map(|storage| &storage.options)]));
    }
    let template = job.spec.roles.as_ref()?.template(Role::Coordinator)?;
    let volumes = json!([template.volumes, template.volume_mounts]);
    let is_shared = volumes.to_string().contains("persistentVolumeClaim");
    is_shared.then(|| json!([path, volumes]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job that was created `second` seconds after the first.
    fn job(name: &str, second: u32, path: &str, status: Value) -> RecTrainingJob {
        serde_json::from_value(json!({
            "apiVersion": "rectrain.dev/v1alpha1", "kind": "RecTrainingJob",
            "metadata": {"name": name, "uid": name, "creationTimestamp": format!("2026-01-01T00:00:{second:02}Z")},
            "spec": {
                "model": {"kind": "dnn"}, "features": {"sparse": [{"name": "user"}]}, "data": {},
                "checkpoint": {"path": path},
            },
            "status": status,
        }))
        .expect("a job")
    }

    fn attempt(phase: &str) -> Value {
        let attempt = json!({"number": 1, "generation": 1, "specHash": "h", "image": "i", "restartsBefore": 0});
        json!({"phase": phase, "attempt": attempt})
    }

    #[test]
    fn a_job_waits_for_one_that_uses_its_path() {
        let second = job("second", 2, "gs://b/ck", json!({}));
        for phase in ["Pending", "Starting", "Training", "Evaluating", "Restarting"] {
            let first = job("first", 3, "gs://b/ck/", attempt(phase));
            let problem = path_in_use(&second, [&first, &second]).expect("it waits");
            assert!(problem.may_pass && problem.message.starts_with("job first uses the checkpoint path gs://b/ck:"));
        }
        for phase in ["Complete", "Failed", "Suspended"] {
            let first = job("first", 3, "gs://b/ck", attempt(phase));
            assert_eq!(path_in_use(&second, [&first, &second]), None, "{phase}");
        }
        for path in ["gs://b/ck2", "gs://b", "s3://b/ck", "/ck"] {
            let first = job("first", 1, path, attempt("Training"));
            assert_eq!(path_in_use(&second, [&first, &second]), None, "{path}");
        }
    }

    #[test]
    fn jobs_that_begin_with_one_model_do_not_wait() {
        let from = |name: &str, path: &str, status: Value| {
            let mut job = job(name, 1, path, status);
            if let Some(checkpoint) = &mut job.spec.checkpoint {
                checkpoint.from = Some("gs://b/monday@latest".to_owned());
            }
            job
        };
        let second = from("second", "gs://b/two", json!({}));
        let writer = job("writer", 0, "gs://b/monday", attempt("Training"));
        assert_eq!(path_in_use(&second, [&from("first", "gs://b/one", attempt("Training")), &writer]), None);
    }

    #[test]
    fn of_jobs_that_begin_together_the_oldest_goes_first() {
        let jobs = [("b", 1), ("a", 1), ("c", 2)].map(|(name, second)| job(name, second, "gs://b/ck", json!({})));
        let waits = jobs.each_ref().map(|job| path_in_use(job, &jobs).is_some());
        assert_eq!(waits, [true, false, true]);
        let mut suspended = job("s", 0, "gs://b/ck", json!({}));
        suspended.spec.suspend = Some(true);
        assert_eq!(path_in_use(&jobs[1], [&suspended]), None, "it begins only when it is resumed");
        assert!(!is_about_to_begin(&suspended) && is_about_to_begin(&jobs[0]));
        assert!(is_about_to_begin(&job("r", 0, "gs://b/ck", attempt("Suspended"))), "a resumed job");
        assert!(!is_about_to_begin(&job("t", 0, "gs://b/ck", attempt("Training"))));
    }

    #[test]
    fn a_local_path_is_shared_only_on_the_same_claim() {
        let on = |name: &str, claim: &str| {
            let mut job = job(name, 1, "/ck", if name == "a" { attempt("Training") } else { json!({}) });
            let volumes = json!([{"name": "ck", "persistentVolumeClaim": {"claimName": claim}}]);
            let roles = json!({"coordinator": {"template": {"volumes": volumes}}});
            job.spec.roles = Some(serde_json::from_value(roles).expect("roles"));
            job
        };
        assert!(path_in_use(&on("b", "disk"), [&on("a", "disk")]).is_some());
        assert_eq!(path_in_use(&on("b", "disk"), [&on("a", "other")]), None);
        let own = |name: &str, status: Value| job(name, 1, "/ck", status);
        assert_eq!(path_in_use(&own("b", json!({})), [&own("a", attempt("Training"))]), None);
    }
}
