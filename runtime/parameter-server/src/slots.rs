//! The slots of a parameter server: which slots it serves ([`SlotHolder`] decides), their cost, and
//! their moves between servers during training. The coordinator decides which slots move. The
//! servers send the rows to each other directly.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rectrain_checkpoint::SlotSet;
use rectrain_embedding::{FeatureKey, GroupId, Kept as KeptRows, Moment, Slot, SlotSnapshot, Store, slot_of};
use rectrain_modes::migration::{Changes, Epoch, HolderError, MigrationId, Receipt, SlotHolder, SlotMap};
use rectrain_proto::v1;
use rectrain_wire::{Channel, Tensor, Transport};

use crate::copying_alone::CopyingAlone;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::connect;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message;
use rectrain_protocol::metrics::PsMetrics;
use rectrain_protocol::placement::read_map;

/// The most bytes of rows in a message. A message with a single package may be larger.
const MESSAGE_BYTES: usize = 4 << 20;
/// The most bytes of rows in a package. A larger slot is sent in several packages, so that each
/// package fits into a message.
const PACKAGE_BYTES: usize = 64 << 20;

/// A row's name within a slot.
type RowName = (GroupId, FeatureKey);

/// See the module documentation.
pub(super) struct Slots {
    /// The number of this server.
    number: u16,
    store: Arc<Store>,
    holder: Mutex<SlotHolder<RowName>>,
    /// The slot map that this server adopted last.
    map: Mutex<Arc<SlotMap>>,
    /// Whether changes of rows must be recorded. Read on every look-up and update.
    moving: AtomicBool,
    /// Held while rows of a slot are removed, and while a copy of a slot begins.
    removing: Mutex<()>,
    /// Keys looked up since the map changed, by slot.
    look_ups: Box<[AtomicU64]>,
    /// The channels to servers that slots move to.
    targets: Mutex<BTreeMap<u16, Channel>>,
    transport: Arc<dyn Transport>,
    alone: CopyingAlone,
    /// See [`PACKAGE_BYTES`].
    package_bytes: usize,
    metrics: PsMetrics,
}

impl Slots {
    pub(super) fn new(
        index: u32,
        map: SlotMap,
        store: &Arc<Store>,
        transport: Arc<dyn Transport>,
        stall: Duration,
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
            removing: Mutex::default(),
            targets: Mutex::default(),
            transport,
            alone: CopyingAlone::new(stall),
            package_bytes: PACKAGE_BYTES,
            metrics,
        };
        slots.count();
        slots
    }

    /// The current slot map.
    pub(super) fn map(&self) -> Arc<SlotMap> {
        Arc::clone(&self.map.lock())
    }

    /// The position of this server among the servers of the map, and their number. `None` if the
    /// map does not have this server.
    pub(super) fn place(&self) -> Option<(usize, usize)> {
        let map = self.map();
        Some((map.place(self.number)?, map.servers().len()))
    }

    /// The slots that belong to this server.
    pub(super) fn own(&self) -> SlotSet {
        SlotSet::new(self.lock().own())
    }

    /// Checks that a request under the map of epoch `asked` may wait here for its turn.
    pub(super) fn admit_epoch(&self, asked: u64) -> Result<(), RoleError> {
        Ok(self.lock().admit(Epoch(asked), [])?)
    }

    /// Checks that this server serves these keys under the map of epoch `asked`, and counts the
    /// lookups. Keys ascend within each group.
    pub(super) fn check_look_up(&self, asked: u64, keys: &[Vec<FeatureKey>]) -> Result<(), RoleError> {
        let runs: Vec<(Slot, usize)> = keys.iter().flat_map(|keys| self.runs(keys, |key| key)).collect();
        self.lock().admit(Epoch(asked), runs.iter().map(|(slot, _)| *slot))?;
        for (slot, keys) in runs {
            self.look_ups[slot.0 as usize].fetch_add(keys as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Checks that this server accepts gradients of these keys under the map of epoch `asked`. Keys
    /// ascend within each group.
    pub(super) fn admit_update<'k>(&self, asked: u64, keys: impl Iterator<Item = &'k [u64]>) -> Result<(), RoleError> {
        let slots: Vec<Slot> = keys.flat_map(|keys| self.runs(keys, FeatureKey)).map(|run| run.0).collect();
        Ok(self.lock().admit(Epoch(asked), slots)?)
    }

    /// Records that rows of these keys (ascending) were or may have been created or changed. Call
    /// it after the change.
    pub(super) fn changed(&self, group: GroupId, keys: &[FeatureKey]) {
        // If `moving` is false, the slot's copy began after this change and contains it: see
        // `copy`.
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

    /// Removes the expired rows of a slot, and those beyond its budget, as the store decides at
    /// `now`. The removed rows of a moving slot are noted as changes. Call it when an update has
    /// changed the slot.
    pub(super) fn keep_budget(&self, slot: Slot, now: Moment) -> Result<KeptRows, RoleError> {
        // The copy of the slot begins before this call or after it. So it has the removed rows, or
        // their names are noted.
        let _removing = self.removing.lock();
        if !self.lock().is_leaving(slot) {
            return Ok(self.store.keep_budget(slot, now)?);
        }
        let before = self.names(slot)?;
        let kept = self.store.keep_budget(slot, now)?;
        if kept.expired + kept.evicted > 0 {
            let after: BTreeSet<RowName> = self.names(slot)?.into_iter().collect();
            self.lock().changed(slot, before.into_iter().filter(|name| !after.contains(name)));
        }
        Ok(kept)
    }

    /// The names of the rows of a slot.
    fn names(&self, slot: Slot) -> Result<Vec<RowName>, RoleError> {
        let mut names = Vec::new();
        self.store.for_each_row(slot, |group, key, _, _| names.push((group, key)))?;
        Ok(names)
    }

    /// The cost of each slot: the keys looked up since the map changed, and the bytes.
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

    /// Sends a whole slot, and records its changes from then on.
    pub(super) async fn copy(&self, request: v1::CopySlot) -> Result<v1::SentRows, RoleError> {
        let v1::CopySlot { migration, slot, to, address, alone } = request;
        let (migration, slot) = (MigrationId(migration), Slot(slot));
        let to =
            u16::try_from(to).map_err(|_| inconsistent("copy_slot", format!("there is no parameter server {to}")))?;
        self.lock_targets().insert(to, connect(&*self.transport, &address)?);
        self.begin_copy(migration, slot, to)?;
        if alone {
            self.alone.begin(migration);
        }
        let (store, most) = (Arc::clone(&self.store), self.package_bytes);
        let parts = blocking("copying of a slot", move || store.snapshot_slot_in_parts(slot, most)).await??;
        self.lock().cut(migration, slot, parts.len() as u64);
        self.send(to, migration, (0..).zip(parts).collect()).await
    }

    /// Waits while this server copies its slots without other work. Takes no lock while no slots
    /// move: every look-up of training comes here.
    pub(super) async fn copied_alone(&self) {
        if self.moving.load(Ordering::Acquire) {
            self.alone.ended().await;
        }
    }

    fn begin_copy(&self, migration: MigrationId, slot: Slot, to: u16) -> Result<(), RoleError> {
        let _removing = self.removing.lock();
        self.lock().begin_copy(migration, slot, to).map_err(|error| refused("copy_slot", error))?;
        // Set this before the copy. An update that locks the slot after the copy then sees the
        // flag.
        self.moving.store(true, Ordering::Release);
        Ok(())
    }

    /// Stops serving these slots and sends their last changes.
    pub(super) async fn seal(&self, request: v1::SealSlots) -> Result<v1::SentRows, RoleError> {
        let migration = MigrationId(request.migration);
        let slots: Vec<Slot> = request.slots.into_iter().map(Slot).collect();
        self.lock().seal(migration, &slots).map_err(|error| refused("seal_slots", error))?;
        let sent = self.forward(true).await?;
        if self.lock().is_drained(migration) {
            return Ok(sent);
        }
        Err(inconsistent("seal_slots", "rows that changed could not be sent".to_owned()))
    }

    /// Receives rows of slots that move to this server.
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

    /// Adopts the coordinator's slot map. Also returns whether it differs from the previous one.
    pub(super) async fn adopt(&self, request: v1::AdoptMap) -> Result<(v1::AdoptedMap, bool), RoleError> {
        let map = read_map("adopt_map", request.map)?;
        let (adopted, abandoned, is_new) = {
            let mut holder = self.lock();
            let before = holder.epoch();
            let abandoned =
                holder.adopt(&map, MigrationId(request.ended)).map_err(|error| refused("adopt_map", error))?;
            self.moving.store(holder.is_source(), Ordering::Release);
            let adopted =
                v1::AdoptedMap { epoch: holder.epoch().0, ended: holder.ended().0, ..v1::AdoptedMap::default() };
            (adopted, abandoned, holder.epoch() != before)
        };
        self.alone.end();
        if is_new {
            *self.map.lock() = Arc::new(map);
            self.look_ups.iter().for_each(|look_ups| look_ups.store(0, Ordering::Relaxed));
        }
        self.clear(abandoned).await?;
        self.count();
        Ok((adopted, is_new))
    }

    /// Drops the rows of the slots that other servers have taken over.
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

    /// Sends the changes in slots that are moving. All slots are `copied`, or copies go on. A
    /// slot's packages are sequential: each is read only after the target has acknowledged the one
    /// before.
    pub(super) async fn forward(&self, copied: bool) -> Result<v1::SentRows, RoleError> {
        if copied {
            self.alone.end();
        }
        let mut by_target: BTreeMap<(u16, MigrationId), Vec<Changes<RowName>>> = BTreeMap::new();
        let most = self.store.rows_within(self.package_bytes);
        for changes in self.lock().take_changes(most) {
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

    /// Sends packages to one server. A message may have several.
    async fn send(
        &self,
        to: u16,
        migration: MigrationId,
        packages: Vec<(u64, SlotSnapshot)>,
    ) -> Result<v1::SentRows, RoleError> {
        let unknown = || inconsistent("put_slots", format!("it is not known where parameter server {to} is"));
        let channel = self.lock_targets().get(&to).cloned().ok_or_else(unknown)?;
        let mut sent = v1::SentRows::default();
        let most = MESSAGE_BYTES.min(self.package_bytes);
        let mut packages = packages.into_iter().peekable();
        while packages.peek().is_some() {
            let mut request = v1::PutSlots { migration: migration.0, packages: Vec::new() };
            let mut bytes: Vec<u8> = Vec::new();
            while let Some((sequence, snapshot)) =
                packages.next_if(|(_, next)| bytes.is_empty() || bytes.len() + next.as_bytes().len() <= most)
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

    /// Splits ascending keys by slot. Returns each slot with its number of keys.
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
        self.targets.lock()
    }

    fn lock(&self) -> MutexGuard<'_, SlotHolder<RowName>> {
        self.holder.lock()
    }
}

fn refused(message: &'static str, error: HolderError) -> RoleError {
    inconsistent(message, error.to_string())
}

fn inconsistent(message: &'static str, reason: String) -> RoleError {
    RoleError::Inconsistent { message, reason }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;
    use rectrain_embedding::{Initializer, Missing, RowSpec, SparseOptimizer, StoreConfig, ValueType};
    use rectrain_wire::{
        Address, BoxFuture, Frame, Limits, Peer, Refusal, Service, TcpConfig, TcpTransport, WireCounters,
    };

    use super::*;
    use rectrain_protocol::message::Request;
    use rectrain_protocol::metrics::RoleMetrics;

    const MIGRATION: u64 = 3;
    const SLOT: Slot = Slot(0);
    /// Small enough that a slot needs many messages.
    const FRAME_BYTES: u64 = 4_000;

    fn transport() -> Arc<dyn Transport> {
        let limits = Limits { max_frame_bytes: FRAME_BYTES, ..Limits::default() };
        let counters = WireCounters::unregistered(|_| "test").unwrap();
        Arc::new(TcpTransport::new(TcpConfig { limits, ..TcpConfig::default() }, counters))
    }

    fn server(index: u32) -> Slots {
        let optimizer = SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.0, epsilon: 1e-10 };
        let initializer = Initializer::Normal { standard_deviation: 0.01 };
        let group = |dim| RowSpec {
            dim,
            value_type: ValueType::F32,
            optimizer,
            life: rectrain_embedding::LifePolicy::KeepAll,
            initializer,
            zero_columns: 1,
            first_order: None,
            share: None,
        };
        let config = StoreConfig { slots: 2, seed: 3, groups: vec![group(4), group(2)], budget: None };
        let store = Arc::new(Store::new(config).unwrap());
        let metrics = PsMetrics::of(&RoleMetrics::new(Registry::new()).unwrap(), index);
        let slots = Slots::new(index, SlotMap::even(2, 1), &store, transport(), Duration::from_secs(1), metrics);
        Slots { package_bytes: 1_000, ..slots }
    }

    fn train(slots: &Slots, keys: std::ops::Range<u64>, step: u64) {
        let keys: Vec<FeatureKey> = keys.map(FeatureKey).collect();
        for group in [GroupId(0), GroupId(1)] {
            let mut rows = vec![0.0; keys.len() * slots.store.spec(group).unwrap().dim];
            slots.store.lookup(group, &keys, Missing::Insert, &mut rows).unwrap();
            slots.store.update(group, &keys, &vec![0.5; rows.len()], step).unwrap();
            slots.changed(group, &keys);
        }
    }

    /// A server that receives slots, and the sequence numbers of the packages that arrived.
    struct Target {
        slots: Slots,
        packages: Mutex<Vec<u64>>,
    }

    impl Service for Target {
        fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
            Box::pin(async move {
                let (request, tensors) = message::read::<v1::PutSlots>(frame)?;
                self.packages.lock().extend(request.packages.iter().map(|package| package.sequence));
                self.slots.put(request, tensors).await?;
                Ok(Frame { kind: v1::PutSlots::KIND, ..Frame::default() })
            })
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_slot_larger_than_a_message_moves_in_packages() {
        let source = server(0);
        train(&source, 1..400, 1);
        let whole = source.store.snapshot_slot(SLOT).unwrap();
        assert!(whole.as_bytes().len() as u64 > 5 * FRAME_BYTES);
        let target = Arc::new(Target { slots: server(1), packages: Mutex::default() });
        let serving = transport().serve(target.clone(), &Address::tcp("127.0.0.1", 0)).unwrap();
        let address = serving.address().to_string();
        let copy = v1::CopySlot { migration: MIGRATION, slot: SLOT.0, to: 1, address, alone: true };
        let mut sent = vec![source.copy(copy).await.unwrap()];
        assert_eq!(target.slots.store.snapshot_slot(SLOT).unwrap(), whole);
        train(&source, 100..450, 2);
        source.store.remove(GroupId(0), FeatureKey(120)).unwrap();
        sent.push(source.forward(false).await.unwrap());
        let waiting = tokio::time::timeout(Duration::from_millis(20), source.copied_alone());
        assert!(waiting.await.is_err(), "another slot may follow");
        assert_eq!(source.forward(true).await.unwrap(), v1::SentRows::default(), "all of it has arrived");
        source.copied_alone().await;
        train(&source, 1..300, 3);
        sent.push(source.seal(v1::SealSlots { migration: MIGRATION, slots: vec![SLOT.0] }).await.unwrap());
        let digest = |slots: &Slots| slots.store.slot_digest(SLOT).unwrap();
        assert_eq!(digest(&target.slots), digest(&source));
        assert_eq!(sent.iter().map(|sent| sent.rows).collect::<Vec<_>>(), [2 * 399, 2 * 350 - 1, 2 * 299]);
        let packages = target.packages.lock();
        assert!(packages.len() > 50 && packages.iter().copied().eq(0..packages.len() as u64), "{packages:?}");
    }
}
