//! What is remembered from one observation to the next: the windows that decisions are made over, and what was decided. Bounded. A
//! history that is lost is made again from the decisions that were kept elsewhere ([`History::from_decisions`]); its windows fill
//! again before anything is decided on them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::mode::most_needed;
use crate::predict::{Overheads, seconds_a_row, with_overheads};
use crate::replicas;
use crate::{Action, Decision, Observations, Policy, Prediction, Subject, TrainingMode, decide};

/// Decisions that are remembered of each subject.
const DECISIONS: usize = 16;
/// Samples that a window holds at most; with more of them, the oldest go.
const SAMPLES: usize = 1024;
/// Seconds over which a mode's correction follows what is measured.
const CORRECTION_SECONDS: f64 = 600.0;
/// Seconds; less is no wait.
const LEAST_WAIT: f64 = 1e-6;
/// As many measurements the prediction itself is worth: the first few of a mode do not overrule it.
const EXPECTED: u32 = 24;
/// A prediction that is further off than this is not one to correct.
const MOST_CORRECTION: f64 = 2.0;
/// Standard errors by which a difference of means may be off by chance.
const CHANCE: f64 = 3.0;
/// ln 3: by more than that no single look speaks for a mode, so that a moment in which a worker stands still is no reason to switch.
const MOST_ADVANTAGE: f64 = 1.1;
/// Cool-downs for which a number of dense workers that did not pay, or of any role that was too few, is not tried again.
const TRIED_COOL_DOWNS: u64 = 12;
/// A role that is scaled out within so many cool-downs of having been scaled in was made too small: its load has not changed so soon.
const REGRET_COOL_DOWNS: u64 = 3;

/// A value at a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample<T> {
    pub(crate) at_seconds: u64,
    pub(crate) value: T,
}

/// Samples of the last so many seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Window<T>(VecDeque<Sample<T>>);

impl<T> Default for Window<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T: Copy> Window<T> {
    /// Takes a sample in and lets go of what is older than `seconds`.
    fn push(&mut self, at_seconds: u64, value: T, seconds: u64) {
        self.0.push_back(Sample { at_seconds, value });
        let oldest = at_seconds.saturating_sub(seconds);
        while self.0.len() > SAMPLES || self.0.front().is_some_and(|sample| sample.at_seconds < oldest) {
            self.0.pop_front();
        }
    }

    /// The values of the last `seconds`, if they are from all of that time and enough to speak of: three.
    pub(crate) fn over(&self, seconds: u64) -> Option<Vec<T>> {
        let (span, values) = self.within(seconds)?;
        let count = values.len() as u64;
        // Each sample stands for the time since the one before it.
        (count >= 3 && span * count >= seconds * (count - 1)).then_some(values)
    }

    /// The values of the last `seconds`, and the time from the first of them to the last.
    fn within(&self, seconds: u64) -> Option<(u64, Vec<T>)> {
        let last = self.0.back()?.at_seconds;
        let mut within = self.0.iter().filter(|sample| sample.at_seconds + seconds >= last).peekable();
        let span = last - within.peek()?.at_seconds;
        Some((span, within.map(|sample| sample.value).collect()))
    }

    pub(crate) fn samples(&self) -> impl ExactSizeIterator<Item = &Sample<T>> {
        self.0.iter()
    }
}

/// What a prediction has to be multiplied by, learned while the mode was in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Corrections {
    sync: Option<Correction>,
    gba: Option<Correction>,
}

/// The mean of its logarithm over everything measured, or over the last [`CORRECTION_SECONDS`], whichever is shorter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Correction {
    logarithm: f64,
    measured: u32,
}

impl Corrections {
    /// That of `mode`; of a mode never used, that of the other one, whose causes may be shared. That may be a reason to expect less
    /// of it, and never to expect more.
    fn of(self, mode: TrainingMode) -> f64 {
        let own = self.own(mode).map(|correction| correction.logarithm);
        let other = || self.own(mode.other()).map(|correction| correction.logarithm.min(0.0));
        own.or_else(other).unwrap_or(0.0).exp()
    }

    fn own(self, mode: TrainingMode) -> Option<Correction> {
        match mode {
            TrainingMode::Sync => self.sync,
            TrainingMode::Gba => self.gba,
        }
    }

    /// Over the `seconds` since the measurement before.
    fn learn(&mut self, mode: TrainingMode, measured_over_predicted: f64, seconds: u64) {
        let own = match mode {
            TrainingMode::Sync => &mut self.sync,
            TrainingMode::Gba => &mut self.gba,
        };
        let measured = measured_over_predicted.clamp(MOST_CORRECTION.recip(), MOST_CORRECTION);
        let expected = Correction { logarithm: 0.0, measured: EXPECTED };
        *own = Some(own.unwrap_or(expected).with(measured, seconds));
    }
}

impl Correction {
    /// With what was measured over the `seconds` since the measurement before.
    fn with(self, measured: f64, seconds: u64) -> Self {
        let count = self.measured.saturating_add(1);
        let share = (seconds as f64 / CORRECTION_SECONDS).max(f64::from(count).recip()).min(1.0);
        Self { logarithm: self.logarithm + share * (measured.ln() - self.logarithm), measured: count }
    }
}

/// Dense workers were added: did it pay?
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Trial {
    from: u32,
    to: u32,
    before: MeanThroughput,
    at_seconds: u64,
}

/// A number of dense workers above which nothing was gained.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Ceiling {
    pub(crate) replicas: u32,
    pub(crate) until_seconds: u64,
}

/// Throughput at a number of dense workers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Throughput {
    replicas: u32,
    mode: TrainingMode,
    samples_per_second: f64,
}

/// The mean of such measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MeanThroughput {
    replicas: u32,
    mode: TrainingMode,
    samples_per_second: f64,
    /// Of the mean, as a share of it, squared: the measurements' variance over their number.
    squared_error: f64,
}

impl MeanThroughput {
    /// Of three measurements at least, all at one number of workers and in one mode.
    fn of(measured: &[Throughput]) -> Option<Self> {
        let Throughput { replicas, mode, .. } = *measured.first()?;
        let count = measured.len() as f64;
        let mean = measured.iter().map(|one| one.samples_per_second).sum::<f64>() / count;
        let squares = measured.iter().map(|one| (one.samples_per_second / mean - 1.0).powi(2)).sum::<f64>();
        let squared_error = squares / (count - 1.0) / count;
        (count >= 3.0 && squared_error.is_finite()).then_some(Self {
            replicas,
            mode,
            samples_per_second: mean,
            squared_error,
        })
    }

    /// ln(self / before) at most, but for chance.
    fn most_gained_over(&self, before: &Self) -> f64 {
        let error = (self.squared_error + before.squared_error).sqrt();
        (self.samples_per_second / before.samples_per_second).ln() + CHANCE * error
    }
}

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct History {
    seen_seconds: Option<u64>,
    attempt: Option<u32>,
    mode: Option<TrainingMode>,
    decisions: Vec<Decision>,
    pub(crate) corrections: Corrections,
    pub(crate) all_reduce_seconds: Option<f64>,
    pub(crate) exchange_seconds: Option<f64>,
    /// Rows that the slowest worker computes in the time of an all-reduce: where processors are short, both take longer, and neither
    /// does where a step is split among more workers.
    all_reduce_rows: Option<Correction>,
    /// Seconds that are waited for data and embeddings: what a step waits for is measured apart in either mode. A mode that was left
    /// because workers had become slow is not expected to wait as it did last.
    sync_wait: Option<Correction>,
    gba_wait: Option<Correction>,
    prediction_error: Option<f64>,
    /// ln(gba / sync), both corrected.
    pub(crate) advantage: Window<f64>,
    /// Replicas that each role was found to need.
    pub(crate) needed: BTreeMap<Subject, Window<u32>>,
    /// How unevenly the parameter servers are used: the most of look-ups or bytes over the mean.
    pub(crate) unevenness: Window<f64>,
    /// Bytes of all parameter servers together.
    pub(crate) table_bytes: Window<u64>,
    /// Kills for memory that were seen, by parameter server.
    oom_kills: Option<Vec<u32>>,
    /// Parameter servers that were killed for their memory since something was last decided about them.
    killed: BTreeSet<u32>,
    throughput: Window<Throughput>,
    trial: Option<Trial>,
    pub(crate) ceiling: Option<Ceiling>,
}

impl History {
    /// One that has decided this before. Of each subject the newest few are kept.
    #[must_use]
    pub fn from_decisions(decisions: impl IntoIterator<Item = Decision>) -> Self {
        let mut history = Self::default();
        let mut decisions: Vec<_> = decisions.into_iter().filter(Decision::acts).collect();
        decisions.sort_by_key(|decision| decision.at_seconds);
        decisions.into_iter().for_each(|decision| history.remember(decision));
        history
    }

    /// Those of `decisions` that are newer than all that is remembered of their subject.
    #[must_use]
    pub fn unknown(&self, decisions: impl IntoIterator<Item = Decision>) -> Vec<Decision> {
        let is_new = |decision: &Decision| {
            decision.acts() && self.last(decision.subject).is_none_or(|last| last.at_seconds < decision.at_seconds)
        };
        decisions.into_iter().filter(is_new).collect()
    }

    /// All processes have begun anew: what windows hold is of others, whose tables were restored meanwhile. What was decided and learned stays.
    fn begin_attempt(&mut self) {
        self.mode = None;
        self.advantage = Window::default();
        self.needed.clear();
        self.unevenness = Window::default();
        self.table_bytes = Window::default();
        self.throughput = Window::default();
        self.trial = None;
        self.killed.clear();
        // Kills of these processes are all news.
        self.oom_kills = Some(Vec::new());
    }

    /// Observes, decides and records; gives one decision a subject of the policy.
    pub fn advance(&mut self, policy: &Policy, observations: &Observations) -> Vec<Decision> {
        self.observe(policy, observations);
        let decisions = decide(policy, observations, self);
        self.record(&decisions);
        decisions
    }

    /// Takes measurements into the windows. What is no newer than what was seen, or cannot be measured, is left out.
    pub fn observe(&mut self, policy: &Policy, observations: &Observations) {
        let now = observations.at_seconds;
        if self.seen_seconds.is_some_and(|seen| now <= seen) || observations.check().is_err() {
            return;
        }
        let seconds = self.seen_seconds.replace(now).map_or(0, |seen| now - seen);
        if self.attempt.replace(observations.attempt).is_some_and(|before| before != observations.attempt) {
            self.begin_attempt();
        }
        self.record(&observations.decided_elsewhere);
        self.all_reduce_seconds = observations.all_reduce_seconds.or(self.all_reduce_seconds);
        self.exchange_seconds = observations.exchange_seconds.or(self.exchange_seconds);
        self.observe_overheads(observations, seconds);
        self.observe_speed(policy, observations, seconds);
        self.observe_memory(policy, observations);
        self.observe_trial(policy, observations);
        let longest = policy.scaling.up_window_seconds.max(policy.scaling.down_window_seconds);
        if let Some(unevenness) = replicas::unevenness(observations) {
            self.unevenness.push(now, unevenness, policy.scaling.up_window_seconds);
        }
        for (subject, needed) in replicas::needed(policy, observations, self) {
            self.needed.entry(subject).or_default().push(now, needed, longest);
        }
        self.mode = observations.mode;
    }

    /// Remembers what was decided, as far as anything is to be done.
    pub fn record(&mut self, decisions: &[Decision]) {
        for decision in decisions.iter().filter(|decision| decision.acts()) {
            if decision.subject == Subject::Ps {
                // Whatever was decided takes them into account.
                self.killed.clear();
            }
            self.begin_trial(decision);
            self.remember(decision.clone());
        }
    }

    /// All decisions that are remembered, oldest first.
    #[must_use]
    pub fn decisions(&self) -> &[Decision] {
        &self.decisions
    }

    /// The last decision about `subject` that something was to be done.
    #[must_use]
    pub fn last(&self, subject: Subject) -> Option<&Decision> {
        self.decisions.iter().rev().find(|decision| decision.subject == subject)
    }

    /// The mode that was decided on last: what to ask the coordinator for, now and whenever it has forgotten.
    #[must_use]
    pub fn decided_mode(&self) -> Option<TrainingMode> {
        match self.last(Subject::Mode)?.action {
            Action::SwitchMode { to, .. } => Some(to),
            _ => None,
        }
    }

    /// The number of replicas that was decided on last.
    #[must_use]
    pub fn decided_replicas(&self, subject: Subject) -> Option<u32> {
        self.decisions.iter().rev().find_map(|decision| match decision.action {
            Action::Scale { to, .. } if decision.subject == subject => Some(to),
            _ => None,
        })
    }

    /// The most replicas that were tried not long ago and were too few: the role was scaled in to that many, and soon out again. What
    /// fewer of them would do is predicted from what the present ones do, and that fails where, say, a limit on a processor's time makes
    /// each of them slower than its share of the work would.
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

    /// What the modes would make, corrected by what was learned.
    #[must_use]
    pub fn predict(&self, observations: &Observations) -> Option<Prediction> {
        Some(self.corrected(self.uncorrected(observations)?))
    }

    fn uncorrected(&self, observations: &Observations) -> Option<Prediction> {
        with_overheads(observations, self.overheads(observations))
    }

    fn corrected(&self, raw: Prediction) -> Prediction {
        let corrected = |mode| raw.of(mode) * self.corrections.of(mode);
        Prediction { sync: corrected(TrainingMode::Sync), gba: corrected(TrainingMode::Gba), ..raw }
    }

    /// Whether its speed was measured, so that a prediction of it is more than what the models say.
    pub(crate) fn has_used(&self, mode: TrainingMode) -> bool {
        self.corrections.own(mode).is_some()
    }

    /// By how much the last measured speed was off what had been predicted for the mode in use: 0.1 is a tenth faster.
    #[must_use]
    pub fn prediction_error(&self) -> Option<f64> {
        self.prediction_error
    }

    /// The mode's switches in the `seconds` before `now`.
    pub(crate) fn switches_within(&self, seconds: u64, now: u64) -> usize {
        let within = |decision: &&Decision| {
            decision.subject == Subject::Mode && decision.at_seconds.saturating_add(seconds) > now
        };
        self.decisions.iter().filter(within).count()
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

    fn observe_overheads(&mut self, observations: &Observations, seconds: u64) {
        let Some(seconds_a_row) = seconds_a_row(observations) else { return };
        let rows = observations.all_reduce_seconds.map(|all_reduce| all_reduce / seconds_a_row);
        if let Some(rows) = rows.filter(|rows| rows.is_normal()) {
            self.all_reduce_rows = Some(self.all_reduce_rows.unwrap_or_default().with(rows, seconds));
        }
        let wait = match observations.mode {
            Some(TrainingMode::Sync) => &mut self.sync_wait,
            Some(TrainingMode::Gba) => &mut self.gba_wait,
            None => return,
        };
        *wait = Some(wait.unwrap_or_default().with(observations.wait_seconds.max(LEAST_WAIT), seconds));
    }

    /// What of a step is not computing, for workers as fast as they are now.
    fn overheads(&self, observations: &Observations) -> Overheads {
        let as_fast_as_now = || Some(self.all_reduce_rows?.logarithm.exp() * seconds_a_row(observations)?);
        let wait = |mode, usual: Option<Correction>| match observations.mode {
            Some(present) if present == mode => Some(observations.wait_seconds),
            _ => usual.map(|usual| usual.logarithm.exp()),
        };
        Overheads {
            all_reduce: observations.all_reduce_seconds.or_else(as_fast_as_now).or(self.all_reduce_seconds),
            exchange: self.exchange_seconds,
            sync_wait: wait(TrainingMode::Sync, self.sync_wait),
            gba_wait: wait(TrainingMode::Gba, self.gba_wait),
        }
    }

    fn observe_speed(&mut self, policy: &Policy, observations: &Observations, seconds: u64) {
        let Some(raw) = self.uncorrected(observations) else { return };
        // What was measured across a switch is neither mode's.
        let steady = observations.mode.filter(|mode| Some(*mode) == self.mode);
        if let (Some(mode), Some(measured)) = (steady, observations.samples_per_second)
            && measured > 0.0
        {
            self.prediction_error = Some(measured / self.corrected(raw).of(mode) - 1.0);
            self.corrections.learn(mode, measured / raw.of(mode), seconds);
        }
        let corrected = self.corrected(raw);
        let advantage = (corrected.gba.max(f64::MIN_POSITIVE) / corrected.sync).ln();
        // A mean that is to pass a threshold can only be made of what may be beyond it.
        let most = policy.mode.as_ref().map_or(0.0, |mode| 2.0 * most_needed(mode)).max(MOST_ADVANTAGE);
        let advantage = advantage.clamp(-most, most);
        let window = policy.mode.as_ref().map_or(0, |mode| mode.window_seconds);
        self.advantage.push(observations.at_seconds, advantage, window);
    }

    fn observe_memory(&mut self, policy: &Policy, observations: &Observations) {
        if observations.ps.is_empty() {
            return;
        }
        let bytes = observations.ps.iter().map(|ps| ps.bytes).sum();
        let window = policy.ps.as_ref().map_or(0, |ps| ps.growth_window_seconds);
        // One that has nothing restores its rows: what comes then is no growth.
        if observations.ps.iter().all(|ps| ps.bytes > 0) {
            self.table_bytes.push(observations.at_seconds, bytes, window);
        }
        // Those before the first observation are somebody else's.
        if let Some(seen) = &self.oom_kills {
            let killed = (0..)
                .zip(&observations.ps)
                .filter(|(index, ps)| ps.oom_kills > seen.get(*index as usize).copied().unwrap_or(0));
            self.killed.extend(killed.map(|(index, _)| index));
        }
        self.killed.retain(|index| (*index as usize) < observations.ps.len());
        self.oom_kills = Some(observations.ps.iter().map(|ps| ps.oom_kills).collect());
    }

    /// A parameter server that was killed for its memory, and nothing was done about it.
    pub(crate) fn killed_for_memory(&self) -> Option<u32> {
        self.killed.first().copied()
    }

    fn begin_trial(&mut self, decision: &Decision) {
        let Action::Scale { from, to } = decision.action else { return };
        if decision.subject != Subject::DenseWorker {
            return;
        }
        let before = self.throughput_now().filter(|now| to > from && now.replicas == from);
        self.trial = before.map(|before| Trial { from, to, before, at_seconds: decision.at_seconds });
    }

    /// The mean of what the window has of the present number of workers and mode.
    fn throughput_now(&self) -> Option<MeanThroughput> {
        let last = self.throughput.0.back()?.value;
        let same = |one: &Throughput| one.replicas == last.replicas && one.mode == last.mode;
        let measured: Vec<_> = self.throughput.samples().map(|sample| sample.value).filter(same).collect();
        MeanThroughput::of(&measured)
    }

    /// Once the workers that were added have worked for a while: if they brought less than half of what they should, the number
    /// before is the most for a while.
    fn observe_trial(&mut self, policy: &Policy, observations: &Observations) {
        let now = observations.at_seconds;
        if self.ceiling.is_some_and(|ceiling| now >= ceiling.until_seconds) {
            self.ceiling = None;
        }
        let Some(count) = observations.replicas.dense_worker.filter(|count| count.wanted == count.ready) else {
            return;
        };
        let (Some(mode), Some(samples_per_second)) = (observations.mode, observations.samples_per_second) else {
            return;
        };
        let sample = Throughput { replicas: count.ready, mode, samples_per_second };
        self.throughput.push(now, sample, policy.scaling.up_window_seconds);
        let (Some(trial), Some(dense)) = (self.trial, policy.dense_worker.as_ref()) else { return };
        let scaling = &policy.scaling;
        if now < trial.at_seconds + scaling.cool_down_seconds.max(scaling.up_window_seconds) {
            return;
        }
        let Some(after) = self.throughput_now() else { return };
        self.trial = None;
        if after.replicas != trial.to || after.mode != trial.before.mode {
            return;
        }
        let elasticity = after.most_gained_over(&trial.before) / (f64::from(trial.to) / f64::from(trial.from)).ln();
        if elasticity < 0.5 * dense.marginal_throughput {
            let until_seconds = now + TRIED_COOL_DOWNS * scaling.cool_down_seconds;
            self.ceiling = Some(Ceiling { replicas: trial.from, until_seconds });
        }
    }
}
