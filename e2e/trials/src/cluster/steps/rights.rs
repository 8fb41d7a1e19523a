//! The operator's rights: the API server's audit log shows that it uses each right that the chart
//! grants.

use std::collections::BTreeSet;
use std::time::Duration;

use rectrain_bring_up::Paths;
use rectrain_bring_up::metrics_server::MetricsServer;
use rectrain_harness::files::read;
use rectrain_harness::jobs::Jobs;
use rectrain_harness::kubectl::SYSTEM;
use rectrain_harness::manifests::{endless, merged};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::{Value, json};

use super::serving::{gains_and_loses_a_canary, gains_and_loses_an_autoscaler};
use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::power::without_power;
use crate::cluster::support::repairs::relabel;

/// The operator's user name.
const USER: &str = "system:serviceaccount:rectrain-system:rectrain";
/// The role for all namespaces, and the role for the operator's own namespace.
const ROLES: [&str; 2] = ["clusterrole/rectrain", "role/rectrain-election"];
const PATIENCE: Duration = Duration::from_secs(120);

/// Verbs with resource and API group, as in `get pods` and `get nodes.metrics.k8s.io`.
type Rights = BTreeSet<String>;

/// Runs after the steps that make the operator work, because their requests count too.
pub(in crate::cluster) fn needs_its_rights(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("the audit of the operator's rights")? {
        return Ok(());
    }
    let (jobs, paths) = (&cluster.jobs, &cluster.paths);
    let _measures = MetricsServer::start(paths)?;
    // The operator looks at the nodes of a job in mode auto.
    let decided_on = "decided-on";
    jobs.submit(decided_on, &merged(endless(), json!({"training": {"mode": "auto"}})))?;
    ends_and_is_removed(jobs)?;
    // This takes a minute and a half, and another step may have done it.
    if !used(paths)?.contains("delete pods") {
        loses_a_node(cluster, decided_on)?;
    }
    if !used(paths)?.contains("list events") {
        gets_no_pods(jobs)?;
    }
    becomes_invalid(jobs)?;
    gains_and_loses_an_autoscaler(jobs)?;
    gains_and_loses_a_canary(jobs)?;
    let granted = granted(jobs)?;
    eventually(PATIENCE, "the use of each right", || {
        let used = used(paths)?;
        let unused: Vec<_> = granted.difference(&used).collect();
        if unused.is_empty() { Ok::<_, HarnessError>(()) } else { Err(not_yet(format!("not used: {unused:?}"))) }
    })?;
    println!("{} rights, each of them used", granted.len());
    Ok(jobs.delete(decided_on)?)
}

/// The operator deletes a job whose time to live is over.
fn ends_and_is_removed(jobs: &Jobs) -> Result<(), HarnessError> {
    let name = "short-lived";
    jobs.submit(name, &json!({"ttlSecondsAfterFinished": 1}))?;
    eventually(PATIENCE, "the end of a job's time to live", || {
        match jobs.within(&["get", "rectrainingjob", name, "--ignore-not-found", "--output=name"])? {
            nothing if nothing.trim().is_empty() => Ok(()),
            found => Err(not_yet(found)),
        }
    })
}

/// The operator finds out why a job has no pods.
fn gets_no_pods(jobs: &Jobs) -> Result<(), HarnessError> {
    let name = "gets-no-pods";
    let no_account = json!({"roles": {"loader": {"template": {"serviceAccountName": "does-not-exist"}}}});
    jobs.submit(name, &merged(endless(), no_account))?;
    println!("PodsRefused: {}", jobs.until_condition(name, "Stalled", "PodsRefused")?);
    jobs.delete(name)
}

/// The operator replaces the pods of a lost node.
fn loses_a_node(cluster: &TestCluster, name: &str) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    jobs.until_phase(name, "Training")?;
    let pod = format!("{name}-ps-0");
    let lost = jobs.pods(name)?.get(&pod).cloned();
    without_power(cluster, &jobs.node_of(&pod)?, || {
        Ok(eventually(PATIENCE, &format!("another {pod}"), || match jobs.pods(name)?.get(&pod) {
            Some(now) if Some(now) != lost.as_ref() => Ok(()),
            _ => Err(not_yet("the lost one is still there")),
        })?)
    })
}

/// The operator repairs the objects of a job. Then the job's spec becomes invalid, and the job is
/// suspended: the operator deletes the objects.
fn becomes_invalid(jobs: &Jobs) -> Result<(), HarnessError> {
    let name = "not-any-more";
    jobs.submit(name, &endless())?;
    jobs.until_phase(name, "Training")?;
    for object in jobs.belongings(name)?.keys() {
        relabel(jobs, object)?;
    }
    // The second occurrence of an event raises its count, which needs another right than creating
    // it.
    for _ in 0..2 {
        jobs.patch(name, &json!({"spec": {"suspend": true}}))?;
        jobs.until_phase(name, "Suspended")?;
        jobs.patch(name, &json!({"spec": {"suspend": false}}))?;
        jobs.until_phase(name, "Training")?;
    }
    // The rules of the CRD do not check the order of switches, so the API server accepts this.
    let switches = [json!({"step": 20, "mode": "gba"}), json!({"step": 10, "mode": "sync"})];
    jobs.patch(name, &json!({"spec": {"training": {"switchAt": switches}}}))?;
    println!("InvalidSpec: {}", jobs.until_condition(name, "Stalled", "InvalidSpec")?);
    jobs.patch(name, &json!({"spec": {"suspend": true}}))?;
    eventually(PATIENCE, "the removal of an invalid job's objects", || match jobs.belongings(name)?.len() {
        0 => Ok(()),
        left => Err(not_yet(format!("{left} objects are left"))),
    })?;
    jobs.delete(name)
}

/// The rights that the chart grants.
fn granted(jobs: &Jobs) -> Result<Rights, HarnessError> {
    let mut rights = Rights::new();
    for role in ROLES {
        let role = jobs.kubectl().json(SYSTEM, &["get", role])?;
        for rule in role["rules"].as_array().into_iter().flatten() {
            let texts = |field: &str| rule[field].as_array().into_iter().flatten().filter_map(Value::as_str);
            for (group, resource) in texts("apiGroups").flat_map(|group| texts("resources").map(move |r| (group, r))) {
                rights.extend(texts("verbs").map(|verb| named(verb, resource, group)));
            }
        }
    }
    Ok(rights)
}

/// The rights that the operator has used, from the audit log.
fn used(paths: &Paths) -> Result<Rights, HarnessError> {
    Ok(read(&paths.log("audit"))?.lines().filter_map(right).collect())
}

/// The right in a line of the audit log, if the operator used it.
fn right(line: &str) -> Option<String> {
    let event: Value = serde_json::from_str(line).ok()?;
    if event["user"]["username"] != USER {
        return None;
    }
    let object = &event["objectRef"];
    let resource = object["resource"].as_str()?;
    let verb = match event["verb"].as_str()? {
        // A server-side apply has created the object.
        "patch" if event["responseStatus"]["code"] == 201 => "create",
        verb => verb,
    };
    let resource = match object["subresource"].as_str() {
        Some(subresource) => format!("{resource}/{subresource}"),
        None => resource.to_owned(),
    };
    Some(named(verb, &resource, object["apiGroup"].as_str().unwrap_or_default()))
}

fn named(verb: &str, resource: &str, group: &str) -> String {
    let dot = if group.is_empty() { "" } else { "." };
    format!("{verb} {resource}{dot}{group}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operators_lines_of_the_audit_log_are_rights() {
        let line = |user: &str, verb: &str, code: u16, subresource: &str| {
            json!({
                "user": {"username": user}, "verb": verb, "responseStatus": {"code": code},
                "objectRef": {"resource": "services", "subresource": subresource},
            })
            .to_string()
            .replace(",\"subresource\":\"\"", "")
        };
        assert_eq!(right(&line(USER, "patch", 200, "")).as_deref(), Some("patch services"));
        assert_eq!(right(&line(USER, "patch", 201, "")).as_deref(), Some("create services"));
        assert_eq!(right(&line(USER, "update", 200, "status")).as_deref(), Some("update services/status"));
        assert_eq!(right(&line("admin", "patch", 200, "")), None);
        assert_eq!(right("not JSON"), None);
        let of_group = line(USER, "get", 200, "").replace("\"services\"", "\"nodes\",\"apiGroup\":\"metrics.k8s.io\"");
        assert_eq!(right(&of_group).as_deref(), Some("get nodes.metrics.k8s.io"));
    }
}
