//! Which side of a split by time a row is on. Pure functions of a cell.

use rectrain_kinds::{Moment, TimeBound};

use crate::number::parse_f64;
use crate::spelling::trim;

/// Keeps the rows before a moment (`test` is false), or from it on.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TimeFilter {
    pub(crate) test_from: TimeBound,
    pub(crate) test: bool,
}

impl TimeFilter {
    /// Whether the filter keeps a row with this text. `None` if the text is not a time.
    #[inline]
    pub(crate) fn keeps_text(&self, cell: &[u8]) -> Option<bool> {
        match &self.test_from {
            TimeBound::Number(_) => self.keeps_number(parse_f64(cell)?),
            TimeBound::Integer(_) => match std::str::from_utf8(trim(cell)).ok()?.parse() {
                Ok(integer) => Some(self.keeps_integer(integer)),
                Err(_) => self.keeps_number(parse_f64(cell)?),
            },
            TimeBound::Date(bound) => Some(self.keeps(bound.form().read(cell)? >= bound.moment())),
        }
    }

    /// Whether the filter keeps a row with this number. `None` for NaN.
    pub(crate) fn keeps_number(&self, time: f64) -> Option<bool> {
        let later = match &self.test_from {
            TimeBound::Number(bound) => time >= *bound,
            TimeBound::Integer(bound) => time >= *bound as f64,
            TimeBound::Date(_) => return None,
        };
        (!time.is_nan()).then(|| self.keeps(later))
    }

    /// Whether the filter keeps a row with this integer. The bound is no date.
    pub(crate) fn keeps_integer(&self, time: i64) -> bool {
        self.keeps(match &self.test_from {
            TimeBound::Number(bound) => is_from(time, *bound),
            TimeBound::Integer(bound) => time >= *bound,
            TimeBound::Date(_) => false,
        })
    }

    /// Whether the filter keeps a row with this integer. The bound is no date.
    pub(crate) fn keeps_unsigned(&self, time: u64) -> bool {
        match (i64::try_from(time), &self.test_from) {
            (Ok(time), _) => self.keeps_integer(time),
            (Err(_), TimeBound::Number(bound)) => self.keeps(time as f64 >= *bound),
            // It is beyond every bound that is an `i64`.
            (Err(_), _) => self.keeps(true),
        }
    }

    /// The filter for a column of floats, which hold a bound as `held` says.
    pub(crate) fn for_floats(&self, held: impl Fn(f64) -> f64) -> Self {
        let test_from = match &self.test_from {
            TimeBound::Number(bound) => TimeBound::Number(held(*bound)),
            other => other.clone(),
        };
        Self { test_from, test: self.test }
    }

    /// Whether the filter keeps a row at this moment. A bound that is a number counts seconds since
    /// 1970.
    pub(crate) fn keeps_moment(&self, time: Moment) -> bool {
        let bound = match &self.test_from {
            TimeBound::Number(bound) => Moment::of_seconds(*bound),
            TimeBound::Integer(bound) => Moment { seconds: *bound, nanoseconds: 0 },
            TimeBound::Date(bound) => bound.moment(),
        };
        self.keeps(time >= bound)
    }

    /// The expected cells, for an error message.
    pub(crate) fn expected(&self) -> &'static str {
        match &self.test_from {
            TimeBound::Number(_) | TimeBound::Integer(_) => "a time, as a number",
            TimeBound::Date(bound) => bound.form().expected(),
        }
    }

    fn keeps(&self, later: bool) -> bool {
        later == self.test
    }
}

/// Whether an integer is at least `bound`. Exact: no integer is rounded to a float.
fn is_from(time: i64, bound: f64) -> bool {
    const BEYOND: f64 = (1_u64 << 63) as f64;
    let first = bound.ceil();
    // The conversion saturates below -2^63.
    first < BEYOND && time >= first as i64
}

#[cfg(test)]
mod tests {
    use rectrain_kinds::Date;

    use super::*;

    fn from(test_from: TimeBound) -> TimeFilter {
        TimeFilter { test_from, test: true }
    }

    #[test]
    fn numbers_are_compared_in_64_bits() {
        let seconds = from(TimeBound::Number(1_700_000_000.0));
        assert_eq!(seconds.keeps_text(b"1699999999"), Some(false));
        assert_eq!((seconds.keeps_text(b" 1700000000 "), seconds.keeps_text(b"1.7e9")), (Some(true), Some(true)));
        assert_eq!((seconds.keeps_text(b"2024-11-01"), seconds.keeps_text(b"nan")), (None, None));
        let bound = 1_700_000_000_000_000_001;
        let nanoseconds = from(TimeBound::Integer(bound));
        assert_eq!(nanoseconds.keeps_text(b"1700000000000000000"), Some(false));
        assert_eq!(nanoseconds.keeps_text(b"1700000000000000001"), Some(true));
        assert!(nanoseconds.keeps_integer(bound) && !nanoseconds.keeps_integer(bound - 1));
        assert!(nanoseconds.keeps_unsigned(bound as u64) && !nanoseconds.keeps_unsigned(bound as u64 - 1));
        assert!(nanoseconds.keeps_unsigned(u64::MAX));
    }

    #[test]
    fn integers_are_not_rounded_before_a_number() {
        let keeps = |bound, time| from(TimeBound::Number(bound)).keeps_integer(time);
        // 2^53 + 3 is 2^53 + 4 as a 64-bit float.
        let bound = (1_i64 << 53) + 4;
        assert!(keeps(bound as f64, bound) && !keeps(bound as f64, bound - 1));
        assert!(keeps(0.5, 1) && !keeps(0.5, 0) && keeps(-0.5, 0) && !keeps(-0.5, -1));
        assert!(keeps(-1e30, i64::MIN) && !keeps(1e30, i64::MAX));
        let unsigned = from(TimeBound::Number(1e19));
        assert!(unsigned.keeps_unsigned(10_000_000_000_000_000_000) && !unsigned.keeps_unsigned(1 << 63));
    }

    #[test]
    fn dates_are_compared_as_instants() {
        let date = from(TimeBound::Date(Date::read("2024-11-01", None).unwrap()));
        assert_eq!(date.keeps_text(b"2024-11-01T00:30:00+01:00"), Some(false));
        assert_eq!(date.keeps_text(b"2024-11-1"), Some(true));
        assert_eq!((date.keeps_text(b"11/1/2024"), date.keeps_text(b"")), (None, None));
        let moment = |seconds| Moment { seconds, nanoseconds: 0 };
        assert!(date.keeps_moment(moment(1_730_419_200)) && !date.keeps_moment(moment(1_730_419_199)));
        let number = from(TimeBound::Number(1_730_419_200.0));
        assert!(!number.keeps_moment(Moment { seconds: 1_730_419_199, nanoseconds: 999_999_999 }));
    }
}
