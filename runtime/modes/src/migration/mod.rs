//! Moving slots between parameter servers while training goes on: growing, shrinking and rebalancing are one mechanism.
//!
//! 1. *copying*: the [plan](plan_moves) says which slots move. A source sends each of them whole, notes which of its keys change from
//!    then on, and forwards those rows as they are, again and again, while it goes on serving the slot.
//! 2. *sealing*: when all are copied, sources serve the moving slots no more and send what changed last. Roles seal while training
//!    rests at a global-step boundary, so that nobody is turned away and no gradient buffer has to move; the protocol does not
//!    depend on that.
//! 3. *flip*: once every source has sealed and every row has arrived, the coordinator makes the next map (an [`Epoch`] later) the
//!    one in force. That is the one instant that decides: what fails before it leaves the old map, what fails after it the new.
//! 4. *release*: when all servers have adopted the new map, sources drop the rows they have handed over.
//!
//! Three machines: [`Migration`] at the coordinator, a [`SlotHolder`] on each parameter server (source and target alike), and the
//! callers, who send the epoch of their map with what they ask and fetch the map anew when a server refuses it. Nothing here holds
//! rows: a holder says which keys to send, its caller reads them. `tests/migration.rs` runs them with a crash of anyone at any
//! message.
//!
//! What is relied on: the rows that a server has adopted outlive its crash (or are restored before it registers again), what was
//! staged for it does not; a server that restarts serves nothing until the coordinator has told it the map; the coordinator's
//! [`Journal`] outlives its crash.

mod coordinator;
mod holder;
mod map;
mod plan;

pub use coordinator::{Journal, Migration, MigrationError, Order, Progress};
pub use holder::{Changes, HolderError, NotServed, Receipt, SlotHolder};
pub use map::{Epoch, SlotMap};
pub use plan::{Move, SlotCost, imbalance, plan_moves};

use std::fmt;

use serde::{Deserialize, Serialize};

/// Numbers the migrations of a job, from 1. Each is begun once, and no message of an earlier one means anything once a later has
/// begun.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MigrationId(pub u64);

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
