//! What sandboxes with a root of their own cost. The floor is the kernel's own work, done here without a server: the same
//! namespaces, an overlay, and what is mounted in it.

use std::ffi::{CStr, CString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, clone};

use super::Plan;
use super::client::Client;
use super::confined::Floor;
use super::host::{Host, create_with, delete, prefix};
use super::program::Scratch;
use super::report::{Limit, Samples, Table};

/// How many are alive when the machine is said to be full.
const MANY: usize = 200;

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
    let settings = [("SBX_TEMPLATES", templates.as_str())];
    let host = Host::start_with(scratch, "roots", "30000-39999", &settings);
    let mut client = host.program.connect();
    client.send("GET", "/health", 0, b"");
    if client.reply().contains("no_private_root") {
        table.void("private roots");
        return;
    }
    let recipe = Recipe::new(scratch, &template);
    lives(plan, &mut client, &recipe, "", table);
    let others = create_with(
        &mut client,
        MANY,
        &format!(r#"{{"count":{MANY},"root":"private"}}"#),
    );
    lives(
        plan,
        &mut client,
        &recipe,
        &format!(", {MANY} others"),
        table,
    );
    for other in others {
        assert!(delete(&mut client, &other));
    }
}

fn lives(plan: &Plan, client: &mut Client, recipe: &Recipe, when: &str, table: &mut Table) {
    let [
        mut made,
        mut floor,
        mut commands,
        mut usual,
        mut deleted,
        mut usually_deleted,
    ] = [(); 6].map(|()| Samples::default());
    let usual_body = r#"{"isolation":"namespaces","network":"blocked"}"#;
    for _ in 0..plan.samples / 8 {
        let body = r#"{"root":"private","network":"blocked"}"#;
        let own = made.time(|| create_with(client, 1, body).remove(0));
        floor.time(|| recipe.make());
        recipe.clear();
        let other = create_with(client, 1, usual_body).remove(0);
        for _ in 0..8 {
            commands.time(|| client.run_true_in(&prefix(&own)));
            usual.time(|| client.run_true_in(&prefix(&other)));
        }
        assert!(deleted.time(|| delete(client, &own)));
        assert!(usually_deleted.time(|| delete(client, &other)));
    }
    let row = format!("private root: create{when}");
    let note = "the same namespaces and mounts, without a server";
    table.times(&row, &made, &floor, Limit::AtMost(1.5, 0.0), note);
    let row = format!("private root: /bin/true{when}");
    let note = "namespaces, in turn with it";
    table.times(&row, &commands, &usual, Limit::AtMost(1.15, 0.0), note);
    let row = format!("private root: delete{when}");
    table.times(&row, &deleted, &usually_deleted, Limit::Below(5000.0), note);
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

/// What a root takes without a server.
struct Recipe {
    own: PathBuf,
    /// What is mounted: a source, a place, a type and options.
    mounts: Vec<[CString; 4]>,
}

impl Recipe {
    fn new(scratch: &Scratch, template: &Path) -> Self {
        let own = scratch.path("recipe");
        let text = |text: &str| CString::new(text).unwrap();
        let path = |name: &str| CString::new(own.join(name).as_os_str().as_bytes()).unwrap();
        let overlay = format!(
            "lowerdir={},upperdir={own},workdir={work}",
            template.display(),
            own = own.join("up").display(),
            work = own.join("work").display()
        );
        let device = |name: &str| {
            let (at, from) = (format!("root/dev/{name}"), format!("/dev/{name}"));
            [text(&from), path(&at), text(""), text("")]
        };
        let mut mounts = vec![
            [
                text("overlay"),
                path("root"),
                text("overlay"),
                text(&overlay),
            ],
            [text("proc"), path("root/proc"), text("proc"), text("")],
            [text("sysfs"), path("root/sys"), text("sysfs"), text("")],
            [
                text("tmpfs"),
                path("root/dev"),
                text("tmpfs"),
                text("mode=755"),
            ],
        ];
        mounts.extend(["null", "zero", "full", "random", "urandom", "tty"].map(device));
        Self { own, mounts }
    }

    #[allow(unsafe_code)]
    fn make(&self) {
        for name in ["up", "work", "root"] {
            fs::create_dir_all(self.own.join(name)).unwrap();
        }
        let flags = CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWPID
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWCGROUP;
        let mut stack = vec![0; 64 << 10];
        // SAFETY: the new process has a copy of the memory, and makes system calls only.
        let made = unsafe {
            clone(
                Box::new(|| self.mount()),
                &mut stack,
                flags,
                Some(libc::SIGCHLD),
            )
        };
        Floor::wait(made.unwrap());
    }

    /// The mounts, by system calls.
    #[allow(unsafe_code)]
    fn mount(&self) -> isize {
        let none = c"".as_ptr();
        // SAFETY: C strings that outlive the calls.
        unsafe {
            let private = libc::MS_REC | libc::MS_PRIVATE;
            if libc::mount(none, c"/".as_ptr(), none, private, none.cast()) < 0 {
                return 1;
            }
            for [source, place, kind, options] in &self.mounts {
                let is_bound = kind.as_bytes().is_empty();
                let flags = if is_bound { libc::MS_BIND } else { 0 };
                if is_bound {
                    let file = libc::open(place.as_ptr(), libc::O_CREAT | libc::O_CLOEXEC, 0o644);
                    libc::close(file);
                }
                let (source, place): (&CStr, &CStr) = (source, place);
                let (kind, options) = (kind.as_ptr(), options.as_ptr().cast());
                if libc::mount(source.as_ptr(), place.as_ptr(), kind, flags, options) < 0 {
                    return 2;
                }
            }
            0
        }
    }

    /// Removes what it made.
    fn clear(&self) {
        fs::remove_dir_all(&self.own).unwrap();
    }
}
