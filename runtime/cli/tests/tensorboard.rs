//! Reads the event file of a run back with a decoder of its own: bits of CRC-32C and fields of
//! protocol buffers, without the crates that wrote them.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[allow(dead_code, reason = "this test uses a part of it")]
mod binary;
mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use binary::{JOB, folder_with};
use common::{events, rectrain};

/// CRC-32C (Castagnoli) bit by bit, masked as in TensorFlow's `crc32c.h`.
fn masked_crc(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    let crc = !crc;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().unwrap())
}

/// The contents of a file's records.
fn records(file: &Path) -> Vec<Vec<u8>> {
    let bytes = std::fs::read(file).unwrap();
    let (mut rest, mut records) = (&bytes[..], Vec::new());
    while !rest.is_empty() {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        assert_eq!(number(&rest[8..12]), masked_crc(&rest[..8]), "the checksum of the length");
        let data = &rest[12..12 + length];
        assert_eq!(number(&rest[12 + length..16 + length]), masked_crc(data), "the checksum of the data");
        records.push(data.to_vec());
        rest = &rest[16 + length..];
    }
    records
}

/// The fields of a message: number, and the bytes or the number of the value.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let length = match key & 7 {
            0 => {
                let value = varint(&mut bytes);
                found.push((key >> 3, value.to_le_bytes().to_vec()));
                continue;
            }
            1 => 8,
            2 => varint(&mut bytes) as usize,
            5 => 4,
            other => panic!("the wire type {other}"),
        };
        found.push((key >> 3, bytes[..length].to_vec()));
        bytes = &bytes[length..];
    }
    found
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let (mut value, mut shift) = (0, 0);
    loop {
        let byte = bytes[0];
        *bytes = &bytes[1..];
        value |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte < 0x80 {
            return value;
        }
    }
}

fn field(message: &[u8], number: u64) -> Option<Vec<u8>> {
    fields(message).into_iter().find(|(found, _)| *found == number).map(|(_, value)| value)
}

/// By tag: the steps and values of its scalars.
fn scalars(records: &[Vec<u8>]) -> BTreeMap<String, Vec<(u64, f32)>> {
    let mut all: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
    for event in records {
        let step = field(event, 2).map_or(0, |step| u64::from_le_bytes(step.try_into().unwrap()));
        let Some(summary) = field(event, 5) else { continue };
        for (_, value) in fields(&summary) {
            let tag = String::from_utf8(field(&value, 1).unwrap()).unwrap();
            let scalar = f32::from_le_bytes(field(&value, 2).unwrap().try_into().unwrap());
            all.entry(tag).or_default().push((step, scalar));
        }
    }
    all
}

fn only(folder: &Path) -> PathBuf {
    let all: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [one] = &all[..] else { panic!("{all:?}") };
    one.clone()
}

/// The values of a field of all events of a kind, with their steps.
fn told(events: &[Value], kind: &str, value: impl Fn(&Value) -> Option<f64>) -> Vec<(u64, f32)> {
    let of_kind = events.iter().filter(|event| event["event"] == kind);
    of_kind.filter_map(|event| Some((event["step"].as_u64()?, value(event)? as f32))).collect()
}

fn writes_what_it_tells(more: &[&str]) {
    let folder = folder_with(JOB);
    let twice = ["--set", "spec.training.epochs=2,spec.training.evaluation.every=epoch", "--tensorboard", "board"];
    let run = rectrain(folder.path(), &[&["run", "job.yaml", "--json", "--no-history"], &twice[..], more].concat());
    let events = events(&run);
    let run = only(&folder.path().join("board"));
    assert!(run.file_name().unwrap().to_str().unwrap().starts_with("test-"), "{run:?}");
    let file = only(&run);
    assert!(file.file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents."), "{file:?}");
    let records = records(&file);
    assert_eq!(field(&records[0], 3).unwrap(), b"brain.Event:2");
    let time = f64::from_le_bytes(field(&records[0], 1).unwrap().try_into().unwrap());
    assert!((events[0]["at"].as_f64().unwrap() - time).abs() < 60.0, "{time}");
    let found = scalars(&records);
    let test = |name: &'static str| told(&events, "evaluation", move |event| event["test"][name].as_f64());
    assert_eq!(found["test/auc"], test("auc"));
    assert_eq!(found["test/log_loss"], test("logLoss"));
    assert_eq!(found["test/normalized_entropy"], test("normalizedEntropy"));
    assert!(found["test/auc"].len() >= 2, "{found:?}");
    // Reports of progress become rarer with time, and the last loss is the summary's.
    let summary = events.last().unwrap();
    let mut losses = told(&events, "progress", |event| event["loss"].as_f64());
    losses.push((summary["steps"].as_u64().unwrap(), summary["loss"].as_f64().unwrap() as f32));
    let written = &found["train/loss"];
    assert!(written.iter().all(|point| losses.contains(point)), "{written:?} {losses:?}");
    assert_eq!(written.last(), losses.last());
    assert!(!found["train/samples_per_second"].is_empty(), "{found:?}");
    let (told, norms) =
        (told(&events, "progress", |event| event["gradientNorm"].as_f64()), &found["train/gradient_norm"]);
    assert!(!norms.is_empty() && norms.iter().all(|point| point.1 > 0.0 && told.contains(point)), "{norms:?} {told:?}");
}

#[test]
fn the_event_file_of_a_run_has_its_curves() {
    writes_what_it_tells(&[]);
}

#[test]
fn the_event_file_of_processes_has_their_curves() {
    writes_what_it_tells(&["--processes"]);
}
