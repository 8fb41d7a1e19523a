//! Failures of the harness. A failing CI run shows nothing but these messages, so each names the
//! step, the object, and the cause.

use std::fmt::Display;
use std::process::ExitStatus;
use std::time::Duration;

/// Any error that a waiting or a parallel step may report.
pub type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Why a step of the harness failed.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    /// The operating system refused an operation on a file, folder or socket.
    #[error("cannot {action} {subject}: {source}")]
    Io {
        /// The operation.
        action: &'static str,
        /// The file, folder or address.
        subject: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A program did not start.
    #[error("cannot run {command}: {source}; {hint}")]
    NotStarted {
        /// The command line.
        command: String,
        /// What to install or check.
        hint: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// A program ran and failed.
    #[error("{command} failed ({status}): {output}")]
    Failed {
        /// The command line.
        command: String,
        /// The exit status.
        status: ExitStatus,
        /// Its output, or where to look for it.
        output: String,
    },
    /// A child process was started without the pipe that the harness reads.
    #[error("{program} was started without a pipe for its {stream}")]
    NoPipe {
        /// The program.
        program: &'static str,
        /// `output` or `log`.
        stream: &'static str,
    },
    /// A text is not JSON.
    #[error("{subject} is not JSON ({source}): {text:?}")]
    Json {
        /// The origin of the text.
        subject: String,
        /// The text.
        text: String,
        /// The position and kind of the fault.
        source: serde_json::Error,
    },
    /// A JSON document lacks a field, or the field has another type.
    #[error("{document} has no {field}: {found}")]
    NoField {
        /// The document.
        document: String,
        /// The expected field.
        field: String,
        /// The document's text.
        found: String,
    },
    /// A process printed no line where one is expected.
    #[error("{program} printed nothing; expected {expected}")]
    NoOutput {
        /// The program.
        program: &'static str,
        /// The expected line.
        expected: &'static str,
    },
    /// A state that a caller polls for has not been reached.
    #[error("{0}")]
    NotYet(String),
    /// A state was not reached in time.
    #[error("waited {} s for {awaited}; the last look: {last}", .patience.as_secs())]
    TimedOut {
        /// The state.
        awaited: String,
        /// The time limit.
        patience: Duration,
        /// The failure of the last attempt.
        #[source]
        last: AnyError,
    },
    /// Some of the steps that ran in parallel failed.
    #[error("{}", one_line(.0))]
    InParallel(Vec<AnyError>),
    /// A step that ran in parallel panicked.
    #[error("a parallel step panicked; its message is above")]
    Panicked,
    /// Something was skipped where nothing may be.
    #[error("{part} would be skipped, which CI=true forbids: {reason}")]
    Skipped {
        /// The skipped part.
        part: String,
        /// Why it cannot run here.
        reason: String,
    },
    /// The arguments are wrong; the text is the usage of the command.
    #[error("{0}")]
    Usage(&'static str),
    /// No folder for the cache.
    #[error("neither XDG_CACHE_HOME nor HOME is set, so there is no folder for the cache: set one of them")]
    NoCache,
    /// No process on this machine belongs to a pod.
    #[error("{pod} has no process on this machine")]
    NoProcess {
        /// The pod.
        pod: String,
    },
}

impl HarnessError {
    /// Turns a system error into [`HarnessError::Io`], for `map_err`.
    pub fn io(action: &'static str, subject: impl Display) -> impl FnOnce(std::io::Error) -> Self {
        let subject = subject.to_string();
        move |source| Self::Io { action, subject, source }
    }

    /// Turns a parser's error into [`HarnessError::Json`], for `map_err`.
    pub fn json(subject: impl Display, text: &str) -> impl FnOnce(serde_json::Error) -> Self {
        let (subject, text) = (subject.to_string(), text.to_owned());
        move |source| Self::Json { subject, text, source }
    }
}

/// A polled state that has not been reached; `found` describes the present one.
pub fn not_yet(found: impl Display) -> HarnessError {
    HarnessError::NotYet(found.to_string())
}

fn one_line(errors: &[AnyError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
