//! The promise of the documentation: every console example prints what its page shows, every Python
//! example runs, and every link has a target. Blocks with other marks, such as `sh`, are not run.
//!
//! `console` blocks are sessions: a line that begins with `$ ` is a command (a backslash at its end
//! continues it), the lines below it are its output. The blocks of a page run in order against one
//! dedicated server; those marked `console host` run against one in host mode. Values that differ from
//! run to run, such as pids, times and ids, may differ. `python` blocks must run without an error.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use crate::examples::{
    OrderlyServer, claim_ports, is_installed, newest_client, repository, run_python, server_in,
};
use crate::fixture::{Server, TOKEN, TempDir, is_root};
use crate::skip;

/// Longest README, in lines.
const README_LINES: usize = 220;

/// A page of the documentation.
struct Page {
    /// Relative to the repository.
    path: PathBuf,
    text: String,
}

/// All pages: the Markdown files of the repository's root, `docs` and `examples`.
fn pages() -> Vec<Page> {
    let mut pages = Vec::new();
    for directory in ["", "docs", "examples"] {
        for entry in fs::read_dir(repository(directory)).unwrap() {
            let path = Path::new(directory).join(entry.unwrap().file_name());
            if path.extension().is_some_and(|extension| extension == "md") {
                let text = fs::read_to_string(repository(path.to_str().unwrap())).unwrap();
                pages.push(Page { path, text });
            }
        }
    }
    assert!(pages.len() > 10, "only {} pages were found", pages.len());
    pages
}

/// The contents of the fenced blocks that are marked with these words.
fn blocks<'a>(text: &'a str, mark: &str) -> Vec<&'a str> {
    let mut blocks = Vec::new();
    let mut rest = text;
    while let Some((_, block)) = rest.split_once("\n```") {
        let (words, block) = block.split_once('\n').unwrap_or_default();
        let (block, after) = block.split_once("```").expect("a block ends");
        if words == mark {
            blocks.push(block);
        }
        rest = after;
    }
    blocks
}

/// A command and the output that is shown under it.
#[derive(Debug, PartialEq)]
struct Example {
    command: String,
    output: String,
}

/// The examples in the blocks with this mark.
fn examples(text: &str, mark: &str) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
    for block in blocks(text, mark) {
        let mut continued = false;
        for line in block.lines() {
            if continued {
                let command = &mut examples.last_mut().unwrap().command;
                command.push('\n');
                command.push_str(line);
                continued = line.ends_with('\\');
            } else if let Some(command) = line.strip_prefix("$ ") {
                continued = line.ends_with('\\');
                examples.push(Example {
                    command: command.to_owned(),
                    output: String::new(),
                });
            } else {
                let output = &mut examples.last_mut().expect("a command comes first").output;
                output.push_str(line);
                output.push('\n');
            }
        }
    }
    examples
}

/// The text with each number or version that differs from run to run replaced by `N`, and each id and token by
/// `H`.
fn steady(text: &str) -> String {
    /// Besides times, which end in `_ms`.
    const CHANGING: [&str; 5] = ["version", "pid", "uid", "inode", "landlock_abi"];
    const PATHS: &str = r#""filesystem":{"#;
    let mut result = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let text = rest.strip_prefix('"').and_then(|rest| rest.split_once('"'));
        let name = text.and_then(|(text, rest)| rest.starts_with(':').then_some(text));
        if let Some(name) = name.filter(|name| CHANGING.contains(name) || name.ends_with("_ms")) {
            let value = &rest[name.len() + 3..];
            let value = value.strip_prefix('"').unwrap_or(value);
            let key = &rest[..rest.len() - value.len()];
            let after = value.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
            result.push_str(key);
            if after.len() + key.len() < rest.len() {
                result.push('N');
            }
            rest = after;
        } else if let Some(lists) = rest.strip_prefix(PATHS) {
            // What an image has. Pages may leave it out.
            result.push_str(PATHS);
            rest = lists.find('}').map_or("", |end| &lists[end..]);
        } else if let Some(after) = without_id(rest) {
            result.push('H');
            rest = after;
        } else {
            let length = rest.chars().next().unwrap().len_utf8();
            result.push_str(&rest[..length]);
            rest = &rest[length..];
        }
    }
    result
}

/// What follows an id or a token: a run of 24 hexadecimal digits or more.
fn without_id(text: &str) -> Option<&str> {
    let after = text.trim_start_matches(|c: char| c.is_ascii_digit() || ('a'..='f').contains(&c));
    (text.len() - after.len() >= 24).then_some(after)
}

#[test]
fn every_example_prints_what_its_page_shows() {
    if !is_installed("curl", "--version") {
        skip!("curl is not installed");
    }
    let _ports = claim_ports();
    check_pages("console", 40, |_, directory| server_in(directory));
}

#[test]
fn every_example_of_host_mode_prints_what_its_page_shows() {
    if !is_installed("curl", "--version") {
        skip!("curl is not installed");
    }
    if !is_root() {
        skip!("host mode needs root");
    }
    check_pages("console host", 15, |text, _| {
        let mut server = Server::host();
        let capacity = text
            .split_once("SBX_CAPACITY=")
            .and_then(|(_, rest)| rest.split(' ').next());
        if let Some(capacity) = capacity {
            server = server.env("SBX_CAPACITY", capacity);
        }
        OrderlyServer(server.start())
    });
}

/// Runs the examples with this mark of every page against the server that `start` makes for the page.
#[track_caller]
fn check_pages(mark: &str, at_least: usize, start: impl Fn(&str, &TempDir) -> OrderlyServer) {
    let mut count = 0;
    for page in pages() {
        let examples = examples(&page.text, mark);
        if examples.is_empty() {
            continue;
        }
        count += examples.len();
        let directory = TempDir::new();
        let server = start(&page.text, &directory);
        check_examples(&page, &examples, &server, &directory);
    }
    assert!(count >= at_least, "only {count} examples were found");
}

#[test]
fn every_python_example_runs() {
    let python = match newest_client() {
        Ok(python) => python,
        Err(reason) => skip!("the real client: {reason}"),
    };
    if !is_installed("openssl", "version") {
        skip!("openssl is not installed");
    }
    let mut count = 0;
    for page in pages() {
        for block in blocks(&page.text, "python") {
            count += 1;
            let directory = TempDir::new();
            let script = directory.join("example.py");
            fs::write(&script, block).unwrap();
            run_python(&python, &script, block.contains("huggingface_hub"));
        }
    }
    assert!(count >= 3, "only {count} examples were found");
}

/// Runs the examples in order, in this directory, and compares their output. The id and the token of the
/// first sandbox that an example makes are `ID` and `SANDBOX_TOKEN` for those after it.
#[track_caller]
fn check_examples(page: &Page, examples: &[Example], server: &Server, directory: &TempDir) {
    let helper = page
        .text
        .lines()
        .find(|line| line.starts_with("sbx() {"))
        .unwrap_or_default();
    let mut sandbox: Option<[String; 2]> = None;
    let mut shown = String::new();
    let mut seen = String::new();
    for Example { command, output } in examples {
        let [id, token] = sandbox.clone().unwrap_or_default();
        let result = Command::new("sh")
            .arg("-c")
            .arg(format!("{helper}\n{command}"))
            .env("URL", format!("http://{}", server.address))
            .env("TOKEN", TOKEN)
            .env("ID", id)
            .env("SANDBOX_TOKEN", token)
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&result.stderr);
        assert!(errors.is_empty(), "{command}\n{errors}");
        let mut printed = String::from_utf8(result.stdout).unwrap();
        if !printed.is_empty() && !printed.ends_with('\n') {
            printed.push('\n');
        }
        if sandbox.is_none()
            && let Ok(made) = serde_json::from_str::<serde_json::Value>(&printed)
            && let Some(made) = made["sandboxes"].get(0)
        {
            sandbox = Some(["id", "token"].map(|name| made[name].as_str().unwrap().to_owned()));
        }
        if let Some(place) = &server.place {
            printed = printed.replace(place.homes().to_str().unwrap(), "/sbx/homes");
        }
        shown.push_str(&steady(&format!("$ {command}\n{output}")));
        seen.push_str(&steady(&format!("$ {command}\n{printed}")));
    }
    if shown != seen {
        let line = shown
            .lines()
            .zip(seen.lines())
            .position(|(shown, seen)| shown != seen);
        let from = line.unwrap_or_default().saturating_sub(2);
        let part = |text: &str| {
            text.lines()
                .skip(from)
                .take(8)
                .collect::<Vec<_>>()
                .join("\n")
        };
        panic!(
            "{} shows\n{}\n\nbut this was printed\n{}",
            page.path.display(),
            part(&shown),
            part(&seen)
        );
    }
}

/// The anchors of a page: its headings, as GitHub writes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut in_block = false;
    let mut anchors = BTreeSet::new();
    for line in text.lines() {
        in_block ^= line.starts_with("```");
        let heading = line.trim_start_matches('#');
        if in_block || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let kept = heading.trim().chars().filter_map(|c| match c {
            ' ' => Some('-'),
            '-' | '_' => Some(c),
            _ => c.is_alphanumeric().then(|| c.to_ascii_lowercase()),
        });
        anchors.insert(kept.collect());
    }
    anchors
}

/// The targets of a page's links, code aside.
fn links(text: &str) -> Vec<&str> {
    let mut links = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        in_block ^= line.starts_with("```");
        if in_block {
            continue;
        }
        for part in line.split("](").skip(1) {
            links.push(part.split_once(')').expect("a link ends").0);
        }
    }
    links
}

/// A path without `.` and `..`.
fn normalized(path: &Path) -> PathBuf {
    let mut result = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                assert!(result.pop(), "{} leaves the repository", path.display());
            }
            Component::CurDir => {}
            other => result.push(other),
        }
    }
    result
}

#[test]
fn every_link_leads_somewhere() {
    let pages = pages();
    let anchors: BTreeMap<&Path, _> = pages
        .iter()
        .map(|page| (page.path.as_path(), anchors(&page.text)))
        .collect();
    let mut broken = Vec::new();
    for page in &pages {
        for link in links(&page.text) {
            if link.contains("://") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() {
                page.path.clone()
            } else {
                normalized(&page.path.parent().unwrap().join(file))
            };
            let has_anchor = anchor.is_empty()
                || anchors
                    .get(target.as_path())
                    .is_some_and(|anchors| anchors.contains(anchor));
            if !has_anchor || !repository(target.to_str().unwrap()).exists() {
                broken.push(format!("{}: {link}", page.path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "broken links: {broken:#?}");
}

#[test]
fn the_readme_is_short_and_leads_to_every_page() {
    let text = fs::read_to_string(repository("README.md")).unwrap();
    let length = text.lines().count();
    assert!(length <= README_LINES, "the README has {length} lines");
    let links = links(&text);
    for page in pages() {
        let path = page.path.to_str().unwrap();
        assert!(
            path == "README.md" || links.contains(&path),
            "the README does not link to {path}"
        );
    }
}

#[test]
fn every_module_is_in_the_architecture_page() {
    let text = fs::read_to_string(repository("docs/architecture.md")).unwrap();
    // Containers that run the suite may lack the sources.
    for entry in fs::read_dir(repository("src")).into_iter().flatten() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        // A module may move between a file and a folder.
        assert!(
            text.contains(&format!("`{name}.rs`")) || text.contains(&format!("`{name}/`")),
            "docs/architecture.md lacks {name}"
        );
    }
}

/// Names of modules that code names: `crate::one` and `crate::{one, two}`.
fn named_modules(code: &str) -> BTreeSet<&str> {
    let paths = code.split("crate::").skip(1);
    let names = paths.flat_map(|path| match path.strip_prefix('{') {
        Some(group) => group.split('}').next().unwrap().split(',').collect(),
        None => vec![path],
    });
    let is_end = |c: char| !c.is_ascii_lowercase() && c != '_';
    names
        .map(|name| name.trim().split(is_end).next().unwrap())
        .collect()
}

#[test]
fn dependencies_go_down_the_table_of_the_architecture_page() {
    let text = fs::read_to_string(repository("docs/architecture.md")).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("| "));
    let cells = rows.map(|row| row.split('|').next().unwrap());
    // A cell may have several names, each between backticks.
    let names = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let order: Vec<_> = names
        .map(|name| name.split(['/', '.']).next().unwrap())
        .collect();
    let rank = |module: &str| order.iter().position(|known| *known == module);
    let source = repository("src");
    let mut folders = vec![source.clone()];
    while let Some(folder) = folders.pop() {
        // Containers that run the suite may lack the sources.
        for entry in fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let shown = path.strip_prefix(&source).unwrap().display().to_string();
            let is_for_tests = ["tests.rs", "fuzz.rs"]
                .iter()
                .any(|name| shown.ends_with(name));
            if path.extension().is_none_or(|extension| extension != "rs") || is_for_tests {
                continue;
            }
            let code = fs::read_to_string(&path).unwrap();
            let code = code.split("\n#[cfg(test)]\nmod ").next().unwrap();
            let lines = code
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"));
            let code = lines.collect::<Vec<_>>().join("\n");
            let own = rank(shown.split(['/', '.']).next().unwrap());
            assert!(own.is_some(), "{shown} is in no row");
            for name in named_modules(&code) {
                let is_above = rank(name).is_some_and(|rank| Some(rank) < own);
                assert!(!is_above, "{shown} uses {name}, which stands above it");
            }
        }
    }
}

#[test]
fn examples_links_and_changing_numbers_are_recognized() {
    let text = "text\n```sh\n$ not me\n```\n```console\n$ one \\\n  two\nout 1\nout 2\n$ three\n```\n\
                ```console host\n$ four\n```\n";
    let example = |command: &str, output: &str| Example {
        command: command.to_owned(),
        output: output.to_owned(),
    };
    let expected = [
        example("one \\\n  two", "out 1\nout 2\n"),
        example("three", ""),
    ];
    assert_eq!(examples(text, "console"), expected);
    assert_eq!(examples(text, "console host"), [example("four", "")]);
    assert_eq!(
        steady(r#"{"pid":12,"duration_ms":null,"id":"p-7"}"#),
        r#"{"pid":N,"duration_ms":null,"id":"p-7"}"#
    );
    let id = "0a".repeat(12);
    let short = "0a".repeat(11);
    assert_eq!(
        steady(&format!(r#"{{"id":"{id}","other":"{short}"}}"#)),
        format!(r#"{{"id":"H","other":"{short}"}}"#)
    );
    let text = "# One `two`: 3/4\n```\n# no [x](y)\n```\n[a](b#c), [d](e)\n#no\n";
    assert_eq!(anchors(text), BTreeSet::from(["one-two-34".to_owned()]));
    assert_eq!(links(text), ["b#c", "e"]);
    assert_eq!(normalized(Path::new("docs/../a/./b")), Path::new("a/b"));
    let code = "use crate::one::{A, b};\nuse crate::{two, three::C};\nlet x = crate::four();";
    assert_eq!(
        named_modules(code),
        BTreeSet::from(["four", "one", "three", "two"])
    );
}
