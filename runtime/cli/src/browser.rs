//! Opens a page in the user's browser.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use crate::output;

/// The command that opens an address in the default browser.
const OPEN: &str = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };

/// Opens an address or a file. Without a browser it says where the page is.
pub(crate) fn open(page: impl AsRef<OsStr>) {
    let page = page.as_ref();
    let opened = Command::new(OPEN).arg(page).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    if let Err(error) = opened {
        output::say(&format!("no browser can be opened ({OPEN}: {error}): open {} yourself", page.display()));
    }
}
