//! The lease on a checkpoint path: a file `lease.json` that names the one run that may write
//! checkpoints there. The coordinator of the run renews it.
//!
//! Another run may take over a lease whose last heartbeat is at least [`EXPIRY_INTERVALS`]
//! intervals old. It may also take over one whose process ran on this machine and has ended. A
//! process of the same run may always take it over. A writer replaces only the version that it has
//! read, so of two runs that start at the same time one gets the lease.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rectrain_storage::{Directory, Version};
use serde::{Deserialize, Serialize};

use crate::error::CheckpointError;
use crate::name::CheckpointId;

/// The file's name in the checkpoint path.
pub const LEASE: &str = "lease.json";
/// A lease expires this many intervals after its last heartbeat.
pub const EXPIRY_INTERVALS: u32 = 6;
/// Attempts to get a lease that other processes change at the same time.
const ATTEMPTS: u32 = 5;

/// A run that wants the lease.
#[derive(Debug, Clone)]
pub struct Claim {
    /// Identifies the run across all its attempts.
    pub run: String,
    /// The job's name, for messages.
    pub job: String,
    /// The time between two heartbeats.
    pub interval: Duration,
}

/// The way in which a run got the lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acquired {
    /// No run had it, or an earlier process of this run.
    Free,
    /// The process of another run had it and has ended. Describes that run.
    Ended(String),
    /// Another run had it, and it has expired. Describes that run.
    Expired(String),
}

/// The content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    run: String,
    job: String,
    /// Random: tells two processes of one run apart.
    holder: String,
    process: Process,
    /// Milliseconds since 1970.
    heartbeat: u64,
    /// Milliseconds.
    interval: u64,
}

/// A process, as other processes of the same machine can find it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    host: String,
    /// The boot of the machine and its namespace of processes. Empty: unknown.
    machine: String,
    pid: u32,
    /// The clock tick of the machine at which the process started.
    start: u64,
}

/// A lease, held or not yet.
#[derive(Debug)]
pub struct Lease {
    directory: Directory,
    claim: Claim,
    holder: String,
    state: State,
}

#[derive(Debug)]
enum State {
    NotYet,
    Held(Version),
    Released,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.release_now();
    }
}

impl Lease {
    /// A lease on this directory that is not held yet.
    #[must_use]
    pub fn new(directory: Directory, claim: Claim) -> Self {
        Self { directory, claim, holder: CheckpointId::random().to_string(), state: State::NotYet }
    }

    /// Gets the lease.
    ///
    /// # Errors
    /// [`CheckpointError::Leased`] if another run holds it, and errors of the storage.
    pub async fn acquire(&mut self, now: SystemTime) -> Result<Acquired, CheckpointError> {
        for _ in 0..ATTEMPTS {
            let found = self.directory.read_version(LEASE).await?;
            let acquired = match &found {
                Some((bytes, _)) => self.judge(bytes, now)?,
                None => Acquired::Free,
            };
            let version = found.as_ref().map(|(_, version)| version);
            if let Some(version) = self.directory.replace(LEASE, version, self.record(now)).await? {
                self.state = State::Held(version);
                return Ok(acquired);
            }
        }
        Err(self.refused("a run that is starting"))
    }

    /// Renews the lease. Gets it first if this was not possible before.
    ///
    /// # Errors
    /// [`CheckpointError::Leased`] if another run has it now, [`CheckpointError::Replaced`] if
    /// another process of this run has it, and errors of the storage.
    pub async fn renew(&mut self, now: SystemTime) -> Result<(), CheckpointError> {
        let version = match &self.state {
            State::Held(version) => version,
            State::NotYet => return self.acquire(now).await.map(drop),
            State::Released => return Err(self.refused("no run any longer: this one has released it")),
        };
        if let Some(version) = self.directory.replace(LEASE, Some(version), self.record(now)).await? {
            self.state = State::Held(version);
            return Ok(());
        }
        match self.directory.read_version(LEASE).await? {
            // The user has deleted it.
            None => self.acquire(now).await.map(drop),
            Some((bytes, version)) => match decode(&bytes) {
                // The answer to our own write was lost.
                Some(record) if record.holder == self.holder => {
                    self.state = State::Held(version);
                    Ok(())
                }
                Some(record) if record.run == self.claim.run => {
                    Err(CheckpointError::Replaced { path: self.directory.name().to_owned() })
                }
                Some(record) => Err(self.refused(&record.describe(now))),
                None => Err(self.refused("an unknown run")),
            },
        }
    }

    /// Releases the lease if this process holds it.
    pub async fn release(&mut self) -> Result<(), CheckpointError> {
        if self.directory.is_local() {
            self.release_now();
            return Ok(());
        }
        if let State::Held(_) = std::mem::replace(&mut self.state, State::Released)
            && let Some((bytes, _)) = self.directory.read_version(LEASE).await?
            && decode(&bytes).is_some_and(|record| record.holder == self.holder)
        {
            self.directory.delete(&[LEASE.to_owned()]).await?;
        }
        Ok(())
    }

    /// As [`Self::release`], without waiting. In a bucket the lease stays until it expires.
    pub fn release_now(&mut self) {
        if let State::Held(version) = std::mem::replace(&mut self.state, State::Released) {
            self.directory.delete_version_now(LEASE, &version);
        }
    }

    /// Whether this process may take over the lease in the file.
    fn judge(&self, bytes: &[u8], now: SystemTime) -> Result<Acquired, CheckpointError> {
        let Some(record) = decode(bytes) else { return Err(self.refused("an unknown run")) };
        if record.run == self.claim.run {
            return Ok(Acquired::Free);
        }
        let held_by = record.describe(now);
        if record.process.has_ended() {
            return Ok(Acquired::Ended(held_by));
        }
        let expiry = Duration::from_millis(record.interval) * EXPIRY_INTERVALS;
        if record.age(now) >= expiry { Ok(Acquired::Expired(held_by)) } else { Err(self.refused(&held_by)) }
    }

    fn record(&self, now: SystemTime) -> Vec<u8> {
        let record = Record {
            run: self.claim.run.clone(),
            job: self.claim.job.clone(),
            holder: self.holder.clone(),
            process: Process::this(),
            heartbeat: milliseconds(now),
            interval: u64::try_from(self.claim.interval.as_millis()).unwrap_or(u64::MAX),
        };
        // The encoding of texts and numbers cannot fail.
        serde_json::to_vec(&record).unwrap_or_default()
    }

    fn refused(&self, held_by: &str) -> CheckpointError {
        CheckpointError::Leased { path: self.directory.name().to_owned(), held_by: held_by.to_owned() }
    }
}

fn decode(bytes: &[u8]) -> Option<Record> {
    serde_json::from_slice(bytes).ok()
}

fn milliseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Record {
    /// The time since the last heartbeat. Zero if this machine's clock is behind.
    fn age(&self, now: SystemTime) -> Duration {
        Duration::from_millis(milliseconds(now).saturating_sub(self.heartbeat))
    }

    fn describe(&self, now: SystemTime) -> String {
        let Self { run, job, process, .. } = self;
        let age = self.age(now).as_secs();
        format!("run {run} of job `{job}` (process {} on {}, last heartbeat {age} s ago)", process.pid, process.host)
    }
}

impl Process {
    /// This process.
    fn this() -> Self {
        let pid = std::process::id();
        Self { host: host(), machine: machine().unwrap_or_default(), pid, start: start(pid).unwrap_or_default() }
    }

    /// True if the process ran on this machine and has ended. False if that cannot be known.
    fn has_ended(&self) -> bool {
        let is_here = !self.machine.is_empty() && machine().as_deref() == Some(self.machine.as_str());
        is_here && start(self.pid) != Some(self.start)
    }
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    name.map_or_else(|_| "an unknown host".to_owned(), |name| name.trim().to_owned())
}

/// The boot of this machine and the namespace of its processes: together they give a pid its
/// meaning. `None` where `/proc` does not say.
fn machine() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = std::fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", boot.trim(), namespace.display()))
}

/// The clock tick at which a process started; `None` if it has ended. Its parent need not have
/// learned that yet.
fn start(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in brackets, may contain anything. The state follows as field 3.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::process::{Child, Command};
    use std::sync::Arc;

    use object_store::memory::InMemory;
    use object_store::path::Path;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(5);

    fn claim(run: &str) -> Claim {
        Claim { run: run.to_owned(), job: format!("job-of-{run}"), interval: INTERVAL }
    }

    /// A time, in seconds.
    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_000_000 + seconds)
    }

    /// Runs the test on a local folder and in a store with conditional writes.
    fn on_both(test: impl AsyncFn(Directory)) {
        let folder = tempfile::tempdir().unwrap();
        let local = Directory::open(folder.path().to_str().unwrap(), &Default::default(), true).unwrap();
        let bucket = Directory::in_store(Arc::new(InMemory::new()), Path::from("ck"), "memory://ck");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            test(local).await;
            test(bucket).await;
        });
    }

    #[test]
    fn a_second_run_is_refused_until_the_first_releases() {
        on_both(async |directory| {
            let (mut a, mut b) = (Lease::new(directory.clone(), claim("a")), Lease::new(directory.clone(), claim("b")));
            assert_eq!(a.acquire(at(0)).await.unwrap(), Acquired::Free);
            a.renew(at(5)).await.unwrap();
            a.renew(at(10)).await.unwrap();
            let refused = b.acquire(at(13)).await.unwrap_err().to_string();
            for part in ["run a of job `job-of-a`", "last heartbeat 3 s ago", "wait", "set another path", LEASE] {
                assert!(refused.contains(part), "{part}: {refused}");
            }
            assert!(b.renew(at(14)).await.is_err(), "a renewal does not take it over either");
            a.release().await.unwrap();
            assert!(a.renew(at(15)).await.is_err(), "a released lease stays released");
            assert_eq!(b.acquire(at(15)).await.unwrap(), Acquired::Free);
            a.release().await.unwrap();
            b.renew(at(16)).await.unwrap();
            b.release().await.unwrap();
            assert_eq!(directory.read_version(LEASE).await.unwrap().map(|_| ()), None);
        });
    }

    #[test]
    fn an_expired_lease_is_taken_over_and_its_holder_learns_it() {
        on_both(async |directory| {
            let (mut a, mut b) = (Lease::new(directory.clone(), claim("a")), Lease::new(directory.clone(), claim("b")));
            a.acquire(at(0)).await.unwrap();
            assert!(b.acquire(at(29)).await.is_err());
            assert!(matches!(b.acquire(at(30)).await.unwrap(), Acquired::Expired(by) if by.contains("run a of")));
            let lost = a.renew(at(31)).await.unwrap_err().to_string();
            assert!(lost.contains("run b of job `job-of-b`"), "{lost}");
            a.release().await.unwrap();
            b.renew(at(32)).await.unwrap();
        });
    }

    #[test]
    fn another_process_of_the_same_run_takes_the_lease_at_once() {
        on_both(async |directory| {
            let mut first = Lease::new(directory.clone(), claim("a"));
            let mut second = Lease::new(directory.clone(), claim("a"));
            first.acquire(at(0)).await.unwrap();
            assert_eq!(second.acquire(at(1)).await.unwrap(), Acquired::Free);
            let lost = first.renew(at(2)).await.unwrap_err();
            assert!(matches!(lost, CheckpointError::Replaced { .. }), "the older process has lost it: {lost}");
            second.renew(at(3)).await.unwrap();
        });
    }

    #[test]
    fn of_many_runs_that_start_together_one_gets_the_lease() {
        on_both(async |directory| {
            let runs = (0..8).map(|run| {
                let mut lease = Lease::new(directory.clone(), claim(&run.to_string()));
                async move { (lease.acquire(at(0)).await.is_ok(), lease) }
            });
            // A lease that is dropped is released, so all are kept until the last run has asked.
            let runs = futures::future::join_all(runs).await;
            let won = runs.iter().filter(|(has_won, _)| *has_won).count();
            assert_eq!(won, 1);
        });
    }

    #[test]
    fn a_deleted_lease_is_written_again_and_an_unreadable_one_is_refused() {
        on_both(async |directory| {
            let mut a = Lease::new(directory.clone(), claim("a"));
            a.acquire(at(0)).await.unwrap();
            directory.delete(&[LEASE.to_owned()]).await.unwrap();
            a.renew(at(5)).await.unwrap();
            directory.put(LEASE, b"{\"run\":".to_vec()).await.unwrap();
            let mut b = Lease::new(directory.clone(), claim("b"));
            assert!(b.acquire(at(100)).await.unwrap_err().to_string().contains("an unknown run"));
            assert!(a.renew(at(100)).await.is_err());
        });
    }

    fn sleeping() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    /// Puts a lease that another process of this machine holds.
    async fn put_lease(directory: &Directory, process: Process) {
        let record = Record {
            run: "a".to_owned(),
            job: "a".to_owned(),
            holder: "other".to_owned(),
            process,
            heartbeat: milliseconds(at(0)),
            interval: 5_000,
        };
        directory.put(LEASE, serde_json::to_vec(&record).unwrap()).await.unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_lease_of_a_killed_process_of_this_machine_is_free_at_once() {
        on_both(async |directory| {
            let mut child = sleeping();
            let process = Process { pid: child.id(), start: start(child.id()).unwrap(), ..Process::this() };
            put_lease(&directory, process.clone()).await;
            let mut b = Lease::new(directory.clone(), claim("b"));
            assert!(b.acquire(at(1)).await.is_err(), "the process lives");
            // Another machine's pid says nothing about the process.
            put_lease(&directory, Process { pid: u32::MAX, machine: "other".to_owned(), ..process.clone() }).await;
            assert!(b.acquire(at(1)).await.is_err());
            put_lease(&directory, Process { pid: u32::MAX, machine: String::new(), ..process.clone() }).await;
            assert!(b.acquire(at(1)).await.is_err());
            // A pid that another process has now.
            put_lease(&directory, Process { start: process.start + 1, ..process.clone() }).await;
            assert!(matches!(b.acquire(at(1)).await.unwrap(), Acquired::Ended(_)));
            put_lease(&directory, process).await;
            child.kill().unwrap();
            while start(child.id()).is_some() {
                std::thread::sleep(Duration::from_millis(5));
            }
            let mut c = Lease::new(directory.clone(), claim("c"));
            assert!(matches!(c.acquire(at(1)).await.unwrap(), Acquired::Ended(by) if by.contains("run a of")));
            child.wait().unwrap();
        });
    }
}
