//! Compares the data plane with bare TCP on loopback, in one run. It measures the round trip of a
//! small request, and the throughput of large replies, as a parameter server sends them for a
//! look-up.
//!
//! Server and client have one thread each, like two processes on two cores. In both cases the
//! server makes each reply by copying a vector, in place of a look-up. Bare TCP uses std's blocking
//! calls, and its client reads into one buffer again and again. The wire's caller gets a new vector
//! each time. Rounds of both alternate.
//!
//! An allocator that returns large vectors to the kernel costs the wire page faults with every
//! reply. mimalloc, the allocator of `rectrain`, does not.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use comfy_table::Table;
use rectrain_wire::{
    Address, BoxFuture, Channel, Frame, Peer, Refusal, Service, Serving, TcpConfig, TcpTransport, Transport,
    WireCounters,
};
use serde::Serialize;
use tokio::runtime::{Builder, Runtime};

use crate::error::BenchError;
use crate::figures::{median, table};

const SMALL: u16 = 1;
const LARGE: u16 = 2;
/// Bytes of a small request and of its reply on bare TCP. The wire adds a header.
const SMALL_BYTES: usize = 64;
/// Replies in flight at once.
const AHEAD: usize = 4;
const DEADLINE: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, clap::Args)]
pub struct WireArgs {
    /// Bytes of a large reply
    #[arg(long, default_value_t = 4 << 20)]
    pub bytes: usize,
    /// Rounds; each measures bare TCP and the wire
    #[arg(long, default_value_t = 9)]
    pub rounds: usize,
    /// Large replies per round
    #[arg(long, default_value_t = 60)]
    pub replies: usize,
    /// Small requests per round
    #[arg(long, default_value_t = 2_000)]
    pub requests: usize,
    /// Also print a line of JSON
    #[arg(long)]
    pub json: bool,
}

/// The figures of [`bench_wire`]: medians of the rounds.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WireFigures {
    /// Seconds of a small request, called from a task.
    pub round_trip_seconds: f64,
    pub bare_round_trip_seconds: f64,
    /// Throughput of large replies, with [`AHEAD`] in flight.
    pub bytes_per_second: f64,
    pub bare_bytes_per_second: f64,
    /// The wire's throughput relative to bare TCP's in the same round.
    pub throughput_ratio: f64,
    /// The same with one reply in flight.
    pub single_throughput_ratio: f64,
    pub reply_bytes: usize,
}

impl WireFigures {
    pub(crate) fn table(&self) -> Table {
        let mut table = table(&["", "bare TCP", "wire", "ratio", "unit"]);
        let mut row = |name: &str, bare: f64, wire: f64, ratio: f64, digits: usize, unit: &str| {
            let number = |value: f64| format!("{value:.digits$}");
            table.add_row([name.to_owned(), number(bare), number(wire), format!("{ratio:.2}"), unit.to_owned()]);
        };
        let (bare, wire) = (self.bare_round_trip_seconds * 1e6, self.round_trip_seconds * 1e6);
        row("small request, round trip", bare, wire, wire / bare, 1, "µs");
        let (bare, wire) = (self.bare_bytes_per_second / 1e9, self.bytes_per_second / 1e9);
        row(&format!("replies, {AHEAD} in flight"), bare, wire, self.throughput_ratio, 2, "GB/s");
        table.add_row(["replies, one in flight", "", "", &format!("{:.2}", self.single_throughput_ratio), ""]);
        table
    }
}

/// Measures the round trip and the throughput.
///
/// # Errors
/// [`BenchError::Argument`], or a failure of loopback.
pub fn bench_wire(args: &WireArgs) -> Result<WireFigures, BenchError> {
    for (argument, found) in
        [("bytes", args.bytes / 4), ("rounds", args.rounds), ("replies", args.replies), ("requests", args.requests)]
    {
        if found == 0 {
            let expected = if argument == "bytes" { "at least 4" } else { "at least 1" };
            return Err(BenchError::Argument { argument, found: found.to_string(), expected });
        }
    }
    let rows: Vec<f32> = (0..args.bytes / 4).map(|i| i as f32).collect();
    let mut bare = Bare::connect(rows.clone())?;
    let counters = WireCounters::unregistered(|kind| if kind == SMALL { "small" } else { "large" })
        .map_err(|error| BenchError::Ended(error.to_string()))?;
    let (server, client) = (runtime()?, runtime()?);
    let tcp = TcpTransport::new(TcpConfig::default(), counters);
    let serving = serve(&server, &tcp, rows)?;
    let channel = tcp.connect(serving.address())?;
    let mut rounds = Vec::with_capacity(args.rounds);
    for _ in 0..args.rounds {
        let mut both = |ahead| -> Result<_, BenchError> {
            let bare = bare.throughput(args.replies, ahead)?;
            let wire = on_worker(&client, throughput(channel.clone(), args.replies, ahead, args.bytes))?;
            Ok((bare, wire))
        };
        let (single, several) = (both(1)?, both(AHEAD)?);
        let bare_round_trip = bare.round_trip(args.requests)?;
        let round_trip = on_worker(&client, round_trip(channel.clone(), args.requests))?;
        rounds.push(Round { round_trip, bare_round_trip, single, several });
    }
    let middle = |of: fn(&Round) -> f64| median(rounds.iter().map(of).collect());
    Ok(WireFigures {
        round_trip_seconds: middle(|round| round.round_trip),
        bare_round_trip_seconds: middle(|round| round.bare_round_trip),
        bytes_per_second: middle(|round| round.several.1),
        bare_bytes_per_second: middle(|round| round.several.0),
        throughput_ratio: middle(|round| round.several.1 / round.several.0),
        single_throughput_ratio: middle(|round| round.single.1 / round.single.0),
        reply_bytes: args.bytes / 4 * 4,
    })
}

/// The figures of a round: seconds, and bytes per second of (bare TCP, the wire).
struct Round {
    round_trip: f64,
    bare_round_trip: f64,
    single: (f64, f64),
    several: (f64, f64),
}

/// The client of a server on bare TCP. The first byte of a request of [`SMALL_BYTES`] selects the
/// reply.
struct Bare {
    client: TcpStream,
    buffer: Vec<f32>,
}

impl Bare {
    fn connect(rows: Vec<f32>) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let client = TcpStream::connect(listener.local_addr()?)?;
        let (mut server, _) = listener.accept()?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let buffer = rows.clone();
        // The thread ends when the client is dropped.
        std::thread::spawn(move || {
            let mut request = [0; SMALL_BYTES];
            while server.read_exact(&mut request).is_ok() {
                let written = match request[0] {
                    2 => server.write_all(bytemuck::cast_slice(&rows.clone())),
                    _ => server.write_all(&request),
                };
                if written.is_err() {
                    break;
                }
            }
        });
        Ok(Self { client, buffer })
    }

    fn round_trip(&mut self, requests: usize) -> std::io::Result<f64> {
        let mut reply = [0; SMALL_BYTES];
        let started = Instant::now();
        for _ in 0..requests {
            self.client.write_all(&[1; SMALL_BYTES])?;
            self.client.read_exact(&mut reply)?;
        }
        Ok(started.elapsed().as_secs_f64() / requests as f64)
    }

    fn throughput(&mut self, replies: usize, ahead: usize) -> std::io::Result<f64> {
        let started = Instant::now();
        for _ in 0..ahead.min(replies) {
            self.client.write_all(&[2; SMALL_BYTES])?;
        }
        for reply in 0..replies {
            self.client.read_exact(bytemuck::cast_slice_mut(&mut self.buffer))?;
            if reply + ahead < replies {
                self.client.write_all(&[2; SMALL_BYTES])?;
            }
        }
        Ok((replies * size_of_val(self.buffer.as_slice())) as f64 / started.elapsed().as_secs_f64())
    }
}

struct Rows(Vec<f32>);

impl Service for Rows {
    fn call<'a>(&'a self, _: &'a Peer, request: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            Ok(match request.kind {
                LARGE => Frame::new(LARGE, "").with(self.0.clone()),
                _ => request,
            })
        })
    }
}

fn serve(runtime: &Runtime, transport: &dyn Transport, rows: Vec<f32>) -> Result<Serving, BenchError> {
    let _inside = runtime.enter();
    Ok(transport.serve(Arc::new(Rows(rows)), &Address::tcp("127.0.0.1", 0))?)
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(1).enable_all().build()
}

/// Runs `work` on a worker thread of the runtime, as roles do.
fn on_worker<T: Send + 'static>(
    runtime: &Runtime,
    work: impl Future<Output = Result<T, BenchError>> + Send + 'static,
) -> Result<T, BenchError> {
    runtime.block_on(runtime.spawn(work)).map_err(|error| BenchError::Ended(error.to_string()))?
}

async fn round_trip(channel: Channel, requests: usize) -> Result<f64, BenchError> {
    let started = Instant::now();
    for _ in 0..requests {
        channel.call(Frame::new(SMALL, &[1; 24][..]), DEADLINE).await?;
    }
    Ok(started.elapsed().as_secs_f64() / requests as f64)
}

async fn throughput(channel: Channel, replies: usize, ahead: usize, bytes: usize) -> Result<f64, BenchError> {
    let started = Instant::now();
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..ahead {
        let channel = channel.clone();
        callers.spawn(async move {
            for _ in (caller..replies).step_by(ahead) {
                channel.call(Frame::new(LARGE, ""), DEADLINE).await?;
            }
            Ok::<(), BenchError>(())
        });
    }
    while let Some(ended) = callers.join_next().await {
        ended.map_err(|error| BenchError::Ended(error.to_string()))??;
    }
    Ok((replies * (bytes / 4 * 4)) as f64 / started.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_count_replies_that_arrived() {
        let args = WireArgs { bytes: 4_096, rounds: 2, replies: 5, requests: 10, json: false };
        let figures = bench_wire(&args).unwrap();
        assert!(figures.round_trip_seconds > 0.0 && figures.bare_round_trip_seconds > 0.0);
        assert!(figures.throughput_ratio > 0.0 && figures.single_throughput_ratio > 0.0);
        assert_eq!(figures.reply_bytes, 4_096);
        let error = bench_wire(&WireArgs { rounds: 0, ..args }).unwrap_err();
        assert!(error.is_user_error(), "{error}");
    }
}
