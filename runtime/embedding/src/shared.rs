//! A store in memory that outlives its process. It lies in a directory of a memory file system
//! (tmpfs):
//!
//! - a file of rows for each group;
//! - a file of side tables for each group whose [policy](crate::life) has one;
//! - a file of [marks](crate::trimming) if the policy of a group removes rows;
//! - a file of [counts](crate::life_counts) of what policies did;
//! - an [`UpdateLog`].
//!
//! A killed process leaves all rows behind. The next process [opens](Store::in_shared_memory) the
//! directory, finds the rows and rebuilds the indexes from them.
//!
//! Every row is whole, whenever the process was killed. A row that was being inserted does not
//! exist. A row that was being changed under an [`UpdateLog`] is restored, and the repeated update
//! continues with it. Only [`Store::update`], which takes no log, may leave a row half-changed.

use crate::arena::Arena;
use crate::block_file::FoundBlock;
use crate::group::{Group, GroupMemory};
use crate::layout::RowLayout;
use crate::life_counts::SharedLifeCounts;
use crate::log::{Part, UpdateLog};
use crate::table::{FoundTable, Table};
use crate::trimming::Trimming;
use crate::{SharedMemoryError, Slot, Store, StoreConfig, StoreError};
use std::fs::DirBuilder;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The contents of a directory that was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reopened {
    /// Rows of all groups.
    pub rows: u64,
    /// Rows that a killed process left half-changed and that were restored: 0 or 1.
    pub repaired_rows: u64,
}

/// The blocks found in the files of one group, by slot.
struct FoundGroup {
    /// The file of the rows.
    path: PathBuf,
    tables: Vec<FoundTable>,
}

impl FoundGroup {
    fn damaged(&self, problem: &'static str) -> SharedMemoryError {
        SharedMemoryError::Damaged { path: self.path.clone(), problem }
    }
}

impl Store {
    /// Opens the store in `directory`, or creates it. Only one process at a time may have a
    /// directory open, and `config` must be the configuration that the rows were made with. The
    /// caller ensures both.
    ///
    /// # Errors
    /// [`StoreError::Spec`] as in [`Self::new`]; [`StoreError::SharedMemory`] if the directory or
    /// the rows in it cannot be used.
    pub fn in_shared_memory(config: StoreConfig, directory: &Path) -> Result<(Self, UpdateLog, Reopened), StoreError> {
        config.validate()?;
        make_directory(directory)?;
        let mut groups = Vec::with_capacity(config.groups.len());
        let mut found = Vec::with_capacity(config.groups.len());
        for (number, &spec) in config.groups.iter().enumerate() {
            let path = directory.join(format!("rows-{number}"));
            let (rows, blocks) = Arena::on_file(&path, RowLayout::new(&spec).stride())?;
            let mut tables: Vec<FoundTable> = (0..config.slots).map(|_| FoundTable::default()).collect();
            by_slot(blocks, &mut tables, |table| &mut table.rows);
            let mut memory = GroupMemory { rows, side: Arc::default() };
            if let Some(layout) = spec.life.side_layout(config.slots) {
                let (side, blocks) = Arena::on_file(&directory.join(format!("side-{number}")), layout.stride())?;
                by_slot(blocks, &mut tables, |table| &mut table.side);
                memory.side = side;
            }
            found.push(FoundGroup { path, tables });
            groups.push(Group::new(spec, &config, memory));
        }
        let mut tables = Vec::with_capacity(config.slots as usize);
        for slot in 0..config.slots {
            tables.push(adopt_slot(Slot(slot), &groups, &mut found)?);
        }
        let mut store = Self::of_tables(config, groups, tables);
        if store.removes_rows {
            store.trimming = Trimming::open(&directory.join("trimming"), store.config.slots)?;
        }
        store.life_counts = SharedLifeCounts::open(&directory.join("counts"), store.groups.len())?;
        store.groups.iter().for_each(|group| group.keep_dropped(false));
        let longest = store.groups.iter().map(Group::longest).max();
        let mut log = UpdateLog::open(&directory.join("update"), longest.unwrap_or(0))?;
        let repaired_rows = u64::from(store.restore_unfinished(&mut log)?);
        for cell in store.slots.iter() {
            let mut state = cell.lock();
            state.tables.iter_mut().zip(&store.groups).for_each(|(table, group)| table.reopened(group));
        }
        store.complete_trimming()?;
        let reopened = Reopened { rows: store.rows(), repaired_rows };
        Ok((store, log, reopened))
    }

    /// Restores the row, or the block of a side table, that was being changed. Returns whether
    /// there was one.
    fn restore_unfinished(&self, log: &mut UpdateLog) -> Result<bool, StoreError> {
        let Some(unfinished) = log.unfinished() else { return Ok(false) };
        let group = self.group(unfinished.group)?;
        let stride = match (unfinished.part, &group.side) {
            (Part::Side, Some(side)) => side.layout.stride(),
            _ => group.layout.stride(),
        };
        let mut state = self.cell(unfinished.slot)?.lock();
        let table = &mut state.tables[usize::from(unfinished.group.0)];
        if !table.put_back(unfinished.part, unfinished.row, &log.words()[..stride]) {
            let problem = "the row that was being changed is missing";
            return Err(SharedMemoryError::Damaged { path: log.path.clone(), problem }.into());
        }
        log.forget_unfinished();
        Ok(true)
    }
}

/// The tables of one slot, from the blocks that were found.
fn adopt_slot(slot: Slot, groups: &[Group], found: &mut [FoundGroup]) -> Result<Box<[Table]>, SharedMemoryError> {
    let mut tables = Vec::with_capacity(groups.len());
    for (group, found) in groups.iter().zip(found) {
        let adopted = Table::adopt(group, slot, std::mem::take(&mut found.tables[slot.0 as usize]));
        tables.push(adopted.ok_or_else(|| found.damaged("a slot's blocks do not fit together"))?);
    }
    Ok(tables.into_boxed_slice())
}

fn make_directory(directory: &Path) -> Result<(), SharedMemoryError> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    let made = builder.create(directory);
    made.map_err(|source| SharedMemoryError::Io { attempt: "make", path: directory.to_owned(), source })
}

/// Adds blocks to the tables of the slots that own them. Blocks of slots that do not exist are
/// ignored.
fn by_slot(blocks: Vec<FoundBlock>, tables: &mut [FoundTable], part: fn(&mut FoundTable) -> &mut Vec<FoundBlock>) {
    for block in blocks {
        if let Some(table) = tables.get_mut(block.owner as usize) {
            part(table).push(block);
        }
    }
}

#[cfg(test)]
#[cfg(all(target_os = "linux", not(miri)))]
mod tests {
    use super::*;
    use crate::log::RowLog;
    use crate::{
        Admission, AdmitAfter, Budget, BudgetUnit, Examples, FeatureKey, GroupId, Initializer, LifePolicy, Managed,
        Missing, Moment, Priority, RowSpec, ScoreRule, Seen, SparseOptimizer, UpdateCounts, ValueType,
    };
    use std::num::NonZeroU64;

    const GROUP: GroupId = GroupId(0);

    fn config() -> StoreConfig {
        let group = RowSpec {
            dim: 4,
            value_type: ValueType::F32,
            optimizer: SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-8 },
            life: LifePolicy::KeepAll,
            initializer: Initializer::Constant(0.5),
            zero_columns: 0,
            first_order: None,
            share: None,
        };
        StoreConfig { slots: 2, seed: 1, groups: vec![group], budget: None }
    }

    fn directory(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("rectrain-{name}-{}", std::process::id()));
        let _absent = std::fs::remove_dir_all(&directory);
        directory
    }

    /// Simulates a kill in the middle of a row: the row is restored, and the repeated update
    /// completes without applying a gradient twice.
    #[test]
    fn a_half_changed_row_is_restored_and_its_update_completed() {
        let directory = directory("half");
        let keys: Vec<FeatureKey> = (1..=9).map(|key| FeatureKey(key << 59)).collect();
        let gradients: Vec<f32> = (0..36).map(|value| value as f32 - 17.5).collect();
        let mut values = vec![0.0; 36];
        let own = Store::new(config()).unwrap();
        own.lookup(GROUP, &keys, Missing::Insert, &mut values).unwrap();
        own.update(GROUP, &keys, &gradients, 1).unwrap();
        {
            let (store, mut log, _) = Store::in_shared_memory(config(), &directory).unwrap();
            store.lookup(GROUP, &keys, Missing::Insert, &mut values).unwrap();
            log.begin();
            // The first five keys are done.
            store.update_logged(GROUP, &keys[..5], &gradients[..20], 1, &mut log).unwrap();
            let slot = store.slot_of(keys[5]);
            let mut state = store.cell(slot).unwrap().lock();
            let row = state.tables[0].row_number(keys[5]).unwrap();
            let words = state.tables[0].row_of(keys[5]).unwrap().to_vec();
            assert!(log.is_to_do());
            log.at(GROUP, slot);
            log.changing(Part::Rows, row, &words);
            let half: Vec<u32> = words.iter().enumerate().map(|(at, &word)| if at > 4 { 7 } else { word }).collect();
            assert!(state.tables[0].put_back(Part::Rows, row, &half));
        }
        let (store, mut log, reopened) = Store::in_shared_memory(config(), &directory).unwrap();
        assert_eq!(reopened, Reopened { rows: 9, repaired_rows: 1 });
        log.begin();
        let counts = store.update_logged(GROUP, &keys, &gradients, 1, &mut log).unwrap();
        log.finish();
        assert_eq!((counts.applied, log.update()), (9, 1));
        assert_eq!(store.digests(0..2).unwrap(), own.digests(0..2).unwrap());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// Panics at one of the steps of an update that change memory, as a kill would end it there.
    struct Dying {
        log: UpdateLog,
        steps_left: usize,
    }

    impl Dying {
        fn step(&mut self) {
            assert!(self.steps_left > 0, "killed");
            self.steps_left -= 1;
        }
    }

    impl RowLog for Dying {
        fn at(&mut self, group: GroupId, slot: Slot) {
            self.log.at(group, slot);
        }

        fn is_to_do(&mut self) -> bool {
            self.log.is_to_do()
        }

        fn changing(&mut self, part: Part, row: u32, words: &[u32]) {
            self.step();
            self.log.changing(part, row, words);
            self.step();
        }

        fn keep(&mut self) {
            self.step();
            self.log.keep();
            self.step();
        }

        fn changed(&mut self) {
            self.step();
            self.log.changed();
            self.step();
        }
    }

    /// The keys of the updates 0 to 4, as ranges of the test's keys.
    const UPDATES: [std::ops::Range<usize>; 5] = [0..26, 2..10, 0..12, 5..26, 0..26];

    fn train(store: &Store, keys: &[FeatureKey], dying: &mut Dying) {
        while let Some(range) = UPDATES.get(dying.log.update() as usize) {
            let (keys, count) = (&keys[range.clone()], u64::from(dying.log.update()) + 1);
            dying.log.begin();
            let gradients = vec![0.25; 4 * keys.len()];
            store.update_through(GROUP, keys, &gradients, count, Seen::default(), dying).unwrap();
            dying.log.finish();
        }
    }

    /// Keys are counted, forgotten, admitted and trained, under a kill at each step in turn.
    #[test]
    fn an_update_killed_at_any_step_counts_and_admits_once() {
        let life = LifePolicy::AdmitAfter(AdmitAfter { count: 3, counters: 1 });
        let config = StoreConfig { groups: vec![RowSpec { life, ..config().groups[0] }], ..config() };
        // All in one slot, which has 21 counters.
        let keys: Vec<FeatureKey> = (1..=26).map(|key| FeatureKey(key * 0x0432_1234_5678_9abc)).collect();
        let own = Store::new(config.clone()).unwrap();
        let mut counts = UpdateCounts::default();
        for (range, count) in UPDATES.into_iter().zip(1..) {
            counts += own.update(GROUP, &keys[range.clone()], &vec![0.25; 4 * range.len()], count).unwrap();
        }
        assert!(counts.admitted > 5 && counts.turned_away > 20 && counts.forgotten > 4, "{counts:?}");
        let directory = directory("dying");
        let mut kills = 0;
        loop {
            let (store, log, _) = Store::in_shared_memory(config.clone(), &directory).unwrap();
            let mut dying = Dying { log, steps_left: kills };
            let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| train(&store, &keys, &mut dying)));
            drop((store, dying));
            let (store, log, _) = Store::in_shared_memory(config.clone(), &directory).unwrap();
            train(&store, &keys, &mut Dying { log, steps_left: usize::MAX });
            assert_eq!(store.digests(0..2).unwrap(), own.digests(0..2).unwrap(), "killed at step {kills}");
            std::fs::remove_dir_all(&directory).unwrap();
            if killed.is_ok() {
                break;
            }
            kills += 1;
        }
        assert!(kills > 150, "{kills}");
    }

    /// Two groups that score their rows: one counts keys before it admits them, one has a share.
    fn managed(budget: u64) -> StoreConfig {
        let rule = ScoreRule::Score { decay_per_day_millionths: 100_000, positive_weight_thousandths: 3_000 };
        let counting = Managed {
            admission: Admission::Count { count: 2, counters: 42 },
            expire_after: NonZeroU64::new(86_400),
            score: rule,
            priority: Priority::Low,
        };
        let always = Managed { admission: Admission::Always, ..counting };
        let group = |life, share| RowSpec { life: LifePolicy::Managed(life), share, ..config().groups[0] };
        let groups = vec![group(counting, None), group(always, Some(500_000))];
        StoreConfig { groups, budget: Some(Budget { unit: BudgetUnit::Rows, limit: budget }), ..config() }
    }

    /// Steps of both groups, each an update of the log. They begin 5 hours apart.
    const STEPS: u64 = 6;

    fn score(store: &Store, keys: &[FeatureKey], dying: &mut Dying) {
        while u64::from(dying.log.update()) < STEPS {
            let number = u64::from(dying.log.update()) + 1;
            let keys = &keys[number as usize..number as usize + 20];
            let examples: Vec<Examples> =
                (0..20).map(|at| Examples { positive: (at + number as u32) % 3, negative: 1 }).collect();
            let seen = Seen { now: Moment(1_700_000_000 + number * 5 * 3_600), examples: &examples };
            store.lookup(GroupId(1), keys, Missing::Insert, &mut [0.0; 80]).unwrap();
            dying.log.begin();
            for group in [GroupId(0), GroupId(1)] {
                store.update_through(group, keys, &[0.25; 80], number, seen, dying).unwrap();
            }
            dying.log.finish();
        }
    }

    fn spread_keys(count: u64) -> Vec<FeatureKey> {
        (1..=count).map(|key| FeatureKey(rectrain_random::mix(key))).collect()
    }

    #[test]
    fn a_killed_update_counts_examples_once() {
        let keys = spread_keys(40);
        let directory = directory("scores");
        let open = || Store::in_shared_memory(managed(1_000), &directory).unwrap();
        let (own, log, _) = open();
        score(&own, &keys, &mut Dying { log, steps_left: usize::MAX });
        let expected = own.digests(0..2).unwrap();
        drop(own);
        std::fs::remove_dir_all(&directory).unwrap();
        for kill in (0..).step_by(7) {
            let (store, log, _) = open();
            let mut dying = Dying { log, steps_left: kill };
            let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| score(&store, &keys, &mut dying)));
            drop((store, dying));
            let (store, log, _) = open();
            score(&store, &keys, &mut Dying { log, steps_left: usize::MAX });
            assert_eq!(store.digests(0..2).unwrap(), expected, "killed at step {kill}");
            drop(store);
            std::fs::remove_dir_all(&directory).unwrap();
            if killed.is_ok() {
                assert!(kill > 300, "{kill}");
                break;
            }
        }
    }

    /// A slot that was killed while it was trimmed may be within its budget again. It is trimmed to
    /// the end all the same.
    #[test]
    fn a_killed_trimming_ends_the_same_when_repeated() {
        let keys = spread_keys(700);
        let directory = directory("trimming");
        let now = Moment(1_700_000_000 + 86_400);
        let open = || Store::in_shared_memory(managed(600), &directory).unwrap();
        let fill = |store: &Store| {
            for (group, part) in [(0, 0..450), (1, 300..700)] {
                let (group, keys) = (GroupId(group), &keys[part]);
                for (number, &key) in (1..).zip(keys) {
                    let seen = Seen { now: Moment(now.0 - number % 30 * 3_600), examples: &[] };
                    store.lookup(group, &[key], Missing::Insert, &mut [0.0; 4]).unwrap();
                    for update in [1, 2 + number % 3] {
                        store.update_seen(group, &[key], &[0.5; 4], update, seen).unwrap();
                    }
                }
            }
        };
        let keep = |store: &Store, steps: usize| {
            let mut left = steps;
            for slot in [Slot(0), Slot(1)] {
                let mut step = || {
                    assert!(left > 0, "killed");
                    left -= 1;
                };
                store.keep_budget_through(slot, now, &mut step).unwrap();
            }
        };
        let (own, _, _) = open();
        fill(&own);
        keep(&own, usize::MAX);
        let (expected, counts) = (own.digests(0..2).unwrap(), own.life_counts());
        assert!(counts[0].expired > 20 && counts[0].evicted > 5 && counts[1].evicted > 5, "{counts:?}");
        drop(own);
        std::fs::remove_dir_all(&directory).unwrap();
        for kill in (0..).step_by(3) {
            let (store, _, _) = open();
            fill(&store);
            let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| keep(&store, kill)));
            drop(store);
            let (store, _, _) = open();
            keep(&store, usize::MAX);
            assert_eq!(store.digests(0..2).unwrap(), expected, "killed at step {kill}");
            drop(store);
            std::fs::remove_dir_all(&directory).unwrap();
            if killed.is_ok() {
                break;
            }
        }
    }

    /// A process releases no block before it has found all of them.
    #[test]
    fn a_refusal_leaves_the_rows_as_they_are() {
        let directory = directory("refusal");
        let keys: Vec<FeatureKey> = (0..2_000).map(|key| FeatureKey(key << 53)).collect();
        let mut values = vec![0.0; 8_000];
        {
            let (store, _log, _) = Store::in_shared_memory(config(), &directory).unwrap();
            store.lookup(GROUP, &keys, Missing::Insert, &mut values).unwrap();
        }
        let path = directory.join("rows-0");
        let whole = std::fs::read(&path).unwrap();
        // The number of the last slot's last block. Changing it makes one block missing.
        let mut at = 64;
        let number = loop {
            let bytes = u64::from_le_bytes(whole[at..at + 8].try_into().unwrap()) as usize;
            if whole[at + bytes..at + bytes + 8] == [0; 8] {
                break at + 24;
            }
            at += bytes;
        };
        let mut damaged = whole.clone();
        damaged[number..number + 4].copy_from_slice(&1_000_u32.to_le_bytes());
        std::fs::write(&path, &damaged).unwrap();
        assert!(Store::in_shared_memory(config(), &directory).is_err());
        assert!(std::fs::read(&path).unwrap() == damaged);
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(Store::in_shared_memory(config(), &directory).unwrap().2.rows, 2_000);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
