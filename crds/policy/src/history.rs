//! The policy's memory between observations: the windows that decisions are made over, and earlier
//! decisions. All of it is bounded.
//!
//! A lost history is restored from the decisions that were stored elsewhere
//! ([`History::from_decisions`]). Its windows have to fill again before they support a decision.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::correction::{Correction, Corrections};
use crate::predict::{Overheads, seconds_a_row, with_overheads};
use crate::trial::{Ceiling, MeanThroughput, Throughput, Trial};
use crate::window::Window;
use crate::{Action, AutoMode, Decision, Observations, Prediction, Subject};

/// Remembered decisions about each subject.
const DECISIONS: usize = 16;
/// Cool-downs for which a failed number is not tried again: dense workers without gain, or too few
/// replicas of any role.
pub(crate) const TRIED_COOL_DOWNS: u64 = 12;
/// A role that is scaled out within this many cool-downs of a scale-in was made too small: its load
/// cannot have changed so soon.
const REGRET_COOL_DOWNS: u64 = 3;

/// The policy's memory between observations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct History {
    pub(crate) seen_seconds: Option<u64>,
    pub(crate) attempt: Option<u32>,
    pub(crate) mode: Option<AutoMode>,
    decisions: Vec<Decision>,
    pub(crate) corrections: Corrections,
    pub(crate) all_reduce_seconds: Option<f64>,
    pub(crate) exchange_seconds: Option<f64>,
    /// Rows that the slowest worker computes in the time of an all-reduce. If processors are scarce
    /// both take longer; splitting a step among more workers slows neither.
    pub(crate) all_reduce_rows: Option<Correction>,
    /// Usual wait for data and embeddings in `sync`, in seconds. The usual wait and not the last
    /// one predicts a mode that was left: workers may have become slow just before.
    pub(crate) sync_wait: Option<Correction>,
    /// Usual wait for data and embeddings in `gba`, in seconds.
    pub(crate) gba_wait: Option<Correction>,
    pub(crate) prediction_error: Option<f64>,
    /// ln(gba / sync) of the corrected predictions.
    pub(crate) advantage: Window<f64>,
    /// ln of the corrected predictions for `sync`, in rows per second.
    pub(crate) sync_speed: Window<f64>,
    /// Replicas that each role needed.
    pub(crate) needed: BTreeMap<Subject, Window<u32>>,
    /// The largest number of look-ups or bytes of a parameter server over their mean.
    pub(crate) unevenness: Window<f64>,
    /// Bytes of all parameter servers together.
    pub(crate) table_bytes: Window<u64>,
    /// Kills for memory so far, by parameter server.
    pub(crate) oom_kills: Option<Vec<u32>>,
    /// Parameter servers killed for their memory since the last decision about parameter servers.
    pub(crate) killed: BTreeSet<u32>,
    pub(crate) throughput: Window<Throughput>,
    pub(crate) trial: Option<Trial>,
    pub(crate) ceiling: Option<Ceiling>,
}

impl History {
    /// A history with these earlier decisions. It keeps the newest few about each subject.
    #[must_use]
    pub fn from_decisions(decisions: impl IntoIterator<Item = Decision>) -> Self {
        let mut history = Self::default();
        let mut decisions: Vec<_> = decisions.into_iter().filter(Decision::acts).collect();
        decisions.sort_by_key(|decision| decision.at_seconds);
        decisions.into_iter().for_each(|decision| history.remember(decision));
        history
    }

    /// The `decisions` that are newer than every remembered decision about their subject.
    #[must_use]
    pub fn unknown(&self, decisions: impl IntoIterator<Item = Decision>) -> Vec<Decision> {
        let is_new = |decision: &Decision| {
            decision.acts() && self.last(decision.subject).is_none_or(|last| last.at_seconds < decision.at_seconds)
        };
        decisions.into_iter().filter(is_new).collect()
    }

    /// Remembers the decisions that change something. Cool-downs and limits count from them.
    pub fn record(&mut self, decisions: &[Decision]) {
        for decision in decisions.iter().filter(|decision| decision.acts()) {
            if decision.subject == Subject::Ps {
                // Every decision about parameter servers takes the kills into account.
                self.killed.clear();
            }
            self.begin_trial(decision);
            self.remember(decision.clone());
        }
    }

    /// All remembered decisions, oldest first.
    #[must_use]
    pub fn decisions(&self) -> &[Decision] {
        &self.decisions
    }

    /// The last decision about `subject` that changed something.
    #[must_use]
    pub fn last(&self, subject: Subject) -> Option<&Decision> {
        self.decisions.iter().rev().find(|decision| decision.subject == subject)
    }

    /// The mode of the last decision: ask the coordinator for it, and again after it restarted.
    #[must_use]
    pub fn decided_mode(&self) -> Option<AutoMode> {
        match self.last(Subject::Mode)?.action {
            Action::SwitchMode { to, .. } => Some(to),
            _ => None,
        }
    }

    /// The number of replicas of the last decision to scale.
    #[must_use]
    pub fn decided_replicas(&self, subject: Subject) -> Option<u32> {
        self.decisions.iter().rev().find_map(|decision| match decision.action {
            Action::Scale { to, .. } if decision.subject == subject => Some(to),
            _ => None,
        })
    }

    /// The largest number of replicas that recently turned out to be too few: the role was scaled
    /// in to it, and soon out again.
    ///
    /// The load of the present replicas predicts the load of fewer replicas. That fails if, say, a
    /// CPU limit makes each of them slower than its share of the work.
    pub(crate) fn too_few(&self, subject: Subject, cool_down_seconds: u64, now: u64) -> Option<u32> {
        let scaled = self.decisions.iter().filter(|decision| decision.subject == subject);
        let scaled = scaled.filter_map(|decision| match decision.action {
            Action::Scale { from, to } => Some((decision.at_seconds, from, to)),
            _ => None,
        });
        let scaled: Vec<_> = scaled.collect();
        let is_within =
            |cool_downs: u64, of: u64, at: u64| at <= of.saturating_add(cool_downs.saturating_mul(cool_down_seconds));
        let too_few = |pair: &[(u64, u32, u32)]| {
            let &[(in_at, before, fewer), (out_at, from, to)] = pair else { return None };
            let is_reversed = fewer < before && from == fewer && to > from;
            let counts = is_within(REGRET_COOL_DOWNS, in_at, out_at) && is_within(TRIED_COOL_DOWNS, out_at, now);
            (is_reversed && counts).then_some(fewer)
        };
        scaled.windows(2).filter_map(too_few).max()
    }

    /// Predicts both modes, corrected by the errors of earlier predictions.
    #[must_use]
    pub fn predict(&self, observations: &Observations) -> Option<Prediction> {
        Some(self.corrected(self.uncorrected(observations)?))
    }

    pub(crate) fn uncorrected(&self, observations: &Observations) -> Option<Prediction> {
        with_overheads(observations, self.overheads(observations))
    }

    pub(crate) fn corrected(&self, raw: Prediction) -> Prediction {
        let corrected = |mode| raw.of(mode) * self.corrections.of(mode);
        Prediction { sync: corrected(AutoMode::Sync), gba: corrected(AutoMode::Gba), ..raw }
    }

    /// Whether the job's speed in `mode` was measured, so that its prediction rests on more than
    /// the models.
    pub(crate) fn has_used(&self, mode: AutoMode) -> bool {
        self.corrections.own(mode).is_some()
    }

    /// Relative error of the last prediction for the mode in use: 0.1 means a tenth faster than
    /// predicted.
    #[must_use]
    pub fn prediction_error(&self) -> Option<f64> {
        self.prediction_error
    }

    /// Switches of the mode in the `seconds` before `now`.
    pub(crate) fn switches_within(&self, seconds: u64, now: u64) -> usize {
        let within = |decision: &&Decision| {
            decision.subject == Subject::Mode && decision.at_seconds.saturating_add(seconds) > now
        };
        self.decisions.iter().filter(within).count()
    }

    /// A parameter server that was killed for its memory since the last decision about parameter
    /// servers.
    pub(crate) fn killed_for_memory(&self) -> Option<u32> {
        self.killed.first().copied()
    }

    /// Growth of the table in bytes per second: the slope of a least-squares line.
    pub(crate) fn growth(&self) -> f64 {
        let samples = self.table_bytes.samples();
        let n = samples.len() as f64;
        let Some(first) = self.table_bytes.samples().next().filter(|_| n >= 3.0).copied() else { return 0.0 };
        let points = samples.map(|sample| {
            let seconds = sample.at_seconds.saturating_sub(first.at_seconds) as f64;
            (seconds, sample.value as f64 - first.value as f64)
        });
        let (x, y, xx, xy) =
            points.fold((0.0, 0.0, 0.0, 0.0), |(sx, sy, sxx, sxy), (x, y)| (sx + x, sy + y, sxx + x * x, sxy + x * y));
        let spread = n * xx - x * x;
        if spread > 0.0 { (n * xy - x * y) / spread } else { 0.0 }
    }

    /// Mean throughput at the present number of workers and in the present mode, over the window.
    pub(crate) fn throughput_now(&self) -> Option<MeanThroughput> {
        let last = self.throughput.newest()?;
        let same = |one: &Throughput| one.replicas == last.replicas && one.mode == last.mode;
        let measured: Vec<_> = self.throughput.samples().map(|sample| sample.value).filter(same).collect();
        MeanThroughput::of(&measured)
    }

    fn remember(&mut self, decision: Decision) {
        let subject = decision.subject;
        self.decisions.push(decision);
        if self.decisions.iter().filter(|decision| decision.subject == subject).count() > DECISIONS
            && let Some(oldest) = self.decisions.iter().position(|decision| decision.subject == subject)
        {
            self.decisions.remove(oldest);
        }
    }

    fn begin_trial(&mut self, decision: &Decision) {
        let Action::Scale { from, to } = decision.action else { return };
        if decision.subject != Subject::DenseWorker {
            return;
        }
        let before = self.throughput_now().filter(|now| to > from && now.replicas == from);
        self.trial = before.map(|before| Trial { from, to, before, at_seconds: decision.at_seconds });
    }

    /// The parts of a step besides computation, for workers as fast as they are now.
    fn overheads(&self, observations: &Observations) -> Overheads {
        let as_fast_as_now = || Some(self.all_reduce_rows?.logarithm.exp() * seconds_a_row(observations)?);
        let wait = |mode, usual: Option<Correction>| match observations.mode {
            Some(present) if present == mode => Some(observations.wait_seconds),
            _ => usual.map(|usual| usual.logarithm.exp()),
        };
        Overheads {
            all_reduce: observations.all_reduce_seconds.or_else(as_fast_as_now).or(self.all_reduce_seconds),
            exchange: self.exchange_seconds,
            sync_wait: wait(AutoMode::Sync, self.sync_wait),
            gba_wait: wait(AutoMode::Gba, self.gba_wait),
        }
    }
}
