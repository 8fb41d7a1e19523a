//! As much of HTTP as it takes to read a page or metrics of a process that is under test.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(3);
/// Bytes that are read at most.
const MOST: u64 = 4 << 20;

/// What is served there.
pub(crate) fn get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let mut text = String::new();
    stream.take(MOST).read_to_string(&mut text)?;
    Ok(text.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
}

/// The sum of a metric over its labels.
pub(crate) fn sum_of(text: &str, name: &str) -> Option<f64> {
    let values = text.lines().filter_map(|line| {
        let (series, value) = line.trim_end().rsplit_once(' ')?;
        let is_it = series.split('{').next() == Some(name);
        if is_it { value.parse::<f64>().ok() } else { None }
    });
    values.reduce(|sum, value| sum + value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_summed_over_its_labels() {
        let text = "# TYPE a_total counter\r\na_total{replica=\"0\"} 5\na_total{replica=\"1\"} 7\na_total_b 9\n";
        assert_eq!(sum_of(text, "a_total"), Some(12.0));
        assert_eq!(sum_of(text, "b"), None);
    }
}
