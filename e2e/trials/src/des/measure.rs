//! Runs a job in processes, and reads the bytes of its steps from the metrics of its embedding
//! worker, which sees all links but two. The dense worker sees the links of a tower's first layer.

use std::path::Path;
use std::time::{Duration, Instant};

use rectrain_harness::files::write;
use rectrain_harness::http::{sum_of, sum_with};
use rectrain_harness::watched::WatchedRun;
use serde_json::Value;

use super::formula::{Bytes, LINKS as NAMES};
use crate::TrialError;
use crate::error::unmet;

/// Time between two looks at the metrics.
const LOOK: Duration = Duration::from_millis(100);
/// The time limit for the steps of one job.
const AT_MOST: Duration = Duration::from_secs(900);
/// Only an embedding worker has it.
const UNIQUE_IDS: &str = "rectrain_embedding_worker_unique_ids_total";
/// Only a dense worker has it.
const TRAINED: &str = "rectrain_dense_worker_steps_total";
const BYTES: &str = "rectrain_wire_bytes_total";
const FRAMES: &str = "rectrain_wire_frames_total";

/// A link, as the metrics of a worker show it.
struct Link {
    kind: &'static str,
    direction: &'static str,
    /// One frame a step for each parameter server, instead of one frame.
    is_of_servers: bool,
}

/// Of an embedding worker, in the order of [`super::formula::LINKS`].
const LINKS: [Link; 5] = [
    Link { kind: "lookup", direction: "out", is_of_servers: true },
    Link { kind: "lookup", direction: "in", is_of_servers: true },
    Link { kind: "update", direction: "out", is_of_servers: true },
    Link { kind: "forward", direction: "out", is_of_servers: false },
    Link { kind: "backward", direction: "in", is_of_servers: false },
];
/// Of a dense worker, in the order of [`super::formula::LINKS`] after the others. Only a job in
/// `des` with a tower has them.
const OF_FIRST_LAYER: [Link; 2] = [
    Link { kind: "put_first_layer", direction: "out", is_of_servers: true },
    Link { kind: "first_layer_gradient", direction: "in", is_of_servers: true },
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
    /// Whether the first layer of a tower travels.
    pub(super) has_first_layer: bool,
}

/// Trains a job until its steps are done, and ends it. `folder` gets its manifest.
pub(super) fn measure(job: &Job<'_>, folder: &Path) -> Result<Measured, TrialError> {
    let file = folder.join("job.json");
    write(&file, job.manifest.to_string())?;
    let mut run = WatchedRun::start(&file, job.sets)?;
    let measured = watch(&mut run, job);
    let ended = run.end();
    let measured = measured?;
    ended?;
    Ok(measured)
}

fn watch(run: &mut WatchedRun, job: &Job<'_>) -> Result<Measured, TrialError> {
    let (servers, steps) = (f64::from(job.servers), f64::from(job.steps));
    let started = Instant::now();
    let mut last: Option<Measured> = None;
    while started.elapsed() < AT_MOST {
        run.check_alive()?;
        let texts = run.metrics();
        let of_layer = match job.has_first_layer {
            true => texts.iter().find_map(|text| read_first_layer(text, servers)),
            false => Some([0.0; OF_FIRST_LAYER.len()]),
        };
        let found = texts.iter().find_map(|text| read(text, servers));
        last = found.zip(of_layer).map(|(measured, of_layer)| measured.with(of_layer)).or(last);
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
    let mut bytes = [0.0; NAMES.len()];
    for (bytes, link) in bytes.iter_mut().zip(&LINKS) {
        *bytes = link.bytes(text, servers)?;
    }
    let steps = frames(text, BACKWARD.kind, BACKWARD.direction)?;
    Some(Measured { steps, unique: ids / pieces, bytes })
}

/// Reads the bytes of a step of [`OF_FIRST_LAYER`]. `None` if the metrics are another role's, or no
/// step is done.
fn read_first_layer(text: &str, servers: f64) -> Option<[f64; OF_FIRST_LAYER.len()]> {
    sum_of(text, TRAINED)?;
    let [put, gradient] = OF_FIRST_LAYER.map(|link| link.bytes(text, servers));
    Some([put?, gradient?])
}

impl Measured {
    /// The same with the bytes of [`OF_FIRST_LAYER`].
    fn with(mut self, of_layer: [f64; OF_FIRST_LAYER.len()]) -> Self {
        self.bytes.iter_mut().skip(LINKS.len()).zip(of_layer).for_each(|(bytes, found)| *bytes = found);
        self
    }
}

impl Link {
    /// The bytes of a step. `None` before the first frame.
    fn bytes(&self, text: &str, servers: f64) -> Option<f64> {
        Some(self.mean_frame(text)? * if self.is_of_servers { servers } else { 1.0 })
    }

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
        let bytes = [200.0, 100.0, 600.0, 700.0, 900.0, 0.0, 0.0];
        let measured = read(&text, 2.0).expect("a step is done");
        assert_eq!(measured, Measured { steps: 4.0, unique: 20.0, bytes });
        assert_eq!(measured.with([50.0, 60.0]).bytes, [200.0, 100.0, 600.0, 700.0, 900.0, 50.0, 60.0]);
    }

    /// Two servers get three first layers each. The replies of a server have the same kind.
    #[test]
    fn the_first_layer_is_counted_by_the_dense_worker() {
        let kinds = metrics(&[
            ("put_first_layer", "out", 6, 600),
            ("put_first_layer", "in", 6, 60),
            ("first_layer_gradient", "in", 4, 320),
            ("first_layer_gradient", "out", 4, 40),
        ]);
        assert_eq!(read_first_layer(&kinds, 2.0), None, "of a server");
        assert_eq!(read_first_layer(&format!("{TRAINED} 2\n{kinds}"), 2.0), Some([200.0, 160.0]));
        assert_eq!(read_first_layer(&format!("{TRAINED} 0\n"), 2.0), None);
    }

    #[test]
    fn other_roles_and_jobs_before_their_first_step_have_no_figures() {
        let all = metrics(&[("lookup", "in", 1, 9), ("put_batch", "out", 1, 9)]);
        assert_eq!(read(&all, 2.0), None);
        assert_eq!(read(&format!("{UNIQUE_IDS} 120\n{all}"), 2.0), None);
    }
}
