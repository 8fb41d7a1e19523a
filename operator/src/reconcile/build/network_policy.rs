//! The permitted callers of a job's pods: members on the members' port, the operator on the
//! coordinator's control port, and everyone on the port of metrics. Calls from the pods are not
//! restricted, because data and checkpoints are outside.

use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::Plan;
use crate::names::{self, CONTROL_PORT, FIELD_MANAGER, JOB_LABEL, MEMBER_PORT, METRICS_PORT};

pub(super) fn build(plan: &Plan<'_>) -> NetworkPolicy {
    let name = plan.name();
    let own_pods = selector(&[(JOB_LABEL, &name)]);
    let members = NetworkPolicyPeer { pod_selector: Some(own_pods.clone()), ..NetworkPolicyPeer::default() };
    let operator = plan.config.namespace.as_deref().map(|namespace| NetworkPolicyPeer {
        namespace_selector: Some(selector(&[("kubernetes.io/metadata.name", namespace)])),
        pod_selector: Some(selector(&[("app.kubernetes.io/name", FIELD_MANAGER)])),
        ip_block: None,
    });
    NetworkPolicy {
        metadata: plan.metadata(names::of_job(&name), names::job_labels(&name)),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(own_pods),
            policy_types: Some(vec!["Ingress".to_owned()]),
            ingress: Some(vec![
                rule(Some(vec![members]), MEMBER_PORT),
                rule(operator.map(|operator| vec![operator]), CONTROL_PORT),
                rule(None, METRICS_PORT),
            ]),
            egress: None,
        }),
    }
}

fn rule(from: Option<Vec<NetworkPolicyPeer>>, port: u16) -> NetworkPolicyIngressRule {
    let port = NetworkPolicyPort {
        port: Some(IntOrString::Int(i32::from(port))),
        protocol: Some("TCP".to_owned()),
        end_port: None,
    };
    NetworkPolicyIngressRule { from, ports: Some(vec![port]) }
}

fn selector(labels: &[(&str, &str)]) -> LabelSelector {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    LabelSelector { match_labels: Some(labels), ..LabelSelector::default() }
}
