//! Partial pooling: a server that pools groups of rows against one that sends the rows.

use rectrain_pooling::PooledGroups;
use rectrain_protocol::layout::Pooled;

use super::*;

/// Samples of a piece.
const SAMPLES: usize = 8;
/// Pieces of the tests: eight steps.
const PIECES: u64 = 24;

/// A piece with several ids in each cell, and the gradients of its pooled embeddings.
struct Piece {
    number: u64,
    prepared: PreparedIds,
    groups: PooledGroups,
    gradients: Pooled,
}

impl Piece {
    /// Piece `number`. Servers pool its first row group, or all of them.
    fn new(plan: &JobPlan, number: u64) -> Self {
        let layout = &plan.layout;
        let of_feature = |feature: usize| {
            let mut draws = numbers(100 * number + feature as u64, 5 * SAMPLES).into_iter();
            let (mut keys, mut offsets) = (Vec::new(), vec![0]);
            for sample in 0..SAMPLES {
                let key = |draw: f32| ((draw.abs() * 60.0) as u64 + 1) << 52;
                keys.extend(draws.by_ref().take(1 + sample % 4).map(key));
                offsets.push(keys.len() as u32);
            }
            UniqueIds::from_column(&keys, Some(&offsets), SAMPLES, &mut Scratch::default()).unwrap()
        };
        let prepared = PreparedIds::new(SAMPLES, (0..layout.features.len()).map(of_feature).collect(), layout);
        let all = if number.is_multiple_of(2) { 1 } else { layout.group_dims.len() as u32 };
        let groups = PooledGroups::read("test", &(0..all).collect::<Vec<_>>(), layout).unwrap();
        let widths = layout.pooled_widths();
        let gradients = Pooled {
            embeddings: numbers(7 * number, SAMPLES * widths.embeddings),
            linear: numbers(9 * number, SAMPLES * widths.linear),
        };
        Self { number, prepared, groups, gradients }
    }

    fn name(&self) -> v1::PooledPiece {
        v1::PooledPiece { batch: self.number / 3, piece: (self.number % 3) as u32, samples: SAMPLES as u32 }
    }

    /// The first tensor, and the keys of the groups that the server does not pool.
    fn look_up_tensors(&self) -> Vec<Tensor> {
        let keys = self.prepared.keys().iter().enumerate();
        let keys = keys.map(|(group, keys)| if self.groups.contains(group) { Vec::new() } else { keys.clone() });
        [Tensor::from(self.groups.numbers())].into_iter().chain(keys.map(Tensor::from)).collect()
    }

    fn ids(&self, plan: &JobPlan) -> Vec<Tensor> {
        ServerIds::divide_groups(&self.prepared, &plan.slot_map(), &plan.layout, &self.groups).remove(0).to_tensors()
    }

    /// The tensors of the gradients. With `groups`, the server pools these.
    fn update_tensors(&self, plan: &JobPlan, groups: Option<&PooledGroups>) -> Vec<Tensor> {
        let (layout, counted) = (&plan.layout, plan.counts_examples());
        let labels: Vec<f32> = (0..SAMPLES).map(|sample| (sample % 2) as f32).collect();
        let examples = self.prepared.examples(&labels, &counted, layout);
        let examples_of = |group: usize| Tensor::from(examples::encode(&examples[group]));
        let (rows, sums) = match groups {
            None => (self.prepared.scatter(&self.gradients, layout), Pooled::default()),
            Some(groups) => groups.scatter(&self.prepared, &self.gradients, layout),
        };
        let is_pooled = |group: usize| groups.is_some_and(|groups| groups.contains(group));
        let mut tensors: Vec<Tensor> = groups.iter().map(|groups| Tensor::from(groups.numbers())).collect();
        for (group, rows) in rows.into_iter().enumerate() {
            let keys = if is_pooled(group) { Vec::new() } else { self.prepared.keys()[group].clone() };
            tensors.extend([Tensor::from(keys), Tensor::from(rows)]);
            if counted[group] && !is_pooled(group) {
                tensors.push(examples_of(group));
            }
        }
        if groups.is_some() {
            tensors.extend([Tensor::from(sums.embeddings), Tensor::from(sums.linear)]);
            tensors.extend((0..counted.len()).filter(|group| counted[*group] && is_pooled(*group)).map(examples_of));
        }
        tensors
    }
}

impl Tried {
    fn lookup_of(&self, mode: &str, piece: &Piece) -> v1::Lookup {
        let step = (mode != "gba").then_some(piece.number / 3);
        let map_epoch = self.server.shared.slots.map().epoch().0;
        v1::Lookup { step, train: true, map_epoch, ..v1::Lookup::default() }
    }

    /// Looks the rows up, and pools them as an embedding worker.
    async fn pool_rows(&self, mode: &str, piece: &Piece) -> Pooled {
        let tensors = piece.prepared.keys().iter().cloned().map(Tensor::from).collect();
        let reply = self.server.look_up(self.lookup_of(mode, piece), tensors).await.unwrap();
        let rows: Vec<_> = reply.tensors.into_iter().map(|rows| rows.expect_f32("rows").unwrap()).collect();
        piece.prepared.pool(&rows, &self.plan.layout)
    }

    /// Looks the piece up, pooled in part by the server.
    async fn pool_on_server(&self, mode: &str, piece: &Piece) -> Pooled {
        let request = v1::Lookup { pooled: Some(piece.name()), ..self.lookup_of(mode, piece) };
        let tensors = [piece.look_up_tensors(), piece.ids(&self.plan)].concat();
        let reply = self.server.look_up(request, tensors).await.unwrap();
        let mut values: Vec<_> = reply.tensors.into_iter().map(|rows| rows.expect_f32("rows").unwrap()).collect();
        let groups = self.plan.layout.group_dims.len();
        let [embeddings, linear] = values.split_off(groups).try_into().unwrap();
        for (group, rows) in values.iter().enumerate() {
            assert_eq!(rows.is_empty(), piece.groups.contains(group), "rows of the other groups only");
        }
        let sums = PooledGroups::sum(vec![Pooled { embeddings, linear }]);
        piece.groups.pool(&piece.prepared, &values, &sums, &self.plan.layout)
    }

    async fn push(&mut self, mode: &str, piece: &Piece, pooled: bool, has_ids: bool) -> v1::UpdateReply {
        let mut tensors = piece.update_tensors(&self.plan, pooled.then_some(&piece.groups));
        if has_ids {
            tensors.extend(piece.ids(&self.plan));
        }
        let push = batch(piece.number).0;
        let pulled_at = vec![self.row_step.min(push.pulled_at[0])];
        let push = (mode == "gba").then_some(v1::TokenPush { pulled_at, ..push });
        let map_epoch = self.server.shared.slots.map().epoch().0;
        let v1::PooledPiece { batch: step, piece: number, .. } = piece.name();
        let moment = 86_400 * (step + 1);
        let pooled = pooled.then_some(piece.name());
        let update = v1::Update { step, piece: number, push, map_epoch, moment, pooled, has_ids, ..Default::default() };
        let reply = self.server.update(update, tensors).await.unwrap();
        let reply: v1::UpdateReply = prost::Message::decode(reply.meta).unwrap();
        if !reply.needs_ids {
            self.row_step = reply.step;
        }
        reply
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_pools_ends_like_one_that_sends_rows() {
    let managed = [BUDGET, ADMISSIONS].concat();
    for (mode, changes) in
        [("sync", &[][..]), ("sync", &managed), ("hybrid", &managed), ("gba", &[]), ("gba", &managed)]
    {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let mut sends = Tried::begin_with(mode, changes, folders[0].path()).await;
        let mut pools = Tried::begin_with(mode, changes, folders[1].path()).await;
        let mut dies = Tried::begin_with(mode, changes, folders[2].path()).await;
        for number in 0..PIECES {
            let piece = Piece::new(&sends.plan, number);
            let expected = sends.pool_rows(mode, &piece).await;
            assert_eq!(pools.pool_on_server(mode, &piece).await, expected, "{mode}: piece {number}");
            assert_eq!(dies.pool_on_server(mode, &piece).await, expected, "{mode}: piece {number}");
            sends.push(mode, &piece, false, false).await;
            assert!(!pools.push(mode, &piece, true, false).await.needs_ids, "it has retained them");
            // A killed server has no ids, and neither has one that has the gradients already.
            let is_killed = number % 2 == 0;
            if is_killed {
                dies.is_killed(folders[2].path());
            }
            assert_eq!(dies.push(mode, &piece, true, false).await.needs_ids, is_killed);
            if is_killed {
                assert!(!dies.push(mode, &piece, true, true).await.needs_ids);
            }
            // A repeated piece is answered once its step is applied, so here only the last.
            if mode == "gba" || number % 3 == 2 {
                assert!(dies.push(mode, &piece, true, false).await.needs_ids);
                dies.push(mode, &piece, true, true).await;
            }
        }
        let expected = sends.standing().await;
        // The ids are in eight slots. With a budget each has one row.
        assert!(expected.2 >= 8, "{mode}: {} rows", expected.2);
        assert_eq!(pools.standing().await, expected, "{mode}");
        assert_eq!(dies.standing().await, expected, "{mode}");
        let counts = |server: &Tried| super::super::table_life::TableLife::since_taken(&server.server.shared.store);
        let of_table = counts(&sends);
        let is_managed = !changes.is_empty();
        assert!(!is_managed || (of_table.turned_away > 0 && of_table.evicted > 0), "{mode}: {of_table:?}");
        assert_eq!(counts(&pools), of_table, "{mode}");
        assert!(pools.server.pooled.is_empty(), "{mode}: the ids leave with the gradients");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn in_sync_a_server_repeats_the_sums_of_the_last_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut tried = Tried::begin("sync", folder.path()).await;
    let look_up = async |tried: &Tried, piece: &Piece| {
        let request = v1::Lookup { pooled: Some(piece.name()), ..tried.lookup_of("sync", piece) };
        let tensors = [piece.look_up_tensors(), piece.ids(&tried.plan)].concat();
        let frame = Frame { kind: v1::Lookup::KIND, meta: prost::Message::encode_to_vec(&request).into(), tensors };
        let reply = tried.server.service().call(&Peer::new("test", 0), frame).await.unwrap();
        let told: v1::LookupReply = prost::Message::decode(reply.meta).unwrap();
        (told.is_applied, reply.tensors)
    };
    let pieces = [0, 1, 2].map(|number| Piece::new(&tried.plan, number));
    let mut before = Vec::new();
    for piece in &pieces {
        before.push(look_up(&tried, piece).await);
    }
    for piece in &pieces {
        tried.push("sync", piece, true, false).await;
    }
    for (piece, (was_applied, sums)) in pieces.iter().zip(before) {
        assert!(!was_applied && !sums.is_empty());
        assert_eq!(look_up(&tried, piece).await, (true, sums), "piece {}", piece.number);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooled_piece_that_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tried = Tried::begin("gba", folder.path()).await;
    let piece = Piece::new(&tried.plan, 1);
    let (request, name) = (tried.lookup_of("gba", &piece), Some(piece.name()));
    let refused = async |request: v1::Lookup, change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = [piece.look_up_tensors(), piece.ids(&tried.plan)].concat();
        change(&mut tensors);
        tried.server.look_up(v1::Lookup { pooled: name, ..request }, tensors).await.unwrap_err().to_string()
    };
    let same = |_: &mut Vec<Tensor>| {};
    let reason = refused(v1::Lookup { train: false, ..request }, &same).await;
    assert!(reason.contains("pools in training only"), "{reason}");
    let reason = refused(v1::Lookup { piece: Some(1), ..request }, &same).await;
    assert!(reason.contains("replies in one part"), "{reason}");
    let reason = refused(request, &|tensors| tensors[0] = Tensor::from(vec![99u32])).await;
    assert!(reason.contains("ascending numbers below"), "{reason}");
    let reason = refused(request, &|tensors| tensors[1] = Tensor::from(vec![5u64])).await;
    assert!(reason.contains("1 keys of group 0 came"), "{reason}");
    refused(request, &|tensors| drop(tensors.pop())).await;

    let push = Some(batch(1).0);
    let map_epoch = request.map_epoch;
    let update = v1::Update { push, map_epoch, pooled: name, has_ids: true, ..v1::Update::default() };
    let whole = [piece.update_tensors(&tried.plan, Some(&piece.groups)), piece.ids(&tried.plan)].concat();
    let refused = async |update: v1::Update, tensors: Vec<Tensor>| {
        tried.server.update(update, tensors).await.unwrap_err().to_string()
    };
    let of_sums = 1 + 2 * tried.plan.layout.group_dims.len();
    let mut short = whole.clone();
    short[of_sums] = Tensor::from(vec![0.0f32; 3]);
    let reason = refused(update.clone(), short).await;
    assert!(reason.contains("expected 8 samples") && reason.contains("found 3 values"), "{reason}");
    let fewer = v1::PooledPiece { samples: 4, ..piece.name() };
    refused(v1::Update { pooled: Some(fewer), ..update.clone() }, whole.clone()).await;
    refused(update, whole[..whole.len() - 1].to_vec()).await;
}
