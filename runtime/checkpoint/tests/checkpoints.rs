//! Checkpoints from a job's point of view: written by some processes and restored onto others, with
//! all the failures in between.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{Job, SLOTS, identity, local, runtime};
use rectrain_checkpoint::{
    Checkpoint, CheckpointError, CheckpointId, CheckpointWriter, Depth, FileContent, Latest, ListedState, MANIFEST,
    Manifest, latest_good, list, retain,
};
use rectrain_embedding::{FeatureKey, Slot, SlotContent, SlotValues, slot_of};
use rectrain_storage::Directory;

async fn latest(directory: &Directory) -> Latest {
    latest_good(directory, Some(&identity("dnn")), Depth::Checksums, &[]).await.unwrap()
}

/// The files of a checkpoint on disk.
fn files_of(folder: &tempfile::TempDir, manifest: &Manifest) -> Vec<PathBuf> {
    manifest.files.iter().map(|file| folder.path().join(manifest.directory()).join(&file.name)).collect()
}

fn reasons(latest: &Latest) -> Vec<(String, String)> {
    latest.skipped.iter().map(|skipped| (skipped.name.clone(), skipped.reason.to_string())).collect()
}

#[test]
fn a_restored_job_continues_to_the_bit_on_any_number_of_servers() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut job = Job::new(3);
        job.train(10);
        let manifest = job.save(&directory, None).await.unwrap();
        assert_eq!(manifest.rows, job.stores.iter().map(|store| store.rows()).sum::<u64>());
        let expected_state = job.state();
        job.train(5);
        for servers in [1, 2, 3, 7] {
            let checkpoint = latest(&directory).await.checkpoint.unwrap();
            assert_eq!(checkpoint.state("coordinator").await.unwrap(), expected_state);
            let mut restored = Job::restore(&checkpoint, servers).await.unwrap();
            assert_eq!(restored.steps, 10);
            restored.train(5);
            assert_eq!(restored.digests(), job.digests(), "{servers} servers");
            assert_eq!(restored.parameters, job.parameters);
        }
    });
}

#[test]
fn a_chain_of_deltas_is_the_job_at_its_end() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut job = Job::new(2);
        job.train(20);
        let mut base = job.save(&directory, None).await.unwrap();
        let full_rows = base.rows;
        for _ in 0..4 {
            job.train(2);
            base = job.save(&directory, Some(&base)).await.unwrap();
            assert!(base.rows < full_rows, "a delta holds changed rows only: {} of {full_rows}", base.rows);
            assert!(base.removed > 0);
            let checkpoint = latest(&directory).await.checkpoint.unwrap();
            assert_eq!(checkpoint.manifest().id, base.id);
            let mut restored = Job::restore(&checkpoint, 3).await.unwrap();
            assert_eq!(restored.digests(), job.digests());
            // A restored job writes its next delta on top of the checkpoint it was restored from.
            restored.train(1);
            let next = restored.save(&directory, Some(&base)).await.unwrap();
            let again = Checkpoint::open(&directory, &next.directory()).await.unwrap();
            assert_eq!(Job::restore(&again, 1).await.unwrap().digests(), restored.digests());
            std::fs::remove_dir_all(folder.path().join(next.directory())).unwrap();
        }
        let checkpoint = latest(&directory).await.checkpoint.unwrap();
        assert_eq!(checkpoint.chain().len(), 5);
        let verified = checkpoint.verify(Depth::Checksums).await.unwrap();
        assert_eq!((verified.checkpoints, verified.files), (5, 25));
    });
}

#[test]
fn known_manifests_of_a_chain_are_not_read_again() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut job = Job::new(2);
        let mut saved: Vec<Manifest> = Vec::new();
        for _ in 0..4 {
            job.train(3);
            let manifest = job.save(&directory, saved.last()).await.unwrap();
            saved.push(manifest);
        }
        let name = saved[3].directory();
        // Only a manifest that was read has its checksum.
        let saved = Checkpoint::open(&directory, &name).await.unwrap().chain().to_vec();
        assert_eq!(saved.iter().map(|manifest| manifest.step).collect::<Vec<_>>(), [3, 6, 9, 12]);
        let other = Job::saved(&local(&tempfile::tempdir().unwrap())).await.1;
        let again = Checkpoint::open_upon(&directory, &name, &[other]).await.unwrap();
        assert_eq!(again.chain(), &saved[..], "unknown ones are read");
        for known in &saved[..2] {
            std::fs::remove_file(folder.path().join(known.directory()).join(MANIFEST)).unwrap();
        }
        for known in [&saved[..2], &saved[..3], &saved[..]] {
            let upon = Checkpoint::open_upon(&directory, &name, known).await.unwrap();
            assert_eq!(upon.chain(), &saved[..], "with {} known ones", known.len());
        }
        let error = Checkpoint::open_upon(&directory, &name, &saved[..1]).await.unwrap_err();
        assert!(error.to_string().contains("it does not exist"), "{error}");
    });
}

/// Values by row group and key.
type Rows = BTreeMap<(u16, FeatureKey), Vec<f32>>;

fn apply(rows: &mut Rows, change: SlotValues) {
    if change.content == SlotContent::Whole {
        rows.retain(|(_, key), _| slot_of(*key, SLOTS) != change.slot);
    }
    for (group, values) in (0..).zip(change.groups) {
        for key in values.removed {
            rows.remove(&(group, key));
        }
        for (key, row) in values.keys.iter().zip(values.values.chunks_exact(values.dim)) {
            rows.insert((group, *key), row.to_vec());
        }
    }
}

fn rows_of(job: &Job) -> Rows {
    let mut rows = Rows::new();
    for server in 0..job.stores.len() {
        for slot in (0..SLOTS).map(Slot).filter(|slot| slot.0 as usize % job.stores.len() == server) {
            let visit = |group: rectrain_embedding::GroupId, key, values: &[f32], _state: &[f32]| {
                rows.insert((group.0, key), values.to_vec());
            };
            job.stores[server].for_each_row(slot, visit).unwrap();
        }
    }
    rows
}

#[test]
fn the_changes_of_a_chain_make_the_rows_of_its_end() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut job = Job::new(2);
        job.train(20);
        let first = job.save(&directory, None).await.unwrap();
        let at_first = rows_of(&job);
        job.train(2);
        let second = job.save(&directory, Some(&first)).await.unwrap();
        job.train(3);
        let third = job.save(&directory, Some(&second)).await.unwrap();
        let mut found = Rows::new();
        let checkpoint = Checkpoint::open(&directory, &first.directory()).await.unwrap();
        checkpoint.for_each_change(0, None, |change| apply(&mut found, change)).await.unwrap();
        assert_eq!(found, at_first);
        let checkpoint = Checkpoint::open(&directory, &third.directory()).await.unwrap();
        let mut visited = 0;
        let visit = |change: SlotValues| {
            visited += change.groups.iter().map(|group| group.keys.len() as u64).sum::<u64>();
            apply(&mut found, change);
        };
        checkpoint.for_each_change(1, None, visit).await.unwrap();
        assert_eq!(found, rows_of(&job));
        assert_eq!(visited, second.rows + third.rows);
        assert!(second.removed + third.removed > 0);
    });
}

#[test]
fn training_continues_while_an_instant_is_written() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut job = Job::new(2);
        job.train(10);
        let expected = job.digests();
        let writer = CheckpointWriter::begin(&directory, job.begin(None)).await.unwrap();
        let ticket = writer.ticket().clone();
        let frozen = job.freeze(&ticket);
        let dense = job.dense_parts();
        job.train(10);
        let mut files = Vec::new();
        for (server, frozen) in frozen.iter().enumerate() {
            let slots = job.slots_of(server);
            files.push(
                rectrain_checkpoint::save_rows(&directory, &ticket, server as u32, frozen, &slots).await.unwrap(),
            );
            job.train(1);
        }
        for (number, part) in dense.iter().enumerate() {
            files.push(rectrain_checkpoint::save_dense(&directory, &ticket, number as u32, part).await.unwrap());
        }
        writer.commit(files).await.unwrap();
        let restored = Job::restore(&latest(&directory).await.checkpoint.unwrap(), 1).await.unwrap();
        assert_eq!(restored.digests(), expected);
    });
}

/// Two good checkpoints, the second damaged in many ways. Each time it is refused with the file's
/// name and the expectation, and the first is used.
#[test]
fn the_last_good_checkpoint_is_used_if_the_newest_is_bad() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut job = Job::new(2);
        job.train(5);
        let first = job.save(&directory, None).await.unwrap();
        let expected = job.digests();
        job.train(5);
        let second = job.save(&directory, None).await.unwrap();
        let checkpoint = second.directory();
        let check = async |file: &str, why: &str| {
            let found = latest(&directory).await;
            let good = found.checkpoint.as_ref().unwrap();
            assert_eq!(good.manifest().id, first.id, "{why}");
            let [(name, reason)] = &reasons(&found)[..] else { panic!("{found:?}") };
            assert_eq!(*name, checkpoint);
            assert!(reason.contains(&directory.name_of(file)) && reason.contains(why), "expected `{why}`: {reason}");
            assert_eq!(Job::restore(good, 1).await.unwrap().digests(), expected);
        };
        for (path, donor) in files_of(&folder, &second).iter().zip(files_of(&folder, &first)) {
            let good = std::fs::read(path).unwrap();
            let file = format!("{checkpoint}/{}", path.file_name().unwrap().to_str().unwrap());
            let (rows, size) = (file.contains("/rows-"), good.len());
            // Corrupted at any offset.
            for place in [0, size / 3, size / 2, size - 1] {
                let mut flipped = good.clone();
                flipped[place] ^= 4;
                std::fs::write(path, &flipped).unwrap();
                check(&file, "damaged").await;
            }
            // Truncated, extended.
            std::fs::write(path, &good[..size - 1]).unwrap();
            check(&file, &format!("has {} bytes and should have {size}", size - 1)).await;
            std::fs::write(path, [&good[..], b"x"].concat()).unwrap();
            check(&file, &format!("has {} bytes and should have {size}", size + 1)).await;
            std::fs::write(path, b"").unwrap();
            check(&file, "has 0 bytes").await;
            // A page that never reached the disk.
            let mut hole = good.clone();
            hole[size / 2..].fill(0);
            std::fs::write(path, &hole).unwrap();
            check(&file, "").await;
            // Half uploaded: some files exist, and this one only under its temporary name.
            std::fs::rename(path, path.with_extension("bin#1")).unwrap();
            check(&file, &format!("is missing: the manifest names it with {size} bytes")).await;
            std::fs::remove_file(path.with_extension("bin#1")).unwrap();
            // Mixed up: a file of the previous checkpoint.
            std::fs::copy(donor, path).unwrap();
            check(&file, "").await;
            // Of a newer version.
            if rows {
                let mut newer = good.clone();
                newer[8] = 2;
                std::fs::write(path, &newer).unwrap();
                check(&file, "has format version 2 and this program reads versions up to 1").await;
            }
            std::fs::write(path, &good).unwrap();
        }
        assert_eq!(latest(&directory).await.checkpoint.unwrap().manifest().id, second.id, "every file is restored");

        let file = format!("{checkpoint}/{MANIFEST}");
        let manifest = folder.path().join(&file);
        let good = std::fs::read(&manifest).unwrap();
        let text = String::from_utf8(good.clone()).unwrap();
        let of_first = std::fs::read(folder.path().join(first.directory()).join(MANIFEST)).unwrap();
        let cases: [(Vec<u8>, &str); 7] = [
            (good[..good.len() / 2].to_vec(), "damaged"),
            (Vec::new(), "damaged"),
            (vec![0; good.len()], "damaged"),
            (text.replace("\"step\": 10", "\"step\": 11").into(), "checksum"),
            (text.replace("\"version\": 1", "\"version\": 7").into(), "has format version 7 and this program reads"),
            (of_first, "belongs elsewhere: its step is"),
            ([&good[..], &vec![b' '; 16 << 20]].concat(), "and a manifest may have at most 16777216"),
        ];
        for (bytes, why) in cases {
            std::fs::write(&manifest, bytes).unwrap();
            check(&file, why).await;
        }
        std::fs::remove_file(&manifest).unwrap();
        check(&checkpoint, "never finished").await;
    });
}

/// A whole rows file of another checkpoint, of the same size and under this one's name.
#[test]
fn the_header_reveals_a_rows_file_of_another_checkpoint() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let (_, first) = Job::saved(&directory).await;
        let rows = files_of(&folder, &first).swap_remove(0);
        let mut other = std::fs::read(&rows).unwrap();
        other[16] ^= 1;
        // The header's own checksum made valid, as in another checkpoint.
        let size = other.len();
        let index = u64::from_le_bytes(other[size - 32..size - 24].try_into().unwrap()) as usize;
        let checksum = xxhash_rust::xxh3::xxh3_64(&[&other[..64], &other[index..size - 32]].concat());
        other[size - 16..size - 8].copy_from_slice(&checksum.to_le_bytes());
        std::fs::write(&rows, other).unwrap();
        let checkpoint = Checkpoint::open(&directory, &first.directory()).await.unwrap();
        let error = Job::restore(&checkpoint, 1).await.err().unwrap();
        assert!(matches!(error, CheckpointError::MixedUp { what: "checkpoint", .. }), "{error}");
        assert!(error.to_string().contains(&*rows.to_string_lossy()), "{error}");
        let found = latest_good(&directory, None, Depth::Checksums, &[]).await.unwrap();
        assert!(found.checkpoint.is_none() && found.skipped.len() == 1);
    });
}

/// Two checkpoints of the same rows, so that their files have the same sizes.
#[test]
fn swapped_rows_files_of_one_size_are_refused_by_name() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let (mut job, first) = Job::saved(&directory).await;
        job.steps += 1;
        let second = job.save(&directory, None).await.unwrap();
        let [one, other] = [&first, &second].map(|manifest| files_of(&folder, manifest).swap_remove(0));
        let [of_one, of_other] = [&one, &other].map(|path| std::fs::read(path).unwrap());
        assert_eq!(of_one.len(), of_other.len());
        std::fs::write(&one, of_other).unwrap();
        std::fs::write(&other, of_one).unwrap();
        let found = latest(&directory).await;
        assert!(found.checkpoint.is_none());
        for ((_, reason), path) in reasons(&found).iter().zip([&other, &one]) {
            assert!(reason.contains(&*path.to_string_lossy()) && reason.contains("belongs elsewhere"), "{reason}");
        }
        for manifest in [first, second] {
            let checkpoint = Checkpoint::open(&directory, &manifest.directory()).await.unwrap();
            let error = Job::restore(&checkpoint, 1).await.err().unwrap();
            assert!(matches!(error, CheckpointError::MixedUp { .. }), "{error}");
        }
    });
}

/// A manifest with a right checksum that states one row less: in total, and of a file as well.
#[test]
fn a_manifest_with_a_wrong_number_of_rows_is_refused() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let (_, mut manifest) = Job::saved(&directory).await;
        let (path, rows_file) =
            (folder.path().join(manifest.directory()).join(MANIFEST), files_of(&folder, &manifest).swap_remove(0));
        manifest.rows -= 1;
        std::fs::write(&path, manifest.encode()).unwrap();
        let error = Checkpoint::open(&directory, &manifest.directory()).await.unwrap_err();
        assert!(error.is_checkpoints_fault() && error.to_string().contains("it states"), "{error}");
        let FileContent::Rows { rows, .. } = &mut manifest.files[0].content else { panic!("it holds rows") };
        *rows -= 1;
        std::fs::write(&path, manifest.encode()).unwrap();
        let checkpoint = Checkpoint::open(&directory, &manifest.directory()).await.unwrap();
        let error = Job::restore(&checkpoint, 1).await.err().unwrap();
        assert!(error.is_checkpoints_fault() && error.to_string().contains("contradicts the manifest"), "{error}");
        assert!(error.to_string().contains(&*rows_file.to_string_lossy()), "{error}");
    });
}

#[test]
fn damage_that_a_check_of_sizes_misses_stops_the_restore() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let (_, first) = Job::saved(&directory).await;
        let rows = files_of(&folder, &first).swap_remove(0);
        let mut bytes = std::fs::read(&rows).unwrap();
        bytes[300] ^= 1;
        std::fs::write(&rows, bytes).unwrap();
        let found = latest_good(&directory, None, Depth::Sizes, &[]).await.unwrap();
        let error = Job::restore(&found.checkpoint.unwrap(), 1).await.err().unwrap();
        assert!(matches!(error, CheckpointError::Rows { .. }) && error.is_checkpoints_fault(), "{error}");
        assert!(error.to_string().contains(rows.file_name().unwrap().to_str().unwrap()), "{error}");
        let without = latest_good(&directory, None, Depth::Sizes, &[first.directory()]).await.unwrap();
        assert!(without.checkpoint.is_none());
    });
}

#[test]
fn a_delta_without_its_base_is_refused_and_an_earlier_one_is_used() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut job = Job::new(1);
        job.train(5);
        let full = job.save(&directory, None).await.unwrap();
        job.train(1);
        let one = job.save(&directory, Some(&full)).await.unwrap();
        job.train(1);
        let two = job.save(&directory, Some(&one)).await.unwrap();
        let bytes = std::fs::read(files_of(&folder, &one).swap_remove(0)).unwrap();
        std::fs::remove_file(files_of(&folder, &one).swap_remove(0)).unwrap();
        let found = latest(&directory).await;
        assert_eq!(found.checkpoint.as_ref().unwrap().manifest().id, full.id);
        assert_eq!(found.skipped.len(), 2);
        let lost = format!("{}/{}", one.directory(), one.files[0].name);
        assert!(reasons(&found).iter().all(|(_, why)| why.contains(&lost) && why.contains("is missing")), "{found:?}");
        std::fs::write(files_of(&folder, &one).swap_remove(0), bytes).unwrap();
        assert_eq!(latest(&directory).await.checkpoint.unwrap().manifest().id, two.id);
        std::fs::remove_dir_all(folder.path().join(full.directory())).unwrap();
        let found = latest(&directory).await;
        assert!(found.checkpoint.is_none());
        assert!(reasons(&found).iter().all(|(_, reason)| reason.contains("cannot be used: it does not exist")));
    });
}

#[test]
fn another_jobs_checkpoint_is_not_used_replaced_or_deleted() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let (job, first) = Job::saved(&directory).await;
        let wanted = identity("deepfm");
        let refused = latest_good(&directory, Some(&wanted), Depth::Sizes, &[]).await.unwrap_err().to_string();
        assert!(refused.contains("model.kind is `\"dnn\"` in the checkpoint and `\"deepfm\"` in the job"), "{refused}");
        let begin = rectrain_checkpoint::Begin { identity: wanted.clone(), ..job.begin(None) };
        assert!(matches!(CheckpointWriter::begin(&directory, begin).await, Err(CheckpointError::OtherJob { .. })));
        let begin = rectrain_checkpoint::Begin { identity: wanted.clone(), step: 6, ..job.begin(Some(&first)) };
        assert!(matches!(CheckpointWriter::begin(&directory, begin).await, Err(CheckpointError::OtherJob { .. })));
        retain(&directory, &wanted, NonZeroUsize::MIN, &[], &[]).await.unwrap();
        assert!(latest(&directory).await.checkpoint.is_some());
    });
}

#[test]
fn a_checkpoint_of_a_newer_format_is_not_replaced() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let (job, first) = Job::saved(&directory).await;
        let manifest = folder.path().join(first.directory()).join(MANIFEST);
        let good = std::fs::read_to_string(&manifest).unwrap();
        let newer = good.replace("\"version\": 1", "\"version\": 2");
        std::fs::write(&manifest, &newer).unwrap();
        let refused = CheckpointWriter::begin(&directory, job.begin(None)).await;
        assert!(matches!(refused, Err(CheckpointError::FutureVersion { found: 2, .. })), "{refused:?}");
        retain(&directory, &identity("dnn"), NonZeroUsize::MIN, &[], &[]).await.unwrap();
        assert_eq!(std::fs::read_to_string(&manifest).unwrap(), newer);
        assert!(files_of(&folder, &first).iter().all(|file| file.exists()));
        // A damaged one may be replaced.
        std::fs::write(&manifest, &good[1..]).unwrap();
        assert!(CheckpointWriter::begin(&directory, job.begin(None)).await.is_ok());
    });
}

#[test]
fn a_step_can_be_saved_again_and_the_old_files_are_cleared() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let (job, first) = Job::saved(&directory).await;
        // Another attempt at the same step: until it is finished, the first stays good.
        let writer = CheckpointWriter::begin(&directory, job.begin(None)).await.unwrap();
        let frozen = job.freeze(writer.ticket());
        let files = job.write_files(&directory, writer.ticket(), &frozen).await.unwrap();
        assert_eq!(latest(&directory).await.checkpoint.unwrap().manifest().id, first.id);
        let second = writer.commit(files).await.unwrap();
        assert_eq!(latest(&directory).await.checkpoint.unwrap().manifest().id, second.id);
        let retained = retain(&directory, &identity("dnn"), NonZeroUsize::MIN, &[], &[]).await.unwrap();
        assert_eq!(retained.leftovers.len(), first.files.len());
        assert!(files_of(&folder, &first).iter().all(|file| !file.exists()));
        assert_eq!(latest(&directory).await.checkpoint.unwrap().manifest().id, second.id);
    });
}

#[test]
fn an_aborted_attempt_leaves_no_files() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let (job, first) = Job::saved(&directory).await;
        let writer = CheckpointWriter::begin(&directory, job.begin(None)).await.unwrap();
        let frozen = job.freeze(writer.ticket());
        job.write_files(&directory, writer.ticket(), &frozen).await.unwrap();
        writer.abort().await.unwrap();
        let left = std::fs::read_dir(folder.path().join(first.directory())).unwrap().count();
        assert_eq!(left, first.files.len() + 1, "the first one's files and its manifest");
    });
}

#[test]
fn an_incomplete_checkpoint_is_not_committed() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut job = Job::new(2);
        job.train(5);
        let without = async |index: usize| {
            let writer = CheckpointWriter::begin(&directory, job.begin(None)).await.unwrap();
            let frozen = job.freeze(writer.ticket());
            let mut files = job.write_files(&directory, writer.ticket(), &frozen).await.unwrap();
            files.remove(index);
            writer.commit(files).await.unwrap_err().to_string()
        };
        assert!(without(0).await.contains("slot 0 is missing"));
        assert!(without(2).await.contains("should begin at 0"));
        // A manifest that is too large to be read.
        let info = [("job".to_owned(), serde_json::json!("x".repeat(16 << 20)))].into();
        let begin = rectrain_checkpoint::Begin { info, ..job.begin(None) };
        let refused = CheckpointWriter::begin(&directory, begin).await.unwrap().commit(Vec::new()).await.unwrap_err();
        assert!(refused.to_string().contains("and at most 16777216 are allowed"), "{refused}");
        let writer = CheckpointWriter::begin(&directory, job.begin(None)).await.unwrap();
        let frozen = job.freeze(writer.ticket());
        let files = job.write_files(&directory, writer.ticket(), &frozen).await.unwrap();
        std::fs::remove_file(folder.path().join(&writer.ticket().directory).join(&files[1].name)).unwrap();
        assert!(matches!(writer.commit(files).await, Err(CheckpointError::Missing { .. })));
        assert!(latest(&directory).await.checkpoint.is_none());
        let states: Vec<_> = list(&directory).await.unwrap().into_iter().map(|listed| listed.state).collect();
        assert!(matches!(states[..], [ListedState::Unfinished]));
    });
}

#[test]
fn retention_keeps_the_newest_and_deletes_unfinished_ones() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut job = Job::new(1);
        let mut names = Vec::new();
        for _ in 0..4 {
            job.train(2);
            let full = job.save(&directory, None).await.unwrap();
            job.train(1);
            let delta = job.save(&directory, Some(&full)).await.unwrap();
            names.extend([full.directory(), delta.directory()]);
        }
        // A crash during writing: files, a temporary file, and no manifest.
        let unfinished = folder.path().join("step-000000000100");
        std::fs::create_dir(&unfinished).unwrap();
        std::fs::write(unfinished.join("rows-00000-12345678.bin#1"), b"half").unwrap();
        let current = folder.path().join("step-000000000101-delta");
        std::fs::create_dir(&current).unwrap();
        std::fs::create_dir(folder.path().join("something-else")).unwrap();
        let writing = ["step-000000000101-delta".to_owned()];
        let keep = NonZeroUsize::new(2).unwrap();
        let retained = retain(&directory, &identity("dnn"), keep, &[], &writing).await.unwrap();
        assert_eq!(retained.deleted.len(), 4);
        assert_eq!(retained.unfinished, ["step-000000000100"]);
        let left: Vec<String> = list(&directory).await.unwrap().into_iter().map(|listed| listed.name).collect();
        assert_eq!(left, [&names[4..], &writing[..]].concat());
        assert!(folder.path().join("something-else").exists());
        let found = latest(&directory).await;
        let restored = Job::restore(&found.checkpoint.unwrap(), 1).await.unwrap();
        assert_eq!(restored.digests(), job.digests());
    });
}

#[test]
fn retention_keeps_a_thousand_of_1500_checkpoints() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let (_, first) = Job::saved(&directory).await;
        for step in 6..=1505 {
            let mut manifest = first.clone();
            (manifest.step, manifest.id) = (step, CheckpointId(u128::from(step)));
            let to = folder.path().join(manifest.directory());
            std::fs::create_dir(&to).unwrap();
            for file in files_of(&folder, &first) {
                std::fs::hard_link(&file, to.join(file.file_name().unwrap())).unwrap();
            }
            std::fs::write(to.join(MANIFEST), manifest.encode()).unwrap();
        }
        let keep = NonZeroUsize::new(1000).unwrap();
        let retained = retain(&directory, &identity("dnn"), keep, &[], &[]).await.unwrap();
        assert_eq!(retained.deleted.len(), 501);
        let steps: Vec<u64> = list(&directory).await.unwrap().into_iter().map(|listed| listed.step).collect();
        assert_eq!(steps, (506..=1505).collect::<Vec<_>>());
        let found = latest_good(&directory, None, Depth::Sizes, &[]).await.unwrap();
        assert_eq!(found.checkpoint.unwrap().manifest().step, 1505);
    });
}

#[test]
fn slots_that_are_not_requested_stay_unchanged() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut job = Job::new(3);
        job.train(8);
        job.save(&directory, None).await.unwrap();
        let expected = job.digests();
        let checkpoint = latest(&directory).await.checkpoint.unwrap();
        // One server is lost and comes back empty; the others have trained on.
        job.train(3);
        let after = job.digests();
        job.stores[1] = Arc::clone(&Job::new(1).stores[0]);
        let slots = job.slots_of(1);
        let restored = checkpoint.restore_rows(&job.stores[1], &slots).await.unwrap();
        assert_eq!(restored.slots, slots.len());
        for (slot, digest) in job.digests().into_iter().enumerate() {
            assert_eq!(digest, if slot % 3 == 1 { expected[slot] } else { after[slot] });
        }
        assert!(
            restored.bytes
                < std::fs::metadata(
                    folder
                        .path()
                        .join(Path::new(&checkpoint.manifest().directory()))
                        .join(&checkpoint.manifest().files[1].name)
                )
                .unwrap()
                .len()
        );
    });
}
