//! Sets of Linux namespaces (network, mounts, processes) that contain the cluster.
//!
//! The first process of a set identifies it, and only reaps orphans. When it is killed, the kernel
//! ends all other processes of the set and removes their mounts and links. So `down` cannot miss
//! anything. No file records the sets; they are found in /proc.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rectrain_harness::command::{command, output};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, files, not_yet, processes};

use crate::paths::Paths;
use crate::process::pid_namespace;

/// How long namespaces and processes may take to appear or to disappear.
const PATIENCE: Duration = Duration::from_secs(20);

/// One set of namespaces.
#[derive(Debug, Clone)]
pub(crate) struct Namespaces {
    /// The first process, by its id on this machine.
    init: u32,
}

/// A program that runs as long as the cluster does.
#[derive(Debug, Clone)]
pub(crate) struct Daemon {
    /// The name of its log.
    pub(crate) name: String,
    /// The program and its arguments.
    pub(crate) words: Vec<String>,
    /// The files it reads, with their content; they are written before it starts.
    pub(crate) files: Vec<(PathBuf, String)>,
}

impl Namespaces {
    /// The set with this name, if it exists.
    pub(crate) fn find(paths: &Paths, name: &str) -> Option<Self> {
        let words = words_of_init(paths, name);
        processes::all().find(|(_, running)| *running == words).map(|(init, _)| Self { init })
    }

    /// Makes a new set, inside another one if `within` is given.
    pub(crate) fn create(paths: &Paths, name: &str, within: Option<&Self>) -> Result<Self, HarnessError> {
        let unshare =
            ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"].map(str::to_owned);
        let words: Vec<_> = unshare.into_iter().chain(words_of_init(paths, name)).collect();
        let log = paths.log(name);
        start(within, &words, &log)?;
        let awaited = format!("the namespaces of {name} (see {})", log.display());
        eventually(PATIENCE, &awaited, || {
            Self::find(paths, name).ok_or_else(|| not_yet("their first process does not run"))
        })
    }

    /// The first process, by its id on this machine.
    pub(crate) fn init(&self) -> u32 {
        self.init
    }

    /// A command that runs inside the set.
    pub(crate) fn command<S: AsRef<std::ffi::OsStr>>(
        &self,
        program: impl AsRef<std::ffi::OsStr>,
        arguments: impl IntoIterator<Item = S>,
    ) -> Command {
        let words = self.entering();
        let mut command = command(&words[0], &words[1..]);
        command.arg(program).args(arguments);
        command
    }

    /// Runs a shell script of `e2e/cluster/config` inside the set.
    pub(crate) fn script(&self, text: &str, environment: &[(&str, &str)]) -> Result<(), HarnessError> {
        output(self.command("sh", ["-c", text]).envs(environment.iter().copied())).map(drop)
    }

    /// Starts the daemon inside the set unless it runs; returns whether it was started.
    pub(crate) fn ensure(&self, paths: &Paths, daemon: &Daemon) -> Result<bool, HarnessError> {
        if self.process_of(daemon).is_some() {
            return Ok(false);
        }
        daemon.files.iter().try_for_each(|(path, text)| files::write(path, text))?;
        start(Some(self), &daemon.words, &paths.log(&daemon.name)).map(|()| true)
    }

    /// The daemon's process, if it runs.
    pub(crate) fn process_of(&self, daemon: &Daemon) -> Option<u32> {
        let within = pid_namespace(self.init)?;
        processes::all()
            .find(|(process, words)| *words == daemon.words && pid_namespace(*process).as_ref() == Some(&within))
            .map(|(process, _)| process)
    }

    fn entering(&self) -> Vec<String> {
        let init = self.init.to_string();
        ["nsenter", "--target", &init, "--net", "--mount", "--pid", "--"].map(str::to_owned).to_vec()
    }

    /// Ends the set and every process in it.
    pub(crate) fn kill(&self) -> Result<(), HarnessError> {
        // The process may have ended by itself, which is as good.
        let _killed = processes::signal(self.init, "KILL");
        let path = PathBuf::from(format!("/proc/{}/ns/pid", self.init));
        eventually(PATIENCE, "the end of the cluster's processes", || match path.read_link() {
            Ok(_) => Err(not_yet(format!("process {} is still there", self.init))),
            Err(_) => Ok(()),
        })
    }
}

/// Starts a program that outlives this one. The first process of its PID namespace becomes its
/// parent.
fn start(within: Option<&Namespaces>, words: &[String], log: &Path) -> Result<(), HarnessError> {
    if let Some(folder) = log.parent() {
        files::make_folder(folder)?;
    }
    let background =
        [r#"log=$1; shift; setsid "$@" </dev/null >>"$log" 2>&1 &"#, "sh", &*log.to_string_lossy()].map(str::to_owned);
    let mut shell = match within {
        Some(namespaces) => namespaces.command("sh", ["-c"]),
        None => command("sh", ["-c"]),
    };
    output(shell.args(background).args(words)).map(drop)
}

/// The command line of a set's first process. Its argument names the set.
fn words_of_init(paths: &Paths, name: &str) -> Vec<String> {
    vec![paths.program("init").display().to_string(), paths.run().join(name).display().to_string()]
}
