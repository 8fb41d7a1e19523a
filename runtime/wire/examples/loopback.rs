//! The cost of the wire compared with bare TCP, on loopback, in one run. It measures the round trip
//! of a small request, and the throughput of 4 MiB f32 replies (a look-up's). Rounds of both
//! alternate, and the example prints medians.
//! `cargo run --release -p rectrain-wire --example loopback` takes less than 20 s.
//!
//! Each side has one thread, like two processes on two cores. In both cases the server makes each
//! reply as a copy of a vector, in place of a look-up. Bare TCP writes it and reads it into one
//! buffer that it reuses, with std's blocking calls. The wire's caller gets a new vector each time.
//! So malloc must not return memory to the kernel: every reply would cost page faults. glibc reads
//! that setting from the environment, so the example starts itself a second time.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rectrain_wire::{
    Address, BoxFuture, Channel, Frame, InProcess, InProcessConfig, Peer, Refusal, Service, Serving, TcpConfig,
    TcpTransport, Transport, WireCounters,
};
use tokio::runtime::{Builder, Runtime};

const SMALL: u16 = 1;
const LARGE: u16 = 2;
const ROUNDS: usize = 9;
const SMALL_CALLS: u32 = 2_000;
const LARGE_CALLS: u32 = 60;
const REPLY_BYTES: usize = 4 << 20;
const DEADLINE: Duration = Duration::from_secs(10);

fn kind_name(kind: u16) -> &'static str {
    if kind == SMALL { "small" } else { "large" }
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

/// A server that reads 64 bytes. If the first is 2 it answers with a large reply; otherwise it
/// echoes.
fn bare_server(rows: Vec<f32>) -> std::io::Result<TcpStream> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let client = TcpStream::connect(listener.local_addr()?)?;
    let (mut server, _) = listener.accept()?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    std::thread::spawn(move || {
        let mut request = [0; 64];
        while let Ok(1..) = server.read(&mut request) {
            let written = if request[0] == 2 {
                server.write_all(bytemuck::cast_slice(&rows.clone()))
            } else {
                server.write_all(&request)
            };
            if written.is_err() {
                break;
            }
        }
    });
    Ok(client)
}

fn bare_small(client: &mut TcpStream) -> std::io::Result<f64> {
    let mut reply = [0; 64];
    let started = Instant::now();
    for _ in 0..SMALL_CALLS {
        client.write_all(&[1; 64])?;
        client.read_exact(&mut reply)?;
    }
    Ok(started.elapsed().as_secs_f64() * 1e6 / f64::from(SMALL_CALLS))
}

fn bare_large(client: &mut TcpStream, buffer: &mut [f32], ahead: u32) -> std::io::Result<f64> {
    let started = Instant::now();
    let ask = |client: &mut TcpStream, i: u32| match i < LARGE_CALLS {
        true => client.write_all(&[2; 64]),
        false => Ok(()),
    };
    for i in 0..ahead {
        ask(client, i)?;
    }
    for i in 0..LARGE_CALLS {
        client.read_exact(bytemuck::cast_slice_mut(buffer))?;
        ask(client, i + ahead)?;
    }
    Ok(gigabytes_per_second(started))
}

fn gigabytes_per_second(started: Instant) -> f64 {
    f64::from(LARGE_CALLS) * REPLY_BYTES as f64 / 1e9 / started.elapsed().as_secs_f64()
}

async fn wire_small(channel: &Channel) -> f64 {
    let started = Instant::now();
    for _ in 0..SMALL_CALLS {
        let reply = channel.call(Frame::new(SMALL, &[1; 24][..]), DEADLINE).await;
        reply.expect("a small call on loopback");
    }
    started.elapsed().as_secs_f64() * 1e6 / f64::from(SMALL_CALLS)
}

async fn wire_large(channel: &Channel, ahead: u32) -> f64 {
    let started = Instant::now();
    let callers: Vec<_> = (0..ahead)
        .map(|caller| {
            let channel = channel.clone();
            tokio::spawn(async move {
                for _ in (caller..LARGE_CALLS).step_by(ahead as usize) {
                    let reply = channel.call(Frame::new(LARGE, ""), DEADLINE).await;
                    reply.expect("a large call on loopback");
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.expect("a caller");
    }
    gigabytes_per_second(started)
}

fn runtime(threads: usize) -> std::io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(threads).enable_all().build()
}

/// Starts a service on a runtime of its own.
fn serve(
    runtime: &Runtime,
    transport: &dyn Transport,
    bind: &Address,
    rows: &[f32],
) -> Result<Serving, rectrain_wire::WireError> {
    let _inside = runtime.enter();
    transport.serve(Arc::new(Rows(rows.to_vec())), bind)
}

/// Runs on a worker thread, as a role does.
fn on_worker<T: Send + 'static>(runtime: &Runtime, work: impl Future<Output = T> + Send + 'static) -> T {
    runtime.block_on(runtime.spawn(work)).expect("a task of the benchmark")
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if std::env::var_os("GLIBC_TUNABLES").is_none() {
        let kept = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296";
        let again = std::env::current_exe()?;
        let status = Command::new(again).env("GLIBC_TUNABLES", kept).status()?;
        std::process::exit(status.code().unwrap_or(1));
    }
    let rows: Vec<f32> = (0..REPLY_BYTES / 4).map(|i| i as f32).collect();
    let mut bare = bare_server(rows.clone())?;
    let mut buffer = rows.clone();

    let counters = WireCounters::unregistered(kind_name)?;
    let (server, client) = (runtime(1)?, runtime(1)?);
    let tcp = TcpTransport::new(TcpConfig::default(), counters.clone());
    let serving = serve(&server, &tcp, &Address::tcp("127.0.0.1", 0), &rows)?;
    let over_tcp = tcp.connect(serving.address())?;
    let local = InProcess::new(InProcessConfig::default(), counters);
    let _in_process = serve(&server, &local, &Address::local("rows"), &rows)?;
    let in_process = local.connect(&Address::local("rows"))?;

    let mut results: [Vec<f64>; 8] = Default::default();
    for _ in 0..ROUNDS {
        let (one, other) = (over_tcp.clone(), over_tcp.clone());
        results[0].push(bare_small(&mut bare)?);
        results[1].push(on_worker(&client, async move { wire_small(&one).await }));
        results[2].push(client.block_on(wire_small(&other)));
        let moved = in_process.clone();
        results[3].push(on_worker(&client, async move { wire_small(&moved).await }));
        for (i, ahead) in [(4, 1), (6, 4)] {
            let channel = over_tcp.clone();
            results[i].push(bare_large(&mut bare, &mut buffer, ahead)?);
            results[i + 1].push(on_worker(&client, async move { wire_large(&channel, ahead).await }));
        }
    }
    let [bare_us, task_us, thread_us, local_us, bare_1, wire_1, bare_4, wire_4] = results.map(median);
    println!("small request, 64 bytes each way, round trip:");
    println!(
        "  bare TCP {bare_us:.1} µs, wire {task_us:.1} µs (called from a task), {thread_us:.1} µs (from a blocked thread)"
    );
    println!("  in process, to a service on another runtime: {local_us:.1} µs");
    println!("4 MiB f32 replies:");
    for (ahead, bare, wire) in [(1, bare_1, wire_1), (4, bare_4, wire_4)] {
        println!("  {ahead} in flight: bare TCP {bare:.2} GB/s, wire {wire:.2} GB/s, ratio {:.2}", wire / bare);
    }
    Ok(())
}
