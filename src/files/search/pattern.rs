//! One pattern in the syntax of gitignore(5), and `{a,b}` where the caller wants it.
//!
//! A pattern is compiled to a nondeterministic automaton whose edges lead forward or to the same state,
//! so a match takes time in proportion to the pattern times the path, whatever the stars in it. Paths
//! and patterns are bytes: `?` is one byte, classes are those of ASCII, as in git.

/// Longest pattern in bytes. A path has at most as many.
pub const MAX_PATTERN_BYTES: usize = 4096;

/// Deepest nesting of braces.
const MAX_BRACES: usize = 16;

/// What a pattern may contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syntax {
    /// A line of a `.gitignore` file: braces are literal, and what git never matches is no error.
    Gitignore,
    /// A pattern from a client: `{a,b}` are alternatives, and a pattern that cannot match is refused.
    Glob,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    form: Form,
    /// Whether it began with `!`.
    pub is_negated: bool,
    /// Whether it ended with `/`.
    directories_only: bool,
    /// Whether it has no slash, so that it is compared with the last name of a path.
    pub(super) is_name: bool,
}

/// How a pattern is compared.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Form {
    /// All bytes are literal.
    Literal(Vec<u8>),
    /// A star, and then literal bytes without a slash. Only for names.
    Suffix(Vec<u8>),
    /// Anything else.
    Automaton(Vec<Step>),
    /// Nothing: the pattern is broken, and git ignores it.
    Nothing,
}

/// A state of the automaton. Unless it says something else, the next state follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    /// Takes this byte.
    Byte(u8),
    /// Takes any byte but a slash.
    Any,
    /// Takes one of a set of bytes.
    Class(Box<[u64; 4]>),
    /// Takes any number of bytes but slashes.
    Star,
    /// Takes any number of bytes.
    StarStar,
    /// Takes nothing, and goes to this state, which follows.
    Jump(usize),
    /// Takes nothing, and goes to the next state and to this one, which follows.
    Split(usize),
}

impl Pattern {
    /// Compiles a pattern, without the rules of lines (comments, trailing blanks).
    ///
    /// # Errors
    /// What is wrong with a [glob](Syntax::Glob).
    pub fn new(text: &[u8], syntax: Syntax) -> Result<Self, &'static str> {
        let (is_negated, text) = match text.strip_prefix(b"!") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (directories_only, text) = match text.strip_suffix(b"/") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let mut is_name = !text.contains(&b'/');
        let mut rest = text.strip_prefix(b"/").unwrap_or(text);
        // A name at any depth may be written so, too.
        if let Some(name) = rest.strip_prefix(b"**/")
            && !name.contains(&b'/')
        {
            rest = name;
            is_name = true;
        }
        let compiled = if rest.is_empty() {
            Err("it is empty")
        } else if rest.len() > MAX_PATTERN_BYTES {
            Err("it is longer than 4096 bytes")
        } else {
            compile(rest, syntax, is_name)
        };
        let form = match (compiled, syntax) {
            (Ok(form), _) => form,
            (Err(_), Syntax::Gitignore) => Form::Nothing,
            (Err(why), Syntax::Glob) => return Err(why),
        };
        Ok(Self {
            form,
            is_negated,
            directories_only,
            is_name,
        })
    }

    /// Whether it matches a path: relative, without a slash at either end.
    pub fn matches(&self, path: &[u8], is_directory: bool) -> bool {
        if self.directories_only && !is_directory {
            return false;
        }
        let name_start = || path.iter().rposition(|byte| *byte == b'/');
        let text = match self.is_name.then(name_start).flatten() {
            Some(slash) => &path[slash + 1..],
            None => path,
        };
        self.matches_text(text)
    }

    /// How many states a match may go through for each byte of a path. A comparison counts as a few.
    pub(super) fn states(&self) -> usize {
        match &self.form {
            Form::Automaton(states) => states.len(),
            Form::Literal(bytes) | Form::Suffix(bytes) => 1 + bytes.len() / 64,
            Form::Nothing => 1,
        }
    }

    /// Calls `found` with each of these ends, in ascending order, up to which it matches the path: slashes, and perhaps the
    /// end of the path. All before that one are directories. It takes as long as one match.
    pub(super) fn matches_up_to(
        &self,
        path: &[u8],
        ends: &[usize],
        is_directory: bool,
        found: &mut dyn FnMut(usize),
    ) {
        let is_meant = |end: usize| !self.directories_only || is_directory || end < path.len();
        if self.is_name {
            let mut begin = 0;
            for (place, end) in ends.iter().enumerate() {
                if is_meant(*end) && self.matches_text(&path[begin..*end]) {
                    found(place);
                }
                begin = end + 1;
            }
            return;
        }
        let mut find = |end: usize| {
            if let Ok(place) = ends.binary_search(&end)
                && is_meant(end)
            {
                found(place);
            }
        };
        match &self.form {
            Form::Literal(bytes) if path.starts_with(bytes) => find(bytes.len()),
            Form::Automaton(states) => {
                run(states, path, &mut |end| {
                    find(end);
                    false
                });
            }
            // Only a name has a suffix.
            Form::Literal(_) | Form::Suffix(_) | Form::Nothing => {}
        }
    }

    fn matches_text(&self, text: &[u8]) -> bool {
        match &self.form {
            Form::Literal(bytes) => text == bytes.as_slice(),
            Form::Suffix(bytes) => text.ends_with(bytes),
            Form::Automaton(states) => run(states, text, &mut |end| end == text.len()),
            Form::Nothing => false,
        }
    }

    /// About how many bytes of memory it takes.
    pub fn size(&self) -> usize {
        let form = match &self.form {
            Form::Literal(bytes) | Form::Suffix(bytes) => bytes.len(),
            Form::Automaton(states) => {
                let classes = states
                    .iter()
                    .filter(|state| matches!(state, Step::Class(_)));
                states.len() * size_of::<Step>() + classes.count() * 48
            }
            Form::Nothing => 0,
        };
        size_of::<Self>() + 16 + form
    }
}

/// Compiles a pattern without its marks at both ends.
fn compile(text: &[u8], syntax: Syntax, is_name: bool) -> Result<Form, &'static str> {
    let is_special = |byte: &u8| match syntax {
        Syntax::Gitignore => b"*?[\\".contains(byte),
        Syntax::Glob => b"*?[\\{".contains(byte),
    };
    if !text.iter().any(is_special) {
        return Ok(Form::Literal(text.to_vec()));
    }
    if let [b'*', rest @ ..] = text
        && is_name
        && !rest.iter().any(is_special)
    {
        return Ok(Form::Suffix(rest.to_vec()));
    }
    let mut compiler = Compiler {
        text,
        at: 0,
        syntax,
        states: Vec::new(),
    };
    compiler.sequence(0, true)?;
    compiler.states.shrink_to_fit();
    Ok(Form::Automaton(compiler.states))
}

struct Compiler<'a> {
    text: &'a [u8],
    at: usize,
    syntax: Syntax,
    states: Vec<Step>,
}

impl Compiler<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    /// Compiles up to the end, or in braces up to the next comma or closing brace. `is_start`: whether a
    /// component begins here. Returns whether one begins after it.
    fn sequence(&mut self, braces: usize, mut is_start: bool) -> Result<bool, &'static str> {
        while let Some(byte) = self.peek() {
            if braces > 0 && (byte == b',' || byte == b'}') {
                break;
            }
            self.at += 1;
            match byte {
                b'*' => {
                    is_start = self.star(braces, is_start);
                    continue;
                }
                b'?' => self.states.push(Step::Any),
                b'[' => {
                    let class = self.class()?;
                    self.states.push(Step::Class(class));
                }
                b'{' if self.syntax == Syntax::Glob => {
                    is_start = self.alternatives(braces + 1, is_start)?;
                    continue;
                }
                b'\\' => {
                    let escaped = self.peek().ok_or("it ends with a backslash")?;
                    self.at += 1;
                    self.states.push(Step::Byte(escaped));
                }
                byte => self.states.push(Step::Byte(byte)),
            }
            is_start = byte == b'/';
        }
        Ok(is_start)
    }

    /// Compiles one or more stars, of which the first was read.
    fn star(&mut self, braces: usize, is_start: bool) -> bool {
        let first = self.at;
        while self.peek() == Some(b'*') {
            self.at += 1;
        }
        let is_end = match self.peek() {
            None | Some(b'/') => true,
            Some(b'\\') => self.text.get(self.at + 1) == Some(&b'/'),
            Some(b',' | b'}') => braces > 0,
            _ => false,
        };
        if self.at == first || !is_start || !is_end {
            self.states.push(Step::Star);
            return false;
        }
        if self.peek() != Some(b'/') {
            self.states.push(Step::StarStar);
            return false;
        }
        // Any number of directories, or none.
        self.at += 1;
        let after = self.states.len() + 3;
        let directories = [Step::Split(after), Step::StarStar, Step::Byte(b'/')];
        self.states.extend(directories);
        true
    }

    /// Compiles what is in braces, of which the first was read.
    fn alternatives(&mut self, braces: usize, is_start: bool) -> Result<bool, &'static str> {
        if braces > MAX_BRACES {
            return Err("its braces are nested too deeply");
        }
        let mut ends = Vec::new();
        let mut starts_after = true;
        loop {
            let split = self.states.len();
            self.states.push(Step::Split(0));
            starts_after &= self.sequence(braces, is_start)?;
            ends.push(self.states.len());
            self.states.push(Step::Jump(0));
            let next = self.states.len();
            self.at += 1;
            match self.text.get(self.at - 1) {
                Some(b',') => self.states[split] = Step::Split(next),
                Some(_) => {
                    // The last alternative has no other one.
                    self.states[split] = Step::Jump(split + 1);
                    for end in ends {
                        self.states[end] = Step::Jump(next);
                    }
                    return Ok(starts_after);
                }
                None => return Err("a { is not closed"),
            }
        }
    }

    /// Compiles what is in brackets, of which the first was read.
    fn class(&mut self) -> Result<Box<[u64; 4]>, &'static str> {
        const OPEN: &str = "a [ is not closed";
        let mut set = [0_u64; 4];
        let mut add = |byte: u8| set[usize::from(byte / 64)] |= 1 << (byte % 64);
        let is_negated = matches!(self.peek(), Some(b'!' | b'^'));
        self.at += usize::from(is_negated);
        // The byte that a range may begin with.
        let mut before = None;
        let mut is_first = true;
        loop {
            let byte = self.peek().ok_or(OPEN)?;
            self.at += 1;
            match byte {
                b']' if !is_first => break,
                b'\\' => {
                    let escaped = self.peek().ok_or(OPEN)?;
                    self.at += 1;
                    add(escaped);
                    before = Some(escaped);
                }
                b'-' if before.is_some() && self.peek().is_some_and(|next| next != b']') => {
                    let mut last = self.peek().ok_or(OPEN)?;
                    self.at += 1;
                    if last == b'\\' {
                        last = self.peek().ok_or(OPEN)?;
                        self.at += 1;
                    }
                    (before.unwrap_or(last)..=last).for_each(&mut add);
                    before = None;
                }
                b'[' if self.peek() == Some(b':') => {
                    let rest = &self.text[self.at + 1..];
                    let end = rest.iter().position(|byte| *byte == b']').ok_or(OPEN)?;
                    if let [name @ .., b':'] = &rest[..end] {
                        let is_member =
                            named_class(name).ok_or("a class such as [:alpha:] is not known")?;
                        (0..=u8::MAX).filter(is_member).for_each(&mut add);
                        self.at += end + 2;
                        before = None;
                    } else {
                        add(b'[');
                        before = Some(b'[');
                    }
                }
                byte => {
                    add(byte);
                    before = Some(byte);
                }
            }
            is_first = false;
        }
        if is_negated {
            set = set.map(|bits| !bits);
        }
        // A class never takes a slash, which is in the first word.
        set[0] &= !(1 << b'/');
        Ok(Box::new(set))
    }
}

/// The characters of a class such as `[:alpha:]`.
fn named_class(name: &[u8]) -> Option<fn(&u8) -> bool> {
    Some(match name {
        b"alnum" => u8::is_ascii_alphanumeric,
        b"alpha" => u8::is_ascii_alphabetic,
        b"blank" => |byte| matches!(byte, b' ' | b'\t'),
        b"cntrl" => u8::is_ascii_control,
        b"digit" => u8::is_ascii_digit,
        b"graph" => u8::is_ascii_graphic,
        b"lower" => u8::is_ascii_lowercase,
        b"print" => |byte| matches!(byte, b' '..=b'~'),
        b"punct" => u8::is_ascii_punctuation,
        b"space" => |byte| matches!(byte, b' ' | b'\t'..=b'\r'),
        b"upper" => u8::is_ascii_uppercase,
        b"xdigit" => u8::is_ascii_hexdigit,
        _ => return None,
    })
}

/// Runs the automaton over a text, and tells `is_enough` each end up to which it takes the text, as long as that is not. Returns
/// whether it was. A bit stands for each state, and one more for the end.
fn run(states: &[Step], text: &[u8], is_enough: &mut dyn FnMut(usize) -> bool) -> bool {
    let words = states.len() / 64 + 1;
    // Patterns of ordinary length need no allocation.
    let (mut few, mut many) = ([0; 8], Vec::new());
    let sets = if words <= few.len() / 2 {
        &mut few[..2 * words]
    } else {
        many.resize(2 * words, 0);
        &mut many[..]
    };
    let (mut current, mut next) = sets.split_at_mut(words);
    current[0] = 1;
    for at in 0..=text.len() {
        step(states, current, next, text.get(at).copied());
        // By now it has what takes nothing.
        let is_end = current[states.len() / 64] >> (states.len() % 64) & 1 == 1;
        if is_end && is_enough(at) {
            return true;
        }
        std::mem::swap(&mut current, &mut next);
        next.fill(0);
        if current.iter().all(|bits| *bits == 0) {
            return false;
        }
    }
    false
}

/// Follows the edges that take nothing within `current`, and those that take `byte` to `next`.
fn step(states: &[Step], current: &mut [u64], next: &mut [u64], byte: Option<u8>) {
    let add = |set: &mut [u64], state: usize| set[state / 64] |= 1 << (state % 64);
    for word in 0..current.len() {
        // Edges lead forward, so the bits are found in one pass.
        let mut done = 0_u64;
        loop {
            let left = current[word] & !done;
            if left == 0 {
                break;
            }
            let bit = left.trailing_zeros() as usize;
            done |= 1 << bit;
            let index = word * 64 + bit;
            let Some(state) = states.get(index) else {
                break;
            };
            let is_taken = |is_member: &dyn Fn(u8) -> bool| byte.is_some_and(is_member);
            match state {
                Step::Byte(own) if byte == Some(*own) => add(next, index + 1),
                Step::Any if is_taken(&|byte| byte != b'/') => add(next, index + 1),
                Step::Class(set)
                    if is_taken(&|byte| set[usize::from(byte / 64)] >> (byte % 64) & 1 == 1) =>
                {
                    add(next, index + 1);
                }
                Step::Byte(_) | Step::Any | Step::Class(_) => {}
                Step::Star | Step::StarStar => {
                    let crosses = *state == Step::StarStar;
                    if is_taken(&|byte| crosses || byte != b'/') {
                        add(next, index);
                    }
                    add(current, index + 1);
                }
                Step::Jump(to) => add(current, *to),
                Step::Split(to) => {
                    add(current, index + 1);
                    add(current, *to);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn glob(text: &str) -> Pattern {
        Pattern::new(text.as_bytes(), Syntax::Glob).unwrap()
    }

    #[test]
    fn patterns_match_what_gitignore_says() {
        for (pattern, matching, others) in [
            ("a", &["a", "x/a", "x/y/a"][..], &["b", "a/x", "ab"][..]),
            ("/a", &["a"], &["x/a"]),
            ("a/b", &["a/b"], &["x/a/b", "a/b/c"]),
            ("*.rs", &["a.rs", "x/.rs"], &["a.rs/b", "a.r"]),
            ("/*.rs", &["a.rs"], &["x/a.rs"]),
            ("a/*", &["a/b"], &["a/b/c", "a"]),
            ("**/a", &["a", "x/a", "x/y/a"], &["xa"]),
            ("**/a/b", &["a/b", "x/a/b"], &["xa/b"]),
            ("a/**", &["a/b", "a/b/c"], &["a", "b/a/c"]),
            ("a/**/b", &["a/b", "a/x/b", "a/x/y/b"], &["a/xb", "ab"]),
            ("a**b", &["ab", "a.b", "x/axb"], &["a/b"]),
            ("a?c", &["abc"], &["ac", "a/c"]),
            ("[a-c]x", &["ax", "cx"], &["dx"]),
            ("[!a-c]x", &["dx"], &["ax"]),
            ("[^a-c]x", &["dx"], &["ax"]),
            ("a[!b]c", &["axc"], &["a/c"]),
            ("[]x]", &["]", "x"], &["a"]),
            ("[x-]", &["-", "x"], &["y"]),
            ("[[:digit:][:upper:]]", &["7", "A"], &["a", ":"]),
            ("[[:x]", &["[", ":", "x"], &["y"]),
            ("\\*", &["*"], &["a"]),
            ("\\!a", &["!a"], &["a"]),
            ("{a,b}.{c,d}", &["a.c", "b.d"], &["a", "ab.c"]),
            ("{a,b/{c,d}}", &["a", "b/c", "b/d"], &["x/a", "b"]),
            (
                "{src,tests}/**/*.rs",
                &["src/a.rs", "tests/x/y/b.rs"],
                &["a.rs"],
            ),
            ("x{,.bak}", &["x", "x.bak"], &["x.ba"]),
            ("{src/**,b}", &["src/a/b", "b"], &["src"]),
            ("a\\{b", &["a{b"], &["ab"]),
        ] {
            for path in matching {
                assert!(
                    glob(pattern).matches(path.as_bytes(), false),
                    "{pattern} {path}"
                );
            }
            for path in others {
                assert!(
                    !glob(pattern).matches(path.as_bytes(), false),
                    "{pattern} {path}"
                );
            }
        }
        assert!(glob("a/").matches(b"x/a", true));
        assert!(!glob("a/").matches(b"x/a", false));
        assert!(glob("\u{e9}*").matches("\u{e9}t\u{e9}".as_bytes(), false));
        let raw = Pattern::new(b"*\xff", Syntax::Glob).unwrap();
        assert!(raw.matches(b"a\xff", false));
    }

    #[test]
    fn what_cannot_match_is_refused_in_a_glob_and_nothing_in_a_file() {
        for text in [
            "",
            "/",
            "!",
            "[a",
            "a\\",
            "{a,b",
            "[[:nope:]]",
            "[[:alpha:]",
            "{{a}",
        ] {
            assert!(
                Pattern::new(text.as_bytes(), Syntax::Glob).is_err(),
                "{text}"
            );
            if !text.contains('{') {
                let pattern = Pattern::new(text.as_bytes(), Syntax::Gitignore).unwrap();
                for path in ["a", "[a", "a\\", ""] {
                    assert!(!pattern.matches(path.as_bytes(), true), "{text}");
                }
            }
        }
        let deep = ["{".repeat(20), "}".repeat(20)].concat();
        assert!(Pattern::new(deep.as_bytes(), Syntax::Glob).is_err());
        assert!(Pattern::new(&[b'a'; MAX_PATTERN_BYTES + 1], Syntax::Glob).is_err());
    }

    /// Naive matchers take longer than the universe for these.
    #[test]
    fn no_pattern_takes_exponential_time() {
        let path = ["a".repeat(200), "/a".repeat(900)].concat();
        for pattern in [
            "*a".repeat(1000) + "b",
            "**/a/".repeat(500) + "b",
            "{a,aa,*}".repeat(300) + "b",
            "a/**/".repeat(500) + "[!a]",
        ] {
            let started = Instant::now();
            assert!(!glob(&pattern).matches(path.as_bytes(), false));
            assert!(started.elapsed() < Duration::from_secs(5), "{pattern:.20}");
        }
    }
}
