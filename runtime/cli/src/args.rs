//! The command line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};
use rectrain_crds::defaults::TERMINATION_GRACE_SECONDS;
use rectrain_crds::{Override, SetKind};
use rectrain_kinds::Role;
use rectrain_wire::Address;

use crate::slow::{Cpus, Slow};

/// Trains recommender models whose embedding tables are too large for one machine.
#[derive(Debug, Parser)]
#[command(name = "rectrain", version, about, max_term_width = 100)]
pub(crate) struct Cli {
    /// How logs are written to standard error (what is logged: RECTRAIN_LOG, as in `info` or `rectrain_protocol=debug`)
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log: LogFormat,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a job on this machine
    Run(RunArgs),
    /// Check a manifest without running it
    Validate(JobArgs),
    /// Explain a field of the manifest or a training mode
    Explain {
        /// A field (`spec.training.globalBatchSize`) or a mode (`hybrid`)
        topic: String,
    },
    /// Simulate the training modes with workers of unequal speed
    Simulate(crate::simulate::SimulateArgs),
    /// Look at what is decided automatically about jobs
    Policy {
        #[command(subcommand)]
        command: crate::policy::PolicyCommand,
    },
    /// Put a public data set into a folder
    Data {
        #[command(subcommand)]
        set: DataSet,
    },
    /// Show the training mode of a running job, or switch it
    Mode(ModeArgs),
    /// Change how many parameter servers, embedding workers, dense workers or loaders a running job has, or spread its rows anew
    Scale(ScaleArgs),
    /// Look at checkpoints, compare them, export one
    Checkpoint {
        #[command(subcommand)]
        command: CheckpointCommand,
    },
    /// Show what dense workers on this machine can compute on
    Devices {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Coordinate a job that runs in several processes
    Coordinator(CoordinatorArgs),
    /// Take part in a job as a parameter server
    Ps(MemberArgs),
    /// Take part in a job as an embedding worker
    EmbeddingWorker(MemberArgs),
    /// Take part in a job as a dense worker
    DenseWorker(MemberArgs),
    /// Take part in a job as a loader
    Loader(MemberArgs),
    /// Show how a job in a cluster stands
    #[cfg(feature = "cluster")]
    Status(RunningJob),
    /// Print the logs of a job in a cluster
    #[cfg(feature = "cluster")]
    Logs(crate::cluster::LogsArgs),
}

/// A manifest and what is changed in it.
#[derive(Debug, Clone, Args)]
pub(crate) struct JobArgs {
    /// The manifest (a RecTrainingJob)
    pub(crate) manifest: PathBuf,
    /// Override a field, as Helm does: `--set spec.training.mode=hybrid`
    #[arg(long = "set", value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
    /// Override a field with text, whatever it looks like
    #[arg(long = "set-string", value_name = "PATH=TEXT")]
    pub(crate) set_string: Vec<String>,
}

impl JobArgs {
    /// In the order in which they are applied.
    pub(crate) fn overrides(&self) -> Vec<Override> {
        overrides(&self.set, &self.set_string)
    }

    /// The same arguments for another process, which reads the manifest elsewhere.
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

/// What `--set` and `--set-string` say, in the order in which it is applied.
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
    /// Print one JSON object an event to standard output, the summary last
    #[arg(long)]
    pub(crate) json: bool,
    /// Give every replica of every role a process of its own
    #[arg(long)]
    pub(crate) processes: bool,
    /// Where to serve /metrics (port 0 takes any free port)
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub(crate) metrics: SocketAddr,
    /// Where `rectrain mode` and other programs reach the job (gRPC; port 0 takes any free port)
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub(crate) control: SocketAddr,
    /// Let a dense worker take so many times as long to compute: `--slow denseWorker-1=4x`
    #[arg(long, value_name = "WORKER=FACTOR")]
    pub(crate) slow: Vec<Slow>,
    /// Limit a dense worker's CPU time to so many cores: `--cpus denseWorker-1=0.25` (with --processes, as root)
    #[arg(long, value_name = "WORKER=CORES", requires = "processes")]
    pub(crate) cpus: Vec<Cpus>,
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
    /// Go on in another mode from the next global-step boundary on; nothing restarts
    Set {
        #[command(flatten)]
        job: RunningJob,
        /// As in spec.training.mode
        mode: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ScaleArgs {
    /// The role
    #[arg(value_enum)]
    pub(crate) role: ScaledRole,
    /// How many there are to be; as many parameter servers as there are spreads their rows anew, by load and bytes
    pub(crate) replicas: u32,
    /// The job's name, or its coordinator's address; the only one that runs on this machine if not given
    #[arg(long)]
    pub(crate) job: Option<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ScaledRole {
    /// Parameter servers
    Ps,
    /// Embedding workers
    EmbeddingWorker,
    /// Dense workers
    DenseWorker,
    /// Loaders
    Loader,
}

impl From<ScaledRole> for Role {
    fn from(role: ScaledRole) -> Self {
        match role {
            ScaledRole::Ps => Self::Ps,
            ScaledRole::EmbeddingWorker => Self::EmbeddingWorker,
            ScaledRole::DenseWorker => Self::DenseWorker,
            ScaledRole::Loader => Self::Loader,
        }
    }
}

/// A job that runs, here or in a cluster.
#[derive(Debug, Clone, Args)]
pub(crate) struct RunningJob {
    /// Its name, or its coordinator's address; a job that runs on this machine comes before one in a cluster
    pub(crate) job: String,
    /// Its namespace in the cluster; the context's if not given
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// The context of the kubeconfig; its current one if not given
    #[arg(long)]
    pub(crate) context: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DataSet {
    /// MovieLens 100k: label = rating of at least 4, the last 20 % of each user's ratings are the test
    #[command(name = "movielens-100k")]
    Movielens100k {
        /// The folder to fill
        #[arg(long, default_value = "data/movielens-100k")]
        output: PathBuf,
        /// Where the data set is already: a folder with u.data, u.user and u.item, or a wheel of recbole; downloaded otherwise
        #[arg(long)]
        from: Option<PathBuf>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List the checkpoints of a path
    Ls {
        #[command(flatten)]
        place: CheckpointPlace,
        /// One JSON object a checkpoint
        #[arg(long)]
        json: bool,
    },
    /// Read checkpoints through and check every checksum
    Verify {
        #[command(flatten)]
        place: CheckpointPlace,
        /// Only the presence and sizes of files
        #[arg(long)]
        sizes: bool,
    },
    /// Show what a checkpoint is of and what it holds (the newest, if a path of several is given)
    Inspect {
        #[command(flatten)]
        place: CheckpointPlace,
        /// The manifest as it is
        #[arg(long)]
        json: bool,
    },
    /// Compare two checkpoints row by row
    Diff {
        #[command(flatten)]
        place: CheckpointPlace,
        /// The other checkpoint (a path of its own)
        other: String,
    },
    /// Write the trained model for other programs: embeddings as Parquet and safetensors, dense parameters as safetensors and ONNX
    Export {
        #[command(flatten)]
        place: CheckpointPlace,
        /// The folder to fill
        #[arg(long)]
        output: PathBuf,
        /// What to write; everything by default
        #[arg(long, value_enum, value_delimiter = ',')]
        format: Vec<ExportFormat>,
        /// Write the optimizers' state too
        #[arg(long)]
        optimizer_state: bool,
    },
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

/// Where checkpoints are.
#[derive(Debug, Clone, Args)]
pub(crate) struct CheckpointPlace {
    /// The job's checkpoint path (a folder, or a gs:// or s3:// URL), or one checkpoint in it (`.../step-000000001000`)
    pub(crate) path: String,
    /// An option of the object store: `--option endpoint=http://127.0.0.1:9000`
    #[arg(long = "option", value_name = "NAME=VALUE")]
    pub(crate) options: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CoordinatorArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// Where members call
    #[arg(long, default_value = "tcp://0.0.0.0:7000")]
    pub(crate) bind: Address,
    /// Where the operator and the command line follow the job (gRPC)
    #[arg(long, default_value = "0.0.0.0:7001")]
    pub(crate) control: SocketAddr,
    /// Where to serve /metrics
    #[arg(long, default_value = "0.0.0.0:9090")]
    pub(crate) metrics: SocketAddr,
    /// Names this run of the job, in all its attempts: without `spec.checkpoint.resume: latest` it goes on from its own
    /// checkpoints only
    #[arg(long, value_name = "NAME", default_value = "")]
    pub(crate) run: String,
    /// Keep all that is known in this folder, which outlives the process: started again with it, the coordinator goes on where it
    /// was killed, and so do the members. Without it the job begins anew from its last checkpoint
    #[arg(long, value_name = "FOLDER", env = "RECTRAIN_JOURNAL")]
    pub(crate) journal: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) patience: PatienceArgs,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Print one JSON object an event to standard output after the line with the addresses, the summary last
    #[arg(long)]
    pub(crate) json: bool,
    /// After the job has ended, go on answering how it ended until told to stop (SIGTERM): for pods, which are restarted
    /// when they exit
    #[arg(long)]
    pub(crate) stay: bool,
}

/// How long is waited for a process of a job.
#[derive(Debug, Args)]
pub(crate) struct PatienceArgs {
    /// Seconds that this process has to end in order once it is told to, the last few of which it leaves
    #[arg(long, value_name = "SECONDS", env = "RECTRAIN_GRACE_SECONDS", default_value_t = TERMINATION_GRACE_SECONDS)]
    pub(crate) grace_seconds: u32,
    /// Seconds that the job may be without progress, if not as the manifest says (`spec.faultTolerance.stallSeconds`)
    #[arg(long, value_name = "SECONDS", env = "RECTRAIN_STALL_SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) stall_seconds: Option<u32>,
}

/// Whom a process of a job speaks with.
#[derive(Debug, Args)]
pub(crate) struct TlsArgs {
    /// Speak with members of the job only: the folder has the job's certificate (tls.crt, tls.key) and that of the authority
    /// which has signed it (ca.crt), PEM, for the name member.rectrain.dev. Without it nothing is encrypted and anybody is heard
    #[arg(long, value_name = "FOLDER")]
    pub(crate) tls: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct MemberArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// Which replica of its role this is, from 0
    #[arg(long)]
    pub(crate) index: u32,
    /// Where the coordinator is
    #[arg(long)]
    pub(crate) coordinator: Address,
    /// Where to serve
    #[arg(long, default_value = "tcp://0.0.0.0:7000")]
    pub(crate) bind: Address,
    /// Where others reach this member, if not where it serves
    #[arg(long)]
    pub(crate) advertise: Option<Address>,
    /// Where to serve /metrics
    #[arg(long, default_value = "0.0.0.0:9090")]
    pub(crate) metrics: SocketAddr,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    #[command(flatten)]
    pub(crate) patience: PatienceArgs,
    /// As a parameter server, keep the rows in this directory of a file system in memory, where a process that takes the place of this
    /// one finds them
    #[arg(long, value_name = "DIRECTORY", env = "RECTRAIN_SHARED_MEMORY")]
    pub(crate) shared_memory: Option<PathBuf>,
    /// As a dense worker, take so many times as long to compute
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub(crate) slow: f64,
    /// After the job has ended, go on serving /metrics until told to stop (SIGTERM): for pods, which are restarted when
    /// they exit
    #[arg(long)]
    pub(crate) stay: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
