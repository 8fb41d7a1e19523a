//! Which member of a role gets which unit of work: in equal turns, or by shares. Pure. The roles
//! assign pieces by it, and so does the simulation.

/// Shares are parts of this many, for each member. So the least share is a piece in thousands.
const PARTS_A_MEMBER: u64 = 4096;

/// Shares in proportion to weights, with a power of two as their sum. Each is less than one off.
/// Empty for equal weights.
#[must_use]
pub fn of_weights(weights: &[u32]) -> Vec<u32> {
    let total: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
    let first = weights.first().copied().unwrap_or_default();
    if total == 0 || weights.iter().all(|weight| *weight == first) {
        return Vec::new();
    }
    let parts = PARTS_A_MEMBER * (weights.len() as u64).next_power_of_two();
    let mut before = 0;
    let share = |weight: &u32| {
        let begin = parts * before / total;
        before += u64::from(*weight);
        (parts * before / total - begin) as u32
    };
    weights.iter().map(share).collect()
}

/// The member at a position of the sequence of all units. Without `shares`, `members` take turns.
///
/// The positions in bit-reversed order fill the range of the shares evenly (van der Corput's
/// sequence). So in any run of units, each member has about its share.
#[must_use]
pub fn member_at(shares: &[u32], members: u32, position: u64) -> usize {
    let parts: u64 = shares.iter().map(|share| u64::from(*share)).sum();
    if parts < 2 {
        return (position % u64::from(members.max(1))) as usize;
    }
    let part = position.reverse_bits() >> (u64::BITS - parts.trailing_zeros());
    let ends = shares.iter().scan(0, |end, share| {
        *end += u64::from(*share);
        Some(*end)
    });
    ends.take_while(|end| *end <= part).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_in_proportion_to_weights_and_equal_weights_have_none() {
        assert_eq!(of_weights(&[64, 64, 64]), [0_u32; 0]);
        assert_eq!(of_weights(&[0, 0]), [0_u32; 0]);
        assert_eq!(of_weights(&[4096, 128]), [7943, 249]);
        assert_eq!(of_weights(&[4096, 1, 0]).iter().sum::<u32>(), 16_384);
        let many: Vec<u32> = (0..1000).map(|member| if member == 7 { 2 } else { 4096 }).collect();
        let shares = of_weights(&many);
        assert_eq!(shares.iter().sum::<u32>(), 4_194_304);
        assert!((2..=3).contains(&shares[7]) && shares.iter().all(|share| *share <= 4200), "{shares:?}");
    }

    #[test]
    fn members_take_turns_without_shares_and_have_their_shares_of_a_cycle() {
        let members = |shares: &[u32], positions| (0..positions).map(|at| member_at(shares, 3, at)).collect::<Vec<_>>();
        assert_eq!(members(&[], 7), [0, 1, 2, 0, 1, 2, 0]);
        let cycle = members(&[5, 1, 2], 8);
        assert_eq!([0, 1, 2].map(|member| cycle.iter().filter(|found| **found == member).count()), [5, 1, 2]);
    }
}
