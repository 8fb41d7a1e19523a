//! Follows a publication path: the newest full model, and then each delta in order. A model in
//! memory never changes. Each delta makes another one, so a reader sees the rows and the dense
//! parameters of one step. Both share the values that did not change: see [`VersionedTable`].
//! Newer full models are loaded only if the deltas cannot be applied, or are too many.
//!
//! A follower may keep a part of the rows, such as a shard's, and the last few models.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use rectrain_storage::Directory;

use super::delta::{Base, Delta, GroupChanges};
use super::latest::{LATEST, Latest};
use super::names;
use super::publisher::read_latest;
use crate::content::{GroupContent, RowSum, content_digest};
use crate::error::ServingError;
use crate::export::{FoundExport, Part, load_from};
use crate::model::Model;
use crate::table::KeyRange;
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
    /// The digest of the rows in memory and of the dense parameters. If all rows are kept, a full
    /// export of the same checkpoint has the same `contentDigest`.
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
    /// The rows that are kept.
    keys: KeyRange,
    version: ServedVersion,
    /// The models before, oldest first.
    earlier: VecDeque<ServedVersion>,
    /// The most models in `earlier`.
    most_earlier: usize,
}

impl Follower {
    /// Loads the newest model of a path. If a delta cannot be used, the model before it is served
    /// for now, and the update says why.
    ///
    /// # Errors
    /// [`ServingError::Publication`] if no model was published there; a full model that cannot be
    /// used; errors of the storage.
    pub async fn open(directory: Directory) -> Result<(Self, Update), ServingError> {
        Self::open_part(directory, KeyRange::ALL, 1).await
    }

    /// As [`Self::open`], with the rows of some keys only. The last `versions` models stay in
    /// memory, and share the rows that did not change.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_part(
        directory: Directory,
        keys: KeyRange,
        versions: usize,
    ) -> Result<(Self, Update), ServingError> {
        let latest = first_latest(&directory).await?;
        let version = load_full(&directory, &latest, part_of(keys)).await?;
        let most_earlier = versions.saturating_sub(1);
        let mut follower = Self { directory, keys, version, earlier: VecDeque::new(), most_earlier };
        let mut update = Update { loaded: true, ..Update::default() };
        update.stopped = follower.catch_up(&latest, &mut update.deltas).await.err();
        Ok((follower, update))
    }

    /// The model that is served.
    #[must_use]
    pub fn version(&self) -> &ServedVersion {
        &self.version
    }

    /// The models in memory, oldest first.
    pub fn versions(&self) -> impl Iterator<Item = &ServedVersion> {
        self.earlier.iter().chain([&self.version])
    }

    /// Another model is the newest one from now on.
    fn advance(&mut self, next: ServedVersion) {
        self.earlier.push_back(std::mem::replace(&mut self.version, next));
        while self.earlier.len() > self.most_earlier {
            self.earlier.pop_front();
        }
    }

    /// Goes to the newest model. `None` if it is served already. A model that cannot be used is not
    /// taken, and the one before stays.
    ///
    /// # Errors
    /// The reason why there is no newer model. A file is missing or damaged, a value is not finite,
    /// the model has other features, or the storage failed. The next call tries again. A newer full
    /// model ends the trouble.
    pub async fn poll(&mut self) -> Result<Option<Update>, ServingError> {
        let latest = next_latest(&self.directory).await?;
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
        let next = load_full(&self.directory, latest, part_of(self.keys)).await?;
        check_features(&self.directory, latest, &self.version.model, &next.model)?;
        self.advance(next);
        update.loaded = true;
        self.catch_up(latest, &mut update.deltas).await
    }

    /// Applies the deltas up to the newest model, and counts them.
    async fn catch_up(&mut self, latest: &Latest, applied: &mut u64) -> Result<(), ServingError> {
        for sequence in self.version.base.sequence + 1..=latest.model.sequence {
            let (delta, digest) = read_delta(&self.directory, sequence).await?;
            let fault = ServingError::publication(self.directory.name_of(&names::delta(sequence)));
            let next = self.version.with(delta, digest, self.keys).map_err(fault)?;
            self.advance(next);
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

    /// The content of the rows that are kept, by row group.
    #[must_use]
    pub fn content(&self) -> Vec<GroupContent> {
        self.model.tables.iter().zip(&self.sums).map(|(table, sum)| GroupContent::of(table, *sum)).collect()
    }

    /// The model after a delta with this digest, with the rows of some keys. The error is the
    /// problem with the delta.
    fn with(&self, delta: Delta, digest: String, keys: KeyRange) -> Result<Self, String> {
        check(&self.base, &self.model, &delta)?;
        let (tables, sums) = with_changes(&self.model.tables, &self.sums, &delta.groups, keys);
        let model = self.model.with(delta.step, tables, delta.parameters);
        Ok(Self {
            content_digest: content_digest(&model.tables, &sums, &model.parameters),
            model: Arc::new(model),
            base: Base { sequence: delta.sequence, digest },
            published_at: delta.published_at,
            sums,
        })
    }
}

/// The tables of all row groups and their sums after changes. Only the rows of some keys join.
fn with_changes(
    tables: &[VersionedTable],
    sums: &[RowSum],
    changes: &[GroupChanges],
    keys: KeyRange,
) -> (Vec<VersionedTable>, Vec<RowSum>) {
    let (mut next, mut sums) = (Vec::with_capacity(tables.len()), sums.to_vec());
    for ((table, sum), changes) in tables.iter().zip(&mut sums).zip(changes) {
        // A range without rows changes nothing.
        let part = (keys != KeyRange::ALL).then(|| changes.rows.within(&keys));
        let rows = part.as_ref().unwrap_or(&changes.rows);
        next.push(table.with_changes(&changes.removed, rows, |key, row| sum.subtract(key, row)));
        rows.rows().for_each(|(key, row)| sum.add(key, row));
    }
    (next, sums)
}

/// Whether a delta changes a model. The error is the problem with the delta.
pub(super) fn check(base: &Base, model: &Model, delta: &Delta) -> Result<(), String> {
    let Base { sequence, digest } = base;
    if delta.base != *base || delta.sequence != sequence + 1 {
        let Base { sequence: other, digest: found } = &delta.base;
        let own = delta.sequence;
        return Err(format!(
            "it is the delta {own} on the model {other} with digest {found}; expected the next one on the model \
             {sequence} with digest {digest}"
        ));
    }
    let dims = |delta: &Delta| delta.groups.iter().map(|group| group.rows.dim()).collect::<Vec<_>>();
    let expected: Vec<usize> = model.tables.iter().map(VersionedTable::dim).collect();
    if dims(delta) != expected {
        return Err(format!("its rows have {:?} values, and the model's have {expected:?}", dims(delta)));
    }
    let (found, expected) = (delta.parameters.len(), model.parameters.len());
    if found != expected {
        return Err(format!("it has {found} dense parameters, and the model has {expected}"));
    }
    if delta.is_finite() { Ok(()) } else { Err(NOT_FINITE.to_owned()) }
}

/// Refuses a model that the requests of the served one do not fit.
pub(super) fn check_features(
    directory: &Directory,
    latest: &Latest,
    served: &Model,
    next: &Model,
) -> Result<(), ServingError> {
    if served.description.answers_as(&next.description) {
        return Ok(());
    }
    let problem = "its model or its features differ from the served ones; start the server anew".to_owned();
    Err(ServingError::Publication { file: directory.name_of(&names::full(latest.full)), problem })
}

/// The delta with a sequence number, and its digest.
pub(super) async fn read_delta(directory: &Directory, sequence: u64) -> Result<(Delta, String), ServingError> {
    let file = names::delta(sequence);
    let fault = ServingError::publication(directory.name_of(&file));
    match directory.read(&file, MAX_DELTA_BYTES).await? {
        Some(bytes) => Delta::decode(&bytes).map_err(|error| fault(error.to_string())),
        None => Err(fault("it does not exist".to_owned())),
    }
}

/// The newest model of a path that may have none.
pub(super) async fn first_latest(directory: &Directory) -> Result<Latest, ServingError> {
    let nothing = || ServingError::Publication {
        file: directory.name().to_owned(),
        problem: format!("it has no {LATEST}, so no model was published there yet"),
    };
    read_latest(directory).await?.ok_or_else(nothing)
}

/// The newest model of a path that had one.
pub(super) async fn next_latest(directory: &Directory) -> Result<Latest, ServingError> {
    let gone = || ServingError::Publication {
        file: directory.name_of(LATEST),
        problem: "it does not exist any more".to_owned(),
    };
    read_latest(directory).await?.ok_or_else(gone)
}

fn part_of(keys: KeyRange) -> Part {
    if keys == KeyRange::ALL { Part::Whole } else { Part::Keys(keys) }
}

/// Whether deltas may lead from the served model to the newest one, in less time than a full model.
pub(super) fn is_near(own: &Base, latest: &Latest) -> bool {
    let is_ahead = latest.model.sequence > own.sequence;
    is_ahead && latest.full.saturating_sub(own.sequence) <= DELTAS_OF_A_FULL
}

const NOT_FINITE: &str = "it has a value that is not finite, so it is not taken";

/// Loads a part of the newest full model.
pub(super) async fn load_full(
    directory: &Directory,
    latest: &Latest,
    part: Part,
) -> Result<ServedVersion, ServingError> {
    let folder = names::full(latest.full);
    let fault = ServingError::publication(directory.name_of(&folder));
    let Some(FoundExport { model, digest, content_digest }) = load_from(directory, &folder, part).await? else {
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
        // The digest covers all rows. A part has passed the digests of the files.
        Some(stated) if part == Part::Whole && stated != version.content_digest => {
            let problem = format!("the digest of its content is {}, and it says {stated}", version.content_digest);
            Err(ServingError::Damaged { file: PathBuf::from(directory.name_of(&folder)), problem })
        }
        _ => Ok(version),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::table::Table;

    /// Distinct keys of the test, spread over all of them.
    const KEYS: u64 = 300;
    const STEP: u64 = u64::MAX / KEYS;

    fn changes(removed: Vec<(u64, u64)>, rows: BTreeMap<u64, i16>) -> GroupChanges {
        let mut ranges: Vec<KeyRange> = Vec::new();
        let mut removed: Vec<KeyRange> = removed
            .into_iter()
            .map(|(first, length)| KeyRange { first: first * STEP, last: (first * STEP).saturating_add(length * STEP) })
            .collect();
        removed.sort_unstable();
        for range in removed {
            if ranges.last().is_none_or(|last| last.last < range.first) {
                ranges.push(range);
            }
        }
        let keys = rows.keys().map(|key| key * STEP).collect();
        let values = rows.values().map(|value| f32::from(*value)).collect();
        GroupChanges { removed: ranges, rows: Table::of(1, keys, values).unwrap() }
    }

    proptest! {
        /// After any deltas, evictions and moved ranges, all shards together have the rows of a map
        /// with the same changes, and no shard has a key of another. Their contents join to the
        /// content of a server that holds everything.
        #[test]
        fn shards_together_are_a_map_of_all_changes(
            shards in 1_u32..6,
            rounds in prop::collection::vec(
                (prop::collection::vec((0..KEYS, 0_u64..40), 0..4), prop::collection::btree_map(0..KEYS, any::<i16>(), 0..120)),
                1..8,
            ),
        ) {
            let empty = || (vec![VersionedTable::new(1)], vec![RowSum::default()]);
            let mut parts: Vec<_> = (0..shards).map(|_| empty()).collect();
            let (mut whole, mut expected) = (empty(), BTreeMap::new());
            for (removed, rows) in rounds {
                let changes = changes(removed, rows);
                expected.retain(|key, _| !changes.removed.iter().any(|range| range.contains(*key)));
                expected.extend(changes.rows.rows().map(|(key, row)| (key, row[0])));
                let changes = [changes];
                whole = with_changes(&whole.0, &whole.1, &changes, KeyRange::ALL);
                let mut joined = GroupContent::default();
                for (shard, part) in (0..).zip(&mut parts) {
                    let keys = KeyRange::of_part(shard, shards);
                    *part = with_changes(&part.0, &part.1, &changes, keys);
                    prop_assert!(part.0[0].rows().all(|(key, _)| keys.contains(key)));
                    prop_assert_eq!(part.1[0], RowSum::of(&part.0[0]));
                    joined.join(&GroupContent::of(&part.0[0], part.1[0]));
                }
                let found: Vec<(u64, f32)> =
                    parts.iter().flat_map(|part| part.0[0].rows()).map(|(key, row)| (key, row[0])).collect();
                prop_assert_eq!(found, expected.iter().map(|(key, value)| (*key, *value)).collect::<Vec<_>>());
                prop_assert_eq!(joined, GroupContent::of(&whole.0[0], whole.1[0]));
            }
        }
    }
}
