//! Why a job does not train: one [`Problem`] with a cause of a fixed list and a message that says what to do. Pure: pods and the
//! coordinator's answer go in, a problem comes out. docs/operations/failures has a page for every cause.

use jiff::{SignedDuration, Timestamp};
use rectrain_crds::Mode;

use crate::coordinator::CoordinatorView;
use crate::names::Role;
use crate::pods::{Ended, PodFacts};

/// For so long a node may be on its way for a pod that none takes, as long as the autoscaler of clusters waits for one.
const NODES_COME: SignedDuration = SignedDuration::from_mins(15);

/// Exit code of a role that found the manifest or the data wrong.
const BAD_INPUT: i32 = 2;

/// What went wrong. The names are the reasons of conditions and events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The manifest contradicts itself.
    InvalidSpec,
    /// The manifest or the data cannot be trained on. Never retried.
    BadInput,
    /// A role ended by itself or was ended.
    Crash,
    /// A role used up its memory.
    OutOfMemory,
    /// No step was completed for `spec.faultTolerance.stallSeconds`.
    NoProgress,
    /// More crashes than `spec.faultTolerance.maxRestarts`.
    RestartsExhausted,
    /// `spec.activeDeadlineSeconds` is over.
    DeadlineExceeded,
    /// A node cannot get the image.
    ImagePull,
    /// No node takes a pod.
    Unschedulable,
    /// A Secret, ConfigMap or volume that a pod wants is not there.
    ContainerConfig,
    /// The cluster does not make a pod: a quota, a limit, an account that is not there.
    PodsRefused,
    /// The API server refuses an object of the job.
    ObjectRefused,
    /// Something that is not the job's has a name that the job needs.
    NameConflict,
    /// The training mode that a job under way is asked for cannot be.
    ModeRefused,
}

impl Cause {
    /// All of them.
    pub const ALL: [Self; 14] = [
        Self::InvalidSpec,
        Self::BadInput,
        Self::Crash,
        Self::OutOfMemory,
        Self::NoProgress,
        Self::RestartsExhausted,
        Self::DeadlineExceeded,
        Self::ImagePull,
        Self::Unschedulable,
        Self::ContainerConfig,
        Self::PodsRefused,
        Self::ObjectRefused,
        Self::NameConflict,
        Self::ModeRefused,
    ];

    /// Whether it is recovered from by another attempt.
    #[must_use]
    pub fn is_crash(self) -> bool {
        matches!(self, Self::Crash | Self::OutOfMemory | Self::NoProgress)
    }

    /// As a condition's reason.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::InvalidSpec => "InvalidSpec",
            Self::BadInput => "BadInput",
            Self::Crash => "Crash",
            Self::OutOfMemory => "OutOfMemory",
            Self::NoProgress => "NoProgress",
            Self::RestartsExhausted => "RestartsExhausted",
            Self::DeadlineExceeded => "DeadlineExceeded",
            Self::ImagePull => "ImagePullFailed",
            Self::Unschedulable => "Unschedulable",
            Self::ContainerConfig => "ContainerConfigError",
            Self::PodsRefused => "PodsRefused",
            Self::ObjectRefused => "ObjectRefused",
            Self::NameConflict => "NameConflict",
            Self::ModeRefused => "ModeRefused",
        }
    }
}

/// Something that keeps a job from training, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What it is.
    pub cause: Cause,
    /// What happened, where, and what to do: one or two sentences.
    pub message: String,
    /// Whether it may well pass without anybody's doing: nobody is called for it yet.
    pub may_pass: bool,
}

impl Problem {
    /// With a message of at most 2,000 bytes, which conditions and events can hold.
    #[must_use]
    pub fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self { cause, message: shorten(&message.into(), 2000), may_pass: false }
    }
}

/// The job cannot be trained on this input, whoever says so first.
#[must_use]
pub fn bad_input(pods: &[&PodFacts], coordinator: &CoordinatorView) -> Option<Problem> {
    let what = match coordinator {
        CoordinatorView::Failed { message, user_error: true } => message.clone(),
        _ => pods.iter().find_map(|pod| {
            let ended = pod.ended.as_ref().filter(|ended| ended.exit_code == BAD_INPUT)?;
            Some(format!("{}: {}", pod.name, last_words(ended)))
        })?,
    };
    Some(Problem::new(
        Cause::BadInput,
        format!(
            "{what}. It is not tried again: mend the manifest or the data, and apply the manifest again or make a new job"
        ),
    ))
}

/// The job has crashed and all roles have to start again. So it has, whatever the coordinator says, when a parameter server has used up its
/// memory: its rows outlive it, and the next container would be killed for them too.
#[must_use]
pub fn crash(pods: &[&PodFacts], coordinator: &CoordinatorView) -> Option<Problem> {
    let servers: Vec<&PodFacts> = pods.iter().copied().filter(|pod| pod.role == Role::Ps).collect();
    if let Some(problem) = out_of_memory(&servers) {
        return Some(problem);
    }
    let CoordinatorView::Failed { message, user_error: false } = coordinator else { return None };
    Some(out_of_memory(pods).unwrap_or_else(|| Problem::new(Cause::Crash, crash_message(pods, message))))
}

/// How the last container ended that has ended, for a job that has used up its restarts.
#[must_use]
pub fn last_crash(pods: &[&PodFacts]) -> Option<Problem> {
    out_of_memory(pods).or_else(|| {
        let (pod, ended) = last_ended(pods)?;
        Some(Problem::new(
            Cause::Crash,
            format!("{} ended with exit code {}: {}", pod.name, ended.exit_code, last_words(ended)),
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
        other => (other.field(), ""),
    };
    Some(Problem::new(
        Cause::OutOfMemory,
        format!(
            "{} used up its memory and was killed: raise spec.roles.{role}.template.resources.limits.memory{more}",
            pod.name
        ),
    ))
}

fn last_ended<'a>(pods: &[&'a PodFacts]) -> Option<(&'a PodFacts, &'a Ended)> {
    let ended = pods.iter().filter_map(|pod| Some((*pod, pod.ended.as_ref()?)));
    ended.max_by_key(|(_, ended)| ended.at)
}

fn last_words(ended: &Ended) -> String {
    let last = ended.message.lines().rev().map(str::trim).find(|line| !line.is_empty());
    last.map_or_else(|| "it left no message".to_owned(), |line| line.trim_end_matches('.').to_owned())
}

/// The job trains on in the mode `present`, because the one that its manifest asks for was refused.
#[must_use]
pub fn mode_refused(wanted: Mode, present: Mode, why: &str) -> Problem {
    Problem::new(
        Cause::ModeRefused,
        format!(
            "mode {wanted} cannot be: {}. Training goes on in mode {present}: set spec.training.mode to another one, or mend what it needs",
            why.trim_end_matches('.')
        ),
    )
}

/// What a pod waits for that only somebody outside can give; one that no node takes perhaps a cluster's autoscaler, who has its time for that.
#[must_use]
pub fn waiting(pods: &[&PodFacts], now: Timestamp) -> Option<Problem> {
    pods.iter().find_map(|pod| {
        let role = pod.role.field();
        if let Some(why) = &pod.unschedulable {
            let message = format!("no node takes {}: {why}. Add nodes (a cluster that does so by itself takes some minutes), or change spec.roles.{role}.template (resources, nodeSelector, tolerations, affinity)", pod.name);
            let may_pass = pod.unschedulable_since.is_some_and(|since| now.duration_since(since) < NODES_COME);
            return Some(Problem { may_pass, ..Problem::new(Cause::Unschedulable, message) });
        }
        let (reason, message) = pod.waiting.as_ref()?;
        match reason.as_str() {
            "ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull" | "RegistryUnavailable" => Some(Problem::new(
                Cause::ImagePull,
                format!("{} cannot get its image: {message}. Check the chart's runtimeImage.repository, .tag and .pullSecrets, and that nodes reach the registry", pod.name),
            )),
            "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => Some(Problem::new(
                Cause::ContainerConfig,
                format!("the container of {} cannot be made: {message}. Check the Secret of spec.data.storage.secretName and what spec.roles.{role}.template names", pod.name),
            )),
            _ => None,
        }
    })
}

/// At most about so many bytes of a text.
pub(crate) fn shorten(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    let end = (0..=bytes).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    format!("{} …", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, role: Role) -> PodFacts {
        PodFacts {
            name: name.to_owned(),
            uid: "uid".to_owned(),
            role,
            attempt: 1,
            job_uid: None,
            is_leaving: false,
            gone_by: None,
            is_ready: false,
            ip: None,
            node: None,
            requested_millicores: 0,
            is_running: false,
            restarts: 0,
            unschedulable: None,
            unschedulable_since: None,
            waiting: None,
            ended: None,
            evicted: None,
            put_out: None,
        }
    }

    fn ended(exit_code: i32, out_of_memory: bool, message: &str) -> Option<Ended> {
        Some(Ended { exit_code, out_of_memory, message: message.to_owned(), at: None })
    }

    const SILENT: CoordinatorView = CoordinatorView::Silent;

    fn failed(message: &str, user_error: bool) -> CoordinatorView {
        CoordinatorView::Failed { message: message.to_owned(), user_error }
    }

    #[test]
    fn bad_input_is_what_the_coordinator_or_an_exit_code_of_2_says_and_nothing_else() {
        let told = bad_input(&[], &failed("train.csv:7: the label is `x`", true)).expect("bad input");
        assert!(
            told.cause == Cause::BadInput
                && told.message.starts_with("train.csv:7: the label is `x`. It is not tried again")
        );
        let exited = PodFacts {
            ended: ended(2, false, "starting\nrectrain: no such file.\n"),
            ..pod("j-loader-0", Role::Loader)
        };
        let told = bad_input(&[&exited], &SILENT).expect("bad input");
        assert!(told.message.starts_with("j-loader-0: rectrain: no such file. It"), "{}", told.message);
        for code in [0, 1, 101, 137, 143] {
            let crashed = PodFacts { ended: ended(code, false, ""), ..pod("j-ps-0", Role::Ps) };
            assert_eq!(bad_input(&[&crashed], &failed("a member is gone", false)), None);
        }
    }

    #[test]
    fn a_crash_names_the_memory_that_was_too_small() {
        let killed = PodFacts { ended: ended(137, true, ""), ..pod("j-ps-1", Role::Ps) };
        let other = PodFacts { ended: ended(1, false, "peer gone"), ..pod("j-dense-worker-0", Role::DenseWorker) };
        let problem = crash(&[&other, &killed], &failed("ps 1 is gone", false)).expect("a crash");
        assert_eq!(problem.cause, Cause::OutOfMemory);
        assert!(
            problem.message.contains("j-ps-1")
                && problem.message.contains("spec.roles.ps.template.resources.limits.memory")
        );
        assert_eq!(crash(&[&other], &failed("ps 1 is gone", false)), Some(Problem::new(Cause::Crash, "ps 1 is gone")));
        // Its rows outlive it: the next container would be killed for them too.
        assert_eq!(crash(&[&killed], &SILENT).map(|problem| problem.cause), Some(Cause::OutOfMemory));
        let worker = PodFacts { role: Role::EmbeddingWorker, ..killed };
        assert_eq!(crash(&[&worker], &SILENT), None, "another takes its place");
    }

    #[test]
    fn what_a_pod_waits_for_says_what_to_change() {
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
        // A node may be on its way, for a while.
        for (minutes, may_pass) in [(14, true), (15, false)] {
            let since = Some(now - SignedDuration::from_mins(minutes));
            let homeless = PodFacts { unschedulable_since: since, ..homeless.clone() };
            assert_eq!(waiting(&[&homeless], now).map(|problem| problem.may_pass), Some(may_pass));
        }
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
