//! `rectrain page`: the record that a coordinator leaves beside the checkpoints, and the page of a
//! job in a cluster, with an API server of the test.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
#![cfg(feature = "cluster")]

mod binary;
mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use binary::{JOB, folder_with, training};
use common::{events, rectrain};

const CHECKPOINTS: [&str; 2] = ["--set", "spec.checkpoint.path=ck"];

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The data in a page.
fn data_of(page: &Path) -> Value {
    let page = std::fs::read_to_string(page).unwrap();
    let (_, data) = page.split_once("id=\"data\">").unwrap();
    serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap()
}

/// A folder with the checkpoints of a job that has ended, and the job's summary.
fn trained() -> (tempfile::TempDir, Value) {
    let folder = folder_with(JOB);
    let run = rectrain(folder.path(), &[&["run", "job.yaml", "--processes", "--json"], &CHECKPOINTS[..]].concat());
    let summary = events(&run).last().unwrap().clone();
    (folder, summary)
}

#[test]
fn the_page_of_an_ended_job_is_made_of_its_checkpoint_folder() {
    let (folder, summary) = trained();
    let made = rectrain(folder.path(), &["page", "./ck"]);
    assert!(made.status.success() && said(&made).contains("the page: test.html"), "{}", said(&made));
    let data = data_of(&folder.path().join("test.html"));
    let record = &data["runs"][0];
    assert_eq!((&record["phase"], &record["step"]), (&"Complete".into(), &summary["steps"]));
    let last = record["events"].as_array().unwrap().last().unwrap();
    assert_eq!(last["event"]["parametersSha256"], summary["parametersSha256"]);
    assert!(!record["curve"]["step"].as_array().unwrap().is_empty(), "{}", record["curve"]);
    let (manifest, options) = (record["manifest"].as_str().unwrap(), ["page", "./ck", "--output", "other.html"]);
    assert!(manifest.contains("globalBatchSize: 128"), "{manifest}");
    assert!(rectrain(folder.path(), &options).status.success());
    assert_eq!(data_of(&folder.path().join("other.html")), data);
    // The record is no checkpoint.
    let listed = said(&rectrain(folder.path(), &["checkpoint", "ls", "ck"]));
    assert!(!listed.contains("page.json"), "{listed}");
}

#[test]
fn a_record_that_cannot_be_written_does_not_fail_the_job() {
    let folder = folder_with(JOB);
    std::fs::create_dir_all(folder.path().join("ck/page.json/in the way")).unwrap();
    let run = rectrain(folder.path(), &[&["run", "job.yaml", "--processes", "--json"], &CHECKPOINTS[..]].concat());
    assert_eq!(events(&run).last().unwrap()["event"], "summary");
}

#[test]
fn the_page_of_a_job_on_this_machine_is_at_its_address() {
    let name = format!("paged-{}", std::process::id());
    let job = JOB.replace("name: test", &format!("name: {name}")).replace("rows: 3000", "rows: 30000000");
    let folder = folder_with(&job);
    let (mut run, _lines) = training(folder.path(), &["run", "job.yaml", "--json", "--no-history"]);
    let told = said(&rectrain(folder.path(), &["page", &name]));
    let address = told.trim_end().strip_prefix(&format!("the page of {name}: http://")).unwrap().trim_end_matches('/');
    assert!(get(address, "/job.json").contains(&format!("\"name\":\"{name}\"")), "{told}");
    run.kill().unwrap();
    run.wait().unwrap();
}

/// The response to a request for a path.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

#[test]
fn a_path_without_a_record_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refuse = |part: &str| {
        let output = rectrain(folder.path(), &["page", "./ck"]);
        assert!(output.status.code() == Some(2) && said(&output).contains(part), "{part}: {}", said(&output));
    };
    std::fs::create_dir(folder.path().join("ck")).unwrap();
    refuse("page.json: the coordinator of a job writes it when the job ends");
    std::fs::write(folder.path().join("ck/page.json"), "{").unwrap();
    refuse("page.json cannot be read");
    std::fs::write(folder.path().join("ck/page.json"), "{}").unwrap();
    refuse("it has no name");
    std::fs::write(folder.path().join("ck/page.json"), vec![b' '; (16 << 20) + 1]).unwrap();
    refuse("at most 16777216");
    assert!(!folder.path().join("job.html").exists());
}

/// An API server with one job, `clicks`. It notes the requests.
struct ApiServer {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
}

impl ApiServer {
    /// `page` is the status and the body of the answer of the coordinator's pod.
    fn start(checkpoints: Option<&str>, page: (u16, &'static str)) -> Self {
        let checkpoint = checkpoints.map(|path| json!({ "path": path })).unwrap_or_default();
        let job = json!({
            "apiVersion": "rectrain.dev/v1alpha1", "kind": "RecTrainingJob",
            "metadata": {"name": "clicks", "namespace": "ads"},
            "spec": {"model": {"kind": "lr"}, "features": {"sparse": [{"name": "C1"}]}, "data": {"synthetic": {}},
                "checkpoint": checkpoint},
            "status": {"phase": "Complete"},
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, asked) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let log = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                let Some(Ok(request)) = lines.next() else { continue };
                while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
                let path = request.split(' ').nth(1).unwrap().to_owned();
                let (status, body) = match path.contains("/proxy/") {
                    true => (page.0, page.1.to_owned()),
                    false => (200, job.to_string()),
                };
                log.lock().unwrap().push(path);
                let length = body.len();
                let answer =
                    format!("HTTP/1.1 {status} x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
                let _gone = stream.write_all(answer.as_bytes());
            }
        });
        Self { address, asked }
    }

    fn command(&self, folder: &Path, arguments: &[&str]) -> Command {
        let config = format!(
            "{{apiVersion: v1, kind: Config, current-context: t, users: [{{name: u, user: {{}}}}],
              clusters: [{{name: c, cluster: {{server: 'http://{}'}}}}],
              contexts: [{{name: t, context: {{cluster: c, user: u, namespace: ads}}}}]}}",
            self.address
        );
        std::fs::write(folder.join("kubeconfig"), config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_rectrain"));
        command.args(arguments).current_dir(folder).env("KUBECONFIG", folder.join("kubeconfig"));
        command
    }
}

const PROXY: &str = "/api/v1/namespaces/ads/pods/clicks-coordinator-0:9090/proxy/job.json";

#[test]
fn the_page_of_a_running_job_comes_through_the_api_server() {
    let folder = tempfile::tempdir().unwrap();
    let server = ApiServer::start(None, (200, r#"{"name": "clicks"}"#));
    let mut child = server.command(folder.path(), &["page", "clicks"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let (_, address) = line.split_once("http://").unwrap();
    let address = address.split('/').next().unwrap();
    let answer = get(address, "/job.json?after=7&points=9");
    assert!(answer.ends_with(r#"{"name": "clicks"}"#), "{answer}");
    let asked = server.asked.lock().unwrap().clone();
    assert_eq!(asked.last().unwrap(), &format!("{PROXY}?after=7&points=9"), "{asked:?}");
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert!(child.wait().unwrap().success());
}

#[test]
fn the_page_of_an_ended_job_comes_from_its_checkpoint_path() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("page.json"), r#"{"name": "clicks", "phase": "Complete"}"#).unwrap();
    let checkpoints = folder.path().to_str().unwrap();
    let server = ApiServer::start(Some(checkpoints), (404, "no such pod"));
    let made = server.command(folder.path(), &["page", "clicks"]).output().unwrap();
    assert!(made.status.success(), "{}", said(&made));
    assert_eq!(data_of(&folder.path().join("clicks.html"))["runs"][0]["phase"], "Complete");

    std::fs::remove_file(folder.path().join("page.json")).unwrap();
    let missing = server.command(folder.path(), &["page", "clicks"]).output().unwrap();
    let text = said(&missing);
    assert_eq!(missing.status.code(), Some(2), "{text}");
    for part in ["no such pod", "its phase is Complete", "page.json", "where the volume is mounted"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let server = ApiServer::start(None, (404, "no such pod"));
    let text = said(&server.command(folder.path(), &["page", "clicks"]).output().unwrap());
    assert!(text.contains("sets no spec.checkpoint.path"), "{text}");
    let server = ApiServer::start(None, (403, "forbidden: pods/proxy"));
    let refused = server.command(folder.path(), &["page", "clicks"]).output().unwrap();
    assert!(refused.status.code() == Some(1) && said(&refused).contains("pods/proxy"), "{}", said(&refused));
}
