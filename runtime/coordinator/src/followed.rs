//! The ledger of followed files: which were taken for training, in which order, and what loaders
//! found in them. It neither waits nor sends, and has no clock.
//!
//! A file is noticed, then taken, then read. Taking it gives it a number (its part of the stream),
//! which fixes its place in the order of training. A loader then looks at it and counts its rows.
//! Files are handed to [`rectrain_modes::StreamChunks`] in the order of their numbers.
//!
//! The ledger is in every checkpoint. It lists the latest files in full, and has a hash of the name
//! of every older one. So a file is taken once, and a name that comes again is recognized.
//!
//! All of this is in every image of the journal, too ([`crate::journal`]). So its size is bounded:
//! the files that wait and the files that are listed take about 50 KB, and each older name 9 bytes.

use std::collections::{BTreeMap, VecDeque};

use rectrain_checkpoint::Hash64;
use rectrain_kinds::{FileOrder, FollowConfig, FollowEnd, LateFiles, PartId, PartitionState};
use rectrain_proto::v1;
use rectrain_protocol::events::FollowedFiles;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Files that were noticed and not taken, about. Loaders hold the names of further ones.
const MOST_WAITING: usize = 200;
/// Read files that are listed in full.
const MOST_LISTED: usize = 64;
/// Names that are remembered: as many as one listing goes through. They take 1.8 MB.
const MOST_REMEMBERED: usize = FollowConfig::MOST_OBJECTS;
/// Files that are looked at, and that are counted and unread, at most.
const TAKEN_AHEAD: usize = 4;
/// After this time another loader is asked to look at a file.
const ASK_AGAIN_MILLIS: i64 = 60_000;

/// The place of a file in the order: its time (0 in the order of names) and its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Place(i64, String);

/// The taken files, as a checkpoint holds them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct FileLedger {
    /// The followed paths.
    paths: Vec<String>,
    order: FileOrder,
    /// The latest files, by ascending numbers.
    files: VecDeque<TakenFile>,
    /// Hashes of the names of older files, ascending.
    older: Vec<u64>,
    /// The last place that was taken.
    last: Option<Place>,
    /// The number of the next file.
    next_part: u32,
    counts: FollowedFiles,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TakenFile {
    part: u32,
    name: String,
    /// In bytes.
    size: u64,
    /// A generation, an entity tag or a time of modification; see `rectrain_data::Fingerprint`.
    /// Stays once the rows are handed out: they may be read again.
    version: String,
    /// In milliseconds since 1970 (UTC).
    modified_millis: i64,
    /// The last other version that a listing found since the rows were handed out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    noted: Option<String>,
    /// The good rows; `None` until a loader has counted them.
    rows: Option<u64>,
    /// The digest of a local file's content.
    content: Option<Hash64>,
    /// Whether its rows are handed out for training.
    is_handed_out: bool,
    /// Whether it disappeared or changed before all its rows were trained.
    is_lost: bool,
}

/// A finding to tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finding {
    /// A late file.
    Late { name: String, is_trained: bool },
    /// A file changed after it was read.
    Changed { name: String },
    /// A file disappeared or changed before all its rows were read. The part is set if some of its
    /// rows were handed out in this run.
    Lost { name: String, problem: &'static str, part: Option<PartId> },
}

/// The followed files of a run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Followed {
    config: FollowConfig,
    ledger: FileLedger,
    waiting: BTreeMap<Place, Waiting>,
    /// Taken files at which a loader must look, and the loader that was asked last, with the time.
    to_look_at: BTreeMap<u32, Option<(u32, i64)>>,
    /// When the run began.
    run_millis: Option<i64>,
    /// When the last new file came, or the run began.
    news_millis: Option<i64>,
    /// When a loader was asked to list the paths.
    listing_millis: Option<i64>,
    /// Files that the last loader has yet to tell.
    untold: u64,
    /// Set once the time has come at which the run ends.
    ending: Option<Ending>,
}

/// The end of a run at a time. A path may get new files forever, so names that come later are not
/// taken in.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Ending {
    /// When the first listing after that time came, in milliseconds since 1970 (UTC).
    millis: i64,
    /// The loader that has listed the paths last since then.
    lister: u32,
    /// Whether a loader has told all names that it listed since then.
    is_complete: bool,
}

impl Ending {
    /// Whether a file that is not known yet is for the next run.
    fn excludes(&self, file: &v1::SeenFile) -> bool {
        self.is_complete || file.modified_millis > self.millis
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Waiting {
    size: u64,
    version: String,
    modified_millis: i64,
}

const GONE: &str = "disappeared";
const CHANGED: &str = "changed";

impl Followed {
    /// The files of a run, from the ledger of an earlier run on. `is_needed` tells the files
    /// whose rows a run that resumes may read.
    pub(crate) fn new(config: &FollowConfig, saved: Option<&FileLedger>, is_needed: impl Fn(PartId) -> bool) -> Self {
        let fresh = FileLedger { paths: config.paths.clone(), order: config.order, ..FileLedger::default() };
        let mut ledger = saved.cloned().unwrap_or(fresh);
        let mut to_look_at = BTreeMap::new();
        for file in &mut ledger.files {
            file.is_handed_out &= !is_needed(PartId(file.part));
            if !file.is_handed_out {
                to_look_at.insert(file.part, None);
            }
        }
        Self { config: config.clone(), ledger, to_look_at, ..Self::default() }
    }

    /// The part that a checkpoint holds.
    pub(crate) fn ledger(&self) -> &FileLedger {
        &self.ledger
    }

    /// A taken file, for a lease of its rows.
    pub(crate) fn file(&self, part: PartId) -> Option<v1::FollowedFile> {
        self.ledger.files.iter().find(|file| file.part == part.0).map(TakenFile::write)
    }

    /// The counts. `unread` is the number of files that were handed out and have unread rows.
    pub(crate) fn counts(&self, unread: usize) -> FollowedFiles {
        let waiting = self.waiting.len() + self.to_look_at.len() + unread;
        FollowedFiles { waiting: waiting as u64 + self.untold, ..self.ledger.counts }
    }

    /// The settings.
    pub(crate) fn config(&self) -> &FollowConfig {
        &self.config
    }

    /// A loader tells of files. `is_read` says whether all rows of a part were read.
    pub(crate) fn note(&mut self, seen: &v1::FilesSeen, is_read: impl Fn(PartId) -> bool, now: i64) -> Vec<Finding> {
        let has_names = seen.listed || !seen.files.is_empty();
        if has_names && !self.is_closed() {
            self.untold = seen.more;
        }
        self.run_millis.get_or_insert(now);
        self.news_millis.get_or_insert(now);
        let mut findings = Vec::new();
        for file in &seen.files {
            findings.extend(self.note_file(file, &is_read, now));
        }
        for name in &seen.missing {
            findings.extend(self.note_missing(name, &is_read));
        }
        if has_names {
            self.note_end(seen, now);
        }
        findings
    }

    /// Notes the end of the run, by a message with names.
    fn note_end(&mut self, seen: &v1::FilesSeen, now: i64) {
        let Some(FollowEnd::Timestamp(end)) = self.config.until else { return };
        if seen.listed && now >= end {
            let fresh = Ending { millis: now, lister: seen.loader, is_complete: false };
            self.ending.get_or_insert(fresh).lister = seen.loader;
        }
        if let Some(ending) = &mut self.ending {
            ending.is_complete |= ending.lister == seen.loader && seen.more == 0;
        }
    }

    /// Whether no further name is taken in.
    fn is_closed(&self) -> bool {
        self.ending.as_ref().is_some_and(|ending| ending.is_complete)
    }

    fn note_file(&mut self, seen: &v1::SeenFile, is_read: impl Fn(PartId) -> bool, now: i64) -> Option<Finding> {
        if let Some(taken) = self.ledger.files.iter_mut().find(|taken| taken.name == seen.name) {
            return taken.note_version(seen, is_read, &mut self.ledger.counts);
        }
        if self.ledger.is_older(&seen.name) {
            return None;
        }
        let is_excluded = self.ending.as_ref().is_some_and(|ending| ending.excludes(seen));
        if is_excluded && !self.waiting.keys().any(|Place(_, known)| *known == seen.name) {
            return None;
        }
        let v1::SeenFile { name, size, version, modified_millis } = seen.clone();
        let waiting = Waiting { size, version, modified_millis };
        self.waiting.retain(|Place(_, known), of| *known != name || of.modified_millis == modified_millis);
        let place = self.ledger.place(&name, modified_millis);
        let is_known = self.waiting.insert(place.clone(), waiting).is_some();
        if is_known {
            return None;
        }
        self.news_millis = Some(now);
        let is_late = self.ledger.last.as_ref().is_some_and(|last| place < *last);
        if !is_late {
            return None;
        }
        self.ledger.counts.late += 1;
        let is_trained = self.config.late_files == LateFiles::Train;
        if !is_trained {
            self.waiting.remove(&place);
            self.ledger.remember(&name);
        }
        Some(Finding::Late { name, is_trained })
    }

    fn note_missing(&mut self, name: &str, is_read: impl Fn(PartId) -> bool) -> Option<Finding> {
        let before = self.waiting.len();
        self.waiting.retain(|Place(_, known), _| known != name);
        if self.waiting.len() < before {
            self.ledger.counts.lost += 1;
            return Some(Finding::Lost { name: name.to_owned(), problem: GONE, part: None });
        }
        let taken = self.ledger.files.iter_mut().find(|taken| taken.name == name)?;
        // A loader that looks at it finds it gone.
        taken.lose_unread(GONE, is_read, &mut self.ledger.counts)
    }

    /// Takes the next files, if there is room. `unread` is as in [`Self::counts`].
    ///
    /// # Errors
    /// More names than the ledger remembers.
    pub(crate) fn take(&mut self, unread: usize) -> Result<(), String> {
        while self.to_look_at.len() < TAKEN_AHEAD
            && self.to_look_at.len() + unread < 2 * TAKEN_AHEAD
            && let Some((place, waiting)) = self.waiting.pop_first()
        {
            if self.ledger.older.len() >= MOST_REMEMBERED {
                return Err(format!(
                    "{MOST_REMEMBERED} files were taken, and the list of files holds no more: begin a new job with spec.checkpoint.from and another spec.checkpoint.path, on paths without the trained files"
                ));
            }
            let part = self.ledger.take(place, waiting);
            self.to_look_at.insert(part, None);
        }
        Ok(())
    }

    /// A loader has looked at a file.
    pub(crate) fn looked_at(&mut self, found: &v1::LookedAtFile) -> Option<Finding> {
        // Another loader may have looked before.
        self.to_look_at.remove(&found.part)?;
        let file = self.ledger.files.iter_mut().find(|file| file.part == found.part)?;
        let problem = match &found.file {
            None => GONE,
            Some(now) => match file.adopt(now, found.rows) {
                true => return None,
                false => CHANGED,
            },
        };
        // Nothing is known of a file that was never counted, so it has no rows to train. If it was
        // handed out in an earlier run, its rows count as lost when it is handed out again.
        file.rows.get_or_insert(0);
        if !std::mem::replace(&mut file.is_lost, true) {
            self.ledger.counts.lost += 1;
        }
        Some(Finding::Lost { name: file.name.clone(), problem, part: None })
    }

    /// The files whose rows can be handed out now, in their order. The ones that an earlier run had
    /// handed out come first, and together.
    pub(crate) fn ready(&mut self) -> Vec<PartitionState> {
        let to_look_at = &self.to_look_at;
        let waits_again =
            |file: &TakenFile| file.rows.is_some() && !file.is_handed_out && to_look_at.contains_key(&file.part);
        if self.ledger.files.iter().any(waits_again) {
            return Vec::new();
        }
        let mut ready = Vec::new();
        for file in self.ledger.files.iter_mut().filter(|file| !file.is_handed_out) {
            let Some(state) = file.state().filter(|_| !to_look_at.contains_key(&file.part)) else { break };
            file.is_handed_out = true;
            ready.push(state);
        }
        ready
    }

    /// The state of a file that is lost.
    pub(crate) fn lost(&self, part: PartId) -> Option<PartitionState> {
        self.ledger.files.iter().find(|file| file.part == part.0).and_then(TakenFile::state)
    }

    /// Keeps only the names of old files that no run reads again.
    pub(crate) fn forget(&mut self, is_needed: impl Fn(PartId) -> bool) {
        while self.ledger.files.len() > MOST_LISTED
            && self.ledger.files.front().is_some_and(|file| file.is_handed_out && !is_needed(PartId(file.part)))
            && let Some(file) = self.ledger.files.pop_front()
        {
            self.ledger.remember(&file.name);
        }
    }

    /// Whether no further file will be trained. `listed` says whether a loader has just listed the
    /// paths.
    pub(crate) fn is_over(&self, listed: bool, now: i64) -> bool {
        let is_handed_out = self.waiting.is_empty() && self.to_look_at.is_empty() && self.untold == 0;
        let is_time = match self.config.until {
            None => false,
            Some(FollowEnd::Timestamp(_)) => self.is_closed(),
            Some(FollowEnd::IdleSeconds(seconds)) => {
                listed && self.news_millis.is_some_and(|news| now - news >= i64::from(seconds) * 1_000)
            }
        };
        is_handed_out && is_time && self.ledger.files.iter().all(|file| file.is_handed_out)
    }

    /// The work for a loader.
    pub(crate) fn wanted(&mut self, loader: u32, now: i64) -> v1::FilesWanted {
        let interval = i64::from(self.config.interval_seconds) * 1_000;
        let list = self.listing_millis.is_none_or(|asked| now - asked >= interval);
        if list {
            self.listing_millis = Some(now);
        }
        let room = MOST_WAITING.saturating_sub(self.waiting.len()) as u32;
        let look_at = self.ask(loader, now).into_iter().collect();
        v1::FilesWanted { list, room, look_at, run_millis: self.run_millis.unwrap_or(0) }
    }

    /// The first file that no loader looks at, or that this one was asked for.
    fn ask(&mut self, loader: u32, now: i64) -> Option<v1::FollowedFile> {
        let is_free =
            |asked: Option<(u32, i64)>| asked.is_none_or(|(of, since)| of == loader || now - since >= ASK_AGAIN_MILLIS);
        let (part, asked) = self.to_look_at.iter_mut().find(|(_, asked)| is_free(**asked))?;
        *asked = Some((loader, now));
        let part = PartId(*part);
        self.file(part)
    }
}

impl FileLedger {
    /// What differs from the settings of a job that resumes, as a part of a sentence.
    pub(crate) fn difference(&self, config: &FollowConfig) -> Option<String> {
        if self.paths != config.paths {
            let (was, is) = (self.paths.join(", "), config.paths.join(", "));
            return Some(format!("spec.data.train.follow.paths was {was}, and is {is}"));
        }
        let name = |order| if order == FileOrder::Name { "name" } else { "time" };
        let (was, is) = (name(self.order), name(config.order));
        (was != is).then(|| format!("spec.data.train.follow.order was {was}, and is {is}"))
    }

    fn place(&self, name: &str, modified_millis: i64) -> Place {
        match self.order {
            FileOrder::Name => Place(0, name.to_owned()),
            FileOrder::Time => Place(modified_millis, name.to_owned()),
        }
    }

    /// Gives a file the next number.
    fn take(&mut self, place: Place, waiting: Waiting) -> u32 {
        let part = self.next_part;
        self.next_part += 1;
        self.counts.taken += 1;
        let Waiting { size, version, modified_millis } = waiting;
        self.files.push_back(TakenFile {
            part,
            name: place.1.clone(),
            size,
            version,
            modified_millis,
            noted: None,
            rows: None,
            content: None,
            is_handed_out: false,
            is_lost: false,
        });
        self.last = self.last.take().max(Some(place));
        part
    }

    fn is_older(&self, name: &str) -> bool {
        self.older.binary_search(&hash(name)).is_ok()
    }

    fn remember(&mut self, name: &str) {
        let hash = hash(name);
        if let Err(at) = self.older.binary_search(&hash) {
            self.older.insert(at, hash);
        }
    }
}

impl TakenFile {
    fn write(&self) -> v1::FollowedFile {
        let Self { part, name, version, modified_millis, .. } = self;
        let (name, version) = (name.clone(), version.clone());
        v1::FollowedFile { part: *part, name, version, modified_millis: *modified_millis }
    }

    /// A listing has found the file.
    fn note_version(
        &mut self,
        seen: &v1::SeenFile,
        is_read: impl Fn(PartId) -> bool,
        counts: &mut FollowedFiles,
    ) -> Option<Finding> {
        if self.version == seen.version || self.noted.as_ref() == Some(&seen.version) {
            return None;
        }
        if !self.is_handed_out {
            self.adopt_version(seen);
            return None;
        }
        self.noted = Some(seen.version.clone());
        if !self.is_lost && is_read(PartId(self.part)) {
            counts.changed += 1;
            return Some(Finding::Changed { name: self.name.clone() });
        }
        self.lose_unread(CHANGED, is_read, counts)
    }

    /// The file changed before its rows were handed out. A loader compares the rows that an earlier
    /// run had counted.
    fn adopt_version(&mut self, seen: &v1::SeenFile) {
        if self.rows.is_none() {
            (self.version, self.size) = (seen.version.clone(), seen.size);
            self.modified_millis = seen.modified_millis;
        }
    }

    /// Notes that rows that were handed out and not read are lost.
    fn lose_unread(
        &mut self,
        problem: &'static str,
        is_read: impl Fn(PartId) -> bool,
        counts: &mut FollowedFiles,
    ) -> Option<Finding> {
        let part = PartId(self.part);
        if !self.is_handed_out || self.is_lost || is_read(part) {
            return None;
        }
        self.is_lost = true;
        counts.lost += 1;
        Some(Finding::Lost { name: self.name.clone(), problem, part: Some(part) })
    }

    /// Adopts what a loader found. Returns false if rows that were counted before are others now.
    fn adopt(&mut self, now: &v1::DataFile, rows: u64) -> bool {
        let content = now.content.map(Hash64);
        if let Some(before) = self.rows {
            let has_content = match (self.content, content) {
                (Some(before), Some(now)) => before == now,
                _ => now.version.as_ref().is_none_or(|version| *version == self.version),
            };
            if before != rows || !has_content {
                return false;
            }
        }
        (self.size, self.content, self.rows, self.noted) = (now.size, content, Some(rows), None);
        if let Some(version) = &now.version {
            self.version.clone_from(version);
        }
        true
    }

    /// The state for the chunks; `None` until the rows are counted. A lost file has no row left.
    fn state(&self) -> Option<PartitionState> {
        let end = self.rows?;
        let begin = if self.is_lost { end } else { 0 };
        Some(PartitionState { part: PartId(self.part), begin, end, aged_end: end, start: 0, stop: None })
    }
}

/// The first 64 bits of the SHA-256 of a name.
fn hash(name: &str) -> u64 {
    let digest = Sha256::digest(name.as_bytes());
    digest.iter().take(8).fold(0, |hash, byte| (hash << 8) | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(settings: impl FnOnce(&mut FollowConfig)) -> FollowConfig {
        let mut config =
            FollowConfig { paths: vec!["in/*.csv".to_owned()], interval_seconds: 30, ..FollowConfig::default() };
        settings(&mut config);
        config
    }

    fn seen(files: &[(&str, &str)]) -> v1::FilesSeen {
        let file = |(name, version): &(&str, &str)| v1::SeenFile {
            name: (*name).to_owned(),
            size: 5,
            version: (*version).to_owned(),
            modified_millis: 7,
        };
        v1::FilesSeen { listed: true, files: files.iter().map(file).collect(), ..v1::FilesSeen::default() }
    }

    fn looked(part: u32, rows: u64, content: u64) -> v1::LookedAtFile {
        let file = v1::DataFile { size: 5, content: Some(content), ..v1::DataFile::default() };
        v1::LookedAtFile { part, file: Some(file), rows }
    }

    fn parts(states: &[PartitionState]) -> Vec<(u32, u64, u64)> {
        states.iter().map(|state| (state.part.0, state.begin, state.end)).collect()
    }

    fn taken(followed: &Followed) -> Vec<&str> {
        followed.ledger.files.iter().map(|file| file.name.as_str()).collect()
    }

    fn read(_: PartId) -> bool {
        true
    }

    fn unread(_: PartId) -> bool {
        false
    }

    #[test]
    fn files_are_taken_once_in_order_and_handed_out_when_they_are_counted() {
        let mut followed = Followed::new(&config(|_| {}), None, unread);
        assert_eq!(followed.note(&seen(&[("b", "1"), ("a", "1")]), read, 0), []);
        assert_eq!(followed.note(&seen(&[("c", "1"), ("a", "1")]), read, 0), []);
        followed.take(0).unwrap();
        assert_eq!(taken(&followed), ["a", "b", "c"]);
        assert_eq!(followed.note(&seen(&[("a", "1"), ("c", "1")]), read, 0), []);
        // Each loader gets a file of its own to look at. One that died is replaced after a while.
        let look = |followed: &mut Followed, loader, now| {
            followed.wanted(loader, now).look_at.first().map(|file| file.name.clone()).unwrap_or_default()
        };
        assert_eq!([0, 0, 1, 2].map(|loader| look(&mut followed, loader, 0)), ["a", "a", "b", "c"]);
        assert_eq!((look(&mut followed, 3, 59_999), look(&mut followed, 3, 60_000)), (String::new(), "a".to_owned()));
        followed.looked_at(&looked(1, 4, 1));
        assert_eq!(parts(&followed.ready()), [], "a comes first");
        followed.looked_at(&looked(0, 9, 1));
        assert_eq!(parts(&followed.ready()), [(0, 0, 9), (1, 0, 4)]);
        followed.looked_at(&looked(2, 0, 1));
        assert_eq!((parts(&followed.ready()), followed.ready().len()), (vec![(2, 0, 0)], 0));
        assert_eq!(followed.counts(0), FollowedFiles { taken: 3, ..FollowedFiles::default() });
    }

    #[test]
    fn only_a_few_files_are_taken_before_they_are_read() {
        let mut followed = Followed::new(&config(|_| {}), None, unread);
        followed.note(&seen(&[("a", "1"), ("b", "1"), ("c", "1"), ("d", "1"), ("e", "1"), ("f", "1")]), read, 0);
        followed.take(0).unwrap();
        assert_eq!(taken(&followed), ["a", "b", "c", "d"]);
        (0..4).for_each(|part| assert_eq!(followed.looked_at(&looked(part, 1, 1)), None));
        followed.take(2 * TAKEN_AHEAD).unwrap();
        assert_eq!((taken(&followed).len(), followed.counts(8).waiting), (4, 10));
        followed.take(2 * TAKEN_AHEAD - 1).unwrap();
        assert_eq!(taken(&followed).len(), 5);
    }

    #[test]
    fn a_late_file_is_trained_or_left_out() {
        for (late_files, is_trained) in [(LateFiles::Train, true), (LateFiles::Skip, false)] {
            let mut followed = Followed::new(&config(|config| config.late_files = late_files), None, unread);
            followed.note(&seen(&[("b", "1"), ("d", "1")]), read, 0);
            followed.take(0).unwrap();
            let late = Finding::Late { name: "c".to_owned(), is_trained };
            assert_eq!(followed.note(&seen(&[("c", "1"), ("e", "1")]), read, 0), [late]);
            assert_eq!(followed.note(&seen(&[("c", "1")]), read, 0), [], "told once");
            followed.take(0).unwrap();
            let expected: &[&str] = if is_trained { &["b", "d", "c", "e"] } else { &["b", "d", "e"] };
            assert_eq!((taken(&followed), followed.counts(0).late), (expected.to_vec(), 1));
        }
    }

    #[test]
    fn a_file_that_changes_is_read_anew_lost_or_left_as_it_was() {
        let mut followed = Followed::new(&config(|_| {}), None, unread);
        followed.note(&seen(&[("a", "1")]), read, 0);
        followed.take(0).unwrap();
        // Before its rows are counted.
        assert_eq!(followed.note(&seen(&[("a", "2")]), unread, 0), []);
        followed.looked_at(&looked(0, 9, 1));
        assert_eq!(parts(&followed.ready()), [(0, 0, 9)]);
        // After it was read.
        let changed = Finding::Changed { name: "a".to_owned() };
        assert_eq!(followed.note(&seen(&[("a", "3")]), read, 0), [changed]);
        assert_eq!(followed.note(&seen(&[("a", "3")]), read, 0), [], "told once");
        assert_eq!((followed.counts(0).changed, followed.counts(0).lost), (1, 0));
        // Before all its rows were read.
        let lost = Finding::Lost { name: "a".to_owned(), problem: CHANGED, part: Some(PartId(0)) };
        assert_eq!(followed.note(&seen(&[("a", "4")]), unread, 0), [lost]);
        assert_eq!(followed.lost(PartId(0)).map(|state| (state.begin, state.end)), Some((9, 9)));
        assert_eq!((followed.counts(0).changed, followed.counts(0).lost), (1, 1));
    }

    #[test]
    fn a_file_that_disappears_is_lost_if_it_was_not_read() {
        let missing = |name: &str| v1::FilesSeen { missing: vec![name.to_owned()], ..v1::FilesSeen::default() };
        let mut followed = Followed::new(&config(|_| {}), None, unread);
        followed.note(&seen(&[("a", "1"), ("b", "1")]), read, 0);
        let lost = |name: &str, part| Finding::Lost { name: name.to_owned(), problem: GONE, part };
        assert_eq!(followed.note(&missing("b"), unread, 0), [lost("b", None)]);
        followed.take(0).unwrap();
        assert_eq!(followed.note(&missing("a"), unread, 0), [], "a loader looks at it");
        let gone = v1::LookedAtFile { part: 0, ..v1::LookedAtFile::default() };
        assert_eq!(followed.looked_at(&gone), Some(lost("a", None)));
        assert_eq!((followed.looked_at(&gone), parts(&followed.ready())), (None, vec![(0, 0, 0)]));
        followed.note(&seen(&[("c", "1")]), read, 0);
        followed.take(0).unwrap();
        followed.looked_at(&looked(1, 3, 1));
        followed.ready();
        assert_eq!(followed.note(&missing("c"), read, 0), []);
        assert_eq!(followed.note(&missing("c"), unread, 0), [lost("c", Some(PartId(1)))]);
        assert_eq!(followed.counts(0).lost, 3);
    }

    /// Three files: read, partly read, and taken.
    fn saved() -> FileLedger {
        let mut followed = Followed::new(&config(|_| {}), None, unread);
        followed.note(&seen(&[("a", "1"), ("b", "1"), ("c", "1")]), read, 0);
        followed.take(0).unwrap();
        followed.looked_at(&looked(0, 9, 1));
        followed.looked_at(&looked(1, 4, 1));
        assert_eq!(followed.ready().len(), 2);
        stored(&followed)
    }

    /// The ledger, as a checkpoint gives it back.
    fn stored(followed: &Followed) -> FileLedger {
        let json = serde_json::to_string(followed.ledger()).unwrap();
        serde_json::from_str(&json).unwrap()
    }

    /// A loader has looked at an object of four rows. The store digests its content.
    fn object(part: u32, version: &str) -> v1::LookedAtFile {
        let file = v1::DataFile { size: 5, version: Some(version.to_owned()), ..v1::DataFile::default() };
        v1::LookedAtFile { part, file: Some(file), rows: 4 }
    }

    #[test]
    fn a_resumed_run_looks_again_at_the_files_whose_rows_it_reads() {
        let mut followed = Followed::new(&config(|_| {}), Some(&saved()), |part| part == PartId(1));
        assert_eq!(followed.note(&seen(&[("a", "1"), ("b", "1"), ("c", "1"), ("d", "1")]), unread, 0), []);
        followed.looked_at(&looked(2, 5, 1));
        assert_eq!(parts(&followed.ready()), [], "b comes first");
        followed.looked_at(&looked(1, 4, 1));
        assert_eq!(parts(&followed.ready()), [(1, 0, 4), (2, 0, 5)]);
        followed.take(0).unwrap();
        assert_eq!(taken(&followed), ["a", "b", "c", "d"]);
        assert_eq!(followed.counts(0).taken, 4);
    }

    #[test]
    fn a_resumed_run_finds_that_a_file_is_gone_or_another_one() {
        let other = [looked(1, 5, 1), looked(1, 4, 2)];
        let gone = v1::LookedAtFile { part: 1, ..v1::LookedAtFile::default() };
        for (found, problem) in other.into_iter().map(|found| (found, CHANGED)).chain([(gone, GONE)]) {
            let mut followed = Followed::new(&config(|_| {}), Some(&saved()), |part| part == PartId(1));
            let lost = Finding::Lost { name: "b".to_owned(), problem, part: None };
            assert_eq!(followed.looked_at(&found), Some(lost));
            assert_eq!(parts(&followed.ready()), [(1, 4, 4)]);
            assert_eq!(followed.counts(0).lost, 1);
        }
    }

    #[test]
    fn a_resumed_run_compares_the_version_that_the_earlier_run_has_read() {
        let found = |version: &str| v1::LookedAtFile {
            file: Some(v1::DataFile { version: Some(version.to_owned()), ..v1::DataFile::default() }),
            ..looked(1, 4, 1)
        };
        for (version, is_lost) in [("1", false), ("2", true)] {
            let mut followed = Followed::new(&config(|_| {}), Some(&saved()), |part| part == PartId(1));
            assert_eq!(followed.note(&seen(&[("b", version)]), unread, 0), []);
            assert_eq!(followed.looked_at(&found(version)).is_some(), is_lost, "{version}");
        }
    }

    /// Its rows may be needed again: by a replay in this run, and by a run that resumes.
    #[test]
    fn a_file_that_changes_after_it_was_read_keeps_the_version_that_was_read() {
        let mut followed = Followed::new(&config(|_| {}), None, unread);
        followed.note(&seen(&[("a", "1")]), read, 0);
        followed.take(0).unwrap();
        assert_eq!(followed.looked_at(&object(0, "1")), None);
        assert_eq!(parts(&followed.ready()), [(0, 0, 4)]);
        let mut later = seen(&[("a", "2")]);
        (later.files[0].size, later.files[0].modified_millis) = (6, 8);
        assert_eq!(followed.note(&later, read, 0), [Finding::Changed { name: "a".to_owned() }]);
        let expected = v1::FollowedFile { part: 0, name: "a".to_owned(), version: "1".to_owned(), modified_millis: 7 };
        assert_eq!(followed.file(PartId(0)), Some(expected), "for a replay");
        let saved = stored(&followed);
        for (version, is_lost) in [("1", false), ("2", true)] {
            let mut resumed = Followed::new(&config(|_| {}), Some(&saved), read);
            assert_eq!(resumed.looked_at(&object(0, version)).is_some(), is_lost, "{version}");
        }
    }

    /// The version that the earlier run has told is news to a run that reads the file again.
    #[test]
    fn a_resumed_run_tells_a_change_again() {
        let mut followed = Followed::new(&config(|_| {}), None, unread);
        followed.note(&seen(&[("a", "1")]), read, 0);
        followed.take(0).unwrap();
        followed.looked_at(&object(0, "1"));
        followed.ready();
        followed.note(&seen(&[("a", "2")]), read, 0);
        let mut resumed = Followed::new(&config(|_| {}), Some(&stored(&followed)), read);
        assert_eq!(resumed.looked_at(&object(0, "1")), None, "it was put back");
        assert_eq!(parts(&resumed.ready()), [(0, 0, 4)]);
        let lost = Finding::Lost { name: "a".to_owned(), problem: CHANGED, part: Some(PartId(0)) };
        assert_eq!(resumed.note(&seen(&[("a", "2")]), unread, 0), [lost]);
    }

    #[test]
    fn another_list_of_paths_or_another_order_is_a_difference() {
        let saved = saved();
        assert_eq!(saved.difference(&config(|_| {})), None);
        let other = saved.difference(&config(|config| config.paths.push("more/*.csv".to_owned()))).unwrap();
        assert_eq!(other, "spec.data.train.follow.paths was in/*.csv, and is in/*.csv, more/*.csv");
        let other = saved.difference(&config(|config| config.order = FileOrder::Time)).unwrap();
        assert_eq!(other, "spec.data.train.follow.order was name, and is time");
    }

    #[test]
    fn old_files_are_known_by_their_names() {
        let mut followed = Followed::new(&config(|_| {}), None, unread);
        let names: Vec<String> = (0..MOST_LISTED + 10).map(|number| format!("{number:05}")).collect();
        for (part, name) in (0..).zip(&names) {
            followed.note(&seen(&[(name.as_str(), "1")]), read, 0);
            followed.take(0).unwrap();
            followed.looked_at(&looked(part, 1, 1));
            followed.ready();
        }
        followed.forget(|part| part == PartId(5));
        assert_eq!(followed.ledger.files.front().map(|file| file.part), Some(5), "its rows are needed");
        followed.forget(unread);
        assert_eq!((followed.ledger.files.len(), followed.ledger.older.len()), (MOST_LISTED, 10));
        for name in &names {
            assert_eq!(followed.note(&seen(&[(name.as_str(), "1")]), read, 0), []);
        }
        followed.take(0).unwrap();
        assert_eq!(followed.counts(0).taken, names.len() as u64);
    }

    #[test]
    fn a_full_list_takes_no_further_file() {
        let mut followed = Followed::new(&config(|_| {}), None, unread);
        followed.ledger.older = (0..MOST_REMEMBERED as u64 - 1).collect();
        followed.note(&seen(&[("a", "1")]), read, 0);
        assert_eq!(followed.take(0), Ok(()));
        followed.ledger.remember("b");
        assert_eq!(followed.take(0), Ok(()), "no file waits");
        followed.note(&seen(&[("c", "1")]), read, 0);
        let message = followed.take(0).unwrap_err();
        assert!(
            message.starts_with("200000 files were taken") && message.contains("spec.checkpoint.from"),
            "{message}"
        );
        assert_eq!(taken(&followed), ["a"]);
    }

    #[test]
    fn the_files_in_an_image_of_the_journal_have_a_bounded_size() {
        let mut followed = Followed::new(&config(|_| {}), None, unread);
        let names = |from: usize, count: usize| {
            let name = |number| format!("gs://some-bucket/clicks/day=2026-01-01/part-{number:012}.snappy.parquet");
            (from..from + count).map(name).collect::<Vec<_>>()
        };
        let tell = |followed: &mut Followed, names: &[String]| {
            let version = "etag:0123456789abcdef0123456789abcdef";
            let files: Vec<_> = names.iter().map(|name| (name.as_str(), version)).collect();
            followed.note(&seen(&files), read, 0);
        };
        for part in 0..1_000 {
            tell(&mut followed, &names(part, 1));
            followed.take(0).unwrap();
            followed.looked_at(&looked(part as u32, 1, u64::MAX));
            followed.ready();
            followed.forget(unread);
        }
        let room = followed.wanted(0, 0).room as usize;
        tell(&mut followed, &names(1_000, room));
        assert_eq!(followed.wanted(0, 0).room, 0);
        let bytes = rmp_serde::to_vec_named(&followed).unwrap().len();
        let older = 9 * followed.ledger.older.len();
        assert!(older > 8_000 && bytes - older < 80_000, "{bytes} bytes, {older} of them for older names");
    }

    #[test]
    fn a_run_is_over_once_it_is_idle() {
        let idle = config(|config| config.until = Some(FollowEnd::IdleSeconds(60)));
        let mut followed = Followed::new(&idle, None, unread);
        followed.note(&seen(&[]), read, 0);
        assert!(!followed.is_over(true, 59_999) && followed.is_over(true, 60_000));
        assert!(!followed.is_over(false, 60_000), "no loader has listed the paths");
        followed.note(&seen(&[("a", "1")]), read, 30_000);
        assert!(!followed.is_over(true, 90_000), "a file waits");
        followed.take(0).unwrap();
        assert!(!followed.is_over(true, 90_000), "it is not counted");
        followed.looked_at(&looked(0, 1, 1));
        followed.ready();
        assert!(!followed.is_over(true, 89_999) && followed.is_over(true, 90_000));
        followed.note(&v1::FilesSeen { more: 1, ..seen(&[]) }, read, 90_000);
        assert!(!followed.is_over(true, 200_000), "a loader has names to tell");
        let endless = Followed::new(&config(|_| {}), None, unread);
        assert!(!endless.is_over(true, i64::MAX));
    }

    /// Trains a file, so that nothing but new files keeps the run from its end.
    fn train(followed: &mut Followed, part: u32) {
        followed.take(0).unwrap();
        followed.looked_at(&looked(part, 1, 1));
        assert_eq!(followed.ready().len(), 1);
    }

    /// Each listing has a file that the one before had not.
    #[test]
    fn a_run_on_a_busy_path_is_over_once_its_time_has_come() {
        let timed = config(|config| config.until = Some(FollowEnd::Timestamp(60_000)));
        let mut followed = Followed::new(&timed, None, unread);
        followed.note(&seen(&[("a", "1")]), read, 59_999);
        train(&mut followed, 0);
        assert!(!followed.is_over(true, 59_999));
        followed.note(&seen(&[("b", "1")]), read, 60_000);
        assert!(!followed.is_over(true, 60_000), "b waits");
        for (number, name) in (1..).zip(["c", "d"]) {
            let found = v1::FilesSeen { more: 7, ..seen(&[(name, "1")]) };
            followed.note(&found, read, 60_000 + 30_000 * number);
        }
        train(&mut followed, 1);
        assert!(followed.is_over(false, 150_000));
        assert_eq!((taken(&followed), followed.counts(0).waiting), (vec!["a", "b"], 0));
        assert_eq!(followed.note(&seen(&[("a", "2")]), read, 150_000).len(), 1, "known files are watched");
    }

    /// One message has not room for all names, and new files keep coming.
    #[test]
    fn a_run_is_over_once_the_loader_has_told_the_names_of_its_listing() {
        let timed = config(|config| config.until = Some(FollowEnd::Timestamp(60_000)));
        let mut followed = Followed::new(&timed, None, unread);
        let tells = |loader, listed, name, modified_millis, more| {
            let file = v1::SeenFile { modified_millis, ..seen(&[(name, "1")]).files.remove(0) };
            v1::FilesSeen { loader, listed, more, files: vec![file], ..v1::FilesSeen::default() }
        };
        followed.note(&tells(0, true, "a", 1, 1), read, 59_000);
        followed.note(&tells(1, true, "b", 60_500, 2), read, 60_000);
        train(&mut followed, 0);
        train(&mut followed, 1);
        // The other loader had listed before the end, and has less to tell.
        followed.note(&tells(0, false, "c", 1, 0), read, 61_000);
        train(&mut followed, 2);
        assert!(!followed.is_over(false, 61_000));
        followed.note(&tells(1, false, "d", 2, 1), read, 62_000);
        followed.note(&tells(1, false, "e", 61_000, 0), read, 63_000);
        assert!(!followed.is_over(true, 63_000), "d waits");
        train(&mut followed, 3);
        assert!(followed.is_over(false, 63_000));
        assert_eq!(taken(&followed), ["a", "b", "c", "d"], "e came after the end");
    }

    #[test]
    fn the_paths_are_listed_once_in_an_interval() {
        let mut followed = Followed::new(&config(|_| {}), None, unread);
        let lists = [(0, 0), (1, 0), (1, 29_999), (1, 30_000), (0, 59_999), (0, 60_000)];
        let lists = lists.map(|(loader, now)| followed.wanted(loader, now).list);
        assert_eq!(lists, [true, false, false, true, false, true]);
    }
}
