//! The durable state of a server in `des`, for a model with a tower. It has the first layer of the
//! last steps, and this server's part of the gradient of its weight.
//!
//! ```text
//! directory ─┬─ first-layer/STEP-weights   weight and bias, before the server acknowledges them
//!            └─ first-layer/STEP-gradient  summed over the pieces, before the step is applied
//! ```
//!
//! The files of two steps stay. A dense worker that was replaced may request the gradient of the
//! last step again.

use std::path::Path;

use super::contents::{Reader, write_numbers};
use super::{Kept, failed, remove_file};
use rectrain_protocol::error::RoleError;

pub(crate) const FOLDER: &str = "first-layer";
const WEIGHTS: &str = "weights";
const GRADIENT: &str = "gradient";
/// The number of steps whose files stay.
const STEPS: u64 = 2;

/// The recovered first layers of a killed server.
#[derive(Default)]
pub(crate) struct LeftLayers {
    /// Weight and bias by step.
    pub(crate) layers: Vec<(u64, Vec<f32>, Vec<f32>)>,
    /// The gradient of the weight by step.
    pub(crate) gradients: Vec<(u64, Vec<f32>)>,
}

impl Kept {
    /// Writes the first layer of a step.
    pub(crate) fn keep_layer(&self, step: u64, weights: &[f32], biases: &[f32]) {
        self.keep_numbers(step, WEIGHTS, &[weights, biases]);
    }

    /// Writes the gradient of the first layer's weight in a step.
    pub(crate) fn keep_layer_gradient(&self, step: u64, gradient: &[f32]) {
        self.keep_numbers(step, GRADIENT, &[gradient]);
    }

    fn keep_numbers(&self, step: u64, what: &str, numbers: &[&[f32]]) {
        self.or_give_up(|| {
            let name = name(step, what);
            let written = self.write(&name, |file| numbers.iter().try_for_each(|part| write_numbers(file, part)))?;
            self.name(&written, &name)?;
            match step.checked_sub(STEPS) {
                Some(old) => remove_file(&self.directory.join(self::name(old, what))),
                None => Ok(()),
            }
        });
    }

    /// Removes all files of this module.
    pub(crate) fn remove_layers(&self) -> Result<(), RoleError> {
        let folder = self.directory.join(FOLDER);
        let entries = std::fs::read_dir(&folder).map_err(|source| failed("read", &folder, source))?;
        for entry in entries {
            remove_file(&entry.map_err(|source| failed("read", &folder, source))?.path())?;
        }
        Ok(())
    }
}

fn name(step: u64, what: &str) -> String {
    format!("{FOLDER}/{step}-{what}")
}

/// Reads the files of this module. Removes unfinished ones.
pub(crate) fn read_layers(directory: &Path) -> Result<LeftLayers, RoleError> {
    let folder = directory.join(FOLDER);
    let mut left = LeftLayers::default();
    for entry in std::fs::read_dir(&folder).map_err(|source| failed("read", &folder, source))? {
        let path = entry.map_err(|source| failed("read", &folder, source))?.path();
        let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let parts = file.split_once('-').and_then(|(step, what)| Some((step.parse().ok()?, what)));
        let bytes = || std::fs::read(&path).map_err(|source| failed("read", &path, source));
        let short = || failed("read", &path, std::io::ErrorKind::UnexpectedEof.into());
        match parts {
            Some((step, WEIGHTS)) => {
                let [weights, biases] = read_numbers(&bytes()?).ok_or_else(short)?;
                left.layers.push((step, weights, biases));
            }
            Some((step, GRADIENT)) => {
                let [gradient] = read_numbers(&bytes()?).ok_or_else(short)?;
                left.gradients.push((step, gradient));
            }
            _ => remove_file(&path)?,
        }
    }
    Ok(left)
}

/// The lists of a file that has exactly `N`.
fn read_numbers<const N: usize>(bytes: &[u8]) -> Option<[Vec<f32>; N]> {
    let mut reader = Reader(bytes);
    let lists: Option<Vec<_>> = (0..N).map(|_| reader.numbers()).collect();
    reader.end()?;
    lists?.try_into().ok()
}
