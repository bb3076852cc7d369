//! The open connections: how many there are, and who holds them.
//!
//! Until a request has shown a token, a connection belongs to its peer: to the client's address, or on a host to the
//! client's user if the client runs on this machine. Then it belongs to the operator or to a tenant. Peers are not
//! authenticated, so they never keep others out: if a peer exceeds its share, its oldest connection is closed. When all
//! slots are taken, or there is no thread, descriptor or memory for a new connection, the oldest connection of all
//! peers is closed. A tenant may have a quarter of the slots, and no more than it leaves free of those for tenants;
//! further connections are refused.
//!
//! Every step is a search in a sorted table, and at most one move within it: clients open a connection per command.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::codec::table::Table;
use crate::error::{Error, Kind};
use crate::limits::ledger::{Budget, Ledger};
use crate::sys;
use crate::threads::lock::{Mutex, lock};

/// The least share of a user of this machine, in connections without a token.
const LEAST_LOCAL: usize = 16;

/// Connections that a tenant may always hold while any slot for tenants is free.
const LEAST_TENANT: usize = 4;

/// The least number of slots that tenants cannot take.
const LEAST_RESERVED: usize = 8;

/// How long a connection that was accepted without room for it may take to show a token.
const TIME_FOR_TOKEN: Duration = Duration::from_millis(250);

/// How long a connection is kept at least before it is closed to make room: a client with a token shows it at once.
const LEAST_TIME: Duration = Duration::from_millis(50);

/// Where a connection comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Peer {
    /// A user of this machine; `None` if the kernel does not tell which.
    User(Option<u32>),
    /// A remote address. All clients behind one proxy share it.
    Address(IpAddr),
}

impl Peer {
    /// The peer at an address. A client with one IPv6 address usually has 2^64 of them, so a /64 network is one peer.
    pub fn at(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = address.to_bits() >> 64 << 64;
                IpAddr::V6(Ipv6Addr::from_bits(network))
            }
            address @ IpAddr::V4(_) => address,
        })
    }
}

/// Whether a connection was closed to make room for another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// The oldest connection was closed.
    Done,
    /// The oldest connection still has this long to show a token.
    Early(Duration),
    /// All older connections have shown a token.
    Nobody,
}

/// Whom a connection belongs to.
enum Owner {
    Peer,
    Operator,
    Tenant(Arc<Ledger>),
}

/// All slots. Clones share them.
#[derive(Clone)]
pub struct ConnectionSlots(Arc<Inner>);

struct Inner {
    /// The limit of connections.
    all: usize,
    budget: Arc<Budget>,
    taken: AtomicUsize,
    /// How many of the taken slots belong to peers.
    waiting: AtomicUsize,
    next: AtomicUsize,
    table: Mutex<SlotTable>,
}

/// Numbers of connections on which a token was shown.
#[derive(Clone, Copy, Default)]
struct Held {
    operator: usize,
    /// Of all tenants together.
    tenants: usize,
}

#[derive(Default)]
struct SlotTable {
    held: Held,
    /// The connections of peers by number, the oldest first.
    waiting: Table<usize, Waiting>,
    peers: HashMap<Peer, Holding>,
}

/// A connection of a peer.
struct Waiting {
    peer: Peer,
    socket: Arc<TcpStream>,
    /// When a thread began to serve it; `None` while it waits for a thread.
    since: Option<Instant>,
}

/// What one peer holds.
struct Holding {
    /// The numbers of its connections, in order.
    slots: Vec<usize>,
    ledger: Arc<Ledger>,
}

impl SlotTable {
    fn taken(&self) -> usize {
        self.held.operator + self.held.tenants + self.waiting.len()
    }

    /// Removes a connection of a peer; `None` if it does not belong to a peer, or is not in the table any more.
    fn leave(&mut self, number: usize) -> Option<Arc<TcpStream>> {
        let Waiting { peer, socket, .. } = self.waiting.remove(&number)?;
        if let Some(holding) = self.peers.get_mut(&peer) {
            holding.slots.retain(|slot| *slot != number);
            if holding.slots.is_empty() {
                self.peers.remove(&peer);
            }
        }
        Some(socket)
    }

    /// Adds a connection of a peer, and returns the peer's ledger, which is a new one if it has no other connection.
    fn wait(
        &mut self,
        number: usize,
        waiting: Waiting,
        new_ledger: impl FnOnce() -> Arc<Ledger>,
    ) -> Arc<Ledger> {
        let holding = self.peers.entry(waiting.peer);
        self.waiting.insert(number, waiting);
        let holding = holding.or_insert_with(|| Holding {
            slots: Vec::new(),
            ledger: new_ledger(),
        });
        let place = holding.slots.partition_point(|slot| *slot < number);
        holding.slots.insert(place, number);
        Arc::clone(&holding.ledger)
    }

    fn evict(&mut self, number: usize) {
        if let Some(socket) = self.leave(number) {
            // This wakes its thread, which then ends.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl ConnectionSlots {
    /// At most `all` connections. What peers hold is charged to ledgers of `budget`.
    pub fn new(all: usize, budget: Arc<Budget>) -> Self {
        Self(Arc::new(Inner {
            all,
            budget,
            taken: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            table: Mutex::default(),
        }))
    }

    /// The limit of simultaneous connections.
    pub fn most(&self) -> usize {
        self.0.all
    }

    /// The number of open connections.
    pub fn count(&self) -> usize {
        self.0.taken.load(Ordering::Relaxed)
    }

    /// Whether so few connections belong to peers that it does not matter which peer the next one belongs to.
    pub fn is_quiet(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed) < LEAST_LOCAL
    }

    /// Gives a new connection a slot; `None` if every slot has an owner that has shown a token.
    pub fn take(&self, peer: Peer, socket: &Arc<TcpStream>) -> Option<ConnectionSlot> {
        self.take_charging(peer, socket, None)
    }

    /// As [`ConnectionSlots::take`]. What the connection holds is charged to `ledger`, if there is one.
    pub fn take_charging(
        &self,
        peer: Peer,
        socket: &Arc<TcpStream>,
        ledger: Option<Arc<Ledger>>,
    ) -> Option<ConnectionSlot> {
        let inner = &self.0;
        let share = match peer {
            // On a host, root is not a sandbox.
            Peer::Address(_) | Peer::User(Some(0)) => inner.all / 2,
            Peer::User(_) => (inner.all / 16).max(LEAST_LOCAL),
        };
        let number = inner.next.fetch_add(1, Ordering::Relaxed);
        let mut table = lock(&inner.table);
        let own = table.peers.get(&peer).map(|holding| &holding.slots);
        let own_oldest = own
            .filter(|slots| slots.len() >= share.max(1))
            .and_then(|slots| slots.first());
        if let Some(&oldest) = own_oldest {
            table.evict(oldest);
        } else if table.taken() >= inner.all {
            let (&oldest, _) = table.waiting.first()?;
            table.evict(oldest);
        }
        let since = Instant::now();
        let waiting = Waiting {
            peer,
            socket: Arc::clone(socket),
            since: Some(since),
        };
        let of_peer = table.wait(number, waiting, || inner.budget.ledger());
        let ledger = ledger.unwrap_or(of_peer);
        inner.note(&table);
        Some(ConnectionSlot {
            slots: self.clone(),
            number,
            socket: Arc::clone(socket),
            peer,
            owner: Owner::Peer,
            is_unknown: peer == Peer::User(None),
            since,
            deadline: None,
            of_peer: Arc::clone(&ledger),
            ledger,
        })
    }

    /// Closes the oldest connection of all peers to make room for the connection with the number `newest`. The thread
    /// of the closed connection may take a moment to end.
    pub fn make_room(&self, newest: usize) -> Eviction {
        let mut table = lock(&self.0.table);
        let left = |waiting: &Waiting| {
            let age = waiting.since.as_ref().map(Instant::elapsed);
            LEAST_TIME.saturating_sub(age.unwrap_or_default())
        };
        let all = table.waiting.iter();
        let older = all.take_while(|(number, _)| **number < newest);
        let mut first = None;
        for (&number, waiting) in older {
            let left = left(waiting);
            if first.is_none_or(|(_, least)| left < least) {
                first = Some((number, left));
            }
            if left.is_zero() {
                break;
            }
        }
        match first {
            None => return Eviction::Nobody,
            Some((_, left)) if !left.is_zero() => return Eviction::Early(left),
            Some((number, _)) => table.evict(number),
        }
        self.0.note(&table);
        Eviction::Done
    }
}

impl Inner {
    /// Slots that tenants cannot take.
    fn reserved(&self) -> usize {
        (self.all / 16).max(LEAST_RESERVED).min(self.all / 4)
    }

    fn note(&self, table: &SlotTable) {
        self.taken.store(table.taken(), Ordering::Relaxed);
        self.waiting.store(table.waiting.len(), Ordering::Relaxed);
    }
}

/// The slot of one connection. Dropping it frees the slot.
pub struct ConnectionSlot {
    slots: ConnectionSlots,
    number: usize,
    socket: Arc<TcpStream>,
    peer: Peer,
    owner: Owner,
    /// Whether the peer is a user of this machine, but not known which one.
    is_unknown: bool,
    /// Since when it has had time to show a token.
    since: Instant,
    /// When the connection is closed if it has not shown a token; `None` without a limit.
    deadline: Option<Instant>,
    ledger: Arc<Ledger>,
    /// That of the peer.
    of_peer: Arc<Ledger>,
}

impl ConnectionSlot {
    /// Limits how long the connection may take to show a token, because there was no room when it was accepted. The
    /// time runs from when a thread [begins](Self::begin) to serve it. Returns the connection's number.
    pub fn limit_time_for_token(&mut self) -> usize {
        self.set_since(None);
        self.deadline = Some(Instant::now());
        self.number
    }

    /// Notes that a thread begins to serve the connection: from now on its time to show a token runs, if that is
    /// limited.
    pub fn begin(&mut self) {
        if let Some(deadline) = &mut self.deadline {
            let now = Instant::now();
            *deadline = now + TIME_FOR_TOKEN;
            self.since = now;
            self.set_since(Some(now));
        }
    }

    fn set_since(&self, since: Option<Instant>) {
        if let Some(waiting) = lock(&self.slots.0.table).waiting.get_mut(&self.number) {
            waiting.since = since;
        }
    }

    /// When the connection is closed unless it shows a token before; `None` without a limit.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The ledger that is charged for what the connection holds outside of a request.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// The ledger that is charged for a request before it shows a token. A proxy may send requests of different clients over one
    /// connection, so whoever's token it showed before has nothing to do with it.
    pub fn peer_ledger(&self) -> &Arc<Ledger> {
        &self.of_peer
    }

    /// The ledger for a large head. If the peer's user is not known yet, this asks the kernel for the user, and `find`
    /// for the user's ledger. If there is none, it is the [`peer_ledger`](Self::peer_ledger).
    pub fn ledger_for_much(&self, find: impl Fn(u32) -> Option<Arc<Ledger>>) -> Arc<Ledger> {
        let is_peers = matches!(self.owner, Owner::Peer);
        let found = (is_peers && self.is_unknown).then(|| user_at(&self.socket));
        let found = found.flatten().and_then(find);
        found.unwrap_or_else(|| Arc::clone(&self.of_peer))
    }

    /// Who is at the other end.
    pub fn far_end(&self) -> FarEnd {
        FarEnd {
            peer: self.peer,
            socket: Arc::clone(&self.socket),
        }
    }

    /// Gives the connection to the operator, and charges `ledger`, which is the operator's.
    ///
    /// # Errors
    /// `OverLimit` if too few slots are left for clients without a token, or the connection was closed. Its owner
    /// stays.
    pub fn give_to_operator(&mut self, ledger: &Arc<Ledger>) -> Result<(), Error> {
        if matches!(self.owner, Owner::Operator) {
            return Ok(());
        }
        self.give_to(Owner::Operator, ledger, |inner, others| {
            // Some slots stay free for clients that have not shown a token yet.
            others.operator + others.tenants < inner.all - inner.reserved() / 2
        })
    }

    /// Gives the connection to the tenant that has this ledger.
    ///
    /// # Errors
    /// `OverLimit` if the tenant has its share, tenants have all of theirs, or the connection was closed; `NotFound` if the
    /// tenant is gone. Its owner stays.
    pub fn give_to_tenant(&mut self, ledger: &Arc<Ledger>) -> Result<(), Error> {
        if matches!(&self.owner, Owner::Tenant(own) if Arc::ptr_eq(own, ledger)) {
            return Ok(());
        }
        self.give_to(
            Owner::Tenant(Arc::clone(ledger)),
            ledger,
            |inner, others| {
                let own = ledger.connections.count();
                let free = (inner.all - inner.reserved()).saturating_sub(others.tenants);
                let share = free.max(LEAST_TENANT).min(inner.all.div_ceil(4));
                free > 0 && own < share
            },
        )
    }

    /// Gives the connection back to its peer, because the request that is answered showed no token. So whoever holds it up
    /// counts for nobody who has one, and can be closed to make room.
    pub fn give_back(&mut self) {
        if matches!(self.owner, Owner::Peer) {
            return;
        }
        let inner = &self.slots.0;
        let mut table = lock(&inner.table);
        self.leave(&mut table);
        let waiting = Waiting {
            peer: self.peer,
            socket: Arc::clone(&self.socket),
            // Its time does not begin again: it would never be over.
            since: Some(self.since),
        };
        table.wait(self.number, waiting, || Arc::clone(&self.of_peer));
        inner.note(&table);
        drop(table);
        self.owner = Owner::Peer;
        self.ledger = Arc::clone(&self.of_peer);
    }

    /// Notes that the client waits for the end of the tenant that it belongs to.
    pub fn waits_for_end(&self) {
        if let Owner::Tenant(ledger) = &self.owner {
            ledger.connections.spare(self.number);
        }
    }

    fn give_to(
        &mut self,
        owner: Owner,
        ledger: &Arc<Ledger>,
        has_room: impl FnOnce(&Inner, &Held) -> bool,
    ) -> Result<(), Error> {
        let inner = &self.slots.0;
        let mut table = lock(&inner.table);
        let mut others = table.held;
        match &self.owner {
            Owner::Peer => {}
            Owner::Operator => others.operator -= 1,
            Owner::Tenant(_) => others.tenants -= 1,
        }
        if !has_room(inner, &others) {
            return Err(Error::new(
                Kind::OverLimit,
                "there is no room for more connections of this tenant; close idle ones, or try again later",
            ));
        }
        if let Owner::Tenant(ledger) = &owner
            && !ledger.connections.add(self.number, &self.socket)
        {
            return Err(Error::new(Kind::NotFound, "the sandbox is gone"));
        }
        if !self.leave(&mut table) {
            if let Owner::Tenant(ledger) = &owner {
                ledger.connections.remove(self.number);
            }
            let text = "the server closed the connection to make room for newer ones";
            return Err(Error::new(Kind::OverLimit, text));
        }
        match &owner {
            Owner::Peer => {}
            Owner::Operator => table.held.operator += 1,
            Owner::Tenant(_) => table.held.tenants += 1,
        }
        inner.note(&table);
        drop(table);
        self.owner = owner;
        self.deadline = None;
        self.ledger = Arc::clone(ledger);
        Ok(())
    }

    /// Takes the connection out of the table. False if it belonged to a peer and was closed to make room.
    fn leave(&self, table: &mut SlotTable) -> bool {
        match &self.owner {
            Owner::Peer => return table.leave(self.number).is_some(),
            Owner::Operator => table.held.operator -= 1,
            Owner::Tenant(ledger) => {
                table.held.tenants -= 1;
                ledger.connections.remove(self.number);
            }
        }
        true
    }
}

#[cfg(test)]
impl ConnectionSlot {
    /// The slot of a connection that is alone in its table.
    pub fn for_test(socket: &Arc<TcpStream>) -> Self {
        let slots = ConnectionSlots::new(1, Budget::new(1 << 30));
        slots.take(Peer::User(None), socket).unwrap()
    }
}

/// The other end of a connection.
pub struct FarEnd {
    peer: Peer,
    socket: Arc<TcpStream>,
}

impl FarEnd {
    /// The ledger of the tenant whose program it is, if it is one: `find` knows the ledgers of users.
    pub fn tenant(&self, find: impl Fn(u32) -> Option<Arc<Ledger>>) -> Option<Arc<Ledger>> {
        let Peer::User(user) = self.peer else {
            return None;
        };
        user.or_else(|| user_at(&self.socket)).and_then(find)
    }
}

/// Asks the kernel whose the other end of a connection is.
fn user_at(socket: &TcpStream) -> Option<u32> {
    sys::tcp_peer_uid(socket.local_addr().ok()?, socket.peer_addr().ok()?)
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let inner = &self.slots.0;
        let mut table = lock(&inner.table);
        self.leave(&mut table);
        inner.note(&table);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const REMOTE: Peer = Peer::Address(IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)));

    fn slots(all: usize) -> ConnectionSlots {
        ConnectionSlots::new(all, Budget::new(1 << 20))
    }

    fn socket() -> Arc<TcpStream> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Arc::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap())
    }

    fn take(slots: &ConnectionSlots, peer: Peer, count: usize) -> Vec<ConnectionSlot> {
        let socket = socket();
        let take = |_| slots.take(peer, &socket).unwrap();
        (0..count).map(take).collect()
    }

    fn is_waiting(slots: &ConnectionSlots, slot: &ConnectionSlot) -> bool {
        lock(&slots.0.table).waiting.get(&slot.number).is_some()
    }

    #[test]
    fn a_local_user_beyond_its_share_loses_its_oldest() {
        let slots = slots(256);
        let other = take(&slots, Peer::User(Some(1)), 1);
        let held = take(&slots, Peer::User(Some(7)), 20);
        assert_eq!(slots.count(), 17);
        assert!(held[..4].iter().all(|slot| !is_waiting(&slots, slot)));
        assert!(held[4..].iter().all(|slot| is_waiting(&slots, slot)));
        assert!(is_waiting(&slots, &other[0]));
        drop(held);
        assert_eq!(slots.count(), 1);
        assert_eq!(lock(&slots.0.table).peers.len(), 1);
    }

    #[test]
    fn the_oldest_of_all_peers_makes_room_when_all_slots_are_taken() {
        let slots = slots(8);
        let first = take(&slots, REMOTE, 1);
        let rest = take(&slots, Peer::User(None), 7);
        assert_eq!(slots.count(), 8);
        let newest = take(&slots, Peer::User(Some(3)), 1);
        assert_eq!(slots.count(), 8);
        assert!(!is_waiting(&slots, &first[0]));
        assert!(
            rest.iter()
                .chain(&newest)
                .all(|slot| is_waiting(&slots, slot))
        );
        let mut first = first;
        let operator = slots.0.budget.whole();
        assert!(
            first[0].give_to_operator(&operator).is_err(),
            "it is closed"
        );
    }

    #[test]
    fn the_oldest_peer_makes_room_and_nobody_with_a_token() {
        let slots = slots(8);
        let mut held = take(&slots, REMOTE, 4);
        held[0].give_to_operator(&slots.0.budget.whole()).unwrap();
        let newest = held[3].number;
        let Eviction::Early(left) = slots.make_room(newest) else {
            panic!("it was closed");
        };
        assert!(!left.is_zero(), "it may be about to show a token");
        let mut table = lock(&slots.0.table);
        for slot in &held[1..] {
            let waiting = table.waiting.get_mut(&slot.number).unwrap();
            let since = waiting.since.unwrap();
            waiting.since = Some(since.checked_sub(LEAST_TIME).unwrap());
        }
        drop(table);
        for oldest in [1, 2] {
            assert_eq!(slots.make_room(newest), Eviction::Done);
            assert!(!is_waiting(&slots, &held[oldest]));
        }
        assert_eq!(
            slots.make_room(newest),
            Eviction::Nobody,
            "it makes no room for itself"
        );
        assert_eq!(slots.count(), 2);
    }

    /// With a token now and then a connection would be new for ever, and keep those after it.
    #[test]
    fn a_connection_that_is_given_back_has_had_its_time() {
        let slots = slots(8);
        let mut held = take(&slots, REMOTE, 2);
        held[0].since = held[0].since.checked_sub(LEAST_TIME).unwrap();
        held[0].give_to_tenant(&slots.0.budget.ledger()).unwrap();
        held[0].give_back();
        assert_eq!(slots.make_room(usize::MAX), Eviction::Done);
        assert!(!is_waiting(&slots, &held[0]) && is_waiting(&slots, &held[1]));
        // Nor does one that is new keep the others.
        let newer = take(&slots, REMOTE, 1);
        let mut table = lock(&slots.0.table);
        let waiting = table.waiting.get_mut(&newer[0].number).unwrap();
        waiting.since = waiting.since.unwrap().checked_sub(LEAST_TIME);
        drop(table);
        assert_eq!(slots.make_room(usize::MAX), Eviction::Done);
        assert!(!is_waiting(&slots, &newer[0]) && is_waiting(&slots, &held[1]));
    }

    #[test]
    fn a_token_ends_the_limit_of_time() {
        let slots = slots(8);
        let mut held = take(&slots, REMOTE, 1);
        held[0].begin();
        assert!(held[0].deadline().is_none());
        held[0].limit_time_for_token();
        let since = || lock(&slots.0.table).waiting.get(&0).unwrap().since;
        assert!(since().is_none(), "no thread serves it yet");
        held[0].begin();
        assert!(since().is_some());
        assert!(held[0].deadline() > Some(Instant::now()));
        held[0].give_to_tenant(&slots.0.budget.ledger()).unwrap();
        assert!(held[0].deadline().is_none());
    }

    #[test]
    fn tenants_have_shares_and_leave_some_to_the_operator() {
        let slots = slots(160);
        let ledgers: Vec<_> = (0..8).map(|_| slots.0.budget.ledger()).collect();
        let mut held = Vec::new();
        let counts: Vec<usize> = ledgers
            .iter()
            .map(|ledger| {
                let mut count = 0;
                loop {
                    let mut slot = take(&slots, REMOTE, 1).remove(0);
                    if slot.give_to_tenant(ledger).is_err() {
                        return count;
                    }
                    count += 1;
                    held.push(slot);
                }
            })
            .collect();
        assert_eq!(counts, [40, 40, 35, 18, 9, 4, 4, 0]);
        let mut operator = take(&slots, REMOTE, 10);
        let ledger = slots.0.budget.whole();
        let given: Vec<bool> = operator
            .iter_mut()
            .map(|slot| slot.give_to_operator(&ledger).is_ok())
            .collect();
        assert_eq!(given, [[true; 5], [false; 5]].concat());
        assert_eq!(slots.count(), 160);
        assert!(slots.take(Peer::User(Some(0)), &socket()).is_some());
        // A connection that served several tenants belongs to the last one.
        held[0].give_to_tenant(&ledgers[7]).unwrap();
        assert_eq!(ledgers[0].connections.count(), 39);
        drop((held, operator));
        assert_eq!(slots.count(), 0);
        assert!(ledgers.iter().all(|ledger| ledger.connections.count() == 0));
    }

    #[test]
    fn a_sandbox_that_is_gone_gets_no_connections() {
        let slots = slots(160);
        let ledger = slots.0.budget.ledger();
        let mut held = take(&slots, REMOTE, 2);
        held[0].give_to_tenant(&ledger).unwrap();
        assert!(ledger.connections.close(), "one reads its last answer");
        assert!(held[1].give_to_tenant(&ledger).is_err());
        assert!(is_waiting(&slots, &held[1]), "it is the peer's");
        drop(held);
        assert!(!ledger.connections.close());
    }

    #[test]
    fn a_sandbox_is_charged_for_what_it_sends_before_it_shows_a_token() {
        let slots = slots(8);
        let sandbox = slots.0.budget.ledger();
        let take = |ledger| slots.take_charging(Peer::User(Some(7)), &socket(), ledger);
        let own = take(Some(Arc::clone(&sandbox))).unwrap();
        assert!(Arc::ptr_eq(own.ledger(), &sandbox));
        // A proxy on the machine belongs to no sandbox.
        let other = take(None).unwrap();
        assert!(!Arc::ptr_eq(other.ledger(), &sandbox));
        let known = other.ledger_for_much(|_| Some(Arc::clone(&sandbox)));
        assert!(Arc::ptr_eq(&known, other.ledger()), "it was asked before");
    }

    /// A proxy that keeps its connections sends requests of all its clients over each of them.
    #[test]
    fn a_request_without_a_token_gives_the_connection_back() {
        let slots = slots(64);
        let peer = Peer::at([192, 0, 2, 1].into());
        let tenant = slots.0.budget.ledger();
        let mut held = take(&slots, peer, 20);
        let mut given = 0;
        for slot in &mut held {
            if slot.give_to_tenant(&tenant).is_ok() {
                given += 1;
                slot.give_back();
                assert!(is_waiting(&slots, slot));
                assert!(Arc::ptr_eq(slot.ledger(), slot.peer_ledger()));
            }
        }
        assert_eq!(given, 20, "more than its share at a time");
        assert_eq!(tenant.connections.count(), 0);
        assert_eq!(slots.count(), 20);
        // They make room as others of the peer do.
        let others = take(&slots, Peer::at([192, 0, 2, 2].into()), 32);
        let more = take(&slots, Peer::at([192, 0, 2, 3].into()), 20);
        assert!(!is_waiting(&slots, &held[0]));
        held[19].give_to_tenant(&tenant).unwrap();
        drop((held, others, more));
        assert_eq!(slots.count(), 0);
        assert!(lock(&slots.0.table).peers.is_empty());
    }

    #[test]
    fn one_network_is_one_peer() {
        let peer = |text: &str| Peer::at(text.parse().unwrap());
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::2"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
        assert_eq!(peer("::ffff:192.0.2.1"), REMOTE);
    }
}
