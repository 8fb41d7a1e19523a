//! The failures of commands. Every command imports this module, and it imports no command.

use crate::output::{self, OutputError};

/// The failure of a command, with a message for the user.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The user's input is wrong: exit code 2.
    User(String),
    /// Training diverged: exit code 3. A retry would diverge again.
    Diverged(String),
    /// Anything else: exit code 1.
    Failed(String),
    /// SIGINT (Ctrl-C) or SIGTERM ended the command: exit code 130, the shells' code for SIGINT.
    Interrupted(String),
}

impl Failure {
    /// Whether a retry cannot help.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self, Self::User(_) | Self::Diverged(_))
    }

    /// The exit code of a command that ends with this failure.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::User(_) => USER,
            Self::Diverged(_) => DIVERGED,
            Self::Interrupted(_) => INTERRUPTED,
        }
    }

    /// The failure with a remedy at the end of its message.
    pub(crate) fn with_remedy(self, remedy: &str) -> Self {
        let add = |message: String| format!("{message}: {remedy}");
        match self {
            Self::User(message) => Self::User(add(message)),
            Self::Diverged(message) => Self::Diverged(add(message)),
            Self::Failed(message) => Self::Failed(add(message)),
            Self::Interrupted(message) => Self::Interrupted(add(message)),
        }
    }

    /// A failure to listen at the address of an option.
    pub(crate) fn cannot_listen(error: impl Into<Self>, option: &str) -> Self {
        error.into().with_remedy(&format!("choose another address with {option}"))
    }

    pub(crate) fn message(&self) -> &str {
        let (Self::User(message) | Self::Diverged(message) | Self::Failed(message) | Self::Interrupted(message)) = self;
        message
    }
}

impl From<rectrain_protocol::RoleError> for Failure {
    fn from(error: rectrain_protocol::RoleError) -> Self {
        let message = error.to_string();
        match (error.is_user_error(), error.divergence()) {
            (true, _) => Self::User(message),
            (false, Some(_)) => Self::Diverged(message),
            (false, None) => Self::Failed(message),
        }
    }
}

impl From<OutputError> for Failure {
    fn from(error: OutputError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<rectrain_serving::ServingError> for Failure {
    fn from(error: rectrain_serving::ServingError) -> Self {
        match error {
            rectrain_serving::ServingError::Checkpoint(error) => (*error).into(),
            error if error.is_users_input() => Self::User(error.to_string()),
            error => Self::Failed(error.to_string()),
        }
    }
}

impl From<rectrain_inference::InferenceError> for Failure {
    fn from(error: rectrain_inference::InferenceError) -> Self {
        use rectrain_inference::InferenceError;
        match error {
            InferenceError::Model(error) => error.into(),
            InferenceError::Data(error) if error.is_users_input() => Self::User(error.to_string()),
            InferenceError::Tls(_) | InferenceError::Recorded { .. } | InferenceError::File { .. } => {
                Self::User(error.to_string())
            }
            error => Self::Failed(error.to_string()),
        }
    }
}

impl From<rectrain_serving_ps::RowsServerError> for Failure {
    fn from(error: rectrain_serving_ps::RowsServerError) -> Self {
        match error {
            rectrain_serving_ps::RowsServerError::Model(error) => error.into(),
            error => Self::Failed(error.to_string()),
        }
    }
}

/// The exit code of a command whose input is wrong.
pub(crate) const USER: u8 = 2;
/// The exit code of a command whose training diverged.
pub(crate) const DIVERGED: u8 = 3;
/// The exit code of a command that a signal ended: the shells' code for SIGINT.
pub(crate) const INTERRUPTED: u8 = 130;

/// Ends a process in which a thread hangs, so that the process cannot end in order. Other processes
/// see it as killed.
pub(crate) fn abort(message: &str) -> ! {
    output::say(&format!("rectrain: {message}"));
    std::process::abort()
}

/// The asynchronous runtime of a command.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Failed(format!("cannot start the asynchronous runtime: {error}")))
}
