//! Encryption and authentication of connections.

use std::fmt;
use std::sync::Arc;

use rectrain_kinds::{KafkaSecurity, SaslMechanism};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::error::KafkaError;

/// How to connect to brokers.
#[derive(Debug, Clone, Default)]
pub struct Security {
    /// TLS, if connections use it.
    pub(crate) tls: Option<Arc<ClientConfig>>,
    /// Name and password, if the brokers ask for them.
    pub(crate) sasl: Option<Credentials>,
}

/// A name and a password for a broker.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The mechanism by which the broker checks them.
    pub mechanism: SaslMechanism,
    /// The user's name.
    pub username: String,
    /// The password.
    pub password: String,
}

impl fmt::Debug for Credentials {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("mechanism", &self.mechanism).finish_non_exhaustive()
    }
}

impl Security {
    /// Prepares the settings. `variable` reads an environment variable.
    ///
    /// # Errors
    /// A name, a password or a certificate that is missing or cannot be used. Names the variable.
    pub fn new(settings: KafkaSecurity, variable: impl Fn(&str) -> Option<String>) -> Result<Self, KafkaError> {
        let tls = settings.tls.then(|| tls(variable(KafkaSecurity::AUTHORITY).as_deref())).transpose()?;
        let sasl = settings.sasl.map(|mechanism| credentials(mechanism, &variable)).transpose()?;
        Ok(Self { tls, sasl })
    }
}

fn credentials(mechanism: SaslMechanism, variable: impl Fn(&str) -> Option<String>) -> Result<Credentials, KafkaError> {
    let required = |name: &str| {
        variable(name).filter(|value| !value.is_empty()).ok_or_else(|| KafkaError::Security {
            problem: format!(
                "the environment variable {name} is not set: set it, or in a cluster name a Secret with this entry in \
                 spec.data.train.kafka.security.secretName"
            ),
        })
    };
    let (username, password) = (required(KafkaSecurity::USERNAME)?, required(KafkaSecurity::PASSWORD)?);
    Ok(Credentials { mechanism, username, password })
}

fn tls(authority: Option<&str>) -> Result<Arc<ClientConfig>, KafkaError> {
    let problem = |problem: String| KafkaError::Security { problem };
    let mut roots = RootCertStore::empty();
    match authority {
        Some(pem) => {
            let unusable =
                |error: String| problem(format!("{} is no certificate in PEM: {error}", KafkaSecurity::AUTHORITY));
            for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
                let certificate = certificate.map_err(|error| unusable(error.to_string()))?;
                roots.add(certificate).map_err(|error| unusable(error.to_string()))?;
            }
            if roots.is_empty() {
                return Err(unusable("there is none in it".to_owned()));
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                let authority = KafkaSecurity::AUTHORITY;
                return Err(problem(format!("the system has no certificates of authorities: set {authority}")));
            }
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| problem(error.to_string()))?;
    Ok(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(settings: KafkaSecurity, variables: &[(&str, &str)]) -> String {
        let variable =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        match Security::new(settings, variable) {
            Ok(security) => format!("{security:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_missing_or_bad_variable_is_named() {
        let sasl = KafkaSecurity { tls: false, sasl: Some(SaslMechanism::Plain) };
        assert!(message(sasl, &[("KAFKA_USERNAME", "u")]).contains("KAFKA_PASSWORD is not set"));
        assert!(message(sasl, &[("KAFKA_USERNAME", ""), ("KAFKA_PASSWORD", "p")]).contains("KAFKA_USERNAME is not"));
        let tls = KafkaSecurity { tls: true, sasl: None };
        assert!(message(tls, &[("KAFKA_CA_CERTIFICATE", "no")]).contains("KAFKA_CA_CERTIFICATE is no certificate"));
    }

    #[test]
    fn a_password_is_not_shown() {
        let sasl = KafkaSecurity { tls: false, sasl: Some(SaslMechanism::ScramSha512) };
        let shown = message(sasl, &[("KAFKA_USERNAME", "u"), ("KAFKA_PASSWORD", "secret")]);
        assert!(shown.contains("ScramSha512") && !shown.contains("secret"), "{shown}");
    }
}
