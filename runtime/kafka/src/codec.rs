//! The primitives of Kafka's protocol. Integers are big-endian. Newer versions of requests have
//! compact strings and arrays, whose length is a varint, and tagged fields.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Bytes that do not follow the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) &'static str);

type Read<T> = Result<T, Malformed>;

const ENDS_EARLY: Malformed = Malformed("it ends early");

/// A request or a record batch under construction.
#[derive(Debug, Default)]
pub(crate) struct Writer(BytesMut);

impl Writer {
    pub(crate) fn into_bytes(self) -> Bytes {
        self.0.freeze()
    }

    pub(crate) fn i8(&mut self, value: i8) -> &mut Self {
        self.0.put_i8(value);
        self
    }

    pub(crate) fn bool(&mut self, value: bool) -> &mut Self {
        self.i8(i8::from(value))
    }

    pub(crate) fn i16(&mut self, value: i16) -> &mut Self {
        self.0.put_i16(value);
        self
    }

    pub(crate) fn i32(&mut self, value: i32) -> &mut Self {
        self.0.put_i32(value);
        self
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.0.put_u32(value);
        self
    }

    pub(crate) fn i64(&mut self, value: i64) -> &mut Self {
        self.0.put_i64(value);
        self
    }

    /// Bytes without a length.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.put_slice(bytes);
        self
    }

    pub(crate) fn string(&mut self, text: &str) -> &mut Self {
        self.i16(text.len() as i16).raw(text.as_bytes())
    }

    pub(crate) fn null_string(&mut self) -> &mut Self {
        self.i16(-1)
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.i32(bytes.len() as i32).raw(bytes)
    }

    pub(crate) fn array<T>(&mut self, items: &[T], mut write: impl FnMut(&mut Self, &T)) -> &mut Self {
        self.i32(items.len() as i32);
        items.iter().for_each(|item| write(self, item));
        self
    }

    pub(crate) fn unsigned_varint(&mut self, mut value: u32) -> &mut Self {
        while value >= 0x80 {
            self.0.put_u8(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.put_u8(value as u8);
        self
    }

    /// A number in zigzag encoding.
    pub(crate) fn varlong(&mut self, value: i64) -> &mut Self {
        let mut rest = ((value << 1) ^ (value >> 63)) as u64;
        while rest >= 0x80 {
            self.0.put_u8(rest as u8 | 0x80);
            rest >>= 7;
        }
        self.0.put_u8(rest as u8);
        self
    }

    /// Bytes of a record, with their length; `None` has length -1.
    pub(crate) fn record_bytes(&mut self, bytes: Option<&[u8]>) -> &mut Self {
        match bytes {
            None => self.varlong(-1),
            Some(bytes) => self.varlong(bytes.len() as i64).raw(bytes),
        }
    }

    pub(crate) fn compact_string(&mut self, text: &str) -> &mut Self {
        self.unsigned_varint(text.len() as u32 + 1).raw(text.as_bytes())
    }

    pub(crate) fn compact_array<T>(&mut self, items: &[T], mut write: impl FnMut(&mut Self, &T)) -> &mut Self {
        self.unsigned_varint(items.len() as u32 + 1);
        items.iter().for_each(|item| write(self, item));
        self
    }

    pub(crate) fn no_tags(&mut self) -> &mut Self {
        self.unsigned_varint(0)
    }
}

/// Reads an answer or a record batch from its beginning.
#[derive(Debug, Clone)]
pub(crate) struct Reader(Bytes);

impl Reader {
    pub(crate) fn new(bytes: Bytes) -> Self {
        Self(bytes)
    }

    pub(crate) fn left(&self) -> usize {
        self.0.len()
    }

    /// The bytes that are left.
    pub(crate) fn rest(self) -> Bytes {
        self.0
    }

    pub(crate) fn take(&mut self, count: usize) -> Read<Bytes> {
        if count > self.0.len() {
            return Err(ENDS_EARLY);
        }
        Ok(self.0.split_to(count))
    }

    fn fixed<const N: usize>(&mut self) -> Read<[u8; N]> {
        // `take` would count a reference for each byte of a number.
        let bytes = *self.0.first_chunk().ok_or(ENDS_EARLY)?;
        self.0.advance(N);
        Ok(bytes)
    }

    pub(crate) fn i8(&mut self) -> Read<i8> {
        Ok(i8::from_be_bytes(self.fixed()?))
    }

    pub(crate) fn i16(&mut self) -> Read<i16> {
        Ok(i16::from_be_bytes(self.fixed()?))
    }

    pub(crate) fn i32(&mut self) -> Read<i32> {
        Ok(i32::from_be_bytes(self.fixed()?))
    }

    pub(crate) fn u32(&mut self) -> Read<u32> {
        Ok(u32::from_be_bytes(self.fixed()?))
    }

    pub(crate) fn i64(&mut self) -> Read<i64> {
        Ok(i64::from_be_bytes(self.fixed()?))
    }

    pub(crate) fn uuid(&mut self) -> Read<[u8; 16]> {
        self.fixed()
    }

    /// A string; `None` if it is null.
    pub(crate) fn string(&mut self) -> Read<Option<String>> {
        let length = i64::from(self.i16()?);
        self.text(length)
    }

    /// Bytes; `None` if they are null.
    pub(crate) fn bytes(&mut self) -> Read<Option<Bytes>> {
        let length = i64::from(self.i32()?);
        self.sized(length)
    }

    pub(crate) fn array<T>(&mut self, read: impl FnMut(&mut Self) -> Read<T>) -> Read<Vec<T>> {
        let count = i64::from(self.i32()?);
        self.items(count, read)
    }

    pub(crate) fn compact_string(&mut self) -> Read<Option<String>> {
        let length = i64::from(self.unsigned_varint()?) - 1;
        self.text(length)
    }

    pub(crate) fn compact_array<T>(&mut self, read: impl FnMut(&mut Self) -> Read<T>) -> Read<Vec<T>> {
        let count = i64::from(self.unsigned_varint()?) - 1;
        self.items(count, read)
    }

    pub(crate) fn skip_tags(&mut self) -> Read<()> {
        for _ in 0..self.unsigned_varint()? {
            self.unsigned_varint()?;
            let length = self.unsigned_varint()?;
            self.take(length as usize)?;
        }
        Ok(())
    }

    pub(crate) fn unsigned_varint(&mut self) -> Read<u32> {
        u32::try_from(self.unsigned_varlong()?).map_err(|_| Malformed("a length has more than 32 bits"))
    }

    /// A number in zigzag encoding.
    pub(crate) fn varlong(&mut self) -> Read<i64> {
        let value = self.unsigned_varlong()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// Bytes of a record, with their length; `None` if it is -1.
    pub(crate) fn record_bytes(&mut self) -> Read<Option<Bytes>> {
        let length = self.varlong()?;
        self.sized(length)
    }

    fn unsigned_varlong(&mut self) -> Read<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.fixed()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Malformed("a number has more than 64 bits"))
    }

    fn text(&mut self, length: i64) -> Read<Option<String>> {
        let bytes = self.sized(length)?;
        let text = bytes.map(|bytes| String::from_utf8(bytes.to_vec()));
        text.transpose().map_err(|_| Malformed("a text is not UTF-8"))
    }

    fn sized(&mut self, length: i64) -> Read<Option<Bytes>> {
        match usize::try_from(length) {
            Ok(length) => self.take(length).map(Some),
            Err(_) if length == -1 => Ok(None),
            Err(_) => Err(Malformed("a length is negative")),
        }
    }

    /// Null counts as empty. An item has at least one byte, which bounds the memory that a wrong
    /// count can ask for.
    fn items<T>(&mut self, count: i64, mut read: impl FnMut(&mut Self) -> Read<T>) -> Read<Vec<T>> {
        let count = usize::try_from(count.max(0)).map_err(|_| ENDS_EARLY)?;
        if count > self.left() {
            return Err(ENDS_EARLY);
        }
        (0..count).map(|_| read(self)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn numbers_and_bytes_survive_the_round_trip(long in any::<i64>(), short in any::<u32>(), text in ".{0,20}") {
            let mut writer = Writer::default();
            writer.varlong(long).unsigned_varint(short).string(&text).compact_string(&text).no_tags();
            writer.record_bytes(Some(text.as_bytes())).record_bytes(None).bytes(text.as_bytes());
            let mut reader = Reader::new(writer.into_bytes());
            prop_assert_eq!(reader.varlong(), Ok(long));
            prop_assert_eq!(reader.unsigned_varint(), Ok(short));
            prop_assert_eq!(reader.string(), Ok(Some(text.clone())));
            prop_assert_eq!(reader.compact_string(), Ok(Some(text.clone())));
            prop_assert_eq!(reader.skip_tags(), Ok(()));
            prop_assert_eq!(reader.record_bytes(), Ok(Some(Bytes::from(text.clone()))));
            prop_assert_eq!(reader.record_bytes(), Ok(None));
            prop_assert_eq!(reader.bytes(), Ok(Some(Bytes::from(text))));
            prop_assert_eq!(reader.left(), 0);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut reader = Reader::new(Bytes::from(bytes));
            let _lengths = reader.array(Reader::compact_string);
            let _tags = reader.skip_tags();
        }
    }

    #[test]
    fn zigzag_numbers_are_those_of_the_protocol() {
        for (value, expected) in [(0, &[0][..]), (-1, &[1]), (1, &[2]), (-64, &[127]), (64, &[128, 1])] {
            let mut writer = Writer::default();
            writer.varlong(value);
            assert_eq!(&writer.into_bytes()[..], expected);
        }
    }

    #[test]
    fn a_length_beyond_the_end_is_refused() {
        assert_eq!(Reader::new(Bytes::from_static(&[0, 9, b'a'])).string(), Err(ENDS_EARLY));
        assert!(Reader::new(Bytes::from_static(&[127, 255, 255, 255])).array(Reader::i8).is_err());
        assert!(Reader::new(Bytes::from_static(&[255, 254])).string().is_err());
    }
}
