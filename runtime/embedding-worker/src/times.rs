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
    /// The part of that wait in which this worker prepared the piece, which had come.
    pub(crate) prepared: Duration,
    /// Until all servers had replied.
    pub(crate) looked_up: Duration,
    pub(crate) loader: u32,
    pub(crate) servers: Vec<ServerTime>,
}

impl ForwardTimes {
    /// Seconds of this embedding worker's own work.
    pub(crate) fn own_seconds(&self) -> f64 {
        let own = self.all.saturating_sub(self.waited_for_piece + self.looked_up) + self.prepared;
        own.as_secs_f64() + self.common_seconds()
    }

    /// Seconds that the reply of every server took, without its wait for earlier steps. A worker
    /// without a processor sees all replies late, and a slow server delays only its own. So these
    /// seconds are the worker's. With one server they cannot be told apart, and are the server's.
    fn common_seconds(&self) -> f64 {
        if self.servers.len() < 2 {
            return 0.0;
        }
        let without_gate = self.servers.iter().map(|time| time.call.as_secs_f64() - time.gate_seconds);
        without_gate.fold(f64::INFINITY, f64::min).max(0.0)
    }

    /// Seconds spent on the loader and on the slowest server.
    ///
    /// Every server waits for earlier steps, but a slow one applies them later. So the shortest of
    /// these waits is spent on no server.
    pub(crate) fn spent(&self) -> Vec<v1::Spent> {
        let spent = |role: v1::Role, index, seconds| v1::Spent { role: role.into(), index, seconds };
        let waited = self.waited_for_piece.saturating_sub(self.prepared);
        let mut all = vec![spent(v1::Role::Loader, self.loader, waited.as_secs_f64())];
        let gate = self.servers.iter().map(|time| time.gate_seconds).fold(f64::INFINITY, f64::min);
        if let Some(slowest) = self.servers.iter().max_by_key(|time| time.call) {
            let seconds = (slowest.call.as_secs_f64() - gate - self.common_seconds()).max(0.0);
            all.push(spent(v1::Role::Ps, slowest.server, seconds));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(server: u32, milliseconds: u64, gate_seconds: f64) -> ServerTime {
        ServerTime { server, call: Duration::from_millis(milliseconds), gate_seconds }
    }

    /// A reply after 1 s. The worker waited .1 s for the piece, and .7 s for servers.
    fn times(servers: Vec<ServerTime>) -> ForwardTimes {
        ForwardTimes {
            all: Duration::from_millis(1000),
            waited_for_piece: Duration::from_millis(100),
            prepared: Duration::ZERO,
            looked_up: Duration::from_millis(700),
            loader: 3,
            servers,
        }
    }

    /// The worker's own milliseconds, the loader's, and the slowest server with its own.
    fn split(times: &ForwardTimes) -> (f64, f64, u32, f64) {
        let spent = times.spent();
        let [loader, server] = [&spent[0], &spent[1]];
        assert_eq!((loader.role(), loader.index, server.role()), (v1::Role::Loader, 3, v1::Role::Ps));
        let milliseconds = |seconds: f64| (seconds * 1e3).round();
        (milliseconds(times.own_seconds()), milliseconds(loader.seconds), server.index, milliseconds(server.seconds))
    }

    #[test]
    fn the_parts_of_a_reply_are_spent_on_their_members() {
        // Server 5 waited .4 s longer for earlier steps, which it applied late. Both took .05 s.
        assert_eq!(split(&times(vec![server(0, 250, 0.2), server(5, 650, 0.6)])), (250.0, 100.0, 5, 400.0));
        // A single server has all of its reply.
        assert_eq!(split(&times(vec![server(5, 700, 0.2)])), (200.0, 100.0, 5, 500.0));
    }

    #[test]
    fn a_delay_of_all_replies_is_the_workers_own() {
        // The worker had no processor for .6 s: it sees all replies then.
        assert_eq!(split(&times(vec![server(0, 690, 0.1), server(5, 700, 0.1)])), (790.0, 100.0, 5, 10.0));
        // Server 5 had none.
        assert_eq!(split(&times(vec![server(0, 110, 0.1), server(5, 700, 0.1)])), (210.0, 100.0, 5, 590.0));
    }

    #[test]
    fn the_preparation_of_a_piece_is_the_workers_own() {
        let times = ForwardTimes { prepared: Duration::from_millis(80), ..times(vec![server(5, 700, 0.2)]) };
        assert_eq!(split(&times), (280.0, 20.0, 5, 500.0));
    }
}
