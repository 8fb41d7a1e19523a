//! `rectrain completion` and `rectrain man`: scripts and pages that are made from the arguments.

use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::{Cli, CompletionShell};
use crate::failure::Failure;
use crate::output;

/// `rectrain completion SHELL`
pub(crate) fn completion(shell: CompletionShell) -> Result<(), Failure> {
    let shell = match shell {
        CompletionShell::Bash => Shell::Bash,
        CompletionShell::Zsh => Shell::Zsh,
        CompletionShell::Fish => Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "rectrain", &mut script);
    Ok(output::print(String::from_utf8_lossy(&script))?)
}

/// `rectrain man`: prints the page of the whole command, or writes a page for each command.
pub(crate) fn man(folder: Option<&Path>) -> Result<(), Failure> {
    if let Some(folder) = folder {
        let failed = |error: std::io::Error| {
            Failure::Failed(format!("cannot write the manual pages to {}: {error}", folder.display()))
        };
        std::fs::create_dir_all(folder).map_err(failed)?;
        return clap_mangen::generate_to(Cli::command(), folder).map_err(failed);
    }
    let mut page = Vec::new();
    let rendered = clap_mangen::Man::new(Cli::command()).render(&mut page);
    rendered.map_err(|error| Failure::Failed(format!("cannot make the manual page: {error}")))?;
    Ok(output::print(String::from_utf8_lossy(&page))?)
}
