//! A paced link: a tool for tests that gives the processes of one machine the network of many. It
//! limits the rate of a process's connections, and delays their bytes. Without a [`PacedLink`] in
//! the [`TcpConfig`](super::TcpConfig), connections have the bare sockets and nothing here runs.
//!
//! A process has one line for each direction, as a network card has. All its connections share
//! them. A line carries bytes in the order in which its connections reserve it:
//!
//! - A sender reserves the line for its next bytes, waits for their turn, and writes them.
//! - A receiver reserves the line for bytes that have arrived. It hands them on when the line has
//!   carried them, and the delay has passed.
//!
//! So n bytes take n / rate + delay, and a round trip of small messages takes twice the delay. The
//! receiver stores the bytes in flight. A sender therefore never waits for the delay.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io::{self, IoSlice};
use std::num::NonZeroU64;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// The time for which a connection reserves a line at most. Another connection waits so long for
/// its turn.
const TURN: Duration = Duration::from_micros(500);
/// The fewest bytes of a turn: a packet of Ethernet.
const LEAST_TURN_BYTES: usize = 1500;
/// The longest time by which a reader may wake late without slowing its line. A reader that comes
/// later did not want the bytes.
const LATE: Duration = Duration::from_millis(50);
/// The most bytes of one read.
const READ_BYTES: usize = 64 << 10;

/// The network card of a process. Connections share the card if their configurations have clones of
/// one link.
#[derive(Clone)]
pub struct PacedLink(Arc<Card>);

struct Card {
    rate: NonZeroU64,
    delay: Duration,
    out: Line,
    into: Line,
    alarm: Alarm,
}

impl PacedLink {
    /// A card that carries `rate` bytes per second in each direction. Received bytes arrive `delay`
    /// later. Starts a thread that keeps the time.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn new(rate: NonZeroU64, delay: Duration) -> io::Result<Self> {
        let [out, into] = [Line::new(rate), Line::new(rate)];
        Ok(Self(Arc::new(Card { rate, delay, out, into, alarm: Alarm::start()? })))
    }

    pub(super) fn source(&self, half: OwnedReadHalf) -> PacedSource {
        PacedSource {
            half,
            card: Arc::clone(&self.0),
            bytes: VecDeque::new(),
            parts: VecDeque::new(),
            end: End::Open,
            read: vec![0; READ_BYTES].into(),
            is_full: false,
            wait: Wait::default(),
        }
    }

    pub(super) fn sink(&self, half: OwnedWriteHalf) -> PacedSink {
        let now = Instant::now();
        let turn = Turn { start: now, end: now };
        PacedSink { half, card: Arc::clone(&self.0), turn, reserved: 0, is_behind: false, wait: Wait::default() }
    }
}

impl fmt::Debug for PacedLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PacedLink({} bytes/s, {:?})", self.0.rate, self.0.delay)
    }
}

impl Card {
    /// The most bytes of a turn.
    fn turn_bytes(&self) -> usize {
        self.bytes_in(TURN).max(LEAST_TURN_BYTES)
    }

    /// The most bytes that a connection stores: those that are in flight during the delay, and two
    /// turns and reads for its own use. The card carries no more, so this bound limits no rate.
    fn stored_bytes(&self) -> usize {
        self.bytes_in(self.delay) + 2 * (self.turn_bytes() + READ_BYTES)
    }

    fn bytes_in(&self, time: Duration) -> usize {
        (self.rate.get() as f64 * time.as_secs_f64()) as usize
    }
}

/// One direction of a card.
struct Line {
    rate: f64,
    /// The end of the last turn.
    free: Mutex<Instant>,
}

/// The time in which a line carries the bytes of one reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    start: Instant,
    end: Instant,
}

impl Line {
    fn new(rate: NonZeroU64) -> Self {
        Self { rate: rate.get() as f64, free: Mutex::new(Instant::now()) }
    }

    /// Reserves the line for bytes that have been ready since `ready`.
    fn reserve(&self, bytes: usize, ready: Instant) -> Turn {
        let mut free = self.free.lock();
        let start = ready.max(*free);
        *free = start + Duration::from_secs_f64(bytes as f64 / self.rate);
        Turn { start, end: *free }
    }
}

/// The writing half of a connection.
pub(super) struct PacedSink {
    half: OwnedWriteHalf,
    card: Arc<Card>,
    /// The last reservation, and its bytes that are not written yet.
    turn: Turn,
    reserved: usize,
    /// Whether more bytes were ready at the last write.
    is_behind: bool,
    wait: Wait,
}

impl PacedSink {
    /// For flushing and closing, which need no turn.
    pub(super) fn half(&mut self) -> Pin<&mut OwnedWriteHalf> {
        Pin::new(&mut self.half)
    }

    pub(super) fn poll_write(&mut self, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let offered: usize = slices.iter().map(|slice| slice.len()).sum();
        if offered == 0 {
            return Poll::Ready(Ok(0));
        }
        if self.reserved == 0 {
            // Bytes that waited for the last turn were ready at its end. So a thread that woke late
            // does not slow the line.
            let ready = if self.is_behind { self.turn.end } else { Instant::now() };
            self.reserved = offered.min(self.card.turn_bytes());
            self.turn = self.card.out.reserve(self.reserved, ready);
        }
        ready!(self.wait.poll(self.turn.start, &self.card.alarm, context));
        let written = poll_write_at_most(&mut self.half, self.reserved, slices, context);
        self.is_behind = match &written {
            Poll::Ready(Ok(written)) => {
                self.reserved -= written;
                *written < offered
            }
            // The receiver has no room.
            _ => false,
        };
        written
    }
}

/// Writes at most so many bytes. The slices have at least one byte.
fn poll_write_at_most(
    half: &mut OwnedWriteHalf,
    most: usize,
    slices: &[IoSlice<'_>],
    context: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    let first = slices.iter().position(|slice| !slice.is_empty()).unwrap_or(0);
    let slices = &slices[first..];
    let mut left = most;
    let fits = |slice: &&IoSlice<'_>| {
        let does_fit = slice.len() <= left;
        left = left.saturating_sub(slice.len());
        does_fit
    };
    match slices.iter().take_while(fits).count() {
        0 => Pin::new(half).poll_write(context, &slices[0][..most]),
        whole => Pin::new(half).poll_write_vectored(context, &slices[..whole]),
    }
}

/// The reading half of a connection.
pub(super) struct PacedSource {
    half: OwnedReadHalf,
    card: Arc<Card>,
    /// The bytes that have arrived and are not handed on.
    bytes: VecDeque<u8>,
    /// Their division by the time at which they are handed on.
    parts: VecDeque<Part>,
    end: End,
    read: Box<[u8]>,
    /// Whether there was no room for more bytes at the last look at the socket.
    is_full: bool,
    wait: Wait,
}

/// So many bytes, which are handed on at `at`.
struct Part {
    at: Instant,
    bytes: usize,
}

/// Whether a connection still sends.
enum End {
    Open,
    Closed,
    Failed(io::Error),
}

impl PacedSource {
    pub(super) fn poll_read(&mut self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            self.store_arrivals(context);
            if self.hand_on(buffer) {
                return Poll::Ready(Ok(()));
            }
            let Some(next) = self.parts.front() else { return self.poll_end() };
            ready!(self.wait.poll(next.at, &self.card.alarm, context));
        }
    }

    /// Stores the bytes that have arrived. If there is room for more, the socket wakes the task at
    /// the next bytes.
    fn store_arrivals(&mut self, context: &mut Context<'_>) {
        while matches!(self.end, End::Open) {
            // Bytes that came while there was no room wait in the socket.
            let ready = Instant::now() - if self.is_full { LATE } else { Duration::ZERO };
            self.is_full = self.bytes.len() >= self.card.stored_bytes();
            if self.is_full {
                return;
            }
            let mut buffer = ReadBuf::new(&mut self.read);
            let Poll::Ready(read) = Pin::new(&mut self.half).poll_read(context, &mut buffer) else { return };
            let arrived = buffer.filled();
            match read {
                Err(error) => self.end = End::Failed(error),
                Ok(()) if arrived.is_empty() => self.end = End::Closed,
                Ok(()) => {
                    let turn = self.card.into.reserve(arrived.len(), ready);
                    self.parts.push_back(Part { at: turn.end + self.card.delay, bytes: arrived.len() });
                    self.bytes.extend(arrived);
                }
            }
        }
    }

    /// Moves the bytes that are due into the buffer. Returns whether there were any.
    fn hand_on(&mut self, buffer: &mut ReadBuf<'_>) -> bool {
        let now = Instant::now();
        let mut moved = 0;
        while let Some(part) = self.parts.front_mut().filter(|part| part.at <= now) {
            let bytes = part.bytes.min(buffer.remaining());
            if bytes == 0 {
                break;
            }
            let (front, back) = self.bytes.as_slices();
            let of_front = bytes.min(front.len());
            buffer.put_slice(&front[..of_front]);
            buffer.put_slice(&back[..bytes - of_front]);
            self.bytes.drain(..bytes);
            moved += bytes;
            part.bytes -= bytes;
            if part.bytes == 0 {
                self.parts.pop_front();
            }
        }
        moved > 0
    }

    /// The end of the connection, once all bytes are handed on.
    fn poll_end(&mut self) -> Poll<io::Result<()>> {
        match std::mem::replace(&mut self.end, End::Closed) {
            End::Open => {
                self.end = End::Open;
                Poll::Pending
            }
            End::Closed => Poll::Ready(Ok(())),
            End::Failed(error) => Poll::Ready(Err(error)),
        }
    }
}

/// Wakes tasks at instants, from a thread of its own. The timers of the runtime are exact to a
/// millisecond only.
struct Alarm(Arc<Clock>);

#[derive(Default)]
struct Clock {
    calls: Mutex<Calls>,
    changed: Condvar,
}

#[derive(Default)]
struct Calls {
    /// By instant, and by a number that tells calls of one instant apart.
    waiting: BTreeMap<(Instant, u64), Waker>,
    next: u64,
    has_ended: bool,
}

impl Alarm {
    fn start() -> io::Result<Self> {
        let clock = Arc::new(Clock::default());
        let of_thread = Arc::clone(&clock);
        std::thread::Builder::new().name("paced-link".to_owned()).spawn(move || of_thread.run())?;
        Ok(Self(clock))
    }

    fn wake_at(&self, at: Instant, waker: Waker) {
        let mut calls = self.0.calls.lock();
        let number = calls.next;
        calls.next += 1;
        let is_first = calls.waiting.first_key_value().is_none_or(|((first, _), _)| at < *first);
        calls.waiting.insert((at, number), waker);
        if is_first {
            self.0.changed.notify_one();
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.0.calls.lock().has_ended = true;
        self.0.changed.notify_one();
    }
}

impl Clock {
    fn run(&self) {
        let mut calls = self.calls.lock();
        while !calls.has_ended {
            match calls.waiting.first_key_value().map(|((at, _), _)| *at) {
                None => self.changed.wait(&mut calls),
                Some(at) if at <= Instant::now() => {
                    let first = calls.waiting.pop_first();
                    MutexGuard::unlocked(&mut calls, || first.into_iter().for_each(|(_, waker)| waker.wake()));
                }
                Some(at) => {
                    // The next turn of the loop looks at the clock.
                    let _is_late = self.changed.wait_until(&mut calls, at);
                }
            }
        }
    }
}

/// A task's wait for an instant.
#[derive(Default)]
struct Wait(Option<(Instant, Waker)>);

impl Wait {
    fn poll(&mut self, at: Instant, alarm: &Alarm, context: &Context<'_>) -> Poll<()> {
        if at <= Instant::now() {
            self.0 = None;
            return Poll::Ready(());
        }
        let is_known = |(known, waker): &(Instant, Waker)| *known == at && waker.will_wake(context.waker());
        if !self.0.as_ref().is_some_and(is_known) {
            alarm.wake_at(at, context.waker().clone());
            self.0 = Some((at, context.waker().clone()));
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::super::stream::{Sink, Source, Stream};
    use super::*;

    /// 20 MB/s.
    const RATE: NonZeroU64 = NonZeroU64::new(20_000_000).expect("not zero");

    fn link(delay: Duration) -> PacedLink {
        PacedLink::new(RATE, delay).unwrap()
    }

    /// The halves of both ends of a connection.
    async fn connection(near: Option<&PacedLink>, far: Option<&PacedLink>) -> [(Source, Sink); 2] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connecting = TcpStream::connect(listener.local_addr().unwrap());
        let (connected, accepted) = tokio::join!(connecting, listener.accept());
        [(connected.unwrap(), near), (accepted.unwrap().0, far)].map(|(stream, link)| {
            stream.set_nodelay(true).unwrap();
            Stream::Plain(stream).into_halves(link)
        })
    }

    /// Bytes whose order shows.
    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|number| (number % 251) as u8).collect()
    }

    /// Checks the time of something: never shorter than `expected`, and at most a tenth longer.
    /// Other programs prolong it, so a long one is measured again.
    async fn takes(expected: f64, measure: impl AsyncFn() -> Duration) {
        let mut shortest = f64::INFINITY;
        for _attempt in 0..20 {
            shortest = shortest.min(measure().await.as_secs_f64());
            assert!(shortest > 0.99 * expected, "{shortest} s instead of {expected} s");
            if shortest < 1.1 * expected {
                return;
            }
        }
        panic!("{shortest} s instead of {expected} s");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn bytes_take_their_number_by_the_rate_and_the_delay() {
        let delay = Duration::from_millis(20);
        let sent = bytes(4_000_000);
        takes(0.2 + 0.02, async || {
            let [(_, mut sink), (mut source, _)] = connection(Some(&link(delay)), Some(&link(delay))).await;
            let (begun, mut received) = (Instant::now(), vec![0; sent.len()]);
            let (written, read) = tokio::join!(sink.write_all(&sent), source.read_exact(&mut received));
            written.and(read.map(drop)).unwrap();
            assert!(received == sent, "the bytes differ");
            begun.elapsed()
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_round_trip_takes_twice_the_delay() {
        let delay = Duration::from_millis(5);
        takes(0.01, async || {
            let [(mut back, mut forth), (mut source, mut sink)] =
                connection(Some(&link(delay)), Some(&link(delay))).await;
            let (mut received, mut shortest) = ([0; 8], Duration::MAX);
            for _trip in 0..10 {
                let begun = Instant::now();
                forth.write_all(&[7; 8]).await.unwrap();
                source.read_exact(&mut received).await.unwrap();
                sink.write_all(&received).await.unwrap();
                back.read_exact(&mut received).await.unwrap();
                shortest = shortest.min(begun.elapsed());
            }
            assert_eq!(received, [7; 8]);
            shortest
        })
        .await;
    }

    /// Sends bytes over two connections between two processes at the same time. With `is_opposed`
    /// they have opposite directions.
    async fn send_twice(near: Option<&PacedLink>, far: Option<&PacedLink>, is_opposed: bool) -> Duration {
        let [(_near_source, mut first), (mut first_end, _far_sink)] = connection(near, far).await;
        let [(near_source, near_sink), (far_source, far_sink)] = connection(near, far).await;
        let (mut second, mut second_end, _others) = match is_opposed {
            true => (far_sink, near_source, (near_sink, far_source)),
            false => (near_sink, far_source, (far_sink, near_source)),
        };
        let (begun, sent) = (Instant::now(), bytes(2_000_000));
        let [mut one, mut two] = [vec![0; sent.len()], vec![0; sent.len()]];
        let (sent_one, read_one, sent_two, read_two) = tokio::join!(
            first.write_all(&sent),
            first_end.read_exact(&mut one),
            second.write_all(&sent),
            second_end.read_exact(&mut two),
        );
        sent_one.and(sent_two).and(read_one).and(read_two).unwrap();
        assert!(one == sent && two == sent, "the bytes differ");
        begun.elapsed()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn connections_share_a_direction_and_directions_are_apart() {
        let card = || link(Duration::ZERO);
        takes(0.2, async || send_twice(Some(&card()), None, false).await).await;
        takes(0.2, async || send_twice(None, Some(&card()), false).await).await;
        takes(0.1, async || send_twice(Some(&card()), None, true).await).await;
    }

    #[tokio::test]
    async fn without_a_link_a_connection_has_the_bare_sockets() {
        let [near, far] = connection(None, Some(&link(Duration::ZERO))).await;
        assert!(matches!(near, (Source::Plain(_), Sink::Plain(_))));
        assert!(matches!(far, (Source::Paced(_), Sink::Paced(_))));
    }

    #[tokio::test]
    async fn the_end_of_a_connection_comes_after_its_bytes() {
        let [(_, mut sink), (mut source, _far)] = connection(None, Some(&link(Duration::from_millis(20)))).await;
        sink.write_all(b"last").await.unwrap();
        sink.shutdown().await.unwrap();
        let mut received = Vec::new();
        source.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, b"last");
    }

    #[test]
    fn a_line_carries_bytes_in_the_order_of_their_reservations() {
        let line = Line::new(NonZeroU64::new(1_000).unwrap());
        let begun = Instant::now() + Duration::from_secs(1);
        let after = |seconds| begun + Duration::from_secs(seconds);
        let turn = |start, end| Turn { start: after(start), end: after(end) };
        assert_eq!(line.reserve(2_000, begun), turn(0, 2));
        assert_eq!(line.reserve(1_000, after(1)), turn(2, 3), "the line is busy");
        assert_eq!(line.reserve(1_000, after(5)), turn(5, 6), "time without bytes is lost");
    }
}
