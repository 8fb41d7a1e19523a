//! The cluster's programs. Some are commands of the system, which Debian's packages can provide.
//! The others are Go programs, which are built once and kept in the cache.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rectrain_harness::command::{command, output, visible};
use rectrain_harness::files::{make_folder, read, write};
use rectrain_harness::{HarnessError, events, say};

use crate::components::CNI_FOLDERS;
use crate::paths::{Paths, sources};
use crate::{BringUpError, cgroups};

/// Commands, and the Debian packages that provide them. A command that is on the PATH already is
/// used as it is.
const COMMANDS: [(&str, &str); 10] = [
    ("etcd", "etcd-server"),
    ("containerd", "containerd"),
    ("ctr", "containerd"),
    ("runc", "runc"),
    ("buildah", "buildah"),
    ("iptables", "iptables"),
    ("ip", "iproute2"),
    ("nsenter", "util-linux"),
    ("strip", "binutils"),
    ("curl", "curl"),
];
const CNI_PACKAGE: &str = "containernetworking-plugins";
/// The linker flag that sets the version in the API server's answers.
const KUBERNETES_VERSION: &str = "-X k8s.io/component-base/version.gitVersion=v1.35.4";

/// The message for Go programs of this repository that do not compile, and for no other failure.
/// The suite looks for it in a log to tell a defect from a missing network.
pub const BROKEN: &str = "the programs of e2e/cluster do not build";

/// A Go program.
#[derive(Debug, Clone, Copy)]
pub enum Program {
    /// A command of the module in `e2e/cluster`.
    Own(&'static str),
    /// The program's name, and the path of its `main` package with a version.
    Module(&'static str, &'static str),
}

/// The first process of a set of namespaces, and of a pod's sandbox.
pub const INIT: Program = Program::Own("init");
/// Kubernetes 1.35, the last release that supports containerd 1.6, the version of Debian 12.
pub const KUBE: Program = Program::Own("kube");
/// The cluster's DNS.
pub const COREDNS: Program = Program::Module("coredns", "github.com/coredns/coredns@v1.15.0");
/// Helm, which installs the chart.
pub const HELM: Program = Program::Module("helm", "helm.sh/helm/v4/cmd/helm@v4.3.1");
/// An object store that speaks S3.
pub const OBJECT_STORE: Program = Program::Module("versitygw", "github.com/versity/versitygw/cmd/versitygw@v1.8.0");
/// metrics-server, which measures the use of nodes and pods.
pub const METRICS_SERVER: Program =
    Program::Module("metrics-server", "sigs.k8s.io/metrics-server/cmd/metrics-server@v0.9.0");
/// KWOK, which fakes nodes and the pods on them.
pub const KWOK: Program = Program::Module("kwok", "sigs.k8s.io/kwok/cmd/kwok@v0.8.0");

/// Checks that this machine can run a cluster.
///
/// # Errors
/// [`BringUpError::Unavailable`] and others with the missing precondition.
pub(crate) fn available(paths: &Paths) -> Result<(), BringUpError> {
    let unavailable = |needed, problem: &str| Err(BringUpError::Unavailable { needed, problem: problem.to_owned() });
    if !cfg!(target_os = "linux") {
        return unavailable("Linux", "this is another system");
    }
    if std::fs::metadata("/proc/self").map(|own| own.uid()).unwrap_or(u32::MAX) != 0 {
        return unavailable("root", "only root can make namespaces and network links");
    }
    if !on_path("go") {
        return unavailable("Go", "`go` is not on the PATH");
    }
    let missing = missing_packages();
    if !missing.is_empty() && !on_path("apt-get") {
        let problem = format!("they are missing, and there is no apt-get to install them: {}", missing.join(" "));
        return unavailable("some Debian packages", &problem);
    }
    if ["/run", "/var"].iter().any(|hidden| paths.root().starts_with(hidden)) {
        let problem =
            format!("it has its own /run and /var, and cannot see {}: set XDG_CACHE_HOME", paths.root().display());
        return unavailable("a cache folder elsewhere", &problem);
    }
    output(&mut command("unshare", ["--net", "--mount", "--pid", "--fork", "--mount-proc", "true"]))
        .map_err(BringUpError::NoNamespaces)?;
    cgroups::probe()
}

/// Installs the missing packages with apt.
///
/// # Errors
/// See [`visible`].
pub fn install_packages() -> Result<(), HarnessError> {
    let missing = missing_packages();
    if missing.is_empty() {
        return Ok(());
    }
    by_apt(|| {
        let mut install = command("apt-get", ["install", "--yes", "--no-install-recommends"]);
        visible(install.args(&missing).env("DEBIAN_FRONTEND", "noninteractive"))
    })
}

/// Runs apt, and on a failure once more after `apt-get update`: its lists may be missing or out of
/// date.
pub(crate) fn by_apt<T>(run: impl Fn() -> Result<T, HarnessError>) -> Result<T, HarnessError> {
    run().or_else(|_| {
        visible(&mut command("apt-get", ["update"]))?;
        run()
    })
}

fn missing_packages() -> Vec<&'static str> {
    let commands = COMMANDS.iter().filter(|(command, _)| !on_path(command)).map(|(_, package)| *package);
    let plugins = !CNI_FOLDERS.iter().any(|folder| Path::new(folder).join("ptp").exists());
    let mut missing: Vec<_> = commands.chain(plugins.then_some(CNI_PACKAGE)).collect();
    missing.dedup();
    missing
}

fn on_path(command: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(command).is_file())
}

/// Builds the programs that are missing, or present in another version.
///
/// # Errors
/// [`BringUpError::Broken`] for a program of this repository; otherwise see [`visible`].
pub fn build(paths: &Paths, programs: &[Program]) -> Result<(), BringUpError> {
    make_folder(&paths.bin())?;
    programs.iter().try_for_each(|program| build_one(paths, *program))
}

fn build_one(paths: &Paths, program: Program) -> Result<(), BringUpError> {
    let _lock = paths.lock("build")?;
    let (name, made_of) = match program {
        Program::Own(name) => (name, own_source(name)?),
        Program::Module(name, module) => (name, module.to_owned()),
    };
    let stamp = paths.program(&format!("{name}.made-of"));
    let built = std::fs::read_to_string(&stamp).is_ok_and(|stamped| stamped == made_of);
    if built && paths.program(name).exists() {
        return Ok(());
    }
    let flags = format!("-s -w {KUBERNETES_VERSION}");
    let mut go = match program {
        Program::Own(name) => {
            let mut go = command("go", ["build", "-buildvcs=false", "-trimpath", "-ldflags", &flags, "-o"]);
            go.arg(paths.program(name)).arg(format!("./cmd/{name}")).current_dir(sources());
            go
        }
        Program::Module(_, module) => command("go", ["install", "-trimpath", "-ldflags", "-s -w", module]),
    };
    say(format!("building {name}, once; this can take some minutes"));
    go.env("CGO_ENABLED", "0").env("GOBIN", paths.bin());
    match program {
        Program::Own(_) => {
            visible(command("go", ["mod", "download"]).current_dir(sources()))?;
            visible(&mut go).map_err(|source| BringUpError::Broken { source })?;
        }
        Program::Module(..) => visible(&mut go)?,
    }
    write(&stamp, made_of)?;
    Ok(())
}

/// The folder of a program's module.
///
/// # Errors
/// [`BringUpError::NoVersion`]; `go` fails, or does not name the folder.
pub(crate) fn sources_of(program: Program) -> Result<PathBuf, BringUpError> {
    let Program::Module(name, main) = program else { return Ok(sources()) };
    let (path, version) = main.rsplit_once('@').ok_or(BringUpError::NoVersion { program: name })?;
    let module = format!("{}@{version}", path.split_once("/cmd/").map_or(path, |(module, _)| module));
    let download = format!("the output of `go mod download -json {module}`");
    let answer = events::parse(&download, &output(&mut command("go", ["mod", "download", "-json", &module]))?)?;
    let folder = answer["Dir"].as_str().map(PathBuf::from);
    folder.ok_or_else(|| events::missing(&download, &answer, "Dir").into())
}

/// The sources that a program of `e2e/cluster` depends on.
fn own_source(name: &str) -> Result<String, HarnessError> {
    let files = ["go.mod".to_owned(), format!("cmd/{name}/main.go")];
    files.iter().map(|file| read(&sources().join(file))).collect()
}
