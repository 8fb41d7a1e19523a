//! Declares an enum whose values have names.

/// A text that names no value of a kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no {kind} `{found}`: expected one of {}", expected.join(", "))]
pub struct UnknownKind {
    /// The enum in sentences: "training mode".
    pub kind: &'static str,
    /// The unknown name.
    pub found: String,
    /// The names of all values.
    pub expected: Vec<&'static str>,
}

/// The names of all values of one enum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindSet {
    /// The enum in sentences: "training mode".
    pub title: &'static str,
    /// The names of its values, in the order of the documentation.
    pub names: &'static [&'static str],
}

/// Declares an enum with one name per value. Serde, `Display` and `FromStr` use this name, and
/// `ALL` lists the values. `as "…"` names the kind in errors.
macro_rules! named {
    (
        $(#[$meta:meta])*
        pub enum $Kind:ident as $title:literal { $($(#[$value_meta:meta])* $Value:ident = $name:literal,)+ }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub enum $Kind { $($(#[$value_meta])* #[serde(rename = $name)] $Value,)+ }

        impl $Kind {
            /// Every value, in the order in which the documentation lists them.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$Value),+];

            /// The names of all values.
            pub const SET: $crate::KindSet = $crate::KindSet { title: $title, names: &[$($name),+] };

            /// The name, everywhere.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$Value => $name,)+ }
            }
        }

        impl std::fmt::Display for $Kind {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $Kind {
            type Err = $crate::UnknownKind;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| $crate::UnknownKind {
                    kind: Self::SET.title,
                    found: text.to_owned(),
                    expected: Self::SET.names.to_vec(),
                })
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;
    use std::str::FromStr;

    use serde::Serialize;
    use serde::de::DeserializeOwned;

    use crate::*;

    fn has_one_spelling<K>(all: &[K], name: impl Fn(K) -> &'static str)
    where
        K: Copy + Debug + PartialEq + Serialize + DeserializeOwned + ToString + FromStr<Err = UnknownKind>,
    {
        for kind in all {
            assert_eq!(serde_json::to_value(kind).unwrap(), name(*kind));
            assert_eq!(serde_json::from_value::<K>(name(*kind).into()).unwrap(), *kind);
            assert_eq!((kind.to_string(), name(*kind).parse::<K>()), (name(*kind).to_owned(), Ok(*kind)));
        }
    }

    #[test]
    fn every_kind_has_one_spelling() {
        has_one_spelling(&Mode::ALL, Mode::name);
        has_one_spelling(&SyncPieces::ALL, SyncPieces::name);
        has_one_spelling(&KeyDivisor::ALL, KeyDivisor::name);
        has_one_spelling(&ShadowAlgorithm::ALL, ShadowAlgorithm::name);
        has_one_spelling(&WirePrecision::ALL, WirePrecision::name);
        has_one_spelling(&ModelKind::ALL, ModelKind::name);
        has_one_spelling(&CrossStructure::ALL, CrossStructure::name);
        has_one_spelling(&LossKind::ALL, LossKind::name);
        has_one_spelling(&DenseOptimizerKind::ALL, DenseOptimizerKind::name);
        has_one_spelling(&SparseOptimizerKind::ALL, SparseOptimizerKind::name);
        has_one_spelling(&Pooling::ALL, Pooling::name);
        has_one_spelling(&Compression::ALL, Compression::name);
        has_one_spelling(&PartialPooling::ALL, PartialPooling::name);
        has_one_spelling(&Precision::ALL, Precision::name);
        has_one_spelling(&ValueType::ALL, ValueType::name);
        has_one_spelling(&MissingValue::ALL, MissingValue::name);
        has_one_spelling(&TransformKind::ALL, TransformKind::name);
        has_one_spelling(&InitializerKind::ALL, InitializerKind::name);
        has_one_spelling(&DeviceKind::ALL, DeviceKind::name);
        has_one_spelling(&EvictionKind::ALL, EvictionKind::name);
        has_one_spelling(&RowPriority::ALL, RowPriority::name);
        has_one_spelling(&DataFormat::ALL, DataFormat::name);
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_names() {
        let error = "hop-bs".parse::<Mode>().unwrap_err().to_string();
        let modes = Mode::ALL.map(Mode::name).join(", ");
        assert_eq!(error, format!("there is no training mode `hop-bs`: expected one of {modes}"));
    }
}
