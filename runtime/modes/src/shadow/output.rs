//! The model that a pause of training leaves on the servers.

use std::collections::BTreeMap;

use rectrain_kinds::OutputModel;

use super::average;

/// Makes `copy` the output model, once all replicas of an order rest. `replicas` has the replica
/// of each dense worker by its rank, each as long as the copy. The paper takes the replica of the
/// first worker (§4, experimental setup).
///
/// Without replicas, the copy stays as it is.
pub fn output_model(rule: OutputModel, copy: &mut [f32], replicas: &BTreeMap<u32, Vec<f32>>) {
    let Some(first) = replicas.values().next() else { return };
    match rule {
        OutputModel::Copy => {}
        OutputModel::Mean => average(copy, replicas.values().map(Vec::as_slice)),
        OutputModel::First => copy.copy_from_slice(first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_takes_its_replicas() {
        let replicas = BTreeMap::from([(2, vec![9.0, 0.0]), (0, vec![1.0, -2.0]), (1, vec![2.0, 5.0])]);
        let of = |rule, replicas| {
            let mut copy = [7.0, 7.0];
            output_model(rule, &mut copy, replicas);
            copy
        };
        assert_eq!(of(OutputModel::Copy, &replicas), [7.0, 7.0]);
        assert_eq!(of(OutputModel::Mean, &replicas), [4.0, 1.0]);
        assert_eq!(of(OutputModel::First, &replicas), [1.0, -2.0]);
        assert_eq!(of(OutputModel::First, &BTreeMap::new()), [7.0, 7.0]);
    }
}
