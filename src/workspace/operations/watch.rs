//! Watching trees: as a stream, and for clients that poll.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::client::{Interrupt, KeepAlive, Lookout, Stopped, send_all};
use crate::error::{Error, Kind, Result};
use crate::files::watch::{Ended, EventSink, Settings, TreeEvent, Watcher};
use crate::spec::command::ChosenId;
use crate::threads::priority::BackgroundTurn;
use crate::workspace::lease::{Lease, Workspace};
use crate::workspace::watches::{Lasting, RegisteredWatch, WatchSubscriber};

/// Events that are added to a client's buffer before it is sent.
const BATCH_EVENTS: usize = 256;

/// A watch that one client follows.
pub struct WatchStream {
    lease: Lease,
    watcher: Watcher,
}

impl Workspace {
    /// Begins to watch a tree. What changes from now on is reported.
    ///
    /// # Errors
    /// As [`Watcher::new`].
    pub fn watch(
        &self,
        settings: &Settings,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<WatchStream, Stopped> {
        let lease = self.share()?;
        let (share, ledger) = (&self.watches.share, &self.ledger);
        let interrupt = &mut self.paced(interrupt);
        let watcher = Watcher::new(settings, &self.files()?, share, ledger, interrupt)?;
        Ok(WatchStream { lease, watcher })
    }

    /// Registers a watch, or finds the one that has its id.
    ///
    /// # Errors
    /// As [`Watcher::new`]; `IdInUse`; `OverLimit`.
    pub fn register_watch(
        &self,
        settings: &Settings,
        id: Option<String>,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Arc<RegisteredWatch>, Stopped> {
        let id = id.map(ChosenId::new).transpose()?;
        if let Some(number) = id.as_ref().and_then(|id| id.as_str().strip_prefix("w-"))
            && number.bytes().all(|byte| byte.is_ascii_digit())
        {
            let text = "id must not look like w-1: those are the server's own";
            return Err(Error::invalid(text).into());
        }
        if let Some(watch) = self.watches.existing(id.as_ref(), settings, &self.root)? {
            return Ok(watch);
        }
        let WatchStream { lease, watcher } = self.watch(settings, interrupt)?;
        Ok(lease.watches.add(id.as_ref(), None, watcher, &lease.root)?)
    }

    /// Registers a watch that stays until it is removed. If there are as many as there may be, the one of these goes
    /// that was unread for longest.
    ///
    /// # Errors
    /// As [`Watcher::new`]; `OverLimit`.
    pub fn register_lasting_watch(
        &self,
        settings: &Settings,
        lasting: Lasting,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Arc<RegisteredWatch>, Stopped> {
        let WatchStream { lease, watcher } = self.watch_in_place_of_another(settings, interrupt)?;
        Ok(lease
            .watches
            .add(None, Some(lasting), watcher, &lease.root)?)
    }

    /// As [`Workspace::watch`]. If there are as many as the kernel or the share allows, registered watches that stay go,
    /// those first that were unread for longest.
    ///
    /// # Errors
    /// As [`Watcher::new`].
    pub fn watch_in_place_of_another(
        &self,
        settings: &Settings,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<WatchStream, Stopped> {
        loop {
            match self.watch(settings, interrupt) {
                Err(Stopped::Failed(error))
                    if matches!(error.kind(), Kind::NoWatches | Kind::OverLimit) =>
                {
                    if !self.watches.give_up_one() {
                        return Err(error.into());
                    }
                }
                watch => return watch,
            }
        }
    }

    /// Tells the events of a registered watch after the one with the number `after`; waits for the first one at
    /// most for `limit`.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn read_watch(
        &self,
        id: &str,
        after: u64,
        limit: Duration,
    ) -> Result<impl FnOnce(&mut dyn WatchSubscriber) + use<>> {
        let watch = self.watches.find(id)?;
        Ok(move |subscriber: &mut dyn WatchSubscriber| {
            let now = Instant::now();
            // A limit beyond any clock is none.
            let until = now
                .checked_add(limit)
                .unwrap_or(now + Duration::from_secs(1 << 30));
            // If the client has disconnected, the events stay for the next request.
            let _ = watch.tell(after, until, subscriber);
        })
    }
}

impl WatchStream {
    /// Directories that are watched.
    pub fn directories(&self) -> usize {
        self.watcher.directories()
    }

    /// Tells what changes until the watch is over, the client disconnects or `until` has passed.
    pub fn run(mut self, until: Option<Instant>, subscriber: &mut dyn WatchSubscriber) {
        let mut last = 0;
        let followed = self.follow(&mut last, until, subscriber);
        if followed.is_ok() {
            subscriber.end(last, None);
        }
        if let Err(ended) = followed
            && ended != Ended::Disconnected
        {
            // The end of a workspace deletes its files, which the client did not ask for.
            let is_closed = self.lease.check_open().is_err();
            let ended = if is_closed { Ended::Closed } else { ended };
            if ended.is_loss() {
                last += 1;
                subscriber.event(last, &TreeEvent::overflow());
            }
            subscriber.end(last, Some(ended));
        }
    }

    fn follow(
        &mut self,
        last: &mut u64,
        limit: Option<Instant>,
        subscriber: &mut dyn WatchSubscriber,
    ) -> std::result::Result<(), Ended> {
        let mut sink = StreamSink {
            workspace: &self.lease,
            turn: BackgroundTurn::of_this_thread(&self.lease.background),
            lookout: Lookout::new(),
            keep_alive: KeepAlive::new(),
            subscriber,
            last,
            unsent: 0,
        };
        loop {
            let before = *sink.last;
            sink.unsent = 0;
            let files = self.lease.files()?;
            let until = self.watcher.advance(&files, &mut sink)?;
            drop(files);
            sink.look()?;
            // While the client takes nothing, the kernel collects events, and says if it has lost some.
            send_all(sink.subscriber.client())?;
            if *sink.last > before {
                sink.keep_alive.reset();
            }
            if limit.is_some_and(|limit| limit <= Instant::now()) {
                return Ok(());
            }
            let until = until.into_iter().chain(limit).min();
            let wake = Some(self.watcher.descriptor());
            sink.keep_alive
                .wait(sink.subscriber.client(), wake, until)?;
        }
    }
}

/// Tells the subscriber of a stream, within what its tenant may use of the processor.
struct StreamSink<'a> {
    workspace: &'a Workspace,
    turn: BackgroundTurn,
    lookout: Lookout,
    keep_alive: KeepAlive,
    subscriber: &'a mut dyn WatchSubscriber,
    last: &'a mut u64,
    unsent: usize,
}

impl StreamSink<'_> {
    fn look(&mut self) -> std::result::Result<(), Ended> {
        // The end of a workspace deletes its files, which the client did not ask for.
        if self.workspace.is_closed() {
            return Err(Ended::Closed);
        }
        let client = self.subscriber.client();
        if self.lookout.look(client)? {
            self.keep_alive.ping_if_due(client);
            client.flush()?;
        }
        Ok(())
    }
}

impl EventSink for StreamSink<'_> {
    fn event(&mut self, event: TreeEvent) -> std::result::Result<(), Ended> {
        self.look()?;
        *self.last += 1;
        self.subscriber.event(*self.last, &event);
        self.unsent += 1;
        if self.unsent >= BATCH_EVENTS {
            self.unsent = 0;
            send_all(self.subscriber.client())?;
        }
        Ok(())
    }

    fn check(&mut self) -> std::result::Result<(), Ended> {
        while self.turn.give_way() {
            self.look()?;
        }
        self.look()
    }
}
