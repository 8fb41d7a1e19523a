//! A shell that cleans up if this process is killed.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};

use rectrain_harness::HarnessError;
use rectrain_harness::command::start;
use rectrain_harness::workspace::built;

/// The guard's program. It reads the process groups of steps, one per line, until `dismissed`. If
/// its input ends without that word, this process is dead: the guard kills the last group and takes
/// the cluster down.
const SCRIPT: &str = r#"while read -r word; do case $word in dismissed) exit 0 ;; *) group=$word ;; esac; done
[ -z "$group" ] || kill -s KILL -- "-$group"
[ "$1" = stays ] || exec "$0" cluster down"#;

/// A shell that waits for the end of this process, or for its dismissal.
#[derive(Debug)]
pub(super) struct Guard {
    pub(super) shell: Child,
    pub(super) input: Option<ChildStdin>,
}

impl Guard {
    /// Starts the guard. With `cluster_stays` it only ends the step under way.
    pub(super) fn new(cluster_stays: bool) -> Result<Self, HarnessError> {
        let mut shell = Command::new("sh");
        shell.args(["-c", SCRIPT]).arg(built("xtask")?).arg(if cluster_stays { "stays" } else { "goes" });
        // In a process group of its own, an interrupt from the keyboard does not reach it.
        let mut shell = start(shell.stdin(Stdio::piped()).process_group(0))?;
        let input = shell.stdin.take();
        Ok(Self { shell, input })
    }

    /// Guards the step's process group from now on.
    pub(super) fn watch(&mut self, step: &Child) {
        self.send(&step.id().to_string());
    }

    /// Ends the guard, without a clean-up.
    pub(super) fn dismiss(mut self) {
        self.send("dismissed");
        let _waited = self.shell.wait();
    }

    /// A dead guard is no reason to stop the tests.
    fn send(&mut self, word: &str) {
        if let Some(input) = &mut self.input {
            let _written = writeln!(input, "{word}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::step::kill_group;
    use super::super::step::tests::{child_with_grandchild, runs, soon};
    use super::*;

    #[test]
    fn a_step_ends_with_its_owner_but_not_with_a_dismissed_guard() {
        for (killed, seconds) in [(true, "1002.5"), (false, "1003.5")] {
            let mut guard = Guard::new(true).unwrap();
            let mut step = child_with_grandchild(seconds);
            guard.watch(&step);
            assert!(soon(|| runs(seconds)));
            if killed {
                // The pipe closes, as it does when this process ends.
                drop(guard.input.take());
                guard.shell.wait().unwrap();
                assert!(soon(|| !runs(seconds)));
            } else {
                guard.dismiss();
                assert!(runs(seconds));
            }
            kill_group(&mut step);
        }
    }
}
