//! Loaders of a stream, which follow its lag.

use rectrain_policy::{
    Action, History, LoaderLoad, LoaderPolicy, Observations, Policy, ReplicaBounds, ReplicaCount, Replicas, Subject,
};

/// Seconds between two observations.
const INTERVAL: u64 = 5;
/// Rows that a loader can read in a second.
const READS: f64 = 1_000.0;

/// A topic, and the loaders that read it.
struct Stream {
    now: u64,
    lag: f64,
    arriving: f64,
    loaders: u32,
    history: History,
    /// The numbers of loaders so far.
    numbers: Vec<u32>,
}

impl Stream {
    fn new(arriving: f64) -> Self {
        Self { now: 1_000, lag: 0.0, arriving, loaders: 1, history: History::default(), numbers: vec![1] }
    }

    fn observe(&mut self) -> Observations {
        let most = f64::from(self.loaders) * READS;
        let read = (self.arriving + self.lag / INTERVAL as f64).min(most);
        self.lag = (self.lag + (self.arriving - read) * INTERVAL as f64).max(0.0);
        self.now += INTERVAL;
        let count = Some(ReplicaCount { wanted: self.loaders, ready: self.loaders });
        let load = LoaderLoad {
            most_useful: Some(8),
            lag_rows: self.lag,
            arriving: self.arriving,
            read,
            reading_share: read / most,
            waiting_share: 0.0,
        };
        Observations {
            at_seconds: self.now,
            loaders: Some(load),
            replicas: Replicas { loader: count, ..Replicas::default() },
            ..Observations::default()
        }
    }

    /// Lets time pass and carries decisions out.
    fn run(&mut self, policy: &Policy, seconds: u64) {
        for _ in 0..seconds / INTERVAL {
            let observations = self.observe();
            for decision in self.history.advance(policy, &observations) {
                assert_eq!(decision.subject, Subject::Loader);
                if let Action::Scale { to, .. } = decision.action {
                    self.loaders = to;
                    self.numbers.push(to);
                }
            }
        }
    }
}

fn policy(max: u32) -> Policy {
    let mut policy = Policy { loader: Some(LoaderPolicy::new(ReplicaBounds { min: 1, max })), ..Policy::default() };
    policy.scaling.cool_down_seconds = 60;
    policy
}

#[test]
fn loaders_follow_a_burst_and_come_back() {
    let mut stream = Stream::new(500.0);
    stream.run(&policy(16), 600);
    assert_eq!(stream.numbers, [1], "one loader keeps up");
    stream.lag = 1_000_000.0;
    stream.run(&policy(16), 3_000);
    let most = stream.numbers.iter().copied().max();
    assert!(most > Some(2) && most <= Some(8), "{:?}", stream.numbers);
    assert_eq!((stream.loaders, stream.lag), (1, 0.0), "{:?}", stream.numbers);
}

#[test]
fn loaders_stay_within_their_bounds() {
    let mut stream = Stream::new(20_000.0);
    stream.run(&policy(3), 3_000);
    assert_eq!(stream.loaders, 3, "{:?}", stream.numbers);
    let mut stream = Stream::new(20_000.0);
    stream.run(&policy(32), 3_000);
    assert_eq!(stream.loaders, 8, "there are eight partitions: {:?}", stream.numbers);
}

#[test]
fn one_long_wait_for_the_brokers_changes_nothing() {
    let mut stream = Stream::new(500.0);
    stream.run(&policy(16), 300);
    stream.lag = 300_000.0;
    stream.run(&policy(16), 10);
    stream.lag = 0.0;
    stream.run(&policy(16), 300);
    assert_eq!(stream.numbers, [1]);
}
