//! The saves of a store: which save is under way, and since which saves the changes are known.
//!
//! The tables' marks say which rows changed since the last save. A save moves the marks when it
//! starts and becomes a base when it is completed. A save that fails moves the marks back. Rows are
//! saved whole, so changes since an earlier base are also right on top of a later one. A base
//! therefore stays usable while it is unknown whether other processes completed a save after it.

use crate::{SaveId, StoreError};

/// The contents of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveScope {
    /// All rows.
    Everything,
    /// Rows that changed since an earlier save, and the keys of rows that were removed since then.
    ChangesSince(SaveId),
}

/// The most bases remembered: the last completed save, and later saves whose end is unknown.
const MOST_BASES: usize = 16;

/// See the module's text.
#[derive(Default)]
pub(crate) struct Saves {
    frozen: bool,
    /// Whether removals were recorded from the freeze on.
    tracked: bool,
    bases: Vec<SaveId>,
}

impl Saves {
    /// Whether a save of this scope may start. Returns whether it saves changes only.
    pub(crate) fn check(&self, scope: SaveScope) -> Result<bool, StoreError> {
        if self.frozen {
            return Err(StoreError::FrozenAlready);
        }
        match scope {
            SaveScope::Everything => Ok(false),
            SaveScope::ChangesSince(since) if self.knows(since) => Ok(true),
            SaveScope::ChangesSince(since) => Err(StoreError::ChangesUnknown { since }),
        }
    }

    /// A save starts; `tracked` says whether removals are recorded from here on.
    pub(crate) fn start(&mut self, tracked: bool) {
        self.frozen = true;
        self.tracked = tracked;
    }

    /// The save that was under way ends.
    pub(crate) fn end(&mut self, save: SaveId, saved: bool) {
        self.frozen = false;
        if saved {
            self.bases.clear();
        }
        if self.tracked {
            self.bases.push(save);
        }
        let surplus = self.bases.len().saturating_sub(MOST_BASES);
        self.bases.drain(..surplus);
    }

    /// The contents equal save `save`, which becomes the only base if removals are recorded.
    pub(crate) fn set_base(&mut self, save: SaveId, tracked: bool) {
        self.bases.clear();
        if tracked {
            self.bases.push(save);
        }
    }

    /// Removals are no longer recorded.
    pub(crate) fn forget(&mut self) {
        self.bases.clear();
        self.tracked = false;
    }

    pub(crate) fn knows(&self, save: SaveId) -> bool {
        self.bases.contains(&save)
    }
}
