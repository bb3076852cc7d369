//! Whether costs grow with what is there already: medians for more and more sandboxes, logs and
//! lifetimes, as a picture in docs/ and as a table.

use std::fmt::Write;
use std::fs;

use super::client::Client;
use super::confined::Floor;
use super::contexts;
use super::host::{Host, LOG_BYTES, create, delete, prefix, spawn_sleep, spawn_with_log};
use super::plot::{Panel, Series, svg};
use super::program::{Program, Scratch, free_port};
use super::report::{Samples, machine, rounded};
use super::{MIB, Plan};

const PICTURE: &str = "docs/curves.svg";
const TABLE: &str = "docs/curves.md";

pub fn measure(plan: &Plan) {
    let scratch = Scratch::new();
    let mut panels = vec![over_logs(plan), over_contexts(plan)];
    if super::is_root() {
        panels.insert(0, over_sandboxes(plan, &scratch));
        panels.push(over_lifetimes(plan, &scratch));
    }
    let table = table(&panels);
    println!("{table}");
    // Relative to the project: scripts/bench goes there first.
    fs::write(PICTURE, svg(&panels)).unwrap();
    fs::write(TABLE, table).unwrap();
    eprintln!("{PICTURE} and {TABLE} are new");
}

/// So many samples of something, after a few that find cold caches. In microseconds.
fn median(plan: &Plan, mut sample: impl FnMut(&mut Samples)) -> f64 {
    for _ in 0..10 {
        sample(&mut Samples::default());
    }
    let mut samples = Samples::default();
    for _ in 0..plan.samples / 4 {
        sample(&mut samples);
    }
    samples.times().median
}

/// A panel of medians, in microseconds.
fn medians<const STEPS: usize, const SERIES: usize>(
    title: &'static str,
    across: &'static str,
    steps: [usize; STEPS],
    series: [(&'static str, Vec<f64>); SERIES],
) -> Panel {
    Panel {
        title,
        across,
        steps: steps.map(|step| step.to_string()).to_vec(),
        upwards: "median, µs",
        series: series.map(|(name, points)| Series { name, points }).into(),
    }
}

fn over_sandboxes(plan: &Plan, scratch: &Scratch) -> Panel {
    let host = Host::start(scratch, "curves", "20000-59999");
    let mut client = host.program.connect();
    let mut ids: Vec<String> = Vec::new();
    let steps = [1, 10, 100, 1_000];
    let ruleset = Floor::new(scratch).ruleset();
    let [mut execs, mut floors, mut creates, mut deletes, mut lists] = [(); 5].map(|()| Vec::new());
    for count in steps {
        for id in create(&mut client, count - ids.len()) {
            spawn_sleep(&mut client, &prefix(&id));
            ids.push(id);
        }
        let own = prefix(&ids[ids.len() / 2]);
        execs.push(median(plan, |samples| {
            samples.time(|| client.run_true_in(&own));
        }));
        floors.push(median(plan, |samples| {
            samples.time(|| Floor::wait(Floor::start(&ruleset, &[c"/bin/true"])));
        }));
        let target = format!("{own}/processes");
        lists.push(median(plan, |samples| {
            let list = samples.time(|| {
                client.send("GET", &target, 0, b"");
                client.reply()
            });
            assert!(list.contains("/bin/sleep"), "{list}");
        }));
        let (create, delete) = create_and_delete(plan, &mut client);
        creates.push(create);
        deletes.push(delete);
        eprintln!("{count} sandboxes are done");
    }
    let series = [
        ("/bin/true in a sandbox", execs),
        ("the same without a server", floors),
        ("create one more", creates),
        ("delete it", deletes),
        ("list its processes, 256 of them ended", lists),
    ];
    let title = "More sandboxes, each with a process";
    medians(title, "sandboxes alive", steps, series)
}

/// Medians of making a sandbox and of deleting it.
fn create_and_delete(plan: &Plan, client: &mut Client) -> (f64, f64) {
    let mut deletes = Samples::default();
    let create = median(plan, |samples| {
        let id = samples.time(|| create(client, 1).remove(0));
        assert!(deletes.time(|| delete(client, &id)));
    });
    (create, deletes.times().median)
}

fn over_logs(plan: &Plan) -> Panel {
    let server = Program::server(free_port());
    let mut client = server.connect();
    let steps = [0, 64, 128, 256];
    let mut held = 0;
    let points = steps.map(|mib| {
        while held < mib * MIB {
            spawn_with_log(&mut client, "/v1");
            held += LOG_BYTES;
        }
        median(plan, |samples| samples.time(|| client.run_true()))
    });
    let series = [("/bin/true", points.to_vec())];
    medians("More logs in memory", "logs held, MiB", steps, series)
}

fn over_contexts(plan: &Plan) -> Panel {
    let steps = [1, 10, 100, 500];
    let server = contexts::server(steps[3]);
    let mut client = server.connect();
    let mut made = Vec::new();
    let [mut executions, mut commands] = [(); 2].map(|()| Vec::new());
    for count in steps {
        made.resize_with(count, || contexts::make_bash(&mut client));
        let one = &made[count / 2];
        executions.push(median(plan, |samples| {
            samples.time(|| contexts::execute(&mut client, one));
        }));
        commands.push(median(plan, |samples| samples.time(|| client.run_true())));
        eprintln!("{count} contexts are done");
    }
    let series = [("echo in one of them", executions), ("/bin/true", commands)];
    let title = "More idle contexts of bash";
    medians(title, "contexts alive", steps, series)
}

fn over_lifetimes(plan: &Plan, scratch: &Scratch) -> Panel {
    let host = Host::start(scratch, "lifetimes", "20000-59999");
    let mut client = host.program.connect();
    let steps = [0, 1_000, 5_000, 10_000];
    let [mut creates, mut deletes] = [(); 2].map(|()| Vec::new());
    let mut lived = 0;
    for lifetimes in steps {
        while lived < lifetimes {
            let id = create(&mut client, 1).remove(0);
            assert!(delete(&mut client, &id));
            lived += 1;
        }
        let (create, delete) = create_and_delete(plan, &mut client);
        lived += plan.samples / 4 + 10;
        creates.push(create);
        deletes.push(delete);
    }
    let series = [("create", creates), ("delete", deletes)];
    let title = "More sandboxes that were deleted";
    medians(title, "sandboxes made and deleted before", steps, series)
}

fn table(panels: &[Panel]) -> String {
    let mut out = format!("# How costs grow\n\n{}\n![curves](curves.svg)\n", machine());
    for panel in panels {
        let steps = panel.steps.join(" | ");
        let lines = "---:|".repeat(panel.steps.len());
        let _ = write!(
            out,
            "\n| {}: {} | {steps} |\n|---|{lines}\n",
            panel.across, panel.upwards
        );
        for series in &panel.series {
            let points: Vec<_> = series.points.iter().map(|value| rounded(*value)).collect();
            let _ = writeln!(out, "| {} | {} |", series.name, points.join(" | "));
        }
    }
    out
}
