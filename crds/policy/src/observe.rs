//! Adds an observation to the history: the first step of a look at a job.

use crate::correction::Correction;
use crate::needs;
use crate::predict::seconds_a_row;
use crate::trial::{Ceiling, Throughput};
use crate::window::Window;
use crate::{AutoMode, History, Observations, Policy, ReplicaCount, decide};

/// Waits below this many seconds count as this many, because the mean is one of logarithms.
const LEAST_WAIT: f64 = 1e-6;
/// ln 3: no single observation favours a mode by more. So a worker that stalls for a moment causes
/// no switch.
const MOST_ADVANTAGE: f64 = 1.1;

impl History {
    /// Observes, decides and records. Returns one decision for each subject of the policy.
    pub fn advance(&mut self, policy: &Policy, observations: &Observations) -> Vec<crate::Decision> {
        self.observe(policy, observations);
        let decisions = decide(policy, observations, self);
        self.record(&decisions);
        decisions
    }

    /// Adds measurements to the windows. Observations that are not newer than the last ones, or
    /// that are outside their range, are ignored.
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
        self.observe_needs(policy, observations);
        self.mode = observations.mode;
    }

    /// All processes have restarted and their tables were restored, so the windows describe
    /// processes that are gone. Decisions and learned corrections stay.
    fn begin_attempt(&mut self) {
        self.mode = None;
        self.advantage = Window::default();
        self.sync_speed = Window::default();
        self.needed.clear();
        self.unevenness = Window::default();
        self.table_bytes = Window::default();
        self.throughput = Window::default();
        self.trial = None;
        self.killed.clear();
        // Every kill of the new processes is news.
        self.oom_kills = Some(Vec::new());
    }

    fn observe_overheads(&mut self, observations: &Observations, seconds: u64) {
        let Some(seconds_a_row) = seconds_a_row(observations) else { return };
        let rows = observations.all_reduce_seconds.map(|all_reduce| all_reduce / seconds_a_row);
        if let Some(rows) = rows.filter(|rows| rows.is_normal()) {
            self.all_reduce_rows = Some(self.all_reduce_rows.unwrap_or_default().with(rows, seconds));
        }
        let wait: &mut Option<Correction> = match observations.mode {
            Some(AutoMode::Sync) => &mut self.sync_wait,
            Some(AutoMode::Gba) => &mut self.gba_wait,
            None => return,
        };
        *wait = Some(wait.unwrap_or_default().with(observations.wait_seconds.max(LEAST_WAIT), seconds));
    }

    fn observe_speed(&mut self, policy: &Policy, observations: &Observations, seconds: u64) {
        let Some(raw) = self.uncorrected(observations) else { return };
        // A measurement across a switch belongs to neither mode.
        let steady = observations.mode.filter(|mode| Some(*mode) == self.mode);
        if let (Some(mode), Some(measured)) = (steady, observations.samples_per_second)
            && measured > 0.0
        {
            self.prediction_error = Some(measured / self.corrected(raw).of(mode) - 1.0);
            self.corrections.learn(mode, measured / raw.of(mode), seconds);
        }
        let corrected = self.corrected(raw);
        let advantage = (corrected.gba.max(f64::MIN_POSITIVE) / corrected.sync).ln();
        // The mean can pass a threshold only if single values may lie beyond it.
        let most = policy.mode.as_ref().map_or(0.0, |mode| 2.0 * mode.largest_threshold()).max(MOST_ADVANTAGE);
        let advantage = advantage.clamp(-most, most);
        let window = policy.mode.as_ref().map_or(0, |mode| mode.window_seconds);
        self.advantage.push(observations.at_seconds, advantage, window);
        self.sync_speed.push(observations.at_seconds, corrected.sync.max(f64::MIN_POSITIVE).ln(), window);
    }

    fn observe_memory(&mut self, policy: &Policy, observations: &Observations) {
        if observations.ps.is_empty() {
            return;
        }
        let bytes = observations.ps.iter().map(|ps| ps.bytes).sum();
        let window = policy.ps.as_ref().map_or(0, |ps| ps.growth_window_seconds);
        // An empty server is about to restore its rows, which is no growth.
        if observations.ps.iter().all(|ps| ps.bytes > 0) {
            self.table_bytes.push(observations.at_seconds, bytes, window);
        }
        // An earlier history has answered the kills before the first observation.
        if let Some(seen) = &self.oom_kills {
            let killed = (0..)
                .zip(&observations.ps)
                .filter(|(index, ps)| ps.oom_kills > seen.get(*index as usize).copied().unwrap_or(0));
            self.killed.extend(killed.map(|(index, _)| index));
        }
        self.killed.retain(|index| (*index as usize) < observations.ps.len());
        self.oom_kills = Some(observations.ps.iter().map(|ps| ps.oom_kills).collect());
    }

    /// Judges a trial once the added workers have worked for a while. If they brought less than
    /// half of the target, the number before becomes a ceiling for a while.
    fn observe_trial(&mut self, policy: &Policy, observations: &Observations) {
        let now = observations.at_seconds;
        if self.ceiling.is_some_and(|ceiling| now >= ceiling.until_seconds) {
            self.ceiling = None;
        }
        let is_settled = |count: &ReplicaCount| count.wanted == count.ready;
        let Some(count) = observations.replicas.dense_worker.filter(is_settled) else { return };
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
        if trial.elasticity(&after).is_some_and(|elasticity| elasticity < 0.5 * dense.marginal_throughput) {
            let until_seconds = now + crate::history::TRIED_COOL_DOWNS * scaling.cool_down_seconds;
            self.ceiling = Some(Ceiling { replicas: trial.from, until_seconds });
        }
    }

    fn observe_needs(&mut self, policy: &Policy, observations: &Observations) {
        let now = observations.at_seconds;
        let scaling = &policy.scaling;
        if let Some(unevenness) = observations.unevenness() {
            self.unevenness.push(now, unevenness, scaling.up_window_seconds);
        }
        let longest = scaling.up_window_seconds.max(scaling.down_window_seconds);
        for (subject, needed) in needs::needed(policy, observations, self) {
            self.needed.entry(subject).or_default().push(now, needed, longest);
        }
    }
}
