//! The report of `cargo xtask architecture`.

use std::fmt::{self, Write};
use std::path::PathBuf;

use super::circles::{self, Circle};
use super::layers;
use super::sizes::Lines;
use super::workspace::Member;
use crate::baseline::{AllowedCircle, Layer};
use crate::error::LintError;

/// The report lists structs with more fields than this.
pub const LARGE_STRUCT_FIELDS: usize = 12;

/// The architecture of the workspace.
pub struct Report {
    pub crates: Vec<Crate>,
    pub layers: Vec<Layer>,
    pub circles: Vec<Circle>,
    /// Most fields first.
    pub structs: Vec<LargeStruct>,
    pub allowed_circles: Vec<AllowedCircle>,
}

pub struct Crate {
    pub member: Member,
    pub lines: Lines,
}

pub struct LargeStruct {
    pub name: String,
    pub fields: usize,
    pub path: PathBuf,
    pub line: usize,
}

impl Report {
    /// The imports that tie each circle.
    pub fn list(&self) -> String {
        let mut list = String::new();
        for circle in &self.circles {
            for import in &circle.imports {
                // Writing to a string cannot fail.
                let _ = writeln!(list, "{import}");
            }
        }
        list
    }

    /// The size of the workspace, the circles that span folders, and those allowed.
    pub fn summary(&self) -> String {
        format!(
            "{} crates in {} layers, {} circles of modules, {} of them across folders ({} allowed)",
            self.crates.len(),
            self.layers.len(),
            self.circles.len(),
            self.circles.iter().filter(|circle| circle.spans_folders()).count(),
            self.allowed_circles.len()
        )
    }

    /// Whether the layers and the circles of modules hold.
    pub fn verdict(&self) -> Result<(), LintError> {
        let members: Vec<Member> = self.crates.iter().map(|item| item.member.clone()).collect();
        let mut problems = layers::problems(&members, &self.layers);
        problems.extend(circles::verdict(&self.circles, &self.allowed_circles).problems);
        if problems.is_empty() {
            return Ok(());
        }
        problems.push("`cargo xtask architecture --list` prints the imports that tie circles".to_owned());
        problems.push("docs/development/lints.md explains the rules".to_owned());
        Err(LintError::Failed { lint: "architecture", problems })
    }

    fn write_lines(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{:<28}{:>8}{:>8}{:>10}", "lines", "code", "tests", "comments")?;
        let total: Lines = self.crates.iter().map(|item| item.lines).sum();
        let rows = self.crates.iter().map(|item| (item.member.name.as_str(), item.lines));
        for (name, lines) in rows.chain([("all", total)]) {
            writeln!(out, "{name:<28}{:>8}{:>8}{:>10}", lines.code, lines.tests, lines.comments)?;
        }
        Ok(())
    }

    fn write_layers(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let imports: usize = self.crates.iter().map(|item| item.member.imports.len()).sum();
        writeln!(out, "layers, from the top down, with {imports} imports between crates")?;
        for layer in &self.layers {
            writeln!(out, "  {}", layer.name)?;
            for item in self.crates.iter().filter(|item| layer.crates.contains(&item.member.name)) {
                writeln!(out, "    {:<28}{}", item.member.name, item.member.imports.join(", "))?;
            }
        }
        Ok(())
    }

    fn write_circles(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "circles of modules")?;
        for circle in &self.circles {
            let mark = if circle.spans_folders() { "ACROSS FOLDERS" } else { "in one folder" };
            let Circle { package, modules, .. } = circle;
            writeln!(out, "  {package}: {} modules, {mark}: {}", modules.len(), modules.join(", "))?;
        }
        for entry in &self.allowed_circles {
            let AllowedCircle { package, modules, reason } = entry;
            writeln!(out, "  allowed in {package}: up to {modules} modules, because {reason}")?;
        }
        for hint in circles::verdict(&self.circles, &self.allowed_circles).hints {
            writeln!(out, "  e2e/lint/baseline.toml: {hint}")?;
        }
        Ok(())
    }

    fn write_structs(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "structs of more than {LARGE_STRUCT_FIELDS} fields")?;
        for item in &self.structs {
            writeln!(out, "  {:>3}  {:<24}{}:{}", item.fields, item.name, item.path.display(), item.line)?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_lines(out)?;
        writeln!(out)?;
        self.write_layers(out)?;
        writeln!(out)?;
        self.write_circles(out)?;
        writeln!(out)?;
        self.write_structs(out)
    }
}
