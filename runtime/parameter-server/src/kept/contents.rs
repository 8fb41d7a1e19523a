//! The format of the files of the durable state. Numbers are in the machine's own byte order,
//! because only a replacement on the same machine reads them.

use std::io::{self, BufWriter, Write};

use bytemuck::Pod;
use prost::Message;
use rectrain_embedding::Examples;
use rectrain_modes::barrier::SparseGradients;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::contribution::Contribution;

/// A buffered writer of a file.
pub(crate) type Writer = BufWriter<std::fs::File>;

/// Writes a header after its length.
fn write_header(file: &mut Writer, header: &[u8]) -> io::Result<()> {
    file.write_all(&(header.len() as u64).to_ne_bytes())?;
    file.write_all(header)
}

pub(crate) fn write_message(file: &mut Writer, message: &impl Message) -> io::Result<()> {
    write_header(file, &message.encode_to_vec())
}

pub(crate) fn write_value(file: &mut Writer, value: &impl Serialize) -> io::Result<()> {
    write_header(file, &rmp_serde::to_vec(value).map_err(io::Error::other)?)
}

pub(crate) fn write_numbers<N: Pod>(file: &mut Writer, numbers: &[N]) -> io::Result<()> {
    file.write_all(&(numbers.len() as u64).to_ne_bytes())?;
    file.write_all(bytemuck::cast_slice(numbers))
}

pub(crate) fn write_contribution(file: &mut Writer, contribution: &Contribution) -> io::Result<()> {
    let Contribution { groups, examples, moment, of_layer } = contribution;
    file.write_all(&moment.to_ne_bytes())?;
    write_numbers(file, of_layer)?;
    for (SparseGradients { keys, values }, examples) in groups.iter().zip(examples) {
        write_numbers(file, keys)?;
        write_numbers(file, values)?;
        let counts: Vec<u32> = examples.iter().flat_map(|of_key| [of_key.positive, of_key.negative]).collect();
        write_numbers(file, &counts)?;
    }
    Ok(())
}

fn pairs(counts: &[u32]) -> Vec<Examples> {
    let (pairs, _) = counts.as_chunks();
    pairs.iter().map(|&[positive, negative]| Examples { positive, negative }).collect()
}

/// The unread rest of a file. A read returns `None` if the bytes are not a value of that type.
pub(crate) struct Reader<'b>(pub(crate) &'b [u8]);

impl<'b> Reader<'b> {
    fn length(&mut self) -> Option<usize> {
        let (length, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        usize::try_from(u64::from_ne_bytes(*length)).ok()
    }

    fn bytes(&mut self, length: usize) -> Option<&'b [u8]> {
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn header(&mut self) -> Option<&'b [u8]> {
        let length = self.length()?;
        self.bytes(length)
    }

    pub(crate) fn message<M: Message + Default>(&mut self) -> Option<M> {
        M::decode(self.header()?).ok()
    }

    pub(crate) fn value<V: DeserializeOwned>(&mut self) -> Option<V> {
        rmp_serde::from_slice(self.header()?).ok()
    }

    pub(crate) fn numbers<N: Pod>(&mut self) -> Option<Vec<N>> {
        let length = self.length()?.checked_mul(size_of::<N>())?;
        Some(bytemuck::pod_collect_to_vec(self.bytes(length)?))
    }

    /// Reads the gradients of all groups. `dims` has the number of values in a row of each group.
    pub(crate) fn contribution(&mut self, dims: &[usize]) -> Option<Contribution> {
        let (moment, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        let (moment, of_layer) = (u64::from_ne_bytes(*moment), self.numbers()?);
        let mut contribution = Contribution { moment, of_layer, ..Contribution::default() };
        for dim in dims {
            let (keys, values): (Vec<u64>, Vec<f32>) = (self.numbers()?, self.numbers()?);
            let examples = pairs(&self.numbers()?);
            let fits = values.len() == keys.len() * dim && (examples.is_empty() || examples.len() == keys.len());
            contribution.groups.push(fits.then_some(SparseGradients { keys, values })?);
            contribution.examples.push(examples);
        }
        Some(contribution)
    }

    /// `None` unless the whole file has been read.
    pub(crate) fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

#[cfg(test)]
// Helpers outside the test functions unwrap too.
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use rectrain_proto::v1;

    use super::*;

    fn written(write: impl FnOnce(&mut Writer) -> io::Result<()>) -> Vec<u8> {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut writer = BufWriter::new(file.reopen().unwrap());
        write(&mut writer).unwrap();
        writer.flush().unwrap();
        std::fs::read(file.path()).unwrap()
    }

    #[test]
    fn complete_files_are_read_and_truncated_files_are_refused() {
        let contribution = Contribution {
            groups: vec![
                SparseGradients { keys: vec![3, 9], values: vec![0.5, -0.25, f32::MIN_POSITIVE, 4.0] },
                SparseGradients::default(),
            ],
            examples: vec![vec![Examples { positive: 1, negative: 0 }, Examples { positive: 7, negative: 9 }], vec![]],
            moment: 1_700_000_000,
            of_layer: vec![0.25, -8.0],
        };
        let push = v1::TokenPush { rank: 3, pulled_at: vec![7], ..v1::TokenPush::default() };
        let bytes = written(|file| {
            write_message(file, &push)?;
            write_value(file, &(1_u64, "two"))?;
            write_numbers(file, &[1.5_f32])?;
            write_contribution(file, &contribution)
        });
        let read = |bytes| {
            let mut reader = Reader(bytes);
            let read = (
                reader.message::<v1::TokenPush>()?,
                reader.value::<(u64, String)>()?,
                reader.numbers::<f32>()?,
                reader.contribution(&[2, 4])?,
            );
            reader.end().map(|()| read)
        };
        assert_eq!(read(&bytes), Some((push, (1, "two".to_owned()), vec![1.5], contribution)));
        assert!((0..bytes.len()).all(|length| read(&bytes[..length]).is_none()));
        assert!(read(&[&bytes[..], &[0]].concat()).is_none());
        assert!(Reader(&[0xff; 16]).numbers::<u64>().is_none());
    }
}
