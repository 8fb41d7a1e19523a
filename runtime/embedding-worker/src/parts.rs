//! A look-up on one server. In `sync` the server may answer it in two parts: the rows that no step
//! before changes, and the others once the steps before are applied.

use std::time::Duration;

use rectrain_kinds::Compression;
use rectrain_proto::v1;
use rectrain_protocol::compression::TensorCodec;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::key_set::KeySet;
use rectrain_protocol::message;
use rectrain_wire::{Channel, Tensor};

/// The answer of one server with its rows, or in `des` with its partial results.
pub(crate) struct Answer<T = Vec<Vec<f32>>> {
    /// By row group: `[keys, row dim]`. `None` if the server has applied the step and no longer has
    /// the rows from before it.
    pub(crate) rows: Option<T>,
    /// In modes without a barrier: the step of the server.
    pub(crate) step: u64,
    pub(crate) is_applied: bool,
    /// In an evaluation: the keys without a row, as in the message.
    pub(crate) missing: Vec<u8>,
    /// Seconds until the server knew the keys of the steps before. It waited for other members.
    pub(crate) early_seconds: f64,
    /// Seconds that the look-up then waited for the steps before.
    pub(crate) gate_seconds: f64,
}

/// How a look-up is sent to one server.
pub(crate) struct Asking<'w> {
    pub(crate) channel: &'w Channel,
    pub(crate) request: v1::Lookup,
    pub(crate) compression: Compression,
    /// By row group: the number of columns of a row.
    pub(crate) dims: &'w [usize],
    pub(crate) patience: Duration,
}

impl Asking<'_> {
    /// Sends these keys, by row group.
    pub(crate) async fn look_up(&self, keys: Vec<Vec<u64>>) -> Result<Answer, RoleError> {
        if self.request.piece.is_none() {
            // The server answers such a request whole, so nothing needs the keys again.
            let (reply, rows) = self.call(self.request, keys).await?;
            return Ok(Answer::whole(reply, rows));
        }
        let mut answer = self.in_parts(&keys).await?;
        if answer.is_none() {
            // The server applied the step between the parts, after a worker that died had sent all
            // gradients. It now repeats a reply if it has both parts of it.
            answer = self.in_parts(&keys).await?;
        }
        Ok(answer.unwrap_or_else(Answer::without_rows))
    }

    /// Requests all keys, and then the keys that an early reply leaves out. The second request is
    /// sent even if there are none. The server answers it when the steps before are applied, and no
    /// dense worker may push the gradients of this step earlier. `None` if the server has the
    /// second part no longer.
    async fn in_parts(&self, keys: &[Vec<u64>]) -> Result<Option<Answer>, RoleError> {
        let (mut first, now) = self.call(self.request, keys.to_vec()).await?;
        let now = match now {
            Some(now) if first.is_early => now,
            now => return Ok(Some(Answer::whole(first, now))),
        };
        let gate_seconds = first.gate_seconds;
        let deferred = KeySet::read(keys.iter().map(Vec::len).sum(), std::mem::take(&mut first.deferred))?;
        let (second, rest) = self.call(v1::Lookup { piece: None, ..self.request }, chosen(keys, &deferred)).await?;
        let Some(rest) = rest else { return Ok(None) };
        let rows = self.together(keys, &deferred, &now, &rest)?;
        let v1::LookupReply { is_applied, gate_seconds: waited, .. } = second;
        Ok(Some(Answer {
            rows: Some(rows),
            is_applied,
            early_seconds: gate_seconds,
            gate_seconds: waited,
            ..Answer::whole(first, None)
        }))
    }

    /// Sends a request. Returns its reply with the rows by group, or without rows if the server has
    /// applied the step and no longer has them.
    async fn call(
        &self,
        request: v1::Lookup,
        keys: Vec<Vec<u64>>,
    ) -> Result<(v1::LookupReply, Option<Vec<Vec<f32>>>), RoleError> {
        let tensors = keys.into_iter().map(Tensor::from).collect();
        let (reply, tensors) = message::call(self.channel, request, tensors, self.patience).await?;
        if reply.is_applied && tensors.is_empty() {
            return Ok((reply, None));
        }
        let mut tensors = tensors.into_iter();
        let rows = self.dims.iter().map(|dim| self.compression.decode("lookup", &mut tensors, *dim));
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        Ok((reply, Some(rows)))
    }

    /// The rows of all keys in their order, from the rows of both parts.
    fn together(
        &self,
        keys: &[Vec<u64>],
        deferred: &KeySet,
        now: &[Vec<f32>],
        rest: &[Vec<f32>],
    ) -> Result<Vec<Vec<f32>>, RoleError> {
        let mut is_deferred = deferred.iter();
        let mut groups = Vec::with_capacity(keys.len());
        for (((keys, dim), now), rest) in keys.iter().zip(self.dims).zip(now).zip(rest) {
            let marks: Vec<bool> = is_deferred.by_ref().take(keys.len()).collect();
            groups.push(interleave(&marks, now, rest, *dim)?);
        }
        Ok(groups)
    }
}

impl Answer {
    /// The answer of a reply with all rows, or of a server that no longer has them.
    fn whole(reply: v1::LookupReply, rows: Option<Vec<Vec<f32>>>) -> Self {
        let v1::LookupReply { step, is_applied, missing, gate_seconds, .. } = reply;
        Self { rows, step, is_applied, missing, early_seconds: 0.0, gate_seconds }
    }

    /// The answer of a server that has applied the step and no longer has the rows.
    const fn without_rows() -> Self {
        Self { rows: None, step: 0, is_applied: true, missing: Vec::new(), early_seconds: 0.0, gate_seconds: 0.0 }
    }
}

/// The keys of the set, by row group.
fn chosen(keys: &[Vec<u64>], set: &KeySet) -> Vec<Vec<u64>> {
    let mut is_chosen = set.iter();
    let of_group = |keys: &Vec<u64>| -> Vec<u64> {
        keys.iter().zip(is_chosen.by_ref()).filter(|(_, is)| *is).map(|(key, _)| *key).collect()
    };
    keys.iter().map(of_group).collect()
}

/// Rows of `dim` columns: for each mark the next one of `marked` or of `others`.
///
/// # Errors
/// There are not as many rows of each kind as marks.
fn interleave(marks: &[bool], others: &[f32], marked: &[f32], dim: usize) -> Result<Vec<f32>, RoleError> {
    let (expected, found) = (marks.len() * dim, others.len() + marked.len());
    let (mut others, mut marked) = (others.chunks_exact(dim.max(1)), marked.chunks_exact(dim.max(1)));
    let mut rows = Vec::with_capacity(expected);
    for is_marked in marks {
        let next = if *is_marked { marked.next() } else { others.next() };
        rows.extend_from_slice(next.unwrap_or_default());
    }
    if rows.len() == expected && found == expected {
        return Ok(rows);
    }
    let reason = format!("{expected} values were asked for in two parts, {found} came");
    Err(RoleError::Inconsistent { message: "lookup", reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_group_return_to_their_places() {
        let marks = [false, true, true, false, true];
        let rows = interleave(&marks, &[0.0, 0.5, 3.0, 3.5], &[1.0, 1.5, 2.0, 2.5, 4.0, 4.5], 2).unwrap();
        assert_eq!(rows, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]);
        assert_eq!(interleave(&[], &[], &[], 3).unwrap(), Vec::<f32>::new());
    }

    #[test]
    fn parts_of_another_size_are_refused() {
        let marks = [false, true];
        for (others, marked) in [(1, 0), (0, 1), (2, 0), (0, 2), (2, 1), (1, 2)] {
            assert!(interleave(&marks, &vec![0.0; others], &vec![0.0; marked], 1).is_err(), "{others} and {marked}");
        }
    }

    #[test]
    fn the_keys_left_out_are_chosen_by_group() {
        let keys = [vec![1, 2, 3], Vec::new(), vec![4, 5]];
        let mut set = KeySet::none_of(5);
        [1, 3].into_iter().for_each(|key| set.insert(key));
        assert_eq!(chosen(&keys, &set), [vec![2], Vec::new(), vec![4]]);
    }
}
