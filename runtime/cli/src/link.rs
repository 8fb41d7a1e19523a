//! Links between processes as slow as a network: `--link 1Gbit,5ms`. A tool for tests and trials.
//! `rectrain run --processes` passes it to the processes that it starts.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use jiff::SignedDuration;
use rectrain_wire::PacedLink;

use crate::failure::Failure;

/// The longest delay. Longer ones would end calls that a member must answer soon.
const LONGEST: Duration = Duration::from_secs(1);
/// Bits per second by unit. As in networks, a kbit has 1,000 bits.
const UNITS: [(&str, f64); 3] = [("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)];
/// The slowest link. The heartbeats of a job pass it.
const LEAST_BITS: f64 = 1e5;
/// Above every network card.
const MOST_BITS: f64 = 1e13;

/// `1Gbit,5ms`: the rate of a process in each direction, and the delay of each message. The delay
/// may be left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Link {
    bytes_per_second: NonZeroU64,
    delay: Duration,
    text: String,
}

impl Link {
    /// The network card of this process.
    pub(crate) fn paced(&self) -> Result<PacedLink, Failure> {
        let cannot = |error| Failure::Failed(format!("cannot start the thread that paces this process: {error}"));
        PacedLink::new(self.bytes_per_second, self.delay).map_err(cannot)
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Link {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (rate, delay) = text.split_once(',').unwrap_or((text, "0ms"));
        Ok(Self { bytes_per_second: rate_of(rate)?, delay: delay_of(delay)?, text: text.to_owned() })
    }
}

/// Bytes per second.
fn rate_of(text: &str) -> Result<NonZeroU64, String> {
    let bits = UNITS.iter().find_map(|(unit, bits)| Some(text.strip_suffix(*unit)?.parse::<f64>().ok()? * bits));
    let bits = bits.filter(|bits| (LEAST_BITS..=MOST_BITS).contains(bits));
    bits.and_then(|bits| NonZeroU64::new((bits / 8.0) as u64))
        .ok_or_else(|| format!("expected a rate from 100kbit to 10000Gbit such as 1Gbit, found `{text}`"))
}

fn delay_of(text: &str) -> Result<Duration, String> {
    let delay = text.parse::<SignedDuration>().ok().and_then(|delay| Duration::try_from(delay).ok());
    delay
        .filter(|delay| *delay <= LONGEST)
        .ok_or_else(|| format!("expected a delay of at most 1s such as 5ms, found `{text}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_has_a_rate_in_bits_and_a_delay() {
        let parse = |text: &str| text.parse::<Link>().map(|link| (link.bytes_per_second.get(), link.delay));
        assert_eq!(parse("1Gbit,5ms"), Ok((125_000_000, Duration::from_millis(5))));
        assert_eq!(parse("2.5Mbit"), Ok((312_500, Duration::ZERO)));
        assert_eq!(parse("800kbit,500us"), Ok((100_000, Duration::from_micros(500))));
        assert_eq!("1Gbit,5ms".parse::<Link>().unwrap().to_string(), "1Gbit,5ms");
    }

    #[test]
    fn wrong_links_are_refused_with_the_expected_form() {
        for (wrong, found) in [
            ("1GB,5ms", "1GB"),
            ("0Gbit", "0Gbit"),
            ("1Gbit,", "``"),
            ("1Gbit,5", "`5`"),
            ("1Gbit,-5ms", "-5ms"),
            ("1Gbit,2s", "2s"),
            ("99kbit", "99kbit"),
            ("NaNGbit", "NaN"),
        ] {
            let error = wrong.parse::<Link>().unwrap_err();
            assert!(error.starts_with("expected") && error.contains(found), "{wrong}: {error}");
        }
    }
}
