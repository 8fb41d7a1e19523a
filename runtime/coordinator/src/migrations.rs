//! Migrations of slots between parameter servers, one at a time.
//! The coordinator carries out the orders of [`Migration`] by calls to the servers while training
//! continues. It pauses training only to flip to the new slot map.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use rectrain_embedding::Slot;
use rectrain_modes::migration::{
    Epoch, Migration, MigrationId, Order, Progress, SlotCost, SlotMap, imbalance, plan_moves, plan_weighted_moves,
};
use rectrain_modes::shares::EVEN;
use rectrain_proto::v1;
use rectrain_wire::{Channel, Transport};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use super::Coordinator;
use super::servers::ResizeToBegin;
use super::slot_targets::{self, Place};
use super::snapshot::Counted;
use rectrain_protocol::connect;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::message;
use rectrain_protocol::placement::{Placement, write_map};

/// The pause between two rounds in which a source forwards changed rows.
const FORWARD_EVERY: Duration = Duration::from_millis(200);
/// Once all slots are copied, a source forwards until a round has at most this many rows, or for
/// this many rounds. The remaining changes are sent while training is paused.
const FEW_ROWS: u64 = 10_000;
const LAST_ROUNDS: usize = 5;
/// Up to this weight and this many bytes of rows, a source copies its slots without other work.
const ALONE_WEIGHT: u32 = EVEN / 4;
const ALONE_BYTES: u64 = 2 << 30;

/// The migration under way, if any, and the state machine of all migrations.
pub(super) struct Migrations {
    machine: Migration,
    active: Option<ActiveMigration>,
    /// Calls that await a reply: at most a few copies, a forwarder or a release for each server.
    calls: JoinSet<Result<CallDone, RoleError>>,
    settled: Option<Settled>,
    /// Look-ups by slot, accumulated until the last migration. Each migration halves the weight of
    /// earlier ones.
    looked_up: Vec<u64>,
}

/// A migration that is complete but for the servers that it emptied, which may still have to serve
/// a checkpoint.
struct Settled {
    /// Addresses of the emptied servers.
    released: Vec<String>,
    moved: Option<JobEvent>,
}

struct ActiveMigration {
    /// The servers by number, including those that join or leave.
    servers: BTreeMap<u16, Endpoint>,
    from: u32,
    to: u32,
    slots: usize,
    imbalance: f64,
    /// Sources that copy their slots without other work.
    slow: BTreeSet<u16>,
    started: Instant,
    bytes: u64,
    copied: bool,
    forwarders: usize,
    all_copied: watch::Sender<bool>,
    /// Set by the flip: seconds until it was done, and seconds of them for which training was
    /// paused.
    flipped: Option<(f64, f64)>,
    /// Addresses of servers that hold no slots any longer.
    released: Vec<String>,
}

/// The address of a server and a channel to it.
struct Endpoint {
    address: String,
    channel: Channel,
}

/// The result of a call.
pub(super) enum CallDone {
    Copied { migration: MigrationId, slot: Slot, sent: v1::SentRows },
    Forwarded { bytes: u64 },
    Released { server: u16, epoch: Epoch },
}

impl Migrations {
    /// No migration is under way. `begun` is the last one, which has settled.
    pub(super) fn new(map: SlotMap, begun: MigrationId) -> Self {
        Self {
            machine: Migration::settled(map, begun),
            active: None,
            calls: JoinSet::new(),
            settled: None,
            looked_up: Vec::new(),
        }
    }

    /// The next reply; `None` if no call is under way.
    pub(super) async fn answer(&mut self) -> Option<Result<Result<CallDone, RoleError>, JoinError>> {
        self.calls.join_next().await
    }

    /// Adds half of the look-ups before the last migration. Costs are more reliable the longer
    /// look-ups are counted.
    fn add_earlier_look_ups(&self, costs: &mut [SlotCost]) {
        costs.iter_mut().zip(&self.looked_up).for_each(|(cost, before)| cost.look_ups += before / 2);
    }

    fn active(&mut self) -> Result<&mut ActiveMigration, RoleError> {
        self.active.as_mut().ok_or_else(no_migration)
    }

    /// Starts the calls that the state machine ordered.
    fn carry_out(&mut self, orders: Vec<Order>) -> Result<(), RoleError> {
        let Self { calls, active, .. } = self;
        for order in orders {
            let active = active.as_ref().ok_or_else(no_migration)?;
            match order {
                Order::Copy { server, migration, slot, to } => {
                    let source = active.endpoint(server)?.channel.clone();
                    let address = active.endpoint(to)?.address.clone();
                    let copy = v1::CopySlot {
                        migration: migration.0,
                        slot: slot.0,
                        to: u32::from(to),
                        address,
                        alone: active.slow.contains(&server),
                    };
                    calls.spawn(async move {
                        let (sent, _) = message::call(&source, copy, Vec::new(), CALL_DEADLINE).await?;
                        Ok(CallDone::Copied { migration, slot, sent })
                    });
                }
                Order::Release { server, epoch } => {
                    let channel = active.endpoint(server)?.channel.clone();
                    calls.spawn(async move {
                        let release = v1::ReleaseSlots { epoch: epoch.0 };
                        message::call(&channel, release, Vec::new(), CALL_DEADLINE).await?;
                        Ok(CallDone::Released { server, epoch })
                    });
                }
                Order::Seal { .. } | Order::Adopt { .. } => {
                    let reason = "slots are sealed and maps adopted while training rests".to_owned();
                    return Err(RoleError::Inconsistent { message: "adopt_map", reason });
                }
            }
        }
        Ok(())
    }

    /// Makes every source forward changed rows until all slots are copied.
    fn begin_to_forward(&mut self, sources: BTreeSet<u16>) -> Result<(), RoleError> {
        let Self { machine, calls, active, .. } = self;
        let (migration, active) = (machine.begun(), active.as_mut().ok_or_else(no_migration)?);
        for source in sources {
            active.forwarders += 1;
            let (channel, all_copied) = (active.endpoint(source)?.channel.clone(), active.all_copied.subscribe());
            calls.spawn(
                async move { Ok(CallDone::Forwarded { bytes: forward(channel, migration, all_copied).await? }) },
            );
        }
        Ok(())
    }

    /// Seals the copied slots. Returns the orders of the flip.
    async fn seal(&mut self) -> Result<Vec<Order>, RoleError> {
        let (mut orders, mut progress) = self.machine.seal()?;
        let active = self.active.as_ref().ok_or_else(no_migration)?;
        let seal = |order: &Order| {
            let Order::Seal { server, migration, slots } = order else { return None };
            let request = v1::SealSlots { migration: migration.0, slots: slots.iter().map(|slot| slot.0).collect() };
            let (place, server, migration) = (active.endpoint(*server), *server, *migration);
            Some(async move {
                let (sent, _) = message::call(&place?.channel, request, Vec::new(), CALL_DEADLINE).await?;
                Ok::<_, RoleError>((server, migration, sent.bytes))
            })
        };
        let sealed = try_join_all(orders.iter().filter_map(seal)).await?;
        let bytes = sealed.iter().map(|(_, _, bytes)| bytes).sum::<u64>();
        self.active()?.bytes += bytes;
        for (server, migration, _) in sealed {
            (orders, progress) = self.machine.sealed(migration, server);
        }
        match progress {
            Progress::Flipped => Ok(orders),
            _ => Err(RoleError::Inconsistent { message: "seal_slots", reason: "not all slots are sealed".to_owned() }),
        }
    }

    /// Tells new servers which map is in force. A server that reuses the number of an earlier one
    /// then takes none of that one's slots for its own.
    async fn announce_map(&self, new: &[u16]) -> Result<(), RoleError> {
        let active = self.active.as_ref().ok_or_else(no_migration)?;
        let map = self.machine.map();
        let tell = |server: &u16| {
            let place = active.endpoint(*server);
            async move { adopt(place?, map, self.machine.begun()).await.map(drop) }
        };
        try_join_all(new.iter().map(tell)).await.map(drop)
    }

    /// Makes every server adopt the map. Returns the counts of each under the map before.
    async fn adopt(&mut self, orders: Vec<Order>) -> Result<BTreeMap<u16, Counted>, RoleError> {
        let active = self.active.as_ref().ok_or_else(no_migration)?;
        let adopt = |order: &Order| {
            let Order::Adopt { server, map, ended } = order.clone() else { return None };
            let place = active.endpoint(server);
            Some(async move { Ok::<_, RoleError>((server, adopt(place?, &map, ended).await?)) })
        };
        let adopted = try_join_all(orders.iter().filter_map(adopt)).await?;
        let mut counted = BTreeMap::new();
        for (server, adopted) in adopted {
            let v1::AdoptedMap { epoch, ended, applied, table } = adopted;
            let (orders, _) = self.machine.adopted(server, Epoch(epoch), MigrationId(ended));
            self.carry_out(orders)?;
            let (applied, table) = (applied.unwrap_or_default(), table.unwrap_or_default());
            counted.insert(server, Counted { applied, table });
        }
        Ok(counted)
    }
}

impl ActiveMigration {
    /// Starts a migration of `slots` slots. `sizes` has the number of servers before and after it.
    fn new(servers: BTreeMap<u16, Endpoint>, sizes: (u32, u32), slots: usize, imbalance: f64) -> Self {
        Self {
            servers,
            from: sizes.0,
            to: sizes.1,
            slots,
            imbalance,
            slow: BTreeSet::new(),
            started: Instant::now(),
            bytes: 0,
            copied: false,
            forwarders: 0,
            all_copied: watch::Sender::new(false),
            flipped: None,
            released: Vec::new(),
        }
    }

    fn endpoint(&self, server: u16) -> Result<&Endpoint, RoleError> {
        let unknown = || RoleError::Inconsistent {
            message: "map",
            reason: format!("it is not known where parameter server {server} is"),
        };
        self.servers.get(&server).ok_or_else(unknown)
    }

    /// The servers in the map that comes into force.
    fn placement(&self, map: SlotMap) -> Result<Placement, RoleError> {
        let places: Vec<&Endpoint> =
            map.servers().iter().map(|server| self.endpoint(*server)).collect::<Result<_, _>>()?;
        let addresses = places.iter().map(|place| place.address.clone()).collect();
        Ok(Placement { addresses, servers: places.iter().map(|place| place.channel.clone()).collect(), map })
    }
}

/// Makes a server adopt a map, and tells it that migrations up to `ended` are over.
async fn adopt(place: &Endpoint, map: &SlotMap, ended: MigrationId) -> Result<v1::AdoptedMap, RoleError> {
    let request = v1::AdoptMap { map: Some(write_map(map)), ended: ended.0 };
    Ok(message::call(&place.channel, request, Vec::new(), CALL_DEADLINE).await?.0)
}

fn no_migration() -> RoleError {
    RoleError::Inconsistent { message: "adopt_map", reason: "no slots are moving".to_owned() }
}

/// Makes a source forward changed rows until all slots are copied, and then until few changes
/// remain.
async fn forward(
    source: Channel,
    migration: MigrationId,
    mut all_copied: watch::Receiver<bool>,
) -> Result<u64, RoleError> {
    let (mut bytes, mut last_rounds) = (0, 0);
    while last_rounds < LAST_ROUNDS {
        let is_last = *all_copied.borrow();
        let request = v1::ForwardChanges { migration: migration.0, copied: is_last };
        let (sent, _) = message::call(&source, request, Vec::new(), CALL_DEADLINE).await?;
        bytes += sent.bytes;
        last_rounds += usize::from(is_last);
        if is_last && sent.rows <= FEW_ROWS {
            break;
        }
        if !is_last {
            let copied = all_copied.wait_for(|copied| *copied);
            // The next round follows after the pause, or earlier if all slots are copied.
            let _waited = tokio::time::timeout(FORWARD_EVERY, copied).await.map(|copied| copied.is_ok());
        }
    }
    Ok(bytes)
}

impl Coordinator {
    /// Plans which slots move so that the servers of `resize` hold them, and begins to move them.
    pub(super) async fn begin_migration(
        &self,
        resize: ResizeToBegin,
        transport: &dyn Transport,
        migrations: &mut Migrations,
    ) -> Result<(), RoleError> {
        let ResizeToBegin { servers, addresses } = resize;
        let placement = self.placement()?;
        let Slots { mut costs, places } = measure(&placement).await?;
        let look_ups: Vec<u64> = costs.iter().map(|cost| cost.look_ups).collect();
        let imbalance = imbalance(&placement.map, &look_ups);
        migrations.add_earlier_look_ups(&mut costs);
        let weights = self.lock().server_weights(&servers);
        let moves = match &weights {
            Some(weights) => {
                plan_weighted_moves(&placement.map, &costs, &servers, &targets(&servers, weights, &places))
            }
            None => plan_moves(&placement.map, &costs, &servers),
        };
        if moves.is_empty() && placement.map.servers() == servers {
            self.nothing_to_move(&placement, imbalance);
            return Ok(());
        }
        migrations.looked_up = costs.iter().map(|cost| cost.look_ups).collect();
        let (from, to) = (placement.map.servers().len() as u32, servers.len() as u32);
        let endpoints = connect_all(addresses, transport)?;
        let active = ActiveMigration::new(endpoints, (from, to), moves.len(), imbalance);
        migrations.active =
            Some(ActiveMigration { slow: slow_sources(&servers, weights.as_deref(), &places), ..active });
        let new: Vec<u16> = servers.iter().copied().filter(|server| placement.map.place(*server).is_none()).collect();
        migrations.announce_map(&new).await?;
        let (orders, progress) = migrations.machine.begin(&moves, &servers)?;
        let migration = migrations.machine.begun();
        self.change(|state| {
            state.migration_begins(migration);
            state.training().slots_move(to);
            Ok(())
        })?;
        // The journal must have the migration before a server learns of it. A replacement
        // coordinator without it would reuse the number, and servers would take rows of its
        // migration for repeats of this one.
        self.journaled().await;
        migrations.begin_to_forward(moves.iter().map(|step| step.from).collect())?;
        migrations.carry_out(orders)?;
        self.after_progress(progress, migrations)
    }

    /// All slots are on the right servers already.
    fn nothing_to_move(&self, placement: &Placement, imbalance: f64) {
        let servers = placement.map.servers().len() as u32;
        self.events.push(JobEvent::SlotsMoved {
            from: servers,
            to: servers,
            slots: 0,
            bytes: 0,
            seconds: 0.0,
            rest_seconds: 0.0,
            imbalance,
            map_epoch: placement.epoch().0,
        });
        self.lock().resize_ended();
    }

    /// Handles the reply to a call of the migration.
    pub(super) fn migration_answered(
        &self,
        answer: Result<Result<CallDone, RoleError>, JoinError>,
        migrations: &mut Migrations,
    ) -> Result<(), RoleError> {
        let done = answer.map_err(|error| RoleError::Task { what: "moving of slots", reason: error.to_string() })??;
        let (orders, progress) = match done {
            CallDone::Copied { migration, slot, sent } => {
                migrations.active()?.bytes += sent.bytes;
                migrations.machine.copied(migration, slot)
            }
            CallDone::Forwarded { bytes } => {
                let active = migrations.active()?;
                active.bytes += bytes;
                active.forwarders -= 1;
                (Vec::new(), Progress::None)
            }
            CallDone::Released { server, epoch } => migrations.machine.released(server, epoch),
        };
        migrations.carry_out(orders)?;
        self.after_progress(progress, migrations)
    }

    fn after_progress(&self, progress: Progress, migrations: &mut Migrations) -> Result<(), RoleError> {
        if progress == Progress::Settled {
            self.migration_settled(migrations);
        }
        let Some(active) = &mut migrations.active else { return Ok(()) };
        if progress == Progress::Copied {
            active.copied = true;
            active.all_copied.send_replace(true);
        }
        if active.copied && active.forwarders == 0 && active.flipped.is_none() {
            return self.change(|state| {
                state.training().request_flip();
                state.training().advance()
            });
        }
        Ok(())
    }

    /// Brings the next map into force. Training is paused.
    pub(super) async fn flip(&self, migrations: &mut Migrations) -> Result<(), RoleError> {
        let resting = Instant::now();
        let orders = migrations.seal().await?;
        let map = migrations.machine.map().clone();
        let counted = migrations.adopt(orders).await?;
        let active = migrations.active()?;
        let (seconds, rest_seconds) = (active.started.elapsed().as_secs_f64(), resting.elapsed().as_secs_f64());
        active.flipped = Some((seconds, rest_seconds));
        let before = self.placement()?.map;
        let placement = active.placement(map)?;
        let leave = |(server, _): &(&u16, &Endpoint)| placement.map.place(**server).is_none();
        active.released = active.servers.iter().filter(leave).map(|(_, place)| place.address.clone()).collect();
        self.set_placement(placement.clone());
        self.metrics.migrations.inc();
        self.metrics.moved_slots.inc_by(migrations.active()?.slots as u64);
        self.metrics.migration_time.observe(seconds);
        self.metrics.flip_time.observe(rest_seconds);
        // A server that was in no map before reports counts of an earlier life. They do not count.
        let counted: Vec<Counted> = before.servers().iter().filter_map(|server| counted.get(server).copied()).collect();
        self.change(|state| {
            state.servers_changed(placement.map.clone(), &placement.addresses, &counted);
            state.training().flipped(placement.epoch().0, placement.servers.len() as u32)
        })
    }

    /// The sources have dropped the slots that moved away.
    fn migration_settled(&self, migrations: &mut Migrations) {
        let Some(active) = migrations.active.take() else { return };
        let moved = active.flipped.map(|(seconds, rest_seconds)| {
            self.metrics.migrated_bytes.inc_by(active.bytes);
            JobEvent::SlotsMoved {
                from: active.from,
                to: active.to,
                slots: active.slots as u64,
                bytes: active.bytes,
                seconds,
                rest_seconds,
                imbalance: active.imbalance,
                map_epoch: migrations.machine.map().epoch().0,
            }
        });
        migrations.settled = Some(Settled { released: active.released, moved });
    }

    /// Releases the servers that hold no slots any longer, and allows the next migration. The
    /// caller makes sure that no checkpoint of their rows is being written.
    pub(super) async fn end_migration(&self, migrations: &mut Migrations) -> Result<(), RoleError> {
        let Some(Settled { released, moved }) = migrations.settled.take() else { return Ok(()) };
        self.change(|state| {
            released.iter().for_each(|address| state.release(address));
            state.resize_ended();
            state.training().slots_settled()
        })?;
        moved.into_iter().for_each(|moved| self.events.push(moved));
        Ok(())
    }

    /// Training has ended. Aborts a migration that has not flipped. Finishes one that has, so that
    /// [`Self::end_migration`] can end it.
    pub(super) async fn settle_slots(&self, migrations: &mut Migrations) -> Result<(), RoleError> {
        let (orders, aborts) = migrations.machine.cancel();
        if aborts {
            let active = migrations.active()?;
            active.all_copied.send_replace(true);
            let message = format!(
                "training has ended before {} slots had moved: they stay where they were, on {} parameter servers",
                active.slots, active.from
            );
            super::warn_all(&self.events, [message]);
        }
        // A copy that arrived after the abort would be taken for part of the next migration.
        let mut releases = Vec::new();
        while let Some(answer) = migrations.calls.join_next().await {
            let done =
                answer.map_err(|error| RoleError::Task { what: "moving of slots", reason: error.to_string() })?;
            match done? {
                CallDone::Released { server, epoch } => releases.push((server, epoch)),
                CallDone::Copied { .. } | CallDone::Forwarded { .. } => {}
            }
        }
        if aborts {
            migrations.adopt(orders).await?;
            while let Some(answer) = migrations.calls.join_next().await {
                self.migration_answered(answer, migrations)?;
            }
        }
        for (server, epoch) in releases {
            let (_, progress) = migrations.machine.released(server, epoch);
            self.after_progress(progress, migrations)?;
        }
        Ok(())
    }
}

/// Opens channels to servers.
fn connect_all(
    addresses: BTreeMap<u16, String>,
    transport: &dyn Transport,
) -> Result<BTreeMap<u16, Endpoint>, RoleError> {
    let endpoint =
        |(server, address): (u16, String)| Ok((server, Endpoint { channel: connect(transport, &address)?, address }));
    addresses.into_iter().map(endpoint).collect()
}

/// The measurements of the present servers.
struct Slots {
    /// By slot: its look-ups and bytes.
    costs: Vec<SlotCost>,
    /// By the server's number: the bytes of its rows, and its memory.
    places: BTreeMap<u16, Place>,
}

/// The bytes that each of `servers` is to have, by its weight.
fn targets(servers: &[u16], weights: &[u32], places: &BTreeMap<u16, Place>) -> Vec<u64> {
    let place = |(server, weight): (&u16, &u32)| {
        let new = Place { weight: *weight, bytes: 0, room: None };
        places.get(server).map_or(new, |place| Place { weight: *weight, ..*place })
    };
    let of_leaving = places.iter().filter(|(server, _)| !servers.contains(server)).map(|(_, place)| place.bytes).sum();
    let staying: Vec<Place> = servers.iter().zip(weights).map(place).collect();
    slot_targets::targets(&staying, of_leaving)
}

/// The servers that copy their slots without other work: much slower than the others, with few
/// enough rows for a short wait.
fn slow_sources(servers: &[u16], weights: Option<&[u32]>, places: &BTreeMap<u16, Place>) -> BTreeSet<u16> {
    let weighed = servers.iter().zip(weights.unwrap_or_default());
    let is_slow = |(server, weight): &(&u16, &u32)| {
        **weight <= ALONE_WEIGHT && places.get(*server).is_some_and(|place| place.bytes <= ALONE_BYTES)
    };
    weighed.filter(is_slow).map(|(server, _)| *server).collect()
}

/// Measures the cost of every slot, and the memory of every server.
async fn measure(placement: &Placement) -> Result<Slots, RoleError> {
    // Measuring changes nothing, so a lost connection costs only a retry.
    let servers = placement.servers.iter();
    let calls = servers.map(|server| message::call_server(server, v1::MeasureSlots {}, || Ok(Vec::new())));
    let replies = try_join_all(calls).await?;
    let (mut costs, mut places) = (Vec::<SlotCost>::new(), BTreeMap::new());
    for (number, (reply, tensors)) in placement.map.servers().iter().zip(replies) {
        let [look_ups, bytes] = message::take("measure_slots", tensors)?;
        let (look_ups, bytes) = (look_ups.expect_u64("look-ups")?, bytes.expect_u64("bytes")?);
        places.insert(*number, Place { weight: EVEN, bytes: bytes.iter().sum(), room: reply.memory_room });
        costs.resize(costs.len().max(look_ups.len()), SlotCost::default());
        for ((cost, look_ups), bytes) in costs.iter_mut().zip(look_ups).zip(bytes) {
            cost.look_ups += look_ups;
            cost.bytes += bytes;
        }
    }
    Ok(Slots { costs, places })
}
