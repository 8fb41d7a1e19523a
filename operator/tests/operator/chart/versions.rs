//! The objects of the chart and of the operator, against the types of Kubernetes 1.33 to 1.35. A
//! field that a version does not know is a fault, as for `kubeconform -strict`. The types come with
//! client-go, Kubernetes' client for Go, in the form that server-side apply reads.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::{chart, helm, objects};
use crate::manifests::CHECKPOINTS;
use crate::world::{MANIFEST, World, good};

/// The supported versions of Kubernetes, each with a client-go of this version.
const VERSIONS: [(&str, &str); 3] = [("1.33", "v0.33.0"), ("1.34", "v0.34.0"), ("1.35", "v0.35.4")];
/// The API groups that client-go does not have: definitions of resources, and monitors.
const OTHERS: [&str; 3] = ["apiextensions.k8s.io", "monitoring.coreos.com", "monitoring.googleapis.com"];

/// The types of a version of Kubernetes, by name.
struct Types(BTreeMap<String, Value>);

impl Types {
    /// Reads the types in client-go's source, where they are YAML in a string.
    fn parse(source: &str) -> Self {
        let (_, types) = source.split_once("typed.YAMLObject(`").unwrap();
        let types: Value = serde_yaml::from_str(types.split_once('`').unwrap().0).unwrap();
        let types = types["types"].as_array().unwrap();
        Self(types.iter().map(|of| (of["name"].as_str().unwrap().to_owned(), of.clone())).collect())
    }

    /// Gets client-go with Go, whose cache keeps it. The error says why that is impossible here.
    fn download(version: &str) -> Result<Self, String> {
        let mut go = Command::new("go");
        go.args(["mod", "download", "-json", &format!("k8s.io/client-go@{version}")]);
        let output = go.output().map_err(|error| format!("go cannot be run: {error}"))?;
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let folder = answer["Dir"].as_str().ok_or_else(|| format!("client-go {version}: {}", answer["Error"]))?;
        let source = std::fs::read_to_string(Path::new(folder).join("applyconfigurations/internal/internal.go"));
        Ok(Self::parse(&source.unwrap()))
    }

    /// The faults of an object, each with the path of its field.
    fn faults(&self, object: &Value) -> Vec<String> {
        let (api, kind) = (object["apiVersion"].as_str().unwrap(), object["kind"].as_str().unwrap());
        let (group, version) = api.split_once('/').unwrap_or(("core", api));
        let package = group.split('.').next().unwrap();
        let name = format!("io.k8s.api.{package}.{version}.{kind}");
        if !self.0.contains_key(&name) {
            return vec![format!("there is no {kind} in {api}")];
        }
        let mut faults = Vec::new();
        self.look(&json!({ "namedType": name }), object, kind, &mut faults);
        faults
    }

    /// Adds the faults of a value at a path, which has to be of a type.
    fn look(&self, of: &Value, value: &Value, path: &str, faults: &mut Vec<String>) {
        let of = of["namedType"].as_str().map_or(of, |name| &self.0[name]);
        match value {
            Value::Null => {}
            Value::Object(fields) if of["map"].is_object() => {
                for (name, value) in fields {
                    let path = format!("{path}.{name}");
                    match field(&of["map"], name) {
                        Some(of) => self.look(of, value, &path, faults),
                        None => faults.push(format!("{path} is unknown")),
                    }
                }
            }
            Value::Array(values) if of["list"].is_object() => {
                for (index, value) in values.iter().enumerate() {
                    self.look(&of["list"]["elementType"], value, &format!("{path}[{index}]"), faults);
                }
            }
            _ if is_scalar(&of["scalar"], value) => {}
            _ => faults.push(format!("{path} is {value}")),
        }
    }
}

/// The type of a field: one of a list, or the same for all.
fn field<'a>(map: &'a Value, name: &str) -> Option<&'a Value> {
    let mut fields = map["fields"].as_array().into_iter().flatten();
    let its = fields.find(|field| field["name"] == name).map(|field| &field["type"]);
    its.or_else(|| map.get("elementType"))
}

fn is_scalar(of: &Value, value: &Value) -> bool {
    match of.as_str() {
        Some("untyped") => !value.is_object() && !value.is_array(),
        Some("string") => value.is_string(),
        Some("numeric") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        _ => false,
    }
}

/// The types of each supported version. `None`, with a report, if they cannot be had here.
fn all_types() -> Option<Vec<(&'static str, Types)>> {
    let all = VERSIONS.map(|(kubernetes, client)| Types::download(client).map(|types| (kubernetes, types)));
    match all.into_iter().collect::<Result<Vec<_>, String>>() {
        Ok(all) => Some(all),
        Err(reason) => {
            eprintln!("SKIPPED: objects are not compared with the types of Kubernetes 1.33 to 1.35: {reason}");
            None
        }
    }
}

fn has_types(object: &Value) -> bool {
    let group = object["apiVersion"].as_str().unwrap().split('/').next().unwrap();
    !OTHERS.contains(&group)
}

#[test]
fn each_supported_kubernetes_knows_the_charts_fields() {
    let (Some(helm), Some(all)) = (helm(), all_types()) else { return };
    for (version, types) in &all {
        let mut kinds = BTreeMap::new();
        for values in std::fs::read_dir(chart().join("ci")).unwrap() {
            let values = values.unwrap().path();
            let rendered = objects(&helm, &["--kube-version", version, "--values", values.to_str().unwrap()]);
            for object in rendered.iter().filter(|object| has_types(object)) {
                assert_eq!(types.faults(object), [""; 0], "Kubernetes {version}, {}", values.display());
                *kinds.entry(object["kind"].to_string()).or_insert(0) += 1;
            }
        }
        assert!(kinds.len() >= 11, "only {kinds:?} were compared");
    }
}

#[tokio::test]
async fn each_supported_kubernetes_knows_the_operators_fields() {
    let Some(all) = all_types() else { return };
    let mut applied = Vec::new();
    for manifest in [MANIFEST, CHECKPOINTS] {
        let world = World::new(manifest, vec![good()]);
        world.settle().await;
        applied.extend(world.api().applied());
    }
    let servers = crate::server::autoscaled().await;
    applied.extend(servers.api.lock().applied());
    for kind in ["StatefulSet", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "Service"] {
        assert!(applied.iter().any(|object| object["kind"] == kind), "no {kind} was applied");
    }
    for (version, types) in &all {
        for object in &applied {
            assert_eq!(types.faults(object), [""; 0], "Kubernetes {version}");
        }
    }
}

/// A field that came with a later version is a fault in an earlier one.
#[test]
fn a_field_of_a_later_kubernetes_is_found() {
    let Some(all) = all_types() else { return };
    let pod = json!({"hostnameOverride": "x", "replicaz": 1, "hostNetwork": "yes", "containers": {}});
    let deployment =
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": {"spec": pod}, "replicas": 1}});
    let path = "Deployment.spec.template.spec";
    let always = [
        format!("{path}.containers is {{}}"),
        format!("{path}.hostNetwork is \"yes\""),
        format!("{path}.replicaz is unknown"),
    ];
    for (version, types) in &all {
        let mut found = types.faults(&deployment);
        found.sort();
        let later = format!("{path}.hostnameOverride is unknown");
        assert_eq!(found.contains(&later), *version == "1.33", "{version}: {found:?}");
        found.retain(|fault| *fault != later);
        assert_eq!(found, always, "{version}");
        let none = json!({"apiVersion": "apps/v7", "kind": "Deployment"});
        assert_eq!(types.faults(&none), ["there is no Deployment in apps/v7"], "{version}");
    }
}
