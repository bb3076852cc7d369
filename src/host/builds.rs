//! Templates that clients build by steps, as images are built: in a sandbox, whose root becomes a snapshot.
//!
//! A build waits for its files, which have no name on the disk, and then has a thread of its own: it needs no client. The
//! records never name its sandbox as one that is made, so that the next server removes what a killed one leaves. Whoever deletes the
//! sandbox ends the build.

use std::fs::File;
use std::io::{Seek, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::life::By;
use super::store::{GivesWay, RootSettings, new_id};
use super::{Host, Sandbox};
use crate::clock::now_ms;
use crate::codec::cut_character;
use crate::codec::table::Table;
use crate::error::{Error, Kind, Result};
use crate::files::name::FilePath;
use crate::files::{Extent, Input, Kept, Overwrite, Unpacking};
use crate::logging;
use crate::process::ring::{Cursor, Piece, Stream};
use crate::spec::command::{
    CommandLine, CommandSpec, EnvironmentChange, check_environment, environment_bytes,
};
use crate::spec::sandbox::{RootChoice, SandboxSpec, Settings};
use crate::sys::{self, Ending};
use crate::threads::Thread;
use crate::threads::lock::{Mutex, lock};
use crate::threads::panics::contain;
use crate::threads::priority::BackgroundTurn;
use crate::workspace::{MAX_ARCHIVE_FILES, Workspace};

/// Builds that wait or run at once.
const MAX_BUILDS: usize = 16;

/// Builds that run at once.
const MAX_RUNNING: usize = 4;

/// Files that wait for one build: each is an open file of the server.
const MAX_FILES: usize = 128;

/// How long a build may take.
const LIMIT: Duration = Duration::from_secs(3600);

/// How long a build waits for its start, since the last byte of its files; and how long is known what has become of one.
const KEPT: Duration = Duration::from_secs(600);

/// After how long without a byte it gives way to a new one, if there are too many.
const IDLE: Duration = Duration::from_secs(300);

/// Most bytes of the log of a build, and of one line in it.
const MAX_LOG_BYTES: usize = 256 << 10;
const MAX_LINE_BYTES: usize = 4096;

/// Most bytes of the environment of a template.
const MAX_ENVIRONMENT_BYTES: usize = 64 << 10;

/// What a line counts for besides its text.
const LINE_BYTES: usize = 64;

/// How often the output of a command is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Bytes of output that are looked at in one go.
const PIECE_BYTES: usize = 64 << 10;

/// Bytes of the end of the output that an error has.
const LAST_WORDS: usize = 500;

/// Where files are unpacked before they are copied to their place.
const STAGE: &str = "/tmp/.sbx-copy";

/// Copies what was unpacked: from $1 to $2, as files of the owner $3 with the mode $4, if there is one.
const COPY: &str = r#"set -e
chown -Rh "$3" "$1"; [ -z "$4" ] || chmod -R "$4" "$1"
new() { [ -d "$1" ] || { mkdir -p "$1"; chown "$3" "$1"; }; }
if [ -d "$1" ] && [ ! -L "$1" ]; then
  new "$2" - "$3"
  for each in "$1"/* "$1"/.[!.]* "$1"/..?*; do
    [ -e "$each" ] || [ -L "$each" ] || continue
    cp -a "$each" "$2/"
  done
else
  case $2 in */) new "$2" - "$3" ;; *) new "$(dirname "$2")" - "$3" ;; esac
  cp -a "$1" "$2"
fi"#;

/// Makes the directory $2 for its owner $3 unless it is there.
const WORKDIR: &str = r#"[ -d "$2" ] || { mkdir -p "$2" && chown "$3" "$2"; }"#;

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Run,
    Env,
    Workdir,
    User,
    Copy,
}

impl Verb {
    /// All by their names.
    pub const NAMES: [(&str, Self); 5] = [
        ("RUN", Self::Run),
        ("ENV", Self::Env),
        ("WORKDIR", Self::Workdir),
        ("USER", Self::User),
        ("COPY", Self::Copy),
    ];
}

/// One step of a build.
#[derive(Debug)]
pub struct BuildStep {
    pub verb: Verb,
    /// RUN: script, user?; ENV: name, value, ...; WORKDIR: path; USER: name; COPY: source, target, owner?, mode?.
    pub args: Vec<String>,
    /// The name of the files of COPY.
    pub files: String,
}

impl BuildStep {
    fn arg(&self, number: usize) -> &str {
        self.args.get(number).map_or("", String::as_str)
    }

    /// How the log names it.
    fn title(&self) -> String {
        let mut names = Verb::NAMES.iter();
        let name = names.find(|(_, verb)| *verb == self.verb);
        let name = name.map_or("", |(name, _)| name);
        match self.verb {
            Verb::Copy => format!("{name} {} {}", self.arg(0), self.arg(1)),
            // What variables hold may be secret.
            _ => format!("{name} {}", self.arg(0)),
        }
    }
}

/// A line of a log.
#[derive(Debug, Clone)]
pub struct LogLine {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    pub is_error: bool,
    /// Steps count from 1.
    pub step: usize,
    pub text: String,
}

/// What has become of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stage {
    /// For its files.
    Waiting,
    Running,
    Ready,
    /// In this step, of which 0 is what comes before the first one.
    Failed(usize, String),
}

/// A template that is built.
pub struct Build {
    /// That of the snapshot that it becomes.
    pub id: String,
    /// The name that this gets.
    pub name: String,
    state: Mutex<State>,
}

struct State {
    stage: Stage,
    /// When that began, or the last bytes of files came.
    since: Instant,
    is_cancelled: bool,
    /// Whether its start was refused since then.
    is_refused: bool,
    sandbox: Option<String>,
    files: Vec<(String, Upload)>,
    log: Vec<LogLine>,
    log_bytes: usize,
}

/// Files as an archive.
struct Upload {
    file: Arc<File>,
    bytes: u64,
    total: Arc<AtomicU64>,
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The oldest first.
#[derive(Default)]
struct BuildTable(Vec<Arc<Build>>);

/// The builds of a host.
#[derive(Default)]
pub(super) struct Builds {
    /// Guards which ones there are.
    all: Mutex<BuildTable>,
    /// How many there are.
    count: AtomicUsize,
    /// Bytes of all uploads.
    uploaded: Arc<AtomicU64>,
}

impl BuildTable {
    /// Makes room for one more. Returns what leaves.
    ///
    /// # Errors
    /// `OverLimit`.
    fn make_room(&mut self) -> Result<Option<Arc<Build>>> {
        let all = &mut self.0;
        let leaving = if all.iter().filter(|build| !build.is_over()).count() >= MAX_BUILDS {
            // Of those that may not begin any more the one that was idle longest.
            let idle = all.iter().enumerate().filter_map(|(place, build)| {
                let state = lock(&build.state);
                let is_idle = state.is_refused || state.since.elapsed() >= IDLE;
                (state.stage == Stage::Waiting && is_idle).then_some((state.since, place))
            });
            let full = || {
                let text = format!("{MAX_BUILDS} templates are being built; delete one, or wait");
                Error::new(Kind::OverLimit, text)
            };
            Some(idle.min().ok_or_else(full)?.1)
        } else {
            // Of those that are over the oldest goes.
            let over = all.iter().position(|build| build.is_over());
            over.filter(|_| all.len() >= 2 * MAX_BUILDS)
        };
        Ok(leaving.map(|place| all.remove(place)))
    }
}

impl Builds {
    fn count(&self, table: &BuildTable) {
        self.count.store(table.0.len(), Ordering::Relaxed);
    }

    /// Forgets the others.
    fn keep(&self, is_kept: impl Fn(&Build) -> bool) {
        let mut table = lock(&self.all);
        let all = std::mem::take(&mut table.0);
        let (kept, left): (Vec<_>, _) = all.into_iter().partition(|build| is_kept(build));
        table.0 = kept;
        self.count(&table);
        drop(table);
        // Their files may be large.
        drop::<Vec<_>>(left);
    }
}

impl Build {
    fn is_over(&self) -> bool {
        matches!(self.stage(), Stage::Ready | Stage::Failed(..))
    }

    pub fn stage(&self) -> Stage {
        lock(&self.state).stage.clone()
    }

    /// At most `most` lines after the first `from` ones.
    pub fn lines(&self, from: usize, most: usize) -> Vec<LogLine> {
        let state = lock(&self.state);
        state.log.iter().skip(from).take(most).cloned().collect()
    }

    /// Whether files have come.
    pub fn has_files(&self, name: &str) -> bool {
        let state = lock(&self.state);
        state.files.iter().any(|(own, _)| own == name)
    }

    /// Its start was refused: it gives way to others before those that may still begin.
    pub fn refuse(&self) {
        lock(&self.state).is_refused = true;
    }

    /// Waits on for an upload with this name, or takes it when it has been received.
    ///
    /// # Errors
    /// `Changed` if it has begun; `OverLimit`.
    fn expect(&self, name: &str, received: Option<Upload>) -> Result<()> {
        let mut state = lock(&self.state);
        if state.stage != Stage::Waiting || state.is_cancelled {
            return Err(Error::new(Kind::Changed, "the build has begun"));
        }
        let found = state.files.iter().position(|(own, _)| own == name);
        if found.is_none() && state.files.len() >= MAX_FILES {
            let text = format!("a build takes {MAX_FILES} uploads at most");
            return Err(Error::new(Kind::OverLimit, text));
        }
        state.since = Instant::now();
        state.is_refused = false;
        let Some(upload) = received else {
            return Ok(());
        };
        let former = found.map(|place| state.files.swap_remove(place));
        state.files.push((name.to_owned(), upload));
        drop(state);
        // It may be large.
        drop(former);
        Ok(())
    }

    fn is_log_full(&self) -> bool {
        lock(&self.state).log_bytes > MAX_LOG_BYTES
    }

    fn say(&self, step: usize, is_error: bool, text: &str) {
        let mut state = lock(&self.state);
        if state.log_bytes > MAX_LOG_BYTES {
            return;
        }
        let mut end = text.len().min(MAX_LINE_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let text = &text[..end];
        state.log_bytes += LINE_BYTES + text.len();
        let text = if state.log_bytes > MAX_LOG_BYTES {
            "the log is full: what follows is left out"
        } else {
            text
        };
        state.log.push(LogLine {
            at_ms: now_ms(),
            is_error,
            step,
            text: text.to_owned(),
        });
    }

    fn enter(&self, stage: Stage) {
        let mut own = lock(&self.state);
        own.stage = stage;
        own.since = Instant::now();
        drop(own);
        self.drop_files();
    }

    /// Not under the lock: they may be large.
    fn drop_files(&self) {
        let files = std::mem::take(&mut lock(&self.state).files);
        drop(files);
    }

    /// # Errors
    /// `Changed` if somebody has ended it.
    fn check(&self) -> Result<()> {
        if lock(&self.state).is_cancelled {
            return Err(Error::new(Kind::Changed, "the template was deleted"));
        }
        Ok(())
    }
}

/// Where a build is: what the next command gets, and the template.
struct Place<'a> {
    host: &'a Host,
    build: &'a Build,
    workspace: &'a Workspace,
    step: usize,
    settings: RootSettings,
}

impl Host {
    /// Begins a template, which waits for files and steps.
    ///
    /// # Errors
    /// `Unavailable` if there are no roots; `Exists` if the name is for the operator's templates; `OverLimit`.
    pub fn begin_build(&self, name: &str) -> Result<Arc<Build>> {
        self.roots.check()?;
        self.check_name(name)?;
        let build = Arc::new(Build {
            id: new_id()?,
            name: name.to_owned(),
            state: Mutex::new(State {
                stage: Stage::Waiting,
                since: Instant::now(),
                is_cancelled: false,
                is_refused: false,
                sandbox: None,
                files: Vec::new(),
                log: Vec::new(),
                log_bytes: 0,
            }),
        });
        self.forget_builds();
        let mut table = lock(&self.roots.builds.all);
        let left = table.make_room()?;
        table.0.push(Arc::clone(&build));
        self.roots.builds.count(&table);
        drop(table);
        drop(left);
        // The maintenance forgets it, and the host is needed.
        self.table().note_request();
        self.changed.notify_all();
        Ok(build)
    }

    /// Whether there is a build, even one that is over.
    pub(super) fn has_builds(&self) -> bool {
        self.roots.builds.count.load(Ordering::Relaxed) > 0
    }

    /// Whether one waits or runs.
    pub(super) fn is_building(&self) -> bool {
        let table = lock(&self.roots.builds.all);
        table.0.iter().any(|build| !build.is_over())
    }

    /// Forgets those that are over for some time, and those that nobody has begun in time, with their files.
    pub(super) fn forget_builds(&self) {
        let is_kept = |build: &Build| {
            let state = lock(&build.state);
            state.stage == Stage::Running || state.since.elapsed() < KEPT
        };
        self.roots.builds.keep(is_kept);
    }

    /// The builds with an id or a name, the latest first.
    pub fn builds(&self, key: &str) -> Vec<Arc<Build>> {
        let table = lock(&self.roots.builds.all);
        let mut found: Vec<_> = table
            .0
            .iter()
            .filter(|build| build.id == key || build.name == key)
            .cloned()
            .collect();
        found.reverse();
        found
    }

    /// Forgets a build that nobody begins, or what has become of one whose snapshot is deleted.
    pub fn forget_build(&self, id: &str) {
        self.roots.builds.keep(|build| build.id != id);
    }

    /// Ends the builds with an id or a name that are not over. Returns whether there was one.
    ///
    /// # Errors
    /// As [`Host::delete`].
    pub fn cancel_builds(&self, key: &str) -> Result<bool> {
        let mut found = false;
        for build in self.builds(key) {
            let mut state = lock(&build.state);
            if !matches!(state.stage, Stage::Waiting | Stage::Running) {
                continue;
            }
            state.is_cancelled = true;
            let sandbox = state.sandbox.clone();
            let waits = state.stage == Stage::Waiting;
            drop(state);
            found = true;
            if waits {
                self.forget_build(&build.id);
            }
            if let Some(id) = sandbox {
                match self.delete(&id) {
                    Err(error) if error.kind() != Kind::NotFound => return Err(error),
                    _ => {}
                }
            }
        }
        Ok(found)
    }

    /// Takes the files of a step, as an archive.
    ///
    /// # Errors
    /// `Changed` if the build has begun; `NoSpace`; `OverLimit`; the input breaks off.
    pub fn receive_build_files(
        &self,
        build: &Build,
        name: &str,
        input: &mut dyn Input,
    ) -> Result<()> {
        let received = self.receive(build, name, input);
        // However long it took, the client has time to go on.
        self.table().note_request();
        received
    }

    fn receive(&self, build: &Build, name: &str, input: &mut dyn Input) -> Result<()> {
        build.expect(name, None)?;
        let mut upload = Upload {
            file: Arc::new(self.roots.store.temporary()?),
            bytes: 0,
            total: Arc::clone(&self.roots.builds.uploaded),
        };
        if sys::is_getting_scarce(std::os::fd::AsFd::as_fd(&*upload.file)) {
            let text = "the server has too few descriptors left for files of builds";
            return Err(Error::new(Kind::OverLimit, text));
        }
        let room = self.roots.store.room();
        let failed = |error| Error::io("cannot receive the files of a build", &error);
        loop {
            let piece = input.fill().map_err(failed)?;
            let (count, bytes) = (piece.len(), piece.len() as u64);
            if count == 0 {
                break;
            }
            upload.bytes += bytes;
            if upload.total.fetch_add(bytes, Ordering::Relaxed) + bytes > room {
                let text = "the files are larger than what SBX_SNAPSHOTS_BYTES leaves";
                return Err(Error::new(Kind::NoSpace, text));
            }
            let written = (&*upload.file).write_all(piece);
            written.map_err(|error| {
                Error::new(
                    Kind::NoSpace,
                    format!("cannot keep the files of a build: {error}"),
                )
            })?;
            input.used(count);
            build.expect(name, None)?;
        }
        build.expect(name, Some(upload))
    }

    /// Carries out a build, on a thread of its own.
    ///
    /// # Errors
    /// `Changed` if it has begun before; `Invalid` if files are missing; `OverLimit`; `NoThreads`.
    pub fn start_build(
        self: &Arc<Self>,
        build: &Arc<Build>,
        base: RootChoice,
        steps: Vec<BuildStep>,
    ) -> Result<()> {
        // Nobody else begins one meanwhile.
        let table = lock(&self.roots.builds.all);
        let runs = |build: &&Arc<Build>| build.stage() == Stage::Running;
        if table.0.iter().filter(runs).count() >= MAX_RUNNING {
            let text = format!("{MAX_RUNNING} builds run; try again when one has ended");
            return Err(Error::new(Kind::OverLimit, text));
        }
        let is_known = table.0.iter().any(|own| Arc::ptr_eq(own, build));
        let mut state = lock(&build.state);
        if state.stage != Stage::Waiting || state.is_cancelled || !is_known {
            let text = "the build has begun before, or it is forgotten";
            return Err(Error::new(Kind::Changed, text));
        }
        let mut copies = steps.iter().filter(|step| step.verb == Verb::Copy);
        let has = |name: &str| state.files.iter().any(|(own, _)| own == name);
        if let Some(missing) = copies.find(|step| !has(&step.files)) {
            let text = format_args!("the files of {} were not uploaded", missing.title());
            return Err(Error::invalid(text));
        }
        state.stage = Stage::Running;
        state.since = Instant::now();
        drop(state);
        drop(table);
        let (host, own) = (Arc::clone(self), Arc::clone(build));
        let work = move || {
            let done = contain(|| host.carry_out(&own, base, &steps));
            own.enter(match done {
                Ok(Ok(())) => Stage::Ready,
                Ok(Err((step, error))) => Stage::Failed(step, error.to_string()),
                Err(_) => Stage::Failed(0, "the build has failed".to_owned()),
            });
        };
        let started = Thread::new("build").start(work);
        started.map(drop).map_err(|error| {
            lock(&build.state).stage = Stage::Waiting;
            Error::new(
                Kind::NoThreads,
                format!("no thread is left to build: {error}"),
            )
        })
    }

    fn carry_out(
        self: &Arc<Self>,
        build: &Build,
        mut base: RootChoice,
        steps: &[BuildStep],
    ) -> std::result::Result<(), (usize, Error)> {
        let before = |error| (0, error);
        // What is kept of it is copied.
        if let RootChoice::Private { is_volatile, .. } = &mut base {
            *is_volatile = true;
        }
        let label = ("build".to_owned(), build.id.clone());
        let spec = SandboxSpec {
            template: build.name.clone(),
            root_choice: base,
            is_build: true,
            settings: Settings {
                labels: Arc::new(Table::from(vec![label])),
                lifetime: Some(LIMIT),
                ..Settings::default()
            },
            ..SandboxSpec::default()
        };
        let (sandboxes, shortage) = self.create(1, &spec).map_err(before)?;
        let full = || {
            let why = shortage.map_or_else(String::new, |shortage| format!(": {shortage}"));
            before(Error::new(
                Kind::OverLimit,
                format!("the host is full{why}"),
            ))
        };
        let sandbox = sandboxes.into_iter().next().ok_or_else(full)?;
        let _ending = EndOfSandbox {
            host: self,
            id: sandbox.id.clone(),
        };
        lock(&build.state).sandbox = Some(sandbox.id.clone());
        build.check().map_err(before)?;
        let settings = self.follow(build, &sandbox, steps)?;
        let kept = self.keep(build, &sandbox, settings);
        kept.map_err(|error| (steps.len() + 1, ended_or(sandbox.workspace(), error)))
    }

    /// Does the steps. Returns what commands of the template get.
    fn follow(
        &self,
        build: &Build,
        sandbox: &Sandbox,
        steps: &[BuildStep],
    ) -> std::result::Result<RootSettings, (usize, Error)> {
        let workspace = sandbox.workspace().share().map_err(|error| (0, error))?;
        let root = sandbox.spec.root.clone().unwrap_or_default();
        let account = workspace.account();
        let mut place = Place {
            host: self,
            build,
            workspace: &workspace,
            step: 0,
            settings: RootSettings {
                environment: sandbox.spec.environment.to_vec(),
                directory: root.directory,
                user: root.user.or(Some(account)),
            },
        };
        for (number, step) in steps.iter().enumerate() {
            place.step = number + 1;
            let title = format!("[{}/{}] {}", place.step, steps.len(), step.title());
            build.say(place.step, false, &title);
            let done = place.take(step);
            done.map_err(|error| {
                let error = ended_or(&workspace, error);
                build.say(place.step, true, &error.to_string());
                (place.step, error)
            })?;
        }
        Ok(place.settings)
    }

    /// Makes the template of what is in the sandbox.
    fn keep(&self, build: &Build, sandbox: &Sandbox, settings: RootSettings) -> Result<()> {
        // Their room is for the snapshot.
        build.drop_files();
        let (stopped, _) = self.stop(&sandbox.id, By::Host { holds: true })?;
        let import = self.copy_root(&stopped, build.id.clone())?;
        build.check()?;
        // All of it was there until here, and nothing ran.
        let is_same = |now: Arc<Sandbox>| Arc::ptr_eq(&now, &stopped);
        if stopped.workspace().is_closed() || !self.find(&sandbox.id).is_ok_and(is_same) {
            let text = "the sandbox of the build was deleted or resumed while it was copied";
            return Err(Error::new(Kind::Changed, text));
        }
        let name = Some(&*build.name);
        let made = import.with_settings(settings).complete(name, None)?;
        logging::info(format_args!(
            "template {} built as snapshot {}",
            build.name, made.id
        ));
        Ok(())
    }

    /// Copies the root of a sandbox that is stopped.
    fn copy_root(&self, sandbox: &Sandbox, id: String) -> Result<super::store::Import> {
        let private = sandbox.root.get().ok_or_else(Error::deleted)?;
        // Whoever deletes it waits until this is not in use.
        let workspace = sandbox.workspace().share()?;
        let root = workspace.root_for(private.root());
        let (store, ledger) = (&self.roots.store, &sandbox.ledger);
        store.import_tree(id, root, &[], Extent::Root, ledger)
    }
}

/// The end of the sandbox of a build.
struct EndOfSandbox<'a> {
    host: &'a Host,
    id: String,
}

impl Drop for EndOfSandbox<'_> {
    fn drop(&mut self) {
        let _ = self.host.delete(&self.id);
    }
}

impl Place<'_> {
    fn take(&mut self, step: &BuildStep) -> Result<()> {
        let user = self.settings.user.clone().unwrap_or_default();
        match step.verb {
            Verb::Run => {
                let user = Some(step.arg(1)).filter(|user| !user.is_empty());
                let user = user.unwrap_or(&user_of(&self.settings)).to_owned();
                self.run(&user, &["-l", "-c", step.arg(0)], None)
            }
            Verb::Env => {
                for pair in step.args.chunks(2) {
                    let [name, value] = pair else {
                        return Err(Error::invalid("ENV takes names and values"));
                    };
                    self.build.check()?;
                    let value = self.expand(&user, value)?;
                    let own = &mut self.settings.environment;
                    own.retain(|(other, _)| other != name);
                    own.push((name.clone(), Some(value)));
                    // Each command of the template has it.
                    check_bytes(environment_bytes(own))?;
                }
                check_environment(&self.settings.environment)
            }
            Verb::Workdir => {
                let path = self.absolute(step.arg(0))?;
                self.script(WORKDIR, &["", &path, &format!("{user}:")])?;
                self.settings.directory = Some(path);
                Ok(())
            }
            Verb::User => {
                // The group is that of the account.
                let name = step.arg(0).split(':').next().unwrap_or_default();
                // Whether there is one.
                drop(self.workspace.share_as(name)?);
                self.settings.user = Some(name.to_owned());
                Ok(())
            }
            Verb::Copy => self.copy(step, &user),
        }
    }

    /// A path from the root on.
    fn absolute(&self, path: &str) -> Result<String> {
        if path.starts_with('/') {
            return Ok(path.to_owned());
        }
        let user = user_of(&self.settings);
        let view = self.workspace.share_as(&user)?;
        let home = String::from_utf8_lossy(view.view().home()).into_owned();
        let directory = self.settings.directory.as_deref().unwrap_or(&home);
        Ok(format!("{}/{path}", directory.trim_end_matches('/')))
    }

    /// A value with what variables in it hold.
    fn expand(&self, user: &str, value: &str) -> Result<String> {
        if !value.contains('$') {
            return Ok(value.to_owned());
        }
        let mut quoted = String::new();
        for character in value.chars() {
            if matches!(character, '"' | '`' | '\\') {
                quoted.push('\\');
            }
            quoted.push(character);
        }
        let mut held = Vec::new();
        let script = format!("printf %s \"{quoted}\"");
        self.run(user, &["-c", &script], Some(&mut held))?;
        Ok(String::from_utf8_lossy(&held).into_owned())
    }

    /// Runs a script as root, with words from $1 on.
    fn script(&self, script: &str, words: &[&str]) -> Result<()> {
        let words = [&["-c", script, "build"], words].concat();
        self.run("root", &words, None)
    }

    fn copy(&self, step: &BuildStep, user: &str) -> Result<()> {
        let missing = || Error::invalid("the files are not there");
        let file = {
            let state = lock(&self.build.state);
            let mut files = state.files.iter();
            let found = files.find(|(name, _)| *name == step.files);
            Arc::clone(&found.ok_or_else(missing)?.1.file)
        };
        (&*file)
            .rewind()
            .map_err(|error| Error::io("cannot read the files", &error))?;
        let root = self.workspace.share_as("root")?;
        let remove = ["", STAGE];
        self.script("rm -rf \"$2\"", &remove)?;
        let options = Unpacking {
            strip: 0,
            overwrite: Overwrite::Replace,
            dry_run: false,
            kept: Kept::Files,
            make_parents: true,
            max_bytes: self.host.roots.store.room(),
            max_files: MAX_ARCHIVE_FILES,
        };
        let stage = FilePath::new(STAGE.as_bytes())?;
        let ledger = &self.workspace.ledger;
        let mut input = GivesWay::new(&*file, ledger);
        root.files()?.unpack(&stage, options, &mut input, ledger)?;
        // Of a pattern, what is below the directory that it begins with.
        let names = step.arg(0).split('/');
        let plain = names.take_while(|name| !name.contains(['*', '?', '[', '{']));
        let plain = plain.filter(|name| !matches!(*name, "" | "."));
        let from = plain.fold(STAGE.to_owned(), |path, name| format!("{path}/{name}"));
        let target = self.absolute(step.arg(1))?;
        let owner = Some(step.arg(2)).filter(|owner| !owner.is_empty());
        // With the group that it has.
        let usual = format!("{user}:");
        let words = [&from, &*target, owner.unwrap_or(&usual), step.arg(3)];
        self.script(COPY, &words)?;
        self.script("rm -rf \"$2\"", &remove)
    }

    /// Runs a shell to its end. What it writes goes to the log, or what it writes to stdout into `held`.
    fn run(&self, user: &str, words: &[&str], mut held: Option<&mut Vec<u8>>) -> Result<()> {
        self.build.check()?;
        let start = |shell: &str| {
            let words = [shell].into_iter().chain(words.iter().copied());
            let line = CommandLine::Program(words.map(str::to_owned).collect());
            let environment: Vec<EnvironmentChange> = self.settings.environment.clone();
            let directory = self.settings.directory.clone();
            let mut spec = CommandSpec::new(line, environment, directory)?;
            spec.keeps_path = true;
            spec.user = Some(user.to_owned());
            self.workspace.start_background(spec)
        };
        let process = match start("/bin/bash") {
            Err(error) if error.kind() == Kind::ProgramNotFound => start("/bin/sh")?,
            started => started?,
        };
        if let Ok(input) = process.stdin() {
            input.close();
        }
        let (mut cursor, mut piece) = (Cursor::default(), Vec::new());
        let mut lines = [Vec::new(), Vec::new()];
        let mut turn = BackgroundTurn::of_this_thread(&self.workspace.ledger.work);
        loop {
            self.build.check()?;
            let is_over = process.wait_ended(LOOK_EVERY);
            let mut next = || {
                process
                    .look_at_output(|ring| ring.read(&mut cursor, &mut piece, PIECE_BYTES))
                    .map(|found| (found, std::mem::take(&mut piece)))
            };
            while let Some((found, bytes)) = next() {
                // Ends with the workspace.
                turn.pass(&mut || Ok(())).map_err(|_| Error::deleted())?;
                match found {
                    Piece::Data { stream, .. } => match &mut held {
                        Some(held) if stream == Stream::Stdout => {
                            check_bytes(held.len() + bytes.len())?;
                            held.extend_from_slice(&bytes);
                        }
                        _ => self.tell(stream, &mut lines[stream.index()], &bytes),
                    },
                    Piece::Dropped { stream, bytes, .. } => {
                        let text = format!("[{bytes} bytes left out]\n");
                        self.tell(stream, &mut lines[stream.index()], text.as_bytes());
                    }
                }
            }
            if is_over {
                break;
            }
        }
        for stream in Stream::ALL {
            let line = &mut lines[stream.index()];
            if !line.is_empty() {
                self.tell(stream, line, b"\n");
            }
        }
        let why = match process.exit().map(|exit| exit.ending) {
            Some(Ending::Exited(0)) => return Ok(()),
            Some(Ending::Exited(status)) => format!("exit status {status}"),
            Some(Ending::Signaled(signal)) => format!("signal {signal}"),
            _ => "its end is not known".to_owned(),
        };
        let words = process.last_words(LAST_WORDS);
        Err(Error::invalid(format_args!(
            "the command has failed: {why}: {words}"
        )))
    }

    /// Adds what a command has written to the log, line by line.
    fn tell(&self, stream: Stream, line: &mut Vec<u8>, bytes: &[u8]) {
        if self.build.is_log_full() {
            line.clear();
            return;
        }
        line.extend_from_slice(bytes);
        let mut rest = &line[..];
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let text = rest[..end].trim_ascii_end();
            let shown = String::from_utf8_lossy(text);
            self.build.say(self.step, stream == Stream::Stderr, &shown);
            rest = &rest[end + 1..];
        }
        let mut rest = rest.to_vec();
        if rest.len() > MAX_LINE_BYTES {
            let cut = rest.split_off(rest.len() - cut_character(&rest));
            let shown = String::from_utf8_lossy(&rest);
            self.build.say(self.step, stream == Stream::Stderr, &shown);
            rest = cut;
        }
        *line = rest;
    }
}

/// # Errors
/// `Invalid` if an environment of so many bytes is too large.
fn check_bytes(bytes: usize) -> Result<()> {
    if bytes > MAX_ENVIRONMENT_BYTES {
        let text = format_args!("ENV takes {MAX_ENVIRONMENT_BYTES} bytes in all");
        return Err(Error::invalid(text));
    }
    Ok(())
}

/// Why a step has failed: the end of the sandbox, or this error.
fn ended_or(workspace: &Workspace, error: Error) -> Error {
    if workspace.is_closed() {
        let text = "the sandbox of the build has ended: it was deleted, or an hour is over";
        return Error::new(Kind::Changed, text);
    }
    error
}

fn user_of(settings: &RootSettings) -> String {
    settings.user.clone().unwrap_or_default()
}
