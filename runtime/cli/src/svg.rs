//! The elements of drawings as SVG. Lengths are in the drawing's own units. Pure.

/// A filled rectangle.
pub(crate) fn rectangle(x: f64, y: f64, width: f64, height: f64, fill: &str, opacity: f64) -> String {
    format!(
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\" fill-opacity=\"{opacity}\"/>\n"
    )
}

/// A line.
pub(crate) fn line(x1: f64, y1: f64, x2: f64, y2: f64, stroke: &str) -> String {
    format!("<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{stroke}\"/>\n")
}

/// A text element. `content` is [escaped](escape), if it may have characters with a meaning in XML.
pub(crate) fn text(x: f64, y: f64, anchor: &str, content: &str) -> String {
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>\n")
}

/// A text for XML and HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
