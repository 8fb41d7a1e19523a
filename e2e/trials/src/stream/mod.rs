//! `cargo xtask stream`: trials of jobs that train from a real Kafka.

mod online;
mod throughput;

use rectrain_harness::HarnessError;

use crate::TrialError;

const USAGE: &str = "usage: cargo xtask stream throughput|online ARGS
  throughput [--rows 1000000] [--rounds 3] [--set PATH=VALUE]
    trains the same synthetic rows from a CSV file and from a topic of 8 partitions, in turns; prints one line of
    JSON for each run, and the medians with their ratio at the end; fails if the models differ, or if Kafka has
    less than .8 of the throughput of the file
  online --data FILE [--seed 42] [--svg FILE] [--set PATH=VALUE]
    replays FILE (ratings of MovieLens-1M as CSV, plain or with gzip: user_id, movie_id, label, timestamp) in the
    order of time to 8 partitions, trains the first tenth, and then the rest beside a copy that is frozen there;
    prints the quality of both by tenths, and fails unless the AUC of the last half is at least .01 better online";
/// The topic of a trial, on a broker of its own.
const TOPIC: &str = "rows";

/// Runs the trial that the command line names.
///
/// # Errors
/// Wrong arguments; a run that fails; a claim that [`USAGE`] lists and that does not hold.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    match arguments {
        ["throughput", rest @ ..] => throughput::run(rest),
        ["online", rest @ ..] => online::run(rest),
        _ => Err(HarnessError::Usage(USAGE).into()),
    }
}
