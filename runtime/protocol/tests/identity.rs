//! Every field of the manifest is compared when a run resumes, or may change for a stated reason.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use rectrain_checkpoint::{Difference, Identity};
use rectrain_crds::{Override, SetKind};
use rectrain_protocol::plan::JobPlan;

/// The manifest of a job on files; `--set` changes it.
const FILES: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  features:
    sparse: [{name: C1}, {name: C2, multiValue: {separator: '|'}}]
    dense: [{name: I1}]
  data: {train: {paths: [train.csv]}}
  training: {globalBatchSize: 24}
";

/// The same job on one source with a split, which `--set` gives.
const SOURCE: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  features: {sparse: [{name: C1}], dense: [{name: I1}]}
  data: {source: {paths: [rows.csv]}}
  training: {globalBatchSize: 24}
";

/// The same job on synthetic rows.
const SYNTHETIC: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  features: {sparse: [{name: C1}], dense: [{name: I1}]}
  data: {synthetic: {rows: 2000}}
  training: {globalBatchSize: 24}
";

/// The same job on the records of a topic.
const KAFKA: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  features: {sparse: [{name: C1}], dense: [{name: I1}]}
  data:
    train: {kafka: {bootstrapServers: ['kafka:9092'], topics: [clicks], format: csv, csv: {columns: [label, C1, I1]}}}
  training: {globalBatchSize: 24}
";

/// A field that is compared: the manifest, the settings of both runs, the change, and the path that
/// an error names.
struct Compared(&'static str, &'static str, &'static [&'static str], &'static [&'static str], &'static str);

const COMPARED: &[Compared] = &[
    Compared("spec.model.kind", FILES, &[], &["spec.model.kind=dnn"], "spec.model.kind"),
    Compared("spec.model.embeddingDim", FILES, &[], &["spec.model.embeddingDim=8"], "features.0.dim"),
    Compared("spec.model.hidden", FILES, &[], &["spec.model.hidden={4}"], "model.hidden.0"),
    Compared("spec.model.bottom", FILES, &["spec.model.kind=dlrm"], &["spec.model.bottom={4}"], "model.bottom.0"),
    Compared(
        "spec.model.crossLayers",
        FILES,
        &["spec.model.kind=dcnV2"],
        &["spec.model.crossLayers=5"],
        "model.crossLayers",
    ),
    Compared(
        "spec.model.crossStructure",
        FILES,
        &["spec.model.kind=dcnV2"],
        &["spec.model.crossStructure=stacked"],
        "model.structure",
    ),
    Compared("spec.model.lowRank", FILES, &["spec.model.kind=dcnV2"], &["spec.model.lowRank=2"], "model.lowRank"),
    Compared("spec.features.label.name", FILES, &[], &["spec.features.label.name=other"], "spec.features.label.name"),
    Compared(
        "spec.features.label.positiveFrom",
        FILES,
        &["spec.features.label.positiveFrom=4"],
        &["spec.features.label.positiveFrom=4.5"],
        "spec.features.label.positiveFrom",
    ),
    Compared(
        "spec.features.label.values",
        FILES,
        &["spec.features.label.values.click=1,spec.features.label.values.skip=0"],
        &["spec.features.label.values.skip=0.5"],
        "spec.features.label.values.skip",
    ),
    Compared("spec.features.sparse.name", FILES, &[], &["spec.features.sparse[0].name=C3"], "features.0.name"),
    Compared(
        "spec.features.sparse.dim",
        FILES,
        &["spec.model.kind=dnn"],
        &["spec.features.sparse[0].dim=8"],
        "features.0.dim",
    ),
    Compared(
        "spec.features.sparse.pooling",
        FILES,
        &[],
        &["spec.features.sparse[1].pooling=sum"],
        "features.1.pooling",
    ),
    Compared("spec.features.sparse.table", FILES, &[], &["spec.features.sparse[1].table=C1"], "features.1.table"),
    Compared(
        "spec.features.sparse.multiValue.separator",
        FILES,
        &[],
        &["spec.features.sparse[1].multiValue.separator=;"],
        "spec.features.sparse.C2.multiValue.separator",
    ),
    Compared(
        "spec.features.sparse.missing",
        FILES,
        &[],
        &["spec.features.sparse[0].missing=skip"],
        "spec.features.sparse.C1.missing",
    ),
    Compared(
        "spec.features.sparse.initializer.kind",
        FILES,
        &[],
        &["spec.features.sparse[0].initializer.kind=zeros"],
        "features.1.group",
    ),
    Compared(
        "spec.features.sparse.initializer.scale",
        FILES,
        &["spec.features.sparse[0].initializer.kind=normal"],
        &["spec.features.sparse[0].initializer.scale=0.5"],
        "features.1.group",
    ),
    Compared("spec.features.dense.name", FILES, &[], &["spec.features.dense[0].name=I2"], "denseFeatures.0.name"),
    Compared(
        "spec.features.dense.transform",
        FILES,
        &[],
        &["spec.features.dense[0].transform=log1p"],
        "denseFeatures.0.transform",
    ),
    Compared(
        "spec.features.dense.mean",
        FILES,
        STANDARDIZE,
        &["spec.features.dense[0].mean=2"],
        "denseFeatures.0.transform.standardize.mean",
    ),
    Compared(
        "spec.features.dense.std",
        FILES,
        STANDARDIZE,
        &["spec.features.dense[0].std=3"],
        "denseFeatures.0.transform.standardize.std",
    ),
    Compared(
        "spec.features.dense.min",
        FILES,
        MIN_MAX,
        &["spec.features.dense[0].min=0.5"],
        "denseFeatures.0.transform.minMax.min",
    ),
    Compared(
        "spec.features.dense.max",
        FILES,
        MIN_MAX,
        &["spec.features.dense[0].max=3"],
        "denseFeatures.0.transform.minMax.max",
    ),
    Compared(
        "spec.features.dense.missing",
        FILES,
        &[],
        &["spec.features.dense[0].missing=-1"],
        "denseFeatures.0.missing",
    ),
    Compared(
        "spec.features.dense.limit",
        FILES,
        SKIP,
        &["spec.features.dense[0].limit=9"],
        "spec.features.dense.I1.limit",
    ),
    Compared("spec.features.group", FILES, &[], &["spec.features.group=C1"], "spec.features.group"),
    Compared(
        "spec.features.eviction.policy",
        FILES,
        BUDGET,
        &["spec.features.eviction.policy=lfu"],
        "rows.groups.0.life.score",
    ),
    Compared(
        "spec.features.eviction.decayPerDay",
        FILES,
        BUDGET,
        &["spec.features.eviction.decayPerDay=0.2"],
        "rows.groups.0.life.score",
    ),
    Compared(
        "spec.features.eviction.positiveWeight",
        FILES,
        BUDGET,
        &["spec.features.eviction.positiveWeight=5"],
        "rows.groups.0.life.score",
    ),
    Compared(
        "spec.features.sparse.admission.probability",
        FILES,
        &["spec.features.sparse[0].admission.probability=0.5"],
        &["spec.features.sparse[0].admission.probability=0.25"],
        "rows.groups.0.life.admission",
    ),
    Compared(
        "spec.features.sparse.admission.count",
        FILES,
        &["spec.features.sparse[0].admission.count=3"],
        &["spec.features.sparse[0].admission.count=4"],
        "rows.groups.0.life.admission",
    ),
    Compared(
        "spec.features.sparse.expireAfter",
        FILES,
        &["spec.data.timeColumn.name=time", "spec.features.sparse[0].expireAfter=48h"],
        &["spec.features.sparse[0].expireAfter=24h"],
        "rows.groups.0.life.expireAfterSeconds",
    ),
    Compared(
        "spec.features.sparse.priority",
        FILES,
        BUDGET,
        &["spec.features.sparse[0].priority=high"],
        "features.1.group",
    ),
    Compared(
        "spec.features.sparse.hashBuckets",
        FILES,
        &[],
        &["spec.features.sparse[0].hashBuckets=100"],
        "spec.features.sparse.C1.hashBuckets",
    ),
    Compared("spec.data.timeColumn.name", FILES, BUDGET, &["spec.data.timeColumn.name=time"], "spec.data.timeColumn"),
    Compared(
        "spec.data.timeColumn.unit",
        FILES,
        CLOCK,
        &["spec.data.timeColumn.unit=milliseconds"],
        "spec.data.timeColumn.unit",
    ),
    Compared(
        "spec.data.timeColumn.order",
        FILES,
        CLOCK,
        &["spec.data.timeColumn.order=dayFirst"],
        "spec.data.timeColumn.order",
    ),
    Compared(
        "spec.features.initializer.kind",
        FILES,
        &[],
        &["spec.features.initializer.kind=zeros"],
        "rows.groups.0.initializer",
    ),
    Compared(
        "spec.features.initializer.scale",
        FILES,
        &["spec.features.initializer.kind=normal"],
        &["spec.features.initializer.scale=0.5"],
        "rows.groups.0.initializer",
    ),
    Compared("spec.data.format", FILES, &[], &["spec.data.format=parquet"], "spec.data.csv"),
    Compared("spec.data.nullValues", FILES, &[], &["spec.data.nullValues={nan,NULL}"], "spec.data.nullValues"),
    Compared("spec.data.csv.delimiter", FILES, &[], &["spec.data.csv.delimiter=;"], "spec.data.csv.delimiter"),
    Compared("spec.data.csv.header", FILES, COLUMNS, &["spec.data.csv.header=true"], "spec.data.csv.header"),
    Compared("spec.data.csv.quoting", FILES, &[], &["spec.data.csv.quoting=false"], "spec.data.csv.quoting"),
    Compared(
        "spec.data.csv.columns",
        FILES,
        COLUMNS,
        &["spec.data.csv.columns={label,C2,C1,I1}"],
        "spec.data.csv.columns.1",
    ),
    Compared(
        "spec.data.train.kafka.format",
        KAFKA,
        &[],
        &["spec.data.train.kafka.format=json", "spec.data.train.kafka.csv=null"],
        "spec.data.train.kafka",
    ),
    Compared(
        "spec.data.train.kafka.csv.delimiter",
        KAFKA,
        &[],
        &["spec.data.train.kafka.csv.delimiter=;"],
        "spec.data.train.kafka.csv.delimiter",
    ),
    Compared(
        "spec.data.train.kafka.csv.quoting",
        KAFKA,
        &[],
        &["spec.data.train.kafka.csv.quoting=false"],
        "spec.data.train.kafka.csv.quoting",
    ),
    Compared(
        "spec.data.train.kafka.csv.columns",
        KAFKA,
        &[],
        &["spec.data.train.kafka.csv.columns={label,I1,C1}"],
        "spec.data.train.kafka.csv.columns.1",
    ),
    Compared(
        "spec.data.split.position.trainRows",
        SOURCE,
        &["spec.data.split.position.trainRows=500"],
        &["spec.data.split.position.trainRows=600"],
        "spec.data.split.position.trainRows",
    ),
    Compared(
        "spec.data.split.fraction.train",
        SOURCE,
        &["spec.data.split.fraction.train=0.8"],
        &["spec.data.split.fraction.train=0.9"],
        "spec.data.split.fraction.train",
    ),
    Compared(
        "spec.data.split.time.column",
        SOURCE,
        TIME,
        &["spec.data.split.time.column=day"],
        "spec.data.split.time.column",
    ),
    Compared(
        "spec.data.split.time.testFrom",
        SOURCE,
        TIME,
        &["spec.data.split.time.testFrom=8"],
        "spec.data.split.time.testFrom",
    ),
    Compared(
        "spec.data.split.time.order",
        SOURCE,
        &["spec.data.split.time.column=time", "spec.data.split.time.testFrom=11/1/2026", MONTH_FIRST],
        &["spec.data.split.time.order=dayFirst"],
        "spec.data.split.time.testFrom",
    ),
    Compared(
        "spec.data.split.slices.rows",
        SOURCE,
        &["spec.data.split.slices.rows=240"],
        &["spec.data.split.slices.rows=480"],
        "spec.data.split.slices.rows",
    ),
    Compared(
        "spec.data.synthetic.rows",
        SYNTHETIC,
        &[],
        &["spec.data.synthetic.rows=3000"],
        "spec.data.synthetic.rows",
    ),
    Compared(
        "spec.data.synthetic.vocabulary",
        SYNTHETIC,
        &[],
        &["spec.data.synthetic.vocabulary=7"],
        "spec.data.synthetic.vocabularies.0",
    ),
    Compared(
        "spec.data.synthetic.zipfExponent",
        SYNTHETIC,
        &[],
        &["spec.data.synthetic.zipfExponent=2"],
        "spec.data.synthetic.zipfExponent",
    ),
    Compared("spec.data.synthetic.seed", SYNTHETIC, &[], &["spec.data.synthetic.seed=5"], "spec.data.synthetic.seed"),
    Compared("spec.training.seed", FILES, &[], &["spec.training.seed=5"], "rows.seed"),
    Compared(
        "spec.training.embeddingValueType",
        FILES,
        &[],
        &["spec.training.embeddingValueType=bf16"],
        "rows.groups.0.valueType",
    ),
    Compared(
        "spec.training.optimizer.dense.kind",
        FILES,
        &[],
        &["spec.training.optimizer.dense.kind=sgd"],
        "denseOptimizer",
    ),
    Compared(
        "spec.training.optimizer.dense.beta1",
        FILES,
        &[],
        &["spec.training.optimizer.dense.beta1=0.5"],
        "denseOptimizer",
    ),
    Compared(
        "spec.training.optimizer.dense.beta2",
        FILES,
        &[],
        &["spec.training.optimizer.dense.beta2=0.5"],
        "denseOptimizer",
    ),
    Compared(
        "spec.training.optimizer.dense.epsilon",
        FILES,
        &[],
        &["spec.training.optimizer.dense.epsilon=0.5"],
        "denseOptimizer",
    ),
    Compared(
        "spec.training.optimizer.dense.initialAccumulator",
        FILES,
        &["spec.training.optimizer.dense.kind=adaGrad"],
        &["spec.training.optimizer.dense.initialAccumulator=0.5"],
        "denseOptimizer",
    ),
    Compared(
        "spec.training.optimizer.dense.momentum",
        FILES,
        &["spec.training.optimizer.dense.kind=sgd"],
        &["spec.training.optimizer.dense.momentum=0.5"],
        "denseOptimizer",
    ),
    Compared(
        "spec.training.optimizer.sparse.kind",
        FILES,
        &[],
        &["spec.training.optimizer.sparse.kind=sgd"],
        "rows.groups.0.optimizer",
    ),
    Compared(
        "spec.training.optimizer.sparse.beta1",
        FILES,
        &[],
        &["spec.training.optimizer.sparse.beta1=0.5"],
        "rows.groups.0.optimizer",
    ),
    Compared(
        "spec.training.optimizer.sparse.beta2",
        FILES,
        &[],
        &["spec.training.optimizer.sparse.beta2=0.5"],
        "rows.groups.0.optimizer",
    ),
    Compared(
        "spec.training.optimizer.sparse.epsilon",
        FILES,
        &[],
        &["spec.training.optimizer.sparse.epsilon=0.5"],
        "rows.groups.0.optimizer",
    ),
    Compared(
        "spec.training.optimizer.sparse.initialAccumulator",
        FILES,
        &["spec.training.optimizer.sparse.kind=adaGrad"],
        &["spec.training.optimizer.sparse.initialAccumulator=0.5"],
        "rows.groups.0.optimizer",
    ),
    Compared(
        "spec.training.optimizer.sparse.beta",
        FILES,
        FTRL,
        &["spec.training.optimizer.sparse.beta=0.5"],
        "rows.groups.0.optimizer",
    ),
    Compared(
        "spec.training.optimizer.sparse.l1",
        FILES,
        FTRL,
        &["spec.training.optimizer.sparse.l1=0.5"],
        "rows.groups.0.optimizer",
    ),
    Compared(
        "spec.training.optimizer.sparse.l2",
        FILES,
        FTRL,
        &["spec.training.optimizer.sparse.l2=0.5"],
        "rows.groups.0.optimizer",
    ),
    // The state of ftrl is scaled by its learning rate. Other optimizers may change theirs.
    Compared(
        "spec.training.optimizer.sparse.learningRate",
        FILES,
        FTRL,
        &["spec.training.optimizer.sparse.learningRate=0.5"],
        "rows.groups.0.optimizer",
    ),
    Compared(
        "spec.training.optimizer.firstOrder.kind",
        FILES,
        FIRST_FTRL,
        &["spec.training.optimizer.firstOrder.kind=sgd"],
        "rows.groups.0.firstOrder",
    ),
    Compared(
        "spec.training.optimizer.firstOrder.learningRate",
        FILES,
        FIRST_FTRL,
        &["spec.training.optimizer.firstOrder.learningRate=0.5"],
        "rows.groups.0.firstOrder",
    ),
    Compared(
        "spec.training.optimizer.firstOrder.beta",
        FILES,
        FIRST_FTRL,
        &["spec.training.optimizer.firstOrder.beta=0.5"],
        "rows.groups.0.firstOrder",
    ),
    Compared(
        "spec.training.optimizer.firstOrder.l1",
        FILES,
        FIRST_FTRL,
        &["spec.training.optimizer.firstOrder.l1=0.5"],
        "rows.groups.0.firstOrder",
    ),
    Compared(
        "spec.training.optimizer.firstOrder.l2",
        FILES,
        FIRST_FTRL,
        &["spec.training.optimizer.firstOrder.l2=0.5"],
        "rows.groups.0.firstOrder",
    ),
    Compared(
        "spec.training.optimizer.firstOrder.beta1",
        FILES,
        FIRST_ADAM,
        &["spec.training.optimizer.firstOrder.beta1=0.5"],
        "rows.groups.0.firstOrder",
    ),
    Compared(
        "spec.training.optimizer.firstOrder.beta2",
        FILES,
        FIRST_ADAM,
        &["spec.training.optimizer.firstOrder.beta2=0.5"],
        "rows.groups.0.firstOrder",
    ),
    Compared(
        "spec.training.optimizer.firstOrder.epsilon",
        FILES,
        FIRST_ADAM,
        &["spec.training.optimizer.firstOrder.epsilon=0.5"],
        "rows.groups.0.firstOrder",
    ),
    Compared(
        "spec.training.optimizer.firstOrder.initialAccumulator",
        FILES,
        FIRST_ADA_GRAD,
        &["spec.training.optimizer.firstOrder.initialAccumulator=0.5"],
        "rows.groups.0.firstOrder",
    ),
    Compared(
        "spec.data.badRows.action",
        FILES,
        &["spec.data.badRows.action=skip"],
        &["spec.data.badRows.action=fail"],
        "spec.data.badRows",
    ),
];

const STANDARDIZE: &[&str] =
    &["spec.features.dense[0].transform=standardize", "spec.features.dense[0].mean=1", "spec.features.dense[0].std=2"];
const MIN_MAX: &[&str] =
    &["spec.features.dense[0].transform=minMax", "spec.features.dense[0].min=0", "spec.features.dense[0].max=2"];
const COLUMNS: &[&str] = &["spec.data.csv.columns={label,C1,C2,I1}"];
const TIME: &[&str] = &["spec.data.split.time.column=time", "spec.data.split.time.testFrom=7"];
const SKIP: &[&str] = &["spec.data.badRows.action=skip"];
const MONTH_FIRST: &str = "spec.data.split.time.order=monthFirst";
const BUDGET: &[&str] = &["spec.features.memory.maxRows=500"];
const CLOCK: &[&str] = &["spec.features.memory.maxRows=500", "spec.data.timeColumn.name=time"];
const FTRL: &[&str] = &["spec.training.optimizer.sparse.kind=ftrl"];
const FIRST_FTRL: &[&str] = &["spec.training.optimizer.firstOrder.kind=ftrl"];
const FIRST_ADAM: &[&str] = &["spec.training.optimizer.firstOrder.kind=adam"];
const FIRST_ADA_GRAD: &[&str] = &["spec.training.optimizer.firstOrder.kind=adaGrad"];

/// Fields, with all fields below them, that the identity leaves out, and why.
const LEFT_OUT: &[(&str, &str)] = &[
    ("spec.training.globalBatchSize", "the coordinator's state in the checkpoint has it and is compared"),
    ("spec.data.shuffle.windowRows", "the coordinator's state in the checkpoint has it and is compared"),
    ("spec.data.train.paths", "the coordinator's state in the checkpoint has the list of files and is compared"),
    ("spec.data.source.paths", "the coordinator's state in the checkpoint has the list of files and is compared"),
    ("spec.data.train.kafka.topics", "the coordinator's state in the checkpoint has the list and is compared"),
    ("spec.data.train.kafka.bootstrapServers", "the access to the records changes no record"),
    ("spec.data.train.kafka.security", "the access to the records changes no record"),
    ("spec.data.train.kafka.schemaRegistry", "the access to the schemas, whose numbers are in the records"),
    ("spec.data.train.kafka.group", "where the job commits its offsets, for the tools of Kafka"),
    ("spec.data.train.kafka.csv.header", "records have no header, and a manifest with one is refused"),
    ("spec.data.train.kafka.start", "it says where the first run begins; a later one continues at its offsets"),
    (
        "spec.data.train.kafka.startTimestamp",
        "it says where the first run begins; a later one continues at its offsets",
    ),
    ("spec.data.train.kafka.until", "the length of training, as the guide says"),
    ("spec.data.train.kafka.untilTimestamp", "the length of training, as the guide says"),
    ("spec.data.train.kafka.untilIdleSeconds", "the length of training, as the guide says"),
    ("spec.data.train.kafka.lingerMillis", "the size of the batches to come; it trains the same records"),
    ("spec.data.train.kafka.lostRecords", "the treatment of records that no run can read"),
    ("spec.data.train.kafka.deadLetterTopic", "where bad records are kept, not which are good"),
    ("spec.data.train.follow.paths", "the ledger in the checkpoint has the paths and is compared"),
    ("spec.data.train.follow.order", "the ledger in the checkpoint has the order and is compared"),
    ("spec.data.train.follow.intervalSeconds", "when files are noticed; the ledger fixes their order"),
    ("spec.data.train.follow.wholeDirectories", "when files are noticed; the ledger fixes their order"),
    ("spec.data.train.follow.until", "the length of training, as the guide says"),
    ("spec.data.train.follow.lostFiles", "the treatment of files that no run can read"),
    ("spec.data.train.follow.lateFiles", "the treatment of the late files to come"),
    ("spec.features.memory", "a budget may change: the next steps evict the rows beyond it"),
    (
        "spec.features.sparse.share",
        "a share may change as the budget does; whether there is one is compared as a group",
    ),
    ("spec.data.test.paths", "the test changes no parameter"),
    ("spec.data.synthetic.testRows", "the test rows follow the training rows and change no parameter"),
    ("spec.data.badRows.limit", "it says when reading ends with an error, not which rows are good"),
    ("spec.data.storage", "the access to the rows changes no row"),
    ("spec.model.dropout", "regularization of the steps to come; no state depends on it"),
    ("spec.training.mode", "a checkpoint resumes in any mode, as the guide says"),
    ("spec.training.lateLabels", "rows whose labels come late may follow rows whose labels are known"),
    ("spec.training.auto", "a checkpoint resumes in any mode, as the guide says"),
    ("spec.training.sync", "the settings of a mode, which may change"),
    ("spec.training.hybrid", "the settings of a mode, which may change"),
    ("spec.training.gba", "the settings of a mode, which may change"),
    ("spec.training.hopBs", "the settings of a mode, which may change"),
    ("spec.training.hopBw", "the settings of a mode, which may change"),
    ("spec.training.bsp", "the settings of a mode, which may change"),
    ("spec.training.shadow", "the settings of a mode, which may change"),
    ("spec.training.switchAt", "the mode of the steps to come, which may change"),
    ("spec.training.localBatchSize", "the division of a step among workers; a pause has no step in flight"),
    ("spec.training.barrierWorkers", "the division of a step among workers; a pause has no step in flight"),
    ("spec.training.epochs", "the length of training, as the guide says"),
    ("spec.training.steps", "the length of training, as the guide says"),
    ("spec.training.optimizer.dense.learningRate", "learning rates may change, as the guide says"),
    ("spec.training.optimizer.dense.weightDecay", "it shrinks the steps to come; no state depends on it"),
    ("spec.training.precision", "the products of the steps to come; parameters are fp32 in both"),
    ("spec.training.compression", "the form of messages; no message outlives a pause"),
    ("spec.training.partialPooling", "the form of messages; no message outlives a pause"),
    ("spec.training.evaluation", "an evaluation changes no parameter"),
    ("spec.training.quality", "it measures predictions, and no parameter depends on them"),
    ("spec.training.divergenceFactor", "it says when training ends with an error, not what is trained"),
    ("spec.roles", "a checkpoint is restored onto any number of members and any pods"),
    ("spec.autoscaling", "a checkpoint is restored onto any number of members"),
    ("spec.serving", "where and when models are published, not what is trained"),
    ("spec.checkpoint", "where and when checkpoints are written, not their content"),
    ("spec.faultTolerance", "the handling of crashes changes no parameter"),
    ("spec.suspend", "the life of the object in the cluster"),
    ("spec.ttlSecondsAfterFinished", "the life of the object in the cluster"),
    ("spec.activeDeadlineSeconds", "the life of the object in the cluster"),
    ("spec.managedBy", "the life of the object in the cluster"),
];

fn identity(manifest: &str, changes: &[&[&str]]) -> Identity {
    let over = |change: &&str| Override { kind: SetKind::Infer, expression: (*change).to_owned() };
    let overrides: Vec<Override> = changes.concat().iter().map(over).collect();
    let loaded = rectrain_crds::load(manifest, "test.yaml", &overrides);
    let loaded = loaded.unwrap_or_else(|error| panic!("{changes:?}: {error}"));
    JobPlan::new(&loaded.resolved).unwrap().identity()
}

/// The first difference between a checkpoint that was read back and a job with other settings.
fn difference(manifest: &str, base: &[&str], change: &[&str]) -> Option<Difference> {
    let saved = serde_json::to_string(&identity(manifest, &[base])).unwrap();
    let saved: Identity = serde_json::from_str(&saved).unwrap();
    assert_eq!(saved.difference(&identity(manifest, &[base])), None, "{base:?}");
    saved.difference(&identity(manifest, &[base, change]))
}

#[test]
fn every_field_is_compared_or_may_change_for_a_reason() {
    let paths = rectrain_crds::field_paths();
    let is_below = |path: &str, field: &str| path.strip_prefix(field).is_some_and(|rest| rest.starts_with('.'));
    let fields = paths.iter().filter(|path| path.starts_with("spec."));
    for field in fields.filter(|field| !paths.iter().any(|path| is_below(path, field))) {
        let is_compared = COMPARED.iter().any(|compared| compared.0 == field);
        let may_change = LEFT_OUT.iter().any(|(may, _)| may == field || is_below(field, may));
        assert!(
            is_compared != may_change,
            "{field} must be compared at resume or on the list of fields that may change"
        );
    }
    for field in COMPARED.iter().map(|compared| compared.0).chain(LEFT_OUT.iter().map(|(field, _)| *field)) {
        assert!(paths.iter().any(|path| path == field), "the manifest has no field {field}");
    }
}

#[test]
fn a_change_of_each_compared_field_is_named() {
    let mut wrong = Vec::new();
    for Compared(field, manifest, base, change, path) in COMPARED {
        match difference(manifest, base, change) {
            Some(found) if found.path == *path || found.path.starts_with(&format!("{path}.")) => {}
            Some(found) => wrong.push(format!("{field}: {found}")),
            None => wrong.push(format!("{field}: {change:?} is not noticed")),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_kind_of_split_is_compared() {
    let fraction = ["spec.data.split.fraction.train=0.8"];
    let position = identity(SOURCE, &[&["spec.data.split.position.trainRows=500"]]);
    let found = position.difference(&identity(SOURCE, &[&fraction])).unwrap();
    assert!(found.path.starts_with("spec.data.split"), "{found}");
    let found = identity(FILES, &[]).difference(&identity(SYNTHETIC, &[])).unwrap();
    assert!(!found.path.is_empty());
}

#[test]
fn fields_that_may_change_make_no_difference() {
    for change in [
        "spec.training.optimizer.dense.learningRate=0.5",
        "spec.training.optimizer.sparse.learningRate=0.5",
        "spec.training.optimizer.dense.weightDecay=0.5",
        "spec.training.epochs=7",
        "spec.training.mode=gba",
        "spec.training.precision=bf16",
        "spec.model.dropout=0.5",
        "spec.roles.ps.replicas=3",
        "spec.checkpoint.path=elsewhere",
        "spec.data.test.paths={test.csv}",
        "spec.data.nullValues={NaN,Null,\\\\n}",
        // The cell of a multi-valued feature has no id where it has no values.
        "spec.features.sparse[1].missing=skip",
        // A run that ends at a bad row may be continued without it.
        "spec.data.badRows.action=skip",
        // A limit only says at which row such a run ends.
        "spec.features.dense[0].limit=9",
    ] {
        assert_eq!(difference(FILES, &[], &[change]), None, "{change}");
    }
    assert_eq!(difference(FILES, SKIP, &["spec.data.badRows.limit=9"]), None);
    assert_eq!(difference(FILES, FIRST_ADAM, &["spec.training.optimizer.firstOrder.learningRate=0.5"]), None);
    assert_eq!(difference(FILES, &[], &["spec.data.badRows.action=skip", "spec.features.dense[0].limit=9"]), None);
    let limit = difference(FILES, SKIP, &["spec.features.dense[0].limit=9"]).unwrap().to_string();
    assert!(limit.starts_with("spec.features.dense.I1.limit is `") && limit.ends_with("`9.0` in the job"), "{limit}");
    assert_eq!(difference(SYNTHETIC, &[], &["spec.data.synthetic.testRows=9"]), None);
    assert_eq!(difference(FILES, BUDGET, &["spec.features.memory.maxRows=400"]), None);
    assert_eq!(
        difference(FILES, BUDGET, &["spec.features.memory.maxRows=null", "spec.features.memory.maxBytes=1Gi"]),
        None
    );
    let gained = difference(FILES, &[], BUDGET).unwrap().to_string();
    assert!(gained.starts_with("rows.groups.0.life is missing in the checkpoint"), "{gained}");
}

/// The sections of version 0.1.
#[test]
fn a_checkpoint_without_the_meaning_of_rows_still_fits() {
    let all = identity(FILES, &[]);
    let old = all.sections().iter().filter(|(name, _)| !name.starts_with("spec."));
    let old = Identity::new(old.map(|(name, section)| (name.clone(), section.clone())));
    assert_eq!(old.sections().len(), 5);
    assert_eq!(old.difference(&all), None);
    assert_eq!(old.difference(&identity(FILES, &[&["spec.features.label.name=other"]])), None);
    assert!(old.difference(&identity(FILES, &[&["spec.model.hidden={4}"]])).is_some());
}
