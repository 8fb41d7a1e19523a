//! Waiting for an API server that does not answer: at the start, and readiness afterwards.
//!
//! A process that exits instead is restarted with a back-off, and so returns up to minutes after
//! the API server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kube::{Client, Error};
use tokio::time::Instant;

use crate::metrics::OperatorMetrics;

/// Pauses between two calls of a silent API server.
const PAUSES: Pauses = Pauses { first: Duration::from_millis(500), longest: Duration::from_secs(5) };
/// Looks at the API server once it has answered. One lost call is no silence.
const LOOKS: Looks = Looks { every: Duration::from_secs(5), silent_after: Duration::from_secs(12) };

#[derive(Clone, Copy, Debug)]
struct Looks {
    every: Duration,
    /// Time without an answer after which the instance is no longer ready.
    silent_after: Duration,
}

#[derive(Clone, Copy)]
struct Pauses {
    first: Duration,
    longest: Duration,
}

impl Pauses {
    /// The pause after the failure that `self.first` followed.
    fn next(self) -> Self {
        Self { first: self.first.saturating_mul(2).min(self.longest), ..self }
    }
}

/// Whether the API server gave no answer of its own, so the same call may succeed later. It has
/// answered if it refuses the call, for instance because rights are missing.
#[must_use]
pub fn is_silent(error: &Error) -> bool {
    match error {
        Error::Api(status) => status.code >= 500 || matches!(status.code, 408 | 429),
        Error::HyperError(_) | Error::Service(_) | Error::ReadEvents(_) => true,
        _ => false,
    }
}

/// Repeats `call` until the API server answers it.
///
/// # Errors
/// The first error that `is_silence` does not count as silence.
pub async fn answered<T, E, Answer>(
    call: impl Fn() -> Answer,
    is_silence: impl Fn(&E) -> bool,
    metrics: &OperatorMetrics,
) -> Result<T, E>
where
    E: std::fmt::Display,
    Answer: Future<Output = Result<T, E>>,
{
    answered_with(PAUSES, call, is_silence, metrics).await
}

async fn answered_with<T, E, Answer>(
    mut pauses: Pauses,
    call: impl Fn() -> Answer,
    is_silence: impl Fn(&E) -> bool,
    metrics: &OperatorMetrics,
) -> Result<T, E>
where
    E: std::fmt::Display,
    Answer: Future<Output = Result<T, E>>,
{
    loop {
        match call().await {
            Err(error) if is_silence(&error) => {
                metrics.api_server_answers(false);
                tracing::warn!(%error, retry_after = ?pauses.first, "waiting for the API server, which does not answer");
                tokio::time::sleep(pauses.first).await;
                pauses = pauses.next();
            }
            result => return result,
        }
    }
}

/// Whether the API server answers, by the looks at it. Pure.
#[derive(Debug)]
struct Hearing {
    last_answer: Instant,
    silent_after: Duration,
}

impl Hearing {
    /// Records a look at `now`. Returns whether the API server counts as answering.
    fn note(&mut self, has_answered: bool, now: Instant) -> bool {
        if has_answered {
            self.last_answer = now;
        }
        now.duration_since(self.last_answer) < self.silent_after
    }
}

/// Keeps `is_ready` up to date after the API server's first answer. Never returns. Calls of
/// `client` must have a timeout.
pub async fn watch_readiness(client: Client, is_ready: Arc<AtomicBool>, metrics: OperatorMetrics) {
    look(LOOKS, client, is_ready, metrics).await;
}

async fn look(looks: Looks, client: Client, is_ready: Arc<AtomicBool>, metrics: OperatorMetrics) {
    let mut hearing = Hearing { last_answer: Instant::now(), silent_after: looks.silent_after };
    loop {
        tokio::time::sleep(looks.every).await;
        let has_answered = client.apiserver_version().await.map_or_else(|error| !is_silent(&error), |_| true);
        let is_heard = hearing.note(has_answered, Instant::now());
        metrics.api_server_answers(is_heard);
        if is_ready.swap(is_heard, Ordering::Relaxed) != is_heard {
            note_change(is_heard, looks.silent_after);
        }
    }
}

fn note_change(is_heard: bool, silent_after: Duration) {
    if is_heard {
        tracing::info!("the API server answers again: ready");
    } else {
        tracing::warn!("the API server has not answered for {silent_after:?}: not ready, and waiting for it");
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::AtomicU32;

    use http::{Request, Response};
    use kube::client::Body;

    use super::*;

    fn metrics() -> OperatorMetrics {
        OperatorMetrics::new().expect("they register")
    }

    /// An API server that answers its first `failures` calls with `code`, and then with a version.
    fn server(failures: u32, code: u16) -> (Client, Arc<AtomicU32>) {
        let calls = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&calls);
        let service = tower::service_fn(move |_: Request<Body>| {
            let call = counted.fetch_add(1, Ordering::Relaxed);
            async move { Ok::<_, Infallible>(if call < failures { refusal(code) } else { version() }) }
        });
        (Client::new(service, "default"), calls)
    }

    fn refusal(code: u16) -> Response<Body> {
        let status = serde_json::json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code, "reason": "None", "message": "no"});
        response(code, &status)
    }

    fn version() -> Response<Body> {
        let fields = [
            "major",
            "minor",
            "gitVersion",
            "gitCommit",
            "gitTreeState",
            "buildDate",
            "goVersion",
            "compiler",
            "platform",
        ];
        let version: serde_json::Map<_, _> = fields.map(|field| (field.to_owned(), "1".into())).into_iter().collect();
        response(200, &version.into())
    }

    fn response(code: u16, value: &serde_json::Value) -> Response<Body> {
        Response::builder().status(code).body(Body::from(value.to_string().into_bytes())).expect("a response")
    }

    #[tokio::test]
    async fn a_start_waits_for_a_silent_api_server() {
        let (client, calls) = server(20, 503);
        let pauses = Pauses { first: Duration::from_millis(1), longest: Duration::from_millis(4) };
        let answer = answered_with(pauses, || client.apiserver_version(), is_silent, &metrics()).await;
        assert!(answer.is_ok() && calls.load(Ordering::Relaxed) == 21);
    }

    #[test]
    fn no_pause_is_longer_than_five_seconds() {
        let mut pauses = PAUSES;
        for _ in 0..100 {
            pauses = pauses.next();
        }
        assert_eq!(pauses.first, Duration::from_secs(5));
    }

    #[tokio::test]
    async fn a_start_does_not_wait_when_rights_are_missing() {
        let (client, calls) = server(20, 403);
        let answer = answered(|| client.apiserver_version(), is_silent, &metrics()).await;
        assert!(answer.is_err() && calls.load(Ordering::Relaxed) == 1);
    }

    #[tokio::test]
    async fn readiness_ends_with_a_silence_and_returns_after_it() {
        let (client, _) = server(20, 503);
        let is_ready = Arc::new(AtomicBool::new(true));
        let metrics = metrics();
        let looks = Looks { every: Duration::from_millis(20), silent_after: Duration::from_millis(100) };
        tokio::spawn(look(looks, client, Arc::clone(&is_ready), metrics.clone()));
        let answers = "rectrain_operator_api_server_answers 1\n";
        for expected in [false, true] {
            let turned = async {
                while is_ready.load(Ordering::Relaxed) != expected {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(20), turned).await.expect("it turns");
            assert_eq!(metrics.encode().expect("they are served").contains(answers), expected);
        }
    }

    #[test]
    fn two_lost_calls_are_no_silence() {
        let begun = Instant::now();
        let mut hearing = Hearing { last_answer: begun, silent_after: LOOKS.silent_after };
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert!(hearing.note(false, at(5)) && hearing.note(false, at(10)));
        assert!(!hearing.note(false, at(15)));
        assert!(hearing.note(true, at(20)) && hearing.note(false, at(30)));
    }
}
