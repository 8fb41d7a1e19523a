//! `rectrain serve` answers with the predictions of `rectrain predict`, over HTTP.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;
mod server;
mod trained;

use std::net::TcpListener;

use serde_json::{Value, json};

use common::rectrain;
use server::{FEATURES, Server, cells, infer_all, numbers, texts};
use trained::{TEST_ROWS, export, largest_difference, probabilities, report, train};

#[test]
fn answers_are_the_predictions_of_files() {
    for model in ["dlrm", "wideDeep", "lr"] {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        train(folder, model, &[]);
        assert!(export(folder, "export", "f32").status.success(), "{model}");
        let predicted = report(folder, &["export", "--input", "test.csv", "--output", "a.csv"]);
        let own = probabilities(folder, "a.csv");
        let columns = FEATURES.map(|name| cells(folder, name));
        let server = Server::start(folder, "export", &[]);
        let by_texts = infer_all(&server, &columns, texts);
        assert!(largest_difference(&own, &by_texts) < 1e-6, "{model}");
        for (feature, share) in predicted["unseen"].as_object().unwrap() {
            let count = |metric: &str| server.metric(&format!("rectrain_inference_{metric}{{feature=\"{feature}\"}}"));
            let unseen = count("unseen_ids_total") / count("ids_total");
            assert!((unseen - share.as_f64().unwrap()).abs() < 1e-9, "{model}, {feature}: {unseen} and {share}");
        }
        assert!(predicted["unseen"]["user"].as_f64().unwrap() > 0.0);
        let by_numbers = infer_all(&server, &columns, |name, cells| match name {
            "age" => numbers(name, "FP32", cells),
            "balance" => numbers(name, "FP64", cells),
            _ => texts(name, cells),
        });
        assert!(largest_difference(&own, &by_numbers) < 1e-6, "{model}");
        assert_eq!(server.metric("rectrain_inference_rows_total"), f64::from(2 * TEST_ROWS));
        assert_eq!(server.terminate().code(), Some(0), "{model}");
    }
}

#[test]
fn one_user_with_many_candidates_is_as_many_rows_of_the_user() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "deepfm", &[]);
    let [_, cities, tags, ages, balances] = FEATURES.map(|name| cells(folder, name));
    // A checkpoint serves as well.
    let server = Server::start(folder, "checkpoints", &[]);
    assert_eq!(server.path, "/v2/models/test");
    let (user, tag) = (["u7".to_owned()], ["t1|t2".to_owned()]);
    let rows = cities.len();
    let repeat = |cell: &[String; 1]| vec![cell[0].clone(); rows];
    let candidates = [texts("city", &cities), numbers("age", "FP32", &ages), texts("balance", &balances)];
    let short = [&[texts("user", &user), texts("tags", &tag)], &candidates[..]].concat();
    let long = [&[texts("user", &repeat(&user)), texts("tags", &repeat(&tag))], &candidates[..]].concat();
    let answers = server.infer(&short);
    assert_eq!((answers.len(), &answers), (rows, &server.infer(&long)));
    assert!(answers.iter().any(|answer| (answer - answers[0]).abs() > 1e-3), "all are equal");
    // Lists of values are the cells with separators.
    let lists: Vec<Value> = tags
        .iter()
        .map(|cell| {
            let mut items: Vec<Value> = cell.split('|').map(Value::from).collect();
            items.resize(4, Value::Null);
            items.into()
        })
        .collect();
    let lists = json!({ "name": "tags", "shape": [rows, 4], "datatype": "BYTES", "data": lists });
    let by_lists = server.infer(&[&[texts("user", &user), lists], &candidates[..]].concat());
    let by_cells = server.infer(&[&[texts("user", &user), texts("tags", &tags)], &candidates[..]].concat());
    assert_eq!(by_lists, by_cells);
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "lr", &[]);
    let missing = rectrain(folder, &["serve", "nowhere"]);
    let message = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(missing.status.code() == Some(2) && message.contains("nowhere"), "{message}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let refused = rectrain(folder, &["serve", "checkpoints", "--listen", &address]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && message.contains(&format!("cannot listen on {address}")), "{message}");
    assert!(message.contains("choose another address with --listen"), "{message}");
    let refused = rectrain(folder, &["serve", "checkpoints", "--listen", "127.0.0.1:0", "--grpc", &address]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(message.contains("choose another address with --grpc"), "{message}");
}

#[test]
fn recorded_requests_warm_another_server_up() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "lr", &[]);
    let columns = FEATURES.map(|name| cells(folder, name));
    let server = Server::start(folder, "checkpoints", &["--record", "requests.jsonl", "--record-every", "2"]);
    let answers = infer_all(&server, &columns, texts);
    assert_eq!(server.terminate().code(), Some(0));
    let recorded = std::fs::read_to_string(folder.join("requests.jsonl")).unwrap();
    assert_eq!(recorded.lines().count(), (TEST_ROWS as usize).div_ceil(50).div_ceil(2));
    let warm = Server::start(folder, "checkpoints", &["--warm-up", "requests.jsonl"]);
    // Only the requests of clients are counted.
    assert_eq!(warm.metric("rectrain_inference_rows_total"), 0.0);
    assert_eq!(infer_all(&warm, &columns, texts), answers);
    let bad = recorded.replacen("\"city\"", "\"town\"", 2);
    std::fs::write(folder.join("bad.jsonl"), format!("\n{bad}")).unwrap();
    let refused = rectrain(folder, &["serve", "checkpoints", "--warm-up", "bad.jsonl", "--listen", "127.0.0.1:0"]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        refused.status.code() == Some(2) && message.contains("bad.jsonl, line 2: the model has no column `town`"),
        "{message}"
    );
}

#[test]
fn a_server_with_a_bad_certificate_does_not_start() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("a.crt"), "hello").unwrap();
    std::fs::write(place.path().join("a.key"), "hello").unwrap();
    let arguments = ["serve", "checkpoints", "--tls-cert", "a.crt", "--tls-key", "a.key"];
    let refused = rectrain(place.path(), &arguments);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{message}");
    assert!(message.contains("a.crt: there is none in it; expected a certificate in PEM"), "{message}");
}
