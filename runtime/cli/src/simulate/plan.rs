//! Makes the runs of a [`SimulationSpec`]: one for each number of workers and each mode, in that
//! order. Pure.

use rectrain_crds::simulation::{
    SimulatedLostTokens, SimulationDocument, SimulationSpec, SlowMembersSpec, StragglersSpec,
};
use rectrain_crds::{ManifestError, Mode, SyncPieces, defaults};
use rectrain_modes::gba::{BufferSize, BufferSizeError, Decay, LostTokens};
use rectrain_modes::shadow::Shadow;
use rectrain_modes::simulate::{
    Cause, ClusterSpec, Crashes, EmbeddingSpec, LinkSpec, LoaderSpec, MemberSlowness, ServerSpec, Simulation, Slowness,
    StepTime, WorkerSpec,
};
use rectrain_modes::{ModeSettings, TrainingMode};
use rectrain_random::SplitMix64;

use super::trace::Trace;

/// The most points of a curve over time.
const MOST_INTERVALS: f64 = 96.0;
/// A point of the curve covers about this many batches of a worker, so that single steps do not
/// show as noise.
const BATCHES_PER_INTERVAL: f64 = 20.0;

/// All runs of a document. `trace` is the content of the file `spec.trace`.
pub(crate) fn simulations(
    document: &SimulationDocument<'_>,
    trace: Option<&Trace>,
) -> Result<Vec<Simulation>, ManifestError> {
    let spec = &document.spec;
    let mut simulations = Vec::new();
    for &workers in &spec.workers {
        let cluster = cluster(spec, trace, workers);
        for &mode in &spec.modes {
            let pulls = mode == Mode::Sync && spec.sync.pieces == SyncPieces::Pulled;
            let (own_rows, path) = match mode {
                Mode::Sync if pulls => (spec.sync.local_batch_size, "spec.sync.localBatchSize"),
                Mode::Gba => (spec.gba.local_batch_size, "spec.gba.localBatchSize"),
                _ => (None, "spec.workers"),
            };
            let local_rows = own_rows.unwrap_or(spec.local_batch_size);
            let settings = mode_settings(spec, workers, local_rows)
                .map_err(|error| document.refuse(path, format!("with {workers} workers, {error}")))?;
            simulations.push(Simulation {
                cluster: cluster.clone(),
                mode: TrainingMode::of(mode, &settings),
                local_rows,
                pieces: settings.gba_buffer.get(),
                seconds: spec.seconds,
                intervals: intervals(spec, trace),
                seed: spec.seed,
            });
        }
    }
    Ok(simulations)
}

/// The settings of all modes for this many workers. `local_rows` are the rows of a local batch in
/// `gba`, or of a pulled piece in `sync`.
fn mode_settings(spec: &SimulationSpec, workers: u32, local_rows: u32) -> Result<ModeSettings, BufferSizeError> {
    Ok(ModeSettings {
        sync_pieces: spec.sync.pieces,
        hybrid_staleness: u64::from(spec.hybrid.staleness.unwrap_or(defaults::STALENESS)),
        gba_buffer: BufferSize::of_global_batch(u64::from(spec.local_batch_size), workers, u64::from(local_rows))?,
        gba_decay: Decay::Threshold { tolerance: u64::from(spec.gba.staleness) },
        gba_lost_tokens: match spec.gba.lost_tokens {
            SimulatedLostTokens::Vanish => LostTokens::Vanish,
            SimulatedLostTokens::Replace => LostTokens::Replace,
        },
        hop_bs_bound: u64::from(spec.hop_bs.bound.unwrap_or(defaults::HOP_BS_BOUND)),
        hop_bw_backups: spec.hop_bw.backups.unwrap_or(workers / 4),
        bsp_aggregate: BufferSize::new(spec.bsp.aggregate.unwrap_or((workers / 8).max(1)))?,
        shadow: Shadow::default(),
    })
}

fn intervals(spec: &SimulationSpec, trace: Option<&Trace>) -> usize {
    let traced = trace.and_then(|trace| trace.workers.first()).map_or(&spec.step_seconds[..], |seconds| seconds);
    let mean = traced.iter().sum::<f64>() / traced.len().max(1) as f64;
    (spec.seconds / (BATCHES_PER_INTERVAL * mean)).clamp(4.0, MOST_INTERVALS) as usize
}

fn cluster(spec: &SimulationSpec, trace: Option<&Trace>, workers: u32) -> ClusterSpec {
    let mut cluster = ClusterSpec {
        workers: (0..workers as usize).map(|rank| worker(spec, trace, rank)).collect(),
        servers: servers(spec, workers),
        slots_move: spec.servers.move_slots,
        embedding: embedding(spec),
        loaders: loaders(spec, workers),
        link: LinkSpec {
            latency_seconds: spec.network.latency_seconds,
            bytes_per_second: spec.network.bytes_per_second,
            dense_bytes: spec.network.dense_bytes,
            embedding_bytes_per_row: spec.network.embedding_bytes_per_row,
        },
        detection_seconds: spec.network.detection_seconds,
    };
    let mut next = 0;
    for group in &spec.stragglers {
        for rank in members(group, workers, &mut next) {
            if let Some(worker) = cluster.workers.get_mut(rank as usize) {
                trouble(worker, group, fraction(spec.seed, rank));
            }
        }
    }
    cluster
}

fn worker(spec: &SimulationSpec, trace: Option<&Trace>, rank: usize) -> WorkerSpec {
    let step = match trace {
        Some(trace) => {
            let (copy, place) = (rank / trace.workers.len(), rank % trace.workers.len());
            let batch_seconds = trace.workers[place].clone();
            // Workers that share a trace start at different batches of it. Multiples of the golden
            // ratio spread the starts evenly.
            let first = (copy as f64 * 0.618_033_988_75).fract() * batch_seconds.len() as f64;
            StepTime::Trace { batch_seconds, first: first as usize }
        }
        None => StepTime::Constant {
            seconds_per_batch: spec.overhead_seconds,
            seconds_per_row: (spec.step_seconds[rank % spec.step_seconds.len()] - spec.overhead_seconds)
                / f64::from(spec.local_batch_size),
        },
    };
    WorkerSpec { step, slowness: Vec::new(), link_slowness: 1.0, crashes: None }
}

fn servers(spec: &SimulationSpec, workers: u32) -> Vec<ServerSpec> {
    let count = spec.servers.count.unwrap_or((workers / 100).clamp(2, 64));
    let server = |slowness| ServerSpec {
        seconds_per_request: spec.servers.request_seconds,
        bytes_per_second: spec.servers.bytes_per_second,
        slowness,
    };
    slowness(count, spec.servers.slow).map(server).collect()
}

/// The embedding workers, if they take time.
fn embedding(spec: &SimulationSpec) -> Option<EmbeddingSpec> {
    let embedding = &spec.embedding_workers;
    (embedding.batch_seconds > 0.0).then(|| EmbeddingSpec {
        workers: slowness(embedding.count, embedding.slow).collect(),
        seconds_per_row: embedding.batch_seconds / f64::from(spec.local_batch_size),
        pieces_move: embedding.move_pieces,
    })
}

/// The loaders, if they take time.
fn loaders(spec: &SimulationSpec, workers: u32) -> Option<LoaderSpec> {
    let loaders = &spec.loaders;
    (loaders.batch_seconds > 0.0).then(|| LoaderSpec {
        loaders: slowness(loaders.count, loaders.slow).collect(),
        seconds_per_row: loaders.batch_seconds / f64::from(spec.local_batch_size),
        chunk_rows: u64::from(loaders.batches_per_chunk) * u64::from(workers) * u64::from(spec.local_batch_size),
        chunk_batches: u64::from(loaders.batches_per_chunk),
        chunks_move: loaders.move_chunks,
    })
}

/// When each of `count` members of a role is slow.
fn slowness(count: u32, slow: Option<SlowMembersSpec>) -> impl Iterator<Item = Option<MemberSlowness>> {
    (0..count).map(move |member| {
        slow.filter(|slow| member < slow.count).map(|slow| MemberSlowness {
            factor: slow.factor,
            from_seconds: slow.from_seconds,
            until_seconds: slow.until_seconds.unwrap_or(f64::INFINITY),
        })
    })
}

/// The workers of a group. `next` is the first worker of the next group that is given as a share.
fn members(group: &StragglersSpec, workers: u32, next: &mut u32) -> Vec<u32> {
    if let Some(ranks) = &group.workers {
        return ranks.clone();
    }
    let count = (group.share.unwrap_or(1.0) * f64::from(workers)).round().clamp(1.0, f64::from(workers)) as u32;
    let first = *next;
    *next = (first + count) % workers;
    (0..count).map(|place| (first + place) % workers).collect()
}

/// Applies a group's slowness and crashes to a worker. The worker starts at `phase` (0 to 1) of its
/// first period.
fn trouble(worker: &mut WorkerSpec, group: &StragglersSpec, phase: f64) {
    let constant = group.factor.map(|factor| match (group.period_seconds, group.slow_seconds) {
        (Some(period_seconds), Some(slow_seconds)) => {
            Cause::Periodic { factor, period_seconds, slow_seconds, offset_seconds: phase * period_seconds }
        }
        _ => Cause::Constant { factor },
    });
    let heavy = group.heavy_tail.map(|tail| Cause::HeavyTailed {
        probability: tail.probability,
        shape: tail.shape,
        limit: tail.limit,
    });
    let until_seconds = group.until_seconds.unwrap_or(f64::INFINITY);
    let slowness = |cause| Slowness { cause, from_seconds: group.from_seconds, until_seconds };
    worker.slowness.extend(constant.into_iter().chain(heavy).map(slowness));
    worker.link_slowness *= group.link_factor.unwrap_or(1.0);
    if let Some(crashes) = group.crashes {
        worker.crashes = Some(Crashes {
            mean_seconds_between: crashes.mean_seconds_between,
            recovery_seconds: crashes.recovery_seconds,
        });
    }
}

/// A pseudo-random number in [0, 1) from the seed and the worker's rank.
fn fraction(seed: u64, rank: u32) -> f64 {
    rectrain_random::unit(SplitMix64::new(seed).nth(u64::from(rank)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rectrain_modes::gba::TokenMode;

    fn plan(spec: &str, trace: Option<&Trace>) -> Result<Vec<Simulation>, String> {
        let text = format!("apiVersion: rectrain.dev/v1alpha1\nkind: Simulation\nspec: {spec}\n");
        let document =
            rectrain_crds::simulation::load_simulation(&text, "s.yaml", &[]).map_err(|error| error.to_string())?;
        simulations(&document, trace).map_err(|error| error.to_string())
    }

    fn slow_ranks(simulation: &Simulation) -> Vec<usize> {
        let workers = simulation.cluster.workers.iter().enumerate();
        workers.filter(|(_, worker)| !worker.slowness.is_empty()).map(|(rank, _)| rank).collect()
    }

    #[test]
    fn every_number_of_workers_runs_in_every_mode() {
        let names: Vec<_> = plan("{workers: [4, 8]}", None)
            .unwrap()
            .iter()
            .map(|simulation| (simulation.cluster.workers.len(), simulation.mode.name()))
            .collect();
        let modes = ["sync", "hybrid", "async", "gba", "hopBs", "hopBw", "bsp", "shadow", "des"];
        assert_eq!(names, [4, 8].iter().flat_map(|n| modes.map(|mode| (*n, mode))).collect::<Vec<_>>());
    }

    #[test]
    fn groups_get_their_shares_of_workers_in_order() {
        let spec = "{modes: sync, workers: 8, stragglers: [{share: 0.25, factor: 4}, {share: 0.5, linkFactor: 3}, \
                    {share: 0.375, factor: 2}, {workers: [4], factor: 9}]}";
        let simulation = plan(spec, None).unwrap().remove(0);
        assert_eq!(slow_ranks(&simulation), [0, 1, 4, 6, 7], "the third group is 6, 7 and, after a wrap-around, 0");
        let links: Vec<f64> = simulation.cluster.workers.iter().map(|worker| worker.link_slowness).collect();
        assert_eq!(links, [1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0]);
        assert_eq!(simulation.cluster.workers[0].slowness.len(), 2);
        let few = plan("{modes: sync, workers: 3, stragglers: [{share: 0.01, factor: 4}]}", None).unwrap();
        assert_eq!(slow_ranks(&few[0]), [0], "a group has at least one worker");
    }

    #[test]
    fn a_local_batch_that_does_not_divide_the_global_batch_is_refused() {
        let runs = plan("{modes: gba, workers: 8, localBatchSize: 400, gba: {localBatchSize: 100}}", None).unwrap();
        let TrainingMode::Tokens(TokenMode::Gba { buffer, .. }) = runs[0].mode else { panic!("{:?}", runs[0].mode) };
        assert_eq!((buffer.get(), runs[0].local_rows), (32, 100));
        let error = plan("{modes: gba, localBatchSize: 100, gba: {localBatchSize: 300}}", None).unwrap_err();
        assert!(error.starts_with("s.yaml:3:") && error.contains("spec.gba.localBatchSize: with 8 workers"), "{error}");
        assert!(error.contains("200 or 400"), "{error}");
    }

    #[test]
    fn a_pulled_piece_has_rows_of_its_own() {
        let pulled = "workers: 4, localBatchSize: 384, sync: {pieces: pulled, localBatchSize: 128}";
        let runs = plan(&format!("{{modes: [sync, gba, des], {pulled}}}"), None).unwrap();
        let sizes: Vec<_> = runs.iter().map(|run| (run.mode.kind(), run.local_rows, run.pieces)).collect();
        assert_eq!(sizes, [(Mode::Sync, 128, 12), (Mode::Gba, 384, 4), (Mode::Des, 384, 4)]);
        assert_eq!((runs[0].mode, runs[2].mode), (TrainingMode::Pulled, TrainingMode::Des));
        let error = plan("{modes: sync, sync: {pieces: pulled, localBatchSize: 300}}", None).unwrap_err();
        assert!(error.contains("spec.sync.localBatchSize: with 8 workers"), "{error}");
    }

    #[test]
    fn step_times_and_traces_are_assigned_round_robin() {
        let runs = plan("{modes: sync, workers: 3, localBatchSize: 10, stepSeconds: [0.2, 0.4]}", None).unwrap();
        let seconds: Vec<f64> = runs[0]
            .cluster
            .workers
            .iter()
            .map(|worker| match worker.step {
                StepTime::Constant { seconds_per_batch, seconds_per_row } => seconds_per_batch + 10.0 * seconds_per_row,
                StepTime::Trace { .. } => f64::NAN,
            })
            .collect();
        assert_eq!(seconds, [0.2, 0.4, 0.2]);
        let trace = Trace { workers: vec![[0.1, 0.2, 0.3, 0.4].as_slice().into(), [1.0].as_slice().into()] };
        let runs = plan("{modes: sync, workers: 4, trace: t.csv}", Some(&trace)).unwrap();
        let StepTime::Trace { batch_seconds, first } = &runs[0].cluster.workers[2].step else { panic!("no trace") };
        assert_eq!(
            (batch_seconds, *first),
            (&trace.workers[0], 2),
            "the second worker of a trace starts at another batch"
        );
    }

    #[test]
    fn the_first_servers_are_slow_for_their_time() {
        let servers = |slow: &str| {
            let spec = format!("{{modes: sync, servers: {{count: 3, moveSlots: true, slow: {{{slow}}}}}}}");
            let cluster = plan(&spec, None).unwrap().remove(0).cluster;
            assert!(cluster.slots_move);
            let span = |slow: MemberSlowness| (slow.factor, slow.from_seconds, slow.until_seconds);
            cluster.servers.iter().map(|server| server.slowness.map(span)).collect::<Vec<_>>()
        };
        let always = Some((10.0, 0.0, f64::INFINITY));
        assert_eq!(servers("count: 2, factor: 10"), [always, always, None]);
        assert_eq!(servers("factor: 10, fromSeconds: 3, untilSeconds: 9"), [Some((10.0, 3.0, 9.0)), None, None]);
        assert!(!plan("{modes: sync}", None).unwrap()[0].cluster.slots_move);
    }

    #[test]
    fn embedding_workers_take_part_if_they_take_time() {
        let embedding = |spec: &str| {
            let spec = format!("{{modes: sync, localBatchSize: 100, embeddingWorkers: {{{spec}}}}}");
            plan(&spec, None).unwrap().remove(0).cluster.embedding
        };
        assert_eq!(embedding("count: 3"), None);
        let slow = MemberSlowness { factor: 8.0, from_seconds: 3.0, until_seconds: f64::INFINITY };
        assert_eq!(
            embedding("batchSeconds: 0.5, movePieces: true, slow: {factor: 8, fromSeconds: 3}"),
            Some(EmbeddingSpec { workers: vec![Some(slow), None], seconds_per_row: 0.005, pieces_move: true })
        );
    }

    #[test]
    fn a_chunk_has_global_batches_of_all_workers() {
        let loaders = |spec: &str| {
            let spec = format!("{{modes: sync, workers: 3, localBatchSize: 100, loaders: {{{spec}}}}}");
            plan(&spec, None).unwrap().remove(0).cluster.loaders
        };
        assert_eq!(loaders("count: 3"), None);
        let slow = MemberSlowness { factor: 8.0, from_seconds: 0.0, until_seconds: 9.0 };
        assert_eq!(
            loaders("batchSeconds: 0.5, batchesPerChunk: 2, moveChunks: true, slow: {factor: 8, untilSeconds: 9}"),
            Some(LoaderSpec {
                loaders: vec![Some(slow), None],
                seconds_per_row: 0.005,
                chunk_rows: 600,
                chunk_batches: 2,
                chunks_move: true
            })
        );
    }
}
