//! The bytes of rows that each parameter server is to have, by its weight and its memory. Pure.

/// The part of a server's free memory that moved rows may fill. Its rows also grow by themselves.
const FILLED_TENTHS: u64 = 8;

/// A server that slots may move to or from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// The share of the work that it is to get, compared with the others.
    pub(super) weight: u32,
    /// Bytes of its present rows.
    pub(super) bytes: u64,
    /// Bytes that it may use beyond the present ones; `None` without a memory limit.
    pub(super) room: Option<u64>,
}

impl Place {
    /// The most bytes of rows that the server may have.
    fn most(&self) -> u64 {
        let filled = |room: u64| self.bytes.saturating_add(room / 10 * FILLED_TENTHS);
        self.room.map_or(u64::MAX, filled)
    }
}

/// The bytes that each server is to have. They are in proportion to the weights, but no server gets
/// more than its memory allows. Servers with room get what others have no room for. If all are
/// full, they count by their weights alone. `more` bytes come from servers that leave.
pub(super) fn targets(places: &[Place], more: u64) -> Vec<u64> {
    let total: u64 = places.iter().map(|place| place.bytes).sum::<u64>() + more;
    let mut is_full = vec![false; places.len()];
    loop {
        let open = || places.iter().zip(&is_full).filter(|(_, is_full)| !**is_full).map(|(place, _)| place);
        let of_full: u64 = places.iter().zip(&is_full).filter(|(_, is_full)| **is_full).map(|(p, _)| p.most()).sum();
        let (left, weights) = (total.saturating_sub(of_full), open().map(|place| u64::from(place.weight)).sum());
        let part = |place: &Place| part_of(left, place.weight, weights);
        let overfull =
            (0..places.len()).find(|index| !is_full[*index] && part(&places[*index]) > places[*index].most());
        match overfull {
            Some(_) if open().count() == 1 => return places.iter().map(|place| u64::from(place.weight)).collect(),
            Some(index) => is_full[index] = true,
            None => {
                let target = |(place, is_full): (&Place, &bool)| if *is_full { place.most() } else { part(place) };
                return places.iter().zip(&is_full).map(target).collect();
            }
        }
    }
}

fn part_of(whole: u64, weight: u32, weights: u64) -> u64 {
    let part = u128::from(whole) * u128::from(weight) / u128::from(weights.max(1));
    u64::try_from(part).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use rectrain_random::SplitMix64;

    use super::*;

    fn place(weight: u32, bytes: u64, room: Option<u64>) -> Place {
        Place { weight, bytes, room }
    }

    #[test]
    fn bytes_are_in_proportion_to_weights() {
        let places = [place(64, 660, None), place(2, 660, Some(0)), place(64, 630, None)];
        assert_eq!(targets(&places, 0), [960, 30, 960]);
        assert_eq!(targets(&[place(64, 0, None); 2], 0), [0, 0]);
    }

    #[test]
    fn no_server_gets_more_than_its_memory_holds() {
        // Both others have room for 80 more, so the slow one keeps the rest.
        let tight = [place(64, 1000, Some(100)), place(2, 1000, Some(100)), place(64, 1000, Some(100))];
        assert_eq!(targets(&tight, 0), [1080, 840, 1080]);
        let one = [place(64, 1000, Some(100)), place(2, 1000, None), place(64, 1000, None)];
        let found = targets(&one, 0);
        assert_eq!((found[0], found.iter().sum::<u64>() / 10), (1080, 299), "{found:?}");
        assert!(found[2] > 30 * found[1], "{found:?}");
    }

    #[test]
    fn servers_without_room_are_weighed_alone() {
        assert_eq!(targets(&[place(64, 10, Some(0)), place(64, 0, Some(0))], 0), [10, 0]);
        let full = [place(64, 1000, Some(0)), place(2, 0, Some(0))];
        assert_eq!(targets(&full, 0), [1000, 0]);
        assert_eq!(targets(&full, 500), [64, 2], "500 bytes of a server that leaves have no room");
    }

    /// Compared with a naive model, which gives bytes out one by one: each to the server that has
    /// least for its weight, and room.
    #[test]
    fn targets_are_as_if_bytes_were_given_out_one_by_one() {
        let mut random = SplitMix64::new(5);
        for _ in 0..300 {
            let places: Vec<Place> = (0..1 + random.below(4))
                .map(|_| {
                    let room = (random.below(3) > 0).then(|| random.below(30) * 10);
                    place(2 + random.below(63) as u32, random.below(300), room)
                })
                .collect();
            let total: u64 = places.iter().map(|place| place.bytes).sum();
            let mut given = vec![0_u64; places.len()];
            for _ in 0..total {
                let open = (0..places.len()).filter(|index| given[*index] < places[*index].most());
                let least = open.min_by_key(|index| {
                    let next = (given[*index] + 1) * 1_000_000 / u64::from(places[*index].weight);
                    (next, *index)
                });
                given[least.unwrap()] += 1;
            }
            for (found, given) in targets(&places, 0).into_iter().zip(&given) {
                assert!(found.abs_diff(*given) <= places.len() as u64, "{found} instead of {given}: {places:?}");
            }
        }
    }
}
