//! The images. buildah makes them from programs that are built already; they are kept as archives
//! and imported into every node's containerd. There is no registry: pods name
//! `localhost/rectrain/…:e2e` and never pull.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rectrain_harness::command::{command, output};
use rectrain_harness::files::{make_folder, remove_folder, write};
use rectrain_harness::waiting::eventually;
use rectrain_harness::workspace::{built, workspace};
use rectrain_harness::{HarnessError, kafka, say};

use crate::access::foreign_kubeconfig;
use crate::cluster::{Cluster, find};
use crate::namespaces::Namespaces;
use crate::paths::{Paths, sources};
use crate::{BringUpError, tools};

/// The tag of every image.
pub const TAG: &str = "e2e";
/// The tag of the "next version": a second name for the same images, for trials of an upgrade.
pub const NEXT_TAG: &str = "e2e-next";
const CONTAINERD_START: Duration = Duration::from_secs(60);

/// An image.
#[derive(Debug, Clone, Copy)]
pub enum Image {
    /// The sandbox of every pod.
    Pause,
    /// The demonstration's object store.
    ObjectStore,
    /// A Kafka broker, on the Java of this machine.
    Kafka,
    /// `rectrain`.
    Runtime,
    /// `rectrain-operator`.
    Operator,
}

impl Image {
    /// The images that a new node gets. Only its trial provides the one of Kafka, which is large.
    const OF_NEW_NODES: [Self; 4] = [Self::Pause, Self::ObjectStore, Self::Runtime, Self::Operator];

    fn name(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::ObjectStore => "object-store",
            Self::Kafka => "kafka",
            Self::Runtime => "runtime",
            Self::Operator => "operator",
        }
    }

    /// Its name without a tag.
    #[must_use]
    pub fn repository(self) -> String {
        format!("localhost/rectrain/{}", self.name())
    }

    /// Its archive in the cache.
    #[must_use]
    pub fn archive(self, paths: &Paths) -> PathBuf {
        paths.images().join(format!("{}.tar", self.name()))
    }

    /// The program in it.
    fn program(self, paths: &Paths) -> Result<PathBuf, HarnessError> {
        match self {
            Self::Pause => Ok(paths.program("init")),
            Self::ObjectStore => Ok(paths.program("versitygw")),
            Self::Kafka => kafka::java(),
            Self::Runtime => built("rectrain"),
            Self::Operator => built("rectrain-operator"),
        }
    }

    /// The files that it is built from, besides its program. The first one is the Containerfile.
    fn recipe(self) -> Vec<PathBuf> {
        match self {
            Self::Pause | Self::ObjectStore => vec![sources().join("Containerfile")],
            Self::Kafka => vec![sources().join("kafka.Containerfile"), recipe_file("kafka.sh")],
            Self::Runtime | Self::Operator => vec![recipe_file("Containerfile"), recipe_file("rootfs.sh")],
        }
    }
}

/// Builds the image's archive, unless it was built from the same files.
///
/// # Errors
/// See [`output`].
pub fn build(paths: &Paths, image: Image) -> Result<(), HarnessError> {
    let _lock = paths.lock("build")?;
    let program = image.program(paths)?;
    let archive = image.archive(paths);
    let made_of = identify(&image.recipe().into_iter().chain([program.clone()]).collect::<Vec<_>>())?;
    let stamp = archive.with_extension("made-of");
    if archive.exists() && std::fs::read_to_string(&stamp).is_ok_and(|stamped| stamped == made_of) {
        return Ok(());
    }
    say(format!("building the image {}", image.repository()));
    let context = paths.images().join(format!("{}.context", image.name()));
    remove_folder(&context)?;
    make_folder(&context)?;
    let options = fill(image, program, &context)?;
    let reference = format!("{}:{TAG}", image.repository());
    let mut bud = buildah(paths, &["bud", "--isolation=chroot", "--format=oci"]);
    bud.args(options).arg("--file").arg(&image.recipe()[0]).args(["--tag", &reference]).arg(&context);
    output(&mut bud)?;
    let unfinished = archive.with_extension("unfinished");
    let mut push = buildah(paths, &["push", &reference]);
    output(push.arg(format!("oci-archive:{}:{reference}", unfinished.display())))?;
    std::fs::rename(&unfinished, &archive).map_err(HarnessError::io("write", archive.display()))?;
    write(&stamp, made_of)?;
    remove_folder(&context)?;
    remove_storage(paths)
}

/// Fills the folder that the image is built from; returns the options of the build.
fn fill(image: Image, program: PathBuf, context: &Path) -> Result<Vec<String>, HarnessError> {
    match image {
        Image::Pause | Image::ObjectStore => {
            let copied = std::fs::copy(&program, context.join("program"));
            copied.map_err(HarnessError::io("copy", program.display()))?;
            Ok(vec!["--build-arg=PROGRAM=program".to_owned()])
        }
        Image::Kafka => {
            output(&mut command("sh", [recipe_file("kafka.sh"), program, kafka::jars()?, context.to_owned()]))?;
            Ok(Vec::new())
        }
        Image::Runtime | Image::Operator => {
            let root = context.join("rootfs").join(image.name());
            output(&mut command("sh", [recipe_file("rootfs.sh"), program, root]))?;
            Ok(vec!["--build-arg=SOURCE=prebuilt".to_owned(), format!("--target={}", image.name())])
        }
    }
}

/// A file of the folder with recipes of images.
fn recipe_file(name: &str) -> PathBuf {
    workspace().join("e2e/images").join(name)
}

/// Builds images and imports them into this machine's nodes. For another cluster, prints the
/// archives that its owner has to load.
///
/// # Errors
/// [`BringUpError::NoCluster`]; see [`build`].
pub fn provide(paths: &Paths, images: &[Image]) -> Result<(), BringUpError> {
    tools::install_packages()?;
    let is_foreign = foreign_kubeconfig(paths).is_some();
    for &image in images {
        build(paths, image)?;
        if is_foreign {
            let archive = image.archive(paths).display().to_string();
            say(format!("load {archive} into the cluster that KUBECONFIG names, as with `kind load image-archive`"));
        } else {
            import(paths, &find(paths).ok_or(BringUpError::NoCluster)?, image)?;
        }
    }
    Ok(())
}

/// Imports the image into every node. Pods that start from now on use it.
fn import(paths: &Paths, cluster: &Cluster, image: Image) -> Result<(), HarnessError> {
    cluster.nodes.iter().try_for_each(|(_, node)| import_into(node, &image.archive(paths)))
}

/// Tags the image on every node as the next version too.
///
/// # Errors
/// See [`output`].
pub fn tag_next(cluster: &Cluster, image: Image) -> Result<(), HarnessError> {
    let [present, next] = [TAG, NEXT_TAG].map(|tag| format!("{}:{tag}", image.repository()));
    cluster.nodes.iter().try_for_each(|(_, node)| {
        output(&mut node.command("ctr", ["--namespace=k8s.io", "images", "tag", "--force", &present, &next])).map(drop)
    })
}

/// Imports images of the cache into a new node, so that a node that returns has its images again.
pub(crate) fn import_all(paths: &Paths, node: &Namespaces) -> Result<(), HarnessError> {
    let containerd = || output(&mut node.command("ctr", ["version"])).map(drop);
    eventually(CONTAINERD_START, "containerd", containerd)?;
    let archives = Image::OF_NEW_NODES.iter().map(|image| image.archive(paths)).filter(|archive| archive.exists());
    archives.into_iter().try_for_each(|archive| import_into(node, &archive))
}

fn import_into(node: &Namespaces, archive: &Path) -> Result<(), HarnessError> {
    output(node.command("ctr", ["--namespace=k8s.io", "images", "import"]).arg(archive)).map(drop)
}

/// buildah with a storage of its own.
fn buildah(paths: &Paths, words: &[&str]) -> std::process::Command {
    let storage = paths.images().join("storage");
    let mut buildah = command("buildah", ["--storage-driver=vfs", "--root"]);
    buildah.arg(storage.join("root")).arg("--runroot").arg(storage.join("run")).args(words);
    buildah
}

/// Removes buildah's storage. Each layer in it is a full copy, and nothing needs it once an archive
/// is written.
fn remove_storage(paths: &Paths) -> Result<(), HarnessError> {
    remove_folder(&paths.images().join("storage"))
}

/// A text that changes when one of the files does, or when other files are given.
fn identify(files: &[PathBuf]) -> Result<String, HarnessError> {
    let one = |path: &PathBuf| {
        let metadata = std::fs::metadata(path);
        let changed = metadata.and_then(|metadata| Ok((metadata.len(), metadata.modified()?)));
        let (bytes, time) = changed.map_err(HarnessError::io("look at", path.display()))?;
        Ok(format!("{} {bytes} {time:?}\n", path.display()))
    };
    files.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_and_another_file_have_another_identity() {
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
