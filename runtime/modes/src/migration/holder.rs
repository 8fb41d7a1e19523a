//! A parameter server's part in a migration. It tracks the slots that the server serves, and for
//! moving slots the keys that must still be sent. Source and target are the same state machine,
//! because a server may be both.

use rectrain_embedding::Slot;

use super::{Epoch, MigrationId, SlotMap};

/// The reason why a server refuses a request for a slot. The server has changed nothing. The caller
/// fetches the map and retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotServed {
    /// The caller's map differs from the server's.
    #[error("asked under slot map {asked}, but this server is at slot map {epoch}: fetch the map again")]
    Epoch { asked: Epoch, epoch: Epoch },
    /// The server has handed the slot over, is about to, or never held it.
    #[error("slot {slot} is not served here at slot map {epoch}: fetch the map again")]
    Slot { slot: Slot, epoch: Epoch },
    /// The server has restarted and has not received the map.
    #[error("this server has restarted and has not received the slot map from the coordinator yet: retry")]
    Unregistered,
}

/// The reason why a server refuses a message of a migration. It has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HolderError {
    /// The migration is over.
    #[error("migration {migration} is over")]
    Over { migration: MigrationId },
    /// This server does not hold the slot, so it cannot send it.
    #[error("slot {slot} is not held here, so it cannot be copied or sealed")]
    NotHeld { slot: Slot },
    /// A package that does not follow the previous one.
    #[error("package {found} of slot {slot} arrived, but package {expected} was expected")]
    Gap { slot: Slot, found: u64, expected: u64 },
    /// The map assigns this server a slot whose rows it does not have.
    #[error("the slot map assigns slot {slot} to this server, but the server does not have its rows")]
    RowsMissing { slot: Slot },
    /// A slot map of another job.
    #[error("a slot map of {found} slots arrived, but this job has {expected} slots")]
    Slots { found: u32, expected: u32 },
}

/// The result of receiving a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receipt {
    /// The package is new: store its rows.
    New,
    /// The package was received before: only acknowledge it again.
    Repeated,
}

/// The next package of a slot: keys whose present rows the caller reads and sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes<K> {
    pub migration: MigrationId,
    pub slot: Slot,
    pub to: u16,
    pub sequence: u64,
    /// In ascending order, without duplicates. A key without a row was removed.
    pub keys: Vec<K>,
}

#[derive(Clone, Debug)]
enum Held<K> {
    Elsewhere,
    Own,
    /// Served until it is sealed.
    Leaving(Leaving<K>),
    /// Another server serves it. The rows stay here until the release.
    Left,
    /// Not served yet.
    Arriving {
        migration: MigrationId,
        next: u64,
    },
}

#[derive(Clone, Debug)]
struct Leaving<K> {
    migration: MigrationId,
    to: u16,
    changed: Vec<K>,
    /// The number of the last package that was sent, or must be sent before the next changes.
    sequence: u64,
    /// The target has not acknowledged that package.
    unacknowledged: bool,
    sealed: bool,
}

/// A server's slots during migrations; see the module's documentation. `K` names a row: its key,
/// with its group if there are several.
#[derive(Clone, Debug)]
pub struct SlotHolder<K> {
    server: u16,
    epoch: Epoch,
    /// Migrations up to this one have ended.
    ended: MigrationId,
    registered: bool,
    slots: Vec<Held<K>>,
    leaving: usize,
}

impl<K: Ord> SlotHolder<K> {
    /// Server number `server` at the first map of a job, which all its members know. A server that
    /// is not in the map holds no slot.
    #[must_use]
    pub fn new(server: u16, map: &SlotMap) -> Self {
        let held = |owner: &u16| if *owner == server { Held::Own } else { Held::Elsewhere };
        let slots = map.owners().iter().map(held).collect();
        Self { server, epoch: map.epoch(), ended: MigrationId(0), registered: true, slots, leaving: 0 }
    }

    /// A server after a crash. The rows of the slots `kept` (of `slots` in all) and the epoch that
    /// it adopted last outlived the crash. It serves nothing until it has [adopted](Self::adopt)
    /// the coordinator's map.
    #[must_use]
    pub fn restarted(server: u16, slots: u32, epoch: Epoch, kept: impl IntoIterator<Item = Slot>) -> Self {
        let mut held: Vec<Held<K>> = (0..slots).map(|_| Held::Elsewhere).collect();
        for slot in kept {
            if let Some(place) = held.get_mut(slot.0 as usize) {
                *place = Held::Left;
            }
        }
        Self { server, epoch, ended: MigrationId(0), registered: false, slots: held, leaving: 0 }
    }

    /// The epoch of the server's map.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Migrations up to this one have ended, as far as this server knows.
    #[must_use]
    pub fn ended(&self) -> MigrationId {
        self.ended
    }

    /// Whether the server knows its own slots.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.registered
    }

    /// Whether any slot is moving to another server, so that its changes must be
    /// [noted](Self::changed).
    #[must_use]
    pub fn is_source(&self) -> bool {
        self.leaving > 0
    }

    /// Whether the slot is moving to another server, so that its changes must be
    /// [noted](Self::changed).
    #[must_use]
    pub fn is_leaving(&self, slot: Slot) -> bool {
        matches!(self.slots.get(slot.0 as usize), Some(Held::Leaving(_)))
    }

    /// Whether this server answers look-ups and updates of the slot.
    #[must_use]
    pub fn serves(&self, slot: Slot) -> bool {
        self.registered
            && match self.slots.get(slot.0 as usize) {
                Some(Held::Own) => true,
                Some(Held::Leaving(leaving)) => !leaving.sealed,
                _ => false,
            }
    }

    /// The slots whose rows belong to this server, even if it no longer serves them. A checkpoint
    /// saves these slots from it.
    #[must_use]
    pub fn own(&self) -> Vec<Slot> {
        let own = |(_, held): &(u32, &Held<K>)| matches!(held, Held::Own | Held::Leaving(_));
        (0..).zip(&self.slots).filter(own).map(|(slot, _)| Slot(slot)).collect()
    }

    /// Checks whether this server answers a request that touches `slots` under the map `asked`.
    ///
    /// # Errors
    /// The refusal to send to the caller.
    pub fn admit(&self, asked: Epoch, slots: impl IntoIterator<Item = Slot>) -> Result<(), NotServed> {
        if !self.registered {
            return Err(NotServed::Unregistered);
        }
        if asked != self.epoch {
            return Err(NotServed::Epoch { asked, epoch: self.epoch });
        }
        match slots.into_iter().find(|slot| !self.serves(*slot)) {
            Some(slot) => Err(NotServed::Slot { slot, epoch: self.epoch }),
            None => Ok(()),
        }
    }

    /// Starts to move a slot to server `to`: from now on, changes are noted. The caller then sends
    /// the whole slot as package 0, or as [several packages](Self::cut). After a repeated call, the
    /// caller sends the slot again.
    ///
    /// # Errors
    /// [`HolderError::Over`], [`HolderError::NotHeld`].
    pub fn begin_copy(&mut self, migration: MigrationId, slot: Slot, to: u16) -> Result<(), HolderError> {
        self.check(migration)?;
        if !self.serves(slot) {
            return Err(HolderError::NotHeld { slot });
        }
        let leaving = Leaving { migration, to, changed: Vec::new(), sequence: 0, unacknowledged: true, sealed: false };
        let before = std::mem::replace(&mut self.slots[slot.0 as usize], Held::Leaving(leaving));
        self.leaving += usize::from(!matches!(before, Held::Leaving(_)));
        Ok(())
    }

    /// The caller sends the whole slot as `packages` packages, from package 0 on.
    pub fn cut(&mut self, migration: MigrationId, slot: Slot, packages: u64) {
        if let Some(Held::Leaving(leaving)) = self.slots.get_mut(slot.0 as usize)
            && leaving.migration == migration
            && leaving.sequence == 0
            && leaving.unacknowledged
        {
            leaving.sequence = packages.saturating_sub(1);
        }
    }

    /// Notes keys of a slot whose rows were created, changed or removed. Call it after the change
    /// and before the response to the request that caused it.
    pub fn changed(&mut self, slot: Slot, keys: impl IntoIterator<Item = K>) {
        if let Some(Held::Leaving(leaving)) = self.slots.get_mut(slot.0 as usize) {
            leaving.changed.extend(keys);
        }
    }

    /// The target has received package `sequence` of this slot. Only the last sent package counts.
    pub fn acknowledged(&mut self, migration: MigrationId, slot: Slot, sequence: u64) {
        if let Some(Held::Leaving(leaving)) = self.slots.get_mut(slot.0 as usize)
            && leaving.migration == migration
            && leaving.sequence == sequence
        {
            leaving.unacknowledged = false;
        }
    }

    /// Takes the changes to send now. They cover every moving slot with new changes whose last
    /// package was acknowledged. A slot's changes form packages of at most `most` keys, to be sent
    /// in order.
    pub fn take_changes(&mut self, most: usize) -> Vec<Changes<K>> {
        let mut all = Vec::new();
        for (slot, held) in (0..).zip(&mut self.slots) {
            let Held::Leaving(leaving) = held else { continue };
            if leaving.unacknowledged || leaving.changed.is_empty() {
                continue;
            }
            let mut keys = std::mem::take(&mut leaving.changed);
            keys.sort_unstable();
            keys.dedup();
            leaving.unacknowledged = true;
            let mut keys = keys.into_iter().peekable();
            while keys.peek().is_some() {
                leaving.sequence += 1;
                let Leaving { migration, to, sequence, .. } = *leaving;
                let keys = keys.by_ref().take(most.max(1)).collect();
                all.push(Changes { migration, slot: Slot(slot), to, sequence, keys });
            }
        }
        all
    }

    /// The number of keys noted and not taken, with repetitions.
    #[must_use]
    pub fn noted(&self) -> usize {
        let noted = |held: &Held<K>| if let Held::Leaving(leaving) = held { leaving.changed.len() } else { 0 };
        self.slots.iter().map(noted).sum()
    }

    /// Stops serving these slots. Their last changes must still be taken and sent.
    ///
    /// # Errors
    /// [`HolderError::Over`], or [`HolderError::NotHeld`] for a slot that is not moving in this
    /// migration. On an error, no slot is sealed.
    pub fn seal(&mut self, migration: MigrationId, slots: &[Slot]) -> Result<(), HolderError> {
        self.check(migration)?;
        for slot in slots {
            match self.slots.get(slot.0 as usize) {
                Some(Held::Leaving(leaving)) if leaving.migration == migration => {}
                _ => return Err(HolderError::NotHeld { slot: *slot }),
            }
        }
        for slot in slots {
            if let Some(Held::Leaving(leaving)) = self.slots.get_mut(slot.0 as usize) {
                leaving.sealed = true;
            }
        }
        Ok(())
    }

    /// Whether every slot that moves in this migration is sealed and all its packages have arrived.
    #[must_use]
    pub fn is_drained(&self, migration: MigrationId) -> bool {
        self.slots.iter().all(|held| match held {
            Held::Leaving(leaving) if leaving.migration == migration => {
                leaving.sealed && leaving.changed.is_empty() && !leaving.unacknowledged
            }
            _ => true,
        })
    }

    /// Receives a package of a slot that moves here. Package 0 has the whole slot, or the first of
    /// its rows.
    ///
    /// # Errors
    /// [`HolderError::Over`], [`HolderError::Gap`], or [`HolderError::NotHeld`] for a slot that
    /// this server owns.
    pub fn receive(&mut self, migration: MigrationId, slot: Slot, sequence: u64) -> Result<Receipt, HolderError> {
        self.check(migration)?;
        let held = self.slots.get_mut(slot.0 as usize).ok_or(HolderError::NotHeld { slot })?;
        let expected = match held {
            Held::Arriving { migration: own, next } if *own == migration => *next,
            Held::Elsewhere | Held::Left | Held::Arriving { .. } => 0,
            Held::Own | Held::Leaving(_) => return Err(HolderError::NotHeld { slot }),
        };
        if sequence == 0 && expected != 1 || sequence == expected {
            *held = Held::Arriving { migration, next: sequence + 1 };
            Ok(Receipt::New)
        } else if sequence < expected {
            Ok(Receipt::Repeated)
        } else {
            Err(HolderError::Gap { slot, found: sequence, expected })
        }
    }

    /// Adopts the coordinator's map, with all migrations up to `ended` over. A map or migration
    /// older than the last adopted ones changes nothing. Returns the slots whose staged rows must
    /// be dropped, because they no longer move here.
    ///
    /// # Errors
    /// [`HolderError::RowsMissing`] if the map assigns this server rows that it does not have. That
    /// happens when the rows were staged here before a crash. [`HolderError::Slots`] for a map of
    /// another size. On an error, nothing is changed.
    pub fn adopt(&mut self, map: &SlotMap, ended: MigrationId) -> Result<Vec<Slot>, HolderError> {
        if map.owners().len() != self.slots.len() {
            return Err(HolderError::Slots { found: map.slots(), expected: self.slots.len() as u32 });
        }
        if self.registered && (map.epoch(), ended) <= (self.epoch, self.ended) || map.epoch() < self.epoch {
            return Ok(Vec::new());
        }
        let is_own = |owner: &u16| *owner == self.server;
        for ((slot, owner), held) in (0..).zip(map.owners()).zip(&self.slots) {
            if is_own(owner) && matches!(held, Held::Elsewhere) {
                return Err(HolderError::RowsMissing { slot: Slot(slot) });
            }
        }
        let mut abandoned = Vec::new();
        for ((slot, owner), held) in (0..).zip(map.owners()).zip(&mut self.slots) {
            let becomes = match held {
                Held::Leaving(leaving) if leaving.migration > ended => continue,
                Held::Arriving { migration, .. } if *migration > ended => continue,
                Held::Arriving { .. } if *owner != self.server => {
                    abandoned.push(Slot(slot));
                    Held::Elsewhere
                }
                Held::Elsewhere => Held::Elsewhere,
                _ if *owner == self.server => Held::Own,
                _ => Held::Left,
            };
            *held = becomes;
        }
        self.leaving = self.slots.iter().filter(|held| matches!(held, Held::Leaving(_))).count();
        (self.epoch, self.ended, self.registered) = (map.epoch(), ended, true);
        Ok(abandoned)
    }

    /// All servers have adopted the map `epoch`. Returns the slots whose rows this server handed
    /// over and may drop. `None` if it is at another map, or has none: then it reports nothing.
    pub fn release(&mut self, epoch: Epoch) -> Option<Vec<Slot>> {
        if !self.registered || epoch != self.epoch {
            return None;
        }
        let mut released = Vec::new();
        for (slot, held) in (0..).zip(&mut self.slots) {
            if matches!(held, Held::Left) {
                *held = Held::Elsewhere;
                released.push(Slot(slot));
            }
        }
        Some(released)
    }

    fn check(&self, migration: MigrationId) -> Result<(), HolderError> {
        if migration <= self.ended { Err(HolderError::Over { migration }) } else { Ok(()) }
    }
}
