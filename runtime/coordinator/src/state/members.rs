//! The members of the job: members join, are replaced, and come or go when a role is scaled.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use rectrain_modes::Rank;
use rectrain_modes::migration::SlotMap;
use rectrain_modes::shares::SLOTS;
use rectrain_proto::{member_role, v1};

use super::data::FETCHED_AGAIN;
use super::progress::DenseWorkerState;
use super::{MOST_MEMBERS, State};
use crate::incarnations::Incarnations;
use crate::membership::{Joined, Membership};
use crate::refused::{DrainRefused, ResizeRefused};
use crate::server_work::{self, ServerWork};
use crate::servers::{self, ResizeToBegin, Servers};
use crate::snapshot::{AppliedGradients, Counted};
use rectrain_protocol::Role;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{JobEvent, with_counts};
use rectrain_protocol::plan::Replicas;
use serde::{Deserialize, Serialize};

/// The members of the job by role, and the members that leave.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Members {
    pub(super) servers: Servers,
    /// When the newest accepted decision to rebalance the slots was made, in seconds since 1970.
    pub(super) slots_decided_seconds: u64,
    pub(super) embedding_workers: Membership,
    pub(super) dense_workers: Membership,
    pub(super) loaders: Membership,
    /// Addresses of members that the job no longer needs. Their `job_end` request tells them to
    /// end.
    pub(super) released: BTreeSet<String>,
    /// Dense workers that drain and whose replacement does not train yet. The value says whether
    /// the replacement has joined.
    pub(super) leaving_dense_workers: BTreeMap<u32, bool>,
    /// Whether every member may end at once, because the coordinator ends.
    pub(super) all_may_leave: bool,
    /// Restarts of parameter servers that kept their rows.
    pub(super) server_restarts: u64,
    /// Replacements of each loader, by index.
    pub(super) loader_replacements: BTreeMap<u32, u32>,
    /// Replacements of all embedding workers.
    pub(super) embedding_worker_successions: u64,
    pub(super) incarnations: Incarnations,
}

impl Members {
    pub(super) fn new(replicas: &Replicas, slots: u32) -> Self {
        Self {
            servers: Servers::new(replicas.ps, slots),
            slots_decided_seconds: 0,
            embedding_workers: Membership::new(replicas.embedding_worker),
            dense_workers: Membership::new(replicas.dense_worker),
            loaders: Membership::new(replicas.loader),
            released: BTreeSet::new(),
            leaving_dense_workers: BTreeMap::new(),
            all_may_leave: false,
            server_restarts: 0,
            loader_replacements: BTreeMap::new(),
            embedding_worker_successions: 0,
            incarnations: Incarnations::default(),
        }
    }
}

impl State {
    /// Whether another process has replaced this caller, which may still run. Its requests are
    /// refused.
    pub(crate) fn is_superseded(&self, caller: &v1::Caller) -> bool {
        self.members.incarnations.is_superseded(caller.id)
    }

    /// A member joins. Returns an event if it replaces another one.
    pub(crate) fn join(&mut self, caller: &v1::Caller, request: &v1::Join) -> Result<Option<JobEvent>, RoleError> {
        let all_had_joined = self.roster()?.is_some();
        let role = request.role();
        if let Some(before) = self.members.incarnations.claim(role, request.index, caller.id) {
            self.replies.forget(before);
        }
        // In a cluster, a replacement has the address of the member before, which may be among the
        // released.
        self.members.released.remove(&request.address);
        let joined = match role {
            v1::Role::Ps => return self.server_joins(request, all_had_joined),
            v1::Role::EmbeddingWorker => self.members.embedding_workers.join(request.index, &request.address),
            v1::Role::DenseWorker => {
                self.members.leaving_dense_workers.entry(request.index).and_modify(|is_back| *is_back = true);
                self.members.dense_workers.join(request.index, &request.address)
            }
            v1::Role::Loader => self.members.loaders.join(request.index, &request.address),
            v1::Role::Unspecified | v1::Role::Coordinator => return Err(unexpected_member(request, 0)),
        };
        match joined {
            Joined::Expected => Ok(None),
            Joined::Rejoined { .. } if member_role(role).is_some_and(Role::is_replaceable) => {
                Ok(Some(self.replaced(role, request.index)))
            }
            Joined::Rejoined { .. }
                if role == v1::Role::DenseWorker && all_had_joined && self.replace_dense_worker(request.index) =>
            {
                Ok(Some(self.replaced(role, request.index)))
            }
            Joined::Rejoined { .. } if all_had_joined => Err(restarted(request)),
            // No member has been given work yet.
            Joined::Rejoined { .. } => Ok(None),
            Joined::Superseded { previous } => {
                self.members.released.insert(previous);
                Ok(None)
            }
            Joined::Unexpected => {
                // The role was scaled back before this member joined.
                self.members.released.insert(request.address.clone());
                Ok(None)
            }
        }
    }

    fn server_joins(&mut self, request: &v1::Join, all_had_joined: bool) -> Result<Option<JobEvent>, RoleError> {
        let member = || format!("{} {}", Role::Ps.name(), request.index);
        match self.members.servers.join(request.index, &request.address, all_had_joined) {
            servers::Joined::Rejoined { same_address: true } if request.attempt != 0 && self.server_may_go_on() => {
                self.members.server_restarts += 1;
                Ok(Some(JobEvent::ServerKeptRows { member: member() }))
            }
            servers::Joined::Rejoined { .. } if all_had_joined => Err(restarted(request)),
            servers::Joined::WhileSlotsMove => Err(restarted(request)),
            servers::Joined::Spare { returns: true } => Ok(Some(JobEvent::Rejoined { member: member(), chunks: 0 })),
            servers::Joined::Unexpected => Err(unexpected_member(request, self.members.servers.present())),
            // No member has been given work yet.
            servers::Joined::Rejoined { .. } | servers::Joined::Expected | servers::Joined::Spare { .. } => Ok(None),
        }
    }

    /// The number of present members of a role.
    fn present(&self, role: v1::Role) -> u32 {
        match role {
            v1::Role::Ps => self.members.servers.present(),
            v1::Role::EmbeddingWorker => self.members.embedding_workers.present(),
            v1::Role::DenseWorker => self.members.dense_workers.present(),
            v1::Role::Loader => self.members.loaders.present(),
            v1::Role::Unspecified | v1::Role::Coordinator => 0,
        }
    }

    /// A dense worker died and its replacement has joined. Returns whether the job can continue
    /// with it.
    fn replace_dense_worker(&mut self, index: u32) -> bool {
        let has_done = match self.training.evaluating() {
            Some((_, at_step)) => self.has_predicted(at_step, index),
            None => self.progress.ranks.get(index as usize).is_some_and(|rank| rank.done.is_some()),
        };
        let goes_on = self.training.replace_worker(Rank(index), has_done);
        if let Some(rank) = self.progress.ranks.get_mut(index as usize).filter(|_| goes_on) {
            rank.training_seconds_before += std::mem::take(&mut rank.training_seconds);
        }
        goes_on
    }

    /// A member died and its replacement has joined: its chunks are replayed.
    fn replaced(&mut self, role: v1::Role, index: u32) -> JobEvent {
        self.data.in_flight.drop_trained_before(self.settled_batches());
        let chunks = match role {
            v1::Role::EmbeddingWorker => {
                self.members.embedding_worker_successions += 1;
                self.data.in_flight.replay_for_embedding_worker(index, &self.still_needed())
            }
            v1::Role::DenseWorker => match self.training.evaluating() {
                Some((_, at_step)) if !self.has_predicted(at_step, index) => {
                    self.reset_evaluation_asked(at_step, Rank(index));
                    self.data.in_flight.replay_predictions(at_step, &self.training.share(Rank(index)))
                }
                _ => 0,
            },
            _ => {
                *self.members.loader_replacements.entry(index).or_default() += 1;
                self.data.in_flight.replay_for_loader(index, &self.still_needed())
            }
        };
        JobEvent::Rejoined { member: format!("{} {index}", role_name(role)), chunks: chunks as u64 }
    }

    /// Whether a parameter server that restarted with its rows has all it needs. It has lost its
    /// knowledge of moving slots and of a restore.
    fn server_may_go_on(&self) -> bool {
        !self.members.servers.is_moving() && !self.training.restoring()
    }

    pub(crate) fn server_restarts(&self) -> u64 {
        self.members.server_restarts
    }

    /// Replacements of all embedding workers. Loaders and dense workers reconnect when this
    /// increases.
    pub(crate) fn embedding_worker_successions(&self) -> u64 {
        self.members.embedding_worker_successions
    }

    /// Replacements of this loader. A request from before the last one came from a process that
    /// died.
    pub(crate) fn loader_replacements(&self, index: u32) -> u32 {
        self.members.loader_replacements.get(&index).copied().unwrap_or(0)
    }

    /// Whether this loader gets no more leases. It ends when all of its batches are trained.
    pub(super) fn is_leaving_loader(&self, loader: u32) -> bool {
        loader >= self.members.loaders.wanted()
    }

    /// Whether this loader is present. A new loader may be scaled back before it is present, so it
    /// gets no leases until then.
    pub(super) fn is_active_loader(&self, loader: u32) -> bool {
        loader < self.members.loaders.present()
    }

    /// Addresses of the embedding workers and the dense workers, once all have joined.
    pub(crate) fn workers(&self) -> (Vec<String>, Vec<String>) {
        (self.members.embedding_workers.all().unwrap_or_default(), self.members.dense_workers.all().unwrap_or_default())
    }

    /// Requests another number of members of a role. Returns the present number, and whether the
    /// request is new.
    pub(crate) fn request_members(&mut self, role: Role, members: u32) -> Result<(u32, bool), ResizeRefused> {
        if role == Role::Ps {
            return self.request_servers(members);
        }
        if members == 0 || members > MOST_MEMBERS {
            return Err(ResizeRefused::Number(format!(
                "a job has 1 to {MOST_MEMBERS} members of a role, not {members}"
            )));
        }
        self.check_scalable()?;
        if role == Role::DenseWorker {
            let checked = self.training.check_workers(members);
            checked.map_err(|error| ResizeRefused::Number(error.to_string()))?;
            if self.training.is_regrouping() {
                return Err(ResizeRefused::Now("training is about to go on with other dense workers".to_owned()));
            }
        }
        let name = role.plural();
        let membership = self.membership_mut(role);
        let present = membership.present();
        if membership.wanted() == members {
            return Ok((present, false));
        }
        if membership.wanted() > present && members > present {
            return Err(ResizeRefused::Now(format!(
                "{} of {} {name} have not joined yet: ask again when they have, or for {present} to give that up",
                membership.missing(),
                membership.wanted(),
            )));
        }
        if membership.wanted() < present && members > membership.wanted() {
            return Err(ResizeRefused::Now(format!(
                "{} {name} are leaving: ask again when they have left",
                present - membership.wanted()
            )));
        }
        let given_up = membership.set_wanted(members);
        self.members.released.extend(given_up);
        if role == Role::DenseWorker {
            self.training.want_workers(None);
        }
        Ok((present, true))
    }

    fn membership_mut(&mut self, role: Role) -> &mut Membership {
        match role {
            Role::DenseWorker => &mut self.members.dense_workers,
            Role::Loader => &mut self.members.loaders,
            // `servers` has the parameter servers, and a job has one coordinator. So neither gets
            // here.
            Role::EmbeddingWorker | Role::Ps | Role::Coordinator => &mut self.members.embedding_workers,
        }
    }

    fn check_scalable(&self) -> Result<(), ResizeRefused> {
        self.check_failure().map_err(|failure| ResizeRefused::Now(failure.to_string()))?;
        if self.training.ended() {
            return Err(ResizeRefused::Now("training has ended".to_owned()));
        }
        Ok(())
    }

    /// Requests a rebalance of the slots over the present parameter servers, decided at
    /// `decided_seconds`. Returns the present number, and whether the request is new.
    pub(crate) fn request_rebalance(
        &mut self,
        servers: u32,
        decided_seconds: u64,
    ) -> Result<(u32, bool), ResizeRefused> {
        let present = self.members.servers.present();
        if decided_seconds <= self.members.slots_decided_seconds {
            return Ok((present, false));
        }
        if servers != present || self.members.servers.wanted() != present {
            return Err(ResizeRefused::Now(format!("there are {present} parameter servers, or are to be others")));
        }
        let answer = self.request_servers(servers)?;
        self.members.slots_decided_seconds = decided_seconds;
        Ok(answer)
    }

    fn request_servers(&mut self, servers: u32) -> Result<(u32, bool), ResizeRefused> {
        self.check_scalable()?;
        self.members.servers.set_wanted(servers)
    }

    /// Notes the work of the parameter servers in the last `seconds`. Gives a slow one fewer slots,
    /// and one that has recovered an even share again. Returns the events of that.
    pub(crate) fn follow_servers(
        &mut self,
        numbers: &[u32],
        work: &[ServerWork],
        seconds: f64,
        now: Instant,
    ) -> Vec<JobEvent> {
        let servers = &mut self.members.servers;
        if !servers.is_settled() || work.is_empty() || self.training.restoring() {
            servers.shares.forget();
            return Vec::new();
        }
        for ServerWork { server, units, seconds } in work {
            servers.shares.record(*server, *units, *seconds, now);
        }
        servers.shares.passed(seconds, now);
        if self.check_scalable().is_err() {
            return Vec::new();
        }
        let servers = &mut self.members.servers;
        let Some(change) = servers.shares.decide(numbers, SLOTS, now) else { return Vec::new() };
        let present = servers.present();
        match servers.set_wanted(present) {
            Ok((from, _)) => server_work::events(change, (from, present)),
            // The slots follow at the next rebalance.
            Err(_) => Vec::new(),
        }
    }

    /// Sets the share of its role's work that a member gets.
    pub(crate) fn weigh(&mut self, role: Role, member: u32, weight: u32) -> Result<(), ResizeRefused> {
        self.check_scalable()?;
        match role {
            Role::Ps => {
                let servers = &mut self.members.servers;
                servers.set_wanted(servers.present())?;
                servers.shares.set(member, weight);
            }
            Role::EmbeddingWorker => {
                self.data.piece_shares.set(member, weight);
                self.weigh_pieces(self.members.embedding_workers.present());
            }
            Role::Loader => self.weigh_loader(member, weight),
            _ => return Err(ResizeRefused::Number(format!("the work of {} is not shared by weights", role.plural()))),
        }
        Ok(())
    }

    /// The weights of servers by their speed; `None` if all have the same.
    pub(crate) fn server_weights(&self, servers: &[u16]) -> Option<Vec<u32>> {
        let shares = &self.members.servers.shares;
        shares.is_uneven().then(|| servers.iter().map(|server| shares.weight(u32::from(*server))).collect())
    }

    /// Drains a parameter server that is about to end.
    ///
    /// # Errors
    /// [`DrainRefused`] if no other server can take its rows.
    pub(crate) fn drain_server(&mut self, index: u32) -> Result<(), DrainRefused> {
        if self.job_end().is_some() || self.training.ended() {
            return Err(DrainRefused::Ended);
        }
        if self.training.restoring() || self.members.servers.all().is_none() {
            return Err(DrainRefused::NotStarted);
        }
        self.members.servers.drain(index)
    }

    /// Whether a server has drained. An error if the drain was abandoned.
    pub(crate) fn is_server_drained(&self, index: u32) -> Result<bool, DrainRefused> {
        // A server ends as soon as it learns that it has drained. Before that it must have been
        // released and have reported its traffic.
        let is_released =
            self.members.servers.drained_address(index).is_none_or(|address| !self.members.released.contains(address));
        let is_drained = self.members.servers.is_drained(index)? && is_released;
        if !is_drained && self.members.all_may_leave {
            return Err(DrainRefused::CoordinatorEnds);
        }
        if !is_drained && self.training.ended() { Err(DrainRefused::Ended) } else { Ok(is_drained) }
    }

    /// The servers of the next migration, once all of them have joined. None begins while the
    /// coordinator ends, because no replacement can continue while slots move.
    pub(crate) fn resize_to_begin(&mut self) -> Result<Option<ResizeToBegin>, RoleError> {
        if self.training.restoring() || self.training.ended() || self.members.all_may_leave {
            return Ok(None);
        }
        Ok(self.members.servers.resize_to_begin())
    }

    /// The slots are on the servers of this map, at these addresses. `counted` has the counts of
    /// the servers since the map before.
    pub(crate) fn servers_changed(&mut self, map: SlotMap, addresses: &[String], counted: &[Counted]) {
        let applied: Vec<v1::Applied> = counted.iter().map(|server| server.applied).collect();
        let tables = counted.iter().map(|server| server.table);
        self.progress.table_before = tables.fold(self.progress.table_before, with_counts);
        self.progress.applied_before = AppliedGradients::mean_of(&applied).plus(self.progress.applied_before);
        self.members.servers.changed(&map, addresses);
        self.slots.map = Some(map);
    }

    /// A dense worker is about to end.
    pub(crate) fn drain_dense_worker(&mut self, index: u32) {
        if index < self.members.dense_workers.present() {
            self.members.leaving_dense_workers.insert(index, false);
        }
    }

    /// Whether every dense worker that drains has a replacement that trains, or needs none.
    pub(crate) fn no_dense_worker_missing(&mut self) -> bool {
        let present = self.members.dense_workers.present();
        self.members.leaving_dense_workers.retain(|index, _| *index < present);
        self.members.leaving_dense_workers.is_empty() || self.members.all_may_leave || self.training.ended()
    }

    /// Whether no slots move, no server that drains has slots, and no dense worker that drains
    /// waits for its replacement. Once training has ended, or if all dense workers drain, none
    /// waits.
    pub(crate) fn has_all_handed_over(&mut self) -> bool {
        let is_moving = self.members.servers.is_moving() || self.training.slots_are_moving();
        let present = self.members.dense_workers.present();
        let all_leave = self.members.leaving_dense_workers.len() >= present as usize;
        let no_rows_left = !is_moving && !self.members.servers.is_draining();
        self.training.ended() || no_rows_left && (all_leave || self.no_dense_worker_missing())
    }

    /// Lets all members end at once, because the coordinator ends.
    pub(crate) fn let_all_leave(&mut self) {
        self.members.all_may_leave = true;
    }

    pub(crate) fn resize_ended(&mut self) {
        self.members.servers.resize_ended(self.training.ended());
    }

    /// The present, wanted and needed members of a role.
    pub(super) fn replicas(&self, role: Role) -> v1::RoleReplicas {
        let present = self.present(v1::Role::from(role));
        let of = |membership: &Membership| (membership.wanted(), membership.needed());
        let (wanted, needed) = match role {
            Role::Coordinator => (1, 1),
            Role::Ps => (self.members.servers.wanted(), self.members.servers.needed()),
            Role::EmbeddingWorker => of(&self.members.embedding_workers),
            Role::DenseWorker => of(&self.members.dense_workers),
            Role::Loader => of(&self.members.loaders),
        };
        v1::RoleReplicas { role: v1::Role::from(role).into(), present, wanted, needed }
    }

    /// A parameter server without slots ends. Returns whether this server is one.
    pub(crate) fn remove_spare(&mut self, index: u32) -> bool {
        self.members.servers.remove_spare(index)
    }

    /// Releases a member that holds nothing any longer: it may end.
    pub(crate) fn release(&mut self, address: &str) {
        self.members.released.insert(address.to_owned());
    }

    /// Whether all released members have left.
    pub(crate) fn all_have_left(&self) -> bool {
        self.members.released.is_empty()
    }

    /// The addresses of all members, once all have joined.
    pub(crate) fn roster(&mut self) -> Result<Option<v1::Roster>, RoleError> {
        let roster = (|| {
            Some(v1::Roster {
                ps: self.members.servers.all()?,
                embedding_workers: self.members.embedding_workers.all()?,
                dense_workers: self.members.dense_workers.all()?,
                loaders: self.members.loaders.all()?,
                ..v1::Roster::default()
            })
        })();
        Ok(roster)
    }

    /// Names of the members that have not joined yet, at most `most`.
    pub(super) fn missing(&self, most: usize) -> Vec<String> {
        let of = |role: Role, index: u32| format!("{} {index}", role.name());
        let servers = self.members.servers.absent().map(|index| of(Role::Ps, index));
        let embedding_workers = self.members.embedding_workers.absent().map(|index| of(Role::EmbeddingWorker, index));
        let dense_workers = self.members.dense_workers.absent().map(|index| of(Role::DenseWorker, index));
        let loaders = self.members.loaders.absent().map(|index| of(Role::Loader, index));
        servers.chain(embedding_workers).chain(dense_workers).chain(loaders).take(most).collect()
    }

    /// Follows training after every change: scales the roles and opens evaluations. Returns the
    /// events of that.
    pub(crate) fn sync_with_training(&mut self) -> Vec<JobEvent> {
        self.regroup_dense_workers();
        self.begin_ordered_evaluation();
        if self.members.embedding_workers.is_stable()
            && self.members.loaders.is_stable()
            && self.members.dense_workers.is_stable()
        {
            return std::mem::take(&mut self.pending_events);
        }
        if !self.training.restoring() && matches!(self.roster(), Ok(Some(_))) {
            self.change_embedding_workers();
            self.change_loaders();
            if self.members.dense_workers.can_grow()
                || self.members.dense_workers.wanted() < self.members.dense_workers.present()
            {
                self.training.want_workers(Some(self.members.dense_workers.wanted()));
                if let Err(error) = self.training.advance() {
                    self.fail((&error).into());
                }
            }
        }
        std::mem::take(&mut self.pending_events)
    }

    /// Assigns batches that no loader has leased yet to the wanted embedding workers. Surplus
    /// workers stay until their batches are trained.
    fn change_embedding_workers(&mut self) {
        let from = self.members.embedding_workers.present();
        if self.members.embedding_workers.can_grow() {
            self.members.embedding_workers.grow();
        }
        let to = self.members.embedding_workers.wanted();
        if to <= self.members.embedding_workers.present() && to != self.data.round_robin.latest_workers() {
            self.weigh_pieces(to);
        }
        let settled = self.settled_batches();
        let evaluated =
            self.evaluation.passes.values().map(|pass| pass.round_robin.latest_workers()).max().unwrap_or(0);
        self.data.round_robin.forget_before(settled.saturating_sub(FETCHED_AGAIN));
        let held = self.data.round_robin.max_workers_from(settled).max(evaluated);
        if held < self.members.embedding_workers.present() && to < self.members.embedding_workers.present() {
            let left = self.members.embedding_workers.shrink(held.max(to));
            self.members.released.extend(left);
        }
        self.push_scaled(Role::EmbeddingWorker, from);
    }

    /// Releases surplus loaders once all that they have sent is trained.
    pub(super) fn change_loaders(&mut self) {
        let from = self.members.loaders.present();
        if self.members.loaders.can_grow() {
            self.members.loaders.grow();
        }
        if self.members.loaders.wanted() < self.members.loaders.present() {
            self.data.in_flight.drop_trained_before(self.settled_batches());
            let needed = self.data.in_flight.loaders_needed(self.fetched_batches());
            let needed = needed.max(self.members.loaders.wanted());
            let left = self.members.loaders.shrink(needed);
            self.members.released.extend(left);
        }
        self.push_scaled(Role::Loader, from);
    }

    /// Training has admitted dense workers, or continues without some.
    fn regroup_dense_workers(&mut self) {
        let (from, to) = (self.members.dense_workers.present(), self.training.workers());
        if from == to {
            return;
        }
        if to > from {
            self.members.dense_workers.grow();
        } else {
            let left = self.members.dense_workers.shrink(to);
            self.members.released.extend(left);
        }
        self.progress.ranks.resize_with(to as usize, DenseWorkerState::default);
        self.progress.speeds.truncate(to as usize);
        self.push_scaled(Role::DenseWorker, from);
    }

    fn push_scaled(&mut self, role: Role, from: u32) {
        let to = self.present(v1::Role::from(role));
        if from != to {
            self.pending_events.push(JobEvent::Scaled { role, from, to });
        }
    }
}

fn restarted(request: &v1::Join) -> RoleError {
    RoleError::Restarted { member: format!("{} {}", role_name(request.role()), request.index) }
}

fn unexpected_member(request: &v1::Join, replicas: u32) -> RoleError {
    let reason = format!(
        "{:?} {} at {} is not expected: the job has {replicas} of them, each at one address",
        request.role(),
        request.index,
        request.address
    );
    RoleError::Inconsistent { message: "join", reason }
}

/// The name of a role in commands, metrics and pods.
fn role_name(role: v1::Role) -> &'static str {
    member_role(role).map_or("coordinator", Role::name)
}
