//! The arguments of `rectrain plan`.

use std::path::PathBuf;

use clap::{ArgMatches, Args, Command as ClapCommand, FromArgMatches};
use rectrain_crds::BytesSpec;

use super::JobArgs;

/// The word for the second form of the command.
const SERVING: &str = "serving";

/// `rectrain plan JOB`, or `rectrain plan serving JOB`.
#[derive(Debug)]
pub(crate) enum PlanArgs {
    Training(TrainingPlanArgs),
    Serving(ServingPlanArgs),
}

impl Args for PlanArgs {
    fn augment_args(command: ClapCommand) -> ClapCommand {
        let training = TrainingPlanArgs::augment_args(command);
        // The arguments' own texts would replace an earlier one.
        let serving = ServingPlanArgs::augment_args(ClapCommand::new(SERVING));
        let about = "Estimate the servers and the price of a model's predictions";
        training
            .args_conflicts_with_subcommands(true)
            .subcommand_negates_reqs(true)
            .subcommand(serving.about(about).long_about(None))
    }

    fn augment_args_for_update(command: ClapCommand) -> ClapCommand {
        Self::augment_args(command)
    }
}

impl FromArgMatches for PlanArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        match matches.subcommand() {
            Some((SERVING, matches)) => ServingPlanArgs::from_arg_matches(matches).map(Self::Serving),
            _ => TrainingPlanArgs::from_arg_matches(matches).map(Self::Training),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

// A job, and the ids of its features. A documentation comment would be the text of each command
// that has these arguments.
#[derive(Debug, Args)]
pub(crate) struct TableArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// Take the ids and the training rows from this profile (`rectrain data profile --json`)
    #[arg(long, value_name = "PATH")]
    pub(crate) profile: Option<PathBuf>,
    /// The ids of a sparse feature, instead of the profile's: `--ids item_id=10000000`
    #[arg(long, value_name = "FEATURE=IDS", value_parser = feature_ids)]
    pub(crate) ids: Vec<FeatureIds>,
}

#[derive(Debug, Args)]
pub(crate) struct TrainingPlanArgs {
    #[command(flatten)]
    pub(crate) tables: TableArgs,
    /// The rows of an epoch, instead of the profile's
    #[arg(long, value_name = "ROWS")]
    pub(crate) rows: Option<u64>,
    /// The memory of a parameter server, such as 16Gi
    #[arg(long, value_name = "BYTES", default_value = "16Gi", value_parser = memory)]
    pub(crate) server_memory: u64,
    /// Samples a second that the job should train
    #[arg(long, value_name = "RATE", value_parser = above_zero)]
    pub(crate) samples_per_second: Option<f64>,
    /// Samples a second that one dense worker trains, as `rectrain run` shows it
    #[arg(long, value_name = "RATE", value_parser = above_zero)]
    pub(crate) worker_samples_per_second: Option<f64>,
    /// The price of a core for an hour
    #[arg(long, value_name = "PRICE", requires = "gb_hour", value_parser = above_zero)]
    pub(crate) core_hour: Option<f64>,
    /// The price of a GB of memory for an hour
    #[arg(long, value_name = "PRICE", requires = "core_hour", value_parser = above_zero)]
    pub(crate) gb_hour: Option<f64>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ServingPlanArgs {
    #[command(flatten)]
    pub(crate) tables: TableArgs,
    /// Requests a second that the servers should answer
    #[arg(long, value_name = "RATE", value_parser = above_zero)]
    pub(crate) requests_per_second: f64,
    /// Requests a second of one saturated core, as `rectrain-bench serve` measures them
    #[arg(long, value_name = "RATE", value_parser = above_zero)]
    pub(crate) core_requests_per_second: f64,
    /// Candidates of a request
    #[arg(long, value_name = "ROWS", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub(crate) candidates: u64,
    /// Distinct ids of a request; by default one for each sparse feature of each candidate
    #[arg(long, value_name = "IDS", value_parser = above_zero)]
    pub(crate) request_ids: Option<f64>,
    /// The share of the cores and of the network that the load may use
    #[arg(long, value_name = "SHARE", default_value_t = 0.5, value_parser = share_above_zero)]
    pub(crate) load: f64,
    /// Cores of a machine
    #[arg(long, value_name = "CORES", default_value_t = 16.0, value_parser = above_zero)]
    pub(crate) cores: f64,
    /// The network of a machine in each direction, in Gbit/s
    #[arg(long, value_name = "GBIT", default_value_t = 10.0, value_parser = above_zero)]
    pub(crate) network: f64,
    /// The memory of a machine for rows, such as 128Gi
    #[arg(long, value_name = "BYTES", default_value = "128Gi", value_parser = memory)]
    pub(crate) large_memory: u64,
    /// The memory of a machine that only computes
    #[arg(long, value_name = "BYTES", default_value = "16Gi", value_parser = memory)]
    pub(crate) small_memory: u64,
    /// The price of a machine for rows, for an hour
    #[arg(long, value_name = "PRICE", requires = "small_price", value_parser = above_zero)]
    pub(crate) large_price: Option<f64>,
    /// The price of a machine that only computes, for an hour
    #[arg(long, value_name = "PRICE", requires = "large_price", value_parser = above_zero)]
    pub(crate) small_price: Option<f64>,
    /// Copies of each row, in deployments whose servers share the rows
    #[arg(long, value_name = "COPIES", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) copies: u64,
    /// The share of the ids that an inference server has in its cache, if other servers have the
    /// rows
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub(crate) cached: f64,
    /// Rows that one saturated core of a storage server sends in a second
    #[arg(long, value_name = "RATE", default_value_t = 1e6, value_parser = above_zero)]
    pub(crate) core_rows_per_second: f64,
    /// Rows that training changes in a second, each counted once for each published model
    #[arg(long, value_name = "RATE", default_value_t = 0.0, value_parser = at_least_zero)]
    pub(crate) changed_rows_per_second: f64,
    /// Cores that the changes take on a server with rows
    #[arg(long, value_name = "CORES", default_value_t = 0.0, value_parser = at_least_zero)]
    pub(crate) update_cores: f64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The number of ids of a sparse feature.
#[derive(Debug, Clone)]
pub(crate) struct FeatureIds {
    pub(crate) feature: String,
    pub(crate) ids: u64,
}

fn feature_ids(text: &str) -> Result<FeatureIds, String> {
    let found = text.rsplit_once('=').and_then(|(feature, ids)| Some((feature.to_owned(), ids.parse().ok()?)));
    let (feature, ids) = found.ok_or("expected FEATURE=IDS, such as item_id=10000000")?;
    Ok(FeatureIds { feature, ids })
}

fn memory(text: &str) -> Result<u64, String> {
    let bytes = BytesSpec::Text(text.to_owned()).bytes().filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| "expected a number of bytes such as 16Gi, 512Mi or 16G".to_owned())
}

fn above_zero(text: &str) -> Result<f64, String> {
    number(text, |number| number > 0.0, "a number above 0")
}

fn at_least_zero(text: &str) -> Result<f64, String> {
    number(text, |number| number >= 0.0, "a number of at least 0")
}

fn share(text: &str) -> Result<f64, String> {
    number(text, |number| (0.0..=1.0).contains(&number), "a number from 0 to 1")
}

fn share_above_zero(text: &str) -> Result<f64, String> {
    number(text, |number| number > 0.0 && number <= 1.0, "a number above 0, at most 1")
}

fn number(text: &str, is_right: fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && is_right(*number));
    number.ok_or_else(|| format!("expected {expected}"))
}
