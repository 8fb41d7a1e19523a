//! What of a server without a barrier outlives its process beside its rows: the pushes in its buffers, where the buffers stood
//! before them, which keys changed in which step, and its dense partition.
//!
//! ```text
//! directory ─┬─ row-pushes/NUMBER, dense-pushes/NUMBER   in the order in which they were taken in, until their step is applied
//!            ├─ row-steps/STEP                           where the rows' buffer stood after the step, and the keys it changed
//!            └─ partition                                parameters, optimizer state, counts, and where their buffer stood
//! ```
//!
//! A step of the rows is applied when the update log says so; its file is there before. A step of the partition is applied when
//! its file is there. What was pushed since is taken in once more, in the same order, and so gives the same steps.

use std::ops::Range;
use std::path::{Path, PathBuf};

use rectrain_modes::GlobalStep;
use rectrain_modes::Token;
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

use super::contents::{Reader, Writer, write_contribution, write_message, write_numbers, write_value};
use super::{Kept, failed, remove_file};
use crate::half::BufferStanding;
use crate::partition::Partition;
use crate::shared::Contribution;
use rectrain_protocol::error::RoleError;

const PARTITION: &str = "partition";
const ROW_STEPS: &str = "row-steps";
/// The folders of this module.
pub(crate) const FOLDERS: [&str; 3] = [ROW_STEPS, Pushes::Rows.folder(), Pushes::Dense.folder()];

/// Of which buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushes {
    Rows,
    Dense,
}

impl Pushes {
    const fn folder(self) -> &'static str {
        match self {
            Self::Rows => "row-pushes",
            Self::Dense => "dense-pushes",
        }
    }
}

/// A push that is written and was not taken in yet: removed unless it is kept.
pub(crate) struct WrittenPush(Option<PathBuf>);

impl Drop for WrittenPush {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Should it stay, it is overwritten, or removed by who comes next.
            let _removed = std::fs::remove_file(path);
        }
    }
}

/// Where the rows' buffer stands between two steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RowsStanding {
    pub(crate) buffer: BufferStanding,
    pub(crate) oldest: Token,
}

/// What was found of a server that had no barrier.
#[derive(Default)]
pub(crate) struct LeftTokens {
    /// None before the first step.
    pub(crate) rows: Option<RowsStanding>,
    /// The keys that steps changed, by group, the steps ascending.
    pub(crate) changed: Vec<(GlobalStep, Vec<Vec<u64>>)>,
    pub(crate) row_pushes: Vec<(v1::TokenPush, Contribution)>,
    pub(crate) dense: Option<BufferStanding>,
    pub(crate) dense_pushes: Vec<(v1::TokenPush, Vec<f32>)>,
}

impl Kept {
    /// Writes the gradients of a batch's rows, for [`Self::keep_push`].
    pub(crate) fn write_row_push(&self, push: &v1::TokenPush, contribution: &Contribution) -> Option<WrittenPush> {
        self.write_push(Pushes::Rows, push, |file| write_contribution(file, contribution))
    }

    /// Writes the gradient of the dense partition, for [`Self::keep_push`].
    pub(crate) fn write_dense_push(&self, push: &v1::TokenPush, gradient: &[f32]) -> Option<WrittenPush> {
        self.write_push(Pushes::Dense, push, |file| write_numbers(file, gradient))
    }

    fn write_push(
        &self,
        of: Pushes,
        push: &v1::TokenPush,
        gradient: impl FnOnce(&mut Writer) -> std::io::Result<()>,
    ) -> Option<WrittenPush> {
        self.or_give_up(|| {
            let write = |file: &mut Writer| write_message(file, push).and_then(|()| gradient(file));
            Ok(WrittenPush(Some(self.write(&format!("{}/push", of.folder()), write)?)))
        })
    }

    /// The push is the buffer's push of this number: whoever takes this server's place takes it in again.
    pub(crate) fn keep_push(&self, of: Pushes, number: u64, written: Option<WrittenPush>) {
        if let Some(path) = written.and_then(|mut written| written.0.take()) {
            self.or_give_up(|| self.name(&path, &format!("{}/{number}", of.folder())));
        }
    }

    /// Pushes whose step is applied.
    pub(crate) fn forget_pushes(&self, of: Pushes, numbers: Range<u64>) {
        self.or_give_up(|| {
            for number in numbers {
                self.remove(&format!("{}/{number}", of.folder()))?;
            }
            Ok(())
        });
    }

    /// A step of the rows is about to be applied: where the buffer stands after it, and the keys that it changes, by group.
    pub(crate) fn keep_row_step(&self, step: GlobalStep, standing: &RowsStanding, keys: &[Vec<u64>]) {
        self.or_give_up(|| {
            let written = self.write(&row_step(step), |file| {
                write_value(file, standing)?;
                keys.iter().try_for_each(|keys| write_numbers(file, keys))
            })?;
            self.name(&written, &row_step(step))
        });
    }

    /// Nobody asks any more which keys these steps changed.
    pub(crate) fn forget_row_step(&self, step: GlobalStep) {
        self.or_give_up(|| self.remove(&row_step(step)));
    }

    /// Keeps the dense partition, and where its buffer stands, if there is one.
    pub(crate) fn keep_partition(&self, partition: &Partition, buffer: Option<&BufferStanding>) {
        self.or_give_up(|| {
            let written = self.write(PARTITION, |file| {
                write_value(file, &(partition.step(), buffer))?;
                write_message(file, &partition.applied())?;
                write_numbers(file, &partition.parameters().values)?;
                write_numbers(file, partition.state())
            })?;
            self.name(&written, PARTITION)
        });
    }

    fn remove(&self, name: &str) -> Result<(), RoleError> {
        remove_file(&self.directory.join(name))
    }

    /// All that this module keeps.
    pub(crate) fn remove_tokens(&self) -> Result<(), RoleError> {
        self.remove(PARTITION)?;
        for folder in FOLDERS {
            files(&self.directory.join(folder))?.iter().try_for_each(|(_, path)| remove_file(path))?;
        }
        Ok(())
    }
}

fn row_step(step: GlobalStep) -> String {
    format!("{ROW_STEPS}/{}", step.0)
}

/// The dense partition that was found, and where its buffer stood, if there was one.
pub(crate) fn read_partition(directory: &Path) -> Result<(Partition, Option<BufferStanding>), RoleError> {
    let path = directory.join(PARTITION);
    let read = |mut reader: Reader<'_>| {
        let (step, buffer) = reader.value()?;
        let (applied, values, state) = (reader.message()?, reader.numbers()?, reader.numbers()?);
        reader.end()?;
        Some((Partition::found(values, state, step, applied), buffer))
    };
    read_file(&path, read)
}

/// What was found of the buffers: steps before `next` are applied to the rows.
pub(crate) fn read_tokens(
    directory: &Path,
    dims: &[usize],
    next: u64,
    dense: Option<BufferStanding>,
) -> Result<LeftTokens, RoleError> {
    let mut left = LeftTokens::default();
    for (step, path) in files(&directory.join(ROW_STEPS))? {
        // One that was not applied is applied again.
        let Some(step) = step.filter(|step| *step < next) else {
            remove_file(&path)?;
            continue;
        };
        let (standing, keys) = read_file(&path, |mut reader| {
            let standing: RowsStanding = reader.value()?;
            let keys: Option<Vec<Vec<u64>>> = dims.iter().map(|_| reader.numbers()).collect();
            reader.end()?;
            Some((standing, keys?))
        })?;
        left.rows = Some(standing);
        left.changed.push((GlobalStep(step), keys));
    }
    let from = left.rows.as_ref().map_or(0, |rows| rows.buffer.pushes);
    left.row_pushes = read_pushes(directory, Pushes::Rows, from, |reader| reader.contribution(dims))?;
    let from = dense.as_ref().map_or(0, |buffer| buffer.pushes);
    left.dense_pushes = read_pushes(directory, Pushes::Dense, from, |reader| reader.numbers())?;
    left.dense = dense;
    Ok(left)
}

/// Those from number `from` on, in their order; others, and what was never finished, are removed.
fn read_pushes<G>(
    directory: &Path,
    of: Pushes,
    from: u64,
    gradient: impl Fn(&mut Reader<'_>) -> Option<G>,
) -> Result<Vec<(v1::TokenPush, G)>, RoleError> {
    let mut pushes = Vec::new();
    for (number, path) in files(&directory.join(of.folder()))? {
        match number {
            Some(number) if number == from + pushes.len() as u64 => pushes.push(read_file(&path, |mut reader| {
                let push = (reader.message()?, gradient(&mut reader)?);
                reader.end().map(|()| push)
            })?),
            Some(number) if number >= from => {
                let gap = std::io::Error::other("the push before it is not there");
                return Err(failed("use", &path, gap));
            }
            _ => remove_file(&path)?,
        }
    }
    Ok(pushes)
}

fn read_file<T>(path: &Path, read: impl FnOnce(Reader<'_>) -> Option<T>) -> Result<T, RoleError> {
    let bytes = std::fs::read(path).map_err(|source| failed("read", path, source))?;
    read(Reader(&bytes)).ok_or_else(|| failed("read", path, std::io::ErrorKind::InvalidData.into()))
}

/// The files of a folder with the number that is the name of each, ascending; those without one first.
fn files(folder: &Path) -> Result<Vec<(Option<u64>, PathBuf)>, RoleError> {
    let entries = std::fs::read_dir(folder).map_err(|source| failed("read", folder, source))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(|source| failed("read", folder, source))?.path();
        let number = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
        files.push((number, path));
    }
    files.sort_unstable();
    Ok(files)
}
