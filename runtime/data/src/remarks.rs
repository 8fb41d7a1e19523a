//! Warnings about the ids of a column. The log of a process has each of them once a column.

use std::collections::BTreeSet;
use std::sync::Once;

use parking_lot::Mutex;

/// The warnings of this process: a column, and the kind of the warning. A command may open the same
/// files several times.
static GIVEN: Mutex<BTreeSet<(String, &str)>> = Mutex::new(BTreeSet::new());

/// Whether the process gives a warning of this kind about the column for the first time.
fn is_new(column: &str, kind: &'static str) -> bool {
    GIVEN.lock().insert((column.to_owned(), kind))
}

/// The warnings about one column.
#[derive(Debug)]
pub(crate) struct Remarks {
    column: String,
    floats: Once,
    leading_zeros: Once,
    markers: Once,
}

impl Remarks {
    pub(crate) fn new(column: &str) -> Self {
        let column = column.to_owned();
        Self { column, floats: Once::new(), leading_zeros: Once::new(), markers: Once::new() }
    }

    /// Ids are floats.
    pub(crate) fn note_floats(&self) {
        let column = self.column.as_str();
        self.floats.call_once(|| {
            if is_new(column, "floats") {
                tracing::warn!(column, "ids are integers written as floats: 5.0 is read as the id 5");
            }
        });
    }

    /// Ids are integers with leading zeros.
    pub(crate) fn note_leading_zeros(&self) {
        let column = self.column.as_str();
        self.leading_zeros.call_once(|| {
            if is_new(column, "leading zeros") {
                tracing::warn!(column, "ids with leading zeros are other ids than those without: 0005 is not the id 5");
            }
        });
    }

    /// An id is a text that other programs write for a missing value.
    pub(crate) fn note_marker(&self, marker: &[u8]) {
        let column = self.column.as_str();
        self.markers.call_once(|| {
            let marker = String::from_utf8_lossy(marker);
            if is_new(column, "markers") {
                tracing::warn!(
                    column,
                    "`{marker}` is read as an id: if it stands for a missing value, add it to spec.data.nullValues"
                );
            }
        });
    }

    /// Whether the column has such ids: floats, leading zeros and markers.
    #[cfg(test)]
    pub(crate) fn noted(&self) -> [bool; 3] {
        [&self.floats, &self.leading_zeros, &self.markers].map(Once::is_completed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_warns_of_a_column_once() {
        let column = "a column of this test alone";
        let given = ["floats", "floats", "markers"].map(|kind| is_new(column, kind));
        assert_eq!(given, [true, false, true]);
    }
}
