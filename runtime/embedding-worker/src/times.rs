//! The time of a reply to a dense worker, split by the members that it was spent on. Pure.

use std::time::Duration;

use rectrain_proto::v1;

/// The time of one server's reply to a look-up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServerTime {
    /// The server's number.
    pub(crate) server: u32,
    /// Without the wait for the keys of earlier steps.
    pub(crate) call: Duration,
    /// The part that the look-up waited for earlier steps.
    pub(crate) gate_seconds: f64,
}

/// The parts of the time of a reply.
#[derive(Debug)]
pub(crate) struct ForwardTimes {
    /// From the request to the reply.
    pub(crate) all: Duration,
    /// Until the loader had sent the piece.
    pub(crate) waited_for_piece: Duration,
    /// Until all servers had replied.
    pub(crate) looked_up: Duration,
    pub(crate) loader: u32,
    pub(crate) servers: Vec<ServerTime>,
}

impl ForwardTimes {
    /// Seconds of this embedding worker's own work.
    pub(crate) fn own_seconds(&self) -> f64 {
        self.all.saturating_sub(self.waited_for_piece + self.looked_up).as_secs_f64()
    }

    /// Seconds spent on the loader and on the slowest server.
    ///
    /// Every server waits for earlier steps, but a slow one applies them later. So the shortest of
    /// these waits is spent on no server.
    pub(crate) fn spent(&self) -> Vec<v1::Spent> {
        let spent = |role: v1::Role, index, seconds| v1::Spent { role: role.into(), index, seconds };
        let mut all = vec![spent(v1::Role::Loader, self.loader, self.waited_for_piece.as_secs_f64())];
        let gate = self.servers.iter().map(|time| time.gate_seconds).fold(f64::INFINITY, f64::min);
        if let Some(slowest) = self.servers.iter().max_by_key(|time| time.call) {
            let seconds = (slowest.call.as_secs_f64() - gate).max(0.0);
            all.push(spent(v1::Role::Ps, slowest.server, seconds));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_reply_are_spent_on_their_members() {
        let server = |server, milliseconds, gate_seconds| ServerTime {
            server,
            call: Duration::from_millis(milliseconds),
            gate_seconds,
        };
        let times = ForwardTimes {
            all: Duration::from_millis(1000),
            waited_for_piece: Duration::from_millis(100),
            looked_up: Duration::from_millis(700),
            loader: 3,
            servers: vec![server(0, 250, 0.2), server(5, 700, 0.6)],
        };
        let spent: Vec<_> = times.spent().iter().map(|spent| (spent.role(), spent.index, spent.seconds)).collect();
        assert!((times.own_seconds() - 0.2).abs() < 1e-9);
        assert_eq!((spent[0].0, spent[0].1), (v1::Role::Loader, 3));
        assert_eq!((spent[1].0, spent[1].1), (v1::Role::Ps, 5));
        assert!((spent[0].2 - 0.1).abs() < 1e-9 && (spent[1].2 - 0.5).abs() < 1e-9, "{spent:?}");
    }
}
