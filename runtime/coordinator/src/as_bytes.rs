//! Encodes messages and long vectors as bytes in the coordinator's journal, for `#[serde(with)]`.

/// A message.
pub(super) mod message {
    use prost::Message;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(in super::super) fn serialize<M: Message, S: Serializer>(message: &M, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&message.encode_to_vec())
    }

    pub(in super::super) fn deserialize<'de, M: Message + Default, D: Deserializer<'de>>(
        from: D,
    ) -> Result<M, D::Error> {
        let bytes = super::Bytes::deserialize(from)?;
        M::decode(&*bytes.0).map_err(D::Error::custom)
    }
}

/// An optional message.
pub(super) mod optional_message {
    use prost::Message;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in super::super) fn serialize<M: Message, S: Serializer>(
        message: &Option<M>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        message.as_ref().map(|message| super::Bytes(message.encode_to_vec())).serialize(to)
    }

    pub(in super::super) fn deserialize<'de, M: Message + Default, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<M>, D::Error> {
        let bytes = Option::<super::Bytes>::deserialize(from)?;
        bytes.map(|bytes| M::decode(&*bytes.0).map_err(D::Error::custom)).transpose()
    }
}

/// Numbers, little-endian.
macro_rules! numbers {
    ($module:ident, $number:ty) => {
        pub(super) mod $module {
            use serde::{Deserialize, Deserializer, Serializer};

            pub(in super::super) fn serialize<S: Serializer>(numbers: &[$number], to: S) -> Result<S::Ok, S::Error> {
                let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
                to.serialize_bytes(&bytes)
            }

            pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<$number>, D::Error> {
                let bytes = super::Bytes::deserialize(from)?.0;
                let (numbers, _rest) = bytes.as_chunks();
                Ok(numbers.iter().copied().map(<$number>::from_le_bytes).collect())
            }
        }
    };
}

numbers!(f32s, f32);
numbers!(u8s, u8);
numbers!(u64s, u64);

/// A byte string. Serde would encode a `Vec<u8>` as a list of numbers.
struct Bytes(Vec<u8>);

impl serde::Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&self.0)
    }
}

impl<'de> serde::Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Bytes;

            fn expecting(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                to.write_str("bytes")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(Bytes(bytes.to_vec()))
            }
        }
        from.deserialize_bytes(Visitor)
    }
}
