//! Compares the log ring with a model that keeps every byte.

use super::ring::{Cursor, Piece, Ring, Stream};
use crate::fuzz::{Script, check};

/// A reader, and how far it should be.
#[derive(Default)]
struct Reader {
    cursor: Cursor,
    /// The next offset of each stream.
    next: [usize; 2],
}

/// Every byte, and how many of the oldest the ring has dropped.
#[derive(Default)]
struct Model {
    all: Vec<(Stream, u8)>,
    /// The bytes of each stream.
    own: [Vec<u8>; 2],
    dropped: usize,
    /// How many bytes of each stream were dropped.
    held_from: [usize; 2],
}

impl Model {
    fn append(&mut self, stream: Stream, data: &[u8]) {
        self.all.extend(data.iter().map(|byte| (stream, *byte)));
        self.own[stream.index()].extend_from_slice(data);
    }

    /// Drops until at least `dropped` bytes were dropped, or all.
    fn drop_until(&mut self, dropped: usize) {
        while self.dropped < dropped.min(self.all.len()) {
            self.held_from[self.all[self.dropped].0.index()] += 1;
            self.dropped += 1;
        }
    }

    /// The number of chunks that the bytes after the first `dropped` need.
    fn runs(&self, dropped: usize) -> usize {
        let held = &self.all[dropped..];
        held.chunk_by(|(one, _), (other, _)| one == other).count()
    }
}

#[test]
fn a_ring_has_the_newest_bytes_in_order_whatever_is_done_to_it() {
    check("ring", &[], |input| {
        let mut script = Script(input);
        let limit = usize::from(script.byte()) * usize::from(1 + script.byte() % 32);
        let mut ring = Ring::new(limit);
        let mut model = Model::default();
        let mut readers = [Reader::default(), Reader::default()];
        while !script.is_at_end() {
            let action = script.byte();
            let argument = usize::from(script.byte());
            match action % 8 {
                0..=3 => {
                    let stream = Stream::ALL[usize::from(action % 2)];
                    // Sometimes more than a chunk holds.
                    let times = if action >= 250 { 600 } else { 1 };
                    let data = script.take(argument).repeat(times);
                    ring.append(stream, &data);
                    model.append(stream, &data);
                    model.drop_until(model.all.len().saturating_sub(limit));
                    settle(&ring, &mut model, limit);
                }
                4 => {
                    ring.drop_oldest(argument);
                    model.drop_until(model.dropped + argument);
                }
                5 if argument == 0 => {
                    ring.clear();
                    model.drop_until(model.all.len());
                    assert_eq!(ring.footprint(), 0, "an empty ring takes no memory");
                }
                6 => {
                    let from =
                        Stream::ALL.map(|stream| argument.min(model.own[stream.index()].len()));
                    readers[argument % 2] = Reader {
                        cursor: Cursor::at(from[0] as u64, from[1] as u64),
                        next: from,
                    };
                }
                _ => {
                    let reader = &mut readers[argument % 2];
                    for _ in 0..argument / 64 {
                        read(&ring, &model, reader);
                    }
                }
            }
            assert_eq!(ring.position(), model.all.len() as u64);
            // Chunks grow by doubling, and two are not full.
            let most = 2 * limit + (limit / 64 + 2) * 128 + 3 * 64 * 1024;
            assert!(
                ring.footprint() <= most,
                "{} bytes for {limit}",
                ring.footprint()
            );
        }
        for reader in &mut readers {
            while read(&ring, &model, reader) {}
            for stream in Stream::ALL {
                let all = model.own[stream.index()].len();
                assert_eq!(reader.next[stream.index()], all, "{stream:?} to its end");
                assert_eq!(reader.cursor.next(stream), all as u64);
                assert_eq!(ring.written(stream), all as u64);
            }
        }
        whole(&ring, &model);
    });
}

/// A ring may drop more than its limit demands only if the streams alternate too often for its number
/// of chunks. The model then drops as much.
fn settle(ring: &Ring, model: &mut Model, limit: usize) {
    let mut cursor = Cursor::default();
    let mut buffer = Vec::new();
    let mut held_from = [0; 2];
    while let Some(Piece::Dropped { stream, bytes, .. }) =
        ring.read(&mut cursor, &mut buffer, usize::MAX)
    {
        held_from[stream.index()] = usize::try_from(bytes).unwrap();
    }
    let dropped = held_from[0] + held_from[1];
    assert!(dropped >= model.dropped, "it holds more than its limit");
    if dropped > model.dropped {
        assert!(
            model.runs(model.dropped) > limit / 64 + 1,
            "it dropped without need"
        );
        assert!(
            model.runs(dropped) > limit / 64,
            "it dropped more than it had to"
        );
        model.drop_until(dropped);
    }
    assert_eq!(held_from, model.held_from, "the oldest bytes go first");
}

/// Reads one piece, and returns whether there was one.
fn read(ring: &Ring, model: &Model, reader: &mut Reader) -> bool {
    let mut buffer = vec![0xEE; 3];
    match ring.read(&mut reader.cursor, &mut buffer, usize::MAX) {
        None => return false,
        Some(Piece::Dropped {
            stream,
            offset,
            bytes,
        }) => {
            let next = &mut reader.next[stream.index()];
            assert_eq!(offset, *next as u64, "a gap is reported where it is");
            *next += usize::try_from(bytes).unwrap();
            assert!(bytes > 0);
            assert_eq!(
                *next,
                model.held_from[stream.index()],
                "a gap is as long as it is"
            );
        }
        Some(Piece::Data { stream, offset }) => {
            let next = &mut reader.next[stream.index()];
            assert_eq!(offset, *next as u64, "nothing twice, nothing left out");
            assert!(!buffer.is_empty());
            assert!(*next >= model.held_from[stream.index()], "it was dropped");
            let own = &model.own[stream.index()];
            assert_eq!(buffer, own[*next..*next + buffer.len()]);
            *next += buffer.len();
        }
    }
    true
}

/// Checks that a new reader gets everything that is held, interleaved as it was written.
fn whole(ring: &Ring, model: &Model) {
    let mut cursor = Cursor::default();
    let mut buffer = Vec::new();
    let mut all = Vec::new();
    while let Some(piece) = ring.read(&mut cursor, &mut buffer, usize::MAX) {
        if let Piece::Data { stream, .. } = piece {
            all.extend(buffer.iter().map(|byte| (stream, *byte)));
        }
    }
    assert_eq!(all, model.all[model.dropped..]);
}
