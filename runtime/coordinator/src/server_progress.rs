//! Tracks the progress of parameter servers while all other members wait for them.
//! Servers restore rows, write a checkpoint that training waits for, or compute the digest at the
//! end. With many rows this takes longer than a job may be without progress. So the coordinator
//! polls how much work each server has done. As long as that increases, the job makes progress. A
//! server that hangs reports the same number again, or nothing.

use std::time::Duration;

use futures::future::join_all;
use rectrain_proto::v1;
use rectrain_wire::Channel;

use super::Coordinator;
use rectrain_protocol::message;

/// The time between two polls, and the deadline of each.
const EVERY: Duration = Duration::from_secs(3);

impl Coordinator {
    /// Polls the servers whenever all other members wait for them. Never returns.
    pub(super) async fn poll_server_progress<T>(&self) -> T {
        let mut done = Vec::new();
        loop {
            tokio::time::sleep(EVERY).await;
            if self.lock().is_waiting_for_servers()
                && let Ok(placement) = self.placement()
            {
                self.poll_work(&placement.servers, &mut done).await;
            }
        }
    }

    /// Polls the servers once. `done` has their previous numbers.
    async fn poll_work(&self, servers: &[Channel], done: &mut Vec<u64>) {
        let asking = servers.iter().map(|server| message::call(server, v1::WorkRequest {}, Vec::new(), EVERY));
        let answers = join_all(asking).await;
        done.resize(servers.len(), 0);
        let mut is_more = false;
        for (done, answer) in done.iter_mut().zip(answers) {
            // A server that does not answer has made no known progress.
            if let Ok((work, _)) = answer {
                is_more |= work.done > *done;
                // The number falls when a server was restarted.
                *done = work.done;
            }
        }
        if is_more {
            self.lock().note_server_progress();
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
                Ok(message::reply::<v1::WorkRequest>(&v1::Work { done, ..v1::Work::default() }, Vec::new()))
            })
        }
    }

    #[tokio::test]
    async fn only_servers_that_have_done_more_are_progress() {
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
        // Each case has the numbers of both servers, and whether they are progress.
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
            coordinator.poll_work(&channels, &mut done).await;
            assert_eq!(coordinator.status().idle_seconds.unwrap() < before, progresses, "{work:?}");
        }
    }
}
