//! The ids of the training rows: how many each feature has, and how long they stay away.

use std::collections::HashMap;

/// One id in this many gives its times. Kraken §V-C samples 10 % of the data.
const SAMPLE: usize = 10;

/// A column of ids.
#[derive(Clone, Copy)]
pub(super) struct Column {
    pub(super) name: &'static str,
    /// Its place in a row, from 0.
    pub(super) place: usize,
    /// Whether Fig. 10 gives it high priority.
    pub(super) is_important: bool,
}

/// How the rows of a text are divided into cells.
#[derive(Clone, Copy)]
pub(super) struct Cells<'a> {
    pub(super) delimiter: char,
    pub(super) columns: &'a [Column],
    /// The place of the column of times in seconds, if there is one.
    pub(super) time: Option<usize>,
}

/// The ids of all features.
#[derive(Debug, PartialEq)]
pub(super) struct Profile {
    /// In the order of the manifest's sparse features.
    pub(super) features: Vec<Feature>,
}

/// The ids of a feature.
#[derive(Debug, PartialEq)]
pub(super) struct Feature {
    /// Distinct ids. A missing value counts as one.
    pub(super) ids: u64,
    /// The 99.9 percentile of the seconds between two rows with the same id. `None` without times.
    pub(super) expire_after: Option<u64>,
    /// See [`Column::is_important`].
    pub(super) is_important: bool,
}

/// The rows with the ids of one feature so far.
#[derive(Default)]
struct Sightings<'r> {
    last: HashMap<&'r str, Sighting>,
    gaps: Vec<u64>,
}

struct Sighting {
    /// The number of the id, in the order of the first sightings.
    number: usize,
    time: Option<u64>,
}

impl Profile {
    /// The profile of these rows, which are in the order of time.
    pub(super) fn of<'r>(cells: Cells<'_>, rows: impl Iterator<Item = &'r str>) -> Self {
        let mut sightings: Vec<Sightings<'r>> = cells.columns.iter().map(|_| Sightings::default()).collect();
        for row in rows {
            let row: Vec<&str> = row.split(cells.delimiter).collect();
            let time = cells.time.and_then(|place| row.get(place)?.parse().ok());
            for (column, sightings) in cells.columns.iter().zip(&mut sightings) {
                sightings.see(row.get(column.place).copied().unwrap_or_default(), time);
            }
        }
        let features = cells.columns.iter().zip(sightings).map(|(column, sightings)| Feature {
            ids: sightings.last.len() as u64,
            expire_after: percentile(sightings.gaps),
            is_important: column.is_important,
        });
        Self { features: features.collect() }
    }

    /// The distinct ids of all features together.
    pub(super) fn ids(&self) -> u64 {
        self.features.iter().map(|feature| feature.ids).sum()
    }
}

impl<'r> Sightings<'r> {
    fn see(&mut self, id: &'r str, time: Option<u64>) {
        let number = self.last.len();
        let sighting = self.last.entry(id).or_insert(Sighting { number, time: None });
        if let (Some(earlier), Some(now)) = (sighting.time, time)
            && sighting.number.is_multiple_of(SAMPLE)
        {
            self.gaps.push(now.saturating_sub(earlier));
        }
        sighting.time = time;
    }
}

/// The 99.9 percentile, by the nearest rank.
fn percentile(mut gaps: Vec<u64>) -> Option<u64> {
    gaps.sort_unstable();
    let rank = (gaps.len() * 999).div_ceil(1_000);
    gaps.get(rank.checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 2] =
        [Column { name: "user", place: 0, is_important: false }, Column { name: "item", place: 2, is_important: true }];

    #[test]
    fn distinct_ids_and_the_times_between_them_are_counted() {
        let cells = Cells { delimiter: ',', columns: &COLUMNS, time: Some(1) };
        // The first user and the first item are in the sample.
        let rows = ["a,10,x", "b,11,x", "a,40,y", "b,99,", "a,45,x"];
        let profile = Profile::of(cells, rows.into_iter());
        assert_eq!(
            profile.features,
            [
                Feature { ids: 2, expire_after: Some(30), is_important: false },
                Feature { ids: 3, expire_after: Some(34), is_important: true },
            ]
        );
        assert_eq!(profile.ids(), 5);
    }

    #[test]
    fn without_a_column_of_times_no_id_expires() {
        let cells = Cells { delimiter: '\t', columns: &COLUMNS, time: None };
        let profile = Profile::of(cells, ["a\t10\tx", "a\t20\tx"].into_iter());
        assert!(profile.features.iter().all(|feature| feature.expire_after.is_none() && feature.ids == 1));
    }

    #[test]
    fn the_percentile_leaves_one_of_a_thousand_above_it() {
        assert_eq!(percentile((1..=1_000).rev().collect()), Some(999));
        assert_eq!(percentile((1..=2_000).collect()), Some(1_998));
        assert_eq!((percentile(vec![7]), percentile(Vec::new())), (Some(7), None));
    }
}
