//! The manifest over which tests lay examples.

use serde_json::Value;

/// A whole manifest; the examples are laid over its `spec`.
pub const BASE: &str = "\
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: base}
spec:
  model: {kind: dnn}
  features:
    sparse: [{name: user}, {name: item}]
    dense: [{name: age}]
  data:
    train: {paths: [train.csv]}
    test: {paths: [test.csv]}
";

/// Lays `over` over `under`: objects are merged, everything else is replaced.
pub fn merge(under: &mut Value, over: &Value) {
    match (under, over) {
        (Value::Object(under), Value::Object(over)) => {
            for (name, value) in over {
                merge(under.entry(name).or_insert(Value::Null), value);
            }
        }
        (under, over) => *under = over.clone(),
    }
}
