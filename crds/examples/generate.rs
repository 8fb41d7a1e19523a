//! Writes the files generated from the types: crds/rectrainingjobs.yaml and
//! crds/recmodelservers.yaml (with the chart's copies), and in docs/reference manifest.md,
//! model-server.md and simulation.md.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (path, text) in [
        ("crds/rectrainingjobs.yaml", rectrain_crds::crd_yaml()),
        ("charts/rectrain/files/rectrainingjobs.yaml", rectrain_crds::crd_yaml()),
        ("crds/recmodelservers.yaml", rectrain_crds::server_crd_yaml()),
        ("charts/rectrain/files/recmodelservers.yaml", rectrain_crds::server_crd_yaml()),
        ("docs/reference/model-server.md", rectrain_crds::server_reference_markdown()),
        ("docs/reference/manifest.md", rectrain_crds::reference_markdown()),
        ("docs/reference/simulation.md", rectrain_crds::simulation_reference_markdown()),
    ] {
        let path = root.join(path);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(&path, text)?;
        println!("{}", path.display());
    }
    Ok(())
}
