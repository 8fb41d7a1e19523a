//! Scrapes the `/metrics` of a job's processes and compares each scrape with the previous one.
//! Counters of a restarted process yield nothing until they are scraped twice.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Deadline of a scrape.
const DEADLINE: Duration = Duration::from_secs(2);
/// Bytes of an answer to read at most. Processes answer with some tens of thousands.
const MOST_BYTES: u64 = 4 << 20;

/// A source of the metrics of processes.
pub trait ScrapeMetrics: Send + Sync {
    /// The metrics of the process at `address`, in Prometheus' text format. `None` if it does not
    /// answer.
    fn scrape(&self, address: SocketAddr) -> BoxFuture<'_, Option<String>>;
}

/// Scrapes over HTTP.
#[derive(Clone, Copy, Debug, Default)]
pub struct HttpScraper;

impl ScrapeMetrics for HttpScraper {
    fn scrape(&self, address: SocketAddr) -> BoxFuture<'_, Option<String>> {
        Box::pin(async move {
            match tokio::time::timeout(DEADLINE, get(address)).await {
                Ok(Ok(text)) => text,
                Ok(Err(error)) => {
                    tracing::debug!(%address, %error, "a scrape failed");
                    None
                }
                Err(_) => None,
            }
        })
    }
}

/// HTTP/1.0: the answer ends with the connection and is never chunked.
async fn get(address: SocketAddr) -> std::io::Result<Option<String>> {
    let mut stream = TcpStream::connect(address).await?;
    stream
        .write_all(format!("GET /metrics HTTP/1.0\r\nHost: {address}\r\nAccept: text/plain\r\n\r\n").as_bytes())
        .await?;
    let mut answer = String::new();
    stream.take(MOST_BYTES).read_to_string(&mut answer).await?;
    // The last number of a truncated answer would be wrong.
    let is_whole = (answer.len() as u64) < MOST_BYTES;
    Ok(body(&answer).filter(|_| is_whole).map(str::to_owned))
}

fn body(answer: &str) -> Option<&str> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let is_ok = head.split_whitespace().nth(1) == Some("200");
    is_ok.then_some(body)
}

/// Sums over all labels, by name.
type Samples = HashMap<String, f64>;

/// The previous scrape of a process.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    last: Option<(u64, Samples)>,
}

/// The change of a process's metrics between two scrapes.
#[derive(Clone, Debug)]
pub struct MetricsDelta {
    /// Time between the scrapes in seconds; above 0.
    pub seconds: f64,
    before: Samples,
    after: Samples,
}

impl Meter {
    /// Adds a scrape. Returns the change since the previous one.
    pub fn add(&mut self, at_seconds: u64, text: &str) -> Option<MetricsDelta> {
        let after = samples(text);
        let (then, before) = self.last.replace((at_seconds, after.clone()))?;
        let seconds = at_seconds.checked_sub(then).filter(|seconds| *seconds > 0)? as f64;
        Some(MetricsDelta { seconds, before, after })
    }
}

impl MetricsDelta {
    /// The increase of a counter. `None` if it is missing or was reset.
    #[must_use]
    pub fn difference(&self, name: &str) -> Option<f64> {
        let difference = self.after.get(name)? - self.before.get(name)?;
        (difference >= 0.0).then_some(difference)
    }

    /// The present value of a gauge; 0 if it is missing.
    #[must_use]
    pub fn value(&self, name: &str) -> f64 {
        self.after.get(name).copied().unwrap_or(0.0)
    }

    /// The increase of a histogram's sum.
    #[must_use]
    pub fn sum(&self, histogram: &str) -> Option<f64> {
        self.difference(&format!("{histogram}_sum"))
    }

    /// The increase of a histogram's number of values.
    #[must_use]
    pub fn count(&self, histogram: &str) -> Option<f64> {
        self.difference(&format!("{histogram}_count"))
    }

    /// The increase of several counters together, per second.
    #[must_use]
    pub fn rate_of(&self, counters: &[&str]) -> Option<f64> {
        self.rate(counters.iter().map(|name| self.difference(name)))
    }

    /// The share of the time that several histograms of seconds measured together.
    #[must_use]
    pub fn busy_share(&self, histograms: &[&str]) -> Option<f64> {
        self.rate(histograms.iter().map(|name| self.sum(name)))
    }

    fn rate(&self, differences: impl Iterator<Item = Option<f64>>) -> Option<f64> {
        differences.sum::<Option<f64>>().map(|sum| sum / self.seconds)
    }
}

fn samples(text: &str) -> Samples {
    let mut all = Samples::new();
    for line in text.lines().filter(|line| line.starts_with("rectrain_")) {
        let Some((series, value)) = line.rsplit_once(' ') else { continue };
        let name = series.split_once('{').map_or(series, |(name, _)| name);
        let Some(value) = value.parse::<f64>().ok().filter(|value| value.is_finite()) else { continue };
        // The many buckets of histograms are not needed.
        if !name.ends_with("_bucket") {
            *all.entry(name.trim_end().to_owned()).or_default() += value;
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP rectrain_ps_bytes Bytes.\nrectrain_ps_bytes{replica=\"0\"} 5\nrectrain_ps_bytes{replica=\"1\"} 6\n\
        rectrain_x_seconds_bucket{le=\"1\"} 3\nrectrain_x_seconds_sum 1.5\nother 7\nrectrain_broken x\n";

    #[test]
    fn counters_are_compared_and_labels_summed() {
        let mut meter = Meter::default();
        assert!(meter.add(10, TEXT).is_none());
        let change = meter.add(14, &TEXT.replace("1.5", "3.5")).expect("a change");
        assert_eq!((change.value("rectrain_ps_bytes"), change.difference("rectrain_x_seconds_sum")), (11.0, Some(2.0)));
        assert_eq!((change.seconds, change.busy_share(&["rectrain_x_seconds"])), (4.0, Some(0.5)));
        assert_eq!((change.difference("rectrain_broken"), change.difference("other")), (None, None));
        let again = meter.add(18, &TEXT.replace("1.5", "0.5")).expect("a change");
        assert_eq!(again.difference("rectrain_x_seconds_sum"), None, "its process restarted");
        assert!(meter.add(18, TEXT).is_none(), "no time has passed");
    }

    #[test]
    fn only_a_successful_answer_is_read() {
        assert_eq!(body("HTTP/1.0 200 OK\r\nA: b\r\n\r\nx 1\n"), Some("x 1\n"));
        assert_eq!(body("HTTP/1.0 404 Not Found\r\n\r\nx 1\n"), None);
        assert_eq!(body("nonsense"), None);
    }

    #[tokio::test]
    async fn metrics_are_scraped_over_http() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let router = axum::Router::new().route("/metrics", axum::routing::get(|| async { TEXT }));
        let server = tokio::spawn(async move { axum::serve(listener, router).await });
        assert_eq!(HttpScraper.scrape(address).await.as_deref(), Some(TEXT));
        server.abort();
        let closed: SocketAddr = "127.0.0.1:1".parse().expect("an address");
        assert_eq!(HttpScraper.scrape(closed).await, None);
    }
}
