//! The search for values that are infinite or not a number.

/// Vector instructions check this many values at a time. Only a block with a bad value is searched.
const BLOCK: usize = 1024;

/// Position of the first value that is infinite or not a number.
pub(crate) fn first_not_finite(values: &[f32]) -> Option<usize> {
    let broken = |block: &[f32]| block.iter().fold(false, |broken, value| broken | !value.is_finite());
    let block = values.chunks(BLOCK).position(broken)? * BLOCK;
    values[block..].iter().position(|value| !value.is_finite()).map(|position| block + position)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_that_is_not_finite_is_found_in_any_block() {
        for place in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 7] {
            let mut values = vec![1.0; 3 * BLOCK];
            assert_eq!(first_not_finite(&values), None);
            values[place..].fill(f32::NAN);
            assert_eq!(first_not_finite(&values), Some(place));
        }
    }
}
