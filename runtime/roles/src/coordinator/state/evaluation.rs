//! Evaluations: their data, and the dense workers' predictions.

use std::time::Instant;

use rectrain_dense::metrics;
use rectrain_modes::{DataLedger, DataPlan, GlobalStep, Lease, Rank, TrainingLength};
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

use super::State;
use super::data::no_rows;
use crate::coordinator::announced::{Announced, Chunk};
use crate::coordinator::as_bytes;
use crate::coordinator::outstanding::Given;
use crate::error::RoleError;
use crate::events::{JobEvent, TestMetrics};
use crate::turns::Turns;

/// One dense worker's share of an evaluation.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::coordinator) struct Share {
    #[serde(with = "as_bytes::f32s")]
    pub(in crate::coordinator) predictions: Vec<f32>,
    #[serde(with = "as_bytes::f32s")]
    pub(in crate::coordinator) labels: Vec<f32>,
    #[serde(with = "as_bytes::u64s")]
    pub(in crate::coordinator) groups: Vec<u64>,
}

/// An answer to a loader that asks for test data.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::coordinator) enum EvaluationLease {
    Chunk { at_step: GlobalStep, chunk: u64, first_batch: u64 },
    Wait,
    Finished,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Pass {
    source: PassSource,
    /// Its batches go to the embedding workers that there are when it begins.
    pub(super) turns: Turns,
    data: Announced,
    pub(super) shares: Vec<Option<Share>>,
}

/// Where the rows of an evaluation are.
#[derive(Debug, Serialize, Deserialize)]
enum PassSource {
    /// The test part, from its first chunk on.
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

impl State {
    pub(super) fn has_predicted(&self, at_step: GlobalStep, rank: u32) -> bool {
        let shares = self.passes.get(&at_step).map(|pass| &pass.shares);
        shares.and_then(|shares| shares.get(rank as usize)).is_none_or(Option::is_some)
    }

    /// Opens the data of an evaluation that has just been ordered, if one has.
    pub(super) fn begin_ordered_evaluation(&mut self) {
        let Some(at_step) = self.training.evaluation_to_begin() else { return };
        let plan = DataPlan { length: TrainingLength::Epochs(1), ..self.job.data };
        let source = if self.job.tests_on_the_next_slice {
            let chunk = self.training.current_batch() / plan.batches_per_chunk;
            PassSource::Slice { chunk, leased: false }
        } else {
            PassSource::Test(DataLedger::new(plan))
        };
        let shares = (0..self.ranks.len()).map(|_| None).collect();
        let turns = Turns::of(self.turns.last());
        self.passes.insert(at_step, Pass { source, turns, data: Announced::new(plan.global_batch_rows), shares });
    }

    pub(in crate::coordinator) fn evaluation_lease(&mut self, loader: u32) -> EvaluationLease {
        if self.leaves(loader) {
            return EvaluationLease::Finished;
        }
        if !self.takes_part(loader) {
            return EvaluationLease::Wait;
        }
        for (at_step, pass) in &mut self.passes {
            let Some((chunk, first_batch)) = pass.source.lease() else { continue };
            let at_step = *at_step;
            self.outstanding.give(Given::Evaluation { at_step, chunk, first_batch }, loader);
            return EvaluationLease::Chunk { at_step, chunk, first_batch };
        }
        if self.all_trained() { EvaluationLease::Finished } else { EvaluationLease::Wait }
    }

    pub(in crate::coordinator) fn evaluation_chunk_report(
        &mut self,
        report: &v1::EvaluationChunkReport,
    ) -> Result<(), RoleError> {
        let at_step = GlobalStep(report.at_step);
        let is_over = self.last_test.as_ref().is_some_and(|(last, _)| *last >= at_step);
        let pass = match self.passes.get_mut(&at_step) {
            Some(pass) => pass,
            // A chunk behind the end of the data, which has none of the rows that everybody has predicted meanwhile.
            None if is_over => return Ok(()),
            None => return Err(unknown_evaluation("evaluation_chunk_report", at_step)),
        };
        let (first_batch, total) = match &mut pass.source {
            PassSource::Test(ledger) => {
                let lease = ledger.report(0, report.chunk, report.rows).map_err(no_rows("test"))?;
                (lease.first_step.0, ledger.total_steps().map(|steps| steps.0))
            }
            PassSource::Slice { .. } => (0, Some(report.rows.div_ceil(self.job.data.global_batch_rows))),
        };
        self.progressed = Instant::now();
        self.outstanding.read_for_evaluation(at_step, report.chunk);
        if report.rows > 0 {
            pass.data.add(Chunk { epoch: 0, first_batch, rows: report.rows });
        }
        if let Some(total) = total {
            pass.data.end(total);
        }
        if self.last_test.is_none() {
            self.skipped_rows += report.skipped_rows;
        }
        Ok(())
    }

    /// How many batches of the evaluation under way may be fetched, where `from` are known already; `None`: no more yet.
    pub(in crate::coordinator) fn evaluation_horizon(
        &self,
        at_step: GlobalStep,
        from: u64,
    ) -> Result<Option<v1::Horizon>, RoleError> {
        let pass = self.passes.get(&at_step).ok_or_else(|| unknown_evaluation("horizon", at_step))?;
        let Pass { data, turns, .. } = pass;
        let horizon = v1::Horizon { until: data.batches(), last: data.complete(), turns: turns.write() };
        Ok((horizon.until > from || horizon.last).then_some(horizon))
    }

    /// Takes one worker's predictions; the last share gives the evaluation's event.
    pub(in crate::coordinator) fn evaluation_share(
        &mut self,
        at_step: GlobalStep,
        rank: Rank,
        share: Share,
    ) -> Result<Vec<JobEvent>, RoleError> {
        let pass = self.passes.get_mut(&at_step).ok_or_else(|| unknown_evaluation("evaluation_share", at_step))?;
        match pass.shares.get_mut(rank.0 as usize) {
            Some(place) if place.is_none() => *place = Some(share),
            _ => {
                let reason = format!("dense worker {rank} is unknown or has sent its share of step {at_step} before");
                return Err(RoleError::Inconsistent { message: "evaluation_share", reason });
            }
        }
        self.progressed = Instant::now();
        if pass.shares.iter().any(Option::is_none) {
            return Ok(Vec::new());
        }
        let shares = self.passes.remove(&at_step).into_iter().flat_map(|pass| pass.shares).flatten().collect();
        self.outstanding.evaluated(at_step);
        let test = test_metrics(shares);
        let mut events = Vec::new();
        if test.auc.is_none() {
            events.push(JobEvent::Warning {
                message: format!("the test AUC is undefined: all {} test rows have the same label", test.samples),
            });
        }
        events.push(JobEvent::Evaluation { step: at_step.0, test: test.clone() });
        self.last_test = Some((at_step, test));
        Ok(events)
    }
}

fn test_metrics(shares: Vec<Share>) -> TestMetrics {
    let mut all = metrics::Evaluation::default();
    let (mut predictions, mut labels, mut groups) = (Vec::new(), Vec::new(), Vec::new());
    for share in shares {
        all.push(&share.predictions, &share.labels);
        if !share.groups.is_empty() {
            predictions.extend(share.predictions);
            labels.extend(share.labels);
            groups.extend(share.groups);
        }
    }
    let summary = all.finish();
    TestMetrics {
        auc: summary.auc,
        gauc: if groups.is_empty() { None } else { metrics::gauc(&predictions, &labels, &groups) },
        log_loss: summary.log_loss,
        normalized_entropy: summary.normalized_entropy,
        calibration: summary.calibration,
        samples: summary.samples,
    }
}

fn unknown_evaluation(what: &'static str, at_step: GlobalStep) -> RoleError {
    RoleError::Inconsistent { message: what, reason: format!("no evaluation stands at step {at_step}") }
}
