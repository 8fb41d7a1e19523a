//! The time of a row in 16 bits, and its decay.
//!
//! Time counts in units of a day divided by a power of two. The unit is 1/16 day, or finer or
//! coarser if rows expire: then it is the largest one that is at most 1/32 of the span. The 16 bits
//! wrap. A row is up to 61,439 units old: 10 years at 1/16 day, and at least 959 spans. A time that
//! is up to 4,096 units later than the present is in the future, and its age is 0.
//!
//! All arithmetic is on integers, or is IEEE multiplication and square roots. So every machine
//! decides the same.

use crate::Moment;
use std::num::NonZeroU64;

const DAY_SECONDS: u64 = 86_400;
/// The unit without expiry: a day, halved this many times.
const DEFAULT_HALVINGS: i32 = 4;
/// Units of an expiry span, at least.
const LEAST_UNITS: u64 = 32;
/// A time is in the future if it is at most this many units later than the present.
const FUTURE_UNITS: u16 = 4_096;
/// Later moments count as this one, about 35,000 years.
const MOST_SECONDS: u64 = 1 << 40;

/// See the module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Clock {
    /// The unit is a day divided by two to this power.
    halvings: i32,
}

impl Clock {
    pub(crate) fn new(expire_after: Option<NonZeroU64>) -> Self {
        let Some(span) = expire_after else { return Self { halvings: DEFAULT_HALVINGS } };
        let is_fine = |halvings: i32| {
            let (unit, span) = (u128::from(DAY_SECONDS * LEAST_UNITS), u128::from(span.get()));
            unit << (-halvings).max(0) <= span << halvings.max(0)
        };
        Self { halvings: (-32..32).find(|&halvings| is_fine(halvings)).unwrap_or(32) }
    }

    /// Whole units since moment 0.
    #[inline]
    fn units(self, moment: Moment) -> u64 {
        let seconds = moment.0.min(MOST_SECONDS);
        match self.halvings {
            0.. => (seconds << self.halvings.min(23)) / DAY_SECONDS,
            _ => (seconds / DAY_SECONDS) >> -self.halvings,
        }
    }

    /// The moment as a row has it.
    #[inline]
    pub(crate) fn time(self, moment: Moment) -> u16 {
        self.units(moment) as u16
    }

    /// Units from a row's time to the present; 0 if the time is in the future.
    #[inline]
    pub(crate) fn age(self, time: u16, now: Moment) -> u16 {
        let age = self.time(now).wrapping_sub(time);
        if age > u16::MAX - FUTURE_UNITS { 0 } else { age }
    }

    /// The later of a row's time and the present.
    #[inline]
    pub(crate) fn later(self, time: u16, now: Moment) -> u16 {
        if self.age(time, now) == 0 { time } else { self.time(now) }
    }

    /// An age in whole seconds.
    pub(crate) fn seconds(self, age: u64) -> u64 {
        match self.halvings {
            0.. => (age * DAY_SECONDS) >> self.halvings,
            _ => (age * DAY_SECONDS) << -self.halvings,
        }
    }

    /// The age from which a row has expired: never early, and less than a tenth of the span late.
    pub(crate) fn expiry(self, expire_after: NonZeroU64) -> u16 {
        let (span, day) = (u128::from(expire_after.get()), u128::from(DAY_SECONDS));
        let units = (span << self.halvings.max(0)).div_ceil(day << (-self.halvings).max(0));
        u16::try_from(units + 1).unwrap_or(u16::MAX - FUTURE_UNITS)
    }

    /// A moment, in seconds, before which no row of this age at `now` has expired.
    pub(crate) fn due(self, age: u16, expiry: u16, now: Moment) -> u64 {
        self.seconds((self.units(now) + u64::from(expiry)).saturating_sub(u64::from(age)))
    }

    /// The factor for one unit, of a factor for one day.
    pub(crate) fn factor(self, a_day: f64) -> f64 {
        let mut factor = a_day;
        for _ in 0..self.halvings {
            factor = factor.sqrt();
        }
        for _ in self.halvings..0 {
            factor *= factor;
        }
        factor
    }
}

/// `base` to the power of `exponent`, by the same multiplications on every machine.
#[inline]
pub(crate) fn power(base: f64, exponent: u16) -> f64 {
    let (mut square, mut left, mut product) = (base, exponent, 1.0);
    while left > 0 {
        if left & 1 == 1 {
            product *= square;
        }
        square *= square;
        left >>= 1;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn span(seconds: u64) -> Option<NonZeroU64> {
        NonZeroU64::new(seconds)
    }

    #[test]
    fn the_unit_follows_from_the_span() {
        assert_eq!(Clock::new(None).seconds(1), 5_400);
        assert_eq!(Clock::new(span(48 * 3_600)).seconds(1), 5_400);
        assert_eq!(Clock::new(span(32 * 86_400)).seconds(1), 86_400);
        assert_eq!(Clock::new(span(1 << 32)).seconds(1), 1_024 * 86_400);
        assert_eq!(Clock::new(span(1)).seconds(1 << 22), 86_400);
    }

    #[test]
    fn a_time_in_the_future_has_no_age_and_stays() {
        let clock = Clock::new(None);
        let (early, late) = (Moment(1_700_000_000), Moment(1_700_000_000 + 30 * 86_400));
        assert_eq!(clock.age(clock.time(early), late), 480);
        assert_eq!(clock.age(clock.time(late), early), 0);
        assert_eq!(clock.later(clock.time(late), early), clock.time(late));
        assert_eq!(clock.later(clock.time(early), late), clock.time(late));
    }

    #[test]
    fn a_factor_for_a_day_is_the_product_of_its_units() {
        for seconds in [1, 3_600, 86_400, 40 * 86_400] {
            let clock = Clock::new(span(seconds));
            let (mut units, mut day) = (1_u64, 1);
            while clock.seconds(units) < 86_400 {
                units *= 2;
            }
            day *= clock.seconds(units) / 86_400;
            let found = clock.factor(0.9).powf(units as f64);
            assert!((found - 0.9_f64.powf(day as f64)).abs() < 1e-9, "{seconds}: {found}");
        }
        assert!((power(0.999, 1_000) - 0.999_f64.powf(1_000.0)).abs() < 1e-12);
        assert_eq!(power(0.5, 0), 1.0);
    }

    proptest! {
        #[test]
        fn rows_expire_never_early_and_less_than_a_tenth_late(
            seconds in prop_oneof![32_u64..10_000, 32_u64..(1 << 32)],
            start in 1_000_000_000_u64..3_000_000_000,
            part in 0.0_f64..1.5,
        ) {
            let clock = Clock::new(span(seconds));
            let age = (seconds as f64 * part) as u64;
            let now = Moment(start + age);
            let units = clock.age(clock.time(Moment(start)), now);
            let expiry = clock.expiry(NonZeroU64::new(seconds).unwrap());
            let is_expired = units >= expiry;
            prop_assert!(!is_expired || age > seconds);
            prop_assert!(is_expired || age < seconds + seconds / 10 + 1);
            prop_assert!(!is_expired || clock.due(units, expiry, now) <= now.0);
            let at_start = clock.due(0, expiry, Moment(start));
            prop_assert!(!is_expired || at_start <= now.0);
        }
    }
}
