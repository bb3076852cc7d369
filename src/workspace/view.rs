//! Translates paths as a workspace's commands see them, for doors whose clients name files in the same way.

use std::os::unix::ffi::OsStrExt;

use super::lease::Workspace;
use crate::error::{Error, Kind, Result};
use crate::files::name::{FilePath, Tree, show};
use crate::spec::isolation::TEMPORARY;

/// Translates paths that the commands of a workspace see to files of the workspace.
pub struct CommandView<'w> {
    reach: Reach<'w>,
    home: &'w [u8],
}

/// Which absolute paths lead to files of the workspace.
enum Reach<'w> {
    /// Every path of the machine, or of a root of the sandbox's own.
    Machine,
    /// Paths below the home, and below the sandbox's own `/tmp` if it has one.
    Sandbox {
        real_home: &'w [u8],
        has_temporary: bool,
    },
}

impl Workspace {
    /// The view that its commands have of paths.
    pub fn view(&self) -> CommandView<'_> {
        let reach = match self.user() {
            _ if self.has_own_root() => Reach::Machine,
            None => Reach::Machine,
            Some(_) => Reach::Sandbox {
                real_home: self.home().on_machine.as_os_str().as_bytes(),
                has_temporary: self.root.has_temporary(),
            },
        };
        CommandView {
            reach,
            home: match self.root.account() {
                Some((home, _)) => home,
                None => self.home().in_sandbox.as_os_str().as_bytes(),
            },
        }
    }
}

impl<'w> CommandView<'w> {
    /// The path of the home, as commands see it.
    pub fn home(&self) -> &'w [u8] {
        self.home
    }

    /// The path of a sandbox's home on the machine; commands may see another one. `None` if the workspace is the
    /// machine.
    pub fn real_home(&self) -> Option<&'w [u8]> {
        match self.reach {
            Reach::Machine => None,
            Reach::Sandbox { real_home, .. } => Some(real_home),
        }
    }

    /// The file that commands see at `path`. A relative path begins in the home.
    ///
    /// # Errors
    /// `Forbidden` if the path does not lead to the sandbox's home or its own `/tmp`.
    pub fn file(&self, path: FilePath) -> Result<FilePath> {
        let Reach::Sandbox {
            real_home,
            has_temporary,
        } = self.reach
        else {
            return Ok(path);
        };
        let given = path.bytes();
        if !given.starts_with(b"/") {
            return Ok(path);
        }
        let mut homes = [self.home, real_home].into_iter();
        if let Some(rest) = homes.find_map(|home| below(given, home)) {
            return Ok(FilePath::from_start(Tree::Main, rest));
        }
        let home = show(self.home);
        let why = match below(given, TEMPORARY.as_bytes()) {
            Some(rest) if has_temporary => return Ok(FilePath::from_start(Tree::Temporary, rest)),
            Some(_) => {
                format!("which has no {TEMPORARY} of its own: use $TMPDIR, which is {home}/.tmp")
            }
            None if has_temporary => format!("whose files are in {home} and {TEMPORARY}"),
            None => format!("whose files are in {home}"),
        };
        let text = format!("{path} is outside the sandbox, {why}");
        Err(Error::new(Kind::Forbidden, text))
    }

    #[cfg(test)]
    pub fn of_sandbox(home: &'w [u8], real_home: &'w [u8], has_temporary: bool) -> Self {
        let reach = Reach::Sandbox {
            real_home,
            has_temporary,
        };
        Self { reach, home }
    }

    #[cfg(test)]
    pub fn of_machine(home: &'w [u8]) -> Self {
        let reach = Reach::Machine;
        Self { reach, home }
    }
}

/// The part of a path below a directory; `None` if the path is not below it. Extra slashes and `.` components do not
/// matter.
pub fn below<'p>(path: &'p [u8], directory: &[u8]) -> Option<&'p [u8]> {
    let names = directory.split(|byte| *byte == b'/');
    let mut rest = after_slashes(path);
    for name in names.filter(|name| !name.is_empty()) {
        rest = rest.strip_prefix(name)?;
        if !matches!(rest, [] | [b'/', ..]) {
            return None;
        }
        rest = after_slashes(rest);
    }
    Some(rest)
}

/// The path without the slashes and `.` components in front of its next name.
fn after_slashes(mut path: &[u8]) -> &[u8] {
    loop {
        path = match path {
            [b'/', rest @ ..] | [b'.', b'/', rest @ ..] => rest,
            b"." => b"",
            _ => return path,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(view: &CommandView<'_>, path: &[u8]) -> std::result::Result<String, String> {
        let file = view.file(FilePath::new(path).unwrap());
        file.map(|file| file.to_string())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn absolute_paths_are_those_of_commands() {
        let view = CommandView::of_sandbox(b"/home/user", b"/homes/ab", true);
        for (path, shown) in [
            ("a/b", "a/b"),
            ("tmp/x", "tmp/x"),
            ("/home/user", "."),
            ("/home/user/", "."),
            ("/homes/ab/x/", "x/"),
            ("//home/./user//x", "x"),
            ("/home/user/../x", "../x"),
            ("/tmp", "/tmp"),
            ("/tmp/", "/tmp"),
            ("/tmp/.", "/tmp"),
            ("/tmp//a/b", "/tmp/a/b"),
            ("/tmp/.hidden", "/tmp/.hidden"),
            ("/tmp/../etc", "/tmp/../etc"),
        ] {
            assert_eq!(file(&view, path.as_bytes()).as_deref(), Ok(shown), "{path}");
        }
        for path in [
            "/",
            "/etc/passwd",
            "/home/username",
            "/tmpx",
            "/var/tmp/x",
            "/../tmp/x",
        ] {
            let text = file(&view, path.as_bytes()).unwrap_err();
            assert!(
                text.contains("whose files are in /home/user and /tmp"),
                "{text}"
            );
        }
    }

    #[test]
    fn without_a_tmp_of_its_own_the_variable_is_named() {
        let view = CommandView::of_sandbox(b"/homes/ab", b"/homes/ab", false);
        for path in ["/tmp", "/tmp/x", "//tmp/x"] {
            let text = file(&view, path.as_bytes()).unwrap_err();
            assert!(text.contains("$TMPDIR, which is /homes/ab/.tmp"), "{text}");
        }
        let text = file(&view, b"/etc").unwrap_err();
        assert!(text.ends_with("whose files are in /homes/ab"), "{text}");
        // The homes may be below `/tmp`.
        let view = CommandView::of_sandbox(b"/tmp/homes/ab", b"/tmp/homes/ab", false);
        assert_eq!(file(&view, b"/tmp/homes/ab/x").as_deref(), Ok("x"));
    }

    #[test]
    fn a_machine_has_all_paths() {
        let view = CommandView::of_machine(b"/root");
        for path in ["/tmp/x", "/", "a"] {
            assert_eq!(file(&view, path.as_bytes()).as_deref(), Ok(path));
        }
    }

    #[test]
    fn names_of_any_bytes_stay_as_they_are() {
        let view = CommandView::of_sandbox(b"/home/user", b"/homes/ab", true);
        // A name that contains a character that stands for a byte, and a byte that is not UTF-8.
        let given = show("/tmp/\u{EF80}".as_bytes()) + &show(b"\xff");
        let file = view.file(FilePath::new(given.as_bytes()).unwrap()).unwrap();
        assert_eq!(file.bytes(), [&b"\xee\xbe\x80"[..], b"\xff"].concat());
    }
}
