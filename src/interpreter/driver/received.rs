//! What a bridge has sent and was not handled yet, charged to its tenant before it is read.

use crate::limits::ledger::{Charge, Item, OverLimit};

/// What is read from the socket at least.
const READ_BYTES: usize = 16 * 1024;

/// What is read from the socket at most, and before anything else is looked at.
pub(super) const TURN_BYTES: usize = 1 << 20;

/// Bytes of messages, the first of which is not whole.
pub(super) struct Received {
    /// Has room for the next read at its end, which is cleared once and not for each read: code may send single bytes.
    buffer: Vec<u8>,
    length: usize,
    charge: Charge,
}

impl Received {
    /// Nothing. `charge` is for nothing.
    pub(super) fn new(charge: Charge) -> Self {
        Self {
            buffer: Vec::new(),
            length: 0,
            charge,
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[..self.length]
    }

    /// Room for a read; `announced` is the length of the first message, if it is known.
    ///
    /// # Errors
    /// The tenant has no memory for it.
    pub(super) fn room(&mut self, announced: usize) -> Result<&mut [u8], OverLimit> {
        if self.buffer.len() - self.length < READ_BYTES {
            let missing = announced.saturating_sub(self.length);
            let wanted = self.length + missing.clamp(READ_BYTES, TURN_BYTES);
            self.charge.set(wanted)?;
            self.buffer.reserve_exact(wanted - self.buffer.len());
            self.buffer.resize(wanted, 0);
        }
        Ok(&mut self.buffer[self.length..])
    }

    /// So many bytes were read into the room.
    pub(super) fn add(&mut self, count: usize) {
        self.length += count;
    }

    /// Charges what is decoded from a message: `length` bytes at most. That of a small one counts as part of the room.
    ///
    /// # Errors
    /// The tenant has no memory for it.
    pub(super) fn charge_decoded(&self, length: usize) -> Result<Option<Charge>, OverLimit> {
        if length <= READ_BYTES {
            return Ok(None);
        }
        let ledger = self.charge.ledger();
        ledger.charge(Item::Executions, length).map(Some)
    }

    /// Removes messages that were handled, and the room that a long one has left.
    pub(super) fn remove(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        self.buffer.copy_within(count..self.length, 0);
        self.length -= count;
        if self.buffer.len() > self.length + TURN_BYTES {
            self.buffer.truncate(self.length);
            self.buffer.shrink_to_fit();
        }
        self.settle();
    }

    /// Gives back what it holds, unless a part of a message has arrived.
    pub(super) fn rest(&mut self) {
        if self.length == 0 {
            self.clear();
        }
    }

    pub(super) fn clear(&mut self) {
        self.buffer = Vec::new();
        self.length = 0;
        self.settle();
    }

    fn settle(&mut self) {
        // No more than before.
        let _ = self.charge.set(self.buffer.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ledger::Budget;

    fn received(budget: u64) -> Received {
        let ledger = Budget::new(budget).whole();
        Received::new(ledger.charge(Item::Executions, 0).unwrap())
    }

    /// Reads so many bytes of a message of `announced` bytes.
    fn read(received: &mut Received, announced: usize, mut count: usize) {
        while count > 0 {
            let room = received.room(announced).unwrap();
            let read = count.min(room.len());
            room[..read].fill(b'x');
            received.add(read);
            count -= read;
        }
    }

    fn assert_charged(received: &Received) {
        assert_eq!(received.charge.bytes(), received.buffer.len());
        assert_eq!(received.buffer.capacity(), received.buffer.len());
    }

    #[test]
    fn single_bytes_of_a_long_message_need_no_new_room() {
        let mut received = received(1 << 30);
        for _ in 0..10_000 {
            read(&mut received, 60 << 20, 1);
            assert_eq!(received.buffer.len(), TURN_BYTES);
        }
        assert_charged(&received);
        assert_eq!(received.bytes(), [b'x'; 10_000]);
    }

    #[test]
    fn the_room_of_a_long_message_is_given_back() {
        let mut received = received(1 << 30);
        read(&mut received, 20 << 20, 20 << 20);
        read(&mut received, 0, 5);
        assert_charged(&received);
        received.remove(20 << 20);
        assert_charged(&received);
        assert_eq!(received.bytes(), b"xxxxx");
        assert!(received.buffer.len() <= TURN_BYTES);
        received.rest();
        assert_eq!(received.bytes(), b"xxxxx");
        received.remove(5);
        received.rest();
        assert_eq!(received.charge.bytes(), 0);
        assert_eq!(received.buffer.capacity(), 0);
    }

    #[test]
    fn no_more_is_read_than_the_tenant_has_memory_for() {
        // An item may have half of the budget.
        let mut received = received(8 << 20);
        read(&mut received, 3 << 20, 3 << 20);
        assert!(received.charge_decoded(3 << 20).is_err());
        assert!(received.charge_decoded(READ_BYTES).is_ok());
        assert!(received.charge_decoded(READ_BYTES + 1).unwrap().is_some());
        read(&mut received, 20 << 20, 1 << 20);
        assert!(received.room(20 << 20).is_err());
        assert_charged(&received);
    }
}
