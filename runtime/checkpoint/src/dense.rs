//! Dense parameters with their optimizer state, as safetensors: `parameters`, and one tensor
//! `optimizer.NAME` per state vector, all flat f32. One process may write them all, or each its
//! partition. Pure functions between values and bytes.

use std::collections::{BTreeMap, HashMap};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::name::CheckpointId;

/// A range of the dense parameters and their optimizer state, at one instant.
#[derive(Debug, Clone, PartialEq)]
pub struct DensePart {
    /// Index of the first parameter of the range.
    pub offset: u64,
    /// The parameters.
    pub parameters: Vec<f32>,
    /// The optimizer that the state belongs to, by name.
    pub optimizer: String,
    /// Its state vectors by name, each as long as the parameters, in the optimizer's order.
    pub state: Vec<(String, Vec<f32>)>,
    /// Updates applied to these parameters.
    pub update_count: u64,
}

/// All dense parameters, assembled from the parts.
#[derive(Debug, Clone, PartialEq)]
pub struct DenseState {
    /// The flat parameters.
    pub parameters: Vec<f32>,
    /// The optimizer that the state belongs to, by name.
    pub optimizer: String,
    /// Names of its state vectors.
    pub state_names: Vec<String>,
    /// The state vectors, each as long as the parameters, one after another.
    pub state: Vec<f32>,
    /// Updates applied to the parameters: the largest count of any part.
    pub update_count: u64,
    /// Updates of each part, by its offset. They differ where parts are updated independently.
    pub part_update_counts: Vec<(u64, u64)>,
}

const PARAMETERS: &str = "parameters";
const STATE: &str = "optimizer.";

impl DensePart {
    /// The bytes of a dense file of checkpoint `id`.
    ///
    /// # Errors
    /// A sentence, if a state vector and the parameters differ in length.
    pub fn encode(&self, id: CheckpointId) -> Result<Vec<u8>, String> {
        encode(self, id)
    }

    /// Decodes a dense file. Also returns the id of the checkpoint that the file names.
    ///
    /// # Errors
    /// A sentence about the first problem. Never panics, for any bytes.
    pub fn decode(bytes: &[u8]) -> Result<(Self, CheckpointId), String> {
        decode(bytes)
    }
}

fn encode(part: &DensePart, id: CheckpointId) -> Result<Vec<u8>, String> {
    if let Some((name, values)) = part.state.iter().find(|(_, values)| values.len() != part.parameters.len()) {
        return Err(format!("`{name}` has {} values for {} parameters", values.len(), part.parameters.len()));
    }
    let shape = vec![part.parameters.len()];
    let mut tensors = Vec::with_capacity(1 + part.state.len());
    let view = |values| TensorView::new(Dtype::F32, shape.clone(), bytemuck::cast_slice::<f32, u8>(values));
    tensors.push((PARAMETERS.to_owned(), view(&part.parameters)));
    for (name, values) in &part.state {
        tensors.push((format!("{STATE}{name}"), view(values)));
    }
    let tensors: Result<Vec<_>, _> = tensors.into_iter().map(|(name, view)| Ok((name, view?))).collect();
    let failed =
        |error: safetensors::SafeTensorError| format!("cannot encode the dense parameters and their state: {error}");
    let names: Vec<&str> = part.state.iter().map(|(name, _)| name.as_str()).collect();
    let metadata = HashMap::from([
        ("checkpoint".to_owned(), id.to_string()),
        ("offset".to_owned(), part.offset.to_string()),
        ("optimizer".to_owned(), part.optimizer.clone()),
        ("stateNames".to_owned(), names.join(",")),
        ("updateCount".to_owned(), part.update_count.to_string()),
    ]);
    in_order(safetensors::serialize(tensors.map_err(failed)?, Some(metadata)).map_err(failed)?)
        .ok_or_else(|| "cannot sort the header of the dense parameters".to_owned())
}

/// Sorts the entries of the file's metadata by name. They come from a hash map, so each process
/// would write other bytes for the same content. A replacement worker overwrites the file of the
/// worker before it, whose hash may already be in the coordinator's list.
fn in_order(mut file: Vec<u8>) -> Option<Vec<u8>> {
    const METADATA: &str = "__metadata__";
    let (length, rest) = file.split_first_chunk_mut::<8>()?;
    let header = rest.get_mut(..usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let mut entries: BTreeMap<String, Value> = serde_json::from_slice(header).ok()?;
    let metadata: BTreeMap<String, Value> = serde_json::from_value(entries.remove(METADATA)?).ok()?;
    entries.insert(METADATA.to_owned(), serde_json::to_value(metadata).ok()?);
    let ordered = serde_json::to_vec(&entries).ok()?;
    // A header ends with spaces, so that the tensors behind it are aligned.
    let (text, padding) = header.split_at_mut_checked(ordered.len())?;
    text.copy_from_slice(&ordered);
    padding.fill(b' ');
    Some(file)
}

fn decode(bytes: &[u8]) -> Result<(DensePart, CheckpointId), String> {
    let failed = |error: safetensors::SafeTensorError| error.to_string();
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(failed)?;
    let tensors = SafeTensors::deserialize(bytes).map_err(failed)?;
    let field = |name: &str| {
        let found = header.metadata().as_ref().and_then(|metadata| metadata.get(name));
        found.ok_or_else(|| format!("its metadata has no `{name}`"))
    };
    let number = |name: &str| field(name)?.parse::<u64>().map_err(|_| format!("its `{name}` is not a number"));
    let values = |name: &str| -> Result<Vec<f32>, String> {
        let tensor = tensors.tensor(name).map_err(failed)?;
        if tensor.dtype() != Dtype::F32 || tensor.shape().len() != 1 {
            return Err(format!("its tensor `{name}` is not a vector of f32"));
        }
        Ok(tensor.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    };
    let parameters = values(PARAMETERS)?;
    let mut state = Vec::new();
    for name in field("stateNames")?.split(',').filter(|name| !name.is_empty()) {
        let vector = values(&format!("{STATE}{name}"))?;
        if vector.len() != parameters.len() {
            return Err(format!("its `{STATE}{name}` has {} values for {} parameters", vector.len(), parameters.len()));
        }
        state.push((name.to_owned(), vector));
    }
    let part = DensePart {
        offset: number("offset")?,
        parameters,
        optimizer: field("optimizer")?.clone(),
        state,
        update_count: number("updateCount")?,
    };
    Ok((part, field("checkpoint")?.parse()?))
}

/// Assembles the parts. They must be adjacent and belong to one optimizer.
pub(crate) fn assemble(mut parts: Vec<DensePart>) -> Result<DenseState, String> {
    parts.sort_by_key(|part| part.offset);
    // A server without parameters has nothing to contribute. Some files of such servers do not name
    // the optimizer's state.
    if parts.iter().any(|part| !part.parameters.is_empty()) {
        parts.retain(|part| !part.parameters.is_empty());
    }
    let first = parts.first().ok_or("there are no parts")?;
    let optimizer = first.optimizer.clone();
    let state_names: Vec<String> = first.state.iter().map(|(name, _)| name.clone()).collect();
    let mut whole = DenseState {
        parameters: Vec::new(),
        optimizer,
        state_names,
        state: Vec::new(),
        update_count: 0,
        part_update_counts: Vec::new(),
    };
    let mut vectors = vec![Vec::new(); whole.state_names.len()];
    for part in parts {
        let same_names = part.state.iter().map(|(name, _)| name).eq(&whole.state_names);
        if part.optimizer != whole.optimizer || !same_names {
            return Err(format!(
                "parts were written by different optimizers, `{}` and `{}`",
                whole.optimizer, part.optimizer
            ));
        }
        if part.offset != whole.parameters.len() as u64 {
            return Err(format!("a part begins at {} and should begin at {}", part.offset, whole.parameters.len()));
        }
        whole.parameters.extend_from_slice(&part.parameters);
        for (vector, (_, values)) in vectors.iter_mut().zip(part.state) {
            vector.extend(values);
        }
        whole.update_count = whole.update_count.max(part.update_count);
        whole.part_update_counts.push((part.offset, part.update_count));
    }
    whole.state = vectors.concat();
    Ok(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(offset: u64, parameters: &[f32]) -> DensePart {
        DensePart {
            offset,
            parameters: parameters.to_vec(),
            optimizer: "adam".into(),
            state: vec![
                ("m".into(), parameters.iter().map(|p| p + 1.0).collect()),
                ("v".into(), parameters.iter().map(|p| p * 2.0).collect()),
            ],
            update_count: 7 + offset,
        }
    }

    #[test]
    fn a_part_is_read_as_it_was_written() {
        let id = CheckpointId(3);
        for part in
            [part(5, &[1.5, -0.0, f32::MIN_POSITIVE]), part(0, &[]), DensePart { state: vec![], ..part(1, &[2.0]) }]
        {
            assert_eq!(decode(&encode(&part, id).unwrap()), Ok((part, id)));
        }
        let mut uneven = part(0, &[1.0]);
        uneven.state[0].1.push(1.0);
        assert!(encode(&uneven, id).is_err());
    }

    #[test]
    fn a_part_is_written_as_the_same_bytes_each_time() {
        let (part, id) = (part(5, &[1.5, -0.0]), CheckpointId(3));
        let first = encode(&part, id).unwrap();
        // Each hash map has another order.
        assert!((0..50).all(|_| encode(&part, id).unwrap() == first));
    }

    #[test]
    fn any_partition_gives_the_same_whole() {
        let values: Vec<f32> = (0..7).map(|i| i as f32).collect();
        let one = assemble(vec![part(0, &values)]).unwrap();
        let three = assemble(vec![part(5, &values[5..]), part(0, &values[..2]), part(2, &values[2..5])]).unwrap();
        assert_eq!((&one.parameters, &one.state), (&three.parameters, &three.state));
        assert_eq!(three.part_update_counts, [(0, 7), (2, 9), (5, 12)]);
        assert_eq!((one.update_count, three.update_count), (7, 12));
        assert_eq!(one.state[..7], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        assert!(assemble(vec![part(0, &[1.0]), part(2, &[1.0])]).unwrap_err().contains("should begin at 1"));
        let mut other = part(1, &[1.0]);
        other.optimizer = "sgd".into();
        assert!(assemble(vec![part(0, &[1.0]), other]).unwrap_err().contains("`sgd`"));
    }

    #[test]
    fn parts_without_parameters_change_nothing() {
        let whole = assemble(vec![part(0, &[1.0]), part(1, &[2.0])]).unwrap();
        let unnamed = |offset| DensePart { state: vec![], ..part(offset, &[]) };
        for empty in [part(0, &[]), unnamed(0), unnamed(1), unnamed(2)] {
            assert_eq!(assemble(vec![empty.clone(), part(1, &[2.0]), part(0, &[1.0])]).unwrap(), whole);
            assert_eq!(assemble(vec![part(1, &[2.0]), part(0, &[1.0]), empty]).unwrap(), whole);
        }
        let nothing = assemble(vec![part(0, &[]), part(0, &[])]).unwrap();
        assert_eq!((nothing.parameters.len(), nothing.state_names.len()), (0, 2));
    }
}
