//! Properties of `decide` under random histories of pods, coordinators and users.
use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use proptest::prelude::*;
use rectrain_crds::{
    CheckpointStatus, DecisionAction, DecisionStatus, DecisionSubject, Mode, Phase, QualityStatus, RecTrainingJob,
    RecTrainingJobStatus, ReplaceSlowSpec, ResolvedJob, Role, StreamStatus, TrainingSpec, WindowStatus,
};
use rectrain_operator::attempt_signals::{AttemptSignals, Saving};
use rectrain_operator::automatic::Findings;
use rectrain_operator::coordinator_view::{CoordinatorView, Members, NoStep, Report, SlowMember, Stage, SwitchAnswer};
use rectrain_operator::decisions;
use rectrain_operator::events::transitions;
use rectrain_operator::failure::{Cause, Problem};
use rectrain_operator::members;
use rectrain_operator::names::manifest_replicas;
use rectrain_operator::phase::{Decision, Facts, Run, decide, wanted_mode};
use rectrain_operator::pods::{Ended, PodFacts};
use rectrain_operator::reconcile::validate;

use crate::manifests::CHECKPOINTS as MANIFEST;

/// Further lines of [`MANIFEST`]: the operator's decisions about members are carried out.
const APPLIED: &str = "  training: {mode: auto, localBatchSize: 512}
  autoscaling: {mode: apply, ps: {max: 6}, embeddingWorker: {max: 6}, denseWorker: {max: 6}}
";

/// An event between two reconciles.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "a test has few of them")]
enum Happening {
    Time(i64),
    /// Pods of the present attempt start, or all pods end.
    PodsCome,
    PodsGo,
    Coordinator(Box<CoordinatorView>),
    Restarts(u32),
    Waits(&'static str),
    Ends(i32, bool),
    Suspend(bool),
    Rows(u64),
    /// The manifest asks for a mode, and the coordinator's answer to a request for it.
    Mode(Mode),
    Answer(SwitchAnswer),
    Members(Role, u32),
    Deadline(Option<u32>),
    Obstacle(bool),
    /// The state of a requested checkpoint.
    Saving(Saving),
    /// The operator decides on a number of members.
    Decided(DecisionSubject, u32),
}

fn coordinator() -> impl Strategy<Value = CoordinatorView> {
    let stage = prop_oneof![Just(Stage::Starting), Just(Stage::Training), Just(Stage::Evaluating)];
    let idle = proptest::option::of(0f64..1000.0);
    let members = (member_role(), 1u32..4, 1u32..4);
    let live = (stage, 0u64..5, members, idle).prop_map(|(stage, step, (role, present, wanted), idle_seconds)| {
        let members = [(role, Members { present, wanted, needed: present.max(wanted) })].into();
        let (loss, last_checkpoint) = (f64::NAN, None);
        CoordinatorView::Live(Report { idle_seconds, stage, loss, last_checkpoint, members, ..at(step) })
    });
    let failed = |user_error| CoordinatorView::Failed { message: "m".to_owned(), user_error };
    prop_oneof![
        2 => Just(CoordinatorView::Silent),
        6 => live,
        1 => Just(CoordinatorView::Complete { summary: Box::default(), last_checkpoint: None }),
        1 => Just(failed(true)),
        3 => Just(failed(false)),
    ]
}

/// A role whose number may change while the job trains.
fn member_role() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Ps), Just(Role::EmbeddingWorker), Just(Role::Loader)]
}

fn happening() -> impl Strategy<Value = Happening> {
    use Happening::*;
    let mode = prop_oneof![Just(self::Mode::Sync), Just(self::Mode::Gba), Just(self::Mode::Hybrid)];
    let answer = prop_oneof![
        Just(SwitchAnswer::Accepted),
        Just(SwitchAnswer::Refused("r".to_owned())),
        Just(SwitchAnswer::Again("a".to_owned()))
    ];
    let reasons = prop_oneof![Just("ImagePullBackOff"), Just("CrashLoopBackOff"), Just("CreateContainerConfigError")];
    prop_oneof![
        4 => (0i64..40).prop_map(Time),
        4 => Just(PodsCome),
        3 => Just(PodsGo),
        6 => coordinator().prop_map(reported),
        1 => (0u32..3).prop_map(Restarts),
        1 => reasons.prop_map(Waits),
        1 => (prop_oneof![Just(1), Just(2), Just(137)], any::<bool>()).prop_map(|(code, oom)| Ends(code, oom)),
        1 => any::<bool>().prop_map(Suspend),
        1 => (1u64..3).prop_map(|rows| Rows(rows * 1000)),
        2 => mode.prop_map(Mode),
        2 => (member_role(), 1u32..4).prop_map(|(role, replicas)| Members(role, replicas)),
        1 => answer.prop_map(Answer),
        1 => prop::option::of(1u32..200).prop_map(Deadline),
        1 => any::<bool>().prop_map(Obstacle),
        1 => prop_oneof![Just(self::Saving::No), Just(self::Saving::UnderWay), Just(self::Saving::Over)].prop_map(Saving),
    ]
}

/// Like [`happening`], with automatic decisions, and without other changes of the same settings.
fn happening_or_decision() -> impl Strategy<Value = Happening> {
    let subjects = [DecisionSubject::Ps, DecisionSubject::EmbeddingWorker, DecisionSubject::DenseWorker];
    let others = happening()
        .prop_filter("set by decisions", |happening| !matches!(happening, Happening::Mode(_) | Happening::Members(..)));
    prop_oneof![
        4 => others,
        1 => (prop::sample::select(subjects.to_vec()), 1u32..7).prop_map(|(of, to)| Happening::Decided(of, to)),
    ]
}

struct History {
    job: RecTrainingJob,
    now: i64,
    pods: Vec<PodFacts>,
    coordinator: CoordinatorView,
    answer: SwitchAnswer,
    obstacle: Option<Problem>,
    saving: Saving,
    /// The findings of the next look.
    findings: Option<Findings>,
    /// The resolved manifest; computed when it changes.
    resolved: ResolvedJob,
    spec_hash: String,
}

impl History {
    fn new() -> Self {
        Self::of(MANIFEST)
    }

    fn of(manifest: &str) -> Self {
        let mut job = rectrain_crds::parse_manifest(manifest, "job.yaml").unwrap();
        job.metadata.generation = Some(1);
        let (resolved, spec_hash) = (validate::verdict(&job).unwrap(), validate::spec_hash(&job.spec));
        let coordinator = CoordinatorView::Silent;
        let answer = SwitchAnswer::Accepted;
        let (now, pods, obstacle, findings) = (1_800_000_000, Vec::new(), None, None);
        let saving = Saving::No;
        Self { job, now, pods, coordinator, answer, obstacle, saving, findings, resolved, spec_hash }
    }

    fn attempt(&self) -> u32 {
        self.job.status.as_ref().and_then(|s| s.attempt.as_ref()).map_or(0, |attempt| attempt.number)
    }

    fn happens(&mut self, happening: &Happening) {
        match happening.clone() {
            Happening::Time(seconds) => self.now += seconds,
            Happening::PodsCome => self.start_pods(),
            Happening::PodsGo => self.pods.clear(),
            Happening::Coordinator(view) => self.coordinator = *view,
            Happening::Restarts(restarts) => self.pods.iter_mut().for_each(|pod| pod.restarts = restarts),
            Happening::Waits(reason) => {
                self.pods.iter_mut().take(1).for_each(|pod| pod.waiting = Some((reason.to_owned(), String::new())));
            }
            Happening::Ends(exit_code, out_of_memory) => {
                let ended = Ended { exit_code, out_of_memory, message: String::new(), at: None };
                self.pods.iter_mut().take(1).for_each(|pod| pod.ended = Some(ended.clone()));
            }
            Happening::Answer(answer) => self.answer = answer,
            Happening::Obstacle(exists) => {
                self.obstacle = exists.then(|| Problem::new(Cause::NameConflict, "taken"));
            }
            Happening::Saving(saving) => self.saving = saving,
            Happening::Decided(subject, to) => self.findings = Some(self.decided(subject, to)),
            edit => self.edit(|job| edit_manifest(job, edit)),
        }
    }

    /// All pods of the present attempt start, unless pods run already: StatefulSets have no pods of
    /// two attempts.
    fn start_pods(&mut self) {
        let number = self.attempt();
        if self.pods.is_empty() {
            self.pods = Role::ALL.iter().map(|role| pod(*role, number)).collect();
        }
    }

    /// The findings of a look that decides on `to` members.
    fn decided(&self, subject: DecisionSubject, to: u32) -> Findings {
        let decision = DecisionStatus {
            subject,
            time: Time(Timestamp::from_second(self.now).unwrap()),
            action: DecisionAction::Scale { from: 0, to },
            applied: true,
            reason: "why".to_owned(),
        };
        Findings { decisions: vec![decision], prediction: None }
    }

    /// Whether another attempt begins also without the change of the mode.
    fn restarts_anyway(&self, before: &RecTrainingJobStatus) -> bool {
        let same_mode = before.attempt.as_ref().and_then(|attempt| attempt.mode.as_ref()).map(|mode| mode.wanted);
        let mut other = Self { job: self.job.clone(), pods: self.pods.clone(), ..Self::new() };
        other.edit(|job| job.spec.training.get_or_insert_default().mode = same_mode.map(Into::into));
        other.now = self.now;
        other.coordinator = self.coordinator.clone();
        other.saving = self.saving;
        let after = other.decide().0.status;
        after.attempt.map(|attempt| attempt.number) != before.attempt.as_ref().map(|attempt| attempt.number)
    }

    /// Whether its attempt ends also without the suspension.
    fn ends_anyway(&self) -> bool {
        let mut other = Self { job: self.job.clone(), pods: self.pods.clone(), ..Self::new() };
        other.edit(|job| job.spec.suspend = None);
        other.now = self.now;
        other.coordinator = self.coordinator.clone();
        other.saving = self.saving;
        matches!(other.decide().0.status.phase, Some(Phase::Restarting | Phase::Failed))
    }

    fn edit(&mut self, change: impl FnOnce(&mut RecTrainingJob)) {
        change(&mut self.job);
        self.job.metadata.generation = self.job.metadata.generation.map(|generation| generation + 1);
        self.resolved = validate::verdict(&self.job).unwrap();
        self.spec_hash = validate::spec_hash(&self.job.spec);
    }

    /// Decides, and again with the coordinator's answer if it is asked for a mode. Returns that
    /// mode, too.
    fn decide(&self) -> (Decision, Option<Mode>) {
        let first = self.decide_with(None);
        match first.ask_mode {
            Some(mode) => (self.decide_with(Some(&self.answer)), Some(mode)),
            None => (first, None),
        }
    }

    /// Whether a request for `replicas` members aborts a join: it asks for the present number.
    fn aborts_join(&self, role: Role, replicas: u32) -> bool {
        let CoordinatorView::Live(report) = &self.coordinator else { unreachable!() };
        let members = report.members[&role];
        members.wanted > members.present && replicas == members.present
    }

    fn has_coordinator(&self) -> bool {
        self.pods.iter().any(|pod| pod.attempt == self.attempt())
    }

    fn decide_with(&self, answer: Option<&SwitchAnswer>) -> Decision {
        let ready: BTreeMap<Role, u32> = Role::ALL
            .iter()
            .map(|role| (*role, self.pods.iter().filter(|pod| pod.role == *role).count() as u32))
            .collect();
        decide(&Facts {
            now: Timestamp::from_second(self.now).unwrap(),
            job: &self.job,
            verdict: Ok(&self.resolved),
            impossible_mode: None,
            spec_hash: &self.spec_hash,
            image: "runtime:1",
            tls: true,
            pods: &self.pods,
            ready: &ready,
            coordinator: if self.has_coordinator() { &self.coordinator } else { &CoordinatorView::Silent },
            answer,
            automatic: self.findings.as_ref(),
            obstacle: self.obstacle.as_ref(),
            signals: &AttemptSignals { saving: self.saving, ..AttemptSignals::default() },
            poll: Duration::from_secs(3),
        })
    }
}

/// The user changes the manifest.
fn edit_manifest(job: &mut RecTrainingJob, edit: Happening) {
    match edit {
        Happening::Suspend(suspend) => job.spec.suspend = Some(suspend),
        Happening::Rows(rows) => job.spec.data.synthetic.as_mut().unwrap().rows = Some(rows),
        Happening::Mode(mode) => {
            job.spec.training = Some(TrainingSpec { mode: Some(mode.into()), ..TrainingSpec::default() });
        }
        Happening::Members(role, replicas) => {
            job.spec = validate::with_replicas(job.spec.clone(), |of| (of == role).then_some(replicas));
        }
        Happening::Deadline(deadline) => job.spec.active_deadline_seconds = deadline,
        other => panic!("{other:?} is no change of the manifest"),
    }
}

fn pod(role: Role, attempt: u32) -> PodFacts {
    PodFacts {
        name: format!("clicks-{}-0", role.name()),
        uid: format!("uid-of-{}-{attempt}", role.name()),
        role,
        attempt,
        job_uid: None,
        is_terminating: false,
        is_ready: true,
        ready_since: None,
        ip: None,
        node: None,
        pull_secrets: Vec::new(),
        requested_millicores: 0,
        is_running: true,
        restarts: 0,
        unschedulable: None,
        unschedulable_since: None,
        waiting: None,
        ended: None,
        evicted: None,
        terminates_by: None,
        finalizers: Vec::new(),
        disruption: None,
    }
}

fn holds(status: &RecTrainingJobStatus, kind: &str) -> bool {
    status.conditions.iter().any(|condition| condition.type_ == kind && condition.status == "True")
}

/// One decision of a random history.
struct Step<'a> {
    history: &'a History,
    happening: &'a Happening,
    before: RecTrainingJobStatus,
    decision: Decision,
    /// The mode that the coordinator was asked for.
    asked: Option<Mode>,
}

type Checked = Result<(), TestCaseError>;

impl Step<'_> {
    fn after(&self) -> &RecTrainingJobStatus {
        &self.decision.status
    }

    fn phase(&self) -> Phase {
        self.after().phase.unwrap()
    }

    fn number(&self) -> u32 {
        self.after().attempt.as_ref().map_or(0, |attempt| attempt.number)
    }

    fn trained_before(&self) -> bool {
        matches!(self.before.phase, Some(Phase::Training | Phase::Evaluating))
    }

    fn check(&self) -> Checked {
        self.check_conditions()?;
        self.check_pods()?;
        self.check_checkpoint()?;
        self.check_ended()?;
        self.check_mode()?;
        self.check_members()?;
        self.check_step()?;
        self.check_restarts()
    }

    /// The conditions are complete and do not contradict each other.
    fn check_conditions(&self) -> Checked {
        let (after, phase) = (self.after(), self.phase());
        let kinds: Vec<&str> = after.conditions.iter().map(|c| c.type_.as_str()).collect();
        prop_assert_eq!(kinds, ["Ready", "Reconciling", "Stalled", "Complete", "Failed", "Suspended", "Checkpointed"]);
        prop_assert_eq!(holds(after, "Complete"), phase == Phase::Complete);
        prop_assert_eq!(holds(after, "Failed"), phase == Phase::Failed);
        prop_assert_eq!(holds(after, "Suspended"), phase == Phase::Suspended);
        prop_assert!(!(holds(after, "Ready") && (holds(after, "Stalled") || holds(after, "Reconciling"))));
        prop_assert_eq!(after.observed_generation, self.history.job.metadata.generation);
        prop_assert_eq!(phase == Phase::Failed, after.conditions[4].message.len() > 1 && holds(after, "Failed"));
        Ok(())
    }

    /// Pods of two attempts never run at the same time, and none runs for a job that has ended or
    /// is suspended.
    fn check_pods(&self) -> Checked {
        let number = self.number();
        if self.decision.run == Run::Go {
            prop_assert!(self.history.pods.iter().all(|pod| pod.attempt == number), "{:?}", self.decision);
            prop_assert!(!matches!(self.phase(), Phase::Complete | Phase::Failed | Phase::Suspended));
            prop_assert!(self.history.job.spec.suspend != Some(true));
        }
        let before = self.before.attempt.as_ref().map_or(0, |attempt| attempt.number);
        prop_assert!(number >= before, "attempts are never reused");
        Ok(())
    }

    /// An attempt that can save a checkpoint is asked once, and is not suspended before it has,
    /// unless it ends by itself.
    fn check_checkpoint(&self) -> Checked {
        let history = self.history;
        let is_live = self.trained_before()
            && history.has_coordinator()
            && matches!(history.coordinator, CoordinatorView::Live(_));
        if is_live && history.saving != Saving::Over && self.phase() == Phase::Suspended {
            prop_assert!(history.ends_anyway(), "{:?}", self.decision);
        }
        let may_ask = is_live && history.saving == Saving::No && self.decision.run == Run::AsIs;
        prop_assert!(!self.decision.ask_save || may_ask);
        Ok(())
    }

    /// A job that has ended stays ended, unless it failed and its manifest was changed.
    fn check_ended(&self) -> Checked {
        let (before, history) = (&self.before, self.history);
        if before.phase == Some(Phase::Complete) {
            prop_assert_eq!(self.phase(), Phase::Complete);
            prop_assert_eq!(&self.after().summary, &before.summary);
        }
        let attempt = before.attempt.as_ref();
        let mode_before = attempt.and_then(|attempt| attempt.mode.as_ref()).map(|mode| mode.wanted);
        let replicas = attempt.and_then(|attempt| attempt.replicas);
        let wanted_of = |role| replicas.as_ref().and_then(|replicas| replicas.get(role)).map(|r| r.wanted);
        let is_changed = attempt.map(|a| &a.spec_hash) != Some(&history.spec_hash)
            || mode_before != Some(wanted_mode(&history.job))
            || Role::MEMBERS
                .into_iter()
                .any(|role| wanted_of(role) != Some(manifest_replicas(role, &history.resolved)));
        if before.phase == Some(Phase::Failed) && !is_changed {
            prop_assert_eq!(self.phase(), Phase::Failed);
        }
        Ok(())
    }

    /// A change of the mode alone begins no attempt. Only a job that trains is asked, and only for
    /// the manifest's mode.
    fn check_mode(&self) -> Checked {
        let is_mode = matches!(self.happening, Happening::Mode(_));
        if is_mode && !matches!(self.before.phase, None | Some(Phase::Failed)) {
            let number = self.number();
            let same = self.before.attempt.as_ref().map_or(number, |attempt| attempt.number) == number;
            prop_assert!(same || self.history.restarts_anyway(&self.before), "{:?}", self.decision);
        }
        if let Some(mode) = self.asked {
            prop_assert_eq!(mode, wanted_mode(&self.history.job));
            prop_assert!(self.is_running());
        }
        prop_assert_eq!(self.decision.ask_mode, None, "no second request after an answer");
        Ok(())
    }

    fn is_running(&self) -> bool {
        matches!(self.phase(), Phase::Training | Phase::Evaluating) && self.decision.run == Run::Go
    }

    /// A change of the number of members of a job that trains begins no attempt. All pods stay that
    /// the coordinator needs.
    fn check_members(&self) -> Checked {
        let (history, decision) = (self.history, &self.decision);
        if matches!(self.happening, Happening::Members(..)) && self.trained_before() {
            prop_assert_eq!(self.number(), self.before.attempt.as_ref().unwrap().number);
        }
        if let (CoordinatorView::Live(report), Run::Go, true) =
            (&history.coordinator, decision.run, history.has_coordinator())
        {
            let replicas = self.after().attempt.as_ref().unwrap().replicas.unwrap();
            for (role, reported) in &report.members {
                prop_assert_eq!(replicas.get(*role).unwrap().needed, reported.needed);
            }
        }
        for &(role, replicas) in &decision.ask_members {
            prop_assert!(history.aborts_join(role, replicas) || replicas == manifest_replicas(role, &history.resolved));
            prop_assert!(self.is_running());
        }
        Ok(())
    }

    /// When an attempt has ended, the status shows the step of the last checkpoint, or none.
    fn check_step(&self) -> Checked {
        let before = self.before.attempt.as_ref().map_or(0, |attempt| attempt.number);
        if self.phase() == Phase::Suspended || self.number() > before {
            let saved = self.after().last_checkpoint.as_ref().map(|checkpoint| checkpoint.step);
            prop_assert_eq!(self.after().step, saved, "{:?}", self.decision);
        }
        Ok(())
    }

    /// The number of restarts never decreases while a job lives.
    fn check_restarts(&self) -> Checked {
        if self.before.phase != Some(Phase::Failed) {
            prop_assert!(self.after().restarts.unwrap_or(0) >= self.before.restarts.unwrap_or(0));
        }
        Ok(())
    }
}

/// The same facts give the same status again: the operator settles. An answered request is not
/// repeated.
fn check_stability(history: &mut History, happening: &Happening, asked: Option<Mode>) -> Checked {
    let (again, asked_again) = history.decide();
    history.job.status = Some(again.status.clone());
    let (third, _) = history.decide();
    prop_assert_eq!(&third.status, &again.status, "after {:?}", happening);
    let is_answered = !matches!(history.answer, SwitchAnswer::Again(_));
    prop_assert!(!(asked.is_some() && asked_again.is_some() && is_answered));
    Ok(())
}

/// The last decided number of members of a role.
fn decided_replicas(status: &RecTrainingJobStatus, role: Role) -> Option<u32> {
    let decided = decisions::last(&status.decisions, decisions::subject(role)?)?;
    match decided.action {
        DecisionAction::Scale { to, .. } => Some(to),
        ref other => panic!("{other:?}"),
    }
}

impl Step<'_> {
    /// Decisions stay in their order, and new ones of a job that trains come last.
    fn has_new_decisions(&self) -> bool {
        self.after().decisions != self.before.decisions
    }

    fn check_decisions(&self) -> Checked {
        let after = self.after();
        let found = self.history.findings.iter().flat_map(|findings| &findings.decisions);
        let are_findings = after.phase == Some(Phase::Training) && found.eq(after.decisions.last());
        prop_assert!(!self.has_new_decisions() || are_findings);
        for role in Role::MEMBERS {
            // The manifest's number, until a decision changes it.
            let wanted =
                decided_replicas(after, role).unwrap_or_else(|| manifest_replicas(role, &self.history.resolved));
            prop_assert_eq!(members::wanted(Some(after), &self.history.resolved, role), wanted);
            let replicas = after.attempt.as_ref().and_then(|attempt| attempt.replicas);
            // A decision is written down first, and carried out from the next look on.
            if let (Some(replicas), false, Run::Go) = (replicas, self.has_new_decisions(), self.decision.run) {
                prop_assert_eq!(replicas.get(role).unwrap().wanted, wanted, "{:?}", self.happening);
            }
        }
        for &(role, replicas) in &self.decision.ask_members {
            let wanted = members::wanted(Some(&self.before), &self.history.resolved, role);
            let is_wanted = self.history.aborts_join(role, replicas) || replicas == wanted;
            prop_assert!(is_wanted, "{:?} {}", role, replicas);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn decisions_are_sound_under_random_histories(happenings in prop::collection::vec(happening(), 1..60)) {
        let mut history = History::new();
        for happening in &happenings {
            history.happens(happening);
            let before = history.job.status.clone().unwrap_or_default();
            let (decision, asked) = history.decide();
            let step = Step { history: &history, happening, before, decision, asked };
            step.check()?;
            let status = step.decision.status;
            history.job.status = Some(status);
            check_stability(&mut history, happening, asked)?;
        }
    }

    #[test]
    fn no_reconcile_reverts_a_decision(happenings in prop::collection::vec(happening_or_decision(), 1..80)) {
        let mut history = History::of(&format!("{MANIFEST}{APPLIED}"));
        for happening in &happenings {
            history.findings = None;
            history.happens(happening);
            let before = history.job.status.clone().unwrap_or_default();
            let (decision, asked) = history.decide();
            let step = Step { history: &history, happening, before, decision, asked };
            step.check_decisions()?;
            let status = step.decision.status;
            history.job.status = Some(status);
        }
    }
}

/// A job that trains, and whose coordinator reports progress all the time.
fn training(step: u64) -> History {
    let mut history = History::new();
    history.happens(&reported(CoordinatorView::Live(at(step))));
    for happening in [Happening::PodsCome, Happening::Time(5)] {
        history.advance();
        history.happens(&happening);
    }
    assert_eq!(history.advance().phase, Some(Phase::Training));
    history
}

fn reported(view: CoordinatorView) -> Happening {
    Happening::Coordinator(Box::new(view))
}

/// A report of training at a step, with a checkpoint of the same step.
fn at(step: u64) -> Report {
    let last_checkpoint = Some(CheckpointStatus { name: format!("full-{step}"), step });
    let (stage, idle_seconds) = (Stage::Training, Some(0.0));
    Report {
        idle_seconds,
        recovered: false,
        slots_decided_seconds: 0,
        slowest: None,
        no_step: None,
        tables: Box::default(),
        stream: None,
        quality: None,
        missing: Vec::new(),
        stage,
        mode: Some(Mode::Sync),
        step,
        total_steps: None,
        samples_per_second: 1.0,
        loss: 0.5,
        auc: None,
        unseen: BTreeMap::new(),
        last_checkpoint,
        members: BTreeMap::new(),
    }
}

impl History {
    /// Decides and writes the status.
    fn advance(&mut self) -> RecTrainingJobStatus {
        let status = self.decide().0.status;
        self.job.status = Some(status.clone());
        status
    }
}

/// The message of the condition `Ready`.
fn ready_message(status: &RecTrainingJobStatus) -> String {
    let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready");
    ready.map(|ready| ready.message.clone()).unwrap_or_default()
}

#[test]
fn a_job_on_a_stream_shows_how_far_it_is_behind() {
    let mut history = training(7);
    let behind = StreamStatus { lag_rows: 5, lag_seconds: 40, event_time: None, lost_records: 0, partitions: Some(8) };
    let stream = Some(Box::new(behind.clone()));
    history.happens(&reported(CoordinatorView::Live(Report { stream, ..at(7) })));
    assert_eq!(history.advance().stream, Some(behind));
    history.happens(&reported(CoordinatorView::Live(at(9))));
    assert_eq!(history.advance().stream, None);
}

#[test]
fn a_job_that_waits_for_its_quality_says_so() {
    let mut history = training(7);
    let window = WindowStatus { auc: Some(0.7), rows: 9, ..WindowStatus::default() };
    let quality = QualityStatus { window, baseline: None, has_fallen: true, is_held: true };
    history.happens(&reported(CoordinatorView::Live(Report { quality: Some(Box::new(quality)), ..at(7) })));
    let status = history.advance();
    assert_eq!(status.quality, Some(quality));
    assert!(ready_message(&status).starts_with("training waits, because the quality"), "{}", ready_message(&status));
}

#[test]
fn a_stall_and_a_slow_member_are_in_the_status() {
    let mut history = training(7);
    let member = SlowMember { role: Role::Ps, index: 0, share: 0.61, since_seconds: 1_700_000_000 };
    let slowest = Some(Box::new(member));
    let no_step = Some(Box::new(NoStep { seconds: 17.0, waits_for: Some((Role::Ps, 0)) }));
    history.happens(&reported(CoordinatorView::Live(Report { slowest, no_step, ..at(7) })));
    let status = history.advance();
    let slow = status.slowest.clone().expect("a slow member");
    assert_eq!((slow.role.as_str(), slow.index, slow.share), ("ps", 0, 0.6));
    let message = ready_message(&status);
    assert!(message.starts_with("no step was made for 15 s: training waits for ") && message.contains(&slow.pod));
    // The share wavers by less than a tenth, and steps are made again.
    let wavering = Some(Box::new(SlowMember { share: 0.66, ..member }));
    history.happens(&reported(CoordinatorView::Live(Report { slowest: wavering, ..at(8) })));
    let status = history.advance();
    assert_eq!(ready_message(&status), "the job trains");
    assert_eq!(status.slowest, Some(slow));
    history.happens(&reported(CoordinatorView::Live(at(9))));
    assert_eq!(history.advance().slowest, None);
}

#[test]
fn a_pod_that_stays_slow_is_replaced_as_often_as_the_manifest_allows() {
    let mut history = with_a_slow_loader();
    history.happens(&Happening::Time(700));
    assert_eq!(history.advance().replaced_pods, [], "the manifest does not ask for it");
    history.edit(replace_slow);
    let (decision, _) = history.decide();
    let [replaced] = &decision.status.replaced_pods[..] else { panic!("{:?}", decision.status.replaced_pods) };
    assert_eq!((replaced.pod.as_str(), replaced.role.as_str()), ("clicks-loader-0", "loader"));
    let events = transitions(history.job.status.as_ref(), &decision);
    let event = events.iter().find(|event| event.reason == "SlowPodReplaced").expect("an event");
    assert!(event.is_warning && event.note.starts_with("clicks-loader-0 has been slow for 700 s"), "{event:?}");
    history.advance();
    // Its replacement has the same name. The default is two in an hour.
    for (seconds, count) in [(599, 1), (1, 2), (900, 2), (2100, 3)] {
        come_anew(&mut history, seconds);
        assert_eq!(history.advance().replaced_pods.len(), count, "after {seconds} s more");
    }
}

#[test]
fn a_slow_pod_is_replaced_only_while_no_other_pod_ends() {
    let mut history = with_a_slow_loader();
    history.edit(replace_slow);
    history.happens(&Happening::Time(700));
    // Its rows still move, and the StatefulSet still counts it as ready.
    history.pods[2].is_terminating = true;
    assert_eq!(history.advance().replaced_pods, []);
    history.pods[2].is_terminating = false;
    let report = std::mem::replace(&mut history.coordinator, CoordinatorView::Silent);
    assert_eq!(history.advance().replaced_pods, [], "the report is old");
    history.coordinator = report;
    let replaced = history.advance().replaced_pods;
    assert_eq!(replaced.iter().map(|replaced| replaced.pod.as_str()).collect::<Vec<_>>(), ["clicks-loader-0"]);
    // Its deletion is refused for an hour, and another member is slow.
    history.coordinator = slow(Role::EmbeddingWorker, history.now);
    history.happens(&Happening::Time(3600));
    assert_eq!(history.advance().replaced_pods.len(), 1);
    come_anew(&mut history, 1);
    assert_eq!(history.advance().replaced_pods.len(), 2);
}

/// The report of a member that is slow since a time.
fn slow(role: Role, since: i64) -> CoordinatorView {
    let since_seconds = u64::try_from(since).unwrap();
    let member = SlowMember { role, index: 0, share: 0.5, since_seconds };
    CoordinatorView::Live(Report { slowest: Some(Box::new(member)), ..at(8) })
}

/// A job that trains, with a loader that is slow from now on.
fn with_a_slow_loader() -> History {
    let mut history = training(7);
    history.coordinator = slow(Role::Loader, history.now);
    history
}

fn replace_slow(job: &mut RecTrainingJob) {
    let given = job.spec.fault_tolerance.get_or_insert_default();
    given.replace_slow = Some(ReplaceSlowSpec::default());
}

/// After so many seconds, new pods of the same names are there.
fn come_anew(history: &mut History, seconds: i64) {
    history.happens(&Happening::Time(seconds));
    let now = history.now;
    history.pods.iter_mut().for_each(|pod| pod.uid = format!("{}-{now}", pod.name));
}

#[test]
fn the_last_checkpoint_of_an_attempt_is_in_the_status() {
    for ends in [Happening::Suspend(true), Happening::Rows(2000)] {
        let mut history = training(7);
        history.happens(&ends);
        assert_eq!(history.advance().last_checkpoint.map(|checkpoint| checkpoint.step), Some(7));
        // The checkpoint exists with the same report.
        history.happens(&Happening::Saving(Saving::Over));
        history.happens(&reported(CoordinatorView::Live(at(9))));
        let status = history.advance();
        assert!(matches!(status.phase, Some(Phase::Suspended | Phase::Restarting)), "{:?}", status.phase);
        assert_eq!(status.last_checkpoint.map(|checkpoint| checkpoint.step), Some(9), "{ends:?}");
    }
}

#[test]
fn a_change_is_carried_out_though_the_attempt_ends_while_it_saves() {
    let stalls = CoordinatorView::Live(Report { idle_seconds: Some(100.0), ..at(7) });
    let crashes = CoordinatorView::Failed { message: "ps 0 is gone".to_owned(), user_error: false };
    for (ends, seconds) in [(stalls, 100), (crashes, 0)] {
        let mut history = training(7);
        history.happens(&Happening::Restarts(3));
        assert_eq!(history.advance().restarts, Some(3), "none is left");
        history.happens(&Happening::Rows(2000));
        assert!(history.decide().0.is_saving);
        history.advance();
        history.happens(&Happening::Saving(Saving::UnderWay));
        history.happens(&Happening::Time(seconds));
        history.happens(&reported(ends));
        let status = history.advance();
        let attempt = status.attempt.unwrap();
        assert_eq!((status.phase, attempt.number, status.restarts), (Some(Phase::Restarting), 2, Some(3)));
        assert_eq!(attempt.spec_hash, history.spec_hash);
    }
}

#[test]
fn a_day_of_training_without_a_restart_forgives_restarts() {
    let mut history = training(7);
    history.happens(&Happening::Restarts(3));
    assert_eq!(history.advance().counted_restarts(), 3);
    for (seconds, counted) in [(60 * 60 * 24 - 1, 3), (1, 0)] {
        history.happens(&Happening::Time(seconds));
        assert_eq!(history.advance().counted_restarts(), counted);
    }
    // Two more restarts; the last one ends the attempt.
    history.happens(&Happening::Restarts(5));
    let status = history.advance();
    assert_eq!((status.phase, status.restarts, status.counted_restarts()), (Some(Phase::Training), Some(5), 2));
    history.happens(&reported(CoordinatorView::Failed { message: "m".to_owned(), user_error: false }));
    let status = history.advance();
    let wait = status.attempt.unwrap().not_before.unwrap().0.as_second() - history.now;
    assert_eq!((status.phase, status.restarts, wait), (Some(Phase::Restarting), Some(5), 20));
}
