//! Runs with their figures.

use rectrain_harness::HarnessError;
use rectrain_harness::events::missing;
use serde_json::Value;

use super::run::Run;

/// A run that has ended.
pub(super) struct Done {
    pub(super) run: Run,
    /// The line of its figures.
    pub(super) line: Value,
}

impl Done {
    /// A figure that every such run has.
    ///
    /// # Errors
    /// [`HarnessError::NoField`].
    pub(super) fn number(&self, field: &str) -> Result<f64, HarnessError> {
        self.line[field].as_f64().ok_or_else(|| missing("the line of a run", &self.line, field))
    }
}

/// A figure of the runs that `is_wanted` selects.
///
/// # Errors
/// [`HarnessError::NoField`].
pub(super) fn numbers(done: &[Done], is_wanted: impl Fn(&Run) -> bool, field: &str) -> Result<Vec<f64>, HarnessError> {
    done.iter().filter(|done| is_wanted(&done.run)).map(|done| done.number(field)).collect()
}

/// As [`numbers`], without the runs that lack the figure.
pub(super) fn optional_numbers(done: &[Done], is_wanted: impl Fn(&Run) -> bool, field: &str) -> Vec<f64> {
    done.iter().filter(|done| is_wanted(&done.run)).filter_map(|done| done.line[field].as_f64()).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::shadow::run::{Figures, Rows};
    use crate::shadow::way::Way;
    use serde_json::json;

    /// Runs of a part, each with the figures that `figures` gives it.
    pub(in crate::shadow) fn done(runs: Vec<Run>, figures: impl Fn(&Run) -> Value) -> Vec<Done> {
        let with_figures = |run: Run| Done { line: figures(&run), run };
        runs.into_iter().map(with_figures).collect()
    }

    #[test]
    fn a_figure_that_a_line_lacks_is_named_or_left_out() {
        let run = Run::limited(Figures::Speed, Rows::Endless, Way::Sync, vec![0.5]);
        let done = done(vec![run.clone(), Run { seed: 2, ..run }], |run| {
            if run.seed == 1 { json!({ "gap": 5.5 }) } else { json!({ "gap": null }) }
        });
        assert_eq!(numbers(&done, |run| run.seed == 1, "gap").unwrap(), [5.5]);
        assert!(numbers(&done, |_| true, "gap").unwrap_err().to_string().contains("gap"));
        assert_eq!(optional_numbers(&done, |_| true, "gap"), [5.5]);
    }
}
