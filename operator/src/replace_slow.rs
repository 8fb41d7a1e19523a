//! Which slow pod is replaced, and the nodes that new pods avoid
//! (`spec.faultTolerance.replaceSlow`). Pure.
//!
//! The coordinator moves work away from a slow member. It names the member for as long as that is
//! not enough. A pod that is named for long is deleted: its rows move first, as from a drained
//! node. Its replacement prefers any other node.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{ReplacedPod, ResolvedReplaceSlow, Role, SlowestStatus};

use crate::pods::PodFacts;
use crate::text::shorten;

/// How long a replacement is remembered, and its node avoided.
const REMEMBERED: SignedDuration = SignedDuration::from_hours(24);
/// Replacements that a status keeps.
const MOST: usize = 16;
/// Bytes of a reason that a status keeps.
const MOST_REASON: usize = 1000;
/// The least share of a step's time for which a pod is replaced. A status has tenths.
const LEAST_SHARE: f64 = 0.2;

/// The slow member.
#[derive(Clone, Copy, Debug)]
pub struct Slow<'a> {
    /// Its role.
    pub role: Role,
    /// The status about it.
    pub slowest: &'a SlowestStatus,
    /// Its pod.
    pub pod: &'a PodFacts,
    /// The present members of its role.
    pub members: u32,
}

impl Slow<'_> {
    /// Whether the job goes on without the pod. Another server has to take the rows, and a single
    /// dense worker has the only copy of its parameters.
    fn can_be_spared(&self) -> bool {
        match self.role {
            Role::Ps | Role::DenseWorker => self.members > 1,
            Role::EmbeddingWorker | Role::Loader => true,
            Role::Coordinator => false,
        }
    }
}

/// Decides whether to replace the pod of a slow member. `earlier` are the replacements that are
/// remembered. Every member of the job is ready.
#[must_use]
pub fn decide(
    settings: ResolvedReplaceSlow,
    slow: &Slow<'_>,
    earlier: &[ReplacedPod],
    now: Timestamp,
) -> Option<ReplacedPod> {
    let Slow { slowest, pod, .. } = slow;
    let after = SignedDuration::from_secs(i64::from(settings.after_seconds));
    // The replacement of a slow pod has its name, and is not as old. Nor is a pod that came late:
    // training waited for its member before, so the member is named.
    let replaced = earlier.iter().filter(|earlier| earlier.pod == pod.name).map(|earlier| earlier.time.0);
    let since = replaced.chain(pod.ready_since).fold(slowest.since.as_ref()?.0, Timestamp::max);
    let in_hour = earlier.iter().filter(|earlier| now.duration_since(earlier.time.0) < SignedDuration::from_hours(1));
    let is_due = now.duration_since(since) >= after && slowest.share >= LEAST_SHARE;
    let is_allowed = in_hour.count() < settings.per_hour as usize && earlier.len() < MOST;
    let may_end = slow.can_be_spared() && !pod.is_terminating && slowest.pod == pod.name;
    (is_due && is_allowed && may_end).then(|| ReplacedPod {
        role: slowest.role.clone(),
        pod: pod.name.clone(),
        uid: pod.uid.clone(),
        node: pod.node.clone(),
        time: Time(now),
        reason: reason(slow, now.duration_since(since)),
    })
}

/// Why a pod is replaced.
fn reason(slow: &Slow<'_>, time: SignedDuration) -> String {
    let (seconds, percent) = (time.as_secs(), 100.0 * slow.slowest.share);
    let node = slow.pod.node.as_deref().map(|node| format!(" on node {node}")).unwrap_or_default();
    let text = format!(
        "{}{node} has been slow for {seconds} s: it still costs {percent:.0} % of a step's time after its work has \
         moved away",
        slow.pod.name
    );
    shorten(&text, MOST_REASON)
}

/// The replacements that are remembered at `now`, oldest first.
#[must_use]
pub fn remembered(all: &[ReplacedPod], now: Timestamp) -> Vec<ReplacedPod> {
    let is_recent = |replaced: &&ReplacedPod| now.duration_since(replaced.time.0) < REMEMBERED;
    all.iter().filter(is_recent).cloned().collect()
}

/// The nodes that new pods of a role avoid, in order.
#[must_use]
pub fn avoided_nodes(replaced: &[ReplacedPod], role: Role) -> Vec<String> {
    let of_role = replaced.iter().filter(|replaced| replaced.role == role.section());
    let mut nodes: Vec<String> = of_role.filter_map(|replaced| replaced.node.clone()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes
}

/// Whether a pod ends, or one is still there that is to be replaced. Then no other is replaced: its
/// rows may move to this one.
#[must_use]
pub fn is_under_way(pods: &[PodFacts], replaced: &[ReplacedPod]) -> bool {
    pods.iter().any(|pod| pod.is_terminating || replaced.iter().any(|replaced| replaced.uid == pod.uid))
}

/// The pods that were to be replaced and still run.
pub fn to_delete<'a>(
    pods: &'a [PodFacts],
    replaced: &'a [ReplacedPod],
) -> impl Iterator<Item = (&'a PodFacts, &'a ReplacedPod)> {
    let live = pods.iter().filter(|pod| !pod.is_terminating && !pod.uid.is_empty());
    live.filter_map(|pod| Some((pod, replaced.iter().find(|replaced| replaced.uid == pod.uid)?)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::names::{ATTEMPT_LABEL, ROLE_LABEL};

    const START: i64 = 1_800_000_000;
    const SETTINGS: ResolvedReplaceSlow = ResolvedReplaceSlow { after_seconds: 600, per_hour: 2 };

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(START + seconds).expect("a time")
    }

    fn pod(name: &str, uid: u64, node: &str) -> PodFacts {
        let labels = json!({ROLE_LABEL: "ps", ATTEMPT_LABEL: "1"});
        let pod = json!({
            "metadata": {"name": name, "uid": format!("uid-{uid}"), "labels": labels},
            "spec": {"nodeName": node, "containers": []},
        });
        PodFacts::of(&serde_json::from_value(pod).expect("a pod")).expect("one of the operator's")
    }

    fn slowest(name: &str, since: i64) -> SlowestStatus {
        let (pod, since) = (name.to_owned(), Some(Time(at(since))));
        SlowestStatus { role: "ps".to_owned(), pod, share: 0.5, since, ..SlowestStatus::default() }
    }

    fn replaced(name: &str, seconds: i64) -> ReplacedPod {
        ReplacedPod {
            role: "ps".to_owned(),
            pod: name.to_owned(),
            uid: format!("uid-{seconds}"),
            node: Some(format!("node-{seconds}")),
            time: Time(at(seconds)),
            reason: "slow".to_owned(),
        }
    }

    /// Whether the server `j-ps-1`, one of three and slow since 0, is replaced.
    fn is_replaced(change: impl FnOnce(&mut SlowestStatus, &mut PodFacts), earlier: &[ReplacedPod], now: i64) -> bool {
        let (mut slowest, mut pod) = (slowest("j-ps-1", 0), pod("j-ps-1", 7, "a"));
        change(&mut slowest, &mut pod);
        let slow = Slow { role: Role::Ps, slowest: &slowest, pod: &pod, members: 3 };
        decide(SETTINGS, &slow, earlier, at(now)).is_some()
    }

    #[test]
    fn a_pod_that_stays_slow_is_replaced_with_the_reason() {
        let (slowest, pod) = (slowest("j-ps-1", 0), pod("j-ps-1", 7, "a"));
        let slow = Slow { role: Role::Ps, slowest: &slowest, pod: &pod, members: 3 };
        assert_eq!(decide(SETTINGS, &slow, &[], at(599)), None);
        let replaced = decide(SETTINGS, &slow, &[], at(600)).expect("it is due");
        assert_eq!((replaced.uid.as_str(), replaced.node.as_deref(), replaced.time.0), ("uid-7", Some("a"), at(600)));
        assert!(replaced.reason.starts_with("j-ps-1 on node a has been slow for 600 s"), "{}", replaced.reason);
    }

    #[test]
    fn a_pod_is_kept_if_its_work_has_moved_or_it_cannot_be_spared() {
        assert!(is_replaced(|_, _| {}, &[], 9000));
        assert!(!is_replaced(|slowest, _| slowest.share = 0.1, &[], 9000));
        assert!(!is_replaced(|slowest, _| slowest.since = None, &[], 9000));
        assert!(!is_replaced(|_, pod| pod.is_terminating = true, &[], 9000));
        assert!(!is_replaced(|_, pod| pod.name = "j-ps-2".to_owned(), &[], 9000));
        // Its pod has waited for a node. Training waited for its member meanwhile.
        let came = |seconds| move |_: &mut SlowestStatus, pod: &mut PodFacts| pod.ready_since = Some(at(seconds));
        assert!(!is_replaced(came(8401), &[], 9000) && is_replaced(came(8400), &[], 9000));
        let (slowest, pod) = (slowest("j-ps-1", 0), pod("j-ps-1", 7, "a"));
        let is_spared = |role, members| {
            decide(SETTINGS, &Slow { role, slowest: &slowest, pod: &pod, members }, &[], at(9000)).is_some()
        };
        let alone = [Role::Ps, Role::DenseWorker, Role::EmbeddingWorker, Role::Loader].map(|role| is_spared(role, 1));
        assert_eq!(alone, [false, false, true, true]);
        assert!(is_spared(Role::DenseWorker, 2) && !is_spared(Role::Coordinator, 2));
    }

    #[test]
    fn a_replacement_gets_the_whole_time_and_an_hour_has_a_limit() {
        let one = [replaced("j-ps-1", 1000)];
        assert_eq!([1599, 1600].map(|now| is_replaced(|_, _| {}, &one, now)), [false, true]);
        let two = [replaced("j-ps-0", 1000), replaced("j-ps-2", 2000)];
        assert_eq!([4599, 4600].map(|now| is_replaced(|_, _| {}, &two, now)), [false, true]);
        let many: Vec<ReplacedPod> = (0..16).map(|second| replaced("j-ps-0", second)).collect();
        assert!(!is_replaced(|_, _| {}, &many, 80_000), "the status is full");
        let remembered_at = |now| remembered(&many, at(now)).len();
        assert_eq!([86_399, 86_400, 86_407, 90_000].map(remembered_at), [16, 15, 8, 0]);
    }

    #[test]
    fn new_pods_avoid_the_nodes_of_their_role() {
        let mut all = vec![replaced("j-ps-1", 9), replaced("j-ps-1", 4), replaced("j-ps-2", 9)];
        assert_eq!(avoided_nodes(&all, Role::Ps), ["node-4", "node-9"]);
        assert_eq!(avoided_nodes(&all, Role::Loader), [""; 0]);
        all[0].node = None;
        assert_eq!(avoided_nodes(&all, Role::Ps), ["node-4", "node-9"]);
    }

    #[test]
    fn a_replacement_is_under_way_until_its_pod_is_gone() {
        let mut pods = vec![pod("j-ps-1", 9, "a"), pod("j-ps-2", 8, "a")];
        assert!(is_under_way(&pods, &[replaced("j-ps-1", 9)]) && !is_under_way(&pods, &[replaced("j-ps-1", 4)]));
        pods[1].is_terminating = true;
        assert!(is_under_way(&pods, &[]));
    }

    #[test]
    fn only_the_pod_that_was_meant_is_deleted() {
        let mut pods = vec![pod("j-ps-1", 9, "a"), pod("j-ps-2", 8, "a")];
        let all = [replaced("j-ps-1", 9), replaced("j-ps-2", 4)];
        let names = |pods: &[PodFacts]| to_delete(pods, &all).map(|(pod, _)| pod.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&pods), ["j-ps-1"], "j-ps-2 is the replacement already");
        pods[0].is_terminating = true;
        assert_eq!(names(&pods), [""; 0]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Pods are slow and well at random, for half a day. A replaced pod comes back under its
        /// name at once.
        #[test]
        fn replacements_keep_their_bounds(
            after in 60u32..2000, per_hour in 1u32..6,
            turns in proptest::collection::vec((0usize..3, 0i64..4000, any::<bool>()), 1..60),
        ) {
            let settings = ResolvedReplaceSlow { after_seconds: after, per_hour };
            let (mut all, mut uids, mut now) = (Vec::<ReplacedPod>::new(), [0_u64, 1, 2], 0_i64);
            let mut made: Vec<(i64, usize)> = Vec::new();
            for (member, seconds, is_slow) in turns {
                let (since, name) = (now, format!("j-ps-{member}"));
                let end = if is_slow { now + seconds } else { now };
                for second in (now..=end).step_by(50) {
                    all = remembered(&all, at(second));
                    let (slowest, pod) = (slowest(&name, since), pod(&name, uids[member], "a"));
                    let slow = Slow { role: Role::Ps, slowest: &slowest, pod: &pod, members: 3 };
                    let decided = decide(settings, &slow, &all, at(second)).filter(|_| is_slow);
                    let Some(decided) = decided else { continue };
                    prop_assert_eq!(decided.uid.clone(), format!("uid-{}", uids[member]));
                    prop_assert!(second - since >= i64::from(after));
                    let before = made.iter().filter(|(_, of)| *of == member).map(|(at, _)| *at).max();
                    prop_assert!(before.is_none_or(|before| second - before >= i64::from(after)));
                    made.push((second, member));
                    uids[member] += 10;
                    all.push(decided);
                }
                now += seconds;
            }
            for (at, _) in &made {
                let in_hour = made.iter().filter(|(other, _)| (0..3600).contains(&(at - other))).count();
                prop_assert!(in_hour <= per_hour as usize, "{in_hour} in an hour: {made:?}");
            }
            prop_assert!(all.len() <= MOST);
        }
    }
}
