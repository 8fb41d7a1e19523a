//! Paths of fields in a manifest, such as `spec.features.sparse[3].dim`, in errors, `--set` and
//! `explain`.

use std::fmt;

/// One step of a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Segment {
    /// A field of an object.
    Key(String),
    /// An entry of a list, from 0.
    Index(usize),
}

/// The path from the root of a manifest to a value in it. The empty path is the manifest itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FieldPath(pub Vec<Segment>);

impl FieldPath {
    /// The manifest itself.
    pub fn root() -> Self {
        Self::default()
    }

    /// This path and one more field.
    pub fn key(&self, name: &str) -> Self {
        self.with(Segment::Key(name.to_string()))
    }

    /// This path and one more entry.
    pub fn index(&self, index: usize) -> Self {
        self.with(Segment::Index(index))
    }

    /// This path, followed by `rest`.
    pub fn join(&self, rest: &FieldPath) -> Self {
        Self(self.0.iter().chain(&rest.0).cloned().collect())
    }

    fn with(&self, segment: Segment) -> Self {
        let mut segments = self.0.clone();
        segments.push(segment);
        Self(segments)
    }

    /// True if `other` is this path, or is within it.
    pub fn contains(&self, other: &FieldPath) -> bool {
        other.0.len() >= self.0.len() && other.0[..self.0.len()] == self.0[..]
    }

    /// Parses `a.b[2].c`, with or without a leading dot. Never fails: brackets without a number
    /// belong to the name.
    pub fn parse(text: &str) -> Self {
        let mut segments = Vec::new();
        for part in text.split('.').filter(|part| !part.is_empty()) {
            let (name, indices) = split_indices(part);
            if !name.is_empty() {
                segments.push(Segment::Key(name.to_string()));
            }
            segments.extend(indices.into_iter().map(Segment::Index));
        }
        Self(segments)
    }
}

/// `a[1][2]` → (`a`, [1, 2]).
fn split_indices(part: &str) -> (&str, Vec<usize>) {
    let mut name = part;
    let mut indices = Vec::new();
    while let Some(open) = name.strip_suffix(']').and_then(|rest| rest.rfind('[')) {
        let Ok(index) = name[open + 1..name.len() - 1].parse() else { break };
        indices.insert(0, index);
        name = &name[..open];
    }
    (name, indices)
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, segment) in self.0.iter().enumerate() {
            match segment {
                Segment::Index(index) => write!(f, "[{index}]")?,
                Segment::Key(name) if name.contains(['.', '[', ']']) => write!(f, "[\"{name}\"]")?,
                Segment::Key(name) if position == 0 => f.write_str(name)?,
                Segment::Key(name) => write!(f, ".{name}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_reads_back_as_it_is_written() {
        for text in ["", "spec", "spec.features.sparse[3].dim", "a[1][2].b"] {
            assert_eq!(FieldPath::parse(text).to_string(), text);
        }
        assert_eq!(FieldPath::parse(".spec.model").to_string(), "spec.model");
        assert_eq!(FieldPath::root().key("a").key("x.y/z").to_string(), "a[\"x.y/z\"]");
    }

    #[test]
    fn a_path_contains_only_itself_and_paths_below_it() {
        let path = FieldPath::parse("spec.data");
        assert!(path.contains(&FieldPath::parse("spec.data")));
        assert!(path.contains(&FieldPath::parse("spec.data.train.paths[0]")));
        assert!(!path.contains(&FieldPath::parse("spec")));
        assert!(!path.contains(&FieldPath::parse("spec.dataset")));
    }

    #[test]
    fn brackets_without_a_number_belong_to_the_name() {
        assert_eq!(FieldPath::parse("a[x]").0, vec![Segment::Key("a[x]".to_string())]);
        assert_eq!(FieldPath::parse("]").0, vec![Segment::Key("]".to_string())]);
    }
}
