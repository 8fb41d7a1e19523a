//! Training modes.

named! {
    /// The training modes this version runs.
    #[derive(Default)]
    pub enum Mode as "training mode" {
        /// Fully synchronous. Each step looks up its rows, computes, averages the dense gradients
        /// over all dense workers (all-reduce) and applies both gradients before the next look-up.
        /// So no gradient is ever stale. For a given seed and data, every run trains the same model
        /// bit for bit. The number of parameter servers, embedding workers and threads makes no
        /// difference. It is as fast as its slowest worker.
        #[default]
        Sync = "sync",
        /// Persia's hybrid. The dense part is synchronous (all-reduce in each step). Embedding rows
        /// are looked up ahead of time, and their gradients are applied when they arrive. At most τ
        /// batches (`spec.training.hybrid.staleness`) are between look-up and update, so a row may
        /// miss the last τ updates. Look-ups, network and computation overlap, which makes it
        /// faster than `sync`. Runs are not repeatable bit for bit.
        Hybrid = "hybrid",
        /// Asynchronous. Dense parameters live on the parameter servers. Each dense worker pulls
        /// them, computes a local batch and pushes, and waits for no other worker. Every gradient
        /// is a step of its own. The fastest mode where workers are unequal. Staleness is not
        /// bounded, and hyper-parameters tuned for `sync` do not fit.
        Async = "async",
        /// Global-batch gradient aggregation (GBA). Like `async`, but gradients carry tokens and
        /// are applied M at a time, so that every step sees the global batch of `sync`. Gradients
        /// that are too stale (`spec.training.gba.staleness`) are left out. As fast as `async`,
        /// with the hyper-parameters of `sync`: training may switch between the two at any step.
        Gba = "gba",
        /// Bounded staleness, a baseline. Like `async`, but a dense worker waits while it is more
        /// than `spec.training.hopBs.bound` batches ahead of the slowest.
        HopBs = "hopBs",
        /// Backup workers, a baseline. A step takes the first gradients and drops the gradients of
        /// the slowest `spec.training.hopBw.backups` dense workers, whose batches are lost.
        HopBw = "hopBw",
        /// Asynchronous bulk synchronous parallel, a baseline. Like `async`, but
        /// `spec.training.bsp.aggregate` gradients, however stale, are applied as one step.
        Bsp = "bsp",
        /// Synchronisation in the shadow of training (ShadowSync). Each dense worker trains a
        /// replica of the dense parameters and waits for no other worker. Meanwhile it exchanges
        /// the replica with the copy on the parameter servers (`spec.training.shadow`). Rows are
        /// updated as in `async`. As fast as `async`, and faster where dense parameters are large.
        /// The trained model is the copy on the servers.
        Shadow = "shadow",
        /// Distributed equivalent substitution (DES). As `sync`, but parameter servers compute
        /// partial results of the layers whose weights they hold. The results travel instead of
        /// rows, and the gradient of their sum instead of gradients of rows. The trained model
        /// equals the model of `sync` within rounding. Not for the models `dlrm` and `dcnV2`.
        Des = "des",
    }
}

/// A family of modes. Modes of one family share an implementation and differ only in settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Every step waits for all dense workers, which hold the dense parameters themselves.
    Barrier,
    /// No dense worker waits for another. Parameter servers hold the dense parameters, and each
    /// gradient carries the token of its batch.
    Tokens,
    /// No dense worker waits for another. Each trains a replica of the dense parameters, and
    /// exchanges it with the copy on the parameter servers.
    Replicas,
}

impl Mode {
    /// The implementation that runs this mode.
    #[must_use]
    pub const fn family(self) -> Family {
        match self {
            Self::Sync | Self::Hybrid | Self::Des => Family::Barrier,
            Self::Async | Self::Gba | Self::HopBs | Self::HopBw | Self::Bsp => Family::Tokens,
            Self::Shadow => Family::Replicas,
        }
    }

    /// True if every step waits for all dense workers, which hold the dense parameters themselves.
    #[must_use]
    pub const fn has_barrier(self) -> bool {
        matches!(self.family(), Family::Barrier)
    }
}

named! {
    /// The divisor of the sum of a key's gradients in the mode `gba`.
    #[derive(Default)]
    pub enum KeyDivisor as "divisor of a key's gradients" {
        /// M, the number of local batches in a step, as for the dense parameters. This is the
        /// gradient of the mean loss over the global batch, which `sync` applies.
        #[default]
        Buffer = "buffer",
        /// The number of dense workers whose batches contain the key (algorithm 2 of the paper).
        /// Keys in the batches of few workers learn faster than in `sync`.
        Workers = "workers",
        /// The number of local batches that contain the key. It equals `workers` if each dense
        /// worker has one batch in the step. If a fast worker has several, a key in all of them
        /// keeps the scale that it has in `sync`.
        Batches = "batches",
    }
}

named! {
    /// Which dense worker computes a piece (a local batch) of a global batch in the mode `sync`.
    #[derive(Default)]
    pub enum SyncPieces as "division of a step" {
        /// Each dense worker computes an equal share of every global batch. A slow worker holds
        /// every step back.
        #[default]
        Fixed = "fixed",
        /// A dense worker that is free pulls the next piece, and a late piece is given to a second
        /// worker. A slow worker delays no step. The result depends neither on the number of dense
        /// workers nor on their speed. The parameter servers hold the dense parameters, and receive
        /// the dense gradients of each piece.
        Pulled = "pulled",
    }
}
