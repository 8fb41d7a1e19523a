//! Dashboards and alerts of the chart: they query only documented metrics. Each alert has a page
//! and a test, and each page has an alert. Tests that need `promtool` print that they are skipped
//! if there is none; `cargo xtask cluster operate dashboards` downloads it.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn dashboards() -> BTreeMap<String, Value> {
    let files = std::fs::read_dir(root().join("charts/rectrain/dashboards")).unwrap().map(|file| file.unwrap().path());
    let all: BTreeMap<_, _> = files
        .map(|file| {
            let text = std::fs::read_to_string(&file).unwrap();
            (file.file_name().unwrap().to_str().unwrap().to_owned(), serde_json::from_str(&text).unwrap())
        })
        .collect();
    assert_eq!(all.keys().collect::<Vec<_>>(), ["capacity.json", "job.json", "operator.json", "serving.json"]);
    all
}

/// Panels without the titles of rows.
fn panels(dashboard: &Value) -> impl Iterator<Item = &Value> {
    dashboard["panels"].as_array().unwrap().iter().filter(|panel| panel["type"] != "row")
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text but {value}"))
}

fn queries(dashboard: &Value) -> Vec<String> {
    let targets = panels(dashboard).flat_map(|panel| panel["targets"].as_array().unwrap());
    let variables = dashboard["templating"]["list"].as_array().unwrap().iter();
    let of_variables = variables.filter(|variable| variable["type"] == "query").map(|variable| {
        let query = text(&variable["definition"]);
        assert_eq!(query, text(&variable["query"]["query"]));
        query.strip_prefix("label_values(").unwrap().rsplit_once(',').unwrap().0.to_owned()
    });
    targets.map(|target| text(&target["expr"]).to_owned()).chain(of_variables).collect()
}

fn rules() -> Vec<Value> {
    let rules: Value = serde_yaml::from_str(&read("charts/rectrain/alerts.yaml")).unwrap();
    let groups = rules["groups"].as_array().unwrap();
    groups.iter().flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
}

fn alerts() -> BTreeMap<String, Value> {
    let alerts = rules().into_iter().filter(|rule| !rule["alert"].is_null());
    alerts.map(|rule| (text(&rule["alert"]).to_owned(), rule)).collect()
}

/// The metrics of an expression: names outside of quotation marks that begin like a metric.
fn metrics(expression: &str) -> BTreeSet<String> {
    let outside: String = expression.split('"').step_by(2).collect::<Vec<_>>().join(" ");
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == ':';
    let words = outside.split(|letter| !is_part(letter));
    let is_metric = |word: &&str| {
        ["rectrain_", "rectrain:", "process_", "container_", "kube_", "node_"]
            .iter()
            .any(|start| word.starts_with(start))
            && !["rectrain_dev_job", "rectrain_dev_role"].contains(word)
    };
    words.filter(is_metric).map(str::to_owned).collect()
}

/// The documented metrics: the first columns of the references' tables and of the page on
/// dashboards, and recorded rules.
fn known() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let references = ["metrics", "operator-metrics", "serving-metrics"].map(|name| format!("docs/reference/{name}.md"));
    for page in references.iter().map(String::as_str).chain(["docs/operations/dashboards.md"]) {
        let page = read(page);
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
        for (name, rest) in rows {
            let is_histogram = rest.starts_with("histogram");
            let endings: &[&str] = if is_histogram { &["_bucket", "_sum", "_count"] } else { &[""] };
            all.extend(endings.iter().map(|ending| format!("{name}{ending}")));
        }
    }
    assert!(all.len() > 100, "{all:?}");
    all.extend(rules().iter().filter_map(|rule| Some(rule["record"].as_str()?.to_owned())));
    all
}

#[test]
fn metrics_are_found_outside_of_quotation_marks() {
    let expression =
        "sum by (rectrain_dev_job) (rate(rectrain_a_total{x=\"rectrain_no\"}[5m])) / rectrain:b:c > process_d";
    assert_eq!(metrics(expression).into_iter().collect::<Vec<_>>(), ["process_d", "rectrain:b:c", "rectrain_a_total"]);
}

#[test]
fn dashboards_and_alerts_query_documented_metrics_only() {
    let known = known();
    let of_dashboards = dashboards().into_iter().flat_map(|(name, dashboard)| {
        queries(&dashboard).into_iter().map(move |query| (name.clone(), query)).collect::<Vec<_>>()
    });
    let of_rules = rules().into_iter().map(|rule| ("alerts.yaml".to_owned(), text(&rule["expr"]).to_owned()));
    for (file, expression) in of_dashboards.chain(of_rules) {
        let asked = metrics(&expression);
        assert!(!asked.is_empty(), "{file}: {expression}");
        for name in asked {
            assert!(known.contains(&name), "{file} queries {name}, which no reference has");
        }
    }
}

#[test]
fn panels_have_a_place_a_unit_a_description_and_legends() {
    let mut uids = BTreeSet::new();
    for (name, dashboard) in dashboards() {
        assert!(uids.insert(text(&dashboard["uid"]).to_owned()), "{name}");
        assert!(
            dashboard["schemaVersion"].as_u64() >= Some(41) && text(&dashboard["description"]).ends_with('.'),
            "{name}"
        );
        let variables = dashboard["templating"]["list"].as_array().unwrap();
        let variables: Vec<_> = variables.iter().map(|variable| text(&variable["name"])).collect();
        let mut ids = BTreeSet::new();
        let all = dashboard["panels"].as_array().unwrap();
        assert!(all.iter().all(|panel| ids.insert(panel["id"].as_u64().unwrap())), "{name}: two panels have one id");
        let titles: BTreeSet<_> = panels(&dashboard).map(|panel| text(&panel["title"])).collect();
        assert_eq!(titles.len(), panels(&dashboard).count(), "{name}: two panels have one title");
        for panel in panels(&dashboard) {
            let panel_name = format!("{name}: {}", panel["title"]);
            assert!(text(&panel["description"]).ends_with('.'), "{panel_name}");
            assert!(!text(&panel["fieldConfig"]["defaults"]["unit"]).is_empty(), "{panel_name}");
            assert_eq!(panel["datasource"]["uid"], "${datasource}", "{panel_name}");
            let targets = panel["targets"].as_array().unwrap();
            let legends: BTreeSet<_> = targets.iter().map(|target| text(&target["legendFormat"])).collect();
            assert_eq!(legends.len(), targets.len(), "{panel_name}: two lines have one legend");
            assert!(panel["type"] == "stat" || !legends.contains(""), "{panel_name}: a line has no legend");
            for used in targets.iter().flat_map(|target| text(&target["expr"]).split('$').skip(1)) {
                let end =
                    used.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').unwrap_or(used.len());
                assert!(
                    used[..end] == *"__rate_interval" || variables.contains(&&used[..end]),
                    "{panel_name}: ${used}"
                );
            }
        }
        assert!(!overlap(all), "{name}: panels lie over each other");
    }
}

fn overlap(panels: &[Value]) -> bool {
    let mut taken = BTreeSet::new();
    panels.iter().any(|panel| {
        let at = |field: &str| panel["gridPos"][field].as_u64().unwrap();
        let cells = (at("x")..at("x") + at("w")).flat_map(|x| (at("y")..at("y") + at("h")).map(move |y| (x, y)));
        at("x") + at("w") > 24 || !cells.into_iter().all(|cell| taken.insert(cell))
    })
}

#[test]
fn each_alert_has_a_severity_and_a_page_and_each_page_an_alert() {
    let alerts = alerts();
    assert!(alerts.len() > 15);
    let index = read("docs/operations/alerts/README.md");
    for (name, alert) in &alerts {
        let (labels, annotations) = (&alert["labels"], &alert["annotations"]);
        assert!(["info", "warning", "critical"].contains(&text(&labels["severity"])), "{name}");
        assert!(text(&annotations["description"]).contains("{{ $") || name == "RectrainOperatorDown", "{name}");
        assert_eq!(text(&annotations["runbook_url"]), format!("docs/operations/alerts/{name}.md"));
        let page = read(&format!("docs/operations/alerts/{name}.md"));
        assert!(
            page.starts_with(&format!("# {name}: {}\n", text(&annotations["summary"]))),
            "{name}: title of its page"
        );
        for part in ["\n## Meaning\n", "\n## Impact\n", "\n## Look at\n", "\n## Do\n", "```"] {
            assert!(page.contains(part), "docs/operations/alerts/{name}.md lacks {part:?}");
        }
        let line = format!("| [{name}]({name}.md) | {} |", text(&labels["severity"]));
        assert!(index.contains(&line), "docs/operations/alerts/README.md lacks {line}");
    }
    let files = std::fs::read_dir(root().join("docs/operations/alerts")).unwrap().map(|file| file.unwrap().file_name());
    let pages: BTreeSet<_> = files.map(|name| name.into_string().unwrap().replace(".md", "")).collect();
    let expected: BTreeSet<_> = alerts.keys().cloned().chain(["README".to_owned()]).collect();
    assert_eq!(pages, expected);
}

/// The tests are in the file that `promtool` runs.
#[test]
fn each_alert_is_fired_by_a_test_and_silent_before() {
    let file: Value = serde_yaml::from_str(&read("e2e/cluster/alerts-test.yaml")).unwrap();
    let tests = file["tests"].as_array().unwrap();
    let mut fired = BTreeSet::new();
    for test in tests {
        let expected = test["promql_expr_test"].as_array().unwrap();
        let is_silent = |expected: &&Value| expected["exp_samples"].as_array().unwrap().is_empty();
        assert!(expected.iter().any(|expected| is_silent(&expected)), "{}: never silent", test["name"]);
        for sample in expected.iter().flat_map(|expected| expected["exp_samples"].as_array().unwrap()) {
            if let Some(rest) = text(&sample["labels"]).strip_prefix("{alertname=\"") {
                fired.insert(rest.split_once('"').unwrap().0.to_owned());
            }
        }
    }
    assert_eq!(fired, alerts().into_keys().collect());
}

fn promtool() -> Option<PathBuf> {
    let cache = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache/rectrain/cluster"));
    let cached = cache.map(|cache| cache.join("prometheus/usr/bin/promtool"));
    let candidates =
        std::env::var_os("PROMTOOL").map(PathBuf::from).into_iter().chain(["promtool".into()]).chain(cached);
    let found = candidates
        .into_iter()
        .find(|promtool| Command::new(promtool).arg("--version").output().is_ok_and(|o| o.status.success()));
    if found.is_none() {
        eprintln!(
            "SKIPPED: no promtool was found, so alerts are not fired; `cargo xtask cluster operate dashboards` downloads it"
        );
    }
    found
}

#[test]
fn promtool_accepts_the_rules_and_fires_each_alert() {
    let Some(promtool) = promtool() else { return };
    for (action, file) in [("check", "charts/rectrain/alerts.yaml"), ("test", "e2e/cluster/alerts-test.yaml")] {
        let said = Command::new(&promtool).args([action, "rules"]).arg(root().join(file)).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
        assert!(said.status.success(), "promtool {action} rules {file}: {out}{err}");
    }
}
