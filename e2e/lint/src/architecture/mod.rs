//! `cargo xtask architecture`: checks the layers of crates and the circles of modules.

mod circles;
mod graph;
mod imports;
mod items;
mod layers;
mod modules;
mod report;
mod sizes;
mod workspace;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::baseline::{Baseline, Layers};
use crate::error::LintError;
use modules::Modules;
use report::{Crate, LargeStruct, Report};
use sizes::Lines;
use workspace::Member;

const USAGE: &str = "usage: cargo xtask architecture [--list]
  --list  print the imports that tie each circle, as file:line";

/// Checks the checkout at `root` and prints a report.
///
/// # Errors
/// [`LintError::Failed`] names each import that does not point to a lower layer, and each circle
/// of modules that `e2e/lint/baseline.toml` does not allow.
pub fn run(root: &Path, arguments: &[&str]) -> Result<(), LintError> {
    let is_list = match arguments {
        [] => false,
        ["--list"] => true,
        _ => return Err(LintError::Usage(USAGE.to_owned())),
    };
    let report = inspect(root)?;
    if is_list {
        crate::print(report.list());
    }
    crate::print(&report);
    report.verdict()
}

/// As [`run`], but prints one line if there is nothing to mend.
///
/// # Errors
/// As [`run`].
pub fn check(root: &Path) -> Result<(), LintError> {
    let report = inspect(root)?;
    if report.verdict().is_err() {
        crate::print(&report);
    }
    eprintln!("xtask: architecture: {}", report.summary());
    report.verdict()
}

fn inspect(root: &Path) -> Result<Report, LintError> {
    let allowed_circles = Baseline::read(root)?.architecture.circles;
    let layers = Layers::read(root)?.layers;
    let mut report = Report { crates: Vec::new(), layers, circles: Vec::new(), structs: Vec::new(), allowed_circles };
    for member in workspace::members(root)? {
        add_crate(root, member, &mut report)?;
    }
    report.structs.sort_by_key(|item| std::cmp::Reverse(item.fields));
    Ok(report)
}

fn add_crate(root: &Path, member: Member, report: &mut Report) -> Result<(), LintError> {
    let read = |path: &Path| read_if_exists(&root.join(path));
    let mut test_files = Vec::new();
    for entry in ["src/lib.rs", "src/main.rs"] {
        let Some(tree) = Modules::read(&member.folder.join(entry), &read)? else { continue };
        report.circles.extend(circles::find(&member.name, &tree));
        for (file, item) in tree.structs().filter(|(_, item)| item.fields > report::LARGE_STRUCT_FIELDS) {
            let path = tree.files[file].path.clone();
            report.structs.push(LargeStruct { name: item.name.clone(), fields: item.fields, path, line: item.line });
        }
        test_files.extend(tree.test_files);
    }
    let lines = count_lines(&root.join(&member.folder), &member.folder, &test_files)?;
    report.crates.push(Crate { member, lines });
    Ok(())
}

fn read_if_exists(path: &Path) -> Result<Option<String>, LintError> {
    match std::fs::read_to_string(path) {
        Ok(source) => Ok(Some(source)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(LintError::read(path, error)),
    }
}

/// Counts the lines of the crate in `folder`. A crate in a folder below is left out.
fn count_lines(full: &Path, folder: &Path, test_files: &[PathBuf]) -> Result<Lines, LintError> {
    let is_rust = |path: &Path| path.extension().is_some_and(|extension| extension == "rs");
    let mut total = Lines::default();
    for path in crate::tree::files(full, is_rust)? {
        let is_own = !path.ancestors().skip(1).any(|above| {
            let is_crate_folder = above.as_os_str().is_empty();
            !is_crate_folder && full.join(above).join("Cargo.toml").exists()
        });
        if is_own {
            let in_root = folder.join(&path);
            let is_test = sizes::is_test_path(&path) || test_files.iter().any(|test| is_below(test, &in_root));
            total = total + sizes::lines(&crate::tree::read(&full.join(&path))?, is_test);
        }
    }
    Ok(total)
}

/// Whether `file` is the test module `test` or one that it declares.
fn is_below(test: &Path, file: &Path) -> bool {
    let folder = if test.ends_with("mod.rs") { test.with_file_name("") } else { test.with_extension("") };
    file == test || file.starts_with(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_of_a_test_module_are_tests() {
        for (test, file) in [("a/b.rs", "a/b.rs"), ("a/b.rs", "a/b/c.rs"), ("a/b/mod.rs", "a/b/c.rs")] {
            assert!(is_below(Path::new(test), Path::new(file)), "{test} {file}");
        }
        assert!(!is_below(Path::new("a/b.rs"), Path::new("a/c.rs")));
    }
}
