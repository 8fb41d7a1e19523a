//! Avro records in the wire format of a schema registry. Behind the number of the schema, a value
//! has the record in Avro's binary encoding (Avro 1.12). The fields of the record become cells by
//! their names. Pure: the caller fetches schemas.

use std::collections::HashMap;

use serde_json::Value;

use super::binary::BinaryReader;

/// The deepest nesting of types.
const MOST_NESTED: usize = 64;

/// The type of a value.
#[derive(Debug, Clone, PartialEq)]
enum Type {
    Null,
    Boolean,
    /// `int` and `long` have one encoding.
    Long,
    Float,
    Double,
    /// `bytes` and `string` have one encoding.
    Bytes,
    Fixed(usize),
    Enum(Vec<String>),
    Array(Box<Self>),
    Map(Box<Self>),
    Union(Vec<Self>),
    Record(Vec<(String, Self)>),
    /// A type with a name, which may be within itself.
    Named(String),
}

/// A schema of records.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct AvroSchema {
    fields: Vec<(String, Type)>,
    named: HashMap<String, Type>,
}

impl AvroSchema {
    /// Reads a schema in Avro's JSON. Fails with its defect.
    pub(super) fn parse(json: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(json).map_err(|error| format!("it is no JSON: {error}"))?;
        let mut named = HashMap::new();
        let root = parse(&value, "", &mut named, 0)?;
        let root = match root {
            Type::Named(name) => named.get(&name).cloned(),
            other => Some(other),
        };
        match root {
            Some(Type::Record(fields)) => Ok(Self { fields, named }),
            _ => Err("it is no record".to_owned()),
        }
    }
}

fn parse(value: &Value, space: &str, named: &mut HashMap<String, Type>, depth: usize) -> Result<Type, String> {
    if depth > MOST_NESTED {
        return Err("it is nested too deeply".to_owned());
    }
    match value {
        Value::String(name) => primitive(name).map_or_else(|| Ok(Type::Named(full_name(name, space))), Ok),
        Value::Array(branches) => {
            let parsed = branches.iter().map(|branch| parse(branch, space, named, depth + 1));
            Ok(Type::Union(parsed.collect::<Result<_, _>>()?))
        }
        Value::Object(object) => {
            let kind = object.get("type").ok_or("a type has no `type`")?;
            let inner = |field: &str| object.get(field).ok_or_else(|| format!("a type has no `{field}`"));
            match kind.as_str() {
                Some("array") => Ok(Type::Array(Box::new(parse(inner("items")?, space, named, depth + 1)?))),
                Some("map") => Ok(Type::Map(Box::new(parse(inner("values")?, space, named, depth + 1)?))),
                Some(kind @ ("record" | "error" | "enum" | "fixed")) => parse_named(kind, object, space, named, depth),
                _ => parse(kind, space, named, depth + 1),
            }
        }
        other => Err(format!("`{other}` is no type")),
    }
}

fn primitive(name: &str) -> Option<Type> {
    Some(match name {
        "null" => Type::Null,
        "boolean" => Type::Boolean,
        "int" | "long" => Type::Long,
        "float" => Type::Float,
        "double" => Type::Double,
        "bytes" | "string" => Type::Bytes,
        _ => return None,
    })
}

fn full_name(name: &str, space: &str) -> String {
    if name.contains('.') || space.is_empty() { name.to_owned() } else { format!("{space}.{name}") }
}

fn parse_named(
    kind: &str,
    object: &serde_json::Map<String, Value>,
    space: &str,
    named: &mut HashMap<String, Type>,
    depth: usize,
) -> Result<Type, String> {
    let name = object.get("name").and_then(Value::as_str).ok_or_else(|| format!("a type `{kind}` has no `name`"))?;
    let space = object.get("namespace").and_then(Value::as_str).unwrap_or(space);
    let name = full_name(name, space);
    let space = name.rsplit_once('.').map_or("", |(space, _)| space).to_owned();
    let list = |field: &str| object.get(field).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let parsed = match kind {
        "enum" => Type::Enum(list("symbols").iter().filter_map(Value::as_str).map(str::to_owned).collect()),
        "fixed" => {
            let size = object.get("size").and_then(Value::as_u64).ok_or("a type `fixed` has no `size`")?;
            Type::Fixed(usize::try_from(size).map_err(|_| "a `size` is too large")?)
        }
        _ => {
            let mut fields = Vec::new();
            for field in list("fields") {
                let of_field = field.get("name").and_then(Value::as_str).zip(field.get("type"));
                let (name, kind) = of_field.ok_or("a field has no `name` or no `type`")?;
                fields.push((name.to_owned(), parse(kind, &space, named, depth + 1)?));
            }
            Type::Record(fields)
        }
    };
    named.insert(name.clone(), parsed);
    Ok(Type::Named(name))
}

/// Calls `cell` with the name and the text of each field of a record that is a cell; nested records
/// and maps are none. The items of a list are separated by what `separator` gives for the field.
/// Fails with the expectation.
pub(super) fn read<'a>(
    schema: &'a AvroSchema,
    record: &[u8],
    separator: impl Fn(&str) -> &'a [u8],
    mut cell: impl FnMut(&str, &[u8]),
) -> Result<(), &'static str> {
    let mut reader = Reader { bytes: BinaryReader { rest: record }, named: &schema.named };
    let mut text = Vec::new();
    for (name, kind) in &schema.fields {
        text.clear();
        if reader.value(kind, separator(name), &mut text, 0)? {
            cell(name, &text);
        }
    }
    if reader.bytes.rest.is_empty() { Ok(()) } else { Err("nothing behind the record") }
}

struct Reader<'a> {
    bytes: BinaryReader<'a>,
    named: &'a HashMap<String, Type>,
}

impl Reader<'_> {
    /// Appends the text of a value. Returns whether it can be a cell.
    fn value(&mut self, kind: &Type, separator: &[u8], into: &mut Vec<u8>, depth: usize) -> Result<bool, &'static str> {
        if depth > MOST_NESTED {
            return Err("less nesting");
        }
        match kind {
            Type::Null => {}
            Type::Boolean => into.push(b'0' + u8::from(self.bytes.take(1)?.first() == Some(&1))),
            Type::Long => into.extend_from_slice(self.bytes.zigzag()?.to_string().as_bytes()),
            Type::Float => into.extend_from_slice(f32::from_le_bytes(self.bytes.fixed()?).to_string().as_bytes()),
            Type::Double => into.extend_from_slice(f64::from_le_bytes(self.bytes.fixed()?).to_string().as_bytes()),
            Type::Bytes => {
                let length = self.length()?;
                into.extend_from_slice(self.bytes.take(length)?);
            }
            Type::Fixed(size) => into.extend_from_slice(self.bytes.take(*size)?),
            Type::Enum(symbols) => {
                let symbol = self.length()?;
                into.extend_from_slice(symbols.get(symbol).ok_or("a symbol of the enum")?.as_bytes());
            }
            Type::Union(branches) => {
                let branch = self.length()?;
                let branch = branches.get(branch).ok_or("a branch of the union")?;
                return self.value(branch, separator, into, depth + 1);
            }
            Type::Array(items) => return self.list(items, separator, into, depth),
            Type::Map(values) => {
                self.blocks(|reader| {
                    let length = reader.length()?;
                    reader.bytes.take(length)?;
                    reader.value(values, separator, &mut Vec::new(), depth + 1).map(drop)
                })?;
                return Ok(false);
            }
            Type::Record(fields) => {
                for (_, kind) in fields {
                    self.value(kind, separator, &mut Vec::new(), depth + 1)?;
                }
                return Ok(false);
            }
            Type::Named(name) => {
                let kind = self.named.get(name).ok_or("a type that the schema defines")?;
                return self.value(kind, separator, into, depth + 1);
            }
        }
        Ok(true)
    }

    fn list(&mut self, items: &Type, separator: &[u8], into: &mut Vec<u8>, depth: usize) -> Result<bool, &'static str> {
        let (mut is_first, mut is_cell) = (true, true);
        self.blocks(|reader| {
            if !std::mem::take(&mut is_first) {
                into.extend_from_slice(separator);
            }
            is_cell &= reader.value(items, separator, into, depth + 1)?;
            Ok(())
        })?;
        Ok(is_cell)
    }

    /// Reads the blocks of a list or a map: the number of items of each, and a zero at the end.
    fn blocks(&mut self, mut item: impl FnMut(&mut Self) -> Result<(), &'static str>) -> Result<(), &'static str> {
        loop {
            let count = self.bytes.zigzag()?;
            if count == 0 {
                return Ok(());
            }
            if count < 0 {
                // The size of the block follows, for readers that pass over it.
                self.bytes.zigzag()?;
            }
            let count = count.unsigned_abs();
            // Items without bytes, such as nulls, have no other bound.
            if count > self.bytes.rest.len() as u64 + (1 << 16) {
                return Err("fewer items");
            }
            for _ in 0..count {
                item(self)?;
            }
        }
    }

    fn length(&mut self) -> Result<usize, &'static str> {
        usize::try_from(self.bytes.zigzag()?).map_err(|_| "a length or an index of at least 0")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CLICK: &str = r#"{"type": "record", "name": "Click", "namespace": "shop", "fields": [
        {"name": "label", "type": "boolean"},
        {"name": "user", "type": ["null", "string"]},
        {"name": "age", "type": {"type": "int", "logicalType": "years"}},
        {"name": "price", "type": "double"},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["VIEW", "BUY"]}},
        {"name": "tags", "type": {"type": "array", "items": "long"}},
        {"name": "where", "type": {"type": "record", "name": "Place", "fields": [{"name": "x", "type": "float"}]}},
        {"name": "before", "type": ["null", "Kind"]},
        {"name": "counts", "type": {"type": "map", "values": "shop.Place"}},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 2}}
    ]}"#;

    /// Written by hand after Avro's specification.
    const RECORD: &[u8] = &[
        1, 2, 4, b'u', b'7', 72, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f, 2, 3, 6, 2, 0x81, 1, 2, 14, 0, 0, 0, 0, 0, 2, 0, 2, 2,
        b'k', 0, 0, 0, 0, 0, b'a', b'b',
    ];

    fn cells(schema: &AvroSchema, record: &[u8]) -> Result<Vec<(String, String)>, &'static str> {
        let mut found = Vec::new();
        read(
            schema,
            record,
            |_| b"|",
            |name, text| {
                found.push((name.to_owned(), String::from_utf8_lossy(text).into_owned()));
            },
        )?;
        Ok(found)
    }

    #[test]
    fn fields_become_cells() {
        let schema = AvroSchema::parse(CLICK).unwrap();
        let expected = [
            ("label", "1"),
            ("user", "u7"),
            ("age", "36"),
            ("price", "1.5"),
            ("kind", "BUY"),
            ("tags", "1|-65|7"),
            ("before", "VIEW"),
            ("hash", "ab"),
        ];
        assert_eq!(cells(&schema, RECORD).unwrap(), expected.map(|(name, text)| (name.to_owned(), text.to_owned())));
        for cut in 0..RECORD.len() {
            assert!(cells(&schema, &RECORD[..cut]).is_err(), "{cut} bytes");
        }
        assert_eq!(cells(&schema, &[RECORD, &[0]].concat()), Err("nothing behind the record"));
    }

    #[test]
    fn schemas_that_are_none_are_refused() {
        for (json, expected) in [
            ("{", "no JSON"),
            ("\"long\"", "no record"),
            (r#"{"type": "record", "fields": []}"#, "has no `name`"),
            (r#"{"type": "record", "name": "R", "fields": [{"name": "a"}]}"#, "no `type`"),
            (r#"{"type": "record", "name": "R", "fields": [{"name": "a", "type": 5}]}"#, "`5` is no type"),
            (r#"{"type": "fixed", "name": "R"}"#, "no `size`"),
        ] {
            let error = AvroSchema::parse(json).unwrap_err();
            assert!(error.contains(expected), "{json}: {error}");
        }
    }

    #[test]
    fn a_type_within_itself_ends() {
        let json = r#"{"type": "record", "name": "R", "fields": [{"name": "next", "type": ["null", "R"]}]}"#;
        let schema = AvroSchema::parse(json).unwrap();
        assert_eq!(cells(&schema, &[2, 2, 0]), Ok(vec![]));
        assert_eq!(cells(&schema, &[2; 1_000]), Err("less nesting"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _read = cells(&AvroSchema::parse(CLICK).unwrap(), &bytes);
        }
    }
}
