//! The keys and certificates of one cluster: an authority made for it, one identity a component, and a kubeconfig for each.
//! They are new with every cluster.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use serde_json::json;

use super::network::{CONTROL_PLANE, KUBERNETES, NODES};
use super::paths::{Paths, write};

/// As whom the API server speaks to the servers of other groups, in the name of users.
pub(super) const AGGREGATOR: &str = "aggregator";

/// Whom a certificate names: the user and group that Kubernetes takes it for, and the names and addresses it serves.
struct Identity {
    file: &'static str,
    user: String,
    group: Option<&'static str>,
    serves: Vec<&'static str>,
}

impl Identity {
    fn client(file: &'static str, user: &str, group: Option<&'static str>) -> Self {
        Self { file, user: user.to_owned(), group, serves: Vec::new() }
    }
}

/// Writes them all.
pub(super) fn create(paths: &Paths) -> Result<(), String> {
    let folder = paths.pki();
    let authority = authority().map_err(|error| format!("cannot make the cluster's certificate authority: {error}"))?;
    write(&folder.join("ca.crt"), authority.pem())?;
    write(&folder.join("ca.key"), authority.key().serialize_pem())?;
    for identity in identities() {
        issue(&folder, &authority, &identity)
            .map_err(|error| format!("cannot make the certificate of {}: {error}", identity.file))?;
    }
    service_accounts(&folder)
}

fn identities() -> Vec<Identity> {
    let nodes = NODES.iter().map(|node| Identity {
        file: node.name,
        user: format!("system:node:{}", node.name),
        group: Some("system:nodes"),
        serves: vec![node.name, node.address],
    });
    let metrics_server = Identity {
        file: "metrics-server",
        user: "metrics-server".to_owned(),
        // In place of the few rights that its manifest gives it.
        group: Some("system:masters"),
        serves: vec!["metrics-server.kube-system.svc"],
    };
    let server = Identity {
        file: "kube-apiserver",
        user: "kube-apiserver".to_owned(),
        group: None,
        serves: vec![
            "localhost",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
            "127.0.0.1",
            KUBERNETES,
            CONTROL_PLANE,
        ],
    };
    let clients = [
        Identity::client("admin", "admin", Some("system:masters")),
        Identity::client("kube-controller-manager", "system:kube-controller-manager", None),
        Identity::client("kube-scheduler", "system:kube-scheduler", None),
        Identity::client("kube-proxy", "system:kube-proxy", None),
        Identity::client(AGGREGATOR, AGGREGATOR, None),
    ];
    nodes.chain([server, metrics_server]).chain(clients).collect()
}

fn authority() -> Result<CertifiedIssuer<'static, KeyPair>, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "rectrain-e2e");
    CertifiedIssuer::self_signed(params, KeyPair::generate()?)
}

fn issue(folder: &Path, authority: &CertifiedIssuer<'_, KeyPair>, identity: &Identity) -> Result<(), String> {
    let name = identity.file;
    let key = KeyPair::generate().map_err(|error| error.to_string())?;
    let serves: Vec<String> = identity.serves.iter().map(|&name| name.to_owned()).collect();
    let mut params = CertificateParams::new(serves).map_err(|error| error.to_string())?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, identity.user.as_str());
    if let Some(group) = identity.group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    let certificate = params.signed_by(&key, authority).map_err(|error| error.to_string())?;
    write(&folder.join(format!("{name}.crt")), certificate.pem())?;
    write(&folder.join(format!("{name}.key")), key.serialize_pem())?;
    write(&folder.join(format!("{name}.conf")), kubeconfig(folder, name))
}

/// A kubeconfig that names the identity's files.
fn kubeconfig(folder: &Path, name: &str) -> String {
    let file = |name: String| folder.join(name).display().to_string();
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "rectrain-e2e", "cluster": {
            "server": format!("https://{CONTROL_PLANE}:6443"), "certificate-authority": file("ca.crt".to_owned())}}],
        "users": [{"name": name, "user": {
            "client-certificate": file(format!("{name}.crt")), "client-key": file(format!("{name}.key"))}}],
        "contexts": [{"name": "rectrain-e2e", "context": {"cluster": "rectrain-e2e", "user": name}}],
        "current-context": "rectrain-e2e",
    })
    .to_string()
}

/// The key that signs the tokens of service accounts.
fn service_accounts(folder: &Path) -> Result<(), String> {
    let key = KeyPair::generate().map_err(|error| format!("cannot make the key of service accounts: {error}"))?;
    write(&folder.join("service-accounts.key"), key.serialize_pem())?;
    write(&folder.join("service-accounts.pub"), key.public_key_pem())
}
