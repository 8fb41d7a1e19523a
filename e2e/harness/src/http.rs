//! Enough of HTTP to read a page or the metrics of a process under test.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::HarnessError;

const PATIENCE: Duration = Duration::from_secs(3);
/// The most bytes that are read of a page.
const LIMIT: u64 = 4 << 20;

/// The body of the page at `path`.
///
/// # Errors
/// [`HarnessError::Io`] if the process does not answer in time.
pub fn get(address: SocketAddr, path: &str) -> Result<String, HarnessError> {
    request(address, path).map_err(HarnessError::io("read", format!("http://{address}{path}")))
}

fn request(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let mut text = String::new();
    stream.take(LIMIT).read_to_string(&mut text)?;
    Ok(text.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
}

/// A loopback address with a free port. Another program is unlikely to take the port within a
/// second.
///
/// # Errors
/// No port is free.
pub fn free_address() -> Result<SocketAddr, HarnessError> {
    let address = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    address.map_err(HarnessError::io("find", "a free port"))
}

/// The sum of a metric over its labels, in the text that Prometheus scrapes; `None` without a
/// sample.
#[must_use]
pub fn sum_of(text: &str, name: &str) -> Option<f64> {
    sum_with(text, name, &[])
}

/// As [`sum_of`], over the samples that have all of these labels, such as `kind="lookup"`.
#[must_use]
pub fn sum_with(text: &str, name: &str, labels: &[&str]) -> Option<f64> {
    let values = text.lines().filter_map(|line| {
        let (series, value) = line.trim_end().rsplit_once(' ')?;
        let (found, own) = series.split_once('{').unwrap_or((series, ""));
        let matches = found == name && labels.iter().all(|label| own.contains(label));
        if matches { value.parse::<f64>().ok() } else { None }
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

    #[test]
    fn labels_choose_the_samples_of_a_sum() {
        let text = "a{kind=\"x\",way=\"in\"} 5\na{kind=\"x\",way=\"out\"} 7\na{kind=\"y\",way=\"out\"} 9\n";
        assert_eq!(sum_with(text, "a", &["kind=\"x\""]), Some(12.0));
        assert_eq!(sum_with(text, "a", &["kind=\"x\"", "way=\"out\""]), Some(7.0));
        assert_eq!(sum_with(text, "a", &["kind=\"z\""]), None);
    }
}
