//! The keys and certificates of one cluster: its own authority, an identity for each component, and
//! a kubeconfig for each identity. Every new cluster gets new ones.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rectrain_harness::files::write;
use serde_json::json;

use crate::BringUpError;
use crate::network::{CONTROL_PLANE, KUBERNETES, NODES};
use crate::paths::Paths;

/// The user that the API server is for the servers of aggregated API groups.
pub(crate) const AGGREGATOR: &str = "aggregator";

/// The content of a certificate: the user and group in Kubernetes, and the names and addresses it
/// serves.
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

/// Writes all keys, certificates and kubeconfigs.
pub(crate) fn create(paths: &Paths) -> Result<(), BringUpError> {
    let folder = paths.pki();
    let authority = authority().map_err(BringUpError::certificate("the cluster's certificate authority"))?;
    write(&folder.join("ca.crt"), authority.pem())?;
    write(&folder.join("ca.key"), authority.key().serialize_pem())?;
    for identity in identities() {
        issue(&folder, &authority, &identity)?;
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
        // Simpler than the roles and bindings of its manifest.
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

fn issue(folder: &Path, authority: &CertifiedIssuer<'_, KeyPair>, identity: &Identity) -> Result<(), BringUpError> {
    let name = identity.file;
    let (certificate, key) =
        signed(authority, identity).map_err(BringUpError::certificate(format!("the certificate of {name}")))?;
    write(&folder.join(format!("{name}.crt")), certificate)?;
    write(&folder.join(format!("{name}.key")), key)?;
    write(&folder.join(format!("{name}.conf")), kubeconfig(folder, name))?;
    Ok(())
}

/// A certificate and its key, as PEM.
fn signed(authority: &CertifiedIssuer<'_, KeyPair>, identity: &Identity) -> Result<(String, String), rcgen::Error> {
    let key = KeyPair::generate()?;
    let serves: Vec<String> = identity.serves.iter().map(|&name| name.to_owned()).collect();
    let mut params = CertificateParams::new(serves)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, identity.user.as_str());
    if let Some(group) = identity.group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    let certificate = params.signed_by(&key, authority)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

/// A kubeconfig that refers to the identity's files.
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

/// Makes the key that signs the tokens of service accounts.
fn service_accounts(folder: &Path) -> Result<(), BringUpError> {
    let key = KeyPair::generate().map_err(BringUpError::certificate("the key of service accounts"))?;
    write(&folder.join("service-accounts.key"), key.serialize_pem())?;
    write(&folder.join("service-accounts.pub"), key.public_key_pem())?;
    Ok(())
}
