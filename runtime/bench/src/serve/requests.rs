//! The requests of a load: one user and many candidates each. Users and candidates follow Zipf's
//! law, and a user or a candidate has the same features in each request.

use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::ServeArgs;
use crate::error::BenchError;
use crate::zipf::{Random, Zipf};

/// An input of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Input {
    name: String,
    /// A feature of ids, and not of numbers.
    is_sparse: bool,
    /// A feature of the user, which a request has once.
    is_users: bool,
}

/// The inputs in the metadata of a model. `users` names the features of the user. Without names,
/// the first half of the features of ids, and the first half of the others, are the user's.
pub(super) fn inputs(metadata: &Value, users: &[String]) -> Result<Vec<Input>, BenchError> {
    let listed = metadata["inputs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let input = |input: &Value| {
        let name = input["name"].as_str().unwrap_or_default().to_owned();
        Input { is_users: users.contains(&name), is_sparse: input["datatype"] == "BYTES", name }
    };
    let mut inputs: Vec<Input> = listed.iter().map(input).collect();
    if inputs.is_empty() {
        return Err(BenchError::Ended(format!("the server's model has no inputs: {metadata}")));
    }
    if let Some(unknown) = users.iter().find(|user| inputs.iter().all(|input| input.name != **user)) {
        let expected = "features of the model";
        return Err(BenchError::Argument { argument: "user-features", found: unknown.clone(), expected });
    }
    if users.is_empty() {
        for is_sparse in [true, false] {
            let mut of_kind: Vec<&mut Input> = inputs.iter_mut().filter(|input| input.is_sparse == is_sparse).collect();
            let half = of_kind.len() / 2;
            of_kind.iter_mut().take(half).for_each(|input| input.is_users = true);
        }
    }
    Ok(inputs)
}

/// Draws requests.
pub(super) struct Draw<'i> {
    inputs: &'i [Input],
    candidates: usize,
    users: Zipf,
    ids: Zipf,
    random: Random,
}

impl<'i> Draw<'i> {
    pub(super) fn new(args: &ServeArgs, inputs: &'i [Input]) -> Self {
        let (users, ids) = (Zipf::new(args.users, args.zipf), Zipf::new(args.ids, args.zipf));
        Self { inputs, candidates: args.candidates, users, ids, random: Random::new(1) }
    }

    /// The body of the next request.
    pub(super) fn body(&mut self) -> String {
        let user = [self.users.rank(&mut self.random)];
        let candidates: Vec<u64> = (0..self.candidates).map(|_| self.ids.rank(&mut self.random)).collect();
        let tensors = self.inputs.iter().enumerate().map(|(place, input)| {
            let entities = if input.is_users { &user[..] } else { &candidates[..] };
            self.tensor(place as u64, input, entities)
        });
        json!({ "inputs": tensors.collect::<Vec<Value>>() }).to_string()
    }

    /// The values of an input, one for each user or candidate.
    fn tensor(&self, place: u64, input: &Input, entities: &[u64]) -> Value {
        let datatype = if input.is_sparse { "INT64" } else { "FP32" };
        let data: Vec<u64> = entities.iter().map(|entity| self.value(place, input, *entity)).collect();
        json!({ "name": input.name, "shape": [entities.len()], "datatype": datatype, "data": data })
    }

    /// An id by Zipf's law, or a number from 0 to 99. It depends on the entity and the input alone.
    fn value(&self, place: u64, input: &Input, entity: u64) -> u64 {
        let mut words = [0; 16];
        words[..8].copy_from_slice(&place.to_le_bytes());
        words[8..].copy_from_slice(&entity.to_le_bytes());
        let mut random = Random::new(xxh3_64(&words) >> 32);
        if input.is_sparse { self.ids.rank(&mut random) } else { (100.0 * random.unit()) as u64 }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::serve::tests::args;

    fn metadata() -> Value {
        let input = |name: &str, datatype: &str| json!({ "name": name, "datatype": datatype, "shape": [-1] });
        json!({ "inputs": [input("user", "BYTES"), input("item", "BYTES"), input("tag", "BYTES"), input("age", "FP32"),
            input("price", "FP32")] })
    }

    fn of_users(inputs: &[Input]) -> Vec<&str> {
        inputs.iter().filter(|input| input.is_users).map(|input| input.name.as_str()).collect()
    }

    #[test]
    fn the_features_of_the_user_are_the_named_ones_or_the_first_half() {
        assert_eq!(of_users(&inputs(&metadata(), &[]).unwrap()), ["user", "age"]);
        let named = ["tag".to_owned(), "price".to_owned()];
        assert_eq!(of_users(&inputs(&metadata(), &named).unwrap()), ["tag", "price"]);
        let error = inputs(&metadata(), &["usr".to_owned()]).unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("--user-features usr"), "{error}");
        assert!(inputs(&json!({"error": "no such path"}), &[]).unwrap_err().to_string().contains("no such path"));
    }

    #[test]
    fn a_request_has_one_user_and_all_candidates() {
        let inputs = inputs(&metadata(), &[]).unwrap();
        let mut draw = Draw::new(&args("model"), &inputs);
        let mut items: HashMap<u64, u64> = HashMap::new();
        for _ in 0..20 {
            let body: Value = serde_json::from_str(&draw.body()).unwrap();
            let tensors = body["inputs"].as_array().unwrap();
            let shapes: Vec<u64> = tensors.iter().map(|tensor| tensor["shape"][0].as_u64().unwrap()).collect();
            assert_eq!(shapes, [1, 7, 7, 1, 7]);
            let data = |place: usize| {
                let data = tensors[place]["data"].as_array().unwrap();
                data.iter().map(|value| value.as_u64().unwrap()).collect::<Vec<u64>>()
            };
            assert!(data(1).iter().all(|id| *id < 10) && data(4).iter().all(|price| *price < 100));
            for (item, price) in data(1).into_iter().zip(data(4)) {
                *items.entry(item << 32 | price).or_default() += 1;
            }
        }
        // A candidate that comes again has the same features.
        assert!(items.len() <= 10, "ten candidates: {items:?}");
    }
}
