//! The API server in memory, behind the service that a `kube::Client` calls.

use std::collections::BTreeMap;
use std::sync::Arc;

use http::{Method, Request, Response, StatusCode};
use jiff::SignedDuration;
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::faults::Fault;
use super::{NAMESPACE, now};

/// Objects by plural and name; all of one namespace.
#[derive(Default)]
pub struct ApiServer {
    objects: BTreeMap<(String, String), Value>,
    /// The objects that the operator last applied.
    applied: BTreeMap<(String, String), Value>,
    revision: u64,
    identity: u64,
    /// Calls so far.
    pub calls: usize,
    /// Calls without an answer yet.
    under_way: usize,
    /// The most calls under way at a time.
    pub most_under_way: usize,
    /// Every call: method, plural, name.
    pub log: Vec<String>,
    /// The number of the call that fails, from 1, and its fault.
    pub fault: Option<(usize, Fault)>,
    /// Woken when the operator is killed.
    pub killed: Arc<tokio::sync::Notify>,
    /// Refused writes by plural: code and message.
    pub refused: BTreeMap<String, (u16, String)>,
    /// Why StatefulSets create no pods: the message of their events.
    pub pods_refused: Option<String>,
    /// A text that is refused in a StatefulSet, in dry runs as well; code and message of the
    /// answer.
    pub refused_text: Option<(String, u16, String)>,
    /// A patch of the status of pods, which do not run then.
    pub pod_status: Option<Value>,
    /// A patch of the status of the pod with a name.
    pub status_of: BTreeMap<String, Value>,
    /// A quota: the most pods.
    pub most_pods: Option<usize>,
}

/// A client of `api`.
pub fn client(api: &Arc<Mutex<ApiServer>>) -> Client {
    let api = Arc::clone(api);
    let service = tower::service_fn(move |request: Request<Body>| {
        let api = Arc::clone(&api);
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect_bytes().await?;
            api.lock().arrive();
            // Other calls at the same time come next.
            tokio::task::yield_now().await;
            let (answer, killed) = api.lock().serve(&parts.method, &parts.uri.to_string(), &body);
            if let Some(killed) = killed {
                killed.notify_one();
                return std::future::pending().await;
            }
            let (status, body) = answer;
            let status = StatusCode::from_u16(status).unwrap();
            let response = Response::builder().status(status).header("content-type", "application/json");
            Ok::<_, kube::Error>(response.body(Body::from(serde_json::to_vec(&body).unwrap())).unwrap())
        }
    });
    Client::new(service, NAMESPACE)
}

type Answer = (u16, Value);

impl ApiServer {
    pub fn revision(&self) -> u64 {
        self.revision
    }

    pub fn get(&self, plural: &str, name: &str) -> Option<&Value> {
        self.objects.get(&key(plural, name))
    }

    pub fn get_mut(&mut self, plural: &str, name: &str) -> Option<&mut Value> {
        self.objects.get_mut(&key(plural, name))
    }

    pub fn list(&self, plural: &str) -> Vec<&Value> {
        self.objects.iter().filter(|((p, _), _)| p == plural).map(|(_, object)| object).collect()
    }

    /// Plural and name of everything that the operator has created.
    pub fn made(&self) -> Vec<(String, String)> {
        let by_others = ["rectrainingjobs", "pods", "events"];
        self.objects.keys().filter(|(plural, _)| !by_others.contains(&plural.as_str())).cloned().collect()
    }

    /// The objects as the operator last applied them, without fields that others set.
    pub fn applied(&self) -> Vec<Value> {
        self.applied.values().cloned().collect()
    }

    /// Another client changed the object.
    pub fn touch(&mut self, plural: &str, name: &str) {
        self.revision += 1;
        let revision = self.revision.to_string();
        if let Some(object) = self.get_mut(plural, name) {
            object["metadata"]["resourceVersion"] = json!(revision);
        }
    }

    pub fn create(&mut self, plural: &str, mut object: Value) {
        self.revision += 1;
        self.identity += 1;
        object["metadata"]["uid"] = json!(format!("uid-{}", self.identity));
        object["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        object["metadata"]["generation"] = json!(1);
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        self.objects.insert(key(plural, &name), object);
    }

    /// Removes an object and its dependents.
    pub fn remove(&mut self, plural: &str, name: &str) {
        let Some(gone) = self.objects.remove(&key(plural, name)) else { return };
        self.applied.remove(&key(plural, name));
        self.revision += 1;
        let uid = gone["metadata"]["uid"].clone();
        let owned: Vec<(String, String)> = self
            .objects
            .iter()
            .filter(|(_, object)| {
                let owners = object["metadata"]["ownerReferences"].as_array();
                owners.into_iter().flatten().any(|owner| owner["uid"] == uid)
            })
            .map(|(key, _)| key.clone())
            .collect();
        for (plural, name) in owned {
            self.remove(&plural, &name);
        }
    }

    fn arrive(&mut self) {
        self.under_way += 1;
        self.most_under_way = self.most_under_way.max(self.under_way);
    }

    fn serve(&mut self, method: &Method, uri: &str, body: &[u8]) -> (Answer, Option<Arc<tokio::sync::Notify>>) {
        self.under_way -= 1;
        self.calls += 1;
        let fault = self.fault.filter(|(at, _)| *at == self.calls).map(|(_, fault)| fault);
        let answer = match fault {
            Some(fault) if !fault.is_done() => failure(fault),
            Some(fault) => {
                self.answer(method, uri, body);
                failure(fault)
            }
            None => self.answer(method, uri, body),
        };
        let killed = fault.filter(|fault| fault.kills()).map(|_| Arc::clone(&self.killed));
        (answer, killed)
    }

    fn answer(&mut self, method: &Method, uri: &str, body: &[u8]) -> Answer {
        let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
        let (_, rest) = path.split_once(&format!("/namespaces/{NAMESPACE}/")).expect("a namespaced path");
        let mut parts = rest.split('/');
        let plural = parts.next().unwrap();
        let name = parts.next().unwrap_or_default();
        let subresource = parts.next().unwrap_or_default();
        self.log.push(format!("{method} {plural} {name} {subresource}").trim().to_owned());
        let body: Value = if body.is_empty() { Value::Null } else { serde_json::from_slice(body).unwrap() };
        if *method != Method::GET
            && let Some((code, message)) = self.refused.get(plural)
        {
            return error(*code, message);
        }
        match (method.as_str(), name, subresource) {
            ("GET", "", _) if plural == "events" => self.answer_events(query),
            ("GET", "", _) => self.answer_list(plural, query),
            ("GET", name, "") => self.get(plural, name).map_or_else(|| error(404, "not found"), |o| (200, o.clone())),
            ("POST", "", _) => {
                self.create(plural, body.clone());
                (201, body)
            }
            ("PATCH", name, "") if plural == "events" => self.count_event(name, &body),
            ("PATCH", name, "") => self.answer_apply(plural, name, query, body),
            ("PUT", name, "status") => self.replace_status(plural, name, body),
            ("DELETE", name, "") => self.delete(plural, name, &body),
            other => panic!("the operator called {other:?} of {plural}"),
        }
    }

    /// An event happens again.
    fn count_event(&mut self, name: &str, patch: &Value) -> Answer {
        let event = self.get_mut("events", name).unwrap();
        overlay(event, patch);
        (200, event.clone())
    }

    fn answer_apply(&mut self, plural: &str, name: &str, query: &str, body: Value) -> Answer {
        assert!(query.contains("fieldManager=rectrain-operator"), "applied by another owner: {query}");
        if let Some((text, code, why)) = &self.refused_text
            && body.to_string().contains(text)
        {
            return error(*code, why);
        }
        if query.contains("dryRun=All") {
            return (200, body);
        }
        self.apply(plural, name, body)
    }

    fn answer_list(&self, plural: &str, query: &str) -> Answer {
        let selector = query.split('&').find_map(|part| part.strip_prefix("labelSelector=")).unwrap_or_default();
        let selector = selector.replace("%3D", "=").replace("%2F", "/");
        let selected = |object: &&Value| match selector.split_once('=') {
            Some((label, value)) => object["metadata"]["labels"][label] == value,
            None => plural == "rectrainingjobs",
        };
        let items: Vec<Value> = self.list(plural).into_iter().filter(selected).cloned().collect();
        assert!(!selector.is_empty() || plural == "rectrainingjobs", "{plural} are selected by label");
        let list = json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "1"}, "items": items});
        (200, list)
    }

    /// The events about one object, perhaps of one reason.
    fn answer_events(&self, query: &str) -> Answer {
        let selector = query.split('&').find_map(|part| part.strip_prefix("fieldSelector=")).unwrap_or_default();
        let selector = selector.replace("%3D", "=").replace("%2C", ",");
        let (uid, reason) =
            selector.split_once(",reason=").map_or((&*selector, None), |(uid, reason)| (uid, Some(reason)));
        let uid = uid.strip_prefix("involvedObject.uid=").expect("events are selected by object");
        let is_it = |event: &&Value| {
            event["involvedObject"]["uid"] == uid && reason.is_none_or(|reason| event["reason"] == reason)
        };
        let items: Vec<Value> = self.list("events").into_iter().filter(is_it).cloned().collect();
        (200, json!({"apiVersion": "v1", "kind": "EventList", "metadata": {"resourceVersion": "1"}, "items": items}))
    }

    fn apply(&mut self, plural: &str, name: &str, wanted: Value) -> Answer {
        let key = key(plural, name);
        if self.objects.contains_key(&key) {
            let mut object = self.objects[&key].clone();
            if object["immutable"] == json!(true) && object["data"] != wanted["data"] {
                return error(422, "field is immutable when `immutable` is set");
            }
            if let Some(before) = self.applied.get(&key) {
                drop_unapplied(&mut object, before, &wanted);
            }
            overlay(&mut object, &wanted);
            if object != self.objects[&key] {
                if object["spec"] != self.objects[&key]["spec"] {
                    object["metadata"]["generation"] =
                        json!(object["metadata"]["generation"].as_i64().unwrap_or(1) + 1);
                }
                self.revision += 1;
                object["metadata"]["resourceVersion"] = json!(self.revision.to_string());
                self.objects.insert(key.clone(), object);
            }
        } else {
            self.create(plural, wanted.clone());
        }
        self.applied.insert(key.clone(), wanted);
        (200, self.objects[&key].clone())
    }

    fn replace_status(&mut self, plural: &str, name: &str, body: Value) -> Answer {
        let Some(object) = self.get(plural, name) else { return error(404, "not found") };
        if body["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
            return error(409, "the object has been modified");
        }
        let status = body["status"].clone();
        if object["status"] != status {
            self.get_mut(plural, name).unwrap()["status"] = status;
            self.touch(plural, name);
        }
        (200, self.get(plural, name).unwrap().clone())
    }

    fn delete(&mut self, plural: &str, name: &str, options: &Value) -> Answer {
        let Some(object) = self.get(plural, name).cloned() else { return error(404, "not found") };
        let wanted = &options["preconditions"]["uid"];
        assert!(wanted.is_string(), "a deletion without the object's identity");
        if *wanted != object["metadata"]["uid"] {
            return error(409, "the object is another one");
        }
        self.remove(plural, name);
        (200, object)
    }

    /// The controller of StatefulSets and the kubelet: pods exist, run and are ready within one
    /// tick.
    pub fn run_stateful_sets(&mut self) {
        let sets: Vec<Value> = self.list("statefulsets").into_iter().cloned().collect();
        let names: Vec<String> = sets.iter().map(|set| set["metadata"]["name"].as_str().unwrap().to_owned()).collect();
        let orphans: Vec<String> = self
            .list("pods")
            .iter()
            .map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned())
            .filter(|pod| !names.iter().any(|set| pod.rsplit_once('-').is_some_and(|(of, _)| of == set)))
            .collect();
        assert!(orphans.is_empty(), "{orphans:?} have no StatefulSet");
        for set in sets {
            self.run_set(&set);
        }
    }

    fn run_set(&mut self, set: &Value) {
        let name = set["metadata"]["name"].as_str().unwrap().to_owned();
        let replicas = set["spec"]["replicas"].as_u64().unwrap();
        let pods: Vec<String> = self
            .list("pods")
            .iter()
            .map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned())
            .filter(|pod| pod.rsplit_once('-').is_some_and(|(of, _)| of == name))
            .collect();
        for pod in &pods {
            let index: u64 = pod.rsplit_once('-').unwrap().1.parse().unwrap();
            if index >= replicas || self.is_terminating(pod) {
                self.end_pod(pod);
            }
        }
        if let Some(why) = self.pods_refused.clone() {
            self.refuse_pods(&name, set, &why);
            return;
        }
        for index in 0..replicas {
            let pod_name = format!("{name}-{index}");
            if self.get("pods", &pod_name).is_some() {
                continue;
            }
            if self.most_pods.is_some_and(|most| self.list("pods").len() >= most) {
                self.refuse_pod(&name, set, &pod_name);
                return;
            }
            self.start_pod(set, &pod_name, index);
        }
        let ready = self.ready_pods(&name);
        self.write_set_status(&name, json!({"replicas": replicas, "readyReplicas": ready}));
    }

    fn write_set_status(&mut self, name: &str, status: Value) {
        if let Some(set) = self.get_mut("statefulsets", name)
            && set["status"] != status
        {
            set["status"] = status;
            self.touch("statefulsets", name);
        }
    }

    fn pods_of(&self, set: &str) -> Vec<&Value> {
        let mut pods = self.list("pods");
        pods.retain(|pod| {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            name.rsplit_once('-').is_some_and(|(of, _)| of == set)
        });
        pods
    }

    /// Ready pods of a StatefulSet.
    fn ready_pods(&self, set: &str) -> usize {
        if self.pod_status.is_some() {
            return 0;
        }
        self.pods_of(set).into_iter().filter(|pod| is_ready(pod)).count()
    }

    /// The quota is used up: the pods that exist stay, and an event tells the reason.
    fn refuse_pod(&mut self, name: &str, set: &Value, pod: &str) {
        let generation = &self.get("statefulsets", name).unwrap()["metadata"]["generation"];
        let (made, ready) = (self.pods_of(name).len(), self.ready_pods(name));
        let status = json!({"observedGeneration": generation, "replicas": made, "readyReplicas": ready});
        self.write_set_status(name, status);
        let why = format!(
            "create Pod {pod} in StatefulSet {name} failed error: pods \"{pod}\" is forbidden: exceeded quota: pods"
        );
        let event = json!({"metadata": {"name": format!("{name}.quota"), "namespace": NAMESPACE}, "reason": "FailedCreate",
            "involvedObject": {"uid": set["metadata"]["uid"]}, "message": why});
        if self.get("events", &format!("{name}.quota")).is_none_or(|known| known["message"] != why) {
            self.create("events", event);
        }
    }

    fn is_terminating(&self, pod: &str) -> bool {
        self.get("pods", pod).is_some_and(|pod| !pod["metadata"]["deletionTimestamp"].is_null())
    }

    /// A pod ends, within its grace period. Finalizers keep its object.
    pub fn end_pod(&mut self, name: &str) {
        let Some(pod) = self.get_mut("pods", name) else { return };
        if pod["metadata"]["finalizers"].as_array().is_none_or(Vec::is_empty) {
            self.remove("pods", name);
        } else if pod["metadata"]["deletionTimestamp"].is_null() {
            pod["metadata"]["deletionTimestamp"] = json!((now() + SignedDuration::from_secs(30)).to_string());
            pod["status"]["conditions"][0]["status"] = json!("False");
            self.touch("pods", name);
        }
    }

    fn refuse_pods(&mut self, name: &str, set: &Value, why: &str) {
        let status = json!({"observedGeneration": set["metadata"]["generation"], "replicas": 0});
        if set["status"] != status && set["spec"]["replicas"] != 0 {
            self.get_mut("statefulsets", name).unwrap()["status"] = status;
            self.touch("statefulsets", name);
            let event = json!({"metadata": {"name": format!("{name}.1"), "namespace": NAMESPACE}, "reason": "FailedCreate",
                "involvedObject": {"uid": set["metadata"]["uid"]}, "message": why});
            self.create("events", event);
        }
    }

    fn start_pod(&mut self, set: &Value, name: &str, index: u64) {
        let template = &set["spec"]["template"];
        let mut pod =
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]});
        pod["metadata"]["name"] = json!(name);
        pod["metadata"]["namespace"] = json!(NAMESPACE);
        pod["metadata"]["labels"]["apps.kubernetes.io/pod-index"] = json!(index.to_string());
        pod["metadata"]["ownerReferences"] = json!([{
            "apiVersion": "apps/v1", "kind": "StatefulSet", "controller": true,
            "name": set["metadata"]["name"], "uid": set["metadata"]["uid"],
        }]);
        let number = self.identity + 1;
        pod["status"] = json!({
            "phase": "Running",
            "podIP": format!("10.{}.{}.{}", number >> 16 & 255, number >> 8 & 255, number & 255),
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [{"name": "rectrain", "restartCount": 0, "ready": true, "image": "", "imageID": "",
                "state": {"running": {"startedAt": "2027-01-15T08:00:00Z"}}}],
        });
        for patch in self.pod_status.iter().chain(self.status_of.get(name)) {
            overlay(&mut pod["status"], patch);
        }
        self.create("pods", pod);
    }

    pub fn outline(&self) -> Value {
        let mut all = json!({});
        for ((plural, name), object) in &self.objects {
            if plural == "events" {
                continue;
            }
            let mut object = object.clone();
            forget(
                &mut object,
                &[
                    "uid",
                    "resourceVersion",
                    "generation",
                    "lastTransitionTime",
                    "startTime",
                    "completionTime",
                    "lastProgressTime",
                    "lastRestartTime",
                    "notBefore",
                    "podIP",
                    "acceptedBy",
                ],
            );
            all[format!("{plural}/{name}")] = object;
        }
        all
    }
}

/// Whether a pod is ready.
pub fn is_ready(pod: &Value) -> bool {
    let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

fn key(plural: &str, name: &str) -> (String, String) {
    (plural.to_owned(), name.to_owned())
}

fn failure(fault: Fault) -> Answer {
    match fault {
        Fault::Conflict => error(409, "the object has been modified"),
        _ => error(504, "the request did not complete within the time allowed"),
    }
}

fn error(code: u16, message: &str) -> Answer {
    let reason = match code {
        404 => "NotFound",
        409 => "Conflict",
        422 => "Invalid",
        403 => "Forbidden",
        _ => "Timeout",
    };
    let status = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message,
        "metadata": {},
    });
    (code, status)
}

/// Removes fields that the owner applied before and does not apply now.
fn drop_unapplied(object: &mut Value, before: &Value, wanted: &Value) {
    let (Some(object), Some(before)) = (object.as_object_mut(), before.as_object()) else { return };
    for (field, before) in before {
        match wanted.get(field) {
            None => {
                object.remove(field);
            }
            Some(wanted) => {
                if let Some(object) = object.get_mut(field) {
                    drop_unapplied(object, before, wanted);
                }
            }
        }
    }
}

fn overlay(object: &mut Value, wanted: &Value) {
    match (object, wanted) {
        (Value::Object(object), Value::Object(wanted)) => {
            for (field, value) in wanted {
                overlay(object.entry(field.clone()).or_insert(Value::Null), value);
            }
        }
        (object, wanted) => *object = wanted.clone(),
    }
}

fn forget(value: &mut Value, fields: &[&str]) {
    match value {
        Value::Object(object) => {
            object.retain(|field, _| !fields.contains(&field.as_str()));
            object.values_mut().for_each(|value| forget(value, fields));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| forget(item, fields)),
        _ => {}
    }
}
