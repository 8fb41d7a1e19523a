//! Tensors as messages carry them: a typed vector and a shape of up to three dimensions. Burn's
//! tensors compute; these own their numbers. So a message moves them to a socket, to another task,
//! or into a model without a copy.

use std::fmt;

use half::f16;

use crate::error::WireError;

/// The most dimensions a tensor has.
pub const MAX_RANK: usize = 3;

/// Up to three dimensions, outermost first. No dimensions is a scalar: one element.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Shape {
    /// The shape with these dimensions; refused when there are more than [`MAX_RANK`].
    pub fn new(dims: &[usize]) -> Result<Self, WireError> {
        if dims.len() > MAX_RANK {
            return Err(WireError::Tensor {
                name: "shape".into(),
                expected: format!("at most {MAX_RANK} dimensions"),
                found: format!("{dims:?}"),
            });
        }
        let mut shape = Self { dims: [0; MAX_RANK], rank: dims.len() as u8 };
        shape.dims[..dims.len()].copy_from_slice(dims);
        Ok(shape)
    }

    /// A vector of `length` elements.
    pub fn vector(length: usize) -> Self {
        Self { dims: [length, 0, 0], rank: 1 }
    }

    /// `rows` × `columns`.
    pub fn matrix(rows: usize, columns: usize) -> Self {
        Self { dims: [rows, columns, 0], rank: 2 }
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    /// The number of elements; `None` if it does not fit a `usize`.
    pub fn elements(&self) -> Option<usize> {
        self.dims().iter().try_fold(1usize, |product, dim| product.checked_mul(*dim))
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

/// Element types, numbered as they travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    F32 = 1,
    F16 = 2,
    U64 = 3,
    U32 = 4,
    U16 = 5,
    U8 = 6,
}

impl DType {
    /// Every type.
    pub const ALL: [Self; 6] = [Self::F32, Self::F16, Self::U64, Self::U32, Self::U16, Self::U8];

    /// The type of a number, if there is one.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| *dtype as u8 == number)
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::U64 => 8,
            Self::F32 | Self::U32 => 4,
            Self::F16 | Self::U16 => 2,
            Self::U8 => 1,
        }
    }
}

/// The numbers of a tensor, row-major.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    F32(Vec<f32>),
    F16(Vec<f16>),
    U64(Vec<u64>),
    U32(Vec<u32>),
    U16(Vec<u16>),
    U8(Vec<u8>),
}

/// Runs the same expression on whichever vector it is.
macro_rules! each {
    ($data:expr, $vec:ident => $body:expr) => {
        match $data {
            TensorData::F32($vec) => $body,
            TensorData::F16($vec) => $body,
            TensorData::U64($vec) => $body,
            TensorData::U32($vec) => $body,
            TensorData::U16($vec) => $body,
            TensorData::U8($vec) => $body,
        }
    };
}

impl TensorData {
    /// The number of elements.
    pub fn len(&self) -> usize {
        each!(self, vec => vec.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory image, as it travels.
    pub fn as_bytes(&self) -> &[u8] {
        each!(self, vec => bytemuck::cast_slice(vec))
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::U64(_) => DType::U64,
            Self::U32(_) => DType::U32,
            Self::U16(_) => DType::U16,
            Self::U8(_) => DType::U8,
        }
    }
}

/// A shape and as many numbers as it says.
#[derive(Clone, PartialEq)]
pub struct Tensor {
    shape: Shape,
    data: TensorData,
}

impl Tensor {
    /// A tensor of this shape (`dims`, outermost first); refused when the dimensions do not
    /// multiply to the number of elements.
    pub fn new(dims: &[usize], data: impl Into<TensorData>) -> Result<Self, WireError> {
        let (shape, data) = (Shape::new(dims)?, data.into());
        if shape.elements() != Some(data.len()) {
            return Err(WireError::Tensor {
                name: "tensor".into(),
                expected: format!("as many elements as the shape {shape:?} has"),
                found: format!("{} elements", data.len()),
            });
        }
        Ok(Self { shape, data })
    }

    /// For the decoder, which has checked that both agree.
    pub(crate) fn from_checked(shape: Shape, data: TensorData) -> Self {
        debug_assert_eq!(shape.elements(), Some(data.len()));
        Self { shape, data }
    }

    /// The shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// The numbers.
    pub fn data(&self) -> &TensorData {
        &self.data
    }

    /// The numbers, owned.
    pub fn into_data(self) -> TensorData {
        self.data
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// Bytes of all elements.
    pub fn byte_len(&self) -> usize {
        self.data.len() * self.data.dtype().size()
    }

    /// The tensor itself if its dimensions are these; an error that calls it `name` otherwise.
    pub fn expect_dims(self, name: &str, dims: &[usize]) -> Result<Self, WireError> {
        if self.dims() == dims {
            return Ok(self);
        }
        Err(WireError::Tensor {
            name: name.to_owned(),
            expected: format!("a tensor of shape {dims:?}"),
            found: format!("{self:?}"),
        })
    }

    fn unexpected(&self, name: &str, dtype: DType) -> WireError {
        WireError::Tensor {
            name: name.to_owned(),
            expected: format!("a tensor of {dtype:?}"),
            found: format!("{self:?}"),
        }
    }
}

impl fmt::Debug for Tensor {
    /// Type and shape; tensors are too long to print.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}{:?}", self.dtype(), self.shape)
    }
}

macro_rules! element {
    ($type:ty, $variant:ident, $expect:ident, $borrow:ident) => {
        impl From<Vec<$type>> for TensorData {
            fn from(data: Vec<$type>) -> Self {
                Self::$variant(data)
            }
        }

        impl From<Vec<$type>> for Tensor {
            /// A tensor of one dimension.
            fn from(data: Vec<$type>) -> Self {
                Self { shape: Shape::vector(data.len()), data: TensorData::$variant(data) }
            }
        }

        impl Tensor {
            #[doc = concat!("The numbers, moved out, if they are `", stringify!($type), "`; else an error with `name`.")]
            pub fn $expect(self, name: &str) -> Result<Vec<$type>, WireError> {
                match self.data {
                    TensorData::$variant(data) => Ok(data),
                    _ => Err(self.unexpected(name, DType::$variant)),
                }
            }

            #[doc = concat!("The numbers, if they are `", stringify!($type), "`.")]
            pub fn $borrow(&self, name: &str) -> Result<&[$type], WireError> {
                match &self.data {
                    TensorData::$variant(data) => Ok(data),
                    _ => Err(self.unexpected(name, DType::$variant)),
                }
            }
        }
    };
}

element!(f32, F32, expect_f32, as_f32);
element!(f16, F16, expect_f16, as_f16);
element!(u64, U64, expect_u64, as_u64);
element!(u32, U32, expect_u32, as_u32);
element!(u16, U16, expect_u16, as_u16);
element!(u8, U8, expect_u8, as_u8);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_has_as_many_elements_as_its_shape_says() {
        assert!(Tensor::new(&[2, 3], vec![0f32; 6]).is_ok());
        assert!(Tensor::new(&[], vec![0u64; 1]).is_ok());
        assert!(Tensor::new(&[4, 0], Vec::<u8>::new()).is_ok());
        assert!(Tensor::new(&[2, 3], vec![0f32; 5]).is_err());
        assert!(Tensor::new(&[usize::MAX, 2], vec![0f32; 1]).is_err());
        assert!(Tensor::new(&[1, 1, 1, 1], vec![0f32; 1]).is_err());
    }

    #[test]
    fn the_wrong_type_is_an_error_that_names_the_tensor() {
        let tensor = Tensor::new(&[1, 2], vec![1u32, 2]).unwrap();
        let message = tensor.clone().expect_f32("pooled").unwrap_err().to_string();
        assert_eq!(message, "pooled: expected a tensor of F32, found U32[1, 2]");
        assert_eq!(tensor.expect_u32("x").unwrap(), [1, 2]);
    }

    #[test]
    fn every_type_survives_its_number() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_number(dtype as u8), Some(dtype));
        }
        assert_eq!((DType::from_number(0), DType::from_number(7)), (None, None));
    }
}
