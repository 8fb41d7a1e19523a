//! Sets of namespaces (network, mounts, processes) in which the cluster runs. A set is known by its first process, which does
//! nothing but reap orphans: when it is killed the kernel ends every other process in them and removes their mounts and links,
//! so that taking the cluster down cannot miss anything. Nothing about them is written down; they are found in /proc.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::paths::{Paths, make_folder, write};
use super::process::{self, command, eventually, output};

/// How long namespaces and processes have to come and to go.
const PATIENCE: Duration = Duration::from_secs(20);

/// See the module's text.
#[derive(Debug, Clone)]
pub(super) struct Namespaces {
    /// The first process, as this machine counts processes.
    init: u32,
}

/// A program that runs for as long as the cluster does.
#[derive(Debug, Clone)]
pub(super) struct Daemon {
    /// The name of its log.
    pub(super) name: String,
    /// The program and its arguments.
    pub(super) words: Vec<String>,
    /// The files that it reads and what is in them; they are written before it is started.
    pub(super) files: Vec<(PathBuf, String)>,
}

impl Namespaces {
    /// Those of this name, if there are any.
    pub(super) fn find(paths: &Paths, name: &str) -> Option<Self> {
        let words = words_of_init(paths, name);
        process::all().find(|(_, running)| *running == words).map(|(init, _)| Self { init })
    }

    /// New ones, within others if they are given.
    pub(super) fn create(paths: &Paths, name: &str, within: Option<&Self>) -> Result<Self, String> {
        let unshare =
            ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"].map(str::to_owned);
        let words: Vec<_> = unshare.into_iter().chain(words_of_init(paths, name)).collect();
        let log = paths.log(name);
        start(within, &words, &log)?;
        let what = format!("new namespaces for {name} (see {})", log.display());
        eventually(PATIENCE, &what, || Self::find(paths, name).ok_or_else(|| "they are not there".to_owned()))
    }

    /// The first process, as this machine counts processes.
    pub(super) fn init(&self) -> u32 {
        self.init
    }

    /// A command that runs within.
    pub(super) fn command<S: AsRef<std::ffi::OsStr>>(
        &self,
        program: impl AsRef<std::ffi::OsStr>,
        arguments: impl IntoIterator<Item = S>,
    ) -> Command {
        let words = self.entering();
        let mut command = command(&words[0], &words[1..]);
        command.arg(program).args(arguments);
        command
    }

    /// Runs a shell script of `e2e/cluster/config` within.
    pub(super) fn script(&self, text: &str, environment: &[(&str, &str)]) -> Result<(), String> {
        output(self.command("sh", ["-c", text]).envs(environment.iter().copied())).map(drop)
    }

    /// Starts the daemon within if it does not run; says whether it did so.
    pub(super) fn ensure(&self, paths: &Paths, daemon: &Daemon) -> Result<bool, String> {
        if self.runs(daemon).is_some() {
            return Ok(false);
        }
        daemon.files.iter().try_for_each(|(path, text)| write(path, text))?;
        start(Some(self), &daemon.words, &paths.log(&daemon.name)).map(|()| true)
    }

    /// The daemon's process, if it runs.
    pub(super) fn runs(&self, daemon: &Daemon) -> Option<u32> {
        let within = process::pid_namespace(self.init)?;
        process::all()
            .find(|(process, words)| {
                *words == daemon.words && process::pid_namespace(*process).as_ref() == Some(&within)
            })
            .map(|(process, _)| process)
    }

    fn entering(&self) -> Vec<String> {
        let init = self.init.to_string();
        ["nsenter", "--target", &init, "--net", "--mount", "--pid", "--"].map(str::to_owned).to_vec()
    }

    /// Ends them and all that runs in them.
    pub(super) fn kill(&self) -> Result<(), String> {
        // It may have ended in this moment, which is what is wanted.
        let _killed = output(&mut command("kill", ["-KILL", &self.init.to_string()]));
        let path = PathBuf::from(format!("/proc/{}/ns/pid", self.init));
        eventually(PATIENCE, "the end of the cluster's processes", || match path.read_link() {
            Ok(_) => Err(format!("process {} is still there", self.init)),
            Err(_) => Ok(()),
        })
    }
}

/// Starts a program that outlives this one: the first process of the namespaces inherits it (or that of the machine, if it is
/// started in none).
fn start(within: Option<&Namespaces>, words: &[String], log: &Path) -> Result<(), String> {
    if let Some(folder) = log.parent() {
        make_folder(folder)?;
    }
    let background =
        [r#"log=$1; shift; setsid "$@" </dev/null >>"$log" 2>&1 &"#, "sh", &*log.to_string_lossy()].map(str::to_owned);
    let mut shell = match within {
        Some(namespaces) => namespaces.command("sh", ["-c"]),
        None => command("sh", ["-c"]),
    };
    output(shell.args(background).args(words)).map(drop)
}

fn words_of_init(paths: &Paths, name: &str) -> Vec<String> {
    vec![paths.program("init").display().to_string(), paths.run().join(name).display().to_string()]
}
