//! What a search in files looks for: a literal or a regular expression, in linear time.
//!
//! The syntax is that of the regex crate without its Unicode tables: `\w`, `\d`, `\s`, `\b` and the case of
//! letters are those of ASCII, while `.` and classes take whole characters. Two lazy DFAs do the work: one
//! finds where a match ends, a reversed one where it began. Neither backtracks. Unless a search is
//! multiline, no match contains a line end, because they are taken out of the expression: so no match needs
//! more than its line.

use std::ops::Range;

use memchr::memmem::Finder;
use regex_automata::hybrid::dfa::{Cache as DfaCache, Config as DfaConfig, DFA};
use regex_automata::hybrid::regex::{Cache, Regex};
use regex_automata::nfa::thompson::{self, NFA, WhichCaptures};
use regex_automata::{Anchored, Input, MatchKind};
use regex_syntax::ast::{
    Ast, ClassAscii, ClassAsciiKind, ClassBracketed, ClassPerlKind, ClassSet, ClassSetItem,
    ClassSetRange, ClassSetUnion, Flag, Flags, FlagsItemKind, GroupKind, LiteralKind, Span,
};
use regex_syntax::hir::{
    Class, ClassBytes, ClassBytesRange, ClassUnicode, ClassUnicodeRange, Hir, HirKind, Look,
};

use crate::client::Stopped;
use crate::error::{Detail, Error, Result};

/// Longest pattern in bytes.
const MAX_PATTERN_BYTES: usize = 32 * 1024;

/// Memory of a compiled expression, and of each DFA that is built from it as it goes.
const MAX_NFA_BYTES: usize = 512 << 10;
const DFA_CACHE_BYTES: usize = 1 << 20;

/// What a searcher takes, at most.
pub const SEARCHER_BYTES: usize = 2 * (MAX_NFA_BYTES + DFA_CACHE_BYTES);

/// What compiling takes besides for each byte of the pattern, at most: each letter of a pattern that is insensitive to case
/// becomes a class.
const COMPILING_BYTES: usize = 1200;

/// The same of a literal that is sensitive to case.
const LITERAL_BYTES: usize = 400;

/// Bytes that an automaton searches before the client is looked at. Few: a byte that makes a new state of a large
/// expression takes a tenth of a millisecond. Fewer in unit tests, so that they see many pieces.
const PIECE_BYTES: usize = if cfg!(test) { 16 } else { 2 * 1024 };

/// The same for a literal.
const LITERAL_PIECE_BYTES: usize = 32 * PIECE_BYTES;

/// Told now and then that a search goes on; ends it if the client disconnected.
pub type Tick<'a> = &'a mut dyn FnMut() -> std::result::Result<(), Stopped>;

/// What a search comes to.
type Found = std::result::Result<Option<Range<usize>>, Stopped>;

/// Whether upper and lower case are the same.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Case {
    /// They differ.
    #[default]
    Sensitive,
    /// They are the same.
    Insensitive,
    /// They are the same unless the pattern has an upper case letter.
    Smart,
}

/// How a pattern is read.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// It is text, not an expression.
    pub is_literal: bool,
    /// Case.
    pub case: Case,
    /// No letter, digit or underscore may stand beside a match.
    pub is_word: bool,
    /// A match may go over the ends of lines.
    pub is_multiline: bool,
}

/// A compiled expression, and the memory that it needs to search.
pub struct Searcher {
    engine: Engine,
    is_multiline: bool,
    /// Bytes that were searched since the last tick.
    unlooked: usize,
}

enum Engine {
    Literal(Finder<'static>),
    Automata {
        regex: Box<Regex>,
        cache: Box<Cache>,
        /// Text that every match contains.
        required: Option<Finder<'static>>,
    },
}

impl Searcher {
    /// The memory that compiling a pattern takes, in bytes, with what the searcher takes.
    ///
    /// # Errors
    /// `Invalid` for a length that is not accepted.
    pub fn compiling_bytes(pattern: &str, options: Options) -> Result<usize> {
        let length = pattern.len();
        if !(1..=MAX_PATTERN_BYTES).contains(&length) {
            let why =
                format!("the pattern has {length} bytes; it may have 1 to {MAX_PATTERN_BYTES}");
            return Err(Error::invalid(why));
        }
        let is_plain = options.is_literal && options.case == Case::Sensitive;
        let each = if is_plain {
            LITERAL_BYTES
        } else {
            COMPILING_BYTES
        };
        Ok(SEARCHER_BYTES + length * each)
    }

    /// Compiles a pattern of an accepted length, and asks before each step whether it `goes_on`. A step of the longest pattern takes some ten
    /// milliseconds.
    ///
    /// # Errors
    /// `Invalid`, with the `offset` in the pattern where that is known; those of `goes_on`.
    pub fn new(
        pattern: &str,
        options: Options,
        goes_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let escaped = options.is_literal.then(|| regex_syntax::escape(pattern));
        let pattern = escaped.as_deref().unwrap_or(pattern);
        let (mut hir, has_upper) = parse(pattern, options.case == Case::Insensitive, goes_on)?;
        if options.case == Case::Smart && !has_upper {
            (hir, _) = parse(pattern, true, goes_on)?;
        }
        goes_on()?;
        let adapted = adapt(hir, options.is_multiline).ok_or_else(|| {
            Error::invalid("the pattern has a line end, and no line contains one; set multiline")
        })?;
        let hir = if options.is_word {
            let [start, end] = [Look::WordStartHalfAscii, Look::WordEndHalfAscii].map(Hir::look);
            Hir::concat(vec![start, adapted, end])
        } else {
            adapted
        };
        let is_multiline = options.is_multiline;
        if let HirKind::Literal(literal) = hir.kind() {
            let engine = Engine::Literal(Finder::new(&literal.0).into_owned());
            return Ok(Self {
                engine,
                is_multiline,
                unlooked: 0,
            });
        }
        let mut longest = Vec::new();
        if !is_multiline {
            find_required(&hir, &mut longest);
        }
        let regex = build(&hir, goes_on)?;
        let engine = Engine::Automata {
            cache: Box::new(regex.create_cache()),
            regex: Box::new(regex),
            required: (longest.len() > 1).then(|| Finder::new(&longest).into_owned()),
        };
        Ok(Self {
            engine,
            is_multiline,
            unlooked: 0,
        })
    }

    /// The first match in `text` that begins at `from` or after it, and ends before `end`. What is outside
    /// counts as its surroundings.
    ///
    /// # Errors
    /// The client disconnected.
    pub fn find(&mut self, text: &[u8], mut from: usize, end: usize, tick: Tick<'_>) -> Found {
        let most = match self.engine {
            Engine::Automata { required: None, .. } => PIECE_BYTES,
            _ => LITERAL_PIECE_BYTES,
        };
        while from <= end {
            // Without matches over line ends, lines can be searched bit by bit.
            let piece = match from.saturating_add(most) {
                far if far < end && !self.is_multiline => line_end(text, far).min(end),
                _ => end,
            };
            let found = self.find_in(text, from..piece, tick)?;
            // Matches may be so close that each of them is worth no look.
            self.unlooked += found.as_ref().map_or(PIECE_BYTES, |found| found.end - from);
            if self.unlooked >= PIECE_BYTES {
                self.unlooked = 0;
                tick()?;
            }
            if found.is_some() {
                return Ok(found);
            }
            from = piece + 1;
        }
        Ok(None)
    }

    fn find_in(&mut self, text: &[u8], range: Range<usize>, tick: Tick<'_>) -> Found {
        let Range {
            start: mut from,
            end,
        } = range;
        match &mut self.engine {
            Engine::Literal(finder) => Ok(finder.find(&text[from..end]).map(|start| {
                let start = from + start;
                start..start + finder.needle().len()
            })),
            Engine::Automata {
                regex,
                cache,
                required: None,
            } => search(regex, cache, text, from..end, tick),
            Engine::Automata {
                regex,
                cache,
                required: Some(required),
            } => {
                while let Some(at) = text.get(from..end).and_then(|text| required.find(text)) {
                    let at = from + at;
                    let line = line_start(text, at).max(from)..line_end(text, at).min(end);
                    from = line.end + 1;
                    let found = search(regex, cache, text, line, tick)?;
                    tick()?;
                    if found.is_some() {
                        return Ok(found);
                    }
                }
                Ok(None)
            }
        }
    }

    /// Whether a match may contain line ends.
    pub fn is_multiline(&self) -> bool {
        self.is_multiline
    }
}

/// Where the line begins that has this byte, or ends there.
pub fn line_start(text: &[u8], at: usize) -> usize {
    memchr::memrchr(b'\n', &text[..at]).map_or(0, |end| end + 1)
}

/// Where the line ends that has this byte: at its line end, or at the end of the text.
pub fn line_end(text: &[u8], at: usize) -> usize {
    memchr::memchr(b'\n', &text[at..]).map_or(text.len(), |end| at + end)
}

fn search(
    regex: &Regex,
    cache: &mut Cache,
    text: &[u8],
    range: Range<usize>,
    tick: Tick<'_>,
) -> Found {
    let (start, length) = (range.start, range.len());
    let input = Input::new(text).range(range);
    if length <= 2 * PIECE_BYTES {
        // These DFAs neither quit nor give up.
        let found = regex.try_search(cache, &input).ok().flatten();
        return Ok(found.map(|found| found.range()));
    }
    let (forward, reversed) = cache.as_parts_mut();
    let Some(end) = scan(regex.forward(), forward, &input, false, tick)? else {
        return Ok(None);
    };
    let input = input.range(start..end).anchored(Anchored::Yes);
    let start = scan(regex.reverse(), reversed, &input, true, tick)?;
    Ok(start.map(|start| start..end))
}

/// Where the first match ends, or a reversed one begins. As the engine's own search, byte by byte, so that it
/// can be ended.
fn scan(
    dfa: &DFA,
    cache: &mut DfaCache,
    input: &Input<'_>,
    is_reversed: bool,
    tick: Tick<'_>,
) -> std::result::Result<Option<usize>, Stopped> {
    let text = input.haystack();
    let begun = if is_reversed {
        dfa.start_state_reverse(cache, input)
    } else {
        dfa.start_state_forward(cache, input)
    };
    let Ok(mut state) = begun else {
        return Ok(None);
    };
    let mut last = None;
    for step in 0..=input.end() - input.start() {
        if step % PIECE_BYTES == 0 {
            tick()?;
        }
        // A match is known after the byte beyond it.
        let (at, beyond) = if is_reversed {
            let at = input.end() - step;
            (at, at.checked_sub(1))
        } else {
            (input.start() + step, Some(input.start() + step))
        };
        let next = match beyond.and_then(|beyond| text.get(beyond)) {
            Some(byte) => dfa.next_state(cache, state, *byte),
            None => dfa.next_eoi_state(cache, state),
        };
        match next {
            Ok(next) if next.is_dead() => break,
            Ok(next) => state = next,
            Err(_) => break,
        }
        if state.is_match() {
            last = Some(at);
        }
    }
    Ok(last)
}

fn build(hir: &Hir, goes_on: &mut dyn FnMut() -> Result<()>) -> Result<Regex> {
    let too_large =
        |why: &dyn std::fmt::Display| Error::invalid(format!("the pattern is too large: {why}"));
    let mut nfa = |is_reversed| {
        goes_on()?;
        let config = thompson::Config::new()
            .utf8(false)
            .reverse(is_reversed)
            .which_captures(WhichCaptures::None)
            .nfa_size_limit(Some(MAX_NFA_BYTES));
        let nfa = NFA::compiler().configure(config).build_from_hir(hir);
        nfa.map_err(|error| too_large(&error))
    };
    let dfa = |config, nfa| {
        let dfa = DFA::builder().configure(config).build_from_nfa(nfa);
        dfa.map_err(|error| too_large(&error))
    };
    let config = DfaConfig::new().cache_capacity(DFA_CACHE_BYTES);
    let forward = dfa(config.clone(), nfa(false)?)?;
    let reversed = config
        .prefilter(None)
        .specialize_start_states(false)
        .match_kind(MatchKind::All);
    let reversed = dfa(reversed, nfa(true)?)?;
    Ok(Regex::builder().build_from_dfas(forward, reversed))
}

/// Parses an expression, whose letters are insensitive to case unless its flags say otherwise. Returns also
/// whether it has an upper case letter that stands for itself.
fn parse(
    pattern: &str,
    is_insensitive: bool,
    goes_on: &mut dyn FnMut() -> Result<()>,
) -> Result<(Hir, bool)> {
    goes_on()?;
    let failed = |why: &dyn std::fmt::Display, offset: usize| {
        let before = pattern.get(..offset).unwrap_or(pattern).chars().count();
        let text = format!("the pattern cannot be read at character {before}: {why}");
        Error::invalid(text).with("offset", Detail::Number(before as u64))
    };
    let mut ast = regex_syntax::ast::parse::ParserBuilder::new()
        .nest_limit(100)
        .build()
        .parse(pattern)
        .map_err(|error| failed(error.kind(), error.span().start.offset))?;
    let mut ascii = Ascii {
        is_insensitive,
        has_upper: false,
    };
    ascii.apply(&mut ast);
    goes_on()?;
    let hir = regex_syntax::hir::translate::TranslatorBuilder::new()
        .utf8(false)
        .multi_line(true)
        .crlf(true)
        .build()
        .translate(pattern, &ast)
        .map_err(|error| failed(error.kind(), error.span().start.offset))?;
    Ok((hir, ascii.has_upper))
}

/// Replaces `\w`, `\d` and `\s` by the classes of ASCII, and the flag `i` by both cases of its letters.
struct Ascii {
    /// Whether letters stand for both cases, here.
    is_insensitive: bool,
    /// Whether there was an upper case letter that stands for itself.
    has_upper: bool,
}

impl Ascii {
    fn apply(&mut self, ast: &mut Ast) {
        match ast {
            Ast::ClassPerl(class) => {
                let kind = ClassSet::Item(ClassSetItem::Ascii(ascii_class(class)));
                *ast = class_of(class.span, kind);
            }
            Ast::ClassBracketed(class) => self.apply_to_set(&mut class.kind),
            Ast::Literal(literal) => {
                let mut item = ClassSetItem::Literal((**literal).clone());
                self.apply_to_item(&mut item);
                if let ClassSetItem::Union(_) = item {
                    *ast = class_of(literal.span, ClassSet::Item(item));
                }
            }
            Ast::Repetition(repetition) => self.apply(&mut repetition.ast),
            Ast::Group(group) => {
                // Flags hold to the end of their group.
                let outside = self.is_insensitive;
                if let GroupKind::NonCapturing(flags) = &mut group.kind {
                    self.take_flag(flags);
                }
                self.apply(&mut group.ast);
                self.is_insensitive = outside;
            }
            Ast::Flags(set) => self.take_flag(&mut set.flags),
            Ast::Alternation(list) => list.asts.iter_mut().for_each(|ast| self.apply(ast)),
            Ast::Concat(list) => list.asts.iter_mut().for_each(|ast| self.apply(ast)),
            Ast::Empty(_) | Ast::Dot(_) | Ast::Assertion(_) | Ast::ClassUnicode(_) => {}
        }
    }

    fn take_flag(&mut self, flags: &mut Flags) {
        if let Some(is_insensitive) = flags.flag_state(Flag::CaseInsensitive) {
            self.is_insensitive = is_insensitive;
            let taken = FlagsItemKind::Flag(Flag::CaseInsensitive);
            flags.items.retain(|item| item.kind != taken);
        }
    }

    fn apply_to_set(&mut self, set: &mut ClassSet) {
        match set {
            ClassSet::Item(item) => self.apply_to_item(item),
            ClassSet::BinaryOp(operation) => {
                self.apply_to_set(&mut operation.lhs);
                self.apply_to_set(&mut operation.rhs);
            }
        }
    }

    fn apply_to_item(&mut self, item: &mut ClassSetItem) {
        let range = match item {
            ClassSetItem::Perl(class) => {
                *item = ClassSetItem::Ascii(ascii_class(class));
                return;
            }
            ClassSetItem::Bracketed(class) => return self.apply_to_set(&mut class.kind),
            ClassSetItem::Union(union) => {
                let items = union.items.iter_mut();
                return items.for_each(|item| self.apply_to_item(item));
            }
            ClassSetItem::Ascii(class) => {
                let is_case = matches!(class.kind, ClassAsciiKind::Lower | ClassAsciiKind::Upper);
                if is_case && self.is_insensitive {
                    class.kind = ClassAsciiKind::Alpha;
                }
                return;
            }
            ClassSetItem::Literal(literal) => ClassSetRange {
                span: literal.span,
                start: (*literal).clone(),
                end: (*literal).clone(),
            },
            ClassSetItem::Range(range) => range.clone(),
            ClassSetItem::Empty(_) | ClassSetItem::Unicode(_) => return,
        };
        self.has_upper |= range.start.c.is_uppercase() || range.end.c.is_uppercase();
        if !self.is_insensitive {
            return;
        }
        let mut both = ClassSetUnion {
            span: range.span,
            items: Vec::new(),
        };
        for [first, last] in [['a', 'z'], ['A', 'Z']] {
            let (from, to) = (range.start.c.max(first), range.end.c.min(last));
            if from <= to {
                let mut other = range.clone();
                // The cases of a letter differ in one bit.
                other.start.c = char::from(from as u8 ^ 0x20);
                other.end.c = char::from(to as u8 ^ 0x20);
                for end in [&mut other.start, &mut other.end] {
                    end.kind = LiteralKind::Verbatim;
                }
                both.items.push(ClassSetItem::Range(other));
            }
        }
        if !both.items.is_empty() {
            both.items.push(item.clone());
            *item = ClassSetItem::Union(both);
        }
    }
}

fn class_of(span: Span, kind: ClassSet) -> Ast {
    Ast::class_bracketed(ClassBracketed {
        span,
        negated: false,
        kind,
    })
}

fn ascii_class(class: &regex_syntax::ast::ClassPerl) -> ClassAscii {
    let kind = match class.kind {
        ClassPerlKind::Digit => ClassAsciiKind::Digit,
        ClassPerlKind::Space => ClassAsciiKind::Space,
        ClassPerlKind::Word => ClassAsciiKind::Word,
    };
    ClassAscii {
        span: class.span,
        kind,
        negated: class.negated,
    }
}

/// Makes an expression that is one of lines, and of ASCII's words. `None` if it has a literal line
/// end and is not multiline.
fn adapt(hir: Hir, is_multiline: bool) -> Option<Hir> {
    let again = |hir: Hir| adapt(hir, is_multiline);
    let all = |list: Vec<Hir>| list.into_iter().map(again).collect::<Option<Vec<_>>>();
    Some(match hir.into_kind() {
        HirKind::Empty => Hir::empty(),
        HirKind::Look(look) => Hir::look(match look {
            Look::WordUnicode => Look::WordAscii,
            Look::WordUnicodeNegate => Look::WordAsciiNegate,
            Look::WordStartUnicode => Look::WordStartAscii,
            Look::WordEndUnicode => Look::WordEndAscii,
            Look::WordStartHalfUnicode => Look::WordStartHalfAscii,
            Look::WordEndHalfUnicode => Look::WordEndHalfAscii,
            look => look,
        }),
        HirKind::Literal(literal) => {
            if !is_multiline && literal.0.contains(&b'\n') {
                return None;
            }
            Hir::literal(literal.0)
        }
        HirKind::Class(Class::Bytes(mut class)) => {
            if !is_multiline {
                class.difference(&ClassBytes::new([ClassBytesRange::new(b'\n', b'\n')]));
            }
            Hir::class(Class::Bytes(class))
        }
        HirKind::Class(Class::Unicode(mut class)) => {
            if !is_multiline {
                class.difference(&ClassUnicode::new([ClassUnicodeRange::new('\n', '\n')]));
            }
            Hir::class(Class::Unicode(class))
        }
        HirKind::Repetition(mut repetition) => {
            repetition.sub = Box::new(again(*repetition.sub)?);
            Hir::repetition(repetition)
        }
        HirKind::Capture(capture) => again(*capture.sub)?,
        HirKind::Concat(list) => Hir::concat(all(list)?),
        HirKind::Alternation(list) => Hir::alternation(all(list)?),
    })
}

/// The longest literal that every match contains.
fn find_required(hir: &Hir, longest: &mut Vec<u8>) {
    match hir.kind() {
        HirKind::Literal(literal) if literal.0.len() > longest.len() => {
            *longest = literal.0.to_vec();
        }
        HirKind::Concat(list) => list.iter().for_each(|part| find_required(part, longest)),
        HirKind::Repetition(repetition) if repetition.min > 0 => {
            find_required(&repetition.sub, longest);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn found(pattern: &str, options: Options, text: &[u8]) -> Vec<Range<usize>> {
        let mut searcher = Searcher::new(pattern, options, &mut || Ok(())).unwrap();
        let (mut found, mut from) = (Vec::new(), 0);
        while let Some(range) = searcher
            .find(text, from, text.len(), &mut || Ok(()))
            .unwrap()
        {
            from = range.end.max(range.start + 1);
            found.push(range);
        }
        found
    }

    #[test]
    fn patterns_are_those_of_the_regex_crate_with_ascii_classes() {
        let text = "caf\u{e9} Fox_1\n\tfox 22\r\n\u{df}x".as_bytes();
        let plain = Options::default();
        let insensitive = Options {
            case: Case::Insensitive,
            ..plain
        };
        let smart = Options {
            case: Case::Smart,
            ..plain
        };
        let word = Options {
            is_word: true,
            ..plain
        };
        let literal = Options {
            is_literal: true,
            ..plain
        };
        let multiline = Options {
            is_multiline: true,
            ..plain
        };
        for (pattern, options, expected) in [
            ("caf.", plain, &["caf\u{e9}"][..]),
            (r"\w+", plain, &["caf", "Fox_1", "fox", "22", "x"]),
            (r"[\w\s-]+$", plain, &[" Fox_1", "\tfox 22", "x"]),
            (r"\W", plain, &["\u{e9}", " ", "\t", " ", "\r", "\u{df}"]),
            ("[\u{e0}-\u{ef}]", plain, &["\u{e9}"]),
            ("^.", plain, &["c", "\t", "\u{df}"]),
            ("22$", plain, &["22"]),
            ("fox", insensitive, &["Fox", "fox"]),
            ("[e-g]OX", insensitive, &["Fox", "fox"]),
            (
                "[^f]OX|[^\\dA-Eg-z\\s_\u{e9}\u{df}]",
                insensitive,
                &["f", "F", "f"],
            ),
            ("(?i)[[:upper:]&&[^a-e]]OX", plain, &["Fox", "fox"]),
            ("(?i)[[:^lower:]]ox", plain, &[]),
            ("(?i)FOX", plain, &["Fox", "fox"]),
            ("(?i:F)ox|(?i:f)OX", plain, &["Fox", "fox"]),
            ("(?:(?i)F)OX|(?:(?i)f)ox", plain, &["Fox", "fox"]),
            ("(?i)c(?-i)AF|(?-i:f)OX", plain, &[]),
            ("f(?i)OX|CAF", plain, &["caf", "fox"]),
            ("(?-i)f(?i)OX", insensitive, &["fox"]),
            ("(?-i:F)OX", insensitive, &["Fox"]),
            ("(?is-x)fox ", plain, &["fox "]),
            ("(?i)fox", smart, &["Fox", "fox"]),
            ("(?i)\\u{46}\\x4f[\\x58]", plain, &["Fox", "fox"]),
            (
                "FOX_",
                Options {
                    is_literal: true,
                    ..insensitive
                },
                &["Fox_"],
            ),
            ("fox", smart, &["Fox", "fox"]),
            ("Fox", smart, &["Fox"]),
            (r"\W\dox|\Sox", smart, &["Fox", "fox"]),
            ("fox", word, &["fox"]),
            ("Fox", word, &[]),
            (".", literal, &[]),
            ("x_1", literal, &["x_1"]),
            (r"1\s+f", multiline, &["1\n\tf"]),
            (r"1\s+f", plain, &[]),
            (r"[^z]+_[^z]+", plain, &["caf\u{e9} Fox_1"]),
            (r"\bfox\b", plain, &["fox"]),
            ("(a|o)x_?(?:1| )", plain, &["ox_1", "ox "]),
        ] {
            let found = found(pattern, options, text);
            let texts: Vec<_> = found
                .into_iter()
                .map(|range| std::str::from_utf8(&text[range]).unwrap())
                .collect();
            assert_eq!(texts, expected, "{pattern}");
        }
    }

    #[test]
    fn what_cannot_be_searched_for_is_refused_with_its_place() {
        for (pattern, offset) in [
            ("ab(c", 2),
            ("\u{e9}[z-a]", 2),
            ("a**b{", 3),
            (r"\p{Greek}", 0),
            ("(?<x", 0),
        ] {
            let Err(mut error) = Searcher::new(pattern, Options::default(), &mut || Ok(())) else {
                panic!("{pattern}")
            };
            let details = error.take_details();
            assert!(
                matches!(details[..], [("offset", Detail::Number(at))] if at >= offset),
                "{error}"
            );
        }
        let deep = "(".repeat(1000) + &")".repeat(1000);
        for pattern in ["", &"a".repeat(40_000)] {
            assert!(Searcher::compiling_bytes(pattern, Options::default()).is_err());
        }
        for pattern in ["a\\nb", r"(\w{1000}){1000}", &deep] {
            assert!(
                Searcher::new(pattern, Options::default(), &mut || Ok(())).is_err(),
                "{pattern:.20}"
            );
        }
    }

    #[test]
    fn a_search_is_looked_after_whatever_it_finds() {
        // No match, one in each line, and lines that have what a match needs.
        for (pattern, least) in [("[ab]c", 30), ("a[ab]", 30), ("[^b]aba[^a]", 60)] {
            let mut searcher = Searcher::new(pattern, Options::default(), &mut || Ok(())).unwrap();
            let text = b"abababababababa\n".repeat(64);
            let (mut ticks, mut from) = (0, 0);
            let mut tick = || {
                ticks += 1;
                Ok(())
            };
            while let Some(range) = searcher.find(&text, from, text.len(), &mut tick).unwrap() {
                from = range.end;
            }
            assert!(ticks >= least, "{pattern}: {ticks}");
        }
    }

    #[test]
    fn no_pattern_takes_more_than_linear_time() {
        let text = "a".repeat(1 << 20) + "\n" + &"ab ".repeat(1 << 18);
        for pattern in [
            "(a+)+b!",
            "(a|aa)+$x",
            "a.*a.*a.*a.*!",
            "(.*)*!",
            "(x+x+)+y|a[^b]*c!",
        ] {
            let started = Instant::now();
            assert!(found(pattern, Options::default(), text.as_bytes()).is_empty());
            assert!(
                started.elapsed() < Duration::from_secs(10),
                "{pattern}: {:?}",
                started.elapsed()
            );
        }
    }
}
