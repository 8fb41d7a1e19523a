//! Follows a publication path: the newest full model, and then each delta in order. A model in
//! memory never changes. Each delta makes another one, so a reader sees the rows and the dense
//! parameters of one step. Both share the values that did not change: see [`VersionedTable`].
//! Newer full models are loaded only if the deltas cannot be applied, or are too many.

use std::path::PathBuf;
use std::sync::Arc;

use rectrain_storage::Directory;

use super::delta::{Base, Delta};
use super::latest::{LATEST, Latest};
use super::names;
use super::publisher::read_latest;
use crate::content::{RowSum, content_digest};
use crate::error::ServingError;
use crate::export::{FoundExport, load_from};
use crate::model::Model;
use crate::versioned_table::VersionedTable;

/// The most bytes of a delta.
const MAX_DELTA_BYTES: u64 = 64 << 30;
/// About as many deltas cost the time of a full model. A follower that is further behind a full
/// model loads it.
const DELTAS_OF_A_FULL: u64 = 20;

/// A published model in memory.
#[derive(Debug, Clone)]
pub struct ServedVersion {
    /// The model.
    pub model: Arc<Model>,
    /// Its sequence number and the digest of its publication.
    pub base: Base,
    /// The digest of its rows and dense parameters, computed from memory. A full export of the same
    /// checkpoint has the same `contentDigest`.
    pub content_digest: String,
    /// The time of its publication, in milliseconds since 1970.
    pub published_at: u64,
    /// By row group.
    sums: Vec<RowSum>,
}

/// The way to a newer model.
#[derive(Debug, Default)]
pub struct Update {
    /// Whether a full model was loaded.
    pub loaded: bool,
    /// Deltas that were applied.
    pub deltas: u64,
    /// Why the newest model is not reached yet.
    pub stopped: Option<ServingError>,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Follower {
    directory: Directory,
    version: ServedVersion,
}

impl Follower {
    /// Loads the newest model of a path. If a delta cannot be used, the model before it is served
    /// for now, and the update says why.
    ///
    /// # Errors
    /// [`ServingError::Publication`] if no model was published there; a full model that cannot be
    /// used; errors of the storage.
    pub async fn open(directory: Directory) -> Result<(Self, Update), ServingError> {
        let nothing = || ServingError::Publication {
            file: directory.name().to_owned(),
            problem: format!("it has no {LATEST}, so no model was published there yet"),
        };
        let latest = read_latest(&directory).await?.ok_or_else(nothing)?;
        let version = load_full(&directory, &latest).await?;
        let mut follower = Self { directory, version };
        let mut update = Update { loaded: true, ..Update::default() };
        update.stopped = follower.catch_up(&latest, &mut update.deltas).await.err();
        Ok((follower, update))
    }

    /// The model that is served.
    #[must_use]
    pub fn version(&self) -> &ServedVersion {
        &self.version
    }

    /// Goes to the newest model. `None` if it is served already. A model that cannot be used is not
    /// taken, and the one before stays.
    ///
    /// # Errors
    /// The reason why there is no newer model. A file is missing or damaged, a value is not finite,
    /// the model has other features, or the storage failed. The next call tries again. A newer full
    /// model ends the trouble.
    pub async fn poll(&mut self) -> Result<Option<Update>, ServingError> {
        let gone = || ServingError::Publication {
            file: self.directory.name_of(LATEST),
            problem: "it does not exist any more".to_owned(),
        };
        let latest = read_latest(&self.directory).await?.ok_or_else(gone)?;
        let own = &self.version.base;
        if latest.model == *own {
            return Ok(None);
        }
        let mut update = Update::default();
        let by_deltas = match is_near(own, &latest) {
            true => Some(self.catch_up(&latest, &mut update.deltas).await),
            false => None,
        };
        let ended = match by_deltas {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) if latest.full <= self.version.base.sequence => Err(error),
            _ => self.load_anew(&latest, &mut update).await,
        };
        match ended {
            Err(error) if !update.loaded && update.deltas == 0 => Err(error),
            ended => Ok(Some(Update { stopped: ended.err(), ..update })),
        }
    }

    /// Loads the newest full model, and applies the deltas on it.
    async fn load_anew(&mut self, latest: &Latest, update: &mut Update) -> Result<(), ServingError> {
        let next = load_full(&self.directory, latest).await?;
        self.check_features(latest, &next.model)?;
        self.version = next;
        update.loaded = true;
        self.catch_up(latest, &mut update.deltas).await
    }

    /// Refuses a model that the requests of the served one do not fit.
    fn check_features(&self, latest: &Latest, next: &Model) -> Result<(), ServingError> {
        if self.version.model.description.answers_as(&next.description) {
            return Ok(());
        }
        let problem = "its model or its features differ from the served ones; start the server anew".to_owned();
        Err(ServingError::Publication { file: self.directory.name_of(&names::full(latest.full)), problem })
    }

    /// Applies the deltas up to the newest model, and counts them.
    async fn catch_up(&mut self, latest: &Latest, applied: &mut u64) -> Result<(), ServingError> {
        for sequence in self.version.base.sequence + 1..=latest.model.sequence {
            let file = names::delta(sequence);
            let fault = ServingError::publication(self.directory.name_of(&file));
            let Some(bytes) = self.directory.read(&file, MAX_DELTA_BYTES).await? else {
                return Err(fault("it does not exist".to_owned()));
            };
            let next = Delta::decode(&bytes).map_err(|error| error.to_string());
            self.version = next.and_then(|(delta, digest)| self.version.with(delta, digest)).map_err(fault)?;
            *applied += 1;
        }
        Ok(())
    }
}

impl ServedVersion {
    /// A model that was loaded whole.
    fn of(model: Model, base: Base, published_at: u64) -> Self {
        let sums: Vec<RowSum> = model.tables.iter().map(RowSum::of).collect();
        let content_digest = content_digest(&model.tables, &sums, &model.parameters);
        Self { model: Arc::new(model), base, content_digest, published_at, sums }
    }

    /// The model after a delta with this digest. The error is the problem with the delta.
    fn with(&self, delta: Delta, digest: String) -> Result<Self, String> {
        self.check(&delta)?;
        let (mut tables, mut sums) = (Vec::with_capacity(self.sums.len()), self.sums.clone());
        for ((table, sum), changes) in self.model.tables.iter().zip(&mut sums).zip(&delta.groups) {
            tables.push(table.with_changes(&changes.removed, &changes.rows, |key, row| sum.subtract(key, row)));
            changes.rows.rows().for_each(|(key, row)| sum.add(key, row));
        }
        let model = Model {
            name: self.model.name.clone(),
            job: self.model.job.clone(),
            step: delta.step,
            identity: self.model.identity.clone(),
            description: self.model.description.clone(),
            tables,
            parameters: delta.parameters,
        };
        Ok(Self {
            content_digest: content_digest(&model.tables, &sums, &model.parameters),
            model: Arc::new(model),
            base: Base { sequence: delta.sequence, digest },
            published_at: delta.published_at,
            sums,
        })
    }

    /// Whether a delta changes this model.
    fn check(&self, delta: &Delta) -> Result<(), String> {
        let Base { sequence, digest } = &self.base;
        if delta.base != self.base || delta.sequence != sequence + 1 {
            let Base { sequence: other, digest: found } = &delta.base;
            let own = delta.sequence;
            return Err(format!(
                "it is the delta {own} on the model {other} with digest {found}; expected the next one on the model \
                 {sequence} with digest {digest}"
            ));
        }
        let dims = |delta: &Delta| delta.groups.iter().map(|group| group.rows.dim()).collect::<Vec<_>>();
        let expected: Vec<usize> = self.model.tables.iter().map(VersionedTable::dim).collect();
        if dims(delta) != expected {
            return Err(format!("its rows have {:?} values, and the model's have {expected:?}", dims(delta)));
        }
        let (found, expected) = (delta.parameters.len(), self.model.parameters.len());
        if found != expected {
            return Err(format!("it has {found} dense parameters, and the model has {expected}"));
        }
        if delta.is_finite() { Ok(()) } else { Err(NOT_FINITE.to_owned()) }
    }
}

/// Whether deltas may lead from the served model to the newest one, in less time than a full model.
fn is_near(own: &Base, latest: &Latest) -> bool {
    let is_ahead = latest.model.sequence > own.sequence;
    is_ahead && latest.full.saturating_sub(own.sequence) <= DELTAS_OF_A_FULL
}

const NOT_FINITE: &str = "it has a value that is not finite, so it is not taken";

/// Loads the newest full model.
async fn load_full(directory: &Directory, latest: &Latest) -> Result<ServedVersion, ServingError> {
    let folder = names::full(latest.full);
    let fault = ServingError::publication(directory.name_of(&folder));
    let Some(FoundExport { model, digest, content_digest }) = load_from(directory, &folder).await? else {
        return Err(fault("it does not exist".to_owned()));
    };
    let of_version_1 = (latest.full == latest.model.sequence).then_some(&latest.model.digest);
    if let Some(expected) = latest.full_digest.as_ref().or(of_version_1).filter(|expected| **expected != digest) {
        return Err(fault(format!("its digest is {digest}, and {LATEST} says {expected}")));
    }
    if !model.is_finite() {
        return Err(fault(NOT_FINITE.to_owned()));
    }
    let base = Base { sequence: latest.full, digest: latest.full_base.clone().unwrap_or(digest) };
    let version = ServedVersion::of(model, base, latest.full_published_at);
    match content_digest {
        Some(stated) if stated != version.content_digest => {
            let problem = format!("the digest of its content is {}, and it says {stated}", version.content_digest);
            Err(ServingError::Damaged { file: PathBuf::from(directory.name_of(&folder)), problem })
        }
        _ => Ok(version),
    }
}
