//! The live page of a job that runs elsewhere, for `rectrain page`.

use axum::Router;
use axum::extract::RawQuery;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::{Seen, live};

/// The page of a job whose coordinator another process reaches. `ask` gets the coordinator's answer
/// to `/job.json` with this query, or a sentence that says why there is none.
pub fn forwarded_page<A>(ask: impl Fn(String) -> A + Clone + Send + Sync + 'static) -> Router
where
    A: Future<Output = Result<String, String>> + Send + 'static,
{
    let job = move |RawQuery(query): RawQuery| {
        // Parsed and written again: only the two numbers reach the other side.
        let Seen { event, point } = Seen::parse(query.as_deref().unwrap_or_default());
        let answer = ask(format!("after={event}&points={point}"));
        async move { respond(answer.await) }
    };
    Router::new().route("/", get(live)).route("/job.json", get(job))
}

fn respond(answer: Result<String, String>) -> Response {
    match answer {
        Ok(job) => ([(header::CONTENT_TYPE, "application/json")], job).into_response(),
        Err(reason) => (StatusCode::BAD_GATEWAY, reason).into_response(),
    }
}
