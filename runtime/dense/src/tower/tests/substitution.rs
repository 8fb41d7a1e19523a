//! The substitutes of models in the mode `des`: over the sums that parameter servers compute, they
//! train what the models train over pooled rows.

use rectrain_gemm::{Finish, Kernel, Left, Matrix, Right, Start, product};

use super::*;
use crate::FirstLayer;

/// Sums over the features of a sample, one after the other: Σ w, and Σ v and Σ⟨v, v⟩ of vectors of
/// `dim` columns.
fn sums(sampled: &Sampled, features: usize, dim: usize) -> Sampled {
    let linear = sampled.linear.chunks_exact(features).map(|weights| weights.iter().sum()).collect();
    let mut embeddings = Vec::new();
    for vectors in sampled.embeddings.chunks_exact((features * dim).max(1)) {
        let column = |column: usize| vectors.iter().skip(column).step_by(dim).sum::<f32>();
        embeddings.extend((0..dim).map(column));
        embeddings.push(vectors.iter().map(|value| value * value).sum());
    }
    Sampled { linear, embeddings, ..sampled.clone() }
}

#[test]
fn a_substitute_trains_its_model_to_the_bit() {
    for (settings, dim) in [(ModelSettings::Lr, 0), (ModelSettings::Fm, 4)] {
        let config = config(settings);
        let (mut plain, mut substituted) = (moved(tower(config.clone())), moved(tower(config.clone())));
        substituted.train_substitute(config.build_substitute().unwrap()).unwrap();
        let sampled = Sampled::new(plain.model(), 1500);
        let summed = sums(&sampled, 3, dim);
        for step in 1..=3 {
            let scale = 1.0 / 1500.0;
            let expected = plain.forward_backward(sampled.features(), &sampled.labels, scale, step).unwrap();
            let found = substituted.forward_backward(summed.features(), &summed.labels, scale, step).unwrap();
            assert_eq!(found.loss_sums, expected.loss_sums);
            assert_eq!(found.predictions, expected.predictions);
            assert_eq!(substituted.gradients().unwrap(), plain.gradients().unwrap());
            let of_weights = found.linear_gradients.iter().flat_map(|gradient| [*gradient; 3]);
            assert_eq!(of_weights.collect::<Vec<_>>(), expected.linear_gradients);
            assert_eq!(spread(&found.embedding_gradients, &sampled.embeddings, dim), expected.embedding_gradients);
            plain.apply(step).unwrap();
            substituted.apply(step).unwrap();
        }
        let predictions = substituted.predict(sampled.features()).unwrap();
        assert_eq!(predictions, plain.predict(sampled.features()).unwrap(), "predictions use the model");
    }
}

/// The gradients of the vectors of three features, from the gradients of their sums: g + 2·q·v.
fn spread(of_sums: &[f32], vectors: &[f32], dim: usize) -> Vec<f32> {
    let mut gradients = Vec::new();
    for (of_sums, vectors) in of_sums.chunks_exact(dim + 1).zip(vectors.chunks_exact((3 * dim).max(1))) {
        let of_value = |(index, value): (usize, &f32)| of_sums[index % dim] + 2.0 * (of_sums[dim] * value);
        gradients.extend(vectors.iter().enumerate().map(of_value));
    }
    gradients
}

/// Parameter servers compute `VW + b` of the first layer, and from the gradient dY of the output
/// `dY·Wᵀ` and `Vᵀ·dY`.
struct Server {
    layer: FirstLayer,
    width: usize,
    units: usize,
}

impl Server {
    fn new(tower: &Tower, config: &ModelConfig) -> Self {
        let (width, units) = (config.embedding_dims.iter().sum(), config.first_units());
        Self { layer: config.first_layer(tower.layout()).unwrap(), width, units }
    }

    /// The inputs of the substitute. `dim` is the width of an embedding in `deepfm`, otherwise 0.
    fn sums(&self, parameters: &[f32], sampled: &Sampled, dim: usize) -> Sampled {
        let (weights, biases) = (self.layer.weights(parameters), self.layer.biases(parameters));
        let embeddings = Matrix::new(&sampled.embeddings, sampled.samples, self.width);
        let right = right(Matrix::new(&weights, self.width, self.units));
        let outputs = product(&left(embeddings), &right, Start::Row(&biases), Finish::Plain);
        let beside = sums(sampled, 3, dim);
        let columns = if dim == 0 { 0 } else { dim + 1 };
        let side_by_side = outputs.chunks_exact(self.units).enumerate();
        let second = |sample: usize| &beside.embeddings[sample * columns..(sample + 1) * columns];
        let embeddings = match columns {
            0 => outputs,
            _ => side_by_side.flat_map(|(sample, outputs)| [outputs, second(sample)].concat()).collect(),
        };
        Sampled { embeddings, ..beside }
    }

    /// The gradients of the embeddings and of W. `gradients` has `columns` columns, and the outputs
    /// come first.
    fn back(&self, parameters: &[f32], sampled: &Sampled, gradients: &[f32], columns: usize) -> [Vec<f32>; 2] {
        let weights = self.layer.weights(parameters);
        let weights = Matrix::new(&weights, self.width, self.units);
        let outputs: Vec<f32> =
            gradients.chunks_exact(columns).flat_map(|row| row[..self.units].iter().copied()).collect();
        let outputs = Matrix::new(&outputs, sampled.samples, self.units);
        let embeddings = Matrix::new(&sampled.embeddings, sampled.samples, self.width);
        let of_embeddings = product(&left(outputs), &right(weights.transpose()), Start::Zero, Finish::Plain);
        let of_weights = product(&left(embeddings.transpose()), &right(outputs), Start::Zero, Finish::Plain);
        [of_embeddings, of_weights]
    }
}

fn left(matrix: Matrix<'_>) -> Left {
    let mut left = Left::new();
    left.pack(Kernel::fp32(), matrix);
    left
}

fn right(matrix: Matrix<'_>) -> Right {
    let mut right = Right::new();
    right.pack(Kernel::fp32(), matrix);
    right
}

/// Models with a tower: with and without hidden layers, dense features and dropout.
fn towers() -> Vec<ModelConfig> {
    let hidden = || vec![6, 5];
    let dnn = |hidden: &[usize]| config(ModelSettings::Dnn { hidden: hidden.to_vec() });
    vec![
        dnn(&[6, 5]),
        ModelConfig { dense_features: 0, ..dnn(&[6, 5]) },
        ModelConfig { dropout: 0.3, ..dnn(&[6, 5]) },
        dnn(&[]),
        ModelConfig { dense_features: 0, ..dnn(&[1]) },
        config(ModelSettings::WideDeep { hidden: hidden() }),
        config(ModelSettings::DeepFm { hidden: hidden() }),
    ]
}

/// The gradients of the embeddings of `deepfm` are sums of two, so they are equal within rounding.
#[test]
fn a_substitute_with_a_tower_trains_its_model_to_the_bit() {
    const SAMPLES: usize = 1500;
    for config in towers() {
        let dim = if matches!(config.settings, ModelSettings::DeepFm { .. }) { 4 } else { 0 };
        let (mut plain, mut substituted) = (moved(tower(config.clone())), moved(tower(config.clone())));
        substituted.train_substitute(config.build_substitute().unwrap()).unwrap();
        let server = Server::new(&plain, &config);
        let sampled = Sampled::new(plain.model(), SAMPLES);
        for step in 1..=3 {
            let scale = 1.0 / SAMPLES as f32;
            let parameters = substituted.parameters().unwrap().to_vec();
            assert_eq!(parameters, plain.parameters().unwrap(), "{config:?}");
            // The weights are packed for all rows here, and for the rows of dense features below.
            let predictions = substituted.predict(sampled.features()).unwrap();
            assert_eq!(predictions, plain.predict(sampled.features()).unwrap(), "{config:?}");
            let summed = server.sums(&parameters, &sampled, dim);
            let expected = plain.forward_backward(sampled.features(), &sampled.labels, scale, step).unwrap();
            let found = substituted.forward_backward(summed.features(), &summed.labels, scale, step).unwrap();
            assert_eq!(found.loss_sums, expected.loss_sums, "{config:?}");
            assert_eq!(found.predictions, expected.predictions, "{config:?}");
            let columns = summed.embeddings.len() / SAMPLES;
            let [mut of_embeddings, of_weights] =
                server.back(&parameters, &sampled, &found.embedding_gradients, columns);
            if dim > 0 {
                let of_sums = found.embedding_gradients.chunks_exact(columns).flat_map(|row| &row[server.units..]);
                let of_sums: Vec<f32> = of_sums.copied().collect();
                let beside = spread(&of_sums, &sampled.embeddings, dim);
                of_embeddings.iter_mut().zip(beside).for_each(|(sum, value)| *sum += value);
            }
            for (found, expected) in of_embeddings.iter().zip(&expected.embedding_gradients) {
                let is_equal = if dim == 0 { found == expected } else { (found - expected).abs() < 1e-8 };
                assert!(is_equal, "{config:?}: {found}, not {expected}");
            }
            let own = substituted.gradients_mut().unwrap();
            let of_layer = server.layer.weights(own);
            assert!(of_layer.iter().all(|gradient| *gradient == 0.0), "{config:?}: the servers compute them");
            server.layer.add_gradient(&of_weights, own);
            assert_eq!(substituted.gradients().unwrap(), plain.gradients().unwrap(), "{config:?}");
            plain.apply(step).unwrap();
            substituted.apply(step).unwrap();
        }
    }
}

/// The crosses multiply by another kernel on servers than in the model.
#[test]
fn the_substitute_of_dcn_trains_its_model_within_rounding() {
    const SAMPLES: usize = 300;
    for config in dcns() {
        let (mut plain, mut substituted) = (moved(tower(config.clone())), moved(tower(config.clone())));
        substituted.train_substitute(config.build_substitute().unwrap()).unwrap();
        let server = Server::new(&plain, &config);
        let sampled = Sampled::new(plain.model(), SAMPLES);
        for step in 1..=3 {
            let scale = 1.0 / SAMPLES as f32;
            let parameters = substituted.parameters().unwrap().to_vec();
            let summed = server.sums(&parameters, &sampled, 0);
            let expected = plain.forward_backward(sampled.features(), &sampled.labels, scale, step).unwrap();
            let found = substituted.forward_backward(summed.features(), &summed.labels, scale, step).unwrap();
            let [of_embeddings, of_weights] =
                server.back(&parameters, &sampled, &found.embedding_gradients, server.units);
            server.layer.add_gradient(&of_weights, substituted.gradients_mut().unwrap());
            let of_dense = [substituted.gradients().unwrap(), plain.gradients().unwrap()];
            for [found, expected] in [
                [&found.predictions[..], &expected.predictions],
                [&of_embeddings, &expected.embedding_gradients],
                of_dense,
            ] {
                let largest = expected.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                for (found, expected) in found.iter().zip(expected) {
                    assert!((found - expected).abs() <= 1e-5 * largest, "{config:?}: {found}, not {expected}");
                }
            }
            plain.apply(step).unwrap();
            substituted.apply(step).unwrap();
        }
    }
}

/// `dcn` with and without dense features and dropout.
fn dcns() -> Vec<ModelConfig> {
    let dcn = |cross_layers, hidden: &[usize]| config(ModelSettings::Dcn { cross_layers, hidden: hidden.to_vec() });
    vec![
        dcn(3, &[6, 5]),
        ModelConfig { dense_features: 0, ..dcn(1, &[6]) },
        ModelConfig { dropout: 0.3, ..dcn(2, &[6, 5]) },
    ]
}

/// A device adds in another order than the CPU.
#[test]
fn a_substitute_with_a_tower_trains_on_a_device() {
    for config in towers().into_iter().chain(dcns()).filter(|config| config.dropout == 0.0) {
        let dim = if matches!(config.settings, ModelSettings::DeepFm { .. }) { 4 } else { 0 };
        let (mut host, mut device) = (moved(tower(config.clone())), moved(on_device(config.clone())));
        for tower in [&mut host, &mut device] {
            tower.train_substitute(config.build_substitute().unwrap()).unwrap();
        }
        let sampled = Sampled::new(host.model(), 200);
        let parameters = host.parameters().unwrap().to_vec();
        let summed = Server::new(&host, &config).sums(&parameters, &sampled, dim);
        let step = |tower: &mut Tower| {
            let output = tower.forward_backward(summed.features(), &summed.labels, 1.0 / 200.0, 1).unwrap();
            (output, tower.gradients().unwrap().to_vec())
        };
        let ((expected, of_host), (found, of_device)) = (step(&mut host), step(&mut device));
        let outputs = found.embedding_gradients.iter().zip(&expected.embedding_gradients);
        for (found, expected) in outputs.chain(of_device.iter().zip(&of_host)) {
            let error = f64::from((found - expected).abs());
            assert!(error <= 1e-6 * slack(), "{config:?}: {found}, not {expected}");
        }
    }
}

#[test]
fn a_substitute_of_another_model_is_refused() {
    let other = ModelConfig::new(ModelSettings::Lr, 7, vec![0; 3]);
    let error = tower(config(ModelSettings::Lr)).train_substitute(other.build_substitute().unwrap()).unwrap_err();
    assert!(error.to_string().contains("other parameters"), "{error}");
}

#[test]
fn exactly_the_models_with_a_substitution_have_a_substitute() {
    let hidden = vec![4];
    for (settings, expected) in [
        (ModelSettings::Lr, true),
        (ModelSettings::Fm, true),
        (ModelSettings::Dnn { hidden: hidden.clone() }, true),
        (ModelSettings::DeepFm { hidden: hidden.clone() }, true),
        (ModelSettings::WideDeep { hidden: hidden.clone() }, true),
        (ModelSettings::Dcn { cross_layers: 2, hidden: hidden.clone() }, true),
        (ModelSettings::Dlrm { bottom: hidden.clone(), top: hidden }, false),
    ] {
        let config = config(settings);
        let kind = config.settings.kind();
        assert_eq!((config.build_substitute().unwrap().is_some(), kind.has_substitution()), (expected, expected));
    }
}
