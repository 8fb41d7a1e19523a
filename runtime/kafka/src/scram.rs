//! SCRAM (RFC 5802, RFC 7677): proves the knowledge of a password without sending it, and checks
//! that the broker knows it too. Pure: the connection sends the messages.

use std::num::NonZeroU32;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::{digest, hmac, pbkdf2};

/// The largest number of rounds that a broker may ask for.
const MOST_ITERATIONS: u32 = 1_000_000;

/// The hash function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hash {
    Sha256,
    Sha512,
}

impl Hash {
    fn hmac(self) -> hmac::Algorithm {
        match self {
            Self::Sha256 => hmac::HMAC_SHA256,
            Self::Sha512 => hmac::HMAC_SHA512,
        }
    }

    fn sign(self, key: &[u8], message: &[u8]) -> Vec<u8> {
        hmac::sign(&hmac::Key::new(self.hmac(), key), message).as_ref().to_vec()
    }

    fn digest(self, message: &[u8]) -> Vec<u8> {
        let algorithm = match self {
            Self::Sha256 => &digest::SHA256,
            Self::Sha512 => &digest::SHA512,
        };
        digest::digest(algorithm, message).as_ref().to_vec()
    }

    fn salted(self, password: &str, salt: &[u8], iterations: NonZeroU32) -> Vec<u8> {
        let (algorithm, length) = match self {
            Self::Sha256 => (pbkdf2::PBKDF2_HMAC_SHA256, 32),
            Self::Sha512 => (pbkdf2::PBKDF2_HMAC_SHA512, 64),
        };
        let mut key = vec![0; length];
        pbkdf2::derive(algorithm, iterations, salt, password.as_bytes(), &mut key);
        key
    }
}

/// The client's side of an exchange.
#[derive(Debug)]
pub(crate) struct Scram {
    hash: Hash,
    nonce: String,
    first: String,
}

/// The client's last message, and the broker's answer that proves that it knows the password.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Proof {
    pub(crate) message: String,
    pub(crate) expected: String,
}

impl Scram {
    /// `nonce` is random text without commas.
    pub(crate) fn new(hash: Hash, user: &str, nonce: String) -> Self {
        let user = user.replace('=', "=3D").replace(',', "=2C");
        Self { hash, first: format!("n={user},r={nonce}"), nonce }
    }

    pub(crate) fn first_message(&self) -> String {
        format!("n,,{}", self.first)
    }

    /// The proof for the broker's first message, or the defect of that message.
    pub(crate) fn prove(&self, password: &str, challenge: &str) -> Result<Proof, String> {
        let (nonce, salt, iterations) = self.read(challenge)?;
        let salted = self.hash.salted(password, &salt, iterations);
        let client_key = self.hash.sign(&salted, b"Client Key");
        let without_proof = format!("c=biws,r={nonce}");
        let signed = format!("{},{challenge},{without_proof}", self.first);
        let signature = self.hash.sign(&self.hash.digest(&client_key), signed.as_bytes());
        let proof: Vec<u8> = client_key.iter().zip(&signature).map(|(key, signature)| key ^ signature).collect();
        let server_key = self.hash.sign(&salted, b"Server Key");
        let expected = self.hash.sign(&server_key, signed.as_bytes());
        Ok(Proof {
            message: format!("{without_proof},p={}", STANDARD.encode(proof)),
            expected: format!("v={}", STANDARD.encode(expected)),
        })
    }

    /// Nonce, salt and iterations of the broker's first message.
    fn read<'a>(&self, challenge: &'a str) -> Result<(&'a str, Vec<u8>, NonZeroU32), String> {
        let field = |name: &str| challenge.split(',').find_map(|field| field.strip_prefix(name));
        if let Some(error) = field("e=") {
            return Err(format!("the broker answered `{error}`"));
        }
        let nonce = field("r=").filter(|nonce| nonce.starts_with(&self.nonce) && nonce.len() > self.nonce.len());
        let salt = field("s=").and_then(|salt| STANDARD.decode(salt).ok());
        let iterations = field("i=").and_then(|count| count.parse::<NonZeroU32>().ok());
        match (nonce, salt, iterations.filter(|count| count.get() <= MOST_ITERATIONS)) {
            (Some(nonce), Some(salt), Some(iterations)) => Ok((nonce, salt, iterations)),
            _ => Err("the broker's challenge has no nonce, salt or number of iterations".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The exchange in RFC 7677, section 3.
    #[test]
    fn the_exchange_is_that_of_the_rfc() {
        let scram = Scram::new(Hash::Sha256, "user", "rOprNGfwEbeRWgbNEkqO".to_owned());
        assert_eq!(scram.first_message(), "n,,n=user,r=rOprNGfwEbeRWgbNEkqO");
        let challenge = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096";
        let proof = scram.prove("pencil", challenge).unwrap();
        assert_eq!(
            proof.message,
            "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
             p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
        );
        assert_eq!(proof.expected, "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=");
    }

    #[test]
    fn commas_and_equals_signs_in_a_name_are_escaped() {
        let scram = Scram::new(Hash::Sha512, "a=b,c", "n".to_owned());
        assert_eq!(scram.first_message(), "n,,n=a=3Db=2Cc,r=n");
    }

    #[test]
    fn another_nonce_too_many_rounds_and_an_error_are_refused() {
        let scram = Scram::new(Hash::Sha256, "user", "mine".to_owned());
        for challenge in [
            "r=other,s=AAAA,i=4096",
            "r=mine,s=AAAA,i=4096",
            "r=mine1,s=AAAA,i=0",
            "r=mine1,s=AAAA,i=99999999",
            "",
            "e=x",
        ] {
            assert!(scram.prove("pencil", challenge).is_err(), "{challenge}");
        }
    }
}
