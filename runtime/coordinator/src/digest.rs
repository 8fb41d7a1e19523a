//! The digest of a trained model: SHA-256 over the digest of the dense parameters, followed by the
//! digests of all slots in slot order.
//! It does not depend on the placement of slots on parameter servers.

use futures::future::try_join_all;
use rectrain_crds::TableSummary;
use rectrain_embedding::Slot;
use rectrain_proto::v1;
use sha2::{Digest, Sha256};

use super::hexadecimal::hexadecimal;
use super::snapshot::{AppliedGradients, Before};
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{Summary, with_counts};
use rectrain_protocol::message;
use rectrain_protocol::placement::Placement;
use rectrain_protocol::plan::JobPlan;

/// Bytes of a SHA-256.
const LENGTH: usize = 32;

/// Adds to the summary the digest of the model, the rows and bytes of all servers, and the
/// gradients applied without a barrier.
pub(super) async fn of_model(
    plan: &JobPlan,
    dense_digest: &[u8],
    placement: &Placement,
    before: Before,
    summary: &mut Summary,
) -> Result<(), RoleError> {
    // A server with many rows may take long. `server_progress` watches it.
    let calls = placement
        .servers
        .iter()
        .map(|server| message::call_server_within(server, v1::StoreDigestRequest {}, || Ok(Vec::new()), WHOLE_JOB));
    let mut by_server = Vec::with_capacity(placement.servers.len());
    let mut applied = Vec::with_capacity(placement.servers.len());
    let mut table = before.table;
    for (reply, tensors) in try_join_all(calls).await? {
        let [digests] = message::take("store_digest", tensors)?;
        let digests = digests.expect_u8("digests")?;
        let expected = plan.store.slots as usize * LENGTH;
        if digests.len() != expected {
            let reason = format!("expected {expected} bytes, found {}", digests.len());
            return Err(RoleError::Inconsistent { message: "store_digest", reason });
        }
        by_server.push(digests);
        summary.rows += reply.rows;
        summary.store_bytes += reply.bytes;
        table = with_counts(table, reply.table.unwrap_or_default());
        applied.push(reply.applied.unwrap_or_default());
    }
    let table = TableSummary { rows: summary.rows, bytes: summary.store_bytes, ..table };
    summary.table = plan.has_managed_rows().then_some(table);
    let mut hash = Sha256::new();
    hash.update(dense_digest);
    for slot in 0..plan.store.slots {
        let start = slot as usize * LENGTH;
        hash.update(&by_server[placement.map.owner(Slot(slot))][start..start + LENGTH]);
    }
    summary.parameters_sha256 = hexadecimal(&hash.finalize());
    let applied = AppliedGradients::mean_of(&applied).plus(before.applied);
    (summary.fewest_applied_gradients, summary.most_applied_gradients) = (applied.fewest, applied.most);
    summary.excluded_gradients = applied.excluded;
    summary.mean_staleness = applied.mean_staleness();
    summary.max_staleness = applied.staleness_max;
    Ok(())
}
