//! The command line: the arguments of all commands.

mod plan;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgMatches, Args, Command as ClapCommand, FromArgMatches, Parser, Subcommand, ValueEnum};
use rectrain_crds::defaults::{BAD_ROWS_LIMIT, TERMINATION_GRACE_SECONDS};
use rectrain_crds::{Override, SetKind};
use rectrain_kinds::{Precision, Role};
use rectrain_serving::ExportType;
use rectrain_wire::Address;

pub(crate) use self::plan::{PlanArgs, ServingPlanArgs, TableArgs, TrainingPlanArgs};
use crate::history::HistoryArgs;
use crate::link::Link;
use crate::runs::RunsCommand;
use crate::serve::args::ServeArgs;
use crate::serving_ps::args::ServingPsArgs;
use crate::slow::{Cpus, Slow};

/// Trains recommender models whose embedding tables are too large for one machine.
#[derive(Debug, Parser)]
#[command(name = "rectrain", version, about, max_term_width = 100, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    /// The format of logs on standard error (RECTRAIN_LOG filters them: `info` or
    /// `rectrain_protocol=debug`)
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log: LogFormat,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The end of the first help. The commands of roles are hidden there.
const AFTER_HELP: &str = "\
Examples:
  rectrain run job.yaml --set spec.model.kind=dcnV2
  rectrain validate job.yaml --data
  rectrain explain spec.training

Pods also run `rectrain coordinator`, `ps`, `embedding-worker`, `dense-worker` and `loader`.";

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a job on this machine
    Run(RunArgs),
    /// List, show and compare the runs that `rectrain run` has left in a folder
    Runs {
        #[command(subcommand)]
        command: RunsCommand,
    },
    /// Check a manifest, and with --data its data, without running it
    Validate(ValidateArgs),
    /// Explain a field of a manifest, or a kind of model, optimizer or training mode
    Explain {
        /// A field (`spec.training.globalBatchSize`), a kind (`hybrid`, `deepfm`, `adam`),
        /// `metadata`, or a kind of manifest (`Simulation`, `RecModelServer`)
        #[arg(default_value = "RecTrainingJob")]
        topic: String,
        /// Also list all fields below the field
        #[arg(short, long)]
        recursive: bool,
    },
    /// Simulate the training modes with workers of unequal speed
    Simulate(SimulateArgs),
    /// Estimate a job's memory, servers, workers, time and cost, or the servers of its model
    Plan(PlanArgs),
    /// Examine the operator's automatic decisions about jobs
    Policy {
        #[command(subcommand)]
        command: PolicyCommand,
    },
    /// Profile a job's training data, or prepare a public data set in a folder
    Data {
        #[command(subcommand)]
        command: DataCommand,
    },
    /// Show the training mode of a running job, or switch it
    Mode(ModeArgs),
    /// Change a running job's number of parameter servers, embedding workers, dense workers or
    /// loaders, or rebalance its rows
    Scale(ScaleArgs),
    /// List, verify, inspect, compare and export checkpoints
    Checkpoint {
        #[command(subcommand)]
        command: CheckpointCommand,
    },
    /// Predict the rows of files with a trained model
    Predict(PredictArgs),
    /// Answer requests with the predictions of a trained model (Open Inference Protocol v2)
    Serve(ServeArgs),
    /// Show the devices that dense workers on this machine can use
    Devices {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Run the coordinator of a job that runs in several processes
    #[command(hide = true)]
    Coordinator(CoordinatorArgs),
    /// Run one replica of a shard of a served model's rows
    #[command(hide = true)]
    ServingPs(ServingPsArgs),
    /// Run one member of a job
    #[command(flatten)]
    Member(MemberCommand),
    /// Show the status of a job on this machine or in a cluster
    Status(RunningJob),
    /// Print the events of a job on this machine, or the logs of a job in a cluster
    Logs(LogsArgs),
    /// Show the page of a job on this machine or in a cluster, in a cluster also after its end
    Page(PageArgs),
    /// Print a script that completes commands in a shell
    Completion {
        /// The shell
        #[arg(value_enum)]
        shell: CompletionShell,
    },
    /// Print the manual page
    Man {
        /// Write a page for each command into this folder instead
        #[arg(long, value_name = "FOLDER")]
        output: Option<PathBuf>,
    },
    /// Print the version
    Version,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum CompletionShell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Debug, Args)]
pub(crate) struct ValidateArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// Also open the data: check the columns and the first 1,000 rows of each part, and print the
    /// numbers of rows and the first row
    #[arg(long)]
    pub(crate) data: bool,
}

/// A manifest and the overrides of its fields.
#[derive(Debug, Clone, Args)]
pub(crate) struct JobArgs {
    /// The manifest (a RecTrainingJob); `-` is standard input
    pub(crate) manifest: PathBuf,
    /// Override a field, as Helm does: `--set spec.training.mode=hybrid`
    #[arg(long = "set", value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
    /// Override a field with text, even if it looks like a number or a boolean
    #[arg(long = "set-string", value_name = "PATH=TEXT")]
    pub(crate) set_string: Vec<String>,
}

impl JobArgs {
    /// The overrides, in the order in which they are applied.
    pub(crate) fn overrides(&self) -> Vec<Override> {
        overrides(&self.set, &self.set_string)
    }

    /// These arguments for another process, with `manifest` as the path of the manifest.
    pub(crate) fn repeat(&self, manifest: &Path) -> Vec<std::ffi::OsString> {
        let mut arguments = vec![manifest.into()];
        for (flag, expressions) in [("--set", &self.set), ("--set-string", &self.set_string)] {
            for expression in expressions {
                arguments.extend([flag.into(), expression.into()]);
            }
        }
        arguments
    }
}

/// The overrides of `--set` and `--set-string`, in the order in which they are applied.
pub(crate) fn overrides(set: &[String], set_string: &[String]) -> Vec<Override> {
    let of = |kind, expressions: &[String]| {
        expressions.iter().map(move |expression| Override { kind, expression: expression.clone() }).collect::<Vec<_>>()
    };
    [of(SetKind::Infer, set), of(SetKind::Text, set_string)].concat()
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// Print one JSON object per event to standard output, the summary last
    #[arg(long)]
    pub(crate) json: bool,
    /// Run each replica of each role in its own process
    #[arg(long)]
    pub(crate) processes: bool,
    /// The address that serves /metrics (port 0 takes any free port)
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub(crate) metrics: SocketAddr,
    /// The address where `rectrain mode` and other programs control the job (gRPC; port 0 takes any
    /// free port)
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub(crate) control: SocketAddr,
    /// Multiply a dense worker's computing time by a factor: `--slow denseWorker-1=4x`
    #[arg(long, value_name = "WORKER=FACTOR")]
    pub(crate) slow: Vec<Slow>,
    /// Limit a dense worker to a number of cores: `--cpus denseWorker-1=0.25` (with --processes, as
    /// root)
    #[arg(long, value_name = "WORKER=CORES", requires = "processes")]
    pub(crate) cpus: Vec<Cpus>,
    /// Limit the rate of each process in each direction, and delay its messages: `--link 1Gbit,5ms`
    /// (with --processes)
    #[arg(long, value_name = "RATE[,DELAY]", requires = "processes")]
    pub(crate) link: Option<Link>,
    #[command(flatten)]
    pub(crate) history: HistoryArgs,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct ModeArgs {
    #[command(flatten)]
    pub(crate) job: Option<RunningJob>,
    #[command(subcommand)]
    pub(crate) set: Option<ModeCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ModeCommand {
    /// Switch to another mode at the next global-step boundary; nothing restarts
    Set {
        #[command(flatten)]
        job: RunningJob,
        /// A value of spec.training.mode
        mode: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ScaleArgs {
    /// The role to scale
    #[arg(value_enum)]
    #[arg(value_parser = member_role())]
    pub(crate) role: Role,
    /// The new number of members; the present number of parameter servers rebalances their rows by
    /// load and bytes
    pub(crate) replicas: u32,
    /// The job's name, or its coordinator's address; by default the only job that runs on this
    /// machine
    #[arg(long)]
    pub(crate) job: Option<String>,
}

/// Parses the name of a role whose members join a coordinator.
fn member_role() -> impl TypedValueParser<Value = Role> {
    PossibleValuesParser::new(Role::MEMBERS.map(Role::name)).try_map(|name| Role::named(&name).ok_or("it is no role"))
}

/// A job that runs on this machine or in a cluster.
#[derive(Debug, Clone, Args)]
pub(crate) struct RunningJob {
    /// The job's name, or its coordinator's address; a job on this machine comes before one in a
    /// cluster
    pub(crate) job: String,
    /// The job's namespace in the cluster; by default the context's
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// The context of the kubeconfig; by default its current one
    #[arg(long)]
    pub(crate) context: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// The simulation (a manifest of kind Simulation, such as docs/examples/straggler.yaml); `-` is
    /// standard input
    pub(crate) simulation: PathBuf,
    /// Override a field, as Helm does: `--set 'spec.workers={8,80,800}'`
    #[arg(long = "set", value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
    /// Override a field with text, even if it looks like a number or a boolean
    #[arg(long = "set-string", value_name = "PATH=TEXT")]
    pub(crate) set_string: Vec<String>,
    /// Print one JSON object per mode and number of workers instead of the table
    #[arg(long)]
    pub(crate) json: bool,
    /// Also draw throughput by mode and over time into this file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Make the decisions of a recorded trace again, and show each with its time and reason
    Replay {
        /// The trace: one JSON object per line, with `policy`, `observations` or `decision`
        trace: PathBuf,
        /// Print one JSON object per decision instead of the table
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    pub(crate) job: RunningJob,
    /// The role whose logs to print; jobs on this machine have only the coordinator's events
    #[arg(long, default_value = "coordinator", value_parser = ["coordinator", "ps", "embedding-worker", "dense-worker", "loader"])]
    pub(crate) role: String,
    /// Only the logs of this replica, from 0
    #[arg(long)]
    pub(crate) index: Option<u32>,
    /// Keep printing new lines
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// The logs of the container's previous run
    #[arg(short, long)]
    pub(crate) previous: bool,
    /// Only this many of the last lines
    #[arg(long, value_parser = clap::value_parser!(i64).range(0..))]
    pub(crate) tail: Option<i64>,
}

#[derive(Debug, Args)]
pub(crate) struct PageArgs {
    /// The job's name; or, after its end, its checkpoint path, which has a `/`. A job on this
    /// machine comes before one in a cluster
    pub(crate) job: String,
    /// The job's namespace in the cluster; by default the context's
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// The context of the kubeconfig; by default its current one
    #[arg(long)]
    pub(crate) context: Option<String>,
    /// The address that serves the page of a job that runs (port 0 takes any free port)
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub(crate) address: SocketAddr,
    /// The file for the page of a job that has ended; by default NAME.html
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// An option of the object store with the checkpoints: `--option
    /// endpoint=http://127.0.0.1:9000`
    #[arg(long = "option", value_name = "NAME=VALUE")]
    pub(crate) options: Vec<String>,
    /// Open the page in a browser
    #[arg(long)]
    pub(crate) open: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Show the ids, the labels and the memory of a job's training data, before training, and the
    /// settings that they suggest
    Profile(ProfileArgs),
    /// Show how evenly parameter servers would share the look-ups of a job's training data, by
    /// fields and by slots
    Placement(PlacementArgs),
    /// MovieLens 100k: a label is 1 from a rating of 4 on; the last 20 % of each user's ratings are
    /// the test
    #[command(name = "movielens-100k")]
    Movielens100k {
        /// The folder to fill
        #[arg(long, default_value = "data/movielens-100k")]
        output: PathBuf,
        /// A copy of the data set: a folder with u.data, u.user and u.item, or a wheel of recbole;
        /// by default it is downloaded
        #[arg(long)]
        from: Option<PathBuf>,
    },
    /// Write the rows of text files to a Kafka topic, as JSON objects
    Replay(Replay),
}

#[derive(Debug, Args)]
pub(crate) struct Replay {
    /// CSV or TSV files with a header
    #[arg(required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// The topic: kafka://HOST:PORT/TOPIC; it is made if it does not exist
    #[arg(long)]
    pub(crate) to: String,
    /// Rows a second; by default as many as the broker takes
    #[arg(long, value_parser = positive)]
    pub(crate) rate: Option<f64>,
    /// A column of numbers: the rows are written in its order, which takes memory for all of them
    #[arg(long)]
    pub(crate) by: Option<String>,
    /// Partitions of a topic that does not exist
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) partitions: u16,
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| format!("expected a number above 0, found `{text}`"))
}

#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// Read only the first ROWS training rows: the time between two sightings of an id needs rows
    /// that follow each other
    #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) sample: Option<u64>,
    /// Also write the profile as JSON into this file
    #[arg(long, value_name = "PATH")]
    pub(crate) json: Option<PathBuf>,
    /// Also write the profile as a page with plots into this file
    #[arg(long, value_name = "PATH")]
    pub(crate) html: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct PlacementArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// The numbers of parameter servers to compare
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "2,3,5,8", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) servers: Vec<u16>,
    /// Read only the first ROWS training rows
    #[arg(long, value_name = "ROWS", default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) sample: u64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List the checkpoints of a path
    Ls {
        #[command(flatten)]
        place: CheckpointPlace,
        /// Print one JSON object per checkpoint
        #[arg(long)]
        json: bool,
    },
    /// Read checkpoints completely and check every checksum
    Verify {
        #[command(flatten)]
        place: CheckpointPlace,
        /// Check only the presence and sizes of files
        #[arg(long)]
        sizes: bool,
    },
    /// Show a checkpoint's job, model and files (of a path with several: the newest)
    Inspect {
        #[command(flatten)]
        place: CheckpointPlace,
        /// Print the checkpoint's manifest unchanged
        #[arg(long)]
        json: bool,
        /// Print the job's identity with one value a line
        #[arg(short, long, conflicts_with = "json")]
        verbose: bool,
    },
    /// Compare two checkpoints row by row
    Diff {
        #[command(flatten)]
        place: CheckpointPlace,
        /// The path of the other checkpoint
        other: String,
    },
    /// Write the trained model for other programs: embeddings as Parquet and safetensors, dense
    /// parameters as safetensors and ONNX
    Export {
        #[command(flatten)]
        place: CheckpointPlace,
        /// The folder to fill
        #[arg(long)]
        output: PathBuf,
        /// The formats to write; all by default
        #[arg(long, value_enum, value_delimiter = ',')]
        format: Vec<ExportFormat>,
        /// Write the optimizers' state too
        #[arg(long)]
        optimizer_state: bool,
        /// Leave out rows whose score is below this number, at least 0. Only the eviction policies
        /// score and lfu keep scores, which decay up to the latest update
        #[arg(long, value_name = "SCORE", value_parser = score)]
        min_score: Option<f64>,
        /// Leave out rows with fewer examples, with --for serving, as spec.serving.publish.minCount
        /// does. Only the eviction policy lfu counts them
        #[arg(long, value_name = "EXAMPLES", requires = "purpose", conflicts_with = "min_score", value_parser = clap::value_parser!(u32).range(1..=4096))]
        min_count: Option<u32>,
        /// Write the ids of this feature with their embeddings instead, such as for an index of
        /// nearest neighbours: embeddings-FEATURE.parquet with the columns id and embedding
        #[arg(long, value_name = "FEATURE", requires = "ids", conflicts_with_all = ["format", "optimizer_state", "min_score", "min_count", "purpose"])]
        embeddings: Option<String>,
        /// Files with the ids of --embeddings, one a row, in a column with the feature's name: a
        /// list of items, or training data
        #[arg(long, value_name = "FILE", num_args = 1.., requires = "embeddings")]
        ids: Vec<String>,
        /// Write one folder for programs that predict instead: rows for mapping into memory, the
        /// tower as ONNX, and model.json. The folder must be empty or new
        #[arg(long = "for", value_enum, value_name = "PURPOSE", conflicts_with_all = ["format", "optimizer_state"])]
        purpose: Option<ExportPurpose>,
        /// The type of the rows' values, with --for serving: f32, f16, bf16 or int8
        #[arg(long, requires = "purpose", default_value = "f32")]
        values: ExportType,
    },
}

/// A score.
fn score(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|score: &f64| score.is_finite() && *score >= 0.0);
    number.ok_or_else(|| "expected a number of at least 0".to_owned())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportPurpose {
    /// Prediction
    Serving,
}

#[derive(Debug, Args)]
pub(crate) struct PredictArgs {
    /// The model: a checkpoint, a path with checkpoints (the newest is used), or a folder of
    /// `rectrain checkpoint export --for serving`
    pub(crate) model: String,
    /// Files to predict, in this order: paths and URLs, also as globs (`'day/*.parquet'`)
    #[arg(long, required = true, num_args = 1..)]
    pub(crate) input: Vec<String>,
    /// The file for the predictions, one row an input row: .parquet, .csv, or - for CSV on standard
    /// output
    #[arg(long)]
    pub(crate) output: String,
    /// A column to copy into the output, as text
    #[arg(long = "id", value_name = "COLUMN")]
    pub(crate) ids: Vec<String>,
    /// Whether a bad row ends the command, or is left out and counted
    #[arg(long, value_enum, default_value_t = BadRowsChoice::Fail)]
    pub(crate) bad_rows: BadRowsChoice,
    /// The largest number of bad rows that may be left out
    #[arg(long, value_name = "ROWS", default_value_t = BAD_ROWS_LIMIT)]
    pub(crate) bad_rows_limit: u64,
    /// Rows that are predicted at a time. The job's local batch size repeats the bits of its own
    /// evaluation
    #[arg(long, value_name = "ROWS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) batch_rows: u32,
    /// Threads that compute; 0 means one for each core
    #[arg(long, default_value_t = 0)]
    pub(crate) threads: usize,
    /// Precision of the products of linear layers: fp32 or bf16
    #[arg(long, default_value = "fp32")]
    pub(crate) precision: Precision,
    /// Print the counts and metrics as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// An option of the object store, for the model and the input: `--option
    /// endpoint=http://127.0.0.1:9000`
    #[arg(long = "option", value_name = "NAME=VALUE")]
    pub(crate) options: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BadRowsChoice {
    /// A bad row ends the command
    Fail,
    /// A bad row is left out and counted
    Skip,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportFormat {
    /// Embeddings as Parquet
    Parquet,
    /// Embeddings and dense parameters as safetensors
    Safetensors,
    /// The model as ONNX
    Onnx,
}

/// A place with checkpoints.
#[derive(Debug, Clone, Args)]
pub(crate) struct CheckpointPlace {
    /// The job's checkpoint path (a folder, or a gs:// or s3:// URL), or one checkpoint in it
    /// (`.../step-000000001000`)
    pub(crate) path: String,
    /// An option of the object store: `--option endpoint=http://127.0.0.1:9000`
    #[arg(long = "option", value_name = "NAME=VALUE")]
    pub(crate) options: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CoordinatorArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// The address that members connect to
    #[arg(long, default_value = "tcp://0.0.0.0:7000")]
    pub(crate) bind: Address,
    /// The address where the operator and the command line control the job (gRPC)
    #[arg(long, default_value = "0.0.0.0:7001")]
    pub(crate) control: SocketAddr,
    /// The address that serves /metrics
    #[arg(long, default_value = "0.0.0.0:9090")]
    pub(crate) metrics: SocketAddr,
    /// The name of this run of the job, shared by all its attempts; without
    /// `spec.checkpoint.resume: latest` the run resumes from its own checkpoints only
    #[arg(long, value_name = "NAME", default_value = "")]
    pub(crate) run: String,
    /// The folder of the coordinator's journal, which must outlive the process. A coordinator that
    /// restarts with it continues at the step where it was killed, and its members continue too.
    /// Without it the job restarts from its last checkpoint
    #[arg(long, value_name = "FOLDER", env = "RECTRAIN_JOURNAL")]
    pub(crate) journal: Option<PathBuf>,
    /// The number of the job's attempt. Without a journal in its folder, the coordinator then waits
    /// for the parameter servers, and continues from the copies of the journal that they keep
    #[arg(long, value_name = "NUMBER", env = "RECTRAIN_RECOVER_ATTEMPT", requires = "journal")]
    pub(crate) recover_attempt: Option<u32>,
    #[command(flatten)]
    pub(crate) patience: PatienceArgs,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Print one JSON object per event to standard output, after the line with the addresses, the
    /// summary last
    #[arg(long)]
    pub(crate) json: bool,
    /// Keep serving the job's result after its end, until SIGTERM: for pods, which Kubernetes
    /// restarts when they exit
    #[arg(long)]
    pub(crate) stay: bool,
}

/// The time limits of a process of a job, and what its launcher imposes on it.
#[derive(Debug, Args)]
pub(crate) struct PatienceArgs {
    /// Seconds from SIGTERM until this process is killed; it saves a checkpoint within all but the
    /// last few
    #[arg(long, value_name = "SECONDS", env = "RECTRAIN_GRACE_SECONDS", default_value_t = TERMINATION_GRACE_SECONDS)]
    pub(crate) grace_seconds: u32,
    /// Seconds that the job may be without progress; by default the manifest's
    /// `spec.faultTolerance.stallSeconds`
    #[arg(long, value_name = "SECONDS", env = "RECTRAIN_STALL_SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) stall_seconds: Option<u32>,
    /// The process that started this one, for `rectrain run --processes`. This process ends when
    /// its parent is another one, so that it does not outlive a launcher that was killed
    #[arg(long, value_name = "PID", hide = true)]
    pub(crate) parent: Option<u32>,
    /// As in `rectrain run`. Only a process that it started can have it
    #[arg(long, value_name = "RATE[,DELAY]", requires = "parent", conflicts_with = "tls", hide = true)]
    pub(crate) link: Option<Link>,
}

/// The credentials of a process of a job.
#[derive(Debug, Args)]
pub(crate) struct TlsArgs {
    /// A folder with the job's certificate and key (tls.crt, tls.key) and the certificate of its
    /// authority (ca.crt), as PEM, for the name member.rectrain.dev. The process then accepts only
    /// members of the job. Without it nothing is encrypted, and every peer is accepted
    #[arg(long, value_name = "FOLDER")]
    pub(crate) tls: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct MemberArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// This member's index among the replicas of its role, from 0
    #[arg(long)]
    pub(crate) index: u32,
    /// The address of the coordinator
    #[arg(long)]
    pub(crate) coordinator: Address,
    /// The address that this member serves
    #[arg(long, default_value = "tcp://0.0.0.0:7000")]
    pub(crate) bind: Address,
    /// The address where others reach this member, if it differs from the served one
    #[arg(long)]
    pub(crate) advertise: Option<Address>,
    /// The address that serves /metrics
    #[arg(long, default_value = "0.0.0.0:9090")]
    pub(crate) metrics: SocketAddr,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    #[command(flatten)]
    pub(crate) patience: PatienceArgs,
    /// For parameter servers: the directory, in a file system in memory, that holds the rows. If
    /// this process dies, its replacement finds them there
    #[arg(long, value_name = "DIRECTORY", env = "RECTRAIN_SHARED_MEMORY")]
    pub(crate) shared_memory: Option<PathBuf>,
    /// For dense workers: the factor by which computing takes longer
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub(crate) slow: f64,
    /// Keep serving /metrics after the job's end, until SIGTERM: for pods, which Kubernetes
    /// restarts when they exit
    #[arg(long)]
    pub(crate) stay: bool,
}

/// One subcommand for each role whose members join a coordinator. They take the same arguments.
#[derive(Debug)]
pub(crate) struct MemberCommand {
    pub(crate) role: Role,
    pub(crate) args: MemberArgs,
}

impl FromArgMatches for MemberCommand {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let subcommand = matches.subcommand().and_then(|(name, matches)| Some((Role::named(name)?, matches)));
        let Some((role, matches)) = subcommand else {
            return Err(clap::Error::new(clap::error::ErrorKind::MissingSubcommand));
        };
        Ok(Self { role, args: MemberArgs::from_arg_matches(matches)? })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for MemberCommand {
    fn augment_subcommands(command: ClapCommand) -> ClapCommand {
        command.subcommands(Role::MEMBERS.map(|role| {
            // The arguments' own texts would replace an earlier one.
            let command = MemberArgs::augment_args(ClapCommand::new(role.name()));
            command.about(format!("Run one {} of a job", role.singular())).long_about(None).hide(true)
        }))
    }

    fn augment_subcommands_for_update(command: ClapCommand) -> ClapCommand {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        Role::MEMBERS.into_iter().any(|role| role.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn the_first_list_has_no_commands_of_roles() {
        use clap::CommandFactory;
        let help = Cli::command().render_help().to_string();
        let listed: Vec<&str> = help.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
        for role in [&["coordinator", "serving-ps"][..], &Role::MEMBERS.map(Role::name)].concat() {
            assert!(!listed.contains(&role), "{role}: {help}");
        }
        assert!(listed.contains(&"run") && listed.contains(&"completion"), "{help}");
    }

    #[test]
    fn every_role_of_members_has_a_subcommand() {
        use clap::CommandFactory;
        let about =
            |role: Role| Cli::command().find_subcommand(role.name()).unwrap().get_about().map(ToString::to_string);
        assert_eq!(about(Role::Ps).as_deref(), Some("Run one parameter server of a job"));
        for role in Role::MEMBERS {
            let line = ["rectrain", role.name(), "job.yaml", "--index", "3", "--coordinator", "tcp://127.0.0.1:1"];
            let Command::Member(member) = Cli::try_parse_from(line).unwrap().command else { panic!("{role}") };
            assert_eq!((member.role, member.args.index), (role, 3));
            let line = ["rectrain", "scale", role.name(), "2"];
            let Command::Scale(scale) = Cli::try_parse_from(line).unwrap().command else { panic!("{role}") };
            assert_eq!((scale.role, scale.replicas), (role, 2));
        }
    }
}
