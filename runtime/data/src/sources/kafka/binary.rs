//! Reads binary encodings of records. Avro's and Protobuf's have the same numbers of variable
//! length.

/// The rest of a record, or of a part of it. Errors are the expectation.
pub(super) struct BinaryReader<'a> {
    pub(super) rest: &'a [u8],
}

impl<'a> BinaryReader<'a> {
    /// The next `count` bytes.
    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or("more bytes")?;
        self.rest = rest;
        Ok(taken)
    }

    /// The next `N` bytes.
    pub(super) fn fixed<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        self.take(N)?.try_into().map_err(|_| "more bytes")
    }

    /// A number of 64 bits in one to ten bytes, the lowest seven bits first.
    pub(super) fn varint(&mut self) -> Result<u64, &'static str> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.fixed()?;
            // The tenth byte has the highest bit only.
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err("a number of at most 64 bits")
    }

    /// A number whose lowest bit is its sign.
    pub(super) fn zigzag(&mut self) -> Result<i64, &'static str> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn varint(bytes: &[u8]) -> Result<u64, &'static str> {
        BinaryReader { rest: bytes }.varint()
    }

    #[test]
    fn numbers_have_at_most_64_bits() {
        let of = |last: &[u8]| varint(&[&[0xff; 9][..], last].concat());
        assert_eq!(of(&[1]), Ok(u64::MAX));
        for wrong in [&[2][..], &[0x7f], &[0x81, 0]] {
            assert_eq!(of(wrong), Err("a number of at most 64 bits"), "{wrong:?}");
        }
        assert_eq!(of(&[]), Err("more bytes"));
        assert_eq!((varint(&[0]), varint(&[0xac, 2, 5])), (Ok(0), Ok(300)));
    }

    #[test]
    fn signs_alternate_in_zigzag() {
        for (number, bytes) in [(0, &[0][..]), (-1, &[1][..]), (1, &[2][..]), (-65, &[0x81, 1][..])] {
            assert_eq!(BinaryReader { rest: bytes }.zigzag(), Ok(number));
        }
        let [least, most] = [0xff_u8, 0xfe].map(|first| [&[first][..], &[0xff; 8], &[1]].concat());
        assert_eq!(BinaryReader { rest: &least }.zigzag(), Ok(i64::MIN));
        assert_eq!(BinaryReader { rest: &most }.zigzag(), Ok(i64::MAX));
    }
}
