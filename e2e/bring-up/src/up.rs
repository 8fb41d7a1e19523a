//! Bringing the cluster up, one node down, and everything down.

use std::net::UdpSocket;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rectrain_harness::command::{command, output};
use rectrain_harness::files::{make_folder, remove_folder, write};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet, processes, say};

use crate::access::{foreign_kubeconfig, own_kubectl};
use crate::cluster::{CONTROL_PLANE_NAME, Cluster};
use crate::images::Image;
use crate::namespaces::Namespaces;
use crate::network::{CONTROL_PLANE, KUBERNETES, LINK, MACHINE, NODES, Node};
use crate::paths::Paths;
use crate::{BringUpError, cgroups, components, images, network, pki, prometheus, tools};

/// How long the slowest component may take to start on a slow machine.
const PATIENCE: Duration = Duration::from_secs(180);
/// The programs that [`up`] needs.
const PROGRAMS: [tools::Program; 3] = [tools::INIT, tools::KUBE, tools::COREDNS];

/// Checks that tests can have a cluster: the one that KUBECONFIG names, or one on this machine.
///
/// # Errors
/// The missing precondition, in one sentence.
pub fn available(paths: &Paths) -> Result<(), BringUpError> {
    if foreign_kubeconfig(paths).is_some() { Ok(()) } else { tools::available(paths) }
}

/// Builds the missing programs of the cluster and of its tests.
///
/// # Errors
/// See [`tools::build`].
pub fn programs(paths: &Paths) -> Result<(), BringUpError> {
    if foreign_kubeconfig(paths).is_none() {
        tools::install_packages()?;
        tools::build(paths, &PROGRAMS)?;
    }
    tools::build(paths, &[tools::KUBE, tools::HELM, tools::OBJECT_STORE])
}

/// Downloads and builds everything that the cluster and its trials need besides this workspace's
/// own programs. Parts that only some trials need may fail; their trials report it.
///
/// # Errors
/// See [`programs`] and [`images::build`].
pub fn prefetch(paths: &Paths) -> Result<(), BringUpError> {
    programs(paths)?;
    if foreign_kubeconfig(paths).is_some() {
        return Ok(());
    }
    images::build(paths, Image::Pause)?;
    images::build(paths, Image::ObjectStore)?;
    let optional = [
        tools::build(paths, &[tools::METRICS_SERVER]),
        tools::build(paths, &[tools::KWOK]).and_then(|()| tools::sources_of(tools::KWOK).map(drop)),
        prometheus::programs(paths).map(drop),
    ];
    for failure in optional.into_iter().filter_map(Result::err) {
        say(failure);
    }
    Ok(())
}

/// Brings up everything that is not up, and waits until it works.
///
/// # Errors
/// The first step that fails, or that is not done in time.
pub fn up(paths: &Paths) -> Result<(), BringUpError> {
    tools::available(paths)?;
    let _lock = paths.lock("cluster")?;
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
    let cluster = Cluster { nodes: nodes.collect::<Result<_, BringUpError>>()?, control_plane };
    start_components(paths, &cluster)?;
    let (tools, cluster) = (tools_ready - started, tools_ready.elapsed());
    say(format!(
        "the cluster is up after {:.0} s (and {:.0} s for its programs)",
        cluster.as_secs_f64(),
        tools.as_secs_f64()
    ));
    Ok(())
}

/// Starts all components except the API server, in the order in which they need each other.
fn start_components(paths: &Paths, cluster: &Cluster) -> Result<(), BringUpError> {
    for (node, namespaces) in &cluster.nodes {
        if namespaces.ensure(paths, &components::containerd(paths, node))? {
            images::import_all(paths, namespaces)?;
        }
    }
    until_api_server_is_ready(paths)?;
    for daemon in components::controllers(paths) {
        cluster.control_plane.ensure(paths, &daemon)?;
    }
    for (node, namespaces) in &cluster.nodes {
        for daemon in components::node(paths, node) {
            namespaces.ensure(paths, &daemon)?;
        }
    }
    until_nodes_are_ready(paths)?;
    eventually(PATIENCE, "CoreDNS", dns_answers)?;
    Ok(())
}

/// The namespaces of the control plane. New ones get new keys.
fn control_plane(paths: &Paths) -> Result<Namespaces, BringUpError> {
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
    Ok(made.map(|()| namespaces)?)
}

/// Makes the cable to the machine, the control plane's network, and the administrator's kubeconfig.
fn plug_in(paths: &Paths, namespaces: &Namespaces) -> Result<(), HarnessError> {
    let init = namespaces.init().to_string();
    output(&mut ip(&["link", "add", LINK, "type", "veth", "peer", "name", "uplink", "netns", &init]))?;
    namespaces.script(include_str!("../../cluster/config/control-plane.sh"), &[("CONTROL_PLANE", CONTROL_PLANE)])?;
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

fn node_namespaces(paths: &Paths, control_plane: &Namespaces, node: &Node) -> Result<Namespaces, BringUpError> {
    if let Some(found) = Namespaces::find(paths, node.name) {
        return Ok(found);
    }
    cgroups::create(node.name)?;
    let namespaces = Namespaces::create(paths, node.name, Some(control_plane))?;
    let made = plug_in_node(control_plane, &namespaces, node);
    if made.is_err() {
        namespaces.kill()?;
    }
    Ok(made.map(|()| namespaces)?)
}

/// Connects a node to the control plane's bridge.
fn plug_in_node(control_plane: &Namespaces, namespaces: &Namespaces, node: &Node) -> Result<(), HarnessError> {
    // Only the control plane's network namespace is entered: the node's process id is the
    // machine's.
    let target = control_plane.init().to_string();
    let within = |words: &[&str]| {
        let mut words_within = command("nsenter", ["--target", &target, "--net", "--", "ip"]);
        words_within.args(words);
        output(&mut words_within)
    };
    let init = namespaces.init().to_string();
    // The kernel may not have removed the link of a node that was just stopped.
    let _removed = within(&["link", "delete", node.name]);
    within(&["link", "add", node.name, "type", "veth", "peer", "name", "eth0", "netns", &init])?;
    within(&["link", "set", node.name, "master", "nodes", "up"])?;
    let others = NODES.iter().filter(|other| other.name != node.name);
    let routes: Vec<_> = others.map(|other| format!("{}={}", other.pods, other.address)).collect();
    let environment = [("ADDRESS", node.address), ("CONTROL_PLANE", CONTROL_PLANE), ("ROUTES", &routes.join(" "))];
    namespaces.script(include_str!("../../cluster/config/node.sh"), &environment)
}

fn until_api_server_is_ready(paths: &Paths) -> Result<(), HarnessError> {
    let awaited = format!("the API server (its log: {})", paths.log("kube-apiserver").display());
    let mut ready = own_kubectl(paths).command();
    ready.args(["get", "--raw", "/readyz"]);
    eventually(PATIENCE, &awaited, || output(&mut ready).map(drop))
}

fn until_nodes_are_ready(paths: &Paths) -> Result<(), HarnessError> {
    for node in &NODES {
        let log = paths.log(&format!("{}-kubelet", node.name));
        eventually(PATIENCE, &format!("{} (its log: {})", node.name, log.display()), || {
            let condition = r#"jsonpath={.status.conditions[?(@.type=="Ready")].status}"#;
            let mut get = own_kubectl(paths).command();
            match output(get.args(["get", "node", node.name, "--output", condition]))?.as_str() {
                "True" => Ok(()),
                other => Err(not_yet(format!("its condition Ready is {other:?}"))),
            }
        })?;
    }
    Ok(())
}

/// Asks CoreDNS for the address of the service `kubernetes`.
fn dns_answers() -> Result<(), HarnessError> {
    let ask = || -> std::io::Result<Vec<u8>> {
        let socket = UdpSocket::bind((MACHINE, 0))?;
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        socket.send_to(&dns_question("kubernetes.default.svc.cluster.local"), (CONTROL_PLANE, 53))?;
        let mut answer = vec![0; 512];
        let (length, _) = socket.recv_from(&mut answer)?;
        answer.truncate(length);
        Ok(answer)
    };
    let answer = ask().map_err(HarnessError::io("ask", "CoreDNS"))?;
    let expected: Vec<u8> = KUBERNETES.split('.').filter_map(|number| number.parse().ok()).collect();
    // A correct answer has one record, and the address is its last field.
    if answer.ends_with(&expected) { Ok(()) } else { Err(not_yet(format!("it answers {answer:?}"))) }
}

/// A DNS question for an IPv4 address (RFC 1035, section 4.1).
fn dns_question(name: &str) -> Vec<u8> {
    let header = [0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let labels = name.split('.').flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat());
    header.into_iter().chain(labels).chain([0, 0, 1, 0, 1]).collect()
}

/// The names of this machine's nodes that are ready, and kubectl's table of all nodes.
///
/// # Errors
/// The API server does not answer.
pub fn own_nodes(paths: &Paths) -> Result<(Vec<String>, String), HarnessError> {
    let table = output(own_kubectl(paths).command().args(["get", "nodes", "--no-headers"]))?;
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let ready = rows.filter(|row| row.get(1) == Some(&"Ready")).map(|row| row[0].to_owned());
    Ok((ready.collect(), table))
}

/// Ends a node with all its pods, as a power cut does. [`up`] brings it back, empty.
///
/// # Errors
/// [`BringUpError::NoNode`]; the node's processes or groups do not go in time.
pub fn stop_node(paths: &Paths, name: &str) -> Result<(), BringUpError> {
    let _lock = paths.lock("cluster")?;
    let node = NODES.iter().find(|node| node.name == name);
    let running = node.and_then(|node| Namespaces::find(paths, node.name)).ok_or_else(|| BringUpError::NoNode {
        name: name.to_owned(),
        nodes: NODES.map(|node| node.name).join(" and "),
    })?;
    running.kill()?;
    cgroups::remove_node(name)
}

/// Takes the whole cluster down, or its remains.
///
/// # Errors
/// Processes, links or groups do not go in time.
pub fn down(paths: &Paths) -> Result<(), BringUpError> {
    let _lock = paths.lock("cluster")?;
    clean(paths)
}

fn clean(paths: &Paths) -> Result<(), BringUpError> {
    let names = [CONTROL_PLANE_NAME].into_iter().chain(NODES.iter().map(|node| node.name));
    for namespaces in names.filter_map(|name| Namespaces::find(paths, name)) {
        namespaces.kill()?;
    }
    if link_exists() {
        // The kernel may be removing it together with the namespaces at its other end.
        let _removed = output(&mut ip(&["link", "delete", LINK]));
        let gone = || if link_exists() { Err(not_yet(format!("{LINK} exists"))) } else { Ok(()) };
        eventually(PATIENCE, "the removal of the network link", gone)?;
    }
    cgroups::remove()?;
    Ok(remove_folder(&paths.run())?)
}

/// Checks that no process, mount or link of the cluster exists.
///
/// # Errors
/// [`BringUpError::Left`] with everything that was found.
pub fn nothing_is_left(paths: &Paths) -> Result<(), BringUpError> {
    let run = paths.run().to_string_lossy().into_owned();
    let left: Vec<_> = processes::all().filter(|(_, words)| words.iter().any(|word| word.contains(&run))).collect();
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mounted: Vec<_> = mounts.lines().filter(|mount| mount.contains(&run)).collect();
    if left.is_empty() && mounted.is_empty() && !link_exists() {
        return Ok(());
    }
    Err(BringUpError::Left { processes: format!("{left:?}"), mounts: format!("{mounted:?}"), link: link_exists() })
}

fn link_exists() -> bool {
    Path::new("/sys/class/net").join(LINK).exists()
}

fn ip(words: &[&str]) -> Command {
    command("ip", words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dns_question_follows_rfc_1035() {
        let question = dns_question("ab.c");
        assert_eq!(question[..12], [0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0], "one question, recursion desired");
        assert_eq!(question[12..], [2, b'a', b'b', 1, b'c', 0, 0, 1, 0, 1], "labels, type A, class IN");
    }
}
