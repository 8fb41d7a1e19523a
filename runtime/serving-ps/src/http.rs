//! Health and metrics over HTTP.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::sync::watch;

use crate::held::Held;
use crate::metrics::Metrics;

/// The state of the routes.
pub(crate) struct Status {
    pub(crate) held: watch::Receiver<Held>,
    pub(crate) metrics: Metrics,
}

pub(crate) fn routes(status: Status) -> Router {
    Router::new()
        .route("/v2/health/live", get(|| async { StatusCode::OK }))
        .route("/v2/health/ready", get(ready))
        .route("/metrics", get(metrics))
        .with_state(Arc::new(status))
}

/// Ready once a version is loaded, and until the server ends.
async fn ready(State(status): State<Arc<Status>>) -> StatusCode {
    let held = status.held.borrow();
    if held.ending || held.newest().is_none() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

async fn metrics(State(status): State<Arc<Status>>) -> Response {
    match status.metrics.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
