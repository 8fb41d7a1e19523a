//! Slots on the move, as the coordinator leads it: carries out what [`Migration`] says by calls to the parameter servers while
//! training goes on, has training rest for the flip of the map, and tells everybody. One migration at a time.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use rectrain_embedding::Slot;
use rectrain_modes::migration::{
    Epoch, Migration, MigrationId, Order, Progress, SlotCost, SlotMap, imbalance, plan_moves,
};
use rectrain_proto::v1;
use rectrain_wire::{Channel, Transport};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use super::Coordinator;
use crate::error::RoleError;
use crate::events::JobEvent;
use crate::member::connect;
use crate::message;
use crate::placement::{Placement, write_map};
use crate::plan::CALL_DEADLINE;

/// The pause between two rounds in which a source forwards what changes.
const FORWARD_EVERY: Duration = Duration::from_millis(200);
/// When all slots are copied, sources forward until a round has so few rows, or so often: the rest is sent while training rests.
const FEW_ROWS: u64 = 10_000;
const LAST_ROUNDS: usize = 5;

/// See the module's text.
pub(super) struct Migrations {
    machine: Migration,
    under_way: Option<UnderWay>,
    /// Calls whose answers are waited for: at most a few copies, a forwarder or a release for each server.
    calls: JoinSet<Result<Done, RoleError>>,
    settled: Option<Settled>,
    /// Keys looked up until slots moved last, by slot: what lies further back counts half as much each time that they move.
    looked_up: Vec<u64>,
}

/// A migration of which only this is left to do: to let servers end that hold nothing any more.
struct Settled {
    /// By address.
    leaving: Vec<String>,
    moved: Option<JobEvent>,
}

struct UnderWay {
    /// Those that join or leave included.
    placement: Placement,
    to: u32,
    slots: usize,
    imbalance: f64,
    started: Instant,
    bytes: u64,
    copied: bool,
    forwarders: usize,
    all_copied: watch::Sender<bool>,
    /// When the map was flipped: the seconds until then, and those of them that training rested.
    flipped: Option<(f64, f64)>,
    /// Servers that hold nothing any more, by address.
    leaving: Vec<String>,
}

/// What a call ended with.
pub(super) enum Done {
    Copied { migration: MigrationId, slot: Slot, sent: v1::SentRows },
    Forwarded { bytes: u64 },
    Released { server: u16, epoch: Epoch },
}

impl Migrations {
    /// `begun`: the migration that was begun last, which is settled.
    pub(super) fn new(map: SlotMap, begun: MigrationId) -> Self {
        Self {
            machine: Migration::settled(map, begun),
            under_way: None,
            calls: JoinSet::new(),
            settled: None,
            looked_up: Vec::new(),
        }
    }

    /// The next answer; none while nothing is asked.
    pub(super) async fn answer(&mut self) -> Option<Result<Result<Done, RoleError>, JoinError>> {
        self.calls.join_next().await
    }

    /// The longer look-ups are counted, the less chance decides what a slot costs.
    fn add_what_was_looked_up_before(&self, costs: &mut [SlotCost]) {
        costs.iter_mut().zip(&self.looked_up).for_each(|(cost, before)| cost.look_ups += before / 2);
    }

    fn under_way(&mut self) -> Result<&mut UnderWay, RoleError> {
        self.under_way.as_mut().ok_or_else(nothing_moves)
    }

    /// Begins the calls that are asked for.
    fn carry_out(&mut self, orders: Vec<Order>) -> Result<(), RoleError> {
        let Self { calls, under_way, .. } = self;
        for order in orders {
            let placement = &under_way.as_ref().ok_or_else(nothing_moves)?.placement;
            match order {
                Order::Copy { server, migration, slot, to } => {
                    let source = placement.servers[usize::from(server)].clone();
                    let address = placement.addresses[usize::from(to)].clone();
                    let copy = v1::CopySlot { migration: migration.0, slot: slot.0, to: u32::from(to), address };
                    calls.spawn(async move {
                        let (sent, _) = message::call(&source, copy, Vec::new(), CALL_DEADLINE).await?;
                        Ok(Done::Copied { migration, slot, sent })
                    });
                }
                Order::Release { server, epoch } => {
                    let channel = placement.servers[usize::from(server)].clone();
                    calls.spawn(async move {
                        let release = v1::ReleaseSlots { epoch: epoch.0 };
                        message::call(&channel, release, Vec::new(), CALL_DEADLINE).await?;
                        Ok(Done::Released { server, epoch })
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

    /// Has every source forward what changes until all slots are copied.
    fn begin_to_forward(&mut self, sources: BTreeSet<u16>) -> Result<(), RoleError> {
        let Self { machine, calls, under_way, .. } = self;
        let (migration, under_way) = (machine.begun(), under_way.as_mut().ok_or_else(nothing_moves)?);
        for source in sources {
            under_way.forwarders += 1;
            let (channel, all_copied) =
                (under_way.placement.servers[usize::from(source)].clone(), under_way.all_copied.subscribe());
            calls.spawn(async move { Ok(Done::Forwarded { bytes: forward(channel, migration, all_copied).await? }) });
        }
        Ok(())
    }

    /// Seals what is copied; gives the orders of the flip.
    async fn seal(&mut self) -> Result<Vec<Order>, RoleError> {
        let Self { machine, under_way, .. } = self;
        let under_way = under_way.as_mut().ok_or_else(nothing_moves)?;
        let (mut orders, mut progress) = machine.seal()?;
        let seal = |order: &Order| {
            let Order::Seal { server, migration, slots } = order else { return None };
            let slots = slots.iter().map(|slot| slot.0).collect();
            let call = message::call(
                &under_way.placement.servers[usize::from(*server)],
                v1::SealSlots { migration: migration.0, slots },
                Vec::new(),
                CALL_DEADLINE,
            );
            let (server, migration) = (*server, *migration);
            Some(async move { Ok::<_, RoleError>((server, migration, call.await?.0.bytes)) })
        };
        let sealed = try_join_all(orders.iter().filter_map(seal)).await?;
        under_way.bytes += sealed.iter().map(|(_, _, bytes)| bytes).sum::<u64>();
        for (server, migration, _) in sealed {
            (orders, progress) = machine.sealed(migration, server);
        }
        match progress {
            Progress::Flipped => Ok(orders),
            _ => Err(RoleError::Inconsistent { message: "seal_slots", reason: "not all slots are sealed".to_owned() }),
        }
    }

    /// Has every server adopt the map; gives what each has applied under the map before.
    async fn adopt(&mut self, orders: Vec<Order>) -> Result<Vec<v1::Applied>, RoleError> {
        let under_way = self.under_way()?;
        let adopt = |order: &Order| {
            let Order::Adopt { server, map, ended } = order else { return None };
            let call = message::call(
                &under_way.placement.servers[usize::from(*server)],
                v1::AdoptMap { map: Some(write_map(map)), ended: ended.0 },
                Vec::new(),
                CALL_DEADLINE,
            );
            let server = *server;
            Some(async move { Ok::<_, RoleError>((server, call.await?.0)) })
        };
        let adopted = try_join_all(orders.iter().filter_map(adopt)).await?;
        let mut applied = Vec::with_capacity(adopted.len());
        for (server, adopted) in adopted {
            let v1::AdoptedMap { epoch, ended, applied: own } = adopted;
            let (orders, _) = self.machine.adopted(server, Epoch(epoch), MigrationId(ended));
            self.carry_out(orders)?;
            applied.push(own.unwrap_or_default());
        }
        Ok(applied)
    }
}

fn nothing_moves() -> RoleError {
    RoleError::Inconsistent { message: "adopt_map", reason: "no slots are moving".to_owned() }
}

/// Has a source forward what changes until all slots are copied, and then until little is left.
async fn forward(
    source: Channel,
    migration: MigrationId,
    mut all_copied: watch::Receiver<bool>,
) -> Result<u64, RoleError> {
    let request = v1::ForwardChanges { migration: migration.0 };
    let (mut bytes, mut last_rounds) = (0, 0);
    while last_rounds < LAST_ROUNDS {
        let is_last = *all_copied.borrow();
        let (sent, _) = message::call(&source, request, Vec::new(), CALL_DEADLINE).await?;
        bytes += sent.bytes;
        last_rounds += usize::from(is_last);
        if is_last && sent.rows <= FEW_ROWS {
            break;
        }
        if !is_last {
            let copied = all_copied.wait_for(|copied| *copied);
            // Either way the next round follows.
            let _waited = tokio::time::timeout(FORWARD_EVERY, copied).await.map(|copied| copied.is_ok());
        }
    }
    Ok(bytes)
}

impl Coordinator {
    /// Plans how the slots are spread over `to` servers, and begins. `addresses` are those of all servers, as many as join included.
    pub(super) async fn begin_migration(
        &self,
        to: u32,
        addresses: &[String],
        transport: &dyn Transport,
        migrations: &mut Migrations,
    ) -> Result<(), RoleError> {
        let placement = self.placement()?;
        let mut costs = measure(&placement.servers).await?;
        let look_ups: Vec<u64> = costs.iter().map(|cost| cost.look_ups).collect();
        let imbalance = imbalance(&placement.map, &look_ups);
        migrations.add_what_was_looked_up_before(&mut costs);
        let servers = to as u16;
        let moves = plan_moves(&placement.map, &costs, servers);
        let is_settled = moves.is_empty() && placement.map.servers() == usize::from(servers);
        if is_settled {
            self.events.push(JobEvent::SlotsMoved {
                from: to,
                to,
                slots: 0,
                bytes: 0,
                seconds: 0.0,
                rest_seconds: 0.0,
                imbalance,
                map_epoch: placement.epoch().0,
            });
            self.lock().resize_ended();
            return Ok(());
        }
        migrations.looked_up = costs.iter().map(|cost| cost.look_ups).collect();
        let addresses: Vec<String> = addresses.to_vec();
        let channels = addresses.iter().map(|address| connect(transport, address));
        let placement =
            Placement { map: placement.map.clone(), servers: channels.collect::<Result<_, _>>()?, addresses };
        let under_way = UnderWay {
            placement,
            to,
            slots: moves.len(),
            imbalance,
            started: Instant::now(),
            bytes: 0,
            copied: false,
            forwarders: 0,
            all_copied: watch::Sender::new(false),
            flipped: None,
            leaving: Vec::new(),
        };
        migrations.under_way = Some(under_way);
        let (orders, progress) = migrations.machine.begin(&moves, servers)?;
        let migration = migrations.machine.begun();
        self.change(|state| {
            state.migration_begins(migration);
            state.training().slots_move(to);
            Ok(())
        })?;
        // Before a server hears of it: a coordinator that did not know would give its own migration the same number, and rows of that one would
        // be taken for rows of this one that come twice.
        self.remembered().await;
        migrations.begin_to_forward(moves.iter().map(|step| step.from).collect())?;
        migrations.carry_out(orders)?;
        self.after_progress(progress, migrations)
    }

    /// A call of the migration has been answered.
    pub(super) fn migration_answered(
        &self,
        answer: Result<Result<Done, RoleError>, JoinError>,
        migrations: &mut Migrations,
    ) -> Result<(), RoleError> {
        let done = answer.map_err(|error| RoleError::Task { what: "moving of slots", reason: error.to_string() })??;
        let (orders, progress) = match done {
            Done::Copied { migration, slot, sent } => {
                migrations.under_way()?.bytes += sent.bytes;
                migrations.machine.copied(migration, slot)
            }
            Done::Forwarded { bytes } => {
                let under_way = migrations.under_way()?;
                under_way.bytes += bytes;
                under_way.forwarders -= 1;
                (Vec::new(), Progress::None)
            }
            Done::Released { server, epoch } => migrations.machine.released(server, epoch),
        };
        migrations.carry_out(orders)?;
        self.after_progress(progress, migrations)
    }

    fn after_progress(&self, progress: Progress, migrations: &mut Migrations) -> Result<(), RoleError> {
        if progress == Progress::Settled {
            self.migration_settled(migrations);
        }
        let Some(under_way) = &mut migrations.under_way else { return Ok(()) };
        if progress == Progress::Copied {
            under_way.copied = true;
            under_way.all_copied.send_replace(true);
        }
        if under_way.copied && under_way.forwarders == 0 && under_way.flipped.is_none() {
            return self.change(|state| {
                state.training().request_flip();
                state.training().advance()
            });
        }
        Ok(())
    }

    /// Training rests: the next map comes into force.
    pub(super) async fn flip(&self, migrations: &mut Migrations) -> Result<(), RoleError> {
        let resting = Instant::now();
        let orders = migrations.seal().await?;
        let map = migrations.machine.map().clone();
        let applied = migrations.adopt(orders).await?;
        let under_way = migrations.under_way()?;
        let (seconds, rest_seconds) = (under_way.started.elapsed().as_secs_f64(), resting.elapsed().as_secs_f64());
        under_way.flipped = Some((seconds, rest_seconds));
        let before = self.placement()?;
        let count = map.servers();
        let (servers, addresses) = (&under_way.placement.servers, &under_way.placement.addresses);
        let placement = Placement { map, servers: servers[..count].to_vec(), addresses: addresses[..count].to_vec() };
        under_way.leaving = addresses.iter().skip(count).cloned().collect();
        self.set_placement(placement.clone());
        self.metrics.migrations.inc();
        self.metrics.moved_slots.inc_by(migrations.under_way()?.slots as u64);
        self.metrics.migration_time.observe(seconds);
        self.metrics.flip_time.observe(rest_seconds);
        self.change(|state| {
            state.servers_changed(
                placement.map.clone(),
                &placement.addresses,
                &applied[..before.servers.len().min(applied.len())],
            );
            state.training().flipped(placement.epoch().0, count as u32)
        })
    }

    /// What was handed over is dropped.
    fn migration_settled(&self, migrations: &mut Migrations) {
        let Some(under_way) = migrations.under_way.take() else { return };
        let moved = under_way.flipped.map(|(seconds, rest_seconds)| {
            self.metrics.migrated_bytes.inc_by(under_way.bytes);
            JobEvent::SlotsMoved {
                from: under_way.placement.map.servers() as u32,
                to: under_way.to,
                slots: under_way.slots as u64,
                bytes: under_way.bytes,
                seconds,
                rest_seconds,
                imbalance: under_way.imbalance,
                map_epoch: migrations.machine.map().epoch().0,
            }
        });
        migrations.settled = Some(Settled { leaving: under_way.leaving, moved });
    }

    /// Lets servers end that hold nothing any more, once no checkpoint is being written of what they held: the next migration may
    /// begin.
    pub(super) async fn end_migration(&self, migrations: &mut Migrations) -> Result<(), RoleError> {
        let Some(Settled { leaving, moved }) = migrations.settled.take() else { return Ok(()) };
        self.change(|state| {
            leaving.iter().for_each(|address| state.release(address));
            state.resize_ended();
            state.training().slots_settled()
        })?;
        moved.into_iter().for_each(|moved| self.events.push(moved));
        Ok(())
    }

    /// Training is at its end: what has not flipped is given up, what has is brought to where [`Self::end_migration`] ends it.
    pub(super) async fn settle_slots(&self, migrations: &mut Migrations) -> Result<(), RoleError> {
        let (orders, gives_up) = migrations.machine.cancel();
        if gives_up {
            let under_way = migrations.under_way()?;
            under_way.all_copied.send_replace(true);
            let message = format!(
                "training has ended before {} slots had moved: they stay where they were, on {} parameter servers",
                under_way.slots,
                under_way.placement.map.servers()
            );
            super::warn_all(&self.events, [message]);
        }
        // Copies that are under way would come after the word that they are over.
        let mut releases = Vec::new();
        while let Some(answer) = migrations.calls.join_next().await {
            let done =
                answer.map_err(|error| RoleError::Task { what: "moving of slots", reason: error.to_string() })?;
            match done? {
                Done::Released { server, epoch } => releases.push((server, epoch)),
                Done::Copied { .. } | Done::Forwarded { .. } => {}
            }
        }
        if gives_up {
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

/// What every slot costs its server.
async fn measure(servers: &[Channel]) -> Result<Vec<SlotCost>, RoleError> {
    let calls = servers.iter().map(|server| message::call(server, v1::MeasureSlots {}, Vec::new(), CALL_DEADLINE));
    let mut costs: Vec<SlotCost> = Vec::new();
    for (_, tensors) in try_join_all(calls).await? {
        let [look_ups, bytes] = message::take("measure_slots", tensors)?;
        let (look_ups, bytes) = (look_ups.expect_u64("look-ups")?, bytes.expect_u64("bytes")?);
        costs.resize(costs.len().max(look_ups.len()), SlotCost::default());
        for ((cost, look_ups), bytes) in costs.iter_mut().zip(look_ups).zip(bytes) {
            cost.look_ups += look_ups;
            cost.bytes += bytes;
        }
    }
    Ok(costs)
}
