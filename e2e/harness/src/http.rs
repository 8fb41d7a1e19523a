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

/// A response, whatever its status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// The body.
    pub body: String,
}

/// The response to a body of JSON that is sent to `path`.
///
/// # Errors
/// [`HarnessError::Io`] if the process does not answer in time, or not as HTTP.
pub fn post(address: SocketAddr, path: &str, body: &str) -> Result<Response, HarnessError> {
    let failed = || HarnessError::io("send a request to", format!("http://{address}{path}"));
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: \
         {length}\r\n\r\n{body}"
    );
    let text = exchange(address, &request).map_err(failed())?;
    let malformed = || failed()(std::io::Error::new(std::io::ErrorKind::InvalidData, format!("no response: {text:?}")));
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(malformed)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(malformed)?;
    Ok(Response { status, body: body.to_owned() })
}

fn request(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let text = exchange(address, &format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n"))?;
    Ok(text.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
}

/// Sends a request, and reads the response to its end.
fn exchange(address: SocketAddr, request: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(request.as_bytes())?;
    let mut text = String::new();
    stream.take(LIMIT).read_to_string(&mut text)?;
    Ok(text)
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

    /// A server of one response. Returns its address.
    fn answering(response: &'static str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut bytes = [0; 1024];
            let read = stream.read(&mut bytes).unwrap();
            assert!(read > 0);
            stream.write_all(response.as_bytes()).unwrap();
        });
        address
    }

    #[test]
    fn a_response_has_its_status_and_body() {
        let address = answering("HTTP/1.0 429 Too Many Requests\r\nretry-after: 1\r\n\r\n{}");
        let response = post(address, "/infer", "{}").unwrap();
        assert_eq!(response, Response { status: 429, body: "{}".to_owned() });
        assert!(post(answering("SSH-2.0"), "/infer", "{}").unwrap_err().to_string().contains("no response"));
    }

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
