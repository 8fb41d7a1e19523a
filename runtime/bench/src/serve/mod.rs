//! Puts `rectrain serve` under load: the rate that saturates it, and latencies below that rate.
//!
//! A request has one user and many candidates. The load has three parts:
//!
//! 1. A closed load: each connection sends as soon as it has an answer. Its answers a second are
//!    the saturating rate.
//! 2. Open loads at shares of this rate. Requests arrive as a Poisson process, and latencies count
//!    from the arrival ([`load`]).
//! 3. The floor: the matrix products of the tower alone ([`floor`]).
//!
//! The clients run on the machine of the server, and take a part of its processors.

mod connection;
mod floor;
mod latencies;
mod load;
mod requests;
mod target;

use std::path::{Path, PathBuf};
use std::time::Duration;

use comfy_table::Table;
use serde::Serialize;
use serde_json::{Value, json};

use self::connection::{Connection, post};
use self::floor::{floor_seconds, layers};
use self::load::{Outcomes, Requests, closed, open, poisson};
use self::requests::{Draw, inputs};
use self::target::Target;
use crate::error::BenchError;
use crate::figures::{median, table};
use crate::zipf::Random;

/// Distinct requests, which are sent in turns.
const DISTINCT: usize = 512;
/// The longest load before the first measurement, in seconds.
const WARM_UP: f64 = 2.0;
/// The limits only catch typing errors.
const MOST_CONNECTIONS: usize = 1024;
const MOST_SECONDS: f64 = 3600.0;
const MOST_CANDIDATES: usize = 1 << 20;

#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    /// The model, as for `rectrain serve`; or the URL that a running server has printed
    pub model: String,
    /// Candidates of a request
    #[arg(long, default_value_t = 200)]
    pub candidates: usize,
    /// Users, drawn by Zipf's law
    #[arg(long, default_value_t = 1_000_000)]
    pub users: u64,
    /// Ids of each sparse feature, drawn by Zipf's law; also the number of candidates
    #[arg(long, default_value_t = 100_000)]
    pub ids: u64,
    /// Exponent of Zipf's law, not 1
    #[arg(long, default_value_t = 1.05)]
    pub zipf: f64,
    /// Features of the user, which a request has once; by default the first half of the sparse and
    /// of the dense ones
    #[arg(long, value_name = "FEATURE,…", value_delimiter = ',')]
    pub user_features: Vec<String>,
    /// Open loads, as shares of the saturating rate
    #[arg(long, value_name = "SHARE,…", value_delimiter = ',', default_values_t = [0.5, 0.8])]
    pub loads: Vec<f64>,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 10.0)]
    pub seconds: f64,
    /// Measurements of the saturating rate, which is their median
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Connections, with one request at a time each
    #[arg(long, default_value_t = 32)]
    pub connections: usize,
    /// Widths of the tower's layers, for the time of their matrix products alone
    #[arg(long, default_value = "13-512-256-16,367-512-256-1")]
    pub layers: String,
    /// Also write each distinct request and the server's answer into this file, as a line of JSON
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Also print a line of JSON
    #[arg(long)]
    pub json: bool,
    /// Arguments for `rectrain serve`, after `--`
    #[arg(last = true)]
    pub serve: Vec<String>,
}

/// The figures of [`bench_serve`].
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServeFigures {
    pub candidates: usize,
    /// The mean bytes of a request's body.
    pub request_bytes: usize,
    pub connections: usize,
    /// Answers a second of the closed load.
    pub saturating_requests_per_second: f64,
    /// Candidates a second of the closed load.
    pub saturating_rows_per_second: f64,
    pub loads: Vec<LoadFigures>,
    /// The matrix products of a request alone, on one thread.
    pub floor_milliseconds: f64,
}

/// The figures of an open load. Latencies are in milliseconds, and count from the arrival.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadFigures {
    /// The share of the saturating rate.
    pub load: f64,
    pub arrivals: usize,
    pub arrivals_per_second: f64,
    pub answers_per_second: f64,
    pub p50: Option<f64>,
    pub p90: Option<f64>,
    pub p99: Option<f64>,
    pub p999: Option<f64>,
    pub longest: f64,
    /// Requests that the server had no room for (status 429).
    pub shed: u64,
    /// All other requests without an answer.
    pub failed: u64,
}

/// Puts a server under load.
///
/// # Errors
/// [`BenchError::Argument`]; a server that does not start, or that does not answer.
pub fn bench_serve(args: &ServeArgs) -> Result<ServeFigures, BenchError> {
    check(args)?;
    let layers = layers(&args.layers)?;
    let target = Target::open(&args.model, &args.serve)?;
    let inputs = inputs(&target.metadata()?, &args.user_features)?;
    let mut draw = Draw::new(args, &inputs);
    let bodies: Vec<String> = (0..DISTINCT).map(|_| draw.body()).collect();
    let path = format!("{}/infer", target.path);
    let bytes: Vec<Vec<u8>> = bodies.iter().map(|body| post(&target.address, &path, body)).collect();
    let requests = Requests { address: &target.address, bytes: &bytes, connections: args.connections };
    check_answer(&requests, args.candidates)?;
    if let Some(path) = &args.save {
        save(path, &requests, &bodies, args.candidates)?;
    }
    closed(&requests, Duration::from_secs_f64(args.seconds.min(WARM_UP)))?;
    let rate = saturating_rate(&requests, args)?;
    let mut random = Random::new(3);
    let loads = args.loads.iter().map(|load| measure(&requests, *load, rate, args.seconds, &mut random));
    Ok(ServeFigures {
        candidates: args.candidates,
        request_bytes: bodies.iter().map(String::len).sum::<usize>() / DISTINCT,
        connections: args.connections,
        saturating_requests_per_second: rate,
        saturating_rows_per_second: rate * args.candidates as f64,
        loads: loads.collect::<Result<_, _>>()?,
        floor_milliseconds: 1e3 * floor_seconds(&layers, args.candidates),
    })
}

fn check(args: &ServeArgs) -> Result<(), BenchError> {
    let counts = [
        ("candidates", args.candidates, 1..=MOST_CANDIDATES, "1 to 1048576"),
        ("connections", args.connections, 1..=MOST_CONNECTIONS, "1 to 1024"),
        ("rounds", args.rounds, 1..=1000, "1 to 1000"),
    ];
    for (argument, found, range, expected) in counts {
        if !range.contains(&found) {
            return Err(BenchError::Argument { argument, found: found.to_string(), expected });
        }
    }
    for (argument, found) in [("users", args.users), ("ids", args.ids)] {
        if found == 0 {
            return Err(BenchError::Argument { argument, found: found.to_string(), expected: "at least 1" });
        }
    }
    let numbers = [
        ("seconds", args.seconds, args.seconds > 0.0 && args.seconds <= MOST_SECONDS, "above 0, at most 3600"),
        ("zipf", args.zipf, args.zipf > 0.0 && args.zipf < 10.0 && args.zipf != 1.0, "above 0, below 10, and not 1"),
    ];
    let loads = args.loads.iter().map(|load| ("loads", *load, *load > 0.0 && *load <= 2.0, "above 0, at most 2"));
    for (argument, found, is_right, expected) in numbers.into_iter().chain(loads) {
        if !is_right {
            return Err(BenchError::Argument { argument, found: found.to_string(), expected });
        }
    }
    Ok(())
}

/// Sends the first request, and checks the number of its probabilities.
fn check_answer(requests: &Requests<'_>, candidates: usize) -> Result<(), BenchError> {
    let mut connection = Connection::open(requests.address)?;
    probabilities(&mut connection, &requests.bytes[0], candidates).map(drop)
}

/// Sends a request; returns its probabilities, one for each candidate.
fn probabilities(connection: &mut Connection, request: &[u8], candidates: usize) -> Result<Value, BenchError> {
    let status = connection.exchange(request)?;
    let body = String::from_utf8_lossy(connection.body());
    let mut answer: Value = serde_json::from_str(&body).unwrap_or_default();
    let count = answer["outputs"][0]["data"].as_array().map(Vec::len);
    if status == 200 && count == Some(candidates) {
        return Ok(answer["outputs"][0]["data"].take());
    }
    let body: String = body.chars().take(500).collect();
    let expected = format!("expected {candidates} probabilities");
    Err(BenchError::Ended(format!("the server answers with status {status}, {expected}: {body}")))
}

/// Writes each request with its probabilities as a line of JSON.
fn save(path: &Path, requests: &Requests<'_>, bodies: &[String], candidates: usize) -> Result<(), BenchError> {
    let mut connection = Connection::open(requests.address)?;
    let mut lines = String::new();
    for (body, bytes) in bodies.iter().zip(requests.bytes) {
        let request: Value = serde_json::from_str(body)?;
        let probabilities = probabilities(&mut connection, bytes, candidates)?;
        lines.push_str(&json!({ "request": request, "probabilities": probabilities }).to_string());
        lines.push('\n');
    }
    std::fs::write(path, lines).map_err(|source| BenchError::NotWritten { path: path.display().to_string(), source })
}

/// The median of the rounds of a closed load, in answers a second.
fn saturating_rate(requests: &Requests<'_>, args: &ServeArgs) -> Result<f64, BenchError> {
    let time = Duration::from_secs_f64(args.seconds);
    let rates: std::io::Result<Vec<f64>> =
        (0..args.rounds).map(|_| closed(requests, time).map(|outcomes| outcomes.rate())).collect();
    let rate = median(rates?);
    if rate > 0.0 { Ok(rate) } else { Err(BenchError::Ended("the server answered no request".to_owned())) }
}

fn measure(
    requests: &Requests<'_>,
    load: f64,
    saturating: f64,
    seconds: f64,
    random: &mut Random,
) -> Result<LoadFigures, BenchError> {
    let rate = load * saturating;
    let arrivals = poisson(rate, seconds, random);
    let outcomes = open(requests, &arrivals)?;
    let Outcomes { latencies, shed, failed, .. } = &outcomes;
    Ok(LoadFigures {
        load,
        arrivals: arrivals.len(),
        arrivals_per_second: rate,
        answers_per_second: outcomes.rate(),
        p50: latencies.quantile(0.5),
        p90: latencies.quantile(0.9),
        p99: latencies.quantile(0.99),
        p999: latencies.quantile(0.999),
        longest: latencies.longest(),
        shed: *shed,
        failed: *failed,
    })
}

impl ServeFigures {
    pub(crate) fn table(&self) -> Table {
        let mut table =
            table(&["load", "requests/s", "answers/s", "p50 ms", "p90", "p99", "p99.9", "longest", "shed", "failed"]);
        let rate = |rate: f64| format!("{rate:.1}");
        let saturating = rate(self.saturating_requests_per_second);
        table.add_row(["closed: saturating".to_owned(), String::new(), saturating]);
        for of in &self.loads {
            let latency = |latency: Option<f64>| latency.map_or_else(String::new, |latency| format!("{latency:.2}"));
            table.add_row([
                format!("open: {:.0} %", 100.0 * of.load),
                rate(of.arrivals_per_second),
                rate(of.answers_per_second),
                latency(of.p50),
                latency(of.p90),
                latency(of.p99),
                latency(of.p999),
                latency(Some(of.longest)),
                of.shed.to_string(),
                of.failed.to_string(),
            ]);
        }
        let floor = self.floor_milliseconds;
        let alone = ["floor: gemm alone".to_owned(), String::new(), rate(1e3 / floor), format!("{floor:.2}")];
        table.add_row(alone);
        table
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Ten ids, and seven candidates a request.
    pub(super) fn args(model: &str) -> ServeArgs {
        ServeArgs {
            model: model.to_owned(),
            candidates: 7,
            users: 5,
            ids: 10,
            zipf: 1.05,
            user_features: Vec::new(),
            loads: vec![0.5],
            seconds: 0.1,
            rounds: 1,
            connections: 1,
            layers: "3-4-1".to_owned(),
            save: None,
            json: false,
            serve: Vec::new(),
        }
    }

    /// Reads a request, and returns its first line and its body. `None` if the client has gone.
    fn request(stream: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
        let (mut first, mut line, mut length) = (String::new(), String::new(), 0);
        stream.read_line(&mut first).ok().filter(|read| *read > 0)?;
        while stream.read_line(&mut line).ok()? > 2 {
            if let Some(value) = line.strip_prefix("Content-Length: ") {
                length = value.trim().parse().ok()?;
            }
            line.clear();
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).ok()?;
        Some((first, body))
    }

    /// The response of a model with two sparse features and a dense one.
    fn response(first: &str, body: &[u8]) -> Value {
        if first.starts_with("GET /v2/models/m ") {
            let input = |name: &str, datatype: &str| json!({ "name": name, "datatype": datatype });
            return json!({ "inputs": [input("user", "BYTES"), input("item", "BYTES"), input("age", "FP32")] });
        }
        assert!(first.starts_with("POST /v2/models/m/infer "), "{first}");
        let body: Value = serde_json::from_slice(body).unwrap();
        let rows = body["inputs"].as_array().unwrap().iter().map(|input| input["shape"][0].as_u64().unwrap()).max();
        json!({ "outputs": [{ "data": vec![0.5; rows.unwrap() as usize] }] })
    }

    /// A server of such a model. Returns its URL.
    fn server() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = BufReader::new(stream.unwrap());
                std::thread::spawn(move || {
                    while let Some((first, body)) = request(&mut stream) {
                        let body = response(&first, &body).to_string();
                        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
                        if stream.get_mut().write_all((head + &body).as_bytes()).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        format!("http://{address}/v2/models/m")
    }

    #[test]
    fn a_server_has_a_saturating_rate_and_latencies_below_it() {
        let figures = bench_serve(&ServeArgs { connections: 3, loads: vec![0.2, 0.4], ..args(&server()) }).unwrap();
        assert!(figures.saturating_requests_per_second > 0.0 && figures.floor_milliseconds > 0.0);
        assert_eq!(figures.loads.len(), 2);
        for (of, load) in figures.loads.iter().zip([0.2, 0.4]) {
            assert_eq!((of.load, of.shed, of.failed), (load, 0, 0));
            assert!(of.p50 <= of.p99 && of.p99 <= Some(of.longest), "{of:?}");
        }
        // A server of another number of rows is told.
        let other = ServeArgs { user_features: vec!["item".to_owned(), "age".to_owned()], ..args(&server()) };
        assert!(bench_serve(&ServeArgs { candidates: 9, ..other.clone() }).is_ok());
        let all = ServeArgs { user_features: ["user", "item", "age"].map(str::to_owned).to_vec(), ..other };
        let error = bench_serve(&all).unwrap_err().to_string();
        assert!(error.contains("expected 7 probabilities"), "{error}");
    }

    #[test]
    fn the_requests_are_saved_with_their_answers() {
        let path = std::env::temp_dir().join(format!("rectrain-requests-{}.jsonl", std::process::id()));
        bench_serve(&ServeArgs { save: Some(path.clone()), ..args(&server()) }).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), DISTINCT);
        for line in &lines {
            let shapes = line["request"]["inputs"].as_array().unwrap().iter().map(|input| input["shape"].clone());
            assert_eq!(shapes.collect::<Vec<Value>>(), [1, 7, 7].map(|rows| json!([rows])));
            assert_eq!(line["probabilities"], json!(vec![0.5; 7]));
        }
        let nowhere = ServeArgs { save: Some(path.join("file")), ..args(&server()) };
        let error = bench_serve(&nowhere).unwrap_err().to_string();
        assert!(error.starts_with("cannot write ") && error.contains("rectrain-requests-"), "{error}");
    }

    #[test]
    fn arguments_out_of_range_are_refused_by_name() {
        let base = || args("model");
        for (wrong, argument) in [
            (ServeArgs { candidates: 0, ..base() }, "--candidates 0"),
            (ServeArgs { connections: 2000, ..base() }, "--connections 2000"),
            (ServeArgs { users: 0, ..base() }, "--users 0"),
            (ServeArgs { zipf: 1.0, ..base() }, "--zipf 1"),
            (ServeArgs { seconds: f64::NAN, ..base() }, "--seconds NaN"),
            (ServeArgs { loads: vec![0.5, 0.0], ..base() }, "--loads 0"),
            (ServeArgs { layers: "3".to_owned(), ..base() }, "--layers 3"),
        ] {
            let error = bench_serve(&wrong).unwrap_err();
            assert!(error.is_user_error() && error.to_string().contains(argument), "{error}");
        }
    }

    #[test]
    fn the_table_has_the_saturating_rate_each_load_and_the_floor() {
        let load = LoadFigures {
            load: 0.5,
            arrivals: 100,
            arrivals_per_second: 50.0,
            answers_per_second: 49.5,
            p50: Some(1.25),
            p90: Some(2.0),
            p99: Some(3.5),
            p999: None,
            longest: 4.0,
            shed: 1,
            failed: 2,
        };
        let figures = ServeFigures {
            candidates: 200,
            request_bytes: 30_000,
            connections: 32,
            saturating_requests_per_second: 100.0,
            saturating_rows_per_second: 20_000.0,
            loads: vec![load],
            floor_milliseconds: 0.5,
        };
        let text = figures.table().to_string();
        for part in ["closed: saturating", "100.0", "open: 50 %", "3.50", "floor: gemm alone", "2000.0"] {
            assert!(text.contains(part), "{part}:\n{text}");
        }
    }
}
