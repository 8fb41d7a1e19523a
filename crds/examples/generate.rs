//! Writes the files generated from the types: crds/rectrainingjobs.yaml (and the chart's copy),
//! docs/reference/manifest.md and docs/reference/simulation.md.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (path, text) in [
        ("crds/rectrainingjobs.yaml", rectrain_crds::crd_yaml()),
        ("charts/rectrain/files/rectrainingjobs.yaml", rectrain_crds::crd_yaml()),
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
