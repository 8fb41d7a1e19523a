//! The operator's HTTP endpoints: `/healthz`, `/readyz`, `/metrics` and `/traces/NAMESPACE/JOB`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::metrics::OperatorMetrics;
use crate::names::JobName;
use crate::traces::Traces;

/// The sources of the endpoints.
#[derive(Clone)]
pub struct Admin {
    /// Served on `/metrics`.
    pub metrics: OperatorMetrics,
    /// Whether the API server answers. A standby instance is ready, too.
    pub is_ready: Arc<AtomicBool>,
    /// Served on `/traces`.
    pub traces: Arc<Traces>,
}

/// Serves until the process ends. Returns the bound address; port 0 binds any free port.
///
/// # Errors
/// If the address cannot be bound.
pub async fn serve(address: SocketAddr, admin: Admin) -> std::io::Result<SocketAddr> {
    // A kernel without IPv6 has only the IPv4 wildcard address.
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
        (StatusCode::SERVICE_UNAVAILABLE, "the API server does not answer\n").into_response()
    }
}

async fn metrics(State(admin): State<Admin>) -> Response {
    match admin.metrics.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn trace(State(admin): State<Admin>, Path((namespace, name)): Path<(String, String)>) -> Response {
    let job = JobName { namespace, name };
    match admin.traces.of(&job) {
        Some(lines) => ([(header::CONTENT_TYPE, "application/jsonl")], lines).into_response(),
        None => {
            let JobName { namespace, name } = job;
            let message = format!(
                "no trace of job {name} in {namespace}: it has no automatic decisions, has not trained yet, or another instance leads\n"
            );
            (StatusCode::NOT_FOUND, message).into_response()
        }
    }
}
