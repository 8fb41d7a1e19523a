//! Checkpoints: directories with everything that training needs to continue, on this machine or in
//! a bucket. This crate defines their format. It writes them piece by piece from many processes,
//! finds the last good one, and restores it onto any number of processes. It does not decide when
//! to take a checkpoint or which process holds which slot, and it talks to no role. Its callers are
//! the coordinator, the parameter servers, the dense workers and the command line.
//!
//! ```text
//! coordinator   CheckpointWriter::begin ─► Ticket ──────────────► commit(files) ─► manifest.json
//!                                            │ to every process    ▲
//! PS            Store::freeze, save_rows  ◄──┤─────► FileEntry ────┤
//! dense worker  save_dense                ◄──┤─────► FileEntry ────┤
//! coordinator   save_state                ◄──┘─────► FileEntry ────┘
//! ```
//!
//! The manifest is written last, atomically, and holds the size and checksum of every file. A
//! directory without a manifest is no checkpoint, so a crash before that leaves the earlier
//! checkpoints intact. A *delta* holds the rows that changed since its base, and the keys of rows
//! that were removed. `docs/reference/checkpoint-format.md` describes the bytes.

mod catalog;
mod dense;
mod error;
mod identity;
mod lease;
mod manifest;
mod name;
mod reader;
mod retention;
mod rows;
mod writer;

pub use catalog::{Latest, Listed, ListedState, Skipped, latest_good, list};
pub use dense::{DensePart, DenseState};
pub use error::CheckpointError;
pub use identity::{Difference, FeatureIdentity, Identity};
pub use lease::{Acquired, Claim, EXPIRY_INTERVALS, LEASE, Lease};
pub use manifest::{FORMAT_VERSION, FileContent, FileEntry, Hash64, MANIFEST, Manifest, SlotSet};
pub use name::{Base, CheckpointId, Kind, Ticket, directory_name, parse_directory_name};
pub use reader::{Checkpoint, Depth, RestoredRows, Verified};
pub use retention::{Retained, retain, withdraw};
pub use rows::{IndexEntry, RowsFooter, RowsHeader, decode_index, encode_index};
pub use writer::{Begin, CheckpointWriter, RowsWriter, find_manifest, save_dense, save_rows, save_state};
