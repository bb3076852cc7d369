//! Searching in the content of files.

use std::fs::File;
use std::io::Read;
use std::ops::Range;

use nix::errno::Errno;
use nix::fcntl::OFlag;

use crate::client::{Disconnected, Interrupt, Stopped};
use crate::error::{Error, Kind, Result};
use crate::files::name::{FilePath, show};
use crate::files::search::{
    Filter, Matcher, Options, SEARCHER_BYTES, Searcher, Verdict, Visit, line_end, line_start,
};
use crate::files::text::is_binary;
use crate::files::{FileKind, FileVersion, SkipReason};
use crate::limits::ledger::{Charge, Item};
use crate::logging;
use crate::threads::places::Places;
use crate::threads::priority::{BackgroundThread, BackgroundTurn, run_with_turn};
use crate::workspace::lease::{Lease, Workspace};

/// Most matches of a search, and of one file, unless the client says otherwise.
const MATCHES: u64 = 1000;
const MATCHES_PER_FILE: u64 = 100;
const MAX_MATCHES: u64 = 100_000;

/// The largest file that is searched, unless the client says otherwise.
const FILE_BYTES: u64 = 64 << 20;
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Most lines of context on each side.
const MAX_CONTEXT: u64 = 100;

/// Most spans of one match.
const MAX_SPANS: usize = 100;

/// Most bytes of lines that are one match because matches within them meet. Less than what is cut.
const MAX_MERGED_BYTES: usize = 2000;

/// Begins a text in UTF-8 where a program has marked it as such.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The buffer for files. One of ordinary size is read by one call.
const BUFFER_BYTES: usize = 256 * 1024;

/// Whoever compiles an expression: it takes much memory for a moment, and nothing ends it in between.
static COMPILING: Places = Places::new(MOST_COMPILING);

/// How many expressions are compiled at a time, each for another tenant.
const MOST_COMPILING: usize = 4;

/// What to search for, and where.
pub struct Grep {
    /// A directory, or one file.
    pub path: FilePath,
    /// What to search for.
    pub pattern: String,
    /// How the pattern is read.
    pub options: Options,
    /// Which files: as in [`Glob`](super::Glob), and a directory stands for all that is in it.
    pub globs: Matcher,
    /// Whether to search also in hidden files and in those that ignore files exclude.
    pub all: bool,
    /// Lines before and after a match.
    pub context: [Option<u64>; 2],
    /// Most matches.
    pub limit: Option<u64>,
    /// Most matches of one file.
    pub per_file: Option<u64>,
    /// The largest file that is searched, in bytes.
    pub max_file_bytes: Option<u64>,
}

/// A search that can begin: all of the request was checked, and its thread is there.
pub struct PreparedGrep {
    lease: Lease,
    thread: BackgroundThread,
    plan: Plan,
}

/// What is to be done.
struct Plan {
    path: FilePath,
    searcher: Searcher,
    filter: Filter,
    globs: Matcher,
    context: [usize; 2],
    limit: u64,
    per_file: u64,
    max_file_bytes: u64,
    charge: Charge,
}

/// A match, or several in one line.
pub struct Match<'a> {
    /// The file, as a request names it.
    pub path: &'a str,
    /// The number of its first line, from 1.
    pub line: u64,
    /// Where its first line begins, in bytes.
    pub offset: u64,
    /// Its lines, without the last line end.
    pub text: &'a [u8],
    /// What matches, in bytes of the text.
    pub spans: &'a [Range<usize>],
    /// The lines before and after it.
    pub context: [Vec<&'a [u8]>; 2],
}

/// What a search did.
#[derive(Debug, Clone, Copy, Default)]
pub struct Summary {
    /// How many matches were told.
    pub matches: u64,
    /// How many files have one.
    pub files: u64,
    /// How many files were searched.
    pub searched: u64,
    /// How many were not.
    pub skipped: u64,
    /// Whether a limit kept matches from being told.
    pub truncated: bool,
}

/// Who receives what a search finds.
pub trait GrepSink: Send {
    /// A match.
    ///
    /// # Errors
    /// The client disconnected.
    fn matched(&mut self, found: &Match<'_>) -> std::result::Result<(), Disconnected>;
    /// A file that was not searched.
    ///
    /// # Errors
    /// The client disconnected.
    fn skipped(&mut self, path: &str, why: SkipReason) -> std::result::Result<(), Disconnected>;
    /// Nothing for some moments.
    ///
    /// # Errors
    /// The client disconnected.
    fn tick(&mut self) -> std::result::Result<(), Disconnected>;
    /// The end: what was done, or why not all was.
    ///
    /// # Errors
    /// The client disconnected.
    fn ended(&mut self, outcome: Result<Summary>) -> std::result::Result<(), Disconnected>;
}

impl Workspace {
    /// Checks a search, and prepares it.
    ///
    /// # Errors
    /// `Invalid`, with the `offset` in a pattern that cannot be read; `NotFound`; `Forbidden`;
    /// `NotRegular`; `OverLimit`; `NoThreads`; or it was interrupted.
    pub fn prepare_grep(
        &self,
        grep: Grep,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<PreparedGrep, Stopped> {
        let (mut grep, mut plan) = (Some(grep), Err(Stopped::Due));
        self.work(interrupt, &mut |interrupt| {
            if let Some(grep) = grep.take() {
                plan = self.plan_grep(grep, interrupt);
            }
            Ok(())
        })?;
        Ok(PreparedGrep {
            plan: plan?,
            lease: self.share()?,
            thread: BackgroundThread::start(&self.background)?,
        })
    }

    /// Searches at once, and tells what it finds as it finds it, but not that it has ended.
    ///
    /// # Errors
    /// As [`Workspace::prepare_grep`]; the client disconnected.
    pub fn search_text(
        &self,
        grep: Grep,
        sink: &mut dyn GrepSink,
    ) -> std::result::Result<Summary, Stopped> {
        let mut grep = Some(grep);
        // Stays so only if there is no thread.
        let mut summary = Err(Stopped::Due);
        run_with_turn(&self.background, &mut |mut turn| {
            if let Some(grep) = grep.take() {
                let looks = &mut Looks(&mut turn, sink);
                let plan = self.plan_grep(grep, looks);
                summary = plan.and_then(|plan| self.grep(plan, turn, sink));
            }
        })?;
        summary
    }

    fn plan_grep(
        &self,
        grep: Grep,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Plan, Stopped> {
        let within = |name: &str, value: Option<u64>, range: Range<u64>, default: u64| match value {
            Some(value) if !range.contains(&value) => Err(Error::invalid(format!(
                "{name} is {value}; it takes a whole number from {} to {}",
                range.start,
                range.end - 1
            ))),
            value => Ok(value.unwrap_or(default)),
        };
        let lines = |name, value| {
            let lines = within(name, value, 0..MAX_CONTEXT + 1, 0)?;
            Ok::<_, Error>(usize::try_from(lines).unwrap_or(0))
        };
        let [before, after] = grep.context;
        let context = [lines("before", before)?, lines("after", after)?];
        let limit = within("limit", grep.limit, 1..MAX_MATCHES + 1, MATCHES)?;
        let per_file = within(
            "per_file",
            grep.per_file,
            1..MAX_MATCHES + 1,
            MATCHES_PER_FILE,
        )?;
        let max = 1..MAX_FILE_BYTES + 1;
        let max_file_bytes = within("max_file_bytes", grep.max_file_bytes, max, FILE_BYTES)?;
        let compiling = Searcher::compiling_bytes(&grep.pattern, grep.options)?;
        let globs = grep.globs.size();
        // While it waits.
        let bytes = globs + grep.pattern.len();
        let charge = self.ledger.charge(Item::Responses, bytes);
        let mut charge = charge.map_err(Error::from)?;
        let searcher = {
            let _own = self.background.alone.take(interrupt)?;
            charge.set(bytes + compiling).map_err(Error::from)?;
            let _place = COMPILING.take(interrupt)?;
            let mut goes_on = || self.check_open();
            Searcher::new(&grep.pattern, grep.options, &mut goes_on)?
        };
        charge.set(globs + SEARCHER_BYTES).map_err(Error::from)?;
        interrupt.check()?;
        let files = self.files()?;
        // A file is no directory, and is opened; the others tell why they cannot be walked through.
        match files.walk(&grep.path, Filter::default(), None, &self.ledger) {
            Err(error) if error.kind() == Kind::NotDirectory => {
                drop(files.open(&grep.path, false)?);
            }
            other => drop(other?),
        }
        let filter = if grep.all {
            Filter::default()
        } else {
            Filter::of_search()
        };
        Ok(Plan {
            path: grep.path,
            searcher,
            filter,
            globs: grep.globs,
            context,
            limit,
            per_file,
            max_file_bytes,
            charge,
        })
    }

    /// Searches.
    ///
    /// # Errors
    /// `OverLimit`; the client disconnected. What was told before is then not all.
    fn grep(
        &self,
        grep: Plan,
        turn: BackgroundTurn,
        sink: &mut dyn GrepSink,
    ) -> std::result::Result<Summary, Stopped> {
        let Plan {
            path,
            searcher,
            filter,
            globs,
            charge,
            ..
        } = grep;
        let mut search = Search {
            searcher,
            context: grep.context,
            limit: grep.limit,
            per_file: grep.per_file,
            max_file_bytes: grep.max_file_bytes,
            buffer: Vec::new(),
            base_charge: charge.bytes(),
            charge,
            summary: Summary::default(),
            turn,
        };
        let files = self.files()?;
        let mut walk = match files.walk(&path, filter, None, &self.ledger) {
            Err(error) if error.kind() == Kind::NotDirectory => {
                let opened = files.open(&path, false)?;
                search.file(opened.file, &path.to_string(), sink)?;
                return Ok(search.summary);
            }
            walk => walk?,
        };
        walk.also_compares(&globs);
        // Only one more match tells that the limit leaves some out.
        while !(search.is_full() && search.summary.truncated) {
            give_way(&mut search.turn, sink)?;
            let Some(visit) = walk.next()? else { break };
            let found = match visit {
                Visit::Entry(found) => found,
                Visit::Passed | Visit::Unreadable(_, Errno::EXDEV) => continue,
                Visit::Unreadable(directory, errno) => {
                    let shown = path.below(&show(directory));
                    search.skip(&shown, SkipReason::of(errno), sink)?;
                    continue;
                }
            };
            if found.kind == FileKind::Directory {
                if globs.decide(found.path, true) == Some(Verdict::Excepted) {
                    walk.skip_contents();
                }
                continue;
            }
            if found.kind != FileKind::Regular || !is_picked(&globs, found.path) {
                continue;
            }
            let shown = path.below(&show(found.path));
            match found.open(OFlag::O_RDONLY) {
                Ok(file) => search.file(file, &shown, sink)?,
                // It is gone, or something else now.
                Err(Errno::ENOENT | Errno::ELOOP | Errno::ENOTDIR) => {}
                Err(errno) => search.skip(&shown, SkipReason::of(errno), sink)?,
            }
        }
        Ok(search.summary)
    }
}

impl PreparedGrep {
    /// Searches, and tells what it finds as it finds it, in the order of the paths. It is over when this
    /// returns.
    pub fn run(self, mut sink: Box<dyn GrepSink>) {
        let Self {
            lease,
            thread,
            plan,
        } = self;
        thread.run(move |turn| {
            let outcome = match lease.grep(plan, turn, &mut *sink) {
                Ok(summary) => Ok(summary),
                Err(Stopped::Failed(error)) => {
                    logging::about("files", format_args!("a search broke off: {error}"));
                    Err(error)
                }
                Err(Stopped::Disconnected | Stopped::Due) => return,
            };
            // A client that has disconnected receives nothing.
            let _ = sink.ended(outcome);
        });
    }
}

/// Whether the globs pick a file, by its path or by that of a directory above it.
fn is_picked(globs: &Matcher, path: &[u8]) -> bool {
    match globs.decide(path, false) {
        Some(verdict) => verdict == Verdict::Matched,
        None => globs.only_excepts() || globs.covers(path, false),
    }
}

/// A search in progress.
struct Search {
    searcher: Searcher,
    context: [usize; 2],
    limit: u64,
    per_file: u64,
    max_file_bytes: u64,
    buffer: Vec<u8>,
    /// For the searcher, the globs and the buffer.
    charge: Charge,
    /// What is charged in any case.
    base_charge: usize,
    summary: Summary,
    turn: BackgroundTurn,
}

impl Search {
    /// Whether all matches were told that may be.
    fn is_full(&self) -> bool {
        self.summary.matches >= self.limit
    }

    fn skip(
        &mut self,
        path: &str,
        why: SkipReason,
        sink: &mut dyn GrepSink,
    ) -> std::result::Result<(), Stopped> {
        self.summary.skipped += 1;
        Ok(sink.skipped(path, why)?)
    }

    /// Searches one file.
    fn file(
        &mut self,
        file: File,
        path: &str,
        sink: &mut dyn GrepSink,
    ) -> std::result::Result<(), Stopped> {
        let length = match self.read(file)? {
            Ok(length) => length,
            Err(why) => return self.skip(path, why, sink),
        };
        let buffer = std::mem::take(&mut self.buffer);
        let searched = if is_binary(&buffer[..length]) {
            self.skip(path, SkipReason::Binary, sink)
        } else {
            self.summary.searched += 1;
            // A byte order mark is no part of the first line.
            let begin =
                usize::from(buffer[..length].starts_with(BYTE_ORDER_MARK)) * BYTE_ORDER_MARK.len();
            self.text(&buffer[begin..length], begin, path, sink)
        };
        self.buffer = buffer;
        searched
    }

    /// Reads a file into the buffer, and returns how many bytes it has. One that is not regular is empty.
    fn read(&mut self, mut file: File) -> Result<std::result::Result<usize, SkipReason>> {
        let version = match FileVersion::of(&file) {
            Ok(version) if version.kind == FileKind::Regular => version,
            _ => return Ok(Ok(0)),
        };
        if version.size > self.max_file_bytes {
            return Ok(Err(SkipReason::TooLarge));
        }
        // One byte more than the file has tells in the same call that it ends.
        let size = usize::try_from(version.size).unwrap_or(usize::MAX);
        self.grow((size + 1).max(BUFFER_BYTES))?;
        let mut length = 0;
        loop {
            if length == self.buffer.len() {
                if length as u64 > self.max_file_bytes {
                    return Ok(Err(SkipReason::TooLarge));
                }
                self.grow(2 * length)?;
            }
            let asked = self.buffer.len() - length;
            match file.read(&mut self.buffer[length..]) {
                Ok(0) => break,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let errno = error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
                    return Ok(Err(SkipReason::of(errno)));
                }
                // Only the end of a file makes a read short; files in /proc do it at any time.
                Ok(count) if count < asked && version.size > 0 => {
                    length += count;
                    break;
                }
                Ok(count) => length += count,
            }
        }
        let is_small = length as u64 <= self.max_file_bytes;
        Ok(is_small.then_some(length).ok_or(SkipReason::TooLarge))
    }

    fn grow(&mut self, size: usize) -> Result<()> {
        if self.buffer.len() < size {
            self.charge.set(self.base_charge + size)?;
            self.buffer = {
                let mut grown = std::mem::take(&mut self.buffer);
                grown.resize(size, 0);
                grown
            };
        }
        Ok(())
    }

    /// Searches a text that begins at this offset of its file.
    fn text(
        &mut self,
        text: &[u8],
        begin: usize,
        path: &str,
        sink: &mut dyn GrepSink,
    ) -> std::result::Result<(), Stopped> {
        let (mut at, mut found) = (0, 0);
        let (mut line, mut counted) = (1, 0);
        while at <= text.len() {
            let turn = &mut self.turn;
            let mut tick = || give_way(turn, sink);
            let Some(first) = self.searcher.find(text, at, text.len(), &mut tick)? else {
                break;
            };
            // What is after the last line end is no line.
            if first.start == text.len() && (text.is_empty() || text.ends_with(b"\n")) {
                break;
            }
            if found == self.per_file || self.is_full() {
                self.summary.truncated = true;
                break;
            }
            if found == 0 {
                self.summary.files += 1;
            }
            found += 1;
            self.summary.matches += 1;
            let start = line_start(text, first.start);
            let mut end = last_line_end(text, &first);
            let mut spans = Vec::new();
            let mut next = Some(first);
            let mut beyond = None;
            while let Some(span) = next.take() {
                at = span.end.max(span.start + 1);
                end = end.max(last_line_end(text, &span));
                if span.start < span.end {
                    spans.push(span.start - start..span.end - start);
                }
                if at > end {
                    break;
                }
                if spans.len() == MAX_SPANS {
                    // A line is reported once, but a match may go on to lines that are not reported.
                    beyond = self.searcher.is_multiline().then_some(at);
                    break;
                }
                let limit = if self.searcher.is_multiline() {
                    text.len()
                } else {
                    end
                };
                let turn = &mut self.turn;
                let mut tick = || give_way(turn, sink);
                let found = self.searcher.find(text, at, limit, &mut tick)?;
                beyond = found.as_ref().map(|found| found.start);
                next = found.filter(|next| {
                    let far = last_line_end(text, next);
                    next.start <= end && (far <= end || far - start <= MAX_MERGED_BYTES)
                });
                if next.is_some() {
                    beyond = None;
                }
            }
            line += memchr::memchr_iter(b'\n', &text[counted..start]).count() as u64;
            counted = start;
            let own = &text[start..end];
            sink.matched(&Match {
                path,
                line,
                offset: (begin + start) as u64,
                text: own.strip_suffix(b"\r").unwrap_or(own),
                spans: &spans,
                context: [
                    lines_before(text, start, self.context[0]),
                    lines_after(text, end, self.context[1]),
                ],
            })?;
            at = beyond.unwrap_or(end + 1);
        }
        Ok(())
    }
}

/// Gives way as [`give_way`] does, whenever it is asked.
struct Looks<'a>(&'a mut BackgroundTurn, &'a mut dyn GrepSink);

impl Interrupt for Looks<'_> {
    fn check(&mut self) -> std::result::Result<(), Stopped> {
        give_way(self.0, self.1)
    }
}

/// Gives way to others between two pieces of work, and looks after the client.
fn give_way(
    turn: &mut BackgroundTurn,
    sink: &mut dyn GrepSink,
) -> std::result::Result<(), Stopped> {
    turn.pass(&mut || Ok(sink.tick()?))
}

/// Where the last line of a match ends. A line end that is last in a match belongs to its line.
fn last_line_end(text: &[u8], span: &Range<usize>) -> usize {
    let ends_line = text[span.clone()].ends_with(b"\n");
    line_end(text, span.end - usize::from(ends_line))
}

/// Up to `count` lines that end before `start`, which begins a line.
fn lines_before(text: &[u8], mut start: usize, count: usize) -> Vec<&[u8]> {
    let mut lines = Vec::new();
    while lines.len() < count && start > 0 {
        let from = line_start(text, start - 1);
        lines.push(line_of(&text[from..start - 1]));
        start = from;
    }
    lines.reverse();
    lines
}

/// Up to `count` lines after the line that ends at `end`.
fn lines_after(text: &[u8], mut end: usize, count: usize) -> Vec<&[u8]> {
    let mut lines = Vec::new();
    while lines.len() < count && end + 1 < text.len() {
        let to = line_end(text, end + 1);
        lines.push(line_of(&text[end + 1..to]));
        end = to;
    }
    lines
}

fn line_of(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\r").unwrap_or(line)
}
