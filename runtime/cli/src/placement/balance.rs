//! How evenly parameter servers share look-ups, by placement. Pure.

use rectrain_modes::migration::SlotMap;
use rectrain_modes::packing::{Packing, least_load, pack};
use serde::Serialize;

use super::costs::Costs;

/// The rows that were read.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Read {
    pub(super) rows: u64,
    /// Whether they are all training rows.
    pub(super) is_all: bool,
    /// The most rows of a piece.
    pub(super) piece_rows: u64,
}

/// The figures of the command.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    pub(super) job: String,
    pub(super) read: Read,
    pub(super) pieces: u64,
    pub(super) features: Vec<FeatureCost>,
    pub(super) placements: Vec<Balance>,
}

/// The look-ups of a feature in all pieces.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FeatureCost {
    pub(super) name: String,
    pub(super) look_ups: u64,
    pub(super) bytes: u64,
    /// Its share of the bytes of all features.
    pub(super) share: f64,
}

/// The cost of the busiest server over the mean, by placement. 1 is even.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Balance {
    pub(super) servers: u16,
    /// Field f on server f mod N (Rong et al. 2020, section 5).
    pub(super) fields_modulo: f64,
    pub(super) fields_balanced: f64,
    /// No placement of whole fields is below it.
    pub(super) fields_at_best: f64,
    /// Equal runs of slots, as a job starts.
    pub(super) slots_even: f64,
    pub(super) slots_balanced: f64,
    /// By server: the fields of the balanced placement.
    pub(super) fields: Vec<Vec<String>>,
}

/// The look-ups that decide placements, and those that measure them.
pub(super) struct Halves {
    pub(super) deciding: Costs,
    pub(super) measuring: Costs,
}

impl Report {
    /// The figures of the features of these names, for these numbers of servers.
    pub(super) fn new(job: String, read: Read, names: &[String], halves: &Halves, servers: &[u16]) -> Self {
        Self {
            job,
            read,
            pieces: halves.deciding.pieces + halves.measuring.pieces,
            features: feature_costs(names, halves),
            placements: servers.iter().map(|servers| Balance::new(*servers, names, halves)).collect(),
        }
    }
}

fn feature_costs(names: &[String], halves: &Halves) -> Vec<FeatureCost> {
    let Halves { deciding, measuring } = halves;
    let sum = |of: fn(&Costs) -> &[u64], at: usize| -> u64 {
        [deciding, measuring].into_iter().filter_map(|costs| of(costs).get(at)).sum()
    };
    let all: u64 = [deciding, measuring].iter().flat_map(|costs| &costs.features).sum();
    let of_feature = |(at, name): (usize, &String)| {
        let bytes = sum(|costs| &costs.features, at);
        let share = bytes as f64 / all.max(1) as f64;
        FeatureCost { name: name.clone(), look_ups: sum(|costs| &costs.look_ups, at), bytes, share }
    };
    names.iter().enumerate().map(of_feature).collect()
}

impl Balance {
    fn new(servers: u16, names: &[String], halves: &Halves) -> Self {
        let bins = usize::from(servers);
        let deciding = &halves.deciding;
        // With a single piece, nothing else can measure.
        let measuring = if halves.measuring.pieces == 0 { deciding } else { &halves.measuring };
        let fields = pack(&deciding.features, bins);
        let measured =
            |packing: &Packing, costs: &[u64]| Packing::new(costs, packing.bins().to_vec(), bins).imbalance();
        Self {
            servers,
            fields_modulo: Packing::modulo(&measuring.features, bins).imbalance(),
            fields_balanced: measured(&fields, &measuring.features),
            fields_at_best: at_best(&measuring.features, bins),
            slots_even: even(&measuring.slots, servers).imbalance(),
            slots_balanced: measured(&pack(&deciding.slots, bins), &measuring.slots),
            fields: fields_by_server(&fields, names),
        }
    }
}

/// The lowest load that the fullest server can have, over the mean.
fn at_best(costs: &[u64], bins: usize) -> f64 {
    let total: u64 = costs.iter().sum();
    if total == 0 { 1.0 } else { least_load(costs, bins) as f64 * bins as f64 / total as f64 }
}

/// The slots as a job starts.
fn even(slots: &[u64], servers: u16) -> Packing {
    let map = SlotMap::even(slots.len() as u32, servers);
    Packing::new(slots, map.owners().iter().map(|owner| usize::from(*owner)).collect(), usize::from(servers))
}

fn fields_by_server(packing: &Packing, names: &[String]) -> Vec<Vec<String>> {
    let mut fields = vec![Vec::new(); packing.loads().len()];
    for (name, bin) in names.iter().zip(packing.bins()) {
        fields[*bin].push(name.clone());
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(count: usize) -> Vec<String> {
        (0..count).map(|at| format!("f{at}")).collect()
    }

    fn costs(features: &[u64], slots: &[u64]) -> Costs {
        Costs { pieces: 1, look_ups: features.to_vec(), features: features.to_vec(), slots: slots.to_vec() }
    }

    fn read() -> Read {
        Read { rows: 10, is_all: true, piece_rows: 5 }
    }

    #[test]
    fn placements_are_decided_by_one_half_and_measured_by_the_other() {
        let halves =
            Halves { deciding: costs(&[9, 1, 8, 2], &[1, 1, 1, 1]), measuring: costs(&[6, 2, 6, 2], &[4, 0, 2, 2]) };
        let report = Report::new("job".to_owned(), read(), &names(4), &halves, &[2]);
        let [balance] = &*report.placements else { panic!("one number of servers") };
        // By the other half: 9 + 1 and 8 + 2, which are 6 + 2 and 6 + 2. By f mod N: 12 and 4.
        assert_eq!(balance.fields, [["f0", "f1"], ["f2", "f3"]]);
        let is = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-12, "{found}, not {expected}");
        is(balance.fields_modulo, 1.5);
        is(balance.fields_balanced, 1.0);
        is(balance.fields_at_best, 1.0);
        is(balance.slots_even, 1.0);
        // Equal costs alternate between the servers: 4 + 2 and 0 + 2.
        is(balance.slots_balanced, 1.5);
        assert_eq!((report.pieces, report.features[0].bytes, report.features[0].look_ups), (2, 15, 15));
        is(report.features[0].share, 15.0 / 36.0);
    }

    #[test]
    fn a_single_piece_decides_and_measures() {
        let halves = Halves { deciding: costs(&[5, 3, 2], &[3, 3]), measuring: Costs::new(3, 2) };
        let report = Report::new("job".to_owned(), read(), &names(3), &halves, &[2, 5]);
        assert_eq!(report.placements.iter().map(|balance| balance.servers).collect::<Vec<_>>(), [2, 5]);
        assert!((report.placements[0].fields_balanced - 1.0).abs() < 1e-12);
        // Of five servers, one has half of the cost.
        assert!((report.placements[1].fields_at_best - 2.5).abs() < 1e-12);
        assert_eq!(report.placements[1].fields.len(), 5);
    }
}
