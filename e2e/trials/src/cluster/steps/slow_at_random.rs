//! Members of any role are slow for 5 to 40 s at random, and well for as long. Work that moves must
//! not cost more than it saves: throughput is not below the one with fixed shares, and the share of
//! a member changes seldom.
//!
//! Shares cannot be fixed by a setting. But a share falls only after ten slow seconds. So the
//! throughput with fixed shares is measured before, in limits of eight seconds, one for each role.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rectrain_bring_up::cgroups::LimitedProcessor;
use rectrain_harness::files::write;
use rectrain_harness::manifests::{endless, merged};
use rectrain_random::SplitMix64;
use serde_json::{Value, json};

use super::slow_members::{ANSWERS, SLOW_PERCENT, WORKERS, job, rate, trained, workers};
use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::members::{Member, any_of, limit, pod};
use crate::cluster::support::outcome::no_restart;
use crate::error::unmet;

const NAME: &str = "slow-random";
const SEED: u64 = 7;
/// How long members are slow and well by turns.
const DISTURBED: Duration = Duration::from_secs(240);
/// The least and the longest time that a member is slow, and that all are well.
const SHORTEST: f64 = 5.0;
const LONGEST: f64 = 40.0;
/// How long the job has to reach its usual speed.
const WARM: Duration = Duration::from_secs(60);
/// The healthy job is measured for this long.
const MEASURED: Duration = Duration::from_secs(20);
/// A limit shows after [`SETTLES`]. With fixed shares the job is measured for [`FIXED`] then. The
/// limit ends before a share can fall.
const SETTLES: Duration = Duration::from_secs(2);
const FIXED: Duration = Duration::from_secs(6);
/// Time between two such limits.
const PAUSE: Duration = Duration::from_secs(12);
/// The least throughput over the one with fixed shares. Two measurements of a job without any limit
/// differ by up to a tenth.
const NOT_BELOW: f64 = 0.9;
/// The most changes of a share within [`DISTURBED`], of a parameter server and of any other member
/// (docs/operations/scaling.md, step 5).
const MOST_OF_A_SERVER: usize = 7;
const MOST_OF_OTHERS: usize = 9;
/// The members, by role.
const MEMBERS: [Member; 5] =
    [("ps", 3), ("embedding-worker", 2), ("loader", 2), ("dense-worker", WORKERS), ("coordinator", 1)];

/// A time in which a member is slow, or in which all are well.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Period {
    /// The role and the number of the slow member; `None` if all are well.
    slow: Option<Member>,
    time: Duration,
}

/// Periods that fill `whole`: well and slow by turns.
fn periods(seed: u64, whole: Duration) -> Vec<Period> {
    let mut random = SplitMix64::new(seed);
    let (mut periods, mut left): (Vec<Period>, Duration) = (Vec::new(), whole);
    while !left.is_zero() {
        let time = Duration::from_secs_f64(SHORTEST + (LONGEST - SHORTEST) * random.unit()).min(left);
        let slow = (periods.len() % 2 == 1).then(|| any_of(&MEMBERS, &mut random));
        periods.push(Period { slow, time });
        left -= time;
    }
    periods
}

/// Samples per second with fixed shares, by slow role; `None` is the healthy job.
type Fixed = BTreeMap<Option<&'static str>, f64>;

/// The samples per second that fixed shares would have over all periods.
fn expected(periods: &[Period], fixed: &Fixed) -> f64 {
    let seconds: f64 = periods.iter().map(|period| period.time.as_secs_f64()).sum();
    let samples = periods.iter().map(|period| {
        let role = period.slow.map(|(role, _)| role);
        period.time.as_secs_f64() * fixed.get(&role).copied().unwrap_or(0.0)
    });
    samples.sum::<f64>() / seconds.max(f64::MIN_POSITIVE)
}

/// The changes of each member's share in the events of a job, by role and number.
fn changes(events: &[Value]) -> BTreeMap<(String, u64), usize> {
    let mut changes = BTreeMap::new();
    for event in events.iter().filter(|event| event["event"] == "shareChanged") {
        let member = (event["role"].as_str().unwrap_or_default().to_owned(), event["index"].as_u64().unwrap_or(0));
        *changes.entry(member).or_default() += 1;
    }
    changes
}

/// The first member whose share changed too often.
fn flapping(changes: &BTreeMap<(String, u64), usize>) -> Option<TrialError> {
    let most = |role: &str| if role == "ps" { MOST_OF_A_SERVER } else { MOST_OF_OTHERS };
    let (member, count) = changes.iter().find(|((role, _), count)| **count > most(role))?;
    Some(unmet(format!("at most {} changes of the share of {member:?}", most(&member.0)), count))
}

/// It takes about eight minutes.
pub(in crate::cluster) fn random(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("slow members")? {
        return Ok(());
    }
    let jobs = &cluster.jobs;
    // The mode and the numbers of members stay. So only shares change.
    let stays = json!({"training": {"mode": "gba"}, "autoscaling": null});
    jobs.submit(NAME, &merged(merged(endless(), job()), stays))?;
    jobs.until_phase(NAME, "Training")?;
    let trial = Trial { cluster, workers: workers(cluster, NAME)? };
    std::thread::sleep(WARM);
    let fixed = trial.fixed()?;
    let before = changes(&jobs.events(NAME)?);
    if !before.is_empty() {
        return Err(unmet("no change of a share by limits of eight seconds", format!("{before:?}")));
    }
    let periods = periods(SEED, DISTURBED);
    let found = trial.disturbed(&periods)?;
    let changes = changes(&jobs.events(NAME)?);
    no_restart(NAME, &jobs.status(NAME)?["attempt"]["number"])?;
    jobs.delete(NAME)?;
    report(cluster, &periods, &fixed, found, &changes)
}

/// Writes and judges the figures.
fn report(
    cluster: &TestCluster,
    periods: &[Period],
    fixed: &Fixed,
    found: f64,
    changes: &BTreeMap<(String, u64), usize>,
) -> Result<(), TrialError> {
    let with_fixed = expected(periods, fixed);
    let fixed: BTreeMap<&str, f64> =
        fixed.iter().map(|(role, rate)| (role.unwrap_or("healthy"), rate.round())).collect();
    let changed: BTreeMap<String, usize> =
        changes.iter().map(|((role, index), count)| (format!("{role} {index}"), *count)).collect();
    let slow = periods.iter().filter(|period| period.slow.is_some()).count();
    let table = json!({
        "seed": SEED, "slowPeriods": slow, "samplesPerSecond": found.round(), "withFixedShares": with_fixed.round(),
        "fixed": fixed, "shareChanges": changed,
    });
    println!("{table:#}");
    write(&cluster.paths.root().join("slow-members-random.json"), format!("{table:#}\n"))?;
    if found < NOT_BELOW * with_fixed {
        return Err(unmet(
            format!("{NOT_BELOW} of {with_fixed:.0} samples/s with fixed shares"),
            format!("{found:.0}"),
        ));
    }
    flapping(changes).map_or(Ok(()), Err)
}

struct Trial<'a> {
    cluster: &'a TestCluster,
    workers: Vec<SocketAddr>,
}

impl Trial<'_> {
    /// Measures the job while all members are well, and then while one of each role is slow.
    fn fixed(&self) -> Result<Fixed, TrialError> {
        let mut fixed = Fixed::from([(None, self.rate_over(MEASURED)?)]);
        for (role, _) in MEMBERS {
            let limited = self.limit((role, 0))?;
            std::thread::sleep(SETTLES);
            fixed.insert(Some(role), self.rate_over(FIXED)?);
            drop(limited);
            std::thread::sleep(PAUSE);
        }
        println!("with fixed shares: {fixed:?} samples/s");
        Ok(fixed)
    }

    fn rate_over(&self, time: Duration) -> Result<f64, TrialError> {
        let before = trained(&self.workers)?;
        std::thread::sleep(time);
        Ok(rate(&before, &trained(&self.workers)?))
    }

    /// Limits a member until the value is dropped.
    fn limit(&self, member: Member) -> Result<LimitedProcessor, TrialError> {
        limit(&self.cluster.jobs, &pod(NAME, member), SLOW_PERCENT, ANSWERS)
    }

    /// Slows members for their periods; returns the samples per second of all periods.
    fn disturbed(&self, periods: &[Period]) -> Result<f64, TrialError> {
        let before = trained(&self.workers)?;
        for period in periods {
            let began = Instant::now();
            let limited = period.slow.map(|member| self.limit(member)).transpose()?;
            println!("{period:?}");
            std::thread::sleep(period.time.saturating_sub(began.elapsed()));
            drop(limited);
        }
        Ok(rate(&before, &trained(&self.workers)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_fill_the_time_and_any_member_is_slow() {
        assert_eq!(periods(7, DISTURBED), periods(7, DISTURBED));
        let many = periods(7, Duration::from_secs(40_000));
        assert_eq!(many.iter().map(|period| period.time).sum::<Duration>(), Duration::from_secs(40_000));
        let (last, others) = many.split_last().unwrap();
        assert!(last.time <= Duration::from_secs_f64(LONGEST));
        assert!(others.iter().all(|period| (SHORTEST..=LONGEST).contains(&period.time.as_secs_f64())));
        assert!(many.iter().enumerate().all(|(number, period)| period.slow.is_some() == (number % 2 == 1)));
        for (role, count) in MEMBERS {
            for number in 0..count {
                assert!(many.iter().any(|period| period.slow == Some((role, number))), "{role} {number}");
            }
        }
    }

    #[test]
    fn fixed_shares_have_the_rate_of_each_period() {
        let period = |slow, seconds| Period { slow, time: Duration::from_secs(seconds) };
        let periods = [period(None, 30), period(Some(("ps", 2)), 10)];
        let fixed = Fixed::from([(None, 1000.0), (Some("ps"), 200.0)]);
        assert!((expected(&periods, &fixed) - 800.0).abs() < 1e-9);
    }

    #[test]
    fn a_share_that_changes_too_often_is_named() {
        let event =
            |role: &str| json!({"event": "shareChanged", "role": role, "index": 1, "share": 0.1, "factor": 9.0});
        let of = |role: &str, count| changes(&vec![event(role); count]);
        assert_eq!(changes(&[json!({"event": "progress"})]), BTreeMap::new());
        assert!(flapping(&of("ps", 7)).is_none() && flapping(&of("loader", 9)).is_none());
        for (role, count) in [("ps", 8), ("loader", 10)] {
            let error = flapping(&of(role, count)).unwrap().to_string();
            assert!(error.contains(role) && error.contains(&format!("found {count}")), "{error}");
        }
    }
}
