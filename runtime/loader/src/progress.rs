//! Progress reports during long reads.

use std::pin::pin;
use std::time::Duration;

use rectrain_protocol::error::RoleError;

/// The time after which a read is reported, and the interval of further reports.
pub(crate) const REPORT_EVERY: Duration = Duration::from_secs(5);

/// Awaits `reading`. Meanwhile calls `report` after each interval `every` in which `passed` has
/// risen.
pub(crate) async fn while_reporting_progress<T, Report: Future<Output = Result<(), RoleError>>>(
    reading: impl Future<Output = T>,
    every: Duration,
    passed: impl Fn() -> u64,
    report: impl Fn() -> Report,
) -> Result<T, RoleError> {
    let mut reading = pin!(reading);
    let mut before = passed();
    loop {
        if let Ok(read) = tokio::time::timeout(every, &mut reading).await {
            return Ok(read);
        }
        let now = passed();
        if now > before {
            report().await?;
        }
        before = now;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn long_reading_is_reported_while_it_makes_progress() {
        let every = Duration::from_millis(1);
        let (passed, reports) = (Cell::new(0), Cell::new(0));
        let report = || async {
            reports.set(reports.get() + 1);
            Ok(())
        };
        let progresses = async {
            while reports.get() < 3 {
                passed.set(passed.get() + 1);
                tokio::time::sleep(every).await;
            }
            "rows"
        };
        assert_eq!(while_reporting_progress(progresses, every, || passed.get(), report).await.unwrap(), "rows");
        reports.set(0);
        let hangs = tokio::time::sleep(every * 20);
        while_reporting_progress(hangs, every, || passed.get(), report).await.unwrap();
        assert_eq!(reports.get(), 0, "nothing was passed");
    }
}
