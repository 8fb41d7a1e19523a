//! A profile as a page of HTML that is complete in itself. Plots are drawn as SVG, and colours
//! follow the reader's light or dark setting. Nothing runs, and nothing is loaded. Pure.

use std::fmt::Write;

use super::doubts::TELLING_AUC;
use super::figures::{Feature, Figures};
use super::show;
use crate::human::{bytes, number, percent, thousands};
use crate::svg::{escape, line, rectangle, text};

const STYLE: &str = include_str!("page.css");
const BAR: &str = "var(--bar)";
const CURVE: &str = "var(--curve)";
const GRID: &str = "var(--grid)";

/// The page.
pub(super) fn page(figures: &Figures) -> String {
    let title = escape(&format!("{}: profile of the training data", figures.job));
    let mut body = format!("<h1>{title}</h1>\n");
    for fact in show::heading(figures) {
        body += &format!("<p>{}</p>\n", escape(&fact));
    }
    body += &format!("<p class=\"soft\">{}</p>\n", escape(&show::totals(figures)));
    for warning in &figures.warnings {
        body += &format!("<p class=\"warn\">{}</p>\n", escape(warning));
    }
    body += &proposal(figures);
    body += &heading("Sparse features");
    body += &table(&show::COLUMNS, figures.features.iter().map(show::cells));
    if !figures.dense.is_empty() {
        body += &heading("Dense features");
        body += &table(&show::DENSE_COLUMNS, figures.dense.iter().map(show::dense_cells));
    }
    body += &comparisons(figures);
    body += &heading("Frequencies by feature");
    let cards: String = figures.features.iter().map(card).collect();
    body += &format!("<div class=\"cards\">\n{cards}</div>\n");
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )
}

fn heading(title: &str) -> String {
    format!("<h2>{}</h2>\n", escape(title))
}

fn proposal(figures: &Figures) -> String {
    let mut html = heading("Proposed for spec");
    if !figures.proposal.yaml.is_empty() {
        html += &format!("<pre>{}</pre>\n", escape(&figures.proposal.yaml));
    }
    for note in &figures.proposal.notes {
        html += &format!("<p class=\"soft\">{}</p>\n", escape(note));
    }
    html
}

fn table<const N: usize>(columns: &[&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let head: String = columns.iter().map(|column| format!("<th>{}</th>", escape(column))).collect();
    let mut html = format!("<div class=\"scroll\"><table>\n<tr>{head}</tr>\n");
    for row in rows {
        let cells: String = row.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
        html += &format!("<tr>{cells}</tr>\n");
    }
    html + "</table></div>\n"
}

/// One bar for each feature: the bytes of the tables, and how well a feature tells the label alone.
fn comparisons(figures: &Figures) -> String {
    let of_bytes = figures.features.iter().map(|feature| {
        let length = feature.bytes as f64 / figures.tables.bytes.max(1) as f64;
        (feature.name.as_str(), length, bytes(feature.bytes))
    });
    let sparse = figures.features.iter().map(|feature| (feature.name.as_str(), feature.auc));
    let dense = figures.dense.iter().map(|feature| (feature.name.as_str(), feature.auc));
    let of_auc = sparse.chain(dense).map(|(name, auc)| {
        let length = (2.0 * auc.unwrap_or(0.5) - 1.0).max(0.0);
        (name, length, number(auc, 3))
    });
    let cards = [
        ("Bytes of the rows", "of all tables, with the optimizer's state".to_owned(), bars(of_bytes.collect())),
        (
            "AUC of one feature alone",
            format!("out of sample, from 0.5 to 1; {TELLING_AUC} and more is suspicious"),
            bars(of_auc.collect()),
        ),
    ];
    let cards: String = cards
        .into_iter()
        .map(|(title, about, svg)| {
            format!("<div class=\"card\"><h3>{title}</h3><p class=\"soft\">{about}</p>\n{svg}</div>\n")
        })
        .collect();
    format!("{}<div class=\"cards\">\n{cards}</div>\n", heading("Features compared"))
}

/// Horizontal bars of names, lengths from 0 to 1, and labels. The longest are first.
fn bars(mut rows: Vec<(&str, f64, String)>) -> String {
    const WIDTH: f64 = 420.0;
    const LEFT: f64 = 120.0;
    const LONGEST: f64 = 230.0;
    const STEP: f64 = 18.0;
    rows.sort_by(|a, b| b.1.total_cmp(&a.1));
    let most = rows.iter().map(|row| row.1).fold(1e-9, f64::max);
    let mut drawn = String::new();
    for (at, (name, length, label)) in rows.iter().enumerate() {
        let (y, width) = (at as f64 * STEP, length / most * LONGEST);
        drawn += &text(LEFT - 6.0, y + 12.0, "end", &escape(&shortened(name)));
        drawn += &rectangle(LEFT, y + 2.0, width, STEP - 5.0, BAR, 1.0);
        drawn += &text(LEFT + width + 5.0, y + 12.0, "start", &escape(label));
    }
    svg(WIDTH, rows.len() as f64 * STEP, &drawn)
}

/// A name that fits beside a bar.
fn shortened(name: &str) -> String {
    const LETTERS: usize = 18;
    match name.chars().count() > LETTERS {
        true => name.chars().take(LETTERS - 1).chain(['…']).collect(),
        false => name.to_owned(),
    }
}

fn svg(width: f64, height: f64, content: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\">\n{content}</svg>\n"
    )
}

/// The frequency levels of a feature (Kraken, Fig. 9b), and its look-ups by its most frequent ids.
fn card(feature: &Feature) -> String {
    let about = format!(
        "{} ids, {} seen once; the top 1 % have {} of the look-ups",
        show::ids(feature),
        show::once(feature),
        percent(feature.top_share)
    );
    let gap = match feature.gap_seconds {
        Some(_) => format!("; 99.9 % seen again within {}", show::gap(feature)),
        None => String::new(),
    };
    format!(
        "<div class=\"card\"><h3>{}</h3><p class=\"soft\">{}{}</p>\n{}</div>\n",
        escape(&feature.name),
        escape(&about),
        escape(&gap),
        svg(WIDTH, HEIGHT, &(levels(feature) + &coverage(feature)))
    )
}

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 162.0;
/// The distance of both charts of a card from its top.
const TOP: f64 = 24.0;
const CHART_HEIGHT: f64 = 112.0;
const BOTTOM: f64 = TOP + CHART_HEIGHT;

/// The bars of the ids by frequency, in a logarithmic scale.
fn levels(feature: &Feature) -> String {
    const LEFT: f64 = 44.0;
    const LEVELS_WIDTH: f64 = 170.0;
    let most = feature.levels.iter().map(|level| level.ids).max().unwrap_or(1).max(1);
    let decades = (most as f64).log10().ceil().max(1.0);
    let height = |ids: u64| ((ids as f64).log10().max(0.0) + 0.15) / (decades + 0.15) * CHART_HEIGHT;
    let mut drawn = text(LEFT, 14.0, "start", "ids by number of look-ups");
    for decade in (0..=decades as u32).filter(|decade| decade % (decades as u32).div_ceil(4) == 0) {
        let y = BOTTOM - height(10_u64.pow(decade));
        drawn += &line(LEFT, y, LEFT + LEVELS_WIDTH, y, GRID);
        drawn += &text(LEFT - 5.0, y + 4.0, "end", &short(10_u64.pow(decade)));
    }
    let step = LEVELS_WIDTH / feature.levels.len().max(1) as f64;
    let every = feature.levels.len().div_ceil(6).max(1);
    for (at, level) in feature.levels.iter().enumerate() {
        let x = LEFT + at as f64 * step;
        if level.ids > 0 {
            let tall = height(level.ids);
            let bar = rectangle(x + 0.5, BOTTOM - tall, (step - 1.0).max(0.5), tall, BAR, 1.0);
            let (from, to) = (thousands(level.from), thousands(2 * level.from - 1));
            let range = if level.from == 1 { "once".to_owned() } else { format!("{from} to {to} times") };
            drawn += &format!("<g><title>{} ids are seen {range}</title>{bar}</g>\n", thousands(level.ids));
        }
        if at % every == 0 {
            drawn += &text(x + step / 2.0, BOTTOM + 18.0, "middle", &short(level.from));
        }
    }
    drawn
}

/// The curve of the look-ups by the most frequent ids, whose share is in a logarithmic scale.
fn coverage(feature: &Feature) -> String {
    const LEFT: f64 = 262.0;
    const CURVE_WIDTH: f64 = 140.0;
    /// The decades of the scale, up to all ids.
    const DECADES: i32 = 4;
    let x = |top: f64| LEFT + (1.0 + top.log10() / f64::from(DECADES)) * CURVE_WIDTH;
    let y = |look_ups: f64| BOTTOM - look_ups * CHART_HEIGHT;
    let mut drawn = text(LEFT, 14.0, "start", "look-ups by the top ids");
    for share in [0.0, 0.5, 1.0] {
        drawn += &line(LEFT, y(share), LEFT + CURVE_WIDTH, y(share), GRID);
        drawn += &text(LEFT - 5.0, y(share) + 4.0, "end", &format!("{:.0} %", 100.0 * share));
    }
    for decade in (0..=DECADES).step_by(2) {
        let top = 10_f64.powi(-decade);
        drawn += &text(x(top), BOTTOM + 18.0, "middle", &format!("{} %", 100.0 * top));
    }
    let mut points = String::new();
    let ends = (1.0, 1.0);
    for (top, look_ups) in feature.coverage.iter().map(|point| (point.top, point.look_ups)).chain([ends]) {
        // Writing to a String cannot fail.
        let _written = write!(points, "{:.1},{:.1} ", x(top), y(look_ups));
    }
    drawn
        + &format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{CURVE}\" stroke-width=\"1.8\"/>\n",
            points.trim_end()
        )
}

/// A round number, as short as it can be: 1k, 16k, 1M. Others are rounded down.
fn short(value: u64) -> String {
    match value {
        0..1_000 => value.to_string(),
        1_000..1_000_000 => format!("{}k", value / 1_000),
        1_000_000..1_000_000_000 => format!("{}M", value / 1_000_000),
        _ => format!("{}G", value / 1_000_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::examples;
    use super::*;

    #[test]
    fn a_page_is_complete_and_escapes_names() {
        let mut figures = examples::figures(vec![examples::feature("a<b>&\"c\"")]);
        figures.warnings.push("1 < 2".to_owned());
        let page = page(&figures);
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
        assert!(page.contains("a&lt;b&gt;&amp;&quot;c&quot;") && !page.contains("a<b>"), "{page}");
        assert!(page.contains("<p class=\"warn\">1 &lt; 2</p>"));
        let loads = ["src=", "href=", "url(", "@import", "<script"].map(|part| page.contains(part));
        assert_eq!(loads, [false; 5]);
        assert!(page.contains("prefers-color-scheme: dark"));
        for (open, close) in [("<svg", "</svg>"), ("<div", "</div>"), ("<text", "</text>"), ("<p", "</p>")] {
            let polylines =
                if open == "<p" { page.matches("<polyline").count() + page.matches("<pre").count() } else { 0 };
            assert_eq!(page.matches(open).count() - polylines, page.matches(close).count(), "{open}");
        }
        assert!(!page.contains("NaN") && !page.contains("inf,"), "{page}");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([0, 999, 1_024, 16_384, 1 << 20, 1 << 31].map(short), ["0", "999", "1k", "16k", "1M", "2G"]);
    }
}
