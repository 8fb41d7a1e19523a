//! The programs that the cluster is made of: commands that the system has or Debian's packages bring, and Go modules that are
//! built once and kept in the cache folder.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::cgroups;
use super::components::CNI_FOLDERS;
use super::paths::{Paths, lock, make_folder, sources, write};
use super::process::{command, output, visible};

/// Commands, and the Debian package that has them. What another package or the machine's owner has installed is taken as it is.
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
/// Sets the version that the API server reports.
const KUBERNETES_VERSION: &str = "-X k8s.io/component-base/version.gitVersion=v1.35.4";

/// What is said of programs whose source is here and does not build, and of no other failure.
pub(super) const BROKEN: &str = "the programs of e2e/cluster do not build";

/// A program that is built.
#[derive(Debug, Clone, Copy)]
pub(super) enum Program {
    /// A `main` of the module in `e2e/cluster`.
    Own(&'static str),
    /// A module's `main`, with its version.
    Module(&'static str, &'static str),
}

/// The first process of a set of namespaces and of a pod.
pub(super) const INIT: Program = Program::Own("init");
/// Kubernetes 1.35: the last that goes with containerd 1.6, which Debian 12 has.
pub(super) const KUBE: Program = Program::Own("kube");
/// The cluster's DNS.
pub(super) const COREDNS: Program = Program::Module("coredns", "github.com/coredns/coredns@v1.15.0");
/// Installs charts.
pub(super) const HELM: Program = Program::Module("helm", "helm.sh/helm/v4/cmd/helm@v4.3.1");
/// An object store that speaks S3.
pub(super) const OBJECT_STORE: Program =
    Program::Module("versitygw", "github.com/versity/versitygw/cmd/versitygw@v1.8.0");
/// Measures what nodes and pods use.
pub(super) const METRICS_SERVER: Program =
    Program::Module("metrics-server", "sigs.k8s.io/metrics-server/cmd/metrics-server@v0.9.0");
/// Fakes nodes and the pods on them.
pub(super) const KWOK: Program = Program::Module("kwok", "sigs.k8s.io/kwok/cmd/kwok@v0.8.0");

/// Whether a cluster can be made here; if not, one sentence that says why.
pub(super) fn available(paths: &Paths) -> Result<(), String> {
    if !cfg!(target_os = "linux") {
        return Err("the cluster needs Linux".to_owned());
    }
    if std::fs::metadata("/proc/self").map(|own| own.uid()).unwrap_or(u32::MAX) != 0 {
        return Err("the cluster needs root, for namespaces and network links".to_owned());
    }
    if !on_path("go") {
        return Err("the cluster's programs are built with Go, and `go` is not on the PATH".to_owned());
    }
    let missing = missing_packages();
    if !missing.is_empty() && !on_path("apt-get") {
        return Err(format!(
            "these packages are missing and there is no apt-get to install them: {}",
            missing.join(" ")
        ));
    }
    if ["/run", "/var"].iter().any(|hidden| paths.root().starts_with(hidden)) {
        let root = paths.root().display();
        return Err(format!("the cluster has a /run and a /var of its own and cannot see {root}: set XDG_CACHE_HOME"));
    }
    output(&mut command("unshare", ["--net", "--mount", "--pid", "--fork", "--mount-proc", "true"]))
        .map_err(|error| format!("the cluster needs namespaces of its own, which this machine refuses: {error}"))?;
    cgroups::probe()
}

/// Installs the packages that are missing.
pub(super) fn install_packages() -> Result<(), String> {
    let missing = missing_packages();
    if missing.is_empty() {
        return Ok(());
    }
    by_apt(|| {
        let mut install = command("apt-get", ["install", "--yes", "--no-install-recommends"]);
        visible(install.args(&missing).env("DEBIAN_FRONTEND", "noninteractive"))
    })
}

/// Asks apt for something, and once more with new lists if it fails: it may have none, or look for what is there no more.
pub(super) fn by_apt<T>(ask: impl Fn() -> Result<T, String>) -> Result<T, String> {
    ask().or_else(|_| {
        visible(&mut command("apt-get", ["update"]))?;
        ask()
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

/// Builds those that are not there, or are there in another version.
pub(super) fn build(paths: &Paths, programs: &[Program]) -> Result<(), String> {
    make_folder(&paths.bin())?;
    programs.iter().try_for_each(|program| build_one(paths, *program))
}

fn build_one(paths: &Paths, program: Program) -> Result<(), String> {
    let _lock = lock(paths, "build")?;
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
    eprintln!("xtask: building {name}, once; this can take some minutes");
    go.env("CGO_ENABLED", "0").env("GOBIN", paths.bin());
    match program {
        Program::Own(_) => {
            visible(command("go", ["mod", "download"]).current_dir(sources()))?;
            visible(&mut go).map_err(|error| format!("{BROKEN}: {error}"))?;
        }
        Program::Module(..) => visible(&mut go)?,
    }
    write(&stamp, made_of)
}

/// The folder of a program's module.
pub(super) fn sources_of(program: &Program) -> Result<PathBuf, String> {
    let Program::Module(name, main) = program else { return Ok(sources()) };
    let (path, version) = main.rsplit_once('@').ok_or_else(|| format!("{name} has no version"))?;
    let module = format!("{}@{version}", path.split_once("/cmd/").map_or(path, |(module, _)| module));
    let told = output(&mut command("go", ["mod", "download", "-json", &module]))?;
    let told: serde_json::Value = serde_json::from_str(&told).map_err(|error| error.to_string())?;
    told["Dir"].as_str().map(PathBuf::from).ok_or_else(|| format!("`go mod download` does not say where {module} is"))
}

/// What decides on a program of the module in `e2e/cluster`.
fn own_source(name: &str) -> Result<String, String> {
    let files = ["go.mod".to_owned(), format!("cmd/{name}/main.go")];
    let read = |file: &String| {
        let path = sources().join(file);
        std::fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))
    };
    files.iter().map(read).collect()
}
