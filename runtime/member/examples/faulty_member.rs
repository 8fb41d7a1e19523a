//! A faulty member: it has the job's certificate and sends the job's only parameter server bad
//! gradients until it is ended. The gradients belong to rows that do not exist, are not finite, or
//! are of more ids than a budget has rows for. Used by trials of the alerts on such gradients. The
//! mode of the job must be `async`, and its eviction `lru`, if it has a budget.
//!
//!     cargo run --release -p rectrain-member --example faulty_member -- tcp://HOST:7000
//!     CERTIFICATES missing|not-finite|crowds

use std::path::Path;
use std::time::Duration;

use prost::Message;
use rectrain_proto::v1;
use rectrain_protocol::kind_name;
use rectrain_wire::tls::Credentials;
use rectrain_wire::{Address, Channel, Frame, TcpConfig, TcpTransport, Tensor, Transport, WireCounters};

const DEADLINE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);
/// Row groups of a model, at most.
const MOST_GROUPS: usize = 16;
/// Rows of each group in a push.
const ROWS: u64 = 20_000;
/// A rank that no dense worker has.
const RANK: u32 = 1 << 20;
/// The first row of the batches; the data has no such row.
const FIRST_ROW: u64 = 1 << 40;

/// The event time of the first push, in seconds since 1970.
const EVENT_TIME: u64 = 1_700_000_000;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let [server, certificates, fault] = std::env::args().skip(1).collect::<Vec<_>>().try_into().map_err(|_| USAGE)?;
    let (is_missing, gradient) = match fault.as_str() {
        "missing" => (true, 1.0),
        "not-finite" => (false, f32::NAN),
        "crowds" => (false, 1.0),
        _ => return Err(USAGE.into()),
    };
    let config = TcpConfig { credentials: Some(Credentials::read(Path::new(&certificates))?), ..TcpConfig::default() };
    let transport = TcpTransport::new(config, WireCounters::unregistered(kind_name)?);
    let address: Address = server.parse()?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let server = transport.connect(&address)?;
        let widths = widths(&server).await?;
        println!("groups of rows of {widths:?} values");
        for number in 0.. {
            let keys: Vec<u64> = (0..ROWS).map(|row| (number * ROWS + row + 1) << 20).collect();
            if !is_missing {
                look_up(&server, &keys, widths.len()).await?;
            }
            push(&server, number, &keys, &widths, gradient).await?;
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    })
}

const USAGE: &str = "expected: tcp://HOST:PORT CERTIFICATES missing|not-finite|crowds";

/// The width of a row of each group.
async fn widths(server: &Channel) -> Result<Vec<usize>, Failure> {
    let mut last = None;
    for groups in 1..=MOST_GROUPS {
        match look_up(server, &[1], groups).await {
            Ok(rows) => return Ok(rows.iter().map(|row| row.data().len()).collect()),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| "the model has no rows".into()))
}

/// Looks up the rows of these keys in each group, which creates them.
async fn look_up(server: &Channel, keys: &[u64], groups: usize) -> Result<Vec<Tensor>, Failure> {
    let request = v1::Lookup { train: true, ..v1::Lookup::default() };
    call(server, "lookup", &request, vec![Tensor::from(keys.to_vec()); groups]).await
}

async fn push(server: &Channel, number: u64, keys: &[u64], widths: &[usize], gradient: f32) -> Result<(), Failure> {
    let push =
        v1::TokenPush { rank: RANK, first_row: FIRST_ROW + number, rows: 1, pulled_at: vec![0], ..Default::default() };
    let request = v1::Update { push: Some(push), moment: EVENT_TIME + number, ..v1::Update::default() };
    let of_group = |width: &usize| [Tensor::from(keys.to_vec()), Tensor::from(vec![gradient; keys.len() * width])];
    call(server, "update", &request, widths.iter().flat_map(of_group).collect()).await.map(drop)
}

async fn call(
    server: &Channel,
    name: &str,
    request: &impl Message,
    tensors: Vec<Tensor>,
) -> Result<Vec<Tensor>, Failure> {
    let kind = (0..u16::MAX).find(|kind| kind_name(*kind) == name).ok_or_else(|| format!("there is no `{name}`"))?;
    let frame = Frame { kind, meta: request.encode_to_vec().into(), tensors };
    Ok(server.call(frame, DEADLINE).await?.tensors)
}
