//! `rectrain plan`: the memory, the servers, the workers, the time and the cost of a job, before a
//! cluster exists. `rectrain plan serving` has the servers of its model. The page *Sizes*
//! (docs/operations/sizing.md) has the formulas. [`sizes`] and [`deployments`] compute them.

mod deployments;
mod serving;
mod show;
mod sizes;

use std::path::Path;

use rectrain_protocol::plan::JobPlan;
use serde::Deserialize;

use self::sizes::{Prices, Table, Wish, sizes};
use crate::args::{PlanArgs, TableArgs, TrainingPlanArgs};
use crate::failure::Failure;
use crate::profile::row_bytes;
use crate::{input, job, output};

pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    match args {
        PlanArgs::Training(args) => plan_training(args),
        PlanArgs::Serving(args) => serving::run(args),
    }
}

fn plan_training(args: &TrainingPlanArgs) -> Result<(), Failure> {
    let widths = |plan: &JobPlan| row_bytes(plan).into_iter().map(rectrain_embedding::RowBytes::total).collect();
    let Tables { plan, tables, profiled_rows } = read_tables(&args.tables, widths)?;
    let wish = Wish {
        tables,
        server_memory: args.server_memory,
        training_rows: args.rows.or(profiled_rows),
        samples_per_second: args.samples_per_second,
        worker_samples_per_second: args.worker_samples_per_second,
        prices: args.core_hour.zip(args.gb_hour).map(|(core_hour, gb_hour)| Prices { core_hour, gb_hour }),
    };
    let sizes = sizes(&plan, wish);
    if args.json {
        let json = serde_json::to_string_pretty(&sizes).map_err(|error| Failure::Failed(error.to_string()))?;
        return Ok(output::line(json)?);
    }
    Ok(output::line(show::text(&sizes))?)
}

/// A job and its tables.
struct Tables {
    plan: JobPlan,
    tables: Vec<Table>,
    /// Rows of an epoch, if a profile says them.
    profiled_rows: Option<u64>,
}

/// Reads the manifest and the profile. `widths` are the bytes of a row of each sparse feature.
fn read_tables(args: &TableArgs, widths: impl Fn(&JobPlan) -> Vec<u64>) -> Result<Tables, Failure> {
    let text = input::read(&args.job.manifest, "manifest")?;
    let (_, plan) = job::parse(&args.job, &text)?;
    let profile = args.profile.as_deref().map(read_profile).transpose()?;
    let tables = tables(args, &plan, &widths(&plan), profile.as_ref())?;
    Ok(Tables { plan, tables, profiled_rows: profile.map(|profile| profile.read.all_rows) })
}

/// The part of a profile that sizes need.
#[derive(Deserialize)]
struct Profile {
    read: Read,
    features: Vec<Feature>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Read {
    all_rows: u64,
}

/// A sparse feature, and its part of the rows of its table.
#[derive(Deserialize)]
struct Feature {
    name: String,
    rows: u64,
}

fn read_profile(path: &Path) -> Result<Profile, Failure> {
    let text = input::read(path, "profile")?;
    serde_json::from_str(&text).map_err(|error| {
        let name = input::name(path);
        Failure::User(format!(
            "{name}:{}: the profile cannot be read: {error}: write it with `rectrain data profile JOB --json {name}`",
            error.line()
        ))
    })
}

/// The rows of each sparse feature. `--ids` goes before the profile. The manifest's `hashBuckets`
/// bound them.
fn tables(args: &TableArgs, plan: &JobPlan, widths: &[u64], profile: Option<&Profile>) -> Result<Vec<Table>, Failure> {
    let fields = &plan.schema.sparse;
    if let Some(unknown) = args.ids.iter().find(|given| fields.iter().all(|field| field.name != given.feature)) {
        let names: Vec<&str> = fields.iter().map(|field| field.name.as_str()).collect();
        let message =
            format!("--ids: the job has no sparse feature `{}`: it has {}", unknown.feature, names.join(", "));
        return Err(Failure::User(message));
    }
    let mut tables = Vec::with_capacity(fields.len());
    for (field, width) in fields.iter().zip(widths) {
        let given = args.ids.iter().rev().find(|given| given.feature == field.name).map(|given| given.ids);
        let profiled =
            || profile?.features.iter().find(|feature| feature.name == field.name).map(|feature| feature.rows);
        let rows = given.or_else(profiled).or(field.hash_buckets).ok_or_else(|| unknown_rows(&field.name))?;
        let rows = rows.min(field.hash_buckets.unwrap_or(u64::MAX));
        tables.push(Table { feature: field.name.clone(), rows, row_bytes: *width });
    }
    Ok(tables)
}

fn unknown_rows(feature: &str) -> Failure {
    Failure::User(format!(
        "the number of ids of the feature `{feature}` is not known: give `--ids {feature}=10000000`, or count all ids \
         with `rectrain data profile JOB --json profile.json` and give `--profile profile.json`"
    ))
}
