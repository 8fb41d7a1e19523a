//! An authority that signs for the members of one job, as the operator is for the jobs of a cluster.

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

    /// A certificate of this authority for a host of this name, in the form of three files, beside the certificate of `known`.
    pub fn write(&self, folder: &Path, name: &str, known: &Self) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &self.0).unwrap();
        std::fs::write(folder.join(AUTHORITY_FILE), known.0.pem()).unwrap();
        std::fs::write(folder.join(CERTIFICATE_FILE), certificate.pem()).unwrap();
        std::fs::write(folder.join(KEY_FILE), key.serialize_pem()).unwrap();
    }

    /// What a member has.
    pub fn credentials(&self) -> Credentials {
        self.credentials_for(MEMBER_NAME, self)
    }

    /// What one has whom this authority has signed for, and who takes those of `known` for members.
    pub fn credentials_for(&self, name: &str, known: &Self) -> Credentials {
        let folder = tempfile::tempdir().unwrap();
        self.write(folder.path(), name, known);
        Credentials::read(folder.path()).unwrap()
    }
}
