//! The answer to a parameter server that was killed for its memory.

use crate::{Action, PsPolicy, Verdict};

/// Factor by which the memory limit grows after a kill.
const RAISED_MEMORY: f64 = 1.5;

/// A parameter server that was killed for its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kill {
    /// Its index.
    pub replica: u32,
    /// Its memory limit in bytes, if it had one.
    pub limit_bytes: Option<u64>,
    /// The number of parameter servers.
    pub servers: u32,
}

/// Decides after a kill for memory.
///
/// All parameter servers get half as much memory more, if the policy allows it. Otherwise the slots
/// are spread over half as many servers more, and at least one more. If neither is allowed, the
/// verdict is to keep everything and says which setting to raise.
#[must_use]
pub fn after_a_kill(policy: &PsPolicy, kill: Kill) -> Verdict {
    let Kill { replica, limit_bytes, servers } = kill;
    if let (Some(limit), Some(most)) = (limit_bytes, policy.max_memory_bytes)
        && limit < most
    {
        let to_bytes = ((limit as f64 * RAISED_MEMORY) as u64).clamp(limit, most);
        let reason = format!("replica {replica} was killed for its memory at its limit of {limit} bytes");
        return Verdict::act(Action::RaiseMemory { replica, from_bytes: limit, to_bytes }, reason);
    }
    let bounds = policy.bounds;
    let to = bounds.clamp(servers.saturating_add((servers / 2).max(1)));
    if to > servers {
        let reason = format!("replica {replica} was killed for its memory: more servers share its slots");
        return Verdict::act(Action::Scale { from: servers, to }, reason);
    }
    Verdict::keep(format!(
        "replica {replica} was killed for its memory, and {servers} of at most {} servers are in use: raise `max` or `maxMemoryGib`",
        bounds.max
    ))
}
