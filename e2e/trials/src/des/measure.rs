//! Runs a job in processes, and reads the bytes of its steps from the metrics of its embedding
//! worker, which sees every link.

use std::path::Path;
use std::time::{Duration, Instant};

use rectrain_harness::files::write;
use rectrain_harness::http::{sum_of, sum_with};
use rectrain_harness::watched::WatchedRun;
use serde_json::Value;

use super::formula::Bytes;
use crate::TrialError;
use crate::error::unmet;

/// Time between two looks at the metrics.
const LOOK: Duration = Duration::from_millis(100);
/// The time limit for the steps of one job.
const AT_MOST: Duration = Duration::from_secs(900);
/// Only an embedding worker has it.
const UNIQUE_IDS: &str = "rectrain_embedding_worker_unique_ids_total";
const BYTES: &str = "rectrain_wire_bytes_total";
const FRAMES: &str = "rectrain_wire_frames_total";

/// A link, as the metrics of an embedding worker show it.
struct Link {
    kind: &'static str,
    direction: &'static str,
    /// One frame a step for each parameter server, instead of one frame.
    is_of_servers: bool,
}

/// In the order of [`super::formula::LINKS`].
const LINKS: [Link; 5] = [
    Link { kind: "lookup", direction: "out", is_of_servers: true },
    Link { kind: "lookup", direction: "in", is_of_servers: true },
    Link { kind: "update", direction: "out", is_of_servers: true },
    Link { kind: "forward", direction: "out", is_of_servers: false },
    Link { kind: "backward", direction: "in", is_of_servers: false },
];
/// The link that ends a step.
const BACKWARD: &Link = &LINKS[4];

/// The means over the steps of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measured {
    /// The steps whose gradients the embedding worker has got.
    pub(super) steps: f64,
    /// Distinct ids of a batch.
    pub(super) unique: f64,
    /// Bytes of a step by link.
    pub(super) bytes: Bytes,
}

/// A job to measure.
pub(super) struct Job<'a> {
    pub(super) manifest: &'a Value,
    pub(super) sets: &'a [String],
    pub(super) servers: u32,
    pub(super) steps: u32,
}

/// Trains a job until its steps are done, and ends it. `folder` gets its manifest.
pub(super) fn measure(job: &Job<'_>, folder: &Path) -> Result<Measured, TrialError> {
    let file = folder.join("job.json");
    write(&file, job.manifest.to_string())?;
    let mut run = WatchedRun::start(&file, job.sets)?;
    let measured = watch(&mut run, f64::from(job.servers), f64::from(job.steps));
    let ended = run.end();
    let measured = measured?;
    ended?;
    Ok(measured)
}

fn watch(run: &mut WatchedRun, servers: f64, steps: f64) -> Result<Measured, TrialError> {
    let started = Instant::now();
    let mut last: Option<Measured> = None;
    while started.elapsed() < AT_MOST {
        run.check_alive()?;
        last = run.metrics().iter().find_map(|text| read(text, servers)).or(last);
        if let Some(measured) = last.filter(|measured| measured.steps >= steps) {
            return Ok(measured);
        }
        std::thread::sleep(LOOK);
    }
    let found = last.map_or(0.0, |measured| measured.steps);
    Err(unmet(format!("{steps} steps within {AT_MOST:?}"), format!("{found} steps")))
}

/// Reads the metrics of an embedding worker. `None` if they are another role's, or no step is done.
/// All frames of a link have nearly the same size, so the mean frame is exact in the middle of a
/// step, too.
fn read(text: &str, servers: f64) -> Option<Measured> {
    let ids = sum_of(text, UNIQUE_IDS)?;
    let pieces = frames(text, "put_batch", "out")?;
    let mut bytes = [0.0; LINKS.len()];
    for (bytes, link) in bytes.iter_mut().zip(&LINKS) {
        *bytes = link.mean_frame(text)? * if link.is_of_servers { servers } else { 1.0 };
    }
    let steps = frames(text, BACKWARD.kind, BACKWARD.direction)?;
    Some(Measured { steps, unique: ids / pieces, bytes })
}

impl Link {
    /// The mean bytes of a frame. `None` before the first.
    fn mean_frame(&self, text: &str) -> Option<f64> {
        let frames = frames(text, self.kind, self.direction)?;
        Some(of_kind(text, BYTES, self.kind, self.direction)? / frames)
    }
}

/// The frames of a kind so far. `None` if there are none.
fn frames(text: &str, kind: &str, direction: &str) -> Option<f64> {
    of_kind(text, FRAMES, kind, direction).filter(|frames| *frames > 0.0)
}

fn of_kind(text: &str, metric: &str, kind: &str, direction: &str) -> Option<f64> {
    sum_with(text, metric, &[&format!("kind=\"{kind}\""), &format!("direction=\"{direction}\"")])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(kinds: &[(&str, &str, u32, u32)]) -> String {
        let of_kind = |(kind, direction, frames, bytes): &(&str, &str, u32, u32)| {
            let labels = format!("{{direction=\"{direction}\",kind=\"{kind}\"}}");
            format!("{FRAMES}{labels} {frames}\n{BYTES}{labels} {bytes}\n")
        };
        kinds.iter().map(of_kind).collect()
    }

    /// Six pieces have arrived, and four are trained with two servers.
    #[test]
    fn bytes_of_a_step_are_mean_frames_of_each_link() {
        let kinds = metrics(&[
            ("lookup", "out", 10, 1000),
            ("lookup", "in", 9, 450),
            ("update", "out", 8, 2400),
            ("update", "in", 8, 80),
            ("forward", "out", 5, 3500),
            ("forward", "in", 5, 50),
            ("backward", "in", 4, 3600),
            ("backward", "out", 4, 40),
            ("put_batch", "out", 6, 60),
            ("put_batch", "in", 7, 70_000),
        ]);
        let text = format!("{UNIQUE_IDS}{{replica=\"0\"}} 120\n{kinds}");
        let bytes = [200.0, 100.0, 600.0, 700.0, 900.0];
        assert_eq!(read(&text, 2.0), Some(Measured { steps: 4.0, unique: 20.0, bytes }));
    }

    #[test]
    fn other_roles_and_jobs_before_their_first_step_have_no_figures() {
        let all = metrics(&[("lookup", "in", 1, 9), ("put_batch", "out", 1, 9)]);
        assert_eq!(read(&all, 2.0), None);
        assert_eq!(read(&format!("{UNIQUE_IDS} 120\n{all}"), 2.0), None);
    }
}
