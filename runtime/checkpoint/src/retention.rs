//! Retention of checkpoints: a pure plan, and its execution. The newest full checkpoints of the job
//! stay, with all deltas that build on them. Older ones, deltas without a base and the leftovers of
//! unfinished attempts are deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use rectrain_storage::Directory;

use crate::catalog::{Listed, ListedState, list};
use crate::error::CheckpointError;
use crate::identity::Identity;
use crate::manifest::{MANIFEST, Manifest};
use crate::name::{CheckpointId, Kind};

/// The newest checkpoints are searched for leftovers: the one just written, and the one before it,
/// since its writer may have died before it searched. No others can have any.
const WITH_LEFTOVERS: usize = 2;

/// The directories and files that were deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Retained {
    /// Checkpoints, by name.
    pub deleted: Vec<String>,
    /// Directories of unfinished checkpoints.
    pub unfinished: Vec<String>,
    /// Files in checkpoint directories that the manifest does not name. An earlier attempt at the
    /// same step left them.
    pub leftovers: Vec<String>,
}

/// Keeps the newest `keep` full checkpoints of the job with this identity and the deltas that build
/// on them. Deletes the job's other checkpoints. Checkpoints in `passed_over` were found damaged:
/// neither they nor deltas that build on them count among the `keep`.
///
/// Never deletes:
/// - the directories in `writing`, which are being written now,
/// - the base of a checkpoint that is kept,
/// - checkpoints of another job or of a newer format,
/// - damaged checkpoints that are not older than the oldest one kept, for a human to inspect.
///
/// A job has one coordinator, and only it may call this: no other process may be writing.
///
/// # Errors
/// Errors of the storage. Deleted files stay deleted; call it again.
pub async fn retain(
    directory: &Directory,
    identity: &Identity,
    keep: NonZeroUsize,
    passed_over: &[String],
    writing: &[String],
) -> Result<Retained, CheckpointError> {
    let listed = list(directory).await?;
    let plan = plan(&listed, identity, keep, passed_over, writing);
    let mut retained = Retained::default();
    for name in &plan.delete {
        directory.delete_folder(name, MANIFEST).await?;
        retained.deleted.push(name.clone());
    }
    for name in &plan.unfinished {
        directory.delete_folder(name, MANIFEST).await?;
        retained.unfinished.push(name.clone());
    }
    for name in plan.keep.iter().take(WITH_LEFTOVERS) {
        let own = listed.iter().find(|listed| listed.name == *name);
        let Some(ListedState::Complete(manifest)) = own.map(|listed| &listed.state) else { continue };
        let strays = strays(directory, name, manifest).await?;
        directory.delete(&strays).await?;
        retained.leftovers.extend(strays);
    }
    Ok(retained)
}

/// Deletes the finished checkpoints with these ids, the newest first, so that no delta outlives its
/// base. Nothing may resume from them. Returns their names. Ids of deleted ones do not matter.
///
/// A job has one coordinator, and only it may call this.
///
/// # Errors
/// Errors of the storage. Deleted files stay deleted; call it again.
pub async fn withdraw(directory: &Directory, ids: &[CheckpointId]) -> Result<Vec<String>, CheckpointError> {
    let mut withdrawn = Vec::new();
    for listed in list(directory).await?.into_iter().rev() {
        if let ListedState::Complete(manifest) = &listed.state
            && ids.contains(&manifest.id)
        {
            directory.delete_folder(&listed.name, MANIFEST).await?;
            withdrawn.push(listed.name);
        }
    }
    Ok(withdrawn)
}

/// Files in a checkpoint's directory that the manifest does not name.
async fn strays(directory: &Directory, name: &str, manifest: &Manifest) -> Result<Vec<String>, CheckpointError> {
    let named: BTreeSet<String> = manifest.files.iter().map(|file| format!("{name}/{}", file.name)).collect();
    let own = format!("{name}/{MANIFEST}");
    let files = directory.files(name).await?;
    Ok(files.into_iter().map(|entry| entry.name).filter(|file| *file != own && !named.contains(file)).collect())
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// In this order: deltas before their bases.
    delete: Vec<String>,
    unfinished: Vec<String>,
    /// The job's checkpoints that stay and are not being written, newest first.
    keep: Vec<String>,
}

/// The job's complete checkpoints.
type Own<'l> = BTreeMap<CheckpointId, (&'l Listed, &'l Manifest)>;

fn plan(
    listed: &[Listed],
    identity: &Identity,
    keep: NonZeroUsize,
    passed_over: &[String],
    writing: &[String],
) -> Plan {
    let own: Own<'_> = listed
        .iter()
        .filter_map(|listed| match &listed.state {
            ListedState::Complete(manifest) if manifest.identity.difference(identity).is_none() => {
                Some((manifest.id, (listed, manifest.as_ref())))
            }
            _ => None,
        })
        .collect();
    let is_good_full = |listed: &Listed| listed.kind == Kind::Full && !passed_over.contains(&listed.name);
    let mut full: Vec<(u64, CheckpointId)> =
        own.values().filter(|(listed, _)| is_good_full(listed)).map(|(listed, m)| (listed.step, m.id)).collect();
    full.sort_unstable_by_key(|&(step, _)| std::cmp::Reverse(step));
    full.truncate(keep.get());
    let oldest = full.last().map_or(0, |&(step, _)| step);
    let kept: BTreeSet<CheckpointId> = full.into_iter().map(|(_, id)| id).collect();
    let mut plan = Plan::default();
    // Newest first, so that no delta outlives its base.
    for listed in listed.iter().rev().filter(|listed| !writing.contains(&listed.name)) {
        match &listed.state {
            ListedState::Complete(manifest) if own.contains_key(&manifest.id) => {
                match root(manifest, &own, passed_over) {
                    Root::Full(root) if kept.contains(&root) => plan.keep.push(listed.name.clone()),
                    _ if is_base_of_a_rewrite(manifest, &own, writing) => {}
                    Root::PassedOver if listed.step >= oldest => {}
                    _ => plan.delete.push(listed.name.clone()),
                }
            }
            ListedState::Unfinished => plan.unfinished.push(listed.name.clone()),
            ListedState::Refused(CheckpointError::FutureVersion { .. }) | ListedState::Complete(_) => {}
            ListedState::Refused(_) if listed.step < oldest => plan.delete.push(listed.name.clone()),
            ListedState::Refused(_) => {}
        }
    }
    plan
}

/// The checkpoint that a chain of deltas starts from.
enum Root {
    Full(CheckpointId),
    /// The checkpoint, or one of its bases, was found damaged.
    PassedOver,
    /// A base is missing.
    None,
}

fn root(manifest: &Manifest, own: &Own<'_>, passed_over: &[String]) -> Root {
    let mut at = manifest.id;
    for _ in 0..=own.len() {
        match own.get(&at) {
            None => return Root::None,
            Some((listed, _)) if passed_over.contains(&listed.name) => return Root::PassedOver,
            Some((_, manifest)) => match &manifest.base {
                None => return Root::Full(at),
                Some(base) => at = base.id,
            },
        }
    }
    Root::None
}

/// True if this checkpoint is the base of a complete checkpoint that is being written again.
fn is_base_of_a_rewrite(manifest: &Manifest, own: &Own<'_>, writing: &[String]) -> bool {
    let written = own.values().filter(|(listed, _)| writing.contains(&listed.name));
    let mut bases: Vec<CheckpointId> = written.filter_map(|(_, m)| m.base.as_ref()).map(|base| base.id).collect();
    let mut seen = BTreeSet::new();
    while let Some(id) = bases.pop().filter(|id| seen.insert(*id)) {
        if id == manifest.id {
            return true;
        }
        bases.extend(own.get(&id).and_then(|(_, m)| m.base.as_ref()).map(|base| base.id));
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Draft;
    use crate::name::{Base, directory_name};
    use proptest::prelude::*;

    fn identity(kind: &str) -> Identity {
        Identity::new([("model".to_owned(), serde_json::json!({ "kind": kind }))])
    }

    fn complete(id: u128, step: u64, base: Option<(u128, &str)>, of: &str) -> Listed {
        let base = base.map(|(id, directory)| Base { directory: directory.to_owned(), id: CheckpointId(id) });
        let draft = Draft {
            id: CheckpointId(id),
            step,
            base,
            written_by: "test".into(),
            slots: 1,
            identity: identity(of),
            info: BTreeMap::new(),
            files: Vec::new(),
        };
        let manifest = Manifest::new(draft).unwrap();
        Listed {
            name: manifest.directory(),
            step,
            kind: manifest.kind,
            state: ListedState::Complete(Box::new(manifest)),
        }
    }

    fn other(step: u64, state: ListedState) -> Listed {
        Listed { name: directory_name(step, Kind::Full), step, kind: Kind::Full, state }
    }

    fn damaged(step: u64) -> Listed {
        other(step, ListedState::Refused(CheckpointError::Manifest { file: "m".into(), problem: "p".into() }))
    }

    fn planned(listed: &[Listed], keep: usize, writing: &[&str]) -> Plan {
        planned_without(listed, keep, &[], writing)
    }

    fn planned_without(listed: &[Listed], keep: usize, passed_over: &[&str], writing: &[&str]) -> Plan {
        let [passed_over, writing] =
            [passed_over, writing].map(|names| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        plan(listed, &identity("dnn"), NonZeroUsize::new(keep).unwrap(), &passed_over, &writing)
    }

    #[test]
    fn the_newest_full_ones_stay_with_their_deltas() {
        let (first, second) = (directory_name(10, Kind::Full), directory_name(30, Kind::Full));
        let delta = directory_name(12, Kind::Delta);
        let listed = [
            complete(1, 10, None, "dnn"),
            complete(2, 12, Some((1, &first)), "dnn"),
            complete(3, 14, Some((2, &delta)), "dnn"),
            complete(4, 30, None, "dnn"),
            complete(5, 32, Some((4, &second)), "dnn"),
        ];
        let one = planned(&listed, 1, &[]);
        let names = |of: &[usize]| of.iter().map(|&at| listed[at].name.clone()).collect::<Vec<_>>();
        assert_eq!(one.delete, names(&[2, 1, 0]), "deltas go before their bases");
        assert_eq!(one.keep, names(&[4, 3]));
        assert_eq!(planned(&listed, 2, &[]).delete, names(&[]));
        let writing = planned(&listed, 1, &[&listed[2].name]);
        assert_eq!(writing.delete, names(&[]), "a checkpoint being written keeps all its bases");
    }

    #[test]
    fn other_jobs_and_checkpoints_being_written_are_not_touched() {
        let newer = CheckpointError::FutureVersion { file: "m".into(), found: 2, supported: 1 };
        let listed = [
            complete(1, 10, None, "lr"),
            other(11, ListedState::Refused(newer)),
            damaged(12),
            other(13, ListedState::Unfinished),
            complete(2, 20, None, "dnn"),
            damaged(25),
            other(40, ListedState::Unfinished),
        ];
        let plan = planned(&listed, 1, &[&listed[6].name]);
        assert_eq!(plan.delete, [listed[2].name.clone()], "damaged and older than the checkpoints that are kept");
        assert_eq!(plan.unfinished, [listed[3].name.clone()]);
        assert_eq!(plan.keep, [listed[4].name.clone()]);
    }

    #[test]
    fn a_damaged_checkpoint_does_not_count_and_goes_when_oldest() {
        let damaged = directory_name(30, Kind::Full);
        let listed = |step: u64| {
            [
                complete(1, 20, None, "dnn"),
                complete(2, 30, None, "dnn"),
                complete(3, 32, Some((2, &damaged)), "dnn"),
                complete(4, step, None, "dnn"),
            ]
        };
        // Training resumed from step 20, and has not yet reached step 30 again.
        let before = listed(24);
        let plan = planned_without(&before, 1, &[&damaged], &[]);
        assert_eq!((plan.keep, plan.delete), (vec![before[3].name.clone()], vec![before[0].name.clone()]));
        assert_eq!(
            planned_without(&before, 2, &[&damaged], &[]).keep,
            [&before[3], &before[0]].map(|l| l.name.clone())
        );
        let delta = before[2].name.clone();
        let after = listed(31);
        let plan = planned_without(&after, 1, &[&damaged, &delta], &[]);
        assert_eq!(plan.keep, [after[3].name.clone()]);
        assert_eq!(
            plan.delete,
            [damaged.clone(), after[0].name.clone()],
            "the delta is newer than the checkpoint that is kept"
        );
        let after = listed(40);
        let plan = planned_without(&after, 1, &[&damaged], &[]);
        assert_eq!(plan.delete, [delta, damaged, after[0].name.clone()]);
    }

    #[test]
    fn a_delta_whose_base_is_gone_is_deleted() {
        let listed = [complete(3, 12, Some((9, "step-000000000001")), "dnn"), complete(4, 30, None, "dnn")];
        assert_eq!(planned(&listed, 5, &[]).delete, [listed[0].name.clone()]);
    }

    proptest! {
        /// Any chains of deltas: every checkpoint that stays can be restored, and enough
        /// checkpoints stay.
        #[test]
        fn every_checkpoint_that_stays_has_its_bases(
            bases in prop::collection::vec(prop::option::weighted(0.6, any::<prop::sample::Index>()), 1..20),
            keep in 1_usize..5,
        ) {
            let mut listed: Vec<Listed> = Vec::new();
            for (step, base) in bases.iter().enumerate() {
                let base = base.filter(|_| step > 0).map(|index| index.index(step));
                let name = base.map(|at| listed[at].name.clone());
                let base = base.zip(name.as_deref()).map(|(at, name)| (at as u128, name));
                listed.push(complete(step as u128, step as u64, base, "dnn"));
            }
            let plan = planned(&listed, keep, &[]);
            let manifest = |listed: &Listed| match &listed.state {
                ListedState::Complete(manifest) => manifest.as_ref().clone(),
                _ => unreachable!(),
            };
            let full = listed.iter().filter(|listed| listed.kind == Kind::Full).count();
            let kept_full = listed.iter().filter(|l| l.kind == Kind::Full && plan.keep.contains(&l.name)).count();
            prop_assert_eq!(kept_full, full.min(keep));
            for listed in listed.iter().filter(|listed| plan.keep.contains(&listed.name)) {
                if let Some(base) = manifest(listed).base {
                    prop_assert!(plan.keep.contains(&base.directory));
                }
            }
            prop_assert_eq!(plan.keep.len() + plan.delete.len(), listed.len());
        }
    }
}
