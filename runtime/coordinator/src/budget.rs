//! The memory budget of the tables, which may change while the job trains. The coordinator tells it
//! every parameter server in the slot map. A server that starts asks for it before it joins
//! (`AttemptRequest`).

use std::time::Duration;

use futures::future::join_all;
use rectrain_proto::v1;
use rectrain_protocol::{message, table_budget};
use rectrain_wire::Channel;

use super::Coordinator;
use super::refused::BudgetRefused;

/// The time between two looks for a change, and the deadline of a call.
const EVERY: Duration = Duration::from_secs(1);

impl Coordinator {
    /// The present budget. `None` if the job has none.
    pub(crate) fn budget(&self) -> Option<v1::TableBudget> {
        let of_manifest = self.plan.store.budget.map(table_budget::write);
        self.lock().budget.or(of_manifest)
    }

    /// Changes the budget. Returns the one before.
    pub(crate) fn set_budget(&self, budget: v1::TableBudget) -> Result<v1::TableBudget, BudgetRefused> {
        let refuse = |reason: &str| BudgetRefused::Budget(reason.to_owned());
        let from = self.budget().ok_or_else(|| {
            refuse(
                "this job has no memory budget, so its rows have no scores: make a new job with spec.features.memory",
            )
        })?;
        if table_budget::read(budget).is_none() {
            return Err(refuse("expected a number of rows or a number of bytes, at least 1"));
        }
        let mut state = self.lock();
        if state.has_ended() {
            return Err(BudgetRefused::Ended);
        }
        if from != budget {
            tracing::info!(rows = budget.rows, bytes = budget.bytes, "the memory budget of the tables has changed");
            state.budget = Some(budget);
        }
        Ok(from)
    }

    /// Tells the servers the budget after it or the slot map has changed. Never returns.
    pub(super) async fn spread_budget<T>(&self) -> T {
        let mut told = None;
        loop {
            tokio::time::sleep(EVERY).await;
            let changed = self.lock().budget;
            if let (Some(budget), Ok(placement)) = (changed, self.placement()) {
                let news = (budget, placement.epoch().0);
                if told != Some(news) && tell(&placement.servers, budget).await {
                    told = Some(news);
                }
            }
        }
    }
}

/// Tells servers the budget. Returns whether all of them know it.
async fn tell(servers: &[Channel], budget: v1::TableBudget) -> bool {
    let request = v1::SetBudget { budget: Some(budget) };
    let calls = servers.iter().map(|server| message::call(server, request, Vec::new(), EVERY));
    join_all(calls).await.iter().all(Result::is_ok)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use prometheus::Registry;
    use rectrain_protocol::events::EventLog;
    use rectrain_protocol::message::Request;
    use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
    use rectrain_protocol::plan::small_plan;
    use rectrain_wire::{
        Address, BoxFuture, Frame, InProcess, InProcessConfig, Peer, Refusal, Service, Transport, WireCounters,
    };

    use super::*;

    async fn coordinator(changes: &[&str]) -> Coordinator {
        let metrics = CoordinatorMetrics::of(&RoleMetrics::new(Registry::new()).unwrap(), 0);
        Coordinator::start(Arc::new(small_plan(changes)), "test", None, EventLog::default(), metrics).await.unwrap()
    }

    const ROWS: v1::TableBudget = v1::TableBudget { rows: 300, bytes: 0 };
    const BYTES: v1::TableBudget = v1::TableBudget { rows: 0, bytes: 1 << 20 };

    #[tokio::test]
    async fn a_budget_is_changed_but_neither_gained_nor_removed() {
        let coordinator = coordinator(&["spec.features.memory.maxRows=500"]).await;
        let of_manifest = v1::TableBudget { rows: 500, bytes: 0 };
        assert_eq!(coordinator.status().budget, Some(of_manifest));
        assert_eq!(coordinator.set_budget(ROWS), Ok(of_manifest));
        assert_eq!(coordinator.set_budget(BYTES), Ok(ROWS));
        assert_eq!(coordinator.status().budget, Some(BYTES));
        let neither = coordinator.set_budget(v1::TableBudget::default());
        assert!(matches!(neither, Err(BudgetRefused::Budget(_))));
        coordinator.lock().end();
        assert_eq!(coordinator.set_budget(ROWS), Err(BudgetRefused::Ended));
        let without = self::coordinator(&[]).await;
        assert_eq!(without.status().budget, None);
        let refused = without.set_budget(ROWS).unwrap_err().to_string();
        assert!(refused.contains("spec.features.memory"), "{refused}");
    }

    /// A server that keeps the rows it was told.
    #[derive(Default)]
    struct Server(AtomicU64);

    impl Service for Server {
        fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
            Box::pin(async move {
                let (request, _) = message::read::<v1::SetBudget>(frame)?;
                self.0.store(request.budget.unwrap_or_default().rows, Ordering::Relaxed);
                Ok(message::done::<v1::SetBudget>())
            })
        }
    }

    #[tokio::test]
    async fn every_server_is_told() {
        assert_eq!(message::kind_name(v1::SetBudget::KIND), "set_budget");
        let transport = InProcess::new(InProcessConfig::default(), WireCounters::unregistered(|_| "test").unwrap());
        let servers = [Arc::new(Server::default()), Arc::new(Server::default())];
        let mut serving = Vec::new();
        let mut channels = Vec::new();
        for (server, name) in servers.iter().zip(["a", "b"]) {
            let address = Address::local(name);
            serving.push(transport.serve(Arc::clone(server) as Arc<dyn Service>, &address).unwrap());
            channels.push(transport.connect(&address).unwrap());
        }
        assert!(tell(&channels, ROWS).await);
        assert!(servers.iter().all(|server| server.0.load(Ordering::Relaxed) == ROWS.rows));
        drop(serving.pop());
        assert!(!tell(&channels, ROWS).await, "one of them did not answer");
    }
}
