//! The schemas of a schema registry. Each is fetched once: a number always means the same schema.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;

use super::avro::AvroSchema;
use crate::blocking::{self, Stop};
use crate::error::DataError;

/// The longest time for an answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Attempts to reach the registry.
const ATTEMPTS: u32 = 6;

/// A schema registry.
#[derive(Debug)]
pub(super) struct Registry {
    url: String,
    client: reqwest::Client,
    schemas: Mutex<HashMap<u32, Arc<AvroSchema>>>,
}

/// Why there is no schema.
enum Missing {
    /// A later attempt may succeed.
    Unreachable(String),
    Refused(String),
}

impl Registry {
    /// The registry at `http://HOST:PORT`.
    pub(super) fn new(url: &str) -> Result<Self, DataError> {
        rectrain_storage::use_ring();
        let url = url.trim_end_matches('/').to_owned();
        let client = reqwest::Client::builder().timeout(ANSWER).build();
        let client = client.map_err(|error| DataError::Registry { url: url.clone(), problem: error.to_string() })?;
        Ok(Self { url, client, schemas: Mutex::default() })
    }

    /// The schema with this number. Blocks if it is not known yet.
    pub(super) fn schema(&self, number: u32, stop: &Stop) -> Result<Arc<AvroSchema>, DataError> {
        if let Some(schema) = self.schemas.lock().get(&number) {
            return Ok(Arc::clone(schema));
        }
        let failed = |problem: String| DataError::Registry { url: self.url.clone(), problem };
        let (client, url) = (self.client.clone(), format!("{}/schemas/ids/{number}", self.url));
        let fetching = blocking::spawn(async move { fetch(&client, &url).await });
        let fetched = fetching.and_then(|fetching| fetching.wait(stop)).map_err(|error| failed(error.to_string()))?;
        let text = fetched.map_err(|problem| failed(format!("schema {number}: {problem}")))?;
        let schema = schema_of(&text).map_err(|problem| failed(format!("schema {number}: {problem}")))?;
        Ok(Arc::clone(self.schemas.lock().entry(number).or_insert(Arc::new(schema))))
    }
}

/// The schema in the registry's answer.
fn schema_of(answer: &str) -> Result<AvroSchema, String> {
    let answer: Value = serde_json::from_str(answer).map_err(|error| format!("the answer is no JSON: {error}"))?;
    match answer.get("schemaType").and_then(Value::as_str) {
        None | Some("AVRO") => {}
        Some(other) => return Err(format!("it is of type {other}, and Avro is expected")),
    }
    let schema = answer.get("schema").and_then(Value::as_str).ok_or("the answer has no `schema`")?;
    AvroSchema::parse(schema)
}

async fn fetch(client: &reqwest::Client, url: &str) -> Result<String, String> {
    let mut pause = Duration::from_millis(200);
    let mut last = String::new();
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        match fetch_once(client, url).await {
            Ok(text) => return Ok(text),
            Err(Missing::Refused(problem)) => return Err(problem),
            Err(Missing::Unreachable(problem)) => last = problem,
        }
    }
    Err(last)
}

async fn fetch_once(client: &reqwest::Client, url: &str) -> Result<String, Missing> {
    let unreachable = |error: reqwest::Error| Missing::Unreachable(error.to_string());
    let answer = client.get(url).send().await.map_err(unreachable)?;
    let status = answer.status();
    if status.is_client_error() {
        return Err(Missing::Refused(format!("the registry answered {status}")));
    }
    if !status.is_success() {
        return Err(Missing::Unreachable(format!("the registry answered {status}")));
    }
    answer.text().await.map_err(unreachable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_a_schema_of_avro() {
        let record = r#"{"schema": "{\"type\":\"record\",\"name\":\"R\",\"fields\":[]}"}"#;
        assert!(schema_of(record).is_ok());
        for (answer, expected) in [
            ("<html>", "no JSON"),
            (r#"{"error_code": 1}"#, "no `schema`"),
            (r#"{"schemaType": "PROTOBUF", "schema": "x"}"#, "of type PROTOBUF"),
            (r#"{"schema": "\"int\""}"#, "no record"),
        ] {
            let problem = schema_of(answer).unwrap_err();
            assert!(problem.contains(expected), "{answer}: {problem}");
        }
    }
}
