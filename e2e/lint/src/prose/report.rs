//! The report of `cargo xtask prose`.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::path::{Path, PathBuf};

use super::findings::{File, Frequencies, Kind};
use crate::error::LintError;

/// The findings of all files, and the number allowed of each kind.
pub struct Report {
    pub files: Vec<File>,
    /// By the name of the kind. A kind that is missing allows none.
    pub allowed: BTreeMap<String, usize>,
    /// Exempt paths that do not exist.
    pub stale_exemptions: Vec<PathBuf>,
}

/// The crate that contains a file, or else the first two folders of its path.
pub fn group(root: &Path, file: &Path) -> String {
    let folder = file.parent().unwrap_or(file);
    let in_crate = folder.ancestors().find(|folder| {
        let is_root = folder.as_os_str().is_empty();
        !is_root && root.join(folder).join("Cargo.toml").exists()
    });
    let group = match in_crate {
        Some(folder) => folder.to_path_buf(),
        None => folder.iter().take(2).collect(),
    };
    if group.as_os_str().is_empty() { ".".to_owned() } else { group.display().to_string() }
}

/// Findings by kind and frequencies of a group.
#[derive(Default)]
struct Counts {
    findings: [usize; Kind::ALL.len()],
    frequencies: Frequencies,
}

impl Counts {
    fn add(&mut self, file: &File) {
        for (count, kind) in self.findings.iter_mut().zip(Kind::ALL) {
            *count += file.count(kind);
        }
        self.frequencies.add(file.frequencies);
    }

    fn total(&self) -> usize {
        self.findings.iter().sum()
    }
}

impl Report {
    fn count(&self, kind: Kind) -> usize {
        self.files.iter().map(|file| file.count(kind)).sum()
    }

    fn allowed(&self, kind: Kind) -> usize {
        self.allowed.get(kind.name()).copied().unwrap_or(0)
    }

    /// Every finding, one a line.
    pub fn list(&self) -> String {
        let mut list = String::new();
        for file in &self.files {
            for finding in &file.findings {
                let path = file.path.display();
                // Writing to a string cannot fail.
                let _ = writeln!(list, "{path}:{}: {}: {}", finding.line, finding.kind.name(), finding.text);
            }
        }
        list
    }

    /// The numbers of findings and of allowed findings.
    pub fn summary(&self) -> String {
        let part = |kind: Kind| format!("{} {} ({} allowed)", self.count(kind), kind.name(), self.allowed(kind));
        Kind::ALL.map(part).join(", ")
    }

    /// Whether each kind stays within its number.
    pub fn verdict(&self) -> Result<(), LintError> {
        let mut problems = Vec::new();
        for kind in Kind::ALL {
            let (count, allowed) = (self.count(kind), self.allowed(kind));
            if count > allowed {
                problems.push(format!("{count} {}, {allowed} are allowed", kind.name()));
            }
        }
        if problems.is_empty() {
            return Ok(());
        }
        problems.push("`cargo xtask prose --list --path FOLDER` lists them".to_owned());
        problems.push("docs/development/lints.md explains the rules".to_owned());
        Err(LintError::Failed { lint: "prose", problems })
    }

    fn groups(&self) -> BTreeMap<&str, Counts> {
        let mut groups = BTreeMap::new();
        for file in &self.files {
            let counts: &mut Counts = groups.entry(file.group.as_str()).or_default();
            counts.add(file);
        }
        groups
    }

    fn write_findings(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:<28}", "findings by folder")?;
        for kind in Kind::ALL {
            write!(out, "{:>16}", kind.name())?;
        }
        writeln!(out, "{:>10}", "total")?;
        let mut all = Counts::default();
        self.files.iter().for_each(|file| all.add(file));
        let groups = self.groups();
        let found = groups.iter().filter(|(_, counts)| counts.total() > 0);
        for (name, counts) in found.map(|(name, counts)| (*name, counts)).chain([("all", &all)]) {
            write!(out, "{name:<28}")?;
            for count in counts.findings {
                write!(out, "{count:>16}")?;
            }
            writeln!(out, "{:>10}", counts.total())?;
        }
        write!(out, "{:<28}", "allowed")?;
        for kind in Kind::ALL {
            write!(out, "{:>16}", self.allowed(kind))?;
        }
        writeln!(out)
    }

    fn write_frequencies(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:<28}{:>10}", "per 1,000 comment words", "words")?;
        for name in ["what is/was", "who", "whoever", "nobody", "total"] {
            write!(out, "{name:>13}")?;
        }
        writeln!(out)?;
        let mut all = Frequencies::default();
        self.files.iter().for_each(|file| all.add(file.frequencies));
        let groups = self.groups();
        for (name, counts) in &groups {
            if counts.frequencies.words > 0 {
                write_rates(out, name, counts.frequencies)?;
            }
        }
        write_rates(out, "all", all)
    }
}

fn write_rates(out: &mut fmt::Formatter<'_>, name: &str, frequencies: Frequencies) -> fmt::Result {
    let Frequencies { words, what, who, whoever, nobody } = frequencies;
    write!(out, "{name:<28}{words:>10}")?;
    for count in [what, who, whoever, nobody, frequencies.total()] {
        write!(out, "{:>13.1}", count as f64 * 1000.0 / words.max(1) as f64)?;
    }
    writeln!(out)
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_findings(out)?;
        writeln!(out)?;
        self.write_frequencies(out)?;
        for path in &self.stale_exemptions {
            writeln!(out, "e2e/lint/baseline.toml exempts {}, which does not exist: mend the path", path.display())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(source: &str, allowed: usize) -> Report {
        let file = File::inspect("a/b.rs".into(), "a".to_owned(), source);
        Report {
            files: file.into_iter().collect(),
            allowed: [("phrases".to_owned(), allowed)].into(),
            stale_exemptions: Vec::new(),
        }
    }

    #[test]
    fn findings_up_to_the_baseline_pass() {
        assert!(report("// nobody\n// whoever", 2).verdict().is_ok());
        assert!(report("// nobody\n// whoever", 1).verdict().is_err());
    }

    #[test]
    fn a_kind_that_is_not_in_the_baseline_allows_none() {
        assert!(report("#[test] fn nobody() {}", 5).verdict().is_err());
    }

    #[test]
    fn the_list_names_file_and_line() {
        assert_eq!(report("\n// nobody", 0).list(), "a/b.rs:2: phrases: `nobody`\n");
    }

    #[test]
    fn rates_are_per_thousand_words() {
        let text = report("// who waits for that here", 0).to_string();
        let rates = text.lines().last().unwrap().split_whitespace().collect::<Vec<_>>();
        assert_eq!(rates, ["all", "5", "0.0", "200.0", "0.0", "0.0", "200.0"]);
    }
}
