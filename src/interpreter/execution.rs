//! One execution: its place in the queue, its events, and who follows them.
//!
//! The driver of the context appends events; clients read them with cursors of their own. The client that asked for
//! the execution gets every byte: what it has not taken is held here, and when that becomes much the driver stops
//! reading what the code writes ([`Execution::is_backlogged`]). Everybody else, and whoever comes back later, reads
//! output from the log of the interpreter, which may have dropped it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::event::{End, EndReason, Event};
use crate::client::{Client, Disconnected, KeepAlive, send_all};
use crate::limits::ledger::Charge;
use crate::process::Process;
use crate::process::ring::Stream;
use crate::spec::command::Fingerprint;
use crate::threads::lock::{Condvar, Mutex, lock};
use crate::threads::notify::Notifier;

/// What the asking client has not taken, in bytes, above which no more is read.
const BACKLOG_BYTES: usize = 256 * 1024;

/// What is held for it at most. Code that was signalled is read without regard to clients.
const MOST_BACKLOG_BYTES: usize = 4 * BACKLOG_BYTES;

/// What an event takes besides its payload.
const EVENT_BYTES: usize = 96;

/// How long code may go on after SIGINT when its time is up.
pub const KILL_AFTER: Duration = Duration::from_secs(2);

/// What happens to an execution whose client disconnects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abandoned {
    /// It is interrupted, or leaves the queue.
    Interrupt,
    /// It goes on.
    Keep,
}

/// Code to run in a context.
pub struct ExecutionSpec {
    /// The source.
    pub code: String,
    /// The client's choice, which makes the request idempotent.
    pub id: Option<String>,
    /// How long it may run, without its time in the queue.
    pub timeout: Option<Duration>,
    /// From SIGINT to SIGKILL when its time is up.
    pub kill_after: Duration,
    /// What `stdin` reads.
    pub stdin: Option<String>,
    /// Whether the code may ask a client for input.
    pub asks: bool,
    /// Variables for this execution.
    pub environment: Vec<(String, String)>,
    /// Whether results and displays also come as values that programs read: JSON of lists and dictionaries, the data of
    /// charts and tables.
    pub sends_values: bool,
    /// Whether it ends with its client.
    pub abandoned: Abandoned,
    /// Output beyond this is thrown away.
    pub max_output: u64,
}

impl ExecutionSpec {
    /// Code alone.
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

    /// Bytes in memory: as they came, and as JSON for the interpreter.
    pub(super) fn bytes(&self) -> usize {
        // Most characters take at most twice as much in JSON, and control characters six bytes.
        let bytes = |text: &str| {
            let controls = text.bytes().filter(|byte| *byte < b'\t').count();
            3 * text.len() + 4 * controls
        };
        let environment = self.environment.iter();
        let environment = environment.map(|(name, value)| bytes(name) + bytes(value) + 48);
        let stdin = self.stdin.as_deref().map_or(0, bytes);
        bytes(&self.code) + stdin + environment.sum::<usize>()
    }
}

/// A client that receives the events of an execution.
pub trait ExecutionSubscriber {
    /// The connection that the events go to.
    fn client(&mut self) -> &mut dyn Client;
    /// Sends an event. `output` are the bytes of an [`Event::Output`].
    ///
    /// # Errors
    /// The client disconnected.
    fn event(&mut self, number: u64, event: &Event, output: &[u8]) -> Result<(), Disconnected>;
    /// Sends word of events that are no longer held: their first and their last number.
    ///
    /// # Errors
    /// The client disconnected.
    fn dropped(&mut self, first: u64, last: u64) -> Result<(), Disconnected>;
}

/// The state of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExecutionState {
    /// Others are before it.
    Queued,
    /// It runs.
    Running,
    /// For this reason.
    Ended(EndReason),
}

/// One execution of a context.
pub struct Execution {
    /// Unique in the context: `e-N`, or the client's choice.
    pub id: String,
    /// Tells code with one id apart.
    pub(super) fingerprint: Fingerprint,
    pub(super) abandoned: Abandoned,
    /// Taken by the driver when it runs.
    pub(super) spec: Mutex<Option<ExecutionSpec>>,
    /// Guards what is known of it. Held for the length of a copy.
    journal: Mutex<Journal>,
    ended: Condvar,
    /// Notifies at every event.
    pub(super) notifier: Arc<Notifier>,
    /// Notifies when the driver may read on.
    driver: Arc<Notifier>,
}

struct Journal {
    state: ExecutionState,
    count: u64,
    /// The next number.
    next: u64,
    /// Never dropped: few, and small but for one error.
    kept: Vec<(u64, Event)>,
    /// Dropped from the front.
    others: VecDeque<LoggedEvent>,
    /// Bytes of all of them.
    bytes: usize,
    /// Bytes of the error.
    error_bytes: usize,
    limit: usize,
    /// Bytes of the code, until the interpreter has it.
    code_bytes: usize,
    /// For all of them.
    charge: Charge,
    /// Where its output is logged.
    process: Option<Arc<Process>>,
    /// Clients that asked for it and are still connected.
    clients: usize,
    /// The first of them, until it stops following.
    asking: Option<Asking>,
    /// The driver waits until the asking client has taken more.
    is_awaited: bool,
    /// The driver does not wait for it any more.
    is_disregarded: bool,
}

/// What the client that has made the execution has taken.
#[derive(Default)]
struct Asking {
    /// The number of its next event.
    next: u64,
    /// What is held for it, in bytes.
    backlog: usize,
}

struct LoggedEvent {
    number: u64,
    event: Event,
    /// Where output begins in the log.
    position: u64,
    /// The output, until the asking client has taken it.
    output: Option<Vec<u8>>,
}

impl LoggedEvent {
    /// Bytes in memory, approximately, without output.
    fn size(&self) -> usize {
        EVENT_BYTES
            + match &self.event {
                Event::Bundle(bundle) => bundle.size(),
                Event::Input { prompt, .. } => prompt.len(),
                _ => 0,
            }
    }

    /// What it adds to a backlog.
    fn weight(&self) -> usize {
        self.size() + self.output.as_ref().map_or(0, Vec::len)
    }
}

impl Execution {
    /// One that waits. `limit` bounds its events in bytes.
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

    /// Queued, running or ended.
    pub fn state(&self) -> ExecutionState {
        lock(&self.journal).state
    }

    /// Its number in the generation; 0 before it runs.
    pub fn count(&self) -> u64 {
        lock(&self.journal).count
    }

    /// How many events there are.
    pub fn events(&self) -> u64 {
        lock(&self.journal).next
    }

    /// Waits at most `limit` for its end; returns whether it has ended.
    pub(super) fn wait_ended(&self, limit: Duration) -> bool {
        let journal = lock(&self.journal);
        let is_running = |journal: &mut Journal| !matches!(journal.state, ExecutionState::Ended(_));
        let (journal, _) = self.ended.wait_while_for(journal, limit, is_running);
        matches!(journal.state, ExecutionState::Ended(_))
    }

    /// It runs from now on, in this process.
    pub(super) fn begin(&self, count: u64, process: &Arc<Process>, start: Event) {
        let mut journal = lock(&self.journal);
        journal.state = ExecutionState::Running;
        journal.count = count;
        journal.process = Some(Arc::clone(process));
        journal.append(start, None, 0);
        drop(journal);
        self.notifier.notify();
    }

    /// The interpreter has the code.
    pub(super) fn release_code(&self) {
        let mut journal = lock(&self.journal);
        journal.code_bytes = 0;
        // Less than before.
        journal.settle_charge();
    }

    /// Adds an event.
    pub(super) fn append(&self, event: Event) {
        lock(&self.journal).append(event, None, 0);
        self.notifier.notify();
    }

    /// Adds output, which is in the log already: at this position, and at this offset of its stream.
    pub(super) fn append_output(&self, stream: Stream, offset: u64, position: u64, data: &[u8]) {
        let event = Event::Output {
            stream,
            offset,
            bytes: data.len(),
        };
        let mut journal = lock(&self.journal);
        let asking = journal.asking.as_ref();
        let is_held = asking.is_some_and(|asking| journal.is_due(asking));
        journal.append(event, is_held.then(|| data.to_vec()), position);
        drop(journal);
        self.notifier.notify();
    }

    /// Adds the last event. False if it has one already.
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

    /// From now on the code is read without regard to clients: it was told to end.
    pub(super) fn disregard_clients(&self) {
        lock(&self.journal).is_disregarded = true;
    }

    /// Whether the asking client has much to take. The driver is notified when it has less.
    pub(super) fn is_backlogged(&self) -> bool {
        let mut journal = lock(&self.journal);
        journal.is_awaited = journal.is_backlogged();
        journal.is_awaited
    }

    /// One more client asks for it.
    pub(super) fn join(&self) {
        lock(&self.journal).clients += 1;
    }

    /// A client that asked for it is gone; returns whether it was the last one, and the execution goes on.
    pub(super) fn leave(&self) -> bool {
        let mut journal = lock(&self.journal);
        journal.clients -= 1;
        journal.clients == 0 && !matches!(journal.state, ExecutionState::Ended(_))
    }

    /// Nothing is held any more for the client that has made it.
    pub(super) fn stop_asking(&self) {
        let mut journal = lock(&self.journal);
        journal.asking = None;
        for entry in &mut journal.others {
            entry.output = None;
        }
        journal.trim();
        drop(journal);
        self.wake_driver();
    }

    /// Sends a subscriber the events from `next` on: until the end if `is_live`, else those there are. `is_asking`
    /// is the client that has made the execution.
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

    fn append(&mut self, event: Event, output: Option<Vec<u8>>, position: u64) {
        let number = self.next;
        self.next += 1;
        if matches!(event, Event::Start(_) | Event::Error(_) | Event::End(_)) {
            if let Event::Error(error) = &event {
                self.error_bytes = error.size();
            }
            self.kept.push((number, event));
            return self.trim();
        }
        let entry = LoggedEvent {
            number,
            event,
            position,
            output,
        };
        self.bytes += entry.size();
        if let Some(asking) = &mut self.asking {
            asking.backlog += entry.weight();
        }
        self.others.push_back(entry);
        self.trim();
    }

    fn trim(&mut self) {
        while self.is_too_large() {
            self.drop_oldest();
        }
    }

    /// Charges the tenant with what is held; returns whether it has as much.
    fn settle_charge(&mut self) -> bool {
        let bytes = self.code_bytes + self.bytes + self.error_bytes;
        self.charge.set(bytes).is_ok()
    }

    /// Whether the oldest event has to go. The asking client has seen it, unless it is disregarded and far behind or
    /// its tenant has no memory left. While the code runs the newest is held in any case.
    fn is_too_large(&mut self) -> bool {
        let is_charged = self.settle_charge();
        let has_ended = matches!(self.state, ExecutionState::Ended(_));
        let Some(oldest) = self.others.front() else {
            return false;
        };
        if self.others.len() == 1 && !has_ended {
            return false;
        }
        let asking = self.asking.as_ref();
        let is_due =
            asking.is_some_and(|asking| asking.next <= oldest.number && self.is_due(asking));
        !is_charged || (self.bytes > self.limit && !is_due)
    }

    /// Whether everything is held for this client until it has taken it.
    fn is_due(&self, asking: &Asking) -> bool {
        !self.is_disregarded || asking.backlog <= MOST_BACKLOG_BYTES
    }

    fn drop_oldest(&mut self) {
        if let Some(entry) = self.others.pop_front() {
            self.bytes -= entry.size();
            if let Some(asking) = &mut self.asking
                && asking.next <= entry.number
            {
                asking.backlog -= entry.weight();
            }
        }
    }

    /// The first event from `next` on, its number, and whether its output is in `buffer` if it has one.
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
    use crate::interpreter::event::Bundle;
    use crate::limits::ledger::{Budget, Item};

    fn execution(limit: usize) -> Arc<Execution> {
        let ledger = Budget::new(1 << 30).whole();
        let charge = ledger.charge(Item::Executions, 0).unwrap();
        let spec = ExecutionSpec::new("code".to_owned());
        let id = "e-1".to_owned();
        Execution::new(id, [0; 32], spec, limit, charge, &Arc::default())
    }

    fn display(bytes: usize) -> Event {
        Event::Bundle(Arc::new(Bundle {
            is_main: false,
            data: "x".repeat(bytes),
            metadata: "{}".to_owned(),
            display_id: None,
            is_update: false,
            dropped: None,
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

    /// The numbers that a reader gets from `next` on, and the bytes of output.
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

        // It has taken them, so they go before later ones. Output is in the log of the interpreter only.
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
        // What is too large is gone with it.
        execution.stop_asking();
        assert_eq!(numbers(&execution, false).0, [6]);
        assert!(lock(&execution.journal).charge.bytes() <= 4096);
    }

    #[test]
    fn memory_that_the_tenant_does_not_have_is_not_used() {
        let ledger = Budget::new(64 * 1024).whole();
        let charge = ledger.charge(Item::Executions, 0).unwrap();
        let spec = ExecutionSpec::new("code".to_owned());
        let id = "e-1".to_owned();
        let execution = Execution::new(id, [0; 32], spec, 1 << 20, charge, &Arc::default());
        for _ in 0..100 {
            execution.append(display(10_000));
        }
        let journal = lock(&execution.journal);
        assert!(journal.bytes <= 64 * 1024, "{}", journal.bytes);
    }
}
