//! All contexts of a workspace, and the spares.
//!
//! A spare is an interpreter that is ready before it is asked for: one of each kind of which there was a context. It
//! runs within the same walls, takes the directory and the environment of the context that it becomes, and is thrown
//! away after some minutes. A bash is ready so soon that it needs none.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::context::{Asked, Context, ContextSpec, ContextState, Home, Identity, Site};
use super::driver;
use super::execution::ExecutionSpec;
use crate::client::{Interrupt, Stopped};
use crate::clock::now_ms;
use crate::confine::Confinement;
use crate::error::{Error, Kind, Result};
use crate::limits::activity::Activity;
use crate::limits::ledger::{Item, Ledger};
use crate::process::registry::Registry;
use crate::spec::language::Language;
use crate::spec::network::NetworkPolicy;
use crate::threads::lock::{Mutex, lock};
use crate::threads::priority::BackgroundWork;

/// How many ids of deleted contexts are remembered: deleting them again is no error.
const REMOVED: usize = 256;

/// Before the name of a Jupyter kernel: a back end of Python contexts, whatever the kernel runs.
const JUPYTER: &str = "jupyter:";

/// Before the name of a language: the id of its default context.
pub const DEFAULT_PREFIX: &str = "default-";

/// What bounds the contexts of a workspace.
#[derive(Debug, Clone, Copy, Default)]
pub struct ContextsSettings {
    /// Most contexts.
    pub most: usize,
    /// Bytes of events that an execution keeps.
    pub journal_bytes: usize,
}

/// The contexts of one workspace.
pub struct Contexts {
    this: Weak<Self>,
    site: Arc<Site>,
    most: usize,
    table: Mutex<ContextTable>,
}

/// Guarded by one lock, which is never held while an interpreter starts or ends.
#[derive(Default)]
struct ContextTable {
    /// In the order in which they were made.
    contexts: Vec<Arc<Context>>,
    /// Interpreters that are ready, or soon.
    spares: Vec<Arc<Context>>,
    removed: VecDeque<String>,
    next: u64,
    is_closed: bool,
}

impl Contexts {
    pub fn new(
        settings: ContextsSettings,
        processes: Arc<Registry>,
        confinement: Arc<Confinement>,
        ledger: Arc<Ledger>,
        activity: Arc<Activity>,
        background: Arc<BackgroundWork>,
    ) -> Arc<Self> {
        let site = Arc::new(Site {
            processes,
            confinement,
            ledger,
            activity,
            background,
            journal_bytes: settings.journal_bytes,
            drive: driver::run,
        });
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            site,
            most: settings.most,
            table: Mutex::new(ContextTable {
                next: 1,
                ..ContextTable::default()
            }),
        })
    }

    /// All contexts, the oldest first.
    pub fn list(&self) -> Vec<Arc<Context>> {
        lock(&self.table).contexts.clone()
    }

    /// A context by its id.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn find(&self, id: &str) -> Result<Arc<Context>> {
        let table = lock(&self.table);
        table.find(id).cloned().ok_or_else(|| no_context(id))
    }

    /// Makes a context, or finds the one that has its id, and waits until it is ready.
    ///
    /// # Errors
    /// The interpreter cannot be started; `IdInUse`; `TooManyContexts`; `TooWide` and `Unavailable` for a network
    /// policy; `Invalid` for a back end that the language does not have.
    pub fn create(
        &self,
        language: Language,
        spec: ContextSpec,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Arc<Context>, Stopped> {
        self.make(language, spec, false, interrupt)
    }

    fn make(
        &self,
        language: Language,
        mut spec: ContextSpec,
        is_stateless: bool,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Arc<Context>, Stopped> {
        let backend = &backend(language, spec.backend.as_deref())?.to_owned();
        let confinement = &self.site.confinement;
        if let Some(user) = &spec.user
            && let Some((.., start)) = confinement.file_account(user)?
        {
            spec.directory.get_or_insert(start);
        }
        let network = confinement.network(spec.network.as_ref())?;
        let is_usual = network == confinement.network(None)?;
        let mut table = lock(&self.table);
        if let Some(id) = &spec.id
            && let Some(context) = table.find(id).cloned()
        {
            drop(table);
            if context.is_deleted() {
                // It is not gone yet, and its id is free when it is.
                self.remove(&context)?;
                return self.make(language, spec, is_stateless, interrupt);
            }
            self.check_same(&context, language, &spec, &network)?;
            // One that is dead says so itself when it is used.
            if context.state() == ContextState::Starting {
                context.wait_ready(interrupt)?;
            }
            return Ok(context);
        }
        if table.is_closed {
            return Err(self.site.processes.refusal().into());
        }
        if table.contexts.len() >= self.most {
            let text = format!("the limit of {} contexts is reached; delete one", self.most);
            return Err(Error::new(Kind::TooManyContexts, text).into());
        }
        let charge = |bytes| self.site.ledger.charge(Item::Commands, bytes);
        let (kept, sent) = (charge(spec.bytes()), charge(spec.sent_bytes()));
        let (kept, sent) = (kept.map_err(Error::from)?, sent.map_err(Error::from)?);
        let spare = is_usual.then(|| table.take_spare(language, backend, &spec));
        let spare = spare.flatten();
        let is_warm = spare.is_some();
        let context =
            spare.unwrap_or_else(|| Context::new(language, backend, &self.site, self.this.clone()));
        let id = spec.id.clone().unwrap_or_else(|| {
            // A client may have chosen it.
            loop {
                let id = format!("c-{}", table.next);
                table.next += 1;
                if table.find(&id).is_none() {
                    break id;
                }
            }
        });
        let asked = is_warm.then(|| spec.clone());
        // Its client knows the id, and may ask for it again.
        let is_known = spec.id.is_some() && !is_stateless;
        let identity = Identity {
            id,
            spec,
            _charge: kept,
            created_at_ms: now_ms(),
            is_warm,
            is_stateless,
        };
        context.identify(identity, sent);
        table.contexts.push(Arc::clone(&context));
        drop(table);
        let started = if is_warm { Ok(()) } else { context.start() };
        match started
            .map_err(Stopped::from)
            .and_then(|()| context.wait_ready(interrupt))
        {
            Ok(()) => {}
            Err(Stopped::Failed(error)) => {
                let _ = self.remove(&context);
                return match asked {
                    // The spare has ended in this moment.
                    Some(asked) if error.kind() != Kind::BadDirectory => {
                        self.make(language, asked, is_stateless, interrupt)
                    }
                    _ => Err(error.into()),
                };
            }
            Err(stopped) => {
                if !is_known {
                    let _ = self.remove(&context);
                }
                return Err(stopped);
            }
        }
        if is_usual {
            self.add_spare(language, backend);
        }
        Ok(context)
    }

    /// Checks that a context is what is asked for by its id.
    ///
    /// # Errors
    /// `IdInUse`.
    fn check_same(
        &self,
        context: &Context,
        language: Language,
        spec: &ContextSpec,
        network: &NetworkPolicy,
    ) -> Result<()> {
        let its = context.spec();
        let its_network = its.and_then(|its| its.network.as_ref());
        let other = if context.language != language {
            format!("of {}", context.language.name())
        } else if spec.user.is_some() && its.is_none_or(|its| its.user != spec.user) {
            "of another user".to_owned()
        } else if spec.network.is_some() && self.site.confinement.network(its_network)? != *network
        {
            format!("whose network is not {}", network.name())
        } else {
            return Ok(());
        };
        let id = context.id();
        let text = format!("cannot make {id}: the id belongs to a context {other}; choose another");
        Err(Error::new(Kind::IdInUse, text))
    }

    /// Executes code in the context with this id; without one in the default one of the language, which is made if it
    /// is missing and started anew if it is dead.
    ///
    /// # Errors
    /// As [`Contexts::create`] and [`Context::execute`].
    pub fn execute(
        &self,
        language: Language,
        context: ContextSpec,
        spec: ExecutionSpec,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Asked, Stopped> {
        if let Some(id) = &context.id {
            let named = self.find(id)?;
            // It has one already, but what no context of the language can have is an error.
            self::backend(named.language, context.backend.as_deref())?;
            return Ok(named.execute(spec)?);
        }
        let kernel = context.backend.as_deref();
        let name = match kernel.and_then(|backend| backend.strip_prefix(JUPYTER)) {
            Some(kernel) => format!("default-jupyter-{kernel}"),
            None => format!("{DEFAULT_PREFIX}{}", language.name()),
        };
        let default = ContextSpec {
            id: Some(name),
            ..context
        };
        let context = self.create(language, default, interrupt)?;
        if matches!(context.state(), ContextState::Dead(_)) {
            context.revive(interrupt)?;
        }
        Ok(context.execute(spec)?)
    }

    /// Executes code in a context of its own, which goes with it.
    ///
    /// # Errors
    /// As [`Contexts::create`] and [`Context::execute`].
    pub fn execute_stateless(
        &self,
        language: Language,
        context: ContextSpec,
        spec: ExecutionSpec,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Asked, Stopped> {
        let context = self.make(language, context, true, interrupt)?;
        let asked = context.execute(spec).inspect_err(|_| {
            let _ = self.remove(&context);
        });
        Ok(asked?)
    }

    /// Ends a context with everything that it has started, and forgets it. False if another request deleted it, or it
    /// went by itself.
    ///
    /// # Errors
    /// `NotFound` if there never was one with this id. The kernel has not let it die yet.
    pub fn delete(&self, id: &str) -> Result<bool> {
        let table = lock(&self.table);
        let found = table.find(id).cloned();
        let is_removed = table.removed.iter().any(|removed| removed == id);
        drop(table);
        match found {
            Some(context) => self.remove(&context),
            None if is_removed => Ok(false),
            None => Err(no_context(id)),
        }
    }

    /// False if it was being deleted already.
    fn remove(&self, context: &Arc<Context>) -> Result<bool> {
        let is_first = context.delete()?;
        self.forget(context);
        Ok(is_first)
    }

    fn forget(&self, context: &Context) {
        let mut table = lock(&self.table);
        let count = table.contexts.len();
        table
            .contexts
            .retain(|other| !std::ptr::eq(&raw const **other, context));
        table
            .spares
            .retain(|other| !std::ptr::eq(&raw const **other, context));
        if table.contexts.len() < count {
            table.removed.push_back(context.id().to_owned());
            if table.removed.len() > REMOVED {
                table.removed.pop_front();
            }
        }
    }

    /// Starts a spare of a kind unless there is one.
    fn add_spare(&self, language: Language, backend: &str) {
        if language == Language::Bash || backend.starts_with(JUPYTER) {
            return;
        }
        let spare = {
            let mut table = lock(&self.table);
            if table.is_closed
                || table
                    .spares
                    .iter()
                    .any(|spare| spare.is_kind(language, backend))
            {
                return;
            }
            let spare = Context::new(language, backend, &self.site, self.this.clone());
            table.spares.push(Arc::clone(&spare));
            spare
        };
        if spare.start().is_err() {
            self.forget(&spare);
        }
    }

    /// Ends the spares: what they were started with has changed.
    pub fn drop_spares(&self) {
        let spares = std::mem::take(&mut lock(&self.table).spares);
        for spare in spares {
            let _ = spare.delete();
        }
    }

    /// Makes no more contexts. The interpreters end with the processes of the workspace.
    pub fn close(&self) {
        lock(&self.table).is_closed = true;
    }
}

impl Home for Contexts {
    fn forget_ended(&self, context: &Context) {
        if context.identity().is_none() || context.is_stateless() {
            self.forget(context);
        }
    }
}

impl ContextTable {
    fn find(&self, id: &str) -> Option<&Arc<Context>> {
        self.contexts.iter().find(|context| context.id() == id)
    }

    /// A spare that can become such a context, if there is one that is ready.
    fn take_spare(
        &mut self,
        language: Language,
        backend: &str,
        spec: &ContextSpec,
    ) -> Option<Arc<Context>> {
        // What an interpreter reads when it starts.
        let is_early = |name: &str| {
            ["PYTHON", "LD_", "NODE_"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
                || name == "PATH"
        };
        // A spare runs as the usual user.
        if spec.user.is_some() || spec.environment.iter().any(|(name, _)| is_early(name)) {
            return None;
        }
        let at = self
            .spares
            .iter()
            .position(|spare| spare.is_kind(language, backend) && spare.is_waiting())?;
        Some(self.spares.remove(at))
    }
}

/// The back end that is asked for, which the language has.
fn backend(language: Language, asked: Option<&str>) -> Result<&str> {
    let has = |asked: &str| {
        language
            .backends()
            .iter()
            .find(|backend| **backend == asked)
    };
    match asked {
        None | Some("auto") => Ok(match language {
            Language::Python => "auto",
            Language::JavaScript => "node",
            Language::Bash => "bash",
        }),
        Some(asked) if language == Language::Python && is_kernel(asked) => Ok(asked),
        Some(asked) => has(asked).copied().ok_or_else(|| {
            Error::invalid(format_args!(
                "backend is {asked:?}; for {} it takes auto, {}",
                language.name(),
                language.backends().join(", ")
            ))
        }),
    }
}

/// Whether it is `jupyter:` and what may be the name of a kernel.
fn is_kernel(backend: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let name = backend.strip_prefix(JUPYTER).unwrap_or_default();
    (1..=50).contains(&name.len()) && name.bytes().all(is_allowed)
}

fn no_context(id: &str) -> Error {
    let text = format!("there is no context {id}; the list of contexts has those that are known");
    Error::new(Kind::NotFound, text)
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::interpreter::context::{Phase, Request};
    use crate::interpreter::event::EndReason;
    use crate::interpreter::execution::{ExecutionSpec, ExecutionState};
    use crate::limits::ledger::Budget;
    use crate::process::registry::{OpenCounts, Shared};
    use crate::spec::network::{Filter, NetworkPolicy, Rule, Rules};

    /// A client that stays.
    struct Stays;

    impl Interrupt for Stays {
        fn check(&mut self) -> std::result::Result<(), Stopped> {
            Ok(())
        }
    }

    /// Contexts whose interpreters are ready at once, and never run.
    fn contexts(budget: u64) -> Arc<Contexts> {
        driven(budget, Arc::default(), |context| {
            context.change(|state| {
                state.phase = Phase::Ready;
                state.has_driver = false;
            });
        })
    }

    fn driven(
        budget: u64,
        background: Arc<BackgroundWork>,
        drive: fn(&Arc<Context>),
    ) -> Arc<Contexts> {
        let ledger = Budget::new(budget).whole();
        let activity = Arc::new(Activity::new());
        let shared = Shared::new(4096, 4096).unwrap();
        let site = Arc::new(Site {
            processes: Registry::new(
                shared,
                Arc::clone(&activity),
                Arc::clone(&ledger),
                OpenCounts::new(),
                1,
            ),
            confinement: Arc::new(Confinement::for_test()),
            ledger,
            activity,
            background,
            journal_bytes: 4096,
            drive,
        });
        Arc::new_cyclic(|this| Contexts {
            this: Weak::clone(this),
            site,
            most: 64,
            table: Mutex::default(),
        })
    }

    #[test]
    fn the_variables_of_a_context_are_charged_until_it_is_deleted() {
        let contexts = contexts(64 * 1024);
        let create = || {
            let spec = ContextSpec {
                environment: vec![("A".to_owned(), Some("x".repeat(4000)))],
                ..ContextSpec::default()
            };
            contexts.create(Language::Bash, spec, &mut Stays)
        };
        // All of them get half of the budget, and each needs more when it is made.
        let made: Vec<_> = std::iter::from_fn(|| create().ok()).collect();
        assert!((4..8).contains(&made.len()), "{}", made.len());
        for context in made {
            assert!(contexts.delete(context.id()).unwrap());
        }
        assert!(create().is_ok());
    }

    #[test]
    fn the_rules_of_a_context_are_charged() {
        let rule = format!("{}.example:443", "a".repeat(60));
        let rules = vec![Rule::parse(&rule).unwrap(); 200];
        let allow = Rules {
            allow: Some(rules),
            deny: Vec::new(),
        };
        let spec = ContextSpec {
            network: Some(NetworkPolicy::Filtered(Arc::new(Filter::new(allow, None)))),
            ..ContextSpec::default()
        };
        assert!(spec.bytes() >= 2 * 200 * rule.len());
        let made = contexts(32 * 1024).create(Language::Bash, spec, &mut Stays);
        let Err(Stopped::Failed(refusal)) = made else {
            panic!("it has no room");
        };
        assert_eq!(refusal.kind(), Kind::OverLimit, "{refusal}");
    }

    #[test]
    fn an_answer_is_charged_until_the_bridge_has_it() {
        let contexts = contexts(64 * 1024);
        let spec = ContextSpec::default();
        let Ok(context) = contexts.create(Language::Bash, spec, &mut Stays) else {
            panic!("no context");
        };
        let answer = |bytes: usize| {
            context.state_guard().asked = Some(1);
            context.answer(Some("x".repeat(bytes)))
        };
        assert_eq!(answer(20_000).unwrap_err().kind(), Kind::OverLimit);
        assert_eq!(
            context.state_guard().asked,
            Some(1),
            "it can be answered still"
        );
        answer(5000).unwrap();
        assert!(answer(8000).is_err());
        context.state_guard().orders.clear();
        answer(8000).unwrap();
    }

    /// Writes so many messages that nobody expects.
    const FLOOD: &str = "for fd in /proc/$$/fd/*; do [[ ! -S $fd ]] || break; done
        printf -v begun 'begun\\n%.0s' {1..5000}
        echo before
        for i in {1..100}; do echo -n \"$begun\" >&${fd##*/}; done
        echo after";

    fn lasting_bash(background: Arc<BackgroundWork>) -> (Arc<Contexts>, Arc<Context>) {
        let contexts = driven(64 << 20, background, driver::run);
        let spec = ContextSpec::default();
        let Ok(context) = contexts.create(Language::Bash, spec, &mut Stays) else {
            panic!("no bash");
        };
        (contexts, context)
    }

    fn wait_for(condition: &dyn Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !condition() {
            assert!(Instant::now() < until, "it does not come to that");
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn has_ended(asked: &Asked) -> bool {
        matches!(asked.execution.state(), ExecutionState::Ended(_))
    }

    #[test]
    fn a_flood_of_messages_pauses_for_the_other_work_of_its_tenant() {
        let owed = Duration::from_secs(3);
        let begun = Instant::now();
        let (contexts, context) = lasting_bash(BackgroundWork::owing(owed));
        // What takes next to nothing does not wait.
        for _ in 0..5 {
            let asked = context.execute(ExecutionSpec::new("echo hi".to_owned()));
            let asked = asked.unwrap();
            wait_for(&|| has_ended(&asked));
        }
        let asked = context
            .execute(ExecutionSpec::new(FLOOD.to_owned()))
            .unwrap();
        wait_for(&|| has_ended(&asked));
        let reason = asked.execution.state();
        assert_eq!(reason, ExecutionState::Ended(EndReason::Completed));
        assert!(begun.elapsed() >= owed);
        assert!(contexts.delete(context.id()).unwrap());
    }

    #[test]
    fn output_and_the_end_do_not_wait_for_a_flood_that_pauses() {
        let (contexts, context) = lasting_bash(BackgroundWork::owing(Duration::from_secs(3600)));
        let code = format!("(while :; do echo out; sleep 0.01; done) &\n{FLOOD}");
        let asked = context.execute(ExecutionSpec::new(code)).unwrap();
        let written = || {
            let state = context.state_guard();
            let process = state.process.as_ref().unwrap();
            process.written(crate::process::ring::Stream::Stdout)
        };
        // The kernel holds less of the flood than it is, so its end would need the server to read on.
        wait_for(&|| written() > 400);
        assert!(!has_ended(&asked));
        assert!(contexts.delete(context.id()).unwrap());
        assert!(has_ended(&asked));
    }

    /// The driver is held up, by a program that has its pipe.
    #[test]
    fn interrupts_of_an_execution_are_one_order() {
        let contexts = contexts(64 * 1024);
        let spec = ContextSpec::default();
        let Ok(context) = contexts.create(Language::Bash, spec, &mut Stays) else {
            panic!("no context");
        };
        let ask = || {
            let spec = ExecutionSpec {
                id: Some("same".to_owned()),
                ..ExecutionSpec::new("sleep 1000".to_owned())
            };
            context.execute(spec).unwrap()
        };
        let first = ask();
        let running = context.state_guard().queue.pop_front();
        context.state_guard().running = running;
        drop(first);
        for _ in 0..50 {
            // A client that goes at once.
            drop(ask());
        }
        let orders = &context.state_guard().orders;
        assert!(matches!(orders[..], [Request::Interrupt { .. }]));
    }
}
