//! `cargo xtask dist --try`: the archive, the wheel and the image each train the first example,
//! with as little of this machine as possible. All must train the same model.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rectrain_harness::command::{command, output};
use rectrain_harness::events::{final_event, test_auc};
use rectrain_harness::files::make_folder;
use rectrain_harness::workspace::workspace;
use rectrain_harness::{HarnessError, not_yet, say, skips};

use super::{Release, VERSION, file_names, is_static};

/// The first example, and its arguments.
const EXAMPLE: &str = "movielens-100k.yaml";
const ARGUMENTS: [&str; 4] = ["run", EXAMPLE, "--json", "--no-history"];
const DATA: &str = "data/movielens-100k";
/// The least test AUC of the example.
const LEAST_AUC: f64 = 0.785;
/// The name of the container.
const CONTAINER: &str = "rectrain-trial";

/// Tries all artifacts. A part without its tool is skipped.
pub(super) fn run(release: &Release) -> Result<(), HarnessError> {
    let trial = Trial { release, root: release.scratch.join("trial/root") };
    let program = trial.unpack()?;
    if let Err(reason) = trial.example(&program) {
        return skips::skip("the trial of the artifacts", reason);
    }
    let tried =
        [("the archive", trial.archive(&program)?), ("the wheel", trial.wheel()?), ("the image", trial.image()?)];
    let tried: Vec<_> = tried.into_iter().filter_map(|(artifact, outcome)| Some((artifact, outcome?))).collect();
    are_equal(&tried)
}

/// The result of a run of the example.
struct Outcome {
    /// On the test rows.
    auc: f64,
    /// SHA-256 of the model's parameters.
    digest: String,
}

/// The artifacts, and a folder with the unpacked archive, the example and its data.
struct Trial<'a> {
    release: &'a Release,
    root: PathBuf,
}

impl Trial<'_> {
    /// Unpacks the archive. Returns the program.
    fn unpack(&self) -> Result<PathBuf, HarnessError> {
        make_folder(&self.root)?;
        let name = format!("rectrain-{VERSION}-{}", self.release.label);
        let archive = self.release.output.join(format!("{name}.tar.gz"));
        output(command("tar", ["-xzf"]).arg(archive).arg("-C").arg(&self.root))?;
        Ok(self.root.join(name).join("rectrain"))
    }

    /// Copies the example, and prepares its data. That needs Python with pip.
    fn example(&self, program: &Path) -> Result<(), HarnessError> {
        let example = workspace().join("docs/examples").join(EXAMPLE);
        std::fs::copy(&example, self.root.join(EXAMPLE)).map_err(HarnessError::io("copy", example.display()))?;
        output(command(program, ["data", "movielens-100k", "--output"]).arg(self.root.join(DATA))).map(drop)
    }

    /// A static program trains in a root folder that has nothing but the archive, the example and
    /// its data. Another one trains with the libraries of this machine.
    fn archive(&self, program: &Path) -> Result<Option<Outcome>, HarnessError> {
        if !is_static(program)? {
            return train(command(program, ARGUMENTS).current_dir(&self.root).env_clear()).map(Some);
        }
        let inside = Path::new("/").join(program.strip_prefix(&self.root).unwrap_or(program));
        train(change_root().arg(&self.root).arg(inside).args(ARGUMENTS)).map(Some)
    }

    /// The command of the wheel, in an environment of Python with nothing else.
    fn wheel(&self) -> Result<Option<Outcome>, HarnessError> {
        let names = file_names(&self.release.output)?;
        let wheels = names.iter().filter(|name| Path::new(name).extension().is_some_and(|end| end == "whl"));
        let environment = self.release.scratch.join("trial/environment");
        if let Err(reason) = output(command("python3", ["-m", "venv"]).arg(&environment)) {
            return skips::skip("the trial of the wheel", reason).map(|()| None);
        }
        let mut install = command(environment.join("bin/pip"), ["install", "--quiet", "--no-index", "--no-deps"]);
        output(install.args(wheels.map(|name| self.release.output.join(name))))?;
        let mut rectrain = command(environment.join("bin/rectrain"), ARGUMENTS);
        train(rectrain.current_dir(&self.root).env_clear()).map(Some)
    }

    /// The image, with the example as a volume.
    fn image(&self) -> Result<Option<Outcome>, HarnessError> {
        let archive = self.release.image_archive("runtime");
        if !archive.exists() {
            return skips::skip("the trial of the image", "it was not made").map(|()| None);
        }
        let image = format!("oci-archive:{}", archive.display());
        output(&mut self.release.buildah(&["from", "--name", CONTAINER, &image]))?;
        let volume = format!("{}:/example:ro", self.root.display());
        let options = ["run", "--isolation=chroot", "--volume", &volume, "--workingdir", "/example", CONTAINER, "--"];
        let mut container = self.release.buildah(&options);
        train(container.arg("/usr/local/bin/rectrain").args(ARGUMENTS)).map(Some)
    }
}

/// `chroot` with no variables. Without the rights of root, in a namespace where it has them.
fn change_root() -> Command {
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0);
    let mut chroot = match is_root {
        true => command("chroot", [""; 0]),
        false => command("unshare", ["--map-root-user", "chroot"]),
    };
    chroot.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    chroot
}

/// Runs the example.
fn train(run: &mut Command) -> Result<Outcome, HarnessError> {
    let summary = final_event(&output(run)?)?;
    let digest = summary["parametersSha256"].as_str().unwrap_or_default().to_owned();
    Ok(Outcome { auc: test_auc(&summary)?, digest })
}

/// All artifacts reached the AUC, with the same model.
fn are_equal(tried: &[(&str, Outcome)]) -> Result<(), HarnessError> {
    let first = tried.first().map(|(_, outcome)| &outcome.digest);
    for (artifact, outcome) in tried {
        let Outcome { auc, digest } = outcome;
        say(format!("{artifact} trained {EXAMPLE}: test AUC {auc:.4}, digest {digest}"));
        if *auc < LEAST_AUC || auc.is_nan() {
            return Err(not_yet(format!("{artifact}: expected a test AUC of at least {LEAST_AUC}, found {auc}")));
        }
        if Some(digest) != first || digest.is_empty() {
            return Err(not_yet(format!("{artifact}: expected the digest {first:?}, found {digest:?}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artifacts_must_train_the_same_good_model() {
        let run = |auc: f64, digest: &str| Outcome { auc, digest: digest.to_owned() };
        assert!(are_equal(&[("a", run(0.79, "1")), ("b", run(0.79, "1"))]).is_ok());
        let other = are_equal(&[("a", run(0.79, "1")), ("b", run(0.79, "2"))]).unwrap_err().to_string();
        assert!(other.starts_with("b: expected the digest Some(\"1\")"), "{other}");
        let bad = are_equal(&[("a", run(0.6, "1"))]).unwrap_err().to_string();
        assert!(bad.contains("at least 0.785, found 0.6"), "{bad}");
        assert!(are_equal(&[("a", run(0.8, ""))]).is_err());
    }
}
