//! Running `rectrain` on this machine.

use std::process::{Command, Output};

use serde_json::Value;

use crate::command::{command, output};
use crate::workspace::{built, workspace};
use crate::{HarnessError, events, files, not_yet};

/// `rectrain run MANIFEST --json` with these overrides, for more arguments.
///
/// # Errors
/// See [`built`].
pub fn job<'a>(manifest: &str, sets: impl IntoIterator<Item = &'a String>) -> Result<Command, HarnessError> {
    let mut command = Command::new(built("rectrain")?);
    command.args(["run", manifest, "--json", "--no-history"]).current_dir(workspace());
    for set in sets {
        command.args(["--set", set]);
    }
    Ok(command)
}

/// Runs a job and returns its outputs and exit status.
///
/// # Errors
/// [`HarnessError::NotStarted`].
pub fn run(mut job: Command) -> Result<Output, HarnessError> {
    job.output().map_err(|source| HarnessError::NotStarted {
        command: crate::command::shown(&job),
        hint: "build it with `cargo build --release`",
        source,
    })
}

/// Runs a job and returns its summary.
///
/// # Errors
/// See [`run`] and [`events::summary`].
pub fn train(job: Command) -> Result<Value, HarnessError> {
    events::summary(&run(job)?)
}

/// Trains a manifest with `rectrain run`, outside of the cluster, and returns the summary.
///
/// # Errors
/// See [`output`] and [`events::final_event`].
pub fn train_outside(manifest: &Value) -> Result<Value, HarnessError> {
    let file = std::env::temp_dir().join(format!("rectrain-{}.json", std::process::id()));
    files::write(&file, manifest.to_string())?;
    let printed = output(command(built("rectrain")?, ["run", "--json", "--no-history"]).arg(&file));
    // The file has served its purpose, whether or not the run succeeded.
    let _removed = std::fs::remove_file(&file);
    events::final_event(&printed?)
}

/// Changes the number of parameter servers of a job that runs on this machine.
///
/// # Errors
/// [`HarnessError::Failed`] if the job refuses.
pub fn scale_servers(replicas: u32, job: &str) -> Result<(), HarnessError> {
    output(&mut command(built("rectrain")?, ["scale", "ps", &replicas.to_string(), "--job", job])).map(drop)
}

/// Prepares the MovieLens data set in the workspace, unless it is there.
///
/// # Errors
/// [`HarnessError::NotYet`] with the reason why it cannot be downloaded.
pub fn movielens_data() -> Result<(), HarnessError> {
    let mut data = command(built("rectrain")?, ["data", "movielens-100k"]);
    let prepared = output(data.current_dir(workspace()));
    prepared.map(drop).map_err(|error| not_yet(format!("the data set cannot be downloaded: {error}")))
}

/// Writes the rows of a text file of the workspace to a Kafka topic.
///
/// # Errors
/// See [`output`].
pub fn replay(file: &str, topic: &str) -> Result<(), HarnessError> {
    let mut replay = command(built("rectrain")?, ["data", "replay", file, "--to", topic]);
    output(replay.current_dir(workspace())).map(drop)
}
