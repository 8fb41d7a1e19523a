//! The observations of a job that trains, from the metrics of its processes.

use std::collections::BTreeMap;

use jiff::Timestamp;
use rectrain_crds::{DataSource, RecTrainingJob, ResolvedJob, Role, SyncPieces};
use rectrain_policy::{
    AutoMode, ClusterLoad, EmbeddingWorkerLoad, LoaderLoad, LoaderUse, Observations, PsLoad, ReplicaCount, Replicas,
    Worker,
};
use rectrain_proto::metric_names;

use super::memory::memory_limit;
use crate::coordinator_view::Report;
use crate::members;
use crate::names::manifest_replicas;
use crate::pods::PodFacts;
use crate::scrape::MetricsDelta;

/// The changes of the metrics of a job's processes, by role and index.
pub type Deltas = BTreeMap<(Role, u32), MetricsDelta>;

/// One look at a job that trains.
#[derive(Clone, Copy)]
pub struct JobLook<'a> {
    /// The job.
    pub job: &'a RecTrainingJob,
    /// Its manifest, resolved.
    pub resolved: &'a ResolvedJob,
    /// The present.
    pub now: Timestamp,
    /// Its coordinator's report.
    pub report: &'a Report,
    /// The pods of its attempt.
    pub pods: &'a [PodFacts],
    /// The changes of its metrics.
    pub deltas: &'a Deltas,
    /// The load of its nodes.
    pub nodes: ClusterLoad,
    /// The seconds since the previous look, and the rows of the stream that waited then.
    pub lag_before: Option<(f64, u64)>,
}

impl<'a> JobLook<'a> {
    /// The observations for the policy.
    #[must_use]
    pub fn observations(&self) -> Observations {
        let training = &self.resolved.training;
        let workers = self.present(Role::DenseWorker) as usize;
        let local = training.local_batch_size.unwrap_or(training.global_batch_size / workers.max(1));
        let mode = self.report.mode.and_then(|mode| AutoMode::try_from(mode).ok());
        let pulls_pieces = training.sync_pieces == SyncPieces::Pulled;
        let dense = self.dense_workers(mode, workers);
        let counted = Some(self.report.samples_per_second).filter(|rate| *rate > 0.0);
        let pulls_now = pulls_pieces && mode == Some(AutoMode::Sync);
        let pending = self.pods.iter().filter(|pod| pod.unschedulable.is_some()).count();
        Observations {
            at_seconds: u64::try_from(self.now.as_second()).unwrap_or(0),
            mode,
            global_batch_rows: u32::try_from(training.global_batch_size).unwrap_or(u32::MAX),
            local_batch_rows: u32::try_from(local).unwrap_or(u32::MAX),
            pulls_pieces,
            staleness_tolerance: training.gba_staleness,
            workers: dense.workers,
            barrier_workers: training.barrier_workers.and_then(|workers| u32::try_from(workers).ok()),
            all_reduce_seconds: dense.all_reduce_seconds.filter(|_| !pulls_pieces),
            exchange_seconds: dense.exchange_seconds,
            wait_seconds: dense.wait_seconds,
            // Two workers may have computed the same piece. The coordinator counts its rows once.
            samples_per_second: if pulls_now { counted } else { dense.samples_per_second },
            ps: self.parameter_servers(),
            embedding_workers: embedding_worker_load(self.of_role(Role::EmbeddingWorker)),
            loaders: self.loaders(),
            loader_use: self.loader_use(),
            cluster: ClusterLoad { pending_pods: u32::try_from(pending).unwrap_or(u32::MAX), ..self.nodes },
            replicas: Replicas {
                ps: self.count(Role::Ps),
                embedding_worker: self.count(Role::EmbeddingWorker),
                dense_worker: self.count(Role::DenseWorker),
                loader: self.count(Role::Loader),
            },
            ..Observations::default()
        }
    }

    fn of_role(&self, role: Role) -> impl Iterator<Item = &'a MetricsDelta> + Clone + use<'a> {
        self.deltas.iter().filter(move |((of, _), _)| *of == role).map(|(_, delta)| delta)
    }

    /// The members of a role that participate.
    fn present(&self, role: Role) -> u32 {
        let reported = self.report.members.get(&role);
        reported.map_or_else(|| manifest_replicas(role, self.resolved), |members| members.present)
    }

    fn wanted(&self, role: Role) -> u32 {
        members::wanted(self.job.status.as_ref(), self.resolved, role)
    }

    fn count(&self, role: Role) -> Option<ReplicaCount> {
        let is_ready = |pod: &&PodFacts| pod.role == role && pod.is_ready && !pod.is_terminating;
        let ready = self.pods.iter().filter(is_ready).count();
        // A ready pod participates only once it owns slots or batches.
        let ready = u32::try_from(ready).unwrap_or(u32::MAX).min(self.present(role));
        Some(ReplicaCount { wanted: self.wanted(role), ready })
    }

    fn dense_workers(&self, mode: Option<AutoMode>, workers: usize) -> DenseWorkers {
        let measured: Vec<_> = self.of_role(Role::DenseWorker).filter_map(Measured::of).collect();
        // With a barrier the waits of a fast worker contain the slowness of the others. Without one
        // the waits of a slow worker contain its own slowness. The smallest value is the wait
        // itself.
        let least = |value: fn(&Measured) -> f64| measured.iter().map(value).reduce(f64::min);
        let is_sync = mode == Some(AutoMode::Sync);
        // A worker without a step may be the slow one, so the modes are compared only with all
        // workers.
        let is_complete =
            measured.len() == workers || self.resolved.training.barrier_workers == Some(measured.len()) && is_sync;
        let measured_workers = || measured.iter().map(|measured| measured.worker.clone()).collect();
        DenseWorkers {
            workers: if is_complete { rectrain_policy::with_idle(measured_workers(), workers) } else { Vec::new() },
            all_reduce_seconds: least(|m| m.all_reduce).filter(|_| is_sync),
            exchange_seconds: least(|m| m.other).filter(|_| mode == Some(AutoMode::Gba)),
            wait_seconds: least(|m| m.wait).unwrap_or(0.0),
            samples_per_second: (!measured.is_empty()).then(|| measured.iter().map(|m| m.samples_per_second).sum()),
        }
    }

    /// The loaders of a stream. `None` if the job reads none, or if a loader was not measured.
    fn loaders(&self) -> Option<LoaderLoad> {
        let stream = self.report.stream.as_deref()?;
        let (seconds, lag_before) = self.lag_before?;
        let loaders = self.of_role(Role::Loader).map(LoaderTimes::of).collect::<Option<Vec<_>>>()?;
        if loaders.is_empty() || u32::try_from(loaders.len()) != Ok(self.present(Role::Loader)) {
            return None;
        }
        let mean = |share: fn(&LoaderTimes) -> f64| loaders.iter().map(share).sum::<f64>() / loaders.len() as f64;
        let read: f64 = loaders.iter().map(|loader| loader.rows_per_second).sum();
        let grown = (stream.lag_rows as f64 - lag_before as f64) / seconds;
        Some(LoaderLoad {
            most_useful: stream.partitions,
            lag_rows: stream.lag_rows as f64,
            arriving: (read + grown).max(0.0),
            read,
            reading_share: mean(|loader| loader.reading).min(1.0),
            waiting_share: mean(|loader| loader.waiting).min(1.0),
        })
    }

    /// The use of the loaders. `None` for a stream, whose loaders wait for records.
    fn loader_use(&self) -> Option<LoaderUse> {
        if matches!(self.resolved.data.source, DataSource::Stream(_) | DataSource::Follow(_)) {
            return None;
        }
        let waiting = self.of_role(Role::DenseWorker).filter_map(waiting_for_data).reduce(f64::min)?;
        let mut reading: Vec<f64> = self.of_role(Role::Loader).filter_map(reading_share).collect();
        reading.sort_by(f64::total_cmp);
        // The lower median: a slow loader does not count.
        let median = *reading.get(reading.len().checked_sub(1)? / 2)?;
        Some(LoaderUse { waiting, reading: median.clamp(0.0, 1.0) })
    }

    /// All parameter servers, or none if one of them is missing: the policy needs the memory of
    /// all.
    fn parameter_servers(&self) -> Vec<PsLoad> {
        let limit_bytes = memory_limit(self.job);
        let servers = (0..).zip(self.of_role(Role::Ps)).map(|(index, delta)| PsLoad {
            bytes: delta.value(metric_names::PS_BYTES) as u64,
            limit_bytes,
            busy: delta
                .busy_share(&[metric_names::PS_LOOKUP_SECONDS, metric_names::PS_UPDATE_SECONDS])
                .map(|busy| busy.min(1.0)),
            look_ups_per_second: delta
                .rate_of(&[metric_names::PS_FOUND_ROWS_TOTAL, metric_names::PS_INSERTED_ROWS_TOTAL]),
            oom_kills: self.oom_kills(index),
        });
        let servers: Vec<_> = servers.collect();
        if u32::try_from(servers.len()) == Ok(self.wanted(Role::Ps)) { servers } else { Vec::new() }
    }

    /// Restarts of a parameter server, if its last container was killed for its memory.
    fn oom_kills(&self, index: u32) -> u32 {
        let pod = self.pods.iter().find(|pod| pod.role == Role::Ps && pod.index() == Some(index));
        let killed = pod.filter(|pod| pod.ended.as_ref().is_some_and(|ended| ended.out_of_memory));
        killed.map_or(0, |pod| pod.restarts)
    }
}

/// A loader since the previous scrape.
struct LoaderTimes {
    rows_per_second: f64,
    /// Shares of the time.
    reading: f64,
    waiting: f64,
}

impl LoaderTimes {
    /// `None` if its process is new.
    fn of(delta: &MetricsDelta) -> Option<Self> {
        Some(Self {
            rows_per_second: delta.rate_of(&[metric_names::LOADER_ROWS_TOTAL])?,
            reading: reading_share(delta)?,
            waiting: delta.busy_share(&[metric_names::LOADER_ACCEPT_SECONDS])?,
        })
    }
}

/// The share of the time that a loader reads, or predicts what it has read with a frozen model.
/// `None` if its process is new.
fn reading_share(delta: &MetricsDelta) -> Option<f64> {
    let read = delta.busy_share(&[metric_names::LOADER_READ_SECONDS])?;
    // A loader of an earlier version has no such metric.
    Some(read + delta.busy_share(&[metric_names::LOADER_PREDICT_SECONDS]).unwrap_or(0.0))
}

/// The share of the time that a dense worker waits for data. `None` without a step.
fn waiting_for_data(delta: &MetricsDelta) -> Option<f64> {
    let waited = delta.sum(metric_names::DENSE_WORKER_BATCH_WAIT_SECONDS).unwrap_or(0.0);
    let stepped = delta.sum(metric_names::DENSE_WORKER_STEP_SECONDS)?;
    (stepped > 0.0).then(|| (waited / (waited + stepped)).clamp(0.0, 1.0))
}

/// The dense workers together.
struct DenseWorkers {
    workers: Vec<Worker>,
    all_reduce_seconds: Option<f64>,
    exchange_seconds: Option<f64>,
    wait_seconds: f64,
    samples_per_second: Option<f64>,
}

/// A dense worker since the previous scrape. Seconds are means over its steps.
struct Measured {
    worker: Worker,
    all_reduce: f64,
    /// For data and embeddings.
    wait: f64,
    /// The rest of a step: without a barrier, the wait for parameters.
    other: f64,
    samples_per_second: f64,
}

impl Measured {
    /// `None` if the worker completed no step.
    fn of(delta: &MetricsDelta) -> Option<Self> {
        let steps = delta.count(metric_names::DENSE_WORKER_COMPUTE_SECONDS).filter(|steps| *steps >= 1.0)?;
        let samples = delta.difference(metric_names::DENSE_WORKER_SAMPLES_TOTAL).filter(|samples| *samples >= 1.0)?;
        let a_step = |histogram: &str| delta.sum(histogram).unwrap_or(0.0) / steps;
        let compute = a_step(metric_names::DENSE_WORKER_COMPUTE_SECONDS);
        let all_reduce = a_step(metric_names::DENSE_WORKER_ALL_REDUCE_SECONDS);
        let embedding_wait = a_step(metric_names::DENSE_WORKER_EMBEDDING_WAIT_SECONDS);
        let wait = a_step(metric_names::DENSE_WORKER_BATCH_WAIT_SECONDS) + embedding_wait;
        let step = a_step(metric_names::DENSE_WORKER_STEP_SECONDS);
        let batch_rows = (samples / steps).round().max(1.0) as u32;
        (compute > 0.0).then(|| Self {
            worker: Worker { batch_rows, compute_seconds: vec![compute] },
            all_reduce,
            wait,
            other: (step - compute - all_reduce - embedding_wait).max(0.0),
            samples_per_second: samples / delta.seconds,
        })
    }
}

/// An embedding worker whose work on a batch takes this many times as long as the median of the
/// others is slow.
const SLOW_FACTOR: f64 = 2.5;

/// Mean queue wait and work of a batch over all embedding workers but slow ones. The coordinator
/// gives those fewer batches, and more workers would not help. `None` if there was no batch.
fn embedding_worker_load<'a>(deltas: impl Iterator<Item = &'a MetricsDelta>) -> Option<EmbeddingWorkerLoad> {
    let all: Vec<WorkerTimes> = deltas.filter_map(WorkerTimes::of).collect();
    let usual: Vec<&WorkerTimes> =
        all.iter().enumerate().filter(|(index, times)| !times.is_slow(*index, &all)).map(|(_, times)| times).collect();
    let sum = |value: fn(&WorkerTimes) -> f64| usual.iter().map(|times| value(times)).sum::<f64>();
    let batches = sum(|times| times.batches);
    (batches >= 1.0).then(|| EmbeddingWorkerLoad {
        queue_wait_seconds: sum(|times| times.queue_seconds) / batches,
        service_seconds: sum(|times| times.service_seconds) / batches,
    })
}

/// The batches of an embedding worker since the previous scrape, and the seconds of all of them.
struct WorkerTimes {
    batches: f64,
    queue_seconds: f64,
    service_seconds: f64,
}

impl WorkerTimes {
    /// `None` if there was no batch.
    fn of(delta: &MetricsDelta) -> Option<Self> {
        let service = metric_names::EMBEDDING_WORKER_SERVICE_SECONDS;
        let batches = delta.count(service).filter(|batches| *batches >= 1.0)?;
        let seconds = |histogram| delta.sum(histogram).unwrap_or(0.0);
        let queue_seconds = seconds(metric_names::EMBEDDING_WORKER_QUEUE_SECONDS);
        Some(Self { batches, queue_seconds, service_seconds: seconds(service) })
    }

    fn mean_seconds(&self) -> f64 {
        self.service_seconds / self.batches
    }

    /// Whether this worker, at `index` of `all`, is slow beside the others.
    fn is_slow(&self, index: usize, all: &[Self]) -> bool {
        let others = all.iter().enumerate().filter(|(other, _)| *other != index);
        let mut others: Vec<f64> = others.map(|(_, times)| times.mean_seconds()).collect();
        others.sort_by(f64::total_cmp);
        let median = others.get(others.len().saturating_sub(1) / 2);
        median.is_some_and(|median| *median > 0.0 && self.mean_seconds() >= SLOW_FACTOR * median)
    }
}

#[cfg(test)]
mod tests {
    use rectrain_crds::{Mode, StreamStatus};

    use super::*;
    use crate::manifests;
    use crate::scrape::Meter;

    /// The change from these samples to twice their values, within ten seconds.
    fn delta(samples: &[(&str, f64)]) -> MetricsDelta {
        let text = |factor: f64| {
            samples.iter().map(|(name, value)| format!("{name} {}\n", value * factor)).collect::<String>()
        };
        let mut meter = Meter::default();
        assert!(meter.add(100, &text(1.0)).is_none(), "there is no scrape to compare with");
        meter.add(110, &text(2.0)).expect("ten seconds later")
    }

    fn worker(compute: f64) -> MetricsDelta {
        delta(&[
            ("rectrain_dense_worker_compute_seconds_sum{replica=\"0\"}", 10.0 * compute),
            ("rectrain_dense_worker_compute_seconds_count{replica=\"0\"}", 10.0),
            ("rectrain_dense_worker_step_seconds_sum{replica=\"0\"}", 10.0),
            ("rectrain_dense_worker_all_reduce_seconds_sum{replica=\"0\"}", 1.0),
            ("rectrain_dense_worker_embedding_wait_seconds_sum{replica=\"0\"}", 2.0),
            ("rectrain_dense_worker_samples_total{replica=\"0\"}", 20_480.0),
        ])
    }

    fn observe(mode: Mode, deltas: &Deltas) -> Observations {
        observe_job(manifests::load(manifests::AUTOMATIC), mode, deltas)
    }

    fn observe_job(manifest: rectrain_crds::Manifest, mode: Mode, deltas: &Deltas) -> Observations {
        let rectrain_crds::Manifest { job, resolved, .. } = manifest;
        let stream = StreamStatus { lag_rows: 900, partitions: Some(8), ..StreamStatus::default() };
        let report = Report {
            mode: Some(mode),
            stream: Some(Box::new(stream)),
            samples_per_second: 3000.0,
            ..Report::default()
        };
        let now = Timestamp::from_second(1000).expect("a time");
        let nodes = ClusterLoad::default();
        let lag_before = Some((10.0, 400));
        let look =
            JobLook { job: &job, resolved: &resolved, now, report: &report, pods: &[], deltas, nodes, lag_before };
        look.observations()
    }

    #[test]
    fn metrics_become_observations() {
        let ps = delta(&[
            ("rectrain_ps_bytes{replica=\"0\"}", 500.0),
            ("rectrain_ps_lookup_seconds_sum{replica=\"0\"}", 2.0),
            ("rectrain_ps_update_seconds_sum{replica=\"0\"}", 3.0),
            ("rectrain_ps_found_rows_total{replica=\"0\"}", 700.0),
            ("rectrain_ps_inserted_rows_total{replica=\"0\"}", 50.0),
        ]);
        let mut deltas = Deltas::from([
            ((Role::DenseWorker, 0), worker(0.25)),
            ((Role::DenseWorker, 1), worker(0.5)),
            ((Role::Ps, 0), ps),
        ]);
        let seen = observe(Mode::Sync, &deltas);
        assert_eq!(seen.check(), Ok(()));
        let seconds: Vec<_> =
            seen.workers.iter().map(|worker| (worker.batch_rows, worker.compute_seconds[0])).collect();
        assert_eq!(seconds, [(2048, 0.25), (2048, 0.5)]);
        assert_eq!((seen.all_reduce_seconds, seen.exchange_seconds, seen.wait_seconds), (Some(0.1), None, 0.2));
        assert_eq!((seen.samples_per_second, seen.local_batch_rows), (Some(4096.0), 2048));
        let expected = PsLoad {
            bytes: 1000,
            limit_bytes: Some(2 << 30),
            busy: Some(0.5),
            look_ups_per_second: Some(75.0),
            oom_kills: 0,
        };
        assert_eq!(seen.ps, [expected]);
        deltas.remove(&(Role::DenseWorker, 1));
        assert_eq!(observe(Mode::Gba, &deltas).workers, [], "the missing worker may be the slow one");
    }

    #[test]
    fn pulled_pieces_have_no_all_reduce_and_count_once() {
        let deltas = Deltas::from([((Role::DenseWorker, 0), worker(0.25)), ((Role::DenseWorker, 1), worker(0.5))]);
        let mut manifest = manifests::load(manifests::AUTOMATIC);
        manifest.resolved.training.sync_pieces = SyncPieces::Pulled;
        manifest.resolved.training.local_batch_size = Some(512);
        let seen = observe_job(manifest.clone(), Mode::Sync, &deltas);
        assert_eq!((seen.pulls_pieces, seen.local_batch_rows, seen.all_reduce_seconds), (true, 512, None));
        assert_eq!(seen.samples_per_second, Some(3000.0), "two workers may have computed the same rows");
        assert_eq!(observe_job(manifest, Mode::Gba, &deltas).samples_per_second, Some(4096.0));
        assert!(!observe(Mode::Sync, &deltas).pulls_pieces);
    }

    #[test]
    fn the_loaders_of_a_stream_are_measured_with_its_lag() {
        let loader = delta(&[
            ("rectrain_loader_rows_total{replica=\"0\"}", 1_000.0),
            ("rectrain_loader_read_seconds_sum{replica=\"0\"}", 2.0),
            ("rectrain_loader_predict_seconds_sum{replica=\"0\"}", 0.5),
            ("rectrain_loader_accept_seconds_sum{replica=\"0\"}", 1.0),
        ]);
        let seen = observe(Mode::Sync, &Deltas::from([((Role::Loader, 0), loader)]));
        let expected = LoaderLoad {
            most_useful: Some(8),
            lag_rows: 900.0,
            // 100 were read and 50 more wait, per second.
            arriving: 150.0,
            read: 100.0,
            reading_share: 0.25,
            waiting_share: 0.1,
        };
        assert_eq!((seen.check(), seen.loaders), (Ok(()), Some(expected)));
        assert_eq!(observe(Mode::Sync, &Deltas::new()).loaders, None, "no loader was measured");
    }

    #[test]
    fn waits_for_data_and_reads_become_the_use_of_loaders() {
        let waits = |seconds: f64| {
            delta(&[
                ("rectrain_dense_worker_step_seconds_sum{replica=\"0\"}", 6.0),
                ("rectrain_dense_worker_batch_wait_seconds_sum{replica=\"0\"}", seconds),
            ])
        };
        let reads = |seconds: f64| delta(&[("rectrain_loader_read_seconds_sum{replica=\"0\"}", seconds)]);
        let deltas = Deltas::from([
            ((Role::DenseWorker, 0), waits(6.0)),
            ((Role::DenseWorker, 1), waits(2.0)),
            ((Role::Loader, 0), reads(40.0)),
            ((Role::Loader, 1), reads(3.0)),
            ((Role::Loader, 2), reads(5.0)),
        ]);
        let seen = observe(Mode::Sync, &deltas);
        assert_eq!((seen.check(), seen.loader_use), (Ok(()), Some(LoaderUse { waiting: 0.25, reading: 0.5 })));
        let no_loader: Deltas = deltas.into_iter().filter(|((role, _), _)| *role != Role::Loader).collect();
        assert_eq!(observe(Mode::Sync, &no_loader).loader_use, None);
    }

    #[test]
    fn a_slow_embedding_worker_does_not_count() {
        let worker = |queue: f64, service: f64| {
            delta(&[
                ("rectrain_embedding_worker_queue_seconds_sum{replica=\"0\"}", 10.0 * queue),
                ("rectrain_embedding_worker_service_seconds_sum{replica=\"0\"}", 10.0 * service),
                ("rectrain_embedding_worker_service_seconds_count{replica=\"0\"}", 10.0),
            ])
        };
        let load = |workers: &[MetricsDelta]| {
            let load = embedding_worker_load(workers.iter()).expect("there are batches");
            [load.queue_wait_seconds, load.service_seconds].map(|seconds| (seconds * 1e3).round())
        };
        let (usual, slow, loaded) = (worker(0.001, 0.004), worker(0.9, 0.13), worker(0.051, 0.006));
        assert_eq!(load(&[usual.clone(), slow.clone(), usual.clone()]), [1.0, 4.0]);
        assert_eq!(load(std::slice::from_ref(&slow)), [900.0, 130.0], "it has no peers");
        assert_eq!(load(&[slow.clone(), slow]), [900.0, 130.0], "all are slow");
        assert_eq!(load(&[usual, loaded]), [26.0, 5.0], "a queue alone is load");
    }

    /// Series of every shared metric, with the `skipped` one left out.
    fn processes(skipped: &str) -> Deltas {
        let series = |role: &str| {
            let of_role = metric_names::ALL.into_iter().filter(|name| name.starts_with(role) && *name != skipped);
            of_role
                .flat_map(|name| {
                    // A step is longer than its parts.
                    let seconds = if name == metric_names::DENSE_WORKER_STEP_SECONDS { 70.0 } else { 7.0 };
                    match name.strip_suffix("_seconds") {
                        Some(_) => vec![(format!("{name}_sum"), seconds), (format!("{name}_count"), 10.0)],
                        None => vec![(name.to_owned(), 90.0)],
                    }
                })
                .collect::<Vec<_>>()
        };
        let of_role = |role: &str| {
            let series = series(role);
            delta(&series.iter().map(|(name, value)| (name.as_str(), *value)).collect::<Vec<_>>())
        };
        let dense_workers = (0..2).map(|index| ((Role::DenseWorker, index), of_role("rectrain_dense_worker_")));
        let others = [
            (Role::Ps, "rectrain_ps_"),
            (Role::EmbeddingWorker, "rectrain_embedding_worker_"),
            (Role::Loader, "rectrain_loader_"),
        ];
        dense_workers.chain(others.map(|(role, prefix)| ((role, 0), of_role(prefix)))).collect()
    }

    /// The runtime registers exactly the names of `metric_names`. A name that only this file has
    /// would never be scraped.
    #[test]
    fn every_metric_that_is_read_is_a_shared_name() {
        let code = include_str!("observations.rs").split("#[cfg(test)]").next().expect("code");
        assert!(!code.contains("\"rectrain_"), "a literal name");
        let all = [Mode::Sync, Mode::Gba].map(|mode| observe(mode, &processes("")));
        for name in metric_names::ALL {
            let without = [Mode::Sync, Mode::Gba].map(|mode| observe(mode, &processes(name)));
            assert_ne!(without, all, "{name} is not read");
        }
    }
}
