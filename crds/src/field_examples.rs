//! Examples of fields. `rectrain explain FIELD` prints the shortest one that has the field, and a
//! test loads each of them on top of a complete manifest. Fields with one value have an example for
//! `--set` instead.

use serde_json::Value;

use crate::examples::KIND_FIELDS;
use crate::{FieldPath, Segment};

/// Parts of `spec`, as YAML.
pub const FIELD_EXAMPLES: [&str; 37] = [
    "\
model:
  kind: dlrm
  bottom: [512, 256]
  hidden: [512, 256]
",
    "\
features:
  label: {name: click}
  sparse:
    - {name: user_id}
    - {name: item_id}
  dense:
    - {name: price, transform: log1p}
  group: user_id
",
    "\
features:
  label: {name: bought, values: {'yes': 1, 'no': 0}}
  sparse:
    - {name: item_id}
",
    "\
features:
  sparse:
    - {name: item_id}
    - {name: last_items, table: item_id, multiValue: {separator: '|'}}
",
    "\
features:
  sparse:
    - name: item_id
      initializer: {kind: normal, scale: 0.01}
  initializer: {kind: uniform, scale: 0.05}
",
    "\
features:
  sparse:
    - {name: user_id, admission: {count: 2}}
  memory: {maxBytes: 40Gi}
  eviction: {policy: score, decayPerDay: 0.1}
",
    "\
data:
  train: {paths: [train.csv]}
  test: {paths: [test.csv]}
",
    "\
data:
  train: {paths: ['train/*.csv']}
  test: {paths: [test.csv]}
  csv: {delimiter: ';', columns: [label, user, item, age]}
  nullValues: ['NULL', 'n/a']
  badRows: {action: skip, limit: 100}
  shuffle: {windowRows: 100000}
",
    "\
data:
  train: {paths: ['s3://clicks/train/*.parquet']}
  test: {paths: ['s3://clicks/test/*.parquet']}
  storage:
    secretName: object-store
    options: {region: eu-central-1}
",
    "\
data:
  source: {paths: [clicks.csv]}
  split:
    time: {column: time, testFrom: '2026-11-25T00:00:00Z'}
  timeColumn: {name: time}
",
    "\
data:
  source: {paths: [clicks.csv]}
  split:
    fraction: {train: 0.9}
",
    "\
data:
  source: {paths: [clicks.csv]}
  split:
    position: {trainRows: 1000000}
",
    "\
data:
  source: {paths: [clicks.csv]}
  split:
    slices: {rows: 409600}
",
    "\
features:
  sparse: [{name: 'C{1..26}'}]
  dense: [{name: 'I{1..13}'}]
data:
  synthetic: {rows: 1000000, testRows: 100000}
",
    "\
data:
  train:
    follow:
      paths: ['gs://logs/clicks/dt=*/*.parquet']
      order: name
      intervalSeconds: 30
      until: {idleSeconds: 600}
",
    "\
data:
  train:
    kafka:
      bootstrapServers: ['kafka-0.kafka:9092']
      topics: [clicks]
      format: csv
      csv: {columns: [label, user, item, age]}
",
    "\
data:
  train:
    kafka:
      bootstrapServers: ['kafka-0.kafka:9092']
      topics: [clicks]
      format: avro
      schemaRegistry: http://registry:8081
      security: {tls: true, sasl: scramSha512, secretName: kafka-user}
      deadLetterTopic: clicks-bad
      group: clicks-trainer
  badRows: {action: skip}
checkpoint: {path: 'gs://models/clicks', everySeconds: 300}
",
    "\
training:
  mode: sync
  switchAt:
    - {step: 10000, mode: gba}
",
    "\
training:
  mode: auto
  auto: {margin: 0.1, dwellSeconds: 600}
",
    "\
training:
  epochs: 3
  evaluation: {every: epoch}
",
    "\
checkpoint: {path: 'gs://models/clicks', everySteps: 1000, keep: 3, resume: latest}
",
    "\
checkpoint: {path: 'gs://models/clicks-tuesday', from: 'gs://models/clicks-monday@latest'}
",
    "\
checkpoint: {path: 'gs://models/clicks', fullEvery: 100}
serving:
  publish: {path: 'gs://models/published/clicks', everySeconds: 5}
",
    "\
features:
  memory: {maxBytes: 40Gi}
  eviction: {policy: lfu}
checkpoint: {path: 'gs://models/clicks', fullEvery: 100}
serving:
  publish: {path: 'gs://models/published/clicks', everySeconds: 5, minCount: 3}
",
    "\
autoscaling:
  ps: {min: 1, max: 8}
  embeddingWorker: {min: 1, max: 16}
  denseWorker: {scaler: external}
",
    "\
roles:
  ps:
    template:
      resources:
        requests: {cpu: '2', memory: 8Gi}
        limits: {memory: 8Gi}
",
    "\
faultTolerance: {maxRestarts: 10, stallSeconds: 600}
",
    "\
faultTolerance: {replaceSlow: {afterSeconds: 600, perHour: 2}}
",
    "\
data:
  train:
    kafka:
      bootstrapServers: ['kafka-0.kafka:9092']
      topics: [clicks]
      format: json
autoscaling:
  loader: {min: 1, max: 8, catchUpSeconds: 300}
",
    "\
training:
  lateLabels: fakeNegativeWeighted
",
    "\
training:
  quality:
    baseline: {from: 'models/clicks@1200'}
    onRegression: {metric: auc, tolerance: 0.02, action: alert}
",
    "\
model: {kind: lr}
training:
  optimizer:
    firstOrder: {kind: ftrl, l1: 1}
",
    "\
managedBy: kueue.x-k8s.io/multikueue
",
    "\
roles:
  ps:
    template:
      labels: {team: ads}
      annotations: {example.com/owner: ads}
      serviceAccountName: trainer
      priorityClassName: training
      imagePullSecrets: [{name: registry}]
",
    "\
roles:
  ps:
    template:
      nodeSelector: {pool: training}
      tolerations:
        - {key: training, operator: Exists, effect: NoSchedule}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector: {matchLabels: {rectrain.dev/job: clicks}}
",
    "\
roles:
  ps:
    template:
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              - matchExpressions:
                  - {key: kubernetes.io/arch, operator: In, values: [amd64]}
",
    "\
roles:
  ps:
    template:
      env:
        - {name: HTTPS_PROXY, value: 'http://proxy.example.com:3128'}
      volumes:
        - {name: models, persistentVolumeClaim: {claimName: models}}
      volumeMounts:
        - {name: models, mountPath: /models}
",
];

/// The role in examples. The templates of all roles have the same fields.
const ROLE: &str = "ps";

/// The shortest example with a value at a path below `spec`. `None` for other paths.
pub(crate) fn example_with(path: &FieldPath) -> Option<String> {
    let mut names: Vec<&str> = path.0.iter().filter_map(name_of).collect();
    let role = match names.as_slice() {
        ["spec", "roles", role, ..] => Some(*role),
        _ => None,
    };
    if role.is_some() {
        names[2] = ROLE;
    }
    let ["spec", below @ ..] = names.as_slice() else { return None };
    let fits = |example: &&str| !below.is_empty() && has(example, below);
    let example = match role {
        Some(role) => shortest(FIELD_EXAMPLES.into_iter().filter(fits))?.replace("  ps:", &format!("  {role}:")),
        None => {
            let kinds = KIND_FIELDS.iter().flat_map(|field| field.examples).map(|example| example.spec);
            let of_fields = shortest(FIELD_EXAMPLES.into_iter().filter(fits));
            of_fields.or_else(|| shortest(kinds.filter(fits)))?.to_owned()
        }
    };
    let lines: String = example.lines().map(|line| format!("    {line}\n")).collect();
    Some(format!("\nEXAMPLE:\n  spec:\n{lines}"))
}

fn name_of(segment: &Segment) -> Option<&str> {
    match segment {
        Segment::Key(name) => Some(name),
        Segment::Index(_) => None,
    }
}

fn shortest(examples: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    examples.min_by_key(|example| example.len())
}

/// Whether an example has a value at a path.
fn has(example: &str, path: &[&str]) -> bool {
    serde_yaml::from_str::<Value>(example).is_ok_and(|spec| is_at(&spec, path))
}

/// Whether there is a value at a path, in any entry of the lists on its way.
fn is_at(value: &Value, path: &[&str]) -> bool {
    match (value, path) {
        (Value::Array(entries), _) => entries.iter().any(|entry| is_at(entry, path)),
        (_, []) => true,
        (value, [name, rest @ ..]) => value.get(*name).is_some_and(|value| is_at(value, rest)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_example_with_a_field_is_chosen() {
        let example = |path: &str| example_with(&FieldPath::parse(path)).unwrap_or_default();
        assert_eq!(example("spec.features.sparse.table").matches("item_id").count(), 2);
        let templates = example("spec.roles.loader.template.nodeSelector");
        assert!(templates.contains("\n      loader:\n        template:\n          nodeSelector:"), "{templates}");
        assert!(example("spec.training.hopBs").contains("hopBs: {"), "an example of a kind");
        for none in ["spec", "status.step", "metadata", "spec.model.missing"] {
            assert_eq!(example(none), "", "{none}");
        }
    }
}
