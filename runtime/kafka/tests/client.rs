//! The client against a real broker.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::time::Duration;

use bytes::Bytes;
use rectrain_kafka::{Client, ErrorCode, FetchFrom, Fetched, GroupOffset, KafkaError, NewRecord, OffsetAt, Security};
use rectrain_kinds::{KafkaSecurity, SaslMechanism};

use rectrain_harness::kafka::{Broker, PASSWORD, USER};

fn client(address: &str) -> Client {
    Client::new(vec![address.to_owned()], Security::default())
}

fn records(values: &[&str]) -> Vec<NewRecord> {
    let record = |(at, value): (i64, &&str)| NewRecord {
        timestamp: 1_000 + at,
        value: Some(Bytes::from((*value).to_owned())),
        ..NewRecord::default()
    };
    (0..).zip(values).map(record).collect()
}

/// Reads a partition from `offset` on.
async fn fetch(client: &Client, topic: &str, partition: i32, offset: i64) -> Result<Fetched, KafkaError> {
    let from = FetchFrom { topic: topic.to_owned(), partition, offset };
    client.fetch(&[from], Duration::from_secs(1), 1 << 20).await.pop().unwrap().fetched
}

/// Tries for a while: a topic has no leader yet just after it was made.
async fn patiently<T, F: Future<Output = Result<T, KafkaError>>>(mut call: impl FnMut() -> F) -> T {
    for _ in 0..600 {
        match call().await {
            Ok(done) => return done,
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("the broker does not recover")
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[test]
fn records_are_found_by_offset_and_time_also_after_a_restart() {
    let Some(mut broker) = Broker::for_test() else { return };
    runtime().block_on(async {
        let client = client(&broker.address);
        client.create_topic("clicks", 3).await.unwrap();
        let again = client.create_topic("clicks", 3).await.unwrap_err();
        assert!(matches!(again, KafkaError::Broker { code: ErrorCode::TOPIC_ALREADY_EXISTS, .. }), "{again}");
        let written = records(&["a", "b", "c"]);
        assert_eq!(patiently(|| client.produce("clicks", 1, &written)).await, 0);
        assert_eq!(client.produce("clicks", 1, &written[..1]).await.unwrap(), 3);
        let fetched = fetch(&client, "clicks", 1, 1).await.unwrap();
        let values: Vec<_> =
            fetched.records.iter().map(|record| (record.offset, record.value.clone().unwrap())).collect();
        assert_eq!(values, [(1, "b".into()), (2, "c".into()), (3, "a".into())]);
        assert_eq!((fetched.next, fetched.end, fetched.begin), (4, 4, 0));
        let offsets = async |at| client.offsets("clicks", &[0, 1, 2], at).await.unwrap();
        assert_eq!(offsets(OffsetAt::Earliest).await, [Some(0); 3]);
        assert_eq!(offsets(OffsetAt::Latest).await, [Some(0), Some(4), Some(0)]);
        assert_eq!(offsets(OffsetAt::Timestamp(1_001)).await, [None, Some(1), None]);
        let error = fetch(&client, "clicks", 1, 9).await.unwrap_err();
        assert!(matches!(error, KafkaError::Broker { code: ErrorCode::OFFSET_OUT_OF_RANGE, .. }), "{error}");
        let found = client.topics(&["clicks".to_owned(), "none".to_owned()]).await.unwrap();
        assert_eq!(found[0].partitions.iter().map(|of| of.number).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(found[1].error, ErrorCode::UNKNOWN_TOPIC_OR_PARTITION);
        a_record_of_ten_megabytes_is_read_whole(&client).await;

        broker.kill();
        assert!(fetch(&client, "clicks", 1, 0).await.unwrap_err().is_transient());
        broker.restart().unwrap();
        let fetched = patiently(|| fetch(&client, "clicks", 1, 0)).await;
        assert_eq!((fetched.records.len(), fetched.next), (4, 4));
        assert_eq!(client.topics(&["clicks".to_owned()]).await.unwrap()[0].id, found[0].id);
    });
}

#[test]
fn offsets_of_a_group_are_committed_and_outlive_the_broker() {
    let Some(mut broker) = Broker::for_test() else { return };
    runtime().block_on(async {
        let client = client(&broker.address);
        client.create_topic("grouped", 3).await.unwrap();
        let none = patiently(|| client.committed("trainers", "grouped", &[0, 1, 2])).await;
        assert_eq!(none, [None; 3]);
        let of = |partition, offset| GroupOffset { topic: "grouped".to_owned(), partition, offset };
        let (first, second) = ([of(0, 5), of(2, 9)], [of(2, 11)]);
        patiently(|| client.commit("trainers", &first)).await;
        patiently(|| client.commit("trainers", &second)).await;
        broker.restart().unwrap();
        let found = patiently(|| client.committed("trainers", "grouped", &[0, 1, 2])).await;
        assert_eq!(found, [Some(5), None, Some(11)]);
        let other = patiently(|| client.committed("others", "grouped", &[0])).await;
        assert_eq!(other, [None]);
    });
}

async fn a_record_of_ten_megabytes_is_read_whole(client: &Client) {
    client.create_topic("large", 1).await.unwrap();
    let large = "x".repeat(10 << 20);
    let written = records(&[&large]);
    patiently(|| client.produce("large", 0, &written)).await;
    let fetched = fetch(client, "large", 0, 0).await.unwrap();
    assert_eq!(fetched.records[0].value.as_ref().map(Bytes::len), Some(10 << 20));
}

/// The settings of a client with this password, and this authority if there is one.
fn secured(mechanism: SaslMechanism, password: &str, authority: Option<&str>) -> Security {
    let settings = KafkaSecurity { tls: authority.is_some(), sasl: Some(mechanism) };
    let variable = |name: &str| match name {
        KafkaSecurity::USERNAME => Some(USER.to_owned()),
        KafkaSecurity::PASSWORD => Some(password.to_owned()),
        _ => authority.map(str::to_owned),
    };
    Security::new(settings, variable).unwrap()
}

#[test]
fn names_passwords_and_certificates_are_checked() {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().self_signed(&key).unwrap();
    let keystore = format!("{}{}", key.serialize_pem(), certificate.pem());
    let Some(broker) = Broker::for_test_with(&keystore) else { return };
    let (plain, scram) = (SaslMechanism::Plain, SaslMechanism::ScramSha512);
    let authority = certificate.pem();
    runtime().block_on(async {
        let topics = async |address: &str, security| {
            Client::new(vec![address.to_owned()], security).topics(&[]).await.map(|topics| topics.len())
        };
        for mechanism in [plain, scram] {
            assert_eq!(topics(&broker.sasl_address, secured(mechanism, PASSWORD, None)).await.unwrap(), 0);
            let tls = secured(mechanism, PASSWORD, Some(&authority));
            assert_eq!(topics(&broker.tls_address, tls).await.unwrap(), 0, "{mechanism:?}");
            let error = topics(&broker.sasl_address, secured(mechanism, "wrong", None)).await.unwrap_err();
            assert!(matches!(error, KafkaError::Refused { .. }) && !error.is_transient(), "{error}");
        }
        let unknown = secured(SaslMechanism::ScramSha256, PASSWORD, None);
        let error = topics(&broker.sasl_address, unknown).await.unwrap_err().to_string();
        assert!(error.contains("it does not know SCRAM-SHA-256"), "{error}");
        let other = rcgen::KeyPair::generate().unwrap();
        let other = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().self_signed(&other).unwrap();
        let error = topics(&broker.tls_address, secured(plain, PASSWORD, Some(&other.pem()))).await.unwrap_err();
        assert!(error.to_string().contains("TLS: "), "{error}");
    });
}
