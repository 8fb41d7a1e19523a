//! What parameter servers do while all wait for them: they restore rows, write a checkpoint that training rests for, or compute the digest at the
//! end. With many rows that takes longer than a job may be without progress. So they are asked meanwhile how much they have done, and as long as that
//! rises the job makes progress. One that hangs says the same again, or nothing.

use std::time::Duration;

use futures::future::join_all;
use rectrain_proto::v1;
use rectrain_wire::Channel;

use super::Coordinator;
use rectrain_protocol::message;

/// How often servers are asked, and how long they have for the answer.
const EVERY: Duration = Duration::from_secs(3);

impl Coordinator {
    /// Watches the servers whenever all wait for them; never ends.
    pub(super) async fn watch_servers<T>(&self) -> T {
        let mut done = Vec::new();
        loop {
            tokio::time::sleep(EVERY).await;
            if self.lock().waits_for_servers()
                && let Ok(placement) = self.placement()
            {
                self.ask_what_was_done(&placement.servers, &mut done).await;
            }
        }
    }

    /// `done` is what the servers have answered before.
    async fn ask_what_was_done(&self, servers: &[Channel], done: &mut Vec<u64>) {
        let asking = servers.iter().map(|server| message::call(server, v1::WorkRequest {}, Vec::new(), EVERY));
        let answers = join_all(asking).await;
        done.resize(servers.len(), 0);
        let mut is_more = false;
        for (done, answer) in done.iter_mut().zip(answers) {
            // Of one that does not answer nothing is known to be done.
            if let Ok((work, _)) = answer {
                is_more |= work.done > *done;
                // One that was started again counts anew.
                *done = work.done;
            }
        }
        if is_more {
            self.lock().servers_have_worked();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use prometheus::Registry;
    use rectrain_wire::{
        Address, BoxFuture, Frame, InProcess, InProcessConfig, Peer, Refusal, Service, Transport, WireCounters,
    };

    use super::*;
    use rectrain_protocol::events::EventLog;
    use rectrain_protocol::message::Request;
    use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
    use rectrain_protocol::plan::small_plan;

    /// A server that has done so much, and does not answer any more when that is [`HANGS`].
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
                Ok(message::reply::<v1::WorkRequest>(&v1::Work { done }, Vec::new()))
            })
        }
    }

    #[tokio::test]
    async fn servers_that_have_done_more_are_progress_and_others_are_none() {
        let plan = Arc::new(small_plan(&[]));
        let metrics = CoordinatorMetrics::of(&RoleMetrics::new(Registry::new()).unwrap(), 0);
        let coordinator = Coordinator::start(plan, "test", None, EventLog::default(), metrics).await.unwrap();
        let transport = InProcess::new(InProcessConfig::default(), WireCounters::unregistered(|_| "test").unwrap());
        let servers = [5, 7].map(|done| Arc::new(Server(AtomicU64::new(done))));
        let served = servers.iter().zip(["a", "b"]).map(|(server, name)| {
            let address = Address::local(name);
            let serving = transport.serve(Arc::clone(server) as Arc<dyn Service>, &address).unwrap();
            (serving, transport.connect(&address).unwrap())
        });
        let (_serving, channels): (Vec<_>, Vec<_>) = served.unzip();
        let mut done = Vec::new();
        // By how much a number for each server changes, and whether the job has progressed after it.
        let set = |first: u64, second: u64| {
            servers[0].0.store(first, Ordering::Relaxed);
            servers[1].0.store(second, Ordering::Relaxed);
        };
        let pause = Duration::from_millis(50);
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
            set(work.0, work.1);
            tokio::time::sleep(pause).await;
            let before = coordinator.status().idle_seconds.unwrap();
            coordinator.ask_what_was_done(&channels, &mut done).await;
            assert_eq!(coordinator.status().idle_seconds.unwrap() < before, progresses, "{work:?}");
        }
    }
}
