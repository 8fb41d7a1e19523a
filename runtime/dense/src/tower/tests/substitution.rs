//! The substitutes of models in the mode `des`: over the sums that parameter servers compute, they
//! train what the models train over pooled rows.

use super::*;

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
        (ModelSettings::Dnn { hidden: hidden.clone() }, false),
        (ModelSettings::DeepFm { hidden: hidden.clone() }, false),
        (ModelSettings::WideDeep { hidden }, false),
    ] {
        let config = config(settings);
        let kind = config.settings.kind();
        assert_eq!((config.build_substitute().unwrap().is_some(), kind.has_substitution()), (expected, expected));
    }
}
