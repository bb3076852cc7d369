//! The wall of a sandbox, proved from inside: a program in sandbox A reads back what it is, and does
//! its worst to sandbox B, to the server and to root's files.
//!
//! One file per promise. What runs inside is [`probe`]; most tests are tables of acts and of the
//! errno that each must end with. The denied act itself is the oracle wherever there is one, and
//! what an act would have changed is looked at afterwards from outside.
//!
//! All of it needs root, as host mode does, and runs in a container as well.

mod exhaustion;
mod files;
mod kernel;
mod port;
mod privileges;
mod probe;
mod processes;
mod races;
mod sockets;
mod state;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use crate::fixture::{Sandbox, Server, TempDir, random_bytes};

/// How long each race is run: `SBX_TEST_RACE_SECS`, or two seconds.
fn race_length() -> Duration {
    let seconds = std::env::var("SBX_TEST_RACE_SECS").map(|text| text.parse().unwrap());
    Duration::from_secs(seconds.unwrap_or(2))
}

/// What must not be read, and must still be there afterwards.
struct Marker {
    text: String,
}

impl Marker {
    fn new() -> Self {
        let mut seed = [0; 8];
        std::io::Read::read_exact(&mut fs::File::open("/dev/urandom").unwrap(), &mut seed).unwrap();
        let text = random_bytes(12, u64::from_ne_bytes(seed));
        let text = text.iter().fold("marker-".to_owned(), |text, byte| {
            format!("{text}{byte:02x}")
        });
        Self { text }
    }
}

/// A directory full of things that are not a sandbox's, all of them as open as the file system can
/// make them: only the wall keeps anybody out. It remembers what it was like.
struct Vault {
    directory: TempDir,
    marker: Marker,
}

impl Vault {
    /// In a directory of the machine; none where nothing can be made.
    fn below(parent: &str) -> Option<Self> {
        let vault = Self {
            directory: TempDir::below(parent).ok()?,
            marker: Marker::new(),
        };
        furnish(vault.directory.path(), &vault.marker, None);
        Some(vault)
    }

    fn new() -> Self {
        Self::below("/tmp").unwrap()
    }

    fn path(&self, name: &str) -> String {
        self.directory.join(name)
    }

    /// Asserts that everything is as it was.
    #[track_caller]
    fn check(&self) {
        check_furniture(self.directory.path(), &self.marker);
    }
}

/// Fills a directory with a file, a directory with a file, and makes everything everybody's.
fn furnish(directory: &Path, marker: &Marker, owner: Option<u32>) {
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
fn check_furniture(directory: &Path, marker: &Marker) {
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

/// Sandbox B: its home is as open as it can make it, with the same in it as a [`Vault`].
struct Neighbour<'a> {
    sandbox: Sandbox<'a>,
    marker: Marker,
}

impl<'a> Neighbour<'a> {
    fn new(server: &'a Server) -> Self {
        let sandbox = server.sandbox();
        let marker = Marker::new();
        furnish(&sandbox.home, &marker, Some(sandbox.uid));
        Self { sandbox, marker }
    }

    fn path(&self, name: &str) -> String {
        self.sandbox.home.join(name).to_str().unwrap().to_owned()
    }

    #[track_caller]
    fn check(&self) {
        check_furniture(&self.sandbox.home, &self.marker);
    }
}
