//! Makes dense workers slow on purpose, to see how a training mode copes with stragglers.
//! `--slow denseWorker-1=4x` multiplies their computing time. `--cpus denseWorker-1=0.25` limits
//! their CPU time: each limited process gets its own cgroup.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::failure::Failure;

const ROLE: &str = "denseWorker-";

/// `denseWorker-1=4x`: the worker takes four times as long to compute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Slow {
    index: u32,
    factor: f64,
}

impl FromStr for Slow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (index, value) = worker_and_value(text)?;
        let factor = value.strip_suffix('x').unwrap_or(value).parse::<f64>().ok();
        match factor {
            Some(factor) if (1.0..=1e6).contains(&factor) => Ok(Self { index, factor }),
            _ => Err(format!("expected a factor of at least 1 such as 4x, found `{value}`")),
        }
    }
}

/// `denseWorker-1=0.25`: the worker gets a quarter of a core.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cpus {
    index: u32,
    cores: f64,
}

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (index, value) = worker_and_value(text)?;
        match value.parse::<f64>() {
            Ok(cores) if (0.01..=1024.0).contains(&cores) => Ok(Self { index, cores }),
            _ => Err(format!("expected a number of cores from 0.01 to 1024 such as 0.25, found `{value}`")),
        }
    }
}

fn worker_and_value(text: &str) -> Result<(u32, &str), String> {
    let expected = || format!("expected {ROLE}INDEX=VALUE, found `{text}`");
    let (worker, value) = text.split_once('=').ok_or_else(expected)?;
    let index = worker.strip_prefix(ROLE).ok_or_else(expected)?.parse().map_err(|_| expected())?;
    Ok((index, value))
}

/// The factor of each slowed dense worker, by index. Refuses an index that the job does not have.
pub(crate) fn factors(slow: &[Slow], workers: u32) -> Result<BTreeMap<u32, f64>, Failure> {
    slow.iter().map(|slow| Ok((known(slow.index, workers, "--slow")?, slow.factor))).collect()
}

/// The cores of each limited dense worker, by index. Refuses an index that the job does not have.
pub(crate) fn cores(cpus: &[Cpus], workers: u32) -> Result<BTreeMap<u32, f64>, Failure> {
    cpus.iter().map(|cpus| Ok((known(cpus.index, workers, "--cpus")?, cpus.cores))).collect()
}

fn known(index: u32, workers: u32, flag: &str) -> Result<u32, Failure> {
    if index < workers {
        return Ok(index);
    }
    Err(Failure::User(format!("{flag} {ROLE}{index}: the job has {workers} dense workers, numbered from 0")))
}

/// A limit on one process's CPU time. Drop it after the process has ended: the cgroup can only be
/// removed then.
pub(crate) struct CpuLimit {
    folder: PathBuf,
}

impl CpuLimit {
    /// Puts process `pid` into a cgroup that gets `cores` cores. Supports versions 1 and 2 of
    /// cgroups.
    pub(crate) fn put(pid: u32, cores: f64) -> Result<Self, Failure> {
        const PERIOD_MICROSECONDS: f64 = 20_000.0;
        let quota = (cores * PERIOD_MICROSECONDS).max(1_000.0) as u64;
        let period = ((quota as f64 / cores) as u64).clamp(1_000, 1_000_000);
        let root = Path::new("/sys/fs/cgroup");
        let unified = root.join("cgroup.controllers").exists();
        let folder = if unified { root.to_owned() } else { root.join("cpu") }.join(format!("rectrain-{pid}"));
        let settings = if unified {
            vec![("cpu.max", format!("{quota} {period}"))]
        } else {
            vec![("cpu.cfs_period_us", period.to_string()), ("cpu.cfs_quota_us", quota.to_string())]
        };
        let limit = Self { folder };
        limit.write(&settings, pid).map_err(|error| {
            Failure::Failed(format!(
                "cannot limit the CPU time of process {pid} with the cgroup {}: {error}; --cpus needs root and \
                 Linux's cgroups; --slow works without them",
                limit.folder.display()
            ))
        })?;
        Ok(limit)
    }

    fn write(&self, settings: &[(&str, String)], pid: u32) -> std::io::Result<()> {
        std::fs::create_dir(&self.folder)?;
        for (file, value) in settings {
            std::fs::write(self.folder.join(file), value)?;
        }
        std::fs::write(self.folder.join("cgroup.procs"), pid.to_string())
    }
}

impl Drop for CpuLimit {
    fn drop(&mut self) {
        // The folder is missing if it could not be made.
        let _gone = std::fs::remove_dir(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_slow_workers_are_refused_with_the_expected_form() {
        assert_eq!("denseWorker-1=4x".parse(), Ok(Slow { index: 1, factor: 4.0 }));
        assert_eq!("denseWorker-12=1.5".parse(), Ok(Slow { index: 12, factor: 1.5 }));
        assert_eq!("denseWorker-0=0.25".parse(), Ok(Cpus { index: 0, cores: 0.25 }));
        for wrong in ["denseWorker-1", "ps-1=4x", "denseWorker-x=4x", "denseWorker-1=0.5x", "denseWorker-1=x"] {
            assert!(wrong.parse::<Slow>().unwrap_err().starts_with("expected"), "{wrong}");
        }
        assert!("denseWorker-1=0".parse::<Cpus>().is_err());
        assert!(factors(&[Slow { index: 2, factor: 4.0 }], 2).is_err());
    }
}
