//! The `rectrain-operator` command: stands for election, and reconciles `RecTrainingJob`s while it leads.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::{Parser, ValueEnum};
use http::Request;
use kube::client::{Body, ClientBuilder};
use kube::{Client, Config};
use rectrain_operator::admin::{self, Admin};
use rectrain_operator::certificates::Root;
use rectrain_operator::config::{GpuPods, OperatorConfig};
use rectrain_operator::controller::{self, Watches};
use rectrain_operator::coordinator::GrpcCoordinators;
use rectrain_operator::events::Announcer;
use rectrain_operator::leader::Candidate;
use rectrain_operator::measure::HttpMetrics;
use rectrain_operator::metrics::OperatorMetrics;
use rectrain_operator::nodes::{ClusterNodes, NoNodes, ReadNodes};
use rectrain_operator::questions::Questions;
use rectrain_operator::reconcile::Context;
use rectrain_operator::reconcile::apply::Settled;
use tokio::signal::unix::{SignalKind, signal};
use tower::util::MapRequestLayer;
use tracing_subscriber::EnvFilter;

/// Runs RecTrainingJobs in the cluster whose kubeconfig or ServiceAccount it finds.
#[derive(Debug, Parser)]
#[command(name = "rectrain-operator", version, about, max_term_width = 100)]
struct Cli {
    /// Image of the jobs' pods
    #[arg(long)]
    runtime_image: String,
    /// Image of the pods of jobs with GPUs: the runtime with the feature `cuda`
    #[arg(long, default_value = "rectrain-cuda:latest")]
    gpu_runtime_image: String,
    /// Node selector and tolerations of pods with a GPU, as JSON: `{"nodeSelector": {…}, "tolerations": […]}`
    #[arg(long, default_value = "{}", value_name = "JSON")]
    gpu_pods: GpuPods,
    /// When nodes pull it
    #[arg(long, default_value = "IfNotPresent")]
    image_pull_policy: String,
    /// Secret of the job's namespace with which it is pulled (may be given several times)
    #[arg(long = "image-pull-secret")]
    image_pull_secrets: Vec<String>,
    /// Seconds between two questions to a coordinator; longer where there are more jobs than can be asked so often
    #[arg(long, default_value_t = 3)]
    poll_seconds: u64,
    /// Jobs that are reconciled at the same time; the others wait in the order in which they came
    #[arg(long, default_value_t = 16)]
    concurrency: u16,
    /// Namespace whose jobs it runs; all namespaces if not given
    #[arg(long)]
    watch_namespace: Option<String>,
    /// The operator's own namespace, where its Lease is; without it there is no election
    #[arg(long)]
    namespace: Option<String>,
    /// Let the pods of jobs speak with members of their job only, by certificates (needs --namespace)
    #[arg(long, requires = "namespace")]
    pod_tls: bool,
    /// This instance's name in the election; its pod's name
    #[arg(long, default_value = "rectrain-operator")]
    identity: String,
    /// Where to serve /healthz, /readyz, /metrics and /traces/NAMESPACE/JOB
    #[arg(long, default_value = "[::]:8080")]
    address: SocketAddr,
    /// How logs are written to standard error (what is logged: RECTRAIN_LOG)
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    log_to_stderr(cli.log);
    // Crates of one build may bring several, and then rustls has to be told; that one was chosen already is as good.
    let _chosen = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return end(&format!("cannot start the asynchronous runtime: {error}")),
    };
    match runtime.block_on(serve(cli)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => end(&message),
    }
}

fn end(message: &str) -> ExitCode {
    eprintln!("rectrain-operator: {message}");
    ExitCode::FAILURE
}

fn log_to_stderr(format: LogFormat) {
    let filter = EnvFilter::try_from_env("RECTRAIN_LOG").unwrap_or_else(|_| EnvFilter::new("info,kube=warn"));
    let colours = std::io::stderr().is_terminal();
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    match format {
        LogFormat::Text => logs.init(),
        LogFormat::Json => logs.json().init(),
    }
}

/// The longest silence of the API server in a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// In a question about the lease: several of them fit into the time for which it holds.
const ELECTION_TIMEOUT: Duration = Duration::from_secs(3);

async fn serve(cli: Cli) -> Result<(), String> {
    let metrics = OperatorMetrics::new().map_err(|error| format!("cannot register metrics: {error}"))?;
    let is_ready = Arc::new(AtomicBool::new(false));
    let admin = Admin { metrics: metrics.clone(), is_ready: Arc::clone(&is_ready), traces: Arc::default() };
    let address = admin::serve(cli.address, admin.clone())
        .await
        .map_err(|error| format!("cannot serve health and metrics on {}: {error}", cli.address))?;
    let no_cluster = |error| format!("no cluster: neither a kubeconfig nor a ServiceAccount could be used: {error}");
    let watching = client(&metrics, None).await.map_err(no_cluster)?;
    let elections = client(&metrics, Some(ELECTION_TIMEOUT)).await.map_err(no_cluster)?;
    let client = client(&metrics, Some(CALL_TIMEOUT)).await.map_err(no_cluster)?;
    let version =
        client.apiserver_version().await.map_err(|error| format!("the API server does not answer: {error}"))?;
    is_ready.store(true, Ordering::Relaxed);
    tracing::info!(kubernetes = version.git_version, %address, identity = cli.identity, "standing by");
    let Some(namespace) = cli.namespace.clone() else {
        metrics.leads(true);
        lead(&cli, (client, watching), admin, None, stopped()).await;
        return Ok(());
    };
    let root = Root::load(client.clone(), &namespace).await.map_err(|error| error.to_string())?;
    let mut candidate = Candidate::new(elections, &namespace, &cli.identity)
        .await
        .map_err(|error| format!("cannot stand for election in namespace {namespace}: {error}"))?;
    tokio::select! {
        () = candidate.elected() => {}
        () = stopped() => {
            candidate.resign().await;
            return Ok(());
        }
    }
    metrics.leads(true);
    tracing::info!(identity = cli.identity, "leading");
    // Reconciles that are under way when the end comes get through before the lease is given back.
    let (stop, stopping) = tokio::sync::oneshot::channel::<()>();
    let leading = lead(&cli, (client, watching), admin, Some(root), async {
        // Whether told or dropped: stop.
        let _told = stopping.await;
    });
    tokio::pin!(leading);
    let ending = tokio::select! {
        () = &mut leading => Ending::Ended,
        () = candidate.deposed() => Ending::Deposed,
        () = stopped() => Ending::Stopped,
    };
    drop(stop);
    metrics.leads(false);
    match ending {
        // Another instance may reconcile already: nothing is finished, and a fresh process stands for election again.
        Ending::Deposed => {
            return Err("another instance has taken the lease, or it could not be renewed in time".to_owned());
        }
        Ending::Ended => {}
        Ending::Stopped => leading.await,
    }
    candidate.resign().await;
    Ok(())
}

/// A client of the API server whose requests are counted. A request that is answered nothing for as long as `silence` has failed: a
/// connection that was cut without a word would be waited on for as long as the kernel does, a quarter of an hour. Watches, which may be
/// silent, look after themselves.
async fn client(metrics: &OperatorMetrics, silence: Option<Duration>) -> Result<Client, kube::Error> {
    let mut config = Config::infer().await.map_err(kube::Error::InferConfig)?;
    config.read_timeout = silence;
    config.reset_reader_on_write = true;
    // Whoever asks has a back-off of its own. Beneath that, an API server that was away would be asked again minutes after it is back.
    config.default_retry = false;
    let metrics = metrics.clone();
    let counting = MapRequestLayer::new(move |request: Request<Body>| {
        metrics.requests(request.method().as_str());
        request
    });
    Ok(ClientBuilder::try_from(config)?.with_layer(&counting).build())
}

/// Why this instance leads no more.
enum Ending {
    /// The loop ended by itself.
    Ended,
    /// The lease was lost.
    Deposed,
    /// The process was told to stop.
    Stopped,
}

async fn lead(
    cli: &Cli,
    (client, watching): (Client, Client),
    Admin { metrics, traces, .. }: Admin,
    root: Option<Root>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let config = OperatorConfig {
        runtime_image: cli.runtime_image.clone(),
        gpu_runtime_image: cli.gpu_runtime_image.clone(),
        gpu_pods: cli.gpu_pods.clone(),
        image_pull_policy: cli.image_pull_policy.clone(),
        image_pull_secrets: cli.image_pull_secrets.clone(),
        poll: Duration::from_secs(cli.poll_seconds.max(1)),
        namespace: cli.namespace.clone(),
        tls: cli.pod_tls,
        concurrency: cli.concurrency,
    };
    let watches = Watches::new(&watching, cli.watch_namespace.as_deref(), &metrics);
    // Whose rights end with its namespace may not look at nodes.
    let read_nodes: Arc<dyn ReadNodes> = match cli.watch_namespace {
        None => Arc::new(ClusterNodes::new(client.clone())),
        Some(_) => Arc::new(NoNodes),
    };
    let (questions, late) = Questions::new(Arc::new(GrpcCoordinators), metrics.clone());
    let context = Context {
        reader: controller::reader(&watches),
        announcer: Announcer::new(client.clone(), Some(cli.identity.clone())),
        client,
        config,
        root,
        questions,
        now: jiff::Timestamp::now,
        metrics,
        settled: Settled::default(),
        obstacles: Mutex::new(HashMap::new()),
        read_metrics: Arc::new(HttpMetrics),
        read_nodes,
        watched: Mutex::new(HashMap::new()),
        traces,
        memories: Mutex::default(),
        known: Mutex::default(),
    };
    controller::run(watches, late, Arc::new(context), stop).await;
}

/// Ctrl-C, or the signal with which a supervisor ends a process.
async fn stopped() {
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        result = tokio::signal::ctrl_c() => if result.is_err() { std::future::pending::<()>().await },
        _ = terminate.recv() => {}
    }
}
