//! The isolation of sandboxes, tested from inside: a program in sandbox A reports its own identity,
//! and attacks sandbox B, the server and root's files.
//!
//! One file per promise. [`probe`] runs inside; most tests are tables of acts, each with the errno that
//! it must end with. Wherever possible the denied act itself is the oracle, and a check from outside
//! then confirms that the act changed nothing.
//!
//! These tests need root, as host mode does. They also run in containers.

pub mod descriptors;
mod exhaustion;
mod files;
mod kernel;
mod pipes;
mod port;
mod port_held;
mod privileges;
pub mod probe;
mod processes;
pub mod races;
mod sockets;
mod state;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use crate::fixture::{Sandbox, Server, TempDir, random_bytes};

/// How long each race is run: `SBX_TEST_RACE_SECS`, or two seconds.
pub fn race_length() -> Duration {
    let seconds = std::env::var("SBX_TEST_RACE_SECS").map(|text| text.parse().unwrap());
    Duration::from_secs(seconds.unwrap_or(2))
}

/// A text that no act may read or change.
pub struct Marker {
    pub text: String,
}

impl Marker {
    pub fn new() -> Self {
        let mut seed = [0; 8];
        std::io::Read::read_exact(&mut fs::File::open("/dev/urandom").unwrap(), &mut seed).unwrap();
        let text = random_bytes(12, u64::from_ne_bytes(seed));
        let text = text.iter().fold("marker-".to_owned(), |text, byte| {
            format!("{text}{byte:02x}")
        });
        Self { text }
    }
}

/// A directory of the machine with files that every user may read and write, so that only the
/// isolation of sandboxes keeps them out. `check` compares it with its initial state.
pub struct Vault {
    pub directory: TempDir,
    pub marker: Marker,
}

impl Vault {
    /// A vault in a directory of the machine; `None` if the directory takes no new entries.
    pub fn below(parent: &str) -> Option<Self> {
        let vault = Self {
            directory: TempDir::below(parent).ok()?,
            marker: Marker::new(),
        };
        populate(vault.directory.path(), &vault.marker, None);
        Some(vault)
    }

    pub fn new() -> Self {
        Self::below("/tmp").unwrap()
    }

    pub fn path(&self, name: &str) -> String {
        self.directory.join(name)
    }

    /// Asserts that nothing was changed.
    #[track_caller]
    pub fn check(&self) {
        check_contents(self.directory.path(), &self.marker);
    }
}

/// Puts a file, and a directory with a file, into a directory, and lets every user read and write them.
fn populate(directory: &Path, marker: &Marker, owner: Option<u32>) {
    let open = |path: &Path, mode: u32| {
        std::os::unix::fs::chown(path, owner, owner).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    fs::write(directory.join("marker"), &marker.text).unwrap();
    fs::create_dir(directory.join(&marker.text)).unwrap();
    fs::write(directory.join(&marker.text).join("inner"), &marker.text).unwrap();
    open(&directory.join("marker"), 0o666);
    open(&directory.join(&marker.text), 0o777);
    open(&directory.join(&marker.text).join("inner"), 0o666);
    open(directory, 0o777);
}

#[track_caller]
fn check_contents(directory: &Path, marker: &Marker) {
    let mode = |path: &Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777;
    let inner = directory.join(&marker.text);
    assert_eq!(
        fs::read_to_string(directory.join("marker")).unwrap(),
        marker.text
    );
    assert_eq!(
        fs::read_to_string(inner.join("inner")).unwrap(),
        marker.text
    );
    assert_eq!(mode(directory), 0o777);
    assert_eq!(mode(&directory.join("marker")), 0o666);
    assert_eq!(mode(&inner), 0o777);
    assert_eq!(mode(&inner.join("inner")), 0o666);
    let names = |path: &Path| {
        let mut names: Vec<String> = fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| !name.starts_with('.'))
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(directory), ["marker", marker.text.as_str()]);
    assert_eq!(names(&inner), ["inner"]);
}

/// Sandbox B. Its home is open to every user and has the contents of a [`Vault`].
struct Neighbour<'a> {
    sandbox: Sandbox<'a>,
    marker: Marker,
}

impl<'a> Neighbour<'a> {
    fn new(server: &'a Server) -> Self {
        let sandbox = server.sandbox();
        let marker = Marker::new();
        populate(&sandbox.home, &marker, Some(sandbox.uid));
        Self { sandbox, marker }
    }

    fn path(&self, name: &str) -> String {
        self.sandbox.home.join(name).to_str().unwrap().to_owned()
    }

    #[track_caller]
    fn check(&self) {
        check_contents(&self.sandbox.home, &self.marker);
    }
}
