//! Measures how fast parameter servers work, and moves slots away from a slow one.
//!
//! A slow server keeps slots in proportion to its speed, and gets them back when it has recovered
//! ([`rectrain_modes::shares`]). The slots move as in any rebalance, while training continues. The
//! weights hold for every later migration, too.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::future::join_all;
use rectrain_proto::v1;
use rectrain_protocol::message;
use rectrain_wire::Channel;

use super::Coordinator;
use super::server_work::ServerWork;

/// The time between two measurements, and the deadline of each.
const EVERY: Duration = Duration::from_secs(2);
/// A look-up takes a server about as long as this many rows, even without rows. So a server with
/// few rows does not count as slow.
const ROWS_OF_A_LOOK_UP: f64 = 200.0;

/// What the servers had done at the last measurement, by number.
#[derive(Default)]
struct Measured {
    epoch: u64,
    work: BTreeMap<u32, v1::Work>,
    at: Option<Instant>,
}

impl Coordinator {
    /// Follows the speeds of the servers. Never returns.
    pub(super) async fn follow_server_speeds<T>(&self) -> T {
        let mut before = Measured::default();
        loop {
            tokio::time::sleep(EVERY).await;
            let Ok(placement) = self.placement() else { continue };
            if placement.servers.len() < 2 {
                continue;
            }
            let numbers: Vec<u32> = placement.map.servers().iter().copied().map(u32::from).collect();
            let now = Measured { epoch: placement.epoch().0, ..ask(&numbers, &placement.servers).await };
            let (work, seconds) = (now.since(&before), now.seconds_since(&before));
            let events = self.lock().follow_servers(&numbers, &work, seconds, Instant::now());
            before = now;
            if !events.is_empty() {
                self.publish(events);
                self.changed.notify_waiters();
            }
        }
    }
}

/// Asks the servers for their work. A server that does not answer in time has no entry.
async fn ask(numbers: &[u32], servers: &[Channel]) -> Measured {
    let asking = servers.iter().map(|server| message::call(server, v1::WorkRequest {}, Vec::new(), EVERY));
    let answers = numbers.iter().copied().zip(join_all(asking).await);
    let work = answers.filter_map(|(number, answer)| Some((number, answer.ok()?.0))).collect();
    Measured { work, at: Some(Instant::now()), epoch: 0 }
}

impl Measured {
    /// The work of each server since an earlier measurement. A server that has restarted in between
    /// has no entry, and none has after a change of the slot map.
    fn since(&self, before: &Self) -> Vec<ServerWork> {
        if self.epoch != before.epoch {
            return Vec::new();
        }
        let work = self.work.iter().filter_map(|(server, after)| {
            let before = before.work.get(server)?;
            let rows = after.rows.checked_sub(before.rows)?;
            let look_ups = after.look_ups.checked_sub(before.look_ups)?;
            let seconds = after.seconds - before.seconds;
            let units = rows as f64 + ROWS_OF_A_LOOK_UP * look_ups as f64;
            (seconds >= 0.0).then_some(ServerWork { server: *server, units, seconds })
        });
        work.collect()
    }

    /// Seconds since an earlier measurement; 0 if there was none.
    fn seconds_since(&self, before: &Self) -> f64 {
        let passed = self.at.zip(before.at).map(|(now, before)| now.saturating_duration_since(before));
        passed.unwrap_or_default().as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use rectrain_protocol::Role;
    use rectrain_protocol::events::JobEvent;
    use rectrain_protocol::plan::small_plan;

    use super::*;
    use crate::state::State;

    fn measured(epoch: u64, work: &[(u32, u64, u64, f64)]) -> Measured {
        let work = work.iter().map(|&(server, look_ups, rows, seconds)| {
            (server, v1::Work { look_ups, rows, seconds, ..v1::Work::default() })
        });
        Measured { epoch, work: work.collect(), at: None }
    }

    #[test]
    fn work_is_what_a_server_did_since_it_was_asked_before() {
        let before = measured(3, &[(0, 10, 1000, 1.0), (2, 10, 1000, 1.0), (5, 10, 1000, 1.0)]);
        let after = measured(3, &[(0, 20, 4000, 1.5), (2, 4, 100, 0.2), (4, 1, 1, 1.0), (5, 10, 1000, 1.0)]);
        let of = |server, units, seconds| ServerWork { server, units, seconds };
        assert_eq!(after.since(&before), [of(0, 5000.0, 0.5), of(5, 0.0, 0.0)], "2 restarted, and 4 is new");
        assert_eq!(measured(4, &[(0, 20, 4000, 1.5)]).since(&before), [], "the slots have moved");
    }

    #[test]
    fn a_slow_server_is_rebalanced_once_and_no_other_is_added() {
        let mut state = State::new(&small_plan(&["spec.roles.ps.replicas=3"]), None).unwrap();
        let begun = Instant::now();
        let mut follow = |second: u64, slow: f64| {
            let work = |server| {
                let seconds = if server == 1 { slow } else { 0.05 };
                ServerWork { server, units: 10_000.0, seconds }
            };
            state.follow_servers(&[0, 1, 2], &[0, 1, 2].map(work), 2.0, begun + Duration::from_secs(second))
        };
        let healthy: Vec<JobEvent> = (0..30).flat_map(|turn| follow(2 * turn, 0.06)).collect();
        assert_eq!(healthy, []);
        let slow: Vec<JobEvent> = (30..60).flat_map(|turn| follow(2 * turn, 1.6)).collect();
        let [
            JobEvent::ShareChanged { role: Role::Ps, index: 1, share: 0.03125, .. },
            JobEvent::Scaling { role: Role::Ps, from: 3, to: 3, reason: Some(reason) },
        ] = &slow[..]
        else {
            panic!("{slow:?}")
        };
        assert!(reason.contains("ps 1 takes 32.0 times as long"), "{reason}");
        assert_eq!(state.server_weights(&[0, 1, 2, 3]), Some(vec![4096, 128, 4096, 4096]));
    }
}
