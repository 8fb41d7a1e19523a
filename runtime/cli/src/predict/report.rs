//! The counts and metrics of a prediction, for people and for programs.

use std::collections::BTreeMap;
use std::time::Duration;

use rectrain_dense::metrics::EvaluationSummary;
use rectrain_serving::{LookUps, Model};
use serde::Serialize;

use super::Totals;
use crate::failure::Failure;
use crate::human::{number, percent, thousands};
use crate::output;

/// The counts and metrics of a prediction.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    model: String,
    step: u64,
    /// Rows that were predicted.
    rows: u64,
    /// Bad rows that were left out.
    skipped_rows: u64,
    /// Predicted rows with a label. The metrics are theirs.
    labelled_rows: u64,
    #[serde(flatten)]
    metrics: Option<Metrics>,
    /// By sparse feature: the share of its ids without a row. Features without ids are left out.
    unseen: BTreeMap<String, f64>,
    seconds: f64,
}

/// `null` where a metric is undefined.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Metrics {
    auc: Option<f64>,
    log_loss: Option<f64>,
    normalized_entropy: Option<f64>,
    calibration: Option<f64>,
}

impl From<EvaluationSummary> for Metrics {
    fn from(summary: EvaluationSummary) -> Self {
        let EvaluationSummary { auc, log_loss, normalized_entropy, calibration, .. } = summary;
        Self { auc, log_loss, normalized_entropy, calibration }
    }
}

impl Report {
    pub(super) fn new(model: &Model, totals: Totals, elapsed: Duration) -> Self {
        let names = model.description.schema.sparse.iter().map(|field| field.name.clone());
        let shares = names.zip(totals.look_ups.into_iter().map(LookUps::unseen_share));
        let labelled_rows = totals.evaluation.samples() as u64;
        Self {
            model: model.name.clone(),
            step: model.step,
            rows: totals.rows,
            skipped_rows: totals.skipped,
            labelled_rows,
            metrics: (labelled_rows > 0).then(|| totals.evaluation.finish().into()),
            unseen: shares.filter_map(|(name, share)| Some((name, share?))).collect(),
            seconds: elapsed.as_secs_f64(),
        }
    }

    pub(super) fn print_json(&self) -> Result<(), Failure> {
        let text = serde_json::to_string(self).map_err(|error| Failure::Failed(error.to_string()))?;
        Ok(output::line(text)?)
    }

    /// Prints to standard output, or to standard error if the predictions go to standard output.
    pub(super) fn print(&self, to_stderr: bool) -> Result<(), Failure> {
        let text = self.text();
        if to_stderr {
            output::say(&text);
            return Ok(());
        }
        Ok(output::line(text)?)
    }

    fn text(&self) -> String {
        let mut text = format!("{} rows predicted", thousands(self.rows));
        if self.skipped_rows > 0 {
            text += &format!(", {} bad rows left out", thousands(self.skipped_rows));
        }
        text += &format!(" in {:.1} s", self.seconds);
        if let Some(metrics) = &self.metrics {
            text += &format!(
                "\nAUC {}, log loss {}, normalized entropy {}, calibration {} on {} rows with labels",
                number(metrics.auc, 6),
                number(metrics.log_loss, 6),
                number(metrics.normalized_entropy, 6),
                number(metrics.calibration, 6),
                thousands(self.labelled_rows)
            );
        }
        for (feature, share) in self.unseen.iter().filter(|(_, share)| **share > 0.0) {
            text += &format!("\n{} of the ids of {feature} have no row; they read as initial values", percent(*share));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_feature_with_ids_without_rows_is_listed() {
        let unseen = [("item", 0.2), ("time", 0.0), ("user", 0.031)].map(|(name, share)| (name.to_owned(), share));
        let report = Report {
            model: "clicks".to_owned(),
            step: 7,
            rows: 1_000,
            skipped_rows: 0,
            labelled_rows: 0,
            metrics: None,
            unseen: unseen.into(),
            seconds: 0.5,
        };
        let text = report.text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "1,000 rows predicted in 0.5 s",
                "20.0 % of the ids of item have no row; they read as initial values",
                "3.1 % of the ids of user have no row; they read as initial values",
            ]
        );
    }
}
