//! `/healthz`, `/readyz`, `/metrics` and `/traces/NAMESPACE/JOB` of the operator.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::metrics::OperatorMetrics;
use crate::traces::Traces;

/// What the endpoints tell of.
#[derive(Clone)]
pub struct Admin {
    /// What is served on `/metrics`.
    pub metrics: OperatorMetrics,
    /// Set once the API server was reached; an instance that stands by is ready too.
    pub is_ready: Arc<AtomicBool>,
    /// What is served on `/traces`.
    pub traces: Arc<Traces>,
}

/// Serves until the process ends; gives the address that was bound (port 0 takes any free one).
///
/// # Errors
/// If the address cannot be bound.
pub async fn serve(address: SocketAddr, admin: Admin) -> std::io::Result<SocketAddr> {
    // A kernel without version 6 has all of version 4 only.
    let version_4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()));
    let is_all = address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    let addresses = [address, if is_all { version_4 } else { address }];
    let listener = tokio::net::TcpListener::bind(&addresses[..]).await?;
    let bound = listener.local_addr()?;
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route("/traces/{namespace}/{job}", get(trace))
        .with_state(admin);
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%error, "the server of health and metrics ended");
        }
    });
    Ok(bound)
}

async fn ready(State(admin): State<Admin>) -> Response {
    if admin.is_ready.load(Ordering::Relaxed) {
        "ok\n".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the API server was not reached yet\n").into_response()
    }
}

async fn metrics(State(admin): State<Admin>) -> Response {
    match admin.metrics.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn trace(State(admin): State<Admin>, Path((namespace, job)): Path<(String, String)>) -> Response {
    let nothing = || {
        let told = format!(
            "nothing was observed of job {job} in {namespace}: it leaves nothing to decide, has not trained yet, or another instance leads\n"
        );
        (StatusCode::NOT_FOUND, told).into_response()
    };
    let lines = |text| ([(header::CONTENT_TYPE, "application/jsonl")], text).into_response();
    admin.traces.of(&namespace, &job).map_or_else(nothing, lines)
}
