//! Migrations under a simulated network. Messages arrive late and in any order. Any process may die
//! at any message and restarts with its durable state. Workers write all the while.
//!
//! In every run, at most one server serves a slot at any time. At the end, only the owner serves a
//! slot and has its rows. These have every acknowledged write, once and in order.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rectrain_embedding::Slot;
use rectrain_modes::migration::{
    Changes, Epoch, Journal, Migration, MigrationId, Order, Progress, Receipt, SlotCost, SlotHolder, SlotMap,
    plan_moves,
};
use rectrain_random::SplitMix64;

const SLOTS: u32 = 8;
const KEYS: u32 = 3;
const WORKERS: usize = 2;
/// The servers after each migration; at first, server 0 is alone. The stages grow, shrink and
/// rebalance the job. Server 1, in the middle, leaves and returns.
const STAGES: [&[u16]; 7] = [&[0, 1, 2], &[0, 1], &[0, 1, 2], &[0, 1, 2], &[0, 2], &[0, 1, 2], &[2]];
const MOST_SERVERS: usize = 3;

/// Draws of a schedule.
struct Random(SplitMix64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn below(&mut self, most: usize) -> usize {
        (self.next() % most.max(1) as u64) as usize
    }
}

/// A mistake in the code that carries out the orders of the state machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    ForgetsAChange,
    ServesOnAfterSealing,
    ServesBeforeItIsRegistered,
    ReleasesBeforeAllHaveAdopted,
    AcknowledgesWhatItLost,
    FlipsBeforeAllHaveSealed,
    AnswersAnyEpoch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Node {
    Coordinator,
    Server(u16),
    Worker(usize),
}

/// The writes of each key, in order.
type Rows = BTreeMap<u32, Vec<u64>>;

#[derive(Clone, Debug)]
enum Message {
    Order(Order),
    Put {
        from: u16,
        migration: MigrationId,
        slot: Slot,
        sequence: u64,
        rows: Rows,
    },
    PutAnswer {
        migration: MigrationId,
        slot: Slot,
        sequence: u64,
        taken: bool,
    },
    Write {
        worker: usize,
        write: Write,
        epoch: Epoch,
    },
    Written {
        id: u64,
    },
    Stale {
        id: u64,
    },
    MapRequest {
        worker: usize,
    },
    Map(SlotMap),
    Copied {
        migration: MigrationId,
        slot: Slot,
    },
    Refused {
        migration: MigrationId,
    },
    Sealed {
        migration: MigrationId,
        server: u16,
    },
    Adopted {
        server: u16,
        epoch: Epoch,
        ended: MigrationId,
    },
    Released {
        server: u16,
        epoch: Epoch,
    },
    Hello {
        server: u16,
        epoch: Epoch,
    },
    /// Training has paused.
    Rest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Write {
    id: u64,
    slot: Slot,
    key: u32,
}

/// Packages of a slot. The source sends each one once the target has received the previous one.
struct Packages {
    migration: MigrationId,
    to: u16,
    /// The number of the next package.
    next: u64,
    rows: VecDeque<Rows>,
    /// Whether these are the slot's first packages and not changes.
    copies: bool,
}

struct Server {
    holder: SlotHolder<u32>,
    sending: BTreeMap<Slot, Packages>,
    sealing: Option<MigrationId>,
    staged: BTreeMap<Slot, Rows>,
    /// These three outlive a crash.
    rows: BTreeMap<Slot, Rows>,
    epoch: Epoch,
    ended: MigrationId,
}

impl Server {
    fn send_next(&mut self, index: u16, slot: Slot) -> Option<(Node, Message)> {
        let packages = self.sending.get_mut(&slot)?;
        let rows = packages.rows.pop_front()?;
        let (migration, sequence) = (packages.migration, packages.next);
        packages.next += 1;
        Some((Node::Server(packages.to), Message::Put { from: index, migration, slot, sequence, rows }))
    }
}

/// Splits `rows` into parts of at most `most` keys. Without rows, there is one empty part.
fn in_parts(rows: Rows, most: usize) -> VecDeque<Rows> {
    let mut rows = rows.into_iter().peekable();
    let mut parts = VecDeque::new();
    while parts.is_empty() || rows.peek().is_some() {
        parts.push_back(rows.by_ref().take(most).collect());
    }
    parts
}

struct Worker {
    map: SlotMap,
    writes: VecDeque<Write>,
    asks_for_map: bool,
}

/// A crash of `node` at message number `at`: before a process handles the message, or after that
/// and before the process sends anything.
#[derive(Clone, Copy, Debug)]
struct Crash {
    at: usize,
    node: Node,
    after: bool,
}

/// The number of the slot's owner.
fn owner(map: &SlotMap, slot: Slot) -> u16 {
    map.owners()[slot.0 as usize]
}

struct World {
    bug: Bug,
    random: Random,
    network: Vec<(Node, Node, Message)>,
    down: BTreeMap<Node, usize>,
    servers: Vec<Server>,
    workers: Vec<Worker>,
    migration: Migration,
    journal: Journal,
    /// The number of completed migrations.
    stages_done: usize,
    handled: usize,
    /// The applied writes, by slot and key.
    written: BTreeMap<(Slot, u32), Vec<u64>>,
    taken_back: usize,
}

impl World {
    fn new(seed: u64, writes: usize, bug: Bug) -> Self {
        let mut random = Random(SplitMix64::new(seed));
        let map = SlotMap::even(SLOTS, 1);
        let servers = (0..MOST_SERVERS as u16)
            .map(|server| Server {
                holder: SlotHolder::new(server, &map),
                sending: BTreeMap::new(),
                sealing: None,
                staged: BTreeMap::new(),
                rows: map.slots_of(server).map(|slot| (slot, Rows::new())).collect(),
                epoch: map.epoch(),
                ended: MigrationId(0),
            })
            .collect();
        let workers = (0..WORKERS)
            .map(|worker| {
                let write = |index| Write {
                    id: (index * WORKERS + worker) as u64,
                    slot: Slot(random.below(SLOTS as usize) as u32),
                    key: random.below(KEYS as usize) as u32,
                };
                Worker { map: map.clone(), writes: (0..writes).map(write).collect(), asks_for_map: false }
            })
            .collect();
        let migration = Migration::new(map);
        let journal = migration.journal();
        let mut world = Self {
            bug,
            random,
            network: Vec::new(),
            down: BTreeMap::new(),
            servers,
            workers,
            migration,
            journal,
            stages_done: 0,
            handled: 0,
            written: BTreeMap::new(),
            taken_back: 0,
        };
        (0..WORKERS).for_each(|worker| world.write(worker));
        let out = world.begin_next();
        world.journal = world.migration.journal();
        world.send(Node::Coordinator, out);
        world
    }

    /// Costs differ between migrations, so a repeated set of servers is a rebalance.
    fn costs(&self) -> Vec<SlotCost> {
        let mut random = Random(SplitMix64::new(self.stages_done as u64));
        (0..SLOTS).map(|_| SlotCost { look_ups: 1 + random.next() % 9, bytes: 1 + random.next() % 9 }).collect()
    }

    fn begin_next(&mut self) -> Vec<(Node, Message)> {
        while let Some(servers) = STAGES.get(self.stages_done) {
            let moves = plan_moves(self.migration.map(), &self.costs(), servers);
            if moves.is_empty() && self.migration.map().servers() == *servers {
                self.stages_done += 1;
                continue;
            }
            let (orders, progress) = self.migration.begin(&moves, servers).unwrap();
            return self.orders(orders, progress);
        }
        Vec::new()
    }

    fn orders(&mut self, orders: Vec<Order>, progress: Progress) -> Vec<(Node, Message)> {
        let mut out: Vec<(Node, Message)> = Vec::new();
        for order in orders {
            let (Order::Copy { server, .. }
            | Order::Seal { server, .. }
            | Order::Adopt { server, .. }
            | Order::Release { server, .. }) = order;
            out.push((Node::Server(server), Message::Order(order)));
        }
        match progress {
            Progress::None | Progress::Flipped => {}
            Progress::Copied => out.push((Node::Coordinator, Message::Rest)),
            Progress::Settled => out.extend(self.begin_next()),
        }
        out
    }

    fn coordinator(&mut self, message: Message) -> Vec<(Node, Message)> {
        let (orders, progress) = match message {
            Message::Copied { migration, slot } => self.migration.copied(migration, slot),
            Message::Sealed { migration, server } => self.migration.sealed(migration, server),
            Message::Adopted { server, epoch, ended } => self.migration.adopted(server, epoch, ended),
            Message::Released { server, epoch } => self.migration.released(server, epoch),
            Message::Refused { migration } => (self.migration.refused(migration), Progress::None),
            Message::Hello { server, epoch } => {
                let (orders, progress) = self.migration.restarted_server(server, epoch);
                self.taken_back += usize::from(progress == Progress::Flipped);
                (orders, progress)
            }
            Message::Rest => match self.migration.seal() {
                Ok((orders, _)) if self.bug == Bug::FlipsBeforeAllHaveSealed => {
                    let id = self.migration.begun();
                    let mut all = (orders, Progress::None);
                    for server in 0..MOST_SERVERS as u16 {
                        let (orders, progress) = self.migration.sealed(id, server);
                        all.0.extend(orders);
                        all.1 = if progress == Progress::Flipped { progress } else { all.1 };
                    }
                    all
                }
                // The migration was aborted meanwhile.
                sealed => sealed.unwrap_or((Vec::new(), Progress::None)),
            },
            Message::MapRequest { worker } => {
                return vec![(Node::Worker(worker), Message::Map(self.migration.map().clone()))];
            }
            other => panic!("the coordinator got {other:?}"),
        };
        let out = self.orders(orders, progress);
        self.journal = self.migration.journal();
        out
    }

    fn server(&mut self, index: u16, message: Message) -> Vec<(Node, Message)> {
        let bug = self.bug;
        let forgets = bug == Bug::ForgetsAChange && self.random.below(8) == 0;
        let loses = bug == Bug::AcknowledgesWhatItLost && self.random.below(4) == 0;
        let pumps = self.random.below(2) == 0;
        let most = 1 + self.random.below(KEYS as usize);
        let own = &mut self.servers[usize::from(index)];
        let mut out = Vec::new();
        match message {
            Message::Order(Order::Copy { migration, slot, to, .. }) => {
                if own.holder.begin_copy(migration, slot, to).is_err() {
                    return vec![(Node::Coordinator, Message::Refused { migration })];
                }
                let rows = in_parts(own.rows[&slot].clone(), most);
                own.holder.cut(migration, slot, rows.len() as u64);
                own.sending.insert(slot, Packages { migration, to, next: 0, rows, copies: true });
                out.extend(own.send_next(index, slot));
            }
            Message::Order(Order::Seal { migration, slots, .. }) => {
                if bug == Bug::ServesOnAfterSealing {
                    return vec![(Node::Coordinator, Message::Sealed { migration, server: index })];
                }
                if own.holder.seal(migration, &slots).is_err() {
                    return vec![(Node::Coordinator, Message::Refused { migration })];
                }
                own.sealing = Some(migration);
            }
            Message::Order(Order::Adopt { map, ended, .. }) => {
                let Ok(abandoned) = own.holder.adopt(&map, ended) else { return Vec::new() };
                abandoned.iter().for_each(|slot| drop(own.staged.remove(slot)));
                if own.sealing.is_some_and(|sealing| sealing <= ended) {
                    own.sealing = None;
                }
                let arrived: Vec<Slot> = own.staged.keys().copied().filter(|slot| own.holder.serves(*slot)).collect();
                for slot in arrived {
                    let rows = own.staged.remove(&slot).unwrap();
                    own.rows.insert(slot, rows);
                }
                (own.epoch, own.ended) = (own.holder.epoch(), own.holder.ended());
                if bug == Bug::ReleasesBeforeAllHaveAdopted {
                    own.holder.release(own.epoch).iter().flatten().for_each(|slot| drop(own.rows.remove(slot)));
                }
                let (epoch, ended) = (own.epoch, own.ended);
                return vec![(Node::Coordinator, Message::Adopted { server: index, epoch, ended })];
            }
            Message::Order(Order::Release { epoch, .. }) => {
                let Some(released) = own.holder.release(epoch) else { return Vec::new() };
                released.iter().for_each(|slot| drop(own.rows.remove(slot)));
                return vec![(Node::Coordinator, Message::Released { server: index, epoch })];
            }
            Message::Put { from, migration, slot, sequence, rows } => {
                let received = own.holder.receive(migration, slot, sequence);
                if received == Ok(Receipt::New) && !loses {
                    if sequence == 0 {
                        own.staged.insert(slot, rows);
                    } else {
                        own.staged.entry(slot).or_default().extend(rows);
                    }
                }
                let taken = received.is_ok();
                return vec![(Node::Server(from), Message::PutAnswer { migration, slot, sequence, taken })];
            }
            Message::PutAnswer { migration, taken: false, .. } => {
                return vec![(Node::Coordinator, Message::Refused { migration })];
            }
            Message::PutAnswer { migration, slot, sequence, .. } => {
                own.holder.acknowledged(migration, slot, sequence);
                let under_way = own.sending.get(&slot);
                if let Some(sent) = under_way.filter(|sent| (sent.migration, sent.next) == (migration, sequence + 1)) {
                    if sent.copies && sent.rows.is_empty() {
                        out.push((Node::Coordinator, Message::Copied { migration, slot }));
                    }
                    out.extend(own.send_next(index, slot));
                }
            }
            Message::Write { worker, write, epoch } => {
                let asked = if bug == Bug::AnswersAnyEpoch { own.holder.epoch() } else { epoch };
                let admitted = own.holder.admit(asked, [write.slot]).is_ok()
                    || bug == Bug::AnswersAnyEpoch && own.rows.contains_key(&write.slot);
                if !admitted {
                    return vec![(Node::Worker(worker), Message::Stale { id: write.id })];
                }
                let row = own.rows.entry(write.slot).or_default().entry(write.key).or_default();
                if !row.contains(&write.id) {
                    row.push(write.id);
                    self.written.entry((write.slot, write.key)).or_default().push(write.id);
                    if !forgets {
                        own.holder.changed(write.slot, [write.key]);
                    }
                }
                out.push((Node::Worker(worker), Message::Written { id: write.id }));
            }
            other => panic!("a server got {other:?}"),
        }
        if pumps || own.sealing.is_some() {
            let mut slots = BTreeSet::new();
            for Changes { migration, slot, to, sequence, keys } in own.holder.take_changes(most) {
                let row = |key: u32| own.rows[&slot].get(&key).map(|row| (key, row.clone()));
                let rows = keys.into_iter().filter_map(row).collect();
                if slots.insert(slot) {
                    let packages = Packages { migration, to, next: sequence, rows: VecDeque::new(), copies: false };
                    own.sending.insert(slot, packages);
                }
                own.sending.get_mut(&slot).unwrap().rows.push_back(rows);
            }
            out.extend(slots.into_iter().filter_map(|slot| own.send_next(index, slot)));
        }
        if let Some(migration) = own.sealing.take_if(|migration| own.holder.is_drained(*migration)) {
            out.push((Node::Coordinator, Message::Sealed { migration, server: index }));
        }
        out
    }

    fn worker(&mut self, index: usize, message: Message) {
        let own = &mut self.workers[index];
        let current = own.writes.front().map(|write| write.id);
        match message {
            Message::Written { id } if current == Some(id) => {
                own.writes.pop_front();
                self.write(index);
            }
            Message::Stale { id } if current == Some(id) && !own.asks_for_map => self.ask_for_map(index),
            Message::Map(map) => {
                own.asks_for_map = false;
                if map.epoch() >= own.map.epoch() {
                    own.map = map;
                }
                self.write(index);
            }
            _of_an_earlier_try => {}
        }
    }

    fn write(&mut self, worker: usize) {
        let own = &self.workers[worker];
        if let Some(write) = own.writes.front().copied() {
            let (to, epoch) = (owner(&own.map, write.slot), own.map.epoch());
            self.send(Node::Worker(worker), vec![(Node::Server(to), Message::Write { worker, write, epoch })]);
        }
    }

    fn ask_for_map(&mut self, worker: usize) {
        self.workers[worker].asks_for_map = true;
        self.send(Node::Worker(worker), vec![(Node::Coordinator, Message::MapRequest { worker })]);
    }

    /// Sends messages. A message to a process that is down is lost.
    fn send(&mut self, from: Node, out: Vec<(Node, Message)>) {
        for (to, message) in out {
            if !self.down.contains_key(&to) {
                self.network.push((from, to, message));
            }
        }
    }

    fn crash(&mut self, node: Node) {
        self.network.retain(|(_, to, _)| *to != node);
        let after = 1 + self.random.below(20);
        self.down.insert(node, after);
        if let Node::Server(index) = node {
            let own = &mut self.servers[usize::from(index)];
            own.staged.clear();
            own.sending.clear();
            own.sealing = None;
            own.holder = SlotHolder::restarted(index, SLOTS, own.epoch, own.rows.keys().copied());
            if self.bug == Bug::ServesBeforeItIsRegistered {
                let owners =
                    (0..SLOTS).map(|slot| if own.rows.contains_key(&Slot(slot)) { index } else { u16::MAX - 1 });
                let map = SlotMap::new(own.epoch, owners.collect(), 0..u16::MAX).unwrap();
                own.holder.adopt(&map, own.ended).unwrap();
            }
        }
    }

    fn restart(&mut self, node: Node) {
        self.down.remove(&node);
        match node {
            Node::Coordinator => {
                let (migration, orders) = Migration::restarted(self.journal.clone());
                self.migration = migration;
                let out = self.orders(orders, Progress::None);
                self.send(node, out);
                for index in 0..self.servers.len() as u16 {
                    let own = &self.servers[usize::from(index)];
                    if !own.holder.is_registered() && !self.down.contains_key(&Node::Server(index)) {
                        self.hello(index);
                    }
                }
                (0..WORKERS)
                    .filter(|worker| self.workers[*worker].asks_for_map)
                    .collect::<Vec<_>>()
                    .into_iter()
                    .for_each(|worker| {
                        if !self.down.contains_key(&Node::Worker(worker)) {
                            self.ask_for_map(worker);
                        }
                    });
            }
            Node::Server(index) => {
                self.hello(index);
                // The crash broke the workers' connections, so they write again.
                for worker in 0..WORKERS {
                    if !self.workers[worker].asks_for_map && !self.down.contains_key(&Node::Worker(worker)) {
                        self.write(worker);
                    }
                }
            }
            Node::Worker(worker) => self.ask_for_map(worker),
        }
    }

    fn hello(&mut self, server: u16) {
        let epoch = self.servers[usize::from(server)].epoch;
        self.send(Node::Server(server), vec![(Node::Coordinator, Message::Hello { server, epoch })]);
    }

    fn run(&mut self, crashes: &[Crash]) -> Result<(), String> {
        let mut crashes: VecDeque<Crash> = crashes.iter().copied().collect();
        loop {
            let due: Vec<Node> = self.down.iter().filter(|(_, left)| **left == 0).map(|(node, _)| *node).collect();
            due.into_iter().for_each(|node| self.restart(node));
            if self.network.is_empty() {
                if self.down.is_empty() {
                    break;
                }
                self.down.values_mut().for_each(|left| *left = 0);
                continue;
            }
            self.down.values_mut().for_each(|left| *left = left.saturating_sub(1));
            let next = self.random.below(self.network.len());
            let (from, to, message) = self.network.swap_remove(next);
            self.handled += 1;
            if self.handled > 200_000 {
                return Err("it does not come to an end".to_owned());
            }
            let crash = crashes.pop_front_if(|crash| crash.at <= self.handled);
            let dies = |after: bool| crash.filter(|crash| crash.after == after).map(|crash| crash.node);
            if let Some(node) = dies(false) {
                self.crash(node);
            }
            if !self.down.contains_key(&to) {
                let before = self.network.len();
                match to {
                    Node::Coordinator => {
                        let out = self.coordinator(message);
                        self.send(to, out);
                    }
                    Node::Server(index) => {
                        let out = self.server(index, message);
                        self.send(to, out);
                    }
                    Node::Worker(index) => self.worker(index, message),
                }
                if let Some(node) = dies(true) {
                    if node == to {
                        self.network.truncate(before);
                    }
                    self.crash(node);
                }
            }
            let _sender = from;
            self.check_served_at_most_once()?;
        }
        self.check_end()
    }

    fn serving(&self, slot: Slot) -> Vec<u16> {
        (0..self.servers.len() as u16)
            .filter(|server| !self.down.contains_key(&Node::Server(*server)))
            .filter(|server| self.servers[usize::from(*server)].holder.serves(slot))
            .collect()
    }

    fn check_served_at_most_once(&self) -> Result<(), String> {
        for slot in (0..SLOTS).map(Slot) {
            let serving = self.serving(slot);
            if serving.len() > 1 {
                return Err(format!("slot {slot} is served by {serving:?}"));
            }
        }
        Ok(())
    }

    fn check_end(&self) -> Result<(), String> {
        let waiting: usize = self.workers.iter().map(|worker| worker.writes.len()).sum();
        if waiting > 0 || self.stages_done < STAGES.len() || !self.migration.is_settled() {
            return Err(format!(
                "stuck: {waiting} writes and migration {} wait: {:?}",
                self.stages_done, self.migration
            ));
        }
        let map = self.migration.map();
        for slot in (0..SLOTS).map(Slot) {
            let owner = owner(map, slot);
            if self.serving(slot) != [owner] {
                return Err(format!("slot {slot} is {owner}'s and served by {:?}", self.serving(slot)));
            }
            let holding: Vec<usize> =
                (0..self.servers.len()).filter(|server| self.servers[*server].rows.contains_key(&slot)).collect();
            if holding != [usize::from(owner)] {
                return Err(format!("rows of slot {slot} are on {holding:?}"));
            }
            for key in 0..KEYS {
                let held = self.servers[usize::from(owner)].rows[&slot].get(&key).cloned().unwrap_or_default();
                let written = self.written.get(&(slot, key)).cloned().unwrap_or_default();
                if held != written {
                    return Err(format!("slot {slot}, key {key}: {written:?} was written, {held:?} is there"));
                }
                if written.iter().collect::<BTreeSet<_>>().len() != written.len() {
                    return Err(format!("slot {slot}, key {key}: a write of {written:?} was applied twice"));
                }
            }
        }
        if self.servers.iter().any(|server| !server.staged.is_empty()) {
            return Err("staged rows are left".to_owned());
        }
        Ok(())
    }
}

fn everybody() -> Vec<Node> {
    let servers = (0..MOST_SERVERS as u16).map(Node::Server);
    std::iter::once(Node::Coordinator).chain(servers).chain((0..WORKERS).map(Node::Worker)).collect()
}

#[test]
fn slots_move_under_writes_without_loss_or_double_service() {
    for seed in 0..2000 {
        World::new(seed, 40, Bug::None).run(&[]).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

#[test]
fn any_process_may_die_at_any_message() {
    let mut runs = 0;
    let mut taken_back = 0;
    for seed in 0..3 {
        let mut quiet = World::new(seed, 25, Bug::None);
        quiet.run(&[]).unwrap();
        for at in 1..=quiet.handled {
            for node in everybody() {
                for after in [false, true] {
                    let crash = Crash { at, node, after };
                    let mut world = World::new(seed, 25, Bug::None);
                    world.run(&[crash]).unwrap_or_else(|error| panic!("seed {seed}, {crash:?}: {error}"));
                    taken_back += world.taken_back;
                    runs += 1;
                }
            }
        }
    }
    assert!(runs > 5_000, "{runs}");
    assert!(taken_back > 10, "targets that died between flip and adoption: {taken_back}");
}

/// `most` crashes of random processes at random messages.
fn crashes(random: &mut Random, most: usize) -> Vec<Crash> {
    let mut at = 0;
    let mut crash = || {
        at += 1 + random.below(60);
        let nodes = everybody();
        Crash { at, node: nodes[random.below(nodes.len())], after: random.below(2) == 0 }
    };
    (0..most).map(|_| crash()).collect()
}

#[test]
fn repeated_crashes_of_many_processes_lose_nothing() {
    for seed in 0..4000 {
        let crashes = crashes(&mut Random(SplitMix64::new(!seed)), 12);
        let mut world = World::new(seed, 40, Bug::None);
        world.run(&crashes).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

#[test]
fn the_simulation_finds_planted_bugs() {
    for bug in [
        Bug::ForgetsAChange,
        Bug::ServesOnAfterSealing,
        Bug::ServesBeforeItIsRegistered,
        Bug::ReleasesBeforeAllHaveAdopted,
        Bug::AcknowledgesWhatItLost,
        Bug::FlipsBeforeAllHaveSealed,
        Bug::AnswersAnyEpoch,
    ] {
        let found = (0..2000).find_map(|seed| {
            let crashes = crashes(&mut Random(SplitMix64::new(!seed)), 12);
            // A mistake may also trigger an assertion of the simulation.
            let run = std::panic::AssertUnwindSafe(|| World::new(seed, 40, bug).run(&crashes));
            std::panic::catch_unwind(run)
                .unwrap_or_else(|_| Err("it panicked".to_owned()))
                .err()
                .map(|error| (seed, error))
        });
        let (seed, error) = found.unwrap_or_else(|| panic!("{bug:?} was not found"));
        println!("{bug:?}: seed {seed}: {error}");
    }
}
