//! A predictor whose rows are on shards. It predicts with the code of one that holds everything:
//! only the rows come from elsewhere.

use std::sync::Arc;
use std::time::Instant;

use rectrain_data::Batch;
use rectrain_pooling::PreparedIds;
use rectrain_serving::publication::{Base, DenseVersion, RowChanges};
use rectrain_serving::shard::{push_key, read_values, shard_of};
use rectrain_serving::{GroupRows, Predictions, Predictor, PredictorOptions, ServingError};

use super::cache::RowCache;
use super::client::{Fetch, MAX_KEYS, RowClient, ShardKeys};
use crate::batcher::{Arrived, BatchRows, Patience, Predict};
use crate::version::NextModel;

/// See the module documentation.
pub struct ShardedPredictor {
    predictor: Predictor,
    cache: RowCache,
    client: RowClient,
    /// The model, and the version of the rows in the cache.
    base: Base,
    /// Values of a row, by row group.
    dims: Arc<[usize]>,
}

impl ShardedPredictor {
    /// A predictor with this model, and a cache of at most `cache_rows` keys.
    ///
    /// # Errors
    /// Errors of the tower.
    pub fn new(
        version: &DenseVersion,
        client: RowClient,
        cache_rows: usize,
        options: PredictorOptions,
    ) -> Result<Self, ServingError> {
        let dims = version.model.description.layout.group_dims.clone();
        let predictor = Predictor::new(Arc::clone(&version.model), options)?;
        let base = version.base.clone();
        Ok(Self { predictor, cache: RowCache::new(cache_rows, dims.clone()), client, base, dims: dims.into() })
    }

    /// The keys of a batch that are not in the cache, by look-up, and the rows of the others.
    fn read_cached(&mut self, ids: &PreparedIds) -> (Vec<GroupRows>, Vec<Asked>) {
        let (shards, groups) = (self.client.shards(), self.dims.len());
        let mut asked: Vec<Vec<Asked>> = (0..shards).map(|_| Vec::new()).collect();
        let mut rows = Vec::with_capacity(groups);
        let mut hits = 0;
        for (group, (keys, dim)) in ids.keys().iter().zip(&*self.dims).enumerate() {
            let mut own = GroupRows::new(keys.len(), *dim);
            for (place, key) in keys.iter().enumerate() {
                let out = &mut own.values[place * dim..(place + 1) * dim];
                match self.cache.read(group, *key, out) {
                    Some(has_row) => {
                        own.missing[place] = !has_row;
                        hits += 1;
                    }
                    None => {
                        let shard = shard_of(*key, shards);
                        let of_shard = &mut asked[shard as usize];
                        if of_shard.last().is_none_or(|last| last.count == MAX_KEYS) {
                            of_shard.push(Asked::new(shard as usize, groups));
                        }
                        if let Some(last) = of_shard.last_mut() {
                            last.push(group, place, *key);
                        }
                    }
                }
            }
            rows.push(own);
        }
        let asked: Vec<Asked> = asked.into_iter().flatten().collect();
        let metrics = self.client.metrics();
        metrics.cache_hits.inc_by(hits);
        metrics.cache_misses.inc_by(asked.iter().map(|asked| asked.count as u64).sum());
        (rows, asked)
    }

    /// Takes the rows of look-ups, and keeps them in the cache.
    fn take(&mut self, pending: &mut PendingRows) -> Result<(), ServingError> {
        let Some(fetch) = &pending.fetch else { return Ok(()) };
        let found = fetch.take()?;
        for (places, found) in pending.places.iter().zip(found) {
            for (group, (places, found)) in places.iter().zip(found).enumerate() {
                let (keys, rows) = (&pending.ids.keys()[group], &mut pending.rows[group]);
                let dim = self.dims[group];
                for (place, bytes) in places.iter().zip(found.rows(places.len(), dim)) {
                    let values = &mut rows.values[place * dim..(place + 1) * dim];
                    rows.missing[*place] = bytes.is_none();
                    if let Some(bytes) = bytes {
                        read_values(bytes, values);
                    }
                    self.cache.insert(group, keys[*place], bytes.map(|_| &*values));
                }
            }
        }
        let metrics = self.client.metrics();
        metrics.cache_rows.set(self.cache.len() as i64);
        metrics.wait.observe(pending.started.elapsed().as_secs_f64());
        Ok(())
    }
}

/// A look-up in a shard, and the places of its keys in the batch.
struct Asked {
    shard: usize,
    count: usize,
    /// By row group.
    keys: Vec<Vec<u8>>,
    places: Vec<Vec<usize>>,
}

impl Asked {
    fn new(shard: usize, groups: usize) -> Self {
        Self { shard, count: 0, keys: vec![Vec::new(); groups], places: vec![Vec::new(); groups] }
    }

    fn push(&mut self, group: usize, place: usize, key: u64) {
        push_key(&mut self.keys[group], key);
        self.places[group].push(place);
        self.count += 1;
    }
}

/// The rows of a batch that were in the cache, and look-ups for the others.
pub struct PendingRows {
    ids: PreparedIds,
    rows: Vec<GroupRows>,
    /// The places of the keys of each look-up, by row group.
    places: Vec<Vec<Vec<usize>>>,
    /// `None` if all keys are in the cache.
    fetch: Option<Fetch>,
    started: Instant,
}

impl BatchRows for PendingRows {
    fn have_come(&self) -> bool {
        self.fetch.as_ref().is_none_or(Fetch::has_ended)
    }
}

impl Predict for ShardedPredictor {
    type Rows = PendingRows;

    fn read(&mut self, batch: &Batch, patience: Patience, arrived: &Arrived) -> Result<PendingRows, ServingError> {
        let started = Instant::now();
        let ids = self.predictor.prepare(batch)?;
        let (rows, asked) = self.read_cached(&ids);
        let mut places = Vec::with_capacity(asked.len());
        let mut look_ups = Vec::with_capacity(asked.len());
        for Asked { shard, keys, places: own, .. } in asked {
            places.push(own);
            look_ups.push(ShardKeys { shard, keys });
        }
        let fetch =
            (!look_ups.is_empty()).then(|| self.client.fetch(&self.base, &self.dims, look_ups, patience, arrived));
        Ok(PendingRows { ids, rows, places, fetch, started })
    }

    fn predict(&mut self, batch: &Batch, mut rows: PendingRows) -> Result<Predictions, ServingError> {
        self.take(&mut rows)?;
        self.predictor.predict_with(batch, &rows.ids, rows.rows)
    }

    fn set_model(&mut self, next: NextModel) -> Result<(), ServingError> {
        let NextModel { model, base, changes } = next;
        self.predictor.set_model(model)?;
        self.base = base;
        let metrics = self.client.metrics();
        match changes {
            RowChanges::Known(deltas) => {
                for changes in deltas {
                    metrics.cache_updates.inc_by(self.cache.apply(&changes));
                }
            }
            RowChanges::Unknown => {
                self.cache.clear();
                metrics.cache_cleared.inc();
            }
        }
        metrics.cache_rows.set(self.cache.len() as i64);
        Ok(())
    }
}
