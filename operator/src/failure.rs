//! Why a job does not train: a [`Problem`] with a cause from a fixed list, and a message with
//! advice. Pure functions of pods and of the coordinator's report. docs/operations/failures has a
//! page for every cause.

use jiff::{SignedDuration, Timestamp};
use rectrain_crds::{Mode, Role};

use crate::coordinator_view::CoordinatorView;
use crate::pods::{Ended, PodFacts};
use crate::text::shorten;

/// Time in which a cluster autoscaler may still add a node for an unschedulable pod.
const NODES_COME: SignedDuration = SignedDuration::from_mins(15);

/// Time after a pod's grace period in which its node confirms its end. On a lost node the operator
/// deletes it within that time.
const ENDS_WITHIN: SignedDuration = SignedDuration::from_secs(60);

/// Exit code of a role that found the manifest or the data wrong.
const BAD_INPUT: i32 = 2;

/// The cause of a problem. The names are the reasons of conditions and events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The manifest contradicts itself.
    InvalidSpec,
    /// The manifest or the data is wrong. Never retried.
    BadInput,
    /// Training diverged. Never retried.
    Diverged,
    /// A role ended unexpectedly.
    Crash,
    /// A role exceeded its memory limit.
    OutOfMemory,
    /// No step was completed for `spec.faultTolerance.stallSeconds`.
    NoProgress,
    /// More crashes than `spec.faultTolerance.maxRestarts`.
    RestartsExhausted,
    /// `spec.activeDeadlineSeconds` is over.
    DeadlineExceeded,
    /// A node cannot pull the image.
    ImagePull,
    /// The scheduler finds no node for a pod.
    Unschedulable,
    /// A Secret, ConfigMap or volume of a pod is missing.
    ContainerConfig,
    /// The cluster creates no pod: a quota, a limit, or a missing account.
    PodsRefused,
    /// A pod that should have ended still exists, and no other pod can have its name.
    PodStuck,
    /// The API server refuses an object of the job.
    ObjectRefused,
    /// Another owner's object has a name that the job needs.
    NameConflict,
    /// The job cannot switch to the training mode of its manifest.
    ModeRefused,
    /// Two programs write the number of replicas in turn.
    ReplicasContested,
    /// Another job uses the checkpoint path.
    CheckpointPathInUse,
}

impl Cause {
    /// All causes.
    pub const ALL: [Self; 18] = [
        Self::InvalidSpec,
        Self::BadInput,
        Self::Diverged,
        Self::Crash,
        Self::OutOfMemory,
        Self::NoProgress,
        Self::RestartsExhausted,
        Self::DeadlineExceeded,
        Self::ImagePull,
        Self::Unschedulable,
        Self::ContainerConfig,
        Self::PodsRefused,
        Self::PodStuck,
        Self::ObjectRefused,
        Self::NameConflict,
        Self::ModeRefused,
        Self::ReplicasContested,
        Self::CheckpointPathInUse,
    ];

    /// Whether only another manifest or other data can help.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::BadInput | Self::Diverged)
    }

    /// Whether another attempt recovers from it.
    #[must_use]
    pub fn is_crash(self) -> bool {
        matches!(self, Self::Crash | Self::OutOfMemory | Self::NoProgress)
    }

    /// The reason of a condition.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::InvalidSpec => "InvalidSpec",
            Self::BadInput => "BadInput",
            Self::Diverged => "Diverged",
            Self::Crash => "Crash",
            Self::OutOfMemory => "OutOfMemory",
            Self::NoProgress => "NoProgress",
            Self::RestartsExhausted => "RestartsExhausted",
            Self::DeadlineExceeded => "DeadlineExceeded",
            Self::ImagePull => "ImagePullFailed",
            Self::Unschedulable => "Unschedulable",
            Self::ContainerConfig => "ContainerConfigError",
            Self::PodsRefused => "PodsRefused",
            Self::PodStuck => "PodStuck",
            Self::ObjectRefused => "ObjectRefused",
            Self::NameConflict => "NameConflict",
            Self::ModeRefused => "ModeRefused",
            Self::ReplicasContested => "ReplicasContested",
            Self::CheckpointPathInUse => "CheckpointPathInUse",
        }
    }
}

/// A reason why a job does not train, with advice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The cause.
    pub cause: Cause,
    /// The event, its place, and advice: one or two sentences.
    pub message: String,
    /// Whether it may pass by itself, so that the user need not act yet.
    pub may_pass: bool,
}

impl Problem {
    /// A problem whose message is cut to 2,000 bytes, which conditions and events can hold.
    #[must_use]
    pub fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self { cause, message: shorten(&message.into(), 2000), may_pass: false }
    }
}

/// The coordinator or a container reports wrong input.
#[must_use]
pub fn bad_input(pods: &[&PodFacts], coordinator: &CoordinatorView) -> Option<Problem> {
    let fault = match coordinator {
        CoordinatorView::Failed { message, user_error: true } => message.clone(),
        _ => pods.iter().find_map(|pod| {
            let ended = pod.ended.as_ref().filter(|ended| ended.exit_code == BAD_INPUT)?;
            Some(format!("{}: {}", pod.name, last_line(ended)))
        })?,
    };
    Some(Problem::new(
        Cause::BadInput,
        format!(
            "{fault}. The job is not retried: correct the manifest or the data, and apply the manifest again or create a new job"
        ),
    ))
}

/// The coordinator reports that training diverged.
#[must_use]
pub fn diverged(coordinator: &CoordinatorView) -> Option<Problem> {
    let CoordinatorView::Diverged { message } = coordinator else { return None };
    let advice = "The job is not retried, because it would diverge again: change the manifest or the data, and apply the manifest again";
    Some(Problem::new(Cause::Diverged, format!("{}. {advice}", message.trim_end_matches('.'))))
}

/// A crash after which all roles restart.
///
/// A parameter server that exceeded its memory limit is a crash whatever the coordinator reports:
/// its rows outlive its container, and the kernel would kill the next container, too.
#[must_use]
pub fn crash(pods: &[&PodFacts], coordinator: &CoordinatorView) -> Option<Problem> {
    let servers: Vec<&PodFacts> = pods.iter().copied().filter(|pod| pod.role == Role::Ps).collect();
    if let Some(problem) = out_of_memory(&servers) {
        return Some(problem);
    }
    let CoordinatorView::Failed { message, user_error: false } = coordinator else { return None };
    Some(out_of_memory(pods).unwrap_or_else(|| Problem::new(Cause::Crash, crash_message(pods, message))))
}

/// The last end of a container, for a job that has used up its restarts.
#[must_use]
pub fn last_crash(pods: &[&PodFacts]) -> Option<Problem> {
    out_of_memory(pods).or_else(|| {
        let (pod, ended) = last_ended(pods)?;
        Some(Problem::new(
            Cause::Crash,
            format!("{} ended with exit code {}: {}", pod.name, ended.exit_code, last_line(ended)),
        ))
    })
}

fn crash_message(pods: &[&PodFacts], message: &str) -> String {
    match pods.iter().find(|pod| pod.evicted.is_some()) {
        Some(pod) => format!("{} was evicted ({}); {message}", pod.name, pod.evicted.as_deref().unwrap_or_default()),
        None => message.to_owned(),
    }
}

fn out_of_memory(pods: &[&PodFacts]) -> Option<Problem> {
    let pod = pods.iter().find(|pod| pod.ended.as_ref().is_some_and(|ended| ended.out_of_memory))?;
    let (role, more) = match pod.role {
        Role::Ps => ("ps", ", or spec.roles.ps.replicas, over which the rows are spread"),
        Role::Loader => ("loader", ", or lower spec.data.shuffle.windowRows"),
        other => (other.section(), ""),
    };
    Some(Problem::new(
        Cause::OutOfMemory,
        format!(
            "{} exceeded its memory limit and was killed: raise spec.roles.{role}.template.resources.limits.memory{more}",
            pod.name
        ),
    ))
}

fn last_ended<'a>(pods: &[&'a PodFacts]) -> Option<(&'a PodFacts, &'a Ended)> {
    let ended = pods.iter().filter_map(|pod| Some((*pod, pod.ended.as_ref()?)));
    ended.max_by_key(|(_, ended)| ended.at)
}

fn last_line(ended: &Ended) -> String {
    let last = ended.message.lines().rev().map(str::trim).find(|line| !line.is_empty());
    last.map_or_else(|| "no message".to_owned(), |line| line.trim_end_matches('.').to_owned())
}

/// The job cannot switch to `wanted` and continues in the mode `present`.
#[must_use]
pub fn mode_refused(wanted: Mode, present: Mode, why: &str) -> Problem {
    Problem::new(
        Cause::ModeRefused,
        format!(
            "the job cannot train in mode {wanted}: {}. Training continues in mode {present}: set another spec.training.mode, or correct the settings that it needs",
            why.trim_end_matches('.')
        ),
    )
}

/// Why a pod waits for something that only the user can fix. For a while a cluster autoscaler may
/// still add a node for an unschedulable pod.
#[must_use]
pub fn waiting(pods: &[&PodFacts], now: Timestamp) -> Option<Problem> {
    pods.iter().find_map(|pod| {
        let role = pod.role.section();
        if let Some(why) = &pod.unschedulable {
            let message = format!("no node takes {}: {why}. Add nodes (an autoscaler takes some minutes), or change spec.roles.{role}.template (resources, nodeSelector, tolerations, affinity)", pod.name);
            let may_pass = pod.unschedulable_since.is_some_and(|since| now.duration_since(since) < NODES_COME);
            return Some(Problem { may_pass, ..Problem::new(Cause::Unschedulable, message) });
        }
        let (reason, message) = pod.waiting.as_ref()?;
        match reason.as_str() {
            "ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull" | "RegistryUnavailable" => {
                Some(image_not_pulled(pod, message))
            }
            "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => Some(Problem::new(
                Cause::ContainerConfig,
                format!("the container of {} cannot be created: {message}. Check the Secret of spec.data.storage.secretName and the objects that spec.roles.{role}.template names", pod.name),
            )),
            _ => None,
        }
    })
}

fn image_not_pulled(pod: &PodFacts, message: &str) -> Problem {
    let secrets = match pod.pull_secrets.as_slice() {
        [] => String::new(),
        names => format!(", that the namespace has the Secrets that the pod pulls with ({})", names.join(", ")),
    };
    Problem::new(
        Cause::ImagePull,
        format!(
            "{} cannot pull its image: {message}. Check the chart's runtimeImage.repository, .tag and .pullSecrets{secrets}, and that nodes reach the registry",
            pod.name
        ),
    )
}

/// A pod that should have ended and still exists. Its StatefulSet cannot replace it meanwhile. The
/// operator does not delete it by force, because its process may still run.
#[must_use]
pub fn stuck(pods: &[&PodFacts], now: Timestamp) -> Option<Problem> {
    let is_stuck = |pod: &&&PodFacts| pod.terminates_by.is_some_and(|by| by + ENDS_WITHIN <= now);
    let pod = pods.iter().find(is_stuck)?;
    let advice = match (pod.finalizers.as_slice(), &pod.node) {
        ([], Some(node)) => format!(
            "node {node} has not confirmed the end of its process. Repair or remove the node; if the process is certain to be dead, run `kubectl delete pod {} --force`",
            pod.name
        ),
        ([], None) => "its deletion is not confirmed. Look at its events".to_owned(),
        (finalizers, _) => format!(
            "finalizers of another program keep it ({}). Repair that program, or remove them",
            finalizers.join(", ")
        ),
    };
    let message = format!("{} should have ended, and no other pod can have its name: {advice}", pod.name);
    Some(Problem::new(Cause::PodStuck, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, role: Role) -> PodFacts {
        PodFacts { is_ready: false, is_running: false, ..PodFacts::running(name, role, 1) }
    }

    fn ended(exit_code: i32, out_of_memory: bool, message: &str) -> Option<Ended> {
        Some(Ended { exit_code, out_of_memory, message: message.to_owned(), at: None })
    }

    const SILENT: CoordinatorView = CoordinatorView::Silent;

    fn failed(message: &str, user_error: bool) -> CoordinatorView {
        CoordinatorView::Failed { message: message.to_owned(), user_error }
    }

    #[test]
    fn bad_input_comes_from_the_coordinator_or_exit_code_2_only() {
        let told = bad_input(&[], &failed("train.csv:7: the label is `x`", true)).expect("bad input");
        assert!(
            told.cause == Cause::BadInput
                && told.message.starts_with("train.csv:7: the label is `x`. The job is not retried")
        );
        let exited = PodFacts {
            ended: ended(2, false, "starting\nrectrain: no such file.\n"),
            ..pod("j-loader-0", Role::Loader)
        };
        let told = bad_input(&[&exited], &SILENT).expect("bad input");
        assert!(told.message.starts_with("j-loader-0: rectrain: no such file. The job"), "{}", told.message);
        for code in [0, 1, 101, 137, 143] {
            let crashed = PodFacts { ended: ended(code, false, ""), ..pod("j-ps-0", Role::Ps) };
            assert_eq!(bad_input(&[&crashed], &failed("a member is gone", false)), None);
        }
    }

    #[test]
    fn a_divergence_is_no_crash() {
        let view = CoordinatorView::Diverged { message: "training diverged: the loss is 1e9".to_owned() };
        let problem = diverged(&view).expect("a problem");
        assert!(problem.cause.is_final() && !problem.cause.is_crash());
        assert!(problem.message.starts_with("training diverged: the loss is 1e9. The job is not retried"));
        assert_eq!((crash(&[], &view), bad_input(&[], &view), diverged(&SILENT)), (None, None, None));
    }

    #[test]
    fn a_crash_names_the_memory_limit_to_raise() {
        let killed = PodFacts { ended: ended(137, true, ""), ..pod("j-ps-1", Role::Ps) };
        let other = PodFacts { ended: ended(1, false, "peer gone"), ..pod("j-dense-worker-0", Role::DenseWorker) };
        let problem = crash(&[&other, &killed], &failed("ps 1 is gone", false)).expect("a crash");
        assert_eq!(problem.cause, Cause::OutOfMemory);
        assert!(
            problem.message.contains("j-ps-1")
                && problem.message.contains("spec.roles.ps.template.resources.limits.memory")
        );
        assert_eq!(crash(&[&other], &failed("ps 1 is gone", false)), Some(Problem::new(Cause::Crash, "ps 1 is gone")));
        // Its rows outlive it: the kernel would kill the next container, too.
        assert_eq!(crash(&[&killed], &SILENT).map(|problem| problem.cause), Some(Cause::OutOfMemory));
        let worker = PodFacts { role: Role::EmbeddingWorker, ..killed };
        assert_eq!(crash(&[&worker], &SILENT), None, "a replacement joins");
    }

    #[test]
    fn a_waiting_pod_names_the_setting_to_change() {
        let waiting_for = |reason: &str| PodFacts {
            waiting: Some((reason.to_owned(), "secret \"s3\" not found".to_owned())),
            ..pod("j-loader-0", Role::Loader)
        };
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let cause = |pod: &PodFacts| waiting(&[pod], now).map(|problem| problem.cause);
        assert_eq!(cause(&waiting_for("ImagePullBackOff")), Some(Cause::ImagePull));
        assert_eq!(cause(&waiting_for("CreateContainerConfigError")), Some(Cause::ContainerConfig));
        assert_eq!(cause(&waiting_for("ContainerCreating")), None);
        assert_eq!(cause(&waiting_for("CrashLoopBackOff")), None);
        let homeless = PodFacts {
            unschedulable: Some("0/2 nodes are available".to_owned()),
            ..pod("j-dense-worker-0", Role::DenseWorker)
        };
        let problem = waiting(&[&homeless], now).expect("a problem");
        assert!(problem.cause == Cause::Unschedulable && problem.message.contains("spec.roles.denseWorker.template"));
        // An autoscaler may add a node, for a while.
        for (minutes, may_pass) in [(14, true), (15, false)] {
            let since = Some(now - SignedDuration::from_mins(minutes));
            let homeless = PodFacts { unschedulable_since: since, ..homeless.clone() };
            assert_eq!(waiting(&[&homeless], now).map(|problem| problem.may_pass), Some(may_pass));
        }
    }

    #[test]
    fn a_failed_pull_names_the_secrets_of_the_pod() {
        let waiting_for = |pull_secrets: &[&str]| PodFacts {
            waiting: Some(("ImagePullBackOff".to_owned(), "401 Unauthorized".to_owned())),
            pull_secrets: pull_secrets.iter().map(|&name| name.to_owned()).collect(),
            ..pod("j-ps-2", Role::Ps)
        };
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let message = |pod: &PodFacts| waiting(&[pod], now).map(|problem| problem.message).unwrap_or_default();
        let with = message(&waiting_for(&["regcred", "mirror"]));
        assert!(with.contains("j-ps-2") && with.contains("pulls with (regcred, mirror)"), "{with}");
        assert!(!message(&waiting_for(&[])).contains("the Secrets"));
    }

    #[test]
    fn a_stuck_pod_is_named_with_the_reason() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let by = |seconds: i64| PodFacts {
            terminates_by: Some(now - SignedDuration::from_secs(seconds)),
            node: Some("node1".to_owned()),
            ..pod("j-ps-0", Role::Ps)
        };
        assert_eq!(stuck(&[&by(59), &pod("j-ps-1", Role::Ps)], now), None, "its node may still confirm it");
        let hung = stuck(&[&by(60)], now).expect("it is stuck");
        assert!(hung.cause == Cause::PodStuck && hung.message.contains("node node1"), "{}", hung.message);
        let held = PodFacts { finalizers: vec!["example.com/audit".to_owned()], ..by(60) };
        let held = stuck(&[&held], now).expect("it is stuck").message;
        assert!(held.contains("j-ps-0") && held.contains("example.com/audit") && !held.contains("--force"), "{held}");
    }

    #[test]
    fn messages_fit_into_conditions_and_events() {
        let problem = Problem::new(Cause::Crash, "ä".repeat(5000));
        assert!(problem.message.len() < 2048);
    }

    #[test]
    fn every_cause_has_a_page() {
        let pages = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operations/failures");
        for cause in Cause::ALL {
            let page = pages.join(format!("{}.md", cause.reason()));
            assert!(page.is_file(), "{} is missing", page.display());
        }
    }
}
