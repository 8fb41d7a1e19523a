//! The codec against itself in pieces, against damage, and against noise.

use std::io::IoSlice;

use half::f16;
use proptest::prelude::*;

use super::*;
use crate::tensor::TensorData;

fn data() -> impl Strategy<Value = TensorData> {
    let length = 0..40usize;
    prop_oneof![
        prop::collection::vec(any::<u32>().prop_map(|v| v as f32), length.clone()).prop_map(TensorData::F32),
        prop::collection::vec(any::<u16>().prop_map(|v| f16::from_f32(v.into())), length.clone())
            .prop_map(TensorData::F16),
        prop::collection::vec(any::<u64>(), length.clone()).prop_map(TensorData::U64),
        prop::collection::vec(any::<u32>(), length.clone()).prop_map(TensorData::U32),
        prop::collection::vec(any::<u16>(), length.clone()).prop_map(TensorData::U16),
        prop::collection::vec(any::<u8>(), length).prop_map(TensorData::U8),
    ]
}

fn tensor() -> impl Strategy<Value = Tensor> {
    (data(), 0..4usize).prop_map(|(data, form)| {
        let n = data.len();
        let dims = match form {
            0 => vec![n],
            1 => vec![1, n],
            2 => vec![n, 1, 1],
            _ if n == 1 => vec![],
            _ => vec![n, 1],
        };
        Tensor::new(&dims, data).unwrap()
    })
}

fn frame() -> impl Strategy<Value = Frame> {
    let meta = prop::collection::vec(any::<u8>(), 0..50);
    (any::<u16>(), meta, prop::collection::vec(tensor(), 0..6)).prop_map(|(kind, meta, tensors)| Frame {
        kind,
        meta: meta.into(),
        tensors,
    })
}

fn bytes_of(frame: &Frame, id: u64) -> Vec<u8> {
    encode_frame(FrameRole::Request, id, frame.clone(), &Limits::default()).unwrap()
}

/// All frames in `bytes`, fed in pieces of the given lengths, in rotation.
fn decode_in_pieces(bytes: &[u8], pieces: &[usize]) -> Result<Vec<DecodedFrame>, Malformed> {
    let mut decoder = FrameDecoder::new(Limits::default());
    let (mut frames, mut at) = (Vec::new(), 0);
    for piece in pieces.iter().cycle() {
        let end = bytes.len().min(at + piece);
        while at < end {
            let (count, frame) = decoder.fill(end - at, |buffer| {
                let count = buffer.remaining().min(end - at);
                buffer.put_slice(&bytes[at..at + count]);
                count
            })?;
            assert!(count > 0);
            at += count;
            frames.extend(frame);
        }
        if at == bytes.len() {
            break;
        }
    }
    assert!(decoder.is_between_frames());
    Ok(frames)
}

proptest! {
    #[test]
    fn frames_in_any_pieces_are_the_frames_that_were_encoded(
        frames in prop::collection::vec(frame(), 1..4),
        pieces in prop::collection::vec(1usize..200, 1..5),
    ) {
        let bytes: Vec<u8> = frames.iter().zip(7..).flat_map(|(f, id)| bytes_of(f, id)).collect();
        let decoded = decode_in_pieces(&bytes, &pieces).unwrap();
        prop_assert_eq!(decoded.iter().map(|d| d.bytes).sum::<u64>(), bytes.len() as u64);
        prop_assert!(decoded.iter().zip(7..).all(|(d, id)| d.request_id == id && d.role == FrameRole::Request));
        prop_assert_eq!(decoded.into_iter().map(|d| d.frame).collect::<Vec<_>>(), frames);
    }

    #[test]
    fn bytes_lent_for_partial_writes_are_the_bytes_of_the_frame(
        frame in frame(),
        steps in prop::collection::vec((1usize..300, 1usize..300, 1usize..10), 1..5),
    ) {
        let want = bytes_of(&frame, 9);
        let mut outgoing =
            Outgoing::new(FrameRole::Request, 9, frame, &Limits::default()).unwrap();
        let mut written = Vec::new();
        for (budget, most, slots) in steps.iter().cycle() {
            let lendable = outgoing.prepare(*budget);
            let mut slices = vec![IoSlice::new(&[]); *slots];
            let mut used = 0;
            outgoing.lend(&mut slices, &mut used);
            let lent: Vec<u8> = slices[..used].iter().flat_map(|s| s.to_vec()).collect();
            prop_assert!(!lent.is_empty() && lent.len() <= lendable);
            let count = lent.len().min(*most);
            written.extend_from_slice(&lent[..count]);
            prop_assert_eq!(outgoing.advance(count), 0);
            if outgoing.is_written() {
                break;
            }
        }
        prop_assert_eq!(written, want);
    }

    #[test]
    fn a_flipped_bit_is_refused_wherever_it_is(frame in frame(), at in any::<prop::sample::Index>()) {
        let mut bytes = bytes_of(&frame, 1);
        let bit = at.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(decode_frame(&bytes, &Limits::default()).is_err());
    }

    #[test]
    fn a_frame_that_ends_early_is_truncated(frame in frame(), at in any::<prop::sample::Index>()) {
        let bytes = bytes_of(&frame, 1);
        let end = at.index(bytes.len());
        prop_assert_eq!(decode_frame(&bytes[..end], &Limits::default()), Err(Malformed::Truncated));
    }

    #[test]
    fn noise_is_refused_without_a_panic(noise in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(decode_frame(&noise, &Limits::default()).is_err());
    }

    /// Noise behind a valid header, with valid checksums: only the descriptors are wrong.
    #[test]
    fn noise_in_a_body_is_refused_or_a_frame(
        tensors in 0u16..4, meta_bytes in 0u32..10,
        mut body in prop::collection::vec(prop_oneof![4 => Just(0u8), 2 => 0u8..8, 1 => any::<u8>()], 0..200),
    ) {
        let header = Header {
            kind: 1, role: FrameRole::Reply, tensors, meta_bytes, request_id: 1,
            body_bytes: body.len() as u64,
        };
        let mut bytes = header.encode().to_vec();
        let checksum = crc32fast::hash(&body);
        bytes.append(&mut body);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        if let Ok((decoded, taken)) = decode_frame(&bytes, &Limits::default()) {
            prop_assert_eq!(taken, bytes.len());
            prop_assert_eq!(encode_frame(decoded.role, 1, decoded.frame, &Limits::default()).unwrap(), bytes);
        }
    }
}

/// The error for a frame of one 2×3 matrix with one change, and with both checksums made valid.
fn changed(change: impl FnOnce(&mut Vec<u8>)) -> Malformed {
    let frame = Frame::new(5, &b"meta"[..]).with(Tensor::new(&[2, 3], vec![1f32; 6]).unwrap());
    let mut bytes = bytes_of(&frame, 1);
    change(&mut bytes);
    let header = crc32fast::hash(&bytes[..32]);
    bytes[32..36].copy_from_slice(&header.to_le_bytes());
    let end = bytes.len() - 4;
    let body = crc32fast::hash(&bytes[HEADER_BYTES..end]);
    bytes[end..].copy_from_slice(&body.to_le_bytes());
    decode_frame(&bytes, &Limits { max_frame_bytes: 1000, max_meta_bytes: 100 }).unwrap_err()
}

#[test]
fn each_wrong_field_has_its_own_reason() {
    let set =
        |at: usize, value: &'static [u8]| changed(|bytes| bytes[at..at + value.len()].copy_from_slice(value)).reason();
    assert_eq!(set(0, b"HTTP"), "magic");
    assert_eq!(set(4, &[2, 0]), "version");
    assert_eq!(set(8, &[0, 0]), "role");
    assert_eq!(set(8, &[6, 0]), "role");
    assert_eq!(set(24, &[0, 0, 0, 0, 0, 0, 0, 0x80]), "frame_length");
    assert_eq!(set(24, &[0xe9, 3]), "frame_length");
    assert_eq!(set(12, &[101]), "meta_length");
    assert_eq!(set(12, &[0xff, 0xff, 0xff, 0xff]), "meta_length");
    assert_eq!(set(24, &[43]), "body_length");
    assert_eq!(set(24, &[67]), "body_length");
    assert_eq!(set(12, &[5]), "body_length");
    assert_eq!(set(10, &[2]), "body_length");
    let first = HEADER_BYTES;
    assert_eq!(set(first, &[0]), "dtype");
    assert_eq!(set(first, &[7]), "dtype");
    assert_eq!(set(first + 1, &[4]), "descriptor");
    assert_eq!(set(first + 1, &[1]), "descriptor");
    assert_eq!(set(first + 7, &[1]), "descriptor");
    assert_eq!(set(first, &[3]), "tensor_length");
    assert_eq!(set(first + 8, &[3]), "tensor_length");
    assert_eq!(set(first + 8, &[0xff; 16]), "tensor_length");
    assert_eq!(set(first + 32, &[20]), "tensor_length");
    assert_eq!(
        set(first + 8, &[1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12]),
        "body_length"
    );
}

#[test]
fn wrong_checksums_are_told_apart() {
    let bytes = bytes_of(&Frame::new(5, &b"meta"[..]), 1);
    let flipped = |at: usize| {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        decode_frame(&bytes, &Limits::default()).unwrap_err().reason()
    };
    assert_eq!((flipped(6), flipped(33)), ("header_checksum", "header_checksum"));
    assert_eq!((flipped(HEADER_BYTES), flipped(bytes.len() - 1)), ("body_checksum", "body_checksum"));
}

#[test]
fn a_decoder_that_has_refused_keeps_refusing() {
    let mut decoder = FrameDecoder::new(Limits::default());
    let mut feed = |byte: u8| decoder.fill(1, |buffer| buffer.put_slice(&[byte])).map(|_| ());
    for _ in 0..HEADER_BYTES - 1 {
        feed(0).unwrap();
    }
    let refused = feed(0).unwrap_err();
    assert_eq!(refused, Malformed::Magic { found: 0 });
    assert_eq!(feed(b'R').unwrap_err(), refused);
}

#[test]
fn a_frame_that_a_receiver_would_refuse_is_not_encoded() {
    let limits = Limits { max_frame_bytes: 100, max_meta_bytes: 10 };
    let reason = |frame| encode_frame(FrameRole::Request, 1, frame, &limits).unwrap_err().reason();
    assert_eq!(reason(Frame::new(1, vec![0; 11])), "meta_length");
    assert_eq!(reason(Frame::default().with(vec![0u8; 61])), "frame_length");
    assert!(encode_frame(FrameRole::Request, 1, Frame::default().with(vec![0u8; 60]), &limits).is_ok());
    let many = Frame { tensors: vec![Tensor::from(Vec::<u8>::new()); 65_536], ..Frame::default() };
    assert_eq!(reason(many), "tensor_count");
}
