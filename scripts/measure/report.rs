//! Samples, and the table they end in: a figure of the server's, the floor's beside it, how far the
//! two may be apart and whether they are nearer.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::program::SERVER;

/// Durations of the same thing, done again and again.
#[derive(Default, Clone)]
pub struct Samples(Vec<Duration>);

impl Samples {
    pub fn push(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    pub fn append(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    pub fn time<T>(&mut self, action: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = action();
        self.push(start.elapsed());
        result
    }

    /// The smallest sample that so many percent do not exceed.
    pub fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * percent).div_ceil(100);
        sorted[rank.saturating_sub(1)]
    }

    /// In microseconds.
    pub fn times(&self) -> Figure {
        let [median, tail] = [50, 99].map(|percent| self.percentile(percent).as_secs_f64() * 1e6);
        Figure {
            median,
            tail: Some(tail),
        }
    }

    /// What was done in each sample, a second; the tail is the slowest.
    pub fn rates(&self, done: f64) -> Figure {
        let [median, tail] = [50, 100].map(|percent| done / self.percentile(percent).as_secs_f64());
        Figure {
            median,
            tail: Some(tail),
        }
    }

    /// In MB/s.
    pub fn speeds(&self, bytes: usize) -> Figure {
        self.rates(bytes as f64 / 1e6)
    }
}

/// Two sides of a row, one after the other in each round: the server's samples, and the floor's.
pub fn in_turns(
    rounds: usize,
    mut ours: impl FnMut(&mut Samples),
    mut floor: impl FnMut(&mut Samples),
) -> [Samples; 2] {
    let mut samples = [(); 2].map(|()| Samples::default());
    for _ in 0..rounds {
        ours(&mut samples[0]);
        floor(&mut samples[1]);
    }
    samples
}

/// What was measured: the median, and where there is one the bad end.
#[derive(Clone, Copy)]
pub struct Figure {
    pub median: f64,
    /// Of times the 99th percentile, of rates the slowest round.
    pub tail: Option<f64>,
}

impl Figure {
    pub fn one(value: f64) -> Self {
        Self {
            median: value,
            tail: None,
        }
    }

    /// The median and the highest of some times.
    pub fn highest(times: &[f64]) -> Self {
        let mut sorted = times.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        Self {
            median: sorted[sorted.len() / 2],
            tail: sorted.last().copied(),
        }
    }

    /// The median and the lowest of some rates.
    pub fn lowest(rates: &[f64]) -> Self {
        let mut sorted = rates.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        Self {
            median: sorted[sorted.len() / 2],
            tail: Some(sorted[0]),
        }
    }
}

/// How near to its floor a figure has to be.
#[derive(Clone, Copy)]
pub enum Limit {
    /// The row is there to explain others.
    None,
    /// So many times the floor, and so much of the row's unit on top of it.
    AtMost(f64, f64),
    /// So many times the floor.
    AtLeast(f64),
    /// So much of the row's unit, whatever a floor is.
    Below(f64),
}

impl Limit {
    fn text(self) -> String {
        match self {
            Self::None => String::new(),
            Self::AtMost(times, 0.0) => format!("≤ {times:.2}x"),
            Self::AtMost(1.0, more) => format!("≤ +{more:.0}"),
            Self::AtMost(times, more) => format!("≤ {times:.2}x + {more:.0}"),
            Self::AtLeast(times) => format!("≥ {times:.2}x"),
            Self::Below(limit) => format!("≤ {limit:.0}"),
        }
    }

    /// `None` where there is nothing to meet.
    fn is_met(self, ours: f64, floor: Option<f64>) -> Option<bool> {
        match self {
            Self::None => None,
            Self::AtMost(times, more) => Some(ours <= times * floor? + more),
            Self::AtLeast(times) => Some(ours >= times * floor?),
            Self::Below(limit) => Some(ours <= limit),
        }
    }
}

/// Rows as they will be printed.
pub struct Table {
    rows: Vec<String>,
    voided: bool,
}

impl Table {
    pub fn new() -> Self {
        let rows = Vec::new();
        Self {
            rows,
            voided: false,
        }
    }

    /// `what` with its unit, and what its floor is.
    pub fn row(
        &mut self,
        what: &str,
        ours: Figure,
        floor: Option<Figure>,
        limit: Limit,
        note: &str,
    ) {
        let cell = |figure: Option<f64>| figure.map_or(String::new(), rounded);
        let base = floor.map(|floor| floor.median);
        let ratio = base.map(|base| format!("{:.2}", ours.median / base));
        let met = match limit.is_met(ours.median, base) {
            None => "",
            Some(true) => "yes",
            Some(false) => "**no**",
        };
        self.add(&[
            what,
            &rounded(ours.median),
            &cell(ours.tail),
            &cell(base),
            &cell(floor.and_then(|floor| floor.tail)),
            &ratio.unwrap_or_default(),
            &limit.text(),
            met,
            note,
        ]);
    }

    /// A row of times, in microseconds.
    pub fn times(&mut self, what: &str, ours: &Samples, floor: &Samples, limit: Limit, note: &str) {
        let what = format!("{what}, µs");
        self.row(&what, ours.times(), Some(floor.times()), limit, note);
    }

    /// Says that a group of rows could not be measured, or that what it moved did not arrive whole.
    pub fn void(&mut self, group: &str) {
        self.voided = true;
        self.add(&[group, "void", "", "", "", "", "", "**no**", ""]);
    }

    fn add(&mut self, cells: &[&str; 9]) {
        let row = format!("| {} |", cells.join(" | "));
        eprintln!("{row}");
        self.rows.push(row);
    }

    /// Prints it, and where files were; whether every row is valid.
    pub fn print(&self, medium: &str) -> bool {
        println!("{}", machine());
        println!(
            "Files are {medium}. Times: median and 99th percentile. Rates: median and slowest round. Ratio: server / floor, by the medians.\n"
        );
        println!(
            "| what | sbx-server | p99 | floor | p99 | ratio | limit | met | the floor is |\n\
             |---|---:|---:|---:|---:|---:|---:|---|---|"
        );
        for row in &self.rows {
            println!("{row}");
        }
        !self.voided
    }
}

/// The program, the machine, the kernel and the day, as a paragraph.
pub fn machine() -> String {
    let line = |command: &str, words: &[&str]| {
        let output = Command::new(command).args(words).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor = processor
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown processor", |(_, name)| name);
    let words = std::env::args().skip(1).filter(|word| word != "--bench");
    let command = ["scripts/bench".to_owned()].into_iter().chain(words);
    let command = command.collect::<Vec<_>>().join(" ");
    format!(
        "{} on {processor} ({} cores, {}), Linux {}; {} by `{command}`.\n",
        line(SERVER, &["--version"]),
        thread::available_parallelism().unwrap(),
        line("uname", &["-m"]),
        line("uname", &["-r"]),
        line("date", &["-u", "+%F"]),
    )
}

/// With as many digits as mean something.
pub fn rounded(value: f64) -> String {
    let digits = usize::from(value.abs() < 20.0);
    format!("{value:.digits$}")
}
