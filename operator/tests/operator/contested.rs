//! A HorizontalPodAutoscaler and a GitOps tool write `replicas` in turn. Each change costs a pause
//! or an attempt, so the operator reports the quarrel and keeps the present members.

use rectrain_crds::{Phase, Role};
use serde_json::json;

use crate::world::{MANIFEST, World, long, passes};

/// Dense workers join and leave without another attempt.
fn elastic() -> String {
    MANIFEST.replace("  roles:", "  training: {localBatchSize: 512}\n  roles:")
}

/// The two programs write the field in turn, five seconds apart.
async fn quarrel(world: &World, rounds: usize) {
    for _ in 0..rounds {
        for workers in [4, 2] {
            world.edit(|spec| spec["roles"]["denseWorker"]["replicas"] = json!(workers));
            world.settle().await;
            world.tick();
        }
    }
    world.settle().await;
}

async fn training(manifest: &str) -> World {
    let world = World::new(manifest, vec![long(1000)]);
    while world.phase() != Some(Phase::Training) {
        world.settle().await;
        world.tick();
    }
    world
}

fn attempt(world: &World) -> u32 {
    world.job().status.unwrap().attempt.unwrap().number
}

fn assert_contested(world: &World) {
    let (reason, message) = world.condition("Stalled").expect("it is reported");
    assert!(reason == "ReplicasContested" && message.contains("between 2 and 4"), "{reason}: {message}");
    assert_eq!(world.phase(), Some(Phase::Training));
}

#[tokio::test]
async fn a_contested_number_of_members_is_reported_and_kept() {
    let world = training(&elastic()).await;
    quarrel(&world, 6).await;
    assert_contested(&world);
    let asked = world.scripts.lock().asked_members.len();
    assert!(asked <= 6, "the coordinator was asked {asked} times");
    quarrel(&world, 20).await;
    assert_contested(&world);
    assert!(world.scripts.lock().asked_members.len() <= asked + 1, "training is left alone");
    assert_eq!(attempt(&world), 1);
    // One of the two has ended.
    for _ in 0..10 {
        passes(60);
        world.settle().await;
        world.tick();
    }
    world.settle().await;
    let replicas = world.job().status.unwrap().attempt.unwrap().replicas.unwrap();
    let workers = replicas.get(Role::DenseWorker).unwrap();
    assert_eq!((workers.present, workers.needed, world.condition("Stalled")), (2, 2, None));
}

/// Each change begins another attempt, which would never come to train.
#[tokio::test]
async fn a_contested_number_does_not_restart_the_job_for_ever() {
    let world = training(MANIFEST).await;
    quarrel(&world, 8).await;
    assert_contested(&world);
    let (attempts, step) = (attempt(&world), world.job().status.unwrap().step);
    assert!(attempts < 8, "{attempts} attempts");
    quarrel(&world, 10).await;
    assert_contested(&world);
    assert_eq!(attempt(&world), attempts);
    assert!(world.job().status.unwrap().step > step, "it trains");
}
