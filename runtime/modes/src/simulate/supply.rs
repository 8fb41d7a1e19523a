//! The way of a batch from its request to its look-ups, under the virtual clock: it waits for the
//! loaders, and then for an embedding worker. All modes share it.

use super::ClusterSpec;
use super::loaders::Loaders;
use super::timeline::{DECIDE_EVERY, EmbeddingWorkers, Time, Timeline};

/// An event on the way of the batches `B`.
pub(super) enum SupplyEvent<B> {
    /// A batch is requested. It is number `position` of all batches, or without one the next one.
    Requested { batch: B, position: Option<u64> },
    /// A loader has read a chunk.
    ChunkRead { loader: usize, chunk: u64 },
    /// The coordinator looks at the loaders.
    LookAtLoaders,
}

/// The loaders and the embedding workers of a cluster.
pub(super) struct Supply<B> {
    /// Each batch that waits for a chunk has its position.
    loaders: Option<Loaders<(B, u64)>>,
    embedding: Option<EmbeddingWorkers>,
    /// Batches requested without a position so far.
    requested: u64,
    /// When the coordinator looks at the loaders next, if that is not planned yet.
    next_look: Option<Time>,
}

impl<B> Supply<B> {
    /// `rows` are the rows of a batch.
    pub(super) fn new(cluster: &ClusterSpec, rows: u32) -> Self {
        Self {
            loaders: cluster.loaders.as_ref().map(|spec| Loaders::new(spec, rows)),
            embedding: cluster.embedding.as_ref().map(|spec| EmbeddingWorkers::new(spec, rows)),
            requested: 0,
            next_look: None,
        }
    }

    /// Plans the first event.
    pub(super) fn start<E: From<SupplyEvent<B>>>(&self, timeline: &mut Timeline<E>) {
        if self.loaders.is_some() {
            timeline.plan(0, SupplyEvent::<B>::LookAtLoaders.into());
        }
    }

    /// Whether a batch waits for a member. Otherwise its look-ups leave as soon as it is requested.
    pub(super) fn takes_time(&self) -> bool {
        self.embedding.is_some() || self.loaders.is_some()
    }

    /// Returns the batches that are ready, each with the time at which its look-ups leave. Call
    /// [`Self::load`] afterwards.
    pub(super) fn handle(&mut self, event: SupplyEvent<B>, now: Time) -> Vec<(B, Time)> {
        let read = match (event, &mut self.loaders) {
            (SupplyEvent::Requested { batch, position }, loaders) => {
                let position = position.unwrap_or(self.requested);
                self.requested += 1;
                let read = match loaders {
                    Some(loaders) => loaders.request(position, (batch, position)),
                    None => Some((batch, position)),
                };
                read.into_iter().collect()
            }
            (SupplyEvent::ChunkRead { loader, chunk }, Some(loaders)) => loaders.has_read(loader, chunk, now),
            (SupplyEvent::LookAtLoaders, Some(loaders)) => {
                loaders.look(now);
                self.next_look = Some(now + DECIDE_EVERY);
                Vec::new()
            }
            (SupplyEvent::ChunkRead { .. } | SupplyEvent::LookAtLoaders, None) => Vec::new(),
        };
        let mut prepare = |position| self.embedding.as_mut().map_or(now, |workers| workers.serve(position, now));
        read.into_iter().map(|(batch, position)| (batch, prepare(position))).collect()
    }

    /// Has free loaders begin chunks.
    pub(super) fn load<E: From<SupplyEvent<B>>>(&mut self, timeline: &mut Timeline<E>) {
        let now = timeline.now;
        for read in self.loaders.iter_mut().flat_map(|loaders| loaders.begin(now)) {
            timeline.plan(read.until, SupplyEvent::<B>::ChunkRead { loader: read.loader, chunk: read.chunk }.into());
        }
        if let Some(at) = self.next_look.take() {
            timeline.plan(at, SupplyEvent::<B>::LookAtLoaders.into());
        }
    }
}
