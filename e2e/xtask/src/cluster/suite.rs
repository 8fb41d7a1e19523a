//! The cluster's part of `cargo xtask test`: a cluster comes up, the chart is installed, MovieLens is trained, the operator is put to
//! the test, and the cluster goes, each a step that is a process of its own, with a log and a bounded time. What cannot be had on this
//! machine is skipped, aloud. A cluster that was there is used and stays.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use super::namespaces::Namespaces;
use super::paths::{Paths, lock, make_folder};
use super::process::{command, output};
use super::{CONTROL_PLANE_NAME, available, foreign_kubeconfig, nothing_is_left, tools};

/// Building the cluster's programs, once, may take so long.
const PROGRAMS: Duration = Duration::from_secs(15 * 60);
/// Nor may it begin, or go on, so late in `cargo xtask test` that all of that takes more than an hour.
const PROGRAMS_END: Duration = Duration::from_secs(42 * 60);
/// Lines of a log that are shown of a step that failed.
const LAST_LINES: usize = 40;

/// A command of `cargo xtask cluster`.
#[derive(Debug, Clone, Copy)]
struct Step {
    words: &'static [&'static str],
    patience: Duration,
}

const fn step(words: &'static [&'static str], seconds: u64) -> Step {
    Step { words, patience: Duration::from_secs(seconds) }
}

const UP: Step = step(&["up"], 300);
const INSTALL: Step = step(&["install"], 600);
const DEMO: Step = step(&["demo"], 600);
/// The demonstration leaves its job to be looked at.
const DEMO_OVER: Step = step(&["kubectl", "delete", "namespace", "rectrain-demo"], 120);
const OPERATE: Step = step(&["operate", "--quick"], 1800);
const DOWN: Step = step(&["down"], 60);

/// How a step did not get through.
#[derive(Debug)]
enum Stopped {
    /// It took too long and was ended, with all that it had started.
    Late(String),
    /// It failed.
    Failed(String),
}

/// All of it. `begun` is when `cargo xtask test` was.
pub(crate) fn suite(begun: Instant) -> Result<(), String> {
    let paths = Paths::new()?;
    if let Err(reason) = available() {
        skipped("the cluster's tests", &reason);
        return Ok(());
    }
    // One at a time on a machine: another one may take the cluster down that this one uses.
    let _lock = lock(&paths, "suite")?;
    let foreign = foreign_kubeconfig(&paths).is_some();
    let was_there = foreign || Namespaces::find(&paths, CONTROL_PLANE_NAME).is_some();
    let mut guard = Guard::new(was_there)?;
    let tested = programs(&paths, &mut guard, begun).and_then(|there| match there {
        true => rendered_charts().and_then(|()| in_cluster(&paths, &mut guard, foreign)),
        false => Ok(()),
    });
    let taken_down = if was_there { Ok(()) } else { take_down(&paths, &mut guard) };
    guard.dismiss();
    tested.and(taken_down)
}

/// Builds what the cluster is made of; gives whether it is there.
fn programs(paths: &Paths, guard: &mut Guard, begun: Instant) -> Result<bool, String> {
    let left = PROGRAMS_END.saturating_sub(begun.elapsed());
    // Programs that are there already take no time.
    let patience = PROGRAMS.min(left).max(Duration::from_secs(20));
    match run(paths, guard, Step { words: &["programs"], patience }) {
        Ok(()) => Ok(true),
        Err(Stopped::Failed(told)) if told.contains(tools::BROKEN) => Err(told),
        Err(Stopped::Late(told) | Stopped::Failed(told)) => {
            skipped("the cluster's tests", &format!("its programs cannot be had here: {told}"));
            Ok(false)
        }
    }
}

/// The tests of the chart once more: before, there may have been no helm to render it with.
fn rendered_charts() -> Result<(), String> {
    crate::cargo(&["test", "--release", "--workspace", "--test", "operator", "chart::"], "its output is above")
}

fn in_cluster(paths: &Paths, guard: &mut Guard, foreign: bool) -> Result<(), String> {
    let mut steps = vec![INSTALL];
    if !foreign {
        steps.insert(0, UP);
    }
    match crate::movielens_data() {
        Ok(()) => steps.extend([DEMO, DEMO_OVER]),
        Err(reason) => skipped("MovieLens in the cluster", &reason),
    }
    steps.push(OPERATE);
    for step in steps {
        run(paths, guard, step).map_err(|stopped| match stopped {
            Stopped::Late(told) | Stopped::Failed(told) => told,
        })?;
    }
    Ok(())
}

/// Whatever has happened, nothing stays of a cluster that was not there.
fn take_down(paths: &Paths, guard: &mut Guard) -> Result<(), String> {
    run(paths, guard, DOWN).map_err(|stopped| match stopped {
        Stopped::Late(told) | Stopped::Failed(told) => told,
    })?;
    nothing_is_left(paths)
}

fn skipped(what: &str, because: &str) {
    eprintln!("xtask: SKIPPED {what}, because {because}");
}

/// Runs a step to its end, or ends it when its time is over.
fn run(paths: &Paths, guard: &mut Guard, step: Step) -> Result<(), Stopped> {
    let name = step.words.join(" ");
    let log = paths.root().join("test-log").join(format!("{}.log", step.words[0]));
    let failed = |what: String| Stopped::Failed(format!("the cluster's step `{name}`: {what}"));
    let mut child = start(&step, &log).map_err(failed)?;
    guard.watch(&child);
    let begun = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|error| failed(error.to_string()))? {
            Some(status) => break Some(status),
            None if begun.elapsed() > step.patience => break None,
            None => std::thread::sleep(Duration::from_millis(100)),
        }
    };
    let took = begun.elapsed().as_secs_f64();
    match status {
        Some(status) if status.success() => {
            eprintln!("xtask: the cluster's step `{name}` took {took:.0} s");
            Ok(())
        }
        Some(status) => Err(failed(format!("{status} after {took:.0} s{}", last_lines(paths, &step, &log)))),
        None => {
            end(&mut child);
            let told = format!("not done after {took:.0} s, and ended{}", last_lines(paths, &step, &log));
            Err(Stopped::Late(format!("the cluster's step `{name}`: {told}")))
        }
    }
}

/// In a group of processes of its own, so that whatever it starts can be ended with it.
fn start(step: &Step, log: &PathBuf) -> Result<Child, String> {
    if let Some(folder) = log.parent() {
        make_folder(folder)?;
    }
    let cannot = |error: std::io::Error| format!("cannot write {}: {error}", log.display());
    let out = std::fs::File::create(log).map_err(cannot)?;
    let also_out = out.try_clone().map_err(cannot)?;
    let mut own = command(crate::built("xtask")?, ["cluster"]);
    own.args(step.words).stdout(out).stderr(also_out).process_group(0);
    own.spawn().map_err(|error| format!("cannot be started: {error}"))
}

fn end(child: &mut Child) {
    // It may have ended in this moment.
    let _killed = output(&mut command("kill", ["-KILL", "--", &format!("-{}", child.id())]));
    let _waited = child.wait();
}

/// What may tell why a step failed, and how kubectl is asked for it.
const WITNESSES: [(&str, &str); 3] = [
    ("the operator", "logs --namespace=rectrain-system --selector=app.kubernetes.io/name=rectrain-operator --tail=15"),
    (
        "the operator before it was started again",
        "logs --namespace=rectrain-system --selector=app.kubernetes.io/name=rectrain-operator --tail=15 --previous --ignore-errors",
    ),
    (
        "what happened to jobs",
        "get events --all-namespaces --field-selector=involvedObject.kind=RecTrainingJob --sort-by=.metadata.creationTimestamp \
         --output=custom-columns=:.metadata.creationTimestamp,:.involvedObject.name,:.reason,:.message",
    ),
];

/// The end of a step's log, and of what the cluster itself says of it.
fn last_lines(paths: &Paths, step: &Step, log: &PathBuf) -> String {
    let mut text = format!("; the last lines of {}:\n{}", log.display(), tail(log, LAST_LINES));
    if step.words == UP.words {
        for entry in std::fs::read_dir(paths.run().join("log")).into_iter().flatten().flatten() {
            text.push_str(&format!("\n{}:\n{}", entry.path().display(), tail(&entry.path(), 3)));
        }
    } else {
        for (title, words) in WITNESSES {
            let said = super::kubectl(paths).and_then(|mut kubectl| {
                output(kubectl.args(words.split_whitespace()).arg("--request-timeout=5s").stdin(Stdio::null()))
            });
            if let Ok(said) = said {
                text.push_str(&format!("\n{title}:\n{}", last(&said, LAST_LINES)));
            }
        }
    }
    text
}

fn tail(file: &PathBuf, lines: usize) -> String {
    let text = std::fs::read(file).unwrap_or_default();
    last(&String::from_utf8_lossy(&text), lines)
}

fn last(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Sees to it that nothing stays if this process is killed: a shell that waits for it to end or to dismiss it, and otherwise ends
/// the step under way and takes the cluster down.
struct Guard {
    shell: Child,
    told: Option<ChildStdin>,
}

/// It reads the groups of processes that are under way; the end of its input without a farewell is the end of this process.
const GUARD: &str = r#"while read -r word; do case $word in dismissed) exit 0 ;; *) group=$word ;; esac; done
[ -z "$group" ] || kill -s KILL -- "-$group"
[ "$1" = stays ] || exec "$0" cluster down"#;

impl Guard {
    fn new(cluster_stays: bool) -> Result<Self, String> {
        let mut shell = Command::new("sh");
        shell.args(["-c", GUARD]).arg(crate::built("xtask")?).arg(if cluster_stays { "stays" } else { "goes" });
        // Not reached by an interrupt from the keyboard.
        shell.stdin(Stdio::piped()).process_group(0);
        let mut shell = shell.spawn().map_err(|error| format!("cannot run sh: {error}"))?;
        let told = shell.stdin.take();
        Ok(Self { shell, told })
    }

    fn watch(&mut self, step: &Child) {
        self.tell(&step.id().to_string());
    }

    fn dismiss(mut self) {
        self.tell("dismissed");
        let _waited = self.shell.wait();
    }

    /// If it is gone there is nobody to tell, and all goes on without it.
    fn tell(&mut self, word: &str) {
        if let Some(told) = &mut self.told {
            let _written = writeln!(told, "{word}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that has started another one, in a group of their own; the second is told by its argument.
    fn two(seconds: &str) -> Child {
        let mut sh = command("sh", ["-c", &format!("sleep {seconds} & sleep 1000")]);
        sh.process_group(0).spawn().unwrap()
    }

    fn runs(seconds: &str) -> bool {
        super::super::process::all().any(|(_, words)| words == ["sleep", seconds])
    }

    fn soon(what: impl Fn() -> bool) -> bool {
        (0..100).any(|_| {
            what() || {
                std::thread::sleep(Duration::from_millis(50));
                false
            }
        })
    }

    #[test]
    fn a_step_that_is_ended_takes_with_it_what_it_has_started() {
        let mut step = two("1001.5");
        assert!(soon(|| runs("1001.5")));
        end(&mut step);
        assert!(soon(|| !runs("1001.5")));
    }

    #[test]
    fn the_step_under_way_ends_when_its_owner_is_killed_and_not_when_the_guard_is_dismissed() {
        for (killed, seconds) in [(true, "1002.5"), (false, "1003.5")] {
            let mut guard = Guard::new(true).unwrap();
            let mut step = two(seconds);
            guard.watch(&step);
            assert!(soon(|| runs(seconds)));
            if killed {
                // As when this process ends.
                drop(guard.told.take());
                guard.shell.wait().unwrap();
                assert!(soon(|| !runs(seconds)));
            } else {
                guard.dismiss();
                assert!(runs(seconds));
            }
            end(&mut step);
        }
    }

    #[test]
    fn the_end_of_a_log_is_its_last_lines() {
        let file = std::env::temp_dir().join(format!("rectrain-tail-{}", std::process::id()));
        std::fs::write(&file, "a\nb\nc\n").unwrap();
        assert_eq!((tail(&file, 2), tail(&file, 9)), ("b\nc".to_owned(), "a\nb\nc".to_owned()));
        std::fs::remove_file(&file).unwrap();
        assert_eq!(tail(&file, 2), "");
    }
}
