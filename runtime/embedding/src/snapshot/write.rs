//! Copied rows as the bytes of a snapshot.

use super::sort::sorted;
use super::spec::{GroupRecord, record_bytes};
use super::{CHECKSUM_BYTES, HEADER_BYTES, MAGIC, SlotContent, SlotRows, SlotSnapshot, VERSION, blocks_in_order};
use crate::key::key_of;
use crate::layout::RowLayout;
use crate::{FeatureKey, Slot, StoreConfig};
use xxhash_rust::xxh3::xxh3_64;

/// The keys of a group's rows, rising, each with the number of its row among them.
type OrderedKeys = Vec<(FeatureKey, u32)>;

/// Writes a snapshot.
pub(crate) fn write(config: &StoreConfig, slot: Slot, rows: &SlotRows) -> SlotSnapshot {
    let content = if rows.removed.is_some() { SlotContent::Changes } else { SlotContent::Whole };
    let strides: Vec<usize> = config.groups.iter().map(|spec| RowLayout::new(spec).stride()).collect();
    let ordered: Vec<OrderedKeys> =
        rows.groups.iter().zip(&strides).map(|(rows, &stride)| in_order(rows, stride)).collect();
    let blocks = ordered_blocks(config, rows);
    let removed = removed_keys(rows.removed.as_deref().unwrap_or_default(), &ordered);
    let keys: usize = removed.iter().map(Vec::len).sum();
    let words: usize = rows.groups.iter().chain(&rows.side).map(Vec::len).sum();
    let head = HEADER_BYTES + config.groups.iter().map(record_bytes).sum::<usize>();
    let length = head + keys * size_of::<u64>() + words * size_of::<u32>() + CHECKSUM_BYTES;
    let mut bytes = Vec::with_capacity(length);
    write_header(&mut bytes, config, slot, length, content);
    for (group, spec) in config.groups.iter().enumerate() {
        let record = GroupRecord {
            spec: *spec,
            rows: ordered[group].len() as u64,
            removed: removed.get(group).map_or(0, Vec::len) as u64,
            blocks: blocks[group].len() as u64,
        };
        record.write(&mut bytes);
    }
    for key in removed.iter().flatten() {
        bytes.extend_from_slice(&key.0.to_le_bytes());
    }
    for ((ordered, rows), &stride) in ordered.iter().zip(&rows.groups).zip(&strides) {
        for &(_, row) in ordered {
            let start = row as usize * stride;
            bytes.extend_from_slice(bytemuck::cast_slice(&rows[start..start + stride]));
        }
    }
    for block in blocks.iter().flatten() {
        bytes.extend_from_slice(bytemuck::cast_slice(block));
    }
    let checksum = xxh3_64(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    let count = ordered.iter().map(|rows| rows.len() as u64).sum();
    SlotSnapshot { slot, content, rows: count, removed: keys as u64, bytes }
}

fn write_header(bytes: &mut Vec<u8>, config: &StoreConfig, slot: Slot, length: usize, content: SlotContent) {
    bytes.extend_from_slice(MAGIC);
    for number in [VERSION, slot.0, config.slots, config.groups.len() as u32] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.extend_from_slice(&config.seed.to_le_bytes());
    bytes.extend_from_slice(&(length as u64).to_le_bytes());
    let kind: u32 = match content {
        SlotContent::Whole => 0,
        SlotContent::Changes => 1,
    };
    bytes.extend_from_slice(&kind.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
}

/// The numbers of a group's rows by rising key. Numbers are sorted, not rows: a row's key lies in
/// memory of its own, and sorting looks at each key a dozen times.
fn in_order(rows: &[u32], stride: usize) -> OrderedKeys {
    sorted(rows.chunks_exact(stride).map(key_of).zip(0..).collect())
}

/// The stored blocks of each group's side table, by rising number.
fn ordered_blocks<'r>(config: &StoreConfig, rows: &'r SlotRows) -> Vec<Vec<&'r [u32]>> {
    let of_group = |(spec, blocks): (&crate::RowSpec, &'r Vec<u32>)| match spec.life.side_layout(config.slots) {
        Some(layout) => blocks_in_order(blocks, layout.stride()),
        None => Vec::new(),
    };
    config.groups.iter().zip(&rows.side).map(of_group).collect()
}

/// The removed keys of each group, rising, each once, without those that have a row after all.
fn removed_keys(removed: &[Vec<FeatureKey>], ordered: &[OrderedKeys]) -> Vec<Vec<FeatureKey>> {
    let of_group = |(keys, rows): (&Vec<FeatureKey>, &OrderedKeys)| {
        let mut keys = keys.clone();
        keys.sort_unstable();
        keys.dedup();
        keys.retain(|key| rows.binary_search_by_key(key, |&(key, _)| key).is_err());
        keys
    };
    removed.iter().zip(ordered).map(of_group).collect()
}
