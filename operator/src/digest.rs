//! Digests of JSON values.

use serde_json::Value;
use sha2::{Digest, Sha256};

/// The first 32 hexadecimal digits of the SHA-256 of a value, whose objects have sorted keys. They
/// tell the objects of one cluster apart.
#[must_use]
pub fn digest(value: &Value) -> String {
    let hash = Sha256::digest(value.to_string().as_bytes());
    hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}
