//! The durable state of a server in modes without a barrier, beside its rows. It has the pushes in
//! the buffers, the buffers' positions before these pushes, the keys that each step changed, and
//! the dense partition.
//!
//! ```text
//! directory ─┬─ row-pushes/NUMBER    in order, until their step is applied
//!            ├─ dense-pushes/NUMBER  likewise
//!            ├─ row-steps/STEP       position of the rows' buffer after the step, and changed keys
//!            ├─ dense-pieces/STEP-PIECE  with pulled pieces: a dense gradient, until its step is applied
//!            └─ partition            parameters, optimizer state, counts, position of its buffer,
//!                                    exchanges with replicas, memory of the rounds with a mean, and
//!                                    with pulled pieces the parameters before the last step
//! ```
//!
//! A step of the rows is applied once the update log says so. Its file in `row-steps` is written
//! before that. A step of the partition is applied once its file is renamed. Recovery replays all
//! later pushes in the same order, and so arrives at the same steps.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rectrain_modes::GlobalStep;
use rectrain_modes::Token;
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

use super::contents::{Reader, Writer, write_contribution, write_message, write_numbers, write_value};
use super::{Kept, failed, remove_file, step_and_piece};
use crate::averages::Averages;
use crate::contribution::Contribution;
use crate::half::BufferStanding;
use crate::partition::Partition;
use rectrain_protocol::error::RoleError;

const PARTITION: &str = "partition";
const ROW_STEPS: &str = "row-steps";
const PIECES: &str = "dense-pieces";
/// The subfolders that this module uses.
pub(crate) const FOLDERS: [&str; 4] = [ROW_STEPS, PIECES, Pushes::Rows.folder(), Pushes::Dense.folder()];

/// The buffer that a push belongs to.
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

/// A push with a temporary name, which the buffer has not accepted yet. Dropping it removes the
/// file, unless [`Kept::keep_push`] has renamed it.
pub(crate) struct WrittenPush(Option<PathBuf>);

impl Drop for WrittenPush {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // If the removal fails, a recovery removes the file.
            let _removed = std::fs::remove_file(path);
        }
    }
}

/// The position of the rows' buffer between two steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RowsStanding {
    pub(crate) buffer: BufferStanding,
    pub(crate) oldest: Token,
}

/// The recovered state of a server in a mode without a barrier.
#[derive(Default)]
pub(crate) struct LeftTokens {
    /// `None` before the first step.
    pub(crate) rows: Option<RowsStanding>,
    /// The keys that each step changed, by group. Steps ascend.
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

    /// Makes a push durable as the buffer's push of this number. A replacement of this server
    /// replays it.
    pub(crate) fn keep_push(&self, of: Pushes, number: u64, written: Option<WrittenPush>) {
        if let Some(path) = written.and_then(|mut written| written.0.take()) {
            self.or_give_up(|| self.name(&path, &format!("{}/{number}", of.folder())));
        }
    }

    /// Removes pushes whose step is applied.
    pub(crate) fn forget_pushes(&self, of: Pushes, numbers: Range<u64>) {
        self.or_give_up(|| {
            for number in numbers {
                self.remove(&format!("{}/{number}", of.folder()))?;
            }
            Ok(())
        });
    }

    /// Records a step of the rows before it is applied: the buffer's position after it, and the
    /// changed keys by group.
    pub(crate) fn keep_row_step(&self, step: GlobalStep, standing: &RowsStanding, keys: &[Vec<u64>]) {
        self.or_give_up(|| {
            let written = self.write(&row_step(step), |file| {
                write_value(file, standing)?;
                keys.iter().try_for_each(|keys| write_numbers(file, keys))
            })?;
            self.name(&written, &row_step(step))
        });
    }

    /// Removes the record of a step whose changed keys can no longer make a gradient stale.
    pub(crate) fn forget_row_step(&self, step: GlobalStep) {
        self.or_give_up(|| self.remove(&row_step(step)));
    }

    /// Writes the dense partition, and the position of its buffer if it has one.
    pub(crate) fn keep_partition(&self, partition: &Partition, buffer: Option<&BufferStanding>) {
        self.or_give_up(|| {
            let written = self.write(PARTITION, |file| {
                write_value(file, &(partition.step(), buffer, partition.exchanges()))?;
                write_message(file, &partition.applied())?;
                write_numbers(file, &partition.parameters().values)?;
                write_numbers(file, partition.state())?;
                write_averages(file, partition.averages())?;
                let previous = partition.previous();
                write_value(file, &previous.is_some())?;
                previous.map_or(Ok(()), |previous| write_numbers(file, &previous))
            })?;
            self.name(&written, PARTITION)
        });
    }

    /// With pulled pieces: writes the gradient of the dense partition from a piece.
    /// [`Self::forget_pieces`] removes it once its step is applied. A late retry may write it again
    /// after that. It then stays until the next step is applied.
    pub(crate) fn keep_piece(&self, step: u64, piece: u32, gradient: &[f32]) {
        let name = piece_name(step, piece);
        self.or_give_up(|| {
            let written = self.write(&name, |file| write_numbers(file, gradient))?;
            let mut pieces = self.lock_pieces();
            self.name(&written, &name)?;
            pieces.insert((step, piece));
            Ok(())
        });
    }

    /// Removes the dense gradients of all steps before `next`. These steps are applied.
    pub(crate) fn forget_pieces(&self, next: u64) {
        self.or_give_up(|| {
            let mut pieces = self.lock_pieces();
            while let Some(&(step, piece)) = pieces.first().filter(|(step, _)| *step < next) {
                self.remove(&piece_name(step, piece))?;
                pieces.pop_first();
            }
            Ok(())
        });
    }

    fn remove(&self, name: &str) -> Result<(), RoleError> {
        remove_file(&self.directory.join(name))
    }

    /// Removes all files of this module.
    pub(crate) fn remove_tokens(&self) -> Result<(), RoleError> {
        self.remove(PARTITION)?;
        self.lock_pieces().clear();
        for folder in FOLDERS {
            files(&self.directory.join(folder))?.iter().try_for_each(|(_, path)| remove_file(path))?;
        }
        Ok(())
    }
}

fn row_step(step: GlobalStep) -> String {
    format!("{ROW_STEPS}/{}", step.0)
}

/// Reads the dense partition, and the position of its buffer if it had one.
pub(crate) fn read_partition(directory: &Path) -> Result<(Partition, Option<BufferStanding>), RoleError> {
    let path = directory.join(PARTITION);
    let read = |mut reader: Reader<'_>| {
        let (step, buffer, exchanges) = reader.value()?;
        let (applied, values, state) = (reader.message()?, reader.numbers()?, reader.numbers()?);
        let averages = read_averages(&mut reader)?;
        let previous = if reader.value()? { Some(reader.numbers()?) } else { None };
        reader.end()?;
        let partition = Partition::found((values, state), step, applied, exchanges, averages);
        Some((partition.with_previous(previous), buffer))
    };
    read_file(&path, read)
}

fn write_averages(file: &mut Writer, averages: &Averages) -> std::io::Result<()> {
    let ranks: Vec<u32> = averages.rested().keys().copied().collect();
    write_value(file, &(averages.order(), averages.turn(), ranks))?;
    write_numbers(file, averages.velocity())?;
    averages.rested().values().try_for_each(|parameters| write_numbers(file, parameters))
}

fn read_averages(reader: &mut Reader<'_>) -> Option<Averages> {
    let (order, turn, ranks): (u64, u32, Vec<u32>) = reader.value()?;
    let velocity = reader.numbers()?;
    let rested: Option<BTreeMap<u32, Vec<f32>>> =
        ranks.into_iter().map(|rank| Some((rank, reader.numbers()?))).collect();
    Some(Averages::found(order, turn, velocity, rested?))
}

fn piece_name(step: u64, piece: u32) -> String {
    format!("{PIECES}/{step}-{piece}")
}

/// Reads the dense gradients of the pieces of steps from `next` on. Removes older and unfinished
/// files.
pub(crate) fn read_pieces(directory: &Path, next: u64) -> Result<Vec<(u64, u32, Vec<f32>)>, RoleError> {
    let mut pieces = Vec::new();
    for (_, path) in files(&directory.join(PIECES))? {
        let Some((step, piece)) = step_and_piece(&path).filter(|(step, _)| *step >= next) else {
            remove_file(&path)?;
            continue;
        };
        let gradient = read_file(&path, |mut reader| {
            let gradient = reader.numbers()?;
            reader.end().map(|()| gradient)
        })?;
        pieces.push((step, piece, gradient));
    }
    Ok(pieces)
}

/// Reads the state of both buffers. Steps before `next` are applied to the rows.
pub(crate) fn read_tokens(
    directory: &Path,
    dims: &[usize],
    next: u64,
    dense: Option<BufferStanding>,
) -> Result<LeftTokens, RoleError> {
    let mut left = LeftTokens::default();
    for (step, path) in files(&directory.join(ROW_STEPS))? {
        // This step was not applied: the replay applies it again.
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

/// Reads the pushes from number `from` on, in order. Removes older and unfinished files.
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

/// The files of a folder, each with the number in its name, ascending. Files without a number are
/// first.
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
