//! The digest of a trained model: SHA-256 over the dense parameters' digest and then every slot's digest, in slot order. Slots in
//! order are keys in order, so it does not depend on how slots are spread over parameter servers.

use futures::future::try_join_all;
use rectrain_embedding::Slot;
use rectrain_proto::v1;
use rectrain_wire::Channel;
use sha2::{Digest, Sha256};

use crate::error::RoleError;
use crate::events::Summary;
use crate::message;
use crate::plan::{CALL_DEADLINE, JobPlan};

/// Bytes of a SHA-256.
const LENGTH: usize = 32;

/// Puts the model's digest, the rows and bytes of all servers, and what was applied without a barrier into the summary.
pub(super) async fn of_model(
    plan: &JobPlan,
    dense_digest: &[u8],
    servers: &[Channel],
    summary: &mut Summary,
) -> Result<(), RoleError> {
    let calls =
        servers.iter().map(|server| message::call(server, v1::StoreDigestRequest {}, Vec::new(), CALL_DEADLINE));
    let mut by_server = Vec::with_capacity(servers.len());
    let mut applied = v1::Applied::default();
    for (reply, tensors) in try_join_all(calls).await? {
        let [digests] = message::take("store_digest", tensors)?;
        let digests = digests.expect_u8("digests")?;
        let expected = plan.store.slots as usize * LENGTH;
        if digests.len() != expected {
            let reason = format!("{expected} bytes were expected, {} came", digests.len());
            return Err(RoleError::Inconsistent { message: "store_digest", reason });
        }
        by_server.push(digests);
        summary.rows += reply.rows;
        summary.store_bytes += reply.bytes;
        let server = reply.applied.unwrap_or_default();
        applied.gradients += server.gradients;
        applied.excluded += server.excluded;
        applied.staleness_sum += server.staleness_sum;
        applied.staleness_max = applied.staleness_max.max(server.staleness_max);
    }
    let slots = plan.slot_map();
    let mut hash = Sha256::new();
    hash.update(dense_digest);
    for slot in 0..plan.store.slots {
        let start = slot as usize * LENGTH;
        hash.update(&by_server[slots.owner(Slot(slot))][start..start + LENGTH]);
    }
    summary.parameters_sha256 = hex(&hash.finalize());
    // Each server applies its part of every gradient.
    summary.excluded_gradients = applied.excluded / servers.len().max(1) as u64;
    summary.mean_staleness = applied.staleness_sum as f64 / applied.gradients.max(1) as f64;
    summary.max_staleness = applied.staleness_max;
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
