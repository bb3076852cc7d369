//! The command that a client wants to run, checked on construction.
//!
//! A [`CommandSpec`] is never empty and holds no NUL, so its users check nothing again. The identity,
//! environment and limits that it starts with are in `confine`.

use std::ffi::CString;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::codec::shortened;
use crate::codec::sort::sort;
use crate::error::{Error, Result};
use crate::spec::language::{Language, end_of_options};
use crate::spec::network::NetworkPolicy;

/// What a text takes besides its bytes: a string and the allocator's smallest block.
const TEXT_BYTES: usize = size_of::<String>() + 40;

/// What a process takes besides the texts of its command, approximately.
const PROCESS_BYTES: usize = 2048;

/// What is executed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandLine {
    /// Run by `/bin/sh -c`.
    Shell(String),
    /// Executed directly; the first word is searched in PATH.
    Program(Vec<String>),
    /// Code that the interpreter of its language runs as a script.
    Code {
        language: Language,
        code: String,
        /// The arguments of the script.
        arguments: Vec<String>,
    },
}

impl CommandLine {
    /// The words that are executed, as far as they are short: of code only the program.
    pub fn words(&self) -> impl Iterator<Item = &str> {
        (0..).map_while(|place| self.word(place))
    }

    fn word(&self, place: usize) -> Option<&str> {
        match self {
            Self::Shell(script) => ["/bin/sh", "-c", script].get(place).copied(),
            Self::Program(words) => words.get(place).map(String::as_str),
            Self::Code { language, .. } => (place == 0).then(|| language.program()),
        }
    }

    /// The same in one text, [`shortened`]. It takes no more memory than that.
    pub fn beginning(&self, most: usize) -> String {
        let (mut text, mut space) = (String::new(), "");
        for word in self.words() {
            if text.len() > most {
                break;
            }
            text.push_str(space);
            text.push_str(&shortened(word, most));
            space = " ";
        }
        shortened(&text, most).into_owned()
    }

    /// All texts that it has.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let (text, words): (_, &[String]) = match self {
            Self::Shell(script) => (Some(script), &[]),
            Self::Program(words) => (None, words),
            Self::Code {
                code, arguments, ..
            } => (Some(code), arguments),
        };
        text.into_iter().chain(words).map(String::as_str)
    }

    /// Bytes in memory, approximately.
    pub fn size(&self) -> usize {
        self.texts().map(|text| text.len() + TEXT_BYTES).sum()
    }
}

/// Where a command's input comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StdinSource {
    /// End of file immediately.
    Empty,
    /// These bytes, then end of file.
    Given(Vec<u8>),
    /// A pipe that clients write to later.
    Open,
}

impl StdinSource {
    /// Bytes in memory until the command has read them.
    pub fn held_bytes(&self) -> usize {
        match self {
            Self::Given(bytes) => bytes.len(),
            Self::Empty | Self::Open => 0,
        }
    }
}

/// Run by `/bin/sh` where a terminal is asked for without a command: an interactive shell. The command
/// chooses it, not the server, because it may see other files.
pub const INTERACTIVE_SHELL: &str = "[ -x /bin/bash ] && exec /bin/bash; exec /bin/sh";

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalSize {
    rows: u16,
    columns: u16,
}

impl TerminalSize {
    /// Most rows, and most columns.
    pub const MAX: u16 = 4096;

    /// # Errors
    /// `Invalid` if one of the two is 0 or above [`TerminalSize::MAX`].
    pub fn new(rows: u64, columns: u64) -> Result<Self> {
        let side = |name, value: u64| match u16::try_from(value) {
            Ok(value) if (1..=Self::MAX).contains(&value) => Ok(value),
            _ => Err(Error::invalid(format_args!(
                "{name} is {value}; it takes a whole number from 1 to {}",
                Self::MAX
            ))),
        };
        Ok(Self {
            rows: side("rows", rows)?,
            columns: side("cols", columns)?,
        })
    }

    pub fn rows(self) -> u16 {
        self.rows
    }

    pub fn columns(self) -> u16 {
        self.columns
    }
}

/// That of most terminals before they are resized.
impl Default for TerminalSize {
    fn default() -> Self {
        Self {
            rows: 24,
            columns: 80,
        }
    }
}

/// The terminal that a command gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TerminalSpec {
    /// Its size at the start.
    pub size: TerminalSize,
    /// Its type, for terminfo(5).
    name: String,
}

impl TerminalSpec {
    /// Most characters of a type.
    const MAX_NAME: usize = 64;

    /// # Errors
    /// `Invalid` if the name cannot be one of a terminal's type.
    pub fn new(size: TerminalSize, name: String) -> Result<Self> {
        let plain =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'+' | b'-');
        if !(1..=Self::MAX_NAME).contains(&name.len()) || !name.bytes().all(plain) {
            let text = "term must be 1 to 64 of the characters A-Z a-z 0-9 . _ + -";
            return Err(Error::invalid(text));
        }
        Ok(Self { size, name })
    }

    /// Its type, as in `TERM`.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Default for TerminalSpec {
    fn default() -> Self {
        Self {
            size: TerminalSize::default(),
            name: "xterm-256color".to_owned(),
        }
    }
}

/// One change to the environment: a name, and a value or `None` to remove the variable.
pub type EnvironmentChange = (String, Option<String>);

/// A command that can be started.
#[derive(Debug, Clone)]
pub struct CommandSpec {
    line: CommandLine,
    environment: Vec<EnvironmentChange>,
    directory: Option<String>,
    /// The source of its input.
    pub input: StdinSource,
    /// The terminal that it gets instead of pipes; its input then comes from there.
    pub terminal: Option<TerminalSpec>,
    /// How long it may run; `None` means no limit.
    pub timeout: Option<Duration>,
    /// The client's own label.
    pub tag: Option<String>,
    /// An id that the client chose, which makes the start idempotent.
    pub id: Option<ChosenId>,
    /// Whether it runs without a client.
    pub background: bool,
    /// What it may reach over the network; `None` for what all commands of the workspace may.
    pub network: Option<NetworkPolicy>,
    /// The user that it runs as; `None` for whoever runs the commands of the workspace.
    pub user: Option<String>,
    /// Whether a login shell has the PATH of the workspace before that of its profile.
    pub keeps_path: bool,
}

/// The words of a shell in the two forms in which a login shell is started: for a script, and for a terminal. Its
/// profile may set PATH anew, so it puts `search` before that. Other words are left as they are.
fn with_path_first(words: &[&str], search: &[u8]) -> Vec<CString> {
    let quoted = search.split(|byte| *byte == b'\'').collect::<Vec<_>>();
    let quoted = quoted.join(&b"'\\''"[..]);
    // On one line, so that the lines of a script keep their numbers.
    let first = [
        b"case $PATH in '",
        &quoted[..],
        b"'*) ;; *) PATH='",
        &quoted,
        b"':$PATH ;; esac; ",
    ]
    .concat();
    let script = |rest: &str| {
        let script = [&first, rest.as_bytes()].concat();
        CString::new(script).unwrap_or_default()
    };
    match *words {
        [shell, "-l", "-c", own, ref rest @ ..] => {
            let begin = [shell, "-l", "-c"].map(c_string).into_iter();
            let rest = rest.iter().map(c_string);
            begin.chain([script(own)]).chain(rest).collect()
        }
        [shell, "-i", "-l"] | [shell, "-l", "-i"] => {
            let begin = [shell, "-l", "-c"].map(c_string).into_iter();
            let own = script("exec \"$0\" -i");
            begin.chain([own, c_string(shell)]).collect()
        }
        _ => words.iter().map(c_string).collect(),
    }
}

/// A digest of everything that decides what a command does.
pub type Fingerprint = [u8; 32];

impl CommandSpec {
    /// A command with empty input and no limits.
    ///
    /// # Errors
    /// `Invalid` if the command is empty, a text holds a NUL, or a variable's name is impossible.
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
                    let text = "cmd must name a program: its first element is missing or empty";
                    return Err(Error::invalid(text));
                }
                words.iter().try_for_each(|word| no_nul("cmd", word))?;
            }
            CommandLine::Code {
                language,
                code,
                arguments,
            } => {
                if *language == Language::Bash {
                    no_nul("code", code)?;
                }
                let mut words = arguments.iter();
                words.try_for_each(|word| no_nul("args", word))?;
            }
        }
        check_environment(&environment)?;
        no_nul("cwd", directory.as_deref().unwrap_or_default())?;
        Ok(Self {
            line,
            environment,
            directory: directory.filter(|directory| !directory.is_empty()),
            input: StdinSource::Empty,
            terminal: None,
            timeout: None,
            tag: None,
            id: None,
            background: false,
            network: None,
            user: None,
            keeps_path: false,
        })
    }

    /// What is executed.
    pub fn line(&self) -> &CommandLine {
        &self.line
    }

    /// Changes to the workspace's environment.
    pub fn environment(&self) -> &[EnvironmentChange] {
        &self.environment
    }

    /// Its working directory; `None` means the workspace's.
    pub fn directory(&self) -> Option<&str> {
        self.directory.as_deref()
    }

    /// Bytes in memory while it is started, approximately: the texts, the copies that the kernel gets, and the rules of its
    /// network, which egress listeners have that are few.
    pub fn start_bytes(&self) -> usize {
        let network = self.network.as_ref().map_or(0, NetworkPolicy::size);
        self.line.size() + 2 * environment_bytes(&self.environment) + network + self.kept_bytes()
    }

    /// Bytes in memory as long as the process is remembered, approximately; never more than
    /// [`CommandSpec::start_bytes`].
    pub fn kept_bytes(&self) -> usize {
        let texts = [&self.tag, &self.directory, &self.user]
            .into_iter()
            .flatten();
        let texts: usize = texts.map(String::len).sum();
        self.line.size() + environment_bytes(&self.environment) + texts + PROCESS_BYTES
    }

    /// `argv` of a command whose PATH is `search`.
    pub fn arguments(&self, search: &[u8]) -> Vec<CString> {
        match &self.line {
            CommandLine::Shell(script) => {
                let words = ["/bin/sh", "-c"].into_iter().chain(end_of_options(script));
                words.chain([&**script]).map(c_string).collect()
            }
            CommandLine::Program(words) if self.keeps_path => {
                let words: Vec<_> = words.iter().map(String::as_str).collect();
                with_path_first(&words, search)
            }
            CommandLine::Program(words) => words.iter().map(c_string).collect(),
            CommandLine::Code {
                language,
                code,
                arguments,
            } => {
                let own = [language.program()]
                    .into_iter()
                    .chain(language.script(code).arguments);
                let words = own.chain(arguments.iter().map(String::as_str));
                words.map(c_string).collect()
            }
        }
    }

    /// The code that its program reads from descriptor 4.
    pub fn passed_code(&self) -> Option<&[u8]> {
        match &self.line {
            CommandLine::Code { language, code, .. } if language.script(code).is_passed => {
                Some(code.as_bytes())
            }
            _ => None,
        }
    }

    /// The paths to try in turn, as execvp(3) does; `search` is a PATH.
    pub fn programs(&self, search: &[u8]) -> Vec<CString> {
        let name = match &self.line {
            CommandLine::Shell(_) => return vec![c"/bin/sh".to_owned()],
            CommandLine::Program(words) => words.first().map(String::as_bytes).unwrap_or_default(),
            CommandLine::Code { language, .. } => language.program().as_bytes(),
        };
        if name.contains(&b'/') {
            return vec![c_string(name)];
        }
        search
            .split(|byte| *byte == b':')
            .map(|directory| match directory {
                b"" => c_string([b"./", name].concat()),
                directory => c_string([directory, b"/", name].concat()),
            })
            .collect()
    }

    /// A digest that differs from that of any other command with the same id.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut digest = Sha256::new();
        // Each part is preceded by its length, so that different parts never give the same bytes.
        let mut part = |bytes: &[u8]| {
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        };
        let words: &[String] = match &self.line {
            CommandLine::Shell(script) => {
                part(b"shell");
                part(script.as_bytes());
                &[]
            }
            CommandLine::Program(words) => {
                part(b"program");
                words
            }
            CommandLine::Code {
                language,
                code,
                arguments,
            } => {
                part(b"code");
                part(language.name().as_bytes());
                part(code.as_bytes());
                arguments
            }
        };
        part(&words.len().to_le_bytes());
        for word in words {
            part(word.as_bytes());
        }
        let mut environment = self.environment.clone();
        sort(&mut environment);
        for (name, value) in &environment {
            part(name.as_bytes());
            part(if value.is_some() { b"=" } else { b"-" });
            part(value.as_deref().unwrap_or_default().as_bytes());
        }
        if let Some(user) = &self.user {
            part(b"user");
            part(user.as_bytes());
        }
        part(b"cwd");
        part(self.directory.as_deref().unwrap_or_default().as_bytes());
        match &self.input {
            // Without input the route decides which of the two it is, not the client. Empty input is
            // the same as none.
            StdinSource::Empty | StdinSource::Open => part(b""),
            StdinSource::Given(bytes) => part(bytes),
        }
        if let Some(TerminalSpec { size, name }) = &self.terminal {
            part(b"terminal");
            part(&size.rows.to_le_bytes());
            part(&size.columns.to_le_bytes());
            part(name.as_bytes());
        }
        if let Some(network) = &self.network {
            part(b"network");
            part(network.identity().as_bytes());
        }
        digest.finalize().into()
    }
}

/// Bytes of changes to an environment in memory, approximately.
pub fn environment_bytes(changes: &[EnvironmentChange]) -> usize {
    let bytes = changes
        .iter()
        .map(|(name, value)| name.len() + value.as_ref().map_or(0, String::len) + 2 * TEXT_BYTES);
    bytes.sum()
}

/// Checks that a program can be given these variables.
///
/// # Errors
/// `Invalid` for an impossible name, or a NUL in a value.
pub fn check_environment(changes: &[EnvironmentChange]) -> Result<()> {
    for (name, value) in changes {
        if name.is_empty() || name.contains(['=', '\0']) {
            let text = format_args!("env has an impossible variable name {name:?}");
            return Err(Error::invalid(text));
        }
        no_nul(&format!("env.{name}"), value.as_deref().unwrap_or_default())?;
    }
    Ok(())
}

fn no_nul(field: &str, text: &str) -> Result<()> {
    if text.contains('\0') {
        let text = format!("{field} has a NUL character, which no program can be given");
        return Err(Error::invalid(text));
    }
    Ok(())
}

/// Converts bytes that hold no NUL, as [`CommandSpec::new`] has checked.
fn c_string(bytes: impl AsRef<[u8]>) -> CString {
    CString::new(bytes.as_ref()).unwrap_or_default()
}

/// The id of a process that a client chose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenId(String);

impl ChosenId {
    /// Most characters of an id.
    const MAX: usize = 64;

    /// Checks an id. Numbers and `p-1` are refused: they are pids and the server's own ids.
    ///
    /// # Errors
    /// `Invalid`, with the accepted form.
    pub fn new(id: String) -> Result<Self> {
        if !Self::is_plain(&id) {
            let text = "id must be 1 to 64 of the characters A-Z a-z 0-9 . _ -";
            return Err(Error::invalid(text));
        }
        let number = id.strip_prefix("p-").unwrap_or(&id);
        if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) {
            let text = "id must not be a number or look like p-1: those are the server's own";
            return Err(Error::invalid(text));
        }
        Ok(Self(id))
    }

    /// Whether a text has the form of an id, whoever chose it.
    pub fn is_plain(id: &str) -> bool {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        let length_is_right = (1..=Self::MAX).contains(&id.len());
        length_is_right && id.bytes().all(plain) && !matches!(id, "." | "..")
    }

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

    fn arguments(spec: &CommandSpec) -> Vec<String> {
        let words = spec.arguments(b"/a'b:/c").into_iter();
        words.map(|word| word.into_string().unwrap()).collect()
    }

    #[test]
    fn a_script_is_never_taken_for_options() {
        for (script, dashes) in [
            ("-n x", true),
            ("+x", true),
            ("--", true),
            (" -n", false),
            ("a", false),
        ] {
            let shell = CommandSpec::new(CommandLine::Shell(script.into()), Vec::new(), None);
            let expected = if dashes {
                vec!["/bin/sh", "-c", "--", script]
            } else {
                vec!["/bin/sh", "-c", script]
            };
            assert_eq!(arguments(&shell.unwrap()), expected);
            let mut expected = expected;
            expected[0] = "bash";
            expected.push("bash");
            assert_eq!(arguments(&code(Language::Bash, script, &[])), expected);
        }
    }

    #[test]
    fn a_login_shell_has_the_path_of_the_workspace_first() {
        let first = r"case $PATH in '/a'\''b:/c'*) ;; *) PATH='/a'\''b:/c':$PATH ;; esac; ";
        let told = |words: &[&str]| {
            let mut spec = program(words).unwrap();
            assert_eq!(arguments(&spec), words);
            spec.keeps_path = true;
            arguments(&spec)
        };
        assert_eq!(
            told(&["/bin/bash", "-l", "-c", "-x\ny", "0", "1"]),
            ["/bin/bash", "-l", "-c", &format!("{first}-x\ny"), "0", "1"]
        );
        for words in [["/bin/bash", "-i", "-l"], ["/bin/bash", "-l", "-i"]] {
            let shell = format!("{first}exec \"$0\" -i");
            assert_eq!(told(&words), ["/bin/bash", "-l", "-c", &shell, "/bin/bash"]);
        }
        for words in [&["/bin/bash", "-c", "x"][..], &["ls", "-l"], &["/bin/bash"]] {
            assert_eq!(told(words), words);
        }
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
    fn a_process_that_runs_never_takes_more_than_its_start() {
        let mut spec = program(&["true"]).unwrap();
        spec.tag = Some("x".repeat(1024));
        assert!(spec.kept_bytes() <= spec.start_bytes());
    }

    #[test]
    fn the_beginning_of_a_command_is_that_of_its_words() {
        let euro = "\u{20ac}".repeat(4);
        for words in [
            &["ls"][..],
            &["", "a", ""],
            &["", &euro],
            &["a", &euro, "b"],
            &[&euro, "b"],
            &["ab", "\u{1f600}\u{1f600}"],
        ] {
            let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
            let joined = words.join(" ");
            let command = CommandLine::Program(words);
            for most in 0..20 {
                let expected = shortened(&joined, most);
                assert_eq!(command.beginning(most), expected, "{joined:?} {most}");
            }
        }
        let script = CommandLine::Shell("x".repeat(50));
        assert_eq!(script.beginning(12), "/bin/sh -c x\u{2026}");
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

    fn code(language: Language, code: &str, arguments: &[&str]) -> CommandSpec {
        let line = CommandLine::Code {
            language,
            code: code.to_owned(),
            arguments: arguments.iter().map(|word| (*word).to_owned()).collect(),
        };
        CommandSpec::new(line, Vec::new(), None).unwrap()
    }

    #[test]
    fn code_that_is_too_long_for_an_argument_is_passed() {
        let at_most = "#".repeat(100 * 1024);
        let more = format!("{at_most}#");
        for language in Language::ALL {
            for code_text in ["", &at_most, &more] {
                let spec = code(language, code_text, &["--one"]);
                let is_passed = language != Language::Bash || code_text.len() == more.len();
                assert_eq!(spec.passed_code().is_some(), is_passed);
                let arguments = spec.arguments(b"/bin");
                assert!(arguments.iter().all(|word| word.count_bytes() < 128 * 1024));
                assert_eq!(arguments.last().unwrap().to_bytes(), b"--one");
            }
        }
    }

    #[test]
    fn fingerprints_tell_commands_apart() {
        let mut blocked = code(Language::Python, "ab", &[]);
        blocked.network = Some(NetworkPolicy::Blocked);
        let all = [
            blocked,
            code(Language::Python, "ab", &[]),
            code(Language::Bash, "ab", &[]),
            code(Language::Bash, "a", &["b"]),
            code(Language::Bash, "a", &["b", ""]),
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
