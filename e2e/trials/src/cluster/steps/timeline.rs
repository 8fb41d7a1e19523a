//! A job's throughput and training mode over time, and the times when neighbours took its nodes'
//! processors, as JSON and as a drawing in SVG. The module is pure. [`super::contention`] records
//! timelines; `docs/development/timelines` shows some.

use std::fmt::Write;

use serde_json::{Value, json};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 330.0;
const LEFT: f64 = 74.0;
const RIGHT: f64 = 930.0;
/// The band of modes is below the two lines of text.
const BAND_TOP: f64 = 54.0;
const BAND_HEIGHT: f64 = 18.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 290.0;

/// A measurement.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    /// Seconds since the timeline began.
    pub(super) seconds: f64,
    /// The throughput of all dense workers together, over the preceding seconds.
    pub(super) samples_per_second: f64,
    /// The training mode.
    pub(super) mode: String,
}

/// A change of the training mode.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Switch {
    /// When the job's status showed the new mode.
    pub(super) seconds: f64,
    /// The new mode.
    pub(super) mode: String,
    /// The reason in the status.
    pub(super) reason: String,
}

/// A job's behaviour over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Timeline {
    /// A title for the drawing.
    pub(super) title: String,
    /// The measurements, in order of time.
    pub(super) samples: Vec<Sample>,
    /// The times in which neighbours took processors: beginning and end, in seconds.
    pub(super) contention: Vec<[f64; 2]>,
    /// The switches after the first mode.
    pub(super) switches: Vec<Switch>,
    /// More figures, by name.
    pub(super) figures: Vec<(String, f64)>,
}

impl Timeline {
    pub(super) fn to_json(&self) -> Value {
        let samples = self.samples.iter().map(|sample| {
            json!({"seconds": tenths(sample.seconds), "samplesPerSecond": tenths(sample.samples_per_second), "mode": sample.mode})
        });
        let switches = self
            .switches
            .iter()
            .map(|switch| json!({"seconds": tenths(switch.seconds), "mode": switch.mode, "reason": switch.reason}));
        let figures: serde_json::Map<_, _> =
            self.figures.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
        json!({
            "title": self.title,
            "figures": figures,
            "contentionSeconds": self.contention.iter().map(|period| period.map(tenths)).collect::<Vec<_>>(),
            "switches": switches.collect::<Vec<_>>(),
            "samples": samples.collect::<Vec<_>>(),
        })
    }

    /// The drawing as SVG.
    pub(super) fn to_svg(&self) -> String {
        let end = self.samples.last().map_or(1.0, |sample| sample.seconds.max(1.0));
        let most = self.samples.iter().map(|sample| sample.samples_per_second).fold(1.0, f64::max);
        let x = |seconds: f64| LEFT + seconds.clamp(0.0, end) / end * (RIGHT - LEFT);
        let y = |rate: f64| BOTTOM - rate / most * (BOTTOM - TOP);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
        );
        svg += &text(LEFT, 20.0, "start", &self.title);
        svg += &text(
            LEFT,
            38.0,
            "start",
            "samples/s; band: training mode; grey: neighbours take the processors of a node",
        );
        for [from, to] in &self.contention {
            svg += &rectangle([x(*from), x(*to)], [TOP, BOTTOM], "#d9d9d9");
        }
        svg += &self.band(x);
        for (value, label) in ticks(most) {
            svg += &line([LEFT, RIGHT], [y(value), y(value)]);
            svg += &text(LEFT - 6.0, y(value) + 4.0, "end", &label);
        }
        for (value, label) in ticks(end) {
            svg += &line([x(value), x(value)], [BOTTOM, BOTTOM + 4.0]);
            svg += &text(x(value), BOTTOM + 18.0, "middle", &format!("{label} s"));
        }
        let points: Vec<_> = self
            .samples
            .iter()
            .map(|sample| format!("{:.1},{:.1}", x(sample.seconds), y(sample.samples_per_second)))
            .collect();
        let _written = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"#333333\" stroke-width=\"1.6\"/>",
            points.join(" ")
        );
        svg + "</svg>\n"
    }

    /// The band of modes, each as long as it was in use.
    fn band(&self, x: impl Fn(f64) -> f64) -> String {
        let mut svg = String::new();
        for phase in self.samples.chunk_by(|one, next| one.mode == next.mode) {
            let (Some(first), Some(last)) = (phase.first(), phase.last()) else { continue };
            // A mode lasts until the first sample of the next one.
            let end = self.samples.iter().find(|sample| sample.seconds > last.seconds).unwrap_or(last);
            let (from, to) = (x(first.seconds), x(end.seconds));
            svg += &rectangle([from, to], [BAND_TOP, BAND_TOP + BAND_HEIGHT], colour(&first.mode));
            if to - from > 40.0 {
                svg += &text(f64::midpoint(from, to), BAND_TOP + 13.0, "middle", &first.mode);
            }
        }
        svg
    }
}

/// A mode's colour, as in `rectrain simulate --plot` (Okabe and Ito's palette), but pale enough for
/// text.
fn colour(mode: &str) -> &'static str {
    match mode {
        "sync" => "#eeb38c",
        "gba" => "#8cbfe0",
        _ => "#bbbbbb",
    }
}

/// Round numbers from 0 to `most`, at most seven, with their labels.
fn ticks(most: f64) -> Vec<(f64, String)> {
    let magnitude = 10f64.powf((most / 6.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|step| step * magnitude).into_iter().find(|step| most / step <= 6.0);
    let step = step.unwrap_or(most);
    let values = (0..=6).map(|index| f64::from(index) * step).take_while(|value| *value <= most);
    values.map(|value| (value, format!("{value:.0}"))).collect()
}

/// Rounds to one decimal, which keeps differences between two files readable.
fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn rectangle([from, to]: [f64; 2], [top, bottom]: [f64; 2], fill: &str) -> String {
    let (width, height) = (to - from, bottom - top);
    format!("<rect x=\"{from:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\"/>\n")
}

fn line([x1, x2]: [f64; 2], [y1, y2]: [f64; 2]) -> String {
    format!("<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#bbbbbb\"/>\n")
}

fn text(x: f64, y: f64, anchor: &str, content: &str) -> String {
    let content = content.replace('&', "&amp;").replace('<', "&lt;");
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline() -> Timeline {
        let sample = |seconds: f64, samples_per_second: f64, mode: &str| Sample {
            seconds,
            samples_per_second,
            mode: mode.to_owned(),
        };
        Timeline {
            title: "a < b".to_owned(),
            samples: vec![
                sample(0.0, 100.0, "sync"),
                sample(10.0, 50.04, "sync"),
                sample(20.0, 80.0, "gba"),
                sample(40.0, 80.0, "gba"),
            ],
            contention: vec![[5.0, 30.0]],
            switches: vec![Switch { seconds: 18.0, mode: "gba".to_owned(), reason: "faster".to_owned() }],
            figures: vec![("ratio".to_owned(), 1.6)],
        }
    }

    #[test]
    fn a_timelines_json_has_its_figures() {
        let json = timeline().to_json();
        assert_eq!(json["figures"]["ratio"], 1.6);
        assert_eq!(json["contentionSeconds"], json!([[5.0, 30.0]]));
        assert_eq!(json["samples"][1], json!({"seconds": 10.0, "samplesPerSecond": 50.0, "mode": "sync"}));
        assert_eq!(json["switches"][0]["reason"], "faster");
    }

    #[test]
    fn the_drawing_has_a_band_per_mode_and_a_shade_for_contention() {
        let svg = timeline().to_svg();
        assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n"), "{svg}");
        // Half of the axis is 20 of 40 seconds.
        assert!(
            svg.contains("<rect x=\"74.0\" y=\"54.0\" width=\"428.0\" height=\"18.0\" fill=\"#eeb38c\"/>"),
            "{svg}"
        );
        assert!(
            svg.contains("<rect x=\"502.0\" y=\"54.0\" width=\"428.0\" height=\"18.0\" fill=\"#8cbfe0\"/>"),
            "{svg}"
        );
        assert!(
            svg.contains("<rect x=\"181.0\" y=\"84.0\" width=\"535.0\" height=\"206.0\" fill=\"#d9d9d9\"/>"),
            "{svg}"
        );
        assert!(svg.contains("points=\"74.0,84.0 288.0,"), "{svg}");
    }

    #[test]
    fn an_empty_timeline_is_drawn_too() {
        assert!(Timeline::default().to_svg().ends_with("</svg>\n"));
    }

    #[test]
    fn ticks_are_round_and_few() {
        let values = |most| ticks(most).into_iter().map(|(value, _)| value).collect::<Vec<_>>();
        assert_eq!(values(40.0), [0.0, 10.0, 20.0, 30.0, 40.0]);
        assert_eq!(values(7300.0), [0.0, 2000.0, 4000.0, 6000.0]);
    }
}
