//! A server inside, through the port proxy and directly. What is between the two is one more process
//! through which every byte goes: half the speed is what copying alone would leave on two processors.

use std::io::Write;

use super::client::{Client, find, request};
use super::load::rate;
use super::program::{Program, Scratch, free_port};
use super::report::{Figure, Limit, Samples, Table};
use super::{MIB, Plan};

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let size = plan.file_bytes;
    let server = Program::server(free_port());
    let port = free_port();
    let inside = Program::own(&["serve", &port.to_string()], port);
    let target = format!("/{size}");
    let proxied = format!("/v1/proxy/{port}{target}");
    drop(inside.connect());
    let mut client = server.connect();
    let [mut down, mut up, mut direct_down, mut direct_up] = [(); 4].map(|()| Samples::default());
    for _ in 0..plan.rounds {
        down.time(|| client.download(&proxied, "", 0, size));
        direct_down.time(|| inside.connect().download(&target, "", 0, size));
        up.time(|| client.upload(&proxied, 0, size));
        direct_up.time(|| inside.connect().upload(&target, 0, size));
    }
    for (what, ours, floor) in [("download", down, direct_down), ("upload", up, direct_up)] {
        let row = format!("through the port proxy: {what} of {} MiB, MB/s", size / MIB);
        let [ours, floor] = [ours, floor].map(|samples| samples.speeds(size));
        table.row(&row, ours, Some(floor), Limit::AtLeast(0.9), "without it");
    }

    let port = free_port();
    let responder = Program::responder(port, &scratch.reply_file());
    let target = format!("/v1/proxy/{port}/health");
    for (count, limit) in [(1, 0.7), (8, 0.5)] {
        let mut ours: Vec<_> = (0..count).map(|_| pinger(&server, &target)).collect();
        let mut direct: Vec<_> = (0..count).map(|_| pinger(&responder, "/health")).collect();
        let [mut rates, mut floor] = [(); 2].map(|()| Vec::new());
        for _ in 0..plan.rounds {
            rates.push(rate(&mut ours, plan.window));
            floor.push(rate(&mut direct, plan.window));
        }
        let [ours, floor] = [rates, floor].map(|rates| Figure::lowest(&rates));
        let row = format!("through the port proxy: small requests a second, {count} at once");
        table.row(&row, ours, Some(floor), Limit::AtLeast(limit), "without it");
    }
}

fn pinger(program: &Program, target: &str) -> impl FnMut() + Send {
    let mut client: Client = program.connect();
    let request = request("GET", target, "", 0, b"");
    move || {
        client.stream.write_all(&request).unwrap();
        assert!(find(client.short_reply(), br#""status":"ok""#).is_some());
    }
}
