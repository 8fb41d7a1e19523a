//! `rectrain data replay`: writes the rows of text files to a Kafka topic, as JSON objects, at a
//! steady rate. So a stream can be tried out with any data set.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rectrain_kafka::{Client, ErrorCode, KafkaError, NewRecord, Security};
use serde_json::Value;

use crate::args::Replay;
use crate::failure::{Failure, runtime};
use crate::{outlook, output};

/// Records of one write, at most.
const MOST_RECORDS: usize = 1_000;
/// Writes a second, at least, as far as the rate allows.
const WRITES_A_SECOND: f64 = 10.0;
/// How long a broker may be away.
const PATIENCE: Duration = Duration::from_secs(30);

/// A row as it is written.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    json: String,
    /// The value of the column of the order, if there is one.
    order: f64,
}

/// The brokers and the topic of `kafka://HOST:PORT[,HOST:PORT]/TOPIC`.
fn target(url: &str) -> Option<(Vec<String>, String)> {
    let (brokers, topic) = url.strip_prefix("kafka://")?.split_once('/')?;
    let brokers: Vec<String> = brokers.split(',').map(str::to_owned).collect();
    let is_address = |broker: &String| broker.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    (brokers.iter().all(is_address) && !topic.is_empty() && !topic.contains('/')).then(|| (brokers, topic.to_owned()))
}

/// Writes all rows, and says how many there were.
pub(crate) fn replay(replay: &Replay) -> Result<(), Failure> {
    let Some((brokers, topic)) = target(&replay.to) else {
        return Err(Failure::User(format!("--to: expected kafka://HOST:PORT/TOPIC, found `{}`", replay.to)));
    };
    let mut rows = Vec::new();
    for file in &replay.files {
        rows.extend(read(file, replay.by.as_deref())?);
    }
    if replay.by.is_some() {
        rows.sort_by(|a, b| a.order.total_cmp(&b.order));
    }
    let failed = |error: KafkaError| outlook::failure(error.into());
    runtime()?.block_on(async {
        let client = Client::new(brokers, Security::default());
        let partitions = ready(&client, &topic, replay.partitions).await.map_err(failed)?;
        let written = write(&client, &topic, partitions, &rows, replay.rate).await.map_err(failed)?;
        output::line(format_args!("{topic}: {written} rows in {partitions} partitions"))?;
        Ok(())
    })
}

/// The rows of a text file with a header.
fn read(file: &Path, by: Option<&str>) -> Result<Vec<Row>, Failure> {
    let failed = |problem: String| Failure::User(format!("{}: {problem}", file.display()));
    let is_tsv = file.extension().is_some_and(|end| end == "tsv");
    let delimiter = if is_tsv { b'\t' } else { b',' };
    let reader = csv::ReaderBuilder::new().delimiter(delimiter).from_path(file);
    let mut reader = reader.map_err(|error| failed(error.to_string()))?;
    let names: Vec<String> =
        reader.headers().map_err(|error| failed(error.to_string()))?.iter().map(str::to_owned).collect();
    let order = by.map(|by| {
        let found = names.iter().position(|name| name == by);
        found.ok_or_else(|| failed(format!("there is no column `{by}`; its columns are {}", names.join(", "))))
    });
    let order = order.transpose()?;
    let mut rows = Vec::new();
    for (number, record) in (2_u64..).zip(reader.records()) {
        let record = record.map_err(|error| failed(error.to_string()))?;
        let cells: Vec<&str> = record.iter().collect();
        let order = order.and_then(|column| cells.get(column)).map_or(Some(0.0), |cell| cell.trim().parse().ok());
        let order = order.ok_or_else(|| failed(format!("line {number}: expected a number in the column of --by")))?;
        rows.push(Row { json: json(&names, &cells), order });
    }
    Ok(rows)
}

/// The JSON object of a row. Texts that are numbers in JSON stay as they are.
fn json(names: &[String], cells: &[&str]) -> String {
    let mut text = String::from("{");
    for (name, cell) in names.iter().zip(cells) {
        if text.len() > 1 {
            text.push(',');
        }
        text.push_str(&Value::from(name.as_str()).to_string());
        text.push(':');
        text.push_str(&value(cell));
    }
    text.push('}');
    text
}

fn value(cell: &str) -> String {
    let is_number = cell.starts_with(|first: char| first == '-' || first.is_ascii_digit())
        && serde_json::from_str::<serde_json::Number>(cell).is_ok();
    match cell {
        "" => "null".to_owned(),
        number if is_number => number.to_owned(),
        text => Value::from(text).to_string(),
    }
}

/// Makes the topic if it does not exist. Returns the number of its partitions, once they have
/// leaders.
async fn ready(client: &Client, topic: &str, partitions: u16) -> Result<i32, KafkaError> {
    match client.create_topic(topic, i32::from(partitions)).await {
        Ok(()) | Err(KafkaError::Broker { code: ErrorCode::TOPIC_ALREADY_EXISTS, .. }) => {}
        Err(error) => return Err(error),
    }
    let start = Instant::now();
    loop {
        let topics = client.topics(&[topic.to_owned()]).await?;
        let found = topics.iter().find(|found| found.name == topic && found.error == ErrorCode::NONE);
        let has_leaders = found.is_some_and(|found| found.partitions.iter().all(|partition| partition.leader >= 0));
        match found {
            Some(found) if has_leaders => return Ok(found.partitions.len() as i32),
            _ if start.elapsed() >= PATIENCE => {
                return Err(KafkaError::Unreachable {
                    broker: String::new(),
                    problem: format!("topic {topic} has partitions without a leader"),
                });
            }
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Writes the rows to the partitions in turn, in blocks, at `rate` rows a second.
async fn write(
    client: &Client,
    topic: &str,
    partitions: i32,
    rows: &[Row],
    rate: Option<f64>,
) -> Result<usize, KafkaError> {
    let block = rate.map_or(MOST_RECORDS, |rate| ((rate / WRITES_A_SECOND) as usize).clamp(1, MOST_RECORDS));
    let start = Instant::now();
    let mut written = 0;
    for (number, rows) in (0_i32..).zip(rows.chunks(block)) {
        let due = rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(written as f64 / rate));
        tokio::time::sleep(due.saturating_sub(start.elapsed())).await;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64);
        let record =
            |row: &Row| NewRecord { timestamp: now, value: Some(row.json.clone().into()), ..NewRecord::default() };
        let records: Vec<NewRecord> = rows.iter().map(record).collect();
        produce(client, topic, number % partitions.max(1), &records).await?;
        written += records.len();
    }
    Ok(written)
}

/// Writes records. Tries again while the broker is not there.
async fn produce(client: &Client, topic: &str, partition: i32, records: &[NewRecord]) -> Result<(), KafkaError> {
    let start = Instant::now();
    loop {
        match client.produce(topic, partition, records).await {
            Err(error) if error.is_transient() && start.elapsed() < PATIENCE => {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            written => return written.map(drop),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    #[test]
    fn a_row_becomes_an_object_with_its_numbers_as_they_are() {
        let names = ["label", "user", "note", "price", "empty"].map(str::to_owned);
        let json = json(&names, &["1", "007", "a \"b\"", "1.50", ""]);
        assert_eq!(json, r#"{"label":1,"user":"007","note":"a \"b\"","price":1.50,"empty":null}"#);
        assert_eq!([value("-3"), value("1e5"), value("nan"), value("-")], ["-3", "1e5", "\"nan\"", "\"-\""]);
    }

    #[test]
    fn rows_come_in_the_order_of_a_column() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.csv");
        std::fs::write(&file, "label,time\n1,30\n0,20\n").unwrap();
        let rows = read(&file, Some("time")).unwrap();
        assert_eq!(rows.iter().map(|row| row.order).collect::<Vec<_>>(), [30.0, 20.0]);
        let message = read(&file, Some("times")).unwrap_err().message().to_owned();
        assert!(message.contains("there is no column `times`; its columns are label, time"), "{message}");
        std::fs::write(&file, "label,time\n1,soon\n").unwrap();
        let message = read(&file, Some("time")).unwrap_err().message().to_owned();
        assert!(message.contains("line 2: expected a number in the column of --by"), "{message}");
    }

    #[test]
    fn a_target_names_brokers_and_a_topic() {
        let brokers = vec!["a:9092".to_owned(), "b:9093".to_owned()];
        assert_eq!(target("kafka://a:9092,b:9093/clicks"), Some((brokers, "clicks".to_owned())));
        for bad in ["a:9092/clicks", "kafka://a/clicks", "kafka://a:9092", "kafka://a:9092/", "kafka://a:9092/x/y"] {
            assert_eq!(target(bad), None, "{bad}");
        }
    }
}
