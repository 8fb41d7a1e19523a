//! Loads of a server: a closed one, which finds the rate that saturates it, and an open one.
//!
//! Requests of an open load arrive at times that do not depend on answers. A latency counts from
//! the arrival: if all connections are busy, the time until one is free counts too. So a server
//! that stalls does not hide the requests that would have come meanwhile (coordinated omission).

use std::io::Result;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::latencies::Latencies;
use crate::store::join;
use crate::zipf::Random;

/// The time until the first arrival, in which all connections are opened.
const LEAD: Duration = Duration::from_millis(100);
/// The status of a request that the server had no room for.
const SHED: u16 = 429;

/// The requests of a load, each as the bytes to send. They are sent in turns.
pub(super) struct Requests<'r> {
    pub(super) address: &'r str,
    pub(super) bytes: &'r [Vec<u8>],
    pub(super) connections: usize,
}

/// The outcomes of a load.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcomes {
    /// Of the requests with an answer.
    pub(super) latencies: Latencies,
    /// Requests that the server had no room for.
    pub(super) shed: u64,
    /// All other requests without an answer.
    pub(super) failed: u64,
    /// From the start of the load to its last outcome.
    pub(super) elapsed: Duration,
}

impl Outcomes {
    fn push(&mut self, status: Result<u16>, latency: Duration) {
        match status {
            Ok(200) => self.latencies.push(latency),
            Ok(SHED) => self.shed += 1,
            _ => self.failed += 1,
        }
    }

    fn merge(mut self, other: Self) -> Self {
        self.latencies.merge(&other.latencies);
        self.shed += other.shed;
        self.failed += other.failed;
        self.elapsed = self.elapsed.max(other.elapsed);
        self
    }

    /// Answers a second.
    pub(super) fn rate(&self) -> f64 {
        self.latencies.count() as f64 / self.elapsed.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// The times of the arrivals of a Poisson process from its start, rising.
pub(super) fn poisson(rate: f64, seconds: f64, random: &mut Random) -> Vec<Duration> {
    let mut now = 0.0;
    let arrivals = std::iter::from_fn(|| {
        now -= (1.0 - random.unit()).ln() / rate;
        (now < seconds).then(|| Duration::from_secs_f64(now))
    });
    arrivals.collect()
}

/// Sends each request at its arrival.
pub(super) fn open(requests: &Requests<'_>, arrivals: &[Duration]) -> Result<Outcomes> {
    let (next, start) = (AtomicUsize::new(0), Instant::now() + LEAD);
    run(requests, |mut client| {
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(arrival) = arrivals.get(place) else { return Ok(client.outcomes) };
            let arrival = start + *arrival;
            std::thread::sleep(arrival.saturating_duration_since(Instant::now()));
            client.send(place, arrival, start)?;
        }
    })
}

/// Sends a request on each connection as soon as the one before it has an answer, for a time.
pub(super) fn closed(requests: &Requests<'_>, time: Duration) -> Result<Outcomes> {
    let (next, start) = (AtomicUsize::new(0), Instant::now());
    run(requests, |mut client| {
        while start.elapsed() < time {
            client.send(next.fetch_add(1, Ordering::Relaxed), Instant::now(), start)?;
        }
        Ok(client.outcomes)
    })
}

/// A connection, and the outcomes of its requests.
struct Client<'r> {
    requests: &'r Requests<'r>,
    connection: Connection,
    outcomes: Outcomes,
}

impl Client<'_> {
    /// Sends the request of a place. A connection that has failed is replaced.
    fn send(&mut self, place: usize, arrival: Instant, start: Instant) -> Result<()> {
        let Requests { address, bytes, .. } = self.requests;
        let status = self.connection.exchange(&bytes[place % bytes.len()]);
        if status.is_err() {
            self.connection = Connection::open(address)?;
        }
        self.outcomes.push(status, arrival.elapsed());
        self.outcomes.elapsed = start.elapsed();
        Ok(())
    }
}

/// Runs clients on all connections, and merges their outcomes.
fn run<'r>(requests: &'r Requests<'r>, client: impl Fn(Client<'r>) -> Result<Outcomes> + Sync) -> Result<Outcomes> {
    let client = &client;
    std::thread::scope(|scope| {
        let start = |_| {
            scope.spawn(move || {
                let connection = Connection::open(requests.address)?;
                client(Client { requests, connection, outcomes: Outcomes::default() })
            })
        };
        let running: Vec<_> = (0..requests.connections).map(start).collect();
        running.into_iter().map(join).try_fold(Outcomes::default(), |all, one| Ok::<_, std::io::Error>(all.merge(one?)))
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;
    use crate::serve::connection::get;

    /// A server of one connection. It answers with the status that `status` gives to the number of
    /// a request.
    fn server(status: impl Fn(usize) -> u16 + Send + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut bytes = [0; 1024];
            for request in 0.. {
                if stream.read(&mut bytes).is_ok_and(|read| read == 0) {
                    return;
                }
                let response = format!("HTTP/1.1 {} x\r\ncontent-length: 2\r\n\r\n{{}}", status(request));
                if stream.write_all(response.as_bytes()).is_err() {
                    return;
                }
            }
        });
        address
    }

    #[test]
    fn arrivals_have_their_rate_and_the_gaps_of_a_poisson_process() {
        let arrivals = poisson(1_000.0, 20.0, &mut Random::new(3));
        assert!((arrivals.len() as f64 - 20_000.0).abs() < 5.0 * 20_000_f64.sqrt(), "{}", arrivals.len());
        assert!(arrivals.is_sorted());
        // A gap exceeds its mean with probability 1/e.
        let long = arrivals.windows(2).filter(|pair| pair[1] - pair[0] > Duration::from_millis(1)).count();
        let share = long as f64 / arrivals.len() as f64;
        assert!((share - (-1.0_f64).exp()).abs() < 0.02, "{share}");
    }

    #[test]
    fn requests_that_arrive_while_the_server_stalls_count_from_their_arrival() {
        let stall = Duration::from_millis(300);
        let address = server(move |request| {
            if request == 0 {
                std::thread::sleep(stall);
            }
            200
        });
        let bytes = [get(&address, "/")];
        let requests = Requests { address: &address, bytes: &bytes, connections: 1 };
        // One arrives each 10 ms. The first 22 wait for at least 90 ms.
        let arrivals: Vec<Duration> = (0..30).map(|place| Duration::from_millis(10 * place)).collect();
        let outcomes = open(&requests, &arrivals).unwrap();
        assert_eq!((outcomes.latencies.count(), outcomes.shed, outcomes.failed), (30, 0, 0));
        let longer = outcomes.latencies.quantile(11.0 / 30.0).unwrap();
        assert!(longer >= 90.0, "{longer} ms");
    }

    #[test]
    fn refused_and_failed_requests_have_no_latency() {
        let address = server(|request| [200, 429, 500, 200][request % 4]);
        let bytes = [get(&address, "/")];
        let requests = Requests { address: &address, bytes: &bytes, connections: 1 };
        let outcomes = open(&requests, &[Duration::ZERO; 8]).unwrap();
        assert_eq!((outcomes.latencies.count(), outcomes.shed, outcomes.failed), (4, 2, 2));
        assert!(outcomes.rate() > 0.0);
    }
}
