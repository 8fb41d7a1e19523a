//! The cluster's part of `cargo xtask test`. A cluster comes up, the chart is installed, MovieLens
//! trains, the operator's quick trials run, and the cluster goes down. Each step is a process of
//! its own, with a log and a time limit. A cluster that was up before is used, and stays.

mod guard;
mod prefetch;
mod step;

use std::time::{Duration, Instant};

use rectrain_bring_up::{Paths, available, find, foreign_kubeconfig, nothing_is_left, prometheus, tools};
use rectrain_harness::cargo::cargo_test;
use rectrain_harness::rectrain::movielens_data;
use rectrain_harness::skips;
use rectrain_harness::times::Times;

use self::guard::Guard;
use self::step::{Step, run as run_step, step};
use crate::TrialError;

pub use self::prefetch::Prefetch;

/// The time limit of the cluster's programs, which are built once.
const PROGRAMS: Duration = Duration::from_secs(15 * 60);
/// The programs must also exist this long after the beginning of `cargo xtask test`, so that all of
/// it takes at most an hour.
const PROGRAMS_END: Duration = Duration::from_secs(42 * 60);
/// The least time for the programs, which suffices if they exist.
const PROGRAMS_EXIST: Duration = Duration::from_secs(20);

const UP: Step = step(&["up"], 300);
const INSTALL: Step = step(&["install"], 600);
const DEMO: Step = step(&["demo"], 600);
/// The demonstration leaves its job for a look.
const DEMO_OVER: Step = step(&["kubectl", "delete", "namespace", "rectrain-demo"], 120);
const OPERATE: Step = step(&["operate", "--quick"], 1800);
const DOWN: Step = step(&["down"], 60);

/// Tools that the workspace's tests lacked, so that some of them skipped a part.
#[derive(Debug, Clone, Copy)]
pub struct Lacking {
    /// helm, which renders the chart.
    pub helm: bool,
    /// promtool, which checks the alert rules.
    pub promtool: bool,
}

/// Runs the suite. `started` is the beginning of `cargo xtask test`; the tests before lacked the
/// tools in `lacking`.
///
/// # Errors
/// The first step that fails; something of the cluster is left; with `CI=true`, a skipped part.
pub fn run(started: Instant, lacking: Lacking, times: &mut Times) -> Result<(), TrialError> {
    let paths = Paths::new()?;
    if let Err(reason) = available(&paths) {
        skips::skip("the cluster's tests", &reason)?;
        return still_lacking(lacking);
    }
    // Another suite on this machine could take this one's cluster down.
    let _lock = paths.lock("suite")?;
    let is_foreign = foreign_kubeconfig(&paths).is_some();
    let stays = is_foreign || find(&paths).is_some();
    let mut suite = Suite { paths, guard: Guard::new(stays)?, times, is_foreign };
    let tested = suite.test(started, lacking);
    let taken_down = if stays { Ok(()) } else { suite.take_down() };
    suite.guard.dismiss();
    tested.and(taken_down)
}

/// Skips the tests that need missing tools.
fn still_lacking(lacking: Lacking) -> Result<(), TrialError> {
    if lacking.helm {
        skips::skip("rendering the chart", "there is no helm")?;
    }
    if lacking.promtool {
        skips::skip("promtool's checks of the alert rules", "there is no promtool")?;
    }
    Ok(())
}

struct Suite<'a> {
    paths: Paths,
    guard: Guard,
    times: &'a mut Times,
    is_foreign: bool,
}

impl Suite<'_> {
    fn step(&mut self, step: Step) -> Result<(), TrialError> {
        run_step(&self.paths, &mut self.guard, self.times, step)
    }

    fn test(&mut self, started: Instant, lacking: Lacking) -> Result<(), TrialError> {
        if !self.programs(started)? {
            return still_lacking(lacking);
        }
        self.tests_that_lacked_tools(lacking)?;
        self.in_cluster()
    }

    /// Builds the missing programs; returns whether all of them exist. The prefetch may have built
    /// them.
    fn programs(&mut self, started: Instant) -> Result<bool, TrialError> {
        let left = PROGRAMS_END.saturating_sub(started.elapsed());
        let patience = PROGRAMS.min(left).max(PROGRAMS_EXIST);
        match self.step(Step { words: &["programs"], patience }) {
            Ok(()) => Ok(true),
            // A defect of this repository is no reason to skip.
            Err(broken) if broken.to_string().contains(tools::BROKEN) => Err(broken),
            Err(reason) => {
                skips::skip("the cluster's tests", format!("its programs cannot be had here: {reason}"))?;
                Ok(false)
            }
        }
    }

    /// Repeats the workspace's tests that had no helm or no promtool before.
    fn tests_that_lacked_tools(&mut self, lacking: Lacking) -> Result<(), TrialError> {
        if lacking.helm {
            repeat_test("chart::")?;
        }
        if !lacking.promtool {
            return Ok(());
        }
        match prometheus::programs(&self.paths) {
            Ok(_) => repeat_test("dashboards::"),
            Err(reason) => Ok(skips::skip("promtool's checks of the alert rules", reason)?),
        }
    }

    fn in_cluster(&mut self) -> Result<(), TrialError> {
        if !self.is_foreign {
            self.step(UP)?;
        }
        self.step(INSTALL)?;
        match movielens_data() {
            Ok(()) => {
                self.step(DEMO)?;
                self.step(DEMO_OVER)?;
            }
            Err(reason) => skips::skip("MovieLens in the cluster", reason)?,
        }
        self.step(OPERATE)
    }

    /// Takes the cluster down, whether or not the tests succeeded, and checks that nothing is left.
    fn take_down(&mut self) -> Result<(), TrialError> {
        self.step(DOWN)?;
        Ok(nothing_is_left(&self.paths)?)
    }
}

/// Runs some of the operator's tests again; a part that they still skip is a skip of the suite.
fn repeat_test(filter: &str) -> Result<(), TrialError> {
    let skipped = cargo_test(&["test", "--release", "--workspace", "--test", "operator", filter])?;
    for reason in skipped {
        skips::skip(format!("a part of the tests {filter}"), reason)?;
    }
    Ok(())
}
