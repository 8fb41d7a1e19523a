//! `cargo xtask dist`: the artifacts of a release in one folder. The release workflow runs the same
//! command.

mod trial;

use std::path::{Path, PathBuf};
use std::process::Command;

use rectrain_harness::cargo::{self, cargo_command};
use rectrain_harness::command::{command, output};
use rectrain_harness::files::{make_folder, remove_folder, write};
use rectrain_harness::workspace::{cache, target_folder, workspace};
use rectrain_harness::{HarnessError, not_yet, say, skips};

const USAGE: &str = "usage: cargo xtask dist [--static] [--try] [--output FOLDER] [--binaries FOLDER] [--target TRIPLE]
  --static           link the C library into the programs, so that they need no other file
  --try              train the first example with the archive, the wheel and the image
  --output FOLDER    the folder to fill, target/dist if not given; it is emptied first
  --binaries FOLDER  take rectrain and rectrain-operator from this folder instead of building them
  --target TRIPLE    build for another target, such as x86_64-unknown-linux-musl";

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The programs of a release.
const PROGRAMS: [&str; 2] = ["rectrain", "rectrain-operator"];
/// The images, each with its program.
const IMAGES: [(&str, &str); 2] = [("runtime", "rectrain"), ("operator", "rectrain-operator")];

/// The arguments of the command.
#[derive(Debug, Default, PartialEq)]
struct Options {
    is_static: bool,
    is_tried: bool,
    output: Option<PathBuf>,
    binaries: Option<PathBuf>,
    target: Option<String>,
}

impl Options {
    /// `None` for wrong arguments.
    fn parse(arguments: &[&str]) -> Option<Self> {
        let (mut options, mut left) = (Self::default(), arguments.iter());
        while let Some(argument) = left.next() {
            match *argument {
                "--static" => options.is_static = true,
                "--try" => options.is_tried = true,
                "--output" => options.output = Some(left.next()?.into()),
                "--binaries" => options.binaries = Some(left.next()?.into()),
                "--target" => options.target = Some((*left.next()?).to_owned()),
                _ => return None,
            }
        }
        Some(options)
    }

    fn triple(&self) -> String {
        self.target.clone().unwrap_or_else(|| format!("{}-unknown-linux-gnu", std::env::consts::ARCH))
    }
}

/// A release that is being made.
struct Release {
    /// The artifacts.
    output: PathBuf,
    /// Files that only the next steps need.
    scratch: PathBuf,
    /// The programs without debug information.
    programs: PathBuf,
    triple: String,
    /// The triple in the names of artifacts. It ends with `-static` for static programs.
    label: String,
    /// Seconds since 1970 of the last commit: the time of all files.
    epoch: String,
}

/// Makes all artifacts. Parts without their tool are skipped.
pub(crate) fn dist(arguments: &[&str]) -> Result<(), HarnessError> {
    let options = Options::parse(arguments).ok_or(HarnessError::Usage(USAGE))?;
    let release = Release::begin(&options)?;
    release.archive()?;
    release.wheel()?;
    release.bill_of_materials()?;
    release.chart()?;
    release.images()?;
    if options.is_tried {
        trial::run(&release)?;
    }
    remove_folder(&release.scratch)?;
    release.checksums()?;
    say(format!("the release is in {}", release.output.display()));
    Ok(())
}

impl Release {
    /// Builds the programs, or takes them.
    fn begin(options: &Options) -> Result<Self, HarnessError> {
        let output_folder = match &options.output {
            Some(folder) => std::path::absolute(folder).map_err(HarnessError::io("use", folder.display()))?,
            None => target_folder()?.join("dist"),
        };
        remove_folder(&output_folder)?;
        let scratch = output_folder.join("scratch");
        let triple = options.triple();
        let label = if options.is_static { format!("{triple}-static") } else { triple.clone() };
        let programs = scratch.join(format!("rectrain-{VERSION}-{label}"));
        make_folder(&programs)?;
        let built = match &options.binaries {
            Some(folder) => folder.clone(),
            None => build(options)?,
        };
        for program in PROGRAMS {
            let mut strip = command("strip", ["--strip-debug", "-o"]);
            output(strip.arg(programs.join(program)).arg(built.join(program)))?;
            if options.is_static && !is_static(&programs.join(program))? {
                return Err(not_yet(format!("{program} in {} is not static", built.display())));
            }
        }
        let mut log = command("git", ["log", "-1", "--format=%ct"]);
        let epoch = output(log.current_dir(workspace()))?.trim().to_owned();
        Ok(Self { output: output_folder, scratch, programs, triple, label, epoch })
    }

    /// The programs with licence and README as one compressed archive.
    fn archive(&self) -> Result<(), HarnessError> {
        for file in ["LICENSE", "README.md", "CHANGELOG.md"] {
            let (from, to) = (workspace().join(file), self.programs.join(file));
            std::fs::copy(&from, &to).map_err(HarnessError::io("copy", from.display()))?;
        }
        let name = format!("rectrain-{VERSION}-{}", self.label);
        let mut tar = command("tar", ["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
        tar.arg(format!("--mtime=@{}", self.epoch)).arg("-czf").arg(self.output.join(format!("{name}.tar.gz")));
        output(tar.arg("-C").arg(&self.scratch).arg(name)).map(drop)
    }

    /// A wheel with the command: `pip install rectrain` puts it on the PATH.
    fn wheel(&self) -> Result<(), HarnessError> {
        let mut python = self.python("wheel.py");
        python.arg(self.programs.join("rectrain")).arg(VERSION).arg(&self.output);
        output(&mut python).map(drop)
    }

    /// The crates in the programs, as CycloneDX.
    fn bill_of_materials(&self) -> Result<(), HarnessError> {
        let mut tree = cargo_command();
        tree.args(["tree", "--locked", "-p", PROGRAMS[0], "-p", PROGRAMS[1], "-e", "normal", "--prefix=none"]);
        tree.args(["--format={p}|{l}", "--target", &self.triple]);
        let crates = self.scratch.join("crates.txt");
        write(&crates, output(&mut tree)?)?;
        let file = std::fs::File::open(&crates).map_err(HarnessError::io("read", crates.display()))?;
        let bill = output(self.python("sbom.py").arg(VERSION).stdin(file))?;
        write(&self.output.join(format!("rectrain-{VERSION}-{}.cdx.json", self.label)), bill)
    }

    /// The chart. `helm push FILE oci://REGISTRY` publishes it.
    fn chart(&self) -> Result<(), HarnessError> {
        let Some(helm) = helm() else {
            return skips::skip("the chart", "there is no helm: install it, or run `cargo xtask cluster up`");
        };
        let mut package = command(helm, ["package", "--destination"]);
        output(package.arg(&self.output).arg(workspace().join("charts/rectrain"))).map(drop)
    }

    /// The images as OCI archives. `skopeo copy oci-archive:FILE docker://…` publishes them.
    fn images(&self) -> Result<(), HarnessError> {
        if !runs("buildah", "version") {
            return skips::skip("the images", "there is no buildah");
        }
        IMAGES.into_iter().try_for_each(|(image, program)| self.image(image, program))
    }

    fn image(&self, image: &str, program: &str) -> Result<(), HarnessError> {
        let context = self.scratch.join(image);
        let mut fill = command("sh", [workspace().join("e2e/images/rootfs.sh")]);
        output(fill.arg(self.programs.join(program)).arg(context.join("rootfs").join(image)))?;
        let reference = format!("rectrain/{image}:{VERSION}");
        let mut build = self.buildah(&["build", "--isolation=chroot", "--format=oci", "--build-arg=SOURCE=prebuilt"]);
        build.arg(format!("--timestamp={}", self.epoch)).args(["--target", image, "--tag", &reference]);
        output(build.arg("--file").arg(workspace().join("e2e/images/Containerfile")).arg(&context))?;
        let archive = self.image_archive(image);
        let mut push = self.buildah(&["push", &reference]);
        output(push.arg(format!("oci-archive:{}:{reference}", archive.display()))).map(drop)
    }

    /// The OCI archive of an image.
    fn image_archive(&self, image: &str) -> PathBuf {
        self.output.join(format!("rectrain-{image}-{VERSION}-{}.oci.tar", self.label))
    }

    /// The SHA-256 of every artifact, for `sha256sum --check`.
    fn checksums(&self) -> Result<(), HarnessError> {
        let names = file_names(&self.output)?;
        let sums = output(command("sha256sum", names).current_dir(&self.output))?;
        write(&self.output.join("SHA256SUMS"), sums)
    }

    fn python(&self, script: &str) -> Command {
        let mut python = command("python3", [workspace().join("e2e/dist").join(script)]);
        python.env("SOURCE_DATE_EPOCH", &self.epoch);
        python
    }

    /// buildah with a storage of its own, which goes with the other scratch files.
    fn buildah(&self, words: &[&str]) -> Command {
        let storage = self.scratch.join("storage");
        let mut buildah = command("buildah", ["--storage-driver=vfs", "--root"]);
        buildah.arg(storage.join("root")).arg("--runroot").arg(storage.join("run")).args(words);
        buildah
    }
}

/// Builds the programs. Returns their folder.
fn build(options: &Options) -> Result<PathBuf, HarnessError> {
    let triple = options.triple();
    let mut arguments = vec!["build", "--release", "--locked", "-p", PROGRAMS[0], "-p", PROGRAMS[1]];
    let mut below = PathBuf::from("release");
    if options.is_static || options.target.is_some() {
        arguments.extend(["--target", triple.as_str()]);
        below = Path::new(&triple).join("release");
    }
    let mut build = cargo_command();
    if options.is_static {
        // Macros cannot be static. They do not get these flags, because the target is named.
        build.env("RUSTFLAGS", "-C target-feature=+crt-static").env_remove("CARGO_ENCODED_RUSTFLAGS");
    }
    cargo::run(build, &arguments, "the build failed; `rustup target add` installs a target")?;
    Ok(target_folder()?.join(below))
}

/// Whether a program needs no loader, and so no library of the system.
fn is_static(program: &Path) -> Result<bool, HarnessError> {
    let headers = output(command("readelf", ["--wide", "--program-headers"]).arg(program))?;
    Ok(!headers.contains("INTERP"))
}

/// helm, from the PATH or as the cluster for tests has built it.
fn helm() -> Option<PathBuf> {
    let built = cache().ok().map(|cache| cache.join("cluster/bin/helm"));
    [Some(PathBuf::from("helm")), built].into_iter().flatten().find(|helm| runs(helm, "version"))
}

fn runs(program: impl AsRef<std::ffi::OsStr>, argument: &str) -> bool {
    command(program, [argument]).output().is_ok_and(|output| output.status.success())
}

/// The names of the files in a folder, sorted.
fn file_names(folder: &Path) -> Result<Vec<String>, HarnessError> {
    let entries = std::fs::read_dir(folder).map_err(HarnessError::io("read", folder.display()))?;
    let files = entries.flatten().filter(|entry| entry.path().is_file());
    let mut names: Vec<String> = files.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_checked() {
        let all = ["--output", "o", "--binaries", "b", "--target", "x86_64-unknown-linux-musl"];
        let options = Options::parse(&all).expect("right arguments");
        assert_eq!((options.output, options.binaries), (Some("o".into()), Some("b".into())));
        assert_eq!(Options::parse(&[]), Some(Options::default()));
        assert!(Options::default().triple().ends_with("-unknown-linux-gnu"));
        let options = Options::parse(&["--static", "--output", "--try", "--try"]).expect("right arguments");
        assert_eq!((options.is_static, options.is_tried, options.output), (true, true, Some("--try".into())));
        for wrong in [&["--output"][..], &["x"], &["--other", "x"], &["--static", "--target"]] {
            assert_eq!(Options::parse(wrong), None, "{wrong:?}");
        }
    }
}
