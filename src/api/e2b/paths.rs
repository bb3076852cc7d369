//! Paths as these clients write them, and as they are shown them: absolute ones, as commands see them.
//!
//! A sandbox's files are those beneath its home. `/home/user`, the home in E2B's own images and in most examples,
//! stands for the home wherever it is.

use std::os::unix::ffi::OsStrExt;

use super::errors::{Code, Failure};
use crate::files::name::{FilePath, show};
use crate::workspace::Workspace;

/// The home in E2B's images.
pub(super) const USUAL_HOME: &str = "/home/user";

/// Translates the paths of one workspace.
pub(super) struct Paths {
    /// The home, as commands see it.
    home: Vec<u8>,
    /// Other paths that stand for it.
    aliases: Vec<Vec<u8>>,
    /// Whether only what is beneath the home is reached.
    is_beneath: bool,
}

/// A path, for the workspace and as it is shown.
pub(super) struct ClientPath {
    pub(super) file: FilePath,
    pub(super) shown: String,
}

impl Paths {
    pub(super) fn of(workspace: &Workspace) -> Self {
        Self {
            home: workspace.home().as_os_str().as_bytes().to_vec(),
            aliases: match workspace.user() {
                Some(_) => {
                    let real = workspace.real_home().as_os_str().as_bytes();
                    vec![real.to_vec(), USUAL_HOME.into()]
                }
                None => Vec::new(),
            },
            is_beneath: workspace.user().is_some(),
        }
    }

    /// The home, as it is shown.
    pub(super) fn home(&self) -> String {
        show(&self.home)
    }

    /// Reads a path of a client.
    ///
    /// # Errors
    /// `InvalidArgument`; `PermissionDenied` if it leads out of the home.
    pub(super) fn read(&self, given: &[u8]) -> Result<ClientPath, Failure> {
        let absolute = self.absolute(given)?;
        let whole = FilePath::new(&absolute)?;
        if !self.is_beneath {
            let shown = whole.to_string();
            return Ok(ClientPath { file: whole, shown });
        }
        let outside = || {
            let home = self.home();
            let text = format_args!("{whole} is outside the sandbox, whose files are in {home}");
            Failure::new(Code::PermissionDenied, text)
        };
        let rest = below(&absolute, &self.home).ok_or_else(outside)?;
        let file = if rest.is_empty() { b"." } else { rest };
        Ok(ClientPath {
            file: FilePath::new(file)?,
            shown: whole.to_string(),
        })
    }

    /// The absolute path of what a client names. `..` means the directory before it in the path, as for E2B's own
    /// agent.
    pub(super) fn absolute(&self, given: &[u8]) -> Result<Vec<u8>, Failure> {
        FilePath::check_length(given)?;
        let joined = match given {
            b"" | b"~" => self.home.clone(),
            [b'~', b'/', rest @ ..] => [&self.home, &b"/"[..], rest].concat(),
            [b'~', ..] => {
                let text = "a path that begins with ~ takes the own home only: ~ or ~/NAME";
                return Err(Failure::invalid(text));
            }
            [b'/', ..] => given.to_vec(),
            relative => [&self.home, &b"/"[..], relative].concat(),
        };
        let mut names = Vec::new();
        for name in joined.split(|byte| *byte == b'/') {
            match name {
                b"" | b"." => {}
                b".." => drop(names.pop()),
                name => names.push(name),
            }
        }
        let mut path = [&b"/"[..], &names.join(&b'/')].concat();
        let alias = self.aliases.iter().find_map(|alias| below(&path, alias));
        if let Some(rest) = alias {
            let rest = if rest.is_empty() {
                vec![]
            } else {
                [b"/", rest].concat()
            };
            path = [&self.home[..], &rest].concat();
        }
        // A file is never meant by a path that ends so.
        if given.ends_with(b"/") && path != b"/" {
            path.push(b'/');
        }
        Ok(path)
    }

    /// The path of an entry, as it is shown.
    pub(super) fn join(shown: &str, name: &[u8]) -> String {
        let directory = shown.trim_end_matches('/');
        format!("{directory}/{}", show(name))
    }

    /// What a link leads to, as it is shown: the workspace knows it from its own root.
    pub(super) fn show_target(&self, path: &[u8]) -> String {
        if self.is_beneath {
            let home = self.home();
            let rest = show(path);
            return format!("{home}{rest}");
        }
        show(path)
    }
}

/// What is below a directory, without the slash; `None` if it is not below it.
fn below<'p>(path: &'p [u8], directory: &[u8]) -> Option<&'p [u8]> {
    let rest = path.strip_prefix(directory)?;
    match rest {
        b"" => Some(rest),
        [b'/', rest @ ..] => Some(rest),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_that_of_commands() {
        let home = b"/sbx/homes/ab".to_vec();
        let sandbox = Paths {
            home,
            aliases: vec![USUAL_HOME.into(), b"/real/ab".to_vec()],
            is_beneath: true,
        };
        for (given, file, shown) in [
            ("a.txt", "a.txt", "/sbx/homes/ab/a.txt"),
            ("./a//b/", "a/b/", "/sbx/homes/ab/a/b/"),
            ("~", ".", "/sbx/homes/ab"),
            ("", ".", "/sbx/homes/ab"),
            ("~/x", "x", "/sbx/homes/ab/x"),
            ("/home/user", ".", "/sbx/homes/ab"),
            ("/home/user/", "", "/sbx/homes/ab/"),
            ("/home/user/x y", "x y", "/sbx/homes/ab/x y"),
            ("/sbx/homes/ab/x", "x", "/sbx/homes/ab/x"),
            ("/sbx/homes/ab/x/../b", "b", "/sbx/homes/ab/b"),
            ("/home/user/../user/f", "f", "/sbx/homes/ab/f"),
            ("/real/ab/f", "f", "/sbx/homes/ab/f"),
            ("x/..", ".", "/sbx/homes/ab"),
        ] {
            let path = sandbox.read(given.as_bytes()).map_err(|error| error.text);
            let file = if file.is_empty() { "." } else { file };
            let path = path.unwrap();
            assert_eq!(path.file.to_string(), file, "{given}");
            assert_eq!(path.shown, shown, "{given}");
        }
        for (given, code) in [
            ("/etc/passwd", Code::PermissionDenied),
            ("/sbx/homes/abc", Code::PermissionDenied),
            ("/home/username", Code::PermissionDenied),
            ("/", Code::PermissionDenied),
            ("..", Code::PermissionDenied),
            ("/sbx/homes/ab/../b", Code::PermissionDenied),
            ("/home/user/../../etc", Code::PermissionDenied),
            ("~root/x", Code::InvalidArgument),
            ("a\0b", Code::InvalidArgument),
        ] {
            let error = sandbox.read(given.as_bytes()).err().unwrap();
            assert_eq!(error.code, code, "{given}");
        }
        let machine = Paths {
            home: b"/root".to_vec(),
            aliases: Vec::new(),
            is_beneath: false,
        };
        for (given, shown) in [
            ("a", "/root/a"),
            ("/home/user/a", "/home/user/a"),
            ("/", "/"),
            ("//etc//x", "/etc/x"),
            ("/a/../b", "/b"),
            ("/../..", "/"),
        ] {
            let path = machine.read(given.as_bytes()).map_err(|error| error.text);
            assert_eq!(path.unwrap().shown, shown);
        }
    }
}
