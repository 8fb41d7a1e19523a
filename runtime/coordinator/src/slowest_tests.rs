//! Planted slow members of each role.

use super::*;

/// Seconds of a healthy step, and their parts.
const COMPUTE: f64 = 0.06;
const ROWS: f64 = 0.01;
const STEP_ROWS: u64 = 1000;

/// A job with a clock. Each dense worker reports once a second.
struct Job {
    slowest: Slowest,
    setting: Setting,
    ignored: Option<Role>,
    begun: Instant,
    seconds: u64,
}

impl Job {
    fn new(ps: u32, embedding_workers: u32, dense_workers: u32, loaders: u32) -> Self {
        let members = [
            (Role::Ps, ps),
            (Role::EmbeddingWorker, embedding_workers),
            (Role::DenseWorker, dense_workers),
            (Role::Loader, loaders),
        ];
        let setting = Setting { mode: "sync", together: true, members: members.into() };
        Self { slowest: Slowest::default(), setting, ignored: None, begun: Instant::now(), seconds: 0 }
    }

    fn now(&self) -> Instant {
        self.begun + Duration::from_secs(self.seconds)
    }

    fn decide(&mut self) -> Option<Change> {
        let now = self.now();
        self.slowest.decide(&self.setting, now, self.seconds)
    }

    /// Trains for `seconds` while each of the `slow` members takes so many times its usual time.
    fn train(&mut self, seconds: u64, slow: &[(MemberId, f64)]) -> Vec<Change> {
        let mut changes = Vec::new();
        for _ in 0..seconds {
            self.seconds += 1;
            for report in self.reports(slow) {
                let now = self.now();
                self.slowest.record(&report, self.ignored, now);
            }
            changes.extend(self.decide());
        }
        changes
    }

    fn reports(&self, slow: &[(MemberId, f64)]) -> Vec<v1::Progress> {
        let factor =
            |member: MemberId| slow.iter().find(|(slow, _)| *slow == member).map_or(1.0, |(_, factor)| *factor);
        let count = |role| self.setting.members[&role];
        let mut spent: Vec<(MemberId, f64)> = Vec::new();
        for role in [Role::Ps, Role::EmbeddingWorker, Role::Loader] {
            for index in 0..count(role) {
                // A loader is ahead of training, unless it is slow.
                let usual = if role == Role::Loader { 0.0 } else { ROWS };
                let late = if role == Role::Loader { ROWS } else { 0.0 };
                let factor = factor((role, index));
                let each = f64::from(count(role));
                spent.push(((role, index), (usual * factor + late * (factor - 1.0)) / each));
            }
        }
        let waits: f64 = spent.iter().map(|(_, seconds)| seconds).sum();
        let compute = |rank| COMPUTE * factor((Role::DenseWorker, rank));
        let slowest = (0..count(Role::DenseWorker)).map(compute).fold(0.0, f64::max);
        let steps = 1.0 / (slowest + waits);
        let message = |&((role, index), seconds): &(MemberId, f64)| v1::Spent {
            role: v1::Role::from(role).into(),
            index,
            seconds: seconds * steps,
        };
        let report = |rank| v1::Progress {
            rank,
            samples: (STEP_ROWS as f64 * steps).ceil() as u64,
            step_seconds: 1.0,
            spent: spent.iter().chain([&((Role::DenseWorker, rank), compute(rank))]).map(message).collect(),
            ..v1::Progress::default()
        };
        (0..count(Role::DenseWorker)).map(report).collect()
    }
}

fn waiting((role, index): MemberId, (for_role, for_index): MemberId) -> v1::Waiting {
    v1::Waiting { role: v1::Role::from(role).into(), index, for_role: v1::Role::from(for_role).into(), for_index }
}

#[test]
fn a_healthy_job_names_no_member() {
    for mut job in [Job::new(2, 1, 4, 1), Job::new(1, 1, 1, 1), Job::new(3, 2, 8, 2)] {
        assert_eq!(job.train(600, &[]), []);
    }
}

#[test]
fn a_slow_member_of_each_role_is_named_until_it_recovers() {
    let members = [(Role::Ps, 1), (Role::EmbeddingWorker, 1), (Role::DenseWorker, 2), (Role::Loader, 1)];
    for member in members {
        let mut job = Job::new(3, 2, 4, 2);
        assert_eq!(job.train(60, &[]), []);
        let changes = job.train(30, &[(member, 30.0)]);
        let [Change::Slow(named)] = changes[..] else { panic!("{member:?}: {changes:?}") };
        assert!(named.member == member && named.share > SLOW_SHARE, "{named:?}");
        assert!((60..80).contains(&named.since_seconds), "{named:?}");
        assert_eq!(job.train(300, &[(member, 30.0)]), [], "it stays named");
        assert_eq!(job.train(40, &[]), [Change::Recovered(member)]);
        assert_eq!(job.slowest.named(), None);
    }
}

/// Pieces of two embedding workers, with the seconds that each of them waited for loader 0.
fn late_pieces(waits: [f64; 2]) -> v1::Progress {
    let pieces = [0, 1].map(|worker| v1::PieceTime {
        embedding_worker: worker,
        pieces: 2,
        loader_seconds: waits[worker as usize],
        ..v1::PieceTime::default()
    });
    let loader = v1::Spent { role: v1::Role::Loader.into(), index: 0, seconds: waits.iter().sum() };
    v1::Progress {
        samples: 1,
        step_seconds: 1.0,
        spent: vec![loader],
        pieces: pieces.into(),
        ..v1::Progress::default()
    }
}

#[test]
fn pieces_that_are_late_at_one_embedding_worker_alone_are_its_own_fault() {
    let named = |waits| {
        let mut job = Job::new(1, 2, 1, 2);
        for second in 0..20 {
            job.seconds = second;
            let now = job.now();
            job.slowest.record(&late_pieces(waits), None, now);
            job.decide();
        }
        job.slowest.named().map(|named| named.member)
    };
    assert_eq!(named([0.1, 0.8]), Some((Role::EmbeddingWorker, 1)));
    assert_eq!(named([0.4, 0.45]), Some((Role::Loader, 0)));
    assert_eq!(named([0.0, 0.1]), None);
}

#[test]
fn a_wait_of_one_dense_worker_is_a_wait_of_all_that_train_together() {
    // Rank 3 gets all its pieces from embedding worker 1. The other ranks wait in the ring.
    let share = |together| {
        let mut job = Job::new(1, 2, 4, 1);
        job.setting.together = together;
        for second in 0..20 {
            job.seconds = second;
            let now = job.now();
            for rank in 0..4 {
                let seconds = if rank == 3 { 0.8 } else { 0.01 };
                let worker = u32::from(rank == 3);
                let spent = vec![v1::Spent { role: v1::Role::EmbeddingWorker.into(), index: worker, seconds }];
                let report = v1::Progress { rank, samples: 1, step_seconds: 1.0, spent, ..v1::Progress::default() };
                job.slowest.record(&report, None, now);
            }
            job.decide();
        }
        job.slowest.named().map(|named| (named.member, (100.0 * named.share).round()))
    };
    assert_eq!(share(true), Some(((Role::EmbeddingWorker, 1), 79.0)));
    assert_eq!(share(false), None, "it delays one of four");
}

/// After the pieces have moved away from a slow worker, the other one has nearly all of them.
#[test]
fn an_embedding_worker_with_more_pieces_is_not_slow() {
    let named = |seconds: [f64; 2], pieces: [u32; 2]| {
        let mut job = Job::new(1, 2, 1, 1);
        for second in 0..30 {
            job.seconds = second;
            let spent = [0, 1].map(|index| v1::Spent {
                role: v1::Role::EmbeddingWorker.into(),
                index,
                seconds: seconds[index as usize],
            });
            let pieces = [0, 1].map(|embedding_worker| v1::PieceTime {
                embedding_worker,
                pieces: pieces[embedding_worker as usize],
                ..v1::PieceTime::default()
            });
            let report = v1::Progress {
                samples: 1,
                step_seconds: 1.0,
                spent: spent.into(),
                pieces: pieces.into(),
                ..v1::Progress::default()
            };
            let now = job.now();
            job.slowest.record(&report, None, now);
            job.decide();
        }
        job.slowest.named().map(|named| named.member)
    };
    assert_eq!(named([0.02, 0.6], [1, 30]), None);
    assert_eq!(named([0.02, 0.6], [15, 15]), Some((Role::EmbeddingWorker, 1)));
    assert_eq!(named([0.6, 0.2], [2, 20]), Some((Role::EmbeddingWorker, 0)));
}

#[test]
fn a_slow_member_without_peers_is_compared_with_its_past() {
    for role in [Role::Ps, Role::EmbeddingWorker, Role::DenseWorker, Role::Loader] {
        let mut job = Job::new(1, 1, 1, 1);
        assert_eq!(job.train(60, &[]), []);
        let changes = job.train(30, &[((role, 0), 30.0)]);
        assert!(matches!(changes[..], [Change::Slow(named)] if named.member == (role, 0)), "{role}: {changes:?}");
        assert_eq!(job.train(40, &[]), [Change::Recovered((role, 0))]);
    }
}

#[test]
fn a_loader_that_waits_for_records_of_a_stream_is_not_slow() {
    let mut job = Job { ignored: Some(Role::Loader), ..Job::new(3, 2, 4, 1) };
    assert_eq!(job.train(60, &[]), []);
    assert_eq!(job.train(60, &[((Role::Loader, 0), 30.0)]), []);
    let slow = (Role::DenseWorker, 2);
    let changes = job.train(30, &[(slow, 30.0)]);
    assert!(matches!(changes[..], [Change::Slow(named)] if named.member == slow), "{changes:?}");
}

#[test]
fn a_short_pause_names_no_member() {
    let mut job = Job::new(3, 2, 4, 2);
    job.train(60, &[]);
    for _ in 0..20 {
        assert_eq!(job.train(2, &[((Role::Ps, 0), 30.0)]), []);
        assert_eq!(job.train(28, &[]), []);
    }
}

#[test]
fn a_slower_member_replaces_the_named_one() {
    let mut job = Job::new(3, 2, 4, 2);
    job.train(60, &[]);
    let (first, second) = ((Role::EmbeddingWorker, 0), (Role::Ps, 2));
    assert_eq!(job.train(40, &[(first, 30.0)]).len(), 1);
    let changes = job.train(60, &[(first, 30.0), (second, 400.0)]);
    assert!(matches!(changes[..], [Change::Slow(named)] if named.member == second), "{changes:?}");
}

#[test]
fn a_frozen_server_is_named_through_the_waits_for_it() {
    let mut job = Job::new(2, 1, 2, 1);
    job.train(60, &[]);
    let (server, worker) = ((Role::Ps, 1), (Role::EmbeddingWorker, 0));
    let mut changes = Vec::new();
    for _ in 0..30 {
        job.seconds += 1;
        let now = job.now();
        job.slowest.wait(&waiting(worker, server), now);
        (0..2).for_each(|rank| job.slowest.wait(&waiting((Role::DenseWorker, rank), worker), now));
        assert_eq!(job.slowest.waits_for(now), Some(server));
        changes.extend(job.decide());
    }
    assert!(matches!(changes[..], [Change::Slow(named)] if named.member == server), "{changes:?}");
    job.seconds += 10;
    assert_eq!(job.slowest.waits_for(job.now()), None, "old reports do not count");
    assert_eq!(job.train(40, &[]), [Change::Recovered(server)]);
}

#[test]
fn a_frozen_dense_worker_is_the_one_that_waits_for_none() {
    let mut job = Job::new(1, 1, 3, 1);
    // Each waits for the one before it, and worker 1 is frozen.
    for (rank, before) in [(2, 1), (0, 2)] {
        let now = job.now();
        job.slowest.wait(&waiting((Role::DenseWorker, rank), (Role::DenseWorker, before)), now);
    }
    assert_eq!(job.slowest.waits_for(job.now()), Some((Role::DenseWorker, 1)));
    job.seconds += 1;
}

#[test]
fn a_member_that_left_is_not_named() {
    let mut job = Job::new(2, 2, 2, 1);
    job.train(60, &[]);
    let member = (Role::EmbeddingWorker, 1);
    assert_eq!(job.train(30, &[(member, 30.0)]).len(), 1);
    job.setting.members.insert(Role::EmbeddingWorker, 1);
    assert_eq!(job.decide(), Some(Change::Recovered(member)));
}
