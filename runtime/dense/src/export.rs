//! A trained model as an ONNX file, for programs that serve it.

use prost::Message;

use crate::DenseError;
use crate::models::Model;
use crate::onnx::{Graph, PROBABILITY, Value, proto};
use crate::tasks::Tasks;

/// Writes the model with these parameters (the flat buffer of its layout) as the bytes of an ONNX
/// file. The graph leads from [`crate::onnx`]'s inputs to the predictions. It leaves out inputs
/// that the model does not take. Row look-up and pooling stay outside, as they do in training.
///
/// The prediction of a single task is the output [`PROBABILITY`]. Several tasks have an output
/// each, `prediction.{name}`.
///
/// # Errors
/// [`DenseError::RestoreLength`] if the parameters are of another model.
/// [`DenseError::InvalidTasks`] unless the model has exactly one logit for each task.
pub fn export_onnx(model: &dyn Model, tasks: &Tasks, parameters: &[f32]) -> Result<Vec<u8>, DenseError> {
    tasks.check_model(model)?;
    let (expected, got) = (model.layout().total(), parameters.len());
    if expected != got {
        return Err(DenseError::RestoreLength { what: "parameters", expected, got });
    }
    let mut graph = Graph::new(model.layout(), parameters, model.input_widths());
    let inputs = graph.inputs();
    let logits = model.onnx(&mut graph, inputs);
    let outputs = predictions(&mut graph, &logits, tasks);
    let file = proto::Model {
        ir_version: proto::IR_VERSION,
        producer_name: "rectrain".to_owned(),
        producer_version: env!("CARGO_PKG_VERSION").to_owned(),
        graph: Some(graph.finish(model.name(), &outputs)),
        opset_import: vec![proto::OperatorSet { domain: String::new(), version: proto::OPSET }],
    };
    Ok(file.encode_to_vec())
}

/// Adds the predictions to the graph and returns their names.
fn predictions(graph: &mut Graph<'_>, logits: &Value, tasks: &Tasks) -> Vec<String> {
    if let [task] = tasks.list() {
        graph.output(task.loss.onnx_operator(), logits, PROBABILITY);
        return vec![PROBABILITY.to_owned()];
    }
    let mut names = Vec::new();
    for (column, task) in tasks.list().iter().enumerate() {
        let logit = graph.columns(logits, column..column + 1);
        let name = format!("prediction.{}", task.name);
        graph.output(task.loss.onnx_operator(), &logit, &name);
        names.push(name);
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelConfig;
    use crate::tasks::BinaryCrossEntropy;

    #[test]
    fn parameters_of_another_model_are_refused() {
        let config: ModelConfig =
            serde_json::from_str(r#"{"kind":"lr","denseFeatures":2,"embeddingDims":[0]}"#).unwrap();
        let model = config.build().unwrap();
        assert!(matches!(
            export_onnx(&*model, &Tasks::single(BinaryCrossEntropy), &[0.0]),
            Err(DenseError::RestoreLength { .. })
        ));
    }
}
