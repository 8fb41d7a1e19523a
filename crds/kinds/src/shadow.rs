//! Algorithms that synchronise the replicas of the mode `shadow`.

named! {
    /// The algorithms of the mode `shadow`.
    #[derive(Default)]
    pub enum ShadowAlgorithm as "algorithm of shadow" {
        /// Elastic averaging (ShadowSync, algorithm 2). Each dense worker exchanges its replica
        /// with the copy on the parameter servers, and with no other worker. The copy moves towards
        /// the replica by `alpha` of their difference, and the replica then moves towards the copy.
        #[default]
        Easgd = "easgd",
    }
}
