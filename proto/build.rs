//! Compiles the .proto files with a pure-Rust compiler, so that no protoc needs to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["rectrain/v1/roles.proto", "rectrain/v1/control.proto", "inference/open_inference_v2.proto"];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
