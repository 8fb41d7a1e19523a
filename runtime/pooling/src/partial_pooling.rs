//! Partial pooling: in modes that look rows up, the parameter servers pool some row groups of a
//! piece themselves. Each server returns the sum over the rows that it holds, and the embedding
//! worker adds the sums. On the way back, each server turns the gradient of the sum into gradients
//! of its rows.
//!
//! [`PooledGroups::by_size`] decides by bytes which groups these are.

use rectrain_kinds::Compression;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::layout::{FeatureLayout, FeaturePlace, Pooled};
use rectrain_wire::ids::MAX_U16_SAMPLES;

use crate::prepared_ids::{FeatureIds, PreparedIds};

/// Bytes of a tensor's descriptor in a message.
const DESCRIPTOR: u64 = 40;
/// Tensors of a feature's ids in a message: keys, starts, samples and weights.
const ID_TENSORS: u64 = 4;

/// The numbers of a piece that the bytes of every row group depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceSize {
    /// B: the samples of the piece.
    pub samples: u64,
    /// S: the parameter servers.
    pub servers: u64,
    /// How values travel.
    pub compression: Compression,
}

/// The numbers of a row group in a piece that decide where it is pooled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupSize {
    /// u: the distinct keys of the group.
    pub keys: u64,
    /// c: the columns of a row, with the first-order weight.
    pub row_columns: u64,
    /// f: the features whose rows are in the group.
    pub features: u64,
    /// k: the distinct keys of each of these features, summed. As u if the group has one feature.
    pub ids: u64,
    /// o: the occurrences of ids in samples.
    pub occurrences: u64,
    /// w: the features whose samples have weights, because they pool several values as a mean or
    /// by √n.
    pub weighted: u64,
    /// e: the columns of the features' pooled embeddings together.
    pub embeddings: u64,
    /// The first-order columns of a sample: f, or 0 without first-order weights.
    pub linear: u64,
}

impl GroupSize {
    /// The bytes of a piece's rows and of their gradients, there and back. With values V(n, c) of n
    /// rows of c columns, these are
    ///
    /// - the look-up: keys 8 u, and the reply V(u, c);
    /// - the update: keys 8 u, and gradients V(u, c).
    ///
    /// V(n, c) is 4 c n. With compression it is (2 c + 4) n, and 0 if c is 0. The examples of keys
    /// travel in both ways of pooling, so they do not count.
    #[must_use]
    pub fn row_bytes(&self, piece: PieceSize) -> u64 {
        16 * self.keys + 2 * piece.values(self.keys, self.row_columns)
    }

    /// The bytes if the servers pool the group, there and back:
    ///
    /// - the ids: 12 k + i o over all servers, where i is 2 for at most 65,536 samples and 4 for
    ///   more. For each server, f last starts of 4 bytes, w weights of 4 B bytes, and 4 f
    ///   descriptors of tensors of 40 bytes;
    /// - the sums of each server: V(B, e) + V(B, f), where V(B, f) is of first-order weights;
    /// - their gradients: as the sums.
    ///
    /// The ids travel once, because a server retains them from the look-up to the update.
    #[must_use]
    pub fn pooled_bytes(&self, piece: PieceSize) -> u64 {
        let PieceSize { samples, servers, .. } = piece;
        let index = if samples <= MAX_U16_SAMPLES as u64 { 2 } else { 4 };
        let of_server = self.features * (4 + ID_TENSORS * DESCRIPTOR) + 4 * samples * self.weighted;
        let values = piece.values(samples, self.embeddings) + piece.values(samples, self.linear);
        12 * self.ids + index * self.occurrences + servers * (of_server + 2 * values)
    }
}

impl PieceSize {
    /// The bytes of `rows` rows of `columns` values in a message.
    const fn values(self, rows: u64, columns: u64) -> u64 {
        match self.compression {
            _ if columns == 0 => 0,
            Compression::None => 4 * columns * rows,
            Compression::Fp16 => (2 * columns + 4) * rows,
        }
    }
}

/// A decision by bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct BySize {
    /// The groups that servers pool.
    pub groups: PooledGroups,
    /// How many bytes less travel than with rows.
    pub saved_bytes: u64,
}

/// The row groups of a piece that parameter servers pool. There is at least one.
#[derive(Clone, Debug, PartialEq)]
pub struct PooledGroups {
    /// By row group.
    chosen: Vec<bool>,
    layout: FeatureLayout,
}

impl PooledGroups {
    /// The groups that take fewer bytes if `servers` servers pool them. `None` if there are none.
    ///
    /// The answer depends on nothing but the arguments. So the replacement of a process repeats the
    /// requests of its predecessor.
    #[must_use]
    pub fn by_size(
        piece: &PreparedIds,
        layout: &FeatureLayout,
        servers: usize,
        compression: Compression,
    ) -> Option<BySize> {
        let of_piece = PieceSize { samples: piece.samples() as u64, servers: servers as u64, compression };
        let mut saved_bytes = 0;
        let saves = |size: GroupSize| {
            let saved = size.row_bytes(of_piece).saturating_sub(size.pooled_bytes(of_piece));
            saved_bytes += saved;
            saved > 0
        };
        let chosen = group_sizes(piece, layout).into_iter().map(saves).collect();
        Some(BySize { groups: Self::new(chosen, layout)?, saved_bytes })
    }

    fn new(chosen: Vec<bool>, whole: &FeatureLayout) -> Option<Self> {
        let mut layout = FeatureLayout { features: Vec::new(), embedding_width: 0, ..whole.clone() };
        for place in whole.features.iter().filter(|place| chosen[place.group]) {
            layout.features.push(FeaturePlace { offset: layout.embedding_width, ..*place });
            layout.embedding_width += place.dim;
        }
        chosen.contains(&true).then_some(Self { chosen, layout })
    }

    /// Reads the numbers of a message: of the groups of `layout`, ascending.
    ///
    /// # Errors
    /// [`RoleError::Inconsistent`] if there is no number, if they do not ascend, or if a group does
    /// not exist.
    pub fn read(name: &'static str, numbers: &[u32], layout: &FeatureLayout) -> Result<Self, RoleError> {
        let count = layout.group_dims.len();
        let ascend = numbers.is_sorted_by(|a, b| a < b);
        let exist = numbers.last().is_some_and(|last| (*last as usize) < count);
        let mut chosen = vec![false; count];
        if ascend && exist {
            numbers.iter().for_each(|number| chosen[*number as usize] = true);
        }
        let refused = || RoleError::Inconsistent {
            message: name,
            reason: format!(
                "servers pool groups with ascending numbers below {count}, and at least one; the numbers are {numbers:?}"
            ),
        };
        Self::new(chosen, layout).ok_or_else(refused)
    }

    /// The numbers for a message, ascending.
    #[must_use]
    pub fn numbers(&self) -> Vec<u32> {
        (0..).zip(&self.chosen).filter(|(_, is)| **is).map(|(number, _)| number).collect()
    }

    /// Whether servers pool this row group.
    #[must_use]
    pub fn contains(&self, group: usize) -> bool {
        self.chosen[group]
    }

    /// The layout of the features of these groups alone. The groups keep their numbers.
    #[must_use]
    pub const fn layout(&self) -> &FeatureLayout {
        &self.layout
    }

    /// Adds the sums of all servers, in their order. Each has the columns of [`Self::layout`].
    #[must_use]
    pub fn sum(of_servers: Vec<Pooled>) -> Pooled {
        let mut of_servers = of_servers.into_iter();
        let mut total = of_servers.next().unwrap_or_default();
        for Pooled { embeddings, linear } in of_servers {
            add(&mut total.embeddings, &embeddings);
            add(&mut total.linear, &linear);
        }
        total
    }

    /// The pooled piece: `rows` of the other groups pooled here, and the `sums` of these groups.
    /// `rows[g]` is `[keys of group g, row dim of g]`.
    #[must_use]
    pub fn pool(&self, piece: &PreparedIds, rows: &[Vec<f32>], sums: &Pooled, layout: &FeatureLayout) -> Pooled {
        let mut pooled = piece.pool_groups(rows, layout, |group| !self.contains(group));
        for columns in self.columns(layout) {
            let Columns { whole, own } = columns.embeddings;
            copy_columns(&sums.embeddings, own, &mut pooled.embeddings, whole, columns.dim);
            if layout.linear {
                let Columns { whole, own } = columns.linear;
                copy_columns(&sums.linear, own, &mut pooled.linear, whole, 1);
            }
        }
        pooled
    }

    /// Divides gradients of pooled embeddings: gradients of the rows of the other groups,
    /// `[keys, row dim]`, none for these groups, and the gradients of these groups' sums.
    #[must_use]
    pub fn scatter(&self, piece: &PreparedIds, gradients: &Pooled, layout: &FeatureLayout) -> (Vec<Vec<f32>>, Pooled) {
        let rows = piece.scatter_groups(gradients, layout, |group| !self.contains(group));
        let (samples, widths) = (piece.samples(), self.layout.pooled_widths());
        let mut own =
            Pooled { embeddings: vec![0.0; samples * widths.embeddings], linear: vec![0.0; samples * widths.linear] };
        for columns in self.columns(layout) {
            let of = columns.embeddings;
            copy_columns(&gradients.embeddings, of.whole, &mut own.embeddings, of.own, columns.dim);
            if layout.linear {
                let of = columns.linear;
                copy_columns(&gradients.linear, of.whole, &mut own.linear, of.own, 1);
            }
        }
        (rows, own)
    }

    /// The columns of each feature of these groups.
    fn columns(&self, whole: &FeatureLayout) -> impl Iterator<Item = FeatureColumns> {
        let (widths, own_widths) = (whole.pooled_widths(), self.layout.pooled_widths());
        let features = whole.features.iter().enumerate().filter(|(_, place)| self.contains(place.group));
        features.zip(self.layout.features.iter().enumerate()).map(move |((index, place), (own_index, own))| {
            FeatureColumns {
                dim: place.dim,
                embeddings: Columns {
                    whole: Place { width: widths.embeddings, first: place.offset },
                    own: Place { width: own_widths.embeddings, first: own.offset },
                },
                linear: Columns {
                    whole: Place { width: widths.linear, first: index },
                    own: Place { width: own_widths.linear, first: own_index },
                },
            }
        })
    }
}

/// The columns of a feature.
struct FeatureColumns {
    /// Columns of its embedding.
    dim: usize,
    embeddings: Columns,
    linear: Columns,
}

/// The place of a feature's columns in values of the whole piece, and in values of the groups
/// alone.
struct Columns {
    whole: Place,
    own: Place,
}

#[derive(Clone, Copy)]
struct Place {
    /// The columns of all features.
    width: usize,
    first: usize,
}

/// Copies `count` columns of each sample.
fn copy_columns(from: &[f32], at: Place, to: &mut [f32], place: Place, count: usize) {
    if count == 0 {
        return;
    }
    for (from, to) in from.chunks_exact(at.width).zip(to.chunks_exact_mut(place.width)) {
        to[place.first..][..count].copy_from_slice(&from[at.first..][..count]);
    }
}

fn add(sums: &mut [f32], values: &[f32]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}

/// The numbers of each row group.
fn group_sizes(piece: &PreparedIds, layout: &FeatureLayout) -> Vec<GroupSize> {
    let of_group = |(keys, columns): (&Vec<u64>, &usize)| GroupSize {
        keys: keys.len() as u64,
        row_columns: *columns as u64,
        ..GroupSize::default()
    };
    let mut sizes: Vec<GroupSize> = piece.keys().iter().zip(&layout.group_dims).map(of_group).collect();
    for (FeatureIds { unique, weights, .. }, place) in piece.features.iter().zip(&layout.features) {
        let size = &mut sizes[place.group];
        size.features += 1;
        size.ids += unique.keys().len() as u64;
        size.occurrences += unique.samples().len() as u64;
        size.weighted += u64::from(weights.is_some());
        size.embeddings += place.dim as u64;
        size.linear += u64::from(layout.linear);
    }
    sizes
}
