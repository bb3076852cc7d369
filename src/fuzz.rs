//! Fuzzing: properties of what reads a client's bytes, tried on inputs nobody thought of.
//!
//! A target is a test that hands [`check`] a property: a function of bytes that panics where a
//! promise is broken. The targets stand beside what they try (`http::fuzz`, `api::fuzz`,
//! `files::fuzz`, `process::fuzz`), because most of it is private there; each compares with a model
//! that was written on its own, in another style.
//!
//! As a plain test a target runs over its corpus (`tests/corpus/<target>`) and a fixed number of
//! mutations of it, the same ones every time. `scripts/fuzz` runs it for as long as it is told to,
//! with `FUZZ_SECONDS`, `FUZZ_SEED` and `FUZZ_FINDS`; the program is then built with
//! `-C instrument-coverage` and `--cfg guided`, and an input that reaches code no other has reached,
//! or a loop's further turns, is kept in the directory of finds and mutated in its turn. An input
//! that breaks a property is made smaller and kept there too, and belongs into the corpus once the
//! defect is mended.

use std::cell::RefCell;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, Instant};

use crate::sys;

/// Mutations that a target is tried on as a plain test.
const BRIEF: u64 = 2000;

/// No mutation is longer.
const MAX_INPUT_BYTES: usize = 80 * 1024;

/// Runs a property over the corpus of `target` and mutations of it; `tokens` are the words of the
/// language it reads.
#[track_caller]
pub fn check(target: &str, tokens: &[&[u8]], property: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut inputs = read_inputs(&corpus.join(target));
    assert!(!inputs.is_empty(), "no corpus for {target}");
    let variable = |name: &str| std::env::var(name).ok();
    let time = variable("FUZZ_SECONDS").map(|text| Duration::from_secs(text.parse().unwrap()));
    let finds = variable("FUZZ_FINDS").map(|directory| PathBuf::from(directory).join(target));
    let seed = variable("FUZZ_SEED").map_or(1, |text| text.parse().unwrap());
    if let Some(finds) = &finds {
        fs::create_dir_all(finds).unwrap();
        inputs.extend(read_inputs(finds));
    }

    let mut novelty = Novelty::default();
    for input in &inputs {
        novelty.forget_before();
        run(property, input, finds.as_deref());
        novelty.is_found();
    }
    let mut random = Random::new(hash(&(target, seed)));
    let started = Instant::now();
    let mut executions = 0_u64;
    let mut kept = 0;
    while time.map_or(executions < BRIEF, |time| started.elapsed() < time) {
        let input = mutated(&inputs, tokens, &mut random);
        novelty.forget_before();
        run(property, &input, finds.as_deref());
        executions += 1;
        if novelty.is_found() {
            if let Some(finds) = &finds {
                fs::write(finds.join(format!("{:016x}", hash(&input))), &input).unwrap();
            }
            inputs.push(input);
            kept += 1;
        }
    }
    if time.is_some() {
        let guided = if cfg!(guided) { "guided" } else { "blind" };
        println!(
            "{target}: {executions} executions in {:?}, {guided}, seed {seed}, {kept} kept, {} inputs",
            started.elapsed(),
            inputs.len()
        );
    }
}

/// Panics with the smallest input found that breaks the property, if `input` does.
#[track_caller]
fn run(property: fn(&[u8]), input: &[u8], finds: Option<&Path>) {
    let Err(mut why) = quietly(property, input) else {
        return;
    };
    let mut smallest = input.to_vec();
    let mut size = smallest.len();
    let mut attempts = 1000;
    while size > 0 && attempts > 0 {
        let mut at = 0;
        while at < smallest.len() && attempts > 0 {
            attempts -= 1;
            let mut smaller = smallest.clone();
            smaller.drain(at..smallest.len().min(at + size));
            match quietly(property, &smaller) {
                Ok(()) => at += size,
                Err(its_own) => (smallest, why) = (smaller, its_own),
            }
        }
        size /= 2;
    }
    if let Some(finds) = finds {
        let name = format!("broken-{:016x}", hash(&smallest));
        fs::write(finds.join(name), &smallest).unwrap();
    }
    panic!("{why}\nfor b\"{}\"", smallest.escape_ascii());
}

/// What the property says, without a word on standard error.
fn quietly(property: fn(&[u8]), input: &[u8]) -> Result<(), String> {
    thread_local! {
        static WORDS: RefCell<Option<String>> = const { RefCell::new(None) };
    }
    static LISTEN: Once = Once::new();
    LISTEN.call_once(|| {
        let aloud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            WORDS.with_borrow_mut(|words| match words {
                Some(words) => *words = panic.to_string(),
                None => aloud(panic),
            });
        }));
    });
    WORDS.set(Some(String::new()));
    let result = catch_unwind(AssertUnwindSafe(|| property(input)));
    let words = WORDS.take();
    result.map_err(|_| words.unwrap_or_default())
}

fn read_inputs(directory: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    // The order decides which mutations there are.
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Numbers that look random and are the same for the same seed (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    /// Less than `limit`; 0 if that is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next()).unwrap() % limit.max(1)
    }

    fn byte(&mut self) -> u8 {
        (self.next() & 0xff) as u8
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// A part of something that is so long; short ones and the beginning are likely.
    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.below(length + 1) * usize::from(self.below(8) > 0);
        let longest = if self.below(2) == 0 { 8 } else { length };
        start..(start + self.below(longest + 1)).min(length)
    }
}

/// Numbers at which something may change.
const NUMBERS: [&str; 16] = [
    "",
    "0",
    "1",
    "-1",
    "00",
    "7",
    "8",
    "9",
    "16",
    "255",
    "4096",
    "65536",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
];

fn mutated(inputs: &[Vec<u8>], tokens: &[&[u8]], random: &mut Random) -> Vec<u8> {
    let mut input = random.of(inputs).clone();
    for _ in 0..=random.below(4) {
        let part = random.range(input.len());
        match random.below(13) {
            0 => flip(&mut input, random),
            1 => drop(input.splice(part, [random.byte()])),
            2 => input.insert(part.start, random.byte()),
            3 => drop(input.drain(part)),
            4 => {
                let copy = input[part].to_vec();
                let at = random.below(input.len() + 1);
                input.splice(at..at, copy);
            }
            5 => {
                let other = random.of(inputs);
                let copy = other[random.range(other.len())].to_vec();
                input.splice(part, copy);
            }
            6 => {
                let other = random.of(inputs);
                input.truncate(part.start);
                input.extend_from_slice(&other[random.below(other.len() + 1)..]);
            }
            7 => input.truncate(part.end),
            8 => replace_number(&mut input, part.start, random),
            // Limits are far away.
            9 if random.below(16) == 0 => {
                let copy = input[part.clone()].to_vec();
                let count = random.below(MAX_INPUT_BYTES) / copy.len().max(1);
                input.splice(part, copy.repeat(count));
            }
            10 if !tokens.is_empty() => {
                let token = random.of(tokens).to_vec();
                input.splice(part, token);
            }
            _ if !tokens.is_empty() => {
                let token = random.of(tokens).to_vec();
                input.splice(part.start..part.start, token);
            }
            _ => flip(&mut input, random),
        }
    }
    input.truncate(MAX_INPUT_BYTES);
    input
}

fn flip(input: &mut [u8], random: &mut Random) {
    if !input.is_empty() {
        let at = random.below(input.len());
        input[at] ^= 1 << random.below(8);
    }
}

/// Puts another number in the place of the first at or behind `from`.
fn replace_number(input: &mut Vec<u8>, from: usize, random: &mut Random) {
    if let Some(start) = input[from..].iter().position(u8::is_ascii_digit) {
        let start = from + start;
        let digits = input[start..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit());
        let end = start + digits.count();
        input.splice(start..end, random.of(&NUMBERS).bytes());
    }
}

/// Whether an input did what none before it did, by how often each place in the program was passed.
#[derive(Default)]
struct Novelty {
    /// Per place, a bit for each order of magnitude.
    #[cfg(guided)]
    seen: Vec<u8>,
}

impl Novelty {
    #[cfg_attr(not(guided), expect(clippy::unused_self, reason = "as when it counts"))]
    fn forget_before(&self) {
        #[cfg(guided)]
        for counter in sys::execution_counters() {
            counter.store(0, std::sync::atomic::Ordering::Relaxed);
        }
    }

    /// Never, where the program does not count.
    #[cfg_attr(not(guided), expect(clippy::unused_self, reason = "as when it counts"))]
    fn is_found(&mut self) -> bool {
        #[cfg(not(guided))]
        let found = false;
        #[cfg(guided)]
        let found = {
            let counters = sys::execution_counters();
            self.seen.resize(counters.len(), 0);
            let mut found = false;
            for (seen, counter) in self.seen.iter_mut().zip(counters) {
                let count = counter.load(std::sync::atomic::Ordering::Relaxed);
                if count > 0 {
                    let magnitude = 1 << count.ilog2().min(7);
                    found |= *seen & magnitude == 0;
                    *seen |= magnitude;
                }
            }
            found
        };
        found
    }
}

/// Bytes that are taken as instructions, for properties of what has a history.
pub struct Script<'a>(pub &'a [u8]);

impl<'a> Script<'a> {
    /// The next byte; 0 at the end.
    pub fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    /// The next `count` bytes, as far as there are so many.
    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub fn is_at_end(&self) -> bool {
        self.0.is_empty()
    }
}

/// What `action` comes to; it must not ask for more memory, all in all, than `factor` times the size
/// of its input and a little.
#[track_caller]
pub fn bounded<T>(input: &[u8], factor: usize, action: impl FnOnce() -> T) -> T {
    let before = sys::allocated_bytes();
    let result = action();
    let asked = sys::allocated_bytes() - before;
    assert!(
        asked <= factor * input.len() + 4096,
        "{asked} bytes of memory for {} of input",
        input.len()
    );
    result
}
