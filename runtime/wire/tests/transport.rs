//! One suite for both transports, TCP with and without certificates. Then the cases of TCP alone:
//! bytes, sockets and misbehaving peers.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use half::f16;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rectrain_wire::*;
use tokio::sync::Semaphore;

mod authority;

use authority::Authority;

const ECHO: u16 = 1;
/// Waits until the test opens the gate.
const GATE: u16 = 2;
const REFUSE: u16 = 3;
const PANIC: u16 = 4;
/// Panics before it returns a future.
const PANIC_AT_ONCE: u16 = 5;
/// Replies with more bytes than the limits of the test allow.
const TOO_MUCH: u16 = 6;
/// Replies with the number of the connection.
const CONNECTION: u16 = 7;

const SOON: Duration = Duration::from_secs(20);

fn kind_name(kind: u16) -> &'static str {
    match kind {
        ECHO => "echo",
        GATE => "gate",
        REFUSE => "refuse",
        PANIC | PANIC_AT_ONCE => "panic",
        TOO_MUCH => "too-much",
        CONNECTION => "connection",
        _ => "unknown",
    }
}

struct Tester {
    gate: Semaphore,
    running: AtomicUsize,
    most_running: AtomicUsize,
    finished: AtomicUsize,
}

impl Tester {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            gate: Semaphore::new(0),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
            finished: AtomicUsize::new(0),
        })
    }

    async fn until_running(&self, count: usize) {
        until(|| self.running.load(SeqCst) == count, "handlers run").await;
    }
}

impl Service for Tester {
    fn call<'a>(&'a self, peer: &'a Peer, request: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        assert!(request.kind != PANIC_AT_ONCE, "at once");
        Box::pin(async move {
            match request.kind {
                GATE => {
                    let running = self.running.fetch_add(1, SeqCst) + 1;
                    self.most_running.fetch_max(running, SeqCst);
                    self.gate.acquire().await.unwrap().forget();
                    self.running.fetch_sub(1, SeqCst);
                    self.finished.fetch_add(1, SeqCst);
                    Ok(request)
                }
                REFUSE => Err(Refusal::retryable(RefusalCode::StaleEpoch, "epoch 3, not 2")),
                PANIC => panic!("kind {}", request.kind),
                TOO_MUCH => Ok(Frame::new(TOO_MUCH, vec![0; 2 << 20])),
                CONNECTION => Ok(Frame::new(CONNECTION, peer.connection().to_le_bytes().to_vec())),
                _ => Ok(request),
            }
        })
    }
}

#[derive(Clone, Copy)]
struct Bounds {
    max_in_flight: usize,
    max_concurrent: usize,
}

const WIDE: Bounds = Bounds { max_in_flight: 1024, max_concurrent: 1024 };

struct Rig {
    transport: Arc<dyn Transport>,
    bind: Address,
    counters: Arc<WireCounters>,
    tester: Arc<Tester>,
    is_tcp: bool,
}

impl Rig {
    fn tcp(bounds: Bounds) -> Self {
        Self::over_tcp(bounds, None)
    }

    fn tls(bounds: Bounds) -> Self {
        Self::over_tcp(bounds, Some(Authority::new().credentials()))
    }

    fn over_tcp(bounds: Bounds, credentials: Option<tls::Credentials>) -> Self {
        let counters = WireCounters::register(&prometheus::Registry::new(), kind_name).unwrap();
        let config = TcpConfig {
            limits: Limits { max_frame_bytes: 64 << 20, max_meta_bytes: 1 << 20 },
            max_in_flight: bounds.max_in_flight,
            max_concurrent: bounds.max_concurrent,
            credentials,
            ..TcpConfig::default()
        };
        let transport = Arc::new(TcpTransport::new(config, counters.clone()));
        Self { transport, bind: Address::tcp(own_host(), 0), counters, tester: Tester::new(), is_tcp: true }
    }

    fn local(bounds: Bounds) -> Self {
        let counters = WireCounters::register(&prometheus::Registry::new(), kind_name).unwrap();
        let config = InProcessConfig { max_in_flight: bounds.max_in_flight, max_concurrent: bounds.max_concurrent };
        let transport = Arc::new(InProcess::new(config, counters.clone()));
        Self { transport, bind: Address::local("ps-0"), counters, tester: Tester::new(), is_tcp: false }
    }

    fn serve(&self) -> Serving {
        self.transport.serve(self.tester.clone(), &self.bind).unwrap()
    }

    fn start(&self) -> (Serving, Channel) {
        let serving = self.serve();
        let channel = self.transport.connect(serving.address()).unwrap();
        (serving, channel)
    }
}

/// A loopback host that no other test of this process uses, so that a test can bind a released port
/// again. Linux answers on all of 127.0.0.0/8; elsewhere all tests share one host.
fn own_host() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(2);
    if cfg!(target_os = "linux") {
        format!("127.0.{}.{}", 1 + std::process::id() % 250, NEXT.fetch_add(1, SeqCst))
    } else {
        "127.0.0.1".to_owned()
    }
}

async fn until(condition: impl Fn() -> bool, condition_name: &str) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < SOON, "waited for too long until: {condition_name}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn spawn_gated(channel: &Channel, deadline: Duration) -> tokio::task::JoinHandle<Result<Frame, WireError>> {
    let channel = channel.clone();
    tokio::spawn(async move { channel.call(Frame::new(GATE, ""), deadline).await })
}

/// The same test over TCP, over TCP with certificates and in process.
macro_rules! both {
    ($($(#[$attribute:meta])* async fn $name:ident($rig:ident = $bounds:expr) $body:block)*) => {$(
        mod $name {
            use super::*;

            $(#[$attribute])*
            async fn check($rig: Rig) $body

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn tcp() {
                check(Rig::tcp($bounds)).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn tls() {
                check(Rig::tls($bounds)).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn in_process() {
                check(Rig::local($bounds)).await;
            }
        }
    )*};
}

both! {
    async fn every_element_type_survives_the_round_trip(rig = WIDE) {
        let (_serving, channel) = rig.start();
        let n = 100_003;
        let request = Frame::new(ECHO, &b"structured"[..])
            .with((0..n).map(|i| i as f32 * 0.5).collect::<Vec<_>>())
            .with((0..n).map(|i| f16::from_f32(i as f32)).collect::<Vec<_>>())
            .with((0..n).map(|i| i as u64 * 0x0123_4567_89ab).collect::<Vec<_>>())
            .with((0..n as u32).collect::<Vec<_>>())
            .with((0..n).map(|i| i as u16).collect::<Vec<_>>())
            .with((0..n).map(|i| i as u8).collect::<Vec<_>>())
            .with(Vec::<f32>::new())
            .with(Tensor::new(&[2, 2, 3], vec![7u64; 12]).unwrap())
            .with(Tensor::new(&[], vec![1f32]).unwrap());
        assert_eq!(channel.call(request.clone(), SOON).await.unwrap(), request);
    }

    async fn hundreds_of_tensors_and_large_ones_arrive_whole(rig = WIDE) {
        let (_serving, channel) = rig.start();
        let mut request = Frame::new(ECHO, "");
        for i in 0..700u32 {
            request = request.with(vec![i; i as usize % 5]);
        }
        let request = request.with((0..6 << 20).map(|i| i as u32 as f32).collect::<Vec<_>>());
        assert!(channel.call(request.clone(), SOON).await.unwrap() == request);
    }

    async fn each_of_many_calls_gets_its_own_reply(rig = WIDE) {
        let (_serving, channel) = rig.start();
        let calls: Vec<_> = (0..3000u64).map(|i| {
            let channel = channel.clone();
            tokio::spawn(async move {
                let request = Frame::new(ECHO, i.to_le_bytes().to_vec()).with(vec![i; i as usize % 300]);
                assert_eq!(channel.call(request.clone(), SOON).await.unwrap(), request);
            })
        }).collect();
        for call in calls {
            call.await.unwrap();
        }
        assert_eq!((rig.counters.calls_in_flight(), rig.counters.requests_in_flight()), (0, 0));
    }

    async fn a_slow_request_does_not_hold_up_later_ones(rig = WIDE) {
        let (_serving, channel) = rig.start();
        let slow = spawn_gated(&channel, SOON);
        rig.tester.until_running(1).await;
        channel.call(Frame::new(ECHO, ""), SOON).await.unwrap();
        rig.tester.gate.add_permits(1);
        slow.await.unwrap().unwrap();
    }

    async fn a_call_ends_at_its_deadline_and_its_late_reply_is_counted(rig = WIDE) {
        let (_serving, channel) = rig.start();
        let started = Instant::now();
        let error = channel.call(Frame::new(GATE, ""), Duration::from_millis(50)).await.unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(5));
        let message = error.to_string();
        assert!(matches!(error, WireError::Deadline { .. }) && error.is_retryable(), "{message}");
        for part in ["call \"gate\"", &channel.address().to_string(), "50ms", "waiting for the reply"] {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!((rig.counters.calls_in_flight(), rig.counters.late_replies()), (0, 0));
        rig.tester.gate.add_permits(1);
        until(|| rig.counters.late_replies() == 1, "the reply came late").await;
        channel.call(Frame::new(ECHO, ""), SOON).await.unwrap();
    }

    async fn calls_beyond_the_bound_wait_for_a_permit(rig = Bounds { max_in_flight: 2, max_concurrent: 1024 }) {
        let (_serving, channel) = rig.start();
        let calls = [spawn_gated(&channel, SOON), spawn_gated(&channel, SOON)];
        rig.tester.until_running(2).await;
        let error = channel.call(Frame::new(ECHO, ""), Duration::from_millis(30)).await.unwrap_err();
        assert!(error.to_string().contains("the channel's permits"), "{error}");
        let waiting = spawn_gated(&channel, SOON);
        rig.tester.gate.add_permits(3);
        for call in calls.into_iter().chain([waiting]) {
            call.await.unwrap().unwrap();
        }
    }

    async fn a_dropped_call_frees_its_permit_and_its_handler_finishes(rig = Bounds { max_in_flight: 1, max_concurrent: 1024 }) {
        let (_serving, channel) = rig.start();
        let call = spawn_gated(&channel, SOON);
        rig.tester.until_running(1).await;
        call.abort();
        channel.call(Frame::new(ECHO, ""), SOON).await.unwrap();
        rig.tester.gate.add_permits(1);
        until(|| rig.tester.finished.load(SeqCst) == 1, "the handler finished").await;
        until(|| rig.counters.late_replies() == 1, "its reply was thrown away").await;
    }

    async fn a_service_handles_no_more_of_a_connection_than_its_bound(rig = Bounds { max_in_flight: 1024, max_concurrent: 4 }) {
        let (_serving, channel) = rig.start();
        let calls: Vec<_> = (0..20).map(|_| spawn_gated(&channel, SOON)).collect();
        rig.tester.until_running(4).await;
        tokio::time::sleep(Duration::from_millis(30)).await;
        rig.tester.gate.add_permits(20);
        for call in calls {
            call.await.unwrap().unwrap();
        }
        assert_eq!(rig.tester.most_running.load(SeqCst), 4);
        // Another channel has permits of its own.
        let other = rig.transport.connect(channel.address()).unwrap();
        let held: Vec<_> = (0..4).map(|_| spawn_gated(&channel, SOON)).collect();
        rig.tester.until_running(4).await;
        other.call(Frame::new(ECHO, ""), SOON).await.unwrap();
        rig.tester.gate.add_permits(4);
        for call in held {
            call.await.unwrap().unwrap();
        }
    }

    async fn a_refusal_arrives_whole(rig = WIDE) {
        let (_serving, channel) = rig.start();
        let error = channel.call(Frame::new(REFUSE, ""), SOON).await.unwrap_err();
        assert_eq!(error.refusal(), Some(&Refusal::retryable(RefusalCode::StaleEpoch, "epoch 3, not 2")));
        assert!(error.is_retryable());
        let want = format!(
            "{} refused call \"refuse\": epoch 3, not 2 (StaleEpoch, retryable)", channel.address());
        assert_eq!(error.to_string(), want);
    }

    async fn a_panic_in_a_handler_is_a_refusal_and_the_connection_lives(rig = WIDE) {
        let (_serving, channel) = rig.start();
        let before = channel.call(Frame::new(CONNECTION, ""), SOON).await.unwrap();
        for (kind, text) in [(PANIC, "kind 4"), (PANIC_AT_ONCE, "at once")] {
            let error = channel.call(Frame::new(kind, ""), SOON).await.unwrap_err();
            let refusal = error.refusal().unwrap();
            assert_eq!(refusal.code, RefusalCode::Internal);
            assert!(refusal.message.contains(text) && !refusal.retryable, "{refusal}");
        }
        assert_eq!(rig.counters.handler_panics(), 2);
        assert_eq!(channel.call(Frame::new(CONNECTION, ""), SOON).await.unwrap(), before);
        assert_eq!((rig.counters.requests_in_flight(), rig.counters.reconnects()), (0, 0));
    }

    async fn a_call_waits_for_a_service_that_is_not_there_yet(rig = WIDE) {
        let serving = rig.serve();
        let address = serving.address().clone();
        // Stop, not drop: a dropped service may still accept a connection.
        assert!(serving.stop(SOON).await);
        let rig = Rig { bind: address.clone(), ..rig };
        let channel = rig.transport.connect(&address).unwrap();
        let error = channel.call(Frame::new(ECHO, ""), Duration::from_millis(60)).await.unwrap_err();
        assert!(matches!(&error, WireError::Unreachable { attempts: 2.., .. }), "{error}");
        assert!(error.to_string().contains(&address.to_string()), "{error}");
        assert!(channel.ready(Duration::from_millis(20)).await.is_err());
        let call = { let channel = channel.clone(); tokio::spawn(async move { channel.call(Frame::new(ECHO, ""), SOON).await }) };
        tokio::time::sleep(Duration::from_millis(20)).await;
        let _serving = rig.serve();
        call.await.unwrap().unwrap();
        channel.ready(SOON).await.unwrap();
        assert_eq!(rig.counters.reconnects(), 0);
    }

    async fn pending_calls_fail_when_a_service_stops_and_a_restart_is_found(rig = WIDE) {
        let (serving, channel) = rig.start();
        let calls: Vec<_> = (0..5).map(|_| spawn_gated(&channel, SOON)).collect();
        rig.tester.until_running(5).await;
        let address = serving.address().clone();
        let stopped = Instant::now();
        drop(serving);
        for call in calls {
            let error = call.await.unwrap().unwrap_err();
            assert!(matches!(error, WireError::Closed { .. }) && error.is_retryable(), "{error}");
            assert!(error.to_string().contains("call \"gate\""), "{error}");
        }
        assert!(stopped.elapsed() < Duration::from_secs(5));
        let rig = Rig { bind: address, ..rig };
        let _serving = rig.serve();
        channel.call(Frame::new(ECHO, ""), SOON).await.unwrap();
        assert_eq!(rig.counters.reconnects(), 1);
    }

    async fn stopping_with_grace_lets_handlers_finish(rig = WIDE) {
        let (serving, channel) = rig.start();
        let call = spawn_gated(&channel, SOON);
        rig.tester.until_running(1).await;
        let address = serving.address().clone();
        let stop = tokio::spawn(serving.stop(SOON));
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert!(!stop.is_finished());
        rig.tester.gate.add_permits(1);
        call.await.unwrap().unwrap();
        assert!(stop.await.unwrap());
        // The address is free again. A handler that does not finish in time is abandoned.
        let rig = Rig { bind: address, ..rig };
        // The first channel may not have noticed yet that its connection was closed.
        let (serving, channel) = rig.start();
        let call = spawn_gated(&channel, SOON);
        rig.tester.until_running(1).await;
        assert!(!serving.stop(Duration::from_millis(20)).await);
        assert!(matches!(call.await.unwrap(), Err(WireError::Closed { .. })));
    }

    async fn no_task_is_left_when_channels_and_services_are_dropped(rig = WIDE) {
        let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
        let before = tasks();
        for _ in 0..20 {
            let (serving, channel) = rig.start();
            let calls: Vec<_> = (0..10).map(|_| spawn_gated(&channel, SOON)).collect();
            rig.tester.until_running(10).await;
            calls.iter().for_each(|call| call.abort());
            drop(channel);
            drop(serving);
            rig.tester.running.store(0, SeqCst);
        }
        until(|| tasks() == before, "all tasks have ended").await;
        assert_eq!((rig.counters.calls_in_flight(), rig.counters.requests_in_flight()), (0, 0));
    }

    async fn moved_frames_and_bytes_are_counted_by_kind(rig = WIDE) {
        let (_serving, channel) = rig.start();
        for _ in 0..3 {
            channel.call(Frame::new(ECHO, "").with(vec![0f32; 1000]), SOON).await.unwrap();
        }
        until(|| rig.counters.snapshot()["echo"].frames_sent == 6, "all is counted").await;
        let bytes = if rig.is_tcp { 6 * (36 + 40 + 4000 + 4) } else { 0 };
        let want = KindTraffic { bytes_sent: bytes, bytes_received: bytes, frames_sent: 6, frames_received: 6 };
        assert_eq!(rig.counters.snapshot()["echo"], want);
    }

    async fn the_other_transports_addresses_are_refused(rig = WIDE) {
        let wrong = if rig.is_tcp { Address::local("ps-0") } else { Address::tcp("127.0.0.1", 1) };
        let error = rig.transport.connect(&wrong).unwrap_err();
        assert!(error.to_string().contains(&wrong.to_string()), "{error}");
        assert!(rig.transport.serve(rig.tester.clone(), &wrong).is_err());
    }

    async fn an_address_that_is_taken_is_refused(rig = WIDE) {
        let serving = rig.serve();
        let error = rig.transport.serve(rig.tester.clone(), serving.address()).unwrap_err();
        assert!(matches!(error, WireError::Bind { .. }), "{error}");
    }
}

#[tokio::test]
async fn in_process_a_tensor_is_moved_and_never_copied() {
    let rig = Rig::local(WIDE);
    let (_serving, channel) = rig.start();
    let data = vec![1f32; 1000];
    let place = data.as_ptr();
    let reply = channel.call(Frame::new(ECHO, "").with(data), SOON).await.unwrap();
    let [back] = reply.into_tensors("echo").unwrap();
    let back = back.expect_f32("echo").unwrap();
    assert_eq!(back.as_ptr(), place);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_does_not_read_makes_the_sender_wait() {
    let rig = Rig::tcp(Bounds { max_in_flight: 1024, max_concurrent: 1 });
    let (_serving, channel) = rig.start();
    let gated = spawn_gated(&channel, SOON);
    rig.tester.until_running(1).await;
    let calls: Vec<_> = (0..200)
        .map(|_| {
            let channel = channel.clone();
            tokio::spawn(async move { channel.call(Frame::new(ECHO, "").with(vec![0u8; 1 << 20]), SOON).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let sent = rig.counters.snapshot()["echo"].frames_sent;
    assert!(sent < 100, "{sent} of 200 frames went out while the service read none");
    // Calls dropped meanwhile are never sent, and free the queue for the others.
    calls[100..].iter().for_each(|call| call.abort());
    rig.tester.gate.add_permits(1);
    gated.await.unwrap().unwrap();
    for call in calls.into_iter().take(100) {
        call.await.unwrap().unwrap();
    }
    assert!(rig.counters.snapshot()["echo"].frames_sent < 2 * 200);
}

/// Like a machine that dies while data is on its way to it.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_peer_that_acknowledges_nothing_is_given_up_early() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address: Address = format!("tcp://{}", listener.local_addr().unwrap()).parse().unwrap();
    let config = TcpConfig { keepalive: Duration::from_secs(1), ..TcpConfig::default() };
    let transport = TcpTransport::new(config, WireCounters::unregistered(kind_name).unwrap());
    let channel = transport.connect(&address).unwrap();
    let started = Instant::now();
    let request = Frame { kind: ECHO, tensors: vec![Tensor::from(vec![0u8; 64 << 20])], ..Frame::default() };
    let error = channel.call(request, Duration::from_secs(120)).await.unwrap_err();
    assert!(matches!(error, WireError::Closed { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    drop(listener);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_over_the_limit_are_not_sent_and_such_replies_are_refused() {
    let rig = Rig::tcp(WIDE);
    let (_serving, channel) = rig.start();
    let error = channel.call(Frame::new(ECHO, "").with(vec![0u8; 65 << 20]), SOON).await.unwrap_err();
    assert!(error.to_string().contains("max_frame_bytes is 67108864"), "{error}");
    let error = channel.call(Frame::new(TOO_MUCH, ""), SOON).await.unwrap_err();
    assert!(error.to_string().contains("the reply cannot be sent"), "{error}");
    channel.call(Frame::new(ECHO, ""), SOON).await.unwrap();
    assert_eq!(rig.counters.reconnects(), 0);
}

#[test]
fn a_channel_outlives_the_runtime_that_carried_its_connection() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = tokio::runtime::Runtime::new().unwrap();
    let rig = Rig::tcp(WIDE);
    let (_serving, channel) = server.block_on(async { rig.start() });
    for reconnects in 0..3 {
        let client = runtime();
        client.block_on(channel.call(Frame::new(ECHO, ""), SOON)).unwrap();
        assert_eq!(rig.counters.reconnects(), reconnects);
        // A call that is waiting when the runtime shuts down fails at once.
        let waiting = {
            let _inside = client.enter();
            spawn_gated(&channel, SOON)
        };
        client.block_on(rig.tester.until_running(1));
        drop(client);
        assert!(runtime().block_on(waiting).is_err());
        rig.tester.running.store(0, SeqCst);
    }
}

/// As in a cluster: a pod has its predecessor's DNS name, which may lead to that pod for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_for_one_incarnation_never_reaches_another() {
    for rig in [Rig::tcp(WIDE), Rig::tls(WIDE)] {
        let serve = |at: &Address| rig.transport.serve(rig.tester.clone(), at).unwrap();
        let before = serve(&rig.bind.clone().of_process(1));
        let Address::Tcp { host, port, process: Some(1) } = before.address() else { panic!("{}", before.address()) };
        let here = Address::tcp(host, *port);
        let [anyone, first, second] = [here.clone(), here.clone().of_process(1), here.clone().of_process(2)]
            .map(|address| rig.transport.connect(&address).unwrap());
        anyone.call(Frame::new(ECHO, ""), SOON).await.unwrap();
        first.call(Frame::new(ECHO, ""), SOON).await.unwrap();
        let waiting = tokio::spawn({
            let second = second.clone();
            async move { second.call(Frame::new(ECHO, &b"it"[..]), Duration::from_secs(60)).await }
        });
        while rig.counters.refused_greetings() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(rig.counters.snapshot()["echo"].frames_received, 4, "two calls and their answers");
        drop(before);
        let after = loop {
            // The port is free once the connections to it are gone.
            match rig.transport.serve(rig.tester.clone(), &here.clone().of_process(2)) {
                Ok(serving) => break serving,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        assert_eq!(waiting.await.unwrap().unwrap().meta, "it");
        rig.transport.connect(&here).unwrap().call(Frame::new(ECHO, ""), SOON).await.unwrap();
        let gone = first.ready(Duration::from_millis(300)).await.unwrap_err().to_string();
        assert!(gone.contains("another process now runs at this address"), "{gone}");
        assert_eq!(rig.counters.snapshot().keys().copied().collect::<Vec<_>>(), ["echo"]);
        drop(after);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_without_an_incarnation_refuses_greetings() {
    let rig = Rig::tcp(WIDE);
    let serving = rig.serve();
    let channel = rig.transport.connect(&serving.address().clone().of_process(7)).unwrap();
    assert!(channel.ready(Duration::from_millis(300)).await.is_err());
    assert!(rig.counters.refused_greetings() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_wildcard_address_accepts_ipv4_and_ipv6() {
    for rig in [Rig::tcp(WIDE), Rig::tls(WIDE)] {
        let rig = Rig { bind: "tcp://[::]:0".parse().unwrap(), ..rig };
        let serving = rig.serve();
        let Address::Tcp { port, .. } = *serving.address() else { panic!("not over TCP") };
        let has_version_6 = TcpListener::bind("[::1]:0").is_ok();
        for host in ["127.0.0.1", "::1"].into_iter().take(1 + usize::from(has_version_6)) {
            let channel = rig.transport.connect(&Address::tcp(host, port)).unwrap();
            assert_eq!(channel.call(Frame::new(ECHO, "by"), SOON).await.unwrap(), Frame::new(ECHO, "by"), "{host}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_beyond_the_bound_wait_until_another_ends() {
    let counters = WireCounters::unregistered(kind_name).unwrap();
    let config = TcpConfig { max_connections: 1, ..TcpConfig::default() };
    let transport = TcpTransport::new(config, counters);
    let serving = transport.serve(Tester::new(), &Address::tcp("localhost", 0)).unwrap();
    let [first, second] = [(); 2].map(|()| transport.connect(serving.address()).unwrap());
    first.call(Frame::new(ECHO, ""), SOON).await.unwrap();
    assert!(second.call(Frame::new(ECHO, ""), Duration::from_millis(50)).await.is_err());
    drop(first);
    second.call(Frame::new(ECHO, ""), SOON).await.unwrap();
}

fn raw(address: &Address) -> TcpStream {
    let Address::Tcp { host, port, .. } = address else { panic!("{address}") };
    let socket = TcpStream::connect((host.as_str(), *port)).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket
}

/// Sends bytes and reads until the other side closes. Returns the goodbye, if there is one.
fn exchange(address: &Address, bytes: &[u8]) -> Option<String> {
    let mut socket = raw(address);
    // The service may have closed already.
    let _ = socket.write_all(bytes);
    let _ = socket.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    let (mut last, mut at) = (None, 0);
    while let Ok((frame, taken)) = decode_frame(&answer[at..], &Limits::default()) {
        at += taken;
        last = Some(frame);
    }
    last.filter(|frame| frame.role == FrameRole::Goodbye)
        .map(|frame| String::from_utf8_lossy(&frame.frame.meta[3..]).into_owned())
}

fn valid(role: FrameRole, frame: Frame) -> Vec<u8> {
    encode_frame(role, 1, frame, &Limits::default()).unwrap()
}

/// The bytes, with both checksums made valid.
fn summed(mut bytes: Vec<u8>) -> Vec<u8> {
    let header = crc32fast::hash(&bytes[..32]);
    bytes[32..36].copy_from_slice(&header.to_le_bytes());
    let end = bytes.len() - 4;
    let body = crc32fast::hash(&bytes[36..end]);
    bytes[end..].copy_from_slice(&body.to_le_bytes());
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_malformed_frame_is_refused_and_reported_to_the_peer() {
    let rig = Rig::tcp(WIDE);
    let (serving, channel) = rig.start();
    channel.call(Frame::new(ECHO, ""), SOON).await.unwrap();
    let good = valid(FrameRole::Request, Frame::new(ECHO, &b"m"[..]).with(vec![1u32; 3]));
    let with = |at: usize, value: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        bytes
    };
    let cases = [
        ("magic", b"GET / HTTP/1.1\r\nHost: ps-0.example.com:80\r\n\r\n".to_vec()),
        ("version", summed(with(4, &[9]))),
        ("header_checksum", with(6, &[9])),
        ("role", summed(with(8, &[9]))),
        ("frame_length", summed(with(28, &[9]))),
        ("meta_length", summed(with(12, &[0, 0, 0, 9]))),
        ("body_length", summed(with(24, &[54]))),
        ("dtype", summed(with(36, &[9]))),
        ("descriptor", summed(with(37, &[9]))),
        ("tensor_length", summed(with(44, &[9]))),
        ("body_checksum", with(80, &[9])),
        ("truncated", good[..good.len() - 1].to_vec()),
        ("unexpected", valid(FrameRole::Reply, Frame::new(ECHO, ""))),
    ];
    for (reason, bytes) in cases {
        let address = serving.address().clone();
        let goodbye = tokio::task::spawn_blocking(move || exchange(&address, &bytes)).await.unwrap();
        let goodbye = goodbye.unwrap_or_else(|| panic!("no goodbye after {reason}"));
        assert!(goodbye.starts_with("a frame was refused: "), "{goodbye}");
        assert_eq!(rig.counters.refused_frames(reason), 1, "{reason}: {goodbye}");
    }
    channel.call(Frame::new(ECHO, ""), SOON).await.unwrap();
    assert_eq!(rig.counters.reconnects(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn noise_and_damaged_frames_close_their_connection_and_no_other() {
    let rig = Rig::tcp(WIDE);
    let (serving, channel) = rig.start();
    let address = serving.address().clone();
    let noisy = tokio::task::spawn_blocking(move || {
        let good = valid(FrameRole::Request, Frame::new(ECHO, &b"m"[..]).with(vec![1u32; 300]));
        let noise = prop::collection::vec(any::<u8>(), 36..600);
        let flip = any::<prop::sample::Index>().prop_map(move |at| {
            let mut bytes = good.clone();
            let bit = at.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            bytes
        });
        let cases = prop_oneof![noise, flip];
        let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
        TestRunner::new(config)
            .run(&cases, |bytes| {
                prop_assert!(exchange(&address, &bytes).is_some());
                Ok(())
            })
            .unwrap();
    });
    for _ in 0..200 {
        channel.call(Frame::new(ECHO, "").with(vec![5u16; 100]), SOON).await.unwrap();
    }
    noisy.await.unwrap();
    channel.call(Frame::new(ECHO, ""), SOON).await.unwrap();
    assert_eq!((rig.counters.reconnects(), rig.counters.handler_panics()), (0, 0));
}

/// A peer that reads one request, answers with these bytes and closes.
fn answers_with(answer: impl FnOnce(u64) -> Vec<u8> + Send + 'static) -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        let count = socket.read(&mut request).unwrap();
        let (request, _) = decode_frame(&request[..count], &Limits::default()).unwrap();
        socket.write_all(&answer(request.request_id)).unwrap();
    });
    Address::tcp("127.0.0.1", port)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_malformed_answer_fails_the_call_with_the_reason() {
    let rig = Rig::tcp(WIDE);
    let reply = |role, id| encode_frame(role, id, Frame::new(ECHO, &b"x"[..]), &Limits::default()).unwrap();
    type Answer = Box<dyn FnOnce(u64) -> Vec<u8> + Send>;
    let goodbye = Frame::new(0, &b"\x02\x00\x00a frame was refused: too new"[..]);
    let goodbye = encode_frame(FrameRole::Goodbye, 0, goodbye, &Limits::default()).unwrap();
    let cases: [(&str, Answer); 6] = [
        ("the other side said: a frame was refused: too new", Box::new(|_| goodbye)),
        ("magic number", Box::new(|_| b"HTTP/1.1 400 Bad Request\r\nServer: another\r\n\r\n".to_vec())),
        (
            "checksum",
            Box::new(move |id| {
                let mut bytes = reply(FrameRole::Reply, id);
                bytes[36] ^= 1;
                bytes
            }),
        ),
        ("not expected here", Box::new(move |id| reply(FrameRole::Reply, id + 1))),
        ("not expected here", Box::new(move |id| reply(FrameRole::Request, id))),
        (
            "in the middle of a frame",
            Box::new(move |id| {
                let mut bytes = reply(FrameRole::Reply, id);
                bytes.pop();
                bytes
            }),
        ),
    ];
    for (text, answer) in cases {
        let address = answers_with(answer);
        let channel = rig.transport.connect(&address).unwrap();
        let error = channel.call(Frame::new(ECHO, ""), SOON).await.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert!(error.to_string().contains(&address.to_string()), "{error}");
    }
    assert_eq!(rig.counters.refused_frames("unexpected"), 2);
}
