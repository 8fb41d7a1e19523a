//! The gRPC interface answers as the REST interface does.

use rectrain_inference::Limits;
use rectrain_proto::inference as v2;
use rectrain_proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use rectrain_proto::inference::model_infer_request::InferInputTensor;
use serde_json::json;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::host::{Host, inputs, limits};

async fn client(host: &Host) -> GrpcInferenceServiceClient<Channel> {
    GrpcInferenceServiceClient::connect(format!("http://{}", host.grpc)).await.unwrap()
}

fn tensor(name: &str, datatype: &str, shape: &[i64], contents: v2::InferTensorContents) -> InferInputTensor {
    let (name, datatype) = (name.to_owned(), datatype.to_owned());
    InferInputTensor { name, datatype, shape: shape.to_vec(), contents: Some(contents), ..Default::default() }
}

fn texts(texts: &[&str]) -> v2::InferTensorContents {
    let bytes_contents = texts.iter().map(|text| text.as_bytes().to_vec()).collect();
    v2::InferTensorContents { bytes_contents, ..Default::default() }
}

fn singles(fp32_contents: &[f32]) -> v2::InferTensorContents {
    v2::InferTensorContents { fp32_contents: fp32_contents.to_vec(), ..Default::default() }
}

/// One user with two rows.
pub fn request() -> v2::ModelInferRequest {
    v2::ModelInferRequest {
        model_name: "clicks".into(),
        id: "a7".into(),
        inputs: vec![
            tensor("user", "BYTES", &[1], texts(&["u1"])),
            tensor("tags", "BYTES", &[2, 2], texts(&["a", "b", "", ""])),
            tensor("x", "FP32", &[2], singles(&[1.0, f32::NAN])),
        ],
        ..Default::default()
    }
}

/// The request with raw contents.
pub fn raw_request() -> v2::ModelInferRequest {
    let text = |text: &str| [&u32::try_from(text.len()).unwrap().to_le_bytes()[..], text.as_bytes()].concat();
    let mut request = request();
    request.inputs.iter_mut().for_each(|input| input.contents = None);
    request.raw_input_contents =
        vec![text("u1"), ["a", "b", "", ""].map(text).concat(), [1.0, f32::NAN].map(f32::to_le_bytes).concat()];
    request
}

pub async fn infer(host: &Host, request: v2::ModelInferRequest) -> Result<v2::ModelInferResponse, Status> {
    client(host).await.model_infer(request).await.map(tonic::Response::into_inner)
}

#[tokio::test(flavor = "multi_thread")]
async fn typed_and_raw_values_get_the_same_probabilities() {
    let host = Host::start(limits()).await;
    let typed = infer(&host, request()).await.unwrap();
    assert_eq!((typed.model_name.as_str(), typed.model_version.as_str(), typed.id.as_str()), ("clicks", "7", "a7"));
    let output = &typed.outputs[0];
    assert_eq!((output.name.as_str(), output.datatype.as_str(), &output.shape), ("probability", "FP32", &vec![2]));
    // The tags of a row count as quarters, and a missing `x` as a half.
    assert_eq!(output.contents.as_ref().unwrap().fp32_contents, [1.5, 0.5]);
    let raw = infer(&host, raw_request()).await.unwrap();
    assert_eq!(raw.raw_output_contents, [[1.5_f32, 0.5].map(f32::to_le_bytes).concat()]);
    assert_eq!(raw.outputs[0].contents, None);
    assert_eq!(host.metric("rectrain_inference_requests_total{code=\"200\"}").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn health_and_metadata_are_the_ones_of_rest() {
    let mut host = Host::start(Limits { drain: std::time::Duration::from_secs(3600), ..limits() }).await;
    let mut client = client(&host).await;
    assert!(client.server_live(v2::ServerLiveRequest {}).await.unwrap().into_inner().live);
    assert!(client.server_ready(v2::ServerReadyRequest {}).await.unwrap().into_inner().ready);
    let server = client.server_metadata(v2::ServerMetadataRequest {}).await.unwrap().into_inner();
    assert_eq!(server.name, "rectrain");
    let named = |name: &str, version: &str| v2::ModelMetadataRequest { name: name.into(), version: version.into() };
    let model = client.model_metadata(named("clicks", "7")).await.unwrap().into_inner();
    let inputs: Vec<_> = model.inputs.iter().map(|input| (input.name.as_str(), input.datatype.as_str())).collect();
    assert_eq!(inputs, [("user", "BYTES"), ("tags", "BYTES"), ("x", "FP32")]);
    let other = client.model_metadata(named("clicks", "8")).await.unwrap_err();
    assert_eq!(other.code(), Code::NotFound);
    host.end();
    host.until_status("/v2/health/ready", 503).await;
    let ready = v2::ModelReadyRequest { name: "clicks".into(), version: String::new() };
    assert!(!client.model_ready(ready).await.unwrap().into_inner().ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_invalid_arguments_with_a_sentence() {
    let host = Host::start(limits()).await;
    let with = |place: usize, input: InferInputTensor| {
        let mut request = request();
        request.inputs[place] = input;
        request
    };
    let mut fewer = raw_request();
    fewer.raw_input_contents.pop();
    let mut cut = raw_request();
    cut.raw_input_contents[2].pop();
    for (request, part) in [
        (with(2, tensor("x", "FP32", &[3], singles(&[1.0]))), "column `x` has 1 values, and its shape [3]"),
        (with(2, tensor("x", "FP32", &[-1], singles(&[1.0]))), "column `x` has the negative shape [-1]"),
        (with(2, tensor("x", "FP16", &[1], singles(&[1.0]))), "column `x` has the datatype `FP16`"),
        (with(2, tensor("x", "BYTES", &[2], texts(&["1", "b"]))), "row 2, column `x`: found \"b\", expected a number"),
        (with(0, tensor("usr", "BYTES", &[1], texts(&["1"]))), "no column `usr`, did you mean `user`?"),
        (fewer, "2 raw contents for 3 inputs"),
        (cut, "column `x` has 7 raw bytes"),
    ] {
        let status = infer(&host, request).await.unwrap_err();
        assert!(status.code() == Code::InvalidArgument && status.message().contains(part), "{part}: {status:?}");
    }
    let other = infer(&host, v2::ModelInferRequest { model_name: "other".into(), ..request() }).await.unwrap_err();
    assert_eq!(other.code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_shed_is_unavailable_with_a_hint() {
    let host = Host::start(Limits { max_requests: 1, ..limits() }).await;
    host.model.block();
    let computing = host.spawn_infer(&[1.0]);
    host.model.until_entered(1).await;
    let status = infer(&host, request()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "1000");
    host.model.release();
    assert_eq!(computing.await.unwrap().status, 200);
    assert_eq!(host.infer(&json!({"inputs": inputs(&[1.0])})).await.status, 200);
}
