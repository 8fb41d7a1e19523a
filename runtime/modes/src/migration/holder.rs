//! A parameter server's part in a migration: which slots it serves, and for those that move which keys still have to be sent.
//! Source and target are the same machine, because a server may be both.

use rectrain_embedding::Slot;

use super::{Epoch, MigrationId, SlotMap};

/// Why a server does not answer for a slot. It has changed nothing; whoever asked fetches the map and asks again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotServed {
    /// The asker's map is another one than the server's.
    #[error("asked under slot map {asked}, but this server is at slot map {epoch}: fetch the map again")]
    Epoch { asked: Epoch, epoch: Epoch },
    /// Handed over, about to be, or never held.
    #[error("slot {slot} is not served here at slot map {epoch}: fetch the map again")]
    Slot { slot: Slot, epoch: Epoch },
    /// It has restarted and has not been told the map.
    #[error("this server has not been told the slot map yet")]
    Unregistered,
}

/// A message of a migration that is refused; it has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HolderError {
    /// The migration is over.
    #[error("migration {migration} is over")]
    Over { migration: MigrationId },
    /// The slot is not one that this server can send.
    #[error("slot {slot} is not held here, so it cannot be copied or sealed")]
    NotHeld { slot: Slot },
    /// A package that does not follow the one before.
    #[error("package {found} of slot {slot} came where {expected} was expected")]
    Gap { slot: Slot, found: u64, expected: u64 },
    /// The map gives this server a slot whose rows it does not have.
    #[error("slot {slot} is given to this server, but its rows are not here")]
    RowsMissing { slot: Slot },
    /// The slot map of another job.
    #[error("a slot map of {found} slots came where {expected} were expected")]
    Slots { found: u32, expected: u32 },
}

/// What became of a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receipt {
    /// Take its rows in.
    New,
    /// It was taken in before: acknowledge it again.
    Repeated,
}

/// Keys whose rows, as they are now, are the next package of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes<K> {
    pub migration: MigrationId,
    pub slot: Slot,
    pub to: u16,
    pub sequence: u64,
    /// Rising, each once. A key without a row was removed.
    pub keys: Vec<K>,
}

#[derive(Clone, Debug)]
enum Held<K> {
    Elsewhere,
    Own,
    /// Served until it is sealed.
    Leaving(Leaving<K>),
    /// Served elsewhere; its rows are kept until the release.
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
    /// Of the last package that is sent, or is to be before any of what changes next.
    sequence: u64,
    /// It has not arrived.
    unacknowledged: bool,
    sealed: bool,
}

/// See the module's text. `K` is how a row is named: with its group, where there are several.
#[derive(Clone, Debug)]
pub struct SlotHolder<K> {
    server: u16,
    epoch: Epoch,
    /// Migrations up to this one are over.
    ended: MigrationId,
    registered: bool,
    slots: Vec<Held<K>>,
    leaving: usize,
}

impl<K: Ord> SlotHolder<K> {
    /// Server number `server` at the first map of a job, which all its members know; one that is in no map yet holds nothing.
    #[must_use]
    pub fn new(server: u16, map: &SlotMap) -> Self {
        let held = |owner: &u16| if *owner == server { Held::Own } else { Held::Elsewhere };
        let slots = map.owners().iter().map(held).collect();
        Self { server, epoch: map.epoch(), ended: MigrationId(0), registered: true, slots, leaving: 0 }
    }

    /// After a crash: what outlived it are the rows of the slots `kept`, of `slots` in all, and the epoch adopted last. It serves
    /// nothing until it has [adopted](Self::adopt) the map that the coordinator tells it.
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

    /// The map it is at.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Migrations up to this one are over, as far as it knows.
    #[must_use]
    pub fn ended(&self) -> MigrationId {
        self.ended
    }

    /// Whether it knows which slots are its own.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.registered
    }

    /// Whether any slot is on its way to another server, so that what changes has to be [noted](Self::changed).
    #[must_use]
    pub fn is_source(&self) -> bool {
        self.leaving > 0
    }

    /// Whether look-ups and updates of the slot are answered here.
    #[must_use]
    pub fn serves(&self, slot: Slot) -> bool {
        self.registered
            && match self.slots.get(slot.0 as usize) {
                Some(Held::Own) => true,
                Some(Held::Leaving(leaving)) => !leaving.sealed,
                _ => false,
            }
    }

    /// The slots whose rows are this server's, whether it still serves them or not: what a checkpoint takes from it.
    #[must_use]
    pub fn own(&self) -> Vec<Slot> {
        let own = |(_, held): &(u32, &Held<K>)| matches!(held, Held::Own | Held::Leaving(_));
        (0..).zip(&self.slots).filter(own).map(|(slot, _)| Slot(slot)).collect()
    }

    /// Whether a request under the map `asked` that touches `slots` is answered here.
    ///
    /// # Errors
    /// What to tell the asker.
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

    /// Begins to move a slot to server `to`: from here on changes are noted. The caller then sends the slot whole, as package 0, or as
    /// [several](Self::cut). Said twice, the slot is sent anew.
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

    /// The slot that is about to be sent whole is sent as so many packages, package 0 and those that follow it.
    pub fn cut(&mut self, migration: MigrationId, slot: Slot, packages: u64) {
        if let Some(Held::Leaving(leaving)) = self.slots.get_mut(slot.0 as usize)
            && leaving.migration == migration
            && leaving.sequence == 0
            && leaving.unacknowledged
        {
            leaving.sequence = packages.saturating_sub(1);
        }
    }

    /// Notes keys of a slot whose rows were made, changed or removed; to be called after that, and before whoever asked for it is
    /// answered.
    pub fn changed(&mut self, slot: Slot, keys: impl IntoIterator<Item = K>) {
        if let Some(Held::Leaving(leaving)) = self.slots.get_mut(slot.0 as usize) {
            leaving.changed.extend(keys);
        }
    }

    /// The target has the package of this slot that was sent last.
    pub fn acknowledged(&mut self, migration: MigrationId, slot: Slot, sequence: u64) {
        if let Some(Held::Leaving(leaving)) = self.slots.get_mut(slot.0 as usize)
            && leaving.migration == migration
            && leaving.sequence == sequence
        {
            leaving.unacknowledged = false;
        }
    }

    /// What is to be sent now: for each slot that moves, whose last package has arrived and in which something has changed since, its
    /// next packages, each of at most `most` keys, to be sent one after the other.
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

    /// Keys noted and not taken, with repetitions.
    #[must_use]
    pub fn noted(&self) -> usize {
        let noted = |held: &Held<K>| if let Held::Leaving(leaving) = held { leaving.changed.len() } else { 0 };
        self.slots.iter().map(noted).sum()
    }

    /// Serves these slots no more; what has changed is still to be taken and sent.
    ///
    /// # Errors
    /// [`HolderError::Over`], or [`HolderError::NotHeld`] for a slot that is not on its way in this migration; then none is sealed.
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

    /// Whether every slot that moves in this migration is sealed and all of it has arrived.
    #[must_use]
    pub fn is_drained(&self, migration: MigrationId) -> bool {
        self.slots.iter().all(|held| match held {
            Held::Leaving(leaving) if leaving.migration == migration => {
                leaving.sealed && leaving.changed.is_empty() && !leaving.unacknowledged
            }
            _ => true,
        })
    }

    /// A package of a slot that comes here; package 0 is the whole slot, or the first of its rows.
    ///
    /// # Errors
    /// [`HolderError::Over`], [`HolderError::Gap`]; [`HolderError::NotHeld`] for a slot that is this server's own.
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

    /// The coordinator's word: this is the map, and migrations up to `ended` are over. An older word than the last changes nothing.
    /// Gives the slots whose staged rows are to be dropped: they come here no more.
    ///
    /// # Errors
    /// [`HolderError::RowsMissing`], with nothing changed, if the map gives this server rows that it does not have, as when they were
    /// staged here before a crash. [`HolderError::Slots`].
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

    /// All servers have adopted the map `epoch`: gives the slots whose rows this one handed over and may drop. `None` if it is at
    /// another map, or at none: then there is nothing to be reported.
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
