//! The operator's rights in a real cluster: the API server's audit log has what it did, and each right of the chart was used.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::foreign_kubeconfig;
use super::install::within;
use super::metrics_server::MetricsServer;
use super::operate::{
    NAMESPACE, SYSTEM, belongings, delete_job, endless, merged, patch, pods, relabels, shows, submit, until_phase,
    without_power,
};
use super::paths::Paths;
use super::process::eventually;
use super::recovery::node_of;

/// The user that the operator is for the API server.
const USER: &str = "system:serviceaccount:rectrain-system:rectrain";
/// The role that has its rights in all namespaces, and the one that has them in its own.
const ROLES: [&str; 2] = ["clusterrole/rectrain", "role/rectrain-election"];
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(120);

/// A verb, and a resource with its group, as in `get pods` and `get nodes.metrics.k8s.io`.
type Rights = BTreeSet<String>;

/// A step of `cargo xtask cluster operate`: after those that show the operator at work, because it reads what they have had it do.
pub(super) fn needs_its_rights(paths: &Paths) -> Result<(), String> {
    if foreign_kubeconfig(paths).is_some() {
        eprintln!(
            "xtask: SKIPPED the audit of the operator's rights, because the cluster's API server is not of this machine"
        );
        return Ok(());
    }
    let _measures = MetricsServer::start(paths)?;
    // While its mode is decided on, its nodes are looked at.
    let decided_on = "decided-on";
    submit(paths, decided_on, &merged(endless(), json!({"training": {"mode": "auto"}})))?;
    ends_and_is_removed(paths)?;
    // It takes a minute and a half, and another step may have done it.
    if !used(paths)?.contains("delete pods") {
        loses_a_node(paths, decided_on)?;
    }
    if !used(paths)?.contains("list events") {
        gets_no_pods(paths)?;
    }
    cannot_be_run_any_more(paths)?;
    let granted = granted(paths)?;
    eventually(PATIENCE, "the use of each right", || {
        let used = used(paths)?;
        let unused: Vec<_> = granted.difference(&used).collect();
        if unused.is_empty() { Ok(()) } else { Err(format!("not used: {unused:?}")) }
    })?;
    println!("{} rights, each of them used", granted.len());
    delete_job(paths, decided_on)
}

/// The operator deletes a job whose time to live is over.
fn ends_and_is_removed(paths: &Paths) -> Result<(), String> {
    let name = "short-lived";
    submit(paths, name, &json!({"ttlSecondsAfterFinished": 1}))?;
    eventually(PATIENCE, "the end of a job's time to live", || {
        match within(paths, NAMESPACE, &["get", "rectrainingjob", name, "--ignore-not-found", "--output=name"])? {
            nothing if nothing.trim().is_empty() => Ok(()),
            found => Err(found),
        }
    })
}

/// The operator finds out why pods are not made.
fn gets_no_pods(paths: &Paths) -> Result<(), String> {
    let name = "gets-no-pods";
    let no_account = json!({"roles": {"loader": {"template": {"serviceAccountName": "nobody-made-it"}}}});
    submit(paths, name, &merged(endless(), no_account))?;
    println!("PodsRefused: {}", shows(paths, name, "Stalled", "PodsRefused")?);
    delete_job(paths, name)
}

/// The operator takes pods of a lost node for dead.
fn loses_a_node(paths: &Paths, name: &str) -> Result<(), String> {
    until_phase(paths, name, "Training")?;
    let pod = format!("{name}-ps-0");
    let lost = pods(paths, name)?.get(&pod).cloned();
    without_power(paths, &node_of(paths, &pod)?, || {
        eventually(PATIENCE, &format!("another {pod}"), || match pods(paths, name)?.get(&pod) {
            Some(now) if Some(now) != lost.as_ref() => Ok(()),
            _ => Err("the lost one is still there".to_owned()),
        })
    })
}

/// The operator mends what belongs to a job, and deletes it when its spec has become one that cannot be and it is held.
fn cannot_be_run_any_more(paths: &Paths) -> Result<(), String> {
    let name = "not-any-more";
    submit(paths, name, &endless())?;
    until_phase(paths, name, "Training")?;
    for object in belongings(paths, name)?.keys() {
        relabels(paths, object)?;
    }
    // An event that has happened before is counted, not made.
    for _ in 0..2 {
        patch(paths, name, &json!({"spec": {"suspend": true}}))?;
        until_phase(paths, name, "Suspended")?;
        patch(paths, name, &json!({"spec": {"suspend": false}}))?;
        until_phase(paths, name, "Training")?;
    }
    // No rule of the API server's sees the order of switches.
    let switches = [json!({"step": 20, "mode": "gba"}), json!({"step": 10, "mode": "sync"})];
    patch(paths, name, &json!({"spec": {"training": {"switchAt": switches}}}))?;
    println!("InvalidSpec: {}", shows(paths, name, "Stalled", "InvalidSpec")?);
    patch(paths, name, &json!({"spec": {"suspend": true}}))?;
    eventually(PATIENCE, "nothing to be left of a job that cannot go on", || match belongings(paths, name)?.len() {
        0 => Ok(()),
        left => Err(format!("{left} objects are")),
    })?;
    delete_job(paths, name)
}

fn read(paths: &Paths, role: &str) -> Result<Value, String> {
    let text = within(paths, SYSTEM, &["get", role, "--output=json"])?;
    serde_json::from_str(&text).map_err(|error| error.to_string())
}

fn granted(paths: &Paths) -> Result<Rights, String> {
    let mut rights = Rights::new();
    for role in ROLES {
        let role = read(paths, role)?;
        for rule in role["rules"].as_array().into_iter().flatten() {
            let texts = |field: &str| rule[field].as_array().into_iter().flatten().filter_map(Value::as_str);
            for (group, resource) in texts("apiGroups").flat_map(|group| texts("resources").map(move |r| (group, r))) {
                rights.extend(texts("verbs").map(|verb| named(verb, resource, group)));
            }
        }
    }
    Ok(rights)
}

/// What the audit log has.
fn used(paths: &Paths) -> Result<Rights, String> {
    let file = paths.log("audit");
    let text = std::fs::read_to_string(&file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    Ok(text.lines().filter_map(right).collect())
}

fn right(line: &str) -> Option<String> {
    let event: Value = serde_json::from_str(line).ok()?;
    if event["user"]["username"] != USER {
        return None;
    }
    let object = &event["objectRef"];
    let resource = object["resource"].as_str()?;
    let verb = match event["verb"].as_str()? {
        // Server-side apply of what was not there.
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
    fn a_line_of_the_audit_log_is_a_right_if_it_is_the_operators() {
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
