//! The schemas of a schema registry. Each is fetched once: a number always means the same schema. A
//! record has a zero byte and the number of its writer's schema (32 bits, big-endian) before its
//! content.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;

use super::avro::AvroSchema;
use super::protobuf::ProtobufSchema;
use crate::blocking::{self, Stop};
use crate::error::DataError;

/// The longest time for an answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Attempts to reach the registry.
const ATTEMPTS: u32 = 6;

/// Bytes before the content of a record: the zero byte and the number of the schema.
const HEADER: usize = 5;

/// The language of the schemas of a job's records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Language {
    Avro,
    Protobuf,
}

/// A schema of records.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum RecordSchema {
    Avro(AvroSchema),
    Protobuf(ProtobufSchema),
}

/// A schema registry.
#[derive(Debug)]
pub(super) struct Registry {
    url: String,
    language: Language,
    client: reqwest::Client,
    schemas: Mutex<HashMap<u32, Arc<RecordSchema>>>,
}

/// Why there is no schema.
enum Missing {
    /// A later attempt may succeed.
    Unreachable(String),
    Refused(String),
}

impl Registry {
    /// The registry at `http://HOST:PORT`.
    pub(super) fn new(url: &str, language: Language) -> Result<Self, DataError> {
        rectrain_storage::use_ring();
        let url = url.trim_end_matches('/').to_owned();
        let client = reqwest::Client::builder().timeout(ANSWER).build();
        let client = client.map_err(|error| DataError::Registry { url: url.clone(), problem: error.to_string() })?;
        Ok(Self { url, language, client, schemas: Mutex::default() })
    }

    /// A registry whose only schemas, by their numbers, are known already.
    #[cfg(test)]
    pub(super) fn knowing(schemas: impl IntoIterator<Item = (u32, RecordSchema)>) -> Self {
        let registry = Self::new("http://127.0.0.1:1", Language::Avro).unwrap();
        registry.schemas.lock().extend(schemas.into_iter().map(|(number, schema)| (number, Arc::new(schema))));
        registry
    }

    /// The schema with this number. Blocks if it is not known yet.
    pub(super) fn schema(&self, number: u32, stop: &Stop) -> Result<Arc<RecordSchema>, DataError> {
        if let Some(schema) = self.schemas.lock().get(&number) {
            return Ok(Arc::clone(schema));
        }
        let failed = |problem: String| DataError::Registry { url: self.url.clone(), problem };
        let (client, url) = (self.client.clone(), format!("{}/schemas/ids/{number}", self.url));
        let fetching = blocking::spawn(async move { fetch(&client, &url).await });
        let fetched = fetching.and_then(|fetching| fetching.wait(stop)).map_err(|error| failed(error.to_string()))?;
        let text = fetched.map_err(|problem| failed(format!("schema {number}: {problem}")))?;
        let schema = schema_of(&text, self.language);
        let schema = schema.map_err(|problem| failed(format!("schema {number}: {problem}")))?;
        Ok(Arc::clone(self.schemas.lock().entry(number).or_insert(Arc::new(schema))))
    }
}

/// The number of the schema of a record, and the content behind it. `None` if the value has another
/// form.
pub(super) fn split(value: &[u8]) -> Option<(u32, &[u8])> {
    let (header, record) = value.split_at_checked(HEADER)?;
    let [0, a, b, c, d] = *header else { return None };
    Some((u32::from_be_bytes([a, b, c, d]), record))
}

/// The schema in the registry's answer. Without a type it is one of Avro.
fn schema_of(answer: &str, language: Language) -> Result<RecordSchema, String> {
    let answer: Value = serde_json::from_str(answer).map_err(|error| format!("the answer is no JSON: {error}"))?;
    let schema = answer.get("schema").and_then(Value::as_str).ok_or("the answer has no `schema`")?;
    match (language, answer.get("schemaType").and_then(Value::as_str).unwrap_or("AVRO")) {
        (Language::Avro, "AVRO") => AvroSchema::parse(schema).map(RecordSchema::Avro),
        (Language::Protobuf, "PROTOBUF") => ProtobufSchema::parse(schema).map(RecordSchema::Protobuf),
        (_, other) => Err(format!("it is of type {other}, and {language:?} is expected")),
    }
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
    fn the_header_has_the_number_of_the_schema() {
        assert_eq!(split(&[0, 0, 0, 1, 2, 9]), Some((258, &[9][..])));
        for other in [&b"{\"a\": 1}"[..], &[0, 0, 0, 1], &[1, 0, 0, 0, 0]] {
            assert_eq!(split(other), None);
        }
    }

    #[test]
    fn an_answer_has_a_schema_of_the_language() {
        let record = r#"{"schema": "{\"type\":\"record\",\"name\":\"R\",\"fields\":[]}"}"#;
        let message = r#"{"schemaType": "PROTOBUF", "schema": "message M {}"}"#;
        assert!(matches!(schema_of(record, Language::Avro), Ok(RecordSchema::Avro(_))));
        assert!(matches!(schema_of(message, Language::Protobuf), Ok(RecordSchema::Protobuf(_))));
        let problem = schema_of(record, Language::Protobuf).unwrap_err();
        assert!(problem.contains("of type AVRO, and Protobuf is expected"), "{problem}");
        for (answer, expected) in [
            ("<html>", "no JSON"),
            (r#"{"error_code": 1}"#, "no `schema`"),
            (r#"{"schemaType": "PROTOBUF", "schema": "x"}"#, "of type PROTOBUF"),
            (r#"{"schema": "\"int\""}"#, "no record"),
        ] {
            let problem = schema_of(answer, Language::Avro).unwrap_err();
            assert!(problem.contains(expected), "{answer}: {problem}");
        }
    }
}
