//! The languages that code may be in, and how a script of one is run.

use std::sync::LazyLock;

use crate::codec::carried::carried;
use crate::error::{Error, Kind, Result};

/// A language that code is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// Run by `python3`.
    Python,
    /// Run by `node`.
    JavaScript,
    /// Run by `bash`.
    Bash,
}

/// Most bytes of code that is an argument. The kernel takes 128 KiB (`MAX_ARG_STRLEN`, execve(2)).
const MAX_ARGUMENT_BYTES: usize = 100 * 1024;

/// How a program is given a script.
pub struct Script<'a> {
    /// The arguments of the program, before those of the script.
    pub arguments: Vec<&'a str>,
    /// Whether the program reads the code from descriptor 4.
    pub is_passed: bool,
}

impl Language {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Python, Self::JavaScript, Self::Bash];

    /// The language of a name or an alias.
    ///
    /// # Errors
    /// `UnsupportedLanguage`, with the names.
    pub fn of(name: &str) -> Result<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|language| language.names().contains(&name))
            .ok_or_else(|| {
                let text =
                    format_args!("language is {name:?}; it takes python, javascript or bash");
                Error::new(Kind::UnsupportedLanguage, text)
            })
    }

    /// Its name, and the aliases of that.
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Python => &["python", "py"],
            Self::JavaScript => &["javascript", "js", "node"],
            Self::Bash => &["bash", "sh"],
        }
    }

    pub fn name(self) -> &'static str {
        self.names()[0]
    }

    /// The program that runs it.
    pub fn program(self) -> &'static str {
        match self {
            Self::Python => "python3",
            Self::JavaScript => "node",
            Self::Bash => "bash",
        }
    }

    /// How the program runs a script. The stubs read the code from descriptor 4 and close it.
    pub fn script(self, code: &str) -> Script<'_> {
        let (arguments, is_passed) = match self {
            Self::Python => {
                let stub = script("run_python.py");
                (vec!["-c", stub, "4"], true)
            }
            Self::JavaScript => {
                let stub = script("run_node.js");
                (vec!["-e", stub, "4"], true)
            }
            Self::Bash if code.len() <= MAX_ARGUMENT_BYTES => {
                let begin = ["-c"].into_iter().chain(end_of_options(code));
                (begin.chain([code, "bash"]).collect(), false)
            }
            Self::Bash => (vec!["-c", RUN_BASH, "bash"], true),
        };
        Script {
            arguments,
            is_passed,
        }
    }
}

/// What stands between `-c` and a script that a shell would take for options.
pub fn end_of_options(script: &str) -> Option<&'static str> {
    script.starts_with(['-', '+']).then_some("--")
}

/// Keeps the lines' numbers, and leaves the code no variable and no descriptor.
const RUN_BASH: &str = r#"eval "exec 4<&-; $(</dev/fd/4)""#;

/// NUL-ended names and texts of all scripts.
static SCRIPTS: LazyLock<String> =
    LazyLock::new(|| String::from_utf8(carried!("scripts")).unwrap_or_default());

/// A script of `src/interpreter` by its name; empty if there is none.
pub fn script(name: &str) -> &'static str {
    let mut parts = SCRIPTS.split('\0');
    while let (Some(found), Some(text)) = (parts.next(), parts.next()) {
        if found == name {
            return text;
        }
    }
    ""
}
