//! What each tenant holds of the server's memory.
//!
//! Whatever has a size that a client decides, or waits for a client, is charged to the [`Ledger`] of its
//! tenant before the memory is taken: a sandbox, the machine in dedicated mode, the operator, or the
//! address that connections without a token come from. All ledgers share one [`Budget`].
//!
//! A tenant may hold as much as all of them together leave free: that is its share. So one alone gets at
//! most half of the budget, `n` of them get an `n + 1`th each, and there is always as much left for the
//! next one, without a number of tenants or a fixed share. In the same way an [`Item`] may hold as much as
//! the tenant leaves of its share, so that unread responses do not keep it from starting a command. What is
//! beyond a share is refused ([`OverLimit`]), and to nobody else. Where a refusal is impossible, such as in
//! the middle of a response, the tenant gets small buffers.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::error::{Error, Kind};

/// What memory is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Item {
    /// The head of a request that has not arrived whole.
    Heads,
    /// The body of a request, and what is parsed from it.
    Bodies,
    /// Input that a command was given and has not read.
    Stdin,
    /// The texts of commands that run or are remembered.
    Commands,
    /// Parts of responses that clients have not taken.
    Responses,
}

impl Item {
    const COUNT: usize = 5;

    fn name(self) -> &'static str {
        match self {
            Self::Heads => "heads of requests",
            Self::Bodies => "bodies of requests",
            Self::Stdin => "stdin that commands have not read",
            Self::Commands => "the texts of commands",
            Self::Responses => "responses that clients have not read",
        }
    }
}

/// A charge beyond a tenant's share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverLimit {
    item: Item,
    bytes: u64,
    held: u64,
}

impl fmt::Display for OverLimit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { item, bytes, held } = self;
        write!(
            formatter,
            "there is no room for {bytes} bytes of {}: {held} bytes of the server's memory are held for this \
             tenant; read responses, let commands read their stdin, delete processes, or try again later",
            item.name()
        )
    }
}

impl From<OverLimit> for Error {
    fn from(error: OverLimit) -> Self {
        Self::new(Kind::OverLimit, error.to_string())
    }
}

/// The memory that all tenants share.
pub struct Budget {
    bytes: u64,
    held: AtomicU64,
}

impl Budget {
    /// A budget of this many bytes.
    pub fn new(bytes: u64) -> Arc<Self> {
        let held = AtomicU64::new(0);
        Arc::new(Self { bytes, held })
    }

    /// A ledger for one of many tenants.
    pub fn ledger(self: &Arc<Self>) -> Arc<Ledger> {
        self.open(false)
    }

    /// A ledger that may hold all that is free: for the operator, and for a machine that is one sandbox.
    pub fn whole(self: &Arc<Self>) -> Arc<Ledger> {
        self.open(true)
    }

    fn open(self: &Arc<Self>, is_whole: bool) -> Arc<Ledger> {
        Arc::new(Ledger {
            budget: Arc::clone(self),
            is_whole,
            held: AtomicU64::new(0),
            items: Default::default(),
            connections: AtomicUsize::new(0),
        })
    }
}

/// What one tenant holds.
pub struct Ledger {
    budget: Arc<Budget>,
    is_whole: bool,
    held: AtomicU64,
    /// The same by item.
    items: [AtomicU64; Item::COUNT],
    /// Its connections, which `http` counts.
    pub connections: AtomicUsize,
}

impl Ledger {
    /// Charges this many bytes until the value is dropped.
    ///
    /// # Errors
    /// The tenant's share is smaller.
    pub fn charge(self: &Arc<Self>, item: Item, bytes: usize) -> Result<Charge, OverLimit> {
        let mut charge = Charge {
            ledger: Arc::clone(self),
            item,
            bytes: 0,
        };
        charge.set(bytes)?;
        Ok(charge)
    }

    /// Charges the largest size that the share allows: `wanted`, or less by halves, and `least` in any
    /// case.
    pub fn charge_up_to(self: &Arc<Self>, item: Item, wanted: usize, least: usize) -> Charge {
        let mut bytes = wanted;
        while bytes > least {
            if let Ok(charge) = self.charge(item, bytes) {
                return charge;
            }
            bytes /= 2;
        }
        let charge = Charge {
            ledger: Arc::clone(self),
            item,
            bytes: least as u64,
        };
        self.take(item, charge.bytes);
        charge
    }

    /// Returns whether item and tenant are within their shares with these bytes.
    fn take(&self, item: Item, bytes: u64) -> bool {
        let [of_item, own, all] = self
            .counters(item)
            .map(|counter| counter.fetch_add(bytes, Ordering::Relaxed) + bytes);
        let free = self.budget.bytes.checked_sub(all);
        let left = if self.is_whole {
            free
        } else {
            free.and_then(|free| free.checked_sub(own))
        };
        left.is_some_and(|left| of_item <= left)
    }

    fn give_back(&self, item: Item, bytes: u64) {
        for counter in self.counters(item) {
            counter.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// What the item, the tenant and all tenants hold.
    fn counters(&self, item: Item) -> [&AtomicU64; 3] {
        [&self.items[item as usize], &self.held, &self.budget.held]
    }
}

/// Bytes that are charged to a ledger, given back on drop.
#[must_use]
pub struct Charge {
    ledger: Arc<Ledger>,
    item: Item,
    bytes: u64,
}

impl Charge {
    /// The ledger.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// The bytes.
    pub fn bytes(&self) -> usize {
        usize::try_from(self.bytes).unwrap_or(usize::MAX)
    }

    /// Changes the charge.
    ///
    /// # Errors
    /// The tenant's share is smaller. The charge stays as it was.
    pub fn set(&mut self, bytes: usize) -> Result<(), OverLimit> {
        let bytes = bytes as u64;
        let more = bytes.saturating_sub(self.bytes);
        if more > 0 && !self.ledger.take(self.item, more) {
            self.ledger.give_back(self.item, more);
            return Err(OverLimit {
                item: self.item,
                bytes,
                held: self.ledger.held.load(Ordering::Relaxed),
            });
        }
        let less = self.bytes.saturating_sub(bytes);
        self.ledger.give_back(self.item, less);
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.ledger.give_back(self.item, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(ledger: &Arc<Ledger>, item: Item) -> Vec<Charge> {
        std::iter::from_fn(|| ledger.charge(item, 1).ok()).collect()
    }

    #[test]
    fn a_tenant_and_an_item_leave_as_much_as_they_hold() {
        let budget = Budget::new(900);
        let tenants: Vec<_> = (0..3).map(|_| budget.ledger()).collect();
        let first = take_all(&tenants[0], Item::Bodies);
        assert_eq!(first.len(), 300);
        let more = take_all(&tenants[0], Item::Stdin);
        assert_eq!(more.len(), 100);
        assert_eq!(take_all(&tenants[1], Item::Bodies).len(), 166);
        drop(more);
        let second = take_all(&tenants[1], Item::Bodies);
        assert_eq!(second.len(), 200);
        assert!(tenants[0].charge(Item::Bodies, 1).is_err());
        // The operator may have what is free.
        let operator = budget.whole();
        assert!(operator.charge(Item::Bodies, 201).is_err());
        assert!(operator.charge(Item::Bodies, 200).is_ok());
        drop((first, second));
        assert_eq!(budget.held.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_charge_that_is_refused_stays_as_it_was() {
        let budget = Budget::new(100);
        let ledger = budget.whole();
        let mut charge = ledger.charge(Item::Stdin, 40).unwrap();
        let refused = charge.set(51).unwrap_err();
        assert_eq!((refused.bytes, refused.held), (51, 40));
        assert_eq!(charge.bytes(), 40);
        charge.set(50).unwrap();
        charge.set(10).unwrap();
        assert_eq!(budget.held.load(Ordering::Relaxed), 10);
    }

    #[test]
    fn what_cannot_be_refused_gets_less() {
        let budget = Budget::new(1000);
        let ledger = budget.whole();
        let charges = [(); 3].map(|()| ledger.charge_up_to(Item::Responses, 1000, 30));
        assert_eq!(charges.map(|charge| charge.bytes()), [500, 30, 30]);
        assert_eq!(budget.held.load(Ordering::Relaxed), 0);
    }
}
