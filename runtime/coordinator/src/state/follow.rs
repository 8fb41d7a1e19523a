//! Followed paths: what loaders found there, and which files they look at.
//! [`crate::followed`] has the ledger of the files.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rectrain_kinds::{LostRecords, PartId, PartitionState, Start};
use rectrain_modes::{ChunkLease, Lost, StreamChunks};
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{FollowedFiles, JobEvent};

use super::State;
use crate::followed::{Finding, Followed};

impl State {
    /// A loader asks for work on followed paths, and tells what it has found.
    pub(crate) fn files_seen(&mut self, seen: &v1::FilesSeen) -> Result<v1::FilesWanted, RoleError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64);
        self.files_seen_at(seen, now)
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
        if chunks.is_at_rest() {
            // A wait for files is no stall.
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
