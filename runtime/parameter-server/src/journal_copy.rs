//! A copy of the coordinator's journal, kept in this server's memory. A coordinator that starts on
//! another machine continues from it.
//!
//! The copy with the highest sequence wins. A coordinator whose sequence is behind has restarted
//! from an outdated file, and the server refuses it. A new coordinator claims the copy before it
//! reads it. From then on the server refuses copies from earlier coordinators, so a coordinator
//! that only seems dead cannot change the job's state behind the new one.

use parking_lot::Mutex;
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::limits::MAX_JOURNAL_COPY_BYTES;
use rectrain_protocol::message::{COORDINATOR_SUPERSEDED, OTHER_JOURNAL};
use rectrain_wire::{Refusal, RefusalCode};

/// The copy of one job's journal.
#[derive(Debug, Default)]
pub(crate) struct JournalCopy(Mutex<Option<Kept>>);

#[derive(Debug)]
struct Kept {
    head: v1::JournalHead,
    image: Vec<u8>,
}

impl JournalCopy {
    /// Keeps this copy, unless the same one is here. Returns the bytes of the copy that is kept.
    ///
    /// # Errors
    /// - [`COORDINATOR_SUPERSEDED`] if another coordinator has claimed the copy, or if a newer copy
    ///   is here.
    /// - The image is too large.
    pub(crate) fn put(&self, head: Option<v1::JournalHead>, image: Vec<u8>) -> Result<usize, Refusal> {
        let head = head.ok_or_else(|| inconsistent("its head is missing".to_owned()))?;
        if image.len() > MAX_JOURNAL_COPY_BYTES {
            let bytes = image.len();
            return Err(inconsistent(format!(
                "the image has {bytes} bytes, at most {MAX_JOURNAL_COPY_BYTES} are kept"
            )));
        }
        let mut kept = self.0.lock();
        if let Some(kept) = kept.as_ref().filter(|kept| kept.head.job == head.job) {
            if kept.head.owner != head.owner {
                return Err(Refusal::new(COORDINATOR_SUPERSEDED, "another coordinator leads the job now"));
            }
            let (newest, sent) = (kept.head.sequence, head.sequence);
            if newest > sent {
                let reason = format!("copy {sent} of the journal is outdated: this server has copy {newest}");
                return Err(Refusal::new(COORDINATOR_SUPERSEDED, reason));
            }
            if newest == sent {
                return Ok(kept.image.len());
            }
        }
        let bytes = image.len();
        *kept = Some(Kept { head, image });
        Ok(bytes)
    }

    /// Makes this coordinator the owner of the copy, and returns the copy.
    ///
    /// # Errors
    /// [`OTHER_JOURNAL`] if the copy belongs to another job or attempt, so this server does too.
    pub(crate) fn claim(&self, claim: v1::ClaimJournal) -> Result<(v1::JournalHead, Vec<u8>), Refusal> {
        let v1::ClaimJournal { job, owner } = claim;
        let mut kept = self.0.lock();
        match &mut *kept {
            Some(kept) if kept.head.job == job => {
                let found = (kept.head.clone(), kept.image.clone());
                kept.head.owner = owner;
                Ok(found)
            }
            Some(_) => Err(Refusal::new(OTHER_JOURNAL, "this server belongs to another attempt or job")),
            None => {
                let head = v1::JournalHead { job, owner, ..v1::JournalHead::default() };
                *kept = Some(Kept { head, image: Vec::new() });
                Ok((v1::JournalHead::default(), Vec::new()))
            }
        }
    }
}

fn inconsistent(reason: String) -> Refusal {
    let error = RoleError::Inconsistent { message: "put_journal", reason };
    Refusal::new(RefusalCode::InvalidRequest, error.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    fn head(job: &str, owner: u64, sequence: u64) -> v1::JournalHead {
        v1::JournalHead { job: job.to_owned(), owner, sequence, holders: vec![0, 1] }
    }

    fn claim(copy: &JournalCopy, job: &str, owner: u64) -> (u64, Vec<u8>) {
        let (head, image) = copy.claim(v1::ClaimJournal { job: job.to_owned(), owner }).unwrap();
        (head.sequence, image)
    }

    #[test]
    fn the_newest_copy_wins() {
        let copy = JournalCopy::default();
        for (sequence, image) in [(2, "two"), (3, "three"), (3, "again")] {
            copy.put(Some(head("a", 7, sequence)), image.into()).unwrap();
        }
        assert_eq!(claim(&copy, "a", 8), (3, b"three".to_vec()));
    }

    #[test]
    fn a_coordinator_with_an_outdated_file_is_refused() {
        let copy = JournalCopy::default();
        copy.put(Some(head("a", 7, 3)), b"three".to_vec()).unwrap();
        let refused = copy.put(Some(head("a", 7, 2)), b"two".to_vec()).unwrap_err();
        assert_eq!(refused.code, COORDINATOR_SUPERSEDED);
        assert!(refused.message.contains("copy 2") && refused.message.contains("copy 3"), "{}", refused.message);
        assert_eq!(claim(&copy, "a", 8), (3, b"three".to_vec()));
    }

    #[test]
    fn a_claimed_copy_refuses_the_coordinator_before() {
        let copy = JournalCopy::default();
        copy.put(Some(head("a", 7, 5)), b"five".to_vec()).unwrap();
        assert_eq!(claim(&copy, "a", 8), (5, b"five".to_vec()));
        let refused = copy.put(Some(head("a", 7, 6)), b"six".to_vec()).unwrap_err();
        assert_eq!(refused.code, COORDINATOR_SUPERSEDED);
        copy.put(Some(head("a", 8, 6)), b"new six".to_vec()).unwrap();
        assert_eq!(claim(&copy, "a", 9), (6, b"new six".to_vec()));
    }

    #[test]
    fn a_claim_without_a_copy_still_refuses_the_coordinator_before() {
        let copy = JournalCopy::default();
        assert_eq!(claim(&copy, "a", 8), (0, Vec::new()));
        assert!(copy.put(Some(head("a", 7, 1)), Vec::new()).is_err());
        copy.put(Some(head("a", 8, 1)), b"one".to_vec()).unwrap();
        assert_eq!(claim(&copy, "a", 8), (1, b"one".to_vec()));
    }

    #[test]
    fn the_copy_of_another_attempt_is_not_returned() {
        let copy = JournalCopy::default();
        copy.put(Some(head("a", 7, 5)), b"five".to_vec()).unwrap();
        let refused = copy.claim(v1::ClaimJournal { job: "b".to_owned(), owner: 8 }).unwrap_err();
        assert_eq!(refused.code, OTHER_JOURNAL);
        copy.put(Some(head("a", 7, 6)), b"six".to_vec()).unwrap();
        assert_eq!(claim(&copy, "a", 8), (6, b"six".to_vec()));
    }

    #[test]
    fn a_copy_is_bounded_and_needs_a_head() {
        let copy = JournalCopy::default();
        assert!(copy.put(None, Vec::new()).is_err());
        assert!(copy.put(Some(head("a", 7, 1)), vec![0; MAX_JOURNAL_COPY_BYTES + 1]).is_err());
        assert_eq!(copy.put(Some(head("a", 7, 1)), vec![0; MAX_JOURNAL_COPY_BYTES]).unwrap(), MAX_JOURNAL_COPY_BYTES);
    }
}
