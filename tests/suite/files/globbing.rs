//! The promise of `files/glob`: it finds what the patterns say, once, in order; leaves out what ignore
//! files exclude; continues exactly; and follows no link.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::{Site, encode, expect_error, expect_ok, in_both_modes};
use crate::fixture::{Random, TempDir};
use crate::skip;

/// The paths of entries, relative to the site.
fn paths(site: &Site<'_>, answer: &Value) -> Vec<String> {
    let entries = answer["entries"].as_array().unwrap();
    let path = |entry: &Value| {
        let path = entry["path"].as_str().unwrap();
        path.strip_prefix(&site.path("")).unwrap().to_owned()
    };
    entries.iter().map(path).collect()
}

fn glob(site: &Site<'_>, rest: &str) -> Value {
    let route = format!("glob?path={}{rest}", encode(site.path("")));
    expect_ok(&site.request("GET", &route, b""))
}

fn populate(site: &Site<'_>) {
    for name in [
        "a.rs",
        "b.txt",
        "src/main.rs",
        "src/deep/er/x.rs",
        "src/x.txt",
        "target/out.rs",
        ".hidden/y.rs",
        ".git/config",
        "log/keep.log",
        "log/drop.log",
    ] {
        site.write(name, name);
    }
    site.write(".gitignore", "target/\n*.log\n");
    site.write("log/.gitignore", "!keep.log\n");
    site.write(".ignore", "b.txt\n");
    fs::create_dir(site.root.join("empty")).unwrap();
    symlink("src", site.root.join("way")).unwrap();
    symlink("/nowhere", site.root.join("dangling")).unwrap();
}

#[test]
fn patterns_pick_and_take_out() {
    in_both_modes(|site| {
        populate(site);
        for (query, expected) in [
            (
                "&pattern=**/*.rs",
                &["a.rs", "src/deep/er/x.rs", "src/main.rs"][..],
            ),
            ("&pattern=*.rs&pattern=!src/deep", &["a.rs", "src/main.rs"]),
            ("&pattern=/*.rs", &["a.rs"]),
            ("&pattern=src/*.%7Brs,txt%7D", &["src/main.rs", "src/x.txt"]),
            ("&pattern=%5Bam%5D*&type=file", &["a.rs", "src/main.rs"]),
            (
                "&type=dir",
                &["empty", "log", "src", "src/deep", "src/deep/er"],
            ),
            ("&type=link", &["dangling", "way"]),
            (
                "&pattern=!src&pattern=!log",
                &["a.rs", "dangling", "empty", "way"],
            ),
            ("&pattern=*.log", &["log/keep.log"]),
            (
                "&all=1&pattern=*.rs",
                &[
                    ".hidden/y.rs",
                    "a.rs",
                    "src/deep/er/x.rs",
                    "src/main.rs",
                    "target/out.rs",
                ],
            ),
            (
                "&all=1&pattern=.git*",
                &[".git", ".gitignore", "log/.gitignore"],
            ),
            ("&pattern=nothing", &[]),
        ] {
            let answer = glob(site, query);
            assert_eq!(paths(site, &answer), expected, "{query}");
            assert!(answer["next"].is_null(), "{query}");
        }
        let route = format!("glob?path={}&pattern=x.txt", encode(site.path("src")));
        let answer = expect_ok(&site.request("GET", &route, b""));
        let entry = &answer["entries"][0];
        let route = format!("stat?path={}", encode(site.path("src/x.txt")));
        let stat = expect_ok(&site.request("GET", &route, b""));
        assert_eq!(*entry, stat, "an entry is that of files/list");
    });
}

#[test]
fn pages_continue_exactly() {
    in_both_modes(|site| {
        for number in 0..30 {
            site.write(&format!("d{}/f{number}", number % 4), "x");
            let file = fs::File::options()
                .write(true)
                .open(site.root.join(format!("d{}/f{number}", number % 4)))
                .unwrap();
            // Some are of the same moment.
            let modified = SystemTime::UNIX_EPOCH
                + Duration::from_nanos(1_600_000_000_000_000_000 + number / 3);
            file.set_modified(modified).unwrap();
        }
        for sort in ["name", "mtime"] {
            let rest = format!("&pattern=f*&sort={sort}");
            let whole = paths(site, &glob(site, &rest));
            assert_eq!(whole.len(), 30);
            if sort == "mtime" {
                let number =
                    |path: &String| path.rsplit('f').next().unwrap().parse::<u64>().unwrap();
                assert!(
                    whole.is_sorted_by_key(|path| u64::MAX - number(path) / 3),
                    "{whole:?}"
                );
            } else {
                assert!(whole.is_sorted());
            }
            for limit in [1, 7, 29, 30, 31] {
                let (mut found, mut after) = (Vec::new(), String::new());
                loop {
                    let answer = glob(
                        site,
                        &format!("{rest}&limit={limit}&after={}", encode(&after)),
                    );
                    let page = paths(site, &answer);
                    assert!(page.len() <= limit);
                    found.extend(page);
                    match answer["next"].as_str() {
                        Some(next) => after = next.to_owned(),
                        None => break,
                    }
                }
                assert_eq!(found, whole, "{sort} {limit}");
            }
        }
    });
}

#[test]
fn what_is_not_accepted_is_refused() {
    in_both_modes(|site| {
        site.write("file", "x");
        for query in [
            "&pattern=%5Ba",
            "&pattern=",
            "&pattern=%7Ba",
            "&type=fifo",
            "&all=maybe",
            "&limit=0",
            "&limit=100001",
            "&sort=size",
            "&sort=mtime&after=x",
            "&sort=mtime&after=x:y",
            "&path=x",
        ] {
            let route = format!("glob?path={}{query}", encode(site.path("")));
            expect_error(&site.request("GET", &route, b""), 400, "bad_request");
        }
        let at = |name: &str| format!("glob?path={}", encode(site.path(name)));
        expect_error(&site.request("GET", &at("none"), b""), 404, "not_found");
        expect_error(&site.request("GET", &at("file"), b""), 409, "not_directory");
    });
}

/// Git is the model: what it lists as neither tracked nor ignored.
#[test]
fn ignore_files_mean_what_they_mean_to_git() {
    if Command::new("git").arg("--version").output().is_err() {
        skip!("needs git");
    }
    in_both_modes(|site| {
        for seed in 0..12 {
            let tree = format!("tree{seed}");
            populate_at_random(site, &tree, &mut Random(seed + 1));
            let elsewhere = TempDir::new();
            let output = Command::new("sh")
                .args(["-c", "git init -q && git ls-files -z -o --exclude-standard"])
                .env("HOME", elsewhere.path())
                .env("GIT_CONFIG_NOSYSTEM", "1")
                .env("GIT_DIR", elsewhere.join("git"))
                .env("GIT_WORK_TREE", site.root.join(&tree))
                .current_dir(site.root.join(&tree))
                .output()
                .unwrap();
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
            let listed = output.stdout;
            let listed = String::from_utf8(listed).unwrap();
            let expected: BTreeSet<_> = listed
                .split('\0')
                .filter(|name| !name.is_empty() && !name.contains("/.") && !name.starts_with('.'))
                .collect();
            let found = |directory: &str, kind: &str| {
                let path = encode(site.path(&format!("{tree}/{directory}")));
                let route = format!("glob?path={path}&type={kind}&limit=100000");
                let answer = expect_ok(&site.request("GET", &route, b""));
                paths(site, &answer)
                    .iter()
                    .map(|path| path.strip_prefix(&format!("{tree}/")).unwrap().to_owned())
                    .collect::<BTreeSet<_>>()
            };
            let rules = fs::read_to_string(site.root.join(&tree).join(".gitignore"));
            let is_same = |found: &BTreeSet<String>, above: &str| {
                let below = expected.iter().filter(|path| path.starts_with(above));
                assert!(
                    found.iter().eq(below.copied()),
                    "seed {seed}, {above}: {found:?} {expected:?} {rules:?}"
                );
            };
            is_same(&found("", "file"), "");
            // Those of the directories above count too, in a repository.
            fs::create_dir_all(site.root.join(&tree).join(".git")).unwrap();
            for directory in found("", "dir") {
                is_same(&found(&directory, "file"), &(directory + "/"));
            }
        }
    });
}

#[test]
fn ignore_files_above_count_up_to_the_repository() {
    in_both_modes(|site| {
        for name in ["x/.gitignore", "x/r/.gitignore", "x/r/a/.ignore"] {
            site.write(name, format!("{}.no\n", name.len()));
        }
        site.write("x/r/a/.gitignore", "!14.no\nb/13.txt\n");
        for name in ["12.no", "13.no", "13.txt", "14.no"] {
            site.write(&format!("x/r/a/b/{name}"), "x");
        }
        let names = || {
            let below = "x/r/a/b/";
            let route = format!("glob?path={}", encode(site.path("x/r/a/b")));
            let found = paths(site, &expect_ok(&site.request("GET", &route, b"")));
            found
                .iter()
                .map(|path| path.strip_prefix(below).unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        let all = ["12.no", "13.no", "13.txt", "14.no"];
        assert_eq!(names(), all, "there is no repository");
        fs::create_dir(site.root.join("x/r/.git")).unwrap();
        assert_eq!(names(), ["12.no", "14.no"]);
        let search = json!({"pattern": "x", "path": site.path("x/r/a/b")});
        let reply = site.post("grep", &search).text();
        assert_eq!(reply.matches("\"match\"").count(), 2, "{reply}");
        fs::remove_dir(site.root.join("x/r/.git")).unwrap();
        fs::create_dir(site.root.join("x/r/a/b/.git")).unwrap();
        assert_eq!(names(), all, "the repository is the directory itself");
    });
}

/// A tree of short names, with rules that concern many of them.
fn populate_at_random(site: &Site<'_>, tree: &str, random: &mut Random) {
    let names = ["a", "b", "ab", "a.c", "b.c", "x y", "[z]", "c!"];
    for _ in 0..60 {
        let depth = 1 + random.below(4);
        let path: Vec<_> = (0..depth).map(|_| random.of(&names)).collect();
        let path = format!("{tree}/{}", path.join("/"));
        // Where a file is in the way of a directory, or the other way round, it is left out.
        let route = format!("write?path={}", encode(site.path(&path)));
        site.request("PUT", &route, b"x");
    }
    let parts = [
        "a",
        "b",
        "ab",
        "*",
        "**",
        "?",
        "[ab]",
        "[!a]",
        "*.c",
        "a*",
        "\\[z\\]",
        "x\\ y",
        "[[:alpha:]]",
        "c\\!",
    ];
    for directory in ["", "a/", "b/", "ab/", "a/b/"] {
        if !site.root.join(tree).join(directory).is_dir() {
            continue;
        }
        let mut rules = String::from("# rules\n\n");
        for _ in 0..=random.below(4) {
            let start = random.of(&["", "", "!", "/", "!/", "**/"]);
            let middle: Vec<_> = (0..=random.below(3)).map(|_| random.of(&parts)).collect();
            let end = random.of(&["\n", "\n", "/\n", "/**\n", "  \n", "\r\n"]);
            rules += &[start, &middle.join("/"), end].concat();
        }
        site.write(&format!("{tree}/{directory}.gitignore"), rules);
    }
}
