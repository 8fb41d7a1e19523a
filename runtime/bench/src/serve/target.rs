//! The server under load: a `rectrain serve` that the benchmark starts, or one that runs already.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::connection::{Connection, get};
use crate::error::BenchError;
use crate::job::rectrain;

/// A model that a server answers for.
pub(super) struct Target {
    pub(super) address: String,
    /// The path of the model, such as `/v2/models/clicks`.
    pub(super) path: String,
    /// Ends with this value.
    _server: Option<Server>,
}

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _killed = self.0.kill();
        let _waited = self.0.wait();
    }
}

impl Target {
    /// Connects to the server of a URL, or starts a server for any other model.
    pub(super) fn open(model: &str, arguments: &[String]) -> Result<Self, BenchError> {
        if model.starts_with("http://") {
            return Self::at(model, None);
        }
        let program = rectrain()?;
        let started = Command::new(&program)
            .args(["serve", model, "--listen", "127.0.0.1:0"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        let mut server = Server(
            started.map_err(|source| BenchError::NoRectrain { program: program.display().to_string(), source })?,
        );
        let mut line = String::new();
        if let Some(output) = server.0.stdout.take() {
            BufReader::new(output).read_line(&mut line)?;
        }
        Self::at(line.trim(), Some(server))
    }

    /// The target of a line that ends with a URL.
    fn at(line: &str, server: Option<Server>) -> Result<Self, BenchError> {
        let url = line.split_once("http://").and_then(|(_, url)| url.split_once('/'));
        let (address, path) = url.ok_or_else(|| {
            BenchError::Ended(format!("expected the URL of a model, as `rectrain serve` prints it; found {line:?}"))
        })?;
        let path = format!("/{}", path.trim_end_matches('/'));
        Ok(Self { address: address.to_owned(), path, _server: server })
    }

    /// The metadata of the model.
    pub(super) fn metadata(&self) -> Result<Value, BenchError> {
        let mut connection = Connection::open(&self.address)?;
        let status = connection.exchange(&get(&self.address, &self.path))?;
        let body = connection.body();
        if status != 200 {
            let body = String::from_utf8_lossy(body);
            return Err(BenchError::Ended(format!("{} answers with status {status}: {body}", self.path)));
        }
        Ok(serde_json::from_slice(body)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_the_url_at_the_end_of_a_line() {
        for line in
            ["http://127.0.0.1:80/v2/models/a", "a: step 3, 7 rows, gRPC at 1:2, at http://127.0.0.1:80/v2/models/a"]
        {
            let target = Target::at(line, None).unwrap();
            assert_eq!((target.address.as_str(), target.path.as_str()), ("127.0.0.1:80", "/v2/models/a"));
        }
        let error = Target::at("", None).err().unwrap().to_string();
        assert!(error.contains("found \"\""), "{error}");
    }
}
