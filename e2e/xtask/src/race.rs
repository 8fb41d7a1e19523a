//! `cargo xtask race`: checks threads that share memory without locks, with loom and with
//! ThreadSanitizer.

use std::path::PathBuf;

use rectrain_harness::cargo::{cargo_command, not_started, run};
use rectrain_harness::workspace::workspace;
use rectrain_harness::{HarnessError, say};

use crate::error::XtaskError;

const USAGE: &str = "usage: cargo xtask race";

/// The only target for which this command builds. With a target, build scripts are not sanitized.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The standard library is not sanitized, which the compiler would refuse.
const FLAGS: &str = "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer";

/// The test whose threads share a replica (`shadow` with several threads).
const TEST: &str = "s3_2_threads_train_one_replica_without_locks";

/// The same threads on memory without atomics.
const PLANTED: &str = "s3_2_a_planted_data_race";

/// The file of the shared memory. A report is of it if the stack of an access names it. Other
/// reports are of the standard library, whose fences ThreadSanitizer does not see.
const SHARED_MEMORY: &str = "src/shadow/hogwild.rs";

/// Explores the orders of two threads with loom. Runs the test under ThreadSanitizer, in a build of
/// its own. Then runs the planted race, which ThreadSanitizer has to report.
pub(crate) fn race(arguments: &[&str]) -> Result<(), XtaskError> {
    if !arguments.is_empty() {
        return Err(HarnessError::Usage(USAGE).into());
    }
    let mut loom = cargo_command();
    loom.current_dir(workspace().join("runtime/modes/loom")).env("CARGO_TARGET_DIR", target());
    run(loom, &["test", "--release"], "an order of two threads has a result that no test allows")?;
    if let Some(report) = first_race(&sanitize(TEST)?) {
        return Err(XtaskError::Race(report.to_owned()));
    }
    if first_race(&sanitize(PLANTED)?).is_none() {
        return Err(XtaskError::Missed { test: PLANTED });
    }
    say("ThreadSanitizer reports the planted data race, and none where threads share a replica.");
    Ok(())
}

/// Runs a test under ThreadSanitizer, which makes it fail if it reports anything. Returns the
/// output.
fn sanitize(test: &str) -> Result<String, XtaskError> {
    let mut cargo = cargo_command();
    cargo.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", FLAGS).env("CARGO_TARGET_DIR", target());
    let build = ["test", "--release", "--target", TARGET, "-p", "rectrain-modes", "--test", "shadow_paper"];
    let arguments = [&build[..], &["--", "--include-ignored", "--exact", test]].concat();
    say(format!("{FLAGS}: cargo {}", arguments.join(" ")));
    let output = cargo.args(&arguments).output().map_err(not_started(&arguments))?;
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if printed.contains(&format!("test {test} ... ")) { Ok(printed) } else { Err(XtaskError::NotRun(printed)) }
}

/// The first report of a data race on the shared memory.
fn first_race(printed: &str) -> Option<&str> {
    let accesses = |report: &str| report.split("  Location is").next().unwrap_or_default().to_owned();
    let mut reports = printed.split("WARNING: ThreadSanitizer: data race").skip(1);
    reports.find(|report| accesses(report).contains(SHARED_MEMORY))
}

/// The folder of both builds.
fn target() -> PathBuf {
    workspace().join("target/race")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_counts_if_an_access_is_to_the_shared_memory() {
        let of_std = "WARNING: ThreadSanitizer: data race (pid=1)\n  Write of size 8\n    #0 dealloc alloc.rs:115\n\
                      \x20 Location is heap block\n    #9 new runtime/modes/src/shadow/hogwild.rs:72\n";
        let own = "WARNING: ThreadSanitizer: data race (pid=1)\n  Read of size 4\n\
                   \x20   #1 load runtime/modes/src/shadow/hogwild.rs:142\n  Location is heap block\n";
        assert_eq!(first_race(of_std), None);
        assert!(first_race(&format!("{of_std}{own}")).unwrap().contains("Read of size 4"));
        assert_eq!(first_race("test result: ok"), None);
    }
}
