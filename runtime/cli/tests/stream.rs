//! Jobs that train from a real Kafka. In `sync` they end with the model of the same rows in files.
//! In every mode they train every row once. Kills of members and of the broker change neither.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[allow(dead_code, reason = "a part of it is for other tests")]
mod binary;
mod children;
mod common;
mod topic;

use std::collections::HashSet;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use binary::{folder_with, training};
use children::children_of;
use common::{refusal_of_job, summary};
use rectrain_harness::kafka::Broker;
use rectrain_kafka::{Client, FetchFrom, NewRecord, Record, Security};
use serde_json::{Value, json};
use topic::{
    BATCH, JOB, PARTITIONS, PATIENCE, Row, from_topic, json, produce, produce_records, record, row, rows, run, values,
    write_rows,
};

#[test]
fn the_same_rows_from_kafka_and_from_files_give_the_same_model() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let rows = rows(4);
    let count = rows.iter().map(Vec::len).sum::<usize>();
    write_rows(folder.path(), &rows);
    produce(&broker.address, "same", &values(&rows));
    let files = run(folder.path(), &[]);
    assert_eq!(summary(&files)["samples"], count);
    let topic = from_topic(&broker, "same");
    for loaders in ["1", "3"] {
        let loaders = format!("spec.roles.loader.replicas={loaders}");
        let stream = run(folder.path(), &[&topic, &loaders]);
        assert_eq!(summary(&stream)["samples"], count, "{loaders}");
        assert_eq!(summary(&stream)["parametersSha256"], summary(&files)["parametersSha256"], "{loaders}");
        let progress = stream.iter().rfind(|event| event["event"] == "progress").unwrap();
        assert_eq!(progress["eventTime"], 1_700_000_000.0, "{progress}");
        assert_eq!(progress["lostRecords"], 0, "{progress}");
    }
    for mode in ["gba", "hybrid", "async"] {
        let mode = format!("spec.training.mode={mode}");
        let stream = run(folder.path(), &[&topic, &mode, "spec.roles.denseWorker.replicas=2"]);
        let found = ["samples", "trainedRows"].map(|figure| summary(&stream)[figure].as_u64().unwrap() as usize);
        assert_eq!(found, [count; 2], "{mode}");
    }
}

/// The schemas of clicks. Their numbers are 0 and 1.
const SCHEMAS: [(&str, &str); 2] = [
    (
        "AVRO",
        r#"{"type": "record", "name": "Click", "fields": [{"name": "label", "type": "int"},
            {"name": "user", "type": "string"}, {"name": "item", "type": "string"}, {"name": "age", "type": "long"}]}"#,
    ),
    (
        "PROTOBUF",
        "syntax = \"proto3\"; message Click { bool label = 1; string user = 2; string item = 3; int32 age = 4; }",
    ),
];

/// A schema registry with [`SCHEMAS`], until the process ends. Returns its URL.
fn registry() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let request = BufReader::new(&stream).lines().map_while(Result::ok);
            let request: Vec<String> = request.take_while(|line| !line.is_empty()).collect();
            let path = request.first().and_then(|line| line.split(' ').nth(1)).unwrap_or_default();
            let number: usize = path.strip_prefix("/schemas/ids/").unwrap().parse().unwrap();
            let (kind, schema) = SCHEMAS[number];
            let body = json!({ "schemaType": kind, "schema": schema }).to_string();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            stream.write_all([head, body].concat().as_bytes()).unwrap();
        }
    });
    url
}

/// A text or a list of bytes with its length before it, which has one byte.
fn sized(length: usize, text: &str) -> Vec<u8> {
    [&[length as u8][..], text.as_bytes()].concat()
}

/// A click in Avro's encoding. Small numbers are their doubles.
fn avro((label, user, item, age): &Row) -> Vec<u8> {
    let [user, item] = [user, item].map(|text| sized(2 * text.len(), text));
    [&[0, 0, 0, 0, 0, 2 * *label as u8][..], &user, &item, &[2 * *age as u8]].concat()
}

/// A click in Protobuf's encoding, which leaves out zeros. Its message is the first one.
fn protobuf((label, user, item, age): &Row) -> Vec<u8> {
    let number = |tag: u8, number: u32| if number == 0 { Vec::new() } else { vec![tag, number as u8] };
    let text = |tag: u8, text: &str| [&[tag][..], &sized(text.len(), text)].concat();
    [vec![0, 0, 0, 0, 1, 0], number(8, *label), text(18, user), text(26, item), number(32, *age)].concat()
}

#[test]
fn records_with_a_schema_give_the_model_of_the_same_rows_in_files() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let rows = rows(2);
    write_rows(folder.path(), &rows);
    let files = run(folder.path(), &[]);
    let url = registry();
    let encoders: [fn(&Row) -> Vec<u8>; 2] = [avro, protobuf];
    for (format, encode) in ["avro", "protobuf"].into_iter().zip(encoders) {
        let of = |row: &Row| NewRecord { value: Some(encode(row).into()), ..record("") };
        let records: Vec<Vec<NewRecord>> = rows.iter().map(|rows| rows.iter().map(of).collect()).collect();
        produce_records(&broker.address, format, &records);
        let format_with = format!("format={format},spec.data.train.kafka.schemaRegistry={url}");
        let topic = from_topic(&broker, format).replace("format=json", &format_with);
        let stream = run(folder.path(), &[&topic]);
        assert_eq!(summary(&stream)["parametersSha256"], summary(&files)["parametersSha256"], "{format}");
    }
}

#[test]
fn a_run_that_resumes_reads_each_offset_once_and_the_new_ones() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let (first, all) = (rows(4), rows(9));
    let (early, late): (Vec<_>, Vec<_>) = all.iter().zip(&first).map(|(all, first)| all.split_at(first.len())).unzip();
    let own = |parts: Vec<&[Row]>| parts.into_iter().map(<[Row]>::to_vec).collect::<Vec<_>>();
    let (early, late) = (own(early), own(late));
    produce(&broker.address, "resumed", &values(&early));
    let topic = from_topic(&broker, "resumed");
    let saved = [&*topic, "spec.checkpoint.path=model", "spec.checkpoint.everySteps=7"];
    let count = |rows: &[Vec<Row>]| rows.iter().map(Vec::len).sum::<usize>() as u64;
    let stopped = run(folder.path(), &[&saved[..], &["spec.training.steps=20"]].concat());
    assert_eq!(summary(&stopped)["samples"], 20 * BATCH);
    let on = [&saved[..], &["spec.checkpoint.resume=latest"]].concat();
    let rest = run(folder.path(), &on);
    let alone = run(folder.path(), &[&topic]);
    assert_eq!(summary(&rest)["samples"], count(&early));
    assert_eq!(summary(&rest)["parametersSha256"], summary(&alone)["parametersSha256"]);
    produce(&broker.address, "resumed", &values(&late));
    assert_eq!(summary(&run(folder.path(), &on))["samples"], count(&early) + count(&late));
}

#[test]
fn kills_of_members_and_of_the_broker_lose_no_row_and_change_no_model() {
    let Some(mut broker) = Broker::for_test() else { return };
    let folder = folder_with(JOB);
    let rows = rows(60);
    produce(&broker.address, "clicks", &values(&rows));
    let topic = from_topic(&broker, "clicks");
    let undisturbed = run(folder.path(), &[&topic]);
    let loaders = "spec.roles.loader.replicas=3,spec.checkpoint.path=model,spec.checkpoint.everySteps=40,\
                   spec.faultTolerance.backoffSeconds=1";
    let arguments =
        ["run", "job.yaml", "--json", "--processes", "--slow", "denseWorker-0=8x", "--set", &topic, "--set"];
    let arguments: Vec<&str> = arguments.into_iter().chain([loaders]).collect();
    let (mut child, lines) = training(folder.path(), &arguments);
    for role in ["loader", "embedding-worker", "loader"] {
        let victim = children_of(child.id()).into_iter().find(|(_, of)| of == role);
        let Some((pid, _)) = victim else { panic!("no {role} runs any more") };
        assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
        std::thread::sleep(Duration::from_millis(300));
    }
    broker.restart().unwrap();
    let last = lines.map(|line| line.unwrap()).last().unwrap();
    assert!(child.wait().unwrap().success(), "{last}");
    let last: Value = serde_json::from_str(&last).unwrap();
    assert_eq!(last["parametersSha256"], summary(&undisturbed)["parametersSha256"], "{last}");
}

/// The model of step 20 predicts each row that the run trains from there on.
#[test]
fn a_run_that_resumes_may_have_its_first_model_beside_it() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let rows = rows(6);
    produce(&broker.address, "frozen", &values(&rows));
    let topic = from_topic(&broker, "frozen");
    let saved =
        [&*topic, "spec.checkpoint.path=model", "spec.checkpoint.everySteps=7", "spec.checkpoint.resume=latest"];
    run(folder.path(), &[&saved[..], &["spec.training.steps=20"]].concat());
    let field = "spec.training.quality.baseline.from";
    let (missing, frozen) = (format!("{field}=model@19"), format!("{field}=model@20"));
    let message = refusal_of_job(folder.path(), &[&saved[..], &[&*missing]].concat());
    assert!(message.contains("there is no finished checkpoint model@19"), "{message}");
    let beside = run(folder.path(), &[&saved[..], &[&*frozen]].concat());
    let last = beside.iter().rfind(|event| event["event"] == "progress").unwrap();
    let left = rows.iter().map(Vec::len).sum::<usize>() - 20 * BATCH;
    assert_eq!((&last["window"]["rows"], &last["baseline"]["rows"]), (&left.into(), &left.into()), "{last}");
    assert!(last["baseline"]["normalizedEntropy"].is_f64(), "{last}");
    let alone = run(folder.path(), &[&topic]);
    assert_eq!(summary(&beside)["parametersSha256"], summary(&alone)["parametersSha256"]);
}

/// A second job knows nothing of the first one's checkpoint. It begins where the group has come.
#[test]
fn offsets_are_committed_for_a_group_and_another_job_begins_there() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let (early, all) = (rows(4), rows(6));
    let count = |rows: &[Vec<Row>]| rows.iter().map(Vec::len).sum::<usize>();
    produce(&broker.address, "grouped", &values(&early));
    let group = format!("{},spec.data.train.kafka.group=trainers", from_topic(&broker, "grouped"));
    let first = run(folder.path(), &[&group, "spec.checkpoint.path=first,spec.checkpoint.everySteps=9"]);
    assert_eq!(summary(&first)["samples"], count(&early));
    let lengths = |rows: &[Vec<Row>]| rows.iter().map(|rows| Some(rows.len() as i64)).collect::<Vec<_>>();
    assert_eq!(committed(&broker.address, "trainers", "grouped"), lengths(&early), "all of them");
    produce(&broker.address, "grouped", &values(&all));
    let next = format!("{group},spec.data.train.kafka.start=committed");
    let second = run(folder.path(), &[&next, "spec.checkpoint.path=second"]);
    assert_eq!(summary(&second)["samples"], count(&all));
    let both: Vec<_> = lengths(&early).iter().zip(lengths(&all)).map(|(early, all)| Some((*early)? + all?)).collect();
    assert_eq!(committed(&broker.address, "trainers", "grouped"), both);
    // A group that has committed nothing begins at the first record.
    let other = next.replace("group=trainers", "group=others");
    assert_eq!(summary(&run(folder.path(), &[&other]))["samples"], count(&early) + count(&all));
}

/// The time of row 0 of a timed topic, in seconds since 1970. Each row comes a second later.
const START: usize = 1_700_000_000;

/// The record of a row, with the time of the row.
fn timed(number: usize) -> NewRecord {
    NewRecord { timestamp: 1_000 * (START + number) as i64, ..record(&json(&row(number))) }
}

/// The file and the topic have the rows around the boundary both. The file is trained up to it, and
/// the topic from it on.
#[test]
fn history_and_then_a_stream_train_each_row_once() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let (boundary, all) = (12 * BATCH, 20 * BATCH);
    let mut history = "label,user,item,age,at\n".to_owned();
    for number in 0..boundary + 5 {
        let (label, user, item, age) = row(number);
        writeln!(history, "{label},{user},{item},{age},{}", START + number).unwrap();
    }
    std::fs::write(folder.path().join("history.csv"), history).unwrap();
    produce_records(&broker.address, "history", &[(boundary - 7..all).map(timed).collect()]);
    write_rows(folder.path(), &[(0..all).map(row).collect()]);
    let one = run(folder.path(), &[]);
    let moment = START + boundary;
    let by_time = format!(
        "spec.data.train=null,spec.data.source.paths={{history.csv}},spec.data.split.time.column=at,\
         spec.data.split.time.testFrom={moment}"
    );
    let first = run(folder.path(), &[&by_time, "spec.checkpoint.path=history"]);
    assert_eq!(summary(&first)["trainedRows"], boundary);
    assert_eq!(summary(&first)["test"]["samples"], 5, "the rows from the boundary on");
    let onwards = format!(
        "{},spec.data.train.kafka.start=timestamp,spec.data.train.kafka.startTimestamp={moment}000,\
         spec.checkpoint.path=stream,spec.checkpoint.from=history@latest",
        from_topic(&broker, "history")
    );
    let second = run(folder.path(), &[&onwards]);
    assert_eq!(summary(&second)["trainedRows"], all - boundary);
    assert_eq!(summary(&second)["parametersSha256"], summary(&one)["parametersSha256"]);
}

/// A run up to a moment trains the records before it, and the next one the rest. Training ends by
/// itself once no record comes.
#[test]
fn training_ends_at_a_moment_or_once_nothing_comes() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let (first, all) = (5 * BATCH, 8 * BATCH);
    produce_records(&broker.address, "until", &[(0..all).map(timed).collect(), Vec::new()]);
    write_rows(folder.path(), &[(0..all).map(row).collect()]);
    let one = run(folder.path(), &[]);
    let until = |end: &str| from_topic(&broker, "until").replace("kafka.until=latest", &format!("kafka.until={end}"));
    let kept = "spec.checkpoint.path=until,spec.checkpoint.resume=latest";
    let moment = until(&format!("timestamp,spec.data.train.kafka.untilTimestamp={}000", START + first));
    assert_eq!(summary(&run(folder.path(), &[&moment, kept]))["samples"], first);
    let idle = until("idle,spec.data.train.kafka.untilIdleSeconds=2");
    let rest = run(folder.path(), &[&idle, kept]);
    assert_eq!(summary(&rest)["samples"], all);
    assert_eq!(summary(&rest)["parametersSha256"], summary(&one)["parametersSha256"]);
}

/// The offsets that a group has committed, by partition.
fn committed(address: &str, group: &str, topic: &str) -> Vec<Option<i64>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let partitions: Vec<i32> = (0..).take(PARTITIONS).collect();
    let client = Client::new(vec![address.to_owned()], Security::default());
    runtime.block_on(client.committed(group, topic, &partitions)).unwrap()
}

#[test]
fn records_that_are_no_rows_are_named_or_skipped() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let mut good: Vec<String> = (0..2 * BATCH).map(|number| json(&row(number))).collect();
    let bad = ["no JSON", r#"{"user":"u1","item":"i1","age":{},"label":1}"#, r#"{"user":"u1","item":"i1","label":2}"#];
    for (at, value) in [(20, bad[0]), (21, bad[1]), (30, bad[2])] {
        good.insert(at, value.to_owned());
    }
    produce(&broker.address, "bad", &[good, vec!["also none".to_owned(); 3]]);
    let topic = from_topic(&broker, "bad");
    let message = refusal_of_job(folder.path(), &[&topic]);
    assert!(message.contains("topic bad, partition 1, offset 0: expected a JSON object"), "{message}");
    let letters = "spec.data.train.kafka.deadLetterTopic=dead";
    let message = refusal_of_job(folder.path(), &[&topic, "spec.data.badRows.action=skip", letters]);
    assert!(message.contains("there is no topic `dead`"), "{message}");
    produce(&broker.address, "dead", &[vec![]]);
    let skipping = run(folder.path(), &[&topic, "spec.data.badRows.action=skip", letters]);
    let figures = ["samples", "skippedRows"].map(|figure| summary(&skipping)[figure].as_u64().unwrap() as usize);
    assert_eq!(figures, [2 * BATCH, 6]);
    let mut kept = values_of(&broker.address, "dead");
    kept.sort();
    let mut expected = [bad.map(str::to_owned).to_vec(), vec!["also none".to_owned(); 3]].concat();
    expected.sort();
    assert_eq!(kept, expected);
}

/// The values in partition 0 of a topic.
fn values_of(address: &str, topic: &str) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = Client::new(vec![address.to_owned()], Security::default());
        let from = FetchFrom { topic: topic.to_owned(), partition: 0, offset: 0 };
        let fetched = client.fetch(&[from], Duration::from_secs(1), 1 << 20).await.pop().unwrap().fetched.unwrap();
        let text = |record: &Record| String::from_utf8(record.value.clone().unwrap().to_vec()).unwrap();
        fetched.records.iter().map(text).collect()
    })
}

#[test]
fn topics_and_brokers_that_are_not_there_are_named() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    produce(&broker.address, "empty", &[vec![]]);
    let message = refusal_of_job(folder.path(), &[&from_topic(&broker, "absent")]);
    assert!(message.contains("there is no topic `absent`"), "{message}");
    let message = refusal_of_job(folder.path(), &[&from_topic(&broker, "empty")]);
    assert!(message.contains("the topics have no rows"), "{message}");
    let sasl = "spec.data.train.kafka.security.sasl=scramSha512";
    let message = refusal_of_job(folder.path(), &[&from_topic(&broker, "empty"), sasl]);
    assert!(message.contains("KAFKA_USERNAME is not set"), "{message}");
}

/// Rows that arrive while the job trains are trained too, although no partition has a full batch.
#[test]
fn an_endless_job_trains_what_arrives() {
    let Some(broker) = Broker::shared_for_test() else { return };
    for mode in ["sync", "gba"] {
        train_what_arrives(&broker, mode);
    }
}

/// Trains without an end. Ends the job when it has trained the rows that arrived meanwhile.
fn train_what_arrives(broker: &Broker, mode: &str) {
    let folder = folder_with(JOB);
    let topic = format!("endless-{mode}");
    let first = rows(2);
    let count = first.iter().map(Vec::len).sum::<usize>() as u64;
    produce(&broker.address, &topic, &values(&first));
    let endless = from_topic(broker, &topic).replace("kafka.until=latest", "kafka.until=null");
    let endless = format!("{endless},spec.data.train.kafka.lingerMillis=100,spec.training.mode={mode}");
    let mut run = Command::new(env!("CARGO_BIN_EXE_rectrain"));
    let run = run.args(["run", "job.yaml", "--json", "--set", &endless]).current_dir(folder.path());
    let mut child = run.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (pid, (done, ended)) = (child.id(), channel::<()>());
    // A run that hangs ends, and so does the test.
    let watchdog = std::thread::spawn(move || {
        if ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
        }
    });
    let one = (0..PARTITIONS).map(|partition| vec![json(&row(partition))]).collect::<Vec<_>>();
    let wanted = count + one.len() as u64;
    let mut produced = false;
    let mut seen = HashSet::new();
    for line in lines {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        // The predictions of the worker. Without a barrier, `samples` has other sources.
        let trained = event["window"]["rows"].as_u64().unwrap_or(0);
        seen.insert(trained);
        if trained >= count && !std::mem::replace(&mut produced, true) {
            produce(&broker.address, &topic, &one);
        }
        if trained == wanted {
            break;
        }
    }
    drop(done);
    watchdog.join().unwrap();
    // The watchdog may have killed it.
    let _killed = child.kill();
    child.wait().unwrap();
    assert!(seen.contains(&wanted), "{mode}: {seen:?}");
}

/// Rows of a stage of the job that goes back, a multiple of its global batch.
const STAGE: usize = 2_048;
/// Rows whose labels are the wrong way round: more than the window, so that nothing hides them.
const WRONG: usize = 80 * BATCH;
const ROLLBACK: &str = "\
    spec.training.optimizer.dense.learningRate=0.01,spec.training.optimizer.sparse.learningRate=0.05,\
    spec.training.quality.windowRows=1000,spec.training.quality.onRegression.tolerance=0.1,\
    spec.training.quality.onRegression.action=rollback,spec.data.train.kafka.lingerMillis=600000,\
    spec.checkpoint.path=model,spec.checkpoint.everySteps=16,spec.checkpoint.keep=1,\
    spec.checkpoint.resume=latest,spec.faultTolerance.backoffSeconds=1";

/// A click whose label its user and item determine. `is_wrong`: the label is the other one.
fn clear_row(number: usize, is_wrong: bool) -> Row {
    let (_, user, item, age) = row(number);
    let (of_user, of_item) = (number * 7 % 23 % 3, number * 5 % 17 % 2);
    (u32::from((of_user + of_item >= 2) != is_wrong), user, item, age)
}

/// The rows with wrong labels are left out, with all rows since the last good checkpoint. The model
/// is the one of a run without these rows, to the bit.
#[test]
fn a_rollback_gives_the_model_of_a_run_without_the_lost_rows() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let (begin, end) = (4 * STAGE, 4 * STAGE + WRONG);
    let rows: Vec<Row> = (0..end + STAGE).map(|number| clear_row(number, (begin..end).contains(&number))).collect();
    let send = |range: std::ops::Range<usize>| {
        produce(&broker.address, "rollback", &[rows[range].iter().map(json).collect()]);
    };
    let topic = from_topic(&broker, "rollback");
    let endless = topic.replace("kafka.until=latest", "kafka.until=null");
    send(0..STAGE);
    let mut command = Command::new(env!("CARGO_BIN_EXE_rectrain"));
    let command =
        command.args(["run", "job.yaml", "--json", "--set", &endless, "--set", ROLLBACK]).current_dir(folder.path());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
    let (pid, (done, ended)) = (child.id(), channel::<()>());
    let watchdog = std::thread::spawn(move || {
        if ended.recv_timeout(2 * PATIENCE) == Err(RecvTimeoutError::Timeout) {
            Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
        }
    });
    let (mut sent, mut told) = (STAGE, Vec::new());
    // It lives as long as the run, which would fail with a closed output.
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for line in lines.by_ref() {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        // The next rows come when the ones before are trained. So the windows are small.
        if event["event"] == "progress" && event["samples"] == sent && sent < end {
            let next = if sent < begin { sent + STAGE } else { end };
            send(sent..next);
            sent = next;
        }
        let is_back = event["event"] == "rolledBack";
        told.push(event);
        if is_back {
            break;
        }
    }
    assert!(Command::new("kill").args(["-TERM", &pid.to_string()]).status().unwrap().success());
    child.wait().unwrap();
    drop(done);
    watchdog.join().unwrap();
    let find = |name: &str| told.iter().rfind(|event| event["event"] == name).unwrap_or_else(|| panic!("{told:?}"));
    assert!(find("restarting")["message"].as_str().unwrap().contains("training goes back to checkpoint"), "{told:?}");
    let back = find("rolledBack");
    let lost = &back["lost"][0];
    let figures = [&lost["from"], &lost["until"], &back["step"], &back["fromStep"]];
    let [from, until, step, from_step] = figures.map(|figure| figure.as_u64().unwrap() as usize);
    assert_eq!((lost["topic"].as_str(), lost["partition"].as_u64()), (Some("rollback"), Some(0)));
    assert_eq!((from, back["lostRows"].as_u64()), (step * BATCH, Some((until - from) as u64)), "{back}");
    // The last good window had 1,000 rows at least, and few of them were wrong.
    assert!(from + 500 <= begin && from > 0 && until > begin + 100 && until <= end, "{back}");
    let steps = std::fs::read_dir(folder.path().join("model")).unwrap();
    let steps: Vec<String> = steps.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let step_of = |name: &String| name.strip_prefix("step-")?.split('-').next()?.parse::<usize>().ok();
    let newest = steps.iter().filter_map(step_of).max().unwrap();
    // The last batches of a stream at rest are not settled. They are trained again.
    assert!(newest < step + 32 && step + 32 < from_step, "newer ones are deleted: {steps:?}, {back}");
    send(end..rows.len());
    let rest = run(folder.path(), &[&topic, ROLLBACK]);
    let kept: Vec<Row> = rows[..from].iter().chain(&rows[until..]).cloned().collect();
    assert_eq!(summary(&rest)["samples"], kept.len(), "a checkpoint since the rollback is behind the lost rows");
    assert!(!rest.iter().any(|event| event["event"] == "rolledBack"), "{rest:?}");
    let window = &summary(&rest)["window"];
    assert!(window["auc"].as_f64() > Some(0.8), "it predicts the rows after the wrong ones as before: {window}");
    write_rows(folder.path(), &[kept]);
    let rates = ROLLBACK.split(',').take(2).collect::<Vec<_>>().join(",");
    let alone = run(folder.path(), &[&rates]);
    assert_eq!(summary(&rest)["parametersSha256"], summary(&alone)["parametersSha256"]);
}
