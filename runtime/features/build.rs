//! Cargo reads build-dependencies only of packages with a build script.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
