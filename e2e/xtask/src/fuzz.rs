//! `cargo xtask fuzz`: fuzzes everything that reads bytes of others.

use rectrain_harness::HarnessError;
use rectrain_harness::cargo::{cargo_command, run};

use crate::error::XtaskError;

const USAGE: &str = "usage: cargo xtask fuzz [--minutes N] [AREA...]
  --minutes N  the time for each area, 10 if not given
  AREA         reader, manifest, set, checkpoints, publications or frames; all if none is given";

/// The areas of the crates' tests `fuzz`.
const AREAS: [&str; 6] = ["reader", "manifest", "set", "checkpoints", "publications", "frames"];

/// Fuzzes the areas one after the other.
pub(crate) fn fuzz(arguments: &[&str]) -> Result<(), XtaskError> {
    let (minutes, areas) = parse(arguments).ok_or(HarnessError::Usage(USAGE))?;
    let mut cargo = cargo_command();
    cargo.env("RECTRAIN_FUZZ_SECONDS", (u64::from(minutes) * 60).to_string());
    cargo.env("RECTRAIN_FUZZ_AREAS", areas.join(","));
    let tests = ["test", "--release", "--workspace", "--no-fail-fast", "--test", "fuzz", "--", "--nocapture"];
    run(cargo, &tests, "an input broke a check: the output above has it in hexadecimal")?;
    Ok(())
}

/// The minutes of each area, and the areas; `None` for wrong arguments.
fn parse<'a>(arguments: &[&'a str]) -> Option<(u16, Vec<&'a str>)> {
    let (minutes, areas) = match arguments {
        ["--minutes", minutes, areas @ ..] => (minutes.parse::<u16>().ok().filter(|minutes| *minutes > 0)?, areas),
        areas => (10, areas),
    };
    let is_known = areas.iter().all(|area| AREAS.contains(area));
    let areas = if areas.is_empty() { &AREAS[..] } else { areas };
    is_known.then(|| (minutes, areas.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_and_areas_have_defaults_and_are_checked() {
        assert_eq!(parse(&[]), Some((10, AREAS.to_vec())));
        assert_eq!(parse(&["--minutes", "3", "set"]), Some((3, vec!["set"])));
        assert_eq!(parse(&["frames", "reader"]), Some((10, vec!["frames", "reader"])));
        for wrong in [&["--minutes"][..], &["--minutes", "0"], &["--minutes", "x"], &["other"]] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
    }
}
