//! The line of a field in a YAML text. The YAML parser reports positions only in errors. So this
//! module parses the text again, with a target that follows a path and fails on purpose at its end.
//! Only used when there is an error to report.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::{FieldPath, Segment};

/// Line and column, both from 1, of the field at `path`: the position of its name. If the text does
/// not have it, the position of the nearest object around it.
pub(crate) fn locate(text: &str, path: &FieldPath) -> Option<(usize, usize)> {
    (1..=path.0.len()).rev().find_map(|length| locate_exactly(text, &path.0[..length]))
}

fn locate_exactly(text: &str, path: &[Segment]) -> Option<(usize, usize)> {
    let arrived = Cell::new(false);
    let mut documents = serde_yaml::Deserializer::from_str(text).map(|document| {
        Walk { path, arrived: &arrived }
            .deserialize(document)
            .err()
            .and_then(|error: serde_yaml::Error| error.location())
    });
    // Comments before a `---` come first, as an empty document.
    let location = documents.by_ref().take(2).find_map(|location| location)?;
    arrived.get().then(|| (location.line(), location.column()))
}

#[derive(Clone, Copy)]
struct Walk<'a> {
    path: &'a [Segment],
    arrived: &'a Cell<bool>,
}

impl Walk<'_> {
    fn arrive<E: Error>(self) -> E {
        self.arrived.set(true);
        E::custom("arrived")
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.path {
            [] => deserializer.deserialize_any(Arrive(self)),
            [Segment::Key(_), ..] => deserializer.deserialize_map(self),
            [Segment::Index(_), ..] => deserializer.deserialize_seq(self),
        }
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or a list")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(is_next) = map.next_key_seed(Key(self))? {
            if is_next {
                return map.next_value_seed(Walk { path: &self.path[1..], ..self });
            }
            map.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Some(Segment::Index(index)) = self.path.first() else { return Ok(()) };
        for _ in 0..*index {
            if seq.next_element::<IgnoredAny>()?.is_none() {
                return Ok(());
            }
        }
        seq.next_element_seed(Walk { path: &self.path[1..], ..self }).map(drop)
    }
}

/// Reads a key, and tells whether the path continues below it. Fails on purpose at the path's last
/// key.
struct Key<'a>(Walk<'a>);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Key<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a field's name")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<bool, E> {
        match self.0.path {
            [Segment::Key(wanted)] if wanted == name => Err(self.0.arrive()),
            [Segment::Key(wanted), ..] => Ok(wanted == name),
            _ => Ok(false),
        }
    }
}

/// Fails on purpose at any value.
struct Arrive<'a>(Walk<'a>);

impl<'de> Visitor<'de> for Arrive<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        Err(self.0.arrive())
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        Err(self.0.arrive())
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        Err(self.0.arrive())
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        Err(self.0.arrive())
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        Err(self.0.arrive())
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        Err(self.0.arrive())
    }

    fn visit_none<E: Error>(self) -> Result<(), E> {
        Err(self.0.arrive())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        IgnoredAny::deserialize(deserializer)?;
        Err(self.0.arrive())
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<(), A::Error> {
        Err(self.0.arrive())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<(), A::Error> {
        Err(self.0.arrive())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "# a job\nkind: X\nspec:\n  list:\n    - name: a\n    - {name: b, dim: 3}\n  flow: [1, 2,\n    three]\n";

    #[test]
    fn fields_and_entries_are_found_where_they_are() {
        for (path, place) in [
            ("kind", (2, 1)),
            ("spec.list", (4, 3)),
            ("spec.list[0].name", (5, 7)),
            ("spec.list[1]", (6, 7)),
            ("spec.list[1].dim", (6, 17)),
            ("spec.flow[2]", (8, 5)),
        ] {
            assert_eq!(locate(TEXT, &FieldPath::parse(path)), Some(place), "{path}");
        }
    }

    #[test]
    fn an_absent_field_is_located_at_its_parent() {
        for (path, place) in [("spec.model.kind", (3, 1)), ("spec.list[0].dim", (5, 7)), ("spec.list[7].name", (4, 3))]
        {
            assert_eq!(locate(TEXT, &FieldPath::parse(path)), Some(place), "{path}");
        }
        assert_eq!(locate(TEXT, &FieldPath::parse("metadata.name")), None);
        assert_eq!(locate("", &FieldPath::parse("spec")), None);
    }

    #[test]
    fn a_leading_document_marker_does_not_hide_the_lines() {
        assert_eq!(locate("# x\n---\nkind: X\n", &FieldPath::parse("kind")), Some((3, 1)));
    }
}
