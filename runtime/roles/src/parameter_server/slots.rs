//! The slots of a parameter server: which of them it serves ([`SlotHolder`] decides), what they cost, and their way to and from
//! other servers while training goes on. The coordinator says what moves; rows go from server to server.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rectrain_checkpoint::SlotSet;
use rectrain_embedding::{FeatureKey, GroupId, Slot, SlotSnapshot, Store, slot_of};
use rectrain_modes::migration::{Changes, Epoch, HolderError, MigrationId, Receipt, SlotHolder, SlotMap};
use rectrain_proto::v1;
use rectrain_wire::{Channel, Tensor, Transport};

use crate::error::RoleError;
use crate::member::connect;
use crate::message;
use crate::metrics::PsMetrics;
use crate::parameter_server::blocking;
use crate::placement::read_map;
use crate::plan::CALL_DEADLINE;

/// Bytes of rows in one message, or one slot's if those are more.
const MESSAGE_BYTES: usize = 4 << 20;

/// A row's name within a slot.
type RowName = (GroupId, FeatureKey);

/// See the module's text.
pub(super) struct Slots {
    /// This server's.
    number: u16,
    store: Arc<Store>,
    holder: Mutex<SlotHolder<RowName>>,
    /// The map adopted last.
    map: Mutex<Arc<SlotMap>>,
    /// Whether changes have to be noted; read on every update.
    moving: AtomicBool,
    /// Keys looked up since the map changed, by slot.
    look_ups: Box<[AtomicU64]>,
    /// Where other servers are.
    targets: Mutex<BTreeMap<u16, Channel>>,
    transport: Arc<dyn Transport>,
    metrics: PsMetrics,
}

impl Slots {
    pub(super) fn new(
        index: u32,
        map: SlotMap,
        store: &Arc<Store>,
        transport: Arc<dyn Transport>,
        metrics: PsMetrics,
    ) -> Self {
        let number = index.min(u32::from(u16::MAX)) as u16;
        let slots = Self {
            number,
            store: Arc::clone(store),
            holder: Mutex::new(SlotHolder::new(number, &map)),
            look_ups: (0..map.slots()).map(|_| AtomicU64::new(0)).collect(),
            map: Mutex::new(Arc::new(map)),
            moving: AtomicBool::new(false),
            targets: Mutex::default(),
            transport,
            metrics,
        };
        slots.count();
        slots
    }

    /// The map in force.
    pub(super) fn map(&self) -> Arc<SlotMap> {
        Arc::clone(&self.map.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Where this server stands among those in the map, and how many those are. `None` while it is in no map.
    pub(super) fn place(&self) -> Option<(usize, usize)> {
        let map = self.map();
        Some((map.place(self.number)?, map.servers().len()))
    }

    /// The slots whose rows are this server's.
    pub(super) fn own(&self) -> SlotSet {
        SlotSet::new(self.lock().own())
    }

    /// Whether a request under the map `asked` may wait here for its turn.
    pub(super) fn admit_epoch(&self, asked: u64) -> Result<(), RoleError> {
        Ok(self.lock().admit(Epoch(asked), [])?)
    }

    /// Whether these keys (ascending, by group), sorted by the map `asked`, are answered here; if so, they are counted as look-ups.
    pub(super) fn admit_look_up(&self, asked: u64, keys: &[Vec<FeatureKey>]) -> Result<(), RoleError> {
        let runs: Vec<(Slot, usize)> = keys.iter().flat_map(|keys| self.runs(keys, |key| key)).collect();
        self.lock().admit(Epoch(asked), runs.iter().map(|(slot, _)| *slot))?;
        for (slot, keys) in runs {
            self.look_ups[slot.0 as usize].fetch_add(keys as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether gradients of these keys (ascending, by group), sorted by the map `asked`, are taken here.
    pub(super) fn admit_update<'k>(&self, asked: u64, keys: impl Iterator<Item = &'k [u64]>) -> Result<(), RoleError> {
        let slots: Vec<Slot> = keys.flat_map(|keys| self.runs(keys, FeatureKey)).map(|run| run.0).collect();
        Ok(self.lock().admit(Epoch(asked), slots)?)
    }

    /// Rows of these keys (ascending) were made or changed, or may have been. To be called after that.
    pub(super) fn changed(&self, group: GroupId, keys: &[FeatureKey]) {
        // A change that is not seen here was made before the slot began to move, and is in the copy: see `copy`.
        if !self.moving.load(Ordering::Acquire) {
            return;
        }
        let mut holder = self.lock();
        let mut rest = keys;
        for (slot, run) in self.runs(keys, |key| key) {
            let (own, others) = rest.split_at(run);
            holder.changed(slot, own.iter().map(|key| (group, *key)));
            rest = others;
        }
    }

    /// What the slots cost: keys looked up since the map changed, and bytes.
    pub(super) async fn measure(&self) -> Result<Vec<Tensor>, RoleError> {
        let (own, store, slots) = (self.own(), Arc::clone(&self.store), self.look_ups.len());
        let look_ups: Vec<u64> = (0..slots)
            .map(|slot| if own.contains(Slot(slot as u32)) { self.look_ups[slot].load(Ordering::Relaxed) } else { 0 })
            .collect();
        let bytes = blocking("measuring of slots", move || {
            let bytes = |slot| if own.contains(slot) { store.slot_bytes(slot) } else { Ok(0) };
            (0..slots as u32).map(|slot| bytes(Slot(slot))).collect::<Result<Vec<u64>, _>>()
        })
        .await??;
        Ok(vec![Tensor::from(look_ups), Tensor::from(bytes)])
    }

    /// Sends a slot whole, and notes from then on what changes in it.
    pub(super) async fn copy(&self, request: v1::CopySlot) -> Result<v1::SentRows, RoleError> {
        let v1::CopySlot { migration, slot, to, address } = request;
        let (migration, slot) = (MigrationId(migration), Slot(slot));
        let to =
            u16::try_from(to).map_err(|_| inconsistent("copy_slot", format!("there is no parameter server {to}")))?;
        self.lock_targets().insert(to, connect(&*self.transport, &address)?);
        self.lock().begin_copy(migration, slot, to).map_err(|error| refused("copy_slot", error))?;
        // Before the rows are copied: an update that takes the slot's lock after the copy sees this after it.
        self.moving.store(true, Ordering::Release);
        let store = Arc::clone(&self.store);
        let snapshot = blocking("copying of a slot", move || store.snapshot_slot(slot)).await??;
        self.send(to, migration, vec![(0, snapshot)]).await
    }

    /// Serves these slots no more and sends what changed last.
    pub(super) async fn seal(&self, request: v1::SealSlots) -> Result<v1::SentRows, RoleError> {
        let migration = MigrationId(request.migration);
        let slots: Vec<Slot> = request.slots.into_iter().map(Slot).collect();
        self.lock().seal(migration, &slots).map_err(|error| refused("seal_slots", error))?;
        let sent = self.forward().await?;
        if self.lock().is_drained(migration) {
            return Ok(sent);
        }
        Err(inconsistent("seal_slots", "rows that changed could not be sent".to_owned()))
    }

    /// Takes rows of slots that move here.
    pub(super) async fn put(&self, request: v1::PutSlots, tensors: Vec<Tensor>) -> Result<(), RoleError> {
        let [bytes] = message::take("put_slots", tensors)?;
        let bytes = bytes.expect_u8("rows")?;
        let total: u64 = request.packages.iter().map(|package| package.bytes).fold(0, u64::saturating_add);
        if total != bytes.len() as u64 {
            return Err(inconsistent("put_slots", format!("{total} bytes were announced, {} came", bytes.len())));
        }
        let mut new = Vec::with_capacity(request.packages.len());
        let mut start = 0;
        for v1::SlotPackage { slot, sequence, bytes } in request.packages {
            let place = start..start + bytes as usize;
            start = place.end;
            let received = self.lock().receive(MigrationId(request.migration), Slot(slot), sequence);
            if received.map_err(|error| refused("put_slots", error))? == Receipt::New {
                new.push((Slot(slot), place));
            }
        }
        let store = Arc::clone(&self.store);
        blocking("taking in of slots", move || {
            new.into_iter().try_for_each(|(slot, place)| {
                let restored = store.restore_slot(&bytes[place])?;
                if restored.slot == slot {
                    return Ok(());
                }
                Err(inconsistent("put_slots", format!("rows of slot {} came as those of slot {slot}", restored.slot)))
            })
        })
        .await?
    }

    /// The coordinator's word on the map. Says whether it is another map than before.
    pub(super) async fn adopt(&self, request: v1::AdoptMap) -> Result<(v1::AdoptedMap, bool), RoleError> {
        let map = read_map("adopt_map", request.map)?;
        let (adopted, abandoned, is_new) = {
            let mut holder = self.lock();
            let before = holder.epoch();
            let abandoned =
                holder.adopt(&map, MigrationId(request.ended)).map_err(|error| refused("adopt_map", error))?;
            self.moving.store(holder.is_source(), Ordering::Release);
            let adopted = v1::AdoptedMap { epoch: holder.epoch().0, ended: holder.ended().0, applied: None };
            (adopted, abandoned, holder.epoch() != before)
        };
        if is_new {
            *self.map.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(map);
            self.look_ups.iter().for_each(|look_ups| look_ups.store(0, Ordering::Relaxed));
        }
        self.clear(abandoned).await?;
        self.count();
        Ok((adopted, is_new))
    }

    /// Drops the rows that were handed over.
    pub(super) async fn release(&self, request: v1::ReleaseSlots) -> Result<(), RoleError> {
        let released = self.lock().release(Epoch(request.epoch));
        let not_there = || inconsistent("release_slots", format!("this server is not at slot map {}", request.epoch));
        self.clear(released.ok_or_else(not_there)?).await
    }

    async fn clear(&self, slots: Vec<Slot>) -> Result<(), RoleError> {
        let store = Arc::clone(&self.store);
        blocking("dropping of slots", move || slots.into_iter().try_for_each(|slot| store.clear_slot(slot).map(drop)))
            .await??;
        Ok(())
    }

    /// Sends what has changed in slots that are moving. Packages of a slot go one after the other: the next is taken when the one before
    /// has arrived.
    pub(super) async fn forward(&self) -> Result<v1::SentRows, RoleError> {
        let mut by_target: BTreeMap<(u16, MigrationId), Vec<Changes<RowName>>> = BTreeMap::new();
        for changes in self.lock().take_changes() {
            by_target.entry((changes.to, changes.migration)).or_default().push(changes);
        }
        let mut total = v1::SentRows::default();
        for ((to, migration), changes) in by_target {
            let store = Arc::clone(&self.store);
            let packages = blocking("reading of changed rows", move || {
                let package = |changes: Changes<RowName>| {
                    Ok((changes.sequence, store.snapshot_rows(changes.slot, &changes.keys)?))
                };
                changes.into_iter().map(package).collect::<Result<Vec<_>, RoleError>>()
            });
            let sent = self.send(to, migration, packages.await??).await?;
            total.rows += sent.rows;
            total.bytes += sent.bytes;
            self.metrics.forwarded_rows.inc_by(sent.rows);
        }
        Ok(total)
    }

    /// Sends packages to one server, some in a message.
    async fn send(
        &self,
        to: u16,
        migration: MigrationId,
        packages: Vec<(u64, SlotSnapshot)>,
    ) -> Result<v1::SentRows, RoleError> {
        let unknown = || inconsistent("put_slots", format!("it is not known where parameter server {to} is"));
        let channel = self.lock_targets().get(&to).cloned().ok_or_else(unknown)?;
        let mut sent = v1::SentRows::default();
        let mut packages = packages.into_iter().peekable();
        while packages.peek().is_some() {
            let mut request = v1::PutSlots { migration: migration.0, packages: Vec::new() };
            let mut bytes: Vec<u8> = Vec::new();
            while let Some((sequence, snapshot)) =
                packages.next_if(|(_, next)| bytes.is_empty() || bytes.len() + next.as_bytes().len() <= MESSAGE_BYTES)
            {
                let length = snapshot.as_bytes().len() as u64;
                request.packages.push(v1::SlotPackage { slot: snapshot.slot().0, sequence, bytes: length });
                sent.rows += snapshot.rows();
                if bytes.is_empty() {
                    bytes = snapshot.into_bytes();
                } else {
                    bytes.extend_from_slice(snapshot.as_bytes());
                }
            }
            sent.bytes += bytes.len() as u64;
            let arrived: Vec<(Slot, u64)> =
                request.packages.iter().map(|package| (Slot(package.slot), package.sequence)).collect();
            message::call(&channel, request, vec![Tensor::from(bytes)], CALL_DEADLINE).await?;
            let mut holder = self.lock();
            arrived.into_iter().for_each(|(slot, sequence)| holder.acknowledged(migration, slot, sequence));
        }
        self.metrics.moved_bytes.inc_by(sent.bytes);
        Ok(sent)
    }

    /// The slots of ascending keys, each with how many keys there are of it.
    fn runs<K: Copy>(&self, keys: &[K], name: fn(K) -> FeatureKey) -> impl Iterator<Item = (Slot, usize)> {
        let slots = self.look_ups.len() as u32;
        let slot = move |key: &K| slot_of(name(*key), slots);
        let mut rest = keys;
        std::iter::from_fn(move || {
            let own = slot(rest.first()?);
            let run = rest.iter().position(|key| slot(key) != own).unwrap_or(rest.len());
            rest = &rest[run..];
            Some((own, run))
        })
    }

    fn count(&self) {
        self.metrics.slots.set(self.lock().own().len() as i64);
    }

    fn lock_targets(&self) -> MutexGuard<'_, BTreeMap<u16, Channel>> {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, SlotHolder<RowName>> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refused(message: &'static str, error: HolderError) -> RoleError {
    inconsistent(message, error.to_string())
}

fn inconsistent(message: &'static str, reason: String) -> RoleError {
    RoleError::Inconsistent { message, reason }
}
