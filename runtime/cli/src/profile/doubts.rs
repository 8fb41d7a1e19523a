//! Columns that look wrong: labels, ids and features that tell the label. Pure.

use super::decimals::Decimals;
use super::figures::{Feature, Figures};
use crate::human::percent;

/// A class of fewer rows than this share is extreme.
const RARE_CLASS: f64 = 0.001;
/// A feature that reaches this AUC alone tells the label. The best single columns of public click
/// logs stay below 0.8.
pub(super) const TELLING_AUC: f64 = 0.9;
/// A column says little if this share of its cells is missing.
const MOSTLY_MISSING: f64 = 0.95;
/// A share of late rows from which the order of the rows is not the order of time.
const LATE_SHARE: f64 = 0.01;
/// A feature with so many ids and look-ups may be judged.
const LEAST_LOOK_UPS: u64 = 100;

/// A sentence for each doubt. `decimals` has the texts of the ids, by sparse feature.
pub(super) fn doubts(figures: &Figures, decimals: &[Decimals]) -> Vec<String> {
    let mut doubts: Vec<String> = label(figures).into_iter().collect();
    for (feature, texts) in figures.features.iter().zip(decimals) {
        doubts.extend(floats(feature, texts));
        doubts.extend(ids(feature));
    }
    let sparse = figures.features.iter().map(|feature| (&feature.name, feature.auc));
    let dense = figures.dense.iter().map(|feature| (&feature.name, feature.auc));
    doubts.extend(sparse.chain(dense).filter_map(|(name, auc)| telling(name, auc?)));
    doubts.extend(order(figures));
    doubts
}

fn label(figures: &Figures) -> Option<String> {
    let (label, rows) = (&figures.label, figures.read.rows);
    let name = &label.name;
    if label.zeros == rows || label.ones == rows {
        let only = if label.ones == rows { 1 } else { 0 };
        return Some(format!(
            "the label is {only} in all rows: is spec.features.label the right column, and are the rows sorted by it?"
        ));
    }
    if label.between == rows {
        return Some(format!(
            "no label is 0 or 1: if {name} is a score, set spec.features.label.positiveFrom, so that a model learns a click or none"
        ));
    }
    if label.between > 0 {
        let share = percent(label.between as f64 / rows.max(1) as f64);
        return Some(format!(
            "{share} of the labels lie between 0 and 1: they are learned as probabilities; if {name} is a score, set \
             spec.features.label.positiveFrom"
        ));
    }
    let (rare, few) = if label.ones <= label.zeros { (1, label.ones) } else { (0, label.zeros) };
    let share = few as f64 / rows.max(1) as f64;
    (share < RARE_CLASS)
        .then(|| format!("only {few} rows, {:.3} %, have the label {rare}: is {name} the right column?", 100.0 * share))
}

fn floats(feature: &Feature, texts: &Decimals) -> Option<String> {
    let (example, share) = texts.looks_like_floats()?;
    Some(format!(
        "{}: {} of the ids look like floats, such as {example}: each would get a row of its own; is it a column for \
         spec.features.dense?",
        feature.name,
        percent(share)
    ))
}

fn ids(feature: &Feature) -> Option<String> {
    let name = &feature.name;
    if feature.look_ups < LEAST_LOOK_UPS {
        return None;
    }
    if feature.missing_share >= MOSTLY_MISSING {
        return Some(format!("{name}: the cell is missing in {} of the rows", percent(feature.missing_share)));
    }
    if feature.ids == 1 {
        return Some(format!("{name}: all rows have the same id, which tells a model nothing"));
    }
    let once = feature.seen_once as f64 / feature.look_ups as f64;
    (once > 0.99).then(|| {
        format!("{name}: {} of the look-ups meet an id that occurs once: is it the number of a row?", percent(once))
    })
}

fn telling(name: &str, auc: f64) -> Option<String> {
    (auc >= TELLING_AUC).then(|| {
        format!(
            "{name} alone tells the label: AUC {auc:.3} out of sample, where {TELLING_AUC} is suspicious: is it known before \
             the event, or made from the label?"
        )
    })
}

fn order(figures: &Figures) -> Option<String> {
    let time = figures.time.as_ref().filter(|time| time.late_share > LATE_SHARE)?;
    Some(format!(
        "{} of the rows are earlier than a row before them: the gaps follow the order of the files, and not \
         of time",
        percent(time.late_share)
    ))
}

#[cfg(test)]
mod tests {
    use super::super::figures::{Dense, Label, examples};
    use super::*;

    /// The doubts about a job with one feature.
    fn doubts_about(change: impl FnOnce(&mut Figures)) -> Vec<String> {
        let mut figures = examples::figures(vec![examples::feature("user")]);
        change(&mut figures);
        doubts(&figures, &[Decimals::default()])
    }

    fn labels(zeros: u64, ones: u64, between: u64) -> Vec<String> {
        doubts_about(|figures| {
            figures.read.rows = zeros + ones + between;
            figures.label = Label { name: "y".to_owned(), rate: 0.5, zeros, ones, between };
        })
    }

    #[test]
    fn ordinary_data_has_no_doubts() {
        assert_eq!(doubts_about(|_| {}), Vec::<String>::new());
        assert_eq!(labels(999, 1, 0), Vec::<String>::new());
    }

    #[test]
    fn wrong_labels_are_told() {
        for (found, part) in [
            (labels(500, 0, 0), "the label is 0 in all rows"),
            (labels(0, 500, 0), "the label is 1 in all rows"),
            (labels(0, 0, 500), "no label is 0 or 1"),
            (labels(400, 50, 50), "10.0 % of the labels lie between 0 and 1"),
            (labels(10_000, 9, 0), "only 9 rows, 0.090 %, have the label 1"),
            (labels(9, 10_000, 0), "have the label 0"),
        ] {
            assert!(found.len() == 1 && found[0].contains(part), "{part}: {found:?}");
        }
    }

    #[test]
    fn a_feature_that_tells_the_label_is_told() {
        let sparse = doubts_about(|figures| figures.features[0].auc = Some(0.97));
        assert!(sparse.len() == 1 && sparse[0].starts_with("user alone tells the label: AUC 0.970"), "{sparse:?}");
        let price =
            Dense { name: "price".to_owned(), min: 0.0, max: 1.0, mean: 0.5, at_missing_share: 0.0, auc: Some(0.95) };
        let dense = doubts_about(|figures| figures.dense.push(price));
        assert!(dense.len() == 1 && dense[0].starts_with("price alone tells the label"), "{dense:?}");
        assert!(doubts_about(|figures| figures.features[0].auc = Some(0.89)).is_empty());
    }

    #[test]
    fn columns_that_are_no_ids_are_told() {
        let feature = |change: fn(&mut Feature)| doubts_about(|figures| change(&mut figures.features[0]));
        for (found, part) in [
            (feature(|f| f.missing_share = 0.99), "user: the cell is missing in 99.0 %"),
            (feature(|f| f.ids = 1), "the same id"),
            (feature(|f| f.seen_once = 995), "99.5 % of the look-ups"),
        ] {
            assert!(found.len() == 1 && found[0].contains(part), "{part}: {found:?}");
        }
        let figures = examples::figures(vec![examples::feature("user")]);
        let mut texts = Decimals::default();
        texts.add(b"5.37", None);
        let found = doubts(&figures, &[texts]);
        assert!(found[0].contains("look like floats, such as 5.37"), "{found:?}");
    }

    #[test]
    fn rows_in_another_order_than_time_are_told() {
        let found = doubts_about(|figures| figures.time.as_mut().unwrap().late_share = 0.4);
        assert!(found.len() == 1 && found[0].starts_with("40.0 % of the rows are earlier"), "{found:?}");
    }
}
