//! The page as one file. It needs no other file and no network.

use std::sync::LazyLock;

use serde_json::Value;

const HTML: &str = include_str!("page.html");
/// The page's own style follows the library's, to override it.
const STYLES: [&str; 2] = [include_str!("vendor/uPlot.min.css"), include_str!("page.css")];
/// In the order of their use.
const SCRIPTS: [&str; 5] = [
    include_str!("vendor/uPlot.min.js"),
    include_str!("words.js"),
    include_str!("series.js"),
    include_str!("charts.js"),
    include_str!("page.js"),
];

/// The most points of a curve whose columns stay arrays.
const MOST_PLAIN_POINTS: usize = 4096;

/// The page of a job that runs. It polls `job.json`.
pub(super) static LIVE: LazyLock<String> = LazyLock::new(|| assembled("rectrain", "null"));

/// The page of these runs, with their data. One run has a page of its own; several are compared.
#[must_use]
pub fn page_of_runs(runs: &[Value]) -> String {
    let runs: Vec<Value> = runs.iter().cloned().map(with_packed_columns).collect();
    let data = serde_json::json!({ "runs": runs }).to_string();
    // `</script>` in a manifest or a message must not end the element with the data.
    assembled(&title(&runs), &data.replace('<', "\\u003c"))
}

/// The run with each column of a long curve as one text of JSON. The page parses a column when a
/// chart first needs it, so it shows the first charts sooner.
fn with_packed_columns(mut run: Value) -> Value {
    if let Some(columns) = run.get_mut("curve").and_then(Value::as_object_mut) {
        for column in columns.values_mut() {
            if column.as_array().is_some_and(|values| values.len() > MOST_PLAIN_POINTS) {
                *column = Value::String(column.to_string());
            }
        }
    }
    run
}

/// The title of the file, before its script runs. As text of HTML.
fn title(runs: &[Value]) -> String {
    let names = runs.iter().filter_map(|run| run["title"].as_str().or(run["name"].as_str()));
    let names = names.collect::<Vec<_>>().join(" and ");
    let title = if names.is_empty() { "rectrain".to_owned() } else { format!("{names}: rectrain") };
    title.replace('&', "&amp;").replace('<', "&lt;")
}

fn assembled(title: &str, data: &str) -> String {
    let script = format!("\"use strict\";\n{}", SCRIPTS.join("\n"));
    let style = STYLES.join("\n");
    let parts =
        [("{{TITLE}}", title), ("{{STYLE}}", style.as_str()), ("{{DATA}}", data), ("{{SCRIPT}}", script.as_str())];
    let mut page = String::with_capacity(HTML.len() + script.len() + data.len());
    let mut rest = HTML;
    for (mark, part) in parts {
        let (before, after) = rest.split_once(mark).unwrap_or((rest, ""));
        page.push_str(before);
        page.push_str(part);
        rest = after;
    }
    page.push_str(rest);
    page
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use serde_json::json;
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::hexadecimal::hexadecimal;

    #[test]
    fn the_page_loads_nothing_but_itself() {
        for mark in ["{{TITLE}}", "{{STYLE}}", "{{DATA}}", "{{SCRIPT}}", " src=", "<link rel=\"stylesheet\""] {
            assert!(!LIVE.contains(mark), "{mark}");
        }
        assert!(LIVE.trim_end().ends_with("</html>") && LIVE.contains("<h1 id=\"name\">"));
        assert!(LIVE.contains(">null</script>"), "the live page has no data");
    }

    #[test]
    fn columns_of_a_long_curve_are_texts() {
        let data = |points: usize| -> Value {
            let column: Vec<usize> = (1..=points).collect();
            let page = page_of_runs(&[json!({ "name": "long", "curve": { "step": column, "last": points } })]);
            let (_, data) = page.split_once("id=\"data\">").unwrap();
            serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap()
        };
        let (long, short) = (data(MOST_PLAIN_POINTS + 1), data(MOST_PLAIN_POINTS));
        let long = &long["runs"][0]["curve"];
        let steps: Vec<usize> = serde_json::from_str(long["step"].as_str().unwrap()).unwrap();
        assert_eq!((steps.len(), steps.last()), (MOST_PLAIN_POINTS + 1, Some(&(MOST_PLAIN_POINTS + 1))));
        assert_eq!(long["last"], MOST_PLAIN_POINTS + 1);
        assert!(short["runs"][0]["curve"]["step"].is_array());
    }

    #[test]
    fn data_cannot_end_its_element() {
        let page = page_of_runs(&[json!({ "name": "</script><b>" })]);
        assert_eq!(page.matches("</script>").count(), LIVE.matches("</script>").count());
        let (_, data) = page.split_once("id=\"data\">").unwrap();
        let data: Value = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
        assert_eq!(data["runs"][0]["name"], "</script><b>");
    }

    #[test]
    fn a_stored_page_is_named_and_says_what_it_needs() {
        let page = page_of_runs(&[json!({ "title": "ctr-<1>", "name": "ctr" }), json!({ "name": "b" })]);
        assert!(page.contains("<title>ctr-&lt;1> and b: rectrain</title>"), "{}", &page[..400]);
        assert!(LIVE.contains("<title>rectrain</title>") && LIVE.contains("<noscript>"));
    }

    #[test]
    fn the_vendored_files_have_the_noted_digests() {
        let notes = include_str!("vendor/README.md");
        let files: [(&str, &[u8]); 3] = [
            ("uPlot.LICENSE", include_bytes!("vendor/uPlot.LICENSE")),
            ("uPlot.min.css", include_bytes!("vendor/uPlot.min.css")),
            ("uPlot.min.js", include_bytes!("vendor/uPlot.min.js")),
        ];
        for (name, bytes) in files {
            let digest = hexadecimal(&Sha256::digest(bytes));
            assert!(notes.contains(&format!("{digest}  {name}")), "{name} has {digest}");
        }
        assert!(include_str!("vendor/uPlot.LICENSE").contains("MIT License"));
    }
}
