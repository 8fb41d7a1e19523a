//! A row group in the form that its tables need.

use crate::arena::Arena;
use crate::initial::InitialValues;
use crate::layout::RowLayout;
use crate::side_table::SideLayout;
use crate::simd::Simd;
use crate::{FeatureKey, RowSpec, StoreConfig};
use std::sync::Arc;

/// A group's spec, the layout that follows from it, the seed, and the memory that its tables share.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) spec: RowSpec,
    pub(crate) layout: RowLayout,
    /// Memory of the rows.
    pub(crate) memory: Arc<Arena>,
    /// Memory of the indexes. They are read at random, so they lie together, in few huge pages.
    pub(crate) indexes: Arc<Arena>,
    /// The side tables of the group's policy, if it has one.
    pub(crate) side: Option<SideGroup>,
    /// The vector unit for rows of this dimension.
    pub(crate) simd: Simd,
    /// Seed of the initial values, and of the draws of policies.
    pub(crate) seed: u64,
}

/// The shape of a group's side tables, and the memory that they share.
#[derive(Clone, Debug)]
pub(crate) struct SideGroup {
    pub(crate) layout: SideLayout,
    pub(crate) memory: Arc<Arena>,
}

/// The memory of a group's rows and of its side tables.
#[derive(Default)]
pub(crate) struct GroupMemory {
    pub(crate) rows: Arc<Arena>,
    pub(crate) side: Arc<Arena>,
}

impl Group {
    /// A group of a store of this many slots.
    pub(crate) fn new(spec: RowSpec, config: &StoreConfig, memory: GroupMemory) -> Self {
        Self {
            spec,
            layout: RowLayout::new(&spec),
            memory: memory.rows,
            indexes: Arc::default(),
            side: spec.life.side_layout(config.slots).map(|layout| SideGroup { layout, memory: memory.side }),
            simd: Simd::for_columns(spec.dim),
            seed: config.seed,
        }
    }

    /// The memories that outlive the process if the group is in shared memory.
    fn memories(&self) -> impl Iterator<Item = &Arc<Arena>> {
        [&self.memory].into_iter().chain(self.side.iter().map(|side| &side.memory))
    }

    /// See [`Arena::keep_dropped`].
    pub(crate) fn keep_dropped(&self, on: bool) {
        self.memories().for_each(|memory| memory.keep_dropped(on));
    }

    /// Whether a file could not grow, so that some of its contents are elsewhere.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.memories().any(|memory| memory.is_incomplete())
    }

    /// Bytes that were given back and wait for reuse.
    pub(crate) fn free_bytes(&self) -> usize {
        self.memories().map(|memory| memory.free_bytes()).sum::<usize>() + self.indexes.free_bytes()
    }

    /// Words of the longest row or block.
    pub(crate) fn longest(&self) -> usize {
        let side = self.side.as_ref().map_or(0, |side| side.layout.stride());
        self.layout.stride().max(side)
    }

    /// The initial values of a row of `key`, as they read once stored.
    pub(crate) fn read_initial(&self, key: FeatureKey, out: &mut [f32]) {
        let spec = &self.spec;
        spec.initializer.fill(self.seed, key, spec.zero_columns, out);
        self.layout.round(out);
    }
}
