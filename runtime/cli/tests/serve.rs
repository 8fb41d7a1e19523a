//! `rectrain serve` answers with the predictions of `rectrain predict`, over HTTP.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;
mod trained;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::{Value, json};

use common::rectrain;
use trained::{TEST_ROWS, export, largest_difference, probabilities, report, train};

/// A server, which is killed at the end of its test.
struct Server {
    process: Child,
    address: String,
    /// The path of the model.
    path: String,
}

impl Server {
    fn start(folder: &Path, model: &str) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_rectrain"))
            .args(["serve", model, "--listen", "127.0.0.1:0"])
            .current_dir(folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (_, url) = line.trim().split_once("http://").unwrap_or_else(|| panic!("no address: {line:?}"));
        let (address, path) = url.split_once('/').unwrap();
        Self { process, address: address.to_owned(), path: format!("/{path}") }
    }

    /// The status and the body of the response to a request.
    fn exchange(&self, head: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        let request =
            format!("{head} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn get(&self, path: &str) -> String {
        let (status, body) = self.exchange(&format!("GET {path}"), "");
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// The probabilities of the rows of these tensors.
    fn infer(&self, inputs: &[Value]) -> Vec<f64> {
        let request = json!({ "inputs": inputs }).to_string();
        let (status, body) = self.exchange(&format!("POST {}/infer", self.path), &request);
        assert_eq!(status, 200, "{body}");
        let response: Value = serde_json::from_str(&body).unwrap();
        serde_json::from_value(response["outputs"][0]["data"].clone()).unwrap()
    }

    /// The value of a metric; 0 if it has none.
    fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics");
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or(0.0)
    }

    /// Ends the server by SIGTERM.
    fn terminate(mut self) -> ExitStatus {
        let sent = Command::new("kill").args(["-TERM", &self.process.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()));
        self.process.wait().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Neither matters after `terminate`.
        let _ended = self.process.kill();
        let _waited = self.process.wait();
    }
}

/// The cells of a column of the test rows.
fn cells(folder: &Path, column: &str) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("test.csv")).unwrap();
    let mut lines = text.lines();
    let place = lines.next().unwrap().split(',').position(|name| name == column).unwrap();
    lines.map(|line| line.split(',').nth(place).unwrap().to_owned()).collect()
}

fn texts(name: &str, cells: &[String]) -> Value {
    json!({ "name": name, "shape": [cells.len()], "datatype": "BYTES", "data": cells })
}

/// Numbers, with null for an empty cell.
fn numbers(name: &str, datatype: &str, cells: &[String]) -> Value {
    let values: Vec<Option<f64>> = cells.iter().map(|cell| cell.parse().ok()).collect();
    json!({ "name": name, "shape": [cells.len()], "datatype": datatype, "data": values })
}

const FEATURES: [&str; 5] = ["user", "city", "tags", "age", "balance"];

/// Predicts all test rows by requests of 50 rows.
fn infer_all(server: &Server, columns: &[Vec<String>], tensor: impl Fn(&str, &[String]) -> Value) -> Vec<f64> {
    let starts = (0..TEST_ROWS as usize).step_by(50);
    let request = |start: usize| {
        let part = |cells: &[String]| cells[start..(start + 50).min(cells.len())].to_vec();
        let inputs: Vec<Value> = FEATURES.iter().zip(columns).map(|(name, cells)| tensor(name, &part(cells))).collect();
        server.infer(&inputs)
    };
    starts.flat_map(request).collect()
}

#[test]
fn answers_are_the_predictions_of_files() {
    for model in ["dlrm", "wideDeep", "lr"] {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        train(folder, model, &[]);
        assert!(export(folder, "export", "f32").status.success(), "{model}");
        let predicted = report(folder, &["export", "--input", "test.csv", "--output", "a.csv"]);
        let own = probabilities(folder, "a.csv");
        let columns = FEATURES.map(|name| cells(folder, name));
        let server = Server::start(folder, "export");
        let by_texts = infer_all(&server, &columns, texts);
        assert!(largest_difference(&own, &by_texts) < 1e-6, "{model}");
        for (feature, share) in predicted["unseen"].as_object().unwrap() {
            let count = |metric: &str| server.metric(&format!("rectrain_inference_{metric}{{feature=\"{feature}\"}}"));
            let unseen = count("unseen_ids_total") / count("ids_total");
            assert!((unseen - share.as_f64().unwrap()).abs() < 1e-9, "{model}, {feature}: {unseen} and {share}");
        }
        assert!(predicted["unseen"]["user"].as_f64().unwrap() > 0.0);
        let by_numbers = infer_all(&server, &columns, |name, cells| match name {
            "age" => numbers(name, "FP32", cells),
            "balance" => numbers(name, "FP64", cells),
            _ => texts(name, cells),
        });
        assert!(largest_difference(&own, &by_numbers) < 1e-6, "{model}");
        assert_eq!(server.metric("rectrain_inference_rows_total"), f64::from(2 * TEST_ROWS));
        assert_eq!(server.terminate().code(), Some(0), "{model}");
    }
}

#[test]
fn one_user_with_many_candidates_is_as_many_rows_of_the_user() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "deepfm", &[]);
    let [_, cities, tags, ages, balances] = FEATURES.map(|name| cells(folder, name));
    // A checkpoint serves as well.
    let server = Server::start(folder, "checkpoints");
    assert_eq!(server.path, "/v2/models/test");
    let (user, tag) = (["u7".to_owned()], ["t1|t2".to_owned()]);
    let rows = cities.len();
    let repeat = |cell: &[String; 1]| vec![cell[0].clone(); rows];
    let candidates = [texts("city", &cities), numbers("age", "FP32", &ages), texts("balance", &balances)];
    let short = [&[texts("user", &user), texts("tags", &tag)], &candidates[..]].concat();
    let long = [&[texts("user", &repeat(&user)), texts("tags", &repeat(&tag))], &candidates[..]].concat();
    let answers = server.infer(&short);
    assert_eq!((answers.len(), &answers), (rows, &server.infer(&long)));
    assert!(answers.iter().any(|answer| (answer - answers[0]).abs() > 1e-3), "all are equal");
    // Lists of values are the cells with separators.
    let lists: Vec<Value> = tags
        .iter()
        .map(|cell| {
            let mut items: Vec<Value> = cell.split('|').map(Value::from).collect();
            items.resize(4, Value::Null);
            items.into()
        })
        .collect();
    let lists = json!({ "name": "tags", "shape": [rows, 4], "datatype": "BYTES", "data": lists });
    let by_lists = server.infer(&[&[texts("user", &user), lists], &candidates[..]].concat());
    let by_cells = server.infer(&[&[texts("user", &user), texts("tags", &tags)], &candidates[..]].concat());
    assert_eq!(by_lists, by_cells);
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "lr", &[]);
    let missing = rectrain(folder, &["serve", "nowhere"]);
    let message = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(missing.status.code() == Some(2) && message.contains("nowhere"), "{message}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let refused = rectrain(folder, &["serve", "checkpoints", "--listen", &address]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && message.contains(&format!("cannot listen on {address}")), "{message}");
    assert!(message.contains("choose another address with --listen"), "{message}");
    let refused = rectrain(folder, &["serve", "checkpoints", "--listen", "127.0.0.1:0", "--grpc", &address]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(message.contains("choose another address with --grpc"), "{message}");
}
