//! What code prints, as events.

use std::sync::Arc;

use crate::codec::cut_character;
use crate::interpreter::event::Event;
use crate::interpreter::execution::Execution;
use crate::process::Process;
use crate::process::ring::Stream;

/// Cuts output into events: whole characters, up to the limit of the execution.
pub(super) struct Output {
    pub(super) execution: Option<Arc<Execution>>,
    process: Arc<Process>,
    /// The first bytes of a character, their offset and their position.
    carried: [(u64, u64, Vec<u8>); 2],
    pub(super) left: u64,
    dropped: [u64; 2],
}

impl Output {
    pub(super) fn of(process: &Arc<Process>) -> Self {
        Self {
            execution: None,
            process: Arc::clone(process),
            carried: Default::default(),
            left: 0,
            dropped: [0; 2],
        }
    }

    /// Adds what was just appended to the log.
    pub(super) fn add(&mut self, stream: Stream, offset: u64, data: &[u8]) {
        let Some(execution) = &self.execution else {
            return;
        };
        let position = self.process.position() - data.len() as u64;
        let most = usize::try_from(self.left).unwrap_or(usize::MAX);
        let (data, beyond) = data.split_at(data.len().min(most));
        self.left -= data.len() as u64;
        self.dropped[stream.index()] += beyond.len() as u64;
        let carried = &mut self.carried[stream.index()];
        let (first_offset, first_position) = if carried.2.is_empty() {
            (offset, position)
        } else {
            (carried.0, carried.1)
        };
        let joined;
        let data = if carried.2.is_empty() {
            data
        } else {
            joined = [&carried.2, data].concat();
            &joined
        };
        let (whole, cut) = data.split_at(data.len() - cut_character(data));
        if !whole.is_empty() {
            execution.append_output(stream, first_offset, first_position, whole);
        }
        // A character that begins before these bytes is all there is.
        let before = (data.len() - cut.len()) as u64;
        *carried = match (cut, whole) {
            ([], _) => (0, 0, Vec::new()),
            (cut, []) => (first_offset, first_position, cut.to_vec()),
            (cut, _) => {
                let before = before - carried.2.len() as u64;
                (offset + before, position + before, cut.to_vec())
            }
        };
    }

    /// Releases what is left at the end of the execution, and says what was thrown away.
    pub(super) fn finish(&mut self) {
        let Some(execution) = self.execution.take() else {
            return;
        };
        for stream in Stream::ALL {
            let (offset, position, carried) = std::mem::take(&mut self.carried[stream.index()]);
            if !carried.is_empty() {
                execution.append_output(stream, offset, position, &carried);
            }
            let bytes = std::mem::take(&mut self.dropped[stream.index()]);
            if bytes > 0 {
                execution.append(Event::Dropped { stream, bytes });
            }
        }
    }
}
