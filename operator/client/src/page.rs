//! The data of a job's page, which the API server fetches from the coordinator's pod.

use kube::core::Request;

use crate::{ClientError, Cluster, api_error};

/// The port of metrics and of the page in a coordinator's pod.
const METRICS_PORT: u16 = 9090;

/// The answer to a request for the data of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CoordinatorAnswer {
    /// `job.json`.
    Page(String),
    /// The pod is gone, has ended, or does not answer: a sentence says which.
    Silent(String),
}

impl Cluster {
    /// Asks the coordinator of a job for `/job.json` with this query, through the API server. Needs
    /// the right to `get` `pods/proxy`, which `edit` and `admin` have.
    ///
    /// # Errors
    /// If the API server refuses or fails the request.
    pub async fn coordinator_page(&self, job: &str, query: &str) -> Result<CoordinatorAnswer, ClientError> {
        let pod = format!("{job}-coordinator-0");
        let failed = |source| api_error(format!("read the page of {pod} through the API server"), source);
        let target = format!("proxy/job.json?{query}");
        let pods = Request::new(format!("/api/v1/namespaces/{}/pods", self.namespace));
        let request = pods.get_subresource(&target, &format!("{pod}:{METRICS_PORT}"));
        let request = request.map_err(|error| failed(kube::Error::BuildRequest(error)))?;
        match self.client.request_text(request).await {
            Ok(job) => Ok(CoordinatorAnswer::Page(job)),
            Err(kube::Error::Api(status)) if is_silence(status.code) => Ok(CoordinatorAnswer::Silent(status.message)),
            Err(error) => Err(failed(error)),
        }
    }
}

/// Whether an HTTP status of the proxy says that no coordinator serves the page now. 404 is no such
/// pod. 400 is a pod without an address. 500 to 504 is a pod that does not answer.
fn is_silence(code: u16) -> bool {
    matches!(code, 400 | 404 | 500..=504)
}
