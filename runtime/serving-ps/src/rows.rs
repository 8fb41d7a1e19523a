//! The look-ups over gRPC.

use std::pin::Pin;
use std::time::Instant;

use futures::Stream;
use rectrain_rows_proto as v1;
use rectrain_rows_proto::rows_server::{Rows, RowsServer};
use rectrain_serving::shard::{FoundRows, key_count, keys_in, shard_of};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::held::Held;
use crate::metrics::Metrics;

/// The most keys of a look-up.
pub(crate) const MAX_KEYS: usize = 1 << 16;
/// The most look-ups in progress.
const MAX_LOOK_UPS: usize = 1024;
/// The most bytes of a request: its keys, and room for the rest.
const MAX_REQUEST_BYTES: usize = 8 * MAX_KEYS + (64 << 10);

/// The service for tonic.
pub(crate) struct LookUps {
    pub(crate) shard: u32,
    pub(crate) shards: u32,
    pub(crate) held: watch::Receiver<Held>,
    pub(crate) metrics: Metrics,
    /// Ends the watches, so that the server can end.
    pub(crate) stop: CancellationToken,
    in_progress: Semaphore,
}

type Watching = Pin<Box<dyn Stream<Item = Result<v1::Held, Status>> + Send>>;

impl LookUps {
    pub(crate) fn new(
        shard: u32,
        shards: u32,
        held: watch::Receiver<Held>,
        metrics: Metrics,
        stop: CancellationToken,
    ) -> Self {
        Self { shard, shards, held, metrics, stop, in_progress: Semaphore::new(MAX_LOOK_UPS) }
    }

    pub(crate) fn server(self) -> RowsServer<Self> {
        RowsServer::new(self).max_decoding_message_size(MAX_REQUEST_BYTES)
    }

    /// Refuses a caller that means another shard.
    fn check(&self, shard: u32, shards: u32) -> Result<(), Status> {
        if (shard, shards) == (self.shard, self.shards) {
            return Ok(());
        }
        let (own, all) = (self.shard, self.shards);
        Err(Status::failed_precondition(format!(
            "this server holds shard {own} of {all}, and the caller means shard {shard} of {shards}; compare the \
             order and the number of --rows-from with --shard and --shards"
        )))
    }

    /// The number of keys of a request, all of this shard.
    fn check_keys(&self, groups: &[Vec<u8>]) -> Result<usize, Status> {
        let mut count = 0;
        for keys in groups {
            let own = key_count(keys).ok_or_else(|| Status::invalid_argument("the last key is not whole"))?;
            count += own;
            if let Some(key) = keys_in(keys).find(|key| shard_of(*key, self.shards) != self.shard) {
                let (own, all) = (self.shard, self.shards);
                return Err(Status::invalid_argument(format!("the key {key:016x} is not of shard {own} of {all}")));
            }
        }
        match count {
            0..=MAX_KEYS => Ok(count),
            _ => {
                Err(Status::invalid_argument(format!("the look-up has {count} keys, and at most {MAX_KEYS} are read")))
            }
        }
    }

    fn answer(&self, request: &v1::LookUpRequest) -> Result<v1::LookUpResponse, Status> {
        self.check(request.shard, request.shards)?;
        let keys = self.check_keys(&request.keys)?;
        let held = self.held.borrow().clone();
        let Some(version) = held.find(request.sequence, &request.digest) else {
            self.metrics.not_held.inc();
            return Ok(v1::LookUpResponse { is_held: false, groups: Vec::new(), held: held.names() });
        };
        let tables = &version.model.tables;
        if request.keys.len() != tables.len() {
            let (found, expected) = (request.keys.len(), tables.len());
            let problem = format!("the look-up has {found} row groups, and the model has {expected}");
            return Err(Status::invalid_argument(problem));
        }
        let mut missing = 0;
        let groups = tables.iter().zip(&request.keys).map(|(table, keys)| {
            let FoundRows { present, values } = FoundRows::of(table, keys);
            let found: u32 = present.iter().map(|byte| byte.count_ones()).sum();
            missing += key_count(keys).unwrap_or(0) as u64 - u64::from(found);
            v1::GroupRows { present, values }
        });
        let response = v1::LookUpResponse { is_held: true, groups: groups.collect(), held: Vec::new() };
        self.metrics.keys.inc_by(keys as u64);
        self.metrics.missing_keys.inc_by(missing);
        let bytes: usize = response.groups.iter().map(|group| group.present.len() + group.values.len()).sum();
        self.metrics.bytes.inc_by(bytes as u64);
        Ok(response)
    }
}

#[tonic::async_trait]
impl Rows for LookUps {
    type WatchStream = Watching;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Watching>, Status> {
        let v1::WatchRequest { shard, shards } = request.into_inner();
        self.check(shard, shards)?;
        let mut held = self.held.clone();
        held.mark_changed();
        let state = (held, self.stop.clone());
        let changes = futures::stream::unfold(state, |(mut held, stop)| async move {
            tokio::select! {
                changed = held.changed() => changed.ok()?,
                () = stop.cancelled() => return None,
            }
            let message = held.borrow_and_update().message();
            Some((Ok(message), (held, stop)))
        });
        Ok(Response::new(Box::pin(changes)))
    }

    async fn look_up(&self, request: Request<v1::LookUpRequest>) -> Result<Response<v1::LookUpResponse>, Status> {
        let Ok(_permit) = self.in_progress.try_acquire() else {
            self.metrics.shed.inc();
            return Err(Status::resource_exhausted(format!("{MAX_LOOK_UPS} look-ups are in progress")));
        };
        let started = Instant::now();
        let answered = self.answer(request.get_ref());
        self.metrics.seconds.observe(started.elapsed().as_secs_f64());
        answered.map(Response::new)
    }
}
