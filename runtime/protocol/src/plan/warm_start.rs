//! The model that a new job takes from another job's checkpoint (`spec.checkpoint.from`). The two
//! jobs are compared by their identities. Data, modes, learning rates and numbers of members do not
//! count. Sparse features and tables match by name, so that some may be new and some left out.
//! Everything that would change a carried value is refused, with all differences.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rectrain_checkpoint::{Checkpoint, DenseState, Difference, FeatureIdentity, Identity};
use rectrain_crds::WarmStart;
use rectrain_dense::{ModelConfig, NamedModel, Transfer};
use rectrain_embedding::GroupId;
use rectrain_storage::Directory;
use serde::Deserialize;
use serde_json::Value;

use super::JobPlan;
use crate::error::RoleError;

/// The manifest's field.
const FIELD: &str = "spec.checkpoint.from";
/// Fields of a model's settings that follow from its features.
const FROM_FEATURES: [&str; 2] = ["denseFeatures", "embeddingDims"];
/// The most differences that a refusal lists.
const LISTED_DIFFERENCES: usize = 10;

/// Where the checkpoint is.
#[derive(Debug, Clone)]
pub struct WarmStartPlan {
    /// The path and the step.
    pub from: WarmStart,
    /// Options of the object store.
    pub storage_options: BTreeMap<String, String>,
}

impl WarmStartPlan {
    /// Opens the path, and creates nothing.
    ///
    /// # Errors
    /// [`RoleError::Input`] if the path does not exist or cannot be used.
    pub fn directory(&self) -> Result<Directory, RoleError> {
        Directory::open(&self.from.path, &self.storage_options, false).map_err(|error| self.refused(&error.to_string()))
    }

    /// The error of a checkpoint that cannot be used.
    #[must_use]
    pub fn refused(&self, reason: &str) -> RoleError {
        RoleError::Input(format!(
            "{FIELD}: {reason}: expected the spec.checkpoint.path of another job that has saved a checkpoint \
             (in a cluster, a bucket, or a volume that coordinator, ps and denseWorker mount)"
        ))
    }
}

/// The parts of a checkpoint that a job takes over.
#[derive(Debug, Clone)]
pub struct Inheritance {
    /// For each row group of the checkpoint, the job's group that takes its rows. `None`: the job
    /// has no table with such rows.
    pub groups: Arc<[Option<GroupId>]>,
    /// The dense parameters that both models have.
    pub dense: Transfer,
    /// Features, sparse or dense, that the checkpoint lacks.
    pub new_features: Vec<String>,
    /// Features of the checkpoint that the job lacks.
    pub left_out_features: Vec<String>,
}

/// The section `rows` of an identity.
#[derive(Deserialize)]
struct RowsIdentity {
    slots: u32,
    groups: Vec<BTreeMap<String, Value>>,
}

/// An entry of the section `denseFeatures`.
#[derive(Deserialize)]
struct DenseFeature {
    name: String,
    transform: Value,
}

/// The sections of an identity that a warm start reads.
struct Sections {
    model: ModelConfig,
    settings: Value,
    sparse: Vec<FeatureIdentity>,
    dense: Vec<DenseFeature>,
    rows: RowsIdentity,
    /// The clock of rows that have a policy; null if there is none.
    clock: Option<Value>,
}

impl Sections {
    fn read(identity: &Identity) -> Result<Self, String> {
        let mut settings = identity.section("model").cloned().unwrap_or_default();
        let model = section(identity, "model")?;
        if let Value::Object(settings) = &mut settings {
            settings.retain(|name, _| !FROM_FEATURES.contains(&name.as_str()));
        }
        Ok(Self {
            model,
            settings,
            sparse: section(identity, "features")?,
            dense: section(identity, "denseFeatures")?,
            rows: section(identity, "rows")?,
            clock: identity.section("spec.data.timeColumn").cloned(),
        })
    }

    /// The row group of each table.
    fn tables(&self) -> BTreeMap<&str, u16> {
        self.sparse.iter().map(|feature| (feature.table.as_str(), feature.group)).collect()
    }

    fn names(&self) -> (Vec<String>, Vec<String>) {
        let sparse = self.sparse.iter().map(|feature| feature.name.clone()).collect();
        (sparse, self.dense.iter().map(|feature| feature.name.clone()).collect())
    }
}

fn section<T: for<'de> Deserialize<'de>>(identity: &Identity, name: &str) -> Result<T, String> {
    let found = identity.section(name).cloned().ok_or_else(|| format!("its manifest has no section `{name}`"))?;
    serde_json::from_value(found)
        .map_err(|error| format!("the section `{name}` of its manifest cannot be read by this version: {error}"))
}

impl JobPlan {
    /// The parts of a checkpoint that this job takes over. `saved` is the identity in the
    /// checkpoint's manifest, and `name` the checkpoint in messages.
    ///
    /// # Errors
    /// [`RoleError::Input`] with all differences, if the job's layers, dimensions or embedding rows
    /// differ from the checkpoint's.
    pub fn inherit(&self, saved: &Identity, name: &str) -> Result<Inheritance, RoleError> {
        let unreadable = |reason: String| RoleError::Input(format!("{FIELD}: {name} cannot be used: {reason}"));
        let saved = Sections::read(saved).map_err(unreadable)?;
        let own = Sections::read(&self.identity()).map_err(unreadable)?;
        let mut differences = Vec::new();
        compare_settings(&saved, &own, &mut differences);
        compare_features(&saved, &own, &mut differences);
        compare_clocks(&saved, &own, &mut differences);
        let groups = match_groups(&saved, &own, &mut differences);
        if !differences.is_empty() {
            return Err(unlike(name, &differences));
        }
        let ((sparse, dense), (own_sparse, own_dense)) = (saved.names(), own.names());
        let from = NamedModel { config: &saved.model, sparse: &sparse, dense: &dense };
        let to = NamedModel { config: &own.model, sparse: &own_sparse, dense: &own_dense };
        Ok(Inheritance {
            groups: groups.into(),
            dense: Transfer::between(from, to)?,
            new_features: only_in([&own_sparse, &own_dense], [&sparse, &dense]),
            left_out_features: only_in([&sparse, &dense], [&own_sparse, &own_dense]),
        })
    }

    /// Whether the state of this job's dense optimizer continues from the checkpoint's. Only the
    /// same kind with the same state vectors does.
    #[must_use]
    pub fn continues_dense_optimizer(&self, saved: &DenseState) -> bool {
        let optimizer = &self.dense_optimizer;
        saved.optimizer == optimizer.kind().name() && saved.state_names == optimizer.slots()
    }

    /// The checkpoint with this name in `spec.checkpoint.from`, and the parts that the job takes
    /// over.
    ///
    /// # Errors
    /// As [`Self::inherit`]; [`RoleError::Checkpoint`] if the checkpoint is damaged or its store
    /// fails.
    pub async fn open_warm_start(&self, name: &str) -> Result<(Checkpoint, Inheritance), RoleError> {
        let Some(warm_start) = &self.warm_start else {
            let reason = "the job has no spec.checkpoint.from".to_owned();
            return Err(RoleError::Inconsistent { message: "restore", reason });
        };
        let checkpoint = Checkpoint::open(&warm_start.directory()?, name).await?;
        let inheritance = self.inherit(&checkpoint.manifest().identity, &checkpoint.name())?;
        Ok((checkpoint, inheritance))
    }
}

/// The refusal of a model with these differences.
fn unlike(name: &str, differences: &[String]) -> RoleError {
    let listed = differences[..differences.len().min(LISTED_DIFFERENCES)].join("; ");
    let others = match differences.len().saturating_sub(LISTED_DIFFERENCES) {
        0 => String::new(),
        others => format!("; and {others} other differences"),
    };
    RoleError::Input(format!(
        "{FIELD}: the model of {name} does not fit this job: {listed}{others}. Undo these changes, or remove {FIELD} to \
         train from initial values. Features may be added, left out or renamed: new names start fresh"
    ))
}

fn compare_settings(saved: &Sections, own: &Sections, differences: &mut Vec<String>) {
    let (Value::Object(one), Value::Object(other)) = (&saved.settings, &own.settings) else { return };
    let names: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    for name in names {
        differ(&format!("spec.model.{name}"), one.get(name), other.get(name), differences);
    }
}

/// Compares the features that both jobs have. Their poolings and transforms give the weights behind
/// them their meaning.
fn compare_features(saved: &Sections, own: &Sections, differences: &mut Vec<String>) {
    for feature in &own.sparse {
        let Some(before) = saved.sparse.iter().find(|before| before.name == feature.name) else { continue };
        let at = |setting: &str| format!("{setting} of the sparse feature `{}`", feature.name);
        let number = |dim: usize| Some(Value::from(dim));
        differ(&at("the dim"), number(before.dim).as_ref(), number(feature.dim).as_ref(), differences);
        let text = |pooling: &str| Some(Value::from(pooling));
        let (one, other) = (text(&before.pooling), text(&feature.pooling));
        differ(&at("the pooling"), one.as_ref(), other.as_ref(), differences);
    }
    for feature in &own.dense {
        let Some(before) = saved.dense.iter().find(|before| before.name == feature.name) else { continue };
        let path = format!("the transform of the dense feature `{}`", feature.name);
        differ(&path, Some(&before.transform), Some(&feature.transform), differences);
    }
}

/// The times in rows are seconds since 1970, whatever column they come from. Without a clock they
/// are none.
fn compare_clocks(saved: &Sections, own: &Sections, differences: &mut Vec<String>) {
    let (Some(one), Some(other)) = (&saved.clock, &own.clock) else { return };
    if one.is_null() != other.is_null() {
        differ("spec.data.timeColumn", Some(one), Some(other), differences);
    }
}

/// The job's row group for each one of the checkpoint. A table's rows go where the job keeps that
/// table.
fn match_groups(saved: &Sections, own: &Sections, differences: &mut Vec<String>) -> Vec<Option<GroupId>> {
    if saved.rows.slots != own.rows.slots {
        let [one, other] = [saved, own].map(|sections| Value::from(sections.rows.slots));
        differ("the number of slots", Some(&one), Some(&other), differences);
    }
    let mut groups: Vec<Option<GroupId>> = vec![None; saved.rows.groups.len()];
    // The table that decided for each group.
    let mut deciders: BTreeMap<u16, &str> = BTreeMap::new();
    let own_tables = own.tables();
    for (table, group) in saved.tables() {
        let Some(&own_group) = own_tables.get(table) else { continue };
        let Some(place) = groups.get_mut(usize::from(group)) else { continue };
        compare_rows(table, (saved, group), (own, own_group), differences);
        match (*place, deciders.get(&group)) {
            (Some(taken), Some(decider)) if taken.0 != own_group => differences.push(format!(
                "the rows of the tables `{decider}` and `{table}` had one initializer in the checkpoint and cannot be told \
                 apart, and have two in the job"
            )),
            _ => {
                *place = Some(GroupId(own_group));
                deciders.insert(group, table);
            }
        }
    }
    groups
}

/// Compares the shape of a table's rows, and their optimizer but for its learning rate. Initial
/// values matter to new rows only.
fn compare_rows(table: &str, saved: (&Sections, u16), own: (&Sections, u16), differences: &mut Vec<String>) {
    let [one, other] = [saved, own].map(|(sections, group)| sections.rows.groups.get(usize::from(group)));
    for (setting, name) in [
        ("dim", "the columns of a row"),
        ("zeroColumns", "the first-order weights of a row"),
        ("valueType", "spec.training.embeddingValueType"),
        ("optimizer", "spec.training.optimizer.sparse"),
        ("firstOrder", "spec.training.optimizer.firstOrder"),
    ] {
        let [one, other] = [one, other].map(|group| group.and_then(|group| group.get(setting)));
        differ(&format!("{name} of the table `{table}`"), one, other, differences);
    }
    // Rows of a job that keeps all of them begin their life in this one.
    let [one, other] = [one, other].map(|group| group.and_then(|group| group.get("life")).map(without_priority));
    if one.is_some() {
        let path = format!("admission, expireAfter and eviction of the table `{table}`");
        differ(&path, one.as_ref(), other.as_ref(), differences);
    }
}

/// The policy of rows without their priority, which may change.
fn without_priority(life: &Value) -> Value {
    let mut life = life.clone();
    if let Value::Object(life) = &mut life {
        life.remove("priority");
    }
    life
}

/// Adds a difference, if there is one and it is not among them already.
fn differ(path: &str, saved: Option<&Value>, wanted: Option<&Value>, differences: &mut Vec<String>) {
    let as_identity = |value: Option<&Value>| Identity::new(value.map(|value| (path.to_owned(), value.clone())));
    let is_equal = match (saved, wanted) {
        (None, None) => true,
        (Some(_), Some(_)) => as_identity(saved).difference(&as_identity(wanted)).is_none(),
        _ => false,
    };
    let sentence = Difference { path: path.to_owned(), saved: saved.cloned(), wanted: wanted.cloned() }.to_string();
    if !is_equal && !differences.contains(&sentence) {
        differences.push(sentence);
    }
}

/// The names that the first lists have and the second ones lack: sparse features first.
fn only_in(here: [&Vec<String>; 2], there: [&Vec<String>; 2]) -> Vec<String> {
    let pairs = here.into_iter().zip(there);
    pairs.flat_map(|(here, there)| here.iter().filter(|name| !there.contains(name)).cloned()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;
    use rectrain_crds::{Override, SetKind};

    fn plan(changes: &[&str]) -> JobPlan {
        let manifest = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: dnn, embeddingDim: 4, hidden: [16, 8]}
  features:
    sparse: [{name: user}, {name: item, dim: 6}, {name: seen, dim: 6}]
    dense: [{name: age}, {name: price}]
  data:
    train: {paths: ['d/*.csv']}
  training: {globalBatchSize: 96, epochs: 2}
";
        let over = |change: &&str| Override { kind: SetKind::Infer, expression: (*change).to_owned() };
        let overrides: Vec<Override> = changes.iter().map(over).collect();
        JobPlan::new(&rectrain_crds::load(manifest, "test.yaml", &overrides).unwrap().resolved).unwrap()
    }

    fn inherit(changes: &[&str]) -> Result<Inheritance, String> {
        // Through JSON, as in a manifest.
        let saved = serde_json::to_string(&plan(&[]).identity()).unwrap();
        let saved: Identity = serde_json::from_str(&saved).unwrap();
        plan(changes).inherit(&saved, "ck/step-7").map_err(|error| error.to_string())
    }

    #[test]
    fn an_unchanged_job_takes_everything_over() {
        let whole = inherit(&[]).unwrap();
        assert_eq!(whole.groups[..], [Some(GroupId(0)), Some(GroupId(1))]);
        assert_eq!((whole.dense.fresh(), whole.new_features.len(), whole.left_out_features.len()), (0, 0, 0));
    }

    #[test]
    fn data_rates_modes_and_numbers_may_change() {
        for change in [
            "spec.training.seed=9",
            "spec.training.globalBatchSize=48",
            "spec.training.mode=gba",
            "spec.training.optimizer.dense.learningRate=0.5",
            "spec.training.optimizer.sparse.learningRate=0.5",
            "spec.training.optimizer.dense.kind=sgd",
            "spec.features.label.name=other",
            "spec.features.sparse[0].missing=skip",
            "spec.model.dropout=0.5",
            "spec.roles.ps.replicas=3",
            "spec.data.train.paths={a.csv}",
        ] {
            let whole = inherit(&[change]).unwrap_or_else(|error| panic!("{change}: {error}"));
            assert_eq!(whole.dense.fresh(), 0, "{change}");
        }
    }

    #[test]
    fn features_that_come_and_go_are_named() {
        let one = inherit(&["spec.features.sparse[0].name=visitor", "spec.features.dense[1].name=discount"]).unwrap();
        assert_eq!(one.new_features, ["visitor", "discount"]);
        assert_eq!(one.left_out_features, ["user", "price"]);
        // Four columns of the embedding and one dense column, each with 16 weights.
        assert_eq!(one.dense.fresh(), 5 * 16);
        // The group of 4 columns has no table of the checkpoint.
        assert_eq!(one.groups[..], [None, Some(GroupId(1))]);
    }

    #[test]
    fn rows_follow_their_table_to_another_group() {
        let moved = inherit(&["spec.features.sparse[0].name=item", "spec.features.sparse[1].name=user"]);
        // The dims have changed places with the names.
        assert!(moved.unwrap_err().contains("the dim of the sparse feature `item` is `6` in the checkpoint"));
        let moved = inherit(&[
            "spec.features.sparse[0].name=item,spec.features.sparse[0].dim=6",
            "spec.features.sparse[1].name=user,spec.features.sparse[1].dim=4",
        ]);
        let moved = moved.unwrap();
        assert_eq!(moved.groups[..], [Some(GroupId(1)), Some(GroupId(0))]);
        assert_eq!(moved.dense.fresh(), 0);
    }

    #[test]
    fn other_layers_and_rows_are_refused_with_all_differences() {
        for (changes, parts) in [
            (
                &["spec.model.hidden={32,8}"][..],
                &["spec.model.hidden is `[16,8]` in the checkpoint and `[32,8]` in the job"][..],
            ),
            (&["spec.model.kind=dcnV2"], &["spec.model.kind is `\"dnn\"`", "spec.model.crossLayers is missing"]),
            (
                &["spec.features.sparse[1].dim=8", "spec.model.hidden={16,8,4}"],
                &["the dim of the sparse feature `item` is `6`", "and `[16,8,4]` in the job"],
            ),
            (&["spec.features.sparse[2].pooling=sum"], &["the pooling of the sparse feature `seen`"]),
            (&["spec.features.dense[0].transform=log1p"], &["the transform of the dense feature `age`"]),
            (
                &["spec.training.optimizer.sparse.kind=adaGrad"],
                &["spec.training.optimizer.sparse of the table `item`", "of the table `user`"],
            ),
            (&["spec.training.embeddingValueType=f16"], &["spec.training.embeddingValueType of the table `item`"]),
        ] {
            let error = inherit(changes).unwrap_err();
            let start = "spec.checkpoint.from: the model of ck/step-7 does not fit this job: ";
            assert!(error.starts_with(start) && error.contains("Undo these changes"), "{error}");
            for part in parts {
                assert!(error.contains(part), "{part}: {error}");
            }
        }
    }

    #[test]
    fn rows_keep_their_life_or_begin_one() {
        const BUDGET: &str = "spec.features.memory.maxRows=5000,spec.training.optimizer.sparse.kind=adam";
        let inherit = |before: &[&str], now: &[&str]| {
            plan(now).inherit(&plan(before).identity(), "ck/step-7").map_err(|error| error.to_string())
        };
        assert!(inherit(&[], &[BUDGET]).is_ok(), "rows begin their life");
        let high = "spec.features.sparse[0].priority=high";
        assert_eq!(inherit(&[BUDGET], &[BUDGET, high]).unwrap().groups.len(), 2);
        for other in ["spec.features.eviction.policy=lfu", "spec.features.sparse[0].admission.count=3"] {
            let error = inherit(&[BUDGET], &[BUDGET, other]).unwrap_err();
            assert!(error.contains("admission, expireAfter and eviction of the table `user`"), "{error}");
        }
        assert!(inherit(&[BUDGET], &["spec.training.optimizer.sparse.kind=adam"]).is_err());
    }

    #[test]
    fn a_manifest_without_sections_is_refused() {
        let error = plan(&[]).inherit(&Identity::default(), "ck/step-7").unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("no section `model`"), "{error}");
    }

    #[test]
    fn only_state_of_the_same_optimizer_continues() {
        let state = |optimizer: &str, names: &[&str]| DenseState {
            parameters: Vec::new(),
            optimizer: optimizer.to_owned(),
            state_names: names.iter().map(|name| (*name).to_owned()).collect(),
            state: Vec::new(),
            update_count: 7,
            part_update_counts: Vec::new(),
        };
        let plan = plan(&[]);
        assert!(plan.continues_dense_optimizer(&state("adam", &["m", "v"])));
        assert!(!plan.continues_dense_optimizer(&state("adamW", &["m", "v"])));
        assert!(!plan.continues_dense_optimizer(&state("sgd", &["momentum"])));
    }
}
