//! A connection to a broker. It carries one request at a time. After an error it is not used again.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use rectrain_kinds::SaslMechanism;
use ring::rand::{SecureRandom, SystemRandom};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::api::{self, Api};
use crate::codec::{Malformed, Reader, Writer};
use crate::error::{ErrorCode, KafkaError};
use crate::scram::{Hash, Scram};
use crate::security::{Credentials, Security};

const CLIENT_ID: &str = "rectrain";
/// The longest time for a connection with its handshakes.
const CONNECT: Duration = Duration::from_secs(10);
/// The longest time for an answer, beyond the time that the request lets the broker wait.
const ANSWER: Duration = Duration::from_secs(30);
/// The largest answer. A broker sends at least one batch of records, whatever its size.
const MOST_BYTES: usize = 512 << 20;

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// See the module's documentation.
pub(crate) struct Connection {
    broker: String,
    stream: Box<dyn Stream>,
    correlation: i32,
}

impl Connection {
    /// Connects to the broker at `HOST:PORT`, and authenticates.
    pub(crate) async fn open(broker: &str, security: &Security) -> Result<Self, KafkaError> {
        let opening = async {
            let stream = stream(broker, security).await?;
            let mut connection = Self { broker: broker.to_owned(), stream, correlation: 0 };
            if let Some(credentials) = &security.sasl {
                connection.authenticate(credentials).await?;
            }
            Ok(connection)
        };
        let opened = tokio::time::timeout(CONNECT, opening).await;
        opened.unwrap_or_else(|_| Err(unreachable(broker, &format!("no answer within {} s", CONNECT.as_secs()))))
    }

    /// Sends a request. Returns the body of the answer. The broker may wait for `wait` before it
    /// answers.
    pub(crate) async fn call(&mut self, api: Api, body: &[u8], wait: Duration) -> Result<Reader, KafkaError> {
        let limit = ANSWER + wait;
        match tokio::time::timeout(limit, self.exchange(api, body)).await {
            Ok(answer) => answer,
            Err(_) => {
                Err(unreachable(&self.broker, &format!("no answer to {} within {} s", api.name, limit.as_secs())))
            }
        }
    }

    async fn exchange(&mut self, api: Api, body: &[u8]) -> Result<Reader, KafkaError> {
        self.correlation = self.correlation.wrapping_add(1);
        let request = frame(api, self.correlation, body);
        self.stream.write_all(&request).await.map_err(|error| unreachable(&self.broker, &error.to_string()))?;
        self.stream.flush().await.map_err(|error| unreachable(&self.broker, &error.to_string()))?;
        let mut answer = Reader::new(self.receive(api).await?);
        match header(api, &mut answer) {
            Ok(correlation) if correlation == self.correlation => Ok(answer),
            Ok(_) => Err(self.malformed(api, Malformed("it answers another request"))),
            Err(problem) => Err(self.malformed(api, problem)),
        }
    }

    async fn receive(&mut self, api: Api) -> Result<Bytes, KafkaError> {
        let failed = |error: std::io::Error| unreachable(&self.broker, &error.to_string());
        let length = self.stream.read_i32().await.map_err(failed)?;
        let length = usize::try_from(length).ok().filter(|length| *length <= MOST_BYTES);
        let Some(length) = length else { return Err(self.malformed(api, Malformed("its length is out of range"))) };
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).await.map_err(|error| unreachable(&self.broker, &error.to_string()))?;
        Ok(bytes.into())
    }

    pub(crate) fn malformed(&self, api: Api, Malformed(problem): Malformed) -> KafkaError {
        let subject = format!("{} to the broker {}", api.name, self.broker);
        KafkaError::Malformed { subject, problem: problem.to_owned() }
    }

    async fn authenticate(&mut self, credentials: &Credentials) -> Result<(), KafkaError> {
        self.handshake(credentials.mechanism).await?;
        let hash = match credentials.mechanism {
            SaslMechanism::Plain => {
                let Credentials { username, password, .. } = credentials;
                return self.send_token(format!("\0{username}\0{password}").as_bytes()).await.map(drop);
            }
            SaslMechanism::ScramSha256 => Hash::Sha256,
            SaslMechanism::ScramSha512 => Hash::Sha512,
        };
        let scram = Scram::new(hash, &credentials.username, nonce()?);
        let challenge = self.send_token(scram.first_message().as_bytes()).await?;
        let proof = scram.prove(&credentials.password, &String::from_utf8_lossy(&challenge));
        let proof = proof.map_err(|problem| self.refused(problem))?;
        let answer = self.send_token(proof.message.as_bytes()).await?;
        if answer != proof.expected.as_bytes() {
            return Err(self.refused("the broker does not know the password".to_owned()));
        }
        Ok(())
    }

    async fn handshake(&mut self, mechanism: SaslMechanism) -> Result<(), KafkaError> {
        let name = mechanism.wire_name();
        let body = api::handshake_request(name);
        let mut answer = self.exchange(api::SASL_HANDSHAKE, &body).await?;
        let read = api::handshake_answer(&mut answer);
        let (error, known) = read.map_err(|problem| self.malformed(api::SASL_HANDSHAKE, problem))?;
        match error {
            ErrorCode::NONE => Ok(()),
            ErrorCode::UNSUPPORTED_SASL_MECHANISM => {
                Err(self.refused(format!("it does not know {name}, only {}", known.join(", "))))
            }
            error => Err(self.refused(format!("it answered {error}"))),
        }
    }

    async fn send_token(&mut self, token: &[u8]) -> Result<Bytes, KafkaError> {
        let mut answer = self.exchange(api::SASL_AUTHENTICATE, &api::authenticate_request(token)).await?;
        let read = api::authenticate_answer(&mut answer);
        let (error, message, token) = read.map_err(|problem| self.malformed(api::SASL_AUTHENTICATE, problem))?;
        match error {
            ErrorCode::NONE => Ok(token),
            error => Err(self.refused(message.unwrap_or_else(|| format!("it answered {error}")))),
        }
    }

    fn refused(&self, problem: String) -> KafkaError {
        KafkaError::Refused { broker: self.broker.clone(), problem }
    }
}

async fn stream(broker: &str, security: &Security) -> Result<Box<dyn Stream>, KafkaError> {
    let tcp = TcpStream::connect(broker).await.map_err(|error| unreachable(broker, &error.to_string()))?;
    // A request that is delayed is only slower.
    let _delayed = tcp.set_nodelay(true);
    let Some(tls) = &security.tls else { return Ok(Box::new(tcp)) };
    let host = broker.rsplit_once(':').map_or(broker, |(host, _)| host).trim_matches(['[', ']']);
    let name = ServerName::try_from(host.to_owned())
        .map_err(|_| KafkaError::Security { problem: format!("`{host}` cannot be the name in a certificate") })?;
    let connected = TlsConnector::from(tls.clone()).connect(name, tcp).await;
    Ok(Box::new(connected.map_err(|error| unreachable(broker, &format!("TLS: {error}")))?))
}

pub(crate) fn unreachable(broker: &str, problem: &str) -> KafkaError {
    KafkaError::Unreachable { broker: broker.to_owned(), problem: problem.to_owned() }
}

fn nonce() -> Result<String, KafkaError> {
    let mut bytes = [0; 18];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| KafkaError::Security { problem: "the system has no random numbers".to_owned() })?;
    Ok(STANDARD.encode(bytes))
}

/// A request with its length and its header.
fn frame(api: Api, correlation: i32, body: &[u8]) -> Bytes {
    let mut header = Writer::default();
    header.i16(api.key).i16(api.version).i32(correlation).string(CLIENT_ID);
    if api.is_flexible {
        header.no_tags();
    }
    let header = header.into_bytes();
    let mut frame = Writer::default();
    frame.i32((header.len() + body.len()) as i32).raw(&header).raw(body);
    frame.into_bytes()
}

/// The correlation number in the header of an answer.
fn header(api: Api, answer: &mut Reader) -> Result<i32, Malformed> {
    let correlation = answer.i32()?;
    if api.is_flexible {
        answer.skip_tags()?;
    }
    Ok(correlation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_header_of_its_version() {
        let plain = frame(api::FETCH, 7, b"xy");
        assert_eq!(&plain[..14], [0, 0, 0, 20, 0, 1, 0, 10, 0, 0, 0, 7, 0, 8]);
        assert_eq!(&plain[14..], b"rectrainxy");
        let flexible = frame(api::METADATA, 7, b"xy");
        assert_eq!((flexible[3], &flexible[22..]), (21, &b"\0xy"[..]));
    }
}
