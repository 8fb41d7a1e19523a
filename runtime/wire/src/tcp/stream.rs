//! The two halves of a connection. The reader takes small parts through a read-ahead buffer, so
//! that many small frames cost one system call. It reads the missing part of a tensor straight into
//! the tensor's vector. The writer sends all queued frames in as few vectored writes as possible,
//! straight from the tensors.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio_rustls::TlsStream;

use super::link::{PacedLink, PacedSink, PacedSource};
use crate::codec::{DecodedFrame, FrameDecoder, FrameRole, Limits, Malformed, Outgoing};
use crate::metrics::WireCounters;

/// Size of the read-ahead buffer, and the most bytes of a tensor that are copied once more.
const READ_AHEAD_BYTES: usize = 32 << 10;
/// A tensor is read directly if at least this many of its bytes are missing.
const DIRECT_BYTES: usize = 8 << 10;
/// The most bytes of one system call. Small enough that the checksum finds them in the second-level
/// cache.
const PIECE_BYTES: usize = 512 << 10;
/// The most slices of one vectored write. The kernel allows 1,024.
const MAX_SLICES: usize = 256;
/// The most frames in one vectored write.
const MAX_BATCH: usize = 64;

/// A connection, with or without TLS.
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    /// The reading half and the writing half. A link paces them, unless there is TLS.
    pub(super) fn into_halves(self, link: Option<&PacedLink>) -> (Source, Sink) {
        match self {
            Self::Plain(stream) => {
                let (read, write) = stream.into_split();
                match link {
                    None => (Source::Plain(read), Sink::Plain(write)),
                    Some(link) => (Source::Paced(link.source(read).into()), Sink::Paced(link.sink(write).into())),
                }
            }
            Self::Tls(stream) => {
                let (read, write) = tokio::io::split(*stream);
                (Source::Tls(read), Sink::Tls(write))
            }
        }
    }
}

/// The reading half of a [`Stream`].
pub(super) enum Source {
    Plain(OwnedReadHalf),
    Paced(Box<PacedSource>),
    Tls(ReadHalf<TlsStream<TcpStream>>),
}

impl AsyncRead for Source {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(half) => Pin::new(half).poll_read(context, buffer),
            Self::Paced(half) => half.poll_read(context, buffer),
            Self::Tls(half) => Pin::new(half).poll_read(context, buffer),
        }
    }
}

/// The writing half of a [`Stream`].
pub(super) enum Sink {
    Plain(OwnedWriteHalf),
    Paced(Box<PacedSink>),
    Tls(WriteHalf<TlsStream<TcpStream>>),
}

impl AsyncWrite for Sink {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(half) => Pin::new(half).poll_write(context, bytes),
            Self::Paced(half) => half.poll_write(context, &[IoSlice::new(bytes)]),
            Self::Tls(half) => Pin::new(half).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(half) => Pin::new(half).poll_write_vectored(context, slices),
            Self::Paced(half) => half.poll_write(context, slices),
            Self::Tls(half) => Pin::new(half).poll_write_vectored(context, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(half) => Pin::new(half).poll_flush(context),
            Self::Paced(half) => half.half().poll_flush(context),
            Self::Tls(half) => Pin::new(half).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(half) => Pin::new(half).poll_shutdown(context),
            Self::Paced(half) => half.half().poll_shutdown(context),
            Self::Tls(half) => Pin::new(half).poll_shutdown(context),
        }
    }
}

/// Why there is no next frame.
#[derive(Debug)]
pub(super) enum ReadError {
    /// The peer closed the connection between two frames.
    Ended,
    Malformed(Malformed),
    Io(io::Error),
}

pub(super) struct FrameReader {
    socket: Source,
    decoder: FrameDecoder,
    ahead: Box<[u8]>,
    start: usize,
    end: usize,
}

impl FrameReader {
    pub(super) fn new(socket: Source, limits: Limits) -> Self {
        Self { socket, decoder: FrameDecoder::new(limits), ahead: vec![0; READ_AHEAD_BYTES].into(), start: 0, end: 0 }
    }

    /// The next frame. Cancel-safe: bytes that have arrived stay in the reader.
    pub(super) async fn next(&mut self) -> Result<DecodedFrame, ReadError> {
        loop {
            if let Some(frame) = self.feed()? {
                return Ok(frame);
            }
            let (count, frame) = match self.decoder.direct() >= DIRECT_BYTES {
                true => self.read_direct().await?,
                false => (self.read_ahead().await?, None),
            };
            if let Some(frame) = frame {
                return Ok(frame);
            }
            if count == 0 {
                return Err(match self.decoder.is_between_frames() {
                    true => ReadError::Ended,
                    false => ReadError::Malformed(Malformed::Truncated),
                });
            }
        }
    }

    /// Feeds the decoder from the read-ahead buffer.
    fn feed(&mut self) -> Result<Option<DecodedFrame>, ReadError> {
        while self.start < self.end {
            let bytes = &self.ahead[self.start..self.end];
            let take = |buffer: &mut ReadBuf<'_>| {
                let count = buffer.remaining().min(bytes.len());
                buffer.put_slice(&bytes[..count]);
                count
            };
            let (count, frame) = self.decoder.fill(bytes.len(), take).map_err(ReadError::Malformed)?;
            self.start += count;
            if frame.is_some() {
                return Ok(frame);
            }
        }
        Ok(None)
    }

    async fn read_ahead(&mut self) -> Result<usize, ReadError> {
        self.start = 0;
        self.end = 0;
        self.end = self.socket.read(&mut self.ahead).await.map_err(ReadError::Io)?;
        Ok(self.end)
    }

    async fn read_direct(&mut self) -> Result<(usize, Option<DecodedFrame>), ReadError> {
        let Self { socket, decoder, .. } = self;
        poll_fn(|context| {
            let filled = decoder.fill(PIECE_BYTES, |buffer| {
                let poll = Pin::new(&mut *socket).poll_read(context, buffer);
                poll.map_ok(|()| buffer.filled().len())
            });
            match filled {
                Err(malformed) => Poll::Ready(Err(ReadError::Malformed(malformed))),
                Ok((Poll::Pending, _)) => Poll::Pending,
                Ok((Poll::Ready(Err(error)), _)) => Poll::Ready(Err(ReadError::Io(error))),
                Ok((Poll::Ready(Ok(count)), frame)) => Poll::Ready(Ok((count, frame))),
            }
        })
        .await
    }

    /// Reads and discards up to 1 MiB that the peer still sends. Closing a socket with unread input
    /// would reset it, and the peer would lose the goodbye.
    pub(super) async fn drain(&mut self) {
        let mut left = 1usize << 20;
        while left > 0 {
            match self.socket.read(&mut self.ahead).await {
                Ok(0) | Err(_) => return,
                Ok(count) => left = left.saturating_sub(count),
            }
        }
    }
}

/// An entry of a writer's queue: a frame, and the resources held until it is written.
pub(super) trait Queued: Send + 'static {
    fn outgoing(&mut self) -> &mut Outgoing;
    fn as_outgoing(&self) -> &Outgoing;
    /// True if the frame need not be written any more. Asked once, before its first byte is
    /// written.
    fn is_abandoned(&self) -> bool;
}

/// Writes the queued frames until the queue is closed and empty, or the socket fails. Then closes
/// the sending side.
pub(super) async fn write_all<Q: Queued>(
    mut queue: mpsc::Receiver<Q>,
    mut socket: Sink,
    counters: &WireCounters,
) -> io::Result<()> {
    let mut batch: VecDeque<Q> = VecDeque::with_capacity(MAX_BATCH);
    loop {
        if batch.is_empty() {
            let first = match queue.try_recv() {
                Ok(first) => Some(first),
                Err(_) => {
                    // Flush bytes that TLS still buffers: the next frame may be far away.
                    socket.flush().await?;
                    queue.recv().await
                }
            };
            match first {
                Some(first) => admit(&mut batch, first),
                None => return socket.shutdown().await,
            }
        }
        while batch.len() < MAX_BATCH
            && let Ok(next) = queue.try_recv()
        {
            admit(&mut batch, next);
        }
        write_some(&mut batch, &mut socket, counters).await?;
    }
}

fn admit<Q: Queued>(batch: &mut VecDeque<Q>, queued: Q) {
    if !queued.is_abandoned() {
        batch.push_back(queued);
    }
}

/// One vectored write of the bytes that may be lent. Fully written frames leave the batch.
async fn write_some<Q: Queued>(batch: &mut VecDeque<Q>, socket: &mut Sink, counters: &WireCounters) -> io::Result<()> {
    if batch.is_empty() {
        return Ok(());
    }
    let lendable = prepare(batch);
    let mut written = poll_fn(|context| {
        let mut slices = [IoSlice::new(&[]); MAX_SLICES];
        let mut used = 0;
        for queued in batch.iter().take(lendable) {
            queued.as_outgoing().lend(&mut slices, &mut used);
        }
        Pin::new(&mut *socket).poll_write_vectored(context, &slices[..used])
    })
    .await?;
    if written == 0 {
        return Err(io::ErrorKind::WriteZero.into());
    }
    while let Some(first) = batch.front_mut() {
        written = first.outgoing().advance(written);
        if !first.as_outgoing().is_written() {
            break;
        }
        let outgoing = first.as_outgoing();
        // Greetings and goodbyes belong to their connection and have no kind.
        if !matches!(outgoing.role(), FrameRole::Greeting | FrameRole::Goodbye) {
            counters.sent(outgoing.kind(), outgoing.frame_bytes());
        }
        batch.pop_front();
    }
    Ok(())
}

/// Prepares about one piece of bytes, from as many frames as needed. Returns the number of frames
/// with prepared bytes. Only the last of them may be prepared in part.
fn prepare<Q: Queued>(batch: &mut VecDeque<Q>) -> usize {
    let mut ready = 0;
    let mut frames = 0;
    for queued in batch.iter_mut() {
        ready += queued.outgoing().prepare(PIECE_BYTES - ready);
        frames += 1;
        if ready >= PIECE_BYTES || !queued.as_outgoing().is_prepared() {
            break;
        }
    }
    frames
}
