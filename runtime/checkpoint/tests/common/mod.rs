//! A small trained job, and the steps of saving it, for the tests of checkpoints.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;
use std::sync::Arc;

use rectrain_checkpoint::{
    Base, Begin, CheckpointError, CheckpointWriter, DensePart, FileEntry, Identity, Manifest, SlotSet, Ticket,
    save_dense, save_rows, save_state,
};
use rectrain_embedding::{
    FeatureKey, FrozenStore, GroupId, Initializer, LifePolicy, Missing, RowSpec, SaveScope, Slot, SparseOptimizer,
    Store, StoreConfig, ValueType, slot_of,
};
use rectrain_storage::Directory;
use serde_json::json;

pub const SLOTS: u32 = 16;
const DIM: usize = 4;
const GROUP: GroupId = GroupId(0);

pub fn store_config() -> StoreConfig {
    let spec = RowSpec {
        dim: DIM,
        value_type: ValueType::F32,
        optimizer: SparseOptimizer::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 },
        life: LifePolicy::KeepAll,
        initializer: Initializer::Normal { standard_deviation: 0.1 },
        zero_columns: 1,
        first_order: None,
        share: None,
    };
    let half = RowSpec { value_type: ValueType::F16, ..spec };
    StoreConfig { slots: SLOTS, seed: 5, groups: vec![spec, half], budget: None }
}

pub fn identity(model: &str) -> Identity {
    Identity::new([
        ("model".to_owned(), json!({ "kind": model })),
        ("denseOptimizer".to_owned(), json!({ "kind": "adam", "beta1": 0.9 })),
    ])
}

/// Key number `number`, spread over all slots.
pub fn key(number: u64) -> FeatureKey {
    FeatureKey(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (number << 32))
}

/// The state of a job, split over any number of parameter servers.
pub struct Job {
    pub stores: Vec<Arc<Store>>,
    pub parameters: Vec<f32>,
    pub steps: u64,
}

impl Job {
    pub fn new(servers: usize) -> Self {
        let store = || {
            let store = Arc::new(Store::new(store_config()).unwrap());
            store.track_changes(true);
            store
        };
        Self { stores: (0..servers).map(|_| store()).collect(), parameters: vec![0.5; 10], steps: 0 }
    }

    /// A job that has trained five steps on one server, and its first checkpoint.
    pub async fn saved(directory: &Directory) -> (Self, Manifest) {
        let mut job = Self::new(1);
        job.train(5);
        let first = job.save(directory, None).await.unwrap();
        (job, first)
    }

    /// The slots of a parameter server: every n-th slot, so that the sets have gaps.
    pub fn slots_of(&self, server: usize) -> SlotSet {
        let servers = self.stores.len();
        SlotSet::new((0..SLOTS).filter(|slot| *slot as usize % servers == server).map(Slot))
    }

    pub fn holder(&self, key: FeatureKey) -> &Store {
        &self.stores[slot_of(key, SLOTS).0 as usize % self.stores.len()]
    }

    /// Steps that update some keys, insert some and remove some, independently of their placement.
    pub fn train(&mut self, steps: u64) {
        for _ in 0..steps {
            self.steps += 1;
            for number in self.steps * 5..self.steps * 5 + 40 {
                let (key, group) = (key(number), GroupId((number % 2) as u16));
                let store = self.holder(key);
                store.lookup(group, &[key], Missing::Insert, &mut [0.0; DIM]).unwrap();
                let gradient = [number as f32 / 100.0, -1.0, self.steps as f32, 0.5];
                store.update(group, &[key], &gradient, self.steps).unwrap();
            }
            let gone = key(self.steps * 3);
            self.holder(gone).remove(GROUP, gone).unwrap();
            for (index, parameter) in self.parameters.iter_mut().enumerate() {
                *parameter = *parameter * 0.9 + index as f32 * self.steps as f32;
            }
        }
    }

    /// A digest of each slot.
    pub fn digests(&self) -> Vec<[u8; 32]> {
        let server = |slot: u32| &self.stores[slot as usize % self.stores.len()];
        (0..SLOTS).map(|slot| server(slot).slot_digest(Slot(slot)).unwrap()).collect()
    }

    pub fn freeze(&self, ticket: &Ticket) -> Vec<Arc<FrozenStore>> {
        let scope = match &ticket.base {
            None => SaveScope::Everything,
            Some(base) => SaveScope::ChangesSince(base.id.save_id()),
        };
        self.stores.iter().map(|store| Arc::new(store.freeze(ticket.id.save_id(), scope).unwrap())).collect()
    }

    pub fn dense_parts(&self) -> Vec<DensePart> {
        let part = |offset: usize, end: usize| DensePart {
            offset: offset as u64,
            parameters: self.parameters[offset..end].to_vec(),
            optimizer: "adam".to_owned(),
            state: vec![("m".to_owned(), self.parameters[offset..end].iter().map(|p| p / 2.0).collect())],
            update_count: self.steps,
        };
        vec![part(0, 4), part(4, self.parameters.len())]
    }

    /// Writes every file but the manifest.
    pub async fn write_files(
        &self,
        directory: &Directory,
        ticket: &Ticket,
        frozen: &[Arc<FrozenStore>],
    ) -> Result<Vec<FileEntry>, CheckpointError> {
        let mut files = Vec::new();
        for (server, frozen) in frozen.iter().enumerate() {
            files.push(save_rows(directory, ticket, server as u32, frozen, &self.slots_of(server)).await?);
        }
        for (number, part) in self.dense_parts().iter().enumerate() {
            files.push(save_dense(directory, ticket, number as u32, part).await?);
        }
        files.push(save_state(directory, ticket, "coordinator", self.state()).await?);
        Ok(files)
    }

    pub fn state(&self) -> Vec<u8> {
        format!("{{\"step\":{}}}", self.steps).into_bytes()
    }

    pub fn begin(&self, base: Option<&Manifest>) -> Begin {
        Begin {
            step: self.steps,
            base: base.map(|base| Base { directory: base.directory(), id: base.id }),
            slots: SLOTS,
            identity: identity("dnn"),
            info: BTreeMap::from([("job".to_owned(), json!("test"))]),
        }
    }

    pub async fn save(&self, directory: &Directory, base: Option<&Manifest>) -> Result<Manifest, CheckpointError> {
        let writer = CheckpointWriter::begin(directory, self.begin(base)).await?;
        let frozen = self.freeze(writer.ticket());
        let files = self.write_files(directory, writer.ticket(), &frozen).await?;
        let manifest = writer.commit(files).await?;
        for frozen in frozen {
            Arc::into_inner(frozen).unwrap().complete();
        }
        Ok(manifest)
    }

    /// Restores a checkpoint into a new job with this many parameter servers.
    pub async fn restore(
        checkpoint: &rectrain_checkpoint::Checkpoint,
        servers: usize,
    ) -> Result<Self, CheckpointError> {
        let mut job = Self::new(servers);
        for server in 0..servers {
            checkpoint.restore_rows(&job.stores[server], &job.slots_of(server)).await?;
            job.stores[server].mark_saved(checkpoint.id().save_id()).unwrap();
        }
        let dense = checkpoint.dense().await?;
        job.parameters = dense.parameters;
        job.steps = dense.update_count;
        Ok(job)
    }
}

pub fn local(folder: &tempfile::TempDir) -> Directory {
    Directory::open(folder.path().to_str().unwrap(), &BTreeMap::new(), true).unwrap()
}

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}
