//! The checkpoints of a job: finds the one to resume from, and writes the next one while training
//! continues.
//! Parameter servers and dense worker 0 write their own files. The coordinator adds its state and,
//! last, the manifest. A checkpoint exists as soon as it has a manifest.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use rectrain_checkpoint::{
    Base, Begin, Checkpoint, CheckpointError, CheckpointId, CheckpointWriter, Depth, FileEntry, Identity, Kind,
    ListedState, Manifest, Skipped, Ticket, directory_name, latest_good, list, retain, save_state, withdraw,
};
use rectrain_modes::switch::Boundary;
use rectrain_proto::v1;
use rectrain_storage::Directory;
use rectrain_wire::Channel;
use tokio::sync::oneshot;

use super::lease::PathLease;
use super::rollback::{Fall, Good, Record, from_the_last_good};
use super::snapshot::{self, Snapshot};
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message;
use rectrain_protocol::plan::{CheckpointPlan, JobPlan};
use rectrain_protocol::ticket;

/// The key in a manifest for the run that wrote the checkpoint.
const RUN: &str = "run";

/// Seconds between two probes of a path whose store denies access. New permissions take up to a
/// minute to spread.
const DENIED_BACKOFF_SECONDS: [u64; 5] = [1, 2, 5, 10, 20];

/// The most faults that an error about damaged checkpoints lists.
const LISTED_FAULTS: usize = 5;

/// A boundary at which training paused, and the mode before it.
type PausePoint = (Boundary, &'static str);

/// The checkpoints in the path of a job.
#[derive(Debug)]
pub(super) struct Checkpoints {
    plan: Arc<JobPlan>,
    settings: CheckpointPlan,
    directory: Directory,
    identity: Identity,
    run: String,
    lease: Arc<PathLease>,
    /// Checkpoints found damaged and not replaced since.
    damaged: Vec<String>,
    /// Why finished checkpoints cannot be used; each reason once, the newest checkpoint first.
    faults: Vec<String>,
    /// The base of the next delta, and the deltas since the last full checkpoint.
    base: Option<Base>,
    deltas: u32,
    /// Bytes of the last full checkpoint; 0 if none is known.
    full_bytes: u64,
    /// The last checkpoint written: its boundary and its name.
    last: Option<(PausePoint, String)>,
    /// Checkpoints that training may go back to, with their trained rows, the oldest first.
    known: Vec<(String, u64)>,
    /// Counts the times that servers lost track of their changes. A checkpoint can be the base of a
    /// delta only if this has not increased since it began.
    invalidations: u64,
    /// Whether the path holds nothing to delete until the next full checkpoint exists.
    is_tidy: bool,
}

/// A checkpoint to resume from.
#[derive(Debug, Clone)]
pub(super) struct ResumePoint {
    /// Its name in the checkpoint path.
    pub(super) name: String,
    pub(super) state: Snapshot,
    /// Whether an attempt of this run wrote it.
    pub(super) is_of_this_run: bool,
    base: Base,
    deltas: u32,
    /// Bytes of the full checkpoint below it.
    full_bytes: u64,
}

/// Resolves to the file of dense worker 0 once it is written.
pub(super) type DenseFile = oneshot::Receiver<Result<FileEntry, RoleError>>;

/// A checkpoint that has begun.
pub(super) struct PendingCheckpoint {
    writer: CheckpointWriter,
    pub(super) ticket: Ticket,
    started: Instant,
    pause: PausePoint,
    /// Trained rows.
    pub(super) samples: u64,
    invalidations: u64,
}

/// A checkpoint that exists.
#[derive(Debug)]
pub(super) struct WrittenCheckpoint {
    pub(super) name: String,
    pub(super) manifest: Manifest,
    pub(super) seconds: f64,
    /// Why some old checkpoints could not be deleted.
    pub(super) not_deleted: Option<CheckpointError>,
    pause: PausePoint,
    samples: u64,
    invalidations: u64,
}

impl Checkpoints {
    /// Opens the checkpoint path; `None` if the job has no checkpoints. `run` names this run across
    /// all its attempts.
    pub(super) fn open(plan: &Arc<JobPlan>, run: &str) -> Result<Option<Self>, RoleError> {
        let Some(settings) = plan.checkpoint.clone() else { return Ok(None) };
        let directory = settings.directory()?;
        Ok(Some(Self {
            lease: PathLease::new(&directory, run, &plan.name),
            directory,
            settings,
            identity: plan.identity(),
            plan: Arc::clone(plan),
            run: run.to_owned(),
            damaged: Vec::new(),
            faults: Vec::new(),
            base: None,
            deltas: 0,
            full_bytes: 0,
            last: None,
            known: Vec::new(),
            invalidations: 0,
            is_tidy: false,
        }))
    }

    /// The path.
    pub(super) fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Bytes of the last full checkpoint; 0 if none is known.
    pub(super) fn full_bytes(&self) -> u64 {
        self.full_bytes
    }

    /// The lease on the path.
    pub(super) fn lease(&self) -> Arc<PathLease> {
        Arc::clone(&self.lease)
    }

    /// Checks that this process can write, read and delete files in the path, before anything is
    /// trained.
    pub(super) async fn probe(&self) -> Result<(), RoleError> {
        let file = format!("probe-{}", CheckpointId::random());
        let mut backoff = DENIED_BACKOFF_SECONDS.into_iter();
        while let Err(error) = self.directory.probe(&file).await {
            let is_local = self.directory.is_local();
            match backoff.next().filter(|_| !is_local && error.is_denied()) {
                Some(seconds) => tokio::time::sleep(Duration::from_secs(seconds)).await,
                None => return Err(CheckpointPlan::probe_failed(error, is_local)),
            }
        }
        Ok(())
    }

    /// Finds the checkpoint to resume from; `None` if training starts from step 0, because the path
    /// holds no finished checkpoint. Also returns warnings about checkpoints that cannot be used.
    ///
    /// # Errors
    /// [`RoleError::Input`] if there are finished checkpoints and none can be used. Training from
    /// step 0 would hide that loss. Also errors of the storage.
    pub(super) async fn find(&mut self) -> Result<(Option<ResumePoint>, Vec<String>), RoleError> {
        if !self.settings.resume_latest {
            self.refuse_another_runs().await?;
        }
        let rollback = Record::read(&self.directory).await?;
        if let Some(record) = &rollback {
            // The coordinator that went back may have died before it had deleted them.
            withdraw(&self.directory, record.withdrawn()).await?;
        }
        let mut warnings = Vec::new();
        loop {
            let latest = latest_good(&self.directory, Some(&self.identity), Depth::Sizes, &self.damaged).await?;
            warnings.extend(latest.skipped.into_iter().map(|skipped| self.skip(skipped)));
            let Some(checkpoint) = latest.checkpoint else {
                return if self.faults.is_empty() { Ok((None, warnings)) } else { Err(self.none_usable()) };
            };
            match self.resumed(&checkpoint).await {
                Ok(mut resumed) => {
                    if let Some(record) = &rollback {
                        resumed.state = resumed.state.behind(record);
                    }
                    return Ok((Some(resumed), warnings));
                }
                Err(RoleError::Checkpoint(reason)) if reason.is_checkpoints_fault() => {
                    warnings.push(self.exclude(&checkpoint.manifest().directory(), reason.to_string()));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Finds an older checkpoint, after one turned out to be damaged.
    ///
    /// # Errors
    /// [`RoleError::Input`] if no other checkpoint can be used. Also errors of the storage.
    pub(super) async fn find_older(&mut self) -> Result<(ResumePoint, Vec<String>), RoleError> {
        let (older, warnings) = self.find().await?;
        older.map(|older| (older, warnings)).ok_or_else(|| self.none_usable())
    }

    /// Excludes a checkpoint that a search has skipped. Returns the warning about it.
    fn skip(&mut self, Skipped { name, reason }: Skipped) -> String {
        // A crash during the first checkpoint leaves an unfinished one. No saved state is lost
        // then, so training may start from step 0.
        if matches!(reason, CheckpointError::Unfinished { .. }) {
            self.mark_damaged(&name);
            return skip_warning(&name, &reason.to_string());
        }
        self.exclude(&name, reason.to_string())
    }

    /// Excludes a finished checkpoint that turned out to be damaged. Returns the warning about it.
    pub(super) fn exclude(&mut self, name: &str, reason: String) -> String {
        self.mark_damaged(name);
        let warning = skip_warning(name, &reason);
        // All deltas that build on one damaged file have one reason.
        if !self.faults.contains(&reason) {
            self.faults.push(reason);
        }
        warning
    }

    /// The error of a path whose checkpoints are all damaged.
    fn none_usable(&self) -> RoleError {
        let listed = self.faults.iter().take(LISTED_FAULTS).map(String::as_str).collect::<Vec<_>>().join("; ");
        let others = match self.faults.len().saturating_sub(LISTED_FAULTS) {
            0 => String::new(),
            others => format!("; and {others} other faults"),
        };
        RoleError::Input(format!(
            "spec.checkpoint.path {} holds checkpoints, and none of them can be used: {listed}{others}; expected at least one whole checkpoint: restore the files from a copy, or set another path to start from initial values",
            self.settings.path
        ))
    }

    /// Excludes a checkpoint, and makes the next one of its name replace it.
    pub(super) fn mark_damaged(&mut self, name: &str) {
        self.damaged.push(name.to_owned());
    }

    /// The names of damaged checkpoints that were not replaced since.
    pub(super) fn damaged(&self) -> &[String] {
        &self.damaged
    }

    /// The parameter servers hold exactly the rows of this checkpoint.
    pub(super) fn restored(&mut self, resumed: &ResumePoint) {
        self.is_tidy = false;
        self.base = Some(resumed.base.clone());
        self.deltas = resumed.deltas;
        self.full_bytes = resumed.full_bytes;
        self.known = vec![(resumed.name.clone(), resumed.state.samples)];
    }

    /// Prepares the next attempt to go back after a fall: writes the record, and deletes the
    /// checkpoints that are newer than the good one. `None` if no checkpoint is good. A second call
    /// of an attempt does not go back again.
    ///
    /// # Errors
    /// Errors of the storage and of the lease on the path. Call it again.
    pub(super) async fn go_back(
        &self,
        fall: &Fall,
        attempt: u64,
        now_millis: u64,
    ) -> Result<Option<Record>, RoleError> {
        let before = Record::read(&self.directory).await?;
        self.lease.confirm().await?;
        let record = match before {
            Some(own) if own.is_of(attempt) => own,
            before => {
                let Some(good) = self.newest_good(fall.good_before).await? else { return Ok(None) };
                let record = Record::new(before.as_ref(), good, fall, attempt, now_millis);
                record.write(&self.directory).await?;
                record
            }
        };
        withdraw(&self.directory, record.withdrawn()).await?;
        Ok(Some(record))
    }

    /// The newest checkpoint of at most `good_before` trained rows.
    async fn newest_good(&self, good_before: u64) -> Result<Option<Good>, RoleError> {
        let mut passed_over = self.damaged.clone();
        loop {
            let latest = latest_good(&self.directory, Some(&self.identity), Depth::Sizes, &passed_over).await?;
            let Some(checkpoint) = latest.checkpoint else { return Ok(None) };
            let manifest = checkpoint.manifest();
            match self.resumed(&checkpoint).await {
                Ok(found) if found.state.samples <= good_before && found.state.stream.is_some() => {
                    let (name, step) = (found.name, manifest.step);
                    return Ok(Some(Good { name, step, newer: self.newer_than(step).await? }));
                }
                Ok(_) => {}
                Err(RoleError::Checkpoint(reason)) if reason.is_checkpoints_fault() => {}
                Err(error) => return Err(error),
            }
            passed_over.push(manifest.directory());
        }
    }

    /// The finished checkpoints of the job after a step.
    async fn newer_than(&self, step: u64) -> Result<Vec<CheckpointId>, RoleError> {
        let listed = list(&self.directory).await?.into_iter().filter(|listed| listed.step > step);
        let own = listed.filter_map(|listed| match listed.state {
            ListedState::Complete(manifest) => Some(*manifest),
            _ => None,
        });
        Ok(own.filter(|own| own.identity.difference(&self.identity).is_none()).map(|own| own.id).collect())
    }

    async fn resumed(&self, checkpoint: &Checkpoint) -> Result<ResumePoint, RoleError> {
        let name = checkpoint.manifest().directory();
        // Dense workers read their parameters later, when it is too late to choose another
        // checkpoint. So damage must be found now.
        checkpoint.dense().await?;
        let bytes = checkpoint.state(snapshot::NAME).await?;
        Ok(ResumePoint {
            state: Snapshot::decode(&self.plan, &name, &bytes)?,
            is_of_this_run: self.is_of_this_run(checkpoint.manifest()),
            base: Base { directory: name.clone(), id: checkpoint.manifest().id },
            deltas: checkpoint.chain().len() as u32 - 1,
            full_bytes: checkpoint.chain().first().map_or(0, Manifest::bytes),
            name,
        })
    }

    /// Whether an attempt of this run wrote the checkpoint.
    fn is_of_this_run(&self, manifest: &Manifest) -> bool {
        manifest.info.get(RUN).and_then(|run| run.as_str()) == Some(&self.run)
    }

    /// Refuses a path with checkpoints of another run, because a path can hold the checkpoints of
    /// only one run.
    async fn refuse_another_runs(&self) -> Result<(), RoleError> {
        for listed in list(&self.directory).await?.into_iter().rev() {
            let ListedState::Complete(manifest) = listed.state else { continue };
            if !self.is_of_this_run(&manifest) {
                let resume = match manifest.identity.difference(&self.identity) {
                    None => "set spec.checkpoint.resume to `latest` to resume from it".to_owned(),
                    Some(difference) => format!("{difference}, so this job cannot resume from it"),
                };
                return Err(RoleError::Input(format!(
                    "spec.checkpoint.path {} holds checkpoints of another run, the newest of them {}: {resume}; to train from the start, set another path, or save none with --set spec.checkpoint=null",
                    self.settings.path, listed.name
                )));
            }
        }
        Ok(())
    }

    /// Begins a checkpoint at the boundary `at`. Training waits meanwhile, so this does not access
    /// the storage.
    pub(super) fn begin(&self, at: Boundary, mode: &'static str) -> PendingCheckpoint {
        // A delta at the step of its base would have the base's directory.
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
        PendingCheckpoint {
            ticket,
            writer,
            started: Instant::now(),
            pause: (at, mode),
            samples: 0,
            invalidations: self.invalidations,
        }
    }

    /// The name of the last checkpoint, if it is of the same boundary and mode.
    pub(super) fn existing_at(&self, at: Boundary, mode: &'static str) -> Option<String> {
        self.last.as_ref().filter(|(pause, _)| *pause == (at, mode)).map(|(_, name)| name.clone())
    }

    /// Writes a checkpoint: waits for all parts, then commits or aborts it. The parts are written
    /// while the path is checked: they have names of their own. Afterwards deletes old checkpoints,
    /// which may take as long as the write. A delta in a tidy path makes no other checkpoint old,
    /// so nothing is listed after it. `good_before` is given if training may go back: the last
    /// checkpoint of at most so many rows is not old, nor a newer one. The future does not borrow
    /// `self`.
    pub(super) fn write(
        &mut self,
        begun: PendingCheckpoint,
        good_before: Option<u64>,
        state: Vec<u8>,
        dense: Option<DenseFile>,
        servers: &[Channel],
    ) -> impl Future<Output = Result<WrittenCheckpoint, RoleError>> + Send + use<> {
        let (directory, servers) = (self.directory.clone(), servers.to_vec());
        let (identity, keep) = (self.identity.clone(), self.settings.keep);
        let (lease, exclude) = (self.lease(), self.damaged_but(&begun.ticket.directory));
        let kept = good_before.map_or(&[][..], |before| from_the_last_good(&self.known, before)).to_vec();
        let names: Vec<String> = kept.iter().map(|(name, _)| name.clone()).collect();
        self.known = kept;
        let stays_tidy = self.is_tidy && self.damaged.is_empty() && begun.ticket.base.is_some();
        async move {
            let PendingCheckpoint { writer, ticket, started, pause, samples, invalidations } = begun;
            let checks = async {
                lease.confirm().await?;
                Ok::<_, RoleError>(writer.check().await?)
            };
            match futures::try_join!(checks, files(&directory, &ticket, state, dense, &servers)) {
                Ok(((), files)) => {
                    lease.confirm().await?;
                    let manifest = writer.commit(files).await?;
                    let seconds = started.elapsed().as_secs_f64();
                    let not_deleted = match stays_tidy {
                        true => None,
                        false => retain(&directory, &identity, keep, &exclude, &names).await.err(),
                    };
                    Ok(WrittenCheckpoint {
                        name: ticket.directory,
                        manifest,
                        seconds,
                        not_deleted,
                        pause,
                        samples,
                        invalidations,
                    })
                }
                Err(error) => {
                    if let Err(left) = writer.abort().await {
                        tracing::warn!(%left, "the parts of an aborted checkpoint cannot be deleted");
                    }
                    Err(error)
                }
            }
        }
    }

    /// Makes this checkpoint the base of the next delta.
    pub(super) fn written(&mut self, written: &WrittenCheckpoint) {
        if written.manifest.base.is_some() {
            self.deltas += 1;
        } else {
            self.deltas = 0;
            self.full_bytes = written.manifest.bytes();
        }
        let base = Base { directory: written.name.clone(), id: written.manifest.id };
        self.base = (written.invalidations == self.invalidations).then_some(base);
        self.last = Some((written.pause, written.name.clone()));
        self.known.retain(|(name, _)| *name != written.name);
        self.known.push((written.name.clone(), written.samples));
        self.damaged = self.damaged_but(&written.name);
        self.is_tidy = written.not_deleted.is_none();
    }

    /// The damaged checkpoints except `written`, which replaces a damaged one of the same name.
    fn damaged_but(&self, written: &str) -> Vec<String> {
        self.damaged.iter().filter(|name| *name != written).cloned().collect()
    }

    /// Makes the next checkpoint full. After a migration or a restart, servers do not know which
    /// rows of their slots have changed.
    pub(super) fn force_full(&mut self) {
        self.invalidations += 1;
        self.base = None;
    }

    /// Makes the next checkpoint full, because this one was aborted.
    pub(super) fn aborted(&mut self) {
        self.base = None;
        self.is_tidy = false;
    }
}

fn skip_warning(name: &str, reason: &str) -> String {
    format!("checkpoint {name} is skipped: {reason}")
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
        dense.await.map_err(|_| RoleError::Stopped)?.map(Some)
    };
    let state = async { Ok::<_, RoleError>(save_state(directory, ticket, snapshot::NAME, state).await?) };
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

/// Freezes the rows on every parameter server.
pub(super) async fn freeze(
    ticket: &Ticket,
    partition: bool,
    dense_since: u64,
    servers: &[Channel],
) -> Result<Vec<v1::Applied>, RoleError> {
    let freeze = v1::Freeze { ticket: Some(ticket::write(ticket)), partition, dense_since };
    let calls = servers.iter().map(|server| message::call_server(server, freeze.clone(), || Ok(Vec::new())));
    Ok(try_join_all(calls).await?.into_iter().map(|(frozen, _)| frozen.applied.unwrap_or_default()).collect())
}

/// Tells every parameter server whether the checkpoint was saved, and that it may drop its frozen
/// rows.
pub(super) async fn thaw(ticket: v1::Ticket, saved: bool, servers: &[Channel]) -> Result<(), RoleError> {
    let thaw = v1::Thaw { ticket: Some(ticket), saved };
    let calls = servers.iter().map(|server| message::call_server(server, thaw.clone(), || Ok(Vec::new())));
    try_join_all(calls).await.map(drop)
}

/// The result of restoring rows.
pub(super) enum RowsRestored {
    All { rows: u64 },
    Damaged(String),
}

/// Makes every parameter server restore the rows of its slots from a checkpoint of this job, or
/// take them over from another job's.
pub(super) async fn restore_rows(from: &v1::Restore, servers: &[Channel]) -> Result<RowsRestored, RoleError> {
    let request = v1::RestoreRows { checkpoint: from.checkpoint.clone(), from: from.from };
    let calls = servers.iter().map(|server| message::call(server, request.clone(), Vec::new(), WHOLE_JOB));
    let replies = try_join_all(calls).await?;
    match replies.iter().find(|(reply, _)| !reply.damaged.is_empty()) {
        Some((reply, _)) => Ok(RowsRestored::Damaged(reply.damaged.clone())),
        None => Ok(RowsRestored::All { rows: replies.iter().map(|(reply, _)| reply.rows).sum() }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::path::Path;

    use rectrain_modes::GlobalStep;

    use super::*;
    use rectrain_protocol::plan::small_plan;

    fn checkpoints(path: &Path, full_every: u32) -> Checkpoints {
        let path = format!("spec.checkpoint.path={}", path.display());
        let full_every = format!("spec.checkpoint.fullEvery={full_every}");
        let plan = small_plan(&[&path, &full_every, "spec.checkpoint.keep=1"]);
        Checkpoints::open(&Arc::new(plan), "run").unwrap().unwrap()
    }

    /// Writes a checkpoint without rows, and returns the names of those that are there.
    async fn write(checkpoints: &mut Checkpoints, step: u64) -> Vec<String> {
        let begun = checkpoints.begin(Boundary { step: GlobalStep(step), next_row: 0 }, "sync");
        let written = checkpoints.write(begun, None, b"state".to_vec(), None, &[]).await.unwrap();
        assert!(written.not_deleted.is_none());
        checkpoints.written(&written);
        list(&checkpoints.directory).await.unwrap().into_iter().map(|listed| listed.name).collect()
    }

    #[tokio::test]
    async fn a_delta_in_a_tidy_path_deletes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let leave = || {
            let left = folder.path().join(directory_name(8, Kind::Full));
            std::fs::create_dir_all(&left).unwrap();
            std::fs::write(left.join("state"), "cut short").unwrap();
        };
        let mut checkpoints = checkpoints(folder.path(), 1000);
        let [first, second, third, fourth, left] =
            [(1, Kind::Full), (2, Kind::Delta), (3, Kind::Delta), (4, Kind::Full), (8, Kind::Full)]
                .map(|(step, kind)| directory_name(step, kind));
        leave();
        assert_eq!(write(&mut checkpoints, 1).await, [&*first], "another process may have left something");
        leave();
        assert_eq!(write(&mut checkpoints, 2).await, [&*first, &second, &left], "nothing is looked for");
        checkpoints.mark_damaged(&left);
        assert_eq!(write(&mut checkpoints, 3).await, [&*first, &second, &third]);
        leave();
        checkpoints.aborted();
        assert_eq!(write(&mut checkpoints, 4).await, [&*fourth], "a full one makes the others old");
    }

    #[tokio::test]
    async fn writing_a_checkpoint_deletes_old_ones_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut checkpoints = checkpoints(folder.path(), 1);
        // The second checkpoint replaces a damaged one.
        checkpoints.mark_damaged(&directory_name(2, Kind::Full));
        for step in 1..=3 {
            let begun = checkpoints.begin(Boundary { step: GlobalStep(step), next_row: 0 }, "sync");
            let written = checkpoints.write(begun, None, b"state".to_vec(), None, &[]).await.unwrap();
            assert!(written.not_deleted.is_none());
            let there = list(&checkpoints.directory).await.unwrap();
            let there: Vec<&str> = there.iter().map(|listed| &*listed.name).collect();
            assert_eq!(there, [&*written.name], "after step {step}");
            checkpoints.written(&written);
            assert_eq!(checkpoints.full_bytes(), written.manifest.bytes());
        }
        assert!(checkpoints.damaged().is_empty());
    }

    /// Writes a full checkpoint of so many rows, without rows and without dense parameters.
    async fn write_of(checkpoints: &mut Checkpoints, step: u64, samples: u64, good_before: u64) -> CheckpointId {
        let mut begun = checkpoints.begin(Boundary { step: GlobalStep(step), next_row: 0 }, "sync");
        begun.samples = samples;
        let written = checkpoints.write(begun, Some(good_before), b"state".to_vec(), None, &[]).await.unwrap();
        assert!(written.not_deleted.is_none());
        checkpoints.written(&written);
        written.manifest.id
    }

    #[tokio::test]
    async fn the_last_good_checkpoint_stays_and_newer_ones_are_withdrawn() {
        let folder = tempfile::tempdir().unwrap();
        let mut checkpoints = checkpoints(folder.path(), 1);
        let mut ids = Vec::new();
        // The latest good window began after 250 rows: the checkpoint of 200 rows is the last good
        // one.
        for (step, good_before) in [(1, 0), (2, 0), (3, 150), (4, 250)] {
            ids.push(write_of(&mut checkpoints, step, 100 * step, good_before).await);
        }
        let there = async |directory: &Directory| -> Vec<u64> {
            list(directory).await.unwrap().into_iter().map(|listed| listed.step).collect()
        };
        assert_eq!(there(&checkpoints.directory).await, [2, 3, 4], "the manifest keeps one");
        let newer = checkpoints.newer_than(2).await.unwrap();
        assert_eq!(newer, ids[2..]);
        let withdrawn = withdraw(&checkpoints.directory, &newer).await.unwrap();
        assert_eq!(withdrawn, [4, 3].map(|step| directory_name(step, Kind::Full)), "the newest first");
        assert_eq!(there(&checkpoints.directory).await, [2]);
        assert!(withdraw(&checkpoints.directory, &newer).await.unwrap().is_empty(), "a second call does no harm");
    }
}
