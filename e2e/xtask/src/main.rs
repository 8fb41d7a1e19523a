//! `cargo xtask`: the project's own commands. `check` is for every save, and `test` for everything
//! that must hold. This crate is their command line; the trials are in `rectrain-trials`.

mod check;
mod cluster;
mod dist;
mod docs;
mod error;
mod features;
mod fuzz;
mod race;
mod test;

use std::process::ExitCode;

use rectrain_harness::workspace::workspace;
use rectrain_harness::{HarnessError, say, skips};
use rectrain_lint::{architecture, prose};
use rectrain_trials::{
    chaos, continual, des, freshness, gpu, kraken, look_ahead, migration, page, peers, placement, quality, serve_soak,
    shadow, stragglers, stream, workers,
};

use error::XtaskError;

const USAGE: &str = "usage: cargo xtask COMMAND
  check             checks formatting and lints, with `prose` and `architecture`; for every save
  test              runs everything that must hold: formatting, lints, unit, integration and multi-process tests,
                    MovieLens, and a real Kubernetes if this machine can have one; prints the time of each part
  test gpu          builds the runtime with the feature `cuda` and tries it: with an NVIDIA GPU it must train as the
                    CPU does, without one it must say so
  fuzz [ARGS]       fuzzes readers, manifests, --set, checkpoints and frames for N minutes each; keeps new inputs
  race              checks threads that share memory without locks, with loom and ThreadSanitizer
  prose [ARGS]      checks the English of comments, documents and error texts; `prose --help` lists ARGS
  architecture      prints the layers of crates and the circles of modules, and checks them; `--list` adds imports
  dist [ARGS]       makes the artifacts of a release: archive, wheel, images, chart, bill of materials, checksums
  docs              writes the files that are generated from the code (CRD, manifest reference, metrics)
  quality [ARGS]    trains on real data and prints the AUC by model, mode and seed; `quality --help` lists ARGS
  workers [ARGS]    trains with several numbers of dense workers and compares the AUC; `workers --help` lists ARGS
  continual [ARGS]  trains slice by slice, switches the mode in between, and prints the AUC by slice
  stragglers [ARGS] trains in every mode with dense workers of unequal CPU time; prints throughput and staleness
  shadow [ARGS]     measures throughput, sync gap and normalized entropy in `shadow`; `shadow --help` lists ARGS
  des [ARGS]        measures bytes in `des` against formulas and `sync`, or with --links throughput over slow links
  look-ahead [ARGS] measures throughput of `sync` with and without its look-ahead, against `hybrid`
  freshness [ARGS]  measures the time from a gradient to a changed answer; `freshness --help` lists ARGS
  serve-soak [ARGS] puts servers under load for minutes while a job publishes, kills some, and checks the answers
  chaos [ARGS]      kills processes of a job at random and compares its model with an undisturbed run's
  stream [ARGS]     trains from a real Kafka: throughput beside a file, or quality beside a frozen model
  migration [ARGS]  moves millions of rows between parameter servers of a running job and prints the step times
  peers [ARGS]      runs the same work with Rectrain, PyTorch, TorchRec and TensorFlow in turns and prints ratios
  placement [ARGS]  prints how evenly parameter servers share look-ups, by fields and by slots
  kraken [ARGS]     compares tables within a budget, policies and optimizers of rows as Kraken's paper does
  page [--update]   shows the page of a run in chromium in each state, and compares pictures with docs/images/page
  cluster COMMAND   runs a Kubernetes of two nodes on this machine, and trials in it; `cluster --help` lists COMMANDs
With CI=true in the environment, a part that cannot run here is a failure. Otherwise it is skipped, and the last
line lists the skipped parts.";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = dispatch(&arguments);
    if let Some(skipped) = skips::summary() {
        say(skipped);
    }
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(error);
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: &[&str]) -> Result<(), XtaskError> {
    match arguments {
        ["check"] => check::check(),
        ["test"] => test::test(),
        ["test", "gpu"] => Ok(gpu::test()?),
        ["fuzz", rest @ ..] => fuzz::fuzz(rest),
        ["race", rest @ ..] => race::race(rest),
        ["prose", rest @ ..] => Ok(prose::run(&workspace(), rest)?),
        ["architecture", rest @ ..] => Ok(architecture::run(&workspace(), rest)?),
        ["dist", rest @ ..] => Ok(dist::dist(rest)?),
        ["docs"] => Ok(docs::docs()?),
        ["quality", rest @ ..] => Ok(quality::run(rest)?),
        ["workers", rest @ ..] => Ok(workers::run(rest)?),
        ["continual", rest @ ..] => Ok(continual::run(rest)?),
        ["stragglers", rest @ ..] => Ok(stragglers::run(rest)?),
        ["shadow", rest @ ..] => Ok(shadow::run(rest)?),
        ["des", rest @ ..] => Ok(des::run(rest)?),
        ["look-ahead", rest @ ..] => Ok(look_ahead::run(rest)?),
        ["freshness", rest @ ..] => Ok(freshness::run(rest)?),
        ["serve-soak", rest @ ..] => Ok(serve_soak::run(rest)?),
        ["chaos", rest @ ..] => Ok(chaos::run(rest)?),
        ["stream", rest @ ..] => Ok(stream::run(rest)?),
        ["migration", rest @ ..] => Ok(migration::run(rest)?),
        ["kraken", rest @ ..] => Ok(kraken::run(rest)?),
        ["peers", rest @ ..] => Ok(peers::run(rest)?),
        ["placement", rest @ ..] => Ok(placement::run(rest)?),
        ["page", rest @ ..] => Ok(page::run(rest)?),
        ["cluster", rest @ ..] => Ok(cluster::run(rest)?),
        _ => Err(HarnessError::Usage(USAGE).into()),
    }
}
