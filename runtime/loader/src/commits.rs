//! The offsets that a loader commits for a consumer group: one commit after the other, beside all
//! other work. A broker that does not answer delays nothing but the next commit.

use std::sync::atomic::{AtomicU64, Ordering};

use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use tokio::sync::watch;

/// The commits of a loader.
pub(crate) struct Commits {
    /// The latest one that the coordinator wants.
    wanted: watch::Sender<Option<v1::Commit>>,
    /// The number of the last one that is over; 0: none.
    made: AtomicU64,
}

impl Commits {
    pub(crate) fn new() -> Self {
        Self { wanted: watch::Sender::new(None), made: AtomicU64::new(0) }
    }

    /// The number of the last commit that is over; 0: none.
    pub(crate) fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// The coordinator wants this commit. It is attempted once for each call, but not while another
    /// one is under way.
    pub(crate) fn want(&self, commit: v1::Commit) {
        self.wanted.send_replace(Some(commit));
    }

    /// Makes the wanted commits until it is dropped. `make` returns whether a commit is over: it is
    /// not attempted again then. Of the ones wanted meanwhile, the last one counts.
    ///
    /// # Errors
    /// An error of `make`.
    pub(crate) async fn make_each<Made: Future<Output = Result<bool, RoleError>>>(
        &self,
        make: impl Fn(v1::Commit) -> Made,
    ) -> Result<(), RoleError> {
        let mut wanted = self.wanted.subscribe();
        while wanted.changed().await.is_ok() {
            let commit = wanted.borrow_and_update().clone();
            let Some(commit) = commit.filter(|commit| commit.number > self.made()) else { continue };
            let number = commit.number;
            if make(commit).await? {
                self.made.store(number, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::sync::Semaphore;
    use tokio::task::yield_now;

    use super::*;

    fn commit(number: u64) -> v1::Commit {
        v1::Commit { number, offsets: Vec::new() }
    }

    #[tokio::test]
    async fn a_broker_that_hangs_delays_only_the_next_commit() {
        let (commits, attempts, answers) = (Commits::new(), RefCell::new(Vec::new()), Semaphore::new(0));
        let make = |commit: v1::Commit| {
            attempts.borrow_mut().push(commit.number);
            async {
                answers.acquire().await.unwrap().forget();
                Ok::<_, RoleError>(true)
            }
        };
        let wanting = async {
            // None of these waits for the broker.
            for number in 1..=4 {
                commits.want(commit(number));
                yield_now().await;
            }
            assert_eq!((attempts.borrow().clone(), commits.made()), (vec![1], 0));
            answers.add_permits(9);
            while commits.made() < 4 {
                yield_now().await;
            }
            commits.want(commit(4));
            yield_now().await;
        };
        tokio::select! {
            biased;
            made = commits.make_each(make) => panic!("{made:?}"),
            () = wanting => {}
        }
        assert_eq!(*attempts.borrow(), [1, 4], "the latest one, and once");
    }

    #[tokio::test]
    async fn a_commit_that_fails_is_attempted_when_it_is_wanted_again() {
        let (commits, attempts) = (Commits::new(), RefCell::new(Vec::new()));
        let make = |commit: v1::Commit| {
            attempts.borrow_mut().push(commit.number);
            std::future::ready(Ok::<_, RoleError>(attempts.borrow().len() == 2))
        };
        let wanting = async {
            for attempt in 0..4 {
                assert_eq!(commits.made(), if attempt < 2 { 0 } else { 7 });
                commits.want(commit(7));
                yield_now().await;
            }
        };
        tokio::select! {
            biased;
            made = commits.make_each(make) => panic!("{made:?}"),
            () = wanting => {}
        }
        assert_eq!(*attempts.borrow(), [7, 7]);
    }
}
