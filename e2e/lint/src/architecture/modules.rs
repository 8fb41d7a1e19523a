//! The module tree of a crate.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::items::{self, Items, ModuleFile, Struct};
use crate::error::LintError;
use crate::lexer::tokens;

/// Reads a source file by its path. `None` if there is no such file.
pub type ReadFile<'a> = dyn Fn(&Path) -> Result<Option<String>, LintError> + 'a;

/// The modules below a `lib.rs` or `main.rs`, without those under `#[cfg(test)]`.
#[derive(Debug, Default)]
pub struct Modules {
    /// The root is the first.
    pub modules: Vec<Module>,
    pub files: Vec<File>,
    /// Files of modules under `#[cfg(test)]`, without the modules that these declare.
    pub test_files: BTreeSet<PathBuf>,
}

/// A file with a module. Inline modules count as a part of their file.
#[derive(Debug, PartialEq, Eq)]
pub struct File {
    pub path: PathBuf,
    /// `a::b` of `crate::a::b`, or `crate`.
    pub name: String,
    /// The folder of the modules that this file heads, or else the folder of the file.
    pub folder: PathBuf,
    /// The file that declares the module. An index in [`Modules::files`].
    pub parent: Option<usize>,
}

/// A module, with its file and neighbours as indices.
#[derive(Debug)]
pub struct Module {
    pub file: usize,
    pub parent: Option<usize>,
    pub children: BTreeMap<String, usize>,
    pub items: Items,
}

/// A file that is to be added to the tree.
struct NewFile {
    /// The module that declares the file.
    parent: Option<usize>,
    name: String,
    path: PathBuf,
    /// The folder of the modules that the file declares.
    folder: PathBuf,
    source: String,
}

impl Modules {
    /// Reads the files of the tree whose root is `path`. `None` if there is no such file.
    pub fn read(path: &Path, read: &ReadFile<'_>) -> Result<Option<Self>, LintError> {
        let Some(source) = read(path)? else { return Ok(None) };
        let folder = path.parent().unwrap_or(path).to_path_buf();
        let root = NewFile { parent: None, name: "crate".to_owned(), path: path.to_path_buf(), folder, source };
        let mut modules = Self::default();
        modules.add_file(root, read)?;
        Ok(Some(modules))
    }

    fn add_file(&mut self, new: NewFile, read: &ReadFile<'_>) -> Result<usize, LintError> {
        let (items, _) = items::read(&tokens(&new.source));
        let file = self.files.len();
        let own_folder = new.path.parent().map(Path::to_path_buf).unwrap_or_default();
        let parent = new.parent.map(|parent| self.modules[parent].file);
        self.files.push(File { path: new.path, name: new.name, folder: new.folder, parent });
        let module = self.add_module(file, new.parent, items, read)?;
        if !self.files.iter().any(|other| other.parent == Some(file)) {
            self.files[file].folder = own_folder;
        }
        Ok(module)
    }

    fn add_module(
        &mut self,
        file: usize,
        parent: Option<usize>,
        mut items: Items,
        read: &ReadFile<'_>,
    ) -> Result<usize, LintError> {
        let inline = std::mem::take(&mut items.inline);
        let files = std::mem::take(&mut items.files);
        let module = self.modules.len();
        self.modules.push(Module { file, parent, children: BTreeMap::new(), items });
        for (name, items) in inline {
            let child = self.add_module(file, Some(module), items, read)?;
            self.modules[module].children.insert(name, child);
        }
        for child in files {
            self.add_child(module, child, read)?;
        }
        Ok(module)
    }

    /// Adds the file of `mod name;`.
    fn add_child(&mut self, module: usize, child: ModuleFile, read: &ReadFile<'_>) -> Result<(), LintError> {
        let declaring = &self.files[self.modules[module].file];
        let folder = declaring.folder.join(&child.name);
        let candidates = match &child.path {
            Some(path) => vec![declaring.path.with_file_name(path)],
            None => vec![folder.with_extension("rs"), folder.join("mod.rs")],
        };
        let name = match declaring.name.as_str() {
            "crate" => child.name.clone(),
            parent => format!("{parent}::{}", child.name),
        };
        for path in candidates {
            let Some(source) = read(&path)? else { continue };
            if child.is_test {
                self.test_files.insert(path);
            } else {
                let added = self.add_file(NewFile { parent: Some(module), name, path, folder, source }, read)?;
                self.modules[module].children.insert(child.name, added);
            }
            return Ok(());
        }
        Err(LintError::MissingModule { declared_in: declaring.path.clone(), name: child.name })
    }

    /// The structs of all modules, with the indices of their files.
    pub fn structs(&self) -> impl Iterator<Item = (usize, &Struct)> {
        self.modules.iter().flat_map(|module| module.items.structs.iter().map(|item| (module.file, item)))
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Reads the tree of `src/lib.rs` from fixtures of paths and texts.
    pub fn modules(files: &[(&str, &str)]) -> Modules {
        let read = |path: &Path| {
            let found = files.iter().find(|(name, _)| Path::new(name) == path);
            Ok(found.map(|(_, text)| (*text).to_owned()))
        };
        Modules::read(Path::new("src/lib.rs"), &read).unwrap().unwrap()
    }

    #[test]
    fn modules_are_found_in_both_layouts() {
        let tree = modules(&[
            ("src/lib.rs", "mod a; mod b { mod c; } #[cfg(test)] mod tests;"),
            ("src/a/mod.rs", "pub mod d;"),
            ("src/a/d.rs", "mod e;"),
            ("src/a/d/e.rs", ""),
            ("src/c.rs", ""),
            ("src/tests.rs", "mod missing;"),
        ]);
        let files: Vec<_> =
            tree.files.iter().map(|file| (file.name.as_str(), file.folder.to_str().unwrap(), file.parent)).collect();
        let expected = [
            ("crate", "src", None),
            ("c", "src", Some(0)),
            ("a", "src/a", Some(0)),
            ("a::d", "src/a/d", Some(2)),
            ("a::d::e", "src/a/d", Some(3)),
        ];
        assert_eq!(files, expected);
        assert_eq!(tree.test_files, [PathBuf::from("src/tests.rs")].into());
    }

    #[test]
    fn a_module_without_children_is_in_the_folder_of_its_file() {
        let tree = modules(&[("src/lib.rs", "mod a; mod b;"), ("src/a.rs", ""), ("src/b/mod.rs", "")]);
        let folders: Vec<_> = tree.files.iter().map(|file| file.folder.to_str().unwrap()).collect();
        assert_eq!(folders, ["src", "src", "src/b"]);
    }

    #[test]
    fn a_module_without_a_file_is_an_error() {
        let read = |path: &Path| Ok((path == Path::new("src/lib.rs")).then(|| "mod a;".to_owned()));
        let error = Modules::read(Path::new("src/lib.rs"), &read).unwrap_err();
        assert!(error.to_string().contains("`mod a;`"), "{error}");
    }
}
