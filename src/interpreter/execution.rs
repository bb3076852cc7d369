//! One execution: its state, its events, and the clients that follow them.
//!
//! The driver of the context appends events; each client reads them with its own cursor. The client that started
//! the execution gets every byte: what it has not read is held here. If that becomes too much, the driver stops
//! reading what the code writes ([`Execution::is_backlogged`]). All other clients, and those that come back later, read
//! output from the log of the interpreter, which may have dropped it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::event::{End, EndReason, Event};
use crate::client::{Client, Disconnected, Interrupt, KeepAlive, LOOK_EVERY, Stopped, send_all};
use crate::codec::most_json_bytes;
use crate::limits::ledger::{Charge, Item};
use crate::process::Process;
use crate::process::ring::Stream;
use crate::spec::command::Fingerprint;
use crate::threads::lock::{Condvar, Mutex, lock};
use crate::threads::notify::Notifier;

/// Backlog of the asking client (events that it has not read) above which the driver stops reading, in bytes.
const BACKLOG_BYTES: usize = 256 * 1024;

/// Backlog that is held for the asking client when the driver does not wait for clients, because the code was
/// signalled.
const MOST_BACKLOG_BYTES: usize = 4 * BACKLOG_BYTES;

/// Memory of an event besides its payload.
const EVENT_BYTES: usize = 96;

/// What an execution may hold of one event that its tenant has no memory for.
const SMALL_BYTES: usize = 4 * 1024;

/// How long code may go on after the SIGINT of its timeout, by default.
pub const KILL_AFTER: Duration = Duration::from_secs(2);

/// What happens to an execution whose client disconnects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abandoned {
    /// It is interrupted, or removed from the queue.
    Interrupt,
    /// It goes on without the client.
    Keep,
}

/// Code to run in a context.
pub struct ExecutionSpec {
    /// The source.
    pub code: String,
    /// An id that the client chose, which makes the request idempotent.
    pub id: Option<String>,
    /// How long it may run, not counting its time in the queue.
    pub timeout: Option<Duration>,
    /// The time between SIGINT and SIGKILL after a timeout.
    pub kill_after: Duration,
    /// What the code reads from `stdin`.
    pub stdin: Option<String>,
    /// Whether the code may ask a client for input.
    pub asks: bool,
    /// Environment variables for this execution only.
    pub environment: Vec<(String, String)>,
    /// Whether results and displays are also sent as values for programs: JSON of lists and dictionaries, the data of
    /// charts and tables.
    pub sends_values: bool,
    /// What happens when its client disconnects.
    pub abandoned: Abandoned,
    /// Output beyond this many bytes is discarded.
    pub max_output: u64,
}

impl ExecutionSpec {
    /// An execution of `code` with the default settings.
    pub fn new(code: String) -> Self {
        Self {
            code,
            id: None,
            timeout: None,
            kill_after: KILL_AFTER,
            stdin: None,
            asks: false,
            environment: Vec::new(),
            sends_values: false,
            abandoned: Abandoned::Interrupt,
            max_output: u64::MAX,
        }
    }

    /// Bytes in memory: of the request, and of the JSON that the interpreter gets.
    pub(super) fn bytes(&self) -> usize {
        let environment = self.environment.iter();
        let environment =
            environment.map(|(name, value)| held_bytes(name) + held_bytes(value) + 48);
        let stdin = self.stdin.as_deref().map_or(0, held_bytes);
        held_bytes(&self.code) + stdin + environment.sum::<usize>()
    }
}

/// Bytes in memory of a text that the interpreter gets: of the text, and of its JSON.
pub(super) fn held_bytes(text: &str) -> usize {
    text.len() + most_json_bytes(text)
}

/// A client that receives the events of an execution.
pub trait ExecutionSubscriber {
    /// The connection that the events go to.
    fn client(&mut self) -> &mut dyn Client;
    /// Sends an event. `output` has the bytes of an [`Event::Output`], else nothing.
    ///
    /// # Errors
    /// The client disconnected.
    fn event(&mut self, number: u64, event: &Event, output: &[u8]) -> Result<(), Disconnected>;
    /// Reports that the events with the numbers `first` to `last` were dropped.
    ///
    /// # Errors
    /// The client disconnected.
    fn dropped(&mut self, first: u64, last: u64) -> Result<(), Disconnected>;
}

/// The state of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExecutionState {
    /// It waits in the queue of its context.
    Queued,
    Running,
    /// It has ended, for this reason.
    Ended(EndReason),
}

/// One execution of a context.
pub struct Execution {
    /// Unique in the context: `e-N`, or chosen by the client.
    pub id: String,
    /// Distinguishes requests that have the same id but other code.
    pub(super) fingerprint: Fingerprint,
    pub(super) abandoned: Abandoned,
    /// The driver takes it when the execution begins.
    pub(super) spec: Mutex<Option<ExecutionSpec>>,
    /// The lock is held for as long as a copy takes, at most.
    journal: Mutex<Journal>,
    ended: Condvar,
    /// Notifies the clients of every event.
    pub(super) notifier: Arc<Notifier>,
    /// Notifies the driver when it may read on.
    driver: Arc<Notifier>,
}

struct Journal {
    state: ExecutionState,
    /// The number of the execution in the interpreter's generation; 0 before it runs.
    count: u64,
    /// The number of the next event.
    next: u64,
    /// Events that are never dropped: they are few, and small except for one error.
    kept: Vec<(u64, Event)>,
    /// All other events. The oldest are dropped first.
    others: VecDeque<LoggedEvent>,
    /// Bytes of `others`, without output.
    bytes: usize,
    /// Bytes of those of `others` that have no charge of their own, and of the output that is held.
    uncharged_bytes: usize,
    /// Bytes of the error among `kept`.
    error_bytes: usize,
    /// The limit of `bytes`.
    limit: usize,
    /// Bytes of the code, until the interpreter has it.
    code_bytes: usize,
    /// Charges the tenant for `uncharged_bytes`, `error_bytes` and `code_bytes`.
    charge: Charge,
    /// The interpreter, in whose log the output is.
    process: Option<Arc<Process>>,
    /// The number of clients that asked for the execution and are still connected.
    clients: usize,
    /// The first of these clients, until it stops following.
    asking: Option<Asking>,
    /// Whether the driver waits until the asking client has read more.
    is_awaited: bool,
    /// Whether the driver no longer waits for the asking client.
    is_disregarded: bool,
}

/// What the client that started the execution has read.
#[derive(Default)]
struct Asking {
    /// The number of its next event.
    next: u64,
    /// Bytes that are held for it.
    backlog: usize,
}

struct LoggedEvent {
    number: u64,
    event: Event,
    /// Where output begins in the log of the interpreter.
    position: u64,
    /// The output, until the asking client has read it.
    output: Option<Vec<u8>>,
}

impl LoggedEvent {
    /// Approximate bytes in memory, without output.
    fn size(&self) -> usize {
        EVENT_BYTES
            + match &self.event {
                Event::Bundle(bundle) => bundle.size(),
                Event::Input { prompt, .. } => prompt.len(),
                _ => 0,
            }
    }

    /// Bytes that it adds to the backlog: with output.
    fn weight(&self) -> usize {
        self.size() + self.output_bytes()
    }

    fn output_bytes(&self) -> usize {
        self.output.as_ref().map_or(0, Vec::len)
    }

    /// What of it has no charge of its own.
    fn uncharged(&self) -> usize {
        match &self.event {
            Event::Bundle(_) => EVENT_BYTES,
            _ => self.weight(),
        }
    }
}

impl Execution {
    /// An execution that waits in the queue. `limit` bounds the bytes of its events.
    pub(super) fn new(
        id: String,
        fingerprint: Fingerprint,
        spec: ExecutionSpec,
        limit: usize,
        charge: Charge,
        driver: &Arc<Notifier>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            fingerprint,
            abandoned: spec.abandoned,
            spec: Mutex::new(Some(spec)),
            journal: Mutex::new(Journal {
                state: ExecutionState::Queued,
                count: 0,
                next: 0,
                kept: Vec::new(),
                others: VecDeque::new(),
                bytes: 0,
                uncharged_bytes: 0,
                error_bytes: 0,
                limit,
                code_bytes: charge.bytes(),
                charge,
                process: None,
                clients: 1,
                asking: Some(Asking::default()),
                is_awaited: false,
                is_disregarded: false,
            }),
            ended: Condvar::new(),
            notifier: Arc::default(),
            driver: Arc::clone(driver),
        })
    }

    /// Whether it is queued, is running or has ended.
    pub fn state(&self) -> ExecutionState {
        lock(&self.journal).state
    }

    /// Its number in the interpreter's generation; 0 before it runs.
    pub fn count(&self) -> u64 {
        lock(&self.journal).count
    }

    /// The number of events so far, including dropped ones.
    pub fn events(&self) -> u64 {
        lock(&self.journal).next
    }

    /// Waits until it has ended. False if that takes longer.
    ///
    /// # Errors
    /// The client disconnected.
    pub(super) fn wait_ended(
        &self,
        limit: Duration,
        client: &mut dyn Interrupt,
    ) -> std::result::Result<bool, Stopped> {
        let is_running = |journal: &mut Journal| !matches!(journal.state, ExecutionState::Ended(_));
        let begun = Instant::now();
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            let (mut journal, _) =
                self.ended
                    .wait_while_for(lock(&self.journal), left.min(LOOK_EVERY), is_running);
            if !is_running(&mut journal) {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
            drop(journal);
            client.check()?;
        }
    }

    /// Notes that it runs from now on, in this process, and appends the event `start`.
    pub(super) fn begin(&self, count: u64, process: &Arc<Process>, start: Event) {
        let mut journal = lock(&self.journal);
        journal.state = ExecutionState::Running;
        journal.count = count;
        journal.process = Some(Arc::clone(process));
        journal.append(start, None, 0);
        drop(journal);
        self.notifier.notify();
    }

    /// Stops charging the tenant for the code, because the interpreter has it.
    pub(super) fn release_code(&self) {
        let mut journal = lock(&self.journal);
        journal.code_bytes = 0;
        // Succeeds, because it is less than before.
        journal.settle_charge(0);
    }

    /// Adds an event that is not output. False if the tenant has no memory for it: it is lost.
    pub(super) fn append(&self, event: Event) -> bool {
        let is_kept = lock(&self.journal).append(event, None, 0);
        self.notifier.notify();
        is_kept
    }

    /// Takes memory for the bundle of the next event, if need be from older events. Without it the event is lost.
    pub(super) fn admit(&self, bytes: usize) -> Option<Charge> {
        let mut journal = lock(&self.journal);
        let ledger = Arc::clone(journal.charge.ledger());
        loop {
            if let Ok(charge) = ledger.charge(Item::Executions, bytes) {
                return Some(charge);
            }
            if journal.others.is_empty() {
                journal.next += 1;
                return None;
            }
            journal.drop_oldest();
        }
    }

    /// Adds output that is already in the log of the interpreter, at `position`. `offset` is its offset in the stream.
    pub(super) fn append_output(&self, stream: Stream, offset: u64, position: u64, data: &[u8]) {
        let event = Event::Output {
            stream,
            offset,
            bytes: data.len(),
        };
        let mut journal = lock(&self.journal);
        let asking = journal.asking.as_ref();
        let is_due = asking.is_some_and(|asking| journal.is_due(asking));
        // Without memory for a copy its client reads it from the log, too.
        let is_held = is_due && journal.settle_charge(EVENT_BYTES + data.len());
        journal.append(event, is_held.then(|| data.to_vec()), position);
        drop(journal);
        self.notifier.notify();
    }

    /// Adds the last event. False if the execution had ended already.
    #[must_use = "only the first end is counted"]
    pub(super) fn end(&self, end: End) -> bool {
        let mut journal = lock(&self.journal);
        if matches!(journal.state, ExecutionState::Ended(_)) {
            return false;
        }
        journal.state = ExecutionState::Ended(end.reason);
        journal.append(Event::End(end), None, 0);
        drop(journal);
        self.release_code();
        lock(&self.spec).take();
        self.ended.notify_all();
        self.notifier.notify();
        true
    }

    /// Lets the driver read the code's output without waiting for clients, because the code was told to end.
    pub(super) fn disregard_clients(&self) {
        lock(&self.journal).is_disregarded = true;
    }

    /// Whether the backlog of the asking client is too large. If so, the driver is notified when it is smaller.
    pub(super) fn is_backlogged(&self) -> bool {
        let mut journal = lock(&self.journal);
        journal.is_awaited = journal.is_backlogged();
        journal.is_awaited
    }

    /// Counts one more client that asks for this execution.
    pub(super) fn join(&self) {
        lock(&self.journal).clients += 1;
    }

    /// Counts one client less. Returns whether it was the last one and the execution has not ended.
    pub(super) fn leave(&self) -> bool {
        let mut journal = lock(&self.journal);
        journal.clients -= 1;
        journal.clients == 0 && !matches!(journal.state, ExecutionState::Ended(_))
    }

    /// Stops holding output for the client that started the execution.
    pub(super) fn stop_asking(&self) {
        let mut journal = lock(&self.journal);
        journal.asking = None;
        let held = journal.others.iter_mut();
        let outputs = held.filter_map(|entry| entry.output.take());
        let bytes: usize = outputs.map(|output| output.len()).sum();
        journal.uncharged_bytes -= bytes;
        journal.trim();
        drop(journal);
        self.wake_driver();
    }

    /// Sends a subscriber the events from `next` on: until the end if `is_live`, else only the existing ones.
    /// `is_asking` tells whether the subscriber is the client that started the execution.
    ///
    /// # Errors
    /// The client disconnected.
    pub fn follow(
        &self,
        mut next: u64,
        is_live: bool,
        is_asking: bool,
        subscriber: &mut dyn ExecutionSubscriber,
    ) -> Result<(), Disconnected> {
        let listener = self.notifier.listen();
        let mut keep_alive = KeepAlive::new();
        let mut buffer = Vec::new();
        loop {
            let found = lock(&self.journal).read(next, is_asking, &mut buffer);
            let Some((number, event, is_whole)) = found else {
                let is_over =
                    matches!(self.state(), ExecutionState::Ended(_)) && next >= self.events();
                if is_over || !is_live {
                    return Ok(());
                }
                listener.wait(&mut keep_alive, subscriber.client(), None)?;
                continue;
            };
            self.wake_driver();
            if number > next {
                subscriber.dropped(next, number - 1)?;
            }
            if is_whole {
                subscriber.event(number, &event, &buffer)?;
            } else {
                subscriber.dropped(number, number)?;
            }
            send_all(subscriber.client())?;
            keep_alive.reset();
            next = number + 1;
        }
    }

    fn wake_driver(&self) {
        let mut journal = lock(&self.journal);
        if journal.is_awaited && !journal.is_backlogged() {
            journal.is_awaited = false;
            drop(journal);
            self.driver.notify();
        }
    }
}

impl Journal {
    fn is_backlogged(&self) -> bool {
        let asking = self.asking.as_ref();
        asking.is_some_and(|asking| asking.backlog > BACKLOG_BYTES)
    }

    /// Returns whether it is kept.
    fn append(&mut self, event: Event, output: Option<Vec<u8>>, position: u64) -> bool {
        let number = self.next;
        self.next += 1;
        if matches!(event, Event::Start(_) | Event::Error(_) | Event::End(_)) {
            if let Event::Error(error) = &event {
                self.error_bytes = error.size();
            }
            self.kept.push((number, event));
            self.trim();
            if !self.settle_charge(0) {
                self.shorten_error();
            }
            return true;
        }
        let entry = LoggedEvent {
            number,
            event,
            position,
            output,
        };
        self.bytes += entry.size();
        self.uncharged_bytes += entry.uncharged();
        if let Some(asking) = &mut self.asking {
            asking.backlog += entry.weight();
        }
        self.others.push_back(entry);
        self.trim();
        self.others.back().is_some_and(|last| last.number == number)
    }

    /// Keeps the beginning of an error for which there is no memory.
    fn shorten_error(&mut self) {
        for (_, event) in &mut self.kept {
            if let Event::Error(error) = event {
                *error = Arc::new(error.shortened());
                self.error_bytes = error.size();
            }
        }
        self.settle_charge(0);
    }

    fn trim(&mut self) {
        while self.is_too_large() {
            self.drop_oldest();
        }
    }

    /// Charges the tenant for what is held and `more` bytes. Returns whether the tenant has that much memory left.
    fn settle_charge(&mut self, more: usize) -> bool {
        let bytes = self.code_bytes + self.uncharged_bytes + self.error_bytes;
        self.charge.set(bytes + more).is_ok()
    }

    /// Whether the oldest event must be dropped. Events that the asking client has not read are dropped only if the
    /// driver does not wait for it and its backlog is large, or if the tenant has no memory left. While the code runs,
    /// the newest event is not dropped if it is charged or small.
    fn is_too_large(&mut self) -> bool {
        let is_charged = self.settle_charge(0);
        let has_ended = matches!(self.state, ExecutionState::Ended(_));
        let Some(oldest) = self.others.front() else {
            return false;
        };
        let is_bearable = is_charged || oldest.uncharged() <= SMALL_BYTES;
        if self.others.len() == 1 && !has_ended && is_bearable {
            return false;
        }
        let asking = self.asking.as_ref();
        let is_due =
            asking.is_some_and(|asking| asking.next <= oldest.number && self.is_due(asking));
        !is_charged || (self.bytes > self.limit && !is_due)
    }

    /// Whether everything is held for the asking client until it has read it.
    fn is_due(&self, asking: &Asking) -> bool {
        !self.is_disregarded || asking.backlog <= MOST_BACKLOG_BYTES
    }

    fn drop_oldest(&mut self) {
        if let Some(entry) = self.others.pop_front() {
            self.bytes -= entry.size();
            self.uncharged_bytes -= entry.uncharged();
            if let Some(asking) = &mut self.asking
                && asking.next <= entry.number
            {
                asking.backlog -= entry.weight();
            }
        }
    }

    /// The first event from `next` on, with its number, and whether it is whole: false if it is output that is no
    /// longer in the log. Puts its output into `buffer`.
    fn read(
        &mut self,
        next: u64,
        is_asking: bool,
        buffer: &mut Vec<u8>,
    ) -> Option<(u64, Event, bool)> {
        buffer.clear();
        let kept = self.kept.iter().find(|(number, _)| *number >= next);
        let at = self.others.partition_point(|entry| entry.number < next);
        let other = self.others.get_mut(at);
        if let Some((number, event)) = kept
            && other.as_ref().is_none_or(|other| other.number > *number)
        {
            return Some((*number, event.clone(), true));
        }
        let entry = other?;
        let mut asking = self.asking.as_mut().filter(|_| is_asking);
        if let Some(asking) = &mut asking {
            asking.next = entry.number + 1;
            asking.backlog -= entry.weight();
        }
        let (number, event) = (entry.number, entry.event.clone());
        let Event::Output { stream, bytes, .. } = event else {
            return Some((number, event, true));
        };
        let taken = asking.and_then(|_| entry.output.take());
        self.uncharged_bytes -= taken.as_ref().map_or(0, Vec::len);
        let is_whole = match (taken, &entry.output) {
            (Some(taken), _) => {
                *buffer = taken;
                true
            }
            (None, Some(held)) => {
                buffer.extend_from_slice(held);
                true
            }
            (None, None) => self
                .process
                .as_ref()
                .is_some_and(|process| process.copy_output(stream, entry.position, bytes, buffer)),
        };
        Some((number, event, is_whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interpreter::event::{Bundle, CodeError};
    use crate::limits::ledger::Budget;

    fn execution(limit: usize) -> Arc<Execution> {
        execution_of(1 << 30, limit)
    }

    fn execution_of(budget: u64, limit: usize) -> Arc<Execution> {
        let charge = charge(budget, 0);
        let spec = ExecutionSpec::new("code".to_owned());
        let id = "e-1".to_owned();
        Execution::new(id, [0; 32], spec, limit, charge, &Arc::default())
    }

    fn display(bytes: usize) -> Event {
        bundle(bytes, charge(1 << 30, bytes))
    }

    fn charge(budget: u64, bytes: usize) -> Charge {
        let ledger = Budget::new(budget).whole();
        ledger.charge(Item::Executions, bytes).unwrap()
    }

    fn bundle(bytes: usize, charge: Charge) -> Event {
        Event::Bundle(Arc::new(Bundle {
            is_main: false,
            data: "x".repeat(bytes),
            metadata: "{}".to_owned(),
            display_id: None,
            is_update: false,
            dropped: None,
            charge,
        }))
    }

    fn end() -> End {
        End {
            reason: EndReason::Completed,
            is_kept: true,
            count: 1,
            ending: None,
            has_timed_out: false,
            duration: Duration::ZERO,
        }
    }

    /// The numbers of all events that a reader gets, and their output.
    fn numbers(execution: &Execution, is_asking: bool) -> (Vec<u64>, Vec<u8>) {
        let (mut next, mut found) = (0, Vec::new());
        let (mut buffer, mut output) = (Vec::new(), Vec::new());
        loop {
            let event = lock(&execution.journal).read(next, is_asking, &mut buffer);
            let Some((number, ..)) = event else {
                return (found, output);
            };
            output.extend_from_slice(&buffer);
            found.push(number);
            next = number + 1;
        }
    }

    #[test]
    fn the_oldest_events_go_and_the_end_stays() {
        let execution = execution(4096);
        execution.stop_asking();
        for _ in 0..100 {
            execution.append(display(1000));
        }
        assert!(execution.end(end()));
        let (numbers, _) = numbers(&execution, false);
        assert_eq!(numbers.last(), Some(&100));
        assert_eq!(numbers.len(), 4, "three displays and the end: {numbers:?}");
        assert_eq!(execution.events(), 101);
        assert!(lock(&execution.journal).charge.bytes() <= 4096);
    }

    #[test]
    fn the_client_that_asks_loses_nothing_and_slows_the_code_down() {
        let execution = execution(4096);
        let part = vec![b'x'; 10_000];
        let mut sent = 0;
        while !execution.is_backlogged() {
            execution.append_output(Stream::Stdout, sent, sent, &part);
            execution.append(display(1000));
            sent += part.len() as u64;
        }
        assert!(sent < 2 * BACKLOG_BYTES as u64);
        assert!(execution.end(end()));
        let (found, output) = numbers(&execution, true);
        assert_eq!(found, (0..execution.events()).collect::<Vec<_>>());
        assert_eq!(output.len() as u64, sent);
        assert!(!execution.is_backlogged());

        // The client has read them, so a new event pushes them out. Now their output is only in the interpreter's log.
        execution.append(display(1000));
        let (found, output) = numbers(&execution, false);
        assert!(found.len() < 10, "{found:?}");
        assert!(output.is_empty());
    }

    #[test]
    fn code_that_is_read_without_regard_to_its_client_is_bounded() {
        let execution = execution(4096);
        execution.disregard_clients();
        for _ in 0..1000 {
            execution.append(display(100_000));
            execution.append_output(Stream::Stdout, 0, 0, &[b'x'; 10_000]);
        }
        let journal = lock(&execution.journal);
        let held: usize = journal.others.iter().map(LoggedEvent::weight).sum();
        assert!(held < 2 * MOST_BACKLOG_BYTES, "{held}");
    }

    #[test]
    fn a_large_value_takes_nothing_from_the_client_that_asks() {
        let execution = execution(4096);
        for _ in 0..3 {
            execution.append_output(Stream::Stdout, 0, 0, &[b'x'; 10_000]);
            execution.append(display(3 * MOST_BACKLOG_BYTES));
        }
        assert!(execution.end(end()));
        let (found, output) = numbers(&execution, true);
        assert_eq!(found, (0..7).collect::<Vec<_>>());
        assert_eq!(output.len(), 30_000);
        // Once no client asks any more, events beyond the limit are dropped.
        execution.stop_asking();
        assert_eq!(numbers(&execution, false).0, [6]);
        assert!(lock(&execution.journal).charge.bytes() <= 4096);
    }

    /// The bytes that are held, and whether the charges cover them.
    fn held(execution: &Execution) -> (usize, bool) {
        let journal = lock(&execution.journal);
        let all = journal.others.iter().map(LoggedEvent::weight);
        let bytes = all.sum::<usize>() + journal.error_bytes;
        let own = |entry: &LoggedEvent| match &entry.event {
            Event::Bundle(bundle) => bundle.charge.bytes(),
            _ => 0,
        };
        let charged = journal.others.iter().map(own).sum::<usize>() + journal.charge.bytes();
        (bytes, charged >= bytes)
    }

    #[test]
    fn bundles_that_the_tenant_has_no_memory_for_are_lost() {
        let execution = execution_of(64 * 1024, 1 << 20);
        for _ in 0..100 {
            let charge = execution.admit(10_000).unwrap();
            assert!(execution.append(bundle(10_000, charge)));
            let (bytes, is_charged) = held(&execution);
            assert!(bytes <= 64 * 1024 && is_charged, "{bytes}");
        }
        // The only event of code that runs is no exception.
        assert!(execution.admit(1 << 20).is_none());
        assert_eq!(held(&execution), (0, true));
        assert!(execution.end(end()));
        assert_eq!(numbers(&execution, true).0, [101], "there is a gap");
    }

    #[test]
    fn a_bundle_is_charged_until_its_last_reader_has_it() {
        let execution = execution_of(64 * 1024, 1 << 20);
        let charge = execution.admit(20_000).unwrap();
        let shown = bundle(20_000, charge);
        assert!(execution.append(shown.clone()));
        execution.stop_asking();
        lock(&execution.journal).drop_oldest();
        assert!(execution.admit(20_000).is_none());
        drop(shown);
        assert!(execution.admit(20_000).is_some());
    }

    #[test]
    fn output_is_held_for_the_client_that_asks_within_the_memory_of_its_tenant() {
        let execution = execution_of(64 * 1024, 1 << 20);
        for offset in 0..20 {
            execution.append_output(Stream::Stdout, offset, offset, &[b'x'; 10_000]);
            let (bytes, is_charged) = held(&execution);
            assert!(bytes <= 64 * 1024 && is_charged, "{bytes}");
        }
        let (found, output) = numbers(&execution, true);
        assert_eq!(found.len(), 20, "their places in the log are kept");
        assert!(output.len() >= 20_000, "{}", output.len());
        assert!(lock(&execution.journal).charge.bytes() > 20_000);
        execution.stop_asking();
        assert!(lock(&execution.journal).charge.bytes() < 20_000);
    }

    #[test]
    fn of_an_error_that_the_tenant_has_no_memory_for_the_beginning_is_kept() {
        let execution = execution_of(64 * 1024, 1 << 20);
        let error = |bytes: usize| CodeError {
            name: "E".to_owned(),
            value: "v".repeat(bytes),
            traceback: vec!["line".to_owned(); 5],
        };
        assert!(execution.append(Event::Error(Arc::new(error(1 << 20)))));
        let (bytes, is_charged) = held(&execution);
        assert!(
            (1000..SMALL_BYTES).contains(&bytes) && is_charged,
            "{bytes}"
        );
        // A question that is not shown could not be answered.
        let prompt = "p".repeat(1 << 20);
        let password = false;
        assert!(!execution.append(Event::Input { prompt, password }));
        assert_eq!(held(&execution).0, bytes);
    }
}
