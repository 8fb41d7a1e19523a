//! The context that all reconciles share.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Client;
use kube_runtime::reflector::ObjectRef;
use rectrain_crds::{AttemptStatus, ResolvedJob};

use super::dereference::Reader;
use super::error::ReconcileError;
use super::memory::JobMemories;
use super::stored_forms::StoredForms;
use crate::automatic::policy::look_every;
use crate::certificates::{JobCertificate, Root};
use crate::config::OperatorConfig;
use crate::coordinator_poller::CoordinatorPoller;
use crate::events::Announcer;
use crate::metrics::OperatorMetrics;
use crate::names::JobName;
use crate::nodes::ReadNodes;
use crate::scrape::ScrapeMetrics;
use crate::traces::Traces;

/// Looks per second at all jobs under way together. More jobs are looked at less often, which
/// leaves the API server and the operator time for changes.
const LOOKS_A_SECOND: f64 = 50.0;

/// The context that all reconciles share.
pub struct Context {
    /// The API server.
    pub client: Client,
    /// The installation.
    pub config: OperatorConfig,
    /// The source of all certificates; only an operator outside of a cluster has none.
    pub root: Option<Root>,
    /// The source of the jobs' objects.
    pub reader: Reader,
    /// Requests to coordinators.
    pub coordinators: CoordinatorPoller,
    /// The clock.
    pub now: fn() -> Timestamp,
    /// Events of jobs.
    pub announcer: Announcer,
    /// The operator's own metrics.
    pub metrics: OperatorMetrics,
    /// Objects that the API server stores in another form.
    pub stored_forms: StoredForms,
    /// The memory about each job.
    pub memories: JobMemories,
    /// Sources of measurements for automatic decisions.
    pub measurements: Measurements,
    /// Traces of automatic decisions.
    pub traces: Arc<Traces>,
}

/// Sources of measurements.
pub struct Measurements {
    /// The metrics of a job's processes.
    pub processes: Arc<dyn ScrapeMetrics>,
    /// The nodes of a job's pods.
    pub nodes: Arc<dyn ReadNodes>,
}

impl Context {
    /// The certificate of the attempt's pods, if they use one.
    pub(super) fn certificate(
        &self,
        attempt: Option<&AttemptStatus>,
        uid: &str,
    ) -> Result<Option<JobCertificate>, ReconcileError> {
        if !attempt.is_some_and(|attempt| attempt.tls) {
            return Ok(None);
        }
        Ok(Some(self.root.as_ref().ok_or(ReconcileError::NoRoot)?.of_job(uid)?))
    }

    /// The time until the next look at a job under way, as short as its automatic decisions need.
    pub(super) fn poll(&self, job: Option<&ResolvedJob>) -> Duration {
        let all = self.metrics.jobs_under_way() as f64 / LOOKS_A_SECOND;
        let poll = self.config.poll.max(Duration::from_secs_f64(all));
        look_every(job).map_or(poll, |most| poll.min(most))
    }

    /// Forgets a job that is gone, or that another controller runs.
    pub fn forget(&self, job: &JobName) {
        self.metrics.forget_job(job);
        self.traces.forget(job);
        self.coordinators.forget(&ObjectRef::new(&job.name).within(&job.namespace));
        self.memories.forget(job);
    }
}
