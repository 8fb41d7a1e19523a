//! The REST interface of the Open Inference Protocol v2, and `/metrics`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, Path, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;

use crate::progress::Progress;
use crate::protocol::{InferResponse, ModelMetadata, OutputTensor, PLATFORM, read_request};
use crate::refusal::Refusal;
use crate::service::Service;
use crate::tls::Client;

/// The header with the time limit of a request, in milliseconds.
const TIMEOUT: &str = "x-request-timeout-ms";
/// The time after which a client may repeat a request that was shed, in seconds.
const RETRY_AFTER: &str = "1";
/// Larger bodies are read on a thread of their own, so that they do not delay other requests.
const LARGE_BODY: usize = 64 << 10;

/// The paths for clients without a certificate: a kubelet has none.
const OPEN_PATHS: [&str; 2] = [LIVE, READY];
const LIVE: &str = "/v2/health/live";
const READY: &str = "/v2/health/ready";

/// The model that a path names.
#[derive(Deserialize)]
struct ModelPath {
    name: String,
    version: Option<String>,
}

/// All routes.
pub(crate) fn routes(service: Arc<Service>) -> Router {
    let model =
        |path: &str| [format!("/v2/models/{{name}}{path}"), format!("/v2/models/{{name}}/versions/{{version}}{path}")];
    let mut router = Router::new()
        .route("/v2", get(server_metadata))
        .route(LIVE, get(|| async { json_response(StatusCode::OK, &json!({ "live": true })) }))
        .route(READY, get(ready))
        .route("/metrics", get(metrics));
    for path in model("") {
        router = router.route(&path, get(model_metadata));
    }
    for path in model("/ready") {
        router = router.route(&path, get(model_ready));
    }
    for path in model("/infer") {
        router = router.route(&path, post(infer));
    }
    router.fallback(no_such_path).with_state(service)
}

/// All routes, for connections with TLS. Clients without a certificate are refused if they need
/// one, except for the health of the server.
pub(crate) fn routes_with_tls(service: Arc<Service>, needs_certificate: bool) -> Router {
    let routes = routes(service);
    if needs_certificate { routes.layer(from_fn(require_certificate)) } else { routes }
}

async fn require_certificate(ConnectInfo(client): ConnectInfo<Client>, request: Request, next: Next) -> Response {
    if client.has_certificate || OPEN_PATHS.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    let sentence = "this server answers only clients with a certificate of its --tls-client-ca";
    json_response(StatusCode::FORBIDDEN, &json!({ "error": sentence }))
}

async fn no_such_path() -> Response {
    refuse(&Refusal::NotFound("there is no such path; see the Open Inference Protocol v2".to_owned()))
}

async fn server_metadata() -> Response {
    let metadata = json!({ "name": PLATFORM, "version": env!("CARGO_PKG_VERSION"), "extensions": [] });
    json_response(StatusCode::OK, &metadata)
}

async fn ready(State(service): State<Arc<Service>>) -> Response {
    let is_ready = service.is_ready();
    json_response(ready_status(is_ready), &json!({ "ready": is_ready }))
}

async fn model_ready(State(service): State<Arc<Service>>, Path(path): Path<ModelPath>) -> Response {
    match check_model(&service, &path) {
        Ok(()) => {
            let is_ready = service.is_ready();
            json_response(ready_status(is_ready), &json!({ "name": service.name, "ready": is_ready }))
        }
        Err(refusal) => refuse(&refusal),
    }
}

fn ready_status(is_ready: bool) -> StatusCode {
    if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn model_metadata(State(service): State<Arc<Service>>, Path(path): Path<ModelPath>) -> Response {
    match check_model(&service, &path) {
        Ok(()) => {
            let version = service.version();
            let metadata = ModelMetadata::new(&service.name, &version, service.schema());
            json_response(StatusCode::OK, &metadata)
        }
        Err(refusal) => refuse(&refusal),
    }
}

async fn metrics(State(service): State<Arc<Service>>) -> Response {
    match service.metrics.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

fn check_model(service: &Service, path: &ModelPath) -> Result<(), Refusal> {
    service.check(&path.name, path.version.as_deref())
}

async fn infer(State(service): State<Arc<Service>>, Path(path): Path<ModelPath>, request: Request) -> Response {
    let mut progress = service.begin();
    let response = match answer(&service, &path, request, &mut progress).await {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(refusal) => refuse(&refusal),
    };
    progress.finish(response.status());
    response
}

/// The body of the response.
async fn answer(
    service: &Arc<Service>,
    path: &ModelPath,
    request: Request,
    progress: &mut Progress,
) -> Result<Vec<u8>, Refusal> {
    check_model(service, path)?;
    let permit = service.admit()?;
    let limit = time_limit(request.headers(), service.limits.timeout)?;
    let deadline = progress.started() + limit;
    check_length(request.headers(), service.limits.max_body_bytes)?;
    let answered = tokio::time::timeout_at(deadline.into(), async {
        let body = read_body(request.into_body(), service.limits.max_body_bytes).await?;
        predict(service, body, permit, progress, deadline).await
    });
    answered.await.unwrap_or(Err(Refusal::Late(limit)))
}

/// The time limit of a request: the header's, but at most the server's.
fn time_limit(headers: &HeaderMap, longest: Duration) -> Result<Duration, Refusal> {
    let Some(value) = headers.get(TIMEOUT) else { return Ok(longest) };
    let milliseconds = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok());
    match milliseconds {
        Some(milliseconds @ 1..) => Ok(longest.min(Duration::from_millis(milliseconds))),
        _ => Err(Refusal::Bad(format!("the header {TIMEOUT} is {value:?}; expected milliseconds, from 1"))),
    }
}

/// Refuses a body that is too large before it is read.
fn check_length(headers: &HeaderMap, most: usize) -> Result<(), Refusal> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match length {
        Some(length) if length > most as u64 => Err(too_large(most)),
        _ => Ok(()),
    }
}

fn too_large(most: usize) -> Refusal {
    Refusal::TooLarge(format!("the body of the request is too large: at most {most} bytes are read"))
}

/// The whole body. It may come without its length.
async fn read_body(body: Body, most: usize) -> Result<Vec<u8>, Refusal> {
    let mut pieces = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await {
        let cut = |error: axum::Error| Refusal::Bad(format!("the body of the request cannot be read: {error}"));
        let piece: Bytes = piece.map_err(cut)?;
        if bytes.len() + piece.len() > most {
            return Err(too_large(most));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

async fn predict(
    service: &Arc<Service>,
    body: Vec<u8>,
    permit: OwnedSemaphorePermit,
    progress: &mut Progress,
    deadline: Instant,
) -> Result<Vec<u8>, Refusal> {
    let (id, batch, _permit) = if body.len() < LARGE_BODY {
        decode(service, &body, permit)?
    } else {
        let service = Arc::clone(service);
        // The thread holds the permit, so that a client that goes away does not start another.
        let decoding = tokio::task::spawn_blocking(move || decode(&service, &body, permit));
        decoding.await.unwrap_or(Err(Refusal::Ending))?
    };
    (progress.id, progress.rows) = (id.clone(), batch.samples);
    let predicted = service.predict(batch, deadline).await?;
    let outputs = [OutputTensor::new(predicted.probabilities)];
    let response = InferResponse { model_name: &service.name, model_version: &predicted.version.name, id, outputs };
    serde_json::to_vec(&response).map_err(|error| Refusal::Failed(error.to_string()))
}

/// The id and the rows of a request.
fn decode(
    service: &Service,
    body: &[u8],
    permit: OwnedSemaphorePermit,
) -> Result<(Option<String>, rectrain_data::Batch, OwnedSemaphorePermit), Refusal> {
    let request = read_request(body, service.limits.max_request_rows)?;
    Ok((request.id, service.encode(&request.columns)?, permit))
}

fn refuse(refusal: &Refusal) -> Response {
    let mut response = json_response(refusal.status(), &json!({ "error": refusal.to_string() }));
    if refusal.may_retry() {
        response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static(RETRY_AFTER));
    }
    response
}

fn json_response(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(body) => (status, [(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_may_shorten_its_time_limit() {
        let limit = |value: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            if let Some(value) = value {
                headers.insert(TIMEOUT, header::HeaderValue::from_static(value));
            }
            time_limit(&headers, Duration::from_secs(5))
        };
        assert_eq!(limit(None), Ok(Duration::from_secs(5)));
        assert_eq!(limit(Some("20")), Ok(Duration::from_millis(20)));
        assert_eq!(limit(Some("60000")), Ok(Duration::from_secs(5)));
        for bad in ["", "0", "-1", "20ms", "1.5"] {
            let message = limit(Some(bad)).unwrap_err().to_string();
            assert!(message.contains("x-request-timeout-ms") && message.contains(bad), "{message}");
        }
    }
}
