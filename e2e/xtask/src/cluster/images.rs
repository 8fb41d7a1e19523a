//! The images: built with buildah from programs that are there already, kept as archives, and given to every node's containerd.
//! No registry is involved; pods name them as `localhost/rectrain/…:e2e` and do not pull.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Cluster;
use super::namespaces::Namespaces;
use super::paths::{Paths, lock, make_folder, remove_folder, sources, write};
use super::process::{command, eventually, output};

/// The tag of every image.
pub(super) const TAG: &str = "e2e";
/// The tag of a version that comes after: the same images by another name.
pub(super) const NEXT_TAG: &str = "e2e-next";
const CONTAINERD_START: Duration = Duration::from_secs(60);

/// An image.
#[derive(Debug, Clone, Copy)]
pub(super) enum Image {
    /// The sandbox of every pod.
    Pause,
    /// The demonstration's object store.
    ObjectStore,
    /// `rectrain`.
    Runtime,
    /// `rectrain-operator`.
    Operator,
}

impl Image {
    const ALL: [Self; 4] = [Self::Pause, Self::ObjectStore, Self::Runtime, Self::Operator];

    fn name(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::ObjectStore => "object-store",
            Self::Runtime => "runtime",
            Self::Operator => "operator",
        }
    }

    /// Without its tag.
    pub(super) fn repository(self) -> String {
        format!("localhost/rectrain/{}", self.name())
    }

    /// Where it is kept.
    pub(super) fn archive(self, paths: &Paths) -> PathBuf {
        paths.images().join(format!("{}.tar", self.name()))
    }

    /// The program in it.
    fn program(self, paths: &Paths) -> Result<PathBuf, String> {
        match self {
            Self::Pause => Ok(paths.program("init")),
            Self::ObjectStore => Ok(paths.program("versitygw")),
            Self::Runtime => crate::built("rectrain"),
            Self::Operator => crate::built("rectrain-operator"),
        }
    }

    /// What it is built from, its program left out.
    fn recipe(self) -> Vec<PathBuf> {
        match self {
            Self::Pause | Self::ObjectStore => vec![sources().join("Containerfile")],
            Self::Runtime | Self::Operator => {
                let folder = crate::workspace().join("e2e/images");
                vec![folder.join("Containerfile"), folder.join("rootfs.sh")]
            }
        }
    }
}

/// Builds the image's archive if it was made of something else.
pub(super) fn build(paths: &Paths, image: Image) -> Result<(), String> {
    let _lock = lock(paths, "build")?;
    let program = image.program(paths)?;
    let archive = image.archive(paths);
    let made_of = identify(&image.recipe().into_iter().chain([program.clone()]).collect::<Vec<_>>())?;
    let stamp = archive.with_extension("made-of");
    if archive.exists() && std::fs::read_to_string(&stamp).is_ok_and(|stamped| stamped == made_of) {
        return Ok(());
    }
    eprintln!("xtask: building the image {}", image.repository());
    let context = paths.images().join(format!("{}.context", image.name()));
    remove_folder(&context)?;
    make_folder(&context)?;
    let options = match image {
        Image::Pause | Image::ObjectStore => {
            let copy = std::fs::copy(&program, context.join("program"));
            copy.map_err(|error| format!("cannot copy {}: {error}", program.display()))?;
            vec!["--build-arg=PROGRAM=program".to_owned()]
        }
        Image::Runtime | Image::Operator => {
            let script = crate::workspace().join("e2e/images/rootfs.sh");
            let root = context.join("rootfs").join(image.name());
            output(&mut command("sh", [script, program, root]))?;
            vec!["--build-arg=SOURCE=prebuilt".to_owned(), format!("--target={}", image.name())]
        }
    };
    let reference = format!("{}:{TAG}", image.repository());
    let mut bud = buildah(paths, &["bud", "--isolation=chroot", "--format=oci"]);
    bud.args(options).arg("--file").arg(&image.recipe()[0]).args(["--tag", &reference]).arg(&context);
    output(&mut bud)?;
    let unfinished = archive.with_extension("unfinished");
    let mut push = buildah(paths, &["push", &reference]);
    output(push.arg(format!("oci-archive:{}:{reference}", unfinished.display())))?;
    std::fs::rename(&unfinished, &archive).map_err(|error| format!("cannot write {}: {error}", archive.display()))?;
    write(&stamp, made_of)?;
    remove_folder(&context)?;
    remove_storage(paths)
}

/// Gives the image to every node; pods that start from now on have it.
pub(super) fn import(paths: &Paths, cluster: &Cluster, image: Image) -> Result<(), String> {
    cluster.nodes.iter().try_for_each(|(_, node)| import_into(node, &image.archive(paths)))
}

/// Gives the image to every node by its name as the next version.
pub(super) fn tag_next(cluster: &Cluster, image: Image) -> Result<(), String> {
    let [present, next] = [TAG, NEXT_TAG].map(|tag| format!("{}:{tag}", image.repository()));
    cluster.nodes.iter().try_for_each(|(_, node)| {
        output(&mut node.command("ctr", ["--namespace=k8s.io", "images", "tag", "--force", &present, &next])).map(drop)
    })
}

/// Gives a node that has just been made the images that there are, so that one that comes back has what it had.
pub(super) fn import_all(paths: &Paths, node: &Namespaces) -> Result<(), String> {
    let containerd = || output(&mut node.command("ctr", ["version"])).map(drop);
    eventually(CONTAINERD_START, "containerd", containerd)?;
    let archives = Image::ALL.iter().map(|image| image.archive(paths)).filter(|archive| archive.exists());
    archives.into_iter().try_for_each(|archive| import_into(node, &archive))
}

fn import_into(node: &Namespaces, archive: &Path) -> Result<(), String> {
    output(node.command("ctr", ["--namespace=k8s.io", "images", "import"]).arg(archive)).map(drop)
}

/// Buildah with a storage of its own.
fn buildah(paths: &Paths, words: &[&str]) -> std::process::Command {
    let storage = paths.images().join("storage");
    let mut buildah = command("buildah", ["--storage-driver=vfs", "--root"]);
    buildah.arg(storage.join("root")).arg("--runroot").arg(storage.join("run")).args(words);
    buildah
}

/// What buildah keeps is not needed once an archive is written, and each layer of it is a whole copy.
fn remove_storage(paths: &Paths) -> Result<(), String> {
    remove_folder(&paths.images().join("storage"))
}

/// Tells these files from others, and from themselves after a change.
fn identify(files: &[PathBuf]) -> Result<String, String> {
    let one = |path: &PathBuf| {
        let metadata = std::fs::metadata(path);
        let changed = metadata.and_then(|metadata| Ok((metadata.len(), metadata.modified()?)));
        let (bytes, time) = changed.map_err(|error| format!("cannot look at {}: {error}", path.display()))?;
        Ok(format!("{} {bytes} {time:?}\n", path.display()))
    };
    files.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_told_from_itself_after_a_change_and_from_another_of_the_same_text() {
        let folder = std::env::temp_dir().join(format!("rectrain-identify-{}", std::process::id()));
        let [one, two] = ["one", "two"].map(|name| folder.join(name));
        write(&one, "text").unwrap();
        write(&two, "text").unwrap();
        let before = identify(std::slice::from_ref(&one)).unwrap();
        assert_eq!(before, identify(std::slice::from_ref(&one)).unwrap());
        assert_ne!(before, identify(&[two]).unwrap());
        write(&one, "other text").unwrap();
        assert_ne!(before, identify(&[one]).unwrap());
        remove_folder(&folder).unwrap();
    }
}
