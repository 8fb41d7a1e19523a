//! Which parameter server holds which slot, and its address, at one epoch of the slot map.
//! A member fetches the placement again from the coordinator when a server refuses its old map. The
//! same request returns the addresses of the embedding workers and the dense workers.

use std::sync::Arc;

use rectrain_modes::migration::{Epoch, SlotMap};
use rectrain_proto::v1;
use rectrain_wire::{Channel, RefusalCode, Transport};

use crate::coordinator_channel::CoordinatorChannel;
use crate::deadline::CALL_DEADLINE;
use crate::error::RoleError;

/// The slot map with the servers in it. Addresses and channels are in the order of
/// [`SlotMap::servers`].
#[derive(Clone)]
pub struct Placement {
    pub map: SlotMap,
    pub addresses: Vec<String>,
    pub servers: Vec<Channel>,
}

impl Placement {
    /// A placement of `map`. `addresses` may have servers that are in no map yet after those that
    /// are.
    pub fn new(map: SlotMap, addresses: &[String], transport: &dyn Transport) -> Result<Self, RoleError> {
        let Some(addresses) = addresses.get(..map.servers().len()) else {
            let (known, needed) = (addresses.len(), map.servers().len());
            let reason = format!("the slot map has {needed} parameter servers, but only {known} addresses are known");
            return Err(RoleError::Inconsistent { message: "map", reason });
        };
        let servers = addresses.iter().map(|address| connect(transport, address)).collect::<Result<_, _>>()?;
        Ok(Self { map, addresses: addresses.to_vec(), servers })
    }

    pub fn epoch(&self) -> Epoch {
        self.map.epoch()
    }

    pub fn write(&self) -> v1::Placement {
        v1::Placement { map: Some(write_map(&self.map)), servers: self.addresses.clone(), ..v1::Placement::default() }
    }
}

/// Fetches addresses from the coordinator.
#[derive(Clone)]
pub struct Directory {
    pub coordinator: CoordinatorChannel,
    pub transport: Arc<dyn Transport>,
}

impl Directory {
    /// Fetches the present placement.
    pub async fn fetch(&self) -> Result<Placement, RoleError> {
        let placement = self.fetch_addresses().await?;
        Placement::new(read_map("map", placement.map)?, &placement.servers, &*self.transport)
    }

    /// Fetches the present placement as a message, with the addresses of the embedding workers and
    /// the dense workers.
    pub async fn fetch_addresses(&self) -> Result<v1::Placement, RoleError> {
        Ok(self.coordinator.call(v1::MapRequest {}, Vec::new(), CALL_DEADLINE).await?.0)
    }
}

/// Whether a server refused a request because the caller's slot map has another epoch than its own.
pub fn is_stale(error: &RoleError) -> bool {
    error.is_refused_with(RefusalCode::StaleEpoch)
}

/// The slot map for a message.
pub fn write_map(map: &SlotMap) -> v1::SlotMap {
    v1::SlotMap {
        epoch: map.epoch().0,
        owners: map.owners().iter().map(|owner| u32::from(*owner)).collect(),
        servers: map.servers().iter().map(|server| u32::from(*server)).collect(),
    }
}

/// The slot map in a `message`.
pub fn read_map(message: &'static str, map: Option<v1::SlotMap>) -> Result<SlotMap, RoleError> {
    let wrong = |reason: &str| RoleError::Inconsistent { message, reason: reason.to_owned() };
    let v1::SlotMap { epoch, owners, servers } = map.ok_or_else(|| wrong("the slot map is missing"))?;
    let numbers = |servers: Vec<u32>| servers.into_iter().map(|server| u16::try_from(server).ok()).collect();
    let (owners, servers): (Option<Vec<u16>>, Option<Vec<u16>>) = (numbers(owners), numbers(servers));
    owners
        .zip(servers)
        .and_then(|(owners, servers)| SlotMap::new(Epoch(epoch), owners, servers))
        .ok_or_else(|| wrong("the slot map names a parameter server that is not in it"))
}

/// Opens a channel to an address from a roster.
pub fn connect(transport: &dyn Transport, address: &str) -> Result<Channel, RoleError> {
    Ok(transport.connect(&address.parse()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_survives_its_message_and_a_wrong_one_is_refused() {
        let map = SlotMap::even(16, 3);
        assert_eq!(read_map("map", Some(write_map(&map))).unwrap(), map);
        assert!(read_map("map", None).is_err());
        let wrong = v1::SlotMap { servers: vec![0, 1], ..write_map(&map) };
        assert!(read_map("map", Some(wrong)).is_err());
        let wrong = v1::SlotMap { servers: vec![0, 1, 2, 1 << 20], ..write_map(&map) };
        assert!(read_map("map", Some(wrong)).is_err());
    }
}
