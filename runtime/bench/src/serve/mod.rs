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

use std::time::Duration;

use comfy_table::Table;
use serde::Serialize;
use serde_json::Value;

use self::connection::{Connection, post};
use self::floor::{floor_seconds, layers};
use self::load::{Outcomes, Requests, closed, open, poisson};
use self::requests::{Draw, inputs};
use self::target::Target;
use crate::zipf::Random;
use crate::{BenchError, median, table};

/// Distinct requests, which are sent in turns.
const DISTINCT: usize = 512;
/// The load before the first measurement.
const WARM_UP: Duration = Duration::from_secs(2);
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
    closed(&requests, WARM_UP)?;
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
    let status = connection.exchange(&requests.bytes[0])?;
    let body = String::from_utf8_lossy(connection.body());
    let answer: Value = serde_json::from_str(&body).unwrap_or_default();
    match answer["outputs"][0]["data"].as_array() {
        Some(data) if status == 200 && data.len() == candidates => Ok(()),
        _ => {
            let body: String = body.chars().take(500).collect();
            let expected = format!("expected {candidates} probabilities");
            Err(BenchError::Ended(format!("the server answers with status {status}, {expected}: {body}")))
        }
    }
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
            json: false,
            serve: Vec::new(),
        }
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
