//! Protobuf messages in the wire format of a schema registry. Behind the number of the schema, a
//! value has the place of its message in the schema's file, and the message in Protobuf's encoding.
//! The fields of the message become cells by their names. Pure: the caller fetches schemas.
//!
//! The parser of files is `protox-parse`. Imported files are not read. So an enum of another file
//! is known by its numbers only.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto};

use super::binary::BinaryReader;

/// The deepest nesting of messages in a file, and of groups in a message.
const MOST_NESTED: usize = 64;
/// The numbers that a field may have.
const FIELD_NUMBERS: RangeInclusive<u32> = 1..=(1 << 29) - 1;
/// The wire types of Protobuf's encoding.
const VARINT: u8 = 0;
const EIGHT_BYTES: u8 = 1;
const LENGTH: u8 = 2;
const GROUP: u8 = 3;
const END_OF_GROUP: u8 = 4;
const FOUR_BYTES: u8 = 5;

/// A file with messages.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ProtobufSchema {
    messages: Vec<Message>,
}

/// A message, and the ones within it, without the entries of maps.
#[derive(Debug, Clone, PartialEq)]
struct Message {
    fields: Vec<Field>,
    places: HashMap<u32, usize>,
    nested: Vec<Self>,
}

#[derive(Debug, Clone, PartialEq)]
struct Field {
    name: String,
    kind: Kind,
    is_list: bool,
    /// The cell of a field that a message does not have; `None` if its value is then missing.
    absent: Option<Vec<u8>>,
    /// The number of the oneof that it belongs to.
    oneof: Option<i32>,
}

/// The type of a value.
#[derive(Debug, Clone, PartialEq)]
enum Kind {
    Double,
    Float,
    Int64,
    Int32,
    Uint64,
    Uint32,
    /// `sint32` and `sint64` have one encoding.
    Sint,
    Fixed64,
    Fixed32,
    Sfixed64,
    Sfixed32,
    Bool,
    /// `bytes` and `string` have one encoding.
    Bytes,
    /// The names of an enum's numbers.
    Enum(HashMap<i32, String>),
    /// A type of an imported file: a message or an enum.
    Imported,
    /// A message of the file, a map or a group. It is no cell.
    Message,
}

impl Kind {
    /// The type of one value on the wire.
    fn wire(&self) -> u8 {
        match self {
            Self::Double | Self::Fixed64 | Self::Sfixed64 => EIGHT_BYTES,
            Self::Float | Self::Fixed32 | Self::Sfixed32 => FOUR_BYTES,
            Self::Bytes | Self::Message => LENGTH,
            _ => VARINT,
        }
    }

    /// Whether values of a type are a cell.
    fn is_cell(&self, wire: u8) -> bool {
        match self {
            Self::Message => false,
            Self::Imported => wire == VARINT,
            _ => true,
        }
    }

    /// The text of the default value in the language proto3.
    fn zero(&self) -> Option<Vec<u8>> {
        match self {
            Self::Bytes | Self::Imported | Self::Message => None,
            Self::Enum(names) => Some(symbol(names, 0).into_bytes()),
            _ => Some(b"0".to_vec()),
        }
    }
}

/// The name of an enum's number. A number without a name is its own.
fn symbol(names: &HashMap<i32, String>, number: i32) -> String {
    names.get(&number).cloned().unwrap_or_else(|| number.to_string())
}

/// The types of a file by their full names; `None` for messages.
type Names<'a> = HashMap<String, Option<&'a EnumDescriptorProto>>;

impl ProtobufSchema {
    /// Reads a file in the language proto2 or proto3. Fails with its defect.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let file = protox_parse::parse("schema.proto", text);
        let file = file.map_err(|error| format!("it is no Protobuf: {error}"))?;
        if file.message_type.is_empty() {
            return Err("it has no message".to_owned());
        }
        let package = file.package().to_owned();
        let mut names = Names::new();
        note_enums(&file.enum_type, &package, &mut names);
        note_messages(&file.message_type, &package, &mut names, 0)?;
        let has_zeros = file.syntax() == "proto3";
        let reader = Types { names: &names, has_zeros };
        Ok(Self { messages: file.message_type.iter().map(|message| reader.message(message, &package)).collect() })
    }

    /// The message that the start of a record names, and the bytes of the message.
    fn locate<'a>(&self, record: &'a [u8]) -> Result<(&Message, &'a [u8]), &'static str> {
        const EXPECTED: &str = "the place of a message in the schema";
        let mut reader = BinaryReader { rest: record };
        let depth = reader.index(EXPECTED)?;
        // The first message of a file is so frequent that its place is written as 0.
        let first = if depth == 0 { 0 } else { reader.index(EXPECTED)? };
        let mut message = self.messages.get(first).ok_or(EXPECTED)?;
        for _ in 1..depth {
            message = message.nested.get(reader.index(EXPECTED)?).ok_or(EXPECTED)?;
        }
        Ok((message, reader.rest))
    }
}

fn full_name(scope: &str, name: &str) -> String {
    if scope.is_empty() { name.to_owned() } else { format!("{scope}.{name}") }
}

fn note_enums<'a>(enums: &'a [EnumDescriptorProto], scope: &str, names: &mut Names<'a>) {
    names.extend(enums.iter().map(|found| (full_name(scope, found.name()), Some(found))));
}

fn note_messages<'a>(
    messages: &'a [DescriptorProto],
    scope: &str,
    names: &mut Names<'a>,
    depth: usize,
) -> Result<(), String> {
    if depth > MOST_NESTED {
        return Err("it is nested too deeply".to_owned());
    }
    for message in messages {
        let name = full_name(scope, message.name());
        note_enums(&message.enum_type, &name, names);
        note_messages(&message.nested_type, &name, names, depth + 1)?;
        names.insert(name, None);
    }
    Ok(())
}

/// The types of a file.
struct Types<'a> {
    names: &'a Names<'a>,
    /// Whether a field without a label that is absent has its type's default value: in proto3.
    has_zeros: bool,
}

impl Types<'_> {
    fn message(&self, given: &DescriptorProto, scope: &str) -> Message {
        let scope = full_name(scope, given.name());
        let is_entry = |nested: &&DescriptorProto| nested.options.as_ref().is_some_and(|options| options.map_entry());
        let nested = given.nested_type.iter().filter(|nested| !is_entry(nested));
        Message {
            fields: given.field.iter().map(|field| self.field(field, &scope)).collect(),
            places: given.field.iter().map(|field| field.number() as u32).zip(0..).collect(),
            nested: nested.map(|nested| self.message(nested, &scope)).collect(),
        }
    }

    fn field(&self, given: &FieldDescriptorProto, scope: &str) -> Field {
        let kind = self.kind(given, scope);
        let is_list = given.label() == Label::Repeated;
        let has_presence = !self.has_zeros || given.oneof_index.is_some();
        let default = given.default_value.as_ref().map(|text| default(&kind, text));
        let absent = default.or_else(|| if is_list || has_presence { None } else { kind.zero() });
        Field { name: given.name().to_owned(), kind, is_list, absent, oneof: given.oneof_index }
    }

    fn kind(&self, given: &FieldDescriptorProto, scope: &str) -> Kind {
        let Some(kind) = given.r#type.and_then(|kind| Type::try_from(kind).ok()) else {
            return self.named(given.type_name(), scope);
        };
        match kind {
            Type::Double => Kind::Double,
            Type::Float => Kind::Float,
            Type::Int64 => Kind::Int64,
            Type::Int32 => Kind::Int32,
            Type::Uint64 => Kind::Uint64,
            Type::Uint32 => Kind::Uint32,
            Type::Sint32 | Type::Sint64 => Kind::Sint,
            Type::Fixed64 => Kind::Fixed64,
            Type::Fixed32 => Kind::Fixed32,
            Type::Sfixed64 => Kind::Sfixed64,
            Type::Sfixed32 => Kind::Sfixed32,
            Type::Bool => Kind::Bool,
            Type::String | Type::Bytes => Kind::Bytes,
            Type::Enum => self.named(given.type_name(), scope),
            Type::Message | Type::Group => Kind::Message,
        }
    }

    /// The type with a name that is used in `scope`: the one in the innermost scope, as in C++.
    fn named(&self, name: &str, scope: &str) -> Kind {
        let found = match name.strip_prefix('.') {
            Some(full) => self.names.get(full),
            None => scopes(scope).find_map(|scope| self.names.get(&full_name(scope, name))),
        };
        match found {
            None => Kind::Imported,
            Some(None) => Kind::Message,
            Some(Some(found)) => Kind::Enum(names_of(found)),
        }
    }
}

/// A scope, and the ones around it.
fn scopes(scope: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(scope), |scope| {
        (!scope.is_empty()).then(|| scope.rsplit_once('.').map_or("", |(around, _)| around))
    })
}

/// The names of an enum's numbers. The first of several names counts.
fn names_of(given: &EnumDescriptorProto) -> HashMap<i32, String> {
    given.value.iter().rev().map(|value| (value.number(), value.name().to_owned())).collect()
}

/// The cell of a default value as the file has it.
fn default(kind: &Kind, text: &str) -> Vec<u8> {
    match (kind, text) {
        (Kind::Bool, "true") => b"1".to_vec(),
        (Kind::Bool, _) => b"0".to_vec(),
        (_, text) => text.as_bytes().to_vec(),
    }
}

/// Calls `cell` with the name and the text of each field of a record that is a cell. Messages,
/// groups and maps are none. `separator` gives what separates the items of a field's list, or
/// `None` for a field that is not needed. Fails with the expectation.
pub(super) fn read<'a>(
    schema: &ProtobufSchema,
    record: &[u8],
    separator: impl Fn(&str) -> Option<&'a [u8]>,
    mut cell: impl FnMut(&str, &[u8]),
) -> Result<(), &'static str> {
    let (message, bytes) = schema.locate(record)?;
    let mut values: Vec<Option<Vec<u8>>> = message.fields.iter().map(|_| None).collect();
    let mut reader = BinaryReader { rest: bytes };
    while !reader.rest.is_empty() {
        let (number, wire) = reader.tag()?;
        let found = message.places.get(&number).and_then(|&place| Some((place, message.fields.get(place)?)));
        let Some((place, field)) = found else {
            reader.pass_over(number, wire, 0)?;
            continue;
        };
        if field.oneof.is_some() {
            let others = message.fields.iter().zip(&mut values).filter(|(other, _)| other.oneof == field.oneof);
            others.for_each(|(_, value)| *value = None);
        }
        match (separator(&field.name), values.get_mut(place)) {
            (Some(separator), Some(value)) if field.kind.is_cell(wire) => {
                reader.field(field, wire, separator, value)?
            }
            _ => reader.pass_over(number, wire, 0)?,
        }
    }
    let needed = message.fields.iter().zip(&values).filter(|(field, _)| separator(&field.name).is_some());
    for (field, value) in needed {
        if let Some(text) = value.as_ref().or(field.absent.as_ref()) {
            cell(&field.name, text);
        }
    }
    Ok(())
}

impl BinaryReader<'_> {
    /// Reads what the wire has of a field: a value, or the packed values of a list. The last value
    /// of a field counts, unless it is a list.
    fn field(
        &mut self,
        field: &Field,
        wire: u8,
        separator: &[u8],
        value: &mut Option<Vec<u8>>,
    ) -> Result<(), &'static str> {
        if field.is_list && wire == LENGTH && field.kind.wire() != LENGTH {
            let length = self.length()?;
            let mut packed = Self { rest: self.take(length)? };
            while !packed.rest.is_empty() {
                packed.item(&field.kind, separator, value)?;
            }
            return Ok(());
        }
        if wire != field.kind.wire() {
            return Err("fields with the types of the schema");
        }
        if field.is_list {
            return self.item(&field.kind, separator, value);
        }
        self.value(&field.kind, value.insert(Vec::new()))
    }

    /// Appends an item of a list.
    fn item(&mut self, kind: &Kind, separator: &[u8], list: &mut Option<Vec<u8>>) -> Result<(), &'static str> {
        match list {
            Some(list) => {
                list.extend_from_slice(separator);
                self.value(kind, list)
            }
            None => self.value(kind, list.insert(Vec::new())),
        }
    }

    /// Appends the text of a value.
    fn value(&mut self, kind: &Kind, into: &mut Vec<u8>) -> Result<(), &'static str> {
        let text = match kind {
            Kind::Double => f64::from_le_bytes(self.fixed()?).to_string(),
            Kind::Float => f32::from_le_bytes(self.fixed()?).to_string(),
            Kind::Int64 => (self.varint()? as i64).to_string(),
            // A negative number has the ten bytes of a wide one.
            Kind::Int32 | Kind::Imported => (self.varint()? as i32).to_string(),
            Kind::Uint64 => self.varint()?.to_string(),
            Kind::Uint32 => (self.varint()? as u32).to_string(),
            Kind::Sint => self.zigzag()?.to_string(),
            Kind::Fixed64 => u64::from_le_bytes(self.fixed()?).to_string(),
            Kind::Fixed32 => u32::from_le_bytes(self.fixed()?).to_string(),
            Kind::Sfixed64 => i64::from_le_bytes(self.fixed()?).to_string(),
            Kind::Sfixed32 => i32::from_le_bytes(self.fixed()?).to_string(),
            Kind::Bool => u8::from(self.varint()? != 0).to_string(),
            Kind::Enum(names) => symbol(names, self.varint()? as i32),
            Kind::Bytes | Kind::Message => {
                let length = self.length()?;
                into.extend_from_slice(self.take(length)?);
                return Ok(());
            }
        };
        into.extend_from_slice(text.as_bytes());
        Ok(())
    }

    /// The number and the wire type of the next field.
    fn tag(&mut self) -> Result<(u32, u8), &'static str> {
        let tag = self.varint()?;
        let number = u32::try_from(tag >> 3).ok().filter(|number| FIELD_NUMBERS.contains(number));
        Ok((number.ok_or("the number of a field")?, (tag & 7) as u8))
    }

    /// Passes over a field.
    fn pass_over(&mut self, number: u32, wire: u8, depth: usize) -> Result<(), &'static str> {
        if depth > MOST_NESTED {
            return Err("less nesting");
        }
        match wire {
            VARINT => self.varint().map(drop),
            EIGHT_BYTES => self.take(8).map(drop),
            FOUR_BYTES => self.take(4).map(drop),
            LENGTH => {
                let length = self.length()?;
                self.take(length).map(drop)
            }
            GROUP => loop {
                match self.tag()? {
                    (end, END_OF_GROUP) if end == number => return Ok(()),
                    (number, wire) => self.pass_over(number, wire, depth + 1)?,
                }
            },
            _ => Err("a wire type of Protobuf"),
        }
    }

    fn length(&mut self) -> Result<usize, &'static str> {
        usize::try_from(self.varint()?).map_err(|_| "a shorter field")
    }

    /// A place in a list, as the registry's wire format has it.
    fn index(&mut self, expected: &'static str) -> Result<usize, &'static str> {
        usize::try_from(self.zigzag()?).map_err(|_| expected)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;

    const CLICK: &str = r#"
        syntax = "proto3";
        package shop;
        import "place.proto";
        message Other { message Inner { sint32 depth = 1; } }
        message Click {
            enum Kind { VIEW = 0; BUY = 3; }
            bool label = 1;
            optional string user = 2;
            int32 age = 3;
            double price = 4;
            Kind kind = 5;
            repeated int64 tags = 6;
            map<string, Other> counts = 7;
            Other other = 8;
            repeated string words = 9;
            oneof place { fixed32 shelf = 10; sint64 room = 11; }
            geo.Country country = 12;
            geo.Point point = 13;
            repeated Kind before = 14;
            float ratio = 15;
            uint64 wide = 16;
            sfixed64 low = 17;
            bytes hash = 18;
            message Deep { uint32 level = 1; }
        }"#;

    /// The same message for `prost`, which encodes it independently of this module.
    #[derive(Clone, PartialEq, prost::Message)]
    struct Click {
        #[prost(bool, tag = "1")]
        label: bool,
        #[prost(string, optional, tag = "2")]
        user: Option<String>,
        #[prost(int32, tag = "3")]
        age: i32,
        #[prost(double, tag = "4")]
        price: f64,
        #[prost(int32, tag = "5")]
        kind: i32,
        #[prost(int64, repeated, tag = "6")]
        tags: Vec<i64>,
        #[prost(message, optional, tag = "8")]
        other: Option<Inner>,
        #[prost(string, repeated, tag = "9")]
        words: Vec<String>,
        #[prost(fixed32, optional, tag = "10")]
        shelf: Option<u32>,
        #[prost(sint64, optional, tag = "11")]
        room: Option<i64>,
        #[prost(int32, tag = "12")]
        country: i32,
        #[prost(message, optional, tag = "13")]
        point: Option<Inner>,
        #[prost(int32, repeated, packed = "false", tag = "14")]
        before: Vec<i32>,
        #[prost(float, tag = "15")]
        ratio: f32,
        #[prost(uint64, tag = "16")]
        wide: u64,
        #[prost(sfixed64, tag = "17")]
        low: i64,
        #[prost(bytes = "vec", tag = "18")]
        hash: Vec<u8>,
        #[prost(string, tag = "99")]
        unknown: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct Inner {
        #[prost(sint32, tag = "1")]
        depth: i32,
    }

    fn click() -> Click {
        Click {
            label: true,
            user: Some("u7".to_owned()),
            age: -36,
            price: 1.5,
            kind: 3,
            tags: vec![1, -65, 7],
            other: Some(Inner { depth: 5 }),
            words: ["", "a", "", "b"].map(str::to_owned).to_vec(),
            shelf: None,
            room: Some(-2),
            country: 4,
            point: Some(Inner { depth: 6 }),
            before: vec![3, 9],
            ratio: 0.25,
            wide: u64::MAX,
            low: i64::MIN,
            hash: vec![b'a', 0xff],
            unknown: "passed over".to_owned(),
        }
    }

    type Cells = Vec<(String, Vec<u8>)>;

    fn cells(schema: &ProtobufSchema, record: &[u8]) -> Result<Cells, &'static str> {
        let mut found = Vec::new();
        read(
            schema,
            record,
            |_| Some(b"|"),
            |name, text| {
                found.push((name.to_owned(), text.to_vec()));
            },
        )?;
        Ok(found)
    }

    /// A record of the message `Click`, which is the second one of its file.
    fn record(message: &[u8]) -> Vec<u8> {
        [&[2, 2][..], message].concat()
    }

    fn owned(cells: &[(&str, &[u8])]) -> Cells {
        cells.iter().map(|(name, text)| ((*name).to_owned(), text.to_vec())).collect()
    }

    #[test]
    fn fields_become_cells() {
        let schema = ProtobufSchema::parse(CLICK).unwrap();
        let expected = owned(&[
            ("label", b"1"),
            ("user", b"u7"),
            ("age", b"-36"),
            ("price", b"1.5"),
            ("kind", b"BUY"),
            ("tags", b"1|-65|7"),
            ("words", b"|a||b"),
            ("room", b"-2"),
            ("country", b"4"),
            ("before", b"BUY|9"),
            ("ratio", b"0.25"),
            ("wide", b"18446744073709551615"),
            ("low", b"-9223372036854775808"),
            ("hash", b"a\xff"),
        ]);
        assert_eq!(cells(&schema, &record(&click().encode_to_vec())).unwrap(), expected);
    }

    #[test]
    fn absent_fields_have_the_default_of_their_type_unless_they_are_optional() {
        let schema = ProtobufSchema::parse(CLICK).unwrap();
        let expected: [(&str, &[u8]); 7] = [
            ("label", b"0"),
            ("age", b"0"),
            ("price", b"0"),
            ("kind", b"VIEW"),
            ("ratio", b"0"),
            ("wide", b"0"),
            ("low", b"0"),
        ];
        assert_eq!(cells(&schema, &record(&[])).unwrap(), owned(&expected));
        let older = r#"message M { optional int32 a = 1; optional int32 b = 2 [default = 7];
            optional bool c = 3 [default = true]; repeated int32 d = 4 [packed = true]; required string e = 5; }"#;
        let schema = ProtobufSchema::parse(older).unwrap();
        assert_eq!(cells(&schema, &[0, 42, 1, b'x']).unwrap(), owned(&[("b", b"7"), ("c", b"1"), ("e", b"x")]));
    }

    #[test]
    fn the_last_value_counts_and_the_last_member_of_a_oneof() {
        let schema = ProtobufSchema::parse(CLICK).unwrap();
        let of = |name: &str, message: &[u8]| {
            let found = cells(&schema, &record(message)).unwrap();
            found.into_iter().find(|(cell, _)| cell == name).map(|(_, text)| String::from_utf8(text).unwrap())
        };
        assert_eq!(of("age", &[24, 5, 24, 6]).as_deref(), Some("6"));
        let both = [85, 1, 0, 0, 0, 88, 3];
        assert_eq!((of("shelf", &both), of("room", &both).as_deref()), (None, Some("-2")));
        // Packed items and others of one list, in two parts.
        assert_eq!(of("tags", &[50, 2, 1, 2, 48, 3]).as_deref(), Some("1|2|3"));
    }

    #[test]
    fn the_place_of_a_message_selects_it() {
        let schema = ProtobufSchema::parse(CLICK).unwrap();
        // The first one; the first one by its place; the ones within the first and the second.
        assert_eq!(cells(&schema, &[0]), Ok(vec![]));
        assert_eq!(cells(&schema, &[2, 0]), Ok(vec![]));
        assert_eq!(cells(&schema, &[4, 0, 0, 8, 5]), Ok(owned(&[("depth", b"-3")])));
        assert_eq!(cells(&schema, &[4, 2, 0, 8, 5]), Ok(owned(&[("level", b"5")])));
        for wrong in [&[2, 4][..], &[4, 2, 2], &[1], &[2, 1], &[6, 0, 0, 0]] {
            assert_eq!(cells(&schema, wrong), Err("the place of a message in the schema"), "{wrong:?}");
        }
    }

    #[test]
    fn fields_that_are_not_needed_are_passed_over() {
        let schema = ProtobufSchema::parse(CLICK).unwrap();
        let mut found = Cells::new();
        let separator = |name: &str| (name == "user").then_some(&b"|"[..]);
        let record = record(&click().encode_to_vec());
        read(&schema, &record, separator, |name, text| found.push((name.to_owned(), text.to_vec()))).unwrap();
        assert_eq!(found, owned(&[("user", b"u7")]));
    }

    #[test]
    fn groups_are_passed_over_to_their_end() {
        let schema = ProtobufSchema::parse("message M { optional int32 a = 1; }").unwrap();
        // Field 2 is a group with another group in it.
        assert_eq!(cells(&schema, &[0, 19, 27, 8, 9, 28, 20, 8, 7]), Ok(owned(&[("a", b"7")])));
        assert_eq!(cells(&schema, &[0, 19, 28]), Err("a wire type of Protobuf"));
        assert_eq!(cells(&schema, &[&[0][..], &[19; 100]].concat()), Err("less nesting"));
        assert_eq!(cells(&schema, &[0, 9, 0, 0, 0, 0, 0, 0, 0, 0]), Err("fields with the types of the schema"));
        assert_eq!(cells(&schema, &[0, 8]), Err("more bytes"));
    }

    #[test]
    fn fields_have_numbers_from_1_to_29_bits() {
        let schema = ProtobufSchema::parse("message M { optional int32 a = 1; }").unwrap();
        // Zeros are no message: they would be fields with the number 0.
        assert_eq!(cells(&schema, &[0, 0, 0]), Err("the number of a field"));
        // The highest number with a varint, and the one above it.
        assert_eq!(cells(&schema, &[0, 0xf8, 0xff, 0xff, 0xff, 0x0f, 7, 8, 7]), Ok(owned(&[("a", b"7")])));
        assert_eq!(cells(&schema, &[0, 0x80, 0x80, 0x80, 0x80, 0x10, 7]), Err("the number of a field"));
        // The end of a group has the number of its beginning.
        assert_eq!(cells(&schema, &[0, 19, 4]), Err("the number of a field"));
    }

    #[test]
    fn schemas_that_are_none_are_refused() {
        for (text, expected) in [
            ("{\"type\": \"record\"}", "it is no Protobuf"),
            ("syntax = \"proto3\";", "it has no message"),
            ("syntax = \"proto4\"; message M {}", "unknown syntax"),
        ] {
            let error = ProtobufSchema::parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _read = cells(&ProtobufSchema::parse(CLICK).unwrap(), &bytes);
        }
    }
}
