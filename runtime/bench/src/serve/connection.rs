//! Enough of HTTP/1.1 for a client that sends prepared requests on one connection.

use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::Duration;

/// The longest wait for a response. The server's own time limit is below it.
const PATIENCE: Duration = Duration::from_secs(30);
/// The most bytes of a response's body.
const MOST_BYTES: usize = 64 << 20;
/// The most bytes of a line of a response's head.
const MOST_LINE: u64 = 16 << 10;

/// A connection to a server, which it keeps open between requests.
pub(super) struct Connection {
    stream: BufReader<TcpStream>,
    line: String,
    body: Vec<u8>,
}

impl Connection {
    pub(super) fn open(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { stream: BufReader::new(stream), line: String::new(), body: Vec::new() })
    }

    /// Sends a request, and reads its response. Returns the status.
    pub(super) fn exchange(&mut self, request: &[u8]) -> Result<u16> {
        self.stream.get_mut().write_all(request)?;
        self.read_line()?;
        let status = self.line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.ok_or_else(|| malformed("no status"))?;
        let length = self.read_head()?;
        self.body.resize(length, 0);
        self.stream.read_exact(&mut self.body)?;
        Ok(status)
    }

    /// The body of the last response.
    pub(super) fn body(&self) -> &[u8] {
        &self.body
    }

    /// Reads the head after its first line. Returns the length of the body.
    fn read_head(&mut self) -> Result<usize> {
        let mut length = None;
        loop {
            self.read_line()?;
            if self.line.is_empty() {
                return length.filter(|length| *length <= MOST_BYTES).ok_or_else(|| malformed("no length"));
            }
            if let Some((name, value)) = self.line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().ok();
            }
        }
    }

    /// Reads a line of the head, without its end.
    fn read_line(&mut self) -> Result<()> {
        self.line.clear();
        let read = self.stream.by_ref().take(MOST_LINE).read_line(&mut self.line)?;
        if read == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.line.truncate(self.line.trim_end().len());
        Ok(())
    }
}

fn malformed(problem: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("the response has {problem}"))
}

/// The bytes of a request with a body of JSON.
pub(super) fn post(address: &str, path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    );
    (head + body).into_bytes()
}

/// The bytes of a request without a body.
pub(super) fn get(address: &str, path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").into_bytes()
}
