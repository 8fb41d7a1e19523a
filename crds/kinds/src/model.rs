//! Models.

named! {
    /// The kinds of model.
    pub enum ModelKind as "model" {
        /// Deep learning recommendation model (Naumov et al. 2019): a bottom MLP over the dense
        /// features, dot products of all pairs of vectors, and a top MLP. Needs the same dimension
        /// for every sparse feature.
        Dlrm = "dlrm",
        /// Factorization machine and MLP over the same embeddings, with their logits added (Guo et
        /// al. 2017). Needs the same dimension for every sparse feature.
        DeepFm = "deepfm",
        /// MLP over the concatenated embeddings and dense features: Persia's feed-forward network.
        Dnn = "dnn",
        /// Linear model and MLP side by side, with their logits added (Cheng et al. 2016).
        WideDeep = "wideDeep",
        /// Deep and cross network, version 2: explicit crosses of the features, and an MLP (Wang et
        /// al. 2021).
        DcnV2 = "dcnV2",
        /// Factorization machine of second order (Rendle 2010). Needs the same dimension for every
        /// sparse feature.
        Fm = "fm",
        /// Logistic regression: one weight per id and per dense feature, and no embeddings.
        Lr = "lr",
    }
}

named! {
    /// How `dcnV2` combines its cross layers and its MLP (Wang et al. 2021, figure 1).
    #[derive(Default)]
    pub enum CrossStructure as "structure of dcnV2" {
        /// Both see the features, and the output layer sees both.
        #[default]
        Parallel = "parallel",
        /// The MLP sees the output of the cross layers.
        Stacked = "stacked",
    }
}
