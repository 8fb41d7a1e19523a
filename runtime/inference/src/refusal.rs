//! The reasons for which a request gets no predictions.

use std::time::Duration;

use axum::http::StatusCode;

/// A request without predictions. The message goes to the client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// The request is wrong. It names the column and the row.
    #[error("{0}")]
    Bad(String),
    /// There is no such model or version.
    #[error("{0}")]
    NotFound(String),
    /// The request is too large.
    #[error("{0}")]
    TooLarge(String),
    /// The server has too much work.
    #[error("the server is overloaded: {0}; repeat the request later")]
    Shed(Shed),
    /// The request's time has passed.
    #[error("the request was not answered within its time limit of {} ms", .0.as_millis())]
    Late(Duration),
    /// The model failed.
    #[error("the model failed: {0}")]
    Failed(String),
    /// Rows that the request needs cannot be read at present.
    #[error("{0}; repeat the request later")]
    Unavailable(String),
    /// The server ends.
    #[error("the server ends; repeat the request at another replica")]
    Ending,
}

/// The bound beyond which a request is shed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Shed {
    /// Requests in progress.
    #[error("{0} requests are in progress")]
    Requests(usize),
    /// Rows that wait for the model.
    #[error("{0} rows wait")]
    Rows(usize),
}

impl Shed {
    /// The label of metrics.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Requests(_) => "requests",
            Self::Rows(_) => "rows",
        }
    }
}

impl Refusal {
    /// The status of the response.
    pub(crate) const fn status(&self) -> StatusCode {
        match self {
            Self::Bad(_) => StatusCode::BAD_REQUEST,
            Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Shed(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Late(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unavailable(_) | Self::Ending => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Whether the same request may succeed later.
    pub(crate) const fn may_retry(&self) -> bool {
        matches!(self, Self::Shed(_) | Self::Unavailable(_) | Self::Ending)
    }
}
