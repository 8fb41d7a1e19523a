//! The ids of a piece of a batch, and the results of them and their rows. These are pooled
//! embeddings, and in the mode `des` the partial results of one parameter server. Pure arithmetic,
//! without network and threads.
//!
//! - [`PreparedIds`]: the whole piece, as an embedding worker has it.
//! - [`ServerIds`]: the part of the piece that one parameter server holds.
//! - [`ServerResults`]: the results of that part on their way between the two.
//! - [`PooledGroups`]: the part of the piece that parameter servers pool in other modes.
//! - [`FirstLayer`] and [`TowerResults`]: the same for a model with a tower.

mod first_layer;
mod partial_pooling;
mod prepared_ids;
mod server_ids;
mod server_results;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests;
mod tower_results;

pub use self::first_layer::{FirstLayer, LayerShape, WeightGradient, kernel_of};
pub use self::partial_pooling::{BySize, GroupSize, PieceSize, PooledGroups};
pub use self::prepared_ids::{PreparedIds, WeightedIds};
pub use self::server_ids::{PreparedServerIds, ServerIds};
pub use self::server_results::ServerResults;
pub use self::tower_results::{ServerTower, TowerResults, TowerSums};
