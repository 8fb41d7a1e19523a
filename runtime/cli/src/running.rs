//! Finds jobs that run on this machine by name, for the commands that control them. While it runs,
//! each `rectrain run` keeps a file, its note, with the address of its coordinator.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rectrain_proto::v1::control_client::ControlClient;
use serde::{Deserialize, Serialize};
use tonic::transport::Channel;

use crate::failure::Failure;

#[derive(Debug, Serialize, Deserialize)]
struct Note {
    control: String,
    /// Absent in the notes of earlier versions.
    #[serde(default)]
    page: Option<String>,
}

/// The note of a running job. Dropping this value removes the file.
pub(crate) struct Running {
    file: Option<PathBuf>,
}

impl Running {
    /// Notes that the coordinator of job `name` serves `control` and `page`. If the note cannot be
    /// written, the job runs nevertheless.
    pub(crate) fn note(name: &str, control: &str, page: &str) -> Self {
        let file = folder().join(format!("{name}.{}.json", std::process::id()));
        let note = Note { control: control.to_owned(), page: Some(page.to_owned()) };
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
            // Another program may have cleaned up before.
            let _gone = std::fs::remove_file(file);
        }
    }
}

/// Connects to the control interface of a job. `job` is the address of a coordinator, or the name
/// of a job that runs on this machine. `None` if no job of that name runs here.
pub(crate) async fn connect(job: &str) -> Result<Option<ControlClient<Channel>>, Failure> {
    if let Some(address) = address(job) {
        let lost = |error| Failure::Failed(format!("no coordinator answers at {job}: {error}"));
        return ControlClient::connect(address).await.map(Some).map_err(lost);
    }
    for note in notes(job) {
        // A killed job leaves its note behind.
        if let Ok(client) = ControlClient::connect(note.control).await {
            return Ok(Some(client));
        }
    }
    Ok(None)
}

/// The address of the page of a job that runs on this machine; `None` if no job of that name runs
/// here.
pub(crate) fn page(job: &str) -> Option<String> {
    notes(job).into_iter().find_map(|note| note.page)
}

/// The URL of a coordinator, if `job` is one, or a host with a port. A job's name has no colon.
fn address(job: &str) -> Option<String> {
    if job.contains("://") {
        return Some(job.to_owned());
    }
    let (_host, port) = job.rsplit_once(':')?;
    port.parse::<u16>().ok().map(|_| format!("http://{job}"))
}

/// The name and the control interface of the only job that runs on this machine.
pub(crate) async fn the_only_one() -> Result<(String, ControlClient<Channel>), Failure> {
    let mut names: Vec<String> = files().iter().filter_map(|file| Some(name_of(file)?.to_owned())).collect();
    names.sort();
    names.dedup();
    let mut running = Vec::new();
    for name in names {
        if let Some(client) = connect(&name).await? {
            running.push((name, client));
        }
    }
    match running.len() {
        0 => Err(Failure::User("no job runs on this machine: give the address of a coordinator with --job".to_owned())),
        1 => Ok(running.remove(0)),
        _ => {
            let names: Vec<&str> = running.iter().map(|(name, _)| &**name).collect();
            Err(Failure::User(format!(
                "several jobs run on this machine: choose one with --job ({})",
                names.join(", ")
            )))
        }
    }
}

/// The notes of jobs with this name, the latest first.
fn notes(name: &str) -> Vec<Note> {
    let mut files: Vec<PathBuf> = files().into_iter().filter(|file| name_of(file) == Some(name)).collect();
    files
        .sort_by_key(|file| std::fs::metadata(file).and_then(|meta| meta.modified()).unwrap_or(SystemTime::UNIX_EPOCH));
    files.iter().rev().filter_map(|file| serde_json::from_slice(&std::fs::read(file).ok()?).ok()).collect()
}

/// The note files of all jobs whose process lives, as far as `/proc` can tell. The check matters
/// because another program may by now listen at the address of a killed job.
fn files() -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder()).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_gone = |file: &PathBuf| {
        let process = parts_of(file).map(|(_, process)| Path::new("/proc").join(process));
        process.is_some_and(|process| Path::new("/proc/self").exists() && !process.exists())
    };
    files.filter(|file| !is_gone(file)).collect()
}

/// The name of the job that a note file belongs to.
fn name_of(file: &Path) -> Option<&str> {
    parts_of(file).map(|(name, _)| name)
}

/// The job's name and the process id in the name of a note file.
fn parts_of(file: &Path) -> Option<(&str, &str)> {
    let (name, process) = file.file_name()?.to_str()?.strip_suffix(".json")?.rsplit_once('.')?;
    process.bytes().all(|byte| byte.is_ascii_digit()).then_some((name, process))
}

fn folder() -> PathBuf {
    let base = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    base.join("rectrain")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_no_scheme() {
        assert_eq!(address("127.0.0.1:8098").as_deref(), Some("http://127.0.0.1:8098"));
        assert_eq!(address("https://job:7001").as_deref(), Some("https://job:7001"));
        assert_eq!(address("clicks"), None);
        assert_eq!(address("clicks:none"), None);
    }
}
