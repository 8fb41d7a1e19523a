//! Checks the imports between crates against the declared layers.

use super::graph::circles;
use super::workspace::Member;
use crate::baseline::Layer;

/// The layer of a crate, counted from the top.
fn layer_of(layers: &[Layer], name: &str) -> Option<usize> {
    layers.iter().position(|layer| layer.crates.iter().any(|member| member == name))
}

/// Imports that do not point to a lower layer, crates without a layer, entries without a crate,
/// and circles of crates.
pub fn problems(members: &[Member], layers: &[Layer]) -> Vec<String> {
    let mut problems = Vec::new();
    for member in members {
        let Some(own) = layer_of(layers, &member.name) else {
            problems.push(format!("crate {} is in no layer: add it to e2e/lint/layers.toml", member.name));
            continue;
        };
        for import in &member.imports {
            if let Some(other) = layer_of(layers, import).filter(|other| *other <= own) {
                problems.push(format!(
                    "crate {} (layer {}) imports {import} (layer {}): imports must point to a lower layer",
                    member.name, layers[own].name, layers[other].name
                ));
            }
        }
    }
    problems.extend(wrong_entries(members, layers));
    for circle in crate_circles(members) {
        problems.push(format!("crates import each other in a circle: {}", circle.join(", ")));
    }
    problems
}

fn wrong_entries(members: &[Member], layers: &[Layer]) -> Vec<String> {
    let mut problems = Vec::new();
    let mut seen: Vec<&str> = Vec::new();
    for name in layers.iter().flat_map(|layer| &layer.crates) {
        if seen.contains(&name.as_str()) {
            problems.push(format!("e2e/lint/layers.toml lists {name} twice: keep one entry"));
        } else if !members.iter().any(|member| member.name == *name) {
            problems.push(format!("e2e/lint/layers.toml lists {name}, which is no workspace member: remove it"));
        }
        seen.push(name);
    }
    problems
}

fn crate_circles(members: &[Member]) -> Vec<Vec<&str>> {
    let index = |name: &String| members.iter().position(|member| member.name == *name);
    let edges: Vec<Vec<usize>> =
        members.iter().map(|member| member.imports.iter().filter_map(index).collect()).collect();
    let names = |circle: Vec<usize>| circle.into_iter().map(|member| members[member].name.as_str()).collect();
    circles(&edges).into_iter().map(names).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, imports: &[&str]) -> Member {
        let imports = imports.iter().map(|import| (*import).to_owned()).collect();
        Member { name: name.to_owned(), folder: name.into(), imports }
    }

    fn layers(layers: &[&[&str]]) -> Vec<Layer> {
        let layer = |crates: &&[&str]| Layer {
            name: crates.concat(),
            crates: crates.iter().map(|name| (*name).to_owned()).collect(),
        };
        layers.iter().map(layer).collect()
    }

    #[test]
    fn imports_may_point_down_past_layers() {
        let members = [member("a", &["b", "c"]), member("b", &["c"]), member("c", &[])];
        assert_eq!(problems(&members, &layers(&[&["a"], &["b"], &["c"]])), Vec::<String>::new());
    }

    #[test]
    fn upward_and_sideways_imports_fail() {
        let members = [member("a", &[]), member("b", &["a"]), member("c", &["b"])];
        let problems = problems(&members, &layers(&[&["a"], &["b", "c"]]));
        assert!(problems[0].starts_with("crate b (layer bc) imports a (layer a)"), "{problems:?}");
        assert!(problems[1].starts_with("crate c (layer bc) imports b (layer bc)"), "{problems:?}");
        assert_eq!(problems.len(), 2);
    }

    #[test]
    fn every_crate_needs_one_layer() {
        let problems = problems(&[member("a", &[]), member("b", &[])], &layers(&[&["a"], &["a", "c"]]));
        let expected = ["crate b is in no layer", "lists a twice", "lists c, which is no workspace member"];
        assert_eq!(problems.len(), expected.len());
        for (problem, expected) in problems.iter().zip(expected) {
            assert!(problem.contains(expected), "{problem}");
        }
    }

    #[test]
    fn a_circle_of_crates_fails() {
        let members = [member("a", &["b"]), member("b", &["a"])];
        assert!(
            problems(&members, &layers(&[&["a"], &["b"]]))
                .contains(&"crates import each other in a circle: a, b".to_owned())
        );
    }
}
