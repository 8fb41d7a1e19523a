//! Follows paths: lists them when the coordinator wants it, tells it of new files, and looks at the
//! files that it has taken.
//!
//! Every loader asks for such work, and the coordinator gives each piece of it to one of them. So
//! the loss of a loader costs nothing. Reports are idempotent.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsString;
use std::time::{Duration, Instant};

use rectrain_data::{FileState, Fingerprint, FollowConfig, FoundFile, list_files, look_at_file};
use rectrain_kinds::FileOrder;
use rectrain_proto::v1;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;

use crate::Loader;
use crate::lease::Pass;

/// The pause before the next question if there was no work.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// The longest pause while the store does not answer.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Files in a message, at most.
const PAGE: usize = 1_000;

/// The files of the listings of this loader.
struct Listing {
    order: FileOrder,
    /// Versions by name, as the coordinator was told.
    told: HashMap<String, String>,
    untold: VecDeque<FoundFile>,
    missing: Vec<String>,
    /// The run that was told.
    run: i64,
    /// When the paths were listed last.
    listed_at: Option<Instant>,
}

impl Listing {
    fn new(order: FileOrder) -> Self {
        let (told, untold) = (HashMap::new(), VecDeque::new());
        Self { order, told, untold, missing: Vec::new(), run: 0, listed_at: None }
    }

    /// The coordinator's list of files began at this time. Another list knows none of the files
    /// that this loader has told.
    fn of_run(&mut self, run: i64) {
        if std::mem::replace(&mut self.run, run) != run {
            self.untold.clear();
            self.told.clear();
        }
    }

    /// Drops the files of a listing that is older than `interval`. Another loader has listed the
    /// paths since, and the files may have changed.
    fn drop_outdated(&mut self, interval: Duration, now: Instant) {
        if self.listed_at.is_none_or(|listed_at| now.duration_since(listed_at) > interval) {
            self.untold.clear();
        }
    }

    /// The paths have these files at the time `now`.
    fn listed(&mut self, mut files: Vec<FoundFile>, now: Instant) {
        let names: HashSet<&str> = files.iter().map(|file| file.name.as_str()).collect();
        self.missing = self.told.keys().filter(|name| !names.contains(name.as_str())).cloned().collect();
        for name in &self.missing {
            self.told.remove(name);
        }
        files.retain(|file| self.told.get(&file.name) != Some(&file.version));
        match self.order {
            FileOrder::Name => files.sort_by(|a, b| a.name.cmp(&b.name)),
            FileOrder::Time => files.sort_by(|a, b| (a.modified_millis, &a.name).cmp(&(b.modified_millis, &b.name))),
        }
        (self.untold, self.listed_at) = (files.into(), Some(now));
    }

    /// The next message with up to `room` files.
    fn tell(&mut self, loader: u32, room: u32, listed: bool) -> v1::FilesSeen {
        let count = PAGE.min(room as usize).min(self.untold.len());
        let files: Vec<v1::SeenFile> = self.untold.drain(..count).map(write_file).collect();
        self.told.extend(files.iter().map(|file| (file.name.clone(), file.version.clone())));
        v1::FilesSeen {
            loader,
            listed,
            files,
            more: self.untold.len() as u64,
            missing: std::mem::take(&mut self.missing),
            ..v1::FilesSeen::default()
        }
    }
}

impl Loader {
    /// Reports the followed paths, which must be the same for all loaders.
    pub(crate) async fn report_paths(&self, follow: &FollowConfig) -> Result<(), RoleError> {
        let part = |path: &String| rectrain_data::PartIdentity { name: path.clone(), size: None, version: None };
        let digest = rectrain_data::Identity { parts: follow.paths.iter().map(part).collect() }.digest();
        let found = v1::FilesFound { loader: self.index, digest, ..v1::FilesFound::default() };
        self.peers.coordinator.call(found, Vec::new(), CALL_DEADLINE).await.map(drop)
    }

    /// Follows the paths until it is dropped, or fails. Ends at once if the job follows none.
    pub(crate) async fn follow_paths(&self) -> Result<(), RoleError> {
        let Some(follow) = self.plan.follow() else { return Ok(()) };
        let tested = self.tested_files().await?;
        let (mut listing, mut pause) = (Listing::new(follow.order), ASK_EVERY);
        let mut seen = self.nothing_seen();
        loop {
            let (wanted, _) = self.peers.coordinator.call(seen, Vec::new(), CALL_DEADLINE).await?;
            listing.of_run(wanted.run_millis);
            let worked = self.follow_once(follow, &tested, &mut listing, &wanted).await;
            seen = match worked {
                Ok(Some(seen)) => {
                    pause = ASK_EVERY;
                    seen
                }
                Ok(None) => {
                    tokio::time::sleep(ASK_EVERY).await;
                    self.nothing_seen()
                }
                Err(RoleError::Data(error)) if error.is_store_away() && listing.listed_at.is_some() => {
                    self.metrics.broker_errors.inc();
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    v1::FilesSeen { unreachable: error.to_string(), ..self.nothing_seen() }
                }
                Err(error) => return Err(error),
            };
        }
    }

    fn nothing_seen(&self) -> v1::FilesSeen {
        v1::FilesSeen { loader: self.index, ..v1::FilesSeen::default() }
    }

    /// The canonical names of the test files.
    async fn tested_files(&self) -> Result<HashSet<OsString>, RoleError> {
        if self.plan.test.is_none() {
            return Ok(HashSet::new());
        }
        let dataset = self.dataset(Pass::Evaluation).await?;
        let looking = blocking("look at the test files", move || dataset.canonical_files());
        Ok(self.reporting_progress(looking).await???)
    }

    /// Does one piece of work, and returns its report; `None` if there is no work.
    async fn follow_once(
        &self,
        follow: &FollowConfig,
        tested: &HashSet<OsString>,
        listing: &mut Listing,
        wanted: &v1::FilesWanted,
    ) -> Result<Option<v1::FilesSeen>, RoleError> {
        if wanted.list {
            let (config, options) = (follow.clone(), self.plan.train.storage_options.clone());
            let reading = blocking("listing of followed paths", move || list_files(&config, &options));
            let files = self.reporting_progress(reading).await???;
            refuse_tested(&files, tested)?;
            listing.listed(files, Instant::now());
            return Ok(Some(listing.tell(self.index, wanted.room, true)));
        }
        if let Some(file) = wanted.look_at.first() {
            let looked_at = vec![self.look_at(file).await?];
            return Ok(Some(v1::FilesSeen { looked_at, ..self.nothing_seen() }));
        }
        listing.drop_outdated(Duration::from_secs(follow.interval_seconds.into()), Instant::now());
        let has_news = wanted.room > 0 && !listing.untold.is_empty();
        Ok(has_news.then(|| listing.tell(self.index, wanted.room, false)))
    }

    async fn look_at(&self, file: &v1::FollowedFile) -> Result<v1::LookedAtFile, RoleError> {
        let (source, schema) = (self.plan.train.of_file(&file.name), self.plan.schema.clone());
        let looking = blocking("look at a followed file", move || look_at_file(&source, &schema));
        let (found, rows) = match self.reporting_progress(looking).await??? {
            FileState::Gone => (None, 0),
            FileState::There { fingerprint, rows } => (Some(write_print(fingerprint)), rows),
        };
        Ok(v1::LookedAtFile { part: file.part, file: found, rows })
    }
}

/// A file that the model is tested on must not be trained.
fn refuse_tested(files: &[FoundFile], tested: &HashSet<OsString>) -> Result<(), RoleError> {
    match files.iter().find(|file| tested.contains(&file.canonical)) {
        None => Ok(()),
        Some(file) => Err(RoleError::Input(format!(
            "spec.data.train.follow.paths: {} is also a test file, so the test would use rows that the model has seen: narrow the paths",
            file.name
        ))),
    }
}

fn write_file(file: FoundFile) -> v1::SeenFile {
    let FoundFile { name, size, version, modified_millis, .. } = file;
    v1::SeenFile { name, size, version, modified_millis }
}

fn write_print(print: Fingerprint) -> v1::DataFile {
    let Fingerprint { name, size, version, content } = print;
    v1::DataFile { name, size, version, content }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, version: &str, modified_millis: i64) -> FoundFile {
        FoundFile {
            name: name.to_owned(),
            canonical: name.into(),
            size: 5,
            version: version.to_owned(),
            modified_millis,
        }
    }

    fn names(seen: &v1::FilesSeen) -> Vec<&str> {
        seen.files.iter().map(|file| file.name.as_str()).collect()
    }

    #[test]
    fn only_news_is_told_in_the_order_and_as_far_as_there_is_room() {
        let mut listing = Listing::new(FileOrder::Time);
        listing.of_run(1);
        let all = || vec![file("a", "1", 30), file("b", "1", 10), file("c", "1", 30)];
        listing.listed(all(), Instant::now());
        let seen = listing.tell(0, 2, true);
        assert_eq!((names(&seen), seen.more, seen.listed), (vec!["b", "a"], 1, true));
        // A second listing finds the same, and one file that is not told yet.
        listing.listed(all(), Instant::now());
        let seen = listing.tell(0, 9, true);
        assert_eq!((names(&seen), seen.more, seen.missing.len()), (vec!["c"], 0, 0));
        listing.listed(vec![file("a", "2", 40), file("c", "1", 30)], Instant::now());
        let seen = listing.tell(0, 9, true);
        assert_eq!((names(&seen), &seen.missing[..]), (vec!["a"], &["b".to_owned()][..]));
        // Another list of the coordinator knows none of them.
        listing.of_run(2);
        listing.listed(vec![file("a", "2", 40), file("c", "1", 30)], Instant::now());
        assert_eq!(names(&listing.tell(0, 9, true)), ["c", "a"]);
        let mut by_name = Listing::new(FileOrder::Name);
        by_name.listed(vec![file("b", "1", 1), file("a", "1", 2)], Instant::now());
        assert_eq!(names(&by_name.tell(0, 9, true)), ["a", "b"]);
    }

    /// The coordinator would take an old version for a change of the file.
    #[test]
    fn files_of_an_outdated_listing_are_not_told() {
        let (interval, now) = (Duration::from_secs(30), Instant::now());
        for (age, told) in [(30, &["b"][..]), (31, &[][..])] {
            let mut listing = Listing::new(FileOrder::Name);
            listing.of_run(1);
            listing.listed(vec![file("a", "1", 1), file("b", "1", 1)], now);
            assert_eq!(names(&listing.tell(0, 1, true)), ["a"]);
            listing.drop_outdated(interval, now + Duration::from_secs(age));
            let seen = listing.tell(0, 9, false);
            assert_eq!((names(&seen), seen.more), (told.to_vec(), 0), "{age} seconds");
        }
    }

    #[test]
    fn a_test_file_is_refused() {
        let tested = HashSet::from([OsString::from("/data/in/b.csv")]);
        let named = |name: &str| FoundFile { canonical: format!("/data/{name}").into(), ..file(name, "1", 1) };
        assert!(refuse_tested(&[named("in/a.csv")], &tested).is_ok());
        let error = refuse_tested(&[named("in/b.csv")], &tested).unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("in/b.csv is also a test file"), "{error}");
    }
}
