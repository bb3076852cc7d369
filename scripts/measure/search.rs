//! Search in a tree of source text, in its content and in its names. The floors are the programs that
//! people use for it; ripgrep has one thread, as the server.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::Plan;
use super::client::Client;
use super::program::{Program, Scratch, free_port};
use super::report::{Limit, Samples, Table, in_turns};

const FILES_PER_DIRECTORY: usize = 100;
const DIRECTORIES_PER_DIRECTORY: usize = 20;

/// A file in so many has a line that is searched for.
const FILES_PER_HIT: usize = 100;
const HIT: &str = "    let found = lookup_417(key)?; // an unusual_word\n";
const LITERAL: &str = "unusual_word";
const PATTERN: &str = "[a-z]+_[0-9]{3}\\(";

/// The types of files, some more often than others.
const EXTENSIONS: [&str; 6] = ["rs", "c", "h", "py", "rs", "md"];

/// What files are made of.
const LINES: [&str; 12] = [
    "use std::collections::HashMap;\n",
    "\n",
    "/// The number of bytes that a piece has, or zero where there is none.\n",
    "pub fn next_piece(&mut self, limit: usize) -> Result<Option<&[u8]>, Error> {\n",
    "    let end = self.buffer.iter().position(|byte| *byte == b'\\n');\n",
    "    if self.count > 1024 && !self.is_closed {\n",
    "        return Err(Error::new(Kind::TooLarge, format!(\"{count} of 4096\")));\n",
    "    }\n",
    "    for (index, entry) in table.entries_mut().enumerate().skip(3) {\n",
    "        entry.offset = index * ENTRY_BYTES + HEADER_BYTES_V2;\n",
    "    static const struct option long_options[] = { { \"verbose\", 0, 0, 'v' } };\n",
    "}\n",
];

struct Tree {
    directory: PathBuf,
    files: usize,
    bytes: usize,
    hits: usize,
    /// Files with the first extension.
    sources: usize,
}

impl Tree {
    fn make(scratch: &Scratch, files: usize) -> Self {
        let directory = scratch.path("tree");
        let (mut bytes, mut hits, mut sources) = (0, 0, 0);
        let mut state = 1_u32;
        let mut next = |most: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % most
        };
        for number in 0..files {
            let lower = number / FILES_PER_DIRECTORY;
            let upper = lower / DIRECTORIES_PER_DIRECTORY;
            let own = directory.join(format!("package-{upper}/module-{lower}"));
            if number % FILES_PER_DIRECTORY == 0 {
                fs::create_dir_all(&own).unwrap();
            }
            let mut text = String::new();
            let hit_at = number.is_multiple_of(FILES_PER_HIT).then(|| next(40));
            for line in 0..40 + next(80) {
                if Some(line) == hit_at {
                    text.push_str(HIT);
                    hits += 1;
                }
                text.push_str(LINES[next(12) as usize]);
            }
            let extension = EXTENSIONS[next(6) as usize];
            sources += usize::from(extension == EXTENSIONS[0]);
            bytes += text.len();
            fs::write(own.join(format!("file_{number}.{extension}")), text).unwrap();
        }
        Self {
            directory,
            files,
            bytes,
            hits,
            sources,
        }
    }

    /// Runs a program in the tree, which must print so many lines.
    fn run(&self, words: &[&str], lines: usize) {
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .current_dir(&self.directory)
            // Where all characters are bytes programs are fastest, and the server does the same.
            .env("LC_ALL", "C")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        assert_eq!(output.split(b'\n').count(), lines);
        assert!(child.wait().unwrap().success());
    }

    fn grep(&self, client: &mut Client, pattern: &str, is_literal: bool) {
        let escaped = pattern.replace('\\', "\\\\");
        let path = self.directory.display();
        let body = format!(
            r#"{{"path":"{path}","pattern":"{escaped}","literal":{is_literal},"limit":100000}}"#
        );
        let events = client.post("/v1/files/grep", &body);
        let mut matches = 0;
        let mut end = "";
        for event in events.lines() {
            matches += usize::from(event.starts_with(r#"{"event":"match""#));
            end = event;
        }
        assert_eq!(matches, self.hits, "{end}");
        assert!(end.contains(r#""event":"end""#), "{end}");
        assert!(end.contains(r#""truncated":false"#), "{end}");
    }

    fn glob(&self, client: &mut Client) {
        let path = self.directory.display();
        let target = format!("/v1/files/glob?path={path}&pattern=**/*.rs&limit=100000");
        client.send("GET", &target, 0, b"");
        let found = client.reply();
        assert_eq!(found.matches(r#""path":"#).count(), self.sources);
    }
}

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let tree = Tree::make(scratch, plan.tree_files);
    let server = Program::server(free_port());
    let mut client = server.connect();
    let has_ripgrep = Command::new("rg").arg("--version").output().is_ok();
    let floors = [
        ("", "GNU grep -rnE", &["grep", "-rnE"][..], 1.0),
        (
            ", beside ripgrep",
            "ripgrep with one thread",
            &["rg", "-j1", "-n"],
            0.5,
        ),
    ];
    for (pattern, what, is_literal) in [
        (LITERAL, "a literal", true),
        (PATTERN, "a pattern with classes", false),
    ] {
        for (beside, note, program, least) in &floors[..=usize::from(has_ripgrep)] {
            let words = [program, &[pattern, "."][..]].concat();
            let [ours, floor] = in_turns(
                plan.rounds,
                |samples| samples.time(|| tree.grep(&mut client, pattern, is_literal)),
                |samples| samples.time(|| tree.run(&words, tree.hits)),
            );
            let row = format!("grep of {what}, {} files{beside}, MB/s", tree.files);
            let [ours, floor] = [ours, floor].map(|samples| samples.speeds(tree.bytes));
            table.row(&row, ours, Some(floor), Limit::AtLeast(*least), note);
        }
    }
    let [ours, floor] = in_turns(
        plan.rounds,
        |samples: &mut Samples| samples.time(|| tree.glob(&mut client)),
        |samples| samples.time(|| tree.run(&["find", ".", "-name", "*.rs"], tree.sources)),
    );
    fs::remove_dir_all(&tree.directory).unwrap();
    let row = format!("glob **/*.rs, {} files, thousand a second", tree.files);
    let [ours, floor] = [ours, floor].map(|samples| samples.rates(tree.files as f64 / 1e3));
    let limit = Limit::AtLeast(0.8);
    table.row(&row, ours, Some(floor), limit, "find -name");
}
