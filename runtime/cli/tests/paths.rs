//! Paths, URLs and options that cannot be used: one sentence and exit code 2, before anything is
//! trained.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::path::Path;
use std::process::{Command, Output};

const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: paths}
spec:
  model: {kind: lr}
  features:
    sparse: [{name: user}]
  data:
    train: {paths: [train.csv]}
  training: {globalBatchSize: 2}
";

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.yaml"), JOB).unwrap();
    std::fs::write(folder.path().join("train.csv"), "label,user\n1,5\n0,6\n").unwrap();
    folder
}

fn rectrain(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rectrain"));
    // The test needs neither keys nor a region of the machine.
    command.env("AWS_ACCESS_KEY_ID", "x").env("AWS_SECRET_ACCESS_KEY", "y").env("AWS_REGION", "us-east-1");
    command.args(arguments).current_dir(folder).output().unwrap()
}

/// Asserts that the command ended with exit code 2, and with one line on stderr that has all parts.
fn assert_refused(output: &Output, parts: &[&str]) {
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
    assert!(!String::from_utf8_lossy(&output.stdout).contains("progress"), "nothing is trained");
}

#[test]
fn validate_and_run_refuse_paths_that_no_build_reads() {
    let folder = folder();
    for (set, parts) in [
        (
            "spec.data.train.paths[0]=hdfs://nn/x.csv",
            &["spec.data.train.paths[0]: no build reads hdfs://", "s3://"][..],
        ),
        ("spec.data.test.paths={oss://b/x.csv}", &["spec.data.test.paths[0]: no build reads oss://", "found"]),
        ("spec.checkpoint.path=az://b/ck", &["spec.checkpoint.path: no build reads az://", "expected a local path"]),
        ("spec.checkpoint.path=~/models", &["spec.checkpoint.path: nothing expands `~`", "write the whole path"]),
        ("spec.checkpoint.path=$HOME/models", &["nothing expands `$HOME` in `$HOME/models`"]),
        ("spec.data.train.paths[0]=/data/${DAY}.csv", &["spec.data.train.paths[0]: nothing expands `${DAY}`"]),
    ] {
        for command in ["validate", "run"] {
            assert_refused(&rectrain(folder.path(), &[command, "job.yaml", "--set", set]), parts);
        }
    }
    assert!(!folder.path().join("~").exists() && !folder.path().join("$HOME").exists());
    let text = JOB.replace("[train.csv]", "[hdfs://nn/train.csv]");
    std::fs::write(folder.path().join("hdfs.yaml"), text).unwrap();
    assert_refused(&rectrain(folder.path(), &["validate", "hdfs.yaml"]), &["hdfs.yaml:10:", "hdfs://nn/train.csv"]);
}

#[test]
fn an_endpoint_without_a_scheme_or_permission_is_refused() {
    let folder = folder();
    let bucket = "spec.data.train.paths[0]=s3://b/x.csv";
    let option = "spec.data.storage.options";
    for (endpoint, part) in [
        ("minio:9000", "such as https://minio:9000"),
        ("s3://minio", "expected http:// or https://"),
        ("http://127.0.0.1:1", "set the option `allow_http`"),
    ] {
        let set = format!("{option}.endpoint={endpoint}");
        let field = format!("{option}.endpoint: ");
        for command in ["validate", "run"] {
            let output = rectrain(folder.path(), &[command, "job.yaml", "--set", bucket, "--set", &set]);
            assert_refused(&output, &[&field, part, endpoint]);
        }
        let given = format!("endpoint={endpoint}");
        let listed = rectrain(folder.path(), &["checkpoint", "ls", "s3://b/ck", "--option", &given]);
        assert_refused(&listed, &["s3://b", "`endpoint`", part, endpoint]);
    }
    let listed = rectrain(folder.path(), &["checkpoint", "ls", "hdfs://nn/ck"]);
    assert_refused(&listed, &["hdfs://nn/ck", "no build reads hdfs:// URLs"]);
}

/// Nothing is trained first: the data would take minutes, and a step is a row.
#[cfg(target_os = "linux")]
#[test]
fn a_checkpoint_path_that_cannot_be_written_is_refused_before_training() {
    let folder = folder();
    std::fs::write(folder.path().join("file"), "").unwrap();
    let rows = "1,5\n0,6\n".repeat(1_000_000);
    std::fs::write(folder.path().join("train.csv"), format!("label,user\n{rows}")).unwrap();
    // The kernel makes no files in these two, for root neither.
    for (path, operation) in
        [("/sys/kernel", "cannot write"), ("/proc/self", "cannot write"), ("file", "make the folder")]
    {
        let set = format!("spec.checkpoint.path={path}");
        for arguments in [&["run", "job.yaml", "--set", &set][..], &["run", "job.yaml", "--processes", "--set", &set]] {
            let started = std::time::Instant::now();
            let output = rectrain(folder.path(), arguments);
            let message = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{message}");
            for part in ["spec.checkpoint.path: cannot", operation, path, "expected a writable folder"] {
                assert!(message.contains(part), "`{part}` is not in: {message}");
            }
            assert!(started.elapsed().as_secs() < 60, "{path}");
        }
    }
}
