//! The virtual environment of a workspace, which every command that starts has first in its PATH.
//!
//! It is made by the workspace's own Python, in a command like any other: as its user, within its limits.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::client::{Interrupt, Stopped};
use crate::error::{Error, Kind, Result};
use crate::files::name::FilePath;
use crate::process::registry::StartOutcome;
use crate::process::{OnDisconnect, Process, Reason};
use crate::spec::command::{CommandLine, CommandSpec};
use crate::spec::language::{Language, script};
use crate::sys::Ending;
use crate::threads::lock::CountedPlace;
use crate::workspace::lease::{Lease, Workspace};

/// Where it is made unless the client names a path.
const DEFAULT_PATH: &str = ".sbx/venv";

/// How long making it may take.
const LIMIT: Duration = Duration::from_secs(120);

/// How often a waiting request checks its connection.
const PAUSE: Duration = Duration::from_millis(50);

/// Most bytes of what the command said last that an error tells.
const LAST_WORDS: usize = 1024;

pub struct Venv {
    /// Its absolute path.
    pub path: String,
    /// Whether this request has made it.
    pub created: bool,
}

/// A virtual environment that is being made, by one request at a time.
pub struct MakeVenv {
    lease: Lease,
    /// `None` if any is right.
    path: Option<FilePath>,
    /// Held while this request is the one that makes it.
    place: Option<CountedPlace>,
    /// The command that makes it, and where.
    making: Option<(Arc<Process>, String)>,
}

impl Workspace {
    /// The virtual environment of the commands that start now.
    ///
    /// # Errors
    /// `NotFound` if there is none, or it was removed.
    pub fn venv(&self) -> Result<Venv> {
        let missing = || Error::new(Kind::NotFound, "there is no venv; make one first");
        self.present_venv()?.ok_or_else(missing)
    }

    fn present_venv(&self) -> Result<Option<Venv>> {
        let Some(path) = self.confinement.venv() else {
            return Ok(None);
        };
        let is_there = self.is_venv(&path)?;
        let created = false;
        Ok(is_there.then_some(Venv { path, created }))
    }

    /// Begins to make the virtual environment at a path, or at the usual one. One that is there is taken as it
    /// is.
    ///
    /// # Errors
    /// The path cannot be one of a virtual environment.
    pub fn make_venv(&self, path: Option<FilePath>) -> Result<MakeVenv> {
        let lease = self.share()?;
        if let Some(path) = &path {
            self.venv_path(path)?;
        }
        Ok(MakeVenv {
            lease,
            path,
            place: None,
            making: None,
        })
    }

    /// The absolute path that a client's path stands for. In a home that is below the home, as for files.
    fn venv_path(&self, path: &FilePath) -> Result<String> {
        let directory = self.confinement.directory();
        let mut given = PathBuf::from(OsStr::from_bytes(path.bytes()));
        if self.is_in_home() && !given.starts_with(directory) {
            let below = given.components();
            given = below
                .filter(|part| !matches!(part, Component::RootDir))
                .collect();
        }
        // Without dots and doubled slashes, so that each directory has one path.
        let whole: PathBuf = directory.join(given).components().collect();
        match whole.into_os_string().into_string() {
            Ok(whole) if !whole.contains(':') => Ok(whole),
            _ => Err(Error::invalid(format_args!(
                "path is {path}; it takes a directory whose path is UTF-8 and has no colon, which separates those in PATH"
            ))),
        }
    }

    /// Whether paths begin in a home.
    fn is_in_home(&self) -> bool {
        self.confinement.user().is_some() && !self.has_own_root()
    }

    /// Whether a virtual environment is at an absolute path.
    fn is_venv(&self, path: &str) -> Result<bool> {
        let mut name = format!("{path}/pyvenv.cfg");
        if self.is_in_home()
            && let Some(home) = self.confinement.directory().to_str()
            && let Some(below) = name.strip_prefix(home)
        {
            name = below.to_owned();
        }
        match self.files()?.stat(&FilePath::new(name.as_bytes())?) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == Kind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl MakeVenv {
    /// Makes it, or waits until another request has, and returns it.
    ///
    /// # Errors
    /// It was interrupted; `Exists` if there is one elsewhere; there is no Python; `VenvFailed`.
    pub fn run(&mut self, interrupt: &mut dyn Interrupt) -> std::result::Result<Venv, Stopped> {
        loop {
            interrupt.check()?;
            if self.place.is_none() {
                self.place = CountedPlace::take(&self.lease.venv_makers, 1);
            }
            if self.place.is_none() {
                std::thread::sleep(PAUSE);
            } else if let Some((process, path)) = &self.making {
                if process.wait_ended(PAUSE) {
                    check_made(process, path)?;
                    return Ok(self.take(path.clone(), true)?);
                }
            } else if let Some(found) = self.find_or_start()? {
                return Ok(found);
            }
        }
    }

    /// The one that is there; else the command that makes it is started.
    fn find_or_start(&mut self) -> Result<Option<Venv>> {
        let workspace = &self.lease;
        let wanted = self.path.as_ref();
        let wanted = wanted.map(|path| workspace.venv_path(path)).transpose()?;
        if let Some(venv) = workspace.present_venv()? {
            if wanted.is_none_or(|wanted| wanted == venv.path) {
                return Ok(Some(venv));
            }
            let text = format!("the venv of this workspace is {}; it has one", venv.path);
            return Err(Error::new(Kind::Exists, text));
        }
        let usual = || workspace.venv_path(&FilePath::new(DEFAULT_PATH.as_bytes())?);
        let path = wanted.map_or_else(usual, Ok)?;
        if workspace.is_venv(&path)? {
            return self.take(path, false).map(Some);
        }
        let line = CommandLine::Code {
            language: Language::Python,
            code: script("make_venv.py").to_owned(),
            arguments: vec![path.clone()],
        };
        let mut spec = CommandSpec::new(line, Vec::new(), None)?;
        spec.timeout = Some(LIMIT);
        let started = workspace.processes.start(spec, &workspace.confinement)?;
        // Without an id it is new. Dropping the pump leaves it to the supervisor.
        if let StartOutcome::Started(pump) = started {
            self.making = Some((Arc::clone(pump.process()), path));
        }
        Ok(None)
    }

    /// Lets the commands that start from now on have it.
    fn take(&self, path: String, created: bool) -> Result<Venv> {
        self.lease.check_open()?;
        self.lease.confinement.set_venv(path.clone());
        // They have the python from before.
        #[cfg(feature = "interpreter")]
        self.lease.contexts.drop_spares();
        Ok(Venv { path, created })
    }
}

impl Drop for MakeVenv {
    fn drop(&mut self) {
        if let Some((process, _)) = &self.making {
            process.leave(OnDisconnect::Kill);
        }
    }
}

fn check_made(process: &Process, path: &str) -> Result<()> {
    let exit = process.exit();
    let why = match exit.map(|exit| (exit.ending, exit.reason)) {
        Some((Ending::Exited(0), _)) => return Ok(()),
        Some((_, Reason::Timeout)) => format!("it took longer than {} seconds", LIMIT.as_secs()),
        Some((Ending::Exited(_), _)) => process.last_words(LAST_WORDS),
        _ => "the command that makes it was killed".to_owned(),
    };
    let text = format!("cannot make a venv at {path}: {why}");
    Err(Error::new(Kind::VenvFailed, text))
}
