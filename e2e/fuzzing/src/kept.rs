//! Inputs that are kept in the repository: `TARGET.hex` has one a line, in hexadecimal.

use std::path::{Path, PathBuf};

/// A longer input is not kept.
const LONGEST: usize = 4 << 10;
/// No more inputs are kept beyond this size of the file.
const MOST_BYTES: usize = 128 << 10;

/// The kept inputs of one target.
pub(crate) struct Kept {
    file: PathBuf,
    inputs: Vec<Vec<u8>>,
    /// The size of the file.
    bytes: usize,
    is_changed: bool,
}

impl Kept {
    /// The inputs of a target in a folder. There are none without a file.
    pub(crate) fn of(folder: &Path, target: &str) -> Self {
        let file = folder.join(format!("{target}.hex"));
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let inputs = text.lines().map(|line| match from_hex(line) {
            Some(input) => input,
            None => panic!("{}: `{line}` is not hexadecimal", file.display()),
        });
        Self { inputs: inputs.collect(), bytes: text.len(), is_changed: false, file }
    }

    pub(crate) fn inputs(&self) -> &[Vec<u8>] {
        &self.inputs
    }

    /// Keeps an input if there is room for it.
    pub(crate) fn add(&mut self, input: &[u8]) {
        let line = 2 * input.len() + 1;
        if input.len() <= LONGEST && self.bytes + line <= MOST_BYTES {
            self.inputs.push(input.to_vec());
            self.bytes += line;
            self.is_changed = true;
        }
    }

    /// Writes the file if inputs were added.
    pub(crate) fn save(&self) {
        if !self.is_changed {
            return;
        }
        let text: String = self.inputs.iter().map(|input| to_hex(input) + "\n").collect();
        let folder = self.file.parent().unwrap_or(Path::new("."));
        if let Err(error) = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&self.file, text)) {
            panic!("cannot write {}: {error}", self.file.display());
        }
    }
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let pair = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    (0..text.len()).step_by(2).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_their_hexadecimal_form() {
        for bytes in [&[][..], &[0, 1, 0xab, 0xff]] {
            assert_eq!(from_hex(&to_hex(bytes)).as_deref(), Some(bytes));
        }
        assert_eq!((from_hex("abc"), from_hex("zz")), (None, None));
    }
}
