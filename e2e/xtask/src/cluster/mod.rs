//! `cargo xtask cluster`: a real Kubernetes of two nodes on this machine, for tests and demonstrations. API server, scheduler,
//! controller-manager, etcd, kubelets, kube-proxies, containerd and CoreDNS, all in namespaces of their own; taken down, nothing of
//! it is left. Where KUBECONFIG names another cluster (kind, GKE), the commands that use a cluster use that one.

mod alerts;
mod cgroups;
mod chaos;
mod components;
mod contention;
mod dashboards;
mod fakes;
mod images;
mod install;
mod metrics_server;
mod namespaces;
mod network;
mod operate;
mod paths;
mod pki;
mod process;
mod prometheus;
mod recovery;
mod refusals;
mod rights;
mod scaling;
mod strangers;
mod suite;
mod timeline;
mod tools;

use std::net::UdpSocket;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use self::images::Image;
use self::namespaces::{Daemon, Namespaces};
use self::network::{CONTROL_PLANE, KUBERNETES, LINK, MACHINE, NODES, Node};
use self::paths::{Paths, lock, make_folder, remove_folder, write};
use self::process::{command, eventually, output};
pub(crate) use self::suite::suite;

const USAGE: &str = "usage: cargo xtask cluster COMMAND
  up               brings a cluster of two nodes up, or what is missing of it, and waits until it works
  down             takes it down; nothing is left but what is cached for the next time
  status           what runs, and the nodes
  stop-node NAME   ends a node and all its pods, as a power cut does; `up` brings it back, empty
  kubeconfig       prints where its kubeconfig is: export KUBECONFIG=$(cargo xtask cluster kubeconfig)
  kubectl ARGS     kubectl for the cluster
  images           builds the images of the runtime and the operator and gives them to the nodes
  install ARGS     installs the chart with these images; ARGS go to `helm upgrade --install`
  object-store NS  runs an object store that speaks S3 in the namespace NS, which must be there
  smoke            trains synthetic clicks in StatefulSets, without the operator
  demo             MovieLens 100k from an object store in the cluster, trained by a RecTrainingJob and watched to its end
  operate [STEPS]  the operator put to the test: all STEPS, those of `cargo xtask test` (--quick), or those that are named; a name that
                   is none lists them
  chaos            kills containers, pods and nodes of a job at random; --mode, --kills, --seed
  programs         builds the programs that the cluster is made of and that are not there yet
  test             brings a cluster up, looks at its nodes, and takes it down
  suite            the cluster's part of `cargo xtask test`
up, down, status and stop-node are about the cluster of this machine; the others use the one that KUBECONFIG names, if it is set";

/// How long the slowest component has to come up on a slow machine.
const PATIENCE: Duration = Duration::from_secs(180);
/// What `up` needs.
const PROGRAMS: [tools::Program; 3] = [tools::INIT, tools::KUBE, tools::COREDNS];

/// A cluster that is there, whether or not all of it runs.
#[derive(Debug)]
struct Cluster {
    control_plane: Namespaces,
    nodes: Vec<(&'static Node, Namespaces)>,
}

pub(crate) fn run(arguments: &[&str]) -> Result<(), String> {
    let paths = Paths::new()?;
    match arguments {
        ["up"] => up(&paths).and_then(|()| status(&paths)),
        ["down"] => down(&paths),
        ["status"] => status(&paths),
        ["stop-node", name] => stop_node(&paths, name),
        ["kubeconfig"] => {
            println!("{}", kubeconfig(&paths)?.display());
            Ok(())
        }
        ["kubectl", rest @ ..] => {
            tools::build(&paths, &[tools::KUBE])?;
            let mut kubectl = kubectl(&paths)?;
            Err(format!("cannot run kubectl: {}", kubectl.args(rest).exec()))
        }
        ["images"] => install::images(&paths),
        ["install", rest @ ..] => install::install(&paths, rest),
        ["object-store", namespace] => install::object_store(&paths, namespace),
        ["smoke"] => install::smoke(&paths),
        ["demo"] => install::demo(&paths),
        ["operate", wanted @ ..] => operate::operate(&paths, wanted),
        ["chaos", rest @ ..] => chaos::chaos(&paths, rest),
        ["programs"] => programs(&paths),
        ["test"] => test(&paths),
        ["suite"] => suite(Instant::now()),
        _ => Err(USAGE.to_owned()),
    }
}

/// Whether tests can have a cluster: the one that KUBECONFIG names, or one of this machine. If not, one sentence says why.
pub(crate) fn available() -> Result<(), String> {
    let paths = Paths::new()?;
    if foreign_kubeconfig(&paths).is_some() { Ok(()) } else { tools::available(&paths) }
}

/// A cluster comes up, has its nodes, and goes without a trace. A cluster that was there stays.
fn test(paths: &Paths) -> Result<(), String> {
    if let Err(reason) = available() {
        eprintln!("xtask: SKIPPED the test of the cluster: {reason}");
        return Ok(());
    }
    if foreign_kubeconfig(paths).is_some() {
        tools::build(paths, &[tools::KUBE])?;
        return process::visible(kubectl(paths)?.args(["get", "nodes"]));
    }
    let was_there = Namespaces::find(paths, CONTROL_PLANE_NAME).is_some();
    up(paths)?;
    let nodes = output(own_kubectl(paths).args(["get", "nodes", "--no-headers"]))?;
    let ready = nodes.lines().filter(|line| line.split_whitespace().nth(1) == Some("Ready")).count();
    if ready != NODES.len() {
        return Err(format!("{ready} of {} nodes are ready:\n{nodes}", NODES.len()));
    }
    if was_there {
        return Ok(());
    }
    down(paths)?;
    nothing_is_left(paths)?;
    eprintln!("xtask: {ready} nodes were ready, and nothing is left of them");
    Ok(())
}

/// After `down`: no process, no mount (they are in the processes' namespaces), no link.
fn nothing_is_left(paths: &Paths) -> Result<(), String> {
    let left: Vec<_> = process::all().filter(|(_, words)| words.iter().any(|word| is_ours(paths, word))).collect();
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mounted = mounts.lines().find(|mount| is_ours(paths, mount));
    if left.is_empty() && mounted.is_none() && !link_exists() {
        return Ok(());
    }
    Err(format!(
        "after the cluster was taken down, this is left: {left:?}, {mounted:?}, link {LINK}: {}",
        link_exists()
    ))
}

/// Builds what is not there of all that the cluster and its tests are made of.
fn programs(paths: &Paths) -> Result<(), String> {
    if foreign_kubeconfig(paths).is_none() {
        tools::install_packages()?;
        tools::build(paths, &PROGRAMS)?;
    }
    tools::build(paths, &[tools::KUBE, tools::HELM, tools::OBJECT_STORE])
}

/// Whether a word of a process's command line names a file of the running cluster.
fn is_ours(paths: &Paths, word: &str) -> bool {
    word.contains(&*paths.run().to_string_lossy())
}

/// The name of the control plane's namespaces.
const CONTROL_PLANE_NAME: &str = "control-plane";

/// Brings up what is not up.
fn up(paths: &Paths) -> Result<(), String> {
    tools::available(paths)?;
    let _lock = lock(paths, "cluster")?;
    let started = Instant::now();
    tools::install_packages()?;
    tools::build(paths, &PROGRAMS)?;
    make_folder(&paths.images())?;
    images::build(paths, Image::Pause)?;
    let tools_ready = Instant::now();
    let control_plane = control_plane(paths)?;
    for daemon in components::api(paths) {
        control_plane.ensure(paths, &daemon)?;
    }
    let nodes = NODES.iter().map(|node| Ok((node, node_namespaces(paths, &control_plane, node)?)));
    let cluster = Cluster { nodes: nodes.collect::<Result<_, String>>()?, control_plane };
    for (node, namespaces) in &cluster.nodes {
        if namespaces.ensure(paths, &components::containerd(paths, node))? {
            images::import_all(paths, namespaces)?;
        }
    }
    answers(paths)?;
    for daemon in components::controllers(paths) {
        cluster.control_plane.ensure(paths, &daemon)?;
    }
    for (node, namespaces) in &cluster.nodes {
        for daemon in components::node(paths, node) {
            namespaces.ensure(paths, &daemon)?;
        }
    }
    nodes_are_ready(paths)?;
    eventually(PATIENCE, "CoreDNS", dns_answers)?;
    let (tools, cluster) = (tools_ready - started, tools_ready.elapsed());
    eprintln!(
        "xtask: the cluster is up after {:.0} s (and {:.0} s for its programs)",
        cluster.as_secs_f64(),
        tools.as_secs_f64()
    );
    Ok(())
}

/// The namespaces of the control plane, with keys of their own if they are new.
fn control_plane(paths: &Paths) -> Result<Namespaces, String> {
    if let Some(found) = Namespaces::find(paths, CONTROL_PLANE_NAME) {
        return Ok(found);
    }
    clean(paths)?;
    pki::create(paths)?;
    let namespaces = Namespaces::create(paths, CONTROL_PLANE_NAME, None)?;
    let made = plug_in(paths, &namespaces);
    if made.is_err() {
        namespaces.kill()?;
    }
    made.map(|()| namespaces)
}

/// The cable from the machine, the control plane's network, and the administrator's kubeconfig.
fn plug_in(paths: &Paths, namespaces: &Namespaces) -> Result<(), String> {
    let init = namespaces.init().to_string();
    output(&mut ip(&["link", "add", LINK, "type", "veth", "peer", "name", "uplink", "netns", &init]))?;
    namespaces.script(include_str!("../../../cluster/config/control-plane.sh"), &[("CONTROL_PLANE", CONTROL_PLANE)])?;
    output(&mut ip(&["address", "add", &format!("{MACHINE}/24"), "dev", LINK]))?;
    output(&mut ip(&["link", "set", LINK, "up"]))?;
    for (addresses, node) in network::routes() {
        output(&mut namespaces.command("ip", ["route", "add", addresses, "via", node]))?;
        output(&mut ip(&["route", "add", addresses, "via", node]))?;
    }
    let admin = paths.pki().join("admin.conf");
    let mut flatten = command(paths.program("kube"), ["kubectl", "config", "view", "--raw", "--flatten"]);
    write(&paths.kubeconfig(), output(flatten.arg("--kubeconfig").arg(admin))?)
}

fn node_namespaces(paths: &Paths, control_plane: &Namespaces, node: &Node) -> Result<Namespaces, String> {
    if let Some(found) = Namespaces::find(paths, node.name) {
        return Ok(found);
    }
    cgroups::create(node.name)?;
    let namespaces = Namespaces::create(paths, node.name, Some(control_plane))?;
    let made = set_node_up(control_plane, &namespaces, node);
    if made.is_err() {
        namespaces.kill()?;
    }
    made.map(|()| namespaces)
}

fn set_node_up(control_plane: &Namespaces, namespaces: &Namespaces, node: &Node) -> Result<(), String> {
    // Of the control plane's namespaces only the network: the node's process is named as this machine counts.
    let target = control_plane.init().to_string();
    let within = |words: &[&str]| {
        let mut words_within = command("nsenter", ["--target", &target, "--net", "--", "ip"]);
        words_within.args(words);
        output(&mut words_within)
    };
    let init = namespaces.init().to_string();
    // A node that was stopped may have left its end, if the kernel has not removed it yet.
    let _removed = within(&["link", "delete", node.name]);
    within(&["link", "add", node.name, "type", "veth", "peer", "name", "eth0", "netns", &init])?;
    within(&["link", "set", node.name, "master", "nodes", "up"])?;
    let others = NODES.iter().filter(|other| other.name != node.name);
    let routes: Vec<_> = others.map(|other| format!("{}={}", other.pods, other.address)).collect();
    let environment = [("ADDRESS", node.address), ("CONTROL_PLANE", CONTROL_PLANE), ("ROUTES", &routes.join(" "))];
    namespaces.script(include_str!("../../../cluster/config/node.sh"), &environment)
}

/// Waits until the API server is ready.
fn answers(paths: &Paths) -> Result<(), String> {
    let what = format!("the API server (its log: {})", paths.log("kube-apiserver").display());
    eventually(PATIENCE, &what, || output(own_kubectl(paths).args(["get", "--raw", "/readyz"])).map(drop))
}

fn nodes_are_ready(paths: &Paths) -> Result<(), String> {
    for node in &NODES {
        let what = format!("{} (its log: {})", node.name, paths.log(&format!("{}-kubelet", node.name)).display());
        eventually(PATIENCE, &what, || {
            let condition = r#"jsonpath={.status.conditions[?(@.type=="Ready")].status}"#;
            match output(own_kubectl(paths).args(["get", "node", node.name, "--output", condition]))?.as_str() {
                "True" => Ok(()),
                other => Err(format!("its condition Ready is {other:?}")),
            }
        })?;
    }
    Ok(())
}

/// Asks CoreDNS for the address of the service `kubernetes`.
fn dns_answers() -> Result<(), String> {
    let ask = || -> std::io::Result<Vec<u8>> {
        let socket = UdpSocket::bind((MACHINE, 0))?;
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        socket.send_to(&dns_question("kubernetes.default.svc.cluster.local"), (CONTROL_PLANE, 53))?;
        let mut answer = vec![0; 512];
        let (length, _) = socket.recv_from(&mut answer)?;
        answer.truncate(length);
        Ok(answer)
    };
    let answer = ask().map_err(|error| error.to_string())?;
    let expected: Vec<u8> = KUBERNETES.split('.').filter_map(|number| number.parse().ok()).collect();
    // The address is the last field of a correct answer's only record.
    if answer.ends_with(&expected) { Ok(()) } else { Err(format!("it answers {answer:?}")) }
}

/// A question for an IPv4 address (RFC 1035, section 4.1).
fn dns_question(name: &str) -> Vec<u8> {
    let header = [0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let labels = name.split('.').flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat());
    header.into_iter().chain(labels).chain([0, 0, 1, 0, 1]).collect()
}

/// Ends a node.
fn stop_node(paths: &Paths, name: &str) -> Result<(), String> {
    let _lock = lock(paths, "cluster")?;
    let node = NODES.iter().find(|node| node.name == name);
    let running = node.and_then(|node| Namespaces::find(paths, node.name)).ok_or_else(|| {
        let names: Vec<_> = NODES.iter().map(|node| node.name).collect();
        format!("there is no node {name:?} that runs; the nodes are {}", names.join(" and "))
    })?;
    running.kill()?;
    cgroups::remove_node(name)
}

/// Takes everything down, however much of it there is.
fn down(paths: &Paths) -> Result<(), String> {
    let _lock = lock(paths, "cluster")?;
    clean(paths)
}

fn clean(paths: &Paths) -> Result<(), String> {
    let names = [CONTROL_PLANE_NAME].into_iter().chain(NODES.iter().map(|node| node.name));
    for namespaces in names.filter_map(|name| Namespaces::find(paths, name)) {
        namespaces.kill()?;
    }
    if link_exists() {
        // It may have gone in this moment with the namespaces that it led into.
        let _removed = output(&mut ip(&["link", "delete", LINK]));
        eventually(PATIENCE, "the removal of the link", || if link_exists() { Err(LINK.to_owned()) } else { Ok(()) })?;
    }
    cgroups::remove()?;
    remove_folder(&paths.run())
}

fn link_exists() -> bool {
    std::path::Path::new("/sys/class/net").join(LINK).exists()
}

fn ip(words: &[&str]) -> Command {
    command("ip", words)
}

/// Prints a table of what runs.
fn status(paths: &Paths) -> Result<(), String> {
    let Some(cluster) = find(paths) else {
        println!("no cluster; `cargo xtask cluster up` makes one");
        return Ok(());
    };
    println!("{:<28} {:>9} {:>9}", "COMPONENT", "PROCESS", "MIB");
    let control_plane = components::api(paths).into_iter().chain(components::controllers(paths));
    let mut total = 0;
    for daemon in control_plane {
        total += show(&cluster.control_plane, &daemon);
    }
    for (node, namespaces) in &cluster.nodes {
        for daemon in [components::containerd(paths, node)].into_iter().chain(components::node(paths, node)) {
            total += show(namespaces, &daemon);
        }
    }
    println!("{:<28} {:>9} {:>9}", "all", "", total >> 20);
    println!("{}", output(own_kubectl(paths).args(["get", "nodes", "--output", "wide"]))?);
    println!("export KUBECONFIG={}", paths.kubeconfig().display());
    Ok(())
}

/// One line of the table; the component's memory.
fn show(namespaces: &Namespaces, daemon: &Daemon) -> u64 {
    let process = namespaces.runs(daemon);
    let bytes = process.and_then(process::resident_bytes).unwrap_or(0);
    let process = process.map_or("down".to_owned(), |process| process.to_string());
    println!("{:<28} {process:>9} {:>9}", daemon.name, bytes >> 20);
    bytes
}

/// The cluster of this machine, if it is there.
fn find(paths: &Paths) -> Option<Cluster> {
    let control_plane = Namespaces::find(paths, CONTROL_PLANE_NAME)?;
    let nodes = NODES.iter().filter_map(|node| Some((node, Namespaces::find(paths, node.name)?)));
    Some(Cluster { control_plane, nodes: nodes.collect() })
}

/// The kubeconfig of the cluster that is used: KUBECONFIG's, or that of this machine's cluster, which must be up.
fn kubeconfig(paths: &Paths) -> Result<PathBuf, String> {
    if let Some(foreign) = foreign_kubeconfig(paths) {
        return Ok(foreign);
    }
    let own = paths.kubeconfig();
    if own.exists() { Ok(own) } else { Err("there is no cluster: `cargo xtask cluster up` makes one".to_owned()) }
}

/// What KUBECONFIG names, unless it is this machine's cluster.
fn foreign_kubeconfig(paths: &Paths) -> Option<PathBuf> {
    let named = PathBuf::from(std::env::var_os("KUBECONFIG").filter(|named| !named.is_empty())?);
    (named != paths.kubeconfig()).then_some(named)
}

/// kubectl for the cluster that is used.
fn kubectl(paths: &Paths) -> Result<Command, String> {
    let mut kubectl = Command::new(paths.program("kube"));
    kubectl.arg("kubectl").env("KUBECONFIG", kubeconfig(paths)?);
    Ok(kubectl)
}

/// kubectl for this machine's cluster.
fn own_kubectl(paths: &Paths) -> Command {
    let mut kubectl = Command::new(paths.program("kube"));
    kubectl.arg("kubectl").env("KUBECONFIG", paths.kubeconfig());
    kubectl
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dns_question_is_what_rfc_1035_says() {
        let question = dns_question("ab.c");
        assert_eq!(question[..12], [0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0], "one question, recursion desired");
        assert_eq!(question[12..], [2, b'a', b'b', 1, b'c', 0, 0, 1, 0, 1], "labels, type A, class IN");
    }
}
