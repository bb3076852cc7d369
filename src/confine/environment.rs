//! The environment of commands: the workspace's own variables, then those of a filtered network, of the client and of
//! the command.

use std::borrow::Cow;
use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;

use super::{Confinement, DEFAULT_PATH};
use crate::codec::table::Table;
use crate::egress::EgressListener;
use crate::error::Result;
use crate::spec::account::Account;
use crate::spec::command::CommandSpec;

/// Where programs look for the proxy of a filtered network.
const PROXY_VARIABLES: [&str; 6] = [
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
];

/// The hosts that commands reach without the proxy in a network of their own (`NO_PROXY`).
const OWN_HOSTS: &str = "localhost,127.0.0.1";

/// `NAME=value`; `None` if one of the two has a NUL.
pub(super) fn entry(name: &OsStr, value: &OsStr) -> Option<CString> {
    CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok()
}

/// `NAME=value`, by name.
pub(super) type Environment<'a> = Table<&'a OsStr, Cow<'a, CStr>>;

/// Sets a variable, or removes it if there is no value or one that cannot be a variable's.
pub(super) fn set<'a>(environment: &mut Environment<'a>, name: &'a str, value: Option<&str>) {
    let name = OsStr::new(name);
    match value.and_then(|value| entry(name, value.as_ref())) {
        Some(entry) => environment.insert(name, Cow::Owned(entry)),
        None => drop(environment.remove(name)),
    }
}

/// PATH of an environment.
pub(super) fn search_path<'a>(environment: &'a Environment<'_>) -> &'a [u8] {
    let path = environment.get(OsStr::new("PATH"));
    path.and_then(|path| path.to_bytes().strip_prefix(b"PATH="))
        .unwrap_or(DEFAULT_PATH.as_bytes())
}

impl Confinement {
    /// The environment of a command that does not change it, by name; `listener` is that of its filtered network.
    pub(super) fn common_environment(&self, listener: Option<&EgressListener>) -> Environment<'_> {
        let own = self.environment.iter();
        let own = own.map(|(name, entry)| (name.as_os_str(), Cow::Borrowed(entry.as_c_str())));
        let mut environment = Environment::from(own.collect::<Vec<_>>());
        if let Some(listener) = listener {
            let proxy = format!("http://127.0.0.1:{}", listener.port());
            for name in PROXY_VARIABLES {
                set(&mut environment, name, Some(&proxy));
            }
            // Node.js 24 and later ask for it.
            set(&mut environment, "NODE_USE_ENV_PROXY", Some("1"));
            if listener.filter().is_transparent {
                // glibc and c-ares look names up over TCP then: over UDP c-ares cannot.
                // Names are looked up as they are before the domains of the search list are tried: whether these exist may
                // be for the client's own proxy to know.
                set(&mut environment, "RES_OPTIONS", Some("use-vc ndots:0"));
            }
            for name in ["NO_PROXY", "no_proxy"] {
                set(
                    &mut environment,
                    name,
                    listener.is_inside().then_some(OWN_HOSTS),
                );
            }
        }
        for (name, value) in self.chosen.iter() {
            set(&mut environment, name, value.as_deref());
        }
        if let Some(venv) = self.venv() {
            set(&mut environment, "VIRTUAL_ENV", Some(&venv));
            let search = search_path(&environment);
            let path = [venv.as_bytes(), b"/bin:", search].concat();
            let path = entry(OsStr::new("PATH"), OsStr::from_bytes(&path));
            if let Some(path) = path {
                environment.insert(OsStr::new("PATH"), Cow::Owned(path));
            }
        }
        environment
    }

    /// The environment of a command, by name. Borrows what the command does not change.
    pub(super) fn environment<'a>(
        &'a self,
        spec: &'a CommandSpec,
        listener: Option<&EgressListener>,
        account: Option<&Account>,
    ) -> Environment<'a> {
        let mut environment = self.common_environment(listener);
        if let Some(account) = account.filter(|_| spec.user.is_some()) {
            set(&mut environment, "HOME", Some(&account.home));
            set(&mut environment, "USER", Some(&account.name));
            set(&mut environment, "LOGNAME", Some(&account.name));
        }
        if let Some(terminal) = &spec.terminal {
            set(&mut environment, "TERM", Some(terminal.name()));
            // Programs would believe these instead of the terminal.
            set(&mut environment, "LINES", None);
            set(&mut environment, "COLUMNS", None);
        }
        for (name, value) in spec.environment() {
            set(&mut environment, name, value.as_deref());
        }
        environment
    }

    /// The variables of commands that do not change them.
    pub fn variables(&self) -> Vec<(String, String)> {
        let environment = self.common_environment(None);
        let text = |entry: &CStr| {
            let entry = entry.to_string_lossy();
            let (name, value) = entry.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        };
        environment
            .iter()
            .map(|(_, entry)| entry)
            .filter_map(|entry| text(entry))
            .collect()
    }

    /// Whether commands that do not change their environment have this variable.
    pub fn has_variable(&self, name: &str) -> bool {
        self.common_environment(None)
            .get(OsStr::new(name))
            .is_some()
    }

    /// Whether a program is found in the PATH of commands that do not change it. It looks as the commands' user,
    /// because that one's links may lead anywhere.
    ///
    /// # Errors
    /// Those of [`Confinement::act`].
    pub fn finds(&self, program: &str) -> Result<bool> {
        let environment = self.common_environment(None);
        if let Some(root) = &self.root {
            let path = OsStr::from_bytes(search_path(&environment));
            let mut directories = std::env::split_paths(path);
            return Ok(directories.any(|directory| root.has_program(&directory.join(program))));
        }
        let _acting = self.act()?;
        let path = OsStr::from_bytes(search_path(&environment));
        Ok(std::env::split_paths(path).any(|directory| {
            let found = std::fs::metadata(self.directory.join(directory).join(program));
            found.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
        }))
    }
}
