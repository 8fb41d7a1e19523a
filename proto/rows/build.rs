//! Compiles the .proto file with a pure-Rust compiler, so that no protoc needs to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = "rows.proto";
    println!("cargo:rerun-if-changed={file}");
    let descriptors = protox::compile([file], ["."])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
