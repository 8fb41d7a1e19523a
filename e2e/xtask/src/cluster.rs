//! `cargo xtask cluster`: the command line of the cluster and of the trials in it.

use std::os::unix::process::CommandExt;
use std::time::Instant;

use rectrain_bring_up::tools::{KUBE, build};
use rectrain_bring_up::{Paths, down, kubeconfig, kubectl, prefetch, programs, status, stop_node, up};
use rectrain_harness::HarnessError;
use rectrain_harness::times::Times;
use rectrain_trials::TrialError;
use rectrain_trials::cluster::support::{chart, object_store};
use rectrain_trials::cluster::{chaos, comes_and_goes, demo, operate, smoke};
use rectrain_trials::suite::{self, Lacking};

const USAGE: &str = "usage: cargo xtask cluster COMMAND
  up               brings up a cluster of two nodes, or its missing parts, and waits until it works
  down             takes it down; nothing is left but the cache
  status           prints the components and the nodes
  stop-node NAME   ends a node and all its pods, as a power cut does; `up` brings it back, empty
  kubeconfig       prints the path of its kubeconfig: export KUBECONFIG=$(cargo xtask cluster kubeconfig)
  kubectl ARGS     runs kubectl
  images           builds the images of the runtime and the operator and imports them into the nodes
  install ARGS     installs the chart with these images; ARGS are for `helm upgrade --install`
  object-store NS  runs an object store that speaks S3 in the existing namespace NS
  smoke            trains synthetic clicks in StatefulSets, without the operator
  demo             trains MovieLens 100k from an object store in the cluster, as a RecTrainingJob
  operate [STEPS]  runs trials of the operator: all, the quick ones of `cargo xtask test` (--quick), or the named
                   STEPS; an unknown name lists them
  chaos            kills containers, pods and nodes of a job at random; --mode, --kills, --seed
  programs         builds the missing programs of the cluster
  prefetch         does the same, with the programs that only some trials need, and images
  test             brings a cluster up, looks at its nodes, and takes it down
  suite            runs the cluster's part of `cargo xtask test`
up, down, status and stop-node are about this machine's cluster. The others use the one that KUBECONFIG names, if
it is set.";

/// Runs a command.
pub(crate) fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let paths = Paths::new()?;
    match arguments {
        ["up"] => Ok(up(&paths).and_then(|()| status(&paths))?),
        ["down"] => Ok(down(&paths)?),
        ["status"] => Ok(status(&paths)?),
        ["stop-node", name] => Ok(stop_node(&paths, name)?),
        ["kubeconfig"] => {
            println!("{}", kubeconfig(&paths)?.display());
            Ok(())
        }
        ["kubectl", rest @ ..] => run_kubectl(&paths, rest),
        ["images"] => chart::images(&paths),
        ["install", rest @ ..] => chart::install(&paths, rest),
        ["object-store", namespace] => object_store::start(&paths, namespace),
        ["smoke"] => smoke::run(&paths),
        ["demo"] => demo::run(&paths),
        ["operate", wanted @ ..] => operate::run(&paths, wanted),
        ["chaos", rest @ ..] => chaos::run(&paths, rest),
        ["programs"] => Ok(programs(&paths)?),
        ["prefetch"] => Ok(prefetch(&paths)?),
        ["test"] => comes_and_goes::run(&paths),
        ["suite"] => {
            // No test has run before, so those with helm and promtool run now.
            suite::run(Instant::now(), Lacking { helm: true, promtool: true }, &mut Times::default())
        }
        _ => Err(HarnessError::Usage(USAGE).into()),
    }
}

/// Replaces this process by kubectl.
fn run_kubectl(paths: &Paths, arguments: &[&str]) -> Result<(), TrialError> {
    build(paths, &[KUBE])?;
    let mut kubectl = kubectl(paths)?.command();
    let source = kubectl.args(arguments).exec();
    Err(HarnessError::io("run", "kubectl")(source).into())
}
