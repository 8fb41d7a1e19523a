//! Compression of record batches.

use std::io::Read;

use bytes::Bytes;

use crate::codec::{Malformed, Reader};

/// The largest size of the records of one batch, decompressed.
const MOST_BYTES: u64 = 256 << 20;

/// How the records of a batch are compressed: the lowest three bits of its attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Snappy,
    Lz4,
    Zstandard,
}

impl Compression {
    pub(crate) fn of_attributes(attributes: i16) -> Result<Self, Malformed> {
        Ok(match attributes & 7 {
            0 => Self::None,
            1 => Self::Gzip,
            2 => Self::Snappy,
            3 => Self::Lz4,
            4 => Self::Zstandard,
            _ => return Err(Malformed("it has an unknown compression")),
        })
    }

    pub(crate) fn decompress(self, bytes: Bytes) -> Result<Bytes, Malformed> {
        match self {
            Self::None => Ok(bytes),
            Self::Gzip => read_all(flate2::read::MultiGzDecoder::new(&bytes[..])),
            Self::Snappy => snappy(bytes),
            Self::Lz4 => read_all(lz4_flex::frame::FrameDecoder::new(&bytes[..])),
            Self::Zstandard => {
                let decoder = zstd::stream::read::Decoder::new(&bytes[..]);
                read_all(decoder.map_err(|_| Malformed("its records cannot be decompressed"))?)
            }
        }
    }
}

fn read_all(decoder: impl Read) -> Result<Bytes, Malformed> {
    let mut into = Vec::new();
    match decoder.take(MOST_BYTES + 1).read_to_end(&mut into) {
        Ok(read) if read as u64 > MOST_BYTES => Err(Malformed("its records are larger than 256 MiB")),
        Ok(_) => Ok(into.into()),
        Err(_) => Err(Malformed("its records cannot be decompressed")),
    }
}

/// The frame of Java's Snappy: this text, two versions, and blocks with their lengths.
const JAVA_SNAPPY: &[u8] = b"\x82SNAPPY\x00";

fn snappy(bytes: Bytes) -> Result<Bytes, Malformed> {
    if !bytes.starts_with(JAVA_SNAPPY) {
        return block(&bytes).map(Bytes::from);
    }
    let mut reader = Reader::new(bytes);
    reader.take(JAVA_SNAPPY.len() + 8)?;
    let mut into = Vec::new();
    while reader.left() > 0 {
        let length = usize::try_from(reader.i32()?).map_err(|_| Malformed("a length is negative"))?;
        into.extend_from_slice(&block(&reader.take(length)?)?);
        if into.len() as u64 > MOST_BYTES {
            return Err(Malformed("its records are larger than 256 MiB"));
        }
    }
    Ok(into.into())
}

fn block(bytes: &[u8]) -> Result<Vec<u8>, Malformed> {
    match snap::raw::decompress_len(bytes) {
        Ok(length) if length as u64 <= MOST_BYTES => {}
        _ => return Err(Malformed("its records cannot be decompressed")),
    }
    snap::raw::Decoder::new().decompress_vec(bytes).map_err(|_| Malformed("its records cannot be decompressed"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const TEXT: &[u8] = b"rows rows rows rows rows rows rows rows";

    #[test]
    fn every_compression_gives_the_records_back() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(TEXT).unwrap();
        let mut lz4 = lz4_flex::frame::FrameEncoder::new(Vec::new());
        lz4.write_all(TEXT).unwrap();
        let raw = snap::raw::Encoder::new().compress_vec(TEXT).unwrap();
        let mut java = [JAVA_SNAPPY, &[0, 0, 0, 1, 0, 0, 0, 1]].concat();
        for half in [&TEXT[..20], &TEXT[20..]] {
            let block = snap::raw::Encoder::new().compress_vec(half).unwrap();
            java.extend_from_slice(&(block.len() as u32).to_be_bytes());
            java.extend_from_slice(&block);
        }
        for (compression, bytes) in [
            (Compression::None, TEXT.to_vec()),
            (Compression::Gzip, gzip.finish().unwrap()),
            (Compression::Snappy, raw),
            (Compression::Snappy, java),
            (Compression::Lz4, lz4.finish().unwrap()),
            (Compression::Zstandard, zstd::encode_all(TEXT, 1).unwrap()),
        ] {
            assert_eq!(compression.decompress(bytes.into()).unwrap(), TEXT, "{compression:?}");
        }
    }

    #[test]
    fn damaged_records_are_refused() {
        for compression in [Compression::Gzip, Compression::Snappy, Compression::Lz4, Compression::Zstandard] {
            assert!(compression.decompress(Bytes::from_static(b"\x82SNAPPY no")).is_err(), "{compression:?}");
        }
        assert!(Compression::of_attributes(5).is_err());
    }
}
