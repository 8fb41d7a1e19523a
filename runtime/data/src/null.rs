//! The texts that stand for a missing value in cells of ids and numbers. Labels and times have no
//! missing values: there such a text makes its row a bad one.

use std::sync::Arc;

/// Texts that programs write for a missing value, and that are ids unless they are listed: `NA` may
/// be Namibia, and `None` may be a category. Upper and lower case are equal.
const UNLISTED: [&[u8]; 4] = [b"NA", b"N/A", b"None", b"<NA>"];

/// Whether the text of an id may stand for a missing value.
#[inline]
pub(crate) fn may_be_marker(id: &[u8]) -> bool {
    matches!(id.first(), Some(b'N' | b'n' | b'<')) && UNLISTED.iter().any(|marker| marker.eq_ignore_ascii_case(id))
}

/// The markers of missing values. An empty text is always one. Upper and lower case are equal.
#[derive(Debug, Clone)]
pub(crate) struct NullValues {
    markers: Arc<[Box<[u8]>]>,
    /// Whether a marker begins with a byte. Most ids end the search here.
    begins: Arc<[bool; 256]>,
}

impl NullValues {
    pub(crate) fn new(markers: &[String]) -> Self {
        let markers: Arc<[Box<[u8]>]> = markers.iter().map(|marker| marker.trim().as_bytes().into()).collect();
        let mut begins = [false; 256];
        for first in markers.iter().filter_map(|marker| marker.first()) {
            begins[usize::from(first.to_ascii_lowercase())] = true;
            begins[usize::from(first.to_ascii_uppercase())] = true;
        }
        Self { markers, begins: Arc::new(begins) }
    }

    /// Whether a text, without blanks around it, stands for a missing value.
    #[inline]
    pub(crate) fn contains(&self, text: &[u8]) -> bool {
        match text.first() {
            None => true,
            Some(first) => self.begins[usize::from(*first)] && self.has(text),
        }
    }

    fn has(&self, text: &[u8]) -> bool {
        self.markers.iter().any(|marker| marker.eq_ignore_ascii_case(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_whole_texts_in_any_case() {
        let nulls = NullValues::new(&["NULL".into(), "\\N".into(), " nan ".into()]);
        for text in ["", "NULL", "null", "\\N", "NaN"] {
            assert!(nulls.contains(text.as_bytes()), "{text:?}");
        }
        for text in ["NULLS", "\\", "Nancy", "NA", "5"] {
            assert!(!nulls.contains(text.as_bytes()), "{text:?}");
        }
        assert!(NullValues::new(&[]).contains(b"") && !NullValues::new(&[]).contains(b"nan"));
    }

    #[test]
    fn unlisted_markers_are_whole_texts_in_any_case() {
        for text in ["NA", "na", "n/a", "None", "<na>"] {
            assert!(may_be_marker(text.as_bytes()), "{text}");
        }
        for text in ["", "N", "NAB", "Nonesuch", "<", "5"] {
            assert!(!may_be_marker(text.as_bytes()), "{text}");
        }
    }
}
