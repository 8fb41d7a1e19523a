//! The steps of `cargo xtask cluster operate`, each independent of the others. `operate` has their
//! table.

pub(super) mod alerts;
pub(super) mod contention;
pub(super) mod dashboards;
pub(super) mod failures;
pub(super) mod faked_nodes;
pub(super) mod kills;
pub(super) mod lifecycle;
pub(super) mod long_names;
pub(super) mod measured;
pub(super) mod model_servers;
pub(super) mod model_shards;
pub(super) mod page;
pub(super) mod recovery;
pub(super) mod refusals;
pub(super) mod repairs;
pub(super) mod rights;
pub(super) mod scaling;
pub(super) mod scrapes;
pub(super) mod serving;
pub(super) mod shortage;
pub(super) mod silence;
pub(super) mod slow_at_random;
pub(super) mod slow_kills;
pub(super) mod slow_members;
pub(super) mod strangers;
pub(super) mod stream;
pub(super) mod survivors;
pub(super) mod switches;
pub(super) mod takeover;
pub(super) mod thousand;
mod timeline;
pub(super) mod unseen;
