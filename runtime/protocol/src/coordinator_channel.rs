//! How a member asks the coordinator. A coordinator that is killed comes back with what it knew; a question whose answer was lost with it is
//! asked again under the same number, so that it counts once whether or not it had been heard.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use prost::Message;
use rectrain_proto::v1;
use rectrain_wire::{Channel, Tensor, WireError};

use crate::deadline::CALL_DEADLINE;
use crate::error::RoleError;
use crate::message::{self, Request};

/// The pause before a coordinator is asked again whose process has ended.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// Who was never answered, and whose connection is closed so often in a row as soon as it asks, does not speak as members do: with TLS, or without.
const UNHEARD: u32 = 5;
const AS_SOON_AS_ASKED: Duration = Duration::from_secs(1);

/// See the module's text. Cheap to clone: clones count their questions together.
#[derive(Debug, Clone)]
pub struct CoordinatorChannel {
    channel: Channel,
    caller: Arc<Caller>,
}

/// This process, as the coordinator knows it.
#[derive(Debug)]
struct Caller {
    id: u64,
    /// That it takes part in; 0: none yet.
    attempt: AtomicU64,
    was_answered: AtomicBool,
    questions: Mutex<Questions>,
}

#[derive(Debug, Default)]
struct Questions {
    asked: u64,
    unanswered: BTreeSet<u64>,
}

impl CoordinatorChannel {
    /// Of a process that has asked nothing yet.
    pub fn new(channel: Channel) -> Self {
        let caller = Caller {
            id: RandomState::new().hash_one("caller").max(1),
            attempt: AtomicU64::new(0),
            was_answered: AtomicBool::new(false),
            questions: Mutex::default(),
        };
        Self { channel, caller: Arc::new(caller) }
    }

    /// The number of this process, which no other has.
    pub fn process(&self) -> u64 {
        self.caller.id
    }

    /// From here on a coordinator of another attempt answers nothing.
    pub fn takes_part_in(&self, attempt: u64) {
        self.caller.attempt.store(attempt, Ordering::Release);
    }

    /// Sends `request` with `tensors` and waits for the answer, also of a coordinator that is killed meanwhile and comes back.
    ///
    /// # Errors
    /// A refusal; no answer within `deadline`; a coordinator that was there and does not come back within the deadline of a call; one that
    /// closes the connection whenever this process asks, and never answered it.
    pub async fn call<R: Request>(
        &self,
        request: R,
        tensors: Vec<Tensor>,
        deadline: Duration,
    ) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
        let question = Question::new(&self.caller);
        let request = request.encode_to_vec();
        let (began, mut unheard) = (Instant::now(), 0);
        loop {
            let meta = [&*request, &question.caller().encode_to_vec()].concat();
            let asked = Instant::now();
            let left = deadline.saturating_sub(began.elapsed());
            match message::call_with::<R>(&self.channel, meta, tensors.clone(), left).await {
                Err(RoleError::Wire(WireError::Closed { .. })) if began.elapsed() < deadline && unheard < UNHEARD => {
                    let was_answered = self.caller.was_answered.load(Ordering::Acquire);
                    unheard = if was_answered || asked.elapsed() > AS_SOON_AS_ASKED { 0 } else { unheard + 1 };
                    tokio::time::sleep(ASK_AGAIN).await;
                    self.channel.ready(CALL_DEADLINE).await?;
                }
                answered => {
                    self.caller.was_answered.fetch_or(answered.is_ok(), Ordering::AcqRel);
                    return answered;
                }
            }
        }
    }
}

/// A question that is under way: answered, or given up, when it is dropped.
struct Question<'a> {
    of: &'a Caller,
    number: u64,
}

impl<'a> Question<'a> {
    fn new(of: &'a Caller) -> Self {
        let mut questions = of.lock();
        questions.asked += 1;
        let number = questions.asked;
        questions.unanswered.insert(number);
        Self { of, number }
    }

    fn caller(&self) -> v1::Caller {
        let unanswered = self.of.lock().unanswered.range(..=self.number).copied().collect();
        let attempt = self.of.attempt.load(Ordering::Acquire);
        v1::Caller { id: self.of.id, number: self.number, unanswered, attempt }
    }
}

impl Drop for Question<'_> {
    fn drop(&mut self) {
        self.of.lock().unanswered.remove(&self.number);
    }
}

impl Caller {
    fn lock(&self) -> MutexGuard<'_, Questions> {
        self.questions.lock()
    }
}

#[cfg(test)]
mod tests {
    use rectrain_wire::{Address, TcpConfig, TcpTransport, Transport, WireCounters};
    use tokio::io::AsyncReadExt;

    use super::*;

    #[test]
    fn a_question_carries_its_caller_and_is_read_as_if_it_did_not() {
        let request = v1::ChunkReport { epoch: 3, chunk: 4, ..v1::ChunkReport::default() };
        let caller = v1::Caller { id: 7, number: 2, unanswered: vec![1, 2], attempt: 9 };
        let meta = [request.encode_to_vec(), caller.encode_to_vec()].concat();
        assert_eq!(v1::ChunkReport::decode(&*meta).unwrap(), request);
        assert_eq!(v1::Caller::decode(&*meta).unwrap(), caller);
        assert_eq!(v1::Caller::decode(&*request.encode_to_vec()).unwrap(), v1::Caller::default());
    }

    /// A member with a certificate answers so who has none.
    #[tokio::test]
    async fn one_who_closes_whenever_it_is_asked_is_not_asked_for_ever() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = Address::tcp("127.0.0.1", listener.local_addr().unwrap().port());
        let counters = WireCounters::unregistered(|_| "any").unwrap();
        let channel = TcpTransport::new(TcpConfig::default(), counters).connect(&address).unwrap();
        let closing = async {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.read_u8().await.unwrap();
            }
        };
        let coordinator = CoordinatorChannel::new(channel);
        let asking = coordinator.call(v1::AttemptRequest {}, Vec::new(), Duration::from_secs(600));
        let answer = tokio::select! {
            answer = asking => answer,
            () = closing => return,
            () = tokio::time::sleep(Duration::from_secs(20)) => panic!("it is asked for ever"),
        };
        assert!(matches!(answer, Err(RoleError::Wire(WireError::Closed { .. }))), "{answer:?}");
    }

    #[test]
    fn questions_are_numbered_and_what_is_answered_is_told() {
        let (attempt, was_answered) = (AtomicU64::new(9), AtomicBool::new(false));
        let caller = Caller { id: 7, attempt, was_answered, questions: Mutex::default() };
        let (first, second, third) = (Question::new(&caller), Question::new(&caller), Question::new(&caller));
        let expected =
            |number, unanswered: &[u64]| v1::Caller { id: 7, number, unanswered: unanswered.to_vec(), attempt: 9 };
        assert_eq!((first.caller(), third.caller()), (expected(1, &[1]), expected(3, &[1, 2, 3])));
        drop(second);
        assert_eq!((first.caller(), third.caller()), (expected(1, &[1]), expected(3, &[1, 3])));
        drop(first);
        assert_eq!((third.caller(), Question::new(&caller).caller()), (expected(3, &[3]), expected(4, &[3, 4])));
    }
}
