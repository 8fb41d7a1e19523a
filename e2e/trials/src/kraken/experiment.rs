//! The list of the experiments.

use super::lab::Lab;
use super::profile::Profile;
use super::variant::Model;
use super::{fig8, fig9, fig10, table4};
use crate::TrialError;

/// An experiment of the paper.
pub(super) struct Experiment {
    pub(super) name: &'static str,
    /// Its name in the paper.
    pub(super) title: &'static str,
    /// Whether it runs with every model, or with the first one only.
    has_all_models: bool,
    /// Whether it needs the time of each row.
    pub(super) needs_times: bool,
    pub(super) run: fn(&Profile, &mut dyn Lab) -> Result<(), TrialError>,
}

pub(super) const EXPERIMENTS: [Experiment; 4] = [
    Experiment { name: "fig8", title: "Fig. 8", has_all_models: true, needs_times: false, run: fig8::run },
    Experiment { name: "fig9", title: "Fig. 9", has_all_models: false, needs_times: false, run: fig9::run },
    Experiment { name: "fig10", title: "Fig. 10", has_all_models: false, needs_times: true, run: fig10::run },
    Experiment { name: "table4", title: "Table IV", has_all_models: true, needs_times: false, run: table4::run },
];

impl Experiment {
    /// The models that it runs with, among the selected ones.
    pub(super) fn models<'m>(&self, selected: &'m [Model]) -> &'m [Model] {
        if self.has_all_models { selected } else { selected.get(..1).unwrap_or_default() }
    }
}
