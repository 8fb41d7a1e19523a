//! The certificate with which a job's pods authenticate each other.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;

use super::Plan;
use crate::certificates::JobCertificate;
use crate::names;

pub(super) fn build(plan: &Plan<'_>, certificate: &JobCertificate) -> Secret {
    let name = plan.name();
    // The same files as in a Secret of cert-manager.
    let files =
        [("ca.crt", &certificate.authority), ("tls.crt", &certificate.certificate), ("tls.key", &certificate.key)];
    Secret {
        metadata: plan.metadata(names::certificate(&name), names::job_labels(&name)),
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(files.map(|(file, pem)| (file.to_owned(), ByteString(pem.clone().into_bytes()))).into()),
        ..Secret::default()
    }
}
