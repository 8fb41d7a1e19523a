//! Evaluations: their data, and the predictions of the dense workers.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use rectrain_dense::metrics;
use rectrain_kinds::{MOST_UNSEEN_FEATURES, NO_GROUP, UnseenShares, highest_unseen, unseen_warning};
use rectrain_modes::{DataLedger, DataPlan, GlobalStep, Lease, Rank, TrainingLength};
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

use super::State;
use super::data::no_rows;
use crate::as_bytes;
use crate::batch_index::{BatchIndex, Chunk};
use crate::in_flight::{Leased, NeededByStep, StillNeeded};
use crate::snapshot::Snapshot;
use crate::unseen::shares as shares_of;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{JobEvent, TestMetrics};
use rectrain_protocol::limits::LOOK_AHEAD;
use rectrain_protocol::round_robin::RoundRobin;
use rectrain_protocol::unseen::{self, LookUps};

/// Rows of one dense worker's share of an evaluation.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Part {
    #[serde(with = "as_bytes::f32s")]
    predictions: Vec<f32>,
    #[serde(with = "as_bytes::f32s")]
    labels: Vec<f32>,
    /// Empty, or one group for each row. It is [`NO_GROUP`] if the group is missing.
    #[serde(with = "as_bytes::u64s")]
    groups: Vec<u64>,
}

impl Part {
    pub(crate) fn new(predictions: Vec<f32>, labels: Vec<f32>, groups: Vec<u64>) -> Result<Self, RoleError> {
        let rows = predictions.len();
        if labels.len() == rows && [0, rows].contains(&groups.len()) {
            return Ok(Self { predictions, labels, groups });
        }
        let reason = format!(
            "expected {rows} labels for {rows} predictions, and as many groups or none: found {} labels and {} groups",
            labels.len(),
            groups.len()
        );
        Err(RoleError::Inconsistent { message: "evaluation_part", reason })
    }

    fn rows(&self) -> u64 {
        self.predictions.len() as u64
    }
}

/// One dense worker's share of an evaluation, complete.
#[derive(Debug, Serialize, Deserialize)]
struct Share {
    parts: Vec<Part>,
    /// The look-ups of these rows, by feature.
    look_ups: Vec<LookUps>,
}

fn rows_of(parts: &[Part]) -> u64 {
    parts.iter().map(Part::rows).sum()
}

/// The reply to a loader that asks for test data.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum EvaluationLease {
    Chunk { at_step: GlobalStep, chunk: u64, first_batch: u64 },
    Wait,
    Finished,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Pass {
    source: PassSource,
    /// Assigns batches to the embedding workers that are present when the evaluation begins.
    pub(super) round_robin: RoundRobin,
    data: BatchIndex,
    /// By rank: the batch up to which a worker has requested, as far as it has reported.
    asked: Vec<u64>,
    /// By rank: the shares that have arrived completely.
    shares: Vec<Option<Share>>,
    /// By rank: the parts of shares that are arriving. They are not in the journal, because every
    /// reply would rewrite them all. Workers send them again to a replacement of the coordinator.
    #[serde(skip)]
    parts: BTreeMap<u32, Vec<Part>>,
}

/// The rows of an evaluation.
#[derive(Debug, Serialize, Deserialize)]
enum PassSource {
    /// The test part.
    Test(DataLedger),
    /// One chunk of the training part.
    Slice { chunk: u64, leased: bool },
}

impl PassSource {
    /// The next chunk and its first batch.
    fn lease(&mut self) -> Option<(u64, u64)> {
        match self {
            Self::Test(ledger) => match ledger.lease() {
                Lease::Chunk(lease) => Some((lease.chunk, lease.first_step.0)),
                Lease::Wait | Lease::Finished => None,
            },
            Self::Slice { chunk, leased } => (!std::mem::replace(leased, true)).then_some((*chunk, 0)),
        }
    }
}

/// Evaluations under way, by step, and the result of the last one.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Evaluations {
    pub(super) passes: BTreeMap<GlobalStep, Pass>,
    pub(super) last_test: Option<(GlobalStep, TestMetrics)>,
}

impl Evaluations {
    pub(super) fn new(saved: Option<&Snapshot>) -> Self {
        let last_test = saved.and_then(|saved| saved.last_test.clone());
        Self { passes: BTreeMap::new(), last_test: last_test.map(|(step, test)| (GlobalStep(step), test)) }
    }
}

impl State {
    pub(super) fn has_predicted(&self, at_step: GlobalStep, rank: u32) -> bool {
        let shares = self.evaluation.passes.get(&at_step).map(|pass| &pass.shares);
        shares.and_then(|shares| shares.get(rank as usize)).is_none_or(Option::is_some)
    }

    /// Opens the data of an evaluation that was just ordered.
    pub(super) fn begin_ordered_evaluation(&mut self) {
        let Some(at_step) = self.training.evaluation_to_begin() else { return };
        let plan = DataPlan { length: TrainingLength::Epochs(1), ..self.job.data };
        let source = if self.job.tests_on_the_next_slice {
            let chunk = self.training.current_batch() / plan.batches_per_chunk;
            PassSource::Slice { chunk, leased: false }
        } else {
            PassSource::Test(DataLedger::new(plan))
        };
        let shares: Vec<_> = (0..self.progress.ranks.len()).map(|_| None).collect();
        let (round_robin, asked) = (self.data.round_robin.latest(), vec![0; shares.len()]);
        let (data, parts) = (BatchIndex::new(plan.global_batch_rows), BTreeMap::new());
        self.evaluation.passes.insert(at_step, Pass { source, round_robin, data, asked, shares, parts });
    }

    pub(crate) fn evaluation_lease(&mut self, loader: u32) -> EvaluationLease {
        if self.is_leaving_loader(loader) {
            return EvaluationLease::Finished;
        }
        if !self.is_active_loader(loader) {
            return EvaluationLease::Wait;
        }
        for (at_step, pass) in &mut self.evaluation.passes {
            let Some((chunk, first_batch)) = pass.source.lease() else { continue };
            let at_step = *at_step;
            self.data.in_flight.lease_to(Leased::Evaluation { at_step, chunk, first_batch }, loader);
            return EvaluationLease::Chunk { at_step, chunk, first_batch };
        }
        if self.all_trained() { EvaluationLease::Finished } else { EvaluationLease::Wait }
    }

    pub(crate) fn evaluation_chunk_report(&mut self, report: &v1::EvaluationChunkReport) -> Result<(), RoleError> {
        let at_step = GlobalStep(report.at_step);
        let is_over = self.has_evaluated(at_step);
        let pass = match self.evaluation.passes.get_mut(&at_step) {
            Some(pass) => pass,
            // A chunk beyond the end of the data, reported after all workers have predicted all
            // rows. It has no rows.
            None if is_over => return Ok(()),
            None => return Err(unknown_evaluation("evaluation_chunk_report", at_step)),
        };
        // Skipped rows of the test part count only in the first evaluation. Skipped rows of a slice
        // count when it is trained.
        let counts = matches!(pass.source, PassSource::Test(_)) && self.evaluation.last_test.is_none();
        let (first_batch, total) = match &mut pass.source {
            PassSource::Test(ledger) => {
                let lease = ledger.report(0, report.chunk, report.rows).map_err(no_rows("test"))?;
                (lease.first_step.0, ledger.total_steps().map(|steps| steps.0))
            }
            PassSource::Slice { .. } => (0, Some(report.rows.div_ceil(self.job.data.global_batch_rows))),
        };
        self.progress.progressed = Instant::now();
        self.data.in_flight.mark_evaluation_read(at_step, report.chunk);
        if report.rows > 0 {
            pass.data.add(Chunk { epoch: 0, first_batch, rows: report.rows });
        }
        if let Some(total) = total {
            pass.data.end(total);
        }
        if counts {
            self.data.skipped_rows += report.skipped_rows;
        }
        Ok(())
    }

    /// The batches and pieces that dense workers still have to predict, by evaluation. A worker
    /// that has sent its share needs nothing. A replacement may need its predecessor's batches
    /// again.
    pub(super) fn still_needed(&self) -> NeededByStep {
        let of = |pass: &Pass| {
            let asking = || (0..).zip(pass.asked.iter().zip(&pass.shares)).filter(|(_, (_, share))| share.is_none());
            let slowest = asking().map(|(_, (asked, _))| asked.saturating_sub(LOOK_AHEAD as u64)).min();
            let asked = asking().map(|(rank, _)| self.training.share(Rank(rank))).filter(|share| !share.is_empty());
            StillNeeded { first_batch: slowest.unwrap_or(u64::MAX), pieces: asked.collect() }
        };
        self.evaluation.passes.iter().map(|(at_step, pass)| (*at_step, of(pass))).collect()
    }

    /// Worker `rank` has requested the batches before `at`, which is progress.
    pub(crate) fn evaluation_asked(&mut self, at_step: GlobalStep, rank: Rank, at: u64) {
        let asked = self.evaluation.passes.get_mut(&at_step).and_then(|pass| pass.asked.get_mut(rank.0 as usize));
        if let Some(asked) = asked.filter(|asked| **asked < at) {
            *asked = at;
            self.progress.progressed = Instant::now();
        }
    }

    /// A replacement of this worker requests all of its pieces again.
    pub(super) fn reset_evaluation_asked(&mut self, at_step: GlobalStep, rank: Rank) {
        let asked = self.evaluation.passes.get_mut(&at_step).and_then(|pass| pass.asked.get_mut(rank.0 as usize));
        if let Some(asked) = asked {
            *asked = 0;
        }
    }

    /// The batches of the evaluation that may be fetched; `None` if there are no more than `from`
    /// yet.
    pub(crate) fn evaluation_horizon(&self, at_step: GlobalStep, from: u64) -> Result<Option<v1::Horizon>, RoleError> {
        let pass = self.evaluation.passes.get(&at_step).ok_or_else(|| unknown_evaluation("horizon", at_step))?;
        let Pass { data, round_robin, .. } = pass;
        let horizon = v1::Horizon { until: data.batches(), last: data.complete(), turns: round_robin.write() };
        Ok((horizon.until > from || horizon.last).then_some(horizon))
    }

    fn has_evaluated(&self, at_step: GlobalStep) -> bool {
        self.evaluation.last_test.as_ref().is_some_and(|(last, _)| *last >= at_step)
    }

    /// The evaluation in which worker `rank` has not yet sent its share. `None` if it has sent all
    /// of it, so that this is a repeat.
    fn share_of(&mut self, at_step: GlobalStep, rank: Rank) -> Result<Option<&mut Pass>, RoleError> {
        let is_over = self.has_evaluated(at_step);
        let pass = match self.evaluation.passes.get_mut(&at_step) {
            Some(pass) => pass,
            None if is_over => return Ok(None),
            None => return Err(unknown_evaluation("evaluation_share", at_step)),
        };
        match pass.shares.get(rank.0 as usize) {
            Some(share) => Ok(share.is_none().then_some(pass)),
            None => {
                let reason = format!("dense worker {rank} has no share of the evaluation at step {at_step}");
                Err(RoleError::Inconsistent { message: "evaluation_share", reason })
            }
        }
    }

    /// Adds the rows from `first` on to a worker's share, if they are the next ones. Returns the
    /// rows that have arrived.
    pub(crate) fn evaluation_part(
        &mut self,
        at_step: GlobalStep,
        rank: Rank,
        first: u64,
        part: Part,
    ) -> Result<u64, RoleError> {
        self.progress.progressed = Instant::now();
        let Some(pass) = self.share_of(at_step, rank)? else { return Ok(first.saturating_add(part.rows())) };
        let parts = pass.parts.entry(rank.0).or_default();
        if first == 0 {
            parts.clear();
        }
        if first == rows_of(parts) {
            parts.push(part);
        }
        Ok(rows_of(parts))
    }

    /// A worker has sent its share of `rows` rows, with their look-ups. Returns the rows that have
    /// arrived. The last complete share also returns the events of the evaluation.
    ///
    /// The look-ups come with this message, so they count once, as the rows do. A replacement of
    /// the worker evaluates its share from the start and counts from zero.
    pub(crate) fn evaluation_share(&mut self, share: v1::EvaluationShare) -> Result<(u64, Vec<JobEvent>), RoleError> {
        let v1::EvaluationShare { rank, at_step, rows, look_ups } = share;
        let (rank, at_step) = (Rank(rank), GlobalStep(at_step));
        let Some(pass) = self.share_of(at_step, rank)? else { return Ok((rows, Vec::new())) };
        let mut parts = pass.parts.remove(&rank.0).unwrap_or_default();
        let here = rows_of(&parts);
        if here < rows {
            pass.parts.insert(rank.0, parts);
            return Ok((here, Vec::new()));
        }
        if here > rows {
            // The rows came from a process that this worker replaced.
            parts.clear();
            if rows > 0 {
                return Ok((0, Vec::new()));
            }
        }
        if let Some(place) = pass.shares.get_mut(rank.0 as usize) {
            *place = Some(Share { parts, look_ups: look_ups.into_iter().map(LookUps::read).collect() });
        }
        let is_last = pass.shares.iter().all(Option::is_some);
        self.progress.progressed = Instant::now();
        Ok((rows, if is_last { self.evaluated(at_step) } else { Vec::new() }))
    }

    /// The shares of unseen ids in the last evaluation, by feature.
    pub(crate) fn unseen_shares(&self) -> UnseenShares {
        self.evaluation.last_test.as_ref().map(|(_, test)| test.unseen.clone()).unwrap_or_default()
    }

    /// As [`Self::unseen_shares`], for a status: only the features with the highest shares.
    pub(super) fn highest_unseen_shares(&self) -> HashMap<String, f64> {
        let last = self.evaluation.last_test.as_ref();
        last.into_iter().flat_map(|(_, test)| highest_unseen(&test.unseen, MOST_UNSEEN_FEATURES)).collect()
    }

    /// All shares have arrived.
    fn evaluated(&mut self, at_step: GlobalStep) -> Vec<JobEvent> {
        let shares = self.evaluation.passes.remove(&at_step).into_iter().flat_map(|pass| pass.shares).flatten();
        let (mut parts, mut look_ups) = (Vec::new(), Vec::new());
        for share in shares {
            unseen::add(&mut look_ups, &share.look_ups);
            parts.extend(share.parts);
        }
        let unseen = shares_of(&self.job.features, &look_ups);
        let test = TestMetrics { unseen, ..test_metrics(parts) };
        self.data.in_flight.drop_evaluation(at_step);
        let mut events = Vec::new();
        if test.auc.is_none() {
            events.push(JobEvent::Warning {
                message: format!("the test AUC is undefined: all {} test rows have the same label", test.samples),
            });
        }
        let before = self.evaluation.last_test.as_ref().map(|(_, before)| &before.unseen);
        events.extend(unseen_warning(&test.unseen, before).map(|message| JobEvent::Warning { message }));
        events.push(JobEvent::Evaluation { step: at_step.0, test: test.clone() });
        self.evaluation.last_test = Some((at_step, test));
        events
    }
}

/// The metrics of all predictions. It does not set the shares of unseen ids.
fn test_metrics(parts: Vec<Part>) -> TestMetrics {
    let mut all = metrics::Evaluation::default();
    let (mut predictions, mut labels, mut groups) = (Vec::new(), Vec::new(), Vec::new());
    for part in parts {
        all.push(&part.predictions, &part.labels);
        if !part.groups.is_empty() {
            predictions.extend(part.predictions);
            labels.extend(part.labels);
            groups.extend(part.groups);
        }
    }
    let summary = all.finish();
    let without_group = groups.iter().filter(|&&group| group == NO_GROUP).count() as u64;
    TestMetrics {
        auc: summary.auc,
        gauc: if groups.is_empty() { None } else { metrics::gauc(&predictions, &labels, &groups) },
        rows_without_group: (without_group > 0).then_some(without_group),
        log_loss: summary.log_loss,
        normalized_entropy: summary.normalized_entropy,
        calibration: summary.calibration,
        samples: summary.samples,
        unseen: UnseenShares::new(),
    }
}

fn unknown_evaluation(what: &'static str, at_step: GlobalStep) -> RoleError {
    RoleError::Inconsistent { message: what, reason: format!("there is no evaluation at step {at_step}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rectrain_protocol::plan::small_plan;

    const AT: GlobalStep = GlobalStep(4);

    /// Two dense workers predict.
    fn evaluating() -> State {
        let plan = small_plan(&["spec.roles.denseWorker.replicas=2"]);
        let mut state = State::new(&plan, None).unwrap();
        let source = PassSource::Slice { chunk: 0, leased: true };
        let (data, parts) = (BatchIndex::new(24), BTreeMap::new());
        let (asked, shares) = (vec![0, 0], vec![None, None]);
        let pass = Pass { source, round_robin: RoundRobin::new(1), data, asked, shares, parts };
        state.evaluation.passes.insert(AT, pass);
        state
    }

    /// Rows of three users.
    fn part(rows: std::ops::Range<u64>) -> Part {
        let predictions = rows.clone().map(|row| (row * 37 % 101) as f32 / 101.0).collect();
        let labels = rows.clone().map(|row| f32::from(u8::from(row * 7 % 5 < 2))).collect();
        Part::new(predictions, labels, rows.map(|row| row % 3).collect()).unwrap()
    }

    fn send(state: &mut State, rank: u32, rows: std::ops::Range<u64>) -> u64 {
        state.evaluation_part(AT, Rank(rank), rows.start, part(rows)).unwrap()
    }

    /// The message that a share is complete. A third of the ids of C1 has no row, and all of C2.
    fn complete(rank: u32, rows: u64) -> v1::EvaluationShare {
        let look_ups = [LookUps { ids: 3 * rows, unseen: rows }, LookUps { ids: rows, unseen: rows }];
        let look_ups = look_ups.into_iter().map(LookUps::write).collect();
        v1::EvaluationShare { rank, at_step: AT.0, rows, look_ups }
    }

    fn tell(state: &mut State, rank: u32, rows: u64) -> (u64, usize) {
        let (here, events) = state.evaluation_share(complete(rank, rows)).unwrap();
        let is_result = |event: &&JobEvent| matches!(event, JobEvent::Evaluation { .. });
        (here, events.iter().filter(is_result).count())
    }

    /// The state that a replacement of the coordinator reads from the journal.
    fn restarted(state: &State) -> State {
        rmp_serde::from_slice(&rmp_serde::to_vec_named(state).unwrap()).unwrap()
    }

    fn image(state: &State) -> usize {
        rmp_serde::to_vec_named(state).unwrap().len()
    }

    #[test]
    fn shares_in_parts_equal_whole_ones_over_repeats_and_restarts() {
        let mut whole = evaluating();
        send(&mut whole, 0, 0..100);
        assert_eq!(tell(&mut whole, 0, 100), (100, 0));
        send(&mut whole, 1, 0..40);
        assert_eq!(tell(&mut whole, 1, 40), (40, 1));

        let mut state = evaluating();
        let empty = image(&state);
        assert_eq!(send(&mut state, 0, 0..30), 30);
        assert_eq!(send(&mut state, 0, 60..90), 30, "there is a gap");
        assert_eq!(send(&mut state, 0, 30..60), 60);
        assert_eq!(send(&mut state, 0, 30..60), 60, "it is a repeat");
        assert_eq!(image(&state), empty, "parts are not in the journal");
        assert_eq!(tell(&mut state, 0, 100), (60, 0));
        // A replacement of the coordinator has no parts of the share.
        let mut state = restarted(&state);
        assert_eq!((tell(&mut state, 0, 100), state.has_predicted(AT, 0)), ((0, 0), false));
        for first in [0, 50] {
            send(&mut state, 0, first..first + 50);
        }
        assert_eq!((tell(&mut state, 0, 100), state.has_predicted(AT, 0)), ((100, 0), true));
        assert_eq!((send(&mut state, 0, 0..50), tell(&mut state, 0, 100)), (50, (100, 0)), "they are late repeats");
        // A complete share survives in the journal.
        let mut state = restarted(&state);
        assert!(state.has_predicted(AT, 0));
        // A replacement of a worker sends its share from the start.
        send(&mut state, 1, 0..20);
        send(&mut state, 1, 20..40);
        assert_eq!(send(&mut state, 1, 0..25), 25);
        send(&mut state, 1, 25..40);
        assert_eq!(tell(&mut state, 1, 40), (40, 1));
        assert_eq!(state.evaluation.last_test, whole.evaluation.last_test);
        assert!(
            state.evaluation.last_test.as_ref().is_some_and(|(_, test)| test.samples == 140 && test.gauc.is_some())
        );
        let unseen: UnseenShares = [("C1".to_owned(), 140.0 / 420.0), ("C2".to_owned(), 1.0)].into();
        assert_eq!(state.evaluation.last_test.as_ref().map(|(_, test)| &test.unseen), Some(&unseen), "each row once");
        assert_eq!((send(&mut state, 1, 0..40), tell(&mut state, 1, 40)), (40, (40, 0)), "the evaluation is over");
    }

    #[test]
    fn rows_without_a_group_count_for_all_metrics_but_gauc() {
        let rows = 0..60_u64;
        let predictions: Vec<f32> = rows.clone().map(|row| (row * 37 % 101) as f32 / 101.0).collect();
        let labels: Vec<f32> = rows.clone().map(|row| f32::from(u8::from(row * 7 % 5 < 2))).collect();
        let has_group = |row: &u64| !row.is_multiple_of(4);
        let groups: Vec<u64> = rows.clone().map(|row| if has_group(&row) { row % 3 } else { NO_GROUP }).collect();
        let grouped: Vec<usize> = rows.filter(has_group).map(|row| row as usize).collect();
        let pick = |values: &[f32]| grouped.iter().map(|&row| values[row]).collect::<Vec<f32>>();
        let own: Vec<u64> = grouped.iter().map(|&row| groups[row]).collect();
        let (gauc, auc) =
            (metrics::gauc(&pick(&predictions), &pick(&labels), &own), metrics::auc(&predictions, &labels));
        let test = test_metrics(vec![Part::new(predictions, labels, groups).unwrap()]);
        assert_eq!((test.auc, test.gauc, test.samples, test.rows_without_group), (auc, gauc, 60, Some(15)));
        assert!(gauc.is_some());
        assert_eq!(test_metrics(vec![part(0..60)]).rows_without_group, None);
    }

    #[test]
    fn an_evaluation_warns_of_features_with_unseen_ids() {
        let mut state = evaluating();
        send(&mut state, 0, 0..40);
        assert_eq!(tell(&mut state, 0, 40), (40, 0));
        send(&mut state, 1, 0..40);
        let (_, events) = state.evaluation_share(complete(1, 40)).unwrap();
        let [JobEvent::Warning { message }, JobEvent::Evaluation { test, .. }] = &events[..] else {
            panic!("{events:?}");
        };
        assert!(message.contains("100.0 % of `C2`") && !message.contains("C1"), "{message}");
        assert_eq!(test.unseen.len(), 2);
    }

    #[test]
    fn batches_that_all_workers_predicted_are_not_needed() {
        let mut state = evaluating();
        let shares = [0, 1].map(|rank| state.training.share(Rank(rank)));
        let needed = |state: &State| state.still_needed()[&AT].clone();
        assert_eq!(needed(&state), StillNeeded { first_batch: 0, pieces: shares.to_vec() });
        for (rank, at, expected) in [(0, 100, 0), (1, 3, 0), (1, 40, 36), (1, 20, 36)] {
            state.evaluation_asked(AT, Rank(rank), at);
            assert_eq!(needed(&state).first_batch, expected);
        }
        // A worker that has finished needs nothing. A replacement needs all.
        assert_eq!(tell(&mut state, 1, 0), (0, 0));
        assert_eq!(needed(&state), StillNeeded { first_batch: 96, pieces: vec![shares[0].clone()] });
        state.reset_evaluation_asked(AT, Rank(0));
        assert_eq!(needed(&state).first_batch, 0);
    }

    #[test]
    fn a_worker_may_have_no_rows_and_bad_parts_are_refused() {
        let mut state = evaluating();
        send(&mut state, 0, 0..20);
        assert_eq!(tell(&mut state, 0, 10), (0, 0), "the rows came from the process before");
        send(&mut state, 0, 0..20);
        assert_eq!(tell(&mut state, 0, 0), (0, 0));
        assert!(state.has_predicted(AT, 0));
        assert!(state.evaluation_share(complete(2, 0)).is_err());
        assert!(state.evaluation_share(v1::EvaluationShare { at_step: 5, ..complete(1, 0) }).is_err());
        assert!(Part::new(vec![0.5], vec![], vec![]).is_err());
        assert!(Part::new(vec![0.5, 0.5], vec![0.0, 1.0], vec![1]).is_err());
    }
}
