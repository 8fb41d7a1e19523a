//! `cargo xtask prose`: checks the English of comments, documents and error texts.

mod extract;
mod findings;
mod markdown;
mod report;
mod rules;

use std::path::{Path, PathBuf};

use crate::baseline::Baseline;
use crate::error::LintError;
use findings::{File, Language};
use report::Report;

const USAGE: &str = "usage: cargo xtask prose [--list] [--path FOLDER]
  --list         print every finding as file:line
  --path FOLDER  check only this folder or file, and allow no finding in it";

/// The arguments of `cargo xtask prose`.
#[derive(Debug, Default, PartialEq, Eq)]
struct Options {
    is_list: bool,
    path: Option<PathBuf>,
}

impl Options {
    fn parse(arguments: &[&str]) -> Result<Self, LintError> {
        let mut options = Self::default();
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            match *argument {
                "--list" => options.is_list = true,
                "--path" => {
                    let path = arguments.next().ok_or_else(|| LintError::Usage(USAGE.to_owned()))?;
                    options.path = Some(path.trim_start_matches("./").into());
                }
                _ => return Err(LintError::Usage(USAGE.to_owned())),
            }
        }
        Ok(options)
    }
}

/// Checks the checkout at `root` and prints a report. Fails if there are more findings than
/// `e2e/lint/baseline.toml` allows.
///
/// # Errors
/// [`LintError::Failed`] names each kind of finding that exceeds its number.
pub fn run(root: &Path, arguments: &[&str]) -> Result<(), LintError> {
    let options = Options::parse(arguments)?;
    let report = inspect(root, options.path.as_deref())?;
    if options.is_list {
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
    let report = inspect(root, None)?;
    if report.verdict().is_err() {
        crate::print(&report);
    }
    eprintln!("xtask: prose: {}", report.summary());
    report.verdict()
}

fn inspect(root: &Path, path: Option<&Path>) -> Result<Report, LintError> {
    let baseline = Baseline::read(root)?.prose;
    let is_wanted = |file: &Path| Language::of(file).is_some() && path.is_none_or(|path| file.starts_with(path));
    let paths = crate::tree::files(root, is_wanted)?;
    if paths.is_empty() {
        let path = path.unwrap_or(root).display();
        return Err(LintError::Usage(format!("there is no file to check below {path}; name a folder from the root")));
    }
    let mut files = Vec::new();
    for path in paths {
        let is_exempt = baseline.exempt.iter().any(|exempt| path.starts_with(&exempt.path));
        if is_exempt {
            continue;
        }
        let source = crate::tree::read(&root.join(&path))?;
        let group = report::group(root, &path);
        files.extend(File::inspect(path, group, &source));
    }
    let allowed = if path.is_some() { Default::default() } else { baseline.allowed };
    let exempt = baseline.exempt.into_iter().map(|exempt| exempt.path);
    let stale_exemptions = exempt.filter(|path| !root.join(path).exists()).collect();
    Ok(Report { files, allowed, stale_exemptions })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_parsed() {
        let parsed = Options::parse(&["--list", "--path", "./runtime/wire"]).unwrap();
        assert_eq!(parsed, Options { is_list: true, path: Some("runtime/wire".into()) });
        for wrong in [&["--path"][..], &["--lists"]] {
            assert!(matches!(Options::parse(wrong), Err(LintError::Usage(_))), "{wrong:?}");
        }
    }
}
