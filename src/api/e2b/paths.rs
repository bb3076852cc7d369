//! Paths as these clients write them, and as they are shown them: absolute ones, as commands see them.
//!
//! `/home/user`, the home in E2B's own images and in most examples, stands for the home of a sandbox wherever it is.

use super::errors::E2bError;
use crate::files::name::{FilePath, show};
use crate::workspace::{CommandView, Workspace, below};

/// The home in E2B's images.
pub(super) const USUAL_HOME: &str = "/home/user";

/// Translates the paths of one workspace.
pub(super) struct Paths<'w>(CommandView<'w>);

/// A path, for the workspace and as it is shown.
pub(super) struct ClientPath {
    pub(super) file: FilePath,
    pub(super) shown: String,
}

impl<'w> Paths<'w> {
    pub(super) fn of(workspace: &'w Workspace) -> Self {
        Self(workspace.view())
    }

    /// The home, as it is shown.
    pub(super) fn home(&self) -> String {
        show(self.0.home())
    }

    /// Reads a path of a client.
    ///
    /// # Errors
    /// `InvalidArgument`; `PermissionDenied` if it is none of the sandbox's.
    pub(super) fn read(&self, given: &[u8]) -> Result<ClientPath, E2bError> {
        let absolute = self.absolute(given)?;
        let whole = FilePath::new(&absolute)?;
        let shown = whole.to_string();
        let file = self.0.file(whole)?;
        Ok(ClientPath { file, shown })
    }

    /// The absolute path of what a client names. `..` means the directory before it in the path, as for E2B's own
    /// agent.
    pub(super) fn absolute(&self, given: &[u8]) -> Result<Vec<u8>, E2bError> {
        FilePath::check_length(given)?;
        let home = self.0.home();
        let joined = match given {
            b"" | b"~" => home.to_vec(),
            [b'~', b'/', rest @ ..] => [home, b"/", rest].concat(),
            [b'~', ..] => {
                let text = "a path that begins with ~ is not supported: only ~ and ~/NAME are";
                return Err(E2bError::invalid(text));
            }
            [b'/', ..] => given.to_vec(),
            relative => [home, b"/", relative].concat(),
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
        if let Some(real_home) = self.0.real_home() {
            let mut aliases = [real_home, USUAL_HOME.as_bytes()].into_iter();
            let rest = aliases.find_map(|alias| below(&path, alias));
            let slash: &[u8] = if rest == Some(b"") { b"" } else { b"/" };
            if let Some(rest) = rest {
                path = [home, slash, rest].concat();
            }
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::e2b::errors::Code;

    #[test]
    fn a_path_is_that_of_commands() {
        let home = b"/sbx/homes/ab";
        let sandbox = Paths(CommandView::of_sandbox(home, b"/real/ab", true));
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
            ("/tmp", "/tmp", "/tmp"),
            ("/tmp/a/../b", "/tmp/b", "/tmp/b"),
            ("/tmp/a/", "/tmp/a/", "/tmp/a/"),
            ("/home/user/../../tmp/a", "/tmp/a", "/tmp/a"),
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
            ("/tmp/../etc", Code::PermissionDenied),
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
        let machine = Paths(CommandView::of_machine(b"/root"));
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
