//! Checkpoints: directories that hold everything training needs to go on, on this machine or in a bucket. This crate knows
//! their format, writes them in pieces from many processes, finds the last good one, and restores it onto any number of
//! processes. It does not decide when a checkpoint is taken or who holds which slot, and speaks to no other role: the
//! coordinator, the parameter servers, the dense workers and the command line call it.
//!
//! ```text
//! coordinator   CheckpointWriter::begin ─► Ticket ─────────────────────────────► commit(files) ─► manifest.json
//!                                            │ to every process                       ▲
//! PS            Store::freeze, save_rows  ◄──┤──────────────────► FileEntry ──────────┤
//! dense worker  save_dense                ◄──┤──────────────────► FileEntry ──────────┤
//! coordinator   save_state                ◄──┘──────────────────► FileEntry ──────────┘
//! ```
//!
//! The manifest is written last, atomically, and holds the size and checksum of every file: what has no manifest is no
//! checkpoint, and a crash anywhere before leaves the earlier ones as they were. A *delta* holds the rows that changed since
//! its base and the keys of rows that were removed. The bytes are described in `docs/reference/checkpoint-format.md`.

mod catalog;
mod dense;
mod error;
mod identity;
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
pub use manifest::{FORMAT_VERSION, FileContent, FileEntry, Hash64, MANIFEST, Manifest, SlotSet};
pub use name::{Base, CheckpointId, Kind, Ticket, directory_name, parse_directory_name};
pub use reader::{Checkpoint, Depth, RestoredRows, Verified};
pub use retention::{Retained, retain};
pub use rows::{IndexEntry, RowsFooter, RowsHeader, decode_index, encode_index};
pub use writer::{Begin, CheckpointWriter, RowsWriter, save_dense, save_rows, save_state};
