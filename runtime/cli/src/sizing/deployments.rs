//! The servers of a model's predictions, in three deployments. This is the cost model of Kraken
//! (Xie et al. 2020, §V-E, Table V), with the figures that bound each deployment. Pure.
//!
//! - *whole*: each server holds all rows. `rectrain serve` runs so.
//! - *co-located*: each server predicts and holds a part of the rows. It reads the others from its
//!   peers.
//! - *non-co-located*: inference servers predict, and storage servers hold the rows, as with
//!   `spec.shards` of a `RecModelServer`. Each shard has a storage server for each copy.

use rectrain_crds::defaults::AUTO_MEMORY_SHARE;
use serde::Serialize;

/// Models in the memory of a server that holds all rows: the present one, and the next one while it
/// changes over.
const MODELS_IN_MEMORY: u64 = 2;

/// The model and its load.
#[derive(Clone, Debug)]
pub(super) struct Demand {
    /// Bytes of all rows in the memory of servers, once.
    pub(super) bytes: u64,
    pub(super) requests_per_second: f64,
    /// Requests a second of one saturated core.
    pub(super) core_requests_per_second: f64,
    /// Distinct ids of a request.
    pub(super) request_ids: f64,
    /// The mean bytes of a row that a request reads: key and values.
    pub(super) read_row_bytes: f64,
    /// The mean bytes of a row that training changes.
    pub(super) changed_row_bytes: f64,
    /// Rows that training changes in a second.
    pub(super) changed_rows_per_second: f64,
    /// Cores that the changes take on a server with rows. Less than the cores of a machine.
    pub(super) update_cores: f64,
    /// Copies of each row, if servers share the rows.
    pub(super) copies: u64,
    /// The share of the ids in the caches of inference servers without rows.
    pub(super) cached: f64,
    /// Rows that one saturated core of a storage server sends in a second.
    pub(super) core_rows_per_second: f64,
    /// The share of the cores and of the network that the load may use.
    pub(super) load: f64,
}

/// Two kinds of machines.
#[derive(Clone, Debug)]
pub(super) struct Machines {
    /// Cores of each.
    pub(super) cores: f64,
    /// The network of each, in bytes a second and direction.
    pub(super) network: f64,
    /// Bytes of memory of a machine for rows, and of one that only computes.
    pub(super) large_memory: u64,
    pub(super) small_memory: u64,
    pub(super) prices: Option<MachinePrices>,
}

/// Prices for an hour, in any currency.
#[derive(Clone, Copy, Debug)]
pub(super) struct MachinePrices {
    pub(super) large: f64,
    pub(super) small: f64,
}

/// The servers of a deployment.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Deployment {
    pub(super) name: &'static str,
    /// Servers on machines for rows, and on machines that only compute.
    pub(super) large: u64,
    pub(super) small: u64,
    /// Servers that predict, and servers that only hold rows.
    pub(super) inference: u64,
    pub(super) storage: u64,
    /// The storage servers as shards.
    pub(super) shards: Option<Shards>,
    /// Bytes of rows in a server that has rows.
    pub(super) row_bytes: u64,
    /// False if the rows of a server do not fit a machine for rows.
    pub(super) fits: bool,
    /// The share of its network that the busiest server uses.
    pub(super) network: f64,
    /// The bound that determines the servers with rows.
    pub(super) bound: &'static str,
    /// For an hour.
    pub(super) price: Option<f64>,
    /// Requests a second for a unit of the price.
    pub(super) requests_per_price: Option<f64>,
}

/// Storage servers as `spec.shards` of a `RecModelServer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Shards {
    /// Shards, each with a part of the rows.
    pub(super) count: u64,
    /// Servers of each shard.
    pub(super) replicas: u64,
}

/// A number of servers, and the bound that determines it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Number {
    servers: u64,
    bound: &'static str,
}

/// The least number within all bounds. Each bound is a number of servers, and its name.
fn number(bounds: &[(f64, &'static str)]) -> Number {
    let (servers, bound) = bounds.iter().copied().reduce(|a, b| if b.0 > a.0 { b } else { a }).unwrap_or((1.0, "one"));
    Number { servers: (servers.ceil() as u64).max(1), bound }
}

/// The servers of each deployment.
pub(super) fn deployments(demand: &Demand, machines: &Machines) -> [Deployment; 3] {
    [whole(demand, machines), co_located(demand, machines), non_co_located(demand, machines)]
}

/// The bytes of rows that a machine holds.
fn usable(memory: u64) -> f64 {
    AUTO_MEMORY_SHARE * memory as f64
}

impl Demand {
    /// Servers that predict with these cores.
    fn by_cores(&self, cores: f64) -> f64 {
        self.requests_per_second / (self.load * cores * self.core_requests_per_second)
    }

    /// Servers that keep all copies of the rows in this memory.
    fn by_memory(&self, memory: u64) -> f64 {
        self.copies as f64 * self.bytes as f64 / usable(memory)
    }

    /// Bytes a second of the rows that predictions read from other servers.
    fn read_bytes(&self) -> f64 {
        self.requests_per_second * self.request_ids * self.read_row_bytes
    }

    /// Bytes a second of one copy of the changed rows.
    fn changed_bytes(&self) -> f64 {
        self.changed_rows_per_second * self.changed_row_bytes
    }
}

fn whole(demand: &Demand, machines: &Machines) -> Deployment {
    let number = number(&[(demand.by_cores(machines.cores - demand.update_cores), "cores")]);
    let row_bytes = MODELS_IN_MEMORY.saturating_mul(demand.bytes);
    let fits = |memory: u64| row_bytes as f64 <= usable(memory);
    let is_small = fits(machines.small_memory);
    Deployment {
        large: if is_small { 0 } else { number.servers },
        small: if is_small { number.servers } else { 0 },
        inference: number.servers,
        storage: 0,
        row_bytes,
        fits: fits(machines.large_memory.max(machines.small_memory)),
        network: demand.changed_bytes() / machines.network,
        ..Deployment::new("whole", number)
    }
    .priced(demand, machines)
}

fn co_located(demand: &Demand, machines: &Machines) -> Deployment {
    let all_bytes = demand.read_bytes() + demand.copies as f64 * demand.changed_bytes();
    let of = |memory: u64, is_small: bool| {
        let number = number(&[
            (demand.by_cores(machines.cores - demand.update_cores), "cores"),
            (demand.by_memory(memory), "memory"),
            (all_bytes / (demand.load * machines.network), "network"),
            (demand.copies as f64, "copies"),
        ]);
        let servers = number.servers;
        Deployment {
            large: if is_small { 0 } else { servers },
            small: if is_small { servers } else { 0 },
            inference: servers,
            storage: 0,
            row_bytes: (demand.copies as f64 * demand.bytes as f64 / servers as f64).ceil() as u64,
            network: all_bytes / (servers as f64 * machines.network),
            ..Deployment::new("co-located", number)
        }
        .priced(demand, machines)
    };
    let (small, large) = (of(machines.small_memory, true), of(machines.large_memory, false));
    let is_small_cheaper = match (small.price, large.price) {
        (Some(small), Some(large)) => small <= large,
        _ => small.inference <= large.inference,
    };
    if is_small_cheaper { small } else { large }
}

fn non_co_located(demand: &Demand, machines: &Machines) -> Deployment {
    let (uncached, network) = (1.0 - demand.cached, demand.load * machines.network);
    let read_bytes = uncached * demand.read_bytes();
    let stored_bytes = read_bytes + demand.copies as f64 * demand.changed_bytes();
    let inference = number(&[(demand.by_cores(machines.cores), "cores"), (read_bytes / network, "network")]);
    let rows = uncached * demand.requests_per_second * demand.request_ids;
    let storage_cores = machines.cores - demand.update_cores;
    let copies = demand.copies as f64;
    // Each shard has all copies of its rows, and the copies share its look-ups.
    let shards = number(&[
        (demand.by_memory(machines.large_memory) / copies, "memory"),
        (rows / (demand.load * storage_cores * demand.core_rows_per_second) / copies, "cores"),
        (stored_bytes / network / copies, "network"),
        (1.0, "copies"),
    ]);
    let storage = shards.servers * demand.copies;
    let share = |bytes: f64, servers: u64| bytes / (servers as f64 * machines.network);
    Deployment {
        large: storage,
        small: inference.servers,
        inference: inference.servers,
        storage,
        shards: Some(Shards { count: shards.servers, replicas: demand.copies }),
        row_bytes: (copies * demand.bytes as f64 / storage as f64).ceil() as u64,
        network: share(stored_bytes, storage).max(share(read_bytes, inference.servers)),
        ..Deployment::new("non-co-located", shards)
    }
    .priced(demand, machines)
}

impl Deployment {
    fn new(name: &'static str, number: Number) -> Self {
        Self {
            name,
            large: 0,
            small: 0,
            inference: 0,
            storage: 0,
            shards: None,
            row_bytes: 0,
            fits: true,
            network: 0.0,
            bound: number.bound,
            price: None,
            requests_per_price: None,
        }
    }

    fn priced(self, demand: &Demand, machines: &Machines) -> Self {
        let price = machines.prices.map(|of| self.large as f64 * of.large + self.small as f64 * of.small);
        Self { price, requests_per_price: price.map(|price| demand.requests_per_second / price), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of one core for the paper's servers, so that figures are for a server.
    fn machines(large: f64, small: f64) -> Machines {
        Machines {
            cores: 1.0,
            network: 1e9,
            large_memory: 64 << 30,
            small_memory: 1 << 30,
            prices: Some(MachinePrices { large, small }),
        }
    }

    /// 16 shards of a model, and inference servers of 93.04 requests a second.
    fn demand(requests_per_second: f64) -> Demand {
        Demand {
            bytes: (15.5 * AUTO_MEMORY_SHARE * (64_u64 << 30) as f64) as u64,
            requests_per_second,
            core_requests_per_second: 93.04,
            request_ids: 100.0,
            read_row_bytes: 72.0,
            changed_row_bytes: 72.0,
            changed_rows_per_second: 0.0,
            update_cores: 0.0,
            copies: 1,
            cached: 0.0,
            core_rows_per_second: 1e6,
            load: 1.0,
        }
    }

    #[test]
    fn the_deployments_of_krakens_table_v_cost_the_rents_of_the_paper() {
        // The prices of a server follow from the rents: 400 large ones are 1,041,408 (AWS) and
        // 666,750 (Alibaba).
        for (baseline, kraken, ratio) in [(1_041_408.0, 802_529.0, 44.52), (666_750.0, 372_512.0, 95.91)] {
            let large = baseline / 400.0;
            let machines = machines(large, (kraken - 16.0 * large) / 384.0);
            let found = non_co_located(&demand(35_726.0), &machines);
            assert_eq!((found.storage, found.inference, found.bound), (16, 384, "memory"));
            assert!((found.price.unwrap() - kraken).abs() < 1.0, "{found:?}");
            assert!((1000.0 * found.requests_per_price.unwrap() - ratio).abs() < 0.01, "{found:?}");
            // Updates take 18.5 % of a server with rows.
            let updated = Demand { update_cores: 0.185, ..demand(30_325.0) };
            let found = co_located(&updated, &machines);
            assert_eq!((found.large, found.small, found.bound), (400, 0, "cores"));
            assert!((found.price.unwrap() - baseline).abs() < 1.0, "{found:?}");
        }
    }

    #[test]
    fn the_network_bounds_servers_that_read_many_rows() {
        let machines = machines(2.0, 1.0);
        // 1,000 requests of 100,000 rows of 72 bytes are 7.2 GB a second, and a machine has 1 GB.
        let reads = Demand { request_ids: 100_000.0, core_rows_per_second: 1e9, ..demand(1_000.0) };
        let found = non_co_located(&Demand { bytes: 1, ..reads.clone() }, &machines);
        assert_eq!((found.storage, found.bound), (8, "network"));
        assert!((found.network - 7.2 / 8.0).abs() < 1e-9, "{found:?}");
        let cached = non_co_located(&Demand { bytes: 1, cached: 0.9, ..reads.clone() }, &machines);
        assert_eq!((cached.storage, cached.inference), (1, 11));
        // 2 million changed rows of 72 bytes have two copies: .288 GB a second.
        let changed = Demand { bytes: 1, copies: 2, changed_rows_per_second: 2e6, ..reads };
        assert!((non_co_located(&changed, &machines).network - 7.488 / 8.0).abs() < 1e-9);
    }

    #[test]
    fn each_shard_has_all_copies_of_its_rows() {
        let machines = machines(2.0, 1.0);
        // 15.5 machines hold the rows once. Two copies fit 31 machines, and 16 shards need 32.
        let found = non_co_located(&Demand { copies: 2, ..demand(930.4) }, &machines);
        assert_eq!(found.shards, Some(Shards { count: 16, replicas: 2 }));
        assert_eq!((found.storage, found.large, found.bound), (32, 32, "memory"));
        let bytes = 2.0 * demand(930.4).bytes as f64 / 32.0;
        assert!((found.row_bytes as f64 - bytes).abs() <= 1.0, "{found:?}");
        // A model that fits one machine has one shard, with all copies.
        let small = non_co_located(&Demand { copies: 3, bytes: 1, ..demand(930.4) }, &machines);
        assert_eq!((small.shards, small.bound), (Some(Shards { count: 1, replicas: 3 }), "copies"));
    }

    #[test]
    fn a_server_with_all_rows_needs_memory_for_two_models() {
        let machines = machines(2.0, 1.0);
        let of = |gigabytes: f64| whole(&Demand { bytes: (gigabytes * 1e9) as u64, ..demand(930.4) }, &machines);
        // .6 of 1 GiB and of 64 GiB are .64 and 41.2 GB.
        for (gigabytes, large, small, fits) in [(0.3, 0, 10, true), (10.0, 10, 0, true), (21.0, 10, 0, false)] {
            let found = of(gigabytes);
            assert_eq!((found.large, found.small, found.fits), (large, small, fits), "{gigabytes}");
        }
        assert_eq!(of(0.3).price, Some(10.0));
    }

    #[test]
    fn without_prices_the_deployment_with_fewer_servers_is_shown() {
        let machines = Machines { prices: None, ..machines(2.0, 1.0) };
        let found = co_located(&demand(930.4), &machines);
        // 992 small machines hold the rows, or 16 large ones.
        assert_eq!((found.large, found.small, found.price, found.bound), (16, 0, None, "memory"));
    }
}
