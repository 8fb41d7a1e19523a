//! The durable state of a parameter server, in a directory of shared memory that outlives the
//! process.
//!
//! The directory has the rows, the progress of the current update, and the gradients that were
//! acknowledged but not applied. It also has the mode with its first step and the slot map. If a
//! server is killed, its replacement on the same machine resumes from this state. To the other
//! roles, the server then seems to have been slow.
//!
//! ```text
//! directory ─┬─ rows-0 …, update      the store: rectrain_embedding::Store::in_shared_memory
//!            ├─ gradients/STEP-PIECE  modes with a barrier: a file each, until its step is applied
//!            ├─ first-layer/…         `des`: see `layers`
//!            ├─ …                     modes without a barrier: see `tokens`
//!            └─ standing.json         attempt, mode, first step, slot map; recovery requires it
//! ```
//!
//! A file gets its final name only when it is complete. No file is synced to disk, because the
//! state must outlive the process, but not the machine.

mod contents;
mod layers;
mod tokens;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rectrain_embedding::{Reopened, Store, UpdateLog};
use rectrain_modes::migration::SlotMap;
use rectrain_modes::{DenseHome, TrainingMode};
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

use self::contents::{Reader, Writer, write_contribution};
pub(crate) use self::layers::LeftLayers;
pub(crate) use self::tokens::{LeftTokens, Pushes, RowsStanding, WrittenPush};
use crate::contribution::Contribution;
use crate::half::BufferStanding;
use crate::partition::Partition;
use rectrain_protocol::coordinator_channel::CoordinatorChannel;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::placement::{read_map, write_map};
use rectrain_protocol::plan::JobPlan;

const STANDING: &str = "standing.json";
const GRADIENTS: &str = "gradients";
/// The extension of a file that is still being written.
const UNFINISHED: &str = "part";

/// The state of a server when its mode began.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Standing {
    pub(crate) attempt: u64,
    /// The address of the server. The other roles expect its replacement there, too.
    pub(crate) address: String,
    pub(crate) mode: String,
    pub(crate) step: u64,
    pub(crate) first_row: u64,
    pub(crate) first_piece: u32,
    #[serde(default)]
    dense_since: u64,
    epoch: u64,
    owners: Vec<u32>,
    servers: Vec<u32>,
}

impl Standing {
    pub(crate) fn new(begin: &v1::BeginMode, address: &str, map: &SlotMap) -> Self {
        let v1::SlotMap { epoch, owners, servers } = write_map(map);
        Self {
            attempt: begin.attempt,
            address: address.to_owned(),
            mode: begin.mode.clone(),
            step: begin.step,
            first_row: begin.first_row,
            first_piece: begin.first_piece,
            dense_since: begin.dense_since,
            epoch,
            owners,
            servers,
        }
    }

    pub(crate) fn begin(&self) -> v1::BeginMode {
        v1::BeginMode {
            mode: self.mode.clone(),
            step: self.step,
            first_row: self.first_row,
            first_piece: self.first_piece,
            attempt: self.attempt,
            dense_since: self.dense_since,
        }
    }

    pub(crate) fn map(&self) -> Result<SlotMap, RoleError> {
        let (epoch, owners, servers) = (self.epoch, self.owners.clone(), self.servers.clone());
        read_map("standing", Some(v1::SlotMap { epoch, owners, servers }))
    }
}

/// See the module documentation.
pub(crate) struct Kept {
    directory: PathBuf,
    log: Mutex<UpdateLog>,
    /// The step and piece of each gradient file with its final name. Locked while a file is added
    /// or removed.
    gradients: Mutex<BTreeSet<(u64, u32)>>,
    /// As `gradients`, for the dense gradients of pulled pieces.
    pieces: Mutex<BTreeSet<(u64, u32)>>,
    /// The number of files begun, for unique names of unfinished files.
    begun: AtomicU64,
    is_given_up: AtomicBool,
}

/// The recovered state of a killed server.
pub(crate) struct Left {
    pub(crate) standing: Standing,
    pub(crate) reopened: Reopened,
    pub(crate) gradients: LeftGradients,
    pub(crate) layers: LeftLayers,
    pub(crate) tokens: LeftTokens,
    /// The server's partition of the dense parameters.
    pub(crate) partition: Partition,
}

/// The recovered gradients of a mode with a barrier, of steps that are not applied. Each comes with
/// its step and piece.
pub(crate) struct LeftGradients {
    pub(crate) rows: Vec<(u64, u32, Contribution)>,
    /// With pulled pieces: the gradients of the dense partition.
    pub(crate) dense: Vec<(u64, u32, Vec<f32>)>,
}

/// A parameter server's rows, in shared memory that outlives the process, or in the process's own
/// memory.
pub struct Rows {
    pub(crate) store: Store,
    pub(crate) kept: Option<Kept>,
    pub(crate) left: Option<Left>,
}

impl Rows {
    /// An empty store in the process's own memory.
    ///
    /// # Errors
    /// [`RoleError::Store`] if the plan's store is invalid.
    pub fn none(plan: &JobPlan) -> Result<Self, RoleError> {
        let store = Store::new(plan.store.clone())?;
        store.make_ready();
        Ok(Self { store, kept: None, left: None })
    }

    /// Opens the rows in `directory` if they belong to the coordinator's current attempt, and an
    /// empty store otherwise. If `directory` is unusable, logs a warning and opens an empty store
    /// in the process's own memory.
    ///
    /// # Errors
    /// The coordinator does not answer, or the plan's store is invalid.
    pub async fn in_memory_that_outlives(
        directory: &Path,
        plan: &JobPlan,
        coordinator: &CoordinatorChannel,
    ) -> Result<Self, RoleError> {
        let attempt = match read_standing(directory) {
            None => None,
            Some(_) => {
                let (attempt, _) = coordinator.call(v1::AttemptRequest {}, Vec::new(), CALL_DEADLINE).await?;
                Some(attempt.attempt)
            }
        };
        Self::of_attempt(directory, plan, attempt)
    }

    /// Like [`Self::in_memory_that_outlives`], with the coordinator's attempt already known.
    pub(crate) fn of_attempt(directory: &Path, plan: &JobPlan, attempt: Option<u64>) -> Result<Self, RoleError> {
        if let Some(standing) = read_standing(directory).filter(|standing| Some(standing.attempt) == attempt) {
            match Self::left_in(directory, standing, plan) {
                Ok(rows) => return Ok(rows),
                Err(error) => tracing::warn!(%error, "cannot recover the state of the previous server"),
            }
        }
        match Self::fresh(directory, plan) {
            Ok(rows) => Ok(rows),
            Err(error) => {
                tracing::warn!(%error, "cannot use shared memory: a replacement of this server loses its rows");
                Self::none(plan)
            }
        }
    }

    fn left_in(directory: &Path, standing: Standing, plan: &JobPlan) -> Result<Self, RoleError> {
        let (store, log, reopened) = Store::in_shared_memory(plan.store.clone(), directory)?;
        remove_unfinished(directory)?;
        let (next, dims) = (standing.step + u64::from(log.update()), &plan.layout.group_dims);
        let rows = read_gradients(&directory.join(GRADIENTS), dims, next)?;
        let (partition, buffer) = tokens::read_partition(directory)?;
        if buffer.is_none() && plan.mode_named(&standing.mode).is_none_or(has_buffer) {
            let reason = "the position of the dense partition's buffer is missing".to_owned();
            return Err(RoleError::Inconsistent { message: "standing", reason });
        }
        let tokens = tokens::read_tokens(directory, dims, next, buffer)?;
        let layers = layers::read_layers(directory)?;
        let kept = Kept::new(directory, log);
        let dense = tokens::read_pieces(directory, partition.step().map_or(0, |step| step.0).max(standing.step))?;
        *kept.lock_gradients() = rows.iter().map(|(step, piece, _)| (*step, *piece)).collect();
        *kept.lock_pieces() = dense.iter().map(|(step, piece, _)| (*step, *piece)).collect();
        let gradients = LeftGradients { rows, dense };
        let left = Left { standing, reopened, gradients, layers, tokens, partition };
        Ok(Self { store, kept: Some(kept), left: Some(left) })
    }

    fn fresh(directory: &Path, plan: &JobPlan) -> Result<Self, RoleError> {
        // Remove `standing.json` first. If this process is killed halfway, no later process then
        // recovers from the remaining files.
        remove_standing(directory)?;
        // The directory may be a mount point, which cannot be removed. Remove its entries only.
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let removed = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            removed.map_err(|source| failed("remove", &path, source))?;
        }
        let (store, log, _) = Store::in_shared_memory(plan.store.clone(), directory)?;
        make_folders(directory)?;
        Ok(Self { store, kept: Some(Kept::new(directory, log)), left: None })
    }

    /// Removes `standing.json`, so that no later process recovers from this directory. A server
    /// that ends normally calls this.
    ///
    /// # Errors
    /// `standing.json` cannot be removed.
    pub fn forget(directory: &Path) -> Result<(), RoleError> {
        remove_standing(directory)
    }

    /// Keeps another budget than the plan's: the present one of the job.
    ///
    /// # Errors
    /// [`RoleError::Inconsistent`] if it is not one number above 0.
    pub fn set_budget(&self, budget: v1::TableBudget) -> Result<(), RoleError> {
        crate::table_life::set_budget(&self.store, budget)
    }

    /// The address of the killed server and the attempt that its rows belong to.
    pub fn place(&self) -> Option<(&str, u64)> {
        self.left.as_ref().map(|left| (&*left.standing.address, left.standing.attempt))
    }
}

impl Kept {
    fn new(directory: &Path, log: UpdateLog) -> Self {
        Self {
            directory: directory.to_owned(),
            log: Mutex::new(log),
            gradients: Mutex::default(),
            pieces: Mutex::default(),
            begun: AtomicU64::new(0),
            is_given_up: AtomicBool::new(false),
        }
    }

    /// Begins a mode: from now on a replacement can recover from the directory. `buffer` is the
    /// position of the dense partition's buffer in a mode without a barrier.
    pub(crate) fn begin(&self, standing: &Standing, partition: &Partition, buffer: Option<&BufferStanding>) {
        self.end();
        self.log().restart(0);
        self.keep_partition(partition, buffer);
        self.or_give_up(|| self.stand(standing));
    }

    /// Makes the directory unusable for a recovery, until [`Self::begin`].
    pub(crate) fn end(&self) {
        self.or_give_up(|| self.withdraw());
    }

    /// Replaces the slot map of the durable state.
    pub(crate) fn move_to(&self, map: &SlotMap) {
        self.or_give_up(|| match read_standing(&self.directory) {
            Some(standing) => self.stand(&Standing::new(&standing.begin(), &standing.address, map)),
            None => Ok(()),
        });
    }

    /// Writes gradients. [`Self::forget`] removes them once their step is applied. A late retry may
    /// write them again after that. They then stay until the next step is applied.
    pub(crate) fn keep(&self, step: u64, piece: u32, contribution: &Contribution) {
        self.or_give_up(|| self.write_gradients(step, piece, contribution));
    }

    /// Removes the gradients of all steps before `next`. These steps are applied.
    pub(crate) fn forget(&self, next: u64) {
        self.or_give_up(|| self.remove_gradients(next));
    }

    /// Disables the durable state permanently, and logs one warning. A replacement of this server
    /// then cannot recover the rows.
    pub(crate) fn give_up(&self, reason: &dyn std::fmt::Display) {
        if self.is_given_up.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::warn!(%reason, directory = %self.directory.display(), "shared memory is no longer usable: if this server dies, its rows are lost");
        // Without `standing.json` no recovery uses the other files.
        if let Err(error) = self.withdraw() {
            tracing::warn!(%error, "cannot free the shared memory");
        }
    }

    /// Runs `work`, or returns `None` if the durable state is disabled. An error of `work` disables
    /// it.
    fn or_give_up<T>(&self, work: impl FnOnce() -> Result<T, RoleError>) -> Option<T> {
        if self.is_given_up.load(Ordering::Acquire) {
            return None;
        }
        work().map_err(|error| self.give_up(&error)).ok()
    }

    fn withdraw(&self) -> Result<(), RoleError> {
        remove_standing(&self.directory)?;
        self.remove_gradients(u64::MAX)?;
        self.remove_layers()?;
        self.remove_tokens()
    }

    fn stand(&self, standing: &Standing) -> Result<(), RoleError> {
        let json = serde_json::to_vec(standing).map_err(|error| failed("write", &self.directory, error.into()))?;
        let written = self.write(STANDING, |file| file.write_all(&json))?;
        self.name(&written, STANDING)
    }

    /// The progress of the current update.
    pub(crate) fn log(&self) -> MutexGuard<'_, UpdateLog> {
        self.log.lock()
    }

    fn write_gradients(&self, step: u64, piece: u32, contribution: &Contribution) -> Result<(), RoleError> {
        let name = gradients_name(step, piece);
        let written = self.write(&name, |file| write_contribution(file, contribution))?;
        let mut gradients = self.lock_gradients();
        self.name(&written, &name)?;
        gradients.insert((step, piece));
        Ok(())
    }

    fn remove_gradients(&self, next: u64) -> Result<(), RoleError> {
        let mut gradients = self.lock_gradients();
        while let Some(&(step, piece)) = gradients.first().filter(|(step, _)| *step < next) {
            remove_file(&self.directory.join(gradients_name(step, piece)))?;
            gradients.pop_first();
        }
        Ok(())
    }

    /// Writes the content of the file `name` under a temporary name, and returns that path.
    /// [`Self::name`] then renames it.
    fn write(
        &self,
        name: &str,
        content: impl FnOnce(&mut Writer) -> std::io::Result<()>,
    ) -> Result<PathBuf, RoleError> {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("{name}.{number}.{UNFINISHED}"));
        let write = || {
            let mut file = Writer::with_capacity(1 << 16, std::fs::File::create(&path)?);
            content(&mut file)?;
            file.into_inner().map(drop).map_err(std::io::IntoInnerError::into_error)
        };
        write().map_err(|source| failed("write", &path, source))?;
        Ok(path)
    }

    /// Gives a complete file its final name.
    fn name(&self, written: &Path, name: &str) -> Result<(), RoleError> {
        let path = self.directory.join(name);
        std::fs::rename(written, &path).map_err(|source| failed("name", &path, source))
    }

    fn lock_gradients(&self) -> MutexGuard<'_, BTreeSet<(u64, u32)>> {
        self.gradients.lock()
    }

    fn lock_pieces(&self) -> MutexGuard<'_, BTreeSet<(u64, u32)>> {
        self.pieces.lock()
    }
}

/// Whether the dense partition has a buffer of gradients in a mode.
fn has_buffer(mode: TrainingMode) -> bool {
    mode.dense_home() == DenseHome::Servers && mode != TrainingMode::Pulled
}

/// The step and the piece in the name of a file of gradients.
fn step_and_piece(path: &Path) -> Option<(u64, u32)> {
    let name = path.file_name()?.to_str()?;
    let (step, piece) = name.split_once('-')?;
    Some((step.parse().ok()?, piece.parse().ok()?))
}

fn remove_standing(directory: &Path) -> Result<(), RoleError> {
    remove_file(&directory.join(STANDING))
}

/// Removes a file. A missing file is no error.
fn remove_file(path: &Path) -> Result<(), RoleError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed("remove", path, error)),
        _ => Ok(()),
    }
}

fn make_folders(directory: &Path) -> Result<(), RoleError> {
    [GRADIENTS, layers::FOLDER].into_iter().chain(tokens::FOLDERS).try_for_each(|folder| {
        let folder = directory.join(folder);
        std::fs::create_dir(&folder).map_err(|source| failed("make", &folder, source))
    })
}

/// Removes files that were unfinished when the process was killed. The functions that read the
/// subfolders remove the unfinished files there.
fn remove_unfinished(directory: &Path) -> Result<(), RoleError> {
    for entry in std::fs::read_dir(directory).map_err(|source| failed("read", directory, source))? {
        let path = entry.map_err(|source| failed("read", directory, source))?.path();
        if path.extension().is_some_and(|extension| extension == UNFINISHED) {
            remove_file(&path)?;
        }
    }
    Ok(())
}

fn gradients_name(step: u64, piece: u32) -> String {
    format!("{GRADIENTS}/{step}-{piece}")
}

fn read_standing(directory: &Path) -> Option<Standing> {
    let bytes = std::fs::read(directory.join(STANDING)).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Reads the gradients of steps from `next` on. Removes older and unfinished files.
fn read_gradients(directory: &Path, dims: &[usize], next: u64) -> Result<Vec<(u64, u32, Contribution)>, RoleError> {
    let mut found = Vec::new();
    let entries = std::fs::read_dir(directory).map_err(|source| failed("read", directory, source))?;
    for entry in entries {
        let path = entry.map_err(|source| failed("read", directory, source))?.path();
        match step_and_piece(&path) {
            Some((step, piece)) if step >= next => {
                let bytes = std::fs::read(&path).map_err(|source| failed("read", &path, source))?;
                let mut reader = Reader(&bytes);
                let contribution = reader.contribution(dims).filter(|_| reader.end().is_some());
                let short = || failed("read", &path, std::io::ErrorKind::UnexpectedEof.into());
                found.push((step, piece, contribution.ok_or_else(short)?));
            }
            _ => remove_file(&path)?,
        }
    }
    found.sort_unstable_by_key(|(step, piece, _)| (*step, *piece));
    Ok(found)
}

fn failed(attempt: &str, path: &Path, source: std::io::Error) -> RoleError {
    RoleError::System { attempt: format!("{attempt} {}", path.display()), source }
}

#[cfg(all(test, target_os = "linux"))]
// Helpers outside the test functions unwrap too.
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use rectrain_embedding::{Initializer, RowSpec, SparseOptimizer, StoreConfig, ValueType};
    use rectrain_modes::barrier::SparseGradients;

    use super::*;

    fn kept(directory: &Path) -> Kept {
        let group = RowSpec {
            dim: 2,
            value_type: ValueType::F32,
            optimizer: SparseOptimizer::Sgd { learning_rate: 1.0 },
            life: rectrain_embedding::LifePolicy::KeepAll,
            initializer: Initializer::Constant(0.5),
            zero_columns: 0,
            first_order: None,
            share: None,
        };
        let config = StoreConfig { slots: 2, seed: 1, groups: vec![group], budget: None };
        let (_store, log, _) = Store::in_shared_memory(config, directory).unwrap();
        make_folders(directory).unwrap();
        Kept::new(directory, log)
    }

    fn gradients(key: u64) -> Contribution {
        let gradients = SparseGradients { keys: vec![key, key + 1], values: vec![0.5, -0.25, f32::MIN_POSITIVE, 4.0] };
        let of_layer = vec![key as f32];
        Contribution { groups: vec![gradients], examples: vec![Vec::new()], moment: key, of_layer }
    }

    fn files(directory: &Path) -> usize {
        std::fs::read_dir(directory.join(GRADIENTS)).unwrap().count()
    }

    #[test]
    fn gradients_are_durable_until_their_step_is_applied() {
        let folder = tempfile::tempdir().unwrap();
        let kept = kept(folder.path());
        kept.keep(7, 0, &gradients(1));
        kept.keep(8, 1, &gradients(5));
        kept.forget(8);
        assert_eq!(files(folder.path()), 1);
        let read = || read_gradients(&folder.path().join(GRADIENTS), &[2], 8);
        assert_eq!(read().unwrap(), [(8, 1, gradients(5))]);
        let path = folder.path().join(gradients_name(8, 1));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(read().is_err());
        std::fs::write(&path, &bytes).unwrap();
        // The sender did not receive the acknowledgement and sends the piece again.
        kept.keep(7, 0, &gradients(1));
        kept.forget(9);
        assert_eq!(files(folder.path()), 0);
    }

    #[test]
    fn a_retry_during_the_apply_of_its_step_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let kept = kept(folder.path());
        std::thread::scope(|scope| {
            for _sender in 0..3 {
                scope.spawn(|| (0..300).for_each(|step| kept.keep(step, 0, &gradients(step))));
            }
            scope.spawn(|| (0..3000).for_each(|_| kept.forget(300)));
        });
        kept.forget(300);
        assert_eq!(files(folder.path()), 0);
        assert!(!kept.is_given_up.load(Ordering::Acquire));
    }

    #[test]
    fn a_failed_write_disables_recovery_but_not_training() {
        let folder = tempfile::tempdir().unwrap();
        let kept = kept(folder.path());
        let begin = v1::BeginMode { mode: "sync".to_owned(), attempt: 9, ..v1::BeginMode::default() };
        let standing = Standing::new(&begin, "tcp://127.0.0.1:7000", &SlotMap::even(4, 1));
        kept.begin(&standing, &Partition::default(), None);
        kept.keep(1, 0, &gradients(1));
        std::fs::remove_dir_all(folder.path().join(GRADIENTS)).unwrap();
        kept.keep(1, 1, &gradients(1));
        assert_eq!(read_standing(folder.path()), None);
        kept.begin(&standing, &Partition::default(), None);
        assert_eq!(read_standing(folder.path()), None, "for good");
    }

    #[test]
    fn recovery_requires_a_mode_that_began_and_did_not_end() {
        let folder = tempfile::tempdir().unwrap();
        let kept = kept(folder.path());
        assert_eq!(read_standing(folder.path()), None);
        let begin = v1::BeginMode { mode: "sync".to_owned(), step: 3, attempt: 9, ..v1::BeginMode::default() };
        let standing = Standing::new(&begin, "tcp://127.0.0.1:7000", &SlotMap::even(4, 2));
        kept.begin(&standing, &Partition::default(), None);
        assert_eq!(read_standing(folder.path()), Some(standing.clone()));
        assert_eq!((standing.begin(), standing.map().unwrap()), (begin, SlotMap::even(4, 2)));
        let moved = SlotMap::even(4, 1);
        kept.move_to(&moved);
        assert_eq!(read_standing(folder.path()).unwrap().map().unwrap(), moved);
        kept.keep(3, 0, &gradients(1));
        kept.end();
        assert_eq!((read_standing(folder.path()), files(folder.path())), (None, 0));
        std::fs::write(folder.path().join(STANDING), "{\"attempt\": 9}").unwrap();
        assert_eq!(read_standing(folder.path()), None, "of another version");
    }
}
