//! Sets aside the settings of other kinds when an override chooses a kind. So `--set
//! spec.model.kind=lr` alone compares a model with the one in the file, whose `embeddingDim` is no
//! setting of `lr`.

use serde_json::Value;

use crate::FieldPath;

/// An object with a `kind`, and its settings that some kinds refuse.
struct Kinds {
    object: &'static str,
    /// The kind without a `kind`. `None` if one is required.
    default: Option<&'static str>,
    settings: &'static [(&'static str, For)],
}

/// The kinds that take a setting.
enum For {
    Only(&'static [&'static str]),
    AllBut(&'static [&'static str]),
}

impl For {
    fn takes(&self, kind: &str) -> bool {
        match self {
            Self::Only(kinds) => kinds.contains(&kind),
            Self::AllBut(kinds) => !kinds.contains(&kind),
        }
    }
}

/// A test compares this table with the rules of the types.
const KINDS: [Kinds; 4] = [
    Kinds {
        object: "spec.model",
        default: None,
        settings: &[
            ("bottom", For::Only(&["dlrm"])),
            ("crossLayers", For::Only(&["dcn", "dcnV2"])),
            ("crossStructure", For::Only(&["dcnV2"])),
            ("lowRank", For::Only(&["dcnV2"])),
            ("hidden", For::AllBut(&["fm", "lr"])),
            ("dropout", For::AllBut(&["fm", "lr"])),
            ("embeddingDim", For::AllBut(&["lr"])),
        ],
    },
    Kinds {
        object: "spec.training.optimizer.dense",
        default: Some("adam"),
        settings: &[
            ("beta1", For::Only(&["adam", "adamW"])),
            ("beta2", For::Only(&["adam", "adamW"])),
            ("momentum", For::Only(&["sgd"])),
            ("weightDecay", For::Only(&["adam", "adamW"])),
            ("initialAccumulator", For::Only(&["adaGrad"])),
            ("epsilon", For::AllBut(&["sgd"])),
        ],
    },
    Kinds { object: "spec.training.optimizer.sparse", default: Some("adam"), settings: &OF_ROW_OPTIMIZERS },
    Kinds { object: "spec.training.optimizer.firstOrder", default: Some("adam"), settings: &OF_ROW_OPTIMIZERS },
];

const OF_ROW_OPTIMIZERS: [(&str, For); 7] = [
    ("beta1", For::Only(&["adam"])),
    ("beta2", For::Only(&["adam"])),
    ("epsilon", For::AllBut(&["sgd", "ftrl"])),
    ("initialAccumulator", For::Only(&["adaGrad", "rowWiseAdaGrad"])),
    ("beta", For::Only(&["ftrl"])),
    ("l1", For::Only(&["ftrl"])),
    ("l2", For::Only(&["ftrl"])),
];

/// Removes the settings of other kinds from a manifest whose `overridden` paths come from the
/// command line. Returns a sentence for each. A setting that an override gives stays, and is an
/// error.
pub(crate) fn set_aside(manifest: &mut Value, overridden: &[FieldPath]) -> Vec<String> {
    let mut notes = Vec::new();
    for Kinds { object, default, settings } in KINDS {
        let path = FieldPath::parse(object);
        let kind_path = path.key("kind");
        if !overridden.contains(&kind_path) {
            continue;
        }
        let pointer = format!("/{}", object.replace('.', "/"));
        let Some(fields) = manifest.pointer_mut(&pointer).and_then(Value::as_object_mut) else { continue };
        let Some(kind) = fields.get("kind").and_then(Value::as_str).or(default).map(str::to_string) else { continue };
        for (setting, taken) in settings {
            let setting_path = path.key(setting);
            let is_given = overridden.iter().any(|given| setting_path.contains(given));
            if taken.takes(&kind) || is_given || fields.remove(*setting).is_none() {
                continue;
            }
            notes.push(format!("{setting_path} is set aside: it is no setting of {kind_path}={kind}"));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples::KIND_FIELDS;
    use crate::{Override, SetKind, load};

    const FILE: &str = "apiVersion: rectrain.dev/v1alpha1\nkind: RecTrainingJob\nmetadata: {name: t}\nspec:\n  \
                        model: {kind: dnn, embeddingDim: 8, hidden: [8], dropout: 0.5}\n  \
                        features: {sparse: [{name: C1}], dense: [{name: I1}]}\n  data: {synthetic: {}}\n";

    fn loaded(sets: &[&str]) -> Result<Vec<String>, String> {
        loaded_from(FILE, sets)
    }

    fn loaded_from(file: &str, sets: &[&str]) -> Result<Vec<String>, String> {
        let overrides: Vec<Override> =
            sets.iter().map(|set| Override { kind: SetKind::Infer, expression: (*set).to_string() }).collect();
        load(file, "t.yaml", &overrides).map(|manifest| manifest.set_aside).map_err(|error| error.to_string())
    }

    #[test]
    fn a_model_is_compared_by_its_kind_alone() {
        assert_eq!(
            loaded(&["spec.model.kind=lr"]).unwrap(),
            ["hidden", "dropout", "embeddingDim"]
                .map(|field| format!("spec.model.{field} is set aside: it is no setting of spec.model.kind=lr"))
        );
        assert_eq!(loaded(&["spec.model.kind=dcnV2"]).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_setting_of_another_kind_on_the_command_line_is_refused() {
        let error = loaded(&["spec.model.kind=lr", "spec.model.embeddingDim=4"]).unwrap_err();
        assert!(error.contains("lr has one weight per id"), "{error}");
        assert!(loaded(&["spec.model.crossLayers=2"]).is_err());
    }

    #[test]
    fn the_optimizer_of_first_order_weights_is_compared_by_its_kind_too() {
        let file = FILE.replace("kind: dnn", "kind: deepfm")
            + "  training: {optimizer: {firstOrder: {kind: ftrl, l1: 0.001, learningRate: 0.1}}}\n";
        let field = "spec.training.optimizer.firstOrder";
        let note = format!("{field}.l1 is set aside: it is no setting of {field}.kind=sgd");
        assert_eq!(loaded_from(&file, &[&format!("{field}.kind=sgd")]).unwrap(), [note]);
    }

    /// Each kind refuses the settings that the table says it refuses, and takes all others.
    #[test]
    fn the_table_agrees_with_the_rules() {
        let value = |setting: &str| match setting {
            "bottom" | "hidden" => "{8}",
            "crossStructure" => "stacked",
            "crossLayers" | "embeddingDim" | "lowRank" => "2",
            _ => "0.5",
        };
        for Kinds { object, settings, .. } in KINDS {
            // First-order weights take the kinds of rows, in a model that has them.
            let is_first_order = object.ends_with(".firstOrder");
            let kinds = if is_first_order { "spec.training.optimizer.sparse" } else { object };
            let file = if is_first_order { FILE.replace("kind: dnn", "kind: deepfm") } else { FILE.to_owned() };
            let field = KIND_FIELDS.iter().find(|field| field.field == format!("{kinds}.kind")).unwrap();
            for kind in field.examples.iter().map(|example| example.kind) {
                for (setting, taken) in settings {
                    let sets = [format!("{object}.kind={kind}"), format!("{object}.{setting}={}", value(setting))];
                    let result = loaded_from(&file, &sets.each_ref().map(String::as_str));
                    assert_eq!(result.is_ok(), taken.takes(kind), "{sets:?}: {result:?}");
                }
            }
        }
    }
}
