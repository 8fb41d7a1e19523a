//! Texts that have to fit into a bounded field of a Kubernetes object.

/// Cuts `text` to about `bytes` bytes, at a character boundary, and marks the cut with `…`.
pub(crate) fn shorten(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    let end = (0..=bytes).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    format!("{} …", &text[..end])
}
