//! The certificates with which a job's pods and the operator authenticate each other. Each job has
//! an authority of its own, which signs one certificate. All members share it, and they refuse
//! every peer without it.
//!
//! The installation's root and the job's uid determine everything to the byte (Ed25519 signatures
//! are deterministic). So the Secret of a job is built like every other object, and a deleted one
//! is restored unchanged. The operator needs no Secret to call a coordinator. The key of a job's
//! authority is stored nowhere.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, Error};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use ring::hkdf;
use ring::rand::{SecureRandom, SystemRandom};
use tokio_rustls::rustls::pki_types::PrivatePkcs8KeyDer;

use crate::api_server::is_silent;
use crate::names::FIELD_MANAGER;

/// The Secret of the root, in the operator's namespace.
pub const ROOT_SECRET: &str = "rectrain-operator-root";
/// The root's field in it.
const ROOT_FIELD: &str = "root";
/// The name in the certificates of members.
pub const MEMBER_NAME: &str = "member.rectrain.dev";
/// Bytes of a root and of a key.
const KEY_BYTES: usize = 32;
/// An Ed25519 key as PKCS #8 (RFC 8410 §7) up to the key itself.
const ED25519_PKCS8: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The root's Secret could neither be read nor created.
    #[error("cannot read or create the Secret {ROOT_SECRET} of namespace {namespace}: {source}")]
    Root { namespace: String, source: Box<Error> },
    /// The root's Secret was not created by the operator.
    #[error(
        "the Secret {ROOT_SECRET} of namespace {namespace} has no field `{ROOT_FIELD}` of {KEY_BYTES} bytes: suspend the jobs that run, delete it, and restart the operator"
    )]
    Malformed { namespace: String },
    /// The system has no random numbers, or a key could not be derived.
    #[error("cannot create {thing}")]
    Create { thing: &'static str },
    /// A certificate could not be written.
    #[error("cannot write a certificate: {0}")]
    Write(#[from] rcgen::Error),
}

impl CertificateError {
    /// Whether the API server did not answer, so the same call may succeed later.
    #[must_use]
    pub fn is_silence(&self) -> bool {
        matches!(self, Self::Root { source, .. } if is_silent(source))
    }
}

/// The secret from which all certificates of an installation are derived.
#[derive(Clone)]
pub struct Root([u8; KEY_BYTES]);

/// A job's certificate, PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobCertificate {
    /// The certificate of the job's authority.
    pub authority: String,
    /// The certificate of its members.
    pub certificate: String,
    /// The key of its members.
    pub key: String,
}

impl Root {
    /// A root of these bytes, for tests.
    #[must_use]
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self(bytes)
    }

    /// The installation's root. It is created if it does not exist; instances that start at the
    /// same time get the same one.
    ///
    /// # Errors
    /// If the Secret can neither be read nor created, or has no valid root.
    pub async fn load(client: Client, namespace: &str) -> Result<Self, CertificateError> {
        let secrets: Api<Secret> = Api::namespaced(client, namespace);
        let failed = |source| CertificateError::Root { namespace: namespace.to_owned(), source: Box::new(source) };
        if let Some(secret) = secrets.get_opt(ROOT_SECRET).await.map_err(failed)? {
            return Self::of(&secret, namespace);
        }
        let mut bytes = [0; KEY_BYTES];
        SystemRandom::new().fill(&mut bytes).map_err(|_| CertificateError::Create { thing: "a random number" })?;
        let secret = Secret {
            metadata: ObjectMeta {
                name: Some(ROOT_SECRET.to_owned()),
                labels: Some([("app.kubernetes.io/name".to_owned(), "rectrain".to_owned())].into()),
                ..ObjectMeta::default()
            },
            data: Some([(ROOT_FIELD.to_owned(), ByteString(bytes.to_vec()))].into()),
            immutable: Some(true),
            ..Secret::default()
        };
        let parameters = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        match secrets.create(&parameters, &secret).await {
            Ok(_) => Ok(Self(bytes)),
            // Another instance was faster.
            Err(Error::Api(status)) if status.code == 409 => {
                Self::of(&secrets.get(ROOT_SECRET).await.map_err(failed)?, namespace)
            }
            Err(source) => Err(failed(source)),
        }
    }

    fn of(secret: &Secret, namespace: &str) -> Result<Self, CertificateError> {
        let bytes = secret.data.as_ref().and_then(|data| data.get(ROOT_FIELD)).map(|bytes| bytes.0.as_slice());
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| CertificateError::Malformed { namespace: namespace.to_owned() })
    }

    /// The certificate of the job with this uid.
    ///
    /// # Errors
    /// If a key cannot be derived, or a certificate cannot be written.
    pub fn of_job(&self, uid: &str) -> Result<JobCertificate, CertificateError> {
        let authority = CertifiedIssuer::self_signed(authority(uid), self.key(uid, "authority")?)?;
        let key = self.key(uid, "member")?;
        let certificate = member(uid)?.signed_by(&key, &authority)?;
        Ok(JobCertificate { authority: authority.pem(), certificate: certificate.pem(), key: key.serialize_pem() })
    }

    /// The key of one purpose of a job: HKDF-SHA-256 (RFC 5869) of the root, with uid and purpose
    /// as `info`.
    fn key(&self, uid: &str, purpose: &str) -> Result<KeyPair, CertificateError> {
        let cannot = |_| CertificateError::Create { thing: "a key" };
        let root = hkdf::Salt::new(hkdf::HKDF_SHA256, b"rectrain.dev/v1").extract(&self.0);
        let info = [uid.as_bytes(), b"/", purpose.as_bytes()];
        let mut pkcs8 = [0; ED25519_PKCS8.len() + KEY_BYTES];
        let (prefix, key) = pkcs8.split_at_mut(ED25519_PKCS8.len());
        prefix.copy_from_slice(&ED25519_PKCS8);
        root.expand(&info, hkdf::HKDF_SHA256).and_then(|derived| derived.fill(key)).map_err(cannot)?;
        Ok(KeyPair::try_from(&PrivatePkcs8KeyDer::from(pkcs8.as_slice()))?)
    }
}

fn authority(uid: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = named(&format!("Rectrain job {uid}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

fn member(uid: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new([MEMBER_NAME.to_owned()])?;
    params.distinguished_name = named(&format!("member of Rectrain job {uid}"));
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    Ok(params)
}

fn named(name: &str) -> DistinguishedName {
    let mut all = DistinguishedName::new();
    all.push(DnType::CommonName, name);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_a_function_of_the_root_and_the_job() {
        let root = Root::from_bytes([7; KEY_BYTES]);
        let [first, again, other] = ["a", "a", "b"].map(|uid| root.of_job(uid).expect("a certificate"));
        assert_eq!(first, again);
        assert_ne!(first.key, other.key);
        assert_ne!(first.authority, other.authority);
        let elsewhere = Root::from_bytes([8; KEY_BYTES]).of_job("a").expect("a certificate");
        assert_ne!(first.key, elsewhere.key);
        assert_ne!(first.authority, elsewhere.authority);
    }

    /// The longest common name of RFC 5280, appendix A.1. Names of jobs and of pods are in none.
    #[test]
    fn the_names_in_certificates_have_at_most_64_characters() {
        let uid = "12345678-1234-1234-1234-123456789abc";
        for params in [authority(uid), member(uid).expect("parameters")] {
            let name = params.distinguished_name.get(&DnType::CommonName);
            let Some(rcgen::DnValue::Utf8String(name)) = name else { panic!("no common name") };
            assert!(name.contains(uid) && name.len() <= 64, "{name}");
        }
    }

    #[test]
    fn a_root_of_another_size_is_refused() {
        for bytes in [None, Some(vec![]), Some(vec![1; KEY_BYTES - 1])] {
            let data = bytes.map(|bytes| [(ROOT_FIELD.to_owned(), ByteString(bytes))].into());
            let error = Root::of(&Secret { data, ..Secret::default() }, "here").map(drop).unwrap_err().to_string();
            assert!(error.contains(ROOT_SECRET) && error.contains("here"), "{error}");
        }
    }
}
