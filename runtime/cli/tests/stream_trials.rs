//! Changes of topics that users of other trainers have met, with a real Kafka: partitions that come
//! later, deleted records, topics that are made again, transactions, compaction, stopped loaders.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[allow(dead_code, reason = "a part of it is for other tests")]
mod binary;
mod children;
mod common;
#[allow(dead_code, reason = "a part of it is for other tests")]
mod topic;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use binary::folder_with;
use children::children_of;
use common::{refusal_of_job, summary};
use rectrain_harness::kafka::Broker;
use rectrain_kafka::{Client, FetchFrom, Security};
use serde_json::Value;
use topic::{BATCH, JOB, PATIENCE, from_topic, json, produce, row, run, values};

/// A run without an end, and its events.
struct Running {
    child: Child,
    events: Receiver<Value>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _waited = self.child.wait();
    }
}

impl Running {
    fn start(folder: &Path, options: &[&str], sets: &[&str]) -> Self {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let mut run = Command::new(env!("CARGO_BIN_EXE_rectrain"));
        run.args(["run", "job.yaml", "--json"]).args(options).args(sets).current_dir(folder);
        let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, events) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if sender.send(serde_json::from_str(&line).unwrap()).is_err() {
                    return;
                }
            }
        });
        Self { child, events }
    }

    /// Waits until the run has trained so many rows in its life. It must not train more.
    fn trains(&self, rows: usize) {
        let begun = Instant::now();
        let mut seen = Vec::new();
        while begun.elapsed() < PATIENCE {
            let Ok(event) = self.events.recv_timeout(PATIENCE) else { break };
            let trained = event["samples"].as_u64().filter(|_| event["event"] == "progress");
            seen.push(event);
            match trained.map(|trained| trained as usize) {
                Some(trained) if trained == rows => return,
                Some(trained) => assert!(trained < rows, "{trained} rows instead of {rows}"),
                None => {}
            }
        }
        panic!("{rows} rows were not trained: {seen:?}")
    }

    /// Ends the run as a suspended job ends: it saves a checkpoint first.
    fn suspend(mut self) {
        assert!(Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap().success());
        self.child.wait().unwrap();
    }
}

/// The rows from `from` on: so many in each of these partitions.
fn next(from: &mut usize, partitions: &[usize]) -> Vec<Vec<String>> {
    let mut take = |count: &usize| -> Vec<String> {
        *from += count;
        (*from - count..*from).map(|number| json(&row(number))).collect()
    };
    partitions.iter().map(&mut take).collect()
}

/// The overrides of a run without an end.
fn endless(broker: &Broker, topic: &str) -> String {
    let linger = "kafka.until=null,spec.data.train.kafka.lingerMillis=100";
    from_topic(broker, topic).replace("kafka.until=latest", linger)
}

const SAVED: &str = "spec.checkpoint.path=model,spec.checkpoint.resume=latest";

#[test]
fn partitions_that_come_later_are_read_from_their_first_record() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let (mut from, topic) = (0, "grows");
    produce(&broker.address, topic, &next(&mut from, &[64, 64]));
    let stream = endless(&broker, topic);
    // Checkpoints are written all the time.
    let often = [&*stream, SAVED, "spec.checkpoint.everySteps=2"];
    let running = Running::start(folder.path(), &[], &often);
    running.trains(from);
    broker.administer(&["partitions", topic, "4"]).unwrap();
    produce(&broker.address, topic, &next(&mut from, &[0, 0, 500, 500]));
    running.trains(from);
    running.suspend();
    broker.administer(&["partitions", topic, "6"]).unwrap();
    produce(&broker.address, topic, &next(&mut from, &[1, 1, 1, 1, 500, 500]));
    let rest = run(folder.path(), &[&from_topic(&broker, topic), SAVED]);
    assert_eq!(summary(&rest)["samples"], from);
}

#[test]
fn a_job_that_starts_at_the_latest_record_reads_new_partitions_whole() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let (mut from, topic) = (0, "latest");
    produce(&broker.address, topic, &next(&mut from, &[64]));
    let latest = format!("{},spec.data.train.kafka.start=latest", endless(&broker, topic));
    let running = Running::start(folder.path(), &[], &[&latest]);
    // The run has seen the partition once it trains a batch.
    let mut trained = None;
    let begun = Instant::now();
    while trained.is_none() && begun.elapsed() < PATIENCE {
        produce(&broker.address, topic, &next(&mut 0, &[BATCH]));
        let patience = Instant::now();
        while trained.is_none() && patience.elapsed() < Duration::from_secs(3) {
            let event = running.events.recv_timeout(Duration::from_secs(3)).unwrap_or_default();
            trained = event["samples"].as_u64().filter(|_| event["event"] == "progress");
        }
    }
    let mut trained = trained.unwrap() as usize;
    assert!(trained < 64, "it begins behind the first rows");
    // A batch that was late may follow.
    while let Ok(event) = running.events.recv_timeout(Duration::from_secs(2)) {
        trained = event["samples"].as_u64().map_or(trained, |samples| samples as usize);
    }
    broker.administer(&["partitions", topic, "3"]).unwrap();
    produce(&broker.address, topic, &next(&mut from, &[0, 500, 500]));
    running.trains(trained + 1_000);
}

#[test]
fn records_that_retention_has_deleted_are_named_or_counted() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    produce(&broker.address, "overtaken", &next(&mut 0, &[160, 32]));
    let topic = from_topic(&broker, "overtaken");
    run(folder.path(), &[&topic, SAVED, "spec.training.steps=6"]);
    // Turns: partitions 0, 1, 0, 1, and then 0 alone. The checkpoint is at offset 64 of partition
    // 0.
    broker.administer(&["delete-records", "overtaken", "0", "100"]).unwrap();
    let message = refusal_of_job(folder.path(), &[&topic, SAVED]);
    let expected = "topic overtaken, partition 0: 36 records from offset 64 on were deleted before they were trained";
    assert!(message.contains(expected) && message.contains("lostRecords: skip"), "{message}");
    let rest = run(folder.path(), &[&topic, SAVED, "spec.data.train.kafka.lostRecords=skip"]);
    assert_eq!(summary(&rest)["samples"], 64 + 32 + 60);
    let told = |name: &str| rest.iter().rfind(|event| event["event"] == name).unwrap();
    assert!(rest.iter().any(|event| event["message"].as_str().is_some_and(|text| text.contains("36 records"))));
    assert_eq!(told("progress")["lostRecords"], 36);
}

#[test]
fn a_topic_that_was_made_again_is_refused() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    produce(&broker.address, "again", &next(&mut 0, &[512, 512]));
    let topic = from_topic(&broker, "again");
    let first = run(folder.path(), &[&topic, SAVED]);
    assert_eq!(summary(&first)["samples"], 1_024);
    let remake = || {
        broker.administer(&["delete", "again"]).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        // With fewer partitions, and more rows than the checkpoint has trained.
        produce(&broker.address, "again", &next(&mut 0, &[1_000]));
    };
    remake();
    let message = refusal_of_job(folder.path(), &[&topic, SAVED]);
    assert!(message.contains("topic again was deleted and made again"), "{message}");
    // While a job runs, too. The loader may also see the moment in which there is no topic.
    let another = "spec.checkpoint.path=other";
    let mut running = Running::start(folder.path(), &[], &[&endless(&broker, "again"), another]);
    running.trains(1_000);
    remake();
    let code = running.child.wait().unwrap().code();
    let message = std::io::read_to_string(running.child.stderr.take().unwrap()).unwrap();
    assert_eq!(code, Some(2), "{message}");
    let is_told = ["topic again was deleted and made again", "there is no topic `again`"];
    assert!(is_told.iter().any(|told| message.contains(told)), "{message}");
}

#[test]
fn aborted_rows_are_left_out_and_an_open_transaction_is_no_stall() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let (mut from, name) = (0, "transactions");
    produce(&broker.address, name, &[vec![]]);
    let mut producer = broker.transactions(name, 0).unwrap();
    let mut transact = |producer: &mut rectrain_harness::kafka::Transactions, rows: usize, end: &str| {
        producer.order("begin").unwrap();
        producer.write(&next(&mut from, &[rows])[0]).unwrap();
        producer.order(end).unwrap();
    };
    transact(&mut producer, 40, "commit");
    transact(&mut producer, 30, "abort");
    transact(&mut producer, 24, "commit");
    transact(&mut producer, 16, "abort");
    // The last offsets are aborted rows and markers, so no row is at the end.
    let bounded = run(folder.path(), &[&from_topic(&broker, name), SAVED]);
    assert_eq!(summary(&bounded)["samples"], 64);
    let last = bounded.iter().rfind(|event| event["event"] == "progress").unwrap();
    assert_eq!((&last["lagRows"], &last["lagSeconds"]), (&0.into(), &0.0.into()), "{last}");
    // Rows behind an open transaction wait, for longer than a stall.
    transact(&mut producer, 32, "flush");
    let stall = format!("{},spec.faultTolerance.stallSeconds=10", endless(&broker, name));
    let running = Running::start(folder.path(), &["--processes"], &[&stall]);
    running.trains(64);
    std::thread::sleep(Duration::from_secs(14));
    while let Ok(event) = running.events.try_recv() {
        assert!(event["event"] == "progress" || event["event"] == "warning", "{event}");
        assert!(event["event"] != "progress" || event["samples"] == 64, "{event}");
    }
    producer.order("commit").unwrap();
    running.trains(96);
}

#[test]
fn offsets_that_compaction_has_removed_are_no_rows() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    broker.administer(&["compacted", "compacted"]).unwrap();
    let mut producer = broker.transactions("compacted", 0).unwrap();
    // Every tenth row has a key of its own and stays, so holes lie between the rows.
    let key = |number: usize| match number % 10 {
        0 => format!("own{number}"),
        _ => format!("k{}", number % 40),
    };
    let keyed = |from: usize, count: usize| -> Vec<String> {
        (from..from + count).map(|number| format!("{}\t{}", key(number), json(&row(number)))).collect()
    };
    // The last segment is never compacted, so another one follows.
    let begun = Instant::now();
    let mut written = 0;
    let left = loop {
        producer.order("begin").unwrap();
        producer.write(&keyed(written, 400)).unwrap();
        producer.order("commit").unwrap();
        written += 400;
        std::thread::sleep(Duration::from_secs(1));
        let left = offsets(&broker.address, "compacted");
        if left.len() < written {
            break left;
        }
        assert!(begun.elapsed() < PATIENCE, "nothing is compacted");
    };
    let holes = left.windows(2).filter(|pair| pair[1] > pair[0] + 2).count();
    assert!(holes > 0, "{left:?}");
    // The cleaner may go on meanwhile, and removes no last row of a key.
    let bounded = run(folder.path(), &[&from_topic(&broker, "compacted")]);
    let trained = summary(&bounded)["samples"].as_u64().unwrap() as usize;
    let after = offsets(&broker.address, "compacted").len();
    assert!((after..=left.len()).contains(&trained), "{trained} of {} to {after} rows", left.len());
    let last = bounded.iter().rfind(|event| event["event"] == "progress").unwrap();
    assert_eq!(last["lagRows"], 0, "{last}");
}

/// The offsets of the records in partition 0.
fn offsets(address: &str, topic: &str) -> Vec<i64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = Client::new(vec![address.to_owned()], Security::default());
        let (mut found, mut offset) = (Vec::new(), 0);
        loop {
            let from = FetchFrom { topic: topic.to_owned(), partition: 0, offset };
            let fetched = client.fetch(&[from], Duration::from_millis(100), 1 << 20).await.pop().unwrap().fetched;
            let fetched = fetched.unwrap();
            found.extend(fetched.records.iter().map(|record| record.offset));
            if fetched.next >= fetched.end {
                return found;
            }
            offset = fetched.next;
        }
    })
}

/// A loader that is stopped wakes up long after others have read its records. They count once.
#[test]
fn a_loader_that_wakes_up_late_adds_no_row() {
    let Some(broker) = Broker::shared_for_test() else { return };
    let folder = folder_with(JOB);
    let rows: Vec<_> = (0..8).map(|part| (part * 960..(part + 1) * 960).map(row).collect()).collect();
    produce(&broker.address, "stopped", &values(&rows));
    let topic = from_topic(&broker, "stopped");
    let undisturbed = run(folder.path(), &[&topic]);
    let loaders = "spec.roles.loader.replicas=3,spec.checkpoint.path=model,spec.checkpoint.everySteps=40";
    let options = ["--processes", "--slow", "denseWorker-0=8x"];
    let mut running = Running::start(folder.path(), &options, &[&topic, loaders]);
    let progress = |event: &Value| event["event"] == "progress";
    while !progress(&running.events.recv_timeout(PATIENCE).unwrap()) {}
    for (signal, seconds) in [("-STOP", 5), ("-CONT", 0)] {
        let loader = children_of(running.child.id()).into_iter().find(|(_, of)| of == "loader");
        let (pid, _) = loader.unwrap();
        assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
        std::thread::sleep(Duration::from_secs(seconds));
    }
    let last = running.events.iter().last().unwrap();
    assert!(running.child.wait().unwrap().success(), "{last}");
    assert_eq!(last["parametersSha256"], summary(&undisturbed)["parametersSha256"], "{last}");
    assert_eq!(last["trainedRows"], 8 * 960, "{last}");
}
