//! Recovery from a copy of the journal, by a coordinator that starts on another machine than the
//! one before.
//!
//! Such a coordinator finds an empty directory, as the first one of an attempt does. The parameter
//! servers tell the two apart. A server of an attempt under way calls with its index and address.
//! A new server asks for the attempt before it serves. Until the case is clear, all requests wait.
//! Their connections then close, and the callers repeat them.
//!
//! The coordinator claims the copy of each server that calls. It recovers only if every server that
//! got the newest copy still has a copy. Then no coordinator has told any member more than the
//! newest copy knows. Otherwise the attempt is lost, as without copies. It is also lost if servers
//! call and none returns a copy for some time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use parking_lot::Mutex;
use rectrain_proto::v1;
use rectrain_protocol::connect;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message::{self, OTHER_JOURNAL, Request};
use rectrain_protocol::plan::JobPlan;
use rectrain_wire::{Address, BoxFuture, Frame, Peer, Refusal, Service, Transport};
use tokio::sync::Notify;

use crate::journal::{self, JournalPlace, OwnedImage};

/// The deadline of a claim, and the pause before the next try of claims that failed.
const CLAIM: Duration = Duration::from_secs(5);
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// How long the address may take to be free again.
const CLOSING: Duration = Duration::from_millis(50);
/// How long servers of an attempt may take to call and to return their copies, counted from the
/// first call. Their calls to the coordinator before fail within a minute.
const PATIENCE: Duration = Duration::from_secs(75);

/// Recovers the journal from a copy, if the directory is empty and the attempt is under way. Serves
/// at `bind` until that is clear, so it returns only once parameter servers have called. Returns
/// whether a copy was recovered. Its coordinator must then start with the same `place`.
///
/// # Errors
/// - [`RoleError::Wire`] if the address cannot be served.
/// - [`RoleError::System`] if the directory cannot be read or written.
pub async fn recover_copy(
    place: JournalPlace<'_>,
    plan: &JobPlan,
    run: &str,
    transport: &dyn Transport,
    bind: &Address,
) -> Result<bool, RoleError> {
    let job = journal::job(plan, run);
    let has_journal = journal::is_in(place.directory, &job).map_err(|source| RoleError::System {
        attempt: format!("read the coordinator's journal in {}", place.directory.display()),
        source,
    })?;
    if has_journal {
        return Ok(false);
    }
    tracing::info!("there is no journal: waiting for the calls of parameter servers");
    let callers = Arc::new(Callers::default());
    let serving = transport.serve(Arc::clone(&callers) as Arc<dyn Service>, bind)?;
    let claim = v1::ClaimJournal { job: place.copies_of(&job), owner: place.owner };
    let found = Claims::new(plan.replicas.ps, claim).settle(&callers, transport).await;
    // Frees the address for the coordinator itself. No handler finishes by itself.
    serving.stop(CLOSING).await;
    let Some((sequence, image)) = found else {
        tracing::info!("the attempt begins: no copy of the journal is complete");
        return Ok(false);
    };
    let image = OwnedImage::decode(&image, &job, "a parameter server's memory");
    let Some(image) = image.filter(|image| image.state.is_recoverable()) else { return Ok(false) };
    tracing::info!(sequence, "continuing from a copy of the journal");
    journal::install(place.directory, &image, place.owner, sequence)?;
    Ok(true)
}

/// The parameter servers that have called. All calls wait for ever.
#[derive(Default)]
struct Callers {
    seen: Mutex<Seen>,
    changed: Notify,
}

#[derive(Default, Clone)]
struct Seen {
    /// The addresses of servers that serve, by number.
    serving: BTreeMap<u32, String>,
    /// Processes of servers that do not serve yet.
    new: BTreeSet<u64>,
}

impl Service for Callers {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            let caller = message::caller(&frame)?;
            match frame.kind {
                v1::AttemptRequest::KIND => {
                    self.seen.lock().new.insert(caller.id);
                }
                v1::JobEndRequest::KIND => {
                    let (request, _) = message::read::<v1::JobEndRequest>(frame)?;
                    if request.role() == v1::Role::Ps {
                        self.seen.lock().serving.insert(request.index, request.address);
                    }
                }
                _ => {}
            }
            self.changed.notify_one();
            std::future::pending().await
        })
    }
}

/// The copies that were claimed.
struct Claims {
    /// The servers at the start of an attempt.
    servers: u32,
    claim: v1::ClaimJournal,
    heads: BTreeMap<u32, v1::JournalHead>,
    images: BTreeMap<u32, Vec<u8>>,
    /// When the first server called.
    called: Option<Instant>,
}

/// The result of the claims.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// The attempt begins.
    Anew,
    /// This server has the newest copy.
    Recover(u32),
}

impl Claims {
    fn new(servers: u32, claim: v1::ClaimJournal) -> Self {
        Self { servers, claim, heads: BTreeMap::new(), images: BTreeMap::new(), called: None }
    }

    /// Claims copies until there is a verdict. Returns the newest copy and its sequence, if the
    /// job can continue from it.
    async fn settle(mut self, callers: &Callers, transport: &dyn Transport) -> Option<(u64, Vec<u8>)> {
        loop {
            let changed = callers.changed.notified();
            let seen = callers.seen.lock().clone();
            self.claim_from(&seen.serving, transport).await;
            if !seen.serving.is_empty() || !seen.new.is_empty() {
                self.called.get_or_insert_with(Instant::now);
            }
            let waited = self.called.map(|called| called.elapsed());
            match verdict(&self.heads, seen.new.len(), self.servers, waited) {
                Some(Verdict::Anew) => return None,
                Some(Verdict::Recover(server)) => {
                    let sequence = self.heads.get(&server)?.sequence;
                    let image = self.images.remove(&server)?;
                    return (!image.is_empty()).then_some((sequence, image));
                }
                None => {
                    // After the time, failed claims are tried again.
                    let _late = tokio::time::timeout(RETRY_PAUSE, changed).await;
                }
            }
        }
    }

    /// Claims the copies of all servers that have called since the last time.
    async fn claim_from(&mut self, serving: &BTreeMap<u32, String>, transport: &dyn Transport) {
        let claim = &self.claim;
        let due = serving.iter().filter(|(server, _)| !self.heads.contains_key(*server));
        let claiming = due.map(|(server, address)| async move { (*server, claim_at(claim, address, transport).await) });
        for (server, claimed) in join_all(claiming).await {
            match claimed {
                Ok((head, image)) => {
                    tracing::info!(ps = server, sequence = head.sequence, "claimed a copy of the journal");
                    self.heads.insert(server, head);
                    self.images.insert(server, image);
                }
                Err(error) if error.is_refused_with(OTHER_JOURNAL) => {
                    tracing::warn!(ps = server, %error, "a parameter server has no copy of the journal");
                    self.heads.insert(server, v1::JournalHead::default());
                }
                Err(error) => tracing::warn!(ps = server, %error, "cannot claim the copy of the journal yet"),
            }
        }
    }
}

async fn claim_at(
    claim: &v1::ClaimJournal,
    address: &str,
    transport: &dyn Transport,
) -> Result<(v1::JournalHead, Vec<u8>), RoleError> {
    let server = connect(transport, address)?;
    let (head, tensors) = message::call(&server, claim.clone(), Vec::new(), CLAIM).await?;
    let [image] = message::take("claim_journal", tensors)?;
    Ok((head, image.expect_u8("image")?))
}

/// Decides by the copies of servers that serve, and the number of new servers. `None`: it is not
/// clear yet. `servers` is the number at the start of an attempt. `waited` counts from the first
/// call, and is `None` before it.
fn verdict(
    heads: &BTreeMap<u32, v1::JournalHead>,
    new: usize,
    servers: u32,
    waited: Option<Duration>,
) -> Option<Verdict> {
    let is_late = waited.is_some_and(|waited| waited >= PATIENCE);
    let with_copies = heads.iter().filter(|(_, head)| head.sequence > 0);
    let Some((server, newest)) = with_copies.max_by_key(|(_, head)| head.sequence) else {
        return (is_late || heads.len() + new >= servers as usize).then_some(Verdict::Anew);
    };
    let sequence = |holder: &u32| heads.get(holder).map(|head| head.sequence);
    let missing = newest.holders.iter().filter(|&holder| sequence(holder).is_none()).count();
    if missing > 0 {
        // A new server may replace a missing one, or may be about to join for the first time.
        return (is_late && new >= missing).then_some(Verdict::Anew);
    }
    let is_complete = newest.holders.iter().all(|holder| sequence(holder) > Some(0));
    Some(if is_complete { Verdict::Recover(*server) } else { Verdict::Anew })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The copies of servers: number, sequence, holders.
    fn judge(copies: &[(u32, u64, &[u32])], new: usize, waited: impl Into<Option<Duration>>) -> Option<Verdict> {
        let head = |sequence, holders: &[u32]| v1::JournalHead {
            job: "job".to_owned(),
            owner: 1,
            sequence,
            holders: holders.to_vec(),
        };
        let heads = copies.iter().map(|(server, sequence, holders)| (*server, head(*sequence, holders))).collect();
        verdict(&heads, new, 2, waited.into())
    }

    #[test]
    fn an_attempt_begins_when_all_servers_are_new() {
        assert_eq!(judge(&[], 0, None::<Duration>), None);
        assert_eq!(judge(&[], 1, Duration::ZERO), None);
        assert_eq!(judge(&[], 2, Duration::ZERO), Some(Verdict::Anew));
        assert_eq!(judge(&[(0, 0, &[])], 1, Duration::ZERO), Some(Verdict::Anew), "members were still joining");
    }

    #[test]
    fn the_newest_copy_is_recovered_once_all_its_holders_called() {
        let both: &[u32] = &[0, 1];
        assert_eq!(judge(&[(0, 5, both)], 0, PATIENCE), None);
        assert_eq!(judge(&[(0, 5, both), (1, 6, both)], 0, Duration::ZERO), Some(Verdict::Recover(1)));
        // A server that left the map has an older copy.
        assert_eq!(judge(&[(2, 4, &[0, 1, 2])], 0, PATIENCE), None);
        let copies: [(u32, u64, &[u32]); 3] = [(2, 4, &[0, 1, 2]), (0, 6, both), (1, 5, both)];
        assert_eq!(judge(&copies, 0, Duration::ZERO), Some(Verdict::Recover(0)));
    }

    #[test]
    fn an_attempt_begins_if_no_copy_is_found_for_long() {
        assert_eq!(judge(&[], 1, PATIENCE), Some(Verdict::Anew));
        assert_eq!(judge(&[], 0, PATIENCE), Some(Verdict::Anew), "a server called and cannot be reached");
        assert_eq!(judge(&[(0, 0, &[])], 0, Duration::ZERO), None);
        assert_eq!(judge(&[(0, 0, &[])], 0, PATIENCE), Some(Verdict::Anew));
    }

    #[test]
    fn without_the_copy_of_a_holder_nothing_is_recovered() {
        let both: &[u32] = &[0, 1];
        assert_eq!(judge(&[(0, 5, both), (1, 0, &[])], 0, Duration::ZERO), Some(Verdict::Anew));
        assert_eq!(judge(&[(0, 5, both)], 1, Duration::ZERO), None, "the new one may join for the first time");
        assert_eq!(judge(&[(0, 5, both)], 1, PATIENCE), Some(Verdict::Anew));
    }
}
