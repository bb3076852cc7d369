//! Fuzzing: tests properties of the code that reads a client's bytes, on mutated inputs.
//!
//! A target is a test that hands [`check`] a property: a function of bytes that panics when a promise
//! is broken. The targets stand beside the code that they test (`http::fuzz`, `api::rest::fuzz`,
//! `files::fuzz`, `interpreter::fuzz`, `process::fuzz`, `codec::plain`), because most of that code is private.
//! Each compares it with an independent model in another style.
//!
//! As a plain test, a target runs over its corpus (`tests/corpus/<target>`) and a fixed number of
//! mutations, which are the same every time. `scripts/fuzz` runs it for a given time, with
//! `FUZZ_SECONDS`, `FUZZ_SEED` and `FUZZ_FINDS`, and builds the program with `-C instrument-coverage`
//! and `--cfg guided`. An input that reaches new code, or runs a loop more often, is then stored in the
//! directory of finds and mutated in turn. An input that breaks a property is minimized and stored
//! there too; add it to the corpus when the defect is fixed.

use std::cell::RefCell;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, Instant};

use crate::sys;

/// Mutations per target when it runs as a plain test.
const BRIEF: u64 = 2000;

/// Longest mutation.
const MAX_INPUT_BYTES: usize = 80 * 1024;

/// Runs a property over the corpus of `target` and over mutations of it. `tokens` are words of the
/// language that the target reads.
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

/// If `input` breaks the property, minimizes it and panics with the result.
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

/// Runs the property and returns its panic message, which is not printed.
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
    // The mutations depend on the order.
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Pseudorandom numbers, the same for the same seed (xorshift64*).
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

    /// A number below `limit`, or 0 if `limit` is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next()).unwrap() % limit.max(1)
    }

    fn byte(&mut self) -> u8 {
        (self.next() & 0xff) as u8
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// A range within `length`. Short ranges, and those at the beginning, are likely.
    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.below(length + 1) * usize::from(self.below(8) > 0);
        let longest = if self.below(2) == 0 { 8 } else { length };
        start..(start + self.below(longest + 1)).min(length)
    }
}

/// Numbers around common limits.
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
            // Long inputs reach limits of size.
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

/// Replaces the first number at or after `from`.
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

/// Recognizes inputs that do something new, by how often they execute each region of the program.
#[derive(Default)]
struct Novelty {
    /// Per region, a bit for each order of magnitude of the count.
    #[cfg(guided)]
    seen: Vec<u8>,
}

impl Novelty {
    #[cfg_attr(
        not(guided),
        expect(clippy::unused_self, reason = "used with --cfg guided")
    )]
    fn forget_before(&self) {
        #[cfg(guided)]
        for counter in sys::execution_counters() {
            counter.store(0, std::sync::atomic::Ordering::Relaxed);
        }
    }

    /// Always false without coverage counters.
    #[cfg_attr(
        not(guided),
        expect(clippy::unused_self, reason = "used with --cfg guided")
    )]
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

/// Bytes read as instructions, for properties of code with state.
pub struct Script<'a>(pub &'a [u8]);

impl<'a> Script<'a> {
    /// The next byte, or 0 at the end.
    pub fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    /// The next `count` bytes, or fewer at the end.
    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub fn is_at_end(&self) -> bool {
        self.0.is_empty()
    }
}

/// Runs `action` and returns its result. Panics if it allocates, in total, more than `factor` times
/// the size of its input plus 4 KiB.
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
