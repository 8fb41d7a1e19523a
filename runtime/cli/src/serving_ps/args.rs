//! The arguments of `rectrain serving-ps`.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;

use crate::serve::args::{time, time_above_zero};

#[derive(Debug, Args)]
pub(crate) struct ServingPsArgs {
    /// A path of spec.serving.publish; the server waits for its first model
    pub(super) path: String,
    /// The shard that this server holds, from 0
    #[arg(long)]
    pub(super) shard: u32,
    /// The number of shards
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) shards: u32,
    /// The address that serves look-ups, without TLS (port 0 takes any free port)
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8090")]
    pub(super) listen: SocketAddr,
    /// The address that serves health and /metrics (port 0 takes any free port)
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    pub(super) http: SocketAddr,
    /// The time between two looks for a newer published model; by default 20ms in a folder, and 1s
    /// in a bucket, where each look is a request
    #[arg(long, value_name = "TIME", value_parser = time_above_zero)]
    pub(super) poll: Option<Duration>,
    /// Versions of the model that are held, so that inference servers can change over
    #[arg(long, value_name = "NUMBER", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(super) versions: u16,
    /// The time after SIGTERM in which the server is not ready but still answers
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = time)]
    pub(super) drain: Duration,
    /// An option of the path's object store: `--option endpoint=http://127.0.0.1:9000`
    #[arg(long = "option", value_name = "NAME=VALUE")]
    pub(super) options: Vec<String>,
}
