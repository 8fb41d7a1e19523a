//! `cargo xtask page`: shows the page of a run in a headless browser, in each state, light and dark
//! and 400 pixels wide. It checks the words and the drawn curves, uses keys and the mouse, and
//! compares pictures with `docs/images/page`, loosely, because fonts differ between machines.

mod browser;
mod states;

use std::path::{Path, PathBuf};

use rectrain_harness::cargo::build_programs;
use rectrain_harness::command::{command, output};
use rectrain_harness::workspace::{built, workspace};
use rectrain_harness::{HarnessError, files, say, skips};
use serde_json::{Value, json};

use self::browser::Window;
use self::states::{STATES, State};
use crate::TrialError;
use crate::error::unmet;

const USAGE: &str = "usage: cargo xtask page [--update]
  Shows the page of a run in chromium and checks each state. With --update, the pictures become the stored ones.";
const VIEWS: [View; 3] = [
    View { name: "light", width: 1200, height: HEIGHT, theme: "light" },
    View { name: "dark", width: 1200, height: HEIGHT, theme: "dark" },
    // High enough for the first charts, which are below the figures.
    View { name: "narrow", width: 400, height: 2000, theme: "light" },
];
/// The height of wide pictures.
const HEIGHT: u32 = 1100;
/// The most that a picture may differ from the stored one: the mean over all channels of pixels, of
/// at most 1. Other fonts give some 0.01, another theme more than 0.5.
const MOST_DIFFERENT: f64 = 0.05;
/// Reports of progress on the page with many points.
const MANY_POINTS: u64 = 200_000;
/// The most points that a curve may draw: the smallest and the largest of each pixel's reports, on
/// a page of [`VIEWS`]' greatest width.
const MOST_DRAWN: u64 = 2 * 1200;

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// A page that does not show its state, or a picture that differs from the stored one.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let updates = match arguments {
        [] => false,
        ["--update"] => true,
        _ => return Err(HarnessError::Usage(USAGE).into()),
    };
    if let Err(error) = browser::find() {
        return Ok(skips::skip("the page in a browser", error)?);
    }
    build_programs()?;
    check(&built("rectrain")?, updates)
}

/// Checks the pages that this program makes. With `updates`, its pictures become the stored ones.
///
/// # Errors
/// See [`run`].
pub fn check(rectrain: &Path, updates: bool) -> Result<(), TrialError> {
    let work = Work::new(rectrain)?;
    let mut pictures = Vec::new();
    for state in &STATES {
        states::write(state, &work.history(state.name))?;
        pictures.extend(views(&work, state).map_err(TrialError::part(state.name))?);
    }
    pictures.extend(comparison(&work).map_err(TrialError::part("compare"))?);
    lost_contact(&work).map_err(TrialError::part("lost contact"))?;
    many_points(&work).map_err(TrialError::part("many points"))?;
    if updates { store(&pictures) } else { compare(&work, &pictures) }
}

/// A size in pixels, and a theme.
#[derive(Clone, Copy)]
struct View {
    name: &'static str,
    width: u32,
    height: u32,
    theme: &'static str,
}

/// The folders of the trial.
struct Work {
    folder: PathBuf,
    /// The program that makes the pages.
    rectrain: PathBuf,
}

impl Work {
    fn new(rectrain: &Path) -> Result<Self, HarnessError> {
        let folder = workspace().join("target/page");
        files::remove_folder(&folder)?;
        Ok(Self { folder, rectrain: rectrain.to_owned() })
    }

    fn history(&self, state: &str) -> PathBuf {
        self.folder.join("runs").join(state)
    }

    fn picture(&self, name: &str) -> PathBuf {
        self.folder.join(name).with_extension("png")
    }

    /// The page that `rectrain runs` makes of these histories.
    fn page(&self, names: &[&str]) -> Result<String, HarnessError> {
        let place = self.folder.join("runs");
        let page = place.join("page.html");
        let mut rectrain = command(&self.rectrain, ["runs"]);
        match names {
            [name] => rectrain.args(["show", name]),
            _ => rectrain.arg("compare").args(names).arg("--output").arg(&page),
        };
        output(rectrain.arg("--runs").arg(&place))?;
        match names {
            [name] => files::read(&self.history(name).join("page.html")),
            _ => files::read(&page),
        }
    }
}

/// A picture, and where the stored one is.
struct Picture {
    taken: PathBuf,
    stored: PathBuf,
}

impl Picture {
    fn of(work: &Work, name: &str) -> Self {
        Self {
            taken: work.picture(name),
            stored: workspace().join("docs/images/page").join(name).with_extension("png"),
        }
    }
}

/// Shows a state in all views.
fn views(work: &Work, state: &State) -> Result<Vec<Picture>, TrialError> {
    let page = work.page(&[state.name])?;
    let mut pictures = Vec::new();
    for view in VIEWS {
        let picture = Picture::of(work, &format!("{}-{}", state.name, view.name));
        let found = show(work, &page, view, &json!({}), Some(&picture.taken))?;
        expect_fits(&found, view.theme)?;
        expect_state(state.name, &found)?;
        if state.name == "complete" && view.name == "light" {
            expect_acts(&show(work, &page, view, &json!({ "acts": true }), None)?)?;
        }
        pictures.push(picture);
    }
    Ok(pictures)
}

fn show(work: &Work, page: &str, view: View, options: &Value, picture: Option<&Path>) -> Result<Value, TrialError> {
    let View { width, height, theme, .. } = view;
    let mut all = json!({ "width": width, "height": height, "theme": theme, "isLive": false, "acts": false });
    if let (Some(all), Some(options)) = (all.as_object_mut(), options.as_object()) {
        all.extend(options.clone());
    }
    let window = Window { width, height, picture, is_time_virtual: true };
    let found = browser::run(&work.folder, &format!("probe({}, {all})", browser::literal(page)), window)?;
    match found["error"].as_str() {
        Some(error) => Err(unmet("a page without errors", error)),
        None => Ok(found),
    }
}

/// The page has the wanted theme, and no part of it is wider than the window.
fn expect_fits(found: &Value, theme: &str) -> Result<(), TrialError> {
    if found["theme"] != theme || found["overflow"].as_f64().is_none_or(|pixels| pixels > 0.0) {
        let shown = format!("theme {}, {} pixels too wide", found["theme"], found["overflow"]);
        return Err(unmet(format!("a page of theme {theme} that fits"), shown));
    }
    Ok(())
}

/// The words that each state must show: the field of the findings, and a part of it.
fn expected_words(state: &str) -> &'static [(&'static str, &'static str)] {
    match state {
        "training" => &[
            ("phase", "Training"),
            ("progress", "epoch 18.6 of 30"),
            ("progress", "left"),
            ("facts", "learning rate, dense 0.001 (adam)"),
            ("facts", "gradient norm 0.0"),
            ("modes", "sync gba hybrid"),
            ("members", "rows in"),
        ],
        "overfit" => &[("banners", "The model overfits"), ("banners", "epoch 1 (step 32): 0.4460")],
        "complete" => &[
            ("phase", "Complete"),
            ("banners", "Digest of the model: 9f2c1b7de4a05c33"),
            ("results", "test AUC 0.7662"),
            ("facts", "staleness mean 0.42, most 3 steps"),
        ],
        "failed" => &[
            ("phase", "Failed"),
            ("banners", "Training diverged at step 379"),
            ("banners", "To continue:"),
            ("facts", "gradient norm not finite"),
        ],
        "interrupted" => &[("phase", "Interrupted"), ("banners", "--set spec.checkpoint.resume=latest")],
        _ => &[("phase", "Starting"), ("events", "No event yet")],
    }
}

fn expect_state(state: &str, found: &Value) -> Result<(), TrialError> {
    for (field, words) in expected_words(state) {
        if !found[*field].as_str().is_some_and(|text| text.contains(words)) {
            return Err(unmet(format!("`{words}` in {field}"), &found[*field]));
        }
    }
    if state != "complete"
        && state != "overfit"
        && found["banners"].as_str().is_some_and(|text| text.contains("Complete"))
    {
        return Err(unmet("no banner of completion", &found["banners"]));
    }
    expect_curves(state, &found["charts"])
}

/// Training and test are drawn apart: each colour is on its charts.
fn expect_curves(state: &str, charts: &Value) -> Result<(), TrialError> {
    let is_drawn = |metric: &str, curve: &str| charts[metric][curve].as_f64().is_some_and(|share| share > 0.5);
    for (metric, curve) in [
        ("loss", "train"),
        ("loss", "test"),
        ("auc", "train"),
        ("auc", "test"),
        ("gauc", "test"),
        ("ne", "test"),
        ("rate", "train"),
        ("gradient", "train"),
    ] {
        if is_drawn(metric, curve) == (state == "empty") {
            let wanted = if state == "empty" { "no curve" } else { "a curve" };
            return Err(unmet(format!("{wanted} {curve} on the chart {metric}"), &charts[metric]));
        }
    }
    let words = charts["loss"]["words"].as_str().unwrap_or_default();
    if state != "empty" && !(words.contains("training is") && words.contains("best")) {
        return Err(unmet("a chart of the loss that names its best point", words));
    }
    Ok(())
}

/// Keys, mouse and filters do what they say.
fn expect_acts(found: &Value) -> Result<(), TrialError> {
    let acts = &found["acts"];
    let text = |field: &str| acts[field].as_str().unwrap_or_default();
    let claims = [
        ("the key x chooses each axis in turn", acts["axes"] == json!(["step", "samples", "epoch", "time", "step"])),
        ("the key + zooms", acts["isZoomed"] == true),
        ("the key 0 shows the whole run", acts["isWhole"] == true),
        ("the key l is the log scale", acts["isLog"] == true),
        ("the key S smooths less", acts["isLessSmooth"] == true),
        ("an arrow moves the cursor", text("atCursor").contains("test 0.4460")),
        ("the legend follows the mouse", !text("inTheMiddle").contains("test 0.4460")),
        ("the key n shows older events", text("olderEvents").starts_with("13–24 of")),
        (
            "a filter leaves checkpoints only",
            text("checkpoints").contains("Checkpoint") && !text("checkpoints").contains("AUC"),
        ),
        ("a search without a hit says so", text("noEvents").contains("No event")),
    ];
    match claims.iter().find(|(_, holds)| !holds) {
        Some((claim, _)) => Err(unmet(*claim, acts)),
        None => Ok(()),
    }
}

/// Two runs on one page, each with its own curve.
fn comparison(work: &Work) -> Result<Vec<Picture>, TrialError> {
    let page = work.page(&["complete", "overfit"])?;
    let mut pictures = Vec::new();
    for view in VIEWS {
        let picture = Picture::of(work, &format!("compare-{}", view.name));
        let found = show(work, &page, view, &json!({}), Some(&picture.taken))?;
        expect_fits(&found, view.theme)?;
        let legend = found["charts"]["auc"]["legend"].as_str().unwrap_or_default();
        if !legend.contains("complete, test 0.7662") || !legend.contains("overfit, test 0.6643") {
            return Err(unmet("both runs in the legend of the AUC", legend));
        }
        pictures.push(picture);
    }
    Ok(pictures)
}

/// A page whose job no longer answers says so, and does not look like a job that trains.
fn lost_contact(work: &Work) -> Result<(), TrialError> {
    let page = work.page(&["training"])?;
    let found = show(work, &page, VIEWS[0], &json!({ "isLive": true }), None)?;
    let says = found["banners"].as_str().is_some_and(|text| text.contains("No answer since"));
    if found["phase"] == "no answer" && says { Ok(()) } else { Err(unmet("`no answer`", &found["phase"])) }
}

/// Stands before the page's script, which reads the data and draws it.
const BEGIN: &str = "const began = performance.now();";
/// Stands after it, and leaves its findings in the document.
const MEASURE: &str = "const drawn = performance.now();
while (waiting.length) drawWaiting();
const all = performance.now();
const original = thin, lengths = [];
thin = (...curve) => { const points = original(...curve); lengths.push(points[0].length); return points; };
draw();
while (waiting.length) drawWaiting();
const found = document.createElement('pre');
found.id = 'probe';
found.textContent = JSON.stringify({ first: drawn - began, rest: all - drawn, again: performance.now() - all,
  points: view.runs[0].train.step.length, least: Math.min(...lengths), most: Math.max(...lengths) });
document.body.append(found);";

/// A page with many points shows all reports, and draws a few of them for each pixel. It measures
/// real time, and says it.
fn many_points(work: &Work) -> Result<(), TrialError> {
    states::write_long(MANY_POINTS, &work.history("long"))?;
    let page = work.page(&["long"])?;
    let measured = page
        .replacen("<script>", &format!("<script>{BEGIN}</script><script>"), 1)
        .replace("</body>", &format!("<script>{MEASURE}</script></body>"));
    let path = work.folder.join("long.html");
    files::write(&path, measured)?;
    let window = Window { width: 1200, height: HEIGHT, picture: None, is_time_virtual: false };
    let found = browser::open(&path, window)?;
    say(format!(
        "{MANY_POINTS} reports of progress: {found} (`first` charts, the `rest`, and all `again` in milliseconds)"
    ));
    let is_thinned = found["least"].as_u64() > Some(0) && found["most"].as_u64().is_some_and(|most| most <= MOST_DRAWN);
    if found["points"] != MANY_POINTS || !is_thinned {
        return Err(unmet(format!("{MANY_POINTS} reports, and curves of 1 to {MOST_DRAWN} points"), &found));
    }
    Ok(())
}

/// The pictures become the stored ones.
fn store(pictures: &[Picture]) -> Result<(), TrialError> {
    for Picture { taken, stored } in pictures {
        if let Some(folder) = stored.parent() {
            files::make_folder(folder)?;
        }
        std::fs::copy(taken, stored).map_err(HarnessError::io("copy", taken.display()))?;
    }
    say(format!("{} pictures stored: look at each", pictures.len()));
    Ok(())
}

/// Compares all pictures with the stored ones, in the browser.
fn compare(work: &Work, pictures: &[Picture]) -> Result<(), TrialError> {
    let mut pairs = Vec::new();
    for Picture { taken, stored } in pictures {
        pairs.push([data_url(taken)?, data_url(stored)?]);
    }
    // Pictures are decoded in real time, which virtual time would not wait for on a slow machine.
    let window = Window { width: 1200, height: HEIGHT, picture: None, is_time_virtual: false };
    let found = browser::run(&work.folder, &format!("compare({})", json!(pairs)), window)?;
    for (place, Picture { taken, stored }) in pictures.iter().enumerate() {
        let difference = found[place].as_f64().unwrap_or(1.0);
        if difference > MOST_DIFFERENT {
            let expected = format!("a picture like {}; `cargo xtask page --update` stores a new one", stored.display());
            return Err(unmet(expected, format!("{} differs by {difference:.3}", taken.display())));
        }
    }
    say(format!("{} pictures are as stored", pictures.len()));
    Ok(())
}

/// A picture as a URL with its data.
fn data_url(picture: &Path) -> Result<String, HarnessError> {
    let bytes = std::fs::read(picture).map_err(HarnessError::io("read", picture.display()))?;
    Ok(format!("data:image/png;base64,{}", base64(&bytes)))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |place: usize| u32::from(three.get(place).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            let digit = char::from(DIGITS[(bits >> (18 - 6 * place) & 63) as usize]);
            text.push(if place <= three.len() { digit } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_are_encoded_as_in_rfc_4648() {
        let encoded: Vec<String> = ["", "f", "fo", "foo", "foob"].map(|text| base64(text.as_bytes())).into();
        assert_eq!(encoded, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]);
    }
}
