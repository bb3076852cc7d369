//! Where the host's token comes from: the environment, a file, or chance.
//!
//! A token is never part of an error message. The only place that prints one is
//! [`MadeToken::publish`], once at start, for a token that the operator could not know otherwise.

use std::fmt;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::ConfigError;
use crate::error::Error;
use crate::sys;

/// Longest token file, in bytes. The limit keeps a device such as `/dev/zero` from filling memory.
const MAX_FILE_BYTES: u64 = 4096;

/// A value that must not be printed.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Wraps `value`, which `Debug` then does not show.
    pub fn new(value: impl Into<Vec<u8>>) -> Self {
        Self(value.into())
    }

    /// The bytes. Compare them in constant time only.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("(secret)")
    }
}

/// A random token, to be published when the server listens.
#[derive(Debug, Clone)]
pub struct MadeToken {
    pub(super) token: Secret,
    file: Option<PathBuf>,
}

impl MadeToken {
    /// Makes a token of 64 hexadecimal digits, to be written to `file` too.
    pub(super) fn new(file: Option<PathBuf>) -> Result<Self, ConfigError> {
        let digits = || Ok(random_hex()? + &random_hex()?);
        let failed =
            |error: io::Error| ConfigError(format!("SBX_TOKEN=auto: cannot make a token: {error}"));
        let token = Secret::new(digits().map_err(failed)?);
        Ok(Self { token, file })
    }

    /// Writes the token to its file and to stderr, as the line `SBX_TOKEN=...`.
    ///
    /// Call this when the server owns its port. A second server that cannot start must not replace
    /// the file of the first.
    pub fn publish(&self) -> Result<(), Error> {
        let line = [self.token.expose(), b"\n"].concat();
        if let Some(file) = &self.file {
            let path = file.to_string_lossy();
            let act = format!("cannot write SBX_TOKEN_FILE {}", path.escape_debug());
            replace(file, &line).map_err(|error| Error::io(act, &error))?;
        }
        // Not through the log, which drops a line that stderr does not take at once.
        let printed = io::stderr().write_all(&[b"SBX_TOKEN=", line.as_slice()].concat());
        match (printed, &self.file) {
            (Err(error), None) => Err(Error::io("cannot write the token to stderr", &error)),
            _ => Ok(()),
        }
    }
}

/// Reads a token from a file; one line end may follow it.
pub(super) fn read(file: &Path) -> Result<Secret, ConfigError> {
    let path = file.to_string_lossy();
    let refuse = |why: &dyn fmt::Display| {
        ConfigError(format!("SBX_TOKEN_FILE={}: {why}", path.escape_debug()))
    };
    let mut text = Vec::new();
    File::open(file)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut text))
        .map_err(|error| refuse(&Error::io("cannot read the token", &error)))?;
    if text.len() as u64 > MAX_FILE_BYTES {
        let why = format!("the file is longer than {MAX_FILE_BYTES} bytes");
        return Err(refuse(&why));
    }
    let token = text.strip_suffix(b"\n").unwrap_or(&text);
    let token = token.strip_suffix(b"\r").unwrap_or(token);
    if !is_token(token) {
        let why = "the file must hold a token of printable ASCII characters without spaces";
        return Err(refuse(&why));
    }
    Ok(Secret::new(token))
}

/// Whether a header can carry the token as it is.
pub(super) fn is_token(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(u8::is_ascii_graphic)
}

/// Replaces the file at `path` by a new one of mode 0600. The new file exists under a random name
/// until it is complete, and `rename` replaces a link at `path` instead of following it.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    if path.metadata().is_ok_and(|existing| !existing.is_file()) {
        // The name of a device or a pipe means that file to other programs.
        return Err(io::Error::other("it is not a regular file"));
    }
    let directory = path.parent().unwrap_or(Path::new("/"));
    let temporary = directory.join(format!(".sbx-token-{}", random_hex()?));
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)?;
    // The umask may have removed more bits.
    file.set_permissions(Permissions::from_mode(0o600))
        .and_then(|()| file.write_all(content))
        .and_then(|()| fs::rename(&temporary, path))
        .inspect_err(|_| drop(fs::remove_file(&temporary)))
}

/// 32 random hexadecimal digits.
fn random_hex() -> io::Result<String> {
    let bytes = sys::random_bytes()?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory of this test, which is removed with the value.
    struct Directory(PathBuf);

    impl Directory {
        fn new() -> Self {
            let path = std::env::temp_dir().join(format!("sbx-config-{}", random_hex().unwrap()));
            fs::create_dir(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_line_end_is_no_part_of_the_token() {
        let directory = Directory::new();
        let file = directory.0.join("token");
        for (content, token) in [("abc", "abc"), ("abc\n", "abc"), ("abc\r\n", "abc")] {
            fs::write(&file, content).unwrap();
            assert_eq!(read(&file).unwrap().expose(), token.as_bytes());
        }
    }

    #[test]
    fn a_file_without_a_token_is_refused_by_name() {
        let directory = Directory::new();
        let file = directory.0.join("token");
        let name = format!("SBX_TOKEN_FILE={}: ", file.display());
        assert!(read(&file).unwrap_err().to_string().starts_with(&name));
        let long = "hidden".repeat(1000);
        for content in [
            "",
            "\n",
            "hidden\n\n",
            "hidden ",
            "hid den",
            "hidden\n2",
            "hidd\u{e9}n",
            "\u{0}hidden",
            &long,
        ] {
            fs::write(&file, content).unwrap();
            let text = read(&file).unwrap_err().to_string();
            assert!(text.starts_with(&name) && !text.contains("hid"), "{text}");
        }
        assert!(read(&directory.0).is_err());
        assert!(read(Path::new("/dev/zero")).is_err());
    }

    #[test]
    fn writing_replaces_a_link_and_leaves_its_target() {
        let directory = Directory::new();
        let (file, target) = (directory.0.join("token"), directory.0.join("target"));
        fs::write(&target, "target").unwrap();
        std::os::unix::fs::symlink(&target, &file).unwrap();
        replace(&file, b"new\n").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "target");
        let metadata = fs::symlink_metadata(&file).unwrap();
        assert!(metadata.is_file());
        assert_eq!(metadata.permissions().mode() & 0o7777, 0o600);
        // A failure leaves nothing behind.
        fs::create_dir(directory.0.join("directory")).unwrap();
        replace(&directory.0.join("directory"), b"new\n").unwrap_err();
        assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 3);
    }
}
