//! A server with a model that tests can block, and a small HTTP client.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use prometheus::Registry;
use rectrain_data::{Batch, DenseField, LabelField, MissingValue, Schema, SparseField, Transform};
use rectrain_inference::{
    Arrived, InferenceError, Limits, NextModel, Patience, Predict, ServedModel, Server, WarmedUp, listen, warm_up,
};
use rectrain_serving::{LookUps, Predictions, ServingError};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// The looks at a state before a test gives up, and the time between two of them.
const LOOKS: u32 = 6000;
const EVERY: Duration = Duration::from_millis(5);

/// A model whose probability is the row's `x` plus a quarter for each tag. Each second id of a user
/// has no row. It fails on a batch with a negative `x`.
struct Fake(Arc<Gate>);

/// The test's side of the model.
#[derive(Default)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    blocked: bool,
    panics: bool,
    /// Rows of each batch since the first block, in order.
    batches: Vec<usize>,
    /// Batches that have reached the gate since the first block.
    entered: usize,
}

impl Gate {
    /// The next batch waits for [`Gate::release`].
    pub fn block(&self) {
        *self.state.lock() = GateState { blocked: true, ..GateState::default() };
    }

    pub fn release(&self) {
        self.state.lock().blocked = false;
        self.changed.notify_all();
    }

    /// The blocked batch panics.
    pub fn panic(&self) {
        self.state.lock().panics = true;
        self.release();
    }

    pub fn batches(&self) -> Vec<usize> {
        self.state.lock().batches.clone()
    }

    pub async fn until_entered(&self, batches: usize) {
        until("the model has a batch", async || self.state.lock().entered >= batches).await;
    }

    fn pass(&self, rows: usize) {
        let mut state = self.state.lock();
        state.entered += 1;
        self.changed.wait_while(&mut state, |state| state.blocked);
        state.batches.push(rows);
        let panics = state.panics;
        drop(state);
        assert!(!panics, "the test wants a panic");
    }
}

impl Predict for Fake {
    type Rows = ();

    fn read(&mut self, _batch: &Batch, _patience: Patience, _arrived: &Arrived) -> Result<(), ServingError> {
        Ok(())
    }

    fn predict(&mut self, batch: &Batch, (): ()) -> Result<Predictions, ServingError> {
        self.0.pass(batch.samples);
        if batch.dense.iter().any(|x| *x < 0.0) {
            let (model, problem) = ("clicks".to_owned(), "a negative number".to_owned());
            return Err(ServingError::Description { model, problem });
        }
        let tags = |row| batch.sparse[1].row(row).len() as f32;
        let probabilities = (0..batch.samples).map(|row| batch.dense[row] + tags(row) / 4.0).collect();
        let ids = batch.samples as u64;
        let look_ups = vec![LookUps { ids, unseen: ids / 2 }, LookUps::default()];
        Ok(Predictions { probabilities, look_ups })
    }

    fn set_model(&mut self, _next: NextModel) -> Result<(), ServingError> {
        panic!("no test of this server offers another model");
    }
}

fn schema() -> Schema {
    let sparse = |name: &str, separator: Option<&str>| SparseField {
        name: name.into(),
        table: name.into(),
        multi_value: separator.map(str::to_owned),
        missing: MissingValue::Token,
        hash_buckets: None,
    };
    Schema {
        sparse: vec![sparse("user", None), sparse("tags", Some("|"))],
        dense: vec![DenseField { name: "x".into(), transform: Transform::Identity, missing: 0.5, limit: 1e15 }],
        label: LabelField::of_numbers("label", None),
        group: None,
        time: None,
    }
}

/// No request waits for others, so that a blocked model has one request alone.
pub fn limits() -> Limits {
    Limits { max_wait: Duration::ZERO, timeout: Duration::from_secs(60), ..Limits::default() }
}

/// Inputs with one user, one tag, and these values of `x`.
pub fn inputs(xs: &[f32]) -> Vec<Value> {
    vec![
        json!({"name": "user", "shape": [1], "datatype": "BYTES", "data": ["u1"]}),
        json!({"name": "tags", "shape": [1], "datatype": "BYTES", "data": ["a"]}),
        json!({"name": "x", "shape": [xs.len()], "datatype": "FP32", "data": xs}),
    ]
}

/// A response.
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Reply {
    pub fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Self { status: status.unwrap_or_else(|| panic!("no response: {text:?}")), head: head.into(), body: body.into() }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

/// Sends a request, and reads the response to its end.
async fn exchange(address: SocketAddr, request: String) -> Reply {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    Reply::parse(&answer)
}

pub fn infer_request(headers: &str, request: &Value) -> String {
    let body = request.to_string();
    let length = body.len();
    format!(
        "POST /v2/models/clicks/infer HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{headers}Content-Length: \
         {length}\r\n\r\n{body}"
    )
}

/// Waits until a condition holds.
pub async fn until(state: &str, condition: impl AsyncFn() -> bool) {
    for _ in 0..LOOKS {
        if condition().await {
            return;
        }
        tokio::time::sleep(EVERY).await;
    }
    panic!("never: {state}");
}

/// A server of the model `clicks`, step 7.
pub struct Host {
    /// The address of REST.
    pub address: SocketAddr,
    /// The address of gRPC.
    pub grpc: SocketAddr,
    pub model: Arc<Gate>,
    end: Option<oneshot::Sender<()>>,
    serving: JoinHandle<Result<(), InferenceError>>,
}

/// The description of the model.
fn served() -> ServedModel {
    let (name, schema) = ("clicks".into(), schema());
    ServedModel { name, step: 7, rows: 9, schema, null_values: vec![], publication: None }
}

/// Warms the model up, and returns the rows of its batches too.
pub fn replay(file: &Path, time: Duration, limits: &Limits) -> (Result<WarmedUp, InferenceError>, Vec<usize>) {
    let model = Arc::new(Gate::default());
    let done = warm_up(file, time, &served(), &mut Fake(Arc::clone(&model)), limits);
    (done, model.batches())
}

impl Host {
    pub async fn start(limits: Limits) -> Self {
        Self::start_as(limits, |server| server).await
    }

    /// A server that `change` has changed.
    pub async fn start_as(limits: Limits, change: impl FnOnce(Server) -> Server) -> Self {
        let model = Arc::new(Gate::default());
        let server = change(Server::new(served(), Fake(Arc::clone(&model)), limits, Registry::new()).unwrap());
        let (listener, address) = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let (grpc_listener, grpc) = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let (end, ending) = oneshot::channel::<()>();
        let serving = tokio::spawn(server.serve(listener, Some(grpc_listener), async {
            let _dropped = ending.await;
        }));
        Self { address, grpc, model, end: Some(end), serving }
    }

    /// As the signal to end.
    pub fn end(&mut self) {
        self.end.take();
    }

    /// The result of the server, once it has ended.
    pub async fn ended(self) -> Result<(), InferenceError> {
        self.serving.await.unwrap()
    }

    pub fn send(&self, request: String) -> impl Future<Output = Reply> + Send + use<> {
        exchange(self.address, request)
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")).await
    }

    pub async fn infer(&self, request: &Value) -> Reply {
        self.infer_with("", request).await
    }

    pub async fn infer_with(&self, headers: &str, request: &Value) -> Reply {
        self.send(infer_request(headers, request)).await
    }

    /// A request that a test waits for later.
    pub fn spawn_infer(&self, xs: &[f32]) -> JoinHandle<Reply> {
        tokio::spawn(self.send(infer_request("", &json!({ "inputs": inputs(xs) }))))
    }

    /// A connection with a request whose response is not read.
    pub async fn open_infer(&self, request: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(infer_request("", request).as_bytes()).await.unwrap();
        stream
    }

    /// The value of a metric; 0 if it has none yet.
    pub async fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics").await.body;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.map_or(0, |value| value.parse::<f64>().unwrap() as u64)
    }

    pub async fn until_metric(&self, name: &str, value: u64) {
        until(&format!("{name} is {value}"), async || self.metric(name).await == value).await;
    }

    pub async fn until_status(&self, path: &str, status: u16) {
        until(&format!("{path} has {status}"), async || self.get(path).await.status == status).await;
    }

    /// Waits until the server accepts no connection.
    pub async fn until_refused(&self) {
        until("no connection is accepted", async || TcpStream::connect(self.address).await.is_err()).await;
    }
}
