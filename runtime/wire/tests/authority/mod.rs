//! An authority that signs for the members of one job, like the operator's in a cluster.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rectrain_wire::tls::{AUTHORITY_FILE, CERTIFICATE_FILE, Credentials, KEY_FILE, MEMBER_NAME};

pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Writes the three files of a member: a certificate of this authority for the host `name`, its
    /// key, and the certificate of `known` as the trusted authority.
    pub fn write(&self, folder: &Path, name: &str, known: &Self) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &self.0).unwrap();
        std::fs::write(folder.join(AUTHORITY_FILE), known.0.pem()).unwrap();
        std::fs::write(folder.join(CERTIFICATE_FILE), certificate.pem()).unwrap();
        std::fs::write(folder.join(KEY_FILE), key.serialize_pem()).unwrap();
    }

    /// The credentials of a member.
    pub fn credentials(&self) -> Credentials {
        self.credentials_for(MEMBER_NAME, self)
    }

    /// Credentials that this authority signed for the host `name`, and that trust peers of `known`.
    pub fn credentials_for(&self, name: &str, known: &Self) -> Credentials {
        let folder = tempfile::tempdir().unwrap();
        self.write(folder.path(), name, known);
        Credentials::read(folder.path()).unwrap()
    }
}
