//! Who takes part in the job and where: who joins, takes a dead one's place, comes or goes because other numbers are asked for.

use std::collections::{BTreeMap, BTreeSet};

use rectrain_modes::Rank;
use rectrain_modes::migration::SlotMap;
use rectrain_proto::v1;
use rectrain_protocol::role::{RoleExt, role_of};

use super::progress::DenseWorkerState;
use super::{MOST_MEMBERS, State};
use crate::crew::{Crew, Joined};
use crate::places::Places;
use crate::saved::AppliedGradients;
use crate::servers::{self, ResizeToBegin, Servers};
use rectrain_protocol::Role;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::plan::Replicas;
use serde::{Deserialize, Serialize};

/// What a command to scale is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ResizeRefused {
    /// There cannot be so many.
    Number(String),
    /// Not now.
    Now(String),
}

/// The members of the job, by role, and the members that are on their way out.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Members {
    pub(super) servers: Servers,
    /// When the newest accepted decision to rebalance the slots was made, in seconds since 1970.
    pub(super) slots_decided_seconds: u64,
    pub(super) embedding_workers: Crew,
    pub(super) dense_workers: Crew,
    pub(super) loaders: Crew,
    /// Addresses of members of any role that the job no longer needs: they are told to end.
    pub(super) released: BTreeSet<String>,
    /// Dense workers that were told to end and are not replaced in training yet; whether a replacement has
    /// joined.
    pub(super) leaving_dense_workers: BTreeMap<u32, bool>,
    /// Whether every member may end at once, because the coordinator ends.
    pub(super) all_may_leave: bool,
    /// Parameter servers that were restarted and kept their rows.
    pub(super) server_restarts: u64,
    /// How often each loader was replaced, by index.
    pub(super) loader_successions: BTreeMap<u32, u32>,
    /// How often any embedding worker was replaced.
    pub(super) embedding_worker_successions: u64,
    pub(super) incarnations: Places,
}

impl Members {
    pub(super) fn new(replicas: &Replicas, slots: u32) -> Self {
        Self {
            servers: Servers::new(replicas.ps, slots),
            slots_decided_seconds: 0,
            embedding_workers: Crew::new(replicas.embedding_workers),
            dense_workers: Crew::new(replicas.dense_workers),
            loaders: Crew::new(replicas.loaders),
            released: BTreeSet::new(),
            leaving_dense_workers: BTreeMap::new(),
            all_may_leave: false,
            server_restarts: 0,
            loader_successions: BTreeMap::new(),
            embedding_worker_successions: 0,
            incarnations: Places::default(),
        }
    }
}

impl State {
    /// Whether another has taken this caller's place: whatever it asks or tells counts for nothing, should it still live.
    pub(crate) fn is_superseded(&self, caller: &v1::Caller) -> bool {
        self.members.incarnations.is_superseded(caller.id)
    }

    /// Gives an event if somebody takes the place of a member that had joined before.
    pub(crate) fn join(&mut self, caller: &v1::Caller, request: &v1::Join) -> Result<Option<JobEvent>, RoleError> {
        let all_had_joined = self.roster()?.is_some();
        let role = request.role();
        if let Some(before) = self.members.incarnations.take(role, request.index, caller.id) {
            self.replies.forget(before);
        }
        // In a cluster a successor has the address of the one before, which is gone.
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
            Joined::Again { .. } if role_of(role).is_some_and(RoleExt::is_replaceable) => {
                Ok(Some(self.rejoined(role, request.index)))
            }
            Joined::Again { .. }
                if role == v1::Role::DenseWorker && all_had_joined && self.replace_dense_worker(request.index) =>
            {
                Ok(Some(self.rejoined(role, request.index)))
            }
            Joined::Again { .. } if all_had_joined => Err(restarted(request)),
            // Nobody has been given anything.
            Joined::Again { .. } => Ok(None),
            Joined::Instead { of } => {
                self.members.released.insert(of);
                Ok(None)
            }
            Joined::Unexpected => {
                // It was asked for, and given up before it came.
                self.members.released.insert(request.address.clone());
                Ok(None)
            }
        }
    }

    fn server_joins(&mut self, request: &v1::Join, all_had_joined: bool) -> Result<Option<JobEvent>, RoleError> {
        let member = || format!("{} {}", Role::Ps.name(), request.index);
        match self.members.servers.join(request.index, &request.address, all_had_joined) {
            servers::Joined::Again { same_address: true } if request.attempt != 0 && self.server_may_go_on() => {
                self.members.server_restarts += 1;
                Ok(Some(JobEvent::ServerKeptRows { member: member() }))
            }
            servers::Joined::Again { .. } if all_had_joined => Err(restarted(request)),
            servers::Joined::WhileSlotsMove => Err(restarted(request)),
            servers::Joined::Spare { returns: true } => Ok(Some(JobEvent::Rejoined { member: member(), chunks: 0 })),
            servers::Joined::Unexpected => Err(unexpected_member(request, self.members.servers.present())),
            // Nobody has been given anything.
            servers::Joined::Again { .. } | servers::Joined::Expected | servers::Joined::Spare { .. } => Ok(None),
        }
    }

    /// How many members of a role take part.
    fn present(&self, role: v1::Role) -> u32 {
        match role {
            v1::Role::Ps => self.members.servers.present(),
            v1::Role::EmbeddingWorker => self.members.embedding_workers.present(),
            v1::Role::DenseWorker => self.members.dense_workers.present(),
            v1::Role::Loader => self.members.loaders.present(),
            v1::Role::Unspecified | v1::Role::Coordinator => 0,
        }
    }

    /// A dense worker has died, and its successor is there; says whether the job goes on with it.
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

    /// A member has died, and its successor is there: what it held is read and sent again.
    fn rejoined(&mut self, role: v1::Role, index: u32) -> JobEvent {
        self.data.outstanding.trained_before(self.settled_batches());
        let chunks = match role {
            v1::Role::EmbeddingWorker => {
                self.members.embedding_worker_successions += 1;
                self.data.outstanding.embedding_worker_lost(index, &self.predicted())
            }
            v1::Role::DenseWorker => match self.training.evaluating() {
                Some((_, at_step)) if !self.has_predicted(at_step, index) => {
                    self.predicts_anew(at_step, Rank(index));
                    self.data.outstanding.predictions_lost(at_step, &self.training.share(Rank(index)))
                }
                _ => 0,
            },
            _ => {
                *self.members.loader_successions.entry(index).or_default() += 1;
                self.data.outstanding.loader_lost(index, &self.predicted())
            }
        };
        JobEvent::Rejoined { member: format!("{} {index}", role_name(role)), chunks: chunks as u64 }
    }

    /// Whether a parameter server that was restarted and kept its rows lacks nothing: what it knew of slots that move is gone.
    fn server_may_go_on(&self) -> bool {
        !self.members.servers.is_moving() && !self.training.restoring()
    }

    pub(crate) fn server_restarts(&self) -> u64 {
        self.members.server_restarts
    }

    /// How often embedding workers took others' places: what they are sent from here on is for the last ones.
    pub(crate) fn embedding_worker_successions(&self) -> u64 {
        self.members.embedding_worker_successions
    }

    /// How often this loader took another's place: who asked before it did is dead.
    pub(crate) fn loader_successions(&self, index: u32) -> u32 {
        self.members.loader_successions.get(&index).copied().unwrap_or(0)
    }

    /// Whether this loader is given nothing any more: it ends when everything it was given is trained.
    pub(super) fn leaves(&self, loader: u32) -> bool {
        loader >= self.members.loaders.wanted()
    }

    /// One that is still to take part may be given up, and is given nothing until then.
    pub(super) fn takes_part(&self, loader: u32) -> bool {
        loader < self.members.loaders.present()
    }

    /// Where the embedding workers and the dense workers are, once all have joined.
    pub(crate) fn workers(&self) -> (Vec<String>, Vec<String>) {
        (self.members.embedding_workers.all().unwrap_or_default(), self.members.dense_workers.all().unwrap_or_default())
    }

    /// There are to be so many members of a role; gives how many there are, and whether that was not asked for before.
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
            self.training.check_workers(members).map_err(ResizeRefused::Number)?;
            if self.training.is_regrouping() {
                return Err(ResizeRefused::Now("training is about to go on with other dense workers".to_owned()));
            }
        }
        let name = role.plural();
        let crew = self.crew_mut(role);
        let present = crew.present();
        if crew.wanted() == members {
            return Ok((present, false));
        }
        if crew.wanted() > present && members > present {
            return Err(ResizeRefused::Now(format!(
                "{} of {} {name} have not joined yet: ask again when they have, or for {present} to give that up",
                crew.missing(),
                crew.wanted(),
            )));
        }
        if crew.wanted() < present && members > crew.wanted() {
            return Err(ResizeRefused::Now(format!(
                "{} {name} are leaving: ask again when they have left",
                present - crew.wanted()
            )));
        }
        let given_up = crew.want(members);
        self.members.released.extend(given_up);
        if role == Role::DenseWorker {
            self.training.want_workers(None);
        }
        Ok((present, true))
    }

    fn crew_mut(&mut self, role: Role) -> &mut Crew {
        match role {
            Role::DenseWorker => &mut self.members.dense_workers,
            Role::Loader => &mut self.members.loaders,
            // Parameter servers are counted by `servers`; a job has one coordinator.
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

    /// The slots are to be spread anew over the parameter servers there are, as was decided then; as [`Self::request_members`].
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
        self.members.servers.want(servers)
    }

    /// A parameter server is about to end: others are to take what it holds.
    ///
    /// # Errors
    /// A sentence, if none can.
    pub(crate) fn server_is_about_to_end(&mut self, index: u32) -> Result<(), String> {
        if self.job_end().is_some() || self.training.ended() {
            return Err("training has ended".to_owned());
        }
        if self.training.restoring() || self.members.servers.all().is_none() {
            return Err("training has not begun".to_owned());
        }
        self.members.servers.about_to_end(index)
    }

    /// Whether others hold what a server held that is about to end; a sentence, if that was given up.
    pub(crate) fn server_has_left(&self, index: u32) -> Result<bool, String> {
        // A server ends the moment it is told to: it is told so, and says what it has sent, before it hears of this.
        let is_told =
            self.members.servers.ended_at(index).is_none_or(|address| !self.members.released.contains(address));
        let left = self.members.servers.has_left(index)? && is_told;
        if !left && self.members.all_may_leave {
            return Err("the coordinator is about to end as well".to_owned());
        }
        if !left && self.training.ended() { Err("training has ended".to_owned()) } else { Ok(left) }
    }

    /// The servers that are to hold slots, and where all are that takes, as soon as they are there.
    pub(crate) fn resize_to_begin(&mut self) -> Result<Option<ResizeToBegin>, RoleError> {
        if self.training.restoring() || self.training.ended() {
            return Ok(None);
        }
        Ok(self.members.servers.resize_to_begin())
    }

    /// Slots are on just the servers of this map, by place at these addresses; `applied` is what the servers before have applied since they were
    /// last asked.
    pub(crate) fn servers_changed(&mut self, map: SlotMap, addresses: &[String], applied: &[v1::Applied]) {
        self.progress.applied_before = AppliedGradients::of_servers(applied).after(self.progress.applied_before);
        self.members.servers.changed(&map, addresses);
        self.slots.map = Some(map);
    }

    /// A dense worker is told to end.
    pub(crate) fn dense_worker_leaves(&mut self, index: u32) {
        if index < self.members.dense_workers.present() {
            self.members.leaving_dense_workers.insert(index, false);
        }
    }

    /// Whether no dense worker was told to end in whose place nobody has trained yet, or that need not be waited for.
    pub(crate) fn no_dense_worker_is_missed(&mut self) -> bool {
        let present = self.members.dense_workers.present();
        self.members.leaving_dense_workers.retain(|index, _| *index < present);
        self.members.leaving_dense_workers.is_empty() || self.members.all_may_leave || self.training.ended()
    }

    /// The coordinator ends: nobody is kept from it any more.
    pub(crate) fn let_all_leave(&mut self) {
        self.members.all_may_leave = true;
    }

    pub(crate) fn resize_ended(&mut self) {
        self.members.servers.resize_ended(self.training.ended());
    }

    /// How many members of a role there are, there are to be, and there have to be until then.
    pub(super) fn replicas(&self, role: Role) -> v1::RoleReplicas {
        let present = self.present(role.proto());
        let of = |crew: &Crew| (crew.wanted(), crew.needed());
        let (wanted, needed) = match role {
            Role::Coordinator => (1, 1),
            Role::Ps => (self.members.servers.wanted(), self.members.servers.needed()),
            Role::EmbeddingWorker => of(&self.members.embedding_workers),
            Role::DenseWorker => of(&self.members.dense_workers),
            Role::Loader => of(&self.members.loaders),
        };
        v1::RoleReplicas { role: role.proto().into(), present, wanted, needed }
    }

    /// A server ends that no slot was given to yet; gives whether that is what it was.
    pub(crate) fn spare_leaves(&mut self, index: u32) -> bool {
        self.members.servers.spare_leaves(index)
    }

    /// A member that holds nothing any more may end.
    pub(crate) fn release(&mut self, address: &str) {
        self.members.released.insert(address.to_owned());
    }

    /// Whether all have that may.
    pub(crate) fn all_have_left(&self) -> bool {
        self.members.released.is_empty()
    }

    /// Everybody's address, once all have joined.
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

    /// Those who have not joined since the job began, `most` at most.
    pub(super) fn missing(&self, most: usize) -> Vec<String> {
        let of = |role: Role, index: u32| format!("{} {index}", role.name());
        let servers = self.members.servers.absent().map(|index| of(Role::Ps, index));
        let embedding_workers = self.members.embedding_workers.absent().map(|index| of(Role::EmbeddingWorker, index));
        let dense_workers = self.members.dense_workers.absent().map(|index| of(Role::DenseWorker, index));
        let loaders = self.members.loaders.absent().map(|index| of(Role::Loader, index));
        servers.chain(embedding_workers).chain(dense_workers).chain(loaders).take(most).collect()
    }

    /// After every change: what follows from where training stands. Gives what there is to tell.
    pub(crate) fn follow_training(&mut self) -> Vec<JobEvent> {
        self.regroup_dense_workers();
        self.begin_ordered_evaluation();
        if self.members.embedding_workers.is_settled()
            && self.members.loaders.is_settled()
            && self.members.dense_workers.is_settled()
        {
            return std::mem::take(&mut self.news);
        }
        if !self.training.restoring() && matches!(self.roster(), Ok(Some(_))) {
            self.change_embedding_workers();
            self.change_loaders();
            if self.members.dense_workers.can_grow()
                || self.members.dense_workers.wanted() < self.members.dense_workers.present()
            {
                self.training.want_workers(Some(self.members.dense_workers.wanted()));
                if let Err(error) = self.training.advance() {
                    self.fail(error.to_string(), error.is_user_error());
                }
            }
        }
        std::mem::take(&mut self.news)
    }

    /// Batches that no loader has been given yet go to as many embedding workers as there are to be. Those that leave hold what they
    /// were given until it is trained.
    fn change_embedding_workers(&mut self) {
        let from = self.members.embedding_workers.present();
        if self.members.embedding_workers.can_grow() {
            self.members.embedding_workers.grow();
        }
        let to = self.members.embedding_workers.wanted();
        if to <= self.members.embedding_workers.present() && to != self.data.turns.last() {
            self.data.turns.change(self.data.ledger.next_batch(), to);
        }
        let settled = self.settled_batches();
        let evaluated = self.evaluation.passes.values().map(|pass| pass.turns.last()).max().unwrap_or(0);
        let held = self.data.turns.most_from(settled).max(evaluated);
        if held < self.members.embedding_workers.present() && to < self.members.embedding_workers.present() {
            let left = self.members.embedding_workers.shrink(held.max(to));
            self.members.released.extend(left);
        }
        self.tell_scaled(Role::EmbeddingWorker, from);
    }

    /// Loaders that leave are given nothing, and end when everything they have sent is trained.
    fn change_loaders(&mut self) {
        let from = self.members.loaders.present();
        if self.members.loaders.can_grow() {
            self.members.loaders.grow();
        }
        if self.members.loaders.wanted() < self.members.loaders.present() {
            self.data.outstanding.trained_before(self.settled_batches());
            let needed = self.data.outstanding.loaders_needed().max(self.members.loaders.wanted());
            let left = self.members.loaders.shrink(needed);
            self.members.released.extend(left);
        }
        self.tell_scaled(Role::Loader, from);
    }

    /// Training has taken dense workers in, or goes on without some.
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
        self.progress.speeds.keep(to as usize);
        self.tell_scaled(Role::DenseWorker, from);
    }

    fn tell_scaled(&mut self, role: Role, from: u32) {
        let to = self.present(role.proto());
        if from != to {
            self.news.push(JobEvent::Scaled { role, from, to });
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

/// As commands, metrics and pods call it.
fn role_name(role: v1::Role) -> &'static str {
    role_of(role).map_or("coordinator", Role::name)
}
