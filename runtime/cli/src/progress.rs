//! How far a job is: its epoch, its share of the steps, and the time left.

use std::time::{Duration, Instant};

use crate::human::{number, rate, thousands, time};
use crate::outlook::Outlook;

/// The figures of an event of progress.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Figures {
    pub(crate) step: u64,
    /// `None` until the job has counted its data.
    pub(crate) total_steps: Option<u64>,
    pub(crate) samples_per_second: f64,
    pub(crate) loss: f64,
    pub(crate) running_auc: Option<f64>,
}

/// The course of a run since its start, or since it resumed.
#[derive(Debug, Default)]
pub(crate) struct Course {
    outlook: Outlook,
    /// The number of steps, once the job has counted its data.
    total_steps: Option<u64>,
    /// The first step that was shown since training started or resumed, and the time of it.
    started: Option<(u64, Instant)>,
    /// Whether the job resumed before it had counted its data. Its first epoch may be over.
    has_unknown_epoch: bool,
}

impl Course {
    pub(crate) fn new(outlook: Outlook) -> Self {
        Self { outlook, ..Self::default() }
    }

    /// Notes an event of progress. Returns its line of text, the most important figures first: a
    /// narrow terminal shows only the beginning.
    pub(crate) fn line(&mut self, figures: &Figures) -> String {
        let (first, at) = *self.started.get_or_insert_with(|| (figures.step, Instant::now()));
        self.total_steps = figures.total_steps.or(self.total_steps);
        self.line_at(figures, figures.step.saturating_sub(first), at.elapsed())
    }

    /// The line of text after `made` steps in `elapsed`.
    fn line_at(&self, figures: &Figures, made: u64, elapsed: Duration) -> String {
        let step = figures.step;
        let mut parts = vec![format!("step {}{}", thousands(step), self.total_text())];
        if let Some(total) = self.total().filter(|total| *total > 0) {
            parts.push(format!("{:.0} %", 100.0 * step.min(total) as f64 / total as f64));
            if made > 0 && total > step {
                let left = elapsed.mul_f64((total - step) as f64 / made as f64);
                parts.push(format!("{} left", time(left)));
            }
        }
        if let Some((epoch, epochs)) = self.epoch_of(step).zip(self.outlook.epochs) {
            parts.push(format!("epoch {epoch}/{epochs}"));
        }
        parts.push(format!("loss {:.4}", figures.loss));
        parts.push(format!("training AUC {}", number(figures.running_auc, 4)));
        parts.push(format!("{} samples/s", rate(figures.samples_per_second)));
        if made > 0 {
            parts.push(format!("{} elapsed", time(elapsed)));
        }
        parts.join("  ")
    }

    /// The number of steps, or an estimate of it.
    pub(crate) fn total(&self) -> Option<u64> {
        self.total_steps.or(self.outlook.estimated_steps)
    }

    /// The number of steps, if it is known exactly.
    fn exact_total(&self) -> Option<u64> {
        self.total_steps.or(self.outlook.estimated_steps.filter(|_| self.outlook.is_exact))
    }

    fn total_text(&self) -> String {
        match (self.exact_total(), self.outlook.estimated_steps) {
            (Some(total), _) => format!("/{}", thousands(total)),
            (None, Some(estimate)) => format!("/~{}", thousands(estimate)),
            (None, None) => String::new(),
        }
    }

    /// The epoch, from 1, in which a job is that has trained `step` steps. `None` if the manifest
    /// sets steps instead of epochs, or if the job resumed and has not counted its data yet. A job
    /// that did not resume has counted its data at the end of the first epoch.
    pub(crate) fn epoch_of(&self, step: u64) -> Option<u32> {
        let epochs = self.outlook.epochs?;
        let Some(total) = self.exact_total().filter(|total| *total > 0) else {
            return (!self.has_unknown_epoch).then_some(1);
        };
        let epoch = (u128::from(step) * u128::from(epochs)).div_ceil(u128::from(total));
        Some(u32::try_from(epoch).unwrap_or(epochs).clamp(1, epochs.max(1)))
    }

    /// The job resumes or restarts: the pace so far says nothing about the time left.
    pub(crate) fn restart(&mut self) {
        self.started = None;
    }

    /// The job resumes at a step of an earlier run.
    pub(crate) fn resume(&mut self) {
        self.restart();
        self.has_unknown_epoch = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(outlook: Outlook, total_steps: Option<u64>, made: u64) -> String {
        let figures = Figures { step: 900_100, total_steps, samples_per_second: 1.0, loss: 0.5, running_auc: None };
        let course = Course { total_steps, ..Course::new(outlook) };
        course.line_at(&figures, made, Duration::from_secs(10 * u64::from(made > 0)))
    }

    #[test]
    fn the_time_left_follows_the_pace_of_this_run() {
        let total = Some(1_000_000);
        let text = line(Outlook::default(), total, 100);
        assert!(text.starts_with("step 900,100/1,000,000  90 %  2 h 46 min left  loss"), "{text}");
        assert!(!line(Outlook::default(), total, 0).contains("left"));
    }

    #[test]
    fn an_estimated_total_is_marked() {
        let outlook = Outlook { epochs: Some(2), estimated_steps: Some(1_800_200), ..Outlook::default() };
        let text = line(outlook, None, 0);
        assert!(text.starts_with("step 900,100/~1,800,200  50 %  epoch 1/2  loss 0.5000"), "{text}");
        let text = line(Outlook::default(), None, 10);
        assert!(text.starts_with("step 900,100  loss"), "{text}");
    }

    #[test]
    fn an_epoch_ends_with_its_last_step() {
        let outlook = Outlook { epochs: Some(3), ..Outlook::default() };
        let course = Course { total_steps: Some(300), ..Course::new(outlook) };
        let epochs = [0, 1, 100, 101, 200, 300, 999].map(|step| course.epoch_of(step));
        assert_eq!(epochs, [1, 1, 1, 2, 2, 3, 3].map(Some));
    }

    #[test]
    fn the_epoch_of_a_resumed_job_is_unknown_until_its_data_is_counted() {
        let outlook = Outlook { epochs: Some(3), ..Outlook::default() };
        let mut course = Course::new(outlook);
        assert_eq!(course.epoch_of(300), Some(1));
        course.resume();
        assert_eq!(course.epoch_of(300), None);
        course.total_steps = Some(300);
        assert_eq!(course.epoch_of(300), Some(3));
    }
}
