//! How the mode `shadow` synchronises replicas.

named! {
    /// The algorithms of the mode `shadow`.
    #[derive(Default)]
    pub enum ShadowAlgorithm as "algorithm of shadow" {
        /// Elastic averaging (ShadowSync, algorithm 2). Each dense worker exchanges its replica
        /// with the copy on the parameter servers, and with no other worker. The copy moves towards
        /// the replica by `alpha` of their difference, and the replica then moves towards the copy.
        #[default]
        Easgd = "easgd",
        /// Model averaging (ShadowSync, algorithm 3). The parameter servers collect the replicas of
        /// all dense workers in rounds. The copy becomes their mean, and each replica moves towards
        /// the copy by `alpha` of their difference. A worker that is late does not stop the others.
        Ma = "ma",
        /// Blockwise model-update filtering (ShadowSync, algorithm 4). As `ma`, but the copy only
        /// makes a step of `eta` towards the mean. With `momentum`, the steps before also count.
        Bmuf = "bmuf",
    }
}

named! {
    /// How values travel in an exchange of the mode `shadow`.
    #[derive(Default)]
    pub enum WirePrecision as "precision of exchanges" {
        /// As 32-bit floating point: exact.
        #[default]
        Fp32 = "fp32",
        /// As differences from values that both ends know, rounded to bfloat16: half the bytes. The
        /// error is at most 1/256 of the difference. The next difference contains it, so errors do
        /// not add up. Each parameter server needs memory for one more replica of each dense
        /// worker.
        Bf16 = "bf16",
    }
}

named! {
    /// The model that training in the mode `shadow` results in. Evaluations, checkpoints and other
    /// modes take it.
    #[derive(Default)]
    pub enum OutputModel as "output model" {
        /// The copy on the parameter servers. It has seen the replicas of all dense workers.
        #[default]
        Copy = "copy",
        /// The mean of the replicas. At a pause of training, the copy becomes this mean.
        Mean = "mean",
        /// The replica of dense worker 0, as in the paper (ShadowSync §4). At a pause of training,
        /// the copy becomes this replica.
        First = "first",
    }
}
