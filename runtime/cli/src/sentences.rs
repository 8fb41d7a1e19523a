//! The events of a job as sentences for a person.

use rectrain_crds::TableSummary;
use rectrain_kinds::Role;
use rectrain_protocol::events::{JobEvent, LostRecords, Summary, TestMetrics};

use crate::human::{bytes, list, number, percent, rate, thousands, time_of_seconds};

/// The sentence for an event. `None` for progress, which is a bar, and for the end of a job, which
/// is a table or an error.
pub(crate) fn sentence(event: &JobEvent) -> Option<String> {
    let text = match event {
        JobEvent::Progress { .. } | JobEvent::Summary(_) | JobEvent::Failed { .. } => return None,
        JobEvent::Started { job, mode, model, dense_parameters, from, .. } => {
            let from = from.as_ref().map(|from| {
                format!(", from {} (step {}, {}, digest {})", from.path, from.step, from.checkpoint, from.digest)
            });
            let dense = thousands(*dense_parameters);
            format!("{job}: {model} in mode {mode}, {dense} dense parameters{}", from.unwrap_or_default())
        }
        JobEvent::Evaluation { step, test } => evaluation(*step, test),
        JobEvent::ModeSwitched { step, from, to } => format!("mode {from} -> {to} at step {step}"),
        JobEvent::ModeChosen { mode, reason } => format!("switching to mode {mode}: {reason}"),
        JobEvent::Resumed { checkpoint, step, rows, .. } => {
            format!("resuming at step {step} from checkpoint {checkpoint} ({} rows)", thousands(*rows))
        }
        JobEvent::RolledBack { checkpoint, step, from_step, lost_rows, lost, .. } => {
            rolled_back(checkpoint, (*from_step, *step), *lost_rows, lost)
        }
        JobEvent::WarmStarted { .. } => warm_start(event),
        JobEvent::CheckpointSaved { step, checkpoint, bytes: size, seconds, .. } => {
            format!("checkpoint {checkpoint} of step {step}: {} in {}", bytes(*size), time_of_seconds(*seconds))
        }
        JobEvent::Warning { message } => format!("warning: {message}"),
        event => membership(event)?,
    };
    Some(text)
}

/// The sentence for an event about processes.
fn membership(event: &JobEvent) -> Option<String> {
    Some(match event {
        JobEvent::Scaling { role: Role::Ps, from, to, .. } if from == to => {
            "measuring the slots, to rebalance them".to_owned()
        }
        JobEvent::Scaling { role, from, to, .. } => {
            format!("{} {from} -> {to}: training continues meanwhile", role.plural())
        }
        JobEvent::Scaled { role, from, to } => format!("{} {from} -> {to}: done", role.plural()),
        JobEvent::ShareChanged { .. } => share_changed(event),
        JobEvent::SlotsMoved { slots: 0, imbalance, .. } => {
            format!("no slot moves: the busiest parameter server has {imbalance:.2} times the mean")
        }
        JobEvent::SlotsMoved { from, to, slots, bytes: moved, seconds, rest_seconds, .. } => format!(
            "parameter servers {from} -> {to}: {slots} slots ({}) moved in {seconds:.2} s; training paused for \
             {rest_seconds:.3} s",
            bytes(*moved)
        ),
        JobEvent::Restarting { restart, message, seconds } => format!("{message}; restart {restart} in {seconds} s"),
        JobEvent::Rejoined { member, chunks } => {
            format!("{member} was replaced; {chunks} chunks of data are read again")
        }
        JobEvent::Leaving { member } => format!("{member} got SIGTERM: its rows move to the others first"),
        JobEvent::ServerKeptRows { member } => {
            format!("{member} was killed and restarted; its rows were still in memory")
        }
        JobEvent::CoordinatorTakenUp { step } => {
            format!("the coordinator was killed and restarted; it continues at step {step} from its journal")
        }
        _ => return None,
    })
}

/// A member gets another share of the work because of its speed.
fn share_changed(event: &JobEvent) -> String {
    let JobEvent::ShareChanged { role, index, share, factor } = event else { return String::new() };
    let (unit, work) = match role {
        Role::Ps => ("row", "rows"),
        Role::Loader => ("batch", "chunks"),
        _ => ("piece", "pieces"),
    };
    if *share >= 1.0 {
        return format!("{role} {index} is no longer slow and gets as many {work} as the others");
    }
    let share = percent(*share);
    format!(
        "{role} {index} takes {factor:.1} times as long for a {unit} as the others: it gets {share} of the usual {work}"
    )
}

/// Training goes on with an earlier checkpoint, from one step to an earlier one.
fn rolled_back(checkpoint: &str, steps: (u64, u64), rows: u64, lost: &[LostRecords]) -> String {
    let named = |lost: &LostRecords| {
        let LostRecords { topic, partition, from, until } = lost;
        format!("{topic} {partition}: offsets {from} to {}", until.saturating_sub(1))
    };
    let parts: Vec<String> = lost.iter().map(named).collect();
    let parts = if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) };
    format!(
        "the quality had fallen at step {}: training goes on from checkpoint {checkpoint} of step {}, without the {} rows trained since{parts}",
        steps.0,
        steps.1,
        thousands(rows)
    )
}

/// The parts of another job's model that a job begins with, and the parts that start fresh.
fn warm_start(event: &JobEvent) -> String {
    let JobEvent::WarmStarted { from, rows, new_features, left_out_features, fresh_parameters, replaced_optimizer } =
        event
    else {
        return String::new();
    };
    let mut text = format!("beginning with the model of {}@{} ({} rows)", from.path, from.step, thousands(*rows));
    if !new_features.is_empty() {
        text += &format!("; new features start fresh: {}", new_features.join(", "));
    }
    if !left_out_features.is_empty() {
        text += &format!("; features of the checkpoint left out: {}", left_out_features.join(", "));
    }
    if *fresh_parameters > 0 {
        text += &format!("; {} dense parameters start fresh", thousands(*fresh_parameters));
    }
    if let Some(optimizer) = replaced_optimizer {
        text += &format!("; the dense optimizer replaces {optimizer}, so its state starts fresh");
    }
    text
}

fn evaluation(step: u64, test: &TestMetrics) -> String {
    let unseen = most_unseen(test).map(|most| format!("; {most}")).unwrap_or_default();
    format!(
        "evaluation at step {step}: AUC {}, log loss {} on {} rows{unseen}",
        number(test.auc, 4),
        number(test.log_loss, 4),
        thousands(test.samples)
    )
}

/// The sentence for an event with its fields as JSON, from a coordinator of any version.
pub(crate) fn sentence_of_json(json: &str) -> String {
    match serde_json::from_str::<JobEvent>(json) {
        Ok(JobEvent::Progress { step, total_steps, loss, running_auc, .. }) => {
            let total = total_steps.map(|total| format!(" of {total}")).unwrap_or_default();
            format!("step {step}{total}: loss {loss:.4}, AUC in training {}", number(running_auc, 4))
        }
        Ok(JobEvent::Summary(summary)) => summary_table(&summary, true),
        Ok(JobEvent::Failed { message, .. }) => format!("failed: {message}"),
        Ok(event) => sentence(&event).unwrap_or_else(|| json.to_owned()),
        Err(_) => json.to_owned(),
    }
}

/// The reason why a trained model is of no use, as far as its test shows one.
pub(crate) fn doubt(test: &TestMetrics) -> Option<String> {
    if test.samples > 0 && test.auc.is_none() {
        return Some(format!(
            "all {} labels of the test are equal, so there is no AUC: is spec.features.label the right column, and \
             does the test have clicks?",
            thousands(test.samples)
        ));
    }
    let entropy = test.normalized_entropy.filter(|entropy| *entropy >= 1.0)?;
    Some(format!(
        "the model predicts the test no better than the mean of the labels does (normalized entropy {entropy:.3}): \
         with too few steps, set more spec.training.epochs or a smaller spec.training.globalBatchSize; after many \
         epochs it overfits, so set fewer"
    ))
}

/// The results of a job, one a line. A run that resumed at the last step has trained nothing, so it
/// has no speed.
pub(crate) fn summary_table(summary: &Summary, has_trained: bool) -> String {
    let mut rows = Vec::new();
    if let Some(test) = &summary.test {
        rows.extend(quality(test));
    }
    if summary.loss.is_some() {
        rows.push(("training loss", number(summary.loss, 5)));
    }
    rows.extend([("steps", thousands(summary.steps)), ("samples", thousands(summary.samples))]);
    if has_trained {
        rows.push(("time", time_of_seconds(summary.seconds)));
        rows.push(("samples/s", rate(summary.samples_per_second)));
    }
    rows.extend([("embedding rows", thousands(summary.rows)), ("size of the rows", bytes(summary.store_bytes))]);
    rows.extend(summary.table.iter().flat_map(row_history));
    if summary.skipped_rows > 0 {
        rows.push(("bad rows skipped", thousands(summary.skipped_rows)));
    }
    rows.extend(course(summary));
    rows.push(("parameters sha256", summary.parameters_sha256.clone()));
    let mut rows: Vec<(String, String)> = rows.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    // Below the other figures of the test.
    let unseen = summary.test.iter().flat_map(|test| &test.unseen).filter(|(_, share)| **share > 0.0);
    let unseen = unseen.map(|(feature, share)| (format!("test ids unseen in training, {feature}"), percent(*share)));
    let last = rows.len() - 1;
    rows.splice(last..last, unseen);
    list(&rows)
}

fn quality(test: &TestMetrics) -> Vec<(&'static str, String)> {
    let mut rows = vec![("test AUC", number(test.auc, 5))];
    if test.gauc.is_some() {
        rows.push(("test GAUC", number(test.gauc, 5)));
    }
    if let Some(without) = test.rows_without_group {
        rows.push(("test rows without a group", thousands(without)));
    }
    rows.extend([
        ("test log loss", number(test.log_loss, 5)),
        ("test normalized entropy", number(test.normalized_entropy, 5)),
        ("test calibration", number(test.calibration, 4)),
        ("test rows", thousands(test.samples)),
    ]);
    rows
}

/// The history of rows in tables that do not keep every row.
fn row_history(table: &TableSummary) -> [(&'static str, String); 5] {
    [
        ("rows admitted", thousands(table.admitted)),
        ("gradients of ids not admitted", thousands(table.turned_away)),
        ("rows expired", thousands(table.expired)),
        ("rows evicted", thousands(table.evicted)),
        ("gradients of removed rows", thousands(table.gradients_dropped)),
    ]
}

/// The figures of a run that was more than one mode in one process.
fn course(summary: &Summary) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    if summary.tokens_issued > 0 {
        rows.extend([
            ("mode", summary.mode.clone()),
            ("staleness, mean", format!("{:.2}", summary.mean_staleness)),
            ("staleness, max", thousands(summary.max_staleness)),
            ("gradients left out", thousands(summary.excluded_gradients)),
            ("batches dropped", thousands(summary.dropped_batches)),
        ]);
    }
    if let Some(gap) = summary.average_sync_gap {
        rows.push(("batches between exchanges", format!("{gap:.2}")));
    }
    if summary.lost_replica_batches > 0 {
        rows.push(("batches of lost replicas", thousands(summary.lost_replica_batches)));
    }
    if summary.restarts > 0 {
        rows.push(("restarts", thousands(u64::from(summary.restarts))));
        rows.push(("batches trained again", thousands(summary.repeated_batches)));
    }
    if summary.mode_switches > 0 {
        rows.push(("mode switches", thousands(summary.mode_switches)));
    }
    if !summary.bytes_on_wire.is_empty() {
        rows.push(("sent between processes", bytes(summary.bytes_on_wire.values().sum())));
    }
    rows
}

/// The feature with the highest share of test ids without a row, as a phrase. `None` if all have
/// rows.
fn most_unseen(test: &TestMetrics) -> Option<String> {
    let (feature, share) = test.unseen.iter().max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    (*share > 0.0).then(|| format!("{} of the ids of {feature} unseen in training", percent(*share)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_leaves_out_results_that_the_summary_lacks() {
        let summary = Summary { steps: 1234, parameters_sha256: "abc".to_owned(), ..Summary::default() };
        let table = summary_table(&summary, true);
        assert!(table.contains("1,234") && table.contains("abc") && !table.contains("AUC"), "{table}");
    }

    #[test]
    fn a_run_that_trained_nothing_has_no_speed() {
        let summary = Summary { steps: 9, samples: 900, seconds: 2.0, samples_per_second: 449.6, ..Summary::default() };
        let trained = summary_table(&summary, true);
        assert!(trained.contains("samples/s") && trained.contains("450") && trained.contains("2.0 s"), "{trained}");
        let resumed = summary_table(&summary, false);
        assert!(!resumed.contains("samples/s") && !resumed.contains("2.0 s") && resumed.contains("900"), "{resumed}");
    }

    #[test]
    fn a_rollback_names_the_records_that_are_left_out() {
        let lost = vec![LostRecords { topic: "clicks".to_owned(), partition: 3, from: 100, until: 1_300 }];
        let event = |lost| JobEvent::RolledBack {
            checkpoint: "step-20".to_owned(),
            step: 20,
            from_step: 40,
            lost_rows: 1_200,
            lost,
            rollbacks: 1,
        };
        let told = sentence(&event(lost)).unwrap_or_default();
        assert!(told.contains("step-20 of step 20, without the 1,200 rows"), "{told}");
        assert!(told.ends_with("trained since (clicks 3: offsets 100 to 1299)"), "{told}");
        let of_files = sentence(&event(Vec::new())).unwrap_or_default();
        assert!(of_files.ends_with("trained since"), "{of_files}");
    }

    #[test]
    fn a_changed_share_says_how_slow_the_member_is() {
        let changed = |role, share, factor| sentence(&JobEvent::ShareChanged { role, index: 1, share, factor });
        let slow = changed(Role::Ps, 0.03125, 33.2).unwrap_or_default();
        assert!(slow.contains("1 takes 33.2 times as long for a row") && slow.contains("3.1 %"), "{slow}");
        let well = changed(Role::EmbeddingWorker, 1.0, 1.1).unwrap_or_default();
        assert!(well.contains("no longer slow") && well.contains("pieces"), "{well}");
        let loader = changed(Role::Loader, 0.0625, 20.0).unwrap_or_default();
        assert!(loader.contains("20.0 times as long for a batch") && loader.contains("usual chunks"), "{loader}");
    }

    #[test]
    fn the_table_shows_evictions_where_there_is_a_budget() {
        let table = Some(TableSummary { evicted: 1200, ..TableSummary::default() });
        let shown = |table| summary_table(&Summary { table, ..Summary::default() }, true);
        assert!(shown(table).contains("rows evicted") && shown(table).contains("1,200"), "{}", shown(table));
        assert!(!shown(None).contains("evicted"));
    }

    #[test]
    fn the_table_counts_rows_without_a_group() {
        let test = TestMetrics { rows_without_group: Some(1200), ..TestMetrics::default() };
        let table = summary_table(&Summary { test: Some(test), ..Summary::default() }, true);
        assert!(table.contains("test rows without a group") && table.contains("1,200"), "{table}");
    }

    #[test]
    fn the_table_lists_features_with_unseen_test_ids() {
        let unseen = [("item".to_owned(), 0.031), ("user".to_owned(), 0.0)].into();
        let test = TestMetrics { unseen, ..TestMetrics::default() };
        assert_eq!(most_unseen(&test).as_deref(), Some("3.1 % of the ids of item unseen in training"));
        let table = summary_table(&Summary { test: Some(test), ..Summary::default() }, true);
        assert!(table.contains("unseen in training, item") && !table.contains("user"), "{table}");
        assert_eq!(most_unseen(&TestMetrics::default()), None);
    }

    #[test]
    fn names_and_values_of_the_table_are_near_each_other() {
        let summary = Summary { steps: 9, parameters_sha256: "ab".repeat(32), ..Summary::default() };
        for line in summary_table(&summary, true).lines() {
            let gap = line.trim_end().chars().fold((0, 0), |(most, now), c| {
                let now = if c == ' ' { now + 1 } else { 0 };
                (most.max(now), now)
            });
            assert!(gap.0 < 20, "{line}");
        }
    }

    #[test]
    fn a_model_worse_than_the_mean_is_doubted() {
        let test =
            |normalized_entropy, auc| TestMetrics { normalized_entropy, auc, samples: 9, ..TestMetrics::default() };
        let worse = doubt(&test(Some(1.023), Some(0.5))).unwrap_or_default();
        assert!(worse.contains("1.023") && worse.contains("globalBatchSize"), "{worse}");
        assert_eq!(doubt(&test(Some(0.9), Some(0.7))), None);
        let equal = doubt(&test(None, None)).unwrap_or_default();
        assert!(equal.contains("all 9 labels of the test are equal"), "{equal}");
    }
}
