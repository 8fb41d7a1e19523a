//! The cluster's components: the programs of the control plane and of a node, with flags and
//! configuration.

use std::path::Path;

use crate::cgroups;
use crate::namespaces::Daemon;
use crate::network::{CONTROL_PLANE, Node, PODS, SERVICES};
use crate::paths::Paths;
use crate::pki::AGGREGATOR;

/// The folders of the standard CNI plugins: Debian's, and the usual one.
pub(crate) const CNI_FOLDERS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

const ETCD: &str = "http://127.0.0.1:2379";

/// The API server and its store, which all other components need.
pub(crate) fn api(paths: &Paths) -> Vec<Daemon> {
    let pki = |file: &str| paths.pki().join(file).display().to_string();
    let etcd = [
        "etcd",
        "--data-dir=/var/lib/etcd",
        // Its folder is in memory, so there is nothing to sync.
        "--unsafe-no-fsync",
        &format!("--listen-client-urls={ETCD}"),
        &format!("--advertise-client-urls={ETCD}"),
        "--listen-peer-urls=http://127.0.0.1:2380",
    ]
    .map(str::to_owned);
    let audit = paths.config("control-plane").join("audit.yaml");
    let api_server = kube(
        paths,
        "kube-apiserver",
        &[
            format!("--etcd-servers={ETCD}"),
            format!("--advertise-address={CONTROL_PLANE}"),
            format!("--service-cluster-ip-range={SERVICES}"),
            format!("--tls-cert-file={}", pki("kube-apiserver.crt")),
            format!("--tls-private-key-file={}", pki("kube-apiserver.key")),
            format!("--client-ca-file={}", pki("ca.crt")),
            "--authorization-mode=Node,RBAC".to_owned(),
            // As on OpenShift: a controller that sets an owner reference needs the right to the
            // owner's finalizers.
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement".to_owned(),
            format!("--audit-policy-file={}", audit.display()),
            format!("--audit-log-path={}", paths.log("audit").display()),
            "--allow-privileged=true".to_owned(),
            format!("--service-account-key-file={}", pki("service-accounts.pub")),
            format!("--service-account-signing-key-file={}", pki("service-accounts.key")),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            "--kubelet-preferred-address-types=InternalIP".to_owned(),
            format!("--kubelet-certificate-authority={}", pki("ca.crt")),
            format!("--kubelet-client-certificate={}", pki("admin.crt")),
            format!("--kubelet-client-key={}", pki("admin.key")),
            // The API server forwards the user's identity to aggregated servers such as
            // metrics-server.
            format!("--requestheader-client-ca-file={}", pki("ca.crt")),
            format!("--requestheader-allowed-names={AGGREGATOR}"),
            "--requestheader-username-headers=X-Remote-User".to_owned(),
            "--requestheader-group-headers=X-Remote-Group".to_owned(),
            "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
            format!("--proxy-client-cert-file={}", pki("aggregator.crt")),
            format!("--proxy-client-key-file={}", pki("aggregator.key")),
            "--enable-aggregator-routing=true".to_owned(),
            // Pods of a dead node are evicted after seconds, so that tests need not wait for
            // minutes.
            "--default-not-ready-toleration-seconds=20".to_owned(),
            "--default-unreachable-toleration-seconds=20".to_owned(),
        ],
    );
    let api_server =
        Daemon { files: vec![(audit, include_str!("../../cluster/config/audit.yaml").to_owned())], ..api_server };
    vec![Daemon { name: "etcd".to_owned(), words: etcd.to_vec(), files: Vec::new() }, api_server]
}

/// The components that act on the API server's objects.
pub(crate) fn controllers(paths: &Paths) -> Vec<Daemon> {
    let pki = |file: &str| paths.pki().join(file).display().to_string();
    let conf = |component: &str| {
        let file = pki(&format!("{component}.conf"));
        ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"].map(|flag| format!("--{flag}={file}"))
    };
    let controller_manager = [
        "--leader-elect=false".to_owned(),
        "--use-service-account-credentials".to_owned(),
        format!("--service-account-private-key-file={}", pki("service-accounts.key")),
        format!("--root-ca-file={}", pki("ca.crt")),
        format!("--cluster-signing-cert-file={}", pki("ca.crt")),
        format!("--cluster-signing-key-file={}", pki("ca.key")),
        "--flex-volume-plugin-dir=/var/lib/volume-plugins".to_owned(),
        // A thousand jobs at a time shall be limited by the operator, and not by these controllers.
        "--kube-api-qps=400".to_owned(),
        "--kube-api-burst=800".to_owned(),
        // The kubelets of this cluster renew their leases every four seconds (kubelet.yaml).
        "--node-monitor-grace-period=20s".to_owned(),
    ];
    vec![
        kube(paths, "kube-controller-manager", &[&conf("kube-controller-manager")[..], &controller_manager].concat()),
        kube(
            paths,
            "kube-scheduler",
            &[
                &conf("kube-scheduler")[..],
                &["--leader-elect=false", "--kube-api-qps=400", "--kube-api-burst=800"].map(str::to_owned)[..],
            ]
            .concat(),
        ),
        coredns(paths),
    ]
}

fn coredns(paths: &Paths) -> Daemon {
    let file = paths.config("control-plane").join("Corefile");
    let values = [("CONTROL_PLANE", CONTROL_PLANE.to_owned()), ("PKI", paths.pki().display().to_string())];
    let text = render(include_str!("../../cluster/config/Corefile"), &values);
    let words = [paths.program("coredns").display().to_string(), "-conf".to_owned(), file.display().to_string()];
    Daemon { name: "coredns".to_owned(), words: words.to_vec(), files: vec![(file, text)] }
}

/// The container runtime of a node.
pub(crate) fn containerd(paths: &Paths, node: &Node) -> Daemon {
    let folder = paths.config(node.name);
    let plugins = CNI_FOLDERS.iter().find(|folder| Path::new(folder).join("ptp").exists()).unwrap_or(&CNI_FOLDERS[0]);
    let values = [("CNI_PLUGINS", (*plugins).to_owned()), ("CONFIG", folder.display().to_string())];
    let file = folder.join("containerd.toml");
    let text = render(include_str!("../../cluster/config/containerd.toml"), &values);
    let pods = render(include_str!("../../cluster/config/pods.conflist"), &[("PODS", node.pods.to_owned())]);
    Daemon {
        name: format!("{}-containerd", node.name),
        words: ["containerd".to_owned(), "--config".to_owned(), file.display().to_string()].to_vec(),
        files: vec![(file, text), (folder.join("cni/pods.conflist"), pods)],
    }
}

/// The kubelet and kube-proxy of a node.
pub(crate) fn node(paths: &Paths, node: &Node) -> [Daemon; 2] {
    let folder = paths.config(node.name);
    let values = [
        ("PKI", paths.pki().display().to_string()),
        ("CONFIG", folder.display().to_string()),
        ("NODE", node.name.to_owned()),
        ("CGROUP", cgroups::of_node(node.name)),
        ("CONTROL_PLANE", CONTROL_PLANE.to_owned()),
        ("ALL_PODS", PODS.to_owned()),
    ];
    let kubelet_file = folder.join("kubelet.yaml");
    let proxy_file = folder.join("kube-proxy.yaml");
    let kubelet = kube(
        paths,
        "kubelet",
        &[
            format!("--config={}", kubelet_file.display()),
            format!("--kubeconfig={}", paths.pki().join(format!("{}.conf", node.name)).display()),
            format!("--hostname-override={}", node.name),
            format!("--node-ip={}", node.address),
        ],
    );
    let proxy = kube(paths, "kube-proxy", &[format!("--config={}", proxy_file.display())]);
    let resolver = (folder.join("resolv.conf"), format!("nameserver {CONTROL_PLANE}\n"));
    let kubelet_config = render(include_str!("../../cluster/config/kubelet.yaml"), &values);
    let proxy_config = render(include_str!("../../cluster/config/kube-proxy.yaml"), &values);
    let of_node = |daemon: Daemon, files| Daemon { name: format!("{}-{}", node.name, daemon.name), files, ..daemon };
    [of_node(kubelet, vec![(kubelet_file, kubelet_config), resolver]), of_node(proxy, vec![(proxy_file, proxy_config)])]
}

/// A component of Kubernetes. All of them are the program `kube`, with the component as first
/// argument.
fn kube(paths: &Paths, component: &str, flags: &[String]) -> Daemon {
    let words = [paths.program("kube").display().to_string(), component.to_owned()];
    let words = words.into_iter().chain(flags.iter().cloned()).collect();
    Daemon { name: component.to_owned(), words, files: Vec::new() }
}

/// Replaces every `{{NAME}}` in a text by its value.
fn render(text: &str, values: &[(&str, String)]) -> String {
    values.iter().fold(text.to_owned(), |text, (name, value)| text.replace(&format!("{{{{{name}}}}}"), value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_in_double_braces_is_replaced() {
        let values = [("A", "1".to_owned()), ("AB", "2".to_owned())];
        assert_eq!(render("{{A}} {{AB}} {A} {{A}}", &values), "1 2 {A} 1");
    }
}
