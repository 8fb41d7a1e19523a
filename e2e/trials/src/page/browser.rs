//! A headless browser: Debian's chromium, without a driver. The page's script notes its findings in
//! the document, and chromium prints the document.

use std::path::Path;
use std::process::{Command, Stdio};

use rectrain_harness::command::{command, output};
use rectrain_harness::skips::is_ci;
use rectrain_harness::{HarnessError, files, not_yet, say};
use serde_json::Value;

const CHROMIUM: &str = "chromium";
const PROBE: &str = include_str!("probe.js");
/// The narrowest window that chromium has. Narrower pages are in a frame.
const LEAST_WIDTH: u32 = 500;

/// Finds chromium. With `CI=true` it is installed if it is missing.
///
/// # Errors
/// [`HarnessError::NotYet`] without a browser; [`HarnessError::Failed`] if it cannot be installed.
pub(super) fn find() -> Result<(), HarnessError> {
    if output(&mut command(CHROMIUM, ["--version"])).is_ok() {
        return Ok(());
    }
    if !is_ci() {
        return Err(not_yet("chromium is not installed: `apt-get install chromium`"));
    }
    say("installing chromium");
    output(&mut command("apt-get", ["update"]))?;
    output(&mut command("apt-get", ["install", "-y", "--no-install-recommends", "chromium", "fonts-dejavu-core"]))
        .map(drop)
}

/// How the browser shows a document.
#[derive(Clone, Copy)]
pub(super) struct Window<'a> {
    pub(super) width: u32,
    pub(super) height: u32,
    /// Where to put the picture.
    pub(super) picture: Option<&'a Path>,
    /// Whether timers run at once. Measured times are then 0.
    pub(super) is_time_virtual: bool,
}

/// Runs `call`, a call of a function of the probe, in a document in this folder, and returns its
/// findings.
///
/// # Errors
/// [`HarnessError`] if the browser fails, or if the document has no findings.
pub(super) fn run(folder: &Path, call: &str, window: Window<'_>) -> Result<Value, HarnessError> {
    files::write(&folder.join("probe.js"), PROBE)?;
    let document = format!(
        "<!doctype html><meta charset=\"utf-8\"><body style=\"margin:0\"><script src=\"probe.js\"></script><script>{}</script></body>",
        call.replace("</", "<\\/")
    );
    let path = folder.join("document.html");
    files::write(&path, document)?;
    open(&path, window)
}

/// Opens a file, and returns the findings in it.
///
/// # Errors
/// See [`run`].
pub(super) fn open(path: &Path, window: Window<'_>) -> Result<Value, HarnessError> {
    let mut browser = Command::new(CHROMIUM);
    browser.args([
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--force-device-scale-factor=1",
    ]);
    browser.arg(format!("--window-size={},{}", window.width.max(LEAST_WIDTH), window.height));
    if window.is_time_virtual {
        browser.arg("--virtual-time-budget=8000");
    }
    if let Some(picture) = window.picture {
        browser.arg(format!("--screenshot={}", picture.display()));
    }
    browser.arg("--dump-dom").arg(format!("file://{}", path.display()));
    // Times of day are in the pictures.
    browser.env("TZ", "UTC").stdin(Stdio::null());
    let printed = output(&mut browser)?;
    let found = printed.rsplit_once("id=\"probe\">").and_then(|(_, rest)| rest.split_once("</"));
    let Some((found, _)) = found else {
        return Err(HarnessError::NoOutput {
            program: CHROMIUM,
            expected: "a document with the findings of the probe",
        });
    };
    let subject = || format!("the findings of {}", path.display());
    serde_json::from_str(found).map_err(|source| HarnessError::Json {
        subject: subject(),
        text: found.to_owned(),
        source,
    })
}

/// A text as a literal of JavaScript.
pub(super) fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
