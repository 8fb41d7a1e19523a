//! Jobs that run on this machine, by name, so that another command can speak to them: each `rectrain run` leaves a note of
//! where its coordinator is while it runs.

use std::path::PathBuf;
use std::time::SystemTime;

use rectrain_proto::v1::control_client::ControlClient;
use serde::{Deserialize, Serialize};
use tonic::transport::Channel;

use crate::Failure;

#[derive(Debug, Serialize, Deserialize)]
struct Note {
    control: String,
}

/// A note that is there as long as this value.
pub(crate) struct Running {
    file: Option<PathBuf>,
}

impl Running {
    /// Notes that the job `name` is at `control`. A machine that has no place for notes runs jobs all the same.
    pub(crate) fn note(name: &str, control: &str) -> Self {
        let file = folder().join(format!("{name}.{}.json", std::process::id()));
        let note = Note { control: control.to_owned() };
        let written = std::fs::create_dir_all(folder())
            .and_then(|()| std::fs::write(&file, serde_json::to_vec(&note).unwrap_or_default()));
        if let Err(error) = &written {
            tracing::warn!(%error, file = %file.display(), "the job cannot be reached by its name");
        }
        Self { file: written.is_ok().then_some(file) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // Somebody cleaned up before.
            let _gone = std::fs::remove_file(file);
        }
    }
}

/// The control interface of a job: a name of one that runs on this machine, or the address of a coordinator. `None` if no job of
/// that name runs here.
pub(crate) async fn connect(job: &str) -> Result<Option<ControlClient<Channel>>, Failure> {
    if job.contains("://") {
        let lost = |error| Failure::Failed(format!("there is no coordinator at {job}: {error}"));
        return ControlClient::connect(job.to_owned()).await.map(Some).map_err(lost);
    }
    for note in notes(job) {
        // One that was killed leaves its note behind.
        if let Ok(client) = ControlClient::connect(note.control).await {
            return Ok(Some(client));
        }
    }
    Ok(None)
}

/// The notes of jobs of this name, the latest first.
fn notes(name: &str) -> Vec<Note> {
    let prefix = format!("{name}.");
    let of_this_job = |file: &PathBuf| {
        let file = file.file_name().and_then(|file| file.to_str()).unwrap_or_default();
        let process = file.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".json"));
        process.is_some_and(|process| process.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let entries = std::fs::read_dir(folder()).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(of_this_job).collect();
    files
        .sort_by_key(|file| std::fs::metadata(file).and_then(|meta| meta.modified()).unwrap_or(SystemTime::UNIX_EPOCH));
    files.iter().rev().filter_map(|file| serde_json::from_slice(&std::fs::read(file).ok()?).ok()).collect()
}

fn folder() -> PathBuf {
    let base = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    base.join("rectrain")
}
