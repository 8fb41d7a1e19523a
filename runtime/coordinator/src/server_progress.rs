//! Polls the parameter servers: the size of their tables, for the status of the job, and their
//! progress while all other members wait for them.
//!
//! Servers restore rows, write a checkpoint that training waits for, or compute the digest at the
//! end. With many rows this takes longer than a job may be without progress. So the coordinator
//! polls how much work each server has done. As long as that increases, the job makes progress. A
//! server that hangs reports the same number again, or nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::future::join_all;
use rectrain_modes::migration::SlotMap;
use rectrain_proto::v1;
use rectrain_wire::Channel;

use super::Coordinator;
use rectrain_protocol::message;

/// The time between two polls, and the deadline of each.
const EVERY: Duration = Duration::from_secs(3);

impl Coordinator {
    /// Polls the servers. Their work is progress of the job whenever all other members wait for
    /// them. Never returns.
    pub(super) async fn poll_servers<T>(&self) -> T {
        let mut done = Vec::new();
        loop {
            tokio::time::sleep(EVERY).await;
            let Ok(placement) = self.placement() else { continue };
            let works = ask(&placement.servers, EVERY).await;
            self.note_work(&works, &mut done);
            self.table_sizes.lock().note(&placement.map, &works);
        }
    }

    /// Notes the work of the servers as progress, if all other members wait for it. `done` has
    /// their previous numbers.
    fn note_work(&self, works: &[Option<v1::Work>], done: &mut Vec<u64>) {
        let is_more = is_more(works, done);
        let mut state = self.lock();
        if is_more && state.is_waiting_for_servers() {
            state.note_server_progress();
        }
    }

    /// The size of all tables. `None` until every server has reported its own.
    pub(super) fn table_size(&self) -> Option<v1::TableSize> {
        self.table_sizes.lock().total(&self.placement().ok()?.map)
    }
}

/// Asks each server. `None` for a server that does not answer in time.
async fn ask(servers: &[Channel], within: Duration) -> Vec<Option<v1::Work>> {
    let asking = servers.iter().map(|server| message::call(server, v1::WorkRequest {}, Vec::new(), within));
    join_all(asking).await.into_iter().map(|answer| answer.ok().map(|(work, _)| work)).collect()
}

/// Whether some server has done more than before. `done` has the numbers before, and gets the
/// present ones.
fn is_more(works: &[Option<v1::Work>], done: &mut Vec<u64>) -> bool {
    done.resize(works.len(), 0);
    let mut is_more = false;
    for (done, work) in done.iter_mut().zip(works) {
        // A server that does not answer has made no known progress.
        if let Some(work) = work {
            is_more |= work.done > *done;
            // The number falls when a server was restarted.
            *done = work.done;
        }
    }
    is_more
}

/// The sizes of the tables that the servers last reported, by number of the server.
#[derive(Debug, Default)]
pub(super) struct TableSizes(BTreeMap<u16, v1::TableSize>);

impl TableSizes {
    /// Notes the answers of the servers of this map. Forgets servers that left the map.
    fn note(&mut self, map: &SlotMap, works: &[Option<v1::Work>]) {
        self.0.retain(|server, _| map.servers().contains(server));
        for (server, work) in map.servers().iter().zip(works) {
            if let Some(size) = work.as_ref().and_then(|work| work.tables) {
                self.0.insert(*server, size);
            }
        }
    }

    /// The size of all tables. `None` unless each server of this map has reported its own.
    fn total(&self, map: &SlotMap) -> Option<v1::TableSize> {
        let mut total = v1::TableSize::default();
        for server in map.servers() {
            let size = self.0.get(server)?;
            total.rows += size.rows;
            total.bytes += size.bytes;
        }
        Some(total)
    }

    /// Rows and bytes by number of the server.
    pub(super) fn by_server(&self) -> BTreeMap<usize, (u64, u64)> {
        self.0.iter().map(|(server, size)| (usize::from(*server), (size.rows, size.bytes))).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use rectrain_modes::migration::Epoch;
    use rectrain_wire::{
        Address, BoxFuture, Frame, InProcess, InProcessConfig, Peer, Refusal, Service, Serving, Transport, WireCounters,
    };

    use super::*;
    use rectrain_protocol::message::Request;

    /// A server that has done this much work, and that hangs if the number is [`HANGS`].
    struct Server(AtomicU64);

    const HANGS: u64 = u64::MAX;

    impl Service for Server {
        fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
            Box::pin(async move {
                assert_eq!(frame.kind, v1::WorkRequest::KIND);
                let done = self.0.load(Ordering::Relaxed);
                if done == HANGS {
                    std::future::pending::<()>().await;
                }
                let tables = Some(v1::TableSize { rows: done, bytes: 100 * done });
                let work = v1::Work { done, tables, ..v1::Work::default() };
                Ok(message::reply::<v1::WorkRequest>(&work, Vec::new()))
            })
        }
    }

    /// The deadline of an answer. Only servers that hang take it.
    const DEADLINE: Duration = Duration::from_millis(500);

    fn transport() -> InProcess {
        InProcess::new(InProcessConfig::default(), WireCounters::unregistered(|_| "test").unwrap())
    }

    /// Channels to these servers. They serve until the first value is dropped.
    fn served(transport: &InProcess, servers: &[Arc<Server>]) -> (Vec<Serving>, Vec<Channel>) {
        let served = servers.iter().zip(["a", "b"]).map(|(server, name)| {
            let address = Address::local(name);
            let serving = transport.serve(Arc::clone(server) as Arc<dyn Service>, &address).unwrap();
            (serving, transport.connect(&address).unwrap())
        });
        served.unzip()
    }

    #[tokio::test]
    async fn only_servers_that_have_done_more_are_progress() {
        let servers = [5, 7].map(|done| Arc::new(Server(AtomicU64::new(done))));
        let transport = transport();
        let (_serving, channels) = served(&transport, &servers);
        let mut done = Vec::new();
        // Each case has the numbers of both servers, and whether they are progress.
        for (work, progresses) in [
            ((5, 7), true),
            ((5, 7), false),
            ((5, 8), true),
            ((6, HANGS), true),
            ((6, HANGS), false),
            ((6, 2), false),
            ((6, 3), true),
            ((6, 3), false),
        ] {
            servers[0].0.store(work.0, Ordering::Relaxed);
            servers[1].0.store(work.1, Ordering::Relaxed);
            assert_eq!(is_more(&ask(&channels, DEADLINE).await, &mut done), progresses, "{work:?}");
        }
    }

    #[tokio::test]
    async fn the_size_of_all_tables_is_known_once_every_server_has_answered() {
        let servers = [5, HANGS].map(|done| Arc::new(Server(AtomicU64::new(done))));
        let transport = transport();
        let (_serving, channels) = served(&transport, &servers);
        let map = |servers: &[u16]| SlotMap::new(Epoch(1), servers.to_vec(), servers.to_vec()).unwrap();
        let (both, mut sizes) = (map(&[0, 3]), TableSizes::default());
        sizes.note(&both, &ask(&channels, DEADLINE).await);
        assert_eq!(sizes.total(&both), None);
        servers[1].0.store(2, Ordering::Relaxed);
        sizes.note(&both, &ask(&channels, DEADLINE).await);
        assert_eq!(sizes.total(&both), Some(v1::TableSize { rows: 7, bytes: 700 }));
        assert_eq!(sizes.by_server(), BTreeMap::from([(0, (5, 500)), (3, (2, 200))]));
        servers[1].0.store(HANGS, Ordering::Relaxed);
        sizes.note(&both, &ask(&channels, DEADLINE).await);
        assert_eq!(sizes.total(&both).unwrap().rows, 7, "the last number of a server that hangs");
        sizes.note(&map(&[0]), &ask(&channels[..1], DEADLINE).await);
        assert_eq!(sizes.total(&map(&[0])), Some(v1::TableSize { rows: 5, bytes: 500 }));
        assert_eq!(sizes.total(&both), None, "a server that comes back starts anew");
    }
}
