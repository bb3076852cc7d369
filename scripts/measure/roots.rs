//! What sandboxes with a root of their own cost, and the templates that they are made of. The floors are the kernel's own
//! work, done here without a server, and `tar`.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Plan;
use super::client::{Client, request};
use super::host::{Host, create_with, delete, prefix};
use super::program::Scratch;
use super::recipe::Recipe;
use super::report::{Figure, Limit, Samples, Table};

/// How many are alive when the machine is said to be full, and how many are made by one request.
const MANY: usize = 1_000;
const AT_ONCE: usize = 200;

/// A template as large as a distribution's: files in directories, all of one size.
const DIRECTORIES: usize = 82;
const FILES: usize = 100;
const FILE_BYTES: usize = 29 << 10;

/// What an import may take beside `tar`.
const IMPORT: Limit = Limit::AtMost(1.5, 0.0);

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    if !super::is_root() {
        return;
    }
    let busybox = Path::new("/bin/busybox");
    if !busybox.exists() {
        table.void("private roots: there is no /bin/busybox");
        return;
    }
    let template = template(scratch, busybox);
    let templates = format!("bare={}", template.display());
    let settings = [
        ("SBX_TEMPLATES", templates.as_str()),
        ("SBX_TEMPLATE", "bare"),
    ];
    let host = Host::start_with(scratch, "roots", "30000-39999", &settings);
    let mut client = host.program.connect();
    client.send("GET", "/health", 0, b"");
    if client.reply().contains("no_private_root") {
        table.void("private roots");
        return;
    }
    let recipe = Recipe::new(scratch, &template);
    let alone = Lives::measure(plan, &mut client, &recipe);
    alone.report(table);
    let before = free_memory();
    let others: Vec<_> = (0..MANY / AT_ONCE)
        .flat_map(|_| {
            let body = format!(r#"{{"count":{AT_ONCE},"root":"private","network":"blocked"}}"#);
            create_with(&mut client, AT_ONCE, &body)
        })
        .collect();
    let each = before.saturating_sub(free_memory()) as f64 / MANY as f64;
    let note = "of the whole machine";
    let what = "private root: memory of an idle sandbox, KiB";
    table.row(what, Figure::one(each), None, Limit::Below(512.0), note);
    Lives::measure(plan, &mut client, &recipe).report_beside(&alone, table);
    for other in others {
        assert!(delete(&mut client, &other));
    }
    imports(plan, scratch, &template, &mut client, table);
}

/// Memory of the machine that nobody uses and nothing can be dropped for, in KiB: what the kernel keeps for itself counts.
fn free_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let number = line.unwrap().trim().trim_end_matches(" kB");
    number.parse().unwrap()
}

/// What is done with sandboxes, beside their floors.
#[derive(Default)]
struct Lives {
    made: Samples,
    floor: Samples,
    commands: Samples,
    /// Of a sandbox with namespaces alone.
    usual_commands: Samples,
    deleted: Samples,
    usual_deleted: Samples,
}

impl Lives {
    fn measure(plan: &Plan, client: &mut Client, recipe: &Recipe) -> Self {
        let mut lives = Self::default();
        let usual_body = r#"{"root":"shared","isolation":"namespaces","network":"blocked"}"#;
        for _ in 0..plan.samples / 8 {
            let body = r#"{"root":"private","network":"blocked"}"#;
            let own = lives.made.time(|| create_with(client, 1, body).remove(0));
            lives.floor.time(|| recipe.make());
            recipe.clear();
            let usual = create_with(client, 1, usual_body).remove(0);
            for _ in 0..8 {
                lives.commands.time(|| client.run_true_in(&prefix(&own)));
                lives
                    .usual_commands
                    .time(|| client.run_true_in(&prefix(&usual)));
            }
            assert!(lives.deleted.time(|| delete(client, &own)));
            assert!(lives.usual_deleted.time(|| delete(client, &usual)));
        }
        lives
    }

    fn report(&self, table: &mut Table) {
        let note = "a user namespace, an overlay, namespaces and mounts, without a server";
        let limit = Limit::AtMost(1.5, 0.0);
        table.times("private root: create", &self.made, &self.floor, limit, note);
        let note = "namespaces, in turn with it";
        let limit = Limit::AtMost(1.15, 0.0);
        let (ours, floor) = (&self.commands, &self.usual_commands);
        table.times("private root: /bin/true", ours, floor, limit, note);
        let (ours, floor) = (&self.deleted, &self.usual_deleted);
        let limit = Limit::Below(5000.0);
        table.times("private root: delete", ours, floor, limit, note);
    }

    /// Beside many others; `alone` is what it was without them.
    fn report_beside(&self, alone: &Self, table: &mut Table) {
        let note = "the same without the others";
        for (what, ours, floor) in [
            ("create", &self.made, &alone.made),
            ("/bin/true", &self.commands, &alone.commands),
            ("delete", &self.deleted, &alone.deleted),
        ] {
            let what = format!("private root: {what}, {MANY} others");
            table.times(&what, ours, floor, Limit::AtMost(1.3, 0.0), note);
        }
        // What the kernel itself needs more beside so many.
        let what = format!("private root: the floor of create, {MANY} others");
        table.times(&what, &self.floor, &alone.floor, Limit::None, note);
    }
}

/// Archives of a root become templates, and sandboxes are made of them.
fn imports(
    plan: &Plan,
    scratch: &Scratch,
    template: &Path,
    client: &mut Client,
    table: &mut Table,
) {
    let content = vec![b'x'; FILE_BYTES];
    for directory in 0..DIRECTORIES {
        let directory = template.join(format!("usr/{directory}"));
        fs::create_dir_all(&directory).unwrap();
        for file in 0..FILES {
            fs::write(directory.join(file.to_string()), &content).unwrap();
        }
    }
    let archive = scratch.path("template.tar");
    run_tar("-cf", &archive, template);
    let bytes = fs::read(&archive).unwrap();
    let unpacked = scratch.path("unpacked");
    let [mut imported, mut floor, mut made] = [(); 3].map(|()| Samples::default());
    let put = request("PUT", "/v1/snapshots?name=whole", "", bytes.len(), &bytes);
    for _ in 0..plan.rounds {
        imported.time(|| {
            client.stream.write_all(&put).unwrap();
            let reply = client.reply();
            assert!(reply.contains(r#""id":"s-"#), "{reply}");
        });
        floor.time(|| {
            fs::create_dir(&unpacked).unwrap();
            run_tar("-xpf", &archive, &unpacked);
        });
        fs::remove_dir_all(&unpacked).unwrap();
        for _ in 0..8 {
            let body = r#"{"root":"private","template":"whole","network":"blocked"}"#;
            let own = made.time(|| create_with(client, 1, body).remove(0));
            assert!(delete(client, &own));
        }
        client.send("DELETE", "/v1/snapshots/whole", 0, b"");
        client.reply();
    }
    let count = DIRECTORIES * FILES;
    let megabytes = bytes.len() / 1_000_000;
    let what = format!("import of a template of {megabytes} MB, {count} files");
    table.times(&what, &imported, &floor, IMPORT, "tar x of the archive");
    let what = "private root of an imported template: create, µs";
    table.row(what, made.times(), None, Limit::Below(5000.0), "");
}

fn run_tar(how: &str, archive: &Path, directory: &Path) {
    let done = Command::new("tar")
        .arg(how)
        .arg(archive)
        .arg("-C")
        .arg(directory)
        .arg(".")
        .status();
    assert!(done.unwrap().success());
}

/// A root with one program.
fn template(scratch: &Scratch, busybox: &Path) -> PathBuf {
    let template = scratch.path("template");
    for name in ["bin", "etc", "dev", "proc", "sys", "run", "tmp", "root"] {
        fs::create_dir_all(template.join(name)).unwrap();
    }
    fs::copy(busybox, template.join("bin/busybox")).unwrap();
    for name in ["sh", "true"] {
        std::os::unix::fs::symlink("busybox", template.join("bin").join(name)).unwrap();
    }
    fs::write(template.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\n").unwrap();
    template
}
