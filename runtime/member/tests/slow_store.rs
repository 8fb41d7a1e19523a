//! Checkpoints in a store that hangs or refuses one upload: training neither waits nor ends for it.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;
#[path = "../../storage/tests/servers/mod.rs"]
mod servers;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus::Registry;
use rectrain_checkpoint::{Listed, ListedState, list, parse_directory_name};
use rectrain_coordinator::Coordinator;
use rectrain_member::local::run_with;
use rectrain_protocol::events::{EventLog, JobEvent};
use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
use rectrain_protocol::plan::JobPlan;
use rectrain_storage::Directory;
use servers::{BUCKET, Server};

use crate::common::plan;

/// Files of parameter server 1.
const ROWS: &str = "/rows-00001-";
const MANIFEST: &str = "/manifest.json";

/// The most time between two steps. A step takes some milliseconds, on a machine that may be busy.
const MOST_PAUSE: Duration = Duration::from_millis(1500);
/// The time that an upload hangs, several times the time between two checkpoints.
const HANGS: Duration = Duration::from_secs(3);

/// A proxy's treatment of the uploads of some files.
#[derive(Clone, Copy, PartialEq)]
enum Treatment {
    Pass,
    /// No answer, for files with this in their path.
    Hang(&'static str),
    /// An answer with this status, likewise.
    Refuse(&'static str, &'static str),
}

impl Treatment {
    fn concerns(self, request: &[u8]) -> bool {
        let (Self::Hang(file) | Self::Refuse(file, _)) = self else { return false };
        let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
        line.starts_with(b"PUT ") && line.windows(file.len()).any(|part| part == file.as_bytes())
    }
}

/// Stands before a store. Requests that are under treatment do not reach the store.
#[derive(Clone)]
struct Proxy {
    port: u16,
    treatment: Arc<Mutex<Treatment>>,
    caught: Arc<AtomicU64>,
}

impl Proxy {
    fn before(server: &Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let proxy = Self { port, treatment: Arc::new(Mutex::new(Treatment::Pass)), caught: Arc::default() };
        let (own, store) = (proxy.clone(), server.port);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(store) = TcpStream::connect(("127.0.0.1", store)) else { continue };
                let (mut answers, mut to_client) = (store.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _closed = std::io::copy(&mut answers, &mut to_client);
                    let _closed = to_client.shutdown(Shutdown::Both);
                });
                let own = own.clone();
                std::thread::spawn(move || own.forward(client, store));
            }
        });
        proxy
    }

    fn set(&self, treatment: Treatment) {
        *self.treatment.lock().unwrap_or_else(PoisonError::into_inner) = treatment;
    }

    fn treatment(&self) -> Treatment {
        *self.treatment.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn caught(&self) -> u64 {
        self.caught.load(Ordering::Relaxed)
    }

    /// Forwards the requests of a connection. The client sends one after the other, so each begins
    /// a read.
    fn forward(&self, mut client: TcpStream, mut store: TcpStream) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(length @ 1..) = client.read(&mut buffer) {
            let treatment = self.treatment();
            if treatment.concerns(&buffer[..length]) {
                self.caught.fetch_add(1, Ordering::Relaxed);
                self.treat(treatment, &mut client);
                break;
            }
            if store.write_all(&buffer[..length]).is_err() {
                break;
            }
        }
        let _closed = client.shutdown(Shutdown::Both);
        let _closed = store.shutdown(Shutdown::Both);
    }

    fn treat(&self, treatment: Treatment, client: &mut TcpStream) {
        if let Treatment::Refuse(_, status) = treatment {
            client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let mut rest = vec![0; 64 << 10];
            while let Ok(1..) = client.read(&mut rest) {}
            let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            let _closed = client.write_all(answer.as_bytes());
        }
        while matches!(treatment, Treatment::Hang(_)) && self.treatment() == treatment {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// An endless job whose checkpoints go through the proxy. A request without an answer is repeated
/// after a second, instead of half a minute.
fn plan_through(proxy: &Proxy, server: &Server) -> Arc<JobPlan> {
    let mut plan = plan(&[
        &format!("spec.checkpoint.path=s3://{BUCKET}/jobs/one"),
        "spec.checkpoint.everySteps=20",
        "spec.checkpoint.fullEvery=3",
        "spec.data.synthetic.rows=100000000",
        "spec.roles.ps.replicas=2",
    ]);
    let options = &mut plan.checkpoint.as_mut().unwrap().storage_options;
    options.clone_from(&server.options);
    options.insert("endpoint".to_owned(), format!("http://127.0.0.1:{}", proxy.port));
    options.insert("timeout".to_owned(), "1s".to_owned());
    Arc::new(plan)
}

/// A job that trains.
struct Job {
    coordinator: Arc<Coordinator>,
    events: EventLog,
    metrics: CoordinatorMetrics,
}

impl Job {
    fn events(&self) -> Vec<JobEvent> {
        self.events.after(0, usize::MAX).into_iter().map(|logged| logged.event).collect()
    }

    /// The names of the checkpoints saved.
    fn saved(&self) -> Vec<String> {
        let name =
            |event| if let JobEvent::CheckpointSaved { checkpoint, .. } = event { Some(checkpoint) } else { None };
        self.events().into_iter().filter_map(name).collect()
    }

    /// Waits, and checks that training continues meanwhile.
    async fn trains_until(&self, mut is_reached: impl FnMut() -> bool) {
        let (mut step, mut since) = (self.coordinator.status().step, Instant::now());
        while !is_reached() {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let status = self.coordinator.status();
            if status.step != step {
                (step, since) = (status.step, Instant::now());
            }
            assert!(since.elapsed() < MOST_PAUSE, "no step after {step} for {:?}", since.elapsed());
            // The operator and `rectrain run` restart a job by this number.
            assert!(status.idle_seconds.unwrap() < MOST_PAUSE.as_secs_f64(), "{:?}", status.idle_seconds);
        }
    }

    async fn trains_for(&self, time: Duration) {
        let begun = Instant::now();
        self.trains_until(|| begun.elapsed() > time).await;
    }

    async fn saves(&self, more: usize) {
        let before = self.saved().len();
        self.trains_until(|| self.saved().len() >= before + more).await;
    }
}

/// Trains as run `run` while `test` runs, and then drops the job, as a crash would.
fn while_training(run: &str, plan: Arc<JobPlan>, test: impl AsyncFnOnce(&Job)) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    runtime.block_on(async {
        let all = RoleMetrics::new(Registry::new()).unwrap();
        let (metrics, events) = (CoordinatorMetrics::of(&all, 0), EventLog::default());
        let starting = Coordinator::start(Arc::clone(&plan), run, None, events.clone(), metrics.clone());
        let coordinator = Arc::new(starting.await.unwrap());
        let job = Job { coordinator: Arc::clone(&coordinator), events, metrics };
        let slow = BTreeMap::from([(0, 6.0)]);
        let tested = async {
            while job.coordinator.status().samples == 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            test(&job).await;
        };
        tokio::select! {
            ended = run_with(plan, &slow, coordinator, all) => panic!("training has ended: {:?}", ended.map(|summary| summary.steps)),
            tested = tokio::time::timeout(Duration::from_secs(120), tested) => tested.unwrap(),
        }
    });
    runtime.shutdown_background();
}

#[test]
fn training_continues_while_one_servers_upload_hangs() {
    let Some(server) = servers::s3() else { return };
    let proxy = Proxy::before(&server);
    while_training("run", plan_through(&proxy, &server), async |job| {
        job.saves(1).await;
        proxy.set(Treatment::Hang(ROWS));
        job.trains_until(|| proxy.caught() > 0).await;
        let (saved, skipped) = (job.saved(), job.metrics.skipped_checkpoints.get());
        job.trains_for(HANGS).await;
        assert_eq!(job.saved(), saved, "a checkpoint lacks a file");
        assert!(job.metrics.skipped_checkpoints.get() > skipped);
        // A member of a drained node requests one.
        let since = job.coordinator.status().step;
        let hanging = async {
            job.trains_for(HANGS).await;
            assert_eq!(job.saved(), saved);
            proxy.set(Treatment::Pass);
            job.saves(3).await;
        };
        let (requested, ()) = tokio::join!(job.coordinator.save_now(), hanging);
        let requested = requested.unwrap();
        assert!(parse_directory_name(&requested).unwrap().0 >= since, "{requested} is older than step {since}");
        assert_eq!(job.metrics.failed_checkpoints.get(), 0);
    });
}

#[test]
fn a_refused_upload_costs_one_checkpoint_and_no_step() {
    let Some(server) = servers::s3() else { return };
    let proxy = Proxy::before(&server);
    while_training("run", plan_through(&proxy, &server), async |job| {
        job.saves(1).await;
        // The client repeats a request that the store was too busy for.
        proxy.set(Treatment::Refuse(ROWS, "503 Slow Down"));
        job.trains_until(|| proxy.caught() > 1).await;
        proxy.set(Treatment::Pass);
        job.saves(1).await;
        assert_eq!(job.metrics.failed_checkpoints.get(), 0);
        // A token has expired.
        proxy.set(Treatment::Refuse(ROWS, "403 Forbidden"));
        job.trains_until(|| job.metrics.failed_checkpoints.get() > 0).await;
        let saved = job.saved().len();
        proxy.set(Treatment::Pass);
        job.saves(2).await;
        assert!(!job.saved()[saved].ends_with("-delta"), "{:?}", job.saved());
    });
}

fn unfinished(plan: &JobPlan) -> Vec<Listed> {
    let checkpoint = plan.checkpoint.as_ref().unwrap();
    let directory = Directory::open(&checkpoint.path, &checkpoint.storage_options, true).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listed = runtime.block_on(list(&directory)).unwrap();
    listed.into_iter().filter(|listed| matches!(listed.state, ListedState::Unfinished)).collect()
}

/// The job dies between the last rows file and the manifest.
#[test]
fn a_checkpoint_cut_short_does_not_block_those_after_a_restart() {
    let Some(server) = servers::s3() else { return };
    let proxy = Proxy::before(&server);
    let plan = plan_through(&proxy, &server);
    let mut last = 0;
    while_training("run", Arc::clone(&plan), async |job| {
        job.saves(2).await;
        proxy.set(Treatment::Hang(MANIFEST));
        job.trains_until(|| proxy.caught() > 0).await;
        job.trains_for(HANGS).await;
        last = job.coordinator.status().last_checkpoint_step;
    });
    proxy.set(Treatment::Pass);
    let cut_short = unfinished(&plan);
    assert!(cut_short.iter().any(|listed| listed.step > last), "{cut_short:?}");
    while_training("run", Arc::clone(&plan), async |job| {
        let resumed = |event: &JobEvent| matches!(event, JobEvent::Resumed { step, .. } if *step == last);
        job.trains_until(|| job.events().iter().any(&resumed)).await;
        job.saves(4).await;
        assert_eq!(job.metrics.failed_checkpoints.get(), 0);
        last = job.coordinator.status().last_checkpoint_step;
    });
    // Retention has deleted them. The newest may have been cut short by the end of the test.
    let left = unfinished(&plan);
    assert!(!left.iter().any(|listed| listed.step < last), "{left:?}");
}
