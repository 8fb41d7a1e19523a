//! Traces of automatic decisions: recent observations and decisions about each job, in the format
//! of `rectrain policy replay` ([`rectrain_policy::replay()`]). They are served on
//! `/traces/NAMESPACE/JOB` and end when the instance stops leading.

use std::collections::{HashMap, VecDeque};

use parking_lot::{Mutex, MutexGuard};
use rectrain_policy::{Decision, Observations, Policy, Record};

use crate::names::JobName;

/// Bytes of all traces together. Beyond that, the longest trace loses its beginning.
const MOST_BYTES: usize = 32 << 20;
/// Bytes of one trace: some hours of a job with a few members.
const MOST_OF_ONE: usize = 4 << 20;

/// The traces of all jobs with automatic decisions.
#[derive(Debug, Default)]
pub struct Traces(Mutex<HashMap<JobName, Trace>>);

#[derive(Debug, Default)]
struct Trace {
    policy: Option<Policy>,
    /// The line of the policy in force before `lines`, if they do not begin with one.
    before: Option<String>,
    lines: VecDeque<String>,
    bytes: usize,
}

impl Traces {
    /// Records a look at a job: its observations, and the decisions in its status.
    pub fn record(&self, job: &JobName, policy: &Policy, observations: &Observations, decisions: &[Decision]) {
        let mut all = self.lock();
        let trace = all.entry(job.clone()).or_default();
        if trace.policy.as_ref() != Some(policy) {
            trace.push(&Record::Policy(Box::new(policy.clone())));
            trace.policy = Some(policy.clone());
        }
        trace.push(&Record::Observations(Box::new(observations.clone())));
        for decision in decisions.iter().filter(|decision| decision.acts()) {
            trace.push(&Record::Decision(decision.clone()));
        }
        trace.shorten(MOST_OF_ONE);
        while all.values().map(|trace| trace.bytes).sum::<usize>() > MOST_BYTES {
            let Some(longest) = all.values_mut().max_by_key(|trace| trace.bytes) else { break };
            longest.shorten(longest.bytes / 2);
        }
    }

    /// The trace of a job as JSON lines. `None` for a job without automatic decisions by this
    /// operator.
    #[must_use]
    pub fn of(&self, job: &JobName) -> Option<String> {
        let all = self.lock();
        let trace = all.get(job)?;
        Some(trace.before.iter().chain(&trace.lines).map(String::as_str).collect())
    }

    /// Forgets a job that is gone, or whose name another job has.
    pub fn forget(&self, job: &JobName) {
        self.lock().remove(job);
    }

    /// Forgets all jobs, because another instance may continue with them.
    pub fn forget_all(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<JobName, Trace>> {
        self.0.lock()
    }
}

impl Trace {
    fn push(&mut self, record: &Record) {
        // A record consists of numbers and texts, so it never fails.
        let Ok(mut line) = serde_json::to_string(record) else { return };
        line.push('\n');
        self.bytes += line.len();
        self.lines.push_back(line);
    }

    /// Drops the oldest lines. The rest begins with observations.
    fn shorten(&mut self, most: usize) {
        while self.bytes > most
            && let Some(line) = self.lines.pop_front()
        {
            self.bytes -= line.len();
            if line.starts_with("{\"policy\"") {
                self.before = Some(line);
            }
        }
        // Decisions without their observations.
        if self.before.is_some() {
            while let Some(line) = self.lines.pop_front_if(|line| line.starts_with("{\"decision\"")) {
                self.bytes -= line.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rectrain_policy::{AutoMode, ModePolicy, Worker, replay};

    use super::*;

    fn policy() -> Policy {
        Policy {
            mode: Some(ModePolicy { window_seconds: 15, dwell_seconds: 30, ..ModePolicy::default() }),
            ..Policy::default()
        }
    }

    fn clicks() -> JobName {
        JobName::new("ads", "clicks")
    }

    /// Two workers in `sync`; the second is slower by the factor `slower`.
    fn observations(at_seconds: u64, slower: f64) -> Observations {
        let worker = |seconds: f64| Worker { batch_rows: 500, compute_seconds: vec![seconds] };
        Observations {
            at_seconds,
            mode: Some(AutoMode::Sync),
            global_batch_rows: 1000,
            local_batch_rows: 500,
            staleness_tolerance: 4,
            workers: vec![worker(0.01), worker(0.01 * slower)],
            ..Observations::default()
        }
    }

    #[test]
    fn a_recorded_trace_can_be_replayed() {
        let traces = Traces::default();
        let mut history = rectrain_policy::History::default();
        let mut decided = 0;
        for look in 1..60 {
            let observations = observations(look * 5, if look < 20 { 1.0 } else { 10.0 });
            let decisions = history.advance(&policy(), &observations);
            decided += decisions.iter().filter(|decision| decision.acts()).count();
            traces.record(&clicks(), &policy(), &observations, &decisions);
        }
        let replayed = replay(&traces.of(&clicks()).unwrap()).unwrap();
        assert!(decided > 0);
        assert_eq!((replayed.observations, replayed.decisions.len(), replayed.missing.len()), (59, decided, 0));
        assert!(replayed.decisions.iter().all(|made| made.agrees));
        assert_eq!(traces.of(&JobName::new("ads", "others")), None);
        traces.forget(&clicks());
        assert_eq!(traces.of(&clicks()), None);
    }

    #[test]
    fn a_long_trace_loses_its_beginning_but_not_its_policy() {
        let traces = Traces::default();
        let mut policies = [policy(), policy()];
        policies[1].scaling.cool_down_seconds += 1;
        for look in 1..=40_000 {
            let policy = &policies[usize::from(look > 39_900)];
            traces.record(&clicks(), policy, &observations(look, 1.0), &[]);
        }
        let text = traces.of(&clicks()).unwrap();
        assert!((MOST_OF_ONE * 9 / 10..=MOST_OF_ONE + 1000).contains(&text.len()), "{}", text.len());
        assert_eq!(text.lines().filter(|line| line.contains("\"policy\"")).count(), 2);
        let replayed = replay(&text).unwrap();
        assert!(replayed.observations > 1000 && replayed.standing.len() == 1, "{}", replayed.observations);
    }

    #[test]
    fn all_traces_together_are_bounded() {
        let traces = Traces::default();
        let job_name = |job: u32| JobName::new("ads", &job.to_string());
        for look in 1..2000 {
            for job in 0..20 {
                traces.record(&job_name(job), &policy(), &observations(look * 5, 1.0), &[]);
            }
        }
        let texts: Vec<_> = (0..20).filter_map(|job| traces.of(&job_name(job))).collect();
        let bytes: usize = texts.iter().map(String::len).sum();
        assert!(bytes <= MOST_BYTES + 20_000 && texts.len() == 20, "{bytes}");
    }
}
