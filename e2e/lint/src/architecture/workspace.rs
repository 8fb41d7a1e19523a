//! The workspace members and their dependencies on each other.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use crate::error::LintError;

/// A workspace member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub name: String,
    /// Relative to the root.
    pub folder: PathBuf,
    /// Names of the members that it depends on, sorted. Dev-dependencies are left out.
    pub imports: Vec<String>,
}

/// Reads the members that the root's `Cargo.toml` lists. Globs are not supported.
pub fn members(root: &Path) -> Result<Vec<Member>, LintError> {
    let workspace = manifest(root)?;
    let shared = table(&workspace, &["workspace", "dependencies"]);
    let folders = table(&workspace, &["workspace"]).and_then(|table| table.get("members")).and_then(Value::as_array);
    let mut members = Vec::new();
    for folder in folders.into_iter().flatten().filter_map(Value::as_str) {
        let manifest = manifest(&root.join(folder))?;
        let name = table(&manifest, &["package"]).and_then(|package| package.get("name")).and_then(Value::as_str);
        let path = root.join(folder).join("Cargo.toml");
        let name = name.ok_or_else(|| LintError::parse(&path, "there is no package.name"))?.to_owned();
        members.push(Member { name, folder: folder.into(), imports: dependencies(&manifest, shared) });
    }
    let names: Vec<String> = members.iter().map(|member| member.name.clone()).collect();
    for member in &mut members {
        member.imports.retain(|import| names.contains(import));
    }
    Ok(members)
}

fn manifest(folder: &Path) -> Result<Table, LintError> {
    let path = folder.join("Cargo.toml");
    toml::from_str(&crate::tree::read(&path)?).map_err(|error| LintError::parse(&path, error))
}

fn table<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Table> {
    let mut table = table;
    for key in path {
        table = table.get(*key)?.as_table()?;
    }
    Some(table)
}

/// Package names of the normal dependencies, sorted. Dependencies of single targets are included.
fn dependencies(manifest: &Table, shared: Option<&Table>) -> Vec<String> {
    let mut tables: Vec<&Table> = table(manifest, &["dependencies"]).into_iter().collect();
    for target in table(manifest, &["target"]).into_iter().flat_map(Table::values) {
        tables.extend(target.as_table().and_then(|target| table(target, &["dependencies"])));
    }
    let mut names = Vec::new();
    for (key, value) in tables.into_iter().flatten() {
        let is_shared = value.get("workspace").and_then(Value::as_bool) == Some(true);
        let declaration = if is_shared { shared.and_then(|shared| shared.get(key)) } else { Some(value) };
        let package = declaration.and_then(|declaration| declaration.get("package")).and_then(Value::as_str);
        names.push(package.unwrap_or(key).to_owned());
    }
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_normal_ones_by_package() {
        let manifest: Table = toml::from_str(
            "[dependencies]\na = '1'\nb.workspace = true\nc = { path = 'x', package = 'd' }
             [dev-dependencies]\ne = '1'\n[build-dependencies]\nf = '1'
             [target.'cfg(unix)'.dependencies]\ng = '1'",
        )
        .unwrap();
        let shared: Table = toml::from_str("b = { package = 'h', path = 'y' }").unwrap();
        assert_eq!(dependencies(&manifest, Some(&shared)), ["a", "d", "g", "h"]);
    }
}
