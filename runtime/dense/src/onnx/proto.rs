//! The messages of `onnx.proto` that the graph of a click model needs, with their field numbers
//! there.

use prost::{Message, Oneof};

/// Version of the file format.
pub const IR_VERSION: i64 = 8;
/// Version of the operator set.
pub const OPSET: i64 = 17;
/// `TensorProto.DataType.FLOAT`.
pub const FLOAT: i32 = 1;
/// `TensorProto.DataType.INT64`.
pub const INT64: i32 = 7;
/// `AttributeProto.AttributeType.INT`.
pub const ATTRIBUTE_INT: i32 = 2;
/// `AttributeProto.AttributeType.INTS`.
pub const ATTRIBUTE_INTS: i32 = 7;

/// `ModelProto`: the file.
#[derive(Clone, PartialEq, Message)]
pub struct Model {
    /// [`IR_VERSION`].
    #[prost(int64, tag = "1")]
    pub ir_version: i64,
    /// The program that wrote the file.
    #[prost(string, tag = "2")]
    pub producer_name: String,
    /// The version of that program.
    #[prost(string, tag = "3")]
    pub producer_version: String,
    /// The computation.
    #[prost(message, optional, tag = "7")]
    pub graph: Option<Graph>,
    /// The operator sets in use.
    #[prost(message, repeated, tag = "8")]
    pub opset_import: Vec<OperatorSet>,
}

/// `OperatorSetIdProto`.
#[derive(Clone, PartialEq, Message)]
pub struct OperatorSet {
    /// Empty for ONNX's own operators.
    #[prost(string, tag = "1")]
    pub domain: String,
    /// [`OPSET`].
    #[prost(int64, tag = "2")]
    pub version: i64,
}

/// `GraphProto`.
#[derive(Clone, PartialEq, Message)]
pub struct Graph {
    /// In an order in which each node follows its inputs.
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<Node>,
    /// The model's name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Parameters and constants.
    #[prost(message, repeated, tag = "5")]
    pub initializer: Vec<Tensor>,
    /// Inputs of the graph.
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfo>,
    /// Outputs of the graph.
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfo>,
}

/// `NodeProto`.
#[derive(Clone, PartialEq, Message)]
pub struct Node {
    /// Names of the values that it reads.
    #[prost(string, repeated, tag = "1")]
    pub input: Vec<String>,
    /// Names of the values that it makes.
    #[prost(string, repeated, tag = "2")]
    pub output: Vec<String>,
    /// Its own name.
    #[prost(string, tag = "3")]
    pub name: String,
    /// The operator.
    #[prost(string, tag = "4")]
    pub op_type: String,
    /// The operator's settings.
    #[prost(message, repeated, tag = "5")]
    pub attribute: Vec<Attribute>,
}

/// `AttributeProto`.
#[derive(Clone, PartialEq, Message)]
pub struct Attribute {
    /// The setting.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The value of an [`ATTRIBUTE_INT`].
    #[prost(int64, optional, tag = "3")]
    pub i: Option<i64>,
    /// The values of [`ATTRIBUTE_INTS`].
    #[prost(int64, repeated, tag = "8")]
    pub ints: Vec<i64>,
    /// The type of the value.
    #[prost(int32, tag = "20")]
    pub r#type: i32,
}

/// `TensorProto`.
#[derive(Clone, PartialEq, Message)]
pub struct Tensor {
    /// The shape.
    #[prost(int64, repeated, tag = "1")]
    pub dims: Vec<i64>,
    /// [`FLOAT`] or [`INT64`].
    #[prost(int32, tag = "2")]
    pub data_type: i32,
    /// The name by which nodes read it.
    #[prost(string, tag = "8")]
    pub name: String,
    /// The values, row-major, little-endian.
    #[prost(bytes = "vec", tag = "9")]
    pub raw_data: Vec<u8>,
}

/// `ValueInfoProto`: an input or output.
#[derive(Clone, PartialEq, Message)]
pub struct ValueInfo {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its type and shape.
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<Type>,
}

impl ValueInfo {
    /// A matrix of 32-bit floats, `[N, columns]`.
    pub(super) fn matrix(name: &str, columns: usize) -> Self {
        let dim = |value| Dimension { value: Some(value) };
        let rows = dim(dimension::Value::Name("N".to_owned()));
        let shape = Shape { dim: vec![rows, dim(dimension::Value::Size(columns as i64))] };
        let tensor = TensorType { elem_type: FLOAT, shape: Some(shape) };
        Self { name: name.to_owned(), r#type: Some(Type { tensor_type: Some(tensor) }) }
    }
}

/// `TypeProto`.
#[derive(Clone, PartialEq, Message)]
pub struct Type {
    /// All values are tensors.
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorType>,
}

/// `TypeProto.Tensor`.
#[derive(Clone, PartialEq, Message)]
pub struct TensorType {
    /// [`FLOAT`].
    #[prost(int32, tag = "1")]
    pub elem_type: i32,
    /// The shape.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<Shape>,
}

/// `TensorShapeProto`.
#[derive(Clone, PartialEq, Message)]
pub struct Shape {
    /// The dimensions.
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<Dimension>,
}

/// `TensorShapeProto.Dimension`.
#[derive(Clone, PartialEq, Message)]
pub struct Dimension {
    /// A size, or a name for a size that the batch decides.
    #[prost(oneof = "dimension::Value", tags = "1, 2")]
    pub value: Option<dimension::Value>,
}

/// The types inside [`Dimension`].
pub mod dimension {
    /// The value of a dimension.
    #[derive(Clone, PartialEq, super::Oneof)]
    pub enum Value {
        /// A fixed size.
        #[prost(int64, tag = "1")]
        Size(i64),
        /// A name.
        #[prost(string, tag = "2")]
        Name(String),
    }
}
