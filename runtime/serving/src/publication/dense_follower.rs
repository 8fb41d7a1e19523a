//! Follows a publication path without its rows, for a server whose rows are elsewhere. It reads the
//! dense part of full models, and whole deltas. It goes to a model once the rows of that model
//! can be read, and knows the rows that differ from the model before.

use std::collections::VecDeque;
use std::sync::Arc;

use rectrain_storage::Directory;

use super::delta::{Base, GroupChanges};
use super::follower::{check, check_features, first_latest, is_near, load_full, next_latest, read_delta};
use super::latest::Latest;
use super::names;
use crate::error::ServingError;
use crate::export::Part;
use crate::model::Model;

/// The most newer models that wait for their rows. Beyond them the changes of the oldest ones are
/// forgotten.
const MOST_NEWER: usize = 32;

/// The dense part of a published model.
#[derive(Debug, Clone)]
pub struct DenseVersion {
    /// The model, with tables without rows.
    pub model: Arc<Model>,
    /// Its sequence number and the digest of its publication.
    pub base: Base,
    /// The time of its publication, in milliseconds since 1970.
    pub published_at: u64,
}

/// The rows that differ between two models.
#[derive(Debug, Clone)]
pub enum RowChanges {
    /// Any row may differ.
    Unknown,
    /// The changes of deltas, oldest first, each by row group.
    Known(Vec<Arc<[GroupChanges]>>),
}

impl RowChanges {
    /// These changes, and then later ones. Too many become unknown.
    #[must_use]
    pub fn then(self, later: Self) -> Self {
        match (self, later) {
            (Self::Known(mut changes), Self::Known(later)) if changes.len() + later.len() <= MOST_NEWER => {
                changes.extend(later);
                Self::Known(changes)
            }
            _ => Self::Unknown,
        }
    }
}

/// The way to a newer model.
#[derive(Debug)]
pub struct DenseUpdate {
    /// The rows that differ from the model before.
    pub changes: RowChanges,
    /// Whether a full model is on the way.
    pub loaded: bool,
    /// Deltas on the way.
    pub deltas: u64,
}

/// A newer model whose rows may not be readable yet.
#[derive(Debug)]
struct Newer {
    version: DenseVersion,
    /// The changes from the model before it. `None` if any row may differ.
    changes: Option<Arc<[GroupChanges]>>,
}

/// See the module documentation.
#[derive(Debug)]
pub struct DenseFollower {
    directory: Directory,
    version: DenseVersion,
    /// Oldest first.
    newer: VecDeque<Newer>,
}

impl DenseFollower {
    /// Loads the dense part of the newest full model, and the deltas since. If a delta cannot be
    /// used, the second value says why.
    ///
    /// # Errors
    /// As [`Follower::open`](super::Follower::open).
    pub async fn open(directory: Directory) -> Result<(Self, Option<ServingError>), ServingError> {
        let latest = first_latest(&directory).await?;
        let version = load_dense(&directory, &latest).await?;
        let mut follower = Self { directory, version, newer: VecDeque::new() };
        let stopped = follower.catch_up(&latest).await.err();
        Ok((follower, stopped))
    }

    /// The model that is served.
    #[must_use]
    pub fn version(&self) -> &DenseVersion {
        &self.version
    }

    /// The sequence number of the newest model that was read.
    #[must_use]
    pub fn newest(&self) -> u64 {
        self.tip().base.sequence
    }

    /// Reads the models that were published since the last look.
    ///
    /// # Errors
    /// As [`Follower::poll`](super::Follower::poll).
    pub async fn look(&mut self) -> Result<(), ServingError> {
        let latest = next_latest(&self.directory).await?;
        let own = &self.tip().base;
        if latest.model == *own {
            return Ok(());
        }
        if is_near(own, &latest) {
            match self.catch_up(&latest).await {
                Ok(()) => return Ok(()),
                Err(error) if latest.full <= self.newest() => return Err(error),
                Err(_) => {}
            }
        }
        let version = load_dense(&self.directory, &latest).await?;
        check_features(&self.directory, &latest, &self.version.model, &version.model)?;
        self.push(Newer { version, changes: None });
        self.catch_up(&latest).await
    }

    /// Goes to the newest model whose rows can be read. `None` if that is the served one.
    pub fn advance(&mut self, mut has_rows: impl FnMut(&Base) -> bool) -> Option<DenseUpdate> {
        let place = self.newer.iter().rposition(|newer| has_rows(&newer.version.base))?;
        let mut update = DenseUpdate { changes: RowChanges::Known(Vec::new()), loaded: false, deltas: 0 };
        for Newer { version, changes } in self.newer.drain(..=place) {
            update.loaded |= changes.is_none();
            update.deltas += u64::from(changes.is_some());
            let changes = changes.map_or(RowChanges::Unknown, |changes| RowChanges::Known(vec![changes]));
            update.changes = update.changes.then(changes);
            self.version = version;
        }
        Some(update)
    }

    fn tip(&self) -> &DenseVersion {
        self.newer.back().map_or(&self.version, |newer| &newer.version)
    }

    fn push(&mut self, newer: Newer) {
        self.newer.push_back(newer);
        while self.newer.len() > MOST_NEWER {
            self.newer.pop_front();
            if let Some(first) = self.newer.front_mut() {
                first.changes = None;
            }
        }
    }

    /// Reads the deltas up to the newest model.
    async fn catch_up(&mut self, latest: &Latest) -> Result<(), ServingError> {
        for sequence in self.newest() + 1..=latest.model.sequence {
            let (delta, digest) = read_delta(&self.directory, sequence).await?;
            let DenseVersion { model, base, .. } = self.tip();
            let fault = ServingError::publication(self.directory.name_of(&names::delta(sequence)));
            check(base, model, &delta).map_err(fault)?;
            let model = Arc::new(model.with(delta.step, model.tables.clone(), delta.parameters));
            let base = Base { sequence, digest };
            let version = DenseVersion { model, base, published_at: delta.published_at };
            self.push(Newer { version, changes: Some(delta.groups.into()) });
        }
        Ok(())
    }
}

async fn load_dense(directory: &Directory, latest: &Latest) -> Result<DenseVersion, ServingError> {
    let loaded = load_full(directory, latest, Part::Dense).await?;
    Ok(DenseVersion { model: loaded.model, base: loaded.base, published_at: loaded.published_at })
}
