//! What was observed and decided lately of jobs that are decided on automatically, in the form that `rectrain policy replay` reads
//! ([`rectrain_policy::replay()`]): served on `/traces/NAMESPACE/JOB`. What an operator has observed goes with it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rectrain_policy::{Decision, Observations, Policy, Record};

/// Bytes of all traces together; beyond that the longest loses its beginning.
const MOST_BYTES: usize = 32 << 20;
/// Bytes of one: some hours of a job with a few members.
const MOST_OF_ONE: usize = 4 << 20;

/// See the module's text.
#[derive(Debug, Default)]
pub struct Traces(Mutex<HashMap<(String, String), Trace>>);

#[derive(Debug, Default)]
struct Trace {
    policy: Option<Policy>,
    /// The policy's line that holds before the first of `lines`, if that is none itself.
    before: Option<String>,
    lines: VecDeque<String>,
    bytes: usize,
}

impl Traces {
    /// A look at a job: what was observed, and what of the decisions counts.
    pub fn record(
        &self,
        (namespace, job): (&str, &str),
        policy: &Policy,
        observations: &Observations,
        decisions: &[Decision],
    ) {
        let mut all = self.lock();
        let trace = all.entry((namespace.to_owned(), job.to_owned())).or_default();
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

    /// JSON lines; none of a job that is not decided on automatically, or not by this operator.
    #[must_use]
    pub fn of(&self, namespace: &str, job: &str) -> Option<String> {
        let all = self.lock();
        let trace = all.get(&(namespace.to_owned(), job.to_owned()))?;
        Some(trace.before.iter().chain(&trace.lines).map(String::as_str).collect())
    }

    /// The job is gone, or another one has its name.
    pub fn forget(&self, namespace: &str, job: &str) {
        self.lock().remove(&(namespace.to_owned(), job.to_owned()));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(String, String), Trace>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Trace {
    fn push(&mut self, record: &Record) {
        // Numbers, names and sentences are always JSON.
        let Ok(mut line) = serde_json::to_string(record) else { return };
        line.push('\n');
        self.bytes += line.len();
        self.lines.push_back(line);
    }

    /// Forgets what is oldest, and begins with observations.
    fn shorten(&mut self, most: usize) {
        while self.bytes > most
            && let Some(line) = self.lines.pop_front()
        {
            self.bytes -= line.len();
            if line.starts_with("{\"policy\"") {
                self.before = Some(line);
            }
        }
        // A decision whose observations are forgotten.
        if self.before.is_some() {
            while let Some(line) = self.lines.pop_front_if(|line| line.starts_with("{\"decision\"")) {
                self.bytes -= line.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rectrain_policy::{ModePolicy, TrainingMode, Worker, replay};

    use super::*;

    fn policy() -> Policy {
        Policy {
            mode: Some(ModePolicy { window_seconds: 15, dwell_seconds: 30, ..ModePolicy::default() }),
            ..Policy::default()
        }
    }

    /// Two workers in `sync`, the second of which is so many times slower.
    fn observations(at_seconds: u64, slower: f64) -> Observations {
        let worker = |seconds: f64| Worker { batch_rows: 500, compute_seconds: vec![seconds] };
        Observations {
            at_seconds,
            mode: Some(TrainingMode::Sync),
            global_batch_rows: 1000,
            local_batch_rows: 500,
            staleness_tolerance: 4,
            workers: vec![worker(0.01), worker(0.01 * slower)],
            ..Observations::default()
        }
    }

    #[test]
    fn what_is_recorded_is_decided_again() {
        let traces = Traces::default();
        let mut history = rectrain_policy::History::default();
        let mut decided = 0;
        for look in 1..60 {
            let observations = observations(look * 5, if look < 20 { 1.0 } else { 10.0 });
            let decisions = history.advance(&policy(), &observations);
            decided += decisions.iter().filter(|decision| decision.acts()).count();
            traces.record(("ads", "clicks"), &policy(), &observations, &decisions);
        }
        let replayed = replay(&traces.of("ads", "clicks").unwrap()).unwrap();
        assert!(decided > 0);
        assert_eq!((replayed.observations, replayed.decisions.len(), replayed.missing.len()), (59, decided, 0));
        assert!(replayed.decisions.iter().all(|made| made.agrees));
        assert_eq!(traces.of("ads", "others"), None);
        traces.forget("ads", "clicks");
        assert_eq!(traces.of("ads", "clicks"), None);
    }

    #[test]
    fn the_beginning_of_a_long_trace_is_forgotten_and_its_policy_is_not() {
        let traces = Traces::default();
        let mut policies = [policy(), policy()];
        policies[1].scaling.cool_down_seconds += 1;
        for look in 1..=40_000 {
            let policy = &policies[usize::from(look > 39_900)];
            traces.record(("ads", "clicks"), policy, &observations(look, 1.0), &[]);
        }
        let text = traces.of("ads", "clicks").unwrap();
        assert!((MOST_OF_ONE * 9 / 10..=MOST_OF_ONE + 1000).contains(&text.len()), "{}", text.len());
        assert_eq!(text.lines().filter(|line| line.contains("\"policy\"")).count(), 2);
        let replayed = replay(&text).unwrap();
        assert!(replayed.observations > 1000 && replayed.standing.len() == 1, "{}", replayed.observations);
    }

    #[test]
    fn all_together_are_bounded() {
        let traces = Traces::default();
        for look in 1..2000 {
            for job in 0..20 {
                traces.record(("ads", &job.to_string()), &policy(), &observations(look * 5, 1.0), &[]);
            }
        }
        let bytes: usize = (0..20).filter_map(|job| traces.of("ads", &job.to_string())).map(|text| text.len()).sum();
        assert!(
            bytes <= MOST_BYTES + 20_000 && (0..20).all(|job| traces.of("ads", &job.to_string()).is_some()),
            "{bytes}"
        );
    }
}
