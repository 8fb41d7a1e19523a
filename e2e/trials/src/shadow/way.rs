//! The ways to train that the tables compare.

/// An algorithm of `shadow`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    Easgd,
    Ma,
    Bmuf,
}

pub(super) const ALGORITHMS: [Algorithm; 3] = [Algorithm::Easgd, Algorithm::Ma, Algorithm::Bmuf];
/// k of the foreground forms whose speed is measured: the smallest one of the paper.
pub(super) const FASTEST_GAP: u64 = 5;

/// A way to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// S-*: exchanges beside training.
    Background(Algorithm),
    /// FR-*-k: training waits for an exchange after k batches of a worker.
    Foreground(Algorithm, u64),
    Sync,
}

impl Algorithm {
    fn name(self) -> &'static str {
        match self {
            Self::Easgd => "easgd",
            Self::Ma => "ma",
            Self::Bmuf => "bmuf",
        }
    }
}

impl Way {
    /// The background and foreground form of each algorithm, with these k, and `sync`.
    pub(super) fn all(gaps: &[u64]) -> Vec<Self> {
        let background = ALGORITHMS.map(Self::Background);
        let foreground = ALGORITHMS.into_iter().flat_map(|of| gaps.iter().map(move |gap| Self::Foreground(of, *gap)));
        background.into_iter().chain(foreground).chain([Self::Sync]).collect()
    }

    /// The paper's name.
    pub(super) fn name(self) -> String {
        match self {
            Self::Background(of) => format!("S-{}", of.name().to_uppercase()),
            Self::Foreground(of, gap) => format!("FR-{}-{gap}", of.name().to_uppercase()),
            Self::Sync => "sync".to_owned(),
        }
    }

    /// The overrides that select it.
    pub(super) fn sets(self) -> Vec<String> {
        let shadow = |of: Algorithm| {
            vec!["spec.training.mode=shadow".to_owned(), format!("spec.training.shadow.algorithm={}", of.name())]
        };
        match self {
            Self::Background(of) => shadow(of),
            Self::Foreground(of, gap) => {
                let mut sets = shadow(of);
                sets.push(format!("spec.training.shadow.everySteps={gap}"));
                sets
            }
            Self::Sync => vec!["spec.training.mode=sync".to_owned()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_algorithm_has_its_background_and_foreground_forms() {
        let names: Vec<String> = Way::all(&[5, 30]).into_iter().map(Way::name).collect();
        assert_eq!(
            names.join(" "),
            "S-EASGD S-MA S-BMUF FR-EASGD-5 FR-EASGD-30 FR-MA-5 FR-MA-30 FR-BMUF-5 FR-BMUF-30 sync"
        );
    }

    #[test]
    fn only_the_foreground_form_sets_its_gap() {
        let background = ["spec.training.mode=shadow", "spec.training.shadow.algorithm=ma"];
        assert_eq!(Way::Background(Algorithm::Ma).sets(), background);
        let foreground = Way::Foreground(Algorithm::Ma, 30).sets();
        assert_eq!(foreground[..2], background);
        assert_eq!(foreground[2..], ["spec.training.shadow.everySteps=30"]);
        assert_eq!(Way::Sync.sets(), ["spec.training.mode=sync"]);
    }
}
