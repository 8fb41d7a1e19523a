//! The job's checkpoints as the coordinator handles them: which one training goes on from, and the writing of the next one while
//! training goes on. Parameter servers and dense worker 0 write their own files; the coordinator adds its state and, last, the
//! manifest that makes the checkpoint exist.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use futures::future::try_join_all;
use rectrain_checkpoint::{
    Base, Begin, Checkpoint, CheckpointError, CheckpointWriter, Depth, FileEntry, Identity, Kind, ListedState,
    Manifest, Ticket, directory_name, latest_good, list, retain, save_state,
};
use rectrain_modes::switch::Boundary;
use rectrain_proto::v1;
use rectrain_storage::Directory;
use rectrain_wire::Channel;
use tokio::sync::oneshot;

use super::saved::{self, SavedState};
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message;
use rectrain_protocol::plan::{CheckpointPlan, JobPlan};
use rectrain_protocol::ticket;

/// The name under which a manifest says which run has written it.
const RUN: &str = "run";

/// Where training rests, and the mode that it comes from.
type Rest = (Boundary, &'static str);

/// See the module's text.
#[derive(Debug)]
pub(super) struct Checkpoints {
    plan: Arc<JobPlan>,
    settings: CheckpointPlan,
    directory: Directory,
    identity: Identity,
    run: String,
    /// Found damaged, and not written anew since.
    exclude: Vec<String>,
    /// What the next delta starts from, and how many deltas there are since the last full one.
    base: Option<Base>,
    deltas: u32,
    /// The one written last, and of which rest it is.
    last: Option<(Rest, String)>,
    /// How often servers have come to not know what changed: a delta starts from a checkpoint before which they did.
    moves: u64,
}

/// A checkpoint that training goes on from.
#[derive(Debug, Clone)]
pub(super) struct Resumed {
    /// Its name in the checkpoint path.
    pub(super) name: String,
    pub(super) state: SavedState,
    base: Base,
    deltas: u32,
}

/// The files of dense worker 0, when they are written, or why they are not.
pub(super) type DenseFile = oneshot::Receiver<Result<FileEntry, String>>;

/// A checkpoint that has been begun.
pub(super) struct Begun {
    writer: CheckpointWriter,
    pub(super) ticket: Ticket,
    started: Instant,
    rest: Rest,
    moves: u64,
}

/// A checkpoint that exists.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) name: String,
    pub(super) manifest: Manifest,
    pub(super) seconds: f64,
    /// Why those that are too old are not all deleted.
    pub(super) not_deleted: Option<CheckpointError>,
    rest: Rest,
    moves: u64,
}

impl Checkpoints {
    /// None if the job has no checkpoints. `run` names this run, all its attempts.
    pub(super) fn open(plan: &Arc<JobPlan>, run: &str) -> Result<Option<Self>, RoleError> {
        let Some(settings) = plan.checkpoint.clone() else { return Ok(None) };
        Ok(Some(Self {
            directory: settings.directory()?,
            settings,
            identity: plan.identity(),
            plan: Arc::clone(plan),
            run: run.to_owned(),
            exclude: Vec::new(),
            base: None,
            deltas: 0,
            last: None,
            moves: 0,
        }))
    }

    /// The checkpoint that training goes on from, none if it begins at the beginning; and warnings about those that cannot be used.
    pub(super) async fn find(&mut self) -> Result<(Option<Resumed>, Vec<String>), RoleError> {
        if !self.settings.resume_latest {
            self.refuse_another_runs().await?;
        }
        let mut warnings = Vec::new();
        loop {
            let latest = latest_good(&self.directory, Some(&self.identity), Depth::Sizes, &self.exclude).await?;
            for skipped in latest.skipped {
                warnings.push(format!("checkpoint {} is passed over: {}", skipped.name, skipped.reason));
                self.exclude.push(skipped.name);
            }
            let Some(checkpoint) = latest.checkpoint else { return Ok((None, warnings)) };
            match self.resumed(&checkpoint).await {
                Ok(resumed) => return Ok((Some(resumed), warnings)),
                Err(RoleError::Checkpoint(reason)) if reason.is_checkpoints_fault() => {
                    let name = checkpoint.manifest().directory();
                    warnings.push(format!("checkpoint {name} is passed over: {reason}"));
                    self.exclude.push(name);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// A checkpoint has turned out to be damaged.
    pub(super) fn pass_over(&mut self, name: &str) {
        self.exclude.push(name.to_owned());
    }

    /// Those that have, and were not written anew.
    pub(super) fn passed_over(&self) -> &[String] {
        &self.exclude
    }

    /// The parameter servers hold just what is in this checkpoint.
    pub(super) fn restored(&mut self, resumed: &Resumed) {
        self.base = Some(resumed.base.clone());
        self.deltas = resumed.deltas;
    }

    async fn resumed(&self, checkpoint: &Checkpoint) -> Result<Resumed, RoleError> {
        let name = checkpoint.manifest().directory();
        // Dense workers read them later, when it is too late for another checkpoint.
        checkpoint.dense().await?;
        let bytes = checkpoint.state(saved::NAME).await?;
        Ok(Resumed {
            state: SavedState::decode(&self.plan, &name, &bytes)?,
            base: Base { directory: name.clone(), id: checkpoint.manifest().id },
            deltas: checkpoint.chain().len() as u32 - 1,
            name,
        })
    }

    /// Checkpoints of several runs in one path would be taken for one another's.
    async fn refuse_another_runs(&self) -> Result<(), RoleError> {
        for listed in list(&self.directory).await?.into_iter().rev() {
            let ListedState::Complete(manifest) = listed.state else { continue };
            if manifest.info.get(RUN).and_then(|run| run.as_str()) != Some(&self.run) {
                return Err(RoleError::Input(format!(
                    "spec.checkpoint.path {} holds checkpoints of another run, the newest of them {}: set spec.checkpoint.resume to `latest` to go on from it, or give this run another path",
                    self.settings.path, listed.name
                )));
            }
        }
        Ok(())
    }

    /// Begins a checkpoint of the boundary `at`. Training waits for that, and so nothing is asked of the storage.
    pub(super) fn begin(&self, at: Boundary, mode: &'static str) -> Begun {
        // One that would have the base's place.
        let is_again = |base: &Base| base.directory == directory_name(at.step.0, Kind::Delta);
        let full = self.deltas + 1 >= self.settings.full_every;
        let info = [(RUN, &*self.run), ("job", &*self.plan.name), ("mode", mode)];
        let begin = Begin {
            step: at.step.0,
            base: self.base.clone().filter(|base| !full && !is_again(base)),
            slots: self.plan.store.slots,
            identity: self.identity.clone(),
            info: info.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect::<BTreeMap<_, _>>(),
        };
        let writer = CheckpointWriter::unchecked(&self.directory, begin);
        let ticket = writer.ticket().clone();
        Begun { ticket, writer, started: Instant::now(), rest: (at, mode), moves: self.moves }
    }

    /// The name of the checkpoint written last, if nothing was trained since.
    pub(super) fn of(&self, at: Boundary, mode: &'static str) -> Option<String> {
        self.last.as_ref().filter(|(rest, _)| *rest == (at, mode)).map(|(_, name)| name.clone())
    }

    /// Waits until every part is written and finishes the checkpoint, or gives it up; then deletes what is too old, which may take as long as
    /// the writing. Needs nothing of `self` meanwhile.
    pub(super) fn write(
        &self,
        begun: Begun,
        state: Vec<u8>,
        dense: Option<DenseFile>,
        servers: &[Channel],
    ) -> impl Future<Output = Result<Written, RoleError>> + Send + use<> {
        let (directory, servers) = (self.directory.clone(), servers.to_vec());
        let (identity, keep) = (self.identity.clone(), self.settings.keep);
        let exclude = self.exclude_but(&begun.ticket.directory);
        async move {
            let Begun { writer, ticket, started, rest, moves } = begun;
            writer.check().await?;
            match files(&directory, &ticket, state, dense, &servers).await {
                Ok(files) => {
                    let manifest = writer.commit(files).await?;
                    let seconds = started.elapsed().as_secs_f64();
                    let not_deleted = retain(&directory, &identity, keep, &exclude, &[]).await.err();
                    Ok(Written { name: ticket.directory, manifest, seconds, not_deleted, rest, moves })
                }
                Err(error) => {
                    if let Err(left) = writer.abort().await {
                        tracing::warn!(%left, "parts of a checkpoint that was given up are left");
                    }
                    Err(error)
                }
            }
        }
    }

    /// The next delta starts from this one.
    pub(super) fn written(&mut self, written: &Written) {
        self.deltas = if written.manifest.base.is_some() { self.deltas + 1 } else { 0 };
        let base = Base { directory: written.name.clone(), id: written.manifest.id };
        self.base = (written.moves == self.moves).then_some(base);
        self.last = Some((written.rest, written.name.clone()));
        self.exclude = self.exclude_but(&written.name);
    }

    /// Those that were found damaged, when this one was written anew.
    fn exclude_but(&self, written: &str) -> Vec<String> {
        self.exclude.iter().filter(|name| *name != written).cloned().collect()
    }

    /// Slots have other owners now, or owners that were restarted, who do not know what changed in them: the next checkpoint is full.
    pub(super) fn changes_unknown(&mut self) {
        self.moves += 1;
        self.base = None;
    }

    /// A checkpoint was given up: the next one is full, whatever the servers know.
    pub(super) fn given_up(&mut self) {
        self.base = None;
    }
}

async fn files(
    directory: &Directory,
    ticket: &Ticket,
    state: Vec<u8>,
    dense: Option<DenseFile>,
    servers: &[Channel],
) -> Result<Vec<FileEntry>, RoleError> {
    let request = v1::WriteFrozen { ticket: Some(ticket::write(ticket)) };
    let rows = servers.iter().map(|server| message::call(server, request.clone(), Vec::new(), WHOLE_JOB));
    let dense = async {
        let Some(dense) = dense else { return Ok(None) };
        let file = dense.await.map_err(|_| RoleError::Stopped)?;
        file.map(Some).map_err(|reason| RoleError::Task { what: "saving of the dense parameters", reason })
    };
    let state = async { Ok::<_, RoleError>(save_state(directory, ticket, saved::NAME, state).await?) };
    let (rows, dense, state) = futures::try_join!(try_join_all(rows), dense, state)?;
    let mut files = vec![state];
    files.extend(dense);
    for (written, _tensors) in rows {
        for file in &written.files {
            files.push(ticket::read_file("write_frozen", file)?);
        }
    }
    Ok(files)
}

/// Has every parameter server fix this instant.
pub(super) async fn freeze(
    ticket: &Ticket,
    partition: bool,
    servers: &[Channel],
) -> Result<Vec<v1::Applied>, RoleError> {
    let freeze = v1::Freeze { ticket: Some(ticket::write(ticket)), partition };
    let calls = servers.iter().map(|server| message::call_server(server, freeze.clone(), || Ok(Vec::new())));
    Ok(try_join_all(calls).await?.into_iter().map(|(frozen, _)| frozen.applied.unwrap_or_default()).collect())
}

/// Tells every parameter server what became of the checkpoint.
pub(super) async fn thaw(ticket: v1::Ticket, saved: bool, servers: &[Channel]) -> Result<(), RoleError> {
    let thaw = v1::Thaw { ticket: Some(ticket), saved };
    let calls = servers.iter().map(|server| message::call_server(server, thaw.clone(), || Ok(Vec::new())));
    try_join_all(calls).await.map(drop)
}

/// How restoring the rows went.
pub(super) enum RowsRestored {
    All { rows: u64 },
    Damaged(String),
}

/// Has every parameter server restore the rows of its slots.
pub(super) async fn restore_rows(checkpoint: &str, servers: &[Channel]) -> Result<RowsRestored, RoleError> {
    let request = v1::RestoreRows { checkpoint: checkpoint.to_owned() };
    let calls = servers.iter().map(|server| message::call(server, request.clone(), Vec::new(), WHOLE_JOB));
    let replies = try_join_all(calls).await?;
    match replies.iter().find(|(reply, _)| !reply.damaged.is_empty()) {
        Some((reply, _)) => Ok(RowsRestored::Damaged(reply.damaged.clone())),
        None => Ok(RowsRestored::All { rows: replies.iter().map(|(reply, _)| reply.rows).sum() }),
    }
}

/// Has every parameter server forget what it has restored.
pub(super) async fn clear_rows(servers: &[Channel]) -> Result<(), RoleError> {
    restore_rows("", servers).await.map(drop)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::path::Path;

    use rectrain_modes::GlobalStep;

    use super::*;
    use rectrain_protocol::plan::small_plan;

    fn checkpoints(path: &Path) -> Checkpoints {
        let path = format!("spec.checkpoint.path={}", path.display());
        let plan = small_plan(&[&path, "spec.checkpoint.fullEvery=1", "spec.checkpoint.keep=1"]);
        Checkpoints::open(&Arc::new(plan), "run").unwrap().unwrap()
    }

    #[tokio::test]
    async fn what_is_too_old_is_deleted_by_whoever_writes_and_not_by_whoever_hears_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut checkpoints = checkpoints(folder.path());
        // The second is written anew.
        checkpoints.pass_over(&directory_name(2, Kind::Full));
        for step in 1..=3 {
            let begun = checkpoints.begin(Boundary { step: GlobalStep(step), next_row: 0 }, "sync");
            let written = checkpoints.write(begun, b"state".to_vec(), None, &[]).await.unwrap();
            assert!(written.not_deleted.is_none());
            let there = list(&checkpoints.directory).await.unwrap();
            let there: Vec<&str> = there.iter().map(|listed| &*listed.name).collect();
            assert_eq!(there, [&*written.name], "after step {step}");
            checkpoints.written(&written);
        }
        assert!(checkpoints.passed_over().is_empty());
    }
}
