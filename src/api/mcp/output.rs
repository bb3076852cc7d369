//! What a result has of a command's output: as much as a model reads at once.

use std::fmt::Write;

use super::calls::{Room, ToolCall};
use super::client::ToolClient;
use crate::client::Client;
use crate::codec::cut_character;
use crate::codec::plain::PlainText;
use crate::error::Result;
use crate::limits::ledger::OverLimit;
use crate::process::ring::{Cursor, Stream};
use crate::process::{Exit, Subscriber};

/// Most characters of a stream in a result.
const MAX_CHARACTERS: usize = 30_000;

/// Characters of each end of a stream that is longer; between them stands how much is left out.
const END_CHARACTERS: usize = 14_950;

/// Bytes of each end that are kept: a character has four at most.
const END_BYTES: usize = 4 * END_CHARACTERS;

/// Bytes of the end that are kept meanwhile, and some more: the first bytes may be the last of a character.
const TAIL_BYTES: usize = END_BYTES + 4;

/// Most bytes that are kept of a stream.
const MAX_KEPT_BYTES: usize = END_BYTES + 2 * TAIL_BYTES;

/// Most bytes of a text that is shown of a stream.
const MAX_SHOWN_BYTES: usize = 4 * MAX_CHARACTERS;

/// Bytes that are certain to be enough for a whole stream in a result.
pub(super) const ENOUGH_BYTES: u64 = 4 * MAX_CHARACTERS as u64;

/// What of a stream is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// Both ends: how a command began and how it ended.
    Ends,
    /// The beginning: a client reads on from there.
    Beginning,
}

/// One stream of output.
struct Kept {
    keep: Keep,
    /// The first bytes, and the offset of the first of them.
    head: Vec<u8>,
    from: u64,
    /// The last bytes after those, and the offset behind them.
    tail: Vec<u8>,
    to: u64,
    /// Whether bytes between the two were not kept.
    has_gap: bool,
    /// Whether the first bytes that were asked for are not held any more.
    is_late: bool,
    /// For a terminal.
    plain: Option<PlainText>,
}

/// A stream as a result has it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) text: String,
    /// Where to read on: what was left out, or what comes.
    pub(super) offset: u64,
    pub(super) is_cut: bool,
}

impl Kept {
    fn new(keep: Keep, from: u64, is_plain: bool) -> Self {
        Self {
            keep,
            head: Vec::new(),
            from,
            tail: Vec::new(),
            to: from,
            has_gap: false,
            is_late: false,
            plain: is_plain.then(|| PlainText::new(from == 0)),
        }
    }

    fn push(&mut self, offset: u64, data: &[u8]) {
        self.to = offset + data.len() as u64;
        let most = match self.keep {
            Keep::Ends => END_BYTES,
            Keep::Beginning => 2 * END_BYTES,
        };
        let room = if self.has_gap || !self.tail.is_empty() {
            0
        } else {
            most.saturating_sub(self.head.len())
        };
        let (now, mut later) = data.split_at(data.len().min(room));
        append(&mut self.head, now, most);
        if later.is_empty() {
            return;
        }
        if self.keep == Keep::Beginning {
            self.has_gap = true;
            return;
        }
        if self.tail.len() + later.len() > 2 * TAIL_BYTES {
            // With the head it is more than what is shown whole.
            self.has_gap = true;
            later = &later[later.len().saturating_sub(TAIL_BYTES)..];
            let kept = TAIL_BYTES - later.len();
            self.tail.drain(..self.tail.len().saturating_sub(kept));
        }
        append(&mut self.tail, later, 2 * TAIL_BYTES);
    }

    /// At least the bytes that it takes once `more` are added.
    fn held_with(&self, more: usize) -> usize {
        let length = self.head.len() + self.tail.len() + more;
        // Either part may have twice the room that it needs.
        (2 * length).min(MAX_KEPT_BYTES)
    }

    /// At least the bytes of what is shown of it.
    fn shown_bytes(&self) -> usize {
        // A byte that is no text becomes three.
        (3 * self.held_with(0)).min(MAX_SHOWN_BYTES)
    }

    fn skip(&mut self, offset: u64, bytes: u64) {
        if self.head.is_empty() {
            self.from = offset + bytes;
            self.is_late = true;
        } else {
            self.has_gap = true;
            self.tail = Vec::new();
        }
        self.to = offset + bytes;
    }

    fn show(mut self) -> Shown {
        if let Some(mut plain) = self.plain.take() {
            return self.show_plain(&mut plain);
        }
        if self.keep == Keep::Beginning {
            return self.show_beginning();
        }
        if !self.has_gap {
            self.head.append(&mut self.tail);
            if characters(&self.head) <= MAX_CHARACTERS {
                return Shown {
                    text: String::from_utf8_lossy(&self.head).into_owned(),
                    offset: self.to,
                    is_cut: self.is_late,
                };
            }
        }
        let head = &self.head[..prefix(&self.head, END_CHARACTERS)];
        let rest = if self.has_gap {
            // Its first bytes may be the last of a character.
            let cut = self
                .tail
                .iter()
                .take(3)
                .take_while(|byte| **byte & 0xc0 == 0x80);
            &self.tail[cut.count()..]
        } else {
            &self.head[head.len()..]
        };
        let skipped = characters(rest).saturating_sub(END_CHARACTERS);
        let tail = &rest[prefix(rest, skipped)..];
        let offset = self.from + head.len() as u64;
        let left_out = self.to - offset - tail.len() as u64;
        let mut text = String::from_utf8_lossy(head).into_owned();
        // Writing to memory does not fail.
        let _ = write!(text, "\n[... {left_out} bytes left out ...]\n");
        text.push_str(&String::from_utf8_lossy(tail));
        Shown {
            text,
            offset,
            is_cut: true,
        }
    }

    fn show_beginning(self) -> Shown {
        let whole = self.head.len() - cut_character(&self.head);
        let end = prefix(&self.head[..whole], MAX_CHARACTERS);
        Shown {
            text: String::from_utf8_lossy(&self.head[..end]).into_owned(),
            offset: self.from + end as u64,
            is_cut: self.has_gap || end < whole || self.is_late,
        }
    }

    /// Without control sequences. Their bytes count in the offset.
    fn show_plain(self, plain: &mut PlainText) -> Shown {
        let mut text = Vec::new();
        let mut end = self.head.len();
        plain.push(&self.head, &mut text);
        if characters(&text) > MAX_CHARACTERS {
            // There are fewer control sequences in a shorter part, but it has fewer characters in any case.
            end = prefix(&self.head, MAX_CHARACTERS);
            *plain = PlainText::new(self.from == 0);
            text.clear();
            plain.push(&self.head[..end], &mut text);
        }
        let is_cut = self.has_gap || end < self.head.len() || self.is_late;
        Shown {
            text: String::from_utf8_lossy(&text).into_owned(),
            offset: self.from + end as u64 - plain.pending(),
            is_cut,
        }
    }
}

/// Adds to a part that has `most` bytes at the end, and never has room for more.
fn append(part: &mut Vec<u8>, data: &[u8], most: usize) {
    let (length, needed) = (part.len(), part.len() + data.len());
    if needed > part.capacity() {
        part.reserve_exact(needed.max(2 * length).min(most) - length);
    }
    part.extend_from_slice(data);
}

/// How many characters bytes are shown as.
fn characters(bytes: &[u8]) -> usize {
    let chunks = bytes.utf8_chunks();
    chunks
        .map(|chunk| chunk.valid().chars().count() + usize::from(!chunk.invalid().is_empty()))
        .sum()
}

/// The bytes that are shown as the first `most` characters.
fn prefix(bytes: &[u8], most: usize) -> usize {
    let (mut left, mut end) = (most, 0);
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            if left == 0 {
                return end;
            }
            left -= 1;
            end += character.len_utf8();
        }
        if !chunk.invalid().is_empty() {
            if left == 0 {
                return end;
            }
            left -= 1;
            end += chunk.invalid().len();
        }
    }
    end
}

/// Keeps what a process prints, and tells its client of progress.
pub(super) struct Collector<'c, 's> {
    client: &'c mut ToolClient<'s>,
    room: &'c mut Room,
    /// Why nothing more is kept.
    refused: Option<OverLimit>,
    streams: [Kept; 2],
    /// First bytes of a character that progress has not told yet.
    carried: [Vec<u8>; 2],
    pub(super) exit: Option<Exit>,
}

impl<'c, 's> Collector<'c, 's> {
    /// Collects what comes after a place.
    pub(super) fn new(
        call: &'c mut ToolCall<'_, 's>,
        keep: Keep,
        after: &Cursor,
        is_plain: bool,
    ) -> Self {
        Self::of(call.client, call.room, keep, after, is_plain)
    }

    fn of(
        client: &'c mut ToolClient<'s>,
        room: &'c mut Room,
        keep: Keep,
        after: &Cursor,
        is_plain: bool,
    ) -> Self {
        Self {
            client,
            room,
            refused: None,
            streams: Stream::ALL.map(|stream| Kept::new(keep, after.next(stream), is_plain)),
            carried: [Vec::new(), Vec::new()],
            exit: None,
        }
    }

    /// Both streams as the result has them.
    ///
    /// # Errors
    /// `OverLimit` if the tenant has no room for what was printed. The log has it.
    pub(super) fn show(mut self) -> Result<[Shown; 2]> {
        // The texts, and once more in the text of the result.
        let shown: usize = self.streams.iter().map(Kept::shown_bytes).sum();
        self.reserve([0; 2], 2 * shown);
        match self.refused {
            Some(refused) => Err(refused.into()),
            None => Ok(self.streams.map(Kept::show)),
        }
    }

    /// Charges what is kept, with so many bytes more of each stream, and other bytes.
    fn reserve(&mut self, more: [usize; 2], besides: usize) {
        let kept = self.streams.iter().zip(more);
        let kept: usize = kept.map(|(stream, more)| stream.held_with(more)).sum();
        if self.refused.is_none()
            && let Err(refused) = self.room.reserve(kept + besides)
        {
            self.refused = Some(refused);
            for stream in &mut self.streams {
                (stream.head, stream.tail) = (Vec::new(), Vec::new());
            }
        }
    }
}

impl Subscriber for Collector<'_, '_> {
    fn client(&mut self) -> &mut dyn Client {
        self.client
    }

    fn output(&mut self, stream: Stream, offset: u64, data: &[u8]) {
        let mut more = [0; 2];
        more[stream.index()] = data.len();
        self.reserve(more, 0);
        if self.refused.is_none() {
            self.streams[stream.index()].push(offset, data);
        }
        if !self.client.wants_progress() {
            return self.client.keep_alive();
        }
        let carried = &mut self.carried[stream.index()];
        carried.extend_from_slice(data);
        let cut = carried.split_off(carried.len() - cut_character(carried));
        let told = std::mem::replace(carried, cut);
        let text = String::from_utf8_lossy(&told);
        self.client.tell_progress(data.len() as u64, &text);
    }

    fn dropped(&mut self, stream: Stream, offset: u64, bytes: u64) {
        self.streams[stream.index()].skip(offset, bytes);
    }

    fn exit(&mut self, exit: &Exit) {
        self.exit = Some(*exit);
    }

    fn caught_up(&mut self, _: &Cursor) {}
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;
    use crate::http::late::LateStream;
    use crate::limits::ledger::Budget;

    fn shown(keep: Keep, pieces: &[&[u8]]) -> Shown {
        let mut kept = Kept::new(keep, 0, false);
        let mut offset = 0;
        for piece in pieces {
            kept.push(offset, piece);
            offset += piece.len() as u64;
        }
        kept.show()
    }

    /// A text of many characters, no part of which is there twice.
    fn long_text() -> String {
        let numbers = (1_000_000..1_200_000).map(|number: u32| number.to_string() + "\u{20ac}");
        numbers.collect()
    }

    #[test]
    fn a_short_stream_is_whole() {
        let all = "\u{e9}".repeat(MAX_CHARACTERS);
        for keep in [Keep::Ends, Keep::Beginning] {
            let (first, second) = all.as_bytes().split_at(12_345);
            let expected = Shown {
                text: all.clone(),
                offset: 60_000,
                is_cut: false,
            };
            assert_eq!(shown(keep, &[first, second]), expected, "{keep:?}");
        }
    }

    #[test]
    fn a_long_stream_shows_both_ends_and_where_the_rest_is() {
        let long = long_text();
        for pieces in [
            vec![long.as_bytes()],
            long.as_bytes().chunks(4099).collect(),
        ] {
            let Shown {
                text,
                offset,
                is_cut,
            } = shown(Keep::Ends, &pieces);
            assert!(is_cut && text.chars().count() <= MAX_CHARACTERS);
            let (head, rest) = text.split_once("\n[... ").unwrap();
            let (left_out, tail) = rest.split_once(" bytes left out ...]\n").unwrap();
            assert_eq!(head.len() as u64, offset);
            assert!(long.starts_with(head) && long.ends_with(tail));
            assert_eq!(
                [head, tail].map(|end| end.chars().count()),
                [END_CHARACTERS; 2]
            );
            let left_out: usize = left_out.parse().unwrap();
            assert_eq!(head.len() + left_out + tail.len(), long.len());
        }
    }

    #[test]
    fn the_ends_of_a_stream_are_the_same_however_it_comes() {
        let long = long_text();
        let expected = shown(Keep::Ends, &[long.as_bytes()]);
        for size in [997, 4096, END_BYTES - 1, END_BYTES, 65_536, 250_000] {
            let pieces: Vec<_> = long.as_bytes().chunks(size).collect();
            assert_eq!(shown(Keep::Ends, &pieces), expected, "{size}");
        }
        // Wherever it is cut, characters of four bytes are as many as the end has.
        let faces = "\u{1f600}".repeat(90_000) + "x";
        for size in [4098, 65_535] {
            let pieces: Vec<_> = faces.as_bytes().chunks(size).collect();
            let shown = shown(Keep::Ends, &pieces);
            let (_, tail) = shown.text.rsplit_once("...]\n").unwrap();
            assert_eq!(tail.chars().count(), END_CHARACTERS, "{size}");
        }
    }

    #[test]
    fn no_more_is_kept_of_a_stream_than_is_charged() {
        for keep in [Keep::Ends, Keep::Beginning] {
            for size in [1, 100, 4096, 65_536] {
                let mut kept = Kept::new(keep, 0, false);
                let piece = vec![b'x'; size];
                for number in 0..(1 << 20) / size {
                    let charged = kept.held_with(size);
                    kept.push((number * size) as u64, &piece);
                    let held = kept.head.capacity() + kept.tail.capacity();
                    assert!(held <= charged.max(64), "{keep:?} {size}: {held} {charged}");
                    assert!(held <= kept.held_with(0).max(64));
                }
                kept.skip(1 << 20, 5);
                assert!(kept.tail.capacity() <= kept.held_with(0));
                let most = kept.shown_bytes();
                assert!(kept.show().text.len() <= most + 64);
            }
        }
    }

    #[test]
    fn what_is_collected_is_charged_before_it_is_kept() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let collect = |budget: u64, bytes: usize| {
            let ledger = Budget::new(budget).whole();
            let mut stream = LateStream::for_test(far.try_clone().unwrap(), &ledger);
            let mut client = ToolClient::new(&mut stream, Duration::from_secs(60));
            let mut room = Room::new(&ledger);
            let after = Cursor::default();
            let mut collector = Collector::of(&mut client, &mut room, Keep::Ends, &after, false);
            for stream in Stream::ALL {
                collector.output(stream, 0, &vec![b'x'; bytes]);
            }
            let kept = |kept: &Kept| kept.head.capacity() + kept.tail.capacity();
            let kept: usize = collector.streams.iter().map(kept).sum();
            let is_charged = bytes < 4096 || collector.room.covers(kept);
            (is_charged, kept, collector.show().is_ok())
        };
        assert_eq!(collect(4 << 20, 60_000), (true, 2 * 60_000, true));
        // A short output needs no room.
        assert_eq!(collect(0, 100), (true, 200, true));
        assert_eq!(collect(100_000, 60_000), (true, 0, false));
    }

    #[test]
    fn a_long_stream_is_read_on_from_its_beginning() {
        let long = long_text();
        let (mut read, mut offset) = (String::new(), 0);
        while read.len() < long.len() {
            let mut kept = Kept::new(Keep::Beginning, offset, false);
            let rest = &long.as_bytes()[usize::try_from(offset).unwrap()..];
            for (number, piece) in rest.chunks(1000).enumerate() {
                kept.push(offset + 1000 * number as u64, piece);
            }
            let shown = kept.show();
            assert_eq!(shown.is_cut, shown.offset < long.len() as u64);
            (offset, read) = (shown.offset, read + &shown.text);
        }
        assert_eq!(read, long);
    }

    #[test]
    fn what_is_not_text_is_replaced_and_counted() {
        let noise = vec![0xff; MAX_CHARACTERS + 1];
        let Shown {
            text,
            offset,
            is_cut,
        } = shown(Keep::Beginning, &[&noise]);
        assert_eq!(
            (text.chars().count(), offset, is_cut),
            (MAX_CHARACTERS, 30_000, true)
        );
        let cut = shown(Keep::Beginning, &[b"a\xe2\x82"]);
        assert_eq!((&*cut.text, cut.offset), ("a", 1));
    }

    #[test]
    fn what_is_not_held_any_more_is_a_cut() {
        let mut kept = Kept::new(Keep::Beginning, 10, false);
        kept.skip(10, 90);
        kept.push(100, b"rest");
        let shown = kept.show();
        assert_eq!(
            (&*shown.text, shown.offset, shown.is_cut),
            ("rest", 104, true)
        );
    }

    #[test]
    fn terminals_are_shown_without_control_sequences() {
        let mut kept = Kept::new(Keep::Beginning, 0, true);
        kept.push(0, b"\x1b[1mbold\x1b[0m\r\n$ \x1b[");
        let shown = kept.show();
        assert_eq!((&*shown.text, shown.offset), ("bold\n$ ", 16));
    }
}
