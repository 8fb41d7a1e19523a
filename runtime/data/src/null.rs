//! The texts that stand for a missing value, in cells of ids, labels, numbers and times alike.

use std::sync::Arc;

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
}
