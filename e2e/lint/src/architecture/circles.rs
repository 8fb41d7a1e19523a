//! Circles of modules inside a crate, and the rule for them.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::graph;
use super::imports::{Import, imports};
use super::modules::{File, Modules};
use crate::baseline::AllowedCircle;

/// Modules that import each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Circle {
    /// The crate.
    pub package: String,
    pub modules: Vec<String>,
    pub folders: BTreeSet<PathBuf>,
    /// The circle consists of a module and its own children, and no circle of children alone spans
    /// folders.
    pub is_family: bool,
    /// The imports that tie the circle, as `file:line: from -> to (name)`.
    pub imports: Vec<String>,
}

impl Circle {
    /// Whether the circle needs an entry in the baseline.
    pub fn spans_folders(&self) -> bool {
        self.folders.len() > 1 && !self.is_family
    }
}

/// Finds the circles of a crate, largest first.
pub fn find(package: &str, tree: &Modules) -> Vec<Circle> {
    let imports = imports(tree);
    let mut edges = vec![Vec::new(); tree.files.len()];
    for import in &imports {
        edges[import.from].push(import.to);
    }
    let circles = graph::circles(&edges);
    circles.iter().map(|members| circle(package, tree, &imports, members)).collect()
}

fn circle(package: &str, tree: &Modules, imports: &[Import], members: &[usize]) -> Circle {
    let files = || members.iter().map(|&member| &tree.files[member]);
    let is_family = members.iter().any(|&head| {
        let children: Vec<usize> = members.iter().copied().filter(|&member| member != head).collect();
        let is_child = |&child: &usize| tree.files[child].parent == Some(head);
        children.iter().all(is_child) && !spans_folders(tree, imports, &children)
    });
    let ties = imports.iter().filter(|import| members.contains(&import.from) && members.contains(&import.to));
    Circle {
        package: package.to_owned(),
        modules: files().map(|file| file.name.clone()).collect(),
        folders: files().map(|file| file.folder.clone()).collect(),
        is_family,
        imports: ties.map(|import| shown(&tree.files, import)).collect(),
    }
}

/// Whether a circle among `members` spans folders.
fn spans_folders(tree: &Modules, imports: &[Import], members: &[usize]) -> bool {
    let mut edges = vec![Vec::new(); tree.files.len()];
    for import in imports.iter().filter(|import| members.contains(&import.from) && members.contains(&import.to)) {
        edges[import.from].push(import.to);
    }
    let folder = |&member: &usize| &tree.files[member].folder;
    graph::circles(&edges).iter().any(|circle| circle.iter().map(folder).collect::<BTreeSet<_>>().len() > 1)
}

fn shown(files: &[File], import: &Import) -> String {
    let (from, to) = (&files[import.from], &files[import.to]);
    format!("{}:{}: {} -> {} ({})", from.path.display(), import.line, from.name, to.name, import.name)
}

/// Compares the circles that span folders with the baseline.
pub struct Verdict {
    /// Circles that no entry of the baseline allows.
    pub problems: Vec<String>,
    /// Entries of the baseline that may be lowered or removed.
    pub hints: Vec<String>,
}

/// Each entry of `allowed` allows one circle of its crate.
pub fn verdict(circles: &[Circle], allowed: &[AllowedCircle]) -> Verdict {
    let mut verdict = Verdict { problems: Vec::new(), hints: Vec::new() };
    let mut unused: Vec<&AllowedCircle> = allowed.iter().collect();
    unused.sort_by_key(|entry| std::cmp::Reverse(entry.modules));
    let mut spanning: Vec<&Circle> = circles.iter().filter(|circle| circle.spans_folders()).collect();
    spanning.sort_by_key(|circle| std::cmp::Reverse(circle.modules.len()));
    // The largest circle of a crate takes its most generous entry.
    for circle in spanning {
        let size = circle.modules.len();
        let package = &circle.package;
        let entry = unused.iter().position(|entry| entry.package == *package).map(|at| unused.remove(at));
        match entry {
            Some(entry) if entry.modules >= size => {
                if entry.modules > size {
                    verdict.hints.push(format!("a circle of {package} has {size} modules now: lower `modules` to it"));
                }
            }
            _ => verdict.problems.push(problem(circle, entry)),
        }
    }
    for entry in unused {
        let AllowedCircle { package, modules, .. } = entry;
        verdict.hints.push(format!("the circle of {modules} modules in {package} is gone: remove its entry"));
    }
    verdict
}

fn problem(circle: &Circle, entry: Option<&AllowedCircle>) -> String {
    let size = circle.modules.len();
    let allowed = match entry {
        Some(entry) => format!("at most {} are allowed", entry.modules),
        None => "none is allowed".to_owned(),
    };
    format!(
        "{size} modules of crate {} in {} folders import each other, {allowed}: {}",
        circle.package,
        circle.folders.len(),
        circle.modules.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::super::modules::tests::modules;
    use super::*;

    fn circles(files: &[(&str, &str)]) -> Vec<Circle> {
        find("p", &modules(files))
    }

    fn allowed(modules: usize) -> AllowedCircle {
        AllowedCircle { package: "p".to_owned(), modules, reason: String::new() }
    }

    const USES_B: &str = "use crate::b::B; pub struct A;";
    const USES_A: &str = "use crate::a::A; pub struct B;";

    #[test]
    fn a_circle_in_one_folder_passes() {
        let found = circles(&[("src/lib.rs", "mod a; mod b;"), ("src/a.rs", USES_B), ("src/b.rs", USES_A)]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].modules, ["a", "b"]);
        assert!(!found[0].spans_folders());
        assert_eq!(found[0].imports[0], "src/a.rs:1: a -> b (crate::b::B)");
    }

    #[test]
    fn a_circle_across_folders_fails() {
        let found = circles(&[("src/lib.rs", "mod a; mod b;"), ("src/a/mod.rs", USES_B), ("src/b.rs", USES_A)]);
        assert!(found[0].spans_folders());
        let verdict = verdict(&found, &[]);
        assert!(verdict.problems[0].contains("2 modules of crate p in 2 folders"), "{:?}", verdict.problems);
    }

    #[test]
    fn a_head_and_its_own_children_pass() {
        let files = [
            ("src/lib.rs", "mod a;"),
            ("src/a.rs", "mod b; use b::B; pub struct A;"),
            ("src/a/b/mod.rs", "mod c; use super::A; pub struct B;"),
            ("src/a/b/c.rs", ""),
        ];
        let found = circles(&files);
        assert_eq!((found[0].folders.len(), found[0].spans_folders()), (2, false));
    }

    #[test]
    fn children_that_import_each_other_are_no_family() {
        let files = [
            ("src/lib.rs", "mod a; mod b; use a::A; pub struct C;"),
            ("src/a/mod.rs", "use crate::{C, b::B}; pub struct A;"),
            ("src/b.rs", USES_A),
        ];
        let found = circles(&files);
        assert_eq!((found[0].modules.len(), found[0].spans_folders()), (3, true));
    }

    #[test]
    fn a_grandchild_is_no_child() {
        let files = [
            ("src/lib.rs", "mod a;"),
            ("src/a.rs", "mod b; use b::c::C; pub struct A;"),
            ("src/a/b/mod.rs", "pub mod c;"),
            ("src/a/b/c.rs", "use crate::a::A; pub struct C;"),
        ];
        let found = circles(&files);
        assert_eq!(found[0].modules, ["a", "a::b::c"]);
        assert!(found[0].spans_folders());
    }

    #[test]
    fn imports_of_tests_close_no_circle() {
        let b = "pub struct B; #[cfg(test)] mod tests { use crate::a::A; }";
        assert_eq!(circles(&[("src/lib.rs", "mod a; mod b;"), ("src/a.rs", USES_B), ("src/b.rs", b)]), []);
    }

    #[test]
    fn an_entry_allows_one_circle_up_to_its_size() {
        let found = circles(&[("src/lib.rs", "mod a; mod b;"), ("src/a/mod.rs", USES_B), ("src/b.rs", USES_A)]);
        let outcome = |entries: &[AllowedCircle]| {
            let verdict = verdict(&found, entries);
            (verdict.problems.len(), verdict.hints.len())
        };
        assert_eq!(outcome(&[allowed(2)]), (0, 0));
        assert_eq!(outcome(&[allowed(3)]), (0, 1));
        assert_eq!(outcome(&[allowed(2), allowed(2)]), (0, 1));
        assert_eq!(outcome(&[allowed(1)]), (1, 0));
        let other_crate = AllowedCircle { package: "q".to_owned(), ..allowed(2) };
        assert_eq!(outcome(&[other_crate]), (1, 1));
    }
}
