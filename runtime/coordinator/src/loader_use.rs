//! Measures how busy the loaders are, and how long dense workers wait for data. Pure: every time is
//! an argument.

use std::collections::BTreeMap;
use std::time::Instant;

use rectrain_modes::loader_pace::ChunkNumber;
use rectrain_policy::LoaderUse;

/// The use of the loaders since the last look.
#[derive(Debug, Default)]
pub(super) struct LoaderUseMeter {
    since: Option<Instant>,
    /// By loader: the chunk that it has leased and reads, and since when.
    reading: BTreeMap<u32, (ChunkNumber, Instant)>,
    /// By loader: seconds of reads that have ended.
    read: BTreeMap<u32, f64>,
    /// By rank: seconds of waiting for data, and seconds of steps with that wait.
    waits: BTreeMap<u32, (f64, f64)>,
}

impl LoaderUseMeter {
    /// A loader begins to read a chunk that it has leased.
    pub(super) fn begins(&mut self, loader: u32, chunk: ChunkNumber, now: Instant) {
        self.reading.insert(loader, (chunk, now));
    }

    /// A loader has read a chunk. It may have read another loader's beside its own.
    pub(super) fn ends(&mut self, loader: u32, chunk: ChunkNumber, now: Instant) {
        let own = self.reading.get(&loader).copied().filter(|(own, _)| *own == chunk);
        if let Some((_, begun)) = own {
            self.reading.remove(&loader);
            *self.read.entry(loader).or_default() += self.seconds_of_look(begun, now);
        }
    }

    /// A dense worker has reported its steps.
    pub(super) fn waited(&mut self, rank: u32, wait_seconds: f64, step_seconds: f64) {
        let (waits, steps) = self.waits.entry(rank).or_default();
        *waits += wait_seconds;
        *steps += step_seconds;
    }

    /// The use of the first `loaders` loaders since the last look. `None` at the first look, and
    /// without a step.
    pub(super) fn look(&mut self, loaders: u32, now: Instant) -> Option<LoaderUse> {
        let measured = self.measured(loaders, now);
        self.since = Some(now);
        self.read.clear();
        self.waits.clear();
        measured
    }

    fn measured(&self, loaders: u32, now: Instant) -> Option<LoaderUse> {
        let seconds = now.saturating_duration_since(self.since?).as_secs_f64();
        let steps = self.waits.values().filter(|(_, steps)| *steps > 0.0);
        let waiting = steps.map(|(wait, steps)| wait / steps).reduce(f64::min)?;
        let share = |loader: u32| {
            let ended = self.read.get(&loader).copied().unwrap_or(0.0);
            let present = self.reading.get(&loader).map_or(0.0, |(_, begun)| self.seconds_of_look(*begun, now));
            (ended + present) / seconds
        };
        let mut reading: Vec<f64> = (0..loaders).map(share).collect();
        reading.sort_by(f64::total_cmp);
        // The lower median: a slow loader does not count.
        let median = *reading.get(reading.len().checked_sub(1)? / 2)?;
        (seconds > 0.0).then(|| LoaderUse { waiting: waiting.clamp(0.0, 1.0), reading: median.clamp(0.0, 1.0) })
    }

    /// Seconds of a read that lie after the last look.
    fn seconds_of_look(&self, begun: Instant, now: Instant) -> f64 {
        let begun = self.since.map_or(begun, |since| begun.max(since));
        now.saturating_duration_since(begun).as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn reads_and_waits_become_shares_of_the_time_between_two_looks() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut meter = LoaderUseMeter::default();
        meter.waited(0, 1.0, 2.0);
        assert_eq!(meter.look(2, at(0)), None, "the first look");
        assert_eq!(meter.look(2, at(10)), None, "no step");
        // Loader 0 reads from 8 to 14 and from 18 on; loader 1 all the time.
        meter.begins(0, (0, 0), at(8));
        meter.begins(1, (0, 1), at(10));
        meter.ends(0, (0, 0), at(14));
        meter.begins(0, (0, 2), at(18));
        // It reads the chunk of loader 1, too.
        meter.ends(0, (0, 1), at(19));
        meter.waited(0, 3.0, 4.0);
        meter.waited(1, 1.0, 2.0);
        meter.waited(1, 0.0, 2.0);
        let close = |load: Option<LoaderUse>, waiting: f64, reading: f64| {
            let load = load.unwrap();
            assert!((load.waiting - waiting).abs() < 1e-9 && (load.reading - reading).abs() < 1e-9, "{load:?}");
        };
        close(meter.look(2, at(20)), 0.25, 0.6);
        meter.ends(0, (0, 2), at(23));
        meter.waited(1, 0.0, 2.0);
        close(meter.look(1, at(30)), 0.0, 0.3);
        meter.waited(1, 5.0, 2.0);
        close(meter.look(2, at(40)), 1.0, 0.0);
        meter.waited(1, 5.0, 2.0);
        assert_eq!(meter.look(2, at(40)), None, "no time has passed");
    }
}
