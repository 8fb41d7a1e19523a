//! Ends a process whose parent has died. `rectrain run --processes` kills its processes when it
//! ends, but it cannot do so when it is killed itself. They would train on, and keep the checkpoint
//! path from the next run.

use std::os::unix::process::parent_id;
use std::time::Duration;

use crate::failure::Failure;
use crate::output;

/// The time between two looks at the parent.
const EVERY: Duration = Duration::from_millis(500);

/// Starts a thread that ends this process at once when `parent` is no longer its parent. The thread
/// also works while the asynchronous runtime is busy.
pub(crate) fn watch(parent: u32) -> Result<(), Failure> {
    let watching = std::thread::Builder::new().name("parent".to_owned()).spawn(move || {
        while parent_id() == parent {
            std::thread::sleep(EVERY);
        }
        output::say("rectrain: the process that started this one has ended");
        std::process::exit(1);
    });
    watching.map(drop).map_err(|error| Failure::Failed(format!("cannot start a thread: {error}")))
}
