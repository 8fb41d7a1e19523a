//! Which parameter server holds which slot and where it is reached, at one epoch of the slot map; and how a member asks the coordinator
//! anew for that, when a server tells it that its map is old, and for where embedding and dense workers are.

use std::sync::Arc;

use rectrain_modes::migration::{Epoch, SlotMap};
use rectrain_proto::v1;
use rectrain_wire::{Channel, RefusalCode, Transport};

use crate::coordinator_channel::CoordinatorChannel;
use crate::deadline::CALL_DEADLINE;
use crate::error::RoleError;

/// See the module's text. Servers by their place in the map.
#[derive(Clone)]
pub struct Placement {
    pub map: SlotMap,
    pub addresses: Vec<String>,
    pub servers: Vec<Channel>,
}

impl Placement {
    /// `addresses` may name servers that are in no map yet, behind those that are.
    pub fn new(map: SlotMap, addresses: &[String], transport: &dyn Transport) -> Result<Self, RoleError> {
        let Some(addresses) = addresses.get(..map.servers().len()) else {
            let (known, needed) = (addresses.len(), map.servers().len());
            let reason = format!("{known} parameter servers are known, {needed} are in the map");
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

/// Asks the coordinator.
#[derive(Clone)]
pub struct Directory {
    pub coordinator: CoordinatorChannel,
    pub transport: Arc<dyn Transport>,
}

impl Directory {
    /// The placement in force.
    pub async fn fetch(&self) -> Result<Placement, RoleError> {
        let placement = self.ask().await?;
        Placement::new(read_map("map", placement.map)?, &placement.servers, &*self.transport)
    }

    /// The placement as a message: also where the embedding workers and the dense workers are.
    pub async fn ask(&self) -> Result<v1::Placement, RoleError> {
        Ok(self.coordinator.call(v1::MapRequest {}, Vec::new(), CALL_DEADLINE).await?.0)
    }
}

/// Whether a server has refused to answer because the caller's map is another than its own.
pub fn is_stale(error: &RoleError) -> bool {
    matches!(error, RoleError::Wire(error) if error.refusal().is_some_and(|refusal| refusal.code == RefusalCode::StaleEpoch))
}

/// As a message.
pub fn write_map(map: &SlotMap) -> v1::SlotMap {
    v1::SlotMap {
        epoch: map.epoch().0,
        owners: map.owners().iter().map(|owner| u32::from(*owner)).collect(),
        servers: map.servers().iter().map(|server| u32::from(*server)).collect(),
    }
}

/// From a `message`.
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

/// A channel to an address that a roster gave.
pub fn connect(transport: &dyn Transport, address: &str) -> Result<Channel, RoleError> {
    Ok(transport.connect(&address.parse()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_survives_the_way_and_a_wrong_one_does_not() {
        let map = SlotMap::even(16, 3);
        assert_eq!(read_map("map", Some(write_map(&map))).unwrap(), map);
        assert!(read_map("map", None).is_err());
        let wrong = v1::SlotMap { servers: vec![0, 1], ..write_map(&map) };
        assert!(read_map("map", Some(wrong)).is_err());
        let wrong = v1::SlotMap { servers: vec![0, 1, 2, 1 << 20], ..write_map(&map) };
        assert!(read_map("map", Some(wrong)).is_err());
    }
}
