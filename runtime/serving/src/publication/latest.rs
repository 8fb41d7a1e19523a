//! `latest.json`: the newest model of a publication path, written after its files.

use std::num::NonZeroU32;

use rectrain_checkpoint::CheckpointId;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::delta::Base;

/// The file that names the newest model.
pub(super) const LATEST: &str = "latest.json";
/// The most bytes of the file.
pub(super) const LATEST_BYTES: u64 = 1 << 16;

const FORMAT: &str = "rectrain-publication";
/// The newest version that this program reads, and the one it writes. Before version 2, a full
/// model had a number that no delta had, and its own digest.
const VERSION: u64 = 2;

/// The newest model of a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Latest {
    /// The name of the job that publishes here.
    pub(super) job: String,
    /// The newest model.
    pub(super) model: Base,
    /// Global steps that it was trained.
    pub(super) step: u64,
    /// The sequence number of the newest full model.
    pub(super) full: u64,
    /// The digest in its `model.json`. `None` in files of version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) full_digest: Option<String>,
    /// The digest by which the next delta names it. The delta with the same number gives it. If
    /// there is no such delta, it is its own. `None` in files of version 1: its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) full_base: Option<String>,
    /// The time of its publication, in milliseconds since 1970.
    pub(super) full_published_at: u64,
    /// The name of the checkpoint with the same model.
    pub(super) checkpoint: String,
    /// The id of that checkpoint.
    pub(super) checkpoint_id: CheckpointId,
    /// The time of the newest model's publication, in milliseconds since 1970.
    pub(super) published_at: u64,
    /// The least number of examples of its rows. `None`: all rows are in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) min_count: Option<NonZeroU32>,
}

impl Latest {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut latest = json!(self);
        latest["format"] = json!(FORMAT);
        latest["version"] = json!(VERSION);
        format!("{latest:#}\n").into_bytes()
    }

    /// Reads the bytes of the file. The error is the problem with them.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let latest: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if latest["format"] != FORMAT {
            return Err(format!("its format is {}, and a publication has \"{FORMAT}\"", latest["format"]));
        }
        match latest["version"].as_u64() {
            Some(found) if found > VERSION => Err(format!(
                "its format has version {found}, and this program reads versions up to {VERSION}; use a newer program"
            )),
            _ => serde_json::from_value(latest).map_err(|error| error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_version_1_name_no_digest_of_the_full_model() {
        let text = r#"{"format": "rectrain-publication", "version": 1, "job": "clicks", "step": 1, "full": 1,
            "model": {"sequence": 1, "digest": "ab"}, "fullPublishedAt": 4, "checkpoint": "step-000000000001",
            "checkpointId": "00000000000000000000000000000007", "publishedAt": 5}"#;
        let found = Latest::decode(text.as_bytes()).unwrap();
        assert_eq!((found.full_digest, found.full_base, found.min_count), (None, None, None));
    }

    #[test]
    fn the_newest_model_comes_back() {
        let latest = Latest {
            job: "clicks".to_owned(),
            model: Base { sequence: 13, digest: "ab".repeat(32) },
            step: 1300,
            full: 12,
            full_digest: Some("cd".repeat(32)),
            full_base: Some("ef".repeat(32)),
            full_published_at: 4,
            checkpoint: "step-000000001300-delta".to_owned(),
            checkpoint_id: CheckpointId(7),
            published_at: 5,
            min_count: NonZeroU32::new(3),
        };
        let bytes = latest.encode();
        assert_eq!(Latest::decode(&bytes), Ok(latest));
        let text = String::from_utf8(bytes).unwrap();
        for (from, to, expected) in [
            ("rectrain-publication", "other", "its format is \"other\""),
            ("\"version\": 2", "\"version\": 3", "reads versions up to 2"),
            ("\"full\": 12,", "", "missing field `full`"),
            ("}", "", "EOF"),
        ] {
            assert!(text.contains(from), "{from}: {text}");
            let message = Latest::decode(text.replace(from, to).as_bytes()).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }
}
