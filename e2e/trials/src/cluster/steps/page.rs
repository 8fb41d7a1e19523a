//! The page of a job, as `rectrain page` shows it: through the API server while the job trains, and
//! from the checkpoint path after its end.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use rectrain_harness::command::{Running, command};
use rectrain_harness::files::{make_folder, read};
use rectrain_harness::jobs::{Jobs, NAMESPACE};
use rectrain_harness::manifests::with_checkpoints;
use rectrain_harness::waiting::eventually;
use rectrain_harness::workspace::built;
use rectrain_harness::{HarnessError, events, http, not_yet};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::{TestCluster, object_store};
use crate::error::unmet;

const NAME: &str = "paged";
/// Global steps between two checkpoints.
const EVERY: u64 = 200;
/// How long the page may take to show another step.
const STEP: Duration = Duration::from_secs(120);
/// How long the pods may take to end.
const REMOVAL: Duration = Duration::from_secs(180);
/// The mark before the data in a page, and the one behind them.
const DATA: (&str, &str) = ("id=\"data\">", "</script>");

pub(in crate::cluster) fn shows_its_page(cluster: &TestCluster) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    object_store::start(&cluster.paths, NAMESPACE)?;
    object_store::make_bucket(cluster.kubectl(), NAMESPACE)?;
    let rows = json!({"data": {"synthetic": {"rows": 600_000}}});
    jobs.submit(NAME, &with_checkpoints(&rows, NAME, EVERY))?;
    jobs.until_step_after(NAME, 0)?;
    while_it_trains(jobs)?;
    jobs.until_phase(NAME, "Complete")?;
    eventually(REMOVAL, "the end of all pods", || jobs.has_no_pods(NAME))?;
    after_the_end(cluster)?;
    Ok(jobs.delete(NAME)?)
}

/// A server on this machine forwards the page, which shows one step after the other.
fn while_it_trains(jobs: &Jobs) -> Result<(), TrialError> {
    let mut page = command(built("rectrain")?, ["page", NAME, "--namespace", NAMESPACE]);
    let mut page = Running::start(page.env("KUBECONFIG", jobs.kubectl().kubeconfig()).stdout(Stdio::piped()))?;
    let printed = page.0.stdout.take().ok_or(HarnessError::NoPipe { program: "rectrain page", stream: "output" })?;
    let mut line = String::new();
    BufReader::new(printed).read_line(&mut line).map_err(HarnessError::io("read", "the output of rectrain page"))?;
    let address = address_in(&line).ok_or_else(|| unmet("the address of the page", format!("{line:?}")))?;
    let document = http::get(address, "/")?;
    if !document.contains("<title>") {
        return Err(unmet("a page", document));
    }
    let first = step_on(address, 0)?;
    let later = step_on(address, first)?;
    println!("the page showed step {first}, and then step {later}");
    Ok(())
}

/// The address in `the page of paged: http://127.0.0.1:41234/`.
fn address_in(line: &str) -> Option<SocketAddr> {
    line.split_once("http://")?.1.trim_end().trim_end_matches('/').parse().ok()
}

/// The step that a page shows, once it is after `last`.
fn step_on(address: SocketAddr, last: u64) -> Result<u64, HarnessError> {
    eventually(STEP, &format!("a page with a step after {last}"), || {
        let job = events::parse("the page's data", &http::get(address, "/job.json?after=0&points=0")?)?;
        match job["step"].as_u64() {
            Some(step) if step > last && job["name"] == NAME => Ok(step),
            _ => Err(not_yet(format!("{} at step {}", job["name"], job["step"]))),
        }
    })
}

/// The page has the job's end, its curves and the digest of its model. Its record is in the object
/// store, which this machine reaches at another address than the pods.
fn after_the_end(cluster: &TestCluster) -> Result<(), TrialError> {
    let folder = cluster.paths.run();
    make_folder(&folder)?;
    let page = folder.join("paged.html");
    let file = page.display().to_string();
    let store = object_store::forward(cluster.kubectl(), NAMESPACE)?;
    let options = store.options();
    let mut words = vec!["page", NAME, "--output", &file];
    words.extend(options.iter().flat_map(|option| ["--option", option.as_str()]));
    cluster.jobs.rectrain(&words)?;
    let status = cluster.jobs.status(NAME)?;
    let run = record_in(&read(&page)?)?;
    for (found, expected) in [
        (&run["name"], &json!(NAME)),
        (&run["phase"], &json!("Complete")),
        (&run["step"], &status["summary"]["steps"]),
        (&digest_of(&run), &status["summary"]["parametersSha256"]),
    ] {
        if found != expected || expected.is_null() {
            return Err(unmet(format!("{expected} on the page of the ended job"), found));
        }
    }
    let points = run["curve"]["step"].as_array().map_or(0, Vec::len);
    println!("the page of the ended job: step {}, {points} points of its curves", run["step"]);
    if points > 0 { Ok(()) } else { Err(unmet("curves on the page of the ended job", &run["curve"])) }
}

/// The digest of the model, in the last event that has one.
fn digest_of(run: &Value) -> Value {
    let events = run["events"].as_array().into_iter().flatten();
    let mut digests = events.rev().map(|numbered| &numbered["event"]["parametersSha256"]);
    digests.find(|digest| digest.is_string()).cloned().unwrap_or_default()
}

/// The only run in the data of a page.
fn record_in(page: &str) -> Result<Value, TrialError> {
    let data = page.split_once(DATA.0).and_then(|(_, rest)| rest.split_once(DATA.1));
    let (data, _) = data.ok_or_else(|| unmet("a page with data", format!("{} bytes without", page.len())))?;
    Ok(events::parse("the data of the page", data)?["runs"][0].clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_a_page_is_read() {
        let line = "the page of paged: http://127.0.0.1:41234/\n";
        assert_eq!(address_in(line), Some(SocketAddr::from(([127, 0, 0, 1], 41234))));
        assert_eq!(address_in(""), None);
        assert_eq!(address_in("the page of paged: http://here/\n"), None);
    }

    #[test]
    fn the_data_of_a_page_have_the_digest_of_the_last_event() {
        let ended = r#"{"event": {"parametersSha256": "b"}}, {"event": {"event": "stopped"}}"#;
        let data = format!(r#"{{"runs": [{{"events": [{{"event": {{"parametersSha256": "a"}}}}, {ended}]}}]}}"#);
        let run = record_in(&format!("<p><script id=\"data\">{data}</script>")).unwrap();
        assert_eq!(digest_of(&run), "b");
        assert_eq!(digest_of(&Value::Null), Value::Null);
        assert!(record_in("<p>").is_err());
    }
}
