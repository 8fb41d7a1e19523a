//! `shadow` under the virtual clock. A batch waits for its rows and for no dense parameters:
//! exchanges of the replica take place beside training. So the speeds of the workers add up.

use super::{Report, Simulation, SimulationError, tokens};
use crate::gba::TokenMode;

/// Runs `shadow` in its background form. The staleness in the report is of rows. The model leaves
/// out the load of the exchanges on links and servers.
pub(super) fn run(simulation: &Simulation) -> Result<Report, SimulationError> {
    let mut without_dense = simulation.clone();
    without_dense.cluster.link.dense_bytes = 0.0;
    tokens::run(&without_dense, TokenMode::Async)
}
