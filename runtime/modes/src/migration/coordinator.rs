//! The coordinator's part in a migration: from the plan to the flip of the map and the release. It alone decides which map is in
//! force, at one instant: when a step gives [`Progress::Flipped`], and the journal is written before its orders go out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rectrain_embedding::Slot;

use super::{Epoch, MigrationId, Move, SlotMap};

/// Slots that a source sends whole at a time: enough to keep it and the network busy while small ones are acknowledged, few enough
/// that their copies are a small part of its memory.
const COPIED_AT_A_TIME: usize = 4;

/// What a server is told. Each is answered by the report of the same name; said twice, it changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Send the slot whole to another server, and from then on what changes in it.
    Copy { server: u16, migration: MigrationId, slot: Slot, to: u16 },
    /// Serve these slots no more, and send the last of what changed.
    Seal { server: u16, migration: MigrationId, slots: Vec<Slot> },
    /// This is the map, and migrations up to `ended` are over.
    Adopt { server: u16, map: SlotMap, ended: MigrationId },
    /// Drop the rows that you have handed over: everybody is at this map.
    Release { server: u16, epoch: Epoch },
}

/// What a report or a decision led to, besides orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing to be told.
    None,
    /// Every slot is copied: seal whenever training rests ([`Migration::seal`]).
    Copied,
    /// The next map is in force. Journal it before anything is sent.
    Flipped,
    /// All servers have adopted the map and dropped what they handed over: the next migration may begin.
    Settled,
}

/// A migration that cannot be begun or sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MigrationError {
    /// One at a time.
    #[error("slots are moving already: wait until they have settled")]
    UnderWay,
    /// The plan is not one for the map in force.
    #[error("slot {slot} cannot move from server {from}, which does not hold it")]
    Move { slot: Slot, from: u16 },
    /// Not all slots are copied.
    #[error("slots cannot be sealed before all of them are copied")]
    NotCopied,
}

/// What outlives a crash of the coordinator: written when a migration begins, and whenever the map or what is awaited changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journal {
    map: SlotMap,
    begun: MigrationId,
    servers: Vec<u16>,
    flipped: Vec<Flipped>,
}

/// A move that can still be taken back, and the map that it came with.
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

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Migration {
    map: SlotMap,
    begun: MigrationId,
    /// The numbers of the servers in the job, those that join or leave included; rising.
    servers: Vec<u16>,
    servers_after: Vec<u16>,
    moves: Vec<Move>,
    /// Not adopted by all.
    flipped: Vec<Flipped>,
    phase: Phase,
}

impl Migration {
    /// Nothing moves.
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

    /// Nothing moves, after so many migrations.
    #[must_use]
    pub fn settled(map: SlotMap, begun: MigrationId) -> Self {
        Self { begun, ..Self::new(map) }
    }

    /// After a crash. What was not flipped is given up; what was is told again. Carry the orders out.
    #[must_use]
    pub fn restarted(journal: Journal) -> (Self, Vec<Order>) {
        let Journal { map, begun, servers, flipped } = journal;
        let mut migration = Self { begun, servers, flipped, ..Self::new(map) };
        let orders = migration.tell_the_map();
        (migration, orders)
    }

    /// What is to be kept.
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

    /// The migration begun last.
    #[must_use]
    pub fn begun(&self) -> MigrationId {
        self.begun
    }

    /// Whether nothing is under way.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        matches!(self.phase, Phase::Settled)
    }

    /// Begins to carry out `moves`, after which just `servers` (their numbers) hold slots. Each source copies a few slots at a time.
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

    /// The target has the slot; the source forwards what changes.
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

    /// Has the sources seal what is copied.
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

    /// A source has sealed its slots, and all of what they hold has arrived.
    pub fn sealed(&mut self, migration: MigrationId, server: u16) -> (Vec<Order>, Progress) {
        let Phase::Sealing { missing } = &mut self.phase else { return nothing() };
        if migration != self.begun || !missing.remove(&server) || !missing.is_empty() {
            return nothing();
        }
        (self.flip(), Progress::Flipped)
    }

    /// A server is at the map `epoch`, and knows which migrations are over.
    pub fn adopted(&mut self, server: u16, epoch: Epoch, ended: MigrationId) -> (Vec<Order>, Progress) {
        if (epoch, ended) != (self.map.epoch(), self.begun) {
            return nothing();
        }
        let missing = match &mut self.phase {
            Phase::Adopting { missing } => missing,
            // It has restarted since it said so first, and what it was told to release may have come before it knew the map again.
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

    /// A server has dropped what it handed over.
    pub fn released(&mut self, server: u16, epoch: Epoch) -> (Vec<Order>, Progress) {
        let Phase::Releasing { missing } = &mut self.phase else { return nothing() };
        if epoch != self.map.epoch() || !missing.remove(&server) || !missing.is_empty() {
            return nothing();
        }
        self.servers = self.map.servers().to_vec();
        self.phase = Phase::Settled;
        (Vec::new(), Progress::Settled)
    }

    /// A server has refused a part of the migration, as one that has restarted does: it is given up, unless it has flipped.
    pub fn refused(&mut self, migration: MigrationId) -> Vec<Order> {
        if migration == self.begun { self.cancel().0 } else { Vec::new() }
    }

    /// Gives the migration up, if it has not flipped: the old map stays. Says whether it did.
    pub fn cancel(&mut self) -> (Vec<Order>, bool) {
        match self.phase {
            Phase::Copying { .. } | Phase::Copied | Phase::Sealing { .. } => (self.tell_the_map(), true),
            Phase::Settled | Phase::Adopting { .. } | Phase::Releasing { .. } => (Vec::new(), false),
        }
    }

    /// A server has restarted: what was staged there, noted or sealed is gone; rows that it had adopted, at the map `epoch` the
    /// latest, are there.
    pub fn restarted_server(&mut self, server: u16, epoch: Epoch) -> (Vec<Order>, Progress) {
        match &mut self.phase {
            Phase::Copying { .. } | Phase::Copied | Phase::Sealing { .. } => (self.tell_the_map(), Progress::None),
            Phase::Adopting { .. } if self.flipped.iter().any(|flipped| flipped.is_lost(server, epoch)) => {
                (self.take_back(server, epoch), Progress::Flipped)
            }
            // It is to have adopted the map before it is told to release.
            Phase::Releasing { .. } => (self.tell_the_map(), Progress::None),
            // What it said before does not count any more.
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

    /// Rows that were staged on a server are lost, before it adopted them; their sources have them still.
    fn take_back(&mut self, server: u16, epoch: Epoch) -> Vec<Order> {
        let mut owners = self.map.owners().to_vec();
        for Flipped { step, .. } in self.flipped.iter().filter(|flipped| flipped.is_lost(server, epoch)) {
            owners[step.slot.0 as usize] = step.from;
        }
        self.flipped.retain(|flipped| !flipped.is_lost(server, epoch));
        self.map = self.map.successor(owners, &self.servers_after);
        self.tell_the_map()
    }

    /// Whatever was under way is over.
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
    /// Whether the slot went to `server`, and that has restarted without having adopted it.
    fn is_lost(&self, server: u16, adopted: Epoch) -> bool {
        self.step.to == server && adopted < self.epoch
    }
}

fn nothing() -> (Vec<Order>, Progress) {
    (Vec::new(), Progress::None)
}
