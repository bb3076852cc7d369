//! What a client wants to run, checked so that it can be started.
//!
//! A [`CommandSpec`] cannot be empty or hold a NUL: whoever has one needs no further checks. How it
//! is started (with what identity, environment and limits) is `confine`'s.

use std::ffi::CString;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// The command itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandLine {
    /// Run by `/bin/sh -c`.
    Shell(String),
    /// Executed directly; the first word is searched in PATH.
    Program(Vec<String>),
}

impl CommandLine {
    /// Bytes that it takes in memory, about.
    pub fn size(&self) -> usize {
        match self {
            Self::Shell(script) => script.len(),
            Self::Program(words) => words
                .iter()
                .map(|word| word.len() + size_of::<String>())
                .sum(),
        }
    }
}

/// Where a command's input comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// End of file at once.
    Empty,
    /// These bytes, then end of file.
    Given(Vec<u8>),
    /// A pipe that clients write to later.
    Open,
}

/// One change to the environment; no value removes the variable.
pub type EnvironmentChange = (String, Option<String>);

/// A command that can be started.
#[derive(Debug, Clone)]
pub struct CommandSpec {
    line: CommandLine,
    environment: Vec<EnvironmentChange>,
    directory: Option<String>,
    /// Where its input comes from.
    pub input: Input,
    /// How long it may take.
    pub timeout: Option<Duration>,
    /// The client's own label.
    pub tag: Option<String>,
    /// The client's own name for it, which makes the start idempotent.
    pub id: Option<ChosenId>,
    /// Whether no client waits for it.
    pub background: bool,
}

/// What tells two commands apart: a digest of all that decides what they do.
pub type Fingerprint = [u8; 32];

impl CommandSpec {
    /// A command with empty input and no limits.
    ///
    /// # Errors
    /// Nothing to run, a NUL (which cannot be passed to a program), an impossible variable name.
    pub fn new(
        line: CommandLine,
        environment: Vec<EnvironmentChange>,
        directory: Option<String>,
    ) -> Result<Self> {
        match &line {
            CommandLine::Shell(script) if script.is_empty() => {
                return Err(Error::invalid("cmd is empty; it takes a command to run"));
            }
            CommandLine::Shell(script) => no_nul("cmd", script)?,
            CommandLine::Program(words) => {
                if words.first().is_none_or(String::is_empty) {
                    return Err(Error::invalid(
                        "cmd must name a program: its first element is missing or empty",
                    ));
                }
                words.iter().try_for_each(|word| no_nul("cmd", word))?;
            }
        }
        check_environment(&environment)?;
        no_nul("cwd", directory.as_deref().unwrap_or_default())?;
        Ok(Self {
            line,
            environment,
            directory: directory.filter(|directory| !directory.is_empty()),
            input: Input::Empty,
            timeout: None,
            tag: None,
            id: None,
            background: false,
        })
    }

    /// What it runs.
    pub fn line(&self) -> &CommandLine {
        &self.line
    }

    /// What it changes in the workspace's environment.
    pub fn environment(&self) -> &[EnvironmentChange] {
        &self.environment
    }

    /// Where it runs, if not where the workspace says.
    pub fn directory(&self) -> Option<&str> {
        self.directory.as_deref()
    }

    /// `argv`.
    pub fn arguments(&self) -> Vec<CString> {
        match &self.line {
            CommandLine::Shell(script) => vec![
                c"/bin/sh".to_owned(),
                c"-c".to_owned(),
                c_string(script.as_bytes()),
            ],
            CommandLine::Program(words) => {
                words.iter().map(|word| c_string(word.as_bytes())).collect()
            }
        }
    }

    /// The paths to try, as execvp(3) finds them in `search` (a PATH).
    pub fn programs(&self, search: &[u8]) -> Vec<CString> {
        let name = match &self.line {
            CommandLine::Shell(_) => return vec![c"/bin/sh".to_owned()],
            CommandLine::Program(words) => words.first().map(String::as_bytes).unwrap_or_default(),
        };
        if name.contains(&b'/') {
            return vec![c_string(name)];
        }
        search
            .split(|byte| *byte == b':')
            .map(|directory| {
                let directory = if directory.is_empty() {
                    b"."
                } else {
                    directory
                };
                c_string(&[directory, b"/", name].concat())
            })
            .collect()
    }

    /// What tells it apart from another command under the same id.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut digest = Sha256::new();
        // Every part is preceded by its length, so that no two lists of parts look alike.
        let mut part = |bytes: &[u8]| {
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        };
        match &self.line {
            CommandLine::Shell(script) => {
                part(b"shell");
                part(script.as_bytes());
            }
            CommandLine::Program(words) => {
                part(b"program");
                part(&words.len().to_le_bytes());
                for word in words {
                    part(word.as_bytes());
                }
            }
        }
        let mut environment = self.environment.clone();
        environment.sort();
        for (name, value) in &environment {
            part(name.as_bytes());
            part(if value.is_some() { b"=" } else { b"-" });
            part(value.as_deref().unwrap_or_default().as_bytes());
        }
        part(b"cwd");
        part(self.directory.as_deref().unwrap_or_default().as_bytes());
        match &self.input {
            // Which of the two it is without input was decided by the route, not by the client; and an
            // empty text and no text are the same.
            Input::Empty | Input::Open => part(b""),
            Input::Given(bytes) => part(bytes),
        }
        digest.finalize().into()
    }
}

/// Whether a program can be given these variables.
///
/// # Errors
/// An impossible name, or a NUL in a value.
pub fn check_environment(changes: &[EnvironmentChange]) -> Result<()> {
    for (name, value) in changes {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(Error::invalid(format!(
                "env has an impossible variable name {name:?}"
            )));
        }
        no_nul(&format!("env.{name}"), value.as_deref().unwrap_or_default())?;
    }
    Ok(())
}

fn no_nul(field: &str, text: &str) -> Result<()> {
    if text.contains('\0') {
        return Err(Error::invalid(format!(
            "{field} has a NUL character, which no program can be given"
        )));
    }
    Ok(())
}

/// Of bytes that were checked to hold no NUL when the command was made.
fn c_string(bytes: &[u8]) -> CString {
    CString::new(bytes).unwrap_or_default()
}

/// A process id that a client chose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenId(String);

impl ChosenId {
    /// Most characters of an id.
    const MAX: usize = 64;

    /// Checks an id; what the server itself gives out, or a pid, cannot be chosen.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(id: String) -> Result<Self> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        let digits =
            |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if id.is_empty()
            || id.len() > Self::MAX
            || !id.bytes().all(plain)
            || id == "."
            || id == ".."
        {
            return Err(Error::invalid(
                "id must be 1 to 64 of the characters A-Z a-z 0-9 . _ -",
            ));
        }
        if digits(&id) || id.strip_prefix("p-").is_some_and(digits) {
            return Err(Error::invalid(
                "id must not be a number or look like p-1: those are the server's own",
            ));
        }
        Ok(Self(id))
    }

    /// The id.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(words: &[&str]) -> Result<CommandSpec> {
        CommandSpec::new(
            CommandLine::Program(words.iter().map(|word| (*word).to_owned()).collect()),
            Vec::new(),
            None,
        )
    }

    #[test]
    fn refuses_what_cannot_be_run() {
        assert!(program(&[]).is_err());
        assert!(program(&[""]).is_err());
        assert!(program(&["a", "b\0"]).is_err());
        assert!(CommandSpec::new(CommandLine::Shell("\0".into()), Vec::new(), None).is_err());
        for name in ["", "A=B", "A\0"] {
            let change = vec![(name.to_owned(), Some(String::new()))];
            assert!(CommandSpec::new(CommandLine::Shell("x".into()), change, None).is_err());
        }
    }

    #[test]
    fn searches_path_as_execvp_does() {
        let spec = program(&["ls"]).unwrap();
        assert_eq!(
            spec.programs(b"/a::/b"),
            [c"/a/ls".to_owned(), c"./ls".to_owned(), c"/b/ls".to_owned()]
        );
        assert_eq!(
            program(&["./ls"]).unwrap().programs(b"/a"),
            [c"./ls".to_owned()]
        );
    }

    #[test]
    fn fingerprints_tell_commands_apart() {
        let all = [
            program(&["a", "b"]).unwrap(),
            program(&["ab"]).unwrap(),
            program(&["a", "", "b"]).unwrap(),
            CommandSpec::new(CommandLine::Shell("ab".into()), Vec::new(), None).unwrap(),
            CommandSpec::new(
                CommandLine::Shell("ab".into()),
                vec![("A".into(), None)],
                None,
            )
            .unwrap(),
            CommandSpec::new(
                CommandLine::Shell("ab".into()),
                vec![("A".into(), Some(String::new()))],
                None,
            )
            .unwrap(),
            CommandSpec::new(
                CommandLine::Shell("ab".into()),
                Vec::new(),
                Some("/".into()),
            )
            .unwrap(),
        ];
        for (index, one) in all.iter().enumerate() {
            for (other_index, other) in all.iter().enumerate() {
                assert_eq!(
                    one.fingerprint() == other.fingerprint(),
                    index == other_index
                );
            }
        }
    }

    #[test]
    fn chosen_ids_cannot_be_taken_for_the_servers_own() {
        for id in ["", "7", "p-7", "..", ".", "a/b", "é", &"x".repeat(65)] {
            assert!(ChosenId::new(id.to_owned()).is_err(), "{id}");
        }
        for id in ["p-x", "a", "job.1_2-3", &"x".repeat(64)] {
            assert!(ChosenId::new(id.to_owned()).is_ok(), "{id}");
        }
    }
}
