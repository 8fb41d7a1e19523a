//! Resolves paths to the modules that define the names.

use std::collections::{BTreeMap, BTreeSet};

use super::items::Use;
use super::modules::{Module, Modules};

/// How many re-exports a name is followed through.
const MAX_REEXPORTS: usize = 8;

/// A file uses a name that another file defines.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Import {
    /// Indices in [`Modules::files`].
    pub from: usize,
    pub to: usize,
    pub name: String,
    /// The first line of `from` that mentions the name.
    pub line: usize,
}

/// Where a path leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// An item that this module defines.
    Item(usize),
    /// A module itself.
    Module(usize),
    /// A name that this module does not declare. One of its macros may define it.
    Unknown(usize),
    /// Another crate.
    External,
}

/// A path that a module mentions.
struct Mention {
    segments: Vec<String>,
    line: usize,
    /// The name may come from a `use path::*`, or from elsewhere.
    is_guess: bool,
}

/// All imports between the files of a tree, without repetitions.
///
/// A re-export is followed to the file that defines the name. Naming a module alone is no import:
/// the paths through the module are.
pub fn imports(tree: &Modules) -> Vec<Import> {
    let mut lines: BTreeMap<(usize, usize, String), usize> = BTreeMap::new();
    for (index, module) in tree.modules.iter().enumerate() {
        for mention in mentions(tree, index) {
            let target = match tree.resolve(index, &mention.segments, 0) {
                Target::Item(target) => target,
                Target::Unknown(target) if !mention.is_guess => target,
                _ => continue,
            };
            let to = tree.modules[target].file;
            if to != module.file {
                let name = mention.segments.join("::");
                let first = lines.entry((module.file, to, name)).or_insert(mention.line);
                *first = mention.line.min(*first);
            }
        }
    }
    lines.into_iter().map(|((from, to, name), line)| Import { from, to, name, line }).collect()
}

/// The paths of a module, other than those that start with a name that a `use` declares already.
fn mentions(tree: &Modules, index: usize) -> Vec<Mention> {
    let items = &tree.modules[index].items;
    let mut mentions = Vec::new();
    let mut declared: BTreeSet<&str> = BTreeSet::new();
    for Use { path, name, is_reexport } in &items.uses {
        let Some(name) = name else {
            for word in items.words.iter().filter(|word| !items.defined.contains(*word)) {
                let segments = [&path.segments[..], std::slice::from_ref(word)].concat();
                mentions.push(Mention { segments, line: path.line, is_guess: true });
            }
            continue;
        };
        // A re-export alone offers the name to others and needs nothing of it.
        if !is_reexport || items.words.contains(name) {
            mentions.push(Mention { segments: path.segments.clone(), line: path.line, is_guess: false });
        }
        if matches!(tree.resolve(index, &path.segments, 0), Target::Item(_)) {
            declared.insert(name);
        }
    }
    for path in items.paths.iter().filter(|path| !declared.contains(path.segments[0].as_str())) {
        mentions.push(Mention { segments: path.segments.clone(), line: path.line, is_guess: false });
    }
    mentions
}

impl Modules {
    /// Resolves a path of the module `from`.
    fn resolve(&self, from: usize, segments: &[String], reexports: usize) -> Target {
        let Some((first, rest)) = segments.split_first() else { return Target::Module(from) };
        match first.as_str() {
            "crate" => self.walk(0, rest, reexports),
            "self" => self.walk(from, rest, reexports),
            "super" => self.walk(self.modules[from].parent.unwrap_or(0), rest, reexports),
            // A name that the module does not declare is another crate.
            _ => match self.walk(from, segments, reexports) {
                Target::Unknown(module) if module == from => Target::External,
                target => target,
            },
        }
    }

    /// Resolves a path that starts in the scope of `module`.
    fn walk(&self, module: usize, segments: &[String], reexports: usize) -> Target {
        let Some((first, rest)) = segments.split_first() else { return Target::Module(module) };
        let Module { parent, children, items, .. } = &self.modules[module];
        if first == "super" {
            return self.walk(parent.unwrap_or(0), rest, reexports);
        }
        let child = children.get(first);
        if let Some(&child) = child.filter(|_| !rest.is_empty()) {
            return self.walk(child, rest, reexports);
        }
        if items.defined.contains(first) {
            return Target::Item(module);
        }
        if reexports >= MAX_REEXPORTS {
            return Target::External;
        }
        let declared = items.uses.iter().find(|declared| declared.name.as_ref() == Some(first));
        let declared = declared.map(|declared| self.resolve(module, &declared.path.segments, reexports + 1));
        match (declared, child) {
            (Some(Target::Module(target)), _) => self.walk(target, rest, reexports),
            (Some(target), None) | (Some(target @ Target::Item(_)), _) => target,
            (_, Some(&child)) => Target::Module(child),
            (None, None) => self.walk_globs(module, segments, reexports),
        }
    }

    /// Looks for the name among those that the module imports with `*`.
    fn walk_globs(&self, module: usize, segments: &[String], reexports: usize) -> Target {
        for glob in self.modules[module].items.uses.iter().filter(|declared| declared.name.is_none()) {
            let Target::Module(source) = self.resolve(module, &glob.path.segments, reexports + 1) else { continue };
            let target = self.walk(source, segments, reexports + 1);
            if matches!(target, Target::Item(_) | Target::Module(_)) {
                return target;
            }
        }
        Target::Unknown(module)
    }
}

#[cfg(test)]
mod tests {
    use super::super::modules::tests::modules;
    use super::*;

    /// The imports as `from -> to (path)`.
    fn shown(files: &[(&str, &str)]) -> Vec<String> {
        let tree = modules(files);
        let show = |import: &Import| {
            format!("{} -> {} ({})", tree.files[import.from].name, tree.files[import.to].name, import.name)
        };
        imports(&tree).iter().map(show).collect()
    }

    const ROOT: (&str, &str) = ("src/lib.rs", "mod a; mod b;");

    #[test]
    fn uses_and_inline_paths_are_imports() {
        let found = shown(&[
            ROOT,
            ("src/a.rs", "use crate::b::{C, D}; fn f() { super::b::e(D::I) } fn g() { crate::b::h() }"),
            ("src/b.rs", "pub struct C; pub enum D {} pub fn e() {} pub fn h() {}"),
        ]);
        let expected = ["a -> b (crate::b::C)", "a -> b (crate::b::D)", "a -> b (crate::b::h)", "a -> b (super::b::e)"];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_path_through_an_imported_module_is_an_import() {
        let found = shown(&[
            ROOT,
            ("src/a.rs", "use crate::b; use super::b as x; fn f() { b::c(); x::d() }"),
            ("src/b.rs", "pub fn c() {}"),
        ]);
        assert_eq!(found, ["a -> b (b::c)", "a -> b (x::d)"]);
    }

    #[test]
    fn naming_a_module_alone_is_no_import() {
        assert_eq!(shown(&[ROOT, ("src/a.rs", "use crate::b;"), ("src/b.rs", "")]), Vec::<String>::new());
    }

    #[test]
    fn a_name_of_the_parent_is_imported_from_its_definition() {
        let found = shown(&[
            ("src/lib.rs", "mod a; mod b; use b::C; pub use b::D as E; pub struct F; use std::sync::Arc;"),
            ("src/a.rs", "use super::{Arc, C, E, F};"),
            ("src/b.rs", "pub struct C; pub struct D;"),
        ]);
        let expected = ["crate -> b (b::C)", "a -> crate (super::F)", "a -> b (super::C)", "a -> b (super::E)"];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_reexport_is_an_import_only_if_its_name_is_used() {
        let b = ("src/b.rs", "pub struct C;");
        let a = ("src/a.rs", "");
        assert_eq!(shown(&[("src/lib.rs", "mod a; mod b; pub use b::C;"), a, b]), Vec::<String>::new());
        let used = ("src/lib.rs", "mod a; mod b; pub(crate) use b::C; fn f(_: C) {}");
        assert_eq!(shown(&[used, a, b]), ["crate -> b (b::C)"]);
    }

    #[test]
    fn names_of_globs_are_imported_from_their_definition() {
        let found = shown(&[
            ("src/lib.rs", "mod a; mod b; pub use b::*;"),
            ("src/a.rs", "use crate::*; use std::io::*; fn f(_: C, _: D, _: E, a: F) {} struct F;"),
            ("src/b.rs", "pub struct C; pub struct F; pub mod d { pub struct D; } pub use d::*;"),
        ]);
        assert_eq!(found, ["a -> b (crate::C)", "a -> b (crate::D)"]);
    }

    #[test]
    fn a_name_that_a_macro_defines_belongs_to_the_module_of_its_path() {
        let found = shown(&[ROOT, ("src/a.rs", "use crate::b::Made;"), ("src/b.rs", "make! { Made }")]);
        assert_eq!(found, ["a -> b (crate::b::Made)"]);
    }

    #[test]
    fn other_crates_are_not_imported() {
        let found = shown(&[ROOT, ("src/a.rs", "use std::b::C; use b::D; fn f() { serde::g() }"), ("src/b.rs", "")]);
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn a_module_and_a_function_may_share_a_name() {
        let found = shown(&[
            ("src/lib.rs", "mod a; mod b; pub use b::b;"),
            ("src/a.rs", "use super::b; fn f() { b() }"),
            ("src/b.rs", "pub fn b() {}"),
        ]);
        assert_eq!(found, ["a -> b (super::b)"]);
    }

    #[test]
    fn inline_modules_belong_to_their_file() {
        let found = shown(&[
            ROOT,
            ("src/a.rs", "mod x { use super::super::b::C; use super::D; } struct D;"),
            ("src/b.rs", "pub mod y { pub struct C; } pub use y::C; fn f() { crate::a::x::e() }"),
        ]);
        assert_eq!(found, ["a -> b (super::super::b::C)", "b -> a (crate::a::x::e)"]);
    }

    #[test]
    fn circular_reexports_end() {
        let found =
            shown(&[ROOT, ("src/a.rs", "pub use crate::b::C; fn f(_: C) {}"), ("src/b.rs", "pub use crate::a::C;")]);
        assert_eq!(found, Vec::<String>::new());
    }
}
