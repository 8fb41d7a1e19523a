//! A trained model as ONNX: the graph from dense features, pooled embeddings and pooled first-order weights to the predicted
//! probability, for whoever serves it elsewhere. Looking rows up and pooling them stays outside, as it does in training. The
//! messages are the part of `onnx.proto` that such a graph needs, declared by hand; the operators are those of opset 17.

use prost::Message;

use crate::CrossStructure;
use crate::DenseError;
use crate::layers::{Cross, FirstOrder, Linear, Mlp, lower_triangle_indices};
use crate::layout::ParameterId;
use crate::model::{Architecture, Model};

const IR_VERSION: i64 = 8;
const OPSET: i64 = 17;
const FLOAT: i32 = 1;
const INT64: i32 = 7;
const ATTRIBUTE_INT: i32 = 2;
const ATTRIBUTE_INTS: i32 = 7;

/// The graph's inputs and its output, by name.
pub const DENSE: &str = "dense";
/// Pooled embeddings, `[N, Σ dims]`.
pub const EMBEDDINGS: &str = "embeddings";
/// Pooled first-order weights, `[N, F]`.
pub const LINEAR: &str = "linear";
/// Predicted probability, `[N, 1]`.
pub const PROBABILITY: &str = "probability";

/// The model with these parameters (the flat buffer of its layout) as the bytes of an ONNX file. Inputs that it does not take are
/// not in the graph.
///
/// # Errors
/// [`DenseError::RestoreLength`] for parameters of another model.
pub fn export(model: &Model, parameters: &[f32]) -> Result<Vec<u8>, DenseError> {
    let (expected, got) = (model.layout().total(), parameters.len());
    if expected != got {
        return Err(DenseError::RestoreLength { what: "parameters", expected, got });
    }
    let mut graph = Builder { model, parameters, graph: proto::Graph::default(), values: 0 };
    let logit = graph.logit();
    graph.node("Sigmoid", &[&logit], PROBABILITY, vec![]);
    for (name, width) in graph.inputs() {
        let input = value_info(name, width);
        graph.graph.input.push(input);
    }
    graph.graph.output.push(value_info(PROBABILITY, 1));
    graph.graph.name = model.config().kind.name().to_owned();
    let model = proto::Model {
        ir_version: IR_VERSION,
        producer_name: "rectrain".to_owned(),
        producer_version: env!("CARGO_PKG_VERSION").to_owned(),
        graph: Some(graph.graph),
        opset_import: vec![proto::OperatorSet { domain: String::new(), version: OPSET }],
    };
    Ok(model.encode_to_vec())
}

fn value_info(name: &str, width: usize) -> proto::ValueInfo {
    use proto::dimension::Value;
    let dim = |value| proto::Dimension { value: Some(value) };
    let shape = proto::Shape { dim: vec![dim(Value::Name("N".to_owned())), dim(Value::Size(width as i64))] };
    let tensor = proto::TensorType { elem_type: FLOAT, shape: Some(shape) };
    proto::ValueInfo { name: name.to_owned(), r#type: Some(proto::Type { tensor_type: Some(tensor) }) }
}

struct Builder<'m> {
    model: &'m Model,
    parameters: &'m [f32],
    graph: proto::Graph,
    /// Values that were named so far.
    values: usize,
}

impl Builder<'_> {
    fn inputs(&self) -> Vec<(&'static str, usize)> {
        let model = self.model;
        let embeddings = if model.needs_embeddings() { model.embedding_width() } else { 0 };
        let all = [(DENSE, model.dense_width()), (EMBEDDINGS, embeddings), (LINEAR, model.linear_width())];
        all.into_iter().filter(|(_, width)| *width > 0).collect()
    }

    fn input(&self, name: &'static str) -> Option<String> {
        self.inputs().iter().any(|(input, _)| *input == name).then(|| name.to_owned())
    }

    /// The same as [`Model::forward`], in ONNX's operators.
    fn logit(&mut self) -> String {
        let model = self.model;
        let features = model.config().embedding_dims.len();
        let (dense, embeddings) = (self.input(DENSE), self.input(EMBEDDINGS));
        match model.architecture() {
            Architecture::Dlrm { bottom, top, logit } => {
                let bottom = bottom.as_ref().zip(dense).map(|((hidden, output), dense)| {
                    let hidden = self.mlp(hidden, dense);
                    let output = self.linear(output, &hidden);
                    self.op("Relu", &[&output])
                });
                let vectors = self.concatenate([bottom.clone(), embeddings]);
                let count = features + usize::from(bottom.is_some());
                let dots = self.pairwise_dots(&vectors, count, model.config().embedding_dims[0]);
                let input = self.concatenate([bottom, Some(dots)]);
                let hidden = self.mlp(top, input);
                self.linear(logit, &hidden)
            }
            Architecture::Sum { first_order, second_order, deep } => {
                let mut sum = self.first_order(first_order, dense.clone());
                if let Some(embeddings) = embeddings.clone().filter(|_| *second_order) {
                    let second = self.factorization_machine(&embeddings, features);
                    sum = self.op("Add", &[&second, &sum]);
                }
                if let Some((hidden, logit)) = deep {
                    let input = self.concatenate([embeddings, dense]);
                    let hidden = self.mlp(hidden, input);
                    let deep = self.linear(logit, &hidden);
                    sum = self.op("Add", &[&deep, &sum]);
                }
                sum
            }
            Architecture::Dnn { hidden, logit } => {
                let input = self.concatenate([embeddings, dense]);
                let hidden = self.mlp(hidden, input);
                self.linear(logit, &hidden)
            }
            Architecture::DcnV2 { structure, crosses, deep, logit } => {
                let x0 = self.concatenate([embeddings, dense]);
                let crossed = crosses.iter().fold(x0.clone(), |x, cross| self.cross(cross, &x0, &x));
                let last = match structure {
                    CrossStructure::Stacked => self.mlp(deep, crossed),
                    CrossStructure::Parallel if deep.is_empty() => crossed,
                    CrossStructure::Parallel => {
                        let deep = self.mlp(deep, x0);
                        self.concatenate([Some(crossed), Some(deep)])
                    }
                };
                self.linear(logit, &last)
            }
        }
    }

    fn mlp(&mut self, mlp: &Mlp, input: String) -> String {
        mlp.layers.iter().fold(input, |x, (linear, _)| {
            let x = self.linear(linear, &x);
            self.op("Relu", &[&x])
        })
    }

    fn linear(&mut self, linear: &Linear, input: &str) -> String {
        let (weight, bias) = (self.parameter(linear.weight), self.parameter(linear.bias));
        self.op("Gemm", &[input, &weight, &bias])
    }

    fn first_order(&mut self, first: &FirstOrder, dense: Option<String>) -> String {
        let mut sum = self.parameter(first.bias);
        if let Some(linear) = self.input(LINEAR) {
            let sparse = self.sum_columns(&linear);
            sum = self.op("Add", &[&sparse, &sum]);
        }
        if let Some((dense, weight)) = dense.zip(first.dense) {
            let weight = self.parameter(weight);
            let product = self.op("MatMul", &[&dense, &weight]);
            sum = self.op("Add", &[&product, &sum]);
        }
        sum
    }

    fn factorization_machine(&mut self, embeddings: &str, features: usize) -> String {
        let dim = self.model.embedding_width() / features;
        let vectors = self.reshape(embeddings, &[0, features as i64, dim as i64]);
        let axes = self.integers(&[1]);
        let sum = self.op_with("ReduceSum", &[&vectors, &axes], vec![int("keepdims", 0)]);
        let square = self.op("Mul", &[&sum, &sum]);
        let square_of_sum = self.sum_columns(&square);
        let squares = self.op("Mul", &[embeddings, embeddings]);
        let sum_of_squares = self.sum_columns(&squares);
        let difference = self.op("Sub", &[&square_of_sum, &sum_of_squares]);
        let half = self.constant("half", vec![1], FLOAT, 0.5_f32.to_le_bytes().to_vec());
        self.op("Mul", &[&difference, &half])
    }

    fn pairwise_dots(&mut self, vectors: &str, count: usize, dim: usize) -> String {
        let vectors = self.reshape(vectors, &[0, count as i64, dim as i64]);
        let permutation = proto::Attribute { ints: vec![0, 2, 1], ..attribute("perm", ATTRIBUTE_INTS) };
        let transposed = self.op_with("Transpose", &[&vectors], vec![permutation]);
        let products = self.op("MatMul", &[&vectors, &transposed]);
        let flat = self.reshape(&products, &[0, (count * count) as i64]);
        let indices: Vec<i64> = lower_triangle_indices(count).map(|index| index as i64).collect();
        let indices = self.integers(&indices);
        self.op_with("Gather", &[&flat, &indices], vec![int("axis", 1)])
    }

    fn cross(&mut self, cross: &Cross, x0: &str, x: &str) -> String {
        let reduced = match cross.down {
            Some(down) => {
                let down = self.parameter(down);
                self.op("MatMul", &[x, &down])
            }
            None => x.to_owned(),
        };
        let up = self.linear(&cross.up, &reduced);
        let product = self.op("Mul", &[x0, &up]);
        self.op("Add", &[&product, x])
    }

    /// `[N, w]` to `[N, 1]`.
    fn sum_columns(&mut self, input: &str) -> String {
        let axes = self.integers(&[1]);
        self.op_with("ReduceSum", &[input, &axes], vec![int("keepdims", 1)])
    }

    /// A 0 in the shape stands for the input's size there.
    fn reshape(&mut self, input: &str, shape: &[i64]) -> String {
        let shape = self.integers(shape);
        self.op("Reshape", &[input, &shape])
    }

    /// Side by side; at least one of the parts is there.
    fn concatenate(&mut self, parts: [Option<String>; 2]) -> String {
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        let names: Vec<&str> = parts.iter().map(String::as_str).collect();
        match names[..] {
            [one] => one.to_owned(),
            _ => self.op_with("Concat", &names, vec![int("axis", 1)]),
        }
    }

    /// A parameter of the model under its own name.
    fn parameter(&mut self, id: ParameterId) -> String {
        let entry = &self.model.layout().entries()[id.0];
        let bytes = self.parameters[entry.range()].iter().flat_map(|value| value.to_le_bytes()).collect();
        let dims = entry.shape.iter().map(|&size| size as i64).collect();
        self.graph.initializer.push(proto::Tensor {
            dims,
            data_type: FLOAT,
            name: entry.name.clone(),
            raw_data: bytes,
        });
        entry.name.clone()
    }

    fn integers(&mut self, values: &[i64]) -> String {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.constant("integers", vec![values.len() as i64], INT64, bytes)
    }

    fn constant(&mut self, what: &str, dims: Vec<i64>, data_type: i32, raw_data: Vec<u8>) -> String {
        let name = self.name(what);
        self.graph.initializer.push(proto::Tensor { dims, data_type, name: name.clone(), raw_data });
        name
    }

    fn name(&mut self, what: &str) -> String {
        self.values += 1;
        format!("{what}_{}", self.values)
    }

    fn op(&mut self, op: &str, inputs: &[&str]) -> String {
        self.op_with(op, inputs, vec![])
    }

    fn op_with(&mut self, op: &str, inputs: &[&str], attributes: Vec<proto::Attribute>) -> String {
        let output = self.name(&op.to_lowercase());
        self.node(op, inputs, &output, attributes);
        output
    }

    fn node(&mut self, op: &str, inputs: &[&str], output: &str, attribute: Vec<proto::Attribute>) {
        self.graph.node.push(proto::Node {
            input: inputs.iter().map(|&input| input.to_owned()).collect(),
            output: vec![output.to_owned()],
            name: output.to_owned(),
            op_type: op.to_owned(),
            attribute,
        });
    }
}

fn attribute(name: &str, r#type: i32) -> proto::Attribute {
    proto::Attribute { name: name.to_owned(), i: None, ints: Vec::new(), r#type }
}

fn int(name: &str, value: i64) -> proto::Attribute {
    proto::Attribute { i: Some(value), ..attribute(name, ATTRIBUTE_INT) }
}

/// The messages of `onnx.proto`, as far as they are used here, with its field numbers.
mod proto {
    use prost::{Message, Oneof};

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Model {
        #[prost(int64, tag = "1")]
        pub ir_version: i64,
        #[prost(string, tag = "2")]
        pub producer_name: String,
        #[prost(string, tag = "3")]
        pub producer_version: String,
        #[prost(message, optional, tag = "7")]
        pub graph: Option<Graph>,
        #[prost(message, repeated, tag = "8")]
        pub opset_import: Vec<OperatorSet>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct OperatorSet {
        #[prost(string, tag = "1")]
        pub domain: String,
        #[prost(int64, tag = "2")]
        pub version: i64,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Graph {
        #[prost(message, repeated, tag = "1")]
        pub node: Vec<Node>,
        #[prost(string, tag = "2")]
        pub name: String,
        #[prost(message, repeated, tag = "5")]
        pub initializer: Vec<Tensor>,
        #[prost(message, repeated, tag = "11")]
        pub input: Vec<ValueInfo>,
        #[prost(message, repeated, tag = "12")]
        pub output: Vec<ValueInfo>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Node {
        #[prost(string, repeated, tag = "1")]
        pub input: Vec<String>,
        #[prost(string, repeated, tag = "2")]
        pub output: Vec<String>,
        #[prost(string, tag = "3")]
        pub name: String,
        #[prost(string, tag = "4")]
        pub op_type: String,
        #[prost(message, repeated, tag = "5")]
        pub attribute: Vec<Attribute>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Attribute {
        #[prost(string, tag = "1")]
        pub name: String,
        #[prost(int64, optional, tag = "3")]
        pub i: Option<i64>,
        #[prost(int64, repeated, tag = "8")]
        pub ints: Vec<i64>,
        #[prost(int32, tag = "20")]
        pub r#type: i32,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Tensor {
        #[prost(int64, repeated, tag = "1")]
        pub dims: Vec<i64>,
        #[prost(int32, tag = "2")]
        pub data_type: i32,
        #[prost(string, tag = "8")]
        pub name: String,
        #[prost(bytes = "vec", tag = "9")]
        pub raw_data: Vec<u8>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct ValueInfo {
        #[prost(string, tag = "1")]
        pub name: String,
        #[prost(message, optional, tag = "2")]
        pub r#type: Option<Type>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Type {
        #[prost(message, optional, tag = "1")]
        pub tensor_type: Option<TensorType>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct TensorType {
        #[prost(int32, tag = "1")]
        pub elem_type: i32,
        #[prost(message, optional, tag = "2")]
        pub shape: Option<Shape>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Shape {
        #[prost(message, repeated, tag = "1")]
        pub dim: Vec<Dimension>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Dimension {
        #[prost(oneof = "dimension::Value", tags = "1, 2")]
        pub value: Option<dimension::Value>,
    }

    pub(super) mod dimension {
        #[derive(Clone, PartialEq, super::Oneof)]
        pub(in super::super) enum Value {
            #[prost(int64, tag = "1")]
            Size(i64),
            #[prost(string, tag = "2")]
            Name(String),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelConfig, ModelKind};

    fn graph(kind: ModelKind, dense_features: usize, dims: &[usize]) -> proto::Graph {
        let config = ModelConfig { kind, dense_features, embedding_dims: dims.to_vec(), dropout: 0.0 };
        let model = Model::new(config).unwrap();
        let bytes = export(&model, &model.layout().initialize(1)).unwrap();
        let decoded = proto::Model::decode(&bytes[..]).unwrap();
        assert_eq!(decoded.opset_import[0].version, OPSET);
        decoded.graph.unwrap()
    }

    /// Each value is made once and before it is used, and every parameter is there once.
    fn check(graph: &proto::Graph) {
        let mut known: Vec<&str> = graph.input.iter().map(|input| input.name.as_str()).collect();
        known.extend(graph.initializer.iter().map(|tensor| tensor.name.as_str()));
        for node in &graph.node {
            assert!(node.input.iter().all(|input| known.contains(&input.as_str())), "{node:?}");
            known.push(&node.output[0]);
        }
        let mut unique = known.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), known.len());
        assert_eq!(known.last(), Some(&PROBABILITY));
    }

    #[test]
    fn graphs_are_well_formed_and_take_just_the_models_inputs() {
        let names = |graph: &proto::Graph| graph.input.iter().map(|input| input.name.clone()).collect::<Vec<_>>();
        let dlrm = || ModelKind::Dlrm { bottom: vec![8], top: vec![8] };
        for (kind, dense, dims, inputs) in [
            (dlrm(), 3, vec![4, 4], vec![DENSE, EMBEDDINGS]),
            (dlrm(), 0, vec![4, 4], vec![EMBEDDINGS]),
            (ModelKind::DeepFm { hidden: vec![4] }, 2, vec![4, 4], vec![DENSE, EMBEDDINGS, LINEAR]),
            (ModelKind::Fm, 0, vec![4, 4], vec![EMBEDDINGS, LINEAR]),
            (ModelKind::Lr, 2, vec![0, 0], vec![DENSE, LINEAR]),
            (ModelKind::Dnn { hidden: vec![4] }, 2, vec![], vec![DENSE]),
        ] {
            let graph = graph(kind, dense, &dims);
            check(&graph);
            assert_eq!(names(&graph), inputs);
        }
    }

    #[test]
    fn parameters_of_another_model_are_refused() {
        let config = ModelConfig { kind: ModelKind::Lr, dense_features: 2, embedding_dims: vec![0], dropout: 0.0 };
        let model = Model::new(config).unwrap();
        assert!(matches!(export(&model, &[0.0]), Err(DenseError::RestoreLength { .. })));
    }
}
