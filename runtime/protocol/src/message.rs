//! The messages between members: their numbers on the wire, their names, and their replies.
//!
//! A frame's `kind` is the number of its message. The structured part of the frame is the message.
//! `proto/rectrain/v1/roles.proto` documents the tensors beside each message. A number is never
//! reused for another message: [`RETIRED`] lists the numbers of removed messages.

use std::time::Duration;

use prost::Message;
use rectrain_proto::v1;
use rectrain_wire::{Channel, Frame, Refusal, RefusalCode, Tensor, WireError};

use crate::deadline::CALL_DEADLINE;
use crate::error::RoleError;

/// The pause before a retry when the server's process has ended.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// A request of the data plane: its number, its name in metrics, and its reply.
pub trait Request: Message + Default {
    /// The reply of a correct peer.
    type Reply: Message + Default;
    /// The frame's kind. Replies have the same kind.
    const KIND: u16;
}

/// A reply without content: the request was carried out.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Done {}

macro_rules! requests {
    ($($kind:literal $name:literal $request:ident => $reply:ty;)*) => {
        $(impl Request for v1::$request {
            type Reply = $reply;
            const KIND: u16 = $kind;
        })*

        /// The name of a kind of message, for metrics and errors.
        #[must_use]
        pub fn kind_name(kind: u16) -> &'static str {
            match kind {
                $($kind => $name,)*
                _ => "unknown",
            }
        }
    };
}

requests! {
    1 "join" Join => v1::Roster;
    2 "lease" LeaseRequest => v1::LeaseReply;
    3 "chunk_report" ChunkReport => v1::Reported;
    4 "order" OrderRequest => v1::Order;
    5 "horizon" HorizonRequest => v1::Horizon;
    6 "evaluation_lease" EvaluationLeaseRequest => v1::EvaluationLeaseReply;
    7 "evaluation_chunk_report" EvaluationChunkReport => v1::Reported;
    8 "pull" PullRequest => v1::PullReply;
    9 "evaluation_share" EvaluationShare => v1::EvaluationRows;
    10 "progress" Progress => Done;
    11 "training_done" TrainingDone => Done;
    12 "job_end" JobEndRequest => v1::JobEnd;
    13 "failure" Failure => Done;
    14 "batch_report" BatchReport => Done;
    15 "dense_saved" DenseSaved => Done;
    16 "leave" Leave => v1::MayLeave;
    17 "repeat" RepeatRequest => v1::RepeatReply;
    18 "farewell" Farewell => Done;
    19 "attempt" AttemptRequest => v1::Attempt;
    20 "put_batch" PutBatch => Done;
    22 "forward" Forward => v1::Forwarded;
    23 "backward" Backward => v1::BackwardReply;
    24 "lookup" Lookup => v1::LookupReply;
    25 "update" Update => v1::UpdateReply;
    26 "store_digest" StoreDigestRequest => v1::StoreDigests;
    27 "ring_chunk" RingChunk => Done;
    28 "traffic" TrafficRequest => v1::Traffic;
    29 "dense_state" DenseStateRequest => v1::DenseState;
    30 "begin_mode" BeginMode => Done;
    31 "flush" FlushRequest => v1::Flushed;
    32 "put_partition" PutPartition => Done;
    33 "get_partition" GetPartition => v1::Partition;
    34 "push_dense" PushDense => v1::PushReply;
    35 "restore_rows" RestoreRows => v1::RestoredRows;
    36 "freeze" Freeze => v1::Frozen;
    37 "write_frozen" WriteFrozen => v1::WrittenFiles;
    38 "thaw" Thaw => Done;
    40 "map" MapRequest => v1::Placement;
    41 "measure_slots" MeasureSlots => v1::SlotCosts;
    42 "copy_slot" CopySlot => v1::SentRows;
    43 "forward_changes" ForwardChanges => v1::SentRows;
    44 "seal_slots" SealSlots => v1::SentRows;
    45 "put_slots" PutSlots => Done;
    46 "adopt_map" AdoptMap => v1::AdoptedMap;
    47 "release_slots" ReleaseSlots => Done;
    48 "ring" RingRequest => v1::Ring;
    49 "mend" MendRequest => v1::Mended;
    50 "work" WorkRequest => v1::Work;
    51 "evaluation_part" EvaluationPart => v1::EvaluationRows;
    52 "reading" Reading => Done;
    53 "files_found" FilesFound => Done;
    54 "put_journal" PutJournal => Done;
    55 "claim_journal" ClaimJournal => v1::JournalHead;
    56 "set_budget" SetBudget => Done;
    60 "waiting" Waiting => Done;
    61 "stream_found" StreamFound => v1::StreamKnown;
    62 "exchange" Exchange => v1::Exchanged;
    63 "files_seen" FilesSeen => v1::FilesWanted;
    64 "put_first_layer" PutFirstLayer => Done;
    65 "first_layer_gradient" FirstLayerGradientRequest => v1::FirstLayerGradient;
    66 "piece_report" PieceReport => v1::PieceReported;
}

/// The refusal of a parameter server that another coordinator has claimed, or that has a newer copy
/// of the journal. The caller was superseded or has an outdated journal, and must end.
pub const COORDINATOR_SUPERSEDED: RefusalCode = RefusalCode::Application(300);

/// The refusal of a claim by a parameter server that has the journal of another attempt or job.
pub const OTHER_JOURNAL: RefusalCode = RefusalCode::Application(301);

/// Numbers that no message may use again, with their former names.
pub const RETIRED: [(u16, &str); 2] = [(21, "put_dense"), (39, "unassigned")];

/// Sends `request` with `tensors` and waits for the reply.
pub async fn call<R: Request>(
    channel: &Channel,
    request: R,
    tensors: Vec<Tensor>,
    deadline: Duration,
) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
    call_with::<R>(channel, request.encode_to_vec(), tensors, deadline).await
}

/// As [`call`], for a request that is encoded already.
pub async fn call_with<R: Request>(
    channel: &Channel,
    request: Vec<u8>,
    tensors: Vec<Tensor>,
    deadline: Duration,
) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
    let frame = Frame { kind: R::KIND, meta: request.into(), tensors };
    let reply = channel.call(frame, deadline).await?;
    let meta =
        R::Reply::decode(reply.meta).map_err(|source| RoleError::Reply { message: kind_name(R::KIND), source })?;
    Ok((meta, reply.tensors))
}

/// As [`call`], for a parameter server that keeps its rows when it is killed. Retries when the
/// server's process ends. `tensors` builds the request's tensors for each attempt.
pub async fn call_server<R: Request + Clone>(
    server: &Channel,
    request: R,
    tensors: impl FnMut() -> Result<Vec<Tensor>, RoleError>,
) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
    call_server_within(server, request, tensors, CALL_DEADLINE).await
}

/// As [`call_server`], with `patience` as the deadline.
pub async fn call_server_within<R: Request + Clone>(
    server: &Channel,
    request: R,
    mut tensors: impl FnMut() -> Result<Vec<Tensor>, RoleError>,
    patience: Duration,
) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
    let asking = async {
        loop {
            match call(server, request.clone(), tensors()?, patience).await {
                // The retry connects to the server's next process, or waits for it.
                Err(RoleError::Wire(WireError::Closed { .. })) => tokio::time::sleep(RETRY_PAUSE).await,
                answered => return answered,
            }
        }
    };
    let silent =
        || RoleError::Task { what: "a call to a parameter server", reason: format!("no answer within {patience:?}") };
    tokio::time::timeout(patience, asking).await.map_err(|_| silent())?
}

/// Reads the request in `frame`. Refuses a malformed one.
pub fn read<R: Request>(frame: Frame) -> Result<(R, Vec<Tensor>), Refusal> {
    match R::decode(frame.meta) {
        Ok(request) => Ok((request, frame.tensors)),
        Err(error) => Err(refuse_malformed(format!("{}: {error}", kind_name(R::KIND)))),
    }
}

/// The caller of a request to the coordinator.
pub fn caller(frame: &Frame) -> Result<v1::Caller, Refusal> {
    v1::Caller::decode(frame.meta.clone())
        .map_err(|error| refuse_malformed(format!("{}: {error}", kind_name(frame.kind))))
}

/// The reply to an `R`.
pub fn reply<R: Request>(meta: &R::Reply, tensors: Vec<Tensor>) -> Frame {
    Frame { kind: R::KIND, meta: meta.encode_to_vec().into(), tensors }
}

/// The reply to an `R` that has no other content.
pub fn done<R: Request<Reply = Done>>() -> Frame {
    reply::<R>(&Done {}, Vec::new())
}

pub fn refuse_malformed(message: String) -> Refusal {
    Refusal { code: RefusalCode::InvalidRequest, message, retryable: false }
}

pub fn refuse_kind(role: &str, kind: u16) -> Refusal {
    refuse_malformed(format!("a {role} does not answer `{}` ({kind})", kind_name(kind)))
}

/// Takes exactly `N` tensors from a message.
pub fn take<const N: usize>(what: &'static str, tensors: Vec<Tensor>) -> Result<[Tensor; N], RoleError> {
    let found = tensors.len();
    tensors.try_into().map_err(|_| RoleError::Tensors { message: what, expected: N, found })
}

/// Takes the next tensor of a message that must have one.
pub fn next(what: &'static str, tensors: &mut impl Iterator<Item = Tensor>) -> Result<Tensor, RoleError> {
    tensors.next().ok_or(RoleError::Inconsistent { message: what, reason: "a tensor is missing".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retired_numbers_are_not_used_again() {
        for (number, name) in RETIRED {
            assert_eq!(kind_name(number), "unknown", "{number} was `{name}`");
        }
        let numbers: Vec<u16> = (1..=55).filter(|number| kind_name(*number) == "unknown").collect();
        assert_eq!(numbers, RETIRED.map(|(number, _)| number), "every other number is a message");
    }
}
