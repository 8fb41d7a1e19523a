//! The formulas of sizes. Pure.

use rectrain_crds::defaults::AUTO_MEMORY_SHARE;
use rectrain_embedding::BudgetUnit;
use rectrain_modes::TrainingLength;
use rectrain_protocol::plan::JobPlan;
use serde::Serialize;

/// Cores of a parameter server.
const SERVER_CORES: f64 = 2.0;
const DENSE_WORKER: Needs = Needs { cores: 4.0, memory: 8 << 30 };
/// Dense workers that one embedding worker serves.
const WORKERS_PER_EMBEDDING_WORKER: u64 = 4;
/// Rows a second that one loader reads from text.
const LOADER_ROWS_PER_SECOND: f64 = 800_000.0;
/// Each embedding worker, and each loader.
const HELPER: Needs = Needs { cores: 1.0, memory: 1 << 30 };
const COORDINATOR: Needs = Needs { cores: 0.5, memory: 512 << 20 };

/// The cores and the memory of a process.
struct Needs {
    cores: f64,
    /// In bytes.
    memory: u64,
}

/// The figures that the user gives.
pub(super) struct Wish {
    /// The sparse features, in the order of the manifest.
    pub(super) tables: Vec<Table>,
    /// Bytes of memory of a parameter server; at least 1.
    pub(super) server_memory: u64,
    /// Rows of an epoch.
    pub(super) training_rows: Option<u64>,
    /// Samples a second that the job should train; above 0.
    pub(super) samples_per_second: Option<f64>,
    /// Samples a second that one dense worker trains; above 0.
    pub(super) worker_samples_per_second: Option<f64>,
    pub(super) prices: Option<Prices>,
}

/// Prices in any currency.
#[derive(Clone, Copy)]
pub(super) struct Prices {
    pub(super) core_hour: f64,
    /// Of 10⁹ bytes.
    pub(super) gb_hour: f64,
}

/// The rows of a sparse feature.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Table {
    pub(super) feature: String,
    pub(super) rows: u64,
    pub(super) row_bytes: u64,
}

impl Table {
    pub(super) fn bytes(&self) -> u64 {
        self.rows.saturating_mul(self.row_bytes)
    }
}

/// The sizes of a job.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Sizes {
    pub(super) job: String,
    pub(super) tables: Vec<Table>,
    /// Rows and bytes of all tables, within the budget.
    pub(super) rows: u64,
    pub(super) bytes: u64,
    /// Whether the manifest's budget is below the rows of the ids.
    pub(super) is_bounded: bool,
    pub(super) servers: u64,
    pub(super) server_memory: u64,
    /// The most bytes that the checkpoints take: full ones, and as much for deltas. `null` without
    /// checkpoints.
    pub(super) checkpoint_bytes: Option<u64>,
    /// `null` unless both rates are given.
    pub(super) workers: Option<Workers>,
    /// `null` unless the rows of an epoch, or the steps, and the job's rate are known.
    pub(super) hours: Option<f64>,
    /// `null` without hours, workers or prices.
    pub(super) cost: Option<f64>,
}

/// The processes beside the parameter servers, and what all processes need.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Workers {
    pub(super) dense_workers: u64,
    pub(super) embedding_workers: u64,
    pub(super) loaders: u64,
    /// Cores and bytes of memory of all processes, the servers and the coordinator included.
    pub(super) cores: f64,
    pub(super) memory: u64,
}

/// Computes the sizes of a job.
pub(super) fn sizes(plan: &JobPlan, wish: Wish) -> Sizes {
    let (rows, bytes, is_bounded) = bounded(plan, &wish.tables);
    let servers = servers(bytes, wish.server_memory);
    let workers = workers(&wish, servers);
    let hours = samples(plan, wish.training_rows).zip(wish.samples_per_second);
    let hours = hours.map(|(samples, rate)| samples / rate / 3600.0);
    let cost = match (hours, workers, wish.prices) {
        (Some(hours), Some(workers), Some(prices)) => {
            Some(hours * (workers.cores * prices.core_hour + workers.memory as f64 / 1e9 * prices.gb_hour))
        }
        _ => None,
    };
    // `keep` full checkpoints, one that is being written, and as many bytes of deltas.
    let checkpoints = |keep: usize| bytes.saturating_mul(2 * (keep as u64 + 1));
    Sizes {
        job: plan.name.clone(),
        tables: wish.tables,
        rows,
        bytes,
        is_bounded,
        servers,
        server_memory: wish.server_memory,
        checkpoint_bytes: plan.checkpoint.as_ref().map(|checkpoint| checkpoints(checkpoint.keep.get())),
        workers,
        hours,
        cost,
    }
}

/// Rows and bytes of all tables, and whether the budget bounds them. Rows in a budget of rows have
/// the mean width of all rows.
fn bounded(plan: &JobPlan, tables: &[Table]) -> (u64, u64, bool) {
    let sum = |of: fn(&Table) -> u64| tables.iter().map(of).fold(0, u64::saturating_add);
    let (rows, bytes) = (sum(|table| table.rows), sum(Table::bytes));
    let Some(budget) = plan.store.budget else { return (rows, bytes, false) };
    let found = match budget.unit {
        BudgetUnit::Rows => rows,
        BudgetUnit::Bytes => bytes,
    };
    if found <= budget.limit {
        return (rows, bytes, false);
    }
    let share = budget.limit as f64 / found as f64;
    ((rows as f64 * share) as u64, (bytes as f64 * share) as u64, true)
}

/// Servers whose memory holds the tables in the part that rows may take.
fn servers(bytes: u64, memory: u64) -> u64 {
    ((bytes as f64 / (AUTO_MEMORY_SHARE * memory.max(1) as f64)).ceil() as u64).max(1)
}

fn workers(wish: &Wish, servers: u64) -> Option<Workers> {
    let (wanted, each) = wish.samples_per_second.zip(wish.worker_samples_per_second)?;
    let dense_workers = ((wanted / each).ceil() as u64).max(1);
    let embedding_workers = dense_workers.div_ceil(WORKERS_PER_EMBEDDING_WORKER);
    let loaders = ((wanted / LOADER_ROWS_PER_SECOND).ceil() as u64).max(1);
    let processes = [
        (servers, Needs { cores: SERVER_CORES, memory: wish.server_memory }),
        (dense_workers, DENSE_WORKER),
        (embedding_workers + loaders, HELPER),
        (1, COORDINATOR),
    ];
    let cores = processes.iter().map(|(number, each)| *number as f64 * each.cores).sum();
    let memory = processes.iter().map(|(number, each)| number.saturating_mul(each.memory));
    let memory = memory.fold(0, u64::saturating_add);
    Some(Workers { dense_workers, embedding_workers, loaders, cores, memory })
}

/// The samples of the whole job.
fn samples(plan: &JobPlan, training_rows: Option<u64>) -> Option<f64> {
    match plan.length {
        TrainingLength::Epochs(epochs) => Some(training_rows? as f64 * f64::from(epochs)),
        TrainingLength::Steps(steps) => Some(steps as f64 * plan.global_batch_rows as f64),
    }
}
