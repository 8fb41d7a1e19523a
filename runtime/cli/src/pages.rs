//! Every `rectrain` command on a page of the documentation is one that this program has, with these
//! arguments. Commands in fences of `sh` and `console` count. Many need data or a cluster that a
//! test does not have; `tests/own_data.rs` runs a page from its first to its last line.

use std::path::{Path, PathBuf};

use clap::Parser;
use clap::error::ErrorKind;

use crate::args::Cli;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All Markdown files of a folder.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// The lines of shell in the fences of a page. A continued line is one line.
fn shell(page: &str) -> Vec<String> {
    let (mut lines, mut fence) = (Vec::new(), None);
    let page = page.replace("\\\n", " ");
    for line in page.lines() {
        let trimmed = line.trim_start();
        match (fence, trimmed.strip_prefix("```")) {
            (None, Some(kind)) => fence = Some(kind),
            (Some(_), Some(_)) => fence = None,
            (Some("sh"), None) => lines.push(trimmed.to_owned()),
            (Some("console"), None) => lines.extend(trimmed.strip_prefix("$ ").map(str::to_owned)),
            _ => {}
        }
    }
    lines
}

/// The simple commands of a line, each as words. Quotes, comments and operators are understood.
fn commands(line: &str) -> Vec<Vec<String>> {
    let (mut all, mut words, mut word, mut quote) = (Vec::new(), Vec::new(), None::<String>, None);
    for letter in line.chars() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(letter),
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, ' ') => words.extend(word.take()),
            (None, ';' | '|' | '&' | '>' | '<' | '(' | ')') => {
                words.extend(word.take());
                all.push(std::mem::take(&mut words));
            }
            // A part that may be left out.
            (None, '[' | ']') if word.as_deref().is_none_or(|word| word.starts_with('-')) => {}
            (None, _) => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    all.push(words);
    all
}

/// The arguments of `rectrain`, if the command is one.
fn arguments(command: &[String]) -> Option<&[String]> {
    let command = match command {
        [first, rest @ ..] if matches!(&first[..], "do" | "then" | "sudo") => rest,
        all => all,
    };
    match command {
        [first, rest @ ..] if matches!(&first[..], "rectrain" | "target/release/rectrain") => Some(rest),
        [cargo, run, rest @ ..] if cargo == "cargo" && run == "run" && !rest.contains(&"-p".to_owned()) => {
            let start = rest.iter().position(|word| word == "--")?;
            Some(&rest[start + 1..])
        }
        _ => None,
    }
}

/// The problem with a command, if there is one.
fn problem(arguments: &[String]) -> Option<String> {
    let line = ["rectrain".to_owned()].into_iter().chain(arguments.iter().cloned());
    match Cli::try_parse_from(line) {
        Err(error) if !matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return Some(error.to_string());
        }
        _ => {}
    }
    let is_missing = |word: &&String| word.starts_with("docs/examples/") && !root().join(word).exists();
    arguments.iter().find(is_missing).map(|word| format!("there is no {word}"))
}

#[test]
fn commands_on_pages_exist() {
    let mut files = vec![root().join("README.md"), root().join("CONTRIBUTING.md")];
    pages(&root().join("docs"), &mut files);
    let (mut problems, mut count) = (Vec::new(), 0);
    for file in files {
        let page = std::fs::read_to_string(&file).unwrap();
        for command in shell(&page).iter().flat_map(|line| commands(line)) {
            let Some(arguments) = arguments(&command) else { continue };
            count += 1;
            let found = problem(arguments);
            problems.extend(found.map(|problem| format!("{}: {}: {problem}", file.display(), command.join(" "))));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert!(count > 50, "{count} commands were found");
}

/// The prose of a page, without its fences.
fn prose(page: &str) -> String {
    page.split("```").step_by(2).collect()
}

/// The targets of the links of a page.
fn links(page: &str) -> Vec<String> {
    let prose = prose(page);
    let targets = prose.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
    targets.filter(|target| !target.contains("://") && !target.contains(' ')).map(str::to_owned).collect()
}

/// The anchors of a page, as GitHub makes them of its headings.
fn anchors(page: &str) -> Vec<String> {
    let headings = page.lines().filter_map(|line| line.strip_prefix('#')).map(|line| line.trim_start_matches('#'));
    let letters = |heading: &str| {
        let kept = heading.trim().chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    };
    headings.map(letters).collect()
}

#[test]
fn links_between_pages_lead_somewhere() {
    let mut files =
        vec![root().join("README.md"), root().join("CONTRIBUTING.md"), root().join("charts/rectrain/README.md")];
    pages(&root().join("docs"), &mut files);
    let (mut problems, mut count) = (Vec::new(), 0);
    for file in files {
        let page = std::fs::read_to_string(&file).unwrap();
        for link in links(&page) {
            count += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((link.as_str(), ""));
            let target = if path.is_empty() { file.clone() } else { file.parent().unwrap().join(path) };
            let is_there = match target.extension().is_some_and(|extension| extension == "md") {
                true => std::fs::read_to_string(&target)
                    .is_ok_and(|page| anchor.is_empty() || anchors(&page).contains(&anchor.to_owned())),
                false => target.exists(),
            };
            if !is_there {
                problems.push(format!("{}: {link}", file.display()));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert!(count > 200, "{count} links were found");
    let page = "# A `b.c` d\n[x](y.md#z)\n```sh\n[a](b)\n```\n[e](https://f)";
    assert_eq!((links(page), anchors(page)), (vec!["y.md#z".to_owned()], vec!["a-bc-d".to_owned()]));
}

#[test]
fn a_line_is_cut_into_commands() {
    let line = "do rectrain run 'a b' --set x=\"1 2\" > $day.jsonl # and more; rectrain x";
    assert_eq!(commands(line), [vec!["do", "rectrain", "run", "a b", "--set", "x=1 2"], vec!["$day.jsonl"]]);
    let page = "```sh\nrectrain a \\\n  b\n```\n```console\n$ rectrain c\nrectrain d\n```\n```yaml\nrectrain e\n```\n";
    assert_eq!(shell(page), ["rectrain a    b", "rectrain c"]);
    let wrong = ["run".to_owned(), "--no-such".to_owned()];
    assert!(problem(&wrong).unwrap().contains("--no-such"));
    let missing = ["run".to_owned(), "docs/examples/none.yaml".to_owned()];
    assert_eq!(problem(&missing).as_deref(), Some("there is no docs/examples/none.yaml"));
}
