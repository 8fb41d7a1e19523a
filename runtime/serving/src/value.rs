//! The types of exported values: how a row becomes bytes, and which values the bytes stand for.

use std::str::FromStr;

use half::{bf16, f16};

/// The type of the values of exported rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ExportType {
    /// 32-bit floats: the values of the checkpoint.
    #[default]
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Integers from -127 to 127, with a factor for each row: its largest magnitude / 127.
    Int8,
}

impl ExportType {
    /// All types.
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Int8];

    /// The name in `model.json` and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }

    /// Bytes of one value.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Int8 => 1,
        }
    }

    /// Whether each row has a factor.
    pub(crate) fn has_scales(self) -> bool {
        self == Self::Int8
    }

    /// The factor of a row: 1 unless the type has factors.
    pub(crate) fn scale(self, row: &[f32]) -> f32 {
        let largest = row.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        if self.has_scales() && largest > 0.0 { largest / 127.0 } else { 1.0 }
    }

    /// Appends the bytes of a value, little-endian.
    pub(crate) fn encode(self, value: f32, scale: f32, into: &mut Vec<u8>) {
        match self {
            Self::F32 => into.extend_from_slice(&value.to_le_bytes()),
            Self::F16 => into.extend_from_slice(&f16::from_f32(value).to_le_bytes()),
            Self::Bf16 => into.extend_from_slice(&bf16::from_f32(value).to_le_bytes()),
            Self::Int8 => into.push((value / scale).round().clamp(-127.0, 127.0) as i8 as u8),
        }
    }

    /// The value of [`Self::bytes`] bytes. Fewer bytes stand for 0.
    pub(crate) fn decode(self, bytes: &[u8], scale: f32) -> f32 {
        match (self, bytes) {
            (Self::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Self::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (Self::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            (Self::Int8, &[a]) => f32::from(a as i8) * scale,
            _ => 0.0,
        }
    }
}

impl FromStr for ExportType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|value_type| value_type.name() == text);
        found.ok_or_else(|| format!("there is no type of values `{text}`: expected one of f32, f16, bf16, int8"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decoded_value_is_within_the_bound_of_its_type() {
        let row: Vec<f32> = (0..200_i16).map(|n| (f32::from(n) - 99.5) * 0.013).collect();
        for (value_type, bound) in [
            (ExportType::F32, 0.0),
            (ExportType::F16, 1.3 / 2048.0),
            (ExportType::Bf16, 1.3 / 256.0),
            (ExportType::Int8, 1.3 / 254.0),
        ] {
            let scale = value_type.scale(&row);
            let mut bytes = Vec::new();
            row.iter().for_each(|value| value_type.encode(*value, scale, &mut bytes));
            assert_eq!(bytes.len(), row.len() * value_type.bytes());
            for (bytes, value) in bytes.chunks_exact(value_type.bytes()).zip(&row) {
                let error = (value_type.decode(bytes, scale) - value).abs();
                assert!(error <= bound, "{}: {value} is off by {error}", value_type.name());
            }
            assert_eq!(value_type.name().parse(), Ok(value_type));
        }
        assert_eq!(ExportType::Int8.scale(&[0.0, -0.0]), 1.0);
    }
}
