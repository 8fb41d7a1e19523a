//! Traces: a replay repeats the recorded decisions.

use crate::world::{INTERVAL, World, policy};
use rectrain_policy::{Decision, History, Record, replay};

/// A recorded hour with a slow worker and growing load.
fn recorded() -> (Vec<String>, Vec<Decision>) {
    let policy = policy(1, 16);
    let (mut world, mut history) =
        (World { slowdown: 2.5, embedding_load: 4.0, noise: 0.1, ..World::new(7) }, History::default());
    let line = |record: &Record| serde_json::to_string(record).unwrap();
    let mut lines = vec![line(&Record::Policy(Box::new(policy.clone()))), String::new()];
    let mut decisions = Vec::new();
    for _ in 0..3600 / INTERVAL {
        world.now += INTERVAL;
        let observations = world.observe();
        lines.push(line(&Record::Observations(Box::new(observations.clone()))));
        for decision in history.advance(&policy, &observations).into_iter().filter(Decision::acts) {
            lines.push(line(&Record::Decision(decision.clone())));
            decisions.push(decision);
        }
    }
    (lines, decisions)
}

#[test]
fn a_replay_repeats_every_recorded_decision() {
    let (lines, decisions) = recorded();
    let replay = replay(&lines.join("\n")).unwrap();
    assert!(decisions.len() >= 2);
    assert_eq!(replay.observations as u64, 3600 / INTERVAL);
    assert_eq!(replay.decisions.iter().map(|made| made.decision.clone()).collect::<Vec<_>>(), decisions);
    assert!(replay.decisions.iter().all(|made| made.agrees) && replay.missing.is_empty());
    assert_eq!(replay.standing.len(), 4);
    let of = &replay.decisions[0];
    let observed = format!("\"atSeconds\":{}", of.decision.at_seconds);
    assert!(lines[of.line - 1].contains(&observed), "its line is the line of its observations");
}

#[test]
fn a_replay_marks_missing_and_new_decisions() {
    let (mut lines, decisions) = recorded();
    let first = lines.iter().position(|line| line.starts_with("{\"decision\"")).unwrap();
    let changed = Decision { at_seconds: 5, ..decisions[0].clone() };
    lines[first] = serde_json::to_string(&Record::Decision(changed.clone())).unwrap();
    let replay = replay(&lines.join("\n")).unwrap();
    assert_eq!(replay.missing, [(first + 1, changed)]);
    assert!(!replay.decisions[0].agrees && replay.decisions[1..].iter().all(|made| made.agrees));
}

#[test]
fn every_mistake_in_a_trace_names_its_line() {
    let policy = r#"{"policy": {"mode": {}}}"#;
    for (trace, expected) in [
        ("{}".to_owned(), "line 1: expected an object with `policy`, `observations` or `decision`"),
        ("\n{\"policy\": {\"mood\": {}}}".to_owned(), "line 2: expected an object with"),
        ("{\"policy\": {\"mood\": {}}}".to_owned(), "unknown field `mood`"),
        ("{\"observations\": {\"atSeconds\": 1}}".to_owned(), "line 1: observations without a `policy`"),
        (
            format!("{policy}\n{{\"observations\": {{\"atSeconds\": 1, \"waitSeconds\": -1}}}}"),
            "line 2: observations: waitSeconds is -1",
        ),
        (
            format!("{policy}\n{{\"observations\": {{\"atSeconds\": 2}}}}\n{{\"observations\": {{\"atSeconds\": 2}}}}"),
            "line 3: observations: atSeconds is 2: expected more than 2",
        ),
        (
            "{\"policy\": {\"mode\": {\"dwellSeconds\": 3}}}".to_owned(),
            "line 1: policy: mode.dwellSeconds: expected at least windowSeconds",
        ),
        (
            "{\"policy\": {\"ps\": {\"bounds\": {\"min\": 3, \"max\": 2}}}}".to_owned(),
            "ps.bounds: expected 1 <= min <= max",
        ),
    ] {
        let error = replay(&trace).unwrap_err().to_string();
        assert!(error.contains(expected), "{trace}: {error}");
    }
}
