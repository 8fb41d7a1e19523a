//! Moves slots between parameter servers while training continues. Growing, shrinking and
//! rebalancing the servers are one mechanism.
//!
//! 1. *copying*: the [plan](plan_moves) says which slots move. A source sends each of them whole
//!    and keeps serving it. It notes the keys that change from then on, and forwards their rows
//!    repeatedly.
//! 2. *sealing*: when all slots are copied, the sources stop serving them and send the last
//!    changes. The roles seal while training is paused at a global-step boundary. So no request is
//!    refused, and no gradient buffer has to move. The protocol does not depend on that.
//! 3. *flip*: once every source has sealed and every row has arrived, the coordinator puts the next
//!    map (one [`Epoch`] later) in force. This instant alone decides: a failure before it leaves
//!    the old map, a failure after it the new one.
//! 4. *release*: when all servers have adopted the new map, the sources drop the rows that they
//!    have handed over.
//!
//! Three parties take part:
//!
//! - [`Migration`] at the coordinator;
//! - a [`SlotHolder`] on each parameter server, source and target alike;
//! - the callers. They send the epoch of their map with each request, and fetch the map again when
//!   a server refuses it.
//!
//! These state machines hold no rows: a holder names the keys to send, and its caller reads their
//! rows. `tests/migration.rs` runs the protocol with a crash of any process at any message.
//!
//! The protocol relies on three properties:
//!
//! - The rows that a server has adopted outlive its crash, or are restored before it registers
//!   again. Rows only staged for it are lost.
//! - A restarted server serves nothing until the coordinator has sent it the map.
//! - The coordinator's [`Journal`] outlives its crash.

mod coordinator;
mod holder;
mod map;
mod plan;

pub use coordinator::{Journal, Migration, MigrationError, Order, Progress};
pub use holder::{Changes, HolderError, NotServed, Receipt, SlotHolder};
pub use map::{Epoch, SlotMap};
pub use plan::{Move, SlotCost, imbalance, plan_moves, plan_weighted_moves};

use std::fmt;

use serde::{Deserialize, Serialize};

/// Numbers the migrations of a job, from 1. Each starts once. Once a later migration has started,
/// messages of earlier ones are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MigrationId(pub u64);

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
