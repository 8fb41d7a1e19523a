//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rectrain_crds::{Override, SetKind};
use rectrain_wire::Address;

/// Trains recommender models whose embedding tables are too large for one machine.
#[derive(Debug, Parser)]
#[command(name = "rectrain", version, about, max_term_width = 100)]
pub(crate) struct Cli {
    /// How logs are written to standard error (what is logged: RECTRAIN_LOG, as in `info` or `rectrain_roles=debug`)
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
    /// Put a public data set into a folder
    Data {
        #[command(subcommand)]
        set: DataSet,
    },
    /// Look at checkpoints, compare them, export one
    Checkpoint {
        #[command(subcommand)]
        command: CheckpointCommand,
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
        let of = |kind, expressions: &[String]| {
            expressions
                .iter()
                .map(move |expression| Override { kind, expression: expression.clone() })
                .collect::<Vec<_>>()
        };
        [of(SetKind::Infer, &self.set), of(SetKind::Text, &self.set_string)].concat()
    }

    /// The same arguments for another process.
    pub(crate) fn repeat(&self) -> Vec<std::ffi::OsString> {
        let mut arguments = vec![self.manifest.clone().into_os_string()];
        for (flag, expressions) in [("--set", &self.set), ("--set-string", &self.set_string)] {
            for expression in expressions {
                arguments.extend([flag.into(), expression.into()]);
            }
        }
        arguments
    }
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
