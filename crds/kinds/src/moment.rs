//! Moments of a split by time, and the forms in which columns write them. Equal forms are compared
//! as instants, never letter by letter. A date that has two readings is refused.

use std::fmt;

use serde::{Deserialize, Serialize, Serializer};

/// The order of day and month in dates with the year at their end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum DateOrder {
    /// Month, day, year: 11/25/2026.
    MonthFirst,
    /// Day, month, year: 25.11.2026.
    DayFirst,
}

/// An instant: whole seconds since 1970 (UTC), and the nanoseconds after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Rounded down.
    pub seconds: i64,
    /// Below 10⁹.
    pub nanoseconds: u32,
}

/// The form of a column's dates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DateForm {
    /// `None`: the year comes first.
    order: Option<DateOrder>,
    /// Between year, month and day: `-`, `/` or `.`.
    separator: u8,
}

/// A date or time in the form of its column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Date {
    text: String,
    moment: Moment,
    form: DateForm,
}

/// Why a text is not a [`Date`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DateProblem {
    /// It has no known form, or is not in the calendar.
    Unknown,
    /// Day and month could be exchanged, and no order is given.
    Ambiguous,
    /// An order is given, but the year comes first.
    NeedlessOrder,
}

impl Moment {
    /// The moment of a number of seconds since 1970, rounded to a microsecond. A 64-bit float of
    /// today's seconds does not hold finer digits.
    #[must_use]
    pub fn of_seconds(seconds: f64) -> Self {
        let whole = seconds.floor();
        let microseconds = ((seconds - whole) * 1e6).round() as u32;
        match microseconds {
            1_000_000.. => Self { seconds: (whole as i64).saturating_add(1), nanoseconds: 0 },
            _ => Self { seconds: whole as i64, nanoseconds: microseconds * 1_000 },
        }
    }

    /// The moment of a number of ticks since 1970.
    #[must_use]
    pub const fn of_ticks(ticks: i64, per_second: i64) -> Self {
        let rest = ticks.rem_euclid(per_second) as u64;
        let nanoseconds = rest * (1_000_000_000 / per_second as u64);
        Self { seconds: ticks.div_euclid(per_second), nanoseconds: nanoseconds as u32 }
    }
}

impl Date {
    /// Reads a date, and finds its form. Forms are `2026-11-03`, `2026/11/03`, `2026.11.03`,
    /// `2026-11`, and with an order `11/25/2026`, `25.11.2026` and the like. A time may follow
    /// after `T` or a blank: hours and minutes, perhaps seconds with a fraction, `AM` or `PM`, and
    /// `Z`, `UTC` or an offset such as `+01:00`. Without an offset it is UTC.
    ///
    /// # Errors
    /// A text of another form, or with two readings.
    pub fn read(text: &str, order: Option<DateOrder>) -> Result<Self, DateProblem> {
        let text = text.trim();
        let (digits, separator, _) = three_numbers(text.as_bytes()).ok_or(DateProblem::Unknown)?;
        let order = match (digits.year_first(), order) {
            (true, None) => None,
            (true, Some(_)) => return Err(DateProblem::NeedlessOrder),
            (false, Some(order)) => Some(order),
            (false, None) => Some(digits.only_order()?),
        };
        let form = DateForm { order, separator };
        let moment = form.read(text.as_bytes()).ok_or(DateProblem::Unknown)?;
        Ok(Self { text: text.to_owned(), moment, form })
    }

    /// The instant.
    #[must_use]
    pub const fn moment(&self) -> Moment {
        self.moment
    }

    /// The form of the column.
    #[must_use]
    pub const fn form(&self) -> DateForm {
        self.form
    }
}

impl DateForm {
    /// The moment that a cell of this form names. `None` for a cell of any other form.
    #[must_use]
    pub fn read(self, cell: &[u8]) -> Option<Moment> {
        let (digits, separator, rest) = three_numbers(cell.trim_ascii())?;
        if separator != self.separator || digits.year_first() != self.order.is_none() {
            return None;
        }
        let Numbers { values: [first, second, third], .. } = digits;
        let (year, month, day) = match self.order {
            None => (first, second, third),
            Some(DateOrder::MonthFirst) => (third, first, second),
            Some(DateOrder::DayFirst) => (third, second, first),
        };
        let days = days_since_1970(year, month, day)?;
        let (second_of_day, nanoseconds) = time_of_day(rest)?;
        Some(Moment { seconds: days * 86_400 + second_of_day, nanoseconds })
    }

    /// Dates of this form, for an error message.
    #[must_use]
    pub const fn expected(self) -> &'static str {
        match self.order {
            None => "a date or time of the form of testFrom, such as 2026-11-03 or 2026-11-03 10:00:00",
            Some(DateOrder::MonthFirst) => "a date or time of the form of testFrom, month first and with the year last",
            Some(DateOrder::DayFirst) => "a date or time of the form of testFrom, day first and with the year last",
        }
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.form.order {
            None => f.write_str(&self.text),
            Some(DateOrder::MonthFirst) => write!(f, "{} (month first)", self.text),
            Some(DateOrder::DayFirst) => write!(f, "{} (day first)", self.text),
        }
    }
}

impl Serialize for Date {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The numbers of a date, in order, and the digits of the first and the last.
struct Numbers {
    values: [u32; 3],
    first_digits: usize,
    last_digits: usize,
}

impl Numbers {
    fn year_first(&self) -> bool {
        self.first_digits == 4 && self.last_digits <= 2
    }

    /// The order that a date with the year at its end has, if only one is in the calendar.
    fn only_order(&self) -> Result<DateOrder, DateProblem> {
        match self.values {
            [13..=31, 1..=12, _] => Ok(DateOrder::DayFirst),
            [1..=12, 13..=31, _] => Ok(DateOrder::MonthFirst),
            [1..=12, 1..=12, _] => Err(DateProblem::Ambiguous),
            _ => Err(DateProblem::Unknown),
        }
    }
}

/// Year, month and day between equal separators, the separator, and the bytes behind them.
/// `2026-11` is its first day.
fn three_numbers(text: &[u8]) -> Option<(Numbers, u8, &[u8])> {
    let (first, first_digits, rest) = number(text)?;
    let (&separator, rest) = rest.split_first()?;
    if !matches!(separator, b'-' | b'/' | b'.') {
        return None;
    }
    let (second, second_digits, rest) = number(rest)?;
    if second_digits > 2 {
        return None;
    }
    if rest.is_empty() && first_digits == 4 {
        return Some((Numbers { values: [first, second, 1], first_digits, last_digits: 1 }, separator, rest));
    }
    let (third, last_digits, rest) = number(rest.strip_prefix(&[separator])?)?;
    let has_one_year = matches!((first_digits, last_digits), (4, 1 | 2) | (1 | 2, 4));
    has_one_year.then_some((Numbers { values: [first, second, third], first_digits, last_digits }, separator, rest))
}

/// A number of at most 9 digits, its digits, and the bytes behind them.
fn number(text: &[u8]) -> Option<(u32, usize, &[u8])> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if !(1..=9).contains(&digits) {
        return None;
    }
    let value = text[..digits].iter().fold(0, |value, digit| value * 10 + u32::from(digit - b'0'));
    Some((value, digits, &text[digits..]))
}

/// The time behind a date: its second of the day in UTC, which may lie in another day, and the
/// nanoseconds. An empty text is midnight.
fn time_of_day(text: &[u8]) -> Option<(i64, u32)> {
    let Some((mark, rest)) = text.split_first() else { return Some((0, 0)) };
    if !matches!(mark, b'T' | b't' | b' ') {
        return None;
    }
    let (hour, _, rest) = number(rest)?;
    let (minute, rest) = two_digits(rest.strip_prefix(b":")?)?;
    let (second, rest) = match rest.strip_prefix(b":") {
        Some(rest) => two_digits(rest)?,
        None => (0, rest),
    };
    let (nanoseconds, rest) = fraction(rest)?;
    let (hour, rest) = half_of_day(hour, rest)?;
    let offset = offset(rest.trim_ascii_start())?;
    // A leap second counts as the first one of the next minute.
    let is_time = hour < 24 && minute < 60 && second <= 60;
    is_time.then(|| (i64::from(hour * 3600 + minute * 60 + second) - offset, nanoseconds))
}

fn two_digits(text: &[u8]) -> Option<(u32, &[u8])> {
    let (value, digits, rest) = number(text)?;
    (digits == 2).then_some((value, rest))
}

/// Nanoseconds behind a point or a comma, if there is one.
fn fraction(text: &[u8]) -> Option<(u32, &[u8])> {
    let Some(rest) = text.strip_prefix(b".").or(text.strip_prefix(b",")) else { return Some((0, text)) };
    let (value, digits, rest) = number(rest)?;
    Some((value * 10_u32.pow(9 - digits as u32), rest))
}

/// The hour from 0 to 23 where `AM` or `PM` may follow.
fn half_of_day(hour: u32, text: &[u8]) -> Option<(u32, &[u8])> {
    let behind = text.trim_ascii_start();
    let (half, rest) = match behind.split_at_checked(2) {
        Some((half, rest)) if half.eq_ignore_ascii_case(b"am") => (0, rest),
        Some((half, rest)) if half.eq_ignore_ascii_case(b"pm") => (12, rest),
        _ => return Some((hour, text)),
    };
    (1..=12).contains(&hour).then_some((hour % 12 + half, rest))
}

/// Seconds east of UTC. An empty text is UTC.
fn offset(text: &[u8]) -> Option<i64> {
    let (sign, rest) = match text {
        [] | b"Z" | b"z" | b"UTC" => return Some(0),
        [b'+', rest @ ..] => (1, rest),
        [b'-', rest @ ..] => (-1, rest),
        _ => return None,
    };
    let (hours, minutes) = match *rest {
        [a, b] => ([a, b], [b'0', b'0']),
        [a, b, c, d] | [a, b, b':', c, d] => ([a, b], [c, d]),
        _ => return None,
    };
    let ((hours, _), (minutes, _)) = (two_digits(&hours)?, two_digits(&minutes)?);
    (hours < 24 && minutes < 60).then(|| sign * i64::from(hours * 3600 + minutes * 60))
}

/// Days from 1 January 1970 to a date of the Gregorian calendar, or `None` if there is no such day.
fn days_since_1970(year: u32, month: u32, day: u32) -> Option<i64> {
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let days = match month {
        2 => 28 + u32::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if !(1..=days).contains(&day) {
        return None;
    }
    // Years that begin in March have their leap day at the end.
    let (years, months) = match month {
        1 | 2 => (i64::from(year) - 1, i64::from(month) + 9),
        _ => (i64::from(year), i64::from(month) - 3),
    };
    let leap_days = years.div_euclid(4) - years.div_euclid(100) + years.div_euclid(400);
    Some(years * 365 + leap_days + (months * 153 + 2) / 5 + i64::from(day) - 1 - 719_468)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(text: &str) -> Option<i64> {
        Date::read(text, None).ok().map(|date| date.moment().seconds)
    }

    #[test]
    fn dates_are_instants() {
        for (text, expected) in [
            ("1970-01-01", 0),
            ("1969-12-31", -86_400),
            ("2000-02-29", 951_782_400),
            ("2024-11-01", 1_730_419_200),
            ("2024/11/1", 1_730_419_200),
            ("2024.11.01", 1_730_419_200),
            ("2024-11", 1_730_419_200),
            ("2024-11-01T00:00:00Z", 1_730_419_200),
            ("2024-11-01 01:30", 1_730_424_600),
            ("2024-11-01T01:30:15.25", 1_730_424_615),
            ("2024-11-01T01:30:15+01:00", 1_730_421_015),
            ("2024-10-31T20:00:00-0400", 1_730_419_200),
            ("2024-11-01 12:00:00 AM UTC", 1_730_419_200),
            ("11/25/2024 1:05:00 PM", 1_732_539_900),
            ("25.11.2024 13:05", 1_732_539_900),
            ("0000-03-01", -62_162_035_200),
        ] {
            assert_eq!(seconds(text), Some(expected), "{text}");
        }
        let nanoseconds = |text| Date::read(text, None).unwrap().moment().nanoseconds;
        assert_eq!(
            (nanoseconds("2024-11-01T00:00:00.5"), nanoseconds("2024-11-01 00:00:00,000000001")),
            (500_000_000, 1)
        );
    }

    #[test]
    fn seconds_are_rounded_to_microseconds() {
        let moment = |seconds, nanoseconds| Moment { seconds, nanoseconds };
        assert_eq!(Moment::of_seconds(1_700_000_000.1), moment(1_700_000_000, 100_000_000));
        assert_eq!(Moment::of_seconds(1_700_000_000.123_456), moment(1_700_000_000, 123_456_000));
        assert_eq!(Moment::of_seconds(1.999_999_9), moment(2, 0));
        assert_eq!(Moment::of_seconds(-0.25), moment(-1, 750_000_000));
    }

    #[test]
    fn days_are_counted_without_a_gap() {
        let mut days = days_since_1970(1896, 1, 1).unwrap();
        for year in 1896..2105 {
            for (month, day) in (1..=12).flat_map(|month| (1..=31).map(move |day| (month, day))) {
                if let Some(found) = days_since_1970(year, month, day) {
                    assert_eq!(found, days, "{year}-{month}-{day}");
                    days += 1;
                }
            }
        }
    }

    #[test]
    fn other_forms_and_days_that_do_not_exist_are_unknown() {
        for text in [
            "",
            "yesterday",
            "2023-02-29",
            "2024-13-01",
            "2024-00-10",
            "2024-11-31",
            "1.5",
            "2024-11-01x",
            "2024-11/01",
            "24-11-01",
            "1/2/24",
            "2024-11-01T",
            "2024-11-01 25:00",
            "2024-11-01 10",
            "2024-11-01 10:5",
            "32/1/2024",
            "2024-11-01 10:00 XM",
            "2024-11-01 13:00 PM",
            "2024-11-01T10:00+1",
            "Nov 1, 2024",
            "20241101T10",
            "2024-11-01T10:00:00.",
            "2024-11-01T10:00:00.1234567890",
        ] {
            assert_eq!(Date::read(text, None), Err(DateProblem::Unknown), "{text}");
        }
    }

    #[test]
    fn a_date_with_two_readings_needs_an_order() {
        assert_eq!(Date::read("11/1/2024", None), Err(DateProblem::Ambiguous));
        let read = |order| Date::read("11/1/2024", Some(order)).unwrap();
        assert_eq!(read(DateOrder::MonthFirst).moment().seconds, 1_730_419_200);
        assert_eq!(Some(read(DateOrder::DayFirst).moment().seconds), seconds("2024-01-11"));
        assert_eq!(Date::read("2024-11-01", Some(DateOrder::DayFirst)), Err(DateProblem::NeedlessOrder));
        assert_eq!(Date::read("25/11/2024", Some(DateOrder::MonthFirst)), Err(DateProblem::Unknown));
    }

    #[test]
    fn a_cell_of_another_form_has_no_moment() {
        let form = |text, order| Date::read(text, order).unwrap().form();
        let iso = form("2024-11-01", None);
        assert!(iso.read(b" 2024-11-02T10:00:00Z ").is_some());
        for cell in ["2024/11/01", "11-01-2024", "1730419200", "", "8/1/2024"] {
            assert_eq!(iso.read(cell.as_bytes()), None, "{cell}");
        }
        let us = form("11/1/2024", Some(DateOrder::MonthFirst));
        assert_eq!(us.read(b"8/13/2024 12:00"), iso.read(b"2024-08-13 12:00"));
        assert_eq!((us.read(b"13/8/2024"), us.read(b"2024/8/13")), (None, None));
    }

    #[test]
    fn seconds_and_ticks_are_exact_moments() {
        let moment = |seconds, nanoseconds| Moment { seconds, nanoseconds };
        assert_eq!(Moment::of_seconds(1_700_000_000.5), moment(1_700_000_000, 500_000_000));
        assert_eq!(Moment::of_seconds(-0.25), moment(-1, 750_000_000));
        assert_eq!(Moment::of_ticks(1_699_999_999_999_999_999, 1_000_000_000), moment(1_699_999_999, 999_999_999));
        assert_eq!(Moment::of_ticks(-1, 1_000), moment(-1, 999_000_000));
        assert_eq!(Moment::of_ticks(7, 1), moment(7, 0));
    }
}
