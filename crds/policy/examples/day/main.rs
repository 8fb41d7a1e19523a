//! A day in a shared cluster: the samples and the cost of automatic mode switching, against either
//! mode all day and against an oracle that knows the day in advance.
//!
//! `cargo run --release -p rectrain-policy --example day -- [SEED] [--trace FILE]`. The trace is
//! input for `rectrain policy replay`.

mod load;
mod simulation;

use std::io::Write;

use rectrain_policy::{AutoMode, Decision, ModePolicy, Policy, Record};

use crate::simulation::{Day, Outcome};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let seed = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(1);
    let trace = arguments.iter().position(|argument| argument == "--trace").and_then(|place| arguments.get(place + 1));
    let policy = Policy { mode: Some(ModePolicy::default()), ..Policy::default() };
    let day = Day::new(seed)?;
    let mut lines = vec![serde_json::to_string(&Record::Policy(Box::new(policy.clone())))?];
    let mut record = |observations: &_, decisions: &[Decision]| {
        let decided = decisions.iter().filter(|decision| decision.acts()).cloned().map(Record::Decision);
        let records = [Record::Observations(Box::new(Clone::clone(observations)))].into_iter().chain(decided);
        lines.extend(records.filter_map(|record| serde_json::to_string(&record).ok()));
    };
    let switch_seconds = ModePolicy::default().switch_seconds;
    let oracle = day.oracle(switch_seconds);
    println!("{:10} {:>14} {:>9} {:>9} {:>7} {:>12}", "", "samples", "of oracle", "switches", "in gba", "cost/million");
    let show = |name: &str, outcome: &Outcome| {
        println!(
            "{name:10} {:>14.0} {:>8.1}% {:>9} {:>6.0}% {:>12.4}",
            outcome.samples,
            100.0 * outcome.samples / oracle.samples,
            outcome.switches,
            100.0 * outcome.in_gba,
            outcome.cost_per_million()
        );
    };
    show("sync", &day.fixed(AutoMode::Sync));
    show("gba", &day.fixed(AutoMode::Gba));
    show("automatic", &day.automatic(&policy, &mut record));
    show("oracle", &oracle);
    if let Some(path) = trace {
        let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
        lines.iter().try_for_each(|line| writeln!(file, "{line}"))?;
    }
    Ok(())
}
