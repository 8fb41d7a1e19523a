//! `rectrain policy replay`: makes the operator's decisions again from a recorded trace of its
//! measurements ([`rectrain_policy::replay`]).

use comfy_table::{Table, presets};
use rectrain_policy::{Replay, replay};

use crate::args::PolicyCommand;
use crate::failure::Failure;
use crate::{input, output};

pub(crate) fn run(command: &PolicyCommand) -> Result<(), Failure> {
    let PolicyCommand::Replay { trace, json } = command;
    let user = |error: &dyn std::fmt::Display| Failure::User(format!("{}: {error}", trace.display()));
    let text = input::read(trace, "trace")?;
    let replay = replay(&text).map_err(|error| user(&error))?;
    if *json {
        output::print(json_lines(&replay))?;
    } else {
        output::line(table(&replay))?;
    }
    Ok(())
}

fn json_lines(replay: &Replay) -> String {
    // Numbers and texts can always be written as JSON.
    let lines = replay.decisions.iter().filter_map(|made| serde_json::to_string(made).ok());
    lines.map(|line| line + "\n").collect()
}

/// One row per decision, then the recorded decisions that were not made again. Below the table, the
/// decision about each subject at the end of the trace.
fn table(replay: &Replay) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY).set_header(["line", "at", "about", "decision", "recorded", "why"]);
    for made in &replay.decisions {
        let decision = &made.decision;
        table.add_row([
            made.line.to_string(),
            decision.at_seconds.to_string(),
            decision.subject.to_string(),
            decision.action.to_string(),
            if made.agrees { "" } else { "differs" }.to_owned(),
            decision.reason.clone(),
        ]);
    }
    for (line, decision) in &replay.missing {
        table.add_row([
            line.to_string(),
            decision.at_seconds.to_string(),
            decision.subject.to_string(),
            decision.action.to_string(),
            "not made again".to_owned(),
            decision.reason.clone(),
        ]);
    }
    let latest = replay.standing.iter().map(|decision| format!("\n{}: {}", decision.subject, decision.reason));
    format!(
        "{table}\n{} observations, {} decisions; at the end:{}",
        replay.observations,
        replay.decisions.len(),
        latest.collect::<String>()
    )
}
