//! Reports of long waits to the coordinator, which names the member that training waits for.

use std::time::Duration;

use rectrain_proto::v1;

use crate::coordinator_channel::CoordinatorChannel;
use crate::deadline::CALL_DEADLINE;

/// Time after which a wait is reported, and between two reports of it.
const REPORT_EVERY: Duration = Duration::from_secs(2);

/// Awaits `work` on the runtime. While it takes long, reports regularly that the member waits.
/// The reports delay nothing, and a lost one costs nothing.
pub async fn reporting_wait<T>(
    work: impl Future<Output = T>,
    coordinator: &CoordinatorChannel,
    waiting: v1::Waiting,
) -> T {
    reporting(work, REPORT_EVERY, || {
        let coordinator = coordinator.clone();
        // A failed report needs no handling: the next one follows.
        tokio::spawn(async move { coordinator.call(waiting, Vec::new(), CALL_DEADLINE).await.map(drop) });
    })
    .await
}

async fn reporting<T>(work: impl Future<Output = T>, every: Duration, report: impl Fn()) -> T {
    tokio::pin!(work);
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = tokio::time::sleep(every) => report(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn only_long_waits_are_reported() {
        let reports = Cell::new(0_u32);
        let waited = |milliseconds| {
            let work = tokio::time::sleep(Duration::from_millis(milliseconds));
            reporting(work, Duration::from_millis(200), || reports.set(reports.get() + 1))
        };
        waited(1).await;
        assert_eq!(reports.get(), 0);
        waited(700).await;
        assert!((1..=3).contains(&reports.get()), "{}", reports.get());
    }
}
