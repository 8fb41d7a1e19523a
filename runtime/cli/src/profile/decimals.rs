//! Ids that look like floats: a column of numbers that was taken for a column of ids. Pure.

/// The rows whose texts are looked at.
pub(super) const LOOKED_AT: u64 = 10_000;
/// A column of ids looks like floats if at least this share of its ids are decimal fractions.
const SHARE: f64 = 0.5;

/// The texts of the ids of a column.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Decimals {
    ids: u64,
    fractions: u64,
    /// The first fraction.
    example: String,
}

impl Decimals {
    /// Adds a cell, which need not be UTF-8.
    pub(super) fn add(&mut self, cell: &[u8], separator: Option<&str>) {
        let cell = String::from_utf8_lossy(cell);
        match separator.filter(|separator| !separator.is_empty()) {
            Some(separator) => cell.split(separator).for_each(|id| self.add_id(id)),
            None => self.add_id(&cell),
        }
    }

    fn add_id(&mut self, id: &str) {
        let id = id.trim();
        if id.is_empty() {
            return;
        }
        self.ids += 1;
        if is_fraction(id) {
            self.fractions += 1;
            if self.example.is_empty() {
                self.example = id.chars().take(40).collect();
            }
        }
    }

    /// An id that shows that the column looks like floats, and their share.
    pub(super) fn looks_like_floats(&self) -> Option<(&str, f64)> {
        let share = self.fractions as f64 / self.ids.max(1) as f64;
        (share >= SHARE).then_some((self.example.as_str(), share))
    }
}

/// Whether a text is a number with a fraction that is not 0. `5.0` is the id 5, and `12e5` may be a
/// hash.
fn is_fraction(id: &str) -> bool {
    let has_point = id.contains('.') && id.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first));
    has_point && id.parse::<f64>().is_ok_and(|number| number.is_finite() && number.fract() != 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(cells: &[&str], separator: Option<&str>) -> Decimals {
        let mut decimals = Decimals::default();
        cells.iter().for_each(|cell| decimals.add(cell.as_bytes(), separator));
        decimals
    }

    #[test]
    fn fractions_are_told_from_ids() {
        for text in ["5.37", "-0.5", ".25", "+1.5e-3"] {
            assert!(is_fraction(text), "{text}");
        }
        for text in ["5", "5.0", "12e5", "1.2.3.4", "v1.5", "nan", "inf", "1e-3", ""] {
            assert!(!is_fraction(text), "{text}");
        }
    }

    #[test]
    fn a_column_looks_like_floats_if_half_of_it_are() {
        assert_eq!(of(&["1.5", "2", " "], None).looks_like_floats(), Some(("1.5", 0.5)));
        assert_eq!(of(&["1.5", "2", "a"], None).looks_like_floats(), None);
        assert_eq!(of(&["7|1.5", "2.25"], Some("|")).looks_like_floats().map(|(id, _)| id), Some("1.5"));
        assert_eq!(of(&["", " "], None).looks_like_floats(), None);
    }
}
