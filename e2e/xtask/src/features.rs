//! Checks that every command selects the same features of dependencies. With another selection,
//! cargo builds a dependency and everything above it a second time.

use std::collections::BTreeSet;

use rectrain_harness::HarnessError;
use rectrain_harness::cargo::cargo_command;
use rectrain_harness::command::output;

use crate::error::XtaskError;

/// Edges of the tests, which select every feature that any command selects.
const TESTS: [&str; 3] = ["--workspace", "--edges", "normal,build,dev"];

/// Commands that build programs, and the arguments that make `cargo tree` select as they do.
const COMMANDS: [(&str, &[&str]); 3] = [
    ("cargo run", &["--package", "rectrain", "--edges", "normal,build"]),
    ("cargo xtask", &["--package", "xtask", "--edges", "normal,build"]),
    ("cargo build --workspace --bins", &["--workspace", "--edges", "normal,build"]),
];

/// Compares the features that the commands select.
pub(crate) fn check() -> Result<(), XtaskError> {
    let tests = selected(&TESTS)?;
    let mut different = Vec::new();
    for (command, arguments) in COMMANDS {
        let selected = selected(arguments)?;
        different.extend(selected.difference(&tests).map(|package| format!("  {command}: {package}")));
    }
    if different.is_empty() { Ok(()) } else { Err(XtaskError::Features(different.join("\n"))) }
}

/// The dependencies of a selection from outside of the workspace, each with its features.
fn selected(arguments: &[&str]) -> Result<BTreeSet<String>, HarnessError> {
    const FORM: [&str; 6] = ["tree", "--locked", "--prefix", "none", "--format", "{p} {f}"];
    let tree = output(cargo_command().args(FORM).args(arguments))?;
    Ok(packages(&tree))
}

fn packages(tree: &str) -> BTreeSet<String> {
    let external = tree.lines().filter(|line| !line.contains("(/"));
    external.map(|line| line.replace(" (*)", "").replace("(proc-macro) ", "")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_the_workspace_and_repeated_ones_are_left_out() {
        let tree = "rectrain v0.1.0 (/src/runtime/cli) cluster\nlibc v0.2.1 std\nlibc v0.2.1 std (*)\n\
                    thiserror-impl v2.0.1 (proc-macro) \n";
        assert_eq!(packages(tree), BTreeSet::from(["libc v0.2.1 std".to_owned(), "thiserror-impl v2.0.1 ".to_owned()]));
    }
}
