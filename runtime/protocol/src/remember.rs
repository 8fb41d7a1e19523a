//! A layer around a service that answers repeated requests with the first reply.
//!
//! A caller repeats a request if the connection broke before the reply arrived. The replacement of
//! a dead process may also repeat a request of that process. The layer answers a repeated request
//! with the first reply, so handlers need not detect repeats.
//!
//! A [`Memory`] decides which requests it covers, how long it keeps a reply, and where. Each role
//! has its own. Embedding workers keep delivered pieces and acknowledgements of gradients
//! (`rectrain_embedding_worker`). Parameter servers keep the replies to look-ups of the last steps
//! (`rectrain_parameter_server`).

use std::sync::Arc;

use rectrain_wire::{BoxFuture, Frame, Peer, Refusal, Service};

/// Replies by the key of their request.
pub trait Memory: Send + Sync + 'static {
    /// Identifies a request. A request and its repeats have the same key.
    type Key: Send + Sync;

    /// The key of a request that the memory covers; `None` for every other request.
    ///
    /// # Errors
    /// The request cannot be read.
    fn key(&self, request: &Frame) -> Result<Option<Self::Key>, Refusal>;

    /// The reply to an earlier request with this key, if the memory has it.
    fn recall(&self, key: &Self::Key) -> Option<Frame>;

    /// Resolves to the reply once the memory has it. This happens if the service answers another
    /// request with the same key first.
    fn recalled<'a>(&'a self, key: &'a Self::Key) -> BoxFuture<'a, Frame>;

    /// Stores the service's reply before the layer sends it. Returns the reply to send: this one,
    /// or the stored reply to an earlier request with the same key.
    fn settle(&self, key: Self::Key, reply: Frame) -> Frame;
}

/// A service that remembers its replies.
pub struct Remembering<S, M> {
    service: Arc<S>,
    memory: Arc<M>,
}

impl<S, M> Remembering<S, M> {
    /// Adds `memory` to `service`.
    pub const fn new(service: Arc<S>, memory: Arc<M>) -> Self {
        Self { service, memory }
    }
}

impl<S: Service, M: Memory> Service for Remembering<S, M> {
    fn call<'a>(&'a self, peer: &'a Peer, request: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            let Some(key) = self.memory.key(&request)? else { return self.service.call(peer, request).await };
            if let Some(reply) = self.memory.recall(&key) {
                return Ok(reply);
            }
            tokio::select! {
                biased;
                reply = self.service.call(peer, request) => Ok(self.memory.settle(key, reply?)),
                reply = self.memory.recalled(&key) => Ok(reply),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};

    use parking_lot::Mutex;
    use rectrain_wire::RefusalCode;
    use tokio::sync::Notify;

    use super::*;

    /// Gives each request a new number as its reply, once `go` is notified.
    struct Counting {
        calls: AtomicU64,
        go: Notify,
    }

    impl Service for Counting {
        fn call<'a>(&'a self, _peer: &'a Peer, request: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
            Box::pin(async move {
                self.go.notified().await;
                let number = self.calls.fetch_add(1, Ordering::Relaxed);
                Ok(Frame { meta: number.to_le_bytes().to_vec().into(), ..request })
            })
        }
    }

    /// Keeps the last `most` replies, by the first byte of the request. Does not cover requests of
    /// kind 9.
    #[derive(Default)]
    struct Last {
        most: usize,
        replies: Mutex<BTreeMap<u8, Frame>>,
        changed: Notify,
    }

    impl Memory for Last {
        type Key = u8;

        fn key(&self, request: &Frame) -> Result<Option<u8>, Refusal> {
            let empty = || Refusal::retryable(RefusalCode::InvalidRequest, "it is empty".to_owned());
            let first = *request.meta.first().ok_or_else(empty)?;
            Ok((request.kind != 9).then_some(first))
        }

        fn recall(&self, key: &u8) -> Option<Frame> {
            self.replies.lock().get(key).cloned()
        }

        fn recalled<'a>(&'a self, key: &'a u8) -> BoxFuture<'a, Frame> {
            Box::pin(async move {
                loop {
                    let changed = self.changed.notified();
                    if let Some(reply) = self.recall(key) {
                        return reply;
                    }
                    changed.await;
                }
            })
        }

        fn settle(&self, key: u8, reply: Frame) -> Frame {
            let mut replies = self.replies.lock();
            let kept = replies.entry(key).or_insert(reply).clone();
            if replies.len() > self.most {
                replies.pop_first();
            }
            drop(replies);
            self.changed.notify_waiters();
            kept
        }
    }

    type Layer = (Arc<Counting>, Arc<Last>, Remembering<Counting, Last>);

    fn layer(most: usize) -> Layer {
        let service = Arc::new(Counting { calls: AtomicU64::new(0), go: Notify::new() });
        let memory = Arc::new(Last { most, ..Last::default() });
        (Arc::clone(&service), Arc::clone(&memory), Remembering::new(service, memory))
    }

    fn request(kind: u16, key: u8) -> Frame {
        Frame { kind, meta: vec![key].into(), tensors: Vec::new() }
    }

    async fn answer((service, _, layer): &Layer, request: Frame) -> u64 {
        service.go.notify_one();
        let reply = layer.call(&Peer::new("test", 0), request).await.unwrap();
        u64::from_le_bytes(reply.meta[..].try_into().unwrap())
    }

    #[tokio::test]
    async fn a_repeated_request_gets_the_first_reply() {
        let layer = layer(8);
        assert_eq!(answer(&layer, request(1, 5)).await, 0);
        assert_eq!(answer(&layer, request(1, 5)).await, 0);
        assert_eq!(answer(&layer, request(1, 6)).await, 1);
    }

    #[tokio::test]
    async fn requests_outside_the_memory_are_served_each_time() {
        let layer = layer(8);
        assert_eq!(answer(&layer, request(9, 5)).await, 0);
        assert_eq!(answer(&layer, request(9, 5)).await, 1);
        layer.0.go.notify_one();
        let refused = layer.2.call(&Peer::new("test", 0), Frame { meta: Vec::new().into(), ..request(1, 0) }).await;
        assert!(refused.is_err());
    }

    #[tokio::test]
    async fn a_reply_beyond_the_bound_is_computed_again() {
        let layer = layer(1);
        assert_eq!(answer(&layer, request(1, 1)).await, 0);
        assert_eq!(answer(&layer, request(1, 2)).await, 1);
        assert_eq!(answer(&layer, request(1, 1)).await, 2);
    }

    #[tokio::test]
    async fn a_waiting_request_takes_the_reply_of_a_faster_one() {
        let layer = layer(8);
        let peer = Peer::new("test", 0);
        let waiting = layer.2.call(&peer, request(1, 5));
        let settling = async {
            tokio::task::yield_now().await;
            layer.1.settle(5, Frame { meta: 77u64.to_le_bytes().to_vec().into(), ..request(1, 5) })
        };
        let (reply, _) = tokio::join!(waiting, settling);
        assert_eq!(reply.unwrap().meta[..], 77u64.to_le_bytes());
        assert_eq!(layer.0.calls.load(Ordering::Relaxed), 0, "the service never answered");
    }
}
