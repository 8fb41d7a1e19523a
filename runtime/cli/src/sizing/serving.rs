//! `rectrain plan serving`: the servers and the price of a model's predictions, in three
//! deployments. [`deployments`](super::deployments) has the formulas.

use comfy_table::{Table as TextTable, presets};
use rectrain_protocol::plan::JobPlan;
use serde::Serialize;

use super::deployments::{Demand, Deployment, MachinePrices, Machines, Shards, deployments};
use super::sizes::Table;
use super::{Tables, read_tables};
use crate::args::ServingPlanArgs;
use crate::failure::Failure;
use crate::human::{bytes, list, number, percent, rate, right_but_first, thousands};
use crate::output;

/// Bytes of a value, in memory and between servers.
const VALUE_BYTES: u64 = 4;
/// Bytes that a server keeps for each row beside its values (docs/guide/publishing.md, Limits).
const KEPT_BYTES: u64 = 16;
/// Bytes of a key between servers, and in a published model.
const KEY_BYTES: u64 = 8;

/// The figures of the command.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Plan {
    job: String,
    rows: u64,
    /// All rows in the memory of servers, once.
    bytes: u64,
    requests_per_second: f64,
    request_ids: f64,
    deployments: [Deployment; 3],
}

pub(super) fn run(args: &ServingPlanArgs) -> Result<(), Failure> {
    if args.update_cores >= args.cores {
        let message =
            format!("--update-cores {}: expected less than --cores, which are {}", args.update_cores, args.cores);
        return Err(Failure::User(message));
    }
    let Tables { plan: job, tables, .. } = read_tables(&args.tables, serving_row_bytes)?;
    let each_feature = args.candidates as f64 * job.schema.sparse.len() as f64;
    let request_ids = args.request_ids.unwrap_or(each_feature);
    let plan = Plan {
        job: job.name,
        rows: sum(&tables, |table| table.rows),
        bytes: sum(&tables, Table::bytes),
        requests_per_second: args.requests_per_second,
        request_ids,
        deployments: deployments(&demand(args, &tables, request_ids), &machines(args)),
    };
    if args.json {
        let json = serde_json::to_string_pretty(&plan).map_err(|error| Failure::Failed(error.to_string()))?;
        return Ok(output::line(json)?);
    }
    Ok(output::line(text(&plan))?)
}

/// The sum over the features.
fn sum(tables: &[Table], of: fn(&Table) -> u64) -> u64 {
    tables.iter().map(of).fold(0, u64::saturating_add)
}

/// The bytes of a row of each sparse feature in the memory of a server.
fn serving_row_bytes(job: &JobPlan) -> Vec<u64> {
    let dims = job.layout.features.iter().filter_map(|place| job.layout.group_dims.get(place.group));
    dims.map(|dim| KEPT_BYTES + VALUE_BYTES * *dim as u64).collect()
}

/// The bytes of a row of a feature that is sent: its key and its values.
fn sent_row_bytes(table: &Table) -> u64 {
    table.row_bytes - KEPT_BYTES + KEY_BYTES
}

/// The bytes of all rows of a feature that are sent.
fn sent_bytes(table: &Table) -> u64 {
    sent_row_bytes(table).saturating_mul(table.rows)
}

fn demand(args: &ServingPlanArgs, tables: &[Table], request_ids: f64) -> Demand {
    let rows = sum(tables, |table| table.rows);
    Demand {
        bytes: sum(tables, Table::bytes),
        requests_per_second: args.requests_per_second,
        core_requests_per_second: args.core_requests_per_second,
        request_ids,
        // A request has as many ids of each feature, however many rows the feature has.
        read_row_bytes: sum(tables, sent_row_bytes) as f64 / tables.len().max(1) as f64,
        changed_row_bytes: sum(tables, sent_bytes) as f64 / rows.max(1) as f64,
        changed_rows_per_second: args.changed_rows_per_second,
        update_cores: args.update_cores,
        copies: args.copies,
        cached: args.cached,
        core_rows_per_second: args.core_rows_per_second,
        load: args.load,
    }
}

fn machines(args: &ServingPlanArgs) -> Machines {
    let prices = args.large_price.zip(args.small_price);
    Machines {
        cores: args.cores,
        // Gbit/s in bytes a second.
        network: args.network * 1e9 / 8.0,
        large_memory: args.large_memory,
        small_memory: args.small_memory,
        prices: prices.map(|(large, small)| MachinePrices { large, small }),
    }
}

fn text(plan: &Plan) -> String {
    let lines = [
        ("rows", format!("{}, {} in the memory of servers", thousands(plan.rows), bytes(plan.bytes))),
        ("requests/s", rate(plan.requests_per_second)),
        ("ids of a request", rate(plan.request_ids)),
    ];
    let lines = lines.map(|(name, value)| (name.to_owned(), value));
    let title = format!("{}: an estimate (docs/operations/sizing.md)", plan.job);
    let shards = plan.deployments.iter().filter_map(|of| of.shards).map(|shards| {
        let Shards { count, replicas } = shards;
        format!("\n\nspec.shards of a RecModelServer, for the last one: {{count: {count}, replicas: {replicas}}}")
    });
    let shards: String = shards.collect();
    format!("{title}\n\n{}\n\n{}{shards}", list(&lines), table(&plan.deployments))
}

fn table(deployments: &[Deployment]) -> String {
    let mut table = TextTable::new();
    table.load_preset(presets::NOTHING).set_header([
        "deployment",
        "inference",
        "storage",
        "large",
        "small",
        "rows of a server",
        "network",
        "bound",
        "price/h",
        "requests/s for 1",
    ]);
    for of in deployments {
        let row_bytes = if of.fits { bytes(of.row_bytes) } else { format!("{}: too many", bytes(of.row_bytes)) };
        table.add_row([
            of.name.to_owned(),
            thousands(of.inference),
            thousands(of.storage),
            thousands(of.large),
            thousands(of.small),
            row_bytes,
            percent(of.network),
            of.bound.to_owned(),
            number(of.price, 2),
            number(of.requests_per_price, 1),
        ]);
    }
    right_but_first(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_person_sees_the_rows_that_do_not_fit() {
        let deployment = |name: &'static str, fits: bool| Deployment {
            name,
            large: 3,
            small: 0,
            inference: 3,
            storage: 0,
            shards: None,
            row_bytes: 240_000_000_000,
            fits,
            network: 0.25,
            bound: "cores",
            price: None,
            requests_per_price: None,
        };
        let text = table(&[deployment("whole", false), deployment("co-located", true)]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].contains("240.0 GB: too many") && lines[1].contains("25.0 %"), "{text}");
        assert!(lines[2].contains("240.0 GB ") && !lines[2].contains("too many"), "{text}");
    }
}
