//! A ring that keeps the newest output of one process.
//!
//! The n-th byte that a stream ever carried has offset n, whether it is kept or not. A reader brings
//! its own [`Cursor`], so readers are independent and a slow one costs nothing. What a reader missed is
//! reported as [`Piece::Dropped`].
//!
//! Both streams share one queue of chunks in the order in which they were read from the pipes, so a
//! replay interleaves them in that order. A chunk belongs to one stream. The ring holds at most its
//! limit in data and one chunk per 64 bytes of limit, which bounds the bookkeeping when a program
//! alternates between its streams byte by byte. This file uses no locks and no I/O.

use std::collections::VecDeque;

/// How long output counts as of one time: times are kept for the moments at which some began.
pub const TIME_STEP_MS: u64 = 100;

/// Most times that are kept.
const MAX_TIMES: usize = 256;

/// A stream of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// File descriptor 1.
    Stdout,
    /// File descriptor 2.
    Stderr,
}

impl Stream {
    /// Both, in the order of their descriptors.
    pub const ALL: [Self; 2] = [Self::Stdout, Self::Stderr];

    /// The name for clients.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }

    /// The index in arrays with one value per stream.
    pub fn index(self) -> usize {
        self as usize
    }
}

/// The size to which a chunk grows.
const CHUNK_BYTES: usize = 64 * 1024;

/// What a chunk costs besides its data: its entry in the queue and the allocator's header.
const CHUNK_OVERHEAD: usize = size_of::<Chunk>() + 32;

struct Chunk {
    stream: Stream,
    /// Offset in its stream of `data[0]`.
    offset: u64,
    /// Position in the ring of `data[0]`: the bytes of both streams before it.
    position: u64,
    data: Vec<u8>,
    /// Bytes at the front of `data` that were dropped.
    dropped: usize,
}

impl Chunk {
    fn kept(&self) -> usize {
        self.data.len() - self.dropped
    }

    fn end(&self) -> u64 {
        self.position + self.data.len() as u64
    }

    fn footprint(&self) -> usize {
        self.data.capacity() + CHUNK_OVERHEAD
    }
}

/// The newest output of a process.
pub struct Ring {
    chunks: VecDeque<Chunk>,
    /// The memory of a dropped chunk, for the next one: appending to a full ring allocates nothing.
    spare: Option<Vec<u8>>,
    limit: usize,
    /// Bytes of data held.
    held: usize,
    /// See [`Ring::footprint`]; without `spare`.
    footprint: usize,
    /// Bytes that both streams have carried.
    position: u64,
    /// Bytes that each stream has carried.
    written: [u64; 2],
    /// The first offset of each stream that is held.
    held_from: [u64; 2],
    /// Positions, and when the bytes from there on came, in milliseconds since 1970: the oldest first.
    times: VecDeque<(u64, u64)>,
}

/// Output of one stream, and when its last byte came, in milliseconds since 1970.
pub struct Timed<'a> {
    pub stream: Stream,
    /// `None` if that was before the times that are kept.
    pub at_ms: Option<u64>,
    pub data: &'a [u8],
}

/// The position of one reader.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cursor {
    position: u64,
    /// The next offset of each stream.
    next: [u64; 2],
}

impl Cursor {
    /// A reader that starts at these offsets of the two streams.
    pub fn at(stdout: u64, stderr: u64) -> Self {
        Self {
            position: 0,
            next: [stdout, stderr],
        }
    }

    /// The offset of the next byte of a stream.
    pub fn next(&self, stream: Stream) -> u64 {
        self.next[stream.index()]
    }

    /// The position in the ring: the bytes of both streams before it.
    pub fn position(&self) -> u64 {
        self.position
    }
}

/// What a reader gets next.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece {
    /// Bytes, which are in the reader's buffer.
    Data {
        stream: Stream,
        /// The offset of the first one.
        offset: u64,
    },
    /// Bytes that the ring no longer holds.
    Dropped {
        stream: Stream,
        /// The offset of the first one.
        offset: u64,
        bytes: u64,
    },
}

impl Ring {
    /// An empty ring that will hold at most `limit` bytes of data.
    pub fn new(limit: usize) -> Self {
        Self {
            chunks: VecDeque::new(),
            spare: None,
            limit,
            held: 0,
            footprint: 0,
            position: 0,
            written: [0; 2],
            held_from: [0; 2],
            times: VecDeque::new(),
        }
    }

    /// Notes when the output comes that is added next.
    pub fn note_time(&mut self, now_ms: u64) {
        let last = self.times.back().map_or(0, |(_, at)| *at);
        if now_ms < last + TIME_STEP_MS {
            return;
        }
        if self.times.len() == MAX_TIMES {
            self.times.pop_front();
        }
        self.times.push_back((self.position, now_ms));
    }

    /// Shows the last `most` bytes of both streams together, in their order, in pieces that came at one time. They are
    /// not copied: a program that alternates between its streams makes thousands of pieces.
    pub fn latest(&self, most: usize, see: &mut dyn FnMut(Timed<'_>)) {
        let first = self.position.saturating_sub(most as u64);
        let index = self.chunks.partition_point(|chunk| chunk.end() <= first);
        for chunk in self.chunks.range(index..) {
            let mut from = first.max(chunk.position + chunk.dropped as u64);
            while from < chunk.end() {
                let next = self
                    .times
                    .partition_point(|(position, _)| *position <= from);
                let step = self
                    .times
                    .get(next)
                    .map_or(u64::MAX, |(position, _)| *position);
                let to = step.min(chunk.end());
                let range = [from, to].map(|at| usize::try_from(at - chunk.position).unwrap_or(0));
                let time = next.checked_sub(1).and_then(|last| self.times.get(last));
                see(Timed {
                    stream: chunk.stream,
                    at_ms: time.map(|(_, at)| *at),
                    data: &chunk.data[range[0]..range[1]],
                });
                from = to;
            }
        }
    }

    /// When the last output came, to [`TIME_STEP_MS`], in milliseconds since 1970.
    pub fn last_time(&self) -> Option<u64> {
        self.times.back().map(|(_, at)| *at)
    }

    /// Adds output of a stream, and drops the oldest bytes beyond the limit.
    pub fn append(&mut self, stream: Stream, mut data: &[u8]) {
        while !data.is_empty() {
            let room = match self.chunks.back() {
                Some(last) if last.stream == stream => CHUNK_BYTES - last.data.len(),
                _ => 0,
            };
            if room == 0 {
                self.chunks.push_back(Chunk {
                    stream,
                    offset: self.written[stream.index()],
                    position: self.position,
                    data: match self.spare.take() {
                        Some(spare) if data.len() >= CHUNK_BYTES / 2 => spare,
                        _ => Vec::with_capacity(data.len().min(CHUNK_BYTES)),
                    },
                    dropped: 0,
                });
                self.footprint += self.chunks.back().map_or(0, Chunk::footprint);
                continue;
            }
            let (now, later) = data.split_at(data.len().min(room));
            if let Some(last) = self.chunks.back_mut() {
                self.footprint -= last.footprint();
                if last.data.capacity() - last.data.len() < now.len() {
                    let wanted =
                        (last.data.len() * 2).clamp(last.data.len() + now.len(), CHUNK_BYTES);
                    last.data.reserve_exact(wanted - last.data.len());
                }
                last.data.extend_from_slice(now);
                self.footprint += last.footprint();
            }
            self.held += now.len();
            self.position += now.len() as u64;
            self.written[stream.index()] += now.len() as u64;
            data = later;
        }
        if self.held > self.limit {
            self.drop_oldest(self.held - self.limit);
        }
        while self.chunks.len() > self.limit / 64 + 2 {
            self.drop_oldest(self.chunks[0].kept());
        }
    }

    /// Drops `bytes` of the oldest data, or all if there is less.
    pub fn drop_oldest(&mut self, mut bytes: usize) {
        while bytes > 0
            && let Some(first) = self.chunks.front_mut()
        {
            let now = bytes.min(first.kept());
            first.dropped += now;
            self.held -= now;
            bytes -= now;
            self.held_from[first.stream.index()] = first.offset + first.dropped as u64;
            if first.kept() == 0 {
                self.footprint -= first.footprint();
                if let Some(mut chunk) = self.chunks.pop_front()
                    && chunk.data.capacity() == CHUNK_BYTES
                {
                    chunk.data.clear();
                    self.spare = Some(chunk.data);
                }
            }
        }
        let first = self.chunks.front();
        let first = first.map_or(self.position, |chunk| chunk.position + chunk.dropped as u64);
        while self
            .times
            .get(1)
            .is_some_and(|(position, _)| *position <= first)
        {
            self.times.pop_front();
        }
    }

    /// Drops `bytes` of the oldest data, or all if there is less, and frees the memory.
    pub fn free_oldest(&mut self, bytes: usize) {
        self.drop_oldest(bytes);
        self.spare = None;
    }

    /// Drops everything and frees the memory.
    pub fn clear(&mut self) {
        self.drop_oldest(self.held);
        self.chunks = VecDeque::new();
        self.times = VecDeque::new();
        self.spare = None;
    }

    /// Memory that the ring takes, in bytes, with its bookkeeping.
    pub fn footprint(&self) -> usize {
        let times = self.times.capacity() * size_of::<(u64, u64)>();
        self.footprint + times + self.spare.as_ref().map_or(0, Vec::capacity)
    }

    /// Bytes that both streams have carried.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Bytes that a stream has carried: the offset of its next byte.
    pub fn written(&self, stream: Stream) -> u64 {
        self.written[stream.index()]
    }

    /// The first offset of a stream that is held.
    pub fn held_from(&self, stream: Stream) -> u64 {
        self.held_from[stream.index()]
    }

    /// Replaces the content of `buffer` by the next bytes for this reader, at most `most`, and advances
    /// the cursor; `None` if there are no more.
    pub fn read(&self, cursor: &mut Cursor, buffer: &mut Vec<u8>, most: usize) -> Option<Piece> {
        buffer.clear();
        for stream in Stream::ALL {
            let next = &mut cursor.next[stream.index()];
            let from = self.held_from[stream.index()];
            if *next < from {
                let piece = Piece::Dropped {
                    stream,
                    offset: *next,
                    bytes: from - *next,
                };
                *next = from;
                return Some(piece);
            }
        }
        let mut index = self
            .chunks
            .partition_point(|chunk| chunk.end() <= cursor.position);
        while let Some(chunk) = self.chunks.get(index) {
            let next = &mut cursor.next[chunk.stream.index()];
            // The part of this chunk that the reader has, by its position or by the offset it started at.
            let by_position = cursor.position.saturating_sub(chunk.position);
            let by_offset = next.saturating_sub(chunk.offset);
            let skip = by_position.max(by_offset).max(chunk.dropped as u64);
            cursor.position = chunk.end();
            if skip < chunk.data.len() as u64 {
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "smaller than a chunk's length"
                )]
                let data = &chunk.data[skip as usize..];
                buffer.extend_from_slice(&data[..data.len().min(most)]);
                cursor.position = chunk.position + skip + buffer.len() as u64;
                let offset = chunk.offset + skip;
                *next = offset + buffer.len() as u64;
                return Some(Piece::Data {
                    stream: chunk.stream,
                    offset,
                });
            }
            index += 1;
        }
        None
    }

    /// Appends to `buffer` this many bytes of a stream, the first of which is at a position. False if the ring no
    /// longer holds them all.
    pub fn copy(
        &self,
        stream: Stream,
        position: u64,
        mut bytes: usize,
        buffer: &mut Vec<u8>,
    ) -> bool {
        let first = self.chunks.partition_point(|chunk| chunk.end() <= position);
        if self
            .chunks
            .get(first)
            .is_none_or(|chunk| chunk.position > position)
        {
            return false;
        }
        for chunk in self.chunks.range(first..) {
            if chunk.stream != stream {
                continue;
            }
            let skip = position.saturating_sub(chunk.position);
            let Some(data) = usize::try_from(skip)
                .ok()
                .and_then(|skip| chunk.data.get(skip..))
            else {
                return false;
            };
            if chunk.data.len() - data.len() < chunk.dropped {
                return false;
            }
            let data = &data[..data.len().min(bytes)];
            buffer.extend_from_slice(data);
            bytes -= data.len();
            if bytes == 0 {
                return true;
            }
        }
        bytes == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that a reader still gets: the pieces, and the bytes of each stream.
    fn replay(ring: &Ring, cursor: &mut Cursor) -> (Vec<Piece>, [Vec<u8>; 2]) {
        let mut buffer = Vec::new();
        let mut pieces = Vec::new();
        let mut streams = [Vec::new(), Vec::new()];
        while let Some(piece) = ring.read(cursor, &mut buffer, usize::MAX) {
            if let Piece::Data { stream, .. } = piece {
                streams[stream.index()].extend_from_slice(&buffer);
            }
            pieces.push(piece);
        }
        (pieces, streams)
    }

    #[test]
    fn keeps_the_order_of_both_streams() {
        let mut ring = Ring::new(1000);
        ring.append(Stream::Stdout, b"one ");
        ring.append(Stream::Stderr, b"two ");
        ring.append(Stream::Stdout, b"three");
        let (pieces, streams) = replay(&ring, &mut Cursor::default());
        assert_eq!(
            pieces,
            [
                Piece::Data {
                    stream: Stream::Stdout,
                    offset: 0
                },
                Piece::Data {
                    stream: Stream::Stderr,
                    offset: 0
                },
                Piece::Data {
                    stream: Stream::Stdout,
                    offset: 4
                },
            ]
        );
        assert_eq!(streams, [b"one three".to_vec(), b"two ".to_vec()]);
    }

    #[test]
    fn output_has_the_time_at_which_it_came() {
        let mut ring = Ring::new(1000);
        for (at, stream, text) in [
            (1000, Stream::Stdout, "one"),
            (1050, Stream::Stdout, "two"),
            (1100, Stream::Stdout, "three"),
            (1150, Stream::Stderr, "four"),
            (1300, Stream::Stderr, "five"),
        ] {
            ring.note_time(at);
            ring.append(stream, text.as_bytes());
        }
        let told = |ring: &Ring, most| -> Vec<(Option<u64>, String)> {
            let mut pieces = Vec::new();
            ring.latest(most, &mut |piece| {
                let text = String::from_utf8(piece.data.to_vec()).unwrap();
                pieces.push((piece.at_ms, text));
            });
            pieces
        };
        let piece = |at, text: &str| (Some(at), text.to_owned());
        assert_eq!(
            told(&ring, 1000),
            [
                piece(1000, "onetwo"),
                piece(1100, "three"),
                piece(1100, "four"),
                piece(1300, "five"),
            ]
        );
        assert_eq!(told(&ring, 6), [piece(1100, "ur"), piece(1300, "five")]);
        assert_eq!(ring.last_time(), Some(1300));
        // The clock may be set back.
        ring.note_time(500);
        ring.append(Stream::Stderr, b"!");
        assert_eq!(told(&ring, 5), [piece(1300, "five!")]);
        ring.clear();
        assert_eq!((told(&ring, 1000), ring.footprint()), (vec![], 0));
    }

    #[test]
    fn the_times_of_what_was_dropped_are_dropped() {
        let mut ring = Ring::new(1 << 20);
        for number in 1..=400 {
            ring.note_time(number * TIME_STEP_MS);
            ring.append(Stream::Stdout, b"x");
        }
        assert_eq!(ring.times.len(), MAX_TIMES);
        let mut times = Vec::new();
        ring.latest(400, &mut |piece| times.push(piece.at_ms));
        assert_eq!(times[0], None);
        ring.drop_oldest(398);
        assert_eq!(ring.times.len(), 2);
    }

    #[test]
    fn a_reader_goes_on_where_it_stopped() {
        let mut ring = Ring::new(1000);
        let mut cursor = Cursor::default();
        ring.append(Stream::Stdout, b"abc");
        assert_eq!(replay(&ring, &mut cursor).1[0], b"abc");
        assert!(
            ring.read(&mut cursor, &mut Vec::new(), usize::MAX)
                .is_none()
        );
        ring.append(Stream::Stdout, b"def");
        assert_eq!(replay(&ring, &mut cursor).1[0], b"def");
    }

    #[test]
    fn says_what_was_dropped() {
        let mut ring = Ring::new(4);
        ring.append(Stream::Stdout, b"abcdef");
        let (pieces, streams) = replay(&ring, &mut Cursor::default());
        assert_eq!(
            pieces[0],
            Piece::Dropped {
                stream: Stream::Stdout,
                offset: 0,
                bytes: 2
            }
        );
        assert_eq!(streams[0], b"cdef");
    }

    #[test]
    fn says_what_was_dropped_of_a_stream_with_nothing_left() {
        let mut ring = Ring::new(4);
        ring.append(Stream::Stderr, b"gone");
        ring.append(Stream::Stdout, b"kept");
        let (pieces, _) = replay(&ring, &mut Cursor::at(0, 1));
        assert_eq!(
            pieces[0],
            Piece::Dropped {
                stream: Stream::Stderr,
                offset: 1,
                bytes: 3
            }
        );
    }

    #[test]
    fn alternating_bytes_cannot_make_the_bookkeeping_grow() {
        let mut ring = Ring::new(64 * 1024);
        for _ in 0..200_000 {
            ring.append(Stream::Stdout, b"o");
            ring.append(Stream::Stderr, b"e");
        }
        assert!(ring.footprint() < 4 * 64 * 1024, "{}", ring.footprint());
    }

    /// For any history and any cursor, what is replayed and what is reported as dropped are together
    /// exactly what was written, according to a model that keeps everything.
    #[test]
    fn agrees_with_a_model_that_forgets_nothing() {
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        for round in 0..200 {
            let limit = 1 + random(5000);
            let mut ring = Ring::new(usize::try_from(limit).unwrap());
            let mut model = [Vec::new(), Vec::new()];
            let mut readers: Vec<(Cursor, [u64; 2])> = Vec::new();
            for step in 0..60 {
                let stream = Stream::ALL[usize::try_from(random(2)).unwrap()];
                let data: Vec<u8> = (0..random(700))
                    .map(|index| ((index + step) & 0xff) as u8)
                    .collect();
                ring.append(stream, &data);
                model[stream.index()].extend_from_slice(&data);
                if random(20) == 0 {
                    ring.drop_oldest(usize::try_from(random(900)).unwrap());
                }
                if random(5) == 0 {
                    let at = [
                        random(model[0].len() as u64 + 1),
                        random(model[1].len() as u64 + 1),
                    ];
                    readers.push((Cursor::at(at[0], at[1]), at));
                }
                for (cursor, next) in &mut readers {
                    if random(3) > 0 {
                        continue;
                    }
                    let mut buffer = Vec::new();
                    while let Some(piece) = ring.read(cursor, &mut buffer, usize::MAX) {
                        match piece {
                            Piece::Dropped {
                                stream,
                                offset,
                                bytes,
                            } => {
                                assert_eq!(offset, next[stream.index()]);
                                next[stream.index()] += bytes;
                            }
                            Piece::Data { stream, offset } => {
                                assert_eq!(offset, next[stream.index()], "round {round}");
                                let from = usize::try_from(offset).unwrap();
                                assert_eq!(
                                    buffer,
                                    model[stream.index()][from..from + buffer.len()]
                                );
                                next[stream.index()] += buffer.len() as u64;
                            }
                        }
                    }
                    assert_eq!(*next, [model[0].len() as u64, model[1].len() as u64]);
                }
            }
            let footprint: usize = ring.chunks.iter().map(Chunk::footprint).sum();
            assert_eq!(ring.footprint, footprint);
            assert!(ring.held <= ring.limit);
        }
    }

    #[test]
    fn bytes_are_copied_by_their_position() {
        let mut ring = Ring::new(3 * CHUNK_BYTES);
        ring.append(Stream::Stdout, b"one");
        ring.append(Stream::Stderr, b"two");
        ring.append(Stream::Stdout, &vec![b'x'; CHUNK_BYTES]);
        let copy = |ring: &Ring, stream, position, bytes| {
            let mut buffer = Vec::new();
            let is_whole = ring.copy(stream, position, bytes, &mut buffer);
            is_whole.then_some(buffer)
        };
        assert_eq!(copy(&ring, Stream::Stdout, 0, 3).unwrap(), b"one");
        assert_eq!(copy(&ring, Stream::Stderr, 4, 2).unwrap(), b"wo");
        // From one chunk of a stream into the next one.
        assert_eq!(copy(&ring, Stream::Stdout, 2, 3).unwrap(), b"exx");
        let all = copy(&ring, Stream::Stdout, 6, CHUNK_BYTES).unwrap();
        assert_eq!(all, vec![b'x'; CHUNK_BYTES]);
        assert_eq!(copy(&ring, Stream::Stdout, 6, CHUNK_BYTES + 1), None);

        ring.drop_oldest(4);
        assert_eq!(copy(&ring, Stream::Stdout, 0, 3), None);
        assert_eq!(copy(&ring, Stream::Stderr, 3, 3), None);
        assert_eq!(copy(&ring, Stream::Stderr, 4, 2).unwrap(), b"wo");
        ring.drop_oldest(2);
        assert_eq!(copy(&ring, Stream::Stderr, 4, 2), None);
        assert_eq!(copy(&ring, Stream::Stdout, 6, 2).unwrap(), b"xx");
    }
}
