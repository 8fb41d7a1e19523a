//! Divisions of one memory over the hashed tables of several features. Kraken §V-B tries five and
//! takes the best one.

/// A feature has rows in proportion to its ids to the power of one of these. From first to last:
/// fewer rows for more ids, equal tables, two roots, and the same share of all ids.
pub(super) const EXPONENTS: [f64; 5] = [-0.5, 0.0, 0.5, 0.75, 1.0];

/// The most rows of a hashed table for each of its ids. Then few ids share a row, and the other
/// tables need the memory more.
const MOST_ROWS_AN_ID: u64 = 8;

/// Rows of the hashed table of each feature, at least 1 each. `ids` has the distinct ids of each
/// feature. The rows are `total` together, unless even the largest tables are fewer.
pub(super) fn divide(ids: &[u64], total: u64, exponent: f64) -> Vec<u64> {
    let tables: Vec<Table> = ids.iter().map(|&ids| Table::new(ids, exponent)).collect();
    let scale = scale_for(&tables, total);
    let exact: Vec<f64> = tables.iter().map(|table| table.rows(scale)).collect();
    let mut rows: Vec<u64> = exact.iter().map(|rows| rows.floor() as u64).collect();
    let mut order: Vec<usize> = (0..ids.len()).filter(|&table| exact[table] < tables[table].most).collect();
    order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
    let left = total.saturating_sub(rows.iter().sum());
    for &table in order.iter().cycle().take(left as usize) {
        rows[table] += 1;
    }
    rows
}

struct Table {
    weight: f64,
    most: f64,
}

impl Table {
    fn new(ids: u64, exponent: f64) -> Self {
        let ids = ids.max(1);
        Self { weight: (ids as f64).powf(exponent), most: (ids * MOST_ROWS_AN_ID) as f64 }
    }

    fn rows(&self, scale: f64) -> f64 {
        (self.weight * scale).clamp(1.0, self.most)
    }
}

/// The scale for which the tables have at most `total` rows together, by bisection.
fn scale_for(tables: &[Table], total: u64) -> f64 {
    let together = |scale: f64| tables.iter().map(|table| table.rows(scale)).sum::<f64>();
    // For this scale, every table has its most rows.
    let largest = tables.iter().map(|table| table.most / table.weight).fold(0.0, f64::max);
    let (mut low, mut high) = (0.0, 2.0 * largest);
    if together(high) <= total as f64 {
        return high;
    }
    for _ in 0..200 {
        let middle = f64::midpoint(low, high);
        if together(middle) <= total as f64 {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_are_divided_by_the_power_of_the_ids() {
        let ids = [100, 400];
        assert_eq!(divide(&ids, 300, 1.0), [60, 240]);
        assert_eq!(divide(&ids, 300, 0.5), [100, 200]);
        assert_eq!(divide(&ids, 300, 0.0), [150, 150]);
        assert_eq!(divide(&ids, 300, -0.5), [200, 100]);
    }

    #[test]
    fn a_small_table_leaves_its_rows_to_the_others() {
        // Two ids get at most 16 rows, and the others share the other 284.
        assert_eq!(divide(&[2, 500, 500], 300, 0.0), [16, 142, 142]);
    }

    #[test]
    fn every_row_is_used_and_every_feature_has_one() {
        let ids = [484, 491, 35_103, 20_745, 136, 11, 3, 9_833, 1];
        for exponent in EXPONENTS {
            for total in [9, 1_024, 6_789, 60_001] {
                let rows = divide(&ids, total, exponent);
                assert_eq!(rows.iter().sum::<u64>(), total, "{exponent}: {rows:?}");
                assert!(rows.iter().zip(ids).all(|(&rows, ids)| (1..=8 * ids).contains(&rows)), "{exponent}: {rows:?}");
            }
        }
    }

    #[test]
    fn more_rows_than_the_largest_tables_are_not_used() {
        assert_eq!(divide(&[2, 3], 1_000, 0.5), [16, 24]);
    }
}
