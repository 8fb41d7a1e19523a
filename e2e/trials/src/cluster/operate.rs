//! `cargo xtask cluster operate`: the operator in a real cluster, with the real images. This module
//! has the table of steps and runs them in one namespace, which enforces the restricted
//! pod-security standard.

use std::time::Instant;

use rectrain_bring_up::Paths;
use rectrain_harness::jobs::NAMESPACE;

use super::steps::{
    alerts, contention, dashboards, failures, faked_nodes, kills, lifecycle, long_names, measured, model_servers,
    model_shards, page, recovery, refusals, repairs, rights, scaling, scrapes, serving, shortage, silence,
    slow_at_random, slow_kills, slow_members, strangers, stream, survivors, switches, takeover, thousand, unseen,
};
use super::support::TestCluster;
use super::support::chart::{POLL_EVERY_SECOND, install};
use crate::TrialError;

/// A trial of the operator.
struct Step {
    /// Its name on the command line: a word, or the word of a group of steps and one for the step.
    name: &'static str,
    /// Its claim.
    claim: &'static str,
    /// Runs it; fails if the claim does not hold.
    run: fn(&TestCluster) -> Result<(), TrialError>,
    /// Whether `--quick`, and so `cargo xtask test`, includes it.
    is_quick: bool,
}

const fn quick(name: &'static str, run: fn(&TestCluster) -> Result<(), TrialError>, claim: &'static str) -> Step {
    Step { name, claim, run, is_quick: true }
}

const fn long(name: &'static str, run: fn(&TestCluster) -> Result<(), TrialError>, claim: &'static str) -> Step {
    Step { name, claim, run, is_quick: false }
}

const STEPS: [Step; 54] = [
    quick("completes", lifecycle::completes, "a job completes with the model of a run outside of the cluster"),
    quick("switches", switches::switches, "a running job switches its training mode without a restart"),
    quick("refuses", refusals::refuses, "the API server refuses invalid manifests, and says why"),
    quick(
        "refuses-strangers",
        strangers::refuses_strangers,
        "a job's members refuse a pod without the job's certificate, and count it",
    ),
    quick(
        "keeps-rows",
        recovery::keeps_rows,
        "a killed parameter server finds its rows again, and no other member restarts",
    ),
    quick("leaves-nothing", lifecycle::leaves_nothing, "a deleted job leaves no object"),
    long(
        "shows-its-page",
        page::shows_its_page,
        "`rectrain page` shows a job through the API server, and from its checkpoint path after the end",
    ),
    quick("scrapes", scrapes::scrapes, "Prometheus finds every documented metric"),
    long("dashboards", dashboards::dashboards, "every dashboard panel has data, and promtool accepts the alerts"),
    long("alerts", alerts::alerts, "each alert fires when its cause is produced"),
    quick("repairs", repairs::repairs, "the operator restores changed and deleted objects of a job"),
    quick("takes-over", takeover::takes_over, "a running job survives the leader's death and an upgrade of the chart"),
    long(
        "outlives-the-chart",
        takeover::outlives_the_chart,
        "a running job survives the removal of the chart, and the next chart updates its CRD",
    ),
    long(
        "waits-for-the-api-server",
        silence::waits_for_the_api_server,
        "no instance exits while the API server does not answer for 90 s, and a job trains on",
    ),
    quick("survives", kills::survives, "a job in hybrid completes although a pod of each role is killed"),
    long(
        "goes-on",
        recovery::goes_on,
        "killed, deleted and suspended jobs resume from checkpoints, in sync to the bit",
    ),
    long("drained", recovery::drained, "a drained node's rows move to other parameter servers before its pods end"),
    long(
        "loses-its-coordinator",
        recovery::coordinator_lost,
        "a job continues in its first attempt although the node of its coordinator loses its power",
    ),
    quick("outlives-a-node", kills::outlives_a_node, "a job completes although a node loses its power"),
    long("scales", scaling::scales, "a running job gains and loses members by its manifest, and loses idle ones"),
    long("grows", scaling::grows, "a growing table gets more servers, and a server killed for memory gets more memory"),
    long(
        "settles",
        scaling::settles,
        "overloaded servers and embedding workers get more replicas, and their number settles",
    ),
    long("falls-back", scaling::falls_back, "a server that a load required is removed when the load falls"),
    long("evens-out", scaling::evens_out, "slots of unevenly loaded servers are rebalanced"),
    long(
        "measured",
        measured::measured,
        "the operator sees the nodes' load, and a HorizontalPodAutoscaler scales dense workers",
    ),
    long("follows-the-load", contention::follows_the_load, "the training mode follows the load of the nodes"),
    long(
        "slow-members server",
        slow_members::server,
        "a slow parameter server is named, and its slots move away and come back",
    ),
    long(
        "slow-members embedding",
        slow_members::embedding,
        "a slow embedding worker is named, and gets fewer pieces until it recovers",
    ),
    long(
        "slow-members loader",
        slow_members::loader,
        "a slow loader is named, and gets fewer chunks until it recovers",
    ),
    long("slow-members dense", slow_members::dense, "a slow dense worker is named, and its figures are printed"),
    long(
        "slow-members pulled",
        slow_members::pulled,
        "a slow dense worker of a job that pulls its pieces is named, and the job keeps its speed",
    ),
    long(
        "slow-members coordinator",
        slow_members::coordinator,
        "a job outlives a slow coordinator, and its figures are printed",
    ),
    long(
        "slow-members random",
        slow_at_random::random,
        "members that are slow at random cost no more than with fixed shares, and no share flaps",
    ),
    long(
        "slow-members kills",
        slow_kills::in_sync,
        "20 kills while members are slow and work moves change no bit of the model in sync",
    ),
    long(
        "slow-members kills-gba",
        slow_kills::in_gba,
        "20 kills while members are slow and work moves lose no row in gba, and train none twice",
    ),
    long("stream broker", stream::broker, "a job on Kafka outlives a killed broker, and trains each row once"),
    long("stream lag", stream::lag, "loaders of a stream are added in a burst and removed after it"),
    long("stream served", stream::served, "servers follow a job on Kafka while rows arrive, and no request fails"),
    long(
        "stream suspended",
        stream::suspended,
        "a suspended job on Kafka goes on where it was, and trains each row once",
    ),
    long(
        "serves-a-model",
        serving::serves_a_model,
        "servers of a model follow its job, go back within 30 s, and outlive the job, and no request fails",
    ),
    long(
        "model-servers canary",
        model_servers::canary,
        "a canary gets its share of requests, all servers take its model, and no request fails",
    ),
    long(
        "model-servers gate",
        model_servers::gate,
        "a gate refuses a newer model, the earlier one goes on, and no request fails",
    ),
    long(
        "model-servers load",
        model_servers::load,
        "an autoscaler adds a server under load and removes it afterwards, and no request fails",
    ),
    long(
        "model-servers node",
        model_servers::node,
        "one of two servers answers while the node of the other has no power, and is not alone for long",
    ),
    long(
        "model-servers shards",
        model_shards::shards,
        "killed pods of shards and of servers fail no request, and the servers end with the newest model",
    ),
    quick("fails", failures::fails, "every failure shows its condition"),
    quick("needs-its-rights", rights::needs_its_rights, "the operator uses every right that the chart grants"),
    quick("thousand", thousand::thousand, "the operator handles a thousand suspended jobs"),
    quick("hundred-with-pods", faked_nodes::hundred, "the operator handles a hundred jobs with pods on faked nodes"),
    long("completes-unseen", unseen::completes_unseen, "a job that ends without an operator is not trained again"),
    long("waits-for-quota", shortage::waits_for_quota, "a refused pod is reported, and restarts no job"),
    long("survivors", survivors::survivors, "processes that outlive their pods do not disturb their replacements"),
    long(
        "long-names",
        long_names::long_names,
        "a job with the longest name completes, and may have 1,000 pods of a role",
    ),
    long("thousand-with-pods", faked_nodes::thousand, "the operator handles a thousand jobs with pods on faked nodes"),
];

/// Whether `name` names this step, or its group.
fn is_named(step: &str, name: &str) -> bool {
    step == name || step.strip_prefix(name).is_some_and(|rest| rest.starts_with(' '))
}

/// The names in the words of a command line. `slow-members server loader` has the names of two
/// steps, and `slow-members` alone is the name of their group.
fn names(words: &[&str]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut group = "";
    for &word in words {
        let in_group = format!("{group} {word}");
        if STEPS.iter().any(|step| step.name == in_group) {
            names.retain(|name| name != group);
            names.push(in_group);
        } else {
            group = word;
            names.push(word.to_owned());
        }
    }
    names
}

/// Runs all steps, or the quick ones (`--quick`), or the named ones.
///
/// # Errors
/// [`TrialError::NoStep`]; the first step that fails, with its claim.
pub fn run(paths: &Paths, wanted: &[&str]) -> Result<(), TrialError> {
    let wanted = names(wanted);
    let is_known = |name: &str| name == "--quick" || STEPS.iter().any(|step| is_named(step.name, name));
    if let Some(unknown) = wanted.iter().find(|name| !is_known(name)) {
        let steps = STEPS.map(|step| step.name).join(", ");
        return Err(TrialError::NoStep { name: unknown.clone(), steps });
    }
    install(paths, &[POLL_EVERY_SECOND])?;
    let cluster = TestCluster::connect(paths)?;
    cluster.kubectl().fresh_namespace(NAMESPACE)?;
    let is_wanted = |step: &&Step| {
        let is_quick = |name: &String| step.is_quick && name == "--quick";
        wanted.is_empty() || wanted.iter().any(|name| is_named(step.name, name) || is_quick(name))
    };
    for step in STEPS.iter().filter(is_wanted) {
        let started = Instant::now();
        (step.run)(&cluster).map_err(TrialError::part(step.claim))?;
        println!("{}: {:.0} s", step.claim, started.elapsed().as_secs_f64());
    }
    Ok(cluster.jobs.within(&["delete", "namespace", NAMESPACE, "--timeout=600s"]).map(drop)?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_step_has_a_name_of_its_own() {
        let names: BTreeSet<_> = STEPS.iter().map(|step| step.name).collect();
        assert_eq!(names.len(), STEPS.len());
    }

    #[test]
    fn steps_of_a_group_are_named_alone_or_together() {
        assert_eq!(
            names(&["slow-members", "server", "loader", "scales"]),
            ["slow-members server", "slow-members loader", "scales"]
        );
        assert_eq!(names(&["scales", "slow-members"]), ["scales", "slow-members"]);
        assert_eq!(names(&["server", "slow-members", "servers"]), ["server", "slow-members", "servers"]);
        let of_group = |name| STEPS.iter().filter(|step| is_named(step.name, name)).count();
        assert_eq!([of_group("slow-members"), of_group("slow-members dense"), of_group("slow")], [9, 1, 0]);
    }
}
