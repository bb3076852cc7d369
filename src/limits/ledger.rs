//! What each tenant holds of the server's memory, and what it uses of its time.
//!
//! Whatever has a size that a client decides, or waits for a client, is charged to the [`Ledger`] of its
//! tenant before the memory is taken: a sandbox, the machine in dedicated mode, the operator, or the
//! address that connections without a token come from. All ledgers share one [`Budget`].
//!
//! A tenant may hold as much as all of them together leave free of seven eighths of the budget: that is its
//! share. So one alone gets at most half of that, and `n` that grow together get an `n + 1`th each, without
//! a number of tenants or a fixed share. In the same way an [`Item`] may hold as much as the tenant leaves of
//! its share, so that unread responses do not keep it from starting a command. The last eighth is for those
//! who come late: half of it for what every tenant may hold in any case ([`Budget::floor`]), and half for
//! the operator. What is beyond a share is refused ([`OverLimit`]), and to nobody else. Where a refusal is
//! impossible, such as in the middle of a response, the tenant gets small buffers.

use std::collections::HashMap;
use std::fmt;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::error::{Error, Kind};
use crate::threads::lock::{Mutex, lock};
use crate::threads::priority::BackgroundWork;

/// What memory is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Item {
    /// The head of a request that has not arrived whole, or of a response of a server inside.
    Heads,
    /// The body of a request, and what is parsed from it.
    Bodies,
    /// Input that a command was given and has not read.
    Stdin,
    /// The texts of commands that run or are remembered.
    Commands,
    /// Parts of responses that clients have not taken.
    Responses,
    /// Directories that are watched, and events that clients have not fetched.
    Watches,
    /// Code that waits for its turn, and events of executions.
    Executions,
}

impl Item {
    const COUNT: usize = 7;

    fn name(self) -> &'static str {
        match self {
            Self::Heads => "heads of requests and responses",
            Self::Bodies => "bodies of requests",
            Self::Stdin => "stdin that commands have not read",
            Self::Commands => "the texts of commands",
            Self::Responses => "responses that clients have not read",
            Self::Watches => "watches",
            Self::Executions => "executions",
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

    /// What every tenant may hold while there is any room: enough for small commands and requests.
    fn floor(&self) -> u64 {
        (self.bytes / 1024).min(1 << 20)
    }

    /// A ledger for one of many tenants.
    pub fn ledger(self: &Arc<Self>) -> Arc<Ledger> {
        self.open(false)
    }

    /// A ledger of which each item may hold as much as is free: for the operator, and for a machine that is one
    /// sandbox.
    pub fn whole(self: &Arc<Self>) -> Arc<Ledger> {
        self.open(true)
    }

    fn open(self: &Arc<Self>, is_whole: bool) -> Arc<Ledger> {
        Arc::new(Ledger {
            budget: Arc::clone(self),
            is_whole,
            held: AtomicU64::new(0),
            items: Default::default(),
            connections: Connections::default(),
            work: Arc::default(),
            look_ups: Arc::default(),
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
    /// Its connections, which `http` adds and removes.
    pub connections: Connections,
    /// The processor time that the server's threads use for it.
    pub work: Arc<BackgroundWork>,
    /// The names that are being looked up for it. Each takes a thread, which nothing ends early: not the end of a run either.
    pub look_ups: Arc<AtomicUsize>,
}

/// The open connections of a tenant.
#[derive(Default)]
pub struct Connections(Mutex<OpenConnections>);

#[derive(Default)]
struct OpenConnections {
    /// By number, and whether they wait for the end of the tenant.
    sockets: HashMap<usize, (Arc<TcpStream>, bool)>,
    /// Whether the tenant is gone: it gets no more.
    is_over: bool,
}

impl Connections {
    /// The number of connections.
    pub fn count(&self) -> usize {
        lock(&self.0).sockets.len()
    }

    /// Adds one. False if the tenant is gone.
    pub fn add(&self, number: usize, socket: &Arc<TcpStream>) -> bool {
        let mut open = lock(&self.0);
        if !open.is_over {
            let socket = (Arc::clone(socket), false);
            open.sockets.insert(number, socket);
        }
        !open.is_over
    }

    pub fn remove(&self, number: usize) {
        lock(&self.0).sockets.remove(&number);
    }

    /// Notes that a connection waits for the end of the tenant.
    pub fn spare(&self, number: usize) {
        if let Some((_, waits)) = lock(&self.0).sockets.get_mut(&number) {
            *waits = true;
        }
    }

    /// The tenant is gone: those that there are read their last answers, and no more come. Returns whether there are any.
    pub fn close(&self) -> bool {
        let mut open = lock(&self.0);
        open.is_over = true;
        !open.sockets.is_empty()
    }

    /// Ends all connections, those too that wait for the end of the tenant if that `is_over`. Their threads find out.
    pub fn shut_down(&self, is_over: bool) {
        for (socket, waits) in lock(&self.0).sockets.values() {
            if is_over || !waits {
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Ledger {
    /// Whether it is not for one of many tenants.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

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
        self.take_anyway(item, charge.bytes);
        charge
    }

    /// Takes the bytes if item and tenant are within their shares with them. A refusal changes nothing that
    /// another tenant sees.
    fn take(&self, item: Item, bytes: u64) -> bool {
        let [of_item, own] = self
            .counters(item)
            .map(|counter| counter.fetch_add(bytes, Ordering::Relaxed) + bytes);
        let is_granted = |all: u64| {
            let Budget { bytes, .. } = *self.budget;
            let (most, own) = match self {
                ledger if ledger.is_whole => (bytes, 0),
                ledger if own <= ledger.budget.floor() => return all <= bytes - bytes / 16,
                _ => (bytes - bytes / 8, own),
            };
            let left = most.checked_sub(all).and_then(|free| free.checked_sub(own));
            left.is_some_and(|left| of_item <= left)
        };
        let more = |all: u64| Some(all + bytes).filter(|all| is_granted(*all));
        let all = &self.budget.held;
        let is_taken = all
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .is_ok();
        if !is_taken {
            self.give_back_own(item, bytes);
        }
        is_taken
    }

    /// Takes the bytes whatever the shares are.
    fn take_anyway(&self, item: Item, bytes: u64) {
        for counter in self.counters(item) {
            counter.fetch_add(bytes, Ordering::Relaxed);
        }
        self.budget.held.fetch_add(bytes, Ordering::Relaxed);
    }

    fn give_back(&self, item: Item, bytes: u64) {
        self.give_back_own(item, bytes);
        self.budget.held.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn give_back_own(&self, item: Item, bytes: u64) {
        for counter in self.counters(item) {
            counter.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// What the item and the tenant hold.
    fn counters(&self, item: Item) -> [&AtomicU64; 2] {
        [&self.items[item as usize], &self.held]
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
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

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
        let budget = Budget::new(1028);
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
        assert!(operator.charge(Item::Bodies, 265).is_err());
        assert!(operator.charge(Item::Bodies, 264).is_ok());
        drop((first, second));
        assert_eq!(budget.held.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn tenants_that_hold_what_they_can_leave_a_little_for_each_and_for_the_operator() {
        let budget = Budget::new(256 << 10);
        let greedy: Vec<_> = (0..40)
            .map(|_| {
                let ledger = budget.ledger();
                [Item::Stdin, Item::Commands, Item::Responses].map(|item| {
                    let mut bytes = 64 << 10;
                    while bytes > 0 && ledger.charge(item, bytes).is_err() {
                        bytes -= 1;
                    }
                    ledger.charge(item, bytes).unwrap()
                })
            })
            .collect();
        let late = budget.ledger();
        assert!(late.charge(Item::Bodies, 64 << 10).is_err());
        assert!(late.charge(Item::Bodies, 256).is_ok());
        let operator = budget.whole();
        assert!(operator.charge(Item::Bodies, (256 << 10) / 64).is_ok());
        drop(greedy);
        assert_eq!(budget.held.load(Ordering::Relaxed), 0);
        assert!(late.charge(Item::Bodies, 64 << 10).is_ok());
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
