//! Single decisions: each situation, its decision and its reason.

use crate::world::{INTERVAL, World, policy};
use rectrain_policy::{
    Action, AutoMode, ClusterLoad, Decision, History, Observations, Policy, Subject, Worker, with_idle,
};

fn last(world: &World, subject: Subject) -> Option<&Decision> {
    world.log.iter().rev().find(|decision| decision.subject == subject)
}

#[test]
fn a_slow_worker_leads_to_gba_and_back_when_it_is_fast_again() {
    let policy = policy(8, 8);
    let (mut world, mut history) = (World { slowdown: 3.0, ..World::new(1) }, History::default());
    world.run(&policy, &mut history, 120);
    assert_eq!(world.mode, AutoMode::Gba, "{:?}", world.log);
    let reason = &last(&world, Subject::Mode).unwrap().reason;
    assert!(reason.contains("faster than sync") && reason.contains("worker 0"), "{reason}");
    assert_eq!(history.decided_mode(), Some(AutoMode::Gba));
    // Equal workers are as fast in either mode. At the same speed the exact mode is better.
    world.slowdown = 1.0;
    world.run(&policy, &mut history, 600);
    assert_eq!(world.mode, AutoMode::Sync);
    let reason = &last(&world, Subject::Mode).unwrap().reason;
    assert!(reason.contains("gba stays while it is 5 % faster"), "{reason}");
    world.run(&policy, &mut history, 3600);
    assert_eq!(world.log.iter().filter(|decision| decision.subject == Subject::Mode).count(), 2, "{:?}", world.log);
    assert!(history.prediction_error().unwrap().abs() < 0.02, "{:?}", history.prediction_error());
}

/// The numbers of a text, in order.
fn numbers(text: &str) -> Vec<f64> {
    text.split(|c: char| !c.is_ascii_digit() && c != '.').filter_map(|word| word.parse().ok()).collect()
}

#[test]
fn a_reason_has_one_pair_of_figures_that_agrees_with_its_share() {
    for slowdown in [1.5, 3.0, 100.0] {
        let (mut world, mut history) = (World { slowdown, ..World::new(1) }, History::default());
        world.run(&policy(8, 8), &mut history, 120);
        let reason = &last(&world, Subject::Mode).unwrap().reason;
        let [_seconds, percent, gba, sync, ..] = numbers(reason)[..] else { panic!("{reason}") };
        assert!(((gba / sync - 1.0) * 100.0 - percent).abs() < 1.5, "{reason}");
    }
}

#[test]
fn waits_measured_beside_neighbours_do_not_keep_gba_after_they_left() {
    let policy = policy(8, 8);
    let (mut world, mut history) = (World::new(1), History::default());
    let mut look = |slowdown: f64| {
        world.now += INTERVAL;
        world.slowdown = slowdown;
        let mut observations = world.observe();
        // Scarce processors slow the all-reduce through the slow worker as much as its computation.
        observations.all_reduce_seconds = observations.all_reduce_seconds.map(|seconds| seconds * slowdown);
        observations.samples_per_second = None;
        // A worker that waits for embeddings beside neighbours also waits for a processor.
        if world.mode == AutoMode::Sync && slowdown > 1.0 {
            observations.wait_seconds = 0.1 * slowdown;
        }
        // Without a barrier the exchange with the servers is measured as a wait.
        if let Some(exchange) = observations.exchange_seconds.take() {
            observations.wait_seconds = exchange;
        }
        let made = history.advance(&policy, &observations);
        for decision in made {
            if let Action::SwitchMode { to, .. } = decision.action {
                world.mode = to;
            }
        }
        world.mode
    };
    assert!((0..24).all(|_| look(1.0) == AutoMode::Sync));
    // Half a minute.
    assert!((0..6).any(|_| look(10.0) == AutoMode::Gba), "it is slow");
    assert!((0..60).all(|_| look(10.0) == AutoMode::Gba));
    assert!((0..24).any(|_| look(1.0) == AutoMode::Sync), "it is as fast as before");
}

#[test]
fn gba_is_left_where_the_barrier_is_faster() {
    let policy = policy(8, 8);
    let (mut world, mut history) = (World { mode: AutoMode::Gba, ..World::new(1) }, History::default());
    // Shorter than the window.
    world.run(&policy, &mut history, 20);
    // Pulling parameters from the servers takes four times as long as the all-reduce did.
    let observe = |world: &mut World| {
        world.now += INTERVAL;
        let mut observations = world.observe();
        observations.all_reduce_seconds = Some(0.1);
        observations.exchange_seconds = Some(0.6);
        observations.samples_per_second = None;
        observations
    };
    let acted = (0..60).find_map(|_| {
        let observations = observe(&mut world);
        history
            .advance(&policy, &observations)
            .into_iter()
            .find(|decision| decision.subject == Subject::Mode && decision.acts())
    });
    assert_eq!(acted.unwrap().action, Action::SwitchMode { from: AutoMode::Gba, to: AutoMode::Sync });
}

/// Whether a job with one stopped worker of four has gone to `gba` after ten minutes. A step has so
/// many pieces, which free workers pull or not.
fn goes_to_gba(pulls_pieces: bool, pieces: u32, slowdown: f64) -> bool {
    let policy = policy(4, 4);
    let start = World { slowdown, overhead: 0.01, dense_worker: 4, ..World::new(1) };
    let (mut world, mut history) = (start, History::default());
    for _ in 0..600 / INTERVAL {
        world.now += INTERVAL;
        let local_batch_rows = crate::world::GLOBAL_ROWS / pieces;
        let observations = Observations {
            pulls_pieces,
            local_batch_rows,
            global_batch_rows: pieces * local_batch_rows,
            samples_per_second: None,
            ..world.observe()
        };
        for decision in history.advance(&policy, &observations) {
            if let Action::SwitchMode { to, .. } = decision.action {
                world.mode = to;
            }
        }
    }
    world.mode == AutoMode::Gba
}

#[test]
fn gba_is_chosen_where_pulled_pieces_are_not_enough() {
    // Three workers compute 12 pieces in four rounds instead of three. `gba` is no faster.
    assert!(!goes_to_gba(true, 12, 33.0));
    assert!(!goes_to_gba(true, 24, 1000.0));
    assert!(goes_to_gba(false, 12, 33.0), "with fixed pieces every step waits for it");
    // Four pieces take two rounds instead of one.
    assert!(goes_to_gba(true, 4, 33.0));
    assert!(!goes_to_gba(true, 12, 1.0), "all are equally fast");
}

#[test]
fn a_crowded_cluster_lowers_the_threshold_to_gba() {
    let policy = policy(8, 8);
    let decided = |cluster: ClusterLoad| {
        // 14 % slower with the barrier. That is less than twice the margin, which a gba that was
        // never used needs, and more than half of it.
        let (mut world, mut history) = (World { slowdown: 1.24, ..World::new(1) }, History::default());
        let mut decision = None;
        for _ in 0..40 {
            world.now += INTERVAL;
            let mut observations = world.observe();
            observations.cluster = cluster;
            let made = history.advance(&policy, &observations);
            decision = made.into_iter().find(|made| made.subject == Subject::Mode && made.acts()).or(decision);
        }
        decision
    };
    assert_eq!(decided(ClusterLoad { node_cpu: Some(0.5), ..ClusterLoad::default() }), None);
    let crowded = decided(ClusterLoad { node_cpu: Some(0.93), pending_pods: 4, ..ClusterLoad::default() }).unwrap();
    assert!(crowded.reason.contains("93 % of CPU in use by others, 4 pods pending"), "{}", crowded.reason);
}

#[test]
fn a_mode_slower_than_predicted_is_left_and_not_retried() {
    let policy = policy(8, 8);
    let (mut world, mut history) = (World { slowdown: 1.6, ..World::new(1) }, History::default());
    let mut switches = Vec::new();
    for _ in 0..(4 * 3600 / INTERVAL) {
        world.now += INTERVAL;
        let mut observations = world.observe();
        // The servers are slower than the models know: `gba` reaches half of its prediction.
        if world.mode == AutoMode::Gba {
            observations.samples_per_second = observations.samples_per_second.map(|samples| 0.5 * samples);
        }
        for decision in history.advance(&policy, &observations) {
            if let Action::SwitchMode { to, .. } = decision.action {
                world.mode = to;
                switches.push(decision);
            }
        }
    }
    assert_eq!(switches.len(), 2, "{switches:#?}");
    assert_eq!(world.mode, AutoMode::Sync);
}

#[test]
fn a_growing_table_gets_more_servers_before_the_first_is_full() {
    let policy = policy(1, 64);
    let (mut world, mut history) = (World { bytes_a_second: 2e6, ..World::new(1) }, History::default());
    let mut fullest: f64 = 0.0;
    for _ in 0..(8 * 3600 / INTERVAL) {
        world.run(&policy, &mut history, INTERVAL);
        fullest = fullest.max(world.fill());
    }
    assert!(world.table_bytes > 8e9 * 7.0, "the table outgrew the first servers several times: {}", world.table_bytes);
    assert!(fullest < 0.9, "{fullest}");
    let reason = &last(&world, Subject::Ps).unwrap().reason;
    assert!(reason.contains("will use") && reason.contains("in 900 s"), "{reason}");
}

#[test]
fn growth_alone_is_a_reason_while_there_is_still_room() {
    let policy = policy(1, 64);
    let table_bytes = 8e9 * 2.0 * 0.5;
    let calm = {
        let (mut world, mut history) = (World { table_bytes, ..World::new(1) }, History::default());
        world.run(&policy, &mut history, 700);
        world.ps
    };
    let growing = {
        let bytes_a_second = 8e9 * 2.0 * 0.5 / 900.0;
        let (mut world, mut history) = (World { table_bytes, bytes_a_second, ..World::new(1) }, History::default());
        world.run(&policy, &mut history, 200);
        assert!(world.fill() < 0.75, "nothing is full yet");
        world.ps
    };
    assert!(calm == 2 && growing > 2, "{calm} {growing}");
}

#[test]
fn a_kill_gives_the_servers_more_memory_or_more_servers_at_once() {
    let mut with_memory = policy(1, 8);
    with_memory.ps.as_mut().unwrap().max_memory_bytes = Some(10_000_000_000);
    let after_kill = |policy: &Policy| {
        let (mut world, mut history) = (World::new(1), History::default());
        world.run(policy, &mut history, INTERVAL);
        world.now += INTERVAL;
        let mut observations = world.observe();
        observations.ps[1].oom_kills = 1;
        let of_ps = |made: Vec<Decision>| made.into_iter().find(|made| made.subject == Subject::Ps).unwrap();
        let made = of_ps(history.advance(policy, &observations));
        observations.at_seconds += INTERVAL;
        let again = of_ps(history.advance(policy, &observations));
        assert_eq!(again.action, Action::Keep, "one kill is answered once");
        made
    };
    let raised = after_kill(&with_memory);
    let expected = Action::RaiseMemory { replica: 1, from_bytes: 8_000_000_000, to_bytes: 10_000_000_000 };
    assert_eq!(raised.action, expected, "{}", raised.reason);
    let mut at_most = with_memory;
    at_most.ps.as_mut().unwrap().max_memory_bytes = Some(8_000_000_000);
    for policy in [&at_most, &policy(1, 8)] {
        let spread = after_kill(policy);
        assert_eq!(spread.action, Action::Scale { from: 2, to: 3 }, "{}", spread.reason);
        assert!(spread.reason.contains("killed for its memory"), "{}", spread.reason);
    }
    let stuck = after_kill(&policy(1, 2));
    assert_eq!(stuck.action, Action::Keep);
    assert!(stuck.reason.contains("raise `max`"), "{}", stuck.reason);
}

#[test]
fn uneven_servers_are_rebalanced_instead_of_scaled_out() {
    let policy = policy(1, 8);
    // The first is busy for 0.95 of the time. With even slots all would be busy for 0.63, which is
    // within the target.
    let uneven = || World { look_up_load: 1.9, ps: 3, unevenness: 1.5, ..World::new(1) };
    let (mut world, mut history) = (uneven(), History::default());
    world.run(&policy, &mut history, 3600);
    let made: Vec<_> = world.log.iter().filter(|decision| decision.subject == Subject::Ps).collect();
    assert_eq!(
        made.iter().map(|made| made.action).collect::<Vec<_>>(),
        [Action::Rebalance { replicas: 3 }],
        "{made:?}"
    );
    assert!(made[0].reason.contains("1.50 times the mean"), "{}", made[0].reason);
    assert!(made[0].at_seconds <= 1_000_000 + 70, "it waits for the window only");

    // Single slots are too large: the rebalance does not help, so a scale-out follows, and no other
    // rebalance for an hour.
    let (mut world, mut history) = (World { is_stuck: true, ..uneven() }, History::default());
    world.run(&policy, &mut history, 3600);
    let made = world.log.iter().filter(|decision| decision.subject == Subject::Ps);
    let actions: Vec<_> = made.map(|made| made.action).collect();
    assert_eq!(actions[0], Action::Rebalance { replicas: 3 });
    assert!(matches!(actions[1], Action::Scale { from: 3, .. }), "{actions:?}");
    assert_eq!(actions.iter().filter(|action| matches!(action, Action::Rebalance { .. })).count(), 1, "{actions:?}");

    // Servers with little load, and almost even servers, are not worth moving rows for.
    for world in [World { look_up_load: 0.5, table_bytes: 1e9, ..uneven() }, World { unevenness: 1.15, ..uneven() }] {
        let (mut world, mut history) = (world, History::default());
        world.run(&policy, &mut history, 3600);
        let is_rebalance = |decision: &Decision| matches!(decision.action, Action::Rebalance { .. });
        assert!(!world.log.iter().any(is_rebalance), "{:?}", world.log);
    }
}

#[test]
fn a_slow_server_gets_no_other_beside_it() {
    let policy = policy(3, 8);
    // All are busy for 0.2 of the time, unless they are slow.
    let decisions = |slow: &[usize]| {
        let world = World { look_up_load: 0.6, table_bytes: 1e9, ps: 3, noise: 0.0, ..World::new(1) };
        let (mut world, mut history) = (world, History::default());
        let mut made = Vec::new();
        for _ in 0..60 {
            world.now += INTERVAL;
            let mut observations = world.observe();
            slow.iter().for_each(|index| observations.ps[*index].busy = Some(1.0));
            made.extend(history.advance(&policy, &observations));
        }
        made.into_iter().filter(|decision| decision.subject == Subject::Ps).collect::<Vec<_>>()
    };
    let one_is_slow = decisions(&[1]);
    assert!(one_is_slow.iter().all(|decision| decision.action == Action::Keep), "{one_is_slow:?}");
    let reason = &one_is_slow.last().unwrap().reason;
    assert!(reason.contains("replica 1 takes 5.0 times as long for a row"), "{reason}");
    // If all of them are as busy, they have too much work.
    let all = decisions(&[0, 1, 2]);
    assert!(all.iter().any(|decision| matches!(decision.action, Action::Scale { from: 3, .. })), "{all:?}");
}

#[test]
fn a_number_that_was_too_few_is_not_retried_for_a_while() {
    let policy = policy(1, 8);
    // One server is busy for 0.9 of the time, and two for 0.22 each, which looks as if one were
    // enough.
    let world = World { look_up_load: 0.9, seen_of_several: 0.5, table_bytes: 1e9, ps: 1, ..World::new(1) };
    let (mut world, mut history) = (world, History::default());
    let (out, back) = (Action::Scale { from: 1, to: 2 }, Action::Scale { from: 2, to: 1 });
    let of_ps = |world: &World| -> Vec<Action> {
        world.log.iter().filter(|decision| decision.subject == Subject::Ps).map(|decision| decision.action).collect()
    };
    // Twelve cool-downs are an hour.
    world.run(&policy, &mut history, 3000);
    assert_eq!(of_ps(&world), [out, back, out]);
    let keeps = rectrain_policy::decide(&policy, &world.observe(), &history);
    let reason = &keeps.iter().find(|decision| decision.subject == Subject::Ps).unwrap().reason;
    assert!(reason.contains("1 were too few when tried"), "{reason}");
    // A history restored from the decisions knows it as well.
    let mut again = History::from_decisions(history.decisions().iter().cloned());
    world.run(&policy, &mut again, 600);
    assert_eq!(of_ps(&world), [out, back, out]);
    // Later it may be tried once more, and so may a number that was outgrown by a changed load.
    world.seen_of_several = 1.0;
    world.look_up_load = 0.5;
    world.run(&policy, &mut again, 3600);
    assert_eq!(of_ps(&world), [out, back, out, back]);
    world.look_up_load = 0.9;
    world.run(&policy, &mut again, 600);
    world.look_up_load = 0.5;
    world.run(&policy, &mut again, 1200);
    assert_eq!(of_ps(&world)[4..], [out, back], "the load had changed");
}

#[test]
fn dense_workers_are_added_until_one_more_adds_the_target() {
    let policy = policy(1, 64);
    let (mut world, mut history) = (World { work: 4.0, overhead: 0.1, ..World::new(1) }, History::default());
    world.run(&policy, &mut history, 3600);
    // C·n = 4, O = 0.1, θ = 0.6: 40 · 0.4 / 0.6.
    assert_eq!(world.dense_worker, 26);
}

#[test]
fn a_price_and_a_cost_limit_bound_the_dense_workers() {
    let mut policy = policy(1, 64);
    let dense = policy.dense_worker.as_mut().unwrap();
    dense.price_per_hour = Some(3.6);
    // A step of 65,536 rows may take 4.8 worker-seconds at 0.001 a second: 4 of work and 8 · 0.1 of
    // overhead.
    dense.max_cost_per_million = Some(4.8e-3 / 0.065_536 + 1e-9);
    let (mut world, mut history) =
        (World { work: 4.0, overhead: 0.1, dense_worker: 4, ..World::new(1) }, History::default());
    world.run(&policy, &mut history, 3600);
    assert_eq!(world.dense_worker, 8, "{:#?}", world.log);
    assert!(last(&world, Subject::DenseWorker).unwrap().reason.contains("a million samples cost"));
}

#[test]
fn workers_without_gain_are_removed_and_not_retried_for_a_while() {
    let policy = policy(1, 64);
    let mut world = World { work: 8.0, overhead: 0.1, ..World::new(1) };
    // The data arrives no faster than eight workers train it.
    world.most_samples = 65_536.0 / 1.1;
    let mut history = History::default();
    world.run(&policy, &mut history, 3600);
    assert_eq!(world.dense_worker, 8, "{:#?}", world.log);
    assert_eq!(world.log.iter().filter(|decision| decision.subject == Subject::DenseWorker).count(), 2);
}

#[test]
fn a_recommendation_is_made_once_and_reverted_when_it_is_outdated() {
    let mut policy = policy(1, 64);
    policy.scaling.recommends_only = true;
    policy.mode = None;
    policy.dense_worker = None;
    let (mut world, mut history) = (World { embedding_load: 4.0, ..World::new(1) }, History::default());
    let mut told = Vec::new();
    let mut watch = |world: &mut World, history: &mut History, seconds: u64| {
        for _ in 0..seconds / INTERVAL {
            world.now += INTERVAL;
            told.extend(history.advance(&policy, &world.observe()).into_iter().filter(Decision::acts));
        }
    };
    watch(&mut world, &mut history, 3600);
    world.embedding_load = 1.5;
    watch(&mut world, &mut history, 3600);
    let actions: Vec<_> = told.iter().map(|decision| (decision.subject, decision.action)).collect();
    let expected = [Action::Scale { from: 3, to: 6 }, Action::Scale { from: 6, to: 3 }];
    assert_eq!(actions, expected.map(|action| (Subject::EmbeddingWorker, action)), "{told:#?}");
}

#[test]
fn new_bounds_in_the_manifest_apply_at_once() {
    let (mut world, mut history) = (World::new(1), History::default());
    world.run(&policy(1, 64), &mut history, 600);
    let before = world.ps;
    world.run(&policy(before + 3, 64), &mut history, 2 * INTERVAL);
    let decision = last(&world, Subject::Ps).unwrap();
    assert_eq!(decision.action, Action::Scale { from: before, to: before + 3 }, "{}", decision.reason);
}

#[test]
fn a_history_restored_from_decisions_keeps_dwell_and_limits() {
    let policy = policy(8, 8);
    let (mut world, mut history) = (World { slowdown: 3.0, ..World::new(1) }, History::default());
    world.run(&policy, &mut history, 200);
    let mut again = History::from_decisions(history.decisions().iter().cloned());
    assert_eq!(again.decisions(), history.decisions());
    assert_eq!(again.decided_mode(), Some(AutoMode::Gba));
    world.log.clear();
    world.run(&policy, &mut again, 100);
    assert_eq!(world.log, [], "no decision within the cool-down");
}

#[test]
fn a_large_margin_can_be_passed() {
    let mut policy = policy(8, 8);
    policy.mode.as_mut().unwrap().margin = 1.5;
    let (mut world, mut history) = (World { slowdown: 4.0, ..World::new(1) }, History::default());
    world.run(&policy, &mut history, 300);
    assert_eq!(world.mode, AutoMode::Sync, "it is not enough");
    world.slowdown = 30.0;
    world.run(&policy, &mut history, 300);
    assert_eq!(world.mode, AutoMode::Gba, "{:?}", world.log);
}

#[test]
fn a_decision_made_elsewhere_starts_the_cool_down() {
    let policy = policy(1, 8);
    let mut world = World { look_up_load: 3.0, ..World::new(1) };
    let mut history = History::default();
    let mut look = |elsewhere: &[Decision]| {
        world.now += INTERVAL;
        let mut observations = world.observe();
        observations.decided_elsewhere = elsewhere.to_vec();
        history.advance(&policy, &observations);
        history.decisions().iter().filter(|made| made.subject == Subject::Ps).count()
    };
    assert!((0..4).all(|_| look(&[]) == 0));
    let killed = Decision {
        at_seconds: 1_000_000 + 4 * INTERVAL,
        subject: Subject::Ps,
        action: Action::Scale { from: 1, to: 2 },
        reason: String::new(),
    };
    assert_eq!(look(std::slice::from_ref(&killed)), 1);
    assert!((0..20).all(|_| look(&[]) == 1), "the cool-down of that one");
    assert_eq!(history.unknown([killed]), []);
}

#[test]
fn a_table_that_is_restored_does_not_grow() {
    let policy = policy(1, 8);
    let (mut world, mut history) = (World { look_up_load: 0.9, ..World::new(1) }, History::default());
    world.run(&policy, &mut history, 120);
    assert!(last(&world, Subject::Ps).is_none(), "{:?}", world.log);
    for look in 0..40 {
        world.now += INTERVAL;
        let mut observations = world.observe();
        observations.attempt = 2;
        // The servers restore their rows one after the other.
        observations.ps[0].bytes *= u64::from(look > 3);
        observations.ps[1].bytes *= u64::from(look > 6);
        let decided = history.advance(&policy, &observations);
        assert!(decided.iter().all(|decision| decision.subject != Subject::Ps || !decision.acts()), "{decided:?}");
    }
}

#[test]
fn idle_workers_of_sync_count_for_gba_and_no_more_are_added() {
    let worker = |seconds: f64| Worker { batch_rows: 512, compute_seconds: vec![seconds] };
    let all = with_idle(vec![worker(0.2), worker(0.4)], 4);
    let mean = |worker: &Worker| worker.compute_seconds.iter().sum::<f64>() / worker.compute_seconds.len() as f64;
    assert_eq!(all.iter().map(mean).map(|mean| (mean * 1e6).round()).collect::<Vec<_>>(), [2e5, 4e5, 3e5, 3e5]);
    assert_eq!(with_idle(Vec::new(), 4), [], "nothing is known");
    let policy = policy(1, 16);
    let (mut world, mut history) = (World::new(1), History::default());
    for _ in 0..40 {
        world.now += INTERVAL;
        let observations = Observations { barrier_workers: Some(4), ..world.observe() };
        let decided = history.advance(&policy, &observations);
        let of_workers = decided.iter().find(|decision| decision.subject == Subject::DenseWorker).unwrap();
        assert!(!of_workers.acts() && of_workers.reason.contains("would idle"), "{of_workers:?}");
    }
}
