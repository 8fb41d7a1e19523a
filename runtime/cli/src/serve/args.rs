//! The arguments of `rectrain serve`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use jiff::SignedDuration;
use rectrain_inference::{Limits, RecordOptions, TlsFiles};
use rectrain_kinds::Precision;

/// The longest time of an argument. Longer ones are taken for errors.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// The default of `--poll` in a folder, and in a bucket.
const POLL_FOLDER: Duration = Duration::from_millis(20);
const POLL_BUCKET: Duration = Duration::from_secs(1);
/// The most bytes of recorded requests.
const MAX_RECORD_BYTES: u64 = 64 << 20;

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The model: a folder of `rectrain checkpoint export --for serving`, a checkpoint, a path with
    /// checkpoints (the newest is used), or a path of spec.serving.publish (newer models are taken
    /// while the server runs)
    pub(super) model: String,
    /// The name of the model in requests; by default the name of its job
    #[arg(long)]
    pub(super) name: Option<String>,
    /// The address that serves REST and /metrics (port 0 takes any free port)
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    pub(super) listen: SocketAddr,
    /// The address that serves gRPC; by default there is none
    #[arg(long, value_name = "ADDRESS")]
    pub(super) grpc: Option<SocketAddr>,
    /// The certificate of the server and of its intermediate authorities, in PEM: both addresses
    /// then speak TLS; changed files are taken within seconds
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The key of --tls-cert, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// The authorities of clients' certificates, in PEM: clients without a certificate then get no
    /// more than the health of the server
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Recorded requests, which are predicted before the server answers: one body of a request for
    /// REST a line
    #[arg(long, value_name = "FILE")]
    pub(super) warm_up: Option<PathBuf>,
    /// The longest time of --warm-up: no further request is begun then
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time, requires = "warm_up")]
    pub(super) warm_up_time: Duration,
    /// Write a sample of the requests to this file, for --warm-up; an existing file is continued
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Record each N-th request
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..), requires = "record")]
    record_every: u64,
    /// The most requests in the file of --record, which also has at most 64 MiB
    #[arg(long, value_name = "REQUESTS", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..), requires = "record")]
    record_max_requests: u64,
    /// Rows that are predicted at a time, of requests that wait together
    #[arg(long, value_name = "ROWS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(super) max_batch_rows: u32,
    /// The longest time that a request waits for others to share its batch: `500us`, `5ms`, `0s`
    #[arg(long, value_name = "TIME", default_value = "1ms", value_parser = time)]
    pub(super) max_wait: Duration,
    /// Rows that may wait for the model; beyond them requests get status 429
    #[arg(long, value_name = "ROWS", default_value_t = 1 << 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) max_queued_rows: u32,
    /// Requests in progress; beyond them requests get status 429
    #[arg(long, value_name = "REQUESTS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(super) max_requests: u32,
    /// Rows of a request
    #[arg(long, value_name = "ROWS", default_value_t = 1 << 14, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(super) max_request_rows: u32,
    /// Bytes of the body of a request
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
    pub(super) max_body_bytes: u32,
    /// The time within which a request is answered; a request may ask for less with the header
    /// x-request-timeout-ms
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time_above_zero)]
    pub(super) timeout: Duration,
    /// The time after SIGTERM in which the server is not ready but still accepts requests, so that
    /// load balancers notice
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = time)]
    pub(super) drain: Duration,
    /// Log requests that take this long, at most one a second
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = time)]
    pub(super) slow: Duration,
    /// The time between two looks for a newer published model; by default 20ms in a folder, and 1s
    /// in a bucket, where each look is a request
    #[arg(long, value_name = "TIME", value_parser = time_above_zero)]
    poll: Option<Duration>,
    /// Held-out rows with labels, files as in spec.data: a model whose AUC on them is below
    /// --gate-min-auc is not taken, and the one before goes on serving
    #[arg(long, value_name = "FILE", num_args = 1.., requires = "gate_min_auc")]
    pub(super) gate_rows: Vec<String>,
    /// The least AUC of a model on --gate-rows, from 0 to 1
    #[arg(long, value_name = "AUC", requires = "gate_rows", value_parser = share)]
    pub(super) gate_min_auc: Option<f64>,
    /// The replicas of a shard of the rows, each HOST:PORT of a `rectrain serving-ps`, with commas:
    /// one such option for each shard, in their order. The server then holds the dense part and a
    /// cache of rows. Needs a path of spec.serving.publish
    #[arg(long, value_name = "HOST:PORT,HOST:PORT", value_parser = replicas)]
    pub(super) rows_from: Vec<Replicas>,
    /// Keys in the cache of rows
    #[arg(long, value_name = "ROWS", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(0..=1 << 30))]
    pub(super) cache_rows: u32,
    /// A look-up without a reply after this time goes to another replica of the shard as well
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = time_above_zero)]
    pub(super) hedge: Duration,
    /// Threads that compute; 0 means one for each core
    #[arg(long, default_value_t = 0)]
    pub(super) threads: usize,
    /// Precision of the products of linear layers: fp32 or bf16
    #[arg(long, default_value = "fp32")]
    pub(super) precision: Precision,
    /// An option of the model's object store: `--option endpoint=http://127.0.0.1:9000`
    #[arg(long = "option", value_name = "NAME=VALUE")]
    pub(super) options: Vec<String>,
}

/// The addresses of the replicas of a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Replicas(pub(super) Vec<String>);

fn replicas(text: &str) -> Result<Replicas, String> {
    let is_address =
        |text: &&str| text.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    let addresses: Vec<&str> = text.split(',').map(str::trim).collect();
    match addresses.iter().find(|address| !is_address(address)) {
        Some(wrong) => Err(format!("found `{wrong}`, expected addresses such as HOST:8090, with commas")),
        None => Ok(Replicas(addresses.into_iter().map(str::to_owned).collect())),
    }
}

/// The time between two looks for a newer published model, if no argument says it.
pub(crate) fn default_poll(path: &str) -> Duration {
    if path.contains("://") { POLL_BUCKET } else { POLL_FOLDER }
}

impl ServeArgs {
    /// The time between two looks for a newer published model.
    pub(super) fn poll(&self) -> Duration {
        self.poll.unwrap_or(default_poll(&self.model))
    }

    /// The files of the TLS certificate, if both addresses speak TLS.
    pub(super) fn tls(&self) -> Option<TlsFiles> {
        let (certificate, key) = self.tls_cert.clone().zip(self.tls_key.clone())?;
        Some(TlsFiles { certificate, key, client_authority: self.tls_client_ca.clone() })
    }

    /// The recording of requests, if there is one.
    pub(super) fn recording(&self) -> Option<RecordOptions> {
        let file = self.record.clone()?;
        let (every, max_requests) = (self.record_every, self.record_max_requests);
        Some(RecordOptions { file, every, max_requests, max_bytes: MAX_RECORD_BYTES })
    }

    pub(super) fn limits(&self) -> Limits {
        Limits {
            max_batch_rows: self.max_batch_rows as usize,
            max_wait: self.max_wait,
            max_queued_rows: self.max_queued_rows as usize,
            max_requests: self.max_requests as usize,
            max_request_rows: self.max_request_rows as usize,
            max_body_bytes: self.max_body_bytes as usize,
            timeout: self.timeout,
            drain: self.drain,
            slow: self.slow,
        }
    }
}

/// Parses a time such as `500us`, `5ms` or `2s`.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    let found = text.parse::<SignedDuration>().ok().and_then(|time| Duration::try_from(time).ok());
    let found = found.filter(|time| *time <= LONGEST);
    found.ok_or_else(|| "expected a time such as 500us, 5ms or 2s, of at most 24h".to_owned())
}

fn share(text: &str) -> Result<f64, String> {
    let found = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    found.ok_or_else(|| "expected a number from 0 to 1".to_owned())
}

pub(crate) fn time_above_zero(text: &str) -> Result<Duration, String> {
    time(text).and_then(|time| if time.is_zero() { Err("expected a time above 0".to_owned()) } else { Ok(time) })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn parse(arguments: &[&str]) -> Result<ServeArgs, clap::Error> {
        match Cli::try_parse_from([&["rectrain", "serve"], arguments].concat())?.command {
            Command::Serve(args) => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_defaults_are_the_servers() {
        assert_eq!(parse(&["model"]).unwrap().limits(), Limits::default());
    }

    #[test]
    fn times_have_units() {
        let args =
            parse(&["model", "--max-wait", "500us", "--timeout", "2s", "--drain", "1m", "--slow", "0s"]).unwrap();
        let times = [args.max_wait, args.timeout, args.drain, args.slow];
        assert_eq!(times.map(|time| time.as_micros()), [500, 2_000_000, 60_000_000, 0]);
        for (option, value) in [("--max-wait", "5"), ("--max-wait", "-5ms"), ("--drain", "25h"), ("--timeout", "0s")] {
            let message = parse(&["model", &format!("{option}={value}")]).unwrap_err().to_string();
            assert!(message.contains("expected a time"), "{option} {value}: {message}");
        }
    }

    #[test]
    fn a_bucket_is_looked_at_less_often_than_a_folder() {
        for (arguments, milliseconds) in [
            (&["published/clicks"][..], 20),
            (&["gs://models/published/clicks"], 1000),
            (&["gs://models/published/clicks", "--poll", "50ms"], 50),
        ] {
            assert_eq!(parse(arguments).unwrap().poll().as_millis(), milliseconds, "{arguments:?}");
        }
        let message = parse(&["model", "--poll=0s"]).unwrap_err().to_string();
        assert!(message.contains("expected a time above 0"), "{message}");
    }

    #[test]
    fn a_certificate_has_a_key() {
        let args = parse(&["model", "--tls-cert", "a.crt", "--tls-key", "a.key"]).unwrap();
        let (certificate, key) = ("a.crt".into(), "a.key".into());
        assert_eq!(args.tls(), Some(TlsFiles { certificate, key, client_authority: None }));
        assert_eq!(parse(&["model"]).unwrap().tls(), None);
        for wrong in [&["--tls-cert", "a.crt"][..], &["--tls-key", "a.key"], &["--tls-client-ca", "ca.crt"]] {
            let message = parse(&[&["model"], wrong].concat()).unwrap_err().to_string();
            assert!(message.contains("required arguments were not provided"), "{message}");
        }
    }

    #[test]
    fn a_sample_is_a_part_of_the_requests_and_bounded() {
        let args = parse(&["model", "--record", "a.jsonl", "--record-every", "7"]).unwrap();
        let options = args.recording().unwrap();
        assert_eq!((options.every, options.max_requests, options.max_bytes), (7, 10_000, 64 << 20));
        assert_eq!(parse(&["model"]).unwrap().recording(), None);
        for wrong in [&["--record-every=7"][..], &["--warm-up-time=1s"], &["--record=a", "--record-every=0"]] {
            assert!(parse(&[&["model"], wrong].concat()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn each_shard_has_an_option_with_its_replicas() {
        let args = parse(&["published", "--rows-from", "a0:8090,a1:8090", "--rows-from", "b0:8090", "--hedge", "2ms"]);
        let args = args.unwrap();
        let shards: Vec<Vec<String>> = args.rows_from.into_iter().map(|replicas| replicas.0).collect();
        assert_eq!(shards, [vec!["a0:8090".to_owned(), "a1:8090".to_owned()], vec!["b0:8090".to_owned()]]);
        assert_eq!((args.cache_rows, args.hedge.as_millis()), (100_000, 2));
        for wrong in ["a0", "a0:8090,", ":8090", "a0:port"] {
            let message = parse(&["published", "--rows-from", wrong]).unwrap_err().to_string();
            assert!(message.contains("expected addresses such as HOST:8090"), "{message}");
        }
    }

    #[test]
    fn a_gate_has_rows_and_a_bound() {
        let args = parse(&["model", "--gate-min-auc", "0.7", "--gate-rows", "a.csv", "b.csv"]).unwrap();
        assert_eq!((args.gate_rows, args.gate_min_auc), (vec!["a.csv".to_owned(), "b.csv".to_owned()], Some(0.7)));
        for wrong in [&["--gate-min-auc", "0.7"][..], &["--gate-rows", "a.csv"]] {
            let message = parse(&[&["model"], wrong].concat()).unwrap_err().to_string();
            assert!(message.contains("required arguments were not provided"), "{message}");
        }
        let message = parse(&["model", "--gate-rows", "a.csv", "--gate-min-auc", "70"]).unwrap_err().to_string();
        assert!(message.contains("expected a number from 0 to 1"), "{message}");
    }

    #[test]
    fn the_example_of_kserve_has_arguments_of_this_command() {
        let example = include_str!("../../../../docs/examples/kserve/serving-runtime.yaml");
        let arguments: Vec<String> = example
            .lines()
            .skip_while(|line| line.trim() != "args:")
            .skip(1)
            .map_while(|line| Some(line.trim().strip_prefix("- ")?.trim_matches('"').to_owned()))
            .collect();
        let line = std::iter::once("rectrain").chain(arguments.iter().map(String::as_str));
        let Command::Serve(args) = Cli::try_parse_from(line).unwrap().command else { panic!("{arguments:?}") };
        assert_eq!((args.model.as_str(), args.name.as_deref()), ("/mnt/models", Some("{{.Name}}")));
        assert_eq!(args.listen.port(), 8080);
        assert!(!args.drain.is_zero());
    }
}
