//! The headless Service of a role. It gives each pod a DNS name, also before the pod is ready: a
//! pod becomes ready only once it participates in the job.

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use rectrain_crds::Role;

use super::Plan;
use crate::names::{self, CONTROL_PORT, MEMBER_PORT, METRICS_PORT};

pub(super) fn build(plan: &Plan<'_>, role: Role) -> Service {
    let name = plan.name();
    Service {
        metadata: plan.metadata(names::of_role(&name, role), names::role_labels(&name, role)),
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".to_owned()),
            publish_not_ready_addresses: Some(true),
            selector: Some(names::pod_selector(&name, role)),
            ports: Some(ports(role).iter().map(|&(name, port)| service_port(name, port)).collect()),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// The named ports of a role's pods.
pub(super) fn ports(role: Role) -> &'static [(&'static str, u16)] {
    match role {
        Role::Coordinator => &[("members", MEMBER_PORT), ("control", CONTROL_PORT), ("metrics", METRICS_PORT)],
        _ => &[("members", MEMBER_PORT), ("metrics", METRICS_PORT)],
    }
}

fn service_port(name: &str, port: u16) -> ServicePort {
    ServicePort {
        name: Some(name.to_owned()),
        port: i32::from(port),
        protocol: Some("TCP".to_owned()),
        target_port: Some(IntOrString::String(name.to_owned())),
        ..ServicePort::default()
    }
}
