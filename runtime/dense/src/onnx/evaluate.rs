//! Computes an ONNX graph in f64, for tests. It implements the operators that click models use,
//! straight from their definitions.

use std::collections::HashMap;

use super::proto;

/// A tensor of any rank.
#[derive(Debug, Clone)]
struct Array {
    shape: Vec<usize>,
    values: Vec<f64>,
}

/// The outputs of a graph by name, for inputs of `rows` rows: name and row-major values.
pub(crate) fn evaluate(graph: &proto::Graph, rows: usize, inputs: &[(&str, &[f32])]) -> HashMap<String, Vec<f64>> {
    let mut known: HashMap<String, Array> = HashMap::new();
    for (name, values) in inputs {
        let shape = vec![rows, values.len() / rows];
        known.insert((*name).to_owned(), Array { shape, values: values.iter().copied().map(f64::from).collect() });
    }
    for tensor in &graph.initializer {
        known.insert(tensor.name.clone(), constant(tensor));
    }
    for node in &graph.node {
        let inputs: Vec<&Array> = node.input.iter().map(|name| &known[name]).collect();
        let output = apply(node, &inputs);
        known.insert(node.output[0].clone(), output);
    }
    graph.output.iter().map(|output| (output.name.clone(), known[&output.name].values.clone())).collect()
}

fn constant(tensor: &proto::Tensor) -> Array {
    let shape = tensor.dims.iter().map(|&size| size as usize).collect();
    let values = match tensor.data_type {
        proto::FLOAT => tensor.raw_data.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes).into()).collect(),
        proto::INT64 => tensor.raw_data.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes) as f64).collect(),
        other => panic!("no data type {other}"),
    };
    Array { shape, values }
}

fn apply(node: &proto::Node, inputs: &[&Array]) -> Array {
    match (node.op_type.as_str(), inputs) {
        ("Identity", [x]) => (*x).clone(),
        ("Relu", [x]) => map(x, |x| x.max(0.0)),
        ("Sigmoid", [x]) => map(x, |x| 1.0 / (1.0 + (-x).exp())),
        ("Exp", [x]) => map(x, f64::exp),
        ("Add", [a, b]) => broadcast(a, b, |a, b| a + b),
        ("Sub", [a, b]) => broadcast(a, b, |a, b| a - b),
        ("Mul", [a, b]) => broadcast(a, b, |a, b| a * b),
        ("MatMul", [a, b]) => matmul(a, b),
        ("Gemm", [a, b, c]) => broadcast(&matmul(a, b), c, |a, b| a + b),
        ("Reshape", [x, shape]) => reshape(x, &shape.values),
        ("Transpose", [x]) => transpose(x, &node.attribute[0].ints),
        ("Concat", parts) => concatenate(parts),
        ("Gather", [x, indices]) => gather(x, &indices.values),
        ("ReduceSum", [x, axes]) => reduce_sum(x, axes.values[0] as usize, node.attribute[0].i == Some(1)),
        (op, inputs) => panic!("no operator {op} of {} inputs", inputs.len()),
    }
}

fn map(x: &Array, f: impl Fn(f64) -> f64) -> Array {
    Array { shape: x.shape.clone(), values: x.values.iter().copied().map(f).collect() }
}

/// The values of a tensor, stretched to `shape` from its last dimension on.
fn stretched(x: &Array, shape: &[usize]) -> Vec<f64> {
    let lead = vec![1; shape.len() - x.shape.len()];
    let own = [lead, x.shape.clone()].concat();
    (0..shape.iter().product())
        .map(|mut index: usize| {
            let (mut place, mut stride) = (0, 1);
            for (&size, &own) in shape.iter().zip(&own).rev() {
                place += if own == 1 { 0 } else { index % size * stride };
                (index, stride) = (index / size, stride * own);
            }
            x.values[place]
        })
        .collect()
}

fn broadcast(a: &Array, b: &Array, f: impl Fn(f64, f64) -> f64) -> Array {
    let rank = a.shape.len().max(b.shape.len());
    let size = |x: &Array, dim: usize| (dim + x.shape.len()).checked_sub(rank).map_or(1, |own| x.shape[own]);
    let shape: Vec<usize> = (0..rank).map(|dim| size(a, dim).max(size(b, dim))).collect();
    let pairs = stretched(a, &shape).into_iter().zip(stretched(b, &shape));
    Array { values: pairs.map(|(a, b)| f(a, b)).collect(), shape }
}

/// The product of the last two dimensions, for matrices and for batches of them.
fn matmul(a: &Array, b: &Array) -> Array {
    let (&[rows, depth], &columns) = (a.shape.last_chunk().unwrap(), b.shape.last().unwrap());
    let batches = a.values.len() / (rows * depth);
    let mut values = Vec::new();
    for batch in 0..batches {
        let a = &a.values[batch * rows * depth..][..rows * depth];
        let b =
            if b.shape.len() == 2 { &b.values[..] } else { &b.values[batch * depth * columns..][..depth * columns] };
        for index in 0..rows * columns {
            values.push((0..depth).map(|k| a[index / columns * depth + k] * b[k * columns + index % columns]).sum());
        }
    }
    let shape = [&a.shape[..a.shape.len() - 1], &[columns]].concat();
    Array { shape, values }
}

/// A 0 keeps the input's size.
fn reshape(x: &Array, shape: &[f64]) -> Array {
    let sizes = shape.iter().enumerate().map(|(dim, &size)| if size == 0.0 { x.shape[dim] } else { size as usize });
    let shape: Vec<usize> = sizes.collect();
    assert_eq!(shape.iter().product::<usize>(), x.values.len());
    Array { shape, values: x.values.clone() }
}

/// The last two of three dimensions.
fn transpose(x: &Array, permutation: &[i64]) -> Array {
    assert_eq!(permutation, [0, 2, 1]);
    let &[batches, rows, columns] = x.shape.first_chunk().unwrap();
    let at = |batch: usize, index: usize| batch * rows * columns + index % rows * columns + index / rows;
    let values = (0..batches).flat_map(|batch| (0..rows * columns).map(move |index| at(batch, index)));
    Array { shape: vec![batches, columns, rows], values: values.map(|place| x.values[place]).collect() }
}

/// Matrices side by side.
fn concatenate(parts: &[&Array]) -> Array {
    let rows = parts[0].shape[0];
    let row = |row: usize| parts.iter().flat_map(move |part| &part.values[row * part.shape[1]..][..part.shape[1]]);
    let columns = parts.iter().map(|part| part.shape[1]).sum();
    Array { shape: vec![rows, columns], values: (0..rows).flat_map(row).copied().collect() }
}

/// Columns of a matrix.
fn gather(x: &Array, indices: &[f64]) -> Array {
    let &[rows, columns] = x.shape.first_chunk().unwrap();
    let row = |row: usize| indices.iter().map(move |&index| x.values[row * columns + index as usize]);
    Array { shape: vec![rows, indices.len()], values: (0..rows).flat_map(row).collect() }
}

fn reduce_sum(x: &Array, axis: usize, keep: bool) -> Array {
    let (size, inner) = (x.shape[axis], x.shape[axis + 1..].iter().product::<usize>());
    let outer = x.values.len() / (size * inner);
    let place = |index: usize, k: usize| (index / inner * size + k) * inner + index % inner;
    let values = (0..outer * inner).map(|index| (0..size).map(|k| x.values[place(index, k)]).sum()).collect();
    let mut shape = x.shape.clone();
    if keep {
        shape[axis] = 1;
    } else {
        shape.remove(axis);
    }
    Array { shape, values }
}
