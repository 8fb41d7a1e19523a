//! `decide` under random histories: whatever pods, coordinators and users do, and in whatever order, these hold.
use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use proptest::prelude::*;
use rectrain_crds::{
    CheckpointStatus, DecisionStatus, DecisionSubject, Mode, Phase, RecTrainingJob, RecTrainingJobStatus, ResolvedJob,
    TrainingSpec,
};
use rectrain_operator::automatic::{self, Findings};
use rectrain_operator::coordinator::{CoordinatorView, Members, Report, Stage};
use rectrain_operator::failure::{Cause, Problem};
use rectrain_operator::members;
use rectrain_operator::names::Role;
use rectrain_operator::notice::{Noticed, Saving};
use rectrain_operator::phase::{Decision, Facts, Run, decide, wanted_mode};
use rectrain_operator::pods::{Ended, PodFacts};
use rectrain_operator::reconcile::validate;
use rectrain_operator::switch::SwitchAnswer;

const MANIFEST: &str = r#"
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks, namespace: ads}
spec:
  model: {kind: lr}
  features: {sparse: [{name: C1}]}
  data: {synthetic: {rows: 1000}}
  checkpoint: {path: gs://ads/clicks}
  faultTolerance: {maxRestarts: 3, backoffSeconds: 10, stallSeconds: 60}
"#;

/// What [`MANIFEST`] goes on with where the operator's decisions about members are carried out.
const DECIDED_ON: &str = "  training: {mode: auto, localBatchSize: 512}
  autoscaling: {mode: apply, ps: {max: 6}, embeddingWorker: {max: 6}, denseWorker: {max: 6}}
";

/// What happens between two reconciles.
#[derive(Clone, Debug)]
enum Happening {
    Time(i64),
    /// Pods of the present attempt come, or all pods go.
    PodsCome,
    PodsGo,
    Coordinator(CoordinatorView),
    Restarts(u32),
    Waits(&'static str),
    Ends(i32, bool),
    Suspend(bool),
    Rows(u64),
    /// The manifest asks for a mode, and a coordinator that is asked for one answers so.
    Mode(Mode),
    Answer(SwitchAnswer),
    Members(Role, u32),
    Deadline(Option<u32>),
    Obstacle(bool),
    /// How a checkpoint stands that the coordinator was asked for.
    Saving(Saving),
    /// The operator finds that there should be so many.
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

/// Of a role whose number may change while the job trains.
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
        6 => coordinator().prop_map(Coordinator),
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

/// As [`happening`], where decisions are made too and nobody else changes what they are about.
fn happening_or_decision() -> impl Strategy<Value = Happening> {
    let subjects = [DecisionSubject::Ps, DecisionSubject::EmbeddingWorker, DecisionSubject::DenseWorker];
    let others = happening()
        .prop_filter("somebody else's", |happening| !matches!(happening, Happening::Mode(_) | Happening::Members(..)));
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
    /// What is found out at the next look.
    findings: Option<Findings>,
    /// Of the manifest as it is: worked out when it changes.
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
            Happening::PodsCome => {
                let number = self.attempt();
                // StatefulSets have no pods of two attempts unless somebody meddles.
                if self.pods.is_empty() {
                    self.pods = Role::ALL.iter().map(|role| pod(*role, number)).collect();
                }
            }
            Happening::PodsGo => self.pods.clear(),
            Happening::Coordinator(view) => self.coordinator = view,
            Happening::Restarts(restarts) => self.pods.iter_mut().for_each(|pod| pod.restarts = restarts),
            Happening::Waits(reason) => {
                self.pods.iter_mut().take(1).for_each(|pod| pod.waiting = Some((reason.to_owned(), String::new())));
            }
            Happening::Ends(exit_code, out_of_memory) => {
                let ended = Ended { exit_code, out_of_memory, message: String::new(), at: None };
                self.pods.iter_mut().take(1).for_each(|pod| pod.ended = Some(ended.clone()));
            }
            Happening::Suspend(suspend) => self.edit(|job| job.spec.suspend = Some(suspend)),
            Happening::Rows(rows) => self.edit(|job| job.spec.data.synthetic.as_mut().unwrap().rows = Some(rows)),
            Happening::Mode(mode) => self.edit(|job| {
                job.spec.training = Some(TrainingSpec { mode: Some(mode.into()), ..TrainingSpec::default() });
            }),
            Happening::Answer(answer) => self.answer = answer,
            Happening::Members(role, replicas) => self.edit(|job| {
                job.spec = validate::with_replicas(job.spec.clone(), |of| (of == role).then_some(replicas));
            }),
            Happening::Deadline(deadline) => self.edit(|job| job.spec.active_deadline_seconds = deadline),
            Happening::Obstacle(there) => {
                self.obstacle = there.then(|| Problem::new(Cause::NameConflict, "taken"));
            }
            Happening::Saving(saving) => self.saving = saving,
            Happening::Decided(subject, to) => {
                let decision = DecisionStatus {
                    subject,
                    time: Time(Timestamp::from_second(self.now).unwrap()),
                    from: "0".to_owned(),
                    to: to.to_string(),
                    replica: None,
                    applied: true,
                    reason: "why".to_owned(),
                };
                self.findings = Some(Findings { decisions: vec![decision], prediction: None });
            }
        }
    }

    /// Whether another attempt begins whatever the mode.
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

    /// Whether its attempt ends by itself, whether it is suspended or not.
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

    /// Decides, and again with the coordinator's answer if it has to be asked for a mode; gives that mode too.
    fn decide(&self) -> (Decision, Option<Mode>) {
        let first = self.decide_with(None);
        match first.ask_mode {
            Some(mode) => (self.decide_with(Some(&self.answer)), Some(mode)),
            None => (first, None),
        }
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
            noticed: &Noticed { saving: self.saving, ..Noticed::default() },
            poll: Duration::from_secs(3),
        })
    }
}

fn pod(role: Role, attempt: u32) -> PodFacts {
    PodFacts {
        name: format!("clicks-{}-0", role.name()),
        uid: format!("uid-of-attempt-{attempt}"),
        role,
        attempt,
        job_uid: None,
        is_leaving: false,
        is_ready: true,
        ip: None,
        node: None,
        requested_millicores: 0,
        is_running: true,
        restarts: 0,
        unschedulable: None,
        unschedulable_since: None,
        waiting: None,
        ended: None,
        evicted: None,
        gone_by: None,
        put_out: None,
    }
}

fn holds(status: &RecTrainingJobStatus, kind: &str) -> bool {
    status.conditions.iter().any(|condition| condition.type_ == kind && condition.status == "True")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_a_decision_can_be_trusted(happenings in prop::collection::vec(happening(), 1..60)) {
        let mut history = History::new();
        for happening in &happenings {
            history.happens(happening);
            let before = history.job.status.clone().unwrap_or_default();
            let (decision, asked) = history.decide();
            let after = &decision.status;
            let phase = after.phase.unwrap();

            // Exactly one story is told.
            let kinds: Vec<&str> = after.conditions.iter().map(|c| c.type_.as_str()).collect();
            prop_assert_eq!(kinds, ["Ready", "Reconciling", "Stalled", "Complete", "Failed", "Suspended"]);
            prop_assert_eq!(holds(after, "Complete"), phase == Phase::Complete);
            prop_assert_eq!(holds(after, "Failed"), phase == Phase::Failed);
            prop_assert_eq!(holds(after, "Suspended"), phase == Phase::Suspended);
            prop_assert!(!(holds(after, "Ready") && (holds(after, "Stalled") || holds(after, "Reconciling"))));
            prop_assert_eq!(after.observed_generation, history.job.metadata.generation);
            prop_assert_eq!(phase == Phase::Failed, after.conditions[4].message.len() > 1 && holds(after, "Failed"));

            // Pods of two attempts never run at the same time, and none runs for a job that has ended or is held.
            let number = after.attempt.as_ref().map_or(0, |attempt| attempt.number);
            if decision.run == Run::Go {
                prop_assert!(history.pods.iter().all(|pod| pod.attempt == number), "{:?}", decision);
                prop_assert!(!matches!(phase, Phase::Complete | Phase::Failed | Phase::Suspended));
                prop_assert!(history.job.spec.suspend != Some(true));
            }
            // An attempt that could save a checkpoint is not ended for the user's will before it has, and is asked once. It is
            // suspended where it ends by itself meanwhile.
            let is_live = matches!(before.phase, Some(Phase::Training | Phase::Evaluating))
                && history.has_coordinator() && matches!(history.coordinator, CoordinatorView::Live(_));
            if is_live && history.saving != Saving::Over && phase == Phase::Suspended {
                prop_assert!(history.ends_anyway(), "{:?}", decision);
            }
            prop_assert!(!decision.ask_save || is_live && history.saving == Saving::No && decision.run == Run::AsIs);
            prop_assert!(number >= before.attempt.as_ref().map_or(0, |attempt| attempt.number), "attempts are never reused");

            // A job that has ended stays ended, unless it failed and its manifest was changed.
            if before.phase == Some(Phase::Complete) {
                prop_assert_eq!(phase, Phase::Complete);
                prop_assert_eq!(&after.summary, &before.summary);
            }
            let wanted = wanted_mode(&history.job);
            let told = before.attempt.as_ref().and_then(|attempt| attempt.mode.as_ref()).map(|mode| mode.wanted);
            let replicas = before.attempt.as_ref().and_then(|attempt| attempt.replicas);
            let wanted_of = |role| replicas.as_ref().and_then(|replicas| members::of(replicas, role)).map(|r| r.wanted);
            let mended = before.attempt.as_ref().map(|a| &a.spec_hash) != Some(&history.spec_hash)
                || told != Some(wanted)
                || Role::MEMBERS.into_iter().any(|role| wanted_of(role) != Some(role.replicas(&history.resolved)));
            if before.phase == Some(Phase::Failed) && !mended {
                prop_assert_eq!(phase, Phase::Failed);
            }
            // A change of the mode alone begins no attempt, and only who trains is asked, and only for what the manifest says.
            if matches!(happening, Happening::Mode(_)) && !matches!(before.phase, None | Some(Phase::Failed)) {
                let same = before.attempt.as_ref().map_or(number, |attempt| attempt.number) == number;
                prop_assert!(same || history.restarts_anyway(&before), "{:?}", decision);
            }
            if let Some(mode) = asked {
                prop_assert_eq!(mode, wanted);
                prop_assert!(matches!(phase, Phase::Training | Phase::Evaluating) && decision.run == Run::Go);
            }
            prop_assert_eq!(decision.ask_mode, None, "an answer is an answer");
            // Nor does a change of the number of members of a job that trains; all pods stay that the coordinator needs.
            let trains = matches!(before.phase, Some(Phase::Training | Phase::Evaluating));
            if matches!(happening, Happening::Members(..)) && trains {
                prop_assert_eq!(number, before.attempt.as_ref().unwrap().number);
            }
            if let (CoordinatorView::Live(Report { members: told, .. }), Run::Go, true) =
                (&history.coordinator, decision.run, history.has_coordinator())
            {
                let replicas = after.attempt.as_ref().unwrap().replicas.unwrap();
                for (role, told) in told {
                    prop_assert_eq!(members::of(&replicas, *role).unwrap().needed, told.needed);
                }
            }
            for &(role, replicas) in &decision.ask_members {
                let CoordinatorView::Live(Report { members: told, .. }) = &history.coordinator else { unreachable!() };
                let gives_up = told[&role].wanted > told[&role].present && replicas == told[&role].present;
                prop_assert!(gives_up || replicas == role.replicas(&history.resolved));
                prop_assert!(matches!(phase, Phase::Training | Phase::Evaluating) && decision.run == Run::Go);
            }
            // Restarts are never forgotten while a job lives.
            if before.phase != Some(Phase::Failed) {
                prop_assert!(after.restarts.unwrap_or(0) >= before.restarts.unwrap_or(0));
            }

            // The same facts give the same status again: the operator comes to rest.
            history.job.status = Some(after.clone());
            let (again, asked_again) = history.decide();
            history.job.status = Some(again.status.clone());
            let (third, _) = history.decide();
            prop_assert_eq!(&third.status, &again.status, "after {:?}", happening);
            // An answer that is one is not asked for twice.
            let settled = !matches!(history.answer, SwitchAnswer::Again(_));
            prop_assert!(!(asked.is_some() && asked_again.is_some() && settled));
        }
    }

    #[test]
    fn no_reconcile_undoes_a_decision(happenings in prop::collection::vec(happening_or_decision(), 1..80)) {
        let mut history = History::of(&format!("{MANIFEST}{DECIDED_ON}"));
        for happening in &happenings {
            history.findings = None;
            history.happens(happening);
            let before = history.job.status.clone().unwrap_or_default();
            let decision = history.decide().0;
            let after = &decision.status;
            // What was decided stays, in its order; what is found out while the job trains comes after it.
            let found = history.findings.iter().flat_map(|findings| &findings.decisions);
            let noted = after.decisions.len() > before.decisions.len() || after.decisions != before.decisions;
            prop_assert!(!noted || after.phase == Some(Phase::Training) && found.clone().eq(after.decisions.last()));
            let of = |role| {
                let subject = automatic::subject(role)?;
                let of = after.decisions.iter().rev().find(|decided| decided.subject == subject)?;
                Some(of.to.parse::<u32>().unwrap())
            };
            for role in Role::MEMBERS {
                // The manifest's number, until something is decided, and then that.
                let wanted = of(role).unwrap_or_else(|| role.replicas(&history.resolved));
                prop_assert_eq!(members::wanted(Some(after), &history.resolved, role), wanted);
                let replicas = after.attempt.as_ref().and_then(|attempt| attempt.replicas);
                // Written down first, and carried out from the next look on.
                if let (Some(replicas), false, Run::Go) = (replicas, noted, decision.run) {
                    prop_assert_eq!(members::of(&replicas, role).unwrap().wanted, wanted, "{:?}", happening);
                }
            }
            for &(role, replicas) in &decision.ask_members {
                let CoordinatorView::Live(Report { members: told, .. }) = &history.coordinator else { unreachable!() };
                let gives_up = told[&role].wanted > told[&role].present && replicas == told[&role].present;
                let wanted = members::wanted(Some(&before), &history.resolved, role);
                prop_assert!(gives_up || replicas == wanted, "{:?} {}", role, replicas);
            }
            history.job.status = Some(after.clone());
        }
    }
}

/// It trains, and says so all the time.
fn training(step: u64) -> History {
    let mut history = History::new();
    history.happens(&Happening::Coordinator(CoordinatorView::Live(at(step))));
    for happening in [Happening::PodsCome, Happening::Time(5)] {
        history.goes_on();
        history.happens(&happening);
    }
    assert_eq!(history.goes_on().phase, Some(Phase::Training));
    history
}

/// A report from training after a checkpoint of the same step.
fn at(step: u64) -> Report {
    let last_checkpoint = Some(CheckpointStatus { name: format!("full-{step}"), step });
    let (stage, idle_seconds) = (Stage::Training, Some(0.0));
    Report {
        idle_seconds,
        slots_decided_seconds: 0,
        missing: Vec::new(),
        stage,
        mode: Some(Mode::Sync),
        step,
        total_steps: None,
        samples_per_second: 1.0,
        loss: 0.5,
        auc: None,
        last_checkpoint,
        members: BTreeMap::new(),
    }
}

impl History {
    fn goes_on(&mut self) -> RecTrainingJobStatus {
        let status = self.decide().0.status;
        self.job.status = Some(status.clone());
        status
    }
}

#[test]
fn the_checkpoint_that_an_attempt_leaves_is_that_of_the_status() {
    for ends in [Happening::Suspend(true), Happening::Rows(2000)] {
        let mut history = training(7);
        history.happens(&ends);
        assert_eq!(history.goes_on().last_checkpoint.map(|checkpoint| checkpoint.step), Some(7));
        // It is there when it is first heard that it is.
        history.happens(&Happening::Saving(Saving::Over));
        history.happens(&Happening::Coordinator(CoordinatorView::Live(at(9))));
        let status = history.goes_on();
        assert!(matches!(status.phase, Some(Phase::Suspended | Phase::Restarting)), "{:?}", status.phase);
        assert_eq!(status.last_checkpoint.map(|checkpoint| checkpoint.step), Some(9), "{ends:?}");
    }
}

#[test]
fn a_change_that_may_mend_an_attempt_is_carried_out_though_that_ends_while_it_saves() {
    let stalls = CoordinatorView::Live(Report { idle_seconds: Some(100.0), ..at(7) });
    let crashes = CoordinatorView::Failed { message: "ps 0 is gone".to_owned(), user_error: false };
    for (ends, seconds) in [(stalls, 100), (crashes, 0)] {
        let mut history = training(7);
        history.happens(&Happening::Restarts(3));
        assert_eq!(history.goes_on().restarts, Some(3), "none is left");
        history.happens(&Happening::Rows(2000));
        assert!(history.decide().0.is_saving);
        history.goes_on();
        history.happens(&Happening::Saving(Saving::UnderWay));
        history.happens(&Happening::Time(seconds));
        history.happens(&Happening::Coordinator(ends));
        let status = history.goes_on();
        let attempt = status.attempt.unwrap();
        assert_eq!((status.phase, attempt.number, status.restarts), (Some(Phase::Restarting), 2, Some(3)));
        assert_eq!(attempt.spec_hash, history.spec_hash);
    }
}

#[test]
fn a_day_of_training_without_a_restart_gives_the_budget_back() {
    let mut history = training(7);
    history.happens(&Happening::Restarts(3));
    assert_eq!(history.goes_on().counted_restarts(), 3);
    for (seconds, counted) in [(60 * 60 * 24 - 1, 3), (1, 0)] {
        history.happens(&Happening::Time(seconds));
        assert_eq!(history.goes_on().counted_restarts(), counted);
    }
    // Two more, of which one ended it.
    history.happens(&Happening::Restarts(5));
    let status = history.goes_on();
    assert_eq!((status.phase, status.restarts, status.counted_restarts()), (Some(Phase::Training), Some(5), 2));
    history.happens(&Happening::Coordinator(CoordinatorView::Failed { message: "m".to_owned(), user_error: false }));
    let status = history.goes_on();
    let wait = status.attempt.unwrap().not_before.unwrap().0.as_second() - history.now;
    assert_eq!((status.phase, status.restarts, wait), (Some(Phase::Restarting), Some(5), 20));
}
