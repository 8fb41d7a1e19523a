//! Warnings about the ids of a column. The log has each of them once a column.

use std::sync::Once;

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
            tracing::warn!(column, "ids are integers written as floats: 5.0 is read as the id 5");
        });
    }

    /// Ids are integers with leading zeros.
    pub(crate) fn note_leading_zeros(&self) {
        let column = self.column.as_str();
        self.leading_zeros.call_once(|| {
            tracing::warn!(column, "ids with leading zeros are other ids than those without: 0005 is not the id 5");
        });
    }

    /// An id is a text that other programs write for a missing value.
    pub(crate) fn note_marker(&self, marker: &[u8]) {
        let column = self.column.as_str();
        self.markers.call_once(|| {
            let marker = String::from_utf8_lossy(marker);
            tracing::warn!(
                column,
                "`{marker}` is read as an id: if it stands for a missing value, add it to spec.data.nullValues"
            );
        });
    }

    /// Whether the log has the warnings about floats, leading zeros and markers.
    #[cfg(test)]
    pub(crate) fn noted(&self) -> [bool; 3] {
        [&self.floats, &self.leading_zeros, &self.markers].map(Once::is_completed)
    }
}
