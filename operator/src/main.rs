//! The `rectrain-operator` command: joins the leader election, and reconciles `RecTrainingJob`s
//! and `RecModelServer`s while it leads.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::{Parser, ValueEnum};
use futures::FutureExt;
use http::Request;
use kube::client::{Body, ClientBuilder};
use kube::{Client, Config};
use kube_lease_manager::LeaseManagerError;
use parking_lot::Mutex;
use rectrain_operator::admin::{self, Admin};
use rectrain_operator::api_server;
use rectrain_operator::certificates::{CertificateError, Root};
use rectrain_operator::config::{GpuPods, OperatorConfig};
use rectrain_operator::controller::{self, Watches};
use rectrain_operator::coordinator_client::GrpcCoordinatorClient;
use rectrain_operator::coordinator_poller::{CoordinatorPoller, LateAnswers};
use rectrain_operator::events::Announcer;
use rectrain_operator::leader::{self, Candidate};
use rectrain_operator::metrics::{Loss, OperatorMetrics};
use rectrain_operator::nodes::{ClusterNodes, NoNodes, ReadNodes};
use rectrain_operator::reconcile::context::{Context, Measurements};
use rectrain_operator::reconcile::memory::JobMemories;
use rectrain_operator::reconcile::stored_forms::StoredForms;
use rectrain_operator::scrape::HttpScraper;
use rectrain_operator::server;
use rectrain_operator::server::act::ServerContext;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tower::util::MapRequestLayer;
use tracing_subscriber::EnvFilter;

/// Runs the RecTrainingJobs of the cluster of its kubeconfig or ServiceAccount.
#[derive(Debug, Parser)]
#[command(name = "rectrain-operator", version, about, max_term_width = 100)]
struct Cli {
    /// Image of the jobs' pods
    #[arg(long)]
    runtime_image: String,
    /// Image of the pods of jobs with GPUs: the runtime with the feature `cuda`
    #[arg(long, default_value = "rectrain-cuda:latest")]
    gpu_runtime_image: String,
    /// Node selector and tolerations of pods with a GPU, as JSON:
    /// `{"nodeSelector": {…}, "tolerations": […]}`
    #[arg(long, default_value = "{}", value_name = "JSON")]
    gpu_pods: GpuPods,
    /// Pull policy of both images
    #[arg(long, default_value = "IfNotPresent")]
    image_pull_policy: String,
    /// Secret in the job's namespace to pull the images with (may be given several times)
    #[arg(long = "image-pull-secret")]
    image_pull_secrets: Vec<String>,
    /// Seconds between two requests to a coordinator; longer with very many jobs
    #[arg(long, default_value_t = 3)]
    poll_seconds: u64,
    /// Jobs that are reconciled at the same time; the others wait in the order of their arrival
    #[arg(long, default_value_t = 16)]
    concurrency: u16,
    /// Namespace of the jobs; all namespaces if not given
    #[arg(long)]
    watch_namespace: Option<String>,
    /// The operator's own namespace, with its Lease; without it there is no leader election
    #[arg(long)]
    namespace: Option<String>,
    /// Let the pods of a job accept only members of the job, by certificates (needs --namespace)
    #[arg(long, requires = "namespace")]
    pod_tls: bool,
    /// Name of this instance in the election: the name of its pod
    #[arg(long, default_value = "rectrain-operator")]
    identity: String,
    /// Address of /healthz, /readyz, /metrics and /traces/NAMESPACE/JOB
    #[arg(long, default_value = "[::]:8080")]
    address: SocketAddr,
    /// Format of the logs on standard error (RECTRAIN_LOG sets the level)
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

/// Why the operator ends.
#[derive(Debug, thiserror::Error)]
enum OperatorError {
    #[error("cannot start the asynchronous runtime: {0}")]
    Runtime(std::io::Error),
    #[error("cannot register metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    #[error("cannot serve health and metrics on {address}: {source}")]
    Admin { address: SocketAddr, source: std::io::Error },
    #[error("no cluster: neither a kubeconfig nor a ServiceAccount could be used: {0}")]
    NoCluster(Box<kube::Error>),
    #[error("the API server refuses to tell its version: {0}")]
    Refused(Box<kube::Error>),
    #[error(transparent)]
    Root(#[from] CertificateError),
    #[error("cannot join the election in namespace {namespace}: {source}")]
    Election { namespace: String, source: LeaseManagerError },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    log_to_stderr(cli.log);
    // rustls needs a choice if the build has several providers. A choice made before is as good.
    let _chosen = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rectrain-operator: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), OperatorError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(OperatorError::Runtime)?;
    runtime.block_on(serve(cli))
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

/// Longest silence of the API server during a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// The same for calls about the lease: several of them fit into its time.
const ELECTION_TIMEOUT: Duration = Duration::from_secs(3);

/// Clients of the API server.
#[derive(Clone)]
struct Clients {
    calls: Client,
    watches: Client,
    elections: Client,
}

impl Clients {
    async fn new(metrics: &OperatorMetrics) -> Result<Self, OperatorError> {
        let no_cluster = |error| OperatorError::NoCluster(Box::new(error));
        Ok(Self {
            calls: client(metrics, Some(CALL_TIMEOUT)).await.map_err(no_cluster)?,
            watches: client(metrics, None).await.map_err(no_cluster)?,
            elections: client(metrics, Some(ELECTION_TIMEOUT)).await.map_err(no_cluster)?,
        })
    }
}

async fn serve(cli: Cli) -> Result<(), OperatorError> {
    let metrics = OperatorMetrics::new()?;
    let is_ready = Arc::new(AtomicBool::new(false));
    let admin = Admin { metrics: metrics.clone(), is_ready: Arc::clone(&is_ready), traces: Arc::default() };
    let address = admin::serve(cli.address, admin.clone())
        .await
        .map_err(|source| OperatorError::Admin { address: cli.address, source })?;
    let stop = Stop::on_signals();
    let clients = Clients::new(&metrics).await?;
    tokio::select! {
        result = answer_of(&clients, &metrics) => result?,
        () = stop.requested() => return Ok(()),
    }
    is_ready.store(true, Ordering::Relaxed);
    metrics.api_server_answers(true);
    tokio::spawn(api_server::watch_readiness(clients.elections.clone(), is_ready, metrics.clone()));
    tracing::info!(%address, identity = cli.identity, "standing by");
    match cli.namespace.clone() {
        Some(namespace) => tokio::select! {
            candidacy = Candidacy::new(&cli, &clients, &metrics, &namespace) => {
                candidacy?.stand(&cli, &clients, &admin, &stop).await;
                Ok(())
            }
            () = stop.requested() => Ok(()),
        },
        None => {
            metrics.leads(true);
            lead(&cli, clients, admin, None, async move { stop.requested().await }).await;
            Ok(())
        }
    }
}

/// Waits until the API server answers.
async fn answer_of(clients: &Clients, metrics: &OperatorMetrics) -> Result<(), OperatorError> {
    let version = api_server::answered(|| clients.elections.apiserver_version(), api_server::is_silent, metrics)
        .await
        .map_err(|error| OperatorError::Refused(Box::new(error)))?;
    tracing::info!(kubernetes = version.git_version, "the API server answers");
    Ok(())
}

/// The membership of this instance in the election.
struct Candidacy {
    root: Root,
    candidate: Candidate,
}

impl Candidacy {
    /// Joins the election. Waits for an API server that does not answer.
    async fn new(
        cli: &Cli,
        clients: &Clients,
        metrics: &OperatorMetrics,
        namespace: &str,
    ) -> Result<Self, OperatorError> {
        let load = || Root::load(clients.calls.clone(), namespace);
        let root = api_server::answered(load, CertificateError::is_silence, metrics).await?;
        let join = || Candidate::new(clients.elections.clone(), namespace, &cli.identity);
        let candidate = api_server::answered(join, leader::is_silence, metrics)
            .await
            .map_err(|source| OperatorError::Election { namespace: namespace.to_owned(), source })?;
        Ok(Self { root, candidate })
    }

    /// Leads whenever this instance is elected, until it is stopped. An instance that has lost the
    /// lease stands by: the process does not end.
    async fn stand(mut self, cli: &Cli, clients: &Clients, admin: &Admin, stop: &Stop) {
        loop {
            tokio::select! {
                () = self.candidate.elected() => {}
                () = stop.requested() => break,
            }
            match self.lead(cli, clients, admin, stop).await {
                Ending::Deposed(loss) => note_loss(admin, loss),
                Ending::Ended | Ending::Stopped => break,
            }
        }
        self.candidate.resign().await;
    }

    /// Leads until this instance is deposed or stopped.
    async fn lead(&mut self, cli: &Cli, clients: &Clients, admin: &Admin, stop: &Stop) -> Ending {
        admin.metrics.leads(true);
        tracing::info!(identity = cli.identity, "leading");
        // Reconciles under way end before the lease is released.
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let leading = lead(cli, clients.clone(), admin.clone(), Some(self.root.clone()), async {
            // A dropped sender means stop as well.
            let _stopped = ended.await;
        });
        tokio::pin!(leading);
        let ending = tokio::select! {
            () = &mut leading => Ending::Ended,
            loss = self.candidate.deposed() => Ending::Deposed(loss),
            () = stop.requested() => Ending::Stopped,
        };
        drop(end);
        admin.metrics.leads(false);
        // Once deposed, another instance may reconcile already: reconciles under way are dropped.
        if matches!(ending, Ending::Stopped) {
            leading.await;
        }
        ending
    }
}

/// Forgets everything that the leader knew about jobs.
fn note_loss(admin: &Admin, loss: Loss) {
    admin.metrics.lost_lease(loss);
    admin.traces.forget_all();
    match loss {
        Loss::Silent => {
            tracing::warn!("the lease could not be renewed in time: standing by until it can be taken again")
        }
        Loss::Taken => tracing::warn!("another instance has taken the lease, or it was deleted: standing by"),
    }
}

/// A client of the API server that counts its requests.
///
/// A request fails after `silence` without an answer. Otherwise it would wait on a cut connection
/// for a quarter of an hour, as the kernel does. Watches may be silent; they have timeouts of their
/// own.
async fn client(metrics: &OperatorMetrics, silence: Option<Duration>) -> Result<Client, kube::Error> {
    let mut config = Config::infer().await.map_err(kube::Error::InferConfig)?;
    config.read_timeout = silence;
    config.reset_reader_on_write = true;
    // Every caller has a back-off of its own. Another one below it would delay the first request
    // after an outage by minutes.
    config.default_retry = false;
    let metrics = metrics.clone();
    let counting = MapRequestLayer::new(move |request: Request<Body>| {
        metrics.requests(request.method().as_str());
        request
    });
    Ok(ClientBuilder::try_from(config)?.with_layer(&counting).build())
}

/// Why this instance stops to lead.
enum Ending {
    /// The controller ended by itself.
    Ended,
    /// The lease was lost.
    Deposed(Loss),
    /// The process received a signal.
    Stopped,
}

/// Reconciles until `stop`.
async fn lead(
    cli: &Cli,
    clients: Clients,
    admin: Admin,
    root: Option<Root>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let watches = Watches::new(&clients.watches, cli.watch_namespace.as_deref(), &admin.metrics);
    let servers = server_context(cli, clients.calls.clone(), admin.metrics.clone());
    let (context, late) = context(cli, clients.calls, admin, root, &watches);
    let stop = stop.shared();
    tokio::join!(
        controller::run(watches, late, Arc::new(context), stop.clone()),
        Box::pin(server::controller::run(clients.watches, cli.watch_namespace.clone(), servers, stop)),
    );
}

fn server_context(cli: &Cli, client: Client, metrics: OperatorMetrics) -> ServerContext {
    ServerContext {
        announcer: Announcer::new(client.clone(), Some(cli.identity.clone())),
        client,
        config: config(cli),
        now: jiff::Timestamp::now,
        metrics,
        stored_forms: StoredForms::default(),
        obstacles: Mutex::default(),
    }
}

fn context(cli: &Cli, client: Client, admin: Admin, root: Option<Root>, watches: &Watches) -> (Context, LateAnswers) {
    let Admin { metrics, traces, .. } = admin;
    let (coordinators, late) = CoordinatorPoller::new(Arc::new(GrpcCoordinatorClient), metrics.clone());
    // An operator with rights in one namespace may not read nodes.
    let nodes: Arc<dyn ReadNodes> = match cli.watch_namespace {
        None => Arc::new(ClusterNodes::new(client.clone())),
        Some(_) => Arc::new(NoNodes),
    };
    let context = Context {
        reader: controller::reader(watches),
        announcer: Announcer::new(client.clone(), Some(cli.identity.clone())),
        client,
        config: config(cli),
        root,
        coordinators,
        now: jiff::Timestamp::now,
        metrics,
        stored_forms: StoredForms::default(),
        memories: JobMemories::default(),
        measurements: Measurements { processes: Arc::new(HttpScraper), nodes },
        traces,
    };
    (context, late)
}

fn config(cli: &Cli) -> OperatorConfig {
    OperatorConfig {
        runtime_image: cli.runtime_image.clone(),
        gpu_runtime_image: cli.gpu_runtime_image.clone(),
        gpu_pods: cli.gpu_pods.clone(),
        image_pull_policy: cli.image_pull_policy.clone(),
        image_pull_secrets: cli.image_pull_secrets.clone(),
        poll: Duration::from_secs(cli.poll_seconds.max(1)),
        namespace: cli.namespace.clone(),
        tls: cli.pod_tls,
        concurrency: cli.concurrency,
    }
}

/// The request to end this process.
#[derive(Clone)]
struct Stop(watch::Receiver<bool>);

impl Stop {
    /// By Ctrl-C, or the signal with which a supervisor ends a process.
    fn on_signals() -> Self {
        let (tell, requested) = watch::channel(false);
        tokio::spawn(async move {
            stopped().await;
            tell.send_replace(true);
        });
        Self(requested)
    }

    /// Returns once the process should end.
    async fn requested(&self) {
        // The task of the signals never ends without a signal.
        if self.0.clone().wait_for(|stop| *stop).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
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
