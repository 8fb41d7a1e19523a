//! A day in a shared cluster: automatic switching against either mode all day, and against an
//! oracle that knows the day in advance.

#[path = "../../examples/day/load.rs"]
mod load;
#[path = "../../examples/day/simulation.rs"]
mod simulation;

use self::simulation::Day;
use rectrain_policy::{AutoMode, ModePolicy, Policy};

#[test]
fn auto_reaches_nine_tenths_of_the_oracle_and_beats_either_mode() {
    let policy = Policy { mode: Some(ModePolicy::default()), ..Policy::default() };
    let mode = ModePolicy::default();
    let day = Day::new(1).unwrap();
    let oracle = day.oracle(mode.switch_seconds);
    let mut switched_at = Vec::new();
    let automatic = day.automatic(&policy, |observations, decisions| {
        if decisions.iter().any(|decision| decision.acts()) {
            switched_at.push(observations.at_seconds);
        }
    });
    let (sync, gba) = (day.fixed(AutoMode::Sync), day.fixed(AutoMode::Gba));
    assert!(oracle.samples >= sync.samples.max(gba.samples), "the oracle can stay in either mode");
    assert!(oracle.samples > 1.05 * sync.samples.max(gba.samples), "a day on which switching pays");
    assert!(automatic.samples >= 0.9 * oracle.samples, "{automatic:?} {oracle:?}");
    assert!(automatic.samples > sync.samples.max(gba.samples), "{automatic:?} {sync:?} {gba:?}");
    assert!(automatic.cost_per_million() < sync.cost_per_million().min(gba.cost_per_million()));
    for at in &switched_at {
        let within = switched_at.iter().filter(|other| (*at..at + 3600).contains(*other)).count();
        assert!(within <= mode.switches_per_hour as usize, "{switched_at:?}");
    }
}
