//! The work of parameter servers between two measurements, and the events of a change of their
//! shares. Pure.

use rectrain_modes::shares::{EVEN, ShareChange};
use rectrain_protocol::Role;
use rectrain_protocol::events::JobEvent;

/// A server's work between two measurements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ServerWork {
    pub(crate) server: u32,
    /// Rows, and a constant number for each look-up.
    pub(crate) units: f64,
    pub(crate) seconds: f64,
}

/// The reason of a rebalance for a server's speed, in words.
fn reason(change: ShareChange) -> String {
    let ShareChange { member, weight, factor } = change;
    if weight == EVEN {
        return format!("{} {member} is no longer slow and gets slots back", Role::Ps);
    }
    let percent = 100.0 * change.share();
    format!(
        "{} {member} takes {factor:.1} times as long for a row as the others and keeps {percent:.0} % of an even share",
        Role::Ps
    )
}

/// The events of a change of a server's share.
pub(crate) fn events(change: ShareChange, servers: (u32, u32)) -> Vec<JobEvent> {
    let (from, to) = servers;
    let ShareChange { member, factor, .. } = change;
    vec![
        JobEvent::ShareChanged { role: Role::Ps, index: member, share: change.share(), factor },
        JobEvent::Scaling { role: Role::Ps, from, to, reason: Some(reason(change)) },
    ]
}
