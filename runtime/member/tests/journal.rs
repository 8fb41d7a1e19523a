//! Recovery of a coordinator from the journal of the one before.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use prometheus::Registry;
use prost::Message;
use rectrain_coordinator::{Coordinator, JournalPlace, recover_copy};
use rectrain_kinds::Role;
use rectrain_proto::v1;
use rectrain_protocol::RoleError;
use rectrain_protocol::events::{EventLog, JobEvent};
use rectrain_protocol::message::COORDINATOR_SUPERSEDED;
use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
use rectrain_protocol::plan::JobPlan;
use rectrain_wire::{
    Address, BoxFuture, Frame, InProcess, InProcessConfig, Peer, Refusal, Service, Serving, Tensor, Transport,
    WireCounters, WireError,
};
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::common::plan;

/// The kind of the request for the attempt of the job, which members send before they join.
const ATTEMPT: u16 = 19;
/// The kinds of the requests to join and for the next order.
const JOIN: u16 = 1;
const ORDER: u16 = 4;
/// The kind of the request for the end of the job.
const JOB_END: u16 = 12;
/// The kinds of the requests to keep a copy of the journal and to claim it.
const PUT_JOURNAL: u16 = 54;
const CLAIM_JOURNAL: u16 = 55;
/// The kinds of the requests to measure slots and to copy one.
const MEASURE_SLOTS: u16 = 41;
const COPY_SLOT: u16 = 42;

fn transport() -> InProcess {
    InProcess::new(InProcessConfig::default(), WireCounters::unregistered(|_| "test").unwrap())
}

async fn start(run: &str, plan: JobPlan, journal: &Path, events: &EventLog) -> Result<Arc<Coordinator>, RoleError> {
    let metrics = CoordinatorMetrics::of(&RoleMetrics::new(Registry::new()).unwrap(), 0);
    let journal = Some(JournalPlace::new(journal, 0));
    Coordinator::start(Arc::new(plan), run, journal, events.clone(), metrics).await.map(Arc::new)
}

/// Leads the job until one request has been answered. Returns the reply.
async fn answer_and_die(coordinator: &Arc<Coordinator>) -> Vec<u8> {
    let transport = transport();
    let address: Address = "local://coordinator".parse().unwrap();
    let _serving = transport.serve(Arc::clone(coordinator) as Arc<dyn Service>, &address).unwrap();
    let channel = transport.connect(&address).unwrap();
    let asking = channel.call(Frame { kind: ATTEMPT, ..Frame::default() }, Duration::from_secs(20));
    tokio::select! {
        ended = coordinator.run(&transport) => panic!("the job has ended: {:?}", ended.map(|summary| summary.steps)),
        answer = asking => answer.unwrap().meta.to_vec(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_coordinator_of_the_same_run_and_plan_recovers() {
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal");
    let first = start("a", plan(&[]), &journal, &EventLog::default()).await.unwrap();
    assert!(!first.is_recovered());
    let attempt = answer_and_die(&first).await;
    drop(first);

    let events = EventLog::default();
    let other_limits = plan(&["spec.faultTolerance.stallSeconds=77", "spec.faultTolerance.maxRestarts=9"]);
    let second = start("a", other_limits, &journal, &events).await.unwrap();
    assert!(second.is_recovered());
    assert_eq!(answer_and_die(&second).await, attempt, "members hold state of its attempt");
    assert_eq!(events.after(0, 9).last().unwrap().event, JobEvent::CoordinatorTakenUp { step: 0 });

    for (run, plan) in [("b", plan(&[])), ("a", plan(&["spec.training.seed=7"]))] {
        let events = EventLog::default();
        let other = start(run, plan, &journal, &events).await.unwrap();
        assert!(!other.is_recovered(), "the journal belongs to another job");
        assert!(events.after(0, 9).is_empty(), "events of another job are dropped");
        assert_ne!(answer_and_die(&other).await, attempt);
    }
}

/// The old process may still run behind a network partition.
#[tokio::test(flavor = "multi_thread")]
async fn a_superseded_member_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let coordinator = start("a", plan(&[]), folder.path(), &EventLog::default()).await.unwrap();
    let transport = transport();
    let address: Address = "local://coordinator".parse().unwrap();
    let _serving = transport.serve(Arc::clone(&coordinator) as Arc<dyn Service>, &address).unwrap();
    let channel = transport.connect(&address).unwrap();
    let ask = |id: u64, kind: u16, request: Vec<u8>, seconds: u64| {
        let caller = v1::Caller { id, number: u64::from(kind), unanswered: vec![u64::from(kind)], attempt: 0 };
        let meta = [request, caller.encode_to_vec()].concat().into();
        channel.call(Frame { kind, meta, tensors: Vec::new() }, Duration::from_secs(seconds))
    };
    let join = |name: &str| {
        let (role, address) = (v1::Role::DenseWorker.into(), format!("local://{name}"));
        v1::Join { role, index: 0, address, attempt: 0 }.encode_to_vec()
    };
    let asking = async {
        // The reply to a join waits for all members.
        for (id, name) in [(1, "first"), (2, "second")] {
            assert!(matches!(ask(id, JOIN, join(name), 1).await, Err(WireError::Deadline { .. })), "{name}");
        }
        let order = v1::OrderRequest { rank: 0, done: 0 }.encode_to_vec();
        let refused = ask(1, ORDER, order.clone(), 5).await.unwrap_err().to_string();
        assert!(refused.contains("another process has replaced this member"), "{refused}");
        let waits = ask(2, ORDER, order, 1).await;
        assert!(matches!(waits, Err(WireError::Deadline { .. })), "{waits:?}");
    };
    tokio::select! {
        ended = coordinator.run(&transport) => panic!("the job has ended: {:?}", ended.map(|summary| summary.steps)),
        () = asking => {}
    }
}

/// A parameter server that only confirms requests. When it is told to copy a slot, it checks
/// whether a coordinator could recover from the journal as it is then.
struct Server {
    slots: usize,
    journal: PathBuf,
    found: mpsc::UnboundedSender<bool>,
}

impl Service for Server {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            let one_each = || Tensor::from(vec![1u64; self.slots]);
            let tensors = if frame.kind == MEASURE_SLOTS { vec![one_each(), one_each()] } else { Vec::new() };
            if frame.kind == COPY_SLOT {
                let left = tempfile::tempdir().unwrap();
                for file in std::fs::read_dir(&self.journal).unwrap().map(Result::unwrap) {
                    std::fs::copy(file.path(), left.path().join(file.file_name())).unwrap();
                }
                let next = start("a", plan(&[]), left.path(), &EventLog::default()).await.unwrap();
                self.found.send(next.is_recovered()).unwrap();
            }
            Ok(Frame { kind: frame.kind, tensors, ..Frame::default() })
        })
    }
}

/// Adds a parameter server to a job. Before it joins, the coordinator is about to end if `leaves`.
/// Returns whether a coordinator could recover when the first slot moves; `None` if none moves.
async fn add_server(leaves: bool) -> Option<bool> {
    let folder = tempfile::tempdir().unwrap();
    let coordinator = start("a", plan(&[]), folder.path(), &EventLog::default()).await.unwrap();
    let transport = transport();
    let (found, mut looked) = mpsc::unbounded_channel();
    let slots = plan(&[]).store.slots as usize;
    let server = Arc::new(Server { slots, journal: folder.path().to_owned(), found });
    let serve = |service: Arc<dyn Service>, name: &str| {
        let address: Address = format!("local://{name}").parse().unwrap();
        (transport.serve(service, &address).unwrap(), address)
    };
    let (_serving, address) = serve(Arc::clone(&coordinator) as Arc<dyn Service>, "coordinator");
    let _servers = ["Ps-0", "Ps-1"].map(|name| serve(Arc::clone(&server) as Arc<dyn Service>, name));
    let channel = transport.connect(&address).unwrap();
    let join = |role: v1::Role, index: u32| {
        let request = v1::Join { role: role.into(), index, address: format!("local://{role:?}-{index}"), attempt: 0 };
        let caller =
            v1::Caller { id: 10 * (role as u64) + u64::from(index), number: 1, unanswered: vec![1], attempt: 0 };
        let meta = [request.encode_to_vec(), caller.encode_to_vec()].concat().into();
        channel.call(Frame { kind: JOIN, meta, tensors: Vec::new() }, Duration::from_secs(20))
    };
    let resizing = async {
        let others = [v1::Role::Ps, v1::Role::EmbeddingWorker, v1::Role::DenseWorker, v1::Role::Loader];
        futures::future::try_join_all(others.map(|role| join(role, 0))).await.unwrap();
        coordinator.request_scale(Role::Ps, 2).unwrap();
        if leaves {
            assert!(coordinator.leave().await.is_err(), "the job saves no checkpoints");
        }
        join(v1::Role::Ps, 1).await.unwrap();
        let patience = Duration::from_secs(if leaves { 2 } else { 60 });
        tokio::time::timeout(patience, looked.recv()).await.ok().map(Option::unwrap)
    };
    tokio::select! {
        ended = coordinator.run(&transport) => panic!("the job has ended: {:?}", ended.map(|summary| summary.steps)),
        is_recovered = resizing => is_recovered,
    }
}

/// A coordinator that does not know of the migration would reuse its number. Servers would then
/// take changed rows for repeated ones.
#[tokio::test(flavor = "multi_thread")]
async fn no_coordinator_recovers_without_a_migration_that_servers_know() {
    assert_eq!(add_server(false).await, Some(false));
}

/// No replacement of the coordinator could continue while slots move.
#[tokio::test(flavor = "multi_thread")]
async fn no_slots_begin_to_move_while_the_coordinator_ends() {
    assert_eq!(add_server(true).await, None);
}

/// A parameter server that keeps a copy of the journal, and only confirms all other requests.
#[derive(Default)]
struct Keeper {
    copy: Mutex<Option<(v1::JournalHead, Vec<u8>)>>,
    /// Whether another coordinator has claimed the copy.
    is_claimed: AtomicBool,
}

impl Service for Keeper {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            let reply = Frame { kind: frame.kind, ..Frame::default() };
            match frame.kind {
                PUT_JOURNAL if self.is_claimed.load(Ordering::Relaxed) => {
                    return Err(Refusal::new(COORDINATOR_SUPERSEDED, "another coordinator leads the job now"));
                }
                PUT_JOURNAL => {
                    let head = v1::PutJournal::decode(frame.meta).unwrap().head.unwrap();
                    *self.copy.lock().unwrap() = Some((head, frame.tensors[0].as_u8("image").unwrap().to_vec()));
                }
                CLAIM_JOURNAL => {
                    let claim = v1::ClaimJournal::decode(frame.meta).unwrap();
                    let (head, image) = self.copy.lock().unwrap().clone().unwrap();
                    assert_eq!(claim.job, head.job);
                    let (meta, tensors) = (head.encode_to_vec().into(), vec![Tensor::from(image)]);
                    return Ok(Frame { meta, tensors, ..reply });
                }
                _ => {}
            }
            Ok(reply)
        })
    }
}

/// A job whose members have joined and whose coordinator died after the first copy of its journal.
struct Begun {
    transport: InProcess,
    keeper: Arc<Keeper>,
    _server: Serving,
    folder: TempDir,
    /// The reply to a request for the attempt.
    attempt: Vec<u8>,
}

/// The address of the coordinator.
fn coordinator() -> Address {
    Address::local("coordinator")
}

/// The address of the parameter server.
fn server() -> Address {
    Address::local("Ps-0")
}

/// Sends a request of the member `id` to the coordinator.
async fn ask(transport: &InProcess, id: u64, kind: u16, request: Vec<u8>, attempt: u64) -> Result<Frame, WireError> {
    let caller = v1::Caller { id, number: u64::from(kind), unanswered: vec![u64::from(kind)], attempt };
    let frame = Frame { kind, meta: [request, caller.encode_to_vec()].concat().into(), tensors: Vec::new() };
    transport.connect(&coordinator()).unwrap().call(frame, Duration::from_secs(20)).await
}

async fn begun() -> Begun {
    let transport = transport();
    let keeper = Arc::new(Keeper::default());
    let server = transport.serve(Arc::clone(&keeper) as Arc<dyn Service>, &server()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let first = start("a", plan(&[]), folder.path(), &EventLog::default()).await.unwrap();
    let serving = transport.serve(Arc::clone(&first) as Arc<dyn Service>, &coordinator()).unwrap();
    let training = async {
        let joining = [v1::Role::Ps, v1::Role::EmbeddingWorker, v1::Role::DenseWorker, v1::Role::Loader].map(|role| {
            let address = format!("local://{role:?}-0");
            let join = v1::Join { role: role.into(), index: 0, address, attempt: 0 };
            ask(&transport, 10 * (role as u64), JOIN, join.encode_to_vec(), 0)
        });
        futures::future::try_join_all(joining).await.unwrap();
        loop {
            let attempt = ask(&transport, 1, ATTEMPT, Vec::new(), 0).await.unwrap().meta;
            if keeper.copy.lock().unwrap().is_some() {
                return attempt.to_vec();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let attempt = tokio::select! {
        ended = first.run(&transport) => panic!("the job has ended: {:?}", ended.map(|summary| summary.steps)),
        attempt = training => attempt,
    };
    drop((serving, first));
    Begun { transport, keeper, _server: server, folder, attempt }
}

/// The loss of the coordinator's machine: the next one finds no journal there.
#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_with_an_empty_folder_recovers_from_a_copy() {
    let Begun { transport, attempt, folder: _lost, keeper: _keeper, _server } = begun().await;
    let number = v1::Attempt::decode(&*attempt).unwrap().attempt;
    let end = v1::JobEndRequest { role: v1::Role::Ps.into(), index: 0, address: server().to_string() };
    let folder = tempfile::tempdir().unwrap();
    let place = JournalPlace::new(folder.path(), 0);
    let (plan, address) = (plan(&[]), coordinator());
    let recovering = recover_copy(place, &plan, "a", &transport, &address);
    let asking = ask(&transport, 10, JOB_END, end.encode_to_vec(), number);
    let (is_recovered, closed) = tokio::join!(recovering, asking);
    assert!(is_recovered.unwrap());
    assert!(matches!(closed, Err(WireError::Closed { .. })), "{closed:?}");
    let second = start("a", plan, folder.path(), &EventLog::default()).await.unwrap();
    assert!(second.is_recovered() && second.status().recovered);
    assert_eq!(answer_and_die(&second).await, attempt);
}

/// The old coordinator restarts on its node while another one leads the job.
#[tokio::test(flavor = "multi_thread")]
async fn a_superseded_coordinator_gives_up_its_journal() {
    let begun = begun().await;
    begun.keeper.is_claimed.store(true, Ordering::Relaxed);
    let events = EventLog::default();
    let second = start("a", plan(&[]), begun.folder.path(), &events).await.unwrap();
    assert!(second.is_recovered());
    let ended = second.run(&begun.transport).await;
    assert!(matches!(ended, Err(RoleError::Superseded)), "{:?}", ended.map(|summary| summary.steps));
    assert!(!format!("{:?}", events.after(0, 99)).contains("Failed"), "the job has not failed");
    let third = start("a", plan(&[]), begun.folder.path(), &EventLog::default()).await.unwrap();
    assert!(!third.is_recovered());
}

/// A member fails because it is cut off from the others, together with its coordinator.
#[tokio::test(flavor = "multi_thread")]
async fn a_superseded_coordinator_does_not_report_a_failure() {
    let Begun { transport, keeper, _server, folder, attempt } = begun().await;
    let sequence = || keeper.copy.lock().unwrap().as_ref().map(|(head, _)| head.sequence);
    let first = sequence();
    let events = EventLog::default();
    let second = start("a", plan(&[]), folder.path(), &events).await.unwrap();
    let _serving = transport.serve(Arc::clone(&second) as Arc<dyn Service>, &coordinator()).unwrap();
    let number = v1::Attempt::decode(&*attempt).unwrap().attempt;
    let end = v1::JobEndRequest { role: v1::Role::Loader.into(), index: 0, address: "local://Loader-0".to_owned() };
    let learning = async {
        while sequence() == first {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        keeper.is_claimed.store(true, Ordering::Relaxed);
        second.fail("for the test".to_owned(), false);
        ask(&transport, 10 * (v1::Role::Loader as u64), JOB_END, end.encode_to_vec(), number).await
    };
    tokio::select! {
        end = learning => panic!("a member learned of a failure: {end:?}"),
        ended = second.run(&transport) => {
            assert!(matches!(ended, Err(RoleError::Superseded)), "{:?}", ended.map(|summary| summary.steps));
        }
    }
    assert!(!format!("{:?}", events.after(0, 99)).contains("Failed"), "the job has not failed");
}

/// All servers of a first attempt, or of one after a restart of all roles, are new.
#[tokio::test(flavor = "multi_thread")]
async fn new_servers_begin_an_attempt_without_a_recovery() {
    let (transport, address) = (transport(), Address::local("coordinator"));
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(&[]);
    let recovering = recover_copy(JournalPlace::new(folder.path(), 2), &plan, "a", &transport, &address);
    let channel = transport.connect(&address).unwrap();
    let caller = v1::Caller { id: 7, number: 1, unanswered: vec![1], attempt: 0 };
    let frame = Frame { kind: ATTEMPT, meta: caller.encode_to_vec().into(), tensors: Vec::new() };
    let (is_recovered, _closed) = tokio::join!(recovering, channel.call(frame, Duration::from_secs(20)));
    assert!(!is_recovered.unwrap());
    assert!(!start("a", plan, folder.path(), &EventLog::default()).await.unwrap().is_recovered());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_job_is_not_recovered() {
    let folder = tempfile::tempdir().unwrap();
    let first = start("a", plan(&[]), folder.path(), &EventLog::default()).await.unwrap();
    answer_and_die(&first).await;
    first.fail("for the test".to_owned(), false);
    first.run(&transport()).await.unwrap_err();
    let second = start("a", plan(&[]), folder.path(), &EventLog::default()).await.unwrap();
    assert!(!second.is_recovered());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unwritable_folder_is_named_and_a_damaged_journal_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = start("a", plan(&[]), &file, &EventLog::default()).await.err().unwrap();
    assert!(error.to_string().contains(&file.display().to_string()), "{error}");

    let first = start("a", plan(&[]), folder.path(), &EventLog::default()).await.unwrap();
    answer_and_die(&first).await;
    for name in ["state-0", "state-1"] {
        let mut bytes = std::fs::read(folder.path().join(name)).unwrap();
        bytes.iter_mut().skip(100).step_by(7).for_each(|byte| *byte ^= 0x55);
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    let second = start("a", plan(&[]), folder.path(), &EventLog::default()).await.unwrap();
    assert!(!second.is_recovered());
}
