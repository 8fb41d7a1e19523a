//! The bytes of a snapshot, checked, as rows.

use super::spec::GroupRecord;
use super::{CHECKSUM_BYTES, HEADER_BYTES, MAGIC, RestoredSlot, SlotContent, VERSION};
use crate::index::Hash;
use crate::key::key_of_bytes;
use crate::layout::RowLayout;
use crate::life::{RowLife, with_life};
use crate::side_table::SideLayout;
use crate::{FeatureKey, GroupId, RowSpec, Slot, SnapshotError, StoreConfig, slot_of};
use xxhash_rust::xxh3::xxh3_64;

/// A snapshot that has passed every check, ready to become tables.
pub(crate) struct CheckedSnapshot<'b> {
    pub(crate) slot: Slot,
    pub(crate) content: SlotContent,
    /// For each group the bytes of its rows, by rising key.
    pub(crate) groups: Vec<&'b [u8]>,
    /// For each group the stored blocks of its side table.
    pub(crate) side: Vec<Vec<u32>>,
    /// For each group the removed keys, rising.
    pub(crate) removed: Vec<Vec<FeatureKey>>,
}

impl CheckedSnapshot<'_> {
    /// The rows and removed keys, in a store made with `config`.
    pub(crate) fn counts(&self, config: &StoreConfig) -> RestoredSlot {
        let rows = |(spec, bytes): (&RowSpec, &&[u8])| (bytes.len() / RowLayout::new(spec).row_bytes()) as u64;
        RestoredSlot {
            slot: self.slot,
            content: self.content,
            rows: config.groups.iter().zip(&self.groups).map(rows).sum(),
            removed: self.removed.iter().map(|keys| keys.len() as u64).sum(),
        }
    }
}

/// Reads a snapshot for a store made with `config`.
pub(crate) fn read<'b>(config: &StoreConfig, bytes: &'b [u8]) -> Result<CheckedSnapshot<'b>, SnapshotError> {
    let mut reader = Reader { rest: checked_body(bytes)? };
    reader.take::<12>()?;
    let slot = Slot(reader.u32()?);
    check_job(config, slot, &mut reader)?;
    reader.take::<8>()?;
    let content = read_content(&mut reader)?;
    let records = read_records(config, content, &mut reader)?;
    check_length(config, &records, reader.rest.len())?;
    let mut parts = Parts { config, slot, rest: reader.rest };
    let (mut removed, mut groups, mut side) = (Vec::new(), Vec::new(), Vec::new());
    for (group, record) in (0..).map(GroupId).zip(&records) {
        removed.push(parts.removed(group, record)?);
    }
    for (group, record) in (0..).map(GroupId).zip(&records) {
        groups.push(parts.rows(group, record)?);
    }
    for (group, record) in (0..).map(GroupId).zip(&records) {
        side.push(parts.blocks(group, record)?);
    }
    Ok(CheckedSnapshot { slot, content, groups, side, removed })
}

/// The configuration of the store that wrote a snapshot, for readers without a manifest.
pub(crate) fn config_of(bytes: &[u8]) -> Result<StoreConfig, SnapshotError> {
    let mut reader = Reader { rest: checked_body(bytes)? };
    reader.take::<16>()?;
    let (slots, groups, seed) = (reader.u32()?, reader.u32()?, reader.u64()?);
    reader.take::<16>()?;
    let mut specs = Vec::new();
    for _ in 0..groups {
        specs.push(GroupRecord::read(&mut reader)?.spec);
    }
    let config = StoreConfig { slots, seed, groups: specs, budget: None };
    config.validate()?;
    Ok(config)
}

/// Everything but the checksum, once magic, version, length and checksum are right.
fn checked_body(bytes: &[u8]) -> Result<&[u8], SnapshotError> {
    let actual = bytes.len();
    let mut reader = Reader { rest: bytes };
    let is_ours = reader.take::<8>().is_ok_and(|magic| magic == *MAGIC);
    if !is_ours || actual < HEADER_BYTES + CHECKSUM_BYTES {
        return Err(SnapshotError::NotASnapshot { actual });
    }
    let found = reader.u32()?;
    if found != VERSION {
        return Err(SnapshotError::Version { found, supported: VERSION });
    }
    reader.take::<20>()?;
    let expected = reader.u64()?;
    let actual = actual as u64;
    if expected != actual {
        return Err(SnapshotError::Length { expected, actual });
    }
    let (body, checksum) = bytes.split_at(bytes.len() - CHECKSUM_BYTES);
    let expected = Reader { rest: checksum }.u64()?;
    let actual = xxh3_64(body);
    if expected != actual {
        return Err(SnapshotError::Checksum { expected, actual });
    }
    Ok(body)
}

/// Compares slot count, slot, group count and seed with the store's.
fn check_job(config: &StoreConfig, slot: Slot, reader: &mut Reader<'_>) -> Result<(), SnapshotError> {
    let (slots, groups, seed) = (reader.u32()?, reader.u32()? as usize, reader.u64()?);
    if slots != config.slots {
        return Err(SnapshotError::Slots { found: slots, expected: config.slots });
    }
    if slot.0 >= slots {
        return Err(SnapshotError::Slot { slot, slots });
    }
    if seed != config.seed {
        return Err(SnapshotError::Seed { found: seed, expected: config.seed });
    }
    if groups != config.groups.len() {
        return Err(SnapshotError::Groups { found: groups, expected: config.groups.len() });
    }
    Ok(())
}

fn read_content(reader: &mut Reader<'_>) -> Result<SlotContent, SnapshotError> {
    let (kind, reserved) = (reader.u32()?, reader.u32()?);
    if reserved != 0 {
        return Err(SnapshotError::Field { field: "reserved word", found: u64::from(reserved) });
    }
    match kind {
        0 => Ok(SlotContent::Whole),
        1 => Ok(SlotContent::Changes),
        found => Err(SnapshotError::Field { field: "kind", found: u64::from(found) }),
    }
}

/// Reads the groups' records, which must continue the store's specs.
fn read_records(
    config: &StoreConfig,
    content: SlotContent,
    reader: &mut Reader<'_>,
) -> Result<Vec<GroupRecord>, SnapshotError> {
    let mut records = Vec::with_capacity(config.groups.len());
    for (position, expected) in config.groups.iter().enumerate() {
        let record = GroupRecord::read(reader)?;
        if !expected.continues(&record.spec) {
            return Err(SnapshotError::Spec {
                group: GroupId(position as u16),
                found: Box::new(record.spec),
                expected: Box::new(*expected),
            });
        }
        records.push(record);
    }
    if content == SlotContent::Whole
        && let Some(record) = records.iter().find(|record| record.removed != 0)
    {
        return Err(SnapshotError::Field { field: "count of removed keys", found: record.removed });
    }
    Ok(records)
}

fn block_bytes(config: &StoreConfig, spec: &RowSpec) -> usize {
    spec.life.side_layout(config.slots).map_or(0, |layout| layout.stored_bytes())
}

/// Whether `actual` is exactly the length of the counted keys, rows and blocks.
fn check_length(config: &StoreConfig, records: &[GroupRecord], actual: usize) -> Result<(), SnapshotError> {
    let mut expected = 0_u128;
    for record in records {
        expected += size_of::<u64>() as u128 * u128::from(record.removed);
        expected += RowLayout::new(&record.spec).row_bytes() as u128 * u128::from(record.rows);
        expected += block_bytes(config, &record.spec) as u128 * u128::from(record.blocks);
    }
    if expected == actual as u128 {
        return Ok(());
    }
    Err(SnapshotError::Length { expected: u64::try_from(expected).unwrap_or(u64::MAX), actual: actual as u64 })
}

/// The part of a snapshot behind the records, whose length has been checked.
struct Parts<'c, 'b> {
    config: &'c StoreConfig,
    slot: Slot,
    rest: &'b [u8],
}

impl<'b> Parts<'_, 'b> {
    fn cut(&mut self, bytes: usize) -> &'b [u8] {
        let (own, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        own
    }

    fn removed(&mut self, group: GroupId, record: &GroupRecord) -> Result<Vec<FeatureKey>, SnapshotError> {
        let bytes = self.cut(record.removed as usize * size_of::<u64>());
        let keys = bytes.as_chunks::<8>().0.iter().map(|bytes| FeatureKey(u64::from_le_bytes(*bytes)));
        let keys: Vec<FeatureKey> = keys.collect();
        self.check_keys(keys.iter().copied(), group)?;
        Ok(keys)
    }

    fn rows(&mut self, group: GroupId, record: &GroupRecord) -> Result<&'b [u8], SnapshotError> {
        let row_bytes = RowLayout::new(&record.spec).row_bytes();
        let rows = self.cut(row_bytes * record.rows as usize);
        self.check_keys(rows.chunks_exact(row_bytes).map(key_of_bytes), group)?;
        Ok(rows)
    }

    fn blocks(&mut self, group: GroupId, record: &GroupRecord) -> Result<Vec<u32>, SnapshotError> {
        let Some(layout) = record.spec.life.side_layout(self.config.slots) else { return Ok(Vec::new()) };
        let bytes = self.cut(layout.stored_bytes() * record.blocks as usize);
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let mut next = 0;
        for block in words.chunks_exact(layout.stride()) {
            let number = block[0];
            if number < next || number >= layout.blocks || !self.is_block(&record.spec, layout, block) {
                return Err(SnapshotError::Block { group, number });
            }
            next = number + 1;
        }
        Ok(words)
    }

    /// Whether the group's policy can have written a block.
    fn is_block(&self, spec: &RowSpec, layout: SideLayout, stored: &[u32]) -> bool {
        let owns = |key| slot_of(key, self.config.slots) == self.slot && layout.number_of(Hash::of(key)) == stored[0];
        with_life!(spec.life, life => life.is_block(&stored[1..], owns))
    }

    /// Whether keys rise and belong to the slot.
    fn check_keys(&self, keys: impl Iterator<Item = FeatureKey>, group: GroupId) -> Result<(), SnapshotError> {
        let slot = self.slot;
        let mut earlier = None;
        for key in keys {
            if slot_of(key, self.config.slots) != slot {
                return Err(SnapshotError::ForeignKey { slot, group, key });
            }
            if earlier.is_some_and(|earlier| earlier >= key) {
                return Err(SnapshotError::KeyOrder { group, key });
            }
            earlier = Some(key);
        }
        Ok(())
    }
}

/// Takes numbers off the front of bytes.
pub(super) struct Reader<'b> {
    rest: &'b [u8],
}

impl Reader<'_> {
    pub(super) fn take<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        let (taken, rest) = self
            .rest
            .split_first_chunk()
            .ok_or(SnapshotError::Length { expected: N as u64, actual: self.rest.len() as u64 })?;
        self.rest = rest;
        Ok(*taken)
    }

    pub(super) fn u32(&mut self) -> Result<u32, SnapshotError> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, SnapshotError> {
        self.take().map(u64::from_le_bytes)
    }

    pub(super) fn f32(&mut self) -> Result<f32, SnapshotError> {
        self.take().map(f32::from_le_bytes)
    }

    pub(super) fn f64(&mut self) -> Result<f64, SnapshotError> {
        self.take().map(f64::from_le_bytes)
    }
}
