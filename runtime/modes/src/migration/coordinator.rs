//! The coordinator's part in a migration: from the plan to the flip of the map and the release. It
//! alone decides which map is in force, and a single instant decides it: a call that returns
//! [`Progress::Flipped`]. The coordinator writes the journal before it sends that call's orders.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rectrain_embedding::Slot;

use super::{Epoch, MigrationId, Move, SlotMap};

/// The most slots that a source copies at the same time. Enough to keep it and the network busy
/// while targets acknowledge small slots. Few enough that the copies are a small part of its
/// memory.
const COPIED_AT_A_TIME: usize = 4;

/// An order from the coordinator to a server. The server answers with the report of the same name.
/// A repeated order changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Send the whole slot to server `to`, and from then on its changes.
    Copy { server: u16, migration: MigrationId, slot: Slot, to: u16 },
    /// Stop serving these slots, and send their last changes.
    Seal { server: u16, migration: MigrationId, slots: Vec<Slot> },
    /// Adopt this map; migrations up to `ended` are over.
    Adopt { server: u16, map: SlotMap, ended: MigrationId },
    /// Drop the rows that you have handed over: all servers are at this map.
    Release { server: u16, epoch: Epoch },
}

/// The result of a report or a decision, besides orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing to do.
    None,
    /// Every slot is copied: [seal](Migration::seal) the slots at the next pause of training.
    Copied,
    /// The next map is in force. Journal it before you send any order.
    Flipped,
    /// All servers have adopted the map and dropped the rows that they handed over. The next
    /// migration may begin.
    Settled,
}

/// The reason why a migration cannot begin, or its slots cannot be sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MigrationError {
    /// Only one migration runs at a time.
    #[error("slots are moving already: wait until they have settled")]
    UnderWay,
    /// The plan does not fit the map in force.
    #[error("slot {slot} cannot move from server {from}, which does not hold it")]
    Move { slot: Slot, from: u16 },
    /// Not all slots are copied.
    #[error("slots cannot be sealed before all of them are copied")]
    NotCopied,
}

/// The state that outlives a crash of the coordinator. It is written when a migration begins, and
/// whenever the map or the set of awaited servers changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journal {
    map: SlotMap,
    begun: MigrationId,
    servers: Vec<u16>,
    flipped: Vec<Flipped>,
}

/// A move that can still be undone, and the epoch of the map that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Flipped {
    step: Move,
    epoch: Epoch,
}

#[derive(Clone, Debug)]
enum Phase {
    Settled,
    Copying { waiting: BTreeMap<u16, VecDeque<Move>>, copying: BTreeSet<Slot> },
    Copied,
    Sealing { missing: BTreeSet<u16> },
    Adopting { missing: BTreeSet<u16> },
    Releasing { missing: BTreeSet<u16> },
}

/// The coordinator's state machine; see the module's documentation.
#[derive(Clone, Debug)]
pub struct Migration {
    map: SlotMap,
    begun: MigrationId,
    /// The numbers of the servers in the job, ascending. Joining and leaving servers are included.
    servers: Vec<u16>,
    servers_after: Vec<u16>,
    moves: Vec<Move>,
    /// Moves whose map not all servers have adopted yet.
    flipped: Vec<Flipped>,
    phase: Phase,
}

impl Migration {
    /// At `map`, with nothing moving and no migration begun so far.
    #[must_use]
    pub fn new(map: SlotMap) -> Self {
        let servers = map.servers().to_vec();
        Self {
            map,
            begun: MigrationId(0),
            servers_after: servers.clone(),
            servers,
            moves: Vec::new(),
            flipped: Vec::new(),
            phase: Phase::Settled,
        }
    }

    /// As [`Self::new`], with `begun` as the last migration.
    #[must_use]
    pub fn settled(map: SlotMap, begun: MigrationId) -> Self {
        Self { begun, ..Self::new(map) }
    }

    /// After a crash. A migration that had not flipped is aborted. The map in force is sent to all
    /// servers again: carry out the orders.
    #[must_use]
    pub fn restarted(journal: Journal) -> (Self, Vec<Order>) {
        let Journal { map, begun, servers, flipped } = journal;
        let mut migration = Self { begun, servers, flipped, ..Self::new(map) };
        let orders = migration.tell_the_map();
        (migration, orders)
    }

    /// The state to write to the journal.
    #[must_use]
    pub fn journal(&self) -> Journal {
        let (map, flipped) = (self.map.clone(), self.flipped.clone());
        Journal { map, begun: self.begun, servers: self.servers.clone(), flipped }
    }

    /// The map in force.
    #[must_use]
    pub fn map(&self) -> &SlotMap {
        &self.map
    }

    /// The last migration begun.
    #[must_use]
    pub fn begun(&self) -> MigrationId {
        self.begun
    }

    /// Whether no migration is under way.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        matches!(self.phase, Phase::Settled)
    }

    /// Begins to carry out `moves`. Afterwards only `servers` (their numbers) hold slots. Each
    /// source copies a few slots at a time.
    ///
    /// # Errors
    /// [`MigrationError::UnderWay`], [`MigrationError::Move`].
    pub fn begin(&mut self, moves: &[Move], servers: &[u16]) -> Result<(Vec<Order>, Progress), MigrationError> {
        if !self.is_settled() {
            return Err(MigrationError::UnderWay);
        }
        let is_held = |step: &&Move| self.map.owners().get(step.slot.0 as usize) == Some(&step.from);
        if let Some(wrong) = moves.iter().find(|step| !is_held(step)) {
            return Err(MigrationError::Move { slot: wrong.slot, from: wrong.from });
        }
        self.begun = MigrationId(self.begun.0 + 1);
        let all: BTreeSet<u16> = self.map.servers().iter().chain(servers).copied().collect();
        self.servers = all.into_iter().collect();
        self.servers_after = servers.to_vec();
        self.moves = moves.to_vec();
        let mut waiting: BTreeMap<u16, VecDeque<Move>> = BTreeMap::new();
        for step in moves {
            waiting.entry(step.from).or_default().push_back(*step);
        }
        let few = |moves: &mut VecDeque<Move>| moves.drain(..moves.len().min(COPIED_AT_A_TIME)).collect::<Vec<_>>();
        let first: Vec<Move> = waiting.values_mut().flat_map(few).collect();
        if first.is_empty() {
            self.phase = Phase::Copied;
            return Ok((Vec::new(), Progress::Copied));
        }
        self.phase = Phase::Copying { waiting, copying: first.iter().map(|step| step.slot).collect() };
        Ok((first.into_iter().map(|step| self.copy(step)).collect(), Progress::None))
    }

    /// The target has received the slot, and the source forwards its changes.
    pub fn copied(&mut self, migration: MigrationId, slot: Slot) -> (Vec<Order>, Progress) {
        let Phase::Copying { waiting, copying } = &mut self.phase else { return nothing() };
        if migration != self.begun || !copying.remove(&slot) {
            return nothing();
        }
        let from = self.moves.iter().find(|step| step.slot == slot).map(|step| step.from);
        let next = from.and_then(|from| waiting.get_mut(&from)).and_then(VecDeque::pop_front);
        if let Some(next) = next {
            copying.insert(next.slot);
            return (vec![self.copy(next)], Progress::None);
        }
        if !copying.is_empty() {
            return nothing();
        }
        self.phase = Phase::Copied;
        (Vec::new(), Progress::Copied)
    }

    /// Orders the sources to seal the copied slots.
    ///
    /// # Errors
    /// [`MigrationError::NotCopied`].
    pub fn seal(&mut self) -> Result<(Vec<Order>, Progress), MigrationError> {
        if !matches!(self.phase, Phase::Copied) {
            return Err(MigrationError::NotCopied);
        }
        let mut by_source: BTreeMap<u16, Vec<Slot>> = BTreeMap::new();
        for step in &self.moves {
            by_source.entry(step.from).or_default().push(step.slot);
        }
        if by_source.is_empty() {
            return Ok((self.flip(), Progress::Flipped));
        }
        self.phase = Phase::Sealing { missing: by_source.keys().copied().collect() };
        let migration = self.begun;
        let order = |(server, slots)| Order::Seal { server, migration, slots };
        Ok((by_source.into_iter().map(order).collect(), Progress::None))
    }

    /// A source has sealed its slots, and all their rows have arrived.
    pub fn sealed(&mut self, migration: MigrationId, server: u16) -> (Vec<Order>, Progress) {
        let Phase::Sealing { missing } = &mut self.phase else { return nothing() };
        if migration != self.begun || !missing.remove(&server) || !missing.is_empty() {
            return nothing();
        }
        (self.flip(), Progress::Flipped)
    }

    /// A server has adopted the map `epoch`, and knows that migrations up to `ended` are over.
    pub fn adopted(&mut self, server: u16, epoch: Epoch, ended: MigrationId) -> (Vec<Order>, Progress) {
        if (epoch, ended) != (self.map.epoch(), self.begun) {
            return nothing();
        }
        let missing = match &mut self.phase {
            Phase::Adopting { missing } => missing,
            // The server has restarted since it first reported. The release order may have reached
            // it while it had no map, so it gets the order again.
            Phase::Releasing { missing } if missing.contains(&server) => {
                return (vec![Order::Release { server, epoch }], Progress::None);
            }
            _ => return nothing(),
        };
        if !missing.remove(&server) || !missing.is_empty() {
            return nothing();
        }
        self.flipped.clear();
        self.phase = Phase::Releasing { missing: self.servers.iter().copied().collect() };
        let release = |server: &u16| Order::Release { server: *server, epoch };
        (self.servers.iter().map(release).collect(), Progress::None)
    }

    /// A server has dropped the rows that it handed over.
    pub fn released(&mut self, server: u16, epoch: Epoch) -> (Vec<Order>, Progress) {
        let Phase::Releasing { missing } = &mut self.phase else { return nothing() };
        if epoch != self.map.epoch() || !missing.remove(&server) || !missing.is_empty() {
            return nothing();
        }
        self.servers = self.map.servers().to_vec();
        self.phase = Phase::Settled;
        (Vec::new(), Progress::Settled)
    }

    /// A server has refused a part of the migration, for example after a restart. The migration is
    /// aborted, unless it has flipped.
    pub fn refused(&mut self, migration: MigrationId) -> Vec<Order> {
        if migration == self.begun { self.cancel().0 } else { Vec::new() }
    }

    /// Aborts the migration if it has not flipped: the old map stays. Returns whether it was
    /// aborted.
    pub fn cancel(&mut self) -> (Vec<Order>, bool) {
        match self.phase {
            Phase::Copying { .. } | Phase::Copied | Phase::Sealing { .. } => (self.tell_the_map(), true),
            Phase::Settled | Phase::Adopting { .. } | Phase::Releasing { .. } => (Vec::new(), false),
        }
    }

    /// A server has restarted. It has lost the rows staged there, the noted changes and the seals.
    /// It still has the rows that it adopted at maps up to `epoch`.
    pub fn restarted_server(&mut self, server: u16, epoch: Epoch) -> (Vec<Order>, Progress) {
        match &mut self.phase {
            Phase::Copying { .. } | Phase::Copied | Phase::Sealing { .. } => (self.tell_the_map(), Progress::None),
            Phase::Adopting { .. } if self.flipped.iter().any(|flipped| flipped.is_lost(server, epoch)) => {
                (self.take_back(server, epoch), Progress::Flipped)
            }
            // The server must adopt the map before it gets the release order.
            Phase::Releasing { .. } => (self.tell_the_map(), Progress::None),
            // The server's earlier report no longer counts.
            Phase::Adopting { missing } => {
                missing.insert(server);
                (vec![self.adopt(server)], Progress::None)
            }
            Phase::Settled => (vec![self.adopt(server)], Progress::None),
        }
    }

    fn flip(&mut self) -> Vec<Order> {
        let mut owners = self.map.owners().to_vec();
        for step in &self.moves {
            owners[step.slot.0 as usize] = step.to;
        }
        self.map = self.map.successor(owners, &self.servers_after);
        let epoch = self.map.epoch();
        self.flipped = self.moves.drain(..).map(|step| Flipped { step, epoch }).collect();
        self.tell_the_map()
    }

    /// Rows staged on a server were lost before it adopted them. Their sources still have them, so
    /// the slots go back there.
    fn take_back(&mut self, server: u16, epoch: Epoch) -> Vec<Order> {
        let mut owners = self.map.owners().to_vec();
        for Flipped { step, .. } in self.flipped.iter().filter(|flipped| flipped.is_lost(server, epoch)) {
            owners[step.slot.0 as usize] = step.from;
        }
        self.flipped.retain(|flipped| !flipped.is_lost(server, epoch));
        self.map = self.map.successor(owners, &self.servers_after);
        self.tell_the_map()
    }

    /// Ends any migration under way, and sends the map in force to all servers.
    fn tell_the_map(&mut self) -> Vec<Order> {
        self.moves.clear();
        self.phase = Phase::Adopting { missing: self.servers.iter().copied().collect() };
        self.servers.iter().map(|server| self.adopt(*server)).collect()
    }

    fn adopt(&self, server: u16) -> Order {
        Order::Adopt { server, map: self.map.clone(), ended: self.begun }
    }

    fn copy(&self, step: Move) -> Order {
        Order::Copy { server: step.from, migration: self.begun, slot: step.slot, to: step.to }
    }
}

impl Flipped {
    /// Whether the slot moved to `server`, but `server` restarted before it adopted the move.
    fn is_lost(&self, server: u16, adopted: Epoch) -> bool {
        self.step.to == server && adopted < self.epoch
    }
}

fn nothing() -> (Vec<Order>, Progress) {
    (Vec::new(), Progress::None)
}
