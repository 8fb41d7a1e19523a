//! The gRPC interface of the Open Inference Protocol v2. It answers as the REST interface does.
//! Values are typed or raw, and a response has the form of its request. Without `null`, a missing
//! value is an empty text or NaN.

use std::sync::Arc;

use axum::http::StatusCode;
use rectrain_data::{Column, Values};
use rectrain_proto::inference as v2;
use rectrain_proto::inference::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
use rectrain_proto::inference::model_infer_request::InferInputTensor;
use rectrain_proto::inference::model_infer_response::InferOutputTensor;
use rectrain_proto::inference::model_metadata_response::TensorMetadata;
use tonic::metadata::MetadataValue;
use tonic::{Request, Response, Status};

use crate::batcher::Predicted;
use crate::progress::Progress;
use crate::protocol::{OUTPUT, PLATFORM, REQUEST, check_output, inputs_of, read_shape, unknown_datatype};
use crate::refusal::Refusal;
use crate::service::Service;

/// The metadata with the time after which a client may repeat a request, in milliseconds.
const PUSHBACK: &str = "grpc-retry-pushback-ms";

/// The service for tonic.
pub(crate) struct Grpc(Arc<Service>);

impl Grpc {
    pub(crate) fn server(service: Arc<Service>) -> GrpcInferenceServiceServer<Self> {
        let most = service.limits.max_body_bytes;
        GrpcInferenceServiceServer::new(Self(service)).max_decoding_message_size(most)
    }

    fn check(&self, name: &str, version: &str) -> Result<(), Refusal> {
        self.0.check(name, Some(version).filter(|version| !version.is_empty()))
    }

    async fn answer(
        &self,
        request: v2::ModelInferRequest,
        progress: &mut Progress,
    ) -> Result<v2::ModelInferResponse, Refusal> {
        let service = &self.0;
        self.check(&request.model_name, &request.model_version)?;
        let _permit = service.admit()?;
        request.outputs.iter().try_for_each(|output| check_output(&output.name))?;
        let is_raw = !request.raw_input_contents.is_empty();
        let columns = read_inputs(request.inputs, request.raw_input_contents, service.limits.max_request_rows)?;
        let batch = service.encode(&columns)?;
        (progress.id, progress.rows) = (Some(request.id.clone()), batch.samples);
        let limit = service.limits.timeout;
        let deadline = progress.started() + limit;
        let predicted = tokio::time::timeout_at(deadline.into(), service.predict(batch, deadline)).await;
        let predicted = predicted.unwrap_or(Err(Refusal::Late(limit)))?;
        Ok(respond(service, request.id, predicted, is_raw))
    }
}

#[tonic::async_trait]
impl GrpcInferenceService for Grpc {
    async fn server_live(
        &self,
        _request: Request<v2::ServerLiveRequest>,
    ) -> Result<Response<v2::ServerLiveResponse>, Status> {
        Ok(Response::new(v2::ServerLiveResponse { live: true }))
    }

    async fn server_ready(
        &self,
        _request: Request<v2::ServerReadyRequest>,
    ) -> Result<Response<v2::ServerReadyResponse>, Status> {
        Ok(Response::new(v2::ServerReadyResponse { ready: self.0.is_ready() }))
    }

    async fn model_ready(
        &self,
        request: Request<v2::ModelReadyRequest>,
    ) -> Result<Response<v2::ModelReadyResponse>, Status> {
        let v2::ModelReadyRequest { name, version } = request.into_inner();
        self.check(&name, &version).map_err(|refusal| status(&refusal))?;
        Ok(Response::new(v2::ModelReadyResponse { ready: self.0.is_ready() }))
    }

    async fn server_metadata(
        &self,
        _request: Request<v2::ServerMetadataRequest>,
    ) -> Result<Response<v2::ServerMetadataResponse>, Status> {
        let (name, version) = (PLATFORM.to_owned(), env!("CARGO_PKG_VERSION").to_owned());
        Ok(Response::new(v2::ServerMetadataResponse { name, version, extensions: Vec::new() }))
    }

    async fn model_metadata(
        &self,
        request: Request<v2::ModelMetadataRequest>,
    ) -> Result<Response<v2::ModelMetadataResponse>, Status> {
        let v2::ModelMetadataRequest { name, version } = request.into_inner();
        self.check(&name, &version).map_err(|refusal| status(&refusal))?;
        let tensor = |(name, datatype): (&str, &str)| TensorMetadata {
            name: name.to_owned(),
            datatype: datatype.to_owned(),
            shape: vec![-1],
        };
        Ok(Response::new(v2::ModelMetadataResponse {
            name: self.0.name.clone(),
            versions: vec![self.0.version().name.clone()],
            platform: PLATFORM.to_owned(),
            inputs: inputs_of(self.0.schema()).map(tensor).collect(),
            outputs: vec![tensor((OUTPUT, "FP32"))],
        }))
    }

    async fn model_infer(
        &self,
        request: Request<v2::ModelInferRequest>,
    ) -> Result<Response<v2::ModelInferResponse>, Status> {
        let mut progress = self.0.begin();
        let answered = self.answer(request.into_inner(), &mut progress).await;
        progress.finish(answered.as_ref().map_or_else(Refusal::status, |_| StatusCode::OK));
        answered.map(Response::new).map_err(|refusal| status(&refusal))
    }
}

/// The response with these probabilities.
fn respond(service: &Service, id: String, predicted: Predicted, is_raw: bool) -> v2::ModelInferResponse {
    let Predicted { probabilities, version } = predicted;
    let shape = vec![i64::try_from(probabilities.len()).unwrap_or(i64::MAX)];
    let mut output =
        InferOutputTensor { name: OUTPUT.to_owned(), datatype: "FP32".to_owned(), shape, ..Default::default() };
    let mut raw = Vec::new();
    if is_raw {
        raw.push(probabilities.iter().flat_map(|probability| probability.to_le_bytes()).collect());
    } else {
        output.contents = Some(v2::InferTensorContents { fp32_contents: probabilities, ..Default::default() });
    }
    v2::ModelInferResponse {
        model_name: service.name.clone(),
        model_version: version.name.clone(),
        id,
        outputs: vec![output],
        raw_output_contents: raw,
        ..Default::default()
    }
}

/// The columns of a request. `raw` has the values of all inputs, or is empty.
fn read_inputs(inputs: Vec<InferInputTensor>, raw: Vec<Vec<u8>>, max_rows: usize) -> Result<Vec<Column>, Refusal> {
    if raw.is_empty() {
        return inputs.into_iter().map(|input| read_input(input, None, max_rows)).collect();
    }
    if raw.len() != inputs.len() {
        let (found, wanted) = (raw.len(), inputs.len());
        return Err(Refusal::Bad(format!("{REQUEST} has {found} raw contents for {wanted} inputs")));
    }
    inputs.into_iter().zip(raw).map(|(input, raw)| read_input(input, Some(&raw), max_rows)).collect()
}

fn read_input(input: InferInputTensor, raw: Option<&[u8]>, max_rows: usize) -> Result<Column, Refusal> {
    let InferInputTensor { name, datatype, shape, contents, .. } = input;
    let values = match raw {
        Some(raw) => raw_values(&name, &datatype, raw)?,
        None => typed_values(&name, &datatype, contents.unwrap_or_default())?,
    };
    let sizes: Option<Vec<u64>> = shape.iter().map(|size| u64::try_from(*size).ok()).collect();
    let sizes =
        sizes.ok_or_else(|| Refusal::Bad(format!("{REQUEST}: column `{name}` has the negative shape {shape:?}")))?;
    let (rows, list) = read_shape(&name, &sizes, values.len(), max_rows)?;
    Ok(Column { name, rows, list, values })
}

fn typed_values(name: &str, datatype: &str, contents: v2::InferTensorContents) -> Result<Values, Refusal> {
    match datatype {
        "BYTES" => Ok(Values::Texts(contents.bytes_contents.into_iter().map(Some).collect())),
        "INT64" => Ok(Values::Integers(contents.int64_contents.into_iter().map(Some).collect())),
        "FP32" => Ok(Values::Singles(contents.fp32_contents.into_iter().map(Some).collect())),
        "FP64" => Ok(Values::Doubles(contents.fp64_contents.into_iter().map(Some).collect())),
        other => Err(unknown_datatype(name, other)),
    }
}

fn raw_values(name: &str, datatype: &str, raw: &[u8]) -> Result<Values, Refusal> {
    let values = match datatype {
        "BYTES" => raw_texts(raw).map(Values::Texts),
        "INT64" => words(raw).map(|words| Values::Integers(words.map(i64::from_le_bytes).map(Some).collect())),
        "FP32" => words(raw).map(|words| Values::Singles(words.map(f32::from_le_bytes).map(Some).collect())),
        "FP64" => words(raw).map(|words| Values::Doubles(words.map(f64::from_le_bytes).map(Some).collect())),
        other => return Err(unknown_datatype(name, other)),
    };
    values.ok_or_else(|| {
        let found = raw.len();
        Refusal::Bad(format!("{REQUEST}: column `{name}` has {found} raw bytes, which do not end with a {datatype}"))
    })
}

/// The words of `N` bytes. `None` if bytes remain.
fn words<const N: usize>(raw: &[u8]) -> Option<impl Iterator<Item = [u8; N]> + '_> {
    let (words, rest) = raw.as_chunks::<N>();
    rest.is_empty().then(|| words.iter().copied())
}

/// Texts, each behind its length. `None` if the last one is not whole.
fn raw_texts(mut raw: &[u8]) -> Option<Vec<Option<Vec<u8>>>> {
    let mut texts = Vec::new();
    while !raw.is_empty() {
        let (length, rest) = raw.split_first_chunk::<4>()?;
        let (text, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        texts.push(Some(text.to_vec()));
        raw = rest;
    }
    Some(texts)
}

fn status(refusal: &Refusal) -> Status {
    let message = refusal.to_string();
    let mut status = match refusal {
        Refusal::Bad(_) | Refusal::TooLarge(_) => Status::invalid_argument(message),
        Refusal::NotFound(_) => Status::not_found(message),
        Refusal::Shed(_) | Refusal::Unavailable(_) | Refusal::Ending => Status::unavailable(message),
        Refusal::Late(_) => Status::deadline_exceeded(message),
        Refusal::Failed(_) => Status::internal(message),
    };
    if refusal.may_retry() {
        status.metadata_mut().insert(PUSHBACK, MetadataValue::from_static("1000"));
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raw_texts_follow_their_lengths() {
        let raw = [&[2, 0, 0, 0][..], b"ab", &[0, 0, 0, 0], &[1, 0, 0, 0], b"c"].concat();
        let texts = [&b"ab"[..], b"", b"c"].map(|text| Some(text.to_vec()));
        assert_eq!(raw_texts(&raw), Some(texts.to_vec()));
        for cut in [1, 3, 5, 9, raw.len() - 1] {
            assert_eq!(raw_texts(&raw[..cut]), None, "{cut}");
        }
        let huge = [255, 255, 255, 255, 7];
        assert_eq!(raw_texts(&huge), None);
    }

    #[test]
    fn raw_numbers_are_little_endian_words() {
        let raw = |datatype, bytes: &[u8]| raw_values("c", datatype, bytes).map_err(|refusal| refusal.to_string());
        assert_eq!(raw("INT64", &(-5_i64).to_le_bytes()), Ok(Values::Integers(vec![Some(-5)])));
        assert_eq!(raw("FP64", &0.1_f64.to_le_bytes()), Ok(Values::Doubles(vec![Some(0.1)])));
        assert_eq!(
            raw("FP32", &[0.5_f32, 2.0].map(f32::to_le_bytes).concat()),
            Ok(Values::Singles(vec![Some(0.5), Some(2.0)]))
        );
        let message = "the request: column `c` has 5 raw bytes, which do not end with a FP32";
        assert_eq!(raw("FP32", &[0; 5]), Err(message.to_owned()));
        assert!(raw("BF16", &[0; 2]).is_err_and(|message| message.contains("has the datatype `BF16`")));
    }
}
