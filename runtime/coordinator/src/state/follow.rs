//! Followed paths: what loaders found there, and which files they look at.
//! [`crate::followed`] has the ledger of the files.

use std::time::Instant;

use rectrain_kinds::{LostRecords, PartId, PartitionState, Start};
use rectrain_modes::{ChunkLease, Lost, StreamChunks};
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{FollowedFiles, JobEvent};

use super::State;
use super::stream::now_millis;
use crate::followed::{Finding, Followed};

impl State {
    /// A loader asks for work on followed paths, and tells what it has found.
    pub(crate) fn files_seen(&mut self, seen: &v1::FilesSeen) -> Result<v1::FilesWanted, RoleError> {
        self.files_seen_at(seen, now_millis())
    }

    fn files_seen_at(&mut self, seen: &v1::FilesSeen, now: i64) -> Result<v1::FilesWanted, RoleError> {
        if seen.listed || !seen.unreachable.is_empty() {
            self.note_source(&seen.unreachable, "the store of the followed paths answers again");
        }
        let chunks = self.data.ledger.chunks().stream();
        if chunks.is_some_and(StreamChunks::is_closed) {
            // Training ends behind the known files. Later ones are for the next run.
            self.note_end_of_stream()?;
            return Ok(v1::FilesWanted::default());
        }
        let is_read = |part| chunks.is_some_and(|chunks| chunks.is_read(part));
        let followed = self.data.stream.followed.as_mut().ok_or_else(not_followed)?;
        let mut findings = followed.note(seen, is_read, now);
        findings.extend(seen.looked_at.iter().filter_map(|found| followed.looked_at(found)));
        self.tell(seen.loader, findings)?;
        self.hand_out_files(seen.loader)?;
        self.end_followed(seen.listed, now);
        self.note_end_of_stream()?;
        Ok(self.followed()?.wanted(seen.loader, now))
    }

    fn followed(&mut self) -> Result<&mut Followed, RoleError> {
        self.data.stream.followed.as_deref_mut().ok_or_else(not_followed)
    }

    /// Warns of findings, or fails because of one.
    fn tell(&mut self, loader: u32, findings: Vec<Finding>) -> Result<(), RoleError> {
        let policy = self.followed()?.config().lost_files;
        for finding in findings {
            let message = message(&finding);
            if let Finding::Lost { part, .. } = finding {
                if policy == LostRecords::Fail {
                    return Err(RoleError::Input(format!(
                        "{message}; put it back as it was, or set spec.data.train.follow.lostFiles: skip to go on without it"
                    )));
                }
                self.pending_events.push(JobEvent::Warning { message });
                self.lose(loader, part)?;
            } else {
                self.pending_events.push(JobEvent::Warning { message });
            }
        }
        Ok(())
    }

    /// Leaves out the rows of a lost file that are in no chunk yet.
    fn lose(&mut self, loader: u32, part: Option<PartId>) -> Result<(), RoleError> {
        let followed = self.followed()?;
        let state = part.and_then(|part| followed.lost(part));
        self.add_files(loader, &state.into_iter().collect::<Vec<_>>())
    }

    /// Takes the next files, and hands out the rows of the ones that loaders have looked at.
    fn hand_out_files(&mut self, loader: u32) -> Result<(), RoleError> {
        let unread = self.unread_files();
        let followed = self.followed()?;
        followed.take(unread).map_err(RoleError::Input)?;
        let ready = followed.ready();
        self.add_files(loader, &ready)
    }

    fn add_files(&mut self, loader: u32, files: &[PartitionState]) -> Result<(), RoleError> {
        if files.is_empty() {
            return Ok(());
        }
        let chunks = self.data.ledger.chunks_mut().stream_mut().ok_or_else(not_followed)?;
        let lost = chunks.found(loader, files).map_err(|error| RoleError::Input(error.to_string()))?;
        for lost in lost {
            let message = self.rows_lost(lost)?;
            self.pending_events.push(JobEvent::Warning { message });
        }
        Ok(())
    }

    fn rows_lost(&mut self, lost: Lost) -> Result<String, RoleError> {
        let name = self.followed()?.file(lost.part).map_or_else(String::new, |file| file.name);
        Ok(format!("{name}: {} rows from row {} on are not trained", lost.until - lost.from, lost.from + 1))
    }

    /// Ends the stream behind the known files if no further one will be trained.
    fn end_followed(&mut self, listed: bool, now: i64) {
        let chunks = self.data.ledger.chunks_mut().stream_mut();
        let Some((followed, chunks)) = self.data.stream.followed.as_mut().zip(chunks) else { return };
        followed.forget(|part| chunks.has(part));
        if followed.is_over(listed, now) {
            chunks.close();
        }
        if chunks.is_at_rest() || self.is_held {
            // A wait for files is no stall, and neither is a pause.
            self.progress.progressed = Instant::now();
        }
    }

    /// Files that were handed out and have rows in no chunk yet.
    fn unread_files(&self) -> usize {
        self.data.ledger.chunks().stream().map_or(0, StreamChunks::waiting_parts)
    }

    /// The file of a leased chunk, if the job follows paths.
    pub(crate) fn followed_file(&self, lease: &ChunkLease) -> Option<v1::FollowedFile> {
        let Start::At(from) = lease.start else { return None };
        self.data.stream.followed.as_ref()?.file(from.part)
    }

    /// The counts of followed files; `None` if the job follows no paths.
    pub(crate) fn followed_files(&self) -> Option<FollowedFiles> {
        Some(self.data.stream.followed.as_ref()?.counts(self.unread_files()))
    }
}

fn not_followed() -> RoleError {
    RoleError::Inconsistent { message: "files_seen", reason: "the job follows no paths".to_owned() }
}

fn message(finding: &Finding) -> String {
    match finding {
        Finding::Late { name, is_trained } => {
            let then = if *is_trained { "it is trained next" } else { "it is not trained" };
            format!("{name} came late: it sorts before a file that was taken already; {then}")
        }
        Finding::Changed { name } => {
            format!("{name} changed after it was read; the new content is not trained")
        }
        Finding::Lost { name, problem, .. } => format!("{name} {problem} before all its rows were trained"),
    }
}

#[cfg(test)]
mod tests {
    use rectrain_modes::Lease;
    use rectrain_protocol::plan::{JobPlan, small_plan};

    use super::*;

    /// Global batches of 24 rows.
    fn plan(settings: &[&str]) -> JobPlan {
        let follow = [
            "spec.data.synthetic=null",
            "spec.data.train.follow.paths={in/*.csv}",
            "spec.data.train.follow.until.idleSeconds=60",
        ];
        small_plan(&[&follow[..], settings].concat())
    }

    fn running(plan: &JobPlan) -> State {
        let mut state = State::new(plan, None).unwrap();
        state.training.take_calls();
        state.training.begun().unwrap();
        state
    }

    fn listed(names: &[&str]) -> v1::FilesSeen {
        let file = |name: &&str| v1::SeenFile { name: (*name).to_owned(), size: 5, ..v1::SeenFile::default() };
        v1::FilesSeen { listed: true, files: names.iter().map(file).collect(), ..v1::FilesSeen::default() }
    }

    fn looked(part: u32, rows: u64) -> v1::FilesSeen {
        let looked_at = vec![v1::LookedAtFile { part, file: Some(v1::DataFile::default()), rows }];
        v1::FilesSeen { looked_at, ..v1::FilesSeen::default() }
    }

    fn gone(part: u32) -> v1::FilesSeen {
        let looked_at = vec![v1::LookedAtFile { part, ..v1::LookedAtFile::default() }];
        v1::FilesSeen { looked_at, ..v1::FilesSeen::default() }
    }

    /// The state of a replacement of a killed coordinator.
    fn replaced(state: &State) -> State {
        rmp_serde::from_slice(&rmp_serde::to_vec_named(state).unwrap()).unwrap()
    }

    /// Leases a chunk, and reports it. Returns its file and its rows.
    fn read(state: &mut State) -> Option<(String, u64, u64)> {
        let Lease::Chunk(lease) = state.data.ledger.lease() else { return None };
        let (Start::At(from), Some(until)) = (lease.start, lease.until) else { panic!("a segment has both ends") };
        let report = v1::ChunkReport {
            chunk: lease.chunk,
            rows: until - from.offset.0,
            label_sum: 1.0,
            read: Some(v1::SegmentRead { next: until, more: true }),
            event_millis: Some(1_000),
            ..v1::ChunkReport::default()
        };
        let file = state.followed_file(&lease).unwrap();
        state.chunk_report(&report).unwrap();
        Some((file.name, from.offset.0, until))
    }

    fn warnings(state: &State) -> Vec<&str> {
        state
            .pending_events
            .iter()
            .filter_map(|event| if let JobEvent::Warning { message } = event { Some(message.as_str()) } else { None })
            .collect()
    }

    #[test]
    fn a_replaced_coordinator_trains_each_row_once_in_order() {
        let mut state = running(&plan(&[]));
        let wanted = state.files_seen_at(&listed(&["a", "b"]), 0).unwrap();
        assert_eq!(wanted.look_at.first().map(|file| &*file.name), Some("a"));
        // Between the listing and training.
        let mut state = replaced(&state);
        state.files_seen_at(&looked(1, 24), 0).unwrap();
        let mut state = replaced(&state);
        assert_eq!(read(&mut state), None);
        state.files_seen_at(&looked(0, 30), 0).unwrap();
        assert_eq!(state.stream_lag().map(|lag| (lag.rows, lag.files)), Some((54, Some(2))));
        let mut rows = Vec::new();
        while let Some(read) = read(&mut state) {
            rows.push(read);
            state = replaced(&state);
        }
        let row = |name: &str, from, until| (name.to_owned(), from, until);
        assert_eq!(rows, [row("a", 0, 24), row("a", 24, 30), row("b", 0, 24)]);
        assert_eq!(state.stream_lag().map(|lag| (lag.rows, lag.event_time)), Some((0, Some(1.0))));
        // A loader that was told nothing tells everything again.
        state.files_seen_at(&listed(&["a", "b"]), 59_999).unwrap();
        assert_eq!((state.total_steps(), state.data.ledger.lease()), (None, Lease::Wait));
        state.files_seen_at(&listed(&["a", "b"]), 60_000).unwrap();
        assert_eq!((state.total_steps().map(|total| total.0), state.data.ledger.lease()), (Some(3), Lease::Finished));
        // Files that come behind the end are for the next run.
        state.files_seen_at(&listed(&["c"]), 60_001).unwrap();
        assert_eq!(state.total_steps().map(|total| total.0), Some(3));
        assert_eq!(state.followed_files(), Some(FollowedFiles { taken: 2, ..FollowedFiles::default() }));
    }

    #[test]
    fn a_lost_file_fails_the_job_or_is_left_out() {
        let mut state = running(&plan(&[]));
        state.files_seen_at(&listed(&["a", "b"]), 0).unwrap();
        let error = state.files_seen_at(&gone(0), 0).unwrap_err();
        let expected = "a disappeared before all its rows were trained; put it back as it was";
        assert!(error.is_user_error() && error.to_string().starts_with(expected), "{error}");
        let mut state = running(&plan(&["spec.data.train.follow.lostFiles=skip"]));
        state.files_seen_at(&listed(&["a", "b", "c"]), 0).unwrap();
        for seen in [gone(0), looked(1, 30), looked(2, 5)] {
            state.files_seen_at(&seen, 0).unwrap();
        }
        assert_eq!(read(&mut state), Some(("b".to_owned(), 0, 24)));
        let missing = v1::FilesSeen { missing: vec!["b".to_owned()], ..v1::FilesSeen::default() };
        state.files_seen_at(&missing, 0).unwrap();
        assert_eq!(read(&mut state), Some(("c".to_owned(), 0, 5)));
        assert_eq!(
            warnings(&state),
            [
                "a disappeared before all its rows were trained",
                "b disappeared before all its rows were trained",
                "b: 6 rows from row 25 on are not trained",
            ]
        );
        assert_eq!(state.stream_lag().map(|lag| lag.lost_records), Some(6));
        assert_eq!(state.followed_files().map(|files| (files.taken, files.lost)), Some((3, 2)));
    }

    #[test]
    fn late_and_changed_files_are_told() {
        let mut state = running(&plan(&[]));
        state.files_seen_at(&listed(&["b"]), 0).unwrap();
        state.files_seen_at(&looked(0, 5), 0).unwrap();
        read(&mut state).unwrap();
        let mut seen = listed(&["a", "b"]);
        seen.files[1].version = "2".to_owned();
        state.files_seen_at(&seen, 0).unwrap();
        assert_eq!(
            warnings(&state),
            [
                "a came late: it sorts before a file that was taken already; it is trained next",
                "b changed after it was read; the new content is not trained",
            ]
        );
    }

    #[test]
    fn a_store_that_goes_and_comes_back_is_told_once() {
        let mut state = running(&plan(&[]));
        let away = v1::FilesSeen { unreachable: "no answer".to_owned(), ..v1::FilesSeen::default() };
        for seen in [&listed(&[]), &away, &v1::FilesSeen::default(), &away, &listed(&[])] {
            state.files_seen_at(seen, 0).unwrap();
        }
        let expected = ["no answer; training goes on when it answers", "the store of the followed paths answers again"];
        assert_eq!(warnings(&state), expected);
    }

    #[test]
    fn a_run_without_any_row_is_an_error_and_one_without_an_end_waits() {
        let mut state = running(&plan(&[]));
        state.files_seen_at(&listed(&[]), 0).unwrap();
        assert!(state.waits_for_records());
        let error = state.files_seen_at(&listed(&[]), 60_000).unwrap_err();
        assert!(error.is_user_error() && error.to_string().starts_with("no file with rows came"), "{error}");
        let mut endless = running(&plan(&["spec.data.train.follow.until=null"]));
        endless.files_seen_at(&listed(&[]), 0).unwrap();
        endless.files_seen_at(&listed(&[]), i64::MAX / 2).unwrap();
        assert_eq!(endless.data.ledger.lease(), Lease::Wait);
    }
}
