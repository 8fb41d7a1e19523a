//! Builds ONNX graphs. A model and its layers describe their formulas with a [`Graph`] in the same
//! terms as their forward passes: [`Value`]s take the place of tensors. [`crate::export_onnx`]
//! writes the file.
//!
//! It uses operators of opset 17.

#[cfg(test)]
mod evaluate;
pub mod proto;

use std::ops::Range;

#[cfg(test)]
pub(crate) use self::evaluate::evaluate;
use self::proto::{ATTRIBUTE_INT, ATTRIBUTE_INTS, FLOAT, INT64};
use crate::inputs::{InputWidths, Inputs};
use crate::layout::{ParameterId, ParameterLayout};

/// The input for dense features, `[N, dense]`.
pub const DENSE: &str = "dense";
/// The input for pooled embeddings, `[N, Σ dims]`.
pub const EMBEDDINGS: &str = "embeddings";
/// The input for pooled first-order weights, `[N, F]`.
pub const LINEAR: &str = "linear";
/// The output of a model with one task, `[N, 1]`: the predicted probability.
pub const PROBABILITY: &str = "probability";

/// A tensor in the graph: an input, a parameter, a constant or the output of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value(String);

/// An attribute of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attribute {
    /// One integer.
    Int(i64),
    /// A list of integers.
    Ints(Vec<i64>),
}

/// A graph under construction, with the values of the parameters.
#[derive(Debug)]
pub struct Graph<'a> {
    layout: &'a ParameterLayout,
    parameters: &'a [f32],
    widths: InputWidths,
    graph: proto::Graph,
    /// Values named so far.
    named: usize,
}

impl<'a> Graph<'a> {
    /// An empty graph. `parameters` is the flat buffer of `layout`.
    pub(crate) fn new(layout: &'a ParameterLayout, parameters: &'a [f32], widths: InputWidths) -> Self {
        Self { layout, parameters, widths, graph: proto::Graph::default(), named: 0 }
    }

    /// The graph with its inputs and these outputs of `[N, 1]` declared.
    pub(crate) fn finish(mut self, name: &str, outputs: &[String]) -> proto::Graph {
        self.graph.name = name.to_owned();
        self.graph.input =
            self.declared().into_iter().map(|(name, width)| proto::ValueInfo::matrix(name, width)).collect();
        self.graph.output = outputs.iter().map(|name| proto::ValueInfo::matrix(name, 1)).collect();
        self.graph
    }

    fn declared(&self) -> Vec<(&'static str, usize)> {
        let InputWidths { dense, embeddings, linear } = self.widths;
        let all = [(DENSE, dense), (EMBEDDINGS, embeddings), (LINEAR, linear)];
        all.into_iter().filter(|(_, width)| *width > 0).collect()
    }

    /// The inputs of the graph.
    pub(crate) fn inputs(&self) -> Inputs<Value> {
        let input = |name: &str, width| (width > 0).then(|| Value(name.to_owned()));
        Inputs {
            dense: input(DENSE, self.widths.dense),
            embeddings: input(EMBEDDINGS, self.widths.embeddings),
            linear: input(LINEAR, self.widths.linear),
        }
    }

    /// A parameter of the model, under its own name.
    pub fn parameter(&mut self, id: ParameterId) -> Value {
        let entry = self.layout.entry(id);
        if self.graph.initializer.iter().all(|tensor| tensor.name != entry.name) {
            self.graph.initializer.push(proto::Tensor {
                dims: entry.shape.iter().map(|&size| size as i64).collect(),
                data_type: FLOAT,
                name: entry.name.clone(),
                raw_data: bytes(&self.parameters[entry.range()], |value| value.to_le_bytes()),
            });
        }
        Value(entry.name.clone())
    }

    /// A constant vector of 64-bit integers: axes, shapes and indices.
    pub fn integers(&mut self, values: &[i64]) -> Value {
        let data = bytes(values, |value| value.to_le_bytes());
        self.constant("integers", vec![values.len() as i64], INT64, data)
    }

    /// A constant vector of one 32-bit float.
    pub fn float(&mut self, name: &str, value: f32) -> Value {
        self.constant(name, vec![1], FLOAT, value.to_le_bytes().to_vec())
    }

    fn constant(&mut self, what: &str, dims: Vec<i64>, data_type: i32, raw_data: Vec<u8>) -> Value {
        let name = self.unique_name(what);
        self.graph.initializer.push(proto::Tensor { dims, data_type, name: name.clone(), raw_data });
        Value(name)
    }

    /// The output of a node with operator `op`, such as `MatMul`.
    pub fn op(&mut self, op: &str, inputs: &[&Value]) -> Value {
        self.op_with(op, inputs, &[])
    }

    /// [`Graph::op`] with attributes.
    pub fn op_with(&mut self, op: &str, inputs: &[&Value], attributes: &[(&str, Attribute)]) -> Value {
        let output = self.unique_name(&op.to_lowercase());
        self.node(op, inputs, &output, attributes)
    }

    /// Gives a value the name of an output, through a node with operator `op`.
    pub(crate) fn output(&mut self, op: &str, input: &Value, name: &str) {
        self.node(op, &[input], name, &[]);
    }

    fn node(&mut self, op: &str, inputs: &[&Value], output: &str, attributes: &[(&str, Attribute)]) -> Value {
        self.graph.node.push(proto::Node {
            input: inputs.iter().map(|input| input.0.clone()).collect(),
            output: vec![output.to_owned()],
            name: output.to_owned(),
            op_type: op.to_owned(),
            attribute: attributes.iter().map(|(name, value)| attribute(name, value)).collect(),
        });
        Value(output.to_owned())
    }

    fn unique_name(&mut self, what: &str) -> String {
        self.named += 1;
        format!("{what}_{}", self.named)
    }

    /// Sums over the columns: `[N, w]` to `[N, 1]`.
    pub fn sum_columns(&mut self, input: &Value) -> Value {
        let axes = self.integers(&[1]);
        self.op_with("ReduceSum", &[input, &axes], &[("keepdims", Attribute::Int(1))])
    }

    /// The values in another shape. A 0 in `shape` keeps the input's size of that dimension.
    pub fn reshape(&mut self, input: &Value, shape: &[i64]) -> Value {
        let shape = self.integers(shape);
        self.op("Reshape", &[input, &shape])
    }

    /// Some columns of a matrix.
    pub fn columns(&mut self, input: &Value, columns: Range<usize>) -> Value {
        self.gather(input, columns, 1)
    }

    /// Some rows of a matrix.
    pub fn rows(&mut self, input: &Value, rows: Range<usize>) -> Value {
        self.gather(input, rows, 0)
    }

    fn gather(&mut self, input: &Value, range: Range<usize>, axis: i64) -> Value {
        let indices: Vec<i64> = range.map(|index| index as i64).collect();
        let indices = self.integers(&indices);
        self.op_with("Gather", &[input, &indices], &[("axis", Attribute::Int(axis))])
    }

    /// Columns side by side.
    ///
    /// # Panics
    /// If there are no parts.
    pub fn concatenate(&mut self, parts: &[&Value]) -> Value {
        match parts {
            [] => panic!("a concatenation needs at least one part"),
            [one] => (*one).clone(),
            _ => self.op_with("Concat", parts, &[("axis", Attribute::Int(1))]),
        }
    }
}

fn attribute(name: &str, value: &Attribute) -> proto::Attribute {
    let name = name.to_owned();
    match value {
        Attribute::Int(value) => proto::Attribute { name, i: Some(*value), ints: Vec::new(), r#type: ATTRIBUTE_INT },
        Attribute::Ints(values) => proto::Attribute { name, i: None, ints: values.clone(), r#type: ATTRIBUTE_INTS },
    }
}

fn bytes<T: Copy, const N: usize>(values: &[T], little_endian: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&value| little_endian(value)).collect()
}
