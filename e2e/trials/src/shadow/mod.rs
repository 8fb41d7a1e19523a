//! `cargo xtask shadow`: the mode `shadow` as ShadowSync (Zheng et al. 2020) measures it in §4.1.
//!
//! | part | measures | in the paper |
//! |---|---|---|
//! | `eps` | examples per second by the number of dense workers | Fig. 5 and 6, third panels |
//! | `stragglers` | whether the speeds of workers add up if one is slow | |
//! | `simulated` | the same as `eps`, to 64 workers | |
//! | `quality` | normalized entropy by algorithm and gap | table 2 |

mod bench;
mod dataset;
mod done;
mod eps;
mod plan;
mod quality;
mod run;
mod scaling;
mod simulated;
mod stragglers;
mod times;
mod way;

use std::path::PathBuf;

use rectrain_harness::cargo::build_programs;
use rectrain_harness::notebook::Notebook;
use rectrain_harness::workspace::{built, cache};
use rectrain_harness::{HarnessError, say};
use serde_json::json;

use self::bench::Bench;
use self::plan::{Part, Plan, parse};
use self::run::Run;
use crate::TrialError;

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; data that cannot be read; a run that fails.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let machine = std::thread::available_parallelism().map_or(1, usize::from);
    let plan = parse(arguments, machine)?;
    let (notebook, _lines) = Notebook::open(plan.out.as_deref())?;
    if plan.only_lists {
        list(&plan, &notebook);
        return Ok(());
    }
    let binary = binary(&plan)?;
    let work = cache()?.join("shadow");
    say(plan.limits());
    let mut bench = Bench::new(&plan, &binary, &work, notebook);
    for part in &plan.parts {
        println!("\n{}", report(*part, &mut bench)?);
    }
    Ok(())
}

/// The runs of a part, in their order.
fn runs(part: Part, plan: &Plan) -> Vec<Run> {
    match part {
        Part::Eps => eps::runs(plan),
        Part::Stragglers => stragglers::runs(plan),
        Part::Simulated => simulated::runs(plan),
        Part::Quality => quality::runs(plan),
    }
}

/// Runs a part, and returns its tables.
fn report(part: Part, bench: &mut Bench<'_>) -> Result<String, TrialError> {
    let plan = bench.plan;
    let done = bench.all(runs(part, plan))?;
    Ok(match part {
        Part::Eps => eps::report(plan, &done)?,
        Part::Stragglers => stragglers::report(plan, &done)?,
        Part::Simulated => simulated::report(plan, &done, bench.binary, bench.work)?,
        Part::Quality => quality::report(plan, &done)?,
    })
}

/// Prints the runs, and whether the file of results has them.
fn list(plan: &Plan, notebook: &Notebook) {
    let (mut all, mut found) = (0, 0);
    for part in &plan.parts {
        for run in runs(*part, plan) {
            let name = run.name();
            let is_found = notebook.run(&name).is_some();
            all += 1;
            found += usize::from(is_found);
            println!("{}", json!({ "part": part.name(), "isFound": is_found, "run": name }));
        }
    }
    say(plan.limits());
    say(format!("{all} runs; the file of results has {found} of them"));
}

/// The `rectrain` to run.
fn binary(plan: &Plan) -> Result<PathBuf, HarnessError> {
    if let Some(binary) = &plan.binary {
        return std::path::absolute(binary).map_err(HarnessError::io("find", binary.display()));
    }
    build_programs()?;
    built("rectrain")
}
