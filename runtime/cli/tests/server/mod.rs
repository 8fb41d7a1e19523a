//! `rectrain serve` as a process, and requests to it, for the tests of commands that serve.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::{Value, json};

use crate::trained::TEST_ROWS;

/// A server, which is killed at the end of its test.
pub struct Server {
    process: Child,
    address: String,
    /// The path of the model.
    pub path: String,
}

impl Server {
    pub fn start(folder: &Path, model: &str, arguments: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_rectrain"))
            .args(["serve", model, "--listen", "127.0.0.1:0"])
            .args(arguments)
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
    pub fn exchange(&self, head: &str, body: &str) -> (u16, String) {
        exchange_at(&self.address, head, body)
    }

    /// The status, the head and the body of the response to a request.
    pub fn exchange_whole(&self, head: &str, body: &str) -> (u16, String, String) {
        exchange_whole_at(&self.address, head, body)
    }

    pub fn get(&self, path: &str) -> String {
        let (status, body) = self.exchange(&format!("GET {path}"), "");
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// The probabilities of the rows of these tensors.
    pub fn infer(&self, inputs: &[Value]) -> Vec<f64> {
        let request = json!({ "inputs": inputs }).to_string();
        let (status, body) = self.exchange(&format!("POST {}/infer", self.path), &request);
        assert_eq!(status, 200, "{body}");
        let response: Value = serde_json::from_str(&body).unwrap();
        serde_json::from_value(response["outputs"][0]["data"].clone()).unwrap()
    }

    /// The value of a metric; 0 if it has none.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics");
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or(0.0)
    }

    /// Ends the server by SIGTERM.
    pub fn terminate(mut self) -> ExitStatus {
        let sent = Command::new("kill").args(["-TERM", &self.process.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()));
        self.process.wait().unwrap()
    }
}

/// The status and the body of the response to a request.
pub fn exchange_at(address: &str, head: &str, body: &str) -> (u16, String) {
    let (status, _, body) = exchange_whole_at(address, head, body);
    (status, body)
}

fn exchange_whole_at(address: &str, head: &str, body: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let length = body.len();
    let request =
        format!("{head} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), head.to_owned(), body.to_owned())
}

impl Drop for Server {
    fn drop(&mut self) {
        // Neither matters after `terminate`.
        let _ended = self.process.kill();
        let _waited = self.process.wait();
    }
}

/// The cells of a column of the test rows.
pub fn cells(folder: &Path, column: &str) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("test.csv")).unwrap();
    let mut lines = text.lines();
    let place = lines.next().unwrap().split(',').position(|name| name == column).unwrap();
    lines.map(|line| line.split(',').nth(place).unwrap().to_owned()).collect()
}

pub fn texts(name: &str, cells: &[String]) -> Value {
    json!({ "name": name, "shape": [cells.len()], "datatype": "BYTES", "data": cells })
}

/// Numbers, with null for an empty cell.
pub fn numbers(name: &str, datatype: &str, cells: &[String]) -> Value {
    let values: Vec<Option<f64>> = cells.iter().map(|cell| cell.parse().ok()).collect();
    json!({ "name": name, "shape": [cells.len()], "datatype": datatype, "data": values })
}

pub const FEATURES: [&str; 5] = ["user", "city", "tags", "age", "balance"];

/// Predicts all test rows by requests of 50 rows.
pub fn infer_all(server: &Server, columns: &[Vec<String>], tensor: impl Fn(&str, &[String]) -> Value) -> Vec<f64> {
    let starts = (0..TEST_ROWS as usize).step_by(50);
    let request = |start: usize| {
        let part = |cells: &[String]| cells[start..(start + 50).min(cells.len())].to_vec();
        let inputs: Vec<Value> = FEATURES.iter().zip(columns).map(|(name, cells)| tensor(name, &part(cells))).collect();
        server.infer(&inputs)
    };
    starts.flat_map(request).collect()
}
