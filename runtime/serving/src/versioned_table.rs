//! The rows of one row group of a model. A table never changes: a change makes a newer version,
//! which shares most of its memory with the one before. So a reader of a version sees its rows
//! whole, and a second version costs memory for the changed rows and for the index.
//!
//! ```text
//! parts   by the first bits of the key    [key, page, row] [key, page, row] …   by rising key
//! pages   up to PAGE_ROWS rows each       [values of a row] [values of a row] …
//! ```
//!
//! - A changed row goes to a new page, and its entry in the index names that page. Values that did
//!   not change stay where they are.
//! - A part of the index without changes is shared. Keys are hashes, so a change of few rows
//!   touches few parts, and one of many rows touches all of them.
//! - A page holds *dead* rows once newer versions have replaced them. A change also moves the
//!   living rows out of the pages with the fewest. So dead rows take about a quarter of the memory
//!   of the living ones at most, and [`SPARE_PAGES`].

use std::sync::Arc;

use crate::table::{KeyRange, Table};

/// Rows of a page.
const PAGE_ROWS: usize = 1 << 12;
/// The rows of a part, on average, are between a quarter of this and twice this.
const PART_ROWS: usize = 128;
/// Entries on each side of the expected one that are looked at first.
const NEAR: usize = 12;
/// Pages that may be empty, whatever the number of rows.
const SPARE_PAGES: usize = 16;

/// See the module documentation.
#[derive(Debug, Clone)]
pub struct VersionedTable {
    /// Values of a row.
    dim: usize,
    rows: usize,
    /// Part `p` has the keys with `p` as their first `part_bits` bits.
    part_bits: u32,
    parts: Vec<Arc<[Entry]>>,
    pages: Vec<Page>,
}

/// A key, and the place of its row.
#[derive(Debug, Clone, Copy)]
struct Entry {
    key: u64,
    page: u32,
    row: u32,
}

#[derive(Debug, Clone)]
struct Page {
    /// `[rows, dim]`. Without rows if none of them lives.
    values: Arc<[f32]>,
    /// Rows that the index names.
    living: usize,
}

impl VersionedTable {
    /// A table without rows. A row has `dim` values.
    #[must_use]
    pub fn new(dim: usize) -> Self {
        Builder::new(dim).finish()
    }

    /// Values of a row.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether it has no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// The keys and values of all rows, by rising key.
    pub fn rows(&self) -> impl Iterator<Item = (u64, &[f32])> {
        self.parts.iter().flat_map(|part| part.iter()).map(|entry| (entry.key, self.values_of(entry)))
    }

    /// The values of a key. `None` if it has no row.
    #[must_use]
    pub fn row(&self, key: u64) -> Option<&[f32]> {
        let part = self.parts.get(part_of(key, self.part_bits))?;
        let entry = find(part, key, self.part_bits)?;
        Some(self.values_of(entry))
    }

    fn values_of(&self, entry: &Entry) -> &[f32] {
        let start = entry.row as usize * self.dim;
        &self.pages[entry.page as usize].values[start..start + self.dim]
    }

    /// A table of the rows for which `is_kept` has true at their position, by rising key. Rows
    /// without a value go too.
    pub(crate) fn kept(&self, is_kept: &[bool]) -> Self {
        let mut kept = Builder::new(self.dim);
        for ((key, values), _) in self.rows().zip(is_kept).filter(|(_, is_kept)| **is_kept) {
            kept.push(key, values);
        }
        kept.finish()
    }

    /// The version without the rows of the `removed` ranges, which rise and do not overlap. Then
    /// the rows of `changed` replace the ones of their keys, or join. `gone` sees each row that is
    /// not in the newer version as it was. Takes time in proportion to the changes and to the keys,
    /// not to the values.
    #[must_use]
    pub(crate) fn with_changes(
        &self,
        removed: &[KeyRange],
        changed: &Table,
        mut gone: impl FnMut(u64, &[f32]),
    ) -> Self {
        let mut change = Change::of(self, removed, changed);
        let parts: Vec<_> = self
            .parts
            .iter()
            .zip(last_keys(self.part_bits))
            .map(|(part, last)| match change.touches(part, last) {
                true => change.apply(part, last, &mut gone).into(),
                false => Arc::clone(part),
            })
            .collect();
        let Change { pages, new, moved, .. } = change;
        Self::of(self.dim, self.part_bits, parts, pages.finish([new, moved]))
    }

    /// Marks the pages whose living rows move in a change of `changed` rows; none if little memory
    /// is lost. A page that is not full counts as a full one: otherwise many small changes would
    /// leave many small pages.
    fn sparse_pages(&self, changed: usize) -> Vec<bool> {
        let mut used: Vec<usize> = (0..self.pages.len()).filter(|page| self.pages[*page].living > 0).collect();
        let pages = used.len() + changed.div_ceil(PAGE_ROWS);
        let allowed = self.rows + self.rows / 4 + SPARE_PAGES * PAGE_ROWS;
        let mut excess = (pages * PAGE_ROWS).saturating_sub(allowed);
        if excess == 0 {
            return Vec::new();
        }
        let mut sparse = vec![false; self.pages.len()];
        used.sort_by_key(|page| self.pages[*page].living);
        for page in used {
            let free = PAGE_ROWS - self.pages[page].living;
            if excess == 0 || free == 0 {
                break;
            }
            excess = excess.saturating_sub(free);
            sparse[page] = true;
        }
        sparse
    }

    /// A table of these parts. Divides them anew if they have become too large or too small.
    fn of(dim: usize, part_bits: u32, parts: Vec<Arc<[Entry]>>, pages: Vec<Page>) -> Self {
        let rows = parts.iter().map(|part| part.len()).sum();
        let wanted = part_bits_of(rows);
        if part_bits.abs_diff(wanted) <= 1 {
            return Self { dim, rows, part_bits, parts, pages };
        }
        let entries: Vec<Entry> = parts.iter().flat_map(|part| part.iter().copied()).collect();
        Self { dim, rows, part_bits: wanted, parts: divide(&entries, wanted), pages }
    }
}

impl PartialEq for VersionedTable {
    /// Whether keys and values are equal, wherever they are.
    fn eq(&self, other: &Self) -> bool {
        self.dim == other.dim && self.rows == other.rows && self.rows().eq(other.rows())
    }
}

impl From<&Table> for VersionedTable {
    fn from(table: &Table) -> Self {
        let mut all = Builder::new(table.dim());
        table.rows().for_each(|(key, values)| all.push(key, values));
        all.finish()
    }
}

/// A change on its way through the parts of a table, by rising key.
struct Change<'t> {
    before: &'t VersionedTable,
    /// The ranges that later keys may be in.
    removed: &'t [KeyRange],
    changed: &'t Table,
    /// Changed rows that were set.
    done: usize,
    /// Whether the living rows of each page move.
    sparse: Vec<bool>,
    pages: Pages,
    /// Changed rows and moved rows are apart. Rows that change often then die together.
    new: Filling,
    moved: Filling,
}

impl<'t> Change<'t> {
    fn of(before: &'t VersionedTable, removed: &'t [KeyRange], changed: &'t Table) -> Self {
        Self {
            before,
            removed,
            changed,
            done: 0,
            sparse: before.sparse_pages(changed.keys().len()),
            pages: Pages::of(before.dim, before.pages.clone()),
            new: Filling::default(),
            moved: Filling::default(),
        }
    }

    /// Whether a part with keys up to `last` changes. All parts before it are done.
    fn touches(&self, part: &[Entry], last: u64) -> bool {
        self.next_key().is_some_and(|key| key <= last)
            || self.removed.first().is_some_and(|range| range.first <= last)
            || (!self.sparse.is_empty() && part.iter().any(|entry| self.is_sparse(entry)))
    }

    fn apply(&mut self, part: &[Entry], last: u64, gone: &mut impl FnMut(u64, &[f32])) -> Vec<Entry> {
        let before = self.before;
        let mut next = Vec::with_capacity(part.len());
        for entry in part {
            while self.next_key().is_some_and(|key| key < entry.key) {
                next.push(self.set());
            }
            let is_replaced = self.next_key() == Some(entry.key);
            if self.removes(entry.key) || is_replaced {
                gone(entry.key, before.values_of(entry));
                self.pages.release(entry);
            } else if self.is_sparse(entry) {
                self.pages.release(entry);
                next.push(self.pages.push(&mut self.moved, entry.key, before.values_of(entry)));
            } else {
                next.push(*entry);
            }
        }
        while self.next_key().is_some_and(|key| key <= last) {
            next.push(self.set());
        }
        // A range that ends here touches no later part.
        self.pass_ranges(|range| range.last <= last);
        next
    }

    /// The key of the next changed row.
    fn next_key(&self) -> Option<u64> {
        self.changed.keys().get(self.done).copied()
    }

    /// Sets the next changed row.
    fn set(&mut self) -> Entry {
        let (row, dim) = (self.done, self.before.dim);
        self.done += 1;
        let values = &self.changed.values()[row * dim..(row + 1) * dim];
        self.pages.push(&mut self.new, self.changed.keys()[row], values)
    }

    /// Whether a range has this key. It is above all keys that this was asked for.
    fn removes(&mut self, key: u64) -> bool {
        self.pass_ranges(|range| range.last < key);
        self.removed.first().is_some_and(|range| range.first <= key)
    }

    fn pass_ranges(&mut self, is_past: impl Fn(&KeyRange) -> bool) {
        while let Some((range, later)) = self.removed.split_first()
            && is_past(range)
        {
            self.removed = later;
        }
    }

    fn is_sparse(&self, entry: &Entry) -> bool {
        self.sparse.get(entry.page as usize) == Some(&true)
    }
}

/// Takes rows by rising key.
pub(crate) struct Builder {
    pages: Pages,
    filling: Filling,
    entries: Vec<Entry>,
}

impl Builder {
    /// For rows of `dim` values.
    pub(crate) fn new(dim: usize) -> Self {
        Self { pages: Pages::of(dim, Vec::new()), filling: Filling::default(), entries: Vec::new() }
    }

    /// The last key.
    pub(crate) fn last_key(&self) -> Option<u64> {
        self.entries.last().map(|entry| entry.key)
    }

    /// Adds a row. Its key is above all keys so far.
    pub(crate) fn push(&mut self, key: u64, values: &[f32]) {
        self.entries.push(self.pages.push(&mut self.filling, key, values));
    }

    pub(crate) fn finish(self) -> VersionedTable {
        let part_bits = part_bits_of(self.entries.len());
        let dim = self.pages.dim;
        VersionedTable {
            dim,
            rows: self.entries.len(),
            part_bits,
            parts: divide(&self.entries, part_bits),
            pages: self.pages.finish([self.filling]),
        }
    }
}

/// The pages of a version that is being made.
struct Pages {
    dim: usize,
    pages: Vec<Page>,
    /// Pages without a living row in the version before. Their places are taken again.
    free: Vec<u32>,
}

/// A page that is being filled.
#[derive(Default)]
struct Filling {
    /// Its place. It means nothing without rows.
    page: u32,
    rows: usize,
    values: Vec<f32>,
}

impl Pages {
    fn of(dim: usize, pages: Vec<Page>) -> Self {
        let free = (0..).zip(&pages).filter(|(_, page)| page.living == 0).map(|(place, _)| place).collect();
        Self { dim, pages, free }
    }

    /// Adds a row to the page that is being filled, or to a new one if it is full.
    fn push(&mut self, filling: &mut Filling, key: u64, values: &[f32]) -> Entry {
        if filling.rows == PAGE_ROWS {
            self.seal(std::mem::take(filling));
        }
        if filling.rows == 0 {
            filling.page = self.free.pop().unwrap_or_else(|| {
                self.pages.push(Page { values: Arc::default(), living: 0 });
                (self.pages.len() - 1) as u32
            });
        }
        let entry = Entry { key, page: filling.page, row: filling.rows as u32 };
        filling.values.extend_from_slice(values);
        filling.rows += 1;
        entry
    }

    fn seal(&mut self, filling: Filling) {
        if filling.rows > 0 {
            self.pages[filling.page as usize] = Page { values: filling.values.into(), living: filling.rows };
        }
    }

    /// A row of the version before is not in this page any more.
    fn release(&mut self, entry: &Entry) {
        self.pages[entry.page as usize].living -= 1;
    }

    /// All pages. Those without a living row hold no memory.
    fn finish(mut self, filling: impl IntoIterator<Item = Filling>) -> Vec<Page> {
        filling.into_iter().for_each(|filling| self.seal(filling));
        for page in self.pages.iter_mut().filter(|page| page.living == 0) {
            page.values = Arc::default();
        }
        self.pages
    }
}

/// The bits of the number of parts for so many rows.
fn part_bits_of(rows: usize) -> u32 {
    (rows / PART_ROWS).checked_ilog2().map_or(0, |bits| bits + 1)
}

/// The part of a key: its first bits.
fn part_of(key: u64, part_bits: u32) -> usize {
    key.checked_shr(u64::BITS - part_bits).unwrap_or(0) as usize
}

/// The entry of a key in its part. Keys are uniform, so it is near its expected place.
fn find(part: &[Entry], key: u64, part_bits: u32) -> Option<&Entry> {
    let within = u128::from(key.checked_shl(part_bits).unwrap_or(0));
    let expected = ((within * part.len() as u128) >> u64::BITS) as usize;
    let near = part.get(expected.saturating_sub(NEAR)..(expected + NEAR).min(part.len()))?;
    // Most keys are found here, without a guess of the processor that may be wrong at each step.
    let before = near.iter().filter(|entry| entry.key < key).count();
    match near.get(before) {
        Some(entry) if entry.key == key => Some(entry),
        // Between two keys of the range.
        Some(_) if before > 0 => None,
        _ => part.binary_search_by_key(&key, |entry| entry.key).ok().and_then(|place| part.get(place)),
    }
}

/// The greatest key of each part.
fn last_keys(part_bits: u32) -> impl Iterator<Item = u64> {
    let rest = u64::MAX.checked_shr(part_bits).unwrap_or(0);
    (0..1_u64 << part_bits).map(move |part| part.checked_shl(u64::BITS - part_bits).unwrap_or(0) | rest)
}

/// Divides entries of rising keys into parts.
fn divide(entries: &[Entry], part_bits: u32) -> Vec<Arc<[Entry]>> {
    let mut rest = entries;
    let parts = last_keys(part_bits).map(|last| {
        let (own, others) = rest.split_at(rest.partition_point(|entry| entry.key <= last));
        rest = others;
        own.into()
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn spread(number: u64) -> u64 {
        number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Rows of one value.
    fn table(mut rows: Vec<(u64, f32)>) -> Table {
        rows.sort_by_key(|(key, _)| *key);
        let (keys, values) = rows.into_iter().unzip();
        Table::of(1, keys, values).expect("the keys differ")
    }

    fn rows(table: &VersionedTable) -> Vec<(u64, f32)> {
        table.rows().map(|(key, values)| (key, values[0])).collect()
    }

    /// Rows of the memory of all pages.
    fn held(table: &VersionedTable) -> usize {
        table.pages.iter().map(|page| page.values.len() / table.dim).sum()
    }

    /// Rows of the memory that the table does not share with the other one.
    fn own(table: &VersionedTable, other: &VersionedTable) -> usize {
        let is_shared = |page: &&Page| !other.pages.iter().any(|other| Arc::ptr_eq(&other.values, &page.values));
        table.pages.iter().filter(is_shared).map(|page| page.values.len() / table.dim).sum()
    }

    /// The living rows of each page are the ones that the index names.
    fn assert_is_sound(table: &VersionedTable) {
        let mut living = vec![0; table.pages.len()];
        let mut last = None;
        for (place, part) in table.parts.iter().enumerate() {
            for entry in part.iter() {
                assert_eq!(part_of(entry.key, table.part_bits), place);
                assert!(last.is_none_or(|last| last < entry.key), "keys do not rise");
                last = Some(entry.key);
                living[entry.page as usize] += 1;
            }
        }
        assert_eq!(table.pages.iter().map(|page| page.living).collect::<Vec<_>>(), living);
        assert_eq!(table.len(), living.iter().sum::<usize>());
        assert!(table.pages.iter().all(|page| page.living > 0 || page.values.is_empty()));
    }

    #[test]
    fn a_row_is_found_among_uniform_and_skewed_keys() {
        let skewed: fn(u64) -> u64 = |row| u64::MAX - row * row;
        for (name, key_of) in [("uniform", spread as fn(u64) -> u64), ("skewed", skewed)] {
            for count in [0, 1, 2, 17, 1000, 10_000] {
                let table = table((0..count).map(|row| (key_of(2 * row), row as f32)).collect());
                let table = VersionedTable::from(&table);
                assert_is_sound(&table);
                for row in 0..count {
                    assert_eq!(table.row(key_of(2 * row)), Some(&[row as f32][..]), "{name}, {count} rows");
                    assert_eq!(table.row(key_of(2 * row + 1)), None, "{name}, {count} rows");
                }
            }
        }
    }

    #[test]
    fn parts_cover_all_keys() {
        for bits in [0, 1, 7] {
            let last: Vec<u64> = last_keys(bits).collect();
            assert_eq!((last.len(), last.last()), (1 << bits, Some(&u64::MAX)));
            for (place, last) in last.into_iter().enumerate() {
                assert_eq!(part_of(last, bits), place);
                assert!(last == u64::MAX || part_of(last + 1, bits) == place + 1);
            }
        }
        assert_eq!([0, 127, 128, 255, 256, 1 << 20].map(part_bits_of), [0, 0, 1, 1, 2, 14]);
    }

    #[test]
    fn rows_that_are_not_kept_are_gone_with_their_values() {
        let all = Table::of(2, vec![1, 5, 9], vec![0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).expect("the keys rise");
        let kept = VersionedTable::from(&all).kept(&[true, false, true]);
        let expected = Table::of(2, vec![1, 9], vec![0.1, 0.2, 0.5, 0.6]).expect("the keys rise");
        assert_eq!(kept, VersionedTable::from(&expected));
        assert_eq!(kept.kept(&[false]), VersionedTable::new(2));
    }

    #[test]
    fn changes_remove_ranges_and_then_set_rows() {
        let before = table(vec![(10, 1.0), (20, 2.0), (30, 3.0), (40, 4.0), (50, 5.0)]);
        let changed = table(vec![(5, 0.5), (30, 3.5), (35, 3.6), (50, 5.5), (60, 6.0)]);
        let removed = [KeyRange { first: 0, last: 10 }, KeyRange { first: 25, last: 40 }];
        let (first, mut gone) = (VersionedTable::from(&before), Vec::new());
        let found = first.with_changes(&removed, &changed, |key, values| gone.push((key, values[0])));
        assert_is_sound(&found);
        assert_eq!(rows(&found), [(5, 0.5), (20, 2.0), (30, 3.5), (35, 3.6), (50, 5.5), (60, 6.0)]);
        assert_eq!(gone, [(10, 1.0), (30, 3.0), (40, 4.0), (50, 5.0)]);
        assert_eq!(first, VersionedTable::from(&before), "the version before has changed");
        let none = Table::new(1);
        assert_eq!(first.with_changes(&[], &none, |_, _| ()), first);
        assert_eq!(VersionedTable::new(1).with_changes(&removed, &changed, |_, _| ()), VersionedTable::from(&changed));
        let all = [KeyRange { first: 0, last: u64::MAX }];
        assert_eq!(first.with_changes(&all, &none, |_, _| ()), VersionedTable::new(1));
    }

    #[test]
    fn a_version_shares_the_memory_of_the_rows_that_did_not_change() {
        const ROWS: u64 = 200_000;
        let first = VersionedTable::from(&table((0..ROWS).map(|row| (spread(row), 0.0)).collect()));
        let one = first.with_changes(&[], &table(vec![(spread(7), 1.0)]), |_, _| ());
        assert_eq!(own(&one, &first), 1);
        let shared = one.parts.iter().zip(&first.parts).filter(|(one, first)| Arc::ptr_eq(one, first)).count();
        assert_eq!(shared, first.parts.len() - 1);
        // A tenth of the rows changes each time, and always other ones.
        let (mut version, mut most) = (first, 0);
        for round in 0..40 {
            let changed = table((0..ROWS / 10).map(|row| (spread(row * 10 + round % 10), round as f32)).collect());
            let next = version.with_changes(&[], &changed, |_, _| ());
            assert_is_sound(&next);
            most = most.max(held(&next));
            assert!(own(&next, &version) < ROWS as usize * 3 / 4, "round {round}: {}", own(&next, &version));
            version = next;
        }
        let bound = ROWS as usize * 3 / 2 + SPARE_PAGES * PAGE_ROWS;
        assert!(most < bound, "{most} rows of memory for {ROWS} rows, at most {bound}");
        assert!(rows(&version).iter().all(|(_, value)| *value >= 30.0));
    }

    #[test]
    fn many_small_changes_leave_few_pages() {
        let mut version = VersionedTable::new(1);
        for row in 0..500 {
            version = version.with_changes(&[], &table(vec![(spread(row), row as f32)]), |_, _| ());
            assert_is_sound(&version);
            assert!(version.pages.len() <= SPARE_PAGES + 4, "{} pages", version.pages.len());
        }
        assert_eq!(version.len(), 500);
        assert_eq!(version, VersionedTable::from(&table((0..500).map(|row| (spread(row), row as f32)).collect())));
    }

    #[test]
    fn parts_follow_the_number_of_rows() {
        let small = VersionedTable::from(&table((0..100).map(|row| (spread(row), 0.0)).collect()));
        let grown = small.with_changes(&[], &table((100..50_000).map(|row| (spread(row), 1.0)).collect()), |_, _| ());
        assert_is_sound(&grown);
        assert_eq!(grown.part_bits, part_bits_of(50_000));
        let shrunk = grown.with_changes(&[KeyRange { first: 1 << 55, last: u64::MAX }], &Table::new(1), |_, _| ());
        assert_is_sound(&shrunk);
        assert!(shrunk.part_bits <= 2 && shrunk.len() < 300, "{} bits, {} rows", shrunk.part_bits, shrunk.len());
        assert_eq!(shrunk.row(spread(0)), Some(&[0.0][..]));
    }

    proptest! {
        /// After any changes, the rows are the ones of a map with the same changes, and `gone` has
        /// seen all others.
        #[test]
        fn a_table_is_a_map_of_its_changes(
            rounds in prop::collection::vec(
                (prop::collection::btree_map(0_u64..600, any::<i16>(), 0..200), prop::collection::vec(0_u64..600, 0..3)),
                1..12,
            ),
        ) {
            const STEP: u64 = u64::MAX / 600;
            let (mut found, mut expected) = (VersionedTable::new(1), BTreeMap::new());
            for (changed, removed) in rounds {
                let (before, map_before) = (found.clone(), expected.clone());
                let mut removed: Vec<u64> = removed;
                removed.sort_unstable();
                removed.dedup();
                let ranges: Vec<KeyRange> =
                    removed.iter().map(|key| KeyRange { first: key * STEP, last: key * STEP + STEP / 2 }).collect();
                removed.iter().for_each(|key| { expected.remove(&(key * STEP)); });
                let changed: Vec<(u64, f32)> =
                    changed.into_iter().map(|(key, value)| (key * STEP, f32::from(value))).collect();
                expected.extend(changed.iter().copied());
                let mut gone = Vec::new();
                let next = found.with_changes(&ranges, &table(changed.clone()), |key, row| gone.push((key, row[0])));
                assert_is_sound(&next);
                prop_assert_eq!(rows(&next), expected.iter().map(|(key, value)| (*key, *value)).collect::<Vec<_>>());
                prop_assert_eq!(rows(&before), map_before.iter().map(|(key, value)| (*key, *value)).collect::<Vec<_>>());
                let is_gone = |key: &u64| ranges.iter().any(|range| (range.first..=range.last).contains(key))
                    || changed.iter().any(|(changed, _)| changed == key);
                let all_gone: Vec<(u64, f32)> =
                    map_before.into_iter().filter(|(key, _)| is_gone(key)).collect();
                prop_assert_eq!(gone, all_gone);
                found = next;
            }
        }
    }
}
