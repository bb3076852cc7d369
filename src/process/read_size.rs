//! How much output moves at once.

use std::sync::Arc;

use crate::limits::ledger::{Charge, Item, Ledger};

/// What the event of a read may take: it is charged before the read, as a part of [`ReadSize::USES`].
pub const EVENT_BYTES: usize = ReadSize::MAX * (ReadSize::USES - 1);

/// The size of a read of output. It grows to the capacity of a pipe for a command that writes much, if the
/// tenant has room for what its client then may not take: 1,000 quiet commands hold 4 MB of buffers
/// and not 64 MB.
pub(super) struct ReadSize {
    /// `None` if no client gets the output.
    ledger: Option<Arc<Ledger>>,
    charge: Option<Charge>,
    bytes: usize,
}

impl ReadSize {
    const MIN: usize = 4 * 1024;
    const MAX: usize = 64 * 1024;

    /// What a read takes as a multiple of its size: the bytes, and their event, in which JSON may write
    /// one byte as six.
    const USES: usize = 8;

    /// For output that a client gets.
    pub(super) fn new(ledger: &Arc<Ledger>) -> Self {
        Self {
            ledger: Some(Arc::clone(ledger)),
            ..Self::uncharged()
        }
    }

    /// For output that only goes to the log.
    pub(super) fn uncharged() -> Self {
        Self {
            ledger: None,
            charge: None,
            bytes: Self::MIN,
        }
    }

    /// The size of the next read.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Notes how many bytes a read gave. Returns whether the size has grown.
    pub(super) fn note(&mut self, count: usize) -> bool {
        if count < self.bytes || self.bytes == Self::MAX {
            return false;
        }
        if let Some(ledger) = &self.ledger {
            let charge = ledger.charge(Item::Responses, Self::MAX * Self::USES);
            self.charge = charge.ok();
        }
        if self.ledger.is_none() || self.charge.is_some() {
            self.bytes = Self::MAX;
        }
        self.bytes == Self::MAX
    }
}
