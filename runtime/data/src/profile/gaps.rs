//! The distribution of the time between two sightings of an id, in bounded memory.

/// Parts of an octave. A length of time is known to 1/32 of it.
const PARTS: u64 = 32;
const PART_BITS: u32 = PARTS.ilog2();
/// Below this, each second has a count of its own.
const EXACT: u64 = 2 * PARTS;

/// Counts of gaps, by their length.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gaps {
    counts: Vec<u64>,
    total: u64,
}

impl Gaps {
    /// Counts a gap.
    #[inline]
    pub(crate) fn add(&mut self, seconds: u64) {
        let place = place(seconds);
        if self.counts.len() <= place {
            self.counts.resize(place + 1, 0);
        }
        self.counts[place] += 1;
        self.total += 1;
    }

    /// The number of gaps.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The seconds that a share of the gaps do not exceed: exact below 64 seconds, otherwise at
    /// most 1/32 too long, and never too short. `None` without a gap.
    pub(crate) fn percentile(&self, share: f64) -> Option<u64> {
        let wanted = ((self.total as f64 * share).ceil() as u64).clamp(1, self.total.max(1));
        let mut up_to = 0;
        let place = self.counts.iter().position(|count| {
            up_to += count;
            up_to >= wanted
        })?;
        Some(longest(place))
    }
}

/// The place of a length.
#[inline]
fn place(seconds: u64) -> usize {
    if seconds < EXACT {
        return seconds as usize;
    }
    let shift = seconds.ilog2() - PART_BITS;
    (u64::from(shift) * PARTS + (seconds >> shift)) as usize
}

/// The longest length of a place.
fn longest(place: usize) -> u64 {
    let place = place as u64;
    if place < EXACT {
        return place;
    }
    let shift = place / PARTS - 1;
    let first = place - shift * PARTS;
    // The last place ends at 2⁶⁴, which is 0 here.
    ((first + 1) << shift).wrapping_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_holds_a_32nd_of_its_octave() {
        let mut last = None;
        for seconds in (0..5_000).chain([86_400, 1 << 40, u64::MAX]) {
            let (place, longest) = (place(seconds), longest(place(seconds)));
            assert!(longest >= seconds && longest - seconds <= seconds / 32, "{seconds}: {longest}");
            assert!(last.is_none_or(|last| place >= last), "{seconds}");
            last = Some(place);
        }
    }

    #[test]
    fn percentiles_agree_with_a_sorted_list() {
        let mut random = rectrain_random::SplitMix64::new(3);
        let mut length = || {
            let octave = 1_u64 << random.below(30);
            octave + random.below(octave)
        };
        let lengths: Vec<u64> = (0..20_000).map(|_| length()).collect();
        let mut gaps = Gaps::default();
        lengths.iter().for_each(|length| gaps.add(*length));
        let mut sorted = lengths;
        sorted.sort_unstable();
        for share in [0.0, 0.5, 0.99, 0.999, 1.0] {
            let exact = sorted[((sorted.len() as f64 * share).ceil() as usize).max(1) - 1];
            let found = gaps.percentile(share).unwrap();
            assert!(found >= exact && found <= exact + exact / 32, "{share}: {found}, not {exact}");
        }
        assert_eq!((Gaps::default().percentile(0.5), gaps.total()), (None, 20_000));
    }
}
